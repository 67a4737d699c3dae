import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_te.quantize import amax, merge_quantizers
from jax_te.quantize.scaling import amax_rule_of, compute_scale, next_amax_state, power_of_two_scale, scale_in_use
from jax_te.recipe import DelayedScaling
from tests.support import oracles
from tests.support.numerics import assert_bitwise, draw
from tests.support.oracles import E4M3, E5M2, F32

DTYPES = {E4M3: jnp.float8_e4m3fn, E5M2: jnp.float8_e5m2}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("margin", [0, 3])
def test_compute_scale_bitwise(dtype, margin, jit):
    random = np.exp2(np.random.default_rng(0).uniform(-126, 127, 4096)).astype(F32)
    edges = F32([1e-45, 1e-39, 448.0, 57344.0, 1.0, 1e-30, 1.2e-38, 3.4e38, 5e-36, 2e-34, 0.0, np.inf, -np.inf, np.nan])
    amaxes = np.concatenate([random, edges])
    old = np.exp2(np.random.default_rng(1).uniform(-9, 9, amaxes.size)).astype(F32)

    def ours(a, o):
        return compute_scale(a, DTYPES[dtype], margin=margin, old_scale=o)

    actual = (jax.jit(ours) if jit else ours)(jnp.asarray(amaxes), jnp.asarray(old))
    expected = [oracles.scale_from_amax(a, dtype, margin=margin, old=o) for a, o in zip(amaxes, old, strict=True)]
    assert_bitwise(actual, F32(expected))


@pytest.mark.parametrize("bad", [0.0, np.inf, np.nan])
def test_an_amax_without_information_keeps_the_old_scale(bad):
    assert float(compute_scale(F32(bad) * jnp.ones(()), jnp.float8_e4m3fn, old_scale=jnp.float32(3.5))) == 3.5
    without = compute_scale(F32(bad) * jnp.ones(()), jnp.float8_e4m3fn)
    np.testing.assert_array_equal(without, 1.0 if bad == 0.0 else np.nan)
    np.testing.assert_array_equal(power_of_two_scale(F32(bad) * jnp.ones(()), jnp.float8_e4m3fn), without)


def test_a_tiny_amax_gives_the_largest_fp32_and_no_inf():
    tiny = jnp.float32(2e-38)
    assert float(compute_scale(tiny, jnp.float8_e4m3fn)) == float(jnp.finfo(jnp.float32).max)
    assert float(compute_scale(tiny, jnp.float8_e5m2, margin=2)) == float(jnp.finfo(jnp.float32).max)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_amax(dtype):
    x = draw("amax", (5, 7, 3), dtype)
    assert_bitwise(amax(x), oracles.amax(x))
    assert jnp.isnan(amax(x.at[1, 2, 0].set(jnp.nan)))
    assert jnp.isinf(amax(x.at[1, 2, 0].set(-jnp.inf)))
    assert float(amax(jnp.zeros((2, 2), dtype))) == 0.0


@pytest.mark.costly("where0-float32", slow=("where0-bfloat16",))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("where", [(0, 0), (77, 131), (143, 271)])
def test_amax_of_a_large_array_finds_its_nan(dtype, where):
    """XLA's own maximum on CPU loses a nan in arrays of some thousand values, and between devices."""
    x = draw("amax", (144, 272), dtype)
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.NamedSharding(mesh, jax.P("a"))
    for fn in (amax, jax.jit(amax)):
        for value in (x, jax.device_put(x, sharded)):
            assert_bitwise(fn(value), oracles.amax(x))
            assert jnp.isnan(fn(value.at[where].set(jnp.nan)))
            assert jnp.isinf(fn(value.at[where].set(-jnp.inf)))


def test_amax_over_axes_and_of_subnormal_values():
    x = draw("amax", (6, 8, 5))
    assert_bitwise(amax(x, axis=(0, 2)), np.max(np.abs(np.asarray(x)), axis=(0, 2)))
    assert_bitwise(amax(jnp.array([1e-39, -1e-40, 0.0])), F32(0))


@pytest.mark.parametrize("length", [1, 1024, 8192])
def test_a_nan_in_a_history_freezes_no_scale_and_in_one_of_many_microbatches_is_not_lost(length):
    recipe = DelayedScaling(amax_history_len=length)
    history = jnp.ones((length,)).at[length // 2].set(jnp.nan)
    state = {"scale": jnp.float32(3), "amax_history": history}
    in_use = jax.jit(lambda s: scale_in_use(s, jnp.float8_e4m3fn, amax_rule_of(recipe)))(state)
    assert float(in_use) == (3.0 if length == 1 else 448.0), "of the other amaxes, or the old one"
    stacked = {"scale": jnp.full((8,), 3.0), "amax_history": jnp.ones((8, length)).at[5, 0].set(jnp.nan)}
    merged = jax.jit(merge_quantizers)(stacked)
    assert jnp.isnan(merged["amax_history"][0])
    assert_bitwise(merged["amax_history"][1:], np.ones(length - 1, F32))
    assert_bitwise(merged["scale"], F32(3))


def _step(recipe, dtype):
    """One use of a state, as the ops do it: the scale to quantize with, and the next state."""

    @jax.jit
    def step(state, new_amax):
        scale = scale_in_use(state, DTYPES[dtype], amax_rule_of(recipe))
        return scale, next_amax_state(state, scale, new_amax)

    return step


def _run(recipe, dtype, amaxes):
    """Scales of consecutive uses, ours and Transformer Engine's, in whose history inf and nan would stay: it gets 0."""
    length = recipe.amax_history_len
    state = {"scale": jnp.ones((), jnp.float32), "amax_history": jnp.zeros((length,), jnp.float32)}
    theirs = oracles.TransformerEngineHistory(dtype, length, recipe.amax_compute_algo, recipe.margin)
    step, ours, expected = _step(recipe, dtype), [], []
    for new_amax in amaxes:
        scale, state = step(state, jnp.float32(new_amax))
        ours.append(np.asarray(scale))
        expected.append(theirs.use(F32(new_amax if np.isfinite(new_amax) else 0.0)))
    return F32(ours), F32(expected), state, theirs


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_history_gives_transformer_engines_scale_at_every_step(dtype, length, algorithm):
    recipe = DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm, margin=1)
    amaxes = [
        3.0,
        5.0,
        0.1,
        0.0,
        0.2,
        np.inf,
        0.3,
        7e-3,
        1e-37,
        0.0,
        0.0,
        0.0,
        0.0,
        0.0,
        2.0,
        np.nan,
        1.0,
        1.0,
        1.0,
        1.0,
        1.0,
        4.0,
        0.5,
    ]
    ours, expected, state, theirs = _run(recipe, dtype, amaxes)
    assert_bitwise(ours, expected)
    assert_bitwise(scale_in_use(state, DTYPES[dtype], amax_rule_of(recipe)), theirs.scale)
    # Ours keeps the newest first; theirs ends up with slot 0 empty and the newest last.
    newest_first = F32(amaxes[::-1][:length])
    assert_bitwise(state["amax_history"], newest_first)
    assert_bitwise(theirs.history[1:], newest_first[::-1][1:])


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.one_of(st.floats(0, 2.0**100, width=32), st.just(np.inf), st.just(np.nan)), min_size=1, max_size=10),
    st.sampled_from(["max", "most_recent"]),
)
def test_history_on_random_sequences(amaxes, algorithm):
    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=algorithm)
    ours, expected, _, _ = _run(recipe, E4M3, amaxes)
    assert_bitwise(ours, expected)


def test_the_first_use_has_scale_one():
    recipe = DelayedScaling(amax_history_len=4)
    state = {"scale": jnp.ones((), jnp.float32), "amax_history": jnp.zeros((4,), jnp.float32)}
    assert float(scale_in_use(state, jnp.float8_e4m3fn, amax_rule_of(recipe))) == 1.0


def test_states_of_one_type_share_one_lowering_of_their_scales() -> None:
    """Else a model's program, and the time to trace and lower it, grows by each of its quantizers."""
    rule = amax_rule_of(DelayedScaling(amax_history_len=4))

    @jax.jit
    def scales(histories: list[jax.Array]) -> list[jax.Array]:
        states = [{"scale": jnp.float32(1.0), "amax_history": history} for history in histories]
        return [scale_in_use(state, jnp.float8_e4m3fn, rule) for state in states]

    def reductions(count: int) -> int:
        return scales.lower([jnp.ones(4)] * count).as_text().count("stablehlo.reduce(")

    assert reductions(1) == reductions(3) == 1
