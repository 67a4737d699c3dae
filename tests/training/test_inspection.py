"""Statistics of quantized tensors: against NumPy, on meshes, and without a trace in the training they look at."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.cli.module_recipes import layer_recipes
from jax_te.config import TransformerConfig
from jax_te.layers import (
    DotProductAttention,
    Linear,
    MultiheadAttention,
    keep_in_high_precision,
    prepare_quantization,
    quantize_parameters,
)
from jax_te.models import GPTModel
from jax_te.quantize import STATISTICS, QuantizerState, attention_precision_of
from jax_te.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    ModuleRecipe,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    autocast,
)
from jax_te.training import (
    DynamicLossScale,
    TensorStatistics,
    calibrate_delayed_scaling,
    create_train_state,
    exact_model,
    inspect_precision,
    make_inspection,
    make_train_step,
    value_and_grad,
)
from tests.support.meshes import use_mesh
from tests.support.numerics import draw
from tests.support.toy import assert_same

SIZES = {"hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 2, "ffn_hidden_size": 64}
LIMITS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}


def gpt(rngs, num_layers=1, **changes):
    config = TransformerConfig(num_layers=num_layers, **SIZES, **changes)
    return GPTModel(config, vocab_size=64, max_sequence_length=16, rngs=rngs)


def gpt_loss(model, batch, key):
    return model.loss(batch["tokens"], batch["labels"], dropout_key=key)


def gpt_batch(size=8):
    tokens = np.random.default_rng(0).integers(0, 64, (size, 17)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}


class Pair(nnx.Module):
    """Two layers with an activation between them."""

    def __init__(self, rngs):
        self.layers = nnx.List([Linear(32, 64, rngs=rngs), Linear(64, 32, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](jax.nn.gelu(self.layers[0](x)))


def pair_loss(model, batch, key):
    noise = jax.random.normal(key, batch.shape)  # as dropout would, it depends on the step and the microbatch
    return jnp.mean(jnp.square(model(batch + noise) - batch))


def linear_loss(model, batch, key):
    """Its gradient with respect to the layer's output is ``batch["dy"]``."""
    return jnp.vdot(model(batch["x"]), batch["dy"])


def linear_batch():
    x = np.asarray(draw("x", (32, 64))).copy()
    x[3, 5] = 300.0  # so that small values underflow
    x[:, 7] *= 1e-4
    return {"x": jnp.asarray(x), "dy": draw("dy", (32, 48), scale=1e-6)}


def in_numpy(x, name, scale=None):
    """The statistics of a per-tensor quantization, computed another way."""
    kind, limit = LIMITS[name]
    x = np.asarray(x, np.float64)
    scale = float(np.float32(limit) / np.float32(np.abs(x).max())) if scale is None else scale
    values = np.clip(x * scale, -limit, limit).astype(np.float32).astype(kind).astype(np.float64) / scale
    return {
        "amax": np.abs(x).max(),
        "scale": scale,
        "underflow": ((values == 0) & (x != 0)).sum() / (x != 0).sum(),
        "saturation": (np.abs(x) > limit / scale * (1 + 1e-6)).mean(),
        "mse": ((values - x) ** 2).mean(),
        "relative_mse": ((values - x) ** 2).mean() / (x**2).mean(),
    }


def assert_statistics(tensor, expected):
    for name in STATISTICS:
        assert getattr(tensor, name) == pytest.approx(expected[name], rel=1e-4, abs=1e-30), (tensor, name)


def test_statistics_are_those_that_numpy_computes():
    batch = linear_batch()
    with autocast(Float8CurrentScaling()):
        model = Linear(64, 48, bias=False, rngs=nnx.Rngs(0))
        found = {tensor.role: tensor for tensor in inspect_precision(model, linear_loss, batch)}
    tensors = {"x": (batch["x"], "e4m3"), "kernel": (model.kernel[...], "e4m3"), "grad": (batch["dy"], "e5m2")}
    assert list(found) == list(tensors)
    for role, (array, name) in tensors.items():
        assert found[role].format == name
        assert_statistics(found[role], in_numpy(array, name))
    assert found["x"].underflow > 0.0
    assert found["x"].error_db == pytest.approx(10 * np.log10(found["x"].relative_mse))


@pytest.mark.costly
def test_a_scale_from_smaller_amaxes_saturates():
    batch, recipe = linear_batch(), DelayedScaling(amax_history_len=2)
    with autocast(recipe):
        model = Linear(64, 48, bias=False, rngs=nnx.Rngs(0))
        calibrate_delayed_scaling(model, linear_loss, batch, recipe)
        history = model.quantizers["x"]["amax_history"]
        history.set_value(history.get_value().at[0].set(1.5))
        x, kernel, grad = inspect_precision(model, linear_loss, batch)
    expected = in_numpy(batch["x"], "e4m3", scale=448.0 / 1.5)
    assert 0.05 < expected["saturation"] < 0.2
    assert_statistics(x, expected)
    for tensor, array, name in ((kernel, model.kernel[...], "e4m3"), (grad, batch["dy"], "e5m2")):
        assert_statistics(tensor, in_numpy(array, name))  # as if scaled by itself: that is what calibration is for


@pytest.mark.slow  # NVFP4 is in tests/cli/test_inspect.py, too
@pytest.mark.parametrize(
    ("recipe", "name"), [(MXFP8BlockScaling(), "e4m3"), (NVFP4BlockScaling(), "e2m1")], ids=["mxfp8", "nvfp4"]
)
def test_block_recipes_and_both_kernels_of_a_layer(recipe, name):
    with autocast(recipe):
        found = inspect_precision(gpt(nnx.Rngs(0)), gpt_loss, gpt_batch())
    modules = ["layernorm_mlp.wi_kernel", "layernorm_mlp.wo_kernel", "self_attention.proj", "self_attention.qkv"]
    modules = [f"layers.0.{module}" for module in modules]
    assert [(t.module, t.role) for t in found] == [(m, r) for m in modules for r in ("x", "kernel", "grad")]
    low, high = {"e4m3": (-36.0, -26.0), "e2m1": (-24.0, -14.0)}[name]
    for tensor in found:
        assert tensor.format == name
        assert low < tensor.error_db < high
        assert 0.0 < tensor.scale < 1e30


@pytest.mark.slow
def test_only_what_is_quantized_is_listed():
    with autocast(Float8CurrentScaling()):
        model = gpt(nnx.Rngs(0), num_layers=2)
        keep_in_high_precision(model.layers[0])
        model.layers[1].layernorm_mlp.module_recipe = ModuleRecipe(training=MXFP8BlockScaling())
        model.layers[1].self_attention.proj.module_recipe = ModuleRecipe(training=None)
        found = inspect_precision(model, gpt_loss, gpt_batch())
        names = ("layernorm_mlp.wi_kernel", "layernorm_mlp.wo_kernel", "self_attention.qkv")
        assert {t.module for t in found} == {f"layers.1.{name}" for name in names}
        assert {t.format for t in found if "mlp" in t.module and t.role == "grad"} == {"e4m3"}
        whys = {layer.module: (layer.training, layer.why) for layer in layer_recipes(model)}
    assert whys["layers.0.self_attention.qkv"] == (None, "kept in high precision, as a first or last layer")
    assert whys["layers.1.layernorm_mlp"] == (MXFP8BlockScaling(), "its own rule")
    assert whys["layers.1.self_attention.qkv"] == (Float8CurrentScaling(), "the ambient recipe")


def test_rules_that_do_not_act_are_explained():
    layer = Linear(16, 16, rngs=nnx.Rngs(0))
    layer.module_recipe = ModuleRecipe(training=Float8CurrentScaling(), evaluation=None)
    assert layer_recipes(layer)[0].why == (
        "no ambient recipe; its own rule does not act where nothing else is quantized"
    )
    layer.high_precision = True
    with autocast(MXFP8BlockScaling()):
        assert layer_recipes(layer)[0].training is None
        assert layer_recipes(layer)[0].why.startswith("kept in high precision, as a first or last layer; its own rule")
        layer.high_precision = False
        found = layer_recipes(layer)[0]
    assert (found.training, found.evaluation, found.why) == (Float8CurrentScaling(), None, "its own rule")


def test_a_model_that_quantizes_nothing_or_cannot_be_compared_is_refused():
    batch, layer = linear_batch(), Linear(64, 48, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"nothing was quantized; call it inside `with autocast"):
        inspect_precision(layer, linear_loss, batch)
    with autocast(Float8CurrentScaling()), pytest.raises(ValueError, match=r"exact values are gone.*exact_model"):
        inspect_precision(quantize_parameters(layer), linear_loss, batch)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": np.zeros((4, 8)), "y": np.zeros((2, 8))}, "same leading axis"),
        ({"x": np.zeros((4, 8)), "y": np.float32(1.0)}, "same leading axis"),
        ({"x": np.zeros((5, 8))}, "batch size 5 does not divide into microbatches=2"),
    ],
    ids=["two sizes", "scalar", "odd"],
)
def test_batches_that_the_step_refuses_are_refused(batch, message):
    look = make_inspection(pair_loss, microbatches=2)
    with autocast(Float8CurrentScaling()):
        state = create_train_state(Pair, optax.sgd(0.1), key=jax.random.key(0))
        with pytest.raises(ValueError, match=message):
            look(state, batch)


def steps(count, recipe, inspect):
    """Run some steps, inspecting each or none; the last state and what was seen."""
    tx, seen, batch = optax.adam(1e-2), [], draw("batch", (64, 32))
    look = make_inspection(pair_loss, microbatches=2)
    with autocast(recipe):
        state = create_train_state(Pair, tx, key=jax.random.key(0))
        step = make_train_step(pair_loss, tx, microbatches=2)
        for _ in range(count):
            if inspect:
                seen.append(look(state, batch))
            state, metrics = step(state, batch)
    return state, metrics, seen


@pytest.mark.slow
@pytest.mark.wide("delayed")
@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=4), NVFP4BlockScaling()], ids=["delayed", "nvfp4"])
def test_looking_changes_nothing(recipe):
    plain, metrics, _ = steps(3, recipe, inspect=False)
    watched, same_metrics, seen = steps(3, recipe, inspect=True)
    assert_same(plain, watched)
    assert_same(metrics, same_metrics)
    assert [len(found) for found in seen] == [6, 6, 6]
    assert seen[0] != seen[2]


@pytest.mark.costly
def test_the_scales_are_those_of_the_step():
    """Delayed scaling: what was inspected is what the next state has recorded."""
    recipe = DelayedScaling(amax_history_len=4)
    state, _, seen = steps(2, recipe, inspect=True)
    assert len(seen[-1]) == 6
    for tensor in seen[-1]:
        known = nnx.as_pure(state.model.layers[int(tensor.module[-1])].quantizers)[tensor.role]
        assert tensor.scale == float(known["scale"])
        assert tensor.amax == float(known["amax_history"][0])


@pytest.mark.costly
def test_microbatches_begin_with_the_state_that_the_one_before_leaves():
    """Delayed scaling again, of a layer behind a dropout, whose mask depends on a count in the model's other state."""
    recipe, tx, batch = DelayedScaling(amax_history_len=4), optax.sgd(0.1), draw("batch", (16, 32))

    class Dropped(nnx.Module):
        def __init__(self, rngs):
            self.drop, self.linear = nnx.Dropout(0.7, rngs=rngs), Linear(32, 16, rngs=rngs)

        def __call__(self, x):
            return self.linear(self.drop(x))

    def loss_fn(model, batch, key):
        return jnp.mean(model(batch) ** 2)

    with autocast(recipe):
        state = create_train_state(Dropped, tx, key=jax.random.key(0))
        seen = make_inspection(loss_fn, microbatches=4)(state, batch)
        state, _ = make_train_step(loss_fn, tx, microbatches=4)(state, batch)
    for tensor in seen:
        assert tensor.amax == float(state.model.linear.quantizers[tensor.role]["amax_history"][0])


@pytest.mark.slow
def test_loss_scale_and_quantized_parameters():
    look, found = make_inspection(pair_loss, microbatches=2), []
    with autocast(Float8CurrentScaling()):
        for options in ({}, {"scaler": DynamicLossScale(initial_scale=64.0)}, {"fp8_param": True}):
            state = create_train_state(Pair, optax.adam(1e-2), key=jax.random.key(0), **options)
            found.append(look(state, draw("batch", (64, 32))))
    plain, scaled, held = found
    assert held == plain  # kernels are looked at as their masters
    for one, other in zip(plain, scaled, strict=True):
        factor = 64.0 if one.role == "grad" else 1.0
        assert other.amax == pytest.approx(factor * one.amax, rel=1e-6)
    assert exact_model(state).layers[0].kernel[...].dtype == jnp.float32


@pytest.mark.slow
def test_recompute_changes_nothing():
    with autocast(Float8CurrentScaling()):
        plain = inspect_precision(gpt(nnx.Rngs(0)), gpt_loss, gpt_batch())
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        again = inspect_precision(gpt(nnx.Rngs(0), **full), gpt_loss, gpt_batch())
    for one, other in zip(plain, again, strict=True):
        assert (one.module, one.role) == (other.module, other.role)
        assert other.relative_mse == pytest.approx(one.relative_mse, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("auto", marks=pytest.mark.slow), "explicit"])
def test_on_meshes(mode):
    look, found = make_inspection(gpt_loss), []
    for place in ("no mesh", mode):
        with use_mesh(place), autocast(Float8CurrentScaling()):
            state = create_train_state(gpt, optax.sgd(0.1), key=jax.random.key(0))
            found.append(look(state, gpt_batch()))
    assert len(found[0]) == 12
    for one, other in zip(*found, strict=True):
        assert (one.module, one.role) == (other.module, other.role)
        for name in ("amax", "scale", "relative_mse"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=0.02)


def test_calibration_takes_states_away_where_there_are_none():
    model = prepare_quantization(Linear(64, 48, rngs=nnx.Rngs(0)), DelayedScaling())
    calibrate_delayed_scaling(model, linear_loss, linear_batch(), Float8CurrentScaling())
    assert model.quantizers is None


def test_decibels():
    values = dict.fromkeys(STATISTICS, 0.0)
    exact = TensorStatistics(module="proj", role="x", format="e4m3", **values)
    assert exact.error_db == -np.inf
    assert np.isnan(TensorStatistics(module="", role="x", format="e4m3", **values | {"relative_mse": np.nan}).error_db)


def test_a_layer_that_the_loss_leaves_out_is_calibrated_to_nothing():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.used, self.unused = Linear(32, 16, rngs=rngs), Linear(32, 16, rngs=rngs)

        def __call__(self, x):
            return self.used(x)

    recipe = DelayedScaling(amax_history_len=2)
    model = Two(nnx.Rngs(0))
    calibrate_delayed_scaling(model, lambda model, x, key: jnp.mean(model(x) ** 2), jnp.ones((16, 32)), recipe)
    assert model.used.quantizers["x"]["amax_history"].get_value().tolist() == [1.0, 0.0]
    assert model.unused.quantizers["x"]["amax_history"].get_value().tolist() == [0.0, 0.0]


class Core(nnx.Module):
    """The core of attention alone, on one array."""

    def __init__(self, rngs):
        self.core_attention = DotProductAttention(2, 128)

    def __call__(self, x):
        return self.core_attention(*3 * [x.reshape(2, 128, 2, 128)]).reshape(x.shape)


def projected(rngs):
    return MultiheadAttention(256, 2, attention_dropout=0.0, rngs=rngs)


@pytest.mark.costly
@pytest.mark.wide("delayed")
@pytest.mark.parametrize(
    ("recipe", "build", "mode"),
    [
        (DelayedScaling(amax_history_len=2, fp8_dpa=True), Core, "no mesh"),
        (Float8CurrentScaling(fp8_dpa=True), Core, "no mesh"),
        (DelayedScaling(amax_history_len=2, fp8_dpa=True), projected, "no mesh"),
        (DelayedScaling(amax_history_len=2, fp8_dpa=True), projected, "auto"),
    ],
    ids=["delayed", "current", "projected", "mesh"],
)
def test_attention_is_calibrated_to_what_steps_on_the_batch_arrive_at(recipe, build, mode):
    """Gradients here are so small that under the scale of an empty history all are 0."""

    def loss_fn(model, x, key=None):
        return 1e-3 * jnp.mean(jnp.square(model(x) - x))

    @nnx.jit
    def advance(model, x):
        value_and_grad(loss_fn)(model, x)

    def amaxes(model):
        flat = nnx.to_flat_state(nnx.state(model, QuantizerState))
        return {path: np.asarray(state[...])[0] for path, state in flat if path[-1] == "amax_history"}

    x = draw("x", (2, 128, 256))
    with use_mesh(mode), autocast(recipe):
        model = build(nnx.Rngs(0))
        calibrate_delayed_scaling(model, loss_fn, x, recipe)
        calibrated = amaxes(model)
        for _ in range(5):  # one for each tensor whose scale others depend on: o, do, dp, dq and the projections'
            advance(model, x)
    attention = {path: amax for path, amax in amaxes(model).items() if path[0] == "core_attention"}
    assert {path[2] for path in attention} == set(attention_precision_of(recipe).roles)
    for path, amax in attention.items():
        assert 0.0 < amax < 10.0
        # The projections' operands were rounded under other scales: by 2^-4 of a value each.
        assert calibrated[path] == pytest.approx(amax, rel=2.0**-3), path


def test_all_masters_are_those_of_half_precision_parameters_too():
    tx = optax.sgd(1e-4)
    made = lambda rngs: Linear(16, 16, params_dtype=jnp.bfloat16, rngs=rngs)  # noqa: E731
    state = create_train_state(made, tx, key=jax.random.key(0))
    state, _ = make_train_step(lambda model, x, key: jnp.mean(model(x)).astype(jnp.float32), tx)(
        state, jnp.ones((8, 16))
    )
    kernel = exact_model(state, all_masters=True).kernel[...]
    assert_same(kernel, state.masters["kernel"][...])
    assert_same(exact_model(state).kernel[...], kernel.astype(jnp.bfloat16))


def test_a_calibration_is_for_the_scaled_loss():
    def amax(loss_scale):
        recipe, x = DelayedScaling(amax_history_len=2), jnp.ones((16, 16))
        model = Linear(16, 16, rngs=nnx.Rngs(0))
        calibrate_delayed_scaling(model, lambda model, x, key: jnp.mean(model(x)), x, recipe, loss_scale=loss_scale)
        return float(model.quantizers["grad"]["amax_history"][0])

    assert amax(0.25) == 0.25 * amax(1.0)
