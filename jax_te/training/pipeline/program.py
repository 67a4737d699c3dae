"""What all stages of a pipelined step have in common."""

from __future__ import annotations

from typing import Any, NamedTuple

from flax import nnx

from jax_te.models import StackOptions
from jax_te.training.accumulation import Accumulation
from jax_te.training.loss_scale import LossScale
from jax_te.training.pipeline.cut import Cut, Flat
from jax_te.training.pipeline.loss import PipelinedLoss, StackArrays
from jax_te.training.pipeline.schedule import Schedule


class Program(NamedTuple):
    """Program of all stages.

    Args:
        loss: loss of a microbatch, in its parts.
        accumulation: accumulation of the gradients.
        schedule: schedule of the step.
        graphdef: graph definition of the model.
        cut: points at which the model is cut.
        layers: shapes of the layers' Variables, by their path in the model.
        scaler: loss scaler.
        inputs: shapes of the layers' arguments.
        options: execution of the layers.
        weighted: whether the loss is a `WeightedMean`.
    """

    loss: PipelinedLoss
    accumulation: Accumulation
    schedule: Schedule
    graphdef: nnx.GraphDef[Any]
    cut: Cut
    layers: Flat
    scaler: LossScale
    inputs: StackArrays
    options: StackOptions
    weighted: bool

    @property
    def aux_scale(self) -> Any:
        """Factor of the losses that a microbatch's layers add to gradients."""
        return self.scaler.scale * self.accumulation.share
