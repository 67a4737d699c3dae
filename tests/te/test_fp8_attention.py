"""FP8 attention under the ``te`` backend, which has none of its own."""

import pytest

from jax_te.ops import attention_spec, dot_product_attention, explain_backend
from jax_te.quantize import init_attention_state
from jax_te.recipe import Float8CurrentScaling
from tests.support.numerics import assert_bitwise, draw

pytestmark = pytest.mark.te


def test_it_is_left_to_xla():
    recipe = Float8CurrentScaling(fp8_dpa=True)
    qkv, state = tuple(draw(name, (1, 128, 2, 128)) for name in "qkv"), init_attention_state(recipe)
    choice = explain_backend(
        "dot_product_attention", recipe=recipe, attention=attention_spec(qkv, "causal"), backend="te"
    )
    assert (choice.backend, choice.parts["attention"], choice.unquantized) == ("te", "xla", None)
    ours, theirs = (dot_product_attention(qkv, recipe=recipe, state=state, backend=name) for name in ("te", "xla"))
    assert_bitwise(ours, theirs)
