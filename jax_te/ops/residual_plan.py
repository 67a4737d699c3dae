"""Which residuals of a program are stored, and which are made again of what backward has anyway."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.core import eval_jaxpr
from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Literal, Var

_LAYOUT = ("name", "reshape", "squeeze", "stop_gradient", "transpose")
"""Primitives with one operand whose values they keep. What they are made of is stored in place of their result."""

_CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vmap_call")
"""Primitives that run a function once, on their operands."""

_SMALL = 4096
"""Most elements of a small array, such as a scale or its history; activations and kernels have more."""


@dataclass(frozen=True, eq=False)
class ResidualPlan:
    """How backward gets a program's residuals.

    Args:
        program: the program.
        residuals: the residuals.
        stored: variables whose values are stored, each once.
        again: equations that make the residuals of stored and given values, in order. A pair says that the first
            variable has the value of the second.
    """

    program: Jaxpr
    residuals: Sequence[Var | Literal]
    stored: tuple[Var, ...]
    again: tuple[JaxprEqn | tuple[Var, Var], ...]

    def reads(self) -> dict[Var, None]:
        """Return the variables whose values make the residuals."""
        return variables(self.residuals, *(step[1:] if isinstance(step, tuple) else step.invars for step in self.again))

    def make(self, known: Mapping[Var, Any]) -> list[Any]:
        """Return the residuals.

        Args:
            known: values of the stored and of the given variables.
        """
        values = dict(known)
        for step in self.again:
            if isinstance(step, tuple):
                values[step[0]] = values[step[1]]
            else:
                evaluate(self.program, step, values)
        return [read(values, each) for each in self.residuals]


def plan_residuals(program: Jaxpr, residuals: Sequence[Var | Literal], given: Sequence[Var]) -> ResidualPlan:
    """Return the plan with the fewest copies of large arrays.

    Args:
        program: program that computes the residuals.
        residuals: outputs of the program that backward needs.
        given: variables of the program whose values backward has: constants and a layer's own arrays.
    """
    planner = _Planner(program, frozenset(given))
    for residual in residuals:
        if isinstance(residual, Var):
            planner.need(residual)
    return ResidualPlan(program, tuple(residuals), tuple(planner.stored), planner.again())


def evaluate(program: Jaxpr, eqn: JaxprEqn, values: dict[Var, Any]) -> None:
    """Compute the results of an equation of a program from values of its operands, and add them to ``values``."""
    operands = list(variables(eqn.invars))
    results = [result for result in eqn.outvars if not isinstance(result, DropVar)]
    # A program of one equation: JAX then keeps the equation's name, line and context (such as its mesh).
    unnamed = program.debug_info.with_unknown_names()
    alone = Jaxpr((), operands, results, [eqn], eqn.effects, debug_info=unnamed)
    computed = eval_jaxpr(alone, (), *(values[operand] for operand in operands))
    values.update(zip(results, computed, strict=True))


def variables(*groups: Iterable[Var | Literal]) -> dict[Var, None]:
    """Return the variables of groups that also have literals, each once and in their order."""
    # Not a set, whose order differs between processes: their programs have to be the same.
    return {atom: None for atom in itertools.chain(*groups) if isinstance(atom, Var)}


def read(values: Mapping[Var, Any], atom: Var | Literal) -> Any:
    """Return the value of a variable or of a literal."""
    return atom.val if isinstance(atom, Literal) else values[atom]


@dataclass
class _Planner:
    program: Jaxpr
    given: frozenset[Var]
    stored: dict[Var, None] = field(default_factory=dict)
    needed: set[Var] = field(default_factory=set)
    small: dict[Var, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.made_by = {result: eqn for eqn in self.program.eqns for result in eqn.outvars}

    def need(self, var: Var) -> None:
        """Note what has to be stored or computed again for a variable."""
        if var in self.given or var in self.needed or var in self.stored:
            return
        eqn = self.made_by.get(var)
        if eqn is not None and (same := same_as(eqn, var)) is not None:
            sources = [same]
        elif eqn is not None and (eqn.primitive.name in _LAYOUT or self._is_small(var)):
            sources = list(variables(eqn.invars))
        else:
            self.stored[var] = None
            return
        self.needed.add(var)
        for source in sources:
            self.need(source)

    def again(self) -> tuple[JaxprEqn | tuple[Var, Var], ...]:
        """Return the equations and equal variables that are needed, in the program's order."""
        steps: list[JaxprEqn | tuple[Var, Var]] = []
        for eqn in self.program.eqns:
            wanted = [result for result in eqn.outvars if result in self.needed]
            sames = [(result, same) for result in wanted if (same := same_as(eqn, result)) is not None]
            steps += sames
            if len(sames) < len(wanted):
                steps.append(eqn)
        return tuple(steps)

    def _is_small(self, var: Var) -> bool:
        """Return whether a variable is made of given arrays by cheap operations, through few elements alone."""
        if var not in self.small:
            eqn = self.made_by.get(var)
            fits = is_small(var)
            if eqn is None or var in self.given:
                self.small[var] = fits and var in self.given
            else:
                self.small[var] = fits and _is_cheap(eqn) and all(map(self._is_small, variables(eqn.invars)))
        return self.small[var]


def is_small(var: Var) -> bool:
    """Return whether a variable has few elements."""
    aval: Any = var.aval
    return math.prod(aval.shape) <= _SMALL


def _is_cheap(eqn: JaxprEqn) -> bool:
    """Return whether an equation may be computed again: no effect, no loop, and nothing that devices send."""
    axes = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    if eqn.effects or any(isinstance(axis, str) for axis in (axes if isinstance(axes, tuple | list) else (axes,))):
        return False
    called = called_jaxprs(eqn)
    return not called or (
        eqn.primitive.name in _CALLS and all(_is_cheap(own) for jaxpr in called for own in jaxpr.eqns)
    )


def same_as(eqn: JaxprEqn, result: Var) -> Var | None:
    """Return the operand that a called function returns as this result; None for a result that it computes."""
    if eqn.primitive.name not in _CALLS:
        return None
    inner, *_ = called_jaxprs(eqn)
    if len(inner.invars) != len(eqn.invars):
        return None
    returned = inner.outvars[eqn.outvars.index(result)]
    if returned not in inner.invars:
        return None
    operand = eqn.invars[inner.invars.index(returned)]
    return operand if isinstance(operand, Var) else None


def called_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Return the jaxprs among the parameters of an equation."""
    parts = [part for value in eqn.params.values() for part in (value if isinstance(value, tuple | list) else (value,))]
    return [jaxpr for part in parts if hasattr(jaxpr := getattr(part, "jaxpr", part), "eqns")]
