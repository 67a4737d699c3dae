"""Devices on which the kernels run, and requirements on their arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_te._device import default_device
from jax_te.errors import BackendUnavailableError
from jax_te.typing import Array

BLOCK = 128
"""Values along one side of a block that shares a scale."""

OLDEST_JAX = (0, 11)
"""The first JAX whose Mosaic GPU multiplies E4M3 by E5M2."""

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_FP8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def supported() -> tuple[bool, str]:
    """Return whether the kernels of this folder run on the default device, and the reason.

    They need a GPU of compute capability 9 (H100, H200) and JAX 0.11. With ``interpret=True`` they run anywhere,
    slowly.

    >>> supported()[0]
    False
    """
    if jax.__version_info__[:2] < OLDEST_JAX:
        return False, _too_old()
    device = default_device()
    if device.platform != "gpu":
        return False, f"jax_te's Pallas kernels need an NVIDIA GPU, the default device is of platform {device.platform}"
    # wgmma is an instruction of Hopper alone: later GPUs do not have it.
    if not device.compute_capability.startswith("9."):
        return False, (
            "jax_te's Pallas kernels need compute capability 9 (Hopper), this GPU has " + device.compute_capability
        )
    return True, f"Hopper GPU, compute capability {device.compute_capability}"


def check_jax() -> None:
    """Raise where JAX is too old to run or interpret the kernels."""
    if jax.__version_info__[:2] < OLDEST_JAX:
        raise BackendUnavailableError(f"{_too_old()}; update JAX, or take another backend")


def _too_old() -> str:
    return f"jax_te's Pallas kernels need JAX {OLDEST_JAX[0]}.{OLDEST_JAX[1]}, this is {jax.__version__}"


def check_float_matrix(name: str, x: Array) -> None:
    """Raise unless ``x`` is an fp32, bf16 or fp16 matrix whose sizes are multiples of 16."""
    if x.dtype not in _FLOATS:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, got {x.dtype.name}")
    _check_matrix(name, x)


def check_fp8_matrix(name: str, x: Array) -> None:
    """Raise unless ``x`` is an FP8 matrix whose sizes are multiples of 16."""
    if x.dtype not in _FP8:
        raise TypeError(f"{name} must be float8_e4m3fn or float8_e5m2, got {x.dtype.name}; quantize it first")
    _check_matrix(name, x)


def _check_matrix(name: str, x: Array) -> None:
    if x.ndim != 2 or x.shape[0] % 16 or x.shape[1] % 16 or not x.size:
        raise ValueError(
            f"{name} must be a matrix whose sizes are multiples of 16, got shape {x.shape}; "
            "join leading axes with reshape, and pad"
        )


def pad(x: Array, rows: int, columns: int) -> Array:
    """Return ``x [m, k]`` with zeros appended until its sizes are multiples of ``rows`` and ``columns``."""
    missing = -x.shape[0] % rows, -x.shape[1] % columns
    return jnp.pad(x, ((0, missing[0]), (0, missing[1]))) if any(missing) else x


def multiprocessors() -> int:
    """Return the number of multiprocessors of the default GPU; 2 elsewhere, where kernels are interpreted."""
    device = default_device()
    return device.core_count if device.platform == "gpu" else 2
