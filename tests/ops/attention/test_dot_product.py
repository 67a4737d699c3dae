"""`dot_product_attention` on the XLA backend against NumPy, head by head and query by query."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops import dot_product_attention
from tests.support import oracles
from tests.support.numerics import (
    TOLERANCE,
    assert_bitwise,
    assert_close,
    draw,
    value_and_vjp,
    wide,
    without_type_checker,
)

B, S, N, D = 2, 6, 4, 8
Q_LENGTHS, KV_LENGTHS = jnp.array([6, 3], jnp.int32), jnp.array([4, 6], jnp.int32)
MASK = jnp.asarray(np.random.default_rng(5).random((B, N, S, S)) < 0.4)

CASES = {  # arguments of the op, of the oracle
    "no_mask": ({"mask_type": "no_mask"}, {}),
    "causal": ({"mask_type": "causal"}, {"causal": True}),
    "padding": (
        {"mask_type": "padding", "q_lengths": Q_LENGTHS, "kv_lengths": KV_LENGTHS},
        {"q_lengths": np.asarray(Q_LENGTHS), "kv_lengths": np.asarray(KV_LENGTHS)},
    ),
    "padding, one length": (
        {"mask_type": "padding", "kv_lengths": KV_LENGTHS},
        {"q_lengths": np.asarray(KV_LENGTHS), "kv_lengths": np.asarray(KV_LENGTHS)},
    ),
    "padding_causal": (
        {"mask_type": "padding_causal", "q_lengths": Q_LENGTHS, "kv_lengths": KV_LENGTHS},
        {"q_lengths": np.asarray(Q_LENGTHS), "kv_lengths": np.asarray(KV_LENGTHS), "causal": True},
    ),
    "arbitrary": ({"mask_type": "arbitrary", "mask": MASK}, {"mask": np.asarray(MASK)}),
    "arbitrary, for all heads": ({"mask_type": "arbitrary", "mask": MASK[:, :1]}, {"mask": np.asarray(MASK[:, :1])}),
    "arbitrary, by key": ({"mask_type": "arbitrary", "mask": MASK[:1, :1, :1]}, {"mask": np.asarray(MASK[:1, :1, :1])}),
    "scale": ({"mask_type": "causal", "scale": 0.7}, {"causal": True, "scale": 0.7}),
}


def qkv(dtype=jnp.float32, *, groups=N, sq=S, skv=S):
    return tuple(
        draw(f"{name}", (B, length, heads, D), dtype)
        for name, length, heads in (("q", sq, N), ("k", skv, groups), ("v", skv, groups))
    )


def attend(arguments, operands, g):
    return value_and_vjp(lambda *o: dot_product_attention(o, **arguments, backend="xla"), operands, g, quick=True)


@pytest.mark.costly("scale", slow=("padding_causal", "causal", "padding"))
@pytest.mark.wide("causal", "padding", "padding_causal", "arbitrary, by key", "scale")
@pytest.mark.parametrize("case", list(CASES))
def test_value_and_gradients(case):
    arguments, oracle = CASES[case]
    groups = 2 if case in ("causal", "padding", "arbitrary") else N
    operands, g = qkv(groups=groups), draw("g", (B, S, N, D))
    out, gradients = attend(arguments, operands, g)

    def fn(q, k, v):
        return oracles.attention(q, k, v, **oracle)

    assert_close(out, fn(*map(wide, operands)), TOLERANCE["float32"], what="out")
    for name, ours, expected in zip("qkv", gradients, _gradients(operands, g, oracle), strict=True):
        assert_close(ours, expected, 2 * TOLERANCE["float32"], what=f"d{name}")


def _gradients(operands, g, oracle):
    """Of the oracle, by central differences: each example and group of heads alone, so that fewer evaluations are
    needed.
    """
    q, k, v = map(wide, operands)
    groups, ratio = k.shape[2], N // k.shape[2]
    out = [np.zeros_like(a) for a in (q, k, v)]
    for b, group in np.ndindex(B, groups):
        heads = slice(group * ratio, (group + 1) * ratio)
        part = {key: value[b : b + 1] if key.endswith("lengths") else value for key, value in oracle.items()}
        if "mask" in part:
            part["mask"] = np.broadcast_to(part["mask"], (B, N, S, S))[b : b + 1, heads]
        one = (q[b : b + 1, :, heads], k[b : b + 1, :, [group]], v[b : b + 1, :, [group]])
        parts = oracles.numeric_vjp(
            lambda q, k, v, part=part: oracles.attention(q, k, v, **part), one, wide(g)[b : b + 1, :, heads]
        )
        out[0][b, :, heads], out[1][b, :, [group]], out[2][b, :, [group]] = (
            parts[0][0],
            parts[1][0].swapaxes(0, 1),
            parts[2][0].swapaxes(0, 1),
        )
    return out


@pytest.mark.costly("bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    operands, g = qkv(dtype, groups=2), draw("g", (B, S, N, D), dtype)
    out, gradients = attend({"mask_type": "causal"}, operands, g)
    assert {a.dtype.name for a in (out, *gradients)} == {dtype}
    assert_close(out, oracles.attention(*map(wide, operands), causal=True), 2 * TOLERANCE[dtype])
    # fp32's gradients at the same inputs are checked above; in half precision the probabilities and their gradients
    # are rounded, too.
    _, expected = attend({"mask_type": "causal"}, tuple(a.astype(jnp.float32) for a in operands), g.astype(jnp.float32))
    for name, ours, theirs in zip("qkv", gradients, expected, strict=True):
        assert_close(ours, theirs, 4 * TOLERANCE[dtype], what=f"d{name}")


def test_other_key_length():
    operands = qkv(sq=4, skv=9, groups=1)
    for mask_type in ("no_mask", "causal"):
        out = dot_product_attention(operands, mask_type=mask_type, backend="xla")
        assert_close(out, oracles.attention(*map(wide, operands), causal=mask_type == "causal"), TOLERANCE["float32"])


@pytest.mark.costly("padding", "padding_causal", slow=("causal",))
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "padding", "padding_causal"])
def test_packed_is_unpacked(mask_type):
    operands, g = qkv(), draw("g", (B, S, N, D))
    arguments = {"mask_type": mask_type} | ({"kv_lengths": KV_LENGTHS} if "padding" in mask_type else {})
    out, gradients = attend(arguments, operands, g)
    packed_out, (packed_gradient,) = attend(arguments, (jnp.stack(operands, axis=2),), g)
    assert_close(packed_out, out, TOLERANCE["float32"])
    assert_close(packed_gradient, jnp.stack(gradients, axis=2), TOLERANCE["float32"])


@pytest.mark.costly
def test_queries_past_their_length_give_zeros_and_keys_past_theirs_are_not_read():
    q, k, v = qkv()
    arguments, _ = CASES["padding"]
    out = dot_product_attention((q, k, v), **arguments, backend="xla")
    assert not np.asarray(out[1, 3:]).any()
    assert np.asarray(out[1, :3]).all()
    garbage = jnp.arange(S)[None, :, None, None] >= KV_LENGTHS[:, None, None, None]
    noisy = dot_product_attention(
        (q, jnp.where(garbage, 1e4, k), jnp.where(garbage, -1e4, v)), **arguments, backend="xla"
    )
    assert_bitwise(noisy, out)
    _, gradients = attend(arguments, (q, k, v), draw("g", (B, S, N, D)))
    assert not np.asarray(gradients[0][1, 3:]).any()
    assert not np.asarray(gradients[1][0, 4:]).any()
    assert not np.asarray(gradients[2][0, 4:]).any()


def test_a_query_that_sees_nothing_gives_zeros_and_no_nan():
    mask = MASK.at[:, :, 2].set(True)
    out, gradients = attend({"mask_type": "arbitrary", "mask": mask}, qkv(), draw("g", (B, S, N, D)))
    assert not np.asarray(out[:, 2]).any()
    assert all(np.isfinite(np.asarray(gradient)).all() for gradient in gradients)
    empty = dot_product_attention(qkv(), mask_type="padding", kv_lengths=jnp.zeros(B, jnp.int32), backend="xla")
    assert not np.asarray(empty).any()


def test_large_scores_stay_finite():
    q, k, v = qkv()
    out, gradients = attend({"mask_type": "causal"}, (q * 1e4, k * 1e4, v), draw("g", (B, S, N, D)))
    assert all(np.isfinite(np.asarray(a)).all() for a in (out, *gradients))


def _dropped(rate, seed, shape=(2, 32, 4, 32)):
    """Attention whose values are the unit vectors, so that its output is the dropped-out probabilities themselves."""
    b, s, n, _ = shape
    q, k = draw("q", (b, s, n, 8)), draw("k", (b, s, n, 8))
    pad = ((0, 0), (0, 0), (0, 0), (0, s - 8))
    v = jnp.broadcast_to(jnp.eye(s)[None, :, None], (b, s, n, s))
    key = None if seed is None else jax.random.key(seed)
    return dot_product_attention(
        (jnp.pad(q, pad), jnp.pad(k, pad), v), mask_type="no_mask", dropout_rate=rate, dropout_key=key, backend="xla"
    )


@pytest.mark.costly
def test_dropout_statistics():
    rate = 0.3
    plain, dropped = np.asarray(_dropped(0.0, None)), np.asarray(_dropped(rate, 0))
    kept = dropped != 0.0
    count = kept.size
    assert abs(kept.mean() - (1 - rate)) < 4 * np.sqrt(rate * (1 - rate) / count), (
        "the rate, within 4 standard deviations"
    )
    np.testing.assert_allclose(dropped[kept], plain[kept] / (1 - rate), rtol=1e-5, err_msg="what is kept is scaled up")
    by_head = kept.transpose(0, 2, 1, 3).reshape(8, -1)
    assert (np.abs(np.corrcoef(by_head)[np.triu_indices(8, 1)]) < 0.15).all(), (
        "heads and examples have masks of their own"
    )


def test_dropout_key():
    one, two, other = (np.asarray(_dropped(0.5, seed)) for seed in (0, 0, 1))
    assert_bitwise(one, two)
    assert 0.4 < ((one != 0) == (other != 0)).mean() < 0.6
    assert_bitwise(_dropped(0.0, 0), _dropped(0.0, None))
    with pytest.raises(ValueError, match=r"dropout_rate=0.5 needs dropout_key; give a key, or the rate 0"):
        _dropped(0.5, None)


def test_dropout_gradient_uses_the_mask_of_the_forward_pass():
    operands, key = qkv(), jax.random.key(3)

    def run(v):
        return dot_product_attention((*operands[:2], v), dropout_rate=0.5, dropout_key=key, backend="xla")

    g = draw("g", (B, S, N, D))
    _, (dv,) = value_and_vjp(run, (operands[2],), g)
    direction = draw("direction", operands[2].shape)  # the op is linear in v
    assert float(jnp.vdot(dv, direction)) == pytest.approx(float(jnp.vdot(run(direction), g)), rel=1e-4)


LENGTHS = jnp.array([4, 6], jnp.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"mask_type": "window"},
            "mask_type must be one of 'no_mask', 'causal', .*, got 'window'",
        ),
        ({"mask_type": "arbitrary"}, "mask type 'arbitrary' needs a mask"),
        ({"mask_type": "causal", "mask": MASK}, "mask type 'causal' takes no mask"),
        ({"mask_type": "arbitrary", "mask": MASK[0]}, r"mask must have four axes, .*, got \(4, 6, 6\)"),
        (
            {"mask_type": "arbitrary", "mask": MASK[:, :, :5]},
            r"each 1 or as in \[b, n, sq, skv\] = \(2, 4, 6, 6\), got \(2, 4, 5, 6\)",
        ),
        ({"mask_type": "padding"}, "mask type 'padding' needs .*kv_lengths"),
        ({"mask_type": "padding", "q_lengths": LENGTHS}, "mask type 'padding' needs .*kv_lengths"),
        ({"mask_type": "causal", "kv_lengths": LENGTHS}, "mask type 'causal' takes no lengths"),
        ({"mask_type": "causal", "q_lengths": LENGTHS}, "mask type 'causal' takes no lengths"),
        (
            {"mask_type": "padding", "kv_lengths": LENGTHS[:1]},
            r"lengths of keys must have one entry for each example, \(2,\), got \(1,\)",
        ),
        (
            {"mask_type": "padding", "kv_lengths": LENGTHS, "q_lengths": LENGTHS[:, None]},
            r"lengths of queries must have one entry .* got \(2, 1\)",
        ),
        ({"dropout_rate": 1.0}, r"dropout_rate must be in \[0, 1\), got 1.0"),
        ({"dropout_rate": -0.1}, r"dropout_rate must be in \[0, 1\), got -0.1"),
    ],
)
def test_arguments_that_do_not_go_together(arguments, message):
    with without_type_checker(), pytest.raises(ValueError, match=message):
        dot_product_attention(qkv(), **arguments, backend="xla")


def test_a_mask_that_is_not_bool_is_refused():
    with pytest.raises(TypeError, match=r"mask must be bool .*True hides.*float32"):
        dot_product_attention(qkv(), mask_type="arbitrary", mask=jnp.zeros((B, 1, S, S)), backend="xla")


def test_lengths_that_are_no_integers_are_refused():
    with pytest.raises(TypeError, match="lengths of keys must be integers, got float32"):
        dot_product_attention(qkv(), mask_type="padding", kv_lengths=jnp.array([2.0, 3.0]), backend="xla")


def test_shapes_that_do_not_go_together():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"a packed qkv has shape \[b, s, 3, n, d\], got \(2, 6, 4, 8\)"):
        dot_product_attention((q,))
    with pytest.raises(ValueError, match=r"k \[b, skv, g, d\] and v \[b, skv, g, dv\]; got"):
        dot_product_attention((q, k, v[:, :3]))
    with pytest.raises(ValueError, match="must agree in batch and head size"):
        dot_product_attention((q, k[:1], v[:1]))
    with pytest.raises(ValueError, match="query heads 4 is not divisible by the key/value heads 3"):
        dot_product_attention((q, k[:, :, :3], v[:, :, :3]))
