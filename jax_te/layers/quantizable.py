"""What every layer whose GEMMs a recipe can quantize has in common."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jax_te.ops import quantize_kernel
from jax_te.quantize import KernelGradient, QuantizedKernel, quantizer_for, quantizer_variable
from jax_te.recipe import ModuleRecipe, Recipe, current_recipe
from jax_te.typing import Array


class CachedKernel(nnx.Variable):
    """NNX Variable that holds a kernel's quantized form between microbatches, and where its gradient goes."""


class QuantizableModule(nnx.Module):
    """Base of the layers with linear operations.

    Class attributes:
        kernels: name of each kernel -> name of its quantizer state.

    Attributes:
        module_recipe: the layer's own recipe, see `ModuleRecipe`; None: the ambient one.
        deterministic: evaluation instead of training (``model.eval()`` sets it): which of ``module_recipe``'s two
            recipes holds.
        is_first_microbatch: what a call that does not say takes: True: quantize the kernels anew and keep them; False:
            use those kept; None: keep nothing.
        module_name: the layer's path in its model, as `name_modules` gives it; used where tensors are observed.
    """

    kernels: ClassVar[dict[str, str]] = {}

    def _init_quantization(self) -> None:
        self.module_recipe: ModuleRecipe | None = None
        self.deterministic = False
        self.is_first_microbatch: bool | None = None
        self.module_name: str | None = None
        for kernel, quantizers in self.kernels.items():
            setattr(self, quantizers, nnx.data(quantizer_variable(current_recipe())))
            setattr(self, cache_name(kernel), nnx.data(None))

    @property
    def recipe(self) -> Recipe | None:
        """The recipe that a call runs under here and now."""
        ambient = current_recipe()
        if self.module_recipe is None:
            return ambient
        return self.module_recipe.resolve(ambient, training=not self.deterministic)

    def linear_arguments(self, kernel: str, axes: Any, is_first_microbatch: bool | None) -> dict[str, Any]:
        """Arguments that an op takes for one kernel: the kernel or its kept form, the state, where the gradient goes.

        Raises:
            ValueError: if the kept form is asked for and there is none.
        """
        variable, recipe = getattr(self, kernel), self.recipe
        state = getattr(self, self.kernels[kernel])
        state = None if state is None else state.get_value()
        first = self.is_first_microbatch if is_first_microbatch is None else is_first_microbatch
        value, gradient = variable.get_value(), None
        kept: Any = getattr(self, cache_name(kernel))
        if first is True and quantizer_for(recipe, "kernel") is not None and not isinstance(value, QuantizedKernel):
            assert recipe is not None
            cached = quantize_kernel(value, recipe=recipe, state=state, kernel_axes=axes)
            setattr(self, cache_name(kernel), CachedKernel((cached, None)))
            value, gradient = cached, KernelGradient(like=value)
        elif first is False and kept is not None:
            cached, gradient = kept.get_value()
            if gradient is None:
                gradient = KernelGradient(like=value)
            value = value if cached is None else cached
        elif first is False and quantizer_for(recipe, "kernel") is not None and not isinstance(value, QuantizedKernel):
            raise ValueError(
                f"is_first_microbatch=False and {type(self).__name__} has kept no quantized {kernel}; call it with "
                "is_first_microbatch=True on the first microbatch of a step, or None to keep nothing"
            )
        return {"kernel": value, "state": state, "gradient": gradient}


def cache_name(kernel: str) -> str:
    """Name of the attribute in which a layer keeps the quantized form of ``kernel``.

    >>> cache_name("wi_kernel")
    'wi_kernel_cache'
    """
    return f"{kernel}_cache"


def quantizable_modules(model: nnx.Module) -> list[tuple[str, QuantizableModule]]:
    """Path and module of every layer of ``model`` that a recipe can quantize, in the order of the paths.

    A path is the attribute names and indices that lead to the layer, joined by dots.

    >>> from jax_te.layers import MultiheadAttention
    >>> [path for path, _ in quantizable_modules(MultiheadAttention(16, 2, rngs=nnx.Rngs(0)))]
    ['proj', 'qkv']
    """
    found = [
        (".".join(map(str, path)), module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, QuantizableModule)
    ]
    return sorted(found, key=lambda item: _natural(item[0]))


def _natural(path: str) -> list[tuple[int, str]]:
    """Sorting key with which layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]


def name_modules(model: nnx.Module) -> nnx.Module:
    """Give every quantizable layer its path as ``module_name``, for `observe_quantization`; returns ``model``.

    >>> from jax_te.layers import MultiheadAttention
    >>> name_modules(MultiheadAttention(16, 2, rngs=nnx.Rngs(0))).qkv.module_name
    'qkv'
    """
    for path, module in quantizable_modules(model):
        module.module_name = path
    return model


def kernel_values(model: nnx.Module) -> list[tuple[QuantizableModule, str, Array | QuantizedKernel]]:
    """Layer, kernel name and value of every kernel that a recipe can quantize."""
    return [
        (module, kernel, getattr(module, kernel).get_value())
        for _, module in quantizable_modules(model)
        for kernel in module.kernels
    ]
