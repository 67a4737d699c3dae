"""Arrays of several processes on the host, and files that the first process writes while the others wait."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_te._processes import Meetings, is_first


def write_by_the_first(write: Callable[[Iterator[Any]], None], tensors: Iterator[Any], meetings: Meetings) -> None:
    """Let the first process write; no process returns before everything is written.

    Args:
        write: function that writes tensors, called in the first process.
        tensors: tensors to write. All processes take all of them, and meet for each parameter meanwhile, so that none
            waits for more than one.
        meetings: meetings of the call. If one process fails, all raise.

    Raises:
        OSError: if another process fails, or was waited for in vain (TimeoutError).
    """
    if is_first():
        write(tensors)
    else:
        for _ in tensors:
            pass
    meetings.meet()


@overload
def on_host(array: jax.Array, meetings: Meetings) -> np.ndarray: ...
@overload
def on_host(array: jax.Array, meetings: Meetings, *, everywhere: bool) -> np.ndarray | None: ...
def on_host(array: jax.Array, meetings: Meetings, *, everywhere: bool = True) -> np.ndarray | None:
    """Return an array of all processes in host memory; all of them must call this, and meet here.

    An array whose shards other processes hold is gathered shard by shard: devices hold one more shard of it meanwhile,
    whatever its size.

    Args:
        array: the array.
        meetings: meetings of the call for which the array is needed.
        everywhere: whether all processes get it. False: the first one, and None in others.

    Raises:
        OSError: if another process does not take part (TimeoutError), or has failed.
    """
    meetings.meet()  # for an array that is here, too: what a process waits for is the work on one array
    wanted = everywhere or is_first()
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array) if wanted else None
    place = array.sharding
    if not isinstance(place, NamedSharding):
        gathered = _replicated(array)
        meetings.wait_until(gathered.is_ready)  # a collective has no bound of its own
        return np.asarray(gathered.addressable_data(0)) if wanted else None
    whole = np.empty(array.shape, array.dtype) if wanted else None
    indices = place.devices_indices_map(array.shape)
    # Devices that hold the same shard have the same index.
    owners: dict[str, tuple[tuple[slice, ...], int]] = {}
    for number, device in enumerate(_mesh_of(place).devices.flat):
        owners.setdefault(str(indices[device]), (indices[device], number))
    for index, number in owners.values():
        shard = _host_shard(array, place, number, meetings)
        if whole is not None:
            whole[index] = shard
    return whole


def _replicated(array: jax.Array) -> Any:
    """Return an array whose sharding has no mesh as a whole on each of its devices."""
    devices = [*array.sharding.devices_indices_map(array.shape)]
    everywhere = NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec())
    return jax.jit(lambda array: array, out_shardings=everywhere)(array)


def _mesh_of(place: NamedSharding) -> Mesh:
    """Return the mesh of an array that is there: one of devices."""
    assert isinstance(place.mesh, Mesh)
    return place.mesh


def _host_shard(array: jax.Array, place: NamedSharding, number: int, meetings: Meetings) -> np.ndarray:
    """Return the shard of a device, in all processes.

    Args:
        array: the array.
        place: its sharding.
        number: number of the device in the mesh.
        meetings: see `on_host`.
    """
    shard = _shard(array, np.int32(number), mesh=_mesh_of(place), spec=place.spec)
    meetings.wait_until(shard.is_ready)  # a collective has no bound of its own
    return np.asarray(shard.addressable_data(0)).view(array.dtype).reshape(place.shard_shape(array.shape))


@functools.partial(jax.jit, static_argnames=("mesh", "spec"))
def _shard(array: jax.Array, number: jax.Array, *, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """Return the bytes of the shard of a device, on all devices."""

    def chosen(own: jax.Array, number: jax.Array) -> jax.Array:
        # Bytes of integers: a sum of floats would lose the sign of zero.
        own = jax.lax.bitcast_convert_type(own, jnp.uint8)
        kept = jnp.where(jax.lax.axis_index(mesh.axis_names) == number, own, jnp.uint8(0))
        return jax.lax.psum(kept, mesh.axis_names)

    none = PartitionSpec()
    return jax.shard_map(chosen, mesh=mesh, in_specs=(spec, none), out_specs=none)(array, number)
