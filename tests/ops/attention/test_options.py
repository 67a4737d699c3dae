"""Windows, bottom-right masks, biases, softmax types, softcap, head sizes and packed sequences of the XLA backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops import Segments, attention_spec, dot_product_attention, segments_from_cu_seqlens
from jax_te.ops.attention.segments import segment_positions
from jax_te.ops.xla.attention import attention_supports as xla_supports
from jax_te.sharding import constrain
from tests.support import oracles
from tests.support.numerics import TOLERANCE, assert_close, draw, quick_jit, value_and_vjp, wide, without_type_checker

B, SQ, SKV, N, D = 2, 4, 5, 4, 4
LENGTHS = {"q_lengths": np.array([4, 2], np.int32), "kv_lengths": np.array([5, 4], np.int32)}
BIAS = draw("bias", (1, N, SQ, SKV))
BY_EXAMPLE = draw("by example", (B, 1, SQ, SKV))
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
OFFSET = draw("offset", (N,))
MASK = np.random.default_rng(3).random((B, N, SQ, SKV)) < 0.3

CASES = {  # arguments of the op, of the oracle
    "bottom right": ({"mask_type": "causal_bottom_right"}, {"causal": True, "bottom_right": True}),
    "padding, bottom right": (
        {"mask_type": "padding_causal_bottom_right", **LENGTHS},
        {"causal": True, "bottom_right": True, **LENGTHS},
    ),
    "window": ({"mask_type": "no_mask", "window": (1, 2)}, {"window": (1, 2)}),
    "window to the left": ({"mask_type": "no_mask", "window": (1, -1)}, {"window": (1, -1)}),
    "window to the right": ({"mask_type": "no_mask", "window": (-1, 0)}, {"window": (-1, 0)}),
    "causal window": ({"mask_type": "causal", "window": (1, -1)}, {"causal": True, "window": (1, 0)}),
    "window of one": ({"mask_type": "causal", "window": (0, 0)}, {"window": (0, 0)}),
    "window, bottom right": (
        {"mask_type": "causal_bottom_right", "window": (2, 0)},
        {"causal": True, "bottom_right": True, "window": (2, 0)},
    ),
    "window, padding, bottom right": (
        {"mask_type": "padding_causal_bottom_right", "window": (1, 0), **LENGTHS},
        {"causal": True, "bottom_right": True, "window": (1, 0), **LENGTHS},
    ),
    "window, arbitrary": (
        {"mask_type": "arbitrary", "mask": MASK, "window": (2, 1)},
        {"mask": MASK, "window": (2, 1)},
    ),
    "bias": (
        {"mask_type": "causal", "bias_type": "post_scale_bias", "bias": BIAS},
        {"causal": True, "post_scale_bias": BIAS},
    ),
    "bias before the scale": (
        {"mask_type": "no_mask", "bias_type": "pre_scale_bias", "bias": BY_EXAMPLE},
        {"pre_scale_bias": BY_EXAMPLE},
    ),
    "alibi": ({"mask_type": "causal", "bias_type": "alibi", "bias": SLOPES}, {"causal": True, "slopes": SLOPES}),
    "alibi, bottom right": (
        {"mask_type": "causal_bottom_right", "bias_type": "alibi", "bias": SLOPES},
        {"causal": True, "bottom_right": True, "slopes": SLOPES},
    ),
    "alibi, no mask": ({"mask_type": "no_mask", "bias_type": "alibi", "bias": SLOPES}, {"slopes": SLOPES}),
    "off by one": ({"mask_type": "causal", "softmax_type": "off-by-one"}, {"causal": True, "sink": np.zeros(N)}),
    "learnable": (
        {"mask_type": "causal", "softmax_type": "learnable", "softmax_offset": OFFSET},
        {"causal": True, "sink": OFFSET},
    ),
    "softcap": (
        {"mask_type": "causal", "logit_softcap": 0.5, "bias_type": "post_scale_bias", "bias": BIAS},
        {"causal": True, "softcap": 0.5, "post_scale_bias": BIAS},
    ),
}  # fmt: skip

DIFFERENTIATED = {"bias": ("pre_scale_bias", "post_scale_bias", "slopes"), "softmax_offset": ("sink",)}


def qkv(groups=2, dv=6):
    return draw("q", (B, SQ, N, D)), draw("k", (B, SKV, groups, D)), draw("v", (B, SKV, groups, dv))


@pytest.mark.costly(
    "padding, bottom right",
    slow=(
        "off by one",
        "learnable",
        "bias before the scale",
        "softcap",
        "alibi, bottom right",
        "causal window",
        "window, arbitrary",
    ),
)
@pytest.mark.wide(
    "padding, bottom right",
    "causal window",
    "window, padding, bottom right",
    "window, arbitrary",
    "bias before the scale",
    "alibi, bottom right",
    "off by one",
    "learnable",
    "softcap",
)
@pytest.mark.parametrize("case", list(CASES))
def test_value_and_gradients(case):
    arguments, oracle = CASES[case]
    learned = {
        ours: next(t for t in theirs if t in oracle) for ours, theirs in DIFFERENTIATED.items() if ours in arguments
    }
    operands = (*qkv(), *(arguments[name] for name in learned))
    g = draw("g", (B, SQ, N, 6))
    rest = {
        name: jnp.asarray(a) if isinstance(a, np.ndarray) else a for name, a in arguments.items() if name not in learned
    }

    def ours(q, k, v, *more):
        return dot_product_attention((q, k, v), **rest, **dict(zip(learned, more, strict=True)), backend="xla")

    def formula(q, k, v, *more):
        return oracles.attention(q, k, v, **oracle | dict(zip(learned.values(), more, strict=True)))

    out, gradients = value_and_vjp(ours, tuple(map(jnp.asarray, operands)), g, quick=True)
    values = [wide(a) for a in operands]
    assert_close(out, formula(*values), TOLERANCE["float32"], what="out")
    for name, got, expected in zip(
        ["q", "k", "v", *learned], gradients, oracles.numeric_vjp(formula, values, wide(g)), strict=True
    ):
        assert_close(got, expected, 2 * TOLERANCE["float32"], what=f"d{name}")


@pytest.mark.costly("bias", slow=("bottom right", "window, padding, bottom right", "softcap"))
@pytest.mark.parametrize("case", ["bottom right", "bias", "softcap", "window, padding, bottom right", "alibi"])
def test_max_logit(case):
    arguments, oracle = CASES[case]
    arguments = {name: jnp.asarray(a) if isinstance(a, np.ndarray) else a for name, a in arguments.items()}
    operands = qkv()
    out, logits = dot_product_attention(operands, **arguments, return_max_logit=True, backend="xla")
    expected = oracles.attention(*map(wide, operands), **oracle, max_logit=True)
    np.testing.assert_allclose(logits, expected, rtol=1e-6)
    assert logits.dtype == jnp.float32
    plain = dot_product_attention(operands, **arguments, backend="xla")
    np.testing.assert_array_equal(out, plain)
    slope = jax.grad(lambda q: dot_product_attention((q, *operands[1:]), return_max_logit=True, backend="xla")[1].sum())
    assert not np.asarray(slope(operands[0])).any()


@pytest.mark.costly("explicit", slow=("auto",))
def test_options_on_meshes(mesh_mode):
    operands, g = (draw("q", (4, 8, N, D)), draw("k", (4, 8, 2, D)), draw("v", (4, 8, 2, D))), draw("g", (4, 8, N, D))
    bias, offset = draw("b", (1, N, 8, 8)), draw("o", (N,))
    segments = segments_from_cu_seqlens(jnp.array([[0, 3, 8], [0, 4, 7], [0, 8, 8], [0, 1, 2]], jnp.int32))
    axes = ("batch", "sequence", "heads", None)

    def run(q, k, v, bias, offset):
        one, logits = dot_product_attention(
            (q, k, v), bias_type="post_scale_bias", bias=bias, softmax_type="learnable", softmax_offset=offset,
            window=(3, 0), return_max_logit=True, out_axes=axes, backend="xla",
        )  # fmt: skip
        two = dot_product_attention(
            (q, k, v), mask_type="padding_causal", segments=segments, out_axes=axes, backend="xla"
        )
        return one + two, logits

    @quick_jit
    def both(*operands):
        y, vjp = jax.vjp(run, *operands)
        return y, vjp((constrain(g, axes), constrain(jnp.zeros(N), ("heads",))))

    (out, logits), gradients = both(*operands, bias, offset)
    rows = [[(0, 3), (3, 8)], [(0, 4), (4, 7)], [(0, 8)], [(0, 1), (1, 2)]]
    q, k, v = map(wide, operands)
    options = {"causal": True, "window": (3, 0), "sink": wide(offset), "post_scale_bias": wide(bias)}
    expected = oracles.attention(q, k, v, **options)
    for row, parts in enumerate(rows):
        for a, b in parts:
            expected[row : row + 1, a:b] += oracles.attention(
                q[row : row + 1, a:b], k[row : row + 1, a:b], v[row : row + 1, a:b], causal=True
            )
    assert_close(out, expected, TOLERANCE["float32"])
    np.testing.assert_allclose(logits, oracles.attention(q, k, v, **options, max_logit=True), rtol=1e-6)
    assert all(np.isfinite(np.asarray(a)).all() and np.asarray(a).any() for a in gradients)


@pytest.mark.costly(slow=("window1-padding_causal", "None-padding"))
@pytest.mark.wide
@pytest.mark.parametrize("mask_type", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("window", [None, (2, 0)])
def test_packed_sequences_equal_each_one_alone(mask_type, window):
    """Two rows of up to three sequences, with padding between and behind them, queries and keys of other lengths."""
    q, k, v = draw("q", (2, 12, N, D)), draw("k", (2, 14, 2, D)), draw("v", (2, 14, 2, D))
    segments = segments_from_cu_seqlens(
        jnp.array([[0, 3, 5, 9], [0, 6, 10, 10]]),
        jnp.array([[0, 5, 7, 11], [0, 6, 10, 10]]),
        jnp.array([[0, 4, 6, 12], [0, 7, 12, 12]]),
        jnp.array([[0, 5, 9, 13], [0, 8, 12, 12]]),
    )
    g = draw("g", (2, 12, N, D))
    arguments = {"mask_type": mask_type, "window": window}

    def packed(q, k, v):
        return dot_product_attention((q, k, v), **arguments, segments=segments, backend="xla")

    out, gradients = value_and_vjp(packed, (q, k, v), g, quick=True)
    expected = [np.zeros(a.shape) for a in (out, q, k, v)]
    plain = mask_type.removeprefix("padding_") if mask_type != "padding" else "no_mask"
    for row, sequence in np.ndindex(2, 3):
        q_at, q_size, kv_at, kv_size = (int(a[row, sequence]) for a in segments)
        if q_size == 0:
            continue
        mine, theirs = np.s_[row : row + 1, q_at : q_at + q_size], np.s_[row : row + 1, kv_at : kv_at + kv_size]
        alone, parts = value_and_vjp(
            lambda *o: dot_product_attention(o, mask_type=plain, window=window, backend="xla"),
            (q[mine], k[theirs], v[theirs]),
            g[mine],
            quick=True,
        )
        expected[0][mine], expected[1][mine] = alone, parts[0]
        expected[2][theirs], expected[3][theirs] = parts[1], parts[2]
    for name, got, wanted in zip(("out", "dq", "dk", "dv"), (out, *gradients), expected, strict=True):
        assert_close(got, wanted, 2 * TOLERANCE["float32"], what=name)


def test_places_in_a_row():
    got = segment_positions(jnp.array([[0, 4, 7]]), jnp.array([[3, 2, 0]]), 8)
    assert got.segment.tolist() == [[1, 1, 1, 0, 2, 2, 0, 0]]
    assert got.position.tolist() == [[0, 1, 2, 0, 0, 1, 0, 0]]
    assert got.length.tolist() == [[3, 3, 3, 0, 2, 2, 0, 0]]


Q, K, V = qkv()
PACKED = segments_from_cu_seqlens(jnp.array([[0, 2, 4]] * B))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"window": (1,)}, TypeError, r"window must be a tuple \(an integer, an integer\) or None, got \(1,\)"),
        ({"window": (-2, 0)}, ValueError, r"two integers >= -1"),
        ({"window": (1, 1)}, ValueError, r"window_size \(1, 1\) shows 1 positions ahead, mask type 'causal' none"),
        ({"bias_type": "alibi"}, ValueError, "ALiBi needs slopes"),
        ({"bias_type": "alibi", "bias": jnp.ones(3)}, ValueError, r"slopes must be \[n\] = \(4,\) .*, got \(3,\)"),
        ({"bias": BIAS}, ValueError, "bias type 'no_bias' takes no bias"),
        ({"bias_type": "post_scale_bias"}, ValueError, "bias type 'post_scale_bias' needs a bias"),
        ({"bias_type": "relative"}, ValueError, "bias_type must be one of 'no_bias', 'pre_scale_bias'"),
        ({"bias_type": "post_scale_bias", "bias": BIAS[0]}, ValueError, r"bias must have four axes, .* \(4, 4, 5\)"),
        ({"bias_type": "post_scale_bias", "bias": jnp.ones((1, N, SQ, SKV), int)}, TypeError, "floating point"),
        ({"softmax_type": "learnable"}, ValueError, "softmax_type 'learnable' needs softmax_offset"),
        ({"softmax_offset": OFFSET}, ValueError, "softmax_type 'vanilla' takes no softmax_offset"),
        ({"softmax_type": "learnable", "softmax_offset": OFFSET[:2]}, ValueError, r"one entry for each head, \(4,\)"),
        ({"softmax_type": "off_by_one"}, ValueError, "softmax_type must be one of 'vanilla', 'off-by-one'"),
        ({"logit_softcap": 0.0}, ValueError, "logit_softcap must be > 0"),
        ({"segments": PACKED}, ValueError, "packed sequences need a padding mask type, got 'causal'"),
        (
            {"segments": PACKED, "mask_type": "padding", "kv_lengths": jnp.ones(B, jnp.int32)},
            ValueError,
            "packed sequences bring their own lengths",
        ),
        ({"segments": PACKED._replace(q_offsets=jnp.arange(2)), "mask_type": "padding"}, ValueError, "q_offsets"),
        ({"segments": PACKED._replace(kv_lengths=jnp.zeros((B, 2))), "mask_type": "padding"}, TypeError, "kv_lengths"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_go_together(arguments, error, message):
    with without_type_checker(), pytest.raises(error, match=message):
        dot_product_attention((Q, K, V), **arguments, backend="xla")


def test_cumulative_lengths_that_do_not_go_together():
    with pytest.raises(TypeError, match="cu_seqlens_q must be an array of integers, got"):
        segments_from_cu_seqlens(jnp.array([0.0, 2.0]))
    with pytest.raises(ValueError, match=r"cu_seqlens_q_padded must be \[m \+ 1\]"):
        segments_from_cu_seqlens(jnp.array([0, 2]), cu_seqlens_q_padded=jnp.array([0, 2, 4]))
    with pytest.raises(ValueError, match="must hold as many sequences"):
        segments_from_cu_seqlens(jnp.array([0, 2]), jnp.array([0, 2, 4]))


@pytest.mark.parametrize(
    ("lengths", "kernel"),
    [
        ((1024, 1024), "cuDNN through jax.nn"),
        ((128, 640), "cuDNN through jax.nn"),
        ((64, 64), "plain JAX"),  # nan in the gradient of queries where logits are far below zero
        ((640, 704), "plain JAX"),
        ((1000, 1000), "plain JAX"),
        ((1, 1024), "plain JAX"),
    ],
)
def test_lengths_that_cudnn_gets_through_jax(monkeypatch, lengths, kernel):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    q, k = (jnp.zeros((2, length, 4, 64), jnp.bfloat16) for length in lengths)
    assert xla_supports(attention_spec((q, k, k), "no_mask")) == (True, kernel)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"kv_lengths": [3, 9]}, "lengths of keys must be from 0 to 8"),
        ({"kv_lengths": [-1, 3]}, "lengths of keys must be from 0 to 8"),
        ({"q_lengths": [3, 7], "kv_lengths": [3, 8]}, "lengths of queries must be from 0 to 6"),
        ({"q": ([0, 4], [4, 2]), "kv": ([0, 4], [4, 5])}, "segments of keys must lie within a row of 8"),
        ({"q": ([0, 4], [4, 3]), "kv": ([0, 4], [4, 4])}, "segments of queries must lie within a row of 6"),
    ],
)
def test_known_lengths_beyond_their_row_are_refused(lengths, message):
    q, k = draw("q", (2, 6, 1, 8)), draw("k", (2, 8, 1, 8))
    if "q" in lengths:
        rows = (jnp.array([row] * 2) for name in ("q", "kv") for row in lengths[name])
        given = {"segments": Segments(*rows)}
    else:
        given = {name: jnp.array(values) for name, values in lengths.items()}
    with pytest.raises(ValueError, match=message):
        dot_product_attention((q, k, k), mask_type="padding_causal_bottom_right", **given)


@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 2, 3, 0, 8)],
        [(1, 2, 1, 8), (1, 2, 0, 8), (1, 2, 0, 8)],
        [(1, 2, 1, 0), (1, 2, 1, 0), (1, 2, 1, 8)],
        [(1, 2, 1, 8), (1, 2, 1, 8), (1, 2, 1, 0)],
    ],
)
def test_no_heads_and_heads_of_no_size_are_refused(shapes):
    with pytest.raises(ValueError, match="numbers of heads and head sizes must be 1 or more"):
        dot_product_attention(tuple(map(jnp.ones, shapes)))
