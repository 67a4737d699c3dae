"""Recomputation on the ``te`` backend: loss, gradients and next quantizer states bitwise those without it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.layers import LayerNormLinear, LayerNormMLP, Linear
from jax_te.ops import use_backend
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, autocast
from jax_te.remat import remat, selective_recompute
from tests.support.numerics import assert_bitwise, draw, quick_jit
from tests.support.reference import randomize
from tests.support.states import merging

pytestmark = pytest.mark.te

B, S, H, F = 2, 16, 32, 64
X = draw("x", (B, S, H))


class Block(nnx.Module):
    """A transformer layer but for the attention core, which ``te`` has on GPUs only."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.qkv = LayerNormLinear(H, (3, H), parallel_mode="column", normalization="RMSNorm", rngs=rngs)
        self.proj = Linear(H, H, parallel_mode="row", rngs=rngs)
        self.mlp = LayerNormMLP(H, F, normalization="RMSNorm", activation="swiglu", rngs=rngs)

    def __call__(self, x: Any) -> Any:
        y: Any = self.qkv(x)
        projected: Any = self.proj(y[:, :, 0] * y[:, :, 1] + y[:, :, 2])
        mixed: Any = self.mlp(x + projected)
        return x + projected + mixed


def loss_and_gradient(way: str) -> Any:
    """The program and what it gives, of two blocks, which backward computes again in ``way``: a policy, or a module."""
    policy, modules = ("none", (way,)) if way in ("mlp", "layernorm", "activation") else (way, ())
    with autocast(DelayedScaling(amax_history_len=2)), use_backend("te"):
        blocks = [randomize(Block(nnx.Rngs(seed))) for seed in range(2)]

        def loss(parts: Any, x: jax.Array) -> jax.Array:
            with selective_recompute(*modules):
                for graphdef, state in zip(graphdefs, parts, strict=True):
                    x = remat(lambda x, state, g=graphdef: nnx.merge(g, state)(x), x, merging(state), policy=policy)
            return jnp.mean(jnp.square(x))

        graphdefs, parts = zip(*map(nnx.split, blocks), strict=True)
        run = jax.value_and_grad(loss, argnums=(0, 1))
        return str(jax.make_jaxpr(run)(parts, X)), quick_jit(run)(parts, X)


@functools.cache
def without() -> Any:
    return loss_and_gradient("none")


@pytest.mark.parametrize("way", ["full", "save_gemms", "save_quantized", "mlp", "layernorm", "activation"])
def test_nothing_changes(way: str) -> None:
    again, found = loss_and_gradient(way)
    plain, expected = without()
    assert "remat" in again
    assert "remat" not in plain
    for (path, a), (_, e) in zip(*map(jax.tree_util.tree_leaves_with_path, (found, expected)), strict=True):
        assert_bitwise(a, e, what=jax.tree_util.keystr(path))


def test_every_operand_of_the_comparison_is_quantized() -> None:
    _, (loss, (parts, dx)) = without()
    assert loss > 0.0
    assert jnp.any(dx != 0.0)
    for part in parts:
        states = nnx.to_flat_state(nnx.filter_state(part, QuantizerState))
        histories = [variable for path, variable in states if path[-1] == "amax_history"]
        assert len(histories) == 4 * 3
        assert all(history[0] > 0.0 for history in histories)
