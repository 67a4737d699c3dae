"""Tests on a GPU with Transformer Engine: ``pytest -n 0 -m gpu tests/gpu``: one process on one device."""

import os

import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def as_for_users():
    """Compile what users compile, see tests/conftest.py. Not on import: each run collects this folder."""
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(autouse=True)
def needs_te_on_a_gpu():
    from jax_te.ops.te import available

    if jax.default_backend() != "gpu":
        pytest.fail(f"these tests need a GPU, and JAX runs on {jax.default_backend()}")
    ok, reason = available()
    if not ok:
        pytest.fail(f"a GPU is here, but Transformer Engine is not: {reason}")
