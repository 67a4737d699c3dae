"""The recipe of one module, which overrides the ambient one."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jax_te._validation import check_annotations, checked
from jax_te.recipe.base import Recipe
from jax_te.recipe.block_scaling import NVFP4BlockScaling
from jax_te.recipe.custom import CustomRecipe


@dataclass(frozen=True, kw_only=True)
class ModuleRecipe:
    """A module's own recipe in training and evaluation, and the conditions under which it takes effect.

    Args:
        training: recipe in training; None is high precision.
        evaluation: recipe in evaluation; None is high precision, ``"training"`` (default) the one of training.
        override_quantized_autocast: whether to take effect where the ambient recipe quantizes.
        override_nonquantized_autocast: whether to take effect where nothing is quantized. False by default, so that a
            rule for all modules does not reach those that were put under ``autocast(None)``, e.g. a model's first and
            last layers.
        override_quantized_in_evaluation, override_nonquantized_in_evaluation: the same flags for evaluation. None: as
            in training.
        fp8_param, fp4_param: whether to hold the module's kernels in the quantized form, see ``create_train_state``:
            the first for a recipe of FP8 in training, the second for one of FP4, either for a `CustomRecipe`.

    Raises:
        TypeError: for anything but a recipe, and a flag that is not True or False.
        ValueError: for ``fp8_param`` without a recipe of FP8 in training, ``fp4_param`` without one of FP4, and both.

    Source: Megatron-Core's ``TEQuantizationParams`` and the autocast helpers beside it.

    >>> from jax_te.recipe import Float8CurrentScaling
    >>> in_bf16 = ModuleRecipe(training=None)
    >>> in_bf16.resolve(Float8CurrentScaling(), training=True) is None
    True
    """

    training: Recipe | None
    evaluation: Recipe | Literal["training"] | None = "training"
    override_quantized_autocast: bool = True
    override_nonquantized_autocast: bool = False
    override_quantized_in_evaluation: bool | None = None
    override_nonquantized_in_evaluation: bool | None = None
    fp8_param: bool = False
    fp4_param: bool = False

    def __post_init__(self) -> None:
        check_annotations(self, ModuleRecipe)
        self._check_held_kernels()

    def _check_held_kernels(self) -> None:
        if self.fp8_param and self.fp4_param:
            raise ValueError("fp8_param=True and fp4_param=True: a kernel is held in one form; leave one of them out")
        training = self.training
        of_kind = {"fp8": not isinstance(training, NVFP4BlockScaling), "fp4": isinstance(training, NVFP4BlockScaling)}
        for kind, fits in of_kind.items():
            if not getattr(self, f"{kind}_param"):
                continue
            # Kernels are quantized in training, and evaluation finds them so.
            if training is None or not (fits or isinstance(training, CustomRecipe)):
                raise ValueError(
                    f"{kind}_param=True holds kernels as a recipe of {kind.upper()} quantizes them in training, and "
                    f"training is {training!r}; give such a recipe, or leave {kind}_param out"
                )

    @property
    def holds_kernels(self) -> bool:
        """Whether the module's kernels are stored quantized."""
        return self.fp8_param or self.fp4_param

    @checked
    def overrides(self, *, quantized: bool, training: bool) -> bool:
        """Return whether the module's recipe takes effect.

        Args:
            quantized: whether there is an ambient recipe, which quantizes.
            training: whether the module trains; False: it evaluates.

        >>> ModuleRecipe(training=None).overrides(quantized=False, training=True)
        False
        """
        in_evaluation = self.override_quantized_in_evaluation if quantized else self.override_nonquantized_in_evaluation
        if not training and in_evaluation is not None:
            return in_evaluation
        return self.override_quantized_autocast if quantized else self.override_nonquantized_autocast

    @checked
    def resolve(self, ambient: Recipe | None, *, training: bool) -> Recipe | None:
        """Return the recipe to run under if ``ambient`` is the ambient one.

        It is the module's recipe where that takes effect (`overrides`), otherwise the ambient one.
        """
        if not self.overrides(quantized=ambient is not None, training=training):
            return ambient
        if training or self.evaluation == "training":
            return self.training
        return self.evaluation  # type: ignore[return-value]  # "training" was dealt with


def own_recipe(recipe: Recipe | ModuleRecipe) -> ModuleRecipe:
    """Return the recipe of one module as a `ModuleRecipe`; a plain one overrides any ambient one.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(recipe, ModuleRecipe):
        return recipe
    if not isinstance(recipe, Recipe):
        raise TypeError(f"expected a recipe or a ModuleRecipe, got {recipe!r}")
    return ModuleRecipe(training=recipe, override_nonquantized_autocast=True)


def first_rule(patterns: Iterable[str], path: str) -> str | None:
    """Return the first glob pattern that matches a module's whole path, or None; ``*`` matches dots, too, and matching
    is case-sensitive."""
    # Not fnmatch.fnmatch, which ignores case on some operating systems.
    return next((pattern for pattern in patterns if fnmatch.fnmatchcase(path, pattern)), None)
