"""The activation of experts times the probability of each row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_te.ops.linear.activation import activation
from jax_te.ops.linear.norm_and_activation import Activation
from jax_te.ops.pallas.support import supported
from jax_te.ops.pallas.weighted_act import columns_of, weighted_act_backward
from jax_te.ops.sharded_vjp import sharded_vjp
from jax_te.ops.xla.activation import act, act_of_parts
from jax_te.sharding import current_mesh
from jax_te.typing import Array, LogicalAxes

_SMALLEST = 64
"""The fewest columns of a tile with which the kernel reads whole lines of memory."""

_ONCE = "the activation of experts has no second derivatives on a Hopper GPU: its backward is a kernel"


def runs_here(x: Array, weights: Array) -> bool:
    """Return whether the kernel runs for these arrays on the default device: on one Hopper GPU."""
    mesh = current_mesh()
    return (
        (mesh is None or mesh.size == 1)
        and x.dtype in (jnp.bfloat16, jnp.float16)
        and weights.dtype == jnp.float32
        and x.shape[0] % 128 == 0
        and x.shape[0] > 0
        and columns_of(x.shape[2]) >= _SMALLEST
        and supported()[0]
    )


def weighted_activation(
    x: Array, weights: Array, function: Activation, *, out_axes: LogicalAxes | PartitionSpec = (None, "ffn")
) -> Array:
    """Return the activation of each row times its weight.

    On one Hopper GPU backward is one kernel, which writes the gradient over ``x``. Elsewhere these are two operations.

    Args:
        x: ``[rows, n_act, f]``, fp32, bf16 or fp16.
        weights: ``[rows]``, fp32 or wider.
        function: the activation of the ``n_act`` components.
        out_axes: sharding of the result, see `jax_te.ops.activation`.

    Returns:
        ``[rows, f]`` in the dtype of ``x``.

    >>> x, weights = jnp.array([[[-1.0, 2.0]], [[1.0, 3.0]]]), jnp.array([2.0, 4.0])
    >>> weighted_activation(x, weights, Activation("relu")).tolist()
    [[0.0, 4.0], [4.0, 12.0]]
    """
    if runs_here(x, weights):
        return _weighted_act(_Spec(function), None, _Args(x, weights), None, None)
    z = activation(x, function.name, params=function.params, out_axes=out_axes)
    return (z.astype(weights.dtype) * weights[:, None]).astype(z.dtype)


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
