"""FP8 attention in NumPy, in fp64, one head at a time: the steps of cuDNN's graph, written from its documentation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def rounded(x: Any, scale: float, dtype: Any) -> np.ndarray:
    """Values of ``x`` in FP8 under a scale, as fp64 without the scale."""
    limit = LARGEST[dtype]
    return np.clip(np.asarray(x, np.float64) * scale, -limit, limit).astype(np.float32).astype(dtype).astype(np.float64)


def dequantized(x: Any, scale: float, dtype: Any) -> np.ndarray:
    return rounded(x, scale, dtype) / scale


def largest(x: Any) -> float:
    return float(np.max(np.abs(x)))


def centred(x: np.ndarray) -> np.ndarray:
    """Keys or values ``[b, skv, g, d]`` without their mean over the positions."""
    return x - mean_of(x)


def mean_of(x: np.ndarray) -> np.ndarray:
    """Mean over the positions, as a multiple of a 16th of the largest value, to a power of two, ``[b, 1, g, d]``."""
    largest = np.abs(x).max(axis=1, keepdims=True)
    power = 2.0 ** np.floor(np.log2(largest))
    grid = np.where(largest < 1.5 * power, power, 2.0 * power) / 16
    return np.round(x.mean(axis=1, keepdims=True) / grid) * grid


def of_amax(amax: float, dtype: Any, power_of_two: bool = False) -> float:
    """The scale that brings ``amax`` to the largest value of an FP8 dtype; 1 for 0."""
    if amax == 0.0:
        return 1.0
    scale = float(np.float32(LARGEST[dtype]) / np.float32(amax))
    return 2.0 ** np.floor(np.log2(scale)) if power_of_two else scale


def on_grid_of_values(scales: dict[str, float]) -> float:
    """The scale of the output: that of the values times a power of two, at most its own."""
    return scales["v"] * 2.0 ** np.floor(np.log2(scales["o"] / scales["v"]))


@dataclass
class Attention:
    """One call with its own scales: ``scales`` by the names of `jax_te.quantize.AttentionTensor`, and that of the
    softmax's numerators, which forward rounds in place of ``s``.

    Fewer queries than keys are the last ones of a causal call. After `forward` and `backward`, ``amaxes`` has the
    largest value of each tensor before it was quantized. ``backward_dtype`` is another dtype of the gradients, for
    comparison: jax_te has E4M3.
    """

    scales: dict[str, float]
    causal: bool
    scale: float
    backward_dtype: Any = E4M3
    amaxes: dict[str, float] = field(default_factory=dict)

    def q8(self, name: str, x: np.ndarray) -> np.ndarray:
        """``x`` as its FP8 values say, and its amax noted."""
        self.amaxes[name] = max(self.amaxes.get(name, 0.0), largest(x))
        dtype = self.backward_dtype if name in ("do", "dp", "dq", "dk", "dv") else E4M3
        return dequantized(x, self.scales[name], dtype)

    def probabilities(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Softmax of one head, ``[sq, skv]``."""
        weights = self.numerators(q, k)
        return weights / weights.sum(axis=1, keepdims=True)

    def numerators(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Softmax of one head before the division by each row's sum, ``[sq, skv]``; the largest of a row is 1."""
        scores = q @ k.T * self.scale
        if self.causal:
            earlier_keys = scores.shape[1] - scores.shape[0]
            scores = np.where(np.tril(np.ones(scores.shape, bool), earlier_keys), scores, -np.inf)
        return np.exp(scores - scores.max(axis=1, keepdims=True))

    def forward(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Output of ``q [b, sq, n, d]``, ``k [b, skv, g, d]``, ``v [b, skv, g, dv]``."""
        mean = np.repeat(mean_of(v), q.shape[2] // v.shape[2], axis=2)
        q, k, v = self.q8("q", q), self.q8("k", centred(k)), self.q8("v", centred(v))
        out = np.zeros((*q.shape[:3], v.shape[-1]))
        for b in range(q.shape[0]):
            for n in range(q.shape[2]):
                g = n // (q.shape[2] // k.shape[2])
                weights = self.numerators(q[b, :, n], k[b, :, g])
                sums = weights.sum(axis=1, keepdims=True)
                self.amaxes["s"] = max(self.amaxes.get("s", 0.0), largest(weights / sums))
                out[b, :, n] = dequantized(weights, self.scales["numerators"], E4M3) @ v[b, :, g] / sums
        return self.q8("o", out) + mean

    def backward(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, do: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Gradients; ``out`` is the result of `forward`."""
        out = out - np.repeat(mean_of(v), q.shape[2] // v.shape[2], axis=2)
        q, k, v, do = self.q8("q", q), self.q8("k", centred(k)), self.q8("v", centred(v)), self.q8("do", do)
        dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
        for b in range(q.shape[0]):
            for n in range(q.shape[2]):
                g = n // (q.shape[2] // k.shape[2])
                s = self.probabilities(q[b, :, n], k[b, :, g])
                dv[b, :, g] += self.q8("s", s).T @ do[b, :, n]
                mean = np.sum(out[b, :, n] * do[b, :, n], axis=1, keepdims=True)
                dp = self.q8("dp", s * (do[b, :, n] @ v[b, :, g].T - mean) * self.scale)
                dq[b, :, n] = dp @ k[b, :, g]
                dk[b, :, g] += dp.T @ q[b, :, n]
        return self.q8("dq", dq), self.q8("dk", dk), self.q8("dv", dv)


def exact(
    q: Any, k: Any, v: Any, do: Any, *, causal: bool, scale: float, read_out: Any = None
) -> tuple[np.ndarray, ...]:
    """Output and gradients in fp64, without quantization; ``read_out``: another output, which backward reads."""
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    plain = Attention({}, causal, scale)
    out, dq, dk, dv = np.zeros(do.shape), np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    for b in range(q.shape[0]):
        for n in range(q.shape[2]):
            g = n // (q.shape[2] // k.shape[2])
            s = plain.probabilities(q[b, :, n], k[b, :, g])
            out[b, :, n] = s @ v[b, :, g]
            dv[b, :, g] += s.T @ do[b, :, n]
            ds = do[b, :, n] @ v[b, :, g].T
            read = out[b, :, n] if read_out is None else np.asarray(read_out, np.float64)[b, :, n]
            dp = s * (ds - np.sum(read * do[b, :, n], axis=1, keepdims=True)) * scale
            dq[b, :, n] = dp @ k[b, :, g]
            dk[b, :, g] += dp.T @ q[b, :, n]
    return out, dq, dk, dv
