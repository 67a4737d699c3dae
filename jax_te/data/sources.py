"""Sources of tokens: files and folders of text, JSON lines and Parquet, and files of tokens."""

from __future__ import annotations

import codecs
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jax_te._validation import brief, log_once, require_extra
from jax_te.data.token_files import TOKEN_FILES, token_file
from jax_te.data.tokenizer import ByteTokenizer, Tokenizer

_NOT_TEXT = ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__")
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".7z")
"""Endings of compressed files, whose bytes are no text. In a folder they are left out, as they are not UTF-8."""

_MODEL_FILES = (
    "_CHECKPOINT_METADATA",
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "latest_checkpointed_iteration.txt",
    "model_optim_rng.pt",
)
"""Files by which folders of checkpoints and models are known: of Orbax, Hugging Face, PEFT and Megatron-LM.

They are repeated here: their own packages take a second to import.
"""

MAX_LINE = 2**28
"""Bytes of a line of JSON, and of a file's first value."""

_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
"""Byte-order marks of UTF-16 and UTF-32. That of UTF-32, little-endian, begins with the first of these."""


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
    source: str | os.PathLike[str] | None,
    *,
    tokenizer: Tokenizer | ByteTokenizer | None = None,
    text_key: str = "text",
    leave_out: str | os.PathLike[str] | None = None,
) -> Tokens:
    """Return the tokens of a source; arguments and errors are those of `jax_te.data.load_text`."""
    tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
    name, paths, single = _paths(source, leave_out)
    stored = token_file(paths[0]) if single else None
    if stored is not None:
        return Tokens(tokens=stored, source=name, files=1, text_bytes=None, vocab_size=tokenizer.vocab_size)
    text_bytes = files = count = 0
    skipped: list[Path] = []

    def documents() -> Iterator[bytes]:
        nonlocal text_bytes, files, count
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
                count += 1
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
    if isinstance(tokenizer, Tokenizer) and tokenizer.end_of_text is None and count > 1:
        log_once(
            f"{tokenizer.path} has no end of text, so nothing separates the {count} documents of {name}: name a token "
            "as eos_token in a tokenizer_config.json beside it, or give Tokenizer(end_of_text=)"
        )
    if skipped and source is not None:
        log_once(
            f"{len(skipped)} of the {len(paths)} files in {name} are left out, as they are not text in UTF-8: "
            f"{skipped[0]}{', ...' if len(skipped) > 1 else ''}. Unpack compressed files, and convert other encodings"
        )
    return Tokens(
        tokens=tokens, source=name, files=max(files, 1), text_bytes=text_bytes, vocab_size=tokenizer.vocab_size
    )


def _paths(
    source: str | os.PathLike[str] | None, leave_out: str | os.PathLike[str] | None
) -> tuple[str, list[Path], bool]:
    """Return a name for the source, its files, and whether it is a single named file."""
    if source is None:
        root = Path(sysconfig.get_path("stdlib"))
        # _sysconfigdata holds paths of the machine: the text would differ between installations of one version.
        found, _ = _files(root, lambda folder: folder.name in _NOT_TEXT)
        found = [path for path in found if path.suffix == ".py" and "_sysconfigdata" not in path.name]
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
    run = None if leave_out is None else os.path.realpath(leave_out)
    if os.path.realpath(root) == run:
        raise ValueError(
            f"{source} is the folder of the run as well, whose files would become its text; give the run another "
            "folder, which may lie in this one"
        )
    is_left_out = partial(_is_no_text, run=run)
    if is_left_out(root):
        raise ValueError(
            f"{source} is the folder of a run, a checkpoint or a model, whose files are no text; give a text file, or "
            "another folder"
        )
    found, left_out = _files(root, is_left_out)
    if left_out:
        log_once(
            f"folders of runs, checkpoints and models in {source} are left out, {len(left_out)} of them: "
            f"{left_out[0]}{', ...' if len(left_out) > 1 else ''}"
        )
    for path in found:
        if path.suffix.lower() in TOKEN_FILES:
            raise ValueError(
                f"{path} has the ending of a file of tokens, and in a folder text is read alone; give that file by "
                "itself, or a folder without it"
            )
    return str(source), found, False


def _files(root: Path, is_left_out: Callable[[Path], bool]) -> tuple[list[Path], list[Path]]:
    """Return all files below ``root`` except hidden ones, and the folders left out, each by relative path."""
    found: list[Path] = []
    left_out: list[Path] = []
    seen = {os.path.realpath(root)}  # a link may lead back to a folder above it, or to one beside it

    def is_new(folder: Path) -> bool:
        real = os.path.realpath(folder)
        if real in seen:
            return False
        seen.add(real)
        return True

    for folder, folders, names in os.walk(root, followlinks=True):
        folders.sort()  # so that of two links to one folder the same one counts on every machine
        visible = [name for name in folders if not name.startswith(".") and is_new(Path(folder, name))]
        outside = [name for name in visible if is_left_out(Path(folder, name))]
        left_out += [Path(folder, name) for name in outside]
        # Changed in place: os.walk then leaves the others out.
        folders[:] = [name for name in visible if name not in outside]
        found += [Path(folder, name) for name in names if not name.startswith(".")]

    # The order in which a file system lists files differs between machines, and batches must not.
    def relative(path: Path) -> str:
        return path.relative_to(root).as_posix()

    if broken := sorted((path for path in found if path.is_symlink() and not path.exists()), key=relative):
        log_once(f"links in {root} that lead nowhere are left out, {len(broken)} of them, first {broken[0]}")
    return sorted((path for path in found if path.is_file()), key=relative), sorted(left_out, key=relative)


def _is_no_text(folder: Path, *, run: str | None) -> bool:
    """Return whether a folder is that of a run, a checkpoint or a model: programs write there what is no text.

    Args:
        folder: the folder.
        run: real path of a folder that is a run's, also if that has not begun. None: no other than those found.
    """
    is_run = run is not None and os.path.realpath(folder) == run
    return is_run or any((folder / name).exists() for name in _MODEL_FILES) or _has_run_config(folder)


def _has_run_config(folder: Path) -> bool:
    """Return whether a folder has the ``config.json`` of ``jax-te train``, which has a checksum."""
    try:
        values = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and {"version", "crc32", "preset"} <= values.keys()


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _text(path: Path, text_key: str) -> Iterator[bytes]:
    content = path.read_bytes()
    if path.suffix.lower() != ".txt" and _begins_with_document(content, text_key):
        raise ValueError(
            f"{path} begins with a JSON object with {text_key!r}, and would be read as text, with its braces and keys. "
            "To read its documents, give JSON lines whose file name ends in .jsonl; to read it as it is, let the name "
            "end in .txt"
        )
    if content:
        yield content


def _begins_with_document(content: bytes, text_key: str) -> bool:
    """Return whether a file's first JSON value is an object with a text, or a list that begins with one."""
    if not re.match(rb"(\xef\xbb\xbf)?\s*[\[{]", content):
        return False
    text = content[:MAX_LINE].decode("utf-8-sig", "replace")
    start = re.match(r"\s*(\[\s*)?", text)
    try:
        value, _ = json.JSONDecoder().raw_decode(text, start.end() if start else 0)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and isinstance(value.get(text_key), str)


def _json_lines(path: Path, text_key: str) -> Iterator[bytes]:
    with path.open("rb") as file:
        number = 0
        # With a limit: a file without ends of lines would be read as a whole.
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if not line.strip():
                continue
            if number == 1 and line.startswith(_MARKS):
                raise ValueError(
                    f"{path} begins with the byte-order mark of UTF-16 or UTF-32, and JSON lines are read in UTF-8; "
                    "convert the file"
                )
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
                raise ValueError(f"{path}, line {number}: {_fault(error, text_key)}") from None


def _fault(error: Exception, text_key: str) -> str:
    """Return what is wrong with a line of JSON."""
    if isinstance(error, KeyError):
        return f"it has no {text_key!r}"
    if isinstance(error, json.JSONDecodeError):  # whose own text counts lines inside of this one
        return f"{error.msg} at its character {error.pos + 1}"
    return str(error)[:200]


def _parquet(path: Path, text_key: str) -> Iterator[bytes]:
    arrow, parquet = require_extra("pyarrow", "parquet"), require_extra("pyarrow.parquet", "parquet")
    try:
        # Pages have checksums if the writer added them.
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            columns = {field.name: field.type for field in file.schema_arrow}
            if text_key not in columns:
                raise ValueError(f"it has no column {text_key!r}, but {brief(sorted(columns))}")
            kind = columns[text_key]
            # Of a dictionary, such as a category of pandas: the type of its values.
            values = kind.value_type if arrow.types.is_dictionary(kind) else kind
            types = arrow.types
            if not any(is_text(values) for is_text in (types.is_string, types.is_large_string, types.is_string_view)):
                raise ValueError(f"its column {text_key!r} must be of strings, and is of {brief(str(kind))}")
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


_READERS: dict[str, Callable[[Path, str], Iterator[Any]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".parquet": _parquet,
}
"""Readers by file extension; other files are text."""
