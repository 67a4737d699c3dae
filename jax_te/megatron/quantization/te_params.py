"""A layer's own recipes in training and evaluation, as Megatron's quantization files describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax_te._validation import brief, checked
from jax_te.megatron.enums import TE_CONFIG_TYPE_KEY, TransformerEngineConfigType
from jax_te.megatron.quantization.rules import QuantizationConfig
from jax_te.megatron.quantization.te_recipe import TEQuantizationRecipe
from jax_te.recipe import ModuleRecipe


@checked
@dataclass(frozen=True)
class TEQuantizationParams:
    """The precision of a layer in training and in evaluation.

    Args:
        training_recipe: recipe of training, and of evaluation if ``evaluation_recipe`` is None.
        evaluation_recipe: recipe of evaluation. None: ``training_recipe``.

    Source: ``megatron.core.extensions.transformer_engine.TEQuantizationParams``.

    >>> fp8 = TEQuantizationRecipe(fp8_quantization_recipe="tensorwise")
    >>> TEQuantizationParams(fp8, TEQuantizationRecipe()).to_module_recipe().evaluation is None
    True
    """

    training_recipe: TEQuantizationRecipe
    evaluation_recipe: TEQuantizationRecipe | None = None

    @staticmethod
    def parse_from_config(quant_config: QuantizationConfig) -> TEQuantizationParams:
        """Return the parameters of a payload of a quantization file.

        Raises:
            ValueError: if the payload's type is missing or unknown, or ``training_recipe`` is missing, or as
                `TEQuantizationRecipe.parse_from_config`.
            AssertionError: for any other key, as in Megatron.
            TypeError: for a blank recipe. A blank ``evaluation_recipe:`` could mean "as in training" or "high
                precision": leave the key out for the former, write ``{}`` for the latter.

        >>> from jax_te.megatron import MatchContext
        >>> payload = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
        >>> TEQuantizationParams.parse_from_config(QuantizationConfig(payload, MatchContext("proj"), "bf16"))
        TEQuantizationParams(training_recipe=TEQuantizationRecipe(...), evaluation_recipe=None)
        """
        config, where = quant_config.config, f"config {brief(quant_config.config_key)}"
        if not isinstance(config, Mapping):
            raise TypeError(f"{where} must be a mapping, got {brief(config)}")
        _check_payload_type(config, where)
        if "training_recipe" not in config:
            raise ValueError(f"{where} lacks training_recipe; write {{}} there for high precision")
        known = {TE_CONFIG_TYPE_KEY, "training_recipe", "evaluation_recipe"}
        extra = [key for key in config if key not in known]
        if extra:
            raise AssertionError(f"{where} has unknown keys {brief(extra)[1:-1]}; allowed: {', '.join(sorted(known))}")
        modes = [name for name in ("training_recipe", "evaluation_recipe") if name in config]
        return TEQuantizationParams(*(_parse_recipe(quant_config, name, where) for name in modes))

    def recipe_for(self, training: bool) -> TEQuantizationRecipe:
        """Return the recipe of a mode.

        >>> TEQuantizationParams(TEQuantizationRecipe()).recipe_for(training=False)
        TEQuantizationRecipe(...)
        """
        return self.training_recipe if training or self.evaluation_recipe is None else self.evaluation_recipe

    def to_module_recipe(self) -> ModuleRecipe:
        """Return the ``module_recipe`` of a quantizable layer with this precision.

        Raises:
            ValueError: see `TEQuantizationRecipe.to_recipe`; if only ``evaluation_recipe`` stores kernels quantized,
                which happens in training.

        >>> TEQuantizationParams(TEQuantizationRecipe()).to_module_recipe().training is None
        True
        """
        training, evaluation = self.training_recipe, self.recipe_for(training=False)
        # Parameters are created in training; evaluation finds them as they are.
        for name in ("fp8_param", "fp4_param"):
            if getattr(evaluation, name) and not getattr(training, name):
                raise ValueError(f"{name} holds in training and evaluation alike: set it in training_recipe")
        recipe = ModuleRecipe(
            training=training.to_recipe(),
            override_quantized_autocast=training.override_quantized_autocast,
            override_nonquantized_autocast=training.override_nonquantized_autocast,
            fp8_param=training.fp8_param,
            fp4_param=training.fp4_param,
        )
        if self.evaluation_recipe is None:
            return recipe
        # None where it suffices, so that equal precisions compare equal however they were written.
        return replace(
            recipe,
            evaluation=evaluation.to_recipe(),
            override_quantized_in_evaluation=_other(
                evaluation.override_quantized_autocast, training.override_quantized_autocast
            ),
            override_nonquantized_in_evaluation=_other(
                evaluation.override_nonquantized_autocast, training.override_nonquantized_autocast
            ),
        )


def _other(flag: bool, in_training: bool) -> bool | None:
    return None if flag == in_training else flag


def _check_payload_type(config: Mapping[Any, Any], where: str) -> None:
    kinds = [kind.value for kind in TransformerEngineConfigType]
    if TE_CONFIG_TYPE_KEY not in config:
        raise ValueError(f"{where} lacks {TE_CONFIG_TYPE_KEY}; allowed values: {', '.join(kinds)}")
    kind = config[TE_CONFIG_TYPE_KEY]
    # Not a call of the class: for an unknown value Enum builds the value's whole repr.
    if kind not in (*kinds, *TransformerEngineConfigType):
        raise ValueError(f"{where} has {TE_CONFIG_TYPE_KEY} {brief(kind)}; allowed values: {', '.join(kinds)}")


def _parse_recipe(quant_config: QuantizationConfig, name: str, where: str) -> TEQuantizationRecipe:
    value = quant_config.config[name]
    if value is None:
        omit = "leave the key out to evaluate as in training, or " if name == "evaluation_recipe" else ""
        raise TypeError(f"{name} of {where} is blank: {omit}write {{}} for high precision")
    try:
        return TEQuantizationRecipe.parse_from_config(value, quant_config.factory_modules)
    # Raised again with the position in the file, which a recipe does not know.
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name} of {where}: {error}") from error
