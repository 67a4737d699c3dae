"""Quantization of models that are built of Flax's own layers."""

from jax_te.layers.flax.drop_in import FlaxLinear, einsum_linear, precision_reason, read_einsum
from jax_te.layers.flax.model_gemms import ModelGemms, as_inputs, gemms_of_model
from jax_te.layers.flax.quantize_model import (
    Rules,
    check_flax,
    check_inputs,
    check_rules,
    decide_layer,
    other_module,
    report_of,
)
