"""Choice of the backend that runs an op, with the reason, and the part that each backend has in it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jax_te._device import default_platform
from jax_te._validation import checked, float_dtype
from jax_te.config import ActivationLike
from jax_te.errors import BackendUnavailableError
from jax_te.ops import cudnn_fp8, te, xla
from jax_te.ops.attention.fp8_support import fp8_attention_lacks
from jax_te.ops.attention.fp8_types import Fp8Kernels
from jax_te.ops.attention.spec import AttentionSpec
from jax_te.ops.linear.norm_and_activation import Activation
from jax_te.ops.moe.row_groups import tile_of
from jax_te.ops.pallas import grouped as pallas_grouped
from jax_te.ops.pallas import operand as pallas_operand
from jax_te.ops.primitives import Backend
from jax_te.ops.xla import attention_fp8
from jax_te.quantize import (
    AttentionPrecision,
    Precision,
    Quantizer,
    TensorQuantizer,
    attention_precision_of,
    precision_of,
)
from jax_te.recipe import GEMMS, Recipe
from jax_te.typing import BackendName, DTypeLike

BACKENDS: tuple[str, ...] = get_args(BackendName)

OpName: TypeAlias = Literal[
    "dense",
    "grouped_dense",
    "layernorm",
    "layernorm_dense",
    "layernorm_mlp",
    "activation",
    "dot_product_attention",
    "softmax_cross_entropy",
]
OPS: tuple[OpName, ...] = get_args(OpName)

Primitives: TypeAlias = Literal["te", "xla"]
"""The backends: what `BackendName` chooses from."""

Runner: TypeAlias = Literal["te", "xla", "pallas", "cudnn"]
"""What runs a part of an op: a backend, or kernels of the ``xla`` backend."""

_LINEAR: tuple[OpName, ...] = ("dense", "grouped_dense", "layernorm_dense", "layernorm_mlp")

ambient_backend = jax.make_user_context("auto")


@checked
@contextlib.contextmanager
def use_backend(name: BackendName) -> Iterator[None]:
    """Return a context that requests a backend for every op traced inside; it is part of the jit cache key.

    Args:
        name: ``"te"``: TE's kernels wherever it has one for a part of the op, XLA for the other parts, see
            `explain_backend`; raises where TE cannot run the op. ``"xla"``: none of TE's. ``"auto"``: ``"te"`` on a GPU
            where TE supports the op, else ``"xla"``.

    Raises:
        ValueError: for another name.

    >>> with use_backend("xla"):
    ...     explain_backend("dense").backend
    'xla'
    """
    with ambient_backend(name):
        yield


Part = Literal[
    "norm", "activation", "activation_backward", "quantization", "fprop", "dgrad", "wgrad", "attention", "loss"
]
"""A part of an op: ``"fprop"``, ``"dgrad"`` and ``"wgrad"`` are its GEMMs."""


@dataclass(frozen=True)
class BackendChoice:
    """The backend an op runs on, and the reason.

    Args:
        op, backend, reason: the op, its backend, and why it is this one.
        parts: backend of each part of the op: ``"te"``, ``"xla"``, or ``"pallas"`` for the Hopper kernels of the
            ``xla`` backend, ``"cudnn"`` for cuDNN's FP8 attention.
        unquantized: reason why attention runs in the compute dtype under a recipe with ``fp8_dpa``; None: the op does
            what the recipe says.

    >>> print(BackendChoice("dense", "te", "asked for", {"fprop": "te", "dgrad": "te", "wgrad": "xla"}))
    dense: te (asked for); wgrad: xla
    """

    op: OpName
    backend: Primitives
    reason: str
    parts: Mapping[Part, Runner] = field(default_factory=dict, hash=False)
    unquantized: str | None = None

    def __str__(self) -> str:
        unquantized = "" if self.unquantized is None else f"; not in FP8: {self.unquantized}"
        return f"{self.op}: {self.backend} ({self.reason}){self.others}{unquantized}"

    @property
    def others(self) -> str:
        """The parts that the backend itself does not run, as text; "" if there are none."""
        runners: dict[Runner, list[Part]] = {}
        for part, runner in self.parts.items():
            if runner != self.backend:
                runners.setdefault(runner, []).append(part)
        return "".join(f"; {', '.join(parts)}: {runner}" for runner, parts in runners.items())


@checked
def explain_backend(
    op: OpName,
    *,
    recipe: Recipe | None = None,
    attention: AttentionSpec | None = None,
    activation: ActivationLike | None = None,
    backend: BackendName | None = None,
    unsharded: str | None = None,
    stored: Quantizer | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    params_dtype: DTypeLike = jnp.float32,
) -> BackendChoice:
    """Return the backend that would run ``op`` in this context and the reason, and who runs each part of the op.

    Nothing is run. A call of attention without examples, queries or keys gives zeros, which no backend computes. A
    backend runs its kernels wherever it has one. TE has none for block scaling and scales that are
    powers of two, for GEMMs of unquantized fp32 operands, for gradients of kernels in a dtype that is neither fp32 nor
    that of the unquantized operands, and for some activations: ``parts`` names those that it leaves to XLA.

    Attention under a recipe with ``fp8_dpa`` runs in FP8 under each backend. Calls that FP8 attention does not have run
    in the compute dtype under ``"auto"``, and ``unquantized`` says why; under a named backend they raise.

    Args:
        op: ``"dense"``, ``"grouped_dense"``, ``"layernorm"``, ``"layernorm_dense"``, ``"layernorm_mlp"``,
            ``"activation"``, ``"dot_product_attention"`` or ``"softmax_cross_entropy"``.
        recipe: the recipe it would run under.
        attention: the call's description, for attention.
        activation: activation function of an op that has one. None: ``"gelu"``.
        backend: None for the ambient one (`use_backend`).
        unsharded: reason why the op cannot run on each device of a mesh by itself; None: it can, or there is no mesh.
        stored: quantizer of kernels that are stored quantized (``fp8_param``); None: they are not.
        dtype: dtype of the input, in which the op computes.
        params_dtype: dtype of the kernels' gradients; in a train step it is fp32.

    Raises:
        BackendUnavailableError: if the backend requested by name cannot run it.
        ValueError: for an unknown op or backend.

    >>> explain_backend("dense", backend="xla").parts
    {'fprop': 'xla', 'dgrad': 'xla', 'wgrad': 'xla'}
    """
    function = Activation("gelu" if activation is None else activation)  # which raises for an unknown one
    precision = attention_precision_of(recipe)
    if op == "dot_product_attention" and precision is not None and attention is not None:
        return choose_fp8(attention, precision, backend, unsharded=unsharded)
    chosen, reason = _chosen(op, recipe, attention, backend, unsharded, stored)
    dtype, params_dtype = float_dtype("dtype", dtype), float_dtype("params_dtype", params_dtype)
    parts = _parts(op, chosen, precision_of(recipe), function, dtype, params_dtype)
    return BackendChoice(op, chosen, reason, parts)


def choose_fp8(
    spec: AttentionSpec,
    precision: AttentionPrecision,
    backend: BackendName | None,
    *,
    unsharded: str | None = None,
    exchange: str | None = None,
) -> BackendChoice:
    """Return who runs a call of attention under a recipe with ``fp8_dpa``.

    Args:
        spec: the call.
        precision: the recipe as attention reads it.
        backend: None for the ambient one.
        unsharded: reason why the devices of a mesh cannot run it by themselves, as kernels do.
        exchange: reason why the exchange of keys and values between devices has no FP8 form.

    Raises:
        BackendUnavailableError: if ``backend`` was named, and the call cannot run in FP8.
    """
    op: OpName = "dot_product_attention"
    asked = ambient_backend.value if backend is None else backend
    kernels, lacks = _fp8_runner(spec, precision, asked, unsharded, exchange)
    if kernels is not None:
        if asked == "te":
            available, te_lacks = te.available()
            if not available:
                raise BackendUnavailableError(f"backend 'te' cannot run {op} here: {te_lacks}; use 'xla' or 'auto'")
        reason = "asked for" if asked != "auto" else f"FP8 by {'cuDNN' if kernels == 'cudnn' else 'plain JAX'}"
        parts: dict[Part, Runner] = {"attention": kernels, "quantization": "xla"}
        return BackendChoice(op, "te" if asked == "te" else "xla", reason, parts)
    if asked != "auto":
        raise BackendUnavailableError(
            f"attention under recipe {precision.recipe_name!r} with fp8_dpa=True cannot run in FP8 here: {lacks}. Use "
            "backend 'auto', which runs it in the compute dtype, or a recipe without fp8_dpa"
        )
    chosen, reason = _chosen(op, None, spec, backend, unsharded, None)
    return BackendChoice(op, chosen, reason, {"attention": chosen}, lacks)


def _fp8_runner(
    spec: AttentionSpec, precision: AttentionPrecision, asked: str, unsharded: str | None, exchange: str | None
) -> tuple[Literal["xla", "cudnn"] | None, str | None]:
    """Return who runs a call's steps between quantized tensors; or None, and the reason why nothing does."""
    lacks = exchange if exchange is not None else _call_lacks(fp8_attention_lacks(spec))
    if lacks is not None:
        return None, lacks
    if default_platform() != "gpu":
        return "xla", None
    lacks = cudnn_fp8.unavailable() or unsharded or _other_pass_lacks(spec, precision)
    if lacks is None:
        return "cudnn", None
    # On a GPU plain JAX would materialize all scores: it runs only if it is asked for.
    return ("xla", None) if asked == "xla" else (None, lacks)


def _call_lacks(reason: str | None) -> str | None:
    return None if reason is None else f"the call has {reason}"


def _other_pass_lacks(spec: AttentionSpec, precision: AttentionPrecision) -> str | None:
    """Return the reason why there is no kernel for the pass that is not quantized, or None."""
    if precision.unquantized_pass is None:
        return None
    supported, reason = te.supports("dot_product_attention", attention=spec)
    return None if supported else f"{precision.unquantized_pass}=False takes TE's kernel for that pass: {reason}"


def fp8_kernels(name: Literal["xla", "cudnn"]) -> Fp8Kernels:
    """Return the module with the steps of FP8 attention: of ``"cudnn"``, or ``"xla"``."""
    return cudnn_fp8 if name == "cudnn" else attention_fp8


def _chosen(
    op: OpName,
    recipe: Recipe | None,
    attention: AttentionSpec | None,
    backend: BackendName | None,
    unsharded: str | None,
    stored: Quantizer | None,
) -> tuple[Primitives, str]:
    """Return the name of the backend that runs an op, and the reason."""
    if op == "softmax_cross_entropy":
        return "xla", "Transformer Engine has no kernel for it"
    asked = ambient_backend.value if backend is None else backend
    if asked == "xla":
        return "xla", "asked for"
    supported, reason = te.supports(op, recipe=recipe, attention=attention, unsharded=unsharded, stored=stored)
    if asked == "te":
        if not supported:
            raise BackendUnavailableError(f"backend 'te' cannot run {op} here: {reason}; use backend 'xla' or 'auto'")
        return "te", "asked for"
    if not supported:
        return "xla", f"TE cannot: {reason}"
    if default_platform() != "gpu":
        return "xla", "no GPU; TE's kernels would run as plain JAX"
    return "te", "TE supports it on this GPU"


def _parts(
    op: OpName,
    backend: Primitives,
    precision: Precision,
    function: Activation,
    dtype: np.dtype,
    params_dtype: np.dtype,
) -> dict[Part, Runner]:
    """Return who runs each part of an op on a backend, as its primitives decide by themselves."""
    parts: dict[Part, Runner] = {}
    if op in ("layernorm", "layernorm_dense", "layernorm_mlp"):
        parts["norm"] = backend
    if op in ("activation", "layernorm_mlp"):
        parts["activation"], parts["activation_backward"] = _activation_parts(backend, precision, function)
    if op == "dot_product_attention":
        parts["attention"] = backend
    if op == "softmax_cross_entropy":
        parts["loss"] = backend
    if op not in _LINEAR:
        return parts
    by_quantized = _runner_of_quantized(op, backend, precision, dtype)
    if any(quantizer is not None for quantizer in precision.quantizers):
        parts["quantization"] = by_quantized
    for gemm in GEMMS:
        if ("quantization" in parts and not precision.runs_unquantized(gemm)) or op == "grouped_dense":
            parts[gemm] = by_quantized
        else:
            # TE rounds fp32 operands to TF32, and gives results in the operands' dtype, or gradients in fp32.
            exact = dtype == jnp.float32 or (gemm == "wgrad" and params_dtype not in (dtype, jnp.float32))
            parts[gemm] = "xla" if exact else backend
    return parts


def _runner_of_quantized(op: OpName, backend: Primitives, precision: Precision, dtype: np.dtype) -> Runner:
    """Return who quantizes the operands of a linear op and multiplies them; of experts, in any dtype."""
    if op == "grouped_dense":
        tile = tile_of(precision)
        on_hopper = pallas_grouped.runs_here(dtype, 2, tile, precision, placed=False, kernel_all_gather=())
        return "pallas" if on_hopper else "xla"
    if backend == "te" and all(te.is_te_quantizer(quantizer) for quantizer in precision.quantizers):
        return "te"
    return "pallas" if all(pallas_operand.runs_here(quantizer) for quantizer in precision.quantizers) else "xla"


def _activation_parts(backend: Primitives, precision: Precision, function: Activation) -> tuple[Runner, Runner]:
    """Return who runs an activation, and who its derivative."""
    if backend != "te" or not te.primitives().has_kernel(function):
        return "xla", "xla"
    # XLA fuses the derivative of one component with the bias gradient; under a given scale TE quantizes in its kernel.
    quantizer = precision.grad.quantizer
    given = isinstance(quantizer, TensorQuantizer) and quantizer.scaling == "given"
    return "te", "te" if len(function.parts()) > 1 or given else "xla"


def select(
    op: OpName,
    *,
    recipe: Recipe | None = None,
    attention: AttentionSpec | None = None,
    backend: BackendName | None = None,
    unsharded: str | None = None,
) -> Primitives:
    """Return the name of the backend that runs ``op``; raises as `explain_backend`."""
    return explain_backend(op, recipe=recipe, attention=attention, backend=backend, unsharded=unsharded).backend


def backend_for(
    op: OpName,
    asked: BackendName,
    recipe: Recipe | None = None,
    unsharded: str | None = None,
    stored: Quantizer | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
) -> Backend:
    """Return the backend that runs a linear op, a norm or an activation; raises as `explain_backend`.

    Args:
        op, recipe, unsharded, stored: see `explain_backend`.
        asked: the backend that the call names, or the ambient one, `ambient_backend`.
        dtype: dtype of the input. Of fp64 ``"auto"`` is ``"xla"``: TE has no kernel for it.
    """
    if dtype == jnp.float64:
        if asked == "te":
            raise BackendUnavailableError(
                f"backend 'te' cannot run {op} here: Transformer Engine has no fp64; use backend 'xla' or 'auto'"
            )
        asked = "xla"
    return _backend_on(default_platform(), op, asked, recipe, unsharded, stored)


# Cached, because every call of every layer needs it; it depends on these arguments and on the installation.
@functools.lru_cache(maxsize=1024)
def _backend_on(
    platform: str,
    op: OpName,
    asked: BackendName,
    recipe: Recipe | None,
    unsharded: str | None,
    stored: Quantizer | None,
) -> Backend:
    """Return the backend that `backend_for` describes.

    ``platform``, that of the default device, is a part of the cache's key alone: `explain_backend` reads the device by
    itself, and a program may change it between calls.
    """
    del platform
    return primitives(explain_backend(op, recipe=recipe, backend=asked, unsharded=unsharded, stored=stored).backend)


def primitives(name: str) -> Backend:
    """Return the module that holds a backend's primitives."""
    return te.primitives() if name == "te" else xla  # type: ignore[return-value]
