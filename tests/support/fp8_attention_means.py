"""What means of keys and values cost FP8 attention, with and without centring, in NumPy.

``python -m tests.support.fp8_attention_means`` prints the table of docs/attention_fp8_errors.md.
"""

from __future__ import annotations

import itertools

import numpy as np

from tests.support.fp8_attention import E4M3, dequantized, largest, mean_of, of_amax
from tests.support.numerics import relative_l2

D = 128
SCALE = D**-0.5


def rounded(x: np.ndarray) -> np.ndarray:
    """Values of ``x`` in E4M3 under the scale of its amax."""
    return dequantized(x, of_amax(largest(x), E4M3), E4M3).astype(np.float32)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and output of one causal head, ``[s, s]`` and ``[s, d]``."""
    scores = np.where(np.tril(np.ones((len(q), len(k)), bool)), (q @ k.T) * SCALE, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return weights, weights @ v


def query_gradient(k: np.ndarray, v: np.ndarray, s: np.ndarray, out: np.ndarray, do: np.ndarray) -> np.ndarray:
    """Gradient of the queries ``[s, d]``, of probabilities ``s`` and the output that is read for its mean."""
    return (s * (do @ v.T - np.sum(out * do, axis=1, keepdims=True)) * SCALE) @ k


def errors(length: int, mean_of_keys: float, mean_of_values: float, *, centre: bool) -> tuple[float, float]:
    """Relative L2 errors of the output and the queries' gradient at the last quarter of the positions.

    Queries, keys, values and the output, which backward reads, are rounded; probabilities and gradients are exact.
    """
    rng = np.random.default_rng(0)

    def drawn(mean: float) -> np.ndarray:
        return (rng.standard_normal((length, D)) + mean * rng.standard_normal(D)).astype(np.float32)

    q, k, v, do = drawn(0.5), drawn(mean_of_keys), drawn(mean_of_values), drawn(0.0)
    s, exact_out = attention(q, k, v)
    exact_gradient = query_gradient(k, v, s, exact_out, do)
    taken_k, taken_v = (mean_of(x[None, :, None])[0, 0, 0] if centre else np.zeros(D) for x in (k, v))
    q, k, v = rounded(q), rounded(k - taken_k), rounded(v - taken_v)
    s, out = attention(q, k, v)
    out = rounded(out)
    gradient = query_gradient(k, v, s, out, do)
    last = slice(-(length // 4), None)
    return relative_l2((out + taken_v)[last], exact_out[last]), relative_l2(gradient[last], exact_gradient[last])


def main() -> None:
    print("| length | means of keys, values | `out` | `out`, centred | `dq` | `dq`, centred |")
    print("|---|---|---|---|---|---|")
    for length, means in itertools.product((512, 4096), ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (2.0, 1.0))):
        plain, centred = (errors(length, *means, centre=centre) for centre in (False, True))
        cells = [f"{x:.3f}" for pair in zip(plain, centred, strict=True) for x in pair]
        print(f"| {length:,} | {means[0]:g}, {means[1]:g} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
