"""Rows sorted by expert, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops.moe.permute import permute, permute_probs, plan_permutation, unpermute
from tests.support.numerics import draw

CASES = {
    "several": np.random.default_rng(0).permuted(np.tile(np.arange(5), (13, 1)), axis=1)[:, :2],
    "all in one": np.full((7, 1), 3),
    "one token": np.array([[4, 1]]),
    "every expert": np.tile(np.arange(5)[::-1], (3, 1)),
}


def chosen(shape, share):
    """Which assignments are kept: about this share, the same ones whichever tests ran before."""
    return np.random.default_rng(1).random(shape) < share


def loop(experts, kept, x, alignment, sizes=None):
    """Rows, and where each assignment's row is, by a loop over experts and tokens."""
    rows, where, start = {}, {}, 0
    for e in range(5):
        at = start
        for t, slot in np.argwhere(experts == e):
            if kept[t, slot]:
                rows[at], where[t, slot] = x[t], at
                at += 1
        size = at - start if sizes is None else sizes
        start += -(-size // alignment) * alignment
    return rows, where


@pytest.mark.costly(
    "several-True-1",
    "every expert-True-1",
    "several-False-4",
    "every expert-False-4",
    "all in one-False-4",
    "one token-False-4",
    slow=(
        "all in one-False-1",
        "every expert-True-4",
        "one token-False-1",
        "every expert-False-1",
        "several-False-1",
        "several-True-4",
        "one token-True-4",
        "one token-True-1",
        "all in one-True-1",
    ),
)
@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_rows_against_a_loop(case, dropped, alignment):
    experts = CASES[case]
    kept = chosen(experts.shape, 0.6) if dropped else np.ones(experts.shape, bool)
    x = np.asarray(draw("x", (len(experts), 6)))
    plan = plan_permutation(jnp.asarray(experts, jnp.int32), 5, kept=jnp.asarray(kept), alignment=alignment)
    rows, where = loop(experts, kept, x, alignment)
    got = np.asarray(permute(jnp.asarray(x), plan))
    assert got.shape[0] == plan.groups.rows
    assert got.shape[0] % alignment == 0
    want = np.zeros_like(got)
    for row, value in rows.items():
        want[row] = value
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(plan.groups.sizes, [np.sum((experts == e) & kept) for e in range(5)])
    probs = np.asarray(draw("p", experts.shape))
    want_probs = np.zeros(len(got), np.float32)
    for at, row in where.items():
        want_probs[row] = probs[at]
    np.testing.assert_array_equal(permute_probs(jnp.asarray(probs), plan), want_probs)
    y = np.asarray(draw("y", got.shape))
    want_back = np.zeros_like(x)
    for (t, _), row in sorted(where.items()):
        want_back[t] += y[row]
    np.testing.assert_allclose(unpermute(jnp.asarray(y), plan), want_back, rtol=1e-6, atol=1e-6)


def test_padded_to_capacity():
    experts, capacity = jnp.asarray(CASES["several"], jnp.int32), 6
    kept = jnp.asarray(chosen(experts.shape, 0.4))
    plan = plan_permutation(experts, 5, kept=kept, alignment=4, capacity=capacity, pad_to_capacity=True)
    assert plan.groups.sizes.tolist() == [6] * 5
    assert plan.groups.rows == 5 * 8
    x = draw("x", (13, 3))
    rows, _ = loop(np.asarray(experts), np.asarray(kept), np.asarray(x), 4, sizes=capacity)
    got = np.asarray(permute(x, plan))
    want = np.zeros_like(got)
    for row, value in rows.items():
        want[row] = value
    np.testing.assert_array_equal(got, want)


def test_a_capacity_bounds_the_rows():
    experts = jnp.asarray(CASES["several"], jnp.int32)
    assert plan_permutation(experts, 5, kept=experts < 0, capacity=2).groups.rows == 10
    assert plan_permutation(experts, 5).groups.rows == 26
    with pytest.raises(ValueError, match="needs a capacity"):
        plan_permutation(experts, 5, pad_to_capacity=True)


@pytest.mark.costly
def test_each_direction_is_the_transpose_of_the_other():
    experts = jnp.asarray(CASES["several"], jnp.int32)
    plan = plan_permutation(experts, 5, kept=jnp.asarray(chosen(experts.shape, 0.7)), alignment=4)
    x, y = draw("x", (13, 6)), draw("y", (plan.groups.rows, 6))
    probs, dprobs = draw("p", (13, 2)), draw("dp", (plan.groups.rows,))
    np.testing.assert_array_equal(jax.vjp(lambda x: permute(x, plan), x)[1](y)[0], unpermute(y, plan))
    np.testing.assert_array_equal(jax.vjp(lambda y: unpermute(y, plan), y)[1](x)[0], permute(x, plan))
    (back,) = jax.vjp(lambda p: permute_probs(p, plan), probs)[1](dprobs)
    terms = np.asarray(dprobs * permute_probs(probs, plan))
    # The sum may cancel; each of its additions rounds by the sizes of the terms.
    rounding = terms.size * np.finfo(np.float32).eps * np.sum(np.abs(terms))
    np.testing.assert_allclose(jnp.sum(back * probs), np.sum(terms), rtol=0, atol=rounding)
    # And of second order, where the transposes are differentiated themselves.
    matrix = permute(jnp.eye(13), plan)

    def twice(forward, back):
        inner = jax.grad(lambda x: jnp.sum(back(forward(x) ** 3) ** 2))
        return jax.jit(jax.grad(lambda x: jnp.sum(inner(x) ** 2)))(x)

    got = twice(lambda x: permute(x, plan), lambda y: unpermute(y, plan))
    np.testing.assert_allclose(got, twice(lambda x: matrix @ x, lambda y: matrix.T @ y), rtol=1e-3, atol=1e-3)


def test_no_direction_scatters_rows():
    experts = jnp.asarray(CASES["several"], jnp.int32)

    def both(x):
        plan = plan_permutation(experts, 5)
        return jnp.sum(unpermute(permute(x, plan) ** 2, plan) ** 2)

    text = str(jax.make_jaxpr(jax.grad(both))(draw("x", (13, 6))))
    assert "scatter-add" not in text
    assert "scatter_add" not in text


def test_half_precision_is_added_up_in_fp32():
    plan = plan_permutation(jnp.array([[0, 1, 2]], jnp.int32), 3)
    # In bf16, whose step above 1 is 2^-7, the small ones would be lost one by one.
    rows = jnp.array([[1.0], [2.0**-8], [2.0**-8]], jnp.bfloat16)
    assert unpermute(rows, plan).item() == 1.0 + 2.0**-7


@pytest.mark.costly("-1-int8", slow=("-1-int32",))
@pytest.mark.parametrize("dtype", ["int8", "int32"])
@pytest.mark.parametrize("outside", [-1, -128, 5, 127])
def test_a_number_that_no_expert_has_gets_no_row(outside, dtype):
    """And the rows of the others are as if it were dropped."""
    experts = jnp.array([[1, outside], [0, 1], [outside, outside], [4, 0]], dtype)
    plan = plan_permutation(experts, 5)
    there = jnp.array([[True, False], [True, True], [False, False], [True, True]])
    want = plan_permutation(jnp.where(there, experts, 0), 5, kept=there)
    jax.tree.map(np.testing.assert_array_equal, plan, want)
    assert plan.groups.sizes.tolist() == [2, 2, 0, 0, 1]
