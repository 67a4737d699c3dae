"""The skeleton of every op: two rules over arrays, run on one device or on each device's shards of a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, PartitionSpec

from jax_te.ops.first_order import refuse_derivatives
from jax_te.ops.source_lines import leave_out_lines_that_pass_calls_on
from jax_te.quantize import OpaqueTree
from jax_te.remat import WITNESS
from jax_te.sharding import MeshAxes, auto_region, free_axes, mark_varying, reshard, varying_axes
from jax_te.typing import LogicalAxes

# Here, because every program of this package has operations.
leave_out_lines_that_pass_calls_on()

_WHY_MARKED = (
    "second derivatives do not exist in a layer inside of a shard_map that leaves an axis to the compiler and checks "
    "which arrays vary over its manual axes: pass check_vma=False to that shard_map"
)


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Sharding of an op's arrays on a mesh whose devices run its rules by themselves. Hashable.

    Args:
        mesh: the mesh in use.
        args: PartitionSpecs of the arguments, a tree prefix of them.
        out: specs of the output.
        cotangents: specs of the arguments' cotangents.
        out_cotangents: specs of the output's cotangents; None in place of one that the backward rule does not read.
            None: those of ``out``.
        sinks: specs of the sinks' cotangents.
        axis_names: mesh axes that are manual inside of the rules; None: all that are not so already.
    """

    mesh: AbstractMesh
    args: Any
    out: Any
    cotangents: Any
    out_cotangents: Any = None
    sinks: Any = None
    axis_names: MeshAxes | None = None

    @property
    def manual_axes(self) -> MeshAxes:
        """The mesh axes that are manual inside of the rules."""
        return free_axes(self.mesh) if self.axis_names is None else self.axis_names

    @property
    def per_device(self) -> PartitionSpec:
        """PartitionSpec of an array with one entry for each device in front."""
        return PartitionSpec(self.manual_axes)

    def map(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Return ``fn`` run on each device's shards."""
        options = {"mesh": self.mesh, "in_specs": in_specs, "out_specs": out_specs}
        # check_vma off: residuals differ between devices by design, and TE's custom calls have no rule for it.
        mapped = jax.shard_map(fn, axis_names=set(self.manual_axes), check_vma=False, **options)

        # Inside of a shard_map of the user's: without the check JAX takes what comes out for the same on all devices
        # along the axes that are manual there, and would accept one device's gradient in place of their sum.
        def marked(*arrays: Any) -> Any:
            return mark_varying(mapped(*arrays), varying_axes(arrays))

        return marked


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Residuals:
    """Residuals of an op.

    Args:
        tree: the residuals of ``fwd``; on a mesh, as `_OnDevices`.
        dtypes: structure and dtypes of the op's arguments; None if all are what the rules get.
        witness: array without elements that depends on the op's arguments where second derivatives are refused, see
            `sharded_vjp`: the other arrays may no longer do so.
    """

    tree: Any
    dtypes: tuple[Any, tuple[Any, ...]] | None = field(metadata={"static": True})
    witness: Any = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _OnDevices:
    """Residuals of each device's run of ``fwd``.

    Args:
        arguments: residuals that are arguments of the op, whole arrays.
        own: the others, of each device.
        specs: PartitionSpecs of the arguments.
        sources: place of the argument that each residual is, among the leaves of all; None for the others.
        treedef: structure of the residuals.
    """

    arguments: tuple[Any, ...]
    own: OpaqueTree
    specs: tuple[Any, ...] = field(metadata={"static": True})
    sources: tuple[int | None, ...] = field(metadata={"static": True})
    treedef: Any = field(metadata={"static": True})


def sharded_vjp(
    fwd: Callable[..., Any],
    bwd: Callable[..., Any],
    *,
    name: str | None = None,
    check: Callable[..., None] | None = None,
    once: Callable[[Any], str | None] | None = None,
) -> Callable[..., Any]:
    """Return ``op(spec, shards, args, sinks=None, out_axes=None)``, differentiable by ``bwd``.

    The op owns the derivative rule, ``shard_map``, per-device residuals, regions of Explicit axes, the output's
    checkpoint name and the jit of eager calls; ``fwd`` and ``bwd`` are mathematics on the arrays of one device, or on
    global arrays that the compiler partitions, where ``shards`` is None.

    Arguments in an extended dtype other than a random key's (states of delayed scaling, see
    `jax_te.quantize.with_max_gradients`) reach the rules as fp32, and their cotangents leave in the dtype they had.

    Args:
        fwd: ``fwd(spec, args) -> (out, residuals)``; residuals are any tree of arrays, which stay on their device. One
            that is a leaf of ``args`` itself, the same object, is not stored again: it stays the caller's array. One
            that ``fwd`` has wrapped or computed is stored, which costs its memory and changes no value.
        bwd: ``bwd(spec, residuals, g) -> (cotangents, sink_cotangents)``, trees like ``args`` and ``sinks``, with None
            for zero.
        name: checkpoint name of the output, for remat policies.
        check: ``check(spec, args, perturbed, sinks)`` raises for what cannot be differentiated; ``perturbed`` is a tree
            of bools like ``args``. It is called when a derivative is requested.
        once: ``once(spec)`` returns why the op has no second derivatives, the message of the error that asking for one
            raises; None: JAX differentiates both rules, which then are to be differentiable themselves.

    The op's arguments:

    - ``spec``: hashable; everything static that the rules need.
    - ``shards``: how the arrays lie on the mesh, or None.
    - ``args``: a NamedTuple of arrays and trees of arrays.
    - ``sinks``: arrays whose values nothing reads, but whose cotangents ``bwd`` gives.
    - ``out_axes``: logical axes of the output; needed without ``shards`` on a mesh with Explicit axes.

    >>> import jax.numpy as jnp
    >>> double = sharded_vjp(lambda spec, args: (2.0 * args, None), lambda spec, residuals, g: (2.0 * g, None))
    >>> jax.grad(lambda x: double(None, None, x))(jnp.float32(3.0)).item()
    2.0
    """

    def why_once(spec: Any, shards: Shards | None, arrays: Any) -> str | None:
        why = once(spec) if once else None
        return _WHY_MARKED if why is None and shards is not None and varying_axes(arrays) else why

    def run(spec: Any, shards: Shards | None, args: Any) -> tuple[Any, Any]:
        return fwd(spec, args) if shards is None else _forward_on_devices(fwd, spec, shards, args)

    def named(out: Any) -> Any:
        return out if name is None else checkpoint_name(out, name)

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
    def op(spec: Any, shards: Shards | None, args: Any, sinks: Any) -> Any:
        return named(run(spec, shards, _as_float32(args)[0])[0])

    def forward(spec: Any, shards: Shards | None, args: Any, sinks: Any) -> tuple[Any, _Residuals]:
        leaves, treedef = jax.tree.flatten(args)
        args = jax.tree.unflatten(treedef, [leaf.value for leaf in leaves])
        if check is not None:
            perturbed = jax.tree.unflatten(treedef, [leaf.perturbed for leaf in leaves])
            check(spec, args, perturbed, sinks)
        args, dtypes = _as_float32(args)
        why = why_once(spec, shards, args)
        if why is None:
            (out, residuals), witness = run(spec, shards, args), None
        else:
            run_once = functools.partial(_run_once, functools.partial(run, spec, shards))
            out, residuals, witness = run_once(args, jax.tree.map(lambda leaf: leaf.value, sinks), why)
        return named(out), _Residuals(residuals, dtypes, witness)

    def backward(spec: Any, shards: Shards | None, residuals: _Residuals, g: Any) -> tuple[Any, Any]:
        if not isinstance(g, jax.Array):
            # The cotangent of an output that nothing differentiates is zeros.
            g = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x, g)  # type: ignore[arg-type]
        tree, inputs = residuals.tree, (residuals.witness, g)
        why = why_once(spec, shards, tree)
        if why is not None:
            # Derivatives of the following are never needed, and GPU kernels have none.
            tree, g = jax.lax.stop_gradient((tree, g))
        if shards is None:
            cotangents, sinks = bwd(spec, tree, g)
        else:
            cotangents, sinks = _backward_on_devices(bwd, spec, shards, tree, g)
        if why is not None:
            cotangents, sinks = refuse_derivatives((cotangents, sinks), inputs, why)
        return cotangents if residuals.dtypes is None else _in_dtypes(cotangents, *residuals.dtypes), sinks

    # symbolic_zeros tells the rules which arguments are differentiated, under jit, scan, remat and vmap alike.
    op.defvjp(forward, backward, symbolic_zeros=True)

    def call(spec: Any, shards: Shards | None, args: Any, sinks: Any = None, out_axes: LogicalAxes | Any = None) -> Any:
        if jax.sharding.get_abstract_mesh().empty:
            return op(spec, None, args, sinks)
        if shards is None:
            return auto_region(functools.partial(op, spec, None), out_axes)(args, sinks)
        # Outside of the derivative rule, so that cotangents come back in the sharding that the caller's arrays have.
        return op(spec, shards, *reshard((args, sinks), (shards.args, shards.sinks), shards.mesh))

    return call


def _run_once(run: Callable[..., Any], args: Any, sinks: Any, why: str) -> tuple[Any, Any, Any]:
    """Return ``run(args)``, an output and residuals, and the witness of the residuals.

    Forward returns these values next to an inner derivative, as in ``jax.vjp``. An outer derivative would go through
    forward's own arithmetic, in which rounding has the derivative zero.
    """
    # Without elements it costs nothing. Named, because a remat policy that does not save it would save or recompute the
    # arguments for it, even if it saves the operands that were made of them.
    witness = checkpoint_name(refuse_derivatives(jnp.zeros((0,)), (args, sinks), why), WITNESS)
    inside = jax.lax.stop_gradient(args)
    out, residuals = run(inside)
    # A residual that is an argument stays the same array: a loop over layers would stack a copy.
    given = {id(own): leaf for own, leaf in zip(jax.tree.leaves(inside), jax.tree.leaves(args), strict=True)}
    residuals = jax.tree.map(lambda leaf: given.get(id(leaf), leaf), residuals)
    return refuse_derivatives(out, witness, why), residuals, witness


def _forward_on_devices(fwd: Callable[..., Any], spec: Any, shards: Shards, args: Any) -> tuple[Any, _OnDevices]:
    # Residuals that are arguments of the op stay the arrays that they are. One that passed through shard_map would be a
    # new array to JAX: a scan over layers would then stack a mask that all layers share.
    out, residuals = _run_forward(fwd, spec, shards, args)
    leaves, specs = jax.tree.leaves(args), jax.tree.leaves(jax.tree.broadcast(shards.args, args))
    places = [source for source in residuals.sources if source is not None]
    arguments = tuple(leaves[place] for place in places)
    return out, replace(residuals, arguments=arguments, specs=tuple(specs[place] for place in places))


# Both under their own jit, for eager calls: an eager shard_map runs one operation at a time.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run_forward(fwd: Callable[..., Any], spec: Any, shards: Shards, args: Any) -> tuple[Any, _OnDevices]:
    """Return the output, and the residuals without those that are arguments."""

    def on_device(args: Any) -> tuple[Any, _OnDevices]:
        out, residuals = fwd(spec, args)
        places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(args))}
        leaves, treedef = jax.tree.flatten(residuals)
        sources = tuple(places.get(id(leaf)) for leaf in leaves)
        own = [leaf for leaf, source in zip(leaves, sources, strict=True) if source is None]
        return out, _OnDevices((), OpaqueTree.pack(own, per_device=True), (), sources, treedef)

    return shards.map(on_device, (shards.args,), (shards.out, shards.per_device))(args)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _backward_on_devices(bwd: Callable[..., Any], spec: Any, shards: Shards, residuals: _OnDevices, g: Any) -> Any:
    def on_device(arguments: tuple[Any, ...], own: OpaqueTree, g: Any) -> Any:
        given, rest = iter(arguments), iter(own.unpack())
        leaves = [next(rest) if source is None else next(given) for source in residuals.sources]
        return bwd(spec, jax.tree.unflatten(residuals.treedef, leaves), g)

    g_specs = shards.out
    if shards.out_cotangents is not None:
        # Dropped, not passed on as zeros: Shardy crashes on inputs of a shard_map that nothing reads (jax 0.11.2, GPU).
        g_specs = shards.out_cotangents
        g = jax.tree.map(lambda spec, x: None if spec is None else x, g_specs, g, is_leaf=lambda node: node is None)
    in_specs, out_specs = (residuals.specs, shards.per_device, g_specs), (shards.cotangents, shards.sinks)
    return shards.map(on_device, in_specs, out_specs)(residuals.arguments, residuals.own, g)


def _as_float32(args: Any) -> tuple[Any, tuple[Any, ...] | None]:
    """Return ``args`` without extended dtypes; and their structure and dtypes, None where there were none to cast."""
    # The dtype whose gradients merge by maximum serves only JAX's transposition: inside of a rule nothing is merged.
    leaves, treedef = jax.tree.flatten(args)
    dtypes = tuple(leaf.dtype for leaf in leaves)
    is_cast = [merges_gradients(dtype) for dtype in dtypes]
    if not any(is_cast):
        return args, None
    cast = [
        jax.lax.convert_element_type(leaf, jnp.float32) if extended else leaf
        for leaf, extended in zip(leaves, is_cast, strict=True)
    ]
    return jax.tree.unflatten(treedef, cast), (treedef, dtypes)


def merges_gradients(dtype: Any) -> bool:
    """Return whether a dtype is an extended one that reaches the rules as fp32; random keys keep theirs."""
    return jnp.issubdtype(dtype, jax.dtypes.extended) and not jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _in_dtypes(cotangents: Any, treedef: Any, dtypes: tuple[Any, ...]) -> Any:
    """Return cotangents in the dtypes that `_as_float32` found."""

    def cast(cotangent: Any, dtype: Any) -> Any:
        plain = cotangent is None or not jnp.issubdtype(dtype, jax.dtypes.extended)
        return cotangent if plain else jax.lax.convert_element_type(cotangent, dtype)  # type: ignore[arg-type]

    return jax.tree.map(cast, cotangents, jax.tree.unflatten(treedef, dtypes), is_leaf=lambda node: node is None)
