"""Sharding of the arrays of a model or a train state over a mesh, and their bytes on a device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from jax_te._text import table
from jax_te._validation import checked
from jax_te.sharding.drawing import draw_layout, mesh_axes_of
from jax_te.sharding.placement import leaves_with_axes, shardings_of
from jax_te.typing import LogicalAxes, PyTree


@dataclass(frozen=True, kw_only=True)
class ArrayPlacement:
    """One array and its placement.

    Args:
        path: names from the root, joined by dots.
        shape: shape of the whole array.
        dtype: name of the dtype.
        logical_axes: a name of `ShardingRules` or None for each dimension.
        spec: the mesh axes of each dimension.
        mesh_axes: ``spec`` as text, e.g. ``fsdp, -, tensor``; ``one device`` for an array that is on no mesh.
        bytes: bytes of the whole array, with a whole byte for each number of four bits.
        bytes_per_device: bytes of one device's part.

    >>> kernel = nnx.Param(jnp.ones((4, 8)), logical_axes=("fsdp", "ffn"))
    >>> placed = sharding_report({"kernel": kernel}, AbstractMesh((2, 2), ("fsdp", "tensor"))).arrays[0]
    >>> placed.path, placed.mesh_axes, placed.bytes, placed.bytes_per_device
    ('kernel', 'fsdp, tensor', 128, 32)
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    logical_axes: LogicalAxes
    spec: PartitionSpec
    mesh_axes: str
    bytes: int
    bytes_per_device: int


@dataclass(frozen=True, kw_only=True)
class ShardingReport:
    """Result of `sharding_report`. ``str()`` gives a table, `draw` a picture of each kind of sharding.

    Args:
        arrays: placements of the arrays, in the order of ``jax.tree.leaves``.
        mesh_shape: sizes of the mesh's axes by name.
        device_ids: IDs of the mesh's devices, in its order.

    >>> kernel = nnx.Param(jnp.ones((4, 8)), logical_axes=("fsdp", "ffn"))
    >>> report = sharding_report({"params": {"kernel": kernel}}, AbstractMesh((2,), ("fsdp",)))
    >>> report.bytes, report.bytes_per_device, report.parts()
    (128, 64, {'params': (128, 64)})
    >>> print(report.draw())
    (fsdp, -)  1 array: params.kernel
    fsdp=0  0
    fsdp=1  1
    """

    arrays: tuple[ArrayPlacement, ...]
    mesh_shape: dict[str, int]
    device_ids: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all arrays, each counted once."""
        return sum(array.bytes for array in self.arrays)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of one shard of each array. Every device of the mesh holds as many if all arrays are on it; arrays that
        are on single devices count as if they were all on the same one.
        """
        return sum(array.bytes_per_device for array in self.arrays)

    def parts(self) -> dict[str, tuple[int, int]]:
        """Return ``(bytes, bytes per device)`` of everything under each first name, e.g. ``params``, ``opt_state``."""
        found: dict[str, tuple[int, int]] = {}
        for array in self.arrays:
            first = array.path.partition(".")[0]
            whole, part = found.get(first, (0, 0))
            found[first] = whole + array.bytes, part + array.bytes_per_device
        return found

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        header = ("array", "shape", "dtype", "logical axes", "mesh axes", "bytes", "per device")
        yield table(header, [_row(array) for array in self.arrays], right=2)
        sizes = ", ".join(f"{name}={size}" for name, size in self.mesh_shape.items())
        devices = math.prod(self.mesh_shape.values())
        yield ""
        yield f"{devices} device{'s' * (devices != 1)}: {sizes or 'no mesh'}"
        for name, (whole, part) in self.parts().items():
            # A name that is itself an array is in the table already.
            if any(array.path != name and array.path.startswith(f"{name}.") for array in self.arrays):
                yield f"{name}: {_size(whole)} in all, {_size(part)} on each device"
        yield f"{len(self.arrays)} arrays: {_size(self.bytes)} in all, {_size(self.bytes_per_device)} on each device"

    @checked
    def draw(self, path: str | None = None) -> str:
        """Return the devices that hold each shard of an array, as text.

        Args:
            path: an array's. None: one picture for every way to split that there is, with the names of its arrays.

        Raises:
            ValueError: for a path that no array has.
        """
        if path is not None and path not in {array.path for array in self.arrays}:
            raise ValueError(f"no array is called {path!r}; the report's table has their names")
        chosen = [array for array in self.arrays if path in (None, array.path)]
        pictures = []
        for axes in dict.fromkeys(array.mesh_axes for array in chosen):
            alike = [array for array in chosen if array.mesh_axes == axes]
            names = ", ".join(array.path for array in alike[:3]) + (", ..." if len(alike) > 3 else "")
            title = f"({axes})  {len(alike)} array{'s' * (len(alike) != 1)}: {names}"
            pictures.append(f"{title}\n{draw_layout(alike[0].spec, self.mesh_shape, self.device_ids)}")
        return "\n\n".join(pictures)


@checked
def sharding_report(model_or_state: PyTree, mesh: Mesh | AbstractMesh | None = None) -> ShardingReport:
    """Report every array of a model or a train state: its axes, sharding, and bytes on each device.

    Args:
        model_or_state: a pytree of arrays or ``jax.ShapeDtypeStruct``, e.g. a module, also an abstract one
            (``nnx.eval_shape``), or a `jax_te.training.TrainState`.
        mesh: mesh over which to place the arrays by their logical axes. It needs no devices:
            ``jax.sharding.AbstractMesh((2, 4), ("fsdp", "tensor"))`` will do. None: their present placement. Abstract
            arrays without a sharding are placed on the mesh in use, by their logical axes.

    Returns:
        A `ShardingReport`. Its numbers cover arrays between steps; a step's additional memory is in
        ``compiled.memory_analysis()``.

    Raises:
        ValueError: for a dimension that does not divide over its mesh axes; for arrays on several meshes; without a
            mesh, for arrays without a placement.

    Source: ``jax.debug.visualize_array_sharding`` draws one array.

    >>> from jax_te.layers import LayerNormMLP
    >>> mlp = nnx.eval_shape(lambda: LayerNormMLP(16, 64, rngs=nnx.Rngs(0)))
    >>> report = sharding_report(mlp, jax.sharding.AbstractMesh((2, 4), ("fsdp", "tensor")))
    >>> report.arrays[-1].path, report.arrays[-1].mesh_axes, report.arrays[-1].bytes_per_device
    ('wo_kernel', 'tensor*fsdp, -', 512)
    >>> print(report.draw("wi_kernel"))
    (fsdp, -, tensor)  1 array: wi_kernel
            tensor=0  tensor=1  tensor=2  tensor=3
    fsdp=0  0         1         2         3
    fsdp=1  4         5         6         7
    """
    found = leaves_with_axes(model_or_state)
    on = jax.sharding.get_mesh() if mesh is None else mesh
    planned: list[Any] = [None] * len(found) if on.empty else list(shardings_of(model_or_state, on))
    if mesh is None:
        planned = [_place(leaf) or plan for (_, leaf, _), plan in zip(found, planned, strict=True)]
    for (name, _, _), sharding in zip(found, planned, strict=True):
        if sharding is None:
            raise ValueError(f"{name} is on no device, and no mesh is set; give mesh=, or set one with jax.set_mesh")
    meshes = {sharding.mesh.abstract_mesh: sharding.mesh for sharding in planned if isinstance(sharding, NamedSharding)}
    if len(meshes) > 1:
        raise ValueError(
            f"the arrays are on {len(meshes)} meshes: {', '.join(map(str, meshes))}; give mesh= or move them"
        )
    mesh_shape = {name: size for found_on in meshes for name, size in found_on.shape.items()}
    numbers = range(math.prod(mesh_shape.values()))
    # An AbstractMesh has no devices: they are numbered in the order of the mesh.
    for used in meshes.values():
        numbers = [device.id for device in used.devices.flat] if isinstance(used, Mesh) else numbers
    return ShardingReport(
        arrays=tuple(_placement(*leaf, sharding) for leaf, sharding in zip(found, planned, strict=True)),
        mesh_shape=mesh_shape,
        device_ids=tuple(numbers),
    )


def _place(leaf: Any) -> Sharding | None:
    """Return the placement of an array; None for one without a placement."""
    sharding = getattr(leaf, "sharding", None)
    # Arrays of nnx.eval_shape under a mesh have their type's sharding, which leaves the mesh's Auto axes open.
    is_type = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh)
    return None if is_type else sharding


def _placement(name: str, leaf: Any, axes: LogicalAxes | PartitionSpec, sharding: Sharding) -> ArrayPlacement:
    named = isinstance(sharding, NamedSharding)
    spec = sharding.spec if named else PartitionSpec()
    texts = ["*".join(entry) or "-" for entry in mesh_axes_of(spec, leaf.ndim)]
    # Any kind of Sharding has shards; only a NamedSharding has a spec.
    part = sharding.shard_shape(leaf.shape)
    return ArrayPlacement(
        path=name.replace("/", "."),
        shape=tuple(leaf.shape),
        dtype=str(leaf.dtype),
        # Placed by Flax's names: the rules, which alone know the names, have been applied.
        logical_axes=axes if isinstance(axes, tuple) else (None,) * leaf.ndim,
        spec=spec,
        mesh_axes=", ".join(texts) if named else "one device" if len(sharding.device_set) == 1 else str(sharding),
        bytes=math.prod(leaf.shape) * leaf.dtype.itemsize,
        bytes_per_device=math.prod(part) * leaf.dtype.itemsize,
    )


def _row(array: ArrayPlacement) -> tuple[str, ...]:
    logical = ", ".join(name or "-" for name in array.logical_axes)
    shape = ", ".join(map(str, array.shape))
    sizes = f"{array.bytes:,}", f"{array.bytes_per_device:,}"
    return (array.path, f"[{shape}]", array.dtype, logical, array.mesh_axes, *sizes)


def _size(count: int) -> str:
    """Return a size for people: ``1536`` -> ``1.5 KiB``."""
    size, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"
