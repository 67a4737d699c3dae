import contextlib
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import FrozenDict

from jax_te.errors import QuantizerStateError
from jax_te.layers import QuantizableModule, prepare_quantization
from jax_te.ops import dense
from jax_te.quantize import (
    ROLES,
    QuantizerState,
    as_float32,
    frozen_scales,
    init_gemm_state,
    merge_quantizers,
    precision_of,
    quantizer_variables,
    with_max_gradients,
    write_back,
)
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, Recipe
from jax_te.training import split_model
from tests.support import oracles
from tests.support.numerics import assert_bitwise, draw
from tests.support.states import merging

RECIPE = DelayedScaling(amax_history_len=4)


class Quantizable(QuantizableModule):
    """A layer as `prepare_quantization` finds one: it names the attributes that hold state."""

    kernels: ClassVar[dict[str, str]] = {"kernel": "quantizers"}

    def __init__(self, recipe=None):
        self._init_quantization()
        self.kernel = nnx.Param(draw("kernel", (16, 16)))
        self.quantizers = nnx.data(quantizer_variables(init_gemm_state(recipe)))


class Model(nnx.Module):
    def __init__(self, recipe=None):
        self.first, self.second = Quantizable(recipe), Quantizable(recipe)
        self.norm = nnx.Param(jnp.ones(16))
        self.counter = nnx.Variable(jnp.zeros((), jnp.int32))


def test_fresh_state():
    state = init_gemm_state(RECIPE)
    assert set(state) == set(ROLES)
    for role in ROLES:
        assert_bitwise(state[role]["scale"], np.float32(1))
        assert_bitwise(state[role]["amax_history"], np.zeros(4, np.float32))
    for stateless in (None, Float8CurrentScaling()):
        assert init_gemm_state(stateless) is None
        assert quantizer_variables(init_gemm_state(stateless)) is None


def test_variable_is_registered_under_the_name_that_optimizers_look_for():
    variables = jax.tree.leaves(
        quantizer_variables(init_gemm_state(RECIPE)), is_leaf=lambda v: isinstance(v, nnx.Variable)
    )
    assert [type(variable) for variable in variables] == [QuantizerState] * 6
    assert nnx.variable_name_from_type(QuantizerState) == "_overwrite_with_gradient"


def test_missing_state_names_the_remedy():
    with pytest.raises(QuantizerStateError, match=r"with autocast\(recipe\).*prepare_quantization\(model, recipe\)"):
        dense(jnp.ones((16, 16)), jnp.ones((16, 16)), recipe=RECIPE)
    with pytest.raises(ValueError, match="prepare_quantization"):  # callers may catch the built-in type
        dense(jnp.ones((16, 16)), jnp.ones((16, 16)), recipe=RECIPE)


def test_precision():
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    none = precision_of(None)
    assert all(getattr(none, role).quantizer is None and none.scale(None, role) is None for role in ROLES)
    assert none.next_state(None, dict.fromkeys(ROLES, (None, None))) is None
    current = precision_of(Float8CurrentScaling())
    assert [getattr(current, role).quantizer.dtype for role in ROLES] == [e4m3, e4m3, e5m2]
    assert [current.scale(None, role) for role in ROLES] == [None] * 3
    state = init_gemm_state(DelayedScaling(fp8_format=Format.E4M3))
    delayed = precision_of(DelayedScaling(fp8_format=Format.E4M3))
    assert [getattr(delayed, role).quantizer.dtype for role in ROLES] == [e4m3] * 3
    assert [float(delayed.scale(state, role)) for role in ROLES] == [1.0] * 3
    with pytest.raises(TypeError, match="no quantizers for recipe"):
        precision_of(Recipe())


def test_which_form_of_an_operand_its_gemms_read():
    high_wgrad = precision_of(Float8CurrentScaling(override_linear_precision=(False, False, True)))
    forms = {role: getattr(high_wgrad, role) for role in ROLES}
    assert {role: (form.read_quantized, form.read_unquantized) for role, form in forms.items()} == {
        "x": (True, True),
        "kernel": (True, False),
        "grad": (True, True),
    }
    assert [getattr(precision_of(Float8BlockScaling()), role).one_scale for role in ROLES] == [False] * 3


def test_split_model_finds_everything_once():
    model = Model(RECIPE)
    graphdef, params, quantizers, rest = split_model(model)
    assert {path[-1] for path, _ in nnx.to_flat_state(params)} == {"kernel", "norm"}
    assert len(nnx.to_flat_state(quantizers)) == 2 * 6
    assert {path[-1] for path, _ in nnx.to_flat_state(rest)} == {"counter"}
    merged = nnx.merge(graphdef, params, quantizers, rest)
    for before, after in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(merged)), strict=True):
        assert_bitwise(after, before)


def _next_state(x, kernel, g, state):
    _, vjp = jax.vjp(lambda s: dense(x, kernel, recipe=RECIPE, state=merging(s)), state)
    return vjp(g)[0]


def test_merge_is_the_state_of_all_microbatches_at_once():
    kernel = draw("kernel", (16, 16))
    xs, gs = draw("xs", (3, 16, 16)), draw("gs", (3, 16, 16))
    state = _next_state(xs[0] * 3.0, kernel, gs[0], init_gemm_state(RECIPE))  # a state with a past
    nexts = [_next_state(x, kernel, g, state) for x, g in zip(xs, gs, strict=True)]
    merged = merge_quantizers(jax.tree.map(lambda *leaves: jnp.stack(leaves), *nexts))
    whole = _next_state(xs.reshape(48, 16), kernel, gs.reshape(48, 16), state)
    assert jax.tree.structure(merged) == jax.tree.structure(whole)
    for ours, expected in zip(jax.tree.leaves(merged), jax.tree.leaves(whole), strict=True):
        assert_bitwise(ours, expected)
    newest = [float(n["x"]["amax_history"][0]) for n in nexts]
    assert float(merged["x"]["amax_history"][0]) == max(newest) != newest[-1], "not the last one's"


def test_merge_inside_scan():
    kernel, state = draw("kernel", (16, 16)), init_gemm_state(RECIPE)
    xs, gs = draw("xs", (3, 16, 16)), draw("gs", (3, 16, 16))
    _, stacked = jax.lax.scan(lambda carry, xg: (carry, _next_state(*(xg[0], kernel, xg[1]), state)), (), (xs, gs))
    whole = _next_state(xs.reshape(48, 16), kernel, gs.reshape(48, 16), state)
    jax.tree.map(assert_bitwise, merge_quantizers(stacked), whole)


def test_states_in_frozen_dicts():
    plain = jax.tree.map(lambda leaf: leaf + 5.0, init_gemm_state(RECIPE))
    old = {role: FrozenDict(state) for role, state in plain.items()}
    new = jax.tree.map(lambda leaf: leaf + 1.0, old)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), new)
    for found in (write_back(old, new), merge_quantizers(stacked)):
        assert jax.tree.structure(found) == jax.tree.structure(new)
        jax.tree.map(assert_bitwise, found, new)


def test_merge_keeps_nan():
    stacked = {"scale": jnp.ones((2,)), "amax_history": jnp.array([[jnp.nan, 1.0], [2.0, 1.0]])}
    merged = merge_quantizers(stacked)
    assert jnp.isnan(merged["amax_history"][0])
    assert float(merged["amax_history"][1]) == 1.0


def test_write_back():
    old = jax.tree.map(lambda leaf: leaf + 5.0, init_gemm_state(RECIPE))
    new = jax.tree.map(lambda leaf: leaf + 1.0, old)
    jax.tree.map(assert_bitwise, write_back(old, new), new)
    jax.tree.map(assert_bitwise, write_back(old, new, keep_old=jnp.array(True)), old)
    jax.tree.map(assert_bitwise, write_back(old, new, keep_old=jnp.array(False)), new)
    model_state = nnx.state(Model(RECIPE), QuantizerState)
    kept = jax.jit(lambda s, skip: write_back(s, jax.tree.map(lambda leaf: leaf + 1.0, s), keep_old=skip))(
        model_state, jnp.array(True)
    )
    for ours, expected in zip(jax.tree.leaves(kept), jax.tree.leaves(model_state), strict=True):
        assert_bitwise(ours, expected)


def test_write_back_takes_gradients_in_the_dtype_that_merges():
    old = jax.tree.map(lambda leaf: leaf + 5.0, init_gemm_state(RECIPE))
    new = jax.tree.map(lambda leaf: leaf + 1.0, old)
    jax.tree.map(assert_bitwise, write_back(old, with_max_gradients(new)), new)


@pytest.mark.costly
def test_write_back_of_states_that_differ():
    """Those of a kind are written at once: shapes, types and, on an Explicit mesh, shardings stay what they were."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Explicit,))

    def state(lead, slots, dtype=jnp.float32, spec=None):
        spec = jax.P(*((None,) * len(lead))) if spec is None else spec
        values = {"scale": jnp.ones(lead, dtype), "amax_history": jnp.full((*lead, slots), 2.0, dtype)}
        return jax.device_put(values, jax.NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        old = [state((), 4), state((4,), 3), state((4,), 3, spec=jax.P("data")), state((), 4, jnp.bfloat16)]
        old += [state((2,), 3), *(state((), 4) for _ in range(40))]
        new = jax.tree.map(lambda leaf: leaf + 1, old)
        for write in (write_back, jax.jit(write_back)):
            found = write(old, new)
            jax.tree.map(assert_bitwise, found, new)
            assert jax.tree.map(jax.typeof, found) == jax.tree.map(jax.typeof, new)


def test_next_state_is_exact():
    x, kernel, g = draw("x", (32, 16)), draw("kernel", (16, 48)), draw("g", (32, 48))
    state = init_gemm_state(RECIPE)
    histories = {
        role: oracles.TransformerEngineHistory(oracles.E5M2 if role == "grad" else oracles.E4M3, 4) for role in ROLES
    }
    for step in range(4):
        tensors = {"x": x * (step + 1.0), "kernel": kernel, "grad": g / (step + 1.0)}
        state = _next_state(tensors["x"], kernel, tensors["grad"], state)
        for role in ROLES:
            assert_bitwise(state[role]["scale"], histories[role].use(oracles.amax(tensors[role])), what=role)
            assert_bitwise(state[role]["amax_history"][0], oracles.amax(tensors[role]), what=role)


def test_prepare_quantization_gives_changes_and_takes_state():
    model = Model()
    before = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert prepare_quantization(model, RECIPE) is model
    assert model.first.quantizers["grad"]["amax_history"].shape == (4,)
    prepare_quantization(model, DelayedScaling(amax_history_len=8))
    assert model.second.quantizers["x"]["amax_history"].shape == (8,)
    assert len(jax.tree.leaves(nnx.state(model, QuantizerState))) == 2 * 6
    for stateless in (Float8CurrentScaling(), None):
        prepare_quantization(model, RECIPE)
        prepare_quantization(model, stateless)
        assert model.first.quantizers is None
        assert not jax.tree.leaves(nnx.state(model, QuantizerState))
    for ours, expected in zip(jax.tree.leaves(nnx.state(model, nnx.Param)), before, strict=True):
        assert_bitwise(ours, expected)


def test_prepare_quantization_of_what_cannot_be_quantized():
    with pytest.raises(ValueError, match=r"Linear has no layer that a recipe could quantize; .*LayerNormLinear"):
        prepare_quantization(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), RECIPE)


def test_states_are_not_shared():
    model = prepare_quantization(Model(), RECIPE)
    model.first.quantizers["x"]["scale"].set_value(jnp.float32(2.0))
    assert model.second.quantizers["x"]["scale"].get_value() == 1.0


def test_the_state_of_a_layer_that_did_not_run_is_kept():
    old = {"used": init_gemm_state(RECIPE), "unused": jax.tree.map(lambda leaf: leaf + 2.0, init_gemm_state(RECIPE))}

    def loss(state):
        return jnp.sum(
            dense(draw("x", (16, 16)), draw("kernel", (16, 16)), recipe=RECIPE, state=merging(state["used"]))
        )

    gradient = jax.grad(loss)(old)
    carried = jax.jit(write_back)(old, gradient)
    jax.tree.map(assert_bitwise, carried["unused"], old["unused"])
    jax.tree.map(assert_bitwise, carried["used"], gradient["used"])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), old["used"], old["unused"])  # as of scanned layers
    mixed = jax.tree.map(lambda *leaves: jnp.stack(leaves), gradient["used"], gradient["unused"])
    both = write_back(stacked, mixed)
    jax.tree.map(lambda leaf, first: assert_bitwise(leaf[0], first), both, gradient["used"])
    jax.tree.map(lambda leaf, second: assert_bitwise(leaf[1], second), both, old["unused"])


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()], ids=["none", "current"])
def test_a_state_that_the_recipe_does_not_read_comes_back_as_it_is(recipe):
    """A model that was built under delayed scaling, run for once under something else: its history waits."""
    state = with_max_gradients(jax.tree.map(lambda leaf: leaf + 3.0, init_gemm_state(RECIPE)))
    x, kernel = draw("x", (16, 16)), draw("kernel", (16, 16))

    def loss(state, kernel):
        return jnp.sum(dense(x, kernel, recipe=recipe, state=state))

    next_state, _ = jax.grad(loss, argnums=(0, 1), allow_int=True)(state, kernel)
    for actual, expected in zip(jax.tree.leaves(next_state), jax.tree.leaves(state), strict=True):
        assert actual.dtype == expected.dtype
        assert_bitwise(as_float32(actual), as_float32(expected))


@pytest.mark.parametrize("recipe", [RECIPE, DelayedScaling(amax_history_len=1), None], ids=["4", "1", "not read"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_derivative_of_a_state_in_fp32_raises(frozen, recipe):
    """JAX would add the next values of two uses, also where they are the state as it is."""
    x, state = draw("x", (16, 16)), init_gemm_state(recipe or RECIPE)

    def loss(state, uses):
        y = x
        for _ in range(uses):
            y = dense(y, x, recipe=recipe, state=state)
        return jnp.sum(y**2)

    with frozen_scales() if frozen else contextlib.nullcontext():
        for uses in (1, 2):
            with pytest.raises(QuantizerStateError, match="takes the state of delayed scaling in fp32"):
                jax.jit(jax.grad(loss), static_argnums=1)(state, uses)


@pytest.mark.parametrize("length", [1, 3])
def test_next_values_of_two_uses_are_merged_by_maximum(length):
    recipe = DelayedScaling(amax_history_len=length)
    x, kernel, state = draw("x", (16, 16)), draw("kernel", (16, 16)), init_gemm_state(recipe)

    def loss(state):
        return sum(jnp.sum(dense(y, kernel, recipe=recipe, state=state) ** 2) for y in (x, 4.0 * x))

    @jax.jit
    def step(state):
        return write_back(state, jax.grad(loss, allow_int=True)(with_max_gradients(state)))

    for _ in range(3):
        state = step(state)
        assert_bitwise(state["x"]["amax_history"][0], 4.0 * oracles.amax(x))
        assert_bitwise(state["kernel"]["amax_history"][0], oracles.amax(kernel))
