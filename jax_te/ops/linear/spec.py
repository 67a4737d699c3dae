"""The static description of a linear layer, its arrays, and the kinds of sinks for its kernel's gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_te.ops.linear.norm_and_activation import Activation, NormSpec
from jax_te.ops.linear.plan import LinearOptions, Plan
from jax_te.ops.primitives import Backend, GemmBackend
from jax_te.quantize import GemmState, Observer, OpaqueTree, Precision, QuantizedKernel
from jax_te.sharding import Dims, MeshAxes, summed_axes
from jax_te.typing import Array, DTypeLike, LogicalAxes


class LinearWeights(NamedTuple):
    """The arrays of one linear layer inside of an op.

    Args:
        kernel: ``[k, *n]`` in any float dtype, or quantized before the call (`quantize_kernel`).
        bias: ``[*n]`` or None.
        state: the recipe's state, if it has any; its gradient is its next value.
        grad_sink: ``[k, *n]``, an array whose values are ignored. If it is given, the kernel's gradient is returned as
            its gradient, in its dtype. ``[d, k, *n]``: its gradient is the summands of ``d`` devices, those of the
            kernel's `jax_te.sharding.rules.summed_axes`. Or a `jax_te.ops.linear.deferred.deferred_sink`, or a `Probe`.

    >>> import jax.numpy as jnp
    >>> LinearWeights(jnp.ones((16, 32))).bias is None
    True
    """

    kernel: Array | QuantizedKernel
    bias: Array | None = None
    state: GemmState | None = None
    grad_sink: GivenSink | None = None


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """One resolved linear layer inside of an op: hashable, so that it can be an argument that is not differentiated.

    Args:
        backend: the module of primitives.
        precision: the recipe, resolved.
        plan: the mesh and the collectives, or the reason why the compiler partitions the GEMMs.
        options: options of the call.
        x_dtype: the compute dtype.
        wgrad_dtype: dtype of the kernel's gradient.
        kernel_rank: number of axes of the kernel.
        unpadded_rows: shape of the rows before zeros are appended to them (`jax_te.quantize.padding`), on a mesh those
            of one device; None: nothing is appended.
        stored_quantized: whether the kernel was quantized before the call.
        bias_dtype: None without a bias.
        kernel_all_gather: mesh axes along which the kernel is all-gathered; one stored in blocks was, when it was
            quantized.
        saves_original: whether the residual of the input is the input itself, which is quantized again in backward.
        sink: kind of sink for the kernel's gradient; None: it is the kernel's own cotangent.
        observer: collector of statistics of the quantized tensors, or None.
        frozen_scales: whether the state stays as it is, see `jax_te.quantize.frozen_scales`.
    """

    backend: GemmBackend
    precision: Precision
    plan: Plan
    options: LinearOptions
    x_dtype: DTypeLike
    wgrad_dtype: DTypeLike
    kernel_rank: int
    unpadded_rows: tuple[int, ...] | None
    stored_quantized: bool
    bias_dtype: DTypeLike | None
    kernel_all_gather: Dims = ()
    saves_original: bool = False
    sink: GradSink | None = None
    observer: Observer | None = None
    frozen_scales: bool = False

    @property
    def primitives(self) -> Backend:
        """The backend with all its primitives, for ungrouped layers; grouped layers only have GEMMs."""
        return cast(Backend, self.backend)


class OpSpec(NamedTuple):
    """A resolved linear op: its layers, one after another, the norm in front and the activation between them."""

    layers: tuple[LinearSpec, ...]
    norm: NormSpec | None
    activation: Activation | None


@dataclass(frozen=True)
class KernelGemm:
    """The pending GEMM of a kernel's gradient.

    Args:
        layer: the layer.
        x, g: residual of the input, and the output's gradient as this GEMM reads it.
        multiply: function that runs the GEMM, ``multiply(layer, x, g)``.
    """

    layer: LinearSpec
    x: Any
    g: Any
    multiply: Callable[[LinearSpec, Any, Any], Array]

    def gradient(self) -> Array:
        """Return the kernel's gradient, on a mesh this device's part of it."""
        return self.multiply(self.layer, self.x, self.g)

    def operands(self) -> OpaqueTree:
        """Return the operands, and a 1 that counts uses of the sink: JAX sums the cotangents of several uses."""
        operands = self.x, self.layer.backend.residual_for_wgrad(self.g), jnp.ones((), jnp.float32)
        return OpaqueTree.pack(operands, per_device=self.layer.plan.mesh is not None)


@dataclass(frozen=True)
class Whole:
    """A sink ``[k, *n]``, which gets the kernel's gradient."""

    summed_later: ClassVar[MeshAxes] = ()

    def spec(self, plan: Plan) -> PartitionSpec:
        """Return the sharding of the sink and of its cotangent."""
        return plan.kernel_spec

    def cotangent(self, gemm: KernelGemm) -> Array:
        """Return the kernel's gradient."""
        return gemm.gradient()


@dataclass(frozen=True)
class Summands:
    """A sink ``[d, k, *n]`` for the summands of the kernel's gradient from each of ``d`` devices' tokens.

    Args:
        summed_later: mesh axes of the ``d`` devices, over which the caller adds up.
    """

    summed_later: MeshAxes

    def spec(self, plan: Plan) -> PartitionSpec:
        """Return the sharding of the sink and of its cotangent."""
        return PartitionSpec(self.summed_later, *plan.kernel_spec)

    def cotangent(self, gemm: KernelGemm) -> Array:
        """Return the summand of this device, ``[1, k, *n]``."""
        return gemm.gradient()


@dataclass(frozen=True)
class Deferred:
    """A `jax_te.ops.linear.deferred.deferred_sink`, which gets the operands of the gradient's GEMM."""

    summed_later: ClassVar[MeshAxes] = ()

    def spec(self, plan: Plan) -> PartitionSpec:
        """Return the sharding of the operands, which differ from device to device, also where the kernel is whole."""
        return plan.per_device

    def cotangent(self, gemm: KernelGemm) -> OpaqueTree:
        """Return the operands."""
        return gemm.operands()


@jax.tree_util.register_static
class Probe:
    """A sink without arrays, for an abstract pass through a model: it records what a `Deferred` sink would receive.

    A pytree without leaves. Compared by identity, so that no cached trace of another pass is used for this one,
    and that a stack of layers does not run as a loop.

    Attributes:
        calls: number of calls of the layer.
        layer: the layer as its backward pass saw it, with a `Whole` sink; None if nothing differentiates it.
        operands: shapes and dtypes of the GEMM's operands, likewise.
        mapped: number of ``jax.vmap`` around the call that map its operands: a sink that they do not map would get sums
            over them.

    >>> Probe().calls
    0
    """

    summed_later: ClassVar[MeshAxes] = ()

    def __init__(self) -> None:
        self.calls = 0
        self.layer: LinearSpec | None = None
        self.operands: OpaqueTree | None = None
        self.mapped = 0

    def count_call(self) -> None:
        """Count a call of the layer."""
        self.calls += 1

    def spec(self, plan: Plan) -> PartitionSpec:
        """Return the sharding of the operands."""
        return plan.per_device

    def cotangent(self, gemm: KernelGemm) -> None:
        """Record the layer, and the shapes and dtypes of its operands."""
        self.layer = replace(gemm.layer, sink=Whole())
        self.operands = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), gemm.operands())
        self._count_maps(0)(*jax.tree.leaves((gemm.x, gemm.g)))

    def _count_maps(self, outside: int) -> Callable[..., Any]:
        """Return an identity function that counts the ``jax.vmap`` around it; ``outside`` of them have been counted."""

        @jax.custom_batching.custom_vmap
        def identity(*arrays: Array) -> tuple[Array, ...]:
            return arrays

        @identity.def_vmap
        def _(axis_size: int, in_batched: list[bool], *arrays: Array) -> Any:
            del axis_size
            self.mapped = max(self.mapped, outside + 1)
            return self._count_maps(outside + 1)(*arrays), tuple(in_batched)

        return identity


GradSink: TypeAlias = Whole | Summands | Deferred | Probe
"""Destination of a kernel's gradient in place of the kernel itself: the kinds of sinks of an op."""


GivenSink: TypeAlias = Array | OpaqueTree | Probe
"""A call's ``grad_sink``, see `LinearWeights`."""


class ResolvedSink(NamedTuple):
    """Destination of a kernel's gradient in one call.

    Args:
        kind: kind of the sink. None: the gradient is the kernel's own cotangent.
        arrays: arrays of the sink as the op takes them, if it has any.
        wgrad_dtype: dtype of the kernel's gradient.
    """

    kind: GradSink | None
    arrays: Array | OpaqueTree | None
    wgrad_dtype: DTypeLike


def resolved_sink(
    given: GivenSink | None,
    plan: Plan,
    kernel: Array | QuantizedKernel,
    kernel_axes: LogicalAxes | PartitionSpec | None,
) -> ResolvedSink:
    """Return the destination of a kernel's gradient; a `Probe` counts the call.

    Args:
        given: sink of the call, see `LinearWeights`.
        plan: plan of the layer.
        kernel: the kernel.
        kernel_axes: logical axes of the kernel.
    """
    if given is None:
        return ResolvedSink(None, None, kernel.dtype)
    if isinstance(given, Probe):
        given.count_call()
        return ResolvedSink(given, None, kernel.dtype)
    if isinstance(given, OpaqueTree):
        return ResolvedSink(Deferred(), given, kernel.dtype)
    devices = given.shape[: -kernel.ndim]
    later = summed_axes(kernel_axes, plan.mesh, devices)
    if later:
        return ResolvedSink(Summands(later), given, given.dtype)
    # A gradient that is summed already: by the mean's derivative each summand is an equal part of it.
    return ResolvedSink(Whole(), given.mean(axis=0) if devices else given, given.dtype)
