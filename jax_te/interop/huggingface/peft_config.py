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

_LONGEST = 1000
# Python's matcher tries all ways to share a name among the repetitions of an expression: with a few they are done in a
# moment, with many, or one inside of another, a load could take years.
_REPETITIONS = 4
_REPEATED = re.compile(r"[*+]|\{\d*,")
_REPEATED_GROUP = re.compile(r"\)\s*(?:[*+]|\{)")
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
        rank, ranks: rank of all adapters, and of those whose layers' names end as one of these expressions.
        alpha, alphas: the same of the factor.
        rank_stabilized: whether the factor is divided by the rank's square root.
        targets: names of layers with adapters, or ends of these; or an expression for whole names. None: all that the
            file has.
        excluded: the same of layers without; None: none.
        numbers: numbers of transformer layers with adapters, where ``targets`` are ends of names. None: all.
        stack: name of what these numbers count. None: the last numbers in names.
    """

    rank: int
    ranks: Mapping[re.Pattern[str], int]
    alpha: float
    alphas: Mapping[re.Pattern[str], float]
    rank_stabilized: bool
    targets: list[str] | re.Pattern[str] | None
    excluded: list[str] | re.Pattern[str] | None
    numbers: list[int] | None
    stack: str | None

    def rank_of(self, module: str) -> int:
        """Return the rank of a layer's adapter."""
        return next((rank for name, rank in self.ranks.items() if name.fullmatch(module)), self.rank)

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of a layer's adapter."""
        alpha = next((alpha for name, alpha in self.alphas.items() if name.fullmatch(module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def has(self, module: str) -> bool:
        """Return whether PEFT puts an adapter around a layer."""
        if self.excluded is not None and _is_one_of(module, self.excluded):
            return False
        if self.targets is None:
            return True
        # Numbers do not choose among what a whole name or an expression says.
        if isinstance(self.targets, re.Pattern) or module in self.targets or self.numbers is None:
            return _is_one_of(module, self.targets)
        # The first number in a name counts: a T5's block, and not the layer in it.
        stack = r".*?\.[^.]*" if self.stack is None else rf"(?:.*?\.)?{self.stack}"
        counted = re.match(rf"{stack}\.(\d+)\.", module)
        return counted is not None and int(counted[1]) in self.numbers and _is_one_of(module, self.targets)


def _is_one_of(module: str, names: list[str] | re.Pattern[str]) -> bool:
    """Return whether a layer's name ends with one of these names, or an expression describes it."""
    if isinstance(names, re.Pattern):
        return names.fullmatch(module) is not None
    return any(f".{module}".endswith(f".{name}") for name in names)


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
    stack = pattern[0] if isinstance(pattern, list) and len(pattern) == 1 else pattern or None
    if stack is not None and stack not in _STACKS:
        raise given.refused("layers_pattern", pattern, f"it must be one name of a stack of layers, of {_STACKS}")
    config = PeftConfig(
        rank=given.take("r", int, DEFAULT_RANK),
        ranks=_numbers_by_layer(given, f"{what}: rank_pattern", "rank_pattern", int),
        alpha=given.take("lora_alpha", float, DEFAULT_ALPHA),
        alphas=_numbers_by_layer(given, f"{what}: alpha_pattern", "alpha_pattern", float),
        rank_stabilized=given.take("use_rslora", bool, False),
        targets=targets,
        excluded=_names_of_layers(given, "exclude_modules"),
        numbers=numbers,
        stack=stack,
    )
    given.finish(ignore)
    if rate > 0.0:
        warn_caller(
            f"{what}: lora_dropout is {rate}, and adapters have no dropout here: they compute the same, and train "
            "without it"
        )
    return config


def _names_of_layers(given: Fields, name: str) -> list[str] | re.Pattern[str] | None:
    """Return names of layers, or an expression; None for none, and for all linear layers."""
    names = given.raw(name)
    if names is None or (isinstance(names, str) and names.lower() == "all-linear" and name == "target_modules"):
        return None
    if isinstance(names, str):
        return _expression(given, name, names, names)
    if not isinstance(names, list) or not all(isinstance(module, str) for module in names):
        raise given.refused(name, names, "it must hold names of layers")
    return names


def _numbers_by_layer(given: Fields, what: str, name: str, kind: type) -> dict[re.Pattern[str], Any]:
    """Return numbers by expressions for ends of layers' names."""
    pattern = given.take(name, dict, {})
    values = Fields(pattern, what)
    numbers = {}
    for module in pattern:
        expression = _expression(given, name, module, rf"(.*\.)?({module})$")
        numbers[expression] = values.take(module, kind, REQUIRED)
    return numbers


def _expression(given: Fields, name: str, text: str, whole: str) -> re.Pattern[str]:
    """Return a compiled expression of a file; raises for one that Python cannot read, or may match for years.

    Args:
        given: what has the field.
        name: name of the field.
        text: the expression in the file.
        whole: the expression around it that describes whole names.
    """
    if len(text) > _LONGEST or len(_REPEATED.findall(text)) > _REPETITIONS or _REPEATED_GROUP.search(text):
        why = (
            f"expressions may have {_LONGEST} characters, {_REPETITIONS} repetitions (* and +), and no repeated group, "
            "since others may take years; name the layers"
        )
        raise given.refused(name, text[:60], why)
    try:
        return re.compile(whole)
    except re.error as error:
        raise given.refused(name, text[:60], f"it is no regular expression of Python: {error}") from error


def _is_nothing(value: Any) -> bool:
    return value is None or value is False or value in ({}, [])
