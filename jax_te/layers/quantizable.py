"""The base of layers whose GEMMs a recipe can quantize: their recipe, quantizer states and cached kernels."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any, ClassVar, Literal

import jax
from flax import nnx

from jax_te._validation import check_bool, checked
from jax_te.config import TransformerConfig
from jax_te.layers.mode import TrainingMode
from jax_te.layers.parameters import StepState
from jax_te.ops import LinearWeights, quantize_kernel
from jax_te.quantize import GemmState, QuantizedKernel, Quantizer, init_gemm_state, quantizer_for, quantizer_variables
from jax_te.recipe import ModuleRecipe, Recipe, ambient_recipe, autocast
from jax_te.remat import undo_if_raised
from jax_te.typing import Array, LogicalAxes

CacheMode = Literal["off", "fill", "read"]
"""Use of the kernel cache by a call, see `QuantizableModule`."""


class CachedKernel(StepState):
    """NNX Variable: the quantized forms that a layer uses in place of its kernels, by the kernels' names."""


class GradSinks(StepState):
    """NNX Variable: sinks that get the gradients of a layer's kernels, by the kernels' names; see `LinearWeights`."""


class RecipeModule(TrainingMode):
    """Base of the layers that compute under a recipe: those with linear operations, and the core of attention.

    Attributes:
        high_precision: whether to take no ambient recipe, as if inside ``autocast(None)``: for a model's first and last
            layers.
    """

    # On the class, as `deterministic`.
    high_precision: bool = False

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the attributes that hold the layer's quantizer states."""
        raise NotImplementedError

    @property
    def usable_recipe(self) -> Recipe | None:
        """The ambient recipe; None for a layer in high precision."""
        return None if self.high_precision else ambient_recipe.value


class QuantizableModule(RecipeModule):
    """Base of the layers with linear operations.

    Class attributes:
        kernels: name of each kernel -> name of its quantizer state.

    Attributes:
        high_precision: see `RecipeModule`.
        module_recipe: the layer's own recipe, see `ModuleRecipe`; None: the ambient one.
        kernel_recipes: recipes of single kernels in place of ``module_recipe``: pairs of a kernel's name and a
            `ModuleRecipe` or None.
        deterministic: whether to evaluate instead of training (``model.eval()`` sets it): it selects one of
            ``module_recipe``'s two recipes.
        cache_mode: use of the kernel cache by calls that do not give ``is_first_microbatch``. ``"off"``: none;
            ``"fill"``: quantize and cache the kernels that are not cached; ``"read"``: use the cached kernels alone.
        kernel_cache: the layer's cached kernels, state that calls write; None: none.
        grad_sinks: sinks of the kernels' gradients, in the copy of a model that is differentiated; None: none.
        module_name: the layer's path in its model, as `name_modules` gives it; used where tensors are observed.
    """

    kernels: ClassVar[dict[str, str]] = {}
    of_flax: ClassVar[bool] = False
    """Whether layers of Flax hold a module of this class, and the kernel that it quantizes."""
    groups: int | None = None
    """Number of kernels in each array ``[e, k, *n]``, which a recipe quantizes each by itself; None: the array is one.
    """

    @property
    def rows_on_devices(self) -> bool:
        """Whether calls of several groups have rows that are placed on a mesh, so that devices quantize their own
        kernels."""
        return False

    @property
    def state_names(self) -> tuple[str, ...]:
        return tuple(self.kernels.values())

    def _init_quantization(self) -> None:
        self.high_precision = False
        self.module_recipe: ModuleRecipe | None = None
        self.kernel_recipes: tuple[tuple[str, ModuleRecipe | None], ...] = ()
        self.cache_mode: CacheMode = "off"
        self.module_name: str | None = None
        self.kernel_cache: CachedKernel | None = nnx.data(None)
        self.grad_sinks: GradSinks | None = nnx.data(None)
        for kernel, quantizers in self.kernels.items():
            setattr(self, quantizers, nnx.data(self.state_variables(kernel, self.new_state(ambient_recipe.value))))

    @property
    def is_first_microbatch(self) -> bool | None:
        """Default of the call's argument.

        - None: cache no kernel.
        - True: no kernel is cached yet; a call quantizes and caches those that it uses.
        - False: use the cached kernels.

        Set it to True before the first microbatch of a step, which drops the kernels of the step before. It reads as
        False once a call has cached kernels. So it is a view of the state ``kernel_cache``, and goes where the state
        goes: under ``nnx.jit`` it changes as in an eager call, and a function under ``jax.jit`` that does not return
        the module's state leaves both as they were.

        >>> from jax_te.layers import Linear
        >>> from jax_te.recipe import Float8CurrentScaling, autocast
        >>> layer = Linear(16, 16, rngs=nnx.Rngs(0))
        >>> layer.is_first_microbatch = True
        >>> with autocast(Float8CurrentScaling()):
        ...     _ = layer(jnp.ones((16, 16)))
        >>> layer.is_first_microbatch
        False
        """
        if self.cache_mode == "off":
            return None
        return self.cache_mode == "fill" and self.kernel_cache is None

    @is_first_microbatch.setter
    def is_first_microbatch(self, first: bool | None) -> None:
        if first is not None:
            check_bool(is_first_microbatch=first)
        self.cache_mode = _cache_mode(first)
        if first:
            self.kernel_cache = nnx.data(None)

    @property
    def recipe(self) -> Recipe | None:
        """Recipe of a call in the current context."""
        ambient = self.usable_recipe
        if self.module_recipe is None:
            return ambient
        return self.module_recipe.resolve(ambient, training=self.training)

    def own_recipe(self, kernel: str) -> ModuleRecipe | None:
        """The layer's own recipe for the GEMMs of one kernel."""
        return dict(self.kernel_recipes).get(kernel, self.module_recipe)

    def recipe_of(self, kernel: str) -> Recipe | None:
        """Recipe of one kernel's GEMMs in the current context."""
        own, ambient = self.own_recipe(kernel), self.usable_recipe
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

    def state_variables(self, kernel: str, state: GemmState | None, *, stack: int = 0) -> Any:
        """Return the state of a kernel's GEMMs in Variables; that of groups is sharded as the kernel's first axis.

        Args:
            kernel: name of the kernel.
            state: the state.
            stack: number of axes in front, of a stack of layers.
        """
        # The drop-in of an einsum is given its kernel in each call, and holds none.
        grouped = self.groups is not None and getattr(self, kernel, None) is not None
        return quantizer_variables(state, self.axes_of(kernel)[0] if grouped else None, stack=stack)

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
            quantize_kernel,
            recipe=recipe,
            kernel_axes=axes,
            portable=portable,
            grouped=self.groups is not None,
            on_devices=self.rows_on_devices,
        )

        def of_layers(value: Array, state: GemmState | None) -> QuantizedKernel:
            # Layers stacked by nnx.vmap have a leading axis: each layer's kernel is quantized by itself.
            stacked = value.ndim > len(axes)
            return jax.vmap(of_layers)(value, state) if stacked else quantize(value, state=state)

        return replace(of_layers(value, self.gemm_state(kernel)), shape=value.shape)

    def stored_form(self, kernel: str) -> QuantizedKernel:
        """Return the quantized form, in plain arrays, in which a kernel is stored in place of its exact value."""
        return self.quantized(kernel, getattr(self, kernel).get_value(), portable=True)

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

        Args:
            kernel: name of the kernel.
            bias: bias of the call.
            is_first_microbatch: see the call of a layer.
            given: the kernel that the call was given. None: the layer's own. A layer that has its own quantizes another
                one in each call.

        Raises:
            ValueError: if a cached kernel is requested and there is none, or one of another recipe.
            TypeError: for an ``is_first_microbatch`` that is not True, False or None.
        """
        if is_first_microbatch is not None:
            check_bool(is_first_microbatch=is_first_microbatch)
        mode = self.cache_mode if is_first_microbatch is None else _cache_mode(is_first_microbatch)
        state, own = self.gemm_state(kernel), getattr(self, kernel)
        if own is not None and given is not None:
            return LinearWeights(given, bias, state)
        value: Any = given if own is None else own.get_value()
        if own is not None and isinstance(value, QuantizedKernel):
            value = value.of_layer(len(self.axes_of(kernel)))
        sink = None if self.grad_sinks is None else self.grad_sinks.get_value().get(kernel)
        exact = LinearWeights(value, bias, state, sink)
        if mode == "off" or isinstance(value, QuantizedKernel):
            return exact
        quantizer = self.kernel_quantizer(kernel)
        if quantizer is None:
            return exact
        # A call that says itself that it is the first replaces what is cached, of an earlier step.
        cached = None if is_first_microbatch else self._cached_kernel(kernel, quantizer)
        if cached is None:
            cached = self._cache_kernel(kernel, value, mode)
        # The kernel is its own sink: nothing else reads it then, and its gradient is returned as usual.
        sink = value if sink is None else sink
        return LinearWeights(cached.of_layer(len(self.axes_of(kernel))), bias, state, sink)

    def _cached_kernel(self, kernel: str, quantizer: Quantizer) -> QuantizedKernel | None:
        """Return the cached form of a kernel; None if there is none."""
        cached = None if self.kernel_cache is None else self.kernel_cache.get_value().get(kernel)
        if cached is not None and cached.quantizer != quantizer:
            raise ValueError(
                f"the cached {kernel} of {type(self).__name__} was quantized with {cached.quantizer}, and this call's "
                f"recipe needs {quantizer}; call it with is_first_microbatch=True under this recipe, or None to "
                "quantize it in the call"
            )
        return cached

    def _cache_kernel(self, kernel: str, value: Array, mode: CacheMode) -> QuantizedKernel:
        """Quantize and cache a kernel, and return it, unless calls are to use cached kernels alone."""
        if mode == "read":
            raise ValueError(
                f"is_first_microbatch=False and {type(self).__name__} has kept no quantized {kernel}; call it with "
                "is_first_microbatch=True on the first microbatch of a step, or None to keep nothing"
            )
        others = {} if self.kernel_cache is None else self.kernel_cache.get_value()
        cached = self.quantized(kernel, value)
        before = self.kernel_cache
        # A new Variable, since the one before may belong to another trace.
        self.kernel_cache = CachedKernel({**others, kernel: cached})
        undo_if_raised(functools.partial(setattr, self, "kernel_cache", nnx.data(before)))
        return cached


def _cache_mode(is_first_microbatch: bool | None) -> CacheMode:
    """Return the cache mode that an argument or attribute of this name stands for."""
    if is_first_microbatch is None:
        return "off"
    return "fill" if is_first_microbatch else "read"


@checked
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
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.split(".")]


@checked
def name_modules(model: nnx.Module) -> nnx.Module:
    """Return ``model`` after giving every quantizable layer its path as ``module_name``, for `observe_quantization`.

    >>> from jax_te.layers import MultiheadAttention
    >>> name_modules(MultiheadAttention(16, 2, rngs=nnx.Rngs(0))).qkv.module_name
    'qkv'
    """
    for path, module in quantizable_modules(model):
        module.module_name = path
    return model


def precision_while_building(config: TransformerConfig, number: int) -> contextlib.AbstractContextManager[Any]:
    """Return the context for building layer ``number``, from 0: without a recipe if it stays in high precision.

    It then has no quantizer state, which no call would update.
    """
    return autocast(None) if config.in_high_precision(number) else contextlib.nullcontext()


@checked
def keep_in_high_precision(model: nnx.Module) -> nnx.Module:
    """Return ``model`` with its layers set to ignore ambient recipes, as if inside ``autocast(None)``.

    A `ModuleRecipe` with ``override_nonquantized_autocast`` still does.

    >>> from jax_te.layers import Linear
    >>> keep_in_high_precision(Linear(16, 16, rngs=nnx.Rngs(0))).high_precision
    True
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, RecipeModule):
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


class GivesKernels(nnx.Module):
    """Base of modules that pass a kernel to one of their layers in each call: a parameter of their own, or derived from
    one, such as a head's that is tied to the embedding."""

    def given_kernels(self) -> list[tuple[QuantizableModule, str, Array]]:
        """Return the layers that are given a kernel in calls, the kernel's name there and its value."""
        raise NotImplementedError


def given_kernels(model: nnx.Module) -> list[tuple[QuantizableModule, str, Array]]:
    """Return layer, kernel's name and value of every kernel that a `GivesKernels` in ``model`` passes to a layer."""
    givers = [module for _, module in nnx.iter_modules(model) if isinstance(module, GivesKernels)]
    return [kernel for giver in givers for kernel in giver.given_kernels()]


@checked
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
        QuantizerStateError: for a recipe with state, if a layer was built without it.

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
    stored = []  # all before one is set: a kernel that cannot be quantized leaves the model as it was
    for _, module, kernel in quantizable_kernels(model):
        own, value = module.own_recipe(kernel), getattr(module, kernel).get_value()
        if only_marked and (own is None or not own.holds_kernels):
            continue
        if not isinstance(value, QuantizedKernel) and quantizer_for(module.recipe_of(kernel), "kernel") is not None:
            stored.append((getattr(module, kernel), module.stored_form(kernel)))
    for variable, form in stored:
        variable.set_value(form)
    return model
