"""Every layer on the GPU: TE's kernels against XLA, forward, gradients and next states. Tolerances as in test_ops.py.

A whole TransformerLayer chains four linear layers; its residual connections carry most of the output, so that errors
are smaller in ``y`` than in single layers and add up in gradients.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.layers import (
    DotProductAttention,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    TransformerLayer,
    rotary_embedding,
)
from jax_te.ops import use_backend
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, autocast
from jax_te.training import split_model
from tests.support.numerics import draw, quick_jit, relative_l2, with_vjp
from tests.support.overflow import OVERFLOW_CASES, check_overflow_is_seen

pytestmark = pytest.mark.gpu

B, S, H, F, N = 2, 128, 128, 256, 2
RECIPES = {
    "none": None,
    "current": Float8CurrentScaling(),
    "delayed": DelayedScaling(amax_history_len=3),
    "block": Float8BlockScaling(),
}
LLAMA = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False}


class Decoder(nnx.Module):
    """A decoder layer that attends to a part of its own input."""

    def __init__(self, rngs: nnx.Rngs):
        self.layer = TransformerLayer(H, F, N, layer_type="decoder", **OFF, rngs=rngs)

    def __call__(self, x):
        return self.layer(x, encoder_output=jnp.sin(x))


class Rotated(nnx.Module):
    """Qwen 3's form: norms of queries and keys, then positions."""

    def __init__(self, rngs: nnx.Rngs):
        options = {"num_gqa_groups": 1, "qk_norm_type": "RMSNorm", "qk_norm_before_rope": True}
        self.layer = TransformerLayer(H, F, N, **options, **OFF, **LLAMA, rngs=rngs)

    def __call__(self, x):
        return self.layer(x, rotary_pos_emb=rotary_embedding(jnp.arange(S), H // N))


OFF = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
MAKE = {
    "Linear": lambda rngs: Linear(H, F, rngs=rngs),
    "LayerNorm": lambda rngs: LayerNorm(H, rngs=rngs),
    "RMSNorm": lambda rngs: RMSNorm(H, rngs=rngs),
    "LayerNormLinear": lambda rngs: LayerNormLinear(H, (3, H), rngs=rngs),
    "LayerNormMLP": lambda rngs: LayerNormMLP(H, F, rngs=rngs),
    "LayerNormMLP, Llama": lambda rngs: LayerNormMLP(H, F, **LLAMA, rngs=rngs),
    "LayerNormMLP, no bias": lambda rngs: LayerNormMLP(H, F, activation="srelu", bias=False, rngs=rngs),
    "MultiheadAttention": lambda rngs: MultiheadAttention(H, N, attention_dropout=0.0, rngs=rngs),
    "TransformerLayer": lambda rngs: TransformerLayer(H, F, N, **OFF, rngs=rngs),
    "TransformerLayer, Llama": lambda rngs: TransformerLayer(H, F, N, num_gqa_groups=1, **OFF, **LLAMA, rngs=rngs),
    "decoder": Decoder,
    "TransformerLayer, Qwen": Rotated,
    "separate kernels": lambda rngs: TransformerLayer(H, F, N, fuse_qkv_params=False, **OFF, rngs=rngs),
}
CALLS = [(name, "none", "bfloat16") for name in MAKE]
MLPS = ("LayerNormMLP", "LayerNormMLP, Llama", "LayerNormMLP, no bias")
CALLS += [(name, "delayed", "bfloat16") for name in ("Linear", "LayerNormLinear", *MLPS)]
CALLS += [
    (name, recipe, "bfloat16")
    for name in ("TransformerLayer", "TransformerLayer, Llama")
    for recipe in ("current", "delayed")
]
CALLS += [("MultiheadAttention", "current", "bfloat16"), ("LayerNormMLP", "none", "float32")]
CALLS += [
    (name, recipe, "bfloat16") for name in ("decoder", "TransformerLayer, Qwen") for recipe in ("current", "delayed")
]
CALLS += [
    (name, "block", "bfloat16") for name in ("Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer", "decoder")
]


@pytest.mark.parametrize(("name", "recipe", "dtype"), CALLS)
def test_te_against_xla(name, recipe, dtype):
    compare(name, recipe, dtype, (B, S, H))


# No FP8 GEMM takes 12 or 140 rows, and CUDA launches no kernel over none.
AWKWARD = [(name, n) for name in ("Linear", "LayerNorm", "LayerNormLinear", *MLPS[:2]) for n in (12, 0)]
AWKWARD += [("TransformerLayer", n) for n in (140, 0)]  # TE's attention is refused for fewer than 128 positions


@pytest.mark.parametrize(("name", "tokens"), AWKWARD)
@pytest.mark.parametrize("recipe", RECIPES)
def test_awkward_numbers_of_tokens(name, recipe, tokens):
    compare(name, recipe, "bfloat16", (1, tokens, H))


def compare(name, recipe, dtype, shape):
    te, states = measured("te", name, recipe, dtype, shape)
    xla, expected_states = measured("xla", name, recipe, dtype, shape)
    distances = apart(te, xla)
    if recipe == "none":
        assert max(distances.values()) < 0.02, distances
        return
    # Both are as far from the layer without a recipe as FP8 makes them. Their errors differ where one rounds a value to
    # bf16 before FP8 and the other does not, or by the order of sums; were they independent, the backends would be
    # apart by the hypotenuse of both.
    exact, _ = measured("xla", name, "none", dtype, shape)
    off, expected_off = apart(te, exact), apart(xla, exact)
    for path, distance in distances.items():
        said = f"{path}: te {off[path]:.3f} and xla {expected_off[path]:.3f} from exact, {distance:.3f} apart"
        assert off[path] < 1.125 * expected_off[path] + 0.02, said
        assert distance < max(0.12, np.hypot(off[path], expected_off[path])), said
    for actual, expected in zip(jax.tree.leaves(states), jax.tree.leaves(expected_states), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0.15)


def measured(backend, name, recipe, dtype, shape):
    """Return the output and the gradients by their paths, and the quantizers' next states."""
    with autocast(RECIPES[recipe]), use_backend(backend):
        # Weights of unit gain: with the default 0.023 the blocks' outputs would vanish beside the residual.
        model = MAKE[name](nnx.Rngs(0))
        graphdef, params, quantizers, rest = split_model(model)
        params = jax.tree.map(lambda p: p * 4.0 if p.ndim > 1 else p + 0.1, params)
        x = draw("x", shape, dtype, shift=0.2)

        def run(params, quantizers, x):
            return nnx.merge(graphdef, params, quantizers, rest)(x)

        g = draw("g", jax.eval_shape(run, params, quantizers, x).shape, dtype, scale=0.1)
        y, (dparams, states, dx) = quick_jit(lambda *a: with_vjp(run, *a))((params, quantizers, x), g)
    assert y.dtype == jnp.dtype(dtype)
    gradients = {path: jax.tree.leaves(value)[0] for path, value in nnx.to_flat_state(dparams)}
    assert all(gradient.dtype == jnp.float32 for gradient in gradients.values())
    return {("y",): y, ("x",): dx} | gradients, states


def apart(actual, expected):
    """Return relative distances by path."""
    assert actual.keys() == expected.keys()
    distances = {}
    for path, value in expected.items():
        distances[path] = relative_l2(actual[path], value)
        if path[-2:] == ("key", "bias"):
            # It moves all logits of a query alike, which softmax does not see: its gradient is 0 but for rounding.
            query = expected[(*path[:-2], "query", "bias")]
            distances[path] = float(jnp.linalg.norm(actual[path] - value) / jnp.linalg.norm(query))
    return distances


@pytest.mark.parametrize("groups", [N, 1])
def test_dot_product_attention(groups):
    layer = DotProductAttention(N, 64, num_gqa_groups=groups, attn_mask_type="causal")
    q, k, v = (draw(name, (B, S, heads, 64), jnp.bfloat16) for name, heads in (("q", N), ("k", groups), ("v", groups)))
    g = draw("g", (B, S, N, 64), jnp.bfloat16)
    results = []
    for backend in ("te", "xla"):
        with use_backend(backend):
            results.append(quick_jit(lambda *a: with_vjp(layer, *a))((q, k, v), g))
    for actual, expected in zip(*map(jax.tree.leaves, results), strict=True):
        assert relative_l2(actual, expected) < 0.02


def test_core_attention_recomputed():
    layer = TransformerLayer(H, F, N, **OFF, rngs=nnx.Rngs(0))
    graphdef, params, quantizers, rest = split_model(layer)
    x, g = draw("x", (B, S, H), jnp.bfloat16), draw("g", (B, S, H), jnp.bfloat16)
    results = []
    with use_backend("te"):
        for again in (False, True):

            def run(params, x, again=again):
                return nnx.merge(graphdef, params, quantizers, rest)(x, checkpoint_core_attention=again)

            results.append(quick_jit(lambda *a, run=run: with_vjp(run, *a))((params, x), g))
    for actual, expected in zip(*map(jax.tree.leaves, results), strict=True):
        assert relative_l2(actual, expected) < 0.01


# MXFP8 and NVFP4 need a newer GPU than Hopper.
@pytest.mark.parametrize(("layer", "overflow", "recipe"), [case for case in OVERFLOW_CASES if "fp" not in case[2]])
def test_an_overflow_of_fp16_is_seen(layer, overflow, recipe):
    with use_backend("te"):
        check_overflow_is_seen(layer, overflow, recipe)
