"""``jax-te bench``: layers, attention or train steps of jax_te and of its peers, in turn, in one command."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from jax_te.bench.internal import (
    MODULES,
    Case,
    Row,
    Settings,
    Shape,
    Sizes,
    Variant,
    bench_attention,
    bench_checkpoints,
    bench_layer,
    bench_microbatches,
    bench_train_steps,
    check_megatron,
    created,
)
from jax_te.cli.build import build_model
from jax_te.cli.compile_cache import keep_compiled_programs
from jax_te.cli.memory import check_fits, least_memory
from jax_te.cli.options import CP_COMM_TYPES, MESH, METHODS, POLICIES, SIZE, flag, some_of
from jax_te.cli.presets import PRESETS
from jax_te.cli.resolve import new_config
from jax_te.cli.run_config import RunConfig
from jax_te.config import RECOMPUTE_MODULES, ParallelConfig
from jax_te.models import Execution
from jax_te.ops import BACKENDS
from jax_te.ops.internal import te
from jax_te.pipeline import PipelineConfig
from jax_te.recipe import recipe_from_name
from jax_te.sharding import make_mesh

RECIPES = ["none", "delayed", "current"]
DEFAULT_SHAPE: Shape = (4, 2048, 4096, 32, 16384)
CALLS = 10
STACKS = ("unrolled", "scanned")
MODEL_DEFAULTS = {
    "stack": [STACKS[0]],
    "recompute": ["none"],
    "layers": None,
    "vocabulary": RunConfig.vocab_size,
    "loss_chunks": 1,
    "batch_parts": [1],
    "wgrad_dtype": ["float32"],
    "reduce_gradients": ["microbatch"],
    "distributed_optimizer": False,
    "peer": None,
    "batch": None,
    "pipeline": ["1f1b"],
    "checkpoints": None,
    "profile": None,
}
"""Options that go with ``--model`` only, and their values where they are not given."""

_OF_STEPS = MODEL_DEFAULTS.keys() - {"layers", "vocabulary", "distributed_optimizer", "checkpoints"}
_COUNTED = " or ".join(f"{method}:LAYERS" for method in METHODS)
_MODULE_NAMES = ",".join(RECOMPUTE_MODULES)


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Add the options and the description of ``jax-te bench`` to its parser."""
    parser.description = (
        "Forward and backward of one layer (causal, GELU, biases, bf16): jax_te's and te.jax's own, "
        "measured in turn in one process; for a recipe that te.jax has not, its bf16 layer. "
        "speed_ratio is the peer's time over the row's, memory_ratio the row's temporary memory over the peer's. "
        "With --model: whole train steps, unrolled or scanned, under each way of recomputation. "
        "With --context-parallel: attention alone; of_one_device is a device's rate over the same library's on one."
    )
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter  # its options have lists as defaults
    add = parser.add_argument
    add("--modules", nargs="+", choices=MODULES, default=MODULES[:1], help="layers to measure")
    add("--recipes", nargs="+", default=RECIPES, help="recipes to measure")
    shape = "batch, sequence, hidden size, heads, feed-forward size"
    names = ("B", "S", "H", "HEADS", "F")
    add("--shape", nargs=5, type=SIZE.parse, default=[*DEFAULT_SHAPE], metavar=names, help=shape)
    add("--backend", choices=BACKENDS, default="auto", help="backend of jax_te's layer")
    add(
        "--mesh",
        type=MESH.parse,
        metavar="SIZES",
        help="run on a mesh, like tensor=4 or data=2,tensor=2; default: one device",
    )
    add("--sequence-parallel", action="store_true", help="with --mesh: sequence parallelism")
    steps = "measure instead train steps of a GPT of 4 such layers over M microbatches of B sequences, its kernels "
    steps += "quantized once a step beside in every microbatch; with --model: microbatches of its steps"
    add("--microbatches", type=SIZE.parse, metavar="M", help=steps)
    attention = "measure instead causal attention alone, its sequences sharded over the context axis of --mesh in "
    attention += f"these ways: {', '.join(CP_COMM_TYPES)}; te.jax has the first two"
    add("--context-parallel", nargs="+", choices=CP_COMM_TYPES, metavar="WAY", help=attention)
    add("--groups", type=SIZE.parse, metavar="G", help="with --context-parallel: key/value heads; HEADS")
    model = (
        "measure instead train steps of this preset of jax-te train (AdamW on fp32 masters, bf16 parameters, its own "
    )
    model += (
        "batch), every --stack with every --recompute and --pipeline, all of a recipe on one state, on --mesh if it is "
    )
    model += "given. Ratios are to a recipe's first row that ran, peak_gib is a device's arguments and temporary arrays"
    add("--model", choices=tuple(PRESETS), help=model)
    add("--rounds", type=SIZE.parse, default=7, help="rounds of measurement; the median counts")
    add("--calls", type=SIZE.parse, default=CALLS, help="calls in a round")
    add("--output", metavar="FILE", help="write the rows to this JSON file")
    add("--hlo", metavar="DIR", help="write the compiled programs to this folder")
    _add_model_options(parser)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    # Only what is given is set, so that it can be refused where there is no --model.
    add = parser.add_argument_group("with --model", argument_default=argparse.SUPPRESS).add_argument
    add("--stack", nargs="+", choices=STACKS, help="forms of the layer stack (default: unrolled)")
    ways = f"what backward computes again: none; some of {_MODULE_NAMES}; all layers, one by one, with a policy: "
    ways += f"{', '.join(POLICIES)}; {_COUNTED} (default: none)"
    add("--recompute", nargs="+", type=recompute, metavar="WAY", help=ways)
    add("--layers", type=SIZE.parse, metavar="N", help="layers (default: the preset's)")
    add(
        "--vocabulary",
        type=SIZE.parse,
        metavar="V",
        help=f"rows of the embedding (default: {RunConfig.vocab_size}, bytes)",
    )
    add("--loss-chunks", type=SIZE.parse, metavar="N", help="parts that the loss takes logits in (default: 1)")
    add("--wgrad-dtype", nargs="+", choices=("float32", "bfloat16"), help="of kernels' gradients (default: float32)")
    when = "when data devices of --mesh add up kernels' gradients (default: microbatch)"
    add("--reduce-gradients", nargs="+", choices=("microbatch", "step"), help=when)
    parts = "parts of the batch that take turns in each layer (default: 1)"
    add("--batch-parts", nargs="+", type=SIZE.parse, metavar="N", help=parts)
    peer = "beside a GPT of te.jax's own layers, on one device, or Megatron-Core's in processes of its own, which "
    peer += "start while jax_te compiles. Its peak_gib is what torch allocated; where jax_te has fsdp, it splits "
    peer += "optimizer state alone; a pipeline's stages have equally many layers and run 1F1B; it adds up gradients "
    peer += "of several devices or microbatches in the first --wgrad-dtype, else in bf16. The peer is the first row "
    peer += "(default: none)"
    add("--distributed-optimizer", action="store_true", help="data devices of --mesh split masters and optimizer state")
    add("--peer", choices=("te", "megatron"), help=peer)
    add("--batch", type=SIZE.parse, metavar="N", help="sequences of a step, of all devices (default: the preset's)")
    schedules = "of the mesh's pipeline axis: gpipe, 1f1b[,virtual_stages=N] or zero_bubble (default: 1f1b)"
    add("--pipeline", nargs="+", type=schedule, metavar="SCHEDULE", help=schedules)
    saving = "measure instead, in this folder, how its state is saved and restored, beside Orbax alone; "
    tracing = "trace two steps of each row after its rounds into this folder, and print the time by kind of kernel"
    add("--profile", metavar="DIR", help=tracing + "; not of Megatron-Core's")
    add("--checkpoints", metavar="DIR", help=saving + "beyond_copy_s is what a save stalls a loop for")


def schedule(text: str) -> str:
    """Return a pipeline's schedule: an argparse type.

    >>> schedule("1f1b,virtual_stages=2")
    '1f1b,virtual_stages=2'
    """
    try:
        PipelineConfig.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


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


def run(args: argparse.Namespace) -> int:
    """Return the exit status, 0, once the rows that were asked for are printed.

    Raises:
        ValueError: for options without effect; if no train step of ``--model`` ran, with the first one's error.
    """
    given = [name for name in MODEL_DEFAULTS if hasattr(args, name)]
    args = argparse.Namespace(**(MODEL_DEFAULTS | vars(args)))
    _check(args, given)
    keep_compiled_programs()
    if args.model is None:
        _check_shape(args)
    device, rows = jax.devices()[0], []
    print(f"{device.device_kind}, jax {jax.__version__}", flush=True)
    for row in _rows(args):
        print(json.dumps(row), flush=True)
        rows.append(row)
    if not rows:  # an empty list, which argparse of Python 3.11 makes of `--recipes=--`
        raise ValueError("there is nothing to measure: an option that names what to measure is empty; name something")
    # A contestant that fails is a row, so that the others go on; no row that was measured is an error.
    if all("error" in row for row in rows):
        raise ValueError(f"nothing could be measured; {rows[0]['name']}: {rows[0]['error']}")
    if args.output:
        Path(args.output).write_text(json.dumps({"device": device.device_kind, "jax": jax.__version__, "rows": rows}))
    return 0


def _check(args: argparse.Namespace, given: list[str]) -> None:
    """Raise ValueError for options that would have no effect."""
    sizes = ParallelConfig() if args.mesh is None else ParallelConfig.parse(args.mesh)
    layers = bool(args.sequence_parallel or args.hlo or args.modules != MODULES[:1])
    if args.model is None and given:
        raise ValueError(f"{flag(given[0])} is for whole train steps of a preset; give --model")
    # Another measurement: its options would be ignored by this one.
    other = bool(args.hlo or args.context_parallel or args.modules != MODULES[:1] or args.shape != [*DEFAULT_SHAPE])
    if args.model is not None and other:
        raise ValueError(
            "--model measures whole train steps at the preset's sizes; leave out --modules, --shape, "
            "--context-parallel and --hlo"
        )
    if args.checkpoints is not None and (_OF_STEPS & {*given} or args.microbatches is not None or args.calls != CALLS):
        raise ValueError(
            "--checkpoints takes no step: leave out --stack, --recompute, --peer, --loss-chunks, --batch-parts, "
            "--wgrad-dtype, --reduce-gradients, --batch, --pipeline, --profile, --microbatches and --calls"
        )
    if args.peer is not None and args.model is not None:
        _check_peer(args, sizes)
    if "distributed_optimizer" in given and sizes.data == 1:
        raise ValueError("--distributed-optimizer splits the state over data devices; give --mesh with data=N")
    if "reduce_gradients" in given and (sizes.data * sizes.context == 1 or args.microbatches in (None, 1)):
        raise ValueError(
            "--reduce-gradients is for microbatches on data devices; give --mesh with data=N, --microbatches"
        )
    if args.context_parallel is None and args.groups is not None:
        raise ValueError("--groups is of --context-parallel, which measures attention alone")
    if args.context_parallel is not None:
        if layers or args.recipes != RECIPES or args.microbatches is not None:
            raise ValueError(
                "--context-parallel measures attention alone in bf16; leave out --modules, --recipes, "
                "--sequence-parallel, --microbatches, --model and --hlo"
            )
        if sizes.context == 1:
            raise ValueError("--context-parallel shards sequences over the context axis; give --mesh with context=N")
    if args.model is None and args.microbatches is not None and (layers or args.mesh):
        raise ValueError(
            "--microbatches measures whole train steps; leave out --modules, --mesh, --sequence-parallel and --hlo"
        )
    if args.sequence_parallel and sizes.tensor == 1:
        raise ValueError("--sequence-parallel shards activations over the tensor axis; give --mesh with tensor=N")


def _check_shape(args: argparse.Namespace) -> None:
    """Raise ValueError, before anything is allocated, for a ``--shape`` that takes more memory than there is."""
    batch, sequence, hidden, heads, ffn = args.shape
    devices = 1 if args.mesh is None else ParallelConfig.parse(args.mesh).num_devices
    # In bf16, and at the very least: a layer's input, its gradient and the output's, a kernel and its gradient.
    values = batch * sequence * (2 * hidden + min(hidden, ffn) + 2 * (args.microbatches or 0))
    if args.context_parallel is None:
        values += 2 * hidden * ffn
    else:
        devices = 1  # attention is measured on one device, too
    # Fused kernels of GPUs keep no attention scores.
    attends = args.context_parallel or args.microbatches or "transformer_layer" in args.modules
    if attends and jax.default_backend() == "cpu":
        values += batch * heads * sequence**2
    check_fits(2 * values // devices, devices, "--shape, or give a larger --mesh")


def _check_peer(args: argparse.Namespace, sizes: ParallelConfig) -> None:
    """Raise ValueError if the peer cannot be measured beside the model."""
    if args.peer == "megatron":
        if sizes.num_devices != sizes.pipeline * sizes.data * sizes.fsdp * sizes.tensor:
            raise ValueError(f"--peer megatron has the axes pipeline, data, fsdp and tensor; got --mesh {args.mesh}")
        check_megatron()
        return
    if args.mesh is not None or args.microbatches is not None:
        raise ValueError("--peer te is a GPT on one device, without microbatches; leave out --mesh and --microbatches")
    form = PRESETS[args.model].values
    if (form["normalization"], form["position_embedding"]) != ("LayerNorm", "learned_absolute"):
        raise ValueError(f"--peer te is a GPT in GPT-2's form, and {args.model} is not; take one of the gpt presets")
    ok, reason = te.available()
    if not ok:
        raise ValueError(f"--peer te: {reason}")


def _rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of the measurement that was asked for."""
    profile = None if args.profile is None else Path(args.profile)
    settings = Settings(backend=args.backend, rounds=args.rounds, calls=args.calls, profile=profile)
    sizes = None if args.mesh is None else ParallelConfig.parse(args.mesh)
    shape = tuple(args.shape)
    if args.model is not None:
        for name in args.recipes:
            yield from _train_steps(args, name, settings)
    elif args.context_parallel is not None:
        yield from bench_attention(
            args.context_parallel, shape, sizes or ParallelConfig(), settings, groups=args.groups
        )
    elif args.microbatches is not None:
        yield from bench_microbatches(args.recipes, shape, args.microbatches, settings)
    else:
        mesh = None if sizes is None else make_mesh(sizes)
        options = {"shape": shape, "mesh": mesh, "sequence_parallel": args.sequence_parallel}
        recipes = [recipe_from_name(name) for name in args.recipes]
        cases = [Case(module=module, recipe=recipe, **options) for module in args.modules for recipe in recipes]
        yield from bench_layer(cases, settings, hlo=Path(args.hlo) if args.hlo else None)


def _train_steps(args: argparse.Namespace, recipe: str, settings: Settings) -> list[Row]:
    """Return the rows of one recipe."""
    variants, parallel = [], None if args.mesh is None else ParallelConfig.parse(args.mesh)
    fields = {"num_layers": args.layers, "batch_size": args.batch, "microbatches": args.microbatches, "mesh": args.mesh}
    fields |= {"sequence_parallel": args.sequence_parallel or None}
    names = ("stack", "recompute", "pipeline", "batch_parts", "wgrad_dtype", "reduce_gradients")
    for stack, way, schedule, parts, wgrad, when in itertools.product(*(getattr(args, name) for name in names)):
        config = train_step_config(args.model, recipe, way, **fields, pipeline=schedule)
        config = replace(config, vocab_size=args.vocabulary)
        devices = 1 if parallel is None else parallel.num_devices
        check_fits(least_memory(config, training=False), devices, "--layers or --vocabulary, or take a smaller --model")
        execution = Execution(config.recompute_policy, stack == "scanned", args.loss_chunks, parts)
        stages = f", {schedule}" if parallel is not None and parallel.pipeline > 1 else ""
        turns = (f", {parts} parts" if parts > 1 else "") + (f", gradients {wgrad}" if wgrad != "float32" else "")
        turns += ", reduced once a step" if when == "step" else ""
        variant = Variant(
            name=f"{recipe}, {stack}, recompute {way}{stages}{turns}",
            recipe=config.make_recipe(),
            build=build_model(config, execution=execution),
            pipeline=PipelineConfig.parse(schedule),
            wgrad_dtype=jnp.dtype(wgrad),
            reduce_gradients=when,
        )
        variants.append(variant)
    sizes = Sizes(
        config=config.transformer_config(),
        vocabulary=args.vocabulary,
        batch=config.batch_size,
        sequence=config.seq_len,
        microbatches=config.microbatches,
        mesh=None if parallel is None else make_mesh(parallel),
        distributed_optimizer=args.distributed_optimizer,
        tied=config.tie_embeddings,
    )
    if args.checkpoints is not None:
        state = created(variants[0], sizes, settings.backend)
        return bench_checkpoints(state, Path(args.checkpoints), settings.rounds, recipe)
    return bench_train_steps(variants, sizes, settings, peer=args.peer)


def train_step_config(preset: str, recipe: str, way: str, **fields: object) -> RunConfig:
    """Return the configuration of a preset in bf16 under a recipe, with a way of recomputation as `recompute` reads it.

    Args:
        preset, recipe, way: their names.
        fields: others of `RunConfig`. None: the preset's.
    """
    # The dtype of a GPU, also where this runs on a CPU.
    given: dict[str, object] = {"preset": preset, "recipe": recipe, "params_dtype": "bfloat16"}
    given |= {name: value for name, value in fields.items() if value is not None}
    if way in POLICIES:
        given |= {"recompute_granularity": "full", "recompute_policy": way}
    elif ":" in way:
        method, _, count = way.partition(":")
        given |= {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": int(count)}
    elif way != "none":
        given |= {"recompute_granularity": "selective", "recompute_modules": way}
    return new_config(given)
