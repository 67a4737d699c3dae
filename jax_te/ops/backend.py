"""Which backend runs an op, and why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, get_args

import jax

from jax_te.errors import BackendUnavailableError
from jax_te.ops import te, xla
from jax_te.ops.attention.spec import AttentionSpec
from jax_te.recipe import Recipe
from jax_te.typing import BackendName

BACKENDS: tuple[str, ...] = get_args(BackendName)

_backend = jax.make_user_context("auto")


@contextlib.contextmanager
def use_backend(name: BackendName) -> Iterator[None]:
    """Ask for a backend for every op traced inside. Part of the jit cache key, like the recipe.

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
    with _backend(name):
        yield


@dataclass(frozen=True)
class Choice:
    """The backend an op runs on, and the reason."""

    op: str
    backend: str
    reason: str

    def __str__(self) -> str:
        return f"{self.op}: {self.backend} ({self.reason})"


def explain_backend(
    op: str,
    *,
    recipe: Recipe | None = None,
    attention: AttentionSpec | None = None,
    backend: BackendName | None = None,
    ranks: Any = None,
) -> Choice:
    """What would run ``op`` here and why, without running it.

    Args:
        op: ``"dense"``, ``"layernorm"``, ``"layernorm_dense"``, ``"layernorm_mlp"``, ``"activation"``,
            ``"dot_product_attention"`` or ``"softmax_cross_entropy"``.
        recipe: the recipe it would run under.
        attention: the call's description, for attention.
        backend: None for the ambient one (`use_backend`).
        ranks: on a mesh, a str that says why the op cannot run on each device by itself.

    Raises:
        BackendUnavailableError: if the backend asked for by name cannot run it.
        ValueError: for an unknown op or backend.

    >>> explain_backend("dense", backend="xla")
    Choice(op='dense', backend='xla', reason='asked for')
    """
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; allowed: {', '.join(OPS)}")
    if op == "softmax_cross_entropy":
        return Choice(op, "xla", "Transformer Engine has no kernel for it")
    asked = _backend.value if backend is None else backend
    if asked not in BACKENDS:
        raise ValueError(f"unknown backend {asked!r}; allowed: {', '.join(BACKENDS)}")
    if asked == "xla":
        return Choice(op, "xla", "asked for")
    supported, reason = te.supports(op, recipe=recipe, attention=attention, ranks=ranks)
    if asked == "te":
        if not supported:
            raise BackendUnavailableError(f"backend 'te' cannot run {op} here: {reason}; use backend 'xla' or 'auto'")
        return Choice(op, "te", "asked for")
    if not supported:
        return Choice(op, "xla", f"TE cannot: {reason}")
    if jax.default_backend() != "gpu":
        return Choice(op, "xla", "no GPU; TE's kernels would run as plain JAX")
    return Choice(op, "te", "TE supports it on this GPU")


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
    ranks: Any = None,
) -> str:
    """Name of the backend that runs ``op``; raises as `explain_backend`."""
    return explain_backend(op, recipe=recipe, attention=attention, backend=backend, ranks=ranks).backend


def primitives(name: str) -> ModuleType:
    """The module that holds a backend's primitives."""
    return te.primitives() if name == "te" else xla
