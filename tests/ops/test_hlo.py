"""What was lowered and what XLA made of it: FP8 operands at every GEMM, and nowhere optimized away."""

import re

import jax
import jax.numpy as jnp
import pytest

from jax_te.recipe import DelayedScaling, Float8CurrentScaling, Format
from tests.support.cases import make_case
from tests.support.states import merging

# Of each linear layer: fprop x·kernel, dgrad grad·kernel, wgrad x·grad.
HYBRID = [("E4M3FN", "E4M3FN"), ("E4M3FN", "E5M2"), ("E5M2", "E4M3FN")]


def lowered(case, recipe):
    def value_and_gradients(args, states, g):
        y, vjp = jax.vjp(lambda a, s: case.run(a, merging(s), recipe=recipe), args, states)
        return y, vjp(g)

    return jax.jit(value_and_gradients).lower(case.args, case.states(recipe), case.g)


def gemm_operands(text):
    """FP8 formats of both operands of each ``dot_general``."""
    pattern = r"stablehlo\.dot_general.* : \(tensor<[\dx]*(\w+)>, tensor<[\dx]*(\w+)>\)"
    return sorted((left.removeprefix("f8"), right.removeprefix("f8")) for left, right in re.findall(pattern, text))


@pytest.mark.costly("delayed-layernorm_mlp swiglu", slow=("delayed-dense",))
@pytest.mark.wide
@pytest.mark.parametrize("name", ["dense", "layernorm_dense", "layernorm_mlp swiglu"])
@pytest.mark.parametrize(
    "recipe", [DelayedScaling(amax_history_len=4), Float8CurrentScaling()], ids=lambda recipe: recipe.name
)
def test_every_gemm_multiplies_fp8(name, recipe):
    case = make_case(name).astype(jnp.bfloat16)
    low = lowered(case, recipe)
    assert gemm_operands(low.as_text()) == sorted(HYBRID * case.gemms)
    # And after optimization: each operand is still converted to FP8, as the numbers in the other files say, too.
    compiled = low.compile().as_text()
    e4m3, e5m2 = (set(re.findall(rf"{kind}\[([\d,]+)\]", compiled)) for kind in ("f8e4m3fn", "f8e5m2"))
    assert len(e4m3) >= 2 * case.gemms
    assert len(e5m2) >= 1

    def size(shape):
        return eval(shape.replace(",", "*"))

    kernels = [a.size for key, a in case.args.items() if key.endswith("kernel")]
    assert set(kernels) <= {size(shape) for shape in e4m3}
    assert case.g.size in {size(shape) for shape in e5m2}


def test_e4m3_everywhere():
    low = lowered(make_case("dense"), Float8CurrentScaling(fp8_format=Format.E4M3))
    assert gemm_operands(low.as_text()) == [("E4M3FN", "E4M3FN")] * 3
    assert "f8e5m2" not in low.compile().as_text()


def test_no_fp8_without_a_recipe():
    low = lowered(make_case("layernorm_mlp gelu").astype(jnp.bfloat16), None)
    # The fp32 kernels' gradients: XLA's CPU dot multiplies no bf16 into fp32, so their operands are widened.
    assert gemm_operands(low.as_text()) == [("bf16", "bf16")] * 4 + [("f32", "f32")] * 2
    assert "f8e" not in low.compile().as_text()


def test_backward_keeps_fp8_operands_and_no_high_precision_copies():
    """The residuals of a linear layer are the quantized input and kernel."""
    case = make_case("dense").astype(jnp.bfloat16)
    _, vjp = jax.vjp(lambda a: case.run(a, recipe=Float8CurrentScaling()), case.args)
    saved = {leaf.shape: leaf.dtype for leaf in jax.tree.leaves(vjp) if getattr(leaf, "ndim", 0) > 1}
    assert saved == {case.args["x"].shape: jnp.float8_e4m3fn, case.args["kernel"].shape: jnp.float8_e4m3fn}
