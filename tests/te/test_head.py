"""The output head's GEMMs, by Transformer Engine."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from jax_te.config import ParallelConfig
from jax_te.ops import backend as backends
from jax_te.ops import head_logits, use_backend
from jax_te.ops.te import gemm as te_gemm
from jax_te.sharding import make_mesh
from tests.support.numerics import assert_close

pytestmark = pytest.mark.te

AXES = ("batch", "sequence", "hidden")


@pytest.mark.parametrize(
    ("size", "mesh", "te_gemms"),
    [(32, None, 3), (33, None, 0), (32, "tensor=2", 3), (24, "tensor=2", 0), (32, "fsdp=2", 3)],
)
@pytest.mark.parametrize("backend", ["te", "auto"])
@pytest.mark.parametrize("tied", [False, True])
def test_gemms_are_transformer_engines_where_they_are_no_slower(tied, backend, size, mesh, te_gemms, monkeypatch):
    """The context is that of the call, and of forward alone here; rows of logits are those of a device."""
    monkeypatch.setattr(backends, "default_platform", lambda: "gpu")  # of which "auto" takes TE
    jax.clear_caches()  # of an equal call that is traced already nothing is counted
    calls, gemm = [], te_gemm._gemm
    monkeypatch.setattr(te_gemm, "_gemm", lambda *args, **others: calls.append(args) or gemm(*args, **others))
    x = jax.random.normal(jax.random.key(0), (2, 16, 32)).astype(jnp.bfloat16)
    kernel = jax.random.normal(jax.random.key(1), (size, 32)).astype(jnp.bfloat16)
    kernel = kernel if tied else kernel.T

    def logits(x, kernel):
        with use_backend(backend):
            return head_logits(x, kernel, axes=AXES, tied=tied)

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(make_mesh(ParallelConfig.parse(mesh))):
        ours, vjp = jax.vjp(logits, x, kernel)
        gradients = vjp(ours)
    assert len(calls) == te_gemms
    wanted, wanted_vjp = jax.vjp(
        lambda *args: args[0] @ (args[1].T if tied else args[1]), *(a.astype(jnp.float32) for a in (x, kernel))
    )
    assert_close(ours, wanted, 2.0**-7)  # rounded to bf16
    for mine, theirs in zip(gradients, wanted_vjp(ours.astype(jnp.float32)), strict=True):
        # A rounding to bf16 of the sums of each of two devices, and one of their sum.
        assert_close(mine, theirs, 2.0**-7)
