"""``jax-te bench --context-parallel WAY...``: attention on long sequences, split over context ranks."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_te.bench.modules import COLLECTIVES, GIB, Contestant, measure
from jax_te.config import ParallelConfig
from jax_te.ops import ContextParallel, dot_product_attention
from jax_te.ops.internal import te
from jax_te.sharding import make_mesh, named_sharding
from jax_te.typing import Array, LogicalAxes

WAYS = ("p2p", "all_gather", "a2a")
AXES: LogicalAxes = ("batch", "sequence", "heads", None)
Attend = Callable[[Array, Array, Array], Array]


def bench_attention(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Causal attention alone, forward and backward, bf16: each way of jax_te's and te.jax's on a mesh's context ranks,
    in zig-zag order, and each library's on one device; in turn.
    """
    mesh = make_mesh(ParallelConfig.parse(args.mesh))
    contestants = [_contestant("jax_te one device", args, None, _ours(args, None))]
    contestants += [_contestant(f"jax_te {way}", args, mesh, _ours(args, way)) for way in args.context_parallel]
    if te.available()[0]:
        contestants.append(_te_jax("te.jax one device", args, None, None))
        ways = [way for way in args.context_parallel if way in ("p2p", "all_gather")]
        contestants += [_te_jax(f"te.jax {way}", args, mesh, way) for way in ways]
    measure(contestants, rounds=args.rounds, calls=args.calls)
    rows = [_row(args, contestant, 1 if "one device" in contestant.name else mesh.size) for contestant in contestants]
    alone = {row["name"].split()[0]: row["tflops"] for row in rows if "one device" in row["name"]}
    for row in rows:
        row["of_one_device"] = round(row["tflops"] / alone[row["name"].split()[0]], 3)
        print(json.dumps(row), flush=True)
    return rows


def check_attention(args: argparse.Namespace, others: bool) -> None:
    """Raise ValueError for options that do not go with ``--context-parallel``, or need it."""
    if args.context_parallel is None:
        if args.groups is not None:
            raise ValueError("--groups is of --context-parallel, which measures attention alone")
        return
    if others:
        raise ValueError(
            "--context-parallel measures attention alone in bf16; leave out --modules, --recipes, --sequence-parallel, "
            "--microbatches, --model and --hlo"
        )
    if args.mesh is None or ParallelConfig.parse(args.mesh).context == 1:
        raise ValueError("--context-parallel splits sequences over context ranks; give --mesh with context=N")


def _ours(args: argparse.Namespace, way: str | None) -> Attend:
    context_parallel = ContextParallel() if way is None else ContextParallel(cp_comm_type=way, cp_load_balanced=True)

    def attend(q: Array, k: Array, v: Array) -> Array:
        return dot_product_attention(
            (q, k, v), mask_type="causal", backend=args.backend, out_axes=AXES, context_parallel=context_parallel
        )

    return attend


def _te_jax(name: str, args: argparse.Namespace, mesh: Mesh | None, way: str | None) -> Contestant:
    from jax_te.bench import te_jax as raw
    from jax_te.bench.te_jax_attention import raw_attention

    _, _, hidden, heads, _ = args.shape
    with raw.raw_context(None, mesh):
        return _contestant(name, args, mesh, raw_attention(hidden // heads, heads, _groups(args), way), own_mesh=True)


def _groups(args: argparse.Namespace) -> int:
    return args.shape[3] if args.groups is None else args.groups


def _contestant(
    name: str, args: argparse.Namespace, mesh: Mesh | None, attend: Attend, *, own_mesh: bool = False
) -> Contestant:
    """Gradients of ``sum(attend(q, k, v) * g)``, compiled."""
    b, s, hidden, heads, _ = args.shape
    sizes = (heads, _groups(args), _groups(args), heads)

    def draw(seed: int, count: int) -> Array:
        x = jax.random.normal(jax.random.key(seed), (b, s, count, hidden // heads), jnp.bfloat16)
        return x if mesh is None else jax.device_put(x, named_sharding(AXES, mesh))

    q, k, v, g = (draw(seed, count) for seed, count in enumerate(sizes))

    def loss(q: Array, k: Array, v: Array, g: Array) -> Array:
        return jnp.sum(attend(q, k, v).astype(jnp.float32) * g.astype(jnp.float32))

    with contextlib.nullcontext() if mesh is None or own_mesh else jax.set_mesh(mesh):
        start = time.perf_counter()
        where = None if mesh is None else (named_sharding(AXES, mesh),) * 3
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), out_shardings=where).lower(q, k, v, g).compile()
        seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    temp = memory.temp_size_in_bytes / GIB if memory is not None else math.nan
    return Contestant(name, lambda: compiled(q, k, v, g), temp, seconds, compiled.as_text() or "", [])


def _row(args: argparse.Namespace, contestant: Contestant, devices: int) -> dict[str, Any]:
    b, s, hidden, _, _ = args.shape
    flops = 3.5 * 4 * b * s * s * hidden / 2  # forward two products, backward five, over half of the scores
    median = statistics.median(contestant.seconds)
    return {
        "name": contestant.name,
        "ms": round(median * 1e3, 3),
        "tflops": round(flops / median / 1e12 / devices, 3),
        "temp_gib": round(contestant.temp_gib, 3),
        "compile_s": round(contestant.compile_s, 1),
        "collectives": dict(Counter(COLLECTIVES.findall(contestant.hlo))),
    }
