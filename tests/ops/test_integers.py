"""Integers of any width: ids, positions, labels, lengths and expert numbers give the numbers that int32 gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import RouterOptions, TransformerConfig
from jax_te.data import heldout_batches
from jax_te.layers import (
    Embedding,
    GroupedLinear,
    KVCache,
    MoE,
    MultiheadAttention,
    PackedSeqParams,
    Router,
    WindowKVCache,
    apply_rotary,
    rotary_embedding,
)
from jax_te.megatron import vocab_parallel_cross_entropy
from jax_te.models import BertModel, GPTModel, T5Model, generate
from jax_te.ops import (
    LossOptions,
    RowGroups,
    Segments,
    dot_product_attention,
    grouped_dense,
    linear_cross_entropy,
    segments_from_cu_seqlens,
    softmax_cross_entropy,
)
from jax_te.ops.integers import as_int32
from tests.support.numerics import assert_bitwise, draw, quick_jit

V = 300
"""Rows of tables: more than a byte counts."""
IDS = np.array([[0, 3, 127, 100], [44, 1, 2, 90]])

Case = tuple[Callable[..., Any], dict[str, np.ndarray], tuple[Any, ...]]
"""A function of integers by name and of differentiable arrays; the integers; the arrays."""


def config(**fields: Any) -> TransformerConfig:
    rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, **rates, **fields)


def of_module(module: nnx.Module, call: Callable[..., Any], integers: dict[str, np.ndarray], *arrays: Any) -> Case:
    """The case of a module: its parameters are differentiated, too."""
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def run(integers: dict[str, Any], params: Any, *arrays: Any) -> Any:
        return call(nnx.merge(graphdef, params, rest), *arrays, **integers)

    return run, integers, (params, *arrays)


def of_op(call: Callable[..., Any], integers: dict[str, np.ndarray], *arrays: Any) -> Case:
    return (lambda integers, *arrays: call(*arrays, **integers)), integers, arrays


def attend(*qkv: Any, mask_type: str = "padding_causal", **integers: Any) -> Any:
    return dot_product_attention(qkv, mask_type=mask_type, **integers)


def qkv(s: int) -> tuple[Any, ...]:
    return tuple(draw(name, (1, s, 2, 8)) for name in "qkv")


def loss_of_gpt(model: GPTModel, **integers: Any) -> Any:
    return model.loss(integers["tokens"], integers["labels"], positions=integers["positions"], reduction="sum")


def appended(cache: Callable[..., Any], length: Any, x: Any) -> Any:
    cache = cache(k=jnp.zeros((1, 136, 1, 8)), v=jnp.zeros((1, 136, 1, 8)), length=length)
    cache = cache.append(x, x)
    return cache.k, cache.length, cache.masks(1, x.shape[1])[1]


def gpt() -> Case:
    """Learned positions, further tokens, labels that do not count."""
    model = GPTModel(
        config(mtp_num_layers=1),
        vocab_size=V,
        max_sequence_length=16,
        position_embedding_type="learned_absolute",
        rngs=nnx.Rngs(0),
    )
    positions = np.array([3, 2, 1, 0])
    return of_module(model, loss_of_gpt, {"tokens": IDS, "labels": IDS[::-1], "positions": positions})


def grouped(layer: bool) -> Case:
    x, kernel = draw("x", (256, 4)), draw("kernel", (3, 4, 4))
    sizes = np.array([100, 30, 120])  # their sum is no int8, 130 of alignment 16 is none either
    if layer:
        module = GroupedLinear(3, 4, 4, rngs=nnx.Rngs(0))
        return of_module(module, lambda module, x, sizes: module(x, sizes), {"sizes": sizes}, x)

    def run(x: Any, kernel: Any, sizes: Any) -> Any:
        groups = RowGroups(sizes=sizes, rows=256, alignment=1)
        return grouped_dense(x, kernel, groups=groups), groups.starts

    return of_op(run, {"sizes": sizes}, x, kernel)


def experts(kind: str) -> Case:
    """As many tokens that one byte does not number them."""
    options = RouterOptions(num_experts=4, topk=2, load_balancing_type="none", expert_capacity_factor=2.0)
    x = draw("x", (1, 130, 16))
    chosen = np.arange(260).reshape(1, 130, 2) % 4
    if kind == "router":
        router = Router(16, options, rngs=nnx.Rngs(0))
        return of_module(router, lambda router, x, chosen: router(x, experts=chosen).probs, {"chosen": chosen}, x)
    layer = MoE(16, 16, options, rngs=nnx.Rngs(0))
    return of_module(layer, lambda layer, x, chosen: layer(x, experts=chosen), {"chosen": chosen}, x)


CASES: dict[str, Callable[[], Case]] = {
    "embedding": lambda: of_module(Embedding(V, 8, rngs=nnx.Rngs(0)), lambda module, ids: module(ids), {"ids": IDS}),
    "cross entropy": lambda: of_op(softmax_cross_entropy, {"labels": IDS}, draw("x", (2, 4, V))),
    "a label that is ignored": lambda: of_op(
        lambda x, labels: softmax_cross_entropy(x, labels, options=LossOptions(ignore_index=100), reduction="mean"),
        {"labels": IDS},
        draw("x", (2, 4, V)),
    ),
    "Megatron's cross entropy": lambda: of_op(
        lambda x, target: vocab_parallel_cross_entropy(x, target, 0.1), {"target": IDS}, draw("x", (2, 4, V))
    ),
    "linear cross entropy": lambda: of_op(
        lambda x, kernel, labels: linear_cross_entropy(x, kernel, labels, chunks=2),
        {"labels": IDS},
        draw("x", (2, 4, 8)),
        draw("kernel", (8, V)),
    ),
    "lengths": lambda: of_op(attend, {"q_lengths": np.array([100]), "kv_lengths": np.array([120])}, *qkv(160)),
    "packed sequences": lambda: of_op(
        lambda *arrays, offsets, lengths: attend(*arrays, segments=Segments(offsets, lengths, offsets, lengths)),
        {"offsets": np.array([[0, 100]]), "lengths": np.array([[100, 60]])},
        *qkv(160),
    ),
    "cumulative lengths": lambda: of_op(
        lambda *arrays, cu_seqlens: attend(*arrays, segments=segments_from_cu_seqlens(cu_seqlens)),
        {"cu_seqlens": np.array([[0, 60, 120]])},
        *qkv(160),
    ),
    "parameters of packed sequences": lambda: of_op(
        lambda x, cu: (
            x * PackedSeqParams(cu_seqlens_q=cu).positions(160).astype(x.dtype),
            PackedSeqParams(cu_seqlens_q=cu, total_tokens=160).seq_idx,
        ),
        {"cu": np.array([[0, 60, 120]])},
        draw("x", (1, 160)),
    ),
    "attention": lambda: of_module(
        MultiheadAttention(16, 2, attn_mask_type="padding", attention_dropout=0.0, rngs=nnx.Rngs(0)),
        lambda layer, x, lengths: layer(x, sequence_lengths=lengths),
        {"lengths": np.array([100, 120])},
        draw("x", (2, 160, 16)),
    ),
    "rotations": lambda: of_op(
        lambda x, positions: apply_rotary(x, rotary_embedding(positions, 8)),
        {"positions": np.arange(120)},
        draw("x", (1, 120, 1, 8)),
    ),
    "cache": lambda: of_op(
        lambda x, length: appended(KVCache, length, x), {"length": np.array(126)}, draw("x", (1, 4, 1, 8))
    ),
    "window's cache": lambda: of_op(
        lambda x, length: appended(lambda **fields: WindowKVCache(left=16, **fields), length, x),
        {"length": np.array(126)},
        draw("x", (1, 4, 1, 8)),
    ),
    "grouped dense": lambda: grouped(layer=False),
    "grouped linear": lambda: grouped(layer=True),
    "router": lambda: experts("router"),
    "experts": lambda: experts("layer"),
    "GPT": gpt,
    "BERT": lambda: of_module(
        BertModel(config(), vocab_size=V, max_sequence_length=8, num_tokentypes=2, rngs=nnx.Rngs(0)),
        lambda model, tokens, tokentypes, lengths: model.loss(
            tokens, tokens, tokentypes=tokentypes, lengths=lengths, reduction="sum"
        ),
        {"tokens": IDS, "tokentypes": IDS % 2, "lengths": np.array([3, 4])},
    ),
    "T5": lambda: of_module(
        T5Model(config(), vocab_size=V, max_sequence_length=8, rngs=nnx.Rngs(0)),
        lambda model, tokens, lengths: model.loss(tokens, tokens, tokens, encoder_lengths=lengths, reduction="sum"),
        {"tokens": IDS, "lengths": np.array([3, 4])},
    ),
}


@functools.cache
def results(name: str, dtype: str) -> Any:
    """Outputs and gradients of a case whose integers have a dtype."""
    run, integers, arrays = CASES[name]()
    given = {name: jnp.asarray(x.astype(dtype)) for name, x in integers.items()}

    def cotangent(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return np.zeros(x.shape, jax.dtypes.float0)
        return jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)

    def both(*arrays: Any) -> Any:
        out, backward = jax.vjp(lambda *arrays: run(given, *arrays), *arrays)
        return out, backward(jax.tree.map(cotangent, out))

    return quick_jit(both)(*arrays)


QUICK = ("a label that is ignored-uint8", "lengths-int8", "packed sequences-int8", "grouped dense-int8", "router-int8")


@pytest.mark.costly(
    *(case for name in CASES for dtype in ("int8", "uint8") if (case := f"{name}-{dtype}") not in QUICK),
    slow=["T5-int8", "T5-uint8", "GPT-uint8", "BERT-uint8", "BERT-int8"],
)
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients(name, dtype):
    jax.tree.map(assert_bitwise, results(name, dtype), results(name, "int32"))


@pytest.mark.parametrize("dtype", ["int4", "int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_the_range_of_each_dtype(dtype):
    limits = jnp.iinfo(dtype)
    numbers = [int(limits.min), 1, int(limits.max)]
    wide = as_int32("ids", jnp.array(numbers, dtype))
    assert wide.dtype == jnp.int32
    assert wide.tolist() == [min(number, 2**31 - 1) for number in numbers]


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_numpys_64_bits(dtype):
    """JAX without its 64-bit mode would drop the higher bits: 2^32 would be 0."""
    ids = np.array([2**32, 5], dtype)
    assert as_int32("ids", ids).tolist() == [2**31 - 1, 5]
    assert as_int32("ids", np.array([-(2**40)])).tolist() == [-(2**31)]


@pytest.mark.parametrize("dtype", [bool, jnp.float32])
def test_what_is_no_integer(dtype):
    with pytest.raises(TypeError, match="ids must be integers"):
        as_int32("ids", jnp.zeros(3, dtype))


def test_the_byte_of_an_ignored_label():
    """-100 in a byte is 156, which is a label."""
    labels = jnp.array([156, 7], jnp.uint8)
    assert LossOptions().ignored(labels).tolist() == [False, False]
    assert LossOptions().ignored(jnp.array([-100, 7], jnp.int8)).tolist() == [True, False]


def test_boundaries_that_decrease():
    """Unsigned differences are never negative."""
    with pytest.raises(ValueError, match="never decrease"):
        segments_from_cu_seqlens(jnp.array([0, 200, 100], jnp.uint8))


@pytest.mark.costly("uint8-int32")
@pytest.mark.parametrize(("dtype", "expected"), [("uint8", "int32"), ("int16", "int16")])
def test_generated_tokens(dtype, expected):
    """The tokens of a vocabulary of more than 256 do not come back as bytes."""
    model = GPTModel(
        config(), vocab_size=V, max_sequence_length=8, share_embeddings_and_output_weights=False, rngs=nnx.Rngs(0)
    )
    # The one token whose row is large is the most likely one.
    model.output_kernel[...] = jnp.zeros_like(model.output_kernel[...])
    model.output_bias = nnx.Param(jax.nn.one_hot(V - 1, V))
    found = generate(model, jnp.array([[1, 2]], dtype), steps=2, key=jax.random.key(0), temperature=0.0)
    assert found.dtype == expected
    assert found.tolist() == [[1, 2, V - 1, V - 1]]


def test_a_prompt_outside_of_the_vocabulary():
    model = GPTModel(config(), vocab_size=16, max_sequence_length=8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="tokens from 0 to 15"):
        generate(model, jnp.array([[1, 16]]), steps=2, key=jax.random.key(0))


def test_a_text_of_signed_bytes():
    """Their sign is checked, which is that of no token."""
    text = np.array([1, 2, -100, 3, 4], np.int8)
    with pytest.raises(ValueError, match="the token -100"):
        next(iter(heldout_batches(text, batch_size=1, seq_len=4, num_batches=1)))
