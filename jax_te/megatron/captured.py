"""Captured graphs: calls of a module that were compiled ahead of time."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial

from jax_te.layers import CachedKernel
from jax_te.quantize import QuantizerState, as_float32_inside, with_max_gradients_inside
from jax_te.typing import Array, PyTree


class CapturedGraphs:
    """The calls that a module has captured; ``len`` counts them.

    A graph is captured for shapes, dtypes and shardings of the arguments' arrays and of the module's variables, all
    other arguments, the module's static attributes, and the context: recipe, backend, mesh and rules, JAX's own
    options. A derivative's two executables are compiled when it is first taken.

    The executables are in JAX's caches, which modules with equal static attributes share, and from which
    ``jax.clear_caches()`` drops them. A call then has to be captured again.

    Modules hold it as a static attribute, see `OwnGraphs`. Any two compare equal, so that captured graphs do not
    distinguish modules: functions under ``jax.jit`` are not traced again.
    """

    def __init__(self) -> None:
        self._calls: dict[_Call, str] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CapturedGraphs)

    def __hash__(self) -> int:
        return hash(CapturedGraphs)

    def __len__(self) -> int:
        return len(self._calls)

    def __reduce__(self) -> Any:  # a call's static values need be neither copied nor pickled
        return CapturedGraphs, ()

    def run(self, module: Any, inputs: tuple[Any, Any], first: bool, *, capture: bool) -> tuple[Any, nnx.State]:
        """Return the result of a captured ``forward``, and the variables that it changed.

        Args:
            module: module whose variables are inputs of the graph; it is not changed.
            inputs: ``(args, kwargs)`` with arrays, and static values, which can be hashed.
            first: whether this is a step's first microbatch.
            capture: whether to capture the call if it is new.

        Raises:
            ValueError: for a call that was not captured, unless ``capture``.
        """
        call, arrays = _call_of(module, inputs, first, may_be_new=capture)
        if capture:
            _look_up.trace(call)
            self._calls.setdefault(call, _name_of(inputs, first))
        elif not _is_captured(call):
            raise self._refusal(module, inputs, first)
        return _run(call, *arrays)

    def check(self, module: Any, inputs: tuple[Any, Any], first: bool) -> None:
        """Raise ValueError for a call that no graph fits, whatever the module's variables are when it runs.

        Args:
            module, inputs, first: see `run`.
        """
        call, _ = _call_of(module, inputs, first, may_be_new=False)
        alike = (dataclasses.replace(call, variables=captured.variables) for captured in self._calls)
        if not any(map(_is_captured, (call, *(each for each in alike if each in self._calls)))):
            raise self._refusal(module, inputs, first)

    def _refusal(self, module: Any, inputs: tuple[Any, Any], first: bool) -> ValueError:
        given, name = _name_of(inputs, first), type(module).__name__
        captured = sorted(set(self._calls.values()))
        if given in captured:
            why = (
                "was captured under a different recipe, mesh, mode, module state or sharding, or before "
                "jax.clear_caches()"
            )
        else:
            why = f"was not captured; captured are {'; '.join(captured) or 'no calls'}"
        return ValueError(
            f"{name}: the call with {given} {why}. Capture it, once, by the module's _te_cuda_graph_capture with the "
            "same arguments, or pad the input to what was captured; cuda_graph_impl='local' captures each new call"
        )


class OwnGraphs:
    """Descriptor of the attribute that holds a module's `CapturedGraphs`: a module keeps the first that it gets.

    A transformation of Flax that has seen an equal module writes that module's static attributes to this one. A copy
    (``nnx.clone``, ``nnx.merge``, the one that ``nnx.grad`` makes) is a new module, and begins with its original's.
    """

    def __init__(self) -> None:
        # Beside the modules, whose attributes Flax clears before it writes them.
        self._first: weakref.WeakKeyDictionary[Any, CapturedGraphs] = weakref.WeakKeyDictionary()

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return self if module is None else vars(module)[self._name]

    def __set__(self, module: Any, graphs: CapturedGraphs) -> None:
        vars(module)[self._name] = self._first.setdefault(module, graphs)


@dataclass(frozen=True)
class _Call:
    """Everything about a call that is static: the key of its executables in JAX's caches.

    Args:
        graphdef: graph definition of the module.
        treedef: structure of the module's state and the call's inputs.
        template: their leaves, with `_ARRAY` for each array.
        variables: type and sharding of each array of the state.
        inputs: the same of each array of the inputs.
        first: whether this is a step's first microbatch.
        may_be_new: whether the call may be captured now.
    """

    graphdef: Any
    treedef: Any
    template: tuple[Any, ...]
    variables: tuple[Any, ...]
    inputs: tuple[Any, ...]
    first: bool
    may_be_new: bool = field(compare=False)

    @functools.cached_property
    def _hash(self) -> int:  # computed once: a call looks for several executables
        return hash((self.graphdef, self.treedef, self.template, self.variables, self.inputs, self.first))

    def __hash__(self) -> int:
        return self._hash

    def forward(self, *arrays: Array) -> tuple[Any, nnx.State]:
        """Return the result, and the variables that the call changed."""
        rest = iter(arrays)
        filled = [next(rest) if leaf is _ARRAY else leaf for leaf in self.template]
        state, (args, kwargs) = jax.tree.unflatten(self.treedef, filled)
        module: Any = nnx.merge(self.graphdef, jax.tree.map(_merging, state, is_leaf=_is_variable))
        before = _contents(module)
        out = module.forward(*args, **kwargs)
        # Variables that the call left alone are not outputs, since an output is a copy of the parameter.
        after = _contents(module)
        return out, nnx.filter_state(nnx.state(module), lambda path, _: before.get(path) != after[path])


def _call_of(module: Any, inputs: tuple[Any, Any], first: bool, *, may_be_new: bool) -> tuple[_Call, list[Any]]:
    """Return what is static about a call, and its arrays: those of the module's state, then those of the inputs."""
    graphdef, state = nnx.split(module)
    state = jax.tree.map(_plain, state, is_leaf=_is_variable)
    leaves, treedef = jax.tree.flatten((state, inputs))
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    # Arrays are replaced by a placeholder: a graph must not keep them alive.
    template = tuple(_ARRAY if is_array(leaf) else leaf for leaf in leaves)
    kinds = tuple((jax.typeof(array), getattr(array, "sharding", None)) for array in map(_value, arrays))
    of_state = sum(map(is_array, jax.tree.leaves(state)))
    return _Call(graphdef, treedef, template, kinds[:of_state], kinds[of_state:], first, may_be_new), arrays


def _name_of(inputs: tuple[Any, Any], first: bool) -> str:
    return f"{_describe(*inputs)}, is_first_microbatch={first}"


class _NotCapturedError(Exception):
    """A call is new, and may not be captured."""


@functools.partial(jax.jit, static_argnums=0)
def _look_up(call: _Call) -> tuple[()]:
    # JAX runs this where it has no trace of it: for each call once under each state of JAX's options and of all user
    # contexts, of which not all are known here.
    if not call.may_be_new:
        raise _NotCapturedError
    return ()


def _is_captured(call: _Call) -> bool:
    """Return whether a call, which may not be new, was captured in the context of now."""
    try:
        _look_up.trace(call)
    except _NotCapturedError:
        return False
    return True


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(call: _Call, *arrays: Array) -> tuple[Any, nnx.State]:
    return _forward(call, *map(_value, arrays))


def _run_fwd(call: _Call, *inputs: Any) -> tuple[Any, Any]:
    arrays = [array.value for array in inputs]
    wanted = tuple(array.perturbed for array in inputs)
    out, changed, vjp = _forward_and_vjp(call, wanted, *arrays)
    return (out, changed), Partial(_Wanted(wanted), vjp)


def _run_bwd(call: _Call, residuals: Partial, cotangents: Any) -> tuple[Any, ...]:
    gradients = iter(_pull_back(residuals.args[0], jax.tree.map(_instantiated, cotangents[0])))
    return tuple(next(gradients) if want else None for want in residuals.func.wanted)  # type: ignore[attr-defined]


_run.defvjp(_run_fwd, _run_bwd, symbolic_zeros=True)


@dataclass(frozen=True)
class _Wanted:
    """Which arrays a derivative is taken by. The function of a Partial, and so part of the residuals' structure."""

    wanted: tuple[bool, ...]

    def __call__(self, vjp: Any) -> Any:
        return vjp


@functools.partial(jax.jit, static_argnums=0)
def _forward(call: _Call, *arrays: Array) -> tuple[Any, nnx.State]:
    return call.forward(*arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward_and_vjp(call: _Call, wanted: tuple[bool, ...], *arrays: Array) -> tuple[Any, nnx.State, Any]:
    def of_wanted(*some: Array) -> tuple[Any, Any]:
        at: Iterator[Array] = iter(some)
        return call.forward(*(next(at) if want else array for array, want in zip(arrays, wanted, strict=True)))

    some = [array for array, want in zip(arrays, wanted, strict=True) if want]
    # Only with respect to the requested arrays: the rest costs time, and layers check which ones are left out.
    out, vjp, changed = jax.vjp(of_wanted, *some, has_aux=True)
    return out, changed, vjp


@jax.jit
def _pull_back(vjp: Any, g: Any) -> Any:
    return vjp(g)


class _Same:
    """Something that is equal to itself alone, by identity; it keeps the object alive, so that no other gets its id."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


_ARRAY = object()
"""Mark in a template of the place of an array."""


def is_array(value: Any) -> bool:
    """Return whether ``value`` is an array of JAX or NumPy.

    >>> is_array(jnp.ones(2)), is_array(1.0)
    (True, False)
    """
    return isinstance(value, (jax.Array, np.ndarray))


def is_traced(values: PyTree) -> bool:
    """Return whether any array is traced: inside of ``jit``, ``scan``, ``vmap``, though not of ``grad`` alone.

    >>> is_traced([jnp.ones(2)])
    False
    """
    leaves = jax.tree.leaves(values)
    return any(isinstance(leaf, Tracer) and leaf.to_concrete_value() is None for leaf in leaves)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _plain(variable: Any) -> Any:
    """Return a state of delayed scaling in fp32, whatever the dtype of its gradient."""
    if not isinstance(variable, QuantizerState):
        return variable
    return variable.replace(as_float32_inside(variable.get_value()))


def _merging(variable: Any) -> Any:
    """Return a state of delayed scaling in the dtype whose gradients merge by maximum: the inverse of `_plain`."""
    return with_max_gradients_inside(variable) if isinstance(variable, QuantizerState) else variable


def _value(array: Any) -> Any:
    """Return the concrete array behind a tracer that holds one."""
    return array.to_concrete_value() if isinstance(array, Tracer) else array


def _instantiated(g: Any) -> Any:
    return jnp.zeros(g.shape, g.dtype) if isinstance(g, SymbolicZero) else g  # type: ignore[arg-type]


def _contents(module: nnx.Module) -> dict[Any, list[_Same]]:
    return {path: list(map(_Same, jax.tree.leaves(value))) for path, value in nnx.to_flat_state(nnx.state(module))}


def write_back(module: nnx.Module, changed: nnx.State) -> None:
    """Set the changed variables of a module, and those that are new."""
    for path, variable in nnx.to_flat_state(changed):
        owner: Any = module
        *parents, name = map(str, path)
        for part in parents:
            owner = owner[int(part)] if part.isdecimal() else getattr(owner, part)
        old = getattr(owner, name, None)
        # Cached kernels are set anew, as layers do: the one before may belong to another trace.
        if isinstance(old, nnx.Variable) and not isinstance(old, CachedKernel):
            old.set_value(variable.get_value())
        else:
            setattr(owner, name, variable)


def _describe(args: Any, kwargs: Any) -> str:
    """Return arguments as text: ``argument 0: float32[2, 8, 16], key: float32[4]``."""
    named = (*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items())
    parts = []
    for name, value in named:
        leaves = jax.tree.leaves(value)
        texts = [f"{leaf.dtype}{list(leaf.shape)}" if is_array(leaf) else repr(leaf) for leaf in leaves]
        parts.append(f"{name}: {' '.join(texts) or None}")
    return ", ".join(parts)
