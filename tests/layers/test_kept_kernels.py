"""Kernels that layers keep between microbatches, recipes of a layer's own, and first and last layers in bf16."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_te.layers.quantizable as quantizable
from jax_te.config import TransformerConfig
from jax_te.layers import (
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    TransformerLayer,
    keep_in_high_precision,
    name_modules,
    prepare_quantization,
    quantizable_modules,
)
from jax_te.models import GPTModel
from jax_te.quantize import QuantizedKernel, QuantizerState, observe_quantization
from jax_te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    ModuleRecipe,
    NVFP4BlockScaling,
    autocast,
    recipe_from_name,
)
from jax_te.training import change_recipe, create_train_state, make_train_step
from tests.support.numerics import NO_DROPOUT, assert_bitwise, draw

CURRENT = Float8CurrentScaling()
LAYERS = {
    "Linear": lambda: Linear(32, 64, rngs=nnx.Rngs(0)),
    "LayerNormLinear": lambda: LayerNormLinear(32, 64, rngs=nnx.Rngs(0)),
    "LayerNormMLP": lambda: LayerNormMLP(32, 64, rngs=nnx.Rngs(0)),
    "returning the norm": lambda: LayerNormMLP(32, 64, return_layernorm_output=True, rngs=nnx.Rngs(0)),
    "TransformerLayer": lambda: TransformerLayer(32, 64, 2, **NO_DROPOUT, rngs=nnx.Rngs(0)),
}


def forward(layer, x, **options):
    y = layer(x, **options)
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.costly(
    "nvfp4-LayerNormLinear", "nvfp4-returning the norm", "delayed-LayerNormMLP", "delayed-TransformerLayer"
)
@pytest.mark.wide
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_first_microbatch_keeps_and_the_others_use_what_is_kept(name, recipe, monkeypatch):
    recipe = recipe_from_name(recipe)
    x = draw("x", (2, 16, 32))
    with autocast(recipe):
        layer = LAYERS[name]()
        plain = forward(layer, x)
        assert all(getattr(m, f"{k}_cache") is None for _, m in quantizable_modules(layer) for k in m.kernels)
        assert_bitwise(forward(layer, x, is_first_microbatch=True), plain)

        def no_quantization(*args, **options):
            raise AssertionError("quantized again")

        with monkeypatch.context() as patch:
            patch.setattr(quantizable, "quantize_kernel", no_quantization)
            assert_bitwise(forward(layer, x, is_first_microbatch=False), plain)
        for _, module in quantizable_modules(layer):  # the kept form is used, not the parameter
            for kernel in module.kernels:
                getattr(module, kernel)[...] = jnp.zeros_like(getattr(module, kernel)[...])
        assert_bitwise(forward(layer, x, is_first_microbatch=False), plain)
        assert not np.array_equal(forward(layer, x), plain)
        assert_bitwise(forward(layer, x, is_first_microbatch=True), forward(layer, x))


def test_gradients_go_to_the_parameter_also_where_its_kept_form_is_used():
    x = draw("x", (2, 16, 32))
    with autocast(CURRENT):
        layer = Linear(32, 64, rngs=nnx.Rngs(0))
        layer(x, is_first_microbatch=True)

        def loss(layer, first):
            return jnp.sum(jnp.sin(layer(x, is_first_microbatch=first)))

        plain = nnx.grad(loss)(layer, None)
        for first in (True, False):
            kept = nnx.grad(loss)(layer, first)
            assert_bitwise(kept["kernel"][...], plain["kernel"][...])
            assert_bitwise(kept["bias"][...], plain["bias"][...])


def test_using_what_was_never_kept_is_an_error():
    with autocast(CURRENT), pytest.raises(ValueError, match="has kept no quantized kernel; call it with"):
        Linear(32, 64, rngs=nnx.Rngs(0))(jnp.ones((16, 32)), is_first_microbatch=False)


def test_without_a_recipe_nothing_is_kept():
    layer = Linear(32, 64, rngs=nnx.Rngs(0))
    for first in (True, False):
        layer(jnp.ones((16, 32)), is_first_microbatch=first)
    assert layer.kernel_cache is None


def test_a_kept_form_of_another_recipe_is_passed_over():
    layer, x = Linear(32, 64, rngs=nnx.Rngs(0)), draw("x", (16, 32))
    with autocast(CURRENT):
        layer(x, is_first_microbatch=True)
    with autocast(Float8BlockScaling()):
        assert_bitwise(layer(x, is_first_microbatch=False), layer(x))


def test_attribute_stands_in_for_the_argument():
    layer, x = Linear(32, 64, rngs=nnx.Rngs(0)), draw("x", (16, 32))
    layer.is_first_microbatch = True
    with autocast(CURRENT):
        layer(x)
    assert layer.kernel_cache is not None


def test_a_layers_own_recipe_in_training_and_evaluation():
    x, layer = draw("x", (16, 32)), Linear(32, 64, rngs=nnx.Rngs(0))
    high = layer(x)
    with autocast(CURRENT):
        current = layer(x)
        layer.module_recipe = ModuleRecipe(training=Float8BlockScaling(), evaluation=None)
        block = layer(x)
        layer.eval()
        assert_bitwise(layer(x), high)
        layer.train()
        assert_bitwise(layer(x), block)
    assert_bitwise(layer(x), high)  # not quantized outside, unless it is to override that, too
    layer.module_recipe = ModuleRecipe(training=Float8BlockScaling(), override_nonquantized_autocast=True)
    assert_bitwise(layer(x), block)
    assert len({np.asarray(y).tobytes() for y in (high, current, block)}) == 3


def test_states_are_prepared_for_each_layers_own_recipe():
    layer = TransformerLayer(32, 64, 2, **NO_DROPOUT, rngs=nnx.Rngs(0))
    layer.self_attention.proj.module_recipe = ModuleRecipe(training=CURRENT)
    layer.layernorm_mlp.module_recipe = ModuleRecipe(
        training=DelayedScaling(amax_history_len=2), override_nonquantized_autocast=True
    )
    keep_in_high_precision(layer.self_attention.qkv)
    prepare_quantization(layer, DelayedScaling(amax_history_len=5))
    assert layer.self_attention.qkv.quantizers is None
    assert layer.self_attention.proj.quantizers is None
    assert layer.layernorm_mlp.quantizers_1["x"]["amax_history"].shape == (2,)
    with autocast(DelayedScaling(amax_history_len=5)):
        assert np.isfinite(np.asarray(layer(draw("x", (2, 16, 32))))).all()


def small_gpt(layers=4, **options):
    config = TransformerConfig(num_layers=layers, hidden_size=32, num_attention_heads=2, **options)
    return lambda rngs: GPTModel(config, vocab_size=64, max_sequence_length=16, rngs=rngs)


def gpt_loss(model, tokens, key):
    return model.loss(tokens[:, :-1], tokens[:, 1:])


TOKENS = jax.random.randint(jax.random.key(5), (4, 17), 0, 64)


@pytest.mark.costly
def test_first_and_last_layers_stay_in_high_precision():
    build = small_gpt(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2)
    with autocast(DelayedScaling(amax_history_len=2)):
        state = create_train_state(build, optax.sgd(0.1), key=jax.random.key(0))
        model = name_modules(state.model)
        with observe_quantization() as observer:
            jax.jit(
                jax.grad(lambda params, graphdef, rest: gpt_loss(nnx.merge(graphdef, params, rest), TOKENS, None)),
                static_argnums=1,
            )(*_split(model))
        seen = {module.split(".")[1] for module, _ in observer.records}
        assert seen == {"1"}
    assert {role for _, role in observer.records} == {"x", "kernel", "grad"}


def _split(model):
    graphdef, params, rest = nnx.split(model, nnx.Any(nnx.Param, QuantizerState), ...)
    return params, graphdef, rest


def test_counts_of_first_and_last_layers_are_checked():
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        for count in (-1, 5, True):
            with pytest.raises(ValueError, match=rf"{name} must be an integer"):
                small_gpt(**{name: count})(nnx.Rngs(0))


def test_save_original_input_through_the_layer():
    x, layer = draw("x", (16, 32)), Linear(32, 64, rngs=nnx.Rngs(0))

    def gradient():
        return nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(x))))(layer)["kernel"][...]

    with autocast(CURRENT):
        plain = gradient()
        layer.save_original_input = True
        assert_bitwise(gradient(), plain)
    assert not hasattr(LayerNormLinear(32, 64, rngs=nnx.Rngs(0)), "save_original_input")


@pytest.mark.costly
@pytest.mark.parametrize("held", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_running_model_changes_its_recipe(held):
    """bf16, then delayed scaling, in one run; or FP8, then delayed scaling, then NVFP4. Parameters and optimizer state
    go on.
    """
    tx = optax.adam(1e-3)
    with autocast(CURRENT if held else None):
        state = create_train_state(small_gpt(1), tx, key=jax.random.key(0), fp8_param=held)
    losses = []
    recipes = (CURRENT, DelayedScaling(amax_history_len=4), NVFP4BlockScaling()) if held else (None, DelayedScaling())
    for recipe in recipes:
        changed = change_recipe(state, recipe)
        full = changed.masters if held else changed.params
        before = state.masters if held else state.params
        for one, other in zip(jax.tree.leaves(full), jax.tree.leaves(before), strict=True):
            assert_bitwise(one, other)
        assert bool(jax.tree.leaves(changed.quantizers)) is (recipe is not None and recipe.has_state)
        with autocast(recipe):
            step = make_train_step(gpt_loss, tx)
            for _ in range(3):
                changed, metrics = step(changed, TOKENS)
                losses.append(float(metrics["loss"]))
        state = changed
    assert losses == sorted(losses, reverse=True)
    assert int(state.step) == 3 * len(recipes)
    kernel = state.params["layers"][0]["layernorm_mlp"]["wi_kernel"].get_value()
    assert isinstance(kernel, QuantizedKernel) is held
    if held:
        with pytest.raises(ValueError, match="there must be a recipe"):
            change_recipe(state, None)
