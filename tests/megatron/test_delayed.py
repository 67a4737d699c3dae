"""Megatron's configuration fields as a delayed-scaling recipe."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

import pytest

from jax_te.config import PrecisionConfig
from jax_te.megatron import TEDelayedScaling, recipe_from_config
from jax_te.recipe import DelayedScaling, Format
from tests.support.numerics import without_type_checker


def test_defaults_are_megatrons():
    expected = DelayedScaling(margin=0, amax_history_len=1, amax_compute_algo="most_recent", fp8_format=Format.E4M3)
    assert TEDelayedScaling(None, Format.E4M3) == expected


def test_it_is_a_class():
    class Own(TEDelayedScaling):
        pass

    recipe = Own(Namespace(fp8_margin=1), Format.E4M3)
    plain = DelayedScaling(margin=1, amax_history_len=1, amax_compute_algo="most_recent", fp8_format=Format.E4M3)
    assert isinstance(recipe, TEDelayedScaling)
    assert isinstance(recipe, DelayedScaling)
    assert not isinstance(plain, TEDelayedScaling)
    # The same jit cache key as the recipe of these fields, whichever of the two comes first.
    assert recipe == plain
    assert plain == recipe
    assert hash(recipe) == hash(plain)
    assert dataclasses.replace(recipe, margin=2) == dataclasses.replace(plain, margin=2) != recipe


def test_fields_are_mapped():
    config = Namespace(
        fp8_margin=2, fp8_amax_history_len=16, fp8_amax_compute_algo="max", tp_only_amax_red=True, fp8_interval=1
    )
    assert TEDelayedScaling(config, Format.HYBRID, (False, False, True)) == DelayedScaling(
        margin=2,
        amax_history_len=16,
        amax_compute_algo="max",
        fp8_format=Format.HYBRID,
        tp_only_amax_red=True,
        override_linear_precision=(False, False, True),
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fp8_margin": -1}, "margin.* -1"),
        ({"fp8_amax_compute_algo": "mean"}, "amax_compute_algo.*'max'.*'most_recent'.* 'mean'"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str):
    with without_type_checker(), pytest.raises(ValueError, match=message):
        TEDelayedScaling(Namespace(**fields), Format.HYBRID)


def test_an_interval_is_ignored_as_in_transformer_engine():
    config = Namespace(fp8_margin=0, fp8_interval=2)
    assert TEDelayedScaling(config, Format.HYBRID) == TEDelayedScaling(None, Format.HYBRID)


def test_attention_flags():
    off = Namespace(fp8_margin=0, fp8_dot_product_attention=False, fp8_multi_head_attention=False)
    assert TEDelayedScaling(off, Format.HYBRID) == TEDelayedScaling(None, Format.HYBRID)
    for name, field in (("fp8_dot_product_attention", "fp8_dpa"), ("fp8_multi_head_attention", "fp8_mha")):
        recipe = TEDelayedScaling(Namespace(fp8_margin=0, **{name: True}), Format.HYBRID)
        assert recipe == TEDelayedScaling(None, Format.HYBRID, **{field: True})
        assert recipe.quantizes_attention


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_attention_flags_of_a_configuration(recipe: str):
    config = PrecisionConfig(fp8="hybrid", fp8_recipe=recipe, fp8_dot_product_attention=True)
    made = recipe_from_config(config)
    assert made is not None
    assert made.fp8_dpa


def test_the_format_is_a_format():
    with without_type_checker(), pytest.raises(TypeError, match="fp8_format"):
        TEDelayedScaling(None, "hybrid")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fp8_margin": 3, "fp8_amax_history_len": 1024}, r"config must be .*got .*fp8_margin"),
        (object(), "config must be "),
        (Namespace(hidden_size=8), "config must have fields of delayed scaling, fp8_margin, .*none of them"),
    ],
)
def test_a_configuration_without_the_fields_is_refused(config: Any, message: str):
    """It would give a recipe of the defaults."""
    with without_type_checker(), pytest.raises(TypeError, match=message):
        TEDelayedScaling(config, Format.HYBRID)
