"""Which fields of a configuration the models follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from jax_te.config import TransformerConfig
from jax_te.layers.internal import check_context_size
from jax_te.megatron import recipe_from_config
from jax_te.recipe import current_recipe

_NOT_FOLLOWED = {
    "perform_initialization": "; nnx.eval_shape gives a model without arrays",
    "delay_wgrad_compute": "; jax_te.remat.split_vjp computes weight gradients apart",
    "disable_parameter_transpose_cache": "; kernels are kept between microbatches only where a call asks for it",
    "quant_recipe": "; jax_te.megatron.apply_quantization_config(model, config.quant_recipe) does",
    "qk_clip": "",
    "log_max_attention_logit": "",
}


def check_config(config: TransformerConfig, *, also: Mapping[str, str] | None = None) -> None:
    """Raise ValueError for a field that the models do not follow, unless it has its default.

    ``fp8`` and ``fp4`` are followed where the model is built inside of ``autocast(recipe_from_config(config))``, and
    refused elsewhere. ``context_parallel_size`` must be the size of the mesh in use, unless it is 1.

    Args:
        config: of the model.
        also: other fields that this model does not follow, each with what the message says behind its value.

    >>> check_config(TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2))
    """
    check_context_size(config.context_parallel_size)
    hints = {**_NOT_FOLLOWED, **(also or {})}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in hints and value != field.default:
            who = "the models do" if field.name in _NOT_FOLLOWED else "this model does"
            raise ValueError(f"{who} not follow {field.name}={value!r}{hints[field.name]}; leave it out of its config")
    recipe = recipe_from_config(config)
    if recipe is not None and current_recipe() != recipe:
        raise ValueError(
            f"the config asks for the recipe {recipe.name!r}: build and call the model inside of "
            "autocast(recipe_from_config(config)), see jax_te.megatron"
        )
