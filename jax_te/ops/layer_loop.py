"""A loop over layers in which kernels write residuals where backward's kernels read them.

``jax.lax.scan`` collects the residuals of a turn at the turn's end: each is copied into an array of all turns, which
JAX fills with zeros before. XLA lets a kernel write into a part of an array and read a part of one, but only where
nothing else reads the kernel's result. So forward is a loop of its own here: a residual is written into its array where
it is computed, and whatever reads it later in the turn reads it from there. Backward is a ``jax.lax.scan`` over these
arrays.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Jaxpr, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from jax_te._validation import checked
from jax_te.ops.residual_plan import ResidualPlan, called_jaxprs, evaluate, is_small, plan_residuals, read, variables
from jax_te.ops.sharded_vjp import merges_gradients
from jax_te.quantize import as_float32_inside, with_max_gradients_inside
from jax_te.remat import loop_body
from jax_te.sharding import mark_varying, varying_axes

LOOP_NAME = "layer_loop"
"""Checkpoint name of a loop's arguments in a program before its derivative, which is that of what is inside."""

_LOOPS = 4
"""Number of loops at most. One loop would hold the kernels and the gradients of all layers beside all residuals."""


@checked
def scan_layers(body: Callable[[Any, Any], tuple[Any, Any]], init: Any, layers: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Run layers one after the other in loops, as ``jax.lax.scan`` does, and faster where it is differentiated.

    A loop's body is compiled once for all of its layers; up to four loops run one after the other. In forward, kernels
    write what backward needs where backward's kernels read it; ``jax.lax.scan`` would copy it there. Values are the
    same. Call it under ``jax.jit``: eager calls are traced each time. `jax_te.models.run_layers` calls it with
    ``scan=True``.

    Args:
        body: ``body(carry, layer) -> (carry, y)``; the carry has the same structure, shapes and dtypes before and
            after. What it closes over is differentiated, too, by reverse-mode alone (``jax.grad``, ``jax.vjp``).
        init: carry of the first layer.
        layers: arguments of each layer: trees of arrays, such as NNX modules, of one structure, with equal shapes,
            dtypes and static attributes. Modules that a call changes are copies: return the changes as ``y``.

    Returns:
        The last carry, and ``y`` of each layer.

    Raises:
        ValueError: for layers with different structures, shapes or dtypes; for states of quantizers that a carry has
            or ``body`` closes over, if their gradients merge by maximum, see `jax_te.quantize.with_max_gradients`.
        TypeError: for a carry with another structure, shape or dtype than ``init``.

    Source: ``jax.lax.scan``.

    >>> from flax import nnx
    >>> from jax_te.layers import Linear
    >>> layers = [Linear(16, 16, rngs=nnx.Rngs(number)) for number in range(3)]
    >>> y, _ = scan_layers(lambda x, layer: (layer(x), None), jnp.ones((4, 16)), layers)
    >>> y.shape
    (4, 16)
    """
    layers = [jax.tree.map(_as_array, layer) for layer in layers]
    if not layers:
        return init, []
    _check_equal(layers)
    layers = _equally_varying(layers)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(layers[0])]

    def turn(carry: Any, layer: Any) -> Any:
        return body(carry, _converted(layer, dtypes, with_max_gradients_inside))

    # States of quantizers may have a dtype that merges gradients by maximum, of which JAX cannot stack arrays.
    stackable = [_converted(layer, dtypes, as_float32_inside) for layer in layers]
    init = jax.tree.map(_as_array, init)
    with loop_body():
        program, results = _program(turn, init, stackable[0])
        if any(jax.typeof(leaf).weak_type for leaf in jax.tree.leaves(init)):
            init = _promoted(init, results[0])
            program, results = _program(turn, init, stackable[0])
    _check_carry(init, results[0])
    _check_no_shared_states([*jax.tree.leaves(init), *program.consts])

    # A derivative rule has to know what the body closes over, so it becomes an argument, whatever its dtype.
    def call(carry: Any, layer: Any, *closed_over: Any) -> Any:
        leaves = eval_jaxpr(program.jaxpr, closed_over, *jax.tree.leaves((carry, layer)))
        return jax.tree.unflatten(jax.tree.structure(results), leaves)

    return _run(call, init, stackable, list(program.consts))


def _as_array(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)


def _check_equal(layers: list[Any]) -> None:
    """Raise ValueError for layers that one program cannot run."""
    first, others = layers[0], layers[1:]
    structure = jax.tree.structure(first)
    for number, layer in enumerate(others, start=1):
        if jax.tree.structure(layer) != structure:
            raise ValueError(
                f"layers of one loop have one structure, and layer {number} has another than layer 0; give them equal "
                "static attributes, or run them one by one"
            )
        for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(layer), strict=True):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                raise ValueError(
                    f"layers of one loop have equal arrays, and layer {number} has {other.dtype}{list(other.shape)} "
                    f"where layer 0 has {one.dtype}{list(one.shape)}; run them one by one"
                )


def _equally_varying(layers: list[Any]) -> list[Any]:
    """Return layers whose arrays may differ between devices of a ``shard_map`` where those of any layer may."""

    def marked(*column: Any) -> list[Any]:
        # As jnp.stack marks them, whose derivative this has, too.
        axes = varying_axes(column)
        return [mark_varying(leaf, axes) for leaf in column]

    columns = [marked(*column) for column in zip(*map(jax.tree.leaves, layers), strict=True)]
    structure = jax.tree.structure(layers[0])
    return [jax.tree.unflatten(structure, [column[place] for column in columns]) for place in range(len(layers))]


def _converted(tree: Any, dtypes: list[Any], convert: Callable[[Any], Any]) -> Any:
    """Return a tree with the leaves converted that, by these dtypes, are states whose gradients merge by maximum."""
    leaves, structure = jax.tree.flatten(tree)
    converted = [convert(leaf) if merges_gradients(dtype) else leaf for leaf, dtype in zip(leaves, dtypes, strict=True)]
    return jax.tree.unflatten(structure, converted)


def _program(turn: Callable[..., Any], carry: Any, layer: Any) -> tuple[Any, Any]:
    """Return a turn as a program, and the types of its results, the carry and ``y``."""
    program, results = jax.make_jaxpr(turn, return_shape=True)(carry, layer)
    if not (isinstance(results, tuple) and len(results) == 2):
        raise TypeError(f"body returns the carry and y, a tuple of two; it returned {type(results).__name__}")
    return program, results


def _promoted(init: Any, result: Any) -> Any:
    """Return the first carry, Python numbers in the dtypes that a turn returns, as ``jax.lax.scan`` takes them."""
    if jax.tree.structure(init) != jax.tree.structure(result):
        return init
    return jax.tree.map(
        lambda first, after: first.astype(after.dtype) if jax.typeof(first).weak_type else first, init, result
    )


def _check_carry(init: Any, result: Any) -> None:
    """Raise TypeError for a carry that is another one after a turn."""
    if jax.tree.structure(init) != jax.tree.structure(result):
        raise TypeError(
            f"body returns a carry of init's structure; init has {jax.tree.structure(init)}, and body returned "
            f"{jax.tree.structure(result)}"
        )
    for (path, first), after in zip(jax.tree.leaves_with_path(init), jax.tree.leaves(result), strict=True):
        if (first.shape, first.dtype) != (after.shape, after.dtype):
            raise TypeError(
                f"body returns a carry of init's shapes and dtypes; init{jax.tree_util.keystr(path)} is "
                f"{first.dtype}{list(first.shape)}, and body returned {after.dtype}{list(after.shape)}"
            )


def _check_no_shared_states(arrays: list[Any]) -> None:
    """Raise ValueError for states of quantizers that all layers share."""
    if any(merges_gradients(array.dtype) for array in arrays):
        raise ValueError(
            "body closes over states of quantizers, or carries them, and their gradients merge by maximum over layers, "
            "which a loop over layers does not do; give each layer its own, or run them one by one"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(body: Callable[..., Any], init: Any, layers: list[Any], constants: list[Any]) -> tuple[Any, list[Any]]:
    """Return the last carry and each ``y``; this is what runs where nothing is differentiated."""

    def turn(carry: Any, layer: Any) -> Any:
        return body(carry, layer, *constants)

    # The name says what this call is to whoever reads a program of it, see `LOOP_NAME`. A carry may have no arrays.
    (carry, layers), ys = checkpoint_name((init, layers), LOOP_NAME), []
    for part in _parts(layers):
        carry, stacked = jax.lax.scan(turn, carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *part))
        ys += [jax.tree.map(lambda leaf, place=place: leaf[place], stacked) for place in range(len(part))]
    return carry, ys


def _parts(items: list[Any]) -> list[list[Any]]:
    """Return the items in lists, one for each loop, of at least two items where there are two."""
    count = max(1, min(_LOOPS, len(items) // 2))
    bounds = [len(items) * number // count for number in range(count + 1)]
    return [items[start:end] for start, end in itertools.pairwise(bounds)]


@dataclass(frozen=True, eq=False)
class _Argument:
    """Structure of an argument of a turn, and which of its leaves are differentiated."""

    structure: Any
    differentiated: tuple[bool, ...]

    def picked(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves that are differentiated."""
        return [leaf for leaf, is_one in zip(leaves, self.differentiated, strict=True) if is_one]

    def joined(self, picked: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """Return all leaves: the picked ones, and these others in the places that are not differentiated."""
        rest = iter(picked)
        return [next(rest) if is_one else leaf for leaf, is_one in zip(others, self.differentiated, strict=True)]

    def cotangents(self, picked: Sequence[Any]) -> Any:
        """Return a tree of cotangents, None in the places that are not differentiated."""
        return jax.tree.unflatten(self.structure, self.joined(picked, [None] * len(self.differentiated)))


@dataclass(frozen=True, eq=False)
class _Result:
    """Structure and types of a result of a turn."""

    structure: Any
    types: list[Any]

    def tree(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self.structure, leaves)

    def zeros(self) -> list[Any]:
        """Return the leaves of a cotangent that is zero."""
        return [_zeros(type_) for type_ in self.types]


@dataclass(frozen=True, eq=False)
class _Turn:
    """One turn of the loop as a program: ``(carry, layer, constants) -> (carry, y, residuals)``, all as leaves.

    Args:
        program: the program.
        plan: plan of its residuals.
        arguments: its three arguments.
        given: variables of the program that backward has values of: a layer's, constants, and what it closes over.
        read_by_forward, read_by_backward: whether either reads each array of a layer. Sinks of gradients are not read.
        carry, y, pullback: its results; residuals are the leaves of the function that ``jax.vjp`` returns.
    """

    program: Jaxpr
    plan: ResidualPlan
    arguments: tuple[_Argument, _Argument, _Argument]
    given: list[Var]
    read_by_forward: tuple[bool, ...]
    read_by_backward: tuple[bool, ...]
    carry: _Result
    y: _Result
    pullback: _Result


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Kept:
    """What backward needs.

    Args:
        layers: leaves of each layer.
        constants: leaves of the constants, then arrays that the program closes over.
        stacks: for each loop, the arrays ``[l, ...]`` that its turns have written residuals to.
        turn: the turn.
    """

    layers: list[list[Any]]
    constants: list[Any]
    stacks: list[list[Any]]
    turn: _Turn = field(metadata={"static": True})


def _forward(body: Callable[..., Any], init: Any, layers: list[Any], constants: list[Any]) -> tuple[Any, _Kept]:
    carry, carry_argument = _argument([init], is_carry=True)
    each, layer_argument = _argument(layers)
    constant, constant_argument = _argument([constants])
    arguments = carry_argument, layer_argument, constant_argument
    turn, closed_over = _trace(body, arguments, (carry[0], each[0], constant[0]))
    known = [*constant[0], *closed_over]

    state, ys, stacks = carry[0], [], []
    for part in _parts(each):
        state, own_ys, own_stacks = _run_forward(turn, state, part, known)
        ys += [turn.y.tree(leaves) for leaves in own_ys]
        stacks.append(own_stacks)
    return (turn.carry.tree(state), ys), _Kept(each, known, stacks, turn)


def _argument(trees: Sequence[Any], *, is_carry: bool = False) -> tuple[list[list[Any]], _Argument]:
    """Return leaves of each of some equal trees of ``CustomVJPPrimal``, as arrays, and what they have in common."""
    leaves = [jax.tree.leaves(tree) for tree in trees]
    # A carry that nothing differentiates at first does depend on a layer's parameters after it.
    differentiated = tuple(
        _is_float(column[0].value) and (is_carry or any(leaf.perturbed for leaf in column))
        for column in zip(*leaves, strict=True)
    )
    return [[leaf.value for leaf in own] for own in leaves], _Argument(jax.tree.structure(trees[0]), differentiated)


def _trace(
    body: Callable[..., Any], arguments: tuple[_Argument, _Argument, _Argument], values: tuple[list[Any], ...]
) -> tuple[_Turn, list[Any]]:
    """Return one turn, and the arrays that its program closes over."""

    def turn(*leaves: list[Any]) -> Any:
        def call(*picked: list[Any]) -> Any:
            carry, layer, constants = (
                jax.tree.unflatten(argument.structure, argument.joined(own, others))
                for argument, own, others in zip(arguments, picked, leaves, strict=True)
            )
            return body(carry, layer, *constants)

        picked = (argument.picked(own) for argument, own in zip(arguments, leaves, strict=True))
        (carry, y), pullback = jax.vjp(call, *picked)
        return carry, y, pullback

    closed, results = jax.make_jaxpr(turn, return_shape=True)(*values)
    program, outputs = closed.jaxpr, iter(closed.jaxpr.outvars)
    carry, y, pullback = (
        _Result(jax.tree.structure(result), [next(outputs).aval for _ in jax.tree.leaves(result)]) for result in results
    )
    residuals = program.outvars[len(carry.types) + len(y.types) :]
    given = [*program.invars[len(values[0]) :], *program.constvars]
    plan = plan_residuals(program, residuals, given)
    in_forward = variables(program.outvars, *(eqn.invars for eqn in program.eqns))
    of_layer = given[: len(values[1])]
    forward, backward = (tuple(var in found for var in of_layer) for found in (in_forward, plan.reads()))
    return _Turn(program, plan, arguments, given, forward, backward, carry, y, pullback), list(closed.consts)


def _run_forward(
    turn: _Turn, carry: list[Any], part: list[list[Any]], known: list[Any]
) -> tuple[list[Any], list[list[Any]], list[Any]]:
    """Run one loop; return the carry, ``y`` of each layer, and the arrays with residuals, all as leaves."""
    places = {var: place for place, var in enumerate(turn.plan.stored)}

    def run(state: tuple[Any, list[Any], dict[int, Any]], layer: list[Any]) -> tuple[Any, Any]:
        number, carry, stacks = state
        stacks, offloaded = dict(stacks), {}

        def stored(var: Var, value: Any) -> Any:
            """Write a residual, and return its value, of a large one as read from where it is written."""
            place = places[var]
            if _is_offloaded(var.aval):
                offloaded[place] = value
                return value
            stacks[place] = jax.lax.dynamic_update_index_in_dim(stacks[place], value, number, 0)
            if is_small(var):
                return value
            # Without the barrier XLA takes the value in place of what was written, and then has to copy it.
            written = jax.lax.optimization_barrier(stacks[place])
            return _row_major(jax.lax.dynamic_index_in_dim(written, number, 0, keepdims=False))

        values = dict(zip(turn.given, [*layer, *known], strict=True))
        for var, value in zip(turn.program.invars, carry, strict=False):
            values[var] = stored(var, value) if var in places else value
        for eqn in turn.program.eqns:
            evaluate(turn.program, eqn, values)
            for result in eqn.outvars:
                if result not in places:
                    continue
                # A called function may read what it returns, and the rest of the turn a small result. XLA would then
                # run the kernel twice, once for what is written; behind a barrier it copies.
                is_read = bool(called_jaxprs(eqn)) or is_small(result)
                value = jax.lax.optimization_barrier(values[result]) if is_read else values[result]
                values[result] = stored(result, value)
        results = iter([read(values, atom) for atom in turn.program.outvars])
        carry, y = ([next(results) for _ in result.types] for result in (turn.carry, turn.y))
        return (number + 1, carry, stacks), (y, offloaded)

    carry, stacked = _stacked_behind(carry, part, turn.read_by_forward)
    empty = {place: _empty(len(part), var.aval) for var, place in places.items() if not _is_offloaded(var.aval)}
    # What a remat policy has offloaded to the host is copied there anyway: the scan itself stacks it.
    (_, carry, stacks), (ys, offloaded) = jax.lax.scan(run, (jnp.int32(0), carry, empty), stacked)
    stacks |= offloaded
    return carry, [[y[place] for y in ys] for place in range(len(part))], [stacks[place] for place in places.values()]


def _stacked_behind(state: list[Any], part: list[list[Any]], wanted: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Return the state that a loop begins with, and the wanted arrays of its layers stacked, None for others.

    XLA stacks them once the state is there. Otherwise it may stack the layers of all loops at the start, and keep
    forward's stacks for backward.
    """
    columns = [[own[place] for own in part] if is_wanted else None for place, is_wanted in enumerate(wanted)]
    given = [*([leaf] for leaf in state), *(own for own in columns if own is not None)]
    # Random keys have no barrier, and one of arrays of which some differ between devices makes all of them do so (jax
    # 0.10.2).
    behind = [own for own in given if not _is_extended(own[0])]
    if len({varying_axes(own) for own in behind}) <= 1:
        ready = iter(jax.lax.optimization_barrier(behind))
        state = [leaf if _is_extended(leaf) else next(ready)[0] for leaf in state]
        columns = [own if own is None or _is_extended(own[0]) else next(ready) for own in columns]
    return state, [None if column is None else jnp.stack(column) for column in columns]


def _backward(body: Callable[..., Any], kept: _Kept, cotangents: tuple[Any, list[Any]]) -> tuple[Any, ...]:
    turn = kept.turn
    of_carry, of_layer, of_constants = turn.arguments
    g_carry = [_with_values(g) for g in of_carry.picked(jax.tree.leaves(cotangents[0]))]
    sums = [jnp.zeros_like(each) for each in of_constants.picked(kept.constants[: len(of_constants.differentiated)])]
    g_ys = [jax.tree.leaves(g) for g in cotangents[1]]

    state, d_layers = (g_carry, sums), []
    loops = zip(_parts(kept.layers), _parts(g_ys), kept.stacks, strict=True)
    for part, own_g_ys, stacks in reversed(list(loops)):
        state, own = _run_backward(turn, state, part, own_g_ys, stacks, kept.constants)
        d_layers = own + d_layers
    d_carry, d_constants = state
    each = [of_layer.cotangents(own) for own in d_layers]
    return of_carry.cotangents(d_carry), each, of_constants.cotangents(d_constants)


_State = tuple[list[Any], list[Any]]
"""What backward passes on: cotangents of the carry, and sums of those of the constants."""


def _run_backward(
    turn: _Turn, state: _State, part: list[list[Any]], g_ys: list[list[Any]], stacks: list[Any], known: list[Any]
) -> tuple[_State, list[list[Any]]]:
    """Run backward of one loop; return the next state, and cotangents of each layer, None for zeros."""

    def run(state: _State, arrays: tuple[list[Any], ...]) -> tuple[_State, list[Any]]:
        (g_carry, sums), (layer, stored, g_y) = state, arrays
        stored = map(_row_major, stored)
        values = dict(zip(turn.plan.stored, stored, strict=True)) | dict(zip(turn.given, [*layer, *known], strict=True))
        pullback = turn.pullback.tree(turn.plan.make(values))
        of_carry = turn.arguments[0].joined(g_carry, turn.carry.zeros())
        of_y = [zero if g is None else g for g, zero in zip(g_y, turn.y.zeros(), strict=True)]
        d_carry, d_layer, d_constants = pullback((turn.carry.tree(of_carry), turn.y.tree(of_y)))
        return (d_carry, [total + d for total, d in zip(sums, d_constants, strict=True)]), d_layer

    g_carry, stacked = _stacked_behind(state[0], part, turn.read_by_backward)
    arrays = stacked, stacks, [_stacked_cotangents(column) for column in zip(*g_ys, strict=True)]
    first = jax.tree.map(lambda leaf: jax.lax.index_in_dim(leaf, 0, keepdims=False), arrays)
    program = jax.make_jaxpr(run)((g_carry, state[1]), first).jaxpr
    # In a shard_map the cotangents of devices may differ after the first turn.
    outputs, count = program.outvars, len(g_carry)
    g_carry, sums = _varying_as(g_carry, outputs[:count]), _varying_as(state[1], outputs[count : count + len(state[1])])
    # A layer's cotangents that are zeros, such as those of a kernel whose gradient a sink takes, are not stacked.
    d_outputs = outputs[count + len(sums) :]
    useful = [not _is_zeros(program, atom) for atom in d_outputs]
    empty = [_empty(len(part), atom.aval) for atom, is_useful in zip(d_outputs, useful, strict=True) if is_useful]

    # Not as ``y`` of the scan, which would begin with zeros.
    def run_and_write(loop: tuple[Any, _State, list[Any]], arrays: tuple[list[Any], ...]) -> tuple[Any, None]:
        number, state, d_stacks = loop
        state, d_layer = run(state, arrays)
        d_useful = [d for d, is_useful in zip(d_layer, useful, strict=True) if is_useful]
        d_stacks = [
            jax.lax.dynamic_update_index_in_dim(stack, d, len(part) - 1 - number, 0)
            for stack, d in zip(d_stacks, d_useful, strict=True)
        ]
        return (number + 1, state, d_stacks), None

    loop = jnp.int32(0), (g_carry, sums), empty
    (_, state, d_stacks), _ = jax.lax.scan(run_and_write, loop, arrays, reverse=True)
    # XLA takes long to decide whether to fuse each of many slices with its consumer; the barrier settles it.
    each = [[jax.lax.optimization_barrier(stack[place]) for stack in d_stacks] for place in range(len(part))]
    rests = [iter(own) for own in each]
    return state, [[next(rest) if is_useful else None for is_useful in useful] for rest in rests]


def _varying_as(arrays: list[Any], atoms: Sequence[Any]) -> list[Any]:
    """Return arrays that may differ along the mesh axes along which these results of a program may."""
    return [mark_varying(array, atom.aval.manual_axis_type.varying) for array, atom in zip(arrays, atoms, strict=True)]


def _row_major(array: Any) -> Any:
    """Return what a turn reads of a stack, which then is contiguous."""
    # A transposed operand of a kernel would have XLA transpose the stack, and write and read it with strides.
    if array.ndim < 2 or not jnp.issubdtype(array.dtype, jnp.number) or _is_offloaded(jax.typeof(array)):
        return array
    return with_layout_constraint(array, Layout(tuple(range(array.ndim))))


def _stacked_cotangents(column: Sequence[Any]) -> Any:
    """Return cotangents of each layer stacked, None if all are zeros."""
    if all(isinstance(g, SymbolicZero) or g.dtype == jax.dtypes.float0 for g in column):
        return None
    return jnp.stack([_with_values(g) for g in column])


def _is_zeros(program: Jaxpr, atom: Var | Literal) -> bool:
    """Return whether a result is zeros, as JAX writes a cotangent that it knows to be zero."""
    if isinstance(atom, Literal):
        return not np.any(atom.val)
    makers = (eqn for eqn in program.eqns if atom in eqn.outvars and eqn.primitive.name == "broadcast_in_dim")
    return any(_is_zeros(program, eqn.invars[0]) for eqn in makers)


def _is_float(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _is_extended(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.extended))


def _is_offloaded(type_: Any) -> bool:
    return type_.memory_space != jax.memory.Space.Device


def _with_values(g: Any) -> Any:
    return _zeros(g) if isinstance(g, SymbolicZero) else g


def _zeros(type_: Any) -> Any:
    """Return the cotangent zero of an array of a type; of integers it has no values."""
    if not _is_float(type_):
        return np.zeros(type_.shape, jax.dtypes.float0)
    zeros = jnp.zeros(type_.shape, type_.dtype, out_sharding=_sharding(type_))
    return mark_varying(zeros, type_.manual_axis_type.varying)


def _empty(length: int, type_: Any) -> Any:
    """Return an array ``[length, ...]`` for arrays of a type, without values where that is possible."""
    new = jax.lax.empty if _is_extended(type_) or _runs_on_one_device() else jnp.zeros
    array = new((length, *type_.shape), type_.dtype, out_sharding=_sharding(type_, None))
    return mark_varying(array, type_.manual_axis_type.varying)


def _sharding(type_: Any, *leading: None) -> NamedSharding | None:
    """Return the sharding of an array of a type, with these axes in front; None without a mesh."""
    sharding = type_.sharding
    return None if sharding.mesh.empty else NamedSharding(sharding.mesh, PartitionSpec(*leading, *sharding.spec))


def _runs_on_one_device() -> bool:
    # The compiler makes an array without values whole on each device of a program that it partitions (jax 0.11.2).
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 if mesh.empty else mesh.size == 1 or mesh.are_all_axes_manual


_run.defvjp(_forward, _backward, symbolic_zeros=True)
