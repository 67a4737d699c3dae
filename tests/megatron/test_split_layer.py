"""A fused layer taken apart computes the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.layers import LayerNorm, RMSNorm
from jax_te.megatron import (
    MatchContext,
    QuantizationConfig,
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    split_te_layernorm_column_parallel_linear,
    state_dict,
)
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast, recipe_from_name
from tests.support.numerics import assert_bitwise, draw
from tests.support.reference import randomize

H = 32


def config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=2, **fields)


def fused(config: TransformerConfig, **options: Any) -> Any:
    given = {"gather_output": False, "bias": True, "skip_bias_add": False, "is_expert": False, **options}
    return randomize(
        TELayerNormColumnParallelLinear(H, 64, config=config, init_method=config.init_method, rngs=nnx.Rngs(0), **given)
    )


@pytest.mark.costly("LayerNorm-current", "RMSNorm-block", slow=("RMSNorm-delayed",))
@pytest.mark.wide
@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "block"])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_the_parts_compute_what_the_whole_did(normalization: Any, recipe: str):
    fields = {"normalization": normalization, "layernorm_epsilon": 1e-3, "layernorm_zero_centered_gamma": True}
    bias = normalization == "LayerNorm"
    x = draw("x", (2, 8, H), jnp.bfloat16)
    with autocast(recipe_from_name(recipe)):
        whole = fused(config(**fields), bias=bias, skip_bias_add=bias)
        norm, linear = split_te_layernorm_column_parallel_linear(whole, config(**fields))
        assert isinstance(norm, LayerNorm if bias else RMSNorm)
        assert type(linear) is TEColumnParallelLinear
        expected, returned = jax.jit(lambda whole, x: whole(x))(whole, x)
        y, same = jax.jit(lambda norm, linear, x: linear(norm(x)))(norm, linear, x)
    assert_bitwise(y, expected)
    assert (same is None) == (returned is None) == (not bias)
    if bias:
        assert_bitwise(same, returned)


def test_what_goes_with_the_arrays():
    """Delayed scaling's state, the layer's own precision, dtypes and flags; Megatron loses the precision."""
    with autocast(DelayedScaling(amax_history_len=4)):
        whole = fused(config(params_dtype="bfloat16"), tp_comm_buffer_name="qkv", tp_group="tensor")
    nnx.update(whole, jax.tree.map(lambda a: a + 3.0, nnx.state(whole, QuantizerState)))
    payload = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    whole.finish_init(QuantizationConfig(payload, MatchContext("fc1"), "bf16"))
    whole.eval()
    with autocast(DelayedScaling()):
        _, linear = split_te_layernorm_column_parallel_linear(whole, config())
    assert linear.module_recipe == whole.module_recipe
    assert (linear.tp_comm_buffer_name, linear.deterministic) == ("qkv", True)
    assert linear.tensor_parallel == whole.tensor_parallel
    wanted = {name: a for name, a in state_dict(whole).items() if name not in ("layer_norm_weight", "layer_norm_bias")}
    assert state_dict(linear).keys() == wanted.keys()
    for name, array in wanted.items():
        assert_bitwise(state_dict(linear)[name], array, what=name)


def test_kept_kernels_go_along():
    with autocast(Float8CurrentScaling()):
        whole = fused(config())
        whole(draw("x", (16, H)), is_first_microbatch=True)
        whole.is_first_microbatch = False
        norm, linear = split_te_layernorm_column_parallel_linear(whole, config())
        x = draw("other", (16, H))
        assert_bitwise(linear(norm(x))[0], whole(x)[0])


def test_the_parts_have_arrays_of_their_own():
    whole = fused(config())
    norm, linear = split_te_layernorm_column_parallel_linear(whole, config())
    for array in state_dict(whole).values():
        array.delete()  # as donation would
    linear(norm(draw("x", (2, H))))


def test_the_norm_must_be_the_one_described():
    with pytest.raises(ValueError, match=r"NormSpec\(kind='rmsnorm'.*NormSpec\(kind='layernorm'"):
        split_te_layernorm_column_parallel_linear(fused(config()), config(normalization="RMSNorm"))
