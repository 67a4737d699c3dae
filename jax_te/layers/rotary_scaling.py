"""Rotary embedding over contexts longer than a model was first trained on: which wavelengths are stretched, how far."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from jax_te.config.internal import check_positive


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation: every position is divided by ``factor``.

    Args:
        factor: >= 1.

    Source: Chen et al. 2023, "Extending context window of large language models via positional interpolation";
    Megatron-Core's ``seq_len_interpolation_factor``.

    >>> LinearScaling(factor=4.0).stretch(np.array([1.0, 0.5]), 10000.0).tolist()
    [0.25, 0.125]
    """

    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)

    @property
    def amplitude(self) -> float:
        """Factor of the cosines and sines."""
        return 1.0

    def stretch(self, frequency: np.ndarray, base: float) -> np.ndarray:
        """The frequencies ``[d/2]`` to use in place of ``frequency``."""
        del base
        return frequency / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Long wavelengths are stretched by ``factor``, short ones are kept, those between are stretched in part.

    Args:
        factor: >= 1.
        low_freq_factor: a wavelength that fits less often than this into the original context is long.
        high_freq_factor: one that fits more often than this is short.
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

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        check_positive(original_max_position_embeddings=self.original_max_position_embeddings)
        if not 0.0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor must be > 0 and below high_freq_factor, got {self.low_freq_factor!r} and "
                f"{self.high_freq_factor!r}"
            )

    @property
    def amplitude(self) -> float:
        """Factor of the cosines and sines."""
        return 1.0

    def stretch(self, frequency: np.ndarray, base: float) -> np.ndarray:
        """The frequencies ``[d/2]`` to use in place of ``frequency``."""
        del base
        turns = self.original_max_position_embeddings * frequency / (2.0 * math.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return kept * frequency + (1.0 - kept) * frequency / self.factor


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN: as `Llama3Scaling` with a ramp over the index of the frequency; attention gets sharper with the factor.

    Args:
        factor: >= 1.
        original_max_position_embeddings: length of the original context.
        beta_fast: a frequency that turns more often than this over the original context is kept.
        beta_slow: one that turns less often than this is divided by ``factor``.
        mscale, mscale_all_dim: cosines and sines are multiplied by ``m(mscale) / m(mscale_all_dim)`` with
            ``m(t) = 0.1 t ln(factor) + 1``. The defaults give the paper's ``0.1 ln(factor) + 1``.
        attention_factor: what cosines and sines are multiplied by, in place of that. None: that.
        round_range: round the ends of the ramp outward to whole indices, as in the paper's code.

    Raises:
        ValueError: for a factor below 1, or unless ``0 < beta_slow < beta_fast``; when used, for a base of 1 or less.

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
        _check_factor(self.factor)
        check_positive(original_max_position_embeddings=self.original_max_position_embeddings)
        if not 0.0 < self.beta_slow < self.beta_fast:
            raise ValueError(
                f"beta_slow must be > 0 and below beta_fast, got {self.beta_slow!r} and {self.beta_fast!r}"
            )

    @property
    def amplitude(self) -> float:
        """Factor of the cosines and sines; scores get its square."""
        if self.attention_factor is not None:
            return self.attention_factor
        over, under = (0.1 * scale * math.log(self.factor) + 1.0 for scale in (self.mscale, self.mscale_all_dim))
        return over / under

    def stretch(self, frequency: np.ndarray, base: float) -> np.ndarray:
        """The frequencies ``[d/2]``, a geometric series down from 1, to use in place of ``frequency``."""
        if not base > 1.0:
            raise ValueError(f"YaRN needs a rotary base > 1, got {base!r}")
        half = len(frequency)
        first, last = self._index(self.beta_fast, half, base), self._index(self.beta_slow, half, base)
        if self.round_range:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        stretched = np.clip((np.arange(half) - first) / max(last - first, 1e-3), 0.0, 1.0)
        return (1.0 - stretched) * frequency + stretched * frequency / self.factor

    def _index(self, turns: float, half: int, base: float) -> float:
        """Index, between whole ones, of the frequency that turns so often over the original context."""
        return half * math.log(self.original_max_position_embeddings / (2.0 * math.pi * turns)) / math.log(base)


RotaryScaling = LinearScaling | Llama3Scaling | YarnScaling
"""What `rotary_embedding` takes as ``scaling``."""


def _check_factor(factor: float) -> None:
    if not factor >= 1.0:
        raise ValueError(f"factor must be >= 1, got {factor!r}")
