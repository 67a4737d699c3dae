"""A small GPT trains to one device's losses and parameters through the stages of a pipeline."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning

from jax_te.config import ParallelConfig, PipelineConfig, TransformerConfig
from jax_te.layers import Linear, LoRA, TransformerLayer, lora_labels
from jax_te.models import BertModel, GPTModel, MegatronGPTModel, StackInput, StackOptions, T5Model, run_layers
from jax_te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    autocast,
)
from jax_te.sharding import make_mesh
from jax_te.training import (
    DynamicLossScale,
    PipelinedLoss,
    WeightedMean,
    abstract_train_state,
    create_train_state,
    make_train_step,
)

STEPS, BATCH, SEQUENCE, VOCAB = 2, 16, 16, 64
SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 64,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
RECIPES = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=4),
    # Whole amaxes: the default's are of shards, whose scales depend on the mesh.
    "current": Float8CurrentScaling(amax_scope="whole"),
    "float8_block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    # To nearest: random bits follow from the gradients, and are others where these differ in their last bits.
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}
# fp32: sums in another order, 2^-24 each, of 256 losses; 2e-6 leaves room for ten such roundings. Quantized: a value
# that lies between two of FP8's or FP4's may round to the other one after such a difference, and each such step changes
# what comes behind by 2^-4 (2^-2) of one of thousands of summands. Another dropout mask changes losses by 1e-3.
TOLERANCES = {"none": 2e-6, "delayed": 1e-4, "current": 1e-4, "float8_block": 1e-4, "mxfp8": 1e-4, "nvfp4": 5e-4}

Options = dict[str, Any]


def before(model: Any, batch: Any, key: Any) -> StackInput:
    return model.embed_inputs(batch[:, :-1], dropout_key=key)


def after(model: Any, y: Any, batch: Any, key: Any) -> Any:
    return model.compute_loss(y, batch[:, 1:])


next_token_loss = PipelinedLoss(before, after)


def train(
    mesh: str | None,
    pipeline: str = "1f1b",
    *,
    recipe: str = "none",
    axis_type: Any = "auto",
    build: Any = None,
    loss_fn: Any = next_token_loss,
    tx: Any = None,
    microbatches: int = 4,
    state_options: Options | None = None,
    step_options: Options | None = None,
) -> tuple[np.ndarray, Any]:
    """Losses and gradient norms of the first steps, and the state behind them."""
    starts = jax.random.randint(jax.random.key(1), (STEPS, BATCH, 1), 0, VOCAB)
    tokens = np.asarray((starts + 3 * jnp.arange(SEQUENCE + 1)[None, None]) % VOCAB)
    tx = optax.adamw(5e-3) if tx is None else tx
    sizes = None if mesh is None else ParallelConfig.parse(mesh)
    place = contextlib.nullcontext() if sizes is None else jax.set_mesh(make_mesh(sizes, axis_type=axis_type))
    with place, autocast(RECIPES[recipe]):
        state = create_train_state(build or gpt(), tx, key=jax.random.key(0), **(state_options or {}))
        step = make_train_step(
            loss_fn, tx, microbatches=microbatches, pipeline=PipelineConfig.parse(pipeline), **(step_options or {})
        )
        found = []
        for batch in tokens:
            state, metrics = step(state, batch)
            found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return np.array(found), state


def gpt(**changes: Any) -> Any:
    config: Any = TransformerConfig(**SIZES | changes)
    return lambda rngs: GPTModel(config, vocab_size=VOCAB, max_sequence_length=SEQUENCE, rngs=rngs)


@functools.cache
def one_device(recipe: str, num_layers: int = 4) -> tuple[np.ndarray, Any]:
    return train(None, recipe=recipe, build=gpt(num_layers=num_layers))


def assert_same(found: tuple[np.ndarray, Any], expected: tuple[np.ndarray, Any], tolerance: float) -> None:
    np.testing.assert_allclose(found[0][:, 0], expected[0][:, 0], rtol=tolerance)
    # A norm is a sum of squares of values that each are off by more than their mean is.
    np.testing.assert_allclose(found[0][:, 1], expected[0][:, 1], rtol=100 * tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "pipeline", "recipe"),
    [
        ("pipeline=2", "gpipe", "none"),
        ("pipeline=2,fsdp=2,tensor=2", "1f1b", "delayed"),
        ("pipeline=2,data=2", "zero_bubble", "current"),
    ],
)
def test_schedules_train_to_one_devices_losses(mesh, pipeline, recipe):
    found = train(mesh, pipeline, recipe=recipe, build=gpt(num_layers=2))
    assert_same(found, one_device(recipe, 2), TOLERANCES[recipe])


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize(
    ("others", "pipeline"),
    [
        (others, pipeline)
        for others in ("", ",data=2", ",fsdp=2", ",tensor=2", ",context=2", ",data=2,tensor=2", ",fsdp=2,tensor=2")
        for pipeline in ("gpipe", "1f1b", "zero_bubble")
        # Refused, see test_what_cannot_be_split.
        if pipeline != "zero_bubble" or not ("tensor" in others or "context" in others)
    ],
)
def test_schedules_on_every_mesh(others, pipeline, axis_type):
    found = train(f"pipeline=2{others}", pipeline, axis_type=axis_type)
    assert_same(found, one_device("none"), TOLERANCES["none"])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "none"])
@pytest.mark.parametrize(
    "mesh", ["pipeline=4", "pipeline=2,data=2", "pipeline=2,fsdp=2,tensor=2", "pipeline=2,context=2"]
)
def test_recipes(mesh, recipe):
    assert_same(train(mesh, recipe=recipe), one_device(recipe), TOLERANCES[recipe])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pipeline=4", "pipeline=4,data=2", "pipeline=4,fsdp=2"])
def test_four_stages(mesh):
    assert_same(train(mesh, "zero_bubble"), one_device("none"), TOLERANCES["none"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "pipeline", ["zero_bubble,first_layers=2", "1f1b,virtual_stages=2", "1f1b,last_layers=1", "gpipe"]
)
def test_chunks_of_different_sizes_and_virtual_stages(pipeline):
    found = train("pipeline=2,fsdp=2", pipeline, build=gpt(num_layers=5))
    assert_same(found, one_device("none", 5), TOLERANCES["none"])


@pytest.mark.slow
def test_next_quantizer_states_are_those_of_one_device():
    (_, one), (_, staged) = one_device("delayed"), train("pipeline=2,data=2", recipe="delayed")
    scales = jax.tree.leaves(one.quantizers)
    assert scales
    for expected, found in zip(scales, jax.tree.leaves(staged.quantizers), strict=True):
        # An amax of fp32 values in another order of sums; a scale is a quotient of one.
        np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["1f1b", "zero_bubble"])
def test_parameters_in_half_precision_and_stored_quantized(pipeline):
    half = gpt(params_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    given: Options = {"recipe": "delayed", "build": half}
    # bf16: 2^-8 in each activation.
    cases: list[Options] = [{}, {"state_options": {"fp8_param": True}}, {"step_options": {"keep_kernels": False}}]
    for options in cases:
        expected, found = train(None, **given, **options), train("pipeline=2", pipeline, **given, **options)
        assert_same(found, expected, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "pipeline", "axis_type"),
    [
        ("pipeline=2", "1f1b", "auto"),
        ("pipeline=2", "zero_bubble", "auto"),
        ("pipeline=2,data=2", "1f1b", "explicit"),
    ],
)
def test_scaled_losses(mesh, pipeline, axis_type):
    fp16: Options = {
        "build": gpt(num_layers=2, params_dtype=jnp.float16, compute_dtype=jnp.float16),
        "state_options": {"scaler": DynamicLossScale(initial_scale=2.0**30)},
    }
    one, staged = train(None, **fp16)[1], train(mesh, pipeline, axis_type=axis_type, **fp16)[1]
    assert int(staged.skipped_steps) == int(one.skipped_steps) > 0
    assert float(staged.scaler.scale) == float(one.scaler.scale)


def after_weighted(model: Any, y: Any, batch: Any, key: Any) -> WeightedMean:
    weights = (batch[:, :1] % 3).astype(jnp.float32) + jnp.zeros(batch[:, 1:].shape)
    return WeightedMean(model.compute_loss(y, batch[:, 1:], weights, reduction="sum"), jnp.sum(weights))


weighted = PipelinedLoss(before, after_weighted)


@pytest.mark.slow
def test_weighted_means():
    expected = train(None, loss_fn=weighted)
    assert_same(train("pipeline=2", loss_fn=weighted), expected, TOLERANCES["none"])


@pytest.mark.slow
def test_megatrons_modules_recomputation_and_adapters():
    def megatron(rngs: nnx.Rngs) -> MegatronGPTModel:
        config = TransformerConfig(
            **SIZES, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        )
        return MegatronGPTModel(config, None, VOCAB, SEQUENCE, position_embedding_type="rope", rngs=rngs)

    assert_same(train("pipeline=2", build=megatron), train(None, build=megatron), TOLERANCES["none"])

    def adapted(rngs: nnx.Rngs) -> GPTModel:
        model = gpt()(rngs)
        for layer in model.layers:
            layer.self_attention.qkv = LoRA(layer.self_attention.qkv, 2, rngs=rngs)
        return model

    tx = optax.multi_transform({"lora": optax.adamw(1e-2), "frozen": optax.set_to_zero()}, lora_labels)
    given: Options = {"build": adapted, "tx": tx}
    assert_same(train("pipeline=2", **given), train(None, **given), TOLERANCES["none"])


class Own(nnx.Module):
    """A layer that reads its kernel beside the op, and calls it in a loop."""

    def __init__(self, rngs: nnx.Rngs):
        self.inner = Linear(16, 16, rngs=rngs)

    def __call__(self, x: Any, dropout_key: Any = None) -> Any:
        x, _ = jax.lax.scan(lambda x, _: (x + jnp.tanh(self.inner(x)), None), x, length=2)
        return x + x @ self.inner.kernel[...]


@custom_partitioning
def doubled(x: Array) -> Array:
    return 2 * x


doubled.def_partition(
    partition=lambda mesh, args, result: (mesh, lambda x: 2 * x, result.sharding, (args[0].sharding,)),
    sharding_rule="... -> ...",
)


class Partitioned(Own):
    """A layer with an op that has a partitioning of its own, as the kernels of Transformer Engine have."""

    def __call__(self, x: Any, dropout_key: Any = None) -> Any:
        y: Any = self.inner(x)
        return y + doubled(jax.lax.stop_gradient(y))


class Tied(Own):
    """A layer that calls its linear layer once, and reads its kernel otherwise."""

    def __call__(self, x: Any, dropout_key: Any = None) -> Any:
        return jnp.tanh(x + self.inner(x) + x @ self.inner.kernel[...].T)


class Looped(Own):
    """A layer that calls its linear layer in a loop."""

    def __call__(self, x: Any, dropout_key: Any = None) -> Any:
        return jax.lax.scan(lambda x, _: (x + jnp.tanh(self.inner(x)), None), x, length=2)[0]


class Layers(nnx.Module):
    def __init__(self, layer: type[Own], rngs: nnx.Rngs):
        self.layers = nnx.List([layer(rngs) for _ in range(2)])

    def __call__(self, x: Any) -> Any:
        return run_layers(self.layers, x, [None, None])


mean_square = PipelinedLoss(lambda model, x, key: StackInput(x, [None, None]), lambda model, y, x, key: jnp.mean(y**2))


def first_step(layer: type[Own], mesh: ParallelConfig | None, schedule: Any = "1f1b") -> list[float]:
    tx, x = optax.sgd(0.1), jax.random.normal(jax.random.key(1), (4, 2, 16))
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(make_mesh(mesh)):
        state = create_train_state(functools.partial(Layers, layer), tx, key=jax.random.key(0))
        step = make_train_step(mean_square, tx, microbatches=2, pipeline=PipelineConfig(schedule=schedule))
        _, metrics = step(state, x)
    return [float(metrics["loss"]), float(metrics["grad_norm"])]


@pytest.mark.costly("Partitioned-1f1b", slow=("Looped-zero_bubble", "Own-1f1b"))
@pytest.mark.parametrize(
    ("layer", "schedule"),
    [(Own, "1f1b"), (Partitioned, "1f1b"), (Tied, "zero_bubble"), (Looped, "zero_bubble")],
)
def test_layers_of_ones_own_do_what_they_do_without_a_pipeline(layer, schedule):
    found = first_step(layer, ParallelConfig(pipeline=2), schedule)
    np.testing.assert_allclose(found, first_step(layer, None), rtol=TOLERANCES["none"])


@pytest.mark.slow
def test_memory_is_that_of_the_microbatches_in_flight():
    def temporary(schedule: str, microbatches: int) -> int:
        tx, config = optax.sgd(1e-2), PipelineConfig(schedule=schedule)
        batch = jax.ShapeDtypeStruct((microbatches, SEQUENCE + 1), jnp.int32)
        with jax.set_mesh(make_mesh(ParallelConfig(pipeline=2))):
            step: Any = make_train_step(next_token_loss, tx, microbatches=microbatches, pipeline=config)
            compiled = step.lower(abstract_train_state(gpt(), tx), batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    gpipe, one_f_one_b = ([temporary(schedule, m) for m in (4, 8, 16)] for schedule in ("gpipe", "1f1b"))
    each = (gpipe[2] - gpipe[1]) / 8  # residuals of a microbatch
    assert each > 0
    np.testing.assert_allclose(gpipe[1] - gpipe[0], 4 * each, rtol=0.1)
    # 2 p - 1 = 3 microbatches in flight, whatever their number; the tables and keys of more ticks take some bytes.
    np.testing.assert_allclose(one_f_one_b, gpipe[0] - each, rtol=0.05)


def lower(
    build: Any,
    loss_fn: Any = next_token_loss,
    *,
    mesh: str = "pipeline=2",
    pipeline: str = "1f1b",
    recipe: str = "none",
    **options: Any,
) -> None:
    """Trace a step, without a compilation."""
    tx, config = optax.sgd(1e-2), PipelineConfig.parse(pipeline)
    with jax.set_mesh(make_mesh(ParallelConfig.parse(mesh))), autocast(RECIPES[recipe]):
        step: Any = make_train_step(loss_fn, tx, microbatches=2, pipeline=config)
        step.lower(abstract_train_state(build, tx, **options), jnp.zeros((4, SEQUENCE + 1), jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", ["1f1b", "zero_bubble"])
def test_stages_may_differ_in_precision(pipeline):
    first = gpt(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=0)
    given: Options = {"recipe": "current", "build": first}
    assert_same(train("pipeline=2", pipeline, **given), train(None, **given), TOLERANCES["current"])


@pytest.mark.costly
def test_what_cannot_be_split():
    with pytest.raises(ValueError, match="do not split into 8"):
        lower(gpt(), pipeline="1f1b,virtual_stages=4")
    for axis in ("context", "tensor"):
        with pytest.raises(ValueError, match=rf"zero_bubble.*along {axis}"):
            lower(gpt(), mesh=f"pipeline=2,{axis}=2", pipeline="zero_bubble")


@pytest.mark.costly("<lambda>-those of jax.random.key")
@pytest.mark.parametrize(
    ("keys_of", "words"),
    [
        (lambda key, count: [None, *jax.random.split(key, count)[1:]], "3 of 4 layers have a dropout key"),
        (lambda key, count: [*jax.random.split(jax.random.PRNGKey(0), count)], "those of jax.random.key"),
    ],
)
def test_keys_that_stages_cannot_take_are_refused(keys_of, words):
    def before(model: Any, batch: Any, key: Any) -> StackInput:
        stack = model.embed_inputs(batch[:, :-1], dropout_key=key)
        return dataclasses.replace(stack, keys=keys_of(jax.random.key(0), len(model.layers)))

    def after(model: Any, y: Any, batch: Any, key: Any) -> Any:
        return model.compute_loss(y, batch[:, 1:])

    with pytest.raises(ValueError, match=words):
        lower(gpt(), loss_fn=PipelinedLoss(before, after))


def penalized(model: Any, y: Any, batch: Any, key: Any) -> Any:
    return after(model, y, batch, key) + sum(jnp.sum(p**2) for p in jax.tree.leaves(nnx.state(model, nnx.Param)))


def weighted_by_output(model: Any, y: Any, batch: Any, key: Any) -> WeightedMean:
    return WeightedMean(jnp.sum(y), jnp.sum(y))


def biased_by_a_parameter(model: Any, batch: Any, key: Any) -> StackInput:
    stack = before(model, batch, key)
    options = StackOptions(mask_types={"core_attention_bias_type": "post_scale_bias"})
    bias = jnp.zeros((1, 4, SEQUENCE, SEQUENCE)) + model.embedding.embedding[0, 0]
    return StackInput(stack.x, stack.keys, arrays={"core_attention_bias": bias}, options=options)


@pytest.mark.costly("loss_fn1-depends on the layers' output", "loss_fn2-give them as learned")
@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (PipelinedLoss(before, penalized), "reads parameters of the layers"),
        (PipelinedLoss(before, weighted_by_output), "depends on the layers' output"),
        (PipelinedLoss(biased_by_a_parameter, after), "give them as learned"),
        (PipelinedLoss(before, after, lambda model: gpt(num_layers=2)(nnx.Rngs(0)).layers), "is not the model's"),
    ],
)
def test_losses_that_stages_cannot_compute(loss_fn, message):
    with pytest.raises(ValueError, match=message):
        lower(gpt(num_layers=2), loss_fn)


def test_a_loss_that_is_not_in_parts_is_refused_by_the_name_of_what_is():
    def whole(model: Any, batch: Any, key: Any) -> Any:
        return model.loss(batch[:, :-1], batch[:, 1:], dropout_key=key)

    with pytest.raises(TypeError, match=r"jax_te.training.PipelinedLoss\(embed_inputs, compute_loss\).*got whole"):
        lower(gpt(num_layers=2), whole)


class MyLossFailedError(Exception):
    """An error of a user's own."""


def test_parts_may_catch_exceptions_transform_and_are_traced_three_times_at_most():
    traced = {"before": 0, "after": 0, "layer": 0}

    class Counted(Own):
        def __call__(self, x: Any, dropout_key: Any = None) -> Any:
            traced["layer"] += 1
            return super().__call__(x)

    def careful_before(model: Any, batch: Any, key: Any) -> StackInput:
        traced["before"] += 1
        try:
            return StackInput(jax.checkpoint(jnp.tanh)(batch))
        except Exception as error:
            raise MyLossFailedError from error

    def careful_after(model: Any, y: Any, batch: Any, key: Any) -> WeightedMean:
        traced["after"] += 1
        try:
            return jax.checkpoint(lambda y: WeightedMean(jnp.sum(y**2), jnp.sum(batch > 0)))(y)
        except Exception as error:
            raise MyLossFailedError from error

    tx, x = optax.sgd(0.1), jax.random.normal(jax.random.key(1), (4, 2, 16))
    with jax.set_mesh(make_mesh(ParallelConfig(pipeline=2))):
        state = abstract_train_state(functools.partial(Layers, Counted), tx)
        for schedule in ("1f1b", "zero_bubble"):
            traced.update(before=0, after=0, layer=0)
            config = PipelineConfig(schedule=schedule)
            step: Any = make_train_step(
                PipelinedLoss(careful_before, careful_after), tx, microbatches=2, pipeline=config
            )
            step.lower(state, x)
            assert 1 <= min(traced.values()) <= max(traced.values()) <= 3, (schedule, traced)


def t5(rngs: nnx.Rngs) -> T5Model:
    sizes: Options = SIZES | {"num_layers": 2}
    config = TransformerConfig(**sizes)
    return T5Model(config, vocab_size=VOCAB, max_sequence_length=SEQUENCE, rngs=rngs)


def bert(rngs: nnx.Rngs) -> BertModel:
    sizes: Options = SIZES | {"num_layers": 2}
    config = TransformerConfig(**sizes)
    return BertModel(config, vocab_size=VOCAB, max_sequence_length=SEQUENCE, rngs=rngs)


OTHER_MODELS = {
    "bert": (bert, next_token_loss),
    # The gradients of the encoder's output and of the bias by distance pass through all stages.
    "t5": (
        t5,
        PipelinedLoss(
            lambda model, batch, key: model.embed_inputs(batch[:, :-1], batch[:, :-1], dropout_key=key),
            lambda model, y, batch, key: model.compute_loss(y, batch[:, 1:], dropout_key=key),
        ),
    ),
}


@pytest.mark.costly("bert-zero_bubble", slow=["bert-1f1b", "t5-zero_bubble", "t5-1f1b"])
@pytest.mark.parametrize("pipeline", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("kind", OTHER_MODELS)
def test_other_models_train_to_one_devices_losses(kind, pipeline):
    build, loss = OTHER_MODELS[kind]
    given: Options = {"build": build, "loss_fn": loss, "microbatches": 2}
    assert_same(train("pipeline=2", pipeline, **given), train(None, **given), TOLERANCES["none"])


def test_layers_that_share_parameters_are_refused():
    def shared(rngs: nnx.Rngs) -> GPTModel:
        model = gpt(num_layers=2)(rngs)
        model.layers[1].layernorm_mlp = model.layers[0].layernorm_mlp
        return model

    with pytest.raises(ValueError, match="layer 1 shares parameters"):
        lower(shared)


@pytest.mark.slow
def test_numbers_of_layers_make_no_difference_but_in_layers_of_ones_own():
    def megatron(rngs: nnx.Rngs) -> MegatronGPTModel:
        sizes: Options = SIZES | {"num_layers": 2}
        return MegatronGPTModel(TransformerConfig(**sizes), None, VOCAB, SEQUENCE, rngs=rngs)

    class Scaled(nnx.Module):
        def __init__(self, layer: Any, number: int):
            self.layer, self.layer_number = layer, number

        def __call__(self, x: Any, **options: Any) -> Any:
            return self.layer(x, **options) / self.layer_number

    def scaled(rngs: nnx.Rngs) -> GPTModel:
        model = gpt(num_layers=2)(rngs)
        model.layers = nnx.List([Scaled(layer, i) for i, layer in enumerate(model.layers, start=1)])
        return model

    class Numbered(TransformerLayer):
        """A layer of a derived class, which may read what its base does not."""

    def numbered(rngs: nnx.Rngs) -> GPTModel:
        model = gpt(num_layers=2)(rngs)
        for i, layer in enumerate(model.layers, start=1):
            layer.__class__, layer.layer_number = Numbered, i
        return model

    lower(megatron)
    for build in (scaled, numbered):
        with pytest.raises(ValueError, match="would compute all 2 of them"):
            lower(build)
    Numbered.reads_layer_number = False
    lower(numbered)


@pytest.mark.slow
def test_kernels_that_are_stored_quantized():
    # Each stage sums fp32 gradients in the shape of its kernels, of which it has a stack.
    half = gpt(num_layers=2, params_dtype=jnp.bfloat16, compute_dtype=jnp.bfloat16)
    lower(half, recipe="current", fp8_param=True)
