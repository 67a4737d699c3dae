"""`value_and_grad`: loss and gradients in a loop of the user's own, and the model's next quantizer states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from jax_te._validation import checked, has_shape_and_dtype
from jax_te.quantize import QuantizerState, write_back
from jax_te.remat import StaticChanges, Watched
from jax_te.training.differentiation import Differentiation, Gradients, differentiate
from jax_te.training.kernel_gradients import KernelGradients, Path
from jax_te.training.loss import WeightedMean, check_is_loss
from jax_te.training.loss_scale import ConstantLossScale, LossScale
from jax_te.training.masters import select
from jax_te.training.outcome import gradients_or_nan, loss_or_nan, outcome_of
from jax_te.training.state import SplitModel
from jax_te.training.used_scale import mark_as_scaled
from jax_te.typing import Array, PyTree, Words

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
            check_is_loss(value, "to pass on a second value, return the pair (loss, aux) and give has_aux=True")
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


class _Objects(nnx.Module):
    """The NNX objects among a call's arguments as one graph, since they may share Variables."""

    def __init__(self, model: nnx.Module, others: dict[Any, Any]):
        # Shared Variables are listed under the alphabetically first name.
        self.model = model
        self.others = nnx.data(others)


def _within(name: str, wrt: Any) -> Callable[..., bool]:
    inside = nnx.filterlib.to_predicate(wrt)
    return lambda path, value: path[0] == name and inside(path[1:], value)


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


def _is_object(node: Any) -> bool:
    return isinstance(node, nnx.Pytree | nnx.Variable)


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
    check_is_loss(loss, "with has_aux=True it is the first of a pair (loss, aux)")
    return loss, aux


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
