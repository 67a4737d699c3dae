"""Grouped layers through Hopper's primitives, whose kernels run in Pallas's GPU interpreter."""

import functools

import jax
import pytest

from jax_te.ops.moe import row_groups
from jax_te.ops.pallas import grouped
from tests.gpu import test_grouped_dense as on_gpu


@pytest.mark.costly
@pytest.mark.skipif(jax.__version_info__[:2] < (0, 11), reason="JAX before 0.11 has no interpreter for these kernels")
@pytest.mark.parametrize(
    ("recipe", "kernel"),
    [("none", "gated"), ("delayed", "plain"), ("delayed", "gated"), ("current", "plain")],
    ids=["none-gated", "delayed-plain", "delayed-gated", "current-plain"],
)
def test_each_group_is_one_layer(recipe, kernel, monkeypatch):
    for module in (row_groups, grouped):
        monkeypatch.setattr(module, "supported", lambda: (True, "interpreted"))
    for name in ("grouped_gemm", "grouped_gemm_over_rows", "scaled_quantize"):
        monkeypatch.setattr(grouped, name, functools.partial(getattr(grouped, name), interpret=True))
    on_gpu.test_each_group_is_one_layer(recipe, "uneven", kernel)
