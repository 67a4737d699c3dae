"""Parameters that a model's GEMMs take, and which of these GEMMs are heads or out of reach, read from the jaxpr of a
call.

In a jaxpr ``x @ w``, ``jnp.einsum``, ``jnp.dot`` and Flax's layers are all the same equation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

IN_REACH = "jax_te_in_reach"
"""Name scope of the GEMMs that drop-ins would compute, in a traced call that looks for them."""


class ModelGemms(NamedTuple):
    """Names of the parameters that a model's operations take.

    Args:
        used: those that any operation takes.
        taken: those that a GEMM with an input takes.
        heads: those of its heads: no other GEMM with a parameter takes what theirs return.
        in_reach: those in a GEMM in the scope `IN_REACH`.
        out_of_reach: those that a GEMM with an input outside of this scope takes.
    """

    used: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()
    heads: frozenset[str] = frozenset()
    in_reach: frozenset[str] = frozenset()
    out_of_reach: frozenset[str] = frozenset()

    def under(self, names: Callable[[str], Iterable[str]]) -> ModelGemms:
        """Return the same with other names: a function of a name returns those of the parameter."""
        return ModelGemms(*(frozenset(name for one in group for name in names(one)) for group in self))


def gemms_of_model(jaxpr: Any, parameters: Mapping[Any, str]) -> ModelGemms:
    """Return which parameters a model's GEMMs take, and which of them are its heads.

    Args:
        jaxpr: jaxpr of a traced call of the model.
        parameters: the jaxpr's variables that are parameters -> their names.
    """
    flow = _Flow()
    kinds = [
        _Value({parameters[var]}, frozenset(), True) if var in parameters else _Value(set(), frozenset(), False)
        for var in jaxpr.invars
    ]
    flow.run(jaxpr, kinds)
    taken = frozenset(name for names in flow.kernels.values() for name in names)
    heads = taken - {name for place in flow.followed for name in flow.kernels[place]}
    return ModelGemms(frozenset(flow.used), taken, heads, frozenset(flow.in_reach), frozenset(flow.out_of_reach))


# Identities of an equation and of those that it is inside of: calls may share a jaxpr, and a loop's is read twice.
_Place = tuple[int, ...]


class _Value(NamedTuple):
    """Known facts about a value.

    Args:
        parameters: parameters that it is made of, if it is made of nothing else.
        gemms: GEMMs whose results it is made of.
        fixed: whether it is made of parameters and constants alone.
    """

    parameters: set[str]
    gemms: frozenset[_Place]
    fixed: bool


class _Flow:
    """Dependencies between GEMMs with parameters."""

    def __init__(self) -> None:
        self.kernels: dict[_Place, set[str]] = {}
        self.followed: set[_Place] = set()
        self.used: set[str] = set()
        self.in_reach: set[str] = set()
        self.out_of_reach: set[str] = set()

    def run(self, jaxpr: Any, given: Sequence[_Value], place: _Place = ()) -> list[_Value]:
        values = dict(zip(jaxpr.invars, given, strict=True))
        constant = _Value(set(), frozenset(), True)

        def read(atom: Any) -> _Value:
            return constant if isinstance(atom, Literal) else values.get(atom, constant)

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            values.update(zip(eqn.outvars, self.step(eqn, operands, (*place, id(eqn))), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def loop(self, body: Any, operands: list[_Value], carry: slice, here: _Place) -> list[_Value]:
        """Return the results of a loop; ``body`` is repeated until the facts about its carry reach a fixed point."""
        while True:
            out = self.run(body, operands, here)
            carried = [_joined(pair) for pair in zip(operands[carry], out, strict=False)]
            if carried == operands[carry]:
                return out
            operands = [*operands]
            operands[carry] = carried

    def step(self, eqn: Any, operands: list[_Value], here: _Place) -> list[_Value]:
        inner, name = _jaxprs(eqn), eqn.primitive.name
        parameters = {one for operand in operands for one in operand.parameters}
        if not inner:
            self.used |= parameters
        in_reach = name == "dot_general" and IN_REACH in str(eqn.source_info.name_stack)
        if in_reach:  # also where its input is a parameter, such as learned queries
            self.in_reach |= parameters
        if name == "dot_general" and operands[0].fixed != operands[1].fixed:
            x, kernel = operands if operands[1].fixed else reversed(operands)
            if kernel.parameters:
                if not in_reach:
                    self.out_of_reach |= kernel.parameters
                self.followed |= x.gemms
                self.kernels.setdefault(here, set()).update(kernel.parameters)
                return [_Value(set(), frozenset({here}), False)]
        if name == "scan":
            body = inner[0]
            # The names of its counts differ between versions of JAX. Stacked values have one leading axis more outside.
            stacked = len(_with_other_rank(eqn.invars, body.invars))
            carried = len(eqn.outvars) - len(_with_other_rank(eqn.outvars, body.outvars))
            first = len(operands) - stacked - carried
            return self.loop(body, operands, slice(first, first + carried), here)
        if name == "while":
            body = eqn.params["body_jaxpr"].jaxpr
            # Inputs of the condition alone come first, the carry last.
            return self.loop(body, operands[-len(body.invars) :], slice(-len(body.outvars), None), here)
        if name == "cond":
            branches = [self.run(branch, operands[1:], here) for branch in inner]
            return [_joined(values) for values in zip(*branches, strict=True)]
        shapes = len(eqn.invars), len(eqn.outvars)
        if len(inner) == 1 and (len(inner[0].invars), len(inner[0].outvars)) == shapes:
            return self.run(inner[0], operands, here)
        self.used |= parameters
        return [_joined(operands)] * len(eqn.outvars)


def _joined(values: Sequence[_Value]) -> _Value:
    fixed = all(value.fixed for value in values)
    parameters = {name for value in values for name in value.parameters} if fixed else set()
    return _Value(parameters, frozenset[_Place]().union(*(value.gemms for value in values)), fixed)


def _with_other_rank(outside: Sequence[Any], inside: Sequence[Any]) -> list[Any]:
    return [atom for atom, own in zip(outside, inside, strict=True) if atom.aval.ndim != own.aval.ndim]


def _jaxprs(eqn: Any) -> list[Any]:
    def of(value: Any) -> Iterator[Any]:
        for part in value if isinstance(value, (tuple, list)) else (value,):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield part

    return [found for name in sorted(eqn.params) for found in of(eqn.params[name])]


def joined(path: str, name: str) -> str:
    """Return the path of a parameter of the module at ``path``.

    >>> joined("mlp", "w"), joined("", "w")
    ('mlp.w', 'w')
    """
    return f"{path}.{name}" if path else name


def as_inputs(args: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the arrays and shapes in ``args``, and a function that puts others in their place.

    >>> arrays, fill = as_inputs((jax.numpy.ones(2), {"causal": True}))
    >>> fill([3.0])
    (3.0, {'causal': True})
    """
    return split_leaves(args, lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def call_with_kept_arguments(kind: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``, whose lists and dicts are copies of a caller's.

    Args:
        kind: name of the class of the called module.
        function: the module's call.
        args, kwargs: its arguments.

    Raises:
        ValueError: if the call changes a list or a dict, which the caller would not see.

    >>> call_with_kept_arguments("Experts", lambda losses: losses.append(0.5), ([],), {})
    Traceback (most recent call last):
    ValueError: Experts changes a list or dict that it is called with, and a module whose own parameters are ...
    """

    def contained() -> tuple[list[Any], Any]:
        return jax.tree.flatten((args, kwargs), is_leaf=lambda node: not isinstance(node, dict | list | tuple))

    leaves, structure = contained()
    result = function(*args, **kwargs)
    after, structure_after = contained()
    if structure_after != structure or any(old is not new for old, new in zip(leaves, after, strict=True)):
        raise ValueError(
            f"{kind} changes a list or dict that it is called with, and a module whose own parameters "
            "are quantized is traced apart, with copies of both: return what it puts there, or let it set an attribute "
            "of the module"
        )
    return result


def split_leaves(
    tree: Any, chosen: Callable[[Any], bool], is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return the leaves of ``tree`` that are ``chosen``, and a function that puts others in their place.

    >>> numbers, fill = split_leaves({"a": 1, "b": "text"}, lambda leaf: isinstance(leaf, int))
    >>> fill([2 * number for number in numbers])
    {'a': 2, 'b': 'text'}
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_leaf)
    places = [place for place, leaf in enumerate(leaves) if chosen(leaf)]
    others = [None if place in places else leaf for place, leaf in enumerate(leaves)]

    def fill(values: Sequence[Any]) -> Any:
        filled = list(others)
        for place, value in zip(places, values, strict=True):
            filled[place] = value
        return jax.tree.unflatten(treedef, filled)

    return [leaves[place] for place in places], fill
