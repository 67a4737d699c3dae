"""Steps outside of a recipe: a loop that writes gradients of states back keeps the states that it has."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_te.linen as te
from jax_te.recipe import DelayedScaling, autocast
from tests.support.numerics import assert_bitwise, draw

RECIPE = DelayedScaling(amax_history_len=4)
X = draw("x", (16, 32))
STATE = "_overwrite_with_gradient"


class Own(nn.Module):
    """A module with a parameter of its own."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("w", nn.initializers.lecun_normal(), (32, 32))
        return jnp.einsum("bk,kn->bn", x, kernel)


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(64)(x)
        x = nn.Einsum((64, 32), "bk,kn->bn")(nn.gelu(x))
        return Own()(x)


MODELS = {
    "te.Linear": te.Linear(32, 32),
    "DotGeneral": nn.Dense(32, dot_general_cls=te.DotGeneral),
    "quantize_model": te.quantize_model(Plain(), X, rules={"*": "ambient"}),
}


@pytest.mark.costly("jax-te.Linear", slow=("te-DotGeneral", "te-te.Linear", "te-quantize_model", "jax-quantize_model"))
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("derivative", [jax.value_and_grad, te.value_and_grad], ids=["jax", "te"])
def test_a_step_outside_of_the_recipe_keeps_states(model, derivative):
    def step(variables):
        _, gradients = jax.jit(derivative(lambda variables: jnp.mean(model.apply(variables, X) ** 2)))(variables)
        return {"params": variables["params"], STATE: gradients[STATE]}

    with autocast(RECIPE):
        before = step(step(model.init(jax.random.key(0), X)))
    after = step(before)  # in high precision
    jax.tree.map(assert_bitwise, after[STATE], before[STATE])
    assert all(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(after[STATE]))
    with autocast(RECIPE):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(step(after)))


@pytest.mark.costly
def test_the_numbers_of_a_call_without_recipe_are_those_of_flax():
    model = MODELS["quantize_model"]
    with autocast(RECIPE):
        variables = model.init(jax.random.key(0), X)

    def gradients(model):
        return jax.grad(lambda params: jnp.mean(model.apply({**variables, "params": params}, X) ** 2))(
            variables["params"]
        )

    jax.tree.map(assert_bitwise, gradients(model), gradients(Plain()))


def test_what_else_a_module_of_ones_own_returns_stays():
    class Tagged(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = jnp.einsum("bk,kn->bn", x, self.param("w", nn.initializers.lecun_normal(), (32, 32)))
            return "tag", True, y

    model = te.quantize_model(Tagged(), X, rules={"w": "ambient"})
    with autocast(RECIPE):
        variables = model.init(jax.random.key(0), X)

    def loss(variables):
        tag, flag, y = model.apply(variables, X)
        assert (tag, flag) == ("tag", True)
        return jnp.mean(y**2)

    states = jax.grad(loss)(variables)[STATE]
    jax.tree.map(assert_bitwise, states, variables[STATE])
