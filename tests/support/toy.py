"""A small model with quantizer state of its own making, its batches, and its loss written without Flax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_te.quantize import as_float32, quantizer_variables
from jax_te.sharding import auto_region

HISTORY = 4
WIDTH = 16


@jax.custom_vjp
def watch(x, state):
    """``x`` over the state's scale. The state's gradient is its next value: amaxes of x and its cotangent in front."""
    return x / as_float32(state)["x"]["scale"]


def _watch_fwd(x, state):
    return watch(x, state), (x, state)


def _watch_bwd(residuals, grad):
    x, given = residuals
    state = as_float32(given)
    after = {"x": _push(state["x"], x), "grad": _push(state["grad"], grad)}
    after = jax.tree.map(lambda leaf, old: jax.lax.convert_element_type(leaf, old.dtype), after, given)
    return grad / state["x"]["scale"], after


def _push(state, x):
    amax = jnp.max(jnp.abs(x))
    history = jnp.concatenate([amax[None], state["amax_history"][:-1]])
    return {"scale": 1.0 + 0.125 * jnp.max(state["amax_history"]), "amax_history": history}


watch.defvjp(_watch_fwd, _watch_bwd)


def fresh_state():
    return {role: {"scale": jnp.ones(()), "amax_history": jnp.zeros((HISTORY,))} for role in ("x", "grad")}


class Toy(nnx.Module):
    """``w_out(gelu(w_in(watch(x)) + bias))``, kernels in ``dtype``, arithmetic in fp32."""

    def __init__(self, rngs: nnx.Rngs, dtype=jnp.float32, *, watched: bool = True, dropout: float = 0.0):
        def kernel(shape):
            return (jax.random.normal(rngs.params(), shape) / 4.0).astype(dtype)

        self.w_in = nnx.Param(kernel((WIDTH, 2 * WIDTH)), logical_axes=("fsdp", "ffn"))
        self.bias = nnx.Param(jnp.zeros((1, 2 * WIDTH)), logical_axes=(None, "ffn"))
        self.w_out = nnx.Param(kernel((2 * WIDTH, WIDTH)), logical_axes=("ffn", "fsdp"))
        self.quantizers = nnx.data(quantizer_variables(fresh_state() if watched else None))
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None

    def __call__(self, x):
        state = nnx.as_pure(self.quantizers)
        return auto_region(self._forward, ("batch", "hidden"))(x, nnx.state(self, nnx.Param), state)

    def _forward(self, x, params, state):
        if state is not None:
            x = watch(x, state)
        hidden = x @ params["w_in"][...].astype(jnp.float32)
        hidden = jax.nn.gelu(hidden + jnp.broadcast_to(params["bias"][...], hidden.shape))
        if self.dropout is not None:
            hidden = self.dropout(hidden)
        return hidden @ params["w_out"][...].astype(jnp.float32)


def loss_fn(model, batch, key):
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


def make_batch(seed: int, size: int = 16, scale: float = 1.0):
    rng = np.random.default_rng(seed)
    return {name: (scale * rng.normal(size=(size, WIDTH))).astype(np.float32) for name in ("x", "y")}


def plain_loss(params, scale, batch):
    """The loss of a `Toy` from a dict of fp32 arrays and the state's scale."""
    hidden = jax.nn.gelu(
        batch["x"] / scale @ params["w_in"] + jnp.broadcast_to(params["bias"], (len(batch["x"]), 2 * WIDTH))
    )
    return jnp.mean(jnp.square(hidden @ params["w_out"] - batch["y"]))


def values(tree):
    """Leaves of a tree as numpy arrays, typed keys as their data."""
    leaves = jax.tree.leaves(tree)
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves]


def assert_same(one, other):
    """Two trees agree in structure, dtypes and every bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(values(one), values(other), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == b.tobytes()
