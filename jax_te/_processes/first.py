"""The process that acts for all."""

from __future__ import annotations

import jax


def is_first() -> bool:
    """Return whether this is the process that writes files and messages."""
    return jax.process_index() == 0
