"""DotProductAttention and MultiheadAttention: layouts, masks, what they return, errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te import te_pytorch
from jax_te.layers import DotProductAttention, MultiheadAttention, PackedSeqParams, TransformerLayer, init_kv_cache
from jax_te.ops import dot_product_attention
from tests.support import reference
from tests.support.numerics import assert_close, draw
from tests.support.reference import ROUNDOFF, Form, parameters, randomize

S, H, N, D = 8, 32, 4, 8
TOLERANCE = 4 * ROUNDOFF["float32"] * H**0.5  # four sums of at most H products in a row


def build(**options: Any) -> MultiheadAttention:
    return randomize(MultiheadAttention(H, N, attention_dropout=0.0, rngs=nnx.Rngs(0), **options))


def formula(layer: MultiheadAttention, x: np.ndarray, form: Form) -> np.ndarray:
    p = jax.tree.map(np.float64, parameters(layer))
    return reference.attention_block(np, p, np.float64(x), form)


def test_packed_and_separate_operands_give_the_same() -> None:
    core = DotProductAttention(N, D)
    qkv = draw("qkv", (2, S, 3, N, D))
    assert_close(core(qkv), core(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]), TOLERANCE)


def test_softmax_scale() -> None:
    q = draw("q", (2, S, N, D))
    doubled = DotProductAttention(N, D, softmax_scale=2.0 * D**-0.5)(q, q, q)
    assert_close(doubled, DotProductAttention(N, D)(2.0 * q, q, q), TOLERANCE)


def test_without_a_norm_in_front() -> None:
    layer, x = build(input_layernorm=False, num_gqa_groups=2), draw("x", (2, S, H))
    assert_close(layer(x), formula(layer, x, Form(g=2)), TOLERANCE)


def test_returns_the_norm_output() -> None:
    layer, x = build(return_layernorm_output=True), draw("x", (2, S, H))
    y, normed = layer(x)
    assert_close(y, formula(layer, normed, Form()), TOLERANCE)


def test_padding_hides_what_lies_behind_each_length() -> None:
    x, lengths = draw("x", (2, S, H)), (5, S)
    for mask_type, causal in (("padding", False), ("padding_causal", True)):
        layer = build(input_layernorm=False, attn_mask_type=mask_type)
        y = layer(x, sequence_lengths=jnp.array(lengths, jnp.int32))
        for i, length in enumerate(lengths):
            alone = formula(layer, x[i : i + 1, :length], Form(causal=causal))
            assert_close(y[i : i + 1, :length], alone, TOLERANCE, what=mask_type)


def test_arbitrary_mask_hides_where_it_is_true() -> None:
    x = draw("x", (2, S, H))
    mask = jnp.triu(jnp.ones((S, S), bool), 1)[None, None]
    assert_close(build(attn_mask_type="arbitrary")(x, attention_mask=mask), build()(x), TOLERANCE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q: DotProductAttention(N, D)(q, q), r"query \[b, s, 4, 8\], key .* \[b, s, 3, 4, 8\]"),
        (lambda q: DotProductAttention(N, D, num_gqa_groups=2)(q, q, q), r"key .* value \[b, s, 2, 8\]; got shapes"),
        (lambda q: DotProductAttention(N, D, attn_mask_type="padding")(q, q, q), "'padding' needs .*kv_lengths"),
        (lambda q: DotProductAttention(N, D)(q, q, q, kv_lengths=jnp.ones(2, jnp.int32)), "'causal' takes no lengths"),
        (
            lambda q: DotProductAttention(N, D)(q, q, q, core_attention_bias_type="alibi", core_attention_bias=q),
            "'alibi' takes alibi_slopes, and no core_attention_bias",
        ),
        (
            lambda q: DotProductAttention(N, D)(q, q, q, alibi_slopes=jnp.ones(N)),
            "alibi_slopes are for core_attention_bias_type 'alibi', got 'no_bias'",
        ),
        (lambda q: DotProductAttention(N, D)(q, q, q, attn_mask_type="none"), "mask_type must be one of .* got 'none'"),
        (lambda q: DotProductAttention(N, D, attn_mask_type="sliding"), "attn_mask_type must be one of.* 'sliding'"),
        (lambda q: DotProductAttention(N, D, attention_dropout=1.5), r"attention_dropout must be in \[0, 1\)"),
        (lambda q: DotProductAttention(N, D, num_gqa_groups=3), "4 is not divisible by num_gqa_groups 3"),
        (lambda q: build(input_layernorm=False, return_layernorm_output=True), "needs input_layernorm=True"),
        (
            lambda q: build(attn_mask_type="no_mask")(jnp.ones((2, S, H)), cache=init_kv_cache(2, S, N, D)),
            "a KV cache is for causal attention .* 'no_mask'",
        ),
    ],
)  # fmt: skip
def test_bad_arguments_say_what_is_allowed(call: Any, message: str) -> None:
    from tests.support.numerics import without_type_checker

    with without_type_checker(), pytest.raises(ValueError, match=message):
        call(draw("q", (2, S, N, D)))


LENGTHS = jnp.array([3, S], jnp.int32)
PADDING = jnp.arange(S)[None, None, None] >= LENGTHS[:, None, None, None]
PACKED = PackedSeqParams(cu_seqlens_q=jnp.array([[0, 3, S]] * 2))


@pytest.mark.costly("arguments7-padding")
@pytest.mark.parametrize("mask_type", ["padding", "padding_causal", "causal", "no_mask", "arbitrary"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"attention_mask": PADDING},
        {"attention_mask": PADDING, "lengths": LENGTHS},
        {"attention_mask": PADDING, "packed_seq_params": PACKED},
        {"lengths": LENGTHS},
        {"lengths": LENGTHS[:1]},
        {"lengths": LENGTHS + S},
        {"packed_seq_params": PACKED},
        {"packed_seq_params": PACKED, "lengths": LENGTHS},
        {"packed_seq_params": PackedSeqParams(cu_seqlens_q=jnp.array([0, 3, S]))},
        {"core_attention_bias": jnp.ones((1, N, S, S))},
        {"core_attention_bias_type": "post_scale_bias"},
    ],
)
def test_what_a_layer_leaves_to_the_op_is_refused_without_the_ops_names(mask_type: str, arguments: Any) -> None:
    """A layer's users cannot change an argument that it does not have."""
    ops, layers = set(inspect.signature(dot_product_attention).parameters), set[str]()
    for kind in (DotProductAttention, MultiheadAttention, TransformerLayer):
        layers |= {*inspect.signature(kind).parameters, *inspect.signature(kind.__call__).parameters}
    arguments, x, q = dict(arguments), draw("x", (2, S, H)), draw("q", (2, S, N, D))
    lengths = arguments.pop("lengths", None)
    core, block = DotProductAttention(N, D, attn_mask_type=mask_type), build(attn_mask_type=mask_type)
    for call in (
        lambda: core(q, q, q, kv_lengths=lengths, **arguments),
        lambda: block(x, sequence_lengths=lengths, **arguments),
    ):
        assert not _named_in_error(call) & (ops - layers)


def _named_in_error(call: Callable[[], Any]) -> set[str]:
    """Return the names with an underscore in the message of a call's ValueError; none if it raises none."""
    try:
        call()
    except ValueError as error:
        return {name for name in re.findall(r"\w+", str(error)) if "_" in name}  # "bias" and "mask" are words, too
    return set()


def test_what_a_mask_of_padding_can_be_replaced_by() -> None:
    """The remedies of the message about it give one result."""
    q = draw("q", (2, S, N, D))
    for mask_type, window in (("padding", None), ("padding_causal", (-1, 0))):
        core = DotProductAttention(N, D, attn_mask_type=mask_type)
        with pytest.raises(ValueError, match=f"'{mask_type}' takes no mask.*kv_lengths.*'arbitrary'.*te_pytorch"):
            core(q, q, q, attention_mask=PADDING)
        arbitrary = DotProductAttention(N, D, attn_mask_type="arbitrary", window_size=window)
        other = te_pytorch.DotProductAttention(N, D, qkv_format="bshd", attn_mask_type=mask_type)
        real, expected = ~PADDING[:, 0, 0], core(q, q, q, kv_lengths=LENGTHS)
        for layer in (arbitrary, other):
            assert_close(layer(q, q, q, attention_mask=PADDING)[real], expected[real], TOLERANCE, what=mask_type)
