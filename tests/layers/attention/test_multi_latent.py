"""Multi-latent attention against NumPy's after Megatron, with a cache of latents, on meshes and under recipes."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te import autocast, value_and_grad
from jax_te.config import LatentAttentionOptions, ParallelConfig
from jax_te.layers import (
    LoRA,
    MultiheadAttention,
    MultiLatentAttention,
    TransformerLayer,
    YarnScaling,
    clip_qk,
    init_kv_cache,
    rotary_embedding,
)
from jax_te.layers.keywords import SelfAttentionOptions
from jax_te.layers.transformer_blocks import NOT_OF_LATENT_ATTENTION
from jax_te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from jax_te.sharding import make_mesh
from tests.support import latent, oracles
from tests.support.meshes import shard

N, S = 4, 8
YARN = {"mscale": 1.0, "mscale_all_dim": 0.7}
KINDS = {
    "two latents": {"q_lora_rank": 16},
    "queries from the input": {"q_lora_rank": None},
    "without norms": {"q_lora_rank": 16, "latent_layernorm": False},
}


def sizes_of(**given: Any) -> LatentAttentionOptions:
    return LatentAttentionOptions(
        **({"kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 16, "v_head_dim": 32} | given)
    )


def build(sizes: LatentAttentionOptions, h: int = 32, n: int = N, **options: Any) -> MultiLatentAttention:
    scaling = YarnScaling(factor=4.0, original_max_position_embeddings=16, **YARN)
    scale = scaling.score_factor * sizes.head_channels**-0.5
    # Large kernels, so that scores are far from equal.
    init = jax.nn.initializers.normal(0.3)
    options = {"attention_dropout": 0.0, "softmax_scale": scale, "init_method": init} | options
    return MultiLatentAttention(h, n, sizes, rngs=nnx.Rngs(1), **options)


def angles(positions: Any, d: int) -> Any:
    scaling = YarnScaling(factor=4.0, original_max_position_embeddings=16, **YARN)
    return rotary_embedding(positions, d, interleaved=True, scaling=scaling)


@jax.jit
def call(layer: Any, x: jax.Array, **options: Any) -> Any:
    return layer(x, **options)


def inputs(h: int = 32) -> jax.Array:
    return jax.random.normal(jax.random.key(3), (8, S, h))


@pytest.mark.costly("queries from the input", slow=("two latents",))
@pytest.mark.parametrize("kind", KINDS)
def test_forward_and_gradients_are_megatrons(kind: str) -> None:
    sizes = LatentAttentionOptions(
        **({"kv_lora_rank": 5, "qk_head_dim": 3, "qk_pos_emb_head_dim": 4, "v_head_dim": 6} | KINDS[kind])
    )
    layer, s = build(sizes, 6, 2), 5
    rng = np.random.default_rng(0)
    x, g = rng.normal(size=(2, s, 6)), rng.normal(size=(2, s, 6))
    _, parameters, rest = nnx.split(layer, nnx.Param, ...)
    flat = nnx.to_flat_state(parameters)
    names = [".".join(map(str, path)) for path in flat.paths]
    arrays = [np.asarray(leaf[...], np.float64) + 0.1 * rng.normal(size=leaf.shape) for leaf in flat.leaves]
    rope = latent.yarn(np.arange(s), 4, 10000.0, 4.0, 16, YARN["mscale"], YARN["mscale_all_dim"])

    def oracle(x: np.ndarray, *arrays: np.ndarray) -> np.ndarray:
        return latent.attention(dict(zip(names, arrays, strict=True)), x, sizes, 2, rope)

    def loss(parameters: Any, x: jax.Array) -> Any:
        y = nnx.merge(nnx.graphdef(layer), nnx.from_flat_state(parameters), rest)(
            x, rotary_pos_emb=angles(jnp.arange(s), 4)
        )
        return jnp.sum(y * g.astype(np.float32)), y

    flat = type(flat).from_sorted_keys_values(
        flat.paths, [leaf.replace(jnp.asarray(a, jnp.float32)) for leaf, a in zip(flat.leaves, arrays, strict=True)]
    )
    x32 = jnp.asarray(x, jnp.float32)
    (dparameters, dx), y = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(flat, x32)
    np.testing.assert_allclose(y, oracle(x, *arrays), rtol=1e-4, atol=1e-5)
    numeric = oracles.numeric_vjp(oracle, (x, *arrays), g)
    for name, actual, expected in zip(["x", *names], [dx, *[v[...] for v in dparameters.leaves]], numeric, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max(), err_msg=name)


@pytest.mark.costly(slow=("without norms", "two latents"))
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_from_latents_is_the_full_forward(kind: str) -> None:
    layer, x = build(sizes_of(**KINDS[kind])), inputs()
    full = call(layer, x, rotary_pos_emb=angles(jnp.arange(S), 16))
    cache, parts = init_kv_cache(8, S, *layer.cached_heads), []
    assert cache.k.shape[-1] + cache.v.shape[-1] == 32
    # A prompt of several tokens, then one at a time.
    for start, stop in ((0, 3), *((i, i + 1) for i in range(3, S))):
        part, cache = call(layer, x[:, start:stop], rotary_pos_emb=angles(jnp.arange(start, stop), 16), cache=cache)
        parts.append(part)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), full, rtol=1e-4, atol=1e-5 * float(jnp.abs(full).max()))


OTHER_RECIPES = [DelayedScaling(), Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()]
RECIPES = [Float8CurrentScaling(), *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in OTHER_RECIPES)]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_quantizes_all_five_gemms(recipe: Any) -> None:
    sizes = LatentAttentionOptions(
        q_lora_rank=128, kv_lora_rank=128, qk_head_dim=64, qk_pos_emb_head_dim=128, v_head_dim=64
    )
    x = jax.random.normal(jax.random.key(3), (2, 64, 128))

    @nnx.jit
    def outputs(layer: Any) -> dict[str, Any]:
        q, kv = layer.q_down(x), layer.kv_down(x)
        up = layer.q_up(q), layer.kv_up(kv[..., :128])
        return dict(zip(("q_down", "kv_down", "q_up", "kv_up"), (q, kv, *up), strict=True)) | {
            "proj": layer.proj(jnp.tile(x, (1, 1, 2)))
        }

    def run(layer: Any, x: jax.Array) -> jax.Array:
        y = layer(x, rotary_pos_emb=angles(jnp.arange(64), 128))
        return jnp.mean(y**2)

    plain_layer = build(sizes, 128)
    plain, value = outputs(plain_layer), nnx.jit(run)(plain_layer, x)
    with autocast(recipe):
        layer = build(sizes, 128)
        quantized = outputs(layer)
        loss, grads = nnx.jit(value_and_grad(run))(layer, x)
    for name, expected in plain.items():
        error = float(jnp.linalg.norm(quantized[name] - expected) / jnp.linalg.norm(expected))
        # FP8 rounds to 2**-4 of a number, FP4 to 2**-2.
        assert 0.0 < error < (0.25 if "nvfp4" in recipe.name else 0.0625), name
    assert abs(float(loss / value) - 1.0) < 0.3
    kernels = [leaf for path, leaf in nnx.to_flat_state(nnx.state(grads, nnx.Param)) if path[-1] == "kernel"]
    assert len(kernels) == 5
    assert all(np.isfinite(kernel[...]).all() and np.any(kernel[...]) for kernel in kernels)


MESHES = [
    ({"fsdp": 2, "tensor": 4}, {}),
    ({"data": 2, "tensor": 4}, {"sequence_parallel": True}),
    ({"context": 2, "tensor": 2, "data": 2}, {"cp_comm_type": "p2p", "sequence_parallel": True}),
    ({"context": 4, "data": 2}, {"cp_comm_type": "all_gather"}),
    ({"context": 2, "data": 4}, {"cp_comm_type": "a2a"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize(("axes", "options"), MESHES, ids=lambda case: "-".join(case) or "plain")
def test_a_mesh_computes_what_one_device_does(axes: dict[str, int], options: dict[str, Any], axis_type: Any) -> None:
    sizes = sizes_of(q_lora_rank=16)

    @nnx.jit
    def run(layer: Any, x: jax.Array) -> Any:
        def loss(layer: Any, x: jax.Array) -> Any:
            return jnp.mean(layer(x, rotary_pos_emb=angles(jnp.arange(S), 16)) ** 2)

        return nnx.value_and_grad(loss, argnums=(0, 1))(layer, x)

    loss, grads = run(build(sizes), inputs())
    with jax.set_mesh(make_mesh(ParallelConfig(**axes), axis_type=axis_type)):
        on_mesh, grads_on_mesh = run(shard(build(sizes, **options)), inputs())
    np.testing.assert_allclose(on_mesh, loss, rtol=1e-5)
    for actual, expected in zip(jax.tree.leaves(grads_on_mesh), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(
            np.asarray(actual), np.asarray(expected), rtol=1e-4, atol=1e-5 * float(jnp.abs(expected).max())
        )


def test_a_cache_of_latents_is_not_split_by_heads() -> None:
    layer = build(sizes_of())
    cache = init_kv_cache(8, S, *layer.cached_heads)
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, tensor=4))), pytest.raises(ValueError, match="tensor axis is 1"):
        layer(inputs(), cache=cache)


def test_a_scale_of_zero_is_one_with_a_cache_too() -> None:
    """Softmax of scores that are all 0: not the scale that None stands for."""
    layer, x = build(sizes_of(), softmax_scale=0.0), inputs()
    rotary = angles(jnp.arange(S), 16)
    y, _ = call(layer, x, rotary_pos_emb=rotary, cache=init_kv_cache(8, S, *layer.cached_heads))
    full = call(layer, x, rotary_pos_emb=rotary)
    np.testing.assert_allclose(y, full, rtol=1e-4, atol=1e-5 * float(jnp.abs(full).max()))


def test_norm_needed_for_its_output() -> None:
    with pytest.raises(ValueError, match="input_layernorm=True"):
        build(sizes_of(), input_layernorm=False, return_layernorm_output=True)


def test_a_layer_takes_no_option_of_other_attention() -> None:
    for option in ({"num_gqa_groups": 2}, {"qk_norm_type": "RMSNorm"}, {"layer_type": "decoder"}):
        with pytest.raises(ValueError, match="latent attention"):
            TransformerLayer(32, 64, N, latent=sizes_of(), **option, rngs=nnx.Rngs(0))


def test_a_layer_gives_latent_attention_the_keywords_that_it_has() -> None:
    had = inspect.signature(MultiLatentAttention.__init__).parameters.keys()
    others = inspect.signature(MultiheadAttention.__init__).parameters
    given = SelfAttentionOptions.__optional_keys__ | SelfAttentionOptions.__required_keys__
    assert given - NOT_OF_LATENT_ATTENTION.keys() <= had
    assert not NOT_OF_LATENT_ATTENTION.keys() & had
    assert {name: others[name].default for name in NOT_OF_LATENT_ATTENTION} == NOT_OF_LATENT_ATTENTION


@pytest.mark.costly("16")
@pytest.mark.parametrize("rank", [16, None])
def test_clipped_logits_meet_the_threshold(rank: int | None) -> None:
    layer, x = build(sizes_of(q_lora_rank=rank), return_max_logit=True), inputs()
    rotary = angles(jnp.arange(S), 16)
    _, before = call(layer, x, rotary_pos_emb=rotary)
    threshold = float(jnp.sort(before)[1])  # two heads exceed it
    _, after = call(clip_qk(layer, before, threshold=threshold, alpha=0.3), x, rotary_pos_emb=rotary)
    np.testing.assert_allclose(after, jnp.minimum(before, threshold), rtol=1e-5)


def test_a_projection_with_an_adapter_is_named() -> None:
    layer = build(sizes_of(), return_max_logit=True)
    layer.kv_up = LoRA(layer.kv_up, 2, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="kernel of kv_up, which has an adapter, LoRA"):
        clip_qk(layer, jnp.full(N, 1e4))
