"""Import of Transformer Engine, once and early, with the reason if it fails."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from jax_te._device import default_platform
from jax_te._validation import without_module


def available() -> tuple[bool, str]:
    """Return whether ``transformer_engine.jax`` can be imported and run here; if not, the reason and the remedy."""
    imported, reason = _imported()
    if imported and default_platform() != "gpu" and not runs_as_plain_jax():
        return False, "no GPU (NVTE_JAX_CUSTOM_CALLS=false makes TE run as plain JAX on CPU, for tests)"
    return imported, reason


# Cached: an import that failed is not tried again. Nothing in it depends on the device.
@functools.cache
def _imported() -> tuple[bool, str]:
    """Return whether ``transformer_engine.jax`` can be imported; if not, the reason and the remedy."""
    if importlib.util.find_spec("transformer_engine") is None:
        return False, "transformer_engine is not installed (see docs/install.md)"
    try:
        _import_te()
    except Exception as error:  # a missing CUDA library shows as OSError, ImportError, RuntimeError or a pydantic error
        lines = str(error).strip().splitlines() or [""]
        hint = ""
        if "cudnn" in str(error).lower():
            hint = "; import jax_te before the first JAX computation, so that TE's cuDNN is the one loaded"
        return False, f"importing transformer_engine.jax failed: {type(error).__name__}: {lines[0]}{hint}"
    return True, "transformer_engine.jax is importable"


def _import_te() -> None:
    # TE imports its PyTorch half where PyTorch is installed, which takes seconds; nothing here uses it.
    with without_module("transformer_engine.pytorch"), _cuda_12_wheels():
        _preload("nccl", "libnccl.so.*")  # which TE looks for on the system's library path only
        importlib.import_module("transformer_engine.jax")


@contextlib.contextmanager
def _cuda_12_wheels() -> Iterator[None]:
    """Let TE find the libraries of CUDA 12's wheels while it is imported.

    It looks for the runtime only under the name of CUDA 13's wheel, unless it assumes that CUDA is installed on the
    system, which it concludes from a folder of cuRAND. Then it expects the runtime and cuBLAS to be loaded.
    """
    curand = _wheel("curand")
    if _wheel("cu13") is not None or _wheel("cuda_runtime") is None or curand is None or "CURAND_HOME" in os.environ:
        yield
        return
    _preload("cuda_runtime", "libcudart.so.*")
    _preload("cublas", "libcublas*.so.*")
    os.environ["CURAND_HOME"] = str(curand)
    try:
        yield
    finally:
        del os.environ["CURAND_HOME"]


def _preload(wheel: str, libraries: str) -> None:
    """Load libraries of an ``nvidia`` wheel, if it is installed, so that those that need them find them."""
    folder = _wheel(wheel)
    # cuBLAS needs cuBLASLt, which comes first in this order.
    for library in sorted((folder / "lib").glob(libraries), reverse=True) if folder is not None else ():
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _wheel(name: str) -> Path | None:
    """Return the folder of an ``nvidia`` wheel, or None."""
    try:
        spec = importlib.util.find_spec(f"nvidia.{name}")
    except ModuleNotFoundError:
        return None
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(folders[0]) if folders else None


def runs_as_plain_jax() -> bool:
    """Return whether the environment tells TE to use its plain-JAX implementation instead of its kernels."""
    return os.environ.get("NVTE_JAX_CUSTOM_CALLS", "").lower() in ("0", "false")


def import_early() -> None:
    """Import TE before XLA loads a cuDNN of its own, which would make TE's import fail.

    Called when `jax_te.ops` is imported. On a machine without TE, or where JAX is told to use CPUs only, it does
    nothing.
    """
    if os.environ.get("JAX_PLATFORMS", "") == "cpu" or importlib.util.find_spec("transformer_engine") is None:
        return
    try:
        _import_te()
    except Exception:
        return  # available() tries again and reports the reason when the backend is requested


import_early()
