"""Decoder layers and the options of attention blocks against the formulas in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import MoEOptions, RouterOptions
from jax_te.layers import (
    LayerNormMLP,
    MultiheadAttention,
    PackedSeqParams,
    TransformerLayer,
    init_window_kv_cache,
    quantizable_modules,
    rotary_embedding,
)
from jax_te.quantize import frozen_scales
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, autocast
from jax_te.sharding import constrain
from tests.support import reference
from tests.support.meshes import shard, use_mesh
from tests.support.numerics import NO_DROPOUT, assert_close, draw, quick_jit, relative_l2
from tests.support.reference import ROUNDOFF, Form, parameters, randomize, value_and_vjp64

B, S, SKV, H, F, N, D = 4, 8, 6, 32, 64, 4, 8

# Twelve sums of at most F products follow one another.
TOLERANCE = 12 * ROUNDOFF["float32"] * F**0.5

AXES = ("batch", "sequence", "hidden")


def decoder(**options: Any) -> TransformerLayer:
    return TransformerLayer(H, F, N, layer_type="decoder", rngs=nnx.Rngs(0), **(NO_DROPOUT | options))


def run(layer: nnx.Module, args: tuple[Any, ...], g: Any, **arguments: Any) -> Any:
    """Output, and gradients of parameters and arguments, as `reference.value_and_vjp64` gives them."""
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

    @quick_jit
    def value_and_vjp(params: Any, args: tuple[Any, ...], g: Any) -> Any:
        y, vjp = jax.vjp(lambda params, *args: nnx.merge(graphdef, params, rest)(*args, **arguments), params, *args)
        return y, vjp(g)

    y, (d_params, *d_args) = value_and_vjp(params, args, constrain(g, AXES))
    return y, (nnx.to_pure_dict(d_params), *d_args)


def check(actual: Any, expected: Any) -> None:
    assert_close(actual[0], expected[0], TOLERANCE, what="output")
    leaves = [jax.tree_util.tree_leaves_with_path(gradients) for gradients in (actual[1], expected[1])]
    for (path, a), (_, e) in zip(*leaves, strict=True):
        if np.abs(e).max() < 1e-12:
            # A key's bias moves all scores of a query alike, and so nothing. What rounding leaves of that sum is as
            # large as its terms, which are those in the gradient of the same module's scale or kernel.
            size = max(np.abs(other).max() for neighbour, other in leaves[1] if neighbour[:-1] == path[:-1])
            assert np.abs(a).max() < TOLERANCE * size, jax.tree_util.keystr(path)
        else:
            assert_close(a, e, TOLERANCE, what=jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.wide("auto")
def test_decoder_follows_the_formulas_on_every_mesh(mesh_mode: str) -> None:
    layer = randomize(decoder(num_gqa_groups=2))
    x, encoded, g = draw("x", (B, S, H)), draw("encoded", (B, SKV, H)), draw("g", (B, S, H))
    form, p = Form(g=2), parameters(layer)
    graphdef, state = nnx.split(shard(layer))
    actual = run_decoder(nnx.merge(graphdef, state), x, encoded, g)
    check(actual, value_and_vjp64(lambda p, x, e: reference.layer(jnp, p, x, form, encoded=e), (p, x, encoded), g))
    if mesh_mode != "no mesh":
        kernels = actual[1][0]["inter_attention"]
        assert kernels["key_value"]["kernel"].sharding.spec == jax.P("fsdp", None, "tensor")


def run_decoder(layer: TransformerLayer, x: Any, encoded: Any, g: Any) -> Any:
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

    @quick_jit
    def value_and_vjp(params: Any, x: Any, encoded: Any, g: Any) -> Any:
        def forward(params: Any, x: Any, encoded: Any) -> Any:
            return nnx.merge(graphdef, params, rest)(x, encoder_output=encoded)

        y, vjp = jax.vjp(forward, params, x, encoded)
        return y, vjp(g)

    axes = ("batch", "sequence_parallel", "hidden") if layer.sequence_parallel else AXES
    y, (d_params, *d_args) = value_and_vjp(params, x, encoded, constrain(g, axes))
    return y, (nnx.to_pure_dict(d_params), *d_args)


@pytest.mark.costly("post", slow=("output",))
@pytest.mark.parametrize(
    "form",
    [Form(residual_post_norm=True, rms=True), Form(output_norm=True), Form(block_output_norm=True)],
    ids=["post", "output", "block output"],
)
def test_decoder_with_other_norms(form: Form) -> None:
    layer = randomize(
        decoder(
            normalization="RMSNorm" if form.rms else "LayerNorm",
            apply_residual_connection_post_layernorm=form.residual_post_norm,
            output_layernorm=form.output_norm,
            block_output_layernorm=form.block_output_norm,
            qkv_bias=form.block_output_norm,
        )
    )
    x, encoded = draw("x", (2, S, H)), draw("encoded", (2, SKV, H))
    p = jax.tree.map(np.float64, parameters(layer))
    expected = reference.layer(np, p, np.float64(x), form, encoded=np.float64(encoded))
    assert_close(quick_jit(lambda layer, *a: layer(a[0], encoder_output=a[1]))(layer, x, encoded), expected, TOLERANCE)


@pytest.mark.costly(slow=("block output", "learnable softmax", "qk norm, then rope"))
@pytest.mark.wide("qk norm, then rope", "separate kernels", "block output", "learnable softmax")
@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({"qk_norm_type": "RMSNorm", "normalization": "RMSNorm"}, Form(rms=True)),
        ({"qk_norm_type": "LayerNorm", "qk_norm_before_rope": True}, Form(rotary_base=50.0, qk_norm_before_rope=True)),
        ({"qk_norm_type": "LayerNorm", "zero_centered_gamma": True}, Form(rotary_base=50.0, zero_centered=True)),
        ({"fuse_qkv_params": False, "num_gqa_groups": 2}, Form(g=2)),
        ({"window_size": (2, 0)}, Form(window=2)),
        ({"bias": False, "qkv_bias": True, "block_output_layernorm": True}, Form(block_output_norm=True)),
        ({"softmax_type": "learnable"}, Form()),
    ],
    ids=[
        "rms qk norm",
        "qk norm, then rope",
        "rope, then qk norm",
        "separate kernels",
        "window",
        "block output",
        "learnable softmax",
    ],
)
def test_options_of_self_attention(options: dict[str, Any], form: Form) -> None:
    layer = randomize(TransformerLayer(H, F, N, rngs=nnx.Rngs(0), **(NO_DROPOUT | options)))
    x, g, p = draw("x", (2, S, H)), draw("g", (2, S, H)), parameters(layer)
    rotary = None if form.rotary_base is None else rotary_embedding(jnp.arange(S), D, form.rotary_base)
    actual = run(layer, (x,), g, rotary_pos_emb=rotary)
    check(actual, value_and_vjp64(lambda p, x: reference.layer(jnp, p, x, form), (p, x), g))


@pytest.mark.costly("block output")
@pytest.mark.parametrize("norms", [{}, {"block_output_layernorm": True}], ids=["input", "block output"])
def test_blocks_that_both_read_the_layers_input(norms: dict[str, Any]) -> None:
    """As in GPT-NeoX."""
    form = Form(parallel=True, block_output_norm=bool(norms))
    layer = randomize(TransformerLayer(H, F, N, parallel_attention_mlp=True, **norms, **NO_DROPOUT, rngs=nnx.Rngs(0)))
    x, g, p = draw("x", (2, S, H)), draw("g", (2, S, H)), parameters(layer)
    check(run(layer, (x,), g), value_and_vjp64(lambda p, x: reference.layer(jnp, p, x, form), (p, x), g))


@pytest.mark.costly
def test_blocks_with_norms_behind_alone() -> None:
    """As in OLMo 2, whose norms of queries and keys are over all heads."""
    form = Form(input_norm=False, block_output_norm=True, rms=True)
    options: dict[str, Any] = {"block_input_layernorm": False, "block_output_layernorm": True}
    layer = randomize(TransformerLayer(H, F, N, normalization="RMSNorm", **options, **NO_DROPOUT, rngs=nnx.Rngs(0)))
    p = parameters(layer)
    assert "scale" not in p["self_attention"]["qkv"]
    assert "scale" not in p["layernorm_mlp"]
    x, g = draw("x", (2, S, H)), draw("g", (2, S, H))
    check(run(layer, (x,), g), value_and_vjp64(lambda p, x: reference.layer(jnp, p, x, form), (p, x), g))


@pytest.mark.parametrize(
    "other",
    [
        {"output_layernorm": True},
        {"apply_residual_connection_post_layernorm": True},
        {"experts": MoEOptions(router=RouterOptions(num_experts=2))},
    ],
    ids=lambda other: next(iter(other)),
)
def test_blocks_without_norms_in_front_do_not_go_with(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"block_input_layernorm=False does not go with {next(iter(other))}"):
        TransformerLayer(H, F, N, block_input_layernorm=False, **other, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="return_layernorm_output needs input_layernorm=True"):
        LayerNormMLP(H, F, input_layernorm=False, return_layernorm_output=True, rngs=nnx.Rngs(0))


def test_experts_are_told_of_the_tensor_axis_by_their_own_options() -> None:
    experts = MoEOptions(router=RouterOptions(num_experts=2))
    with pytest.raises(ValueError, match="does not reach experts"):
        TransformerLayer(H, F, N, set_parallel_mode=False, experts=experts, rngs=nnx.Rngs(0))
    experts = replace(experts, expert_tensor_parallel=False)
    TransformerLayer(H, F, N, set_parallel_mode=False, experts=experts, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "other",
    [{"layer_type": "decoder"}, {"output_layernorm": True}, {"apply_residual_connection_post_layernorm": True}],
    ids=lambda other: next(iter(other)),
)
def test_blocks_that_both_read_the_layers_input_do_not_go_with(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"parallel_attention_mlp=True does not go with {next(iter(other))}"):
        TransformerLayer(H, F, N, parallel_attention_mlp=True, **other, rngs=nnx.Rngs(0))


def test_biases_of_queries_keys_and_values_alone() -> None:
    """As in Qwen 2; cross-attention has none of them."""
    layer = decoder(bias=False, qkv_bias=True, fuse_qkv_params=False)
    biases = {path[:-1] for path, _ in nnx.to_flat_state(nnx.state(layer, nnx.Param)) if path[-1] == "bias"}
    assert {path for path in biases if "layernorm" not in path} == {
        ("self_attention", name) for name in ("query", "key", "value")
    }


@pytest.mark.costly
def test_packed_sequences_with_rotary_positions_equal_each_one_alone() -> None:
    layer = randomize(TransformerLayer(H, F, N, **NO_DROPOUT, self_attn_mask_type="padding_causal", rngs=nnx.Rngs(0)))
    x = draw("x", (2, 12, H))
    packed = PackedSeqParams(cu_seqlens_q=jnp.array([[0, 5, 12], [0, 3, 9]]), max_seqlen_q=7)
    y = quick_jit(
        lambda layer, x, packed: layer(
            x, packed_seq_params=packed, rotary_pos_emb=rotary_embedding(packed.positions(12), D)
        )
    )(layer, x, packed)
    alone = randomize(TransformerLayer(H, F, N, **NO_DROPOUT, rngs=nnx.Rngs(0)))
    for row, start, end in ((0, 5, 12), (1, 0, 3), (1, 3, 9)):
        part = quick_jit(alone)(
            x[row : row + 1, start:end], rotary_pos_emb=rotary_embedding(jnp.arange(end - start), D)
        )
        assert_close(y[row : row + 1, start:end], part, TOLERANCE, what=f"{row}, {start}:{end}")
    assert packed.segment_ids(12)[1].tolist() == [1, 1, 1, 2, 2, 2, 2, 2, 2, 0, 0, 0]


@pytest.mark.costly
def test_a_window_cache_gives_what_the_whole_sequence_gives() -> None:
    layer = randomize(
        MultiheadAttention(H, N, attention_dropout=0.0, num_gqa_groups=2, window_size=(3, 0), rngs=nnx.Rngs(0))
    )
    x = draw("x", (2, 14, H))
    whole = quick_jit(lambda layer, x: layer(x, rotary_pos_emb=rotary_embedding(jnp.arange(14), D)))(layer, x)
    cache, step = (
        init_window_kv_cache(2, 3, 4, 2, D),
        jax.jit(lambda layer, *a: layer(a[0], rotary_pos_emb=a[1], cache=a[2])),
    )
    for start, end in ((0, 4), (4, 7), (7, 11), (11, 12), (12, 13), (13, 14)):
        y, cache = step(layer, x[:, start:end], rotary_embedding(jnp.arange(start, end), D), cache)
        assert_close(y, whole[:, start:end], TOLERANCE, what=f"{start}:{end}")
    assert cache.places == 7
    assert int(cache.length) == 14
    with pytest.raises(ValueError, match="5 tokens and the 3 before them"):
        cache.append(*(jnp.ones((2, 5, 2, D)),) * 2)
    with pytest.raises(ValueError, match=r"the cache keeps a window of \(3, 0\), the layer's is \(1, 0\)"):
        layer(x[:, :1], cache=cache, window_size=(1, 0))
    other = MultiheadAttention(H, N, attention_dropout=0.0, num_gqa_groups=2, window_size=(2, 0), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"the cache keeps a window of \(3, 0\), the layer's is \(2, 0\)"):
        other(x[:, :1], cache=cache)


@pytest.mark.slow
@pytest.mark.wide("recipe1")
@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), DelayedScaling(amax_history_len=2), Float8BlockScaling()])
def test_a_decoder_under_a_recipe(recipe: Any) -> None:
    """All six linear layers quantize, and the result stays within FP8's rounding of the one without."""
    x, encoded, g = draw("x", (2, 16, H)), draw("encoded", (2, 16, H)), draw("g", (2, 16, H))
    plain_y, plain = run_decoder(randomize(decoder()), x, encoded, g)
    with autocast(recipe), frozen_scales():  # gradients of parameters and inputs alone
        layer = randomize(decoder())
        y, gradients = run_decoder(layer, x, encoded, g)
    assert [name for name, _ in quantizable_modules(layer)] == [
        "inter_attention.key_value",
        "inter_attention.proj",
        "inter_attention.query",
        "layernorm_mlp",
        "self_attention.proj",
        "self_attention.qkv",
    ]
    # E4M3 rounds to 2^-4; seven products of two rounded factors follow one another, half of each on a residual path.
    assert 1e-4 < relative_l2(y, plain_y) < 0.1
    # Gradients pass up to seven quantized products on their way back, with E5M2's 2^-3 in half of the operands: 0.3.
    for (path, a), (_, e) in zip(*map(jax.tree_util.tree_leaves_with_path, (gradients, plain)), strict=True):
        assert relative_l2(a, e) < 0.3, path


@pytest.mark.slow
def test_sequence_parallelism_and_whole_kernels_change_no_value(mesh_mode: str) -> None:
    x, encoded, g = draw("x", (B, S, H)), draw("encoded", (B, S, H)), draw("g", (B, S, H))
    with use_mesh("no mesh"):
        expected = run_decoder(randomize(decoder(hidden_dropout=0.0)), x, encoded, g)
    for options in ({"sequence_parallel": True, "output_layernorm": False}, {"set_parallel_mode": False}):
        layer = randomize(decoder(hidden_dropout=0.0, tp_group="tensor", **options))
        layer.set_tensor_parallel_group("tensor")
        check(run_decoder(shard(layer), x, encoded, g), expected)
        if mesh_mode != "no mesh" and "sequence_parallel" in options:
            y = jax.jit(lambda layer, *a: layer(a[0], encoder_output=a[1]))(shard(layer), x, encoded)
            assert y.sharding.spec[:2] == (("data", "fsdp"), "tensor")
    with pytest.raises(TypeError, match="tp_group must be None or the mesh axis 'tensor', got 'tp'"):
        decoder().set_tensor_parallel_group("tp")


@pytest.mark.costly
def test_drop_path_takes_or_leaves_a_whole_example() -> None:
    layer = TransformerLayer(
        H,
        F,
        N,
        **NO_DROPOUT,
        drop_path_rate=0.5,
        output_layer_init_method=jax.nn.initializers.zeros,
        rngs=nnx.Rngs(0),
    )
    for bias in (layer.self_attention.proj.bias, layer.layernorm_mlp.wo_bias):
        bias.set_value(jnp.ones(H))
    y = jax.jit(lambda layer, x, key: layer(x, dropout_key=key))(layer, jnp.zeros((256, 2, H)), jax.random.key(0))
    by_example = np.asarray(y).reshape(256, -1)
    assert (by_example == by_example[:, :1]).all()
    share = [float((by_example[:, 0] == value).mean()) for value in (0.0, 2.0, 4.0)]
    assert np.abs(np.array(share) - [0.25, 0.5, 0.25]).max() < 4 * (0.25 / 256) ** 0.5
    layer.eval()
    assert float(layer(jnp.zeros((1, 2, H))).mean()) == 2.0


X = jnp.ones((2, S, H))
PACKED = PackedSeqParams(cu_seqlens_q=jnp.array([0, 3, S]))


@pytest.mark.costly("<lambda>-cross-attention needs encoder_output")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: decoder()(X), "cross-attention needs encoder_output"),
        (
            lambda: TransformerLayer(H, F, N, rngs=nnx.Rngs(0))(X, encoder_output=X),
            "an encoder layer takes no encoder_output; build it with layer_type='decoder'",
        ),
        (lambda: decoder()(X, encoder_output=X, packed_seq_params=PACKED), "a decoder layer takes no packed_seq_"),
        (lambda: MultiheadAttention(H, N, rngs=nnx.Rngs(0))(X, None, X), "self-attention takes no encoder_output"),
        (
            lambda: MultiheadAttention(H, N, rngs=nnx.Rngs(0))(X, encoder_lengths=jnp.ones(2, jnp.int32)),
            "self-attention takes no encoder_lengths",
        ),
        (
            lambda: MultiheadAttention(H, N, attention_type="cross", attn_mask_type="no_mask", rngs=nnx.Rngs(0))(
                X, None, X, rotary_pos_emb=rotary_embedding(jnp.arange(S), D)
            ),
            "rotary_pos_emb and cache are for self-attention",
        ),
        (lambda: MultiheadAttention(H, N, attention_type="both", rngs=nnx.Rngs(0)), "attention_type must be one of"),
        (lambda: MultiheadAttention(H, N, qk_norm_type="L2", rngs=nnx.Rngs(0)), "qk_norm_type must be one of"),
        (lambda: TransformerLayer(H, F, N, drop_path_rate=1.0, rngs=nnx.Rngs(0)), "drop_path_rate must be in"),
        (lambda: TransformerLayer(H, F, N, layer_number=0, rngs=nnx.Rngs(0)), "layer_number must be an integer >= 1"),
        (lambda: PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=jnp.arange(2)), "qkv_format 'thd', got 'sbhd'"),
    ],
)  # fmt: skip
def test_bad_arguments_say_what_is_allowed(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_packed_sequences_number_their_tokens_over_the_whole_row() -> None:
    """As Megatron's ``seq_idx``: by the padded offsets if there are some, the rest of the row behind the last."""
    packed = PackedSeqParams(cu_seqlens_q=jnp.array([0, 3, 5]), total_tokens=8)
    assert packed.seq_idx.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    padded = PackedSeqParams(
        cu_seqlens_q=jnp.array([0, 3, 5]), cu_seqlens_q_padded=jnp.array([0, 4, 7]), total_tokens=8
    )
    assert padded.seq_idx.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2]]
    assert jax.tree.map(lambda leaf: leaf, padded).total_tokens == 8
    assert PackedSeqParams(cu_seqlens_q=jnp.array([0, 3])).seq_idx is None
