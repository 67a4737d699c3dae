"""The GEMMs of a linear layer on one device of a mesh, with what the devices tell each other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_te.ops.linear.gemm import Forms, GemmSpec, LinearGemms
from jax_te.ops.linear.plan import GemmRanks
from jax_te.quantize import ROLES, GemmState, QuantizedKernel, TensorQuantizer, TensorRole
from jax_te.sharding.internal import MeshAxes, gather, reduce_max, reduce_sum
from jax_te.typing import Array


def linear_gemms(spec: GemmSpec, state: GemmState | None) -> LinearGemms:
    """The GEMMs of ``spec``, on one device or split."""
    return LinearGemms(spec, state) if spec.ranks is None else SplitGemms(spec, spec.ranks, state)


class SplitGemms(LinearGemms):
    """As `LinearGemms`, inside of `jax_te.sharding.shards.on_ranks`.

    A tensor with one scale is quantized in parts, with the amax of the whole, and joined in FP8. Others are joined
    first. What a kernel is joined to is dropped after forward and joined again in backward.

    Args:
        spec, state: as there.
        ranks: how the GEMMs are split.

    Source: Shoeybi et al. 2019 (tensor parallelism), Korthikanti et al. 2022 (sequence parallelism), Rajbhandari et al.
    2020 (ZeRO-3).
    """

    def __init__(self, spec: GemmSpec, ranks: GemmRanks, state: GemmState | None):
        super().__init__(spec, state)
        self.ranks = ranks
        self._held: Any = None  # the device's part of the kernel, for backward, if it was joined
        self._after: Array | None = None

    def reduce(self, amax: Array) -> Array:  # type: ignore[override]
        """The amax of a whole tensor from that of a part."""
        return reduce_max(amax, self.ranks.mesh.axis_names)

    def fuses(self, role: TensorRole) -> bool:
        """As there, and not where the tensor is joined before it is quantized."""
        return super().fuses(role) and (not any(self._gathers(role)) or self._in_parts(role))

    def adopt(self, operand: Any, role: TensorRole) -> Forms:
        """As there, of a part of the tensor."""
        if any(self._gathers(role)):
            operand = self.run.gather_rows(operand, self._gathers(role))
        return super().adopt(operand, role)

    def operand(self, x: Array, role: TensorRole, *, axis: int) -> tuple[Forms, Array | None]:
        """As there, of a part of the tensor."""
        gathers = self._gathers(role)
        if not any(gathers):
            return super().operand(x, role, axis=axis)
        if not self._in_parts(role):
            return super().operand(gather(x, gathers), role, axis=axis)
        forms, amax = super().operand(x, role, axis=axis)
        join = self.run.gather_rows
        return Forms(
            plain=None if forms.plain is None else join(forms.plain, gathers),
            quantized=None if forms.quantized is None else join(forms.quantized, gathers),
        ), amax

    def kernel(self, kernel: Array | QuantizedKernel) -> tuple[Forms, Array | None]:
        """As there, of the part that the device holds."""
        gathers = self._kernel_gathers
        if not any(gathers):
            return super().kernel(kernel)
        if not isinstance(kernel, QuantizedKernel) and not self._in_parts("kernel"):
            self._held = kernel
            return super().operand(gather(kernel, gathers), "kernel", axis=1)
        if not isinstance(kernel, QuantizedKernel) and self.quantizers["kernel"][0] is None:
            kernel = kernel.astype(self.spec.x_dtype)
        forms, amax = super().kernel(kernel)
        self._held = self.run.keep_kernel(self._pick(forms, "dgrad"))
        join = self.run.gather_kernel
        return Forms(
            plain=None if forms.plain is None else join(forms.plain, gathers, "fprop"),
            quantized=None if forms.quantized is None else join(forms.quantized, gathers, "fprop"),
        ), amax

    def fprop(self, x: Forms, kernel: Forms, bias: Array | None) -> Array:
        """``x @ kernel + bias``; where the sum is split, its parts are added up, and the bias once after them."""
        ranks = self.ranks
        if not ranks.inner:
            return super().fprop(x, kernel, bias)
        y = reduce_sum(super().fprop(x, kernel, None), ranks.inner, ranks.out_scatter)
        return y if bias is None else y + jnp.expand_dims(bias.astype(y.dtype), tuple(range(y.ndim - bias.ndim)))

    def kept_kernel(self, kernel: Forms) -> Any:
        """As there; of a kernel that was joined, the part that the device holds."""
        return super().kept_kernel(kernel) if self._held is None else self._held

    def bias_gradient(self, dbias: Array | None) -> Array | None:
        """As there, over the rows of all devices."""
        return None if dbias is None else reduce_sum(dbias, _all(self.ranks.out.dims[: self.ranks.lead]))

    def backward(self, kept: tuple[Any, Any], g: Forms) -> tuple[Array, Array]:
        """As there: the device's parts of both gradients."""
        ranks, (kept_x, kept_kernel) = self.ranks, kept
        dx, dkernel = super().backward((kept_x, self._joined_again(kept_kernel)), g)
        return (
            reduce_sum(dx, _all(ranks.features), ranks.x_gather),
            reduce_sum(dkernel, _all(ranks.rows), ranks.kernel_gather),
        )

    def quantized_again(self, x: Array) -> Any:
        """As there, of a part of the input."""
        return self.operand(x, "x", axis=-1)[0].quantized

    def next_state(self, amaxes: dict[TensorRole, Array | None]) -> GemmState | None:
        """As there, with the amaxes of the whole tensors."""
        if self.quantizers.state is not None:
            seen = [amax for role in ROLES if (amax := amaxes[role]) is not None]
            whole = iter(self.reduce(jnp.stack(seen)) if seen else ())  # one collective for all
            amaxes = {role: None if amaxes[role] is None else next(whole) for role in ROLES}
        return super().next_state(amaxes)

    def norm_gradients(self, *gradients: Array | None) -> tuple[Array | None, ...]:
        """As there, over the rows of all devices."""
        axes = _all(self.ranks.x.dims[: self.ranks.lead])
        return tuple(None if gradient is None else reduce_sum(gradient, axes) for gradient in gradients)

    @property
    def _kernel_gathers(self) -> tuple[MeshAxes, ...]:
        """What the kernel is joined along. One that was quantized beforehand in blocks was joined then."""
        joined = self.spec.kernel_quantized and not self._in_parts("kernel")
        return () if joined else self.ranks.kernel_gather

    def _gathers(self, role: TensorRole) -> tuple[MeshAxes, ...]:
        """What a tensor is joined along before the GEMMs; the kernel has a way of its own."""
        return {"x": self.ranks.x_gather, "grad": self.ranks.out_scatter, "kernel": ()}[role]

    def _in_parts(self, role: TensorRole) -> bool:
        """Whether the parts of a tensor, quantized each by itself, are those of the quantized tensor."""
        quantizer, _ = self.quantizers[role]
        return quantizer is None or isinstance(quantizer, TensorQuantizer)

    def begin_backward(self, g: Array) -> None:
        """As there. What was joined in forward is joined again from here on, and not before: no more than one op's
        kernels are whole at a time, and the compiler does not keep them from forward."""
        self._after = g

    def _joined_again(self, kept: Any) -> Any:
        """The kernel for the input gradient."""
        gathers = self._kernel_gathers
        if not any(gathers):
            return kept
        kept, _ = jax.lax.optimization_barrier((kept, self._after))
        if self._in_parts("kernel"):
            return self.run.gather_kernel(kept, gathers, "dgrad")
        forms, _ = super().operand(gather(kept, gathers), "kernel", axis=1)
        return self.run.keep_kernel(self._pick(forms, "dgrad"))


def _all(dims: tuple[MeshAxes, ...]) -> MeshAxes:
    return tuple(axis for axes in dims for axis in axes)
