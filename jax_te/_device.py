"""The device for which JAX compiles what names none."""

from __future__ import annotations

from typing import Any

import jax


def default_device() -> Any:
    """Return the device on which JAX runs what names none, that of ``jax.default_device`` if it is set."""
    # Local ones: the first of all devices is another process's in all processes but the first.
    device = jax.config.jax_default_device or jax.local_devices()[0]
    # jax_default_device may hold the name of a platform in place of a device.
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device


def default_platform() -> str:
    """Return the platform of `default_device`: ``"cpu"`` or ``"gpu"``.

    Every choice of a kernel asks this function, and each cache of such choices has its result in the key: under
    ``jax.default_device(jax.devices("cpu")[0])`` a program is compiled for the CPU on a machine with a GPU, too.

    >>> with jax.default_device(jax.devices("cpu")[0]):
    ...     default_platform()
    'cpu'
    """
    return jax.default_backend() if jax.config.jax_default_device is None else default_device().platform
