"""Compiled programs of the command line, kept on disk between runs."""

from __future__ import annotations

import sys

from jax_te import training


def keep_compiled_programs() -> None:
    """Keep compiled programs as `jax_te.training.keep_compiled_programs` does; a run goes on where they cannot be."""
    try:
        training.keep_compiled_programs()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: there is no home
        print(f"jax-te: compiled programs are not kept on disk: {error}", file=sys.stderr)
