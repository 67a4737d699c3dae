"""Tokenizers: text to tokens and back, by a ``tokenizer.json`` or byte by byte."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_te._validation import brief, checked, require_extra

TOKENIZER_FILE = "tokenizer.json"
MAX_BYTES = 2**28
"""Maximum bytes of a ``tokenizer.json``; the largest known ones have 35 MB."""

_PIECE = 2**20
"""Characters that are encoded at once."""

TOKENIZER_CONFIG = "tokenizer_config.json"
"""File beside a ``tokenizer.json``, which names the special tokens."""

_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<|endofdocument|>", "</s>", "<eos>", "[SEP]")
"""Names of the end-of-text token of GPT-2 and Qwen, Llama 3, Llama 2, Gemma and BERT, where no file specifies it."""

_OTHER_FORMS = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "vocab.txt", "vocab.json")
"""Files of tokenizers that only transformers reads, and turns into a ``tokenizer.json``."""


@checked
class Tokenizer:
    """A tokenizer of Hugging Face, read from its ``tokenizer.json`` by the package ``tokenizers``; no code runs.

    Tokens that a template would put around a text (``[CLS]``, ``<s>``), truncation and padding, which the file may ask
    for, are left out: a document is its own tokens.

    Args:
        path: the file, or a folder that has it, such as one of `jax_te.interop.huggingface.load_huggingface`.
        end_of_text: the token behind each document of training data. None: the ``eos_token`` of the
            ``tokenizer_config.json`` beside the file; if there is none, the first of ``<|endoftext|>``,
            ``<|end_of_text|>``, ``<|endofdocument|>``, ``</s>``, ``<eos>`` and ``[SEP]`` that is among the special
            tokens, or else in the vocabulary; if there is none either, no token.

    The attributes ``path``, ``vocab_size`` (the largest token + 1), ``special`` (the tokens that the file calls
    special), ``end_of_text`` (a token, or None), ``end_of_text_name``, ``dtype`` (the narrowest unsigned one that holds
    every token) and ``sha256`` (of the file) can be read.

    Raises:
        ModuleNotFoundError: without the package, which is in the extra ``train``.
        ValueError: for a file that is missing, too large or not a tokenizer; for an ``end_of_text`` that it lacks; for
            a ``tokenizer_config.json`` that is not JSON, or names an ``eos_token`` that the vocabulary lacks.

    Source: ``PreTrainedTokenizerFast`` of transformers; Megatron-Core's ``HuggingFaceTokenizer``.

    >>> tokenizer = Tokenizer("Llama-3.2-1B")  # doctest: +SKIP
    >>> tokenizer.decode(tokenizer.encode("a text"))  # doctest: +SKIP
    'a text'
    """

    def __init__(self, path: str | os.PathLike[str], *, end_of_text: str | None = None):
        self.path = tokenizer_file(path)
        content = self.path.read_bytes()
        self.sha256 = hashlib.sha256(content).hexdigest()
        library = require_extra("tokenizers")
        with _errors_of(f"{self.path} is not a tokenizer"):
            self._tokenizer: Any = library.Tokenizer.from_str(content.decode("utf-8"))
            # Both are for the input of another program's model; a document would be cut off, or filled up.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
            added = self._tokenizer.get_added_tokens_decoder()
        # Not their number: a vocabulary may have gaps.
        self.vocab_size = max(ids, default=-1) + 1
        if not 1 <= self.vocab_size < 2**31:  # tokens are int32 on devices
            raise ValueError(
                f"{self.path}: the tokens must be 0 or more, below 2^31; the vocabulary is empty or larger"
            )
        self.dtype = np.min_scalar_type(self.vocab_size - 1)
        self.special = tuple(sorted(token for token, entry in added.items() if entry.special))
        special = {entry.content for entry in added.values() if entry.special}
        self.end_of_text_name = self._name_of_end(special) if end_of_text is None else end_of_text
        self.end_of_text = None if self.end_of_text_name is None else self.find(self.end_of_text_name)
        if self.end_of_text_name is not None and self.end_of_text is None:
            raise ValueError(
                f"{self.path} has no token {self.end_of_text_name[:100]!r}; give end_of_text one that it has"
            )

    def _name_of_end(self, special: Collection[str]) -> str | None:
        """Return the name of the token behind a document that the files give."""
        config = self.path.parent / TOKENIZER_CONFIG
        if (named := _eos_token(config)) is not None:
            if self.find(named) is None:
                raise ValueError(
                    f"{config} names the eos_token {named[:100]!r}, which {self.path} lacks; correct it, or give "
                    "end_of_text a token that the file has"
                )
            return named
        # Special ones first: Gemma's vocabulary has `</s>`, too, as a tag of HTML.
        known = [name for name in _END_OF_TEXT if self.find(name) is not None]
        return min(known, key=lambda name: name not in special, default=None)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, unsigned ``[n]``.

        Raises:
            ValueError: for a text that the tokenizer cannot encode.
        """
        return self._encode([text])[0]

    def encode_documents(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yield the tokens of documents in UTF-8, several together, each followed by ``end_of_text`` if there is one.

        A document of more than a million characters is encoded in pieces that end at a line's end, where there is one.

        Raises:
            ValueError: for a document that the tokenizer cannot encode.
        """
        ends = np.array([] if self.end_of_text is None else [self.end_of_text], self.dtype)
        texts: list[str] = []
        last: list[bool] = []
        size = 0
        for document in documents:
            for piece, is_last in _pieces(document.decode("utf-8")):
                texts.append(piece)
                last.append(is_last)
                size += len(piece) + 100  # short ones take memory, too
                if size >= _PIECE:
                    yield _joined(self._encode(texts), last, ends)
                    texts, last, size = [], [], 0
        if texts:
            yield _joined(self._encode(texts), last, ends)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens, without special ones and those beyond the vocabulary."""
        numbers = _numbers(tokens)
        with _errors_of(f"{self.path} cannot decode"):
            return self._tokenizer.decode(numbers.tolist(), skip_special_tokens=True)

    def find(self, *names: str) -> int | None:
        """Return the first token with one of these names that the vocabulary has, None if it has none of them."""
        found = (self._tokenizer.token_to_id(name) for name in names)
        return next((token for token in found if token is not None), None)

    def template(self, token: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens that the file's template puts in front of a text and behind it, such as ``[CLS]``.

        Args:
            token: token that stands for the text; a special one, of which no other text is a part.

        Raises:
            ValueError: for a token that the vocabulary does not have.
        """
        name = self._tokenizer.id_to_token(token)
        if name is None:
            raise ValueError(f"{self.path} has no token {token}; give one of its vocabulary")
        with _errors_of(f"{self.path} cannot encode {name!r}"):
            bare, whole = (self._tokenizer.encode(name, add_special_tokens=added).ids for added in (False, True))
        # What the template adds is around what the name itself is encoded to.
        place = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return tuple(whole[:place]), tuple(whole[place + len(bare) :])

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        with _errors_of(f"{self.path} cannot encode this text"):
            # _fast: without the places of tokens in the text, which take most of the memory.
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype) for encoding in encodings]


class ByteTokenizer:
    """Tokens that are bytes, with the interface of `Tokenizer`."""

    vocab_size, end_of_text, dtype = 256, None, np.dtype(np.uint8)

    @checked
    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of a text."""
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)

    @checked
    def encode_documents(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yield the bytes of documents, with nothing between them."""
        parts, size = [], 0
        for document in documents:
            parts.append(document)
            size += len(document)
            if size >= _PIECE:
                yield np.frombuffer(b"".join(parts), np.uint8)
                parts, size = [], 0
        yield np.frombuffer(b"".join(parts), np.uint8)

    @checked
    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """Return the text of bytes; those that are not UTF-8 are U+FFFD, and numbers that are no bytes are left out."""
        numbers = _numbers(tokens)
        return numbers[numbers < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")


def _eos_token(path: Path) -> str | None:
    """Return the name of the ``eos_token`` of a ``tokenizer_config.json``, None without the file or the token.

    Raises:
        ValueError: for a file that is too large, or not an object in JSON.
    """
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; a {TOKENIZER_CONFIG} of at most {MAX_BYTES} is read")
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {str(error)[:200]}") from None
    token = values.get("eos_token") if isinstance(values, dict) else None
    # An AddedToken is an object with its text.
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) and content else None


def tokenizer_file(path: str | os.PathLike[str]) -> Path:
    """Return the file that ``path`` is, or that is in the folder ``path``.

    Raises:
        ValueError: if there is none, or one that is too large.
    """
    file = Path(path)
    file = file / TOKENIZER_FILE if file.is_dir() else file
    if not file.is_file():
        other = next((name for name in _OTHER_FORMS if (file.parent / name).is_file()), None)
        if other is not None:
            raise ValueError(
                f"there is no tokenizer {file}, and {other} beside it is not read; let transformers write one there: "
                f'AutoTokenizer.from_pretrained("{file.parent}").save_pretrained("{file.parent}")'
            )
        raise ValueError(f"there is no tokenizer {file}; give a {TOKENIZER_FILE}, or a folder that has one")
    if file.stat().st_size > MAX_BYTES:
        raise ValueError(f"{file} has {file.stat().st_size} bytes; a {TOKENIZER_FILE} of at most {MAX_BYTES} is read")
    return file


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Yield a text in pieces, and whether each is its last."""
    begin = 0
    while len(text) - begin > _PIECE:
        end = text.rfind("\n", begin, begin + _PIECE) + 1 or begin + _PIECE
        yield text[begin:end], False
        begin = end
    yield text[begin:], True


def _numbers(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return tokens as an array ``[n]``.

    Raises:
        ValueError: for an array of another shape, or numbers that are none of a vocabulary.
    """
    numbers = np.asarray(tokens)
    if numbers.ndim != 1 or (numbers.size and (numbers.dtype.kind not in "iu" or numbers.min() < 0)):
        raise ValueError(f"tokens must be integers >= 0 in one row, got {brief(tokens)}")
    return numbers.astype(np.int64)


def _joined(encoded: list[np.ndarray], last: list[bool], ends: np.ndarray) -> np.ndarray:
    return np.concatenate(
        [
            part
            for tokens, is_last in zip(encoded, last, strict=True)
            for part in ((tokens, ends) if is_last else (tokens,))
        ]
    )


@contextlib.contextmanager
def _errors_of(what: str) -> Iterator[None]:
    """Turn the errors of the Rust library into ValueErrors."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # its panics are not an Exception
        raise ValueError(f"{what}: {str(error)[:200] or type(error).__name__}") from None
