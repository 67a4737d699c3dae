import threading

import jax
import jax.numpy as jnp
import pytest

from jax_te.ops import dense
from jax_te.quantize import BlockQuantizer, init_gemm_state
from jax_te.recipe import (
    RECIPES,
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    autocast,
    current_recipe,
    recipe_from_name,
)
from tests.support.numerics import draw, without_type_checker


def test_innermost_wins_and_is_undone():
    outer, inner = DelayedScaling(), Float8CurrentScaling()
    assert current_recipe() is None
    with autocast(outer):
        assert current_recipe() == outer
        with autocast(inner):
            assert current_recipe() == inner
            with autocast(None):
                assert current_recipe() is None
        assert current_recipe() == outer
        with autocast(inner, enabled=False):
            assert current_recipe() is None
    assert current_recipe() is None


def test_undone_after_an_exception():
    with pytest.raises(RuntimeError, match="inside"), autocast(DelayedScaling()):
        raise RuntimeError("inside")
    assert current_recipe() is None


def test_another_thread_does_not_see_it():
    seen = []
    with autocast(DelayedScaling()):
        thread = threading.Thread(target=lambda: seen.append(current_recipe()))
        thread.start()
        thread.join()
    assert seen == [None]


@pytest.mark.parametrize("value", [DelayedScaling, "delayed", 3])
def test_what_is_no_recipe_raises(value):
    with (
        without_type_checker(),
        pytest.raises(TypeError, match="recipe must be a Recipe or None, got "),
        autocast(value),
    ):
        pass


def test_a_class_gets_a_hint():
    with without_type_checker(), pytest.raises(TypeError, match="forget the parentheses"), autocast(DelayedScaling):
        pass


def test_one_jitted_function_under_two_recipes_gives_each_its_own_result():
    x, kernel = draw("x", (16, 32)), draw("kernel", (32, 16))
    traces = []

    @jax.jit
    def layer(x, kernel):
        traces.append(current_recipe())
        return dense(x, kernel, recipe=current_recipe())

    current = Float8CurrentScaling()
    plain = layer(x, kernel)
    with autocast(current):
        quantized = layer(x, kernel)
    again = layer(x, kernel)
    with autocast(Float8CurrentScaling()):
        quantized_again = layer(x, kernel)  # an equal recipe: no new trace
    assert traces == [None, current]
    assert jnp.array_equal(plain, again)
    assert jnp.array_equal(quantized, quantized_again)
    assert jnp.array_equal(plain, dense(x, kernel))
    assert float(jnp.max(jnp.abs(plain - quantized))) > 1e-3


def test_gradients_and_remat_see_the_recipe_of_the_trace():
    x, kernel = draw("x", (16, 32)), draw("kernel", (32, 16))

    def loss(kernel):
        return jnp.sum(dense(x, kernel, recipe=current_recipe()) ** 2)

    gradient = jax.jit(jax.grad(jax.checkpoint(loss)))
    plain = gradient(kernel)
    with autocast(Float8CurrentScaling()):
        quantized = gradient(kernel)
    assert float(jnp.max(jnp.abs(plain - quantized))) > 1e-3
    assert jnp.array_equal(plain, gradient(kernel))


def e5m2_blocks(role):
    return BlockQuantizer(dtype=jnp.float8_e5m2, power_of_two=False)


@pytest.mark.slow
def test_one_jitted_function_under_all_recipes_in_turn_gives_each_its_own_result():
    # Half of the sum from small times large values: they survive where blocks are small.
    scales = jnp.exp2(jnp.repeat(jnp.array([-12.0, 0.0]), 32))[None]
    x, kernel = draw("x", (32, 64)) * scales, draw("kernel", (64, 32)) / scales.T
    recipes = [recipe_from_name(name) for name in RECIPES] + [CustomRecipe(qfactory=e5m2_blocks)]
    traces = []

    @jax.jit
    def layer(x, kernel):
        recipe = current_recipe()
        traces.append(recipe)
        return dense(x, kernel, recipe=recipe, state=init_gemm_state(recipe))

    def under(recipe):
        with autocast(recipe):
            return layer(x, kernel)

    first = [under(recipe) for recipe in recipes]
    interleaved = [[under(recipe) for recipe in order] for order in (recipes[::-1], recipes[::2] + recipes[1::2])]
    assert traces == recipes, "one trace for each"
    for results, order in zip(interleaved, (recipes[::-1], recipes[::2] + recipes[1::2]), strict=True):
        for recipe, result in zip(order, results, strict=True):
            assert jnp.array_equal(result, first[recipes.index(recipe)])
    for recipe, result in zip(recipes, first, strict=True):
        alone = jax.jit(lambda x, k, r=recipe: dense(x, k, recipe=r, state=init_gemm_state(r)))(x, kernel)
        assert jnp.array_equal(result, alone)
    for i, one in enumerate(first):
        for j, other in enumerate(first[:i]):
            assert not jnp.array_equal(one, other), (recipes[i], recipes[j])
