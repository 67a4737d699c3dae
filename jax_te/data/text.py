"""Training text: reading, a held-out part, and the byte-bigram entropy as a reference for losses of bytes."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import numpy as np

from jax_te._validation import check_positive, checked
from jax_te.data.objectives import NEXT_TOKENS, Objective
from jax_te.data.sources import read_tokens
from jax_te.data.tokenizer import ByteTokenizer, Tokenizer

BLOCK = 2**20
"""The tokens are divided into blocks of so many, and the end of each block is held out."""


@checked
@dataclass(frozen=True, kw_only=True)
class TextData:
    """Tokens to train on and tokens held out; without a tokenizer they are bytes.

    Args:
        train, heldout: integers ``[n]``: in memory in the narrowest unsigned dtype of the vocabulary, or parts of a
            memory map.
        source: the origin of the text, for messages.
        files: number of files read.
        vocab_size: upper bound (exclusive) of token IDs.
        bytes_per_token: mean number of UTF-8 bytes in a token, over the whole text; None for files of tokens, whose
            text is not known.
    """

    train: np.ndarray
    heldout: np.ndarray
    source: str
    files: int
    vocab_size: int = 256
    bytes_per_token: float | None = 1.0


@checked
def load_text(
    source: str | os.PathLike[str] | None = None,
    *,
    seq_len: int,
    heldout_fraction: float = 0.05,
    tokenizer: Tokenizer | ByteTokenizer | None = None,
    text_key: str = "text",
    objective: Objective = NEXT_TOKENS,
    leave_out: str | os.PathLike[str] | None = None,
) -> TextData:
    """Return text as tokens, split into those to train on and those held out; the split is the same every time.

    Files are concatenated in the order of their relative paths. The last ``heldout_fraction`` of each 2^20 tokens of
    the result (and of the shorter piece at its end) is held out; training and held-out text are the concatenations of
    these pieces. Of a file of tokens, which stays on the disk, the end is held out.

    A file's extension determines its format:

    - ``.jsonl``, ``.ndjson``: an object a line, whose ``text_key`` is a document.
    - ``.parquet``: a column ``text_key`` of documents, none of them null, through pyarrow (the extra ``parquet``).
    - ``.npy``: a 1-D array of integers, which are tokens. ``.idx`` or ``.bin``: tokens of Megatron's
      ``preprocess_data.py``, which are both files. Their documents end where the file specifies.
    - any other: text, a document for each file. One that begins with a JSON object with ``text_key``, or with a list
      of such, is refused unless it ends in ``.txt``.

    Args:
        source: None for the running Python's standard library: its ``.py`` files without tests and installed packages,
            about 11 MB. A file, or a folder: of it all files in it and below that decode as UTF-8, JSON lines and
            ``.parquet`` are read, except those whose name or folder begins with a dot, and those in folders of runs of
            ``jax-te train``, of checkpoints and of models. Messages of the log give the numbers of the other files and
            of these folders.
        seq_len: tokens of an example; training and held-out text must each have a window of ``objective``.
        heldout_fraction: fraction of the text that is held out, in (0, 1).
        tokenizer: tokenizer of the text; its ``end_of_text`` follows each document. None: a `ByteTokenizer`, with
            nothing between documents.
        text_key: key of the text in JSON lines and Parquet.
        objective: what a window will become, see `TrainBatches`; it determines how many tokens an example takes.
        leave_out: folder below ``source`` that is left out, too, whether it exists or not: that in which a run of your
            own writes its records, so that they do not become its text. None: no other.

    Raises:
        ValueError: if the path does not exist, holds no text or too little text; for a damaged file or a document
            that is null, whose line, row or column is named; with a tokenizer, for a file that is not UTF-8; for a
            compressed file, and a file of tokens in a folder; for a folder of a run, a checkpoint or a model, and for
            ``leave_out`` itself; for JSON with ``text_key`` under another ending; for a length that the objective
            cannot have.

    >>> data = load_text(os.__file__, seq_len=64)
    >>> data.train.dtype, data.files, round(len(data.heldout) / len(data.train), 2)
    (dtype('uint8'), 1, 0.05)
    """
    check_positive(seq_len=seq_len)
    if not 0.0 < heldout_fraction < 1.0:
        raise ValueError(f"heldout_fraction must be in (0, 1), got {heldout_fraction!r}")
    window = objective.window(seq_len)
    found = read_tokens(source, tokenizer=tokenizer, text_key=text_key, leave_out=leave_out)
    train, heldout = _split(found.tokens, heldout_fraction)
    count = len(found.tokens)
    if min(len(train), len(heldout)) < window:
        needed = math.ceil(window / min(heldout_fraction, 1.0 - heldout_fraction))
        unit = "bytes of text" if found.text_bytes == count else "tokens"
        raise ValueError(
            f"{found.source} has {count} {unit}; with {heldout_fraction:.0%} held out, seq_len {seq_len} needs at "
            f"least {needed}. Give more text, or lower seq_len"
        )
    return TextData(
        train=train,
        heldout=heldout,
        source=found.source,
        files=found.files,
        vocab_size=found.vocab_size,
        bytes_per_token=None if found.text_bytes is None else found.text_bytes / count,
    )


@checked
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
    for name, text in (("train", train), ("heldout", heldout)):
        if text.ndim != 1 or text.dtype != np.uint8:
            raise ValueError(f"{name} must be uint8 [n], got {text.dtype}{list(text.shape)}")
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


def _split(text: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(text, np.memmap):
        cut = len(text) - int(len(text) * fraction)  # pieces put together would be a copy in memory
        return text[:cut], text[cut:]
    # Held out from every block, not from the end alone: files are sorted, so the end is of a few folders only.
    blocks = [text[start : start + BLOCK] for start in range(0, len(text), BLOCK)]
    cuts = [len(block) - int(len(block) * fraction) for block in blocks]
    empty = text[:0]  # np.concatenate refuses an empty list
    train = [block[:cut] for block, cut in zip(blocks, cuts, strict=True)]
    heldout = [block[cut:] for block, cut in zip(blocks, cuts, strict=True)]
    return np.concatenate([empty, *train]), np.concatenate([empty, *heldout])
