"""Static descriptions of linear layers, norms and activation functions, and the arrays of a linear layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax

from jax_te._validation import check_annotations
from jax_te.config import ACTIVATIONS, ActivationLike, ActivationParams
from jax_te.config.internal import activation_parts
from jax_te.ops.linear.plan import LinearOptions, Plan
from jax_te.quantize import GemmState, Observer, QuantizedKernel
from jax_te.quantize.internal import Precision
from jax_te.sharding.internal import Dims, MeshAxes
from jax_te.typing import Array, DTypeLike


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Which normalization over the last axis.

    Args:
        kind: ``"layernorm"`` (subtract the mean, divide by the standard deviation, scale, add bias) or ``"rmsnorm"``
            (divide by the root mean square, scale; no bias).
        epsilon: added to the variance or mean square.
        zero_centered_gamma: the stored scale is an offset from 1.

    >>> NormSpec(kind="rmsnorm").epsilon
    1e-05
    """

    kind: Literal["layernorm", "rmsnorm"] = "layernorm"
    epsilon: float = 1e-5
    zero_centered_gamma: bool = False

    def __post_init__(self) -> None:
        check_annotations(self, NormSpec)
        if not self.epsilon > 0.0:
            raise ValueError(f"epsilon must be > 0, got {self.epsilon!r}")


class LinearWeights(NamedTuple):
    """The arrays of one linear layer inside of an op.

    Args:
        kernel: ``[k, *n]`` in any float dtype, or quantized before the call (`quantize_kernel`).
        bias: ``[*n]`` or None.
        state: the recipe's state, if it has any; its gradient is its next value.
        grad_sink: ``[k, *n]``, an array whose values are ignored. If it is given, the kernel's gradient is returned as
            its gradient, in its dtype. ``[d, k, *n]``: its gradient is the summands of ``d`` devices, those of the
            kernel's `jax_te.sharding.rules.summed_axes`. Or a `jax_te.ops.linear.deferred.deferred_sink`.

    >>> import jax.numpy as jnp
    >>> LinearWeights(jnp.ones((16, 32))).bias is None
    True
    """

    kernel: Array | QuantizedKernel
    bias: Array | None = None
    state: GemmState | None = None
    grad_sink: Any = None


@dataclass(frozen=True, kw_only=True)
class LinearSpec:
    """One resolved linear layer inside of an op: hashable, so that it can be an argument that is not differentiated.

    Args:
        backend: the module of primitives, a `jax_te.ops.backend.Backend`.
        precision: the recipe, resolved.
        plan: the mesh and the collectives, or the reason why the compiler partitions the GEMMs.
        options: as the call gave them.
        x_dtype: the compute dtype.
        wgrad_dtype: dtype of the kernel's gradient.
        kernel_rank: number of axes of the kernel.
        lead: sizes of the rows of the GEMMs, on a mesh of one device's, where the operands get more than these make,
            see `jax_te.quantize.padding`; None: they have their rows.
        stored_quantized: the kernel was quantized before the call.
        bias_dtype: None without a bias.
        kernel_all_gather: mesh axes along which the kernel is all-gathered; one stored in blocks was, when it was
            quantized.
        saves_original: the residual of the input is the input itself, which is quantized again in backward.
        grad_sink: the kernel's gradient is returned as that of a sink, see `LinearWeights`.
        summed_later: mesh axes over which the caller adds up what the sink gets.
        deferred: the sink gets the operands of the kernel gradient's GEMM. In an abstract pass
            this is the probe, to which the op reports them.
        observer: collects statistics of the quantized tensors, or None.
        frozen_scales: the state stays as it is, see `jax_te.quantize.frozen_scales`.
    """

    backend: Any
    precision: Precision
    plan: Plan
    options: LinearOptions
    x_dtype: DTypeLike
    wgrad_dtype: DTypeLike
    kernel_rank: int
    lead: tuple[int, ...] | None
    stored_quantized: bool
    bias_dtype: DTypeLike | None
    kernel_all_gather: Dims = ()
    saves_original: bool = False
    grad_sink: bool = False
    summed_later: MeshAxes = ()
    deferred: Any = False
    observer: Observer | None = None
    frozen_scales: bool = False


class WgradProbe:
    """Stands in the place of a kernel's `CachedKernel` and of its ``grad_sink``, in an abstract pass through a model.

    It learns which operands the GEMM of the kernel's gradient has. Compared by identity, so that no cached trace of
    another pass takes the place of this one, and that a stack of layers does not run as a loop.

    >>> WgradProbe().seen
    (None, None, 0)
    """

    def __init__(self) -> None:
        self.seen: tuple[LinearSpec | None, Any, int] = (None, None, 0)
        self.cached: QuantizedKernel | None = None

    def get_value(self) -> tuple[QuantizedKernel | None, WgradProbe]:
        """Return what a `CachedKernel` with this sink would hold."""
        return self.cached, self

    def call(self) -> None:
        """Count a call of the layer."""
        self.seen = (*self.seen[:2], self.seen[2] + 1)

    def report(self, spec: LinearSpec, operands: Any) -> None:
        """Take note of the layer's spec, and of its operands' shapes and dtypes."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
        self.seen = replace(spec, deferred=True), shapes, self.seen[2]


class Activation(NamedTuple):
    """An activation function by name or itself, see `jax_te.ops.activation`, and parameters of ``"clamped_swiglu"``.

    >>> Activation("swiglu").parts()
    ('silu', 'linear')
    """

    name: ActivationLike
    params: ActivationParams | None = None

    def parts(self) -> tuple[Any, ...]:
        """Return the functions applied to each component of the pre-activation; the results are multiplied.

        Raises:
            ValueError: for an unknown activation, or for parameters that it does not have.
            TypeError: for what is neither a name nor a function.
        """
        # Not `activation_parts` for every call of a layer: a name is looked up.
        known = ACTIVATIONS.get(self.name) if isinstance(self.name, str) else None
        parts = activation_parts(self.name) if known is None else known
        if self.params is not None and parts != ACTIVATIONS["clamped_swiglu"]:
            raise ValueError(f"{self.name!r} has no parameters, got params {self.params}; only 'clamped_swiglu' has")
        return parts


class OpSpec(NamedTuple):
    """A resolved linear op: its layers, one after another, the norm in front and the activation between them."""

    layers: tuple[LinearSpec, ...]
    norm: NormSpec | None
    activation: Activation | None
