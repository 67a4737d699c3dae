"""Which backend runs an op, and why."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, get_args, runtime_checkable

import jax

from jax_te.config import ActivationLike
from jax_te.config.internal import checked
from jax_te.errors import BackendUnavailableError
from jax_te.ops import te, xla
from jax_te.ops.attention.spec import QKV, AttentionArrays, AttentionSpec
from jax_te.ops.linear.spec import Activation, NormSpec
from jax_te.quantize.internal import Gemm, Quantization
from jax_te.recipe import Recipe
from jax_te.sharding.internal import Dims
from jax_te.typing import Array, BackendName, DTypeLike

BACKENDS: tuple[str, ...] = get_args(BackendName)

ambient_backend = jax.make_user_context("auto")


@runtime_checkable
class Backend(Protocol):
    """The primitives that ops are made of. A backend is a module with these functions.

    An *operand* is an array, or where a quantizer is given the form that the backend's GEMMs read best: ``te`` has TE's
    tensor classes with rowwise and transposed values (Hopper's FP8 GEMM contracts the last axis of both operands only),
    ``xla`` a `jax_te.quantize.QuantizedOperand`, or a `BlockOperand` where the Pallas kernels run. A `Quantization`
    says how a tensor is quantized. Amaxes are fp32 ``[]``, of the array at hand; None where the quantizer takes none.
    """

    NAME: str

    def quantize_operand(self, x: Array, how: Quantization, *, axis: int) -> tuple[Any, Array | None]:
        """Return ``x`` as an operand of both GEMMs that read it, rows ending at ``axis``, and its amax."""
        ...

    def quantize_dbias(
        self, g: Array, how: Quantization, *, axis: int, bias_dtype: DTypeLike | None
    ) -> tuple[Any, Array | None, Array | None]:
        """Return the output's gradient as an operand, the bias gradient (None for ``bias_dtype`` None), the amax."""
        ...

    def all_gather_operand(self, operand: Any, dims: Dims) -> Any:
        """Return an operand with one scale, all-gathered along mesh axes of each leading dimension."""
        ...

    def all_gather_kernel(self, kernel: Any, dims: Dims, gemm: Gemm) -> Any:
        """Return a kernel with one scale all-gathered, in the form that ``"fprop"`` or ``"dgrad"`` reads."""
        ...

    def residual_for_wgrad(self, x: Any) -> Any:
        """Return the part of the input's operand that the kernel gradient's GEMM reads."""
        ...

    def residual_for_dgrad(self, kernel: Any) -> Any:
        """Return the part of the kernel's operand that the input gradient's GEMM reads."""
        ...

    def gemm_fprop(self, x: Any, kernel: Any, bias: Array | None, split_accumulator: bool) -> Array:
        """Return ``x [..., k] @ kernel [k, *n] + bias [*n]`` in the dtype of ``x``."""
        ...

    def gemm_dgrad(self, g: Any, kernel: Any, split_accumulator: bool) -> Array:
        """Return ``g [..., *n] @ kernel [k, *n]^T``, ``[..., k]`` in the dtype of ``g``."""
        ...

    def gemm_wgrad(self, x: Any, g: Any, dtype: DTypeLike, split_accumulator: bool) -> Array:
        """Return ``x [..., k]^T @ g [..., *n]``, ``[k, *n]``, accumulated in fp32 and given in ``dtype``."""
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
        """Return attention's output and max logits ``[n]`` (None if not asked for), differentiable."""
        ...

    def attention_forward(self, qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays) -> Any:
        """Return output, logarithm of the softmax's denominator, and max logits, of one device's arrays."""
        ...

    def attention_backward(
        self, qkv: QKV, spec: AttentionSpec, arrays: AttentionArrays, out: Array, log_sum: Array, g: Array
    ) -> Any:
        """Return the gradients of `attention_forward`, which may have been one of several shards of the keys."""
        ...


@checked
@contextlib.contextmanager
def use_backend(name: BackendName) -> Iterator[None]:
    """Return a context that asks for a backend for every op traced inside; it is part of the jit cache key.

    Args:
        name: ``"te"`` or ``"xla"`` runs there or raises; ``"auto"`` takes TE on a GPU where TE supports the op, XLA
            elsewhere.

    Raises:
        ValueError: for another name.

    >>> with use_backend("xla"):
    ...     explain_backend("dense").backend
    'xla'
    """
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; allowed: {', '.join(BACKENDS)}")
    with ambient_backend(name):
        yield


@dataclass(frozen=True)
class BackendChoice:
    """The backend an op runs on, and the reason."""

    op: str
    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.backend} ({self.reason})"


@checked
def explain_backend(
    op: str,
    *,
    recipe: Recipe | None = None,
    attention: AttentionSpec | None = None,
    activation: ActivationLike | None = None,
    backend: BackendName | None = None,
    unsharded: str | None = None,
) -> BackendChoice:
    """Return what would run ``op`` here and why, without running it.

    Args:
        op: ``"dense"``, ``"layernorm"``, ``"layernorm_dense"``, ``"layernorm_mlp"``, ``"activation"``,
            ``"dot_product_attention"`` or ``"softmax_cross_entropy"``.
        recipe: the recipe it would run under.
        attention: the call's description, for attention.
        activation: of an op that has one: the reason says if TE's backend computes it in JAX.
        backend: None for the ambient one (`use_backend`).
        unsharded: on a mesh, why the op cannot run on each device by itself; None: it can, or there is no mesh.

    Raises:
        BackendUnavailableError: if the backend asked for by name cannot run it.
        ValueError: for an unknown op or backend.

    >>> explain_backend("dense", backend="xla")
    BackendChoice(op='dense', backend='xla', reason='asked for')
    """
    if activation is not None:
        Activation(activation)  # which raises for an unknown one
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; allowed: {', '.join(OPS)}")
    if op == "softmax_cross_entropy":
        return BackendChoice(op, "xla", "Transformer Engine has no kernel for it")
    asked = ambient_backend.value if backend is None else backend
    if asked not in BACKENDS:
        raise ValueError(f"unknown backend {asked!r}; allowed: {', '.join(BACKENDS)}")
    if asked == "xla":
        return BackendChoice(op, "xla", "asked for")
    supported, reason = te.supports(op, recipe=recipe, attention=attention, unsharded=unsharded)
    if asked == "te":
        if not supported:
            raise BackendUnavailableError(f"backend 'te' cannot run {op} here: {reason}; use backend 'xla' or 'auto'")
        return BackendChoice(op, "te", f"asked for{_in_jax(activation)}")
    if not supported:
        return BackendChoice(op, "xla", f"TE cannot: {reason}")
    if jax.default_backend() != "gpu":
        return BackendChoice(op, "xla", "no GPU; TE's kernels would run as plain JAX")
    return BackendChoice(op, "te", f"TE supports it on this GPU{_in_jax(activation)}")


def _in_jax(activation: ActivationLike | None) -> str:
    """Return what `explain_backend` adds to its reason for an activation that TE has no kernel for."""
    if activation is None or te.primitives().has_kernel(Activation(activation)):
        return ""
    return f"; but the activation {activation!r} in JAX, since TE has no kernel for it"


OPS = (
    "dense",
    "layernorm",
    "layernorm_dense",
    "layernorm_mlp",
    "activation",
    "dot_product_attention",
    "softmax_cross_entropy",
)


def select(
    op: str,
    *,
    recipe: Recipe | None = None,
    attention: AttentionSpec | None = None,
    backend: BackendName | None = None,
    unsharded: str | None = None,
) -> str:
    """Return the name of the backend that runs ``op``; raises as `explain_backend`."""
    return explain_backend(op, recipe=recipe, attention=attention, backend=backend, unsharded=unsharded).backend


# Cached, because every call of every layer asks; the answer depends on these arguments and on the installation.
@functools.lru_cache(maxsize=1024)
def backend_for(op: str, asked: BackendName, recipe: Recipe | None = None, unsharded: str | None = None) -> Backend:
    """Return the backend that runs a linear op, a norm or an activation; raises as `explain_backend`.

    Args:
        op, recipe, unsharded: see `explain_backend`.
        asked: the backend that the call names, or the ambient one, `ambient_backend`.
    """
    return primitives(select(op, recipe=recipe, backend=asked, unsharded=unsharded))


def primitives(name: str) -> Backend:
    """Return the module that holds a backend's primitives."""
    return te.primitives() if name == "te" else xla  # type: ignore[return-value]
