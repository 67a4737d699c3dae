"""`ModuleRecipe.resolve` in every row of Megatron-Core's table of override flags."""

import itertools

import pytest

from jax_te.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, ModuleRecipe, NVFP4BlockScaling
from tests.support.numerics import without_type_checker

AMBIENT, FP8, FP4 = DelayedScaling(), Float8CurrentScaling(), NVFP4BlockScaling()
ANY = (False, True)
# ambient quantized, own recipe quantizes, override_quantized, override_nonquantized -> whose recipe runs
TABLE = [
    (True, True, (True,), ANY, "own"),
    (True, True, (False,), ANY, "ambient"),
    (True, False, (True,), ANY, "none"),
    (True, False, (False,), ANY, "ambient"),
    (False, True, ANY, (True,), "own"),
    (False, True, ANY, (False,), "none"),
    (False, False, ANY, (True,), "none"),
    (False, False, ANY, (False,), "none"),
]
ROWS = [
    (quantized, owns, in_quantized, in_plain, runs)
    for quantized, owns, first, second, runs in TABLE
    for in_quantized, in_plain in itertools.product(first, second)
]


@pytest.mark.parametrize("evaluation", ["training", None, FP4])
@pytest.mark.parametrize("own", [FP8, FP4], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize(("quantized", "owns", "in_quantized", "in_plain", "runs"), ROWS)
def test_every_row_in_training_and_evaluation(quantized, owns, in_quantized, in_plain, runs, own, evaluation):
    flags = {"override_quantized_autocast": in_quantized, "override_nonquantized_autocast": in_plain}
    ambient = AMBIENT if quantized else None
    module = ModuleRecipe(training=own if owns else None, evaluation=evaluation, **flags)
    expected = {"own": own, "ambient": AMBIENT, "none": None}[runs]
    assert module.resolve(ambient, training=True) == expected
    if evaluation == "training":
        assert module.resolve(ambient, training=False) == expected
    else:  # the evaluation recipe stands in the row of its own kind
        acts = in_quantized if quantized else in_plain
        assert module.resolve(ambient, training=False) == (evaluation if acts else ambient)


def test_the_table_covers_every_case_once():
    cases = [row[:4] for row in ROWS]
    assert sorted(cases) == sorted(itertools.product(ANY, repeat=4))


def test_defaults_let_a_rule_for_all_modules_spare_those_that_are_not_quantized():
    module = ModuleRecipe(training=FP8)
    assert module.resolve(AMBIENT, training=True) == FP8
    assert module.resolve(None, training=True) is None
    assert (module.evaluation, module.fp8_param, module.fp4_param) == ("training", False, False)
    assert len({module, ModuleRecipe(training=FP8), ModuleRecipe(training=FP8, fp8_param=True)}) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"training": FP8, "fp8_param": True, "fp4_param": True}, "fp8_param=True and fp4_param=True"),
        ({"training": None, "fp8_param": True}, "fp8_param=True .* training is None"),
        ({"training": None, "evaluation": FP4, "fp4_param": True}, "fp4_param=True .* training is None"),
        ({"training": FP4, "fp8_param": True}, "a recipe of FP8 .* training is NVFP4BlockScaling"),
        ({"training": FP8, "fp4_param": True}, "a recipe of FP4 .* training is Float8CurrentScaling"),
    ],
)
def test_kernels_are_held_as_training_quantizes_them(fields, message):
    with pytest.raises(ValueError, match=message):
        ModuleRecipe(**fields)


def test_kernels_may_be_held_in_the_form_of_their_recipe():
    custom = CustomRecipe(qfactory=lambda role: None)
    for fields in ({"training": FP8, "fp8_param": True}, {"training": FP4, "fp4_param": True}):
        assert ModuleRecipe(**fields).holds_kernels
        assert ModuleRecipe(**fields | {"training": custom}).holds_kernels


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"training": "current"}, "training must be a Recipe or None, got 'current'"),
        ({"training": "training"}, "training must be a Recipe or None, got 'training'"),
        (
            {"training": None, "evaluation": "current"},
            "evaluation must be a Recipe or 'training' or None, got 'current'",
        ),
        (
            {"training": None, "evaluation": Float8CurrentScaling},
            "evaluation must be a Recipe or 'training' or None, got <class",
        ),
    ],
)
def test_refused_values(fields, message):
    with without_type_checker(), pytest.raises(TypeError, match=message):
        ModuleRecipe(**fields)
