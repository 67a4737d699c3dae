"""Objectives beside transformers: the tokens of its tokenizers, and its models' losses of the same examples."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
_REASON = "compares with transformers: pip install -e '.[parity]'"
torch = pytest.importorskip("torch", reason=_REASON)
transformers = pytest.importorskip("transformers", reason=_REASON)

from jax_te.data import CorruptedSpans, MaskedTokens, Tokenizer, TrainBatches  # noqa: E402
from jax_te.interop.huggingface import load_huggingface, save_huggingface  # noqa: E402
from tests.support.families import VOCAB, family_model  # noqa: E402

WORDS = ("the", "cat", "sat")
BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS)
ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", *WORDS, "<mask>")
T5 = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"\u2581{word}", -2.0) for word in WORDS)]


def numbered(words: tuple[str, ...]) -> dict[str, int]:
    return {word: number for number, word in enumerate(words)}


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("BertTokenizerFast", {"vocab": numbered(BERT)}),
        ("RobertaTokenizerFast", {"vocab": numbered(ROBERTA), "merges": []}),
    ],
)
def test_the_tokens_of_a_masked_models_tokenizer(name, given, tmp_path):
    theirs = getattr(transformers, name)(**given)
    theirs.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    ours = MaskedTokens.of(tokenizer)
    assert ours.mask == theirs.mask_token_id
    assert [*ours.before, *ours.after] == theirs("").input_ids == [theirs.cls_token_id, theirs.sep_token_id]
    assert {*ours.special} == {*theirs.all_special_ids}
    assert tokenizer.end_of_text == theirs.sep_token_id
    assert ours.vocab_size == len(theirs)


def test_the_tokens_of_t5s_tokenizer(tmp_path):
    theirs = transformers.T5TokenizerFast(vocab=T5, extra_ids=4)
    theirs.save_pretrained(tmp_path)
    ours = CorruptedSpans.of(Tokenizer(tmp_path))
    assert list(ours.sentinels) == theirs.convert_tokens_to_ids([f"<extra_id_{number}>" for number in range(4)])
    assert list(ours.after) == theirs("").input_ids == [theirs.eos_token_id]


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("BertForMaskedLM", MaskedTokens(mask=4, vocab_size=VOCAB, special=(0, 2, 3, 4), before=(2,), after=(3,))),
        ("RobertaForMaskedLM", MaskedTokens(mask=4, vocab_size=VOCAB, special=(0, 1, 2, 4), before=(0,), after=(2,))),
        ("T5ForConditionalGeneration", CorruptedSpans(sentinels=(95, 94, 93), after=(1,))),
        ("MT5ForConditionalGeneration", CorruptedSpans(sentinels=(95, 94, 93), after=(1,))),
    ],
)
def test_losses_are_those_of_transformers(name, objective, tmp_path):
    save_huggingface(family_model(name), tmp_path, architecture=name)
    ours, theirs = load_huggingface(tmp_path), getattr(transformers, name).from_pretrained(tmp_path).eval()
    text = np.random.default_rng(0).integers(5, 90, 400).astype(np.uint8)
    batch = next(TrainBatches(text, batch_size=3, seq_len=32, seed=0, vocab_size=VOCAB, objective=objective))
    tokens, labels = (torch.tensor(batch[name], dtype=torch.int64) for name in ("tokens", "labels"))
    theirs.config.decoder_start_token_id = theirs.config.pad_token_id = 0
    with torch.no_grad():
        expected = theirs(input_ids=tokens, labels=labels).loss.item()
    given: dict[str, Any] = jax.device_put(batch)
    decoder = [given["decoder_tokens"]] if "decoder_tokens" in given else []
    # fp32: sums of a thousand products in another order.
    assert float(ours.loss(given["tokens"], *decoder, given["labels"])) == pytest.approx(expected, rel=1e-5)
