"""The choice of experts and their probabilities, against loops over tokens in fp64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.config import RouterOptions
from jax_te.ops.moe import routing
from jax_te.ops.moe.routing import Assignment
from tests.support.numerics import TOLERANCE, assert_close, draw, wide


def order(scores, count):
    """Indices of the largest scores, of equal ones the lowest first."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def scores_of(row, function):
    if function == "softmax":
        exp = np.exp(row - row.max())
        return exp / exp.sum()
    return 1 / (1 + np.exp(-row)) if function == "sigmoid" else np.sqrt(np.log1p(np.exp(row)))


def expected(logits, spec, bias=None, given=None):
    probs, experts = [], []
    for t, row in enumerate(wide(logits)):
        scores = (
            row if spec.score_function == "softmax" and not spec.pre_softmax else scores_of(row, spec.score_function)
        )
        ranked = scores.copy() if bias is None else scores + wide(bias)
        if spec.num_groups is not None:
            groups = ranked.reshape(spec.num_groups, -1)
            counted = spec.group_score_topk or spec.topk // spec.group_topk
            best = [sum(sorted(group, reverse=True)[:counted]) for group in groups]
            unused = [g for g in range(spec.num_groups) if g not in order(best, spec.group_topk)]
            groups[unused] = -np.inf
        chosen = order(ranked, spec.topk) if given is None else list(np.asarray(given)[t])
        p = scores[chosen]
        if spec.score_function == "softmax":
            p = p if spec.pre_softmax else scores_of(p, "softmax")
        elif spec.topk > 1:
            p = p / (p.sum() + 1e-20)
        probs.append(p * (spec.topk_scaling_factor or 1.0))
        experts.append(chosen)
    return np.array(probs), np.array(experts)


LOGITS = draw("logits", (24, 8), scale=2.0)
TIED = jnp.round(LOGITS)  # many equal logits

SPECS = [
    {"topk": 2},
    {"topk": 8, "topk_scaling_factor": 2.5},
    {"topk": 1, "pre_softmax": True},
    {"topk": 3, "pre_softmax": True, "topk_scaling_factor": 0.5},
    {"topk": 1, "score_function": "sigmoid"},
    {"topk": 4, "score_function": "sigmoid", "num_groups": 4, "group_topk": 2},
    {"topk": 2, "score_function": "sqrtsoftplus"},
    {"topk": 3, "num_groups": 2, "group_topk": 1},
    {"topk": 4, "pre_softmax": True, "num_groups": 4, "group_topk": 3},
    {"topk": 4, "pre_softmax": True, "num_groups": 4, "group_topk": 2, "group_score_topk": 1},
    {"topk": 1, "score_function": "sigmoid", "num_groups": 4, "group_topk": 2, "group_score_topk": 2},
]


@pytest.mark.costly(
    "{'topk': 4, 'score_function': 'sigmoid', 'num_groups': 4, 'group_topk': 2}-different",
    slow=("{'topk': 3, 'num_groups': 2, 'group_topk': 1}-different",),
)
@pytest.mark.parametrize("logits", [LOGITS, TIED], ids=["different", "tied"])
@pytest.mark.parametrize("options", SPECS, ids=str)
def test_experts_and_probabilities(options, logits):
    spec = RouterOptions(num_experts=8, **options)
    probs, experts = routing.route(logits, spec)
    want_probs, want_experts = expected(logits, spec)
    np.testing.assert_array_equal(experts, want_experts)
    assert_close(probs, want_probs, TOLERANCE["float32"])


@pytest.mark.parametrize("function", ["sigmoid", "sqrtsoftplus"])
def test_a_bias_chooses_and_is_in_no_probability(function):
    spec, bias = RouterOptions(num_experts=8, score_function=function), draw("bias", (8,))
    probs, experts = routing.route(LOGITS, spec, expert_bias=bias)
    want_probs, want_experts = expected(LOGITS, spec, bias)
    np.testing.assert_array_equal(experts, want_experts)
    assert_close(probs, want_probs, TOLERANCE["float32"])
    assert (np.asarray(experts) != np.asarray(routing.route(LOGITS, spec).experts)).any()
    dbias = jax.grad(lambda bias: jnp.sum(routing.route(LOGITS, spec, expert_bias=bias).probs ** 2))(bias)
    assert not np.any(dbias)


def test_a_choice_made_elsewhere():
    spec = RouterOptions(num_experts=8, topk=2, score_function="sigmoid")
    given = jnp.asarray(np.random.default_rng(0).permuted(np.tile(np.arange(8), (24, 1)), axis=1)[:, :2], jnp.int32)
    probs, experts = routing.route(LOGITS, spec, experts=given)
    np.testing.assert_array_equal(experts, given)
    assert_close(probs, expected(LOGITS, spec, given=given)[0], TOLERANCE["float32"])


@pytest.mark.costly(
    "{'topk': 2}",
    slow=(
        "{'topk': 4, 'score_function': 'sigmoid', 'num_groups': 4, 'group_topk': 2}",
        "{'topk': 8, 'topk_scaling_factor': 2.5}",
        "{'topk': 2, 'score_function': 'sqrtsoftplus'}",
        "{'topk': 1, 'pre_softmax': True}",
    ),
)
@pytest.mark.parametrize("options", SPECS, ids=str)
def test_gradients_are_numeric_ones(options):
    spec, weights = RouterOptions(num_experts=8, **options), wide(draw("weights", (24, options["topk"])))
    f = lambda logits: jnp.sum(routing.route(logits, spec).probs * jnp.asarray(weights, jnp.float32))  # noqa: E731
    direction = wide(draw("direction", (24, 8)))
    step, x = 1e-4, wide(LOGITS)
    # The choice is that of the middle: it does not change along so short a way.
    fixed = expected(LOGITS, spec)[1]
    ends = [np.sum(expected(x + s * direction, spec, given=fixed)[0] * weights) for s in (step, -step)]
    slope = np.sum(wide(jax.grad(f)(LOGITS)) * direction)
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-4, atol=1e-5)


def test_low_precision_logits_are_read_in_fp32():
    spec, low = RouterOptions(num_experts=8, score_function="sigmoid"), LOGITS.astype(jnp.bfloat16)
    probs, experts = routing.route(low, spec)
    assert probs.dtype == jnp.float32
    np.testing.assert_array_equal(experts, expected(low, spec)[1])
    assert_close(probs, expected(low, spec)[0], TOLERANCE["float32"])


@pytest.mark.costly
def test_far_logits_have_finite_gradients():
    far = jnp.array([[-200.0, -300.0, 300.0, 0.0]])
    for function in ("softmax", "sigmoid", "sqrtsoftplus"):
        spec = RouterOptions(num_experts=4, topk=3, score_function=function, pre_softmax=True)
        assert np.isfinite(jax.grad(lambda x, spec=spec: routing.route(x, spec).probs[0, 0])(far)).all(), function


def test_nan_logits_are_seen_and_harm_no_other_token():
    spec = RouterOptions(num_experts=8, score_function="sigmoid")
    probs, experts = routing.route(LOGITS.at[3, 5].set(jnp.nan), spec)
    assert np.isnan(probs[3]).all()
    assert np.isfinite(np.delete(np.asarray(probs), 3, 0)).all()
    assert ((np.asarray(experts) >= 0) & (np.asarray(experts) < 8)).all()


# --- other rules


def sinkhorn(logits, *, steps=100):
    cost, (t, e) = np.exp(logits), logits.shape
    columns, error = np.ones(e), np.inf
    for _ in range(steps):
        if error <= 1e-4:
            break
        rows = 1 / t / (cost @ columns + 1e-8)
        new = 1 / e / (rows @ cost + 1e-8)
        columns, error = new, np.abs(new - columns).mean()
    return columns * cost * rows[:, None]


@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorn(topk):
    got = routing.route_by_sinkhorn(LOGITS, topk, balanced=True)
    want = [order(row, topk) for row in sinkhorn(wide(LOGITS))]
    np.testing.assert_array_equal(got.experts, want)
    function = "sigmoid" if topk == 1 else "softmax"
    probs = [scores_of(row, function)[chosen] for row, chosen in zip(wide(LOGITS), want, strict=True)]
    assert_close(got.probs, probs, TOLERANCE["float32"])
    plain = routing.route_by_sinkhorn(LOGITS, topk, balanced=False)
    np.testing.assert_array_equal(plain.experts, [order(row, topk) for row in wide(LOGITS)])
    load = routing.tokens_per_expert(got.experts, 8)
    assert load.max() < routing.tokens_per_expert(plain.experts, 8).max()


@pytest.mark.parametrize("shift", [0.0, 60.0, 300.0, -30.0])
def test_sinkhorn_of_any_size(shift):
    """One row of large logits would be infinite, and infinity times zero would unbalance all others."""
    logits = LOGITS.at[3].add(shift)
    # Their maxima in fp32 are rounded to 300 * 2^-24, an error of an exponent.
    np.testing.assert_allclose(routing.sinkhorn(logits), sinkhorn(wide(logits)), rtol=1e-3)
    load = routing.tokens_per_expert(routing.route_by_sinkhorn(logits, 2, balanced=True).experts, 8)
    assert load.max() <= 9, load  # 24 tokens that choose 2 of 8: 6 each


def test_sinkhorn_of_an_expert_far_below_the_others():
    """Its factor would take hundreds of steps to reach its end, or never: the result is that of 100."""
    logits = LOGITS.at[:, 3].add(-30.0)
    got = np.asarray(routing.sinkhorn(logits))[:, 3].sum()
    # The load of that expert, of which the factor is a product of 100 roundings in fp32.
    after = {steps: sinkhorn(wide(logits), steps=steps)[:, 3].sum() for steps in (90, 100, 110, 2000)}
    assert after[90] < got < after[110] < after[2000]
    np.testing.assert_allclose(got, after[100], rtol=100 * 2.0**-24)


@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorn_ends_at_nan_and_shows_it(topk):
    got = routing.route_by_sinkhorn(LOGITS.at[3, 5].set(jnp.nan), topk, balanced=True)
    assert got.experts.shape == (24, topk)
    assert np.isnan(got.probs[3]).all()


def test_a_choice_given_to_sinkhorn():
    given = jnp.full((24, 1), 7, jnp.int32)
    probs, experts = routing.route_by_sinkhorn(LOGITS, 1, balanced=True, experts=given.at[2].set(8))
    np.testing.assert_array_equal(experts[3:], given[3:])
    np.testing.assert_array_equal(probs[3:, 0], jax.nn.sigmoid(LOGITS[3:, 7]))
    assert np.isnan(probs[2, 0]), "expert 8 of 8 is none"
    with pytest.raises(ValueError, match=r"experts must be \[t, k\]"):
        routing.route_by_sinkhorn(LOGITS, 2, balanced=True, experts=given)


def test_quantiles_balance_the_load():
    bias, uneven = jnp.zeros(8), LOGITS + jnp.arange(8.0)[None] / 2
    load = lambda bias: routing.tokens_per_expert(routing.largest(uneven - bias[None], 2), 8)  # noqa: E731
    before = load(bias)
    for _ in range(8):
        bias = routing.expert_quantiles(uneven, bias, 2)
        bias = bias - jnp.mean(bias)
    assert load(bias).max() < before.max() / 1.5
    scores, shifted = wide(uneven), wide(uneven) - wide(bias)
    above = np.stack([row - by[order(by, 3)[2]] for row, by in zip(scores, shifted, strict=True)])
    got = routing.expert_quantiles(uneven, bias, 2)
    assert_close(got, np.sort(above, axis=0)[::-1][24 * 2 // 8], TOLERANCE["float32"])


def test_quantiles_of_uneven_numbers_are_refused():
    with pytest.raises(ValueError, match="not a multiple of num_experts 8"):
        routing.expert_quantiles(LOGITS[:3], jnp.zeros(8), 2)
    with pytest.raises(ValueError, match="must be fewer"):
        routing.expert_quantiles(LOGITS, jnp.zeros(8), 8)


# --- capacity


@pytest.mark.costly("probs-different")
@pytest.mark.parametrize("logits", [LOGITS, TIED], ids=["different", "tied"])
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_capacity_keeps_the_largest_or_the_first(policy, logits):
    assignment = routing.route(logits, RouterOptions(num_experts=8))
    capacity = routing.expert_capacity(24, 8, 2, 0.5)
    kept = np.asarray(routing.within_capacity(assignment, 8, capacity, policy))
    dense, chosen = (
        np.asarray(routing.dense_probs(assignment, 8)),
        np.asarray(routing.one_of_each(assignment.experts, 8)),
    )
    assert capacity == 3
    for e in range(8):
        value = dense[:, e] if policy == "probs" else chosen[:, e].astype(float)
        np.testing.assert_array_equal(np.flatnonzero(kept[:, e]), sorted(order(value, capacity)))


def test_capacity_in_numbers():
    assert routing.expert_capacity(64, 8, 2, 1.0) == 16
    assert routing.expert_capacity(10, 4, 1, 1.0) == 3  # rounded up
    assert routing.expert_capacity(8, 2, 2, 9.0) == 8  # no expert gets a token twice
    with pytest.raises(ValueError, match="without any token"):
        routing.expert_capacity(64, 8, 2, 0.0)


# --- randomness for measurements


def test_random_logits_pass_the_gradient_on():
    key = jax.random.key(0)
    random = routing.balanced_at_random(LOGITS, key)
    np.testing.assert_array_equal(random, jax.random.normal(key, LOGITS.shape))
    biased = routing.biased_at_random(LOGITS, 3.0, key, jax.random.key(1))
    assert np.ptp(np.asarray(biased - random), axis=0).max() < 1e-5  # one bias for all tokens
    assert np.std(np.asarray(biased - random)[0]) > 1.0
    for f in (routing.balanced_at_random, lambda x, key: routing.biased_at_random(x, 3.0, key, key)):
        np.testing.assert_array_equal(jax.grad(lambda x, f=f: jnp.sum(f(x, key) * LOGITS))(LOGITS), LOGITS)


def test_jitter_stays_within_its_bounds():
    factor = wide(routing.jitter_factors((16, 32), jnp.float32, 0.1, jax.random.key(0)))
    assert 0.9 <= factor.min() < 0.92
    assert 1.08 < factor.max() <= 1.1 + 1e-6


def test_a_program_does_not_depend_on_values():
    assignment = jax.jit(lambda x: routing.route(x, RouterOptions(num_experts=8)))
    assignment(LOGITS), assignment(TIED)
    assert assignment._cache_size() == 1
    assert isinstance(assignment(LOGITS), Assignment)


@pytest.mark.parametrize("score_function", ["sigmoid", "sqrtsoftplus"])
def test_two_equal_scores_have_half_each_whatever_they_are(score_function):
    """So that tokens which are equal to an expert stay equal, and its capacity keeps the first of them."""
    logits = draw("logits", (200, 1)) * jnp.array([[1.0, 1.0, 0.0]]) - jnp.array([[0.0, 0.0, 9.0]])
    options = RouterOptions(num_experts=3, score_function=score_function)
    for run in (routing.route, jax.jit(routing.route, static_argnums=1)):
        np.testing.assert_array_equal(run(logits, options).probs, np.full((200, 2), 0.5, np.float32))
