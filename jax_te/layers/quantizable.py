"""The base of layers whose GEMMs a recipe can quantize: their recipe, quantizer states and cached kernels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal

import jax
from flax import nnx

from jax_te._validation import check_bool, warn_caller
from jax_te.layers.mode import TrainingMode
from jax_te.layers.parameters import StepState
from jax_te.ops import LinearWeights, quantize_kernel
from jax_te.quantize import GemmState, QuantizedKernel, Quantizer, init_gemm_state, quantizer_for, quantizer_variables
from jax_te.recipe import ModuleRecipe, Recipe, ambient_recipe, inside_autocast, own_recipe
from jax_te.remat import on_failure_of_call
from jax_te.typing import Array, LogicalAxes

CacheMode = Literal["off", "fill", "read"]
"""Use of the kernel cache by a call, see `QuantizableModule`."""


class CachedKernel(StepState):
    """NNX Variable: the quantized forms that a layer uses in place of its kernels, by the kernels' names."""


class GradSinks(StepState):
    """NNX Variable: sinks that get the gradients of a layer's kernels, by the kernels' names; see `LinearWeights`."""


_states_advance = jax.make_user_context(False)
"""Whether gradients are computed here with which quantizer states advance, see `states_advance`."""


@contextlib.contextmanager
def states_advance() -> Iterator[None]:
    """Yield where gradients of a model are computed, and with them the next quantizer states.

    A layer that has states of delayed scaling and that no recipe reaches then warns: it trains in high precision, which
    a user who forgot `autocast` around a step would learn from its speed alone.
    """
    with _states_advance(True):
        yield


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

    def _warn_without_ambient_recipe(self, name: str) -> None:
        """Warn that scales of delayed scaling, which the layer has, are not used for want of an ambient recipe.

        See `states_advance`. It is silent where that is meant: inside of ``autocast(None)``, in high precision, and in
        evaluation, as of a teacher.
        """
        if _states_advance.value and self.training and not (inside_autocast() or self.high_precision):
            warn_caller(
                f"{name} has scales of delayed scaling, and no recipe is in use here, so that it trains in high "
                "precision: train inside of `with autocast(recipe):`, or, if that is meant, of `with autocast(None):`"
            )


class QuantizableModule(RecipeModule):
    """Base of the layers with linear operations.

    Class attributes:
        kernels: name of each kernel -> name of its quantizer state.

    Attributes:
        high_precision: see `RecipeModule`.
        kernel_recipes: recipes of single kernels in place of ``module_recipe``: pairs of a kernel's name and a
            `ModuleRecipe` or None.
        deterministic: whether to evaluate instead of training (``model.eval()`` sets it): it selects one of
            ``module_recipe``'s two recipes.
        cache_mode: use of the kernel cache by calls that do not give ``is_first_microbatch``. ``"off"``: none;
            ``"fill"``: quantize and cache the kernels that are not cached; ``"read"``: use the cached kernels alone.
        kernel_cache: the layer's cached kernels, state that calls write; None: none.
        grad_sinks: sinks of the kernels' gradients, in the copy of a model that is differentiated; None: none.
        module_name: the layer's path in its model, as `name_modules` gives it; used where tensors are observed.
        adapted: whether it is the ``base`` of a `LoRA`, which has its place in the model.
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

    @property
    def reads_later_tokens(self) -> bool:
        """Whether a token's results depend on tokens behind it, as under a recipe of the layer's own, whose scales may
        be those of all tokens of a call."""
        return self.module_recipe is not None or bool(self.kernel_recipes)

    def _init_quantization(self) -> None:
        self.high_precision = False
        self.adapted = False
        self.module_recipe = None
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
    def module_recipe(self) -> ModuleRecipe | None:
        """The layer's own recipe, see `ModuleRecipe`; None: the ambient one.

        A plain recipe that is set becomes a `ModuleRecipe` that overrides any ambient one.

        >>> from jax_te.layers import Linear
        >>> from jax_te.recipe import Float8CurrentScaling
        >>> layer = Linear(16, 16, rngs=nnx.Rngs(0))
        >>> layer.module_recipe = Float8CurrentScaling()
        >>> layer.module_recipe.training
        Float8CurrentScaling()
        """
        return self._module_recipe

    @module_recipe.setter
    def module_recipe(self, recipe: Recipe | ModuleRecipe | None) -> None:
        self._module_recipe = None if recipe is None else own_recipe(recipe)

    @property
    def recipe(self) -> Recipe | None:
        """Recipe of a call in the current context."""
        ambient = self.usable_recipe
        if self.module_recipe is None:
            return ambient
        return self.module_recipe.resolve(ambient, training=self.training)

    def own_recipe(self, kernel: str) -> ModuleRecipe | None:
        """Return the layer's own recipe for the GEMMs of one kernel."""
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
        """Return the quantizer state of a kernel's GEMMs, if there is any."""
        return nnx.as_pure(getattr(self, self.kernels[kernel]))

    def warn_of_unused_state(self, kernel: str) -> None:
        """Warn if a call in the current context uses no state of a kernel that has one; see `states_advance`."""
        own = self.own_recipe(kernel)
        # Own recipes that are in effect without an ambient one, or that are high precision under one, are meant.
        decides = own is not None and (
            own.overrides(quantized=False, training=True)
            or (own.training is None and own.overrides(quantized=True, training=True))
        )
        if self.gemm_state(kernel) is not None and not decides:
            self._warn_without_ambient_recipe(self.module_name or type(self).__name__)

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
        """Return the logical axes of a kernel; None for each of its dimensions where its Variable names none."""
        variable = getattr(self, kernel)
        axes = variable.get_metadata().get("logical_axes")
        return (None,) * len(variable.get_value().shape) if axes is None else axes

    def stack_shape(self, kernel: str, owner: nnx.Module | None = None) -> tuple[int, ...]:
        """Return the sizes of the leading axes that ``nnx.vmap`` added to a kernel.

        Args:
            kernel: name of the kernel.
            owner: module that holds this layer.
        """
        if getattr(self, kernel) is None:
            return ()
        shape = getattr(self, kernel).get_value().shape
        return shape[: len(shape) - len(self.axes_of(kernel))]

    def layer_path(self, path: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the path of this layer, which is at ``path`` in its model, in rules and reports.

        It is that of its adapter, if it has one, so that rules hold for it as before.
        """
        return path[:-1] if self.adapted and path[-1:] == ("base",) else path

    def quantized(self, kernel: str, value: Array, *, portable: bool = False) -> QuantizedKernel:
        """Return ``value`` quantized by the recipe of a kernel of this layer; see `quantize_kernel`.

        Raises:
            ValueError: if no recipe is in force for the kernel.
        """
        recipe, axes = self.recipe_of(kernel), self.axes_of(kernel)
        if recipe is None:
            raise ValueError(
                f"no recipe quantizes the {kernel} of {type(self).__name__} here: call this inside of "
                "jax_te.autocast(recipe), or give the layer a recipe of its own"
            )
        quantize = functools.partial(
            quantize_kernel,
            recipe=recipe,
            kernel_axes=axes,
            portable=portable,
            grouped=self.groups is not None,
            on_devices=self.rows_on_devices,
        )

        def of_layers(value: Array, state: GemmState | None) -> QuantizedKernel:
            # Layers stacked by nnx.vmap have a leading axis: each layer's kernel is quantized by itself, one after the
            # other, since Transformer Engine's kernels cannot be mapped.
            if value.ndim == len(axes):
                return quantize(value, state=state)
            return jax.lax.map(lambda each: of_layers(*each), (value, state))

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
        self.warn_of_unused_state(kernel)
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
            if mode == "read":
                raise ValueError(
                    f"is_first_microbatch=False and {type(self).__name__} has kept no quantized {kernel}; call it with "
                    "is_first_microbatch=True on the first microbatch of a step, or None to keep nothing"
                )
            cached = self._cache_kernel(kernel, value)
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

    def _cache_kernel(self, kernel: str, value: Array) -> QuantizedKernel:
        """Quantize and cache a kernel, and return its cached form."""
        others = {} if self.kernel_cache is None else self.kernel_cache.get_value()
        cached = self.quantized(kernel, value)
        before = self.kernel_cache
        # A new Variable, since the one before may belong to another trace.
        self.kernel_cache = CachedKernel({**others, kernel: cached})
        on_failure_of_call(functools.partial(setattr, self, "kernel_cache", nnx.data(before)))
        return cached


def frozen_weights(weights: LinearWeights) -> LinearWeights:
    """Return the weights of a frozen layer, whose parameters no gradient reaches; none is computed for the kernel.

    The state is as before: its next value leaves backward as its gradient, also of a frozen layer.

    >>> frozen_weights(LinearWeights(jnp.ones((16, 32)))).kernel.shape
    (16, 32)
    """
    kernel, bias = jax.lax.stop_gradient((weights.kernel, weights.bias))
    return LinearWeights(kernel, bias, weights.state)


def _cache_mode(is_first_microbatch: bool | None) -> CacheMode:
    """Return the cache mode that an argument or attribute of this name stands for."""
    if is_first_microbatch is None:
        return "off"
    return "fill" if is_first_microbatch else "read"
