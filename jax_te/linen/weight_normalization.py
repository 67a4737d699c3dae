"""Flax's wrappers that normalize the weights of a layer: they map all its variables, states too, by name or shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flax import linen as nn


class Normalization(NamedTuple):
    """A running ``nn.WeightNorm`` or ``nn.SpectralNorm``.

    Args:
        wrapper: name of its class.
        layer: path of the layer in it.
        words: parts of the paths of the variables that a ``WeightNorm`` normalizes; none: it normalizes all.
        steps: power iterations of a ``SpectralNorm``.
    """

    wrapper: str
    layer: tuple[str, ...]
    words: tuple[str, ...] = ()
    steps: int = 0

    def changes(self, path: Sequence[str], ndim: int) -> bool:
        """Return whether it normalizes the variable at a path of the model, which has ``ndim`` axes.

        >>> Normalization("WeightNorm", ("up",), words=("kernel",)).changes(("up", "kernel"), 2)
        True
        >>> Normalization("SpectralNorm", ("up",), steps=1).changes(("up", "bias"), 1)
        False
        """
        if self.wrapper == "SpectralNorm":
            return ndim > 1 and self.steps > 0
        text = "/".join(path[max(len(self.layer) - 1, 0) :])
        return not self.words or any(word in text for word in self.words)


def running_normalizations() -> tuple[Normalization, ...]:
    """Return the wrappers inside of which code runs now, outer ones first."""
    found = []
    # Flax has no public name for the modules that run now.
    for module in nn.module._context.module_stack:
        if isinstance(module, nn.WeightNorm):
            words = tuple(module.variable_filter or ())
            found.append(Normalization("WeightNorm", module.layer_instance.path, words))
        elif isinstance(module, nn.SpectralNorm):
            found.append(Normalization("SpectralNorm", module.layer_instance.path, steps=module.n_steps))
    return tuple(found)


def changed_by(
    normalizations: Sequence[Normalization], module: nn.Module, path: Sequence[str], ndim: int
) -> str | None:
    """Return the class of the first wrapper that normalizes a variable of a module, or None.

    Args:
        normalizations: wrappers that run the module.
        module: bound module.
        path: path of the variable in the module's scope.
        ndim: number of axes that the module sees.
    """
    if module.scope is None:
        return None
    whole = (*module.scope.path, *path)
    # The wrapper may see the variables of all layers of a scan, with an axis that a layer does not see. Flax writes
    # such transformations into the text of the path, those outside of the wrapper, too.
    stacked = sum(module.scope.path_text.count(f"{name}(") for name in ("scan", "vmap"))
    return next((one.wrapper for one in normalizations if one.changes(whole, ndim + stacked)), None)
