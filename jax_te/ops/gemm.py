"""The three GEMMs of a linear layer, shared by every op that has one."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from types import ModuleType
from typing import Any

from jax_te.parallel import constrain
from jax_te.quantize import GemmQuantizers
from jax_te.recipe import Recipe
from jax_te.typing import Array, DTypeLike, LogicalAxes

FP8_MULTIPLE = 16
"""FP8 GEMM units take matrices whose sizes are multiples of this."""


@dataclass(frozen=True, kw_only=True)
class GemmSpec:
    """Static facts about one linear layer inside an op: hashable, so that it can be a non-differentiated argument."""

    recipe: Recipe | None
    backend: str
    out_axes: LogicalAxes | None
    kernel_axes: LogicalAxes | None
    kernel_dtype: DTypeLike
    kernel_rank: int
    bias_dtype: DTypeLike | None


def gemm_spec(
    op: str,
    x_shape: tuple[int, ...],
    kernel: Array,
    bias: Array | None,
    *,
    recipe: Recipe | None,
    backend: str,
    out_axes: LogicalAxes | None,
    kernel_axes: LogicalAxes | None,
) -> GemmSpec:
    """The spec of ``x [..., k] @ kernel [k, *n] + bias [*n]``.

    Raises:
        ValueError: for shapes that do not go together, or sizes that FP8 GEMMs cannot take.
    """
    if kernel.ndim < 2 or x_shape[-1:] != kernel.shape[:1]:
        raise ValueError(
            f"{op}: input {x_shape} and kernel {kernel.shape} do not go together; they must be [..., k] and [k, *n]"
        )
    if bias is not None and bias.shape != kernel.shape[1:]:
        raise ValueError(f"{op}: bias {bias.shape} must have the kernel's output shape {kernel.shape[1:]}")
    if recipe is not None:
        sizes = {
            "token count": prod(x_shape[:-1]),
            "input size": kernel.shape[0],
            "output size": prod(kernel.shape[1:]),
        }
        for name, size in sizes.items():
            if size % FP8_MULTIPLE:
                raise ValueError(
                    f"{op} under recipe {recipe.name!r}: {name} {size} must be a multiple of {FP8_MULTIPLE} for FP8 "
                    f"(the next is {size + -size % FP8_MULTIPLE}); input {x_shape}, kernel {kernel.shape}. Change the "
                    "size, or run this layer inside `with autocast(None):`"
                )
    return GemmSpec(
        recipe=recipe,
        backend=backend,
        out_axes=out_axes,
        kernel_axes=kernel_axes,
        kernel_dtype=kernel.dtype,
        kernel_rank=kernel.ndim,
        bias_dtype=None if bias is None else bias.dtype,
    )


def fprop(
    run: ModuleType, spec: GemmSpec, quantizers: GemmQuantizers, x_q: Any, kernel: Array, bias: Array | None
) -> tuple[Array, Any, Array | None]:
    """The output, the quantized kernel, its amax. ``run`` holds the backend's primitives, ``x_q`` is an operand."""
    kernel_q, kernel_amax = run.quantize_operand(kernel, *quantizers["kernel"], axis=1)
    return constrain(run.gemm_fprop(x_q, kernel_q, bias), spec.out_axes), kernel_q, kernel_amax


def quantize_gradient(
    run: ModuleType, spec: GemmSpec, quantizers: GemmQuantizers, g: Array
) -> tuple[Any, Array | None, Array | None]:
    """The output gradient as an operand, the bias gradient, the amax."""
    g = constrain(g, spec.out_axes)
    rows = g.ndim - spec.kernel_rank + 1
    return run.quantize_dbias(g, *quantizers["grad"], axis=rows, bias_dtype=spec.bias_dtype)


def dgrad_wgrad(run: ModuleType, spec: GemmSpec, x_q: Any, kernel_q: Any, g_q: Any) -> tuple[Array, Array]:
    """Gradients of input and kernel; the kernel's in its own dtype and sharding."""
    dx = run.gemm_dgrad(g_q, kernel_q)
    dkernel = run.gemm_wgrad(x_q, g_q, spec.kernel_dtype)
    return dx, constrain(dkernel, spec.kernel_axes)
