"""Autocast contexts of quantization recipes, and the precision of operations inside them.

Only the flag of the ambient state is read. It decides whether the layer's recipe takes effect:

=================  =========  ==================  =====================  =======================
ambient quantized  recipe     override_quantized  override_nonquantized  runs
=================  =========  ==================  =====================  =======================
yes                FP8, FP4   True                any                    under the layer's recipe
yes                FP8, FP4   False               any                    under the ambient recipe
yes                ``{}``     True                any                    in high precision
yes                ``{}``     False               any                    under the ambient recipe
no                 FP8, FP4   any                 True                   under the layer's recipe
no                 FP8, FP4   any                 False                  in high precision
no                 ``{}``     any                 any                    in high precision
any                None       –                   –                      like the ambient
=================  =========  ==================  =====================  =======================

Layers of this package resolve their ``module_recipe`` when called and need none of these functions. The functions are
for users' own operations, and agree with `jax_te.recipe.ModuleRecipe.resolve` in every row.
"""

from __future__ import annotations

import contextlib

from jax_te._validation import checked
from jax_te.megatron.quantization.te_params import TEQuantizationParams
from jax_te.megatron.quantization.te_recipe import TEQuantizationRecipe
from jax_te.recipe import autocast, current_recipe


@checked
def get_fp8_autocast_for_quant_recipe(
    qrecipe: TEQuantizationRecipe,
) -> contextlib.AbstractContextManager[None]:
    """Return the context of an operation with its own recipe: an `autocast`, or a context that changes nothing.

    Raises:
        ValueError: see `TEQuantizationRecipe.to_recipe`, if the recipe takes effect.

    Source: ``_get_fp8_autocast_for_quant_recipe``.

    >>> with autocast(TEQuantizationRecipe(fp4_quantization_recipe="nvfp4").to_recipe()):
    ...     with get_fp8_autocast_for_quant_recipe(TEQuantizationRecipe(fp8_quantization_recipe="mxfp8")):
    ...         current_recipe().name
    'mxfp8'
    """
    if _takes_effect(qrecipe, current_recipe() is not None):
        # autocast(None) for high precision: leaving the ambient context open would quantize.
        return autocast(qrecipe.to_recipe())
    return contextlib.nullcontext()


@checked
def get_fp8_autocast_for_quant_params(
    qparams: TEQuantizationParams | None, training: bool
) -> contextlib.AbstractContextManager[None]:
    """Return `get_fp8_autocast_for_quant_recipe` of a mode's recipe; None changes nothing.

    Source: ``_get_fp8_autocast_for_quant_params``.

    >>> with get_fp8_autocast_for_quant_params(None, training=True):
    ...     current_recipe() is None
    True
    """
    if qparams is None:
        return contextlib.nullcontext()
    return get_fp8_autocast_for_quant_recipe(qparams.recipe_for(training))


@checked
def get_should_context_be_quantized_recipe(qrecipe: TEQuantizationRecipe, is_original_context_quantized: bool) -> bool:
    """Return whether `get_fp8_autocast_for_quant_recipe` gives a quantized context, without opening the context.

    Source: ``_get_should_context_be_quantized_recipe``.

    >>> get_should_context_be_quantized_recipe(TEQuantizationRecipe(), is_original_context_quantized=True)
    False
    """
    if not _takes_effect(qrecipe, is_original_context_quantized):
        return is_original_context_quantized
    # Without to_recipe: this function must not raise for a recipe that is only compared.
    return qrecipe.fp8_quantization_recipe is not None or qrecipe.fp4_quantization_recipe is not None


@checked
def get_should_context_be_quantized_params(
    qparams: TEQuantizationParams | None, training: bool, is_context_quantized: bool
) -> bool:
    """Return `get_should_context_be_quantized_recipe` of a mode's recipe; None changes nothing.

    Source: ``_get_should_context_be_quantized_params``.

    >>> get_should_context_be_quantized_params(None, training=True, is_context_quantized=True)
    True
    """
    if qparams is None:
        return is_context_quantized
    return get_should_context_be_quantized_recipe(qparams.recipe_for(training), is_context_quantized)


def _takes_effect(qrecipe: TEQuantizationRecipe, quantized: bool) -> bool:
    # The other flag does not matter in this state, see the table above.
    return qrecipe.override_quantized_autocast if quantized else qrecipe.override_nonquantized_autocast
