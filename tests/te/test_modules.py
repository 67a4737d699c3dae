"""Our ops against Transformer Engine's own Linen modules with the same parameters: forward, gradients, and fp8 state.

What differs by design, and is mapped here (docs/design.md, `layernorm_mlp`):

- TE stores the scale of the *next* use beside a history whose slot 0 is empty and whose last slot is the newest. Ours
  holds the scale last used and the history newest first; `scale_in_use` of it must be TE's stored scale, bit for bit.
- TE's fused MLP quantizes FFN2's output gradient with FFN1's quantizer and FFN1's with FFN2's. The two hold the same
  states under swapped names, so results agree from the first step on; only the names of the gradient states are
  crossed here.
- Without a recipe TE's modules run norm, GEMMs and activation as separate ops, and add biases afterwards.

Tolerances: fp32 as for one fp32 GEMM; bf16 as derived in test_backends.py.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformer_engine.jax as te
from transformer_engine.common import recipe as te_recipe
from transformer_engine.jax.flax import DenseGeneral, LayerNorm, LayerNormDenseGeneral, LayerNormMLP
from transformer_engine.jax.sharding import MeshResource

from jax_te.ops import NormSpec, layernorm
from jax_te.quantize import ROLES, init_gemm_state
from jax_te.quantize.scaling import amax_rule_of, scale_in_use
from jax_te.recipe import DelayedScaling, Float8CurrentScaling
from tests.support.calls import dense, layernorm_dense, layernorm_mlp
from tests.support.numerics import (
    TOLERANCE,
    assert_bitwise,
    assert_close,
    assert_same_rounding,
    draw,
    quick_jit,
    relative_l2,
)
from tests.support.states import merging

# TE's LayerNormMLP warns of its own default axes.
pytestmark = [
    pytest.mark.te,
    pytest.mark.usefixtures("one_device_answers"),
    pytest.mark.filterwarnings("ignore:TransformerEngine logical axes:DeprecationWarning"),
]

H, F, STEPS, LENGTH, EPS = 32, 48, 3, 4, 1e-5
METAS = "fp8_metas"
RECIPES = {
    "none": (None, None),
    "current": (Float8CurrentScaling(), te_recipe.Float8CurrentScaling()),
    "delayed": (DelayedScaling(amax_history_len=LENGTH), te_recipe.DelayedScaling(amax_history_len=LENGTH)),
}


@contextlib.contextmanager
def te_context(recipe):
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        te.autocast(enabled=recipe is not None, recipe=recipe, mesh_resource=MeshResource()),
    ):
        yield


NORM = {"scale": draw("scale", (H,), scale=0.3, shift=1.0), "ln_bias": draw("ln_bias", (H,), scale=0.3)}
RMS = {"scale": NORM["scale"]}


def layers(kind):
    """TE's module, parameters by name, and our op ``(x, params, recipe, states) -> y``."""
    if kind == "DenseGeneral":
        params = {"kernel": draw("kernel", (H, 3, 16), scale=0.2), "bias": draw("bias", (3, 16))}

        def ours(x, p, recipe, states):
            return dense(x, p["kernel"], p["bias"], recipe=recipe, state=states and states[0], backend="te")

        return DenseGeneral(features=(3, 16), use_bias=True), params, ours, 1
    if kind in ("LayerNorm", "RMSNorm"):
        rms = kind == "RMSNorm"
        norm = NormSpec(kind="rmsnorm" if rms else "layernorm", epsilon=EPS)

        def ours(x, p, recipe, states):
            return layernorm(x, p["scale"], p.get("ln_bias"), norm=norm, backend="te")

        return LayerNorm(epsilon=EPS, layernorm_type=norm.kind), RMS if rms else NORM, ours, 0
    if kind == "LayerNormDenseGeneral":
        params = {**NORM, "kernel": draw("kernel", (H, F), scale=0.2), "bias": draw("bias", (F,))}

        def ours(x, p, recipe, states):
            norm = NormSpec(epsilon=EPS)
            values = (p[name] for name in ("scale", "ln_bias", "kernel", "bias"))
            return layernorm_dense(x, *values, norm=norm, recipe=recipe, state=states and states[0], backend="te")

        return LayerNormDenseGeneral(features=F, use_bias=True, epsilon=EPS), params, ours, 1
    gated = kind == "LayerNormMLP swiglu"
    parts, name = (("silu", "linear"), "swiglu") if gated else (("gelu",), "gelu")
    params = {
        **(RMS if gated else NORM),
        "wi_kernel": draw("wi", (H, len(parts), F), scale=0.3),
        "wi_bias": draw("wi_bias", (len(parts), F), scale=0.3),
        "wo_kernel": draw("wo", (F, H), scale=0.2),
        "wo_bias": draw("wo_bias", (H,), scale=0.3),
    }
    norm = NormSpec(kind="rmsnorm" if gated else "layernorm", epsilon=EPS)

    def ours(x, p, recipe, states):
        keys = ("scale", "ln_bias", "wi_kernel", "wi_bias", "wo_kernel", "wo_bias")
        values = (p.get(key) for key in keys)
        return layernorm_mlp(x, *values, norm=norm, activation=name, recipe=recipe, states=states, backend="te")

    module = LayerNormMLP(intermediate_dim=F, activations=parts, use_bias=True, epsilon=EPS, layernorm_type=norm.kind)
    return module, params, ours, 2


def first(out):
    """TE's fused modules give ``(output, norm's output or None)``."""
    return out[0] if isinstance(out, tuple) else out


def compare_states(ours, metas, gemms, dtype, *, exact):
    """``exact`` where every quantized tensor is given, not computed."""
    for layer in range(gemms):
        for role in ROLES:
            number = layer if gemms == 1 or role != "grad" else 1 - layer  # TE's crossed gradient quantizers
            postfix = "" if gemms == 1 else f"_{number}"
            state, dtype = ours[layer][role], jnp.float8_e5m2 if role == "grad" else jnp.float8_e4m3fn
            next_scale = scale_in_use(state, dtype, amax_rule_of(RECIPES["delayed"][0])).reshape(1)
            newest_first = np.asarray(metas[f"{role}{postfix}_amax_history"])[1:][::-1]
            if exact:
                assert_bitwise(next_scale, metas[f"{role}{postfix}_scale"], what=f"{layer} {role}")
                assert_bitwise(np.asarray(state["amax_history"])[: LENGTH - 1], newest_first, what=f"{layer} {role}")
            else:
                limit = 1e-5 if dtype == "float32" else 0.1
                np.testing.assert_allclose(next_scale, metas[f"{role}{postfix}_scale"], rtol=limit)
                np.testing.assert_allclose(state["amax_history"][: LENGTH - 1], newest_first, rtol=limit)


KINDS = ["DenseGeneral", "LayerNormDenseGeneral", "LayerNormMLP gelu", "LayerNormMLP swiglu"]


@pytest.mark.parametrize(
    ("kind", "recipe", "dtype"),
    [(kind, recipe, dtype) for dtype in ("float32", "bfloat16") for kind in KINDS for recipe in RECIPES]
    + [(kind, "none", dtype) for dtype in ("float32", "bfloat16") for kind in ("LayerNorm", "RMSNorm")],
)
def test_same_as_tes_module(kind, recipe, dtype):
    """Three steps for the delayed recipe, TE's metas and our states each carried over from the step before."""
    our_recipe, their_recipe = RECIPES[recipe]
    module, params, ours, gemms = layers(kind)
    steps = STEPS if recipe == "delayed" else 1
    state = init_gemm_state(our_recipe)
    states = None if state is None else (state,) * gemms
    metas = {}
    x0 = draw("x", (2, 16, H), dtype, shift=0.3)

    def our_step(params, states, x, g):
        y, vjp = jax.vjp(lambda x, p, s: ours(x, p, our_recipe, merging(s)), x, params, states)
        return y, vjp(g)

    def their_step(params, metas, x, g):
        def apply(x, params, metas):
            return first(module.apply({"params": params, METAS: metas}, x))

        y, vjp = jax.vjp(apply, x, params, metas)
        return y, vjp(g)

    our_step, their_step = quick_jit(our_step), quick_jit(their_step)
    with te_context(their_recipe):
        metas = module.init(jax.random.key(0), x0).get(METAS, {})
    assert len(metas) == (6 * gemms if recipe == "delayed" else 0)
    out_shape = jax.eval_shape(lambda x: ours(x, params, our_recipe, states), x0).shape

    for step in range(steps):
        x = (x0.astype(jnp.float32) * (1.0 + step)).astype(dtype)
        g = draw("g", out_shape, dtype, scale=0.1 * 2.0**step)
        with te_context(their_recipe):
            their_y, (their_dx, their_dparams, metas) = their_step(params, metas, x, g)
        y, (dx, dparams, states) = our_step(params, states, x, g)
        check_values(recipe, dtype, kind, step, (y, dx, dparams), (their_y, their_dx, their_dparams))
        if recipe == "delayed":
            compare_states(states, metas, gemms, dtype, exact=kind == "DenseGeneral")


def check_values(recipe, dtype, kind, step, ours, theirs):
    (y, dx, dparams), (their_y, their_dx, their_dparams) = ours, theirs
    pairs = {"y": (y, their_y), "dx": (dx, their_dx)}
    pairs |= {f"d{name}": (dparams[name], their_dparams[name]) for name in dparams}
    for name, (actual, expected) in pairs.items():
        what = f"{kind} {recipe} {dtype}, step {step}: {name}"
        assert name not in ("y", "dx") or actual.dtype == expected.dtype == jnp.dtype(dtype), what
        assert name in ("y", "dx") or actual.dtype == jnp.float32, (
            what
        )  # TE's kernel gradients come in the compute dtype
        if dtype == "float32" and recipe != "none" and "MLP" in kind and name in ("dscale", "dln_bias"):
            # Sums over rows: a value that rounds the other way changes one row, and so each of these sums a little.
            assert relative_l2(actual, expected) < 0.02, what
        elif dtype == "float32":
            check = assert_same_rounding if recipe != "none" and "MLP" in kind else assert_close
            check(actual, expected, 4 * TOLERANCE["float32"], what=what)
        else:
            computed_operand = recipe != "none" and kind != "DenseGeneral"
            limit = 0.062 if computed_operand else 4 * TOLERANCE["bfloat16"]
            assert relative_l2(actual, expected) < limit, what


def test_tes_crossed_gradient_quantizers():
    """The premise of `compare_states`: if TE uncrosses them, this fails and the mapping here must change."""
    module, params, _, _ = layers("LayerNormMLP gelu")
    x, g = draw("x", (2, 16, H)), draw("g", (2, 16, H), scale=7.0)
    with te_context(RECIPES["delayed"][1]):
        metas = module.init(jax.random.key(0), x)[METAS]
        _, vjp = jax.vjp(lambda m: first(module.apply({"params": params, METAS: m}, x)), metas)
        (metas,) = vjp(g)
    assert_bitwise(
        metas["grad_0_amax_history"][-1], jnp.max(jnp.abs(g)), what="FFN2's output gradient, with FFN1's name"
    )
