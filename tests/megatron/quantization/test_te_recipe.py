"""Recipes and parameters of quantization files: parsing, its errors in order, and what they stand for."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

import pytest

from jax_te._validation import log_once
from jax_te.megatron import (
    Fp4Recipe,
    Fp8Recipe,
    MatchContext,
    QuantizationConfig,
    TEQuantizationParams,
    TEQuantizationRecipe,
    TransformerEngineConfigType,
    resolve_factory,
)
from jax_te.recipe import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    ModuleRecipe,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.support.numerics import without_type_checker

KIND = "transformer_engine_config_type"
FACTORY = "operator.itemgetter"  # any function will do: nothing is quantized here
MODULES = ("operator",)
FIELDS = {
    "fp8_quantization_recipe": None,
    "fp4_quantization_recipe": None,
    "custom_recipe_factory": None,
    "fp8_format": "e4m3",
    "override_quantized_autocast": True,
    "override_nonquantized_autocast": False,
    "tp_only_amax_red": False,
    "fp8_param": False,
    "fp4_param": False,
}


def parse(recipe: Any) -> TEQuantizationRecipe:
    return TEQuantizationRecipe.parse_from_config(recipe, MODULES)


def parse_params(payload: Any) -> TEQuantizationParams:
    return TEQuantizationParams.parse_from_config(
        QuantizationConfig(payload, MatchContext("layers.0.proj", 0), "mine", MODULES)
    )


def params(training: Any, **more: Any) -> TEQuantizationParams:
    return parse_params({KIND: "TEQuantizationParams", "training_recipe": training, **more})


def test_fields_and_defaults_are_megatrons():
    assert TEQuantizationRecipe.get_config_keys() == FIELDS.keys()
    assert vars(TEQuantizationRecipe()) == FIELDS
    assert parse({}) == TEQuantizationRecipe()
    values = {name: not value if isinstance(value, bool) else value for name, value in FIELDS.items()}
    values |= {"fp8_quantization_recipe": "custom", "custom_recipe_factory": FACTORY, "fp8_format": "hybrid"}
    assert vars(parse(values)) == values


def test_names_equal_their_strings():
    assert [str(member) for member in Fp8Recipe] == ["delayed", "tensorwise", "mxfp8", "blockwise", "custom"]
    assert [str(member) for member in Fp4Recipe] == ["nvfp4", "custom"]
    assert parse({"fp8_quantization_recipe": "mxfp8"}) == TEQuantizationRecipe(Fp8Recipe.mxfp8)
    assert TransformerEngineConfigType.TEQuantizationParams.value == "TEQuantizationParams"


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        # Each also has the faults of those below it, so the order is tested, too.
        (
            {"fp8_recipe": 1, "fp8_quantization_recipe": "delayed", "fp4_quantization_recipe": "custom"},
            "'fp8_recipe'.* custom_recipe_factory, fp4_param",
        ),
        (
            {"fp8_quantization_recipe": "delayed", "fp4_quantization_recipe": "custom"},
            "fp8_quantization_recipe 'delayed'",
        ),
        ({"fp8_quantization_recipe": "mxfp8", "fp4_quantization_recipe": "custom"}, "'mxfp8'.* 'custom'"),
        ({"fp4_quantization_recipe": "custom", "fp8_param": "x"}, "'custom'.* custom_recipe_factory"),
        ({"fp8_quantization_recipe": "custom"}, "'custom'.* custom_recipe_factory"),
    ],
)
def test_parsing_refuses_in_megatrons_order(recipe: dict[str, Any], message: str):
    with without_type_checker(), pytest.raises(ValueError, match=message):
        parse(recipe)


@pytest.mark.parametrize("value", [None, "tensorwise", ["fp8_format"]])
def test_a_recipe_must_be_a_mapping(value: Any):
    with without_type_checker(), pytest.raises(TypeError, match=f"mapping.* {re.escape(repr(value))}"):
        parse(value)


@pytest.mark.parametrize("name", [name for name, value in FIELDS.items() if isinstance(value, bool)])
def test_flags_must_be_bools(name: str):
    with without_type_checker(), pytest.raises(TypeError, match=f"{name}.* 'no'"):
        parse({name: "no"})


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({}, None),
        ({"fp8_quantization_recipe": "tensorwise"}, Float8CurrentScaling(fp8_format=Format.E4M3)),
        (
            {"fp8_quantization_recipe": "tensorwise", "fp8_format": "hybrid"},
            Float8CurrentScaling(fp8_format=Format.HYBRID),
        ),
        ({"fp8_quantization_recipe": "blockwise"}, Float8BlockScaling(fp8_format=Format.E4M3)),
        (
            {"fp8_quantization_recipe": "blockwise", "fp8_format": "hybrid"},
            Float8BlockScaling(fp8_format=Format.HYBRID),
        ),
        ({"fp8_quantization_recipe": "mxfp8"}, MXFP8BlockScaling(fp8_format=Format.E4M3)),
        ({"fp8_quantization_recipe": "mxfp8", "fp8_format": "hybrid"}, MXFP8BlockScaling(fp8_format=Format.HYBRID)),
        ({"fp4_quantization_recipe": "nvfp4"}, NVFP4BlockScaling()),
        (
            {"fp8_quantization_recipe": "custom", "custom_recipe_factory": FACTORY},
            CustomRecipe(qfactory=resolve_factory(FACTORY)),
        ),
        (
            {"fp4_quantization_recipe": "custom", "custom_recipe_factory": FACTORY},
            CustomRecipe(qfactory=resolve_factory(FACTORY)),
        ),
    ],
)
def test_recipes_they_stand_for(recipe: dict[str, Any], expected: Any):
    assert parse(recipe).to_recipe() == expected
    assert hash(parse(recipe)) == hash(parse(dict(recipe)))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (TEQuantizationRecipe("delayed"), "FP8 recipe 'delayed'"),
        (
            TEQuantizationRecipe("tensor"),
            "FP8 recipe 'tensor'.* tensorwise, blockwise, mxfp8, custom",
        ),
        (TEQuantizationRecipe(None, "mxfp4"), "FP4 recipe 'mxfp4'.* nvfp4, custom"),
        (TEQuantizationRecipe("mxfp8", fp8_format="e5m2"), "fp8_format 'e5m2'.* e4m3, hybrid"),
    ],
)
def test_unknown_names_are_refused_when_used(recipe: TEQuantizationRecipe, message: str):
    with pytest.raises(ValueError, match=message):
        recipe.to_recipe()


@pytest.mark.parametrize(
    ("field", "recipe"),
    [
        (f"custom_recipe_factory='{FACTORY}'", TEQuantizationRecipe("mxfp8", None, FACTORY)),
        ("fp8_param=True", TEQuantizationRecipe(None, "nvfp4", fp8_param=True)),
        ("fp4_param=True", TEQuantizationRecipe("mxfp8", fp4_param=True)),
    ],
)
def test_fields_without_effect_are_refused(field: str, recipe: TEQuantizationRecipe):
    with pytest.raises(ValueError, match=field):
        recipe.to_recipe()


@pytest.mark.parametrize(
    ("field", "recipe"),
    [
        ("tp_only_amax_red", TEQuantizationRecipe("tensorwise", tp_only_amax_red=True)),
        ("fp8_format", TEQuantizationRecipe(None, "nvfp4", fp8_format="hybrid")),
        ("fp8_format", TEQuantizationRecipe("custom", None, FACTORY, fp8_format="hybrid")),
    ],
)
def test_fields_that_files_name_for_every_recipe_are_logged_once(field: str, recipe: TEQuantizationRecipe, caplog):
    log_once.cache_clear()
    plain = dataclasses.replace(recipe, tp_only_amax_red=False, fp8_format="e4m3")
    with caplog.at_level(logging.INFO, logger="jax_te"):
        assert recipe.to_recipe() == recipe.to_recipe() == plain.to_recipe()
    assert [record.getMessage().startswith(field) for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "None"),
        ("", "''"),
        ("sqrt", "'sqrt'"),
        (".sqrt", r"'\.sqrt'"),
        ("math.", r"'math\.'"),
        ("no_such_package.factory", "'no_such_package'"),
        ("math.no_such_function", "'math'.* 'no_such_function'"),
        ("math.pi", "3.14"),
    ],
)
def test_factories_that_cannot_be_resolved(path: str | None, message: str):
    with pytest.raises(ValueError, match=f"custom_recipe_factory.*{message}"):
        resolve_factory(path)
    with pytest.raises(ValueError, match=f"custom_recipe_factory.*{message}"):
        TEQuantizationRecipe("custom", custom_recipe_factory=path).to_recipe()


def test_a_factory_may_not_be_text():
    with without_type_checker(), pytest.raises(TypeError, match="path must be text"):
        resolve_factory(len)  # type: ignore[arg-type]


def test_params():
    fp8 = {"fp8_quantization_recipe": "tensorwise"}
    both, one = params(fp8, evaluation_recipe={}), params(fp8)
    assert both == TEQuantizationParams(TEQuantizationRecipe("tensorwise"), TEQuantizationRecipe())
    assert one == TEQuantizationParams(TEQuantizationRecipe("tensorwise"), None)
    assert both.recipe_for(training=True) == one.recipe_for(True) == one.recipe_for(False) == parse(fp8)
    assert both.recipe_for(training=False) == parse({})


@pytest.mark.parametrize(
    ("payload", "error", "message"),
    [
        # Again each has the faults of those below it.
        ({"extra": 1}, ValueError, f"config 'mine'.* {KIND}.* TEQuantizationParams"),
        ({KIND: "Kitchen", "extra": 1}, ValueError, f"{KIND} 'Kitchen'.* TEQuantizationParams"),
        ({KIND: ["x"], "extra": 1}, ValueError, r"\['x'\].* TEQuantizationParams"),
        ({KIND: "TEQuantizationParams", "extra": 1}, ValueError, "training_recipe"),
        ({KIND: "TEQuantizationParams", "evaluation_recipe": {}}, ValueError, "training_recipe"),
        (
            {KIND: "TEQuantizationParams", "training_recipe": None, "extra": 1},
            AssertionError,
            "'extra'.* evaluation_recipe, training_recipe",
        ),
        (
            {KIND: "TEQuantizationParams", "training_recipe": {}, "evaluation_recipe": {}, "eval": 1},
            AssertionError,
            "'eval'",
        ),
        (
            {KIND: "TEQuantizationParams", "training_recipe": {}, "evaluation_recipe": None},
            TypeError,
            r"evaluation_recipe of config 'mine'.* leave.* \{\}",
        ),
        (
            {KIND: "TEQuantizationParams", "training_recipe": None},
            TypeError,
            r"training_recipe of config 'mine'.* \{\}",
        ),
        (
            {KIND: "TEQuantizationParams", "training_recipe": {"fp8": 1}},
            ValueError,
            "training_recipe of config 'mine'.* 'fp8'",
        ),
        ([], TypeError, "config 'mine'.* mapping"),
    ],
)
def test_payloads_that_are_refused(payload: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        parse_params(payload)


def test_module_recipes():
    fp8 = {"fp8_quantization_recipe": "mxfp8", "override_nonquantized_autocast": True, "fp8_param": True}
    common = {"training": MXFP8BlockScaling(), "fp8_param": True, "override_nonquantized_autocast": True}
    assert params(fp8).to_module_recipe() == ModuleRecipe(**common)
    same_flags = params(fp8, evaluation_recipe={"override_nonquantized_autocast": True}).to_module_recipe()
    assert same_flags == ModuleRecipe(**common, evaluation=None)
    other_flags = params(fp8, evaluation_recipe={"override_quantized_autocast": False}).to_module_recipe()
    assert other_flags == ModuleRecipe(
        **common, evaluation=None, override_quantized_in_evaluation=False, override_nonquantized_in_evaluation=False
    )
    assert [other_flags.resolve(None, training=mode) for mode in (True, False)] == [MXFP8BlockScaling(), None]
    assert len({same_flags, other_flags, params(fp8).to_module_recipe()}) == 3
    assert params({"fp4_quantization_recipe": "nvfp4", "fp4_param": True}).to_module_recipe().fp4_param


def test_quantized_kernels_in_evaluation_alone_are_refused():
    with pytest.raises(ValueError, match=r"fp8_param.* training_recipe"):
        params({}, evaluation_recipe={"fp8_quantization_recipe": "mxfp8", "fp8_param": True}).to_module_recipe()
