"""Training: state and step, loss scaling, optimizer."""

from jax_te.training.loss_scale import ConstantLossScale, DynamicLossScale, LossScale
from jax_te.training.optimizer import adamw_with_schedule, learning_rate_schedule, weight_decay_mask
from jax_te.training.state import TrainState, abstract_train_state, change_recipe, create_train_state, split_model
from jax_te.training.step import LossFn, make_eval_step, make_train_step

__all__ = [
    "ConstantLossScale",
    "DynamicLossScale",
    "LossFn",
    "LossScale",
    "TrainState",
    "abstract_train_state",
    "adamw_with_schedule",
    "change_recipe",
    "create_train_state",
    "learning_rate_schedule",
    "make_eval_step",
    "make_train_step",
    "split_model",
    "weight_decay_mask",
]
