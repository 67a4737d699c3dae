"""The options of ``jax-te train`` as tables, in which a field is an option; see `jax_te.cli.option_table`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jax_te._validation import FLOAT_DTYPES, literal_names
from jax_te.cli.option_table import Option, option, options_of
from jax_te.cli.option_values import (
    COUNT,
    FIELD_NAMES,
    FILE,
    FLAG,
    FOLDER,
    LAYER_PATTERN,
    MARGIN,
    MESH,
    MODULE_NAMES,
    NON_NEGATIVE,
    PATH,
    POSITIVE,
    PROCESSES,
    RATE,
    SCHEDULE,
    SECONDS,
    SEED,
    SIZE,
    STEPS,
    Text,
    auto_or_flag,
    matching,
    number,
    some_of,
)
from jax_te.cli.presets import PRESETS
from jax_te.config import (
    ACTIVATIONS,
    LOAD_BALANCING_TYPES,
    POSITION_EMBEDDINGS,
    RECOMPUTE_MODULES,
    RECOMPUTE_POLICIES,
    CpCommType,
    ExpertsConfig,
    RecomputeConfig,
    TransformerConfig,
)
from jax_te.config import CP_COMM_TYPES as ALL_CP_COMM_TYPES
from jax_te.recipe import GEMMS, RECIPES, DelayedScaling, Format
from jax_te.typing import BackendName, WriterName

BACKENDS: tuple[str, ...] = get_args(BackendName)
POLICIES = tuple(name for name in RECOMPUTE_POLICIES if name != "none")  # that is --recompute-granularity none
METHODS = literal_names(RecomputeConfig, "recompute_method")
CP_COMM_TYPES = tuple(kind for kind in ALL_CP_COMM_TYPES if kind != "a2a+p2p")  # which needs sizes that are not options
QUANTIZED = tuple(name for name in RECIPES if name != "none")
WGRAD_DTYPES = ("float32", "bfloat16")
Reduction = Literal["microbatch", "step"]
REDUCTIONS = get_args(Reduction)
AxisType = Literal["auto", "explicit"]
_GRANULARITIES = ("none", *literal_names(RecomputeConfig, "recompute_granularity"))
_FORMATS = (Format.HYBRID.value, Format.E4M3.value)
_ALGORITHMS = literal_names(DelayedScaling, "amax_compute_algo")
_SCALED_ONCE = ("delayed", "current")  # one scale for a whole tensor, which allows both kinds of accumulation
_GEMM_NAMES, _MODULES, _WRITERS = (
    Text(metavar, some_of(names))
    for metavar, names in (("GEMMS", GEMMS), ("NAMES", RECOMPUTE_MODULES), ("NAMES", get_args(WriterName)))
)
_PRESET = "the preset's"
DEFAULT_RUN = "runs/tiny"
"""Folder of the run that a command looks at if none is given."""

IGNORED_FIELDS = "fields of the config.json of {} to ignore: unknown ones that change no number, e.g. my_note,other"
FACTORY_MODULES = "modules whose functions the rules of a precision file may call, e.g. my.module,other"

EXPERT_RANKS, TENSOR_RANKS = "a --mesh with expert=2 or more", "a --mesh with tensor=2 or more"
SOFTMAX, SELECTIVE = "--moe-router-score-function softmax", "--recompute-granularity selective"
SEVERAL_PROCESSES = "several processes, by --processes or a launcher"
RULES = "the rules of a --precision-config"


_free = functools.partial(option, may_change=True)
_on_mesh = functools.partial(option, may_change=True, of_mesh=True)
_of_processes = functools.partial(option, SECONDS, needs=(SEVERAL_PROCESSES,))


def _field(recipes: tuple[str, ...], kind: Any, help: str, **row: Any) -> Any:
    """Return the option of a field that some recipes have; without a value it is the recipe's default."""
    return option(kind, help, None, recipes=recipes, **row)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a model on text, or resume a run.

    Without options it trains the tiny preset on the bytes of the Python standard library's source files.
    --data takes a text file, .jsonl, .ndjson or .parquet (documents under "text"), a folder of these, or tokens:
    .npy, or Megatron's .bin with its .idx. --init-from fine-tunes a Hugging Face model, and takes the sizes from it:
    decoders learn the next token, BERT and RoBERTa masked tokens, T5 and mT5 removed spans of tokens.

    Started again with the same --output it resumes from the newest checkpoint, and options that are not
    given keep the values of that run. Without a checkpoint it is a new run, of the options that are given,
    or, if none are, of those of the start before. SIGTERM or Ctrl-C ends it with a checkpoint.
    """

    preset: str | None = option(tuple(PRESETS), "model and settings to start from, listed below", None, shown="tiny")
    output: str | None = option(
        FOLDER, "folder of the run", None, shown="runs/PRESET, or runs/MODEL of a config.json; with -RECIPE if given"
    )
    processes: str = option(
        PROCESSES,
        "processes of the run: auto (from the launcher: SLURM, Open MPI, Kubernetes, or JAX's variables), none (a "
        "single process), or HOST:PORT,COUNT,NUMBER (process 0's address, process count, this process's number from 0)",
        "auto",
    )
    # Not saved with the run: suitable timeouts depend on where it is started.
    start_timeout: float = _of_processes("seconds to wait for another process of the run to start", 300.0)
    save_timeout: float = _of_processes("seconds without progress after which a multi-process save fails", 60.0)
    step_timeout: float = _of_processes(
        "seconds without a heartbeat from another process after which the run ends", 600.0
    )


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Training text and its tokenization."""

    # Both files may have moved. The data's checksum and the run's hash ensure that they are the same.
    data: str | None = _free(
        PATH, "text or tokens to train on, a file or a folder", None, shown="the Python standard library's sources"
    )
    tokenizer: str | None = _free(
        PATH, "tokenizer.json file, or a folder that contains one", None, shown="--init-from's, or bytes"
    )
    seq_len: int = option(
        Text("N", number(int, 2)),
        "sequence length in tokens; a T5's encoder's",
        shown="the preset's, or with a config.json at most 512",
    )


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Sizes and architecture of the model, and its initial weights."""

    num_layers: int = option(Text("N", number(int, 1, below=10_000)), "number of transformer layers")
    hidden_size: int = option(SIZE, "size of the hidden states")
    num_heads: int = option(SIZE, "number of attention heads", library=("num_attention_heads",))
    # The next two follow a size that is given, which the preset's value would not fit.
    num_query_groups: int = option(
        SIZE,
        "number of key/value heads; fewer than --num-heads means grouped-query attention",
        shown="--num-heads if given, else the preset's",
    )
    ffn_hidden_size: int = option(
        SIZE, "hidden size of the feed-forward blocks", shown="4 x --hidden-size if given, else the preset's"
    )
    kv_channels: int | None = option(SIZE, "size of an attention head", None, shown="--hidden-size / --num-heads")
    qk_layernorm: bool = option(FLAG, "a norm of each head's queries and keys", False)
    normalization: str = option(literal_names(TransformerConfig, "normalization"), "normalization of every layer")
    activation: str = option(tuple(ACTIVATIONS), "activation of the feed-forward blocks")
    position_embedding: str = option((*POSITION_EMBEDDINGS, "relative"), "position embedding; relative: T5's alone")
    bias: bool = option(FLAG, "biases in linear layers", library=("add_bias_linear",))
    tie_embeddings: bool = option(FLAG, "one weight for the embedding and the output head")
    dropout: float | None = option(
        RATE,
        "dropout rate of attention weights and hidden states",
        None,
        shown="that of the config.json of --init-from or --model-config, else 0",
        library=("attention_dropout", "hidden_dropout"),
    )
    init_from: str | None = option(FOLDER, "Hugging Face model folder to fine-tune", None)
    model_config: str | None = option(
        Text("PATH", str),
        "config.json in Hugging Face's form, or a folder with one: the model to train from new weights",
        None,
    )
    ignore_fields: str | None = option(
        FIELD_NAMES, IGNORED_FIELDS.format("--init-from or --model-config"), None, shown="none"
    )
    lora_rank: int | None = option(
        SIZE, "rank of LoRA adapters, which alone are then trained; needs --init-from", None, shown="no adapters"
    )
    lora_alpha: float | None = option(
        POSITIVE, "numerator of the adapters' scale, --lora-alpha / --lora-rank", None, shown="--lora-rank"
    )


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Mixtures of experts in place of feed-forward blocks; without ``num_experts`` no other option may be given."""

    num_experts: int | None = option(
        SIZE, "number of experts of a layer", None, shown="no experts, or the preset's", library=("num_moe_experts",)
    )
    moe_router_topk: int = option(SIZE, "number of experts of each token", 2)
    moe_ffn_hidden_size: int | None = option(SIZE, "hidden size of an expert", None, shown="--ffn-hidden-size")
    moe_layer_freq: int | str = option(
        LAYER_PATTERN,
        "layers with experts: every N-th from the first on, or a list with 1 (experts) or 0 for each layer, such as "
        "0,1,1,1 or [0]+[1]*3",
        1,
    )
    moe_router_score_function: str = option(
        literal_names(ExpertsConfig, "moe_router_score_function"), "function of the router's logits", "softmax"
    )
    moe_router_pre_softmax: bool = option(
        FLAG, "softmax over all experts, before the choice among them", False, needs=(SOFTMAX,)
    )
    moe_router_load_balancing_type: str = option(
        Text("TYPE", matching("|".join(LOAD_BALANCING_TYPES), f"one of {', '.join(LOAD_BALANCING_TYPES)}")),
        f"loss or rule that keeps the load of experts alike: one of {', '.join(LOAD_BALANCING_TYPES)}",
        "aux_loss",
    )
    moe_aux_loss_coeff: float = option(NON_NEGATIVE, "coefficient of the load-balancing loss", 0.0)
    moe_z_loss_coeff: float | None = option(NON_NEGATIVE, "coefficient of the router's z-loss", None, shown="none")
    moe_router_enable_expert_bias: bool = option(
        FLAG, "bias of each expert that balances the load, with the sigmoid and sqrtsoftplus score functions", False
    )
    moe_expert_capacity_factor: float | None = option(
        POSITIVE, "capacity of an expert as a multiple of the mean load; tokens beyond it are dropped", None,
        shown="no bound",
    )  # fmt: skip
    moe_shared_expert_intermediate_size: int | None = option(
        SIZE, "hidden size of shared experts, which all tokens pass", None, shown="no shared experts"
    )
    moe_token_dispatcher_type: str = _on_mesh(
        literal_names(ExpertsConfig, "moe_token_dispatcher_type"),
        "transport of tokens along the expert axis",
        "allgather",
        needs=(EXPERT_RANKS,),
    )
    moe_expert_rank_capacity_factor: float | None = option(
        POSITIVE,
        "rows for which a device has room, as a multiple of those of equal load",
        None,
        shown="room for all",
        needs=(EXPERT_RANKS,),
    )


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Batches, optimizer and schedule: linear warm-up, then cosine decay to the minimum at ``decay_steps``."""

    steps: int = _free(SIZE, "number of optimizer steps")
    batch_size: int = option(SIZE, "sequences per step, over all devices")
    microbatches: int = _free(SIZE, "number of microbatches per step, over which gradients are accumulated", 1)
    learning_rate: float = option(
        POSITIVE, "highest learning rate, after warm-up", shown="the preset's; with --init-from 2e-5, with LoRA 2e-4"
    )
    min_learning_rate: float = option(
        NON_NEGATIVE, "learning rate at the end of the cosine decay", shown="a tenth of --learning-rate"
    )
    warmup_steps: int = option(COUNT, "steps of linear warm-up", shown="the preset's, at most a tenth of --steps")
    # Not --steps of a resume: a longer run would have another learning rate at the steps that it has taken. Where it is
    # given, the remaining steps follow the new schedule: the end of the old one may be behind them.
    decay_steps: int = _free(SIZE, "step at which the decay ends", shown="--steps of the first start")
    weight_decay: float = option(NON_NEGATIVE, "decoupled weight decay, of matrices only", 0.1)
    clip_norm: float = option(POSITIVE, "global norm to which gradients are clipped", 1.0)
    seed: int = option(SEED, "seed of weights, data order and dropout", 0)
    give_up_after: int = _free(
        SIZE, "number of consecutive failed steps (loss or gradient not finite, or update skipped) that end the run", 50
    )


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """The recipe and its fields (None under recipes without them), exceptions in high precision, and dtypes."""

    recipe: str = option(tuple(RECIPES), "precision recipe of the linear layers' GEMMs; none: no quantization", "none")
    fp8_format: str | None = _field(
        (*_SCALED_ONCE, "block", "mxfp8"),
        _FORMATS,
        "FP8 format: e4m3, or hybrid (E4M3 forward, E5M2 gradients)",
        shown="hybrid for delayed and current, e4m3 for block and mxfp8",
    )
    amax_history_len: int | None = _field(("delayed",), SIZE, "length of the amax history in steps (delayed)")
    amax_compute_algo: str | None = _field(
        ("delayed",), _ALGORITHMS, "amax that sets the scale: maximum of the history, or the most recent (delayed)"
    )
    margin: int | None = _field(("delayed",), MARGIN, "headroom of scales, as a power of two (delayed)")
    use_power_2_scales: bool | None = _field(("current",), FLAG, "scales rounded to powers of two (current)")
    use_f32_scales: bool | None = _field(("block",), FLAG, "fp32 scales in place of powers of two (block)")
    rht: bool | None = _field(("nvfp4",), FLAG, "random Hadamard transform before weight-gradient GEMMs (nvfp4)")
    stochastic_rounding: bool | None = _field(("nvfp4",), FLAG, "stochastic rounding of gradients (nvfp4)")
    square_blocks: bool | None = _field(("nvfp4",), FLAG, "16 x 16 blocks of kernels in place of 1 x 16 (nvfp4)")
    fp8_accumulation: str | None = _field(
        _SCALED_ONCE, ("fast", "precise"), "accumulation of FP8 GEMMs on Hopper GPUs (delayed, current)"
    )
    fp8_dpa: bool | None = _field(_SCALED_ONCE, FLAG, "attention in FP8, too (delayed, current)")
    fp8_dpa_fwd: bool | None = _field(_SCALED_ONCE, FLAG, "forward pass of FP8 attention in FP8 (delayed, current)")
    fp8_dpa_bwd: bool | None = _field(_SCALED_ONCE, FLAG, "backward pass of FP8 attention in FP8 (delayed, current)")
    override_linear_precision: str | None = _field(
        QUANTIZED, _GEMM_NAMES, f"GEMMs to keep in high precision: any of {','.join(GEMMS)}", shown="none"
    )
    fp8_param: bool = option(FLAG, "kernels stored quantized, with fp32 master copies", False)
    bf16_layers_start: int = option(
        COUNT, "number of first layers to keep in high precision", 0, library=("num_layers_at_start_in_bf16",)
    )
    bf16_layers_end: int = option(
        COUNT, "number of last layers to keep in high precision", 0, library=("num_layers_at_end_in_bf16",)
    )
    precision_config: str | None = option(
        FILE, "YAML file with precision rules for individual layers; the run stores a copy", None
    )
    # A run folder may be somebody else's: only modules named on the command line are imported.
    factory_modules: str | None = _free(MODULE_NAMES, FACTORY_MODULES, None, kept=False, needs=(RULES,))
    # The defaults shown are resolved when a run is made, since they depend on its device.
    params_dtype: str = option(
        FLOAT_DTYPES,
        "dtype of parameters; half-precision parameters get fp32 master copies",
        "float32",
        shown="bfloat16 on a GPU, else float32",
    )
    compute_dtype: str = option(FLOAT_DTYPES, "dtype of activations", "float32", shown="--params-dtype")
    wgrad_dtype: str = option(WGRAD_DTYPES, "dtype in which devices sum kernel gradients", "float32")


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """Devices and execution of the steps."""

    backend: BackendName = _free(
        BACKENDS, "kernels: te (Transformer Engine's), xla (XLA's), or auto (te where it can run)", "auto"
    )
    mesh: str | None = _on_mesh(
        MESH, "sizes of the mesh axes pipeline, data, fsdp, expert, context and tensor, e.g. data=2,tensor=4", None,
        shown="one device",
    )  # fmt: skip
    mesh_axis_type: AxisType = _on_mesh(get_args(AxisType), "JAX's type of the mesh axes", "auto")
    pipeline: str = _on_mesh(
        SCHEDULE, "schedule of the pipeline axis: gpipe, 1f1b, 1f1b,virtual_stages=N or zero_bubble", "1f1b"
    )
    sequence_parallel: bool = _on_mesh(
        FLAG, "sequence parallelism: activations sharded over the tensor axis between tensor-parallel GEMMs", False
    )
    distributed_optimizer: bool = _on_mesh(
        FLAG, "masters and optimizer state sharded over the data axis as well", False
    )
    reduce_gradients: Reduction = _on_mesh(
        REDUCTIONS,
        "time at which data-parallel devices sum kernel gradients: after each microbatch, or once a step",
        "microbatch",
    )
    batch_parts: int = _on_mesh(
        SIZE,
        "number of parts of the batch in each layer; 2 overlaps GEMMs with tensor-parallel collectives",
        1,
        needs=(TENSOR_RANKS,),
    )
    cp_comm_type: CpCommType = _on_mesh(
        CP_COMM_TYPES, "exchange of keys and values along the context axis: ring, all-gather or all-to-all", "p2p"
    )
    cp_load_balanced: bool = _on_mesh(FLAG, "zig-zag order of tokens along the context axis", False)
    recompute_granularity: str = _free(
        _GRANULARITIES,
        "activations to recompute in backward: none, whole layers (full), or some modules (selective)",
        "none",
    )
    recompute_method: str | None = _free(
        METHODS,
        "layers to recompute under full: all, in groups (uniform), or the first ones (block)",
        None,
        shown="uniform",
    )
    recompute_num_layers: int | None = _free(
        SIZE, "number of layers in a group (uniform) or of first layers (block), under full", None, shown="1"
    )
    recompute_modules: str | None = _free(
        _MODULES,
        f"modules to recompute under selective: any of {','.join(RECOMPUTE_MODULES)}",
        None,
        shown="core_attn",
        needs=(SELECTIVE,),
    )
    recompute_policy: str = _free(
        POLICIES, "arrays kept inside of layers under full; the policy full keeps none", "full"
    )
    distribute_saved_activations: bool = _free(
        FLAG, "saved inputs of layers sharded over the tensor axis, under full", False, needs=(TENSOR_RANKS,)
    )
    scan_layers: bool | Literal["auto"] = _free(
        Text("WHEN", auto_or_flag),
        "one loop over all layers, which compiles faster: yes, no, or auto (yes for deep models)",
        "auto",
    )
    check_memory: bool = _free(FLAG, "refuse sizes that, by an estimate, do not fit into memory", True, kept=False)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Intervals of checkpoints, evaluations and reports."""

    # Every preset sets three of these; the defaults are for a configuration that is made without one.
    save_every: int = _free(SIZE, "steps between checkpoints", 100, shown=_PRESET)
    keep: int = _free(SIZE, "number of newest checkpoints to keep", 3)
    keep_every: int | None = _free(SIZE, "steps between checkpoints that are kept permanently: multiples of N", None)
    keep_best: int | None = _free(
        SIZE,
        "number of checkpoints with the lowest held-out loss to keep as well; adds an evaluation to each save",
        None,
    )
    eval_every: int = _free(SIZE, "steps between held-out losses", 100, shown=_PRESET)
    # A longer evaluation would seem to hang.
    eval_batches: int = _free(Text("N", number(int, 1, below=10**6)), "number of batches for a held-out loss", 16)
    log_every: int = _free(SIZE, "steps between progress lines and chart points", 10, shown=_PRESET)
    inspect_every: int = _free(COUNT, "steps between statistics of quantized tensors", 0, shown="0, never")
    metrics_writers: str = _free(
        _WRITERS, f"destinations of metrics: any of {','.join(get_args(WriterName))}", "jsonl,tensorboard"
    )
    profile: str | None = _free(
        STEPS, "first and last step to trace with the profiler, for a table of kernel times", None, kept=False
    )


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Facts about the given files that a run records; they are not options."""

    vocab_size: int = option(SIZE, "rows of the embedding", 256)
    tokenizer_sha256: str | None = option(
        Text("HASH", matching("[0-9a-f]{64}", "a SHA-256")), "checksum of the file", None
    )
    end_of_text: str | None = option(Text("TOKEN", str), "name of the tokenizer's token behind each document", None)


# Dataclasses take the fields of their bases from the last one on: config.json begins with the data.
@dataclass(frozen=True, kw_only=True)
class RunOptions(
    *(Recorded, OutputOptions, ExecutionOptions, PrecisionOptions, TrainingOptions),
    *(ExpertOptions, ModelOptions, DataOptions),
):
    """All fields of a run's ``config.json``, except the preset."""


@dataclass(frozen=True, kw_only=True)
class GivenOptions:
    """A command line of ``jax-te train``.

    Args:
        start: options of the start itself.
        given: values of the run's options that are given, the preset among them. Others are those of the run in the
            folder, the preset's, or defaults.
        debug: whether to show the traceback of an error.
    """

    start: TrainOptions
    given: Mapping[str, Any]
    debug: bool = False


GROUPS: dict[str, type] = {
    "data": DataOptions,
    "model": ModelOptions,
    "experts": ExpertOptions,
    "training": TrainingOptions,
    "precision": PrecisionOptions,
    "execution": ExecutionOptions,
    "output": OutputOptions,
}
"""The table of ``jax-te train`` under the headings of its ``--help``."""

OPTIONS: dict[str, Option] = {name: row for group in GROUPS.values() for name, row in options_of(group).items()}
"""Every row of the table by the name of its field."""

MAY_CHANGE = {name for name, row in OPTIONS.items() if row.may_change}
"""Fields that may change when a run is resumed."""

OF_MESH = {name for name, row in OPTIONS.items() if row.of_mesh}
"""Fields without effect if there is no mesh."""
