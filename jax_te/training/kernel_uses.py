"""Uses of a program's inputs, such as kernels, by ops: also in loops, which read once named inputs more than once.

They are read from the program's jaxpr, whose primitives are those of `jax.extend.core.primitives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import cond_p, custom_vjp_call_p, scan_p, while_p

_LOOPS = (scan_p, while_p)

_Atom: TypeAlias = Var | Literal


class Use(NamedTuple):
    """A call that reads an input of a program, or a slice of it.

    Args:
        ndim: number of axes of what it reads.
        repeated: whether a loop around it reads the same in each iteration.
    """

    ndim: int
    repeated: bool


def has_loops(jaxpr: Jaxpr) -> bool:
    """Return whether a jaxpr, or one that it calls, has a loop."""
    return any(eqn.primitive in _LOOPS or any(map(has_loops, called_jaxprs(eqn))) for eqn in jaxpr.eqns)


def uses_of_inputs(jaxpr: Jaxpr) -> list[set[Use]]:
    """Return the uses of each input of a jaxpr by functions with a backward pass of their own (``jax.custom_vjp``).

    Slices of inputs are followed, into loops, too, which read one in each iteration.
    """
    uses: list[set[Use]] = [set() for _ in jaxpr.invars]
    _follow(jaxpr, [{(i, False)} for i in range(len(jaxpr.invars))], uses)
    return uses


_Marks = set[tuple[int, bool]]
"""Numbers of the inputs that a value is or is a part of, and whether a loop reads that in each iteration."""


# Cases of an equation whose operands are marked:
#
# | equation                         | what it is for the inputs that its operands are a part of            |
# |----------------------------------|----------------------------------------------------------------------|
# | call with a backward of its own  | a use; its results are no parts of them                              |
# | scan                             | its body reads slices of stacked operands once, others repeatedly    |
# | while                            | its body reads everything repeatedly; what the condition reads is no |
# |                                  | use, since it has no gradient                                        |
# | cond                             | each branch may read them                                            |
# | another call (jit, remat)        | the jaxpr that it calls reads them                                   |
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
        if not any(operands):
            continue
        if eqn.primitive is custom_vjp_call_p:
            _add_uses(eqn, operands, uses)
            continue
        results = _results_of(eqn, operands, uses)
        for number, var in enumerate(eqn.outvars):
            marks[var] = set().union(*(result[number] for result in results if number < len(result)))
    return [read(atom) for atom in jaxpr.outvars]


def _add_uses(eqn: JaxprEqn, operands: Sequence[_Marks], uses: list[set[Use]]) -> None:
    """Add the uses of inputs by a call with a backward pass of its own, whose operands are marked."""
    for atom, operand in zip(eqn.invars, operands, strict=True):
        for number, repeated in operand:
            uses[number].add(Use(_ndim(atom), repeated))


def _results_of(eqn: JaxprEqn, operands: Sequence[_Marks], uses: list[set[Use]]) -> list[list[_Marks]]:
    """Return the marks of an equation's results, a list for each jaxpr that may give them; add the uses inside."""
    inner = called_jaxprs(eqn)
    if eqn.primitive is scan_p:
        return [_follow(inner[0], _in_each_iteration(eqn, operands), uses)]
    if eqn.primitive is while_p:
        body = eqn.params["body_jaxpr"].jaxpr
        return [_follow(body, _again(operands[-len(body.invars) :]), uses)]
    if eqn.primitive is cond_p:
        return [_follow(branch, operands[1:], uses) for branch in inner]
    if len(inner) == 1 and len(inner[0].invars) == len(operands):
        return [_follow(inner[0], operands, uses)]
    return [[set().union(*operands)] * len(eqn.outvars)]


def _in_each_iteration(eqn: JaxprEqn, operands: Sequence[_Marks]) -> list[_Marks]:
    """Return the marks of what the body of a scan reads: the slices of stacked operands, the others again and again."""
    if eqn.params["length"] <= 1:
        return list(operands)
    body = called_jaxprs(eqn)[0]
    # Stacked operands have one axis more outside.
    stacked = [_ndim(out) != _ndim(own) for out, own in zip(eqn.invars, body.invars, strict=True)]
    return [operand if slices else _again([operand])[0] for operand, slices in zip(operands, stacked, strict=True)]


def _again(operands: Sequence[_Marks]) -> list[_Marks]:
    return [{(number, True) for number, _ in operand} for operand in operands]


def _ndim(atom: _Atom) -> int:
    return atom.aval.ndim  # type: ignore[attr-defined]  # of arrays, which have it


def called_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the jaxprs among the parameters of an equation."""
    parts = [part for value in eqn.params.values() for part in (value if isinstance(value, tuple | list) else (value,))]
    return [jaxpr for part in parts if hasattr(jaxpr := getattr(part, "jaxpr", part), "eqns")]
