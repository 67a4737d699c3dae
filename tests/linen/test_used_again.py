"""States of layers that a plain derivative reads in several calls: their next values would be sums, so it raises."""

import contextlib
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax.linen.fp8_ops import fp32_max_grad

import jax_te.linen as te
from jax_te.config import RouterOptions
from jax_te.errors import QuantizerStateError
from jax_te.quantize import as_float32, frozen_scales, with_max_gradients
from jax_te.recipe import DelayedScaling, autocast
from tests.support.numerics import assert_bitwise, draw

RECIPE = DelayedScaling(amax_history_len=2)
X = draw("x", (16, 32))
STATE = "_overwrite_with_gradient"
USED_AGAIN = r"{}: one derivative reads the state of this layer in two calls.*\n.*import value_and_grad\n"


@pytest.fixture(autouse=True)
def recipe():
    with autocast(RECIPE):
        yield


class Shared(nn.Module):
    """A layer that is called twice."""

    layer: nn.Module

    def __call__(self, x, **second):
        return self.layer(self.layer(x), **second)


class Looped(nn.Module):
    """A layer whose state all turns of a loop read."""

    @nn.compact
    def __call__(self, x):
        def turn(layer, x, _):
            return layer(x), None

        shared = ["params", STATE]
        return nn.scan(turn, variable_broadcast=shared, split_rngs={"params": False}, length=2)(
            te.Linear(32, 32, name="layer"), x, None
        )[0]


LAYERS = {
    "linear": functools.partial(te.Linear, 32, 32),
    "attention": functools.partial(te.MultiheadAttention, 32, 2, attention_dropout=0.0),
    "dense": functools.partial(nn.Dense, 32, dot_general_cls=te.DotGeneral),
}


def variables_of(model, x=X):
    return nn.unbox(model.init(jax.random.key(0), x))


def loss_of(model, x=X, **kwargs):
    return lambda variables: jnp.sum(model.apply(variables, x, **kwargs) ** 2)


@pytest.mark.costly("linear-jitted", "dense-plain", "linear-plain", slow=("attention-plain", "attention-jitted"))
@pytest.mark.parametrize("jitted", [False, True], ids=["plain", "jitted"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_shared_layer_raises(name, jitted):
    x = X[None] if name == "attention" else X
    model = Shared(LAYERS[name]())
    variables, loss = variables_of(model, x), loss_of(model, x)
    differentiate = jax.value_and_grad(jax.jit(loss) if jitted else loss)
    with pytest.raises(QuantizerStateError, match=USED_AGAIN.format(r"/layer\S*")) as error:
        jax.eval_shape(differentiate, variables)
    # The lines of the message, in place of the loop's own.
    lines = [line.strip() for line in str(error.value).splitlines() if line.startswith("    ")]

    def mended(variables):
        names = {"loss_fn": loss, "variables": variables}
        exec("\n".join(lines), names)
        return names["grads"]

    assert jax.tree.structure(jax.eval_shape(mended, variables)) == jax.tree.structure(variables)


def test_a_shared_router_raises():
    layer, x = (
        te.Router(16, RouterOptions(num_experts=4, score_function="sigmoid", enable_expert_bias=True)),
        draw("router", (2, 8, 16)),
    )
    variables = variables_of(layer, x)
    with pytest.raises(QuantizerStateError, match="expert biases would be sums"):
        jax.grad(lambda v: jnp.sum(layer.apply(v, x).probs ** 2 + layer.apply(v, 2.0 * x).probs ** 2))(variables)


def test_two_microbatches_of_one_loss_raise():
    model = te.LayerNormMLP(32, 32)
    variables = variables_of(model)
    with pytest.raises(QuantizerStateError, match=USED_AGAIN.format("/")):
        jax.jit(jax.grad(lambda v: loss_of(model)(v) + loss_of(model, -X)(v)))(variables)


def test_a_loop_over_one_layer_raises():
    model = Looped()
    with pytest.raises(QuantizerStateError, match=USED_AGAIN.format(r"/scan\(layer\)")):
        jax.grad(loss_of(model))({name: {"layer": tree} for name, tree in variables_of(te.Linear(32, 32)).items()})


@pytest.mark.costly("frozen")
@pytest.mark.parametrize("second", ["frozen", "evaluated"])
def test_a_second_call_that_keeps_the_state_raises(second):
    """Its gradient is the state, or the next value as in training, and not 0."""
    layer = te.Linear(32, 32)
    variables = variables_of(layer)

    def loss(variables):
        with frozen_scales() if second == "frozen" else contextlib.nullcontext():
            again = loss_of(layer, -X, deterministic=second == "evaluated")(variables)
        return loss_of(layer)(variables) + again

    with pytest.raises(QuantizerStateError, match=USED_AGAIN.format("/")):
        jax.grad(loss)(variables)


@pytest.mark.costly
def test_what_is_not_added_up_does_not_raise():
    layer = te.Linear(32, 32)
    variables = variables_of(layer)
    loss = loss_of(layer)
    jax.jit(lambda v: loss(v) + loss(v))(variables)  # no derivative
    with frozen_scales():
        jax.grad(lambda p: loss({**variables, "params": p}) + loss({**variables, "params": p}))(variables["params"])

    def against_a_target(variables):
        with frozen_scales():
            target = layer.apply(jax.lax.stop_gradient(variables), -X)
        return jnp.sum((layer.apply(variables, X) - target) ** 2)

    once = jax.grad(loss)(variables)[STATE]["quantizers"]
    for role in ("x", "kernel"):  # the gradient that the layer sees is another
        jax.tree.map(assert_bitwise, jax.grad(against_a_target)(variables)[STATE]["quantizers"][role], once[role])
    for tree in jax.jit(lambda v: [jax.grad(loss)(v) for _ in range(2)])(variables):
        jax.tree.map(assert_bitwise, tree[STATE]["quantizers"], once)


def test_states_that_merge_by_maximum_do_not_raise():
    model = Shared(te.Linear(32, 32))
    variables = variables_of(model)

    @jax.jit
    def merged(variables):
        states = {"layer": {"quantizers": with_max_gradients(variables[STATE]["layer"]["quantizers"])}}
        grads = jax.grad(loss_of(model), allow_int=True)({**variables, STATE: states})[STATE]
        assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {fp32_max_grad}
        return as_float32(grads["layer"]["quantizers"])

    expected = te.value_and_grad(loss_of(model))(variables)[1][STATE]["layer"]["quantizers"]
    jax.tree.map(assert_bitwise, merged(variables), expected)
