"""The MoE oracle itself: gradients against central differences, and numbers that can be computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.moe.experts import FUNCTIONS, MoEResult, moe_layer
from tests.support.moe.options import MoEOptions
from tests.support.moe.router import (
    RouterState,
    chosen_experts,
    quantiles,
    route,
    sinkhorn,
    top,
    updated_beta,
    updated_expert_bias,
)

T, E, H, F = 8, 4, 5, 3
PLAIN = MoEOptions(num_moe_experts=E, hidden_size=H, moe_ffn_hidden_size=F)
SWIGLU = {"activation_func": "silu", "gated_linear_unit": True}
EVERY_LOSS = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
    "moe_aux_loss_coeff": (0.5, 0.7, 0.9),
    "moe_z_loss_coeff": 0.3,
}
CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "pre-softmax, scaled, without biases": {
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": 2.5,
        "add_bias_linear": False,
    },
    "sigmoid, bias, groups": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
    },
    "sqrtsoftplus, k 3": {"moe_router_score_function": "sqrtsoftplus", "moe_router_topk": 3},
    "sigmoid, k 1, on input": {
        "moe_router_score_function": "sigmoid",
        "moe_router_topk": 1,
        "moe_apply_probs_on_input": True,
    },
    "all losses": EVERY_LOSS,
    "all losses of sigmoid": EVERY_LOSS | {"moe_router_score_function": "sigmoid"},
    "all losses of sqrtsoftplus, per token": EVERY_LOSS
    | {"moe_router_score_function": "sqrtsoftplus", "calculate_per_token_loss": True},
    "drops by probability": {"moe_expert_capacity_factor": 0.8},
    "drops by position": {"moe_expert_capacity_factor": 0.8, "moe_token_drop_policy": "position"},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_z_loss_coeff": 0.3},
    "sinkhorn, k 1": {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
    "quantile balancing": {"moe_router_load_balancing_type": "quantile_balancing"},
    "swiglu, shared experts with gate": SWIGLU
    | {"moe_shared_expert_intermediate_size": 4, "moe_shared_expert_gate": True, "add_bias_linear": False},
    "latent, shared": {"moe_latent_size": 3, "moe_shared_expert_intermediate_size": 4},
    "clamped": {
        "activation_func": "quick_gelu",
        "gated_linear_unit": True,
        "activation_func_clamp_value": 0.6,
        "glu_linear_offset": 1.0,
    },
    "quick_gelu": {"activation_func": "quick_gelu"},
    "squared_relu": {"activation_func": "squared_relu"},
    "relu, gated": {"activation_func": "relu", "gated_linear_unit": True},
    "jitter": {"moe_input_jitter_eps": 0.1},
}
VALID = np.array([True] * 6 + [False] + [True])
SEQUENCES = np.arange(T) % 2


def arrays(options: MoEOptions) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Parameters, input and output gradient."""
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape) for name, shape in options.shapes().items()}
    return params, rng.normal(size=(T, options.hidden_size)), rng.normal(size=(T, options.hidden_size))


def used_state() -> RouterState:
    rng = np.random.default_rng(1)
    bias, beta, counts = 0.3 * rng.normal(size=(3, E))
    return RouterState(expert_bias=bias, beta=beta, global_counts=np.abs(counts) * 10, global_steps=2)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_are_central_differences(name: str, padded: bool) -> None:
    options = replace(PLAIN, **CASES[name])
    params, x, g = arrays(options)
    noise = np.random.default_rng(2).uniform(0.9, 1.1, x.shape) if options.moe_input_jitter_eps else None
    extra = {"state": used_state(), "sequences": SEQUENCES, "noise": noise, "loss_scale": 3.0}
    extra["valid"] = VALID if padded else None

    def run(arrays_of: dict[str, np.ndarray]) -> MoEResult:
        rest = {key: value for key, value in arrays_of.items() if key != "x"}
        return moe_layer(options, rest, arrays_of["x"], g, **extra)

    def value(arrays_of: dict[str, np.ndarray]) -> float:
        result = run(arrays_of)
        counted = VALID.sum() if padded else T
        factor = counted if options.calculate_per_token_loss else 1.0
        return float((result.y * g).sum()) + 3.0 * factor * result.loss

    at = {"x": x, **params}
    base = run(at)
    gradients = {"x": base.dx, **base.gradients}
    assert gradients.keys() == at.keys()
    rng, step = np.random.default_rng(3), 1e-6
    for key, gradient in gradients.items():
        for _ in range(2):
            direction = rng.normal(size=gradient.shape)
            ends = [at | {key: at[key] + sign * step * direction} for sign in (1, -1)]
            assert all((run(end).routing.kept == base.routing.kept).all() for end in ends)
            numeric = (value(ends[0]) - value(ends[1])) / (2 * step)
            # The difference of two values of size 100 errs by 1e-14 / step, and a kink of relu may be on the way.
            np.testing.assert_allclose((gradient * direction).sum(), numeric, rtol=1e-6, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_slopes_of_activations(name: str) -> None:
    f, slope = FUNCTIONS[name]
    x = np.linspace(-4.0, 4.0, 100)
    np.testing.assert_allclose(slope(x), (f(x + 1e-6) - f(x - 1e-6)) / 2e-6, atol=1e-8)


def test_ties_go_to_the_lowest_index() -> None:
    assert top([1.0, 2.0, 2.0, 1.0, 2.0], 4) == [1, 2, 4, 0]
    zeros = np.zeros(4)
    assert chosen_experts(zeros, PLAIN) == [0, 1]
    grouped = replace(PLAIN, moe_router_num_groups=2, moe_router_group_topk=1)
    assert chosen_experts(np.array([0.0, 1.0, 1.0, 0.0]), grouped) == [1, 0]
    dropping = replace(PLAIN, moe_expert_capacity_factor=0.5)  # two rows for each expert
    kept = route(np.zeros((8, 4)), dropping, RouterState.fresh(4)).kept
    np.testing.assert_array_equal(kept[:, :2], (np.arange(8) < 2)[:, None].repeat(2, 1))


def test_groups_by_hand() -> None:
    """The score of a group is the sum of its best ``topk // group_topk`` scores, whatever a comment says of two."""
    row = np.array([5.0, 0.0, 3.0, 3.0])
    grouped = replace(PLAIN, moe_router_num_groups=2, moe_router_group_topk=1)
    assert chosen_experts(row, grouped) == [2, 3]
    assert chosen_experts(row, replace(grouped, moe_router_topk=1)) == [0]


def test_probabilities_by_hand() -> None:
    row = np.log(np.array([1.0, 2.0, 3.0, 4.0]))[None]
    fresh = RouterState.fresh(4)
    np.testing.assert_allclose(route(row, PLAIN, fresh).probs, [[0, 0, 3 / 7, 4 / 7]])
    pre = replace(PLAIN, moe_router_pre_softmax=True, moe_router_topk_scaling_factor=2.0)
    np.testing.assert_allclose(route(row, pre, fresh).probs, [[0, 0, 0.6, 0.8]])
    scores = np.array([1 / 2, 2 / 3, 3 / 4, 4 / 5])  # sigmoid(log n) = n / (n + 1)
    sigmoid = replace(PLAIN, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    biased = replace(fresh, expert_bias=np.array([1.0, 0.0, 0.0, 0.0]))
    expected = np.array([scores[0], 0, 0, scores[3]]) / (scores[0] + scores[3])
    np.testing.assert_allclose(route(row, sigmoid, biased).probs[0], expected)


def test_losses_by_hand() -> None:
    """Equal scores and equal counts give the coefficient; tokens that all choose one expert give more."""
    options = replace(PLAIN, moe_router_topk=1, moe_router_score_function="sigmoid")
    aux = replace(options, moe_aux_loss_coeff=0.01)
    logits = np.log(np.array([[1.0, 0.5, 0.5, 0.5]] * 4))  # scores 1/2, 1/3, 1/3, 1/3: a third of the sum is the first
    value = route(logits, aux, RouterState.fresh(4)).losses["aux_loss"]
    np.testing.assert_allclose(value, 0.01 * 4 / 3)
    sequences = np.array([0, 0, 1, 1])
    seq = replace(aux, moe_router_load_balancing_type="seq_aux_loss")
    np.testing.assert_allclose(
        route(logits, seq, RouterState.fresh(4), sequences=sequences).losses["seq_aux_loss"], value
    )
    averaged = replace(aux, moe_router_load_balancing_type="global_aux_loss")
    past = replace(RouterState.fresh(4), global_counts=np.array([0.0, 4.0, 0.0, 0.0]), global_steps=1)
    np.testing.assert_allclose(route(logits, averaged, past).losses["global_aux_loss"], 0.01 * (4 / 3 + 8 / 9) / 2)
    z = replace(options, moe_z_loss_coeff=0.1)
    np.testing.assert_allclose(route(logits, z, RouterState.fresh(4)).losses["z_loss"], 0.1 * np.log(2.5) ** 2)
    assert route(logits, z, RouterState.fresh(4), training=False).losses == {}


def test_padding_is_in_no_loss_and_no_count() -> None:
    options = replace(PLAIN, **EVERY_LOSS)
    logits = np.random.default_rng(0).normal(size=(6, 4))
    padded = np.concatenate([logits, np.full((3, 4), 7.0)])
    valid = np.arange(9) < 6
    whole, part = route(logits, options, used_state()), route(padded, options, used_state(), valid=valid)
    assert whole.losses == pytest.approx(part.losses, rel=1e-13)
    np.testing.assert_array_equal(whole.tokens_per_expert, part.tokens_per_expert)
    np.testing.assert_array_equal(whole.global_counts, part.global_counts)
    assert not part.loss_dlogits[6:].any()


def test_updates_of_biases_by_hand() -> None:
    bias = updated_expert_bias(np.array([0.0, 0.5, 0.0]), np.array([3, 1, 2]), 0.25)
    np.testing.assert_array_equal(bias, [-0.25, 0.75, 0.0])
    beta = updated_beta(np.array([1.0, -1.0]), [np.array([2.0, 0.0]), np.array([0.0, 4.0])], 0.5)
    np.testing.assert_array_equal(beta, [0.25, -0.25])


def test_sinkhorn_gives_equal_sums() -> None:
    scaled = sinkhorn(np.random.default_rng(0).normal(size=(12, 4)))
    np.testing.assert_allclose(scaled.sum(0), 1 / 4, rtol=1e-6)
    np.testing.assert_allclose(scaled.sum(1), 1 / 12, rtol=1e-2)


def test_quantiles_balance_the_load() -> None:
    """Repeated on the same tokens, the bias comes to give each expert its share."""
    logits = np.random.default_rng(0).normal(size=(32, 4)) + np.array([2.0, 0.0, 0.0, -1.0])
    options = replace(PLAIN, moe_router_load_balancing_type="quantile_balancing")
    state = RouterState.fresh(4)
    before = route(logits, options, state).routed.sum(0)
    for _ in range(20):
        state = replace(state, beta=updated_beta(state.beta, [quantiles(logits, 2, state.beta)], 0.0))
    after = route(logits, options, state).routed.sum(0)
    assert before.max() > 24
    assert after.max() <= 18


def test_forced_logits_choose_and_pass_their_gradient_on() -> None:
    options = replace(PLAIN, moe_router_force_load_balancing=True)
    params, x, g = arrays(options)
    forced = np.random.default_rng(5).normal(size=(T, E))
    result = moe_layer(options, params, x, g, forced_logits=forced)
    assert result.routing.chosen == route(forced, options, RouterState.fresh(E)).chosen
    np.testing.assert_allclose(result.gradients["router.bias"].sum(), 0.0, atol=1e-12)
    assert np.abs(result.gradients["router.weight"]).max() > 0.01


def test_replayed_experts_take_the_place_of_the_choice() -> None:
    params, x, g = arrays(PLAIN)
    replay = [[3, 0]] * T
    result = moe_layer(PLAIN, params, x, g, replay=replay)
    np.testing.assert_array_equal(result.routing.routed, [[True, False, False, True]] * T)
