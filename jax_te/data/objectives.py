"""Training objectives: what a window of text becomes, for models of the next token, of masked tokens and of spans."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jax_te._validation import checked
from jax_te.data.tokenizer import Tokenizer

IGNORED = -100
"""Label that does not count."""

Example = dict[str, np.ndarray]
"""Row of a batch: int32 ``[n]`` by name, the labels among them."""

_MASKS = ("[MASK]", "<mask>")
"""Names of the mask token of BERT and RoBERTa; a ``tokenizer.json`` does not specify it."""

_SENTINELS = ("\u2581<extra_id_{}>", "<extra_id_{}>")
"""Names of the sentinels of mT5, which are pieces of its vocabulary, and of T5."""


class Objective(abc.ABC):
    """What a model is trained to predict: how many tokens of text an example takes, and what they become.

    The state of `TrainBatches` has the ``repr`` of its objective, by which a resume sees whether it is the same one. A
    class of your own needs one that says what its examples depend on: make it a frozen dataclass, or define
    ``__repr__``.
    """

    @abc.abstractmethod
    def window(self, seq_len: int) -> int:
        """Return the number of tokens of text from which an example of ``seq_len`` tokens is made.

        Raises:
            ValueError: for a length that the objective cannot have.
        """

    @abc.abstractmethod
    def lengths(self, seq_len: int) -> dict[str, int]:
        """Return the length of each array of an example; the first one's is ``seq_len``. Raises like `window`."""

    @abc.abstractmethod
    def example(self, text: np.ndarray, key: tuple[int, ...]) -> Example:
        """Return the example of a window.

        Args:
            text: tokens, int32 ``[window]``.
            key: integers >= 0 that determine everything random in the example.

        Raises:
            ValueError: for a text that is no row of integers.
        """


def _check_text(text: np.ndarray) -> None:
    """Raise ValueError for anything but a row of integers."""
    if text.ndim != 1 or not np.issubdtype(text.dtype, np.integer):
        raise ValueError(
            f"text must be the tokens of one window, integers [window], got {text.dtype} of shape {text.shape}; make "
            "an example of each row"
        )


@checked
@dataclass(frozen=True)
class NextTokens(Objective):
    """The next token at every position, for decoders: ``{"tokens": [s], "labels": [s]}`` of ``s + 1`` tokens of text.

    >>> NextTokens().example(np.arange(4, dtype=np.int32), (0,))["labels"].tolist()
    [1, 2, 3]
    """

    def window(self, seq_len: int) -> int:
        """Return ``seq_len + 1``: a token more, for the last label."""
        return seq_len + 1

    def lengths(self, seq_len: int) -> dict[str, int]:
        """Return the length of tokens and labels."""
        return {"tokens": seq_len, "labels": seq_len}

    def example(self, text: np.ndarray, key: tuple[int, ...]) -> Example:
        """Return tokens and their successors; nothing is random."""
        del key
        _check_text(text)
        return {"tokens": text[:-1], "labels": text[1:]}


NEXT_TOKENS = NextTokens()
"""The objective of batches for which none is given."""


@checked
@dataclass(frozen=True, kw_only=True)
class MaskedTokens(Objective):
    """Some tokens, of which most are masked, for BERT and RoBERTa: ``{"tokens": [s], "labels": [s]}``.

    Of the tokens of a window, ``rate`` are chosen, rounded, at least one. Of these 80 % become the mask token, 10 % a
    random one, and 10 % stay; their labels are what they were, and all others are -100. Each example has the same
    number of labels, except where a window has fewer tokens than that which may be chosen, because the others are
    special: then it has a label for each of these, and none if there are none. The mean loss of a batch is that of its
    microbatches weighted by their labels, see `jax_te.training.WeightedMean`.

    Args:
        mask: mask token.
        vocab_size: random tokens are below it.
        special: tokens that are never chosen, and never random ones, such as the mask token and padding.
        before, after: tokens around the text of every example, such as ``[CLS]`` and ``[SEP]``; never chosen either.
        rate: part of the tokens that is chosen, in (0, 1).

    Raises:
        ValueError: for a rate out of range, negative tokens, and a vocabulary of special tokens alone.

    Source: Devlin et al. 2019, "BERT", section 3.1 and appendix A.1.

    >>> objective = MaskedTokens(mask=1, vocab_size=100, special=(0, 1), before=(2,), after=(3,))
    >>> example = objective.example(np.arange(10, 24, dtype=np.int32), (0,))
    >>> len(example["tokens"]), int((example["labels"] >= 0).sum())  # 15 % of 14 tokens
    (16, 2)
    """

    mask: int
    vocab_size: int
    special: tuple[int, ...] = ()
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    rate: float = 0.15

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        _check_tokens(mask=(self.mask,), special=self.special, before=self.before, after=self.after)
        if not 1 <= self.vocab_size < 2**31:
            raise ValueError(f"vocab_size must be in [1, 2^31), got {self.vocab_size}")
        if len(self._never) == self.vocab_size:
            raise ValueError(
                f"vocab_size {self.vocab_size} has no tokens but the special ones, and none could be drawn"
            )

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> MaskedTokens:
        """Return the objective with the mask token, the special tokens and the template of a tokenizer.

        Raises:
            ValueError: for a tokenizer without a mask token.
        """
        mask = tokenizer.find(*_MASKS)
        if mask is None:
            raise ValueError(
                f"{tokenizer.path} has no mask token, {' or '.join(_MASKS)}, and masked tokens could not be trained; "
                "give the tokenizer of a masked language model"
            )
        before, after = tokenizer.template(mask)
        special = tuple(sorted({mask, *tokenizer.special, *before, *after}))
        return cls(mask=mask, vocab_size=tokenizer.vocab_size, special=special, before=before, after=after)

    @functools.cached_property
    def _never(self) -> np.ndarray:
        """The special tokens of the vocabulary, in order."""
        return np.array(sorted({token for token in self.special if token < self.vocab_size}), np.int32)

    def _is_special(self, tokens: np.ndarray) -> np.ndarray:
        if not self._never.size:
            return np.zeros(tokens.shape, bool)
        places = np.minimum(np.searchsorted(self._never, tokens), len(self._never) - 1)
        return self._never[places] == tokens

    def _ordinary(self, uniform: np.ndarray) -> np.ndarray:
        """Return the tokens, none of them special, that numbers in [0, 1) stand for."""
        numbers = (uniform * (self.vocab_size - len(self._never))).astype(np.int32)
        # Of the tokens that are not special, as many are in front of each special one.
        in_front = self._never - np.arange(len(self._never), dtype=np.int32)
        return numbers + np.searchsorted(in_front, numbers, side="right").astype(np.int32)

    def window(self, seq_len: int) -> int:
        """Return ``seq_len`` without the tokens around the text."""
        around = len(self.before) + len(self.after)
        if seq_len <= around:
            raise ValueError(f"seq_len {seq_len} leaves no token of text beside the {around} around it; raise it")
        return seq_len - around

    def lengths(self, seq_len: int) -> dict[str, int]:
        """Return the length of tokens and labels."""
        self.window(seq_len)
        return {"tokens": seq_len, "labels": seq_len}

    def example(self, text: np.ndarray, key: tuple[int, ...]) -> Example:
        """Return tokens, some of them masked, and labels."""
        _check_text(text)
        order, kind, drawn = np.random.default_rng(key).random((3, len(text)))
        may_be_chosen = ~self._is_special(text)
        count = min(max(1, round(self.rate * len(text))), int(may_be_chosen.sum()))
        chosen = np.argsort(np.where(may_be_chosen, order, 1.0), kind="stable")[:count]
        kind, drawn, original = kind[chosen], drawn[chosen], text[chosen]
        random = self._ordinary(drawn)
        tokens, labels = text.copy(), np.full_like(text, IGNORED)
        tokens[chosen] = np.where(kind < 0.8, self.mask, np.where(kind < 0.9, random, original))
        labels[chosen] = original
        before, after = (np.array(around, np.int32) for around in (self.before, self.after))
        none = [np.full_like(around, IGNORED) for around in (before, after)]
        return {
            "tokens": np.concatenate([before, tokens, after]),
            "labels": np.concatenate([none[0], labels, none[1]]),
        }


@checked
@dataclass(frozen=True, kw_only=True)
class CorruptedSpans(Objective):
    """Spans of tokens that a sentinel stands for, for T5 and mT5.

    An example is ``{"tokens": [s], "decoder_tokens": [t], "labels": [t]}``. ``rate`` of a window's tokens are removed,
    in spans whose mean length is ``mean_span``. ``tokens`` are the others, with a sentinel in place of each span;
    ``labels`` are each sentinel, in the same order, and its span; ``decoder_tokens`` are the labels, one place to the
    right behind ``start``. A window begins with a token that stays and ends with a span. Numbers and lengths of spans
    follow from the window's length alone, so that an example is full: windows are as long as ``s`` allows, longer than
    ``s``, and ``t`` is what they leave.

    Args:
        sentinels: sentinels in the order of their use, ``<extra_id_0>`` first.
        after: tokens behind both sequences, such as ``</s>``.
        start: first of ``decoder_tokens``.
        rate: part of the tokens that is removed, in (0, 1).
        mean_span: mean length of a span, >= 1.

    Raises:
        ValueError: for a rate or a mean out of range, and negative tokens; from `window`, for a length that needs more
            sentinels than there are, or has no place for a span.

    Source: Raffel et al. 2020, "T5", section 3.1.4; ``random_spans_noise_mask`` of its data pipeline.

    >>> objective = CorruptedSpans(sentinels=(99, 98), after=(1,))
    >>> objective.window(12), objective.lengths(12)
    (12, {'tokens': 12, 'decoder_tokens': 4, 'labels': 4})
    >>> example = objective.example(np.arange(10, 22, dtype=np.int32), (0,))
    >>> example["tokens"].tolist(), example["labels"].tolist()
    ([10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 99, 1], [99, 20, 21, 1])
    """

    sentinels: tuple[int, ...]
    after: tuple[int, ...] = ()
    start: int = 0
    rate: float = 0.15
    mean_span: float = 3.0

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        if not 1.0 <= self.mean_span < float("inf"):
            raise ValueError(f"mean_span must be at least 1, got {self.mean_span}")
        if not self.sentinels:
            raise ValueError("sentinels is empty, and each span needs one")
        _check_tokens(sentinels=self.sentinels, after=self.after, start=(self.start,))

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, start: int = 0) -> CorruptedSpans:
        """Return the objective with the sentinels of a tokenizer, and the tokens that its template puts behind a text.

        Raises:
            ValueError: for a tokenizer without sentinels.
        """
        sentinels: list[int] = []
        while (token := tokenizer.find(*(name.format(len(sentinels)) for name in _SENTINELS))) is not None:
            sentinels.append(token)
        if not sentinels:
            raise ValueError(
                f"{tokenizer.path} has no sentinels, <extra_id_0> and so on, to stand for spans; give the tokenizer "
                "of a T5"
            )
        # T5 has no token in front of a text.
        return cls(sentinels=tuple(sentinels), after=tokenizer.template(sentinels[0])[1], start=start)

    def window(self, seq_len: int) -> int:
        """Return the length of the longest text that leaves ``seq_len`` tokens for the encoder."""
        return _longest_window(self, seq_len)

    def lengths(self, seq_len: int) -> dict[str, int]:
        """Return the lengths of the encoder's and the decoder's sequences."""
        removed, spans = self._counts(self.window(seq_len))
        targets = removed + spans + len(self.after)
        return {"tokens": seq_len, "decoder_tokens": targets, "labels": targets}

    def _counts(self, window: int) -> tuple[int, int]:
        """Return the number of tokens that are removed from a window, and of their spans."""
        removed = min(max(round(window * self.rate), 1), window - 1)
        return removed, max(min(round(removed / self.mean_span), removed, window - removed), 1)

    def _kept(self, window: int) -> int:
        """Return the length of the encoder's sequence."""
        removed, spans = self._counts(window)
        return window - removed + spans + len(self.after)

    def example(self, text: np.ndarray, key: tuple[int, ...]) -> Example:
        """Return the tokens of encoder and decoder, and labels."""
        _check_text(text)
        rng = np.random.default_rng(key)
        removed, spans = self._counts(len(text))
        # Stretches that stay and spans that are removed take turns; each has at least one token.
        stays = _random_lengths(len(text) - removed, spans, rng.random)
        goes = _random_lengths(removed, spans, rng.random)
        sentinels, after = np.array(self.sentinels[:spans], np.int32), np.array(self.after, np.int32)
        starts = np.cumsum(stays) + np.cumsum(goes) - goes
        is_removed = np.repeat(np.tile([False, True], spans), np.stack([stays, goes], axis=1).ravel())
        # A sentinel takes the place of each span's first token, and stands in front of the span in the labels.
        marked, stays_or_marked = text.copy(), ~is_removed
        marked[starts], stays_or_marked[starts] = sentinels, True
        labels = np.empty(removed + spans + len(after), np.int32)
        is_token = np.ones(removed + spans, bool)
        is_token[np.cumsum(goes) - goes + np.arange(spans)] = False
        of_spans = labels[: removed + spans]
        of_spans[is_token], of_spans[~is_token] = text[is_removed], sentinels
        labels[removed + spans :] = after
        shifted = np.concatenate([np.array([self.start], np.int32), labels[:-1]])
        inputs = np.concatenate([marked[stays_or_marked], after])
        return {"tokens": inputs, "decoder_tokens": shifted, "labels": labels}


@functools.lru_cache(maxsize=16)
def _longest_window(objective: CorruptedSpans, seq_len: int) -> int:
    # A longer window leaves as many tokens or more: there are never more spans than tokens that they replace.
    shorter, longer = 1, 2
    while objective._kept(longer) <= seq_len:
        shorter, longer = longer, 2 * longer
    while longer - shorter > 1:
        middle = (shorter + longer) // 2
        if objective._kept(middle) <= seq_len:
            shorter = middle
        else:
            longer = middle
    window = shorter
    if window < 2:
        raise ValueError(
            f"seq_len {seq_len} has no place for a token, a sentinel and the {len(objective.after)} behind them; raise "
            "it"
        )
    if objective._kept(window) < seq_len:  # at rates beyond a half, where a token more may bring a span more
        raise ValueError(
            f"no text leaves {seq_len} tokens (seq_len) at rate {objective.rate:g} and mean_span "
            f"{objective.mean_span:g}; take seq_len {objective._kept(window)}"
        )
    spans = objective._counts(window)[1]
    if spans > len(objective.sentinels):
        raise ValueError(
            f"seq_len {seq_len} has {spans} spans, and the tokenizer {len(objective.sentinels)} sentinels; lower it"
        )
    return window


def _random_lengths(total: int, parts: int, uniform: Callable[[int], np.ndarray]) -> np.ndarray:
    """Return ``parts`` lengths of at least 1 whose sum is ``total``; each division is as likely."""
    # The places of the ends of all parts but the last.
    ends = np.sort(np.argsort(uniform(total - 1), kind="stable")[: parts - 1]) + 1
    return np.diff(ends, prepend=0, append=total)


def _check_rate(rate: float) -> None:
    if not 0.0 < rate < 1.0:
        raise ValueError(f"rate must be in (0, 1), got {rate}")


def _check_tokens(**tokens: tuple[int, ...]) -> None:
    for name, values in tokens.items():
        if any(not 0 <= value < 2**31 for value in values):
            raise ValueError(f"{name} must be tokens, in [0, 2^31), got {values}")
