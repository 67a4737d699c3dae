"""Ranking layers by what their quantization does, against runs in which only one layer is really quantized."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.cli.precision_rules import quantization_rules
from jax_te.config import TransformerConfig
from jax_te.layers import (
    DotProductAttention,
    Linear,
    LoRA,
    MultiheadAttention,
    name_modules,
    quantizable_modules,
    quantize_parameters,
)
from jax_te.megatron import RecipeConfig, apply_quantization_config
from jax_te.models import GPTModel
from jax_te.quantize import frozen_scales, observe_quantization
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, ModuleRecipe, MXFP8BlockScaling, autocast
from jax_te.training import calibrate_delayed_scaling, keep_in_bf16_rules, sensitivity
from tests.support.numerics import draw, without_type_checker


class Branches(nnx.Module):
    """Three layers on the same input, but the second one's has an outlier in its first row."""

    def __init__(self, rngs):
        self.a, self.b, self.c = (Linear(32, 32, bias=False, rngs=rngs) for _ in range(3))

    def __call__(self, x):
        return self.a(x) + self.b(x.at[0, 3].set(3e5)) + self.c(x)


def branches_loss(model, x, key):
    assert key is None
    return jnp.mean(jnp.square(model(x)[1:] - 1.0))  # the outlier's row counts for nothing but its amax


@pytest.mark.costly("recipe1")
@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), DelayedScaling(amax_history_len=3)])
def test_a_layer_with_an_outlier_in_its_input_is_found(recipe):
    found = sensitivity(Branches(nnx.Rngs(0)), branches_loss, [draw("x", (16, 32))], recipe)
    assert found[0].module == "b"
    assert found[0].kind == "Linear"
    assert found[0].gradient_error > 5 * found[1].gradient_error
    assert {layer.module for layer in found} == {"a", "b", "c"}


@pytest.mark.slow
def test_blocks_keep_an_outlier_to_itself():
    """One column in 32 of the weight gradient's operand shares a block with it; under current scaling all share."""
    errors = {}
    for recipe in (Float8CurrentScaling(), MXFP8BlockScaling()):
        found = sensitivity(Branches(nnx.Rngs(0)), branches_loss, [draw("x", (32, 32))], recipe)
        errors[recipe.name] = {layer.module: layer.gradient_error for layer in found}
    assert errors["mxfp8"]["b"] < 0.6 * errors["current"]["b"]
    assert errors["mxfp8"]["a"] == pytest.approx(errors["current"]["a"], rel=0.5)


@pytest.mark.parametrize("wrt", [nnx.Param, nnx.LoRAParam])
def test_the_numbers_are_those_of_quantizing_one_layer_only(wrt):
    """And those of the parameters that are trained."""
    recipe, batches = Float8CurrentScaling(), [draw(name, (16, 32)) for name in ("one", "two")]
    model = Branches(nnx.Rngs(0))
    if wrt is nnx.LoRAParam:
        model.a = LoRA(model.a, 4, rngs=nnx.Rngs(1))
        model.a.lora_b.set_value(draw("lora_b", model.a.lora_b.shape))

    def measure(path):
        for name, module in quantizable_modules(model):
            module.high_precision = name != path
        graphdef, params, rest = nnx.split(model, wrt, ...)
        with autocast(recipe):
            loss_of = lambda params, x: branches_loss(nnx.merge(graphdef, params, rest), x, None)  # noqa: E731
            run = jax.jit(jax.value_and_grad(loss_of))
            results = [run(params, x) for x in batches]
        losses = [float(loss) for loss, _ in results]
        grads = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(grad)]) for _, grad in results]
        return np.mean(losses), np.concatenate(grads)

    loss0, grad0 = measure(None)
    for layer in sensitivity(model, branches_loss, batches, recipe, wrt=wrt):
        loss, grad = measure(layer.module)
        error = np.linalg.norm(grad - grad0) / np.linalg.norm(grad0)
        assert layer.gradient_error == pytest.approx(error, rel=1e-3)
        assert layer.loss_increase == pytest.approx(loss - loss0, rel=1e-3, abs=1e-6)
        assert layer.gradient_error > 1e-4  # far above the rounding of fp32


def test_parameters_that_there_are_not():
    with pytest.raises(ValueError, match="fits no parameter of the model"):
        sensitivity(
            Branches(nnx.Rngs(0)), branches_loss, [draw("x", (16, 32))], Float8CurrentScaling(), wrt=nnx.LoRAParam
        )


def test_the_loss_scale_is_that_of_the_run():
    """Without it gradients of fp16 are too small for their dtype."""
    model = nnx.Sequential(*(Linear(32, 32, params_dtype=jnp.float16, rngs=nnx.Rngs(i)) for i in range(2)))
    x, scale = draw("x", (64, 32), jnp.float16), 2.0**12

    def errors(factor=1.0, **options):
        loss = lambda model, x, key: factor * jnp.mean(model(x).astype(jnp.float32) ** 2) / 256  # noqa: E731
        found = sensitivity(model, loss, [x], Float8CurrentScaling(), **options)
        return {layer.module: (layer.gradient_error, layer.loss_increase / factor) for layer in found}

    scaled, wanted, plain = errors(loss_scale=scale), errors(factor=scale), errors()
    for layer, numbers in wanted.items():
        assert scaled[layer] == pytest.approx(numbers, rel=1e-5)
        assert plain[layer][0] != pytest.approx(numbers[0], rel=1e-2)


class Scaled(nnx.Module):
    """The core of attention on one array, times a parameter."""

    def __init__(self, rngs):
        self.core_attention, self.gain = DotProductAttention(2, 128), nnx.Param(jnp.full((1, 1, 256), 3.0))

    def __call__(self, x):
        x = x * self.gain[...]
        return self.core_attention(*3 * [x.reshape(1, 128, 2, 128)]).reshape(x.shape)


def projected(rngs):
    return MultiheadAttention(256, 2, attention_dropout=0.0, rngs=rngs)


@pytest.mark.slow
@pytest.mark.wide("delayed")
@pytest.mark.parametrize(
    ("build", "recipe"),
    [
        (Scaled, DelayedScaling(fp8_dpa=True)),
        (Scaled, Float8CurrentScaling(fp8_mha=True)),
        (projected, DelayedScaling(fp8_dpa=True)),
    ],
    ids=["delayed", "current", "projected"],
)
def test_quantized_attention_is_a_layer_among_the_others(build, recipe):
    """Of which the baseline has none quantized: all numbers are those of models with nothing and one layer in FP8."""
    model, batch = build(nnx.Rngs(0)), draw("x", (1, 128, 256))

    def loss_fn(model, x, key=None):
        return jnp.mean(jnp.square(model(x) - x))

    layers = {"core_attention": model.core_attention, **dict(quantizable_modules(model))}
    found = {layer.module: layer for layer in sensitivity(model, loss_fn, [batch], recipe)}
    assert found.keys() == layers.keys()
    assert {path for path, layer in found.items() if not layer.has_rules} == {"core_attention"}
    calibrate_delayed_scaling(model, loss_fn, batch, recipe)

    def measure(path):
        for name, module in layers.items():
            module.high_precision = name != path
        with autocast(None if path is None else recipe), frozen_scales():
            loss, grads = nnx.jit(nnx.value_and_grad(loss_fn))(model, batch)
        return float(loss), np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(grads)])

    loss0, grad0 = measure(None)
    for path, layer in found.items():
        loss, grad = measure(path)
        error = np.linalg.norm(grad - grad0) / np.linalg.norm(grad0)
        assert error > 1e-3
        # Sums in another order move some values of the softmax to the next one in FP8.
        assert layer.gradient_error == pytest.approx(error, rel=0.02)
        assert layer.loss_increase == pytest.approx(loss - loss0, rel=0.02, abs=2.0**-20)


def gpt(**changes):
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, ffn_hidden_size=64, **changes)
    config = dataclasses.replace(
        config, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )
    return GPTModel(config, vocab_size=64, max_sequence_length=16, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_layers_of_a_half_precision_model_whatever_their_rules():
    tokens = np.random.default_rng(0).integers(0, 64, (4, 17)).astype(np.int32)
    model = gpt(params_dtype=jnp.bfloat16)
    model.layers[0].self_attention.qkv.module_recipe = ModuleRecipe(training=None)
    model.layers[0].layernorm_mlp.high_precision = True
    before = nnx.split(model)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    found = sensitivity(
        model, lambda model, batch, key: model.loss(**batch, dropout_key=key), [batch], Float8CurrentScaling()
    )
    assert len(found) == 3
    assert all(1e-4 < layer.gradient_error < 0.5 for layer in found)
    after = nnx.split(model)
    assert before[0] == after[0]
    assert all(bool((a == b).all()) for a, b in zip(*map(jax.tree.leaves, (before[1], after[1])), strict=True))


@pytest.mark.costly
def test_rules_keep_the_named_layers_out():
    model = Branches(nnx.Rngs(0))
    rules = quantization_rules(keep_in_bf16_rules(["b", "c"]))
    assert isinstance(rules, RecipeConfig)
    report = apply_quantization_config(model, rules)
    assert report.ambient == ("a",)
    assert (report.unused_matchers, report.unused_configs, report.disabled_matchers) == ((), (), ())
    with autocast(Float8CurrentScaling()), observe_quantization() as observer:
        name_modules(model)(draw("x", (16, 32)))
    assert {module for module, _ in observer.records} == {"a"}


def test_bad_arguments():
    model, x = Branches(nnx.Rngs(0)), draw("x", (16, 32))
    with without_type_checker(), pytest.raises(TypeError, match="recipe must be a Recipe, got None"):
        sensitivity(model, branches_loss, [x], None)
    with pytest.raises(ValueError, match="at least one batch"):
        sensitivity(model, branches_loss, [], Float8CurrentScaling())
    with pytest.raises(ValueError, match="no layer that a recipe could quantize"):
        sensitivity(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), branches_loss, [x], Float8CurrentScaling())
    with pytest.raises(ValueError, match="at least one layer"):
        keep_in_bf16_rules([])
    with autocast(Float8CurrentScaling()):
        quantize_parameters(model)
    with pytest.raises(ValueError, match="holds quantized kernels"):
        sensitivity(model, branches_loss, [x], Float8CurrentScaling())
