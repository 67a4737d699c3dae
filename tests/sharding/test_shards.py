"""Code on each device of a mesh: layouts, what goes in and out, collectives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jax_te.config import ParallelConfig
from jax_te.sharding import make_mesh
from jax_te.sharding.shards import (
    PER_RANK,
    WHOLE,
    Layout,
    RankTree,
    gather,
    layout_of,
    on_ranks,
    rank_mesh,
    reduce_max,
    reduce_sum,
)
from tests.support.numerics import assert_bitwise, draw

ROWS = Layout((("data",), ("tensor",)))
MESH = AbstractMesh((2, 4), ("data", "tensor"))


def test_local_shapes() -> None:
    assert ROWS.axes == ("data", "tensor")
    assert ROWS.local_shape((6, 8), MESH) == (3, 2)
    assert ROWS.local_shape((6, 6), MESH) is None
    assert Layout((("data", "tensor"), ())).local_shape((8, 3), MESH) == (1, 3)


@pytest.mark.parametrize("sizes", [{}, {"data": 2, "tensor": 4}])
def test_which_mesh(sizes: dict[str, int]) -> None:
    """One device is no mesh, and neither is one that a shard_map has taken."""
    assert rank_mesh() is None
    with jax.set_mesh(make_mesh(ParallelConfig(**sizes))):
        found: list[Any] = [rank_mesh()]
        spec = jax.sharding.PartitionSpec()
        jax.jit(jax.shard_map(lambda x: (found.append(rank_mesh()), x)[1], in_specs=spec, out_specs=spec))(jnp.ones(8))
    assert (found[0] is None) == (not sizes)
    assert found[1] is None


def _send(factor: float, x: jax.Array, own: Any) -> Any:
    whole = gather(x, (("data",), ("tensor",)))
    scattered = reduce_sum(whole, ("data", "tensor"), (("data",), ("tensor",)))
    kept = {"rank": jax.lax.axis_index(("data", "tensor")), "x": x * factor, "before": own["rank"]}
    return whole, scattered, reduce_max(jnp.max(x), ("data", "tensor")), kept


def _start(_: None, x: jax.Array) -> Any:
    return {"rank": jax.lax.axis_index(("data", "tensor"))}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
def test_collectives_and_what_a_device_keeps(axis_type: Any, dtype: Any) -> None:
    x = draw("x", (4, 8)).astype(dtype)
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, tensor=4), axis_type=axis_type)):
        mesh = rank_mesh()
        assert mesh is not None
        rows = layout_of(("batch", "ffn"), mesh)
        own = on_ranks(_start, None, mesh, (rows,), PER_RANK, (x,))
        assert isinstance(own, RankTree)
        sums = Layout(((), ())) if dtype == jnp.float8_e4m3fn else rows
        if dtype == jnp.float8_e4m3fn:  # nobody adds these up
            (whole,) = on_ranks(_only_gather, None, mesh, (rows,), (WHOLE,), (x,))
            assert_bitwise(whole, x)
            return
        out = on_ranks(_send, 2.0, mesh, (rows, PER_RANK), (WHOLE, sums, WHOLE, PER_RANK), (x, own))
    whole, scattered, largest, kept = out
    assert_bitwise(whole, x)
    assert_bitwise(scattered, x * jnp.asarray(8, dtype))  # eight times the same, exact in binary
    assert float(largest) == float(jnp.max(x))
    before, rank, parts = jax.tree.leaves(jax.tree.unflatten(kept.treedef, kept.leaves))
    np.testing.assert_array_equal(rank, np.arange(8))
    np.testing.assert_array_equal(before, np.arange(8))
    assert parts.shape == (8, 2, 2)
    assert_bitwise(np.asarray(parts)[3], np.asarray(x * jnp.asarray(2, dtype))[:2, 6:])


def _only_gather(_: None, x: jax.Array) -> Any:
    return (gather(x, (("data",), ("tensor",))),)
