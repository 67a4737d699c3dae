"""Losses of a router, against sums over tokens in fp64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops.moe import losses
from tests.ops.moe.test_routing import order, scores_of
from tests.support.numerics import TOLERANCE, assert_close, draw, wide

B, S, E, K = 3, 8, 4, 2
LOGITS = draw("logits", (B, S, E))
COUNTED = jnp.asarray(np.random.default_rng(1).random((B, S)) < 0.7)


def parts(logits, function, counted):
    """Sums of scores and counts of one group of tokens, and its number of tokens."""
    total, counts = np.zeros(E), np.zeros(E)
    for row, counts_in in zip(logits, counted, strict=True):
        if counts_in:
            scores = scores_of(row, function)
            scores = scores / scores.sum()
            total += scores
            counts[order(scores, K)] += 1
    return total, counts, counted.sum()


def balance(total, counts, tokens):
    return E / (K * tokens**2) * np.sum(total * counts)


@pytest.mark.costly("softmax-False", slow=("softmax-True",))
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_balance_losses(function, masked):
    counted = COUNTED if masked else None
    mask = np.asarray(COUNTED) if masked else np.ones((B, S), bool)
    scores, experts = losses.balance_scores(LOGITS, K, function, counted)
    flat = lambda x: None if x is None else x.reshape(1, B * S, *x.shape[2:])  # noqa: E731
    whole = parts(wide(LOGITS).reshape(-1, E), function, mask.reshape(-1))
    each = [parts(*pair) for pair in zip(wide(LOGITS), [function] * B, mask, strict=True)]
    mean = np.mean([tokens for _, _, tokens in each])
    assert_close(losses.aux_loss(flat(scores), flat(experts), flat(counted)), balance(*whole), TOLERANCE["float32"])
    assert_close(
        losses.sequence_aux_loss(scores, experts, counted),
        np.mean([balance(total, counts, mean) for total, counts, _ in each]),
        TOLERANCE["float32"],
    )
    grouped = losses.aux_loss(scores, experts, counted)
    assert_close(grouped, np.mean([balance(*one) for one in each]), TOLERANCE["float32"])
    earlier = jnp.array([3.0, 1.0, 7.0, 5.0, 2.0])
    loss, added = losses.global_aux_loss(
        flat(scores)[0], flat(experts)[0], earlier, None if counted is None else flat(counted)[0]
    )
    np.testing.assert_array_equal(added, [*whole[1], 1.0])
    assert_close(loss, balance(whole[0], (wide(earlier)[:-1] + whole[1]) / 3, whole[2]), TOLERANCE["float32"])


@pytest.mark.parametrize("masked", [False, True])
def test_z_loss(masked):
    mask = np.asarray(COUNTED) if masked else np.ones((B, S), bool)
    squares = np.log(np.exp(wide(LOGITS)).sum(-1)) ** 2
    got = losses.z_loss(LOGITS.reshape(1, -1, E), COUNTED.reshape(1, -1) if masked else None)
    assert_close(got, squares[mask].mean(), TOLERANCE["float32"])


@pytest.mark.costly
def test_padding_alone_has_no_loss():
    none = jnp.zeros((1, S), bool)
    scores, experts = losses.balance_scores(LOGITS[:1], K, "softmax", none)
    for loss in (losses.aux_loss, losses.sequence_aux_loss):
        assert loss(scores, experts, none).item() == 0.0
    assert losses.z_loss(LOGITS[:1], none).item() == 0.0
    assert np.isfinite(jax.grad(lambda x: losses.z_loss(x, none))(LOGITS[:1])).all()


def test_padding_may_be_nan():
    logits = jnp.where(COUNTED[..., None], LOGITS, jnp.nan)
    assert np.isfinite(losses.z_loss(logits, COUNTED))
    scores, experts = losses.balance_scores(logits, K, "softmax", COUNTED)
    assert np.isfinite(losses.aux_loss(scores, experts, COUNTED))


def test_a_loss_is_in_gradients_alone():
    def f(w, scale):
        return jnp.sum(losses.in_gradients(jnp.sin(w), jnp.sum(w**2), scale))

    w = draw("w", (5,))
    assert f(w, 4.0) == jnp.sum(jnp.sin(w))
    np.testing.assert_allclose(jax.grad(f)(w, 4.0), jnp.cos(w) + 8.0 * w, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(f)(w.astype(jnp.float32), jnp.float32(0.5)), jnp.cos(w) + w, rtol=1e-6)
    recomputed = jax.grad(lambda w: jax.checkpoint(f)(w, 4.0))(w)
    np.testing.assert_allclose(recomputed, jnp.cos(w) + 8.0 * w, rtol=1e-6)
