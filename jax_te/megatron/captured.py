"""Captured graphs: calls of a module that were compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from jax_te.layers import CachedKernel
from jax_te.quantize import QuantizerState, as_float32_inside
from jax_te.typing import Array, PyTree


class CapturedGraphs:
    """The captured calls of one module, by their arguments.

    A graph is captured for shapes, dtypes and shardings of the arguments' arrays and of the module's variables, all
    other arguments, the module's static attributes, and the context: recipe, backend, mesh and rules, JAX's own
    options. A derivative's two executables are compiled when it is first taken.

    Modules hold it as a static attribute. Any two compare equal, so that captured graphs do not distinguish modules:
    functions under ``jax.jit`` are not traced again, and the copies that Flax makes of a module share them.

    Attributes:
        hooks: pairs of a function and its arguments, called before each replay.
        current_microbatch: index of the next microbatch of a step, from 0.
    """

    def __init__(self) -> None:
        self.hooks: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.current_microbatch = 0
        self._graphs: dict[Hashable, _Graph] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CapturedGraphs)

    def __hash__(self) -> int:
        return hash(CapturedGraphs)

    def __len__(self) -> int:
        return len(self._graphs)

    def __reduce__(self) -> Any:  # executables can be neither copied nor pickled
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
        graphdef, state = nnx.split(module)
        leaves, treedef = jax.tree.flatten((jax.tree.map(_plain, state, is_leaf=_is_variable), inputs))
        arrays = [leaf for leaf in leaves if is_array(leaf)]
        # Arrays are replaced by a placeholder: a graph must not keep them alive.
        template = tuple(_ARRAY if is_array(leaf) else leaf for leaf in leaves)
        kinds = tuple((jax.typeof(array), getattr(array, "sharding", None)) for array in map(_value, arrays))
        # JAX keeps one trace for each state of its own options and of all contexts, of which not all are known here.
        ambient = _Same(_ambient.trace().jaxpr)
        key = (graphdef, treedef, template, kinds, first, ambient)
        if key not in self._graphs:
            name = f"{_describe(*inputs)}, is_first_microbatch={first}"
            if not capture:
                raise ValueError(self._refusal(type(module).__name__, name))

            def on_arrays(*arrays: Array) -> tuple[Any, nnx.State]:
                rest = iter(arrays)
                filled = [next(rest) if leaf is _ARRAY else leaf for leaf in template]
                state, (args, kwargs) = jax.tree.unflatten(treedef, filled)
                copy = nnx.merge(graphdef, state)
                before = _contents(copy)
                out = copy.forward(*args, **kwargs)
                # Variables that the call left alone are not outputs, since an output is a copy of the parameter.
                after = _contents(copy)
                return out, nnx.filter_state(nnx.state(copy), lambda path, _: before.get(path) != after[path])

            self._graphs[key] = _Graph(on_arrays, arrays, name)
        return self._graphs[key](*arrays)

    def _refusal(self, name: str, given: str) -> str:
        captured = sorted({graph.name for graph in self._graphs.values()})
        if given in captured:
            why = (
                "was captured under another recipe, mesh, mode or state of the module, or with arrays that lie "
                "elsewhere: of another sharding"
            )
        else:
            why = f"was not captured; captured are {'; '.join(captured) or 'no calls'}"
        return (
            f"{name}: the call with {given} {why}. Capture it, once, by the module's _te_cuda_graph_capture with the "
            "same arguments, or pad the input to what was captured; cuda_graph_impl='local' captures each new call"
        )


class _Graph:
    """Executables of one call: its forward, and for each set of differentiated arrays forward and backward."""

    def __init__(self, call: Callable[..., tuple[Any, Any]], arrays: list[Array], name: str):
        self.name = name
        self._call = call
        self._forward = jax.jit(call).lower(*map(_value, arrays)).compile()
        self._derivatives: dict[tuple[bool, ...], tuple[Any, Any]] = {}
        self._run = jax.custom_vjp(lambda *arrays: self._forward(*arrays))
        self._run.defvjp(self._differentiated, _transposed, symbolic_zeros=True)

    def __call__(self, *arrays: Array) -> tuple[Any, Any]:
        return self._run(*arrays)

    def _differentiated(self, *inputs: Any) -> tuple[Any, Any]:
        arrays = [array.value for array in inputs]
        wanted = tuple(array.perturbed for array in inputs)
        if wanted not in self._derivatives:
            self._derivatives[wanted] = self._derivative(arrays, wanted)
        forward, backward = self._derivatives[wanted]
        out, changed, residuals = forward(*arrays)
        return (out, changed), (_Static((backward, wanted, jax.tree.map(lambda array: array.sharding, out))), residuals)

    def _derivative(self, arrays: list[Array], wanted: tuple[bool, ...]) -> tuple[Any, Any]:
        """Return the executables of forward, which also returns residuals, and of backward, which takes them."""
        treedef: Any = None

        def forward(*arrays: Array) -> tuple[Any, Any, list[Array]]:
            nonlocal treedef

            def of_wanted(*some: Array) -> tuple[Any, Any]:
                at = iter(some)
                return self._call(*(next(at) if want else array for array, want in zip(arrays, wanted, strict=True)))

            some = [array for array, want in zip(arrays, wanted, strict=True) if want]
            # Only with respect to the requested arrays: the rest costs time, and layers check which ones are left out.
            out, vjp, changed = jax.vjp(of_wanted, *some, has_aux=True)
            residuals, treedef = jax.tree.flatten(vjp)
            return out, changed, residuals

        compiled = jax.jit(forward).lower(*arrays).compile()
        # Lowered for the actual residuals: on a mesh only they reveal how XLA sharded them.
        out, _, residuals = compiled(*arrays)
        backward = jax.jit(lambda residuals, g: jax.tree.unflatten(treedef, residuals)(g))
        return compiled, backward.lower(residuals, out).compile()


def _transposed(residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    static, arrays = residuals
    backward, wanted, shardings = static.value
    # An executable takes the sharding that it was compiled for.
    g = jax.device_put(jax.tree.map(_instantiated, cotangents[0]), shardings)
    gradients = iter(backward(arrays, g))
    return tuple(next(gradients) if want else None for want in wanted)


class _Same:
    """A key that compares by identity; it keeps the object alive, so that no other object gets its id."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@jax.tree_util.register_static
class _Static(_Same):
    """Facts that travel with residuals."""


_ambient = jax.jit(lambda: ())
_ARRAY = object()


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


def _value(array: Any) -> Any:
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
