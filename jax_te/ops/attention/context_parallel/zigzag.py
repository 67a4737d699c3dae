"""The zig-zag order of a sequence, which balances the work of a causal mask over the devices."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_te._validation import check_positive, checked
from jax_te.sharding import axis_ranks
from jax_te.typing import Array

AnyArray = TypeVar("AnyArray", Array, np.ndarray)


def chunk_order(shards: int) -> list[int]:
    """Return the order of the ``2 shards`` chunks: those of shard 0, those of shard 1 and so on.

    >>> chunk_order(2)
    [0, 3, 1, 2]
    """
    return [chunk for shard in range(shards) for chunk in (shard, 2 * shards - 1 - shard)]


@checked
def zigzag_positions(s: int, ranks: int | None = None) -> Array:
    """Return the position of every token of a sequence in zig-zag order, int32 ``[s]``.

    Rotary and other position embeddings need it, and so do ``labels`` derived later. A sequence is cut into twice as
    many chunks as the context axis has devices, ``C``; device ``i`` has chunks ``i`` and ``2 C - 1 - i``, an early one
    that attends to few keys and a late one that attends to many.

    Args:
        s: tokens of a whole sequence, a multiple of ``2 C``.
        ranks: ``C``. None: size of the context axis of the mesh in use, 1 without a mesh.

    Raises:
        ValueError: if ``s`` is not a multiple of ``2 C``.

    Source: Megatron-Core's ``get_batch_on_this_cp_rank``; ``reorder_causal_load_balancing`` in te.jax.

    >>> zigzag_positions(8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return jnp.asarray(_order(s, axis_ranks("sequence") if ranks is None else ranks), jnp.int32)


@checked
def reorder_to_zigzag(x: AnyArray, ranks: int | None = None, axis: int = 1) -> AnyArray:
    """Return ``x`` with its sequence axis brought into zig-zag order, see `zigzag_positions`.

    Reorder tokens and labels, ``[b, s]``, where they are read, before they are put on the devices: that is cheaper than
    to reorder activations, and reordering an array that is sharded along the axis would need communication.

    Args:
        x: an array of NumPy or JAX; so is the result.
        ranks: size of the context axis. None: that of the mesh in use, 1 without a mesh.
        axis: the sequence axis.

    Raises:
        ValueError: if the axis is not a multiple of twice ``ranks``.

    >>> reorder_to_zigzag(np.arange(8)[None], 2).tolist()
    [[0, 1, 6, 7, 2, 3, 4, 5]]
    """
    _check_axis(x, axis)
    return _take(x, _order(x.shape[axis], axis_ranks("sequence") if ranks is None else ranks), axis)


@checked
def undo_zigzag(x: AnyArray, ranks: int | None = None, axis: int = 1) -> AnyArray:
    """Return ``x`` in natural order: the inverse of `reorder_to_zigzag`.

    >>> undo_zigzag(reorder_to_zigzag(jnp.arange(8)[None], 2), 2).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    _check_axis(x, axis)
    order = _order(x.shape[axis], axis_ranks("sequence") if ranks is None else ranks)
    return _take(x, np.argsort(order), axis)


def _check_axis(x: Any, axis: int) -> None:
    """Raise for an array that has no such axis."""
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis must be one of an array of shape {x.shape}, got {axis}")


def _order(s: int, ranks: int) -> np.ndarray:
    check_positive(sequence=s, ranks=ranks)
    if s % (2 * ranks):
        raise ValueError(
            f"a sequence of {s} cannot be cut into the two chunks that each of {ranks} devices has in zig-zag order; "
            f"pad it to a multiple of {2 * ranks}"
        )
    # On the host: the order is a constant of the program.
    return np.arange(s).reshape(2 * ranks, -1)[chunk_order(ranks)].reshape(-1)


def _take(x: AnyArray, order: np.ndarray, axis: int) -> AnyArray:
    # NumPy arrays stay NumPy's: data loaders reorder on the host, where jnp would put each batch on a device.
    if isinstance(x, jax.Array):
        return jnp.take(x, jnp.asarray(order), axis=axis)
    return np.take(x, order, axis=axis)
