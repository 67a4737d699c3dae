"""Layers under recipes: state in, next state out as its gradient; on every mesh; with and without recomputation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.errors import QuantizerStateError
from jax_te.layers import LayerNormLinear, LayerNormMLP, Linear, TransformerLayer, prepare_quantization
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, Recipe, autocast
from jax_te.sharding import constrain
from tests.support import reference
from tests.support.meshes import shard
from tests.support.numerics import NO_DROPOUT, assert_bitwise, assert_close, draw, relative_l2
from tests.support.reference import Form, parameters, randomize
from tests.support.states import merging

B, S, H, F, N = 4, 8, 32, 64, 4
DELAYED, CURRENT = DelayedScaling(amax_history_len=3), Float8CurrentScaling()
AXES = ("batch", "sequence", "hidden")
LAYERS = {
    ("self_attention", "qkv", "quantizers"),
    ("self_attention", "proj", "quantizers"),
    ("layernorm_mlp", "quantizers_1"),
    ("layernorm_mlp", "quantizers_2"),
}


def build(recipe: Recipe | None = None) -> TransformerLayer:
    with autocast(recipe):
        return randomize(TransformerLayer(H, F, N, **NO_DROPOUT, rngs=nnx.Rngs(0)))


def states(model: Any) -> dict[Any, Any]:
    """Quantizer states by path."""
    return {
        (*path, name): nnx.as_pure(getattr(module, name))
        for path, module in nnx.iter_modules(model)
        for name in getattr(module, "kernels", {}).values()
        if getattr(module, name) is not None
    }


@jax.jit
def _run(layer: Any, x: jax.Array, g: jax.Array) -> Any:
    y, vjp = jax.vjp(lambda layer: merging(layer)(x), layer)
    return y, vjp(g)[0]


def output_and_gradient(layer: Any, x: jax.Array, g: jax.Array, recipe: Recipe | None) -> tuple[jax.Array, Any]:
    with autocast(recipe):
        return _run(layer, x, constrain(g, AXES))


@pytest.mark.costly("explicit")
@pytest.mark.wide("explicit")
def test_gradient_of_the_state_is_its_next_value(mesh_mode: str) -> None:
    layer = shard(build(DELAYED))
    x, g = draw("x", (B, S, H)), draw("g", (B, S, H))
    assert states(layer).keys() == LAYERS
    _, gradient = output_and_gradient(layer, x, g, DELAYED)
    after = states(gradient)
    assert after.keys() == LAYERS
    for path, state in after.items():
        for role in ("x", "kernel", "grad"):
            assert state[role]["scale"] == 1.0  # histories were empty
            assert state[role]["amax_history"][0] > 0.0, (path, role)
            assert state[role]["amax_history"][1:].tolist() == [0.0, 0.0]

    p = parameters(layer)
    qkv, mlp = after["self_attention", "qkv", "quantizers"], after["layernorm_mlp", "quantizers_2"]
    for state, kernel in ((qkv, p["self_attention"]["qkv"]["kernel"]), (mlp, p["layernorm_mlp"]["wo_kernel"])):
        assert_bitwise(state["kernel"]["amax_history"][0], jnp.abs(kernel).max(), what="kernel")
    scale, bias = p["self_attention"]["qkv"]["scale"], p["self_attention"]["qkv"]["ln_bias"]
    normed = reference.norm(np, np.float64(x), np.float64(scale), np.float64(bias), Form())
    assert_close(qkv["x"]["amax_history"][0], np.abs(normed).max(), 2.0**-20, what="x")
    assert_bitwise(mlp["grad"]["amax_history"][0], jnp.abs(g).max(), what="grad")

    nnx.update(layer, nnx.state(gradient, QuantizerState))
    _, gradient = output_and_gradient(layer, x, g, DELAYED)
    again = states(gradient)["layernorm_mlp", "quantizers_2"]
    assert_bitwise(again["grad"]["scale"], jnp.float32(57344.0) / jnp.abs(g).max(), what="E5M2 scale")
    assert_bitwise(again["kernel"]["scale"], jnp.float32(448.0) / mlp["kernel"]["amax_history"][0], what="E4M3 scale")
    assert again["kernel"]["amax_history"].tolist() == [mlp["kernel"]["amax_history"][0]] * 2 + [0.0]


@pytest.mark.slow
@pytest.mark.wide("current")
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_quantized_output_and_gradients_are_near_and_the_gemms_are_fp8(recipe: Recipe) -> None:
    layer, x, g = build(recipe), draw("x", (B, S, H)), draw("g", (B, S, H))
    if recipe.has_state:  # scales of 1 would lose small gradients: take those of a first step
        nnx.update(layer, nnx.state(output_and_gradient(layer, x, g, recipe)[1], QuantizerState))
    y, gradient = output_and_gradient(layer, x, g, recipe)
    exact_y, exact = output_and_gradient(build(), x, g, None)
    # E4M3 keeps 3 bits after the leading one: an error of up to 2**-4, about 2**-5.3 rms. The residual stream is exact.
    assert 1e-3 < relative_l2(y, exact_y) < 0.06
    for (path, a), (_, e) in zip(
        *(jax.tree_util.tree_leaves_with_path(parameters(m)) for m in (gradient, exact)), strict=True
    ):
        # Gradients also pass E5M2, 2 bits: 2**-4.3 rms, several times.
        assert relative_l2(a, e) < 0.25, jax.tree_util.keystr(path)
    with autocast(recipe):
        products = [line for line in _run.lower(layer, x, g).as_text().splitlines() if "dot_general" in line]
    # Four layers with three GEMMs each: forward E4M3 by E4M3, backward E5M2 by E4M3. The rest is the attention core.
    assert sum("f8E4M3FN" in line for line in products) == 12
    assert sum("f8E5M2" in line for line in products) == 8


@pytest.mark.slow
def test_recomputation_leaves_the_next_states_alone() -> None:
    layer, x, g = build(DELAYED), draw("x", (B, S, H)), draw("g", (B, S, H))

    @jax.jit
    def gradient(layer: Any, x: jax.Array) -> Any:
        run = jax.checkpoint(lambda layer, x: layer(x))
        return jax.grad(lambda layer: jnp.sum(run(merging(layer), x) * g))(layer)

    with autocast(DELAYED):
        recomputed = states(gradient(layer, x))
    for path, state in states(output_and_gradient(layer, x, g, DELAYED)[1]).items():
        for (name, a), (_, e) in zip(*map(jax.tree_util.tree_leaves_with_path, (recomputed[path], state)), strict=True):
            # Where a last bit differs before quantization, an amax behind it differs by an FP8 step of one operand.
            assert_close(a, e, 1e-3, what=f"{path} {name}")


@pytest.mark.costly("TransformerLayer")
@pytest.mark.parametrize(
    "layer",
    [
        Linear(H, 16, rngs=nnx.Rngs(0)),
        LayerNormLinear(H, 16, rngs=nnx.Rngs(0)),
        LayerNormLinear(H, 16, return_layernorm_output=True, rngs=nnx.Rngs(0)),
        LayerNormMLP(H, 16, rngs=nnx.Rngs(0)),
        LayerNormMLP(H, 16, return_layernorm_output=True, rngs=nnx.Rngs(0)),
        TransformerLayer(H, 64, 4, **NO_DROPOUT, rngs=nnx.Rngs(0)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_missing_state_names_the_remedy_and_the_remedy_works(layer: Any) -> None:
    x = draw("x", (2, 8, H))
    with autocast(DELAYED), pytest.raises(QuantizerStateError, match="prepare_quantization"):
        jax.eval_shape(layer, x)
    prepare_quantization(layer, DELAYED)
    with autocast(DELAYED):
        jax.eval_shape(layer, x)
    prepare_quantization(layer, None)
    assert not states(layer)
    with autocast(CURRENT):
        jax.eval_shape(layer, x)


@pytest.mark.costly
def test_state_of_an_unused_recipe_is_carried_unchanged() -> None:
    layer, x = build(DELAYED), draw("x", (B, S, H))
    for recipe in (None, CURRENT):
        _, gradient = output_and_gradient(layer, x, x, recipe)
        for path, state in states(gradient).items():
            jax.tree.map(assert_bitwise, state, states(layer)[path])


@pytest.mark.costly
def test_returning_the_norm_output_quantizes_all_the_same() -> None:
    x = draw("x", (2, 8, H))
    with autocast(CURRENT):
        for kind in (LayerNormLinear, LayerNormMLP):
            plain = randomize(kind(H, 64, rngs=nnx.Rngs(0)))
            both = randomize(kind(H, 64, return_layernorm_output=True, rngs=nnx.Rngs(0)))
            call = jax.jit(lambda layer, x: layer(x))
            assert (
                relative_l2(call(both, x)[0], call(plain, x)) < 0.01
            )  # a value at a rounding boundary may fall on either side


def test_sizes_that_fp8_cannot_take_are_named() -> None:
    with autocast(CURRENT), pytest.raises(ValueError, match="output size 24 must be a multiple of 16"):
        Linear(H, 24, rngs=nnx.Rngs(0))(draw("x", (16, H)))


def test_a_kernel_is_quantized_under_a_recipe_only() -> None:
    layer = Linear(16, 16, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="no recipe quantizes the kernel of Linear here"):
        layer.quantized("kernel", jnp.ones((16, 16)))
