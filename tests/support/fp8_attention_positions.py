"""Errors of FP8 attention against fp64 by position, beside those of bf16 attention, at up to 32,768 positions.

``python -m tests.support.fp8_attention_positions 2048 8192 32768`` prints the table of docs/attention_fp8_errors.md.

Each is computed a chunk of queries at a time, in NumPy. The steps of FP8 are those of `jax_te.ops.xla.attention_fp8`,
with which tests/ops/attention/test_fp8_positions.py compares them, under delayed scaling in a steady state: each scale
is that of the largest value that the same operands have given in the step before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from tests.support.fp8_attention import E4M3, largest, mean_of, of_amax, on_grid_of_values
from tests.support.numerics import relative_l2

D, SCALE, CHUNK = 128, 128**-0.5, 512
ROWS = 256
"""Positions at either end of a sequence whose errors are given."""

INPUTS = ("normal", "peaked", "outliers")
RESULTS = ("out", "dq", "dk", "dv")
ROLES = {
    "qkv": ("q", "k", "v"),
    "s": ("s",),
    "o": ("o",),
    "do": ("do",),
    "dp": ("dp",),
    "dqkv": ("dq", "dk", "dv"),
}
"""Tensors that share a scale under delayed scaling."""

Operands = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Rounding = Callable[[str, np.ndarray], np.ndarray]
"""Values of a tensor, by its name in `jax_te.quantize.AttentionTensor`, as they are read by what comes next."""


def drawn(inputs: str, length: int) -> Operands:
    """Queries, keys, values and the output's gradient of one head ``[length, 128]``: bf16 values, in fp32."""
    rng = np.random.default_rng(0)
    q, k, v, do = (rng.standard_normal((length, D), np.float32) for _ in range(4))
    if inputs == "outliers":  # one feature of queries and keys, eight times as large
        q[:, 3] *= 8.0
        k[:, 3] *= 8.0
    if inputs == "peaked":  # scores of standard deviation 4
        q *= 4.0
    return tuple(x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in (q, k, v, do))  # type: ignore[return-value]


@dataclass
class Results:
    """Output and gradients ``[length, 128]``, and the largest values of the tensors inside before their rounding."""

    out: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    amaxes: dict[str, float]


def attention(operands: Operands, rounded: Rounding, dtype: Any) -> Results:
    """Causal attention and its gradients, computed in ``dtype`` with each tensor rounded as ``rounded`` says."""
    amaxes: dict[str, float] = {}

    def read(name: str, x: np.ndarray) -> np.ndarray:
        amaxes[name] = max(amaxes.get(name, 0.0), largest(x))
        return rounded(name, x)

    q, k, v, do = (read(name, x.astype(dtype)) for name, x in zip(("q", "k", "v", "do"), operands, strict=True))
    out, dq, dk, dv = (np.zeros(x.shape, dtype) for x in (q, q, k, v))
    for start in range(0, len(q), CHUNK):
        rows = slice(start, min(start + CHUNK, len(q)))
        keys = slice(0, rows.stop)
        scores = q[rows] @ k[keys].T
        scores *= dtype(SCALE)
        scores[:, start:][np.triu_indices(rows.stop - start, 1)] = -np.inf
        scores -= scores.max(axis=1, keepdims=True)
        s = np.exp(scores, out=scores)
        sums = s.sum(axis=1, keepdims=True)
        out[rows] = read("o", (rounded("numerators", s) @ v[keys]) / sums)
        s /= sums
        read_s = read("s", s)
        dv[keys] += read_s.T @ do[rows]
        dp = do[rows] @ v[keys].T
        dp -= np.sum(out[rows] * do[rows], axis=1, keepdims=True)
        dp *= s
        dp *= dtype(SCALE)
        dp = read("dp", dp)
        dq[rows] = dp @ k[keys]
        dk[keys] += dp.T @ q[rows]
    return Results(out, read("dq", dq), read("dk", dk), read("dv", dv), amaxes)


def exact(operands: Operands) -> Results:
    return attention(operands, lambda name, x: x, np.float64)


def in_bf16(operands: Operands) -> Results:
    """As kernels compute it: products of bf16 values, sums and the softmax in fp32."""
    return attention(operands, lambda name, x: x.astype(ml_dtypes.bfloat16).astype(np.float32), np.float32)


def in_fp8(operands: Operands, amaxes: dict[str, float]) -> Results:
    """Of centred keys and values, under scales of the largest values that `exact` has found of them."""
    scales = {"numerators": np.float32(of_amax(1.0, E4M3))}
    for names in ROLES.values():
        scales |= dict.fromkeys(names, np.float32(of_amax(max(amaxes[name] for name in names), E4M3)))
    scales["o"] = np.float32(on_grid_of_values(scales))

    def rounded(name: str, x: np.ndarray) -> np.ndarray:
        codes = np.clip(x * scales[name], np.float32(-448.0), np.float32(448.0)).astype(E4M3)
        return codes.astype(np.float32) / scales[name]

    centred, mean = centred_operands(operands)
    found = attention(centred, rounded, np.float32)
    return replace(found, out=found.out + mean)


def centred_operands(operands: Operands) -> tuple[Operands, np.ndarray]:
    """Operands whose keys and values have lost their mean, bf16 values again, and that of the values ``[1, 128]``."""
    q, k, v, do = operands
    of_keys, of_values = (mean_of(x[None, :, None].astype(np.float64))[0, :, 0].astype(np.float32) for x in (k, v))
    k, v = (x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in (k - of_keys, v - of_values))
    return (q, k, v, do), of_values


def errors(found: Results, wanted: Results, positions: slice) -> list[float]:
    """Relative L2 errors of output and gradients at some positions."""
    return [relative_l2(getattr(found, name)[positions], getattr(wanted, name)[positions]) for name in RESULTS]


PLACES = {"first": slice(0, ROWS), "last": slice(-ROWS, None), "all": slice(None)}


def compared(inputs: str, length: int) -> dict[str, list[tuple[float, float]]]:
    """Errors of FP8 and of bf16 for each of `RESULTS`, by place."""
    operands = drawn(inputs, length)
    wanted = exact(operands)
    of_fp8, of_bf16 = in_fp8(operands, exact(centred_operands(operands)[0]).amaxes), in_bf16(operands)
    return {
        place: list(zip(errors(of_fp8, wanted, where), errors(of_bf16, wanted, where), strict=True))
        for place, where in PLACES.items()
    }


def main() -> None:
    print("| inputs | length | positions |", " | ".join(RESULTS), "|")
    print("|---|---|---|---|---|---|---|")
    for length in map(int, sys.argv[1:]):
        for inputs in INPUTS:
            for place, pairs in compared(inputs, length).items():
                cells = " | ".join(f"{fp8:.3f}, {bf16:.4f}" for fp8, bf16 in pairs)
                print(f"| {inputs} | {length:,} | {place} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
