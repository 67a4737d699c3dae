"""The output head under a recipe (``fp8_output_proj``): values, gradients, states, kept kernels, meshes, refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.checkpoint import TrainCheckpointer
from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.layers import LoRA, quantizable_modules
from jax_te.megatron import RecipeConfig, apply_quantization_config
from jax_te.models import BertModel, Execution, GPTModel, MegatronGPTModel, Multipliers, T5Model, generate
from jax_te.quantize import QuantizedKernel, QuantizerState
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast, recipe_from_name
from jax_te.sharding import constrain, make_mesh
from jax_te.training import (
    PipelinedLoss,
    change_recipe,
    create_train_state,
    inspect_precision,
    make_train_step,
    muon_dimension_numbers,
    sensitivity,
)
from tests.support import oracles
from tests.support.meshes import shard
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_close, draw, quick_jit
from tests.support.reference import randomize
from tests.support.states import merging

B, S, V, H = 8, 16, 48, 32
ON = TransformerConfig(
    num_layers=1, hidden_size=H, num_attention_heads=4, ffn_hidden_size=64, fp8_output_proj=True, activation="gelu"
)
OFF = dataclasses.replace(ON, fp8_output_proj=False)
DELAYED, CURRENT = DelayedScaling(amax_history_len=2), Float8CurrentScaling()
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, V, (B, S)), jnp.int32)
TX = optax.sgd(0.5)
TIED, UNTIED = (
    {"share_embeddings_and_output_weights": True},
    {"share_embeddings_and_output_weights": False},
)
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt, tied": (GPTModel, TIED),
    "gpt": (GPTModel, UNTIED),
    "megatron, tied": (MegatronGPTModel, TIED),
    "megatron": (MegatronGPTModel, UNTIED),
    "t5": (T5Model, UNTIED),
    "bert": (BertModel, {}),
}


def build(kind: str = "gpt, tied", config: TransformerConfig = ON, rngs: nnx.Rngs | None = None, **options: Any) -> Any:
    model, defaults = MODELS[kind]
    sizes: dict[str, Any] = {"vocab_size": V, "max_sequence_length": S}
    if model is MegatronGPTModel:
        sizes["transformer_layer_spec"] = None
    return model(config, rngs=rngs or nnx.Rngs(0), **{**sizes, **defaults, **options})


loss_fn = PipelinedLoss(
    embed_inputs=lambda model, tokens, key: model.embed_inputs(tokens, dropout_key=key),
    compute_loss=lambda model, y, tokens, key: model.compute_loss(y, (tokens + 1) % V),
)
"""The loss of the token after the next, which is this one plus one."""


def train(
    kind: str = "gpt, tied",
    config: TransformerConfig = ON,
    recipe: Any = DELAYED,
    *,
    steps: int = 2,
    microbatches: int = 1,
    tx: Any = TX,
    loss_fn: Any = loss_fn,
    **options: Any,
) -> tuple[list[float], Any]:
    with autocast(recipe):
        state = create_train_state(lambda rngs: build(kind, config, rngs), tx, key=jax.random.key(0), **options)
        step = make_train_step(loss_fn, tx, microbatches=microbatches)
        losses = []
        for _ in range(steps):
            state, metrics = step(state, np.asarray(TOKENS))
            losses.append(float(metrics["loss"]))
    return losses, state


def head_vjp(model: Any, x: Any, g: Any) -> tuple[Any, Any, Any, Any]:
    """Logits, and the gradients of the head's input, the model's parameters and the quantizer states."""
    graphdef, params, states, rest = nnx.split(model, nnx.Param, QuantizerState, ...)

    def place(x: Any) -> Any:
        return constrain(x, ("batch", "sequence", "hidden"))

    @quick_jit
    def run(params: Any, states: Any, x: Any, g: Any) -> Any:
        def head(params: Any, states: Any, x: Any) -> Any:
            return nnx.merge(graphdef, params, merging(states), rest)._head(x)

        y, vjp = jax.vjp(head, params, states, place(x))
        return y, vjp(constrain(g, ("batch", "sequence", "vocab")))

    y, (dparams, states, dx) = run(params, states, x, g)
    return y, dx, dict(nnx.to_flat_state(dparams)), dict(nnx.to_flat_state(states))


@pytest.mark.costly(
    "t5-recipe4",
    slow=(
        "bert-recipe5",
        "megatron-recipe7",
        "gpt, tied-recipe6",
        "gpt-recipe1",
        "gpt, tied-recipe0",
        "megatron, tied-recipe2",
    ),
)
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [(kind, CURRENT) for kind in MODELS] + [("gpt, tied", DELAYED), ("megatron", DELAYED)],
)
def test_values_and_gradients_are_those_of_the_quantized_operands(kind: str, recipe: Any) -> None:
    with autocast(recipe):
        model = randomize(build(kind))
        model.multipliers = Multipliers(head=0.5)
        x, g = draw("x", (B, S, H), jnp.bfloat16), draw("g", (B, S, V), jnp.bfloat16, scale=0.1)
        y, dx, dparams, states = head_vjp(model, x, g)
    tied = model.output_kernel is None
    kernel = np.asarray(model.embedding.embedding[...].T if tied else model.output_kernel[...])
    bias = None if model.output_bias is None else model.output_bias[...].astype(jnp.bfloat16)
    # A new state's scales are 1.
    fixed = {"x": 1.0, "kernel": 1.0, "grad": 1.0} if recipe is DELAYED else None
    oracle = oracles.Scales(fixed=fixed)
    expected = oracles.dense_layer(oracle, np.asarray(x * jnp.bfloat16(0.5)), kernel, bias, np.asarray(g))
    assert_close(y, expected["y"], TOLERANCE["bfloat16"], what="logits")
    assert_close(dx, 0.5 * expected["x"], TOLERANCE["bfloat16"], what="dx")
    (name,) = [
        path
        for path, grad in dparams.items()
        if np.shape(grad.get_value()) in ((V, H), (H, V)) and np.any(grad.get_value())
    ]
    found = np.asarray(dparams[name].get_value())
    assert found.dtype == np.float32
    assert_close(found.T if tied else found, expected["kernel"], TOLERANCE["float32"], what="dkernel")
    if bias is not None:
        assert_close(dparams["output_bias",].get_value(), expected["bias"], TOLERANCE["float32"], what="dbias")
    assert {path[0] for path in states if path[0] not in ("layers", "decoder")} == (
        {"output_layer"} if recipe is DELAYED else set()
    )
    for role, amax in oracle.seen.items() if recipe is DELAYED else ():
        history = states["output_layer", "quantizers", role, "amax_history"].get_value()
        assert float(history[0]) == float(amax)


@pytest.mark.costly("explicit-gpt", slow=("auto-gpt, tied", "explicit-gpt, tied", "auto-gpt", "no mesh-gpt, tied"))
@pytest.mark.parametrize("kind", ["gpt, tied", "gpt"])
def test_every_mesh_gives_one_devices_values(kind: str, mesh_mode: str) -> None:
    with autocast(DELAYED):
        model = shard(randomize(build(kind)))
        x, g = draw("x", (B, S, H), jnp.bfloat16), draw("g", (B, S, V), jnp.bfloat16, scale=0.1)
        y, dx, dparams, states = head_vjp(model, x, g)
    oracle = oracles.Scales(fixed={"x": 1.0, "kernel": 1.0, "grad": 1.0})
    kernel = (
        np.asarray(model.embedding.embedding[...]).T if kind == "gpt, tied" else np.asarray(model.output_kernel[...])
    )
    expected = oracles.dense_layer(oracle, np.asarray(x), kernel, None, np.asarray(g))
    assert_close(y, expected["y"], TOLERANCE["bfloat16"], what="logits")
    assert_close(dx, expected["x"], 2 * TOLERANCE["bfloat16"], what="dx")  # partial sums are rounded, too
    name = ("embedding", "embedding") if kind == "gpt, tied" else ("output_kernel",)
    found = np.asarray(dparams[name].get_value())
    assert_close(found.T if kind == "gpt, tied" else found, expected["kernel"], TOLERANCE["float32"], what="dkernel")
    for role, amax in oracle.seen.items():
        assert float(states["output_layer", "quantizers", role, "amax_history"].get_value()[0]) == float(amax)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt, tied", "megatron"])
def test_without_the_option_or_a_recipe_nothing_changes(kind: str) -> None:
    on, off = build(kind), build(kind, OFF)
    assert nnx.to_flat_state(nnx.state(on)).paths == nnx.to_flat_state(nnx.state(off)).paths
    assert "output_layer" not in dict(quantizable_modules(off))
    assert_bitwise(on(TOKENS), off(TOKENS))
    with autocast(DELAYED):
        on, off = build(kind), build(kind, OFF)
        states = [{path[0] for path, _ in nnx.to_flat_state(nnx.state(model, QuantizerState))} for model in (on, off)]
        assert states[0] - states[1] == {"output_layer"}
    with autocast(CURRENT):
        assert jnp.any(on(TOKENS) != off(TOKENS))
        # A rule for the path that the layer has here and in Megatron.
        bf16 = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
        rule = {"type": "glob", "pattern": "output_layer", "config": "bf16", "enabled": True}
        rules = RecipeConfig.from_config_dict({"configs": {"bf16": bf16}, "matchers": {"head": rule}})
        report = apply_quantization_config(on, rules)
        assert [module.path for module in report.modules if module.matcher == "head"] == ["output_layer"]
        assert_bitwise(on(TOKENS), off(TOKENS))


@pytest.mark.slow
def test_a_tied_tables_gradient_is_the_sum_of_the_embeddings_and_the_heads() -> None:
    with autocast(CURRENT):
        tied, untied = build(), build("gpt")
        nnx.update(untied, nnx.state(tied, nnx.Param))
        untied.output_kernel.set_value(tied.embedding.embedding[...].T)
        gradient = quick_jit(lambda model: nnx.state(jax.grad(loss_fn)(model, TOKENS, None), nnx.Param))
        one, two = gradient(tied), gradient(untied)
    expected = two["embedding"]["embedding"][...] + two["output_kernel"][...].T
    # One addition in fp32.
    assert_close(one["embedding"]["embedding"][...], expected, 2 * TOLERANCE["float32"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt, tied", "megatron"])
def test_microbatches_read_a_kernel_that_is_quantized_once(kind: str) -> None:
    seen = []

    def noted(model: Any, tokens: Any, key: Any) -> Any:
        cache = model.output_layer.kernel_cache
        seen.append(cache is not None and isinstance(cache.get_value()["kernel"], QuantizedKernel))
        return loss_fn(model, tokens, key)

    with autocast(DELAYED):
        state = create_train_state(lambda rngs: build(kind, rngs=rngs), TX, key=jax.random.key(0))
        # The same scales and, of a mean over two halves, the same gradient, also where it passes a transposed table.
        run = quick_jit(jax.value_and_grad(lambda params, model: loss_fn(merged(model, params), TOKENS, None)))
        loss, grads = run(nnx.state(state.model, nnx.Param), state.model)
        state, metrics = make_train_step(noted, TX, microbatches=2)(state, np.asarray(TOKENS))
    assert seen
    assert all(seen)
    np.testing.assert_allclose(float(metrics["loss"]), float(loss), rtol=B * S * 2.0**-24)
    # The gradients of a half are twice as large, so E5M2 holds fewer of them as subnormals, each off by 2^-3 at most.
    norm = sum(float(jnp.sum(grad * grad)) for grad in jax.tree.leaves(grads)) ** 0.5
    np.testing.assert_allclose(float(metrics["grad_norm"]), float(norm), rtol=2.0**-6)


def merged(model: Any, params: Any) -> Any:
    """The model with other parameters, in evaluation: its states may be left out of what is differentiated."""
    graphdef, _, rest = nnx.split(model, nnx.Param, ...)
    copy = nnx.merge(graphdef, params, rest)
    copy.eval()
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [CURRENT, pytest.param(DELAYED, marks=pytest.mark.slow)])
def test_a_run_learns_as_with_a_head_in_high_precision(recipe: Any) -> None:
    """E4M3 rounds an operand by 2^-4 of itself at most, with either sign, so a token's loss is off by a few percent of
    its logits, of size 1 to 5 here, and the mean of B S = 128 tokens by a tenth of that, 0.02; and the gradient that a
    step follows is off by as much. 0.05 is a fifth of what a step lowers the loss by: curves a step apart would fail.
    """
    tx = optax.adam(1e-2)
    expected, _ = train("gpt", OFF, recipe, steps=14, tx=tx)
    losses, _ = train("gpt", ON, recipe, steps=14, tx=tx)
    assert losses[-1] < 1.0 < 3.8 < losses[0]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=0.05)
    assert losses != expected


@pytest.mark.slow
def test_recipes_change_and_checkpoints_restore(tmp_path: Path) -> None:
    _, state = train(recipe=None, steps=0)
    state = change_recipe(state, DELAYED)
    with autocast(DELAYED), TrainCheckpointer(tmp_path / "on") as checkpointer:
        state, _ = make_train_step(loss_fn, TX)(state, np.asarray(TOKENS))
        history = state.quantizers["output_layer"]["quantizers"]["kernel"]["amax_history"]
        assert float(history[...][0]) > 0.0
        checkpointer.save(state, None, 1)
        restored, *_ = checkpointer.restore(state)
    jax.tree.map(assert_bitwise, restored.quantizers, state.quantizers)
    # A run that began without the option goes on with it: parameters have the same names, and the head's states begin.
    _, without = train(config=OFF, steps=0)
    with autocast(DELAYED), TrainCheckpointer(tmp_path / "off") as checkpointer:
        checkpointer.save(without, None, 1)
        begun, *_ = checkpointer.restore(state, allow={"quantizers"})
    assert float(begun.quantizers["output_layer"]["quantizers"]["x"]["scale"][...]) == 1.0
    jax.tree.map(assert_bitwise, begun.params, without.params)
    assert not jax.tree.leaves(change_recipe(state, None).quantizers)


@pytest.mark.slow
def test_kernels_stored_quantized() -> None:
    """MegatronGPTModel's head owns its kernel, which is stored as any other; GPTModel's is a parameter of the model."""
    exact, _ = train("megatron")
    held, state = train("megatron", fp8_param=True)
    assert held == exact
    assert isinstance(state.model.output_layer.kernel.get_value(), QuantizedKernel)
    held, state = train("gpt", fp8_param=True)
    assert held == exact
    assert state.params["output_kernel"].get_value().dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh", "axis_type"),
    [
        ("gpt, tied", "data=2,fsdp=2,tensor=2", "auto"),
        ("gpt", "fsdp=2,tensor=2", "explicit"),
        ("megatron", "fsdp=2,tensor=2", "auto"),
        ("megatron, tied", "data=2,fsdp=2,tensor=2", "explicit"),
        ("gpt, tied", "pipeline=2,fsdp=2,tensor=2", "auto"),
        ("megatron", "pipeline=2,data=2", "auto"),
    ],
)
def test_meshes_give_one_devices_losses_and_states(kind: str, mesh: str, axis_type: Any) -> None:
    sizes = ParallelConfig.parse(mesh)
    fields: dict[str, Any] = {"num_layers": 2} if sizes.pipeline > 1 else {}
    if sizes.tensor > 1:
        fields |= {"sequence_parallel": True, "tensor_model_parallel_size": 2}
    own = dataclasses.replace(ON, **fields)
    plain = dataclasses.replace(own, sequence_parallel=False, tensor_model_parallel_size=1)
    expected, one = train(kind, plain, microbatches=2)
    with jax.set_mesh(make_mesh(sizes, axis_type=axis_type)):
        losses, state = train(kind, own, microbatches=2)
    # Values between two of FP8's may round to the other one after sums in another order, as in test_pipeline.
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for path, value in nnx.to_flat_state(state.quantizers):
        if path[0] == "output_layer" and path[-1] == "amax_history":
            # Amaxes of whole tensors.
            np.testing.assert_allclose(value[...], dict(nnx.to_flat_state(one.quantizers))[path][...], rtol=0.05)
            assert float(value[...][0]) > 0.0


@pytest.mark.slow
def test_inspection_sees_the_head() -> None:
    with autocast(CURRENT):
        found = {tensor.module for tensor in inspect_precision(build("gpt"), loss_fn, TOKENS)}
    assert "output_layer" in found


@pytest.mark.slow
def test_sensitivity_and_generation_see_the_head() -> None:
    model = build("gpt")
    with autocast(CURRENT):
        assert generate(model, TOKENS[:1, :4], steps=1, key=jax.random.key(0)).shape == (1, 5)
    (head,) = [layer for layer in sensitivity(model, loss_fn, [TOKENS], CURRENT) if layer.module == "output_layer"]
    assert head.gradient_error > 0.0


@pytest.mark.costly
def test_what_is_refused_says_what_to_change() -> None:
    with autocast(CURRENT):
        model = build(vocab_size=50)
        with pytest.raises(ValueError, match=r"vocab_size 50 is not a multiple of 16.*vocab_size=64, whose last"):
            nnx.eval_shape(model, TOKENS)
    assert nnx.eval_shape(model, TOKENS).shape == (B, S, 50)
    with autocast(recipe_from_name("mxfp8")), pytest.raises(ValueError, match="not a multiple of 32"):
        nnx.eval_shape(build(), TOKENS)
    for kind in ("gpt", "bert"):
        with pytest.raises(ValueError, match=r"loss_chunks=2 .* fp8_output_proj=True.*Execution\(loss_chunks=1\)"):
            build(kind, execution=Execution(loss_chunks=2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt, tied", "gpt", "megatron"])
def test_adapters_on_the_head_train(kind: str) -> None:
    def adapted(rngs: nnx.Rngs) -> Any:
        model = build(kind, rngs=rngs)
        model.output_layer = LoRA(model.output_layer, 4, rngs=rngs)
        return model

    with autocast(DELAYED):
        state = create_train_state(adapted, TX, key=jax.random.key(0))
        before = np.asarray(state.params["output_layer"]["lora_b"][...])
        state, _ = make_train_step(loss_fn, TX, microbatches=2)(state, np.asarray(TOKENS))
    assert not np.array_equal(before, state.params["output_layer"]["lora_b"][...])


@pytest.mark.costly
def test_muon_leaves_every_head_to_adam() -> None:
    for kind in ("gpt", "megatron"):
        numbers = muon_dimension_numbers(nnx.state(build(kind), nnx.Param))
        of_head = [each for path, each in nnx.to_flat_state(numbers) if {"output_kernel", "output_layer"} & {*path}]
        assert [variable.get_value() for variable in of_head] == [None]
