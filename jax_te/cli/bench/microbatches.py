"""``jax-te bench microbatches``: train steps that quantize kernels once per step or once per microbatch."""

from __future__ import annotations

from jax_te.bench import Settings, bench_microbatches
from jax_te.cli.bench.options import BenchMicrobatches
from jax_te.cli.bench.rows import show_rows
from jax_te.cli.memory import check_fits, layer_bytes, score_bytes


def run(options: BenchMicrobatches) -> int:
    """Return the exit status, 0, once the rows are printed.

    Raises:
        ValueError: for a batch that is not divisible, and for sizes that exceed the memory.
    """
    rows, rest = divmod(options.batch_size, options.microbatches)
    if rest:
        raise ValueError(f"--batch-size {options.batch_size} is not divisible by --microbatches {options.microbatches}")
    _check_sizes(options, rows)
    shape = (rows, options.seq_len, options.hidden_size, options.num_heads, options.ffn_hidden_size)
    settings = Settings(backend=options.backend, rounds=options.rounds, calls=options.calls)
    return show_rows(bench_microbatches(options.recipes, shape, options.microbatches, settings), options.output)


def _check_sizes(options: BenchMicrobatches, rows: int) -> None:
    """Raise ValueError, before any allocation, for sizes that exceed the memory."""
    needed = layer_bytes(rows * options.seq_len, options.hidden_size, options.ffn_hidden_size)
    needed += score_bytes(rows, options.num_heads, options.seq_len)
    needed += 4 * options.batch_size * options.seq_len  # the tokens of all microbatches, int32
    check_fits(needed, 1, "lower --batch-size, --seq-len or another size")
