"""Quantization of models built from Flax's layers and from user-defined modules."""

from jax_te.layers.flax.contractions import Contraction, Kernel, Seen, Visitor, compute, noting
from jax_te.layers.flax.decisions import (
    OTHER_LIBRARIES,
    OwnRecipe,
    Rules,
    as_its_recipe_says,
    check_inputs,
    check_rules,
    decide_layer,
    decide_parameter,
    other_module,
    report_of,
    rule_of_parameter,
    shapes_pointed_out,
    training_recipe,
)
from jax_te.layers.flax.drop_in import FlaxLinear, ParameterGemm, einsum_linear, precision_reason, read_einsum
from jax_te.layers.flax.model_gemms import (
    ModelGemms,
    as_inputs,
    call_with_kept_arguments,
    gemms_of_model,
    joined,
    split_leaves,
)
from jax_te.layers.flax.own_modules import could_be_kernel, reduced
