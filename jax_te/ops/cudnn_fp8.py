"""cuDNN's FP8 attention kernels: the steps of `jax_te.ops.xla.attention_fp8` on Hopper GPUs.

JAX has these kernels without a public name, so this file, and no other, imports a private module of JAX. What it uses
is the same in the versions of `_VERSIONS`; under any other the kernels count as missing.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jax_te.ops.attention.spec import AttentionArrays, AttentionSpec
from jax_te.ops.xla.attention_fp8 import Fp8Gradients, Fp8Operands, Fp8Output, Scales
from jax_te.quantize import AttentionPrecision, QuantizedTensor
from jax_te.typing import Array

_VERSIONS = ((0, 10), (0, 11), (0, 12))
"""Versions of JAX whose private module is known. tests/ops/attention/test_cudnn_fp8.py lowers the calls."""

_OLDEST_CUDNN = 90201
_FAULTY_CUDNN = {91000: "Transformer Engine leaves out its FP8 attention"}


def unavailable() -> str | None:
    """Return the reason why the kernels cannot run here, or None."""
    if jax.default_backend() != "gpu":
        return "no GPU"
    if jax.__version_info__[:2] not in _VERSIONS:
        return (
            f"cuDNN's FP8 kernels have no public name in JAX, and are bound as jax {_words(_VERSIONS)} have them; this "
            f"is {jax.__version__}"
        )
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    if not capability.startswith("9."):
        return f"FP8 attention is for compute capability 9 (Hopper), this GPU has {capability}"
    return cudnn_lacks(_private().check_cudnn_version())


def cudnn_lacks(version: int) -> str | None:
    """Return the reason why a version of cuDNN, as a number, cannot run FP8 attention, or None.

    >>> cudnn_lacks(91000)
    'cuDNN 9.10.0: Transformer Engine leaves out its FP8 attention'
    """
    number = f"cuDNN {version // 10000}.{version // 100 % 100}.{version % 100}"
    if version < _OLDEST_CUDNN:
        return f"{number} is older than 9.2.1, the first with these FP8 kernels"
    return f"{number}: {_FAULTY_CUDNN[version]}" if version in _FAULTY_CUDNN else None


def fp8_attention_forward(
    operands: Fp8Operands, spec: AttentionSpec, arrays: AttentionArrays, precision: AttentionPrecision, scales: Scales
) -> Fp8Output:
    """Return the output, see `jax_te.ops.xla.attention_fp8.fp8_attention_forward`."""
    q, k, v = operands
    descales = (q.scale_inv, k.scale_inv, v.scale_inv, 1.0 / scales["s"])
    out, s_amax, o_amax, log_sum = _private()._dot_product_attention_fp8_fwd_p_wrapper.bind(
        q.data,
        k.data,
        v.data,
        *(_scalar(x) for x in (*descales, scales["s"], scales["o"])),
        is_training=True,
        **_options(spec),
    )
    quantized = _quantized(out, scales["o"], spec)
    return Fp8Output(quantized, log_sum, {"s": s_amax.reshape(()), "o": o_amax.reshape(())})


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
    """Return the gradients, see `jax_te.ops.xla.attention_fp8.fp8_attention_backward`."""
    q, k, v = operands
    descales = (q.scale_inv, k.scale_inv, v.scale_inv, out.scale_inv, do.scale_inv, 1.0 / scales["s"], 1.0 / scales["dp"])
    dq, dk, dv, *amaxes = _private()._dot_product_attention_fp8_bwd_p_wrapper.bind(
        q.data,
        k.data,
        v.data,
        out.data,
        do.data,
        log_sum,
        *(_scalar(x) for x in (*descales, *(scales[name] for name in ("s", "dq", "dk", "dv", "dp")))),
        **_options(spec),
    )
    return Fp8Gradients(
        _quantized(dq, scales["dq"], spec),
        _quantized(dk, scales["dk"], spec),
        _quantized(dv, scales["dv"], spec),
        dict(zip(("dq", "dk", "dv", "dp"), (amax.reshape(()) for amax in amaxes), strict=True)),  # type: ignore[arg-type]
    )


@functools.cache
def _private() -> ModuleType:
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def _options(spec: AttentionSpec) -> dict[str, Any]:
    return {
        "scale": spec.scale,
        "use_causal_mask": spec.is_causal,
        "layout": _private().AttentionLayout.BTNH.value,
    }


def _scalar(x: Array) -> Array:
    return x.astype(jnp.float32).reshape(1, 1, 1, 1)


def _quantized(data: Array, scale: Array, spec: AttentionSpec) -> QuantizedTensor:
    return QuantizedTensor(data=data, scale_inv=1.0 / scale, dtype=spec.dtype)


def _words(versions: tuple[tuple[int, int], ...]) -> str:
    names = [f"{major}.{minor}" for major, minor in versions]
    return f"{', '.join(names[:-1])} and {names[-1]}"
