"""Axes that the GEMMs of a model's layers sum over, and those of their outputs, in each kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple
from uuid import uuid4

import jax
from flax import linen as nn
from flax import nnx
from jax.experimental.xla_metadata import set_xla_metadata

Path = tuple[str, ...]
"""Names on the way to a parameter."""


class KernelAxes(NamedTuple):
    """Axes of a kernel: those that its GEMM sums over, and those of the output. Others index separate matrices.

    Args:
        summed, output: axes of the kernel, counted from its end: negative numbers.
        shape: shape of the kernel in its layer, without the axes in front that a stack of layers adds.
    """

    summed: tuple[int, ...]
    output: tuple[int, ...]
    shape: tuple[int, ...]


Layers = dict[Path, KernelAxes | None]
"""Path of each parameter of a model; None: it is not a kernel whose axes are known."""


def first_to_last(shape: tuple[int, ...]) -> KernelAxes:
    """Return the axes of a kernel of this package: the first is summed over, the last the output."""
    return KernelAxes((-len(shape),), (-1,), shape)


def dense_axes(shape: tuple[int, ...], summed: int, output: int) -> KernelAxes:
    """Return the axes of a kernel whose last ones are the output, with those that are summed over before them.

    Args:
        shape: shape of the kernel.
        summed, output: numbers of axes.
    """
    return KernelAxes(tuple(range(-summed - output, -output)), tuple(range(-output, 0)), shape)


def axes_of_layers(model: nnx.Module | Callable[[], Any]) -> Layers:
    """Return what is known of each parameter of a model.

    Args:
        model: an NNX model, or a function that initializes a Linen model.

    >>> axes_of_layers(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))["kernel",]
    KernelAxes(summed=(-2,), output=(-1,), shape=(8, 4))
    """
    return _of_nnx(model) if isinstance(model, nnx.Module) else _of_linen(model)


def _of_nnx(model: nnx.Module) -> Layers:
    """Return what is known of each parameter of an NNX model."""
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    layers: Layers = {_names(path): _by_logical_axes(variable) for path, variable in state}
    for path, module in nnx.iter_modules(model):
        axes = _flax_nnx(module)
        if axes is not None:
            layers[(*_names(path), "kernel")] = axes
    return layers


def _names(path: tuple[Any, ...]) -> Path:
    return tuple(map(str, path))


def _by_logical_axes(variable: nnx.Variable[Any]) -> KernelAxes | None:
    """Return the axes of a parameter of this package's layers, which has logical axes."""
    return own_axes(variable.get_metadata().get("logical_axes"), getattr(variable.get_value(), "shape", ()))


def own_axes(logical: Any, shape: tuple[int, ...]) -> KernelAxes | None:
    """Return the axes of an array of a kernel, or of kernels of experts, of this package's layers.

    Args:
        logical: its logical axes; None: it is of another layer.
        shape: its shape, in front of which may be axes of a stack of layers.
    """
    if logical is None or not shape:
        return None
    own = shape[max(0, len(shape) - len(logical)) :]
    matrices = own[1:] if logical[0] == "expert" else own
    return first_to_last(matrices) if len(matrices) > 1 else None


def _flax_nnx(module: Any) -> KernelAxes | None:
    """Return the axes of the kernel of one of Flax's NNX layers; None: of another layer, or not known."""
    # A derived class that computes something else may use the kernel otherwise.
    call = type(module).__call__ if callable(module) else None
    if isinstance(module, nnx.Linear) and call in (nnx.Linear.__call__, nnx.LoRALinear.__call__):
        return dense_axes((module.in_features, module.out_features), 1, 1)
    if isinstance(module, nnx.LinearGeneral) and call is nnx.LinearGeneral.__call__:
        shape = (*module.batch_axis.values(), *module.in_features, *module.out_features)
        return dense_axes(shape, len(module.in_features), len(module.out_features))
    if isinstance(module, nnx.Einsum) and call is nnx.Einsum.__call__:
        return _einsum_axes(module.einsum_str, tuple(module.kernel_shape))
    if isinstance(module, nnx.Conv) and call is nnx.Conv.__call__:
        return _conv_axes(tuple(module.kernel_shape), module.feature_group_count)
    return None


def _conv_axes(shape: tuple[int, ...], groups: int) -> KernelAxes | None:
    # With groups, parts of the output axis have inputs of their own: several matrices in one axis.
    return dense_axes(shape, len(shape) - 1, 1) if groups == 1 else None


def _einsum_axes(text: str | None, shape: tuple[int, ...]) -> KernelAxes | None:
    """Return the axes of the second operand of an einsum, such as "bsh,hnd->bsnd"."""
    if text is None or "->" not in text:
        return None
    operands, out = text.replace(" ", "").split("->")
    x, kernel = operands.split(",")
    letters = [letter for letter in kernel if letter.isalpha()]
    if len(letters) != len(kernel) or len(letters) != len(shape):  # an ellipsis
        return None
    places = [(letter, place - len(letters)) for place, letter in enumerate(letters)]
    summed = tuple(place for letter, place in places if letter in x and letter not in out)
    output = tuple(place for letter, place in places if letter in out and letter not in x)
    return KernelAxes(summed, output, shape) if summed and output else None


def _of_linen(init: Callable[[], Any]) -> Layers:
    """Return what is known of each parameter of a Linen model, which is initialized without computing anything."""
    found: Layers = {}

    def record(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        result = call(*args, **kwargs)
        if context.method_name == "__call__":
            found.update(_of_linen_module(context.module, *args, **kwargs))
        return result

    # JAX does not call again what it has traced before, and nothing would be recorded there: a new function, and a mark
    # by which JAX takes the jitted parts inside for new ones, too.
    with nn.intercept_methods(record), set_xla_metadata(kernels_of=uuid4().hex):
        variables = jax.eval_shape(lambda: init())
    parameters = nn.meta.unbox(variables).get("params", {})
    paths = (_names(tuple(entry.key for entry in path)) for path, _ in jax.tree.leaves_with_path(parameters))
    return {path: found.get(path) for path in paths}


def _of_linen_module(module: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[Path, KernelAxes | None]]:
    """Yield what is known of the parameters of one Linen module, called with these arguments."""
    if hasattr(module, "nnx_module"):  # a layer of this package
        for path, axes in _of_nnx(nnx.eval_shape(lambda: module.nnx_module(nnx.Rngs(0)))).items():
            yield (*module.path, *path), axes
    elif "kernel" in (parameters := nn.meta.unbox(dict(module.variables.get("params", {})))):
        shape = getattr(parameters["kernel"], "shape", ())
        yield (*module.path, "kernel"), _flax_linen(module, shape, *args, **kwargs)


def _flax_linen(module: Any, shape: tuple[int, ...], *args: Any, **kwargs: Any) -> KernelAxes | None:
    """Return the axes of the kernel of one of Flax's Linen layers; None: of another layer, or not known.

    Args:
        module: the layer.
        shape: shape of its kernel.
        args, kwargs: arguments of its call: an einsum's may be there.
    """
    call = type(module).__call__
    if isinstance(module, nn.Dense) and call is nn.Dense.__call__:
        return dense_axes(shape, 1, 1)
    if isinstance(module, nn.DenseGeneral) and call is nn.DenseGeneral.__call__:
        summed, output = (1 if isinstance(each, int) else len(each) for each in (module.axis, module.features))
        return dense_axes(shape, summed, output)
    if isinstance(module, nn.Einsum) and call is nn.Einsum.__call__:
        return _einsum_axes(module.einsum_str or kwargs.get("einsum_str") or next(iter(args[1:]), None), shape)
    if isinstance(module, nn.Conv) and call is nn.Conv.__call__:
        return _conv_axes(shape, module.feature_group_count)
    return None


def in_stack(axes: KernelAxes, shape: tuple[int, ...]) -> bool:
    """Return whether an array holds kernels of a layer, with no axes of its own but those of a stack in front.

    >>> in_stack(first_to_last((8, 4)), (3, 8, 4)), in_stack(first_to_last((8, 4)), (8, 3, 4))
    (True, False)
    """
    return prod(shape) > 0 and shape[max(0, len(shape) - len(axes.shape)) :] == axes.shape
