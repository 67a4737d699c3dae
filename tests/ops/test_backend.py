import importlib.util
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jax_te.errors import BackendUnavailableError
from jax_te.ops import (
    OPS,
    BackendChoice,
    dense,
    dot_product_attention,
    explain_backend,
    layernorm,
    te,
    use_backend,
    xla,
)
from jax_te.ops.attention.checks import attention_spec
from jax_te.ops.backend import backend_for
from jax_te.ops.moe import row_groups
from jax_te.ops.pallas import grouped, operand
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from tests.support.numerics import without_type_checker

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
without_te = pytest.mark.skipif(HAS_TE, reason="Transformer Engine is installed")
KERNEL_OPS = tuple(op for op in OPS if op != "softmax_cross_entropy")


@without_te
@pytest.mark.parametrize("op", KERNEL_OPS)
def test_auto_says_why_it_does_not_take_te(op):
    choice = explain_backend(op, backend="auto")
    assert choice.reason == "TE cannot: transformer_engine is not installed (see docs/install.md)"
    assert {choice.backend, *choice.parts.values()} == {"xla"}
    assert str(choice) == f"{op}: xla (TE cannot: transformer_engine is not installed (see docs/install.md))"


@without_te
@pytest.mark.parametrize("recipe", [None, DelayedScaling(), Float8CurrentScaling()])
def test_te_asked_for_by_name_raises_with_the_reason(recipe):
    message = "backend 'te' cannot run dense here: transformer_engine is not installed .*; use backend 'xla' or 'auto'"
    with pytest.raises(BackendUnavailableError, match=message):
        explain_backend("dense", recipe=recipe, backend="te")
    with pytest.raises(BackendUnavailableError, match=message):
        dense(jnp.ones((16, 16)), jnp.ones((16, 16)), backend="te")
    with use_backend("te"), pytest.raises(BackendUnavailableError, match="cannot run layernorm here"):
        layernorm(jnp.ones((2, 16)), jnp.ones(16))
    with use_backend("te"), pytest.raises(ValueError, match="cannot run dot_product_attention here"):
        dot_product_attention((jnp.ones((1, 4, 2, 8)),) * 3)


def test_a_backend_asked_for_is_the_one_that_runs_or_it_raises(monkeypatch):
    monkeypatch.setattr(te, "supports", lambda op, **_: (True, "made up"))
    parts = {"fprop": "te", "dgrad": "te", "wgrad": "te"}
    assert explain_backend("dense", backend="te") == BackendChoice("dense", "te", "asked for", parts)
    parts = dict.fromkeys(parts, "xla")
    assert explain_backend("dense", backend="xla") == BackendChoice("dense", "xla", "asked for", parts)
    assert explain_backend("dense", backend="auto").backend == ("te" if jax.default_backend() == "gpu" else "xla")
    if jax.default_backend() != "gpu":
        assert "no GPU" in explain_backend("dense").reason
    monkeypatch.setattr(te, "supports", lambda op, **_: (False, "a made-up reason"))
    assert explain_backend("dense") == BackendChoice("dense", "xla", "TE cannot: a made-up reason", parts)
    with pytest.raises(BackendUnavailableError, match="a made-up reason"):
        explain_backend("dense", backend="te")


def test_the_default_device_decides_and_not_the_first_one(monkeypatch):
    """As on a machine with a GPU, of which ``jax.default_device`` chooses the CPU: the call is compiled for the CPU."""
    q = jnp.ones((1, 128, 1, 8), jnp.bfloat16)
    spec, kernels = attention_spec((q, q, q), "causal"), SimpleNamespace(**vars(xla))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(te, "supports", lambda op, **_: (True, "made up"))
    monkeypatch.setattr(te, "primitives", lambda: kernels)

    def choices():
        # A reason of its own: choices are cached.
        chosen = backend_for("layernorm", "auto", None, "a test of the default device")
        return explain_backend("dense").backend, chosen is kernels, xla.attention_supports(spec)[1]

    on_gpu = ("te", True, "cuDNN through jax.nn")
    assert choices() == on_gpu
    with jax.default_device(jax.devices("cpu")[0]):
        assert choices() == ("xla", False, "plain JAX")
    assert choices() == on_gpu


def test_supports_is_asked_about_this_call(monkeypatch):
    asked = []
    monkeypatch.setattr(te, "supports", lambda *args, **kwargs: (asked.append((args, kwargs)), (False, "no"))[1])
    recipe = DelayedScaling()
    explain_backend("dense", recipe=recipe)
    qkv = (jnp.ones((1, 4, 2, 8)),) * 3
    dot_product_attention(qkv, mask_type="no_mask")
    spec = attention_spec(qkv, "no_mask", None, 0.0)
    assert asked == [
        (("dense",), {"recipe": recipe, "attention": None, "unsharded": None, "stored": None}),
        (("dot_product_attention",), {"recipe": None, "attention": spec, "unsharded": None, "stored": None}),
    ]


def test_use_backend_nests_and_the_argument_wins(monkeypatch):
    monkeypatch.setattr(te, "supports", lambda op, **_: (True, "made up"))
    with use_backend("te"):
        assert explain_backend("dense").backend == "te"
        assert explain_backend("dense", backend="xla").backend == "xla"
        with use_backend("xla"):
            assert explain_backend("dense").backend == "xla"
        assert explain_backend("dense").backend == "te"
    assert explain_backend("dense").backend == ("te" if jax.default_backend() == "gpu" else "xla")


def test_use_backend_is_part_of_the_jit_cache_key():
    traces = []

    @jax.jit
    def f(x):
        traces.append(explain_backend("dense").reason)
        return x

    for name in ("xla", "auto", "xla"):
        with use_backend(name):
            f(jnp.ones(()))
    assert len(traces) == 2
    assert traces[0] == "asked for"


def test_cross_entropy_has_one_implementation():
    for backend in ("te", "xla", "auto"):
        assert explain_backend("softmax_cross_entropy", backend=backend) == BackendChoice(
            "softmax_cross_entropy", "xla", "Transformer Engine has no kernel for it", {"loss": "xla"}
        )


def test_a_backend_asked_for_names_the_parts_that_it_leaves_to_others(monkeypatch):
    monkeypatch.setattr(te, "supports", lambda op, **_: (True, "made up"))
    powers = explain_backend("layernorm_dense", recipe=Float8CurrentScaling(use_power_2_scales=True), backend="te")
    assert str(powers) == "layernorm_dense: te (asked for); quantization, fprop, dgrad, wgrad: xla"
    assert powers.parts["norm"] == "te"
    current = explain_backend("dense", recipe=Float8CurrentScaling(), backend="te")
    assert str(current) == "dense: te (asked for)"
    exact = Float8CurrentScaling(override_linear_precision=(False, True, True))
    parts = explain_backend("dense", recipe=exact, backend="te", dtype=jnp.float32).parts
    assert parts == {"quantization": "te", "fprop": "te", "dgrad": "xla", "wgrad": "xla"}
    narrow = explain_backend("dense", backend="te", params_dtype=jnp.bfloat16)
    assert narrow.others == ""
    # TE's GEMM gives results in the operands' dtype, or in fp32.
    assert explain_backend("dense", backend="te", params_dtype=jnp.float16).others == "; wgrad: xla"


def test_kernels_of_hopper_are_named(monkeypatch):
    for module in (grouped, operand):
        monkeypatch.setattr(module, "supported", lambda: (True, "as on a Hopper GPU"))
    monkeypatch.setattr(row_groups, "supported", lambda: (True, "as on a Hopper GPU"))
    blocks = explain_backend("layernorm_dense", recipe=Float8BlockScaling(), backend="xla")
    assert blocks.others == "; quantization, fprop, dgrad, wgrad: pallas"
    assert explain_backend("dense", backend="xla").others == ""
    assert explain_backend("grouped_dense", backend="xla").others == "; fprop, dgrad, wgrad: pallas"
    assert explain_backend("grouped_dense", backend="xla", dtype=jnp.float32).others == ""


def test_unknown_names():
    with without_type_checker():
        with (
            pytest.raises(ValueError, match="name must be one of 'auto', 'te', 'xla'"),
            use_backend("cuda"),
        ):
            pass
        with pytest.raises(ValueError, match="backend must be one of None, 'auto', 'te', 'xla', got 'cuda'"):
            explain_backend("dense", backend="cuda")
        with pytest.raises(ValueError, match=r"backend must be one of .* got 'cuda'"):
            dense(jnp.ones((2, 2)), jnp.ones((2, 2)), backend="cuda")
    with pytest.raises(
        ValueError,
        match=r"op must be one of 'dense', 'grouped_dense', 'layernorm', 'layernorm_dense', .* got 'conv'",
    ):
        explain_backend("conv")
