"""Models with the tensors of a checkpoint: checked against the table, read and placed parameter by parameter."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_te.errors import mismatch
from jax_te.interop.tables.form import Architecture, Form
from jax_te.interop.tables.patterns import Entry, Index, Sizes, is_state, stored_in
from jax_te.models import Execution
from jax_te.sharding import leaves_with_axes, shardings_of
from jax_te.typing import Array, DTypeLike

OnProgress = Callable[[int, int], None]
"""Function called after each parameter with the number of parameters done and the number of all."""

Reader = Callable[[Index, Any], np.ndarray]
"""Function of an index and a dtype that returns this part of an array of the parameters."""


def release_after_each(files: Collection[Any], on_progress: OnProgress | None) -> OnProgress:
    """Return a function for `load_tensors` to call after each parameter, which releases the files' memory."""

    def after(done: int, count: int) -> None:
        for file in files:
            file.release()
        if on_progress is not None:
            on_progress(done, count)

    return after


def load_tensors(
    architecture: Architecture,
    form: Form,
    stored: Mapping[str, Any],
    folder: Path,
    after_each: OnProgress,
    *,
    dtype: DTypeLike | None,
    config: Mapping[str, Any] | None,
    execution: Execution,
    prepare: Callable[[nnx.Module, Mapping[str, Entry], Mapping[str, Any]], None] | None = None,
    reader: Callable[..., Reader] | None = None,
) -> Any:
    """Return the model of a form with the tensors of a checkpoint.

    Args:
        architecture: architecture whose table names the tensors.
        form: form of the model.
        stored: arrays, or what ``np.asarray`` reads, by name.
        folder: folder of the checkpoint, for messages.
        after_each: function called after each parameter.
        dtype: dtype of the parameters. None: that of the tensors.
        config: fields of the configuration that say how the model runs.
        execution: see `jax_te.models.Execution`.
        prepare: function of a model of shapes, the entries of its parameters and the tensors, called before parameters
            are made: it may give Variables another form.
        reader: function in place of `entry_reader`, for the arrays of such forms. None: there are none.

    Raises:
        ValueError: for tensors of several dtypes without ``dtype``; for a field of ``config`` that outputs depend on.
        CheckpointMismatchError: for missing, unexpected and wrongly shaped tensors, all of which it lists.
    """
    sizes = form.sizes()
    entries = {path: Entry.of(pieces, sizes["e"]) for path, pieces in architecture.table(form).items()}
    tensors = _checked(architecture, form, stored, entries, folder)
    of_parameters = {name for path, entry in entries.items() if not is_state(path) for name in entry.names}
    params_dtype = _one_dtype(dtype, [tensors[name] for name in of_parameters], folder)
    form = form.run_as(config or {}, params_dtype, architecture.described_by)

    def new_model() -> Any:
        return architecture.build(form, execution, nnx.Rngs(0))

    model = nnx.eval_shape(new_model)
    if prepare is not None:
        prepare(model, entries, tensors)
    graphdef, params, rest = nnx.split(model, stored_in(entries), ...)
    if jax.tree.leaves(rest):
        # Quantizer states get initial values; the compiler drops the random parameters.
        rest = jax.jit(lambda: nnx.state(new_model(), nnx.Not(stored_in(entries))))()
    mesh = jax.sharding.get_mesh()
    leaves = leaves_with_axes(params)
    places = [None] * len(leaves) if mesh.empty else shardings_of(params, mesh)
    arrays = []
    for (path, leaf, _), place in zip(leaves, places, strict=True):
        arrays.append(_placed((reader or entry_reader)(path, entries, tensors, sizes), leaf, place))
        after_each(len(arrays), len(leaves))
    return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(params), arrays), rest)


def entry_reader(path: str, entries: Mapping[str, Entry], tensors: Mapping[str, Any], sizes: Sizes) -> Reader:
    """Return a function of an index and a dtype that reads this part of a parameter.

    Args:
        path: path of the parameter.
        entries: entries of all parameters.
        tensors: tensors of the checkpoint.
        sizes: sizes of the axes.
    """
    entry = entries[path]
    # Only this parameter's tensors: values that are computed stay in memory only while they are read.
    own = {name: tensors[name] for name in entry.names}
    if entry.experts is None:
        # Once for all devices' parts. The values of all experts at once may be many gigabytes: each tensor of theirs
        # is read where it is needed.
        own = {name: np.asarray(tensor) for name, tensor in own.items()}
    return functools.partial(entry.read, own, sizes)


def _checked(
    architecture: Architecture, form: Form, stored: Mapping[str, Any], entries: Mapping[str, Entry], folder: Path
) -> dict[str, Any]:
    """Return the tensors that the entries name, after a check against the folder's."""
    sizes = form.sizes()
    wanted = {name: shape for entry in entries.values() for name, shape in entry.their_shapes(sizes).items()}
    tensors = _by_their_names(architecture, {**architecture.tied_names, **architecture.copies(form)}, stored, wanted)
    lines = _differences(tensors, wanted)
    if lines:
        raise mismatch(f"the tensors of {folder} are not those of its {architecture.described_by}:", lines)
    return tensors


def _by_their_names(
    architecture: Architecture, tied: Mapping[str, str], stored: Mapping[str, Any], wanted: Collection[str]
) -> dict[str, Any]:
    """Return the tensors under the entries' names, without those that the model does not have.

    Args:
        architecture: architecture of the model.
        tied: tensors that may be there although they equal another: name → the other one's.
        stored: tensors of the folder.
        wanted: names of the entries' tensors.
    """
    for ending, name in architecture.older:
        stored = {re.sub(rf"{ending}$", name, stored_name): tensor for stored_name, tensor in stored.items()}
    base = architecture.base
    if not any(name.startswith(base) for name in stored):
        # Names of the model without its head lack the base's prefix.
        stored = {name if name in wanted else base + name: tensor for name, tensor in stored.items()}
    tensors = {name: tensor for name, tensor in stored.items() if not re.fullmatch(architecture.ignored, name)}
    for name, other in tied.items():
        twice = name in tensors and name not in wanted and other in tensors
        if twice and np.array_equal(tensors[name], tensors[other], equal_nan=True):
            del tensors[name]
    return tensors


def _differences(tensors: Mapping[str, Any], wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return a line for each tensor that is missing, unexpected or of another shape."""
    missing = [f"{name} is missing" for name in wanted if name not in tensors]
    unexpected = [f"{name} is unexpected" for name in tensors if name not in wanted]
    misshapen = [
        f"{name} is {list(tensors[name].shape)} and must be {list(shape)}"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    return missing + unexpected + misshapen


def _one_dtype(dtype: DTypeLike | None, tensors: Collection[Any], folder: Path) -> Any:
    if dtype is not None:
        return dtype
    dtypes = {tensor.dtype for tensor in tensors if hasattr(tensor, "dtype")}  # products of values and scales have any
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(
            f"the tensors of {folder} are of dtypes {names}; say with dtype= (--dtype on the command line) which the "
            "parameters have"
        )
    return dtypes.pop()


def _placed(read: Any, leaf: Any, place: Any) -> Array:
    """Return an array on its devices, each with its part."""
    if place is None:
        return jnp.asarray(read((slice(None),) * leaf.ndim, leaf.dtype))
    # Devices that hold the same part get it from one read.
    parts: dict[tuple[Any, ...], np.ndarray] = {}

    def part_of(index: Any) -> np.ndarray:
        key = tuple((part.start, part.stop) for part in index)
        if key not in parts:
            parts[key] = read(index, leaf.dtype)
        return parts[key]

    return jax.make_array_from_callback(leaf.shape, place, part_of)
