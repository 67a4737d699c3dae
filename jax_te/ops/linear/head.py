"""The projection of hidden states to logits, by the ambient backend's GEMMs where they are no slower than XLA's."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_te.ops import te
from jax_te.ops.backend import BackendChoice, ambient_backend, explain_backend, primitives
from jax_te.ops.linear import gemms
from jax_te.ops.linear.dense import linear_op
from jax_te.ops.linear.plan import LinearOptions
from jax_te.ops.linear.resolve import Layer, LinearArgs, check_differentiated, run_op, why_once
from jax_te.ops.linear.spec import LinearSpec, LinearWeights, OpSpec
from jax_te.ops.named import named
from jax_te.ops.sharded_vjp import sharded_vjp
from jax_te.quantize import Quantization
from jax_te.sharding import all_gather
from jax_te.typing import Array, DTypeLike, LogicalAxes


def head_logits(x: Array, kernel: Array, bias: Array | None = None, *, axes: LogicalAxes, tied: bool) -> Array:
    """Return logits ``[b, s, v]`` of hidden states ``[b, s, h]``, in their dtype.

    `explain_head` says which backend runs the three GEMMs.

    Args:
        x: hidden states.
        kernel: ``[h, v]``; if it is ``tied`` to an embedding table, that table, ``[v, h]``.
        bias: ``[v]``, or None.
        axes: logical axes of ``x``.
        tied: whether the kernel is a table. It is read, and its gradient is written, as it lies in memory.

    >>> head_logits(jnp.ones((1, 2, 4)), jnp.ones((8, 4)), axes=("batch", "sequence", "hidden"), tied=True).shape
    (1, 2, 8)
    """
    # Not "sequence_parallel": the tensor axis shards the vocabulary here, and cannot shard rows, too.
    options = LinearOptions(axes, ("fsdp", "vocab"), ("batch", "sequence", "vocab"))
    layer = Layer("head", x.shape, LinearWeights(kernel.T if tied else kernel, bias), options)
    op = _tied_head if tied else linear_op

    def run(spec: OpSpec, *arrays: Any) -> Array:
        (head,) = spec.layers
        plan = head.plan
        shards = 1 if plan.mesh is None else prod(plan.mesh.shape[axis] for axis in plan.feature_axes)
        choice = explain_head(x.dtype, layer.weights.kernel.shape[1] // shards, unsharded=plan.reason)
        return op(spec._replace(layers=(replace(head, backend=primitives(choice.backend)),)), *arrays)

    # Resolved for XLA, which runs any head, and then for the backend that can run this one.
    return run_op(run, "dense", x, (layer,), recipe=None, backend="xla")


def explain_head(dtype: DTypeLike, vocabulary: int, *, unsharded: str | None = None) -> BackendChoice:
    """Return the backend of the head's GEMMs in this context, and the reason.

    It is the ambient one where that can run them and is no slower: XLA compiles and measures kernels for each GEMM of
    its own, which takes seconds. cuBLAS takes up to twice as long where rows of the logits do not begin at multiples of
    16 bytes. No backend raises: what Transformer Engine cannot run is XLA's, also if it was asked for.

    Args:
        dtype: dtype of the hidden states.
        vocabulary: size of the vocabulary, on a mesh that splits it a device's part.
        unsharded: reason why the devices of a mesh cannot run the GEMMs by themselves; None: they can, or there is no
            mesh.

    >>> explain_head(jnp.bfloat16, 32000).backend
    'xla'
    """
    dtype = jnp.dtype(dtype)
    xla = explain_backend("dense", backend="xla", dtype=dtype)
    if ambient_backend.value == "te":  # which raises for what it cannot run
        supported, reason = te.supports("dense", unsharded=unsharded)
        if not supported:
            return replace(xla, reason=reason)
    choice = explain_backend("dense", unsharded=unsharded, dtype=dtype)
    if choice.backend != "te":
        return choice
    if dtype == jnp.float64:
        return replace(xla, reason="TE has no GEMM of fp64")
    if vocabulary * dtype.itemsize % 16:
        reason = f"rows of {vocabulary} logits do not begin at multiples of 16 bytes, and cuBLAS is slow for them"
        return replace(xla, reason=reason)
    return choice


class _TiedResiduals(NamedTuple):
    """What backward reads: the input of the GEMMs as an operand of the backend, and the kernel ``[h, v]``, an array, on
    a mesh this device's shard."""

    x: Any
    kernel: Array


# A table ``[v, h]`` is the kernel transposed. So the GEMM that multiplies by a transposed kernel, `gemm_dgrad`, gives
# the logits, `gemm_fprop` the input's gradient, and the kernel's gradient is that of the table, transposed.


def _tied_fwd(spec: OpSpec, args: LinearArgs) -> tuple[Array, _TiedResiduals]:
    x, _, (weights,) = args
    (head,) = spec.layers
    kernel: Any = weights.kernel  # an array: no recipe quantizes it
    operand = gemms.make_operand(head, "x", x, None, axis=-1).unquantized
    table = head.backend.residual_for_dgrad(_table(head, kernel))
    logits = gemms.summed_y(head, head.backend.gemm_dgrad(operand, table, False), weights.bias)
    return logits, named(_TiedResiduals(operand, kernel), "quantized", given=weights)  # as in `dense`


def _tied_bwd(spec: OpSpec, saved: _TiedResiduals, g: Array) -> tuple[LinearArgs, Any]:
    (head,) = spec.layers
    operand, dbias = gemms.grad_operand(head, g, None)
    kernel = saved.kernel
    if any(head.kernel_all_gather):
        # Else the compiler would keep the table that forward has all-gathered.
        kernel, _ = jax.lax.optimization_barrier((kernel, g))
    backend = head.backend
    dx = backend.gemm_fprop(operand.unquantized, _table(head, kernel), None, False)
    dtable = backend.gemm_wgrad(backend.residual_for_wgrad(operand.unquantized), saved.x, head.wgrad_dtype, False)
    dkernel = gemms.summed_dkernel(head, jnp.transpose(dtable))
    weights = LinearWeights(dkernel, gemms.summed_dbias(head, dbias))
    return LinearArgs(gemms.summed_dx(head, dx), None, (weights,)), (None,)


def _table(head: LinearSpec, kernel: Array) -> Any:
    """Return the kernel ``[h, v]`` as an operand ``[v, h]``, all-gathered.

    XLA drops this transposition, of a table that was transposed, as it does that of the gradient.
    """
    # Cast before the all-gather, which so moves the compute dtype's bytes, as it does those of other layers' kernels.
    whole = all_gather(kernel.astype(head.x_dtype), head.kernel_all_gather)
    table, _ = head.backend.quantize_operand(jnp.transpose(whole), Quantization(), axis=1)
    return table


_tied_head = sharded_vjp(_tied_fwd, _tied_bwd, name="gemm", check=check_differentiated, once=why_once)
