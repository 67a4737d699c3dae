"""Detection of contractions of inputs with parameters in a traced call, and their computation by quantized GEMMs.

JAX traces a call to a jaxpr, in which ``x @ w``, ``jnp.einsum``, ``jnp.dot`` and ``lax.dot_general`` are the same
equation. No function of JAX is replaced, and computations of other modules and threads are unaffected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun  # type: ignore[reportPrivateImportUsage]
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding

from jax_te.layers.flax.drop_in import precision_reason
from jax_te.layers.flax.drop_in_mesh import GemmOrder
from jax_te.layers.flax.model_gemms import IN_REACH, split_leaves
from jax_te.typing import Array

# Primitives whose result is still the same matrix, in another dtype, shape, axis order or placement.
_SAME_VALUES = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "copy_p",
        "expand_dims",
        "mesh_cast",
        "name",
        "pbroadcast",
        "pvary",
        "reshape",
        "reshard",
        "sharding_constraint",
        "squeeze",
        "transpose",
    }
)
_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
_CHECKPOINTS = frozenset({"checkpoint", "remat", "remat2"})


class Kernel(NamedTuple):
    """A parameter, possibly after casts, reshapes and transpositions.

    Args:
        name: name of the parameter.
        rank: number of the parameter's axes.
        axes: names of the axes here, see `DotGeneral`; None: they have none.
    """

    name: str
    rank: int
    axes: tuple[Any, ...] | None = None


class Contraction(NamedTuple):
    """One ``dot_general`` of an input with a parameter.

    Args:
        kernel: the parameter.
        order: axes of input and parameter.
        summed, features: sizes of the parameter's axes that are summed over, and of the others.
        groups: number of kernels in the parameter, along axes that stay one for one with the input's; None: it is one.
        why: reason why no recipe can quantize it, or None.
    """

    kernel: Kernel
    order: GemmOrder
    summed: tuple[int, ...]
    features: tuple[int, ...]
    groups: int | None
    why: str | None


class Seen(NamedTuple):
    """Uses of one parameter in calls of its module's ``__call__``.

    Args:
        contractions: contractions of the parameter with an input.
        others: names of the other operations that take it.
    """

    contractions: tuple[Contraction, ...] = ()
    others: frozenset[str] = frozenset()

    @property
    def why(self) -> str | None:
        """Reason why no recipe can quantize one of the contractions, or None."""
        if len({one.groups for one in self.contractions}) > 1:
            return "its contractions have different batch axes, so that the number of kernels is ambiguous"
        return next((one.why for one in self.contractions if one.why is not None), None)

    @property
    def groups(self) -> int | None:
        """Number of kernels in the parameter; None: it is one."""
        return self.contractions[0].groups if self.contractions else None


class Visitor(NamedTuple):
    """Functions that `compute` calls.

    Args:
        gemm: function of a contraction, its input, its kernel, and dtype and sharding of the product, the axes that
            stay first, then the input's. It returns the product, or None: ``dot_general`` computes this one.
        other: function of a parameter and the name of another operation that takes it.
    """

    gemm: Callable[[Contraction, Array, Array, Any, Any], Array | None]
    other: Callable[[Kernel, str], None] = lambda kernel, operation: None


def noting(seen: dict[str, Seen], path: Callable[[str], str]) -> Visitor:
    """Return a visitor that quantizes nothing and records its arguments.

    Args:
        seen: path of each parameter -> what was seen; changed in place.
        path: function that returns a parameter's path for its name.
    """

    def note(contraction: Contraction, x: Array, kernel: Array, dtype: Any, sharding: Any) -> None:
        before = seen.get(path(contraction.kernel.name), Seen())
        contractions = (*before.contractions, contraction)
        seen[path(contraction.kernel.name)] = before._replace(contractions=contractions)

    def note_other(kernel: Kernel, operation: str) -> None:
        before = seen.get(path(kernel.name), Seen())
        seen[path(kernel.name)] = before._replace(others=before.others | {operation})

    return Visitor(note, note_other)


def compute(
    function: Callable[[Any], Any], tree: Any, kernel_of: Callable[[Any, Any], Kernel | None], visitor: Visitor
) -> Any:
    """Return ``function(tree)``, whose contractions ``visitor`` computes; the rest is computed as JAX does.

    Contractions in functions under ``jax.jit`` and ``jax.checkpoint`` are found, too; contractions in loops, branches
    and functions with custom derivatives are not.

    Args:
        function: function of a pytree of arrays. It is traced.
        tree: argument of the computation, a tree.
        kernel_of: function of a key path and an array in ``tree`` that returns the parameter that this is, or None.
        visitor: function called in the order of the traced operations.
    """
    fill: Callable[[Sequence[Any]], Any] = lambda arrays: arrays  # noqa: E731

    def arrays_of(tree: Any) -> list[Any]:
        nonlocal fill
        arrays, fill = split_leaves(function(tree), lambda leaf: isinstance(leaf, jax.Array))
        return arrays

    closed = jax.make_jaxpr(arrays_of)(tree)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    kernels = [kernel_of(path, leaf) for path, leaf in leaves]
    results, _ = _Run(visitor).jaxpr(closed.jaxpr, closed.consts, [leaf for _, leaf in leaves], kernels)
    return fill(results)


Results = tuple[list[Any], Sequence[Kernel | None]]


class _Run:
    def __init__(self, visitor: Visitor):
        self.visitor = visitor

    def jaxpr(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], given: Sequence[Kernel | None]) -> Results:
        """Return the results of a jaxpr, and for each the parameter that it is, or None."""
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        kernels = dict(zip(jaxpr.invars, given, strict=True))

        def value_of(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        def kernel_of(atom: Any) -> Kernel | None:
            return None if isinstance(atom, Literal) else kernels.get(atom)

        for eqn in jaxpr.eqns:
            operands, taken = [*map(value_of, eqn.invars)], [*map(kernel_of, eqn.invars)]
            if any(taken):
                results, made = self.taking_kernels(jaxpr, eqn, operands, taken)
                kernels.update(zip(eqn.outvars, made, strict=True))
            else:
                results = _as_jax_does(jaxpr, eqn, operands)
            values.update(zip(eqn.outvars, results, strict=True))
        return [*map(value_of, jaxpr.outvars)], [*map(kernel_of, jaxpr.outvars)]

    def taking_kernels(self, jaxpr: Any, eqn: Any, operands: list[Any], taken: Sequence[Kernel | None]) -> Results:
        """Return the results of an equation with parameters among its operands."""
        name, nothing = eqn.primitive.name, [None] * len(eqn.outvars)
        if name == "dot_general":
            product = self.product(eqn, operands, taken)
            if product is not None:
                return [product], nothing
            with jax.named_scope(IN_REACH):
                return _as_jax_does(jaxpr, eqn, operands), nothing
        inner = eqn.params.get("jaxpr")
        if name in _CALLS and inner is not None:
            # The function becomes a part of its caller, and so do the shardings that its jit was given.
            placed = _placed(operands, eqn.params.get("in_shardings"))
            results, kernels = self.jaxpr(inner.jaxpr, inner.consts, placed, taken)
            return _placed(results, eqn.params.get("out_shardings")), kernels
        if name in _CHECKPOINTS:

            def run(*args: Any) -> list[Any]:
                return self.jaxpr(inner, (), args, taken)[0]

            policy, prevent_cse = eqn.params["policy"], eqn.params["prevent_cse"]
            return jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)(*operands), nothing  # type: ignore[return-value]
        kernel = _same_kernel(eqn, taken)
        if kernel is None:
            for one in filter(None, taken):
                self.visitor.other(one, name)
        return _as_jax_does(jaxpr, eqn, operands), [kernel] if kernel is not None else nothing

    def product(self, eqn: Any, operands: list[Any], taken: Sequence[Kernel | None]) -> Array | None:
        """Return the result of a ``dot_general`` with a parameter, or None."""
        contraction, aval, kernel_first = _contraction(eqn, taken), eqn.outvars[0].aval, taken[1] is None
        x, kernel = reversed(operands) if kernel_first else operands
        axes = list(range(aval.ndim))
        if kernel_first:
            # Axes of the product, the input's before the parameter's.
            stay, features = len(contraction.order.batch), len(contraction.features)
            axes = [*axes[:stay], *axes[stay + features :], *axes[stay : stay + features]]
        sharding, mesh = None, jax.sharding.get_abstract_mesh()
        if not mesh.empty and AxisType.Explicit in mesh.axis_types:
            # The following equations were traced with this sharding.
            sharding = PartitionSpec(*(aval.sharding.spec[axis] for axis in axes))
        y = self.visitor.gemm(contraction, x, kernel, aval.dtype, sharding)
        return None if y is None else jnp.transpose(y, [axes.index(axis) for axis in range(aval.ndim)])


def _placed(arrays: Sequence[Any], shardings: Sequence[Any] | None) -> list[Any]:
    """Return arrays with the shardings that a jit was given for them; other marks stand for none."""
    if shardings is None:
        return [*arrays]
    return [
        _placed_as(array, sharding) if isinstance(sharding, Sharding) else array
        for array, sharding in zip(arrays, shardings, strict=True)
    ]


def _placed_as(array: Any, sharding: Sharding) -> Any:
    explicit = isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types
    return jax.sharding.reshard(array, sharding) if explicit else jax.lax.with_sharding_constraint(array, sharding)


def _contraction(eqn: Any, taken: Sequence[Kernel | None]) -> Contraction:
    """Return the description of a ``dot_general`` equation with a parameter."""
    x, rhs = (atom.aval for atom in eqn.invars)
    (summed, rhs_summed), (batch, rhs_batch) = eqn.params["dimension_numbers"]
    kernel: Any = taken[1]
    if kernel is None:
        kernel, x, rhs, summed, rhs_summed = taken[0], rhs, x, rhs_summed, summed
        batch, rhs_batch = rhs_batch, batch
    # In the input's order, as in `EinsumOp`.
    pairs = sorted(zip(summed, rhs_summed, strict=True))
    order = GemmOrder(
        tuple(axis for axis in range(x.ndim) if axis not in (*summed, *batch)),
        tuple(axis for axis, _ in pairs),
        tuple(axis for _, axis in pairs),
        tuple(axis for axis in range(rhs.ndim) if axis not in (*rhs_summed, *rhs_batch)),
        tuple(batch),
        tuple(rhs_batch),
    )
    why = precision_reason(eqn.params["precision"])
    if all(taken):
        why = "both of its operands are parameters"
    elif not all(jnp.issubdtype(aval.dtype, jnp.floating) for aval in (x, rhs, eqn.outvars[0].aval)):
        why = f"its operands are {x.dtype} and {rhs.dtype}"
    summed_sizes, features = (tuple(rhs.shape[axis] for axis in axes) for axes in (order.kernel_summed, order.features))
    groups = prod(rhs.shape[axis] for axis in rhs_batch) if batch else None
    return Contraction(kernel, order, summed_sizes, features, groups, why)


def _same_kernel(eqn: Any, taken: Sequence[Kernel | None]) -> Kernel | None:
    """Return the parameter if an equation's result is another form of it, else None."""
    if len(taken) != 1 or taken[0] is None or eqn.primitive.name not in _SAME_VALUES:
        return None
    axes = taken[0].axes
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if prod(before) != prod(after):  # a broadcast
        return None
    if axes is not None and eqn.primitive.name == "transpose":
        axes = tuple(axes[axis] for axis in eqn.params["permutation"])
    elif before != after:
        axes = None
    return taken[0]._replace(axes=axes)


def _as_jax_does(jaxpr: Any, eqn: Any, operands: list[Any]) -> list[Any]:
    """Return the results of one equation, in the context in which it was traced."""
    # A variable may occur twice, but arguments must be unique.
    given = {atom: value for atom, value in zip(eqn.invars, operands, strict=True) if not isinstance(atom, Literal)}
    one = jaxpr.replace(constvars=(), invars=list(given), outvars=list(eqn.outvars), eqns=[eqn], effects=eqn.effects)
    return jaxpr_as_fun(ClosedJaxpr(one, ()))(*given.values())
