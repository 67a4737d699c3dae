"""``jax-te bench microbatches``: train steps that quantize kernels once per step or once per microbatch."""

from __future__ import annotations

from typing import Any

import jax

from jax_te.bench import Settings, bench_microbatches
from jax_te.cli.bench.options import BenchMicrobatches
from jax_te.cli.bench.rows import show_rows
from jax_te.cli.memory import check_fits


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
    backend: Any = options.backend  # one of the names that the option allows
    settings = Settings(backend=backend, rounds=options.rounds, calls=options.calls)
    return show_rows(bench_microbatches(options.recipes, shape, options.microbatches, settings), options.output)


def _check_sizes(options: BenchMicrobatches, rows: int) -> None:
    """Raise ValueError, before any allocation, for sizes that exceed the memory."""
    tokens, hidden, ffn = rows * options.seq_len, options.hidden_size, options.ffn_hidden_size
    # In bf16, and at the very least: a layer's input, its gradient and the output's, a kernel and its gradient; the
    # tokens of all microbatches are int32.
    values = tokens * (2 * hidden + min(hidden, ffn)) + 2 * hidden * ffn + 2 * options.batch_size * options.seq_len
    # Fused kernels of GPUs keep no attention scores.
    if jax.default_backend() == "cpu":
        values += tokens * options.num_heads * options.seq_len
    check_fits(2 * values, 1, "lower --batch-size, --seq-len or another size")
