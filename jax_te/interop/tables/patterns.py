"""Layout of a foreign checkpoint's tensors in our parameters: patterns that are applied in both directions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx

Table = dict[str, dict[str, str]]
"""Path of a parameter → names of the tensors in it, each with its pattern.

``"PATTERN | PATTERN"`` is for a tensor whose first axis holds several parts, one after the other.
"""

Sizes = Mapping[str, int]
"""Letter of an axis → its size."""

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Pattern:
    """Two layouts of an array, in letters: ``"(g r d) h -> h r (g d)"``; axes in brackets are merged to one.

    ``1`` is an axis of size 1 that the first form lacks. A vector's ``"e -> e+1"`` has a 0 behind the first form's
    entries.

    >>> pattern = Pattern.parse("(g r d) h -> h r (g d)")
    >>> pattern.shape(pattern.theirs, dict(g=2, r=3, d=4, h=5)), pattern.shape(pattern.ours, dict(g=2, r=3, d=4, h=5))
    ((24, 5), (5, 3, 8))
    """

    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[tuple[str, ...], ...]
    zero_behind: bool = False

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Return the pattern of a text."""
        theirs, ours = (
            tuple(tuple((merged or axis).split()) for merged, axis in re.findall(r"\(([^)]*)\)|(\S+)", side))
            for side in text.removesuffix("+1").split("->")
        )
        return cls(theirs, ours, text.endswith("+1"))

    @staticmethod
    def shape(form: tuple[tuple[str, ...], ...], sizes: Sizes) -> tuple[int, ...]:
        """Return the shape of an array in one of the two forms."""
        return tuple(prod(1 if axis == "1" else sizes[axis] for axis in axes) for axes in form)

    def our_shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the shape of our form.

        >>> Pattern.parse("e -> e+1").our_shape({"e": 4})
        (5,)
        """
        shape = self.shape(self.ours, sizes)
        return (shape[0] + 1,) if self.zero_behind else shape

    def read(self, tensor: Any, sizes: Sizes, index: Index, dtype: np.dtype[Any], what: str = "a tensor") -> np.ndarray:
        """Return the part ``index`` of our form of ``tensor``, a new array. No more than that part is read.

        Raises:
            ValueError: for values that the dtype does not have; its message begins with ``what``.
        """
        if self.zero_behind:
            return converted(np.pad(np.asarray(tensor), (0, 1)), dtype, what)[index]
        theirs, ours = self._axes()
        # Splitting and transposing axes copies nothing; merging them does, and therefore comes last, after slicing.
        view = np.asarray(tensor).reshape(self.shape(tuple((axis,) for axis in theirs), sizes))
        view = view.transpose([theirs.index(axis) for axis in ours])
        covering: list[slice] = []
        shape, cut = [], []
        for axes, part in zip(self.ours, index, strict=True):
            # The first of merged axes is sliced to cover the part, and the others are read whole.
            inner = self.shape((axes[1:],), sizes)[0]
            first, last = part.start // inner, -(-part.stop // inner)
            covering += [slice(first, last), *(slice(None),) * (len(axes) - 1)]
            shape.append((last - first) * inner)
            cut.append(slice(part.start - first * inner, part.stop - first * inner))
        part = view[tuple(covering)]
        part = np.array(part, order="C") if part.dtype == dtype else converted(part, dtype, what)
        return part.reshape(shape)[tuple(cut)]

    def write(self, array: np.ndarray, sizes: Sizes) -> np.ndarray:
        """Return their layout of an array in our layout."""
        if self.zero_behind:
            return array.reshape(-1)[:-1]
        theirs, ours = self._axes()
        view = array.reshape(self.shape(tuple((axis,) for axis in ours), sizes))
        return view.transpose([ours.index(axis) for axis in theirs]).reshape(self.shape(self.theirs, sizes))

    def _axes(self) -> tuple[list[str], list[str]]:
        theirs, ours = ([axis for axes in form for axis in axes] for form in (self.theirs, self.ours))
        return theirs + ["1"] * ours.count("1"), ours


@dataclass(frozen=True)
class Entry:
    """One of our parameters: the tensors in it, stacked along its last axis but one if there are several.

    Args:
        pieces: name and pattern of each tensor, or of each part of one: consecutive rows of a tensor that has several.
        experts: number of experts, each with tensors of its own, whose names have its number in place of ``{e}``; the
            parameter has an axis of experts in front. None: names are those of tensors.

    >>> entry = Entry.of({"gate": "f h -> h 1 f", "up": "f h -> h 1 f"})
    >>> entry.shape(dict(f=4, h=3)), entry.their_shapes(dict(f=4, h=3))
    ((3, 2, 4), {'gate': (4, 3), 'up': (4, 3)})
    >>> Entry.of({"w{e}": "f h -> h f"}, experts=2).their_shapes(dict(f=4, h=3))
    {'w0': (4, 3), 'w1': (4, 3)}
    >>> Entry.of({"gate_up": "f h -> h 1 f | f h -> h 1 f"}).their_shapes(dict(f=4, h=3))
    {'gate_up': (8, 3)}
    """

    pieces: tuple[tuple[str, Pattern], ...]
    experts: int | None = None

    @classmethod
    def of(cls, pieces: Mapping[str, str], experts: int = 0) -> Entry:
        """Return the entry of a table's row; ``experts`` is their number in a row whose names have ``{e}``."""
        several = any("{e}" in name for name in pieces)
        parts = [(name, Pattern.parse(text)) for name, texts in pieces.items() for text in texts.split("|")]
        return cls(tuple(parts), experts if several else None)

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return [*dict.fromkeys(name for part in self.parts() for name, _ in part.pieces)]

    def parts(self) -> list[Entry]:
        """Return the entry of each expert's part of the parameter; the entry itself if it is not that of experts."""
        if self.experts is None:
            return [self]
        numbers = map(str, range(self.experts))
        return [Entry(tuple((name.replace("{e}", i), pattern) for name, pattern in self.pieces)) for i in numbers]

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the shape of our parameter."""
        if self.experts is not None:
            return self.experts, *Entry(self.pieces).shape(sizes)
        shapes = [list(pattern.our_shape(sizes)) for _, pattern in self.pieces]
        if len(shapes) > 1:
            shapes[0][-2] = sum(shape[-2] for shape in shapes)
        return tuple(shapes[0])

    def their_shapes(self, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, pattern in (piece for part in self.parts() for piece in part.pieces):
            rows, *others = Pattern.shape(pattern.theirs, sizes)
            shapes[name] = (shapes.get(name, (0,))[0] + rows, *others)
        return shapes

    def _their_rows(self, sizes: Sizes) -> Iterator[slice | None]:
        """Return the rows of its tensor that each piece has, None for a whole tensor."""
        names = [name for name, _ in self.pieces]
        begin = dict.fromkeys(names, 0)
        for name, pattern in self.pieces:
            end = begin[name] + Pattern.shape(pattern.theirs, sizes)[0]
            yield slice(begin[name], end) if names.count(name) > 1 else None
            begin[name] = end

    def read(self, tensors: Mapping[str, Any], sizes: Sizes, index: Index, dtype: np.dtype[Any]) -> np.ndarray:
        """Return a part of our parameter, a new array."""
        index = tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, self.shape(sizes), strict=True))
        if self.experts is not None:
            chosen = self.parts()[index[0]]
            return np.stack([part.read(tensors, sizes, index[1:], dtype) for part in chosen])
        if len(self.pieces) == 1:
            (name, pattern), *_ = self.pieces
            return pattern.read(tensors[name], sizes, index, dtype, name)
        out = np.empty([part.stop - part.start for part in index], dtype)
        begin, wanted = 0, index[-2]
        for (name, pattern), rows in zip(self.pieces, self._their_rows(sizes), strict=True):
            end = begin + Pattern.shape(pattern.ours, sizes)[-2]
            first, last = max(begin, wanted.start), min(end, wanted.stop)
            if first < last:
                part = (*index[:-2], slice(first - begin, last - begin), index[-1])
                tensor = tensors[name] if rows is None else np.asarray(tensors[name])[rows]
                out[..., first - wanted.start : last - wanted.start, :] = pattern.read(tensor, sizes, part, dtype, name)
            begin = end
        return out

    def write(self, array: np.ndarray, sizes: Sizes) -> Iterator[tuple[str, np.ndarray]]:
        """Return their tensors, in order, each with its name."""
        if self.experts is not None:
            for part, own in zip(self.parts(), array, strict=True):
                yield from part.write(own, sizes)
            return
        if len(self.pieces) == 1:
            array = array[..., None, :]  # stacked, as are those of several tensors
        begin = 0
        for name, pieces in itertools.groupby(self.pieces, lambda piece: piece[0]):
            parts = []
            for _, pattern in pieces:
                end = begin + (1 if len(self.pieces) == 1 else Pattern.shape(pattern.ours, sizes)[-2])
                parts.append(pattern.write(array[..., begin:end, :], sizes))
                begin = end
            yield name, parts[0] if len(parts) == 1 else np.concatenate(parts)


def converted(array: np.ndarray, dtype: Any, what: str) -> np.ndarray:
    """Return values in a dtype; those that are not finite stay as they are.

    Raises:
        ValueError: for finite values beyond those of a dtype with fewer exponents, float16 for bfloat16 and float32;
            its message begins with ``what``.

    >>> converted(np.array([1.0, np.inf], np.float32), np.float16, "a")
    array([ 1., inf], dtype=float16)
    """
    dtype = np.dtype(dtype)
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore"):
        values = array.astype(dtype, order="C")
    if _largest(dtype) < _largest(array.dtype) / 2:  # of bfloat16 and float32 it is the same but for its last digits
        beyond = ~np.isfinite(values) & np.isfinite(array)
        if beyond.any():
            raise ValueError(
                f"{what} has {int(beyond.sum())} values beyond the largest of {dtype}, {_largest(dtype)}, which would "
                f"become infinite; give another dtype, such as {array.dtype}"
            )
    return values


def _largest(dtype: np.dtype[Any]) -> float:
    """Return the largest finite value of a dtype of floats, 0 for others."""
    return float(ml_dtypes.finfo(dtype).max) if "float" in dtype.name else 0.0


def layer_rows(table: Table, count: int, **names: str) -> Table:
    """Return the rows of all layers, see `rows_of_layer`.

    >>> layer_rows({"layers/{i}/a": {"h.{i}.b": "h -> h"}}, 2)
    {'layers/0/a': {'h.0.b': 'h -> h'}, 'layers/1/a': {'h.1.b': 'h -> h'}}
    """
    return {path: row for i in range(count) for path, row in rows_of_layer(table, i, **names).items()}


def rows_of_layer(table: Table, number: int, **names: str) -> Table:
    """Return the rows of one layer: ``{i}`` is replaced by its number, other fields but ``{e}`` by ``names``.

    >>> rows_of_layer({"layers/{i}/a": {"h.{i}.b{e}": "h -> h"}}, 2)
    {'layers/2/a': {'h.2.b{e}': 'h -> h'}}
    """
    fields = {"i": number, "e": "{e}"} | names
    return {
        path.format(**fields): {name.format(**fields): text for name, text in pieces.items()}
        for path, pieces in table.items()
    }


def is_state(path: str) -> bool:
    """Return whether the entry of a path is a state of the model, which has a dtype of its own, and no parameter.

    >>> is_state("layers/0/mlp/router/expert_bias"), is_state("layers/0/mlp/router/kernel")
    (True, False)
    """
    return path.endswith(("/expert_bias", "/quantile_bias"))


def stored_in(entries: Mapping[str, Entry]) -> Callable[[tuple[Any, ...], Any], bool]:
    """Return a filter of NNX: parameters, and other Variables of which ``entries`` have tensors, by their paths."""

    def stored(path: tuple[Any, ...], variable: Any) -> bool:
        return issubclass(getattr(variable, "type", type(variable)), nnx.Param) or "/".join(map(str, path)) in entries

    return stored
