"""Partition of a model into stages: the layers' Variables stacked by stage, and all others around them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from jax_te._validation import log_once
from jax_te.config import PipelineConfig
from jax_te.sharding import constrain, current_mesh, current_rules, leaves_with_axes, logical_to_spec
from jax_te.training.kernel_gradients import Path
from jax_te.training.pipeline.mesh import PIPELINE_AXIS, stage_rules
from jax_te.training.pipeline.schedule import split_layers
from jax_te.training.state import TrainState
from jax_te.typing import Array

Flat = dict[Path, Any]
"""Variables by their path in a model, or in a chunk of layers."""


def as_state(flat: Flat) -> nnx.State:
    """Return Variables by path as an ``nnx.State``."""
    return nnx.from_flat_state(flat.items())


class Cut(NamedTuple):
    """Assignment of a model's layers to stages.

    A chunk of layers is an ``nnx.List``, in which a Variable's path is ``(l, *path in the layer)``, with the layer's
    position ``l`` in the chunk. All chunks have the same kinds of layers at their positions, since stages run one
    program: a position whose kind a chunk lacks holds a copy of some layer of that kind, whose result is left out.

    Args:
        paths: paths in the model of each layer's Variables, by their path in the layer.
        graphdef: graph definition of a chunk, the same for all.
        numbers: index ``[p, v, l]`` of the layer at each position of each chunk of each stage.
        runs: whether ``[p, v, l]`` the layer at a position is the chunk's own, whose result counts.
    """

    paths: list[dict[Path, Path]]
    graphdef: nnx.GraphDef[Any]
    numbers: np.ndarray
    runs: np.ndarray

    def split(self, flat: Flat) -> tuple[Flat, Flat]:
        """Return the Variables that belong to layers, and the others."""
        own = {path for paths in self.paths for path in paths.values()}
        layers = {path: variable for path, variable in flat.items() if path in own}
        return layers, {path: variable for path, variable in flat.items() if path not in own}

    def columns(self) -> list[list[int]]:
        """Return the numbers of the layers at each position of a chunk, over all chunks of all stages."""
        return self.numbers.reshape(-1, self.numbers.shape[2]).T.tolist()

    def segments(self) -> list[tuple[slice, bool]]:
        """Return the positions of a chunk in order, and whether their layers are each chunk's own.

        Neighbours that are every chunk's own are one slice: they run as one stack. Any other position is alone, since a
        chunk may lack its layer.

        >>> runs = np.array([[[True, True, False]], [[True, True, True]]])  # the first stage has two layers
        >>> Cut(paths=[], graphdef=None, numbers=np.array([[[0, 1, 1]], [[2, 3, 4]]]), runs=runs).segments()
        [(slice(0, 2, None), True), (slice(2, 3, None), False)]
        """
        segments: list[tuple[slice, bool]] = []
        for position, own in enumerate(self.runs.all(axis=(0, 1)).tolist()):
            first = position
            if own and segments and segments[-1][1]:
                first = segments.pop()[0].start
            segments.append((slice(first, position + 1), own))
        return segments

    def stacked(self, flat: Flat) -> Flat:
        """Return the layers' Variables by their path in a chunk, ``[p, v, ...]``, each stage's on its devices."""

        def join(*leaves: Array) -> Array:
            return jnp.stack(leaves).reshape(*self.runs.shape[:2], *leaves[0].shape)

        stacked: Flat = {}
        for position, column in enumerate(self.columns()):
            for inner in self.paths[column[0]]:
                paths = [self.paths[number][inner] for number in column]
                if paths[0] in flat:
                    stacked[position, *inner] = jax.tree.map(join, *[flat[path] for path in paths])
        return _sharded(stacked, on_stages=True)

    def unstacked(self, stacked: Flat) -> Flat:
        """Return the Variables of all layers by their path in the model: the inverse of `stacked`."""
        # All-to-all first: a slice of an axis that is sharded over the stages would be sent to all of them.
        everywhere, unstacked = _sharded(stacked, on_stages=False), {}
        for (position, *inner), variable in everywhere.items():
            for (s, c), runs in np.ndenumerate(self.runs[:, :, position]):
                if runs:
                    path = self.paths[self.numbers[s, c, position]][tuple(inner)]
                    unstacked[path] = jax.tree.map(lambda leaf, at=(s, c): leaf[at], variable)
        return unstacked


def _sharded(stacked: Flat, *, on_stages: bool) -> Flat:
    """Return Variables ``[p, v, ...]`` split by stage, or as their layers' are stored."""
    mesh, rules, leaves = current_mesh(), stage_rules() if on_stages else current_rules(), []
    assert mesh is not None
    for _, leaf, axes in leaves_with_axes(stacked):
        inner = logical_to_spec(axes[2:] if isinstance(axes, PartitionSpec) else tuple(axes)[2:], mesh, rules)
        leaves.append(constrain(leaf, PartitionSpec(PIPELINE_AXIS if on_stages else None, None, *inner)))
    return jax.tree.unflatten(jax.tree.structure(stacked), leaves)


def cut_model(
    state: TrainState, layers_of: Callable[[Any], Sequence[nnx.Module]], stages: int, config: PipelineConfig
) -> Cut:
    """Return the partition of a state's model, whose layers are ``layers_of(model)``.

    Raises:
        ValueError: for layers that are not the model's own, share parameters, or differ so much that each stage would
            compute all of them.
    """
    paths = _layer_paths(state, layers_of)
    layers = list(layers_of(nnx.merge(state.graphdef, state.params, state.quantizers, state.rest)))
    chunks = config.virtual_stages
    sizes = split_layers(len(layers), stages * chunks, first=config.first_layers, last=config.last_layers)
    ends = np.cumsum(sizes)
    numbers, runs = _positions([range(end - size, end) for size, end in zip(sizes, ends, strict=True)], _kinds(layers))
    if runs.shape[1] == len(layers):
        raise ValueError(
            "the layers of pipeline stages differ in their options (recipe, window, precision, experts, a number that "
            f"they read), so that each stage, which runs one program, would compute all {len(layers)} of them; build "
            "them alike, or choose the numbers of layers so that stages are"
        )
    if runs.shape[1] > max(sizes):
        log_once(
            f"pipeline: stages differ in their layers, so each computes {runs.shape[1]} in the place of at most "
            f"{max(sizes)} of its own, and leaves out what is another's; choose first_layers and last_layers so that "
            "stages are alike, if they can be",
            logging.INFO,  # it takes time, and changes no number
        )
    # Chunks follow each other over all stages, and then over the stages' next chunks.
    numbers, runs = (table.reshape(chunks, stages, -1).swapaxes(0, 1) for table in (numbers, runs))
    # Copies: a chunk may hold one layer twice, and NNX would take both for one.
    first_chunk = nnx.List([nnx.clone(layers[i]) for i in numbers[0, 0]])
    return Cut(paths, nnx.split(first_chunk)[0], numbers, runs)


def _kinds(layers: Sequence[nnx.Module]) -> list[int]:
    """Return a number for each layer, the same one for layers that one program can run."""
    known: list[Any] = []
    kinds = []
    for layer in layers:
        kind = _without_number(layer)
        if kind not in known:
            known.append(kind)
        kinds.append(known.index(kind))
    return kinds


def _positions(chunks: Sequence[Sequence[int]], kinds: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the layer at each position of each chunk, ``[chunks, l]``, and whether it is the chunk's own.

    >>> numbers, runs = _positions([[0, 1], [2, 3]], [0, 1, 1, 1])  # the first layer is of another kind
    >>> numbers.tolist(), runs.tolist()
    ([[0, 1, 1], [0, 2, 3]], [[True, True, False], [False, True, True]])
    """
    order: list[int] = []
    for chunk in chunks:
        order = _common_order(order, [kinds[i] for i in chunk])
    numbers, runs = (np.zeros((len(chunks), len(order)), kind) for kind in (np.int32, bool))
    for row, chunk in enumerate(chunks):
        left = list(chunk)
        for position, kind in enumerate(order):
            own = bool(left) and kinds[left[0]] == kind
            held = [i for i in chunk if kinds[i] == kind] or [kinds.index(kind)]
            numbers[row, position], runs[row, position] = left.pop(0) if own else held[0], own
        assert not left
    return numbers, runs


def _common_order(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return the shortest list that contains both lists in their orders.

    >>> _common_order([0, 1, 1], [1, 2])
    [0, 1, 1, 2]
    """
    # Lengths of the shortest lists for what is left of both.
    lengths = np.zeros((len(one) + 1, len(other) + 1), int)
    for i, j in itertools.product(reversed(range(len(one) + 1)), reversed(range(len(other) + 1))):
        if i == len(one) or j == len(other):
            lengths[i, j] = len(one) - i + len(other) - j
        else:
            both = one[i] == other[j]
            lengths[i, j] = 1 + (lengths[i + 1, j + 1] if both else min(lengths[i + 1, j], lengths[i, j + 1]))
    merged, i, j = [], 0, 0
    while i < len(one) or j < len(other):
        if i < len(one) and j < len(other) and one[i] == other[j]:
            merged.append(one[i])
            i, j = i + 1, j + 1
        elif j == len(other) or (i < len(one) and lengths[i + 1, j] <= lengths[i, j + 1]):
            merged.append(one[i])
            i += 1
        else:
            merged.append(other[j])
            j += 1
    return merged


def _layer_paths(state: TrainState, layers_of: Callable[[Any], Sequence[nnx.Module]]) -> list[dict[Path, Path]]:
    """Return, for each layer, the paths in the model of its Variables by their paths in the layer.

    Raises:
        ValueError: for a layer that is not the model's, and for Variables that two layers share.
    """

    def with_paths(variables: nnx.State) -> nnx.State:
        """Return Variables with their paths in the model as metadata, which they keep inside of a layer."""
        flat = nnx.to_flat_state(variables)
        return nnx.from_flat_state([(path, var.replace(var.get_value(), path_in_model=path)) for path, var in flat])

    model = nnx.merge(state.graphdef, with_paths(state.params), with_paths(state.quantizers), state.rest)
    paths, owners = [], {}
    for number, layer in enumerate(layers_of(model)):
        variables = nnx.to_flat_state(nnx.state(layer))
        own = {inner: variable.get_metadata().get("path_in_model") for inner, variable in variables}
        if None in own.values():
            raise ValueError(
                f"layer {number} is not the model's: its parameters are not among those that are trained; give the "
                "model's own layers to PipelinedLoss, or take a mesh without a pipeline axis"
            )
        shared = [path for path in own.values() if owners.setdefault(path, number) != number]
        if shared:
            raise ValueError(
                f"layer {number} shares parameters with layer {owners[shared[0]]} "
                f"({'/'.join(map(str, shared[0]))}), and each stage of a pipeline has its own layers alone; build them "
                "apart, or take a mesh without a pipeline axis"
            )
        paths.append(own)
    return paths


def _without_number(layer: nnx.Module) -> Any:
    """Return a layer's graph definition without the numbers that its modules do not read."""
    copy = nnx.clone(layer)
    for _, module in nnx.iter_modules(copy):
        if hasattr(module, "layer_number") and not _reads_number(module):
            setattr(module, "layer_number", None)  # noqa: B010
    return nnx.split(copy)[0]


def _reads_number(module: nnx.Module) -> bool:
    """Return whether results of a module with a ``layer_number`` may depend on it: unless its own class says no.

    A class that is derived from another may read what that one only stores.
    """
    return "reads_layer_number" not in vars(type(module)) or getattr(module, "reads_layer_number")  # noqa: B009
