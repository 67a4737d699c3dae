"""Loss and gradients of a batch whose microbatches pass through the stages of a pipeline."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jax_te.config import PipelineConfig
from jax_te.layers import has_aux_loss_scale
from jax_te.models import StackOptions
from jax_te.quantize import counts_within_step, has_counts, merge_quantizers
from jax_te.sharding import auto_region, current_mesh, leaves_with_axes, use_rules
from jax_te.training.accumulation import Accumulation, means_of_microbatches
from jax_te.training.differentiation import Gradients, split_parameters
from jax_te.training.loss import WeightedMean, mean_loss
from jax_te.training.loss_scale import LossScale
from jax_te.training.masters import cast_like_full_precision
from jax_te.training.pipeline.around import AroundLayers
from jax_te.training.pipeline.cut import Cut, Flat, as_state, cut_model
from jax_te.training.pipeline.layers import StageLayers
from jax_te.training.pipeline.loss import PipelinedLoss, StackArrays, arrays_of, in_parts, without_gradient
from jax_te.training.pipeline.mesh import PIPELINE_AXIS, pipeline_stages, stage_rules
from jax_te.training.pipeline.program import Program
from jax_te.training.pipeline.schedule import Schedule, make_schedule
from jax_te.training.pipeline.stage import Row, Stage, schedule_rows
from jax_te.training.pipeline.sums import StageSums
from jax_te.training.state import TrainState, constrain_as_created
from jax_te.typing import Array, PyTree


def pipelined_gradients(
    accumulation: Accumulation, state: TrainState, batches: PyTree, key: Array, config: PipelineConfig
) -> Gradients:
    """Return the results of `accumulated_gradients`, from the stages of a pipeline.

    Outside of this function arrays are sharded as usual, with the pipeline axis as an additional ``fsdp`` axis. Here
    the layers' parameters are stacked, and one all-to-all gives each stage those of its own layers; another one brings
    their gradients back. Embedding and head are all-gathered along the axis, and run on the stages that need them.

    Args:
        accumulation: accumulation of the gradients; its ``loss_fn`` is a `PipelinedLoss`.
        state: state of the run.
        batches: batches with leaves ``[m, b / m, ...]``.
        key: random key of the step.
        config: schedule and split.

    Raises:
        TypeError: for another ``accumulation.loss_fn``.
        ValueError: for layers that differ between stages, or share parameters; for a model with state other than
            parameters and quantizers; for a loss that reads parameters of layers itself, or whose weight depends on the
            layers' output.
    """
    loss, stages = in_parts(accumulation.loss_fn), pipeline_stages()
    check_pipelined(state, config)
    cut = cut_model(state, loss.layers, stages, config)
    # As in a stage: a microbatch need not divide over the pipeline axis.
    with use_rules(stage_rules()):
        inputs, options, weighted = _trace_parts(loss, state, jax.tree.map(lambda leaf: leaf[0], batches), key, cut)
    if config.schedule == "zero_bubble" and options.batch_parts > 1:
        raise ValueError(
            "zero_bubble defers the gradients of layers that are called once, and "
            f"batch_parts={options.batch_parts} calls each once for each part of a microbatch; take the schedule "
            "'1f1b', or batch_parts=1"
        )
    schedule = make_schedule(
        config.schedule, stages=stages, microbatches=accumulation.microbatches, virtual_stages=config.virtual_stages
    )
    variables = dict(nnx.to_flat_state(nnx.merge_state(state.params, state.quantizers)))
    program = Program(
        loss=loss,
        accumulation=accumulation,
        schedule=schedule,
        graphdef=state.graphdef,
        cut=cut,
        layers=jax.tree.map(_shape, cut.split(variables)[0]),
        scaler=state.scaler,
        inputs=inputs,
        options=options,
        weighted=weighted,
    )

    # The scaler is an argument, although the program has it: a function with manual axes may not close over an array
    # that has a sharding over Explicit ones.
    def on_stage(
        scaler: LossScale, stacked: list[Flat], outer: list[Flat], batches: PyTree, key: Array, rows: Row
    ) -> StageSums:
        here = program._replace(scaler=scaler)
        layers = StageLayers(here, *jax.tree.map(lambda leaf: leaf[0], stacked))
        params, states = outer
        stage = Stage(here, layers, AroundLayers(here, params, states, batches, key))
        return jax.tree.map(lambda leaf: leaf[None], stage.run(jax.tree.map(lambda row: row[:, 0], rows)))

    everywhere, per_stage = PartitionSpec(), PartitionSpec(PIPELINE_AXIS)
    on_stages = jax.shard_map(
        on_stage,
        in_specs=(everywhere, per_stage, everywhere, everywhere, everywhere, PartitionSpec(None, PIPELINE_AXIS)),
        out_specs=per_stage,
        axis_names=_manual_axes(),
        check_vma=False,
    )

    def run(scaler: LossScale, params: nnx.State, quantizers: nnx.State, batches: PyTree, key: Array) -> list[Array]:
        parts = [cut.split(dict(nnx.to_flat_state(part))) for part in (params, quantizers)]
        stacked, outer = [cut.stacked(layers) for layers, _ in parts], [others for _, others in parts]
        sums = on_stages(scaler, stacked, outer, batches, key, schedule_rows(schedule))
        return jax.tree.leaves(_model_results(cut, schedule, weighted, sums))

    like = _result_shapes(state)
    leaves = auto_region(run, [axes for _, _, axes in leaves_with_axes(like)])(
        state.scaler, state.params, state.quantizers, batches, key
    )
    loss, grads, quantizers = jax.tree.unflatten(jax.tree.structure(like), leaves)
    grads = cast_like_full_precision(as_state(grads), state.params, state.masters)
    return Gradients(loss, constrain_as_created(grads), as_state(quantizers), state.rest)


def _manual_axes() -> set[str]:
    """Return the mesh axes that are manual in a stage.

    Axes that shard a stage's arrays are left to the compiler, or to the ops' own shard_map. Those of size 1 are manual,
    so that where nothing else is split a stage is one device's program, without a shard_map for each op.
    """
    mesh = current_mesh()
    return {PIPELINE_AXIS, *[name for name, size in (mesh.shape.items() if mesh is not None else ()) if size == 1]}


def check_pipelined(state: TrainState, config: PipelineConfig) -> None:
    """Raise ValueError for a state, or a schedule on the mesh in use, that a pipeline does not support. A mesh without
    stages supports all."""
    if pipeline_stages() == 1:
        return
    _check_aux_loss_scale(state.model)
    if jax.tree.leaves(state.rest):
        names = ", ".join("/".join(map(str, path)) for path, _ in nnx.to_flat_state(state.rest))
        raise ValueError(
            f"a pipeline's stages have parameters and quantizer state alone, and the model has other state: {names}; "
            "build it without, or take a mesh without a pipeline axis"
        )
    if counts_within_step(state.quantizers):
        raise ValueError(
            "the loss global_aux_loss of a router reads the counts of a step's earlier microbatches, and a pipeline's "
            "stages run the next one before these are counted; take aux_loss or seq_aux_loss, or a mesh without a "
            "pipeline axis"
        )
    if config.schedule == "zero_bubble":
        _check_no_exchange_among_all(state)


def _check_no_exchange_among_all(state: TrainState) -> None:
    """Raise ValueError where a pass may hold an exchange that waits for all devices, and not for those of its stage.

    A collective-permute does: a ring along the context axis, and what the compiler inserts where heads or features of a
    split array move between devices. Which shapes need one is the compiler's choice.
    """
    mesh = current_mesh()
    sizes = {} if mesh is None else {name: size for name, size in mesh.shape.items() if size > 1}
    axes = [name for name in ("tensor", "context") if name in sizes]
    what = "split activations may be exchanged among all devices of the mesh"
    if not axes and has_counts(state.quantizers):
        axes = [name for name in sizes if name != PIPELINE_AXIS]
        what = "the compiler may let a router's choice of experts communicate among all devices of the mesh"
    if axes:
        raise ValueError(
            f"zero_bubble runs different passes on different stages at a time, and {what}, here along "
            f"{', '.join(axes)}, which would wait without end; take the schedule '1f1b', or a mesh without "
            f"{'this axis' if len(axes) == 1 else 'these axes'}"
        )


def _check_aux_loss_scale(model: nnx.Module) -> None:
    """Raise ValueError for a factor of routers' losses, of which the stages' layers do not know."""
    if has_aux_loss_scale(model):
        raise ValueError(
            "set_aux_loss_scale gave the model's routers a factor, and a pipeline's stages multiply their losses by "
            "the loss scale and 1 / microbatches, by themselves: call set_aux_loss_scale(model, None), and multiply "
            "the losses' coefficients (aux_loss_coeff, z_loss_coeff) in its place, or take a mesh without a pipeline "
            "axis"
        )


def _trace_parts(
    loss: PipelinedLoss, state: TrainState, batch: PyTree, key: Array, cut: Cut
) -> tuple[StackArrays, StackOptions, bool]:
    """Return shapes of the layers' arguments, their execution, and whether the loss is a `WeightedMean`.

    Raises:
        ValueError: for parts that read parameters of the layers.
    """
    flat = dict(nnx.to_flat_state(state.params))
    plain, _ = split_parameters(as_state(cut.split(flat)[0]))
    traced: Any = None

    def parts(layers: nnx.State, others: Flat, quantizers: nnx.State, batch: PyTree, key: Array) -> Any:
        nonlocal traced
        params = as_state(others | dict(nnx.to_flat_state(layers)))
        model = nnx.merge(state.graphdef, params, quantizers, state.rest)
        stack = loss.embed_inputs(model, batch, key)
        value = loss.compute_loss(model, stack.x, batch, key)
        # No arrays, so they cannot be results of eval_shape: set while the parts are traced.
        traced = stack.options, isinstance(value, WeightedMean)
        _check_aux_loss_scale(model)  # that the parts may have set, of this copy alone
        inputs = arrays_of(stack)
        return inputs, without_gradient((inputs, mean_loss(value)), _READS_LAYERS)

    def differentiated(layers: nnx.State, *args: Any) -> StackArrays:
        return jax.vjp(lambda layers: parts(layers, *args), layers)[0][0]

    others = {path: variable for path, variable in flat.items() if path not in dict(nnx.to_flat_state(plain))}
    inputs = jax.eval_shape(differentiated, plain, others, state.quantizers, batch, key)
    # Without the sharding over Explicit axes, which a stage does not see.
    return jax.tree.map(_shape, inputs), *traced


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


_READS_LAYERS = (
    "embed_inputs or compute_loss of a PipelinedLoss reads parameters of the layers, such as for a penalty on all "
    "parameters, and no stage of a pipeline has those of the others; leave it to the optimizer (weight_decay of "
    "optax.adamw), or take a mesh without a pipeline axis"
)


def _result_shapes(state: TrainState) -> tuple[Any, Flat, Flat]:
    """Return shapes of loss, gradients and next quantizer states."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {path: var.replace(shape(var.get_value().shape)) for path, var in nnx.to_flat_state(state.params)}
    return shape(()), params, dict(nnx.to_flat_state(state.quantizers))


def _model_results(cut: Cut, schedule: Schedule, weighted: bool, sums: StageSums) -> tuple[Array, Flat, Flat]:
    """Return mean loss, mean gradients and next quantizer states of the model from all stages' sums, ``[p, ...]``."""
    total = jnp.sum(sums.loss)
    grads = cut.unstacked(sums.layers) | jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), sums.outer)
    quantizers = cut.unstacked(sums.states) | merge_quantizers(sums.outer_states)

    weight = sums.weight[0] if weighted else None
    return *means_of_microbatches(total, grads, weight, schedule.microbatches), quantizers
