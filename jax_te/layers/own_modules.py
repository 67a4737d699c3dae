"""NNX modules of other classes than Flax's layers, whose ``__call__`` computes contractions by quantized GEMMs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx

from jax_te.layers.contractions import Contraction, Kernel, Visitor, compute
from jax_te.layers.drop_in import ParameterGemm
from jax_te.layers.drop_in_mesh import kernel_names
from jax_te.typing import Array


@dataclass
class Seen:
    """What calls of a module's ``__call__`` do with one of its parameters.

    Args:
        contractions: those with an input.
        others: names of the other operations that take it.
    """

    contractions: list[Contraction] = field(default_factory=list)
    others: set[str] = field(default_factory=set)

    @property
    def why(self) -> str | None:
        """Why no recipe can quantize one of the contractions, or None."""
        return next((one.why for one in self.contractions if one.why is not None), None)


# While `watching`: path of a parameter -> what was seen.
_watched: ContextVar[dict[str, Seen] | None] = ContextVar("_watched", default=None)


@contextlib.contextmanager
def watching() -> Iterator[dict[str, Seen]]:
    """Give what the calls inside do with the parameters of modules of `reach`; nothing is quantized.

    Its keys are the paths that the `ParameterGemm` have as ``module_name``.
    """
    found: dict[str, Seen] = {}
    token = _watched.set(found)
    try:
        yield found
    finally:
        _watched.reset(token)


def own_kernels(module: nnx.Module) -> dict[str, nnx.Param]:
    """Return the parameters of a module that could be kernels: of two or more axes, and no stacks of norms'.

    >>> list(own_kernels(nnx.Conv(4, 4, (3,), rngs=nnx.Rngs(0))))
    ['kernel']
    """
    values = {name: value for name, value in vars(module).items() if isinstance(value, nnx.Param)}
    return {name: value for name, value in values.items() if value.ndim > 1 and name not in ("scale", "bias")}


def gemms_of(module: nnx.Module) -> dict[str, ParameterGemm]:
    """Return name of the parameter -> what computes its contractions."""
    return {value.parameter: value for value in vars(module).values() if isinstance(value, ParameterGemm)}


def reach(module: nnx.Module, gemms: dict[str, ParameterGemm]) -> None:
    """Let ``module`` compute the contractions in its ``__call__`` by ``gemms``.

    Args:
        module: changed in place: its class becomes a subclass. Other modules of the class stay as they are.
        gemms: name of a parameter -> what computes its contractions; empty: the module is what it was before.
    """
    for name in gemms_of(module):
        delattr(module, _attribute(name))
    own = original_class(type(module))
    object.__setattr__(module, "__class__", _reached(own) if gemms else own)
    for name, gemm in gemms.items():
        setattr(module, _attribute(name), nnx.data(gemm))


def original_class(cls: Any) -> Any:
    """Return the class of which `reach` made ``cls``, or ``cls``."""
    return cls.__bases__[0] if "_reached" in vars(cls) else cls


def _attribute(parameter: str) -> str:
    return f"{parameter}_gemm"


# Cached, so that equal modules stay of one class: jit's cache and nnx.scan compare them.
@functools.lru_cache(maxsize=512)
def _reached(cls: Any) -> Any:
    @functools.wraps(cls.__call__)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        gemms = gemms_of(self)
        if _watched.get() is None and all(gemm.recipe is None for gemm in gemms.values()):
            return cls.__call__(self, *args, **kwargs)
        return _call(self, cls.__call__, gemms, args, kwargs)

    names = {name: getattr(cls, name) for name in ("__module__", "__doc__", "__qualname__")}
    return type(cls)(cls.__name__, (cls,), {**names, "__call__": __call__, "_reached": True})


def _call(module: Any, function: Callable[..., Any], gemms: dict[str, ParameterGemm], args: Any, kwargs: Any) -> Any:
    """Return what ``function`` returns for ``module``, whose contractions ``gemms`` compute."""
    graph_nodes = (nnx.Pytree, nnx.Variable)
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=lambda node: isinstance(node, graph_nodes))
    dynamic = [place for place, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, *graph_nodes))]
    # As nnx.jit does: the traced function gets a copy of the module, whose changes are then made to the module itself.
    tag, static = object(), _Static()
    with nnx.update_context(tag):
        with nnx.split_context(tag) as context:
            graphdef, state = context.split((module, [leaves[place] for place in dynamic]))

        def traced(state: Any) -> Any:
            with nnx.merge_context(tag, inner=True) as context:
                inner, given = context.merge(graphdef, state)
            before = nnx.split((inner, given))
            inner_args, inner_kwargs = jax.tree.unflatten(treedef, _filled(leaves, dynamic, given))
            arrays = static.take(function(inner, *inner_args, **inner_kwargs))
            if _same(before, nnx.split((inner, given))):
                # Nothing is to be written: the module's Variables may be of a trace outside of this one.
                return arrays, None
            with nnx.split_context(tag) as context:
                static.graphdef, after = context.split((inner, given))
            return arrays, after

        closed, shapes = jax.make_jaxpr(traced, return_shape=True)(state)
        results = compute(closed, jax.tree.leaves(state), _kernels(module, gemms, state), _visitor(gemms))
        arrays, after = jax.tree.unflatten(jax.tree.structure(shapes), results)
        if after is not None:
            with nnx.merge_context(tag, inner=False) as context:
                context.merge(static.graphdef, after)
    return static.give(arrays)


def _same(before: tuple[Any, Any], after: tuple[Any, Any]) -> bool:
    """Whether two graph definitions are equal, and their states hold the same tracers."""
    (graphdef, state), (other, others) = before, after
    leaves = zip(jax.tree.leaves(state), jax.tree.leaves(others), strict=False)
    return graphdef == other and all(one is two for one, two in leaves)


class _Static:
    """Parts of a traced function's results that are no arrays."""

    graphdef: Any
    treedef: Any
    leaves: list[Any]
    arrays: list[int]

    def take(self, out: Any) -> list[Any]:
        """Return the arrays in ``out``, and keep the rest."""
        leaves, self.treedef = jax.tree.flatten(out)
        self.arrays = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        self.leaves = _filled(leaves, self.arrays, [None] * len(self.arrays))  # no tracers
        return [leaves[place] for place in self.arrays]

    def give(self, arrays: list[Any]) -> Any:
        """Return what `take` got, with other arrays."""
        return jax.tree.unflatten(self.treedef, _filled(self.leaves, self.arrays, arrays))


def _filled(leaves: list[Any], places: list[int], values: list[Any]) -> list[Any]:
    filled = list(leaves)
    for place, value in zip(places, values, strict=True):
        filled[place] = value
    return filled


def _kernels(module: nnx.Module, gemms: dict[str, ParameterGemm], state: Any) -> list[Kernel | None]:
    """Return for each array in ``state`` which parameter with a GEMM it is, or None."""
    kernels: list[Kernel | None] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        # The module is the first of what was split. A Variable's own part of the path is that of an attribute.
        first, *names = [part.key for part in path if hasattr(part, "key")]
        name = names[0] if str(first) == "0" and len(names) == 1 else None
        if name in gemms:
            kernels.append(Kernel(name, leaf.ndim, kernel_names(getattr(module, name), leaf.ndim)))
        else:
            kernels.append(None)
    return kernels


def _visitor(gemms: dict[str, ParameterGemm]) -> Visitor:
    watched = _watched.get()
    if watched is None:
        return Visitor(functools.partial(_gemm, gemms), lambda kernel, operation: None)

    def seen(kernel: Kernel) -> Seen:
        return watched.setdefault(gemms[kernel.name].module_name, Seen())  # type: ignore[arg-type]

    def note(contraction: Contraction, x: Array, kernel: Array, dtype: Any, sharding: Any) -> None:
        seen(contraction.kernel).contractions.append(contraction)

    return Visitor(note, lambda kernel, operation: seen(kernel).others.add(operation))


def _gemm(
    gemms: dict[str, ParameterGemm], contraction: Contraction, x: Array, kernel: Array, dtype: Any, sharding: Any
) -> Array | None:
    gemm = gemms[contraction.kernel.name]
    if gemm.recipe is None:
        return None
    return gemm.product(x, kernel, contraction.order, contraction.kernel.axes, dtype, sharding)
