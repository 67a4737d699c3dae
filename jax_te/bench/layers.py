"""``jax-te bench``: a module of jax_te and its peer of te.jax, compiled on one device or on a mesh."""

from __future__ import annotations

import contextlib
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jax_te.layers import LayerNormLinear, LayerNormMLP, TransformerLayer
from jax_te.ops import use_backend
from jax_te.recipe import Recipe, autocast
from jax_te.sharding import named_sharding
from jax_te.training import split_model
from jax_te.typing import Array, LogicalAxes

GIB = 2**30
MODULES = ("transformer_layer", "layernorm_mlp", "layernorm_linear")
"""What can be measured."""

TE_RECIPES = ("none", "delayed", "current")
"""Recipes that te.jax has on every GPU with FP8; others are measured beside what it does in bf16."""

Shape = tuple[int, int, int, int, int]
COLLECTIVES = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured: forward and backward of a module, causal, GELU, biases, bf16, no dropout.

    Args:
        module: one of `MODULES`.
        shape: batch, sequence, hidden size, heads, feed-forward size.
        recipe: None for bf16.
        mesh: None for one device.
        sequence_parallel: split activations over the tensor ranks between the tensor-parallel parts.
    """

    module: str
    shape: Shape
    recipe: Recipe | None
    mesh: Mesh | None = None
    sequence_parallel: bool = False

    @property
    def devices(self) -> int:
        """How many it runs on."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def flops(self) -> float:
        """Floating-point operations of forward and backward: GEMMs, and attention's causal half."""
        b, s, h, _, f = self.shape
        attention = 2 * b * s * 4 * h * h + 4 * b * s * s * h / 2
        linear = 2.0 * b * s * h * f
        forward = {"transformer_layer": attention + 2 * linear, "layernorm_mlp": 2 * linear, "layernorm_linear": linear}
        return 3 * forward[self.module]

    def label(self, of: str) -> str:
        """A name for a contestant's row."""
        return f"{of} {self.module} {'none' if self.recipe is None else self.recipe.name}"

    def draw(self, seed: int, shape: tuple[int, ...], axes: LogicalAxes) -> Array:
        """A random bf16 array, split as its axes say."""
        x = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        return x if self.mesh is None else jax.device_put(x, named_sharding(axes, self.mesh))

    def input(self) -> Array:
        """``x [b, s, h]``."""
        sequence = "sequence_parallel" if self.sequence_parallel else "sequence"
        return self.draw(0, self.shape[:3], ("batch", sequence, "hidden"))

    def output_axes(self) -> LogicalAxes:
        """Logical axes of the module's output."""
        if self.module == "layernorm_linear":
            return ("batch", "sequence", "ffn")
        return ("batch", "sequence_parallel" if self.sequence_parallel else "sequence", "hidden")


@dataclass
class Contestant:
    """A compiled forward-and-backward pass and its measurements."""

    name: str
    run: Callable[[], Any]
    temp_gib: float
    compile_s: float
    hlo: str
    seconds: list[float]

    def summary(self, case: Case) -> dict[str, Any]:
        """Median time, rate and memory of a device."""
        median = statistics.median(self.seconds)
        row = {
            "name": self.name,
            "ms": round(median * 1e3, 3),
            "spread_ms": round((max(self.seconds) - min(self.seconds)) * 1e3, 3),
            "tflops": round(case.flops / median / 1e12 / case.devices, 1),
            "temp_gib": round(self.temp_gib, 3),
            "compile_s": round(self.compile_s, 1),
        }
        return row | ({"collectives": dict(Counter(COLLECTIVES.findall(self.hlo)))} if case.devices > 1 else {})


def ours(case: Case, backend: str) -> Contestant:
    """jax_te's module."""
    _, _, hidden, heads, ffn = case.shape
    graphdefs: list[Any] = []

    def make() -> Any:
        options: dict[str, Any] = {"params_dtype": jnp.bfloat16, "rngs": nnx.Rngs(1)}
        options["sequence_parallel"] = case.sequence_parallel
        layer: nnx.Module
        if case.module == "transformer_layer":
            layer = TransformerLayer(hidden, ffn, heads, hidden_dropout=0.0, attention_dropout=0.0, **options)
        elif case.module == "layernorm_mlp":
            layer = LayerNormMLP(hidden, ffn, **options)
        else:
            layer = LayerNormLinear(hidden, ffn, parallel_mode="column", **options)
        graphdef, *parts = split_model(layer)
        graphdefs.append(graphdef)
        return parts

    with autocast(case.recipe), use_backend(backend), _mesh(case):  # type: ignore[arg-type]
        params, quantizers, rest = jax.jit(make)()

        def apply(variables: Any, x: Array) -> Array:
            return nnx.merge(graphdefs[0], *variables, rest)(x)

        return _compiled(f"{case.label('jax_te')} ({backend})", case, apply, (params, quantizers))


def te_jax(case: Case) -> Contestant:
    """te.jax's own module with the same mathematics."""
    from jax_te.bench import te_jax as raw

    _, _, hidden, heads, ffn = case.shape
    with raw.raw_context(case.recipe, case.mesh):
        apply, variables = raw.raw_module(
            case.module, hidden, heads, ffn, case.input(), jax.random.key(1), case.mesh, case.sequence_parallel
        )
        return _compiled(case.label("te.jax"), case, apply, variables)


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


def _mesh(case: Case) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if case.mesh is None else jax.set_mesh(case.mesh)


def _compiled(name: str, case: Case, apply: Callable[[Any, Array], Array], variables: Any) -> Contestant:
    """Compile the gradients of ``sum(apply(variables, x) * dy)`` with respect to ``variables`` and ``x``."""
    x = case.input()
    dy = case.draw(2, jax.eval_shape(apply, variables, x).shape, case.output_axes())

    def loss(variables: Any, x: Array, dy: Array) -> Array:
        return jnp.sum(apply(variables, x).astype(jnp.float32) * dy.astype(jnp.float32))

    start = time.perf_counter()
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1), allow_int=True)).lower(variables, x, dy).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    temp = memory.temp_size_in_bytes / GIB if memory is not None else math.nan
    return Contestant(name, lambda: compiled(variables, x, dy), temp, seconds, compiled.as_text() or "", [])
