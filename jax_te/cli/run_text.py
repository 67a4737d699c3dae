"""The tokenizer of a run, with a copy in its folder, and the tokenized text, with the checksums that identify it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_te.cli.run_config import RunConfig
from jax_te.data import TOKENIZER_FILE, ByteTokenizer, Objective, TextData, Tokenizer, load_text, text_crc32
from jax_te.metrics import PARTIAL

RESUME_REMEDY = "Give the run's own text by --data, or another --output to begin a new run"
"""What to do about a text without which a run cannot go on."""

VOCABULARY_MULTIPLE = 128
"""A new model's vocabulary size is a multiple of this: Megatron's ``--make-vocab-size-divisible-by``."""


def tokenizer_values(path: str, vocab_size: int | None) -> dict[str, Any]:
    """Return the fields of a run's configuration that follow from ``--tokenizer``.

    Args:
        path: path of the file, or of its folder.
        vocab_size: vocabulary size of the model that has been chosen; None: of a new model.

    Raises:
        ValueError: for a file that is not a tokenizer, and one with more tokens than the model's embedding has rows.
    """
    tokenizer = Tokenizer(path)
    rows = vocab_size or -(-tokenizer.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if tokenizer.vocab_size > rows:
        raise ValueError(
            f"{tokenizer.path} has {tokenizer.vocab_size} tokens, and the model's config.json {rows} (vocab_size); "
            "give the --tokenizer that it was made for"
        )
    facts = {"tokenizer_sha256": tokenizer.sha256, "end_of_text": tokenizer.end_of_text_name}
    return {"tokenizer": path, **facts, "vocab_size": rows}


def run_tokenizer(config: RunConfig, output: Path) -> Tokenizer | ByteTokenizer:
    """Return the tokenizer of a run: of the copy in its folder, or of the file that it names if there is no copy yet.

    Raises:
        ValueError: for a tokenizer other than the one with which the run began.
    """
    if config.tokenizer_sha256 is None:
        return ByteTokenizer()
    # The copy may be of an earlier run there, which saved nothing and gave way to this one.
    for place in (output / TOKENIZER_FILE, Path(config.tokenizer or output)):
        tokenizer = Tokenizer(place) if place.exists() else None
        if tokenizer is not None and tokenizer.sha256 == config.tokenizer_sha256:
            # A copy has no tokenizer_config.json beside it, from which the run may have its end of text.
            same = tokenizer.end_of_text_name == config.end_of_text
            return tokenizer if same else Tokenizer(place, end_of_text=config.end_of_text)
    raise ValueError(
        f"the tokenizer of the run in {output}, whose SHA-256 is {config.tokenizer_sha256}, is neither there nor in "
        f"{config.tokenizer}; put it back, or start a new run"
    )


def keep_tokenizer(tokenizer: Tokenizer | ByteTokenizer, output: Path) -> None:
    """Copy the tokenizer's file into the run's folder atomically."""
    copy = output / TOKENIZER_FILE
    if isinstance(tokenizer, Tokenizer) and tokenizer.path != copy:
        # A rename is atomic: a run that is killed here has the whole copy or none.
        partial = copy.with_suffix(PARTIAL)
        shutil.copyfile(tokenizer.path, partial)
        os.replace(partial, copy)


def run_text(
    config: RunConfig,
    tokenizer: Tokenizer | ByteTokenizer,
    objective: Objective,
    data: str | None = None,
    *,
    remedy: str,
    leave_out: Path | None = None,
) -> TextData:
    """Return the text of a run, or another one, tokenized by the run's tokenizer.

    Args:
        config: configuration of the run.
        tokenizer: tokenizer of the run.
        objective: what its model is trained to predict.
        data: file or folder of the text. None: the run's.
        remedy: sentence that says what to do if the run's is not there.
        leave_out: folder of a run that may not have begun; one that has is left out anyway.

    Raises:
        ValueError: see `load_text`; too little text is less than a window of the objective.
    """
    source = config.data if data is None else data
    if data is None and source is not None and not Path(source).exists():
        raise ValueError(f"no such file or folder of text: {source}, which is --data of the run. {remedy}")
    return load_text(source, seq_len=config.seq_len, tokenizer=tokenizer, objective=objective, leave_out=leave_out)


def text_checksums(data: TextData) -> dict[str, int]:
    """Return what the data state of a run's checkpoints has of its text: checksums of both parts."""
    return {"text_crc32": text_crc32(data.train), "heldout_crc32": text_crc32(data.heldout)}


def check_text(
    data: TextData, data_state: Mapping[str, Any], now: str | None, *, before: str | None, remedy: str
) -> None:
    """Raise ValueError for another text than that of a checkpoint, in the held-out part, too.

    Args:
        data: text now.
        data_state: data state of the checkpoint.
        now, before: ``--data`` of `data`, and of the run as it is in its folder.
        remedy: sentence that says what to do.
    """
    if text_checksums(data).items() <= data_state.items():
        return
    library = "the Python standard library's sources"
    if before != now:
        problem = f"--data {now} is another text than that of the run, {before or library}"
    elif now is None:
        problem = f"{library} are not those of the run, which may have been another Python's"
    else:
        problem = f"--data {now}: {'the file has' if data.files == 1 else 'its files have'} changed since the run began"
    raise ValueError(f"{problem}. {remedy}")


def unit(tokenizer: Tokenizer | ByteTokenizer) -> str:
    """Return the term for a token."""
    return "byte" if isinstance(tokenizer, ByteTokenizer) else "token"
