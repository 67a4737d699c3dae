"""A run that is saved, forgotten and restored goes on as if it had never stopped, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.checkpoint import TrainCheckpointer
from jax_te.data import TrainBatches
from jax_te.training import (
    DynamicLossScale,
    abstract_train_state,
    adamw_with_schedule,
    create_train_state,
    learning_rate_schedule,
    make_train_step,
)
from tests.support.meshes import use_mesh
from tests.support.toy import Toy, values

TEXT = np.random.default_rng(0).integers(0, 256, 2000).astype(np.uint8)
STEPS, STOP = 6, 3


class ByteToy(Toy):
    """A `Toy` between an embedding of bytes and logits over them."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs, jnp.bfloat16, dropout=0.1)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (256, 16)), logical_axes=("vocab", "fsdp"))

    def logits(self, tokens):
        table = self.embedding[...]
        hidden = self(jnp.take(table, tokens, axis=0).reshape(-1, 16))
        return hidden @ table.T


def loss_fn(model, batch, key):
    logits = model.logits(batch["tokens"])
    logits += 0.01 * jax.random.normal(key, logits.shape)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"].reshape(-1, 1), axis=1)
    # Poisons every fourth batch, so that a skipped step and the scaler's reaction lie on either side of the stop.
    poison = jnp.where(jnp.sum(batch["tokens"]) % 4 == 0, jnp.inf, 0.0)
    return poison - jnp.mean(picked)


def parts():
    tx = adamw_with_schedule(learning_rate_schedule(1e-2, total_steps=20, warmup_steps=2))
    scaler = DynamicLossScale(initial_scale=64.0, growth_interval=2, hysteresis=1)
    batches = TrainBatches(TEXT, batch_size=4, seq_len=16, seed=2)
    return tx, scaler, batches, make_train_step(loss_fn, tx, microbatches=2)


def advance(state, step, batches, count):
    records = []
    for _ in range(count):
        state, metrics = step(state, next(batches))
        records.append({name: float(value) for name, value in metrics.items()})
    return state, records


@pytest.fixture(scope="module")
def unbroken():
    tx, scaler, batches, step = parts()
    state = create_train_state(ByteToy, tx, key=jax.random.key(1), scaler=scaler)
    return advance(state, step, batches, STEPS)


@pytest.mark.costly
def test_resuming_equals_never_having_stopped(tmp_path, unbroken):
    tx, scaler, batches, step = parts()
    state = create_train_state(ByteToy, tx, key=jax.random.key(1), scaler=scaler)
    with TrainCheckpointer(tmp_path) as checkpointer:
        state, before = advance(state, step, batches, STOP)
        checkpointer.save(state, batches.get_state(), STOP)
        advance(state, step, batches, 1)  # takes the state's buffers while the save is under way, and is lost

    tx, scaler, batches, step = parts()
    with TrainCheckpointer(tmp_path) as checkpointer:
        state, data_state, number = checkpointer.restore(abstract_train_state(ByteToy, tx, scaler=scaler))
    assert number == STOP
    batches.set_state(data_state)
    state, after = advance(state, step, batches, STEPS - STOP)

    expected, records = unbroken
    assert before + after == records
    assert any(record["skipped"] for record in records)
    assert len({record["loss_scale"] for record in records}) > 2
    for name in ("step", "params", "masters", "quantizers", "rest", "opt_state", "rng", "skipped_steps"):
        for one, other in zip(values(getattr(state, name)), values(getattr(expected, name)), strict=True):
            assert one.dtype == other.dtype
            assert one.tobytes() == other.tobytes()


@pytest.mark.costly("auto")
@pytest.mark.parametrize("first", ["auto", "explicit"])
def test_a_run_moves_between_meshes(tmp_path, first):
    """8 devices, then 1, then 8 in another order of axes; nothing changes on the way."""
    tx, scaler, _, _ = parts()
    with use_mesh(first):
        state = create_train_state(Toy, tx, key=jax.random.key(1), scaler=scaler)
        original = values(state)
        with TrainCheckpointer(tmp_path / "a") as checkpointer:
            checkpointer.save(state, None, 1)
    with TrainCheckpointer(tmp_path / "a") as one, TrainCheckpointer(tmp_path / "b") as two:
        state, _, _ = one.restore(abstract_train_state(Toy, tx, scaler=scaler))
        assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)} == {1}
        two.save(state, None, 2)
    mesh = jax.make_mesh((4, 2), ("tensor", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), TrainCheckpointer(tmp_path / "b") as two:
        state, _, _ = two.restore(abstract_train_state(Toy, tx, scaler=scaler))
    for one, other in zip(original, values(state), strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()
    kernel = state.params["w_in"].get_value()
    assert kernel.sharding.mesh == mesh
    assert kernel.addressable_shards[0].data.shape == (8, 8)
