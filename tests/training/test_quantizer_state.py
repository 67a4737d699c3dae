"""The train step and quantizer state: split off, merged by max, written back, and in no norm, clipping or optimizer.

`check` compares steps with a loop written by hand. The tests below it replace one function of the state's handling at a
time, wherever the package uses it, and expect `check` to fail.
"""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.layers import Linear
from jax_te.quantize import QuantizerState, merge_quantizers, write_back
from jax_te.recipe import DelayedScaling, autocast
from jax_te.training import SplitModel, WeightedMean, create_train_state, make_train_step, split_model
from jax_te.training.outcome import global_norm
from tests.support.toy import HISTORY, Toy, loss_fn, make_batch, plain_loss

MICROBATCHES = 4
CLIP = 0.05


def optimizer():
    return optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(1e-2, weight_decay=0.1))


def batches():
    """Four batches, in each of which another microbatch has the largest amax."""
    made = [make_batch(seed) for seed in range(4)]
    for index, batch in enumerate(made):
        batch["x"][4 * ((index + 1) % 4)] *= 3.0 + index
    return made


def start_parameters():
    state = create_train_state(Toy, optax.sgd(0.0), key=jax.random.key(0))
    return {name: state.params[name][...] for name in ("w_in", "bias", "w_out")}


def run_steps(count: int = 4, microbatches: int = MICROBATCHES):
    state = create_train_state(Toy, optimizer(), key=jax.random.key(0))
    step = make_train_step(loss_fn, optimizer(), microbatches=microbatches)
    norms = []
    for batch in batches()[:count]:
        state, metrics = step(state, batch)
        norms.append(float(metrics["grad_norm"]))
    return state, norms


@functools.cache
def by_hand():
    """The same steps on whole batches with nothing but optax: parameters, norms, amaxes and the scale."""
    tx, params = optimizer(), start_parameters()
    opt_state = tx.init(params)
    gradient = jax.jit(jax.grad(plain_loss))
    history, scale, norms = np.zeros(HISTORY, np.float32), np.float32(1.0), []
    for batch in batches():
        grads = gradient(params, scale, batch)
        with jax.numpy_dtype_promotion("standard"):
            norms.append(float(optax.tree.norm(grads)))
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        # The scale a use takes comes from the amaxes before it; what it saw goes in front.
        scale = np.float32(1.0) + np.float32(0.125) * history.max()
        history = np.concatenate([[np.abs(batch["x"]).max()], history[:-1]])
    return params, norms, history, scale


def check():
    params, expected_norms, history, scale = by_hand()
    state, norms = run_steps()
    kept = nnx.as_pure(state.quantizers["quantizers"])["x"]
    np.testing.assert_array_equal(kept["amax_history"], history)
    np.testing.assert_array_equal(kept["scale"], scale)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-5)
    for name, expected in params.items():
        np.testing.assert_allclose(state.params[name][...], expected, rtol=1e-4, atol=1e-6)


def replace(monkeypatch, function, other):
    """Put ``other`` in place of a function of the package, in every module that has it, under whatever name."""
    holders = [
        (module, name)
        for path, module in list(sys.modules.items())
        if path.startswith("jax_te.")
        for name, value in vars(module).items()
        if value is function
    ]
    assert any(module.__name__.startswith("jax_te.training.") for module, _ in holders)
    for module, name in holders:
        monkeypatch.setattr(module, name, other)


@pytest.mark.costly
def test_steps_match_a_loop_by_hand():
    check()


@pytest.mark.costly(slow=("last",))
@pytest.mark.wide("sum", "last")
@pytest.mark.parametrize("merge", ["sum", "mean", "first", "last"])
def test_a_merge_other_than_max_is_noticed(monkeypatch, merge):
    ways = {
        "sum": lambda leaf: jnp.sum(leaf, axis=0),
        "mean": lambda leaf: jnp.mean(leaf, axis=0),
        "first": lambda leaf: leaf[0],
        "last": lambda leaf: leaf[-1],
    }
    by_hand()
    replace(monkeypatch, merge_quantizers, lambda stacked: jax.tree.map(ways[merge], stacked))
    with pytest.raises(AssertionError):
        check()


@pytest.mark.costly
def test_old_state_that_wins_the_write_back_is_noticed(monkeypatch):
    by_hand()
    replace(monkeypatch, write_back, lambda old, gradient, **_: old)
    with pytest.raises(AssertionError):
        check()


def test_state_in_the_norm_and_the_clipping_is_noticed(monkeypatch):
    """The state's next values are let into what is clipped and measured, as if they were gradients."""
    by_hand()
    seen = []

    def spy(stacked):
        seen.append(merge_quantizers(stacked))
        return seen[-1]

    replace(monkeypatch, merge_quantizers, spy)
    replace(monkeypatch, global_norm, lambda grads: global_norm((grads, seen[-1])))
    with pytest.raises(AssertionError):
        check()


def test_state_left_among_the_parameters_is_noticed(monkeypatch):
    def split(model):
        graphdef, params, rest = nnx.split(model, (nnx.Param, QuantizerState), ...)
        return SplitModel(graphdef, params, nnx.State({}), rest)

    by_hand()
    replace(monkeypatch, split_model, split)
    with pytest.raises((AssertionError, KeyError)):
        check()


def test_optimizer_never_sees_the_state():
    state = create_train_state(Toy, optimizer(), key=jax.random.key(0))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.opt_state)]
    assert len(names) == 2 * 3 + 1  # two moments of three parameters, and a count
    assert not any("quantizers" in name for name in names)


def test_metrics_norm_is_of_the_parameters_alone():
    """The amax is a hundred times the gradient's norm."""
    state = create_train_state(Toy, optax.sgd(0.0), key=jax.random.key(0))
    batch = make_batch(0)
    batch["y"] *= 0.0
    batch["x"] *= 1e-3
    batch["x"][0, 0] = 1e-1
    expected = optax.tree.norm(jax.grad(plain_loss)(start_parameters(), np.float32(1.0), batch))
    state, metrics = make_train_step(loss_fn, optax.sgd(0.0))(state, batch)
    np.testing.assert_allclose(metrics["grad_norm"], expected, rtol=1e-5)
    assert float(expected) < 0.01 * float(nnx.as_pure(state.quantizers["quantizers"])["x"]["amax_history"][0])


@pytest.mark.costly
def test_state_is_the_same_for_any_number_of_microbatches():
    states = [run_steps(microbatches=count)[0] for count in (1, 2, 4)]
    for state in states[1:]:
        kept, first = (nnx.as_pure(s.quantizers["quantizers"])["x"] for s in (state, states[0]))
        np.testing.assert_array_equal(kept["amax_history"], first["amax_history"])
        np.testing.assert_array_equal(kept["scale"], first["scale"])


def test_state_of_the_output_gradient_is_the_largest_of_the_microbatches():
    """Its amax is that of a microbatch's share of the loss, and so that of the whole batch's."""
    states = [run_steps(1, microbatches=count)[0] for count in (1, 4)]
    one, four = (nnx.as_pure(state.quantizers["quantizers"])["grad"]["amax_history"][0] for state in states)
    np.testing.assert_allclose(four, one, rtol=1e-5)


@pytest.mark.parametrize("weighted", [False, True], ids=["mean", "weighted"])
def test_amaxes_of_gradients_do_not_depend_on_the_number_of_microbatches(weighted):
    """A run may go on with another number under the scales that it has."""

    def loss(model, x, key):
        mean = jnp.mean(jnp.square(model(x)))
        return WeightedMean(3.0 * mean, jnp.float32(3.0)) if weighted else mean

    def amaxes(microbatches):
        tx = optax.sgd(0.0)
        with autocast(DelayedScaling(amax_history_len=2)):
            state = create_train_state(lambda rngs: Linear(32, 32, rngs=rngs), tx, key=jax.random.key(0))
            state, _ = make_train_step(loss, tx, microbatches=microbatches)(state, x)
        return state.model.quantizers["grad"]["amax_history"][...]

    x = jax.random.normal(jax.random.key(1), (64, 32))
    np.testing.assert_allclose(amaxes(4), amaxes(1), rtol=1e-6)
