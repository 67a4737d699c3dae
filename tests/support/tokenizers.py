"""A tokenizer small enough for tests, and files of Megatron's data."""

import json
import struct

import numpy as np

WORDS = ["def", "return", "import", "self", "if", "for", "in", "the", "of", "a", "is", "=", "(", ")", ":", ",", "."]


def write_tokenizer(path, words=WORDS, *, end="<|endoftext|>", **changes):
    """Write a ``tokenizer.json`` of words, punctuation apart, with an unknown token, 0, and an end of text, 1."""
    vocab = {"[UNK]": 0} | ({end: 1} if end else {}) | {word: i + 2 for i, word in enumerate(words)}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    values = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 1, "content": end} | special] if end else [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"},
    }
    path.write_text(json.dumps(values | changes))
    return path


MASKED = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SPANS = ("<pad>", "</s>", "<unk>", *(f"<extra_id_{number}>" for number in reversed(range(10))))
"""Special tokens of small BERTs and T5s, numbered from 0."""


def write_special_tokenizer(path, special=MASKED, words=WORDS, *, before="", after="", pieces=()):
    """Write a ``tokenizer.json`` with special tokens, other ``pieces`` and words, and a template around a text."""
    vocab = {word: number for number, word in enumerate([*special, *pieces, *words])}
    entry = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    ids = {name: {"id": name, "ids": [vocab[name]], "tokens": [name]} for name in (before, after) if name}
    around = [{"SpecialToken": {"id": name, "type_id": 0}} if name else None for name in (before, after)]
    single = [part for part in (around[0], {"Sequence": {"id": "A", "type_id": 0}}, around[1]) if part is not None]
    template = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": ids}
    unknown = next(name for name in special if "unk" in name.lower())
    return write_tokenizer(
        path,
        words,
        added_tokens=[{"id": number, "content": name} | entry for number, name in enumerate(special)],
        post_processor=template if ids else None,
        model={"type": "WordLevel", "vocab": vocab, "unk_token": unknown},
    )


def write_megatron(prefix, documents, dtype=np.uint16, code=8):
    """Write ``PREFIX.bin`` and ``PREFIX.idx`` as Megatron's ``IndexedDatasetBuilder`` does; returns both paths."""
    arrays = [np.asarray(document, dtype) for document in documents]
    sizes = np.array([len(array) for array in arrays], np.int32)
    places = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64)]) * np.dtype(dtype).itemsize
    data, index = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
    data.write_bytes(b"".join(array.tobytes() for array in arrays))
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(sizes) + 1)
    documents = np.arange(len(sizes) + 1, dtype=np.int64)
    index.write_bytes(header + sizes.tobytes() + places.astype(np.int64).tobytes() + documents.tobytes())
    return data, index
