"""What Megatron's linear layers refuse, with the exceptions that Megatron has for it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.config import ModelParallelConfig, ParallelConfig, TransformerConfig
from jax_te.megatron import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TELinear,
    TENorm,
    TERowParallelLinear,
    condition_init_method,
)
from jax_te.models import GPTModel
from jax_te.sharding import make_mesh
from tests.support.numerics import draw, without_type_checker

CONFIG = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2)
COMMON: dict[str, Any] = {"config": CONFIG, "init_method": CONFIG.init_method, "bias": True, "skip_bias_add": False}


def linear(k: int = 32, n: int = 64, **options: Any) -> TELinear:
    given = {"parallel_mode": "duplicated", "skip_weight_param_allocation": False, **COMMON, **options}
    return TELinear(k, n, rngs=nnx.Rngs(0), **given)


def column(k: int = 32, n: int = 64, **options: Any) -> TEColumnParallelLinear:
    given = {"gather_output": False, "is_expert": False, **COMMON, **options}
    return TEColumnParallelLinear(k, n, rngs=nnx.Rngs(0), **given)


def row(k: int = 32, n: int = 64, **options: Any) -> TERowParallelLinear:
    given = {"input_is_parallel": True, "is_expert": False, **COMMON, **options}
    return TERowParallelLinear(k, n, rngs=nnx.Rngs(0), **given)


def fused(k: int = 32, n: int = 64, **options: Any) -> TELayerNormColumnParallelLinear:
    given = {"gather_output": False, "is_expert": False, **COMMON, **options}
    return TELayerNormColumnParallelLinear(k, n, rngs=nnx.Rngs(0), **given)


EVERY = [linear, column, row, fused]


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: column(gather_output=True), ValueError, "gather_output=True"),
        (lambda: fused(gather_output=True, is_expert=True), ValueError, "gather_output=True"),
        (
            lambda: fused(is_expert=True, skip_weight_param_allocation=True),
            ValueError,
            "is_expert=True.* TENorm.* TEColumnParallelLinear",
        ),
        (lambda: fused(skip_weight_param_allocation=True), ValueError, "skip_weight_param_allocation=True"),
        (lambda: column(skip_weight_param_allocation=True), ValueError, "skip_weight_param_allocation=True"),
        (
            lambda: linear(skip_weight_param_allocation=True),
            ValueError,
            r"skip_weight_param_allocation=True.* jax_te\.layers\.Linear",
        ),
        (lambda: row(input_is_parallel=False), ValueError, "input_is_parallel=False"),
        (
            lambda: linear(tp_group="tensor"),
            AssertionError,
            "duplicated.* tp_group.* None.* 'tensor'",
        ),
        (lambda: linear(parallel_mode="diagonal"), ValueError, "parallel_mode.* None, 'duplicated', 'c"),
        (lambda: linear(symmetric_ar_type="ring"), AssertionError, "symmetric_ar_type.* 'ring'"),
        *((lambda build=build: build(tp_group=object()), TypeError, "tp_group.* 'tensor'") for build in (column, row)),
        (lambda: linear(0), ValueError, "in_features.* 0"),
        (lambda: fused(n=-1), ValueError, r"out_features\[0\].* -1"),
        (
            lambda: TENorm(SimpleNamespace(normalization="L2Norm"), 32),
            Exception,
            "LayerNorm.* RMSNorm.* config.normalization.* 'L2Norm'",
        ),
        (lambda: TENorm(CONFIG, 0), ValueError, "hidden_size.* 0"),
    ],
)
def test_what_is_refused(build: Any, error: type[Exception], message: str):
    with without_type_checker(), pytest.raises(error, match=message) as caught:
        build()
    assert type(caught.value) is error


@pytest.mark.parametrize("build", EVERY)
def test_names_of_user_buffers(build: Any):
    """Megatron warns of a name that it does not know, and passes several of its own."""
    for name in ("qkv", "q_up_proj", "mtp_eh_proj", None):
        assert build(tp_comm_buffer_name=name).tp_comm_buffer_name == name


@pytest.mark.parametrize("build", EVERY)
def test_todays_arguments_have_their_defaults(build: Any):
    if "pg_collection" not in inspect.signature(type(build())).parameters:
        return
    build(pg_collection=None)
    with without_type_checker(), pytest.raises(TypeError, match=r"pg_collection must be None.* jax.set_mesh"):
        build(pg_collection="tp")
    if "stride" in inspect.signature(type(build())).parameters:
        build(stride=1)
        with pytest.raises(ValueError, match="stride must be 1, got 2"):
            build(stride=2)


@pytest.mark.parametrize("build", EVERY)
def test_initializers_are_functions(build: Any):
    with without_type_checker(), pytest.raises(TypeError, match=r"init_method.* None"):
        build(init_method=None)
    with without_type_checker(), pytest.raises(TypeError, match=r"init_method.* 0\.02"):
        condition_init_method(CONFIG, 0.02)  # type: ignore[arg-type]


def test_sizes_that_the_tensor_ranks_do_not_divide():
    """By the configuration without a mesh, by the mesh with one; the tensor axis shards no expert."""
    three = ModelParallelConfig(tensor_model_parallel_size=3)
    for build, size in ((column, 64), (row, 32)):
        with pytest.raises(AssertionError, match=f"{size} .*put features.* 3"):
            build(config=three)
        assert build(config=three, is_expert=True).tp_size == 1
    linear(config=three)
    with jax.set_mesh(make_mesh(ParallelConfig(tensor=8))):
        assert (column().tp_size, column(is_expert=True).tp_size) == (8, 1)
        with pytest.raises(AssertionError, match=r"60 output features.* 8"):
            fused(n=60)


def test_the_meshs_context_axis_has_the_configured_size():
    two = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, context_parallel_size=2)
    x, built_without = draw("x", (2, 8, 32)), column(config=two)
    jax.eval_shape(built_without, x)  # without a mesh one device has the whole sequence
    message = "context_parallel_size.* 2.* {} context"
    with jax.set_mesh(make_mesh(ParallelConfig(context=4))):
        for build in (column, row, fused):
            with pytest.raises(ValueError, match=message.format(4)):
                build(config=two)
        with pytest.raises(ValueError, match=message.format(4)):
            jax.eval_shape(built_without, x)
        with pytest.raises(ValueError, match=message.format(4)):
            GPTModel(two, vocab_size=8, max_sequence_length=8, rngs=nnx.Rngs(0))
        jax.eval_shape(column(), x)
    with jax.set_mesh(make_mesh(ParallelConfig(context=2))):
        jax.eval_shape(built_without, x)
        model = nnx.eval_shape(lambda: GPTModel(two, vocab_size=8, max_sequence_length=8, rngs=nnx.Rngs(0)))
    with jax.set_mesh(make_mesh(ParallelConfig(data=2))), pytest.raises(ValueError, match=message.format(1)):
        jax.eval_shape(model, jnp.zeros((2, 8), jnp.int32))


def test_the_mesh_has_the_configured_size():
    two = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, tensor_model_parallel_size=2, sequence_parallel=True
    )
    built_without = column(config=two)
    with jax.set_mesh(make_mesh(ParallelConfig(tensor=4))):
        for build in (column, row, fused):
            with pytest.raises(ValueError, match=r"tensor_model_parallel_size.* 2.* 4 tensor"):
                build(config=two)
        with pytest.raises(ValueError, match=r"tp_size=2.* 4 tensor"):
            built_without(jnp.ones((2, 8, 32)))
        linear(config=two)(jnp.ones((2, 8, 32)))


def test_a_group_can_be_set_later():
    layer = row()
    layer.set_tensor_parallel_group("tensor")
    with without_type_checker(), pytest.raises(TypeError, match="'data'"):
        layer.set_tensor_parallel_group("data")
