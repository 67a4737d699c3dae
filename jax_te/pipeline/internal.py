"""Names of `jax_te.pipeline` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.pipeline.cut import AXIS, Cut, Flat, cut_model, is_array_tree, pipeline_stages, stage_rules
from jax_te.pipeline.stack_hook import StackCall, call_of_stack, replace_stack, stack_of_layers

__all__ = [
    "AXIS",
    "Cut",
    "Flat",
    "StackCall",
    "call_of_stack",
    "cut_model",
    "is_array_tree",
    "pipeline_stages",
    "replace_stack",
    "stack_of_layers",
    "stage_rules",
]
