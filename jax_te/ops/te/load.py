"""Import Transformer Engine once, early, and remember why if it cannot be."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import warnings
from pathlib import Path

import jax


@functools.cache
def available() -> tuple[bool, str]:
    """Return whether ``transformer_engine.jax`` imports here and can run; if not why, and what to do."""
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
    if jax.default_backend() != "gpu" and not runs_as_plain_jax():
        return False, "no GPU (NVTE_JAX_CUSTOM_CALLS=false makes TE run as plain JAX on CPU, for tests)"
    return True, "transformer_engine.jax is importable"


def _import_te() -> None:
    _preload_nccl()
    with warnings.catch_warnings():
        # It speaks of TE's PyTorch half, which nothing here uses; under warnings-as-errors it would stop the import.
        warnings.filterwarnings("ignore", message="Detected a PyTorch installation", category=RuntimeWarning)
        importlib.import_module("transformer_engine.jax")


def _preload_nccl() -> None:
    """Load the NCCL of the ``nvidia-nccl`` wheel: TE needs it but looks for it on the system's library path only."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for library in Path(folder).glob("lib/libnccl.so.*"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


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
        return  # available() tries again and reports the reason to whoever asks for the backend


import_early()
