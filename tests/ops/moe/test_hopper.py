"""Grouped layers through Hopper's primitives, whose kernels run in Pallas's GPU interpreter."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jax_te.ops import RowGroups, grouped_dense
from jax_te.ops.moe import row_groups
from jax_te.ops.pallas import grouped
from tests.gpu import test_grouped_dense as on_gpu


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The primitives as on a Hopper GPU, with their kernels in the interpreter."""
    for module in (row_groups, grouped):
        monkeypatch.setattr(module, "supported", lambda: (True, "interpreted"))
    for name in ("grouped_gemm", "grouped_gemm_over_rows", "scaled_quantize", "block_quantize", "block_quantize_2d"):
        monkeypatch.setattr(grouped, name, functools.partial(getattr(grouped, name), interpret=True))


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__[:2] < (0, 11), reason="JAX before 0.11 has no interpreter for these kernels")
@pytest.mark.parametrize(
    ("recipe", "kernel"),
    [("none", "gated"), ("delayed", "plain"), ("delayed", "gated"), ("current", "plain"), ("block", "gated")],
    ids=["none-gated", "delayed-plain", "delayed-gated", "current-plain", "block-gated"],
)
def test_each_group_is_one_layer(recipe, kernel):
    on_gpu.test_each_group_is_one_layer(recipe, "uneven", kernel)


@pytest.mark.skipif(jax.__version_info__[:2] < (0, 11), reason="JAX before 0.11 cannot trace these kernels")
def test_second_derivatives_are_refused():
    groups = RowGroups(sizes=jnp.array([100, 28]), rows=256, alignment=128)
    x, kernels = jnp.ones((256, 64), jnp.bfloat16), jnp.ones((2, 64, 64), jnp.bfloat16)
    slope = jax.grad(lambda x: jnp.sum(grouped_dense(x, kernels, groups=groups) ** 2))
    jax.eval_shape(slope, x)
    with pytest.raises(TypeError, match="second derivatives"):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(slope(x) ** 2)), x)
