"""Generation with a KV cache against full forward passes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.models import GPTModel, generate
from jax_te.recipe import Float8CurrentScaling, ModuleRecipe, autocast
from jax_te.sharding import make_mesh
from tests.support.meshes import shard, use_mesh
from tests.support.numerics import assert_close
from tests.support.reference import ROUNDOFF, randomize

V, S = 32, 12
CONFIGS = {
    "gpt2": (TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4), {}),
    "llama": (
        TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            num_query_groups=2,
            normalization="RMSNorm",
            activation="swiglu",
            add_bias_linear=False,
        ),
        {"position_embedding_type": "rope", "share_embeddings_and_output_weights": False},
    ),
}
PROMPT = jnp.array([[1, 2, 3], [30, 3, 9], [5, 5, 5], [7, 0, 31]], jnp.int32)
KEY = jax.random.key(2)
OWN = ModuleRecipe(training=Float8CurrentScaling())


def build(form: str) -> GPTModel:
    config, options = CONFIGS[form]
    return randomize(GPTModel(config, vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0), **options))


def full(model: GPTModel, tokens: jax.Array) -> jax.Array:
    """Logits without a cache; jitted once, since nothing depends on the tokens after."""
    padded = jnp.pad(tokens, ((0, 0), (0, S - tokens.shape[1])))
    return _full(model, padded)[:, : tokens.shape[1]]


_full = jax.jit(lambda model, tokens: model(tokens))


@pytest.mark.slow
@pytest.mark.wide("llama-explicit")
@pytest.mark.parametrize(
    ("form", "mode"), [("gpt2", "no mesh"), ("gpt2", "explicit"), ("llama", "auto"), ("llama", "explicit")]
)
def test_greedy_generation_takes_the_most_likely_token_of_full_passes(form: str, mode: str) -> None:
    with use_mesh(mode):
        tokens = generate(shard(build(form)), PROMPT, steps=6, key=KEY, temperature=0.0)
    assert tokens.shape == (4, 9)
    assert tokens.dtype == jnp.int32
    tokens = jnp.asarray(np.asarray(tokens))
    assert (tokens[:, :3] == PROMPT).all()
    logits = np.asarray(full(build(form), tokens))
    chosen = np.take_along_axis(logits[:, 2:-1], np.asarray(tokens)[:, 3:, None], -1)[..., 0]
    assert (chosen >= logits[:, 2:-1].max(-1) - 1e-4).all()  # equal up to rounding


@pytest.mark.slow
@pytest.mark.wide("explicit")
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_a_model_whose_sequences_are_split_in_training_generates(mode: Any) -> None:
    """On context ranks and under sequence parallelism; one token at a time is whole everywhere."""
    config, options = CONFIGS["llama"]
    config = dataclasses.replace(config, tensor_model_parallel_size=2, sequence_parallel=True)
    config = dataclasses.replace(config, cp_load_balanced=mode == "explicit")
    expected = generate(build("llama"), PROMPT, steps=6, key=KEY, temperature=0.0)
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, context=2, tensor=2), axis_type=mode)):
        model = GPTModel(config, vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0), **options)
        tokens = generate(shard(randomize(model)), PROMPT, steps=6, key=KEY, temperature=0.0)
    np.testing.assert_array_equal(jax.device_get(tokens), expected)


@pytest.mark.costly
@pytest.mark.wide("gpt2")
@pytest.mark.parametrize("form", CONFIGS)
def test_logits_with_a_cache_are_those_of_a_full_pass(form: str) -> None:
    model = build(form)
    tokens = jnp.concatenate([PROMPT, PROMPT[::-1]], axis=1)
    step = jax.jit(lambda model, tokens, cache: model(tokens, cache=cache), donate_argnums=2)
    cache, parts = model.init_cache(4, 8), []
    for start, end in ((0, 3), (3, 4), (4, 5), (5, 6)):
        logits, cache = step(model, tokens[:, start:end], cache)
        parts.append(logits)
    # Two layers of eight sums of up to 128 products, in another order.
    tolerance = 16 * ROUNDOFF["float32"] * 128**0.5
    assert_close(jnp.concatenate(parts, axis=1), full(model, tokens), tolerance)


@pytest.mark.costly
@pytest.mark.wide("llama-explicit")
@pytest.mark.parametrize(("form", "mode"), [("gpt2", "no mesh"), ("llama", "explicit")])
def test_prompts_of_different_lengths_go_on_as_each_one_alone(form: str, mode: str) -> None:
    lengths = [3, 1, 2, 3]
    with use_mesh(mode):
        options: Any = {"steps": 4, "key": KEY, "temperature": 0.0}
        tokens = np.asarray(generate(shard(build(form)), PROMPT, lengths=lengths, **options))
    logits = np.asarray(full(build(form), jnp.asarray(tokens)))
    for i, length in enumerate(lengths):
        np.testing.assert_array_equal(tokens[i, :length], PROMPT[i, :length])
        chosen = np.take_along_axis(logits[i, length - 1 : -1], tokens[i, length:, None], -1)[:, 0]
        assert (chosen >= logits[i, length - 1 : -1].max(-1) - 1e-4).all()  # equal up to rounding


class Traced(GPTModel):
    """A model that counts how many numbers of tokens it has been traced for; each trace of a program has two calls."""

    lengths: list[int] = []  # noqa: RUF012

    def __call__(self, tokens: Any, *args: Any, **options: Any) -> Any:
        self.lengths.append(tokens.shape[1])
        return super().__call__(tokens, *args, **options)


class LessMean(nnx.Module):
    """A feed-forward block that reads all tokens of a call."""

    reads_later_tokens = True

    def __call__(self, x: jax.Array, is_first_microbatch: bool | None = None) -> jax.Array:
        return x - jnp.mean(x, axis=1, keepdims=True)


@pytest.mark.costly("a recipe of a kernel", "a block of one's own", "plain")
@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda layer: None, [32, 1]),
        (lambda layer: setattr(layer, "layernorm_mlp", LessMean()), [3, 1]),
        (lambda layer: setattr(layer.layernorm_mlp, "kernel_recipes", (("wi_kernel", OWN),)), [3, 1]),
        (lambda layer: setattr(layer.self_attention.proj, "module_recipe", OWN), [3, 1]),
    ],
    ids=["plain", "a block of one's own", "a recipe of a kernel", "a recipe of a layer"],
)
def test_padding_is_not_shown_to_a_module_that_reads_later_tokens(change: Any, wanted: list[int]) -> None:
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    model = Traced(config, vocab_size=V, max_sequence_length=40, rngs=nnx.Rngs(0))
    change(model.layers[0])
    Traced.lengths.clear()
    jax.eval_shape(lambda: generate(model, PROMPT, steps=4, key=KEY))
    assert Traced.lengths[: len(wanted)] == wanted


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, False),
        ({"moe_expert_capacity_factor": 1.0}, True),
        ({"moe_router_force_load_balancing": True}, True),
        ({"moe_router_force_biased": 0.5}, True),
        ({"moe_token_dispatcher_type": "alltoall", "moe_expert_rank_capacity_factor": 1.0}, True),
    ],
)
def test_experts_that_read_the_number_of_tokens_say_so(fields: dict[str, Any], wanted: bool) -> None:
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_moe_experts=4, **fields)
    model = nnx.eval_shape(lambda: GPTModel(config, vocab_size=V, max_sequence_length=40, rngs=nnx.Rngs(0)))
    modules = [module for _, module in nnx.iter_modules(model)]
    assert any(getattr(module, "reads_later_tokens", False) for module in modules) is wanted


@pytest.mark.parametrize(
    ("fields", "recipe", "wanted"),
    [
        ({}, None, [32, 1]),
        # Scales of all tokens, and the number of tokens that an expert takes of all, would be others with padding.
        ({}, Float8CurrentScaling(), [3, 1, 9, 1]),
        ({"num_moe_experts": 4, "moe_expert_capacity_factor": 1.0}, None, [3, 1, 9, 1]),
    ],
    ids=["plain", "a recipe", "a capacity of experts"],
)
@pytest.mark.costly("a recipe", slow=["a capacity of experts"])
def test_prompts_of_many_lengths_run_one_program(fields: dict[str, Any], recipe: Any, wanted: list[int]) -> None:
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, **fields)
    model = Traced(config, vocab_size=V, max_sequence_length=40, rngs=nnx.Rngs(0))
    Traced.lengths.clear()
    tokens = jax.random.randint(KEY, (2, 9), 0, V)
    options: Any = {"key": KEY, "temperature": 0.0}
    with autocast(recipe):
        for length, steps in ((3, 4), (9, 8)):
            found = generate(model, tokens[:, :length], steps=steps, **options)
            assert found.shape == (2, length + steps)
            np.testing.assert_array_equal(found[:, :length], tokens[:, :length])
    assert Traced.lengths == wanted


@pytest.mark.costly(slow=("generate-evaluation mode", "generate-training mode"))
@pytest.mark.parametrize("training", [True, False], ids=["training mode", "evaluation mode"])
@pytest.mark.parametrize(
    "program",
    [
        lambda model: generate(model, PROMPT, steps=2, key=KEY),
        lambda model: model.max_logits(PROMPT),
    ],
    ids=["generate", "max_logits"],
)
def test_evaluation_is_under_the_layers_recipes_for_evaluation(program: Any, training: bool) -> None:
    fp8 = Float8CurrentScaling()
    for recipe in (
        ModuleRecipe(training=fp8, evaluation=None, override_nonquantized_autocast=True),
        ModuleRecipe(training=None, evaluation=fp8, override_nonquantized_autocast=True),
    ):
        model = build("gpt2")
        for layer in model.layers:
            layer.layernorm_mlp.module_recipe = recipe
        model.set_attributes(deterministic=not training)
        traced = str(jax.make_jaxpr(program)(model))
        assert ("f8_e4m3fn" in traced) == (recipe.evaluation is not None)
        assert model.training == training


@pytest.mark.slow
def test_sampling_follows_the_key_and_the_distribution() -> None:
    model = build("gpt2")
    prompts = jnp.tile(PROMPT[:1], (2048, 1))
    call: Any = lambda key, **options: np.asarray(generate(model, prompts, steps=1, key=key, **options))[:, 3]  # noqa: E731
    drawn = call(KEY)
    assert (drawn == call(KEY)).all()
    assert (drawn != call(jax.random.key(3))).any()
    logits = np.asarray(full(model, PROMPT[:1])[0, -1], np.float64)
    for options, scaled in (
        ({}, logits),
        ({"temperature": 0.5}, logits / 0.5),
        ({"top_k": 3}, np.where(logits >= np.sort(logits)[-3], logits, -np.inf)),
    ):
        p = np.exp(scaled - scaled.max())
        p /= p.sum()
        counts = np.bincount(call(KEY, **options), minlength=V)
        spread = np.sqrt(2048 * p * (1 - p))
        assert (np.abs(counts - 2048 * p) <= 5 * spread + 1).all(), options


@pytest.mark.costly
def test_every_step_draws_anew() -> None:
    model = build("gpt2")
    nnx.update(
        model, jax.tree.map(jnp.zeros_like, nnx.state(model))
    )  # every token is equally likely, whatever came before
    tokens = np.asarray(generate(model, PROMPT, steps=9, key=KEY))[:, 3:]
    assert all(len(set(row)) > 3 for row in tokens.tolist())


@pytest.mark.costly
def test_one_step_and_a_large_top_k() -> None:
    tokens = generate(build("gpt2"), PROMPT[:1, :1], steps=1, key=KEY, top_k=1000)
    assert tokens.shape == (1, 2)


@pytest.mark.costly("prompt0-options0-steps.* 0")
@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (PROMPT, {"steps": 0}, "steps.* 0"),
        (PROMPT, {"steps": 10}, r"prompt \(3\).* steps \(10\).* 13 .*max_sequence_length 12"),
        (PROMPT, {"steps": 1, "temperature": -1.0}, r"temperature.* -1\.0"),
        (PROMPT, {"steps": 1, "temperature": 1e39, "top_k": 1}, r"temperature.* at most .* 1e\+39"),
        (PROMPT, {"steps": 1, "top_k": 0}, "top_k.* 0"),
        (PROMPT[:, :0], {"steps": 1}, r"prompt.* \(4, 0\)"),
        (PROMPT[0], {"steps": 1}, r"prompt.* \(3,\)"),
        (PROMPT, {"steps": 1, "lengths": [1, 2, 3]}, r"lengths.* each row.* \(4, 3\)"),
        (PROMPT, {"steps": 1, "lengths": [1, 2, 3, 4]}, r"lengths.* 1 to s"),
        (PROMPT, {"steps": 1, "lengths": [0, 2, 3, 3]}, r"lengths.* 1 to s"),
    ],
)
def test_bad_arguments_say_what_is_allowed(prompt: jax.Array, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(build("gpt2"), prompt, key=KEY, **options)


@pytest.mark.costly("1e-39", slow=("2e-38",))
@pytest.mark.parametrize("temperature", [2e-38, 1e-39, 1e-50])
def test_low_temperatures_take_the_most_likely_token(temperature: float) -> None:
    """By such a divisor logits would be infinite, or nan, and many tokens the most likely one."""
    model = build("gpt2")
    wanted = generate(model, PROMPT, steps=2, key=KEY, temperature=0.0)
    np.testing.assert_array_equal(generate(model, PROMPT, steps=2, key=KEY, temperature=temperature), wanted)
