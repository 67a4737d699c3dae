"""The train step: microbatches, masters, skipped steps, keys, recipes, meshes."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast, current_recipe
from jax_te.sharding import current_mesh
from jax_te.training import (
    ConstantLossScale,
    DynamicLossScale,
    TrainState,
    WeightedMean,
    abstract_train_state,
    create_train_state,
    make_eval_step,
    make_train_step,
    value_and_grad,
)
from jax_te.training import step as step_module
from jax_te.training.outcome import global_norm
from tests.support.meshes import use_mesh
from tests.support.numerics import draw
from tests.support.toy import Toy, assert_same, loss_fn, make_batch, values


def new_state(tx=None, *, build=Toy, scaler=None) -> TrainState:
    return create_train_state(build, tx or optax.adam(1e-2), key=jax.random.key(0), scaler=scaler)


def copy(tree):
    return jax.tree.map(jnp.copy, tree)


def half_toy(rngs):
    return Toy(rngs, jnp.bfloat16)


@pytest.mark.wide("half_toy")
@pytest.mark.parametrize("build", [Toy, half_toy])
def test_microbatches_equal_one_batch(build):
    results = []
    for microbatches in (1, 4):
        state, metrics = make_train_step(loss_fn, optax.sgd(0.1), microbatches=microbatches)(
            new_state(optax.sgd(0.1), build=build), make_batch(0)
        )
        results.append((state.params | state.masters, metrics))
    # A bf16 parameter's gradient is rounded to bf16 once for each microbatch; an fp32 one's is not.
    tolerance = 1e-6 if build is Toy else 2e-3
    for one, other in zip(*(values(result) for result in results), strict=True):
        np.testing.assert_allclose(one.astype(np.float64), other.astype(np.float64), rtol=tolerance, atol=tolerance)


def weighted_loss(model, batch, key):
    losses = jnp.mean(jnp.square(model(batch["x"]) - batch["y"]), axis=-1)
    return WeightedMean(jnp.sum(losses * batch["weight"]), jnp.sum(batch["weight"]))


@pytest.mark.costly("explicit")
@pytest.mark.wide("explicit")
def test_weighted_microbatches_give_the_mean_over_the_whole_batch(mesh_mode):
    """Weights differ between microbatches; in one of them no example counts."""
    batch = make_batch(0) | {
        "weight": np.repeat(np.arange(4, dtype=np.float32), 4) * np.tile(np.float32([0.5, 1, 0, 2]), 4)
    }
    results = []
    for microbatches in (1, 2):
        step = make_train_step(weighted_loss, optax.sgd(0.1), microbatches=microbatches)
        state, metrics = step(new_state(optax.sgd(0.1)), batch)
        results.append((state.params, metrics))
    for one, other in zip(*(values(result) for result in results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    state = new_state(optax.sgd(0.1))
    losses = np.square(np.asarray(state.model(batch["x"])) - batch["y"]).mean(-1)
    expected = np.average(losses, weights=batch["weight"])
    np.testing.assert_allclose(results[0][1]["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(make_eval_step(weighted_loss)(state, batch), expected, rtol=1e-5)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_batch_of_no_weight_changes_no_parameter(microbatches):
    batch = make_batch(0) | {"weight": np.zeros(16, np.float32)}
    before = copy(new_state(optax.sgd(0.1)))
    step = make_train_step(weighted_loss, optax.sgd(0.1), microbatches=microbatches)
    state, metrics = step(new_state(optax.sgd(0.1)), batch)
    assert_same(state.params, before.params)
    assert float(metrics["loss"]) == float(metrics["skipped"]) == 0.0


def test_gradients_are_summed_in_fp32():
    """512 gradients of 2^-8 in bf16: a bf16 sum stops growing at 1, half of what it should come to."""

    def loss(model, batch, key):
        return jnp.sum(model.bias[...].astype(jnp.float32)) * 2.0**-8 + 0.0 * jnp.sum(batch)

    def build(rngs):
        model = Toy(rngs, watched=False)
        model.bias = nnx.Param(jnp.zeros((1, 4), jnp.bfloat16))
        return model

    state = new_state(optax.sgd(1.0), build=build)
    step = make_train_step(loss, optax.sgd(1.0), microbatches=512)
    state, _ = step(state, np.zeros((512, 1), np.float32))
    np.testing.assert_array_equal(state.masters["bias"][...], np.full((1, 4), -(2.0**-8), np.float32))


def test_masters_keep_what_half_precision_would_lose():
    state = new_state(optax.sgd(1e-5), build=half_toy)
    assert sorted(state.masters) == ["w_in", "w_out"]
    assert state.params["w_in"].dtype == jnp.bfloat16
    assert state.params["bias"].dtype == jnp.float32
    before = copy(state)
    step = make_train_step(loss_fn, optax.sgd(1e-5))
    for seed in range(3):
        state, _ = step(state, make_batch(seed))
    moved = np.abs(np.asarray(state.masters["w_in"][...] - before.masters["w_in"][...]))
    assert moved.max() > 0.0
    assert moved.max() < 1e-4  # below half a unit of most bf16 values: they stay
    assert np.mean(np.asarray(state.params["w_in"][...] == before.params["w_in"][...])) > 0.9
    for name in state.masters:
        rounded = state.masters[name][...].astype(jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(state.params[name][...]), np.asarray(rounded))


def test_optimizer_state_is_of_the_masters():
    state = new_state(optax.adam(1e-3), build=half_toy)
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert len(moments) == 6
    assert {leaf.dtype.name for leaf in moments} == {"float32"}


@pytest.mark.costly("1-input", slow=("2-loss",))
@pytest.mark.wide
@pytest.mark.parametrize("where", ["input", "loss", "gradient"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_that_is_not_finite_changes_only_step_counter_and_scaler(where, microbatches):
    def loss(model, batch, key):
        extra = jnp.inf if where == "loss" else 0.0
        if where == "gradient":  # sqrt at 0: the loss is finite, its gradient is not
            extra = jnp.sum(jnp.sqrt(jnp.abs(0.0 * model.bias[...])))
        return loss_fn(model, batch, key) + extra

    def build(rngs):
        return Toy(rngs, jnp.bfloat16, dropout=0.1)

    tx = optax.adam(1e-2)
    scaler = DynamicLossScale(initial_scale=8.0, hysteresis=1)
    step = make_train_step(loss, tx, microbatches=microbatches)
    state = new_state(tx, build=build, scaler=scaler)
    before = copy(state)
    batch = make_batch(0)
    if where == "input":
        batch["x"][3, 5] = np.inf
    state, metrics = step(state, batch)
    for name in ("params", "masters", "quantizers", "rest", "opt_state", "rng"):
        assert_same(getattr(state, name), getattr(before, name))
    assert int(state.step) == 1
    assert int(state.skipped_steps) == 1
    assert float(state.scaler.scale) == 4.0
    assert float(metrics["skipped"]) == 1.0
    assert float(metrics["loss_scale"]) == 8.0


def test_a_run_goes_on_after_a_skipped_step():
    step = make_train_step(loss_fn, optax.adam(1e-2))
    bad = make_batch(0)
    bad["x"][0, 0] = np.nan
    skipping, straight = new_state(), new_state()
    for batch in (make_batch(1), bad, make_batch(2)):
        skipping, _ = step(skipping, batch)
    for batch in (make_batch(1), make_batch(2)):
        straight, metrics = step(straight, batch)
    assert float(metrics["skipped"]) == 0.0
    for name in ("params", "quantizers", "opt_state"):
        assert_same(getattr(skipping, name), getattr(straight, name))
    assert (int(skipping.step), int(skipping.skipped_steps)) == (3, 1)


def test_a_step_whose_norm_overflows_is_skipped():
    """Its squares would make Adam's second moments inf, and their parameters would never change again."""
    state, metrics = make_train_step(lambda *args: 1e25 * loss_fn(*args), optax.adam(1e-2))(new_state(), make_batch(0))
    assert np.isfinite(metrics["loss"])
    assert np.isinf(metrics["grad_norm"])
    assert int(state.skipped_steps) == 1
    assert_same(state.params, new_state().params)


def test_gradients_are_unscaled():
    """Norm and update are those of the loss itself, whatever the scale."""
    results = []
    for scaler in (None, DynamicLossScale(initial_scale=2.0**16)):
        state, metrics = make_train_step(loss_fn, optax.sgd(0.1))(
            new_state(optax.sgd(0.1), scaler=scaler), make_batch(0)
        )
        results.append(values((state.params, metrics["loss"], metrics["grad_norm"])))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_fp16_gradients_below_its_range_are_kept_by_the_scale():
    def build(rngs):
        return Toy(rngs, jnp.float16, watched=False)

    def tiny_loss(model, batch, key):
        return 1e-8 * loss_fn(model, batch, key)

    norms = []
    for scaler in (None, DynamicLossScale(initial_scale=2.0**24)):
        _, metrics = make_train_step(tiny_loss, optax.sgd(0.1))(
            new_state(optax.sgd(0.1), build=build, scaler=scaler), make_batch(0)
        )
        norms.append(float(metrics["grad_norm"]))
    _, metrics = make_train_step(loss_fn, optax.sgd(0.1))(new_state(optax.sgd(0.1), build=build), make_batch(0))
    np.testing.assert_allclose(norms[1], 1e-8 * float(metrics["grad_norm"]), rtol=1e-3)
    assert abs(norms[0] / norms[1] - 1.0) > 0.1


def test_each_microbatch_of_each_step_has_its_own_key():
    def loss(model, batch, key):
        return jax.random.normal(key) + 0.0 * jnp.sum(model.bias[...])

    for microbatches in (1, 2):
        state = new_state()
        rng = jnp.copy(state.rng)
        step = make_train_step(loss, optax.adam(1e-2), microbatches=microbatches)
        for number in range(2):
            state, metrics = step(state, make_batch(0))
            key = jax.random.fold_in(rng, number)
            drawn = [float(jax.random.normal(jax.random.fold_in(key, i))) for i in range(microbatches)]
            np.testing.assert_allclose(float(metrics["loss"]), np.mean(drawn), rtol=1e-6)


def test_other_state_of_the_model_is_carried_on():
    step = make_train_step(loss_fn, optax.sgd(0.0), microbatches=2)
    state = new_state(optax.sgd(0.0), build=lambda rngs: Toy(rngs, dropout=0.5))
    losses = []
    for _ in range(2):
        state, metrics = step(state, make_batch(0))
        losses.append(float(metrics["loss"]))
    assert losses[0] != losses[1]
    assert int(state.rest["dropout"]["rngs"]["count"][...]) == 4


def record_loss_functions() -> optax.GradientTransformationExtraArgs:
    """Return a transformation that changes nothing; its state is what the loss and its functions gave."""

    def update(grads, state, params, *, value, value_fn, grad, grad_fn, **_):
        differences = jax.tree.map(jnp.subtract, grad_fn(params, 0), grad)
        found = {"value": value, "at": value_fn(params), "gradient error": optax.tree.norm(differences)}
        return jax.tree.map(jnp.zeros_like, grads), found

    empty = dict.fromkeys(("value", "at", "gradient error"), jnp.zeros(()))
    return optax.GradientTransformationExtraArgs(lambda params: empty, update)


@pytest.mark.costly("2")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_functions_of_the_loss_give_the_steps_own_at_its_parameters(microbatches):
    """With other state that each microbatch changes: a dropout's stream of keys, and a sum that the loss reads."""

    class Stateful(nnx.Module):
        def __init__(self, rngs):
            self.toy, self.drop = Toy(rngs), nnx.Dropout(0.5, rngs=rngs)
            self.seen = nnx.BatchStat(jnp.zeros(()))

        def __call__(self, x):
            y = self.toy(self.drop(x))
            self.seen[...] += jnp.mean(y)
            return y + self.seen[...]

    tx = record_loss_functions()
    state = new_state(tx, build=Stateful)
    step = make_train_step(lambda model, x, key: jnp.mean(model(x) ** 2), tx, microbatches=microbatches)
    state, metrics = step(state, draw("x", (8, 16)))
    found = state.opt_state
    assert float(found["value"]) == float(metrics["loss"])
    # Other programs of the same fp32 arithmetic.
    np.testing.assert_allclose(found["at"], found["value"], rtol=1e-5)
    assert float(found["gradient error"]) < 1e-5 * float(metrics["grad_norm"])


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_function_of_the_loss_has_the_steps_loss_scale(microbatches):
    """fp16 loses gradients as small as these without it."""
    tx, scaler = record_loss_functions(), ConstantLossScale(scale=2.0**16)
    state = new_state(tx, build=lambda rngs: nnx.Linear(16, 16, dtype=jnp.float16, rngs=rngs), scaler=scaler)

    def loss(model, x, key):
        return 1e-7 * jnp.mean(model(x).astype(jnp.float32) ** 2)

    step = make_train_step(loss, tx, microbatches=microbatches)
    state, metrics = step(state, draw("x", (8, 16)).astype(jnp.float16))
    assert float(metrics["grad_norm"]) > 0.0
    assert float(state.opt_state["gradient error"]) < 1e-3 * float(metrics["grad_norm"])  # rounded in fp16


def test_another_recipe_is_another_trace():
    traced = []

    def loss(model, batch, key):
        traced.append(current_recipe())
        return loss_fn(model, batch, key)

    recipes = [DelayedScaling(), Float8CurrentScaling(), None]
    step = make_train_step(loss, optax.sgd(0.1))
    state = new_state(optax.sgd(0.1))
    for _ in range(2):
        for recipe in recipes:
            with autocast(recipe):
                state, _ = step(state, make_batch(0))
    assert traced == recipes


@pytest.mark.costly("16", slow=("4",))
@pytest.mark.parametrize("microbatches", [1, 4, 16])
def test_any_number_of_microbatches_is_traced_once(microbatches):
    traced = []

    def loss(model, batch, key):
        traced.append(batch["x"].shape)
        return loss_fn(model, batch, key)

    make_train_step(loss, optax.adam(1e-2), microbatches=microbatches)(new_state(), make_batch(0))
    assert traced == [(16 // microbatches, 16)]


def test_the_state_is_donated():
    state = new_state()
    make_train_step(loss_fn, optax.adam(1e-2))(state, make_batch(0))
    assert state.params["w_in"].get_value().is_deleted()


def test_metrics_are_fp32_scalars():
    _, metrics = make_train_step(loss_fn, optax.adam(1e-2))(new_state(), make_batch(0))
    assert sorted(metrics) == ["grad_norm", "loss", "loss_scale", "skipped"]
    assert all(value.dtype == jnp.float32 and value.shape == () for value in metrics.values())


@functools.cache
def without_mesh(microbatches):
    return three_steps(microbatches)[1]


def three_steps(microbatches):
    traces = []

    def loss(model, batch, key):
        traces.append(current_mesh())
        return loss_fn(model, batch, key)

    tx = optax.adam(1e-2)
    state = create_train_state(half_toy, tx, key=jax.random.key(0), scaler=DynamicLossScale())
    step, losses = make_train_step(loss, tx, microbatches=microbatches), []
    for seed in range(3):
        state, metrics = step(state, make_batch(seed))
        losses.append(float(metrics["loss"]))
    assert len(traces) == 1
    return state, losses


@pytest.mark.costly
@pytest.mark.wide("2-explicit")
@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_mesh_gives_the_same_losses_and_keeps_shardings(mode, microbatches):
    alone = without_mesh(microbatches)
    with use_mesh(mode):
        state, losses = three_steps(microbatches)
        abstract = abstract_train_state(half_toy, optax.adam(1e-2), scaler=DynamicLossScale())
        for leaf, expected in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
            assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)
    np.testing.assert_allclose(losses, alone, rtol=1e-4)


def test_evaluation_uses_no_key_no_dropout_and_leaves_the_state():
    keys = []

    def loss(model, batch, key):
        keys.append(key)
        return loss_fn(model, batch, key)

    state = new_state(build=lambda rngs: Toy(rngs, dropout=0.5))
    before = copy(state)
    evaluate = make_eval_step(loss)
    first, second = evaluate(state, make_batch(0)), evaluate(state, make_batch(0))
    assert keys == [None]
    assert float(first) == float(second)
    assert_same(state, before)
    np.testing.assert_allclose(float(first), float(loss_fn(new_state().model, make_batch(0), None)), rtol=1e-6)


def test_bad_batches_are_refused():
    state = new_state(optax.sgd(0.1))
    with pytest.raises(ValueError, match="batch size 10 does not divide into microbatches=4"):
        make_train_step(loss_fn, optax.sgd(0.1), microbatches=4)(state, make_batch(0, 10))
    with pytest.raises(ValueError, match="same leading axis"):
        make_train_step(loss_fn, optax.sgd(0.1))(state, {"x": np.zeros((4, 16)), "y": np.zeros((2, 16))})
    with pytest.raises(ValueError, match="same leading axis"):
        make_train_step(loss_fn, optax.sgd(0.1))(state, {"x": np.float32(1.0)})
    with pytest.raises(ValueError, match="scalar"):
        make_train_step(lambda m, b, k: jnp.ones(2), optax.sgd(0.1))(state, make_batch(0))
    with pytest.raises(ValueError, match="microbatches"):
        make_train_step(loss_fn, optax.sgd(0.1), microbatches=0)
    with use_mesh("auto"):
        state = new_state(optax.sgd(0.1))
        with pytest.raises(ValueError, match=r"data\*fsdp = 4; make the batch a multiple of 8"):
            make_train_step(loss_fn, optax.sgd(0.1), microbatches=2)(state, make_batch(0, 12))


@pytest.mark.parametrize(
    ("created", "stepped"),
    [
        (optax.adam(1e-2), optax.sgd(1e-2)),
        (optax.chain(optax.clip(1.0), optax.adam(1e-2)), optax.chain(optax.identity(), optax.sgd(1e-2))),
        (optax.adam(1e-2), optax.MultiSteps(optax.adam(1e-2), 2)),
        (optax.adafactor(1e-2), optax.adafactor(1e-2, min_dim_size_to_factor=8)),
        (optax.adam(1e-2), optax.adabelief(1e-2)),
        (optax.sgd(1e-2, momentum=0.9), optax.adam(1e-2)),
        (optax.MultiSteps(optax.adam(1e-2), 2), optax.MultiSteps(optax.sgd(1e-2), 2)),
        (optax.lbfgs(memory_size=4), optax.lbfgs(memory_size=2)),
    ],
    ids=["sgd", "parts", "MultiSteps", "shapes", "class", "attributes", "inner", "memory"],
)
def test_a_state_of_another_transformation_is_refused(created, stepped):
    state = new_state(created)
    with pytest.raises(ValueError, match=r"opt_state is not one of tx: it has \d+ arrays in \("):
        make_train_step(loss_fn, stepped)(state, make_batch(8))
    assert not state.step.is_deleted()


def test_complex_parameters_are_refused_by_name():
    class Complex(nnx.Module):
        def __init__(self, rngs):
            self.wave = nnx.Param(jnp.ones((2,), jnp.complex64))

    def loss(model, *_):
        return jnp.sum(jnp.abs(model.wave[...]))

    step = make_train_step(loss, optax.sgd(0.1))
    for call in (
        lambda: value_and_grad(loss)(Complex(nnx.Rngs(0))),
        lambda: step(new_state(build=Complex), make_batch(0)),
    ):
        with pytest.raises(TypeError, match="wave is complex64, and gradients are fp32"):
            call()


def test_metrics_of_layers_do_not_take_the_names_of_the_steps_own(monkeypatch):
    monkeypatch.setattr(step_module, "step_metrics", lambda model: {"loss": jnp.zeros(())})
    with pytest.raises(ValueError, match="two metrics of a train step have the name 'loss'"):
        make_train_step(loss_fn, optax.sgd(0.1))(new_state(optax.sgd(0.1)), make_batch(0))


def test_whether_gradients_are_finite_is_computed_once():
    """And not anew in each parameter's update: the program, and the time to compile it, would grow quadratically."""
    state = new_state(build=lambda rngs: nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(4)]))

    def loss(layers, batch, key):
        x = batch["x"]
        for layer in layers:
            x = jnp.tanh(layer(x))
        return jnp.mean(x)

    text = make_train_step(loss, optax.adam(1e-3)).lower(state, make_batch(0)).compile().as_text()
    # One for each of 8 gradients and the loss; XLA may fuse some of them into kernels of their own.
    assert text.count(" is-finite(") <= 9


NO_LOSSES = {
    "pair": (lambda loss: (loss, {"aux": 1}), "got tuple; "),
    "dict": (lambda loss: {"loss": loss}, "got dict; "),
    "None": (lambda loss: None, "got NoneType"),
    "float": (lambda loss: 1.0, "got float"),
    "total": (lambda loss: WeightedMean(1.0, loss), "got a WeightedMean whose total is of type float"),
}


def call(how: str, loss) -> None:
    """Call a way to run a loss function."""
    if how == "value_and_grad":
        value_and_grad(lambda model: loss(model, make_batch(0), None))(Toy(nnx.Rngs(0)))
    elif how == "eval":
        make_eval_step(loss)(new_state(), make_batch(0))
    else:
        make_train_step(loss, optax.adam(1e-2), microbatches=int(how))(new_state(), make_batch(0))


@pytest.mark.parametrize("how", ["1", "2", "eval", "value_and_grad"])
@pytest.mark.parametrize("kind", NO_LOSSES)
def test_a_result_that_is_no_loss_is_refused(kind, how):
    change, got = NO_LOSSES[kind]
    remedy = "give has_aux=True" if how == "value_and_grad" else "it has no auxiliary output"
    match = f"loss_fn must return a scalar array or a WeightedMean, {got}" + (f".*{remedy}" if "; " in got else "")
    with pytest.raises(TypeError, match=match):
        call(how, lambda model, batch, key: change(loss_fn(model, batch, key)))


@pytest.mark.parametrize("how", ["1", "2", "eval", "value_and_grad"])
def test_numpy_has_losses_too(how):
    call(how, lambda model, batch, key: np.float32(1.0))


@pytest.mark.costly("2")
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_variable_of_the_model_carries_what_is_no_loss(microbatches):
    class Seen(nnx.Module):
        def __init__(self, rngs):
            self.toy, self.largest = Toy(rngs), nnx.Variable(jnp.zeros(()))

    def loss(model, batch, key):
        model.largest[...] = jnp.max(batch["x"])
        return loss_fn(model.toy, batch, key)

    batch = make_batch(0)
    state, _ = make_train_step(loss, optax.adam(1e-2), microbatches=microbatches)(new_state(build=Seen), batch)
    last = np.split(batch["x"], microbatches)[-1]
    assert float(state.model.largest[...]) == float(np.max(last))


@pytest.mark.parametrize("loss", [jnp.int32(3), WeightedMean(jnp.int32(3), jnp.int32(1))], ids=["loss", "total"])
def test_a_loss_of_integers_is_refused(loss):
    with pytest.raises(TypeError, match="floating-point numbers to differentiate, got int32"):
        value_and_grad(lambda model: loss)(Toy(nnx.Rngs(0)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_norm_is_that_of_all_gradients_in_fp32(dtype):
    """Of many small arrays, which are summed up at once, and of a large one, whose squares would overflow fp16."""
    norm = jax.jit(global_norm)
    grads = [draw(f"small {i}", (3 + i, 5), dtype) for i in range(40)]
    grads += [300 * draw("large", (300, 130), dtype), jnp.asarray(3.0, dtype)]
    wanted = np.sqrt(sum(np.sum(np.square(np.asarray(grad, np.float64))) for grad in grads))
    np.testing.assert_allclose(norm(grads), wanted, rtol=1e-6)  # some ulps of fp32
    for place in (0, 40):
        for bad in (jnp.inf, jnp.nan):
            spoilt = list(grads)
            spoilt[place] = grads[place].at[0, 0].set(bad)
            assert not np.isfinite(norm(spoilt)), (place, bad)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_of_a_shard_map_train_by_themselves(check_vma, dtype):
    """Local SGD: steps on each device's own batch, from parameters that vary over the devices and moments that do not
    yet, and then a mean of the parameters."""
    tx, mesh = optax.adam(0.1), jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step = make_train_step(lambda model, x, key: jnp.mean(jnp.square(model(x).astype(jnp.float32))), tx)
    state = create_train_state(
        lambda rngs: nnx.Linear(4, 2, dtype=dtype, param_dtype=dtype, rngs=rngs), tx, key=jax.random.key(0)
    )
    x = draw("x", (8, 4))

    def train(state, x):
        for _ in range(2):
            state, _ = step(state, x)
        return state.params

    def on_a_device(state, x):
        if check_vma:
            state = dataclasses.replace(state, params=jax.lax.pcast(state.params, "data", to="varying"))
        return jax.tree.map(lambda leaf: jax.lax.pmean(leaf.astype(jnp.float32), "data"), train(state, x))

    local = jax.shard_map(on_a_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
    means = jax.jit(local)(state, x)
    parts = [jax.tree.map(lambda leaf: leaf.astype(jnp.float32), train(copy(state), part)) for part in (x[:4], x[4:])]
    for mean, *both in zip(*map(jax.tree.leaves, (means, *parts)), strict=True):
        # Adam's steps are of the size of the rate: a rounding of a gradient is far below it, one of a parameter in bf16
        # up to 2**-8 of it.
        np.testing.assert_allclose(mean, sum(both) / 2, atol=1e-5 if dtype == jnp.float32 else 2**-7)
