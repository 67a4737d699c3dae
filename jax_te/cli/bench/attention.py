"""``jax-te bench attention``: causal attention alone, also with context parallelism, next to te.jax's."""

from __future__ import annotations

from jax_te.bench import AttentionSizes, Settings, bench_attention, with_fp8_attention
from jax_te.cli.bench.options import QUANTIZED_ATTENTION, BenchAttention
from jax_te.cli.bench.rows import show_rows
from jax_te.cli.memory import check_fits, score_bytes
from jax_te.cli.option_table import check_effects
from jax_te.config import ParallelConfig
from jax_te.recipe import recipe_from_name


def run(options: BenchAttention) -> int:
    """Return the exit status, 0, once the rows are printed.

    Raises:
        ValueError: for a mesh without a context axis, and for sizes that do not divide or exceed the memory.
    """
    quantized = any(name != "none" for name in options.recipes)
    check_effects(options, {"--mesh": options.mesh is not None, QUANTIZED_ATTENTION: quantized})
    mesh = None if options.mesh is None else ParallelConfig.parse(options.mesh)
    if mesh is not None and mesh.context == 1:
        raise ValueError(
            f"--mesh {options.mesh} has no context axis, over which sequences are sharded here; give context=N"
        )
    groups = options.num_heads if options.num_query_groups is None else options.num_query_groups
    if options.num_heads % groups:
        raise ValueError(f"--num-heads {options.num_heads} is not divisible by --num-query-groups {groups}")
    if options.head_dim != 128 and options.recipes != ("none",):
        raise ValueError(f"FP8 attention has heads of 128, not --head-dim {options.head_dim}; measure --recipes none")
    _check_sizes(options, groups)
    sizes = AttentionSizes(
        batch=options.batch_size,
        sequence=options.seq_len,
        heads=options.num_heads,
        groups=groups,
        head_dim=options.head_dim,
    )
    settings = Settings(backend=options.backend, rounds=options.rounds, calls=options.calls)
    recipes = [with_fp8_attention(recipe_from_name(name), options.fp8_passes) for name in options.recipes]
    return show_rows(bench_attention(recipes, options.cp_comm_type, sizes, mesh, settings), options.output)


def _check_sizes(options: BenchAttention, groups: int) -> None:
    """Raise ValueError, before any allocation, for sizes that exceed the memory of a device."""
    tokens, heads = options.batch_size * options.seq_len, options.num_heads
    # In bf16: queries, keys, values, and the output's gradient.
    needed = 2 * tokens * options.head_dim * 2 * (heads + groups)
    needed += score_bytes(options.batch_size, heads, options.seq_len)
    check_fits(needed, 1, "lower --batch-size, --seq-len or another size")
