"""Pipeline parallelism: schedules, partition of a stack of layers into stages, and the train step of a stage."""

from jax_te.training.pipeline.schedule import Schedule, Slots, make_schedule, split_layers

__all__ = ["Schedule", "Slots", "make_schedule", "split_layers"]
