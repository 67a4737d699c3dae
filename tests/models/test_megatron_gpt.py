"""MegatronGPTModel: Megatron's modules, names and layouts, and the values of a GPTModel with the same weights."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax_te._validation import log_once
from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.layers import LayerNorm, PackedSeqParams, RMSNorm
from jax_te.megatron import (
    Float16Module,
    GlobMatcher,
    MegatronModule,
    RecipeConfig,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
    TransformerLayer,
    load_state_dict,
    state_dict,
)
from jax_te.models import Execution, GPTModel, MegatronGPTModel, generate
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, ModuleRecipe, autocast
from jax_te.sharding import make_mesh
from jax_te.training import create_train_state, make_train_step
from tests.support.meshes import shard
from tests.support.numerics import assert_bitwise, assert_close, equations, quick_jit, without_type_checker
from tests.support.reference import randomize
from tests.support.states import merging

B, S, V = 2, 8, 32
GPT2 = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64)
LLAMA = dataclasses.replace(
    GPT2, num_query_groups=2, normalization="RMSNorm", activation="swiglu", add_bias_linear=False, qk_layernorm=True
)
FORMS: dict[str, tuple[TransformerConfig, dict[str, Any]]] = {
    "gpt2": (GPT2, {"share_embeddings_and_output_weights": True}),
    "llama": (LLAMA, {"position_embedding_type": "rope"}),
}
RECIPES = {"none": None, "delayed": DelayedScaling(amax_history_len=2), "current": Float8CurrentScaling()}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, V, (B, S)), jnp.int32)
EPS = float(jnp.finfo(jnp.float32).eps)


def build(form: str = "llama", *, layers: Any = None, config: TransformerConfig | None = None, **options: Any) -> Any:
    own, defaults = FORMS[form]
    config = own if config is None else config
    return MegatronGPTModel(config, layers, V, S, rngs=nnx.Rngs(0), **{**defaults, **options})


def plain(form: str, **fields: Any) -> GPTModel:
    config, options = FORMS[form]
    options = {"share_embeddings_and_output_weights": False, **options}
    config = dataclasses.replace(config, **fields)
    return randomize(GPTModel(config, vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(1), **options))


def megatrons(model: GPTModel) -> dict[str, np.ndarray]:
    """The weights of a GPTModel as a Megatron-Core checkpoint has them."""
    config: Any = model.config
    g, d, h = config.num_query_groups, config.kv_channels, config.hidden_size
    names = {
        "embedding.embedding": "embedding.word_embeddings.weight",
        "position_embedding.embedding": "embedding.position_embeddings.weight",
        "final_norm.scale": "decoder.final_layernorm.weight",
        "final_norm.bias": "decoder.final_layernorm.bias",
        "output_kernel": "output_layer.weight",
        "self_attention.qkv.kernel": "self_attention.linear_qkv.weight",
        "self_attention.qkv.bias": "self_attention.linear_qkv.bias",
        "self_attention.qkv.scale": "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.qkv.ln_bias": "self_attention.linear_qkv.layer_norm_bias",
        "self_attention.proj.kernel": "self_attention.linear_proj.weight",
        "self_attention.proj.bias": "self_attention.linear_proj.bias",
        "self_attention.q_norm.scale": "self_attention.q_layernorm.weight",
        "self_attention.k_norm.scale": "self_attention.k_layernorm.weight",
        "layernorm_mlp.scale": "mlp.linear_fc1.layer_norm_weight",
        "layernorm_mlp.ln_bias": "mlp.linear_fc1.layer_norm_bias",
        "layernorm_mlp.wi_kernel": "mlp.linear_fc1.weight",
        "layernorm_mlp.wi_bias": "mlp.linear_fc1.bias",
        "layernorm_mlp.wo_kernel": "mlp.linear_fc2.weight",
        "layernorm_mlp.wo_bias": "mlp.linear_fc2.bias",
    }
    found = {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        array = np.asarray(variable.get_value())
        layer = f"decoder.layers.{path[1]}." if path[0] == "layers" else ""
        own = ".".join(map(str, path[2:] if layer else path))
        if own.endswith("qkv.kernel"):
            # [h, r + 2, (g, d)]: Megatron has the queries, the key and the value of one group side by side.
            rows = [array[:, c, i * d : (i + 1) * d].T for i in range(g) for c in range(array.shape[1])]
            array = np.concatenate(rows)
        elif own.endswith("qkv.bias"):
            array = np.concatenate([array[c, i * d : (i + 1) * d] for i in range(g) for c in range(len(array))])
        elif own.endswith("wi_kernel"):
            array = np.concatenate([array[:, c].T for c in range(array.shape[1])])  # gate, then up
        elif own.endswith("wi_bias"):
            array = np.concatenate(list(array))
        elif own.endswith("kernel"):
            array = array.T
        found[layer + names[own]] = array
    assert all(array.shape[-1] == h for name, array in found.items() if name.endswith("linear_qkv.weight"))
    return found


def loss_and_gradient(model: Any) -> Any:
    return jax.value_and_grad(lambda model: merging(model).loss(TOKENS, TOKENS[:, ::-1]))(model)


@pytest.mark.costly(slow=("llama",))
@pytest.mark.parametrize("form", FORMS)
def test_modules_have_megatrons_names_and_classes(form: str):
    model = build(form)
    layer, config = model.decoder.layers[0], FORMS[form][0]
    attention = layer.self_attention
    assert type(layer) is TransformerLayer
    assert type(attention.linear_qkv) is type(layer.mlp.linear_fc1) is TELayerNormColumnParallelLinear
    assert type(attention.linear_proj) is type(layer.mlp.linear_fc2) is TERowParallelLinear
    assert type(attention.core_attention) is TEDotProductAttention
    norm = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    assert isinstance(model.decoder.final_layernorm, norm)
    assert isinstance(attention.q_layernorm, norm) == config.qk_layernorm == isinstance(attention.k_layernorm, norm)
    # Megatron's calls: the layers' second result is a bias that was not added.
    x = jnp.ones((B, S, 32))
    for block in (attention, layer.mlp):
        output, bias = block(x)
        assert output.shape == x.shape
        assert bias is None
    assert layer(x)[1] is None
    embedded = model.embedding(TOKENS, jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S)))
    stack = model.embed_inputs(TOKENS)
    hidden = model.decoder(embedded, None, stack.arrays["rotary_pos_emb"])
    assert_close(hidden, model.final_norm(stack.output(model.layers)), 64 * EPS)


@pytest.mark.costly
def test_options_of_gemma_and_qwen_are_followed_as_in_gpt():
    fields: Any = {"add_qkv_bias": True, "block_output_layernorm": True, "logit_softcap": 2.0, "window_size": (3, 0)}
    config = dataclasses.replace(LLAMA, **fields)
    _, options = FORMS["llama"]
    plain: Any = {"share_embeddings_and_output_weights": False, "rngs": nnx.Rngs(0), **options}
    models = [build(config=config), GPTModel(config, vocab_size=V, max_sequence_length=S, **plain)]
    results = []
    for model in models:
        # The same initial values, of which biases are 0 and scales 1.
        nnx.update(model, jax.tree.map(lambda x: x + 0.1, nnx.state(model, nnx.Param)))
        results.append(quick_jit(lambda model: model(TOKENS))(model))
    assert_close(*results, 64 * EPS)
    layer = models[0].decoder.layers[0]
    assert layer.self_attention.linear_qkv.bias is not None
    assert layer.self_attention.linear_proj.bias is layer.mlp.linear_fc1.bias is None
    assert "decoder.layers.0.self_attention_norm.weight" in models[0].state_dict()


@pytest.mark.costly
def test_blocks_that_both_read_the_layers_input_are_so_as_in_gpt():
    config, options = dataclasses.replace(LLAMA, parallel_attention_mlp=True), FORMS["llama"][1]
    plain: Any = {"share_embeddings_and_output_weights": False, "rngs": nnx.Rngs(0), **options}
    models = [build(config=config), GPTModel(config, vocab_size=V, max_sequence_length=S, **plain), build(config=LLAMA)]
    actual, expected, other = (quick_jit(lambda model: model(TOKENS))(model) for model in models)
    assert_close(actual, expected, 64 * EPS)
    assert float(jnp.abs(actual - other).max()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_of_megatron_loads_and_gives_a_gpts_values(form: str):
    gpt, model = plain(form), build(form)
    checkpoint = megatrons(gpt)
    assert model.state_dict().keys() == checkpoint.keys()
    assert model.load_state_dict(checkpoint) == ([], [])
    for name, array in model.state_dict().items():
        assert_bitwise(array, checkpoint[name], what=name)
    loss, gradient = quick_jit(loss_and_gradient)(model)
    expected, its_gradient = quick_jit(loss_and_gradient)(gpt)
    assert_close(loss, expected, 8 * EPS)
    # The gradient is a model, too: its arrays are under the same names.
    for name, array in megatrons(its_gradient).items():
        assert_close(state_dict(gradient)[name], array, 256 * EPS, what=name)
    one = model(TOKENS, labels=TOKENS[:, ::-1])
    assert_close(one.mean(), expected, 8 * EPS)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_in_fp8_loss_and_next_states_are_a_gpts(recipe: str):
    """The same bits reach every GEMM, so that nothing has to be tolerated beyond the order of fp32 sums."""
    with autocast(RECIPES[recipe]):
        gpt, model = plain("llama"), build("llama")
        load_state_dict(model, megatrons(gpt), strict=False)
        (loss, gradient), (expected, its) = (quick_jit(loss_and_gradient)(each) for each in (model, gpt))
    assert_close(loss, expected, 8 * EPS)
    states, wanted = (
        {path: v.get_value() for path, v in nnx.to_flat_state(nnx.state(g, QuantizerState))} for g in (gradient, its)
    )
    assert len(states) == len(wanted) == (4 * 6 if recipe == "delayed" else 0)
    for path, state in states.items():
        names = {"mlp": "layernorm_mlp", "linear_qkv": "qkv", "linear_proj": "proj"}
        own: Any = path[1:]
        *front, layer, kind, role, field = own
        if layer in ("linear_fc1", "linear_fc2"):
            front, layer, kind = front[:-1], "layernorm_mlp", f"quantizers_{layer[-1]}"
        same = wanted[(*front, names.get(layer, layer), kind, role, field)]
        # Gradients' amaxes differ by the roundings of what follows in forward.
        assert_close(state, same, 64 * EPS, what=str(path))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize(("form", "recipe"), [("llama", "delayed"), ("gpt2", "none")])
def test_on_a_mesh_of_tensor_and_sequence_parallelism(form: str, recipe: str, mode: Any):
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    with autocast(RECIPES[recipe]):
        gpt = plain(form)
        expected, _ = quick_jit(loss_and_gradient)(gpt)
        checkpoint = megatrons(gpt)
        with jax.set_mesh(make_mesh(ParallelConfig(fsdp=2, tensor=2), axis_type=mode)):
            model = shard(build(form, config=dataclasses.replace(FORMS[form][0], **parallel)))
            model.load_state_dict(checkpoint, strict=recipe == "none")
            loss, _ = quick_jit(loss_and_gradient)(model)
            for name, array in model.state_dict().items():
                if name in checkpoint:
                    assert_bitwise(array, checkpoint[name], what=name)
            described = model.sharded_state_dict()
            specs = {name: leaf.sharding.spec for name, leaf in described.items()}
            assert {n: leaf.shape for n, leaf in described.items()} == {
                n: a.shape for n, a in model.state_dict().items()
            }
    assert_close(loss, expected, 2.0**-9 if recipe == "delayed" else 64 * EPS)
    layer = "decoder.layers.0."
    assert (
        specs[f"{layer}self_attention.linear_qkv.weight"]
        == specs[f"{layer}mlp.linear_fc1.weight"]
        == P("tensor", "fsdp")
    )
    assert specs[f"{layer}mlp.linear_fc2.weight"] == P(None, ("tensor", "fsdp"))
    assert specs["embedding.word_embeddings.weight"] == P("tensor", "fsdp")


def test_differences_of_a_checkpoint_are_named_in_megatrons_words():
    model = build()
    arrays = {name: np.asarray(array) for name, array in model.state_dict().items()}
    qkv, fc2 = (f"decoder.layers.0.{name}.weight" for name in ("self_attention.linear_qkv", "mlp.linear_fc2"))
    arrays[qkv], arrays["decoder.layers.0.mlp.linear_fc1._extra_state"] = arrays[qkv].T, arrays.pop(fc2)
    with pytest.raises(ValueError, match=r"the state dict does not fit MegatronGPTModel") as error:
        model.load_state_dict(arrays)
    for difference in (
        f"1 missing: {fc2} is absent there, float32[32, 64] here",
        "1 unexpected: decoder.layers.0.mlp.linear_fc1._extra_state is",
        f"1 of another shape: {qkv} is float32[32, 64] there, float32[64, 32] here",
    ):
        assert difference in str(error.value)
    del arrays[qkv]
    skipped = model.load_state_dict(arrays, strict=False)
    assert skipped.missing_keys == [fc2, qkv]


def test_quantizer_state_keeps_its_names():
    with autocast(RECIPES["delayed"]):
        names = {name for name in build().state_dict() if ".linear_qkv." in name}
    quantizers = {f"quantizers.{role}.{leaf}" for role in ("x", "kernel", "grad") for leaf in ("scale", "amax_history")}
    own = {"weight", "layer_norm_weight"}
    assert names == {f"decoder.layers.0.self_attention.linear_qkv.{leaf}" for leaf in quantizers | own}


@pytest.mark.slow
def test_wrappers_have_its_names_and_precision():
    class Wrapper(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([build()])

    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert f"layers.0.{name}" in state_dict(Wrapper())
    half = Float16Module(dataclasses.replace(LLAMA, bf16=True, params_dtype="float32"), build())
    assert half.state_dict()[name].dtype == half.sharded_state_dict()[name].dtype == jnp.bfloat16
    assert half(TOKENS).dtype == jnp.float32
    checkpoint = megatrons(plain("llama"))
    half.load_state_dict(checkpoint)
    assert_bitwise(half.state_dict()[name], checkpoint[name].astype(jnp.bfloat16))
    half.set_input_tensor([None])
    with pytest.raises(ValueError, match=r"input_tensor must be None, got ArrayImpl: a first stage"):
        half.set_input_tensor(jnp.ones(1))


def test_rules_are_for_megatrons_names():
    """The rules of ``config.quant_recipe`` hold when the model is built."""
    kinds = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    rules = RecipeConfig([GlobMatcher("decoder.layers.1.mlp.linear_fc2", "bf16")], {"bf16": kinds})
    model = build(config=dataclasses.replace(LLAMA, num_layers=2, quant_recipe=rules))
    found = [layer.mlp.linear_fc2.module_recipe for layer in model.decoder.layers]
    assert found == [None, ModuleRecipe(training=None)]
    assert model.decoder.layers[1].mlp.linear_fc1.module_recipe is None


@pytest.mark.costly(slow=("mlp", "full", "core_attn", "layernorm"))
@pytest.mark.parametrize("module", ["core_attn", "layernorm", "activation", "mlp", "full"])
def test_backward_recomputes_what_the_configuration_says(module: str):
    """The same loss and gradients, from more operations."""
    fields: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": [module]}
    if module == "full":
        fields = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    model, same = build(config=dataclasses.replace(LLAMA, **fields)), build()
    counts = []
    for each in (model, same):
        found = list(equations(jax.make_jaxpr(loss_and_gradient)(each).jaxpr))
        counts.append(sum(equation.primitive.name == "dot_general" for equation in found))
        assert any(
            "remat" in equation.primitive.name or equation.primitive.name == "checkpoint" for equation in found
        ) == (each is model)
    assert counts[0] > counts[1] if module in ("core_attn", "mlp", "full") else counts[0] >= counts[1]
    (loss, gradient), (expected, its) = (quick_jit(loss_and_gradient)(each) for each in (model, same))
    assert_close(loss, expected, 8 * EPS)
    for a, e in zip(*(jax.tree.leaves(nnx.state(each)) for each in (gradient, its)), strict=True):
        assert_close(a, e, 256 * EPS)


@pytest.mark.slow
def test_it_trains_in_a_train_step_and_in_a_loop_over_layers():
    with autocast(RECIPES["delayed"]):
        model = build(
            config=dataclasses.replace(LLAMA, num_layers=2, compute_dtype="bfloat16"),
            execution=Execution(scan_layers=True),
        )
        tx = optax.adam(1e-2)
        state = create_train_state(model, tx, key=jax.random.key(0))

        def loss_fn(model: Any, batch: Any, key: Any) -> Any:
            return model(batch, labels=batch).mean()

        step, losses = make_train_step(loss_fn, tx, microbatches=2), []
        for _ in range(8):
            state, metrics = step(state, TOKENS)
            losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.5


STAGES: list[dict[str, Any]] = [
    {"stage_layers": range(1), "post_process": False},
    {"stage_layers": range(1, 2), "pre_process": False, "post_process": False},
    {"stage_layers": range(2, 3), "pre_process": False},
]


def stages(form: str, **fields: Any) -> tuple[Any, list[Any]]:
    """A model of three layers, and the same one in three stages."""
    config = dataclasses.replace(FORMS[form][0], num_layers=3, hidden_dropout=0.5, attention_dropout=0.5, **fields)
    options: dict[str, Any] = {"config": config, "share_embeddings_and_output_weights": False}
    return build(form, **options), [build(form, **options, **stage) for stage in STAGES]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["none", "delayed"])
@pytest.mark.parametrize("form", FORMS)
def test_stages_are_the_whole_model(form: str, recipe: str):
    """Values, gradients and quantizer states under dropout, by a schedule of one's own."""
    key = jax.random.key(1)
    with autocast(RECIPES[recipe]):
        whole, parts = stages(form)

        def call(model: Any, x: Any) -> Any:
            if model.pre_process:
                return model(x, dropout_key=key)
            model.set_input_tensor([x])
            return model(labels=TOKENS, dropout_key=key) if model.post_process else model(dropout_key=key)

        def pull(model: Any, x: Any, dy: Any) -> Any:
            graphdef, state = nnx.split(model)
            if model.pre_process:
                return jax.vjp(lambda state: call(nnx.merge(graphdef, merging(state)), x), state)[1](dy)[0], None
            return jax.vjp(lambda state, x: call(nnx.merge(graphdef, merging(state)), x), state, x)[1](dy)

        inputs = [TOKENS]
        for part in parts:
            inputs.append(quick_jit(call)(part, inputs[-1]))
        graphdef, state = nnx.split(whole)

        def at_once(state: nnx.State) -> Any:
            def run(state: nnx.State) -> Any:
                return nnx.merge(graphdef, merging(state))(TOKENS, labels=TOKENS, dropout_key=key)

            losses, back = jax.vjp(run, state)
            return losses, back(jnp.ones_like(losses))[0]

        expected, gradients = quick_jit(at_once)(state)
        assert_close(inputs[-1], expected, 64 * EPS)
        dy, wanted = jnp.ones_like(expected), nnx.merge(graphdef, gradients).state_dict()
        found: dict[str, Any] = {}
        for part, x in reversed(list(zip(parts, inputs[:-1], strict=True))):
            gradients, dy = quick_jit(pull)(part, x, dy)
            found |= nnx.merge(nnx.graphdef(part), gradients).state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if not jnp.issubdtype(value.dtype, jax.dtypes.float0):
            assert_close(found[name], value, 512 * EPS)


@pytest.mark.slow
def test_stages_take_packed_rows():
    whole, parts = stages("llama")
    packed = {"packed_seq_params": PackedSeqParams(cu_seqlens_q=jnp.array([[0, 3, S]] * B))}
    for model in (whole, *parts):
        model.eval()
    call = nnx.jit(lambda part, *args, **kwargs: part(*args, **kwargs))
    x = call(parts[0], TOKENS, **packed)
    for part in parts[1:]:
        x = call(part, decoder_input=x, **packed)
    logits = call(whole, TOKENS, **packed)
    np.testing.assert_allclose(x, logits, rtol=1e-5, atol=1e-5)
    assert not np.allclose(call(whole, TOKENS)[:, 3:], logits[:, 3:], atol=1e-3)


@pytest.mark.costly
def test_names_of_stages_are_those_of_the_whole_model():
    whole, parts = stages("llama")
    arrays, described = whole.state_dict(), whole.sharded_state_dict()
    own: list[dict[str, Any]] = [part.state_dict() for part in parts]
    assert sorted(name for part in own for name in part) == sorted(arrays)
    for part, mine in zip(parts, own, strict=True):
        assert {name: described[name] for name in mine} == part.sharded_state_dict()
        for name, value in mine.items():  # the same rngs draw the same weights
            assert_bitwise(value, arrays[name])
        part.load_state_dict({name: value + 1 for name, value in mine.items()})
        assert all(bool(jnp.all(value == mine[name] + 1)) for name, value in part.state_dict().items())
    assert "decoder.layers.2.mlp.linear_fc2.weight" in own[2]
    assert own[0].keys() & {"output_layer.weight", "decoder.final_layernorm.weight"} == set()
    assert own[2].keys() & {"embedding.word_embeddings.weight"} == set()
    half = [Float16Module(dataclasses.replace(LLAMA, bf16=True, params_dtype="float32"), part) for part in parts]
    assert [(part.casts_inputs, part.casts_outputs) for part in half] == [(True, False), (False, False), (False, True)]
    assert [f"stage.{name}" for name in own[2]] == list(half[2].state_dict(prefix="stage."))


@pytest.mark.costly
def test_what_stages_refuse():
    _, (first, middle, last) = stages("llama")
    for part in (first, middle, last):
        part.eval()  # they have dropout
    x = jnp.ones((B, S, LLAMA.hidden_size))
    for call, message in (
        (lambda: middle(TOKENS), "needs its input: call set_input_tensor before each call"),
        (lambda: first(decoder_input=x), "first stage takes input_ids, and no decoder_input"),
        (lambda: first.set_input_tensor(x), "input_tensor must be None"),
        (lambda: last.set_input_tensor([x, x]), "input_tensor must be one array, or a list of one, got 2 of them"),
        (lambda: last.set_input_tensor(TOKENS), r"input must be hidden states \[b, s, 32\], got shape \(2, 8\)"),
        (lambda: last(decoder_input=x[0]), r"input must be hidden states \[b, s, 32\], got shape \(8, 32\)"),
        (lambda: first.loss(TOKENS, TOKENS), "a stage of a pipeline is called, with labels"),
        (lambda: last(decoder_input=x, cache=()), "a stage of a pipeline takes no cache"),
        (lambda: build()(decoder_input=x), "a whole model takes input_ids"),
        (lambda: build("gpt2", config=dataclasses.replace(GPT2, num_layers=3), **STAGES[2]), "on the first stage"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    middle.set_input_tensor(x)
    middle()
    with pytest.raises(ValueError, match="needs its input"):  # each call takes its own
        middle()


def test_calls_are_captured():
    model = build(config=dataclasses.replace(LLAMA, cuda_graph_impl="transformer_engine"))
    expected = quick_jit(lambda model: model.forward(TOKENS))(model)
    model._te_cuda_graph_capture(**model.get_layer_static_inputs(S, B))
    assert_close(model(TOKENS), expected, 64 * EPS)
    assert len(model.cuda_graphs) == 1
    with pytest.raises(ValueError, match="was not captured"):
        model(TOKENS[:, :4])


@pytest.mark.slow
def test_a_cache_and_max_logits_and_clipping_work_as_a_gpts():
    config = dataclasses.replace(LLAMA, qk_layernorm=False, qk_clip=True, qk_clip_threshold=0.01)
    model, gpt = build(config=config), plain("llama", qk_layernorm=False, qk_clip=True, qk_clip_threshold=0.01)
    model.load_state_dict(megatrons(gpt))
    logits = model.max_logits(TOKENS)
    assert_close(logits, gpt.max_logits(TOKENS), 64 * EPS)
    packed = PackedSeqParams(cu_seqlens_q=jnp.array([[0, 3, S]] * B))
    of_packed = model.max_logits(TOKENS, packed_seq_params=packed)
    assert_close(of_packed, gpt.max_logits(TOKENS, packed_seq_params=packed), 64 * EPS)
    assert (of_packed != logits).any()
    for each in (model, gpt):
        each.clip_qk(logits)
    assert_close(model.max_logits(TOKENS), gpt.max_logits(TOKENS), 64 * EPS)
    found, expected = (
        generate(each, TOKENS[:, :3], steps=4, key=jax.random.key(0), temperature=0.0) for each in (model, gpt)
    )
    assert_bitwise(found, expected)


def test_a_layer_class_of_ones_own():
    class Layer(TransformerLayer):
        def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            return hidden_states, None

    model = build(layers=Layer)
    assert_close(model.embed_inputs(TOKENS).output(model.layers), model.embedding(TOKENS), EPS)
    with pytest.raises(ValueError, match=r"layers\[0\] returned no cache, which it was asked for"):
        model(TOKENS, cache=model.init_cache(*TOKENS.shape))
    with pytest.raises(ValueError, match=r"layers\[0\] returned no max_logit, which it was asked for"):
        model.max_logits(TOKENS)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"pre_process": False}, ValueError, r"pre_process=False .* do not go with stage_layers=range\(0, 1\) of 1"),
        ({"stage_layers": range(2)}, ValueError, r"stage_layers .* of 1 layers, .* got range\(0, 2\)"),
        ({"stage_layers": range(1, 1)}, ValueError, r"stage_layers .* got range\(1, 1\)"),
        ({"fp16_lm_cross_entropy": True}, ValueError, "fp16_lm_cross_entropy must be False, got True: the loss is in"),
        ({"logit_dtype": jnp.float32}, ValueError, "logit_dtype must be None"),
        ({"rope_scaling": True, "seq_len_interpolation_factor": 2.0}, ValueError, "both scale rotation; give one"),
        ({"rope_scaling_factor": 32.0}, ValueError, "rope_scaling_factor=32.0 is the factor of rope_scaling, which is"),
        ({"rope_scaling": True, "position_embedding_type": "none"}, ValueError, "rope_scaling scales rotary positions"),
        (
            {"seq_len_interpolation_factor": 2.0, "position_embedding_type": "learned_absolute"},
            ValueError,
            "seq_len_interpolation_factor scales .* position_embedding_type='learned_absolute' has none",
        ),
        ({"position_embedding_type": "yarn"}, ValueError, "position_embedding_type must be one of"),
        ({"layers": nnx.Module}, TypeError, "transformer_layer_spec must be TransformerLayer or a class derived"),
        ({"config": dataclasses.replace(LLAMA, fp8="hybrid")}, ValueError, "asks for the recipe"),
    ],
)
def test_arguments_that_are_refused(options: dict[str, Any], error: Any, message: str):
    with without_type_checker(), pytest.raises(error, match=message):
        build(**options)


def test_masks_without_effect_are_logged_once(caplog: pytest.LogCaptureFixture):
    log_once.cache_clear()
    model, mask = build(), jnp.ones((B, S))
    with caplog.at_level(logging.INFO, logger="jax_te"):
        for _ in range(2):
            jax.eval_shape(lambda: model(TOKENS, None, mask > 0.0, labels=TOKENS, loss_mask=mask))
            jax.eval_shape(lambda: model(TOKENS))
    found = [(record.getMessage().partition(" has no effect")[0], record.levelname) for record in caplog.records]
    assert found == [("attention_mask", "WARNING"), ("loss_mask", "INFO")]


def test_rotary_options_without_effect_are_logged_once(caplog: pytest.LogCaptureFixture):
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="jax_te"):
        build(position_embedding_type="none", rotary_base=500.0)
    found = [record.getMessage().partition(" has no effect")[0] for record in caplog.records]
    assert [message for message in found if "rotary" in message] == ["rotary_base=500.0"]


@pytest.mark.slow
def test_arguments_of_a_call():
    model = build(parallel_output=False)
    assert_bitwise(model(TOKENS, None, jnp.ones(1, bool), loss_mask=jnp.ones((B, S))), model(TOKENS))
    with pytest.raises(ValueError, match="extra_block_kwargs must be None, got 1: the layers take no other arguments"):
        model(TOKENS, extra_block_kwargs=1)
    with pytest.raises(TypeError, match="unexpected argument 'mask'"):
        model(TOKENS, mask=None)
    with jax.set_mesh(make_mesh(ParallelConfig(tensor=2))):
        model = shard(model)
        whole, split = (
            jax.jit(lambda model, gather=gather: model(TOKENS, runtime_gather_output=gather))(model)
            for gather in (None, False)
        )
        assert whole.sharding.spec == P()
        assert re.search("tensor", str(split.sharding.spec))
        last, x = shard(stages("llama")[1][2]), jnp.ones((B, S, LLAMA.hidden_size))
        last.eval()
        whole, split = (
            jax.jit(lambda stage, gather=gather: stage(decoder_input=x, runtime_gather_output=gather))(last)
            for gather in (True, None)
        )
        assert whole.sharding.spec == P()
        assert re.search("tensor", str(split.sharding.spec))


class OwnMLP(MegatronModule):
    """As docs/from_megatron.md has it, with a layer of Flax and a parameter of its own beside it."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        super().__init__(config)
        common: dict[str, Any] = {"config": config, "bias": True, "skip_bias_add": False, "is_expert": False}
        h, f = config.hidden_size, config.ffn_hidden_size
        self.linear_fc1 = TELayerNormColumnParallelLinear(
            h, f, init_method=config.init_method, gather_output=False, rngs=rngs, **common
        )
        self.linear_fc2 = TERowParallelLinear(
            f, h, init_method=config.init_method, input_is_parallel=True, rngs=rngs, **common
        )
        self.router = nnx.Linear(4, 2, rngs=rngs)
        self.kernel = nnx.Param(jnp.ones((2, 3)))


@pytest.mark.costly
def test_weights_go_from_a_model_into_a_module_of_ones_own_and_back():
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    model = MegatronGPTModel(config, None, 32, 8, rngs=nnx.Rngs(0))
    part = "decoder.layers.0.mlp."
    theirs = {name.removeprefix(part): array for name, array in model.state_dict().items() if name.startswith(part)}
    own = OwnMLP(config, rngs=nnx.Rngs(1))
    skipped = own.load_state_dict(theirs, strict=False)
    assert sorted(skipped.missing_keys) == ["kernel", "router.bias", "router.kernel"]
    assert not skipped.unexpected_keys
    mlp: Any = model.decoder.layers[0].mlp
    assert_bitwise(own.linear_fc1.kernel[...].reshape(16, 64), mlp.linear_fc1.kernel[...].reshape(16, 64))
    back = own.state_dict()
    assert (back["router.kernel"].shape, back["kernel"].shape) == ((4, 2), (2, 3))
    for name, array in theirs.items():
        assert_bitwise(back[name], array, what=name)
    described = own.sharded_state_dict()
    assert {name: each.shape for name, each in described.items()} == {name: each.shape for name, each in back.items()}
    # A layer alone, both ways.
    alone = OwnMLP(config, rngs=nnx.Rngs(2)).linear_fc2
    wanted = {name.removeprefix("linear_fc2."): a for name, a in theirs.items() if name.startswith("linear_fc2.")}
    assert wanted["weight"].shape == (16, 64)
    alone.load_state_dict(wanted)
    assert_bitwise(alone.state_dict()["weight"], wanted["weight"])
    assert_bitwise(alone.kernel[...], wanted["weight"].T)


def test_clipping_without_logits_is_refused():
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, qk_clip=True)
    model = MegatronGPTModel(config, None, 32, 8, rngs=nnx.Rngs(0))
    with without_type_checker(), pytest.raises(TypeError, match="max_logits must be an array, got None"):
        model.clip_qk(None)
    for wrong in (jnp.ones(2), jnp.ones((2, 2))):
        with without_type_checker(), pytest.raises(ValueError, match=r"max_logits must be an array \[1, 2\]"):
            model.clip_qk(wrong)


@pytest.mark.costly
def test_a_refused_call_of_a_stage_leaves_its_input():
    last = build(config=dataclasses.replace(LLAMA, num_layers=2), pre_process=False, stage_layers=range(1, 2))
    x = jnp.ones((*TOKENS.shape, last.config.hidden_size))
    last.set_input_tensor(x)
    with pytest.raises(ValueError, match="positions must be"):
        last(None, jnp.zeros((3, 3), jnp.int32))
    with pytest.raises(ValueError, match="must have the shape of the logits"):
        last(labels=TOKENS[:, :3])
    assert_bitwise(last(None), last(None, decoder_input=x))


def test_labels_and_a_cache_are_not_given_together():
    model = build()
    with pytest.raises(ValueError, match="labels are for losses of whole sequences"):
        model(TOKENS, labels=TOKENS, cache=model.init_cache(*TOKENS.shape))
