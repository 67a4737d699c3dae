"""The fields of PEFT's ``adapter_config.json`` that change numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jax_te._validation import warn_caller
from jax_te.interop.huggingface.config_json import NO_NUMBERS
from jax_te.interop.tables import REQUIRED, Fields

_LITERAL = re.compile(r"[\w.]{1,300}")
# Of ``fan_in_fan_out``, which is of the layers that are adapted, the architecture says the same.
_NO_NUMBERS = """
auto_mapping base_model_name_or_path eva_config fan_in_fan_out inference_mode megatron_core peft_version
qalora_group_size revision runtime_config task_type
"""
_STACKS = ("layers", "h", "block")
DEFAULT_RANK, DEFAULT_ALPHA = 8, 8.0
"""PEFT's defaults of ``r`` and ``lora_alpha``."""


@dataclass(frozen=True)
class PeftConfig:
    """The fields of ``adapter_config.json`` that change numbers.

    Args:
        rank, ranks: rank of all adapters, and of those whose layers' names end with one of these.
        alpha, alphas: the same of the factor.
        rank_stabilized: whether the factor is divided by the rank's square root.
        targets: names of layers with adapters, or ends of these. None: an expression says them.
        excluded: the same of layers without.
        numbers: numbers of transformer layers with adapters. None: all.
    """

    rank: int
    ranks: Mapping[str, int]
    alpha: float
    alphas: Mapping[str, float]
    rank_stabilized: bool
    targets: list[str] | None
    excluded: list[str] | None
    numbers: list[int] | None

    def rank_of(self, module: str) -> int:
        """Return the rank of a layer's adapter."""
        return next((rank for name, rank in self.ranks.items() if _ends(module, name)), self.rank)

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of a layer's adapter."""
        alpha = next((alpha for name, alpha in self.alphas.items() if _ends(module, name)), self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def has(self, module: str) -> bool:
        """Return whether PEFT puts an adapter around a layer."""
        if any(_ends(module, name) for name in self.excluded or ()):
            return False
        if self.targets is None:
            return True
        number = next((int(part) for part in module.split(".")[1:-1] if part.isdecimal()), None)
        chosen = self.numbers is None or number in self.numbers
        return chosen and any(_ends(module, name) for name in self.targets)


def _ends(module: str, name: str) -> bool:
    return f".{module}".endswith(f".{name}")


def read_config(values: Mapping[str, Any], what: str, ignore: Collection[str]) -> PeftConfig:
    """Return the fields that change numbers; those that are null, false or empty count as absent."""
    stated = {name: value for name, value in values.items() if not _is_nothing(value)}
    given = Fields(stated, what, without_effect=NO_NUMBERS)
    kind = given.take("peft_type", str, REQUIRED)
    if kind != "LORA":
        raise given.refused("peft_type", kind, "only 'LORA' is supported")
    given.skip(*_NO_NUMBERS.split())
    given.expect("bias", "none")
    if (parameters := given.raw("target_parameters")) is not None:
        why = "adapters of single parameters, as experts have them, are not read; name linear layers in target_modules"
        raise given.refused("target_parameters", parameters, why)
    # Others change the kernels that adapters are for.
    given.expect("init_lora_weights", True, "gaussian", "eva", "orthogonal")
    rate = given.take("lora_dropout", float, 0.0)
    targets, numbers = _names_of_layers(given, "target_modules"), given.raw("layers_to_transform")
    numbers = [numbers] if type(numbers) is int else numbers
    if numbers is not None and not (isinstance(numbers, list) and all(type(number) is int for number in numbers)):
        raise given.refused("layers_to_transform", numbers, "it must hold numbers of layers")
    pattern = given.raw("layers_pattern")
    if pattern not in (None, "", *_STACKS, *([name] for name in _STACKS)):
        raise given.refused("layers_pattern", pattern, f"the first numbers in names count layers, in {_STACKS}")
    config = PeftConfig(
        rank=given.take("r", int, DEFAULT_RANK),
        ranks=_numbers_by_layer(given, f"{what}: rank_pattern", "rank_pattern", int),
        alpha=given.take("lora_alpha", float, DEFAULT_ALPHA),
        alphas=_numbers_by_layer(given, f"{what}: alpha_pattern", "alpha_pattern", float),
        rank_stabilized=given.take("use_rslora", bool, False),
        targets=targets,
        excluded=_names_of_layers(given, "exclude_modules"),
        numbers=numbers,
    )
    given.finish(ignore)
    if rate > 0.0:
        warn_caller(
            f"{what}: lora_dropout is {rate}, and adapters have no dropout here: they compute the same, and train "
            "without it"
        )
    return config


def _names_of_layers(given: Fields, name: str) -> list[str] | None:
    """Return names of layers, None for an expression in their place, which is not evaluated, or none."""
    names = given.raw(name)
    if names is None or isinstance(names, str):
        return None
    if not isinstance(names, list) or not all(isinstance(module, str) for module in names):
        raise given.refused(name, names, "it must hold names of layers")
    return names


def _numbers_by_layer(given: Fields, what: str, name: str, kind: type) -> dict[str, Any]:
    """Return numbers by ends of layers' names."""
    pattern = given.take(name, dict, {})
    values = Fields(pattern, what)
    for module, number in pattern.items():
        if not _LITERAL.fullmatch(module):
            raise values.refused(module[:60], number, "only names of layers are supported, no other expressions")
    return {module: values.take(module, kind, REQUIRED) for module in pattern}


def _is_nothing(value: Any) -> bool:
    return value is None or value is False or value in ({}, [])
