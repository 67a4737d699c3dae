"""The base of layers whose GEMMs a recipe can quantize: their recipe, quantizer states and cached kernels."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, ClassVar

import jax
from flax import nnx

from jax_te._validation import check_bool
from jax_te.layers.mode import TrainingMode
from jax_te.ops import LinearWeights, quantize_kernel
from jax_te.ops.linear import Probe
from jax_te.quantize import GemmState, QuantizedKernel, Quantizer, init_gemm_state, quantizer_for, quantizer_variables
from jax_te.recipe import ModuleRecipe, Recipe, ambient_recipe
from jax_te.typing import Array, LogicalAxes


class CachedKernel(nnx.Variable):
    """NNX Variable ``(quantized, sink)``: a kernel's quantized form between microbatches, and its ``grad_sink``.

    A sink without arrays, a `Probe`, is stored in the metadata ``probe``, which is part of the graph definition.
    """


class QuantizableModule(TrainingMode):
    """Base of the layers with linear operations.

    Class attributes:
        kernels: name of each kernel -> name of its quantizer state.

    Attributes:
        high_precision: whether to take no ambient recipe, as if inside ``autocast(None)``: for a model's first and last
            layers.
        module_recipe: the layer's own recipe, see `ModuleRecipe`; None: the ambient one.
        kernel_recipes: recipes of single kernels in place of ``module_recipe``: pairs of a kernel's name and a
            `ModuleRecipe` or None.
        deterministic: whether to evaluate instead of training (``model.eval()`` sets it): it selects one of
            ``module_recipe``'s two recipes.
        is_first_microbatch: default of the call's argument. True: quantize the kernels anew and keep them, for this
            call alone, after which the attribute is False; False: use the kept ones; None: keep nothing.
        module_name: the layer's path in its model, as `name_modules` gives it; used where tensors are observed.
    """

    kernels: ClassVar[dict[str, str]] = {}
    of_flax: ClassVar[bool] = False
    """Whether layers of Flax hold a module of this class, and the kernel that it quantizes."""
    groups: int | None = None
    """Number of kernels in each array ``[e, k, *n]``, which a recipe quantizes each by itself; None: the array is one.
    """

    def _init_quantization(self) -> None:
        self.high_precision = False
        self.module_recipe: ModuleRecipe | None = None
        self.kernel_recipes: tuple[tuple[str, ModuleRecipe | None], ...] = ()
        self.is_first_microbatch: bool | None = None
        self.module_name: str | None = None
        for kernel, quantizers in self.kernels.items():
            setattr(self, quantizers, nnx.data(quantizer_variables(self.new_state(ambient_recipe.value))))
            setattr(self, cache_name(kernel), nnx.data(None))

    @property
    def recipe(self) -> Recipe | None:
        """Recipe of a call in the current context."""
        ambient = None if self.high_precision else ambient_recipe.value
        if self.module_recipe is None:
            return ambient
        return self.module_recipe.resolve(ambient, training=self.training)

    def own_recipe(self, kernel: str) -> ModuleRecipe | None:
        """The layer's own recipe for the GEMMs of one kernel."""
        return dict(self.kernel_recipes).get(kernel, self.module_recipe)

    def recipe_of(self, kernel: str) -> Recipe | None:
        """Recipe of one kernel's GEMMs in the current context."""
        own, ambient = self.own_recipe(kernel), None if self.high_precision else ambient_recipe.value
        return ambient if own is None else own.resolve(ambient, training=self.training)

    def kernel_quantizer(self, kernel: str) -> Quantizer | None:
        """Quantizer of a kernel that is cached, or None if any GEMM of its recipe needs the unquantized kernel."""
        recipe = self.recipe_of(kernel)
        # Forward's GEMM and the input gradient's read the kernel; the third, the kernel gradient's, does not.
        if recipe is not None and any(recipe.override_linear_precision[:2]):
            return None
        return quantizer_for(recipe, "kernel")

    def gemm_state(self, kernel: str) -> GemmState | None:
        """The quantizer state of a kernel's GEMMs, if there is any."""
        return nnx.as_pure(getattr(self, self.kernels[kernel]))

    def new_state(self, recipe: Recipe | None) -> GemmState | None:
        """Fresh state of a kernel's GEMMs under a recipe; None if it has no state."""
        return init_gemm_state(recipe, groups=self.groups)

    def axes_of(self, kernel: str) -> LogicalAxes:
        """Logical axes of a kernel; None for each of its dimensions where its Variable names none."""
        variable = getattr(self, kernel)
        axes = variable.get_metadata().get("logical_axes")
        return (None,) * len(variable.get_value().shape) if axes is None else axes

    def stack_shape(self, kernel: str, owner: nnx.Module | None = None) -> tuple[int, ...]:
        """Sizes of the leading axes that ``nnx.vmap`` added to a kernel; ``owner`` is the module that holds this
        layer."""
        if getattr(self, kernel) is None:
            return ()
        shape = getattr(self, kernel).get_value().shape
        return shape[: len(shape) - len(self.axes_of(kernel))]

    def layer_path(self, path: tuple[Any, ...]) -> tuple[Any, ...]:
        """Path of this layer, which is at ``path`` in its model, in rules and reports."""
        return path

    def quantized(self, kernel: str, value: Array, *, portable: bool = False) -> QuantizedKernel:
        """Return ``value`` quantized by the recipe of a kernel of this layer; see `quantize_kernel`."""
        recipe, axes = self.recipe_of(kernel), self.axes_of(kernel)
        assert recipe is not None
        quantize = functools.partial(
            quantize_kernel, recipe=recipe, kernel_axes=axes, portable=portable, grouped=self.groups is not None
        )

        def of_layers(value: Array, state: GemmState | None) -> QuantizedKernel:
            # Layers stacked by nnx.vmap have a leading axis: each layer's kernel is quantized by itself.
            stacked = value.ndim > len(axes)
            return jax.vmap(of_layers)(value, state) if stacked else quantize(value, state=state)

        return replace(of_layers(value, self.gemm_state(kernel)), shape=value.shape)

    def hold_quantized(self, kernel: str) -> None:
        """Replace a kernel's exact value by its quantized form, in plain arrays."""
        variable = getattr(self, kernel)
        variable.set_value(self.quantized(kernel, variable.get_value(), portable=True))

    def requantized(self, kernel: str, value: Array, old: QuantizedKernel) -> QuantizedKernel:
        """Return ``value`` in the quantized form in which a kernel is stored.

        Raises:
            ValueError: if that belongs to another recipe than the one in the current context.
        """
        recipe = self.recipe_of(kernel)
        if quantizer_for(recipe, "kernel") != old.quantizer:
            raise ValueError(
                f"a kernel of {type(self).__name__} is stored as {old.quantizer}, and the recipe here is {recipe}; "
                "work under the recipe that the state was created with"
            )
        new = self.quantized(kernel, value, portable=True)
        # In the old structure, whose static dtype is the parameter's: the value may be an fp32 master, and another
        # structure would recompile the next step.
        return jax.tree.unflatten(jax.tree.structure(old), jax.tree.leaves(new))

    def linear_weights(
        self, kernel: str, bias: Array | None, is_first_microbatch: bool | None, given: Array | None = None
    ) -> LinearWeights:
        """Return the arrays that an op takes for one kernel: the kernel or its cached form, bias, state, `grad_sink`.

        A kernel cached under another recipe than the call's is ignored.

        Args:
            kernel: name of the kernel.
            bias: bias of the call.
            is_first_microbatch: see the call of a layer.
            given: the kernel that the call was given. None: the layer's own. A layer that has its own quantizes another
                one in each call.

        Raises:
            ValueError: if a cached kernel is requested and there is none.
            TypeError: for an ``is_first_microbatch`` that is not True, False or None.
        """
        first = self.is_first_microbatch if is_first_microbatch is None else is_first_microbatch
        if first is not None:
            check_bool(is_first_microbatch=first)
        state, own = self.gemm_state(kernel), getattr(self, kernel)
        if own is not None and given is not None:
            return LinearWeights(given, bias, state)
        value: Any = given if own is None else own.get_value()
        if own is not None and isinstance(value, QuantizedKernel):
            value = value.of_layer(len(self.axes_of(kernel)))
        cached, grad_sink = self._kept(kernel)
        if first is None or isinstance(value, QuantizedKernel):
            return LinearWeights(value, bias, state, grad_sink)
        quantizer = self.kernel_quantizer(kernel)
        if quantizer is None:
            return LinearWeights(value, bias, state, grad_sink)
        if first:
            cached = self.quantized(kernel, value)
            setattr(self, cache_name(kernel), CachedKernel((cached, None)))
            # Set for one call, as in Megatron's layers: the use of the last kernel resets it, since all kernels belong
            # to one call.
            if is_first_microbatch is None and kernel == tuple(self.kernels)[-1]:
                self.is_first_microbatch = False
        if cached is None:
            raise ValueError(
                f"is_first_microbatch=False and {type(self).__name__} has kept no quantized {kernel}; call it with "
                "is_first_microbatch=True on the first microbatch of a step, or None to keep nothing"
            )
        if cached.quantizer != quantizer:
            return LinearWeights(value, bias, state, grad_sink)
        # The kernel is its own sink: nothing else reads it then, and its gradient is returned as usual.
        sink = value if grad_sink is None else grad_sink
        return LinearWeights(cached.of_layer(len(self.axes_of(kernel))), bias, state, sink)

    def _kept(self, kernel: str) -> tuple[QuantizedKernel | None, Any]:
        """Return the cached form of a kernel and its ``grad_sink``, each None if there is none."""
        cache: Any = getattr(self, cache_name(kernel))
        if cache is None:
            return None, None
        cached, sink = cache.get_value()
        return cached, cache.get_metadata("probe") if cache.has_metadata("probe") else sink


def cache_name(kernel: str) -> str:
    """Return the name of the attribute in which a layer caches the quantized form of ``kernel``.

    >>> cache_name("wi_kernel")
    'wi_kernel_cache'
    """
    return f"{kernel}_cache"


def quantizable_modules(model: nnx.Module) -> list[tuple[str, QuantizableModule]]:
    """Return path and module of every layer of ``model`` that a recipe can quantize, in the order of the paths.

    A path is the attribute names and indices that lead to the layer, joined by dots.

    >>> from jax_te.layers import MultiheadAttention
    >>> [path for path, _ in quantizable_modules(MultiheadAttention(16, 2, rngs=nnx.Rngs(0)))]
    ['proj', 'qkv']
    """
    found = [
        (".".join(map(str, module.layer_path(path))), module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, QuantizableModule)
    ]
    return sorted(found, key=lambda item: natural_order(item[0]))


def natural_order(path: str) -> list[tuple[int, str]]:
    """Return a sorting key for paths that orders layer 2 before layer 10.

    >>> sorted(["layers.10", "layers.2"], key=natural_order)
    ['layers.2', 'layers.10']
    """
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]


def name_modules(model: nnx.Module) -> nnx.Module:
    """Return ``model`` after giving every quantizable layer its path as ``module_name``, for `observe_quantization`.

    >>> from jax_te.layers import MultiheadAttention
    >>> name_modules(MultiheadAttention(16, 2, rngs=nnx.Rngs(0))).qkv.module_name
    'qkv'
    """
    for path, module in quantizable_modules(model):
        module.module_name = path
    return model


def keep_in_high_precision(model: nnx.Module) -> nnx.Module:
    """Return ``model`` with its layers set to ignore ambient recipes, as if inside ``autocast(None)``.

    A `ModuleRecipe` with ``override_nonquantized_autocast`` still does.

    >>> from jax_te.layers import Linear
    >>> keep_in_high_precision(Linear(16, 16, rngs=nnx.Rngs(0))).high_precision
    True
    """
    for _, module in quantizable_modules(model):
        module.high_precision = True
    return model


def quantizable_kernels(model: nnx.Module) -> list[tuple[tuple[Any, ...], QuantizableModule, str]]:
    """Return path in ``nnx.state(model)``, layer and attribute name of every kernel that a recipe can quantize.

    Layers without a kernel of their own (``skip_weight_param_allocation``) are left out.
    """
    return [
        ((*path, kernel), module, kernel)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, QuantizableModule)
        for kernel in module.kernels
        if getattr(module, kernel) is not None
    ]


def given_kernels(model: nnx.Module) -> list[tuple[QuantizableModule, str, Array]]:
    """Return layer, kernel's name and value of every kernel that a module in ``model`` passes to one of its layers.

    Such a module has a method ``given_kernels``: the kernel is its own parameter or derived from one, such as a head's
    that is tied to the embedding.
    """
    methods = [getattr(module, "given_kernels", None) for _, module in nnx.iter_modules(model)]
    return [kernel for method in methods if method is not None for kernel in method()]


def quantize_kernels(model: nnx.Module) -> list[QuantizedKernel | None]:
    """Return every kernel of `quantizable_kernels` and `given_kernels`, quantized by its recipe in this context, or
    None."""
    own = [(module, kernel, getattr(module, kernel).get_value()) for _, module, kernel in quantizable_kernels(model)]
    return [
        None
        if isinstance(value, QuantizedKernel) or module.kernel_quantizer(kernel) is None
        else module.quantized(kernel, value)
        for module, kernel, value in (*own, *given_kernels(model))
    ]


def quantize_parameters(model: nnx.Module, *, only_marked: bool = False) -> nnx.Module:
    """Return ``model``, its kernels stored quantized by their layers' recipes, in place of fp32 or bf16.

    A kernel then takes about one byte a value (half of one under NVFP4), and no call quantizes it again. Its exact
    value is gone: `jax_te.training.create_train_state` with ``fp8_param=True`` keeps fp32 masters. Kernels of layers
    that run in high precision stay as they are.

    Call it under the recipe, ``with autocast(recipe):``.

    Args:
        model: changed in place.
        only_marked: whether only kernels of layers whose own `ModuleRecipe` sets ``fp8_param`` or ``fp4_param`` are
            meant.

    Raises:
        ValueError: for layers of Flax under `quantize_model`, which hold only plain arrays.

    Source: ``transformer_engine.pytorch.quantized_model_init``; Megatron-Core's ``--fp8-param-gather``.

    >>> from jax_te.layers import Linear
    >>> from jax_te.recipe import Float8CurrentScaling, autocast
    >>> with autocast(Float8CurrentScaling()):
    ...     layer = quantize_parameters(Linear(32, 16, rngs=nnx.Rngs(0)))
    >>> layer.kernel.get_value().operand.rowwise.data.dtype
    dtype(float8_e4m3fn)
    """
    if not only_marked and any(module.of_flax for _, module in quantizable_modules(model)):
        raise ValueError(
            "layers of Flax hold their kernels as arrays, which cannot be stored quantized: leave fp8_param out, or "
            "build the model of jax_te's layers"
        )
    for _, module, kernel in quantizable_kernels(model):
        own, value = module.own_recipe(kernel), getattr(module, kernel).get_value()
        if only_marked and (own is None or not own.holds_kernels):
            continue
        if not isinstance(value, QuantizedKernel) and quantizer_for(module.recipe_of(kernel), "kernel") is not None:
            module.hold_quantized(kernel)
    return model


def use_cached_kernels(model: nnx.Module, kept: list[QuantizedKernel | None], gradients: list[Array | None]) -> None:
    """Give every kernel of `quantizable_kernels` its quantized form and the place for its gradient, and use them.

    ``kept`` may continue with the kernels of `given_kernels`, in the order of `quantize_kernels`. The gradient of such
    a kernel goes to the array that the call is given.
    """
    layers = [(module, kernel) for _, module, kernel in quantizable_kernels(model)]
    if len(kept) > len(layers):
        layers += [(module, kernel) for module, kernel, _ in given_kernels(model)]
        gradients = gradients + [None] * (len(layers) - len(gradients))
    for (module, kernel), quantized, gradient in zip(layers, kept, gradients, strict=True):
        if quantized is not None or gradient is not None:
            setattr(module, cache_name(kernel), CachedKernel((quantized, gradient)))
        if quantized is not None:
            module.is_first_microbatch = False


def set_grad_sinks(model: nnx.Module, sinks: dict[Any, Any]) -> None:
    """Set the sinks of kernels of `quantizable_kernels` by their paths; cached kernels stay."""
    for path, module, kernel in quantizable_kernels(model):
        name, sink = cache_name(kernel), sinks.get(path)
        if sink is None:
            continue
        cache = getattr(module, name)
        # The cached kernel is unchanged, since devices may be unable to run an op on a new form.
        cached = None if cache is None else cache.get_value()[0]
        if isinstance(sink, Probe):
            # In the graph definition: layers with different probes differ, so that no loop runs them as one.
            setattr(module, name, CachedKernel((cached, None), probe=sink))
            if cached is None:
                module.is_first_microbatch = None
        else:
            setattr(module, name, CachedKernel((cached, sink)))


def drop_cached_kernels(model: nnx.Module) -> None:
    """Remove the quantized kernels that layers keep between microbatches, e.g. because the parameters have changed.

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
        for kernel in module.kernels:
            setattr(module, cache_name(kernel), nnx.data(None))
