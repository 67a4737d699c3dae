"""A KV cache filled piece by piece gives what one pass over the whole gives."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.config import LatentAttentionOptions
from jax_te.layers import TransformerLayer, init_kv_cache, init_window_kv_cache, rotary_embedding
from tests.support.meshes import shard
from tests.support.numerics import NO_DROPOUT, assert_bitwise, assert_close, draw
from tests.support.reference import ROUNDOFF, randomize

S, H, N, G, D = 8, 32, 4, 2, 8


@pytest.mark.slow
@pytest.mark.wide("no mesh", "explicit")
def test_pieces_give_what_the_whole_gives(mesh_mode: str) -> None:
    layer = shard(
        randomize(TransformerLayer(H, 64, N, **NO_DROPOUT, num_gqa_groups=G, kv_channels=D, rngs=nnx.Rngs(0)))
    )
    x, positions = draw("x", (4, S, H)), jnp.arange(S)
    whole = jax.jit(lambda layer, x: layer(x, rotary_pos_emb=rotary_embedding(positions, D)))(layer, x)

    @jax.jit
    def step(layer, x, positions, cache):
        return layer(x, rotary_pos_emb=rotary_embedding(positions, D), cache=cache)

    cache = init_kv_cache(4, S + 3, G, D)
    for start, end in pairwise((0, 4, 6, 7, 8)):  # a prompt, two tokens at once, single tokens
        y, cache = step(layer, x[:, start:end], positions[start:end], cache)
        # Eight sums of up to 64 products follow one another, here in another order.
        assert_close(y, whole[:, start:end], 8 * ROUNDOFF["float32"] * 64**0.5, what=f"{start}:{end}")
    assert int(cache.length) == S


def test_the_newest_tokens_are_the_last_of_what_is_held() -> None:
    cache = init_kv_cache(1, 5, G, D)
    for s in (1, 2):
        cache = cache.append(jnp.ones((1, s, G, D)), jnp.ones((1, s, G, D)))
    mask_type, lengths = cache.masks(1, 2)
    assert mask_type == "padding_causal_bottom_right"
    assert {name: value.tolist() for name, value in lengths.items()} == {"q_lengths": [2], "kv_lengths": [3]}
    assert cache.k[0, :, 0, 0].tolist() == [1, 1, 1, 0, 0]


@pytest.mark.costly("(5, 1)", slow=["(4, 5)"])
@pytest.mark.parametrize("pieces", [(4, 5), (5, 1), (3, 1, 2)], ids=str)
def test_tokens_beyond_the_end_are_nan(pieces: tuple[int, ...]) -> None:
    """How many tokens a cache has is known at run time only; they would take the place of others, unseen."""
    layer = randomize(TransformerLayer(H, 64, N, **NO_DROPOUT, num_gqa_groups=G, kv_channels=D, rngs=nnx.Rngs(0)))
    step = jax.jit(lambda layer, x, cache: layer(x, cache=cache))
    cache = init_kv_cache(2, 5, G, D)
    for size in pieces[:-1]:
        y, cache = step(layer, draw("x", (2, size, H)), cache)
        assert jnp.isfinite(y).all()
    for size in (pieces[-1], 1):  # and it stays so
        y, cache = step(layer, draw("x", (2, size, H)), cache)
        assert jnp.isnan(y).all()


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="6 tokens do not fit a KV cache of max_len 5"):
        init_kv_cache(1, 5, G, D).append(jnp.ones((1, 6, G, D)), jnp.ones((1, 6, G, D)))
    with pytest.raises(ValueError, match="max_len must be an integer >= 1, got 0"):
        init_kv_cache(1, 0, G, D)


LATENT = LatentAttentionOptions(
    q_lora_rank=None, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=8, v_head_dim=8
)  # fmt: skip


@pytest.mark.costly("full", slow=("latent",))
@pytest.mark.parametrize("kind", ["full", "window", "latent"])
def test_a_cache_keeps_its_dtype_and_the_layer_its_own(kind: str) -> None:
    """A cache of another dtype stores keys and values in it; what is computed has the dtype of the input."""
    options = {"full": {}, "window": {"window_size": (7, 0)}, "latent": {"latent": LATENT}}[kind]
    layer = randomize(TransformerLayer(H, 64, N, **NO_DROPOUT, **options, rngs=nnx.Rngs(0)))
    heads = layer.self_attention.cached_heads

    def run(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
        made = init_window_kv_cache(1, 7, 3, heads[0], D, dtype) if kind == "window" else None
        y, cache = layer(x, cache=made or init_kv_cache(1, S, *heads, dtype))
        assert (y.dtype, cache.k.dtype, cache.v.dtype) == (x.dtype, dtype, dtype)
        return y

    x = draw("x", (1, 3, H)) / 4
    half = x.astype(jnp.bfloat16)
    assert_bitwise(run(half, jnp.float32), run(half, jnp.bfloat16))  # bf16 fits into fp32
    # Keys and values alone are rounded: each of two sums of up to H products by a rounding of its operands.
    assert_close(run(x, jnp.bfloat16), run(x, jnp.float32), 2 * ROUNDOFF["bfloat16"] * H**0.5)
