"""Linear, LayerNormLinear, LayerNormMLP: what they return, their parameters and their logical axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import ActivationParams
from jax_te.layers import LayerNormLinear, LayerNormMLP, Linear, parameter_axes
from jax_te.quantize import QuantizerState
from jax_te.recipe import RECIPES, autocast, recipe_from_name
from tests.support import reference
from tests.support.numerics import assert_bitwise, assert_close, draw, value_and_vjp
from tests.support.reference import ROUNDOFF, Form, parameters, randomize, value_and_vjp64

H, F = 16, 24
TOLERANCE = 4 * ROUNDOFF["float32"] * F**0.5  # up to four sums of F products in a row


def check(model: Any, formula: Any, x: jax.Array) -> None:
    """Output and all gradients of a layer, for a random output gradient."""
    y = jax.eval_shape(model, x)
    g = draw("g", y.shape)
    actual_y, (d_model, dx) = value_and_vjp(lambda model, x: model(x), (model, x), g)
    y, (dp, expected_dx) = value_and_vjp64(formula, (parameters(model), x), g)
    assert_close(actual_y, y, TOLERANCE, what="output")
    assert_close(dx, expected_dx, TOLERANCE, what="x")
    for name, expected in dp.items():
        assert_close(parameters(d_model)[name], expected, TOLERANCE, what=name)


@pytest.mark.costly("True")
@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_the_matrix_product_with_several_output_axes(bias: bool) -> None:
    layer = randomize(Linear(H, (3, F), bias, rngs=nnx.Rngs(0)))
    assert (layer.bias is None) != bias
    check(layer, lambda p, x: jnp.einsum("bsh,hcf->bscf", x, p["kernel"]) + p.get("bias", 0.0), draw("x", (2, 4, H)))


def test_layernorm_linear_normalizes_first() -> None:
    form = Form(epsilon=1e-3, zero_centered=True)
    layer = randomize(LayerNormLinear(H, F, 1e-3, zero_centered_gamma=True, rngs=nnx.Rngs(0)))

    def formula(p: Any, x: Any) -> Any:
        return reference.norm(jnp, x, p["scale"], p["ln_bias"], form) @ p["kernel"] + p["bias"]

    check(layer, formula, draw("x", (6, H)))


def test_layernorm_mlp_follows_the_formula() -> None:
    form = Form(rms=True, activation="swiglu")
    layer = randomize(LayerNormMLP(H, F, activation="swiglu", normalization="RMSNorm", rngs=nnx.Rngs(0)))
    formula = lambda p, x: reference.mlp_block(jnp, p, reference.norm(jnp, x, p["scale"], None, form), form)  # noqa: E731
    check(layer, formula, draw("x", (2, 4, H)))


@pytest.mark.costly
def test_layernorm_mlp_passes_the_numbers_of_its_activation_on() -> None:
    params = ActivationParams(limit=0.5, alpha=1.1, linear_offset=0.25)
    options: dict[str, Any] = {"activation": "clamped_swiglu", "normalization": "RMSNorm", "rngs": nnx.Rngs(0)}

    def formula(p: Any, x: Any) -> Any:
        a = jnp.einsum("bsh,hcf->bscf", reference.norm(jnp, x, p["scale"], None, Form(rms=True)), p["wi_kernel"])
        gate, linear = jnp.minimum(a[..., 0, :] + p["wi_bias"][0], 0.5), a[..., 1, :] + p["wi_bias"][1]
        z = gate / (1.0 + jnp.exp(-1.1 * gate)) * (jnp.clip(linear, -0.5, 0.5) + 0.25)
        return z @ p["wo_kernel"] + p["wo_bias"]

    check(randomize(LayerNormMLP(H, F, activation_params=params, **options)), formula, draw("x", (2, 4, H)))
    x, both = (
        draw("x", (2, 4, H)),
        randomize(LayerNormMLP(H, F, activation_params=params, return_layernorm_output=True, **options)),
    )
    y, _ = both(x)
    assert_close(y, randomize(LayerNormMLP(H, F, activation_params=params, **options))(x), TOLERANCE)


def test_arguments_that_tune_cuda_change_nothing() -> None:
    x = draw("x", (2, 4, H))
    tuned = LayerNormMLP(
        H, F, seq_length=4, micro_batch_size=2, fuse_wgrad_accumulation=True, tp_group="tensor", rngs=nnx.Rngs(0)
    )
    assert tuned.fuse_wgrad_accumulation
    assert_bitwise(tuned(x), LayerNormMLP(H, F, rngs=nnx.Rngs(0))(x))
    for kind in (Linear, LayerNormLinear):
        tuned = kind(H, F, fuse_wgrad_accumulation=True, tp_group="tensor", rngs=nnx.Rngs(0))
        assert tuned.fuse_wgrad_accumulation
        assert_bitwise(tuned(x), kind(H, F, rngs=nnx.Rngs(0))(x))


def test_return_bias_leaves_the_addition_to_the_caller() -> None:
    x = draw("x", (4, H), jnp.bfloat16)
    applied = randomize(Linear(H, F, rngs=nnx.Rngs(0)))
    y, bias = randomize(Linear(H, F, return_bias=True, rngs=nnx.Rngs(0)))(x)
    assert bias.dtype == jnp.bfloat16
    assert_close(y + bias[None], applied(x), 2 * ROUNDOFF["bfloat16"])  # one more rounding, of y
    x = draw("x", (4, H))
    for kind in (LayerNormLinear, LayerNormMLP):
        y, bias = randomize(kind(H, F, return_bias=True, rngs=nnx.Rngs(0)))(x)
        assert_close(y + bias[None], randomize(kind(H, F, rngs=nnx.Rngs(0)))(x), TOLERANCE)
    assert Linear(H, F, False, return_bias=True, rngs=nnx.Rngs(0))(x)[1] is None


def test_layers_return_the_norm_output_last() -> None:
    x = draw("x", (2, 4, H))
    options = {"return_layernorm_output": True, "return_bias": True, "rngs": nnx.Rngs(0)}
    for layer, plain in (
        (LayerNormLinear(H, F, **options), LayerNormLinear(H, F, rngs=nnx.Rngs(0))),
        (LayerNormMLP(H, F, activation="geglu", **options), LayerNormMLP(H, F, activation="geglu", rngs=nnx.Rngs(0))),
    ):
        y, bias, normed = randomize(layer)(x)
        p = {name: np.float64(value) for name, value in parameters(layer).items()}
        assert_close(normed, reference.norm(np, np.float64(x), p["scale"], p["ln_bias"], Form()), TOLERANCE)
        assert_close(y + bias[None, None], randomize(plain)(x), TOLERANCE)


@pytest.mark.parametrize(
    ("mode", "kernel", "bias"),
    [
        (None, ("fsdp", "components", None), ("components", None)),
        ("column", ("fsdp", "components", "ffn"), ("components", "ffn")),
        ("Column", ("fsdp", "components", "ffn"), ("components", "ffn")),
        ("row", ("ffn_fsdp", "components", None), ("components", None)),
    ],
)
def test_parallel_mode_is_a_choice_of_logical_axes(mode: str | None, kernel: Any, bias: Any) -> None:
    layer = Linear(H, (2, F), parallel_mode=mode, rngs=nnx.Rngs(0))
    assert nnx.to_pure_dict(parameter_axes(layer)) == {"kernel": kernel, "bias": bias}


def test_explicit_axes_override_the_mode() -> None:
    layer = Linear(H, F, kernel_axes=("heads", "fsdp"), rngs=nnx.Rngs(0))
    assert (layer.kernel_axes, layer.feature_axes) == (("heads", "fsdp"), ("hidden",))
    assert Linear(H, F, out_axes=("vocab",), rngs=nnx.Rngs(0)).feature_axes == ("vocab",)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda r: Linear(0, F, rngs=r), "in_features must be an integer >= 1, got 0"),
        (lambda r: Linear(H, (2, -1), rngs=r), r"out_features\[1\] must be an integer >= 1, got -1"),
        (lambda r: Linear(H, F, parallel_mode="COLUMN", rngs=r), "also 'Column' or 'Row'.*got 'COLUMN'"),
        (
            lambda r: Linear(H, F, parallel_mode="diagonal", rngs=r),
            "must be None, 'column' or 'row' .*, got 'diagonal'",
        ),
        (lambda r: Linear(H, F, kernel_axes=("fsdp",), rngs=r), r"1 logical axes .* of shape \(16, 24\)"),
        (lambda r: Linear(H, F, params_dtype=jnp.float8_e4m3fn, rngs=r), "params_dtype must be one of float32"),
        (lambda r: LayerNormLinear(H, F, normalization="L2", rngs=r), "normalization must be one of"),
        (lambda r: LayerNormMLP(H, 0, rngs=r), "ffn_hidden_size must be an integer >= 1"),
        (lambda r: LayerNormMLP(H, F, activation="tanh", rngs=r), "unknown activation 'tanh'; allowed: gelu, geglu"),
        (lambda r: LayerNormMLP(H, F, activation_params=ActivationParams(), rngs=r), "'gelu' has no parameters"),
        (lambda r: LayerNormMLP(H, F, seq_length=0, rngs=r), "seq_length must be an integer >= 1, got 0"),
        (lambda r: LayerNormMLP(H, F, micro_batch_size=-2, rngs=r), "micro_batch_size must be an integer >= 1"),
        (lambda r: Linear(H, F, rngs=r)(jnp.ones((2, F))), r"\(2, 24\) and kernel \(16, 24\) do not go together"),
    ],
)
def test_bad_arguments_say_what_is_allowed(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(nnx.Rngs(0))


@pytest.mark.costly(
    "LayerNormMLP-nvfp4",
    slow=(
        "Linear-nvfp4",
        "LayerNormMLP-mxfp8",
        "Linear-block",
        "LayerNormMLP-block",
        "LayerNormLinear-nvfp4",
        "Linear-mxfp8",
        "LayerNormMLP-current",
        "LayerNormLinear-block",
    ),
)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [Linear, LayerNormLinear, LayerNormMLP])
def test_no_tokens_give_no_output_and_gradients_of_zero(kind: Any, recipe: str) -> None:
    with autocast(recipe_from_name(recipe)):
        layer, x = kind(32, 32, rngs=nnx.Rngs(0)), jnp.zeros((2, 0, 32))
        y, (d_layer, dx) = value_and_vjp(lambda layer, x: layer(x), (layer, x), jnp.zeros((2, 0, 32)))
    assert y.shape == dx.shape == (2, 0, 32)
    gradients = nnx.state(d_layer, nnx.Param)
    assert not any(np.any(gradient) for gradient in jax.tree.leaves(gradients))
    # Scales are those of a tensor of zeros: nothing is divided by an amax of 0.
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(nnx.state(d_layer, QuantizerState)))
