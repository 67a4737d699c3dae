"""User-defined NNX modules whose ``__call__`` computes contractions by quantized GEMMs."""

from __future__ import annotations

import contextlib
import copyreg
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from jax_te.layers.flax.contractions import Contraction, Kernel, Seen, Visitor, compute, noting
from jax_te.layers.flax.drop_in import ParameterGemm
from jax_te.layers.flax.drop_in_mesh import kernel_names
from jax_te.layers.flax.model_gemms import call_with_kept_arguments, split_leaves
from jax_te.remat import Changes, Watched
from jax_te.typing import Array


class _Watch:
    """Observations made while `watching`; each is its own key in JAX's caches."""

    def __init__(self) -> None:
        self.seen: dict[str, Seen] = {}


# A user context is part of the key of jit's and checkpoint's caches, so that functions are traced again.
_watch = jax.make_user_context(None)


@contextlib.contextmanager
def watching() -> Iterator[dict[str, Seen]]:
    """Give what the calls inside do with the parameters of modules of `reach`; nothing is quantized.

    Its keys are the paths that the `ParameterGemm` have as ``module_name``.
    """
    watch = _Watch()
    with _watch(watch):
        yield watch.seen


def could_be_kernel(name: str, value: Any) -> bool:
    """Return whether a parameter could be a kernel: it has two or more axes, and is not one of stacked norms.

    >>> could_be_kernel("w", jax.numpy.ones((3, 4))), could_be_kernel("scale", jax.numpy.ones((3, 4)))
    (True, False)
    """
    return value.ndim > 1 and name not in ("scale", "bias")


def own_kernels(module: nnx.Module) -> dict[str, nnx.Param]:
    """Return the parameters of a module that could be kernels, see `could_be_kernel`.

    >>> list(own_kernels(nnx.Conv(4, 4, (3,), rngs=nnx.Rngs(0))))
    ['kernel']
    """
    values = {name: value for name, value in vars(module).items() if isinstance(value, nnx.Param)}
    return {name: value for name, value in values.items() if could_be_kernel(name, value)}


def gemms_of(module: nnx.Module) -> dict[str, ParameterGemm]:
    """Return a dict from parameter names to the modules that compute their contractions."""
    return {value.parameter: value for value in vars(module).values() if isinstance(value, ParameterGemm)}


def reach(module: nnx.Module, gemms: dict[str, ParameterGemm]) -> None:
    """Let ``module`` compute the contractions in its ``__call__`` by ``gemms``.

    Args:
        module: changed in place: its class becomes a subclass. Other modules of the class stay as they are.
        gemms: name of a parameter -> what computes its contractions; empty: the module is what it was before.

    Raises:
        ValueError: if the module has an attribute of the name that a parameter's GEMM gets.
    """
    present = gemms_of(module)
    for name in gemms.keys() - present.keys():
        if hasattr(module, gemm_attribute(name)):
            raise ValueError(
                f"{original_class(type(module)).__name__} has an attribute {gemm_attribute(name)!r}, where "
                f"quantize_model puts the GEMM of its parameter {name!r}: rename it, or give the parameter no rule"
            )
    for name in present:
        delattr(module, gemm_attribute(name))
    own = original_class(type(module))
    object.__setattr__(module, "__class__", _reached(own) if gemms else own)
    for name, gemm in gemms.items():
        setattr(module, gemm_attribute(name), nnx.data(gemm))


def original_class(cls: Any) -> Any:
    """Return the class of which `reach` made ``cls``, or ``cls``."""
    return cls.__bases__[0] if "_reached" in vars(cls) else cls


def gemm_attribute(parameter: str) -> str:
    """Return the name of the attribute that holds the GEMM of a parameter in its module.

    >>> gemm_attribute("w")
    'w_gemm'
    """
    return f"{parameter}_gemm"


# Cached, so that equal modules stay of one class: jit's cache and nnx.scan compare them.
@functools.cache
def _reached(cls: Any) -> Any:
    @functools.wraps(cls.__call__)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        gemms = gemms_of(self)
        if _watch.value is None and all(gemm.recipe is None for gemm in gemms.values()):
            return cls.__call__(self, *args, **kwargs)
        return _call(self, cls.__call__, gemms, args, kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return reduced(super(made, self).__reduce_ex__(protocol), _new, cls)

    names = {name: getattr(cls, name) for name in ("__module__", "__doc__", "__qualname__")}
    methods = {"__call__": __call__, "__reduce_ex__": __reduce_ex__}
    made = type(cls)(cls.__name__, (cls,), {**names, **methods, "_reached": True})
    return made


def _new(cls: Any, *args: Any) -> Any:
    made = _reached(cls)
    return made.__new__(made, *args)


def reduced(reduction: Any, new: Callable[..., Any], *made_of: Any) -> Any:
    """Return what ``__reduce_ex__`` of an object returns whose class pickle does not find by its name.

    Args:
        reduction: result of the base's.
        new: function of ``made_of`` and the arguments of ``__new__`` that returns an object of the class.
        made_of: arguments that the class is made of.
    """
    # A class with a reduction of its own makes its objects in a way of its own.
    if not isinstance(reduction, tuple) or reduction[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return reduction
    _, (_, *args), *rest = reduction
    return new, (*made_of, *args), *rest


def _call(module: Any, function: Callable[..., Any], gemms: dict[str, ParameterGemm], args: Any, kwargs: Any) -> Any:
    """Return what ``function`` returns for ``module``, whose contractions ``gemms`` compute."""
    nodes = (nnx.Pytree, nnx.Variable)
    given, fill = split_leaves(
        (args, kwargs), lambda leaf: isinstance(leaf, (jax.Array, *nodes)), lambda node: isinstance(node, nodes)
    )
    # As nnx.jit does: the traced function gets a copy of the module, whose changes are then made to the module itself.
    graphdef, state = nnx.split((module, given))
    found: list[Changes] = []

    def traced(state: Any) -> tuple[Any, list[Array]]:
        copy, copied = nnx.merge(graphdef, state)
        watched = Watched((copy, copied))
        inner_args, inner_kwargs = fill(copied)
        out = call_with_kept_arguments(
            type(module).__name__, functools.partial(function, copy), inner_args, inner_kwargs
        )
        # Only what has changed: other Variables may belong to an outer trace, in which they cannot be set.
        arrays, changes = watched.changes()
        found[:] = [changes]
        return out, arrays

    out, arrays = compute(traced, state, functools.partial(_kernel_of, module, gemms), _visitor(gemms))
    found[0].apply((module, given), arrays)
    return out


def _kernel_of(module: Any, gemms: dict[str, ParameterGemm], path: Any, leaf: Any) -> Kernel | None:
    """Return which parameter of ``module`` with a GEMM an array in the state of `_call` is, or None."""
    # The module is the first of what was split. A Variable's own part of the path is that of an attribute.
    first, *names = [part.key for part in path if hasattr(part, "key")]
    if str(first) != "0" or len(names) != 1 or names[0] not in gemms:
        return None
    return Kernel(names[0], leaf.ndim, kernel_names(getattr(module, names[0]), leaf.ndim))


def _visitor(gemms: dict[str, ParameterGemm]) -> Visitor:
    if _watch.value is not None:
        return noting(_watch.value.seen, lambda name: str(gemms[name].module_name))

    def gemm(contraction: Contraction, x: Array, kernel: Array, dtype: Any, sharding: Any) -> Array | None:
        op = gemms[contraction.kernel.name]
        if op.recipe is None:
            return None
        return op(x, kernel, contraction.order, contraction.kernel.axes, dtype, sharding)

    return Visitor(gemm)
