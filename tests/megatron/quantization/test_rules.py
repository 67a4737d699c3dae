"""Quantization files: reading, matching, logging and errors."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from jax_te.megatron import (
    GlobMatcher,
    MatchContext,
    RecipeConfig,
    get_quant_config_or_none,
    load_quantization_recipe,
    match_context,
)
from tests.support.numerics import without_type_checker

EXAMPLE = """
configs:                       # name -> payload
  bf16:  {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
  fp8cs: {transformer_engine_config_type: TEQuantizationParams,
          training_recipe: {fp8_quantization_recipe: tensorwise}, evaluation_recipe: {}}
matchers:                      # ordered
  out_hp: {type: glob, pattern: "*fc2", config: bf16,  enabled: true}
  rest:   {type: glob, pattern: "*",    config: fp8cs, enabled: true}
"""
RULE = {"enabled": True, "type": "glob", "pattern": "*", "config": "c"}


def write(folder: Path, text: str) -> Path:
    path = folder / "quant.yaml"
    path.write_text(text)
    return path


def rules(**matchers: Any) -> RecipeConfig:
    return RecipeConfig.from_config_dict({"configs": {"c": {"a": [1]}}, "matchers": matchers})


def test_the_example(tmp_path: Path):
    recipe = load_quantization_recipe(write(tmp_path, EXAMPLE))
    assert [matcher.name for matcher in recipe.matchers] == ["out_hp", "rest"]
    out, rest = (recipe.match(match_context(f"decoder.layers.3.mlp.linear_{name}")) for name in ("fc2", "fc1"))
    assert out is not None
    assert rest is not None
    assert (out.config_key, rest.config_key) == ("bf16", "fp8cs")
    assert out.match_input == MatchContext("decoder.layers.3.mlp.linear_fc2", 3)
    assert out.config == {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    assert rest.config["training_recipe"] == {"fp8_quantization_recipe": "tensorwise"}
    assert recipe.disabled == ()


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("*fc2", "layers.0.mlp.fc2", True),
        ("fc2", "layers.0.mlp.fc2", False),  # the whole path, not a part
        ("layers.*.fc2", "layers.0.mlp.fc2", True),  # across dots
        ("*FC2", "layers.0.mlp.fc2", False),
        ("*layers.1*", "layers.10.fc2", True),
        ("*layers.1.*", "layers.10.fc2", False),
        ("layers.[01].?c2", "layers.1.fc2", True),
        ("*", "", True),
    ],
)
def test_glob(pattern: str, path: str, fits: bool):
    assert GlobMatcher(pattern, "key").match(MatchContext(path)) == ("key" if fits else None)


def test_the_layer_number_is_of_no_account():
    assert GlobMatcher("proj", "key").match(MatchContext("proj", 7)) == "key"


def test_first_hit_wins():
    matchers = [GlobMatcher("*proj", "a"), GlobMatcher("*", "b"), GlobMatcher("*qkv", "c")]
    recipe = RecipeConfig(matchers, {"a": 1, "b": 2, "c": 3})
    assert [recipe.match_to_config_key(MatchContext(path)) for path in ("x.proj", "x.qkv")] == ["a", "b"]
    assert [recipe.first_match(MatchContext(path)) for path in ("x.proj", "x.qkv")] == [(0, "a"), (1, "b")]
    assert RecipeConfig(matchers[:1], {}).match(MatchContext("x.qkv")) is None


def test_payloads_are_copied():
    recipe = rules(all=RULE)
    first = recipe.match(MatchContext("x"))
    assert first is not None
    first.config["a"].append(2)
    again = recipe.match(MatchContext("x"))
    assert again is not None
    assert again.config == {"a": [1]}


def test_hits_and_misses_are_logged(caplog: pytest.LogCaptureFixture):
    recipe = rules(proj=RULE | {"pattern": "*proj"})
    with caplog.at_level(logging.INFO, "jax_te.megatron"):
        recipe.match(MatchContext("x.proj"))
        recipe.match(MatchContext("x.qkv"))
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "Quantization config 'c' for 'x.proj' by GlobMatcher('*proj', 'c', name='proj')"),
        ("INFO", "No quantization config for 'x.qkv'"),
    ]


def test_rules_are_off_by_default_and_then_not_looked_at(caplog: pytest.LogCaptureFixture):
    recipe = rules(silent={"nonsense": 1}, off={"enabled": False, "type": "regex"}, on=RULE)
    assert [matcher.name for matcher in recipe.matchers] == ["on"]
    assert recipe.disabled == ("silent", "off")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "Matcher 'silent' is off, because it does not say 'enabled: true'")
    ]


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        ({"enabled": True}, AssertionError, "matcher 'm'.* 'type'"),
        (
            {"enabled": True, "type": "regex"},
            NotImplementedError,
            "matcher 'm'.* 'regex'.* 'glob'",
        ),
        ({"enabled": True, "type": "glob", "config": "c"}, AssertionError, "matcher 'm'.* 'pattern'"),
        ({"enabled": True, "type": "glob", "pattern": "*"}, AssertionError, "matcher 'm'.* 'config'"),
        (RULE | {"patern": "*"}, ValueError, "matcher 'm'.* 'patern'.* enabled, type, pattern"),
        (RULE | {"enabled": "false"}, TypeError, "'enabled'.* matcher 'm'.* 'false'"),
        (RULE | {"config": 8}, TypeError, "'config'.* matcher 'm'.* 8"),
        (RULE | {"pattern": None}, TypeError, "'pattern'.* matcher 'm'.* None"),
        ("*", TypeError, r"matcher 'm'.* '\*'"),
    ],
)
def test_malformed_rules(rule: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        rules(m=rule)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ({"matcher": {}}, ValueError, "section 'matcher'.* configs, matchers"),
        ({"configs": None}, TypeError, "section 'configs'.* None"),
        ({"matchers": [RULE]}, TypeError, "section 'matchers'.* mapping"),
        (["configs"], TypeError, "mapping.*'configs'"),
    ],
)
def test_malformed_sections(content: Any, error: type[Exception], message: str):
    with without_type_checker(), pytest.raises(error, match=message):
        RecipeConfig.from_config_dict(content)


def test_sections_are_optional(tmp_path: Path):
    for recipe in (RecipeConfig.from_config_dict({}), RecipeConfig.from_yaml_file(write(tmp_path, "# nothing yet\n"))):
        assert recipe.matchers == ()
        assert recipe.match(MatchContext("x")) is None


def test_a_missing_config_is_an_error_only_where_it_is_used():
    recipe = rules(proj=RULE | {"pattern": "*proj", "config": "nowhere"}, rest=RULE)
    assert recipe.match_to_config_key(MatchContext("x.proj")) == "nowhere"
    assert recipe.match(MatchContext("x.qkv")) is not None
    with pytest.raises(KeyError, match=r"'x\.proj'.* 'nowhere'.*'configs'.* c"):
        recipe.match(MatchContext("x.proj"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("configs: {a: {}}\nmatchers: {}\nconfigs: {}", "'configs' occurs twice.*line 3"),
        ("configs:\n  a: {x: 1, y: 2, x: 3}", "'x' occurs twice"),
        ("configs: {a", "quant.yaml"),
        ("configs: !!python/object/apply:os.getcwd []", "quant.yaml.*os.getcwd"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load_quantization_recipe(write(tmp_path, text))
    with pytest.raises(FileNotFoundError):
        load_quantization_recipe(tmp_path / "none.yaml")


def test_anchors_and_merged_keys_work(tmp_path: Path):
    text = """
configs:
  one: &one {a: 1, b: 2}
  two: &two {<<: *one, b: 3}
  three: {<<: *two, b: 4, c: 5}
"""
    configs = load_quantization_recipe(write(tmp_path, text)).configs
    assert configs == {"one": {"a": 1, "b": 2}, "two": {"a": 1, "b": 3}, "three": {"a": 1, "b": 4, "c": 5}}


@pytest.mark.parametrize(
    ("path", "number"),
    [("layers.12.mlp", 12), ("decoder.layers.0.x.layers.7", 0), ("final_norm", None), ("layers.x", None)],
)
def test_layer_numbers(path: str, number: int | None):
    assert match_context(path) == MatchContext(path, number)


def test_get_quant_config_or_none():
    recipe = rules(all=RULE)
    found = get_quant_config_or_none("layers.4.proj", recipe)
    assert found is not None
    assert found.match_input == MatchContext("layers.4.proj", 4)
    assert get_quant_config_or_none(None, recipe) is None
    assert get_quant_config_or_none("layers.4.proj", None) is None
    assert get_quant_config_or_none("x", rules()) is None
