"""Loss and gradients: fp32 gradients of kernels, which are quantized once a step, and the next quantizer states."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.tree_util import Partial

from jax_te._validation import checked, has_shape_and_dtype
from jax_te.layers import (
    KernelCache,
    aux_losses_scaled,
    cached_kernels,
    quantize_kernels,
    set_grad_sinks,
    states_advance,
    with_grad_sinks,
)
from jax_te.models import layers_traced_once
from jax_te.quantize import (
    QuantizedKernel,
    QuantizerState,
    as_float32,
    merge_quantizers,
    with_max_gradients,
    write_back,
)
from jax_te.remat import StaticChanges, Watched
from jax_te.sharding import constrain, current_mesh, leaves_with_axes, variable_axes
from jax_te.training.kernel_gradients import KernelGradients, Path, SummandPlace
from jax_te.training.loss_scale import ConstantLossScale, LossScale
from jax_te.training.masters import full_precision, select
from jax_te.training.microbatches import MicrobatchStart
from jax_te.training.outcome import gradients_or_nan, loss_or_nan, outcome_of
from jax_te.training.state import SplitModel, TrainState, split_model
from jax_te.training.used_scale import UsedScale
from jax_te.typing import Array, DTypeLike, PyTree, Words

_NO_CACHE = KernelCache({})


class WeightedMean(NamedTuple):
    """A mean loss as two sums, which a ``loss_fn`` may return so that microbatches with more tokens count for more.

    Args:
        total: ``[]``, the sum of the weighted losses.
        weight: ``[]``, the sum of the weights, e.g. a number of tokens. It may not depend on parameters: no gradient
            passes through it.

    >>> float(WeightedMean(jnp.float32(6.0), jnp.int32(4)).mean)
    1.5
    """

    total: Array
    weight: Array

    @property
    def mean(self) -> Array:
        """The mean, fp32; the total where the weight is 0."""
        weight = jax.lax.stop_gradient(jnp.asarray(self.weight, jnp.float32))
        # The divisor is replaced before the division, not the quotient after it: 0 / 0 would make the gradient nan.
        return self.total.astype(jnp.float32) / jnp.where(weight == 0.0, 1.0, weight)


LossFn = Callable[[Any, PyTree, Array | None], Array | WeightedMean]
"""``loss_fn(model, batch, key)``: the mean loss over a batch, a scalar or a `WeightedMean`, which also gives the weight
of the batch. ``key`` is None in evaluation: no dropout."""


class Gradients(NamedTuple):
    """Loss and gradients of a batch.

    Args:
        loss: fp32 ``[]``.
        grads: ``nnx.State``, gradients of the scaled loss, fp32.
        quantizers: next quantizer states.
        rest: the model's other state.
        counts: counts with which each of several microbatches in a loop began, stacked, see `MicrobatchStart`.
    """

    loss: Array
    grads: nnx.State
    quantizers: nnx.State
    rest: nnx.State
    counts: PyTree = None


class Differentiated(NamedTuple):
    """Result of `differentiate`.

    Args:
        gradients: loss, gradients by the model, and its next state.
        summands: summands of the kernels' gradients that ``gradients`` lack, see `KernelGradients`.
        inputs: gradients by the function's other inputs, in their dtypes.
        aux: auxiliary output of the function.
    """

    gradients: Gradients
    summands: dict[Path, Array]
    inputs: tuple[Array, ...]
    aux: Any


@dataclass(frozen=True, kw_only=True)
class Differentiation:
    """Computation of gradients by `differentiate`.

    Args:
        rest_of: function that returns the other state of the model after the call.
        scaler: multiplier of the loss.
        kernels: computation of the kernels' gradients; those of some are given as ``summands``, see `Differentiated`.
        cached: kernels that the caller has quantized already, and which layers go without after the call. None: layers
            keep what they cache themselves, as other state.
        like: Variables whose axes the gradients have. None: the parameters.
    """

    rest_of: Callable[[Any], nnx.State]
    scaler: LossScale
    kernels: KernelGradients
    cached: KernelCache | None = None
    like: nnx.State | None = None


_OneModel = Annotated[
    int | nnx.DiffState,
    Words(
        "",
        remedy="to differentiate several models, pass them as one: nnx.List([first, second]), an nnx.Dict, or a module "
        "of your own that holds them",
    ),
]
"""Argument of a loss function that is differentiated."""


@checked
def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    argnums: _OneModel = 0,
    has_aux: bool = False,
    scaler: LossScale | Callable[[], LossScale] | None = None,
) -> Callable[..., Any]:
    """Differentiate like ``nnx.value_and_grad``, and set the model's next quantizer state.

    It replaces ``nnx.value_and_grad``, before `Optimizer` or Flax's own. Call it inside of ``nnx.jit``:
    outside, every call compiles anew.

    - Quantizer states are written to the model, together with the other changes that ``loss_fn`` makes to it and to
      other NNX objects among its arguments, e.g. an ``nnx.Rngs``, also inside of tuples and dicts.
    - If loss, the norm of the gradients or an amax of a tensor that was quantized is not finite, all of that stays as
      it was, batch statistics and counts of random numbers, too, as in a train step. If the amax is not, the loss is
      nan, and if the loss is not, so are all gradients: an optimizer sees a step as lost that was lost here.
    - A layer that is called more than once gets the maximum of its next states; one that is not called keeps its own.
    - The gradients of half-precision and quantized kernels are fp32, without intermediate rounding.

    Args:
        loss_fn: ``(model, ...) -> [ ]``, a scalar or a `WeightedMean`.
        argnums: position of the model, or ``nnx.DiffState(position, filter)`` to differentiate some of its Variables
            in place of all of its parameters.
        has_aux: whether ``loss_fn`` returns a pair whose second element, a pytree of arrays, is passed on.
        scaler: loss scaler, which multiplies the loss while it is differentiated; the gradients are unscaled again.
            ``optimizer.scaler`` is that of the moment: take it in each step. For a derivative that is made once, before
            a loop that is not compiled, give a function, ``lambda: optimizer.scaler``, which each call calls. An
            `Optimizer` with a scaler refuses gradients without one, and those that it can tell were computed under
            another than its own, which it can in the function, or outside of all, where they were computed.

    Returns:
        A function of the same arguments that returns ``(loss, grads)``, or ``((loss, aux), grads)``. The loss is fp32
        ``[]``, and ``grads`` an ``nnx.State`` with the names and shapes of the parameters, in fp32, in Variables of
        their types and metadata. With a ``scaler`` the metadata hold ``loss_scale``, too, the record that `Optimizer`
        looks for. JAX takes Variables with other metadata for another structure: where such gradients meet parameters
        in ``jax.tree.map``, or in a transformation of Optax that you call yourself, give ``nnx.as_pure`` of both.

    Raises:
        TypeError: for several ``argnums``: several models are differentiated as one, in an ``nnx.List`` or another
            module; when called, if that argument is not an NNX module, for a loss that is not an array, or of integers,
            or if a function that is given as ``scaler`` does not return one.
        ValueError: when called, for a loss that is not a scalar; for a scaler whose scale changes, and which would be a
            constant of the function that is being compiled, as ``optimizer.scaler`` from outside of it. The body of a
            ``jax.lax.scan`` is such a function, also outside of ``nnx.jit``: there the scaler goes into the carry.

    Source: ``flax.nnx.value_and_grad``.

    >>> from jax_te.layers import Linear
    >>> from jax_te.recipe import DelayedScaling, autocast
    >>> with autocast(DelayedScaling(amax_history_len=1)):
    ...     model = Linear(16, 16, rngs=nnx.Rngs(0))
    ...     loss, grads = value_and_grad(lambda model, x: jnp.sum(model(x)))(model, jnp.ones((16, 16)))
    >>> grads["kernel"].shape, model.quantizers["x"]["amax_history"][...].tolist()
    ((16, 16), [1.0])
    """
    position, wrt = (argnums.argnum, argnums.filter) if isinstance(argnums, nnx.DiffState) else (argnums, nnx.Param)
    if isinstance(position, bool) or not isinstance(position, int) or position < 0:
        raise TypeError(f"argnums must be the position of one model, an int >= 0 or an nnx.DiffState, got {argnums!r}")

    @functools.wraps(loss_fn)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        model = _model_among(args, kwargs, position)
        # Objects may be inside of tuples and dicts, too; the model is among them, again.
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_object)
        objects = _Objects(model, {i: leaf for i, leaf in enumerate(leaves) if _is_object(leaf)})

        static_changes: list[StaticChanges] = []

        def run(objects: _Objects) -> tuple[Any, Any]:
            filled = [objects.others.get(i, leaf) for i, leaf in enumerate(leaves)]
            of_call, named = jax.tree.unflatten(structure, filled)
            watched = Watched(objects)
            value = loss_fn(*of_call, **named)
            static_changes[:] = [watched.static_changes()]
            if has_aux:
                return _loss_and_aux(value)
            _check_is_loss(value, "to pass on a second value, return the pair (loss, aux) and give has_aux=True")
            return value, None

        def split(objects: _Objects) -> SplitModel:
            graphdef, quantizers, wanted, rest = nnx.split(objects, QuantizerState, _within("model", wrt), ...)
            return SplitModel(graphdef, wanted, quantizers, rest)

        graphdef, *states = split(objects)
        factor = _present_scaler(scaler, states)
        differentiation = Differentiation(
            rest_of=lambda objects: split(objects).rest, scaler=factor, kernels=KernelGradients()
        )

        @jax.jit  # a concrete array cannot have the dtype of `with_max_gradients`
        def compiled(params: nnx.State, old: nnx.State, rest: nnx.State) -> tuple[Gradients, Any]:
            differentiated = differentiate(run, SplitModel(graphdef, params, old, rest), differentiation)
            result = differentiated.gradients
            # Before the norm, which the optimizer computes of the same gradients: XLA computes it once.
            grads = gradients_or_nan(factor.unscale(result.grads), loss_or_nan(result.loss, result.quantizers))
            outcome = outcome_of(result.loss, grads, result.quantizers)
            quantizers = write_back(old, result.quantizers, keep_old=~outcome.finite)
            kept = _kept_unless(outcome.finite, result.rest, rest)
            shown = result._replace(loss=outcome.loss, grads=grads, quantizers=quantizers, rest=kept)
            return shown, differentiated.aux

        result, aux = compiled(*states)
        static_changes[0].apply(objects)  # first: to the modules that were watched, before there may be more
        _place_new_variables(objects, result.rest)
        nnx.update(objects, result.quantizers, result.rest)
        grads = result.grads.get("model", nnx.State({}))
        grads = grads if scaler is None else mark_as_scaled(grads, factor)
        return ((result.loss, aux) if has_aux else result.loss), grads

    return differentiated


def _loss_and_aux(value: Any) -> tuple[Any, Any]:
    """Return the pair that a loss function returned.

    Raises:
        TypeError: if it is none, or its first element is no loss.
    """
    # A WeightedMean is a tuple of two, too, of which the second would pass for auxiliary output.
    if isinstance(value, WeightedMean) or not isinstance(value, tuple | list) or len(value) != 2:
        got = "an array" if has_shape_and_dtype(value) else type(value).__name__
        raise TypeError(
            f"loss_fn must return a pair (loss, aux) with has_aux=True, got {got}; leave has_aux out for a loss alone"
        )
    loss, aux = value
    _check_is_loss(loss, "with has_aux=True it is the first of a pair (loss, aux)")
    return loss, aux


def _is_object(node: Any) -> bool:
    return isinstance(node, nnx.Pytree | nnx.Variable)


def _model_among(args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> nnx.Module:
    """Return the model among the arguments of a loss function.

    Raises:
        TypeError: if the argument at that position is none, or is given by keyword.
    """
    if position >= len(args):
        named = f", and by keyword {', '.join(kwargs)}" if kwargs else ""
        raise TypeError(
            f"argument {position} must be the model, given by position as in flax.nnx.value_and_grad; got {len(args)} "
            f"arguments by position{named}"
        )
    if not isinstance(args[position], nnx.Module):
        raise TypeError(f"argument {position} must be the model, an nnx.Module, got {type(args[position]).__name__}")
    return args[position]


def _kept_unless(finite: Array, new: nnx.State, old: nnx.State) -> nnx.State:
    """Return a model's other state after a step: ``new`` if it counts, else ``old``.

    Variables that the step has made, or given another structure or shape, such as intermediates, have no old value.
    """
    before = dict(nnx.to_flat_state(old))

    def kept(path: Path, leaf: Any) -> Any:
        if path not in before or _types(before[path]) != _types(leaf):
            return leaf
        value = select(finite, _value(leaf), _value(before[path]))
        return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value

    return nnx.from_flat_state([(path, kept(path, leaf)) for path, leaf in nnx.to_flat_state(new)])


def _place_new_variables(objects: nnx.Module, rest: nnx.State) -> None:
    """Set the Variables of ``rest`` whose attribute is None, such as a layer's cached kernels.

    ``nnx.update`` adds a Variable where there is no attribute, and fails where there is one that is None.
    """
    new = dict(nnx.to_flat_state(rest))
    for path, module in nnx.iter_modules(objects):
        for name in [name for name, value in vars(module).items() if value is None]:
            if (variable := new.get((*path, name))) is not None:
                setattr(module, name, nnx.data(variable))


def _value(leaf: Any) -> Any:
    """Return the value of a Variable, or an array that is an attribute of a module by itself."""
    return leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf


def _types(leaf: Any) -> tuple[Any, list[Any]]:
    """Return the structure of a state's leaf, and shapes and dtypes of its arrays."""
    leaves, structure = jax.tree.flatten(_value(leaf))
    return structure, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def _present_scaler(scaler: LossScale | Callable[[], LossScale] | None, states: PyTree) -> LossScale:
    """Return the scaler of a call; ``states`` are the states of the model that it differentiates.

    Raises:
        TypeError: for a function that does not return a scaler.
        ValueError: for a scaler with arrays that would be constants of the function that is being traced.
    """
    if scaler is None:
        return ConstantLossScale()
    present = scaler if isinstance(scaler, LossScale) else scaler()
    if not isinstance(present, LossScale):
        raise TypeError(
            f"scaler must be a LossScale or a function that returns one, got a function that returned {present!r}; "
            "give ConstantLossScale() for no scaling"
        )
    model_is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(states))
    constants = [
        leaf for leaf in jax.tree.leaves(present) if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    ]
    if model_is_traced and constants and _is_staged(constants[0]):
        raise ValueError(
            f"value_and_grad has a {type(present).__name__} from outside of the function that is being compiled, where "
            "its scale would stay what it is now. Call value_and_grad inside of that function, with a scaler that "
            "is among the function's arguments: value_and_grad(loss_fn, scaler=optimizer.scaler)(model). The body of a "
            "jax.lax.scan, too, is compiled, and kept for the next call: outside of jit put the scaler into the carry, "
            "or compile the whole step"
        )
    return present


def _is_staged(constant: Array) -> bool:
    """Return whether operations are being recorded for a function that runs later; False under eager vmap and grad."""
    # These run operations on arrays that they do not map at once; jit and the loops of jax.lax record all operations.
    return isinstance(jax.lax.neg(constant), Tracer)


def mark_as_scaled(grads: nnx.State, scaler: LossScale) -> nnx.State:
    """Return gradients whose Variables record the loss scale that was used; `used_scales` reads it."""
    # In metadata, which survive jit and jax.tree.map, unlike an attribute of the State.
    used = UsedScale(scaler.scale)
    return nnx.from_flat_state(
        [(path, grad.replace(grad.get_value(), loss_scale=used)) for path, grad in nnx.to_flat_state(grads)]
    )


def used_scales(grads: PyTree) -> list[UsedScale | None]:
    """Return the recorded loss scale of each gradient in a Variable, None without; bare arrays cannot record one."""
    leaves = jax.tree.leaves(grads, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return [leaf.get_metadata().get("loss_scale") for leaf in leaves if isinstance(leaf, nnx.Variable)]


class _Objects(nnx.Module):
    """The NNX objects among a call's arguments as one graph, since they may share Variables."""

    def __init__(self, model: nnx.Module, others: dict[Any, Any]):
        # Shared Variables are listed under the alphabetically first name.
        self.model = model
        self.others = nnx.data(others)


def _within(name: str, wrt: Any) -> Callable[..., bool]:
    inside = nnx.filterlib.to_predicate(wrt)
    return lambda path, value: path[0] == name and inside(path[1:], value)


def gradients(loss_fn: LossFn, state: TrainState, batch: PyTree, key: Array, kernels: KernelGradients) -> Gradients:
    """Return loss and gradients of one batch."""
    return _of_batch(loss_fn, state, batch, key, kernels._replace(once=False), _NO_CACHE).gradients


@dataclass(frozen=True, kw_only=True)
class Accumulation:
    """Accumulation of a step's gradients over microbatches, in a loop or in the stages of a pipeline.

    Args:
        loss_fn: loss of a microbatch.
        microbatches: number ``m`` of microbatches.
        keep_kernels: whether kernels are quantized once a step, before the first microbatch.
        kernels: computation of the kernels' gradients; devices sum them after the last microbatch if ``kernels.once``.
    """

    loss_fn: LossFn
    microbatches: int
    keep_kernels: bool
    kernels: KernelGradients


def accumulated_gradients(accumulation: Accumulation, state: TrainState, batches: PyTree, key: Array) -> Gradients:
    """Return the means of `gradients` over microbatches, from one scan; ``batches`` has leaves ``[m, b / m, ...]``.

    Means are weighted if ``accumulation.loss_fn`` returns weights.
    """
    kernels = accumulation.kernels
    model = nnx.merge(state.graphdef, state.params, state.quantizers, state.rest)
    cached = quantize_kernels(model) if accumulation.keep_kernels else _NO_CACHE
    places, full = kernels.summand_places(model, state.params), full_precision(state.params, state.masters)
    names = dict(nnx.to_flat_state(full))

    # The carry keeps its sharding over the scan, so it starts in that of the parameters.
    zeros = _wide(nnx.from_flat_state([(path, like) for path, like in names.items() if path not in places]))
    start = _Sums(
        loss=jnp.zeros((), jnp.float32),
        grads=constrain_as_created(jax.tree.map(jnp.zeros_like, zeros)),
        summands={path: place.zeros(names[path].get_value().shape) for path, place in places.items()},
        start=MicrobatchStart.first(state.quantizers, constrain_as_created(state.rest)),
    )
    sums, (stacked, weights, counts) = jax.lax.scan(
        functools.partial(_add_microbatch, accumulation, state, key, cached),
        start,
        (batches, jnp.arange(accumulation.microbatches, dtype=jnp.int32)),
    )

    def mean(total: Array) -> Array:
        return total / accumulation.microbatches if weights is None else WeightedMean(total, jnp.sum(weights)).mean

    grads = constrain_as_created(_summed_over_devices(sums, places, names, kernels.dtype))
    loss, grads = jax.tree.map(mean, (sums.loss, grads))
    return Gradients(loss, grads, merge_quantizers(stacked), sums.start.rest, counts)


class _Sums(NamedTuple):
    """Carry from microbatch to microbatch.

    Args:
        loss: fp32 ``[]``, sum of the losses.
        grads: sums of the gradients.
        summands: the same for kernels whose gradients devices sum after the last microbatch.
        start: state that the next microbatch begins with.
    """

    loss: Array
    grads: nnx.State
    summands: dict[Path, Array]
    start: MicrobatchStart


def _add_microbatch(
    accumulation: Accumulation,
    state: TrainState,
    key: Array,
    cached: KernelCache,
    sums: _Sums,
    microbatch: tuple[PyTree, Array],
) -> tuple[_Sums, tuple[PyTree, Array | None, PyTree]]:
    """Return sums with a microbatch's, its next quantizer states, its weight, and the counts that it began with.

    Args:
        accumulation: accumulation of the gradients.
        state: state of the run before the step.
        key: random key of the step.
        cached: quantized kernels.
        sums: sums so far.
        microbatch: the microbatch and its index.
    """
    batch, index = microbatch
    now = replace(state, quantizers=sums.start.quantizers(state.quantizers), rest=sums.start.rest)
    result = _of_batch(accumulation.loss_fn, now, batch, jax.random.fold_in(key, index), accumulation.kernels, cached)
    (loss, grads, quantizers, rest, _), weight = result.gradients, result.aux
    grads = grads, result.summands
    if weight is not None:
        # Not gradients of the totals, which would be so much larger that fp16 overflows sooner.
        loss, grads = jax.tree.map(lambda mean: mean * weight, (loss, grads))
    # Each gradient is added to its sum where it is computed, so that no second copy of all gradients exists.
    loss = sums.loss + loss
    total, summands = jax.tree.map(jnp.add, (sums.grads, sums.summands), grads)
    following = sums.start.following(quantizers, rest)
    return _Sums(loss, total, summands, following), (quantizers, weight, sums.start.counts)


def _summed_over_devices(
    sums: _Sums, places: dict[Path, SummandPlace], names: dict[Path, nnx.Variable], dtype: DTypeLike
) -> nnx.State:
    """Return sums of all gradients; devices add up the summands in ``places``, once for all microbatches.

    Args:
        sums: sums over the microbatches.
        places: places of summands.
        names: Variables like the gradients, by path.
        dtype: dtype of the communicated gradients.
    """
    grads = dict(nnx.to_flat_state(sums.grads))
    for path, place in places.items():
        axes = variable_axes(names[path], names[path].get_value())
        # Where Flax's own names put a kernel, `constrain_as_created` takes it.
        wanted = None if isinstance(axes, PartitionSpec) else axes[place.lead :]
        grads[path] = names[path].replace(place.total(sums.summands[path], dtype, wanted))
    return nnx.from_flat_state(grads.items())


def _of_batch(
    loss_fn: LossFn, state: TrainState, batch: PyTree, key: Array, kernels: KernelGradients, cached: KernelCache
) -> Differentiated:
    """Return gradients of a batch; ``aux`` is its weight, fp32 ``[]``, if the loss is a `WeightedMean`, or None."""

    def loss_and_weight(model: Any) -> tuple[Any, Array | None]:
        loss = loss_fn(model, batch, key)
        return loss, jnp.asarray(loss.weight, jnp.float32) if isinstance(loss, WeightedMean) else None

    differentiation = Differentiation(
        rest_of=lambda model: split_model(model).rest,
        scaler=state.scaler,
        kernels=kernels,
        cached=cached,
        like=full_precision(state.params, state.masters),
    )
    parts = SplitModel(state.graphdef, state.params, state.quantizers, state.rest)
    return differentiate(loss_and_weight, parts, differentiation)


def differentiate(
    fn: Callable[..., tuple[Array | WeightedMean, Any]],
    parts: SplitModel,
    differentiation: Differentiation,
    inputs: tuple[Array, ...] = (),
) -> Differentiated:
    """Return loss and gradients of ``fn(model, *inputs) -> loss, aux``.

    Args:
        fn: function, which may change the model's other state.
        parts: parts of the model.
        differentiation: loss scale, and treatment of kernels.
        inputs: other arrays to differentiate by.
    """
    graphdef, params, quantizers, rest = parts
    plain, quantized = split_parameters(params)
    names = dict(nnx.to_flat_state(params if differentiation.like is None else differentiation.like))
    model = nnx.merge(graphdef, params, quantizers, rest)
    grad_sinks, places = (
        differentiation.kernels.sinks(model, params),
        differentiation.kernels.summand_places(model, params),
    )

    def scaled_loss(plain: PyTree, grad_sinks: PyTree, quantizers: PyTree, inputs: PyTree) -> tuple[Array, Any]:
        model = nnx.merge(graphdef, nnx.merge_state(plain, quantized), quantizers, rest, copy=True)
        # These belong to this pass: they must not be part of the returned model's other state.
        cached = differentiation.cached
        kept = contextlib.nullcontext() if cached is None else cached_kernels(model, cached)
        losses = aux_losses_scaled(model, differentiation.scaler.scale)
        with kept, with_grad_sinks(model, grad_sinks), losses, layers_traced_once(), states_advance():
            value, aux = fn(model, *inputs)
        _check_differentiable(value)
        loss = mean_loss(value)
        return differentiation.scaler.scale_loss(loss), (loss, differentiation.rest_of(model), aux)

    # allow_int: the dtype of with_max_gradients is not an ordinary float.
    differentiated = jax.grad(scaled_loss, argnums=(0, 1, 2, 3), has_aux=True, allow_int=True)
    (grads, sink_grads, quantizers, input_grads), (loss, rest, aux) = differentiated(
        plain, grad_sinks, with_max_gradients(quantizers), inputs
    )

    def as_created(grads: dict[Path, Array]) -> dict[Path, Array]:
        # Before the cast: between an all-reduce and a slice of it a cast would keep XLA from a reduce-scatter.
        variables = constrain_as_created(
            nnx.from_flat_state([(path, names[path].replace(grads[path])) for path in grads])
        )
        return _arrays(_wide(variables))

    total, summands = _with_sinks(_arrays(grads), sink_grads, places, as_created)
    grads = nnx.from_flat_state([(path, names[path].replace(grad)) for path, grad in total.items()])
    gradients = Gradients(loss, grads, as_float32(quantizers), constrain_as_created(rest))
    return Differentiated(gradients, summands, input_grads, aux)


def _arrays(grads: nnx.State) -> dict[Path, Array]:
    return {path: grad.get_value() for path, grad in nnx.to_flat_state(grads)}


def _with_sinks(
    own: dict[Path, Array],
    sinks: dict[Path, Array | None],
    places: Mapping[Path, SummandPlace],
    prepare: Callable[[dict[Path, Array]], dict[Path, Array]],
) -> tuple[dict[Path, Array], dict[Path, Array]]:
    """Return fp32 gradients, and summands of the kernels in ``places``: of each kernel its sink's and its own, added.

    The own gradient of a kernel is zero, unless the model also uses the kernel outside of its layer.

    Args:
        own: gradients of the parameters.
        sinks: gradients of the sinks; None where a kernel has no sink.
        places: places of summands.
        prepare: function that returns gradients in fp32, in their sharding.
    """
    of_sinks = {path: grad for path, grad in sinks.items() if grad is not None}
    summands = {path: place.with_sum(of_sinks.pop(path), own.get(path)) for path, place in places.items()}
    total = prepare({path: grad for path, grad in own.items() if path not in places})
    for path, grad in prepare(of_sinks).items():
        total[path] = total[path] + grad if path in total else grad
    return total, summands


def vjp_of_model(
    fn: Callable[..., Array], model: nnx.Module, x: PyTree, kernels: KernelGradients
) -> tuple[Array, Partial]:
    """Return ``fn(model, x)`` and its backward pass.

    Args:
        fn: differentiable function. It gets a copy of the model.
        model: model, which may have cached kernels, and kernels that are stored quantized.
        x: pytree of arrays.
        kernels: see `Differentiation`.

    Returns:
        ``(y, backward)``. ``backward(dy)`` gives an ``nnx.State`` of the parameters' gradients, in fp32 (of those
        kernels that ``kernels.summand_places`` gives, their summands), the next quantizer states and the gradient of
        ``x``. It is a pytree of its residuals, like `deferred_vjp`'s.
    """
    graphdef, params, quantizers, rest = split_model(model)
    plain, quantized = split_parameters(params)
    grad_sinks = kernels.sinks(model, params)

    def run(plain: PyTree, grad_sinks: PyTree, quantizers: PyTree, x: PyTree) -> Array:
        used = nnx.merge(graphdef, nnx.merge_state(plain, quantized), quantizers, rest, copy=True)
        set_grad_sinks(used, grad_sinks)
        with states_advance():
            return fn(used, x)

    y, vjp = jax.vjp(run, plain, grad_sinks, with_max_gradients(quantizers), x)
    return y, Partial(_Backward(tuple(kernels.summand_places(model, params).items())), vjp)


# No closure: the function of a Partial is part of its tree structure.
@dataclass(frozen=True)
class _Backward:
    places: tuple[tuple[Path, SummandPlace], ...]

    def __call__(self, vjp: Any, dy: Array) -> tuple[nnx.State, nnx.State, PyTree]:
        grads, sink_grads, quantizers, dx = vjp(dy)
        total, summands = _with_sinks(_arrays(grads), sink_grads, dict(self.places), _wide)
        state = nnx.from_flat_state([(path, nnx.Param(grad)) for path, grad in (total | summands).items()])
        return state, as_float32(quantizers), dx


def split_parameters(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Return the parameters that are plain arrays, and those that are stored quantized.

    Raises:
        TypeError: for complex parameters: gradients and masters are fp32.
    """
    plain, quantized = [], []
    for path, variable in nnx.to_flat_state(params):
        if jnp.issubdtype(variable.dtype, jnp.complexfloating):
            name = "/".join(map(str, path))
            raise TypeError(
                f"parameter {name} is {variable.dtype}, and gradients are fp32, without an imaginary part; keep its "
                "real and its imaginary part as two parameters, or differentiate by flax.nnx.value_and_grad"
            )
        (quantized if isinstance(variable.get_value(), QuantizedKernel) else plain).append((path, variable))
    return nnx.from_flat_state(plain), nnx.from_flat_state(quantized)


def constrain_as_created(tree: PyTree) -> PyTree:
    """Return ``tree`` with every leaf in the sharding that it was created with."""
    # Otherwise the compiler chooses, a step could not take over (donate) its state's buffers, and the next step, with
    # other shardings, would be compiled again.
    mesh, leaves = current_mesh(), []
    known = set() if mesh is None else set(mesh.axis_names)
    for _, leaf, axes in leaves_with_axes(tree):
        # Flax's own names, outside of the rules that assigned mesh axes: the compiler propagates Flax's placement.
        unknown = isinstance(axes, PartitionSpec) and not known.issuperset(jax.tree.leaves(tuple(axes)))
        leaves.append(leaf if unknown else constrain(leaf, axes))
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


_NO_AUX = (
    "it has no auxiliary output: make_train_step keeps what loss_fn assigns to a Variable that the model's constructor "
    "makes, in state.model (not in a pipeline), and a step of your own with "
    "jax_te.value_and_grad(loss_fn, has_aux=True) returns any value"
)


def mean_loss(loss: Any) -> Array:
    """Return the result of a `LossFn` as fp32 ``[]``.

    Raises:
        TypeError: if it is neither an array nor a `WeightedMean`.
        ValueError: if it is not a scalar.
    """
    _check_is_loss(loss, _NO_AUX)
    mean = loss.mean if isinstance(loss, WeightedMean) else loss
    if jnp.shape(mean) != ():
        raise ValueError(f"loss_fn must give a scalar, the mean loss of its batch, got shape {jnp.shape(mean)}")
    return jnp.asarray(mean, jnp.float32)


def _check_is_loss(loss: Any, remedy: str) -> None:
    """Raise TypeError for a result of a loss function that is neither an array nor a `WeightedMean`.

    Args:
        loss: result.
        remedy: what to do with a second value, for results of several values.
    """
    total = loss.total if isinstance(loss, WeightedMean) else loss
    # A number of Python is none either, as in flax.nnx.value_and_grad: no gradient passes through it.
    if not has_shape_and_dtype(total):
        several = isinstance(total, tuple | list | Mapping)
        raise TypeError(
            "loss_fn must return a scalar array or a WeightedMean, got "
            f"{'' if total is loss else 'a WeightedMean whose total is of type '}{type(total).__name__}"
            f"{f'; {remedy}' if several else ''}"
        )


def _check_differentiable(loss: Any) -> None:
    """Raise TypeError for a loss that is not an array, or of integers, whose gradients would all be zeros."""
    _check_is_loss(loss, _NO_AUX)
    dtype = jnp.result_type(loss.total if isinstance(loss, WeightedMean) else loss)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"loss_fn must give a loss of floating-point numbers to differentiate, got {dtype}")


def _wide(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
