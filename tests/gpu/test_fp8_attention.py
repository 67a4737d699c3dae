"""cuDNN's FP8 attention against its steps in plain JAX, and both against fp64.

The kernel rounds the same tensors under the same scales, but its ``s`` in forward has the largest score of the keys
that it has met so far in place of the row's: kernel and plain JAX differ by the roundings of both, in ``s`` and what
follows.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops import attention_spec, cudnn_fp8, dot_product_attention, explain_backend
from jax_te.quantize import init_attention_state
from jax_te.recipe import DelayedScaling, Float8CurrentScaling
from tests.support.fp8_attention import exact
from tests.support.numerics import draw, relative_l2, with_vjp
from tests.support.states import merging

pytestmark = pytest.mark.gpu

B, D, SCALE = 2, 128, 128**-0.5
ROUNDING = 2.0**-4 / 3**0.5  # see tests/ops/attention/test_fp8.py
RECIPES = {
    "delayed": DelayedScaling(fp8_dpa=True, amax_history_len=2),
    "current": Float8CurrentScaling(fp8_dpa=True),
}


@pytest.fixture(autouse=True)
def needs_the_kernels():
    if reason := cudnn_fp8.unavailable():
        pytest.fail(reason)


def operands(sq, skv, n, g):
    shapes = {"q": (B, sq, n, D), "k": (B, skv, g, D), "v": (B, skv, g, D)}
    q, k, v = (draw(name, s) for name, s in shapes.items())
    k, v = (x + draw("mean", (B, 1, g, D)) for x in (k, v))  # which FP8 attention takes away
    return tuple(x.astype(jnp.bfloat16) for x in (q, k, v)), draw("do", (B, sq, n, D), jnp.bfloat16, scale=1e-4)


def steps(recipe, qkv, do, *, count=3, backend="xla", **options):
    """Output, gradients and next state after some steps on the same operands."""

    @jax.jit
    def step(qkv, state, do):
        def attend(qkv, state):
            return dot_product_attention(qkv, recipe=recipe, state=state, backend=backend, **options)

        return with_vjp(attend, (qkv, state), do)

    state = init_attention_state(recipe)
    for _ in range(count):
        out, (gradients, state) = step(qkv, state, do)
    return out, gradients, state


@pytest.mark.parametrize("name", RECIPES)
def test_backward_by_some_heads_each_is_that_of_all(name, monkeypatch):
    """As for long sequences: 12 heads in 6 groups, of two sequences, by two groups at a time."""
    recipe, (qkv, do) = RECIPES[name], operands(512, 512, 12, 6)
    real, heads = cudnn_fp8._backward_of_heads, []

    def recorded(*args):
        heads.append(args[4].heads)
        return real(*args)

    monkeypatch.setattr(cudnn_fp8, "_backward_of_heads", recorded)
    out, gradients, state = steps(recipe, qkv, do, mask_type="causal")
    assert set(heads) == {12}
    heads.clear()
    monkeypatch.setattr(cudnn_fp8, "_LONG", 512)
    out_of_parts, gradients_of_parts, state_of_parts = steps(recipe, qkv, do, mask_type="causal")
    assert set(heads) == {4}
    assert relative_l2(out_of_parts, out) == 0.0
    # The kernel adds to gradients of queries in any order, of fp32, and rounds to codes after that; amaxes and scales
    # of later steps follow from such gradients.
    for actual, want in zip(
        (*gradients_of_parts, *jax.tree.leaves(state_of_parts)), (*gradients, *jax.tree.leaves(state)), strict=True
    ):
        assert relative_l2(actual, want) <= 2.0**-8


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("mask_type", "sizes"), [("causal", (512, 512, 4, 4)), ("no_mask", (256, 384, 4, 2))])
def test_the_kernel_against_its_steps_and_fp64(name, mask_type, sizes, monkeypatch):
    recipe, (qkv, do) = RECIPES[name], operands(*sizes)
    choice = explain_backend("dot_product_attention", recipe=recipe, attention=attention_spec(qkv, mask_type))
    assert (choice.parts["attention"], choice.unquantized) == ("cudnn", None)
    out, gradients, state = steps(recipe, qkv, do, mask_type=mask_type)
    monkeypatch.setattr(cudnn_fp8, "unavailable", lambda: "to compare with")
    plain, plain_gradients, plain_state = steps(recipe, qkv, do, mask_type=mask_type)
    assert relative_l2(out, plain) <= (2 * 2 * ROUNDING**2) ** 0.5
    limit = (2 * 5 * ROUNDING**2) ** 0.5
    assert max(relative_l2(*pair) for pair in zip(gradients, plain_gradients, strict=True)) <= limit
    exact_out, *exact_gradients = exact(*qkv, do, causal=mask_type == "causal", scale=SCALE)
    q, k = (np.asarray(x, np.float64) for x in qkv[:2])
    scores = 2 * ROUNDING**2 * float(np.mean(np.square(q))) * float(np.mean(np.square(k))) * D * SCALE**2
    assert relative_l2(out, exact_out) <= (3 * ROUNDING**2 + scores) ** 0.5
    bounds = [(8 * ROUNDING**2 + 2 * scores) ** 0.5] * 2 + [(3 * ROUNDING**2 + scores) ** 0.5]
    for actual, want, bound in zip(gradients, exact_gradients, bounds, strict=True):
        assert relative_l2(actual, want) <= bound
    assert state.keys() == plain_state.keys()
    for role in state:
        ratio = np.asarray(state[role]["amax_history"]) / np.asarray(plain_state[role]["amax_history"])
        assert np.all(np.abs(ratio - 1.0) <= 2.0**-3), (role, ratio)


@pytest.mark.parametrize("passes", [{}, {"fp8_dpa_bwd": False}, {"fp8_dpa_fwd": False}], ids=["both", "fwd", "bwd"])
@pytest.mark.parametrize("name", RECIPES)
def test_long_sequences_by_position(name, passes):
    """Beside Transformer Engine's kernels in bf16: an error may be of the first positions or the last ones alone."""
    length = 8192
    qkv, do = operands(length, length, 4, 4)
    recipe = dataclasses.replace(RECIPES[name], **passes)
    packed = (jnp.stack(qkv, axis=2),)  # as a layer with one projection gives them
    out, (gradient,), _ = steps(recipe, packed, do, backend="auto")
    plain, ((plain_gradient,),) = with_vjp(lambda qkv: dot_product_attention(qkv, backend="te"), (packed,), do)
    # Of normal operands, whose scores have a standard deviation of 1; see above.
    for start in range(0, length, length // 4):
        part = slice(start, start + length // 4)
        assert relative_l2(out[:, part], plain[:, part]) <= (5 * ROUNDING**2) ** 0.5, start
        for i, what in enumerate(("dq", "dk", "dv")):
            error = relative_l2(gradient[:, part, i], plain_gradient[:, part, i])
            assert error <= (12 * ROUNDING**2) ** 0.5, (start, what)


@pytest.mark.parametrize("kind", [DelayedScaling, Float8CurrentScaling])
def test_a_backward_pass_in_bf16(kind):
    recipe, (qkv, do) = kind(fp8_dpa=True, fp8_dpa_bwd=False), operands(512, 512, 4, 4)
    out, gradients, _ = steps(recipe, qkv, do)
    exact_out, *exact_gradients = exact(*qkv, do, causal=True, scale=SCALE)
    assert relative_l2(out, exact_out) <= (5 * ROUNDING**2) ** 0.5
    # Of FP8 the gradients have the errors of the operands, which forward has rounded, of their scores and the output.
    assert max(relative_l2(*pair) for pair in zip(gradients, exact_gradients, strict=True)) <= (5 * ROUNDING**2) ** 0.5


@pytest.mark.parametrize("kind", [DelayedScaling, Float8CurrentScaling])
def test_a_forward_pass_in_bf16(kind, monkeypatch):
    """TE's output of the rounded operands; of plain JAX, forward too, the gradients are those of the same codes."""
    recipe, (qkv, do) = kind(fp8_dpa=True, fp8_dpa_fwd=False), operands(512, 512, 4, 4)
    out, gradients, state = steps(recipe, qkv, do)
    exact_out, *exact_gradients = exact(*qkv, do, causal=True, scale=SCALE)
    assert relative_l2(out, exact_out) <= (3 * ROUNDING**2) ** 0.5
    assert max(relative_l2(*pair) for pair in zip(gradients, exact_gradients, strict=True)) <= (10 * ROUNDING**2) ** 0.5
    monkeypatch.setattr(cudnn_fp8, "unavailable", lambda: "to compare with")
    plain, plain_gradients, plain_state = steps(recipe, qkv, do)
    assert relative_l2(out, plain) <= 2.0**-7
    limit = (2 * 4 * ROUNDING**2) ** 0.5
    assert max(relative_l2(*pair) for pair in zip(gradients, plain_gradients, strict=True)) <= limit
    assert state.keys() == plain_state.keys()


def test_long_sequences_in_a_loop_and_recomputed():
    """A scan over layers, each recomputed, as a model has them; nothing of the size of the scores is kept."""
    recipe, s = RECIPES["delayed"], 8192
    x, states = draw("x", (1, s, 8, D), jnp.bfloat16), [init_attention_state(recipe) for _ in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)

    @jax.jit
    def gradients(x, stacked):
        def layer(x, state):
            return x + dot_product_attention((x, x, x), recipe=recipe, state=merging(state)), None

        def loss(x, stacked):
            return jnp.mean(jnp.square(jax.lax.scan(jax.checkpoint(layer), x, stacked)[0].astype(jnp.float32)))

        return jax.grad(loss, argnums=(0, 1))(x, stacked)

    for _ in range(3):
        dx, stacked = gradients(x, stacked)
    assert np.isfinite(np.asarray(dx, np.float32)).all()
    assert np.asarray(dx, np.float32).any()
    text = gradients.lower(x, stacked).compile().as_text()
    assert "fmhaSoftmaxF8" in text
    assert "fmhaSoftmaxBackwardF8" in text
    assert f"{s},{s}]" not in text
