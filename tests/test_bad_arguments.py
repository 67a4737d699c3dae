"""Arguments that are not what their annotations say: every public constructor refuses them."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te import config, layers, megatron, metrics, models, ops, recipe, sharding, training
from jax_te.config import ModelParallelConfig, TransformerConfig
from jax_te.config.internal import checked
from tests.support.numerics import without_type_checker

NAN, INF = float("nan"), float("inf")
ODD: list[Any] = ["no", "", b"1", 1j, [], (), {}, {1}, object(), object, NAN, INF, -INF]
BAD: dict[Any, list[Any]] = {
    bool: [*ODD, "True", 0, 1, -1, 2.5, np.int32(1), jnp.ones(2)],
    int: [*ODD, True, False, 1.5, 2.0, np.bool_(True), np.float32(2), jnp.ones(2)],
    float: [*ODD, True, False, np.bool_(True), np.float32("nan"), np.float64("inf"), jnp.ones(2)],
}
SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1}
MODEL: dict[str, Any] = {"config": TransformerConfig(**SIZES), "vocab_size": 16, "max_sequence_length": 8}
TE: dict[str, Any] = {"config": ModelParallelConfig(), "init_method": jax.nn.initializers.normal(0.02), "bias": True}
TE |= {"skip_bias_add": False, "input_size": 16, "output_size": 16}
SPLIT: dict[str, Any] = {"is_expert": False}
QUERIES = jnp.ones((1, 4, 2, 8))
LINEAR = layers.Linear(16, 16, rngs=nnx.Rngs(0))


class _Precision:
    bf16, fp16 = True, False


# What each constructor needs; the other arguments have defaults.
CONSTRUCTORS: dict[Any, dict[str, Any]] = {
    layers.Linear: {"in_features": 16, "out_features": 16},
    layers.LayerNormLinear: {"in_features": 16, "out_features": 16},
    layers.LayerNormMLP: {"hidden_size": 16, "ffn_hidden_size": 16},
    layers.LayerNorm: {"hidden_size": 16},
    layers.RMSNorm: {"hidden_size": 16},
    layers.Embedding: {"num_embeddings": 16, "hidden_size": 16},
    layers.DotProductAttention: {"num_attention_heads": 1, "kv_channels": 16},
    layers.MultiheadAttention: {"hidden_size": 16, "num_attention_heads": 1},
    layers.TransformerLayer: {"hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 1},
    layers.LoRA: {"base": LINEAR, "rank": 2},
    layers.RelativePositionBias: {"num_attention_heads": 2},
    megatron.TENorm: {"config": MODEL["config"], "hidden_size": 16},
    megatron.TELinear: TE | {"skip_weight_param_allocation": False, "parallel_mode": "duplicated"},
    megatron.TEColumnParallelLinear: TE | SPLIT | {"gather_output": False},
    megatron.TERowParallelLinear: TE | SPLIT | {"input_is_parallel": True},
    megatron.TELayerNormColumnParallelLinear: TE | SPLIT | {"gather_output": False, "config": MODEL["config"]},
    megatron.TEDotProductAttention: {
        "config": MODEL["config"], "layer_number": 1, "attn_mask_type": "causal", "attention_type": "self"
    },
    megatron.Float16Module: {"config": _Precision(), "module": LINEAR},
    models.GPTModel: MODEL,
    models.T5Model: MODEL,
    models.Execution: {},
    models.RotaryPositions: {},
    models.RelativePositions: {},
    recipe.DelayedScaling: {},
    recipe.Float8CurrentScaling: {},
    recipe.Float8BlockScaling: {},
    recipe.NVFP4BlockScaling: {},
    recipe.autocast: {"recipe": None},
    recipe.MMParams: {},
    recipe.ModuleRecipe: {"training": None},
    ops.NormSpec: {},
    ops.ContextParallel: {},
    ops.LossOptions: {},
    ops.dot_product_attention: {"qkv": (QUERIES,) * 3},
    layers.LinearScaling: {"factor": 2.0},
    layers.Llama3Scaling: {},
    layers.YarnScaling: {"factor": 2.0},
    megatron.TransformerLayer: {"config": MODEL["config"]},
    megatron.MatchContext: {"module_path": "layers.0.proj"},
    megatron.TECudaRNGStatesTracker: {},
    megatron.initialize_rng_tracker: {},
    megatron.te_checkpoint: {
        "forward_func": len, "distribute_saved_activations": False, "get_rng_state_tracker": None, "tp_group": None
    },
    metrics.StepWork: {"tokens": 1},
    sharding.Network: {},
    config.ActivationParams: {},
    config.TransformerConfig: SIZES,
    config.ModelParallelConfig: {},
    config.PrecisionConfig: {},
    config.AttentionConfig: {},
    config.RecomputeConfig: {},
    training.ConstantLossScale: {},
    training.DynamicLossScale: {},
    training.learning_rate_schedule: {"learning_rate": 1.0, "total_steps": 2},
    training.adamw_with_schedule: {"schedule": 0.1},
}  # fmt: skip


def hints_of(constructor: Any) -> dict[str, Any]:
    """Annotations of the arguments."""
    new = isinstance(constructor, type) and "__new__" in vars(constructor)
    function = constructor.__new__ if new else constructor.__init__ if isinstance(constructor, type) else constructor
    hints = get_type_hints(constructor if hasattr(constructor, "__dataclass_fields__") else function)
    return {name: hint for name, hint in hints.items() if name in inspect.signature(function).parameters}


def bad_arguments(constructor: Any) -> list[tuple[str, Any]]:
    """A name and a value for everything that the arguments of simple types must not be."""
    pairs = []
    for name, hint in hints_of(constructor).items():
        kinds = set(get_args(hint)) if get_origin(hint) in (UnionType, Union) else {hint}
        kinds -= {type(None)}
        if len(kinds) == 1:
            (kind,) = kinds
            values = ODD if get_origin(kind) is Literal else BAD.get(kind, [])
            pairs += [(name, value) for value in values]
    return pairs


@pytest.mark.parametrize("constructor", CONSTRUCTORS, ids=lambda constructor: constructor.__name__)
def test_an_argument_of_another_kind_is_refused(constructor: Any) -> None:
    needed, pairs = CONSTRUCTORS[constructor], bad_arguments(constructor)
    if "rngs" in hints_of(constructor):
        needed = needed | {"rngs": nnx.Rngs(0)}
    accepted: list[Any] = []
    with without_type_checker():
        for name, value in pairs:
            try:
                constructor(**(needed | {name: value}))
            except (ValueError, TypeError) as error:
                if name not in str(error):
                    accepted.append((name, value, error))
            else:
                accepted.append((name, value))
    print(f"{constructor.__name__}: {len(pairs)} bad arguments")
    assert len(pairs) >= len(BAD[float])
    assert accepted == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layers.DotProductAttention(1, 16, num_splits=-3), "num_splits.* >= 1.* -3"),
        (
            lambda: layers.DotProductAttention(1, 16, softmax_scale=NAN),
            "softmax_scale must be a finite number",
        ),
        (lambda: training.adamw_with_schedule(0.1, clip_norm=-1), "clip_norm must be > 0, or None.* -1"),
        (lambda: training.adamw_with_schedule(0.1, clip_norm=0.0), "clip_norm must be > 0, or None.* 0"),
    ],
)
def test_numbers_out_of_range_are_refused(call: Any, message: str) -> None:
    with without_type_checker(), pytest.raises(ValueError, match=message):
        call()


def test_what_annotations_do_not_say_is_refused() -> None:
    calls: list[tuple[Any, str]] = [
        (lambda: metrics.StepWork(tokens=0), "tokens must be an integer >= 1, got 0"),
        (lambda: metrics.StepWork(tokens=1, devices=-1), "devices must be an integer >= 1, got -1"),
        (lambda: metrics.StepWork(tokens=1, peak=0.0), "peak must be a number > 0, or None .* got 0.0"),
        (lambda: megatron.MatchContext("proj", -1), "layer_number must be >= 0, or None .* got -1"),
        (lambda: megatron.MatchContext(3), "module_path must be text.* got 3"),  # type: ignore[arg-type]
        (lambda: ops.ContextParallel(cp_comm_type=[]), r"cp_comm_type must be one of .* got \[\]"),  # type: ignore[arg-type]
        (lambda: recipe.ModuleRecipe(training=None, evaluation="no"), "evaluation must be a recipe or None, got 'no'"),  # type: ignore[arg-type]
    ]
    for sizes in (3, True, "2,4", (True, 2), (2.0, 1), {2, 4}, jnp.ones(2)):
        make: Any = functools.partial(ops.ContextParallel, hierarchical_context_parallel_sizes=sizes)
        calls.append((make, "hierarchical_context_parallel_sizes must be .* two integers >= 1, got"))
    with without_type_checker():
        for call, message in calls:
            with pytest.raises((ValueError, TypeError), match=message):
                call()


def test_a_recipe_is_no_name() -> None:
    """`checked` leaves arguments that are a name or an object to the function."""
    own = recipe.ModuleRecipe(training=None, evaluation=recipe.Float8CurrentScaling())
    assert own.evaluation == recipe.Float8CurrentScaling()


def test_the_first_microbatch_is_true_or_false() -> None:
    x, rngs = jnp.ones((2, 4, 16)), nnx.Rngs(0)
    modules: list[Any] = [
        layers.Linear(16, 16, rngs=rngs),
        layers.LayerNormLinear(16, 16, rngs=rngs),
        layers.LayerNormMLP(16, 32, rngs=rngs),
        layers.MultiheadAttention(16, 2, rngs=rngs),
        layers.TransformerLayer(16, 32, 2, rngs=rngs),
        layers.LoRA(LINEAR, 2, rngs=rngs),
    ]
    with without_type_checker():
        for module, flag in itertools.product(modules, BAD[bool]):
            with pytest.raises(TypeError, match="is_first_microbatch must be True or False"):
                module(x, is_first_microbatch=flag)
        for module in modules:
            module(x, is_first_microbatch=np.bool_(True))


def test_flags_of_training_are_true_or_false() -> None:
    tx = optax.sgd(0.1)
    calls: dict[str, list[Any]] = {
        "fp8_param": [
            lambda flag: training.Optimizer(LINEAR, tx, fp8_param=flag),
            lambda flag: training.create_train_state(LINEAR, tx, key=jax.random.key(0), fp8_param=flag),
            lambda flag: training.abstract_train_state(LINEAR, tx, fp8_param=flag),
        ],
        "has_aux": [lambda flag: training.value_and_grad(len, has_aux=flag)],
        "keep_kernels": [lambda flag: training.make_train_step(len, tx, keep_kernels=flag)],
    }
    with without_type_checker():
        for name, functions in calls.items():
            for call, flag in itertools.product(functions, BAD[bool]):
                with pytest.raises(TypeError, match=f"{name} must be True or False"):
                    call(flag)


def test_scalars_of_numpy_and_traced_ones_are_what_they_were() -> None:
    with without_type_checker():
        assert layers.Linear(16, 16, np.bool_(False), rngs=nnx.Rngs(0)).bias is None
        assert layers.DotProductAttention(1, 16, softmax_scale=np.float32(0.5)).softmax_scale == 0.5
        assert layers.DotProductAttention(1, 16, softmax_scale=1).softmax_scale == 1

    @checked
    def half(x: float | None = None) -> Any:
        return None if x is None else x / 2

    assert jax.jit(half)(3.0) == 1.5
    assert half() is None
    assert math.isclose(half(jnp.float32(1.0)), 0.5)
    tx = optax.inject_hyperparams(training.adamw_with_schedule)(0.1, clip_norm=1.0)
    params = {"kernel": jnp.ones((2, 2))}
    with without_type_checker(), jax.numpy_dtype_promotion("standard"):
        updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert updates["kernel"].shape == (2, 2)
