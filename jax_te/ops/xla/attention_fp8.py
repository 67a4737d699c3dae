"""FP8 attention in plain JAX: the numbers of the quantized tensors, on any device.

It materializes the scores ``[b, n, sq, skv]``, and multiplies codes in fp32, in which their products are exact. So it
is for tests, debugging and short sequences; kernels with the same steps are for speed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_te.ops.attention.fp8_types import Amaxes, Fp8Gradients, Fp8Operands, Fp8Output, Scales
from jax_te.ops.attention.spec import AttentionArrays, AttentionSpec
from jax_te.ops.xla.attention_scores import scores_of
from jax_te.quantize import AttentionPrecision, QuantizedTensor, amax
from jax_te.typing import Array


def fp8_attention_forward(
    operands: Fp8Operands, spec: AttentionSpec, arrays: AttentionArrays, precision: AttentionPrecision, scales: Scales
) -> Fp8Output:
    """Return the output, see `Fp8Kernels.fp8_attention_forward`."""
    scores = _scores(operands, spec, arrays)
    top = jnp.max(scores, axis=-1, keepdims=True)
    numerators = jnp.exp(scores - top)
    denominators = jnp.sum(numerators, axis=-1, keepdims=True)
    log_sum = jnp.log(denominators) + top
    # Rounded before the division, as kernels do that meet the keys one after the other.
    codes = precision.quantize(numerators, scales["s"])
    out = jnp.einsum("bgrst,btgd->bsgrd", _codes(codes), _codes(operands.v))
    out = out * (codes.scale_inv * operands.v.scale_inv) / jnp.moveaxis(denominators, 3, 1)
    out = out.reshape(*operands.q.shape[:3], spec.v_head_dim)
    quantized = _as_compute(precision.quantize(out, scales["o"]), spec)
    amaxes: Amaxes = {"s": amax(numerators / denominators), "o": amax(out)}
    return Fp8Output(quantized, log_sum.reshape(spec.batch, spec.heads, -1), amaxes)


def fp8_attention_backward(
    operands: Fp8Operands,
    out: QuantizedTensor,
    log_sum: Array,
    do: QuantizedTensor,
    spec: AttentionSpec,
    arrays: AttentionArrays,
    precision: AttentionPrecision,
    scales: Scales,
) -> Fp8Gradients:
    """Return the gradients, see `Fp8Kernels.fp8_attention_backward`."""
    q, k, v = operands
    scores = _scores(operands, spec, arrays)
    s = jnp.exp(scores - log_sum.reshape(*scores.shape[:4], 1))
    s_codes = precision.quantize(s, scales["s"])
    grouped = _codes(do).reshape(*do.shape[:2], spec.groups, -1, spec.v_head_dim)
    dv = jnp.einsum("bgrst,bsgrd->btgd", _codes(s_codes), grouped) * (s_codes.scale_inv * do.scale_inv)
    ds = jnp.einsum("bsgrd,btgd->bgrst", grouped, _codes(v)) * (do.scale_inv * v.scale_inv)
    # The sum of s · ds over keys, as cuDNN has it: of the quantized output and its quantized gradient.
    mean = jnp.sum(_codes(out) * _codes(do), axis=-1) * (out.scale_inv * do.scale_inv)
    mean = mean.swapaxes(1, 2).reshape(*s.shape[:4], 1)
    # "dp" includes the softmax's derivative and the scale, under which the gradient has about the queries' size.
    dp = (ds - mean) * s * spec.scale
    codes = precision.quantize(dp, scales["dp"])
    dq = jnp.einsum("bgrst,btgd->bsgrd", _codes(codes), _codes(k)) * (codes.scale_inv * k.scale_inv)
    dq = dq.reshape(q.shape)
    queries = _codes(q).reshape(*q.shape[:2], spec.groups, -1, spec.head_dim)
    dk = jnp.einsum("bgrst,bsgrd->btgd", _codes(codes), queries) * (codes.scale_inv * q.scale_inv)
    amaxes: Amaxes = {"dp": amax(dp), "dq": amax(dq), "dk": amax(dk), "dv": amax(dv)}
    return Fp8Gradients(
        _as_compute(precision.quantize(dq, scales["dq"]), spec),
        _as_compute(precision.quantize(dk, scales["dk"]), spec),
        _as_compute(precision.quantize(dv, scales["dv"]), spec),
        amaxes,
    )


def _scores(operands: Fp8Operands, spec: AttentionSpec, arrays: AttentionArrays) -> Array:
    """Return the scaled scores, fp32 ``[b, g, r, sq, skv]``, minus infinity where masked out."""
    q, k, _ = operands
    scores, masked = scores_of(_codes(q), _codes(k), spec, arrays)
    scores = scores * (q.scale_inv * k.scale_inv)
    return scores if masked is None else jnp.where(masked, -jnp.inf, scores)


def _codes(x: QuantizedTensor) -> Array:
    """Return the FP8 values without their scale, fp32."""
    # Without the barrier XLA drops the cast to FP8 and back as a pair, and nothing is quantized.
    return jax.lax.optimization_barrier(x.data).astype(jnp.float32)


def _as_compute(x: QuantizedTensor, spec: AttentionSpec) -> QuantizedTensor:
    """Return a tensor that was quantized from fp32 as one of the compute dtype."""
    return QuantizedTensor(data=x.data, scale_inv=x.scale_inv, dtype=spec.dtype)
