"""A GPT of Transformer Engine's own layers, and its train step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from transformer_engine.jax.flax import LayerNorm

from jax_te.bench.peers.te_jax import RawSizes, raw_layer
from jax_te.typing import Array, PyTree


class RawGPT(nn.Module):
    """Tokens ``[b, s]`` to bf16 logits ``[b, s, v]``: te.jax's layers one after the other, and a tied head.

    GPT-2's form, causal, without dropout, everything in bf16. Initialize and apply it inside `raw_context`.

    Args:
        layers, hidden, heads, ffn, vocabulary: sizes.
        length: the longest sequence.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int
    length: int

    @nn.compact
    def __call__(self, tokens: Array) -> Array:
        init = nn.initializers.normal(0.02)
        table = self.param("embedding", init, (self.vocabulary, self.hidden), jnp.bfloat16)
        positions = self.param("position_embedding", init, (self.length, self.hidden), jnp.bfloat16)
        # Logits in bf16 and the head tied, as in jax_te's GPT in the same form.
        x = table[tokens] + positions[None, : tokens.shape[1]]
        for _ in range(self.layers):
            x = raw_layer(RawSizes(self.hidden, self.heads, self.ffn))(x)
        x = LayerNorm(dtype=jnp.bfloat16)(x)
        return jnp.einsum("bsh,vh->bsv", x, table)


def raw_train_step(model: RawGPT, tx: optax.GradientTransformation, *, key: Array) -> tuple[Callable[[], PyTree], Any]:
    """Return ``(create() -> state, step(state, tokens) -> (state, loss))`` as a user of te.jax would write them.

    The state is fp32 masters, which are rounded to bf16 for each step, the state of ``tx``, and the scaling state of
    the recipe, whose gradient is its next value. The step is jitted and takes its state over; ``tokens`` are
    ``[b, s + 1]``, and the loss is the mean over ``s`` positions, of fp32 logits. Call both inside `raw_context`.
    """

    def create() -> PyTree:
        variables = dict(nn.unbox(model.init({"params": key}, jnp.zeros((1, model.length), jnp.int32))))
        masters = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), variables.pop("params"))
        with jax.numpy_dtype_promotion("standard"):  # optax relies on it; a caller may have set "strict"
            return masters, tx.init(masters), variables

    def loss_fn(params: PyTree, scaling: PyTree, tokens: Array) -> Array:
        logits: Any = model.apply({"params": params, **scaling}, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:])
        return jnp.mean(losses)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: PyTree, tokens: Array) -> tuple[PyTree, Array]:
        masters, opt_state, scaling = state
        # The scaling state is differentiated, too: TE returns its next value as its gradient.
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), masters)
        with jax.numpy_dtype_promotion("standard"):
            differentiate = jax.value_and_grad(loss_fn, argnums=(0, 1), allow_int=True)
            loss, (grads, scaling) = differentiate(params, scaling, tokens)
            grads = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), grads)
            updates, opt_state = tx.update(grads, opt_state, masters)
            return (optax.apply_updates(masters, updates), opt_state, scaling), loss

    return jax.jit(create), step
