"""Strict settings for every test, and the fixtures they share."""

from __future__ import annotations

import functools
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

# Most of a test's time is compiling, and plain code compiles in half the time. Set it to 0 to run what users run;
# .ci/run does both. In the environment as well: tests start processes.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
jax.config.update("jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1")
# XLA's former way to make code of fusions, one module for all of them, takes a third of the time. Newer ones lack it,
# and end the process when a flag is unknown.
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" and jax.__version_info__ < (0, 11):
    _flags = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flags}"

    from tests.support.lowering import share_contexts

    share_contexts()
# And many tests compile the same: they, the other test process and the processes that tests start share what XLA made.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="jax_te-tests-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
# Before anything asks for devices. Not XLA_FLAGS: that would reach the processes that tests start.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

TESTS = Path(__file__).resolve().parent


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Leave what importing has made out of garbage collection, which would go through it again in every test.

    Afterwards collections are rarer than Python's own: they go through what jax keeps of the programs of a file.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 10, 5)
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import ``tests/gpu`` and ``tests/te`` when ``-m`` leaves them out and no argument is of them."""
    left_out = [TESTS / mark for mark in ("gpu", "te") if f"not {mark}" in config.option.markexpr]
    if collection_path not in left_out:
        return None  # the other hooks decide
    arguments = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(collection_path) for path in arguments) else True


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that `pytest.mark.wide` and `pytest.mark.costly` leave out of the default run."""
    from tests.support.costly import mark_costly
    from tests.support.wide import mark_wide

    mark_wide(items)
    mark_costly(items)


@functools.cache
def cpu_has_fp16() -> bool:
    """Whether XLA compiles a conversion to fp16 for this CPU: it takes the instructions F16C, and has nothing else."""
    try:
        jax.jit(lambda x: x.astype("float16"))(jax.numpy.ones(2, "float32"))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def skip_without_fp16(item: pytest.Item) -> Iterator[None]:
    """Skip what XLA cannot compile where it has no fp16; other errors, and this one on other CPUs, fail."""
    try:
        return (yield)
    except jax.errors.JaxRuntimeError as error:
        if "Failed to materialize symbols" in str(error) and not cpu_has_fp16():
            pytest.skip("XLA has no fp16 on this CPU, whose vector instructions are older than AVX2")
        raise


pytest_runtest_setup = pytest.hookimpl(skip_without_fp16, wrapper=True)  # of fixtures
pytest_runtest_call = pytest.hookimpl(skip_without_fp16, wrapper=True)


@pytest.fixture(params=["no mesh", "auto", "explicit"])
def mesh_mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test with no mesh, then with ``data=2, fsdp=2, tensor=2`` set as an Auto and as an Explicit mesh."""
    from tests.support.meshes import use_mesh

    with use_mesh(request.param):
        yield request.param


@pytest.fixture(scope="module", autouse=True)
def fresh_caches() -> Iterator[None]:
    """Programs of one file are of little use to the next, and gigabytes of them make garbage collection slow."""
    yield
    jax.clear_caches()
