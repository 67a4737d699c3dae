"""The optimizer composed from optax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.training import adamw_with_schedule, learning_rate_schedule, weight_decay_mask


def test_schedule_warms_up_and_decays_to_a_fraction():
    schedule = learning_rate_schedule(2.0, total_steps=100, warmup_steps=10, final_fraction=0.25)
    rates = [float(schedule(count)) for count in range(120)]
    np.testing.assert_allclose(rates[:11], np.arange(11) / 5, rtol=1e-6)
    np.testing.assert_allclose(rates[55], 0.5 + 0.75, rtol=1e-6)
    np.testing.assert_allclose(rates[100:], 0.5, rtol=1e-6)
    assert np.all(np.diff(rates[10:101]) < 0)


def test_no_warm_up_begins_at_the_top():
    assert float(learning_rate_schedule(3.0, total_steps=5)(0)) == 3.0


def test_only_matrices_decay():
    """In a Flax state, too, where names lie under the Variables."""
    params = nnx.State(
        {
            "layers": {0: {"kernel": nnx.Param(jnp.ones((2, 3, 4))), "bias": nnx.Param(jnp.ones((3, 4)))}},
            "norm": {"scale": nnx.Param(jnp.ones(4)), "ln_bias": nnx.Param(jnp.ones(4))},
            "embedding": nnx.Param(jnp.ones((8, 4))),
        }
    )
    decayed = nnx.to_pure_dict(weight_decay_mask(params))
    assert decayed["layers"][0] == {"bias": False, "kernel": True}
    assert decayed["norm"] == {"ln_bias": False, "scale": False}
    assert decayed["embedding"] is True


def test_weight_decay_and_clipping():
    params = {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.full((2,), 2.0)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    tx = adamw_with_schedule(learning_rate_schedule(0.5, total_steps=10), weight_decay=0.1)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = tx.update(zeros, tx.init(params), params)
    np.testing.assert_allclose(updates["kernel"], -0.5 * 0.1 * 2.0, rtol=1e-6)
    np.testing.assert_array_equal(updates["bias"], 0.0)

    grads = jax.tree.map(lambda leaf: 100.0 * leaf, params)
    with jax.numpy_dtype_promotion("standard"):
        _, state = tx.update(grads, tx.init(params), params)
    clipped = state[1][0].mu
    np.testing.assert_allclose(float(optax.tree.norm(clipped)), 0.1, rtol=1e-5)  # (1 - b1) times the norm of 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be > 0"),
        ({"warmup_steps": 10}, r"warmup_steps must be in \[0, total_steps\)"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"final_fraction": 1.5}, "final_fraction"),
    ],
)
def test_options_outside_their_range(options, match):
    with pytest.raises(ValueError, match=match):
        learning_rate_schedule(**{"learning_rate": 0.1, "total_steps": 10, **options})
