"""Quantizer state for the layers of a model that was built under another recipe or none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

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
    Parameters are not changed. State of the same recipe is replaced, too: the amax histories start empty, and scales
    are 1 until a training step or `jax_te.training.calibrate_delayed_scaling` has seen values, as they would be in a
    model that is only evaluated. The core of attention gets state under a recipe with ``fp8_dpa``.

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
    # All are made before one is set: a recipe that refuses a layer leaves the model as it was.
    made = [state for path, module in modules.items() for state in _states_of_layer(module, recipe, found, path)]
    made += [_state_of_core(core, recipe, found, path) for path, core in cores.items()]
    for module, name, variables in made:
        if not (keep and _is_alike(getattr(module, name), variables)):
            setattr(module, name, nnx.data(variables))
    for module in modules.values():
        # Cached kernels were quantized under the recipe before.
        module.kernel_cache = nnx.data(None)
    return model


_Path = tuple[Any, ...]


class _State(NamedTuple):
    """Fresh state of a module: the name of the attribute that holds it, and its Variables."""

    module: nnx.Module
    name: str
    variables: Any


def _states_of_layer(
    module: QuantizableModule, recipe: Recipe | None, found: dict[_Path, nnx.Module], path: _Path
) -> Iterator[_State]:
    """Yield fresh state of each kernel of a layer, which is at ``path`` among the modules of a model."""
    ambient = None if module.high_precision else recipe
    for kernel, name in module.kernels.items():
        own = module.own_recipe(kernel)
        # State belongs to training, whichever mode the module is in now: its training recipe decides.
        effective = ambient if own is None else own.resolve(ambient, training=True)
        stack = module.stack_shape(kernel, found.get(path[:-1]))
        state = _stacked(module.new_state(effective), stack)
        yield _State(module, name, module.state_variables(kernel, state, stack=len(stack)))


def _state_of_core(
    core: DotProductAttention, recipe: Recipe | None, found: dict[_Path, nnx.Module], path: _Path
) -> _State:
    """Return fresh state of a core of attention, which is at ``path`` among the modules of a model."""
    stack = _stack_around(found, path)
    state = _stacked(init_attention_state(None if core.high_precision else recipe), stack)
    (name,) = core.state_names
    return _State(core, name, quantizer_variables(state, stack=len(stack)))


def _stacked(state: Any, stack: tuple[int, ...]) -> Any:
    """Return the state of layers that ``nnx.vmap`` stacked, of which each has its own; ``stack`` are their numbers."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*stack, *leaf.shape)), state)


def _is_alike(present: Any, fresh: Any) -> bool:
    """Return whether two trees of Variables hold arrays of the same names, shapes and dtypes."""

    def arrays(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.typeof(leaf.get_value()).str_short(),
            tree,
            is_leaf=lambda node: isinstance(node, nnx.Variable),
        )

    return arrays(present) == arrays(fresh)


def _stack_around(found: dict[_Path, nnx.Module], path: _Path) -> tuple[int, ...]:
    """Return the sizes of the leading axes that ``nnx.vmap`` added to the arrays of a module without kernels.

    They are those of a layer with a kernel in the same module, as the projections are beside the core of attention.
    """
    for other, module in found.items():
        if other[:-1] == path[:-1] and isinstance(module, QuantizableModule) and module.kernels:
            return module.stack_shape(next(iter(module.kernels)), found.get(other[:-1]))
    return ()
