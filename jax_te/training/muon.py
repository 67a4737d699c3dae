"""Selection of the parameters that Muon orthogonalizes, and of their axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.tree_util import GetAttrKey
from optax.contrib import MuonDimensionNumbers

from jax_te._validation import checked, log_once
from jax_te.training.kernel_axes import (
    KernelAxes,
    Layers,
    Path,
    axes_of_layers,
    dense_axes,
    first_to_last,
    in_stack,
    own_axes,
)
from jax_te.typing import PyTree

_Shapes = Mapping[Path, tuple[int, ...]]

_HEADS = {"output_kernel", "output_layer"}
# Names of this package's fused kernels, and their numbers of axes, by which they are known in plain dictionaries too.
_FUSED = {"wi_kernel": 3, "wo_kernel": 2}
_PROJECTIONS = ("query", "key", "value")


@checked
def muon_dimension_numbers(params: PyTree, *, model: nnx.Module | Callable[[], Any] | None = None) -> PyTree:
    """Return the matrix axes of each kernel, and None for parameters that Adam updates.

    It is the argument ``muon_weight_dimension_numbers`` of ``optax.contrib.muon``, which without it takes all
    arrays of two axes, embeddings among them, and no fused kernel. Here a kernel is a parameter with two or more
    axes whose name ends in "kernel", except the output head's, ``output_kernel`` or inside of ``output_layer``.
    The axes that its GEMM sums over are the rows of the matrix, those of its output the columns, and the other axes
    index separate matrices:

    - in this package's kernels the first axis is summed over, and the last is the output: query, key and value in
      ``[h, r + 2, g·d]``, gate and up in ``[h, n_act, f]``, and experts are orthogonalized each by itself. They are
      known by their logical axes, and in plain dictionaries by the names ``wi_kernel`` and ``qkv``;
    - in kernels ``[h, n, d]`` of ``query``, ``key`` and ``value`` and ``[n, d, h]`` of ``out`` in one attention layer
      of Flax, all of the two axes beside ``h`` are the output, or summed over;
    - in those of Flax's ``LinearGeneral``, ``DenseGeneral``, ``Einsum`` and ``Conv``, ``[*filter, in, out]``, what the
      layer says, for which ``model`` is needed: an array of three axes alone may be any of them.

    Adam updates kernels of three or more axes that are not known, among them those of a ``Conv`` with groups and of a
    ``ConvTranspose``; the log of ``jax_te`` names them once, at level WARNING. The kernel of a mixture's router,
    ``[h, e]``, and the gate of its shared experts, ``[h, 1]``, are kernels like others, as in Megatron-Core, whose Muon
    takes every matrix but embeddings and heads. Norms, biases, embeddings, heads and adapters of `jax_te.layers.LoRA`
    are updated by Adam.

    Args:
        params: nested dictionaries, or a state of Variables as `make_train_step` gives it to the optimizer. Of layers
            that ``nnx.vmap`` stacked, and of experts in one array, a Variable's logical axes say which axes are the
            kernel's.
        model: the model of these parameters, whose classes say what their kernels are: one of NNX, which may be that
            of ``nnx.eval_shape``, or a function that initializes one of Linen, and that computes nothing here.

    Raises:
        ValueError: if the model lacks one of the kernels.

    Source: Jordan 2024, "Muon: an optimizer for hidden layers in neural networks";
    ``megatron.core.optimizer.emerging_optimizers``.

    >>> import functools, optax
    >>> import jax.numpy as jnp
    >>> params = {"qkv": {"kernel": jnp.ones((4, 3, 8)), "bias": jnp.ones((3, 8))}, "embedding": jnp.ones((9, 4))}
    >>> muon_dimension_numbers(params)["qkv"]
    {'bias': None, 'kernel': MuonDimensionNumbers(reduction_axis=-3, output_axis=-1)}
    >>> tx = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=muon_dimension_numbers)

    >>> model = nnx.Conv(3, 8, (5, 5), rngs=nnx.Rngs(0))
    >>> numbers = functools.partial(muon_dimension_numbers, model=model)
    >>> numbers(nnx.state(model, nnx.Param))["kernel"].get_value()
    MuonDimensionNumbers(reduction_axis=(-4, -3, -2), output_axis=-1)
    >>> tx = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=numbers)
    """
    layers = None if model is None else axes_of_layers(model)
    leaves, structure = jax.tree.flatten_with_path(params, is_leaf=_is_variable)
    paths = [_path(entries) for entries, _ in leaves]
    # Inside of Muon, Adam's parameters have no value and no shape.
    shapes = [tuple(getattr(_value(leaf), "shape", ())) for _, leaf in leaves]
    by_path = dict(zip(paths, shapes, strict=True))
    found, unknown = list[Any](), list[str]()
    for path, shape, (_, leaf) in zip(paths, shapes, leaves, strict=True):
        numbers = None
        if path and len(shape) > 1 and path[-1].endswith("kernel") and not _HEADS & {*path}:
            axes = _axes_of(path, leaf, by_path, layers)
            if axes is not None:
                numbers = MuonDimensionNumbers(_one_or_all(axes.summed), _one_or_all(axes.output))
            elif _logical_axes(leaf) is None:
                unknown.append(f"{'/'.join(path)} {list(shape)}")
        found.append(leaf.replace(numbers) if _is_variable(leaf) else numbers)
    if unknown:
        remedy = "" if layers is not None else "; muon_dimension_numbers(params, model=...) knows Flax's layers"
        log_once(f"Adam updates {', '.join(unknown)}: it is not known which axes their GEMMs sum over{remedy}")
    return jax.tree.unflatten(structure, found)


def _axes_of(path: Path, leaf: Any, shapes: _Shapes, layers: Layers | None) -> KernelAxes | None:
    """Return the axes of a kernel; None if they are not known, or it is a vector for each expert.

    Args:
        path: path of the kernel.
        leaf: its Variable or array.
        shapes: shapes of all parameters.
        layers: what is known of the model's parameters; None without a model.
    """
    shape = shapes[path]
    if layers is not None:
        if path not in layers:
            raise ValueError(
                f"the parameters have a kernel {'/'.join(path)}, and the model has none of that name; give the model "
                "whose parameters they are"
            )
        axes = layers[path]
        if axes is not None and in_stack(axes, shape):
            return axes
    logical = _logical_axes(leaf)
    if logical is not None:
        return own_axes(logical, shape)
    # A model's classes say more than names.
    named = _by_names(path, shapes) if layers is None else None
    return named or (first_to_last(shape) if len(shape) == 2 else None)


def _by_names(path: Path, shapes: _Shapes) -> KernelAxes | None:
    """Return the axes of this package's fused kernels, and of the projections of Flax's attention layers."""
    shape = shapes[path]
    if path[-1] in _FUSED and len(shape) >= _FUSED[path[-1]]:  # others are axes of a stack
        return first_to_last(shape[-_FUSED[path[-1]] :])
    if len(shape) != 3 or len(path) < 2 or path[-1] != "kernel":
        return None
    if path[-2] == "qkv":
        return first_to_last(shape)
    query, key, value, out = (shapes.get((*path[:-2], name, "kernel"), ()) for name in (*_PROJECTIONS, "out"))
    if {len(query), len(key), len(value), len(out)} == {3} and query[1:] == key[1:] and value[1:] == out[:2]:
        if path[-2] in _PROJECTIONS:
            return dense_axes(shape, 1, 2)
        if path[-2] == "out":
            return dense_axes(shape, 2, 1)
    return None


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _value(leaf: Any) -> Any:
    return leaf.get_value() if _is_variable(leaf) else leaf


def _logical_axes(leaf: Any) -> Any:
    return leaf.get_metadata().get("logical_axes") if _is_variable(leaf) else None


def _path(entries: tuple[Any, ...]) -> Path:
    """Return the names on the way to a parameter, without the attribute of Flax's box around it."""
    if entries and entries[-1] == GetAttrKey("value"):
        entries = entries[:-1]
    # Keys of JAX's paths have one of these attributes.
    kinds = ("key", "name", "idx")
    return tuple(str(next(getattr(entry, kind) for kind in kinds if hasattr(entry, kind))) for entry in entries)


def _one_or_all(axes: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return axes in optax's form."""
    return axes[0] if len(axes) == 1 else axes
