"""Linear transformations of one shape, each applied to the rows of one group."""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_te._validation import check_float, checked
from jax_te.errors import QuantizerStateError
from jax_te.ops.backend import ambient_backend, backend_for
from jax_te.ops.linear import gemms
from jax_te.ops.linear.gemms import LinearResiduals
from jax_te.ops.linear.plan import LinearOptions, Plan
from jax_te.ops.linear.resolve import check_differentiated, usable_weights, why_once
from jax_te.ops.linear.spec import GivenSink, LinearSpec, LinearWeights, resolved_sink
from jax_te.ops.moe.permute import Permutation, permute, unpermute
from jax_te.ops.moe.row_groups import RowGroups, check_sizes
from jax_te.ops.moe.tiles import TiledGroups, Tiling, tiling
from jax_te.ops.named import named
from jax_te.ops.pallas import grouped as hopper
from jax_te.ops.primitives import GemmBackend
from jax_te.ops.sharded_vjp import Shards, sharded_vjp
from jax_te.ops.xla import grouped
from jax_te.quantize import (
    GemmState,
    OpaqueTree,
    Precision,
    Quantization,
    QuantizedKernel,
    ambient_observer,
    precision_of,
    scales_are_frozen,
)
from jax_te.recipe import Recipe
from jax_te.sharding import constrain, device_mesh
from jax_te.typing import Array, BackendName, LogicalAxes


@checked
def grouped_dense(
    x: Array,
    kernel: Array | QuantizedKernel,
    bias: Array | None = None,
    *,
    groups: RowGroups,
    recipe: Recipe | None = None,
    state: GemmState | None = None,
    grad_sink: GivenSink | None = None,
    options: LinearOptions = LinearOptions(),
    backend: BackendName | None = None,
) -> Array:
    """Return ``x @ kernel[g] + bias[g]`` for the rows of each group ``g``, with the three GEMMs of each quantized.

    Each group gets the results of `dense` on its rows alone: scales, amaxes and quantized values have the same bits,
    products differ only by the order of sums. Nothing depends on other groups, nothing waits for the host, and results
    are deterministic. On Hopper GPUs, one alone or those of a mesh with rows that are placed on them, the kernels of
    `jax_te.ops.pallas` multiply bf16 and fp16, and FP8 under delayed, current and block scaling; elsewhere, and under
    other recipes, XLA does, one tile of rows after another.

    Args:
        x: ``[rows, k]`` fp32, bf16, fp16 or fp64: the compute dtype. With a ``groups.permutation`` tokens ``[t, k]``:
            if the kernels' gradient reads the rows unquantized, backward gathers them from the tokens again, so that
            the rows, as many as a token's experts for each, are not kept.
        kernel: ``[e, k, *n]`` in any float dtype; without a recipe it is cast to the compute dtype. Or the same
            quantized before the call, see `quantize_kernel`.
        bias: ``[e, *n]`` or None.
        groups: places of the rows of each group. Rows of no group give zeros, whatever they hold, and have zero
            gradients; with ``groups.zero_padding`` they must hold zeros, and their gradients, too. With a
            ``placement`` each device multiplies its own rows by its own kernels: ``x`` is ``[d rows, k]``, and where
            the placement splits features, an axis of features has the size of one device's part.
        recipe: None for high precision. FP8 needs ``k`` and ``prod(n)`` to be multiples of 16 (``recipe.alignment``);
            numbers of rows are free, and rows whose groups do not start at multiples of `group_alignment` are copied.
        state: the recipe's state, if it has any, with a scale and an amax history for each group: ``[e]``, ``[e, n]``.
            Its gradient is its next value. A group without rows keeps its scale.
        grad_sink: ``[e, k, *n]``, see `dense`.
        options: logical axes of kernel and output, ``name`` and ``evaluation``, see `dense`. On a mesh the compiler
            partitions the op, unless ``groups`` has a placement, which takes the logical axes of the kernel.
        backend: None for the ambient one; Transformer Engine does not run it, see `explain_backend`.

    Returns:
        ``[rows, *n]`` in the dtype of ``x``. Gradients of kernels are accumulated in fp32 and have the kernels' dtype.

    Raises:
        ValueError: for shapes that do not fit; for known sizes of groups that are negative or more than the rows; for
            rows that are placed on a mesh under a recipe with scales of whole tensors beside those of blocks, or with
            kernels that were quantized as a whole; and for a quantizer of a ``CustomRecipe`` whose scales depend on
            more than blocks of `group_alignment` rows.
        QuantizerStateError: if the recipe has state, and none is given or it is not that of ``e`` groups.
        TypeError: for an input that is not floating point; if a quantized kernel is differentiated and no
            ``grad_sink`` is given.
        BackendUnavailableError: for backend ``"te"``.

    Source: ``transformer_engine.jax.dense.grouped_dense``, ``transformer_engine.pytorch.GroupedLinear``.

    >>> import jax.numpy as jnp
    >>> groups = RowGroups(sizes=jnp.array([2, 1]), rows=4)
    >>> grouped_dense(jnp.ones((4, 3)), jnp.ones((2, 3, 5)) * jnp.array([1.0, 2.0])[:, None, None], groups=groups)[:, 0]
    Array([3., 3., 6., 0.], dtype=float32)
    """
    weights = LinearWeights(kernel, bias, state, grad_sink)
    precision = precision_of(recipe)
    _check_call(x, weights, groups, precision, options)
    usable = usable_weights(weights, precision, recipe)
    plan = _plan(groups, weights, precision, options)
    backend_for("grouped_dense", backend or ambient_backend.value, recipe, plan.reason)  # raises for TE by name
    how = tiling(groups, precision)
    linear, sink = _resolved_groups(x, usable._replace(grad_sink=grad_sink), precision, how.tile, plan, options)
    spec = _Spec((linear,), how, dataclasses.replace(groups, sizes=None, placement=None, permutation=None))
    args = _Args(x, groups.sizes, groups.permutation, (usable,))
    return _grouped(spec, _shards(linear, usable), args, (sink,), options.out_axes)


class _Args(NamedTuple):
    x: Any
    sizes: Any
    permutation: Permutation | None
    layers: tuple[LinearWeights, ...]


class _Spec(NamedTuple):
    layers: tuple[LinearSpec, ...]
    tiling: Tiling
    of_device: RowGroups
    """Groups of one device, without their sizes."""

    def groups(self, sizes: Array) -> TiledGroups:
        # On a mesh the sizes are one device's, [1, e].
        return TiledGroups(dataclasses.replace(self.of_device, sizes=sizes.reshape(-1)), self.tiling)

    @property
    def wgrad_reads_rows(self) -> bool:
        """Whether the GEMM of the kernels' gradient reads the rows themselves, not their quantized form."""
        precision = self.layers[0].precision
        return precision.x.quantizer is None or precision.runs_unquantized("wgrad")


def _fwd(spec: _Spec, args: _Args) -> tuple[Array, Any]:
    (linear,), (weights,), groups = spec.layers, args.layers, spec.groups(args.sizes)
    rows = _rows_of(linear, groups, args.x, args.permutation)
    operand = gemms.make_operand(linear, "x", rows, weights.state, axis=1)
    if linear.plan.constrained and linear.options.kernel_axes is not None:
        weights = _with_all_groups(weights, linear.options.kernel_axes)
    y, saved = gemms.forward(linear, operand, weights._replace(bias=None))
    y = groups.joined(y)
    if weights.bias is not None:
        bias = weights.bias.astype(y.dtype)
        y = y + jnp.take(bias, groups.group_of_rows, axis=0, mode="fill", fill_value=0)
    y = constrain(y, linear.options.out_axes) if linear.plan.constrained else y
    if args.permutation is not None and spec.wgrad_reads_rows:
        saved = saved._replace(x=args.x)
    return y, (args.sizes, args.permutation, named(saved, "quantized", given=(args.x, weights)))


def _rows_of(linear: LinearSpec, groups: TiledGroups, x: Array, permutation: Permutation | None) -> grouped.GroupedRows:
    """Return the rows of ``x``, or with a permutation those of its tokens."""
    x = x if permutation is None else _whole(linear, permute(x, permutation))
    return grouped.GroupedRows(x=groups.cut(x), tiles=groups.tiles)


def _whole(linear: LinearSpec, rows: Array) -> Array:
    """Return rows whole on each device of a mesh: XLA cannot partition the gathers of a permutation on every mesh."""
    return constrain(rows, (None, None)) if linear.plan.constrained else rows


def _with_all_groups(weights: LinearWeights, kernel_axes: LogicalAxes | PartitionSpec) -> LinearWeights:
    """Return the arrays of a layer with all groups on each device of a mesh, any of which may have rows of any group.

    XLA cannot partition a gather along the groups on every mesh.
    """
    kernel, bias = weights.kernel, weights.bias
    if isinstance(kernel, jax.Array):
        kernel = constrain(kernel, (None, *kernel_axes[1:]))
    if bias is not None:
        bias = constrain(bias, (None, *kernel_axes[2:]))
    return weights._replace(kernel=kernel, bias=bias)


def _bwd(spec: _Spec, residuals: tuple[Array, Permutation | None, LinearResiduals], g: Array) -> tuple[_Args, Any]:
    (sizes, permutation, saved), (linear,) = residuals, spec.layers
    groups = spec.groups(sizes)
    g = constrain(g, linear.options.out_axes) if linear.plan.constrained else g
    rows = grouped.GroupedRows(x=groups.cut(g), tiles=groups.tiles)
    dbias = None
    if linear.bias_dtype is not None:
        dbias = groups.sums(g, rows.x).astype(linear.bias_dtype)
    operand = gemms.make_operand(linear, "grad", rows, saved.state, axis=1)
    if permutation is None:
        dx, weights, sink = gemms.backward(linear, saved, operand, dbias, after=g)
        return _Args(groups.joined(dx), None, None, (weights,)), (sink,)
    dx = groups.joined(gemms.dgrad(linear, saved.kernel, operand, after=g))
    dx = unpermute(_whole(linear, dx), permutation)
    if spec.wgrad_reads_rows:
        # Without the barrier the compiler would keep forward's rows. Behind ``dx``, so that these rows are made when
        # those of the gradient are summed up already, and memory never holds both.
        tokens, dx = jax.lax.optimization_barrier((saved.x, dx))
        again: Any = _rows_of(linear, groups, tokens, permutation)
        unquantized, _ = linear.backend.quantize_operand(again, Quantization(), axis=1)
        saved = saved._replace(x=linear.backend.residual_for_wgrad(unquantized))
    weights, sink = gemms.weight_cotangents(linear, saved, operand, dbias)
    return _Args(dx, None, None, (weights,)), (sink,)


_grouped = sharded_vjp(_fwd, _bwd, name="gemm", check=check_differentiated, once=why_once)


def _check_call(
    x: Array, weights: LinearWeights, groups: RowGroups, precision: Precision, options: LinearOptions
) -> None:
    """Raise for arrays and options that do not go together."""
    kernel, bias, state, _ = weights
    check_float("grouped_dense", x, kernel, bias)
    split = 1
    if groups.placement is not None and kernel.ndim > 2 and options.kernel_axes is not None:
        split = groups.placement.parts(options.kernel_axes)[1]
    if x.ndim != 2 or kernel.ndim < 3 or x.shape[1] * split != kernel.shape[1]:
        where = f", k split over {split} devices" if split > 1 else ""
        raise ValueError(
            f"grouped_dense: input {x.shape} and kernel {kernel.shape} do not go together; they must be [rows, k] and "
            f"[e, k, *n]{where}"
        )
    e, k, *n = kernel.shape
    rows, what = groups.all_rows, "rows"
    if groups.permutation is not None:
        rows, what = len(groups.permutation.rows), "tokens"
    if groups.count != e or rows != x.shape[0]:
        raise ValueError(
            f"grouped_dense: groups are {groups.count} in {rows} {what}, and input and kernel have {e} and {x.shape[0]}"
        )
    check_sizes(groups)
    if bias is not None and bias.shape != (e, *n):
        raise ValueError(f"grouped_dense: bias {bias.shape} must have shape {(e, *n)}, that of kernel without k")
    for name, size in {"input size": k, "output size": prod(n)}.items():
        if size % precision.alignment:
            raise precision.misfit("grouped_dense", name, size, f"input {x.shape}, kernel {kernel.shape}")
    if options.save_original_input:
        raise ValueError("grouped_dense keeps the quantized input for backward; save_original_input must be False")
    if precision.amax_rule is not None and state is not None and state["x"]["scale"].shape != (e,):
        raise QuantizerStateError(
            f"grouped_dense has {e} groups, and the quantizer state has scales of shape {state['x']['scale'].shape}; "
            f"make it by init_gemm_state(recipe, groups={e}), or prepare_quantization(model, recipe)"
        )


def _plan(groups: RowGroups, weights: LinearWeights, precision: Precision, options: LinearOptions) -> Plan:
    """Return the plan of a call: of rows on their devices, or of an op that the compiler partitions, if any."""
    if groups.placement is None:
        mesh = None if jax.sharding.get_abstract_mesh().empty else device_mesh()
        reason = None if mesh is None else "the rows of a group may lie on any device"
        if isinstance(weights.kernel, QuantizedKernel) and weights.kernel.is_per_device:
            raise ValueError(
                f"grouped_dense: its kernels were quantized on each device of a mesh, and here {reason}. Quantize them "
                "where they are used (is_first_microbatch=None), or take sizes that divide over the mesh"
            )
        # The op constrains its rows itself, because the rows of tiles have another layout.
        return Plan(reason=reason, constrained=not jax.sharding.get_abstract_mesh().empty)
    if options.kernel_axes is None:
        raise ValueError("grouped_dense of rows that are placed on a mesh takes options with kernel_axes")
    if precision.shard_multiple is None:
        raise ValueError(
            f"grouped_dense: recipe {precision.recipe_name!r} has scales of whole tensors beside those of blocks, "
            "which no device can compute from its own rows; give RowGroups without a placement"
        )
    plan = groups.placement.plan(options.kernel_axes, precision)
    if isinstance(weights.kernel, QuantizedKernel) and (whole := weights.kernel.lacks_shards):
        raise ValueError(f"grouped_dense: rows are placed on a mesh, and {whole}")
    return plan


def _shards(linear: LinearSpec, weights: LinearWeights) -> Shards | None:
    """Return the sharding of a call's arrays on the mesh; None if devices do not run it by themselves."""
    plan, kernel = linear.plan, weights.kernel
    if plan.mesh is None:
        return None
    experts = PartitionSpec(*plan.kernel_spec[:1])
    plain = LinearWeights(plan.kernel_spec, plan.bias_spec, experts)  # type: ignore[arg-type]
    given = plain
    if isinstance(kernel, QuantizedKernel):
        given = plain._replace(kernel=kernel.partition_specs(plan.kernel_spec, plan.per_device, experts))
    sink = None if linear.sink is None else linear.sink.spec(plan)
    return Shards(
        mesh=plan.mesh,
        args=_Args(plan.x_spec, plan.x_spec, None, (given,)),
        out=plan.out_spec,
        cotangents=_Args(plan.x_spec, plan.x_spec, None, (plain,)),
        sinks=(sink,),
    )


def _resolved_groups(
    x: Array, weights: LinearWeights, precision: Precision, tile: int, plan: Plan, options: LinearOptions
) -> tuple[LinearSpec, Array | OpaqueTree | None]:
    """Return the layer as the op runs it, and the arrays of its sink."""
    kernel, bias, _, given_sink = weights
    on_hopper = hopper.runs_here(
        x.dtype,
        kernel.shape[0],
        tile,
        precision,
        placed=plan.mesh is not None,
        kernel_all_gather=plan.kernel_all_gather,
    )
    backend: GemmBackend = hopper if on_hopper else grouped
    sink = resolved_sink(given_sink, plan, kernel, options.kernel_axes)
    spec = LinearSpec(
        backend=backend,
        precision=precision,
        plan=plan,
        options=options,
        x_dtype=x.dtype,
        wgrad_dtype=sink.wgrad_dtype,
        kernel_rank=kernel.ndim,
        unpadded_rows=None,
        stored_quantized=isinstance(kernel, QuantizedKernel),
        bias_dtype=None if bias is None else bias.dtype,
        kernel_all_gather=plan.kernel_all_gather,
        sink=sink.kind,
        observer=ambient_observer.value,
        frozen_scales=scales_are_frozen.value,
    )
    return spec, sink.arrays
