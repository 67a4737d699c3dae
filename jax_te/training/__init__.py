"""Training: state and step, pipelines, loss scaling, optimizers, statistics of quantization, compiled programs."""

from jax_te.training.adamw import adamw_with_schedule, learning_rate_schedule, weight_decay_mask
from jax_te.training.compile_cache import keep_compiled_programs
from jax_te.training.deferred import FirstHalf, deferred_vjp
from jax_te.training.global_batch import global_batch
from jax_te.training.gradients import value_and_grad
from jax_te.training.inspection import (
    TensorStatistics,
    calibrate_delayed_scaling,
    exact_model,
    inspect_precision,
    make_inspection,
)
from jax_te.training.loss import LossFn, WeightedMean
from jax_te.training.loss_scale import ConstantLossScale, DynamicLossScale, LossScale
from jax_te.training.muon import muon_dimension_numbers
from jax_te.training.optimizer import Optimizer
from jax_te.training.outcome import gradients_or_nan, loss_or_nan, outcome_of
from jax_te.training.pipeline.gradients import check_pipelined
from jax_te.training.pipeline.loss import PipelinedLoss
from jax_te.training.sensitivity import ModuleSensitivity, keep_in_bf16_rules, sensitivity
from jax_te.training.state import (
    SplitModel,
    TrainState,
    abstract_train_state,
    change_recipe,
    create_train_state,
    split_model,
)
from jax_te.training.state_arrays import StateArrays
from jax_te.training.step import make_eval_step, make_train_step

# For users. The other names above are for the other packages of jax_te.
__all__ = [
    "ConstantLossScale",
    "DynamicLossScale",
    "FirstHalf",
    "LossFn",
    "LossScale",
    "ModuleSensitivity",
    "Optimizer",
    "PipelinedLoss",
    "SplitModel",
    "TensorStatistics",
    "TrainState",
    "WeightedMean",
    "abstract_train_state",
    "adamw_with_schedule",
    "calibrate_delayed_scaling",
    "change_recipe",
    "create_train_state",
    "deferred_vjp",
    "exact_model",
    "global_batch",
    "inspect_precision",
    "keep_compiled_programs",
    "keep_in_bf16_rules",
    "learning_rate_schedule",
    "make_eval_step",
    "make_inspection",
    "make_train_step",
    "muon_dimension_numbers",
    "sensitivity",
    "split_model",
    "value_and_grad",
    "weight_decay_mask",
]
