"""Batches of tokens, from an array in memory or on the disk."""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jax_te._processes import check_same
from jax_te._validation import check_positive, check_seed, checked, require_extra
from jax_te.data.objectives import IGNORED, NEXT_TOKENS, Example, NextTokens, Objective

MAX_POSITIONS = 2**32 - 1
"""Largest number of positions, since grain shuffles with 32 bits."""

_LONGEST_REPR = 4096
"""Characters of an objective's repr that the state of the batches holds; of a longer one it holds a checksum."""

PIECE, _PIECES = 2**20, 64
"""Bytes of a piece of a memory map, and number of pieces that are read at the start."""


@checked
class TrainBatches:
    """Endless batches of windows at random positions of a text, through grain.

    Each epoch visits every position once, in its own random order, which ``seed`` determines; beyond 2^32 positions, as
    many evenly spaced ones.

    Args:
        text: tokens, integers ``[n]``, at least as many as a window, which has ``seq_len + 1`` for decoders; only the
            requested windows are read from a memory map.
        batch_size: ``b``.
        seq_len: ``s``.
        seed: seed of the order of windows, in [0, 2^32).
        vocab_size: number below which tokens must be, from 0 on. None: they are of any size that int32 holds.
        sharding: sharding of a batch ``[b, s]``: batches are global ``jax.Array``, of which each process reads the rows
            that its devices hold. The windows and their order are the same without it, and for every number of
            processes.
        objective: what a window becomes: `NextTokens`, `MaskedTokens`, `CorruptedSpans`, or an `Objective` of your own
            whose ``repr`` is the same in each process, since it is part of the state. What is random in an example
            is determined by ``seed`` and by its place among all examples, so that it does not depend on where the
            batches were resumed, nor on ``sharding``.

    Iterating yields ``{"tokens": i32[b, s], "labels": i32[b, s]}``; a label is its token's successor. Another
    ``objective`` yields arrays of its own.

    Raises:
        ImportError: without grain.
        ValueError: for a text that is not integers ``[n]``, or is shorter than a window; for a length that the
            objective cannot have; for an objective whose ``repr`` has an address in memory; for a token outside of the
            vocabulary: of a memory map beyond 64 MiB, from ``next`` if it is in none of the 64 pieces of a MiB that are
            read at the start; with a ``sharding`` over all processes, if one has another text or setting.

    >>> batches = TrainBatches(np.arange(100, dtype=np.uint8), batch_size=2, seq_len=4, seed=0)
    >>> batch = next(batches)
    >>> batch["tokens"].shape, bool((batch["tokens"] + 1 == batch["labels"]).all())
    ((2, 4), True)
    """

    def __init__(
        self,
        text: np.ndarray,
        *,
        batch_size: int,
        seq_len: int,
        seed: int,
        vocab_size: int | None = None,
        sharding: Sharding | None = None,
        objective: Objective = NEXT_TOKENS,
    ):
        check_positive(batch_size=batch_size, seq_len=seq_len)
        check_seed(seed)
        _check_repr(objective)
        self._lengths, window = objective.lengths(seq_len), objective.window(seq_len)
        self._stride = -(-_positions(text, window, seq_len) // MAX_POSITIONS)
        positions = _positions(text, window, seq_len) // self._stride
        check_vocabulary(text, vocab_size)
        grain: Any = require_extra("grain")
        # Without a number grain repeats until 2^63 - 1 windows, whose batches of one it cannot count.
        epochs = 2**62 // positions
        # A batch takes well under a millisecond: threads that read ahead would only take time from XLA's.
        self._positions = grain.MapDataset.range(positions).seed(seed).shuffle().repeat(epochs)
        self._read = partial(_example, text, window=window, vocab_size=vocab_size, objective=objective)
        self._next, self._sharding = 0, sharding
        # Stored with the state: grain would resume over another text or batch size without a word.
        self._made_of: dict[str, Any] = {
            "text_crc32": text_crc32(text),
            "batch_size": batch_size,
            "seq_len": seq_len,
            "seed": seed,
        }
        if type(objective) is not NextTokens:  # a subclass has other examples
            self._made_of["objective"] = _text_of(objective)
        if sharding is not None:
            check_same({"text or setting of TrainBatches": self._made_of}, sharding.device_set)

    def __iter__(self) -> TrainBatches:
        return self

    def __next__(self) -> dict[str, Any]:
        size, seed = self._made_of["batch_size"], self._made_of["seed"]

        def example(place: int) -> Example:
            return self._read(int(self._positions[place]) * self._stride, key=(seed, place))

        places = range(self._next * size, (self._next + 1) * size)
        batch = _batch(example, places, self._lengths, self._sharding)
        self._next += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Return the position in the data, as a dict that JSON can hold."""
        return {"grain": {"next_index": self._next}, **self._made_of}

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume from a state: the next batches are, bit for bit, those that followed `get_state`.

        Args:
            state: a result of `get_state`.

        Raises:
            ValueError: if the state is of another text, batch size, sequence length or seed, or has no position. The
                position of the batches stays then.
        """
        changed = [
            f"{name} was {state.get(name)}, now {self._made_of.get(name)}"
            for name in {**self._made_of, "objective": None}  # also if there was one, and is none now
            if state.get(name) != self._made_of.get(name)
        ]
        if changed:
            raise ValueError(
                f"the data is not that of the run to continue: {'; '.join(changed)}. Give the same text and settings, "
                "or start a new run"
            )
        place = state.get("grain")
        number = place.get("next_index") if isinstance(place, dict) else None
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(
                'the state must have the number of the next batch, {"grain": {"next_index": an integer >= 0}}, as '
                f"get_state returns it, got {place!r} under 'grain'"
            )
        self._next = number


@checked
def heldout_batches(
    text: np.ndarray,
    *,
    batch_size: int,
    seq_len: int,
    num_batches: int,
    vocab_size: int | None = None,
    sharding: Sharding | None = None,
    objective: Objective = NEXT_TOKENS,
) -> Iterator[dict[str, Any]]:
    """Yield ``num_batches`` batches, the same every time, of windows evenly spaced over ``text``.

    Args:
        text: tokens, integers ``[n]``, at least as many as a window.
        batch_size, seq_len, vocab_size, sharding, objective: see `TrainBatches`; the batches have the same form.
        num_batches: number of batches.

    Raises:
        ValueError: if the text is shorter than a window; for a length that the objective cannot have; for a token
            outside of the vocabulary; with a ``sharding`` over all processes, if one has another text or setting.

    >>> batches = list(heldout_batches(np.arange(100, dtype=np.uint8), batch_size=2, seq_len=4, num_batches=2))
    >>> [batch["tokens"][:, 0].tolist() for batch in batches]
    [[0, 31], [63, 95]]
    """
    check_positive(batch_size=batch_size, seq_len=seq_len, num_batches=num_batches)
    if sharding is not None:
        _check_repr(objective)
        made_of = (text_crc32(text), batch_size, seq_len, num_batches, _text_of(objective))
        check_same({"text or setting of heldout_batches": made_of}, sharding.device_set)
    lengths, window = objective.lengths(seq_len), objective.window(seq_len)
    positions = np.linspace(0, _positions(text, window, seq_len) - 1, batch_size * num_batches).astype(np.int64)

    def example(place: int) -> Example:
        # The number of a window alone: the same for batches of any size.
        return _example(text, int(positions[place]), window, vocab_size, objective, (place,))

    groups = np.arange(len(positions)).reshape(num_batches, batch_size)
    # Not the body of a generator: a wrong argument is refused by the call, not by the first batch.
    return (_batch(example, group.tolist(), lengths, sharding) for group in groups)


def _batch(
    example: Callable[[int], Example], places: Sequence[int], lengths: dict[str, int], sharding: Sharding | None
) -> dict[str, Any]:
    """Return a batch of the examples of these places; with a sharding, only rows of this process are read."""

    @cache  # devices that hold the same rows, and the arrays of an example
    def rows(start: int, stop: int) -> dict[str, np.ndarray]:
        return _stacked([example(place) for place in places[start:stop]])

    if sharding is None:
        return rows(0, len(places))

    def part(name: str, index: Any) -> np.ndarray:
        return rows(*index[0].indices(len(places))[:2])[name][:, index[1]]

    return {
        name: jax.make_array_from_callback((len(places), length), sharding, partial(part, name))
        for name, length in lengths.items()
    }


def _stacked(examples: Sequence[Example]) -> dict[str, np.ndarray]:
    return {name: np.stack([each[name] for each in examples]) for name in examples[0]}


def whole_batches(
    text: np.ndarray,
    *,
    batch_size: int,
    seq_len: int,
    vocab_size: int | None = None,
    objective: Objective = NEXT_TOKENS,
) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches in which every token but the first is a label once; a label of -100 does not count.

    Windows follow each other without overlap. The last one is filled up, and so is the last batch. For another
    ``objective`` a rest that is shorter than a window is left out.

    Args:
        text: tokens, integers ``[n]``.
        batch_size, seq_len, vocab_size, objective: see `TrainBatches`; the batches have the same form, and are NumPy's.

    Raises:
        ValueError: for fewer than two tokens, or than a window of another objective has; for a token outside of the
            vocabulary.

    >>> [batch["labels"].tolist() for batch in whole_batches(np.arange(6), batch_size=1, seq_len=3)]
    [[[1, 2, 3]], [[4, 5, -100]]]
    """
    check_positive(batch_size=batch_size, seq_len=seq_len)
    if type(objective) is NextTokens:
        _check_integers(text)
        if len(text) < 2:
            raise ValueError(
                f"a text of {len(text)} tokens has none to predict from one before it: it needs at least 2. "
                "Give more text"
            )
        return _whole_batches(text, batch_size, seq_len, vocab_size)
    window = objective.window(seq_len)
    _positions(text, window, seq_len)

    def example(number: int) -> Example:
        return _example(text, number * window, window, vocab_size, objective, (number,))

    return _batches_of_windows(example, len(text) // window, batch_size)


def _whole_batches(
    text: np.ndarray, batch_size: int, seq_len: int, vocab_size: int | None
) -> Iterator[dict[str, np.ndarray]]:
    for start in range(0, len(text) - 1, batch_size * seq_len):
        tokens = np.zeros((batch_size * seq_len,), np.int32)
        labels = np.full((batch_size * seq_len,), IGNORED, np.int32)
        found = _example(text, start, min(len(tokens) + 1, len(text) - start), vocab_size, NEXT_TOKENS, ())
        tokens[: len(found["tokens"])], labels[: len(found["labels"])] = found["tokens"], found["labels"]
        yield {"tokens": tokens.reshape(batch_size, seq_len), "labels": labels.reshape(batch_size, seq_len)}


def _batches_of_windows(
    example: Callable[[int], Example], count: int, batch_size: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches of examples 0 to ``count - 1``; the last one is filled up by rows without labels."""
    for start in range(0, count, batch_size):
        examples = [example(number) for number in range(start, min(start + batch_size, count))]
        empty = examples[-1] | {"labels": np.full_like(examples[-1]["labels"], IGNORED)}
        yield _stacked(examples + [empty] * (batch_size - len(examples)))


def _example(
    text: np.ndarray,
    position: int,
    window: int,
    vocab_size: int | None,
    objective: Objective,
    key: tuple[int, ...],
) -> Example:
    """Return the example of the tokens from a position on."""
    tokens = text[position : position + window]
    # Before the cast, which would wrap.
    bad = _outside(tokens, vocab_size)
    if bad is not None:
        late = ". Of data beyond 64 MiB, pieces alone are checked at the start" if _is_large(text) else ""
        raise ValueError(_outside_message(int(tokens[bad]), position + bad, vocab_size) + late)
    return objective.example(np.asarray(tokens, np.int32), key)


def check_vocabulary(text: np.ndarray, vocab_size: int | None) -> None:
    """Raise ValueError for a token outside of the vocabulary in what is read of a text at the start.

    Args:
        text: tokens, integers ``[n]``.
        vocab_size: number below which tokens must be. None: 2^31.
    """
    for position, tokens in _read_at_start(text):
        bad = _outside(tokens, vocab_size)
        if bad is not None:
            raise ValueError(_outside_message(int(tokens[bad]), position + bad, vocab_size))


def _outside(tokens: np.ndarray, vocab_size: int | None) -> int | None:
    """Return the place of the first token outside of the vocabulary; None if there is none."""
    below, held = _below(vocab_size), np.iinfo(tokens.dtype)
    if held.min >= 0 and held.max < below:
        return None
    if tokens.min() >= 0 and tokens.max() < below:
        return None
    return int(np.flatnonzero((tokens < 0) | (tokens >= below))[0])


def _outside_message(token: int, position: int, vocab_size: int | None) -> str:
    return (
        f"the data have the token {token} at position {position}, and tokens must be from 0 to "
        f"{_below(vocab_size) - 1} (vocab_size); give the tokenizer that the data were made with"
    )


def _below(vocab_size: int | None) -> int:
    return 2**31 if vocab_size is None else vocab_size  # int32 on devices


def _check_repr(objective: Objective) -> None:
    """Raise ValueError for an objective that another process could not recognize."""
    if re.search(r" at 0x[0-9a-fA-F]+>", repr(objective)):
        raise ValueError(
            f"the objective's repr is {objective!r}: its address is another one in each process, and the state of the "
            f"batches could not be resumed. Make {type(objective).__name__} a dataclass, or define its __repr__, from "
            "what its examples depend on"
        )


def _text_of(objective: Objective) -> str:
    """Return what recognizes an objective: its repr with all numbers of its arrays, or a checksum of a long one."""
    with np.printoptions(threshold=sys.maxsize, floatmode="unique"):  # else NumPy's own leave out what is many
        text = repr(objective)
    return text if len(text) <= _LONGEST_REPR else f"{type(objective).__name__} of crc32 {zlib.crc32(text.encode())}"


def _positions(text: np.ndarray, window: int, seq_len: int) -> int:
    """Return the number of windows of a text; raise for one that is no sequence of tokens, or too short for one."""
    _check_integers(text)
    if len(text) < window:
        raise ValueError(
            f"a text of {len(text)} tokens has no window of seq_len {seq_len}: it needs at least {window}. "
            "Give more text, or lower seq_len"
        )
    return len(text) - window + 1


def _check_integers(text: np.ndarray) -> None:
    if text.ndim != 1 or not np.issubdtype(text.dtype, np.integer):
        raise ValueError(f"tokens must be integers [n], got {text.dtype}{list(text.shape)}")


def text_crc32(text: np.ndarray) -> int:
    """Return a checksum that identifies a text: of all bytes, or of the length of a large memory map and its pieces."""
    crc32 = zlib.crc32(str(len(text)).encode()) if _is_large(text) else 0
    for _, tokens in _read_at_start(text):
        crc32 = zlib.crc32(np.ascontiguousarray(tokens), crc32)
    return crc32


def _read_at_start(text: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield what is read of a text before its first batch, each part with its position.

    That is all of it. But a memory map may be larger than memory and take minutes to read: of one beyond 64 MiB it is
    64 pieces of a MiB, evenly spaced from the first to the last.
    """
    if not _is_large(text):
        yield 0, text
        return
    size = PIECE // text.itemsize
    for start in np.linspace(0, len(text) - size, _PIECES).astype(np.int64).tolist():
        yield start, text[start : start + size]


def _is_large(text: np.ndarray) -> bool:
    return isinstance(text, np.memmap) and text.nbytes > _PIECES * PIECE
