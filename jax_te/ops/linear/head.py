"""The projection of hidden states to logits: XLA's GEMM forward, the ambient backend's two GEMMs in backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_te.ops import te
from jax_te.ops.backend import Primitives, ambient_backend, explain_backend, primitives
from jax_te.ops.first_order import why_backend
from jax_te.ops.linear import gemms
from jax_te.ops.linear.gemms import LinearResiduals
from jax_te.ops.linear.plan import LinearOptions
from jax_te.ops.linear.resolve import Layer, LinearArgs, check_differentiated, run_op
from jax_te.ops.linear.spec import LinearSpec, LinearWeights, OpSpec
from jax_te.ops.sharded_vjp import sharded_vjp
from jax_te.ops.stacked import named
from jax_te.quantize import Quantization
from jax_te.typing import Array, DTypeLike, LogicalAxes


class _HeadSpec(NamedTuple):
    """A resolved head: its layer, under the ``xla`` backend, and what backward does otherwise."""

    layers: tuple[LinearSpec, ...]
    backward: Primitives
    tied: bool


def head_logits(x: Array, kernel: Array, bias: Array | None = None, *, axes: LogicalAxes, tied: bool) -> Array:
    """Return logits ``[b, s, v]`` of hidden states ``[b, s, h]``, in their dtype.

    The GEMM of forward is XLA's, whatever the backend: XLA writes the gradient of the logits, which are the largest
    array of most models, over the logits, but not over the output of another library's kernel. The two GEMMs of
    backward are those of the ambient backend where it can run them, since XLA takes long to compile its own: under
    ``"te"``, too, they are XLA's where a device's rows of the logits do not begin at multiples of 16 bytes, for which
    cuBLAS takes up to twice as long, or where devices cannot run them by themselves.

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

    def op(spec: OpSpec, *arrays: Any) -> Array:
        backward = _backend_of_backward(x.dtype, spec.layers[0].plan.reason)
        return _head_logits(_HeadSpec(spec.layers, backward, tied), *arrays)

    return run_op(op, "dense", x, (layer,), recipe=None, backend="xla")


def _backend_of_backward(dtype: DTypeLike, unsharded: str | None) -> Primitives:
    """Return the ambient backend if it can run the GEMMs, else ``"xla"``.

    Args:
        dtype: dtype of the hidden states.
        unsharded: reason why devices of a mesh cannot run them by themselves; None: they can, or there is no mesh.
    """
    if dtype == jnp.float64:  # which TE has no kernel for
        return "xla"
    if ambient_backend.value != "te":
        return explain_backend("dense", unsharded=unsharded).backend
    supported, _ = te.supports("dense", unsharded=unsharded)
    return "te" if supported else "xla"


def _fwd(spec: _HeadSpec, args: LinearArgs) -> tuple[Array, LinearResiduals]:
    x, _, (weights,) = args
    (layer,) = spec.layers
    logits, saved = gemms.forward(layer, gemms.make_operand(layer, "x", x, None, axis=-1), weights, x)
    return logits, named(saved, "quantized", given=weights)  # as in `jax_te.ops.dense`


def _bwd(spec: _HeadSpec, saved: LinearResiduals, g: Array) -> tuple[LinearArgs, Any]:
    aligned = g.shape[-1] * g.dtype.itemsize % 16 == 0
    backend = primitives(spec.backward if aligned else "xla")
    layer = replace(spec.layers[0], backend=backend)
    g_operand, dbias = gemms.grad_operand(layer, g, None)
    # Forward has saved plain arrays.
    x, _ = backend.quantize_operand(saved.x, Quantization(), axis=-1)
    if spec.tied and not any(layer.kernel_all_gather):
        dx, dkernel = _by_table(layer, x, saved.kernel, g_operand.unquantized)
        weights, sink = LinearWeights(dkernel, gemms.summed_dbias(layer, dbias)), None
    else:  # a kernel that is all-gathered is not a table any more
        kernel, _ = backend.quantize_operand(saved.kernel, Quantization(), axis=1)
        saved = saved._replace(x=backend.residual_for_wgrad(x), kernel=backend.residual_for_dgrad(kernel))
        dx, weights, sink = gemms.backward(layer, saved, g_operand, dbias, after=g)
    return LinearArgs(dx, None, (weights,)), (sink,)


def _by_table(layer: LinearSpec, x: Any, kernel: Array, g: Any) -> tuple[Array, Array]:
    """Return the gradients of input and kernel, by GEMMs that read and write the kernel ``[h, v]`` as a table.

    Args:
        layer: the layer; its backend runs the GEMMs.
        x, g: operands, the input ``[b, s, h]`` and the gradient of the logits ``[b, s, v]``.
        kernel: the kernel.
    """
    backend = layer.backend
    # XLA drops this transposition, of a table that was transposed, and the one below, whose result will be.
    table, _ = backend.quantize_operand(jnp.transpose(kernel), Quantization(), axis=1)
    dx = backend.gemm_fprop(g, table, None, False)
    dtable = backend.gemm_wgrad(backend.residual_for_wgrad(g), x, layer.wgrad_dtype, False)
    return gemms.summed_dx(layer, dx), gemms.summed_dkernel(layer, jnp.transpose(dtable))


_head_logits = sharded_vjp(
    _fwd, _bwd, name="gemm", check=check_differentiated, once=lambda spec: why_backend(spec.backward)
)
