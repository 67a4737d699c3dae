"""What a transformer layer's devices tell each other: kinds, numbers and bytes of collectives in the compiled program.

Tensor parallelism: one all-reduce for each block (attention, MLP) and direction. Sequence parallelism: one all-gather
and one reduce-scatter in its place. FSDP: every kernel joined once in each direction, and its gradient scattered.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.config import ParallelConfig
from jax_te.layers import TransformerLayer
from jax_te.models.stack import run_layers
from jax_te.quantize import frozen_scales
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, Recipe, autocast
from jax_te.sharding import make_mesh, named_sharding
from jax_te.training import split_model
from tests.support.meshes import shardings
from tests.support.numerics import NO_DROPOUT, draw, quick_jit, quick_options
from tests.support.states import merging

B, S, H, N, F = 4, 32, 64, 4, 96
COLLECTIVE = re.compile(r"= (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)\(")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
BYTES = {"f32": 4, "s32": 4, "u8": 1}
RECIPES: dict[str, Recipe | None] = {"none": None, "delayed": DelayedScaling(), "current": Float8CurrentScaling()}
Collectives = Counter[tuple[str, int]]
"""How often each kind moves an array of so many bytes; less than 1 KiB (amaxes, biases, norms) is left out."""


def collectives(text: str) -> Collectives:
    found: Collectives = Counter()
    for result, kind in COLLECTIVE.findall(text):
        for dtype, shape in ARRAY.findall(result):  # the compiler may have made one collective of several
            size = math.prod(int(n) for n in shape.split(",") if n) * BYTES[dtype]
            if kind == "reduce-scatter":  # what is given, as of the others
                size *= 4
            if size >= 1024:
                found[kind, size] += 1
    return found


def forward_and_backward(
    mode: str, recipe: Recipe | None, sequence_parallel: bool = False, **sizes: int
) -> tuple[Collectives, Collectives]:
    mesh = None if mode == "no mesh" else make_mesh(ParallelConfig(**sizes), axis_type=mode)  # type: ignore[arg-type]
    graphdefs: list[Any] = []

    def make() -> Any:
        layer = TransformerLayer(
            H, F, N, hidden_dropout=0.0, attention_dropout=0.0, sequence_parallel=sequence_parallel, rngs=nnx.Rngs(0)
        )
        graphdef, *parts = split_model(layer)
        graphdefs.append(graphdef)
        return parts

    def run(params: Any, quantizers: Any, rest: Any, x: Any) -> Any:
        return nnx.merge(graphdefs[0], params, merging(quantizers), rest)(x)

    def both(params: Any, quantizers: Any, rest: Any, x: Any, g: Any) -> Any:
        y, vjp = jax.vjp(lambda *args: run(*args[:2], rest, args[2]), params, quantizers, x)
        return y, vjp(g)

    x, axes = draw("x", (B, S, H)), ("batch", "sequence_parallel" if sequence_parallel else "sequence", "hidden")
    with autocast(recipe), contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        parts = jax.jit(make)()
        if mesh is not None:
            x = jax.device_put(x, named_sharding(axes, mesh))
        forward = collectives(quick_jit(run).lower(*parts, x).compile().as_text() or "")
        total = collectives(quick_jit(both).lower(*parts, x, x).compile().as_text() or "")
    return forward, total - forward


ACTIVATION = 4 * B * S * H


@pytest.mark.slow
@pytest.mark.wide("delayed")
@pytest.mark.parametrize("recipe", RECIPES)
def test_without_a_mesh_there_are_none(recipe: str) -> None:
    assert forward_and_backward("no mesh", RECIPES[recipe]) == (Counter(), Counter())


@pytest.mark.slow
@pytest.mark.wide("current-explicit")  # tests/models/test_collectives.py: on Auto axes, without a recipe
@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_tensor_parallelism_sums_once_a_block_and_direction(recipe: str, mode: str) -> None:
    expected = Counter({("all-reduce", ACTIVATION): 2})
    assert forward_and_backward(mode, RECIPES[recipe], tensor=4) == (expected, expected)


@pytest.mark.costly("current-explicit")
@pytest.mark.wide("current-explicit")  # tests/models/test_collectives.py: on Auto axes, without a recipe
@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_sequence_parallelism_gathers_and_scatters_once_a_block_and_direction(recipe: str, mode: str) -> None:
    """In FP8 the gathers move a quarter of fp32's bytes."""
    gathered = ACTIVATION if recipe == "none" else ACTIVATION // 4
    expected = Counter({("all-gather", gathered): 2, ("reduce-scatter", ACTIVATION): 2})
    assert forward_and_backward(mode, RECIPES[recipe], True, tensor=4) == (expected, expected)


@pytest.mark.slow
@pytest.mark.wide("current-explicit")  # tests/models/test_collectives.py: on Auto axes, without a recipe
@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_fsdp_gathers_each_kernel_and_scatters_its_gradient(recipe: str, mode: str) -> None:
    """Each kernel by itself: four gathers of their sizes in each direction, in FP8 where the recipe allows it."""
    kernels = Counter({3 * H * H: 1, H * H: 1, H * F: 2})  # query/key/value, projection, the MLP's two
    width = 4 if recipe == "none" else 1
    gathers: Collectives = Counter({("all-gather", width * size): count for size, count in kernels.items()})
    sums: Collectives = Counter({("reduce-scatter", 4 * size): count for size, count in kernels.items()})
    # The CPU compiler of jax 0.10 drops the barrier in front of backward's gathers, and merges them with forward's.
    again = Counter() if jax.__version_info__ < (0, 11) else gathers
    assert forward_and_backward(mode, RECIPES[recipe], fsdp=4) == (gathers, again + sums)


@pytest.mark.slow
@pytest.mark.wide("delayed-auto")
@pytest.mark.parametrize(
    ("recipe", "mode"), [*((recipe, "auto") for recipe in RECIPES), ("none", "explicit"), ("delayed", "explicit")]
)
def test_memory_of_a_scanned_stack_under_fsdp_is_that_of_one_layers_kernels(recipe: str, mode: Any) -> None:
    """Of a gradient in which only kernels are large: beside one layer's, whole, each layer may take four eighths of its
    own, for the ranks' parts of stacked kernels and of stacked gradients, and for a copy of either. Were they whole all
    at once, a layer would take eight eighths more. (Without scanning, the CPU compiler gathers all of them first.)
    """
    hidden, ffn, ranks = 256, 1024, 8
    layer_bytes = 4 * (4 * hidden**2 + 2 * hidden * ffn)

    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}

    def memory(count: int) -> int:
        def loss(parts: Any, rest: Any, x: Any) -> Any:
            layers = [nnx.merge(graphdef, part, rest) for part in parts]
            return jnp.sum(jnp.square(run_layers(layers, x, [None] * count, scan=True)))

        graphdef, part, rest = nnx.split(layer, nnx.Param, ...)
        place = shardings(layer)
        part = jax.tree.map(
            lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), part, place
        )
        rows = named_sharding(("batch", "sequence", "hidden"), mesh)
        x = jax.ShapeDtypeStruct((ranks, 2, hidden), jnp.float32, sharding=rows)
        gradient = jax.jit(jax.grad(loss), out_shardings=[place] * count, compiler_options=quick_options())
        with frozen_scales():
            return gradient.lower([part] * count, rest, x).compile().memory_analysis().temp_size_in_bytes

    mesh = make_mesh(ParallelConfig(fsdp=ranks), axis_type=mode)
    with autocast(RECIPES[recipe]):
        layer = nnx.eval_shape(lambda: TransformerLayer(hidden, ffn, 4, **(NO_DROPOUT | options), rngs=nnx.Rngs(0)))
    with autocast(RECIPES[recipe]), jax.set_mesh(mesh):
        few, many = memory(2), memory(6)
    assert (many - few) / 4 < 4 / ranks * layer_bytes
    assert many < (1 + 6 * 4 / ranks) * layer_bytes
