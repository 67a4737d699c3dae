"""The functions and calling conventions of Transformer Engine for PyTorch."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te import layers, te_pytorch
from jax_te._validation import log_once
from jax_te.config import ModelParallelConfig
from jax_te.layers.attention.kv_cache import init_kv_cache
from jax_te.megatron import TEGroupedLinear
from jax_te.ops import RowGroups
from jax_te.random import RNGStatesTracker
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, current_recipe
from tests.support.numerics import NO_DROPOUT, assert_bitwise, draw, relative_l2, without_type_checker

CURRENT = Float8CurrentScaling()


@pytest.mark.parametrize(
    ("arguments", "named", "recipe"),
    [
        ((), {}, DelayedScaling()),
        ((True,), {}, DelayedScaling()),
        ((False,), {}, None),
        ((True, False, CURRENT), {}, CURRENT),
        ((True, False, CURRENT, None), {}, CURRENT),
        ((), {"recipe": CURRENT}, CURRENT),
        ((), {"enabled": False, "recipe": CURRENT}, None),
    ],
)
def test_contexts_take_transformer_engines_arguments(arguments: Any, named: dict[str, Any], recipe: Any):
    with te_pytorch.autocast(*arguments, **named):
        assert current_recipe() == recipe
    with te_pytorch.fp8_autocast(*arguments, **{name.replace("recipe", "fp8_recipe"): named[name] for name in named}):
        assert current_recipe() == recipe
    assert current_recipe() is None


def test_what_cannot_be_followed_says_so():
    with pytest.raises(ValueError, match=r"calibrating=True.*observe_quantization"):
        te_pytorch.fp8_autocast(calibrating=True)
    with without_type_checker():
        with pytest.raises(TypeError, match=r"must be None, got 'world'.*tp_only_amax_red"):
            te_pytorch.fp8_autocast(fp8_group="world")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"recipe must be a Recipe or None, got .*forget the parentheses"):
            te_pytorch.autocast(recipe=DelayedScaling).__enter__()  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="enabled must be True or False"):
            te_pytorch.autocast("yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tp_group must be None or the mesh axis 'tensor'"):
        te_pytorch.checkpoint(jnp.sin, False, None, "data", jnp.ones(2))


def scaled(x: jax.Array, *, factor: float) -> jax.Array:
    return factor * jnp.sin(x)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), {}),
        ((False, None, None), {}),
        ((False, None, "tensor"), {}),
        ((), {"distribute_saved_activations": False, "tp_group": "tensor", "use_reentrant": False}),
    ],
)
def test_checkpoint_takes_its_options_in_front_or_as_keywords(options: Any, named: dict[str, Any]):
    def run(x: jax.Array) -> jax.Array:
        return te_pytorch.checkpoint(scaled, *options, x, factor=2.0, **named).sum()

    x = draw("x", (4,))
    assert_bitwise(jax.grad(run)(x), jax.grad(lambda x: scaled(x, factor=2.0).sum())(x))
    assert "remat" in str(jax.make_jaxpr(jax.grad(run))(x))


def test_a_function_may_take_a_flag_first():
    """Two arguments behind the function cannot be the three options."""
    assert te_pytorch.checkpoint(lambda flag, x: x if flag else -x, True, jnp.ones(())).item() == 1.0


def test_a_functions_own_arguments_may_look_like_options(caplog: pytest.LogCaptureFixture):
    def own(flag: bool, other: Any, name: Any, x: jax.Array) -> jax.Array:
        return x if flag else -x

    def of_any(*args: Any) -> jax.Array:
        return args[-1] * len(args)

    x = jnp.ones(())
    assert te_pytorch.checkpoint(own, True, None, None, x).item() == 1.0
    with pytest.raises(TypeError, match=r"cannot tell whether \(True, None, None\) are its options or arguments"):
        te_pytorch.checkpoint(of_any, True, None, None, x)
    assert te_pytorch.checkpoint(of_any, x, distribute_saved_activations=False).item() == 1.0
    assert te_pytorch.checkpoint(functools.partial(of_any, True, None, None), x).item() == 4.0
    with pytest.raises(TypeError, match=r"in front of the function's arguments, .*, and as keywords, too"):
        te_pytorch.checkpoint(jnp.sin, False, None, None, x, get_rng_state_tracker=RNGStatesTracker)
    one, other = lambda: RNGStatesTracker(), lambda: RNGStatesTracker()
    with pytest.raises(TypeError, match=r"get_cuda_rng_tracker is the older name of get_rng_state_tracker"):
        te_pytorch.checkpoint(jnp.sin, x, get_rng_state_tracker=one, get_cuda_rng_tracker=other)
    log_once.cache_clear()
    with caplog.at_level("INFO", logger="jax_te"):
        te_pytorch.checkpoint(jnp.sin, False, None, None, x)
        te_pytorch.checkpoint(jnp.sin, x)
    assert [record.getMessage().split("(")[0] for record in caplog.records] == ["checkpoint"]


@pytest.mark.parametrize("name", ["get_cuda_rng_tracker", "get_rng_state_tracker", ""])
def test_checkpoint_replays_a_trackers_streams(name: str):
    tracker = RNGStatesTracker()
    tracker.add("dropout", 1)

    def drop(x: jax.Array) -> jax.Array:
        with tracker.fork("dropout") as key:
            return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0)

    x = jnp.ones(64)
    if name:
        y = te_pytorch.checkpoint(drop, x, **{name: lambda: tracker})
    else:
        y = te_pytorch.checkpoint(drop, False, lambda: tracker, None, x)
    assert 0 < y.sum() < 64
    assert tracker.get_states()["dropout"].count == 1


def build(kind: Any = te_pytorch.TransformerLayer, **options: Any) -> Any:
    format = {"attn_input_format": "bshd"} if kind is te_pytorch.TransformerLayer else {}
    return kind(32, 64, 2, **NO_DROPOUT, **format, **options, rngs=nnx.Rngs(0))


@pytest.mark.slow
def test_a_layer_is_called_in_transformer_engines_order():
    """The order of Transformer Engine 2.20: tests/te/test_pytorch_arguments.py reads it from its source."""
    x, encoded = draw("x", (2, 4, 32)), draw("encoded", (2, 6, 32))
    options: dict[str, Any] = {"layer_type": "decoder", "enc_dec_attn_mask_type": "padding"}
    layer, base = build(**options), build(layers.TransformerLayer, **options)
    own, padding = (jnp.broadcast_to(jnp.arange(size) >= size - 2, (2, 1, 1, size)) for size in (4, 6))
    y = layer(x, own, "padding", None, None, encoded, padding, "padding", None, None, None, True)
    expected = base(x, own, encoded, padding, self_attn_mask_type="padding", checkpoint_core_attention=True)
    assert_bitwise(y, expected)
    assert relative_l2(layer(x, None, "no_mask", encoder_output=encoded, enc_dec_attn_mask=padding), y) > 1e-3


def test_attention_is_called_in_transformer_engines_order():
    x = draw("x", (2, 4, 32))
    options: dict[str, Any] = {"attention_dropout": 0.0}
    layer = te_pytorch.MultiheadAttention(32, 2, **options, qkv_format="bshd", rngs=nnx.Rngs(0))
    base = layers.MultiheadAttention(32, 2, **options, input_layernorm=False, rngs=nnx.Rngs(0))
    assert_bitwise(layer(x, None, None, "causal", (1, 0)), base(x, attn_mask_type="causal", window_size=(1, 0)))
    core, q = te_pytorch.DotProductAttention(2, 16, None, 0.0, "bshd"), draw("q", (2, 4, 2, 16))
    hidden = jnp.arange(4)[None, None, None] == 2
    expected = layers.DotProductAttention(2, 16)(q, q, q, attention_mask=hidden, attn_mask_type="arbitrary")
    assert_bitwise(core(q, q, q, hidden, "bshd", attn_mask_type="arbitrary"), expected)


@pytest.mark.costly
def test_a_layer_takes_transformer_engines_names():
    x = draw("x", (2, 4, 32))
    layer, base = build(), build(layers.TransformerLayer)
    assert_bitwise(layer(hidden_states=x), base(x))
    cache = init_kv_cache(2, 8, 2, 16)
    y, after = layer(x, inference_params=cache)
    assert after.length == 4
    assert_bitwise(y, base(x, cache=cache)[0])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda **format: te_pytorch.TransformerLayer(32, 64, 2, **format, rngs=nnx.Rngs(0)), "attn_input_format"),
        (lambda **format: te_pytorch.MultiheadAttention(32, 2, **format, rngs=nnx.Rngs(0)), "qkv_format"),
        (lambda **format: te_pytorch.DotProductAttention(2, 16, **format), "qkv_format"),
    ],
)
def test_transformer_engines_default_format_is_refused(make: Any, name: str):
    """Attention would run along the batch of a program that changes only its import."""
    for given in ({}, {name: "sbhd"}):
        with pytest.raises(ValueError, match=rf"{name} must be 'bshd', got 'sbhd', the default.*Transpose"):
            make(**given)
    with pytest.raises(ValueError, match=rf"{name} must be 'bshd', got 'thd'.*packed_seq_params"):
        make(**{name: "thd"})
    assert make(**{name: "bshd"})


@pytest.mark.parametrize("name", ["bottom_right_diagonal", "enc_dec_bottom_right_diagonal"])
def test_what_a_call_cannot_follow_says_so(name: str):
    given: dict[str, Any] = {name: False}
    with pytest.raises(ValueError, match=rf"{name}=.* is not supported in a call; leave it None, and give"):
        build()(jnp.ones((1, 4, 32)), **given)


@pytest.mark.costly("causal")
@pytest.mark.parametrize("mask", [None, jnp.arange(6)[None, None, None] >= 5], ids=["causal", "padding"])
def test_windows_of_a_call_take_the_place_of_the_layers(mask: Any):
    """Of self-attention and of cross-attention, by place and by name."""
    x, encoded = draw("x", (1, 6, 32)), draw("encoded", (1, 6, 32))
    kinds: dict[str, Any] = {"self_attn_mask_type": "causal" if mask is None else "padding_causal"}
    options = kinds | {"layer_type": "decoder", "enc_dec_attn_mask_type": "no_mask"}
    layer = build(window_size=(3, 0), **options)
    expected = build(window_size=(1, 0), enc_dec_window_size=(2, 2), **options)
    y = layer(x, mask, None, (1, 0), encoder_output=encoded, enc_dec_window_size=(2, 2))
    assert_bitwise(y, expected(x, mask, encoder_output=encoded))
    assert relative_l2(layer(x, mask, encoder_output=encoded), y) > 1e-3
    with pytest.raises(ValueError, match="an encoder layer takes no enc_dec_window_size"):
        build()(x, enc_dec_window_size=(2, 2))


@pytest.mark.parametrize(
    ("name", "sizes", "argument", "instead"),
    [
        ("Linear", (16, 16), "device", "JAX places arrays"),
        ("LayerNormMLP", (16, 16), "ub_overlap_ag", "XLA has no user buffers"),
        ("GroupedLinear", (2, 16, 16), "rng_tracker_name", "dropout_key"),
        ("LayerNorm", (16,), "device", "JAX places arrays"),
        ("TransformerLayer", (16, 16, 2), "name", "attribute that holds it"),
        ("DotProductAttention", (2, 16), "cp_stream", "context axis"),
    ],
)
def test_arguments_of_pytorch_are_refused_by_name(name: str, sizes: Any, argument: str, instead: str):
    kind = getattr(te_pytorch, name)
    with pytest.raises(TypeError, match=rf"{name} got {argument}='x', .*{instead}.*; leave it out"):
        kind(*sizes, **{argument: "x"}, rngs=nnx.Rngs(0))


def test_misspelt_arguments_are_refused_as_of_any_class():
    with pytest.raises(TypeError, match="unexpected keyword argument 'devise'"):
        te_pytorch.Linear(16, 16, devise="x", rngs=nnx.Rngs(0))  # pyright: ignore[reportCallIssue]


def test_arguments_of_a_call_of_pytorch_are_refused_by_name():
    with pytest.raises(TypeError, match=r"TransformerLayer got cu_seqlens_q=.*packed_seq_params"):
        build()(jnp.ones((1, 4, 32)), cu_seqlens_q=[0, 4])
    given: dict[str, Any] = {"fp8_output": True}
    with pytest.raises(TypeError, match=r"Linear got fp8_output=True, .*compute dtype; leave it out"):
        te_pytorch.Linear(16, 16, rngs=nnx.Rngs(0))(jnp.ones((2, 16)), **given)


def test_dense_layers_take_transformer_engines_names():
    x = draw("x", (2, 4, 16))
    for name, sizes in (("Linear", (16, 8)), ("LayerNormLinear", (16, 8, 1e-6)), ("LayerNormMLP", (16, 8, 1e-6))):
        layer, base = (getattr(module, name)(*sizes, rngs=nnx.Rngs(0)) for module in (te_pytorch, layers))
        assert_bitwise(layer(inp=x), base(x))
        # There, True would be sequence_parallel; in jax_te.layers, the bias.
        with pytest.raises(TypeError, match="positional argument"):
            getattr(te_pytorch, name)(*sizes, True, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_norms_take_transformer_engines_names(name: str):
    x = draw("x", (2, 4, 16))
    kind, base = getattr(te_pytorch, name), getattr(layers, name)
    expected = base(16, 1e-3, zero_centered_gamma=True, rngs=nnx.Rngs(0))(x)
    assert_bitwise(kind(16, 1e-3, False, jnp.float32, True, rngs=nnx.Rngs(0))(x), expected)
    assert_bitwise(kind(hidden_size=16, eps=1e-3, zero_centered_gamma=True, rngs=nnx.Rngs(0))(x), expected)
    for sizes in ({}, {"normalized_shape": 16, "hidden_size": 16}):
        with pytest.raises(TypeError, match="normalized_shape, or hidden_size, its older name, must be given"):
            kind(**sizes, rngs=nnx.Rngs(0))


@pytest.mark.costly
def test_experts_take_transformer_engines_arguments():
    x, sizes = draw("x", (5, 16)), [4, 1]
    options: dict[str, Any] = {"parallel_mode": "column", "return_bias": True, "params_dtype": "bfloat16"}
    kinds: tuple[Any, Any] = te_pytorch.GroupedLinear, layers.GroupedLinear
    layer, base = (kind(2, 16, 32, init_method=nnx.initializers.ones, **options, rngs=nnx.Rngs(0)) for kind in kinds)
    expected, biases = base(x, sizes)
    y, bias = layer(inp=x, m_splits=jnp.array(sizes), is_first_microbatch=None)
    assert_bitwise(y, expected)
    assert_bitwise(bias, biases)
    assert layer.kernel.dtype == jnp.bfloat16
    # Megatron gives its configuration's to all layers; without a split there is nothing to follow.
    assert te_pytorch.GroupedLinear(2, 16, 32, sequence_parallel=True, rngs=nnx.Rngs(0)).parallel_mode is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sequence_parallel": True, "parallel_mode": "row"}, "sequence_parallel=True .* rows sorted by expert"),
        ({"ub_overlap_rs": True}, "ub_overlap_rs=True .* XLA overlaps"),
        ({"ub_overlap_ag": True}, "ub_overlap_ag=True .* XLA overlaps"),
        ({"delay_wgrad_compute": True}, r"delay_wgrad_compute=True .* jax_te\.training\.deferred_vjp"),
        ({"save_original_input": True}, "save_original_input=True .* quantized input"),
    ],
)
def test_what_experts_cannot_follow_says_so(options: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        te_pytorch.GroupedLinear(2, 16, 32, **options, rngs=nnx.Rngs(0))


def test_masks_that_transformer_engine_does_not_read_are_logged_and_those_that_it_reads_count(caplog):
    x, causal = draw("x", (2, 8, 32)), ~jnp.tri(8, dtype=bool)[None, None]
    padding = jnp.zeros((2, 1, 1, 8), bool).at[0, ..., :3].set(True).at[1, ..., 6:].set(True)
    layer = te_pytorch.MultiheadAttention(32, 4, qkv_format="bshd", attention_dropout=0.0, rngs=nnx.Rngs(0))
    core = te_pytorch.DotProductAttention(4, 8, qkv_format="bshd", attention_dropout=0.0)
    q = draw("q", (2, 8, 4, 8))
    log_once.cache_clear()
    with caplog.at_level("INFO"):
        assert_bitwise(layer(x, causal), layer(x))
        assert_bitwise(core(q, q, q, causal), core(q, q, q))
    assert [record.message for record in caplog.records if "attention masks" in record.message] == [
        "attention masks have no effect under mask type 'causal', as in Transformer Engine"
    ]
    hidden = padding | padding.swapaxes(2, 3)
    assert_bitwise(layer(x, padding, attn_mask_type="padding"), layer(x, hidden, attn_mask_type="arbitrary"))
    assert_bitwise(core(q, q, q, padding, attn_mask_type="padding"), core(q, q, q, hidden, attn_mask_type="arbitrary"))


@pytest.mark.costly
def test_rows_of_no_expert_are_refused():
    """Transformer Engine splits the rows by the sizes, and torch refuses sizes with another sum."""
    options: dict[str, Any] = {"init_method": nnx.initializers.ones, "bias": False, "rngs": nnx.Rngs(0)}
    own = te_pytorch.GroupedLinear(2, 16, 32, **options)
    config = {"config": ModelParallelConfig(), "parallel_mode": None, "skip_bias_add": False}
    for layer in (own, TEGroupedLinear(2, 16, 32, **config, **options)):
        with pytest.raises(ValueError, match=r"must add up to the 5 rows, got \[2, 1\]"):
            layer(jnp.ones((5, 16)), [2, 1])
    # Sizes that jit does not know are not looked at, and a RowGroups says where its padding is.
    assert_bitwise(jax.jit(own)(jnp.ones((5, 16)), jnp.array([2, 1]))[3:], jnp.zeros((2, 32)))
    groups = RowGroups(sizes=jnp.array([2, 1]), rows=5)
    assert_bitwise(own(jnp.ones((5, 16)), groups)[3:], jnp.zeros((2, 32)))


def test_every_layer_is_one_of_jax_te():
    """So that what jax_te does with its layers, it does with these."""
    for name in te_pytorch.__all__:
        if name[0].isupper():
            assert issubclass(getattr(te_pytorch, name), getattr(layers, name))


KEYWORDS = [
    ("Linear", "__init__", layers.LinearKeywords),
    ("LayerNormLinear", "__init__", layers.LayerNormLinearKeywords),
    ("LayerNormMLP", "__init__", layers.LayerNormMLPKeywords),
    ("DotProductAttention", "__init__", layers.DotProductAttentionKeywords),
    ("DotProductAttention", "__call__", layers.DotProductAttentionCallKeywords),
    ("MultiheadAttention", "__init__", layers.MultiheadAttentionKeywords),
    ("MultiheadAttention", "__call__", layers.AttentionCallKeywords),
    ("TransformerLayer", "__init__", layers.TransformerLayerKeywords),
    ("TransformerLayer", "__call__", layers.TransformerLayerCallKeywords),
]
RENAMED = {"self", "query", "key", "value", "x", "cache"}


@pytest.mark.parametrize(("name", "method", "keywords"), KEYWORDS, ids=lambda value: getattr(value, "__name__", value))
def test_the_types_of_options_are_those_of_the_layers(name: str, method: str, keywords: Any):
    """What an editor completes is what the layer takes, beside the arguments that stand in te_pytorch's signature."""
    taken = inspect.signature(getattr(getattr(layers, name), method)).parameters
    own = set(inspect.signature(getattr(getattr(te_pytorch, name), method)).parameters)
    stated = {key: getattr(each, "__forward_arg__", each) for key, each in keywords.__annotations__.items()}
    assert stated == {key: str(each.annotation) for key, each in taken.items() if key not in own | RENAMED}


def test_norms_of_queries_and_keys_have_options_of_their_own():
    options = {"qk_norm_type": "RMSNorm", "zero_centered_gamma": True, "layernorm_epsilon": 1e-2}
    layer = te_pytorch.TransformerLayer(32, 64, 4, attn_input_format="bshd", **options, rngs=nnx.Rngs(0))
    attention = te_pytorch.MultiheadAttention(32, 4, qkv_format="bshd", qk_norm_eps=0.5, **options, rngs=nnx.Rngs(0))
    for norm, epsilon in ((layer.self_attention.q_norm, 1e-6), (attention.k_norm, 0.5)):
        x = jnp.full((1, 1, 8), 0.25)
        np.testing.assert_allclose(norm(x), x / np.sqrt(0.0625 + epsilon), rtol=1e-6)


def test_what_transformer_engine_places_at_the_last_query_and_key_is_refused():
    core = te_pytorch.DotProductAttention(4, 8, qkv_format="bshd", attention_dropout=0.0, attn_mask_type="no_mask")
    q, kv = draw("q", (1, 2, 4, 8)), draw("kv", (1, 5, 4, 8))
    for given in ({"window_size": (1, 1)}, {"core_attention_bias_type": "alibi"}):
        with pytest.raises(ValueError, match="aligns it to the last"):
            core(q, kv, kv, **given)
    everything = core(kv, kv, kv)
    assert relative_l2(core(kv, kv, kv, attn_mask_type="causal"), everything) > 0.1
    assert_bitwise(core(kv, kv, kv, window_size=(-1, 0)), everything)  # no window, as in Transformer Engine
    decoder = te_pytorch.TransformerLayer(32, 64, 4, attn_input_format="bshd", layer_type="decoder", rngs=nnx.Rngs(0))
    x = jnp.ones((1, 4, 32))
    with pytest.raises(ValueError, match="applies it in cross-attention, too"):
        decoder(x, encoder_output=x, core_attention_bias_type="alibi", dropout_key=jax.random.key(0))


def test_a_pair_of_padding_masks_is_for_queries_and_keys():
    q, k = draw("q", (2, 6, 2, 16)), draw("k", (2, 8, 2, 16))
    of_queries = jnp.zeros((2, 1, 1, 6), bool).at[1, ..., 4:].set(True)
    of_keys = jnp.zeros((2, 1, 1, 8), bool).at[0, ..., 5:].set(True)
    core = te_pytorch.DotProductAttention(2, 16, qkv_format="bshd", attn_mask_type="padding")
    found = core(q, k, k, (of_queries, of_keys))
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k, precision="highest") / 4.0
    weights = jax.nn.softmax(jnp.where(of_keys, -jnp.inf, scores))
    wanted = jnp.einsum("bnqk,bknd->bqnd", weights, k, precision="highest")
    keep = ~of_queries[:, 0, 0]
    assert relative_l2(found[keep], wanted[keep]) < 1e-6  # sums of fp32 products in another order


@pytest.mark.parametrize("window", [(2, 5), (2, -1)])
def test_windows_end_at_the_query_under_causal_masks(window: tuple[int, int]):
    """In a call, in a constructor, and then also under another mask type of the call, as in Transformer Engine."""
    q = draw("q", (2, 8, 2, 16))
    options: Any = {"qkv_format": "bshd"}
    core = te_pytorch.DotProductAttention(2, 16, **options)
    wanted = core(q, q, q, window_size=(2, 0))
    assert_bitwise(core(q, q, q, window_size=window), wanted)
    narrow = te_pytorch.DotProductAttention(2, 16, window_size=window, **options)
    assert_bitwise(narrow(q, q, q), wanted)
    assert_bitwise(narrow(q, q, q, attn_mask_type="no_mask"), wanted)
    attention = te_pytorch.MultiheadAttention(32, 2, window_size=window, **options, rngs=nnx.Rngs(0))
    layer = te_pytorch.TransformerLayer(32, 64, 2, window_size=window, attn_input_format="bshd", rngs=nnx.Rngs(0))
    assert attention.core_attention.window_size == layer.self_attention.core_attention.window_size == (2, 0)


@pytest.mark.parametrize("window", [(2, -7), (2, "x"), [2, 5], 5, (2,), ("a", 1), (2.0, 3)])
def test_wrong_windows_are_refused_as_they_were_given(window: Any):
    with without_type_checker(), pytest.raises((TypeError, ValueError), match=r"window_size") as error:
        te_pytorch.DotProductAttention(2, 16, qkv_format="bshd", window_size=window)
    assert repr(window) in str(error.value)
    core, q = te_pytorch.DotProductAttention(2, 16, qkv_format="bshd"), draw("q", (2, 8, 2, 16))
    with without_type_checker(), pytest.raises((TypeError, ValueError), match=r"window_size"):
        core(q, q, q, window_size=window)


def test_a_pair_of_masks_is_for_padding_types():
    q, mask = draw("q", (2, 8, 2, 16)), jnp.zeros((2, 1, 8, 8), bool)
    core = te_pytorch.DotProductAttention(2, 16, qkv_format="bshd", attn_mask_type="arbitrary")
    with pytest.raises(ValueError, match="give one array"):
        core(q, q, q, (mask, mask))
