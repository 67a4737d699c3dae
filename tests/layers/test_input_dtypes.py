"""Inputs, kernels, biases and norm scales in whose dtype nothing can be computed: integers, bools, complex, FP8."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.layers import (
    DotProductAttention,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    TransformerLayer,
    apply_rotary,
    rotary_embedding,
)
from jax_te.megatron import vocab_parallel_cross_entropy
from jax_te.ops import (
    LinearWeights,
    activation,
    dense,
    dot_product_attention,
    layernorm,
    layernorm_dense,
    layernorm_mlp,
    linear_cross_entropy,
    softmax_cross_entropy,
)
from jax_te.recipe import Float8CurrentScaling
from tests.support.numerics import NO_DROPOUT

H = 16
ONES, KERNEL, LABELS = jnp.ones(H), jnp.ones((H, H)), jnp.zeros((2, 4), jnp.int32)
CALLS: dict[str, Any] = {
    "Linear": lambda: Linear(H, H, rngs=nnx.Rngs(0)),
    "LayerNormLinear": lambda: LayerNormLinear(H, H, rngs=nnx.Rngs(0)),
    "LayerNormMLP": lambda: LayerNormMLP(H, H, rngs=nnx.Rngs(0)),
    "LayerNorm": lambda: LayerNorm(H, rngs=nnx.Rngs(0)),
    "RMSNorm": lambda: RMSNorm(H, rngs=nnx.Rngs(0)),
    "DotProductAttention": lambda: lambda x: DotProductAttention(1, H)(*(x[:, :, None],) * 3),
    "MultiheadAttention": lambda: MultiheadAttention(H, 1, attention_dropout=0.0, rngs=nnx.Rngs(0)),
    "TransformerLayer": lambda: TransformerLayer(H, H, 1, **NO_DROPOUT, rngs=nnx.Rngs(0)),
    "dense": lambda: lambda x: dense(x, KERNEL),
    "dense's kernel": lambda: lambda x: dense(KERNEL[:, :4], x[0]),
    "dense's bias": lambda: lambda x: dense(KERNEL, KERNEL, bias=x[0, 0]),
    "layernorm": lambda: lambda x: layernorm(x, ONES, ONES),
    "layernorm's scale": lambda: lambda x: layernorm(KERNEL, x[0, 0], ONES),
    "layernorm_dense's bias": lambda: lambda x: layernorm_dense(KERNEL, ONES, x[0, 0], LinearWeights(KERNEL)),
    "layernorm_dense": lambda: lambda x: layernorm_dense(x, ONES, ONES, LinearWeights(KERNEL)),
    "layernorm_mlp": lambda: (
        lambda x: layernorm_mlp(x, ONES, ONES, LinearWeights(KERNEL[:, None]), LinearWeights(KERNEL))
    ),
    "layernorm_mlp's second kernel": lambda: (
        lambda x: layernorm_mlp(KERNEL, ONES, ONES, LinearWeights(KERNEL[:, None, :4]), LinearWeights(x[0]))
    ),
    "activation": lambda: lambda x: activation(x[:, :, None], "gelu"),
    "apply_rotary": lambda: lambda x: apply_rotary(x[:, :, None], rotary_embedding(jnp.arange(4), H)),
    "softmax_cross_entropy": lambda: lambda x: softmax_cross_entropy(x, LABELS),
    "vocab_parallel_cross_entropy": lambda: lambda x: vocab_parallel_cross_entropy(x, LABELS),
    "linear_cross_entropy": lambda: lambda x: linear_cross_entropy(x, KERNEL, LABELS, chunks=2),
    "linear_cross_entropy's kernel": lambda: (
        lambda x: linear_cross_entropy(jnp.ones((2, 4, 4)), x[0], LABELS, chunks=2)
    ),
    "dot_product_attention": lambda: lambda x: dot_product_attention((jnp.ones((2, 4, 1, H)), *(x[:, :, None],) * 2)),
}


@pytest.mark.parametrize("name", CALLS)
def test_arrays_that_are_not_floating_point_are_refused(name: str) -> None:
    call = CALLS[name]()
    for dtype in (jnp.int32, jnp.bool_, jnp.uint8, jnp.complex64, jnp.float8_e4m3fn):
        with pytest.raises(TypeError, match=r"takes arrays of float32, bfloat16, float16.*cast it first"):
            call(jnp.ones((2, 4, H), dtype))


Q, CACHED = jnp.ones((2, 4, 1, H), jnp.bfloat16), jnp.ones((2, 4, 1, H), jnp.float32)
MIXED: dict[str, Any] = {
    "op, values": lambda: dot_product_attention((Q, Q, CACHED)),
    "op, keys": lambda: dot_product_attention((Q, CACHED, Q)),
    "op, queries": lambda: dot_product_attention((CACHED, Q, Q), recipe=Float8CurrentScaling(fp8_dpa=True)),
    "core": lambda: DotProductAttention(1, H)(Q, Q, CACHED),
    "encoder": lambda: TransformerLayer(H, H, 1, layer_type="decoder", **NO_DROPOUT, rngs=nnx.Rngs(0))(
        Q[:, :, 0], encoder_output=CACHED[:, :, 0]
    ),
}


@pytest.mark.costly("encoder")
@pytest.mark.parametrize("name", MIXED)
def test_attention_takes_one_dtype(name: str) -> None:
    """The result has the dtype of the queries: that of the values would go on into the residual stream."""
    with pytest.raises(TypeError, match=r"dtype.*(bfloat16.*float32|float32.*bfloat16); cast"):
        MIXED[name]()
