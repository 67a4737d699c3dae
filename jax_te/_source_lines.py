"""Lines of Python that JAX records as the origin of an operation, for profiles, messages and the compiler."""

from __future__ import annotations

import os
from pathlib import Path

from jax.extend.source_info_util import register_exclusion

# Files and folders that pass calls on between a user's lines, layers, and the functions that run operations.
_PASSING_ON = (
    "_validation" + os.sep,
    "models/stack.py",
    "ops/linear/resolve.py",
    "ops/sharded_vjp.py",
    "remat" + os.sep,
    "training" + os.sep,
)


def leave_out_lines_that_pass_calls_on() -> None:
    """Make JAX leave out lines of this package that only pass calls on, as it does with its own and Flax's.

    An operation has the lines of all functions that led to it. XLA compares them when it names a program's kernels,
    which takes the longer the more lines there are: in a train step an operation has 29 in the mean, and 11 without
    these.
    """
    for name in _PASSING_ON:
        register_exclusion(os.path.join(Path(__file__).parent, name))
