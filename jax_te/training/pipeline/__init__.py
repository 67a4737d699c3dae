"""Pipeline parallelism: schedules, where a stack of layers is cut into stages, and a step as a stage runs it."""

from jax_te.training.pipeline.schedule import Schedule, Slots, make_schedule, split_layers

__all__ = ["Schedule", "Slots", "make_schedule", "split_layers"]
