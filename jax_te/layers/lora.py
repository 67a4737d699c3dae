"""Low-rank adaptation of linear layers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import brief, check_positive, checked
from jax_te.config import normal_init
from jax_te.layers.kernel_cache import drop_cached_kernels
from jax_te.layers.layernorm_mlp import LayerNormMLP
from jax_te.layers.linear import Linear
from jax_te.layers.parameters import init_of_each, parameter
from jax_te.layers.results import map_output
from jax_te.ops import LinearOptions, dense
from jax_te.quantize import QuantizedKernel
from jax_te.sharding import auto_region, leading_axes
from jax_te.typing import Array, DTypeLike, Initializer, LogicalAxes, PyTree, Words

_BASE = Words(
    "a Linear, LayerNormLinear or LayerNormMLP of jax_te",
    "wrap those inside of it, such as layer.self_attention.qkv; flax.nnx.LoRA is for other layers",
)


@checked
class LoRA(nnx.Module):
    """``y = base(x) + alpha / r * (z @ lora_a) @ lora_b``, where ``z`` is the GEMM input of the base's kernel.

    That is ``x`` for a `Linear` and the norm's output for a `LayerNormLinear`. A `LayerNormMLP` gets an adapter for
    each of its two kernels: ``wi_lora_a``, ``wi_lora_b``, ``wo_lora_a`` and ``wo_lora_b``. The adapted layer is called
    like its base and returns what that returns, so that it takes the base's place in a model::

        layer.self_attention.qkv = LoRA(layer.self_attention.qkv, 8, rngs=rngs)
        layer.layernorm_mlp = LoRA(layer.layernorm_mlp, 8, rngs=rngs)

    The base runs under its recipe and is no longer trained: no gradient reaches its parameters, nor a ``weight`` and
    ``bias`` that a call gives in their place, and the GEMM of its kernel's gradient is omitted. So an adapted head that
    is tied to the embedding leaves its table the gradient of the embedding alone. The two products of the adapter are
    computed in the dtype of ``x`` under every recipe: the rank ``r`` is small against FP8's blocks, and need not be a
    multiple of a block size.

    Args:
        base: a `Linear`, `LayerNormLinear` or `LayerNormMLP`; taken over, not copied. Its quantizer states go on being
            updated.
        rank: ``r``.
        alpha: numerator of the scale. None: ``r``, so that the scale is 1.
        components: numbers of consecutive components of a kernel ``[k, c, n]`` that have a ``lora_a`` of their own, as
            separate projections have: ``(r, 1, 1)`` of ``[h, r + 2, g·d]`` for queries, keys and values, ``(1, 1)`` for
            gate and up. ``lora_a`` is then ``[k, parts · r]``. None: one ``lora_a`` for all components.
        freeze_base: whether to set ``base.frozen``. False: both are trained.
        init_method: initializer of ``lora_a [k, r]``. None: N(0, 1 / k). ``lora_b [r, *n]`` starts as zeros, so that
            ``y = base(x)`` at first.
        params_dtype: dtype of both.
        rngs: random streams, of which ``params`` draws ``lora_a``.

    Both are ``nnx.LoRAParam``, a kind of ``nnx.Param``: the filter for ``nnx.state``, ``nnx.DiffState`` and
    ``nnx.Optimizer``. With `jax_te.training.make_train_step`, keep weight decay and optimizer state off the others with
    `lora_labels`.

    Raises:
        TypeError: for another base.
        ValueError: for a rank that is not positive, or components that are not the kernel's; see also the base.

    Source: Hu et al. 2021, "LoRA: low-rank adaptation of large language models"; ``enable_low_rank_adaptation`` of
    ``transformer_engine.jax.flax.DenseGeneral``.

    >>> layer = LoRA(Linear(16, 32, rngs=nnx.Rngs(0)), 4, rngs=nnx.Rngs(1))
    >>> layer(jnp.ones((2, 16))).shape, layer.lora_a.shape, layer.lora_b.shape
    ((2, 32), (16, 4), (4, 32))
    """

    components: tuple[int, ...] | None = None

    def __init__(
        self,
        base: Annotated[Linear | LayerNormMLP, _BASE],
        rank: int,
        *,
        alpha: float | None = None,
        components: tuple[int, ...] | None = None,
        freeze_base: bool = True,
        init_method: Initializer | None = None,
        params_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        _check_components(base, components)
        self.components = components
        self._adapt(base, rank, alpha, freeze_base, init_method, params_dtype, rngs)

    def _adapt(
        self,
        base: Any,
        rank: int,
        alpha: float | None,
        freeze_base: bool,
        init_method: Initializer | None,
        params_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        """Create an adapter for each of the base's kernels, for experts' kernels one per expert; then take the base."""
        check_positive(rank=rank)
        self.scale = 1.0 if alpha is None else alpha / rank
        for kernel in base.kernels:
            own = _kernel_shape(base, kernel)
            experts = 0 if base.groups is None else 1
            (*lead, k), n = own[: experts + 1], own[experts + 1 :]
            (*lead_axes, inner), outer = base.axes_of(kernel)[: experts + 1], base.axes_of(kernel)[experts + 1 :]
            init = normal_init(1.0 / math.sqrt(k)) if init_method is None else init_method
            init = functools.partial(init_of_each, init) if experts else init
            a, b = _names(kernel)
            parts = len(self._parts(len(own)))
            setattr(self, a, _adapter(init, rngs, (*lead, k, parts * rank), params_dtype, (*lead_axes, inner, None)))
            zeros = jax.nn.initializers.zeros
            setattr(self, b, _adapter(zeros, rngs, (*lead, rank, *n), params_dtype, (*lead_axes, None, *outer)))
        # The base is the caller's, so it changes last: a refused adapter leaves it trained as before.
        self.base = base
        self.base.frozen, self.base.adapted = freeze_base, True

    def __call__(
        self,
        x: Array,
        weight: Array | None = None,
        bias: Array | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Any:
        """Return the base's result for the same arguments, with the adapters' products added.

        Args:
            x: ``[..., k]``.
            weight, bias: see `Linear`, which alone takes them. No gradient reaches them while the base is frozen.
            is_first_microbatch: see `Linear`.

        Raises:
            ValueError: for ``weight`` or ``bias`` given to a `LayerNormMLP`.
        """
        with jax.named_scope("LoRA"):
            options = {"weight": weight, "bias": bias}
            given = {name: value for name, value in options.items() if value is not None}
            if isinstance(self.base, LayerNormMLP):
                if given:
                    raise ValueError(f"a LayerNormMLP takes no {' nor '.join(given)}; give is_first_microbatch by name")
                wi, wo = (functools.partial(self._update, kernel) for kernel in self.base.kernels)
                return self.base(x, is_first_microbatch, adapters=(wi, wo))
            result = self.base(x, **given, is_first_microbatch=is_first_microbatch)
            return map_output(
                lambda y: y + self._update("kernel", self.base.operand(x), self.base.output_axes(x)), result
            )

    def _parts(self, axes: int) -> list[slice]:
        """Return the components that each ``lora_a`` of a kernel with so many axes is for; all, if it has only one."""
        if self.components is None or axes != 3:
            return [slice(None)]
        ends = itertools.accumulate(self.components)
        return [slice(end - size, end) for size, end in zip(self.components, ends, strict=True)]

    def _update(self, kernel: str, z: Array, out_axes: LogicalAxes) -> Array:
        """Return an adapter's product with ``z``."""
        a, b = (getattr(self, name)[...] for name in _names(kernel))
        (inner, *outer) = self.base.axes_of(kernel)
        down = LinearOptions(out_axes=(*leading_axes(z), None), kernel_axes=(inner, None))
        up = LinearOptions(out_axes=out_axes, kernel_axes=(None, *outer))
        # No recipe in either call: FP8 GEMMs need sizes that are multiples of 16, and a rank is often smaller.
        low, parts = dense(z, a, options=down), self._parts(b.ndim)
        if len(parts) == 1:
            return dense(low, b, options=up) * self.scale
        each = jnp.split(low, len(parts), axis=-1)
        products = [dense(x, b[:, part], options=up) for x, part in zip(each, parts, strict=True)]
        return auto_region(lambda *parts: jnp.concatenate(parts, axis=-2), out_axes)(*products) * self.scale

    def merge(self) -> Any:
        """Return the base, with ``alpha / r * lora_a @ lora_b`` added to each kernel; it is trained again.

        ``lora_b`` becomes zero, so that this layer's output stays the same. Cached quantized kernels are dropped.

        Raises:
            ValueError: if the base has no kernel of its own, or holds it quantized.
        """
        kernels = {name: getattr(self.base, name) for name in self.base.kernels}
        for kernel in kernels.values():
            if kernel is None or isinstance(kernel.get_value(), QuantizedKernel):
                state = "has no kernel of its own" if kernel is None else "holds its kernel quantized"
                raise ValueError(
                    f"the base {state}, so that there is nothing to add the adapter to; go on calling LoRA"
                )
        for name, kernel in kernels.items():
            lora_a, lora_b = (getattr(self, each) for each in _names(name))
            a, b = (variable.get_value().astype(jnp.float32) for variable in (lora_a, lora_b))
            exact = kernel.get_value()
            # Added in fp32 and rounded once.
            update = self._update_of(a.ndim)(a, b)
            merged = exact.astype(jnp.float32) + self.scale * update
            kernel.set_value(merged.astype(exact.dtype))
            lora_b.set_value(jnp.zeros_like(lora_b.get_value()))
        drop_cached_kernels(self.base)
        self.base.frozen = self.base.adapted = False
        return self.base

    def _update_of(self, axes: int) -> Callable[[Array, Array], Array]:
        """Return a function of a kernel's two matrices, the first with so many axes, that returns their product."""
        # "highest", because a GPU's default for fp32 products is TensorFloat-32.
        multiply = functools.partial(jnp.tensordot, axes=1, precision="highest")
        multiply = multiply if self.base.groups is None else jax.vmap(multiply)

        def product(a: Array, b: Array) -> Array:
            parts = self._parts(b.ndim)
            if len(parts) == 1:
                return multiply(a, b)
            each = zip(jnp.split(a, len(parts), axis=-1), parts, strict=True)
            return jnp.concatenate([multiply(x, b[:, part]) for x, part in each], axis=1)

        # Layers that nnx.vmap stacked have axes in front.
        for _ in range(axes - (2 if self.base.groups is None else 3)):
            product = jax.vmap(product)
        return product


def _kernel_shape(base: Any, kernel: str) -> tuple[int, ...]:
    # A Linear may have no kernel of its own, so that its shape is an attribute.
    shape: tuple[int, ...] = getattr(base, "kernel_shape", None) or getattr(base, kernel).get_value().shape
    return shape


def _check_components(base: Any, components: tuple[int, ...] | None) -> None:
    if components is None:
        return
    check_positive(**{f"components[{i}]": size for i, size in enumerate(components)})
    shapes = [_kernel_shape(base, kernel) for kernel in base.kernels]
    if sum(components) not in [shape[1] for shape in shapes if len(shape) == 3]:
        raise ValueError(
            f"components={components} are {sum(components)}, and the base's kernels are {', '.join(map(str, shapes))}: "
            "they must be those of a kernel [k, c, n]; give numbers that sum to c, or leave them out"
        )


def _names(kernel: str) -> tuple[str, str]:
    """Return the names of a kernel's two adapter matrices."""
    prefix = kernel.removesuffix("kernel")
    return f"{prefix}lora_a", f"{prefix}lora_b"


def _adapter(
    init: Initializer, rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike, axes: LogicalAxes
) -> nnx.LoRAParam:
    # Filters and `lora_labels` select it by type, not by name.
    return nnx.LoRAParam(parameter(init, rngs, shape, dtype, axes).get_value(), logical_axes=axes)


def without_adapter(layer: Any) -> Any:
    """Return the base of an adapted layer, and any other layer as it is.

    An adapter is a layer with an attribute ``base``: a `LoRA`, or a class of your own that is called as its base is.

    >>> layer = Linear(4, 4, rngs=nnx.Rngs(0))
    >>> without_adapter(LoRA(layer, 2, rngs=nnx.Rngs(1))) is without_adapter(layer) is layer
    True
    """
    return getattr(layer, "base", layer)


def lora_labels(params: PyTree) -> PyTree:
    """Return ``"lora"`` for parameters of adapters, ``"frozen"`` for the others; for ``optax.multi_transform``.

    Args:
        params: a state of Variables, such as ``nnx.state(model, nnx.Param)`` or what an optimizer is given by
            `jax_te.training.make_train_step`.

    >>> import optax
    >>> tx = optax.multi_transform({"lora": optax.adamw(1e-3), "frozen": optax.set_to_zero()}, lora_labels)
    >>> layer = LoRA(Linear(4, 4, bias=False, rngs=nnx.Rngs(0)), 2, rngs=nnx.Rngs(1))
    >>> nnx.to_pure_dict(lora_labels(nnx.state(layer, nnx.Param)))
    {'base': {'kernel': 'frozen'}, 'lora_a': 'lora', 'lora_b': 'lora'}
    """
    for node in jax.tree.leaves(params, is_leaf=_is_variable):
        if not _is_variable(node):
            raise TypeError(f"params must be a state of Variables, nnx.state(model, nnx.Param), got {brief(node)}")
    return jax.tree.map(
        lambda variable: variable.replace("lora" if isinstance(variable, nnx.LoRAParam) else "frozen"),
        params,
        is_leaf=_is_variable,
    )


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
