import dataclasses
import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te._validation import check_positive, check_rate, float_dtype
from jax_te.config import ACTIVATIONS, ParallelConfig, TransformerConfig
from jax_te.layers import Linear
from tests.support.numerics import without_type_checker

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


def test_defaults_follow_from_the_sizes():
    config = TransformerConfig(**SIZES)
    assert (config.num_query_groups, config.ffn_hidden_size, config.kv_channels) == (4, 256, 16)
    assert config.params_dtype == config.compute_dtype == jnp.dtype("float32")
    assert TransformerConfig(**SIZES, params_dtype="bfloat16").compute_dtype == jnp.dtype("bfloat16")
    mixed = TransformerConfig(**SIZES, compute_dtype=jnp.bfloat16)
    assert (mixed.params_dtype, mixed.compute_dtype) == (jnp.dtype("float32"), jnp.dtype("bfloat16"))
    assert TransformerConfig(**{**SIZES, "hidden_size": 62}, kv_channels=16).kv_channels == 16
    assert hash(config) == hash(TransformerConfig(**SIZES))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be an integer >= 1, got 0"),
        ({"hidden_size": 64.0}, "hidden_size must be an integer >= 1, got 64.0"),
        ({"num_attention_heads": True}, "num_attention_heads must be an integer >= 1, got True"),
        ({"hidden_size": 62}, "hidden_size 62 is not divisible by num_attention_heads 4; .* or give kv_channels"),
        ({"num_query_groups": 3}, "num_attention_heads 4 is not divisible by num_query_groups 3"),
        ({"ffn_hidden_size": -1}, "ffn_hidden_size must be an integer >= 1, got -1"),
        ({"normalization": "BatchNorm"}, "normalization must be one of 'LayerNorm', 'RMSNorm', got 'BatchNorm'"),
        ({"activation": "tanh"}, "unknown activation 'tanh'; allowed: gelu, geglu, qgelu, qgeglu, relu, reglu"),
        ({"layernorm_epsilon": 0.0}, "layernorm_epsilon must be > 0, got 0.0"),
        ({"attention_dropout": 1.0}, r"attention_dropout must be in \[0, 1\), got 1.0"),
        ({"hidden_dropout": -0.1}, r"hidden_dropout must be in \[0, 1\), got -0.1"),
        ({"params_dtype": "float64"}, "params_dtype must be one of float32, bfloat16, float16, got float64"),
        ({"compute_dtype": "fp8"}, "compute_dtype must be a dtype, such as 'bfloat16' or None, got 'fp8'"),
    ],
)
def test_a_wrong_value_is_named(changes, message):
    with without_type_checker(), pytest.raises(ValueError, match=message):
        TransformerConfig(**{**SIZES, **changes})


def test_megatrons_words_for_the_activation():
    def named(**fields):
        return TransformerConfig(**SIZES, **fields).activation

    assert named(activation_func=jax.nn.silu, gated_linear_unit=True) == "swiglu"
    assert named(activation_func=jax.nn.gelu) == "gelu"
    assert named(activation_func="squared_relu") == "srelu"
    assert named(gated_linear_unit=True) == "geglu"
    assert named(activation="silu", gated_linear_unit=True) == "swiglu"
    assert named(activation_func=jnp.tanh, gated_linear_unit=True) == (jnp.tanh, "linear")
    assert named(activation=("silu", "linear")) == "swiglu"
    config = TransformerConfig(**SIZES, activation_func=jax.nn.silu, gated_linear_unit=True)
    assert dataclasses.replace(config, num_layers=3).activation == "swiglu"
    assert dataclasses.replace(config, activation_func=jax.nn.relu).activation == "reglu"
    assert dataclasses.replace(config, gated_linear_unit=False).activation == "silu"
    assert named(activation="swiglu", activation_func="silu", gated_linear_unit=True) == "swiglu"
    assert TransformerConfig(**SIZES).gated_linear_unit is False
    assert TransformerConfig(**SIZES, activation="swiglu").gated_linear_unit is True
    with without_type_checker(), pytest.raises(TypeError, match="must be a name, a function that can be hashed"):
        TransformerConfig(**SIZES, activation=3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation": "relu", "activation_func": "silu"}, "activation='relu' and activation_func='silu'.*give one"),
        ({"activation": "gelu", "activation_func": "silu"}, "activation='gelu' and activation_func='silu'.*give one"),
        ({"activation": "gelu", "gated_linear_unit": True, "activation_func": "silu"}, "name different functions"),
        ({"activation": "swiglu", "gated_linear_unit": False}, "gated_linear_unit=False and the activation 'swiglu'"),
        ({"activation_func": ("silu", "linear"), "gated_linear_unit": False}, "which has 2 components"),
    ],
)
def test_words_for_the_activation_that_contradict_each_other(fields, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**SIZES, **fields)
    later = dict([fields.popitem()])
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TransformerConfig(**SIZES, **fields), **later)


def test_unknown_fields_are_refused():
    with pytest.raises(TypeError, match="fp9"):
        TransformerConfig(**SIZES, fp9="hybrid")
    with pytest.raises(TypeError):
        TransformerConfig(2, 64, 4)  # keyword-only


def test_parallel_config():
    config = ParallelConfig(pipeline=7, data=2, fsdp=3, context=5, tensor=4)
    assert (config.shape, config.num_devices) == ((7, 2, 3, 1, 5, 4), 840)
    assert config.axis_names == ("pipeline", "data", "fsdp", "expert", "context", "tensor")
    assert ParallelConfig.parse("data=2, fsdp=3,context=5,tensor=4,pipeline=7") == config
    assert dataclasses.replace(config, context=1) == ParallelConfig(pipeline=7, data=2, fsdp=3, tensor=4)
    assert (ParallelConfig(data=3, expert=2, tensor=4).batch_devices, ParallelConfig(context=2).batch_devices) == (6, 1)
    assert ParallelConfig.parse("") == ParallelConfig()
    with without_type_checker(), pytest.raises(ValueError, match="tensor must be an integer >= 1, got 0"):
        ParallelConfig(tensor=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model=2", "unknown mesh axis 'model' in 'model=2'; allowed: pipeline, data, fsdp, expert, context, tensor"),
        ("data=2,data=4", "mesh axis 'data' is given twice"),
        ("data", "mesh axis 'data' needs an integer size >= 1, got ''"),
        ("data=two", "mesh axis 'data' needs an integer size >= 1, got 'two'"),
        ("data=-2", "mesh axis 'data' needs an integer size >= 1, got '-2'"),
        ("data=0", "data must be an integer >= 1, got 0"),
    ],
)
def test_mesh_text_that_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig.parse(text)


def test_helpers():
    assert float_dtype("x", jnp.float16) == jnp.dtype("float16")
    with pytest.raises(ValueError, match="x must be one of float32, bfloat16, float16, got int32"):
        float_dtype("x", jnp.int32)
    check_positive(a=1, b=2)
    check_rate(a=0.0, b=0.999)
    for rate in (1.0, -1e-9, float("nan")):
        with pytest.raises(ValueError, match=r"p must be (in \[0, 1\)|a finite number), got"):
            check_rate(p=rate)
    assert {len(parts) for parts in ACTIVATIONS.values()} == {1, 2}


# On a machine with Transformer Engine the package loads it, and jax, first of all.
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is here")
def test_configurations_and_recipes_import_without_jax():
    code = (
        "import sys; from jax_te.config import TransformerConfig; from jax_te.recipe import DelayedScaling; "
        "TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, params_dtype='bfloat16'); "
        "DelayedScaling().fp8_format.fwd_dtype; sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sizes_may_be_numpys_integers():
    """As those that are computed from shapes are; they make the same configuration, and the same layer."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_layers_at_start_in_bf16": 1}
    with without_type_checker():
        of_numpy = TransformerConfig(**{name: np.int64(size) for name, size in sizes.items()})
        layers = [nnx.split(Linear(size, 16, rngs=nnx.Rngs(0)))[0] for size in (np.int32(32), 32)]
        with pytest.raises(ValueError, match=r"hidden_size must be an integer >= 1, got np\.True_"):
            TransformerConfig(**sizes | {"hidden_size": np.bool_(True)})
    assert of_numpy == TransformerConfig(**sizes)
    assert layers[0] == layers[1]
    assert hash(layers[0]) == hash(layers[1])
