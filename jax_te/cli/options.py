"""The options of every command. Imports nothing heavy, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from typing import Any, NoReturn

from jax_te import __version__
from jax_te.cli.presets import PRESETS, preset_table

RECIPES = ("none", "delayed", "current", "block", "mxfp8", "nvfp4")
GEMMS = ("fprop", "dgrad", "wgrad")
DTYPES = ("float32", "bfloat16", "float16")
CP_COMM_TYPES = ("p2p", "all_gather", "a2a")
GRANULARITIES = ("none", "full", "selective")
MODULES = ("core_attn", "layernorm", "activation", "mlp")
METHODS = ("uniform", "block")
POLICIES = ("full", "save_gemms", "save_quantized", "offload_gemms")
ACTIVATIONS = (
    *("gelu", "geglu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu", "glu"),
    "clamped_swiglu",
)
POSITIONS = ("learned_absolute", "rope", "none")
PRESET = "(default: the preset's)"
FLAG = argparse.BooleanOptionalAction


class Parser(argparse.ArgumentParser):
    """ArgumentParser whose errors are one line, with the nearest option where one was misspelt."""

    def __init__(self, **kwargs: Any):
        super().__init__(**({"allow_abbrev": False, "formatter_class": _Formatter} | kwargs))

    def parse_known_args(self, args=None, namespace=None):
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = difflib.get_close_matches(unknown[0].split("=")[0], self._option_string_actions, n=1)
            self.error(f"unknown argument {unknown[0]!r}" + (f", did you mean {near[0]}?" if near else ""))
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"jax-te: error: {message}; see '{self.prog} --help'\n")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=110)


def number(kind: type, low: float, *, above: bool = False) -> Callable[[str], int | float]:
    """An argparse type: a number ``>= low`` (``> low`` if ``above``)."""
    relation = f"> {low:g}" if above else f">= {low:g}"
    noun = "an integer" if kind is int else "a number"

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {noun} {relation}, got {text!r}") from None
        if not (value > low if above else value >= low) or value == float("inf"):
            raise argparse.ArgumentTypeError(f"must be {noun} {relation}, got {text}")
        return value

    return parse


SIZE, COUNT, POSITIVE, NON_NEGATIVE = (
    number(int, 1.0),
    number(int, 0.0),
    number(float, 0.0, above=True),
    number(float, 0.0),
)


def rate(text: str) -> float:
    """An argparse type: a probability in [0, 1)."""
    value = NON_NEGATIVE(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"must be a number in [0, 1), got {text}")
    return value


def some_of(allowed: tuple[str, ...]) -> Callable[[str], str]:
    """An argparse type: names separated by commas, given back in the order of ``allowed``."""

    def parse(text: str) -> str:
        names = [name.strip() for name in text.split(",")]
        if any(name not in allowed or names.count(name) > 1 for name in names):
            raise argparse.ArgumentTypeError(f"must be some of {','.join(allowed)}, each once, got {text!r}")
        return ",".join(name for name in allowed if name in names)

    return parse


def auto_or_flag(text: str) -> bool | str:
    """An argparse type: ``auto``, ``yes`` or ``no``; the last two as True and False."""
    choices: dict[str, bool | str] = {"auto": "auto", "yes": True, "no": False}
    if text not in choices:
        raise argparse.ArgumentTypeError(f"must be auto, yes or no, got {text!r}")
    return choices[text]


def build_parser(command: str | None = None) -> Parser:
    """The parser of ``jax-te`` and its commands.

    Args:
        command: the command that was asked for. Only ``bench``, whose options live beside it, needs it.
    """
    parser = Parser(
        prog="jax-te",
        description="Train, sample, check and measure Transformer Engine models in JAX.",
        epilog="'jax-te COMMAND --help' lists a command's options.",
    )
    parser.add_argument("--version", action="version", version=f"jax-te {__version__}")
    parser.set_defaults(command=None, debug=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_train(commands)
    _add_sample(commands)
    _add_inspect(commands)
    _add_doctor(commands)
    _add_bench(commands, wanted=command == "bench")
    return parser


def _command(commands: argparse._SubParsersAction, name: str, summary: str, **kwargs: Any) -> Parser:
    parser = commands.add_parser(name, help=summary, usage=f"jax-te {name} [options]", **kwargs)
    parser.set_defaults(command=name)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_train(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "train",
        "train a GPT on bytes of text, or resume",
        description=(
            "Train a byte-level GPT. With no option: the tiny preset on the Python standard library's source files.\n"
            "Started again with the same --output it resumes, and options that are not given are those of that run.\n"
            "SIGTERM or Ctrl-C ends it with a checkpoint."
        ),
        epilog=preset_table(),
        argument_default=argparse.SUPPRESS,  # only what is given is set: a resumed run takes the rest from its folder
    )
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), help="model and settings to start from, see below (default: tiny)")
    add("--output", metavar="DIR", help="folder of the run (default: runs/PRESET, or runs/PRESET-RECIPE)")

    add = parser.add_argument_group("data").add_argument
    add("--data", metavar="PATH", help="text file or folder (default: the Python standard library's sources)")
    add("--seq-len", type=SIZE, metavar="N", help=f"bytes of an example {PRESET}")

    add = parser.add_argument_group("model").add_argument
    add("--num-layers", type=SIZE, metavar="N", help=f"transformer layers {PRESET}")
    add("--hidden-size", type=SIZE, metavar="N", help=f"model dimension {PRESET}")
    add("--num-heads", type=SIZE, metavar="N", help=f"query heads {PRESET}")
    add("--num-query-groups", type=SIZE, metavar="N", help="key/value heads (default: a --num-heads given, or preset)")
    add(
        "--ffn-hidden-size",
        type=SIZE,
        metavar="N",
        help="feed-forward size (default: 4 --hidden-size given, or preset)",
    )
    add("--normalization", choices=("LayerNorm", "RMSNorm"), help=PRESET)
    add("--activation", choices=ACTIVATIONS, help=f"of the feed-forward layer {PRESET}")
    add("--position-embedding", choices=POSITIONS, help=PRESET)
    add("--bias", action=FLAG, help=f"biases in linear layers {PRESET}")
    add("--tie-embeddings", action=FLAG, help=f"the output head shares the embedding {PRESET}")
    add("--dropout", type=rate, metavar="P", help="of attention and hidden states (default: 0)")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=SIZE, metavar="N", help=f"optimizer steps {PRESET}")
    add("--batch-size", type=SIZE, metavar="N", help=f"examples of a step, over all devices {PRESET}")
    add("--microbatches", type=SIZE, metavar="N", help="parts of a batch: gradient accumulation (default: 1)")
    add("--learning-rate", type=POSITIVE, metavar="X", help=f"after warm-up {PRESET}")
    add("--min-learning-rate", type=NON_NEGATIVE, metavar="X", help="where cosine decay ends (default: a tenth of it)")
    add("--warmup-steps", type=COUNT, metavar="N", help="linear warm-up (default: the preset's, at most --steps / 10)")
    add("--decay-steps", type=SIZE, metavar="N", help="where decay ends (default: the --steps of the first start)")
    add("--weight-decay", type=NON_NEGATIVE, metavar="X", help="of matrices, decoupled (default: 0.1)")
    add("--clip-norm", type=POSITIVE, metavar="X", help="global gradient norm (default: 1)")
    add("--seed", type=COUNT, metavar="N", help="of weights, data order and dropout (default: 0)")

    add = parser.add_argument_group("precision").add_argument
    add("--recipe", choices=RECIPES, help="how the layers' linears are quantized (default: none)")
    add("--fp8-format", choices=("hybrid", "e4m3"), help="hybrid: E5M2 gradients (default: delayed, current: hybrid)")
    add("--amax-history-len", type=SIZE, metavar="N", help="delayed: steps a scale looks back (default: 1024)")
    add("--amax-compute-algo", choices=("max", "most_recent"), help="delayed: of the history (default: max)")
    add("--margin", type=COUNT, metavar="N", help="delayed: powers of two of head-room (default: 0)")
    add("--use-power-2-scales", action=FLAG, help="current: scales are powers of two (default: no)")
    add("--use-f32-scales", action=FLAG, help="block: scales are any fp32, not powers of two (default: no)")
    add("--rht", action=FLAG, help="nvfp4: Hadamard transform for weight gradients (default: yes)")
    add("--stochastic-rounding", action=FLAG, help="nvfp4: of gradients (default: yes)")
    add("--square-blocks", action=FLAG, help="nvfp4: kernels have 16 x 16 blocks, not 1 x 16 (default: yes)")
    add("--fp8-accumulation", choices=("fast", "precise"), help="delayed, current: sums on Hopper (default: fast)")
    add(
        "--override-linear-precision",
        type=some_of(GEMMS),
        metavar="GEMMS",
        help="GEMMs in high precision, some of fprop,dgrad,wgrad (default: none of them)",
    )
    add("--fp8-param", action=FLAG, help="hold kernels quantized, with fp32 masters (default: no)")
    add("--bf16-layers-start", type=COUNT, metavar="N", help="first layers not to quantize (default: 0)")
    add("--bf16-layers-end", type=COUNT, metavar="N", help="last layers not to quantize (default: 0)")
    add(
        "--precision-config",
        metavar="FILE",
        help="YAML with rules for single layers; kept with the run (default: none)",
    )
    add("--params-dtype", choices=DTYPES, help="half keeps fp32 masters (default: bfloat16 on a GPU, else float32)")
    add("--compute-dtype", choices=DTYPES, help="of activations (default: --params-dtype)")

    add = parser.add_argument_group("execution").add_argument
    add("--backend", choices=("auto", "xla", "te"), help="kernels; te runs or says why it cannot (default: auto)")
    add("--mesh", metavar="AXES", help="data, fsdp, context, tensor: e.g. data=2,tensor=4 (default: one device)")
    add("--mesh-axis-type", choices=("auto", "explicit"), help="kind of mesh axes (default: auto)")
    add("--sequence-parallel", action=FLAG, help="split activations over tensor ranks between blocks (default: no)")
    add("--cp-comm-type", choices=CP_COMM_TYPES, help="how context ranks exchange keys (default: p2p)")
    add("--cp-load-balanced", action=FLAG, help="context ranks have tokens in zig-zag order (default: no)")
    add("--recompute-granularity", choices=GRANULARITIES, help="what backward computes again (default: none)")
    add("--recompute-method", choices=METHODS, help="full: groups, or the first layers (default: uniform)")
    add("--recompute-num-layers", type=SIZE, metavar="N", help="full: layers of a group, or first layers (default: 1)")
    add(
        "--recompute-modules",
        type=some_of(MODULES),
        metavar="NAMES",
        help="selective: some of core_attn,layernorm,activation,mlp (default: core_attn)",
    )
    add("--recompute-policy", choices=POLICIES, help="full: what is kept inside of layers (default: full, nothing)")
    add("--distribute-saved-activations", action=FLAG, help="full: split kept inputs over tensor ranks (default: no)")
    add(
        "--scan-layers",
        type=auto_or_flag,
        metavar="WHEN",
        help="layers in a loop, which compiles sooner: yes, no, or auto: if they are many (default: auto)",
    )

    add = parser.add_argument_group("output").add_argument
    add("--save-every", type=SIZE, metavar="N", help=f"steps between checkpoints {PRESET}")
    add("--keep", type=SIZE, metavar="N", help="newest checkpoints kept (default: 3)")
    add("--eval-every", type=SIZE, metavar="N", help=f"steps between held-out losses {PRESET}")
    add("--eval-batches", type=SIZE, metavar="N", help="batches of a held-out loss (default: 16)")
    add("--log-every", type=SIZE, metavar="N", help=f"steps between lines and TensorBoard points {PRESET}")
    add(
        "--inspect-every",
        type=COUNT,
        metavar="N",
        help="steps between statistics of quantized tensors (default: 0, never)",
    )


def _add_sample(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "sample",
        "generate text with a trained model",
        description="Generate text from the newest checkpoint of a run, with a key/value cache.",
    )
    add = parser.add_argument
    add("--output", metavar="DIR", default="runs/tiny", help="folder of the run (default: runs/tiny)")
    add("--prompt", metavar="TEXT", default="def ", help="text to continue (default: 'def ')")
    add("--length", type=SIZE, default=256, metavar="N", help="bytes to generate (default: 256)")
    add("--temperature", type=NON_NEGATIVE, default=0.8, metavar="X", help="0: the likeliest byte (default: 0.8)")
    add("--top-k", type=COUNT, default=0, metavar="N", help="draw from the N likeliest bytes; 0: all (default: 0)")
    add("--seed", type=COUNT, default=0, metavar="N", help="of the drawing (default: 0)")


def _add_inspect(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "inspect",
        "show what quantization does to the tensors of a run, and how its arrays are split",
        description=(
            "One batch of held-out text runs forward and backward through the newest checkpoint of a run, and every\n"
            "tensor that is quantized is looked at: largest value, scale, share of values lost to 0 (underflow) or to\n"
            "the format's largest (saturation), and the squared error over the tensor's mean square, in decibels.\n"
            "Runs on one device, also a CPU, whatever the run was trained on.\n\n"
            "With --sharding nothing runs: it lists every array of the training state, its logical axes, the mesh\n"
            "axes that split it and its bytes, in all and on each device, and draws which device holds which part.\n"
            "It needs neither a checkpoint nor devices: jax-te inspect --sharding --preset gpt-1.3b --mesh fsdp=8"
        ),
        epilog=(
            "columns of --sensitivity, for each layer quantized alone:\n"
            "  gradient error  |g - g0| / |g0|, g and g0 the gradients of all parameters with and without it: the\n"
            "                  noise that quantizing this layer adds to an update. The rows are in its order.\n"
            "  loss increase   loss with it minus loss without. It may be negative, and where it is small beside\n"
            "                  the loss's spread over batches (--batches) it says little.\n\n"
            "Delayed scaling has no past in --sensitivity, and with another --recipe or --precision-config: it then\n"
            "takes its scales from one pass over the first batch under current scaling."
        ),
    )
    add = parser.add_argument
    add("--output", metavar="DIR", default="runs/tiny", help="folder of the run (default: runs/tiny)")
    add("--recipe", choices=RECIPES[1:], help="another recipe, with its default fields (default: the run's)")
    add("--precision-config", metavar="FILE", help="another precision file; reports on it (default: the run's)")
    add("--data", metavar="PATH", help="text file or folder (default: the run's)")
    add("--batch-size", type=SIZE, metavar="N", help="examples of a batch (default: a microbatch of the run)")
    add("--sharding", action="store_true", help="show how the arrays are split over devices (default: no)")
    add("--mesh", metavar="AXES", help="with --sharding: over this mesh, e.g. fsdp=4,tensor=2 (default: the run's)")
    add("--preset", choices=tuple(PRESETS), help="with --sharding: of a preset, in place of a run (default: the run)")
    add("--recipes", action="store_true", help="only list each layer's recipe, and why it has it (default: no)")
    add("--sensitivity", action="store_true", help="quantize each layer alone, and rank them (default: no)")
    add("--batches", type=SIZE, metavar="N", help="with --sensitivity: batches of held-out text (default: 2)")
    add("--keep-bf16", type=SIZE, metavar="K", help="with --sensitivity: worst layers to keep in bf16 (default: none)")
    add("--write", metavar="FILE", help="with --keep-bf16: write a --precision-config that does it (default: none)")
    add("--json", action="store_true", help="print JSON (default: tables)")


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    description = (
        "Show versions, devices and backends, and for every recipe whether it runs here, and if not what to do."
    )
    _command(
        commands, "doctor", "show versions, devices, backends, and which recipes run here", description=description
    )


def _add_bench(commands: argparse._SubParsersAction, *, wanted: bool) -> None:
    if not wanted:
        _command(commands, "bench", "measure layers or train steps beside te.jax's")
        return
    from jax_te.bench.internal import add_parser

    add_parser(commands)
    parser = commands.choices["bench"]
    parser.set_defaults(command="bench")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
