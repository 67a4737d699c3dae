"""Arrays that are read on demand, from one part of a file or from many."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

_ML = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_NUMPY = ["float64", "float32", "float16", "bool", "complex64", "complex128"]
_NUMPY += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in (*_NUMPY, *_ML)}
"""torch's names of dtypes."""


@dataclass(frozen=True)
class Piece:
    """A part of a tensor: its start in each axis, its shape, and a function that reads it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


class StoredTensor:
    """A tensor of several pieces, which NumPy's functions read on demand (``np.asarray(tensor)``).

    Args:
        shape: shape of the whole tensor.
        dtype: dtype of all pieces.
        pieces: pieces of the tensor, which fill it and do not overlap.
        what: the tensor, for messages.

    Raises:
        ValueError: for pieces that overlap, leave a gap or lie outside.

    >>> row = Piece((0, 0), (1, 2), lambda: np.zeros((1, 2))), Piece((1, 0), (1, 2), lambda: np.ones((1, 2)))
    >>> np.asarray(StoredTensor((2, 2), np.dtype("float64"), row, "a tensor")).tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], pieces: Sequence[Piece], what: str):
        self.shape, self.dtype, self.ndim, self.size = shape, dtype, len(shape), math.prod(shape)
        self.pieces, self.what = tuple(pieces), what
        _check_cover(shape, self.pieces, what)

    @classmethod
    def of(
        cls, shape: tuple[int, ...], dtype: np.dtype[Any], read: Callable[[], np.ndarray], what: str
    ) -> StoredTensor:
        """Return a tensor of one piece."""
        return cls(shape, dtype, (Piece((0,) * len(shape), shape, read),), what)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if len(self.pieces) == 1:
            # It may be memory-mapped and read-only.
            return np.array(self._read(self.pieces[0]), dtype, copy=copy or None)
        whole = self._joined()
        return whole if dtype is None else whole.astype(dtype)

    def _joined(self) -> np.ndarray:
        # No element stays unset, since the pieces are known to fill it.
        whole = np.empty(self.shape, self.dtype)
        for piece in self.pieces:
            at = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.shape, strict=True))
            whole[at] = self._read(piece)
        return whole

    def _read(self, piece: Piece) -> np.ndarray:
        part = piece.read()
        if part.shape != piece.shape or part.dtype != self.dtype:
            raise ValueError(
                f"{self.what} is damaged: a piece is {part.dtype}{list(part.shape)}, and must be "
                f"{self.dtype}{list(piece.shape)}"
            )
        return part

    def row(self, index: int, what: str) -> StoredTensor:
        """Return the part at one index of the first axis."""
        pieces = [
            Piece(piece.offsets[1:], piece.shape[1:], functools.partial(_row, piece, index))
            for piece in self.pieces
            if piece.offsets[0] <= index < piece.offsets[0] + piece.shape[0]
        ]
        return StoredTensor(self.shape[1:], self.dtype, pieces, what)

    def first_rows(self, count: int) -> StoredTensor:
        """Return the part up to an index of the first axis."""
        return self.of((count, *self.shape[1:]), self.dtype, lambda: np.asarray(self)[:count], self.what)


Tensor = np.ndarray | StoredTensor
"""A tensor of a file; ``np.asarray`` reads it."""


def _row(piece: Piece, index: int) -> np.ndarray:
    return piece.read()[index - piece.offsets[0]]


def join_tensors(tensors: Sequence[Tensor], axis: int, blocks: int, what: str) -> Tensor:
    """Return tensors concatenated along an axis block by block: first the first blocks of all, then the second ones.

    >>> two = [np.array([0, 2]), np.array([1, 3])]
    >>> np.asarray(join_tensors(two, 0, 1, "a")).tolist(), np.asarray(join_tensors(two, 0, 2, "a")).tolist()
    ([0, 2, 1, 3], [0, 1, 2, 3])

    Raises:
        ValueError: for tensors of several shapes or dtypes, or that cannot be cut.
    """
    first = tensors[0]
    if len({(tensor.shape, tensor.dtype) for tensor in tensors}) > 1 or first.shape[axis] % blocks:
        raise ValueError(f"{what} has parts {sorted({str(tensor.shape) for tensor in tensors})}, which do not fit")
    if len(tensors) == 1:
        return first
    size = first.shape[axis] // blocks
    shape, part = list(first.shape), list(first.shape)
    shape[axis], part[axis] = first.shape[axis] * len(tensors), size
    pieces = []
    for rank, tensor in enumerate(tensors):
        for block in range(blocks):
            offsets, cut = [0] * first.ndim, [slice(None)] * first.ndim
            offsets[axis], cut[axis] = (block * len(tensors) + rank) * size, slice(block * size, (block + 1) * size)
            pieces.append(Piece(tuple(offsets), tuple(part), functools.partial(_cut, tensor, tuple(cut))))
    return StoredTensor(tuple(shape), first.dtype, pieces, what)


def _cut(tensor: Tensor, cut: tuple[slice, ...]) -> np.ndarray:
    return np.asarray(tensor)[cut]


def _check_cover(shape: tuple[int, ...], pieces: Sequence[Piece], what: str) -> None:
    rank = len(shape)
    if any(len(piece.offsets) != rank or len(piece.shape) != rank for piece in pieces):
        raise ValueError(f"{what} is damaged: it has {rank} axes, and a piece has others")
    begin = np.array([piece.offsets for piece in pieces], np.int64).reshape(len(pieces), rank)
    end = begin + np.array([piece.shape for piece in pieces], np.int64).reshape(len(pieces), rank)
    inside = bool((begin >= 0).all() and (end >= begin).all() and (end <= np.array(shape, np.int64)).all())
    # The total size is right and no pieces overlap: there is no gap.
    whole = inside and sum(math.prod(piece.shape) for piece in pieces) == math.prod(shape)
    for i in range(len(pieces) if whole else 0):
        shared = (np.maximum(begin[i], begin[i + 1 :]) < np.minimum(end[i], end[i + 1 :])).all(axis=1)
        whole = whole and not shared.any()
    if not whole:
        raise ValueError(f"{what} is damaged: its {len(pieces)} pieces do not fill {list(shape)} without overlap")
