"""The projection of hidden states to logits."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_te.ops.linear.dense import dense
from jax_te.ops.linear.plan import LinearOptions
from jax_te.ops.sharded_vjp import sharded_vjp
from jax_te.ops.wide import wide_dtype
from jax_te.typing import Array, BackendName, LogicalAxes

_LOGITS: LogicalAxes = ("batch", "sequence", "vocab")


class _Spec(NamedTuple):
    axes: LogicalAxes
    tied: bool
    backend: BackendName | None  # of backward; None: the ambient one


class _Args(NamedTuple):
    x: Array
    kernel: Array
    bias: Array | None


def head_logits(x: Array, kernel: Array, bias: Array | None = None, *, axes: LogicalAxes, tied: bool) -> Array:
    """Return logits ``[b, s, v]`` of hidden states ``[b, s, h]``, in their dtype.

    The GEMM of forward is XLA's, whatever the backend: XLA writes the gradient of the logits, which are the largest
    array of most models, over the logits, but not over the output of another library's kernel. The two GEMMs of
    backward are those of the ambient backend.

    Args:
        x: hidden states.
        kernel: ``[h, v]``; if it is ``tied`` to an embedding table, that table, ``[v, h]``.
        bias: ``[v]``, or None.
        axes: logical axes of ``x``.
        tied: whether the kernel is a table. It is read, and its gradient is written, as it lies in memory.

    >>> import jax.numpy as jnp
    >>> head_logits(jnp.ones((1, 2, 4)), jnp.ones((8, 4)), axes=("batch", "sequence", "hidden"), tied=True).shape
    (1, 2, 8)
    """
    size = kernel.shape[0 if tied else 1]
    # cuBLAS, which TE calls, takes twice as long as XLA's kernels for rows that do not begin at multiples of 16 bytes.
    backend = None if size * x.dtype.itemsize % 16 == 0 else "xla"
    return _head_logits(_Spec(axes, tied, backend), None, _Args(x, kernel, bias), out_axes=_LOGITS)


def _fwd(spec: _Spec, args: _Args) -> tuple[Array, _Args]:
    kernel = args.kernel.T if spec.tied else args.kernel
    return dense(args.x, kernel, args.bias, options=_options(spec), backend="xla"), args


def _bwd(spec: _Spec, args: _Args, g: Array) -> tuple[_Args, None]:
    x, kernel, bias = args
    dbias = None if bias is None else jnp.sum(g, axis=(0, 1), dtype=wide_dtype(g.dtype)).astype(bias.dtype)
    if not spec.tied:
        _, vjp = jax.vjp(lambda x, kernel: dense(x, kernel, options=_options(spec), backend=spec.backend), x, kernel)
        dx, dkernel = vjp(g)
        return _Args(dx, dkernel, dbias), None
    # The input's gradient is the product of ``g`` and the table. So the table's own gradient is that of this product
    # for the cotangent ``x``.
    options = LinearOptions(_LOGITS, ("vocab", "fsdp"), spec.axes)
    dx, vjp = jax.vjp(lambda table: dense(g, table, options=options, backend=spec.backend), kernel)
    (dtable,) = vjp(x)
    return _Args(dx, dtable, dbias), None


def _options(spec: _Spec) -> LinearOptions:
    # Not "sequence_parallel": the tensor axis shards the vocabulary here, and cannot shard rows, too.
    return LinearOptions(spec.axes, ("fsdp", "vocab"), _LOGITS)


_head_logits = sharded_vjp(_fwd, _bwd)
