"""Given the same logits, many of which are equal, the router chooses and keeps what the oracle does: none differs.

The router's kernel is the identity and its input are logits that are multiples of 1/4, so that both see the same.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import RouterOptions
from jax_te.layers import Router
from tests.support.moe.options import MoEOptions
from tests.support.moe.router import RouterState, route

S, B, E = 128, 2, 8
CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "pre-softmax": {"pre_softmax": True, "topk": 3},
    "groups of logits": {"num_groups": 4, "group_topk": 2, "topk": 4},
    "groups of sigmoids, biased": {
        "score_function": "sigmoid",
        "num_groups": 2,
        "group_topk": 1,
        "enable_expert_bias": True,
    },
    "sqrtsoftplus, biased": {"score_function": "sqrtsoftplus", "enable_expert_bias": True, "topk": 3},
    "capacity by probabilities": {"expert_capacity_factor": 0.5},
    "capacity by probabilities of sigmoids": {"score_function": "sigmoid", "expert_capacity_factor": 0.75},
    "capacity by position": {"expert_capacity_factor": 0.5, "token_drop_policy": "position"},
    "sinkhorn": {"load_balancing_type": "sinkhorn"},
    "quantiles": {"load_balancing_type": "quantile_balancing", "topk": 1, "pre_softmax": True},
}
FIELDS = {"expert_capacity_factor", "token_drop_policy"}


def as_megatrons(name: str) -> str:
    return f"moe_{name}" if name in FIELDS else f"moe_router_{name}"


@pytest.mark.costly("softmax")
@pytest.mark.parametrize("name", CASES)
def test_equal_logits(name: str) -> None:
    given = CASES[name]
    rng = np.random.default_rng(0)
    # Above 0: the sigmoids of opposite logits add up to 1, which fp32 and fp64 round to different ties of groups.
    logits = rng.integers(1, 9, (S * B, E)) / 4
    bias = np.round(rng.normal(size=E), 1)
    bias[5] = bias[2]

    router = Router(E, RouterOptions(num_experts=E, **given), rngs=nnx.Rngs(0))
    router.kernel.set_value(jnp.eye(E))
    if router.expert_bias is not None:
        router.expert_bias.set_value(jnp.asarray(bias, jnp.float32))
    x = jnp.asarray(logits.reshape(S, B, E).swapaxes(0, 1), jnp.float32)
    found = nnx.jit(lambda router, x: router(x))(router, x)

    options = MoEOptions(
        num_moe_experts=E,
        hidden_size=E,
        moe_ffn_hidden_size=1,
        **{as_megatrons(option): value for option, value in given.items()},
    )
    state = RouterState(expert_bias=bias.astype(np.float32).astype(float), beta=np.zeros(E), global_counts=np.zeros(E))
    expected = route(logits, options, state)
    experts, kept = (
        None if value is None else np.asarray(value).swapaxes(0, 1).reshape(S * B, -1)
        for value in (found.experts, found.kept)
    )
    np.testing.assert_array_equal(experts, expected.chosen)
    if options.capacity(S * B) is not None:
        assert kept is not None
        wanted = np.take_along_axis(expected.kept, experts, axis=1)
        assert 0 < wanted.sum() < wanted.size
        np.testing.assert_array_equal(kept, wanted)
    rows = np.sort(logits, axis=1)
    assert (np.diff(rows, axis=1) == 0).any(1).mean() > 0.9  # most tokens have equal logits
