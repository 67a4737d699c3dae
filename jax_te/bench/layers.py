"""Single layers of jax_te next to te.jax's, forward and backward, on one device or on a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jax_te.bench.attention import fp8_attention_label
from jax_te.bench.gradients import Gradient, gradient, measure
from jax_te.bench.settings import Row, Settings, Shape
from jax_te.layers import LayerNormLinear, LayerNormMLP, TransformerLayer
from jax_te.ops import use_backend
from jax_te.ops.te import available
from jax_te.quantize import with_max_gradients_inside
from jax_te.recipe import Recipe, autocast
from jax_te.sharding import named_sharding
from jax_te.training import split_model
from jax_te.typing import Array, BackendName, LogicalAxes

TE_RECIPES = ("none", "delayed", "current")
"""Recipes that te.jax supports on every GPU with FP8; others are compared with its bf16 layer."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A measured case: forward and backward of a module, causal, GELU, biases, bf16, no dropout.

    Args:
        module: ``"transformer_layer"``, ``"layernorm_mlp"`` or ``"layernorm_linear"``.
        shape: batch, sequence, hidden size, heads, feed-forward size.
        recipe: None for bf16.
        mesh: None for one device.
        sequence_parallel: whether to shard activations over the tensor axis between the tensor-parallel parts.
    """

    module: str
    shape: Shape
    recipe: Recipe | None
    mesh: Mesh | None = None
    sequence_parallel: bool = False

    @property
    def devices(self) -> int:
        """Number of devices that it runs on."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def flops(self) -> float:
        """Floating-point operations of forward and backward: GEMMs, and attention's causal half."""
        b, s, h, _, f = self.shape
        attention = 2 * b * s * 4 * h * h + 4 * b * s * s * h / 2
        linear = 2.0 * b * s * h * f
        # Backward has two GEMMs for each of forward, hence three times its operations.
        forward = {"transformer_layer": attention + 2 * linear, "layernorm_mlp": 2 * linear, "layernorm_linear": linear}
        return 3 * forward[self.module]

    def label(self, of: str) -> str:
        """Return the name of a contestant's row."""
        recipe = "none" if self.recipe is None else self.recipe.name
        has_attention = of == "jax_te" and self.module == "transformer_layer"
        return f"{of} {self.module} {recipe}{fp8_attention_label(self.recipe) if has_attention else ''}"

    def draw(self, seed: int, shape: tuple[int, ...], axes: LogicalAxes) -> Array:
        """Return a random bf16 array, sharded by its axes."""
        x = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        return x if self.mesh is None else jax.device_put(x, named_sharding(axes, self.mesh))

    def input(self) -> Array:
        """Return ``x [b, s, h]``."""
        sequence = "sequence_parallel" if self.sequence_parallel else "sequence"
        return self.draw(0, self.shape[:3], ("batch", sequence, "hidden"))

    def output_axes(self) -> LogicalAxes:
        """Return the logical axes of the module's output."""
        if self.module == "layernorm_linear":
            return ("batch", "sequence", "ffn")
        return ("batch", "sequence_parallel" if self.sequence_parallel else "sequence", "hidden")


def bench_layer(cases: Sequence[Case], settings: Settings, *, hlo: Path | None = None) -> Iterator[Row]:
    """Yield rows of each case: te.jax's layer, where that is here, then jax_te's, timed in turn.

    Args:
        cases: layers and recipes to measure. For a recipe that te.jax does not have, its bf16 layer is the peer.
        settings: settings of the measurement.
        hlo: folder for the compiled programs.
    """
    for case in cases:
        contestants = [_ours(case, settings.backend)]
        if available()[0]:
            has_recipe = case.recipe is None or case.recipe.name in TE_RECIPES
            contestants.insert(0, _te_jax(case if has_recipe else dataclasses.replace(case, recipe=None)))
        measure(contestants, settings)
        rows = [contestant.row(case.flops, case.devices) for contestant in contestants]
        first = rows[0]
        for row in rows if len(rows) > 1 else ():  # one alone has nothing to be compared with
            row["speed_ratio"] = round(first["ms"] / row["ms"], 3)
            row["memory_ratio"] = round(row["temp_gib"] / first["temp_gib"], 3) if first["temp_gib"] else None
        if hlo is not None:
            hlo.mkdir(parents=True, exist_ok=True)
            for contestant in contestants:
                stem = contestant.name.replace(" ", "_").replace("(", "").replace(")", "")
                (hlo / f"{stem}.txt").write_text(contestant.hlo)
        yield from rows
        del contestants  # their arrays and programs, before the next case's are made


def _ours(case: Case, backend: BackendName) -> Gradient:
    """Return jax_te's layer."""
    _, _, hidden, heads, ffn = case.shape
    graphdefs: list[Any] = []  # static, so it leaves the jitted function separately from its results

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

    with autocast(case.recipe), use_backend(backend), _mesh(case):
        params, quantizers, rest = jax.jit(make)()  # jitted, so that no device holds a whole sharded parameter

        def apply(variables: Any, x: Array) -> Array:
            params, quantizers = variables
            return nnx.merge(graphdefs[0], params, with_max_gradients_inside(quantizers), rest)(x)

        return _compiled(f"{case.label('jax_te')} ({backend})", case, apply, (params, quantizers))


def _te_jax(case: Case) -> Gradient:
    """Return te.jax's own layer with the same mathematics."""
    from jax_te.bench.peers.te_jax import RawSizes, raw_context, raw_module  # Transformer Engine is optional

    sizes = RawSizes(*case.shape[2:], sequence_parallel=case.sequence_parallel)
    with raw_context(case.recipe, case.mesh):
        apply, variables = raw_module(case.module, sizes, case.input(), jax.random.key(1), case.mesh)
        return _compiled(case.label("te.jax"), case, apply, variables)


def _mesh(case: Case) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if case.mesh is None else jax.set_mesh(case.mesh)


def _compiled(name: str, case: Case, apply: Callable[[Any, Array], Array], variables: Any) -> Gradient:
    x = case.input()
    dy = case.draw(2, jax.eval_shape(apply, variables, x).shape, case.output_axes())
    return gradient(name, apply, (variables, x), dy)
