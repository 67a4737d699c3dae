"""Layers inside of the user's own shard_map, with mesh axes that it leaves to the compiler."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jax_te.linen as te
from jax_te import Linear, ParallelConfig, make_mesh, value_and_grad
from jax_te.layers import Embedding
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, Recipe, autocast
from tests.support.numerics import TOLERANCE

IDS = jax.random.randint(jax.random.key(0), (4, 8), 0, 32)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.table, self.head = Embedding(32, 16, rngs=rngs), Linear(16, 32, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.head(self.table(ids))


GRAPH, PARAMS = nnx.split(Model(nnx.Rngs(0)))


def loss(params: Any, ids: Any) -> Any:
    return jnp.mean(nnx.merge(GRAPH, params)(ids) ** 2)


def marked(params: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, ("data",), to="varying"), params)


def by_hand(step: Any, check: bool = True, state: Any = PARAMS) -> Any:
    """The step on two devices along "data", whose mesh has further axes."""
    mesh = make_mesh(ParallelConfig(data=2))
    specs: Any = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P(), "axis_names": {"data"}}
    return jax.jit(jax.shard_map(step, check_vma=check, **specs))(state, IDS)


RECIPES = [None, Float8CurrentScaling(), DelayedScaling(amax_history_len=4)]


@pytest.mark.costly("True")
@pytest.mark.parametrize("check", [True, False])
def test_gradients_are_those_of_the_whole_batch(check: bool) -> None:
    def step(params: Any, ids: Any) -> Any:
        found = jax.grad(loss)(marked(params) if check else params, ids)
        return jax.tree.map(lambda each: jax.lax.pmean(each, "data"), found)

    expected = jax.grad(loss)(PARAMS, IDS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=TOLERANCE["float32"], atol=TOLERANCE["float32"]),
        by_hand(step, check=check),
        expected,
    )


@pytest.mark.parametrize("layers", [("table",), ("head",), ("table", "head")])
def test_parameters_without_marks_are_no_silent_gradient_of_one_device(layers: tuple[str, ...]) -> None:
    def step(params: Any, ids: Any) -> Any:
        mine = marked(params)
        for layer in layers:
            mine[layer] = params[layer]
        found = jax.grad(loss)(mine, ids)
        return jax.tree.map(lambda each: each / 2, found)  # a mean, if these were sums over the devices

    with pytest.raises(ValueError, match="must produce an output with the same type"):
        by_hand(step)


@pytest.mark.parametrize("check", [True, False])
def test_second_derivatives_say_what_to_change(check: bool) -> None:
    def step(params: Any, ids: Any) -> Any:
        def norm(params: Any) -> Any:
            return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(jax.grad(loss)(params, ids)))

        found = jax.grad(norm)(marked(params) if check else params)
        return jax.tree.map(lambda each: jax.lax.pmean(each, "data"), found)

    if check:
        with pytest.raises(TypeError, match="pass check_vma=False to that shard_map"):
            by_hand(step)
    else:
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(by_hand(step, check=False)))


def mean_of_devices(arrays: Any) -> Any:
    return jax.tree.map(lambda each: jax.lax.pmean(each, "data"), arrays)


@pytest.mark.costly("current", slow=("delayed",))
@pytest.mark.parametrize("recipe", RECIPES, ids=["none", "current", "delayed"])
def test_the_own_value_and_grad_with_marks_and_without_the_check(recipe: Recipe | None) -> None:
    with autocast(recipe):
        graph, state = nnx.split(Model(nnx.Rngs(0)))
        found = []
        for check in (True, False):

            def step(state: Any, ids: Any, check: bool = check) -> Any:
                model = nnx.merge(graph, marked(state) if check else state)
                loss, grads = value_and_grad(lambda model: jnp.mean(model(ids) ** 2))(model)
                return mean_of_devices((loss, nnx.to_pure_dict(grads)))

            found.append(by_hand(step, check, state))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert found[0][0] > 0.0


@pytest.mark.costly(
    "value_and_grad1-delayed",
    slow=("value_and_grad0-current", "value_and_grad0-delayed", "value_and_grad0-none", "value_and_grad1-current"),
)
@pytest.mark.parametrize("recipe", RECIPES, ids=["none", "current", "delayed"])
@pytest.mark.parametrize("derivative", [te.value_and_grad, jax.value_and_grad])
def test_linen_with_marks_and_without_the_check(derivative: Any, recipe: Recipe | None) -> None:
    layer, x = te.Linear(16, 32), jax.random.normal(jax.random.key(1), (32, 16))
    with autocast(recipe):
        variables = layer.init(jax.random.key(0), x)
        found = []
        for check in (True, False):

            def step(variables: Any, ids: Any, check: bool = check) -> Any:
                rows = x[ids.ravel()]
                given = marked(variables) if check else variables
                loss, grads = derivative(lambda given: jnp.mean(layer.apply(given, rows) ** 2))(given)
                return mean_of_devices((loss, grads["params"]))

            found.append(by_hand(step, check, variables))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert found[0][0] > 0.0
