"""Text generation with a KV cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp

from jax_te.config.internal import check_positive
from jax_te.models.gpt import Cache, GPTModel
from jax_te.sharding import auto_region
from jax_te.sharding.internal import whole_sequences
from jax_te.typing import Array


def generate(
    model: GPTModel,
    prompt: Array,
    *,
    steps: int,
    key: Array,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Array:
    """Continue a prompt, one token at a time.

    Generation runs under the ambient recipe. FP8 needs a batch that is a multiple of 16 and gains nothing on single
    tokens, so generate outside `autocast` (or inside ``autocast(None)``) unless you want FP8's numerics. On a mesh the
    batch and the heads are sharded, but no sequence: context and sequence parallelism are for training.

    Args:
        model: run without dropout.
        prompt: integers ``[b, s]``, ``s >= 1``, no padding.
        steps: number of tokens to generate.
        key: ``jax.random.key``. The same key gives the same tokens on every mesh, up to rounding of the logits.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample among the ``k`` most likely tokens only. None: all.

    Returns:
        ``[b, s + steps]`` in the dtype of ``prompt``: the prompt, then the generated tokens.

    Raises:
        ValueError: for an empty prompt, ``steps`` or ``top_k`` below 1, a negative temperature, or more tokens than
            the model's ``max_sequence_length``.

    >>> from flax import nnx
    >>> from jax_te.config import TransformerConfig
    >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    >>> model = GPTModel(config, vocab_size=100, max_sequence_length=16, rngs=nnx.Rngs(0))
    >>> generate(model, jnp.zeros((1, 3), jnp.int32), steps=5, key=jax.random.key(0)).shape
    (1, 8)
    """
    check_positive(steps=steps)
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(f"prompt must be [b, s] with at least one token, got shape {prompt.shape}")
    if not temperature >= 0.0:
        raise ValueError(f"temperature must be >= 0, got {temperature!r}")
    if top_k is not None:
        check_positive(top_k=top_k)
    total = prompt.shape[1] + steps
    if total > model.max_sequence_length:
        raise ValueError(
            f"prompt ({prompt.shape[1]}) and steps ({steps}) make {total} tokens, more than the model's "
            f"max_sequence_length {model.max_sequence_length}; shorten one of them"
        )
    greedy = temperature == 0.0  # static: the temperature is traced, so that another one compiles nothing anew
    with whole_sequences():
        return _generate(model, prompt, key, jnp.float32(temperature), steps=steps, top_k=top_k, greedy=greedy)


@partial(jax.jit, static_argnames=("steps", "top_k", "greedy"))
def _generate(
    model: GPTModel, prompt: Array, key: Array, temperature: Array, *, steps: int, top_k: int | None, greedy: bool
) -> Array:
    cached = cast(Callable[..., tuple[Array, Cache]], model)  # with a cache, a call returns a pair
    pick = partial(_sample, top_k=top_k, greedy=greedy)

    def next_token(logits: Array, index: Array) -> Array:
        # Logits are sharded over the vocabulary; sampling needs whole rows, and bits that no sharding changes.
        sample = auto_region(pick, ("batch",))
        return sample(logits, temperature, jax.random.fold_in(key, index)).astype(prompt.dtype)

    def step(carry: tuple[Array, Cache], index: Array) -> tuple[tuple[Array, Cache], Array]:
        token, cache = carry
        logits, cache = cached(token[:, None], cache=cache)
        following = next_token(logits, index)
        return (following, cache), following

    logits, cache = cached(prompt, cache=model.init_cache(prompt.shape[0], prompt.shape[1] + steps))
    first = next_token(logits, jnp.int32(0))
    _, rest = jax.lax.scan(step, (first, cache), jnp.arange(1, steps, dtype=jnp.int32))
    # The scan stacks its tokens in front, [steps - 1, b].
    concatenate = auto_region(lambda *tokens: jnp.concatenate([*tokens[:2], tokens[2].T], axis=1), ("batch", None))
    return concatenate(prompt, first[:, None], rest)


def _sample(logits: Array, temperature: Array, key: Array, *, top_k: int | None, greedy: bool) -> Array:
    """Return the next token of each sequence, ``[b]``, from ``logits [b, s, v]`` at the last position."""
    last = logits[:, -1].astype(jnp.float32)  # bf16 would tie many tokens
    if greedy:
        return jnp.argmax(last, axis=-1)
    if top_k is not None:
        smallest = jax.lax.top_k(last, min(top_k, last.shape[-1]))[0][:, -1:]
        last = jnp.where(last < smallest, -jnp.inf, last)
    return jax.random.categorical(key, last / temperature, axis=-1)
