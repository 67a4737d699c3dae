"""Quantization files: rules that give layers a precision by glob patterns of their paths."""

from __future__ import annotations

import copy
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_te._validation import brief, check_annotations, checked
from jax_te.megatron.quantization.yaml_file import read_yaml
from jax_te.recipe import first_rule

_logger = logging.getLogger(__name__)

_SECTIONS = ("configs", "matchers")
_MATCHER_KEYS = ("enabled", "type", "pattern", "config")


@dataclass(frozen=True)
class MatchContext:
    """Description of a module that a matcher decides on.

    Args:
        module_path: dotted path in the model.
        layer_number: index of the module's layer, from 0 within the pipeline stage; None outside the layers.

    Raises:
        TypeError: for a path that is not text.
        ValueError: for a layer number that is not an integer >= 0.

    Source: ``megatron.core.quantization.quant_config.MatchContext``.

    >>> MatchContext("layers.1.proj", 1).layer_number
    1
    """

    module_path: str
    layer_number: int | None = None

    def __post_init__(self) -> None:
        check_annotations(self, MatchContext)
        if not isinstance(self.module_path, str):
            raise TypeError(f"module_path must be text, such as 'layers.0.mlp', got {self.module_path!r}")
        if self.layer_number is not None and self.layer_number < 0:
            raise ValueError(f"layer_number must be >= 0, or None outside the layers, got {self.layer_number!r}")


@checked
@dataclass(frozen=True)
class QuantizationConfig:
    """The payload that a rule gave to a module.

    Args:
        config: a copy of the entry of the ``configs`` section.
        match_input: description of the module.
        config_key: name of the entry.
        factory_modules: modules of the `RecipeConfig` whose recipes are made by a factory.

    Source: ``megatron.core.quantization.quant_config.QuantizationConfig``.

    >>> QuantizationConfig({}, MatchContext("proj"), "bf16").config_key
    'bf16'
    """

    config: Any
    match_input: MatchContext
    config_key: str
    factory_modules: tuple[str, ...] = ()


class Matcher(ABC):
    """A rule: gives a module the key of a config, or None.

    Source: ``megatron.core.quantization.quant_config.Matcher``.
    """

    name: str | None = None
    """The rule's label in a quantization file."""

    @abstractmethod
    @checked
    def match(self, context: MatchContext) -> str | None:
        """Return the config key if the rule applies to the module, else None."""


@checked
class GlobMatcher(Matcher):
    """A rule that applies to modules whose whole path matches a glob pattern.

    ``*`` also matches dots, and matching is case-sensitive. Beware that ``*layers.1*`` matches ``layers.10``, too;
    write ``*layers.1.*``. The layer number is not used.

    Args:
        pattern: pattern of `fnmatch`.
        config_key: config key of modules that match.
        name: label for reports.

    Source: ``megatron.core.quantization.quant_config.GlobMatcher``.

    >>> GlobMatcher("*proj", "bf16").match(MatchContext("layers.0.self_attention.proj"))
    'bf16'
    """

    def __init__(self, pattern: str, config_key: str, name: str | None = None):
        self.pattern, self.config_key, self.name = pattern, config_key, name

    def match(self, context: MatchContext) -> str | None:
        return self.config_key if first_rule((self.pattern,), context.module_path) else None

    def __repr__(self) -> str:
        label = "" if self.name is None else f", name={self.name!r}"
        return f"GlobMatcher({self.pattern!r}, {self.config_key!r}{label})"


@checked
class RecipeConfig:
    """Named payloads and ordered rules that give them to modules; the first rule that applies wins.

    Args:
        matchers: matchers, in order.
        config_dict: payload by config key.
        disabled: labels of the rules in a file that are not enabled, for reports.
        factory_modules: modules whose functions payloads may name as ``custom_recipe_factory``. A file alone cannot
            make this package import a module, which would run its code.

    Source: ``megatron.core.quantization.quant_config.RecipeConfig``.

    >>> rules = RecipeConfig([GlobMatcher("*proj", "bf16"), GlobMatcher("*", "fp8")], {"bf16": {}, "fp8": {}})
    >>> rules.match_to_config_key(MatchContext("layers.0.self_attention.qkv"))
    'fp8'
    """

    def __init__(
        self,
        matchers: Iterable[Matcher],
        config_dict: Mapping[str, Any],
        disabled: Iterable[str] = (),
        factory_modules: Iterable[str] = (),
    ):
        self.matchers, self.configs, self.disabled = tuple(matchers), dict(config_dict), tuple(disabled)
        self.factory_modules = tuple(factory_modules)

    @staticmethod
    def from_yaml_file(recipe_yaml_path: str | Path, factory_modules: Iterable[str] = ()) -> RecipeConfig:
        """Return the rules of a YAML file, see `from_config_dict`; PyYAML's safe loader reads the file.

        Raises:
            ValueError: for a key that occurs twice in a mapping (plain PyYAML would drop the first entry), for text
                that is not YAML, and see `from_config_dict`.
        """
        return RecipeConfig.from_config_dict(read_yaml(recipe_yaml_path), factory_modules)

    @staticmethod
    def from_config_dict(config: Mapping[str, Any], factory_modules: Iterable[str] = ()) -> RecipeConfig:
        """Return the rules of ``{"configs": {name: payload}, "matchers": {label: rule}}``; both keys may be missing.

        A rule has the keys ``enabled``, ``type`` (``"glob"``), ``pattern`` and ``config``. As in Megatron, ``enabled``
        is False by default, and a rule that is not enabled is not checked any further; here `RecipeConfig.disabled`
        lists it, and a rule without the key is logged as a warning. Payloads are not checked.

        Raises:
            AssertionError: for an enabled rule without ``type``, ``pattern`` or ``config``.
            NotImplementedError: for a type other than ``"glob"``.
            TypeError: for sections and rules that are not mappings, and flags that are not bools.
            ValueError: for unknown sections, and unknown keys of an enabled rule (Megatron ignores both, so a misspelt
                key has no effect there).

        >>> rule = {"enabled": True, "type": "glob", "pattern": "*", "config": "bf16"}
        >>> RecipeConfig.from_config_dict({"configs": {"bf16": {}}, "matchers": {"all": rule}}).matchers
        (GlobMatcher('*', 'bf16', name='all'),)
        """
        sections = _mapping(config, "a quantization config")
        unknown = [key for key in sections if key not in _SECTIONS]
        if unknown:
            raise ValueError(
                f"unknown section {brief(unknown)[1:-1]} in a quantization config; allowed: {', '.join(_SECTIONS)}"
            )
        configs = _mapping(sections.get("configs", {}), "section 'configs'")
        rules = _mapping(sections.get("matchers", {}), "section 'matchers'")
        # Rules that are off may be drafts, so only the others are checked.
        enabled = {name: rule for name, rule in rules.items() if _enabled(name, rule)}
        matchers = [_build_matcher(name, rule) for name, rule in enabled.items()]
        return RecipeConfig(matchers, configs, [str(name) for name in rules if name not in enabled], factory_modules)

    def first_match(self, context: MatchContext) -> tuple[int, str] | None:
        """Return the index of the first rule that applies and the key that the rule gives, or None.

        >>> RecipeConfig([GlobMatcher("a", "x"), GlobMatcher("*", "y")], {}).first_match(MatchContext("b"))
        (1, 'y')
        """
        for index, matcher in enumerate(self.matchers):
            key = matcher.match(context)
            if key is not None:
                return index, key
        return None

    def match_to_config_key(self, operator_context: MatchContext) -> str | None:
        """Return the config key of a module, or None. Either result is logged at INFO.

        >>> RecipeConfig([], {}).match_to_config_key(MatchContext("proj")) is None
        True
        """
        hit = self.first_match(operator_context)
        if hit is None:
            _logger.info("No quantization config for %r", operator_context.module_path)
            return None
        index, key = hit
        _logger.info("Quantization config %r for %r by %r", key, operator_context.module_path, self.matchers[index])
        return key

    def match(self, operator_context: MatchContext) -> QuantizationConfig | None:
        """Return the module's config with a deep copy of the payload, or None.

        Raises:
            KeyError: if the rule that applies names a config that does not exist. As in Megatron, a file with such a
                rule can be loaded, and used as long as the rule does not apply.

        >>> RecipeConfig([GlobMatcher("*", "x")], {"x": {"a": 1}}).match(MatchContext("proj")).config
        {'a': 1}
        """
        key = self.match_to_config_key(operator_context)
        if key is None:
            return None
        if key not in self.configs:
            raise KeyError(
                f"the matcher for {operator_context.module_path!r} names config {key!r}, which is not in 'configs'; "
                f"there: {', '.join(map(str, self.configs)) or 'nothing'}"
            )
        # A copy: modules share an entry, and one that edits its payload must not change the others'.
        return QuantizationConfig(copy.deepcopy(self.configs[key]), operator_context, key, self.factory_modules)


@checked
def load_quantization_recipe(recipe_path: str | Path, factory_modules: Iterable[str] = ()) -> RecipeConfig:
    """Return the rules of a quantization file.

    Args:
        recipe_path: path of the file.
        factory_modules: modules whose functions the file may name as ``custom_recipe_factory``.

    Raises:
        ValueError, TypeError, AssertionError, NotImplementedError: see `RecipeConfig.from_yaml_file`.

    Source: ``megatron.core.quantization.utils.load_quantization_recipe``.

    >>> _ = Path("quant.yaml").write_text(
    ...     "configs: {bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}}\\n"
    ...     "matchers: {all: {enabled: true, type: glob, pattern: '*', config: bf16}}\\n"
    ... )
    >>> load_quantization_recipe("quant.yaml").match_to_config_key(MatchContext("proj"))
    'bf16'
    """
    return RecipeConfig.from_yaml_file(recipe_path, factory_modules)


@checked
def match_context(module_path: str) -> MatchContext:
    """Return the `MatchContext` of a path; its layer number is that of the first ``layers.N`` in the path.

    >>> match_context("decoder.layers.12.mlp.linear_fc1").layer_number
    12
    """
    # The first one, as in Megatron: a layer inside of a layer belongs to the outer one.
    found = re.search(r"layers\.(\d+)", module_path)
    return MatchContext(module_path, None if found is None else int(found[1]))


@checked
def get_quant_config_or_none(module_path: str | None, recipe: RecipeConfig | None) -> QuantizationConfig | None:
    """Return the config that ``recipe`` gives to a module; None if no rule applies, or without a path or a recipe.

    Raises:
        KeyError: see `RecipeConfig.match`.

    Source: ``megatron.core.quantization.utils.get_quant_config_or_none``.

    >>> get_quant_config_or_none("proj", None) is None
    True
    """
    if module_path is None or recipe is None:
        return None
    return recipe.match(match_context(module_path))


def _mapping(value: Any, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{what} must be a mapping, got {brief(value)}")
    return value


def _enabled(name: Any, rule: Any) -> bool:
    rule = _mapping(rule, f"matcher {brief(name)}")
    if "enabled" not in rule:
        # The default is off in Megatron, too, and a rule without effect is hard to see.
        _logger.warning("Matcher %r is off, because it does not say 'enabled: true'", name)
        return False
    if not isinstance(rule["enabled"], bool):
        raise TypeError(f"'enabled' of matcher {brief(name)} must be true or false, got {brief(rule['enabled'])}")
    return rule["enabled"]


def _build_matcher(name: Any, rule: Mapping[Any, Any]) -> Matcher:
    # An unknown type is reported before missing keys: another type of rule would have other keys.
    for key in ("type", "pattern", "config"):
        if key not in rule:
            raise AssertionError(f"matcher {brief(name)} lacks {key!r}")
        if key == "type" and rule["type"] != "glob":
            raise NotImplementedError(f"matcher {brief(name)} has type {brief(rule['type'])}; the only one is 'glob'")
    # Megatron ignores unknown keys; a misspelt one would have no effect.
    unknown = [key for key in rule if key not in _MATCHER_KEYS]
    if unknown:
        raise ValueError(
            f"matcher {brief(name)} has unknown keys {brief(unknown)[1:-1]}; allowed: {', '.join(_MATCHER_KEYS)}"
        )
    # YAML reads an unquoted 1 or yes as a number or a bool, which would match nothing.
    for key in ("pattern", "config"):
        if not isinstance(rule[key], str):
            raise TypeError(f"{key!r} of matcher {brief(name)} must be text, got {brief(rule[key])}; put it in quotes")
    return GlobMatcher(rule["pattern"], rule["config"], str(name))
