"""Tests on a GPU with Transformer Engine: ``pytest -n 0 -m gpu tests/gpu``: one process on one device."""

import jax
import pytest


@pytest.fixture(autouse=True)
def needs_te_on_a_gpu():
    from jax_te.ops.te import available  # not above: pytest's options add checks to jax_te when it is imported

    if jax.default_backend() != "gpu":
        pytest.fail(f"these tests need a GPU, and JAX runs on {jax.default_backend()}")
    ok, reason = available()
    if not ok:
        pytest.fail(f"a GPU is here, but Transformer Engine is not: {reason}")
