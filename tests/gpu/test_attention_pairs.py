"""Options of attention in pairs: each two values meet in some call through TE, beside plain JAX in fp32.

Inputs are the same on both sides, in bf16 or fp16. Probabilities, results and gradients are rounded to that dtype, with
a relative error of half its epsilon each: three epsilons for the output, and eight for gradients, which are products of
rounded products. Probabilities of fp16 below 6e-5 have fewer bits, so that its limits have twice as many epsilons.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_te.errors import BackendUnavailableError
from jax_te.ops import Segments, attention_spec, dot_product_attention, explain_backend
from jax_te.ops.attention.segments import segment_positions
from tests.support.numerics import draw, quick_jit, relative_l2, with_vjp
from tests.support.pairs import Case, case_id, pairwise

pytestmark = pytest.mark.gpu

B, N = 2, 4
OPTIONS = {
    "mask": (
        "no_mask", "causal", "causal_bottom_right",
        "padding", "padding_causal", "padding_causal_bottom_right",
    ),
    "window": (None, (128, 0), (33, 0), (64, 32)),
    "softmax": ("vanilla", "off-by-one", "learnable"),
    "form": ("heads", "one array", "packed", "packed one array", "packed with gaps"),
    "bias": (None, (1, N), (B, N), (1, 1), (B, 1), "keys"),
    "heads": ((64, 64), (72, 72), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (128, 64), (64, 128)),
    "groups": (4, 2, 1),
    "lengths": ((640, 640), (1000, 1000), (1048, 1048), (704, 704), (256, 1000), (640, 968), (1000, 640)),
    "dtype": ("bfloat16", "float16"),
}  # fmt: skip
LIMITS = {"bfloat16": (3 * 2.0**-8, 8 * 2.0**-8), "float16": (6 * 2.0**-11, 16 * 2.0**-11)}

PLAIN: Case = {
    "mask": "causal", "window": None, "softmax": "vanilla", "form": "heads", "bias": None,
    "heads": (64, 64), "groups": 4, "lengths": (640, 640), "dtype": "bfloat16",
}  # fmt: skip


def is_call(case: Case) -> bool:
    """Whether the library has such a call at all."""
    padding, one_array = "padding" in case["mask"], "one array" in case["form"]
    (d, dv), (sq, skv) = case["heads"], case["lengths"]
    return (
        ("packed" not in case["form"] or padding)
        and not (case["window"] == (64, 32) and "causal" in case["mask"])
        and (not one_array or (case["groups"] == N and d == dv and sq == skv))
    )


# What TE refuses on Hopper with cuDNN 9.19: which cases, and how the simplest of them differs from `PLAIN`.
PACKED = {"mask": "padding_causal", "form": "packed"}
REFUSED = {
    "packed sequences and a sink": (
        lambda c: "packed" in c["form"] and c["softmax"] != "vanilla",
        {**PACKED, "softmax": "learnable"},
    ),
    "packed sequences and a bias": (
        lambda c: "packed" in c["form"] and c["bias"] is not None,
        {**PACKED, "bias": (1, N)},
    ),
    "packed sequences of large heads": (
        lambda c: "packed" in c["form"] and max(c["heads"]) > 128 and c["heads"] != (192, 128),
        {**PACKED, "heads": (256, 256)},
    ),
    "a bias of keys alone": (
        lambda c: c["bias"] == "keys",
        {"bias": "keys"},
    ),
    "bottom right and a bias": (
        lambda c: "bottom_right" in c["mask"] and c["bias"] is not None,
        {"mask": "causal_bottom_right", "bias": (1, N)},
    ),
    "bottom right and more queries than keys": (
        lambda c: c["mask"] == "causal_bottom_right" and c["lengths"][0] > c["lengths"][1],
        {"mask": "causal_bottom_right", "lengths": (1000, 640)},
    ),
    "a window and more queries than keys": (
        lambda c: "padding" not in c["mask"] and c["window"] is not None and c["lengths"][0] > c["lengths"][1],
        {"window": (128, 0), "lengths": (1000, 640)},
    ),
}


def runs(case: Case) -> bool:
    return is_call(case) and not any(refuses(case) for refuses, _ in REFUSED.values())


CASES = pairwise(OPTIONS, runs)


def packed(lengths: tuple[int, int], *, gaps: bool) -> Segments:
    """Three sequences in the first row; in the second a short one, a long one and none, with padding behind."""

    def rows(size: int, shares: list[list[int]]) -> jax.Array:
        return jnp.array([[size * share // 100 for share in row] for row in shares], jnp.int32)

    def side(size: int) -> tuple[jax.Array, jax.Array]:
        ends = rows(size, [[30, 62, 100], [5, 65, 65]])
        offsets = jnp.pad(ends[:, :-1], ((0, 0), (1, 0)))
        if not gaps:
            return offsets, ends - offsets
        return offsets, jnp.maximum(ends - offsets - jnp.array([[7, 20, 3], [1, 64, 0]]), 0)

    q_offsets, q_lengths = side(lengths[0])
    if lengths[0] == lengths[1]:
        return Segments(q_offsets, q_lengths, q_offsets, q_lengths)
    return Segments(q_offsets, q_lengths, *side(lengths[1]))


class Call:
    """The arrays of a case: what is differentiated by name, and the other arguments of `dot_product_attention`."""

    def __init__(self, case: Case):
        (sq, skv), (d, dv), dtype = case["lengths"], case["heads"], case["dtype"]
        self.limits = LIMITS[dtype]
        if "one array" in case["form"]:
            self.differentiated = {"qkv": draw("qkv", (B, sq, 3, N, d), dtype)}
        else:
            groups = case["groups"]
            self.differentiated = {
                "q": draw("q", (B, sq, N, d), dtype),
                "k": draw("k", (B, skv, groups, d), dtype),
                "v": draw("v", (B, skv, groups, dv), dtype),
            }
        self.g = draw("g", (B, sq, N, dv), dtype)
        self.arguments: dict[str, Any] = {"mask_type": case["mask"], "window": case["window"]}
        self.static: dict[str, Any] = {"softmax_type": case["softmax"]}
        self._add_bias(case["bias"], sq, skv, dtype)
        if case["softmax"] == "learnable":
            self.differentiated["softmax_offset"] = draw("offset", (N,))
        self.inside: dict[str, jax.Array] = {}
        if "packed" in case["form"]:
            self._pack(packed((sq, skv), gaps="gaps" in case["form"]), sq, skv)
        elif "padding" in case["mask"]:
            q_lengths = jnp.array([sq, sq - 70], jnp.int32)
            self.arguments["q_lengths"] = q_lengths
            self.arguments["kv_lengths"] = q_lengths if sq == skv else jnp.array([skv, skv - 70], jnp.int32)

    def _add_bias(self, bias: Any, sq: int, skv: int, dtype: str) -> None:
        self.static["bias_type"] = "no_bias" if bias is None else "post_scale_bias"
        if bias is not None:
            shape = (B, 1, 1, skv) if bias == "keys" else (*bias, sq, skv)
            self.differentiated["bias"] = draw("bias", shape, dtype)

    def _pack(self, segments: Segments, sq: int, skv: int) -> None:
        self.arguments["segments"] = segments
        self.static["max_segments"] = segments.q_lengths.shape[1]
        q = segment_positions(segments.q_offsets, segments.q_lengths, sq).segment > 0
        kv = segment_positions(segments.kv_offsets, segments.kv_lengths, skv).segment > 0
        # What stands in the padding of packed sequences is not defined.
        self.inside = {"out": q, "q": q, "qkv": q, "k": kv, "v": kv}

    def qkv(self) -> Any:
        return tuple(self.differentiated[name] for name in ("qkv", "q", "k", "v") if name in self.differentiated)

    def choice(self) -> Any:
        bias = self.differentiated.get("bias")
        options = {
            **self.static,
            "window": self.arguments["window"],
            "bias_shape": None if bias is None else bias.shape,
        }
        spec = attention_spec(self.qkv(), self.arguments["mask_type"], **options)
        return explain_backend("dot_product_attention", attention=spec)

    def run(self, backend: str, dtype: str | None = None) -> dict[str, jax.Array]:
        """Return the output and all gradients; in another dtype, from the same values."""
        names, arrays = list(self.differentiated), tuple(self.differentiated.values())
        arrays, g = jax.tree.map(lambda x: x if dtype is None else x.astype(dtype), (arrays, self.g))

        def attend(*arrays: jax.Array) -> jax.Array:
            named = dict(zip(names, arrays, strict=True))
            qkv: Any = tuple(named.pop(name) for name in ("qkv", "q", "k", "v") if name in named)
            options = {name: self.static[name] for name in ("softmax_type", "bias_type")}
            return dot_product_attention(qkv, **named, **options, **self.arguments, backend=backend)

        out, gradients = quick_jit(functools.partial(with_vjp, attend))(arrays, g)
        return self._visible({"out": out, **dict(zip(names, gradients, strict=True))})

    def _visible(self, results: dict[str, jax.Array]) -> dict[str, jax.Array]:
        def visible(name: str, x: jax.Array) -> jax.Array:
            inside = self.inside.get(name)
            return x if inside is None else jnp.where(inside.reshape(*inside.shape, *(1,) * (x.ndim - 2)), x, 0)

        return {name: visible(name, x) for name, x in results.items()}


def far(actual: dict[str, jax.Array], expected: dict[str, jax.Array], limits: tuple[float, float]) -> dict[str, float]:
    """Return the relative distances that are not within the limits of the output and of gradients; nan is not."""
    assert actual.keys() == expected.keys()
    distances = {name: relative_l2(actual[name], value) for name, value in expected.items()}
    return {name: x for name, x in distances.items() if not x < limits[name != "out"]}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_te_against_plain_jax_in_fp32(case):
    call = Call(case)
    choice = call.choice()
    assert choice.backend == "te", f"not among REFUSED: {choice.reason}"
    out = call.run("te")
    with jax.default_matmul_precision("highest"):
        expected = call.run("xla", "float32")
    wrong = far(out, expected, call.limits)
    assert not wrong, wrong


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """With the reason, and `auto` takes XLA."""
    refuses, change = REFUSED[name]
    case = {**PLAIN, **change}
    assert is_call(case)
    assert refuses(case)
    call = Call(case)
    choice = call.choice()
    assert choice.backend == "xla", f"{name}: TE has it now, so that CASES must have it"
    print(f"{name}: {choice.reason}")
    with pytest.raises(BackendUnavailableError) as error:
        call.run("te")
    assert str(error.value)


NEGATIVE = [
    {**PLAIN, **options, "lengths": (length, length)}
    for length in (640, 704, 1000)
    for options in ({"mask": "no_mask"}, {}, {"mask": "padding"}, {"bias": (1, N)})
]


@pytest.mark.parametrize("backend", ["te", "xla"])
@pytest.mark.parametrize("case", NEGATIVE, ids=case_id)
def test_logits_far_below_zero(case, backend):
    """All of a row near -120: Hopper's kernels read exp(-logsumexp) for keys past the end, which is infinite.

    cuDNN 9.20 gives nan in dq where the number of keys is 64 more than a multiple of 128 (PyTorch's issue 196678).
    Heads of Qwen 2.5 have such logits. ``xla`` is cuDNN through jax.nn for two of the masks.
    """
    call = Call(case)
    d = case["heads"][0]
    q, k = (call.differentiated[name] * 0.125 for name in "qk")
    call.differentiated |= {"q": q.at[..., 0].set(1.0), "k": k.at[..., 0].set(-120.0 * d**0.5)}
    out = call.run(backend)
    with jax.default_matmul_precision("highest"):
        expected = call.run("xla", "float32")
    # The large component of dq is a sum that cancels: nothing but rounding errors.
    for results in (out, expected):
        results["q"] = results["q"][..., 1:]
    wrong = far(out, expected, call.limits)
    assert not wrong, wrong
