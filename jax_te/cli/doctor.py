"""``jax-te doctor``: versions, devices, backends, and supported recipes."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_te import __version__
from jax_te._device import default_device, default_platform
from jax_te._validation import install_command
from jax_te.cli.command_options import A_GPU, DoctorOptions
from jax_te.cli.option_table import check_effects
from jax_te.cli.predict import show_prediction
from jax_te.errors import BackendUnavailableError
from jax_te.ops import OPS, OpName, dense, explain_backend
from jax_te.ops.te import available
from jax_te.quantize import GemmState, init_gemm_state, with_max_gradients_inside
from jax_te.recipe import RECIPES, Recipe

_NEEDED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_SIZE, _WEIGHT = 128, 0.25
"""Rows, columns and elements of the matrices of a trial."""
_EXPECTED, _TOLERANCE = (_SIZE * _WEIGHT) ** 2, 64.0
"""Mean square of the products, with ones as inputs, and room for the rounding of FP8 and FP4."""
_EXTRA = ("grain", "rich", "matplotlib", "tensorboardX")


def run(options: DoctorOptions) -> int:
    """Return the exit status of the report: 1 if a recipe fails on ``xla``, the backend of every machine.

    Raises:
        ValueError: for options of a prediction that do not go together.
    """
    check_effects(options, {A_GPU: options.gpu is not None})
    if options.gpu is not None:
        show_prediction(options, options.gpu)
        return 0
    _section("versions")
    _rows({"python": f"{platform.python_version()} on {platform.system()} {platform.machine()}"} | versions())
    _section("devices")
    _rows(devices())
    _section("backends")
    te_works, reason = available()
    _rows({"xla": "available: plain JAX", "te": f"available: {reason}" if te_works else f"not available: {reason}"})
    _section("ops: what --backend auto takes")
    _rows({op: _choice(op) for op in OPS})
    _section(f"recipes: GEMM units of {default_device().device_kind}")
    _rows(native_recipes())
    _section("recipes: a linear layer's forward and backward, run here")
    tried = {(name, backend): make() if make else None for name, make in RECIPES.items() for backend in ("xla", "te")}
    # Compilation, which takes most of the time, overlaps with other work. The last recipes compile longest, so they
    # begin.
    with ThreadPoolExecutor() as threads:
        running = {key: threads.submit(try_recipe, tried[key], key[1]) for key in reversed(tried)}
    results = {key: running[key].result() for key in tried}
    _rows({f"{name} on {backend}": text for (name, backend), (_, text) in results.items()})
    return int(any(backend == "xla" and not works for (_, backend), (works, _) in results.items()))


def versions() -> dict[str, str]:
    """Return a dict from package to version, or to the command that installs it."""
    rows = {"jax-te": __version__}
    for package in _NEEDED:
        rows[package] = _version(package) or "missing; pip install -e . in a checkout of jax_te"
    for package in _EXTRA:
        rows[package] = _version(package) or f"not installed; jax-te train needs it: {install_command('train')}"
    rows["transformer_engine"] = _version("transformer_engine") or "not installed; see docs/install.md"
    # The wheels of these carry the CUDA version in their names; the newest that is installed is the one in use.
    for package in ("cudnn", "cublas", "nccl"):
        installed = [_version(f"nvidia-{package}{cuda}") for cuda in ("-cu13", "-cu12", "")]
        newest = next((version for version in installed if version), None)
        if newest is not None:
            rows[f"nvidia-{package}"] = newest
    return rows


def devices() -> dict[str, str]:
    """Return JAX's platform, and a line for each device."""
    client = default_device().client
    rows = {"platform": f"{default_platform()}, {' '.join(client.platform_version.split()) or 'no version'}"}
    if client.platform_version.strip() in ("", "cpu", "<unknown>"):
        rows["platform"] = default_platform()
    for device in jax.local_devices():
        memory = (device.memory_stats() or {}).get("bytes_limit")
        capability = getattr(device, "compute_capability", None)
        facts = [device.device_kind]
        facts += [f"compute capability {capability}"] if capability else []
        facts += [f"{memory / 2**30:.1f} GiB for JAX"] if memory else []
        rows[str(device)] = ", ".join(facts)
    return rows


def native_recipes() -> dict[str, str]:
    """Return a dict from recipe to whether the device supports it natively, with the reason."""
    rows = {}
    for name, recipe_type in RECIPES.items():
        if recipe_type is not None:
            support = recipe_type().supports(default_device())
            rows[name] = f"{'native' if support else 'emulated'}: {support.reason}"
    return rows


def try_recipe(recipe: Recipe | None, backend: str) -> tuple[bool, str]:
    """Return whether a linear layer runs forward and backward under ``recipe``, and a line about it."""
    try:
        explain_backend("dense", recipe=recipe, backend=backend)  # type: ignore[arg-type]
    except BackendUnavailableError as error:
        return False, f"no: {error}"
    # GPUs train in bf16, which a CPU emulates.
    dtype = jnp.float32 if default_platform() == "cpu" else jnp.bfloat16
    # Whole blocks of every recipe: programs without padding compile faster. NumPy's arrays need no program at all.
    x, kernel = np.ones((_SIZE, _SIZE), dtype), np.full((_SIZE, _SIZE), _WEIGHT, dtype)
    state = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), jax.eval_shape(lambda: init_gemm_state(recipe)))

    def loss(x: jax.Array, kernel: jax.Array, state: GemmState | None) -> jax.Array:
        given = with_max_gradients_inside(state)
        y = dense(x, kernel, recipe=recipe, state=given, backend=backend)  # type: ignore[arg-type]
        return jnp.mean(y.astype(jnp.float32) ** 2)

    begin = time.perf_counter()
    try:
        # Compiled for a CPU without optimization: it runs once.
        quick: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
        on_cpu = default_platform() == "cpu"
        differentiate = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)), compiler_options=quick if on_cpu else None)
        value, gradients = jax.device_get(differentiate(x, kernel, state))
        near = abs(float(value) - _EXPECTED) < _TOLERANCE
        right = near and all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
    except Exception as error:  # show any error of a broken installation to the user
        return False, f"fails: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if not right:
        return (
            False,
            f"runs, but gives {float(value):g} where {_EXPECTED:g} is right; please report this with the above",
        )
    return True, f"runs ({time.perf_counter() - begin:.1f} s with compilation)"


def _choice(op: OpName) -> str:
    choice = explain_backend(op)
    return f"{choice.backend} ({choice.reason}){choice.others}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _section(title: str) -> None:
    print(f"\n\033[1m{title}\033[0m" if sys.stdout.isatty() else f"\n{title}")


def _rows(rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"  {name:<{width}}  {value}", flush=True)
