"""Conversion of our quantizers to Transformer Engine's quantizer objects, and access to their amaxes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import transformer_engine.jax.quantize as te_quantize
from transformer_engine.jax.sharding import MeshResource, global_shard_guard

from jax_te.errors import BackendUnavailableError
from jax_te.ops.te.capabilities import is_te_quantizer
from jax_te.quantize import (
    MXQuantizer,
    NVFP4Quantizer,
    Quantizer,
    TensorQuantizer,
    precision_of,
    rounding_key,
)
from jax_te.recipe import Recipe
from jax_te.typing import Array, DTypeLike


@contextlib.contextmanager
def inside_te() -> Iterator[None]:
    """Return a context that TE's code needs around it while it is traced.

    It reads a global description of the mesh (no axis of it is in use here), relies on JAX's implicit promotions, which
    users may have turned off, and warns about axis names that it uses itself.
    """
    with (
        global_shard_guard(MeshResource()),
        jax.numpy_rank_promotion("allow"),
        jax.numpy_dtype_promotion("standard"),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "TransformerEngine logical axes", DeprecationWarning)
        yield


@jax.custom_batching.custom_vmap
def unmapped(x: Array) -> Array:
    """Return ``x``, which TE's kernels are to quantize or multiply: under ``jax.vmap``, which these lack, this raises.

    Raises:
        BackendUnavailableError: under ``jax.vmap``.
    """
    return x


@unmapped.def_vmap
def _of_mapped(axis_size: int, batched: list[bool], x: Array) -> tuple[Array, bool]:
    raise BackendUnavailableError(
        f"jax.vmap maps over a call of {axis_size} elements that Transformer Engine's kernels were to run, and those "
        "that quantize and multiply cannot be mapped. Give the layer the whole batch without jax.vmap (its inputs have "
        "any number of leading axes), or call it inside `with jax_te.ops.use_backend('xla'):`"
    )


def recipe_supports(recipe: Recipe) -> tuple[bool, str]:
    """Return whether the device has the hardware for a recipe, and if not the reason."""
    for quantizer in precision_of(recipe).quantizers:
        if quantizer is not None and is_te_quantizer(quantizer):
            ok, reason = te_quantize.helper.is_scaling_mode_supported(_mode(quantizer), gpu_id=0)
            if not ok:
                return False, reason
    return True, "TE supports it on this device"


def _mode(quantizer: Quantizer) -> Any:
    """Return TE's scaling mode of a quantizer that `is_te_quantizer`."""
    mode = te_quantize.ScalingMode
    if isinstance(quantizer, MXQuantizer):
        return mode.MXFP8_1D_SCALING
    if isinstance(quantizer, NVFP4Quantizer):
        return mode.NVFP4_2D_SCALING if quantizer.two_dimensional else mode.NVFP4_1D_SCALING
    assert isinstance(quantizer, TensorQuantizer)
    return mode.CURRENT_TENSOR_SCALING if quantizer.scaling == "current" else mode.DELAYED_TENSOR_SCALING


def te_quantizer(quantizer: Quantizer | None, scale: Array | None, x: Array | None = None) -> Any:
    """Return TE's equivalent of ``quantizer``, or None.

    Hopper's FP8 GEMM contracts the last axis of both operands only, so each tensor is kept rowwise and transposed where
    the hardware needs it. MXFP8 and NVFP4 are quantized once for each direction. Stochastic rounding takes its random
    state from ``x``, the tensor as a matrix.
    """
    if quantizer is None:
        return None
    mode, layouts = _mode(quantizer), te_quantize.QuantizeLayout
    if isinstance(quantizer, MXQuantizer):
        return te_quantize.QuantizerFactory.create(1, mode, quantizer.dtype, layouts.ROWWISE_COLWISE)
    if isinstance(quantizer, NVFP4Quantizer):
        return te_quantize.QuantizerFactory.create(
            1,
            mode,
            quantizer.dtype,
            layouts.ROWWISE_COLWISE,
            use_rht=quantizer.hadamard,
            stochastic_rounding_rng_state=_rounding_state(x) if quantizer.stochastic_rounding else None,
        )
    assert isinstance(quantizer, TensorQuantizer)
    both = not te_quantize.is_fp8_gemm_with_all_layouts_supported()
    layout = layouts.ROWWISE_COLWISE if both else layouts.ROWWISE
    if quantizer.scaling == "current":
        return te_quantize.QuantizerFactory.create(1, mode, quantizer.dtype, layout)
    assert scale is not None
    # The history is a probe of two slots: TE writes the amax into slot 0 and rolls, so that it ends in slot 1.
    probe = jnp.zeros((2,), jnp.float32)
    return te_quantize.QuantizerFactory.create(
        1, mode, quantizer.dtype, layout, scale=scale.reshape(1), amax_history=probe
    )


def _rounding_state(x: Array | None) -> Array:
    """TE's random state for one device, ``u32[1, 4]``."""
    assert x is not None
    # A threefry key has two words, TE's state four.
    words = jax.random.key_data(rounding_key(x))
    return jnp.concatenate([words, jnp.zeros((2,), jnp.uint32)])[None]


def seen_amax(quantizer: Any) -> Array | None:
    """Return the amax that a delayed quantizer saw, fp32 ``[]``; None for the other kinds, which report none."""
    if isinstance(quantizer, te_quantize.DelayedScaleQuantizer):
        return quantizer.amax_history[1]
    return None


def two_sided(quantizer: Any, rows: Array, columns: Array, scale_inv: Array, *, dtype: DTypeLike, axis: int) -> Any:
    """Return TE's tensor object for the output of one of its kernels: rowwise and transposed values with one scale."""
    return te_quantize.ScaledTensorFactory.create(
        data=rows,
        scale_inv=scale_inv,
        colwise_data=columns,
        colwise_scale_inv=scale_inv,
        scaling_mode=quantizer.scaling_mode,
        dq_dtype=dtype,
        q_layout=quantizer.q_layout,
        data_layout=quantizer.get_data_layout(),
        flatten_axis=axis,
    )
