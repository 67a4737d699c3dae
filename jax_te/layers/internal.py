"""Names of `jax_te.layers` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.layers.attention.padding_mask import arbitrary_mask, padding_pair
from jax_te.layers.attention.qkv import merge_heads
from jax_te.layers.flax.contractions import Contraction, Kernel, Seen, Visitor, compute, noting
from jax_te.layers.flax.drop_in import FlaxLinear, ParameterGemm, einsum_linear, precision_reason, read_einsum
from jax_te.layers.flax.model_gemms import ModelGemms, as_inputs, gemms_of_model, split_leaves
from jax_te.layers.flax.quantize_model import (
    Rules,
    check_flax,
    check_inputs,
    check_rules,
    decide,
    decide_parameter,
    other_module,
    report_of,
    rule_of_parameter,
    training_recipe,
)
from jax_te.layers.layernorm_mlp import components
from jax_te.layers.mode import TrainingMode
from jax_te.layers.norm import norm_spec
from jax_te.layers.parameters import parameter
from jax_te.layers.quantizable import (
    CachedKernel,
    cache_name,
    drop_cached_kernels,
    natural_order,
    quantizable_kernels,
    quantize_kernels,
    set_grad_sinks,
    use_cached_kernels,
)
from jax_te.layers.results import layer_output
from jax_te.layers.tensor_parallel import TensorParallel, check_context_size, check_tp_group, sequence_axes

__all__ = [
    "CachedKernel",
    "Contraction",
    "FlaxLinear",
    "Kernel",
    "ModelGemms",
    "ParameterGemm",
    "Rules",
    "Seen",
    "TensorParallel",
    "TrainingMode",
    "Visitor",
    "arbitrary_mask",
    "as_inputs",
    "cache_name",
    "check_context_size",
    "check_flax",
    "check_inputs",
    "check_rules",
    "check_tp_group",
    "components",
    "compute",
    "decide",
    "decide_parameter",
    "drop_cached_kernels",
    "einsum_linear",
    "gemms_of_model",
    "layer_output",
    "merge_heads",
    "natural_order",
    "norm_spec",
    "noting",
    "other_module",
    "padding_pair",
    "parameter",
    "precision_reason",
    "quantizable_kernels",
    "quantize_kernels",
    "read_einsum",
    "report_of",
    "rule_of_parameter",
    "sequence_axes",
    "set_grad_sinks",
    "split_leaves",
    "training_recipe",
    "use_cached_kernels",
]
