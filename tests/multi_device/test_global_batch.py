"""Batches of several processes: parts make a whole, and what only looks like a whole is refused."""

from __future__ import annotations

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.config import ParallelConfig
from jax_te.data import TrainBatches, heldout_batches
from jax_te.layers import Linear
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from jax_te.sharding import make_mesh, named_sharding
from jax_te.training import (
    create_train_state,
    global_batch,
    inspect_precision,
    make_eval_step,
    make_inspection,
    make_train_step,
    sensitivity,
)
from tests.support.processes import run_processes

WHOLE = np.arange(32, dtype=np.float32).reshape(4, 8)
WIDE = np.sin(np.arange(512, dtype=np.float32)).reshape(32, 16)
TEXT = np.arange(1000) % 256


def made():
    tx = optax.sgd(0.1)
    state = create_train_state(lambda rngs: nnx.Linear(8, 1, rngs=rngs), tx, key=jax.random.key(0))

    def loss_fn(model, x, key):
        return jnp.mean(model(x) ** 2)

    return state, make_train_step(loss_fn, tx), make_eval_step(loss_fn)


def refused(work, *args):
    try:
        work(*args)
    except ValueError as error:
        return str(error)
    return None


def rows(array):
    """The rows that this process's device holds."""
    return np.asarray(array.addressable_shards[0].data).tolist()


class Watched(np.ndarray):
    """A text that counts the windows that are read of it."""

    windows = 0

    def __getitem__(self, index):
        Watched.windows += 1
        return np.asarray(self)[index]


def reports(batch, which=("make", "one", "rank")):
    """What quantization does, in three ways; of a model on the mesh in use."""
    found = []
    with autocast(Float8CurrentScaling(amax_scope="whole")):
        state = create_train_state(lambda rngs: Linear(16, 16, rngs=rngs), optax.sgd(0.1), key=jax.random.key(0))
        if "make" in which:
            found.append([tensor.amax for tensor in make_inspection(squares)(state, batch)])
        if "one" in which:
            found.append([tensor.amax for tensor in inspect_precision(state.model, squares, batch)])
    if "rank" in which:
        found.append([layer.gradient_error for layer in sensitivity(state.model, squares, [batch], DelayedScaling())])
    return found


def squares(model, x, key):
    return jnp.mean(jnp.square(model(x)))


def batches_of_processes():
    """What each process sees: the values, and what is refused."""
    index, found = jax.process_index(), {}
    with jax.set_mesh(make_mesh(ParallelConfig(data=2))):
        state, step, evaluate = made()
        with mock.patch("jax.distributed.is_initialized", return_value=False):
            _, early_step, early_evaluate = made()  # before jax.distributed.initialize()
        found["steps"] = [refused(work, state, WHOLE) for work in (step, evaluate, early_step, early_evaluate)]
        batch = global_batch(WHOLE[2 * index : 2 * index + 2])
        found["shape"], found["rows"] = batch.shape, rows(batch)
        found["loss"] = float(evaluate(state, batch))
        sharding = named_sharding(("batch", None), jax.sharding.get_mesh())
        batches = TrainBatches(TEXT.view(Watched), batch_size=4, seq_len=8, seed=1, sharding=sharding)
        Watched.windows = 0
        next(batches), next(batches)
        found["windows"], saved = Watched.windows, batches.get_state()
        found["next"] = rows(next(batches)["tokens"])
        batches.set_state(saved)
        found["labels"] = rows(next(batches)["labels"])
        heldout = next(heldout_batches(TEXT, batch_size=4, seq_len=8, num_batches=1, sharding=sharding))
        found["heldout"] = rows(heldout["tokens"])
        with_rest = WHOLE[:2] if index == 0 else WHOLE[:1]  # the rest of an epoch
        found["rest"] = refused(global_batch, with_rest)
        model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
        found["key"] = refused(lambda: create_train_state(model, optax.sgd(0.1), key=jax.random.key(index)))
        model = nnx.Linear(8, 1, rngs=nnx.Rngs(index))
        found["model"] = refused(lambda: create_train_state(model, optax.sgd(0.1), key=jax.random.key(0)))
        options = {"batch_size": 4, "seq_len": 8, "sharding": sharding}
        found["text"] = refused(lambda: TrainBatches(TEXT + index, seed=1, **options))
        found["heldout text"] = refused(lambda: heldout_batches(TEXT + index, num_batches=1, **options))
        found["local reports"] = [refused(lambda work=work: reports(WIDE, [work])) for work in ("make", "one", "rank")]
    with jax.set_mesh(make_mesh(ParallelConfig(tensor=2))):
        found["same"] = rows(global_batch(WHOLE))
        found["differ"] = refused(global_batch, WHOLE + index)
    found["no mesh"] = refused(global_batch, WHOLE)
    return found


@pytest.mark.slow
def test_processes_give_parts_of_a_global_batch():
    state, _, evaluate = made()
    loss = float(evaluate(state, WHOLE))
    alone = TrainBatches(TEXT, batch_size=4, seq_len=8, seed=1)
    third = [next(alone) for _ in range(3)][2]
    heldout = next(heldout_batches(TEXT, batch_size=4, seq_len=8, num_batches=1))
    for index, finished in enumerate(run_processes(2, batches_of_processes)):
        found, own = finished.result, slice(2 * index, 2 * index + 2)
        assert all("jax_te.training.global_batch" in (text or "") for text in found["steps"]), found["steps"]
        assert found["shape"] == (4, 8)
        assert found["rows"] == WHOLE[own].tolist()
        assert all("jax_te.training.global_batch" in (text or "") for text in found["local reports"])
        assert found["loss"] == pytest.approx(loss, rel=2.0**-20)
        assert found["windows"] == 4  # two rows of each of two batches
        assert found["next"] == third["tokens"][own].tolist()
        assert found["labels"] == third["labels"][own].tolist()
        assert found["heldout"] == heldout["tokens"][own].tolist()
        assert found["same"] == WHOLE.tolist()
        for name, words in {
            "rest": "shape or dtype",
            "key": "key",
            "model": "model",
            "text": "text",
            "heldout text": "text",
        }.items():
            assert f"process 1 has another {words}" in (found[name] or ""), (name, found[name])
        assert "processes 0 and 1 hold the same rows" in found["differ"]
        assert "jax.set_mesh" in found["no mesh"]


def reports_of_processes():
    """What each process is told of the same model and batch."""
    with jax.set_mesh(make_mesh(ParallelConfig(data=2))):
        index = jax.process_index()
        return reports(global_batch(WIDE[16 * index : 16 * index + 16]))


@pytest.mark.slow
def test_every_process_is_told_what_quantization_does():
    """JAX calls back in the first process alone."""
    first, second = run_processes(2, reports_of_processes)
    assert first.result == second.result == [pytest.approx(values, rel=2.0**-10) for values in reports(WIDE)]


def test_one_process_gives_the_whole():
    with jax.set_mesh(make_mesh(ParallelConfig(data=1))):
        batch = global_batch({"x": WHOLE})
    assert np.array_equal(batch["x"], WHOLE)
