"""Tokens per second, FLOPs and MFU."""

import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.cli.model_config import add_adapters
from jax_te.config import LatentAttentionOptions, TransformerConfig
from jax_te.layers import LoRA
from jax_te.metrics import StepWork, peak_flops, train_flops
from jax_te.models import GPTModel
from tests.support.numerics import NO_DROPOUT


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"activation": "swiglu", "num_query_groups": 2, "ffn_hidden_size": 96},
        {"kv_channels": 16, "num_query_groups": 1, "activation": ("gelu_exact", "linear")},
    ],
)
def test_flops_are_six_for_each_weight_of_a_gemm_and_those_of_attention(form):
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, add_bias_linear=False, **form)
    model = nnx.eval_shape(
        lambda: GPTModel(config, vocab_size=48, max_sequence_length=8, position_embedding_type="rope", rngs=nnx.Rngs(0))
    )
    kernels = [leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)) if leaf.ndim > 1]
    tokens, heads = 3 * 8, 4 * (config.kv_channels or 8)
    # The head is the embedding; two products of 2 FLOPs, over half of 8 positions, and twice that in backward.
    wanted = 6 * sum(kernels) * tokens + 2 * 3 * tokens * (2 * 2 * heads * 8 / 2)
    assert train_flops(config, vocab_size=48, batch_size=3, sequence_length=8) == wanted


@pytest.mark.slow
def test_frozen_kernels_have_no_gemms_of_their_gradients():
    config = TransformerConfig(
        num_layers=2, hidden_size=256, num_attention_heads=4, add_bias_linear=False, **NO_DROPOUT
    )
    tokens = jnp.zeros((4, 32), jnp.int32)

    def counted(adapted):
        """FLOPs by the compiler, of elements' operations as well."""

        def build():
            rngs = nnx.Rngs(0)
            model = GPTModel(config, vocab_size=64, max_sequence_length=32, position_embedding_type="rope", rngs=rngs)
            for layer in model.layers if adapted else ():
                layer.self_attention.qkv = LoRA(layer.self_attention.qkv, 4, rngs=rngs)
                layer.self_attention.proj = LoRA(layer.self_attention.proj, 4, rngs=rngs)
                layer.layernorm_mlp = LoRA(layer.layernorm_mlp, 4, rngs=rngs)
            return model

        graphdef, trained, rest = nnx.split(nnx.eval_shape(build), nnx.LoRAParam if adapted else nnx.Param, ...)

        def loss(trained, rest):
            return nnx.merge(graphdef, trained, rest).loss(tokens, tokens)

        step = jax.jit(jax.grad(loss))
        return step.lower(trained, rest).compile().cost_analysis()["flops"]

    sizes = {"vocab_size": 64, "batch_size": 4, "sequence_length": 32}
    # Below the first adapters nothing is trained: the first kernel of the model has no GEMM of its input's gradient.
    expected = train_flops(config, **sizes, lora_rank=4) - 2 * tokens.size * 256 * 3 * 256
    # Elements' operations are 2.5 of a hundred without adapters, and 3.6 with them.
    assert counted(True) / counted(False) == pytest.approx(expected / train_flops(config, **sizes), rel=0.02)


def test_adapters_are_counted_by_hand():
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=96, activation="swiglu"
    )
    sizes = {"vocab_size": 48, "batch_size": 3, "sequence_length": 8}
    kernels = 32 * (32 + 2 * 16) + 32 * 32 + 32 * 2 * 96 + 96 * 32
    adapters = 4 * ((32 + 64) + (32 + 32) + (32 + 192) + (96 + 32))  # a row of rank 4 in, and one out
    attention = 3 * (2 * 2 * 32 * 8 / 2)
    assert train_flops(config, **sizes) == 24 * (6 * (2 * kernels + 48 * 32) + 2 * attention)
    frozen = 24 * (4 * (2 * kernels + 48 * 32) + 2 * attention)
    assert train_flops(config, **sizes, lora_rank=4) == frozen + 24 * 6 * 2 * adapters
    with pytest.raises(ValueError, match="lora_rank"):
        train_flops(config, **sizes, lora_rank=0)


LATENT = {"kv_lora_rank": 8, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "moe_layer_freq": [0, 1]}


@pytest.mark.costly("experts", "latent queries")
@pytest.mark.parametrize(
    "form",
    [
        {"activation": "swiglu", "num_query_groups": 2},
        EXPERTS | {"moe_latent_size": 8, "moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
        {"latent_attention": LatentAttentionOptions(q_lora_rank=12, **LATENT), "mtp_num_layers": 1},
        {"latent_attention": LatentAttentionOptions(q_lora_rank=None, **LATENT)},
    ],
    ids=["gated", "experts", "latent queries", "latent"],
)
def test_a_token_multiplies_the_adapters_of_a_run(form):
    """Those that ``--lora-rank`` puts into a model, of experts those of the two that it passes."""
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, add_bias_linear=False, **form)

    def build():
        rngs = nnx.Rngs(0)
        model = GPTModel(config, vocab_size=48, max_sequence_length=8, position_embedding_type="rope", rngs=rngs)
        add_adapters(model, 4, None, rngs)
        return model

    adapters = jax.tree_util.tree_leaves_with_path(nnx.state(nnx.eval_shape(build), nnx.LoRAParam))
    multiplied = sum(
        leaf.size * (2 / 8 if "['experts']" in jax.tree_util.keystr(path) else 1) for path, leaf in adapters
    )
    of_rank = [train_flops(config, vocab_size=48, batch_size=3, sequence_length=8, lora_rank=r) for r in (4, 8)]
    assert of_rank[1] - of_rank[0] == 6 * multiplied * 24


def test_depths_multiply_by_their_layers_and_the_head():
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, add_bias_linear=False, mtp_num_layers=3
    )
    model = nnx.eval_shape(
        lambda: GPTModel(config, vocab_size=48, max_sequence_length=8, position_embedding_type="rope", rngs=nnx.Rngs(0))
    )
    kernels = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)) if leaf.ndim > 1)
    # Five layers attend, and the head, which is the embedding, runs four times.
    wanted = 6 * (kernels + 3 * 48 * 32) * 24 + 5 * 3 * 24 * (2 * 2 * 32 * 8 / 2)
    assert train_flops(config, vocab_size=48, batch_size=3, sequence_length=8) == wanted


@pytest.mark.parametrize("gate", [False, True])
def test_a_token_multiplies_the_experts_that_it_passes(gate):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "add_bias_linear": False}
    experts = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "moe_layer_freq": [0, 1]}
    experts |= {"moe_shared_expert_intermediate_size": 16, "moe_latent_size": 8, "activation": "swiglu"}
    experts |= {"moe_shared_expert_gate": gate}
    config = TransformerConfig(**sizes, **experts)
    model = nnx.eval_shape(
        lambda: GPTModel(config, vocab_size=48, max_sequence_length=8, position_embedding_type="rope", rngs=nnx.Rngs(0))
    )
    multiplied = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param)):
        chosen = 2 / 8 if "['experts']" in jax.tree_util.keystr(path) else 1
        multiplied += chosen * leaf.size if leaf.ndim > 1 else 0
    wanted = 6 * multiplied * 24 + 2 * 3 * 24 * (2 * 2 * 32 * 8 / 2)
    assert train_flops(config, vocab_size=48, batch_size=3, sequence_length=8) == wanted


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", None),
        ("cpu", None),
    ],
)
def test_peaks_are_those_of_the_device_itself(kind, peak):
    assert peak_flops(types.SimpleNamespace(device_kind=kind)) == peak


def test_rates():
    assert StepWork(tokens=100).rates(0.5) == {"tokens_per_second": 200.0, "tokens_per_second_per_device": 200.0}
    work = StepWork(tokens=100, devices=4, flops=2e15, peak=1e15)
    assert work.rates(0.5) == {"tokens_per_second": 200.0, "tokens_per_second_per_device": 50.0, "mfu": 1.0}


@pytest.mark.parametrize("q_lora_rank", [None, 12])
def test_latent_attention_multiplies_by_its_own_kernels(q_lora_rank):
    latent = LatentAttentionOptions(
        q_lora_rank=q_lora_rank, kv_lora_rank=8, qk_head_dim=6, qk_pos_emb_head_dim=4, v_head_dim=8
    )
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, add_bias_linear=False, latent_attention=latent
    )
    model = nnx.eval_shape(
        lambda: GPTModel(config, vocab_size=48, max_sequence_length=8, position_embedding_type="rope", rngs=nnx.Rngs(0))
    )
    kernels = [leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)) if leaf.ndim > 1]
    # Products over half of 8 positions: queries and keys of 4 x 10, probabilities and values of 4 x 8.
    wanted = 6 * sum(kernels) * 24 + 3 * 24 * 2 * 2 * (40 + 32) * 8 / 2
    assert train_flops(config, vocab_size=48, batch_size=3, sequence_length=8) == wanted
