"""Statistics of every tensor that a model quantizes, and scales for delayed scaling from them."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_te._validation import check_positive, checked
from jax_te.layers import (
    DotProductAttention,
    aux_losses_scaled,
    name_modules,
    natural_order,
    prepare_quantization,
    quantizable_modules,
)
from jax_te.quantize import (
    ROLES,
    STATISTICS,
    Observer,
    QuantizedKernel,
    QuantizerState,
    as_float32,
    current_attention_scales,
    observe_quantization,
    with_max_gradients,
    write_back,
)
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, Recipe, autocast
from jax_te.sharding import batch_axes, constrain
from jax_te.training.global_batch import broadcast_from_first, check_global
from jax_te.training.loss import LossFn, mean_loss
from jax_te.training.masters import full_precision
from jax_te.training.microbatches import MicrobatchStart, check_batch
from jax_te.training.state import TrainState, constrain_as_created, split_model
from jax_te.typing import Array, Key, PyTree


@dataclass(frozen=True, kw_only=True)
class TensorStatistics:
    """Statistics of one quantized tensor of a model, see `jax_te.quantize.quantization_statistics`.

    If a tensor is quantized more than once, ``amax`` is the largest, ``scale`` the smallest, and the others are means.

    Args:
        module: path of the layer, followed by the kernel's name if the layer has two kernels.
        role: ``"x"`` (the input), ``"kernel"`` or ``"grad"`` (the gradient of the output).
        format: ``"e4m3"``, ``"e5m2"`` or ``"e2m1"``.
        amax, scale, underflow, saturation, mse, relative_mse: the statistics.
    """

    module: str
    role: str
    format: str
    amax: float
    scale: float
    underflow: float
    saturation: float
    mse: float
    relative_mse: float

    @property
    def error_db(self) -> float:
        """``relative_mse`` in decibels, ``10 log10``; -inf if quantization was exact.

        >>> zeros = dict.fromkeys(("amax", "scale", "underflow", "saturation", "mse"), 0.0)
        >>> TensorStatistics(module="proj", role="x", format="e4m3", relative_mse=0.001, **zeros).error_db
        -30.0
        """
        if math.isnan(self.relative_mse):
            return math.nan
        return 10.0 * math.log10(self.relative_mse) if self.relative_mse > 0.0 else -math.inf


@checked
def inspect_precision(
    model: nnx.Module, loss_fn: LossFn, batch: PyTree, *, key: Key | None = None, loss_scale: float | Array = 1.0
) -> list[TensorStatistics]:
    """Run a loss forward and backward, and return statistics of every tensor that linear layers quantize.

    Call it under the recipe, ``with autocast(recipe):``. The model does not change. Delayed scaling uses the scales of
    the model's states (see `calibrate_delayed_scaling` for a model with empty histories).

    Args:
        model: any model with layers of `jax_te.layers`, in training mode.
        loss_fn: ``(model, batch, key) -> [ ]``.
        batch, key: arguments of ``loss_fn``. Without a key layers drop nothing.
        loss_scale: factor of the loss, as in fp16 training.

    Returns:
        One entry for each quantized tensor: layers in the model's order, roles in the order x, kernel, grad.

    Raises:
        ValueError: if nothing is quantized, or if kernels are stored quantized, whose exact values are unknown; on a
            mesh of several processes, for a batch that is not global.

    >>> from jax_te.layers import Linear
    >>> with autocast(Float8CurrentScaling()):
    ...     model = Linear(32, 16, rngs=nnx.Rngs(0))
    ...     tensors = inspect_precision(model, lambda model, x, key: jnp.mean(model(x) ** 2), jnp.ones((16, 32)))
    >>> [(tensor.role, tensor.format) for tensor in tensors]
    [('x', 'e4m3'), ('kernel', 'e4m3'), ('grad', 'e5m2')]
    """
    return _statistics(_observed(model, loss_fn, batch, key, loss_scale))


def _observed(
    model: nnx.Module, loss_fn: LossFn, batch: PyTree, key: Array | None, loss_scale: float | Array
) -> Observer:
    """Return the observations of a loss and its gradients; raises like `inspect_precision`."""
    graphdef, params, quantizers, rest = split_model(model)
    if any(isinstance(variable.get_value(), QuantizedKernel) for _, variable in nnx.to_flat_state(params)):
        raise ValueError(
            "the model holds quantized kernels, whose exact values are gone; inspect exact_model(state), which takes "
            "the fp32 masters, or a model that was not given to quantize_parameters"
        )
    check_global(batch, params)
    with observe_quantization() as observer:
        start = MicrobatchStart.first(quantizers, rest)
        _probe(loss_fn)(graphdef, params, quantizers, start, batch, key, jnp.float32(loss_scale))
    _share(observer, params)
    if not observer.records:
        raise ValueError(
            "nothing was quantized; call it inside `with autocast(recipe):`, and have at least one layer of "
            "jax_te.layers that is not kept in high precision"
        )
    return observer


@checked
def make_inspection(
    loss_fn: LossFn, *, microbatches: int = 1
) -> Callable[[TrainState, PyTree], list[TensorStatistics]]:
    """Return ``inspect(state, batch)``, which returns the statistics of the train step that would follow.

    ``inspect`` computes that step's gradients separately, from the same parameters, scales, loss scale, dropout keys
    and microbatches, of which each begins with the other state that the one before it leaves, and discards them. Thus
    inspection does not change a step by a bit. It is compiled at the first call. In several processes all call it, with
    a global batch, and get the same.

    Args:
        loss_fn, microbatches: see `make_train_step`.

    Raises:
        ValueError: when called, for a batch that the step refuses: of arrays that differ in their leading axis, or of a
            size that does not divide into microbatches and over the mesh's batch axes; on a mesh of several processes,
            also for one that is not global.

    >>> import optax
    >>> from jax_te.layers import Linear
    >>> from jax_te.training.state import create_train_state
    >>> inspect = make_inspection(lambda model, x, key: jnp.mean(model(x) ** 2))
    >>> with autocast(Float8CurrentScaling()):
    ...     state = create_train_state(lambda rngs: Linear(32, 16, rngs=rngs), optax.sgd(0.1), key=jax.random.key(0))
    ...     len(inspect(state, jnp.ones((16, 32))))
    3
    """
    # One observer for all calls: it is part of the jit cache key, so another one would recompile the probe.
    check_positive(microbatches=microbatches)
    observer, probe = Observer(), _probe(loss_fn)

    def inspect(state: TrainState, batch: PyTree) -> list[TensorStatistics]:
        check_global(batch, state.step)
        check_batch(batch, microbatches)
        params, key = _exact_parameters(state), jax.random.fold_in(state.rng, state.step)
        # Records of the previous call.
        observer.records.clear()
        observer.group_amaxes.clear()
        start = MicrobatchStart.first(state.quantizers, state.rest)
        scale = state.scaler.scale * (1.0 / microbatches)  # of a microbatch's share of the loss, as in the step
        with observe_quantization(observer):
            for index in range(microbatches):
                cut = functools.partial(_microbatch, index=index, microbatches=microbatches)
                part, part_key = jax.tree.map(cut, batch), jax.random.fold_in(key, index)
                start = probe(state.graphdef, params, state.quantizers, start, part, part_key, scale)
        _share(observer, params)
        return _statistics(observer)

    return inspect


@checked
def exact_model(state: TrainState, *, all_masters: bool = False) -> Any:
    """Return ``state.model`` with the fp32 masters of kernels that are stored quantized (``fp8_param``).

    Args:
        state: state of the run.
        all_masters: whether half-precision parameters are those of the masters, too.

    >>> import optax
    >>> from jax_te.layers import Linear
    >>> from jax_te.training.state import create_train_state
    >>> with autocast(Float8CurrentScaling()):
    ...     make = lambda rngs: Linear(32, 16, rngs=rngs)
    ...     state = create_train_state(make, optax.sgd(0.1), key=jax.random.key(0), fp8_param=True)
    >>> exact_model(state).kernel.get_value().dtype
    dtype('float32')
    """
    params = full_precision(state.params, state.masters) if all_masters else _exact_parameters(state)
    return nnx.merge(state.graphdef, params, state.quantizers, state.rest, copy=True)


@checked
def calibrate_delayed_scaling(
    model: nnx.Module, loss_fn: LossFn, batch: PyTree, recipe: Recipe, *, loss_scale: float | Array = 1.0
) -> None:
    """Fill the scaling states of ``model`` with the amaxes of one batch, so that the first scales fit.

    With empty histories, delayed scaling quantizes its first step with scale 1, in which nearly all gradients
    underflow. The amaxes of linear layers come from a pass under `Float8CurrentScaling` of the same format; those of
    the core of attention, under a recipe with ``fp8_dpa``, from one under the recipe, with the layers' scales so found,
    and with scales of the core that are computed from its tensors.

    Args:
        model: changed in place: its states become fresh ones for ``recipe``, with these amaxes as the newest; those of
            layers that the loss does not call have none.
        loss_fn, batch, loss_scale: see `inspect_precision`. The batch is a step's; of one of its m microbatches the
            gradients are m times as large, unless ``loss_scale`` is 1 / m.
        recipe: recipe of the states: `DelayedScaling`, or `Float8CurrentScaling` with ``fp8_dpa``, under which some of
            attention's scales are delayed. If it has no state, the model's states are removed and nothing is computed.

    >>> from jax_te.layers import Linear
    >>> model, recipe = Linear(32, 16, rngs=nnx.Rngs(0)), DelayedScaling(amax_history_len=2)
    >>> calibrate_delayed_scaling(model, lambda model, x, key: jnp.mean(model(x) ** 2), jnp.ones((16, 32)), recipe)
    >>> model.quantizers["x"]["amax_history"].tolist()
    [1.0, 0.0]
    """
    # On a model that shares the arrays: a loss that fails leaves the caller's as it was.
    trial = prepare_quantization(nnx.merge(*nnx.split(model)), recipe)
    if isinstance(recipe, DelayedScaling) and quantizable_modules(trial):
        _calibrate_layers(trial, loss_fn, batch, recipe, loss_scale)
    if any(core.quantizers is not None for core in _cores(trial).values()):
        _calibrate_cores(trial, loss_fn, batch, recipe, loss_scale)
    prepare_quantization(model, recipe)
    nnx.update(model, nnx.state(trial, QuantizerState))


def _calibrate_layers(
    model: nnx.Module, loss_fn: LossFn, batch: PyTree, recipe: DelayedScaling, loss_scale: float | Array
) -> None:
    """Fill the fresh states of linear layers with the amaxes of a pass under current scaling."""
    with autocast(Float8CurrentScaling(fp8_format=recipe.fp8_format)):
        observer = _observed(model, loss_fn, batch, None, loss_scale)
    amaxes = {(tensor.module, tensor.role): tensor.amax for tensor in _statistics(observer)}
    # Experts have a history each. NumPy's maximum keeps nan.
    amaxes |= {key: np.maximum.reduce(of_groups) for key, of_groups in observer.group_amaxes.items()}
    for path, module in quantizable_modules(model):
        for kernel, attribute in module.kernels.items():
            state = getattr(module, attribute)
            if state is None:
                continue
            # As the observer names it: a layer that is the whole model has no path.
            name = (path or "unnamed") if len(module.kernels) == 1 else f"{path}.{kernel}"
            # A layer that the loss does not call has no amaxes, and begins without a history.
            for role in [role for role in ROLES if (name, role) in amaxes]:
                history = state[role]["amax_history"]
                history.set_value(history.get_value().at[..., 0].set(amaxes[name, role]))


def _calibrate_cores(
    model: nnx.Module, loss_fn: LossFn, batch: PyTree, recipe: Recipe, loss_scale: float | Array
) -> None:
    """Replace the fresh states of cores of attention by the next ones of a pass with current scales in these."""
    graphdef, params, quantizers, rest = split_model(model)
    check_global(batch, params)

    @jax.jit
    def next_states(params: PyTree, quantizers: PyTree, rest: PyTree, batch: PyTree) -> PyTree:
        def loss(quantizers: PyTree) -> Array:
            model = nnx.merge(graphdef, params, quantizers, rest, copy=True)
            return _unscaled_loss(loss_fn, model, batch, None) * loss_scale

        return as_float32(jax.grad(loss, allow_int=True)(with_max_gradients(quantizers)))

    with autocast(recipe), current_attention_scales():
        after = next_states(params, quantizers, rest, batch)
        found = dict(nnx.to_flat_state(write_back(quantizers, after)))
    for path in _cores(model):
        of_core = [(name, variable) for name, variable in found.items() if name[: len(path)] == path]
        nnx.update(model, nnx.from_flat_state(of_core))


def _cores(model: nnx.Module) -> dict[tuple[Any, ...], DotProductAttention]:
    """Return the cores of attention of a model by their paths."""
    return {path: module for path, module in nnx.iter_modules(model) if isinstance(module, DotProductAttention)}


def _probe(loss_fn: LossFn) -> Callable[..., MicrobatchStart]:
    """Return a jitted forward and backward pass, run only to observe its tensors; it returns the next one's start."""

    @functools.partial(jax.jit, static_argnums=0)
    def probe(
        graphdef: nnx.GraphDef[Any],
        params: PyTree,
        quantizers: PyTree,
        start: MicrobatchStart,
        batch: PyTree,
        key: Array | None,
        loss_scale: float | Array,
    ) -> MicrobatchStart:
        def scaled_loss(params: PyTree, quantizers: PyTree) -> tuple[Array, PyTree]:
            model = nnx.merge(graphdef, params, quantizers, start.rest, copy=True)
            name_modules(model)
            with aux_losses_scaled(model, loss_scale):
                loss = _unscaled_loss(loss_fn, model, batch, key) * loss_scale
            return loss, split_model(model).rest

        # allow_int: the dtype of with_max_gradients is not an ordinary float. XLA drops the
        # gradients, of which only counts are returned, but not the callbacks that record tensors of the backward pass.
        differentiate = jax.grad(scaled_loss, argnums=(0, 1), has_aux=True, allow_int=True)
        (_, gradients), rest = differentiate(params, with_max_gradients(start.quantizers(quantizers)))
        return start.following(as_float32(gradients), constrain_as_created(rest))

    return probe


def _unscaled_loss(loss_fn: LossFn, model: Any, batch: PyTree, key: Array | None) -> Array:
    """Return the mean loss of a batch, which is split over the mesh; without a key layers drop nothing."""
    batch = jax.tree.map(lambda leaf: constrain(leaf, batch_axes(leaf.ndim)), batch)
    if key is None:
        model.set_attributes(without_dropout=True, raise_if_not_found=False)
    return mean_loss(loss_fn(model, batch, key))


def _share(observer: Observer, params: PyTree) -> None:
    """Send the records, which arrive only in the process of the mesh's first device, to all processes of the mesh."""
    text = broadcast_from_first(
        json.dumps(
            [
                [*key, observer.formats[key], rows, observer.group_amaxes.get(key)]
                for key, rows in observer.records.items()
            ]
        ),
        params,
    )
    for module, role, name, rows, group_amaxes in json.loads(text):
        observer.records[module, role], observer.formats[module, role] = rows, name
        if group_amaxes is not None:
            observer.group_amaxes[module, role] = group_amaxes


def _exact_parameters(state: TrainState) -> nnx.State:
    """Return the parameters, with fp32 masters in place of those that are stored quantized."""
    full = dict(nnx.to_flat_state(full_precision(state.params, state.masters)))
    return nnx.from_flat_state(
        [
            (path, full[path] if isinstance(variable.get_value(), QuantizedKernel) else variable)
            for path, variable in nnx.to_flat_state(state.params)
        ]
    )


def _microbatch(leaf: Any, *, index: int, microbatches: int) -> Any:
    size = leaf.shape[0] // microbatches
    return leaf[index * size : (index + 1) * size]


def _statistics(observer: Observer) -> list[TensorStatistics]:
    # Sorted, because callbacks run in no fixed order.
    return [
        TensorStatistics(module=module, role=role, format=observer.formats[module, role], **_merged(rows))
        for (module, role), rows in sorted(
            observer.records.items(),
            key=lambda item: (natural_order(item[0][0]), ROLES.index(item[0][1])),  # type: ignore[arg-type]
        )
    ]


def _merged(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return several observations of one tensor merged into one; nan wins."""
    # max and min of Python drop or keep nan depending on the order of their arguments, hence the tests for it below.
    columns = {name: [row[name] for row in rows] for name in STATISTICS}
    return {name: _MERGE.get(name, _mean)(values) for name, values in columns.items()}


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else sum(values)


def _max(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values)


def _min(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else min(values)


_MERGE: dict[str, Callable[[list[float]], float]] = {"amax": _max, "scale": _min}
