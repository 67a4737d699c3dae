"""Calls of copies of modules, with what they change in them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from flax.errors import TraceContextError

from jax_te._validation import on_failure
from jax_te.typing import Array, PyTree

Run = Callable[..., Any]


def on_failure_of_call(undo: Callable[[], None]) -> None:
    """Have a change of a module undone if the call that makes it raises, as `on_failure` does for other changes."""

    def step() -> None:
        # A copy, made in a trace that is over by then, needs no undoing.
        with contextlib.suppress(TraceContextError):
            undo()

    on_failure(step)


def run_on_copies(transform: Callable[[Run], Run], call: Callable[[Any], Any], operands: PyTree) -> Any:
    """Return ``transform(call)(operands)`` for a transformation of functions of arrays, such as ``jax.checkpoint``.

    ``call`` gets copies of the modules in ``operands``: what it changes in them, values of Variables and attributes,
    is changed in the modules, as if they had been called themselves. A value that is not changed is no result of the
    transformed function.

    >>> count = nnx.Variable(jnp.zeros((), int))
    >>> run_on_copies(jax.checkpoint, lambda count: count.set_value(count.get_value() + 1), count)
    >>> count.get_value().item()
    1
    """
    leaves, structure = jax.tree.flatten(operands, is_leaf=_is_variable)
    # A Variable that stands in several places is one in the copies, too.
    keys = [id(leaf) if _is_variable(leaf) else place for place, leaf in enumerate(leaves)]
    distinct = dict(zip(keys, leaves, strict=True))
    arrays, form = _taken_apart(list(distinct.values()))
    found: list[Changes] = []

    def run(*arrays: Array) -> Any:
        copies = dict(zip(distinct, form.filled(arrays), strict=True))
        copy = jax.tree.unflatten(structure, [copies[key] for key in keys])
        copy = _with_one_copy_of_each(operands, copy, {})
        watched = Watched(copy)
        result = call(copy)
        changed, changes = watched.changes()
        found[:] = [changes]
        return result, changed

    result, changed = transform(run)(*arrays)
    found[0].apply(operands, changed)
    return result


def _with_one_copy_of_each(tree: PyTree, copy: PyTree, known: dict[int, nnx.Pytree]) -> PyTree:
    """Return a copy of a pytree, in which a module that stands in several places of the pytree is one module, too.

    Otherwise an attribute that a call sets in one place, such as cached kernels, would be unknown to a later call in
    another.

    Args:
        tree: the pytree.
        copy: its copy by ``jax.tree.unflatten``, whose modules are changed in place.
        known: copies so far, by the ids of the modules.
    """
    leaves, structure = jax.tree.flatten(copy, is_leaf=_is_node)
    pairs = list(zip(_leaves(tree), leaves, strict=True))
    for module, own in pairs:
        if not isinstance(module, nnx.Pytree) or id(module) in known:
            continue
        known[id(module)] = own
        for name, value in _content(module).items():
            if any(isinstance(leaf, nnx.Pytree) for leaf in _leaves(value)):
                # Not setattr: the attribute stays what it is, data or static.
                vars(own)[name] = _with_one_copy_of_each(value, vars(own)[name], known)
    return jax.tree.unflatten(structure, [known.get(id(module), own) for module, own in pairs])


class _Form(NamedTuple):
    """All of a pytree but its arrays."""

    leaves: list[Any]  # _ARRAY in place of an array
    structure: Any

    def filled(self, arrays: Any) -> Any:
        """Return the pytree with these arrays."""
        given = iter(arrays)
        return jax.tree.unflatten(self.structure, [next(given) if leaf is _ARRAY else leaf for leaf in self.leaves])


_ARRAY = object()


def _taken_apart(tree: PyTree) -> tuple[list[Array], _Form]:
    """Return the arrays of a pytree, which a transformed function takes or returns, and the rest."""
    leaves, structure = jax.tree.flatten(tree)
    others = [_ARRAY if is_array(leaf) else leaf for leaf in leaves]
    return [leaf for leaf in leaves if is_array(leaf)], _Form(others, structure)


class Changes(NamedTuple):
    """What a call has changed in modules: where, and the new values but for their arrays.

    Args:
        variables: places of Variables with another value, among the modules and Variables of a pytree.
        attributes: places of modules, and names of their attributes that were set.
        removed: places of modules, and names of their attributes that were removed.
        values: the new values of Variables, then of attributes.
    """

    variables: list[int]
    attributes: list[tuple[int, str]]
    removed: list[tuple[int, str]]
    values: _Form

    def apply(self, modules: PyTree, arrays: Any) -> None:
        """Change a pytree of modules of the same structure as the one that was watched."""
        nodes, values = _nodes(modules), iter(self.values.filled(arrays))
        for place in self.variables:
            variable = nodes[place]
            on_failure_of_call(functools.partial(variable.set_raw_value, variable.get_raw_value()))
            variable.set_raw_value(next(values))
        for place, name in self.attributes:
            _set(nodes[place], name, next(values))
        for place, name in self.removed:
            _set(nodes[place], name, _ABSENT)

    def changed_variables(self, modules: PyTree) -> list[nnx.Variable]:
        """Return the Variables of a pytree that `apply` changes."""
        nodes = _nodes(modules)
        return [nodes[place] for place in self.variables]


class StaticChanges(NamedTuple):
    """What a call has changed in modules beside arrays.

    Args:
        attributes: numbers of modules, names of their attributes that were set, and the new values.
        removed: numbers of modules, and names of their attributes that were removed.
    """

    attributes: list[tuple[int, str, Any]]
    removed: list[tuple[int, str]]

    def apply(self, modules: PyTree) -> None:
        """Change a pytree with the same modules as the one that was watched; its Variables may be others."""
        nodes = [node for node in _nodes(modules) if not _is_variable(node)]
        for number, name, value in self.attributes:
            _set(nodes[number], name, value)
        for number, name in self.removed:
            _set(nodes[number], name, _ABSENT)


_ABSENT = object()


def _set(module: nnx.Pytree, name: str, value: Any) -> None:
    """Set an attribute of a module, or remove it, until the call that does so raises."""
    old = vars(module).get(name, _ABSENT)
    # A place that holds arrays at times is one of the module's data, also while it is None.
    holds_arrays = any(map(_is_data, _leaves((value, old))))

    def change(value: Any) -> None:
        if value is _ABSENT:
            if hasattr(module, name):  # a module in several places is changed at the first
                delattr(module, name)
        else:
            setattr(module, name, nnx.data(value) if holds_arrays else value)

    on_failure_of_call(functools.partial(change, old))
    change(value)


class _Held(NamedTuple):
    """What a Variable or an attribute held before a call.

    Args:
        value: the value itself, which another one may take the place of.
        leaves: its leaves, Variables and modules whole, since a dict or a list may be changed in place.
        structure: its structure.
    """

    value: Any
    leaves: list[Any]
    structure: Any

    @classmethod
    def of(cls, value: Any) -> _Held:
        return cls(value, *jax.tree.flatten(value, is_leaf=_is_node))

    def is_still(self, value: Any) -> bool:
        """Return whether a value is this one, unchanged."""
        if value is not self.value:
            return False
        leaves, structure = jax.tree.flatten(value, is_leaf=_is_node)
        return structure == self.structure and all(one is two for one, two in zip(leaves, self.leaves, strict=True))


class Watched:
    """A pytree of modules and Variables, and what they hold before a call."""

    def __init__(self, modules: PyTree):
        self._held = [
            (node, {name: _Held.of(value) for name, value in _content(node).items()}) for node in _nodes(modules)
        ]

    def changes(self) -> tuple[list[Array], Changes]:
        """Return the arrays that were not held before, and where they belong."""
        variables: dict[int, tuple[int, nnx.Variable]] = {}
        for place, (node, held) in enumerate(self._held):
            if _is_variable(node):
                now = _content(node)
                if now.keys() != held.keys() or not all(held[key].is_still(now[key]) for key in now):
                    variables.setdefault(id(node), (place, node))
        attributes = self._changed_attributes()
        values = [node.get_raw_value() for _, node in variables.values()] + [value for *_, value in attributes]
        arrays, form = _taken_apart(values)
        places = [place for place, _ in variables.values()]
        return arrays, Changes(places, [(place, name) for place, name, _ in attributes], self._removed(), form)

    def static_changes(self) -> StaticChanges:
        """Return the changes of modules that hold no arrays, such as a count in Python, and attributes removed."""
        places = [place for place, (node, _) in enumerate(self._held) if not _is_variable(node)]
        number = {place: index for index, place in enumerate(places)}
        changed = [
            (number[place], name, value)
            for place, name, value in self._changed_attributes()
            if not any(map(_is_data, _leaves(value)))
        ]
        return StaticChanges(changed, [(number[place], name) for place, name in self._removed()])

    def _changed_attributes(self) -> list[tuple[int, str, Any]]:
        """Return places of modules, names and new values of the attributes that were set."""
        return [
            (place, name, value)
            for place, (node, held) in enumerate(self._held)
            if not _is_variable(node)
            for name, value in _content(node).items()
            if name not in held or not held[name].is_still(value)
        ]

    def _removed(self) -> list[tuple[int, str]]:
        """Return places of modules, and names of the attributes that were removed."""
        return [
            (place, name)
            for place, (node, held) in enumerate(self._held)
            if not _is_variable(node)
            for name in held
            if name not in _content(node)
        ]


def _nodes(tree: PyTree) -> list[Any]:
    """Return the modules and Variables of a pytree, each as often as it stands there."""
    nodes = []
    for leaf in _leaves(tree):
        if isinstance(leaf, nnx.Variable | nnx.Pytree):
            nodes.append(leaf)
        if isinstance(leaf, nnx.Pytree):
            # In the order of names: that of a copy may be another.
            content = _content(leaf)
            nodes += _nodes([content[name] for name in sorted(content)])
    return nodes


def _content(node: nnx.Variable | nnx.Pytree) -> dict[Any, Any]:
    """Return the leaves of a Variable by their paths, or a module's attributes without Flax's own."""
    if isinstance(node, nnx.Variable):
        return dict(jax.tree.leaves_with_path(node))
    return {name: value for name, value in vars(node).items() if not name.startswith("_pytree__")}


def _leaves(tree: PyTree) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_node)


def _is_node(node: Any) -> bool:
    return isinstance(node, nnx.Variable | nnx.Pytree)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _is_data(node: Any) -> bool:
    return _is_variable(node) or isinstance(node, nnx.Pytree) or is_array(node)


def is_array(leaf: Any) -> bool:
    """Return whether a leaf of a pytree is an array."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)
