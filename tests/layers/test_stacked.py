"""Layers that ``nnx.vmap`` stacked, run by ``nnx.scan`` and ``nnx.vmap``: as one layer after the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_te.layers import (
    Linear,
    parameter_axes,
    prepare_quantization,
    quantize_kernels,
    quantize_parameters,
    use_cached_kernels,
)
from jax_te.megatron import sharded_state_dict
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, autocast
from jax_te.sharding import constrain
from jax_te.training import create_train_state, make_train_step
from tests.support.meshes import use_mesh
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_same_rounding, draw
from tests.support.states import merging
from tests.support.toy import assert_same

EVERYTHING = nnx.Any(nnx.Param, QuantizerState)
LAYERS, HIDDEN = 2, 32
AXES = ("batch", "sequence", "hidden")
RECIPES = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling(amax_scope="whole"),  # as what is stored quantized has
    "block": Float8BlockScaling(),
}


class Block(nnx.Module):
    def __init__(self, key: jax.Array):
        rngs = nnx.Rngs(key)
        self.wi = Linear(HIDDEN, 2 * HIDDEN, parallel_mode="column", rngs=rngs)
        self.wo = Linear(2 * HIDDEN, HIDDEN, parallel_mode="row", rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.wo(self.wi(x))


class Stack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, *, stacked: bool):
        keys = jax.random.split(rngs.params(), LAYERS)
        self.layers = nnx.vmap(Block)(keys) if stacked else nnx.List([Block(key) for key in keys])

    def __call__(self, x: jax.Array) -> jax.Array:
        if isinstance(self.layers, Block):
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        for layer in self.layers:
            x = layer(x)
        return x


def side_by_side(stack: Stack, x: jax.Array) -> jax.Array:
    if isinstance(stack.layers, Block):
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(stack.layers, x)
    return jnp.stack([layer(x) for layer in stack.layers])


def one_after_the_other(stack: Stack, x: jax.Array) -> jax.Array:
    return stack(x)[None]


def of_layers(tree: Any) -> Any:
    """Of a `Stack`'s state or gradients, those of one layer after the other as those of a stack."""
    layers = nnx.to_pure_dict(tree).get("layers", {})
    return jax.tree.map(lambda *leaves: np.stack(leaves), *layers.values()) if 0 in layers else layers


@pytest.mark.slow
@pytest.mark.wide("block-no mesh-side_by_side", "delayed-explicit-one_after_the_other")
@pytest.mark.parametrize(
    ("recipe", "mode", "run"),
    [(recipe, "no mesh", side_by_side) for recipe in RECIPES]
    + [("delayed", mode, run) for mode in ("auto", "explicit") for run in (side_by_side, one_after_the_other)],
)
def test_values_and_gradients_are_those_of_each_layer(recipe: str, mode: str, run: Any) -> None:
    @nnx.jit
    def value_and_grad(stack: Stack, x: jax.Array, g: jax.Array) -> Any:
        def loss(stack: Stack) -> tuple[jax.Array, jax.Array]:
            y = run(merging(stack), x)
            return jnp.sum(y * g), y

        grads, y = nnx.grad(loss, argnums=nnx.DiffState(0, EVERYTHING), has_aux=True)(stack)
        return y, grads

    g = draw("g", (LAYERS if run is side_by_side else 1, 4, 8, HIDDEN), scale=0.1)
    with use_mesh(mode), autocast(RECIPES[recipe]):
        x = constrain(draw("x", (4, 8, HIDDEN)), AXES)
        ours, expected = (value_and_grad(Stack(nnx.Rngs(0), stacked=stacked), x, g) for stacked in (True, False))
    assert_same_rounding(ours[0], expected[0], TOLERANCE["float32"], what="y")
    found, wanted = of_layers(ours[1]), of_layers(expected[1])
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, leaf), other in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(found), strict=True):
        assert_same_rounding(other, leaf, TOLERANCE["float32"], what=jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["no mesh", "explicit"])
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_kernels_quantized_beforehand_are_those_of_each_layer(recipe: str, mode: str) -> None:
    with use_mesh(mode), autocast(RECIPES[recipe]):
        x = constrain(draw("x", (4, 8, HIDDEN)), AXES)
        plain, cached, stored = (Stack(nnx.Rngs(0), stacked=True) for _ in range(3))
        use_cached_kernels(cached, quantize_kernels(cached))
        quantize_parameters(stored)
        alone = quantize_parameters(Stack(nnx.Rngs(0), stacked=False)).layers
        values = np.stack([layer.wi.kernel.get_value().dequantize() for layer in alone])
        assert_bitwise(stored.layers.wi.kernel.get_value().dequantize(), values)
        assert stored.layers.wi.kernel.get_value().shape == (LAYERS, HIDDEN, 2 * HIDDEN)
        expected = nnx.jit(Stack.__call__)(plain, x)
        for stack in (cached, stored):
            assert_bitwise(nnx.jit(Stack.__call__)(stack, x), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "mode", "fp8_param"),
    [("block", "no mesh", True), ("delayed", "explicit", False)],
)
def test_train_steps_quantize_each_layers_kernel_by_itself(recipe: str, mode: str, fp8_param: bool) -> None:
    tx = optax.sgd(0.1)
    step = make_train_step(lambda stack, x, key: jnp.mean(jnp.square(stack(x) - 1.0)), tx, microbatches=2)
    reached = []
    with use_mesh(mode), autocast(RECIPES[recipe]):
        batch = constrain(draw("x", (8, 4, HIDDEN)), AXES)
        for stacked in (True, False):
            key = jax.random.key(0)
            state = create_train_state(lambda rngs, s=stacked: Stack(rngs, stacked=s), tx, key=key, fp8_param=fp8_param)
            for _ in range(2):
                state, metrics = step(state, batch)
            masters = of_layers(state.masters if fp8_param else state.params)
            reached.append((metrics["loss"], masters["wo"]["kernel"], of_layers(state.quantizers)))
    assert jax.tree.structure(reached[0]) == jax.tree.structure(reached[1])
    for ours, expected in zip(*map(jax.tree.leaves, reached), strict=True):
        assert_same_rounding(ours, expected, TOLERANCE["float32"])


@pytest.mark.costly
def test_a_state_made_later_is_that_of_each_layer() -> None:
    with autocast(RECIPES["delayed"]):
        expected = nnx.state(Stack(nnx.Rngs(0), stacked=True), QuantizerState)
    later = prepare_quantization(Stack(nnx.Rngs(0), stacked=True), RECIPES["delayed"])
    assert_same(nnx.state(later, QuantizerState), expected)


@pytest.mark.costly
@pytest.mark.wide("explicit")
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_they_are_split_over_the_mesh_as_each_layer_is(mode: str) -> None:
    split = {"wi": (None, "fsdp", "tensor"), "wo": (None, ("tensor", "fsdp"))}
    with use_mesh(mode):
        stack = Stack(nnx.Rngs(0), stacked=True)
        state = create_train_state(lambda rngs: Stack(rngs, stacked=True), optax.adam(0.1), key=jax.random.key(0))
        described = sharded_state_dict(stack)
        axes, mesh = parameter_axes(stack)["layers"], jax.sharding.get_mesh()
    assert axes["wi"]["kernel"].get_value() == (None, "fsdp", "ffn")
    for name, spec in split.items():
        kernels = [
            params["layers"][name]["kernel"] for params in (nnx.state(stack), state.params, state.opt_state[0].mu)
        ]
        for leaf in (*(kernel.get_value() for kernel in kernels), described[f"layers.{name}.kernel"]):
            assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P(*spec)), 3)
