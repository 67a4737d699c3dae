"""Partition of a model into stages: the layers of each stage, and their Variables stacked by stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import get_opaque_trace_state
from jax.sharding import PartitionSpec

from jax_te.config import PipelineConfig
from jax_te.models import StackCall, replace_stack
from jax_te.sharding import ShardingRules, constrain, current_mesh, current_rules, leaves_with_axes, logical_to_spec
from jax_te.training.pipeline.schedule import split_layers
from jax_te.typing import Array

AXIS = "pipeline"

Flat = dict[Any, Any]
"""Variables by their path in a model, or in a layer."""


def pipeline_stages() -> int:
    """Return the number of devices along the mesh's pipeline axis; 1 without one."""
    mesh = current_mesh()
    return 1 if mesh is None else mesh.shape.get(AXIS, 1)


def stage_rules() -> ShardingRules:
    """Return the rules in use without the pipeline axis, for arrays that belong to one stage."""
    rules = current_rules()
    names = [rule.name for rule in dataclasses.fields(ShardingRules)]
    without = {name: tuple(axis for axis in getattr(rules, name) if axis != AXIS) for name in names}
    return dataclasses.replace(rules, **without)


class Cut(NamedTuple):
    """Assignment of a model's layers to stages.

    Args:
        paths: paths of the layers in the model.
        graphdefs: graph definitions of the layers at each position in a chunk, the same in all chunks.
        numbers: ``[p, v, l]``, the layer at each position of each chunk of each stage.
        counts: ``[p, v]``, layers of each chunk; positions from there on hold a copy of one that is not run.
        run: function that runs layers.
        static: arguments that are not arrays.
    """

    paths: list[tuple[Any, ...]]
    graphdefs: list[Any]
    numbers: np.ndarray
    counts: np.ndarray
    run: Callable[..., Array]
    static: dict[str, Any]

    @property
    def positions(self) -> list[int]:
        """The position of each layer in its chunk."""
        return [int(np.argwhere(self.numbers == i)[0, 2]) for i in range(len(self.paths))]

    def layer_of(self, path: tuple[Any, ...]) -> int | None:
        """Return the number of the layer that a Variable belongs to."""
        return next((i for i, layer in enumerate(self.paths) if path[: len(layer)] == layer), None)

    def around(self, flat: Flat) -> Flat:
        """Return the Variables that belong to no layer."""
        return {path: variable for path, variable in flat.items() if self.layer_of(path) is None}

    def stacked(self, flat: Flat) -> list[Flat]:
        """Return for each position of a chunk its layers' Variables, ``[p, v, ...]``, each stage's on its devices."""
        layers: list[Flat] = [{} for _ in self.paths]
        for path, variable in flat.items():
            number = self.layer_of(path)
            if number is not None:
                layers[number][path[len(self.paths[number]) :]] = variable
        return [
            self._stack([layers[i] for i in column]) for column in self.numbers.reshape(-1, self.numbers.shape[2]).T
        ]

    def _stack(self, layers: list[Flat]) -> Flat:
        def join(*leaves: Array) -> Array:
            return jnp.stack(leaves).reshape(*self.counts.shape, *leaves[0].shape)

        return _placed(jax.tree.map(join, *layers), on_stages=True)

    def unstacked(self, positions: list[Flat]) -> Flat:
        """Return the Variables of all layers by their path in the model: the inverse of `stacked`."""
        found: Flat = {}
        for j, stacked in enumerate(positions):
            # All-to-all first: a slice of an axis that is sharded over the stages would be sent to all of them.
            everywhere = _placed(stacked, on_stages=False)
            for (s, c), count in np.ndenumerate(self.counts):
                if j < count:
                    own = self.paths[self.numbers[s, c, j]]
                    one = jax.tree.map(lambda leaf, at=(s, c): leaf[at], everywhere)
                    found |= {(*own, *path): variable for path, variable in one.items()}
        return found


def _placed(stacked: Flat, *, on_stages: bool) -> Flat:
    """Return Variables ``[p, v, ...]`` split by stage, or as their layers' are stored."""
    mesh, rules, leaves = current_mesh(), stage_rules() if on_stages else current_rules(), []
    assert mesh is not None
    for _, leaf, axes in leaves_with_axes(stacked):
        inner = logical_to_spec(axes[2:] if isinstance(axes, PartitionSpec) else tuple(axes)[2:], mesh, rules)
        leaves.append(constrain(leaf, PartitionSpec(AXIS if on_stages else None, None, *inner)))
    return jax.tree.unflatten(jax.tree.structure(stacked), leaves)


def cut_model(model: nnx.Module, call_model: Callable[[], Any], stages: int, config: PipelineConfig) -> Cut:
    """Return the partition of a model whose only stack of layers ``call_model()`` runs.

    Raises:
        ValueError: if it runs none or several, inside of another transformation, or layers that are not the model's own
            or share parameters; if layers differ between stages.
    """
    call, chunks = _only_call(call_model), config.virtual_stages
    paths = _paths(model, call.layers)
    sizes = split_layers(len(paths), stages * chunks, first=config.first_layers, last=config.last_layers)
    numbers = np.zeros((stages, chunks, max(sizes)), np.int32)
    for at, (size, end) in enumerate(zip(sizes, np.cumsum(sizes), strict=True)):
        own = list(range(end - size, end))
        numbers[at % stages, at // stages] = own + own[:1] * (max(sizes) - size)
    definitions = [nnx.split(layer)[0] for layer in call.layers]
    kinds = [_without_number(layer) for layer in call.layers]
    for column in numbers.reshape(-1, max(sizes)).T.tolist():
        other = next((i for i in column if kinds[i] != kinds[column[0]]), None)
        if other is not None:
            raise ValueError(
                f"layers {column[0]} and {other} stand at the same place of two pipeline stages and differ in their "
                "options (recipe, window, precision), but stages run one program; build them alike, or choose the "
                "numbers of layers so that stages are"
            )
    counts = np.asarray(sizes, np.int32).reshape(chunks, stages).T
    static = {name: value for name, value in call.options.items() if not is_array_tree(value)}
    return Cut(paths, [definitions[i] for i in numbers[0, 0]], numbers, counts, call.run, static)


def _without_number(layer: nnx.Module) -> Any:
    """Return a layer's graph definition without its number, by which this package's layers compute nothing."""
    copy = nnx.clone(layer)
    for _, module in nnx.iter_modules(copy):
        # A user-defined layer may read its number, and then differs from others.
        if hasattr(module, "layer_number") and type(module).__module__.startswith("jax_te."):
            setattr(module, "layer_number", None)  # noqa: B010
    return nnx.split(copy)[0]


def _only_call(call_model: Callable[[], Any]) -> StackCall:
    """Return the call of the one stack of layers that ``call_model()`` runs."""
    calls: list[StackCall] = []
    outside = get_opaque_trace_state()

    def note(call: StackCall) -> Array:
        # A stage takes the call's arrays out of the surrounding function, which JAX allows only within one trace.
        if get_opaque_trace_state() != outside:
            raise ValueError(
                "a pipeline cuts loss_fn where it runs the layers, and there they are inside of another transformation "
                "(jax.jit, jax.checkpoint, jax.grad, jax.vmap, jax.lax.cond or scan, or one of nnx); call the model "
                "outside of it, or take a mesh without a pipeline axis"
            )
        calls.append(call)
        return call.x

    with replace_stack(note):
        call_model()
    if len(calls) != 1:
        raise ValueError(
            f"a pipeline splits one stack of layers, and loss_fn runs {len(calls)} (calls of "
            "jax_te.models.run_layers); take a mesh without a pipeline axis"
        )
    return calls[0]


def _paths(model: nnx.Module, layers: Sequence[nnx.Module]) -> list[tuple[Any, ...]]:
    """Return the path of each layer in the model; raise ValueError for a layer that shares Variables."""
    places = {id(module): path for path, module in nnx.iter_modules(model)}
    if any(id(layer) not in places for layer in layers):
        raise ValueError(
            "loss_fn runs layers that are not those of its model, such as a copy's (nnx.clone, nnx.merge), and stages "
            "of a pipeline have the model's own; run the model itself, or take a mesh without a pipeline axis"
        )
    paths = [places[id(layer)] for layer in layers]
    # A Variable that is in several places has one path: elsewhere it is missing.
    known = {path for path, _ in nnx.to_flat_state(nnx.state(model))}
    for number, (path, layer) in enumerate(zip(paths, layers, strict=True)):
        missing = [inner for inner, _ in nnx.to_flat_state(nnx.state(layer)) if (*path, *inner) not in known]
        if missing or path in paths[:number]:
            what = "/".join(map(str, missing[0])) if missing else "everything"
            raise ValueError(
                f"layer {number} shares parameters with another part of the model ({what}), and each stage of a "
                "pipeline has its own layers alone; build them apart, or take a mesh without a pipeline axis"
            )
    return paths


def is_array_tree(value: Any) -> bool:
    """Return whether an argument of the stack is made of arrays."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(isinstance(leaf, jax.Array) for leaf in leaves)
