"""Kernels that are quantized once and used in several calls, and sinks for their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jax_te._validation import checked
from jax_te.layers.model_kernels import given_kernels, quantizable_kernels, quantizable_modules
from jax_te.layers.quantizable import CachedKernel, CacheMode, GradSinks, QuantizableModule
from jax_te.quantize import QuantizedKernel


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KernelCache:
    """Quantized forms of a model's kernels, as `quantize_kernels` makes them and `cached_kernels` uses them. A pytree.

    Args:
        kernels: quantized kernels by path in the model, e.g. ``"layers.0.self_attention.qkv.kernel"``.

    >>> KernelCache({}).kernels
    {}
    """

    kernels: dict[str, QuantizedKernel]


@checked
def quantize_kernels(model: nnx.Module) -> KernelCache:
    """Return the quantized form of each kernel that the recipe in use quantizes in forward and backward.

    Call it once a step, under the recipe, ``with autocast(recipe):``, and use the kernels in each microbatch by
    `cached_kernels`. `jax_te.training.make_train_step` does so by itself. Kernels that are stored quantized are
    left out, as are those of layers in high precision.

    Args:
        model: model, which is not changed. Kernels that it passes to one of its layers in a call are quantized, too,
            such as that of a head tied to the embedding.

    Raises:
        ValueError: for a kernel that is passed to a layer that is no part of the model.

    Source: ``is_first_microbatch`` of ``transformer_engine.pytorch``.

    >>> from jax_te.layers import Linear
    >>> from jax_te.recipe import Float8CurrentScaling, autocast
    >>> with autocast(Float8CurrentScaling()):
    ...     cache = quantize_kernels(Linear(16, 16, rngs=nnx.Rngs(0)))
    >>> cache.kernels["kernel"].operand.rowwise.data.dtype
    dtype(float8_e4m3fn)
    """
    own = [(module, kernel, getattr(module, kernel).get_value()) for _, module, kernel in quantizable_kernels(model)]
    paths = {id(module): path for path, module in _modules(model)}
    given = given_kernels(model)
    for module, kernel, _ in given:
        if id(module) not in paths:
            raise ValueError(
                f"given_kernels names the {kernel} of a {type(module).__name__} that is no part of the "
                f"{type(model).__name__}; make that layer an attribute of the model, or leave it out of given_kernels"
            )
    return KernelCache(
        {
            _name(paths[id(module)], kernel): module.quantized(kernel, value)
            for module, kernel, value in (*own, *given)
            if not isinstance(value, QuantizedKernel) and module.kernel_quantizer(kernel) is not None
        }
    )


@checked
@contextlib.contextmanager
def cached_kernels(model: nnx.Module, cache: KernelCache) -> Iterator[nnx.Module]:
    """Yield ``model``, whose layers use the kernels of ``cache`` in calls that do not give ``is_first_microbatch``.

    Gradients go to the kernels themselves. Inside the context the cached kernels are state of the layers, NNX
    Variables: loops over layers, recomputation and transformations pass them on with the layers' other state, and slice
    them where they slice the kernels. So enter the context outside of a function under ``nnx.jit`` or
    ``nnx.grad``, or inside, on the module that the function was given. On exit the layers are restored.

    Args:
        model: model whose kernels were quantized, or a copy.
        cache: result of `quantize_kernels` for the current parameters.

    Raises:
        ValueError: for a kernel that the model does not have, or has in another shape.

    >>> from jax_te.layers import Linear
    >>> from jax_te.recipe import Float8CurrentScaling, autocast
    >>> layer = Linear(16, 16, rngs=nnx.Rngs(0))
    >>> loss = lambda layer, x: jnp.sum(jnp.square(layer(x)))
    >>> with autocast(Float8CurrentScaling()):
    ...     cache = quantize_kernels(layer)
    ...     for x in jnp.ones((2, 16, 16)):
    ...         with cached_kernels(layer, cache):
    ...             grads = nnx.grad(loss)(layer, x)
    >>> grads["kernel"].shape, layer.kernel_cache is None
    ((16, 16), True)
    """
    modules = _modules(model)
    modes: list[CacheMode] = [module.cache_mode for _, module in modules]
    states = [module.kernel_cache for _, module in modules]
    _set_cached_kernels(modules, cache, type(model))
    try:
        yield model
    finally:
        for (_, module), mode, kernels in zip(modules, modes, states, strict=True):
            module.cache_mode = mode
            module.kernel_cache = nnx.data(kernels)


def use_cached_kernels(model: nnx.Module, cache: KernelCache) -> None:
    """Set the cached kernels of the layers of ``model`` to those of ``cache``, as inside of `cached_kernels`.

    Raises:
        ValueError: for a kernel that the model does not have, or has in another shape; no layer is changed then.
    """
    _set_cached_kernels(_modules(model), cache, type(model))


def _set_cached_kernels(
    modules: list[tuple[tuple[Any, ...], QuantizableModule]], cache: KernelCache, model_class: type[Any]
) -> None:
    """Set the cached kernels of layers, given with their paths in a model of this class, which errors name."""
    found = {_name(path, kernel): (module, kernel) for path, module in modules for kernel in module.kernels}
    if unknown := [name for name in cache.kernels if name not in found]:
        raise ValueError(
            f"{model_class.__name__} has no kernel {', '.join(unknown[:4])}{', …' if len(unknown) > 4 else ''}; use a "
            "cache for the model that quantize_kernels made it of"
        )
    forms: dict[int, tuple[QuantizableModule, dict[str, QuantizedKernel]]] = {}
    for name, quantized in cache.kernels.items():
        module, kernel = found[name]
        own = getattr(module, kernel)
        if own is not None and quantized.shape != own.get_value().shape:
            raise ValueError(
                f"the cached {name} has shape {quantized.shape}, and the model's {own.get_value().shape}; use a cache "
                "for the model that quantize_kernels made it of"
            )
        forms.setdefault(id(module), (module, {}))[1][kernel] = quantized
    for module, kernels in forms.values():
        module.kernel_cache = CachedKernel(kernels)
        module.cache_mode = "read"


def drop_cached_kernels(model: nnx.Module) -> None:
    """Remove the cached kernels of all layers, e.g. because the parameters have changed.

    >>> from jax_te.layers import Linear
    >>> from jax_te.recipe import Float8CurrentScaling, autocast
    >>> layer = Linear(16, 16, rngs=nnx.Rngs(0))
    >>> with autocast(Float8CurrentScaling()):
    ...     _ = layer(jnp.ones((16, 16)), is_first_microbatch=True)
    >>> drop_cached_kernels(layer)
    >>> layer.kernel_cache is None
    True
    """
    for _, module in quantizable_modules(model):
        module.kernel_cache = nnx.data(None)


def set_grad_sinks(model: nnx.Module, sinks: Mapping[Any, Any]) -> list[tuple[QuantizableModule, GradSinks | None]]:
    """Set the sinks of kernels of `quantizable_kernels` by their paths; None means no sink.

    Returns:
        The layers that have other sinks now, with those that they had before.
    """
    of_modules: dict[int, tuple[QuantizableModule, dict[str, Any]]] = {}
    for path, module, kernel in quantizable_kernels(model):
        if sinks.get(path) is not None:
            of_modules.setdefault(id(module), (module, {}))[1][kernel] = sinks[path]
    before = [(module, module.grad_sinks) for module, _ in of_modules.values()]
    for module, own in of_modules.values():
        module.grad_sinks = GradSinks(own)
    return before


@contextlib.contextmanager
def with_grad_sinks(model: nnx.Module, sinks: Mapping[Any, Any]) -> Iterator[None]:
    """Set the sinks of kernels as `set_grad_sinks` does; on exit the layers that got some have those of before."""
    before = set_grad_sinks(model, sinks)
    try:
        yield
    finally:
        for module, own in before:
            module.grad_sinks = nnx.data(own)


def _modules(model: nnx.Module) -> list[tuple[tuple[Any, ...], QuantizableModule]]:
    return [(path, module) for path, module in nnx.iter_modules(model) if isinstance(module, QuantizableModule)]


def _name(path: tuple[Any, ...], kernel: str) -> str:
    return ".".join(map(str, (*path, kernel)))
