import pickle

import jax.numpy as jnp
import pytest

from jax_te.recipe import RECIPES, DelayedScaling, Float8CurrentScaling, Format, Recipe, fp8_max, recipe_from_name
from tests.support.numerics import without_type_checker


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"margin": -1}, "margin must be an integer >= 0, got -1"),
        ({"margin": 0.5}, "margin must be an integer, got 0.5"),
        ({"margin": True}, "margin must be an integer, got True"),
        ({"margin": 18}, "margin 18 leaves E4M3 no value but 0; it must be <= 17"),
        ({"amax_history_len": 0}, "amax_history_len must be an integer >= 1, got 0"),
        ({"amax_history_len": 16.0}, "amax_history_len must be an integer, got 16.0"),
        ({"amax_history_len": True}, "amax_history_len must be an integer, got True"),
        ({"amax_compute_algo": "mean"}, "amax_compute_algo must be one of 'max', 'most_recent', got 'mean'"),
        ({"fp8_format": Format.E5M2}, "Use Format.HYBRID .* or Format.E4M3"),
    ],
)
def test_a_value_outside_names_the_field_the_value_and_what_is_allowed(fields, message):
    with without_type_checker(), pytest.raises(ValueError, match=message):
        DelayedScaling(**fields)


def test_wrong_types():
    with (
        without_type_checker(),
        pytest.raises(
            TypeError, match=r"fp8_format must be a jax_te.recipe.Format, got 'HYBRID'.*Format.E4M3, Format.HYBRID"
        ),
    ):
        Float8CurrentScaling(fp8_format="HYBRID")
    with (
        without_type_checker(),
        pytest.raises(ValueError, match="amax_compute_algo must be one of 'max', 'most_recent', got <"),
    ):
        DelayedScaling(amax_compute_algo=max)
    with pytest.raises(TypeError):
        DelayedScaling(16)  # fields are keyword-only
    with pytest.raises(TypeError, match="fp8_interval"):
        DelayedScaling(fp8_interval=1)  # nothing is accepted and ignored
    for name in ("fp8_dpa_fwd", "fp8_dpa_bwd"):
        with pytest.raises(ValueError, match=rf"{name}=False keeps one pass .* set fp8_dpa"):
            DelayedScaling(**{name: False})
    with pytest.raises(ValueError, match="leaves no pass of attention in FP8"):
        DelayedScaling(fp8_dpa=True, fp8_dpa_fwd=False, fp8_dpa_bwd=False)


def test_recipes_are_frozen_hashable_data():
    one, two, other = DelayedScaling(margin=1), DelayedScaling(margin=1), DelayedScaling(margin=2)
    assert one == two
    assert hash(one) == hash(two)
    assert one != other
    assert {one: "a", other: "b"}[two] == "a"
    assert Float8CurrentScaling() != DelayedScaling()
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(AttributeError):
        one.margin = 3


def test_defaults_are_transformer_engines():
    recipe = DelayedScaling()
    assert (recipe.margin, recipe.amax_history_len, recipe.amax_compute_algo) == (0, 1024, "max")
    assert recipe.fp8_format is Format.HYBRID
    assert Float8CurrentScaling().fp8_format is Format.HYBRID


def test_state_and_names():
    assert (DelayedScaling().has_state, DelayedScaling().name) == (True, "delayed")
    assert (Float8CurrentScaling().has_state, Float8CurrentScaling().name) == (False, "current")
    assert not Recipe().has_state
    with pytest.raises(TypeError, match="Recipe has no name"):
        _ = Recipe().name


@pytest.mark.parametrize("name", list(RECIPES))
def test_recipe_from_name(name):
    recipe = recipe_from_name(name)
    assert recipe is None if name == "none" else recipe.name == name


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown recipe 'fp4'; allowed: none, delayed, current"):
        recipe_from_name("fp4")


def test_formats():
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    assert (Format.HYBRID.fwd_dtype, Format.HYBRID.bwd_dtype) == (e4m3, e5m2)
    assert (Format.E4M3.fwd_dtype, Format.E4M3.bwd_dtype) == (e4m3, e4m3)
    assert (Format.E5M2.fwd_dtype, Format.E5M2.bwd_dtype) == (e5m2, e5m2)
    for dtype, largest in ((e4m3, 448.0), (e5m2, 57344.0)):
        assert fp8_max(dtype) == largest == float(jnp.finfo(dtype).max)
    with pytest.raises(TypeError, match="got float16"):
        fp8_max(jnp.float16)
