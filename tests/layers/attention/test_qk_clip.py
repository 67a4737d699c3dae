"""clip_qk: which weights it scales, and that the logits then keep to the threshold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.layers import (
    DotProductAttention,
    LoRA,
    MultiheadAttention,
    TransformerLayer,
    clip_qk,
    init_kv_cache,
    quantize_parameters,
)
from jax_te.models import Execution, GPTModel
from jax_te.recipe import Float8CurrentScaling, autocast
from tests.support.numerics import NO_DROPOUT, TOLERANCE, assert_bitwise, assert_close, draw, without_type_checker
from tests.support.reference import randomize

H, N, G, D = 32, 4, 2, 8


def with_adapter(layer):
    layer.qkv = LoRA(layer.qkv, 2, rngs=nnx.Rngs(1))
    return layer


def stored_quantized(layer):
    with autocast(Float8CurrentScaling()):
        return quantize_parameters(layer)


def build(**options):
    return randomize(
        MultiheadAttention(
            H, N, attention_dropout=0.0, num_gqa_groups=G, return_max_logit=True, rngs=nnx.Rngs(0), **options
        )
    )


@pytest.mark.costly("0.5-False", slow=("0.5-True", "0.0-True"))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("alpha", [0.5, 0.0, 1.0])
def test_logits_keep_to_the_threshold_and_other_groups_stay(alpha, bias):
    layer, x = build(bias=bias), draw("x", (2, 8, H))
    before, kernel = layer(x)[1], layer.qkv.kernel[...]
    by_group = np.asarray(before).reshape(G, -1).max(1)
    high, threshold = int(by_group.argmax()), float(by_group.mean())
    assert by_group.min() < threshold < by_group.max()
    clip_qk(layer, before, threshold=threshold, alpha=alpha)
    after = np.asarray(layer(x)[1]).reshape(G, -1)
    assert after[high].max() == pytest.approx(threshold, rel=1e-5)
    assert_close(after[1 - high], np.asarray(before).reshape(G, -1)[1 - high], TOLERANCE["float32"])
    clipped = layer.qkv.kernel[...].reshape(H, N // G + 2, G, D)
    kernel = kernel.reshape(clipped.shape)
    assert_bitwise(clipped[:, -1], kernel[:, -1])  # values
    assert_bitwise(clipped[:, :, 1 - high], kernel[:, :, 1 - high])
    eta = threshold / by_group[high]
    assert_close(clipped[:, :2, high], kernel[:, :2, high] * np.float32(eta**alpha), TOLERANCE["float32"])
    assert_close(clipped[:, 2, high], kernel[:, 2, high] * np.float32(eta ** (1 - alpha)), TOLERANCE["float32"])


def test_small_and_missing_logits_change_nothing():
    layer = build()
    kernel = layer.qkv.kernel[...]
    clip_qk(layer, jnp.array([1.0, 100.0, -jnp.inf, 3.0]))
    assert_bitwise(layer.qkv.kernel[...], kernel)


@pytest.mark.parametrize(
    ("layer", "arguments", "message"),
    [
        (lambda: build(attention_type="cross", attn_mask_type="no_mask"), {}, "takes self-attention with one fused"),
        (lambda: build(fuse_qkv_params=False), {}, "takes self-attention with one fused"),
        (lambda: build(qk_norm_type="RMSNorm"), {}, "scaling their kernels changes no logit"),
        (build, {"threshold": 0.0}, "threshold must be > 0 and alpha in"),
        (build, {"alpha": 1.5}, "threshold must be > 0 and alpha in"),
        (build, {"max_logit": None}, "max_logit must be an array"),
        (lambda: with_adapter(build()), {}, "kernel of qkv, which has an adapter, LoRA.* merge it first"),
        (lambda: stored_quantized(build()), {}, "kernel of qkv is stored quantized; clip before quantize_parameters"),
        (build, {"max_logit": jnp.ones(3)}, r"max_logit must be \[n\] = \(4,\), got \(3,\)"),
    ],
)
def test_bad_arguments_say_what_is_allowed(layer, arguments, message):
    with without_type_checker(), pytest.raises((ValueError, TypeError), match=message):
        clip_qk(layer(), **{"max_logit": jnp.ones(N), **arguments})


@pytest.mark.costly("False")
@pytest.mark.parametrize("built_with", [False, True])
def test_a_call_asks_for_max_logits(built_with: bool):
    x = draw("x", (2, 8, H))
    options = {"attention_dropout": 0.0, "return_max_logit": built_with, "rngs": nnx.Rngs(0)}
    attention = MultiheadAttention(H, N, **options)
    layer = TransformerLayer(H, 2 * H, N, hidden_dropout=0.0, **options)
    for called, given in ((attention, x), (layer, x), (attention.core_attention, draw("q", (2, 8, 3, N, H // N)))):
        y, max_logit = called(given, return_max_logit=True)
        assert max_logit.shape == (N,)
        assert_bitwise(called(given, return_max_logit=False), y)
    clip_qk(attention, attention(x, return_max_logit=True)[1], threshold=0.01)
    assert float(attention(x, return_max_logit=True)[1].max()) < 0.0101


def test_a_logit_that_is_nan_makes_its_heads_maximum_nan():
    """The scores of a head are many: from some thousand elements on, XLA on CPU loses nan from a maximum of floats."""
    core = DotProductAttention(2, 4, attention_dropout=0.0, return_max_logit=True)
    q, k, v = (draw(name, (2, 128, 2, 4)) for name in "qkv")
    assert jnp.isnan(core(q.at[1, 70, 0, 2].set(jnp.nan), k, v)[1]).tolist() == [True, False]
    # Keys that are padding, whose values may be anything, count no more than they did.
    lengths = jnp.array([128, 64], jnp.int32)
    padded = k.at[1, 100].set(jnp.nan)
    assert jnp.isfinite(core(q, padded, v, attn_mask_type="padding", kv_lengths=lengths)[1]).all()


@pytest.mark.costly
def test_max_logits_and_clipping_leave_the_models_layers_alone(monkeypatch: pytest.MonkeyPatch):
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, qk_clip=True)
    model = GPTModel(config, vocab_size=16, max_sequence_length=8, rngs=nnx.Rngs(0))
    core = model.layers[0].self_attention.core_attention
    assign, assigned = type(core).__setattr__, []

    def watched(module, name, value):
        assigned.append((module, name))
        assign(module, name, value)

    monkeypatch.setattr(type(core), "__setattr__", watched)
    model.clip_qk(model.max_logits(jnp.zeros((1, 8), jnp.int32)))
    assert [name for module, name in assigned if module is core] == []


@pytest.mark.costly("with_adapter-has an adapter, LoRA")
@pytest.mark.parametrize(
    ("change", "message"), [(with_adapter, "has an adapter, LoRA"), (stored_quantized, "is stored quantized")]
)
def test_a_refused_call_of_a_model_has_scaled_none_of_its_layers(change, message):
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2, qk_clip=True)
    model = GPTModel(config, vocab_size=16, max_sequence_length=8, rngs=nnx.Rngs(0))
    change(model.layers[1].self_attention)
    before = model.layers[0].self_attention.qkv.kernel[...]
    with pytest.raises(ValueError, match=message):
        model.clip_qk(jnp.full((2, 2), 1e4))
    assert_bitwise(model.layers[0].self_attention.qkv.kernel[...], before)


def test_kernels_that_were_cached_are_dropped():
    layer, x = build(), draw("x", (2, 8, H))
    with autocast(Float8CurrentScaling()):
        _, logits = layer(x, is_first_microbatch=True)
        clip_qk(layer, logits, threshold=float(logits.min()) / 2)
    assert layer.qkv.kernel_cache is None


@pytest.mark.costly
def test_through_a_transformer_layer():
    """Its self-attention returns them; a cache comes behind, and the norm's output stays inside."""
    options = {"return_max_logit": True, "apply_residual_connection_post_layernorm": True, "layer_type": "decoder"}
    layer = randomize(TransformerLayer(H, 2 * H, N, rngs=nnx.Rngs(0), **(NO_DROPOUT | options)))
    x = draw("x", (1, 8, H))
    y, logits = layer(x, None, x)
    assert logits.shape == (N,)
    attended = layer.self_attention(x)
    assert_bitwise(logits, attended.max_logit)
    assert layer(x, None, x, cache=init_kv_cache(1, 8, N, H // N))._fields == ("y", "max_logit", "cache")
    threshold = float(logits.max()) / 2
    clip_qk(layer.self_attention, logits, threshold=threshold)
    after = layer(x, None, x)
    assert after.max_logit.max() == pytest.approx(threshold, rel=1e-5)
    assert (after.y != y).any()


@pytest.mark.costly("True", slow=["False"])
@pytest.mark.parametrize("scan", [False, True])
def test_through_a_gpt(scan):
    """As its configuration says; losses and gradients are computed without the logits."""
    sizes = {"num_layers": 2, "hidden_size": H, "num_attention_heads": N, "num_query_groups": G}
    config = TransformerConfig(**sizes, qk_clip=True, qk_clip_threshold=0.05, qk_clip_alpha=0.25)
    model = GPTModel(
        config, vocab_size=16, max_sequence_length=8, execution=Execution(scan_layers=scan), rngs=nnx.Rngs(0)
    )
    randomize(model)
    tokens = jnp.arange(16).reshape(2, 8)
    before = jax.jit(lambda model, tokens: model.max_logits(tokens))(model, tokens)
    assert before.shape == (2, N)
    assert before[0].max() > 0.05
    value = model.layers[0].self_attention.qkv.kernel[...]
    model.clip_qk(before)
    # The first layer's input does not depend on what is clipped.
    after = model.max_logits(tokens)
    np.testing.assert_array_less(after[0].reshape(G, -1).max(1), 0.05 * (1 + 1e-5))
    r = N // G
    assert_bitwise(model.layers[0].self_attention.qkv.kernel[:, r + 1], value[:, r + 1])
    assert model(tokens).shape == (2, 8, 16)
    plain = GPTModel(dataclasses.replace(config, qk_clip=False), vocab_size=16, max_sequence_length=8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="qk_clip=False"):
        plain.clip_qk(before)
