"""Which GEMM runs in which precision, what backward keeps, and where a kernel's gradient goes."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te import ops
from jax_te.ops import layernorm
from jax_te.quantize import ROLES, frozen_scales, init_gemm_state
from jax_te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.support.calls import dense, layernorm_dense, layernorm_mlp
from tests.support.cases import make_case
from tests.support.numerics import (
    TOLERANCE,
    assert_bitwise,
    assert_close,
    assert_same_rounding,
    compiled_text,
    draw,
    equations,
    quick_jit,
    relative_l2,
    with_vjp,
)

KINDS = {
    "delayed": functools.partial(DelayedScaling, amax_history_len=2),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}
READERS = {"x": (0, 2), "kernel": (0, 1), "grad": (1, 2)}


def run_dense(recipe, dtype=jnp.bfloat16, **options):
    case = make_case("dense").astype(dtype)
    x, kernel, bias = (case.args[key] for key in ("x", "kernel", "bias"))

    def call(x, kernel, bias, state):
        return dense(x, kernel, bias, recipe=recipe, state=state, backend="xla", **options)

    return quick_jit(lambda *a: with_vjp(call, *a))((x, kernel, bias, case.states(recipe)), case.g)


@functools.cache
def reference(kind):
    return run_dense(KINDS[kind]() if kind else None)


@pytest.mark.costly(
    "flags1-current", slow=("flags0-delayed", "flags2-block", "flags4-current", "flags5-block", "flags3-delayed")
)
@pytest.mark.wide
@pytest.mark.parametrize("kind", ["delayed", "current", "block"])
@pytest.mark.parametrize("flags", list(itertools.product((False, True), repeat=3)))
def test_each_gemm_alone_is_in_high_precision(kind, flags):
    recipe = KINDS[kind](override_linear_precision=flags)
    y, (dx, dkernel, dbias, next_state) = run_dense(recipe)
    (plain_y, (plain_dx, plain_dkernel, plain_dbias, _)), quantized = reference(""), reference(kind)
    quantized_y, (quantized_dx, quantized_dkernel, _, quantized_state) = quantized
    for name, overridden, actual, plain, other in (
        ("fprop", flags[0], y, plain_y, quantized_y),
        ("dgrad", flags[1], dx, plain_dx, quantized_dx),
        ("wgrad", flags[2], dkernel, plain_dkernel, quantized_dkernel),
    ):
        assert_bitwise(actual, plain if overridden else other, what=name)
        assert relative_l2(plain, other) > 0.01
    assert_bitwise(dbias, plain_dbias)
    if kind != "delayed":
        assert next_state is None
        return
    for role in ROLES:
        read = not all(flags[gemm] for gemm in READERS[role])
        expected = quantized_state[role]
        assert_bitwise(next_state[role]["scale"], expected["scale"], what=role)
        newest = expected["amax_history"][0] if read else jnp.float32(0)
        assert_bitwise(next_state[role]["amax_history"], expected["amax_history"].at[0].set(newest), what=role)


@pytest.mark.costly("flags2", slow=("flags0", "flags1"))
@pytest.mark.parametrize(
    "flags", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)]
)
def test_fused_ops_are_made_of_their_parts(flags):
    """`layernorm_dense` and `layernorm_mlp` with a GEMM in high precision give what their parts give one by one."""
    recipe = Float8BlockScaling(override_linear_precision=flags)
    options = {"recipe": recipe, "backend": "xla"}
    x, scale = draw("x", (32, 32), shift=0.3), draw("scale", (32,), scale=0.3, shift=1.0)
    wi, wo = draw("wi", (32, 1, 48), scale=0.3), draw("wo", (48, 32), scale=0.2)
    g = draw("g", (32, 32), scale=0.1)

    def parts(x, scale, wi, wo):
        pre = dense(layernorm(x, scale, None, backend="xla"), wi, **options)
        return dense(jax.nn.gelu(pre[:, 0]), wo, **options)

    def first_fused(x, scale, wi, wo):
        return dense(jax.nn.gelu(layernorm_dense(x, scale, None, wi, **options)[:, 0]), wo, **options)

    def fused(x, scale, wi, wo):
        return layernorm_mlp(x, scale, None, wi, None, wo, None, **options)

    expected = quick_jit(lambda *a: with_vjp(parts, *a))((x, scale, wi, wo), g)
    for op in (first_fused, fused):
        actual = quick_jit(lambda *a, op=op: with_vjp(op, *a))((x, scale, wi, wo), g)
        for ours, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            if all(flags):
                assert_close(ours, wanted, 4 * TOLERANCE["float32"])
            else:
                assert_same_rounding(ours, wanted, 1e-3 if ours.ndim == 1 else 4 * TOLERANCE["float32"])


@pytest.mark.wide("block")
@pytest.mark.parametrize("kind", list(KINDS)[1:])
def test_save_original_input_changes_no_value(kind):
    plain, saving = run_dense(KINDS[kind]()), run_dense(KINDS[kind](), save_original_input=True)
    for ours, expected in zip(jax.tree.leaves(saving), jax.tree.leaves(plain), strict=True):
        assert_bitwise(ours, expected)


@pytest.mark.costly("block")
@pytest.mark.parametrize("kind", ["current", "block"])
def test_save_original_input_keeps_it_and_no_quantized_copy(kind):
    case = make_case("dense").astype(jnp.bfloat16)
    kept = {}
    for saving in (False, True):
        _, vjp = jax.vjp(
            lambda x, s=saving: dense(
                x, case.args["kernel"], recipe=KINDS[kind](), save_original_input=s, backend="xla"
            ),
            case.args["x"],
        )
        kept[saving] = {leaf.dtype for leaf in jax.tree.leaves(vjp) if leaf.shape == case.args["x"].shape}
    assert kept == {False: {jnp.dtype("float8_e4m3fn")}, True: {jnp.dtype("bfloat16")}}


def test_save_original_input_under_delayed_scaling():
    with pytest.raises(
        ValueError, match=r"dense: save_original_input .* another scale under DelayedScaling; use Float8C"
    ):
        run_dense(KINDS["delayed"](), save_original_input=True)
    run_dense(None, save_original_input=True)  # without a recipe it is kept anyway


def test_an_input_that_the_op_computes_is_not_saved():
    """Its gradient would be that of the op's input: no error, and the wrong kernel gradient."""
    x, saving = jnp.ones((16, 16)), ops.LinearOptions(save_original_input=True)
    first, last = ops.LinearWeights(jnp.ones((16, 1, 16))), ops.LinearWeights(jnp.ones((16, 16)))
    calls = {
        "layernorm_dense": lambda: ops.layernorm_dense(x, x[0], None, last, options=saving),
        r"layernorm_mlp \(wi\)": lambda: ops.layernorm_mlp(
            x, x[0], None, first, last, options=ops.MlpOptions(wi=saving)
        ),
        r"layernorm_mlp \(wo\)": lambda: ops.layernorm_mlp(
            x, x[0], None, first, last, options=ops.MlpOptions(wo=saving)
        ),
    }
    for label, call in calls.items():
        with pytest.raises(ValueError, match=f"{label}: save_original_input must be False"):
            call()


@pytest.mark.costly("float32-block")
@pytest.mark.wide
@pytest.mark.parametrize("kind", [None, "delayed", "block"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_gradient_goes_where_it_is_asked_for(kind, dtype):
    recipe = KINDS[kind]() if kind else None
    case = make_case("dense").astype(jnp.bfloat16)
    x, kernel = case.args["x"], case.args["kernel"].astype(jnp.bfloat16)
    unread = jnp.full(kernel.shape, jnp.nan, dtype)

    def call(x, kernel, gradient):
        with frozen_scales():  # the states are not an argument here
            return dense(x, kernel, grad_sink=gradient, recipe=recipe, state=case.states(recipe), backend="xla")

    y, (dx, dkernel, dgradient) = quick_jit(lambda *a: with_vjp(call, *a))((x, kernel, unread), case.g)
    expected_y, (expected_dx, expected) = quick_jit(
        lambda *a: with_vjp(lambda x, k: call(x, k.astype(jnp.bfloat16), None), *a)
    )((x, kernel.astype(dtype)), case.g)
    assert_bitwise(y, expected_y)
    assert_bitwise(dx, expected_dx)
    assert_bitwise(dkernel, jnp.zeros_like(kernel))
    assert dgradient.dtype == jnp.dtype(dtype)
    assert_close(dgradient, expected, TOLERANCE["bfloat16"])  # the other passed through the kernel's bf16
    if dtype == "float32":
        representable = dgradient == dgradient.astype(jnp.bfloat16).astype(jnp.float32)
        assert float(jnp.mean(representable)) < 0.1, "accumulated in fp32, and not rounded on the way"


@pytest.mark.costly
def test_gradients_of_the_mlps_two_kernels():
    case = make_case("layernorm_mlp swiglu")
    keys = ("x", "scale", "ln_bias", "wi_kernel", "wi_bias", "wo_kernel", "wo_bias")
    recipe, kernels = Float8CurrentScaling(), (case.args["wi_kernel"], case.args["wo_kernel"])

    def call(kernels, gradients):
        args = case.args | {"wi_kernel": kernels[0], "wo_kernel": kernels[1]}
        return layernorm_mlp(
            *(args[key] for key in keys), activation="swiglu", recipe=recipe, grad_sinks=gradients, backend="xla"
        )

    _, (expected, _) = quick_jit(lambda *a: with_vjp(call, *a))((kernels, (None, None)), case.g)
    empty = jax.tree.map(jnp.zeros_like, kernels)
    for places in ((empty[0], empty[1]), (None, empty[1])):
        _, (zeros, gradients) = quick_jit(lambda *a: with_vjp(call, *a))((kernels, places), case.g)
        for place, zero, gradient, wanted in zip(places, zeros, gradients, expected, strict=True):
            if place is None:
                assert gradient is None
                assert_bitwise(zero, wanted)
            else:
                assert_bitwise(gradient, wanted)
                assert not np.asarray(zero).any()


# ---------------------------------------------------------------- what XLA compiled

FORMATS = {
    "delayed": ("f8e4m3fn", "f8e5m2"),
    "current": ("f8e4m3fn", "f8e5m2"),
    "block": ("f8e4m3fn",),
    "mxfp8": ("f8e4m3fn",),
    "nvfp4": ("f4e2m1fn", "f8e4m3fn"),
}


@pytest.mark.costly("layernorm_mlp gelu-current", slow=("layernorm_mlp gelu-mxfp8", "dense-nvfp4", "dense-block"))
@pytest.mark.wide
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("name", ["dense", "layernorm_mlp gelu"])
def test_low_precision_arrays_are_in_the_compiled_program(name, kind):
    recipe, case = KINDS[kind](), make_case(name, s=32).astype(jnp.bfloat16)

    def value_and_gradients(args, states, g):
        return with_vjp(lambda a, s: case.run(a, s, recipe=recipe), (args, states), g)

    text = compiled_text(value_and_gradients, case.args, case.states(recipe), case.g)
    for kind_of_array in FORMATS[kind]:
        assert f"{kind_of_array}[" in text
    for other in {"f8e5m2", "f4e2m1fn"} - set(FORMATS[kind]):
        assert f"{other}[" not in text


E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
PRODUCTS = {(E4M3, E4M3): "fprop", (E5M2, E4M3): "dgrad", (E4M3, E5M2): "wgrad"}
"""Gradients are E5M2."""


@pytest.mark.parametrize("gemm", ["none", "fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("kind", ["current", "delayed", "a scale for each part of the batch"])
def test_split_accumulation_reaches_the_gemm_that_asks_for_it(kind, gemm):
    """XLA takes it as the product's precision: HIGHEST leaves out Hopper's fast accumulation."""
    split = {} if gemm == "none" else {f"fp8_gemm_{gemm}": MMParams(use_split_accumulator=True)}
    recipe = KINDS.get(kind, KINDS["delayed"])(**split)
    state = init_gemm_state(recipe)
    if kind not in KINDS:
        parts = {role: jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), state[role]) for role in ("x", "grad")}
        recipe, state = dataclasses.replace(recipe, tp_only_amax_red=True), {**state, **parts}
    x, kernel, g = draw("x", (4, 16, 32)), draw("kernel", (32, 48)), draw("g", (4, 16, 48))

    def call(x, kernel, state):
        return dense(x, kernel, recipe=recipe, state=state, backend="xla")

    jaxpr = jax.make_jaxpr(lambda *a: with_vjp(call, *a))((x, kernel, state), g)
    found = {}
    for eqn in equations(jaxpr.jaxpr):
        dtypes = tuple(var.aval.dtype for var in eqn.invars)
        if eqn.primitive.name == "dot_general" and dtypes in PRODUCTS:
            found[PRODUCTS[dtypes]] = eqn.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
    assert found == {name: name == gemm for name in ("fprop", "dgrad", "wgrad")}
