"""Backward of a recomputed function that ends before what comes after it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

_is_in_a_loop = jax.make_user_context(False)


@contextmanager
def loop_body() -> Iterator[None]:
    """Return a context for the body of a loop over layers, where `gradients_at_once` has nothing to do."""
    with _is_in_a_loop(True):
        yield


def gradients_at_once(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arrays; the gradient of none of them is passed on before all of them are there.

    Otherwise XLA may compute the gradients of the kernels of all layers at the end, and keep until then what backward
    has recomputed for them (jax 0.11.2, FP8, an update behind a conditional: 10 GiB of 32.7 for GPT 1.3B). A turn of a
    loop ends by itself, and there a barrier would have XLA copy gradients to where the loop stacks them. On a mesh it
    would have backward wait for the sums of gradients over devices, which otherwise run beside it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return arrays if _is_in_a_loop.value or (not mesh.empty and mesh.size > 1) else _at_once(arrays)


# A rule of forward-mode, whose transpose is a barrier, too. One of reverse-mode would have JAX differentiate all
# arrays, also a frozen kernel; and JAX's own barrier would keep XLA from fusing across it in forward.
@jax.custom_jvp
def _at_once(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return arrays


@functools.partial(_at_once.defjvp, symbolic_zeros=True)
def _jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    (arrays,), (given,) = primals, tangents
    ready = jax.lax.optimization_barrier({place: t for place, t in enumerate(given) if _has_barrier(t)})
    return arrays, tuple(ready.get(place, t) for place, t in enumerate(given))


def _has_barrier(tangent: Any) -> bool:
    """Return whether an array is differentiated, and not in a dtype without a barrier, as states of quantizers are."""
    return not isinstance(tangent, SymbolicZero) and bool(jnp.issubdtype(tangent.dtype, jnp.inexact))
