"""The linear transformation and its quantized form."""

from __future__ import annotations

import functools
from typing import Any

import jax

from jax_te.ops.backend import BackendName, primitives, select
from jax_te.ops.gemm import GemmSpec, dgrad_wgrad, fprop, gemm_spec, quantize_gradient
from jax_te.parallel import auto_region
from jax_te.quantize import GemmQuantizers, GemmState
from jax_te.recipe import Recipe
from jax_te.typing import Array, LogicalAxes


def dense(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    *,
    recipe: Recipe | None = None,
    state: GemmState | None = None,
    out_axes: LogicalAxes | None = None,
    kernel_axes: LogicalAxes | None = None,
    backend: BackendName | None = None,
) -> Array:
    """``x @ kernel + bias``, with its three GEMMs (forward, input gradient, kernel gradient) quantized by ``recipe``.

    Args:
        x: ``[..., k]`` fp32, bf16 or fp16: the compute dtype.
        kernel: ``[k, *n]`` in any float dtype; without a recipe it is cast to the compute dtype.
        bias: ``[*n]`` or None.
        recipe: None for high precision. FP8 needs ``k``, ``prod(n)`` and the number of tokens to be multiples of 16.
        state: the recipe's state, if it has any; its gradient is its next value.
        out_axes: logical axes of the result; required on a mesh with Explicit axes.
        kernel_axes: logical axes of the kernel, which its gradient is constrained to.
        backend: None for the ambient one, see `use_backend`.

    Returns:
        ``[..., *n]`` in the dtype of ``x``. The gradient of ``kernel`` is accumulated in fp32 and has the kernel's
        dtype.

    Raises:
        ValueError: for shapes that do not fit.
        QuantizerStateError: if the recipe has state and none is given.
        BackendUnavailableError: if the backend asked for cannot run it.

    Source: ``transformer_engine.jax.dense.dense``.

    >>> import jax.numpy as jnp
    >>> from jax_te.recipe import Float8CurrentScaling
    >>> dense(jnp.ones((2, 8, 32)), jnp.ones((32, 16)), recipe=Float8CurrentScaling()).shape
    (2, 8, 16)
    """
    name = select("dense", recipe=recipe, backend=backend)
    spec = gemm_spec(
        "dense", x.shape, kernel, bias, recipe=recipe, backend=name, out_axes=out_axes, kernel_axes=kernel_axes
    )
    GemmQuantizers(recipe, state)  # raises for a missing state
    return auto_region(functools.partial(_dense, spec), out_axes)(x, kernel, bias, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(spec: GemmSpec, x: Array, kernel: Array, bias: Array | None, state: GemmState | None) -> Array:
    return _forward(spec, x, kernel, bias, state)[0]


def _forward(
    spec: GemmSpec, x: Array, kernel: Array, bias: Array | None, state: GemmState | None
) -> tuple[Array, tuple[Any, ...]]:
    run, quantizers = primitives(spec.backend), GemmQuantizers(spec.recipe, state)
    x_q, x_amax = run.quantize_operand(x, *quantizers["x"], axis=-1)
    y, kernel_q, kernel_amax = fprop(run, spec, quantizers, x_q, kernel, bias)
    return y, (run.keep_x(x_q), run.keep_kernel(kernel_q), x_amax, kernel_amax, state)


def _backward(spec: GemmSpec, saved: tuple[Any, ...], g: Array) -> tuple[Any, ...]:
    x_q, kernel_q, x_amax, kernel_amax, state = saved
    run, quantizers = primitives(spec.backend), GemmQuantizers(spec.recipe, state)
    g_q, dbias, g_amax = quantize_gradient(run, spec, quantizers, g)
    dx, dkernel = dgrad_wgrad(run, spec, x_q, kernel_q, g_q)
    return dx, dkernel, dbias, quantizers.next_state({"x": x_amax, "kernel": kernel_amax, "grad": g_amax})


_dense.defvjp(_forward, _backward)
