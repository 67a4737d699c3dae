"""FP8 attention beside an implementation of its steps in NumPy and beside fp64, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.errors import BackendUnavailableError, QuantizerStateError
from jax_te.ops import attention_spec, dot_product_attention, explain_backend, segments_from_cu_seqlens
from jax_te.ops.attention.fp8_mean import codes_with_mean
from jax_te.quantize import amax, attention_precision_of, frozen_scales, init_attention_state
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, Recipe
from tests.support.fp8_attention import (
    E4M3,
    E5M2,
    Attention,
    centred,
    dequantized,
    exact,
    largest,
    mean_of,
    of_amax,
    on_grid_of_values,
)
from tests.support.fp8_attention_errors import errors
from tests.support.numerics import assert_bitwise, draw, quick_jit, relative_l2, value_and_vjp, with_vjp
from tests.support.states import merging

B, D = 2, 128
SCALE = D**-0.5
DELAYED = DelayedScaling(fp8_dpa=True, amax_history_len=3)
CURRENT = Float8CurrentScaling(fp8_dpa=True)
RECIPES = {
    "delayed": DELAYED,
    "delayed-margin": DelayedScaling(fp8_dpa=True, amax_history_len=1, margin=2, fp8_format=Format.E4M3),
    "current": CURRENT,
    "current-powers": Float8CurrentScaling(fp8_mha=True, use_power_2_scales=True),
}
ROLES = {
    "qkv": ("q", "k", "v"),
    "s": ("s",),
    "o": ("o",),
    "do": ("do",),
    "dp": ("dp",),
    "dqkv": ("dq", "dk", "dv"),
}


def operands(sq: int = 128, skv: int = 128, n: int = 2, g: int = 2, dtype: Any = jnp.bfloat16) -> tuple[Any, Any]:
    """Queries, keys and values, and a gradient of the output of the size that training has."""
    q, k, v = draw("q", (B, sq, n, D), dtype), draw("k", (B, skv, g, D), dtype), draw("v", (B, skv, g, D), dtype)
    return (q, k, v), draw("do", (B, sq, n, D), dtype, scale=1e-4)


def attend(recipe: Recipe | None, **options: Any) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, state: Any) -> Any:
        return dot_product_attention((q, k, v), recipe=recipe, state=state, **options)

    return run


@functools.cache
def compiled(recipe: Recipe | None, **options: Any) -> Callable[..., Any]:
    return quick_jit(functools.partial(with_vjp, attend(recipe, **options)))


def step(recipe: Recipe | None, qkv: Any, do: Any, state: Any, **options: Any) -> tuple[Any, Any, Any]:
    """Output, gradients of ``qkv`` and the next state."""
    out, (*gradients, after) = compiled(recipe, **options)((*qkv, state), do)
    return out, gradients, after


def scales_of(recipe: Any, state: Any, qkv: Any, do: Any) -> dict[str, float]:
    """The scales of a call, from the recipe's text."""
    if isinstance(recipe, DelayedScaling):
        scales = {}
        for role, names in ROLES.items():
            # A history of one step has two slots, of which the first counts.
            history = np.asarray(state[role]["amax_history"])[: recipe.amax_history_len]
            scale = of_amax(float(history.max()), E4M3) / 2.0**recipe.margin if history.max() > 0 else 1.0
            scales |= dict.fromkeys(names, scale)
        return scales | {"o": on_grid_of_values(scales), "numerators": of_amax(1.0, E4M3)}
    power = recipe.use_power_2_scales
    amaxes = {"q": largest(qkv[0]), "k": largest(centred(qkv[1])), "v": largest(centred(qkv[2]))}
    amaxes["o"] = amaxes["v"]
    amaxes |= {"s": 1.0, "numerators": 1.0}
    scales = {name: of_amax(amax, E4M3, power) for name, amax in amaxes.items()}
    scales["do"] = of_amax(largest(do), E4M3, power)
    for name in ("dp", "dq", "dk", "dv"):
        scales[name] = of_amax(float(state[name]["amax_history"][0]), E4M3, power)
    return scales


def assert_same_codes(actual: Any, expected: Any, scale: float, what: str) -> None:
    """Equal FP8 values but for a few that lie between two of them.

    fp32 and fp64 differ by some 2^-20 of a value before it is rounded, and two FP8 values by 2^-3 of one: about
    one element in 2^17 rounds the other way. One of ``s`` or ``dp``, of which there are 2^16 and more, moves a row of
    the next products, of which there are 512, by 2^-4 of one term, and some of its elements to the next FP8 value.
    """
    actual, expected = np.asarray(actual, np.float64) * scale, np.asarray(expected, np.float64) * scale
    step = np.maximum(np.abs(expected), 2.0**-6) * 2.0**-4
    # Results are in bf16, which has more bits than FP8; the scale is no power of two.
    other = np.abs(actual - expected) > step / 2
    assert other.mean() <= 1e-2, f"{what}: {other.mean():.2%} of the codes differ"
    assert relative_l2(actual, expected) <= 0.02, f"{what}: relative L2 {relative_l2(actual, expected):.2g}"


@pytest.mark.costly(
    "causal-current-powers",
    slow=(
        "no_mask-delayed",
        "no_mask-current",
        "no_mask-delayed-margin",
        "causal-delayed-margin",
        "no_mask-current-powers",
        "causal-current",
    ),
)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    ("mask_type", "sizes"),
    [
        pytest.param("causal", (128, 128, 2, 2), id="causal"),
        pytest.param("no_mask", (128, 256, 4, 2), id="no_mask"),
    ],
)
def test_its_steps_are_those_of_the_oracle(name, mask_type, sizes):
    recipe = RECIPES[name]
    # In fp32, so that the output shows its codes below the mean of the values, too.
    qkv, do = operands(*sizes, dtype=jnp.float32)
    exact_qkv = [np.asarray(x, np.float64) for x in qkv]
    state = init_attention_state(recipe)
    for _ in range(3):  # after two steps no scale is that of an empty history
        before = state
        out, gradients, state = step(recipe, qkv, do, before, mask_type=mask_type)
    scales = scales_of(recipe, before, exact_qkv, np.asarray(do, np.float64))
    oracle = Attention(scales, mask_type == "causal", SCALE)
    expected = oracle.forward(*exact_qkv)
    heads = sizes[2] // sizes[3]
    mean = np.repeat(mean_of(exact_qkv[2]), heads, axis=2)
    assert_same_codes(np.asarray(out, np.float64) - mean, expected - mean, scales["o"], "output")
    wanted = oracle.backward(*exact_qkv, expected, np.asarray(do, np.float64))
    for name, actual, want in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
        assert_same_codes(actual, want, scales[name], name)
        assert float(jnp.max(jnp.abs(actual))) > 0.0
    roles = ROLES if isinstance(recipe, DelayedScaling) else {name: (name,) for name in ("dp", "dq", "dk", "dv")}
    assert state.keys() == roles.keys()
    for role, names in roles.items():
        newest = max(oracle.amaxes[name] for name in names)
        # An amax is exact in fp32, but for the sums that it is of.
        np.testing.assert_allclose(state[role]["amax_history"][0], newest, rtol=2.0**-6)
        if role != "o":  # of which a power of two is used; its next value shows the history that it came from
            np.testing.assert_allclose(state[role]["scale"], scales[names[0]], rtol=2.0**-20)
        assert_bitwise(state[role]["amax_history"][1:], before[role]["amax_history"][:-1])


# The root mean square of the relative error of one rounding is at most that of errors spread evenly over half a
# distance of E4M3's values, 2^-4 of a value just above a power of two.
ROUNDING = 2.0**-4 / 3**0.5


@pytest.mark.costly("current-outliers", slow=("delayed-outliers", "current-normal", "delayed-peaked", "current-peaked"))
@pytest.mark.parametrize("inputs", ["normal", "outliers", "peaked"])
@pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=["current", "delayed"])
def test_its_errors_are_those_of_its_roundings(recipe, inputs):
    (q, k, v), do = operands(dtype=jnp.float32)
    if inputs == "outliers":
        q, k = (x.at[..., 3].multiply(8.0) for x in (q, k))
    if inputs == "peaked":
        q = q * 2.0
    state = init_attention_state(recipe)
    for _ in range(3):
        out, gradients, state = step(recipe, (q, k, v), do, state)
    exact_out, *exact_gradients = exact(q, k, v, do, causal=True, scale=SCALE)
    # Scores have the errors of queries and keys, each term its own, and probabilities have the scores' errors.
    square = np.einsum("bsnd,btnd->bnst", np.square(np.asarray(q, np.float64)), np.square(np.asarray(k, np.float64)))
    scores = 2 * ROUNDING**2 * float(np.mean(square)) * SCALE**2
    # Roundings are independent, so their squares add up: of s, v and o in forward; of s, do and dv; of s, v, o, do
    # (twice, in dp and its mean), dp, the other operand and the result.
    assert relative_l2(out, exact_out) <= (3 * ROUNDING**2 + scores) ** 0.5
    bounds = [(8 * ROUNDING**2 + 2 * scores) ** 0.5] * 2 + [(3 * ROUNDING**2 + scores) ** 0.5]
    for name, actual, want, bound in zip(("dq", "dk", "dv"), gradients, exact_gradients, bounds, strict=True):
        assert relative_l2(actual, want) <= bound, name
        assert relative_l2(actual, want) > ROUNDING / 4, f"{name} was not quantized"


@pytest.mark.costly("delayed")
@pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=["current", "delayed"])
def test_means_of_keys_and_values_cost_nothing(recipe):
    """Exact attention does not see them: a mean of the keys is one constant in a query's scores."""
    (q, k, v), do = operands(256, 256, 2, 1, jnp.float32)
    k, v = (x + scale * draw(f"mean {scale}", (B, 1, 1, D)) for x, scale in ((k, 4.0), (v, 2.0)))
    state = init_attention_state(recipe)
    for _ in range(3):
        out, gradients, state = step(recipe, (q, k, v), do, state)
    exact_out, *exact_gradients = exact(q, k, v, do, causal=True, scale=SCALE)
    # As for operands without means; see above. The mean of the values is in the output as it is.
    scores = 2 * ROUNDING**2
    assert relative_l2(out, exact_out) <= ROUNDING
    bounds = [(8 * ROUNDING**2 + 2 * scores) ** 0.5] * 2 + [(3 * ROUNDING**2 + scores) ** 0.5]
    for name, actual, want, bound in zip(("dq", "dk", "dv"), gradients, exact_gradients, bounds, strict=True):
        assert relative_l2(actual, want) <= bound, name


@pytest.mark.costly("current")
@pytest.mark.parametrize(("recipe", "role"), [(DELAYED, "dqkv"), (CURRENT, "dq")], ids=["delayed", "current"])
def test_gradients_are_e4m3_under_each_format(recipe, role):
    """XLA's binding of cuDNN has no E5M2 gradients, so no device and no format has them."""
    qkv, do = operands(dtype=jnp.float32)
    results = []
    for fp8_format in (Format.HYBRID, Format.E4M3):
        of_format = dataclasses.replace(recipe, fp8_format=fp8_format)
        state = init_attention_state(of_format)
        for _ in range(3):  # after two steps no scale is that of an empty history
            before = state
            out, gradients, state = step(of_format, qkv, do, before)
        results.append((out, gradients, state))
    jax.tree.map(assert_bitwise, *results)
    codes = np.asarray(gradients[0]) * (448.0 / float(before[role]["amax_history"].max()))
    nearest = codes.astype(E4M3).astype(np.float32)
    # The scale and its inverse are rounded in fp32; E4M3's values are 2^-4 of one or more apart.
    np.testing.assert_allclose(codes, nearest, rtol=2.0**-20)


@pytest.mark.costly("normal-float8_e4m3fn")
@pytest.mark.parametrize(("inputs", "better"), [("normal", E4M3), ("tiny", E5M2)])
def test_what_e4m3_gradients_cost(inputs, better):
    """Smaller errors than E5M2's, but where sizes differ much within a tensor: see docs/attention_fp8_errors.md."""
    of_e4m3, of_e5m2 = errors(inputs, 2048, E4M3), errors(inputs, 2048, E5M2)
    for four, five in zip(of_e4m3, of_e5m2, strict=True):
        assert four < five if better is E4M3 else five < 0.2 < 0.5 < four


@pytest.mark.costly("Float8CurrentScaling-normal")
@pytest.mark.wide("Float8CurrentScaling-normal", "Float8CurrentScaling-outliers")
@pytest.mark.parametrize("inputs", ["normal", "outliers"])
@pytest.mark.parametrize("kind", [DelayedScaling, Float8CurrentScaling])
def test_a_backward_pass_in_high_precision(kind, inputs):
    """The gradients of the operands as forward has read them; the state has what forward has quantized."""
    recipe = kind(fp8_dpa=True, fp8_dpa_bwd=False)
    (q, k, v), do = operands(dtype=jnp.float32)
    if inputs == "outliers":  # scores of exact queries and keys are other ones, and so are their denominators
        q, k = (x.at[..., 3].multiply(8.0) for x in (q, k))
    state = init_attention_state(recipe)
    assert (state is None) == (kind is Float8CurrentScaling)
    for _ in range(2):
        out, gradients, state = step(recipe, (q, k, v), do, state)
    assert state is None or state.keys() == {"qkv", "s", "o"}
    full = kind(fp8_dpa=True)
    both = init_attention_state(full)
    for _ in range(2):
        quantized, _, both = step(full, (q, k, v), do, both)
    assert_bitwise(out, quantized)
    operands_read = [np.asarray(q), *(np.asarray(centred(np.asarray(x, np.float64)), np.float32) for x in (k, v))]
    amaxes = list(map(largest, operands_read))
    amaxes = [max(amaxes)] * 3 if kind is DelayedScaling else amaxes
    read = [dequantized(x, of_amax(amax, E4M3), E4M3) for x, amax in zip(operands_read, amaxes, strict=True)]
    mean = mean_of(np.asarray(v, np.float64))
    _, *wanted = exact(*read, do, causal=True, scale=SCALE, read_out=np.asarray(out, np.float64) - mean)
    for name, actual, want in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
        # In fp32 a score of 64 is off by 2^-18 and more, and so are its exponential and the sums that follow.
        assert relative_l2(actual, want) <= 2.0**-16, name


@pytest.mark.wide("Float8CurrentScaling")
@pytest.mark.parametrize("kind", [Float8CurrentScaling, DelayedScaling])
def test_a_forward_pass_in_high_precision(kind):
    """The exact output of the operands that backward reads, and the mean of exactly that output in backward."""
    recipe, (qkv, do) = kind(fp8_dpa=True, fp8_dpa_fwd=False), operands(128, 128, 2, 1, jnp.float32)
    exact_qkv = [np.asarray(x, np.float64) for x in qkv]
    state = init_attention_state(recipe)
    for _ in range(3):
        before = state
        out, gradients, state = step(recipe, qkv, do, before)
    full = init_attention_state(dataclasses.replace(recipe, fp8_dpa_fwd=True))
    assert state.keys() == full.keys() - {"s", "o"}
    unused = {role: full[role] for role in full.keys() - state.keys()}
    scales = scales_of(recipe, before | unused, exact_qkv, np.asarray(do, np.float64)) | {"s": of_amax(1.0, E4M3)}
    oracle = Attention(scales, True, SCALE)
    read = [oracle.q8(name, x) for name, x in zip("qkv", (exact_qkv[0], *map(centred, exact_qkv[1:])), strict=True)]
    read[2] = read[2] + mean_of(exact_qkv[2])
    wanted_out, *_ = exact(*read, do, causal=True, scale=SCALE)
    assert relative_l2(out, wanted_out) <= 2.0**-18
    wanted = oracle.backward(*exact_qkv, wanted_out, np.asarray(do, np.float64))
    for name, actual, want in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
        # The mean is within 2^-10 of what an output in bf16 gives, which moves a few of the codes of dp.
        assert relative_l2(actual, want) <= 0.02, name


def test_an_output_that_is_one_value_is_not_rounded_again():
    """A query that attends to one key alone has that key's value, and its scores have no gradient.

    An output on another grid than the values has a gradient of 2^-5 of ``do v`` here.
    """
    k = draw("k", (B, 128, 2, D), jnp.float32)
    v, do = draw("v", k.shape, jnp.float32), draw("do", k.shape, jnp.float32)
    state = init_attention_state(DELAYED)
    for _ in range(2):
        before = state
        out, gradients, state = step(DELAYED, (8.0 * k, k, v), do, before)
    exact_v = np.asarray(v, np.float64)
    grid = of_amax(float(np.max(before["qkv"]["amax_history"])), E4M3)
    value = dequantized(centred(exact_v), grid, E4M3) + mean_of(exact_v)
    assert relative_l2(out, value) <= 2.0**-20
    # What is left are exponentials of the other scores and fp32's roundings of do v, which has a size of sqrt(D).
    assert largest(gradients[0]) <= 2.0**-16 * D**0.5


@pytest.mark.costly
def test_codes_with_the_mean_of_an_output():
    """Rows of very different sizes under one scale; what bf16 keeps of an output is 2^-9 of it."""
    precision = attention_precision_of(dataclasses.replace(DELAYED, fp8_dpa_fwd=False))
    sizes = jnp.exp2(jax.random.randint(jax.random.key(0), (B, 128, 2, 1), -4, 5).astype(jnp.float32))
    out, do = draw("out", (B, 128, 2, D)) * sizes, draw("do", (B, 128, 2, D)) / sizes
    do = do.at[0, 0].set(0.0).at[0, 1, :, : D // 2].set(0.0).at[0, 2, :, D // 2 :].multiply(2.0**-6)
    quantized = precision.quantize(do, precision.scale_of_amax(amax(do)))
    codes = codes_with_mean(out.astype(jnp.bfloat16), quantized, precision)
    gradient, wanted = np.asarray(quantized.values(), np.float64), np.asarray(out.astype(jnp.bfloat16), np.float64)
    error = np.sum((np.asarray(codes.values(), np.float64) - wanted) * gradient, axis=-1)
    length = np.linalg.norm(wanted, axis=-1) * np.linalg.norm(gradient, axis=-1)
    assert np.all(error[0, 0] == 0.0)
    ratio = np.abs(error / np.where(length > 0.0, length, 1.0))
    assert ratio[0, 1:3].max() <= 2.0**-6 / 3**0.5  # one half alone carries the sum
    assert np.sqrt(np.mean(np.square(ratio[:, 3:]))) <= 2.0**-11
    assert ratio.max() <= 2.0**-7


@pytest.mark.costly("0.0-0.0009765625")
@pytest.mark.parametrize("size", [2.0**-10, 1.0, 2.0**13])
@pytest.mark.parametrize("small", [0.0, 2.0**-6])
def test_codes_with_a_mean_that_one_half_carries(small, size):
    """Half of the gradient is 0, or next to it, in all rows: one rounding of each code is left, whatever the size."""
    precision = attention_precision_of(dataclasses.replace(DELAYED, fp8_dpa_fwd=False))
    out, do = size * draw("out", (B, 128, 2, D)), draw("do", (B, 128, 2, D))
    do = do.at[..., : D // 2].multiply(small)
    quantized = precision.quantize(do, precision.scale_of_amax(amax(do)))
    codes, gradient = codes_with_mean(out, quantized, precision), np.asarray(quantized.values(), np.float64)
    sums = (np.sum(np.asarray(x, np.float64) * gradient, axis=-1) for x in (codes.values(), out))
    assert relative_l2(*sums) <= ROUNDING / 2


@pytest.mark.costly
def test_packed_operands():
    (q, k, v), do = operands()
    packed = jnp.stack((q, k, v), axis=2)
    state = step(CURRENT, (q, k, v), do, init_attention_state(CURRENT))[2]
    out, (gradient, after) = value_and_vjp(
        lambda packed, state: dot_product_attention((packed,), recipe=CURRENT, state=state), (packed, state), do
    )
    apart, gradients, last = step(CURRENT, (q, k, v), do, state)
    assert_bitwise(out, apart)
    assert_bitwise(gradient, jnp.stack(gradients, axis=2))
    jax.tree.map(assert_bitwise, after, last)


REFUSED = (
    "heads",
    "value heads",
    "queries",
    "keys",
    "window",
    "padding",
    "packed",
    "rows without a key",
    "mask",
    "bias",
    "sink",
    "softcap",
    "dropout",
    "max logit",
)


def refused() -> dict[str, tuple[str, dict[str, Any], dict[str, Any]]]:
    """Calls that FP8 attention does not have: words of the reason, sizes, arguments."""
    lengths = jnp.full((B,), 100, jnp.int32)
    cu_seqlens = jnp.array([[0, 50, 128]] * B, jnp.int32)
    return {
        "heads": ("heads of 64", {"d": 64}, {}),
        "value heads": ("heads of 64 and 128", {"dv": 64}, {}),
        "queries": ("120 queries", {"sq": 120}, {"mask_type": "no_mask"}),
        "keys": ("130 keys", {"skv": 130}, {"mask_type": "no_mask"}),
        "window": ("a window of", {}, {"window": (16, 0)}),
        "padding": ("'padding', and FP8 attention has no padding", {}, {"mask_type": "padding", "kv_lengths": lengths}),
        "packed": (
            "packed sequences",
            {},
            {"mask_type": "padding_causal", "segments": segments_from_cu_seqlens(cu_seqlens)},
        ),
        "rows without a key": ("'causal_bottom_right'", {"sq": 256}, {"mask_type": "causal_bottom_right"}),
        "mask": ("'arbitrary'", {}, {"mask_type": "arbitrary", "mask": jnp.zeros((1, 1, 128, 128), bool)}),
        "bias": ("bias_type", {}, {"bias_type": "post_scale_bias", "bias": jnp.zeros((1, 1, 128, 128))}),
        "sink": ("softmax_type", {}, {"softmax_type": "off-by-one"}),
        "softcap": ("logit_softcap", {}, {"logit_softcap": 30.0}),
        "dropout": ("dropout of 0.1", {}, {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}),
        "max logit": ("return_max_logit", {}, {"return_max_logit": True}),
    }


@pytest.mark.costly("packed", slow=("heads", "dropout", "rows without a key", "value heads"))
@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_fp8_attention_lacks(case, caplog):
    """Refused with the reason under a backend's name; in the compute dtype under "auto", which says so."""
    words, sizes, options = refused()[case]
    sq, skv, d, dv = (sizes.get(name, default) for name, default in (("sq", 128), ("skv", 128), ("d", D), ("dv", D)))
    dv = d if "d" in sizes else dv
    qkv = draw("q", (B, sq, 2, d)), draw("k", (B, skv, 2, d)), draw("v", (B, skv, 2, dv))
    state = init_attention_state(CURRENT)
    with pytest.raises(BackendUnavailableError, match=words):
        dot_product_attention(qkv, recipe=CURRENT, state=state, backend="xla", **options)
    plain = dot_product_attention(qkv, backend="xla", **options)
    jax.tree.map(
        assert_bitwise, dot_product_attention(qkv, recipe=CURRENT, state=state, backend="auto", **options), plain
    )
    described = {
        name: options[name] for name in ("window", "bias_type", "softmax_type", "logit_softcap") if name in options
    }
    spec = attention_spec(
        qkv,
        options.get("mask_type", "causal"),
        dropout_rate=options.get("dropout_rate", 0.0),
        return_max_logit=options.get("return_max_logit", False),
        max_segments=2 if "segments" in options else 0,
        **described,
    )
    choice = explain_backend("dot_product_attention", recipe=CURRENT, attention=spec)
    assert words in choice.unquantized
    assert choice.unquantized in str(choice)
    with pytest.raises(BackendUnavailableError, match=words):
        explain_backend("dot_product_attention", recipe=CURRENT, attention=spec, backend="xla")


def test_what_runs_it():
    qkv, _ = operands()
    spec = attention_spec(qkv, "causal")
    choice = explain_backend("dot_product_attention", recipe=DELAYED, attention=spec)
    assert (choice.backend, choice.parts["attention"], choice.unquantized) == ("xla", "xla", None)
    # Recipes that say nothing about attention leave it in the compute dtype, and that is no remark.
    for recipe in (None, DelayedScaling(), Float8BlockScaling()):
        choice = explain_backend("dot_product_attention", recipe=recipe, attention=spec, backend="xla")
        assert (choice.parts, choice.unquantized) == ({"attention": "xla"}, None)


@pytest.mark.slow
def test_the_state_is_not_left_out():
    qkv, do = operands()
    state = init_attention_state(DELAYED)
    with pytest.raises(QuantizerStateError, match="needs quantizer state, and this attention has none"):
        dot_product_attention(qkv, recipe=DELAYED)
    with pytest.raises(QuantizerStateError, match=r"amax histories \{'dp': 1"):
        dot_product_attention(qkv, recipe=DELAYED, state=init_attention_state(CURRENT))

    def loss(q: Any, **options: Any) -> Any:
        out = dot_product_attention((q, *qkv[1:]), recipe=DELAYED, state=state, **options)
        return jnp.sum(out.astype(jnp.float32) * do.astype(jnp.float32))

    with pytest.raises(QuantizerStateError, match="leaves the quantizer state out"):
        jax.grad(loss)(qkv[0])
    trained = step(DELAYED, qkv, do, state)[1][0]
    assert_bitwise(jax.grad(lambda q: loss(q, evaluation=True))(qkv[0]), trained)
    with frozen_scales():
        assert_bitwise(jax.grad(loss)(qkv[0]), trained)
        _, (*_, after) = value_and_vjp(attend(DELAYED), (*qkv, state), do, quick=True)
    jax.tree.map(assert_bitwise, after, state)


@pytest.mark.costly
def test_no_second_derivative():
    qkv, do = operands()
    state = init_attention_state(CURRENT)

    def gradient(q: Any) -> Any:
        def loss(q: Any) -> Any:
            out = dot_product_attention((q, *qkv[1:]), recipe=CURRENT, state=state, evaluation=True)
            return jnp.sum(out.astype(jnp.float32) * do.astype(jnp.float32))

        return jnp.sum(jax.grad(loss)(q).astype(jnp.float32) ** 2)

    with pytest.raises(TypeError, match="second derivatives do not exist under recipe 'current'"):
        jax.grad(gradient)(qkv[0])


def test_what_backward_keeps():
    """FP8 codes of the operands and the output, not the operands."""
    qkv, _ = operands()
    state = init_attention_state(DELAYED)
    _, vjp = jax.vjp(jax.jit(lambda *args: attend(DELAYED)(*merging(args))), *qkv, state)
    kept = [leaf for leaf in jax.tree.leaves(vjp) if leaf.size >= B * 128 * D]
    sizes = sorted((leaf.dtype.name, leaf.shape) for leaf in kept)
    assert sizes == [("float8_e4m3fn", (B, 128, 2, D))] * 4


@pytest.mark.costly
def test_equal_numbers_however_it_is_compiled():
    qkv, do = operands()
    state = step(CURRENT, qkv, do, init_attention_state(CURRENT))[2]

    def run(*args):
        return attend(CURRENT)(*merging(args))

    eager = jax.vjp(run, *qkv, state)
    recomputed = jax.vjp(jax.checkpoint(run), *qkv, state)
    for (one, vjp), (other, other_vjp) in itertools.pairwise((eager, recomputed)):
        assert_bitwise(one, other)
        jax.tree.map(assert_bitwise, vjp(do), other_vjp(do))


@pytest.mark.costly("current-q-1.0", slow=("delayed-q-1.0", "current-q--1.0", "delayed-q--1.0"))
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_an_overflow_of_fp16_is_nan(recipe, where, sign):
    """A cast to FP8 saturates, and the loss scale would never see an infinity."""
    arrays = {name: draw(name, (1, 128, 1, D), jnp.float16) for name in ("q", "k", "v", "do")}
    state = init_attention_state(recipe)

    def finite(arrays: Any) -> bool:
        *qkv, do = arrays.values()
        out, gradients, _ = step(recipe, qkv, do, state, mask_type="no_mask", backend="xla")
        return all(bool(jnp.isfinite(x).all()) for x in (out, *gradients))

    assert finite(arrays)
    if where in ("k", "v"):  # both finite, and the difference of one from the mean is not
        large = arrays[where].at[:, :, 0, 5].set(-sign * 6e4).at[0, 3, 0, 5].set(sign * 6e4)
        assert not finite({**arrays, where: large})
    arrays[where] = arrays[where].at[0, 3, 0, 5].set(sign * jnp.inf)
    assert not finite(arrays)


@pytest.mark.costly("q", slow=("k",))
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
def test_an_inf_of_bf16_is_nan_under_current_scales_and_in_the_state_under_delayed_ones(where):
    arrays = {name: draw(name, (1, 128, 1, D), jnp.bfloat16) for name in ("q", "k", "v", "do")}
    arrays[where] = arrays[where].at[0, 3, 0, 5].set(-jnp.inf)
    *qkv, do = arrays.values()
    out, gradients, _ = step(CURRENT, qkv, do, init_attention_state(CURRENT), mask_type="no_mask", backend="xla")
    assert not all(bool(jnp.isfinite(x).all()) for x in (out, *gradients))
    _, _, state = step(DELAYED, qkv, do, init_attention_state(DELAYED), mask_type="no_mask", backend="xla")
    assert not np.isfinite(state["do" if where == "do" else "qkv"]["amax_history"][0])


@pytest.mark.costly("q", slow=("k",))
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_nan_of_an_operand_is_in_the_history(where):
    arrays = {name: draw(name, (1, 128, 1, D)) for name in ("q", "k", "v", "do")}
    arrays[where] = arrays[where].at[0, 77, 0, 5].set(jnp.nan)
    *qkv, do = arrays.values()
    _, _, state = step(DELAYED, qkv, do, init_attention_state(DELAYED), mask_type="no_mask", backend="xla")
    assert np.isnan(state["qkv"]["amax_history"][0])
