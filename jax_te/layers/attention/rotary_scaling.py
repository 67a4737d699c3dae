"""Scaling of rotary frequencies, for contexts longer than the original training context."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jax_te._validation import check_annotations, check_positive, checked


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation, which divides every position by ``factor``.

    Args:
        factor: ratio of the new context to the original one, >= 1.

    Raises:
        ValueError: for a factor below 1.

    Source: Chen et al. 2023, "Extending context window of large language models via positional interpolation";
    Megatron-Core's ``seq_len_interpolation_factor``.

    >>> LinearScaling(factor=4.0).stretch(np.array([1.0, 0.5]), 10000.0).tolist()
    [0.25, 0.125]
    """

    factor: float
    amplitude: ClassVar[float] = 1.0  # factor of the cosines and sines

    def __post_init__(self) -> None:
        _check_fields(self)

    @checked
    def stretch(self, frequency: np.ndarray, base: float) -> np.ndarray:
        """Return the scaled form of ``frequency [d/2]``."""
        del base
        return frequency / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3's scaling, which multiplies long wavelengths by ``factor`` and keeps short ones.

    Wavelengths between the two limits are interpolated.

    Args:
        factor: ratio of the new context to the original one, >= 1.
        low_freq_factor: number of wavelengths in the original context below which a wavelength is long.
        high_freq_factor: number of wavelengths in the original context above which a wavelength is short.
        original_max_position_embeddings: length of the original context.

    Raises:
        ValueError: for a factor below 1, or unless ``0 < low_freq_factor < high_freq_factor``.

    Source: Llama 3.1; ``megatron.core.models.common.embeddings.RotaryEmbedding`` with ``rope_scaling``.

    >>> Llama3Scaling(factor=8.0).stretch(np.array([1.0, 1e-6]), 5e5).tolist()
    [1.0, 1.25e-07]
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    amplitude: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        _check_fields(self)
        check_positive(original_max_position_embeddings=self.original_max_position_embeddings)
        if not 0.0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor must be > 0 and below high_freq_factor, got {self.low_freq_factor!r} and "
                f"{self.high_freq_factor!r}"
            )

    @checked
    def stretch(self, frequency: np.ndarray, base: float) -> np.ndarray:
        """Return the scaled form of ``frequency [d/2]``."""
        del base
        # The ramp is linear in the number of turns over the original context, the reciprocal of the wavelength.
        turns = self.original_max_position_embeddings * frequency / (2.0 * math.pi)
        unscaled = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return unscaled * frequency + (1.0 - unscaled) * frequency / self.factor


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN's scaling: `Llama3Scaling` with a ramp over the index of the frequency, and sharper attention.

    Args:
        factor: ratio of the new context to the original one, >= 1.
        original_max_position_embeddings: length of the original context.
        beta_fast: number of turns over the original context above which a frequency is kept.
        beta_slow: number of turns below which a frequency is divided by ``factor``.
        mscale, mscale_all_dim: coefficients of the factor ``m(mscale) / m(mscale_all_dim)`` of cosines and sines, with
            ``m(t) = 0.1 t ln(factor) + 1``. The defaults give the paper's ``0.1 ln(factor) + 1``.
        attention_factor: factor of cosines and sines that replaces this ratio. None: use the ratio.
        round_range: whether to round the ends of the ramp outward to whole indices, as in the paper's code.

    Raises:
        ValueError: for a factor below 1, or unless ``0 < beta_slow <= beta_fast``; when used, for a base of 1 or less.

    Source: Peng et al. 2023, "YaRN: efficient context window extension of large language models";
    ``megatron.core.models.common.embeddings.YarnRotaryEmbedding``.

    >>> round(YarnScaling(factor=40.0).amplitude, 4)
    1.3689
    """

    factor: float
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    round_range: bool = True

    def __post_init__(self) -> None:
        _check_fields(self)
        check_positive(original_max_position_embeddings=self.original_max_position_embeddings)
        if not 0.0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                f"beta_slow must be > 0 and at most beta_fast, got {self.beta_slow!r} and {self.beta_fast!r}"
            )

    @property
    def amplitude(self) -> float:
        """Factor of the cosines and sines. Scores are multiplied by its square."""
        if self.attention_factor is not None:
            return self.attention_factor
        over, under = (0.1 * scale * math.log(self.factor) + 1.0 for scale in (self.mscale, self.mscale_all_dim))
        return over / under

    @property
    def score_factor(self) -> float:
        """Factor ``m(mscale_all_dim)**2`` of multi-latent attention's ``softmax_scale``, as in DeepSeek's models."""
        return (0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0) ** 2

    @checked
    def stretch(self, frequency: np.ndarray, base: float) -> np.ndarray:
        """Return the scaled form of ``frequency [d/2]``, a geometric series that begins with 1."""
        # With base 1 all frequencies are equal, and the ramp over their index has no meaning.
        if not base > 1.0:
            raise ValueError(f"YaRN needs a rotary base > 1, got {base!r}")
        half = len(frequency)
        first, last = self._index(self.beta_fast, half, base), self._index(self.beta_slow, half, base)
        if self.round_range:
            first, last = math.floor(first), math.ceil(last)
        # The bound is the head size and not the number of frequencies, as in the paper's code and Megatron-Core.
        first, last = max(first, 0), min(last, 2 * half - 1)
        # A ramp of length 0, for small heads, would divide by zero. One of negative length falls, as in Megatron-Core
        # and transformers: with first behind the bound it divides all frequencies, with last before 0 it divides none.
        length = 1e-3 if first == last else last - first
        stretched = np.clip((np.arange(half) - first) / length, 0.0, 1.0)
        return (1.0 - stretched) * frequency + stretched * frequency / self.factor

    def _index(self, turns: float, half: int, base: float) -> float:
        """Return the (fractional) index of the frequency that turns ``turns`` times over the original context."""
        # Solved for i: context * base**(-i / half) / (2 pi) = turns.
        return half * math.log(self.original_max_position_embeddings / (2.0 * math.pi * turns)) / math.log(base)


RotaryScaling = LinearScaling | Llama3Scaling | YarnScaling
"""Types of the argument ``scaling`` of `rotary_embedding`."""


def _check_fields(scaling: LinearScaling | Llama3Scaling | YarnScaling) -> None:
    """Raise ValueError for a factor below 1, and ValueError or TypeError for a field of another kind."""
    check_annotations(scaling, type(scaling))
    if not scaling.factor >= 1.0:
        raise ValueError(f"factor must be >= 1, got {scaling.factor!r}")
