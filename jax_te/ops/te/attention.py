"""cuDNN's fused attention through Transformer Engine."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import transformer_engine.jax.attention as te_attention
import transformer_engine.jax.cpp_extensions as tex
from transformer_engine.jax.attention import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout, SequenceDescriptor

from jax_te.ops.attention_spec import QKV, AttentionArrays, AttentionSpec, unpack
from jax_te.ops.segments import Segments
from jax_te.ops.te.load import runs_as_plain_jax
from jax_te.ops.te.quantizer import inside_te
from jax_te.typing import Array

_MASKS = {
    "no_mask": AttnMaskType.NO_MASK,
    "causal": AttnMaskType.CAUSAL_MASK,
    "causal_bottom_right": AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK,
    "padding": AttnMaskType.PADDING_MASK,
    "padding_causal": AttnMaskType.PADDING_CAUSAL_MASK,
    "padding_causal_bottom_right": AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
}

_BIASES = {
    "no_bias": AttnBiasType.NO_BIAS,
    "pre_scale_bias": AttnBiasType.PRE_SCALE_BIAS,
    "post_scale_bias": AttnBiasType.POST_SCALE_BIAS,
}

_SOFTMAXES = {
    "vanilla": AttnSoftmaxType.VANILLA_SOFTMAX,
    "off-by-one": AttnSoftmaxType.OFF_BY_ONE_SOFTMAX,
    "learnable": AttnSoftmaxType.LEARNABLE_SOFTMAX,
}


def _layout(spec: AttentionSpec) -> QKVLayout:
    if spec.max_segments:
        return QKVLayout.T3HD if spec.packed else QKVLayout.THD_THD_THD
    return QKVLayout.BS3HD if spec.packed else QKVLayout.BSHD_BSHD_BSHD


def _window(spec: AttentionSpec) -> tuple[int, int]:
    """As TE counts: a causal mask alone is no window."""
    return spec.window if spec.window[0] >= 0 or not spec.is_causal else (-1, -1)


_SHORTEST = 128
"""Below it, backward ended in CUDA_ERROR_ILLEGAL_ADDRESS (64 positions, heads of 64 and 128, cuDNN of jax 0.11.2's
CUDA 13 wheels, H200)."""


def _lacks(spec: AttentionSpec) -> str | None:
    """Why TE cannot run the call on any GPU, or None."""
    if spec.mask_type not in _MASKS:
        return f"TE's fused attention has no {spec.mask_type!r} mask"
    if spec.bias_type not in _BIASES:
        return f"TE's fused attention has no {spec.bias_type!r} bias"
    if spec.logit_softcap is not None:
        return "TE's fused attention has no soft cap of the logits"
    if spec.dropout_rate > 0.0:
        return "TE's fused attention counts its calls and drops others at each, whatever the key"
    if spec.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attention takes bfloat16 or float16, not {jnp.dtype(spec.dtype).name}"
    if 1 < spec.q_length < _SHORTEST:
        return (
            f"the kernel that cuDNN has for fewer than {_SHORTEST} positions ({spec.q_length} here) reads outside its "
            "arrays in backward; XLA's has no such fault"
        )
    return None


@functools.cache
def attention_supports(spec: AttentionSpec) -> tuple[bool, str]:
    """Whether cuDNN has a kernel for the call, and if not what it said."""
    if runs_as_plain_jax() or jax.default_backend() != "gpu":
        return False, "TE's fused attention needs a GPU"
    lacks = _lacks(spec)
    if lacks is not None:
        return False, lacks
    mask, bias_shape = _MASKS[spec.mask_type], spec.bias_shape or (None,) * 4
    helper = tex.FusedAttnHelper(
        is_training=True,
        batch_size=spec.batch,
        q_dtype=spec.dtype,
        kv_dtype=spec.dtype,
        qkv_layout=_layout(spec),
        attn_bias_type=_BIASES[spec.bias_type],
        attn_mask_type=mask,
        softmax_type=_SOFTMAXES[spec.softmax_type],
        dropout_probability=0.0,
        q_num_heads=spec.heads,
        kv_num_heads=spec.groups,
        q_max_seqlen=spec.q_length,
        kv_max_seqlen=spec.kv_length,
        head_dim_qk=spec.head_dim,
        head_dim_v=spec.v_head_dim,
        window_size=_window(spec),
        return_max_logit=spec.return_max_logit,
        bottom_right_diagonal=mask.is_bottom_right(),
        attn_scale=spec.scale,
        bias_batch=bias_shape[0],
        bias_heads=bias_shape[1],
        bias_seqlen_q=bias_shape[2],
        bias_seqlen_kv=bias_shape[3],
        max_segments_per_seq=max(spec.max_segments, 1),
    )
    if helper.is_fused_attn_kernel_available():
        return True, "cuDNN has a kernel"
    return False, helper.get_fused_attn_backend()[1] or "cuDNN has no kernel for this call"


def attention(qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays) -> tuple[Array, Array | None]:
    """As the plain form, by cuDNN's kernel. `attention_supports` refuses calls with a mask, slopes or dropout."""
    q = unpack(qkv)[0]
    offset = arrays.softmax_offset
    with inside_te():
        result: Any = te_attention.fused_attn(
            qkv,
            None if arrays.bias is None else arrays.bias.astype(q.dtype),
            _descriptor(spec, arrays),
            None,
            attn_bias_type=_BIASES[spec.bias_type],
            attn_mask_type=_MASKS[spec.mask_type],
            qkv_layout=_layout(spec),
            softmax_type=_SOFTMAXES[spec.softmax_type],
            scaling_factor=spec.scale,
            dropout_probability=0.0,
            is_training=True,
            max_segments_per_seq=max(spec.max_segments, 1),
            window_size=None if _window(spec) == (-1, -1) else _window(spec),
            softmax_offset=None if offset is None else offset.astype(jnp.float32).reshape(1, -1, 1, 1),
            return_max_logit=spec.return_max_logit,
        )
    out, max_logit = result if spec.return_max_logit else (result, None)
    return out, None if max_logit is None else jax.lax.stop_gradient(max_logit.astype(jnp.float32))


def _descriptor(spec: AttentionSpec, arrays: AttentionArrays) -> SequenceDescriptor:
    if arrays.segments is not None:
        return _packed_descriptor(arrays.segments)
    if arrays.q_lengths is not None and arrays.kv_lengths is not None:
        return SequenceDescriptor.from_seqlens((arrays.q_lengths, arrays.kv_lengths))
    return SequenceDescriptor.from_seqlens(
        (
            jnp.full((spec.batch,), spec.q_length, jnp.int32),
            jnp.full((spec.batch,), spec.kv_length, jnp.int32),
        )
    )


def _packed_descriptor(segments: Segments) -> SequenceDescriptor:
    """TE marks sequences that are not there by -1, and wants the end of the last one among the offsets."""

    def convert(offsets: Array, lengths: Array) -> tuple[Array, Array]:
        there, minus = lengths > 0, jnp.full((), -1, jnp.int32)
        count = jnp.sum(there, axis=-1, keepdims=True)
        ends = jnp.max(jnp.where(there, offsets + lengths, jnp.zeros((), jnp.int32)), axis=-1, keepdims=True)
        index = jnp.arange(offsets.shape[-1] + 1)[None]
        padded = jnp.pad(offsets, ((0, 0), (0, 1)))
        return (
            jnp.where(there, lengths, minus),
            jnp.where(index < count, padded, jnp.where(index == count, ends, minus)),
        )

    q_lengths, q_offsets = convert(segments.q_offsets, segments.q_lengths)
    kv_lengths, kv_offsets = convert(segments.kv_offsets, segments.kv_lengths)
    return SequenceDescriptor.from_seqlens_and_offsets((q_lengths, kv_lengths), (q_offsets, kv_offsets))
