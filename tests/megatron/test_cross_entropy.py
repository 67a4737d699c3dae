"""`vocab_parallel_cross_entropy` against Megatron's definition in fp64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.megatron import vocab_parallel_cross_entropy
from tests.support.numerics import TOLERANCE, assert_close, draw, wide

V = 8


@pytest.mark.costly("0.0")
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_other_entries_share_the_smoothed_part(smoothing: float) -> None:
    logits, labels = draw("logits", (3, 5, V)), np.arange(15).reshape(3, 5) % V
    loss, vjp = jax.vjp(lambda logits: vocab_parallel_cross_entropy(logits, jnp.asarray(labels), smoothing), logits)
    exponentials = np.exp(wide(logits))
    probabilities = exponentials / exponentials.sum(-1, keepdims=True)
    target = np.where(np.eye(V)[labels] > 0, 1.0 - smoothing, smoothing / (V - 1))
    assert_close(loss, -(target * np.log(probabilities)).sum(-1), TOLERANCE["float32"])
    assert_close(vjp(jnp.ones((3, 5)))[0], probabilities - target, TOLERANCE["float32"])


def test_what_is_refused() -> None:
    logits, labels = jnp.zeros((2, V)), jnp.zeros(2, jnp.int32)
    with pytest.raises(TypeError, match="tp_group must be None or the mesh axis 'tensor', got 'tp'"):
        vocab_parallel_cross_entropy(logits, labels, tp_group="tp")
    with pytest.raises(ValueError, match=rf"label_smoothing must be in \[0, {V - 1}/{V}\), .* got 0.99"):
        vocab_parallel_cross_entropy(logits, labels, 0.99)
