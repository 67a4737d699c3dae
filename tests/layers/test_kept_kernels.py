"""Kernels that layers keep between microbatches, recipes of a layer's own, and first and last layers in bf16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_te.layers.quantizable as quantizable
from jax_te import linen, value_and_grad
from jax_te.config import TransformerConfig
from jax_te.layers import (
    GivesKernels,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    TransformerLayer,
    cached_kernels,
    keep_in_high_precision,
    name_modules,
    prepare_quantization,
    quantizable_modules,
    quantize_kernels,
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
from tests.support.numerics import NO_DROPOUT, assert_bitwise, assert_close, draw
from tests.support.states import merging

CURRENT, SGD = Float8CurrentScaling(), optax.sgd(0.5)
# A compiled program may round fp32's last bit in another way, and a value beside a rounding boundary of FP8 then moves
# by a step of 2^-3 of its size: few values do. Kernels that are not the cached ones move all, by their whole size.
MOVED = 0.1
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
    "nvfp4-returning the norm", slow=["delayed-TransformerLayer", "delayed-LayerNormMLP", "nvfp4-LayerNormLinear"]
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
        assert all(module.kernel_cache is None for _, module in quantizable_modules(layer))
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


@pytest.mark.costly
def test_a_kept_form_of_another_recipe_is_refused():
    layer, x = Linear(32, 64, rngs=nnx.Rngs(0)), draw("x", (16, 32))
    with autocast(CURRENT):
        layer(x, is_first_microbatch=True)
        cache = quantize_kernels(layer)
    with autocast(Float8BlockScaling()):
        expected = layer(x)
        with pytest.raises(ValueError, match="the cached kernel of Linear was quantized with TensorQuantizer"):
            layer(x, is_first_microbatch=False)
        with cached_kernels(layer, cache), pytest.raises(ValueError, match="needs BlockQuantizer"):
            layer(x)
        assert_bitwise(layer(x, is_first_microbatch=True), expected)
        assert_bitwise(layer(x, is_first_microbatch=False), expected)


def armed():
    layer = LayerNormMLP(32, 64, rngs=nnx.Rngs(0))
    layer.is_first_microbatch = True
    return layer


@pytest.mark.costly
def test_the_attribute_stands_in_for_the_argument():
    layer, x = armed(), draw("x", (16, 32))
    assert layer(x) is not None
    assert layer.is_first_microbatch is True, "without a recipe there is nothing to cache"
    with autocast(CURRENT):
        first = layer(x)
        assert layer.is_first_microbatch is False
        for kernel in (layer.wi_kernel, layer.wo_kernel):
            kernel.set_value(jnp.zeros_like(kernel[...]))
        assert_bitwise(layer(x), first)
        layer.is_first_microbatch = True  # the next step
        assert not jnp.any(layer(x))
        for kernel in (layer.wi_kernel, layer.wo_kernel):
            kernel.set_value(draw("kernel", kernel[...].shape))
        layer.is_first_microbatch = None
        assert jnp.any(layer(x))
        layer.is_first_microbatch = False
        assert not jnp.any(layer(x)), "of the kernels that are cached"


def functional(call):
    """As an eager call of a module, one of its graph definition and state, which the module's state follows or not."""

    def changed(layer, x):
        graphdef, state = nnx.split(layer)
        static, before = [], layer.is_first_microbatch

        def run(state, x):
            copy = nnx.merge(graphdef, state)
            y = copy(x)
            assert copy.is_first_microbatch is False
            graphdef_after, state = nnx.split(copy)
            static.append(graphdef_after)
            return y, state

        y, state = call(run)(state, x)
        assert layer.is_first_microbatch is before, "the copy's state was not given to it"
        return y, nnx.merge(static[0], state)

    return changed


def of_module(call):
    def changed(layer, x):
        return call(lambda layer, x: layer(x))(layer, x), layer

    return changed


def differentiated(layer, x):
    def loss(layer, x):
        y = layer(x)
        return jnp.sum(y), y

    return nnx.grad(loss, has_aux=True)(layer, x)[1], layer


WAYS = {
    "eager": of_module(lambda call: call),
    "nnx.jit": of_module(nnx.jit),
    "nnx.remat": of_module(nnx.remat),
    "nnx.grad": differentiated,
    "merge": functional(lambda run: run),
    "jax.jit": functional(jax.jit),
    "jax.checkpoint": functional(jax.checkpoint),
}


@pytest.mark.costly("nnx.remat", "nnx.grad", slow=("eager", "jax.checkpoint", "nnx.jit"))
@pytest.mark.parametrize("way", WAYS)
def test_the_attribute_is_the_same_in_an_eager_call_and_under_transformations(way):
    x = draw("x", (16, 32))
    with autocast(CURRENT):
        expected = armed()(x)
        y, layer = WAYS[way](armed(), x)
        assert_close(y, expected, MOVED)
        assert layer.is_first_microbatch is False
        for kernel in (layer.wi_kernel, layer.wo_kernel):
            kernel.set_value(jnp.zeros_like(kernel[...]))
        for _ in range(2):
            assert_close(layer(x), expected, MOVED)
            assert layer.is_first_microbatch is False


@pytest.mark.costly
def test_a_cache_of_a_model_is_used_inside_of_its_context(monkeypatch):
    x = draw("x", (2, 16, 32))

    def loss(layer, x):
        return jnp.sum(jnp.sin(layer(x)))

    with autocast(CURRENT):
        layer = nnx.Sequential(LAYERS["LayerNormMLP"](), Linear(32, 16, rngs=nnx.Rngs(1)))
        before = nnx.graphdef(layer)
        plain = nnx.value_and_grad(loss)(layer, x)
        cache = quantize_kernels(layer)
        assert sorted(cache.kernels) == ["layers.0.wi_kernel", "layers.0.wo_kernel", "layers.1.kernel"]
        with monkeypatch.context() as patch:
            patch.setattr(quantizable, "quantize_kernel", lambda *args, **options: pytest.fail("quantized again"))
            for call in (nnx.value_and_grad(loss), nnx.jit(nnx.value_and_grad(loss))):
                with cached_kernels(layer, cache) as used:
                    assert used is layer
                    found = call(layer, x)
                for (path, ours), theirs in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(plain), strict=True):
                    assert_close(ours, theirs, MOVED, what=jax.tree_util.keystr(path))
        with pytest.raises(RuntimeError, match="in the middle"), cached_kernels(layer, cache):
            raise RuntimeError("in the middle")
        assert nnx.graphdef(layer) == before, "behind the context the layers are as they were"


def test_a_cache_passes_through_transformations_and_loops():
    x = draw("x", (2, 4, 32))
    with autocast(CURRENT):
        layer = Linear(32, 32, rngs=nnx.Rngs(0))
        cache = jax.jit(lambda state: quantize_kernels(nnx.merge(nnx.graphdef(layer), state)))(nnx.state(layer))
        expected = layer(x.reshape(8, 32)).reshape(x.shape)
        layer.kernel.set_value(jnp.zeros((32, 32)))

        def call(cache, x):
            with cached_kernels(nnx.clone(layer), cache) as used:
                return cache, used(x)

        assert_close(jax.lax.scan(call, cache, x)[1], expected, MOVED)


def test_a_cache_of_another_model_is_refused():
    with autocast(CURRENT):
        cache = quantize_kernels(LAYERS["LayerNormMLP"]())
        layer = Linear(32, 64, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="Linear has no kernel wi_kernel, wo_kernel; use a cache for the model"):
            cached_kernels(layer, cache).__enter__()
        other = quantize_kernels(Linear(32, 32, rngs=nnx.Rngs(0)))
        with pytest.raises(ValueError, match=r"the cached kernel has shape \(32, 32\), and the model's \(32, 64\)"):
            cached_kernels(layer, other).__enter__()
    assert layer.kernel_cache is None


@pytest.mark.costly
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


@pytest.mark.costly
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


@pytest.mark.slow
def test_first_and_last_layers_stay_in_high_precision():
    build = small_gpt(first_last_layers_bf16=True, num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2)
    with autocast(DelayedScaling(amax_history_len=2)):
        state = create_train_state(build, optax.sgd(0.1), key=jax.random.key(0))
        model = name_modules(state.model)
        with observe_quantization() as observer:
            jax.jit(
                jax.grad(
                    lambda params, graphdef, rest: gpt_loss(nnx.merge(graphdef, merging(params), rest), TOKENS, None)
                ),
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "recipe",
    [
        Float8BlockScaling(),
        pytest.param(DelayedScaling(amax_history_len=2), marks=pytest.mark.slow),
        Float8CurrentScaling(override_linear_precision=(True, False, False)),
    ],
    ids=["block", "delayed", "not_in_forward"],
)
def test_masters_of_bf16_kernels_outlive_a_change_of_the_recipe(recipe):
    """The first step after it finds each kernel to be its master's rounding, and takes nothing over from it."""
    x = jax.random.normal(jax.random.key(1), (128, 128), jnp.bfloat16)

    def loss(model, batch, key):
        return jnp.mean(jnp.square(model(batch) - 1))

    with autocast(CURRENT):
        build = functools.partial(LayerNormLinear, 128, 128, params_dtype=jnp.bfloat16)
        state = create_train_state(lambda rngs: build(rngs=rngs), SGD, key=jax.random.key(0), fp8_param=True)
        for _ in range(2):
            state, _ = make_train_step(loss, SGD)(state, x)
    before = np.asarray(state.masters["kernel"].get_value())
    with autocast(recipe):
        state, _ = make_train_step(loss, optax.sgd(0.0))(change_recipe(state, recipe), x)
    np.testing.assert_array_equal(state.masters["kernel"].get_value(), before)


def test_a_kernel_stored_by_its_own_recipe_needs_no_other():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.plain, self.stored = Linear(32, 32, rngs=rngs), Linear(32, 32, rngs=rngs)
            self.stored.module_recipe = ModuleRecipe(
                training=CURRENT, override_nonquantized_autocast=True, fp8_param=True
            )

    state = create_train_state(Two, SGD, key=jax.random.key(0))
    changed = change_recipe(state, None)
    jax.tree.map(assert_bitwise, changed.params, state.params)
    with autocast(CURRENT):
        state = create_train_state(Two, SGD, key=jax.random.key(0), fp8_param=True)
    with pytest.raises(ValueError, match="does not quantize plain/kernel: there must be a recipe"):
        change_recipe(state, None)


def test_an_attribute_of_a_users_module_is_not_taken_for_a_kernel_that_it_gives():
    class Users(nnx.Module):
        given_kernels = 3

        def __init__(self):
            self.linear = Linear(32, 64, rngs=nnx.Rngs(0))

    with autocast(CURRENT):
        assert list(quantize_kernels(Users()).kernels) == ["linear.kernel"]


def test_a_kernel_given_to_a_layer_outside_of_the_model_is_refused():
    outside = Linear(32, 64, skip_weight_param_allocation=True, rngs=nnx.Rngs(0))

    class Model(GivesKernels):
        def __init__(self):
            self.table = nnx.Param(draw("table", (32, 64)))

        def given_kernels(self):
            return [(outside, "kernel", self.table[...])]

    with autocast(CURRENT), pytest.raises(ValueError, match="the kernel of a Linear that is no part of the Model"):
        quantize_kernels(Model())


DERIVED = {"delayed": DelayedScaling(amax_history_len=2), "current": CURRENT}


def squares(model, x, first):
    return jnp.sum(jnp.square(model(x, is_first_microbatch=first)))


@pytest.mark.costly(
    "current-argument-eager",
    "current-argument-nnx.jit",
    slow=(
        "delayed-argument-eager",
        "delayed-argument-nnx.jit",
        "current-attribute-eager",
        "delayed-attribute-nnx.jit",
        "delayed-attribute-eager",
    ),
)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "nnx.jit"])
@pytest.mark.parametrize("by", ["argument", "attribute"])
@pytest.mark.parametrize("recipe", DERIVED)
def test_a_derivative_keeps_the_kernels_of_the_first_microbatch(recipe, by, jitted):
    derivative = value_and_grad(squares)
    derivative = nnx.jit(derivative, static_argnums=2) if jitted else derivative
    x = draw("x", (32, 16))
    with autocast(DERIVED[recipe]):
        kept, plain = Linear(16, 16, rngs=nnx.Rngs(0)), Linear(16, 16, rngs=nnx.Rngs(0))
        loss, grads = derivative(plain, x, None)
        kept.is_first_microbatch = True if by == "attribute" else None
        found_loss, found = derivative(kept, x, True if by == "argument" else None)
        assert_close(found_loss, loss, 2.0**-22)  # two programs may round the last bit otherwise
        jax.tree.map(
            lambda one, two: assert_close(one, two, 2.0**-20), nnx.to_pure_dict(found), nnx.to_pure_dict(grads)
        )
        states = (nnx.to_pure_dict(nnx.state(model, QuantizerState)) for model in (kept, plain))
        jax.tree.map(lambda one, two: assert_close(one, two, 2.0**-20), *states)
        assert kept.kernel_cache is not None
        assert kept.is_first_microbatch is (False if by == "attribute" else None)
        kept.kernel[...] = jnp.zeros_like(kept.kernel[...])  # which the second microbatch does not read
        again, _ = derivative(kept, x, False if by == "argument" else None)
        assert float(again) > 0.5 * float(loss)


@pytest.mark.costly("delayed")
@pytest.mark.parametrize("recipe", DERIVED)
def test_a_loss_function_may_quantize_the_kernels_itself(recipe):
    x = draw("x", (32, 16))

    def loss_fn(model):
        with cached_kernels(model, quantize_kernels(model)):
            return squares(model, x, None)

    with autocast(DERIVED[recipe]):
        kept, plain = Linear(16, 16, rngs=nnx.Rngs(0)), Linear(16, 16, rngs=nnx.Rngs(0))
        loss, _ = value_and_grad(lambda model: squares(model, x, None))(plain)
        found, grads = value_and_grad(loss_fn)(kept)
    assert_close(found, loss, 2.0**-22)
    assert float(jnp.abs(grads["kernel"][...]).max()) > 0.0
    assert kept.kernel_cache is None


@pytest.mark.costly("delayed")
@pytest.mark.parametrize("recipe", DERIVED)
def test_a_train_step_takes_a_loss_that_keeps_kernels(recipe):
    x = draw("x", (32, 16))
    found = []
    with autocast(DERIVED[recipe]):
        for first in (None, True):
            state = create_train_state(lambda rngs: Linear(16, 16, rngs=rngs), optax.sgd(0.01), key=jax.random.key(0))
            step = make_train_step(lambda model, batch, key, first=first: squares(model, batch, first), optax.sgd(0.01))
            for _ in range(2):
                state, metrics = step(state, x)
            found.append(metrics["loss"])
    assert_close(found[1], found[0], 2.0**-20)


@pytest.mark.costly("delayed")
@pytest.mark.parametrize("recipe", DERIVED)
def test_linens_derivative_keeps_the_kernels_of_the_first_microbatch(recipe):
    x, layer = draw("x", (32, 16)), linen.Linear(16, 16)

    def loss_fn(variables, first):
        y, new = layer.apply(variables, x, is_first_microbatch=first, mutable=["CachedKernel"])
        return jnp.sum(jnp.square(y)), new

    derivative = linen.value_and_grad(loss_fn, has_aux=True)
    with autocast(DERIVED[recipe]):
        variables = layer.init(jax.random.key(0), x)
        (loss, _), _ = derivative(variables, None)
        (found, cached), _ = derivative(variables, True)
        assert_close(found, loss, 2.0**-22)
        zeros = {**variables, "params": jax.tree.map(jnp.zeros_like, variables["params"]), **cached}
        (again, _), _ = derivative(zeros, False)
    assert float(again) > 0.5 * float(loss)
