"""What calls return beside their output."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import LatentAttentionOptions, RouterOptions, TransformerConfig
from jax_te.layers import (
    DotProductAttention,
    Linear,
    LoRA,
    MoE,
    MultiheadAttention,
    MultiLatentAttention,
    TransformerLayer,
    init_kv_cache,
)
from jax_te.layers.results import layer_output, split_output
from jax_te.megatron import MLP
from tests.support.numerics import NO_DROPOUT, TOLERANCE, assert_close

H, N, D = 32, 4, 8
X = jnp.ones((2, 8, H))


def test_without_extra_results_the_array_itself() -> None:
    assert layer_output(X) is X
    assert isinstance(MultiheadAttention(H, N, attention_dropout=0.0, rngs=nnx.Rngs(0))(X), jax.Array)


@pytest.mark.costly("options2-True-names2")
@pytest.mark.parametrize(
    ("options", "cached", "names"),
    [
        ({"return_bias": True}, False, ("y", "bias")),
        ({"return_bias": True, "bias": False}, False, ("y", "bias")),  # asked for: None
        ({"return_max_logit": True}, True, ("y", "max_logit", "cache")),
        (
            {"return_layernorm_output": True, "return_bias": True, "return_max_logit": True},
            True,
            ("y", "bias", "layernorm_output", "max_logit", "cache"),
        ),
    ],
)
def test_exactly_those_asked_for_in_order(options: dict[str, Any], cached: bool, names: tuple[str, ...]) -> None:
    cache = init_kv_cache(2, 8, N, D) if cached else None
    result = MultiheadAttention(H, N, attention_dropout=0.0, rngs=nnx.Rngs(0), **options)(X, cache=cache)
    assert result._fields == names


def test_core_and_layer() -> None:
    q = jnp.ones((2, 8, N, D))
    assert DotProductAttention(N, D, return_max_logit=True)(q, q, q).max_logit.shape == (N,)
    layer = TransformerLayer(H, 64, N, **NO_DROPOUT, rngs=nnx.Rngs(0))
    assert int(layer(X, cache=init_kv_cache(2, 8, N, D)).cache.length) == 8


def test_results_of_one_kind_have_one_type() -> None:
    """As carries of a scan must."""
    layer = TransformerLayer(H, 64, N, **NO_DROPOUT, rngs=nnx.Rngs(0))
    start = layer_output(X[:, :1], cache=init_kv_cache(2, 8, N, D))
    last, _ = jax.lax.scan(lambda carry, _: (layer(carry.y, cache=carry.cache), None), start, length=3)
    assert int(last.cache.length) == 3


def test_an_adapted_layer_returns_what_its_base_returns() -> None:
    base = Linear(H, 16, return_bias=True, rngs=nnx.Rngs(0))
    assert LoRA(base, 2, rngs=nnx.Rngs(1))(X)._fields == base(X)._fields == ("y", "bias")


class Block(nnx.Module):
    """A feed-forward block of a user."""

    def __init__(self, function: Callable[[jax.Array], Any]) -> None:
        self.function = function

    def __call__(self, x: jax.Array, is_first_microbatch: bool | None = None) -> Any:
        return self.function(x)


def layer_with(function: Callable[[jax.Array], Any]) -> TransformerLayer:
    layer = TransformerLayer(H, 64, N, **NO_DROPOUT, block_output_layernorm=True, rngs=nnx.Rngs(0))
    layer.layernorm_mlp = Block(function)
    return layer


BIAS = jnp.linspace(-1.0, 1.0, H)


@pytest.mark.parametrize("result", [lambda y: (y, BIAS), lambda y: layer_output(y, bias=BIAS)], ids=["pair", "named"])
def test_a_bias_of_a_block_is_added_before_its_norm(result: Callable[[jax.Array], Any]) -> None:
    expected = layer_with(lambda x: 2.0 * x + BIAS[None, None])(X)
    assert_close(layer_with(lambda x: result(2.0 * x))(X), expected, TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (lambda x: layer_output(x, gates=x), "layernorm_mlp returned gates"),
        (lambda x: layer_output(x, max_logit=x), "layernorm_mlp returned max_logit"),
        (lambda x: (x, x), r"layernorm_mlp returned a bias of shape \(2, 8, 32\)"),
        (lambda x: (x, None, x), "layernorm_mlp returned a tuple of 3 without names"),
    ],
    ids=["name", "of another block", "no bias", "triple"],
)
def test_results_that_a_layer_cannot_use_are_refused(result: Callable[[jax.Array], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        layer_with(result)(X)


class Returning(nnx.Module):
    """A user's own layer in the place of ``inner``, whose result ``function`` changes."""

    def __init__(self, inner: Any, function: Callable[[Any], Any]) -> None:
        self.inner, self.function = inner, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(split_output(self.inner(*args, **kwargs))[0])


MLA = LatentAttentionOptions(q_lora_rank=8, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8)
CONFIG = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=N)
CALLERS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "fused": (lambda: MultiheadAttention(H, N, attention_dropout=0.0, rngs=nnx.Rngs(0)), ("qkv",)),
    "separate": (
        lambda: MultiheadAttention(H, N, attention_dropout=0.0, fuse_qkv_params=False, rngs=nnx.Rngs(0)),
        ("query", "key", "value"),
    ),
    "cross": (
        lambda: MultiheadAttention(H, N, attention_dropout=0.0, attention_type="cross", rngs=nnx.Rngs(0)),
        ("query", "key_value"),
    ),
    "latent": (
        lambda: MultiLatentAttention(H, N, MLA, attention_dropout=0.0, rngs=nnx.Rngs(0)),
        ("q_down", "q_up", "kv_down", "kv_up"),
    ),
    "experts": (
        lambda: MoE(
            H,
            16,
            RouterOptions(num_experts=2),
            bias=False,
            latent_size=16,
            shared_expert_intermediate_size=16,
            rngs=nnx.Rngs(0),
        ),
        ("fc1_latent_proj", "fc2_latent_proj", "shared_experts.linear_fc1", "shared_experts.linear_fc2"),
    ),
    "megatron's MLP": (lambda: MLP(CONFIG, rngs=nnx.Rngs(0)), ("linear_fc1", "linear_fc2")),
}


def result_of(name: str, replaced: str, function: Callable[[Any], Any]) -> Any:
    layer = CALLERS[name][0]()
    *owners, attribute = replaced.split(".")
    owner = functools.reduce(getattr, owners, layer)
    setattr(owner, attribute, Returning(getattr(owner, attribute), function))
    return split_output(layer(X, **({"encoder_output": X} if name == "cross" else {})))[0]


@pytest.mark.costly(
    "latent-q_up",
    slow=(
        "experts-fc1_latent_proj",
        "latent-q_down",
        "experts-fc2_latent_proj",
        "megatron's MLP-linear_fc1",
        "megatron's MLP-linear_fc2",
        "separate-key",
        "cross-key_value",
        "separate-value",
        "cross-query",
        "latent-kv_up",
        "separate-query",
        "experts-shared_experts.linear_fc2",
        "latent-kv_down",
        "experts-shared_experts.linear_fc1",
    ),
)
@pytest.mark.parametrize(("name", "replaced"), [(name, one) for name, (_, each) in CALLERS.items() for one in each])
def test_what_a_replaced_projection_returns_beside_its_output_is_used_or_refused(name: str, replaced: str) -> None:
    def bias_of(y: jax.Array) -> jax.Array:
        return jnp.arange(math.prod(y.shape[2:]), dtype=y.dtype).reshape(y.shape[2:])

    expected = result_of(name, replaced, lambda y: y + bias_of(y)[None, None])
    assert_close(result_of(name, replaced, lambda y: (y, bias_of(y))), expected, TOLERANCE["float32"])
    for lost in (lambda y: layer_output(y, gates=y), lambda y: (y, y)):
        with pytest.raises(ValueError, match=rf"{replaced.split('.')[-1]} returned (gates|a bias of shape)"):
            result_of(name, replaced, lost)
    with pytest.raises(TypeError, match=f"{replaced.split('.')[-1]} returned list in place of an array"):
        result_of(name, replaced, lambda y: [y, None])


def test_a_view_of_flax_is_another_mode():
    model = nnx.List([TransformerLayer(32, 64, 4, hidden_dropout=0.5, rngs=nnx.Rngs(0)), nnx.Dropout(0.5)])
    view, x = nnx.view(model, deterministic=True), jnp.ones((2, 8, 32))
    assert (view[0].training, view[0].self_attention.training, model[0].training) == (False, False, True)
    np.testing.assert_array_equal(view[0](x, dropout_key=jax.random.key(1)), view[0](x))
    with pytest.raises(ValueError, match="Unused keys"):
        nnx.view(model, determinstic=True)
