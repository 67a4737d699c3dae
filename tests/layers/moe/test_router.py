"""The router as a layer: what it does beside `jax_te.ops.moe`, whose functions have tests of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import RouterOptions
from jax_te.config.experts import LOAD_BALANCING_TYPES
from jax_te.layers import Router
from jax_te.layers.moe.aux_loss_scale import aux_losses_scaled
from jax_te.ops.moe import losses, routing
from jax_te.quantize import QuantizerState, counting_of, frozen_scales
from tests.support.numerics import draw, without_type_checker

B, S, H, E = 4, 6, 16, 8
X = draw("x", (B, S, H))
MASK = jnp.asarray(np.random.default_rng(0).random((B, S)) < 0.3)


def make(**options):
    bias = options.pop("bias", False)
    return Router(H, RouterOptions(num_experts=E, **options), bias=bias, rngs=nnx.Rngs(0))


def logits_of(router, x=X):
    return jnp.matmul(x, router.kernel[...], precision="highest")


def gradients(router, x=X, g=None, **call):
    """Gradients of parameters and states, of ``sum(probs * g)``."""
    g = draw("g", (B, S, router.options.topk)) if g is None else g
    wrt = nnx.DiffState(0, (nnx.Param, QuantizerState))
    gradient = nnx.grad(lambda router: jnp.sum(router(x, **call).probs * g), argnums=wrt)
    return nnx.to_pure_dict(nnx.jit(gradient)(router))


@pytest.mark.costly
def test_a_call_is_the_functions():
    router = make(bias=True, score_function="sigmoid", topk=3)
    got = router(X)
    logits = logits_of(router) + router.bias[...][None, None]
    want = routing.route(logits.reshape(-1, E), router.options)
    np.testing.assert_array_equal(got.experts.reshape(-1, 3), want.experts)
    np.testing.assert_array_equal(got.probs.reshape(-1, 3), want.probs)
    assert got.kept is None
    assert make()(X[0]).probs.shape == (S, 2)


def test_probabilities_are_fp32_and_the_gemm_in_the_dtype_that_was_asked_for():
    x = X.astype(jnp.bfloat16)
    low, high = make(), make(dtype="fp32")
    assert low(x).probs.dtype == high(x).probs.dtype == jnp.float32
    want = jnp.matmul(x.astype(jnp.float32), high.kernel[...], precision="highest")
    np.testing.assert_array_equal(high(x).probs.reshape(-1, 2), routing.route(want.reshape(-1, E), high.options).probs)
    assert np.any(np.asarray(low(x).probs) != np.asarray(high(x).probs))


@pytest.mark.costly
def test_fp64_needs_the_64_bit_mode():
    with pytest.raises(ValueError, match=r"moe_router_dtype.*jax_enable_x64"):
        make(dtype="fp64")
    with jax.enable_x64(True):
        routed = make(dtype="fp64", aux_loss_coeff=0.1, z_loss_coeff=0.1)(X)
        assert routed.probs.dtype == jnp.float64


def test_position_is_that_in_the_sequence():
    """Megatron's tokens are sorted by position, then by sequence."""
    router = make(expert_capacity_factor=0.5, token_drop_policy="position")
    kept = np.asarray(router(X).kept)
    experts, capacity, used = np.asarray(router(X).experts), router.capacity(B * S), np.zeros(E, int)
    assert capacity == 3
    for s in range(S):
        for b in range(B):
            for slot in range(2):
                e = experts[b, s, slot]
                assert kept[b, s, slot] == (used[e] < capacity)
                used[e] += 1


ALL = {
    "load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
    "aux_loss_coeff": (0.1, 0.2, 0.3),
    "z_loss_coeff": 0.05,
}


@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "padded"])
def test_losses_are_in_gradients_alone(mask):
    router, plain = make(**ALL), make()
    found = router(X, padding_mask=mask)
    np.testing.assert_array_equal(found.probs, plain(X).probs)
    counted = None if mask is None else ~mask

    def total(kernel):
        logits = jnp.matmul(X, kernel, precision="highest")
        one = lambda x: None if x is None else x.reshape(1, B * S, *x.shape[2:])  # noqa: E731
        scores, experts = losses.balance_scores(logits, 2, "softmax", counted)
        terms = {
            "aux_loss": losses.aux_loss(one(scores), one(experts), one(counted)),
            "seq_aux_loss": losses.sequence_aux_loss(scores, experts, counted),
            "z_loss": losses.z_loss(one(logits), one(counted)),
        }
        terms["global_aux_loss"] = terms["aux_loss"]  # the first microbatch
        loss = 0.1 * terms["aux_loss"] + 0.2 * terms["seq_aux_loss"] + 0.3 * terms["global_aux_loss"]
        return loss + 0.05 * terms["z_loss"], terms

    extra, terms = jax.jit(jax.grad(total, has_aux=True))(router.kernel[...])
    for name, value in terms.items():
        np.testing.assert_allclose(found.losses[name], value, rtol=1e-6)
    with_losses, without = gradients(router, padding_mask=mask)["kernel"], gradients(plain)["kernel"]
    np.testing.assert_allclose(with_losses, without + extra, rtol=1e-5, atol=1e-6)


def test_a_share_of_the_losses_that_balance_the_load():
    """As of a router that runs twice. The z-loss is no such loss."""
    zeros = jnp.zeros((B, S, 2))
    for options, factor in (({"aux_loss_coeff": 0.1}, 0.5), ({"z_loss_coeff": 0.1}, 1.0)):
        router = make(**options)
        whole = gradients(router, g=zeros)["kernel"]
        router.balance_share = 0.5
        np.testing.assert_allclose(gradients(router, g=zeros)["kernel"], factor * whole, rtol=1e-6)
        assert np.any(whole)


@pytest.mark.costly
def test_no_losses_and_no_counts_in_evaluation():
    router, plain = make(**ALL, score_function="sigmoid", enable_expert_bias=True), make(score_function="sigmoid")
    router.eval()
    assert router(X).losses == {}
    found = gradients(router)
    np.testing.assert_array_equal(found["kernel"], gradients(plain)["kernel"])
    assert not np.any(found["expert_bias"])
    # And nothing is asked for that a derivative might leave out.
    nnx.grad(lambda router: jnp.sum(router(X).probs))(router)


@pytest.mark.slow
def test_groups_are_megatrons_data_ranks():
    """The mean over ranks of each rank's losses; one group's numbers differ."""
    options = {"load_balancing_type": ("aux_loss", "seq_aux_loss"), "aux_loss_coeff": (0.1, 0.1), "z_loss_coeff": 0.1}
    ranks, one = make(**options, aux_loss_groups=2), make(**options)
    each = [one(part, padding_mask=mask).losses for part, mask in ((X[:2], MASK[:2]), (X[2:], MASK[2:]))]
    found = ranks(X, padding_mask=MASK).losses
    for name, value in found.items():
        np.testing.assert_allclose(value, (each[0][name] + each[1][name]) / 2, rtol=1e-6)
    assert abs(found["aux_loss"] - one(X, padding_mask=MASK).losses["aux_loss"]) > 1e-4
    with pytest.raises(ValueError, match="does not divide into aux_loss_groups=3"):
        make(aux_loss_groups=3, z_loss_coeff=0.1)(X)


def test_counts_are_the_states_gradients():
    router = make(score_function="sigmoid", enable_expert_bias=True, expert_capacity_factor=0.75)
    found, routed = gradients(router, padding_mask=MASK), router(X)
    within = np.asarray(routed.kept) & ~np.asarray(MASK)[..., None]
    load = np.bincount(np.asarray(routed.experts)[within], minlength=E)
    assert not np.asarray(routed.kept).all()
    np.testing.assert_array_equal(found["expert_bias"], load)
    dropped = (~np.asarray(routed.kept) & ~np.asarray(MASK)[..., None]).sum()
    chosen = 2 * (~np.asarray(MASK)).sum()
    np.testing.assert_array_equal(found["last_step"], [*load, 1.0, chosen, dropped])


def test_biases_of_a_frozen_router_stay_as_they_are():
    biased = make(score_function="sigmoid", enable_expert_bias=True, bias_update_rate=0.5)
    by_quantiles = make(load_balancing_type="quantile_balancing")
    for router, name in ((biased, "expert_bias"), (by_quantiles, "quantile_bias")):
        state = getattr(router, name)
        assert router.has_moving_bias
        state.set_value(draw(name, state.shape))
        rule, counts = counting_of(state), gradients(router)
        assert np.any(rule.advance(state.get_value(), counts[name]) != state.get_value())
        router.frozen = True
        assert not router.has_moving_bias
        frozen = gradients(router)
        np.testing.assert_array_equal(rule.advance(state.get_value(), frozen[name]), state.get_value())
        np.testing.assert_array_equal(frozen["last_step"], counts["last_step"])
        assert not np.any(frozen["kernel"])


def test_a_recomputed_router_counts_once():
    router = make(score_function="sigmoid", enable_expert_bias=True)

    def loss(router, x):
        return jnp.sum(jax.checkpoint(lambda router, x: router(x).probs ** 2)(router, x))

    wrt = nnx.DiffState(0, (nnx.Param, QuantizerState))
    found = nnx.to_pure_dict(nnx.grad(loss, argnums=wrt)(router, X))
    assert np.sum(found["expert_bias"]) == 2 * B * S


@pytest.mark.costly
def test_quantiles_are_the_states_gradient():
    router = make(load_balancing_type="quantile_balancing")
    found = gradients(router)["quantile_bias"]
    want = routing.expert_quantiles(logits_of(router).reshape(-1, E), jnp.zeros(E), 2)
    np.testing.assert_array_equal(found, [*want, 1.0])
    with pytest.raises(ValueError, match="padding_mask does not go with"):
        router(X, padding_mask=MASK)
    router.eval()
    assert router(X[:, :1]).experts.shape == (B, 1, 2)  # of any number of tokens


@pytest.mark.slow
def test_a_loop_that_leaves_counts_out_is_told():
    from jax_te.errors import QuantizerStateError

    for options in (
        {"score_function": "sigmoid", "enable_expert_bias": True},
        {"load_balancing_type": "quantile_balancing"},
        {"load_balancing_type": "global_aux_loss", "aux_loss_coeff": 0.1},
    ):
        router = make(**options)
        with pytest.raises(QuantizerStateError, match="leaves its state out"):
            nnx.grad(lambda router: jnp.sum(router(X).probs))(router)
        with frozen_scales():
            nnx.grad(lambda router: jnp.sum(router(X).probs))(router)
    nnx.grad(lambda router: jnp.sum(router(X).probs))(make())  # nothing there but metrics


def test_jitter_needs_a_key_in_training_alone():
    router = make(input_jitter_eps=0.1)
    with pytest.raises(ValueError, match=r"input_jitter_eps=0\.1"):
        router(X)
    one, two = (router(X, key=jax.random.key(seed)).probs for seed in (0, 1))
    assert np.any(np.asarray(one) != np.asarray(two))
    router.eval()
    np.testing.assert_array_equal(router(X).probs, make()(X).probs)


@pytest.mark.costly
def test_choices_at_random():
    router = make(force_load_balancing=True)
    load = routing.tokens_per_expert(router(jnp.ones((64, 64, H)), key=jax.random.key(0)).experts.reshape(-1, 2), E)
    assert load.max() / load.mean() < 1.2
    assert np.any(gradients(router, key=jax.random.key(0))["kernel"])
    same = make(force_biased=-100.0)  # the bias decides, and it is the layer's own
    first = same(X, key=jax.random.key(0)).experts
    np.testing.assert_array_equal(np.sort(first), np.broadcast_to(np.sort(first[0, 0]), first.shape))
    np.testing.assert_array_equal(np.sort(first), np.sort(same(X, key=jax.random.key(1)).experts))
    other = make(force_biased=100.0)
    assert len({tuple(np.sort(other(X, key=jax.random.key(i)).experts[0, 0])) for i in range(6)}) > 1


def test_choices_at_random_need_a_key_in_training_alone():
    for options in ({"force_load_balancing": True}, {"force_biased": -1.0}):
        router = make(**options)
        with pytest.raises(ValueError, match="has no key to draw from"):
            router(X)
        router.eval()
        np.testing.assert_array_equal(router(X).experts, router(X).experts)


def test_the_scale_of_losses_is_restored_behind_an_error():
    router = make()
    with pytest.raises(RuntimeError, match="inside"), aux_losses_scaled(router, 2.0):
        raise RuntimeError("inside")
    assert router.scaler_scale is None


def test_a_choice_that_is_given():
    for options in ({}, {"load_balancing_type": "sinkhorn"}, {"load_balancing_type": "quantile_balancing"}):
        router = make(**options)
        given = router(draw("other", X.shape)).experts
        np.testing.assert_array_equal(router(X, experts=given).experts, given)


@pytest.mark.parametrize(
    "options",
    [
        *({"load_balancing_type": kind} for kind in LOAD_BALANCING_TYPES),
        {"load_balancing_type": "sinkhorn", "topk": 1},
        {"load_balancing_type": "quantile_balancing", "topk": 1, "pre_softmax": True},
        {"score_function": "sigmoid", "enable_expert_bias": True},
        {"num_groups": 4, "group_topk": 2},
    ],
    ids=str,
)
def test_a_replay_of_the_own_choice_changes_nothing(options):
    """The rule of probabilities is that of the load balancing, and not of who chose."""
    router = make(**options)
    for bias in (router.expert_bias, router.quantile_bias):
        if bias is not None:  # biases that change the choice
            bias.set_value(2.0 * draw("bias", bias.get_value().shape))
    own = router(X)
    replayed = router(X, experts=own.experts)
    np.testing.assert_array_equal(replayed.experts, own.experts)
    np.testing.assert_array_equal(replayed.probs, own.probs)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"x": jnp.ones((2, 3, 4))}, r"must be \[b, s, 16\]"),
        ({"x": X[:, :0]}, r"one token or more, got shape \(4, 0, 16\)"),
        ({"x": X, "padding_mask": jnp.ones((S, B), bool)}, r"padding_mask must be \[4, 6\]"),
        ({"x": X, "padding_mask": jnp.ones((B, S))}, "padding_mask must be bool"),
        ({"x": X, "experts": jnp.zeros((B, S, 3), jnp.int32)}, "experts must be"),
        ({"x": X, "experts": jnp.zeros((B, 2 * S, 1), jnp.int32)}, r"experts must be \[4, 6, 2\]"),
        ({"x": X, "experts": jnp.zeros((B, S, 2))}, "experts must be integers"),
    ],
)
def test_bad_calls(call, words):
    with without_type_checker(), pytest.raises((ValueError, TypeError), match=words):
        make()(**call)


UNUSED = {
    "sinkhorn": [
        {"score_function": "sigmoid"},
        {"pre_softmax": True},
        {"topk_scaling_factor": 2.0},
        {"num_groups": 2, "group_topk": 1},
        {"enable_expert_bias": True},
    ],
    "quantile_balancing": [
        {"num_groups": 2, "group_topk": 1},
        {"enable_expert_bias": True, "score_function": "sigmoid"},
    ],
}
"""Options that change numbers, and that a method of load balancing does not read."""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topk": 9}, "topk 9 is more than the num_experts 8"),
        ({"topk": 0}, "topk"),
        ({"topk": 1}, "pre_softmax=True"),
        ({"num_groups": 3, "group_topk": 1}, "does not divide"),
        ({"num_groups": 2}, "both"),
        ({"group_topk": 2}, "both"),
        ({"num_groups": 2, "group_topk": 3}, "more than the num_groups"),
        ({"num_groups": 4, "group_topk": 3}, "more than topk"),
        ({"group_score_topk": 1}, "group_score_topk=1 is for groups"),
        ({"num_groups": 4, "group_topk": 2, "group_score_topk": 3}, r"group_score_topk must be in \[1, 2\]"),
        ({"topk": 3, "num_groups": 4, "group_topk": 1}, "do not fit"),
        ({"topk_scaling_factor": 0.0}, "topk_scaling_factor"),
        ({"enable_expert_bias": True}, "sigmoid"),
        ({"load_balancing_type": "loss"}, "load_balancing_type must be one of"),
        ({"load_balancing_type": ("sinkhorn",), "aux_loss_coeff": (0.0,)}, "load_balancing_type must be one of"),
        ({"load_balancing_type": ("aux_loss",), "aux_loss_coeff": 0.1}, "a coefficient for each"),
        ({"load_balancing_type": "sinkhorn", "aux_loss_coeff": 0.1}, "has no loss under"),
        ({"load_balancing_type": ("aux_loss",) * 2, "aux_loss_coeff": (0.1, 0.1)}, "twice"),
        ({"aux_loss_coeff": -0.1}, "must be >= 0"),
        ({"z_loss_coeff": -0.1}, "z_loss_coeff must be >= 0"),
        ({"expert_capacity_factor": 0.0}, "drops every token"),
        ({"expert_capacity_factor": 1.0, "load_balancing_type": "sinkhorn"}, "leave one out"),
        ({"pad_expert_input_to_capacity": True}, "needs a capacity"),
        ({"input_jitter_eps": 1.0}, "input_jitter_eps"),
        ({"quantile_balancing_ema": 1.0}, "quantile_balancing_ema"),
        *(
            ({"load_balancing_type": kind, **option}, f"{next(iter(option))}=.* has no effect under .*{kind}")
            for kind, options in UNUSED.items()
            for option in options
        ),
    ],
)
def test_options_that_do_not_fit(options, words):
    with pytest.raises(ValueError, match=words):
        RouterOptions(num_experts=8, **options)


def test_a_capacity_below_zero_is_none():
    assert RouterOptions(num_experts=8, expert_capacity_factor=-1.0).expert_capacity_factor is None
