"""Persistent cache of the command line's compiled programs."""

from __future__ import annotations

import sys

from jax_te import training


def keep_compiled_programs() -> None:
    """Cache compiled programs by `jax_te.training.keep_compiled_programs`; a run continues if that fails."""
    try:
        training.keep_compiled_programs()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no home folder
        print(f"jax-te: compiled programs are not kept on disk: {error}", file=sys.stderr)
