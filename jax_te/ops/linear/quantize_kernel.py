"""Quantizing a kernel ahead of the calls that use it."""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh

from jax_te.ops.backend import BackendName, primitives, select
from jax_te.quantize import (
    GemmQuantizers,
    GemmState,
    PackedOperand,
    QuantizedKernel,
    Quantizer,
    TensorQuantizer,
    quantize_operand,
    quantizer_for,
)
from jax_te.quantize.internal import current_observer
from jax_te.recipe import Recipe
from jax_te.sharding import auto_region, current_mesh
from jax_te.sharding.internal import PER_RANK, WHOLE, Layout, layout_of, on_ranks, rank_mesh, reduce_max
from jax_te.typing import Array, LogicalAxes


def quantize_kernel(
    kernel: Array,
    *,
    recipe: Recipe,
    state: GemmState | None = None,
    kernel_axes: LogicalAxes | None = None,
    portable: bool = False,
    backend: BackendName | None = None,
) -> QuantizedKernel:
    """A kernel in the form that the GEMMs read, for several calls with the same values.

    A call with it gives the bits that a call with the kernel itself gives, unless the recipe keeps one of the kernel's
    GEMMs in high precision: then that one reads the quantized values, too. It is no differentiable function of the
    kernel: tell the call where its gradient goes (``gradient`` of `dense`).

    Args:
        kernel: ``[k, *n]`` in any float dtype.
        recipe: the recipe of the calls.
        state: the recipe's state, if it has any.
        kernel_axes: logical axes of the kernel; required on a mesh with Explicit axes.
        portable: make it of plain arrays, which any backend reads and a checkpoint holds, instead of what this backend
            reads fastest.
        backend: of the calls; None for the ambient one.

    Raises:
        ValueError: if the recipe does not quantize kernels.
        QuantizerStateError: if the recipe has state and none is given.

    >>> import jax.numpy as jnp
    >>> from jax_te.ops import dense
    >>> from jax_te.recipe import Float8CurrentScaling
    >>> quantized = quantize_kernel(jnp.ones((32, 16)), recipe=Float8CurrentScaling())
    >>> dense(jnp.ones((16, 32)), quantized, recipe=Float8CurrentScaling()).shape
    (16, 16)
    """
    kernel, state = jax.lax.stop_gradient((kernel, state))
    quantizer, scale = GemmQuantizers(recipe, state)["kernel"]
    if quantizer is None:
        raise ValueError(f"recipe {recipe!r} keeps kernels in high precision; there is nothing to quantize")
    chosen = select("dense", recipe=recipe, backend=backend)

    def run(kernel: Array, scale: Array | None) -> tuple[Any, Array | None]:
        if portable:
            return quantize_operand(kernel, quantizer, scale, axis=1)
        return primitives(chosen).quantize_operand(kernel, quantizer, scale, axis=1)

    ranks = None if portable else _kernel_ranks(kernel, kernel_axes, quantizer, state)
    if ranks is not None:
        mesh, layout = ranks
        static = (chosen, quantizer, mesh.axis_names)
        form, amax = on_ranks(_run, static, mesh, (layout, WHOLE), (PER_RANK, WHOLE), (kernel, scale))
    else:
        operand, amax = _in_region(run, kernel, scale, kernel_axes)
        form = operand if portable else PackedOperand.of(operand)
    return QuantizedKernel(form=form, amax=amax, quantizer=quantizer, shape=kernel.shape, dtype=kernel.dtype)


def _kernel_ranks(
    kernel: Array, axes: LogicalAxes | None, quantizer: Quantizer, state: GemmState | None
) -> tuple[AbstractMesh, Layout] | None:
    """The mesh and the kernel's layout, where each device can quantize its part of the kernel by itself, and the calls
    that read it run so: see `gemm_ranks`.
    """
    mesh = rank_mesh()
    if mesh is None or axes is None or not isinstance(quantizer, TensorQuantizer) or current_observer() is not None:
        return None
    if state is not None and state["x"]["scale"].ndim > 0:
        return None
    layout = layout_of(axes, mesh)
    return None if layout.local_shape(kernel.shape, mesh) is None else (mesh, layout)


def _run(static: tuple[str, Quantizer, tuple[str, ...]], kernel: Array, scale: Array | None) -> tuple[Any, Any]:
    """On one device: its part of a kernel, quantized with the scale of the whole."""
    backend, quantizer, axes = static
    reduce = functools.partial(reduce_max, axes=axes)
    operand, amax = primitives(backend).quantize_operand(kernel, quantizer, scale, axis=1, reduce=reduce)
    return operand, None if amax is None else reduce(amax)


def _in_region(run: Any, kernel: Array, scale: Array | None, axes: LogicalAxes | None) -> tuple[Any, Array | None]:
    """``run``, with the results that have the kernel's shape sharded like it, and scales replicated."""
    if current_mesh() is None:
        return run(kernel, scale)
    abstract = jax.eval_shape(run, kernel, scale)
    out_axes = [axes if leaf.shape == kernel.shape else (None,) * leaf.ndim for leaf in jax.tree.leaves(abstract)]
    leaves = auto_region(lambda *args: jax.tree.leaves(run(*args)), out_axes)(kernel, scale)
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def ready_kernel(
    kernel: Array | QuantizedKernel, gradient: Array | None, recipe: Recipe | None
) -> Array | QuantizedKernel:
    """The kernel as a call under ``recipe`` can use it.

    Raises:
        ValueError: if it was quantized for another recipe.
        TypeError: when differentiated, if its gradient has no place to go.
    """
    if not isinstance(kernel, QuantizedKernel):
        return kernel
    if gradient is None:
        kernel = cast(QuantizedKernel, _without_gradient(kernel))
    quantizer = quantizer_for(recipe, "kernel")
    if quantizer is None:
        return jax.lax.stop_gradient(kernel.dequantize())
    if quantizer != kernel.quantizer:
        raise ValueError(
            f"the kernel was quantized with {kernel.quantizer}, and the recipe of this call needs {quantizer}. "
            "Quantize it again under this recipe (is_first_microbatch=True, or quantize_parameters)"
        )
    return kernel


@functools.partial(jax.custom_jvp)
def _without_gradient(kernel: QuantizedKernel) -> QuantizedKernel:
    return kernel


@functools.partial(_without_gradient.defjvp, symbolic_zeros=True)
def _refuse(primals: tuple[QuantizedKernel], tangents: tuple[Any]) -> Any:
    (kernel,) = primals
    if any(not isinstance(leaf, SymbolicZero) for leaf in jax.tree.leaves(tangents)):
        raise TypeError(
            "a quantized kernel has no gradient: its values are FP8 or FP4. Differentiate with make_train_step, which "
            "takes the gradient of the fp32 masters, or keep kernels out of what you differentiate"
        )
    return kernel, tangents[0]
