import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops import softmax_cross_entropy
from tests.support import oracles
from tests.support.numerics import TOLERANCE, assert_close, draw, value_and_vjp, wide

LABELS = jnp.asarray(np.random.default_rng(0).integers(0, 24, (2, 8)), jnp.int32)


def inputs(dtype):
    return draw("logits", (2, 8, 24), dtype, scale=3.0), draw("g", (2, 8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_value_and_gradient(dtype):
    logits, g = inputs(dtype)
    loss, (dlogits,) = value_and_vjp(lambda x: softmax_cross_entropy(x, LABELS), (logits,), g)
    assert (loss.dtype, dlogits.dtype) == (jnp.float32, logits.dtype)
    assert_close(
        loss,
        oracles.cross_entropy(wide(logits), np.asarray(LABELS)),
        TOLERANCE["float32"],
        what="fp32 from the given logits",
    )
    probs = np.exp(wide(logits)) / np.exp(wide(logits)).sum(-1, keepdims=True)
    expected = (probs - np.eye(24)[np.asarray(LABELS)]) * wide(g)[..., None]
    assert_close(dlogits, expected, TOLERANCE[dtype])


def test_gradient_is_the_numeric_one():
    logits, g = inputs(jnp.float32)
    _, (dlogits,) = value_and_vjp(lambda x: softmax_cross_entropy(x, LABELS), (logits,), g)
    (expected,) = oracles.numeric_vjp(lambda x: oracles.cross_entropy(x, np.asarray(LABELS)), (wide(logits),), wide(g))
    assert_close(dlogits, expected, TOLERANCE["float32"])


def test_large_logits():
    logits = jnp.array([[1e4, 0.0, -1e4], [300.0, 299.0, 0.0]])
    loss, (dlogits,) = value_and_vjp(lambda x: softmax_cross_entropy(x, jnp.array([0, 1])), (logits,), jnp.ones(2))
    assert loss.tolist() == pytest.approx([0.0, 1.0 + np.log1p(np.exp(-1.0))])
    assert jnp.isfinite(dlogits).all()


@pytest.mark.costly("False--1", slow=("False--101",))
@pytest.mark.parametrize("label", [-1, -101, 24, 10_000])
@pytest.mark.parametrize("jit", [False, True])
def test_a_label_outside_gives_nan_and_spares_the_others(label, jit):
    logits, g = inputs(jnp.float32)
    loss, (dlogits,) = value_and_vjp(
        lambda x: softmax_cross_entropy(x, LABELS.at[1, 3].set(label)), (logits,), g, jit=jit
    )
    good_loss, (good_dlogits,) = value_and_vjp(lambda x: softmax_cross_entropy(x, LABELS), (logits,), g, jit=jit)
    bad = np.zeros((2, 8), bool)
    bad[1, 3] = True
    assert (np.isnan(loss) == bad).all()
    assert (np.isnan(dlogits) == bad[..., None]).all(), (
        "the gradient, too: a step must not go on as if nothing had happened"
    )
    assert_close(np.asarray(loss)[~bad], np.asarray(good_loss)[~bad], TOLERANCE["float32"])
    assert_close(np.asarray(dlogits)[~bad], np.asarray(good_dlogits)[~bad], TOLERANCE["float32"])


@pytest.mark.parametrize("label_dtype", ["int8", "int16", "uint32", "uint8"])
def test_other_integer_labels(label_dtype):
    logits, _ = inputs(jnp.float32)
    assert_close(
        softmax_cross_entropy(logits, LABELS.astype(label_dtype)),
        softmax_cross_entropy(logits, LABELS),
        TOLERANCE["float32"],
    )


def test_a_vocabulary_larger_than_the_label_type():
    """300 entries and int8 labels: positions must not wrap around."""
    logits, labels = draw("logits", (4, 300)), jnp.array([0, 5, 44, 127], jnp.int8)
    loss, (dlogits,) = value_and_vjp(lambda x: softmax_cross_entropy(x, labels), (logits,), jnp.ones(4))
    assert_close(loss, oracles.cross_entropy(wide(logits), np.asarray(labels, np.int64)), TOLERANCE["float32"])
    assert (np.asarray(dlogits) < 0).sum() == 4


def test_no_fp32_logits_are_kept_for_backward():
    """What is saved: the bf16 logits, the labels, and one fp32 number for each position."""
    logits, _ = inputs(jnp.bfloat16)
    _, vjp = jax.vjp(lambda x: softmax_cross_entropy(x, LABELS), logits)
    saved = [leaf for leaf in jax.tree.leaves(vjp) if hasattr(leaf, "dtype")]
    assert not [leaf.shape for leaf in saved if leaf.dtype == jnp.float32 and leaf.ndim == 3]
    assert sorted((leaf.dtype.name, leaf.shape) for leaf in saved) == [
        ("bfloat16", (2, 8, 24)),
        ("float32", (2, 8)),
        ("int32", (2, 8)),
    ]


def test_errors():
    logits, _ = inputs(jnp.float32)
    with pytest.raises(
        ValueError, match=r"labels \(2, 7\) must have the shape of the logits \(2, 8, 24\) without the last axis"
    ):
        softmax_cross_entropy(logits, LABELS[:, :7])
    with pytest.raises(ValueError, match="without the last axis"):
        softmax_cross_entropy(logits, LABELS[..., None])
    with pytest.raises(TypeError, match="labels must be integers, got float32"):
        softmax_cross_entropy(logits, LABELS.astype(jnp.float32))
    with pytest.raises(TypeError, match="labels must be integers, got bool"):
        softmax_cross_entropy(logits, LABELS > 3)
