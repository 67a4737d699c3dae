"""Tokenizers from tokenizer.json."""

import json

import numpy as np
import pytest
import tokenizers as library

from jax_te.data import Tokenizer
from jax_te.data.sources import read_tokens
from jax_te.data.tokenizer import _PIECE, ByteTokenizer, tokenizer_file
from tests.support.tokenizers import WORDS, write_special_tokenizer, write_tokenizer


def test_text_to_tokens_and_back(tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer(tmp_path)  # a folder that has it
    assert (tokenizer.vocab_size, tokenizer.end_of_text, tokenizer.dtype) == (len(WORDS) + 2, 1, np.uint8)
    tokens = tokenizer.encode("return self. nothing")
    assert tokens.dtype == np.uint8
    assert tokens.tolist() == [WORDS.index("return") + 2, WORDS.index("self") + 2, WORDS.index(".") + 2, 0]
    assert tokenizer.decode(tokens[:3]) == "return self ."
    assert tokenizer.decode([2, 1, 10**6, 3]) == "def return"  # the end of text is special, and 10^6 is unknown


@pytest.mark.parametrize(("size", "dtype"), [(254, np.uint8), (255, np.uint16), (70_000, np.uint32)])
def test_tokens_are_kept_in_the_narrowest_dtype(size, dtype, tmp_path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "t.json", [f"w{i}" for i in range(size)]))
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.encode(f"w0 w{size - 1}").dtype == tokenizer.dtype == dtype
    assert tokenizer.encode(f"w0 w{size - 1}").tolist() == [2, size + 1]


def test_a_byte_pair_encoding_gives_every_text_back(tmp_path):
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["</s>"])
    made.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer, text = Tokenizer(tmp_path), "the cat\n\tsat, \u00fcber \U0001f600 the mat "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.end_of_text == made.token_to_id("</s>")
    assert tokenizer.encode("the").tolist() == made.encode("the").ids


def test_truncation_padding_and_templates_are_left_out(tmp_path):
    direction = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [1], "tokens": ["<|endoftext|>"]}},
    }
    path = write_tokenizer(
        tmp_path / "t.json",
        truncation=direction,
        padding=padding | {"pad_type_id": 0, "pad_token": "[UNK]"},
        post_processor=template,
    )
    assert Tokenizer(path).encode("a a a a").tolist() == [WORDS.index("a") + 2] * 4


def test_documents_end_with_the_end_of_text(tmp_path):
    path = write_tokenizer(tmp_path / "t.json")
    a = WORDS.index("a") + 2
    encoded = np.concatenate([*Tokenizer(path).encode_documents([b"a a", b"", b"a"])])
    assert encoded.tolist() == [a, a, 1, 1, a, 1]
    assert encoded.dtype == np.uint8
    assert Tokenizer(path, end_of_text="[UNK]").end_of_text == 0
    with pytest.raises(ValueError, match=r"t\.json has no token '</x>'"):
        Tokenizer(path, end_of_text="</x>")
    without = Tokenizer(write_tokenizer(tmp_path / "none.json", end=None))
    assert without.end_of_text is None
    assert np.concatenate([*without.encode_documents([b"a", b"a"])]).tolist() == [a, a]


def test_a_long_document_is_encoded_in_pieces_of_whole_lines(tmp_path):
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "t.json"))
    line = b"the cat is self . import\n"
    document = line * (3 * _PIECE // len(line))
    parts = [*tokenizer.encode_documents([document, b"a"])]
    assert len(parts) > 2
    encoded = np.concatenate(parts)
    np.testing.assert_array_equal(
        encoded[:-3].reshape(-1, 6)[::1000],
        tokenizer.encode(line.decode())[None].repeat(len(encoded[:-3]) // 6, 0)[::1000],
    )
    assert encoded[-3:].tolist() == [1, WORDS.index("a") + 2, 1]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[1, 2]",
        b"not json",
        b"\xff\xfe",
        b'{"version": "1.0"}',
        b"[" * 100_000,
        b"\x80\x04\x95cos\nsystem\n",
        json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}}).encode(),
        json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": "a"}}).encode(),
        json.dumps(
            {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 2**31}, "unk_token": "a"}}
        ).encode(),
    ],
    ids=range(11),
)
def test_what_is_no_tokenizer_is_one_clear_error(content, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json") as error:
        Tokenizer(path)
    assert len(str(error.value)) < 600


def test_files_that_are_missing_or_too_large(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"there is no tokenizer .*tokenizer\.json; give"):
        Tokenizer(tmp_path)
    path = write_tokenizer(tmp_path / "t.json")
    monkeypatch.setattr("jax_te.data.tokenizer.MAX_BYTES", 100)
    with pytest.raises(ValueError, match=r"t\.json has \d+ bytes; .* at most 100"):
        tokenizer_file(path)


def test_a_text_that_cannot_be_encoded_is_named(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}  # which is not there
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "t.json", end=None, model=model))
    assert tokenizer.encode("a a").tolist() == [0, 0]
    with pytest.raises(ValueError, match=r"t\.json cannot encode this text"):
        tokenizer.encode("b")


def test_bytes():
    text = "\u00fcber \udc80"  # a byte that is not UTF-8, as Python gives it in a command line
    assert ByteTokenizer().encode(text).tolist() == [*"\u00fcber ".encode(), 0x80]
    assert ByteTokenizer().decode([*"\u00fc".encode(), 0x80]) == "\u00fc\ufffd"
    assert ByteTokenizer().decode([72, 105, 300, 321]) == "Hi"  # as `Tokenizer` leaves out ids that it lacks


@pytest.mark.parametrize("eos", ["the", {"content": "the", "special": True}])
def test_the_end_of_text_is_the_one_that_the_file_beside_it_names(eos, tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.end_of_text, tokenizer.end_of_text_name) == (WORDS.index("the") + 2, "the")
    assert Tokenizer(tmp_path, end_of_text="a").end_of_text_name == "a"


def test_a_file_beside_a_tokenizer_without_an_end_of_text_decides_nothing(tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert Tokenizer(tmp_path).end_of_text_name == "<|endoftext|>"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "gone"}')
    with pytest.raises(ValueError, match=r"tokenizer_config.json names the eos_token 'gone', which .* lacks"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config.json is not JSON"):
        Tokenizer(tmp_path)


def test_a_special_token_ends_a_text_before_a_word_of_the_same_names(tmp_path):
    """Gemma's vocabulary has the tag `</s>`, and ends texts with `<eos>`."""
    path = write_special_tokenizer(tmp_path / "t.json", ("[UNK]", "<eos>"), ["</s>", *WORDS])
    assert Tokenizer(path).end_of_text_name == "<eos>"


def test_documents_that_nothing_separates_are_named(tmp_path, caplog):
    tokenizer = Tokenizer(write_tokenizer(tmp_path / "none.json", end=None))
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n{"text": "the"}\n')
    read_tokens(tmp_path / "d.jsonl", tokenizer=tokenizer)
    assert "none.json has no end of text, so nothing separates the 2 documents" in caplog.text
