"""``jax-te bench layer``: single layers, next to te.jax's, and an expert layer, next to Megatron-Core's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jax_te.bench import (
    Case,
    ExpertsCase,
    Row,
    Settings,
    bench_experts,
    bench_layer,
    check_megatron,
    with_fp8_attention,
)
from jax_te.cli.bench.options import MOE, QUANTIZED_ATTENTION, TRANSFORMER_LAYER, BenchLayer
from jax_te.cli.bench.rows import show_rows
from jax_te.cli.memory import check_fits, layer_bytes, score_bytes
from jax_te.cli.option_table import check_effects
from jax_te.config import ParallelConfig, RouterOptions
from jax_te.recipe import Recipe, recipe_from_name
from jax_te.sharding import make_mesh


def run(options: BenchLayer) -> int:
    """Return the exit status, 0, once the rows are printed.

    Raises:
        ValueError: for a mesh that the options do not fit, a peer that is not installed, and for sizes that exceed the
            memory.
    """
    modules, recipes = options.modules, options.recipes
    met = {MOE: "moe" in modules, TRANSFORMER_LAYER: "transformer_layer" in modules}
    met |= {QUANTIZED_ATTENTION: not {"delayed", "current"}.isdisjoint(recipes), "--fp8-dpa": options.fp8_dpa}
    check_effects(options, met)
    if "moe" in modules:
        _check_experts(options)
    sizes = None if options.mesh is None else ParallelConfig.parse(options.mesh)
    if options.sequence_parallel and (sizes is None or sizes.tensor == 1):
        raise ValueError("--sequence-parallel shards activations over the tensor axis; give --mesh with tensor=N")
    _check_sizes(options, 1 if sizes is None else sizes.num_devices)
    return show_rows(_rows(options, sizes), options.output)


def _check_experts(options: BenchLayer) -> None:
    """Raise ValueError for options that the expert layer and its peer do not fit."""
    if options.mesh is not None or options.hlo is not None:
        raise ValueError("the module moe is measured on one device, without --hlo; leave out --mesh and --hlo")
    RouterOptions(num_experts=options.num_experts, topk=options.moe_router_topk)
    if options.peer == "megatron":
        check_megatron()


def _check_sizes(options: BenchLayer, devices: int) -> None:
    """Raise ValueError, before any allocation, for sizes that exceed the memory."""
    hidden, ffn = options.hidden_size, options.ffn_hidden_size
    needed = layer_bytes(options.batch_size * options.seq_len, hidden, ffn)
    if "moe" in options.modules:
        # Three kernels of each expert and their gradients, in bf16.
        needed = max(needed, 2 * 2 * options.num_experts * 3 * hidden * ffn)
    if "transformer_layer" in options.modules:
        needed += score_bytes(options.batch_size, options.num_heads, options.seq_len)
    check_fits(needed // devices, devices, "lower --batch-size, --seq-len or another size, or give a larger --mesh")


def _rows(options: BenchLayer, sizes: ParallelConfig | None) -> Iterator[Row]:
    shape = (options.batch_size, options.seq_len, options.hidden_size, options.num_heads, options.ffn_hidden_size)
    mesh = None if sizes is None else make_mesh(sizes)
    recipes = [recipe_from_name(name) for name in options.recipes]
    if options.fp8_dpa:
        _check_heads(options)
        recipes = [with_fp8_attention(recipe, options.fp8_passes) for recipe in recipes]
    cases = [
        Case(module=module, shape=shape, recipe=recipe, mesh=mesh, sequence_parallel=options.sequence_parallel)
        for module in options.modules
        if module != "moe"
        for recipe in recipes
    ]
    profile = None if options.profile is None else Path(options.profile)
    settings = Settings(backend=options.backend, rounds=options.rounds, calls=options.calls, profile=profile)
    yield from bench_layer(cases, settings, hlo=None if options.hlo is None else Path(options.hlo))
    if "moe" in options.modules:
        yield from bench_experts(_expert_cases(options, recipes), settings, peer=options.peer)


def _check_heads(options: BenchLayer) -> None:
    """Raise ValueError for heads that FP8 attention does not have: they would be measured in bf16."""
    if options.hidden_size != 128 * options.num_heads:
        raise ValueError(
            f"--fp8-dpa is for heads of 128; give --hidden-size {128 * options.num_heads} with --num-heads "
            f"{options.num_heads}, or another number of heads"
        )


def _expert_cases(options: BenchLayer, recipes: list[Recipe | None]) -> list[ExpertsCase]:
    """Return the expert layer under each recipe, with the loss and the router's dtype that models are trained with."""
    router = RouterOptions(
        num_experts=options.num_experts,
        topk=options.moe_router_topk,
        aux_loss_coeff=1e-2,
        dtype="fp32",
        force_biased=options.moe_router_force_biased,
    )
    return [
        ExpertsCase(
            batch=options.batch_size,
            sequence=options.seq_len,
            hidden_size=options.hidden_size,
            ffn_hidden_size=options.ffn_hidden_size,
            router=router,
            recipe=recipe,
            activation=options.moe_activation,
            bias=options.moe_bias,
        )
        for recipe in recipes
    ]
