"""cuDNN's attention through TE against plain JAX in fp32 on the same bf16 inputs.

bf16 in and out: the probabilities and the result are rounded to bf16 (2^-9 each), gradients some more often: 0.01 and
0.02 in relative L2.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.errors import BackendUnavailableError
from jax_te.ops import dot_product_attention, explain_backend, segments_from_cu_seqlens
from jax_te.ops.attention.checks import attention_spec
from jax_te.ops.attention.segments import segment_positions
from tests.support.numerics import draw, quick_jit, relative_l2, with_vjp

pytestmark = pytest.mark.gpu

B, S, N, D = 2, 128, 4, 64
LENGTHS = {"q_lengths": jnp.array([128, 70], jnp.int32), "kv_lengths": jnp.array([128, 70], jnp.int32)}


def operands(groups, *, packed=False, dtype=jnp.bfloat16):
    if packed:
        return (draw("qkv", (B, S, 3, N, D), dtype),)
    return tuple(draw(name, (B, S, heads, D), dtype) for name, heads in (("q", N), ("k", groups), ("v", groups)))


def attend(backend, qkv, g, **arguments):
    def run(*qkv):
        return dot_product_attention(qkv, backend=backend, **arguments)

    return quick_jit(lambda qkv, g: with_vjp(run, qkv, g))(qkv, g)


@pytest.mark.parametrize("form", ["packed", "heads", "groups"])
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "padding", "padding_causal"])
def test_te_against_plain_jax(mask_type, form):
    qkv, g = operands(2 if form == "groups" else N, packed=form == "packed"), draw("g", (B, S, N, D), jnp.bfloat16)
    arguments = {"mask_type": mask_type, **(LENGTHS if "padding" in mask_type else {})}
    out, gradients = attend("te", qkv, g, **arguments)
    with jax.default_matmul_precision("highest"):
        wide = tuple(a.astype(jnp.float32) for a in qkv)
        expected, expected_gradients = attend("xla", wide, g.astype(jnp.float32), **arguments)
    assert out.dtype == jnp.bfloat16
    if "padding" in mask_type:
        assert not np.asarray(out[1, 70:]).any(), "queries past their length give zeros"
    assert relative_l2(out, expected) < 0.01
    distances = [relative_l2(*pair) for pair in zip(gradients, expected_gradients, strict=True)]
    assert max(distances) < 0.02, distances


@pytest.mark.parametrize("mask_type", ["padding", "padding_causal"])
def test_an_example_of_no_tokens_gives_zeros(mask_type):
    """For which cuDNN writes nothing: with the memory full of nan, that would show."""
    qkv, g = operands(N), draw("g", (B, S, N, D), jnp.bfloat16)
    lengths = jnp.array([0, 70], jnp.int32)
    dirt = jax.block_until_ready([jnp.full((B, S, N, D), jnp.nan, jnp.bfloat16) for _ in range(64)])
    del dirt
    arguments = {"mask_type": mask_type, "q_lengths": lengths, "kv_lengths": lengths}
    (out, gradients), (expected, wanted) = (attend(backend, qkv, g, **arguments) for backend in ("te", "xla"))
    assert not np.asarray(out[0]).any()
    assert not any(np.asarray(gradient[0]).any() for gradient in gradients)
    assert relative_l2(out, expected) < 0.01
    assert max(relative_l2(*pair) for pair in zip(gradients, wanted, strict=True)) < 0.02


@pytest.mark.parametrize("length", [192, 328])
def test_lengths_that_are_no_multiple_of_128(length):
    qkv = tuple(draw(name, (B, length, N, D), jnp.bfloat16) for name in "qkv")
    g = draw("g", (B, length, N, D), jnp.bfloat16)
    (out, gradients), (expected, wanted) = (attend(backend, qkv, g, mask_type="causal") for backend in ("te", "xla"))
    assert relative_l2(out, expected) < 0.01
    assert max(relative_l2(*pair) for pair in zip(gradients, wanted, strict=True)) < 0.02


def test_short_sequences_are_refused_with_the_reason():
    qkv = tuple(draw(name, (B, 64, N, D), jnp.bfloat16) for name in "qkv")
    with pytest.raises(BackendUnavailableError, match="reads outside its arrays in backward"):
        dot_product_attention(qkv, mask_type="causal", backend="te")
    spec = attention_spec(qkv, "causal", None, 0.0)
    assert explain_backend("dot_product_attention", attention=spec).backend == "xla"


@pytest.mark.parametrize("mask_type", ["no_mask", "causal"])
def test_the_xla_backends_cudnn_path(mask_type):
    qkv, g = operands(2), draw("g", (B, S, N, D), jnp.bfloat16)
    spec = attention_spec(qkv, mask_type, None, 0.0)
    assert explain_backend("dot_product_attention", attention=spec, backend="xla").backend == "xla"
    out, gradients = attend("xla", qkv, g, mask_type=mask_type)
    te_out, te_gradients = attend("te", qkv, g, mask_type=mask_type)
    assert relative_l2(out, te_out) < 0.01
    assert max(relative_l2(*pair) for pair in zip(gradients, te_gradients, strict=True)) < 0.02


def test_scale():
    qkv, g = operands(N), draw("g", (B, S, N, D), jnp.bfloat16)
    out, _ = attend("te", qkv, g, mask_type="causal", scale=0.3)
    expected, _ = attend(
        "xla", tuple(a.astype(jnp.float32) for a in qkv), g.astype(jnp.float32), mask_type="causal", scale=0.3
    )
    assert relative_l2(out, expected) < 0.015


def test_auto_takes_te_and_falls_back_with_the_reason():
    qkv = operands(N)
    assert explain_backend("dot_product_attention", attention=attention_spec(qkv, "causal", None, 0.0)).backend == "te"
    choice = explain_backend("dot_product_attention", attention=attention_spec(qkv, "arbitrary", None, 0.0))
    assert choice.backend == "xla"
    assert "no 'arbitrary' mask" in choice.reason
    wide = tuple(a.astype(jnp.float32) for a in qkv)
    assert (
        "not float32"
        in explain_backend("dot_product_attention", attention=attention_spec(wide, "causal", None, 0.0)).reason
    )


def test_dropout_is_refused():
    qkv = operands(N)
    key = jax.random.key(0)
    with pytest.raises(BackendUnavailableError, match="whatever the key"):
        dot_product_attention(qkv, mask_type="no_mask", dropout_rate=0.25, dropout_key=key, backend="te")
    one, two = (dot_product_attention(qkv, mask_type="no_mask", dropout_rate=0.25, dropout_key=key) for _ in range(2))
    assert (one == two).all()


SINK = draw("offset", (N,))
BIAS = draw("bias", (1, N, S, S), jnp.bfloat16)
OPTIONS = {
    "bottom right": {"mask_type": "causal_bottom_right"},
    "padding, bottom right": {"mask_type": "padding_causal_bottom_right", **LENGTHS},
    "window": {"mask_type": "causal", "window": (32, 0)},
    "window on both sides": {"mask_type": "no_mask", "window": (32, 16)},
    "window, padding": {"mask_type": "padding_causal", "window": (32, 0), **LENGTHS},
    "bias": {"mask_type": "causal", "bias_type": "post_scale_bias", "bias": BIAS},
    "bias, no mask": {"mask_type": "no_mask", "bias_type": "post_scale_bias", "bias": BIAS},
    "off by one": {"mask_type": "causal", "softmax_type": "off-by-one"},
    "learnable": {"mask_type": "causal", "softmax_type": "learnable", "softmax_offset": SINK},
    "learnable, padding": {
        "mask_type": "padding_causal",
        "softmax_type": "learnable",
        "softmax_offset": SINK,
        **LENGTHS,
    },
}
LEARNED = ("bias", "softmax_offset")


@pytest.mark.parametrize("case", list(OPTIONS))
def test_options_of_te_against_plain_jax(case):
    """Where cuDNN has a kernel; where it has none, the reason is said and auto takes XLA."""
    arguments = OPTIONS[case]
    qkv, g = operands(2), draw("g", (B, S, N, D), jnp.bfloat16)
    learned = tuple(name for name in LEARNED if name in arguments)
    rest = {name: value for name, value in arguments.items() if name not in learned}
    spec = attention_spec(
        qkv,
        arguments["mask_type"],
        window=arguments.get("window"),
        bias_type=arguments.get("bias_type", "no_bias"),
        bias_shape=BIAS.shape if "bias" in arguments else None,
        softmax_type=arguments.get("softmax_type", "vanilla"),
    )
    choice = explain_backend("dot_product_attention", attention=spec)
    print(f"{case}: {choice}")
    if choice.backend == "xla":
        assert choice.reason.startswith("TE cannot: ")
        assert len(choice.reason) > len("TE cannot: ")
        with pytest.raises(BackendUnavailableError):
            dot_product_attention(qkv, **arguments, backend="te")
        return

    def run(backend, operands, g):
        def fn(*operands):
            return dot_product_attention(
                operands[:3], **rest, **dict(zip(learned, operands[3:], strict=True)), backend=backend
            )

        return quick_jit(lambda operands, g: with_vjp(fn, operands, g))(operands, g)

    everything = (*qkv, *(arguments[name] for name in learned))
    out, gradients = run("te", everything, g)
    with jax.default_matmul_precision("highest"):
        wide = tuple(a.astype(jnp.float32) for a in everything)
        expected, wanted = run("xla", wide, g.astype(jnp.float32))
    assert relative_l2(out, expected) < 0.01
    distances = [relative_l2(*pair) for pair in zip(gradients, wanted, strict=True)]
    assert max(distances) < 0.03, distances


@pytest.mark.parametrize("mask_type", ["padding", "padding_causal"])
def test_packed_sequences_of_te_against_plain_jax(mask_type):
    segments = segments_from_cu_seqlens(
        jnp.array([[0, 60, 100, 128], [0, 30, 90, 90]]), None, jnp.array([[0, 60, 100, 128], [0, 40, 128, 128]])
    )
    qkv, g = operands(2), draw("g", (B, S, N, D), jnp.bfloat16)
    out, gradients = attend("te", qkv, g, mask_type=mask_type, segments=segments)
    inside = segment_positions(segments.q_offsets, segments.q_lengths, S).segment[:, :, None, None] > 0
    with jax.default_matmul_precision("highest"):
        wide = tuple(a.astype(jnp.float32) for a in qkv)
        expected, wanted = attend("xla", wide, g.astype(jnp.float32), mask_type=mask_type, segments=segments)
    assert relative_l2(jnp.where(inside, out, 0), expected) < 0.01
    for got, e in zip(gradients, wanted, strict=True):
        assert relative_l2(jnp.where(inside, got, 0), e) < 0.02


def test_largest_logits_of_te():
    """Where cuDNN can give them beside what backward needs; else auto takes XLA's and says why."""
    qkv = operands(2)
    choice = explain_backend("dot_product_attention", attention=attention_spec(qkv, "causal", return_max_logit=True))
    if choice.backend == "xla":
        assert re.match(r"TE cannot: \S+", choice.reason), choice.reason
        with pytest.raises(BackendUnavailableError):
            dot_product_attention(qkv, return_max_logit=True, backend="te")
    out, logits = dot_product_attention(qkv, return_max_logit=True)
    with jax.default_matmul_precision("highest"):
        wide = tuple(a.astype(jnp.float32) for a in qkv)
        expected_out, expected = dot_product_attention(wide, return_max_logit=True, backend="xla")
    np.testing.assert_allclose(logits, expected, rtol=1e-2)
    assert relative_l2(out, expected_out) < 0.01


def test_value_heads_of_another_size():
    q, k = (draw(name, (B, S, heads, 64), jnp.bfloat16) for name, heads in (("q", N), ("k", 2)))
    v, g = draw("v", (B, S, 2, 128), jnp.bfloat16), draw("g", (B, S, N, 128), jnp.bfloat16)
    choice = explain_backend("dot_product_attention", attention=attention_spec((q, k, v), "causal"))
    print(choice)
    out, _ = attend(choice.backend, (q, k, v), g, mask_type="causal")
    with jax.default_matmul_precision("highest"):
        wide = tuple(a.astype(jnp.float32) for a in (q, k, v))
        expected, _ = attend("xla", wide, g.astype(jnp.float32), mask_type="causal")
    assert relative_l2(out, expected) < 0.01
