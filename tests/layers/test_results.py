"""What calls return beside their output."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.layers import DotProductAttention, Linear, LoRA, MultiheadAttention, TransformerLayer, init_kv_cache
from jax_te.layers.results import layer_output
from tests.support.numerics import NO_DROPOUT

H, N, D = 32, 4, 8
X = jnp.ones((2, 8, H))


def test_without_extra_results_the_array_itself() -> None:
    assert layer_output(X) is X
    assert isinstance(MultiheadAttention(H, N, attention_dropout=0.0, rngs=nnx.Rngs(0))(X), jax.Array)


@pytest.mark.parametrize(
    ("options", "cached", "names"),
    [
        ({"return_bias": True}, False, ("y", "bias")),
        ({"return_bias": True, "bias": False}, False, ("y", "bias")),  # asked for: None
        ({"return_max_logit": True}, True, ("y", "max_logit", "cache")),
        (
            {"return_layernorm_output": True, "return_bias": True, "return_max_logit": True},
            True,
            ("y", "bias", "layernorm_output", "max_logit", "cache"),
        ),
    ],
)
def test_exactly_those_asked_for_in_order(options: dict[str, Any], cached: bool, names: tuple[str, ...]) -> None:
    cache = init_kv_cache(2, 8, N, D) if cached else None
    result = MultiheadAttention(H, N, attention_dropout=0.0, rngs=nnx.Rngs(0), **options)(X, cache=cache)
    assert result._fields == names


def test_core_and_layer() -> None:
    q = jnp.ones((2, 8, N, D))
    assert DotProductAttention(N, D, return_max_logit=True)(q, q, q).max_logit.shape == (N,)
    layer = TransformerLayer(H, 64, N, **NO_DROPOUT, rngs=nnx.Rngs(0))
    assert int(layer(X, cache=init_kv_cache(2, 8, N, D)).cache.length) == 8


def test_results_of_one_kind_have_one_type() -> None:
    """As carries of a scan must."""
    layer = TransformerLayer(H, 64, N, **NO_DROPOUT, rngs=nnx.Rngs(0))
    start = layer_output(X[:, :1], cache=init_kv_cache(2, 8, N, D))
    last, _ = jax.lax.scan(lambda carry, _: (layer(carry.y, cache=carry.cache), None), start, length=3)
    assert int(last.cache.length) == 3


def test_an_adapted_layer_returns_what_its_base_returns() -> None:
    base = Linear(H, 16, return_bias=True, rngs=nnx.Rngs(0))
    assert LoRA(base, 2, rngs=nnx.Rngs(1))(X)._fields == base(X)._fields == ("y", "bias")
