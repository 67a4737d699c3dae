"""Sources of tokens: files and folders of text, JSON lines and Parquet, and files of tokens."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jax_te._validation import brief, log_once, require_extra
from jax_te.data.token_files import TOKEN_FILES, token_file
from jax_te.data.tokenizer import ByteTokenizer, Tokenizer

_NOT_TEXT = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".7z")
"""Endings of compressed files, whose bytes are no text. In a folder they are left out, as they are not UTF-8."""

MAX_LINE = 2**28
"""Bytes of a line of JSON."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """All tokens of a source.

    Args:
        tokens: integers ``[n]``; over a memory map if the source is a file of tokens.
        source: name of the source, for messages.
        files: number of files read.
        text_bytes: bytes of the text in UTF-8; None for a file of tokens.
        vocab_size: upper bound (exclusive) of token IDs.
    """

    tokens: np.ndarray
    source: str
    files: int
    text_bytes: int | None
    vocab_size: int


def read_tokens(
    source: str | os.PathLike[str] | None, *, tokenizer: Tokenizer | ByteTokenizer | None = None, text_key: str = "text"
) -> Tokens:
    """Return the tokens of a source; arguments and errors are those of `jax_te.data.load_text`."""
    tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
    name, paths, single = _paths(source)
    stored = token_file(paths[0]) if single else None
    if stored is not None:
        return Tokens(tokens=stored, source=name, files=1, text_bytes=None, vocab_size=tokenizer.vocab_size)
    text_bytes = files = 0
    skipped: list[Path] = []

    def documents() -> Iterator[bytes]:
        nonlocal text_bytes, files
        for path in paths:
            read = _READERS.get(path.suffix.lower(), _text)
            before = text_bytes
            for document in read(path, text_key):
                # In a folder, files that are not text are left out; a file that is named is read as it is.
                if read is _text and not (_is_utf8(document) or (single and isinstance(tokenizer, ByteTokenizer))):
                    if single:
                        raise ValueError(f"{path} is not text in UTF-8; a tokenizer takes no other")
                    skipped.append(path)
                    continue
                text_bytes += len(document)
                yield document
            files += text_bytes > before

    # Arrays of about a million tokens: lists of numbers would take eight times as much memory and more.
    parts = list(tokenizer.encode_documents(documents()))
    tokens = np.concatenate([np.zeros(0, tokenizer.dtype), *parts])
    if not files and not single:
        raise ValueError(
            f"no text in {name}: of {len(paths)} files none is UTF-8 with something in it; give a text file or a "
            "folder of text files"
        )
    if skipped and source is not None:
        log_once(
            f"{len(skipped)} of the {len(paths)} files in {name} are left out, as they are not text in UTF-8: "
            f"{skipped[0]}{', ...' if len(skipped) > 1 else ''}. Unpack compressed files, and convert other encodings"
        )
    return Tokens(
        tokens=tokens, source=name, files=max(files, 1), text_bytes=text_bytes, vocab_size=tokenizer.vocab_size
    )


def _paths(source: str | os.PathLike[str] | None) -> tuple[str, list[Path], bool]:
    """Return a name for the source, its files, and whether it is a single named file."""
    if source is None:
        root = Path(sysconfig.get_path("stdlib"))
        # _sysconfigdata holds paths of the machine: the text would differ between installations of one version.
        found = [path for path in _files(root, _NOT_TEXT) if path.suffix == ".py" and "_sysconfigdata" not in path.name]
        return "the Python standard library", found, False
    root = Path(source)
    if root.is_file():
        if root.suffix.lower() in _COMPRESSED:
            raise ValueError(
                f"{source} is a compressed file, whose bytes are not the text; unpack it, and give what it holds"
            )
        return str(source), [root], True
    if not root.is_dir():
        raise ValueError(f"no such file or folder of text: {source}")
    found = _files(root, ())
    for path in found:
        if path.suffix.lower() in TOKEN_FILES:
            raise ValueError(
                f"{path} has the ending of a file of tokens, and in a folder text is read alone; give that file by "
                "itself, or a folder without it"
            )
    return str(source), found, False


def _files(root: Path, skipped: tuple[str, ...]) -> list[Path]:
    """Return all files below ``root`` except hidden ones and those in ``skipped`` folders, by relative path."""
    found = []
    for folder, folders, names in os.walk(root):
        # Changed in place: os.walk then leaves these folders out.
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    # The order in which a file system lists files differs between machines, and batches must not.
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _text(path: Path, text_key: str) -> Iterator[bytes]:
    del text_key
    content = path.read_bytes()
    if content:
        yield content


def _json_lines(path: Path, text_key: str) -> Iterator[bytes]:
    with path.open("rb") as file:
        number = 0
        # With a limit: a file without ends of lines would be read as a whole.
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if not line.strip():
                continue
            if len(line) > MAX_LINE:
                raise ValueError(f"{path}, line {number}: it has more than {MAX_LINE} bytes")
            try:
                value = json.loads(line)
                text = value[text_key] if isinstance(value, dict) else None
                if not isinstance(text, str):
                    raise ValueError(f"it must be an object with a string {text_key!r}, and is {brief(value)}")
                yield text.encode("utf-8")
            # UnicodeError: half of a surrogate pair. RecursionError: brackets in brackets.
            except (ValueError, KeyError, RecursionError) as error:
                reason = f"it has no {text_key!r}" if isinstance(error, KeyError) else str(error)[:200]
                raise ValueError(f"{path}, line {number}: {reason}") from None


def _parquet(path: Path, text_key: str) -> Iterator[bytes]:
    arrow, parquet = require_extra("pyarrow", "parquet"), require_extra("pyarrow.parquet", "parquet")
    try:
        # Pages have checksums if the writer added them.
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            columns = {field.name: field.type for field in file.schema_arrow}
            kind = columns.get(text_key)
            if kind is None or not any(
                is_text(kind) for is_text in (arrow.types.is_string, arrow.types.is_large_string)
            ):
                raise ValueError(f"it has no column {text_key!r} of strings, but {brief(sorted(columns))}")
            row = 0
            # As many rows at once as fit into memory however long a document is.
            for batch in file.iter_batches(batch_size=256, columns=[text_key]):
                for text in batch.column(0).to_pylist():
                    if text is None:
                        raise ValueError(
                            f"row {row}, counted from 0, has null for {text_key!r}; write the file without rows that "
                            "lack a text"
                        )
                    yield text.encode("utf-8")
                    row += 1
    # Arrow's own errors are ValueErrors, OSErrors and others.
    except (ValueError, OSError, arrow.ArrowException) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {str(error)[:300]}") from None


_READERS: dict[str, Callable[[Path, str], Iterator[Any]]] = {".jsonl": _json_lines, ".parquet": _parquet}
"""Readers by file extension; other files are text."""
