"""Primitives of which ops are composed, provided by each backend."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from jax_te.ops.attention.spec import QKV, AttentionArrays, AttentionSpec
from jax_te.ops.linear.norm_and_activation import Activation, NormSpec
from jax_te.quantize import Gemm, Quantization
from jax_te.sharding import Dims
from jax_te.typing import Array, DTypeLike


@runtime_checkable
class GemmBackend(Protocol):
    """The primitives of a linear layer's three GEMMs. Grouped layers have the same primitives, on rows of several
    groups.

    An *operand* is an array, or with a quantizer the form that the backend's GEMMs read best: ``te`` has TE's tensor
    classes with rowwise and transposed values (Hopper's FP8 GEMM contracts the last axis of both operands only),
    ``xla`` a `jax_te.quantize.QuantizedOperand`, or a `BlockOperand` where the Pallas kernels run. A `Quantization`
    specifies how a tensor is quantized. Amaxes are fp32 ``[]``, of the given array; None if the quantizer needs none.
    """

    NAME: str

    def quantize_operand(self, x: Array, how: Quantization, /, *, axis: int) -> tuple[Any, Array | None]:
        """Return ``x`` as an operand of both GEMMs that read it, rows ending at ``axis``, and its amax."""
        ...

    def statistics(self, x: Array, how: Quantization, /, *, axis: int) -> dict[str, Array]:
        """Return `jax_te.quantize.quantization_statistics` of ``x``, rows ending at ``axis``."""
        ...

    def residual_for_wgrad(self, x: Any, /) -> Any:
        """Return the part of the input's operand that the kernel gradient's GEMM reads."""
        ...

    def residual_for_dgrad(self, kernel: Any, /) -> Any:
        """Return the part of the kernel's operand that the input gradient's GEMM reads."""
        ...

    def all_gather_kernel(self, kernel: Any, dims: Dims, gemm: Gemm, /) -> Any:
        """Return a kernel with one scale all-gathered, in the form that ``"fprop"`` or ``"dgrad"`` reads."""
        ...

    def gemm_fprop(self, x: Any, kernel: Any, bias: Array | None, split_accumulator: bool, /) -> Array:
        """Return ``x [..., k] @ kernel [k, *n] + bias [*n]`` in the dtype of ``x``."""
        ...

    def gemm_dgrad(self, g: Any, kernel: Any, split_accumulator: bool, /) -> Array:
        """Return ``g [..., *n] @ kernel [k, *n]^T``, ``[..., k]`` in the dtype of ``g``."""
        ...

    def gemm_wgrad(self, x: Any, g: Any, dtype: DTypeLike, split_accumulator: bool, /) -> Array:
        """Return ``x [..., k]^T @ g [..., *n]``, ``[k, *n]``, accumulated in fp32 and given in ``dtype``."""
        ...


@runtime_checkable
class Backend(GemmBackend, Protocol):
    """Primitives of which ops are composed. A backend is a module with these functions."""

    def quantize_dbias(
        self, g: Array, how: Quantization, *, axis: int, bias_dtype: DTypeLike | None
    ) -> tuple[Any, Array | None, Array | None]:
        """Return the output's gradient as an operand, the bias gradient (None for ``bias_dtype`` None), the amax."""
        ...

    def all_gather_operand(self, operand: Any, dims: Dims) -> Any:
        """Return an operand with one scale, all-gathered along mesh axes of each leading dimension."""
        ...

    def norm(self, x: Array, scale: Array, bias: Array | None, norm: NormSpec) -> tuple[Array, Any]:
        """Return ``x [..., h]`` normalized over its last axis, in its dtype, and the statistics for backward."""
        ...

    def norm_quantize(
        self, x: Array, scale: Array, bias: Array | None, norm: NormSpec, how: Quantization
    ) -> tuple[Any, Any, Array | None]:
        """Return `norm`'s output as an operand, the statistics, the output's amax."""
        ...

    def norm_backward(
        self, dy: Array, x: Array, stats: Any, scale: Array, bias: Array | None, norm: NormSpec
    ) -> tuple[Array, Array, Array | None]:
        """Return the gradients of input, scale and bias, each in the dtype of what it belongs to."""
        ...

    def act(self, x: Array, activation: Activation) -> Array:
        """Return ``x [..., n_act, f]`` activated, ``[..., f]``, in its dtype."""
        ...

    def act_quantize(self, x: Array, activation: Activation, how: Quantization) -> tuple[Any, Array | None]:
        """Return `act`'s output as an operand, and its amax."""
        ...

    def act_backward(self, dz: Array, x: Array, activation: Activation) -> Array:
        """Return the gradient of ``x [..., n_act, f]`` from ``dz [..., f]``."""
        ...

    def act_backward_quantize(
        self, dz: Array, x: Array, activation: Activation, how: Quantization, *, bias_dtype: DTypeLike | None
    ) -> tuple[Any, Array | None, Array | None]:
        """Return `act_backward`'s result as an operand, its sum over rows (a bias gradient), its amax."""
        ...

    def attention(self, qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays) -> tuple[Array, Array | None]:
        """Return attention's output and max logits ``[n]`` (None if not requested), differentiable."""
        ...

    def attention_forward(
        self, qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays
    ) -> tuple[Array, Array, Array | None]:
        """Return the results of one device's arrays: output ``[b, sq, n, dv]``, logarithm of the softmax's denominator,
        fp32 ``[b, n, sq]``, and max logits ``[n]`` (None if not requested).
        """
        ...

    def attention_backward(
        self, qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays, out: Array, log_sum: Array, g: Array
    ) -> tuple[QKV, Array | None, Array | None]:
        """Return the gradients of `attention_forward`, which may be for one of several shards of the keys: of ``qkv``,
        and of the arrays ``bias`` and ``softmax_offset`` (None for those that there are not).
        """
        ...
