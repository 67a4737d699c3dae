"""Every transformation of optax in both loops: what ``nnx.Optimizer`` does with it, or an error that says why not."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax import contrib

from jax_te.layers import Linear
from jax_te.training import (
    Optimizer,
    create_train_state,
    make_train_step,
    muon_dimension_numbers,
    value_and_grad,
)
from tests.support.meshes import use_mesh
from tests.support.toy import assert_same

X = jnp.linspace(-1.0, 1.0, 4 * 3).reshape(4, 3)
RATE = 1e-2


def build(dtype: Any = jnp.float32) -> Linear:
    return Linear(3, 2, params_dtype=dtype, rngs=nnx.Rngs(0))


def loss_fn(model: Any, x: jax.Array, key: Any = None) -> jax.Array:
    return jnp.mean(jnp.square(model(x).astype(jnp.float32) - 1.0))


def only_kernels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in jax.tree_util.keystr(path), params)


def labels(params: Any) -> Any:
    return jax.tree.map(lambda kernel: "kernel" if kernel else "rest", only_kernels(params))


ADAM, SGD = optax.adam(RATE), optax.sgd(RATE)
# Transformations that need arguments of their own; all others are called with a learning rate or without arguments.
GIVEN: dict[str, Callable[[], Any]] = {
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), SGD),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), SGD),
    "apply_if_finite": lambda: optax.apply_if_finite(ADAM, 3),
    "chain": lambda: optax.chain(optax.clip(0.1), ADAM),
    "named_chain": lambda: optax.named_chain(("clip", optax.clip(0.1)), ("adam", ADAM)),
    "clip": lambda: optax.clip(0.1),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.1),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.1),
    "conditionally_mask": lambda: optax.conditionally_mask(ADAM, lambda step: step < 1),
    "conditionally_transform": lambda: optax.conditionally_transform(ADAM, lambda step: step < 1),
    "ema": lambda: optax.chain(SGD, optax.ema(0.9)),
    "flatten": lambda: optax.flatten(ADAM),
    "freeze": lambda: optax.chain(ADAM, optax.freeze(only_kernels)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(RATE, 0.0, 3)),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(RATE),
    "noisy_sgd": lambda: optax.noisy_sgd(RATE, key=jax.random.key(1)),
    "masked": lambda: optax.masked(ADAM, only_kernels),
    "multi_transform": lambda: optax.multi_transform({"kernel": ADAM, "rest": SGD}, labels),
    "partition": lambda: optax.partition({"kernel": ADAM, "rest": optax.set_to_zero()}, labels),
    "scale": lambda: optax.scale(-RATE),
    "scale_by_backtracking_linesearch": lambda: optax.chain(SGD, optax.scale_by_backtracking_linesearch(3)),
    "scale_by_schedule": lambda: optax.scale_by_schedule(optax.linear_schedule(-RATE, 0.0, 3)),
    "scale_by_zoom_linesearch": lambda: optax.chain(SGD, optax.scale_by_zoom_linesearch(3)),
    "selective_transform": lambda: optax.selective_transform(ADAM, freeze_mask=only_kernels),
    "snapshot": lambda: optax.chain(optax.snapshot("norm", lambda u, *_, **__: optax.tree.norm(u)), SGD),
    "stateless": lambda: optax.stateless(lambda grads, params: jax.tree.map(lambda g: -RATE * g, grads)),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, p: -RATE * g),
    "trace": lambda: optax.trace(0.9),
    "with_extra_args_support": lambda: optax.with_extra_args_support(SGD),
    "contrib.mechanize": lambda: contrib.mechanize(SGD),
    "contrib.muon": lambda: contrib.muon(RATE, muon_weight_dimension_numbers=muon_dimension_numbers),
    "contrib.sam": lambda: contrib.sam(SGD, optax.chain(contrib.normalize(), optax.sgd(0.1))),
    "contrib.schedule_free": lambda: contrib.schedule_free(SGD, RATE),
    "contrib.split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(SGD),
    "lbfgs": lambda: optax.lbfgs(linesearch=optax.scale_by_zoom_linesearch(3)),
}
# Not in the modules under a name of their own, or in another form.
MORE: dict[str, Callable[[], Any]] = {
    "MultiSteps": lambda: optax.MultiSteps(ADAM, 2),
    "MultiSteps that skips": lambda: optax.MultiSteps(ADAM, 2, should_skip_update_fn=optax.skip_not_finite),
    "opaque sam": lambda: contrib.sam(SGD, optax.sgd(0.1), opaque_mode=True),
    "plateau": lambda: optax.chain(ADAM, contrib.reduce_on_plateau(patience=1, accumulation_size=1)),
    "muon without numbers": lambda: contrib.muon(RATE),
}
# Why these cannot be, here or in `nnx.Optimizer`.
REFUSED = {
    "lookahead": "takes pairs of fast and slow parameters",
    "monitor": "its state has no measurements before the first update: another structure than behind it",
    "measure_with_ema": "a part of monitor, whose updates are measurements",
    "contrib.differentially_private_aggregate": "takes gradients of single examples",
    "contrib.dpsgd": "takes gradients of single examples",
    "contrib.scale_by_muon": "a part of muon, which gives it the dimension numbers",
    "contrib.hutchinson_estimator_diag_hessian": "a part of sophia, whose updates are not updates of parameters",
}


# Functions without an annotation of their result that are not transformations.
OTHERS = {
    "matrix_inverse_pth_root",
    "sigmoid_binary_cross_entropy",
    "update_infinity_moment",
    "update_moment",
    "update_moment_per_elem_norm",
    "contrib.schedule_free_eval_params",
}


def transformations() -> dict[str, Callable[[], Any]]:
    """Return what makes each transformation of optax and optax.contrib, by name."""
    found: dict[str, Callable[[], Any]] = dict(MORE)
    for prefix, module in (("", optax), ("contrib.", contrib)):
        for function, make in inspect.getmembers(module, inspect.isfunction):
            name, signature = prefix + function, inspect.signature(make)
            result = signature.return_annotation
            # A new function without an annotation is tried, too, until it is listed as another kind of function.
            is_one = "GradientTransformation" in str(result) or result is signature.empty
            if is_one and not function.startswith("_") and name not in REFUSED and name not in OTHERS:
                rate = (RATE,) if "learning_rate" in signature.parameters else ()
                found[name] = GIVEN.get(name, functools.partial(make, *rate))
    return found


def with_flax(tx: Any) -> list[Any]:
    """Train with ``nnx.Optimizer``; it, too, relies on implicit promotion."""
    model = build()
    graphdef, _ = nnx.split(model)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for _ in range(3):
        value, grads = nnx.value_and_grad(loss_fn)(model, X)
        optimizer.update(model, grads, **asked_for(tx, graphdef, value, nnx.as_pure(grads)))
    return jax.tree.leaves(nnx.state(model, nnx.Param))


def with_own_loop(tx: Any) -> list[Any]:
    model = build()
    graphdef, _ = nnx.split(model)
    optimizer = Optimizer(model, tx)
    for _ in range(3):
        value, grads = value_and_grad(loss_fn)(model, X)
        optimizer.update(model, grads, **asked_for(tx, graphdef, value, grads))
    return jax.tree.leaves(nnx.state(model, nnx.Param))


def with_train_step(tx: Any, x: jax.Array = X, microbatches: int = 1) -> list[Any]:
    state = create_train_state(build(), tx, key=jax.random.key(0))
    step = make_train_step(loss_fn, tx, microbatches=microbatches)
    for _ in range(3):
        state, _ = step(state, x)
    return jax.tree.leaves(state.params)


def asked_for(tx: Any, graphdef: Any, value: jax.Array, grads: Any) -> dict[str, Any]:
    """Return what transformations may ask for in an update."""

    def value_fn(params: Any, obj_fn: Any = None, grad_fn: Any = None) -> jax.Array:
        return loss_fn(nnx.merge(graphdef, params), X)

    def grad_fn(params: Any, index: int) -> Any:
        return jax.grad(value_fn)(params)

    found = {"value": value, "grad": grads, "value_fn": value_fn, "obj_fn": value_fn, "grad_fn": grad_fn}
    names = inspect.signature(tx.update).parameters
    return found if "extra_args" in names else {name: found[name] for name in names if name in found}


# One of each kind of state and of arguments.
USUAL = [
    "adamw", "masked", "multi_transform", "partition", "freeze", "contrib.muon", "contrib.schedule_free",
    "polyak_sgd", "plateau", "scale_by_backtracking_linesearch", "sm3", "noisy_sgd", "opaque sam",
]  # fmt: skip


@pytest.mark.costly(
    "partition",
    slow=(
        "sm3",
        "scale_by_backtracking_linesearch",
        "polyak_sgd",
        "noisy_sgd",
        "plateau",
        "contrib.muon",
        "freeze",
        "opaque sam",
        "contrib.schedule_free",
        "masked",
        "adamw",
    ),
)
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in transformations()]
)
def test_both_loops_do_what_flax_does(name):
    """Without compiling: the many programs are small, and take most of their time in XLA."""
    with jax.disable_jit():
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            expected = with_flax(transformations()[name]())
        for found in (with_own_loop(transformations()[name]()), with_train_step(transformations()[name]())):
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_a_compiled_loop_differs_in():
    """Arguments that are functions, states without arrays, and a step that is not finite changes none of them."""
    txs = {name: transformations()[name]() for name in ("contrib.muon", "noisy_sgd")}
    tx = optax.partition({"kernel": txs["contrib.muon"], "rest": txs["noisy_sgd"]}, labels)
    model = build(jnp.bfloat16)
    optimizer = Optimizer(model, tx)

    @nnx.jit
    def train(model: Any, optimizer: Any, x: jax.Array) -> None:
        optimizer.update(model, value_and_grad(loss_fn)(model, x)[1])

    train(model, optimizer, X)
    before = jax.tree.map(jnp.copy, (nnx.state(model), optimizer.opt_state, optimizer.masters))
    train(model, optimizer, X.at[0, 0].set(jnp.nan))
    assert_same((nnx.state(model), optimizer.opt_state, optimizer.masters), before)
    assert int(optimizer.skipped_steps[...]) == 1
    for name in ("scale_by_backtracking_linesearch", "MultiSteps"):
        tx = transformations()[name]()
        for one, other in zip(with_train_step(tx, microbatches=2), with_own_loop(tx), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


STATES: dict[str, Any] = {
    "wider floats": lambda: contrib.ademamix(RATE, mu_dtype=jnp.bfloat16),
    "Python numbers": lambda: optax.chain(
        optax.GradientTransformation(
            lambda params: (jnp.zeros((), jnp.int8), jnp.zeros((), jnp.bfloat16)),
            lambda grads, state, params=None: (grads, (1, 0.5)),
        ),
        SGD,
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_keeps_its_dtypes(name):
    """Those of init, which a step is compiled for, where update gives others."""
    tx = STATES[name]()
    state = create_train_state(lambda rngs: build(), tx, key=jax.random.key(0))
    optimizer, model = Optimizer(build(), tx), build()
    before = [leaf.dtype for leaf in jax.tree.leaves(state.opt_state)]
    for _ in range(2):
        state, _ = make_train_step(loss_fn, tx)(state, X)
        optimizer.update(model, value_and_grad(loss_fn)(model, X)[1])
    for after in (state.opt_state, nnx.as_pure(optimizer.opt_state)):
        assert [leaf.dtype for leaf in jax.tree.leaves(after)] == before


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"optax\.lookahead updates pairs"):
        Optimizer(build(), optax.lookahead(SGD, 2, 0.5))
    with pytest.raises(ValueError, match=r"optax\.lookahead updates pairs"):
        create_train_state(build(), optax.lookahead(SGD, 2, 0.5), key=jax.random.key(0))
    with pytest.raises(ValueError, match="optimizer state of shapes"):
        with_train_step(optax.chain(optax.monitor({"norm": optax.tree.norm}), SGD))
    count = optax.GradientTransformation(
        lambda params: jnp.zeros((), jnp.int32), lambda grads, state, params=None: (grads, state + 0.5)
    )
    for refused in (with_train_step, with_own_loop):
        with pytest.raises(ValueError, match="from int32 to float32, which int32 cannot hold"):
            refused(count)
    # The gradients' first axis counts as one of examples; without a look at shapes the mean would be broadcast.
    private = contrib.differentially_private_aggregate(1.0, 0.1, key=jax.random.key(0))
    state = create_train_state(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), private, key=jax.random.key(0))
    with pytest.raises(ValueError, match="single examples"):
        make_train_step(loss_fn, private)(state, X[:, :2])


@pytest.mark.costly
def test_gradients_of_single_examples():
    private = optax.chain(contrib.differentially_private_aggregate(1e3, 0.0, key=jax.random.key(0)), SGD)
    models = [build(), build()]
    graphdef, params = nnx.split(models[0])
    grads = jax.vmap(jax.grad(lambda params, x: loss_fn(nnx.merge(graphdef, params), x[None])), (None, 0))(params, X)
    Optimizer(models[0], private).update(models[0], grads)
    Optimizer(models[1], SGD).update(models[1], jax.tree.map(lambda leaf: jnp.mean(leaf, 0), grads))
    for one, other in zip(*[jax.tree.leaves(nnx.state(model)) for model in models], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.costly
def test_evaluation_parameters_of_schedule_free_are_of_the_masters():
    """Its formula, on the fp32 masters of bf16 parameters, which optax's own function takes from both loops."""
    tx = contrib.schedule_free(optax.sgd(0.1), 0.1, b1=0.75)
    x = X.astype(jnp.bfloat16)
    state, model = create_train_state(build(jnp.bfloat16), tx, key=jax.random.key(0)), build(jnp.bfloat16)
    step, optimizer = make_train_step(loss_fn, tx), Optimizer(model, tx)
    for _ in range(3):
        state, _ = step(state, x)
        optimizer.update(model, value_and_grad(loss_fn)(model, x)[1])
    for opt_state, masters in ((state.opt_state, state.masters), (optimizer.opt_state, optimizer.masters)):
        found = contrib.schedule_free_eval_params(opt_state, masters)
        for x_, y, z in zip(*map(jax.tree.leaves, (found, masters, opt_state.z)), strict=True):
            assert x_.dtype == jnp.float32
            assert (x_ != y).any()
            # Four roundings of fp32 of terms below 1.
            np.testing.assert_allclose(x_, y / 0.75 - z / 3.0, atol=4 * 2.0**-23)


@pytest.mark.costly("True")
@pytest.mark.parametrize("distributed", [False, True])
def test_frozen_half_precision_parameters_and_their_masters_keep_their_bits(distributed):
    """Masks that a distributed optimizer's split masters and optimizer state follow, too."""
    frozen = optax.partition({"kernel": optax.adam(0.1), "rest": optax.set_to_zero()}, labels)
    tx = optax.chain(optax.masked(optax.clip(0.1), only_kernels), frozen)
    with use_mesh("auto" if distributed else "no mesh"):
        model = Linear(8, 8, params_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        state = create_train_state(model, tx, key=jax.random.key(0), distributed_optimizer=distributed)
        before = jax.tree.map(np.asarray, (state.params["bias"], state.masters["bias"], state.params["kernel"]))
        step = make_train_step(loss_fn, tx)
        for _ in range(2):
            state, _ = step(state, jnp.ones((8, 8), jnp.bfloat16))
        found = jax.tree.map(np.asarray, (state.params["bias"], state.masters["bias"], state.params["kernel"]))
    assert_same(found[:2], before[:2])
    assert (np.asarray(found[2].get_value()) != np.asarray(before[2].get_value())).any()
