"""Masks of a `TransformerLayer` under each mask type, as Transformer Engine reads them."""

from __future__ import annotations

import logging
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te import te_pytorch
from jax_te._validation import log_once
from jax_te.layers import TransformerLayer
from tests.support.numerics import NO_DROPOUT, assert_bitwise, draw

B, S, H = 2, 8, 16
LEFT = jnp.arange(S)[None, None, None] < jnp.array([3, 0])[:, None, None, None]  # [b, 1, 1, s]; left, and none
X = draw("x", (B, S, H))
Q, K = jnp.arange(S)[None, None, :, None], jnp.arange(S)[None, None, None]  # queries, keys


def layer(mask_type: str, kind: type[TransformerLayer] = TransformerLayer, **options: Any) -> TransformerLayer:
    return kind(H, 32, 2, self_attn_mask_type=mask_type, rngs=nnx.Rngs(0), **(NO_DROPOUT | options))


@pytest.mark.costly("padding-None-hidden0", slow=("padding_causal-None-hidden1",))
@pytest.mark.parametrize(
    ("mask_type", "window", "hidden"),
    [
        ("padding", None, Q < 0),
        ("padding_causal", None, K > Q),
        ("padding_causal", (2, 0), (K > Q) | (K < Q - 2)),
    ],
)
def test_a_mask_hides_what_its_type_says(mask_type: str, window: Any, hidden: Any):
    """Also padding on the left, which lengths cannot describe."""
    whole = LEFT | LEFT.swapaxes(2, 3) | hidden
    expected = layer("arbitrary")(X, whole)
    np.testing.assert_allclose(layer(mask_type, window_size=window)(X, LEFT), expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(layer("arbitrary")(X, jnp.broadcast_to(hidden, whole.shape)), expected, atol=1e-3)
    # A mask type of the call is read as the layer's own.
    other = layer("causal", window_size=window)(X, LEFT, self_attn_mask_type=mask_type)
    np.testing.assert_allclose(other, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
def test_a_mask_without_effect_is_refused(mask_type: str):
    for mask in (jnp.zeros((1, 1, 1, S), bool), jnp.ones((7, 3))):
        with pytest.raises(ValueError, match=f"mask type '{mask_type}' takes no mask"):
            layer(mask_type)(X, mask)
    decoder = layer("causal", layer_type="decoder", enc_dec_attn_mask_type="no_mask")
    with pytest.raises(ValueError, match="mask type 'no_mask' takes no mask"):
        decoder(X, None, X, LEFT)


@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
def test_under_transformer_engines_name_it_is_logged_once(mask_type: str, caplog: pytest.LogCaptureFixture):
    """As there: programs written for it pass a mask with every call."""
    log_once.cache_clear()
    one = layer(mask_type, te_pytorch.TransformerLayer, attn_input_format="bshd")
    with caplog.at_level(logging.INFO, logger="jax_te"):
        for _ in range(2):
            assert_bitwise(one(X, jnp.ones((1, 1, S, S), bool)), one(X))
    assert [f"under mask type '{mask_type}'" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.costly("False")
@pytest.mark.parametrize("pair", [False, True])
def test_cross_attention_reads_the_encoders_padding(pair: bool):
    memory = draw("memory", (B, S, H))
    decoder = layer("causal", layer_type="decoder", enc_dec_attn_mask_type="padding")
    queries = jnp.zeros_like(LEFT)
    y = decoder(X, None, memory, (queries, LEFT) if pair else LEFT)
    same = layer("causal", layer_type="decoder", enc_dec_attn_mask_type="arbitrary")
    np.testing.assert_allclose(y, same(X, None, memory, LEFT), rtol=1e-5, atol=1e-6)
    # What is padding has no part in the result.
    changed = memory.at[0, :3].set(7.0)
    assert_bitwise(decoder(X, None, changed, LEFT), y)


def test_masks_that_cannot_be_read():
    with pytest.raises(ValueError, match="padding_causal_bottom_right"):
        layer("padding_causal_bottom_right")(X, LEFT)
