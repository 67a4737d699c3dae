"""Text, its split, batches and the byte-bigram entropy."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys

import numpy as np
import pytest

import jax_te.data.text as data_module
from jax_te.checkpoint import METADATA_FILE
from jax_te.data import TrainBatches, byte_bigram_entropy, heldout_batches, load_text, whole_batches
from jax_te.interop.huggingface import ADAPTER_TENSORS, INDEX, SINGLE
from jax_te.interop.megatron import RANK_FILE, TRACKER
from tests.support.numerics import without_type_checker


def as_bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


def random_text(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)


def test_the_standard_library_is_there_and_always_the_same():
    one, other = load_text(seq_len=256), load_text(seq_len=256)
    assert len(one.train) > 5_000_000
    assert one.files > 300
    assert abs(len(one.heldout) / (len(one.train) + len(one.heldout)) - 0.05) < 1e-4
    np.testing.assert_array_equal(one.train, other.train)
    np.testing.assert_array_equal(one.heldout, other.heldout)
    bytes(one.train).decode("utf-8", errors="strict")


def test_the_end_of_each_block_is_held_out(tmp_path, monkeypatch):
    monkeypatch.setattr(data_module, "BLOCK", 100)
    (tmp_path / "text").write_bytes(bytes(range(250)))
    data = load_text(tmp_path / "text", seq_len=2, heldout_fraction=0.1)
    assert data.heldout.tolist() == [*range(90, 100), *range(190, 200), *range(245, 250)]
    assert sorted([*data.train.tolist(), *data.heldout.tolist()]) == list(range(250))
    assert data.files == 1


def test_a_folder_is_read_in_order_without_hidden_and_binary_files(tmp_path, caplog):
    files = {
        "b.txt": b"second " * 9,
        "a/z.md": b"first " * 9,
        "c/\u00fc.py": "third \u00fc".encode() * 9,
        ".git/config": b"hidden",
        ".env": b"hidden",
        "a/image.png": b"\xff\xfe\x00",
        "empty.txt": b"",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    with caplog.at_level("WARNING", "jax_te"):
        data = load_text(tmp_path, seq_len=2, heldout_fraction=0.1)
    assert re.search(r"1 of the 5 files in .* not text in UTF-8: .*image\.png", caplog.text)
    whole = files["a/z.md"] + files["b.txt"] + files["c/\u00fc.py"]
    assert bytes(data.train) + bytes(data.heldout) == whole
    assert data.files == 3


RUN_CONFIG = '{"version": 1, "crc32": 5, "preset": "tiny"}'


def folder_with(place, name, content="{}"):
    """Make a folder with this file, and with others that would be read, or refused, as text."""
    (place / "below").mkdir(parents=True)
    (place / name).write_text(content)
    (place / "metrics.jsonl").write_text('{"step": 1}')
    (place / "below" / "text.txt").write_text("not of the text")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", RUN_CONFIG),
        *((name, "{}") for name in (METADATA_FILE, SINGLE, INDEX, ADAPTER_TENSORS, TRACKER, RANK_FILE)),
    ],
    ids=lambda value: value[:30],
)
def test_folders_of_runs_checkpoints_and_models_are_left_out(name, content, tmp_path, caplog):
    (tmp_path / "text.txt").write_text("the text " * 9)
    expected = load_text(tmp_path, seq_len=2, heldout_fraction=0.1)
    folder_with(tmp_path / "runs" / "a", name, content)
    with caplog.at_level("WARNING", "jax_te"):
        data = load_text(tmp_path, seq_len=2, heldout_fraction=0.1)
    assert re.search(r"runs, checkpoints and models in .* are left out, 1 of them: .*runs/a", caplog.text)
    assert (bytes(data.train), data.files) == (bytes(expected.train), 1)
    with pytest.raises(ValueError, match=r"runs/a is the folder of a run, a checkpoint or a model"):
        load_text(tmp_path / "runs" / "a", seq_len=2)


@pytest.mark.parametrize("config", ['{"model_type": "gpt2"}', "[1]", "{", RUN_CONFIG.replace("crc32", "x")])
def test_folders_with_another_configuration_are_text(config, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "config.json").write_text(config)
    (tmp_path / "code" / "text.txt").write_text("a text" * 9)
    assert load_text(tmp_path, seq_len=2, heldout_fraction=0.1).files == 2


def test_a_folder_is_left_out_whether_it_exists_or_not(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text.txt").write_text("the text " * 9)
    (tmp_path / "link").symlink_to(tmp_path / "data")
    places = (tmp_path / "data" / "run", tmp_path / "link" / "run")

    def texts():
        options = {"seq_len": 2, "heldout_fraction": 0.1}
        return {bytes(load_text(tmp_path / "data", leave_out=place, **options).train) for place in places}

    before = texts()
    folder_with(places[0], "records.csv")  # of a loop of a user's own
    assert texts() == before
    with pytest.raises(ValueError, match="is the folder of the run as well"):
        load_text(tmp_path / "data", seq_len=2, leave_out=tmp_path / "link")


def test_linked_folders_are_read_once(tmp_path, caplog):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text(f"a text from {name} " * 9)
    (tmp_path / "here" / "wiki").symlink_to(tmp_path / "there")
    (tmp_path / "here" / "same").symlink_to(tmp_path / "there")
    (tmp_path / "there" / "above").symlink_to(tmp_path / "here")
    (tmp_path / "here" / "gone.txt").symlink_to(tmp_path / "nowhere")
    found = load_text(tmp_path / "here", seq_len=2, heldout_fraction=0.1)
    assert found.files == 2
    assert bytes(found.train).count(b"there") >= 8
    assert "lead nowhere" in caplog.text


@pytest.mark.parametrize("name", ["t.npy", "d.bin", "d.idx", "T.NPY"])
def test_a_file_of_tokens_in_a_folder_is_refused_by_name(tmp_path, name):
    (tmp_path / "a.txt").write_text("hello world " * 50)
    (tmp_path / name).write_bytes(b"tokens as text " * 50)
    with pytest.raises(ValueError, match=f"{name} has the ending of a file of tokens"):
        load_text(tmp_path, seq_len=8)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("missing", None, "no such file or folder of text: .*missing"),
        ("folder", {}, "no text in .*folder: of 0 files none is UTF-8"),
        ("binary", {"x": b"\xff\xff"}, "no text in .*binary: of 1 files none is UTF-8"),
        ("text.jsonl.gz", b"\x1f\x8b" * 100, "text.jsonl.gz is a compressed file, .*unpack it"),
        ("empty", b"", "has 0 bytes of text; with 5% held out, seq_len 8 needs at least 180"),
        ("tiny", b"x" * 100, "has 100 bytes of text; .* Give more text, or lower seq_len"),
    ],
)
def test_sources_that_cannot_be_used(tmp_path, name, content, match):
    path = tmp_path / name
    if isinstance(content, dict):
        path.mkdir()
        for file, text in content.items():
            (path / file).write_bytes(text)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=match):
        load_text(path, seq_len=8)


def test_the_bytes_that_are_asked_for_are_enough(tmp_path):
    (tmp_path / "text").write_bytes(b"x" * 180)
    data = load_text(tmp_path / "text", seq_len=8)
    assert len(data.heldout) == 9


@pytest.mark.parametrize("seed", [-1, 2**32, 2**70, True, 1.0, None])
def test_seeds_that_would_lose_bits_are_refused(seed):
    with without_type_checker(), pytest.raises((ValueError, TypeError), match="seed must be"):
        TrainBatches(random_text(50), batch_size=1, seq_len=2, seed=seed)


@pytest.mark.parametrize(
    "make",
    [
        lambda text: TrainBatches(text, batch_size=1, seq_len=2, seed=0),
        lambda text: heldout_batches(text, batch_size=1, seq_len=2, num_batches=1),
        lambda text: whole_batches(text, batch_size=1, seq_len=2),
    ],
    ids=["train", "heldout", "whole"],
)
@pytest.mark.parametrize("text", [np.linspace(0.5, 9.5, 20), np.ones(20, bool), np.ones((20, 2), np.int32)], ids=str)
def test_what_is_no_sequence_of_tokens_is_refused_by_the_call(make, text):
    with pytest.raises(ValueError, match=r"tokens must be integers \[n\], got"):
        make(text)


def test_a_negative_byte_is_refused():
    with pytest.raises(ValueError, match="the token -19 at position 0"):
        TrainBatches(np.full(20, -19, np.int8), batch_size=1, seq_len=2, seed=0, vocab_size=256)


def test_batches_are_windows_of_the_text():
    text = random_text(5000)
    places = {bytes(text[i : i + 17]): i for i in range(len(text) - 16)}
    seen = []
    for batch in itertools.islice(TrainBatches(text, batch_size=4, seq_len=16, seed=0), 50):
        assert batch["tokens"].dtype == batch["labels"].dtype == np.int32
        assert batch["tokens"].shape == batch["labels"].shape == (4, 16)
        np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
        for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True):
            seen.append(places[bytes(np.append(tokens, labels[-1]).astype(np.uint8))])
    assert len(set(seen)) == 200
    assert 1500 < np.mean(seen) < 3500


def test_every_place_comes_once_an_epoch_in_another_order():
    text = np.arange(20, dtype=np.uint8)
    batches = TrainBatches(text, batch_size=4, seq_len=4, seed=1)
    epochs = [np.concatenate([next(batches)["tokens"][:, 0] for _ in range(4)]).tolist() for _ in range(3)]
    assert all(sorted(epoch) == list(range(16)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_seed_decides():
    text = random_text(1000)
    first = [next(TrainBatches(text, batch_size=2, seq_len=8, seed=seed))["tokens"] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(first[0], first[1])
    assert (first[0] != first[2]).any()


@pytest.mark.parametrize("taken", [0, 1, 7])
def test_a_restored_iterator_goes_on_with_the_same_batches(taken):
    text = random_text(1000)
    one = TrainBatches(text, batch_size=2, seq_len=8, seed=3)
    for _ in range(taken):
        next(one)
    state = json.loads(json.dumps(one.get_state()))
    following = [next(one) for _ in range(3)]
    other = TrainBatches(text, batch_size=2, seq_len=8, seed=3)
    next(other)
    other.set_state(state)
    for expected in following:
        batch = next(other)
        for name in expected:
            np.testing.assert_array_equal(batch[name], expected[name])
    assert other.get_state() == one.get_state()


@pytest.mark.parametrize(
    "change",
    [{"text": random_text(1000, 1)}, {"batch_size": 4}, {"seq_len": 4}, {"seed": 1}],
    ids=lambda c: next(iter(c)),
)
def test_a_state_of_other_data_is_refused(change):
    options = {"text": random_text(1000), "batch_size": 2, "seq_len": 8, "seed": 0}
    state = TrainBatches(**options).get_state()
    with pytest.raises(ValueError, match=f"{next(iter(change))}.* was .*, now .*start a new run"):
        TrainBatches(**{**options, **change}).set_state(state)


@pytest.mark.parametrize(
    "place",
    [None, {}, {"next_index": -5}, {"next_index": 1.0}, {"next_index": True}, {"next_index": None}, 3],
    ids=str,
)
def test_a_state_without_a_position_is_refused(place):
    batches = TrainBatches(random_text(1000), batch_size=2, seq_len=8, seed=0)
    next(batches)
    state = batches.get_state()
    broken = {**state, "grain": place}
    if place is None:
        del broken["grain"]
    with pytest.raises(ValueError, match=r"number of the next batch.*an integer >= 0.*under 'grain'"):
        batches.set_state(broken)
    assert batches.get_state() == state


def test_heldout_batches_cover_the_text_the_same_way_every_time():
    text = random_text(1000)
    one, other = (list(heldout_batches(text, batch_size=2, seq_len=8, num_batches=5)) for _ in range(2))
    assert len(one) == 5
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a["tokens"], b["tokens"])
        np.testing.assert_array_equal(a["tokens"][:, 1:], a["labels"][:, :-1])
    np.testing.assert_array_equal(one[0]["tokens"][0], text[:8])
    np.testing.assert_array_equal(one[-1]["labels"][-1], text[-8:])


def test_too_short_for_a_window():
    with pytest.raises(ValueError, match="a text of 8 tokens has no window of seq_len 8: it needs at least 9"):
        TrainBatches(random_text(8), batch_size=1, seq_len=8, seed=0)
    with pytest.raises(ValueError, match="needs at least 9"):
        next(heldout_batches(random_text(8), batch_size=1, seq_len=8, num_batches=1))


def test_missing_grain_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[train\]" in a checkout'):
        TrainBatches(random_text(100), batch_size=1, seq_len=8, seed=0)


def test_entropy_of_a_text_whose_next_byte_is_known():
    text = as_bytes(b"abc" * 100)
    assert byte_bigram_entropy(text[:0], text) == 0.0


def test_entropy_of_coin_flips():
    text = np.random.default_rng(0).integers(0, 2, 200_000).astype(np.uint8)
    np.testing.assert_allclose(byte_bigram_entropy(text[:0], text), math.log(2.0), atol=1e-4)
    np.testing.assert_allclose(byte_bigram_entropy(text[100_000:], text[:100_000]), math.log(2.0), atol=1e-4)


def test_entropy_by_a_loop():
    train, heldout = as_bytes(b"the cat sat on the mat. " * 3), as_bytes(b"the bat")
    counts: dict[int, dict[int, int]] = {}
    for text in (train.tolist(), heldout.tolist()):
        for a, b in itertools.pairwise(text):
            counts.setdefault(a, {}).setdefault(b, 0)
            counts[a][b] += 1
    losses = [-math.log(counts[a][b] / sum(counts[a].values())) for a, b in itertools.pairwise(heldout.tolist())]
    np.testing.assert_allclose(byte_bigram_entropy(train, heldout), sum(losses) / len(losses), rtol=1e-12)


def test_entropy_needs_a_pair():
    with pytest.raises(ValueError, match="at least 2 bytes, got 1"):
        byte_bigram_entropy(as_bytes(b"abc"), as_bytes(b"a"))
