"""Quantized GEMMs for Flax's linear layers: drop-in replacements of ``lax.dot_general`` and ``jnp.einsum``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_te._validation import check_positive, checked
from jax_te.layers.flax.drop_in_mesh import GemmOrder, gemm_axes
from jax_te.layers.flax.model_gemms import IN_REACH
from jax_te.layers.prepare import prepare_quantization
from jax_te.layers.quantizable import QuantizableModule
from jax_te.ops import LinearOptions, RowGroups, dense, explain_backend, group_alignment, grouped_dense
from jax_te.quantize import padded_size, precision_of
from jax_te.recipe import ModuleRecipe, Recipe, current_recipe
from jax_te.sharding import entry_axes, entry_of
from jax_te.typing import Array, DTypeLike


@checked
class DotGeneral(QuantizableModule):
    """``lax.dot_general`` whose three GEMMs a recipe quantizes: the ``dot_general`` of Flax's linear layers.

    Give one to each ``nnx.Linear``, ``nnx.LinearGeneral`` or module with such an argument; `quantize_model` does it for
    a whole model. Without a recipe it is ``lax.dot_general`` itself. It holds the state of delayed scaling, so layers
    must not share one, and ``dot_general_cls=``, which makes a new one at each call, is for recipes without state. In
    Linen `jax_te.linen.DotGeneral` is that class.

    Args:
        recipe: recipe of this GEMM, in force whatever the ambient one is; or a `ModuleRecipe`, which says when. None:
            the ambient recipe.
        kernel_axes: names of the kernel's axes, which rules give mesh axes, or mesh axes. `quantize_model` takes them
            from the kernel's metadata. Where they say how the GEMMs lie on a mesh, each device runs its part, on
            backend ``te``, too; else the compiler partitions them.
        groups: number of kernels along batch axes, those of experts: each is quantized by itself, as those of
            `GroupedLinear`, and on a mesh the compiler partitions their GEMMs. None: there are no batch axes.

    Raises:
        TypeError: for another type of recipe.
        ValueError: when called under a recipe with batch axes that are not of ``groups`` kernels, or with a
            ``precision`` above the default, whose sums a recipe does not give; for sizes that do not fit, see
            `jax_te.ops.dense`.
        QuantizerStateError: when called under a recipe with state, if there is none.

    Source: ``transformer_engine.jax.flax.make_dot_general_cls``.

    >>> from jax_te.recipe import Float8CurrentScaling, autocast
    >>> layer = nnx.Linear(32, 16, dot_general=DotGeneral(), rngs=nnx.Rngs(0))
    >>> with autocast(Float8CurrentScaling()):
    ...     layer(jnp.ones((16, 32))).shape
    (16, 16)
    """

    kernels: ClassVar[dict[str, str]] = {"kernel": "quantizers"}
    of_flax: ClassVar[bool] = True
    attribute: ClassVar[str] = "dot_general"
    """Attribute of Flax's layers that holds it."""

    def __init__(
        self,
        recipe: Recipe | ModuleRecipe | None = None,
        kernel_axes: Sequence[Any] | None = None,
        groups: int | None = None,
    ):
        if groups is not None:
            check_positive(groups=groups)
        self.groups = groups  # first: the state's shape depends on it
        self._init_quantization()
        self.kernel_axes = None if kernel_axes is None else tuple(kernel_axes)
        self.kernel = None  # each call receives a kernel
        if recipe is not None:
            self.module_recipe = recipe
            prepare_quantization(self, current_recipe())

    def stack_shape(self, kernel: str, owner: nnx.Module | None = None) -> tuple[int, ...]:
        """Return the sizes of the axes by which the layer that holds this module was stacked."""
        found = None if owner is None else flax_linear(owner)
        return () if found is None else found.stack

    def layer_path(self, path: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the path of the layer of Flax that holds this module."""
        return path[:-1] if path[-1:] == (self.attribute,) else path

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: Sequence[Sequence[Sequence[int]]],
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: NamedSharding | PartitionSpec | None = None,
    ) -> Array:
        """Return the product of ``lhs``, the input, and ``rhs``, the kernel; arguments as of ``lax.dot_general``.

        Returns:
            The input's axes that are not summed over, then the kernel's, in ``preferred_element_type`` or the dtype of
            ``lhs``.
        """
        if self.recipe is None:
            self.warn_of_unused_state("kernel")
            numbers: Any = dimension_numbers  # JAX takes lists, too, and its annotation does not say so
            return jax.lax.dot_general(lhs, rhs, numbers, precision, preferred_element_type, out_sharding=out_sharding)
        (summed, kernel_summed), (batch, kernel_batch) = dimension_numbers
        why = self._batch_reason([rhs.shape[axis] for axis in kernel_batch]) or precision_reason(precision)
        if why is not None:
            raise ValueError(
                f"no recipe can quantize this dot_general: {why}; input {lhs.shape}, kernel {rhs.shape}. Leave it to "
                "lax.dot_general, or call it without a recipe: inside `with autocast(None):`, and with none of its own"
            )
        rows, features = _others(lhs, (*summed, *batch)), _others(rhs, (*kernel_summed, *kernel_batch))
        order = GemmOrder(rows, summed, kernel_summed, features, batch, kernel_batch)
        out = _out_spec(lhs, rhs, (*batch, *rows), features) if out_sharding is None else out_sharding
        return self._quantized(lhs, rhs, order, self.kernel_axes, preferred_element_type, out)

    def _batch_reason(self, sizes: Sequence[int]) -> str | None:
        """Return why batch axes of these sizes cannot be those of this layer's kernels, or None."""
        if (prod(sizes) if sizes else None) == self.groups:
            return None
        if self.groups is None:
            return "it has batch axes"
        return f"its batch axes have sizes {tuple(sizes)}, and it is of groups={self.groups} kernels"

    def _quantized(
        self, lhs: Array, rhs: Array, order: GemmOrder, kernel_axes: Sequence[Any] | None, dtype: Any, out: Any
    ) -> Array:
        """Return the product by quantized GEMMs.

        Args:
            lhs, rhs: input and kernel.
            order: order of their axes.
            kernel_axes: names of the kernel's axes, or None.
            dtype: dtype of the product; None: that of ``lhs``.
            out: sharding of the product on a mesh with Explicit axes, or None.
        """
        recipe: Any = self.recipe
        # The dtype of a GEMM's input is that of its output; quantized values do not change in a wider one.
        x = lhs if dtype is None else lhs.astype(dtype)
        if order.batch:
            options = LinearOptions(name=self.module_name, evaluation=self.deterministic)
            grouped = functools.partial(_grouped_gemm, order=order, recipe=recipe, options=options)
            run: Any = grouped if out is None else jax.sharding.auto_axes(grouped, out_sharding=out)
            return run(x, rhs, self.gemm_state("kernel"))
        found, backend = gemm_axes(lhs, rhs, order, kernel_axes, precision_of(recipe).alignment), None
        if found.why is not None:
            # The compiler then partitions the GEMMs, as it does Flax's; if te was requested, the reason is raised.
            backend = explain_backend("dense", recipe=recipe, unsharded=found.why).backend
        options = LinearOptions(*found[:3], name=self.module_name, evaluation=self.deterministic)
        gemm = functools.partial(_gemm, order=order, recipe=recipe, options=options, backend=backend)
        run = gemm if out is None else jax.sharding.auto_axes(gemm, out_sharding=out)
        return run(x, rhs, self.gemm_state("kernel"))


class EinsumOp(DotGeneral):
    """``jnp.einsum`` of an input and a kernel whose GEMMs a recipe quantizes: the ``einsum_op`` of ``nnx.Einsum``.

    Args:
        recipe, kernel_axes, groups: see `DotGeneral`.

    Raises:
        ValueError: when called under a recipe with an equation that is not one GEMM, or one for each of ``groups``
            kernels; and see `DotGeneral`.

    >>> from jax_te.recipe import Float8CurrentScaling
    >>> op = EinsumOp(Float8CurrentScaling())
    >>> layer = nnx.Einsum("btd,ndh->btnh", (2, 32, 16), einsum_op=op, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 8, 32))).shape
    (2, 8, 2, 16)
    """

    attribute: ClassVar[str] = "einsum_op"

    @checked
    def __call__(
        self,
        equation: str,
        lhs: Array,
        rhs: Array,
        *,
        out_sharding: NamedSharding | PartitionSpec | None = None,
        **options: Any,
    ) -> Array:  # type: ignore[override]
        """Return the result of ``equation`` for ``lhs``, the input, and ``rhs``, the kernel.

        Args:
            options: ``precision`` and ``preferred_element_type`` of ``jnp.einsum``.
        """
        if self.recipe is None:
            self.warn_of_unused_state("kernel")
            return jnp.einsum(equation, lhs, rhs, out_sharding=out_sharding, **options)
        return _einsum(super().__call__, equation, lhs, rhs, out_sharding=out_sharding, **options)


class ParameterGemm(DotGeneral):
    """`DotGeneral` of a parameter of a user-defined module, which holds it next to the parameter.

    Args:
        parameter: name of the parameter.
        stack: sizes of the axes that ``nnx.vmap`` put before the parameter's.
        recipe, groups: see `DotGeneral`.

    >>> ParameterGemm("w").layer_path(("layers", 0, "w_gemm"))
    ('layers', 0, 'w')
    """

    def __init__(
        self,
        parameter: str,
        stack: tuple[int, ...] = (),
        recipe: Recipe | ModuleRecipe | None = None,
        groups: int | None = None,
    ):
        # Before the base class makes the state, whose shape depends on them.
        self.parameter, self.stack = parameter, stack
        super().__init__(recipe, groups=groups)

    def stack_shape(self, kernel: str, owner: nnx.Module | None = None) -> tuple[int, ...]:
        """Return the sizes of the axes by which the module that holds this one was stacked."""
        return self.stack

    def layer_path(self, path: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the path of the parameter."""
        return (*path[:-1], self.parameter)

    def __call__(  # type: ignore[override]
        self, x: Array, kernel: Array, order: GemmOrder, kernel_axes: Sequence[Any] | None, dtype: Any, out: Any
    ) -> Array:
        """Return the product of an input and the parameter, or a cast, reshaped or transposed form of it.

        Args:
            x: input.
            kernel: the parameter in the form that the GEMM takes.
            order: axes of both.
            kernel_axes: names of the axes of ``kernel``, or None.
            dtype: dtype of the product.
            out: sharding of the product on a mesh with Explicit axes, or None.
        """
        if self.recipe is not None:
            return self._quantized(x, kernel, order, kernel_axes, dtype, out)
        self.warn_of_unused_state("kernel")
        # Where the recipe of a call is another than that under which the module was traced, as in `sensitivity`.
        numbers = (order.summed, order.kernel_summed), (order.batch, order.kernel_batch)
        return jax.lax.dot_general(x, kernel, numbers, preferred_element_type=dtype, out_sharding=out)


def dot_general_as_placed(
    lhs: Array,
    rhs: Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
) -> Array:
    """Return ``lax.dot_general`` of an input and a kernel, placed on an Explicit mesh as a `DotGeneral` places it.

    Without that, JAX refuses operands that are both split along an axis of the sum. It runs in the scope `IN_REACH`.

    >>> dot_general_as_placed(jnp.ones((2, 4)), jnp.ones((4, 8)), (((1,), (0,)), ((), ()))).shape
    (2, 8)
    """
    (summed, kernel_summed), (batch, kernel_batch) = dimension_numbers
    if out_sharding is None:
        rows, features = _others(lhs, (*summed, *batch)), _others(rhs, (*kernel_summed, *kernel_batch))
        out_sharding = _out_spec(lhs, rhs, (*batch, *rows), features)
    with jax.named_scope(IN_REACH):
        return jax.lax.dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding
        )


def einsum_as_placed(equation: str, lhs: Array, rhs: Array, *, out_sharding: Any = None, **options: Any) -> Array:
    """Return ``jnp.einsum`` of one GEMM by `dot_general_as_placed`.

    >>> einsum_as_placed("sd,fd->fs", jnp.ones((2, 4)), jnp.ones((8, 4))).shape
    (8, 2)
    """
    return _einsum(dot_general_as_placed, equation, lhs, rhs, out_sharding=out_sharding, **options)


class FlaxLinear(NamedTuple):
    """Description of the computation of one of Flax's linear layers.

    Args:
        summed, features: sizes of the kernel's axes that are summed over, and of the others.
        why: reason why no recipe can quantize it, or None.
        op: the class that quantizes it.
        as_placed: computation without a recipe, see `dot_general_as_placed`.
        default: value of the attribute ``op.attribute`` if the user gave none.
        stack: sizes of the axes that ``nnx.vmap`` put before the kernel's.
        groups: number of kernels along its batch axes; None: it has none.
    """

    summed: Sequence[int]
    features: Sequence[int]
    why: str | None = None
    op: type[DotGeneral] = DotGeneral
    as_placed: Callable[..., Array] = dot_general_as_placed
    default: Any = None
    stack: tuple[int, ...] = ()
    groups: int | None = None


def flax_linear(module: Any) -> FlaxLinear | None:
    """Return the description of one of Flax's linear layers; None for other modules.

    >>> flax_linear(nnx.Linear(32, 16, rngs=nnx.Rngs(0))).features
    (16,)
    """
    own = next((base for base in (nnx.Linear, nnx.LinearGeneral, nnx.Einsum) if isinstance(module, base)), None)
    if own is None:
        return None
    why = precision_reason(module.precision)
    if isinstance(module, nnx.Einsum):
        x, names, out, reason = read_einsum(module.einsum_str)
        layer, rank = einsum_linear(x, names, out, module.kernel_shape, why or reason), len(module.kernel_shape)
    elif isinstance(module, nnx.Linear):
        layer, rank = FlaxLinear((module.in_features,), (module.out_features,), why, default=jax.lax.dot_general), 2
    else:
        why = why if module.dot_general_cls is None else "it has a dot_general_cls of its own"
        groups = prod(module.batch_axis.values()) if module.batch_axis else None
        layer = FlaxLinear(module.in_features, module.out_features, why, groups=groups)
        rank = len(module.batch_axis) + len(layer.summed) + len(layer.features)
    present = getattr(module, layer.op.attribute)
    # Flax's LoRALinear adds to what nnx.Linear returns.
    if type(module).__call__ not in (own.__call__, nnx.LoRALinear.__call__):
        layer = layer._replace(why=f"its class overrides the __call__ of nnx.{own.__name__}")
    elif present is not layer.default and not isinstance(present, DotGeneral):
        layer = layer._replace(why=f"it has a {layer.op.attribute} of its own")
    shape = module.kernel.get_value().shape
    return layer._replace(stack=shape[: len(shape) - rank])


def einsum_linear(x: str, kernel: str, out: str, shape: Sequence[int], why: str | None) -> FlaxLinear:
    """Return the description of an einsum with a kernel of ``shape``; see `read_einsum`."""
    sizes = list(zip(kernel, shape, strict=False))
    summed = [size for name, size in sizes if name not in out]
    features = [size for name, size in sizes if name in out and name not in x]
    batch = [size for name, size in sizes if name in out and name in x]
    groups = prod(batch) if batch else None
    return FlaxLinear(summed, features, why, EinsumOp, einsum_as_placed, jnp.einsum, groups=groups)


def size_reason(summed: Sequence[int], features: Sequence[int], recipe: Recipe | None) -> str | None:
    """Return the reason why ``recipe`` (None: any FP8 recipe) cannot quantize a kernel of these sizes, or None.

    >>> size_reason((32,), (50,), None)
    'its output size 50 is not a multiple of 16'
    """
    multiple = Recipe.alignment if recipe is None else precision_of(recipe).alignment
    for name, size in {"input": prod(summed), "output": prod(features)}.items():
        if size % multiple:
            return f"its {name} size {size} is not a multiple of {multiple}"
    return None


def precision_reason(precision: Any) -> str | None:
    """Return the reason not to quantize a GEMM of this ``precision``, or None.

    >>> precision_reason("highest")
    "its precision is 'highest'"
    """
    plain = (None, "default", jax.lax.Precision.DEFAULT)
    each = precision if isinstance(precision, tuple) else (precision,)
    return None if all(any(one == name for name in plain) for one in each) else f"its precision is {precision!r}"


def read_einsum(equation: str, rank: int | None = None) -> tuple[str, str, str, str | None]:
    """Return the axes of input, kernel and output of an equation, and why it is not a GEMM, or None.

    An equation with axes that all three share, those of experts, is a GEMM for each of their places.

    Args:
        equation: equation of ``jnp.einsum``, explicit, with two operands.
        rank: rank of the input, by which its axes ``...`` are named; None: ``...`` is one axis.

    >>> read_einsum("...d,df->...f", 3)
    ('ABd', 'df', 'ABf', None)
    """
    operands, _, out = equation.replace(" ", "").partition("->")
    x, _, kernel = operands.partition(",")
    if "..." in x:
        unused = [chr(code) for code in range(ord("A"), ord("Z") + 1) if chr(code) not in equation]
        more = "".join(unused[: 1 if rank is None else rank - len(x) + 3])
        x, out = x.replace("...", more), out.replace("...", more)
    left = ({*x} ^ {*kernel}) | ({*x} & {*kernel} & {*out})
    why = None
    if len({*x}) < len(x) or len({*kernel}) < len(kernel) or left != {*out} or "." in kernel:
        why = f"{equation!r} is more than a sum over axes that input and kernel share"
    return x, kernel, out, why


def _einsum(
    dot_general: Callable[..., Array], equation: str, lhs: Array, rhs: Array, *, out_sharding: Any, **options: Any
) -> Array:
    """Return the result of an equation that is one GEMM, or one for each expert, by ``dot_general``."""
    x, kernel, out, why = read_einsum(equation, lhs.ndim)
    if why is not None:
        raise ValueError(f"no recipe can quantize {equation!r}: {why}. Leave it to jnp.einsum")
    shared = [name for name in x if name in kernel]
    summed, batch = ([name for name in shared if (name in out) is stays] for stays in (False, True))
    numbers = [([x.index(name) for name in names], [kernel.index(name) for name in names]) for names in (summed, batch)]
    y = dot_general(lhs, rhs, numbers, **options)
    order = [*batch, *(name for name in (*x, *kernel) if name not in shared)]
    y = jnp.transpose(y, [order.index(name) for name in out])
    return y if out_sharding is None else jax.sharding.reshard(y, out_sharding)


def _grouped_gemm(
    x: Array, kernel: Array, state: Any, *, order: GemmOrder, recipe: Recipe, options: LinearOptions
) -> Array:
    """Return ``x [*batch, *rows, *summed] @ kernel [*batch, *summed, *features]``, a GEMM for each place of a batch."""
    rows, summed, kernel_summed, features, batch, kernel_batch = order
    x = jnp.transpose(x, (*batch, *rows, *summed))
    kernel = jnp.transpose(kernel, (*kernel_batch, *kernel_summed, *features))
    lead, outer = x.shape[: len(batch)], kernel.shape[len(batch) + len(summed) :]
    kept = x.shape[: len(batch) + len(rows)]
    e, n, k = prod(lead), prod(kept[len(batch) :]), prod(x.shape[len(kept) :])
    # Each expert's rows are one tile of the grouped GEMMs, with zeros behind them.
    size = padded_size(max(n, 1), group_alignment(recipe))
    x = jnp.pad(x.reshape(e, n, k), ((0, 0), (0, size - n), (0, 0))).reshape(e * size, k)
    groups = RowGroups(sizes=jnp.full(e, n, jnp.int32), rows=e * size, alignment=size)
    y = grouped_dense(x, kernel.reshape(e, k, *outer), groups=groups, recipe=recipe, state=state, options=options)
    return y.reshape(e, size, *outer)[:, :n].reshape(*kept, *outer)


def _gemm(x: Array, kernel: Array, state: Any, *, order: GemmOrder, **options: Any) -> Array:
    """Return ``x [*rows, *summed] @ kernel [*summed, *features]`` after transposing both to this order."""
    rows, summed, kernel_summed, features, *_ = order
    x, kernel = jnp.transpose(x, (*rows, *summed)), jnp.transpose(kernel, (*kernel_summed, *features))
    if len(summed) != 1:
        x, kernel = x.reshape(*x.shape[: len(rows)], -1), kernel.reshape(-1, *kernel.shape[len(summed) :])
    return dense(x, kernel, state=state, **options)


def _others(x: Array, axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(axis for axis in range(x.ndim) if axis not in axes)


def _out_spec(lhs: Array, rhs: Array, rows: Sequence[int], features: Sequence[int]) -> PartitionSpec | None:
    """Return the sharding of the product on a mesh with Explicit axes, derived from its operands; else None."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return None
    entries, taken = [], set()
    for x, axes in ((lhs, rows), (rhs, features)):
        spec = jax.typeof(x).sharding.spec
        for axis in axes:
            # Fully sharded parameters have the batch's mesh axes: the batch keeps them, and kernels are all-gathered.
            free = tuple(name for name in entry_axes(spec[axis]) if name not in taken)
            taken |= set(free)
            entries.append(entry_of(free))
    return PartitionSpec(*entries)
