"""cuDNN's fused attention through Transformer Engine."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import transformer_engine.jax.attention as te_attention
import transformer_engine.jax.cpp_extensions as tex
from transformer_engine.jax.attention import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout, SequenceDescriptor

from jax_te.ops.attention_spec import QKV, AttentionSpec
from jax_te.ops.te.load import runs_as_plain_jax
from jax_te.ops.te.quantizer import inside_te
from jax_te.typing import Array

_MASKS = {
    "no_mask": AttnMaskType.NO_MASK,
    "causal": AttnMaskType.CAUSAL_MASK,
    "padding": AttnMaskType.PADDING_MASK,
    "padding_causal": AttnMaskType.PADDING_CAUSAL_MASK,
}


def _layout(spec: AttentionSpec) -> QKVLayout:
    return QKVLayout.BS3HD if spec.packed else QKVLayout.BSHD_BSHD_BSHD


_SHORTEST = 128
"""Below it, backward ended in CUDA_ERROR_ILLEGAL_ADDRESS (64 positions, heads of 64 and 128, cuDNN of jax 0.11.2's
CUDA 13 wheels, H200)."""


@functools.cache
def attention_supports(spec: AttentionSpec) -> tuple[bool, str]:
    """Whether cuDNN has a kernel for the call, and if not what it said."""
    if runs_as_plain_jax() or jax.default_backend() != "gpu":
        return False, "TE's fused attention needs a GPU"
    if spec.mask_type not in _MASKS:
        return False, f"TE's fused attention has no {spec.mask_type!r} mask"
    if spec.dropout_rate > 0.0:
        return False, "TE's fused attention counts its calls and drops others at each, whatever the key"
    if spec.dtype not in (jnp.bfloat16, jnp.float16):
        return False, f"cuDNN attention takes bfloat16 or float16, not {jnp.dtype(spec.dtype).name}"
    if 1 < spec.q_length < _SHORTEST:
        return False, (
            f"the kernel that cuDNN has for fewer than {_SHORTEST} positions ({spec.q_length} here) reads outside its "
            "arrays in backward; XLA's has no such fault"
        )
    mask = _MASKS[spec.mask_type]
    helper = tex.FusedAttnHelper(
        is_training=True,
        batch_size=spec.batch,
        q_dtype=spec.dtype,
        kv_dtype=spec.dtype,
        qkv_layout=_layout(spec),
        attn_bias_type=AttnBiasType.NO_BIAS,
        attn_mask_type=mask,
        softmax_type=AttnSoftmaxType.VANILLA_SOFTMAX,
        dropout_probability=0.0,
        q_num_heads=spec.heads,
        kv_num_heads=spec.groups,
        q_max_seqlen=spec.q_length,
        kv_max_seqlen=spec.kv_length,
        head_dim_qk=spec.head_dim,
        head_dim_v=spec.head_dim,
        window_size=(-1, -1),
        bottom_right_diagonal=mask.is_bottom_right(),
    )
    if helper.is_fused_attn_kernel_available():
        return True, "cuDNN has a kernel"
    return False, helper.get_fused_attn_backend()[1] or "cuDNN has no kernel for this call"


def attention(
    qkv: QKV,
    spec: AttentionSpec,
    *,
    mask: Array | None,
    q_lengths: Array | None,
    kv_lengths: Array | None,
    dropout_key: Array | None,
) -> Array:
    """As the plain form, by cuDNN's kernel."""
    del mask, dropout_key  # `attention_supports` refuses calls that have them
    if q_lengths is None or kv_lengths is None:
        q_lengths = jnp.full((spec.batch,), spec.q_length, jnp.int32)
        kv_lengths = jnp.full((spec.batch,), spec.kv_length, jnp.int32)
    with inside_te():
        return te_attention.fused_attn(
            qkv,
            None,
            SequenceDescriptor.from_seqlens((q_lengths, kv_lengths)),
            None,
            attn_bias_type=AttnBiasType.NO_BIAS,
            attn_mask_type=_MASKS[spec.mask_type],
            qkv_layout=_layout(spec),
            softmax_type=AttnSoftmaxType.VANILLA_SOFTMAX,
            scaling_factor=spec.scale,
            dropout_probability=0.0,
            is_training=True,
        )
