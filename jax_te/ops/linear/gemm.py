"""The three GEMMs of a linear layer, shared by every op that has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from jax_te.ops.backend import primitives
from jax_te.ops.linear.plan import GemmRanks
from jax_te.quantize import (
    ROLES,
    GemmQuantizers,
    GemmState,
    Observer,
    QuantizedKernel,
    Quantizer,
    TensorRole,
    quantizer_for,
)
from jax_te.quantize.internal import current_observer
from jax_te.recipe import DelayedScaling, Recipe
from jax_te.sharding import constrain
from jax_te.sharding.internal import RankTree
from jax_te.typing import Array, DTypeLike, LogicalAxes

Gemm = Literal["fprop", "dgrad", "wgrad"]
Reduce = Callable[[Array], Array]
_GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
_READERS: dict[TensorRole, tuple[Gemm, Gemm]] = {
    "x": ("fprop", "wgrad"),
    "kernel": ("fprop", "dgrad"),
    "grad": ("dgrad", "wgrad"),
}


@dataclass(frozen=True, kw_only=True)
class GemmSpec:
    """Static facts about one linear layer inside an op: hashable, so that it can be a non-differentiated argument.

    ``x_dtype`` is the compute dtype, ``gradient_dtype`` the kernel gradient's, ``kernel_rank`` the kernel's number of
    axes. ``name`` and ``observer`` say under which name the layer's quantized tensors are observed, and by whom.
    ``ranks`` says how the GEMMs are split over a mesh where the op runs on each device by itself; None: on one device,
    or where the compiler splits them.
    """

    recipe: Recipe | None
    backend: str
    out_axes: LogicalAxes | None
    kernel_axes: LogicalAxes | None
    x_dtype: DTypeLike
    gradient_dtype: DTypeLike
    kernel_rank: int
    kernel_quantized: bool
    bias_dtype: DTypeLike | None
    save_original_input: bool = False
    name: str | None = None
    observer: Observer | None = None
    ranks: GemmRanks | None = None

    def overridden(self, gemm: Gemm) -> bool:
        """Whether the recipe leaves this GEMM in high precision."""
        return self.recipe is not None and self.recipe.override_linear_precision[_GEMMS.index(gemm)]

    def precise(self, gemm: Gemm) -> bool:
        """Whether this GEMM must promote its partial sums to fp32 on the way."""
        return self.recipe is not None and getattr(self.recipe, f"fp8_gemm_{gemm}").use_split_accumulator


def gemm_spec(
    op: str,
    x_shape: tuple[int, ...],
    kernel: Array | QuantizedKernel,
    bias: Array | None,
    *,
    recipe: Recipe | None,
    backend: str,
    out_axes: LogicalAxes | None,
    kernel_axes: LogicalAxes | None,
    x_dtype: DTypeLike,
    gradient: Array | None = None,
    save_original_input: bool = False,
    name: str | None = None,
    ranks: GemmRanks | str | None = None,
) -> GemmSpec:
    """The spec of ``x [..., k] @ kernel [k, *n] + bias [*n]``.

    Raises:
        ValueError: for shapes that do not go together, sizes that the recipe's GEMMs cannot take, or
            ``save_original_input`` under delayed scaling.
    """
    if kernel.ndim < 2 or x_shape[-1:] != kernel.shape[:1]:
        raise ValueError(
            f"{op}: input {x_shape} and kernel {kernel.shape} do not go together; they must be [..., k] and [k, *n]"
        )
    if bias is not None and bias.shape != kernel.shape[1:]:
        raise ValueError(f"{op}: bias {bias.shape} must have the kernel's output shape {kernel.shape[1:]}")
    if isinstance(ranks, str) and isinstance(kernel, QuantizedKernel) and isinstance(kernel.form, RankTree):
        raise ValueError(
            f"{op}: its kernel was quantized on each device of a mesh, and here the devices cannot run it by "
            f"themselves: {ranks}. Quantize it again where it is used (is_first_microbatch=None)"
        )
    if recipe is not None:
        _check_alignment(op, recipe, x_shape, kernel.shape)
    if save_original_input and isinstance(recipe, DelayedScaling):
        raise ValueError(
            f"{op}: save_original_input quantizes the input again in backward, which would see another scale under "
            "DelayedScaling; use Float8CurrentScaling or a block recipe, or leave it off"
        )
    return GemmSpec(
        recipe=recipe,
        backend=backend,
        out_axes=out_axes,
        kernel_axes=kernel_axes,
        x_dtype=x_dtype,
        gradient_dtype=kernel.dtype if gradient is None else gradient.dtype,
        kernel_rank=kernel.ndim,
        kernel_quantized=isinstance(kernel, QuantizedKernel),
        bias_dtype=None if bias is None else bias.dtype,
        save_original_input=save_original_input and recipe is not None,
        name=name,
        observer=current_observer(),
        ranks=ranks if isinstance(ranks, GemmRanks) else None,
    )


def _check_alignment(op: str, recipe: Recipe, x_shape: tuple[int, ...], kernel_shape: tuple[int, ...]) -> None:
    quantizers = [quantizer_for(recipe, role) for role in ROLES]
    multiple = max((quantizer.alignment for quantizer in quantizers if quantizer is not None), default=1)
    sizes = {
        "token count": prod(x_shape[:-1]),
        "input size": kernel_shape[0],
        "output size": prod(kernel_shape[1:]),
    }
    for name, size in sizes.items():
        if size % multiple:
            raise ValueError(
                f"{op} under recipe {recipe.name!r}: {name} {size} must be a multiple of {multiple} (the next is "
                f"{size + -size % multiple}); input {x_shape}, kernel {kernel_shape}. Change the size, or run this "
                "layer inside `with autocast(None):`"
            )


@dataclass(frozen=True, kw_only=True)
class Forms:
    """One tensor as the GEMMs that read it want it: as it is, quantized, or both."""

    plain: Any = None
    quantized: Any = None


class LinearGemms:
    """A linear layer's GEMMs and the quantization of their operands, on the backend of its spec.

    Args:
        spec: what is known beforehand.
        state: the recipe's state, if it has any.
    """

    def __init__(self, spec: GemmSpec, state: GemmState | None):
        self.spec = spec
        self.run: Any = primitives(spec.backend)
        self.quantizers = GemmQuantizers(spec.recipe, state)

    reduce: Reduce | None = None
    """What makes an amax of a device's part that of the whole tensor; None where it is that already."""

    def fuses(self, role: TensorRole) -> bool:
        """Whether whatever computes this tensor may write it as an operand at once: nobody else wants to see it."""
        quantizer, _ = self.quantizers[role]
        if quantizer is None:
            return True
        return self.spec.observer is None and self._wants(role, plain=False) and not self._wants(role, plain=True)

    def adopt(self, operand: Any, role: TensorRole) -> Forms:
        """The forms of a tensor that was written as an operand at once."""
        return Forms(plain=operand) if self.quantizers[role][0] is None else Forms(quantized=operand)

    def operand(self, x: Array, role: TensorRole, *, axis: int) -> tuple[Forms, Array | None]:
        """A tensor's forms and its amax. Rows of its matrix view end at ``axis``."""
        quantizer, scale = self.quantizers[role]
        plain = quantized = x_amax = None
        if quantizer is None or self._wants(role, plain=True):
            plain, _ = self.run.quantize_operand(x, None, None, axis=axis)
        if quantizer is not None and self._wants(role, plain=False):
            self.observe(x, role, quantizer, scale, axis=axis)
            quantized, x_amax = self.run.quantize_operand(x, quantizer, scale, axis=axis, reduce=self.reduce)
        return Forms(plain=plain, quantized=quantized), x_amax

    def kernel(self, kernel: Array | QuantizedKernel) -> tuple[Forms, Array | None]:
        """The kernel's forms and its amax; a quantized kernel is taken as it is."""
        if not isinstance(kernel, QuantizedKernel):
            return self.operand(kernel, "kernel", axis=1)
        if not self._wants("kernel", plain=True):
            return Forms(quantized=kernel.operand), kernel.amax
        plain, _ = self.run.quantize_operand(kernel.dequantize(), None, None, axis=1)
        return Forms(plain=plain, quantized=kernel.operand), kernel.amax

    def begin_backward(self, g: Array) -> None:
        """Backward of the op that the GEMMs are part of begins, with its output's gradient."""

    def gradient(self, g: Array) -> tuple[Forms, Array | None, Array | None]:
        """The output gradient's forms, the bias gradient, the amax."""
        spec, run = self.spec, self.run
        g = constrain(g, spec.out_axes)
        axis = g.ndim - spec.kernel_rank + 1
        if self.fuses("grad"):
            operand, dbias, g_amax = run.quantize_dbias(
                g, *self.quantizers["grad"], axis=axis, bias_dtype=spec.bias_dtype, reduce=self.reduce
            )
            return self.adopt(operand, "grad"), self.bias_gradient(dbias), g_amax
        _, dbias, _ = run.quantize_dbias(g, None, None, axis=axis, bias_dtype=spec.bias_dtype)
        forms, g_amax = self.operand(g, "grad", axis=axis)
        return forms, self.bias_gradient(dbias), g_amax

    def fprop(self, x: Forms, kernel: Forms, bias: Array | None) -> Array:
        """``x @ kernel + bias``."""
        y = self.run.gemm_fprop(self._pick(x, "fprop"), self._pick(kernel, "fprop"), bias, self.spec.precise("fprop"))
        return constrain(y, self.spec.out_axes)

    def keep(self, x: Forms, kernel: Forms, original: Array | None = None) -> tuple[Any, Any]:
        """What backward needs of input and kernel. ``original`` is the input itself, for ``save_original_input``."""
        if self.spec.save_original_input and not self.spec.overridden("wgrad"):
            kept_x = original
        else:
            kept_x = self.run.keep_x(self._pick(x, "wgrad"))
        return kept_x, self.kept_kernel(kernel)

    def kept_kernel(self, kernel: Forms) -> Any:
        """What backward needs of the kernel."""
        return self.run.keep_kernel(self._pick(kernel, "dgrad"))

    def backward(self, kept: tuple[Any, Any], g: Forms) -> tuple[Array, Array]:
        """Gradients of input and kernel, the kernel's in its own sharding. ``kept`` is what `keep` gave."""
        spec, (kept_x, kept_kernel) = self.spec, kept
        dx = self.run.gemm_dgrad(self._pick(g, "dgrad"), kept_kernel, spec.precise("dgrad"))
        if spec.save_original_input and not spec.overridden("wgrad"):
            kept_x = self.run.keep_x(self.quantized_again(kept_x))
        dkernel = self.run.gemm_wgrad(kept_x, self._pick(g, "wgrad"), spec.gradient_dtype, spec.precise("wgrad"))
        return dx, constrain(dkernel, spec.kernel_axes)

    def quantized_again(self, x: Array) -> Any:
        """The input as an operand, in backward, for ``save_original_input``."""
        return self.run.quantize_operand(x, *self.quantizers["x"], axis=-1)[0]

    def next_state(self, amaxes: dict[TensorRole, Array | None]) -> GemmState | None:
        """The recipe's state after a call that saw these amaxes, see `GemmQuantizers.next_state`."""
        return self.quantizers.next_state(amaxes)

    def bias_gradient(self, dbias: Array | None) -> Array | None:
        """A bias gradient that something in front of the GEMMs has summed over the rows it has."""
        return dbias

    def norm_gradients(self, *gradients: Array | None) -> tuple[Array | None, ...]:
        """Gradients of what a norm in front of the GEMMs has for each feature, summed over its rows."""
        return gradients

    def observe(self, x: Array, role: TensorRole, quantizer: Quantizer, scale: Array | None, *, axis: int) -> None:
        """Report the tensor to the spec's observer, if it has one."""
        if self.spec.observer is not None:
            self.spec.observer.record(self.spec.name, role, x, quantizer, scale, axis=axis)

    def _wants(self, role: TensorRole, *, plain: bool) -> bool:
        """Whether a GEMM reads this tensor as it is, or quantized."""
        return any(self.spec.overridden(gemm) is plain for gemm in _READERS[role])

    def _pick(self, forms: Forms, gemm: Gemm) -> Any:
        return forms.plain if forms.quantized is None or self.spec.overridden(gemm) else forms.quantized


def cotangents(spec: GemmSpec, dkernel: Array, gradient: Array | None) -> tuple[Array | None, Array | None]:
    """The kernel's gradient as cotangents of the kernel and of the place given for it; None is zero."""
    if gradient is not None:
        return None, dkernel
    return (None if spec.kernel_quantized else dkernel), None
