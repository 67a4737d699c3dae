"""Megatron's configuration fields as a delayed-scaling recipe."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from jax_te.megatron import TEDelayedScaling
from jax_te.recipe import DelayedScaling, Format
from tests.support.numerics import without_type_checker


def test_defaults_are_megatrons():
    expected = DelayedScaling(margin=0, amax_history_len=1, amax_compute_algo="most_recent", fp8_format=Format.E4M3)
    assert TEDelayedScaling(SimpleNamespace(), Format.E4M3) == expected


def test_it_is_a_class():
    class Own(TEDelayedScaling):
        pass

    recipe = Own(SimpleNamespace(fp8_margin=1), Format.E4M3)
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
    config = SimpleNamespace(
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
        ({"fp8_dot_product_attention": True}, "fp8_dot_product_attention=True"),
        ({"fp8_multi_head_attention": True}, "fp8_multi_head_attention=True"),
        ({"fp8_margin": -1}, "margin.* -1"),
        ({"fp8_amax_compute_algo": "mean"}, "amax_compute_algo.*'max'.*'most_recent'.* 'mean'"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str):
    with without_type_checker(), pytest.raises(ValueError, match=message):
        TEDelayedScaling(SimpleNamespace(**fields), Format.HYBRID)


def test_an_interval_is_ignored_as_in_transformer_engine():
    config = SimpleNamespace(fp8_interval=2)
    assert TEDelayedScaling(config, Format.HYBRID) == TEDelayedScaling(SimpleNamespace(), Format.HYBRID)


def test_attention_flags_that_are_off_are_fine():
    off = SimpleNamespace(fp8_dot_product_attention=False, fp8_multi_head_attention=False)
    assert TEDelayedScaling(off, Format.HYBRID) == TEDelayedScaling(SimpleNamespace(), Format.HYBRID)


def test_the_format_is_a_format():
    with without_type_checker(), pytest.raises(TypeError, match="fp8_format"):
        TEDelayedScaling(SimpleNamespace(), "hybrid")  # type: ignore[arg-type]
