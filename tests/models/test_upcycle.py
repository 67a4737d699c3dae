"""Experts that are copies of trained feed-forward blocks: the outputs stay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.layers import LoRA
from jax_te.megatron import Float16Module
from jax_te.models import GPTModel, MegatronGPTModel, upcycle
from jax_te.recipe import Float8CurrentScaling, ModuleRecipe
from jax_te.sharding import make_mesh

TOKENS = jax.random.randint(jax.random.key(1), (2, 8), 0, 32)


def dense(**fields):
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32}
    sizes |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    model = GPTModel(TransformerConfig(**sizes | fields), vocab_size=32, max_sequence_length=8, rngs=nnx.Rngs(0))
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        noise = np.random.default_rng(2).normal(size=variable[...].shape)
        variable.set_value(variable[...] + np.float32(0.05) * noise.astype(np.float32))
    return model


@pytest.mark.slow
@pytest.mark.wide("gated, one layer")
@pytest.mark.parametrize(
    ("fields", "experts"),
    [
        ({}, {"moe_router_topk": 2}),
        (
            {"normalization": "RMSNorm", "activation": "swiglu", "add_bias_linear": False},
            {"moe_layer_freq": [0, 1], "moe_router_topk": 3, "moe_router_score_function": "sigmoid"},
        ),
    ],
    ids=["biases", "gated, one layer"],
)
def test_the_first_loss_is_that_of_the_dense_model(fields, experts):
    model = dense(**fields)
    made = upcycle(model, num_moe_experts=4, rngs=nnx.Rngs(3), **experts)
    assert made.config.has_experts(1)
    losses = [nnx.jit(lambda model: model.loss(TOKENS, TOKENS))(each) for each in (model, made)]
    np.testing.assert_allclose(*losses, rtol=1e-6)  # fp32: the sum of the probabilities is 1 up to 2^-23


class Half:
    fp16, bf16 = False, True


@pytest.mark.slow
def test_dtypes_and_mode_are_those_of_the_dense_model():
    model = dense(hidden_dropout=0.5, num_layers=1)
    Float16Module(Half(), model)
    model.eval()
    made = upcycle(model, num_moe_experts=4, moe_router_topk=2, rngs=nnx.Rngs(3))
    parameters = jax.tree.leaves(nnx.state(made, nnx.Param))
    assert {parameter.dtype.name for parameter in parameters} == {"bfloat16"}
    logits, wanted = made(TOKENS), model(TOKENS)
    assert logits.dtype == wanted.dtype == jnp.bfloat16
    # Each copy's output is rounded to bf16, and so is the sum over two of them.
    np.testing.assert_allclose(logits.astype(np.float32), wanted.astype(np.float32), rtol=2**-6, atol=2**-6)
    model.train()
    assert upcycle(model, num_moe_experts=4, rngs=nnx.Rngs(3)).layers[0].training


@pytest.mark.slow
def test_experts_lie_on_the_mesh():
    model = dense()
    with jax.set_mesh(make_mesh(ParallelConfig(expert=2), devices=jax.devices()[:2])):
        made = upcycle(model, num_moe_experts=4, rngs=nnx.Rngs(3))
    kernel = made.layers[0].mlp.experts.linear_fc1.kernel[...]
    assert kernel.addressable_shards[0].data.shape[0] == 2


@pytest.mark.costly("experts0-a copy of the block, of size 32")
@pytest.mark.parametrize(
    ("experts", "words"),
    [
        ({"moe_ffn_hidden_size": 16}, "a copy of the block, of size 32"),
        ({"moe_router_pre_softmax": True}, "sum 1"),
        ({"moe_router_topk": 1, "moe_router_score_function": "sigmoid"}, "at least 2"),
        ({"moe_router_topk_scaling_factor": 2.5}, "sum 1"),
        ({"moe_expert_capacity_factor": 1.0}, "drops tokens"),
        ({"moe_expert_rank_capacity_factor": 0.5}, "drops tokens"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sum 1"),
        ({"activation": "relu"}, "activation would change"),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset would change"),
    ],
)
def test_what_would_change_the_outputs_is_refused(experts, words):
    with pytest.raises(ValueError, match=words):
        upcycle(dense(), num_moe_experts=4, rngs=nnx.Rngs(0), **experts)


def test_a_model_that_has_experts_is_refused():
    with pytest.raises(ValueError, match="has 4 experts already"):
        upcycle(upcycle(dense(), num_moe_experts=4, rngs=nnx.Rngs(0)), num_moe_experts=2, rngs=nnx.Rngs(0))


def test_models_whose_layers_would_lose_something_are_refused():
    model = dense()
    model.layers[0].self_attention.proj.module_recipe = ModuleRecipe(training=Float8CurrentScaling())
    with pytest.raises(ValueError, match=r"layers.0.self_attention.proj has a recipe of its own"):
        upcycle(model, num_moe_experts=4, rngs=nnx.Rngs(0))
    model = dense()
    model.layers[0].layernorm_mlp = LoRA(model.layers[0].layernorm_mlp, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"layers.0.layernorm_mlp is a LoRA"):
        upcycle(model, num_moe_experts=4, rngs=nnx.Rngs(0))
    for name, words in (("frozen", "is frozen"), ("high_precision", "has high_precision=True")):
        model = dense()
        setattr(model.layers[0].layernorm_mlp, name, True)
        with pytest.raises(ValueError, match=rf"layers.0.layernorm_mlp {words}"):
            upcycle(model, num_moe_experts=4, rngs=nnx.Rngs(0))
    model = dense()
    model.layers[1].eval()
    with pytest.raises(ValueError, match=r"call model.train\(\) or model.eval\(\)"):
        upcycle(model, num_moe_experts=4, rngs=nnx.Rngs(0))
    config = model.config
    named = MegatronGPTModel(config, None, 32, 8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="takes a GPTModel, whose constructor it calls, and got a MegatronGPTModel"):
        upcycle(named, num_moe_experts=4, rngs=nnx.Rngs(0))
