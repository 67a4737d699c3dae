"""What XLA compiled: TE's custom calls, with FP8 operands at every GEMM."""

import re

import jax.numpy as jnp
import pytest

from jax_te.ops import explain_backend
from jax_te.recipe import DelayedScaling, Float8CurrentScaling
from tests.support.cases import make_case
from tests.support.numerics import with_vjp

pytestmark = pytest.mark.gpu

SIZES = {"b": 2, "s": 128, "h": 128, "f": 256, "n": 2, "groups": 2, "d": 64}
E4M3, E5M2 = "f8e4m3fn", "f8e5m2"
HYBRID = [(E4M3, E4M3), (E4M3, E5M2), (E4M3, E5M2)]  # fprop, dgrad, wgrad, each pair sorted


def compiled(name, recipe, dtype=jnp.bfloat16):
    import jax

    case = make_case(name, **SIZES).astype(dtype)

    def run(args, states, g):
        return with_vjp(lambda a, s: case.run(a, s, recipe=recipe, backend="te"), (args, states), g)

    return case, jax.jit(run).lower(case.args, case.states(recipe), case.g).compile().as_text()


def targets(text):
    """Custom-call targets of TE, once for each call."""
    return re.findall(r'custom_call_target="(te_\w+)"', text)


def gemm_operands(text):
    """Sorted dtypes of the operands of every GEMM of TE; its arguments are left, scale, right, scale, …"""
    calls = re.findall(r'custom_call_target="te_gemm_v2_ffi", operand_layout_constraints=\{(.*?)\}, api_version', text)
    arguments = [re.findall(r"(\w+)\[[\d,]*\]", call) for call in calls]
    return sorted(tuple(sorted((found[0], found[2]))) for found in arguments)


@pytest.mark.parametrize("name", ["dense", "layernorm_dense", "layernorm_mlp gelu"])
@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), DelayedScaling(amax_history_len=4)], ids=lambda r: r.name)
def test_fp8_at_every_gemm(name, recipe):
    case, text = compiled(name, recipe)
    assert gemm_operands(text) == sorted(HYBRID * case.gemms)
    calls = set(targets(text))
    assert {"te_gemm_v2_ffi", "te_dbias_quantize_ffi"} <= calls
    if name != "dense":
        assert {"te_norm_forward_ffi", "te_norm_backward_ffi"} <= calls
    if "mlp" in name:
        assert "te_act_lu_ffi" in calls


def test_bf16_gemms_without_a_recipe():
    case, text = compiled("layernorm_mlp gelu", None)
    # A weight gradient that is wider than its operands is XLA's; the forward and input-gradient GEMMs are TE's.
    assert set(gemm_operands(text)) == {("bf16", "bf16")}
    assert targets(text).count("te_gemm_v2_ffi") >= 2 * case.gemms
    assert "f8e" not in text


def test_fused_attention():
    _, text = compiled("attention causal", None)
    assert {"te_fused_attn_forward_ffi", "te_fused_attn_backward_ffi"} <= set(targets(text))


@pytest.mark.parametrize("op", ["dense", "layernorm", "layernorm_dense", "layernorm_mlp", "activation"])
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling(), DelayedScaling()], ids=str)
def test_auto_takes_te(op, recipe):
    choice = explain_backend(op, recipe=recipe)
    assert (choice.backend, choice.reason) == ("te", "TE supports it on this GPU")
