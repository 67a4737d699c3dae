"""cuDNN's fused attention through Transformer Engine."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import transformer_engine.jax.cpp_extensions as tex
from jax.ad_checkpoint import checkpoint_name
from transformer_engine.jax.attention import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout, SequenceDescriptor

from jax_te._device import default_platform
from jax_te.ops import xla
from jax_te.ops.attention.segments import Segments
from jax_te.ops.attention.softmax_offset import offset_gradient
from jax_te.ops.attention.spec import QKV, AttentionArrays, AttentionSpec
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
    """Return the window in TE's form, in which a causal mask alone is not a window."""
    return spec.window if spec.window[0] >= 0 or not spec.is_causal else (-1, -1)


# With fewer positions backward ended in CUDA_ERROR_ILLEGAL_ADDRESS in every layout (64 positions, heads of 64 and 128,
# cuDNN of jax 0.11.2's CUDA 13 wheels, H200).
_SHORTEST = 128


def unsupported(spec: AttentionSpec) -> str | None:
    """Return the reason why TE cannot run the call on any GPU, or None."""
    if spec.mask_type not in _MASKS:
        return f"TE's fused attention has no {spec.mask_type!r} mask"
    if spec.bias_type not in _BIASES:
        return f"TE's fused attention has no {spec.bias_type!r} bias"
    if spec.logit_softcap is not None:
        return "TE's fused attention has no softcap of the logits"
    if spec.dropout_rate > 0.0:
        # TE adds a counter of its own calls to the seed: the same key drops other elements at each call, and recompute
        # would differentiate through another mask than the one that ran.
        return "TE's fused attention draws another dropout mask at each call, whatever the key"
    if spec.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attention takes bfloat16 or float16, not {jnp.dtype(spec.dtype).name}"
    if spec.bias_shape is not None and spec.bias_shape[2:] != (spec.q_length, spec.kv_length):
        # cuDNN's check accepts such a bias, but its kernel reads past the array's end: wrong numbers or illegal
        # addresses.
        return (
            f"cuDNN reads a bias {list(spec.bias_shape)} of one row or column as if it had all {spec.q_length} x "
            f"{spec.kv_length} (cuDNN 9.19, Transformer Engine 2.20.2, H200)"
        )
    if spec.max_segments:
        lacks = unsupported_if_packed(spec)
        if lacks is not None:
            return lacks
    if 1 < spec.q_length < _SHORTEST:
        return (
            f"the kernel that cuDNN has for fewer than {_SHORTEST} positions ({spec.q_length} here) reads outside its "
            "arrays in backward"
        )
    return None


def unsupported_if_packed(spec: AttentionSpec) -> str | None:
    """Return the reason why TE cannot run a call of packed sequences on any GPU, or None."""
    if spec.bias_type != "no_bias":
        # A sequence is an example to cuDNN, whose first query and key read the bias's first row and column.
        return "cuDNN counts a bias of packed sequences from the beginning of each, not of the row"
    heads = (spec.head_dim, spec.v_head_dim)
    if max(heads) > 128 and heads != (192, 128):
        # Heads of 136, 160, 192, 256, 256/128 and 128/192 on an H200: forward is right; gradients are off by 0.2 to
        # 0.7 in relative L2, and dk and dv of grouped queries are nan.
        return (
            f"cuDNN's backward of packed sequences with heads over 128 ({max(heads)} here) gives wrong gradients and "
            "nan (cuDNN 9.19, jax 0.11.2, Transformer Engine 2.20.2, H200)"
        )
    return None


def attention_supports(spec: AttentionSpec) -> tuple[bool, str]:
    """Return whether cuDNN has a kernel for the call, and its answer if not."""
    if runs_as_plain_jax() or default_platform() != "gpu":
        return False, "TE's fused attention needs a GPU"
    return _has_kernel(spec)


# Cached: the layers of a model make the same call.
@functools.cache
def _has_kernel(spec: AttentionSpec) -> tuple[bool, str]:
    """Return whether cuDNN has a kernel for the call on this machine's GPU, and its answer if not."""
    lacks = unsupported(spec)
    if lacks is not None:
        return False, lacks
    if _is_empty(spec):
        return True, "there is nothing to compute"
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
    """Return output and max logits, see `xla.attention`, by cuDNN's kernel.

    `attention_supports` refuses calls with a mask, ALiBi slopes or dropout.
    """
    if _is_empty(spec):
        return xla.attention(qkv, spec, arrays)
    result: Any = _fused(spec, qkv, arrays)
    out, max_logit = result
    return out, jax.lax.stop_gradient(max_logit) if max_logit is not None else None


def _is_empty(spec: AttentionSpec) -> bool:
    """Return whether there are no queries or no keys, in which case cuDNN is not called."""
    return 0 in (spec.batch, spec.q_length, spec.kv_length)


# A custom derivative rule: in TE's, backward would run outside of `inside_te`.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(spec: AttentionSpec, qkv: QKV, arrays: AttentionArrays) -> tuple[Array, Array | None]:
    return _forward(spec, qkv, arrays)[0]


def _forward(spec: AttentionSpec, qkv: QKV, arrays: AttentionArrays) -> tuple[Any, Any]:
    out, log_sum, max_logit = attention_forward(qkv, spec, arrays)
    # The name under which te.jax saves them, too: a remat policy that saves it does not run attention again.
    out, log_sum = (checkpoint_name(a, "context") for a in (out, log_sum))
    return (out, max_logit), (qkv, arrays, log_sum, out)


def _backward(spec: AttentionSpec, kept: Any, cotangents: tuple[Array, Any]) -> tuple[Any, ...]:
    qkv, arrays, log_sum, out = kept
    d_qkv, d_bias, d_offset = attention_backward(qkv, spec, arrays, out, log_sum, cotangents[0])
    return d_qkv, AttentionArrays(bias=d_bias, softmax_offset=d_offset)


_fused.defvjp(_forward, _backward)


def attention_forward(qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays) -> tuple[Array, Array, Array | None]:
    """Return output ``[b, sq, n, dv]``, logarithm of the softmax's denominator, fp32 ``[b, n, sq]``, and max logits.

    Not differentiable. The padding of packed sequences may hold garbage.
    """
    with inside_te():
        out, softmax_aux, _, max_logit = tex.fused_attn_fwd(
            qkv,
            _bias(qkv, arrays),
            _offset(arrays),
            _descriptor(spec, arrays),
            None,
            **_options(spec),
            return_max_logit=spec.return_max_logit,
        )
    log_sum = jnp.transpose(softmax_aux[..., 0], _order(spec))
    out, log_sum = _where_read(arrays, out, log_sum)
    return out, log_sum, max_logit.astype(jnp.float32) if spec.return_max_logit else None


def attention_backward(
    qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays, out: Array, log_sum: Array, g: Array
) -> tuple[QKV, Array | None, Array | None]:
    """Return the gradients of queries, keys and values (packed like them), of the bias, and of the softmax's offset.

    Args:
        qkv, spec, arrays: arguments of forward; the keys may be one block of those that the output attends to.
        out, log_sum: results of `attention_forward`, or of all blocks merged.
        g: gradient of the output.
    """
    softmax_aux = jnp.transpose(log_sum, _order(spec))[..., None]
    # TE's shape of it, for every device; nothing is drawn, as dropout is refused.
    rng_state = jnp.zeros((2 * len(jax.devices()), 4), jnp.uint32)
    with inside_te():
        d_qkv, d_bias, _ = tex.fused_attn_bwd(
            qkv,
            _bias(qkv, arrays),
            _offset(arrays),
            softmax_aux,
            rng_state,
            out,
            g,
            _descriptor(spec, arrays),
            **_options(spec),
        )
    gradients: Any = _where_read(arrays, *d_qkv)
    bias, offset = arrays.bias, arrays.softmax_offset
    # cuDNN's own gradient of the offset lacks the factor exp(offset) (jax 0.11.2's CUDA 13 wheels, seen on an H200).
    d_offset = None if offset is None else offset_gradient(offset, log_sum, out, g).astype(offset.dtype)
    return gradients, None if bias is None else d_bias.astype(bias.dtype), d_offset


def _where_read(arrays: AttentionArrays, *results: Array) -> tuple[Array, ...]:
    """Return results ``[b, ...]``, zero for examples without queries or without keys."""
    if arrays.q_lengths is None or arrays.kv_lengths is None:
        return results
    # For such examples cuDNN writes nothing (seen on an H200). TE clears the results of packed sequences itself.
    read = (arrays.q_lengths > 0) & (arrays.kv_lengths > 0)
    return tuple(jnp.where(read.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x)) for x in results)


def _bias(qkv: QKV, arrays: AttentionArrays) -> Array | None:
    return None if arrays.bias is None else arrays.bias.astype(qkv[0].dtype)


def _offset(arrays: AttentionArrays) -> Array | None:
    offset = arrays.softmax_offset
    return None if offset is None else offset.astype(jnp.float32).reshape(1, -1, 1, 1)


def _order(spec: AttentionSpec) -> tuple[int, int, int]:
    """Return the axes that bring cuDNN's log-sum-exp, packed ``[b, s, n]``, to ``[b, n, s]`` and back."""
    return (0, 2, 1) if spec.max_segments else (0, 1, 2)


def _options(spec: AttentionSpec) -> dict[str, Any]:
    return {
        "attn_bias_type": _BIASES[spec.bias_type],
        "attn_mask_type": _MASKS[spec.mask_type],
        "qkv_layout": _layout(spec),
        "softmax_type": _SOFTMAXES[spec.softmax_type],
        "scaling_factor": spec.scale,
        "dropout_probability": 0.0,
        "is_training": True,
        "max_segments_per_seq": max(spec.max_segments, 1),
        "window_size": _window(spec),
    }


def _descriptor(spec: AttentionSpec, arrays: AttentionArrays) -> SequenceDescriptor:
    if arrays.segments is not None:
        return packed_descriptor(arrays.segments)
    if arrays.q_lengths is not None and arrays.kv_lengths is not None:
        return SequenceDescriptor.from_seqlens((arrays.q_lengths, arrays.kv_lengths))
    return SequenceDescriptor.from_seqlens(
        (
            jnp.full((spec.batch,), spec.q_length, jnp.int32),
            jnp.full((spec.batch,), spec.kv_length, jnp.int32),
        )
    )


def packed_descriptor(segments: Segments) -> SequenceDescriptor:
    """Return TE's descriptor: -1 marks absent sequences; rows of offsets have one entry more than rows of lengths."""
    # TE pairs the i-th length that is not -1, over all rows, with the i-th such offset: queries and keys must mark the
    # same sequences, so one without queries or without keys is absent on both sides.
    there, minus = (segments.q_lengths > 0) & (segments.kv_lengths > 0), jnp.full((), -1, jnp.int32)

    def lengths(array: Array) -> Array:
        return jnp.where(there, array, minus)

    def offsets(array: Array) -> Array:
        return jnp.pad(jnp.where(there, array, minus), ((0, 0), (0, 1)), constant_values=-1)

    return SequenceDescriptor.from_seqlens_and_offsets(
        (lengths(segments.q_lengths), lengths(segments.kv_lengths)),
        (offsets(segments.q_offsets), offsets(segments.kv_offsets)),
    )
