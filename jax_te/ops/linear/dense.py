"""The linear transformation and its quantized form."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jax_te.ops.backend import BackendName, select
from jax_te.ops.linear.gemm import GemmSpec, LinearGemms, cotangents, gemm_spec
from jax_te.ops.linear.plan import gemm_ranks, kernel_layout, place_linear
from jax_te.ops.linear.quantize_kernel import ready_kernel
from jax_te.ops.linear.split_gemms import linear_gemms
from jax_te.quantize import GemmState, QuantizedKernel
from jax_te.recipe import Recipe
from jax_te.sharding import auto_region
from jax_te.sharding.internal import PER_RANK, WHOLE, on_ranks, place
from jax_te.typing import Array, LogicalAxes


def dense(
    x: Array,
    kernel: Array | QuantizedKernel,
    bias: Array | None = None,
    *,
    recipe: Recipe | None = None,
    state: GemmState | None = None,
    out_axes: LogicalAxes | None = None,
    kernel_axes: LogicalAxes | None = None,
    x_axes: LogicalAxes | None = None,
    gradient: Array | None = None,
    save_original_input: bool = False,
    name: str | None = None,
    backend: BackendName | None = None,
) -> Array:
    """``x @ kernel + bias``, with its three GEMMs (forward, input gradient, kernel gradient) quantized by ``recipe``.

    Args:
        x: ``[..., k]`` fp32, bf16 or fp16: the compute dtype.
        kernel: ``[k, *n]`` in any float dtype; without a recipe it is cast to the compute dtype. Or the same quantized
            beforehand, see `quantize_kernel`.
        bias: ``[*n]`` or None.
        recipe: None for high precision. FP8 needs ``k``, ``prod(n)`` and the number of tokens to be multiples of 16
            (``recipe.alignment``).
        state: the recipe's state, if it has any; its gradient is its next value.
        out_axes: logical axes of the result; required on a mesh with Explicit axes.
        kernel_axes: logical axes of the kernel, and of its gradient. With both of these named, a mesh's devices each
            run the GEMMs of their parts, and tell each other what `GemmRanks` says.
        x_axes: logical axes of the input. None: those of the result's leading axes, and ``"hidden"`` or the kernel's
            first.
        gradient: ``[k, *n]``, what is differentiated in place of the kernel: nothing reads its values, the kernel's
            gradient comes out as its gradient, in its dtype.
        save_original_input: keep ``x`` itself for backward, and quantize it there, instead of its quantized copy:
            less memory where ``x`` is alive anyway. Not with delayed scaling.
        name: under which the quantized tensors are observed, see `observe_quantization`.
        backend: None for the ambient one, see `use_backend`.

    Returns:
        ``[..., *n]`` in the dtype of ``x``. The gradient of ``kernel`` is accumulated in fp32 and has the kernel's
        dtype.

    Raises:
        ValueError: for shapes that do not fit.
        QuantizerStateError: if the recipe has state and none is given.
        TypeError: if a quantized kernel is differentiated and no ``gradient`` is given.
        BackendUnavailableError: if the backend asked for cannot run it.

    Source: ``transformer_engine.jax.dense.dense``.

    >>> import jax.numpy as jnp
    >>> from jax_te.recipe import Float8CurrentScaling
    >>> dense(jnp.ones((2, 8, 32)), jnp.ones((32, 16)), recipe=Float8CurrentScaling()).shape
    (2, 8, 16)
    """
    kernel = ready_kernel(kernel, gradient, recipe)
    ranks = gemm_ranks(
        x.shape, kernel, x_axes=x_axes, kernel_axes=kernel_axes, out_axes=out_axes, recipe=recipe, state=state
    )
    chosen = select("dense", recipe=recipe, backend=backend, ranks=ranks)
    spec = gemm_spec(
        "dense",
        x.shape,
        kernel,
        bias,
        recipe=recipe,
        backend=chosen,
        out_axes=out_axes,
        kernel_axes=kernel_axes,
        x_dtype=x.dtype,
        gradient=gradient,
        save_original_input=save_original_input,
        name=name,
        ranks=ranks,
    )
    LinearGemms(spec, state)  # raises for a missing state
    if spec.ranks is None:
        return auto_region(functools.partial(_dense, spec), out_axes)(x, kernel, bias, state, gradient)
    x = place(x, spec.ranks.x, spec.ranks.mesh)
    return _dense(spec, x, *place_linear(spec.ranks, kernel, bias, state), gradient)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(
    spec: GemmSpec,
    x: Array,
    kernel: Array | QuantizedKernel,
    bias: Array | None,
    state: GemmState | None,
    gradient: Array | None,
) -> Array:
    return _forward(spec, x, kernel, bias, state, gradient)[0]


def _forward(
    spec: GemmSpec,
    x: Array,
    kernel: Array | QuantizedKernel,
    bias: Array | None,
    state: GemmState | None,
    gradient: Array | None,
) -> tuple[Array, tuple[Any, ...]]:
    arrays, ranks = (x, kernel, bias, state), spec.ranks
    if ranks is None:
        y, saved = _run(spec, *arrays)
    else:
        layouts = (ranks.x, kernel_layout(kernel, ranks.kernel), ranks.bias, WHOLE)
        y, saved = on_ranks(_run, spec, ranks.mesh, layouts, (ranks.out, PER_RANK), arrays)
    return checkpoint_name(y, "gemm"), (checkpoint_name(saved, "quantized"), state, gradient)


def _run(
    spec: GemmSpec, x: Array, kernel: Array | QuantizedKernel, bias: Array | None, state: GemmState | None
) -> tuple[Array, Any]:
    gemms = linear_gemms(spec, state)
    x_forms, x_amax = gemms.operand(x, "x", axis=-1)
    kernel_forms, kernel_amax = gemms.kernel(kernel)
    y = gemms.fprop(x_forms, kernel_forms, bias)
    return y, (gemms.keep(x_forms, kernel_forms, x), x_amax, kernel_amax)


def _backward(spec: GemmSpec, kept: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    saved, state, gradient = kept
    ranks = spec.ranks
    if ranks is None:
        dx, dkernel, dbias, next_state = _run_backward(spec, saved, state, g)
    else:
        dx, dkernel, dbias, next_state = on_ranks(
            _run_backward,
            spec,
            ranks.mesh,
            (PER_RANK, WHOLE, ranks.out),
            (ranks.x, ranks.kernel, ranks.bias, WHOLE),
            (saved, state, g),
        )
    dkernel, dgradient = cotangents(spec, dkernel, gradient)
    return dx, dkernel, dbias, next_state, dgradient


def _run_backward(spec: GemmSpec, saved: Any, state: GemmState | None, g: Array) -> tuple[Any, ...]:
    operands, x_amax, kernel_amax = saved
    gemms = linear_gemms(spec, state)
    gemms.begin_backward(g)
    g_forms, dbias, g_amax = gemms.gradient(g)
    dx, dkernel = gemms.backward(operands, g_forms)
    return dx, dkernel, dbias, gemms.next_state({"x": x_amax, "kernel": kernel_amax, "grad": g_amax})


_dense.defvjp(_forward, _backward)
