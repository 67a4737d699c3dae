"""Arguments of Transformer Engine's modules that no other test holds; docs/parity.md has a row for each."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax_te import layers, megatron, models, te_pytorch
from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.layers import LayerNormLinear, LayerNormMLP, TransformerLayer
from jax_te.recipe import Float8CurrentScaling
from jax_te.sharding import make_mesh
from tests.support import reference
from tests.support.meshes import shard
from tests.support.numerics import (
    NO_DROPOUT,
    assert_bitwise,
    assert_close,
    draw,
    quick_jit,
    relative_l2,
    without_type_checker,
)
from tests.support.reference import ROUNDOFF, Form, parameters, randomize

S, H, F, N = 8, 32, 64, 4
BATCH_FIRST: dict[str, Any] = {"attn_input_format": "bshd"}
TOLERANCE = 12 * ROUNDOFF["float32"] * F**0.5  # twelve sums of at most F products follow one another


def build(**options: Any) -> TransformerLayer:
    return randomize(TransformerLayer(H, F, N, rngs=nnx.Rngs(0), **(NO_DROPOUT | options)))


@pytest.mark.costly("False")
@pytest.mark.parametrize("output_norm", [False, True])
def test_epsilon_is_that_of_every_norm(output_norm: bool) -> None:
    """Inputs so small that it matters: with another one in any norm the output would be another."""
    form = Form(epsilon=0.5, output_norm=output_norm)
    x = draw("x", (2, S, H), scale=0.3)
    layer = build(layernorm_epsilon=form.epsilon, output_layernorm=output_norm)
    layer.eval()
    wide = lambda model: jax.tree.map(np.float64, parameters(model))  # noqa: E731
    y = quick_jit(lambda layer, x: layer(x))(layer, x)
    assert_close(y, reference.layer(np, wide(layer), np.float64(x), form), TOLERANCE)
    assert relative_l2(y, reference.layer(np, wide(layer), np.float64(x), Form(output_norm=output_norm))) > 0.01
    mlp = randomize(LayerNormMLP(H, F, form.epsilon, rngs=nnx.Rngs(0)))
    p = wide(mlp)
    normed = reference.norm(np, np.float64(x), p["scale"], p["ln_bias"], form)
    assert_close(quick_jit(lambda mlp, x: mlp(x))(mlp, x), reference.mlp_block(np, p, normed, form), TOLERANCE)


@pytest.mark.costly
def test_attention_dropout_is_of_the_softmax_alone() -> None:
    """Without hidden dropout a key drops attention's weights; where rows have one weight, it keeps or drops all."""
    call = quick_jit(lambda layer, x, key: layer(x, dropout_key=key))
    x, keys = draw("x", (2, S, H)), [jax.random.key(seed) for seed in (0, 1)]
    plain = build(hidden_dropout=0.0, attention_dropout=0.0)
    assert_bitwise(call(plain, x, keys[0]), call(plain, x, None))
    first, second = (call(build(hidden_dropout=0.0, attention_dropout=0.5), x, key) for key in keys)
    assert relative_l2(first, second) > 0.05
    core = build(hidden_dropout=0.0, attention_dropout=0.5).self_attention.core_attention
    ones = jnp.ones((256, 1, N, H // N))
    kept = np.asarray(core(ones, ones, ones, dropout_key=keys[0])).reshape(256 * N, -1)
    assert (kept == kept[:, :1]).all()
    assert set(np.unique(kept)) == {0.0, 2.0}
    assert abs((kept[:, 0] == 2.0).mean() - 0.5) < 4 * (0.25 / len(kept)) ** 0.5


def test_arguments_without_effect_on_a_transformer_layer() -> None:
    """In bf16, where TE's two choices of the softmax's arithmetic give different results."""
    options: dict[str, Any] = {"apply_query_key_layer_scaling": False, "attention_softmax_in_fp32": True}
    tuned = build(**options, layer_number=3, seq_length=S, micro_batch_size=2, fuse_wgrad_accumulation=True)
    x = draw("x", (2, S, H), jnp.bfloat16)
    call = quick_jit(lambda layer, x: layer(x))
    assert_bitwise(call(tuned, x), call(build(), x))
    assert (tuned.layer_number, build().layer_number) == (3, None)
    for layer in (tuned.self_attention.qkv, tuned.self_attention.proj, tuned.layernorm_mlp):
        assert layer.fuse_wgrad_accumulation


@pytest.mark.costly
def test_tp_size_of_a_transformer_layer_is_the_meshs() -> None:
    layer, x = build(tp_size=2), draw("x", (4, S, H))
    with jax.set_mesh(make_mesh(ParallelConfig(tensor=2))):
        assert jax.eval_shape(layer, x).shape == x.shape
    with jax.set_mesh(make_mesh(ParallelConfig(tensor=4))):
        with pytest.raises(ValueError, match=r"tp_size=2.* 4 tensor"):
            jax.eval_shape(layer, x)
        assert jax.eval_shape(build(), x).shape == x.shape


@pytest.mark.costly
def test_masks_hide_where_they_are_true() -> None:
    """An arbitrary mask equals what it spells: causal self-attention, and an encoder's output cut short."""
    x, encoded = draw("x", (2, S, H)), draw("encoded", (2, 6, H))
    kinds = {"self_attn_mask_type": "arbitrary", "enc_dec_attn_mask_type": "arbitrary"}
    future = jnp.triu(jnp.ones((S, S), bool), 1)[None, None]
    behind = jnp.broadcast_to(jnp.arange(6) >= 4, (2, 1, S, 6))
    y = quick_jit(lambda layer, *a: layer(*a))(build(layer_type="decoder", **kinds), x, future, encoded, behind)
    plain = build(layer_type="decoder")
    assert_close(y, quick_jit(lambda layer, *a: layer(a[0], None, a[1]))(plain, x, encoded[:, :4]), TOLERANCE)
    with without_type_checker(), pytest.raises(ValueError, match=r"'arbitrary'.* mask"):
        build(self_attn_mask_type="arbitrary")(x)


def dropping(attention: float = 0.0, hidden: float = 0.0) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=H, num_attention_heads=N, attention_dropout=attention, hidden_dropout=hidden
    )


def language_model(model: Any, **rates: float) -> Any:
    spec = {"transformer_layer_spec": None} if model is models.MegatronGPTModel else {}
    return model(dropping(**rates), vocab_size=16, max_sequence_length=S, **spec, rngs=nnx.Rngs(0))


X, Q, TOKENS = jnp.ones((2, S, H)), jnp.ones((2, S, N, H // N)), jnp.zeros((2, S), jnp.int32)
BOTH, CORE, HIDDEN = "hidden_dropout=0.1 and attention_dropout=0.1", "attention_dropout=0.1", "hidden_dropout=0.2"
DROPPING: dict[str, tuple[Any, str, tuple[Any, ...]]] = {
    "layer": (lambda: TransformerLayer(H, F, N, rngs=nnx.Rngs(0)), BOTH, (X,)),
    "stochastic depth": (lambda: build(drop_path_rate=0.3), "drop_path_rate=0.3", (X,)),
    "attention": (lambda: layers.MultiheadAttention(H, N, rngs=nnx.Rngs(0)), CORE, (X,)),
    "core": (lambda: layers.DotProductAttention(N, H // N, attention_dropout=0.1), CORE, (Q, Q, Q)),
    "te_pytorch": (lambda: te_pytorch.TransformerLayer(H, F, N, **BATCH_FIRST, rngs=nnx.Rngs(0)), BOTH, (X,)),
    "megatron": (lambda: megatron.TransformerLayer(dropping(0.1), rngs=nnx.Rngs(0)), CORE, (X,)),
    "its core": (lambda: megatron.TEDotProductAttention(dropping(0.1), 1, "causal", "self"), CORE, (Q, Q, Q, None)),
    "GPT": (lambda: language_model(models.GPTModel, hidden=0.2), HIDDEN, (TOKENS,)),
    "GPT's attention": (lambda: language_model(models.GPTModel, attention=0.1), CORE, (TOKENS,)),
    "Megatron's GPT": (lambda: language_model(models.MegatronGPTModel, hidden=0.2), HIDDEN, (TOKENS,)),
    "BERT": (lambda: language_model(models.BertModel, hidden=0.2), HIDDEN, (TOKENS,)),
    "T5": (lambda: language_model(models.T5Model, hidden=0.2), HIDDEN, (TOKENS, TOKENS)),
}


@pytest.mark.costly("BERT", slow=("T5", "te_pytorch", "megatron", "GPT's attention", "Megatron's GPT", "GPT"))
@pytest.mark.parametrize("name", DROPPING)
def test_dropout_without_a_key_is_refused_in_training(name: str) -> None:
    """A program written for PyTorch passes none, and would train without dropout unawares."""
    make, rates, args = DROPPING[name]
    module = make()
    trace = lambda **options: jax.eval_shape(lambda module, args: module(*args, **options), module, args)  # noqa: E731
    expected = trace(dropout_key=jax.random.key(0))
    with pytest.raises(ValueError, match=rf"has {re.escape(rates)}, and this call in training has no key.*eval\(\)"):
        trace()
    module.eval()
    assert trace() == expected
    module.train()
    with pytest.raises(ValueError, match="has no key"):
        trace()
    module.set_attributes(without_dropout=True)
    assert trace() == expected


@pytest.mark.costly
def test_evaluation_drops_nothing_though_it_has_a_key() -> None:
    layer, x, key = build(hidden_dropout=0.5, attention_dropout=0.5), draw("x", (2, S, H)), jax.random.key(0)
    call = quick_jit(lambda layer, x, key: layer(x, dropout_key=key))
    dropped = call(layer, x, key)
    layer.eval()
    assert_bitwise(call(layer, x, key), call(layer, x, None))
    assert relative_l2(dropped, call(layer, x, key)) > 0.1
    layer.train()
    assert_bitwise(call(layer, x, key), dropped)


@pytest.mark.costly("Column-kernel0-False")
@pytest.mark.parametrize(
    ("mode", "kernel", "reduces"), [("Column", P(None, "tensor"), False), ("Row", P("tensor"), True)]
)
def test_layernorm_linear_is_column_or_row_parallel(mode: Any, kernel: P, reduces: bool) -> None:
    """Its kernel is split over outputs or inputs, and only row-parallel shards have partial sums to add up."""
    make = lambda mode: randomize(LayerNormLinear(H, F, parallel_mode=mode, rngs=nnx.Rngs(0)))  # noqa: E731
    call = jax.jit(lambda layer, x: layer(x))
    x = draw("x", (2, S, H))
    expected = call(make(None), x)
    with jax.set_mesh(make_mesh(ParallelConfig(tensor=2))):
        layer = shard(make(mode))
        assert layer.kernel.sharding.is_equivalent_to(jax.NamedSharding(jax.sharding.get_mesh(), kernel), 2)
        assert_close(call(layer, x), expected, TOLERANCE)
        assert ("all-reduce" in call.lower(layer, x).compile().as_text()) == reduces


def test_recomputed_core_attention_saves_no_scores() -> None:
    """What backward keeps has no array of queries times keys, whose size grows with the square of the length."""
    layer, x = (
        te_pytorch.TransformerLayer(H, F, N, **NO_DROPOUT, **BATCH_FIRST, rngs=nnx.Rngs(0)),
        draw("x", (2, 128, H)),
    )
    layer.eval()

    def kept(**options: bool) -> set[tuple[int, ...]]:
        backward = jax.eval_shape(lambda x: jax.vjp(lambda x: layer(x, **options), x)[1], x)
        return {leaf.shape for leaf in jax.tree.leaves(backward)}

    scores = lambda shapes: {shape for shape in shapes if shape.count(128) > 1}  # noqa: E731
    assert scores(kept())
    assert not scores(kept(checkpoint_core_attention=True))
    assert kept(checkpoint_core_attention=False) == kept()


@pytest.mark.costly
def test_a_decoder_is_called_in_transformer_engines_order() -> None:
    """Behind the input stand its mask and options of that, the encoder's output and the mask of that."""
    options: dict[str, Any] = {"self_attn_mask_type": "padding", "enc_dec_attn_mask_type": "padding"}
    options["layer_type"] = "decoder"
    layer = randomize(te_pytorch.TransformerLayer(H, F, N, **BATCH_FIRST, rngs=nnx.Rngs(0), **(NO_DROPOUT | options)))
    x, encoded = draw("x", (2, S, H)), draw("encoded", (2, 6, H))
    own, padding = (jnp.broadcast_to(jnp.arange(size) >= size - 2, (2, 1, 1, size)) for size in (S, 6))
    call = quick_jit(lambda layer, x, own, *encoder: layer(x, own, None, None, None, *encoder))
    y = call(layer, x, own, encoded, padding)
    by_name = {"attention_mask": own, "encoder_output": encoded, "enc_dec_attn_mask": padding}
    assert_bitwise(y, quick_jit(lambda layer, x, a: layer(x, **a))(randomize(build(**options)), x, by_name))
    for other in ((~own, encoded, padding), (own, -encoded, padding), (own, encoded, ~padding)):
        assert relative_l2(y, call(layer, x, *other)) > 0.01


@pytest.mark.costly
def test_a_layer_called_as_transformer_engines_keeps_its_kernels() -> None:
    layer, x = (
        randomize(te_pytorch.TransformerLayer(H, F, N, **NO_DROPOUT, **BATCH_FIRST, rngs=nnx.Rngs(0))),
        draw("x", (2, S, H)),
    )
    layer.eval()
    with te_pytorch.fp8_autocast(fp8_recipe=Float8CurrentScaling()):
        first = layer(x, is_first_microbatch=True)
        layer.self_attention.proj.kernel.set_value(jnp.zeros((H, H)))
        assert_bitwise(layer(x, is_first_microbatch=False), first)
        assert relative_l2(layer(x), first) > 0.01


@pytest.mark.parametrize("kind", [LayerNormLinear, LayerNormMLP])
def test_layers_without_a_bias(kind: Any) -> None:
    """They have no parameter for it, and give what zeros there give, which biases begin with."""
    plain, made = kind(H, F, bias=False, rngs=nnx.Rngs(0)), kind(H, F, rngs=nnx.Rngs(0))
    assert {name for name in parameters(plain) if "bias" in name} == {"ln_bias"}
    assert {name for name in parameters(made) if "bias" in name} > {"ln_bias"}
    x = draw("x", (2, S, H))
    assert_bitwise(plain(x), made(x))
