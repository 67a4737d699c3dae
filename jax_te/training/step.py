"""The train step: microbatches, quantizer state, loss scaling, fp32 masters, skipped steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jax_te._validation import check_positive, checked, float_dtype
from jax_te.config import PipelineConfig
from jax_te.layers import aux_losses_scaled, step_metrics
from jax_te.models import layers_traced_once, multi_token_metrics
from jax_te.quantize import frozen_scales, write_back
from jax_te.sharding import mark_varying, use_rules, varying_axes
from jax_te.training.accumulation import Accumulation, accumulated_gradients, gradients
from jax_te.training.global_batch import require_global_batches
from jax_te.training.kernel_gradients import KernelGradients
from jax_te.training.loss import LossFn, WeightedMean, mean_loss
from jax_te.training.masters import adopt_changed_params, apply_update, full_precision, select
from jax_te.training.microbatches import MicrobatchStart, rules_of, shard_batch
from jax_te.training.outcome import Outcome, outcome_of
from jax_te.training.pipeline.gradients import pipelined_gradients
from jax_te.training.pipeline.mesh import pipeline_stages, stage_rules
from jax_te.training.state import TrainState, constrain_as_created, split_model
from jax_te.training.state_arrays import jit_state
from jax_te.training.transformation import Transformation, apply_transformation, as_transformation, check_opt_state
from jax_te.typing import Array, DTypeLike, PyTree

_PIPELINE = PipelineConfig()


@checked
def make_train_step(
    loss_fn: LossFn,
    tx: Transformation,
    *,
    microbatches: int = 1,
    keep_kernels: bool = True,
    wgrad_dtype: DTypeLike = jnp.float32,
    reduce_gradients: Literal["microbatch", "step"] = "microbatch",
    pipeline: PipelineConfig = _PIPELINE,
) -> Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Array]]]:
    """Return a jitted ``step(state, batch) -> (state, metrics)`` that donates the state's buffers.

    Call the step inside ``with autocast(recipe):``; under another recipe it is traced again.

    - The batch is split into ``microbatches`` along its leading axis, in order; one ``lax.scan`` sums their gradients
      in fp32. Microbatch ``i`` gets the key ``fold_in(fold_in(state.rng, state.step), i)``.
    - All microbatches start from the same quantizer state; their next states merge by maximum (`merge_quantizers`).
      Quantizer state is in no norm, and ``tx`` never sees it.
    - Counts of experts' routers are summed over the microbatches, and their states are updated once (`Counting`).
    - ``tx`` updates the fp32 masters, of which half-precision parameters are the rounded copies, and the other
      parameters directly.
    - If the loss, the norm of the gradients or an amax of a tensor that was quantized is not finite, only ``step``,
      ``skipped_steps`` and the scaler change, and ``tx`` does not run. The norm is not finite if an element is not, or
      if the sum of the squares overflows fp32. If an amax is not, the loss is nan.

    Args:
        loss_fn: ``(model, batch, key) -> [ ]``, the mean loss over its batch, or a `WeightedMean`. The loss
            of several microbatches is the mean of their means: where they differ in the number of tokens that count,
            a token counts for more in one that has fewer. With a `WeightedMean` it is the mean over all of their
            tokens. It has no auxiliary output. Its changes of other state of the model persist: what it assigns to a
            Variable that the model's constructor makes is in the new ``state.model``, of the last microbatch. A
            pipeline refuses such Variables.
        tx: the transformation that the state was created with. It gets what it asks for: ``value`` (the step's loss),
            ``grad``, and ``value_fn`` (the loss of the same batch at other fp32 parameters, by the scales and counts of
            now), also as ``obj_fn``; ``grad_fn(params, index)`` is its gradient.
        microbatches: number of microbatches, >= 1.
        keep_kernels: whether to quantize each kernel once a step and cache it for all microbatches. False: quantize it
            in each of them, which takes longer and saves the memory of one quantized copy of all kernels; the values
            are the same.
        wgrad_dtype: dtype in which devices sum kernel gradients; fp32 or bf16. bf16 halves the communicated bytes and
            rounds each microbatch's gradient; microbatches are accumulated in fp32 either way. Gradients of other
            parameters, a model's own head among them, have the parameter's dtype.
        reduce_gradients: time at which devices that hold the same shard of a layer's kernel, along the data and context
            axes, sum its gradient: ``"microbatch"``, in each microbatch; ``"step"``, once after the last one. The
            second communicates less where devices run the layers' GEMMs by themselves; each device then holds the fp32
            sum of its own microbatches, which with a distributed optimizer, and of stacked fp32 kernels, takes more
            memory. Three exceptions under ``"step"``:

            - Along the FSDP axis gradients are still reduce-scattered in each microbatch.
            - With a bf16 ``wgrad_dtype``, kernels that this axis shards are summed in each microbatch over all axes.
            - A loss that sets sharding rules, or runs the model inside a ``shard_map`` of its own, needs
              ``"microbatch"``.

        pipeline: schedule and split of the model's layers on a mesh with a ``pipeline`` axis; no other mesh has stages.

    Returns:
        The step. Its ``batch`` is a pytree of arrays ``[b, ...]``; on a mesh each microbatch is sharded over the
        logical axis ``batch``. In several processes its arrays are global, see `global_batch`. Its ``metrics`` are fp32
        ``[]``: ``loss`` (mean), ``grad_norm`` (of the unscaled mean gradient, before clipping), ``skipped`` (0 or 1),
        ``loss_scale`` (the one that this step used); of a model with experts also those of
        `jax_te.layers.expert_metrics` over all layers, as ``experts/dropped_share``, and the tokens of each expert of
        each layer, ``experts/<path of the router>/tokens_per_expert [e]``; those of each layer by itself where its
        options have ``per_layer_logging``; with ``mtp_num_layers`` those of `jax_te.models.multi_token_metrics`.
        Flax's Variables of the new state are made when they are first read; those of a subclass of `TrainState` in each
        call, which takes longer. ``step.lower(state, batch)`` shows the program of a call, which the call compiles for
        itself, unless JAX caches programs (`keep_compiled_programs`).

    Raises:
        TypeError: when called, for a loss that is not an array, such as a pair of a loss and another value.
        ValueError: when called, for a batch whose leaves differ in ``b``, or a ``b`` that does not divide into
            microbatches and over the mesh's batch axes, or a loss that is not a scalar, or a state that was created
            with another ``tx``; on a mesh of several processes, for arrays that are not global.

    Source: ``megatron.core.pipeline_parallel.forward_backward_no_pipelining``,
        ``Float16OptimizerWithFloat16Params.step`` and, of ``wgrad_dtype``, ``grad_reduce_in_fp32`` of
        ``DistributedDataParallelConfig``.

    >>> from jax_te.training.state import create_train_state
    >>> tx = optax.sgd(0.1)
    >>> state = create_train_state(lambda rngs: nnx.Linear(2, 1, rngs=rngs), tx, key=jax.random.key(0))
    >>> step = make_train_step(lambda model, batch, key: jnp.mean(model(batch) ** 2), tx, microbatches=2)
    >>> state, metrics = step(state, jnp.ones((4, 2)))
    >>> int(state.step), sorted(metrics)
    (1, ['grad_norm', 'loss', 'loss_scale', 'skipped'])
    """
    check_positive(microbatches=microbatches)
    if (wgrad_dtype := float_dtype("wgrad_dtype", wgrad_dtype)) == jnp.float16:
        raise ValueError("wgrad_dtype=float16 overflows where devices add up gradients; take float32 or bfloat16")
    kernels = KernelGradients(wgrad_dtype, once=reduce_gradients == "step")
    accumulation = Accumulation(loss_fn=loss_fn, microbatches=microbatches, keep_kernels=keep_kernels, kernels=kernels)
    transformation = as_transformation(tx)

    @jit_state
    def train_step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(state.rng, state.step)
        if pipeline_stages() > 1:
            with use_rules(stage_rules()):
                batches = shard_batch(batch, microbatches)
            result = pipelined_gradients(accumulation, state, batches, key, pipeline)
        # A scan over one microbatch would hold fp32 sums in addition to its gradients.
        elif microbatches == 1:
            batches = shard_batch(batch)
            result = gradients(loss_fn, state, batches, jax.random.fold_in(key, 0), kernels)
        else:
            batches = shard_batch(batch, microbatches)
            result = accumulated_gradients(accumulation, state, batches, key)
        grads = state.scaler.unscale(result.grads)
        outcome = outcome_of(result.loss, grads, result.quantizers)
        finite = outcome.finite
        # Before the update, which quantizes parameters with these states. Amaxes of a skipped step may be inf or nan.
        next_quantizers = write_back(state.quantizers, result.quantizers, keep_old=~finite)
        loss_at = _LossAt(
            quantizers=state.quantizers,
            rest=state.rest,
            counts=result.counts,
            batches=batches,
            scale=state.scaler.scale,
            key=key,
            graphdef=state.graphdef,
            loss_fn=loss_fn,
            microbatches=microbatches,
        )
        asked_for = _asked_for(outcome.loss, grads, loss_at)
        # The model before the update, with its next states.
        model = nnx.merge(state.graphdef, state.params, next_quantizers, state.rest)
        updates = _apply(transformation, state, finite, model, grads, asked_for)
        metrics = _metrics(state, outcome, model)
        state = dataclasses.replace(
            state,
            params=updates.params,
            masters=updates.masters,
            opt_state=updates.opt_state,
            rest=select(finite, result.rest, state.rest),
            step=state.step + 1,
            quantizers=next_quantizers,
            scaler=state.scaler.update(finite),
            skipped_steps=state.skipped_steps + (~finite).astype(jnp.int32),
        )
        return constrain_as_created(state), metrics

    return require_global_batches(train_step)


@checked
def make_eval_step(loss_fn: LossFn) -> Callable[[TrainState, PyTree], Array]:
    """Return a jitted ``eval_step(state, batch) -> loss``, fp32 ``[]``, which does not change the state.

    The model is set to ``eval()`` and ``loss_fn`` gets the key None: no dropout. Call it inside of the recipe's
    context, like the train step.

    Args:
        loss_fn: see `make_train_step`.

    Raises:
        TypeError: when called, for a loss that is not an array.
        ValueError: when called, for a batch whose leaves differ in ``b``, or a ``b`` that does not divide over the
            mesh's batch axes, or a loss that is not a scalar; on a mesh of several processes, for arrays that are not
            global.

    >>> from jax_te.training.state import create_train_state
    >>> state = create_train_state(lambda rngs: nnx.Linear(2, 1, rngs=rngs), optax.sgd(0.1), key=jax.random.key(0))
    >>> make_eval_step(lambda model, batch, key: jnp.sum(0.0 * model(batch)))(state, jnp.ones((4, 2))).item()
    0.0
    """

    @jax.jit
    def eval_step(state: TrainState, batch: PyTree) -> Array:
        model = state.model
        model.eval()
        with use_rules(rules_of(batch)), layers_traced_once():
            return mean_loss(loss_fn(model, shard_batch(batch), None))

    return require_global_batches(eval_step)


def _metrics(state: TrainState, outcome: Outcome, model: nnx.Module) -> dict[str, Array]:
    """Return a step's metrics: its own, and those that the model's layers have counted in it, in its new states."""
    own = {
        "loss": outcome.loss,
        "grad_norm": outcome.norm,
        "skipped": 1.0 - outcome.finite.astype(jnp.float32),
        "loss_scale": jnp.asarray(state.scaler.scale, jnp.float32),
    }
    return _with_metrics(_with_metrics(own, step_metrics(model)), multi_token_metrics(model))


def _with_metrics(metrics: dict[str, Array], more: dict[str, Array]) -> dict[str, Array]:
    """Return all metrics; raises if two have one name, of which a loop would see the second alone."""
    twice = sorted(metrics.keys() & more.keys())
    if twice:
        raise ValueError(f"two metrics of a train step have the name {twice[0]!r}; the model's layers must use another")
    return metrics | more


def _asked_for(loss: Array, grads: PyTree, loss_at: _LossAt) -> dict[str, Any]:
    """Return what a transformation may ask for beside the gradients."""
    return {
        "value": loss,
        "grad": grads,
        "value_fn": loss_at,
        # Other names for the same, in optax.contrib's Sophia and SAM.
        "obj_fn": loss_at,
        "grad_fn": lambda params, index: loss_at.grad(params, index),
    }


class _Updated(NamedTuple):
    """The parts of a state that a transformation changes."""

    params: nnx.State
    masters: Any
    opt_state: Any


def _apply(
    tx: optax.GradientTransformationExtraArgs,
    state: TrainState,
    finite: Array,
    model: nnx.Module,
    grads: PyTree,
    asked_for: dict[str, Any],
) -> _Updated:
    """Return parameters, masters and optimizer state after an update, or the present ones if gradients are not finite.

    ``model`` has the next quantizer states, which quantize the parameters that are stored quantized.
    """
    before = _Updated(state.params, state.masters, state.opt_state)
    # In a shard_map of the user's both branches must vary along the same axes.
    varying = varying_axes((finite, before))

    def update() -> _Updated:
        full = full_precision(before.params, adopt_changed_params(before.params, before.masters))
        check_opt_state(tx, before.opt_state, full)
        new, opt_state, _ = apply_transformation(tx, grads, before.opt_state, full, **asked_for)
        params, masters = apply_update(None, new, before.params, before.masters, model)
        return mark_varying(constrain_as_created(_Updated(params, masters, opt_state)), varying)

    def keep() -> _Updated:
        return mark_varying(constrain_as_created(before), varying)

    # A selection between each new and old array would take XLA longer to compile: it looks for operations to fuse in
    # each branch by itself, and its time for that grows faster than the number of operations.
    return jax.lax.cond(finite, update, keep)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _LossAt:
    """A step's loss as a function of fp32 parameters, for transformations that need it; it changes no state.

    Its microbatches begin like the step's: each with the other state that the one before it leaves.

    A pytree of its arrays, which on Explicit axes cannot be a function's own.
    """

    quantizers: PyTree
    rest: PyTree
    counts: PyTree
    batches: PyTree
    scale: PyTree
    key: PyTree  # a key; JAX also fills the fields with other objects, which run-time checks would refuse
    graphdef: nnx.GraphDef[Any] = field(metadata={"static": True})
    loss_fn: LossFn = field(metadata={"static": True})
    microbatches: int = field(metadata={"static": True})

    @property
    def factor(self) -> Any:
        """Factor by which the step multiplies a microbatch's loss to differentiate it: its share times the loss scale.

        The frozen scales of delayed scaling are for such gradients, and fp16 would lose others.
        """
        return self.scale / self.microbatches

    # Line searches pass on the other arguments, and refuse those that the function does not name.
    def __call__(self, params: PyTree, obj_fn: Any = None, grad_fn: Any = None) -> Array:
        del obj_fn, grad_fn
        if pipeline_stages() > 1:
            raise ValueError(
                "this transformation computes losses of its own, such as a line search (value_fn), and a pipeline's "
                "stages give a step's own gradients alone: take another one, or a mesh without a pipeline axis"
            )

        if self.microbatches == 1:
            start = MicrobatchStart.first(self.quantizers, self.rest)
            return _loss_of_microbatch(params, self, start, self.batches, 0).mean

        def run(rest: PyTree, microbatch: tuple[PyTree, PyTree, Array]) -> tuple[PyTree, tuple[Array, Array]]:
            counts, batch, index = microbatch
            loss = _loss_of_microbatch(params, self, MicrobatchStart(rest, counts), batch, index)
            return loss.rest, (loss.mean * loss.weight, loss.weight)

        numbers = jnp.arange(self.microbatches, dtype=jnp.int32)
        _, (totals, weights) = jax.lax.scan(run, constrain_as_created(self.rest), (self.counts, self.batches, numbers))
        return WeightedMean(jnp.sum(totals), jnp.sum(weights)).mean

    def grad(self, params: PyTree, index: int) -> PyTree:
        """Return the gradient at ``params``, the same for every ``index`` of an inner step."""
        del index
        return jax.grad(self)(params)


class _MicrobatchLoss(NamedTuple):
    """Loss of a microbatch: its mean and its weight, fp32 ``[]``, and the model's other state behind it."""

    mean: Array
    weight: Array
    rest: PyTree


# A step differentiates each microbatch's mean by itself, and weights the gradient. With a derivative of the weighted
# sum the losses that layers add to gradients, as those of experts' routers, would have no weight; and gradients would
# pass from a microbatch to the one before it, through the other state.
@jax.custom_vjp
def _loss_of_microbatch(
    params: PyTree, loss_at: _LossAt, start: MicrobatchStart, batch: PyTree, index: int | Array
) -> _MicrobatchLoss:
    """Return the loss of a microbatch, whose derivative is that of its mean alone."""
    with frozen_scales():
        quantizers = start.quantizers(loss_at.quantizers)
        model = nnx.merge(loss_at.graphdef, params, quantizers, start.rest, copy=True)
        with aux_losses_scaled(model, loss_at.factor):
            loss = loss_at.loss_fn(model, batch, jax.random.fold_in(loss_at.key, index))
    weight = jnp.asarray(loss.weight, jnp.float32) if isinstance(loss, WeightedMean) else jnp.ones(())
    return _MicrobatchLoss(mean_loss(loss), weight, constrain_as_created(split_model(model).rest))


def _loss_fwd(params: PyTree, *others: Any) -> tuple[_MicrobatchLoss, Any]:
    def mean(params: PyTree) -> tuple[Array, _MicrobatchLoss]:
        loss = _loss_of_microbatch.fun(params, *others)
        return loss.mean, loss

    _, vjp, loss = jax.vjp(mean, params, has_aux=True)
    return loss, (vjp, jnp.asarray(others[0].factor, jnp.float32))


def _loss_bwd(residuals: Any, cotangent: _MicrobatchLoss) -> tuple[PyTree, None, None, None, None]:
    vjp, factor = residuals
    (grads,) = vjp(factor)
    rest = cotangent.mean / factor
    return jax.tree.map(lambda grad: grad * rest.astype(grad.dtype), grads), None, None, None, None


_loss_of_microbatch.defvjp(_loss_fwd, _loss_bwd)
