"""``jax-te bench``: layers of jax_te and of its peers, in turn, in one process."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

from jax_te.bench.attention import WAYS, bench_attention, check_attention
from jax_te.bench.model import add_options, bench_model, check_options
from jax_te.bench.modules import MODULES, TE_RECIPES, Case, Shape, measure, ours, te_jax
from jax_te.bench.step import bench_step
from jax_te.config import ParallelConfig
from jax_te.ops.internal import te
from jax_te.recipe import recipe_from_name
from jax_te.sharding import make_mesh

RECIPES = ["none", "delayed", "current"]
DEFAULT_SHAPE: Shape = (4, 2048, 4096, 32, 16384)


def bench_module(args: argparse.Namespace, module: str) -> list[dict[str, Any]]:
    """Measure one module per recipe, jax_te's beside te.jax's where that is there."""
    mesh = None if args.mesh is None else make_mesh(ParallelConfig.parse(args.mesh))
    rows = []
    for name in args.recipes:
        case = Case(
            module=module,
            shape=tuple(args.shape),
            recipe=recipe_from_name(name),
            mesh=mesh,
            sequence_parallel=args.sequence_parallel,
        )
        contestants = [ours(case, args.backend)]
        if te.available()[0]:
            peer = case if name in TE_RECIPES else dataclasses.replace(case, recipe=None)
            contestants.insert(0, te_jax(peer))
        measure(contestants, rounds=args.rounds, calls=args.calls)
        summaries = [contestant.summary(case) for contestant in contestants]
        for summary in summaries:
            first = summaries[0]
            summary["speed_ratio"] = round(first["ms"] / summary["ms"], 3)
            summary["memory_ratio"] = round(summary["temp_gib"] / first["temp_gib"], 3) if first["temp_gib"] else None
            print(json.dumps(summary), flush=True)
        if args.hlo:
            for contestant in contestants:
                stem = contestant.name.replace(" ", "_").replace("(", "").replace(")", "")
                Path(args.hlo).mkdir(parents=True, exist_ok=True)
                (Path(args.hlo) / f"{stem}.txt").write_text(contestant.hlo)
        rows += summaries
        del contestants
    return rows


def add_parser(subparsers: Any) -> None:
    """Register ``jax-te bench``."""
    parser = subparsers.add_parser(
        "bench",
        help="measure layers or train steps beside te.jax's",
        description="Forward and backward of one layer (causal, GELU, biases, bf16): jax_te's and te.jax's own, "
        "measured in turn in one process; for a recipe that te.jax has not, its bf16 layer. "
        "speed_ratio is the peer's time over the row's, memory_ratio the row's temporary memory over the peer's. "
        "With --model: whole train steps, unrolled or scanned, under each way of recomputation. "
        "With --context-parallel: attention alone; of_one_device is a device's rate over the same library's on one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=MODULES[:1], help="layers to measure")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, help="recipes to measure")
    parser.add_argument(
        "--shape", nargs=5, type=int, default=list(DEFAULT_SHAPE), metavar=("B", "S", "H", "HEADS", "F"),
        help="batch, sequence, hidden size, heads, feed-forward size",
    )  # fmt: skip
    parser.add_argument("--backend", choices=["auto", "te", "xla"], default="auto", help="backend of jax_te's layer")
    parser.add_argument(
        "--mesh", metavar="SIZES", help="run on a mesh, like tensor=4 or data=2,tensor=2; default: one device"
    )
    parser.add_argument("--sequence-parallel", action="store_true", help="with --mesh: sequence parallelism")
    parser.add_argument(
        "--microbatches", type=int, metavar="M",
        help="measure instead train steps of a GPT of 4 such layers over M microbatches of B sequences, its kernels "
        "quantized once a step beside in every microbatch",
    )  # fmt: skip
    parser.add_argument(
        "--context-parallel", nargs="+", choices=WAYS, metavar="WAY",
        help="measure instead causal attention alone, its sequences split over the context ranks of --mesh in these "
        f"ways: {', '.join(WAYS)}; te.jax has the first two",
    )  # fmt: skip
    parser.add_argument("--groups", type=int, metavar="G", help="with --context-parallel: key/value heads; HEADS")
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of measurement; the median counts")
    parser.add_argument("--calls", type=int, default=10, help="calls in a round")
    parser.add_argument("--output", metavar="FILE", help="write the rows to this JSON file")
    parser.add_argument("--hlo", metavar="DIR", help="write the compiled programs to this folder")
    parser.set_defaults(run=run)


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that would have no effect."""
    others = bool(args.mesh or args.sequence_parallel or args.hlo or args.modules != MODULES[:1])
    own = args.context_parallel is not None
    check_options(args, others or own or args.microbatches is not None or args.shape != list(DEFAULT_SHAPE))
    other_modules = args.sequence_parallel or args.hlo or args.modules != MODULES[:1] or args.recipes != RECIPES
    check_attention(args, bool(other_modules or args.microbatches is not None))
    if args.microbatches is not None and others:
        raise ValueError(
            "--microbatches measures whole train steps; leave out --modules, --mesh, --sequence-parallel and --hlo"
        )
    if args.sequence_parallel and (args.mesh is None or ParallelConfig.parse(args.mesh).tensor == 1):
        raise ValueError("--sequence-parallel splits activations over tensor ranks; give --mesh with tensor=N")


def run(args: argparse.Namespace) -> int:
    """Run ``jax-te bench`` with parsed arguments."""
    _check(args)
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}", flush=True)
    if args.model is not None:
        rows = bench_model(args)
    elif args.context_parallel is not None:
        rows = bench_attention(args)
    elif args.microbatches is not None:
        rows = bench_step(args)
    else:
        rows = [row for module in args.modules for row in bench_module(args, module)]
    if args.output:
        Path(args.output).write_text(json.dumps({"device": device.device_kind, "jax": jax.__version__, "rows": rows}))
    return 0
