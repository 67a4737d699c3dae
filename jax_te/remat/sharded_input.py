"""Full recomputation that keeps its input split over the tensor ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jax_te.sharding import constrain, current_mesh, logical_to_spec
from jax_te.sharding.internal import ranks_of
from jax_te.typing import Array, LogicalAxes


def checkpoint_in_parts(function: Callable[..., Any], *args: Array) -> Any:
    """``function(*args)``, whose first argument ``[b, s, ...]`` is kept split along the sequence over the tensor ranks.

    A ``jax.checkpoint`` with a constraint on the input would gather in forward, too: it runs the same equations twice.

    Args:
        function: of arrays.
        *args: the arrays.

    Raises:
        ValueError: if the first argument is not ``[b, s, ...]``, its sequence does not divide over the ranks, or the
            tensor axis is manual, inside ``shard_map``.

    Source: ``distribute_saved_activations`` of ``transformer_engine.pytorch.checkpoint``.

    >>> import jax.numpy as jnp
    >>> checkpoint_in_parts(jnp.sin, jnp.zeros((1, 2, 3))).shape
    (1, 2, 3)
    """
    whole = _axes(args[0])
    parts: LogicalAxes = (whole[0], "sequence_parallel", *whole[2:])
    _check(args[0], parts)
    # Hoists what the function closes over: a custom derivative has none of arrays that are not its arguments.
    closed, hoisted = jax.closure_convert(function, *args)
    return _run(closed, whole, parts, *args, *hoisted)


def _axes(x: Array) -> LogicalAxes:
    if x.ndim < 2:
        raise ValueError(
            f"distribute_saved_activations=True splits the second axis of the first array argument, [b, s, ...]; got "
            f"shape {x.shape}"
        )
    return ("batch", "sequence", *(None for _ in x.shape[2:]))


def _check(x: Array, parts: LogicalAxes) -> None:
    mesh = current_mesh()
    if mesh is None:
        return
    if "tensor" in mesh.manual_axes:
        raise ValueError(
            "distribute_saved_activations=True inside shard_map over the tensor axis: there every rank has arrays of "
            "its own; call the checkpointed function outside"
        )
    over, ranks = ranks_of(logical_to_spec(parts, mesh)[1], mesh)
    if x.shape[1] % ranks:
        raise ValueError(
            f"sequence length {x.shape[1]} of {x.shape} does not divide over mesh axes {over} = {ranks}; pad it, or "
            "leave distribute_saved_activations off"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _run(function: Callable[..., Any], whole: LogicalAxes, parts: LogicalAxes, *args: Array) -> Any:
    return function(*args)


def _forward(
    function: Callable[..., Any], whole: LogicalAxes, parts: LogicalAxes, x: Array, *rest: Array
) -> tuple[Any, Any]:
    return function(x, *rest), (constrain(x, parts), rest)


def _backward(
    function: Callable[..., Any], whole: LogicalAxes, parts: LogicalAxes, saved: Any, g: Any
) -> tuple[Any, ...]:
    x, rest = saved
    # jax.checkpoint here keeps the compiler from taking forward's values in place of computing them again.
    return jax.vjp(jax.checkpoint(function), constrain(x, whole), *rest)[1](g)


_run.defvjp(_forward, _backward)
