"""Lines of Python that JAX records as the origin of an operation, for profiles, messages and the compiler."""

from __future__ import annotations

import os

from jax.extend.source_info_util import register_exclusion

# Files and folders that pass calls on, between a user's lines, layers, and the functions that run operations.
_PASSING_ON = (
    "_validation/",
    "models/stack.py",
    "ops/linear/resolve.py",
    "ops/sharded_vjp.py",
    "remat/",
    "training/accumulation.py",
    "training/differentiation.py",
    "training/pipeline/loss.py",
    "training/state_arrays.py",
    "training/transformation.py",
)


def leave_out_lines_that_pass_calls_on() -> None:
    """Make JAX leave out lines of this package that only pass calls on, as it does with its own and Flax's.

    An operation has the lines of all functions that led to it. XLA compares them when it names a program's kernels, and
    most of a layer's would be such lines.
    """
    package = os.path.dirname(os.path.dirname(__file__))
    for name in _PASSING_ON:
        # In the form in which Python names the files of modules. A folder ends in a separator: JAX compares beginnings.
        register_exclusion(os.path.join(package, *name.split("/")))
