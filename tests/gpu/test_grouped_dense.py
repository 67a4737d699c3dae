"""`grouped_dense` on a Hopper GPU beside `dense` of each group's rows in plain JAX.

Quantized operands are the same bits; products differ by the order of sums, and FP8 ones since tensor cores keep
about 14 bits of a sum.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops import RowGroups, dense, explain_backend, group_alignment, grouped_dense, row_bound
from jax_te.ops.pallas import grouped as hopper
from jax_te.ops.pallas import supported
from jax_te.quantize import init_gemm_state, precision_of
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from tests.support.numerics import assert_bitwise, draw, relative_l2
from tests.support.states import merging

pytestmark = pytest.mark.gpu

RECIPES = {
    "none": None,
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
SIZES = {"uneven": [100, 0, 513, 128], "one has all": [0, 741, 0, 0], "nobody": [0, 0, 0, 0]}
KERNELS = {"plain": (256, 384), "gated": (256, 2, 192)}


@pytest.fixture(autouse=True)
def needs_hopper():
    ok, reason = supported()
    if not ok:
        pytest.fail(reason)


def run(fn, recipe, groups_of_state, *arrays, g):
    """Output and gradients, of the state as well; a state for each group has seen amaxes of its own."""
    state = init_gemm_state(recipe, groups=groups_of_state) if isinstance(recipe, DelayedScaling) else None
    y, vjp = jax.vjp(lambda state, *arrays: fn(merging(state), *arrays), state, *arrays)
    return y, vjp(g)


@pytest.mark.parametrize("kernel", list(KERNELS))
@pytest.mark.parametrize("sizes", list(SIZES))
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_each_group_is_one_layer(recipe, sizes, kernel):
    recipe, sizes, (k, *n) = RECIPES[recipe], SIZES[sizes], KERNELS[kernel]
    alignment = group_alignment(recipe)
    assert alignment == 128
    rows = row_bound(741, len(sizes), alignment=alignment)
    groups = RowGroups(sizes=jnp.array(sizes), rows=rows, alignment=alignment)
    assert hopper.runs_here(jnp.bfloat16, 4, alignment, precision_of(recipe), placed=False, kernel_all_gather=())
    valid = (groups.of_rows() < len(sizes)).reshape(-1, *(1,) * len(n))
    x = jnp.where(valid.reshape(-1, 1), draw("x", (rows, k), jnp.bfloat16), 0)
    w, g = draw("w", (len(sizes), k, *n), jnp.bfloat16), draw("g", (rows, *n), jnp.bfloat16)

    @jax.jit
    def grouped(x, w, g):
        return run(lambda s, x, w: grouped_dense(x, w, groups=groups, recipe=recipe, state=s), recipe, 4, x, w, g=g)

    y, (state, dx, dw) = grouped(x, w, g)
    for group, (start, size) in enumerate(zip(np.asarray(groups.starts), sizes, strict=True)):
        own = slice(int(start), int(start) + size)
        if not size:
            assert not np.asarray(dw[group]).any()
            continue

        def one(state, x, w):
            return dense(x, w, recipe=recipe, state=state, backend="xla")

        pad = -size % 16  # rows of zeros, as TE pads the rows of an expert
        x_own, g_own = (jnp.pad(a[own], ((0, pad), *((0, 0),) * (a.ndim - 1))) for a in (x, g))
        operands = [x_own, w[group], g_own]
        if recipe is None:  # XLA may add up bf16 products in bf16
            operands = [operand.astype(jnp.float32) for operand in operands]
        y_own, (state_own, dx_own, dw_own) = run(one, recipe, None, *operands[:2], g=operands[2])
        for actual, expected in ((y[own], y_own[:size]), (dx[own], dx_own[:size]), (dw[group], dw_own)):
            assert relative_l2(actual.astype(jnp.float32), expected.astype(jnp.float32)) < 2.0**-8
        if state is not None:
            jax.tree.map(lambda all_, own: assert_bitwise(all_[group], own), state, state_own)  # noqa: B023
    padding = ~np.asarray(valid).reshape(-1)
    assert not np.asarray(y)[padding].any()
    assert not np.asarray(dx)[padding].any()


def test_it_is_told():
    assert explain_backend("grouped_dense").backend == "xla"
