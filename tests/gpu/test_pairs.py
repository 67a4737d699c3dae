"""Norms, activations, linear layers and MLPs: options and sizes in pairs, TE beside plain JAX.

Sizes are not multiples of 128, and of 16 only where FP8 needs that. Without a recipe the other side is plain JAX in
fp32 on the same values. Limits, as relative L2 distances:

- A result rounded once to bf16 or fp16, from operands that were rounded once more (a norm's scale): one epsilon;
  gradients, which are products of two such, two epsilons. In fp32 a sum of some thousand terms and the approximate exp,
  tanh and rsqrt of a GPU err by some units of 2^-23: 2^-17. GEMMs of fp32 have TF32 operands, 2^-11 each: 0.003.
- FP8 in a linear layer: the same FP8 operands on both sides, the sums of tensor cores (about 14 bits) and one rounding:
  0.01 and in fp32 or fp16 0.003, as in test_ops.
- MLPs: as in test_layers, since operands differ by a step of FP8 here and there. Both are as far from the MLP in fp32
  as FP8 makes them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_te.ops.pallas.operand as hopper
from jax_te.config import ACTIVATIONS, ActivationParams
from jax_te.ops import NormSpec, activation, layernorm
from jax_te.quantize import ROLES, init_gemm_state
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format
from tests.support.calls import dense, layernorm_mlp
from tests.support.numerics import draw, quick_jit, relative_l2, with_vjp
from tests.support.pairs import case_id, pairwise

pytestmark = pytest.mark.gpu

EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
GEMM_LIMIT = {"float32": 0.003, "bfloat16": 0.01, "float16": 0.003}
RECIPES = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=3),
    "delayed E4M3": DelayedScaling(amax_history_len=3, fp8_format=Format.E4M3),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
DTYPES = ("bfloat16", "float16", "float32")


def state(recipe: Any) -> dict[str, Any]:
    """A state that was at work, scales of some size, as an argument of a linear op; none for recipes without."""
    if recipe is None or not recipe.has_state:
        return {}
    fresh, past = init_gemm_state(recipe), {"x": 4.0, "kernel": 1.5, "grad": 0.5}
    history = {role: fresh[role]["amax_history"].at[0].set(past[role]) for role in ROLES}
    return {"state": {role: {**fresh[role], "amax_history": history[role]} for role in ROLES}}


def measured(fn: Any, arrays: dict[str, Any], g: jax.Array) -> dict[str, Any]:
    """Return the result and all gradients by name."""

    def run(*values: Any) -> Any:
        return fn(**dict(zip(arrays, values, strict=True)))

    y, gradients = quick_jit(lambda values, g: with_vjp(run, values, g))(tuple(arrays.values()), g)
    return {"y": y, **dict(zip(arrays, gradients, strict=True))}


def in_fp32(fn: Any, arrays: dict[str, Any], g: jax.Array) -> dict[str, Any]:
    with jax.default_matmul_precision("highest"):
        return measured(fn, {name: x.astype(jnp.float32) for name, x in arrays.items()}, g.astype(jnp.float32))


def check_states(actual: dict[str, Any], expected: dict[str, Any], rtol: float) -> None:
    """Compare the next states of recipes that have them, and leave the rest for other comparisons."""
    states = [side.pop("state", None) for side in (actual, expected)]
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol)


def check(actual: dict[str, Any], expected: dict[str, Any], limit: float, gradient_limit: float) -> None:
    """Fail where a distance is not within its limit; where it is nan, too."""
    assert actual.keys() == expected.keys()
    distances = {name: relative_l2(actual[name], value) for name, value in expected.items()}
    wrong = {name: x for name, x in distances.items() if not x < (limit if name == "y" else gradient_limit)}
    assert not wrong, wrong


def same_kind(gradients: dict[str, Any], arrays: dict[str, Any]) -> None:
    for name, array in arrays.items():
        assert (gradients[name].dtype, gradients[name].shape) == (array.dtype, array.shape), name


NORMS = pairwise(
    {
        "kind": ("layernorm", "rmsnorm"),
        "zero_centered": (False, True),
        "bias": (True, False),
        "hidden": (48, 127, 768, 1000, 1111, 2048, 5120, 12288),
        "rows": ((1,), (3, 5), (2, 129), (1000,)),
        "dtype": DTYPES,
        "scale_dtype": ("float32", "same"),
    },
    lambda c: not (c["bias"] and c["kind"] == "rmsnorm"),
)


@pytest.mark.parametrize("case", NORMS, ids=case_id)
def test_norm(case):
    dtype, h = case["dtype"], case["hidden"]
    scale_dtype = dtype if case["scale_dtype"] == "same" else case["scale_dtype"]
    norm = NormSpec(kind=case["kind"], zero_centered_gamma=case["zero_centered"])
    # Values of the compute dtype, since a scale is rounded to it.
    scale = draw("scale", (h,), dtype, scale=0.3, shift=0.0 if case["zero_centered"] else 1.0)
    arrays = {"x": draw("x", (*case["rows"], h), dtype, shift=0.3), "scale": scale.astype(scale_dtype)}
    if case["bias"]:
        arrays["bias"] = draw("bias", (h,), dtype).astype(scale_dtype)
    g = draw("g", arrays["x"].shape, dtype)

    def on(backend: str) -> Any:
        return lambda x, scale, bias=None: layernorm(x, scale, bias, norm=norm, backend=backend)

    actual = measured(on("te"), arrays, g)
    assert actual["y"].dtype == dtype
    same_kind(actual, arrays)
    limit = max(EPS[dtype], 2.0**-17)
    # RMSNorm's 1 + scale is rounded to the compute dtype.
    y_limit = 2 * limit if case["zero_centered"] else limit
    check(actual, in_fp32(on("xla"), arrays, g), y_limit, 2 * limit)


ALONE = pairwise(
    {
        "activation": tuple(ACTIVATIONS),
        "features": (1, 33, 100, 256, 1000, 1040),
        "rows": ((1,), (7,), (2, 65), (128,)),
        "dtype": DTYPES,
    }
)


def params_of(name: str) -> ActivationParams | None:
    return ActivationParams(limit=2.0, alpha=1.2, linear_offset=0.5) if name == "clamped_swiglu" else None


@pytest.mark.parametrize("case", ALONE, ids=case_id)
def test_activation(case):
    name, dtype = case["activation"], case["dtype"]
    arrays = {"z": draw("z", (*case["rows"], len(ACTIVATIONS[name]), case["features"]), dtype)}
    g = draw("g", (*case["rows"], case["features"]), dtype)

    def on(backend: str) -> Any:
        return lambda z: activation(z, name, params=params_of(name), backend=backend)

    actual = measured(on("te"), arrays, g)
    assert actual["y"].dtype == dtype
    same_kind(actual, arrays)
    limit = max(EPS[dtype], 2.0**-17)
    check(actual, in_fp32(on("xla"), arrays, g), limit, limit)


LINEAR = pairwise(
    {
        "inputs": (16, 48, 144, 272, 1040),
        "outputs": ((16,), (48,), (3, 48), (2, 3, 16), (1040,)),
        "rows": ((1,), (8,), (16,), (48,), (3, 20), (2, 100)),
        "recipe": tuple(RECIPES),
        "dtype": DTYPES,
        "bias": (True, False),
        "kernel_dtype": ("float32", "same"),
        "sink": (None, "float32", "same"),
    }
)


@pytest.mark.parametrize("case", LINEAR, ids=case_id)
def test_linear(case, monkeypatch):
    recipe, dtype = RECIPES[case["recipe"]], case["dtype"]
    own = {"same": dtype, "float32": "float32"}
    k, n = case["inputs"], case["outputs"]
    # Values of the compute dtype, since a kernel is rounded to it.
    arrays = {
        "x": draw("x", (*case["rows"], k), dtype, shift=0.3),
        "kernel": draw("kernel", (k, *n), dtype, scale=0.2).astype(own[case["kernel_dtype"]]),
    }
    if case["bias"]:
        arrays["bias"] = draw("bias", n, dtype).astype(own[case["kernel_dtype"]])
    if case["sink"]:
        arrays["grad_sink"] = jnp.zeros((k, *n), own[case["sink"]])
    g = draw("g", (*case["rows"], *n), dtype, scale=0.1)

    def on(backend: str) -> Any:
        return lambda x, kernel, bias=None, **arrays: dense(x, kernel, bias, **arrays, recipe=recipe, backend=backend)

    used = state(recipe)
    actual = measured(on("te"), arrays | used, g)
    assert actual["y"].dtype == dtype
    same_kind(actual, arrays)
    monkeypatch.setattr(hopper, "runs_here", lambda quantizer: False)  # the other side is plain JAX
    expected = in_fp32(on("xla"), arrays, g) if recipe is None else measured(on("xla"), arrays | used, g)
    check_states(actual, expected, 0.0)  # of the same operands
    if case["sink"]:  # its gradient is the kernel's
        assert not np.asarray(actual.pop("kernel")).any()
        expected.pop("kernel")
    check(actual, expected, GEMM_LIMIT[dtype], GEMM_LIMIT[dtype])


KINKED = ("relu", "clamped_linear", "clamped_silu")
MLPS = pairwise(
    {
        "activation": tuple(ACTIVATIONS),
        "recipe": tuple(RECIPES),
        "sizes": ((48, 112), (144, 272), (208, 48)),
        "rows": ((8,), (16,), (48,), (3, 20), (2, 100)),
        "dtype": DTYPES,
        "norm": ("layernorm", "rmsnorm", "zero centered"),
        "bias": (True, False),
    },
    # A value beside a kink of the activation may fall on its other side; biases keep all of them away from it.
    lambda c: c["bias"] or not any(part in KINKED for part in ACTIVATIONS[c["activation"]]),
)


def mlp_arrays(case: Any) -> tuple[dict[str, Any], Any]:
    (h, f), name, dtype = case["sizes"], case["activation"], case["dtype"]
    parts = len(ACTIVATIONS[name])
    kinked = any(part in KINKED for part in ACTIVATIONS[name])
    arrays = {
        "x": draw("x", (*case["rows"], h), dtype, shift=0.2),
        "scale": draw("scale", (h,), scale=0.3, shift=0.0 if case["norm"] == "zero centered" else 1.0),
        # With biases of -3 and 0.9, six standard deviations from the kinks at 0 and 2.
        "wi": draw("wi", (h, parts, f), scale=(0.15 if kinked else 1.0) * h**-0.5),
        "wo": draw("wo", (f, h), scale=f**-0.5),
    }
    if case["bias"]:
        spread = draw("wi_bias", (parts, f))
        arrays["wi_bias"] = jnp.where(spread > 0, 0.9, -3.0) if kinked else spread
        arrays["wo_bias"] = draw("wo_bias", (h,), scale=0.3)
        if case["norm"] == "layernorm":
            arrays["ln_bias"] = draw("ln_bias", (h,), scale=0.1)
    return arrays, draw("g", (*case["rows"], h), dtype, scale=0.1)


@pytest.mark.parametrize("case", MLPS, ids=case_id)
def test_mlp(case, monkeypatch):
    arrays, g = mlp_arrays(case)
    name, dtype = case["activation"], case["dtype"]
    kind = "layernorm" if case["norm"] == "layernorm" else "rmsnorm"
    norm = NormSpec(kind=kind, zero_centered_gamma=case["norm"] == "zero centered")

    def on(backend: str, recipe: Any) -> Any:
        def run(x, scale, wi, wo, wi_bias=None, wo_bias=None, ln_bias=None, state=(None, None)):
            return layernorm_mlp(
                x, scale, ln_bias, wi, wi_bias, wo, wo_bias, norm=norm, activation=name,
                activation_params=params_of(name), recipe=recipe, states=state, backend=backend,
            )  # fmt: skip

        return run

    recipe = RECIPES[case["recipe"]]
    used = {key: (value, value) for key, value in state(recipe).items()}
    actual = measured(on("te", recipe), arrays | used, g)
    assert actual["y"].dtype == dtype
    same_kind(actual, arrays)
    exact = in_fp32(on("xla", None), arrays, g)
    if recipe is None:
        check(actual, exact, 0.02, 0.02)
        return
    monkeypatch.setattr(hopper, "runs_here", lambda quantizer: False)  # the other side is plain JAX
    expected = measured(on("xla", recipe), arrays | used, g)
    check_states(actual, expected, 0.15)  # amaxes of what norm and activation round
    for array in exact:
        off, expected_off = (relative_l2(side[array], exact[array]) for side in (actual, expected))
        apart = relative_l2(actual[array], expected[array])
        said = f"{array}: te {off:.3f} and xla {expected_off:.3f} from exact, {apart:.3f} apart"
        assert off < 1.125 * expected_off + 0.02, said
        assert apart < max(0.12, np.hypot(off, expected_off)), said
