"""Full recomputation whose saved input is sharded over the tensor axis."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jax_te.sharding import constrain, current_mesh, logical_to_spec, ranks_of
from jax_te.typing import Array, LogicalAxes


def remat_with_sharded_input(function: Callable[..., Any], *args: Array) -> Any:
    """Return ``function(*args)``; backward recomputes it from a first argument that is saved sharded.

    Args:
        function: a function of arrays.
        *args: the arrays. The first, ``[b, s, ...]``, is sharded over the tensor axis along the sequence.

    Raises:
        ValueError: if the first argument is not ``[b, s, ...]``, if its sequence does not divide over the mesh axes,
            or if the tensor axis is manual (inside ``shard_map``).

    Source: ``distribute_saved_activations`` of ``transformer_engine.pytorch.checkpoint``.

    >>> import jax.numpy as jnp
    >>> remat_with_sharded_input(jnp.sin, jnp.zeros((1, 2, 3))).shape
    (1, 2, 3)
    """
    unsharded = _axes(args[0])
    sharded: LogicalAxes = (unsharded[0], "sequence_parallel", *unsharded[2:])
    _check(args[0], sharded)
    # A custom derivative gives no gradient to arrays that a function closes over: they are made arguments.
    closed, hoisted = jax.closure_convert(function, *args)
    return _run(closed, unsharded, sharded, *args, *hoisted)


def _axes(x: Array) -> LogicalAxes:
    if x.ndim < 2:
        raise ValueError(
            f"distribute_saved_activations=True splits the second axis of the first array argument, [b, s, ...]; got "
            f"shape {x.shape}"
        )
    return ("batch", "sequence", *(None for _ in x.shape[2:]))


def _check(x: Array, sharded: LogicalAxes) -> None:
    mesh = current_mesh()
    if mesh is None:
        return
    if "tensor" in mesh.manual_axes:
        raise ValueError(
            "distribute_saved_activations=True inside shard_map over the tensor axis: there every device has arrays of "
            "its own; call the recomputed function outside"
        )
    over, shards = ranks_of(logical_to_spec(sharded, mesh)[1], mesh)
    # JAX refuses uneven shards too, but only in the constraint, and its error does not name the argument.
    if x.shape[1] % shards:
        raise ValueError(
            f"sequence length {x.shape[1]} of {x.shape} does not divide over mesh axes {over} = {shards}; pad it, or "
            "leave distribute_saved_activations off"
        )


# A custom derivative, because jax.checkpoint with a constraint on its input runs the same equations in both passes:
# forward would all-gather the input as well.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _run(function: Callable[..., Any], unsharded: LogicalAxes, sharded: LogicalAxes, *args: Array) -> Any:
    return function(*args)


def _forward(function: Callable[..., Any], unsharded: LogicalAxes, sharded: LogicalAxes, *args: Any) -> tuple[Any, Any]:
    x, *rest = (arg.value for arg in args)
    # Backward must differentiate what the caller does and no more: an op's derivative asks what takes part in it.
    taken = {i: None for i, arg in enumerate(args) if arg.perturbed}
    return function(x, *rest), (constrain(x, sharded), rest, taken)


def _backward(
    function: Callable[..., Any], unsharded: LogicalAxes, sharded: LogicalAxes, saved: Any, g: Any
) -> tuple[Any, ...]:
    x, rest, taken = saved
    args = [constrain(x, unsharded), *rest]

    def run(*given: Array) -> Any:
        return function(*(dict(enumerate(args)) | dict(zip(taken, given, strict=True))).values())

    # Without jax.checkpoint the compiler may merge the second pass with forward's, and keep forward's values instead.
    _, vjp = jax.vjp(jax.checkpoint(run), *(args[i] for i in taken))
    cotangents = vjp(jax.tree.map(_instantiated, g))
    found = dict(zip(taken, cotangents, strict=True))
    return tuple(found.get(i) for i in range(len(args)))


def _instantiated(g: Any) -> Any:
    return jnp.zeros(g.shape, g.dtype) if isinstance(g, SymbolicZero) else g  # type: ignore[arg-type]


_run.defvjp(_forward, _backward, symbolic_zeros=True)
