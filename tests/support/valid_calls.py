"""One valid call of every public function and method that takes arguments, by the names of `public_callables`."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

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
from jax_te.interop import huggingface, torch
from jax_te.interop import megatron as megatron_files
from jax_te.training import pipeline
from tests.support.numerics import NO_DROPOUT
from tests.support.tokenizers import SPANS, write_special_tokenizer, write_tokenizer


class Call(NamedTuple):
    """A call ``function(*args, **kwargs)``; ``rest`` are further positional arguments."""

    function: Callable[..., Any]
    kwargs: dict[str, Any]
    rest: tuple[Any, ...] = ()
    first: tuple[str, ...] = ()
    """Names of arguments that are given by their place, since others follow them without a name."""

    def run(self, **changes: Any) -> Any:
        """Call, and use what comes back so far that all arguments have been read."""
        kwargs = self.kwargs | changes
        given = [kwargs.pop(name) for name in self.first]
        made = self.function(*given, *self.rest, **kwargs)
        if hasattr(made, "__next__"):
            return next(made, None)
        if hasattr(made, "__enter__") and hasattr(made, "__exit__"):
            with made:
                return None
        return made


RNGS = nnx.Rngs(0)
X, IDS = jnp.ones((2, 4, 16)), jnp.ones((2, 4), jnp.int32)
Q = jnp.ones((2, 4, 2, 8))
KEY = jax.random.key(0)
KERNEL = jnp.ones((16, 16))
CONFIG = config.TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
LATENTS = config.MLATransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
EXPERTS = config.TransformerConfig(
    num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=2, add_bias_linear=False,
    moe_shared_expert_intermediate_size=16, moe_enable_routing_replay=True,
)  # fmt: skip
ROUTER = config.RouterOptions(num_experts=2)
MODEL: dict[str, Any] = {"config": CONFIG, "vocab_size": 16, "max_sequence_length": 8}
TE: dict[str, Any] = {"config": config.ModelParallelConfig(), "init_method": jax.nn.initializers.normal(0.02)}
TE |= {"bias": True, "skip_bias_add": False, "is_expert": False}
CURRENT, DELAYED = recipe.Float8CurrentScaling(), recipe.DelayedScaling(amax_history_len=1)
MESH = AbstractMesh((1,) * 6, config.MESH_AXES, axis_types=(AxisType.Auto,) * 6)
TOKENS = np.arange(256, dtype=np.uint8) % 16
OBJECTIVES = [
    data.NextTokens(), data.MaskedTokens(mask=1, vocab_size=9), data.CorruptedSpans(sentinels=(9,), after=(1,))
]  # fmt: skip


def _of_objective(objective: data.Objective, method: str, folder: Path) -> Call:
    """A call of a method of an objective."""
    values = {"text": np.arange(8, dtype=np.int32), "key": (0, 1)} if method == "example" else {"seq_len": 8}
    return Call(getattr(objective, method), values)


TENSOR = quantize.TensorQuantizer(dtype=jnp.float8_e4m3fn)
RULES = {"matchers": {"all": {"type": "glob", "enabled": True, "pattern": "*", "config": "own"}}}
RULES = {"configs": {"own": {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}}} | RULES
CONTEXT = megatron.MatchContext("layers.0.proj")


class Two(nnx.Module):
    """A user's own model."""

    def __init__(self) -> None:
        self.one, self.two = (layers.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2))

    def __call__(self, x: Any) -> Any:
        return self.two(self.one(x))


class Dense(nnx.Module):
    """A user's own model of Flax's layers."""

    def __init__(self) -> None:
        self.one, self.two = (nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2))

    def __call__(self, x: Any) -> Any:
        return self.two(self.one(x))


class LinenDense(nn.Module):
    """A user's own model of Linen's layers."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(16)(nn.Dense(16)(x))


class Graph(megatron.GraphableMegatronModule):
    """A user's own module that may be captured."""

    def forward(self, hidden_states: Any) -> Any:
        return hidden_states


def loss_fn(model: Any, batch: Any, key: Any = None) -> Any:
    return jnp.mean(model(batch))


def linear(**options: Any) -> layers.Linear:
    return layers.Linear(16, 16, rngs=nnx.Rngs(0), **options)


def grouped() -> layers.GroupedLinear:
    return layers.GroupedLinear(2, 16, 16, rngs=nnx.Rngs(0))


def router() -> layers.Router:
    return layers.Router(16, ROUTER, rngs=nnx.Rngs(0))


def megatron_router() -> megatron.TopKRouter:
    return megatron.TopKRouter(EXPERTS, rngs=nnx.Rngs(0))


def moe_layer() -> megatron.MoELayer:
    return megatron.MoELayer(EXPERTS, rngs=nnx.Rngs(0))


def gpt(**options: Any) -> models.GPTModel:
    return models.GPTModel(**MODEL | options, rngs=nnx.Rngs(0))


def te(**options: Any) -> Any:
    return megatron.TEColumnParallelLinear(16, 16, **TE, gather_output=False, rngs=nnx.Rngs(0), **options)


def train_state() -> training.TrainState:
    return training.create_train_state(linear(), optax.sgd(0.1), key=KEY)


def quantized(delayed: bool = False) -> quantize.QuantizedKernel:
    return ops.quantize_kernel(KERNEL, recipe=CURRENT, portable=True)


def tensor() -> quantize.QuantizedTensor:
    return quantize.quantize(KERNEL, TENSOR)[0]


def megatron_folder(folder: Path) -> Path:
    path = folder / "megatron"
    if not path.exists():
        megatron_files.save_megatron(gpt(), path)
    return path


def huggingface_folder(folder: Path) -> Path:
    path = folder / "huggingface"
    if not path.exists():
        huggingface.save_huggingface(gpt(), path)
    return path


def adapted_gpt() -> models.GPTModel:
    model = gpt()
    model.layers[0].self_attention.proj = layers.LoRA(model.layers[0].self_attention.proj, 2, rngs=nnx.Rngs(0))
    return model


def peft_folder(folder: Path) -> Path:
    path = folder / "peft"
    if not path.exists():
        huggingface.save_peft(adapted_gpt(), path)
    return path


def torch_file(folder: Path) -> Path:
    torch.write_torch_file(folder / "file.pt", {"a": np.ones(2, np.float32)})
    return folder / "file.pt"


def distributed(folder: Path) -> Path:
    if not (folder / "distributed").exists():
        torch.write_torch_distributed(folder / "distributed", {"a": np.ones(2, np.float32)})
    return folder / "distributed"


def yaml(folder: Path) -> Path:
    (folder / "rules.yaml").write_text(
        "matchers:\n  all: {type: glob, enabled: true, pattern: '*', config: own}\n"
        "configs:\n  own: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}\n"
    )
    return folder / "rules.yaml"


def text_file(folder: Path) -> Path:
    (folder / "text.txt").write_text("some text of a few words, again and again\n" * 40)
    return folder / "text.txt"


def metrics_log(folder: Path) -> metrics.MetricsLog:
    log = metrics.MetricsLog(folder / "log", writers=("jsonl",))
    atexit.register(log.close)  # the call that it is made for does not
    return log


def losses(folder: Path) -> Path:
    path = folder / "metrics"
    if not path.exists():
        with metrics.MetricsLog(path, writers=("jsonl",)) as log:
            log.write(1, {"loss": 1.0})
    return path


def checkpointer(folder: Path, name: str = "arrays") -> checkpoint.TrainCheckpointer:
    made = checkpoint.TrainCheckpointer(folder / name)
    if made.latest_step() is None:
        made.save({"a": jnp.ones(2)} if name == "arrays" else train_state(), {}, 1)
        made.close()  # another one of the same folder can save, too
    return made


def saving(owner: checkpoint.TrainCheckpointer) -> Call:
    def save(**kwargs: Any) -> None:
        owner.save(**kwargs)
        owner.close()

    save.__self__ = owner  # type: ignore[attr-defined]  # what it may change
    step = (owner.latest_step() or 0) + 1
    return Call(save, {"state": {"a": jnp.ones(2)}, "data_state": {}, "step": step, "metrics": {"loss": 1.0}})


def tracker(kind: Any = random.RNGStatesTracker) -> Any:
    made = kind()
    made.add("model-parallel-rng", 1)
    return made


def quant_config() -> Any:
    return megatron.RecipeConfig.from_config_dict(RULES).match(CONTEXT)


def speed() -> metrics.Speed:
    return metrics.Speed(metrics.StepWork(tokens=1))


def report() -> sharding.ShardingReport:
    return sharding.sharding_report(linear(), MESH)


def lowered() -> Any:
    return jax.jit(lambda x: x + 1).lower(X)


def rows() -> Any:
    kind = {"axes": ("data",), "kind": "all-reduce", "devices": 2, "count": 1, "launches": 1, "bytes": 8}
    return sharding.CollectiveCount(**kind)


def linen_linear() -> Any:
    module = linen.Linear(16, 16)
    return module, module.init(KEY, X)


CALLS: dict[str, Callable[[Path], Call]] = {
    "checkpoint.TrainCheckpointer.restore": lambda f: Call(
        checkpointer(f).restore, {"abstract_state": {"a": jnp.ones(2)}, "step": 1, "allow": ()}
    ),
    "checkpoint.TrainCheckpointer.restore_parameters": lambda f: Call(
        checkpointer(f, "states").restore_parameters,
        {"abstract_params": train_state().params, "step": 1, "allow": ()},
    ),
    "checkpoint.TrainCheckpointer.save": lambda f: saving(checkpointer(f)),
    "config.NormalInit.__call__": lambda f: Call(
        config.NormalInit(1.0), {"key": KEY, "shape": (2,), "dtype": jnp.float32}
    ),
    "config.ParallelConfig.parse": lambda f: Call(config.ParallelConfig.parse, {"text": "data=1"}),
    "config.ExpertsConfig.router_options": lambda f: Call(EXPERTS.router_options, {"aux_loss_groups": 1}),
    "config.TransformerConfig.has_experts": lambda f: Call(EXPERTS.has_experts, {"layer": 0}),
    "config.TransformerConfig.has_window": lambda f: Call(CONFIG.has_window, {"layer": 0}),
    "config.TransformerConfig.cp_comm_type_of": lambda f: Call(CONFIG.cp_comm_type_of, {"layer": 0}),
    "config.TransformerConfig.in_high_precision": lambda f: Call(CONFIG.in_high_precision, {"layer": 0}),
    "data.ByteTokenizer.decode": lambda f: Call(data.ByteTokenizer().decode, {"tokens": [65]}),
    "data.ByteTokenizer.encode": lambda f: Call(data.ByteTokenizer().encode, {"text": "A"}),
    "data.ByteTokenizer.encode_documents": lambda f: Call(data.ByteTokenizer().encode_documents, {"documents": [b"A"]}),
    **{
        f"data.{type(objective).__name__}.{method}": functools.partial(_of_objective, objective, method)
        for objective in OBJECTIVES
        for method in ("window", "lengths", "example")
    },
    "data.CorruptedSpans.of": lambda f: Call(
        data.CorruptedSpans.of,
        {"tokenizer": data.Tokenizer(write_special_tokenizer(f / "tokenizer.json", SPANS)), "start": 0},
    ),
    "data.MaskedTokens.of": lambda f: Call(
        data.MaskedTokens.of, {"tokenizer": data.Tokenizer(write_special_tokenizer(f / "tokenizer.json"))}
    ),
    "data.Tokenizer.find": lambda f: Call(data.Tokenizer(write_tokenizer(f / "tokenizer.json")).find, {}, ("def",)),
    "data.Tokenizer.template": lambda f: Call(
        data.Tokenizer(write_tokenizer(f / "tokenizer.json")).template, {"token": 2}
    ),
    "data.Tokenizer.decode": lambda f: Call(
        data.Tokenizer(write_tokenizer(f / "tokenizer.json")).decode, {"tokens": [2]}
    ),
    "data.Tokenizer.encode": lambda f: Call(
        data.Tokenizer(write_tokenizer(f / "tokenizer.json")).encode, {"text": "def"}
    ),
    "data.Tokenizer.encode_documents": lambda f: Call(
        data.Tokenizer(write_tokenizer(f / "tokenizer.json")).encode_documents, {"documents": [b"def"]}
    ),
    "data.TrainBatches.set_state": lambda f: Call(
        (b := data.TrainBatches(TOKENS, batch_size=1, seq_len=2, seed=0)).set_state, {"state": b.get_state()}
    ),
    "data.byte_bigram_entropy": lambda f: Call(data.byte_bigram_entropy, {"train": TOKENS, "heldout": TOKENS}),
    "data.heldout_batches": lambda f: Call(
        data.heldout_batches,
        {
            "text": TOKENS, "batch_size": 1, "seq_len": 2, "num_batches": 1, "vocab_size": 16, "sharding": None,
            "objective": OBJECTIVES[0],
        },
    ),
    "data.load_text": lambda f: Call(
        data.load_text,
        {
            "source": text_file(f), "seq_len": 4, "heldout_fraction": 0.1, "tokenizer": None, "text_key": "text",
            "objective": data.NextTokens(), "leave_out": None,
        },
    ),
    "interop.huggingface.load_huggingface": lambda f: Call(
        huggingface.load_huggingface,
        {
            "folder": huggingface_folder(f), "dtype": None, "block_scaled": None, "config": None,
            "execution": models.Execution(), "ignore_fields": (), "on_progress": None,
        },
    ),
    "interop.huggingface.load_peft": lambda f: Call(
        huggingface.load_peft,
        {"model": gpt(), "folder": peft_folder(f), "architecture": None, "ignore_fields": ()},
    ),
    "interop.huggingface.save_peft": lambda f: Call(
        huggingface.save_peft,
        {"model": adapted_gpt(), "folder": f / "adapters", "architecture": None, "base": None, "dtype": None},
    ),
    "interop.huggingface.save_huggingface": lambda f: Call(
        huggingface.save_huggingface,
        {
            "model": gpt(), "folder": f / "saved", "architecture": None, "dtype": None, "block_scaled": None,
            "max_shard_size": 10**9, "like": None, "on_progress": None,
        },
    ),
    "layers.ContextParallelModule.set_context_parallel_group": lambda f: Call(
        layers.DotProductAttention(2, 8).set_context_parallel_group,
        {"cp_group": "context", "cp_global_ranks": None, "cp_stream": None, "cp_comm_type": "p2p"},
    ),
    "layers.DotGeneral.__call__": lambda f: Call(
        layers.DotGeneral(),
        {
            "lhs": X, "rhs": KERNEL, "dimension_numbers": (((2,), (0,)), ((), ())), "precision": None,
            "preferred_element_type": None, "out_sharding": None,
        },
    ),
    "layers.DotProductAttention.__call__": lambda f: Call(
        layers.DotProductAttention(2, 8),
        {
            "query": Q, "key": Q, "value": Q, "attention_mask": None, "q_lengths": None, "kv_lengths": None,
            "packed_seq_params": None, "core_attention_bias_type": "no_bias", "core_attention_bias": None,
            "alibi_slopes": None, "dropout_key": None, "attn_mask_type": "causal", "window_size": None,
            "checkpoint_core_attention": False,
        },
    ),
    "layers.EinsumOp.__call__": lambda f: Call(
        layers.EinsumOp(), {"equation": "bsk,kn->bsn", "lhs": X, "rhs": KERNEL, "out_sharding": None}
    ),
    "layers.Embedding.__call__": lambda f: Call(
        layers.Embedding(16, 16, rngs=nnx.Rngs(0)), {"ids": IDS, "ids_axes": ("batch", "sequence")}
    ),
    "layers.Fp8Padding.__call__": lambda f: Call(layers.Fp8Padding(1), {"inp": KERNEL, "m_splits": [16]}),
    "layers.Fp8Unpadding.__call__": lambda f: Call(layers.Fp8Unpadding(1), {"inp": KERNEL, "m_splits": [16]}),
    "layers.KVCache.append": lambda f: Call(layers.init_kv_cache(2, 8, 2, 8).append, {"k": Q, "v": Q}),
    "layers.KVCache.masks": lambda f: Call(layers.init_kv_cache(2, 8, 2, 8).masks, {"b": 2, "sq": 4}),
    "layers.WindowKVCache.append": lambda f: Call(layers.init_window_kv_cache(2, 4, 4, 2, 8).append, {"k": Q, "v": Q}),
    "layers.WindowKVCache.masks": lambda f: Call(layers.init_window_kv_cache(2, 4, 4, 2, 8).masks, {"b": 2, "sq": 4}),
    "layers.GroupedLinear.__call__": lambda f: Call(
        grouped(), {"x": KERNEL, "group_sizes": [4, 12], "is_first_microbatch": None}
    ),
    "layers.GroupedLinear.row_groups": lambda f: Call(
        grouped().row_groups, {"x": KERNEL, "group_sizes": [4, 12]}
    ),
    "layers.GroupedLinear.operand": lambda f: Call(grouped().operand, {"x": KERNEL}),
    "layers.GroupedLoRA.__call__": lambda f: Call(
        layers.GroupedLoRA(grouped(), 2, rngs=nnx.Rngs(0)),
        {"x": KERNEL, "group_sizes": [4, 12], "is_first_microbatch": None},
    ),
    "layers.MoE.__call__": lambda f: Call(
        layers.MoE(16, 16, ROUTER, rngs=nnx.Rngs(0)),
        {"x": X, "is_first_microbatch": None, "padding_mask": None, "key": None, "experts": None},
    ),
    "layers.Router.__call__": lambda f: Call(router(), {"x": X, "padding_mask": None, "key": None, "experts": None}),
    "layers.expert_rows": lambda f: Call(
        layers.expert_rows, {"model": router(), "batch": 2, "sequence": 4, "dtype": jnp.bfloat16}
    ),
    "layers.Router.with_overflow": lambda f: Call(
        router().with_overflow, {"probs": jnp.ones((2, 4, 2)), "overflow": jnp.float32(1.0)}
    ),
    "layers.Router.capacity": lambda f: Call(router().capacity, {"tokens": 4}),
    "layers.SharedExperts.__call__": lambda f: Call(
        layers.SharedExperts(16, 16, rngs=nnx.Rngs(0)), {"x": X, "is_first_microbatch": None}
    ),
    "layers.expert_metrics": lambda f: Call(layers.expert_metrics, {"model": router()}),
    "layers.set_aux_loss_scale": lambda f: Call(layers.set_aux_loss_scale, {"model": router(), "scale": 2.0}),
    "layers.LayerNormLinear.__call__": lambda f: Call(
        layers.LayerNormLinear(16, 16, rngs=nnx.Rngs(0)),
        {"x": X, "weight": None, "bias": None, "is_first_microbatch": None},
    ),
    "layers.LayerNormMLP.__call__": lambda f: Call(
        layers.LayerNormMLP(16, 16, rngs=nnx.Rngs(0)), {"x": X, "is_first_microbatch": None, "adapters": None}
    ),
    "layers.Linear.__call__": lambda f: Call(
        linear(), {"x": X, "weight": None, "bias": None, "is_first_microbatch": None}
    ),
    "layers.LinearScaling.stretch": lambda f: Call(
        layers.LinearScaling(factor=2.0).stretch, {"frequency": np.ones(4), "base": 1e4}
    ),
    "layers.Llama3Scaling.stretch": lambda f: Call(
        layers.Llama3Scaling().stretch, {"frequency": np.ones(4), "base": 1e4}
    ),
    "layers.YarnScaling.stretch": lambda f: Call(
        layers.YarnScaling(factor=2.0).stretch, {"frequency": np.ones(4), "base": 1e4}
    ),
    "layers.LoRA.__call__": lambda f: Call(
        layers.LoRA(linear(), 2, rngs=nnx.Rngs(0)),
        {"x": X, "weight": None, "bias": None, "is_first_microbatch": None},
    ),
    "layers.quantize_kernels": lambda f: Call(layers.quantize_kernels, {"model": linear()}),
    "layers.cached_kernels": lambda f: Call(
        layers.cached_kernels, {"model": linear(), "cache": layers.quantize_kernels(linear())}
    ),
    "layers.MultiheadAttention.__call__": lambda f: Call(
        layers.MultiheadAttention(16, 2, attention_dropout=0.0, rngs=nnx.Rngs(0)),
        {
            "x": X, "attention_mask": None, "encoder_output": None, "sequence_lengths": None, "encoder_lengths": None,
            "packed_seq_params": None, "rotary_pos_emb": None, "core_attention_bias_type": "no_bias",
            "core_attention_bias": None, "alibi_slopes": None, "attn_mask_type": "causal", "window_size": None,
            "dropout_key": None, "cache": None, "checkpoint_core_attention": False, "is_first_microbatch": None,
        },
    ),
    "layers.MultiheadAttention.set_tensor_parallel_group": lambda f: Call(
        layers.MultiheadAttention(16, 2, rngs=nnx.Rngs(0)).set_tensor_parallel_group, {"tp_group": None}
    ),
    "layers.TensorParallelModule.set_tensor_parallel_group": lambda f: Call(
        linear().set_tensor_parallel_group, {"tp_group": None}
    ),
    "layers.TransformerLayer.set_tensor_parallel_group": lambda f: Call(
        layers.TransformerLayer(16, 16, 2, rngs=nnx.Rngs(0)).set_tensor_parallel_group, {"tp_group": None}
    ),
    "layers.PackedSeqParams.check": lambda f: Call(
        layers.PackedSeqParams(cu_seqlens_q=jnp.array([0, 4])).check, {"q_size": 4, "kv_size": 4}
    ),
    "layers.PackedSeqParams.positions": lambda f: Call(
        layers.PackedSeqParams(cu_seqlens_q=jnp.array([0, 4])).positions, {"size": 4}
    ),
    "layers.PackedSeqParams.segment_ids": lambda f: Call(
        layers.PackedSeqParams(cu_seqlens_q=jnp.array([0, 4])).segment_ids, {"size": 4}
    ),
    "layers.RelativePositionBias.__call__": lambda f: Call(
        layers.RelativePositionBias(2, rngs=nnx.Rngs(0)), {"q_length": 4, "kv_length": 4, "offset": 0}
    ),
    "layers.TransformerLayer.__call__": lambda f: Call(
        layers.TransformerLayer(16, 16, 2, **NO_DROPOUT, rngs=nnx.Rngs(0)),
        {
            "x": X, "attention_mask": None, "encoder_output": None, "enc_dec_attn_mask": None,
            "sequence_lengths": None, "encoder_lengths": None, "packed_seq_params": None, "rotary_pos_emb": None,
            "core_attention_bias_type": "no_bias", "core_attention_bias": None, "alibi_slopes": None,
            "self_attn_mask_type": "causal", "enc_dec_attn_mask_type": None, "dropout_key": None, "cache": None,
            "checkpoint_core_attention": False, "is_first_microbatch": None, "padding_mask": None,
        },
    ),
    "layers._Norm.__call__": lambda f: Call(layers.LayerNorm(16, rngs=nnx.Rngs(0)), {"x": X, "out_axes": None}),
    "layers.alibi_slopes": lambda f: Call(layers.alibi_slopes, {"num_attention_heads": 2}),
    "layers.apply_rotary": lambda f: Call(
        layers.apply_rotary, {"x": Q, "rotary": layers.rotary_embedding(jnp.arange(4), 8)}
    ),
    "layers.clip_qk": lambda f: Call(
        layers.clip_qk,
        {
            "attention": layers.MultiheadAttention(16, 2, return_max_logit=True, rngs=nnx.Rngs(0)),
            "max_logit": jnp.ones(2),
            "threshold": 100.0, "alpha": 0.5,
        },
    ),
    "layers.dequantize_model": lambda f: Call(layers.dequantize_model, {"model": dense_quantized()}),
    "layers.drop_path": lambda f: Call(
        layers.drop_path, {"x": X, "rate": 0.5, "key": KEY, "axes": ("batch", "sequence", "hidden")}
    ),
    "layers.dropout": lambda f: Call(
        layers.dropout, {"x": X, "rate": 0.5, "key": KEY, "axes": ("batch", "sequence", "hidden"), "zigzag": False}
    ),
    "layers.init_kv_cache": lambda f: Call(
        layers.init_kv_cache,
        {"batch": 1, "max_len": 2, "num_gqa_groups": 1, "kv_channels": 8, "dtype": jnp.float32},
    ),
    "layers.init_window_kv_cache": lambda f: Call(
        layers.init_window_kv_cache,
        {"batch": 1, "left": 2, "tokens_per_call": 1, "num_gqa_groups": 1, "kv_channels": 8, "dtype": jnp.float32},
    ),
    "layers.keep_in_high_precision": lambda f: Call(layers.keep_in_high_precision, {"model": linear()}),
    "layers.lora_labels": lambda f: Call(layers.lora_labels, {"params": nnx.state(linear(), nnx.Param)}),
    "layers.make_norm": lambda f: Call(
        layers.make_norm,
        {
            "normalization": "LayerNorm", "hidden_size": 16, "eps": 1e-5, "sequence_parallel": False,
            "params_dtype": jnp.float32, "zero_centered_gamma": False, "rngs": nnx.Rngs(0),
        },
    ),
    "layers.name_modules": lambda f: Call(layers.name_modules, {"model": Two()}),
    "layers.normal_init": lambda f: Call(layers.normal_init, {"std": 0.1}),
    "layers.parameter_axes": lambda f: Call(layers.parameter_axes, {"model": linear()}),
    "layers.prepare_quantization": lambda f: Call(layers.prepare_quantization, {"model": linear(), "recipe": DELAYED}),
    "layers.quantizable_modules": lambda f: Call(layers.quantizable_modules, {"model": Two()}),
    "layers.quantize_model": lambda f: Call(
        layers.quantize_model, {"model": Dense(), "rules": None, "method": Dense.__call__}, (X,), ("model",)
    ),
    "layers.quantize_parameters": lambda f: Call(
        layers.quantize_parameters, {"model": layers.prepare_quantization(linear(), CURRENT), "only_marked": True}
    ),
    "layers.rotary_embedding": lambda f: Call(
        layers.rotary_embedding,
        {
            "positions": jnp.arange(4), "d": 8, "base": 1e4, "rotary_percent": 1.0, "interleaved": False,
            "scaling": None,
        },
    ),
    "layers.scaled_normal_init": lambda f: Call(layers.scaled_normal_init, {"std": 0.1, "num_layers": 1}),
    "linen.LinenModule.nnx_module": lambda f: Call(linen.Linear(16, 16).nnx_module, {"rngs": nnx.Rngs(0)}),
    "linen.aux_losses_scaled": lambda f: Call(linen.aux_losses_scaled, {"scale": 2.0}),
    "linen.dequantize_model": lambda f: Call(linen.dequantize_model, {"model": linen.quantize_model(LinenDense(), X)}),
    "linen.from_nnx": lambda f: Call(linen.from_nnx, {"module": linear()}),
    "linen.logical_axis_rules": lambda f: Call(
        linen.logical_axis_rules, {"mesh": MESH, "rules": sharding.ShardingRules()}
    ),
    "linen.prepare_quantization": lambda f: Call(
        linen.prepare_quantization,
        dict(zip(("model", "variables"), linen_linear(), strict=True)) | {"recipe": CURRENT},
        (X,),
        ("model", "variables", "recipe"),
    ),
    "linen.quantization_report": lambda f: Call(
        linen.quantization_report, {"model": linen.quantize_model(LinenDense(), X)}, (X,), ("model",)
    ),
    "linen.quantize_model": lambda f: Call(
        linen.quantize_model, {"model": LinenDense(), "rules": None}, (X,), ("model",)
    ),
    "linen.to_nnx": lambda f: Call(
        linen.to_nnx, dict(zip(("source", "variables"), linen_linear(), strict=True))
    ),
    "linen.value_and_grad": lambda f: Call(linen.value_and_grad, {"loss_fn": loss_fn, "has_aux": False}),
    "megatron.Float16Module.__call__": lambda f: Call(float16(), {"fp32_output": True}, (X,)),
    "megatron.Float16Module.load_state_dict": lambda f: Call(
        (m := float16()).load_state_dict, {"state_dict": m.state_dict(), "strict": True}
    ),
    "megatron.Float16Module.sharded_state_dict": lambda f: Call(float16().sharded_state_dict, {"prefix": ""}),
    "megatron.Float16Module.state_dict": lambda f: Call(
        float16().state_dict, {"destination": None, "prefix": "", "keep_vars": False}
    ),
    "megatron.Float16Module.state_dict_for_save_checkpoint": lambda f: Call(
        float16().state_dict_for_save_checkpoint, {"prefix": "", "keep_vars": False}
    ),
    "megatron.GlobMatcher.match": lambda f: Call(megatron.GlobMatcher("*", "own").match, {"context": CONTEXT}),
    "megatron.GraphableMegatronModule.get_layer_static_inputs": lambda f: Call(
        Graph(CONFIG).get_layer_static_inputs, {"seq_length": 4, "micro_batch_size": 1}
    ),
    "megatron.GraphableMegatronModule.setup_manual_hooks": lambda f: Call(
        Graph(CONFIG).setup_manual_hooks, {"make_hook_func": lambda: len}
    ),
    "megatron.InferenceCudaRNGStatesTracker.add": lambda f: Call(
        megatron.InferenceCudaRNGStatesTracker().add, {"name": "a", "seed": 1}
    ),
    "megatron.InferenceCudaRNGStatesTracker.fork": lambda f: Call(
        megatron.InferenceCudaRNGStatesTracker().fork, {"name": "a"}
    ),
    "megatron.InferenceCudaRNGStatesTracker.set_states": lambda f: Call(
        megatron.InferenceCudaRNGStatesTracker().set_states, {"states": {}}
    ),
    "megatron.MLP.__call__": lambda f: Call(
        megatron.MLP(CONFIG, rngs=nnx.Rngs(0)), {"hidden_states": X, "is_first_microbatch": None}
    ),
    "megatron.MoELayer.__call__": lambda f: Call(
        moe_layer(),
        {
            "hidden_states": X, "intermediate_tensors": None, "padding_mask": None, "key": None, "experts": None,
            "is_first_microbatch": None,
        },
    ),
    "megatron.MoELayer.backward_dw": lambda f: Call(
        moe_layer().backward_dw, {"routed_experts": True, "shared_experts": False}
    ),
    "megatron.MoELayer.set_layer_number": lambda f: Call(moe_layer().set_layer_number, {"layer_number": 1}),
    "megatron.SharedExpertMLP.__call__": lambda f: Call(
        megatron.SharedExpertMLP(EXPERTS, rngs=nnx.Rngs(0)), {"hidden_states": X, "is_first_microbatch": None}
    ),
    "megatron.TEGroupedLinear.__call__": lambda f: Call(
        megatron.TEColumnParallelGroupedLinear(2, 16, 16, **TE, rngs=nnx.Rngs(0)),
        {"x": KERNEL, "m_splits": [4, 12], "is_first_microbatch": None},
    ),
    "megatron.TEGroupedLinear.operand": lambda f: Call(
        megatron.TEColumnParallelGroupedLinear(2, 16, 16, **TE, rngs=nnx.Rngs(0)).operand, {"x": KERNEL}
    ),
    "megatron.TopKRouter.__call__": lambda f: Call(
        megatron_router(),
        {"input": X, "padding_mask": None, "key": None, "experts": None, "return_routing": False},
    ),
    "megatron.TopKRouter.set_layer_number": lambda f: Call(
        megatron_router().set_layer_number, {"layer_number": 1}
    ),
    "megatron.TopKRouter.set_target_indices": lambda f: Call(
        megatron_router().set_target_indices, {"topk_indices": jnp.zeros((2, 4, 2), jnp.int32)}
    ),
    "megatron.MLASelfAttention.__call__": lambda f: Call(
        megatron.MLASelfAttention(LATENTS, rngs=nnx.Rngs(0)),
        {
            "x": X, "attention_mask": None, "encoder_output": None, "packed_seq_params": None, "rotary_pos_emb": None,
            "cache": None,
        },
    ),
    "megatron.MegatronModule.set_symmetric_ar": lambda f: Call(
        megatron.MLP(CONFIG, rngs=nnx.Rngs(0)).set_symmetric_ar, {"set_to": None}
    ),
    "megatron.MegatronModule.sharded_state_dict": lambda f: Call(
        megatron.MLP(CONFIG, rngs=nnx.Rngs(0)).sharded_state_dict,
        {"prefix": "", "sharded_offsets": (), "metadata": None},
    ),
    "megatron.MegatronModule.state_dict_for_save_checkpoint": lambda f: Call(
        megatron.MLP(CONFIG, rngs=nnx.Rngs(0)).state_dict_for_save_checkpoint, {"prefix": "", "keep_vars": False}
    ),
    "recipe.ModuleRecipe.resolve": lambda f: Call(
        recipe.ModuleRecipe(training=None).resolve, {"ambient": None, "training": True}
    ),
    "recipe.ModuleRecipe.overrides": lambda f: Call(
        recipe.ModuleRecipe(training=None).overrides, {"quantized": True, "training": True}
    ),
    "megatron.RNGStatesTracker.add": lambda f: Call(tracker().add, {"name": "a", "seed": 2}),
    "megatron.RNGStatesTracker.fork": lambda f: Call(tracker().fork, {"name": "model-parallel-rng"}),
    "megatron.RNGStatesTracker.set_states": lambda f: Call(
        tracker().set_states, {"states": tracker().get_states()}
    ),
    "megatron.RecipeConfig.first_match": lambda f: Call(rules().first_match, {"context": CONTEXT}),
    "megatron.RecipeConfig.match": lambda f: Call(rules().match, {"operator_context": CONTEXT}),
    "megatron.RecipeConfig.match_to_config_key": lambda f: Call(
        rules().match_to_config_key, {"operator_context": CONTEXT}
    ),
    "megatron.RecipeConfig.from_config_dict": lambda f: Call(
        megatron.RecipeConfig.from_config_dict, {"config": RULES, "factory_modules": ()}
    ),
    "megatron.RecipeConfig.from_yaml_file": lambda f: Call(
        megatron.RecipeConfig.from_yaml_file, {"recipe_yaml_path": yaml(f), "factory_modules": ()}
    ),
    "megatron.StateDicts.load_state_dict": lambda f: Call(
        (m := te()).load_state_dict, {"state_dict": m.state_dict(), "strict": True}
    ),
    "megatron.StateDicts.state_dict": lambda f: Call(
        te().state_dict, {"destination": None, "prefix": "", "keep_vars": False}
    ),
    "megatron.TEDotProductAttention.__call__": lambda f: Call(
        attention(),
        {
            "query": Q, "key": Q, "value": Q, "attention_mask": None, "attn_mask_type": None, "attention_bias": None,
            "packed_seq_params": None, "num_splits": None,
        },
    ),
    "megatron.TEDotProductAttention.set_tensor_parallel_group": lambda f: Call(
        attention().set_tensor_parallel_group, {"tp_group": None}
    ),
    "megatron.TEDotProductAttention.sharded_state_dict": lambda f: Call(
        attention().sharded_state_dict, {"prefix": "", "sharded_offsets": (), "metadata": None}
    ),
    "megatron.TERowParallelLinear.sharded_state_dict": lambda f: Call(
        megatron.TERowParallelLinear(16, 16, **TE, input_is_parallel=True, rngs=nnx.Rngs(0)).sharded_state_dict,
        {"prefix": "", "sharded_offsets": (), "metadata": None},
    ),
    "megatron.TELayer.finish_init": lambda f: Call(te().finish_init, {"quantization_config": None}),
    "megatron.TELayer.will_execute_quantized": lambda f: Call(
        te().will_execute_quantized, {"is_context_quantized": True}
    ),
    "megatron.TELayerNormColumnParallelLinear.__call__": lambda f: Call(
        fused(), {"x": X, "is_first_microbatch": None}
    ),
    "megatron.TELinear.__call__": lambda f: Call(te(), {"x": X, "is_first_microbatch": None}),
    "megatron.TELinear.sharded_state_dict": lambda f: Call(
        megatron.TELinear(
            16, 16, **{k: v for k, v in TE.items() if k != "is_expert"}, skip_weight_param_allocation=False,
            parallel_mode="duplicated", rngs=nnx.Rngs(0)
        ).sharded_state_dict,
        {"prefix": "", "sharded_offsets": (), "metadata": None},
    ),
    "megatron.TEColumnParallelLinear.sharded_state_dict": lambda f: Call(
        te().sharded_state_dict, {"prefix": "", "sharded_offsets": (), "metadata": None}
    ),
    "megatron.TEQuantizationParams.parse_from_config": lambda f: Call(
        megatron.TEQuantizationParams.parse_from_config, {"quant_config": quant_config()}
    ),
    "megatron.TEQuantizationParams.recipe_for": lambda f: Call(params().recipe_for, {"training": True}),
    "megatron.TEQuantizationRecipe.parse_from_config": lambda f: Call(
        megatron.TEQuantizationRecipe.parse_from_config, {"quant_config": {}, "factory_modules": ()}
    ),
    "megatron.TransformerLayer.forward": lambda f: Call(
        megatron.TransformerLayer(CONFIG, rngs=nnx.Rngs(0)).forward,
        {
            "hidden_states": X, "attention_mask": None, "context": None, "context_mask": None,
            "rotary_pos_emb": None, "attention_bias": None, "packed_seq_params": None, "dropout_key": None,
            "padding_mask": None,
        },
    ),
    "megatron.TransformerLayer.get_layer_static_inputs": lambda f: Call(
        megatron.TransformerLayer(CONFIG, rngs=nnx.Rngs(0)).get_layer_static_inputs,
        {"seq_length": 4, "micro_batch_size": 1},
    ),
    "megatron.apply_quantization_config": lambda f: Call(
        megatron.apply_quantization_config, {"model": Two(), "recipe_config": rules()}
    ),
    "megatron.condition_init_method": lambda f: Call(
        megatron.condition_init_method, {"config": TE["config"], "init_method": TE["init_method"]}
    ),
    "megatron.conversion_helper": lambda f: Call(
        megatron.conversion_helper, {"val": (X,), "conversion": lambda x: x}
    ),
    "megatron.convert_module_to_dtype_except_fp32_marked": lambda f: Call(
        megatron.convert_module_to_dtype_except_fp32_marked, {"module": linear(), "dtype": jnp.bfloat16}
    ),
    "megatron.float16_to_fp32": lambda f: Call(megatron.float16_to_fp32, {"val": X}),
    "megatron.fp32_to_float16": lambda f: Call(
        megatron.fp32_to_float16, {"val": X, "float16_convertor": lambda x: x.astype(jnp.bfloat16)}
    ),
    "megatron.get_cuda_rng_tracker": lambda f: Call(
        megatron.get_cuda_rng_tracker,
        {"use_te_rng_tracker": False, "inference_rng_tracker": False, "use_cudagraphable_rng": False},
    ),
    "megatron.get_extra_te_kwargs": lambda f: Call(megatron.get_extra_te_kwargs, {"config": TE["config"]}),
    "megatron.get_fp8_autocast_for_quant_params": lambda f: Call(
        megatron.get_fp8_autocast_for_quant_params, {"qparams": params(), "training": True}
    ),
    "megatron.get_fp8_autocast_for_quant_recipe": lambda f: Call(
        megatron.get_fp8_autocast_for_quant_recipe, {"qrecipe": megatron.TEQuantizationRecipe()}
    ),
    "megatron.get_quant_config_or_none": lambda f: Call(
        megatron.get_quant_config_or_none, {"module_path": "a", "recipe": rules()}
    ),
    "megatron.get_should_context_be_quantized_params": lambda f: Call(
        megatron.get_should_context_be_quantized_params,
        {"qparams": params(), "training": True, "is_context_quantized": False},
    ),
    "megatron.get_should_context_be_quantized_recipe": lambda f: Call(
        megatron.get_should_context_be_quantized_recipe,
        {"qrecipe": megatron.TEQuantizationRecipe(), "is_original_context_quantized": False},
    ),
    "megatron.initialize_rng_tracker": lambda f: Call(
        megatron.initialize_rng_tracker,
        {
            "use_te_rng_tracker": False, "inference_rng_tracker": False, "use_cudagraphable_rng": False,
            "force_reset": False,
        },
    ),
    "megatron.is_layer_window_attention": lambda f: Call(
        megatron.is_layer_window_attention,
        {"window_size": (1, 0), "window_attn_skip_freq": 2, "layer_number": 1},
    ),
    "megatron.load_quantization_recipe": lambda f: Call(
        megatron.load_quantization_recipe, {"recipe_path": yaml(f), "factory_modules": ()}
    ),
    "megatron.load_state_dict": lambda f: Call(
        megatron.load_state_dict,
        {"module": (m := linear()), "arrays": megatron.state_dict(m), "strict": True, "prefix": ""},
    ),
    "megatron.mark_keep_in_fp32": lambda f: Call(megatron.mark_keep_in_fp32, {"variable_or_module": linear()}),
    "megatron.match_context": lambda f: Call(megatron.match_context, {"module_path": "layers.0.proj"}),
    "megatron.model_parallel_cuda_manual_seed": lambda f: Call(
        megatron.model_parallel_cuda_manual_seed,
        {
            "seed": 1, "te_rng_tracker": False, "inference_rng_tracker": False, "use_cudagraphable_rng": False,
            "tp_rank": 0, "ep_rank": 0, "etp_rank": 0, "force_reset_rng": True,
        },
    ),
    "megatron.param_is_not_shared": lambda f: Call(megatron.param_is_not_shared, {"param": linear().kernel}),
    "megatron.recipe_from_config": lambda f: Call(megatron.recipe_from_config, {"config": CONFIG}),
    "megatron.resolve_factory": lambda f: Call(megatron.resolve_factory, {"path": "math.sqrt"}),
    "megatron.set_save_original_input": lambda f: Call(megatron.set_save_original_input, {"module": linear()}),
    "megatron.split_te_layernorm_column_parallel_linear": lambda f: Call(
        megatron.split_te_layernorm_column_parallel_linear,
        {"fused_layer": fused(), "config": CONFIG, "init_method": None, "tp_group": None},
    ),
    "megatron.state_dict": lambda f: Call(
        megatron.state_dict, {"module": linear(), "prefix": "", "keep_vars": False}
    ),
    "megatron.te_checkpoint": lambda f: Call(
        megatron.te_checkpoint,
        {
            "forward_func": jnp.sin, "distribute_saved_activations": False, "get_rng_state_tracker": None,
            "tp_group": None,
        },
        (X,),
        ("forward_func", "distribute_saved_activations", "get_rng_state_tracker", "tp_group"),
    ),
    "megatron.vocab_parallel_cross_entropy": lambda f: Call(
        megatron.vocab_parallel_cross_entropy,
        {"vocab_parallel_logits": X, "target": IDS, "label_smoothing": 0.0, "tp_group": None, "out_axes": None},
    ),
    "metrics.MetricsLog.chart": lambda f: Call(metrics_log(f).chart, {"step": 1, "values": {"loss": 1.0}}),
    "metrics.MetricsLog.write": lambda f: Call(
        metrics_log(f).write, {"step": 1, "values": {"loss": 1.0}, "chart": True}
    ),
    "metrics.PrecisionLog.write": lambda f: Call(
        metrics.PrecisionLog(losses(f)).write, {"step": 1, "statistics": []}
    ),
    "metrics.Speed.done": lambda f: Call(speed().done, {"step": 1}),
    "metrics.Speed.pause": lambda f: Call(speed().pause, {"recurs": True}),
    "metrics.Speed.seconds_left": lambda f: Call(speed().seconds_left, {"steps": 1}),
    "metrics.StepTrace.after": lambda f: Call(metrics.StepTrace(f / "trace", 5, 6).after, {"step": 1}),
    "metrics.StepTrace.before": lambda f: Call(metrics.StepTrace(f / "trace", 5, 6).before, {"step": 1}),
    "metrics.StepWork.rates": lambda f: Call(metrics.StepWork(tokens=1).rates, {"seconds": 1.0}),
    "metrics.kernel_kind": lambda f: Call(metrics.kernel_kind, {"name": "gemm"}),
    "metrics.peak_flops": lambda f: Call(metrics.peak_flops, {"device": jax.devices()[0]}),
    "metrics.plot_experts": lambda f: Call(metrics.plot_experts, {"directory": losses(f)}),
    "metrics.plot_losses": lambda f: Call(
        metrics.plot_losses, {"directory": losses(f), "unit": "token", "bigram_entropy": None}
    ),
    "metrics.plot_precision": lambda f: Call(metrics.plot_precision, {"directory": losses(f)}),
    "metrics.train_flops": lambda f: Call(
        metrics.train_flops, {"config": CONFIG, "vocab_size": 16, "batch_size": 1, "sequence_length": 4}
    ),
    "models.BertModel.__call__": lambda f: Call(
        bert(), {"tokens": IDS, "tokentypes": None, "lengths": None, "dropout_key": None}
    ),
    "models.BertModel.embed_inputs": lambda f: Call(
        bert().embed_inputs, {"tokens": IDS, "tokentypes": None, "lengths": None, "dropout_key": None}
    ),
    "models.BertModel.compute_loss": lambda f: Call(
        bert().compute_loss,
        {"y": X, "labels": IDS, "loss_mask": None, "options": ops.LossOptions(), "reduction": "mean"},
    ),
    "models.BertModel.encode": lambda f: Call(
        bert().encode, {"tokens": IDS, "tokentypes": None, "lengths": None, "dropout_key": None}
    ),
    "models.BertModel.loss": lambda f: Call(
        bert().loss,
        {
            "tokens": IDS, "labels": IDS, "loss_mask": None, "tokentypes": None, "lengths": None, "dropout_key": None,
            "options": ops.LossOptions(), "reduction": "mean",
        },
    ),
    "models.BertModel.pool": lambda f: Call(
        models.BertModel(**MODEL, add_pooler=True, rngs=nnx.Rngs(0)).pool, {"encoded": X}
    ),
    "models.Execution.of_stack": lambda f: Call(models.Execution().of_stack, {"config": CONFIG, "mask_types": None}),
    "models.Execution.check": lambda f: Call(models.Execution().check, {"config": CONFIG}),
    "models.GPTModel.__call__": lambda f: Call(
        gpt(), {"tokens": IDS, "positions": None, "dropout_key": None, "cache": None, "padding_mask": None}
    ),
    "models.GPTModel.embed_inputs": lambda f: Call(
        gpt().embed_inputs, {"tokens": IDS, "positions": None, "dropout_key": None, "padding_mask": None}
    ),
    "models.GPTModel.compute_loss": lambda f: Call(
        gpt().compute_loss,
        {"y": X, "labels": IDS, "loss_mask": None, "options": ops.LossOptions(), "reduction": "mean"},
    ),
    "models.StackInput.output": lambda f: Call(gpt().embed_inputs(IDS).output, {"layers": list(gpt().layers)}),
    "models.GPTModel.init_cache": lambda f: Call(gpt().init_cache, {"batch": 1, "max_len": 4}),
    "models.GPTModel.loss": lambda f: Call(
        gpt().loss,
        {
            "tokens": IDS, "labels": IDS, "loss_mask": None, "dropout_key": None, "options": ops.LossOptions(),
            "reduction": "mean", "positions": None, "padding_mask": None,
        },
    ),
    "models.GPTModel.max_logits": lambda f: Call(gpt().max_logits, {"tokens": IDS}),
    "models.GPTModel.clip_qk": lambda f: Call(
        gpt(config=config.TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, qk_clip=True)).clip_qk,
         {"max_logits": jnp.ones((1, 2))}),
    "models.multi_token_metrics": lambda f: Call(models.multi_token_metrics, {"model": gpt()}),
    "models.MegatronGPTModel.embed_inputs": lambda f: Call(
        megatron_gpt().embed_inputs, {"tokens": IDS, "positions": None, "dropout_key": None}
    ),
    "models.MegatronGPTModel.forward": lambda f: Call(
        megatron_gpt().forward,
        {
            "input_ids": IDS, "position_ids": None, "attention_mask": None, "decoder_input": None, "labels": None,
            "runtime_gather_output": None, "dropout_key": None, "cache": None, "padding_mask": None,
        },
    ),
    "models.MegatronGPTModel.get_layer_static_inputs": lambda f: Call(
        megatron_gpt().get_layer_static_inputs, {"seq_length": 4, "micro_batch_size": 1}
    ),
    "models.T5Model.__call__": lambda f: Call(
        t5(), {"encoder_tokens": IDS, "decoder_tokens": IDS, "encoder_lengths": None, "dropout_key": None}
    ),
    "models.T5Model.embed_inputs": lambda f: Call(
        t5().embed_inputs, {"encoder_tokens": IDS, "decoder_tokens": IDS, "encoder_lengths": None, "dropout_key": None}
    ),
    "models.T5Model.compute_loss": lambda f: Call(
        t5().compute_loss,
        {
            "y": X, "labels": IDS, "loss_mask": None, "dropout_key": None, "options": ops.LossOptions(),
            "reduction": "mean",
        },
    ),
    "models.T5Model.decode": lambda f: Call(
        t5().decode, {"tokens": IDS, "encoded": X, "encoder_lengths": None, "dropout_key": None}
    ),
    "models.T5Model.encode": lambda f: Call(
        t5().encode, {"tokens": IDS, "encoder_lengths": None, "dropout_key": None}
    ),
    "models.T5Model.loss": lambda f: Call(
        t5().loss,
        {
            "encoder_tokens": IDS, "decoder_tokens": IDS, "labels": IDS, "loss_mask": None, "encoder_lengths": None,
            "dropout_key": None, "options": ops.LossOptions(), "reduction": "mean",
        },
    ),
    "models.generate": lambda f: Call(
        models.generate,
        {
            "model": gpt(), "prompt": IDS, "steps": 1, "key": KEY, "temperature": 1.0, "top_k": None,
            "lengths": None,
        },
    ),
    "models.runs_scanned": lambda f: Call(models.runs_scanned, {"scan": "auto", "num_layers": 1}),
    "models.upcycle": lambda f: Call(
        models.upcycle, {"model": gpt(), "rngs": nnx.Rngs(0), "num_moe_experts": 2}
    ),
    "models.transformer_layer": lambda f: Call(
        models.transformer_layer,
        {
            "config": CONFIG, "number": 1, "layer_type": "encoder", "self_attn_mask_type": "causal",
            "post_norm": False, "rngs": nnx.Rngs(0),
        },
    ),
    "ops.LossOptions.ignored": lambda f: Call(ops.LossOptions().ignored, {"labels": IDS}),
    "ops.activation": lambda f: Call(
        ops.activation,
        {"x": jnp.ones((2, 4, 1, 16)), "name": "gelu", "params": None, "out_axes": None, "backend": None},
    ),
    "ops.attention_spec": lambda f: Call(
        ops.attention_spec,
        {"qkv": (Q, Q, Q), "mask_type": "causal", "scale": None, "dropout_rate": 0.0, "window": None},
    ),
    "ops.dense": lambda f: Call(
        ops.dense,
        {
            "x": X, "kernel": KERNEL, "bias": None, "recipe": None, "state": None, "grad_sink": None,
            "options": ops.LinearOptions(), "backend": None,
        },
    ),
    "ops.dot_product_attention": lambda f: Call(
        ops.dot_product_attention,
        {
            "qkv": (Q, Q, Q), "mask_type": "causal", "mask": None, "q_lengths": None, "kv_lengths": None,
            "segments": None, "window": None, "bias_type": "no_bias", "bias": None, "softmax_type": "vanilla",
            "softmax_offset": None, "logit_softcap": None, "scale": None, "dropout_rate": 0.0, "dropout_key": None,
            "return_max_logit": False, "context_parallel": ops.ContextParallel(), "out_axes": None, "recipe": None,
            "state": None, "evaluation": False, "backend": None,
        },
    ),
    "ops.explain_backend": lambda f: Call(
        ops.explain_backend,
        {
            "op": "dense", "recipe": None, "attention": None, "activation": None, "backend": None, "unsharded": None,
            "stored": None, "dtype": jnp.bfloat16, "params_dtype": jnp.float32,
        },
    ),
    "ops.group_alignment": lambda f: Call(ops.group_alignment, {"recipe": CURRENT}),
    "ops.grouped_dense": lambda f: Call(
        ops.grouped_dense,
        {
            "x": KERNEL, "kernel": jnp.ones((2, 16, 16)), "bias": None,
            "groups": ops.RowGroups(sizes=jnp.array([4, 12]), rows=16), "recipe": None, "state": None,
            "grad_sink": None, "options": ops.LinearOptions(), "backend": None,
        },
    ),
    "ops.row_bound": lambda f: Call(ops.row_bound, {"rows": 4, "groups": 2, "alignment": 16}),
    "ops.layernorm": lambda f: Call(
        ops.layernorm,
        {
            "x": X, "scale": jnp.ones(16), "bias": jnp.ones(16), "norm": ops.NormSpec(), "out_axes": None,
            "backend": None,
        },
    ),
    "ops.layernorm_dense": lambda f: Call(
        ops.layernorm_dense,
        {
            "x": X, "scale": jnp.ones(16), "ln_bias": jnp.ones(16), "linear": ops.LinearWeights(KERNEL),
            "norm": ops.NormSpec(), "recipe": None, "options": ops.LinearOptions(), "backend": None,
        },
    ),
    "ops.layernorm_mlp": lambda f: Call(
        ops.layernorm_mlp,
        {
            "x": X, "scale": jnp.ones(16), "ln_bias": jnp.ones(16), "wi": ops.LinearWeights(jnp.ones((16, 1, 16))),
            "wo": ops.LinearWeights(KERNEL), "options": ops.MlpOptions(), "recipe": None, "backend": None,
        },
    ),
    "ops.linear_cross_entropy": lambda f: Call(
        ops.linear_cross_entropy,
        {
            "x": X, "kernel": KERNEL, "labels": IDS, "chunks": 1, "weights": None, "options": ops.LossOptions(),
            "reduction": "mean", "out_axes": None,
        },
    ),
    "ops.quantize_kernel": lambda f: Call(
        ops.quantize_kernel,
        {
            "kernel": KERNEL, "recipe": CURRENT, "state": None, "kernel_axes": None, "portable": True,
            "backend": None,
        },
    ),
    "ops.reorder_to_zigzag": lambda f: Call(ops.reorder_to_zigzag, {"x": X, "ranks": 2, "axis": 1}),
    "ops.undo_zigzag": lambda f: Call(ops.undo_zigzag, {"x": X, "ranks": 2, "axis": 1}),
    "ops.zigzag_positions": lambda f: Call(ops.zigzag_positions, {"s": 4, "ranks": 2}),
    "ops.scan_layers": lambda f: Call(
        ops.scan_layers, {"body": lambda x, layer: (x * layer, None), "init": jnp.ones(2), "layers": [jnp.ones(2)] * 2}
    ),
    "ops.segments_from_cu_seqlens": lambda f: Call(
        ops.segments_from_cu_seqlens,
        {
            "cu_seqlens_q": jnp.array([0, 4]), "cu_seqlens_kv": None, "cu_seqlens_q_padded": None,
            "cu_seqlens_kv_padded": None,
        },
    ),
    "ops.softmax_cross_entropy": lambda f: Call(
        ops.softmax_cross_entropy,
        {
            "logits": X, "labels": IDS, "weights": None, "options": ops.LossOptions(), "reduction": "mean",
            "out_axes": None,
        },
    ),
    "ops.use_backend": lambda f: Call(ops.use_backend, {"name": "xla"}),
    "config.PipelineConfig.parse": lambda f: Call(config.PipelineConfig.parse, {"text": "1f1b"}),
    "training.pipeline.make_schedule": lambda f: Call(
        pipeline.make_schedule, {"name": "1f1b", "stages": 2, "microbatches": 2, "virtual_stages": 1}
    ),
    "training.pipeline.split_layers": lambda f: Call(
        pipeline.split_layers, {"num_layers": 4, "chunks": 2, "first": None, "last": None}
    ),
    "quantize.BlockQuantizer.quantize": lambda f: Call(
        quantize.BlockQuantizer(dtype=jnp.float8_e4m3fn).quantize,
        {"x": KERNEL, "scale": None, "axis": 1, "columnwise": False},
    ),
    "quantize.MXQuantizer.quantize": lambda f: Call(
        quantize.MXQuantizer(dtype=jnp.float8_e4m3fn).quantize,
        {"x": jnp.ones((32, 32)), "scale": None, "axis": 1, "columnwise": False},
    ),
    "quantize.NVFP4Quantizer.quantize": lambda f: Call(
        quantize.NVFP4Quantizer().quantize, {"x": KERNEL, "scale": None, "axis": 1, "columnwise": False}
    ),
    "quantize.TensorQuantizer.quantize": lambda f: Call(
        TENSOR.quantize, {"x": KERNEL, "scale": None, "axis": 1, "columnwise": False}
    ),
    "quantize.TensorQuantizer.scale_for": lambda f: Call(
        TENSOR.scale_for, {"x_amax": jnp.float32(1), "scale": None}
    ),
    "quantize.Observer.record": lambda f: Call(
        quantize.Observer().record,
        {
            "name": "a", "role": "x", "quantizer": TENSOR,
            "statistics": quantize.quantization_statistics(KERNEL, TENSOR),
        },
    ),
    "quantize.QuantizedKernel.of_layer": lambda f: Call(quantized().of_layer, {"ndim": 2}),
    "quantize.QuantizedKernel.partition_specs": lambda f: Call(
        quantized().partition_specs, dict.fromkeys(("kernel", "per_device", "scales"), PartitionSpec())
    ),
    "quantize.QuantizedKernel.taken_over": lambda f: Call(quantized().taken_over, {"exact": KERNEL}),
    "quantize.QuantizedTensor.represents": lambda f: Call(tensor().represents, {"x": KERNEL}),
    "quantize.as_float32": lambda f: Call(quantize.as_float32, {"quantizers": {}}),
    "quantize.init_attention_state": lambda f: Call(quantize.init_attention_state, {"recipe": DELAYED}),
    "quantize.init_gemm_state": lambda f: Call(quantize.init_gemm_state, {"recipe": DELAYED}),
    "quantize.merge_quantizers": lambda f: Call(quantize.merge_quantizers, {"stacked": {}}),
    "quantize.observe_quantization": lambda f: Call(quantize.observe_quantization, {"observer": None}),
    "quantize.quantization_statistics": lambda f: Call(
        quantize.quantization_statistics, {"x": KERNEL, "quantizer": TENSOR, "scale": None, "axis": -1}
    ),
    "quantize.quantize": lambda f: Call(
        quantize.quantize, {"x": KERNEL, "quantizer": TENSOR, "scale": None, "axis": -1, "columnwise": False}
    ),
    "quantize.quantizer_for": lambda f: Call(quantize.quantizer_for, {"recipe": CURRENT, "role": "x"}),
    "quantize.with_max_gradients": lambda f: Call(quantize.with_max_gradients, {"quantizers": {}}),
    "quantize.write_back": lambda f: Call(
        quantize.write_back, {"old": {}, "gradient": {}, "keep_old": None}
    ),
    "random.model_parallel_seed": lambda f: Call(random.model_parallel_seed, {"seed": 1, "tracker": None}),
    "random.model_parallel_seeds": lambda f: Call(
        random.model_parallel_seeds,
        {"seed": 1, "tp_rank": 0, "ep_rank": 0, "etp_rank": 0, "pp_rank": 0, "dp_rank": 0},
    ),
    "recipe.autocast": lambda f: Call(recipe.autocast, {"recipe": None, "enabled": True}),
    "recipe.recipe_from_name": lambda f: Call(recipe.recipe_from_name, {"name": "delayed"}),
    "remat.recompute_policy": lambda f: Call(remat.recompute_policy, {"policy": "full"}),
    "remat.remat": lambda f: Call(
        remat.remat,
        {"function": jnp.sin, "policy": "full", "distribute_saved_activations": False},
        (X,),
        ("function",),
    ),
    "sharding.Network.parse": lambda f: Call(sharding.Network.parse, {"text": "intra_host=1"}),
    "sharding.Network.seconds": lambda f: Call(
        sharding.Network().seconds, {"row": rows(), "mesh_shape": {"data": 2}}
    ),
    "sharding.ShardingReport.draw": lambda f: Call(report().draw, {"path": None}),
    "sharding.ShardingRules.mesh_axes": lambda f: Call(sharding.ShardingRules().mesh_axes, {"name": "batch"}),
    "sharding.auto_region": lambda f: Call(sharding.auto_region, {"fn": jnp.sin, "out_axes": None}),
    "sharding.communication_report": lambda f: Call(
        sharding.communication_report, {"program": lowered(), "mesh": MESH, "network": None}
    ),
    "sharding.constrain": lambda f: Call(sharding.constrain, {"x": X, "axes": ("batch", None, None)}),
    "sharding.logical_to_spec": lambda f: Call(
        sharding.logical_to_spec, {"axes": ("batch",), "mesh": MESH, "rules": None}
    ),
    "sharding.make_mesh": lambda f: Call(
        sharding.make_mesh,
        {"config": config.ParallelConfig(), "axis_type": "auto", "devices": jax.devices()[:1]},
    ),
    "sharding.named_sharding": lambda f: Call(sharding.named_sharding, {"axes": ("batch",), "mesh": MESH}),
    "sharding.sharding_report": lambda f: Call(
        sharding.sharding_report, {"model_or_state": linear(), "mesh": MESH}
    ),
    "sharding.shardings_of": lambda f: Call(
        sharding.shardings_of, {"tree": nnx.state(linear(), nnx.Param), "mesh": MESH}
    ),
    "sharding.use_rules": lambda f: Call(sharding.use_rules, {"rules": sharding.ShardingRules()}),
    "te_pytorch.DotProductAttention.__call__": lambda f: Call(
        te_pytorch.DotProductAttention(2, 8, qkv_format="bshd"),
        {"query_layer": Q, "key_layer": Q, "value_layer": Q, "attention_mask": None, "qkv_format": None},
    ),
    "te_pytorch.GroupedLinear.__call__": lambda f: Call(
        te_pytorch.GroupedLinear(2, 16, 16, rngs=nnx.Rngs(0)),
        {"inp": X[0], "m_splits": [2, 2], "is_first_microbatch": None},
    ),
    "te_pytorch.LayerNormLinear.__call__": lambda f: Call(
        te_pytorch.LayerNormLinear(16, 16, rngs=nnx.Rngs(0)), {"inp": X, "is_first_microbatch": None}
    ),
    "te_pytorch.LayerNormMLP.__call__": lambda f: Call(
        te_pytorch.LayerNormMLP(16, 16, rngs=nnx.Rngs(0)), {"inp": X, "is_first_microbatch": None}
    ),
    "te_pytorch.Linear.__call__": lambda f: Call(
        te_pytorch.Linear(16, 16, rngs=nnx.Rngs(0)), {"inp": X, "is_first_microbatch": None}
    ),
    "te_pytorch.MultiheadAttention.__call__": lambda f: Call(
        te_pytorch.MultiheadAttention(16, 2, attention_dropout=0.0, qkv_format="bshd", rngs=nnx.Rngs(0)),
        {
            "hidden_states": X, "attention_mask": None, "encoder_output": None, "attn_mask_type": None,
            "window_size": None, "bottom_right_diagonal": None, "is_first_microbatch": None,
            "checkpoint_core_attention": False, "inference_params": None, "rotary_pos_emb": None,
            "core_attention_bias_type": "no_bias", "core_attention_bias": None, "alibi_slopes": None,
        },
    ),
    "te_pytorch.TransformerLayer.__call__": lambda f: Call(
        te_pytorch.TransformerLayer(16, 16, 2, **NO_DROPOUT, attn_input_format="bshd", rngs=nnx.Rngs(0)),
        {
            "hidden_states": X, "attention_mask": None, "self_attn_mask_type": None, "window_size": None,
            "bottom_right_diagonal": None, "encoder_output": None, "enc_dec_attn_mask": None,
            "enc_dec_attn_mask_type": None, "enc_dec_window_size": None, "enc_dec_bottom_right_diagonal": None,
            "is_first_microbatch": None, "checkpoint_core_attention": False, "inference_params": None,
            "rotary_pos_emb": None, "core_attention_bias_type": "no_bias", "core_attention_bias": None,
            "alibi_slopes": None,
        },
    ),
    "te_pytorch.autocast": lambda f: Call(
        te_pytorch.autocast,
        {"enabled": True, "calibrating": False, "recipe": DELAYED, "amax_reduction_group": None},
    ),
    "te_pytorch.checkpoint": lambda f: Call(
        te_pytorch.checkpoint,
        {
            "function": jnp.sin, "distribute_saved_activations": False, "get_rng_state_tracker": None,
            "get_cuda_rng_tracker": None, "tp_group": None, "use_reentrant": True,
        },
        (X,),
        ("function",),
    ),
    "te_pytorch.fp8_autocast": lambda f: Call(
        te_pytorch.fp8_autocast,
        {"enabled": True, "calibrating": False, "fp8_recipe": DELAYED, "fp8_group": None},
    ),
    "interop.megatron.load_megatron": lambda f: Call(
        megatron_files.load_megatron,
        {
            "path": megatron_folder(f), "iteration": None, "vocab_size": 16, "args": None, "dtype": None,
            "config": None, "execution": models.Execution(), "on_progress": None,
        },
    ),
    "interop.torch.load_te_state_dict": lambda f: Call(
        torch.load_te_state_dict,
        {
            "module": linear(), "prefix": "",
            "arrays": {"weight": np.ones((16, 16), np.float32), "bias": np.ones(16, np.float32)},
        },
    ),
    "interop.megatron.read_megatron": lambda f: Call(
        megatron_files.read_megatron,
        {"path": megatron_folder(f), "iteration": None, "gated": None, "vocab_size": None},
    ),
    "interop.torch.read_torch_distributed": lambda f: Call(
        torch.read_torch_distributed, {"folder": distributed(f)}
    ),
    "interop.torch.read_torch_file": lambda f: Call(torch.read_torch_file, {"path": torch_file(f)}),
    "interop.megatron.save_megatron": lambda f: Call(
        megatron_files.save_megatron,
        {
            "model": gpt(), "path": f / "saved_megatron", "format": "torch", "tensor_parallel": 1, "dtype": None,
            "on_progress": None,
        },
    ),
    "interop.torch.write_torch_distributed": lambda f: Call(
        torch.write_torch_distributed,
        {"folder": f / "written", "entries": {"a": np.ones(2, np.float32)}},
    ),
    "interop.torch.write_torch_file": lambda f: Call(
        torch.write_torch_file, {"path": f / "written.pt", "value": {"a": np.ones(2, np.float32)}}
    ),
    "training.ConstantLossScale.update": lambda f: Call(
        training.ConstantLossScale().update, {"finite": jnp.bool_(True)}
    ),
    "training.DynamicLossScale.update": lambda f: Call(
        training.DynamicLossScale().update, {"finite": jnp.bool_(True)}
    ),
    "training.LossScale.scale_loss": lambda f: Call(
        training.ConstantLossScale().scale_loss, {"loss": jnp.float32(1)}
    ),
    "training.LossScale.unscale": lambda f: Call(
        training.ConstantLossScale().unscale, {"grads": {"a": jnp.ones(2)}}
    ),
    "training.Optimizer.update": lambda f: Call(
        training.Optimizer(m := linear(), optax.sgd(0.1)).update,
        {"model": m, "grads": nnx.state(linear(), nnx.Param)},
        (),
        ("model", "grads"),
    ),
    "training.abstract_train_state": lambda f: Call(
        training.abstract_train_state,
        {
            "model_or_fn": linear(), "tx": optax.sgd(0.1), "key": KEY, "scaler": None, "mesh": None,
            "fp8_param": False, "distributed_optimizer": False,
        },
    ),
    "training.create_train_state": lambda f: Call(
        training.create_train_state,
        {
            "model_or_fn": linear(), "tx": optax.sgd(0.1), "key": KEY, "scaler": None, "mesh": None,
            "fp8_param": False, "distributed_optimizer": False,
        },
    ),
    "training.adamw_with_schedule": lambda f: Call(
        training.adamw_with_schedule,
        {
            "schedule": 0.1, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 1.0,
            "mu_dtype": None,
        },
    ),
    "training.calibrate_delayed_scaling": lambda f: Call(
        training.calibrate_delayed_scaling,
        {
            "model": layers.prepare_quantization(linear(), DELAYED), "loss_fn": loss_fn, "batch": KERNEL,
            "recipe": DELAYED,
        },
    ),
    "training.change_recipe": lambda f: Call(training.change_recipe, {"state": train_state(), "recipe": DELAYED}),
    "training.deferred_vjp": lambda f: Call(
        training.deferred_vjp,
        {"fn": loss_fn, "model": linear(), "has_aux": False, "wgrad_dtype": None},
        (X,),
        ("fn", "model"),
    ),
    "training.exact_model": lambda f: Call(training.exact_model, {"state": train_state()}),
    "training.global_batch": lambda f: Call(on_a_mesh(training.global_batch), {"local": {"a": np.ones((2, 2))}}),
    "training.inspect_precision": lambda f: Call(
        quantizing(training.inspect_precision),
        {"model": linear(), "loss_fn": loss_fn, "batch": KERNEL, "key": None, "loss_scale": 1.0},
    ),
    "training.keep_in_bf16_rules": lambda f: Call(training.keep_in_bf16_rules, {"modules": ["a"]}),
    "training.learning_rate_schedule": lambda f: Call(
        training.learning_rate_schedule,
        {"learning_rate": 0.1, "total_steps": 2, "warmup_steps": 0, "final_fraction": 0.1},
    ),
    "training.make_eval_step": lambda f: Call(training.make_eval_step, {"loss_fn": loss_fn}),
    "training.make_inspection": lambda f: Call(
        training.make_inspection, {"loss_fn": loss_fn, "microbatches": 1}
    ),
    "training.PipelinedLoss.__call__": lambda f: Call(
        training.PipelinedLoss(
            embed_inputs=lambda model, tokens, key: model.embed_inputs(tokens, dropout_key=key),
            compute_loss=lambda model, y, tokens, key: model.compute_loss(y, tokens),
        ),
        {"model": gpt(), "batch": IDS, "key": None},
    ),
    "training.make_train_step": lambda f: Call(
        training.make_train_step,
        {
            "loss_fn": loss_fn, "tx": optax.sgd(0.1), "microbatches": 1, "keep_kernels": True,
            "wgrad_dtype": jnp.float32, "reduce_gradients": "microbatch", "pipeline": config.PipelineConfig(),
        },
    ),
    "training.muon_dimension_numbers": lambda f: Call(
        training.muon_dimension_numbers, {"params": nnx.state(linear(), nnx.Param), "model": linear()}
    ),
    "training.sensitivity": lambda f: Call(
        training.sensitivity, {"model": linear(), "loss_fn": loss_fn, "batches": [KERNEL], "recipe": CURRENT}
    ),
    "training.split_model": lambda f: Call(training.split_model, {"model": linear()}),
    "training.value_and_grad": lambda f: Call(
        training.value_and_grad, {"loss_fn": loss_fn, "argnums": 0, "has_aux": False, "scaler": None}
    ),
    "training.weight_decay_mask": lambda f: Call(
        training.weight_decay_mask, {"params": nnx.state(linear(), nnx.Param)}
    ),
}  # fmt: skip


def on_a_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(**kwargs: Any) -> Any:
        with jax.set_mesh(sharding.make_mesh(config.ParallelConfig(), devices=jax.devices()[:1])):
            return function(**kwargs)

    return call


def quantizing(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(**kwargs: Any) -> Any:
        with recipe.autocast(CURRENT):
            return function(**kwargs)

    return call


def dense_quantized() -> Any:
    model = Dense()
    layers.quantize_model(model, X)
    return model


def float16() -> Any:
    return megatron.Float16Module(
        config.TransformerConfig(
            num_layers=1, hidden_size=16, num_attention_heads=2, bf16=True, params_dtype="bfloat16"
        ),
        linear(),
    )


def rules() -> megatron.RecipeConfig:
    return megatron.RecipeConfig.from_config_dict(RULES)


def params() -> megatron.TEQuantizationParams:
    return megatron.TEQuantizationParams(megatron.TEQuantizationRecipe())


def attention() -> Any:
    return megatron.TEDotProductAttention(CONFIG, 1, "causal", "self")


def fused() -> Any:
    options = TE | {"config": CONFIG}
    return megatron.TELayerNormColumnParallelLinear(16, 16, **options, gather_output=False, rngs=nnx.Rngs(0))


def bert() -> models.BertModel:
    return models.BertModel(**MODEL, rngs=nnx.Rngs(0))


def t5() -> models.T5Model:
    return models.T5Model(**MODEL, rngs=nnx.Rngs(0))


def megatron_gpt() -> models.MegatronGPTModel:
    return models.MegatronGPTModel(**MODEL, transformer_layer_spec=None, rngs=nnx.Rngs(0))
