"""The recipe of each layer of a model, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from flax import nnx

from jax_te.layers import QuantizableModule, quantizable_modules
from jax_te.recipe import ModuleRecipe, Recipe, current_recipe


@dataclass(frozen=True, kw_only=True)
class LayerRecipes:
    """The recipes of one quantizable layer.

    Args:
        module: path of the module in the model.
        kind: name of its class.
        training, evaluation: recipe in each mode; None is high precision.
        why: reason for these recipes, as text.
        layer, kernels: the layer, and the names of those of its kernels that this is about.
    """

    module: str
    kind: str
    training: Recipe | None
    evaluation: Recipe | None
    why: str
    layer: QuantizableModule
    kernels: tuple[str, ...]


def layer_recipes(model: nnx.Module) -> list[LayerRecipes]:
    """Return the recipes that the quantizable layers of ``model`` run under, given the ambient recipe.

    >>> from jax_te.layers import MultiheadAttention, keep_in_high_precision
    >>> from jax_te.recipe import Float8CurrentScaling, autocast
    >>> model = MultiheadAttention(16, 2, rngs=nnx.Rngs(0))
    >>> _ = keep_in_high_precision(model.proj)
    >>> with autocast(Float8CurrentScaling()):
    ...     [(layer.module, layer.why) for layer in layer_recipes(model)]
    [('proj', 'kept in high precision, as a first or last layer'), ('qkv', 'the ambient recipe')]
    """
    recipes = []
    for path, module in quantizable_modules(model):
        apart = [kernel for kernel, _ in module.kernel_recipes]
        together = tuple(kernel for kernel in module.kernels if kernel not in apart)
        recipes += [_describe(path, module, kernels) for kernels in (together, *((kernel,) for kernel in apart))]
    return recipes


def recipe_label(recipe: Recipe | None) -> str:
    """Return a recipe's short name, or ``"high precision"`` for None.

    >>> recipe_label(None)
    'high precision'
    """
    return "high precision" if recipe is None else recipe.name


def _describe(path: str, module: QuantizableModule, kernels: tuple[str, ...]) -> LayerRecipes:
    # As QuantizableModule.recipe: a layer in high precision sees no ambient recipe, yet may have its own.
    ambient, own = None if module.high_precision else current_recipe(), module.own_recipe(kernels[0])
    training, evaluation = (ambient if own is None else own.resolve(ambient, training=mode) for mode in (True, False))
    reasons = [_why(module, own, ambient, training=mode) for mode in (True, False)]
    why = reasons[0] if reasons[0] == reasons[1] else f"in training: {reasons[0]}; in evaluation: {reasons[1]}"
    # If the kernels run under different recipes, each has its own row.
    name = f"{path}.{kernels[0]}".lstrip(".") if len(kernels) < len(module.kernels) else path
    modes = {"training": training, "evaluation": evaluation}
    return LayerRecipes(module=name, kind=type(module).__name__, why=why, layer=module, kernels=kernels, **modes)


def _why(module: QuantizableModule, own: ModuleRecipe | None, ambient: Recipe | None, *, training: bool) -> str:
    outside = "the ambient recipe" if current_recipe() is not None else "no ambient recipe"
    if module.high_precision:
        outside = "kept in high precision, as a first or last layer"
    if own is None:
        return outside
    if own.overrides(quantized=ambient is not None, training=training):
        return "its own rule"
    where = "nothing else is quantized" if ambient is None else "there is an ambient recipe"
    return f"{outside}; its own rule does not act where {where}"
