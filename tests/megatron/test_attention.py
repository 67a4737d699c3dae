"""TEDotProductAttention: what it takes from the configuration, its masks, what it returns, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te._validation import log_once
from jax_te.config import TransformerConfig
from jax_te.errors import BackendUnavailableError
from jax_te.layers import DotProductAttention, PackedSeqParams
from jax_te.megatron import AttnMaskType, TEDotProductAttention, TransformerLayer, is_layer_window_attention
from jax_te.ops import use_backend
from tests.support.meshes import use_mesh
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_close, draw, without_type_checker

B, S, N, G, D = 2, 8, 4, 2, 8


def config(**options):
    return TransformerConfig(
        num_layers=4, hidden_size=N * D, num_attention_heads=N, num_query_groups=G, **options
    )  # fmt: skip


def core(mask_type=AttnMaskType.causal, layer_number=1, *, attention_type="self", **options):
    return TEDotProductAttention(config(**options), layer_number, mask_type, attention_type)


def qkv(s=S):
    return draw("q", (B, S, N, D)), draw("k", (B, s, G, D)), draw("v", (B, s, G, D))


def plain(**options):
    return DotProductAttention(N, D, num_gqa_groups=G, **options)


def merged(context):
    return context.reshape(*context.shape[:-2], N * D)


@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.no_mask, AttnMaskType.causal_bottom_right])
def test_it_is_the_layers_core_with_heads_merged(mask_type):
    assert_bitwise(core(mask_type)(*qkv(), None), merged(plain(attn_mask_type=mask_type.name)(*qkv())))


def test_options_come_from_the_configuration():
    options = {"softmax_type": "learnable", "softmax_scale": 0.3, "attention_dropout": 0.4, "window_size": (2, 0)}
    ours = core(**options)
    ours.softmax_offset.set_value(draw("offset", (N,)))
    theirs = plain(**options)
    theirs.softmax_offset.set_value(draw("offset", (N,)))
    key = jax.random.key(0)
    assert_bitwise(ours(*qkv(), None, dropout_key=key), merged(theirs(*qkv(), dropout_key=key)))
    own = TEDotProductAttention(config(**options), 1, "causal", "self", attention_dropout=0.0, softmax_scale=0.5)
    assert (own.attention_dropout, own.softmax_scale) == (0.0, 0.5)


def test_channels_of_values_may_differ():
    layer = TEDotProductAttention(config(), 1, AttnMaskType.causal, "self", k_channels=4, v_channels=6)
    q, k, v = draw("q", (B, S, N, 4)), draw("k", (B, S, G, 4)), draw("v", (B, S, G, 6))
    assert layer(q, k, v, None).shape == (B, S, N * 6)
    alone = TEDotProductAttention(config(), 1, AttnMaskType.causal, "self", k_channels=4)
    assert (alone.kv_channels, alone.v_channels) == (D, D)


@pytest.mark.costly("False")
@pytest.mark.parametrize("at_end", [False, True])
def test_padding_at_the_end_is_what_lengths_say(at_end):
    lengths = jnp.array([5, 8])
    mask = (jnp.arange(S)[None] >= lengths[:, None])[:, None, None]
    for mask_type in ("padding", "padding_causal"):
        expected = plain(attn_mask_type=mask_type)(*qkv(), kv_lengths=lengths)
        layer = TEDotProductAttention(config(), 1, mask_type, "self", padding_at_end=at_end)
        assert_bitwise(layer(*qkv(), mask), merged(expected))
    short = jnp.array([2, 6])
    keys = (jnp.arange(6)[None] >= short[:, None])[:, None, None]
    cross = TEDotProductAttention(config(), 1, "padding", "cross", padding_at_end=at_end)
    for masks, q_lengths in (((mask, keys), lengths), (keys, jnp.array([S, S]))):
        expected = plain(attn_mask_type="padding")(*qkv(6), q_lengths=q_lengths, kv_lengths=short)
        assert_bitwise(cross(*qkv(6), masks), merged(expected))


def test_padding_in_front_breaks_the_promise_of_padding_at_the_end():
    layer = TEDotProductAttention(config(), 1, "padding", "self", padding_at_end=True)
    front = jnp.zeros((B, 1, 1, S), bool).at[0, ..., 0].set(True)
    with pytest.raises(ValueError, match="hides a token in front of others"):
        layer(*qkv(), front)
    with pytest.raises(ValueError, match="hides a token in front of others"):
        layer(*qkv(), (~front & False, front))


@pytest.mark.costly
def test_a_mask_that_nothing_reads_is_logged_once(caplog):
    causal, boundaries = jnp.zeros((B, 1, S, S), bool), PackedSeqParams(cu_seqlens_q=jnp.array([[0, 4, S]] * B))
    layer = TransformerLayer(config(), rngs=nnx.Rngs(0))
    layer.eval()
    padding = jnp.zeros((B, 1, 1, S), bool).at[..., 6:].set(True)
    log_once.cache_clear()
    x = draw("x", (B, S, config().hidden_size))
    assert_bitwise(layer(x, attention_mask=causal)[0], layer(x)[0])
    assert_bitwise(core(AttnMaskType.no_mask)(*qkv(), causal), core(AttnMaskType.no_mask)(*qkv(), None))
    packed = core(AttnMaskType.padding)(*qkv(), padding, packed_seq_params=boundaries)
    assert_bitwise(packed, core(AttnMaskType.padding)(*qkv(), None, packed_seq_params=boundaries))
    found = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [("packed" in message, "'no_mask'" in message) for message in found] == [
        (False, False),
        (False, True),
        (True, False),
    ]


@pytest.mark.parametrize("window", [None, (2, 0)])
@pytest.mark.parametrize("mask_type", ["padding", "padding_causal"])
def test_padding_anywhere_hides_what_the_mask_says(mask_type, window):
    """Left-padded in one example, with holes in the other; against the formula in fp64."""
    hidden = np.array([[1, 1, 1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 1, 0, 0, 1]], bool)[:, None, None]
    q, k, v = (np.float64(a) for a in qkv())
    scores = np.einsum("bsgnd,btgd->bgnst", q.reshape(B, S, G, N // G, D), k) / np.sqrt(D)
    away = np.arange(S)[None] - np.arange(S)[:, None]
    masked = hidden | hidden.swapaxes(2, 3)
    masked = masked | (away > 0 if mask_type == "padding_causal" else False)
    masked = masked | (away < -window[0] if window else False) | (away > 0 if window else False)
    masked = np.broadcast_to(masked[:, :, None], scores.shape)
    weights = np.where(masked, 0.0, np.exp(scores))
    total = weights.sum(-1, keepdims=True)
    expected = np.einsum("bgnst,btgd->bsgnd", weights / np.where(total == 0, 1, total), v).reshape(B, S, N * D)
    layer = core(mask_type, window_size=window)
    assert_close(layer(*qkv(), jnp.asarray(hidden)), expected, TOLERANCE["float32"])
    mask = jnp.asarray(hidden)
    with use_backend("te"), pytest.raises(BackendUnavailableError):
        layer(*qkv(), mask)


def test_the_diagonal_of_bottom_right_needs_lengths():
    lengths = jnp.array([5, 8])
    mask = (jnp.arange(S)[None] >= lengths[:, None])[:, None, None]
    layer = TEDotProductAttention(config(), 1, "padding_causal_bottom_right", "self", padding_at_end=True)
    expected = plain(attn_mask_type="padding_causal_bottom_right")(*qkv(), kv_lengths=lengths)
    assert_bitwise(layer(*qkv(), mask), merged(expected))
    with pytest.raises(ValueError, match="padding_at_end=True"):
        core("padding_causal_bottom_right")(*qkv(), mask)


def test_arbitrary_masks_and_a_mask_type_of_the_call():
    mask = jnp.asarray(np.random.default_rng(0).random((B, 1, S, S)) < 0.3)
    expected = plain(attn_mask_type="arbitrary")(*qkv(), attention_mask=mask)
    assert_bitwise(core()(*qkv(), mask, AttnMaskType.arbitrary), merged(expected))
    assert_bitwise(core()(*qkv(), mask), core()(*qkv(), None))  # a causal call looks at no mask


def test_a_bias_is_added_to_the_scaled_scores():
    bias = draw("bias", (1, N, S, S))
    expected = plain()(*qkv(), core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    assert_bitwise(core()(*qkv(), None, attention_bias=bias), merged(expected))
    own_names = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    assert_bitwise(core()(*qkv(), **own_names), merged(expected))
    with pytest.raises(ValueError, match="both were given"):
        core()(*qkv(), attention_bias=bias, core_attention_bias_type="alibi")


def test_lengths_and_a_window_of_the_call_replace_the_layers():
    lengths = jnp.array([5, 8])
    expected = plain(attn_mask_type="padding_causal", window_size=(2, 0))(*qkv(), kv_lengths=lengths)
    assert_bitwise(core("padding_causal")(*qkv(), kv_lengths=lengths, window_size=(2, 0)), merged(expected))


@pytest.mark.parametrize("window", [(-1, -1), (2, -1), (2, 0)])
def test_a_window_of_the_call_beside_a_padding_mask_leaves_it_causal(window):
    shown = jnp.zeros((B, 1, 1, S), bool)
    expected = plain(attn_mask_type="causal", window_size=window)(*qkv())
    assert_close(core("padding_causal")(*qkv(), shown, window_size=window), merged(expected), TOLERANCE["float32"])
    with pytest.raises(ValueError, match="positions ahead"):
        core("padding_causal")(*qkv(), shown, window_size=(3, 3))


@pytest.mark.costly
def test_packed_sequences_of_one_row_and_of_a_batch():
    packed = PackedSeqParams(cu_seqlens_q=jnp.array([0, 3, 8]))
    row = tuple(a[0] for a in qkv())
    for ours, theirs in ((AttnMaskType.causal, "padding_causal"), (AttnMaskType.no_mask, "padding")):
        expected = plain(attn_mask_type=theirs)(*row, packed_seq_params=packed)
        assert expected.shape == (S, N, D)
        assert_bitwise(core(ours)(*row, None, packed_seq_params=packed), merged(expected))
    both = PackedSeqParams(cu_seqlens_q=jnp.array([[0, 3, 8], [0, 2, 4]]))
    expected = plain(attn_mask_type="padding_causal")(*qkv(), packed_seq_params=both)
    assert_bitwise(core()(*qkv(), None, packed_seq_params=both), merged(expected))


@pytest.mark.parametrize(("skip", "windowed"), [(None, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), ([0, 1, 1, 0], [0, 1, 1, 0])])
def test_which_layers_attend_in_a_window(skip, windowed):
    for number, expected in enumerate(windowed, 1):
        layer = core(layer_number=number, window_size=(2, 0), window_attn_skip_freq=skip)
        assert layer.layer_window == ((2, 0) if expected else None)
        assert_bitwise(layer(*qkv(), None), merged(plain(window_size=(2, 0) if expected else None)(*qkv())))
    assert not is_layer_window_attention(None, 2, 1)
    with (
        without_type_checker(),
        pytest.raises(ValueError, match="window_attn_skip_freq must be an integer or a sequence"),
    ):
        is_layer_window_attention((2, 0), "all", 1)


def test_one_token_of_a_windowed_decoder_sees_the_last_keys():
    q, k, v = qkv()
    layer = core(AttnMaskType.no_mask, window_size=(2, 0))
    expected = plain(attn_mask_type="no_mask")(q[:, :1], k[:, -3:], v[:, -3:])
    np.testing.assert_allclose(layer(q[:, :1], k, v, None), merged(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("field", ["qk_clip", "log_max_attention_logit"])
def test_max_logits_are_returned_if_the_configuration_wants_them(field):
    context, logits = core(**{field: True})(*qkv(), None)
    expected = plain(return_max_logit=True)(*qkv())
    assert_bitwise(context, merged(expected[0]))
    assert_bitwise(logits, expected[1])


def test_num_splits_is_an_attribute():
    assert core().num_splits is None
    assert core(batch_invariant_mode=True).num_splits == 1
    assert TEDotProductAttention(config(), 1, "causal", "self", num_splits=4).num_splits == 4


def test_sharded_state_dict_has_the_learnable_offset_split_over_heads():
    assert core().sharded_state_dict() == {}
    assert core(softmax_type="off-by-one").sharded_state_dict() == {}
    with use_mesh("auto"):
        described = core(softmax_type="learnable").sharded_state_dict("core.")
        assert list(described) == ["core.softmax_offset"]
        assert described["core.softmax_offset"].sharding.spec == jax.P("tensor")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: core(attention_type="both"), ValueError, "attention_type.* 'both'"),
        (
            lambda: TEDotProductAttention(config(), 1, "causal", "self", cp_comm_type="ring"),
            ValueError,
            r"cp_comm_type.* 'p2p', 'all_gather', 'a2a', 'a2a\+p2p.* 'ring'",
        ),
        (
            lambda: TEDotProductAttention(config(), 1, "causal", "self", pg_collection="tp"),
            TypeError,
            "pg_collection.* None.*jax.set_mesh",
        ),
        (lambda: core("diagonal"), ValueError, "attn_mask_type.* 'diagonal'"),
        (lambda: core(AttnMaskType.padding)(*qkv(), None), ValueError, "'padding'.*kv_lengths"),
        (
            lambda: core(AttnMaskType.padding)(*qkv(), jnp.zeros((B, S), bool)),
            ValueError,
            r"padding mask.* \[b, 1, 1, s\].* bool \(2, 8\)",
        ),
        (lambda: core(AttnMaskType.arbitrary)(*qkv(), None), ValueError, "'arbitrary'.* mask"),
    ],
)
def test_bad_arguments_say_what_is_allowed(call, error, message):
    with without_type_checker(), pytest.raises(error, match=message):
        call()


def test_there_is_no_stream():
    """Megatron sets one for the exchange of keys and values; code that asks whether there is one is told that not."""
    assert TEDotProductAttention.cp_stream is None
