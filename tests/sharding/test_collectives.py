"""Code on each device of a mesh: shapes of shards, which mesh it is, collectives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jax_te.config import ParallelConfig
from jax_te.quantize import OpaqueTree
from jax_te.sharding import (
    all_gather,
    device_mesh,
    flat,
    local_shape,
    make_mesh,
    mesh_dims,
    partition_spec,
    reduce_max,
    reduce_sum,
    reshard,
)
from tests.support.numerics import assert_bitwise, draw

ROWS = (("data",), ("tensor",))
MESH = AbstractMesh((2, 4), ("data", "tensor"))


def test_local_shapes() -> None:
    assert flat(ROWS) == ("data", "tensor")
    assert local_shape((6, 8), ROWS, MESH) == (3, 2)
    assert local_shape((6, 6), ROWS, MESH) is None
    assert local_shape((8, 3), (("data", "tensor"), ()), MESH) == (1, 3)
    assert partition_spec((("data", "tensor"), (), ("data",))) == P(("data", "tensor"), None, "data")


@pytest.mark.parametrize("sizes", [{}, {"data": 2}, {"data": 2, "tensor": 4}])
def test_which_mesh(sizes: dict[str, int]) -> None:
    """One device is no mesh, and neither is one that a shard_map has taken."""
    assert device_mesh() is None
    with jax.set_mesh(make_mesh(ParallelConfig(**sizes))):
        found: list[Any] = [device_mesh()]

        def look(x: jax.Array) -> jax.Array:
            found.append(device_mesh())
            return x

        jax.jit(jax.shard_map(look, in_specs=P(), out_specs=P()))(jnp.ones(8))
        jax.jit(jax.shard_map(look, in_specs=P(), out_specs=P(), axis_names={"data"}, check_vma=False))(jnp.ones(8))
    assert (found[0] is None) == (not sizes)
    assert found[1] is None
    assert (found[2] is None) == (not sizes)  # an op takes the other axes then, those of size 1 as well


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
def test_collectives(axis_type: Any, dtype: Any) -> None:
    x = draw("x", (4, 8)).astype(dtype)
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, tensor=4), axis_type=axis_type)):
        mesh = device_mesh()
        assert mesh is not None
        dims = mesh_dims(("batch", "ffn"), mesh)
        assert dims == ROWS
        spec = partition_spec(dims)

        def run(x: jax.Array) -> Any:
            whole = all_gather(x, dims)
            if dtype == jnp.float8_e4m3fn:  # nobody adds these up
                return whole, x, jnp.zeros(())
            scattered = reduce_sum(whole, ("data", "tensor"), dims)
            return whole, scattered, reduce_max(jnp.max(x), ("data", "tensor"))

        split = jax.shard_map(run, in_specs=spec, out_specs=(P(), spec, P()), check_vma=False)
        whole, scattered, largest = jax.jit(split)(reshard(x, spec, mesh))
    assert_bitwise(whole, x)
    if dtype != jnp.float8_e4m3fn:
        assert_bitwise(scattered, x * jnp.asarray(8, dtype))  # eight times the same, exact in binary
        assert float(largest) == float(jnp.max(x))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_maximum_over_devices_is_that_of_one_array_and_keeps_a_nan(dtype: Any) -> None:
    """Each row is one maximum: of both signs, of infinities and zeros, and with a nan of either sign on one device."""
    nan = float("nan")
    rows = [
        [-3.0, -1.5, -2.0, -4.0],
        [1.0, -2.0, 6.0, 0.5],
        [-0.0, 0.0, -0.0, -1.0],
        [-np.inf] * 4,
        [1.0, np.inf, 2, 3],
    ]
    rows += [[nan, 1.0, np.inf, 2.0], [1.0, 2.0, 3.0, nan], [-np.inf, -nan, -1.0, -2.0]]
    x = jnp.asarray(rows, dtype)
    with jax.set_mesh(make_mesh(ParallelConfig(data=4))):
        split = jax.shard_map(lambda x: reduce_max(x, ("data",)), in_specs=P(None, "data"), out_specs=P())
        found = jax.jit(split)(x)
    assert found.dtype == dtype
    np.testing.assert_array_equal(np.asarray(found[:, 0], np.float32), np.max(np.asarray(rows, np.float32), axis=1))


def test_opaque_trees() -> None:
    tree = {"a": jnp.arange(4), "b": (jnp.ones(()), None)}
    packed = OpaqueTree.pack(tree)
    assert jax.tree.map(lambda leaf: leaf, packed).unpack().keys() == tree.keys()
    of_device = OpaqueTree.pack(tree, per_device=True)
    assert [leaf.shape for leaf in of_device.leaves] == [(1, 4), (1,)]
    assert_bitwise(of_device.unpack()["a"], tree["a"])
