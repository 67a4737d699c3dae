"""The output head under a recipe on the ``te`` backend: the losses and the head's states are those of ``xla``."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import ParallelConfig
from jax_te.ops import LossOptions, use_backend
from jax_te.ops.te import primitives
from jax_te.quantize import QuantizerState
from jax_te.recipe import Float8CurrentScaling, autocast, recipe_from_name
from jax_te.sharding import make_mesh
from tests.models.test_output_head import DELAYED, V, build, train

pytestmark = pytest.mark.te


def loss_fn(model, tokens, key):
    """Of embedding and head alone: TE's attention needs a GPU."""
    x = model._embed(tokens, jnp.arange(tokens.shape[1], dtype=jnp.int32), None)
    return model._loss(x, (tokens + 1) % V, None, LossOptions(), "mean")


@pytest.mark.parametrize(
    ("kind", "recipe", "mesh"),
    [
        ("gpt, tied", DELAYED, None),
        ("gpt", Float8CurrentScaling(), None),
        ("gpt, tied", recipe_from_name("block"), None),
        ("megatron", DELAYED, "fsdp=2,tensor=2"),
        ("gpt, tied", DELAYED, "data=2,tensor=2"),
    ],
)
def test_both_backends_train_alike(kind, recipe, mesh):
    found = []
    for backend in ("te", "xla"):
        place = contextlib.nullcontext() if mesh is None else jax.set_mesh(make_mesh(ParallelConfig.parse(mesh)))
        with use_backend(backend), place:
            losses, state = train(kind, recipe=recipe, microbatches=2, loss_fn=loss_fn)
        states = nnx.state(state.model, QuantizerState)
        found.append((losses, [leaf for path, leaf in nnx.to_flat_state(states) if path[0] == "output_layer"]))
    # Values between two of FP8's may round to the other one after sums in another order, as in test_pipeline.
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-3)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_allclose(one[...], other[...], rtol=0.05)


def test_the_heads_gemms_are_transformer_engines(monkeypatch):
    """Under a recipe; else XLA's, as without the option."""
    calls = []

    def noted(*args):
        calls.append(args)
        return gemm_fprop(*args)

    gemm_fprop = primitives().gemm_fprop
    monkeypatch.setattr(primitives(), "gemm_fprop", noted)
    for recipe, count in ((None, 0), (Float8CurrentScaling(), 1)):
        with use_backend("te"), autocast(recipe):
            jax.eval_shape(build("gpt")._head, jnp.ones((2, 16, 32), jnp.bfloat16))
        assert len(calls) == count
