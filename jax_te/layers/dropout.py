"""Dropout of activations and of whole examples."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_te._validation import check_axes, check_float, check_rate, checked
from jax_te.ops import zigzag_positions
from jax_te.random import key_for
from jax_te.sharding import auto_region, axis_ranks
from jax_te.typing import Array, Key, LogicalAxes

_SEQUENCE = ("sequence", "sequence_parallel")


@checked
def dropout(x: Array, rate: float, key: Key | None, *, axes: LogicalAxes, zigzag: bool = False) -> Array:
    """Return ``x`` with each element set to zero with probability ``rate``, and the others divided by ``1 - rate``.

    The function is the identity if ``rate`` is 0 or ``key`` None. Which elements are dropped depends only on the key,
    the shape and the positions in the sequence: it is the same on every mesh, and in zig-zag order.

    Args:
        x: array of any shape and floating dtype; the result has the same.
        rate: dropout probability in [0, 1).
        key: ``jax.random.key``, or None.
        axes: logical axes of ``x``.
        zigzag: whether the sequence is in zig-zag order where context devices split it.

    >>> dropout(jnp.ones(3), 0.5, None, axes=(None,)).tolist()
    [1.0, 1.0, 1.0]
    """
    _check(x, rate, axes)
    if key is None or rate == 0.0:
        return x

    def drop(x: Array, key: Array) -> Array:
        keep = _keep_mask(key_for("dropout", key), 1.0 - rate, x.shape, axes, zigzag)
        return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))

    return auto_region(drop, axes)(x, key)


def _check(x: Array, rate: float, axes: LogicalAxes) -> None:
    check_float("dropout", x)
    check_rate(rate=rate)
    if len(axes) != x.ndim:
        raise ValueError(f"axes must name each axis of x, of shape {x.shape}, got {axes}")


def _keep_mask(key: Array, probability: float, shape: tuple[int, ...], axes: LogicalAxes, zigzag: bool) -> Array:
    """Return True for each element that is not dropped."""
    # Each position has its own key, so that a device draws only for its own positions, in any storage order (zig-zag).
    axis = next((axis for axis, name in enumerate(axes) if name in _SEQUENCE), None)
    if axis is None:
        return jax.random.bernoulli(key, probability, shape)
    s, rest = shape[axis], (*shape[:axis], *shape[axis + 1 :])
    # Without context devices, a load-balanced batch has its sequences in natural order.
    reordered = zigzag and axis_ranks("sequence") > 1
    positions = zigzag_positions(s) if reordered else jnp.arange(s, dtype=jnp.int32)
    if str(jax.random.key_impl(key)) != "threefry2x32":
        # Under vmap the bits of other implementations follow from the first key alone, and so from the storage order.
        key = jax.random.wrap_key_data(jax.random.bits(key, (2,), jnp.uint32), impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, positions)
    return jax.vmap(lambda key: jax.random.bernoulli(key, probability, rest), out_axes=axis)(keys)


@checked
def drop_path(x: Array, rate: float, key: Key | None, *, axes: LogicalAxes) -> Array:
    """Return ``x`` with each example set to zero with probability ``rate``, and the others divided by ``1 - rate``.

    This is stochastic depth if ``x`` is the output of a block that is added to the residual stream. The function is the
    identity if ``rate`` is 0 or ``key`` None. The result is the same on every mesh.

    Args:
        x: ``[b, ...]`` of any floating dtype; the result has the same.
        rate: dropout probability in [0, 1).
        key: ``jax.random.key``, or None.
        axes: logical axes of ``x``.

    Source: ``drop_path_rate`` of ``transformer_engine.pytorch.TransformerLayer``; Huang et al. 2016.

    >>> drop_path(jnp.ones((2, 3)), 0.5, None, axes=(None, None)).tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    """
    _check(x, rate, axes)
    check_axes("x", x)
    if key is None or rate == 0.0:
        return x

    def drop(x: Array, key: Array) -> Array:
        keep = jax.random.bernoulli(key_for("drop_path", key), 1.0 - rate, (x.shape[0], *(1,) * (x.ndim - 1)))
        return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype))

    return auto_region(drop, axes)(x, key)
