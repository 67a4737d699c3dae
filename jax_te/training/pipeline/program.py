"""What all stages of a pipelined step have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax_te.training.gradients import Accumulation
from jax_te.training.loss_scale import LossScale
from jax_te.training.pipeline.cut import Cut, Flat
from jax_te.training.pipeline.loss import PipelinedLoss, StackArrays
from jax_te.training.pipeline.schedule import Schedule


class Look(NamedTuple):
    """Results of a first trace of the parts around the layers.

    Args:
        inputs: shapes of the layers' arguments.
        options: arguments of `run_layers` that are not arrays.
        weighted: whether the loss is a `WeightedMean`.
    """

    inputs: StackArrays
    options: Mapping[str, Any]
    weighted: bool


class Program(NamedTuple):
    """Program of all stages.

    Args:
        loss: loss of a microbatch, in its parts.
        how: accumulation of the gradients.
        schedule: schedule of the step.
        graphdef: graph definition of the model.
        cut: points at which the model is cut.
        layers: shapes of the layers' Variables, by their path in the model.
        scaler: loss scaler.
        look: results of a first trace.
    """

    loss: PipelinedLoss
    how: Accumulation
    schedule: Schedule
    graphdef: Any
    cut: Cut
    layers: Flat
    scaler: LossScale
    look: Look
