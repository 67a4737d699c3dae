"""Warnings that point to a user's line."""

from __future__ import annotations

import sys
import warnings

_OWN = ("jax_te", "jaxtyping", "beartype")
"""Packages whose frames lie between a user's line and a warning: this one, and those that check its annotations."""


def warn_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the line outside of this package that led here, however many calls lie between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "jax_te").partition(".")[0] in _OWN:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
