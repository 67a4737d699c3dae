"""cuDNN's fused attention through Transformer Engine."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import transformer_engine.jax.cpp_extensions as tex
from jax.ad_checkpoint import checkpoint_name
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
    bias = None if arrays.bias is None else arrays.bias.astype(q.dtype)
    offset = arrays.softmax_offset
    offset = None if offset is None else offset.astype(jnp.float32).reshape(1, -1, 1, 1)
    out, max_logit = _fused(spec, qkv, bias, offset, _descriptor(spec, arrays))
    return out, jax.lax.stop_gradient(max_logit.astype(jnp.float32)) if spec.return_max_logit else None


# TE's own function of this name leaves backward outside of `inside_te`.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(spec: AttentionSpec, qkv: QKV, bias: Array | None, offset: Array | None, rows: Any) -> tuple[Array, Array]:
    return _forward(spec, qkv, bias, offset, rows)[0]


def _forward(spec: AttentionSpec, qkv: QKV, bias: Array | None, offset: Array | None, rows: Any) -> tuple[Any, Any]:
    with inside_te():
        out, softmax_aux, rng_state, max_logit = tex.fused_attn_fwd(
            qkv, bias, offset, rows, None, **_options(spec), return_max_logit=spec.return_max_logit
        )
    # The name under which te.jax saves them too: a remat policy that keeps it does not run attention again.
    out, softmax_aux, rng_state = (checkpoint_name(a, "context") for a in (out, softmax_aux, rng_state))
    return (out, max_logit), (qkv, bias, offset, rows, softmax_aux, rng_state, out)


def _backward(spec: AttentionSpec, kept: Any, cotangents: tuple[Array, Any]) -> tuple[Any, ...]:
    qkv, bias, offset, rows, softmax_aux, rng_state, out = kept
    with inside_te():
        d_qkv, d_bias, _ = tex.fused_attn_bwd(
            qkv, bias, offset, softmax_aux, rng_state, out, cotangents[0], rows, **_options(spec)
        )
    d_offset = None if offset is None else _offset_gradient(spec, offset, softmax_aux, out, cotangents[0])
    return d_qkv, None if bias is None else d_bias, d_offset, None


_fused.defvjp(_forward, _backward)


def _offset_gradient(spec: AttentionSpec, offset: Array, softmax_aux: Array, out: Array, g: Array) -> Array:
    """Gradient ``[1, n, 1, 1]`` of the learnable offset: what its share of the softmax takes from the output.

    Not cuDNN's own: that of jax 0.11.2's CUDA 13 wheels lacks the factor ``exp(offset)`` (measured on an H200).
    """
    axes = (0, 1, 2, 3) if spec.max_segments else (0, 2, 1, 3)  # cuDNN's log-sum-exp: [b, s, n, 1] or [b, n, s, 1]
    log_sum = jnp.transpose(softmax_aux, axes)[..., 0]
    taken = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=-1)  # [b, s, n]
    share = jnp.exp(offset.reshape(1, 1, -1) - log_sum)
    # Padding has an output of 0 and no log-sum-exp.
    gradient = jnp.where(taken == 0.0, jnp.zeros_like(taken), share * taken)
    return -jnp.sum(gradient, axis=(0, 1)).reshape(1, -1, 1, 1)


def _options(spec: AttentionSpec) -> dict[str, Any]:
    window = _window(spec)
    return {
        "attn_bias_type": _BIASES[spec.bias_type],
        "attn_mask_type": _MASKS[spec.mask_type],
        "qkv_layout": _layout(spec),
        "softmax_type": _SOFTMAXES[spec.softmax_type],
        "scaling_factor": spec.scale,
        "dropout_probability": 0.0,
        "is_training": True,
        "max_segments_per_seq": max(spec.max_segments, 1),
        "window_size": None if window == (-1, -1) else window,
    }


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
    """TE marks sequences that are not there by -1.

    It takes the i-th length that is not -1, over all rows, to belong to the i-th such offset: there must be as many of
    the one as of the other, for keys as for queries. Its arrays of offsets have one entry more than those of lengths.
    """
    there, minus = (segments.q_lengths > 0) & (segments.kv_lengths > 0), jnp.full((), -1, jnp.int32)

    def lengths(array: Array) -> Array:
        return jnp.where(there, array, minus)

    def offsets(array: Array) -> Array:
        return jnp.pad(jnp.where(there, array, minus), ((0, 0), (0, 1)), constant_values=-1)

    return SequenceDescriptor.from_seqlens_and_offsets(
        (lengths(segments.q_lengths), lengths(segments.kv_lengths)),
        (offsets(segments.q_offsets), offsets(segments.kv_offsets)),
    )
