"""The projection of hidden states to logits, by the ambient backend's GEMMs where they are no slower than XLA's."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_te.ops import te
from jax_te.ops.backend import Primitives, ambient_backend, explain_backend, primitives
from jax_te.ops.linear import gemms
from jax_te.ops.linear.dense import linear_op
from jax_te.ops.linear.plan import LinearOptions
from jax_te.ops.linear.resolve import Layer, LinearArgs, check_differentiated, run_op, why_once
from jax_te.ops.linear.spec import LinearSpec, LinearWeights, OpSpec
from jax_te.ops.sharded_vjp import sharded_vjp
from jax_te.ops.stacked import named
from jax_te.quantize import Quantization
from jax_te.sharding import all_gather
from jax_te.typing import Array, LogicalAxes


def head_logits(x: Array, kernel: Array, bias: Array | None = None, *, axes: LogicalAxes, tied: bool) -> Array:
    """Return logits ``[b, s, v]`` of hidden states ``[b, s, h]``, in their dtype.

    The three GEMMs are the ambient backend's where it can run them: XLA compiles and measures kernels for each GEMM of
    its own, which takes seconds. Under ``"te"``, too, they are XLA's where a device's rows of the logits do not begin
    at multiples of 16 bytes, for which cuBLAS takes up to twice as long, or where devices cannot run them by
    themselves.

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
        head = replace(head, backend=primitives(_backend_of_head(head, layer.weights.kernel.shape[1])))
        return op(spec._replace(layers=(head,)), *arrays)

    # Resolved for XLA, which runs any head, and then for the backend that can run this one.
    return run_op(run, "dense", x, (layer,), recipe=None, backend="xla")


def _backend_of_head(head: LinearSpec, vocabulary: int) -> Primitives:
    """Return the ambient backend if it can run the GEMMs and is no slower, else ``"xla"``.

    Args:
        head: the resolved layer.
        vocabulary: size of the vocabulary, on all devices.
    """
    plan, dtype = head.plan, jnp.dtype(head.x_dtype)
    if ambient_backend.value != "te":
        return "xla" if dtype == jnp.float64 else explain_backend("dense", unsharded=plan.reason).backend
    supported, _ = te.supports("dense", unsharded=plan.reason)
    shards = 1 if plan.mesh is None else prod(plan.mesh.shape[axis] for axis in plan.feature_axes)
    aligned = vocabulary // shards * dtype.itemsize % 16 == 0
    # TE has no kernel for fp64.
    return "te" if supported and aligned and dtype != jnp.float64 else "xla"


class _TiedResiduals(NamedTuple):
    """What backward reads: the input of the GEMMs as an operand of the backend, and the kernel ``[h, v]``, an array."""

    x: Any
    kernel: Array


def _tied_fwd(spec: OpSpec, args: LinearArgs) -> tuple[Array, _TiedResiduals]:
    x, _, (weights,) = args
    (head,) = spec.layers
    operand = gemms.make_operand(head, "x", x, None, axis=-1).unquantized
    # In the compute dtype before an all-gather, which then moves less.
    kernel = weights.kernel.astype(x.dtype)  # type: ignore[union-attr]  # an array: no recipe quantizes it
    logits = head.backend.gemm_dgrad(operand, head.backend.residual_for_dgrad(_table(head, kernel)), False)
    saved = _TiedResiduals(operand, kernel)
    return gemms.summed_y(head, logits, weights.bias), named(saved, "quantized", given=weights)  # as in `dense`


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
    whole = all_gather(kernel, head.kernel_all_gather)
    table, _ = head.backend.quantize_operand(jnp.transpose(whole), Quantization(), axis=1)
    return table


_tied_head = sharded_vjp(_tied_fwd, _tied_bwd, name="gemm", check=check_differentiated, once=why_once)
