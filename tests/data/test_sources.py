"""Documents from JSON lines, Parquet and files of tokens."""

import itertools
import json
import struct

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest

from jax_te.data import Tokenizer, TrainBatches, heldout_batches, load_text, read_tokens, whole_batches
from jax_te.data import batches as batches_module
from tests.support.tokenizers import WORDS, write_megatron, write_tokenizer

A, THE = WORDS.index("a") + 2, WORDS.index("the") + 2


@pytest.fixture
def tokenizer(tmp_path):
    return Tokenizer(write_tokenizer(tmp_path / "words.json"))


def test_json_lines(tmp_path, tokenizer):
    lines = ['{"text": "a the", "id": 1}', "", '{"text": "", "note": null}', '{"text": "\\u00fc a"}  ']
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    found = read_tokens(tmp_path / "d.jsonl", tokenizer=tokenizer)
    assert found.tokens.tolist() == [A, THE, 1, 1, 0, A, 1]
    assert (found.text_bytes, found.files, found.vocab_size) == (9, 1, tokenizer.vocab_size)
    as_bytes = read_tokens(tmp_path / "d.jsonl")
    assert as_bytes.tokens.tobytes() == "a the\u00fc a".encode()
    (tmp_path / "UPPER.JSONL").write_text("\n".join(lines))
    assert read_tokens(tmp_path / "UPPER.JSONL").tokens.tobytes() == "a the\u00fc a".encode()
    (tmp_path / "n.ndjson").write_text("\n".join(lines))
    assert read_tokens(tmp_path / "n.ndjson").tokens.tobytes() == "a the\u00fc a".encode()
    (tmp_path / "e.jsonl").write_text('{"body": "a"}')
    assert read_tokens(tmp_path / "e.jsonl", tokenizer=tokenizer, text_key="body").tokens.tolist() == [A, 1]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", "line 2: .* at its character 3$"),
        ("[]", r"line 2: it must be an object with a string 'text', and is \[\]"),
        ('{"text": 1}', "line 2: it must be an object with a string 'text'"),
        ('{"body": "x"}', "line 2: it has no 'text'"),
        ('{"text": "\\ud800"}', "line 2: .*surrogates"),
        ("[" * 100_000, "line 2: "),
        ("9" * 10_000, "line 2: "),
        ('{"text": "\xff', "line 2: "),
    ],
    ids=range(8),
)
def test_a_bad_line_is_named(line, match, tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "a"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=rf"d\.jsonl, {match}") as error:
        load_text(tmp_path / "d.jsonl", seq_len=2)
    assert len(str(error.value)) < 600


LINES = '{"text": "a the"}\n{"text": "a"}\n'


@pytest.mark.parametrize("name", ["d.json", "D.JSON", "d", "d.jsonl.1"])
@pytest.mark.parametrize(
    "content",
    [LINES, "\n " + LINES, "\ufeff" + LINES, json.dumps([{"id": 1, "text": "a"}] * 2, indent=1), '{\n"text": "a"\n}'],
    ids=["lines", "space", "mark", "list", "object"],
)
def test_json_under_another_name_is_not_read_as_text(name, content, tmp_path):
    (tmp_path / name).write_text(content, encoding="utf-8")
    for source in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match=rf"{name} begins with a JSON object with 'text'.*\.jsonl.*\.txt"):
            read_tokens(source)
    assert read_tokens(tmp_path / name, text_key="body").tokens.tobytes() == content.encode()


def test_other_json_and_files_of_txt_are_text(tmp_path):
    contents = ['{"name": "x", "files": []}', "[1, 2]", "{", "[" * 100_000, '{"text": 1}', "[link](text)", '["text"]']
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.json").write_text(content)
    (tmp_path / "z.txt").write_text(LINES)
    found = read_tokens(tmp_path)
    assert found.tokens.tobytes().decode() == "".join(contents) + LINES


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_json_lines_in_another_encoding_are_named(encoding, tmp_path):
    (tmp_path / "d.jsonl").write_bytes(("\ufeff" + LINES).encode(encoding))
    with pytest.raises(ValueError, match=r"d\.jsonl begins with .* UTF-16 or UTF-32.* UTF-8"):
        read_tokens(tmp_path / "d.jsonl")
    (tmp_path / "d.jsonl").write_text("\ufeff" + LINES, encoding="utf-8")  # a mark of UTF-8 is harmless
    assert read_tokens(tmp_path / "d.jsonl").tokens.tobytes() == b"a thea"


def test_a_line_beyond_the_limit_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("jax_te.data.sources.MAX_LINE", 20)
    (tmp_path / "d.jsonl").write_text('{"text": "' + "x" * 100 + '"}')
    with pytest.raises(ValueError, match="line 1: it has more than 20 bytes"):
        load_text(tmp_path / "d.jsonl", seq_len=2)


def test_a_page_of_parquet_with_another_checksum_is_refused(tmp_path):
    rows, path = pyarrow.table({"text": ["a sentence that is long enough"] * 3}), tmp_path / "d.parquet"
    options = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    for checksum in (False, True):
        parquet.write_table(rows, path, write_page_checksum=checksum, **options)
        path.write_bytes(path.read_bytes().replace(b"sentence", b"Sentence", 1))
        if checksum:
            with pytest.raises(ValueError, match=r"d\.parquet cannot be read as Parquet: .*(CRC|checksum)"):
                read_tokens(path)
        else:  # a file without them shows nothing
            assert bytes(read_tokens(path).tokens).count(b"Sentence") == 1


def test_parquet(tmp_path, tokenizer):
    rows = pyarrow.table({"text": ["a the", "", "a"], "id": [1, 2, 3]})
    parquet.write_table(rows, tmp_path / "d.parquet")
    found = read_tokens(tmp_path / "d.parquet", tokenizer=tokenizer)
    assert found.tokens.tolist() == [A, THE, 1, 1, A, 1]
    assert found.text_bytes == 6
    with pytest.raises(ValueError, match=r"d\.parquet cannot be read as Parquet: it has no column 'body'.*'text'"):
        read_tokens(tmp_path / "d.parquet", text_key="body")
    with pytest.raises(ValueError, match=r"column 'id' must be of strings, and is of 'int64'"):
        read_tokens(tmp_path / "d.parquet", text_key="id")
    parquet.write_table(pyarrow.table({"text": ["a"] * 300 + [None]}), tmp_path / "null.parquet")
    with pytest.raises(ValueError, match=r"null\.parquet .*: row 300, counted from 0, has null for 'text'"):
        read_tokens(tmp_path / "null.parquet")
    content = (tmp_path / "d.parquet").read_bytes()
    for damaged in (b"", b"PAR1", content[: len(content) // 2], content[:-9] + b"\xff" * 5 + content[-4:]):
        (tmp_path / "bad.parquet").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"bad\.parquet cannot be read as Parquet"):
            read_tokens(tmp_path / "bad.parquet")


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.large_string(),
        pyarrow.string_view(),
        pyarrow.dictionary(pyarrow.int8(), pyarrow.string()),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.large_string()),
    ],
    ids=str,
)
def test_parquet_has_strings_of_several_types(kind, tmp_path, tokenizer):
    parquet.write_table(pyarrow.table({"text": pyarrow.array(["a the", "", "a"]).cast(kind)}), tmp_path / "d.parquet")
    assert read_tokens(tmp_path / "d.parquet", tokenizer=tokenizer).tokens.tolist() == [A, THE, 1, 1, A, 1]


@pytest.mark.parametrize(
    "kind", [pyarrow.binary(), pyarrow.dictionary(pyarrow.int32(), pyarrow.binary())], ids=["bytes", "dictionary"]
)
def test_a_column_of_bytes_is_refused_by_its_type(kind, tmp_path):
    column = pyarrow.array([b"a", b"b"])
    column = column.dictionary_encode() if pyarrow.types.is_dictionary(kind) else column
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "d.parquet")
    with pytest.raises(ValueError, match=r"column 'text' must be of strings, and is of '.*binary"):
        read_tokens(tmp_path / "d.parquet")


def test_a_folder_of_several_kinds_in_order(tmp_path, tokenizer):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "b.txt").write_text("the")
    (folder / "a.jsonl").write_text('{"text": "a"}\n{"text": "a a"}\n')
    (folder / "c.png").write_bytes(b"\xff\xff")
    found = read_tokens(folder, tokenizer=tokenizer)
    assert found.tokens.tolist() == [A, 1, A, A, 1, THE, 1]
    assert found.files == 2


def test_a_tokenizer_takes_no_binary_file(tmp_path, tokenizer):
    (tmp_path / "text").write_bytes(b"\xff" * 100)
    assert len(read_tokens(tmp_path / "text").tokens) == 100
    with pytest.raises(ValueError, match="text is not text in UTF-8"):
        read_tokens(tmp_path / "text", tokenizer=tokenizer)


def test_held_out_tokens_and_bytes_per_token(tmp_path, tokenizer):
    (tmp_path / "text").write_text("a the " * 500)
    data = load_text(tmp_path / "text", seq_len=8, tokenizer=tokenizer)
    assert (len(data.train), len(data.heldout)) == (951, 50)
    assert data.train.dtype == np.uint8
    assert data.vocab_size == tokenizer.vocab_size
    assert data.bytes_per_token == pytest.approx(3000 / 1001)
    with pytest.raises(ValueError, match="text has 1001 tokens; with 5% held out, seq_len 64 needs"):
        load_text(tmp_path / "text", seq_len=64, tokenizer=tokenizer)


@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<i4", "<i8", ">u2"])
def test_npy_stays_on_the_disk(dtype, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 200, 1000).astype(dtype)
    np.save(tmp_path / "t.npy", tokens)
    data = load_text(tmp_path / "t.npy", seq_len=8)
    assert isinstance(data.train, np.memmap)
    assert isinstance(data.heldout, np.memmap)
    assert not data.train.flags.writeable
    np.testing.assert_array_equal(np.concatenate([data.train, data.heldout]), tokens)
    assert data.bytes_per_token is None
    one = TrainBatches(data.train, batch_size=2, seq_len=8, seed=3, vocab_size=200)
    other = TrainBatches(tokens[:950], batch_size=2, seq_len=8, seed=3)
    for _ in range(3):
        np.testing.assert_array_equal(next(one)["tokens"], next(other)["tokens"])


class Planted:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_pickle_in_a_npy_file_does_not_run(tmp_path):
    mark = tmp_path / "run"
    np.save(tmp_path / "t.npy", np.array([Planted(mark)], object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"t\.npy is not a \.npy file of tokens"):
        load_text(tmp_path / "t.npy", seq_len=2)
    assert not mark.exists()


@pytest.mark.parametrize(
    "array",
    [np.zeros((2, 2), np.int32), np.zeros(9), np.array(1), np.array(["a"]), np.zeros(3, [("a", "i4")])],
    ids=str,
)
def test_other_arrays_are_refused(array, tmp_path):
    np.save(tmp_path / "t.npy", array)
    with pytest.raises(ValueError, match=r"t\.npy"):
        load_text(tmp_path / "t.npy", seq_len=2)


@pytest.mark.parametrize(("dtype", "code"), [(np.uint8, 1), (np.uint16, 8), (np.int32, 4), (np.int64, 5)])
@pytest.mark.parametrize("named", [0, 1])
def test_megatrons_files(dtype, code, named, tmp_path):
    documents = [[5, 6, 7], [8], [9, 10]]
    paths = write_megatron(tmp_path / "d_text_document", documents, dtype, code)
    found = read_tokens(paths[named])
    assert found.tokens.tolist() == [*range(5, 11)]
    assert found.tokens.dtype == dtype
    assert isinstance(found.tokens, np.memmap)


def test_megatrons_index_must_fit_its_data(tmp_path):
    data, index = write_megatron(tmp_path / "d", [[1, 2, 3], [4]])
    content = index.read_bytes()

    def refused(match, content=content):
        index.write_bytes(content)
        with pytest.raises(ValueError, match=match) as error:
            read_tokens(data)
        assert len(str(error.value)) < 600

    refused("not an index of Megatron's data", b"x" * 100)
    refused("not an index of Megatron's data", content[:20])
    refused("has version 2", content[:9] + struct.pack("<Q", 2) + content[17:])
    refused("dtype code 7", content[:17] + b"\x07" + content[18:])
    refused(r"bytes, and its \d+ sequences", content[:18] + struct.pack("<Q", 2**63) + content[26:])
    refused(r"bytes, and its 0 sequences", content[:18] + struct.pack("<QQ", 0, 1) + content[26:])
    refused("only data without gaps", content[:34] + struct.pack("<i", 2) + content[38:])
    refused("only data without gaps", content[:42] + struct.pack("<q", 2) + content[50:])
    index.write_bytes(content)
    data.write_bytes(data.read_bytes()[:-2])
    refused("describes 8 bytes of tokens, from 0 to 8, and d.bin has 6")
    data.unlink()
    with pytest.raises(ValueError, match=r"d\.bin is not there; Megatron's data are two files"):
        read_tokens(index)


def test_a_bin_file_without_its_index_is_no_text(tmp_path, tokenizer):
    """It would be read as bytes, each a token of its own, and trained on without a word."""
    (tmp_path / "data.bin").write_bytes(np.arange(1000, dtype=np.uint16).tobytes())
    for given in (None, tokenizer):
        with pytest.raises(ValueError, match=r"data\.idx is not there; Megatron's data are two files"):
            read_tokens(tmp_path / "data.bin", tokenizer=given)


def test_tokens_outside_of_the_vocabulary_are_named():
    for tokens, bad in (([1, 2, 300, 4], 300), ([1, -2, 3, 4], -2), ([1, 2, 2**32 + 1, 4], 2**32 + 1)):
        text = np.array(tokens, np.int64)
        with pytest.raises(
            ValueError, match=rf"the token {bad} at position [12], .* from 0 to 255 .vocab_size.; give the tokenizer"
        ):
            TrainBatches(text, batch_size=1, seq_len=3, seed=0, vocab_size=256)
        with pytest.raises(ValueError, match=f"the token {bad}"):
            next(heldout_batches(text, batch_size=1, seq_len=3, num_batches=1, vocab_size=256))
    with pytest.raises(ValueError, match="the token 4294967297"):  # without a vocabulary: int32 must hold it
        next(whole_batches(text, batch_size=1, seq_len=3))


@pytest.mark.parametrize("place", [0, 500, 949])
def test_a_token_outside_of_the_vocabulary_is_found_before_the_first_batch(place, tmp_path):
    tokens = np.zeros(1000, np.uint16)
    tokens[place] = 300
    np.save(tmp_path / "t.npy", tokens)
    for text in (load_text(tmp_path / "t.npy", seq_len=4).train, tokens):
        with pytest.raises(ValueError, match=f"the token 300 at position {place}, "):
            TrainBatches(text, batch_size=1, seq_len=4, seed=0, vocab_size=256)
        TrainBatches(text, batch_size=1, seq_len=4, seed=0, vocab_size=301)


def test_of_a_large_map_pieces_are_checked_before_the_first_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(batches_module, "PIECE", 64)
    tokens = np.zeros(20_000, np.uint16)
    tokens[18_999] = 300  # the last one to train on
    np.save(tmp_path / "t.npy", tokens)
    options = {"batch_size": 100, "seq_len": 4, "seed": 0, "vocab_size": 256}
    with pytest.raises(ValueError, match="the token 300 at position 18999"):
        TrainBatches(load_text(tmp_path / "t.npy", seq_len=4).train, **options)
    tokens[18_999], tokens[100] = 0, 300  # between the first two pieces
    np.save(tmp_path / "t.npy", tokens)
    batches = TrainBatches(load_text(tmp_path / "t.npy", seq_len=4).train, **options)
    with pytest.raises(ValueError, match=r"the token 300 at position 100, .* pieces alone are checked at the start"):
        list(itertools.islice(batches, 190))  # an epoch


def test_the_checksum_of_a_large_map_reads_pieces_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(batches_module, "PIECE", 64)
    tokens = np.arange(20_000, dtype=np.uint16)
    np.save(tmp_path / "t.npy", tokens)
    state = TrainBatches(load_text(tmp_path / "t.npy", seq_len=4).train, batch_size=1, seq_len=4, seed=0).get_state()
    step = (19_000 - 32) / 63  # pieces of 32 tokens of the 19,000 to train on

    def differs(changed):
        np.save(tmp_path / "t.npy", changed)
        train = load_text(tmp_path / "t.npy", seq_len=4).train
        return TrainBatches(train, batch_size=1, seq_len=4, seed=0).get_state()["text_crc32"] != state["text_crc32"]

    for place, seen in ((0, True), (18_999, True), (int(step) + 1, True), (100, False)):
        changed = tokens.copy()
        changed[place] += 1
        assert differs(changed) == seen
    assert differs(np.append(tokens, tokens[:200]))  # of another length
    assert not differs(tokens)


def test_positions_beyond_32_bits_are_spaced(monkeypatch):
    monkeypatch.setattr(batches_module, "MAX_POSITIONS", 10)
    batches = TrainBatches(np.arange(36, dtype=np.uint8), batch_size=8, seq_len=4, seed=1)
    starts = sorted(next(batches)["tokens"][:, 0].tolist())
    assert starts == [*range(0, 32, 4)]


@pytest.mark.parametrize("count", [2, 5, 12, 13, 14, 40])
def test_whole_batches_have_every_token_but_the_first_as_a_label_once(count):
    text = np.arange(count, dtype=np.uint16)
    batches = list(whole_batches(text, batch_size=3, seq_len=4, vocab_size=count))
    assert all(batch["tokens"].shape == batch["labels"].shape == (3, 4) for batch in batches)
    pairs = [
        (int(token), int(label))
        for batch in batches
        for token, label in zip(batch["tokens"].ravel(), batch["labels"].ravel(), strict=True)
        if label != -100
    ]
    assert pairs == list(itertools.pairwise(range(count)))
    for few in (0, 1):
        with pytest.raises(ValueError, match=f"a text of {few} tokens has none to predict .* Give more text$"):
            whole_batches(text[:few], batch_size=1, seq_len=4)


def test_a_state_of_tokens_on_the_disk_resumes(tmp_path):
    np.save(tmp_path / "t.npy", np.random.default_rng(0).integers(0, 60_000, 5000).astype(np.uint16))
    one = TrainBatches(load_text(tmp_path / "t.npy", seq_len=8).train, batch_size=4, seq_len=8, seed=0)
    for _ in range(5):
        next(one)
    state = json.loads(json.dumps(one.get_state()))
    other = TrainBatches(load_text(tmp_path / "t.npy", seq_len=8).train, batch_size=4, seq_len=8, seed=0)
    other.set_state(state)
    for _ in range(3):
        expected, batch = next(one), next(other)
        np.testing.assert_array_equal(batch["tokens"], expected["tokens"])
        np.testing.assert_array_equal(batch["labels"], expected["labels"])
