"""User-defined Linen modules whose ``__call__`` computes contractions by quantized GEMMs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from flax.core import lift
from flax.linen.transforms import lift_direct_transform

from jax_te.layers.flax import (
    Contraction,
    Kernel,
    OwnRecipe,
    Seen,
    Visitor,
    call_with_kept_arguments,
    compute,
    could_be_kernel,
    joined,
    split_leaves,
)
from jax_te.layers.flax import ParameterGemm as NnxParameterGemm
from jax_te.linen.module import LinenModule
from jax_te.linen.sharding import is_box
from jax_te.typing import Array


class ParameterGemm(LinenModule, nnx_class=NnxParameterGemm, init=False):
    """
    In Linen it is in the scope of the module that holds the parameter.

    >>> ParameterGemm("w").parameter
    'w'
    """


class GemmOptions(NamedTuple):
    """Decision about the GEMMs of a parameter: its own recipe, or None, and the ``groups`` of `DotGeneral`."""

    recipe: OwnRecipe
    groups: int | None


class OwnParameter(NamedTuple):
    """A parameter of a user-defined module.

    Args:
        scope: path of the scope that holds it.
        name: name of the parameter in its module.
        kind: name of the module's class.
        seen: uses of the parameter in the module's ``__call__``.
    """

    scope: str
    name: str
    kind: str
    seen: Seen = Seen()

    @property
    def path(self) -> str:
        """Path of the parameter."""
        return joined(self.scope, self.name)


class Running(set[str]):
    """Scopes of modules whose contractions are being looked for: modules may share one (``nn.share_scope``)."""

    @contextlib.contextmanager
    def inside(self, scope: str) -> Iterator[None]:
        """Hold ``scope`` for the time of the block."""
        self.add(scope)
        try:
            yield
        finally:
            self.remove(scope)


def own_kernels(module: Any) -> list[str]:
    """Return the names of the parameters in a module's scope that could be kernels."""
    parameters = unboxed(dict(module.variables.get("params", {})))
    return [name for name, value in parameters.items() if hasattr(value, "ndim") and could_be_kernel(name, value)]


def call_apart(module: Any, names: Sequence[str], visitor: Visitor, args: Any, kwargs: Any) -> Any:
    """Return the result of a call of ``module`` in which ``visitor`` computes the contractions of parameters in its
    scope."""
    values = unboxed({name: module.scope.get_variable("params", name) for name in names})

    def kernel_of(path: Any, leaf: Any) -> Kernel | None:
        # What goes into a lifted transformation are the arrays that the scope holds.
        name = next((name for name, value in values.items() if leaf is value), None)
        return None if name is None else Kernel(name, leaf.ndim, kernel_axes(module, name))

    def computed(fn: Any, scope_fn: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        given, fill = split_leaves((args, kwargs), lambda leaf: isinstance(leaf, jax.Array))

        def traced(tree: Any) -> Any:
            variables, given = tree
            scopes, (inner_args, inner_kwargs) = scope_fn(variables, rngs), fill(given)
            return fn(scopes, *inner_args, **inner_kwargs), repack(scopes)

        return compute(traced, (variables, given), kernel_of, visitor)

    def transform(fn: Any, scopes: Any, *args: Any, **kwargs: Any) -> Any:
        packed = lift.pack(functools.partial(computed, fn), (True,), (True,), (True,), enable_kwargs=True)
        return packed(scopes, *args, **kwargs)

    def call(clone: Any, *args: Any, **kwargs: Any) -> Any:
        # Here, since Flax copies lists and dicts on the way as well.
        bound = functools.partial(type(module).__call__, clone)
        return call_with_kept_arguments(type(module).__name__, bound, args, kwargs)

    return lift_direct_transform(transform, (call,), module, *args, **kwargs)


def quantized_call(module: Any, options: dict[str, GemmOptions], args: Any, kwargs: Any) -> Any:
    """Return what a call of a module of the user's own returns, the contractions of its parameters quantized.

    Args:
        module: bound module, with its parameters.
        options: name of each parameter -> options of its GEMMs.
    """
    gemms = parameter_gemms(module, options)

    def gemm(contraction: Contraction, x: Array, kernel: Array, dtype: Any, sharding: Any) -> Array:
        op = gemms[contraction.kernel.name]
        return op(x, kernel, contraction.order, contraction.kernel.axes, dtype, sharding)

    return call_apart(module, list(options), Visitor(gemm), args, kwargs)


def parameter_gemms(module: Any, options: dict[str, GemmOptions]) -> dict[str, ParameterGemm]:
    """Return name of each parameter -> what computes its contractions; arguments as of `quantized_call`."""
    scopes = {name: module.scope.push(f"{name}_gemm", reuse=True) for name in options}
    return {name: ParameterGemm(name, (), *own, parent=scopes[name]) for name, own in options.items()}


def unboxed(tree: Any) -> Any:
    """Return ``tree`` with arrays in place of boxes, not constrained to the mesh in use as ``nn.unbox`` does it.

    >>> from flax import linen as nn
    >>> unboxed({"w": nn.Partitioned(jax.ShapeDtypeStruct((4,), "float32"), ("embed",))})["w"].shape
    (4,)
    """

    def value_of(node: Any) -> Any:
        return node.unbox(apply_constraint=False) if is_box(node) else node

    return jax.tree.map(value_of, tree, is_leaf=is_box)


def kernel_axes(module: Any, kernel: str = "kernel") -> tuple[Any, ...] | None:
    """Return the names of a kernel's axes, once a module has made it; None if it has none."""
    box = module.scope.get_variable("params", kernel)
    names = box.names if is_box(box) else None
    return None if names is None or len(names) != box.value.ndim else tuple(names)
