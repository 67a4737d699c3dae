"""Routers in the stages of a pipeline, and in front of them, count as without one."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.config import ParallelConfig, PipelineConfig, RouterOptions
from jax_te.layers import MoE
from jax_te.models import StackInput
from jax_te.sharding import make_mesh
from jax_te.training import ConstantLossScale, PipelinedLoss, create_train_state, make_train_step
from tests.support.numerics import draw

B, S, H, F, E = 4, 8, 16, 16, 4
X = draw("x", (B, S, H))
OPTIONS = RouterOptions(
    num_experts=E, score_function="sigmoid", enable_expert_bias=True, bias_update_rate=0.25, aux_loss_coeff=0.5
)


class Block(nnx.Module):
    """Experts with a residual connection."""

    def __init__(self, rngs: nnx.Rngs):
        self.moe = MoE(H, F, OPTIONS, rngs=rngs)

    def __call__(self, x: Any, dropout_key: Any = None) -> Any:
        return x + self.moe(x)


class Model(nnx.Module):
    """A stack that a pipeline cuts, behind a layer that all stages have."""

    def __init__(self, layers: int, rngs: nnx.Rngs):
        self.first = Block(rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(layers)])


def after_steps(mesh: ParallelConfig | None, pipeline: str, scale: float = 1.0, layers: int = 2) -> Any:
    """Parameters and states after three steps of two microbatches."""
    tx = optax.sgd(0.1)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(make_mesh(mesh)):
        state = create_train_state(
            functools.partial(Model, layers), tx, key=jax.random.key(0), scaler=ConstantLossScale(scale=scale)
        )
        step = make_train_step(
            PipelinedLoss(
                lambda model, x, key: StackInput(model.first(x)), lambda model, y, x, key: jnp.mean((y - 1.0) ** 2)
            ),
            tx,
            microbatches=2,
            pipeline=PipelineConfig.parse(pipeline),
        )
        for _ in range(3):  # the second takes back what the first did
            state, _ = step(state, X)
        return jax.tree.map(np.asarray, (state.params, state.quantizers))


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "scale"), [("1f1b", 1.0), ("zero_bubble", 1.0), ("1f1b", 256.0)])
def test_states_are_those_without_a_pipeline(pipeline: str, scale: float) -> None:
    """A scale of the loss is one of the routers' losses, too, in the stages and before them."""
    found, expected = after_steps(ParallelConfig(pipeline=2), pipeline, scale), after_steps(None, "1f1b")
    biases = 0
    for mine, theirs in zip(found, expected, strict=True):
        for (path, a), (_, b) in zip(nnx.to_flat_state(mine), nnx.to_flat_state(theirs), strict=True):
            np.testing.assert_allclose(a[...], b[...], rtol=2.0**-16, atol=2.0**-20, err_msg=str(path))
            biases += "expert_bias" in path and bool(np.any(b[...]))
    assert biases == 3


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["1f1b", "zero_bubble,last_layers=1"])
def test_a_layer_that_is_not_run_adds_no_loss_of_its_router(pipeline: str) -> None:
    """A stage with fewer layers than another computes one in its place, whose output is left out."""
    found = after_steps(ParallelConfig(pipeline=2), pipeline, layers=3)
    expected = after_steps(None, "1f1b", layers=3)
    for mine, theirs in zip(found, expected, strict=True):
        for (path, a), (_, b) in zip(nnx.to_flat_state(mine), nnx.to_flat_state(theirs), strict=True):
            np.testing.assert_allclose(a[...], b[...], rtol=2.0**-16, atol=2.0**-20, err_msg=str(path))


@pytest.mark.slow
def test_stages_that_differ_are_refused_beside_other_axes() -> None:
    """The compiler partitions the router, and may exchange its arrays among the devices of all stages."""
    with pytest.raises(
        ValueError, match=r"zero_bubble .* communicate among all devices of the mesh, here along expert"
    ):
        after_steps(ParallelConfig(pipeline=2, expert=2), "zero_bubble")
