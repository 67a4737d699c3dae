"""Device meshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jax_te._validation import brief, checked
from jax_te.config import MESH_AXES, ParallelConfig


@checked
def make_mesh(
    config: ParallelConfig,
    *,
    axis_type: Literal["auto", "explicit"] = "auto",
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Return a mesh with the axes of `jax_te.config.MESH_AXES`, the last of neighbouring devices.

    Set it with ``jax.set_mesh(mesh)``. Layers run the same on both axis types and with no mesh at all.

    Args:
        config: axis sizes.
        axis_type: ``"auto"`` (the compiler propagates shardings) or ``"explicit"`` (shardings are part of types).
        devices: devices to use, in order. None: the first ``config.num_devices`` of ``jax.devices()``.

    Raises:
        ValueError: if there are fewer devices than the mesh takes, or an unknown axis type.

    >>> make_mesh(ParallelConfig(data=1)).axis_names
    ('pipeline', 'data', 'fsdp', 'expert', 'context', 'tensor')
    """
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    devices = jax.devices() if devices is None else devices
    if len(devices) < config.num_devices:
        sizes = ", ".join(f"{n}={s}" for n, s in zip(MESH_AXES, config.shape, strict=True))
        raise ValueError(
            f"the mesh {sizes} takes {config.num_devices} devices, but there are {len(devices)}; make it smaller"
            " (on CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes N devices)"
        )
    for device in devices:
        if not hasattr(device, "device_kind"):
            raise TypeError(f"devices must be devices of JAX, such as jax.devices(), got {brief(device)}")
    # Row-major: consecutive devices share a tensor group, which communicates in every layer.
    grid = np.asarray(devices[: config.num_devices], dtype=object).reshape(config.shape)
    return Mesh(grid, MESH_AXES, axis_types=(types[axis_type],) * len(MESH_AXES))
