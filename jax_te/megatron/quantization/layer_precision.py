"""Precision of one quantizable layer."""

from __future__ import annotations

from typing import Annotated

from flax import nnx

from jax_te._validation import checked
from jax_te.layers import QuantizableModule
from jax_te.megatron.quantization.rules import QuantizationConfig
from jax_te.megatron.quantization.te_params import TEQuantizationParams
from jax_te.recipe import Float8CurrentScaling, ModuleRecipe
from jax_te.typing import Words

_ANY_RECIPE = Float8CurrentScaling()  # stands for a quantized ambient context; which recipe it is does not matter

Layer = Annotated[QuantizableModule, Words("a quantizable layer (Linear, LayerNormLinear, LayerNormMLP)")]


@checked
def finish_init(module: Layer, quantization_config: QuantizationConfig | None) -> None:
    """Give a layer the precision of a quantization config, which replaces the layer's own; None removes it.

    The layer's ``module_recipe`` is static, so jitted functions are traced again.

    Args:
        module: changed in place.
        quantization_config: result of `get_quant_config_or_none`.

    Raises:
        TypeError: if ``module`` is not a quantizable layer.
        ValueError, AssertionError: see `TEQuantizationParams.parse_from_config` and
            `TEQuantizationParams.to_module_recipe`. The layer is then unchanged.

    Source: ``TELinear.finish_init``.

    >>> from jax_te.layers import Linear
    >>> from jax_te.megatron import MatchContext
    >>> layer = Linear(16, 16, rngs=nnx.Rngs(0))
    >>> payload = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    >>> finish_init(layer, QuantizationConfig(payload, MatchContext("proj"), "bf16"))
    >>> will_execute_quantized(layer, is_context_quantized=True)
    False
    """
    module.module_recipe, module.kernel_recipes = own_recipe(quantization_config), ()


def own_recipe(quantization_config: QuantizationConfig | None) -> ModuleRecipe | None:
    """Return the ``module_recipe`` that corresponds to a quantization config, see `finish_init`."""
    if quantization_config is None:
        return None
    return TEQuantizationParams.parse_from_config(quantization_config).to_module_recipe()


@checked
def will_execute_quantized(module: Layer, is_context_quantized: bool) -> bool:
    """Return whether a layer runs quantized in its current mode, given whether the ambient context is quantized.

    Raises:
        TypeError: if ``module`` is not a quantizable layer.

    Source: ``TELinear.will_execute_quantized``.

    >>> from jax_te.layers import Linear
    >>> will_execute_quantized(Linear(16, 16, rngs=nnx.Rngs(0)), is_context_quantized=True)
    True
    """
    # By resolve, which layers use, so that this answer agrees with a call.
    ambient = _ANY_RECIPE if is_context_quantized and not module.high_precision else None
    own = [module.own_recipe(kernel) for kernel in module.kernels]
    return any(
        (ambient if recipe is None else recipe.resolve(ambient, training=module.training)) is not None for recipe in own
    )


@checked
def set_save_original_input(module: nnx.Module) -> None:
    """Make a layer save its input as the residual, instead of the quantized copy of the input.

    This saves memory if another operation saves the same input anyway.

    Raises:
        ValueError: for a module without this option, such as LayerNormLinear, whose input is the norm's.

    Source: ``megatron.core.extensions.transformer_engine.set_save_original_input``.

    >>> from jax_te.layers import Linear
    >>> layer = Linear(16, 16, rngs=nnx.Rngs(0))
    >>> set_save_original_input(layer)
    >>> layer.save_original_input
    True
    """
    if not hasattr(module, "save_original_input"):
        raise ValueError(
            f"{type(module).__name__} has no save_original_input: only a layer whose input is itself the operand of a "
            "GEMM can keep it, e.g. Linear"
        )
    setattr(module, "save_original_input", True)  # noqa: B010 - not every module has it
