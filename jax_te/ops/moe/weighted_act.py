"""The activation of experts times the probability of each row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_te.ops.linear.activation import activation
from jax_te.ops.linear.norm_and_activation import Activation
from jax_te.ops.moe.placement import ExpertPlacement
from jax_te.ops.pallas.support import supported
from jax_te.ops.pallas.weighted_act import columns_of, weighted_act_backward
from jax_te.ops.sharded_vjp import sharded_vjp
from jax_te.ops.xla.activation import act, act_of_parts
from jax_te.sharding import device_mesh
from jax_te.typing import Array

_SMALLEST = 64
"""The fewest columns of a tile with which the kernel reads whole lines of memory."""

_ONCE = "the activation of experts has no second derivatives on a Hopper GPU: its backward is a kernel"


def runs_here(x: Array, weights: Array, placement: ExpertPlacement | None = None) -> bool:
    """Return whether the kernel runs for these arrays: on Hopper GPUs, each of which has its own rows."""
    rows = x.shape[0] // (1 if placement is None else placement.devices)
    return (
        (placement is not None or device_mesh() is None)
        and x.dtype in (jnp.bfloat16, jnp.float16)
        and weights.dtype == jnp.float32
        and rows % 128 == 0
        and rows > 0
        and columns_of(x.shape[2]) >= _SMALLEST
        and supported()[0]
    )


def weighted_activation(
    x: Array, weights: Array, function: Activation, *, placement: ExpertPlacement | None = None
) -> Array:
    """Return the activation of each row times its weight.

    On Hopper GPUs backward is one kernel, which writes the gradient over ``x``. Elsewhere these are two operations.

    Args:
        x: ``[rows, n_act, f]``, fp32, bf16, fp16 or fp64.
        weights: ``[rows]``, fp32 or wider.
        function: the activation of the ``n_act`` components.
        placement: placement of the rows on a mesh, see `RowGroups`. None: one array with all rows; the compiler splits
            ``f`` as the logical axis ``ffn``.

    Returns:
        ``[rows, f]`` in the dtype of ``x``.

    >>> x, weights = jnp.array([[[-1.0, 2.0]], [[1.0, 3.0]]]), jnp.array([2.0, 4.0])
    >>> weighted_activation(x, weights, Activation("relu")).tolist()
    [[0.0, 4.0], [4.0, 12.0]]
    """
    each: Any = None if placement is None else placement.row_spec
    if runs_here(x, weights, placement):
        shards = None if placement is None else placement.shards(_Args(each, each), each)
        return _weighted_act(_Spec(function), shards, _Args(x, weights), None, None)
    out_axes = (None, "ffn") if each is None else PartitionSpec(*each, None)
    z = activation(x, function.name, params=function.params, out_axes=out_axes)
    dtype = z.dtype if z.dtype == jnp.float64 else weights.dtype
    return (z.astype(dtype) * weights.astype(dtype)[:, None]).astype(z.dtype)


class _Spec(NamedTuple):
    activation: Activation


class _Args(NamedTuple):
    x: Any
    weights: Any


def _fwd(spec: _Spec, args: _Args) -> tuple[Array, _Args]:
    z = act(args.x, spec.activation)
    return (z.astype(jnp.float32) * args.weights[:, None]).astype(z.dtype), args


def _bwd(spec: _Spec, args: _Args, dy: Array) -> tuple[_Args, None]:
    return _Args(*weighted_act_backward(dy, args.x, args.weights, _function(spec.activation))), None


@functools.lru_cache(64)  # one object for each activation, under which compiled kernels are found again
def _function(activation: Activation) -> Callable[[Sequence[Array]], Array]:
    return functools.partial(act_of_parts, activation)


_weighted_act = sharded_vjp(_fwd, _bwd, name="activation", once=lambda spec: _ONCE)
