"""An overflow of fp16 reaches the output or the gradients under every recipe, where loss scaling looks for it."""

from __future__ import annotations

import pytest

from tests.support.overflow import OVERFLOW_CASES, check_overflow_is_seen


@pytest.mark.wide
@pytest.mark.parametrize(("layer", "overflow", "recipe"), OVERFLOW_CASES)
def test_it_is_seen(layer, overflow, recipe):
    check_overflow_is_seen(layer, overflow, recipe)
