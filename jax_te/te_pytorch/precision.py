"""Contexts that put a recipe in force."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Annotated

from jax_te._validation import checked
from jax_te.recipe import DelayedScaling, Recipe
from jax_te.recipe import autocast as _autocast
from jax_te.typing import Words

NoReductionGroup = Annotated[
    None,
    Words(
        "None",
        "JAX has no process groups: DelayedScaling(tp_only_amax_red=True) reduces amaxes over the mesh's tensor and "
        "context axes alone",
    ),
]


@checked
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: NoReductionGroup = None,
) -> AbstractContextManager[None]:
    """Return the context of `jax_te.recipe.autocast`, with the arguments of ``transformer_engine.pytorch.autocast``.

    Args:
        enabled: whether to quantize.
        calibrating: option that must be False. Transformer Engine gathers amaxes in high precision if it is True.
        recipe: None: ``DelayedScaling()``.
        amax_reduction_group: None; the recipe says over which part of the mesh amaxes are reduced.

    Raises:
        ValueError: for ``calibrating=True``.
        TypeError: for a group, a recipe that is not one, or a flag that is not a bool.

    Source: ``transformer_engine.pytorch.autocast``.

    >>> from jax_te.recipe import current_recipe
    >>> with autocast():
    ...     current_recipe() == DelayedScaling()
    True
    """
    if calibrating:
        raise ValueError(
            "calibrating=True: scales are computed in each step, and delayed scaling's first step takes them from its "
            "own data. jax_te.quantize.observe_quantization gives the amaxes of a call; leave calibrating False"
        )
    return _autocast(DelayedScaling() if recipe is None else recipe, enabled=enabled)


@checked
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: NoReductionGroup = None,
) -> AbstractContextManager[None]:
    """Return the context of `autocast`, under the older names of its arguments.

    Args:
        enabled: whether to quantize. The first releases' default was False.
        calibrating, fp8_recipe, fp8_group: arguments ``calibrating``, ``recipe`` and ``amax_reduction_group`` of
            `autocast`.

    Raises:
        ValueError, TypeError: see `autocast`.

    Source: ``transformer_engine.pytorch.fp8_autocast``.

    >>> from jax_te.recipe import current_recipe
    >>> with fp8_autocast(enabled=False):
    ...     print(current_recipe())
    None
    """
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)
