"""Sums of next states, which JAX makes of several uses in one derivative: the next call finds them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_te.linen as te
from jax_te import layers
from jax_te.config import RouterOptions
from jax_te.quantize import as_float32, merge_quantizers, with_max_gradients, write_back
from jax_te.recipe import DelayedScaling, autocast
from tests.support.numerics import assert_bitwise, draw

X = draw("x", (3, 16, 32))
STATE = "_overwrite_with_gradient"


@pytest.fixture(autouse=True)
def recipe():
    with autocast(DelayedScaling(amax_history_len=4)):
        yield


class Rematerialized(nn.Module):
    """A layer that is called twice, each time in a program of its own."""

    def setup(self):
        self.layer = te.Linear(32, 32)

    def __call__(self, x):
        call = nn.remat(lambda module, x: module.layer(x))
        return call(self, call(self, x))


def variables_of(model):
    return nn.unbox(jax.jit(model.init)(jax.random.key(0), X[0]))


def loss_of(model, x):
    return lambda variables: jnp.mean(model.apply(variables, x) ** 2)


def in_a_map(model, derivative):
    return derivative(lambda variables: jnp.mean(jax.lax.map(lambda x: model.apply(variables, x), X) ** 2))


def in_a_scan(model, derivative):
    def turn(total, x, variables):
        return total + loss_of(model, x)(variables), None

    return derivative(lambda variables: jax.lax.scan(lambda t, x: turn(t, x, variables), 0.0, X)[0])


def plainly(model, derivative):
    return derivative(loss_of(model, X[0]))


ROUTING = RouterOptions(num_experts=4, score_function="sigmoid", enable_expert_bias=True)


class Routed(nn.Module):
    """A router alone, whose bias moves no result."""

    @nn.compact
    def __call__(self, x):
        return te.Router(32, ROUTING)(x).probs


USES = {
    "lax.map": (te.Linear(32, 32), in_a_map),
    "lax.scan": (nn.Dense(32, dot_general_cls=te.DotGeneral), in_a_scan),
    "nn.remat": (Rematerialized(), plainly),
    "router in a lax.map": (Routed(), in_a_map),
    "experts in a lax.scan": (te.MoE(32, 64, ROUTING), in_a_scan),
}


def after(variables, gradients):
    return {"params": variables["params"], STATE: gradients[STATE]}


def finite(model, variables):
    return bool(jnp.isfinite(jax.jit(loss_of(model, X[0]))(variables)))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "call"), USES.values(), ids=USES)
def test_a_sum_is_nan_in_the_next_call(model, call):
    variables = variables_of(model)
    assert finite(model, variables)
    _, gradients = jax.jit(call(model, jax.value_and_grad))(variables)
    summed = after(variables, gradients)
    assert not finite(model, summed)
    loss, gradients = jax.jit(call(model, te.value_and_grad))(summed)
    assert not np.isfinite(loss)  # and it stays so
    assert not finite(model, after(variables, gradients))
    assert finite(model, {**summed, STATE: variables_of(model)[STATE]})
    _, gradients = jax.jit(call(model, te.value_and_grad))(variables)
    merged = after(variables, gradients)
    assert finite(model, merged)
    _, gradients = jax.jit(call(model, te.value_and_grad))(merged)
    assert finite(model, after(variables, gradients))


@pytest.mark.costly
def test_gradients_of_microbatches_that_are_added_are_nan():
    model = te.Linear(32, 32)
    variables = variables_of(model)
    added = jax.tree.map(jnp.add, *(jax.grad(loss_of(model, x))(variables) for x in X[:2]))
    assert not finite(model, after(variables, added))


def test_a_layer_that_a_step_left_out_is_nan():
    model = te.Linear(32, 32)
    variables = variables_of(model)
    zeros = jax.grad(lambda variables: 0.0)(variables)
    assert not finite(model, after(variables, zeros))


class Twice(nnx.Module):
    """A layer that one Linen module calls twice."""

    def __init__(self, *, rngs):
        self.layer = layers.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        return self.layer(self.layer(x))


class RoutedTwice(nnx.Module):
    """A router that one Linen module calls twice."""

    def __init__(self, *, rngs):
        self.router = layers.Router(32, ROUTING, rngs=rngs)

    def __call__(self, x):
        return self.router(x).probs + self.router(2.0 * x).probs


class LinenTwice(te.LinenModule, nnx_class=Twice, init=False):
    """Its Linen form."""


class LinenRoutedTwice(te.LinenModule, nnx_class=RoutedTwice, init=False):
    """Its Linen form."""


@pytest.mark.costly("jax")
@pytest.mark.parametrize("differentiate", [jax.value_and_grad, te.value_and_grad], ids=["jax", "te"])
def test_next_values_of_two_calls_within_one_linen_module_are_merged(differentiate):
    model, variables = LinenTwice(), variables_of(LinenTwice())
    for _ in range(3):
        _, gradients = jax.jit(differentiate(loss_of(model, X[0])))(variables)
        variables = after(variables, gradients)
    assert finite(model, variables)
    (state,) = [node for node in jax.tree.leaves(variables[STATE], is_leaf=is_gemm_state) if is_gemm_state(node)]
    kernel = variables["params"]["layer"]["kernel"]
    assert state["kernel"]["amax_history"][0] == jnp.abs(jax.tree.leaves(kernel)[0]).max()


def is_gemm_state(node):
    return isinstance(node, dict) and "kernel" in node and "grad" in node


@pytest.mark.costly
def test_counts_of_a_router_that_one_linen_module_calls_twice_add_up():
    model = LinenRoutedTwice()
    variables = variables_of(model)
    gradients = [jax.jit(each(loss_of(model, X[0])))(variables)[1] for each in (jax.value_and_grad, te.value_and_grad)]
    assert np.any(gradients[0][STATE]["router"]["expert_bias"])
    jax.tree.map(assert_bitwise, gradients[0][STATE], gradients[1][STATE])


@pytest.mark.costly("Router-te", slow=("MoE-te", "MoE-jax"))
@pytest.mark.parametrize("derivative", [jax.value_and_grad, te.value_and_grad], ids=["jax", "te"])
@pytest.mark.parametrize("model", [te.Router(32, ROUTING), te.MoE(32, 64, ROUTING)], ids=["Router", "MoE"])
def test_evaluation_in_a_derivative_keeps_the_expert_bias(model, derivative):
    variables = variables_of(model)

    def loss(variables, deterministic):
        result = model.apply(variables, X[0], deterministic=deterministic)
        return jnp.sum(jax.tree.leaves(result)[0] ** 2)

    trained = after(variables, jax.jit(derivative(lambda variables: loss(variables, False)))(variables)[1])
    assert any(np.any(leaf < 0) for leaf in jax.tree.leaves(trained[STATE]))  # a bias
    kept = jax.jit(derivative(lambda variables: loss(variables, True)))(trained)[1]
    biases = [nn.unbox(tree[STATE]) for tree in (trained, kept)]
    if isinstance(model, te.MoE):
        biases = [tree["router"] for tree in biases]
    assert_bitwise(biases[0]["expert_bias"], biases[1]["expert_bias"])
    assert np.isfinite(jax.jit(loss, static_argnums=1)({**trained, STATE: kept[STATE]}, False))


@pytest.mark.costly("LayerNormMLP-te", slow=("MoE-jax", "MoE-te"))
@pytest.mark.parametrize("derivative", [jax.value_and_grad, te.value_and_grad], ids=["jax", "te"])
@pytest.mark.parametrize("model", [te.LayerNormMLP(32, 64), te.MoE(32, 64, ROUTING)], ids=["LayerNormMLP", "MoE"])
def test_single_uses_go_on_with_the_same_numbers(model, derivative):
    counted = variables_of(model)
    states = {name: value for name, value in counted[STATE].items() if name != "uses"}
    uncounted = {**counted, STATE: states}  # which a user may have made
    step = jax.jit(derivative(loss_of(model, X[0])))
    for _ in range(3):
        loss, gradients = step(counted)
        other, expected = step(uncounted)
        assert_bitwise(loss, other)
        assert gradients[STATE].pop("uses") == 1.0
        jax.tree.map(assert_bitwise, gradients, expected)
        counted = after(counted, {STATE: {**gradients[STATE], "uses": jnp.float32(1)}})
        uncounted = after(uncounted, expected)


class Inner(nnx.Module):
    def __init__(self, *, rngs):
        self.layer = layers.Linear(32, 32, rngs=rngs)


class Outer(nn.Module):
    def setup(self):
        self.layer = te.Linear(32, 32)

    def __call__(self, x):
        return self.layer(x)


def test_conversion_and_preparation_keep_it():
    model = te.Linear(32, 32)
    variables = model.init(jax.random.key(0), X[0])
    assert te.from_nnx(te.to_nnx(model, variables))[STATE]["uses"] == 1.0
    nested = Outer().init(jax.random.key(0), X[0])
    whole = te.to_nnx(lambda rngs: Inner(rngs=rngs), nested)  # built of layers that are Linen modules there
    assert_bitwise(whole.layer(X[0]), Outer().apply(nested, X[0]))
    assert te.prepare_quantization(model, variables, None, X[0])[STATE] == {}
    again = te.prepare_quantization(model, variables, DelayedScaling(amax_history_len=2), X[0])
    assert np.asarray(again[STATE]["uses"]) == 1.0


def test_loops_of_ones_own_merge_and_write_back_the_collection():
    model = te.Linear(32, 32)
    variables = variables_of(model)

    @jax.jit
    def step(states, x):
        gradients = jax.grad(loss_of(model, x), allow_int=True)({**variables, STATE: with_max_gradients(states)})
        return write_back(states, as_float32(gradients[STATE]))

    old = variables[STATE]
    merged = merge_quantizers(jax.tree.map(lambda *leaves: jnp.stack(leaves), *(step(old, x) for x in X)))
    assert merged["uses"] == 1.0
    assert finite(model, after(variables, {STATE: merged}))
