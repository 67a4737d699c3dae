"""``jax-te bench``: layers of jax_te and of its peers, in turn, in one process."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.cli.bench_step import bench_step
from jax_te.layers import LayerNormLinear, LayerNormMLP, TransformerLayer
from jax_te.ops import te, use_backend
from jax_te.quantize import split_model
from jax_te.recipe import Recipe, autocast, recipe_from_name
from jax_te.typing import Array

GIB = 2**30
Shape = tuple[int, int, int, int, int]
DEFAULT_SHAPE: Shape = (4, 2048, 4096, 32, 16384)


@dataclass
class Contestant:
    """A compiled forward-and-backward pass and its measurements."""

    name: str
    run: Callable[[], Any]
    temp_gib: float
    compile_s: float
    hlo: str
    seconds: list[float]

    def summary(self, flops: float) -> dict[str, Any]:
        """Median time, rate and memory."""
        median = statistics.median(self.seconds)
        return {
            "name": self.name,
            "ms": round(median * 1e3, 3),
            "spread_ms": round((max(self.seconds) - min(self.seconds)) * 1e3, 3),
            "tflops": round(flops / median / 1e12, 1),
            "temp_gib": round(self.temp_gib, 3),
            "compile_s": round(self.compile_s, 1),
        }


MODULES = ("transformer_layer", "layernorm_mlp", "layernorm_linear")
"""What can be measured."""


def module_flops(module: str, shape: Shape) -> float:
    """Floating-point operations of a module's forward and backward: GEMMs, and attention's causal half."""
    b, s, h, _, f = shape
    attention = 2 * b * s * 4 * h * h + 4 * b * s * s * h / 2
    linear = 2 * b * s * h * f
    forward = {"transformer_layer": attention + 2 * linear, "layernorm_mlp": 2 * linear, "layernorm_linear": linear}
    return 3 * forward[module]


def compile_pass(name: str, apply: Callable[[Any, Array], Array], variables: Any, x: Array) -> Contestant:
    """Compile the gradients of ``vdot(apply(variables, x), dy)`` with respect to ``variables`` and ``x``."""
    dy = jax.random.normal(jax.random.key(2), jax.eval_shape(apply, variables, x).shape, x.dtype)

    def loss(variables: Any, x: Array, dy: Array) -> Array:
        return jnp.vdot(apply(variables, x).astype(jnp.float32), dy.astype(jnp.float32))

    start = time.perf_counter()
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1), allow_int=True)).lower(variables, x, dy).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    temp = memory.temp_size_in_bytes / GIB if memory is not None else math.nan
    return Contestant(name, lambda: compiled(variables, x, dy), temp, seconds, compiled.as_text() or "", [])


def our_module(module: str, shape: Shape, recipe: Recipe | None, x: Array, backend: str) -> Contestant:
    """jax_te's module: causal, GELU, biases, bf16 parameters, no dropout."""
    _, _, hidden, heads, ffn = shape
    options: dict[str, Any] = {"params_dtype": x.dtype, "rngs": nnx.Rngs(1)}
    with autocast(recipe), use_backend(backend):  # type: ignore[arg-type]
        layer: nnx.Module
        if module == "transformer_layer":
            layer = TransformerLayer(hidden, ffn, heads, hidden_dropout=0.0, attention_dropout=0.0, **options)
        elif module == "layernorm_mlp":
            layer = LayerNormMLP(hidden, ffn, **options)
        else:
            layer = LayerNormLinear(hidden, ffn, **options)
        graphdef, params, quantizers, rest = split_model(layer)

        def apply(variables: Any, x: Array) -> Array:
            return nnx.merge(graphdef, *variables, rest)(x)

        return compile_pass(f"jax_te {module} {_label(recipe)} ({backend})", apply, (params, quantizers), x)


TE_RECIPES = ("none", "delayed", "current")
"""Recipes that te.jax has on every GPU with FP8; the others are measured beside its bf16 layer."""


def raw_te_module(module: str, shape: Shape, recipe: Recipe | None, x: Array) -> Contestant:
    """te.jax's own module with the same mathematics."""
    from jax_te.ops.te import raw

    _, _, hidden, heads, ffn = shape
    with raw.raw_autocast(recipe):
        apply, variables = raw.raw_module(module, hidden, heads, ffn, x, jax.random.key(1))
        return compile_pass(f"te.jax {module} {_label(recipe)}", apply, variables, x)


def _label(recipe: Recipe | None) -> str:
    return "none" if recipe is None else recipe.name


def measure(contestants: list[Contestant], *, rounds: int, calls: int) -> None:
    """Time the contestants in turn, so that a GPU that heats up slows all of them alike."""
    for contestant in contestants:
        jax.block_until_ready(contestant.run())
    for _ in range(rounds):
        for contestant in contestants:
            start = time.perf_counter()
            for _ in range(calls):
                result = contestant.run()
            jax.block_until_ready(result)
            contestant.seconds.append((time.perf_counter() - start) / calls)


def bench_module(args: argparse.Namespace, module: str) -> list[dict[str, Any]]:
    """Measure one module per recipe, jax_te's beside te.jax's where that is there."""
    shape: Shape = tuple(args.shape)  # type: ignore[assignment]
    x = jax.random.normal(jax.random.key(0), (shape[0], shape[1], shape[2]), jnp.bfloat16)
    rows = []
    for name in args.recipes:
        recipe = recipe_from_name(name)
        contestants = [our_module(module, shape, recipe, x, args.backend)]
        if te.available()[0]:
            contestants.insert(0, raw_te_module(module, shape, recipe if name in TE_RECIPES else None, x))
        measure(contestants, rounds=args.rounds, calls=args.calls)
        summaries = [contestant.summary(module_flops(module, shape)) for contestant in contestants]
        for summary in summaries:
            peer = summaries[0]
            summary["speed_ratio"] = round(peer["ms"] / summary["ms"], 3)
            summary["memory_ratio"] = round(summary["temp_gib"] / peer["temp_gib"], 3) if peer["temp_gib"] else None
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
        help="measure layers beside te.jax's",
        description="Forward and backward of one layer (causal, GELU, biases, bf16): jax_te's and te.jax's own, "
        "measured in turn in one process; for a recipe that te.jax has not, its bf16 layer. "
        "speed_ratio is the peer's time over the row's, memory_ratio the row's temporary memory over the peer's.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--modules", nargs="+", choices=MODULES, default=MODULES[:1], help="layers to measure")
    parser.add_argument("--recipes", nargs="+", default=["none", "delayed", "current"], help="recipes to measure")
    parser.add_argument(
        "--shape", nargs=5, type=int, default=list(DEFAULT_SHAPE), metavar=("B", "S", "H", "HEADS", "F"),
        help="batch, sequence, hidden size, heads, feed-forward size",
    )  # fmt: skip
    parser.add_argument("--backend", choices=["auto", "te", "xla"], default="auto", help="backend of jax_te's layer")
    parser.add_argument(
        "--microbatches", type=int, metavar="M",
        help="measure instead train steps of a GPT of 4 such layers over M microbatches of B sequences, its kernels "
        "quantized once a step beside in every microbatch",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7, help="rounds of measurement; the median counts")
    parser.add_argument("--calls", type=int, default=10, help="calls in a round")
    parser.add_argument("--output", metavar="FILE", help="write the rows to this JSON file")
    parser.add_argument("--hlo", metavar="DIR", help="write the compiled programs to this folder")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run ``jax-te bench`` with parsed arguments."""
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}", flush=True)
    if args.microbatches is None:
        rows = [row for module in args.modules for row in bench_module(args, module)]
    else:
        rows = bench_step(args)
    if args.output:
        Path(args.output).write_text(json.dumps({"device": device.device_kind, "jax": jax.__version__, "rows": rows}))
    return 0
