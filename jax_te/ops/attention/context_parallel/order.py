"""The zig-zag order, in which every rank has as much to do under a causal mask as any other."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_te.config.internal import check_positive
from jax_te.sharding.internal import axis_ranks
from jax_te.typing import Array

AnyArray = TypeVar("AnyArray", Array, np.ndarray)


def chunk_order(ranks: int) -> list[int]:
    """Which of ``2 ranks`` chunks stand one after another: those of rank 0, those of rank 1 and so on.

    >>> chunk_order(2)
    [0, 3, 1, 2]
    """
    return [chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]


def zigzag_positions(s: int, ranks: int | None = None) -> Array:
    """Position in its sequence of every token of one in zig-zag order, int32 ``[s]``: for rotary and other position
    embeddings, and for ``labels`` that are made later.

    A sequence is cut into twice as many chunks as there are context ranks ``C``; rank ``r`` has chunks ``r`` and
    ``2 C - 1 - r``, an early one with few keys to see and a late one with many.

    Args:
        s: tokens of a whole sequence, a multiple of ``2 C``.
        ranks: ``C``. None: of the mesh in use, 1 without one.

    Raises:
        ValueError: if ``s`` is no multiple of ``2 C``.

    Source: Megatron-Core's ``get_batch_on_this_cp_rank``; ``reorder_causal_load_balancing`` in te.jax.

    >>> zigzag_positions(8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return jnp.asarray(_order(s, axis_ranks("sequence") if ranks is None else ranks), jnp.int32)


def reorder_to_zigzag(x: AnyArray, ranks: int | None = None, axis: int = 1) -> AnyArray:
    """``x`` with one axis, its sequence, brought into zig-zag order, see `zigzag_positions`.

    Reorder tokens and labels, ``[b, s]``, where they are read, before they are put on the devices: that is cheaper than
    to reorder activations, and an array that is split over the axis already would be sent around.

    Args:
        x: an array of NumPy or JAX; so is the result.
        ranks: context ranks. None: of the mesh in use, 1 without one.
        axis: the sequence's.

    Raises:
        ValueError: if the axis is no multiple of twice the ranks.

    >>> reorder_to_zigzag(np.arange(8)[None], 2).tolist()
    [[0, 1, 6, 7, 2, 3, 4, 5]]
    """
    return _take(x, _order(x.shape[axis], axis_ranks("sequence") if ranks is None else ranks), axis)


def undo_zigzag(x: AnyArray, ranks: int | None = None, axis: int = 1) -> AnyArray:
    """The opposite of `reorder_to_zigzag`.

    >>> undo_zigzag(reorder_to_zigzag(jnp.arange(8)[None], 2), 2).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    order = _order(x.shape[axis], axis_ranks("sequence") if ranks is None else ranks)
    return _take(x, np.argsort(order), axis)


def _order(s: int, ranks: int) -> np.ndarray:
    check_positive(sequence=s, ranks=ranks)
    if s % (2 * ranks):
        raise ValueError(
            f"a sequence of {s} cannot be cut into the two chunks that each of {ranks} context ranks has in zig-zag "
            f"order; pad it to a multiple of {2 * ranks}"
        )
    return np.arange(s).reshape(2 * ranks, -1)[chunk_order(ranks)].reshape(-1)


def _take(x: AnyArray, order: np.ndarray, axis: int) -> AnyArray:
    if isinstance(x, jax.Array):
        return jnp.take(x, jnp.asarray(order), axis=axis)
    return np.take(x, order, axis=axis)
