"""Text as bytes: reading it, holding a part out, batches, and the byte-bigram entropy, a reference for losses."""

from __future__ import annotations

import math
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jax_te.config.internal import check_positive

BLOCK = 2**20
"""The text is divided into blocks of this many bytes, and the end of each block is held out."""

_NOT_TEXT = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Bytes to train on and bytes held out.

    Args:
        train, heldout: uint8 ``[n]``.
        source: the origin of the text, for messages.
        files: number of files read.
    """

    train: np.ndarray
    heldout: np.ndarray
    source: str
    files: int


def load_text(
    source: str | os.PathLike[str] | None = None, *, seq_len: int, heldout_fraction: float = 0.05
) -> TextData:
    """Return text, split into bytes to train on and bytes held out; the split is the same every time.

    Files are concatenated in the order of their relative paths. The last ``heldout_fraction`` of each MiB of the result
    (and of the shorter piece at its end) is held out; training and held-out text are the concatenations of these
    pieces.

    Args:
        source: None for the running Python's standard library: its ``.py`` files without tests and installed packages,
            about 11 MB. A file is read unchanged. Of a folder, all files in it and below that decode as UTF-8 are read,
            except those whose name or folder begins with a dot.
        seq_len: tokens of an example; training and held-out text must each be long enough for one.
        heldout_fraction: in (0, 1).

    Raises:
        ValueError: if the path does not exist, holds no text or too little text.

    >>> data = load_text(os.__file__, seq_len=64)
    >>> data.train.dtype, data.files, round(len(data.heldout) / len(data.train), 2)
    (dtype('uint8'), 1, 0.05)
    """
    check_positive(seq_len=seq_len)
    if not 0.0 < heldout_fraction < 1.0:
        raise ValueError(f"heldout_fraction must be in (0, 1), got {heldout_fraction!r}")
    name, pieces = _read(source)
    text = np.frombuffer(b"".join(pieces), np.uint8)
    train, heldout = _split(text, heldout_fraction)
    if min(len(train), len(heldout)) < seq_len + 1:
        needed = math.ceil((seq_len + 1) / min(heldout_fraction, 1.0 - heldout_fraction))
        raise ValueError(
            f"{name} has {len(text)} bytes of text; with {heldout_fraction:.0%} held out, seq_len {seq_len} needs at "
            f"least {needed}. Give more text, or lower seq_len"
        )
    return TextData(train=train, heldout=heldout, source=name, files=len(pieces))


class TrainBatches:
    """Endless batches of windows at random positions of a text, through grain.

    Each epoch visits every position once, in a random order of its own, which ``seed`` determines.

    Args:
        text: uint8 ``[n]``, ``n > seq_len``.
        batch_size: ``b``.
        seq_len: ``s``.
        seed: >= 0.

    Iterating yields ``{"tokens": i32[b, s], "labels": i32[b, s]}``; a label is its token's successor.

    Raises:
        ImportError: without grain.
        ValueError: if the text is shorter than a window.

    >>> batches = TrainBatches(np.arange(100, dtype=np.uint8), batch_size=2, seq_len=4, seed=0)
    >>> batch = next(batches)
    >>> batch["tokens"].shape, bool((batch["tokens"] + 1 == batch["labels"]).all())
    ((2, 4), True)
    """

    def __init__(self, text: np.ndarray, *, batch_size: int, seq_len: int, seed: int):
        check_positive(batch_size=batch_size, seq_len=seq_len)
        positions = _positions(text, seq_len)
        grain = _grain()

        def window(position: int) -> dict[str, np.ndarray]:
            return _example(text, position, seq_len)

        windows = grain.MapDataset.range(positions).seed(seed).shuffle().repeat().map(window)
        # A batch takes well under a millisecond: threads that read ahead would only take time from XLA's.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._batches = iter(windows.batch(batch_size).to_iter_dataset(options))
        # Stored with the state: grain would resume over another text or batch size without a word.
        self._made_of = {
            "text_crc32": zlib.crc32(text.tobytes()),
            "batch_size": batch_size,
            "seq_len": seq_len,
            "seed": seed,
        }

    def __iter__(self) -> TrainBatches:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """Return the position in the data, as a dict that JSON can hold."""
        return {"grain": self._batches.get_state(), **self._made_of}

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume from a state: the next batches are, bit for bit, those that followed `get_state`.

        Args:
            state: a result of `get_state`.

        Raises:
            ValueError: if the state is of another text, batch size, sequence length or seed.
        """
        changed = [
            f"{name} was {state.get(name)}, now {now}" for name, now in self._made_of.items() if state.get(name) != now
        ]
        if changed:
            raise ValueError(
                f"the data is not that of the run to continue: {'; '.join(changed)}. Give the same text and settings, "
                "or start a new run"
            )
        self._batches.set_state(state["grain"])


def heldout_batches(
    text: np.ndarray, *, batch_size: int, seq_len: int, num_batches: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yield ``num_batches`` batches, the same every time, of windows evenly spaced over ``text``.

    Args:
        text: uint8 ``[n]``, ``n > seq_len``.
        batch_size, seq_len: as for `TrainBatches`; the batches have the same form.
        num_batches: number of batches.

    Raises:
        ValueError: if the text is shorter than a window.

    >>> batches = list(heldout_batches(np.arange(100, dtype=np.uint8), batch_size=2, seq_len=4, num_batches=2))
    >>> [batch["tokens"][:, 0].tolist() for batch in batches]
    [[0, 31], [63, 95]]
    """
    check_positive(batch_size=batch_size, seq_len=seq_len, num_batches=num_batches)
    positions = np.linspace(0, _positions(text, seq_len) - 1, batch_size * num_batches).astype(np.int64)
    for group in positions.reshape(num_batches, batch_size):
        examples = [_example(text, position, seq_len) for position in group.tolist()]
        yield {name: np.stack([example[name] for example in examples]) for name in ("tokens", "labels")}


def byte_bigram_entropy(train: np.ndarray, heldout: np.ndarray) -> float:
    """Return the loss of a table of byte pairs on ``heldout``, in nats per byte.

    The loss is ``-1/m sum_t log(count(x[t-1], x[t]) / count(x[t-1]))`` over the ``m`` byte pairs of ``heldout``. Pairs
    are counted in ``train`` and ``heldout`` together, so that no pair of ``heldout`` is unknown and the table needs no
    smoothing. With an empty ``train`` the loss is the conditional entropy H(x[t] | x[t-1]) of ``heldout``. A held-out
    loss well below it shows that a model uses more than the last byte.

    Args:
        train, heldout: uint8 ``[n]``; ``heldout`` has at least two bytes.

    Raises:
        ValueError: for a shorter ``heldout``.

    >>> text = np.frombuffer(b"abacabacabac", np.uint8)
    >>> round(byte_bigram_entropy(text[:0], text), 4)
    0.3781
    """
    if len(heldout) < 2:
        raise ValueError(f"the held-out text must have at least 2 bytes, got {len(heldout)}")
    scored = _pair_counts(heldout)
    counts = scored + _pair_counts(train)
    # Pairs and bytes that never occur give log(0) and 0/0; only pairs of the held-out text are read below.
    with np.errstate(divide="ignore", invalid="ignore"):
        log_probability = np.log(counts / counts.sum(axis=1, keepdims=True))
    seen = scored > 0
    return float(-(scored[seen] * log_probability[seen]).sum() / scored.sum())


def _pair_counts(text: np.ndarray) -> np.ndarray:
    pairs = text[:-1].astype(np.uint16) * np.uint16(256) + text[1:]
    return np.bincount(pairs, minlength=256**2).reshape(256, 256)


def _example(text: np.ndarray, position: int, seq_len: int) -> dict[str, np.ndarray]:
    window = text[position : position + seq_len + 1].astype(np.int32)  # one byte more, for the last label
    return {"tokens": window[:-1], "labels": window[1:]}


def _positions(text: np.ndarray, seq_len: int) -> int:
    if len(text) < seq_len + 1:
        raise ValueError(
            f"a text of {len(text)} bytes has no window of seq_len {seq_len}: it needs at least {seq_len + 1}. "
            "Give more text, or lower seq_len"
        )
    return len(text) - seq_len


def _split(text: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    # Held out from every block, not from the end alone: files are sorted, so the end is of a few folders only.
    blocks = [text[start : start + BLOCK] for start in range(0, len(text), BLOCK)]
    cuts = [len(block) - int(len(block) * fraction) for block in blocks]
    empty = text[:0]  # np.concatenate refuses an empty list
    train = [block[:cut] for block, cut in zip(blocks, cuts, strict=True)]
    heldout = [block[cut:] for block, cut in zip(blocks, cuts, strict=True)]
    return np.concatenate([empty, *train]), np.concatenate([empty, *heldout])


def _read(source: str | os.PathLike[str] | None) -> tuple[str, list[bytes]]:
    """Return a name for the source, and the contents of its files."""
    if source is None:
        root = Path(sysconfig.get_path("stdlib"))
        name = "the Python standard library"
        # _sysconfigdata holds paths of the machine: the text would differ between installations of one version.
        paths = [path for path in _files(root, _NOT_TEXT) if path.suffix == ".py" and "_sysconfigdata" not in path.name]
    else:
        root, name = Path(source), str(source)
        if root.is_file():
            return name, [root.read_bytes()]
        if not root.is_dir():
            raise ValueError(f"no such file or folder of text: {name}")
        paths = _files(root, ())
    pieces = [text for text in map(_utf8, paths) if text]
    if not pieces:
        raise ValueError(
            f"no text in {name}: of {len(paths)} files none is UTF-8 with something in it; give a text file or a "
            "folder of text files"
        )
    return name, pieces


def _files(root: Path, skipped: tuple[str, ...]) -> list[Path]:
    """Return all files below ``root`` except hidden ones and those in ``skipped`` folders, by relative path."""
    found = []
    for folder, folders, names in os.walk(root):
        # Changed in place: os.walk then leaves these folders out.
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    # The order in which a file system lists files differs between machines, and batches must not.
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def _utf8(path: Path) -> bytes | None:
    text = path.read_bytes()
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text


def _grain() -> Any:
    try:
        import grain
    except ImportError as error:
        raise ImportError('training on text needs grain; install it with: pip install "jax-te[train]"') from error
    return grain
