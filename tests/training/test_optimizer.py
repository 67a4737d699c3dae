"""Flax's usual loop with `value_and_grad` and `Optimizer`: what a train step does, and Flax's own ways."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te import DelayedScaling, Float8CurrentScaling, autocast
from jax_te.config import RouterOptions
from jax_te.layers import LayerNormMLP, Linear, LoRA, Router, quantize_parameters
from jax_te.quantize import QuantizedKernel, QuantizerState
from jax_te.training import (
    ConstantLossScale,
    DynamicLossScale,
    Optimizer,
    WeightedMean,
    create_train_state,
    make_train_step,
    muon_dimension_numbers,
    value_and_grad,
)
from tests.support.meshes import use_mesh
from tests.support.toy import assert_same

RECIPE = DelayedScaling(amax_history_len=2)
X = jnp.linspace(-1.0, 1.0, 16 * 32).reshape(16, 32)


def build(dtype: Any = jnp.float32, seed: int = 0) -> LayerNormMLP:
    return LayerNormMLP(32, 32, params_dtype=dtype, rngs=nnx.Rngs(seed))


def loss_fn(model: Any, x: jax.Array, key: Any = None) -> jax.Array:
    return jnp.mean(jnp.square(model(x).astype(jnp.float32) - 1.0))


@nnx.jit
def train(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    loss, grads = value_and_grad(loss_fn, scaler=optimizer.scaler)(model, x)
    optimizer.update(model, grads)
    return loss


@pytest.mark.costly("parameters in FP8", slow=["explicit mesh"])
@pytest.mark.wide("parameters in FP8", "explicit mesh")
@pytest.mark.parametrize(
    ("dtype", "recipe", "fp8_param", "mesh"),
    [
        (jnp.float32, None, False, "no mesh"),
        (jnp.bfloat16, RECIPE, False, "no mesh"),
        (jnp.bfloat16, RECIPE, True, "no mesh"),
        (jnp.bfloat16, RECIPE, False, "auto"),
        (jnp.bfloat16, RECIPE, False, "explicit"),
    ],
    ids=["no recipe", "recipe", "parameters in FP8", "auto mesh", "explicit mesh"],
)
def test_it_is_the_train_step(dtype, recipe, fp8_param, mesh):
    """Losses, parameters, masters, states, scaler and counters; the third step is skipped."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    scaler = DynamicLossScale(initial_scale=16.0, hysteresis=1)
    x = X.reshape(4, 4, 32).repeat(4, 1).astype(dtype)
    batches = [x, -x, x.at[0, 0, 0].set(jnp.nan), 0.5 * x]
    with use_mesh(mesh), autocast(recipe):
        model = build(dtype)
        state = create_train_state(model, tx, key=jax.random.key(0), scaler=scaler, fp8_param=fp8_param)
        step = make_train_step(loss_fn, tx)
        optimizer = Optimizer(model, tx, scaler=scaler, fp8_param=fp8_param)
        for batch in batches:
            loss = train(model, optimizer, batch)
            state, metrics = step(state, batch)
            np.testing.assert_allclose(loss, metrics["loss"], rtol=1e-6)
        assert (int(optimizer.step[...]), int(optimizer.skipped_steps[...])) == (4, 1)
        assert float(optimizer.scaler.scale) == float(state.scaler.scale) == 8.0
        kernels = jax.tree.leaves(nnx.state(model, nnx.Param), is_leaf=_is_quantized)
        assert any(map(_is_quantized, kernels)) == fp8_param
        # Two programs, whose sums XLA may order differently, and Adam's division by small moments.
        bound = 2.0**-20 if dtype == jnp.float32 else 2.0**-7
        for ours, theirs in ((nnx.state(model, QuantizerState), state.quantizers), (optimizer.masters, state.masters)):
            for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                np.testing.assert_allclose(one, other, rtol=2.0**-10, atol=1e-5)
                assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        for one, other in zip(jax.tree.leaves(nnx.state(model, nnx.Param)), jax.tree.leaves(state.params), strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), rtol=bound, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [
        optax.contrib.muon(1e-2, muon_weight_dimension_numbers=muon_dimension_numbers),
        optax.chain(optax.adaptive_grad_clip(0.1), optax.adafactor(1e-2)),
    ],
    ids=["muon", "adaptive clipping"],
)
def test_transformations_that_multiply_and_select_on_explicit_axes(tx):
    """optax writes them for arrays whose type has no sharding."""

    def masters(mode):
        with use_mesh(mode):
            state = create_train_state(lambda rngs: LayerNormMLP(32, 32, rngs=rngs), tx, key=jax.random.key(0))
            for _ in range(2):
                state, _ = make_train_step(loss_fn, tx)(state, X.reshape(4, 4, 32).repeat(2, 1))
            return state.params

    for one, other in zip(*map(jax.tree.leaves, (masters("auto"), masters("explicit"))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)  # Muon's iterations multiply roundings
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, QuantizedKernel)


@pytest.mark.costly
def test_a_step_that_is_not_finite_changes_only_counters_and_scaler():
    with autocast(RECIPE):
        model = build(jnp.bfloat16)
        optimizer = Optimizer(model, optax.adam(1e-2), scaler=DynamicLossScale(initial_scale=8.0, hysteresis=1))
        train(model, optimizer, X.astype(jnp.bfloat16))
        before = jax.tree.map(jnp.copy, (nnx.state(model), optimizer.masters, optimizer.opt_state))
        train(model, optimizer, X.at[0, 0].set(jnp.inf).astype(jnp.bfloat16))
    for old, new in zip(before, (nnx.state(model), optimizer.masters, optimizer.opt_state), strict=True):
        assert_same(new, old)
    assert (int(optimizer.step[...]), int(optimizer.skipped_steps[...]), float(optimizer.scaler.scale)) == (2, 1, 4.0)


NO_PAIRS = {
    "scalar": (lambda loss: loss, r"must return a pair \(loss, aux\) with has_aux=True, got an array"),
    # Two elements, of which the second would pass for auxiliary output.
    "WeightedMean": (lambda loss: WeightedMean(loss, jnp.float32(2.0)), "must return a pair .* got WeightedMean"),
    "three": (lambda loss: (loss, 1, 2), "must return a pair .* got tuple"),
    "loss": (lambda loss: ({"loss": loss}, 1), "must return a scalar array or a WeightedMean, got dict; .* the first"),
}


@pytest.mark.parametrize("kind", NO_PAIRS)
def test_a_result_that_is_no_pair_of_loss_and_aux_is_refused(kind):
    change, match = NO_PAIRS[kind]
    with pytest.raises(TypeError, match=match):
        value_and_grad(lambda model: change(jnp.mean(model(X))), has_aux=True)(build())


def test_several_models_are_differentiated_as_one():
    with pytest.raises(
        TypeError, match=r"argnums must be .*, got \(0, 1\); .* nnx.List\(\[first, second\]\), an nnx.Dict"
    ):
        value_and_grad(lambda first, second: jnp.sum(second(first(X))), argnums=(0, 1))
    # The ways that the message names.
    for new, start, end in (lambda a, b: nnx.List([a, b]), 0, 1), (lambda a, b: nnx.Dict(a=a, b=b), "a", "b"):
        with autocast(RECIPE):
            models = new(*(Linear(32, 32, rngs=nnx.Rngs(seed)) for seed in (0, 1)))
            _, grads = value_and_grad(lambda both, start, end: jnp.sum(both[end](both[start](X))))(models, start, end)
        for name in (start, end):
            assert jnp.any(grads[name]["kernel"][...] != 0.0)
            assert models[name].quantizers["x"]["amax_history"][...].max() > 0.0


@pytest.mark.costly
def test_masters_keep_what_half_precision_would_lose():
    model = build(jnp.bfloat16)
    optimizer = Optimizer(model, optax.sgd(1.0))
    before = jax.tree.map(jnp.copy, optimizer.masters)
    grads = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 2.0**-12), nnx.state(model, nnx.Param))
    for _ in range(4):
        updates = optimizer.update(model, grads)
    for old, new, update in zip(*map(jax.tree.leaves, (before, optimizer.masters, updates)), strict=True):
        assert (update == -(2.0**-12)).all()
        np.testing.assert_allclose(new, old - 2.0**-10, rtol=2.0**-22)


@pytest.mark.costly
def test_flax_own_optimizer_takes_the_gradients():
    # Optax relies on implicit promotion.
    with autocast(RECIPE), jax.numpy_dtype_promotion("standard"):
        model = build()
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer, x):
            loss, grads = value_and_grad(loss_fn)(model, x)
            optimizer.update(model, grads)
            return loss

        losses = [float(step(model, optimizer, X)) for _ in range(3)]
    assert losses[2] < losses[0]
    assert all(jax.tree.leaves(jax.tree.map(lambda leaf: bool(jnp.all(leaf > 0.0)), nnx.state(model, QuantizerState))))


def test_the_optimizer_is_flax_own_to_flax_tools():
    model = build(jnp.bfloat16)
    optimizer = Optimizer(model, optax.adam(1e-2))
    train(model, optimizer, X.astype(jnp.bfloat16))
    assert isinstance(optimizer, nnx.Optimizer)
    other = Optimizer(build(jnp.bfloat16, seed=1), optax.adam(1e-2))
    nnx.update(other, nnx.state(optimizer))
    assert_same(nnx.state(other), nnx.state(optimizer))
    assert int(other.step[...]) == 1


class Shared(nnx.Module):
    """A layer that runs twice, one that never runs, dropout, and a count of calls."""

    def __init__(self, rngs: nnx.Rngs):
        self.twice: Any = Linear(32, 32, rngs=rngs)
        self.never: Any = Linear(32, 32, rngs=rngs)
        self.dropout, self.calls = nnx.Dropout(0.5), nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array, rngs: nnx.Rngs) -> Any:
        self.calls[...] += 1
        inner = 64.0 * self.dropout(self.twice(x), rngs=rngs)
        return self.twice(inner), inner


def test_state_of_the_model_and_of_other_arguments_goes_on():
    def loss(x: jax.Array, model: Shared, *, rngs: nnx.Rngs) -> tuple[WeightedMean, Any]:
        y, inner = model(x, rngs)
        return WeightedMean(jnp.sum(y), jnp.float32(2.0)), (y, inner)

    with autocast(RECIPE):
        model, rngs, plain = Shared(nnx.Rngs(0)), nnx.Rngs(dropout=1), nnx.Rngs(dropout=1)
        expected, _ = nnx.jit(lambda model, rngs: model(X, rngs))(model, plain)
        model.calls[...] = jnp.int32(0)
        run = nnx.jit(lambda model, rngs: value_and_grad(loss, argnums=1, has_aux=True)(X, model, rngs=rngs))
        (value, (y, inner)), grads = run(model, rngs)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(value, jnp.sum(y) / 2.0, rtol=1e-5)
    assert int(model.calls[...]) == 1
    assert int(rngs.dropout.count[...]) == int(plain.dropout.count[...]) == 1
    # The larger one of the two inputs' amaxes, not their sum; and the state of a layer that did not run.
    amax = float(jnp.max(jnp.abs(inner)))
    assert amax > 1.0
    np.testing.assert_allclose(model.twice.quantizers["x"]["amax_history"][0], amax, rtol=1e-6)
    assert float(model.twice.quantizers["x"]["scale"][...]) == 1.0
    assert float(model.never.quantizers["x"]["amax_history"][...].max()) == 0.0
    assert float(model.never.quantizers["x"]["scale"][...]) == 1.0
    assert grads["never"]["kernel"][...].max() == 0.0
    assert set(grads) == {"twice", "never"}


class Seen(nnx.Module):
    """A number of calls, in an object that is no part of the model."""

    def __init__(self) -> None:
        self.count = nnx.Variable(jnp.zeros(()))


@pytest.mark.costly("False")
@pytest.mark.parametrize("jitted", [False, True])
def test_objects_inside_of_arguments_and_bare_variables_go_on(jitted):
    model, rngs, seen, total = nnx.Linear(4, 1, rngs=nnx.Rngs(0)), nnx.Rngs(1), Seen(), nnx.Variable(jnp.zeros(()))

    def loss_fn(model: Any, streams: Any, total: Any, x: jax.Array, *, counters: Any) -> jax.Array:
        total[...] += jnp.sum(x)
        counters[0].count[...] += 1.0
        return jnp.mean(model(x)) + 0.0 * streams["dropout"].normal(())

    call = value_and_grad(loss_fn)
    for _ in range(2):
        (nnx.jit(call) if jitted else call)(model, {"dropout": rngs}, total, jnp.ones((2, 4)), counters=(seen,))
    assert (total[...], seen.count[...], rngs.default.count[...]) == (16.0, 2.0, 2)


def test_a_model_by_keyword_is_refused_with_what_was_given():
    with pytest.raises(TypeError, match=r"given by position.*got 0 arguments by position, and by keyword model"):
        value_and_grad(lambda model: jnp.sum(model(jnp.ones((2, 4)))))(model=nnx.Linear(4, 1, rngs=nnx.Rngs(0)))


def test_adapters_alone():
    with autocast(RECIPE):
        model: Any = LoRA(Linear(32, 32, rngs=nnx.Rngs(0)), 4, rngs=nnx.Rngs(1))
        optimizer = Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)
        before = jax.tree.map(jnp.copy, nnx.state(model))
        _, grads = nnx.jit(value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam)))(model, X)
        optimizer.update(model, grads)
    assert set(grads) == {"lora_a", "lora_b"}
    assert_same(model.base.kernel, before["base"]["kernel"])
    assert float(jnp.max(jnp.abs(model.lora_b[...]))) > 0.0
    assert float(model.base.quantizers["x"]["amax_history"][...].max()) == 1.0


def test_gradients_of_half_precision_kernels_are_not_rounded():
    model = build(jnp.bfloat16)
    _, grads = nnx.jit(value_and_grad(loss_fn))(model, X.astype(jnp.bfloat16))
    kernel = grads["wo_kernel"][...]
    assert kernel.dtype == jnp.float32
    assert (kernel != kernel.astype(jnp.bfloat16).astype(jnp.float32)).any()


def test_what_is_refused():
    for argnums in ((0, 1), -1, True, "model"):
        with pytest.raises(TypeError, match="argnums"):
            value_and_grad(loss_fn, argnums=argnums)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"argument 0 must be the model, .* got ArrayImpl"):
        value_and_grad(loss_fn)(X, X)
    with pytest.raises(TypeError, match=r"argument 2 must be the model, given by position.* got 2 arguments"):
        value_and_grad(loss_fn, argnums=2)(build(), X)
    with pytest.raises(ValueError, match="scalar"):
        value_and_grad(lambda model, x: model(x))(build(), X)
    with autocast(Float8CurrentScaling()), pytest.raises(ValueError, match=r"wi_kernel is stored quantized.*fp8_param"):
        Optimizer(quantize_parameters(build()), optax.sgd(0.1))


def test_next_quantizer_states_among_the_gradients_are_written_back():
    """As of a loop of one's own, which merges them."""
    with autocast(RECIPE):
        model = Two()
        optimizer = Optimizer(model, optax.sgd(0.0))
        optimizer.update(model, jax.tree.map(lambda leaf: jnp.full_like(leaf, 3.0), nnx.state(model)))
    assert {float(leaf.min()) for leaf in jax.tree.leaves(nnx.state(model, QuantizerState))} == {3.0}


@pytest.mark.slow
@pytest.mark.parametrize("scaler", [DynamicLossScale(), ConstantLossScale(scale=8.0)], ids=["dynamic", "constant"])
def test_gradients_without_the_optimizers_loss_scale_are_refused(scaler):
    """Also behind a jit and a tree.map; a refused update changes nothing."""
    model = build(jnp.float16)
    optimizer = Optimizer(model, optax.sgd(1.0), scaler=scaler)
    x = X.astype(jnp.float16)
    before = jax.tree.map(jnp.copy, (nnx.state(model), nnx.state(optimizer)))
    for unscaled in (value_and_grad(loss_fn), nnx.jit(value_and_grad(loss_fn)), nnx.value_and_grad(loss_fn)):
        grads = jax.tree.map(lambda leaf: 0.5 * leaf, unscaled(model, x)[1])
        with pytest.raises(ValueError, match=r"value_and_grad\(loss_fn, scaler=optimizer\.scaler\)"):
            optimizer.update(model, grads)
    assert_same((nnx.state(model), nnx.state(optimizer)), before)
    scaled = nnx.jit(lambda model, x, scaler: value_and_grad(loss_fn, scaler=scaler)(model, x))
    grads = jax.tree.map(lambda leaf: 0.5 * leaf, scaled(model, x, ConstantLossScale(scale=8.0))[1])
    optimizer.update(model, grads)
    optimizer.update(model, nnx.as_pure(grads))
    assert int(optimizer.step[...]) == 2
    assert int(optimizer.skipped_steps[...]) == 0


class _Adapted(nnx.Module):
    """Parameters of two types, with and without axes, and with metadata of their own."""

    def __init__(self):
        self.adapted = LoRA(Linear(32, 32, rngs=nnx.Rngs(0)), 4, rngs=nnx.Rngs(1))
        self.gain = nnx.Param(jnp.ones(32), note="of its own")

    def __call__(self, x):
        return self.gain[...][None] * self.adapted(x)


def test_gradients_with_a_loss_scale_are_in_the_variables_of_those_without():
    """But for the record of the scale, by which `Optimizer` tells them."""

    def described(state, without=()):
        found = {path: (type(variable), variable.get_metadata()) for path, variable in nnx.to_flat_state(state)}
        return {p: (kind, {n: v for n, v in own.items() if n not in without}) for p, (kind, own) in found.items()}

    model, scaler = _Adapted(), ConstantLossScale(scale=8.0)
    params = nnx.state(model, nnx.Param)
    plain, scaled = (value_and_grad(loss_fn, scaler=each)(model, X)[1] for each in (None, scaler))
    assert described(plain) == described(params)
    assert described(scaled, without=["loss_scale"]) == described(params)
    assert all("loss_scale" in own for _, own in described(scaled).values())

    tx = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))
    (grads, values), state = nnx.as_pure((scaled, params)), tx.init(nnx.as_pure(params))
    updates, _ = tx.update(grads, state, values)
    expected, _ = tx.update(plain, tx.init(params), params)
    jax.tree.map(np.testing.assert_array_equal, updates, nnx.as_pure(expected))


def test_a_train_step_with_a_loss_scale_gives_its_optimizer_the_variables_of_one_without():
    seen = []

    def update(grads, state, params=None):
        seen.append((jax.tree.structure(grads), jax.tree.structure(params)))
        return grads, state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    for scaler in (ConstantLossScale(), DynamicLossScale()):
        state = create_train_state(_Adapted(), tx, key=jax.random.key(0), scaler=scaler)
        jax.eval_shape(make_train_step(loss_fn, tx), state, X)
    assert len(seen) == 2
    assert len({structure for both in seen for structure in both}) == 1


@pytest.mark.parametrize("tx", [optax.masked(optax.sgd(0.1), {"other": True}), optax.lookahead(optax.sgd(0.1), 2, 0.5)])
def test_a_refused_optimizer_leaves_the_kernels_as_they_were(tx: Any) -> None:
    """Stored quantized, a kernel's exact value would be gone, and so would the caller's model."""
    with autocast(Float8CurrentScaling()):
        model = build(jnp.bfloat16)
        before = jax.tree.map(jnp.copy, nnx.state(model))
        with pytest.raises(Exception):  # noqa: B017, PT011 - of optax's own kinds
            Optimizer(model, tx, fp8_param=True)
        assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(before)
        for one, other in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(before), strict=True):
            np.testing.assert_array_equal(one, other)
        Optimizer(model, optax.sgd(0.1), fp8_param=True)


class Two(nnx.Module):
    """Two layers with state, of which one derivative may leave out that of the second."""

    def __init__(self):
        self.a, self.b = (Linear(16, 16, rngs=nnx.Rngs(seed)) for seed in range(2))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.b(self.a(x))


@pytest.mark.costly("lack")
@pytest.mark.parametrize("change", ["lack", "have"])
def test_next_states_of_some_layers_alone_are_refused_by_name(change: str) -> None:
    """And a refused update changes nothing."""
    with autocast(RECIPE):
        model = Two()
        optimizer = Optimizer(model, optax.adam(0.1))
        grads = jax.tree.map(jnp.ones_like, nnx.state(model))
        if change == "lack":
            del grads["b"]["quantizers"]
        else:
            del model.b.quantizers["x"]
        before = jax.tree.map(jnp.copy, (nnx.state(model), nnx.state(optimizer)))
        with pytest.raises(ValueError, match=rf"grads {change} the next quantizer states .*b/quantizers/x/scale"):
            optimizer.update(model, grads)
    assert_same((nnx.state(model), nnx.state(optimizer)), before)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Refusing(ConstantLossScale):
    def update(self, finite: jax.Array) -> Any:
        raise RuntimeError("no next scale")


@pytest.mark.costly
def test_an_update_that_fails_late_changes_nothing() -> None:
    model = build(jnp.bfloat16)
    optimizer = Optimizer(model, optax.adam(0.1), scaler=_Refusing())
    grads = nnx.as_pure(value_and_grad(loss_fn)(model, X.astype(jnp.bfloat16))[1])
    before = jax.tree.map(jnp.copy, (nnx.state(model), nnx.state(optimizer)))
    with pytest.raises(RuntimeError, match="no next scale"):
        optimizer.update(model, grads)
    assert_same((nnx.state(model), nnx.state(optimizer)), before)


def _overflowing() -> tuple[nnx.Module, Optimizer, jax.Array]:
    """Return what the first scale overflows for, and smaller ones do not."""
    model = build(jnp.float16)
    scaler = DynamicLossScale(initial_scale=2.0**32, hysteresis=1, backoff_factor=2.0**-8)
    return model, Optimizer(model, optax.sgd(1e-3), scaler=scaler), X.astype(jnp.float16)


@pytest.mark.costly
def test_a_derivative_made_before_the_loop_reads_the_scale_of_each_step() -> None:
    model, optimizer, x = _overflowing()
    differentiate = value_and_grad(loss_fn, scaler=lambda: optimizer.scaler)
    for _ in range(4):
        optimizer.update(model, differentiate(model, x)[1])
    assert 0 < int(optimizer.skipped_steps[...]) < 4
    assert float(optimizer.scaler.scale) < 2.0**32


@pytest.mark.costly
def test_a_loss_scale_that_would_never_change_is_refused() -> None:
    """Taken once, before the loop: outside of a compiled function, as its constant, and in a loop inside of it."""
    model, optimizer, x = _overflowing()
    differentiate = value_and_grad(loss_fn, scaler=optimizer.scaler)
    twice = [differentiate(model, x)[1] for _ in range(2)]  # microbatches of one step
    optimizer.update(model, jax.tree.map(jnp.add, *twice))
    before = jax.tree.map(jnp.copy, nnx.state((model, optimizer)))
    with pytest.raises(ValueError, match=r"another loss scale than the optimizer's present one.*scaler=lambda"):
        optimizer.update(model, differentiate(model, x)[1])
    for hoisted in (differentiate, value_and_grad(loss_fn, scaler=lambda: optimizer.scaler)):
        for compiled in (nnx.jit(hoisted), nnx.jit(lambda model, x: hoisted(model, x))):  # noqa: B023 - called here
            with pytest.raises(
                ValueError, match="DynamicLossScale from outside of the function that is being compiled"
            ):
                compiled(model, x)
    assert_same(nnx.state((model, optimizer)), before)

    @nnx.jit
    def steps(model: Any, optimizer: Any, x: jax.Array) -> None:
        frozen = value_and_grad(loss_fn, scaler=optimizer.scaler)
        graphdef, state = nnx.split((model, optimizer))

        def body(state: Any, _: None) -> tuple[Any, None]:
            model, optimizer = nnx.merge(graphdef, state)
            optimizer.update(model, frozen(model, x)[1])
            return nnx.state((model, optimizer)), None

        jax.lax.scan(body, state, None, length=2)

    with pytest.raises(ValueError, match="another loss scale than the optimizer's present one"):
        steps(model, optimizer, x)


def test_a_scale_of_the_same_value_in_another_array_is_accepted() -> None:
    model = build()
    optimizer = Optimizer(model, optax.sgd(1e-3), scaler=DynamicLossScale())
    scaler = optimizer.scaler
    _, grads = value_and_grad(loss_fn, scaler=scaler)(model, X)
    nnx.jit(lambda optimizer: optimizer.step + 1)(optimizer)
    assert optimizer.scaler.scale is not scaler.scale  # written back as a new array
    optimizer.update(model, grads)
    assert int(optimizer.step[...]) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda grads: pickle.loads(pickle.dumps(grads))])
def test_scaled_gradients_are_copied_and_pickled(copied: Any) -> None:
    model = build()
    optimizer = Optimizer(model, optax.sgd(1e-3), scaler=DynamicLossScale())
    grads = value_and_grad(loss_fn, scaler=optimizer.scaler)(model, X)[1]
    again = copied(grads)
    assert_same(nnx.as_pure(again), nnx.as_pure(grads))
    optimizer.update(model, again)


def test_a_constant_scale_under_vmap_and_scan() -> None:
    """Eager vmap runs at once, with the present scale; JAX keeps the body of a scan, with an old one, for later."""
    model = Linear(16, 16, rngs=nnx.Rngs(0))
    scaler, (graphdef, state) = DynamicLossScale(), nnx.split(model)
    x = jnp.ones((16, 16))

    def gradient(state: Any, scaler: Any) -> Any:
        return nnx.as_pure(value_and_grad(loss_fn, scaler=scaler)(nnx.merge(graphdef, state), x)[1])

    def closed(state: Any) -> Any:
        return gradient(state, scaler)

    models = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    expected = closed(state)["kernel"]
    found = jax.vmap(closed)(models)["kernel"]
    np.testing.assert_allclose(found, jnp.stack([expected] * 2), rtol=1e-5, atol=1e-7)  # sums in another order
    with pytest.raises(ValueError, match="function that is being compiled"):
        jax.jit(jax.vmap(closed))(models)
    with pytest.raises(ValueError, match=r"jax.lax.scan.*into the carry"):
        jax.lax.scan(lambda state, _: (state, closed(state)), state, None, length=1)
    carry = (state, scaler)
    _, carried = jax.lax.scan(lambda carry, _: (carry, gradient(*carry)), carry, None, length=1)
    np.testing.assert_allclose(carried["kernel"][0], expected, rtol=1e-5, atol=1e-7)


def test_a_function_that_returns_no_scaler_is_refused() -> None:
    with pytest.raises(TypeError, match=r"scaler must be a LossScale or a function that returns one.*None"):
        value_and_grad(loss_fn, scaler=lambda: None)(build(), X)  # type: ignore[arg-type, return-value]


@pytest.mark.costly("Variable")
@pytest.mark.parametrize("wrt", [nnx.Variable, nnx.Any(nnx.Param, QuantizerState)])
def test_a_filter_of_states_outside_of_gradients_is_refused(wrt: Any) -> None:
    """Their "gradients" are next values and counts, which a transformation would subtract."""
    with autocast(RECIPE):
        layer = build()
    router = Router(16, RouterOptions(num_experts=4), rngs=nnx.Rngs(0))
    for model, state in ((layer, "quantizers_1/x/scale"), (router, "last_step")):
        with pytest.raises(ValueError, match=rf"wrt selects .*{state}.*nnx\.Not\(QuantizerState\)"):
            Optimizer(model, optax.sgd(0.1), wrt=wrt)
        others = Optimizer(model, optax.sgd(0.1), wrt=nnx.All(wrt, nnx.Not(QuantizerState)))
        _, grads = nnx.value_and_grad(lambda model: sum(map(jnp.sum, jax.tree.leaves(nnx.state(model, nnx.Param)))))(
            model
        )
        assert jax.tree.structure(others.update(model, grads)) == jax.tree.structure(nnx.as_pure(grads))


def test_gradients_of_other_paths_are_refused_by_name() -> None:
    model = build()
    optimizer, grads = Optimizer(model, optax.sgd(0.1)), nnx.state(model, nnx.Param)
    given, moved = dict(grads), dict(grads)
    del given["wo_bias"]
    moved["elsewhere"] = moved.pop("wo_bias")
    for wrong, message in (
        (nnx.State(given), "lack wo_bias"),
        (nnx.State(moved), "lack wo_bias and have besides elsewhere"),
        (dict(nnx.as_pure(grads)), "in an nnx.State, and are in dict"),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.update(model, wrong)
