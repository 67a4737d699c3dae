"""A state as arrays alone, the form in which train steps pass it to JAX's compiled functions.

Each call of a compiled function takes its arguments apart and puts its result together. JAX does so in C++, except for
Flax's Variables, which it reads and makes in Python, one after the other. A state has several for each parameter; in a
small model they would take longer than the step itself. So a step passes arrays, and the Variables of its result are
made when they are first read.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
from jax.core import eval_context
from jax.extend.core import get_opaque_trace_state
from jax.tree_util import GetAttrKey

from jax_te.training.collector import collect_rarely
from jax_te.training.global_batch import with_stages
from jax_te.typing import PyTree

PyTreeDef: TypeAlias = Any  # the class of jax.tree_util is a variable to type checkers


class FieldsMadeWhenRead:
    """Base of a state's dataclass: a state that `StateArrays.state` returns makes each field when it is first read.

    A dataclass that names this base declares static fields by ``metadata={"static": True}`` alone, and its states have
    nothing beside their fields. A subclass of such a dataclass may do otherwise, so steps pass its states whole.
    """

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            unread = vars(self).get("_unread", {}).get(name)
            if unread is not None:
                # Variables belong to the trace in which they are made, and Flax refuses to change them in another one.
                # These belong to none, wherever they are first read: states of a trace have all fields, see `state`.
                with eval_context():
                    value = jax.tree.unflatten(*unread)
                vars(self).setdefault(name, value)  # of two threads, both take the first one's
                vars(self).get("_unread", {}).pop(name, None)  # whoever replaces its arrays does not hold them twice
            elif name not in vars(self):  # where it is, another thread has made it since Python looked for it
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            return vars(self)[name]

    def __getstate__(self) -> object:
        # Copies and pickles have all fields: a field that a copy made would not be the original's.
        for name in tuple(vars(self).get("_unread", ())):
            getattr(self, name)
        vars(self).pop("_unread", None)
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> FieldsMadeWhenRead:
        # By its arrays: a deep copy of one of Flax's Variables is its array alone.
        copied = memo[id(self)] = copy.copy(self)
        for name, value in tuple(vars(copied).items()):
            vars(copied)[name] = jax.tree.map(lambda leaf: copy.deepcopy(leaf, memo), value)
        return copied


class _Structure(NamedTuple):
    """What a state has beside arrays: its class, its static fields, and the structure of each other field."""

    kind: type[Any]
    static: tuple[tuple[str, Hashable], ...]
    fields: tuple[tuple[str, PyTreeDef], ...]


def _outside_of_traces() -> bool:
    current = get_opaque_trace_state(convention="nnx")
    with eval_context():
        return current == get_opaque_trace_state(convention="nnx")


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class StateArrays:
    """The arrays of a state, in the order of its leaves, and its structure, which is static."""

    arrays: Sequence[Any]
    structure: _Structure

    @classmethod
    def of(cls, state: Any) -> StateArrays:
        """Return the arrays of a state, a dataclass with the base `FieldsMadeWhenRead`."""
        unread = vars(state).get("_unread", {})
        arrays: list[Any] = []
        static, fields = [], []
        for field in dataclasses.fields(state):
            name = field.name
            if field.metadata.get("static"):
                static.append((name, getattr(state, name)))
                continue
            structure, leaves = unread.get(name, (None, ()))  # first: another thread may be about to make it
            if name in vars(state):  # a user may have changed its Variables
                leaves, structure = jax.tree.flatten(vars(state)[name])
            arrays += leaves
            fields.append((name, structure))
        return cls(arrays, _Structure(type(state), tuple(static), tuple(fields)))

    def state(self) -> Any:
        """Return the state, whose fields are made when they are read; inside a trace, to which they belong, at once."""
        start, fields = 0, {}
        for name, structure in self.structure.fields:
            end = start + structure.num_leaves
            fields[name] = structure, self.arrays[start:end]
            start = end
        state = object.__new__(self.structure.kind)
        vars(state).update(self.structure.static)
        if _outside_of_traces():
            vars(state)["_unread"] = fields
        else:
            vars(state).update({name: jax.tree.unflatten(*field) for name, field in fields.items()})
        return state

    def tree_flatten(self) -> tuple[Sequence[Any], _Structure]:
        return self.arrays, self.structure

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], _Structure]:
        # Programs and messages name an array by its place in the state.
        paths = jax.tree_util.tree_flatten_with_path(self.state())[0]
        return [(GetAttrKey(jax.tree_util.keystr(path)[1:]), leaf) for path, leaf in paths], self.structure

    @classmethod
    def tree_unflatten(cls, structure: _Structure, arrays: Sequence[Any]) -> StateArrays:
        return cls(arrays, structure)


def jit_state(step: Callable[[Any, PyTree], tuple[Any, PyTree]]) -> Callable[[Any, PyTree], tuple[Any, PyTree]]:
    """Return ``step(state, batch) -> (state, result)``, compiled, which donates the state and passes its arrays alone.

    A state of a class that does not name `FieldsMadeWhenRead` as its base, such as a subclass of `TrainState`, is
    passed whole. The result's ``lower`` and the other ways to look at its program take a whole state, as does what they
    compile.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    @functools.wraps(step)
    def compiled(state: Any, batch: PyTree) -> tuple[Any, PyTree]:
        with collect_rarely():
            if not isinstance(state, StateArrays):
                return step(state, batch)
            state, result = step(state.state(), batch)
            return StateArrays.of(state), result

    def call(state: Any, batch: PyTree) -> tuple[Any, PyTree]:
        if FieldsMadeWhenRead not in type(state).__bases__:
            return compiled(state, batch)
        arrays, result = compiled(StateArrays.of(state), batch)
        return arrays.state(), result

    return with_stages(call, compiled)
