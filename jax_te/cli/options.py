"""The options of the commands as tables: dataclasses, each of whose fields is the row of an option.

Everything else about options comes from the rows: the parser, ``--help``, and for ``jax-te train`` its configuration
(`jax_te.cli.run_config.RunConfig` has the fields of all groups), ``config.json``, what a resumed run may be given anew,
and the flags in messages. The tables import no jax, so that ``--help`` is instant.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass
from typing import Any, get_args

from jax_te.cli.presets import PRESETS
from jax_te.config import ACTIVATIONS, RECOMPUTE_MODULES, RecomputeConfig, TransformerConfig
from jax_te.config import CP_COMM_TYPES as ALL_CP_COMM_TYPES
from jax_te.config.internal import FLOAT_DTYPES, POSITION_EMBEDDINGS, RECOMPUTE_POLICIES, brief, literal_names
from jax_te.pipeline import SCHEDULES
from jax_te.recipe import RECIPES, DelayedScaling, Format
from jax_te.recipe.internal import GEMMS, MAX_MARGIN
from jax_te.typing import BackendName, WriterName

FLAG, SWITCH = argparse.BooleanOptionalAction, "store_true"
"""Kinds of options without a value: ``--name`` and ``--no-name``; ``--name`` alone."""


@dataclass(frozen=True)
class Text:
    """A kind of option whose value is read from a text.

    Args:
        metavar: its name in ``--help``.
        parse: an argparse type, which gives the same again for the text of its own result.
    """

    metavar: str
    parse: Callable[[str], Any]


@dataclass(frozen=True, kw_only=True)
class Option:
    """A row of the table.

    Args:
        kind: names to choose from, `FLAG`, `SWITCH`, or a `Text`.
        help: its effect, without the default.
        shown: the default in words. None: the field's, that of ``recipes``, or the preset's if there is neither.
        may_change: a resumed run may be given another value: it changes where, how long or how often, not what is
            trained.
        of_mesh: it has no effect without a mesh.
        kept: it is in ``config.json``. Not what only a command line may say, and says anew each time.
        recipes: names of the recipes that have this field.
        library: the library's names for it, where they differ.
    """

    kind: tuple[str, ...] | Text | str | type[argparse.Action]
    help: str
    shown: str | None = None
    may_change: bool = False
    of_mesh: bool = False
    kept: bool = True
    recipes: tuple[str, ...] = ()
    library: tuple[str, ...] = ()

    def check(self, name: str, value: Any) -> Any:
        """Return a value for the option ``name`` as the command line would give it.

        Raises:
            ValueError: for a value that the command line would refuse.
        """
        if isinstance(self.kind, Text):
            try:
                return self.kind.parse(str(value))
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"{flag(name)} {error}") from None
        choices = self.kind if isinstance(self.kind, tuple) else (True, False)
        if (type(value), value) not in [(type(choice), choice) for choice in choices]:  # 1 == True
            raise ValueError(f"{flag(name)} must be {either(tuple(map(str, choices)))}, got {brief(value)}")
        return value


def option(kind: Any, help: str, default: Any = MISSING, **row: Any) -> Any:
    """Return the dataclass field of an option; without a default it is a preset's."""
    return dataclasses.field(default=default, metadata={"option": Option(kind=kind, help=help, **row)})


def options_of(table: type) -> dict[str, Option]:
    """Return the rows of a table by the names of their fields."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(table)}


def flag(name: str) -> str:
    """Return the command-line option of a field.

    >>> flag("hidden_size")
    '--hidden-size'
    """
    return "--" + name.replace("_", "-")


def either(names: tuple[str, ...]) -> str:
    """Return names as a choice in words.

    >>> either(("fprop", "dgrad", "wgrad"))
    'fprop, dgrad or wgrad'
    """
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def number(kind: type, low: Any, *, above: bool = False, below: Any = 2**31) -> Callable[[str], int | float]:
    """Return an argparse type: a number ``>= low`` (``> low`` if ``above``) and ``< below``."""
    wanted = f"must be {'an integer' if kind is int else 'a number'} {'>' if above else '>='} {low:g}"

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{wanted}, got {brief(text)}") from None
        # Every comparison with nan is False, so this refuses nan, too.
        if not (low < value < below if above else low <= value < below):
            problem = f"must be < {below:.10g}" if value >= below else wanted
            raise argparse.ArgumentTypeError(f"{problem}, got {text[:50]}")
        return value

    return parse


def matching(pattern: str, wanted: str) -> Callable[[str], str]:
    """Return an argparse type: a text that the pattern matches; ``wanted`` says of which kind."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text, re.DOTALL):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {brief(text)}")
        return text

    return parse


def some_of(allowed: tuple[str, ...]) -> Callable[[str], str]:
    """Return an argparse type: names separated by commas, which it puts into the order of ``allowed``."""

    def parse(text: str) -> str:
        names = [name.strip() for name in text.split(",")]
        if any(name not in allowed or names.count(name) > 1 for name in names):
            raise argparse.ArgumentTypeError(f"must be some of {','.join(allowed)}, each once, got {text!r}")
        return ",".join(name for name in allowed if name in names)

    return parse


def auto_or_flag(text: str) -> bool | str:
    """Return ``"auto"``, or True for ``yes`` and False for ``no``: an argparse type."""
    choices: dict[str, bool | str] = {"auto": "auto", "yes": True, "no": False, "True": True, "False": False}
    if text not in choices:
        raise argparse.ArgumentTypeError(f"must be auto, yes or no, got {text!r}")
    return choices[text]


# Counts are int32 on devices, and other numbers fp32.
SIZE, COUNT = Text("N", number(int, 1)), Text("N", number(int, 0))
POSITIVE, NON_NEGATIVE = (Text("X", number(float, 0, above=above, below=3e38)) for above in (True, False))
FOLDER, PATH = (Text(metavar, matching(".+", "a name")) for metavar in ("DIR", "PATH"))
MESH = Text("AXES", matching(r"\w+=.*", "axes like data=2,tensor=4"))
_PIPELINE = Text("SCHEDULE", matching(rf"({'|'.join(SCHEDULES)})(,\w+=[1-9]\d*)*", f"one of {SCHEDULES}, and sizes"))
FILE, TEXT = (Text(metavar, str) for metavar in ("FILE", "TEXT"))
# JAX and grain take seeds of 32 bits, and would drop higher ones.
_MARGIN, _SEED = (Text("N", number(int, 0, below=below)) for below in (MAX_MARGIN + 1, 2**32))
MODULE_NAMES = Text("MODULES", matching(r"[^\W\d][\w.]*(,[^\W\d][\w.]*)*", "names of modules like my.module,other"))
FIELD_NAMES = Text("FIELDS", matching(r"[\w.-]+(,[\w.-]+)*", "names of fields like my_note,other"))
POLICIES = tuple(name for name in RECOMPUTE_POLICIES if name != "none")  # that is --recompute-granularity none
METHODS = literal_names(RecomputeConfig, "recompute_method")
_GRANULARITIES = ("none", *literal_names(RecomputeConfig, "recompute_granularity"))
_RATE = Text("P", number(float, 0, below=1))
CP_COMM_TYPES = tuple(kind for kind in ALL_CP_COMM_TYPES if kind != "a2a+p2p")  # which needs sizes that are no option
_FORMATS = (Format.HYBRID.value, Format.E4M3.value)
_QUANTIZED = tuple(name for name in RECIPES if name != "none")
_SCALED_ONCE = ("delayed", "current")  # one scale for a whole tensor, so that their GEMMs have a choice of accumulation
_STEPS = Text("START:STOP", matching(r"[1-9]\d{0,8}:[1-9]\d{0,8}", "two steps like 5:8"))
_PRESET = "the preset's"
_PROCESSES = Text("HOW", matching(r"auto|none|[^,\s]+:\d+,\d+,\d+", "auto, none or HOST:PORT,COUNT,NUMBER"))


# Clocks and JAX take more, but no week is a bound.
_SECONDS = Text("SECONDS", number(float, 0, above=True, below=7 * 24 * 3600 + 1))


_free = functools.partial(option, may_change=True)
_on_mesh = functools.partial(option, may_change=True, of_mesh=True)


def _some(metavar: str, allowed: tuple[str, ...], effect: str) -> tuple[Text, str]:
    """Return kind and help of an option whose value is some of these names."""
    return Text(metavar, some_of(allowed)), f"{effect}: some of {','.join(allowed)}"


def _field(recipes: tuple[str, ...], kind: Any, help: str, **row: Any) -> Any:
    """Return the option of a field that some recipes have; without a value it is the recipe's default."""
    return option(kind, help, None, recipes=recipes, **row)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train a GPT on text, or resume.

    Train a GPT, by default on bytes. With no option: the tiny preset on the Python standard library's source
    files. --data takes text, .jsonl and .parquet (documents under "text"), a folder of these, and tokens: .npy
    and Megatron's .bin with .idx. --init-from fine-tunes a model of Hugging Face: its sizes are that model's.
    Started again with the same --output it resumes, and options that are not given are those of that run.
    SIGTERM or Ctrl-C ends it with a checkpoint.
    """

    preset: str = option(tuple(PRESETS), "model and settings to start from, see below", shown="tiny")
    output: str = option(FOLDER, "folder of the run", shown="runs/PRESET, or runs/PRESET-RECIPE")
    processes: str = option(_PROCESSES, "of one run: auto, none or HOST:PORT,COUNT,NUMBER", shown="auto")
    # Not of the run: how long others may be silent depends on where it is started.
    start_timeout: float = option(_SECONDS, "seconds to wait for another of several processes to start", 300.0)
    save_timeout: float = option(_SECONDS, "seconds without progress that end a save of several processes", 60.0)
    step_timeout: float = option(_SECONDS, "seconds without a sign of life from another process that end a run", 600.0)


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The text that a run learns, and its tokens."""

    # Both may have moved. The data's state has a checksum, the run a hash, which hold the run to the same ones.
    data: str | None = _free(PATH, "text file or folder", None, shown="the Python standard library's sources")
    tokenizer: str | None = _free(PATH, "tokenizer.json, or a folder with it", None, shown="--init-from's, or bytes")
    seq_len: int = option(Text("N", number(int, 2)), "tokens of an example", shown="the preset's, --init-from's <= 512")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Sizes and form of the model, and its first weights."""

    num_layers: int = option(Text("N", number(int, 1, below=10_000)), "transformer layers")
    hidden_size: int = option(SIZE, "model dimension")
    num_heads: int = option(SIZE, "query heads", library=("num_attention_heads",))
    # The next two follow a size that is given, which the preset's value would not fit.
    num_query_groups: int = option(SIZE, "key/value heads", shown="a --num-heads given, or preset")
    ffn_hidden_size: int = option(SIZE, "feed-forward size", shown="4 --hidden-size given, or preset")
    normalization: str = option(literal_names(TransformerConfig, "normalization"), "norm of every layer")
    activation: str = option(tuple(ACTIVATIONS), "of the feed-forward layer")
    position_embedding: str = option(POSITION_EMBEDDINGS, "how positions are marked")
    bias: bool = option(FLAG, "biases in linear layers", library=("add_bias_linear",))
    tie_embeddings: bool = option(FLAG, "the output head shares the embedding")
    dropout: float = option(_RATE, "of attention and hidden", 0.0, library=("attention_dropout", "hidden_dropout"))
    init_from: str | None = option(FOLDER, "of Hugging Face, whose model is fine-tuned", None)
    ignore_fields: str | None = option(
        FIELD_NAMES, "fields of --init-from's config.json, unknown here, that change no number", None, shown="none"
    )
    lora_rank: int | None = option(SIZE, "with --init-from: train adapters of this rank alone", None)
    lora_alpha: float | None = option(POSITIVE, "numerator of the adapters' scale", None, shown="--lora-rank")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Batches, optimizer and schedule: linear warm-up, then a cosine that reaches its minimum at ``decay_steps``."""

    steps: int = _free(SIZE, "optimizer steps")
    batch_size: int = option(SIZE, "examples of a step, over all devices")
    microbatches: int = _free(SIZE, "parts of a batch: gradient accumulation", 1)
    learning_rate: float = option(POSITIVE, "after warm-up", shown="the preset's; --init-from 2e-5, with LoRA 2e-4")
    min_learning_rate: float = option(NON_NEGATIVE, "where cosine decay ends", shown="a tenth of it")
    warmup_steps: int = option(COUNT, "linear warm-up", shown="the preset's, at most --steps / 10")
    # Not --steps of a resume: a longer run would have another learning rate at the steps that it has taken.
    decay_steps: int = option(SIZE, "where decay ends", shown="the --steps of the first start")
    weight_decay: float = option(NON_NEGATIVE, "of matrices, decoupled", 0.1)
    clip_norm: float = option(POSITIVE, "global gradient norm", 1.0)
    seed: int = option(_SEED, "of weights, data order and dropout", 0)
    give_up_after: int = _free(SIZE, "steps in a row without a finite loss, or without an update, that end a run", 50)


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """The recipe and its fields, which are None under recipes without them; what is not quantized; dtypes."""

    recipe: str = option(tuple(RECIPES), "how the layers' linears are quantized", "none")
    fp8_format: str | None = _field(
        (*_SCALED_ONCE, "block", "mxfp8"), _FORMATS, "hybrid: E5M2 gradients", shown="delayed, current: hybrid"
    )
    amax_history_len: int | None = _field(("delayed",), SIZE, "delayed: steps a scale looks back")
    amax_compute_algo: str | None = _field(
        ("delayed",), literal_names(DelayedScaling, "amax_compute_algo"), "delayed: of the history"
    )
    margin: int | None = _field(("delayed",), _MARGIN, "delayed: powers of two of head-room")
    use_power_2_scales: bool | None = _field(("current",), FLAG, "current: scales are powers of two")
    use_f32_scales: bool | None = _field(("block",), FLAG, "block: scales are any fp32, not powers of two")
    rht: bool | None = _field(("nvfp4",), FLAG, "nvfp4: Hadamard transform for weight gradients")
    stochastic_rounding: bool | None = _field(("nvfp4",), FLAG, "nvfp4: of gradients")
    square_blocks: bool | None = _field(("nvfp4",), FLAG, "nvfp4: kernels have 16 x 16 blocks, not 1 x 16")
    fp8_accumulation: str | None = _field(_SCALED_ONCE, ("fast", "precise"), "delayed, current: sums on Hopper")
    override_linear_precision: str | None = _field(_QUANTIZED, *_some("GEMMS", GEMMS, "unquantized"), shown="none")
    fp8_param: bool = option(FLAG, "hold kernels quantized, with fp32 masters", False)
    bf16_layers_start: int = option(COUNT, "first layers not to quantize", 0, library=("num_layers_at_start_in_bf16",))
    bf16_layers_end: int = option(COUNT, "last layers not to quantize", 0, library=("num_layers_at_end_in_bf16",))
    precision_config: str | None = option(FILE, "YAML with rules for single layers; kept with the run", None)
    # A run folder may be somebody else's: what it names is not imported, only what the command line names.
    factory_modules: str | None = _free(MODULE_NAMES, "of the factories that its rules may name", None, kept=False)
    # The defaults in words are resolved when a run is made, since they depend on its device.
    params_dtype: str = option(FLOAT_DTYPES, "half has masters", "float32", shown="bfloat16 on a GPU, else float32")
    compute_dtype: str = option(FLOAT_DTYPES, "of activations", "float32", shown="--params-dtype")
    wgrad_dtype: str = option(("float32", "bfloat16"), "of kernels' gradients, which devices add up in it", "float32")


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions:
    """Where and how the steps run."""

    backend: str = _free(get_args(BackendName), "kernels; te runs or says why it cannot", "auto")
    mesh: str | None = _on_mesh(MESH, "data=2,tensor=4; also pipeline, fsdp, context", None, shown="one device")
    mesh_axis_type: str = _on_mesh(("auto", "explicit"), "kind of mesh axes", "auto")
    pipeline: str = _on_mesh(_PIPELINE, "of the pipeline axis: gpipe, 1f1b[,virtual_stages=N] or zero_bubble", "1f1b")
    sequence_parallel: bool = _on_mesh(FLAG, "shard activations over the tensor axis between blocks", False)
    distributed_optimizer: bool = _on_mesh(FLAG, "data devices split masters and optimizer state", False)
    reduce_gradients: str = _on_mesh(("microbatch", "step"), "when data devices add up gradients", "microbatch")
    batch_parts: int = _on_mesh(SIZE, "parts of the batch that take turns in each layer; 2 for tensor ranks", 1)
    cp_comm_type: str = _on_mesh(CP_COMM_TYPES, "how the context axis exchanges keys", "p2p")
    cp_load_balanced: bool = _on_mesh(FLAG, "context shards have tokens in zig-zag order", False)
    recompute_granularity: str = _free(_GRANULARITIES, "what backward computes again", "none")
    recompute_method: str | None = _free(METHODS, "full: groups, or the first layers", None, shown="uniform")
    recompute_num_layers: int | None = _free(SIZE, "full: layers of a group, or first layers", None, shown="1")
    recompute_modules: str | None = _free(*_some("NAMES", RECOMPUTE_MODULES, "selective"), None, shown="core_attn")
    recompute_policy: str = _free(POLICIES, "full: what is kept inside of layers", "full", shown="full, nothing")
    distribute_saved_activations: bool = _free(FLAG, "full: shard saved inputs over the tensor axis", False)
    scan_layers: bool | str = _free(Text("WHEN", auto_or_flag), "a loop over layers: yes, no, or auto, if many", "auto")
    check_memory: bool = _free(FLAG, "refuse sizes that cannot fit, by an estimate", True, kept=False)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How often a run saves, evaluates and reports."""

    # Presets set three of these; the defaults are for configurations of older versions, which lack fields.
    save_every: int = _free(SIZE, "steps between checkpoints", 100, shown=_PRESET)
    keep: int = _free(SIZE, "newest checkpoints kept", 3)
    keep_every: int | None = _free(SIZE, "keep those of the multiples of this step, too", None)
    keep_best: int | None = _free(SIZE, "keep so many of lowest held-out loss, too; it is computed at saves", None)
    eval_every: int = _free(SIZE, "steps between held-out losses", 100, shown=_PRESET)
    # An evaluation of more would seem to hang.
    eval_batches: int = _free(Text("N", number(int, 1, below=10**6)), "batches of a held-out loss", 16)
    log_every: int = _free(SIZE, "steps between lines and points of charts", 10, shown=_PRESET)
    inspect_every: int = _free(COUNT, "steps between statistics of quantized tensors", 0, shown="0, never")
    metrics_writers: str = _free(*_some("NAMES", get_args(WriterName), "where metrics go"), "jsonl,tensorboard")
    profile: str | None = _free(_STEPS, "first and last step to trace, with a table of kernels", None, kept=False)


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Generate text with a trained model.

    Generate text from the newest checkpoint of a run, with a key/value cache.
    """

    output: str = option(FOLDER, "folder of the run", "runs/tiny")
    prompt: str = option(TEXT, "text to continue", "def ", shown="'def '")
    length: int = option(SIZE, "tokens to generate", 256)
    temperature: float = option(NON_NEGATIVE, "0: the likeliest token", 0.8)
    top_k: int = option(COUNT, "draw from the N likeliest tokens; 0: all", 0)
    seed: int = option(_SEED, "of the drawing", 0)
    factory_modules: str | None = option(MODULE_NAMES, "of the factories that the run's rules may name", None)


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Show what quantization does to the tensors of a run, and how its arrays are split.

    One batch of held-out text runs forward and backward through the newest checkpoint of a run, and every
    tensor that is quantized is looked at: largest value, scale, share of values lost to 0 (underflow) or to
    the format's largest (saturation), and the squared error over the tensor's mean square, in decibels.
    Runs on one device, also a CPU, whatever the run was trained on.

    With --sharding nothing runs: it lists every array of the training state, its logical axes, the mesh
    axes that split it and its bytes, in all and on each device, and draws which device holds which part.
    It needs neither a checkpoint nor devices: jax-te inspect --sharding --preset gpt-1.3b --mesh fsdp=8

    With --communication nothing runs, either. A train step is compiled for as many CPU devices, or for fewer
    by rules that it names, and its collectives are listed by mesh axes: number, bytes of their arrays, bytes
    that each device sends, and the time that a --network takes for them, one after the other. That is
    devices_per_host=8,intra_host=450e9,inter_host=50e9,latency=8.4e-6 (bytes/s that a device sends to devices
    of its host and to others, seconds of a launch), or some of these; --network measured times all-gathers
    among the GPUs here. --train-options says what is trained:
    jax-te inspect --communication --preset gpt-1.3b --mesh data=8,tensor=4 --train-options=--sequence-parallel

    With a CHECKPOINT it lists name, dtype, shape, sharding as saved and bytes of every array, the step and
    the recipe, and reads no array: of a run or one of its checkpoints, a folder of Hugging Face, Megatron-LM
    or torch.distributed, or a file of torch.save (*.pt).

    columns of --sensitivity, for each layer quantized alone:
      gradient error  |g - g0| / |g0|, g and g0 the gradients of all parameters with and without it: the
                      noise that quantizing this layer adds to an update. The rows are in its order.
      loss increase   loss with it minus loss without. It may be negative, and where it is small beside
                      the loss's spread over batches (--batches) it says little.

    Delayed scaling has no past in --sensitivity, and with another --recipe or --precision-config: it then
    takes its scales from one pass over the first batch under current scaling.
    """

    output: str = option(FOLDER, "folder of the run", "runs/tiny")
    recipe: str | None = option(_QUANTIZED, "another recipe, with its default fields", None, shown="the run's")
    precision_config: str | None = option(FILE, "another precision file; reports on it", None, shown="the run's")
    factory_modules: str | None = option(MODULE_NAMES, "of the factories that its rules may name", None)
    data: str | None = option(PATH, "text file or folder", None, shown="the run's")
    batch_size: int | None = option(SIZE, "examples of a batch", None, shown="a microbatch of the run")
    check_memory: bool = option(FLAG, "refuse a batch that cannot fit, by an estimate", True)
    sharding: bool = option(SWITCH, "show how the arrays are split over devices", False)
    communication: bool = option(SWITCH, "show what devices send each other in a train step", False)
    mesh: str | None = option(MESH, "with one of these: over this mesh, e.g. fsdp=4,tensor=2", None, shown="the run's")
    preset: str | None = option(tuple(PRESETS), "with one of these: of a preset, not of a run", None, shown="the run")
    network: str | None = option(TEXT, "with --communication: links, see above", None, shown="eight H200s a host")
    train_options: str | None = option(TEXT, "with --communication: options of jax-te train", None)
    recipes: bool = option(SWITCH, "only list each layer's recipe, and why it has it", False)
    sensitivity: bool = option(SWITCH, "quantize each layer alone, and rank them", False)
    batches: int | None = option(SIZE, "with --sensitivity: batches of held-out text", None, shown="2")
    keep_bf16: int | None = option(Text("K", SIZE.parse), "with --sensitivity: worst layers to keep in bf16", None)
    write: str | None = option(FILE, "with --keep-bf16: write a --precision-config that does it", None)
    json: bool = option(SWITCH, "print JSON", False, shown="tables")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Show versions, devices, backends, and which recipes run here.

    Show versions, devices and backends, and for every recipe whether it runs here, and if not what to do.
    """


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a run notes of files that are given: no options."""

    vocab_size: int = option(SIZE, "rows of the embedding", 256)
    tokenizer_sha256: str | None = option(Text("HASH", matching("[0-9a-f]{64}", "a SHA-256")), "of the file", None)
    architecture: str | None = option(Text("JSON", str), "config.json of --init-from", None)


# Dataclasses take the fields of their bases from the last one on: config.json begins with the data.
@dataclass(frozen=True, kw_only=True)
class RunOptions(
    Recorded, OutputOptions, ExecutionOptions, PrecisionOptions, TrainingOptions, ModelOptions, DataOptions
):
    """All that ``config.json`` has of a run, except the preset."""


GROUPS: dict[str, type] = {
    "data": DataOptions,
    "model": ModelOptions,
    "training": TrainingOptions,
    "precision": PrecisionOptions,
    "execution": ExecutionOptions,
    "output": OutputOptions,
}
"""The table of ``jax-te train`` under the headings of its ``--help``."""

OPTIONS: dict[str, Option] = {name: row for group in GROUPS.values() for name, row in options_of(group).items()}
"""Every row of the table by the name of its field."""

MAY_CHANGE = {name for name, row in OPTIONS.items() if row.may_change}
"""Fields that a resumed run may be given anew."""

OF_MESH = {name for name, row in OPTIONS.items() if row.of_mesh}
"""Fields without effect where there is no mesh."""

_FLAGS = {name: flag(field) for field, row in OPTIONS.items() for name in row.library or (field,) if "_" in name}


@contextlib.contextmanager
def flags_named() -> Iterator[None]:
    """Yield, and put flags for the names of fields into the message of a ValueError that is raised inside.

    >>> with flags_named():
    ...     raise ValueError("hidden_size 3 is not divisible by num_attention_heads 2")
    Traceback (most recent call last):
    ValueError: --hidden-size 3 is not divisible by --num-heads 2
    """
    try:
        yield
    except ValueError as error:
        # Names of one word, like "bias" and "data", are words of sentences, too; they stay as they are.
        text = re.sub(r"\b\w+\b", lambda word: _FLAGS.get(word[0], word[0]), str(error))
        raise ValueError(text.removesuffix(", or give kv_channels")) from error  # which is no option
