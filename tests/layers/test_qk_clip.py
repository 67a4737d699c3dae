"""clip_qk: which weights it scales, and that the logits then keep to the threshold."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.layers import LoRA, MultiheadAttention, clip_qk, quantize_parameters
from jax_te.recipe import Float8CurrentScaling, autocast
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_close, draw, without_type_checker
from tests.support.reference import randomize

H, N, G, D = 32, 4, 2, 8


def with_adapter(layer):
    layer.qkv = LoRA(layer.qkv, 2, rngs=nnx.Rngs(1))
    return layer


def stored_quantized(layer):
    with autocast(Float8CurrentScaling()):
        return quantize_parameters(layer)


def build(**options):
    return randomize(MultiheadAttention(H, N, num_gqa_groups=G, return_max_logit=True, rngs=nnx.Rngs(0), **options))


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
        (build, {"max_logit": None}, "return_max_logit=True"),
        (lambda: MultiheadAttention(H, N, rngs=nnx.Rngs(0)), {}, "return_max_logit=True"),
        (lambda: with_adapter(build()), {}, "takes self-attention with one fused"),
        (lambda: stored_quantized(build()), {}, "stored quantized; clip before quantize_parameters"),
        (build, {"max_logit": jnp.ones(3)}, r"max_logit must be \[n\] = \(4,\), got \(3,\)"),
    ],
)
def test_bad_arguments_say_what_is_allowed(layer, arguments, message):
    with without_type_checker(), pytest.raises(ValueError, match=message):
        clip_qk(layer(), **{"max_logit": jnp.ones(N), **arguments})


def test_kernels_that_were_cached_are_dropped():
    layer, x = build(), draw("x", (2, 8, H))
    with autocast(Float8CurrentScaling()):
        _, logits = layer(x, is_first_microbatch=True)
        clip_qk(layer, logits, threshold=float(logits.min()) / 2)
    assert layer.qkv.kernel_cache is None
