"""cuDNN's FP8 attention kernels: the steps of `jax_te.ops.xla.attention_fp8` on Hopper GPUs.

JAX's functions for these kernels are private, so this file writes XLA's custom calls below them itself, by JAX's public
``ffi_call``. Their form is known from the versions of JAX in `_VERSIONS`; under any other the kernels count as missing.
No other file writes such calls by hand.

XLA builds cuDNN's graph of backward only if gradients have the dtype of the operands: with E5M2 gradients it fails with
"Input datatypes do not match". So all tensors are E4M3.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp

from jax_te._device import default_device, default_platform
from jax_te.ops.attention.fp8_types import Fp8Gradients, Fp8Operands, Fp8Output, Scales
from jax_te.ops.attention.spec import AttentionArrays, AttentionSpec
from jax_te.quantize import AttentionPrecision, AttentionTensor, QuantizedTensor, amax
from jax_te.typing import Array

_VERSIONS = ((0, 10), (0, 11), (0, 12))
"""Versions of JAX whose XLA has the calls in this form."""

_OLDEST_CUDNN = 90201
_FAULTY_CUDNN = {91000: "Transformer Engine leaves out its FP8 attention"}

_SCALAR = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32)
# XLA puts in the size of the workspace, the last result of each call.
_WORKSPACE = jax.ShapeDtypeStruct((0,), jnp.uint8)

_LONG = 65_536
"""Number of keys from which on backward runs some of the heads at a time.

With 131,072 keys a call of 32 heads took 1.55 times as long in some runs as in others, with the GPU's clocks at their
highest and its power below its limit: it seems to have waited for memory. Calls of 8 heads each took as long in every
run, and less than the fast runs of all heads (docs/attention_fp8_measured.md).
"""
_HEADS_OF_LONG_SEQUENCES = 8
"""Number of query heads of such a call, counting those of all sequences; one key/value head's are never split."""

_BY_POSITION = (0, 2, 1, 3)
"""Layout of a result ``[b, n, s, d]`` that lies in memory as ``[b, s, n, d]``."""


def unavailable() -> str | None:
    """Return the reason why the kernels cannot run here, or None."""
    if default_platform() != "gpu":
        return "no GPU"
    if jax.__version_info__[:2] not in _VERSIONS:
        return f"XLA's calls of cuDNN's FP8 attention are known of jax {_words(_VERSIONS)}, this is {jax.__version__}"
    capability = str(getattr(default_device(), "compute_capability", ""))
    if not capability.startswith("9."):
        return f"FP8 attention is for compute capability 9 (Hopper), this GPU has {capability}"
    version = _cudnn_version()
    return "the version of cuDNN is unknown: libcudnn.so.9 does not load" if version is None else cudnn_lacks(version)


def cudnn_lacks(version: int) -> str | None:
    """Return the reason why a version of cuDNN, as a number, cannot run FP8 attention, or None.

    >>> cudnn_lacks(91000)
    'cuDNN 9.10.0: Transformer Engine leaves out its FP8 attention'
    """
    number = f"cuDNN {version // 10000}.{version // 100 % 100}.{version % 100}"
    if version < _OLDEST_CUDNN:
        return f"{number} is older than 9.2.1, from which on FP8 attention takes queries, keys and values apart"
    return f"{number}: {_FAULTY_CUDNN[version]}" if version in _FAULTY_CUDNN else None


def fp8_attention_forward(
    operands: Fp8Operands, spec: AttentionSpec, arrays: AttentionArrays, precision: AttentionPrecision, scales: Scales
) -> Fp8Output:
    """Return the output, see `Fp8Kernels.fp8_attention_forward`."""
    q, k, v = operands
    shape = (spec.batch, spec.heads, spec.q_length, spec.v_head_dim)
    descales = (q.scale_inv, k.scale_inv, v.scale_inv, 1.0 / scales["s"])
    out, s_amax, o_amax, log_sum, _ = _call(
        "__cudnn$fmhaSoftmaxF8",
        (
            jax.ShapeDtypeStruct(shape, precision.dtype),
            _SCALAR,
            _SCALAR,
            jax.ShapeDtypeStruct(shape[:3], jnp.float32),
            _WORKSPACE,
        ),
        spec,
        _FORWARD_DIMENSIONS,
    )(q.data, k.data, v.data, *map(_scalar, (*descales, scales["s"], scales["o"])))
    return Fp8Output(_quantized(out, scales["o"], spec), log_sum, {"s": s_amax.reshape(()), "o": o_amax.reshape(())})


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
    parts = []
    for groups, heads in _parts_of_backward(spec):
        q, k, v = operands
        parts.append(
            _backward_of_heads(
                Fp8Operands(_of_heads(q, heads), _of_heads(k, groups), _of_heads(v, groups)),
                _of_heads(out, heads),
                log_sum[:, heads],
                _of_heads(do, heads),
                dataclasses.replace(spec, groups=groups.stop - groups.start, heads=heads.stop - heads.start),
                precision,
                scales,
            )
        )
    return parts[0] if len(parts) == 1 else _joined(parts)


def _parts_of_backward(spec: AttentionSpec) -> list[tuple[slice, slice]]:
    """Return the key/value heads of each call of backward, and their query heads.

    One call has all heads, but for long sequences, see `_LONG`.
    """
    heads_of_group = spec.heads // spec.groups
    groups_at_once = spec.groups
    if spec.kv_length >= _LONG:
        groups_at_once = max(1, _HEADS_OF_LONG_SEQUENCES // (spec.batch * heads_of_group))
    parts = []
    for first in range(0, spec.groups, groups_at_once):
        last = min(first + groups_at_once, spec.groups)
        parts.append((slice(first, last), slice(first * heads_of_group, last * heads_of_group)))
    return parts


def _of_heads(x: QuantizedTensor, heads: slice) -> QuantizedTensor:
    """Return some heads of a tensor ``[b, s, n, d]``."""
    return dataclasses.replace(x, data=x.data[:, :, heads])


def _joined(parts: list[Fp8Gradients]) -> Fp8Gradients:
    """Return the gradients of all heads, which have one scale; each amax is the largest of the parts."""

    def join(*tensors: QuantizedTensor) -> QuantizedTensor:
        return dataclasses.replace(tensors[0], data=jnp.concatenate([x.data for x in tensors], axis=2))

    dq, dk, dv = (join(*tensors) for tensors in zip(*(part[:3] for part in parts), strict=True))
    return Fp8Gradients(dq, dk, dv, jax.tree.map(lambda *amaxes: amax(jnp.stack(amaxes)), *(x.amaxes for x in parts)))


def _backward_of_heads(
    operands: Fp8Operands,
    out: QuantizedTensor,
    log_sum: Array,
    do: QuantizedTensor,
    spec: AttentionSpec,
    precision: AttentionPrecision,
    scales: Scales,
) -> Fp8Gradients:
    """Return the gradients of one call of backward's kernel."""
    q, k, v = operands
    queries = (spec.batch, spec.heads, spec.q_length, spec.head_dim)
    keys = (spec.batch, spec.groups, spec.kv_length)
    inverse = {name: 1.0 / scales[name] for name in ("s", "dp")}
    descales = (q.scale_inv, k.scale_inv, v.scale_inv, inverse["s"], out.scale_inv, do.scale_inv, inverse["dp"])
    dq, dk, dv, *amaxes, _ = _call(
        "__cudnn$fmhaSoftmaxBackwardF8",
        (
            jax.ShapeDtypeStruct(queries, precision.dtype),
            jax.ShapeDtypeStruct((*keys, spec.head_dim), precision.dtype),
            jax.ShapeDtypeStruct((*keys, spec.v_head_dim), precision.dtype),
            *(_SCALAR,) * 4,
            _WORKSPACE,
        ),
        spec,
        _BACKWARD_DIMENSIONS,
    )(
        q.data,
        k.data,
        v.data,
        out.data,
        do.data,
        log_sum,
        *map(_scalar, (*descales, *(scales[name] for name in _BACKWARD_SCALES))),
    )
    return Fp8Gradients(
        _quantized(dq, scales["dq"], spec),
        _quantized(dk, scales["dk"], spec),
        _quantized(dv, scales["dv"], spec),
        {name: largest.reshape(()) for name, largest in zip(_BACKWARD_AMAXES, amaxes, strict=True)},
    )


# The orders in which backward takes scales and gives amaxes. They are those in which XLA numbers the tensors of cuDNN's
# graph (`GetCudnnFlashAttentionBackwardF8OperationGraph`), "s" before "o" and "do" among the inverse scales, and "dp"
# before "dq" here. JAX's own function has other orders, which shows with scales other than 1.
_BACKWARD_SCALES: tuple[AttentionTensor, ...] = ("s", "dp", "dq", "dk", "dv")
_BACKWARD_AMAXES: tuple[AttentionTensor, ...] = ("dq", "dk", "dv", "dp")

# Products by the axes that they contract and those of the batch, of each operand, for arrays [b, s, n, d].
_Dimensions = dict[str, tuple[tuple[int, tuple[int, int]], tuple[int, tuple[int, int]]]]
_FORWARD_DIMENSIONS: _Dimensions = {
    "bmm1": ((3, (0, 2)), (3, (0, 2))),  # q k^T
    "bmm2": ((3, (0, 1)), (1, (0, 2))),  # s v
}
_BACKWARD_DIMENSIONS: _Dimensions = {
    "bmm1_grad_gemm1": ((2, (0, 1)), (1, (0, 2))),  # dk: dp^T q
    "bmm1_grad_gemm2": ((3, (0, 1)), (1, (0, 2))),  # dq: dp k
    "bmm2_grad_gemm1": ((2, (0, 1)), (1, (0, 2))),  # dv: s^T do
    "bmm2_grad_gemm2": ((3, (0, 2)), (3, (0, 2))),  # do v^T
}


def _call(target: str, results: tuple[Any, ...], spec: AttentionSpec, dimensions: _Dimensions) -> Any:
    """Return a function that calls cuDNN; its results ``[b, n, s, d]`` come as ``[b, s, n, d]``."""
    layouts = [_BY_POSITION if len(result.shape) == 4 and result is not _SCALAR else None for result in results]
    # Version 2 is that of calls which XLA itself knows.
    run: Any = jax.ffi.ffi_call(
        target,
        results,
        # Batches of calls, one after the other: a scale is that of one call.
        vmap_method="sequential",
        output_layouts=layouts,
        custom_call_api_version=2,
        legacy_backend_config=_config(spec, dimensions),
    )

    def call(*operands: Array) -> list[Array]:
        given = run(*operands)
        return [x if layout is None else x.transpose(layout) for x, layout in zip(given, layouts, strict=True)]

    return call


def _config(spec: AttentionSpec, dimensions: _Dimensions) -> str:
    """Return XLA's description of a call, in JSON."""
    scores = (spec.batch, spec.heads, spec.q_length, spec.kv_length)
    config: dict[str, Any] = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": spec.scale,
        "intermediate_tensor_shape": {
            "element_type": "BF16",
            "dimensions": [str(size) for size in scores],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if spec.is_causal else "NO_MASK",
    }
    for name, (lhs, rhs) in dimensions.items():
        numbers = {}
        for side, (contracting, batch) in (("lhs", lhs), ("rhs", rhs)):
            numbers[f"{side}_contracting_dimensions"] = [str(contracting)]
            numbers[f"{side}_batch_dimensions"] = [str(axis) for axis in batch]
        config[f"{name}_dot_dimension_numbers"] = numbers
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config})


@functools.cache
def _cudnn_version() -> int | None:
    # By its name, under which JAX's plugin has loaded it already.
    try:
        return int(ctypes.CDLL("libcudnn.so.9").cudnnGetVersion())
    except (OSError, AttributeError):
        return None


def _scalar(x: Array) -> Array:
    return x.astype(jnp.float32).reshape(1, 1, 1, 1)


def _quantized(data: Array, scale: Array, spec: AttentionSpec) -> QuantizedTensor:
    return QuantizedTensor(data=data, scale_inv=1.0 / scale, dtype=spec.dtype)


def _words(versions: tuple[tuple[int, int], ...]) -> str:
    names = [f"{major}.{minor}" for major, minor in versions]
    return f"{', '.join(names[:-1])} and {names[-1]}"
