"""Pipeline parallelism: schedules, and where a model's stack of layers is cut into stages."""

from jax_te.pipeline.schedule import SCHEDULES, PipelineConfig, Schedule, Slots, make_schedule, split_layers

__all__ = [
    "SCHEDULES",
    "PipelineConfig",
    "Schedule",
    "Slots",
    "make_schedule",
    "split_layers",
]
