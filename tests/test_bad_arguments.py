"""Arguments that are not what their annotations say: every public constructor refuses them."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import itertools
import math
import pkgutil
import re
from collections.abc import Callable, Hashable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_te
import jax_te.interop
import jax_te.training.pipeline
from jax_te import (
    checkpoint,
    config,
    data,
    layers,
    linen,
    megatron,
    metrics,
    models,
    ops,
    quantize,
    random,
    recipe,
    remat,
    sharding,
    te_pytorch,
    training,
)
from jax_te._validation import brief, checked
from jax_te.config import LatentAttentionOptions, MLATransformerConfig, ModelParallelConfig, TransformerConfig
from jax_te.recipe import DelayedScaling
from jax_te.typing import Words
from tests.support.bad_values import HUGE, NAN, VALUES, allows, calls_of
from tests.support.numerics import NO_DROPOUT, without_type_checker

NUMBERS_OF_ANY_SIZE = [0, -1, -(2**70), 2**70, HUGE, 5e-324, -0.5, 1e308, -1e308]
SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 1}
MODEL: dict[str, Any] = {"config": TransformerConfig(**SIZES), "vocab_size": 16, "max_sequence_length": 8}
TE: dict[str, Any] = {"config": ModelParallelConfig(), "init_method": jax.nn.initializers.normal(0.02), "bias": True}
TE |= {"skip_bias_add": False, "input_size": 16, "output_size": 16}
SPLIT: dict[str, Any] = {"is_expert": False}
EXPERTS = config.RouterOptions(num_experts=4)
OF_EXPERTS = TransformerConfig(
    **SIZES, num_moe_experts=4, add_bias_linear=False, moe_shared_expert_intermediate_size=16
)
QUERIES = jnp.ones((1, 4, 2, 8))
LATENT = LatentAttentionOptions(kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=16, v_head_dim=16)
LINEAR = layers.Linear(16, 16, rngs=nnx.Rngs(0))
GROUPED = layers.GroupedLinear(2, 16, 16, rngs=nnx.Rngs(0))
OF_LATENTS = MLATransformerConfig(**SIZES)
TOKENS, MATCH = np.arange(16, dtype=np.uint8), megatron.MatchContext("proj")


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
    layers.MultiLatentAttention: {"hidden_size": 16, "num_attention_heads": 1, "latent": LATENT},
    layers.TransformerLayer: {"hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 1},
    layers.LoRA: {"base": LINEAR, "rank": 2},
    layers.RelativePositionBias: {"num_attention_heads": 2},
    layers.GroupedLinear: {"num_gemms": 2, "in_features": 16, "out_features": 16},
    layers.GroupedLoRA: {"base": GROUPED, "rank": 2},
    layers.MoE: {"hidden_size": 16, "ffn_hidden_size": 16, "router": EXPERTS},
    layers.Router: {"hidden_size": 16, "options": EXPERTS},
    layers.SharedExperts: {"hidden_size": 16, "ffn_hidden_size": 16},
    megatron.MLASelfAttention: {"config": OF_LATENTS},
    megatron.MoELayer: {"config": OF_EXPERTS},
    megatron.SharedExpertMLP: {"config": OF_EXPERTS},
    megatron.TopKRouter: {"config": OF_EXPERTS},
    megatron.TENorm: {"config": MODEL["config"], "hidden_size": 16},
    megatron.TELinear: TE | {"skip_weight_param_allocation": False, "parallel_mode": "duplicated"},
    megatron.TEGroupedLinear: TE | SPLIT | {"num_gemms": 2, "parallel_mode": "column"},
    megatron.TEColumnParallelGroupedLinear: TE | SPLIT | {"num_gemms": 2},
    megatron.TERowParallelGroupedLinear: TE | SPLIT | {"num_gemms": 2},
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
    recipe.CustomRecipe: {"qfactory": len},
    recipe.MXFP8BlockScaling: {},
    recipe.Float8CurrentScaling: {},
    recipe.Float8BlockScaling: {},
    recipe.NVFP4BlockScaling: {},
    recipe.autocast: {"recipe": None},
    recipe.MMParams: {},
    recipe.ModuleRecipe: {"training": None},
    ops.NormSpec: {},
    ops.RowGroups: {"sizes": jnp.array([1, 2]), "rows": 4},
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
    metrics.Speed: {"work": metrics.StepWork(tokens=1)},
    metrics.StepWork: {"tokens": 1},
    sharding.Network: {},
    config.ActivationParams: {},
    config.TransformerConfig: SIZES,
    config.MLATransformerConfig: SIZES,
    config.ModelParallelConfig: {},
    config.PrecisionConfig: {},
    config.AttentionConfig: {},
    config.RecomputeConfig: {},
    training.ConstantLossScale: {},
    training.DynamicLossScale: {},
    training.learning_rate_schedule: {"learning_rate": 1.0, "total_steps": 2},
    training.adamw_with_schedule: {"schedule": 0.1},
    checkpoint.TrainCheckpointer: {"directory": "checkpoints"},
    config.CudaGraphConfig: {},
    config.DispatchOptions: {},
    config.LatentAttentionOptions: {},
    config.ExpertsConfig: {},
    config.LimitedFunction: {"function": "gelu"},
    config.MoEOptions: {"router": EXPERTS},
    config.RouterOptions: {"num_experts": 4},
    config.NormalInit: {"std": 1.0},
    config.ParallelConfig: {},
    data.CorruptedSpans: {"sentinels": (9,)},
    data.MaskedTokens: {"mask": 1, "vocab_size": 9},
    data.TextData: {"train": TOKENS, "heldout": TOKENS, "source": "text", "files": 1},
    data.Tokenizer: {"path": "tokenizer.json"},
    data.TrainBatches: {"text": TOKENS, "batch_size": 1, "seq_len": 2, "seed": 0},
    layers.DotGeneral: {},
    layers.EinsumOp: {},
    layers.Fp8Padding: {"num_gemms": 1},
    layers.Fp8Unpadding: {"num_gemms": 1},
    layers.PackedSeqParams: {"cu_seqlens_q": jnp.array([0, 4])},
    linen.DotGeneral: {},
    linen.EinsumOp: {},
    megatron.GlobMatcher: {"pattern": "*", "config_key": "own"},
    megatron.GraphableMegatronModule: {"config": MODEL["config"]},
    megatron.MLP: {"config": MODEL["config"]},
    megatron.MegatronModule: {"config": MODEL["config"]},
    megatron.QuantizationConfig: {"config": {}, "match_input": MATCH, "config_key": "own"},
    megatron.RecipeConfig: {"matchers": [], "config_dict": {}},
    megatron.SelfAttention: {"config": MODEL["config"]},
    megatron.TEDelayedScaling: {},
    megatron.TEQuantizationParams: {"training_recipe": megatron.TEQuantizationRecipe()},
    megatron.TEQuantizationRecipe: {},
    metrics.MetricsLog: {"directory": "metrics"},
    metrics.PrecisionLog: {"directory": "metrics"},
    metrics.StepTrace: {"folder": "trace", "first": 1, "last": 2},
    models.BertModel: MODEL,
    models.MegatronGPTModel: MODEL | {"transformer_layer_spec": None},
    models.Multipliers: {},
    models.StackInput: {"x": jnp.ones((1, 2, 4))},
    models.StackOptions: {},
    training.PipelinedLoss: {"embed_inputs": len, "compute_loss": len},
    config.PipelineConfig: {},
    quantize.BlockQuantizer: {"dtype": jnp.float8_e4m3fn},
    quantize.MXQuantizer: {"dtype": jnp.float8_e4m3fn},
    quantize.NVFP4Quantizer: {},
    quantize.TensorQuantizer: {"dtype": jnp.float8_e4m3fn},
    remat.RecomputePolicy: {},
    sharding.ShardingRules: {},
    te_pytorch.GroupedLinear: {"num_gemms": 2, "in_features": 16, "out_features": 16},
    te_pytorch.DotProductAttention: {"num_attention_heads": 1, "kv_channels": 16, "qkv_format": "bshd"},
    te_pytorch.LayerNorm: {"normalized_shape": 16},
    te_pytorch.LayerNormLinear: {"in_features": 16, "out_features": 16},
    te_pytorch.LayerNormMLP: {"hidden_size": 16, "ffn_hidden_size": 16},
    te_pytorch.Linear: {"in_features": 16, "out_features": 16},
    te_pytorch.MultiheadAttention: {"hidden_size": 16, "num_attention_heads": 1, "qkv_format": "bshd"},
    te_pytorch.RMSNorm: {"normalized_shape": 16},
    te_pytorch.TransformerLayer: {
        "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 1, "attn_input_format": "bshd",
    },
    training.Optimizer: {"model": LINEAR, "tx": optax.sgd(0.1)},
}  # fmt: skip


CONSTRUCTORS |= {
    getattr(linen, of.__name__): CONSTRUCTORS[of]
    for of in CONSTRUCTORS
    if hasattr(linen, of.__name__) and of.__module__.startswith("jax_te.layers")
}
CONSTRUCTORS[linen.LoRA] = {"base": linen.Linear(16, 16), "rank": 2}
CONSTRUCTORS[linen.GroupedLoRA] = {"base": linen.GroupedLinear(2, 16, 16), "rank": 2}
# What the arguments are that have no annotation which says it.
OF_ATTENTION = ["qkv", "q_lengths", "kv_lengths", "segments", "mask", "bias", "softmax_offset", "dropout_key"]
OF_ATTENTION += ["context_parallel", "out_axes", "window"]
FILLED_IN = dict.fromkeys(("init_method", "output_layer_init_method"), Callable[..., Any] | None)
DOCUMENTED: dict[Any, dict[str, Any]] = {
    # None is filled in, so their annotations do not have it.
    config.TransformerConfig: FILLED_IN,
    config.MLATransformerConfig: FILLED_IN,
    megatron.MegatronModule: {"config": Hashable},
    quantize.BlockQuantizer: {"dtype": type},
    quantize.MXQuantizer: {"dtype": type},
    quantize.NVFP4Quantizer: {"dtype": type},
    quantize.TensorQuantizer: {"dtype": type},
    # An op checks these by their shapes and dtypes, together.
    ops.dot_product_attention: dict.fromkeys(OF_ATTENTION, Any),
}


def name_of(constructor: Any) -> str:
    return f"{constructor.__module__.split('.')[1]}.{constructor.__name__}"


# Public classes without an entry above, and why.
NOT_MADE_BY_USERS: dict[str, list[type]] = {
    "what a function found, to be read": [
        layers.DropInLayer, layers.DropInReport, layers.ExpertRows, megatron.ModuleQuantization,
        megatron.QuantizationReport, metrics.KernelTime, metrics.KernelTimes, ops.BackendChoice,
        training.pipeline.Schedule, recipe.Support, sharding.ArrayPlacement, sharding.CollectiveCount,
        sharding.CommunicationReport, sharding.ShardingReport, training.ModuleSensitivity, training.TensorStatistics,
    ],
    "what functions and layers make and hand on, in pytrees": [
        layers.KVCache, layers.KernelCache, layers.Rotary, layers.WindowKVCache, ops.AttentionSpec, quantize.GemmState,
        quantize.Observer, quantize.QuantizedKernel, quantize.QuantizedOperand, quantize.QuantizedTensor,
        quantize.QuantizerState, training.SplitModel, training.TrainState,
    ],
    "no arguments": [
        data.ByteTokenizer, data.NextTokens, layers.QuantizableModule, megatron.InferenceCudaRNGStatesTracker,
        megatron.Matcher,
        random.RNGStatesTracker, training.LossScale,
    ],
    "bases, whose subclasses are above": [data.Objective, linen.LinenModule, quantize.Quantizer, recipe.Recipe],
    "a base, whose subclasses are a router's": [quantize.Counting],
}  # fmt: skip


def hints_of(constructor: Any) -> dict[str, Any]:
    """Annotations of the arguments."""
    constructor = getattr(constructor, "nnx_class", constructor)
    new = isinstance(constructor, type) and "__new__" in vars(constructor)
    function = constructor.__new__ if new else constructor.__init__ if isinstance(constructor, type) else constructor
    hints = get_type_hints(constructor if "__dataclass_fields__" in vars(constructor) else function)
    hints |= DOCUMENTED.get(constructor, {})
    names = [name for name in inspect.signature(function).parameters if not name.startswith("_")]
    return {name: hint for name, hint in hints.items() if name in names}


def misspelt(constructor: Any) -> list[str]:
    """Up to 20 names that are nearly those of arguments."""
    names, found = hints_of(constructor), []
    for name in names:
        found += [name.upper(), f"{name}_", f"_{name}"]
        for i in range(len(name)):
            found += [name[:i] + name[i + 1 :], name[:i] + name[i] + name[i:]]
    return [name for name in found if name not in names][:20]


def used(constructor: Any, arguments: dict[str, Any]) -> None:
    """Construct, to the first use of the arguments."""
    made = constructor(**arguments)
    if isinstance(made, contextlib.AbstractContextManager):
        with made:
            return
    if isinstance(made, linen.LinenModule):
        made.nnx_module(nnx.Rngs(0))
    if isinstance(made, layers.PackedSeqParams):
        made.positions(4)


def needed_by(constructor: Any) -> dict[str, Any]:
    keys = {"rngs": nnx.Rngs(0)} if "rngs" in hints_of(constructor) and not hasattr(constructor, "nnx_class") else {}
    return CONSTRUCTORS[constructor] | keys


def allowed_errors(constructor: Any) -> tuple[type[Exception], ...]:
    # Megatron-Core's own checks are assertions, and tests/test_parity_errors.py holds that their types are the same.
    return (ValueError, TypeError, AssertionError) if "megatron" in constructor.__module__ else (ValueError, TypeError)


def refused(constructor: Any, needed: dict[str, Any], name: str, value: Any, said: str) -> str:
    """Empty if the value is refused as it should be, else what happened."""
    try:
        used(constructor, needed | {name: value})
    except allowed_errors(constructor) as error:
        return "" if re.search(said, str(error)) else f"{name}={value!r}: {error}"
    except Exception as error:
        return f"{name}={value!r}: {error!r}"
    return f"{name}={value!r} is accepted"


@pytest.mark.costly(
    "linen.LoRA",
    slow=(
        "linen.GroupedLoRA",
        "linen.MultiheadAttention",
        "linen.TransformerLayer",
        "linen.Linear",
        "linen.DotProductAttention",
        "config.MLATransformerConfig",
    ),
)
@pytest.mark.parametrize("constructor", CONSTRUCTORS, ids=name_of)
def test_an_argument_of_another_kind_is_refused(constructor: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    pairs = [
        (name, v, rf"\b{name}\b") for name, hint in hints_of(constructor).items() for v in VALUES if not allows(hint, v)
    ]
    pairs = pairs[:: max(1, len(pairs) // 300)]  # of a constructor with many arguments a part, spread over all
    if isinstance(constructor, type) and not issubclass(constructor, DelayedScaling):
        pairs += [
            (name, 1, "unexpected keyword argument|takes no arguments|has no field") for name in misspelt(constructor)
        ]
    needed = needed_by(constructor)
    with without_type_checker():
        wrong = [refused(constructor, needed, *pair) for pair in pairs]
    print(f"{constructor.__name__}: {len(pairs)} bad arguments")
    assert len(pairs) >= 20
    assert [line for line in wrong if line] == []


@functools.cache  # it reads the whole package
def checked_names() -> set[str]:
    """Modules and names of what the sources decorate with ``@checked``."""
    found, root = set(), Path(jax_te.__path__[0])
    for path in root.rglob("*.py"):
        module = ".".join(("jax_te", *path.relative_to(root).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text())):
            names = [ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ())]
            found |= {f"{module}.{node.name}"} if "checked" in names else set()  # type: ignore[attr-defined]
    return found


_NAMES = checked_names()
# Linen modules check when their NNX module is made, in its constructor.
CHECKED = [
    made for made in CONSTRUCTORS if f"{made.__module__}.{made.__name__}" in _NAMES and not hasattr(made, "nnx_class")
]


@pytest.mark.costly(
    "ops.dot_product_attention",
    "layers.MultiLatentAttention",
    "layers.MoE",
    "models.GPTModel",
    "models.T5Model",
    slow=("megatron.MLASelfAttention", "megatron.MoELayer", "models.BertModel"),
)
@pytest.mark.parametrize("constructor", CHECKED, ids=name_of)
def test_nothing_runs_before_a_refusal(constructor: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """One argument after the other is wrong, and the function's body is not entered."""
    monkeypatch.chdir(tmp_path)
    needed, said_elsewhere = needed_by(constructor), DOCUMENTED.get(constructor, {})
    hints = {name: hint for name, hint in hints_of(constructor).items() if name not in said_elsewhere}
    with without_type_checker():
        for name, hint in hints.items():
            wrong = [value for value in VALUES if not allows(hint, value)]
            for value in wrong[:2]:
                with calls_of(constructor) as entered, pytest.raises(allowed_errors(constructor)):
                    constructor(**needed | {name: value})
                assert entered == [], (name, value)
        with calls_of(constructor) as entered, contextlib.suppress(ValueError, TypeError):  # of the body
            used(constructor, needed)
        assert entered != [], "calls are not seen"


@pytest.mark.costly(
    "layers.MultiheadAttention",
    slow=(
        "config.MLATransformerConfig",
        "layers.MultiLatentAttention",
        "te_pytorch.TransformerLayer",
        "models.MegatronGPTModel",
        "layers.TransformerLayer",
        "megatron.TransformerLayer",
        "te_pytorch.LayerNormLinear",
        "megatron.MoELayer",
        "models.BertModel",
        "layers.MoE",
        "te_pytorch.MultiheadAttention",
    ),
)
@pytest.mark.parametrize("constructor", CONSTRUCTORS, ids=name_of)
def test_a_number_of_any_size_is_taken_or_refused(constructor: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Annotations do not say what is in range; but nothing may hang, nor end in an error that names no argument."""
    monkeypatch.chdir(tmp_path)
    hints, needed = hints_of(constructor), needed_by(constructor)
    numeric = [name for name, hint in hints.items() if allows(hint, 1) and not allows(hint, object())]
    failed = []
    with without_type_checker():
        for name, value in itertools.product(numeric, NUMBERS_OF_ANY_SIZE):
            try:
                if allows(hints[name], value):
                    make_abstract(constructor, needed | {name: value})
            except allowed_errors(constructor) as error:
                names = [
                    name
                    for name in (*hints, str(value), brief(value))
                    if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(error))
                ]
                failed += [(name, value, error)] * (not names)
            except Exception as error:
                failed.append((name, value, error))
    assert failed == []


def make_abstract(constructor: Any, arguments: dict[str, Any]) -> None:
    """Construct, a module without its arrays: some of them would not fit into memory."""
    if not (isinstance(constructor, type) and issubclass(constructor, nnx.Module)):
        getattr(constructor(**arguments), "close", int)()
        return
    modules = {name: value for name, value in arguments.items() if isinstance(value, nnx.Module | nnx.Rngs)}
    rest = {name: value for name, value in arguments.items() if name not in modules}
    nnx.eval_shape(lambda modules: constructor(**modules, **rest), modules)


def test_no_public_class_is_left_out() -> None:
    known = {*CONSTRUCTORS, *itertools.chain(*NOT_MADE_BY_USERS.values())}
    missing = []
    interop = pkgutil.iter_modules(jax_te.interop.__path__, "jax_te.interop.")
    rooms = [*pkgutil.iter_modules(jax_te.__path__, "jax_te."), *interop]
    for info in rooms:
        module = importlib.import_module(info.name) if info.name != "jax_te.typing" else None
        for name in getattr(module, "__all__", ()):
            made: Any = getattr(module, name)
            # Those of Python's own kinds have Python's own checks; a tuple's fields are checked by what reads them.
            kinds = (tuple, Enum, BaseException)
            if isinstance(made, type) and not issubclass(made, kinds) and not getattr(made, "_is_protocol", False):
                missing += [f"{info.name}.{name}"] * (made not in known)
    assert missing == []


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
        (
            lambda: checkpoint.TrainCheckpointer("checkpoints").save({}, None, jax.numpy.int32(3)),  # type: ignore[arg-type]
            r"step must be an integer, got .*; give int\(step\)",
        ),
        (lambda: metrics.StepWork(tokens=1, devices=-1), "devices must be an integer >= 1, got -1"),
        (lambda: metrics.StepWork(tokens=1, peak=0.0), "peak must be a number > 0, or None .* got 0.0"),
        (lambda: megatron.MatchContext("proj", -1), "layer_number must be >= 0, or None .* got -1"),
        (lambda: megatron.MatchContext(3), "module_path must be text.* got 3"),  # type: ignore[arg-type]
        (lambda: ops.ContextParallel(cp_comm_type=[]), r"cp_comm_type must be one of .* got \[\]"),  # type: ignore[arg-type]
        (
            lambda: recipe.ModuleRecipe(training=None, evaluation="no"),  # type: ignore[arg-type]
            "evaluation must be a Recipe or 'training' or None, got 'no'",
        ),
    ]
    wrong: list[Any] = [3, True, "2,4", (True, 2), (2.0, 1), {2, 4}, jnp.ones(2)]
    for sizes in wrong:
        make = functools.partial(ops.ContextParallel, hierarchical_context_parallel_sizes=sizes)
        calls.append((make, "hierarchical_context_parallel_sizes must be .* two integers >= 1, got"))
    with without_type_checker():
        for call, message in calls:
            with pytest.raises((ValueError, TypeError), match=message):
                call()


def test_a_recipe_is_no_name() -> None:
    """`checked` leaves arguments that are a name or an object to the function."""
    own = recipe.ModuleRecipe(training=None, evaluation=recipe.Float8CurrentScaling())
    assert own.evaluation == recipe.Float8CurrentScaling()


def test_other_words_keep_the_remedy_of_the_type() -> None:
    @checked
    def take(group: Annotated[Annotated[None, Words("None", "set a mesh")] | None, Words("no group")]) -> None:
        raise AssertionError(group)

    with pytest.raises(TypeError, match="group must be no group, got 1; set a mesh"):
        take(1)  # type: ignore[arg-type]


FLAGS = [value for value in VALUES if not allows(bool, value) and value is not None]


def test_the_first_microbatch_is_true_or_false() -> None:
    x, rngs = jnp.ones((2, 4, 16)), nnx.Rngs(0)
    modules: list[Any] = [
        layers.Linear(16, 16, rngs=rngs),
        layers.LayerNormLinear(16, 16, rngs=rngs),
        layers.LayerNormMLP(16, 32, rngs=rngs),
        layers.MultiheadAttention(16, 2, attention_dropout=0.0, rngs=rngs),
        layers.TransformerLayer(16, 32, 2, **NO_DROPOUT, rngs=rngs),
        layers.LoRA(LINEAR, 2, rngs=rngs),
    ]
    with without_type_checker():
        for module, flag in itertools.product(modules, FLAGS):
            with pytest.raises(TypeError, match="is_first_microbatch must be True or False"):
                module(x, is_first_microbatch=flag)
        for module in modules:
            module(x, is_first_microbatch=np.bool_(True))


def test_flags_of_training_are_true_or_false() -> None:
    tx = optax.sgd(0.1)
    function: Any = len
    calls: dict[str, list[Any]] = {
        "fp8_param": [
            lambda flag: training.Optimizer(LINEAR, tx, fp8_param=flag),
            lambda flag: training.create_train_state(LINEAR, tx, key=jax.random.key(0), fp8_param=flag),
            lambda flag: training.abstract_train_state(LINEAR, tx, fp8_param=flag),
        ],
        "has_aux": [lambda flag: training.value_and_grad(len, has_aux=flag)],
        "keep_kernels": [lambda flag: training.make_train_step(function, tx, keep_kernels=flag)],
    }
    with without_type_checker():
        for name, functions in calls.items():
            for call, flag in itertools.product(functions, FLAGS):
                with pytest.raises(TypeError, match=f"{name} must be True or False"):
                    call(flag)


def test_scalars_of_numpy_and_traced_ones_are_what_they_were() -> None:
    scalars: list[Any] = [np.bool_(False), np.float32(0.5), jnp.float32(1.0)]
    no, half_scale, one = scalars
    with without_type_checker():
        assert layers.Linear(16, 16, no, rngs=nnx.Rngs(0)).bias is None
        assert layers.DotProductAttention(1, 16, softmax_scale=half_scale).softmax_scale == 0.5
        assert layers.DotProductAttention(1, 16, softmax_scale=1).softmax_scale == 1

    @checked
    def half(x: float | None = None) -> Any:
        return None if x is None else x / 2

    assert jax.jit(half)(3.0) == 1.5
    assert half() is None
    assert math.isclose(half(one), 0.5)
    tx = optax.inject_hyperparams(training.adamw_with_schedule)(0.1, clip_norm=1.0)
    params = {"kernel": jnp.ones((2, 2))}
    with without_type_checker(), jax.numpy_dtype_promotion("standard"):
        updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert updates["kernel"].shape == (2, 2)
