"""The options of the measurements of ``jax-te bench``; see `jax_te.cli.option_table`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jax_te.cli.option_table import option, positional
from jax_te.cli.option_values import FILE, FOLDER, MESH, PATH, SCHEDULE, SIZE, SPREAD, SWITCH, Text, some_of
from jax_te.cli.options import BACKENDS, CP_COMM_TYPES, METHODS, POLICIES, REDUCTIONS, WGRAD_DTYPES, Recorded, Reduction
from jax_te.cli.presets import PRESETS
from jax_te.config import RECOMPUTE_MODULES, CpCommType
from jax_te.recipe import RECIPES
from jax_te.typing import BackendName

MODULES = ("transformer_layer", "layernorm_mlp", "layernorm_linear", "moe")
STACKS = ("unrolled", "scanned")
HEADS = ("high", "quantized")
Peer = Literal["te", "megatron"]
PEERS = get_args(Peer)
MOE, TRANSFORMER_LAYER = "moe in --modules", "transformer_layer in --modules"
QUANTIZED_ATTENTION = "delayed or current in --recipes"
ExpertActivation = Literal["swiglu", "clamped_swiglu"]
Fp8Passes = Literal["both", "forward", "backward"]
_COUNTED = " or ".join(f"{method}:LAYERS" for method in METHODS)
_MODULE_NAMES = ",".join(RECOMPUTE_MODULES)


def recompute(text: str) -> str:
    """Return a way of recomputation: an argparse type.

    It is ``none``, a policy of full recomputation, a method and its layers, or modules.

    >>> recompute("mlp,core_attn"), recompute("block:12")
    ('core_attn,mlp', 'block:12')
    """
    if text in ("none", *POLICIES):
        return text
    method, colon, count = text.partition(":")
    if colon and method in METHODS and count.isdecimal() and int(count) > 0:
        return text
    try:
        return some_of(RECOMPUTE_MODULES)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"must be none, one of {', '.join(POLICIES)}, {_COUNTED}, or some of {_MODULE_NAMES}, each once; got "
            f"{text!r}"
        ) from None


WAY = Text("WAY", recompute)


# Functions, since every dataclass needs a field of its own.
def _several(kind: Any, help: str, *default: Any, needs: tuple[str, ...] = ()) -> Any:
    return option(kind, help, default, several=True, shown=" ".join(map(str, default)), needs=needs)


def _recipes(*default: str) -> Any:
    return _several(tuple(RECIPES), "precision recipes to measure", *default)


def _fp8_passes(condition: str) -> Any:
    return option(
        get_args(Fp8Passes), "passes of attention in FP8, under delayed and current", "both", needs=(condition,)
    )


def _backend() -> Any:
    help = "kernels of jax_te: te (Transformer Engine's), xla (XLA's), or auto (te where it can run)"
    return option(BACKENDS, help, "auto")


def _of_moe(kind: Any, help: str, default: Any, **row: Any) -> Any:
    return option(kind, help, default, needs=(MOE,), **row)


def _mesh(shown: str = "one device") -> Any:
    return option(MESH, "sizes of the mesh axes, e.g. tensor=4 or data=2,tensor=2", None, shown=shown)


def _sequence_parallel() -> Any:
    help = "sequence parallelism: activations sharded over the tensor axis of --mesh between tensor-parallel GEMMs"
    return option(SWITCH, help, False)


def _distributed_optimizer() -> Any:
    help = "masters and optimizer state sharded over the data axis of --mesh as well"
    return option(SWITCH, help, False)


def _size(help: str, default: int, needs: tuple[str, ...] = ()) -> Any:
    return option(SIZE, help, default, needs=needs)


def _rounds() -> Any:
    return option(SIZE, "number of rounds, each of which measures every row once; the median is reported", 7)


def _calls(what: str) -> Any:
    return option(SIZE, f"number of {what} per row and round", 10)


def _rows_file() -> Any:
    return option(FILE, "JSON file to write the rows to", None)


def _preset() -> Any:
    return option(tuple(PRESETS), "preset of jax-te train whose model is measured", "tiny")


def _num_layers() -> Any:
    return option(SIZE, "number of layers", None, shown="the preset's")


def _vocab_size() -> Any:
    return option(SIZE, "vocabulary size", Recorded.vocab_size, shown=f"{Recorded.vocab_size}, bytes")


@dataclass(frozen=True, kw_only=True)
class BenchLayer:
    """Measure forward and backward of single layers, next to te.jax's and Megatron-Core's.

    Layers are causal, with GELU and biases, in bf16. jax_te's and te.jax's are measured in turn in one
    process; for a recipe that te.jax does not have, its bf16 layer is the peer. speed_ratio is the peer's time over
    the row's, memory_ratio the row's temporary memory over the peer's.

    The module moe is an expert layer on one device: a router with softmax and the auxiliary loss, and gated experts,
    without dropped tokens. Its time is that of output and gradients. --peer megatron measures Megatron-Core's layer in
    turn with it, in a process of its own. peak_gib and memory_ratio of moe count parameters, gradients and temporary
    arrays.
    """

    modules: tuple[str, ...] = _several(MODULES, "layers to measure", MODULES[0])
    recipes: tuple[str, ...] = _recipes("none", "delayed", "current")
    batch_size: int = _size("sequences per batch", 4)
    seq_len: int = _size("sequence length in tokens", 2048)
    hidden_size: int = _size("size of the hidden states", 4096)
    num_heads: int = _size("number of attention heads of transformer_layer", 32, (TRANSFORMER_LAYER,))
    ffn_hidden_size: int = _size(
        "hidden size of the feed-forward block or of one expert, output size of layernorm_linear", 16384
    )
    num_experts: int = _of_moe(SIZE, "number of experts of moe", 8)
    moe_router_topk: int = _of_moe(SIZE, "number of experts of each token of moe", 2)
    moe_router_force_biased: float | None = _of_moe(
        SPREAD, "standard deviation of a random bias of each expert of moe, for an uneven load", None, shown="even load"
    )
    moe_activation: ExpertActivation = _of_moe(get_args(ExpertActivation), "activation of the experts of moe", "swiglu")
    moe_bias: bool = _of_moe(SWITCH, "biases in router and experts of moe", False)
    peer: Literal["megatron"] | None = _of_moe(("megatron",), "peer of moe, which needs Megatron-Core and torch", None)
    fp8_dpa: bool = option(
        SWITCH,
        "attention of transformer_layer in FP8, too, under delayed and current",
        False,
        needs=(TRANSFORMER_LAYER, QUANTIZED_ATTENTION),
    )
    fp8_passes: Fp8Passes = _fp8_passes("--fp8-dpa")
    backend: BackendName = _backend()
    mesh: str | None = _mesh()
    sequence_parallel: bool = _sequence_parallel()
    rounds: int = _rounds()
    calls: int = _calls("calls")
    output: str | None = _rows_file()
    profile: str | None = option(
        FOLDER, "folder for traces of two calls of each row, summarized as time per kind of kernel", None
    )
    hlo: str | None = option(FOLDER, "folder to write the compiled programs to", None)


@dataclass(frozen=True, kw_only=True)
class BenchModel:
    """Measure train steps of a whole model, next to te.jax's or Megatron-Core's.

    A step is forward, backward and AdamW on fp32 masters, with bf16 parameters. There is a row for every
    combination of --stack, --recompute, --pipeline, --batch-parts, --wgrad-dtype and --reduce-gradients, and rows
    of one recipe take turns on one state. speed_ratio and memory_ratio are relative to the recipe's first row that
    ran, the peer's if there is one. peak_gib is a device's arguments and temporary arrays, by XLA's analysis.

    Every step has the same batch: random tokens, or with --data sequences from all over a text, where some tokens
    are far more frequent than others, which the gradient of an embedding depends on.

    --peer te is a GPT of te.jax's own layers, on one device. --peer megatron is Megatron-Core's GPT, in processes
    of its own that start while jax_te compiles. Its peak_gib is what torch allocated. Where jax_te has the axis
    fsdp, it shards optimizer state alone; a pipeline has equally many layers in each stage and runs 1F1B; several
    devices or microbatches sum gradients in the first --wgrad-dtype, else in bf16.
    """

    preset: str = _preset()
    model_config: str | None = option(
        PATH, "config.json in Hugging Face's form, or a folder with one: the model, in place of a preset's", None
    )
    num_layers: int | None = _num_layers()
    vocab_size: int = _vocab_size()
    batch_size: int | None = option(SIZE, "sequences per step, over all devices", None, shown="the preset's")
    seq_len: int | None = option(SIZE, "sequence length in tokens", None, shown="the preset's")
    microbatches: int = _size("number of microbatches per step, over which gradients are accumulated", 1)
    data: str | None = option(
        PATH, "text or tokens of the batch, a file or a folder, as jax-te train reads them", None, shown="random tokens"
    )
    tokenizer: str | None = option(
        PATH,
        "tokenizer.json file, or a folder that contains one; needs --data",
        None,
        shown="bytes",
        needs=("--data",),
    )
    recipes: tuple[str, ...] = _recipes("none", "delayed", "current")
    peer: Peer | None = option(PEERS, "library to compare with, see above", None)
    backend: BackendName = _backend()
    mesh: str | None = _mesh()
    sequence_parallel: bool = _sequence_parallel()
    distributed_optimizer: bool = _distributed_optimizer()
    stack: tuple[str, ...] = _several(STACKS, "implementations of the layer stack", STACKS[0])
    recompute: tuple[str, ...] = _several(
        WAY,
        f"activations to recompute in backward: none; modules (any of {_MODULE_NAMES}); or whole layers, except for "
        f"the arrays that a policy saves ({', '.join(POLICIES)}), or by Megatron's methods ({_COUNTED})",
        "none",
    )
    pipeline: tuple[str, ...] = _several(
        SCHEDULE, "schedules of the pipeline axis: gpipe, 1f1b, 1f1b,virtual_stages=N or zero_bubble", "1f1b"
    )
    batch_parts: tuple[int, ...] = _several(SIZE, "numbers of parts of the batch in each layer", 1)
    wgrad_dtype: tuple[str, ...] = _several(WGRAD_DTYPES, "dtypes in which devices sum kernel gradients", "float32")
    reduce_gradients: tuple[Reduction, ...] = _several(
        REDUCTIONS,
        "times at which data-parallel devices sum kernel gradients: after each microbatch, or once a step",
        "microbatch",
    )
    loss_chunks: int = _size("number of parts of the sequence for which the loss computes logits separately", 1)
    rounds: int = _rounds()
    calls: int = _calls("steps")
    output: str | None = _rows_file()
    profile: str | None = option(
        FOLDER,
        "folder for traces of two steps of each row of jax_te and te.jax, summarized as time per kind of kernel",
        None,
    )


@dataclass(frozen=True, kw_only=True)
class BenchFlax:
    """Measure train steps of a Transformer in plain Flax NNX, as it is and after quantize_model.

    The model has Flax's layers alone: norms, linear layers with biases, GELU, causal attention by jax.nn (cuDNN's on a
    GPU), and a head without bias. A step is forward, backward and AdamW, of random tokens, in a loop with jax_te's
    value_and_grad and Optimizer; parameters, activations and gradients are bf16, masters and moments fp32. The first
    row is the model as it is; each other one is after quantize_model, under a recipe. Rows take turns on one state;
    speed_ratio and memory_ratio are relative to the first that ran. quantized_layers is the number of layers that the
    recipe quantizes.
    """

    recipes: tuple[str, ...] = _several(
        tuple(name for name in RECIPES if name != "none"), "precision recipes to measure", "current", "delayed", "block"
    )
    head: tuple[str, ...] = _several(
        HEADS, "precisions of the head: high, in which quantize_model leaves it, or quantized, by a rule", HEADS[0]
    )
    num_layers: int = _size("number of layers", 8)
    hidden_size: int = _size("size of the hidden states", 4096)
    ffn_hidden_size: int = _size("hidden size of the feed-forward blocks", 16384)
    num_heads: int = _size("number of attention heads", 32)
    vocab_size: int = _size("vocabulary size", 32000)
    batch_size: int = _size("sequences per step", 4)
    seq_len: int = _size("sequence length in tokens", 2048)
    backend: BackendName = _backend()
    rounds: int = _rounds()
    calls: int = _calls("steps")
    output: str | None = _rows_file()
    profile: str | None = option(
        FOLDER, "folder for traces of two steps of each row, summarized as time per kind of kernel", None
    )


@dataclass(frozen=True, kw_only=True)
class BenchAttention:
    """Measure causal attention alone, also with context parallelism, next to te.jax's.

    Forward and backward in bf16; under a recipe jax_te's kernels run in FP8, with scales of earlier calls where the
    recipe has such. The first row of each library and recipe is on one device; with --mesh there is a row for each
    --cp-comm-type, with sequences sharded over the context axis in zig-zag order. Of these te.jax has p2p and
    all_gather. of_one_device is the rate per device, relative to the rate of the same library and recipe on one
    device.
    """

    recipes: tuple[str, ...] = _several(
        ("none", "delayed", "current"), "precision recipes to measure, with fp8_dpa", "none"
    )
    fp8_passes: Fp8Passes = _fp8_passes(QUANTIZED_ATTENTION)
    batch_size: int = _size("sequences per batch", 4)
    seq_len: int = _size("sequence length in tokens", 2048)
    num_heads: int = _size("number of attention heads", 32)
    num_query_groups: int | None = option(SIZE, "number of key/value heads", None, shown="--num-heads")
    head_dim: int = _size("size of a head", 128)
    backend: BackendName = _backend()
    mesh: str | None = _mesh("one device, no context parallelism")
    cp_comm_type: tuple[CpCommType, ...] = _several(
        CP_COMM_TYPES,
        "exchanges along the context axis: ring, all-gather or all-to-all",
        *CP_COMM_TYPES,
        needs=("--mesh",),
    )
    rounds: int = _rounds()
    calls: int = _calls("calls")
    output: str | None = _rows_file()


@dataclass(frozen=True, kw_only=True)
class BenchCheckpoint:
    """Measure saving and restoring of a train state, next to plain Orbax.

    The state is that of a preset: bf16 parameters, fp32 masters and AdamW's moments, with random numbers. Orbax
    saves and restores its arrays as a list. blocked_s is the time until a save returns, stalled_s the time until
    a program has run to which the state was donated, copy_s the same with a copy to pinned memory in place of the
    save, and beyond_copy_s their difference.
    """

    folder: str = positional(
        FOLDER, "folder on the file system to measure, made if missing; the saved files are removed"
    )
    preset: str = _preset()
    num_layers: int | None = _num_layers()
    vocab_size: int = _vocab_size()
    recipes: tuple[str, ...] = _recipes("none", "delayed", "current")
    mesh: str | None = _mesh()
    distributed_optimizer: bool = _distributed_optimizer()
    rounds: int = _rounds()
    output: str | None = _rows_file()


@dataclass(frozen=True, kw_only=True)
class BenchMicrobatches:
    """Compare train steps that quantize kernels once per step and once per microbatch.

    A step is that of a GPT of 4 layers on one device (GELU, biases, bf16 parameters, Adam, 256 rows of
    vocabulary). quantizations_in_loop and quantizations_outside count operations of the compiled program, in and
    outside of the loop over microbatches.
    """

    microbatches: int = _size("number of microbatches per step", 8)
    recipes: tuple[str, ...] = _recipes("none", "delayed", "current")
    batch_size: int = _size("sequences per step", 32)
    seq_len: int = _size("sequence length in tokens", 2048)
    hidden_size: int = _size("size of the hidden states", 4096)
    num_heads: int = _size("number of attention heads", 32)
    ffn_hidden_size: int = _size("hidden size of the feed-forward blocks", 16384)
    backend: BackendName = _backend()
    rounds: int = _rounds()
    calls: int = _calls("steps")
    output: str | None = _rows_file()


@dataclass(frozen=True, kw_only=True)
class BenchTune:
    """Measure tilings of an expert layer's grouped GEMMs on a Hopper GPU; write the fastest to a table.

    Each of forward's and backward's products is measured alone, with equally many rows for each expert: first with all
    sizes of tiles, then with variants of the fastest ones. The first row of either part is the tiling in use, and
    speed_ratio is its time over the row's. JAX_TE_TILINGS=FILE in the environment has jax_te take its tilings from
    such a table, for shapes that differ by no more than a factor of two in each size. Tilings change no number.
    """

    recipes: tuple[str, ...] = _several(
        ("none", "delayed", "current", "block"), "precision recipes whose products are measured", "none"
    )
    batch_size: int = _size("sequences per batch", 4)
    seq_len: int = _size("sequence length in tokens", 4096)
    hidden_size: int = _size("size of the hidden states", 4096)
    ffn_hidden_size: int = _size("hidden size of an expert", 14336)
    num_experts: int = _size("number of experts", 8)
    moe_router_topk: int = _size("number of experts of each token", 2)
    table: str | None = option(
        FILE, "table to write the fastest tilings to; those of other shapes in it are kept", None, shown="none"
    )
    rounds: int = _rounds()
    calls: int = _calls("calls")
    output: str | None = _rows_file()
