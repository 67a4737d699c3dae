"""Cost of E4M3 gradients in FP8 attention: their errors against fp64, beside those of E5M2 gradients.

``python -m tests.support.fp8_attention_errors`` prints the table of docs/attention_fp8_errors.md, in NumPy,
in some minutes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.fp8_attention import E4M3, E5M2, Attention, exact, of_amax, on_grid_of_values
from tests.support.numerics import relative_l2

D, SCALE = 128, 128**-0.5
ROWS = 256
"""Positions at either end of a sequence that are computed."""

LENGTHS = {
    "normal": (2048, 32768, 131072),
    "outliers": (2048, 32768),
    "peaked": (2048, 32768),
    "small": (2048, 32768),
    "tiny": (2048, 32768),
}

ROLES = (("q", "k", "v"), ("s",), ("o",), ("do",), ("dp",), ("dq", "dk", "dv"))
"""Tensors that share a scale under delayed scaling."""

Operands = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def drawn(inputs: str, length: int) -> Operands:
    """Queries, keys, values and the output's gradient of one head, ``[1, length, 1, 128]``."""
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((1, length, 1, D), np.float32).astype(np.float64) for _ in range(4))
    if inputs == "outliers":  # one feature of queries and keys, eight times as large
        q[..., 3] *= 8.0
        k[..., 3] *= 8.0
    if inputs == "peaked":  # scores of standard deviation 4
        q *= 4.0
    # Gradients of the last positions, beside those of the others.
    do[:, -ROWS:] *= {"small": 2.0**-6, "tiny": 2.0**-12}.get(inputs, 1.0)
    return q, k, v, do


def ends(operands: Operands) -> tuple[Operands, Operands]:
    """The call of the first positions, and that of the last queries to all keys."""
    q, k, v, do = operands
    return (q[:, :ROWS], k[:, :ROWS], v[:, :ROWS], do[:, :ROWS]), (q[:, -ROWS:], k, v, do[:, -ROWS:])


def quantized(call: Operands, scales: dict[str, float], dtype: Any) -> tuple[list[np.ndarray], dict[str, float]]:
    """Gradients of queries, keys and values, and the largest values of the tensors."""
    q, k, v, do = call
    attention = Attention(scales, True, SCALE, dtype)
    out = attention.forward(q, k, v)
    return list(attention.backward(q, k, v, out, do)), attention.amaxes


def scales_of(calls: tuple[Operands, ...], dtype: Any) -> dict[str, float]:
    """Scales of delayed scaling after steps on the same operands: of the largest values that the calls have."""
    scales = dict.fromkeys((name for role in ROLES for name in role), 1.0) | {"numerators": of_amax(1.0, E4M3)}
    for _ in range(2):  # the largest gradients are already found under scales of 1
        amaxes = [quantized(call, scales, dtype)[1] for call in calls]
        for role in ROLES:
            of_gradient = role[0] in ("do", "dp", "dq")
            amax = max(amaxes[i][name] for i in range(len(calls)) for name in role)
            scales |= dict.fromkeys(role, of_amax(amax, dtype if of_gradient else E4M3))
        scales["o"] = on_grid_of_values(scales)
    return scales


def errors(inputs: str, length: int, dtype: Any) -> list[float]:
    """Relative L2 errors of the gradients of queries, keys and values at the last positions."""
    calls = ends(drawn(inputs, length))
    last = calls[1]
    gradients, _ = quantized(last, scales_of(calls, dtype), dtype)
    wanted = exact(*last, causal=True, scale=SCALE)[1:]
    # Gradients of the call's earlier keys are sums over queries of other blocks, too.
    return [relative_l2(a[:, -ROWS:], b[:, -ROWS:]) for a, b in zip(gradients, wanted, strict=True)]


def main() -> None:
    print("| inputs | length | dq | dk | dv |")
    print("|---|---|---|---|---|")
    for inputs, lengths in LENGTHS.items():
        for length in lengths:
            pairs = zip(errors(inputs, length, E4M3), errors(inputs, length, E5M2), strict=True)
            print(f"| {inputs} | {length:,} |", " | ".join(f"{a:.3f}, {b:.3f}" for a, b in pairs), "|", flush=True)


if __name__ == "__main__":
    main()
