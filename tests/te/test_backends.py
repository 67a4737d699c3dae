"""The ``te`` backend against ``xla``: forward, gradients and quantizer state of every op but fused attention.

In fp32 both compute the same formula in another order: 1e-7 or exactly 0. In bf16 without a recipe, intermediate
tensors are rounded in other places. In bf16 under FP8 these differences, one step of bf16 (2^-8), turn the FP8
rounding of an element where a boundary lies between: of E4M3's 16 bf16 steps to a boundary that is 1 element in 16 at
most, which then moves by up to 2^-3, on average 2^-4; of E5M2's 32, 1 in 32, by 2^-2, on average 2^-3. The relative
L2 error of an operand is therefore up to sqrt(2^-4) 2^-3 = 0.031 or sqrt(2^-5) 2^-2 = 0.044, of a product of two
sqrt(2) times that: 0.044, or 0.062 where E5M2 takes part. Those are the tolerances; fp32 is where the formulas are
checked.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.config import ACTIVATIONS, ActivationParams
from jax_te.errors import BackendUnavailableError
from jax_te.ops import Activation, NormSpec, activation, dense, dot_product_attention, explain_backend, use_backend
from jax_te.ops.te import gemm as te_gemm
from jax_te.quantize import init_gemm_state
from jax_te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.support.calls import layernorm_dense, layernorm_mlp
from tests.support.cases import GEMM_CASES, OTHER_CASES, make_case
from tests.support.numerics import (
    TOLERANCE,
    assert_bitwise,
    assert_close,
    assert_same_rounding,
    draw,
    quick_jit,
    relative_l2,
    with_vjp,
)
from tests.support.overflow import OVERFLOW_CASES, check_overflow_is_seen

pytestmark = pytest.mark.te

RECIPES = {
    "none": None,
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(amax_history_len=3),
    "delayed, margin, most recent": DelayedScaling(amax_history_len=3, margin=2, amax_compute_algo="most_recent"),
    "current, E4M3": Float8CurrentScaling(fp8_format=Format.E4M3),
}
CALLS = [(name, recipe) for name in GEMM_CASES for recipe in ("none", "current", "delayed")]
CALLS += [("layernorm_mlp gelu", recipe) for recipe in ("delayed, margin, most recent", "current, E4M3")]
CALLS += [(name, "none") for name in OTHER_CASES if name != "softmax_cross_entropy"]


def both(name, recipe, dtype):
    case, recipe = make_case(name).astype(dtype), RECIPES[recipe]

    def on(backend):
        def run(args, states):
            return case.run(args, states, recipe=recipe, backend=backend)

        return quick_jit(lambda *a: with_vjp(run, *a))((case.args, case.states(recipe)), case.g)

    return on("te"), on("xla")


@pytest.mark.parametrize("recipe", ["none", "current", "delayed", "block", "mxfp8", "nvfp4"])
def test_explain_backend_says_what_the_program_holds(recipe):
    """By the source files of the lowered program's instructions; for every op, asked for by name and not."""
    table = {**RECIPES, "block": Float8BlockScaling(), "mxfp8": MXFP8BlockScaling(), "nvfp4": NVFP4BlockScaling()}
    for name in ("dense", "layernorm", "layernorm_dense", "layernorm_mlp gelu", "activation gelu"):
        case = make_case(name)
        for backend in ("te", "xla", "auto"):
            options = {"recipe": table[recipe] if case.gemms else None, "backend": backend}
            args = case.args, case.states(options["recipe"])
            try:
                chosen = explain_backend(case.op, **options).backend
            except BackendUnavailableError:
                with pytest.raises(BackendUnavailableError):
                    case.run(*args, **options)
                continue
            run = functools.partial(with_vjp, functools.partial(case.run, **options))
            jax.clear_caches()  # a jitted function of jax.numpy keeps the files of its first caller
            # Not the compiled text: a cache of executables knows programs without their files.
            program = quick_jit(run).lower(args, case.g).as_text(debug_info=True)
            # ``te`` calls functions of ``xla`` for what Transformer Engine does not quantize; ``xla`` none of ``te``.
            assert ("jax_te/ops/te/" in program) == (chosen == "te"), (name, backend)
            assert f"jax_te/ops/{chosen}/" in program, (name, backend)


@pytest.mark.parametrize(("name", "recipe"), CALLS)
def test_fp32(name, recipe):
    (y, (gradients, states)), (expected_y, (expected, expected_states)) = both(name, recipe, "float32")
    assert_close(y, expected_y, TOLERANCE["float32"], what="y")
    for key, gradient in expected.items():
        if gradient is None:
            assert gradients[key] is None
        else:
            assert gradients[key].dtype == gradient.dtype
            assert_close(gradients[key], gradient, TOLERANCE["float32"], what=f"d{key}")
    assert jax.tree.structure(states) == jax.tree.structure(expected_states)
    for state, wanted in zip(jax.tree.leaves(states), jax.tree.leaves(expected_states), strict=True):
        np.testing.assert_allclose(state, wanted, rtol=1e-6)
        if name.startswith("dense"):
            assert_bitwise(state, wanted)


@pytest.mark.parametrize(("name", "recipe"), [call for call in CALLS if "," not in call[1]])
def test_bf16(name, recipe):
    (y, (gradients, _)), (expected_y, (expected, _)) = both(name, recipe, "bfloat16")
    quantized = recipe != "none" and name.startswith("layernorm")  # `dense` has no operand that is computed before
    assert y.dtype == expected_y.dtype
    assert relative_l2(y, expected_y) < (0.044 if quantized else 2 * TOLERANCE["bfloat16"])
    for key, gradient in expected.items():
        if gradient is not None:
            assert gradients[key].dtype == gradient.dtype, key
            assert relative_l2(gradients[key], gradient) < (0.062 if quantized else 2 * TOLERANCE["bfloat16"]), key


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    x, dz = draw("x", (8, len(ACTIVATIONS[name]), 32), scale=2.0), draw("dz", (8, 32))
    params = ActivationParams(limit=1.5, alpha=1.2, linear_offset=0.5) if name == "clamped_swiglu" else None

    def on(backend):
        return with_vjp(lambda x: activation(x, name, params=params, backend=backend), (x,), dz)

    for actual, wanted in zip(jax.tree.leaves(on("te")), jax.tree.leaves(on("xla")), strict=True):
        assert_close(actual, wanted, TOLERANCE["float32"])


@pytest.mark.parametrize("name", ["srelu", "glu", "clamped_swiglu", "gelu_exact", jnp.tanh])
def test_activations_written_quantized(name):
    """Delayed scaling, where TE's kernels activate and quantize in one go; those that TE lacks are computed in JAX."""
    parts, recipe = len(Activation(name).parts()), RECIPES["delayed"]
    params = ActivationParams(limit=1.5, alpha=1.2) if name == "clamped_swiglu" else None
    x, g = draw("x", (32, 16)), draw("g", (32, 16))
    wi, wi_bias, wo = draw("wi", (16, parts, 32)), draw("wi_bias", (parts, 32)), draw("wo", (32, 16))
    states = make_case("layernorm_mlp gelu").states(recipe)

    def on(backend):
        def run(x, wi, wi_bias, wo, states):
            return layernorm_mlp(
                x, jnp.ones(16), None, wi, wi_bias, wo, None, norm=NormSpec(kind="rmsnorm"), activation=name,
                activation_params=params, recipe=recipe, states=states, backend=backend,
            )  # fmt: skip

        return quick_jit(lambda *a: with_vjp(run, *a))((x, wi, wi_bias, wo, states), g)

    for actual, wanted in zip(jax.tree.leaves(on("te")), jax.tree.leaves(on("xla")), strict=True):
        assert_close(actual, wanted, TOLERANCE["float32"])


def test_explain_backend_names_an_activation_in_jax():
    swiglu = explain_backend("layernorm_mlp", activation="swiglu", backend="te", params_dtype=jnp.bfloat16)
    assert swiglu.others == ""
    silu = explain_backend("activation", activation=jax.nn.silu, backend="te")
    assert silu.parts == {"activation": "te", "activation_backward": "xla"}
    exact = explain_backend("activation", activation="gelu_exact", backend="te")
    assert str(exact) == "activation: te (asked for); activation, activation_backward: xla"
    assert explain_backend("activation", activation="gelu_exact", backend="xla").others == ""


@pytest.mark.parametrize("params_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", ["none", "current", "delayed", "powers of two", "block", "dgrad in high precision"])
def test_the_parts_that_te_is_said_to_run_are_calls_of_te(name, dtype, params_dtype, monkeypatch):
    recipe = {
        **RECIPES,
        "powers of two": Float8CurrentScaling(use_power_2_scales=True),
        "block": Float8BlockScaling(),
        "dgrad in high precision": Float8CurrentScaling(override_linear_precision=(False, True, False)),
    }[name]
    gemms, quantized = [], []
    for module, function in ((te_gemm.tex, "gemm"), (te_gemm, "_te_gemm"), (te_gemm, "_gemm_to_fp32")):
        theirs = getattr(module, function)
        monkeypatch.setattr(
            module, function, lambda *args, theirs=theirs, **options: (gemms.append(1), theirs(*args, **options))[1]
        )
    quantize = te_gemm.tex.quantize
    monkeypatch.setattr(
        te_gemm.tex, "quantize", lambda x, quantizer=None, **options: (
            quantized.append(quantizer is not None), quantize(x, quantizer=quantizer, **options)
        )[1]
    )  # fmt: skip
    with_current_scale = te_gemm._quantize_current  # TE's kernel, called with our scale
    monkeypatch.setattr(
        te_gemm, "_quantize_current", lambda *args: (quantized.append(True), with_current_scale(*args))[1]
    )  # fmt: skip
    x, w, g = draw("x", (128, 128), dtype), draw("w", (128, 128), params_dtype), draw("g", (128, 128), dtype)
    jax.eval_shape(
        lambda x, w, state: with_vjp(
            lambda *args: dense(*args[:2], recipe=recipe, state=args[2], backend="te"), (x, w, state), g
        ),
        x, w, init_gemm_state(recipe),
    )  # fmt: skip
    parts = explain_backend("dense", recipe=recipe, backend="te", dtype=dtype, params_dtype=params_dtype).parts
    assert len(gemms) == [parts[gemm] for gemm in ("fprop", "dgrad", "wgrad")].count("te")
    assert any(quantized) == (parts.get("quantization") == "te")


def test_states_over_steps():
    """Three steps of a delayed recipe, each backend with its own states."""
    case, recipe = make_case("layernorm_mlp gelu"), RECIPES["delayed"]

    def on(backend):
        def run(args, states):
            return case.run(args, states, recipe=recipe, backend=backend)

        return quick_jit(lambda *a: with_vjp(run, *a))

    step = {backend: on(backend) for backend in ("te", "xla")}
    states = dict.fromkeys(step, case.states(recipe))
    for i in range(3):
        args = {**case.args, "x": case.args["x"] * (1.0 + i)}
        outputs = {}
        for backend, run in step.items():
            outputs[backend], (_, states[backend]) = run((args, states[backend]), case.g * 3.0**-i)
        assert_close(outputs["te"], outputs["xla"], TOLERANCE["float32"], what=f"step {i}")
        for state, wanted in zip(jax.tree.leaves(states["te"]), jax.tree.leaves(states["xla"]), strict=True):
            np.testing.assert_allclose(state, wanted, rtol=1e-6, err_msg=f"step {i}")


def test_wgrad_of_fp32_parameters_is_not_rounded_to_bf16():
    for recipe in (None, RECIPES["current"]):
        case = make_case("dense row").astype(jnp.bfloat16)
        call = functools.partial(case.run, recipe=recipe, backend="te")
        _, (gradients,) = with_vjp(call, (case.args,), case.g)
        kernel = gradients["kernel"]
        assert float(jnp.mean(kernel == kernel.astype(jnp.bfloat16).astype(jnp.float32))) < 0.1


@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_layer_norm_without_a_bias_which_te_does_not_have(recipe):
    case = make_case("layernorm_dense")
    args, recipe = {**case.args, "ln_bias": None}, RECIPES[recipe]

    def on(backend):
        def run(args, states):
            return case.run(args, states, recipe=recipe, backend=backend)

        return quick_jit(lambda *a: with_vjp(run, *a))((args, case.states(recipe)), case.g)

    for actual, expected in zip(*(jax.tree.leaves(on(backend)) for backend in ("te", "xla")), strict=True):
        assert_close(actual, expected, 0.044)


def test_zero_centred_rms_norm_which_te_refuses():
    x, scale, kernel = draw("x", (32, 16)), draw("scale", (16,), scale=0.2), draw("kernel", (16, 16))
    norm, g = NormSpec(kind="rmsnorm", zero_centered_gamma=True), draw("g", (32, 16))

    def run(backend, x, scale):
        return layernorm_dense(x, scale, None, kernel, norm=norm, recipe=RECIPES["current"], backend=backend)

    ours = with_vjp(lambda *a: run("te", *a), (x, scale), g)
    expected = with_vjp(lambda *a: run("xla", *a), (x, scale), g)
    for actual, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert_close(actual, wanted, TOLERANCE["float32"])


@pytest.mark.parametrize("recipe", ["none", "current", "delayed"])
def test_without_tokens_no_norm_or_activation_of_te_runs(recipe):
    """CUDA launches nothing over no rows. GEMMs have padding."""
    case = make_case("layernorm_mlp gelu").astype("bfloat16")
    run = functools.partial(case.run, recipe=RECIPES[recipe], backend="te")
    args = ({**case.args, "x": case.args["x"][:0]}, case.states(RECIPES[recipe]))
    calls = quick_jit(lambda *a: with_vjp(run, *a)).lower(args, case.g[:0])
    program = calls.as_text(debug_info=True)
    assert "cpp_extensions/gemm" in program
    assert "cpp_extensions/normalization" not in program
    assert "cpp_extensions/activation" not in program
    y, (gradients, _) = calls.compile()(args, case.g[:0])
    assert y.shape == (0, *case.g.shape[1:])
    assert not any(np.any(np.asarray(array, np.float32)) for array in jax.tree.leaves(gradients))


def test_eager_and_remat():
    case, recipe = make_case("layernorm_mlp gelu"), RECIPES["delayed"]

    def run(args, states):
        return case.run(args, states, recipe=recipe, backend="te")

    eager = with_vjp(run, (case.args, case.states(recipe)), case.g)
    remat = quick_jit(lambda *a: with_vjp(jax.checkpoint(run), *a))((case.args, case.states(recipe)), case.g)
    for actual, wanted in zip(jax.tree.leaves(remat), jax.tree.leaves(eager), strict=True):
        assert_same_rounding(actual, wanted, 1e-4)


def test_auto_prefers_xla_without_a_gpu_and_says_so():
    choice = explain_backend("dense", recipe=RECIPES["delayed"])
    assert (choice.backend, choice.reason) == ("xla", "no GPU; TE's kernels would run as plain JAX")
    with use_backend("te"):
        assert str(explain_backend("dense", recipe=RECIPES["delayed"])) == "dense: te (asked for)"


def test_fused_attention_asked_for_on_cpu_raises_with_the_reason():
    q = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
    with pytest.raises(BackendUnavailableError, match="TE's fused attention needs a GPU"):
        dot_product_attention((q, q, q), backend="te")


@pytest.mark.parametrize("gemm", ["none", "fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("kind", [Float8CurrentScaling, DelayedScaling])
def test_split_accumulation_reaches_the_call_that_asks_for_it(kind, gemm, monkeypatch):
    """TE's custom call, which takes it as an argument, is not there on a CPU: its callers are."""
    found, plain = {}, te_gemm.tex.gemm
    names = {"e4m3 e4m3": "fprop", "e5m2 e4m3": "dgrad", "e4m3 e5m2": "wgrad"}

    def record(lhs, rhs, bias=None, *, contracting_dims, use_split_accumulator=False):
        found[names[f"{lhs.data.dtype.name[7:11]} {rhs.data.dtype.name[7:11]}"]] = use_split_accumulator
        return plain(lhs, rhs, bias=bias, contracting_dims=contracting_dims)

    monkeypatch.setattr(te_gemm, "GemmPrimitive", SimpleNamespace(enabled=lambda: True))
    monkeypatch.setattr(te_gemm, "_te_gemm", record)
    monkeypatch.setattr(te_gemm.tex, "gemm", record)
    recipe = kind(**({} if gemm == "none" else {f"fp8_gemm_{gemm}": MMParams(use_split_accumulator=True)}))
    case = make_case("dense")
    jax.eval_shape(
        lambda *a: with_vjp(functools.partial(case.run, recipe=recipe, backend="te"), *a),
        (case.args, case.states(recipe)),
        case.g,
    )
    assert found == {name: name == gemm for name in ("fprop", "dgrad", "wgrad")}


# Not current scaling: the JAX code that runs here in place of TE's kernels computes its scales in fp16, where they
# overflow although the input does not. tests/gpu has it.
@pytest.mark.parametrize(
    ("layer", "overflow", "recipe"), [case for case in OVERFLOW_CASES if case[2] in ("none", "delayed", "block")]
)
def test_an_overflow_of_fp16_is_seen(layer, overflow, recipe):
    with use_backend("te"):
        check_overflow_is_seen(layer, overflow, recipe)
