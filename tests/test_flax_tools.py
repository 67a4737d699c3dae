"""Flax's and Orbax's own tools on models with the state of delayed scaling, which holds one array in each Variable."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from orbax.checkpoint import v1

from jax_te import autocast, linen
from jax_te.layers import Linear
from jax_te.recipe import DelayedScaling
from jax_te.training import value_and_grad
from tests.support.meshes import MODES, use_mesh
from tests.support.toy import assert_same


@pytest.fixture(params=MODES, autouse=True)
def context(request: pytest.FixtureRequest) -> Any:
    # Optax relies on implicit promotion.
    recipe, promotion = autocast(DelayedScaling(amax_history_len=2)), jax.numpy_dtype_promotion("standard")
    with use_mesh(request.param), recipe, promotion:
        yield


def build(seed: int = 0) -> Linear:
    return Linear(32, 32, parallel_mode="column", rngs=nnx.Rngs(seed))


def batch() -> jax.Array:
    return jnp.linspace(-1.0, 1.0, 4 * 8 * 32).reshape(4, 8, 32)


def loss_fn(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(model(x) - 1.0))


@nnx.jit
def train(model: Any, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, grads = value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    return loss


def trained() -> Linear:
    model = build()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = [float(train(model, optimizer, batch())) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    return model


@pytest.mark.wide("explicit")
def test_optimizer_jit_and_value_and_grad_train_it() -> None:
    model = trained()
    for role in ("x", "kernel", "grad"):
        assert (model.quantizers[role]["amax_history"].get_value() > 0.0).all()
        assert model.quantizers[role]["scale"].get_value() != 1.0


@pytest.mark.costly("no mesh")
@pytest.mark.wide("no mesh", "explicit")
def test_states_and_pure_dicts_go_round() -> None:
    model, other = trained(), build(1)
    pure = nnx.to_pure_dict(nnx.state(model))
    assert pure["quantizers"]["grad"].keys() == {"scale", "amax_history"}
    state = nnx.eval_shape(build)
    state = nnx.state(state)
    nnx.replace_by_pure_dict(state, pure)
    nnx.update(other, state)
    assert_same(nnx.state(other), nnx.state(model))
    np.testing.assert_array_equal(jax.jit(other)(batch()), jax.jit(model)(batch()))


@pytest.mark.costly("auto")
def test_eval_shape_has_the_shapes_of_the_model() -> None:
    abstract, model = nnx.eval_shape(build), build()
    for (path, leaf), (_, array) in zip(
        nnx.to_flat_state(nnx.state(abstract)), nnx.to_flat_state(nnx.state(model)), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (array.shape, array.dtype), path


@pytest.mark.wide("explicit")
def test_orbax_managers_save_and_restore_it(tmp_path: Any) -> None:
    model = trained()
    graphdef, state = nnx.split(model)
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    with ocp.CheckpointManager(tmp_path / "v0") as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        restored = manager.restore(1, args=ocp.args.StandardRestore(abstract))
    assert_same(nnx.state(nnx.merge(graphdef, restored)), state)
    v1.save(tmp_path / "v1", state)
    assert_same(v1.load(tmp_path / "v1", abstract), state)


@pytest.mark.wide("explicit")
def test_linens_train_state_trains_it() -> None:
    layer, x = linen.Linear(32, 32), batch()
    state = TrainState.create(apply_fn=layer.apply, params=dict(layer.init(jax.random.key(0), x)), tx=optax.sgd(0.5))
    step = jax.jit(lambda state: jax.value_and_grad(lambda v: loss_fn(lambda x: state.apply_fn(v, x), x))(state.params))
    losses = []
    for _ in range(3):
        loss, grads = step(state)
        state = state.apply_gradients(grads=grads)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    kept = state.params["_overwrite_with_gradient"]["quantizers"]["x"]
    assert (kept["amax_history"] == 1.0).all()
