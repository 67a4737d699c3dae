"""Objectives: masked tokens and corrupted spans of windows, and their batches."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from jax_te.config import ParallelConfig
from jax_te.data import (
    CorruptedSpans,
    MaskedTokens,
    NextTokens,
    Objective,
    Tokenizer,
    TrainBatches,
    heldout_batches,
    load_text,
)
from jax_te.data.batches import whole_batches
from jax_te.sharding import make_mesh, named_sharding
from tests.support.tokenizers import MASKED, SPANS, WORDS, write_special_tokenizer, write_tokenizer

CLS, SEP, MASK, WORDS_AT = 2, 3, 4, 5
BERT = MaskedTokens(mask=MASK, vocab_size=105, special=(0, 1, CLS, SEP, MASK), before=(CLS,), after=(SEP,))
T5 = CorruptedSpans(sentinels=tuple(range(1999, 1799, -1)), after=(1,))
BOTH = pytest.mark.parametrize("objective", [BERT, T5], ids=["masked", "spans"])
TEXT = (np.arange(3000) * 7919 % 100 + WORDS_AT).astype(np.uint16)


def restored(inputs, labels, sentinels):
    """The window of which these are the encoder's tokens and the decoder's labels."""
    spans, order = {}, []
    for token in labels:
        if token in sentinels:
            order.append(token)
            spans[token] = []
        else:
            spans[order[-1]].append(token)
    assert order == list(sentinels[: len(order)])
    assert [token for token in inputs if token in sentinels] == order
    assert all(spans.values())
    return [token for each in inputs for token in (spans[each] if each in sentinels else [each])]


@pytest.mark.parametrize("rate", [0.15, 0.02, 0.5])
@pytest.mark.parametrize("seq_len", [4, 7, 32, 64, 512])
def test_spans_fill_their_lengths_and_restore_the_window(seq_len, rate):
    objective = dataclasses.replace(T5, rate=rate)
    lengths, window = objective.lengths(seq_len), objective.window(seq_len)
    text = np.arange(100, 100 + window, dtype=np.int32)
    for place in range(20):
        example = objective.example(text, (3, place))
        assert {name: len(values) for name, values in example.items()} == lengths
        inputs, labels = example["tokens"].tolist(), example["labels"].tolist()
        assert example["decoder_tokens"].tolist() == [0, *labels[:-1]]
        assert (inputs.pop(), labels.pop()) == (1, 1)
        assert restored(inputs, labels, T5.sentinels) == text.tolist()


def test_windows_of_spans_are_as_long_as_those_of_t5():
    """The sizes of T5's own pre-training: 568 tokens of text for 512 of the encoder and 114 of the decoder."""
    assert (T5.window(512), T5.lengths(512)) == (568, {"tokens": 512, "decoder_tokens": 114, "labels": 114})


def test_spans_are_anywhere_in_the_window():
    text, draws = np.arange(2000, 2568, dtype=np.int32), 400
    removed = np.zeros(568)
    for place in range(draws):
        inputs = T5.example(text, (0, place))["tokens"]
        removed += ~np.isin(text, inputs) / draws
    assert removed.mean() == pytest.approx(85 / 568)  # in 28 spans, of three tokens on average
    # Each token is removed as often, but for those near the ends: five standard deviations.
    assert np.abs(removed[20:-20] - 0.15).max() < 5 * (0.15 * 0.85 / draws) ** 0.5


def test_masked_tokens_are_chosen_and_replaced_as_in_bert():
    text, draws = TEXT[:202].astype(np.int32), 300
    counts = np.zeros(3)
    for place in range(draws):
        example = BERT.example(text, (0, place))
        tokens, labels = example["tokens"][1:-1], example["labels"][1:-1]
        assert (example["tokens"][0], example["tokens"][-1]) == (CLS, SEP)
        assert (example["labels"][0], example["labels"][-1]) == (-100, -100)
        chosen = labels >= 0
        assert chosen.sum() == 30  # 15 % of 202, rounded
        np.testing.assert_array_equal(tokens[~chosen], text[~chosen])
        np.testing.assert_array_equal(labels[chosen], text[chosen])
        masked, stays = tokens[chosen] == MASK, tokens[chosen] == text[chosen]
        counts += [masked.sum(), stays.sum(), (~masked & ~stays).sum()]
        assert (tokens[chosen][~masked] >= WORDS_AT).all()  # a random token is no special one
    # A random one is the same in one of 100 cases. Four standard deviations.
    expected = np.array([0.8, 0.101, 0.099])
    assert (np.abs(counts / counts.sum() - expected) < 4 * (expected * (1 - expected) / counts.sum()) ** 0.5).all()


def test_special_tokens_are_never_chosen():
    text = np.array([SEP, 50, SEP, 1, 51, SEP, 0, MASK], np.int32)
    for place in range(20):
        labels = BERT.example(text, (0, place))["labels"]
        assert (labels >= 0).sum() == 1
        assert labels.max() in (50, 51)
    nothing = BERT.example(np.full(8, SEP, np.int32), (0,))
    assert (nothing["labels"] == -100).all()
    assert (nothing["tokens"][1:-1] == SEP).all()


@BOTH
def test_batches_resume_and_are_split_bit_by_bit(objective):
    def batches(objective=objective, **more):
        return TrainBatches(TEXT, batch_size=8, seq_len=16, seed=5, vocab_size=2000, objective=objective, **more)

    whole, resumed = batches(), batches()
    expected = [next(whole) for _ in range(3)]
    resumed.set_state({**whole.get_state(), "grain": {"next_index": 1}})
    split = batches(sharding=named_sharding(("batch", None), make_mesh(ParallelConfig(data=2))))
    for number, batch in enumerate(expected):
        assert batch["tokens"].shape == (8, 16)
        for other in [next(split)] + ([next(resumed)] if number else []):
            jax.tree.map(np.testing.assert_array_equal, batch, jax.device_get(other))
    another = batches(dataclasses.replace(objective, rate=0.3))
    with pytest.raises(ValueError, match=r"objective was .*rate=0.15.*, now .*rate=0.3"):
        another.set_state(whole.get_state())


def test_each_row_of_each_epoch_is_masked_anew():
    text = TEXT[:16]  # three windows of 14
    batches = TrainBatches(text, batch_size=3, seq_len=16, seed=0, vocab_size=105, objective=BERT)
    rows = [(row[1:-1] >= 0).tobytes() for _ in range(20) for row in next(batches)["labels"]]
    assert len(set(rows)) > 30  # of 91 pairs of places


@BOTH
def test_heldout_batches_are_the_same_for_every_size(objective):
    def rows(size):
        made = list(heldout_batches(TEXT, batch_size=size, num_batches=8 // size, seq_len=16, objective=objective))
        return {name: np.concatenate([batch[name] for batch in made]) for name in made[0]}

    jax.tree.map(np.testing.assert_array_equal, rows(2), rows(4))


@BOTH
def test_whole_batches_have_every_whole_window_once(objective):
    window = objective.window(16)
    text = TEXT[: 5 * window + window // 2]
    made = list(whole_batches(text, batch_size=2, seq_len=16, objective=objective))
    rows = {name: np.concatenate([batch[name] for batch in made]) for name in made[0]}
    assert [len(batch["tokens"]) for batch in made] == [2, 2, 2]
    assert (rows["labels"][5] == -100).all()
    for number in range(5):
        tokens, labels = rows["tokens"][number], rows["labels"][number]
        if objective is BERT:
            found = np.where(labels >= 0, labels, tokens)[1:-1].tolist()
        else:
            found = restored(tokens[:-1].tolist(), labels[:-1].tolist(), T5.sentinels)
        assert found == text[number * window : (number + 1) * window].tolist()


def test_a_text_shorter_than_a_window():
    with pytest.raises(ValueError, match="a text of 560 tokens has no window of seq_len 512: it needs at least 568"):
        TrainBatches(TEXT[:560], batch_size=1, seq_len=512, seed=0, objective=T5)


@pytest.mark.parametrize(("objective", "seq_len", "window"), [(BERT, 16, 14), (T5, 64, 70), (NextTokens(), 64, 65)])
def test_a_text_has_a_window_of_its_objective(objective, seq_len, window, tmp_path):
    """In the part that is held out, where it is loaded: BERT needs fewer tokens than ``seq_len``, T5 more."""
    options = {"seq_len": seq_len, "objective": objective, "heldout_fraction": 0.25}
    np.save(tmp_path / "enough.npy", TEXT[: 4 * window])
    assert len(load_text(tmp_path / "enough.npy", **options).heldout) == window
    np.save(tmp_path / "short.npy", TEXT[: 4 * window - 1])
    with pytest.raises(ValueError, match=f"has {4 * window - 1} tokens; .* needs at least {4 * window}"):
        load_text(tmp_path / "short.npy", **options)


class Multiples(Objective):
    """An objective of a user's own, with the default repr; its examples depend on ``times``."""

    def __init__(self, times):
        self.times = times

    def window(self, seq_len):
        return seq_len

    def lengths(self, seq_len):
        return {"tokens": seq_len, "labels": seq_len}

    def example(self, text, key):
        return {"tokens": text, "labels": text * self.times}


def test_an_own_objective_is_recognized_by_its_repr():
    class Named(Multiples):
        def __repr__(self):
            return f"Named({self.times})"

    options = {"batch_size": 2, "seq_len": 4, "seed": 0}
    with pytest.raises(ValueError, match="Make Multiples a dataclass, or define its __repr__"):
        TrainBatches(TEXT, objective=Multiples(2), **options)
    batches, resumed = (TrainBatches(TEXT, objective=Named(2), **options) for _ in range(2))
    next(batches)
    resumed.set_state(batches.get_state())
    np.testing.assert_array_equal(next(resumed)["labels"], next(batches)["labels"])
    with pytest.raises(ValueError, match=r"objective was Named\(2\), now Named\(3\)"):
        TrainBatches(TEXT, objective=Named(3), **options).set_state(batches.get_state())


class Kept(NextTokens):
    """The first labels alone."""

    def __init__(self, keep):
        self.keep = keep

    def __repr__(self):
        return f"Kept({self.keep!r})"

    def example(self, text, key):
        found = super().example(text, key)
        return found | {"labels": np.where(np.arange(len(text) - 1) < len(self.keep), found["labels"], -100)}


def test_an_objective_is_no_other_one():
    """Not the next token's either, nor that of a class derived from it, nor one with an array of other values."""
    many = np.arange(2000.0)
    given = [NextTokens(), MaskedTokens(mask=0, vocab_size=256), Kept(np.zeros(2)), Kept(np.zeros(3))]
    given += [Kept(many), Kept(np.where(many == 1000, 1e-12, many))]
    batches = [TrainBatches(TEXT, batch_size=2, seq_len=4, seed=0, objective=objective) for objective in given]
    for one, other in itertools.permutations(batches, 2):
        with pytest.raises(ValueError, match="objective was"):
            other.set_state(one.get_state())
    labels = next(whole_batches(TEXT, batch_size=1, seq_len=4, objective=Kept(np.zeros(2))))["labels"]
    assert labels[0, 2:].tolist() == [-100, -100]


def test_the_tokens_are_those_of_the_tokenizer(tmp_path):
    bert = MaskedTokens.of(Tokenizer(write_special_tokenizer(tmp_path / "b.json", before="[CLS]", after="[SEP]")))
    assert (bert.mask, bert.before, bert.after) == (MASKED.index("[MASK]"), (CLS,), (SEP,))
    assert (bert.special, bert.vocab_size) == ((0, 1, 2, 3, 4), 5 + len(WORDS))
    named = ("<s>", "</s>", "<unk>", "<mask>")
    roberta = Tokenizer(write_special_tokenizer(tmp_path / "r.json", named, before="<s>", after="</s>"))
    assert (MaskedTokens.of(roberta).mask, MaskedTokens.of(roberta).before, roberta.end_of_text) == (3, (0,), 1)
    t5 = CorruptedSpans.of(Tokenizer(write_special_tokenizer(tmp_path / "t.json", SPANS, after="</s>")))
    assert (t5.sentinels, t5.after, t5.start) == (tuple(range(12, 2, -1)), (1,), 0)


def test_sentinels_of_mt5_are_pieces_of_its_vocabulary(tmp_path):
    special, pieces = ("<pad>", "</s>", "<unk>"), ("\u2581<extra_id_1>", "\u2581<extra_id_0>")
    path = write_special_tokenizer(tmp_path / "m.json", special, after="</s>", pieces=pieces)
    mt5 = CorruptedSpans.of(Tokenizer(path))
    assert (mt5.sentinels, mt5.after) == ((4, 3), (1,))


def test_tokenizers_without_the_tokens_are_refused(tmp_path):
    plain = Tokenizer(write_tokenizer(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer.json has no mask token, \[MASK\] or <mask>"):
        MaskedTokens.of(plain)
    with pytest.raises(ValueError, match=r"tokenizer.json has no sentinels, <extra_id_0>"):
        CorruptedSpans.of(plain)


@pytest.mark.parametrize(
    ("objective", "seq_len", "message"),
    [
        (BERT, 2, "seq_len 2 leaves no token of text beside the 2 around it"),
        (T5, 2, "seq_len 2 has no place for a token, a sentinel and the 1 behind them"),
        (CorruptedSpans(sentinels=tuple(range(50)), rate=0.9, mean_span=1.0), 11, "no text leaves 11 tokens .*; take"),
        (CorruptedSpans(sentinels=(9,)), 64, "has 4 spans, and the tokenizer 1 sentinels; lower it"),
    ],
)
def test_lengths_that_an_objective_cannot_have(objective, seq_len, message):
    with pytest.raises(ValueError, match=message):
        objective.window(seq_len)


def test_next_tokens_are_the_default():
    given = {"batch_size": 2, "seq_len": 4, "seed": 0}
    plain, named = (next(TrainBatches(TEXT, **given, **more)) for more in ({}, {"objective": NextTokens()}))
    jax.tree.map(np.testing.assert_array_equal, plain, named)


@pytest.mark.parametrize("objective", [NextTokens(), BERT, T5], ids=lambda objective: type(objective).__name__)
@pytest.mark.parametrize("text", [np.zeros((2, 8), np.int32), np.zeros(8, np.float32), np.int32(3)])
def test_a_text_is_a_row_of_integers(objective, text):
    with pytest.raises(ValueError, match="text must be the tokens of one window"):
        objective.example(np.asarray(text), (0, 1))
