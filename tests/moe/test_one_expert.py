"""One expert, which takes every token with the probability 1, is the feed-forward block behind its norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.config import RouterOptions
from jax_te.layers import LayerNorm, LayerNormMLP, MoE
from jax_te.quantize import QuantizerState, write_back
from jax_te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    autocast,
)
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_close, draw, quick_jit
from tests.support.states import merging

B, S, H, F = 2, 24, 64, 96
X, G = draw("x", (B, S, H), shift=0.2), draw("g", (B, S, H), scale=0.1)
RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
ROLES = ("x", "kernel", "grad")
PARTS = ("kernel", "bias")


class Behind(nnx.Module):
    """A mixture of one expert behind a norm."""

    def __init__(self, activation: str):
        self.norm = LayerNorm(H, rngs=nnx.Rngs(0))
        options = RouterOptions(num_experts=1, topk=1, pre_softmax=True)
        self.moe = MoE(H, F, options, activation=activation, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.moe(self.norm(x))


def linears(model: Behind) -> list[tuple[str, Any]]:
    return [("wi", model.moe.experts.linear_fc1), ("wo", model.moe.experts.linear_fc2)]


def step(model: Any) -> tuple[jax.Array, Any]:
    """Output, and gradients of parameters and states; the model's states go on."""
    graph, params, states, rest = nnx.split(model, nnx.Param, QuantizerState, ...)

    @quick_jit
    def call(params: Any, states: Any, rest: Any) -> Any:
        def loss(params: Any, states: Any) -> Any:
            y = nnx.merge(graph, params, merging(states), rest)(X)
            return jnp.sum(y * G), y

        (_, y), (grads, new) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, states)
        return y, nnx.merge(graph, grads, new, rest)

    y, grads = call(params, states, rest)
    nnx.update(model, write_back(states, nnx.state(grads, QuantizerState)))
    return y, grads


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_one_expert_is_the_feed_forward_block(name: str) -> None:
    recipe = RECIPES[name]
    with autocast(recipe):
        block = LayerNormMLP(H, F, activation="swiglu", rngs=nnx.Rngs(1))
        expert = Behind("swiglu")
        for param in ("scale", "ln_bias", "wi_bias", "wo_bias"):
            value = getattr(block, param)
            value.set_value(draw(param, value.shape, scale=0.3, shift=float(param == "scale")))
        expert.norm.scale.set_value(block.scale[...])
        expert.norm.bias.set_value(block.ln_bias[...])
        for prefix, linear in linears(expert):
            for part in PARTS:
                getattr(linear, part).set_value(getattr(block, f"{prefix}_{part}")[...][None])
        for number in range(2):  # the second with scales of the first under delayed scaling
            (y, grads), (wanted, block_grads) = step(expert), step(block)
            what = f"step {number}"
            assert_close(y, wanted, 2 * TOLERANCE["float32"], what=f"{what}: y")
            for prefix, linear in linears(grads):
                for part in PARTS:
                    value = getattr(block_grads, f"{prefix}_{part}")[...]
                    found = getattr(linear, part)[...][0]
                    assert_close(found, value, 2 * TOLERANCE["float32"], what=f"{what}: {prefix}_{part}")
            for param, found in {"scale": grads.norm.scale, "ln_bias": grads.norm.bias}.items():
                value = getattr(block_grads, param)[...]
                assert_close(found[...], value, 2 * TOLERANCE["float32"], what=f"{what}: {param}")
    if isinstance(recipe, DelayedScaling):
        check_states(expert, block)


def check_states(expert: Behind, block: LayerNormMLP) -> None:
    for (prefix, linear), theirs in zip(linears(expert), (block.quantizers_1, block.quantizers_2), strict=True):
        ours, theirs = nnx.as_pure(linear.quantizers), nnx.as_pure(theirs)
        for role in ROLES:
            assert_bitwise(ours[role]["scale"][0], theirs[role]["scale"], what=f"{prefix}: scale of {role}")
            found, wanted = ours[role]["amax_history"][0], theirs[role]["amax_history"]
            assert_close(found, wanted, TOLERANCE["float32"], what=f"{prefix}: history of {role}")
