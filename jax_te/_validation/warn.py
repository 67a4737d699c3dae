"""Warnings that point to a user's line."""

from __future__ import annotations

import sys
import warnings

_BETWEEN = ("jax_te", "jaxtyping", "beartype", "jax", "flax")
"""Packages whose frames lie between a user's line and a warning: this one, those that check its annotations, and those
that trace its functions."""


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the user's line that led here, however many calls lie between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "jax_te").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
