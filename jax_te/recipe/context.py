"""The ambient recipe."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from jax_te._validation import checked
from jax_te.recipe.base import Recipe

# A user context is part of the jit cache key: a function traced under one recipe is traced again under another.
ambient_recipe = jax.make_user_context(None)

_in_autocast = jax.make_user_context(False)
"""Whether this is inside of an `autocast`, so that the absence of a recipe is meant."""


@checked
@contextlib.contextmanager
def autocast(recipe: Recipe | None, *, enabled: bool = True) -> Iterator[None]:
    """Yield with ``recipe`` in use for every quantizable layer that is built, traced or called inside.

    Contexts nest; the innermost wins. ``autocast(None)`` and ``enabled=False`` both turn quantization off inside.

    Args:
        recipe: a `Recipe`, or None.
        enabled: whether to use ``recipe``; False runs in high precision whatever ``recipe`` is.

    Raises:
        TypeError: if ``recipe`` is not a recipe, e.g. a class instead of an instance, or ``enabled`` is not bool.

    Source: ``transformer_engine.jax.autocast`` / ``transformer_engine.pytorch.fp8_autocast``.

    >>> from jax_te.recipe import Float8CurrentScaling
    >>> with autocast(Float8CurrentScaling()):
    ...     current_recipe().name
    'current'
    """
    with ambient_recipe(recipe if enabled else None), _in_autocast(True):
        yield


def current_recipe() -> Recipe | None:
    """Return the recipe of the innermost `autocast`; None outside of one and where it is disabled."""
    return ambient_recipe.value


def inside_autocast() -> bool:
    """Return whether this is inside of an `autocast`, be it ``autocast(None)``.

    >>> with autocast(None):
    ...     current_recipe(), inside_autocast()
    (None, True)
    """
    return _in_autocast.value
