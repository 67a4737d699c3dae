"""sharding_report: what a device holds, for arrays that are there and for those that might be."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jax_te.config import ParallelConfig
from jax_te.layers import LayerNormMLP
from jax_te.recipe import DelayedScaling, autocast
from jax_te.sharding import ShardingReport, ShardingRules, make_mesh, sharding_report, use_rules
from jax_te.sharding.drawing import draw_layout
from jax_te.training import abstract_train_state, create_train_state

MESH = ParallelConfig(fsdp=2, context=2, tensor=2)
TX = optax.adamw(1e-3)


def mlp(rngs: Any = None) -> LayerNormMLP:
    return LayerNormMLP(16, 64, params_dtype=jnp.bfloat16, rngs=rngs or nnx.Rngs(0))


def of(report: ShardingReport, path: str) -> Any:
    return next(array for array in report.arrays if array.path == path)


def held(tree: Any) -> dict[int, int]:
    """Bytes that each device really holds."""
    found: dict[int, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found[shard.device.id] = found.get(shard.device.id, 0) + shard.data.nbytes
    return found


@pytest.mark.costly("explicit")
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
def test_bytes_are_those_that_devices_hold(axis_type: Any) -> None:
    with autocast(DelayedScaling(amax_history_len=4)):
        state = create_train_state(mlp, TX, key=jax.random.key(0), mesh=make_mesh(MESH, axis_type=axis_type))
    report = sharding_report(state)
    assert held(state) == dict.fromkeys(range(8), report.bytes_per_device)
    assert report.bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert len(report.arrays) == len(jax.tree.leaves(state))
    kernel = of(report, "params.wi_kernel")
    assert (kernel.shape, kernel.dtype, kernel.logical_axes) == ((16, 1, 64), "bfloat16", ("fsdp", "components", "ffn"))
    assert (kernel.spec, kernel.mesh_axes) == (P("fsdp", None, "tensor"), "fsdp, -, tensor")
    assert (kernel.bytes, kernel.bytes_per_device) == (2048, 512)
    assert of(report, "masters.wo_kernel").bytes_per_device == 1024
    assert of(report, "opt_state.0.mu.wo_kernel").mesh_axes == "tensor*fsdp, -"
    parts = report.parts()
    assert list(parts) == ["step", "params", "masters", "quantizers", "opt_state", "rng", "skipped_steps"]
    assert tuple(map(sum, zip(*parts.values(), strict=True))) == (report.bytes, report.bytes_per_device)


@pytest.mark.slow
def test_what_might_be_is_what_would_be() -> None:
    mesh = make_mesh(MESH)
    asked = sharding_report(abstract_train_state(mlp, TX), AbstractMesh(mesh.axis_sizes, mesh.axis_names))
    made = sharding_report(create_train_state(mlp, TX, key=jax.random.key(0), mesh=mesh))
    assert asked == made
    assert sharding_report(abstract_train_state(mlp, TX, mesh=mesh)) == made
    model = sharding_report(mlp(), mesh)  # on one device now
    assert model.bytes_per_device == made.parts()["params"][1]
    with jax.set_mesh(mesh):
        assert sharding_report(nnx.eval_shape(mlp)) == model
    with use_rules(ShardingRules(ffn=())):
        assert of(sharding_report(mlp(), mesh), "wi_kernel").mesh_axes == "fsdp, -, -"


def test_arrays_on_one_device() -> None:
    report = sharding_report(mlp())
    assert {array.mesh_axes for array in report.arrays} == {"one device"}
    assert report.bytes == report.bytes_per_device
    size = f"{report.bytes / 1024:.4g} KiB"
    last = f"{len(report.arrays)} arrays: {size} in all, {size} on each device"
    assert str(report).splitlines()[-2:] == ["1 device: no mesh", last]


def test_the_table() -> None:
    report = sharding_report(nnx.eval_shape(mlp), AbstractMesh((2, 4), ("data", "tensor")))
    header, ruler, *rows = str(report).splitlines()
    assert header.split() == ["array", "shape", "dtype", "logical", "axes", "mesh", "axes", "bytes", "per", "device"]
    assert set(ruler) == {"-", " "}
    cells = [cell.strip() for cell in rows[-4].split("  ") if cell.strip()]
    assert cells == ["wo_kernel", "[64, 16]", "bfloat16", "ffn_fsdp, -", "tensor, -", "2,048", "512"]
    assert rows[-2] == "8 devices: data=2, tensor=4"


def test_a_picture_for_each_way_to_split() -> None:
    report = sharding_report(nnx.eval_shape(mlp), make_mesh(MESH, devices=jax.devices()[::-1]))
    assert report.draw("wi_kernel").splitlines() == [
        "(fsdp, -, tensor)  1 array: wi_kernel",
        "        tensor=0  tensor=1",
        "fsdp=0  7 5       6 4",
        "fsdp=1  3 1       2 0",
    ]
    pictures = report.draw().split("\n\n")
    assert [picture.splitlines()[0].split("  ")[0] for picture in pictures] == [
        f"({axes})" for axes in dict.fromkeys(array.mesh_axes for array in report.arrays)
    ]
    assert sum(int(picture.split("  ")[1].split()[0]) for picture in pictures) == len(report.arrays)
    with pytest.raises(ValueError, match="no array is called 'wi'"):
        report.draw("wi")


def test_pictures_are_where_the_parts_are() -> None:
    """Against JAX's own map from devices to parts, an array split three ways, one dimension over two axes."""
    mesh, spec = make_mesh(MESH), P(("context", "tensor"), None, "fsdp")
    parts: dict[Any, list[int]] = {}
    for device, index in jax.NamedSharding(mesh, spec).devices_indices_map((8, 3, 4)).items():
        parts.setdefault((index[0].start or 0, index[2].start or 0), []).append(device.id)
    cells = [" ".join(map(str, parts[row, column])) for row in (0, 2, 4, 6) for column in (0, 2)]
    header, *rows = draw_layout(spec, dict(mesh.shape), range(8)).splitlines()
    assert header.split() == ["fsdp=0", "fsdp=1"]
    assert [row.split()[:2] for row in rows] == [[f"context={c}", f"tensor={t}"] for c in (0, 1) for t in (0, 1)]
    assert [cell for row in rows for cell in row.split()[2:]] == cells
    assert draw_layout(P(), {"data": 64}, range(64)) == "whole on 0 1 2 3 4 5 ... 63"
    assert draw_layout(P("fsdp"), {"fsdp": 1}, [0]) == "whole on 0"


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"wi_bias of shape \(1, 64\): .* \('ffn'\) does not .* tensor = 5"):
        sharding_report(nnx.eval_shape(mlp), AbstractMesh((5,), ("tensor",)))
    described = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nnx.eval_shape(mlp))
    with pytest.raises(ValueError, match="ln_bias is on no device, and no mesh is set; give mesh="):
        sharding_report(described)
    places = [jax.NamedSharding(make_mesh(ParallelConfig(data=size)), P("data")) for size in (2, 4)]
    with pytest.raises(ValueError, match=r"the arrays are on 2 meshes: .*; give mesh= or move them"):
        sharding_report([jax.device_put(jnp.ones(4), place) for place in places])
