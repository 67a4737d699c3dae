"""Values that parts of FP8 attention pass to each other: the call, its quantized tensors, and the kernels' steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from jax_te.ops.attention.context_parallel.sharding import AttentionSharding
from jax_te.ops.attention.spec import AttentionArrays, AttentionSpec
from jax_te.quantize import AttentionPrecision, AttentionTensor, QuantizedTensor
from jax_te.sharding import MeshAxes
from jax_te.typing import Array

Scales = dict[AttentionTensor, Array]
"""Scales of tensors that are quantized inside, fp32 ``[]``."""

Amaxes = dict[AttentionTensor, Array]
"""Largest absolute values of tensors before quantization, fp32 ``[]``."""


class Fp8Operands(NamedTuple):
    """Quantized queries ``[b, sq, n, d]``, keys ``[b, skv, g, d]`` and values ``[b, skv, g, dv]``."""

    q: QuantizedTensor
    k: QuantizedTensor
    v: QuantizedTensor


class Fp8Output(NamedTuple):
    """Output ``[b, sq, n, dv]``, logarithm of the softmax's denominator, fp32 ``[b, n, sq]``, and amaxes.

    Kernels give a quantized output, and the amaxes of ``s`` and ``o``. A forward pass in the compute dtype gives an
    array and no amaxes.
    """

    out: Array | QuantizedTensor
    log_sum: Array
    amaxes: Amaxes


class Fp8Gradients(NamedTuple):
    """Quantized gradients of queries, keys and values, and the amaxes of these and of ``dp``."""

    dq: QuantizedTensor
    dk: QuantizedTensor
    dv: QuantizedTensor
    amaxes: Amaxes


@runtime_checkable
class Fp8Kernels(Protocol):
    """The steps of FP8 attention between quantized tensors. Plain JAX and cuDNN have them, each in a module."""

    def fp8_attention_forward(
        self,
        operands: Fp8Operands,
        spec: AttentionSpec,
        arrays: AttentionArrays,
        precision: AttentionPrecision,
        scales: Scales,
    ) -> Fp8Output:
        """Return ``softmax(scale q k^T) v``, of which the softmax's numerators and the output are quantized, too.

        Args:
            operands: quantized queries, keys and values.
            spec, arrays: the call.
            precision: the recipe.
            scales: scales of the numerators ``exp(score - row's largest score)``, by the name ``s``, and of ``o``.
        """
        ...

    def fp8_attention_backward(
        self,
        operands: Fp8Operands,
        out: QuantizedTensor,
        log_sum: Array,
        do: QuantizedTensor,
        spec: AttentionSpec,
        arrays: AttentionArrays,
        precision: AttentionPrecision,
        scales: Scales,
    ) -> Fp8Gradients:
        """Return the gradients of `fp8_attention_forward`.

        Args:
            operands, spec, arrays, precision: arguments of forward.
            out, log_sum: results of forward.
            do: gradient of the output, quantized.
            scales: scales of ``s``, the softmax's result, and of ``dp``, ``dq``, ``dk``, ``dv``.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Fp8Call:
    """A call of FP8 attention, resolved. Hashable: its rules are traced once for each.

    Args:
        spec: the whole call.
        precision: the recipe.
        kernels: kernels of the steps between quantized tensors.
        sharding: sharding of the call on a mesh whose devices run it by themselves; None: one device, or the compiler
            partitions it.
        high_precision_backend: backend of a pass that is not quantized.
        evaluation: whether the layer evaluates, so that state need not be differentiated.
        frozen_scales: whether the state stays as it is.
        current_scales: whether scales that are the state's are computed from the call's tensors, see
            `jax_te.quantize.current_attention_scales`.
    """

    spec: AttentionSpec
    precision: AttentionPrecision
    kernels: Literal["xla", "cudnn"]
    sharding: AttentionSharding | None = None
    high_precision_backend: str = "xla"
    evaluation: bool = False
    frozen_scales: bool = False
    current_scales: bool = False

    @property
    def all_axes(self) -> MeshAxes:
        """Mesh axes over which the arrays are split."""
        sharding = self.sharding
        return () if sharding is None else sharding.batch + sharding.context + sharding.heads

    @property
    def scale_axes(self) -> MeshAxes:
        """Mesh axes over which the amax that gives an operand's scale is reduced."""
        if self.current_scales:
            return self.all_axes  # as of the state, of which they take the place
        if self.sharding is None or self.precision.delayed:
            return ()  # a delayed scale is the state's, which all devices have
        if self.precision.amax_scope == "whole":
            return self.all_axes
        # A scale of each device's examples and heads; those that all-gather keys have one for all of these.
        return self.sharding.context

    @property
    def sends_keys(self) -> bool:
        """Whether each pass moves keys and values of other devices to this one."""
        return self.sharding is not None and (self.sharding.gathers or self.sharding.ring_size > 1)
