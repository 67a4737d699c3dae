"""Uses of a program's inputs, such as kernels, by ops: also in loops, which read once named inputs more than once.

They are read from the program's jaxpr, whose primitives are those of `jax.extend.core.primitives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import cond_p, custom_vjp_call_p, scan_p, stop_gradient_p, while_p

from jax_te.ops import LOOP_NAME, called_jaxprs

_Atom: TypeAlias = Var | Literal


class Use(NamedTuple):
    """A call that reads an input of a program, or a part of it.

    Args:
        ndim: number of axes of what it reads.
        repeated: whether a loop around it reads the same in each iteration.
        operands: number of the call's operands that are parts of the input.
        beside: numbers of all inputs that operands of the call are parts of.
    """

    ndim: int
    repeated: bool
    operands: int
    beside: frozenset[int]


class InputUses(NamedTuple):
    """Uses of a program's inputs.

    Args:
        calls: calls of each input that read it and have a backward pass of their own.
        results: numbers of the inputs that floating-point results depend on by another way than through these calls.
    """

    calls: list[set[Use]]
    results: set[int]


def uses_of_inputs(jaxpr: Jaxpr) -> InputUses:
    """Return the uses of each input of a jaxpr by functions with a backward pass of their own (``jax.custom_vjp``).

    Parts of inputs are followed: slices, into loops, too, which read one in each iteration, and whatever is computed
    from them without such a function. So each way by which an input may get a gradient is a call or ends in a result.
    """
    calls: list[set[Use]] = [set() for _ in jaxpr.invars]
    results = _follow(jaxpr, [{(i, False)} for i in range(len(jaxpr.invars))], calls)
    return InputUses(calls, {number for result in results for number, _ in result})


_Marks = set[tuple[int, bool]]
"""Numbers of the inputs that a value is or is a part of, and whether a loop reads that in each iteration."""


# Cases of an equation whose operands are marked:
#
# | equation                         | what it is for the inputs that its operands are a part of            |
# |----------------------------------|----------------------------------------------------------------------|
# | call with a backward of its own  | a use; its results are no parts of them                              |
# | scan                             | its body reads slices of stacked operands once, others repeatedly;   |
# |                                  | what it carries it reads in the next iteration                       |
# | while                            | its body reads everything repeatedly; what the condition reads is no |
# |                                  | use, since it has no gradient                                        |
# | cond                             | each branch may read them                                            |
# | another call (jit, remat), also  | the jaxpr that it calls reads them                                   |
# | `scan_layers`                    |                                                                      |
# | stop_gradient                    | its result has no gradient, and neither have integers                |
# | anything else (slice, cast)      | all results are parts of them                                        |
def _follow(jaxpr: Jaxpr, inputs: Sequence[_Marks], uses: list[set[Use]]) -> list[_Marks]:
    """Add the uses inside of a jaxpr to ``uses``, and return the marks of its results.

    Args:
        jaxpr: the jaxpr.
        inputs: marks of its inputs.
        uses: uses of the program's inputs so far.
    """
    marks = {var: of_input for var, of_input in zip(jaxpr.invars, inputs, strict=True) if of_input}

    def read(atom: _Atom) -> _Marks:
        return set() if isinstance(atom, Literal) else marks.get(atom, set())

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if not any(operands) or eqn.primitive is stop_gradient_p:
            continue
        if eqn.primitive is custom_vjp_call_p and not _is_layer_loop(eqn):
            _add_uses(eqn, operands, uses)
            continue
        results = _results_of(eqn, operands, uses)
        for number, var in enumerate(eqn.outvars):
            if _has_gradient(var):
                marks[var] = set().union(*(result[number] for result in results if number < len(result)))
    return [read(atom) for atom in jaxpr.outvars]


def _is_layer_loop(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a call of `scan_layers`, whose backward pass is that of what is in its loops."""
    inner = [own for jaxpr in called_jaxprs(eqn) for own in jaxpr.eqns]
    return any(own.primitive.name == "name" and own.params["name"] == LOOP_NAME for own in inner)


def _add_uses(eqn: JaxprEqn, operands: Sequence[_Marks], uses: list[set[Use]]) -> None:
    """Add the uses of inputs by a call with a backward pass of its own, whose operands are marked."""
    read = [{number for number, _ in operand} for operand in operands]
    beside = frozenset[int]().union(*read)
    for atom, operand in zip(eqn.invars, operands, strict=True):
        for number, repeated in operand:
            times = sum(number in of_operand for of_operand in read)
            uses[number].add(Use(_ndim(atom), repeated, times, beside))


def _results_of(eqn: JaxprEqn, operands: Sequence[_Marks], uses: list[set[Use]]) -> list[list[_Marks]]:
    """Return the marks of an equation's results, a list for each jaxpr that may give them; add the uses inside."""
    inner = called_jaxprs(eqn)
    if eqn.primitive is scan_p:
        return [_follow_loop(inner[0], _in_each_iteration(eqn, operands), _carried(eqn, inner[0]), uses)]
    if eqn.primitive is while_p:
        body = eqn.params["body_jaxpr"].jaxpr
        carried = slice(eqn.params["body_nconsts"], None)
        return [_follow_loop(body, _again(operands[-len(body.invars) :]), carried, uses)]
    if eqn.primitive is cond_p:
        return [_follow(branch, operands[1:], uses) for branch in inner]
    if len(inner) == 1 and len(inner[0].invars) == len(operands):
        return [_follow(inner[0], operands, uses)]
    return [[set().union(*operands)] * len(eqn.outvars)]


def _follow_loop(body: Jaxpr, inputs: Sequence[_Marks], carried: slice, uses: list[set[Use]]) -> list[_Marks]:
    """Return the marks of a loop's results; add the uses in its body, whose inputs ``carried`` are its first results.

    Args:
        body: the body.
        inputs: marks of its inputs in the first iteration.
        carried: places of the inputs that an iteration gets from the one before.
        uses: uses of the program's inputs so far.
    """
    while True:
        results = _follow(body, inputs, uses)
        following = list(inputs)
        following[carried] = [old | new for old, new in zip(inputs[carried], results, strict=False)]
        if following == list(inputs):
            return results
        inputs = following


def _in_each_iteration(eqn: JaxprEqn, operands: Sequence[_Marks]) -> list[_Marks]:
    """Return the marks of what the body of a scan reads: the slices of stacked operands, the others again and again."""
    if eqn.params["length"] <= 1:
        return list(operands)
    stacked = _stacked(eqn.invars, called_jaxprs(eqn)[0].invars)
    return [operand if slices else _again([operand])[0] for operand, slices in zip(operands, stacked, strict=True)]


def _carried(eqn: JaxprEqn, body: Jaxpr) -> slice:
    """Return the places of what a scan carries among its operands: constants, then carried ones, then stacked ones."""
    unstacked = _stacked(eqn.invars, body.invars).count(False)
    # Its results are carried ones, then stacked ones.
    return slice(unstacked - _stacked(eqn.outvars, body.outvars).count(False), unstacked)


def _stacked(outside: Sequence[_Atom], inside: Sequence[_Atom]) -> list[bool]:
    """Return which operands or results of a scan are stacked over its iterations: these have one axis more outside.

    JAX's own parameters of a scan say so as well, in each version by other names.
    """
    return [_ndim(out) != _ndim(own) for out, own in zip(outside, inside, strict=True)]


def _again(operands: Sequence[_Marks]) -> list[_Marks]:
    return [{(number, True) for number, _ in operand} for operand in operands]


def _has_gradient(var: Var) -> bool:
    """Return whether a value may have a gradient: integers and booleans have none."""
    dtype = getattr(var.aval, "dtype", jnp.float32)
    return not (jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_)


def _ndim(atom: _Atom) -> int:
    return atom.aval.ndim  # type: ignore[attr-defined]  # of arrays, which have it
