"""The precision recipes: frozen, hashable data that says how a linear layer's operands are quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jax_te.recipe.format import Format


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of all recipes. A recipe is data only; it can be a dictionary key and part of a jit cache key.

    Args:
        fp8_format: number formats, see `Format`.
    """

    fp8_format: Format = Format.HYBRID

    def __post_init__(self) -> None:
        if not isinstance(self.fp8_format, Format):
            raise TypeError(
                f"fp8_format must be a jax_te.recipe.Format, got {self.fp8_format!r}; "
                f"allowed: {', '.join(str(f) for f in (Format.E4M3, Format.HYBRID))}"
            )
        if self.fp8_format is Format.E5M2:
            raise ValueError(
                "fp8_format=Format.E5M2 cannot train: FP8 GEMMs do not multiply E5M2 by E5M2. "
                "Use Format.HYBRID (E4M3 forward, E5M2 gradients) or Format.E4M3."
            )

    @property
    def has_state(self) -> bool:
        """Whether layers must carry a `QuantizerState` for this recipe."""
        return False

    @property
    def name(self) -> str:
        """Short name, as in ``jax-te train --recipe NAME``."""
        raise TypeError(f"{type(self).__name__} has no name; use one of the concrete recipes")


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """Per-tensor FP8 whose scale comes from the largest values of earlier steps.

    ``scale = max_fp8 / amax / 2**margin`` with ``amax`` the maximum (or the newest) of the last ``amax_history_len``
    steps; an amax of 0, inf or nan keeps the scale that was in use. The quantized value is ``clip(x * scale)``
    rounded to nearest even.

    Args:
        margin: powers of two of head-room below the format's largest value, an integer >= 0.
        fp8_format: `Format.HYBRID` (default) or `Format.E4M3`.
        amax_history_len: steps kept, >= 1. TE's default is 1024, Megatron's is 1.
        amax_compute_algo: ``"max"`` of the history, or ``"most_recent"``.

    Raises:
        TypeError, ValueError: for a field outside the above.

    Source: ``transformer_engine.common.recipe.DelayedScaling``; Micikevicius et al. 2022, "FP8 Formats for Deep
        Learning".

    >>> DelayedScaling(amax_history_len=16).has_state
    True
    """

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.margin, bool) or not isinstance(self.margin, int) or self.margin < 0:
            raise ValueError(f"margin must be an integer >= 0, got {self.margin!r}")
        length = self.amax_history_len
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"amax_history_len must be an integer >= 1, got {length!r}")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"amax_compute_algo must be 'max' or 'most_recent', got {self.amax_compute_algo!r}; "
                "functions are not supported because a recipe is hashed into the jit cache key"
            )

    @property
    def has_state(self) -> bool:
        return True

    @property
    def name(self) -> str:
        return "delayed"


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """Per-tensor FP8 whose scale comes from the tensor itself: ``scale = max_fp8 / amax(x)``.

    No state, one more pass over the tensor than `DelayedScaling`. An amax that is 0, inf or nan gives scale 1.

    Args:
        fp8_format: `Format.HYBRID` (default) or `Format.E4M3`.

    Source: ``transformer_engine.common.recipe.Float8CurrentScaling``.

    >>> Float8CurrentScaling().has_state
    False
    """

    @property
    def name(self) -> str:
        return "current"


RECIPES: dict[str, type[Recipe] | None] = {
    "none": None,
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
}


def recipe_from_name(name: str) -> Recipe | None:
    """The recipe with default fields for a command-line name; ``"none"`` gives None.

    >>> recipe_from_name("current")
    Float8CurrentScaling(fp8_format=<Format.HYBRID: 'hybrid'>)
    """
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; allowed: {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    return None if recipe is None else recipe()
