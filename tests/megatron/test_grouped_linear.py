"""Megatron's linear layers of experts: their layer in other words, and names of checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import ModelParallelConfig
from jax_te.errors import CheckpointMismatchError
from jax_te.layers import GroupedLinear
from jax_te.megatron import (
    RecipeConfig,
    TEColumnParallelGroupedLinear,
    TEGroupedLinear,
    TERowParallelGroupedLinear,
    sharded_state_dict,
)
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from tests.support.numerics import assert_bitwise, draw, without_type_checker

E, K, N, ROWS = 3, 32, 64, 45
SIZES = [20, 0, 25]
INIT = jax.nn.initializers.normal(0.02)


def build(kind=TEColumnParallelGroupedLinear, config=ModelParallelConfig(), **options):  # noqa: B008  # frozen
    given = {"init_method": INIT, "bias": True, "skip_bias_add": False, "is_expert": True, "rngs": nnx.Rngs(0)}
    return kind(E, K, N, config=config, **(given | options))


@pytest.mark.costly("TERowParallelGroupedLinear", slow=("TEColumnParallelGroupedLinear",))
@pytest.mark.parametrize("kind", [TEColumnParallelGroupedLinear, TERowParallelGroupedLinear, TEGroupedLinear])
def test_a_class_is_its_layer_bitwise(kind):
    x = draw("x", (ROWS, K), jnp.bfloat16)
    with autocast(DelayedScaling(amax_history_len=2)):
        layer = build(kind, **({"parallel_mode": None} if kind is TEGroupedLinear else {}))
        plain = GroupedLinear(E, K, N, init_method=INIT, rngs=nnx.Rngs(0))
        y, bias = layer(x, SIZES)
        assert bias is None
        assert_bitwise(y, plain(x, SIZES))
        assert_bitwise(layer(x, jnp.asarray(SIZES), is_first_microbatch=True)[0], y)
    names = {TEColumnParallelGroupedLinear: ("fsdp", "ffn"), TERowParallelGroupedLinear: ("ffn_fsdp", None)}
    assert layer.kernel.get_metadata("logical_axes") == ("expert", *names.get(kind, ("fsdp", None)))
    options = {"parallel_mode": None} if kind is TEGroupedLinear else {}
    whole = build(kind, ModelParallelConfig(expert_tensor_parallel_size=1), **options)
    assert whole.kernel.get_metadata("logical_axes") == ("expert", "fsdp", None)
    layer.backward_dw()
    assert repr(layer) == f"{kind.__name__}(num_gemms=3, in_features=32, out_features=64, bias=True, TP=1)"


def test_biases_that_are_not_added_are_returned():
    x = draw("x", (ROWS, K), jnp.bfloat16)
    y, bias = build(skip_bias_add=True)(x, SIZES)
    assert (y.shape, bias.shape, bias.dtype) == ((ROWS, N), (E, N), x.dtype)
    assert build(bias=False, skip_bias_add=True)(x, SIZES)[1] is None


def test_kernels_that_are_not_of_experts_are_sharded_as_the_mode_says():
    assert build(is_expert=False).kernel.get_metadata("logical_axes") == ("expert", "fsdp", "ffn")
    row = build(TERowParallelGroupedLinear, is_expert=False)
    assert row.kernel.get_metadata("logical_axes") == ("expert", "ffn_fsdp", None)
    config = ModelParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    with pytest.raises(ValueError, match="rows sorted by expert have none; set is_expert=True"):
        build(config=config, is_expert=False)
    assert build(config=config).kernel is not None


def test_names_and_groups_have_no_effect():
    layer = build(tp_comm_buffer_name="fc1", pg_collection=None)
    assert_bitwise(layer.kernel[...], build().kernel[...])
    with without_type_checker(), pytest.raises(TypeError, match="pg_collection"):
        build(pg_collection="groups")


def test_names_and_layouts_of_a_state_dict():
    layer, other = build(), build(rngs=nnx.Rngs(1))
    found = layer.state_dict(prefix="experts.linear_fc1.")
    assert list(found) == [f"experts.linear_fc1.{name}{i}" for name in ("bias", "weight") for i in range(E)]
    for i in range(E):
        assert_bitwise(found[f"experts.linear_fc1.weight{i}"], layer.kernel[...][i].T)
        assert found[f"experts.linear_fc1.bias{i}"].shape == (N,)
    described = sharded_state_dict(layer, "experts.linear_fc1.")
    assert {name: leaf.shape for name, leaf in described.items()} == {name: leaf.shape for name, leaf in found.items()}
    arrays = {name.removeprefix("experts.linear_fc1."): np.asarray(array) for name, array in found.items()}
    assert other.load_state_dict(arrays) == ([], [])
    assert_bitwise(other.kernel[...], layer.kernel[...])


def test_an_expert_that_is_missing_is_named_or_skipped():
    layer, other = build(bias=False), build(bias=False, rngs=nnx.Rngs(1))
    arrays, before = layer.state_dict(), np.asarray(other.kernel[...])
    del arrays["weight1"]
    with pytest.raises(CheckpointMismatchError, match="weight1"):
        other.load_state_dict(arrays)
    assert_bitwise(other.kernel[...], before)
    assert other.load_state_dict(arrays, strict=False).missing_keys == ["weight1"]
    assert_bitwise(other.kernel[...][1], before[1])
    assert_bitwise(other.kernel[...][2], layer.kernel[...][2])


def test_a_gated_kernels_components_lie_one_behind_another():
    kernel = TEColumnParallelGroupedLinear(
        E,
        K,
        (2, N),
        config=ModelParallelConfig(),
        init_method=INIT,
        bias=True,
        skip_bias_add=False,
        is_expert=True,
        rngs=nnx.Rngs(0),
    )
    found = kernel.state_dict()
    assert (found["weight2"].shape, found["bias2"].shape) == ((2 * N, K), (2 * N,))
    assert_bitwise(found["weight2"][N:], kernel.kernel[...][2, :, 1].T)


@pytest.mark.costly
def test_rules_of_a_quantization_file_reach_an_expert_by_its_name():
    recipe = RecipeConfig.from_config_dict(
        {
            "matchers": {
                "experts": {"type": "glob", "pattern": "*.experts.linear_fc1", "enabled": True, "config": "high"}
            },
            "configs": {"high": {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}},
        }
    )
    config = ModelParallelConfig(quant_recipe=recipe)
    x = draw("x", (ROWS, K), jnp.bfloat16)
    plain = build(config=config)(x, SIZES)[0]
    with autocast(Float8CurrentScaling()):
        named = build(config=config, name="decoder.layers.0.mlp.experts.linear_fc1")(x, SIZES)[0]
        other = build(config=config, name="decoder.layers.0.mlp.experts.linear_fc2")(x, SIZES)[0]
    assert_bitwise(named, plain)
    assert (other != plain).any()
