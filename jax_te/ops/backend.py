"""Choice of the backend that runs an op, with the reason."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import jax

from jax_te._validation import checked
from jax_te.config import ActivationLike
from jax_te.errors import BackendUnavailableError
from jax_te.ops import te, xla
from jax_te.ops.attention.spec import AttentionSpec
from jax_te.ops.linear.norm_and_activation import Activation
from jax_te.ops.primitives import Backend
from jax_te.quantize import Quantizer
from jax_te.recipe import Recipe
from jax_te.typing import BackendName

BACKENDS: tuple[str, ...] = get_args(BackendName)

ambient_backend = jax.make_user_context("auto")


@checked
@contextlib.contextmanager
def use_backend(name: BackendName) -> Iterator[None]:
    """Return a context that requests a backend for every op traced inside; it is part of the jit cache key.

    Args:
        name: ``"te"`` or ``"xla"`` runs there or raises; ``"auto"`` takes TE on a GPU where TE supports the op, XLA
            elsewhere.

    Raises:
        ValueError: for another name.

    >>> with use_backend("xla"):
    ...     explain_backend("dense").backend
    'xla'
    """
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
    stored: Quantizer | None = None,
) -> BackendChoice:
    """Return the backend that would run ``op`` in this context and the reason, without running it.

    Args:
        op: ``"dense"``, ``"grouped_dense"``, ``"layernorm"``, ``"layernorm_dense"``, ``"layernorm_mlp"``,
            ``"activation"``, ``"dot_product_attention"`` or ``"softmax_cross_entropy"``.
        recipe: the recipe it would run under.
        attention: the call's description, for attention.
        activation: activation function of an op that has one: the reason says if TE's backend computes it in JAX.
        backend: None for the ambient one (`use_backend`).
        unsharded: reason why the op cannot run on each device of a mesh by itself; None: it can, or there is no mesh.
        stored: quantizer of kernels that are stored quantized (``fp8_param``); None: they are not.

    Raises:
        BackendUnavailableError: if the backend requested by name cannot run it.
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
    if asked == "xla":
        return BackendChoice(op, "xla", "asked for")
    supported, reason = te.supports(op, recipe=recipe, attention=attention, unsharded=unsharded, stored=stored)
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
    """Return `explain_backend`'s addition to its reason for an activation without a TE kernel."""
    if activation is None or te.primitives().has_kernel(Activation(activation)):
        return ""
    return f"; but the activation {activation!r} in JAX, since TE has no kernel for it"


OPS = (
    "dense",
    "grouped_dense",
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


# Cached, because every call of every layer needs it; it depends on these arguments and on the installation.
@functools.lru_cache(maxsize=1024)
def backend_for(
    op: str,
    asked: BackendName,
    recipe: Recipe | None = None,
    unsharded: str | None = None,
    stored: Quantizer | None = None,
) -> Backend:
    """Return the backend that runs a linear op, a norm or an activation; raises as `explain_backend`.

    Args:
        op, recipe, unsharded, stored: see `explain_backend`.
        asked: the backend that the call names, or the ambient one, `ambient_backend`.
    """
    return primitives(explain_backend(op, recipe=recipe, backend=asked, unsharded=unsharded, stored=stored).backend)


def primitives(name: str) -> Backend:
    """Return the module that holds a backend's primitives."""
    return te.primitives() if name == "te" else xla  # type: ignore[return-value]
