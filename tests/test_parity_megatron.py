"""Names of Megatron-Core's that no other test holds; docs/parity.md has a row for each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.layers import Linear
from jax_te.megatron import (
    Float16Module,
    MatchContext,
    QuantizationConfig,
    TEColumnParallelLinear,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TELinear,
    TEQuantizationParams,
    TEQuantizationRecipe,
    TransformerEngineConfigType,
    enums,
    float16,
    float16_to_fp32,
    fp32_to_float16,
    split_te_layernorm_column_parallel_linear,
)
from jax_te.sharding import make_mesh
from tests.support.meshes import shard
from tests.support.numerics import assert_bitwise, draw, quick_jit, without_type_checker

H = 32
CONFIG = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=2)


def test_the_key_of_a_payloads_type():
    assert enums._TE_CONFIG_TYPE_KEY == enums.TE_CONFIG_TYPE_KEY == "transformer_engine_config_type"
    kind = TransformerEngineConfigType.TEQuantizationParams.value
    payload: dict[str, Any] = {enums._TE_CONFIG_TYPE_KEY: kind, "training_recipe": {}}
    config = QuantizationConfig(payload, MatchContext("proj"), "bf16")
    assert TEQuantizationParams.parse_from_config(config) == TEQuantizationParams(TEQuantizationRecipe())


def test_dtypes_that_are_narrowed_and_widened():
    """Exactly those of the three lists; integers, bools and FP8 are in none."""
    dtypes = ("float32", "float16", "bfloat16", "int32", "bool", "float8_e4m3fn")
    arrays = [jnp.ones(2, dtype) for dtype in dtypes]
    narrowed = fp32_to_float16(arrays, lambda x: x.astype(jnp.bfloat16))
    widened = float16_to_fp32(arrays)
    assert {d for d, a, b in zip(dtypes, arrays, narrowed, strict=True) if a is not b} == set(float16._FLOAT_TYPES)
    halves = set(float16._HALF_TYPES + float16._BF16_TYPES)
    assert {d for d, a, b in zip(dtypes, arrays, widened, strict=True) if a is not b} == halves
    assert (float16._FLOAT_TYPES, float16._HALF_TYPES, float16._BF16_TYPES) == (
        ("float32",),
        ("float16",),
        ("bfloat16",),
    )


def test_splitting_takes_an_initializer_and_a_group():
    """The initializer makes the new kernel, which the fused layer's then replaces."""
    options: dict[str, Any] = {"gather_output": False, "bias": True, "skip_bias_add": False, "is_expert": False}
    init = CONFIG.init_method
    fused = TELayerNormColumnParallelLinear(H, 64, config=CONFIG, init_method=init, rngs=nnx.Rngs(0), **options)
    asked: list[Any] = []

    def ones(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        asked.append(shape)
        return jnp.ones(shape, dtype)

    norm, linear = split_te_layernorm_column_parallel_linear(fused, CONFIG, ones, tp_group="tensor")
    assert asked == [(H, 64)]
    assert (fused.tensor_parallel.group, linear.tensor_parallel.group) == (None, "tensor")
    assert_bitwise(linear.kernel[...], fused.kernel[...])
    x = draw("x", (2, H))
    assert_bitwise(linear(norm(x))[0], fused(x)[0])
    with without_type_checker(), pytest.raises(TypeError, match=r"tp_group.* None.* 'tensor'"):
        split_te_layernorm_column_parallel_linear(fused, CONFIG, tp_group="data")


def test_the_group_of_an_attention_core():
    core, q = TEDotProductAttention(CONFIG, 1, "causal", "self"), draw("q", (2, 8, 2, H // 2))
    before = core(q, q, q, None)
    for group in ("tensor", None):
        core.set_tensor_parallel_group(group)
        assert_bitwise(core(q, q, q, None), before)
    with without_type_checker(), pytest.raises(TypeError, match=r"tp_group.* None.* 'tensor'"):
        core.set_tensor_parallel_group("data")


def test_num_splits_of_a_call_has_no_effect():
    core, q = TEDotProductAttention(CONFIG, 1, "causal", "self"), draw("q", (2, 8, 2, H // 2))
    assert_bitwise(core(q, q, q, None, num_splits=4), core(q, q, q, None))
    assert core.num_splits is None


def test_what_an_attention_core_describes():
    """Metadata say nothing, offsets are refused."""
    config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=2, softmax_type="learnable")
    core = TEDotProductAttention(config, 1, "causal", "self")
    described = core.sharded_state_dict(metadata={"dp_cp_group": None})
    assert described == core.sharded_state_dict() == {"softmax_offset": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with pytest.raises(ValueError, match=r"sharded_offsets.* \(\(0, 1, 2\),\)"):
        core.sharded_state_dict("", ((0, 1, 2),))


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_attributes_of_a_half_precision_model(kind: str):
    config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=2, **{kind: True})
    model = Float16Module(config, Linear(16, 16, rngs=nnx.Rngs(0)))
    assert model.config is config
    assert (model.fp16, model.bf16) == (kind == "fp16", kind == "bf16")
    assert model.sharded_state_dict("a.", metadata={"any": 1}).keys() == {"a.kernel", "a.bias"}
    with pytest.raises(ValueError, match=r"sharded_offsets"):
        model.sharded_state_dict(sharded_offsets=((0, 1, 2),))


def test_offsets_of_linear_layers_are_refused():
    common: dict[str, Any] = {"config": CONFIG, "init_method": CONFIG.init_method, "bias": True, "skip_bias_add": False}
    common |= {"is_expert": False, "rngs": nnx.Rngs(0)}
    whole = {"parallel_mode": "duplicated", "skip_weight_param_allocation": False}
    for layer in (TELinear(H, H, **whole, **common), TEColumnParallelLinear(H, H, gather_output=False, **common)):
        with pytest.raises(ValueError, match=r"sharded_offsets.* \(\(0, 1, 2\),\)"):
            layer.sharded_state_dict("", ((0, 1, 2),))
        assert layer.sharded_state_dict("a.", (), {"any": 1}).keys() == {"a.weight", "a.bias"}


@pytest.mark.costly("column", slow=("row",))
@pytest.mark.parametrize("mode", ["column", "row", "duplicated"])
def test_an_expert_of_any_parallel_mode_is_whole(mode: str):
    """Two tensor ranks split no kernel of an expert, and have nothing to add up."""
    options: dict[str, Any] = {"bias": True, "skip_bias_add": False, "skip_weight_param_allocation": False}
    options |= {"parallel_mode": mode, "config": CONFIG, "init_method": CONFIG.init_method}
    x = draw("x", (6, H))
    call = quick_jit(lambda layer, x: layer(x)[0])
    expected = call(TELinear(H, 64, is_expert=True, rngs=nnx.Rngs(0), **options), x)
    with jax.set_mesh(make_mesh(ParallelConfig(tensor=2))):
        expert, other = (shard(TELinear(H, 64, is_expert=e, rngs=nnx.Rngs(0), **options)) for e in (True, False))
        assert (expert.tp_size, other.tp_size) == (1, 1 if mode == "duplicated" else 2)
        assert expert.kernel.sharding.is_fully_replicated
        assert other.kernel.sharding.is_fully_replicated == (mode == "duplicated")
        assert_bitwise(call(expert, x), expected)
        assert "all-reduce" not in call.lower(expert, x).compile().as_text()
