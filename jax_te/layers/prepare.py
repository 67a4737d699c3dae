"""Quantizer state for the layers of a model that was built under another recipe or none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import checked
from jax_te.layers.attention.dot_product_attention import DotProductAttention
from jax_te.layers.quantizable import QuantizableModule
from jax_te.quantize import init_attention_state, quantizer_variables
from jax_te.recipe import Recipe


@checked
def prepare_quantization(model: nnx.Module, recipe: Recipe | None) -> nnx.Module:
    """Give every quantizable layer of ``model`` fresh state for ``recipe``, or remove the state; return ``model``.

    Use it to quantize a model that was built or loaded without a recipe, and to change the recipe of a running one.
    Parameters are not changed. State of the same recipe is replaced, too: the amax histories start empty. The core of
    attention gets state under a recipe with ``fp8_dpa``.

    Args:
        model: changed in place.
        recipe: None and recipes without state remove the state.

    Returns:
        ``model``.

    Raises:
        ValueError: if ``model`` has no layer that a recipe could quantize.

    >>> from jax_te.layers import Linear
    >>> from jax_te.recipe import DelayedScaling
    >>> layer = prepare_quantization(Linear(16, 16, rngs=nnx.Rngs(0)), DelayedScaling())
    >>> layer.quantizers["x"]["scale"].shape
    ()
    """
    return prepare(model, recipe, keep=False)


def prepare(model: nnx.Module, recipe: Recipe | None, *, keep: bool) -> nnx.Module:
    """Return ``model`` after `prepare_quantization`; with ``keep``, state that ``recipe`` can go on with stays."""
    found = dict(nnx.iter_modules(model))
    modules = {path: module for path, module in found.items() if isinstance(module, QuantizableModule)}
    cores = {path: module for path, module in found.items() if isinstance(module, DotProductAttention)}
    if not modules and not (cores and (recipe is None or recipe.quantizes_attention)):
        raise ValueError(
            f"{type(model).__name__} has no layer that a recipe could quantize; jax_te.layers has: Linear, "
            "LayerNormLinear, LayerNormMLP and what is built from them; for layers of Flax call quantize_model"
        )
    made = []  # all before one is set: a recipe that refuses a layer leaves the model as it was
    for path, module in modules.items():
        ambient = None if module.high_precision else recipe
        for kernel, name in module.kernels.items():
            own = module.own_recipe(kernel)
            # State belongs to training, whichever mode the module is in now: its training recipe decides.
            effective = ambient if own is None else own.resolve(ambient, training=True)
            # Layers that nnx.vmap stacked have a state each.
            state, stack = module.new_state(effective), module.stack_shape(kernel, found.get(path[:-1]))
            state = jax.tree.map(lambda leaf, stack=stack: jnp.broadcast_to(leaf, (*stack, *leaf.shape)), state)
            variables = module.state_variables(kernel, state, stack=len(stack))
            if not (keep and _is_alike(getattr(module, name), variables)):
                made.append((module, name, variables))
    for path, core in cores.items():
        state, stack = init_attention_state(None if core.high_precision else recipe), _stack_around(found, path)
        state = jax.tree.map(lambda leaf, stack=stack: jnp.broadcast_to(leaf, (*stack, *leaf.shape)), state)
        (name,) = core.state_names
        variables = quantizer_variables(state, stack=len(stack))
        if not (keep and _is_alike(getattr(core, name), variables)):
            made.append((core, name, variables))
    for module, name, variables in made:
        setattr(module, name, nnx.data(variables))
    for module in modules.values():
        # Cached kernels were quantized under the recipe before.
        module.kernel_cache = nnx.data(None)
    return model


def _is_alike(present: Any, fresh: Any) -> bool:
    """Return whether two trees of Variables hold arrays of the same names, shapes and dtypes."""

    def arrays(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.typeof(leaf.get_value()).str_short(),
            tree,
            is_leaf=lambda node: isinstance(node, nnx.Variable),
        )

    return arrays(present) == arrays(fresh)


def _stack_around(found: dict[tuple[Any, ...], nnx.Module], path: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the sizes of the leading axes that ``nnx.vmap`` added to the arrays of a module without kernels.

    They are those of a layer with a kernel in the same module, as the projections are beside the core of attention.
    """
    for other, module in found.items():
        if other[:-1] == path[:-1] and isinstance(module, QuantizableModule) and module.kernels:
            return module.stack_shape(next(iter(module.kernels)), found.get(other[:-1]))
    return ()
