"""Inputs of a program that it reads more than once though it names them once, in a loop: read from its jaxpr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

LOOPS = ("scan", "while")


class Use(NamedTuple):
    """A call that reads an input of a program, or a slice of it.

    Args:
        ndim: number of axes of what it reads.
        repeated: whether a loop around it reads the same in each iteration.
    """

    ndim: int
    repeated: bool


def has_loops(jaxpr: Any) -> bool:
    """Return whether a jaxpr, or one that it calls, has a loop."""
    return any(eqn.primitive.name in LOOPS or any(map(has_loops, called_jaxprs(eqn))) for eqn in jaxpr.eqns)


def uses_of_inputs(jaxpr: Any) -> list[set[Use]]:
    """Return the uses of each input of a jaxpr by functions with a backward pass of their own (``jax.custom_vjp``).

    Slices of inputs are followed, into loops, too, which read one in each iteration.
    """
    uses: list[set[Use]] = [set() for _ in jaxpr.invars]
    _follow(jaxpr, [{(i, False)} for i in range(len(jaxpr.invars))], uses)
    return uses


_Marks = set[tuple[int, bool]]
"""Numbers of the inputs that a value is or is a part of, and whether a loop reads that in each iteration."""


def _follow(jaxpr: Any, inputs: Sequence[_Marks], uses: list[set[Use]]) -> list[_Marks]:
    """Add the uses inside of a jaxpr to ``uses``, and return the marks of its results.

    Args:
        jaxpr: the jaxpr.
        inputs: marks of its inputs.
        uses: uses of the program's inputs so far.
    """
    marks = {var: of_input for var, of_input in zip(jaxpr.invars, inputs, strict=True) if of_input}

    def read(atom: Any) -> _Marks:
        return set() if isinstance(atom, Literal) else marks.get(atom, set())

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if not any(operands):
            continue
        name, inner = eqn.primitive.name, called_jaxprs(eqn)
        if name.startswith("custom_vjp_call"):
            # Its result is no part of its operands, whatever it computes of them.
            for atom, operand in zip(eqn.invars, operands, strict=True):
                for number, repeated in operand:
                    uses[number].add(Use(atom.aval.ndim, repeated))
            continue
        if name == "scan":
            results = [_follow(inner[0], _in_each_iteration(eqn, operands), uses)]
        elif name == "while":
            body = eqn.params["body_jaxpr"].jaxpr
            results = [_follow(body, _again(operands[-len(body.invars) :]), uses)]
        elif name == "cond":
            results = [_follow(branch, operands[1:], uses) for branch in inner]
        elif len(inner) == 1 and len(inner[0].invars) == len(operands):
            results = [_follow(inner[0], operands, uses)]
        else:  # what takes a part of it
            results = [[set().union(*operands)] * len(eqn.outvars)]
        for number, var in enumerate(eqn.outvars):
            marks[var] = set().union(*(result[number] for result in results if number < len(result)))
    return [read(atom) for atom in jaxpr.outvars]


def _in_each_iteration(eqn: Any, operands: Sequence[_Marks]) -> list[_Marks]:
    """Return the marks of what the body of a scan reads: the slices of stacked operands, the others again and again."""
    if eqn.params["length"] <= 1:
        return list(operands)
    body = called_jaxprs(eqn)[0]
    # Stacked operands have one axis more outside.
    stacked = [out.aval.ndim != own.aval.ndim for out, own in zip(eqn.invars, body.invars, strict=True)]
    return [operand if slices else _again([operand])[0] for operand, slices in zip(operands, stacked, strict=True)]


def _again(operands: Sequence[_Marks]) -> list[_Marks]:
    return [{(number, True) for number, _ in operand} for operand in operands]


def called_jaxprs(eqn: Any) -> list[Any]:
    """Return the jaxprs among the parameters of an equation."""
    parts = [part for value in eqn.params.values() for part in (value if isinstance(value, tuple | list) else (value,))]
    return [jaxpr for part in parts if hasattr(jaxpr := getattr(part, "jaxpr", part), "eqns")]
