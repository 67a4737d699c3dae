import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.config import ActivationParams
from jax_te.ops import NormSpec
from jax_te.quantize import ROLES, init_gemm_state
from jax_te.recipe import DelayedScaling, Float8CurrentScaling
from tests.support import oracles
from tests.support.calls import layernorm_mlp
from tests.support.numerics import (
    TOLERANCE,
    assert_bitwise,
    assert_close,
    assert_same_rounding,
    draw,
    relative_l2,
    value_and_vjp,
)

NAMES = ("x", "scale", "ln_bias", "wi", "wi_bias", "wo", "wo_bias")


def inputs(dtype, activation="gelu", *, kind="layernorm", bias=True, h=32, f=48):
    parts = len(oracles.COMPONENTS[activation])
    x, g = draw("x", (2, 16, h), dtype, shift=0.3), draw("g", (2, 16, h), dtype, scale=0.1)
    scale, ln_bias = draw("scale", (h,), scale=0.3, shift=1.0), draw("ln_bias", (h,), scale=0.3)
    wi, wo = draw("wi", (h, parts, f), scale=0.3), draw("wo", (f, h), scale=0.2)
    wi_bias, wo_bias = (
        (draw("wi_bias", (parts, f), scale=0.3), draw("wo_bias", (h,), scale=0.3)) if bias else (None, None)
    )
    return (x, scale, ln_bias if kind == "layernorm" else None, wi, wi_bias, wo, wo_bias), g


def compare(y, gradients, expected, check, tolerance):
    check(y, expected["y"], tolerance, what="y")
    for name, gradient in zip(NAMES, gradients, strict=True):
        if gradient is not None:
            # A sum over rows holds a bit of every row that a flipped rounding changed.
            summed = check is assert_same_rounding and gradient.ndim == 1
            check(gradient, expected[name], 1e-3 if summed else tolerance, what=f"d{name}")
            assert gradient.dtype == (y.dtype if name == "x" else jnp.float32)


@pytest.mark.wide(
    "gelu-layernorm-True-float32",
    "silu-layernorm-False-float32",
    "swiglu-rmsnorm-False-float32",
    "glu-layernorm-True-float32",
    "swiglu-rmsnorm-False-bfloat16",
)
@pytest.mark.parametrize(
    ("activation", "kind", "bias", "dtype"),
    [
        ("gelu", "layernorm", True, "float32"),
        ("relu", "rmsnorm", True, "float32"),
        ("silu", "layernorm", False, "float32"),
        ("geglu", "layernorm", True, "float32"),
        ("reglu", "layernorm", True, "float32"),
        ("swiglu", "rmsnorm", False, "float32"),
        ("srelu", "rmsnorm", False, "float32"),
        ("glu", "layernorm", True, "float32"),
        ("gelu", "layernorm", True, "bfloat16"),
        ("swiglu", "rmsnorm", False, "bfloat16"),
    ],
)
def test_without_a_recipe(activation, kind, bias, dtype):
    args, g = inputs(dtype, activation, kind=kind, bias=bias)

    def run(*a):
        return layernorm_mlp(*a, norm=NormSpec(kind=kind), activation=activation, backend="xla")

    y, gradients = value_and_vjp(run, args, g)
    rounded = (*args[:3], *(None if a is None else a.astype(dtype) for a in args[3:]))
    plain = (oracles.Unquantized(), oracles.Unquantized())
    expected = oracles.norm_mlp_layer(plain, *rounded, g, name=activation, kind=kind)
    assert [gradient is None for gradient in gradients] == [a is None for a in args]
    # Up to four tensors in the compute dtype lie between an input and a gradient: roundings add up like 2 of them.
    compare(y, gradients, expected, assert_close, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=["none", "current"])
def test_parameters_of_the_activation(recipe):
    args, g = inputs(jnp.float32, "clamped_swiglu")
    numbers = {"limit": 1.5, "alpha": 1.2}

    def run(*a):
        params = ActivationParams(**numbers)
        return layernorm_mlp(*a, activation="clamped_swiglu", activation_params=params, recipe=recipe, backend="xla")

    y, gradients = value_and_vjp(run, args, g)
    q = tuple(oracles.Unquantized() if recipe is None else oracles.Scales() for _ in range(2))
    expected = oracles.norm_mlp_layer(q, *args, g, name="clamped_swiglu", params=numbers)
    check = assert_close if recipe is None else assert_same_rounding
    compare(y, gradients, expected, check, 4 * TOLERANCE["float32"])


def states_at_work(recipe):
    """States whose scales suit `inputs`, and those scales."""
    scales = ({"x": 100.0, "kernel": 300.0, "grad": 4000.0}, {"x": 130.0, "kernel": 500.0, "grad": 20000.0})
    fresh = init_gemm_state(recipe)
    return tuple(
        {role: {**fresh[role], "scale": jnp.float32(values[role])} for role in ROLES} for values in scales
    ), scales


@pytest.mark.costly("swiglu-delayed")
@pytest.mark.wide
@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_fp8(recipe, activation):
    args, g = inputs(jnp.float32, activation)
    chosen = Float8CurrentScaling() if recipe == "current" else DelayedScaling(amax_history_len=2)
    states, scales = (None, (None, None)) if recipe == "current" else states_at_work(chosen)

    def run(*a):
        return layernorm_mlp(*a[:-1], activation=activation, recipe=chosen, states=a[-1], backend="xla")

    y, (*gradients, next_states) = value_and_vjp(run, (*args, states), g)
    q = tuple(oracles.Scales(fixed=fixed) for fixed in scales)
    expected = oracles.norm_mlp_layer(q, *args, g, name=activation)
    compare(y, gradients, expected, assert_same_rounding, 4 * TOLERANCE["float32"])
    plain = oracles.norm_mlp_layer((oracles.Unquantized(),) * 2, *args, g, name=activation)
    assert all(
        relative_l2(gradient, plain[name]) > 0.01
        for name, gradient in zip(NAMES, gradients, strict=True)
        if name != "wo_bias"
    )
    if recipe == "current":
        assert next_states is None
        return
    for layer, (state, oracle) in enumerate(zip(next_states, q, strict=True)):
        for role in ROLES:
            assert_bitwise(state[role]["scale"], np.float32(scales[layer][role]), what=role)
            seen, expected_amax = np.asarray(state[role]["amax_history"])[0], oracle.seen[role]
            if role == "kernel" or (layer, role) == (1, "grad"):  # given tensors: exact
                assert_bitwise(seen, expected_amax, what=f"{layer} {role}")
            else:  # computed ones
                np.testing.assert_allclose(seen, expected_amax, rtol=1e-5, err_msg=f"{layer} {role}")


def test_each_state_belongs_to_its_own_layer():
    """Transformer Engine's `layernorm_mlp` quantizes FFN2's output gradient with FFN1's quantizer and the other way
    round; this op does not.
    """
    args, g = inputs(jnp.float32)
    recipe = DelayedScaling(amax_history_len=1)
    states = (init_gemm_state(recipe),) * 2

    def run(states):
        return layernorm_mlp(*args, recipe=recipe, states=states, backend="xla")

    _, ((first, second),) = value_and_vjp(run, (states,), g)
    assert_bitwise(
        second["grad"]["amax_history"][:1], np.max(np.abs(np.asarray(g)))[None], what="wo's output gradient is the op's"
    )
    assert float(first["grad"]["amax_history"][0]) != float(second["grad"]["amax_history"][0])
    assert_bitwise(first["kernel"]["amax_history"][:1], np.max(np.abs(np.asarray(args[3])))[None])
    assert_bitwise(second["kernel"]["amax_history"][:1], np.max(np.abs(np.asarray(args[5])))[None])


def test_errors():
    args, _ = inputs(jnp.float32)
    x, scale, ln_bias, wi, wi_bias, wo, wo_bias = args
    with pytest.raises(ValueError, match=r"wi_kernel must be \[h, 2, f\] for 'swiglu', got \(32, 1, 48\)"):
        layernorm_mlp(*args, activation="swiglu")
    with pytest.raises(ValueError, match=r"wi_kernel must be \[h, 1, f\] for 'gelu', got \(32, 48\)"):
        layernorm_mlp(x, scale, ln_bias, wi[:, 0], None, wo, None)
    with pytest.raises(ValueError, match="unknown activation 'tanh'"):
        layernorm_mlp(*args, activation="tanh")
    with pytest.raises(ValueError, match="'gelu' has no parameters"):
        layernorm_mlp(*args, activation_params=ActivationParams())
    with pytest.raises(ValueError, match=r"layernorm_mlp \(wo\): input \(2, 16, 48\) and kernel \(32, 32\)"):
        layernorm_mlp(x, scale, ln_bias, wi, wi_bias, wo[:32], wo_bias)
    with pytest.raises(
        ValueError, match=r"layernorm_mlp \(wi\): bias \(48,\) must have the kernel's output shape \(1, 48\)"
    ):
        layernorm_mlp(x, scale, ln_bias, wi, wi_bias[0], wo, wo_bias)
    with pytest.raises(ValueError, match="RMS norm has no bias"):
        layernorm_mlp(*args, norm=NormSpec(kind="rmsnorm"))
    with pytest.raises(
        ValueError, match=r"layernorm_mlp \(wi\) under recipe 'current'.* output size 40 must be a multiple of 16"
    ):
        layernorm_mlp(*inputs(jnp.float32, f=40)[0], recipe=Float8CurrentScaling())
    with pytest.raises(ValueError, match="prepare_quantization"):
        layernorm_mlp(*args, recipe=DelayedScaling())
