"""te.pytorch's padding of groups of rows, and layers without tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te import linen
from jax_te.config import TransformerConfig
from jax_te.layers import DotProductAttention, Fp8Padding, Fp8Unpadding, Linear, LoRA
from jax_te.models import GPTModel
from jax_te.recipe import Float8CurrentScaling, MXFP8BlockScaling, autocast
from jax_te.training import deferred_vjp
from tests.support.numerics import assert_bitwise, draw, quick_jit


def test_groups_are_padded_by_zeros_each_and_come_back():
    x = draw("x", (25, 8))
    with autocast(MXFP8BlockScaling()):
        padded, sizes = Fp8Padding(3)(x, [5, 0, 20])
        assert sizes == [32, 0, 32]
        np.testing.assert_array_equal(padded[:5], x[:5])
        np.testing.assert_array_equal(padded[32:52], x[5:])
        assert not np.any(padded[5:32])
        assert not np.any(padded[52:])
        np.testing.assert_array_equal(Fp8Unpadding(3)(padded, [5, 0, 20]), x)
    assert Fp8Padding(1)(x, [25])[1] == [32]
    assert Fp8Padding(1, 24)(x, [25])[1] == [48]
    assert Fp8Padding(2, 5)(x, [5, 20])[0] is not None
    assert Fp8Unpadding(2, 5)(x, [5, 20]).shape == (25, 8)


def test_groups_that_are_not_those_of_the_rows():
    with pytest.raises(ValueError, match=r"m_splits must be 3 sizes of groups \(num_gemms\), got \[5, 20\]"):
        Fp8Padding(3)(jnp.ones((25, 8)), [5, 20])
    with pytest.raises(ValueError, match=r"m_splits \[5, 21\] make 26 rows, and the input has 25"):
        Fp8Padding(2)(jnp.ones((25, 8)), [5, 21])
    with pytest.raises(ValueError, match=r"m_splits \[16, 32\] make 48 rows, and the input has 25"):
        Fp8Unpadding(2)(jnp.ones((25, 8)), [5, 20])
    with pytest.raises(ValueError, match="align_size"):
        Fp8Padding(2, 0)


@pytest.mark.parametrize(("b", "sq", "skv"), [(0, 4, 4), (2, 0, 0), (2, 3, 0)])
def test_attention_over_nothing_is_zero(b, sq, skv):
    core = DotProductAttention(2, 8, attn_mask_type="no_mask")
    q, k = jnp.ones((b, sq, 2, 8)), jnp.ones((b, skv, 2, 8))
    out = core(q, k, k)
    assert out.shape == (b, sq, 16) or out.shape == (b, sq, 2, 8)
    assert not np.any(out)


@pytest.mark.slow
def test_an_empty_batch_passes_a_model():
    config = TransformerConfig(num_layers=1, hidden_size=32, ffn_hidden_size=64, num_attention_heads=2)
    with autocast(Float8CurrentScaling()):
        model = GPTModel(config, vocab_size=64, max_sequence_length=16, rngs=nnx.Rngs(0))
        graph, state = nnx.split(model)
        tokens = jnp.zeros((0, 8), jnp.int32)
        run = quick_jit(jax.value_and_grad(lambda state: nnx.merge(graph, state).loss(tokens, tokens)))
        loss, gradient = run(state)
        assert jax.eval_shape(lambda state: nnx.merge(graph, state)(tokens), state).shape == (0, 8, 64)
    assert float(loss) == 0.0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))


@pytest.mark.costly("deferred", "linen")
@pytest.mark.parametrize("way", ["linen", "lora", "deferred"])
def test_tokens_are_padded_whichever_way_a_layer_is_called(way):
    """Twelve tokens give what they give with four rows of zeros behind them, which change no scale."""
    x, g = draw("x", (12, 32)), draw("g", (12, 16))
    base = Linear(32, 16, bias=False, rngs=nnx.Rngs(0))
    if way == "linen":
        module = linen.Linear(32, 16, bias=False)
        variables = {"params": {"kernel": base.kernel[...]}}
    else:
        layer = LoRA(base, 16, rngs=nnx.Rngs(1)) if way == "lora" else base
        if way == "lora":
            layer.lora_b.set_value(draw("b", layer.lora_b.shape))
        graphdef, state = nnx.split(layer)

    def run(x, g):
        if way == "deferred":
            y, backward = deferred_vjp(lambda m, x: m(x), nnx.merge(graphdef, state), x)
            first = backward(g)
            return y, first.inputs[0], jax.tree.leaves(first.backward_dw())
        if way == "linen":
            y, vjp = jax.vjp(lambda v, x: module.apply(v, x), variables, x)
        else:
            y, vjp = jax.vjp(lambda s, x: nnx.merge(graphdef, s)(x), state, x)
        of_variables, dx = vjp(g)
        return y, dx, jax.tree.leaves(of_variables)

    with autocast(Float8CurrentScaling()):
        y, dx, gradients = quick_jit(run)(x, g)
        padded, dpadded, expected = quick_jit(run)(*(jnp.pad(a, ((0, 4), (0, 0))) for a in (x, g)))
    assert_bitwise(y, padded[:12])
    assert_bitwise(dx, dpadded[:12])
    assert gradients
    for one, other in zip(gradients, expected, strict=True):
        assert_bitwise(one, other)
