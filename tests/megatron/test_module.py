"""MegatronModule, and modules' arrays as flat dicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jax_te import megatron
from jax_te.config import TransformerConfig
from jax_te.errors import CheckpointMismatchError
from jax_te.layers import DotProductAttention, LayerNorm, Linear, TransformerLayer
from jax_te.megatron import (
    IncompatibleKeys,
    MegatronModule,
    RecipeConfig,
    convert_module_to_dtype_except_fp32_marked,
    load_state_dict,
    param_is_not_shared,
    state_dict,
)
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from tests.support.numerics import NO_DROPOUT, assert_bitwise, without_type_checker


@dataclass(frozen=True)
class Config:
    fp8: str | None = None
    fp4: str | None = None
    quant_recipe: RecipeConfig | None = None


class Leaf(nnx.Module):
    def __init__(self, symmetric: bool):
        self.is_first_microbatch: bool | None = None
        if symmetric:
            self.symmetric_ar_type: str | None = None


class Model(MegatronModule):
    def __init__(self, config: Any = None, seed: int = 0, recipe: Any = None):
        super().__init__(config)
        with autocast(recipe):
            self.layers = nnx.List([Linear(16, 16, rngs=nnx.Rngs(seed + i)) for i in range(11)])
        self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
        self.leaves = nnx.List([Leaf(True), Leaf(False)])
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(seed))


def test_names_and_values():
    model = Model(recipe=DelayedScaling(amax_history_len=4))
    arrays = model.state_dict()
    assert (arrays["layers.10.weight"] == model.layers[10].kernel[...].T).all()
    assert arrays["norm.mean"].shape == (16,)
    assert arrays["layers.0.quantizers.grad.amax_history"].shape == (4,)
    assert arrays["layers.0.quantizers.grad.scale"].shape == ()
    assert jnp.issubdtype(arrays["dropout.rngs.key"].dtype, jax.dtypes.prng_key)
    assert all(isinstance(array, jax.Array) for array in arrays.values())
    assert sum(array.size for array in arrays.values()) == sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    order = [name.split(".")[1] for name in arrays if name.endswith(".weight")]
    assert order == [str(i) for i in range(11)], "layers in their order, not the alphabet's"


def test_prefix_destination_and_variables():
    model = Model()
    names = list(model.state_dict())
    assert list(model.state_dict(prefix="a.b.")) == [f"a.b.{name}" for name in names]
    assert list(model.state_dict_for_save_checkpoint("a.")) == [f"a.{name}" for name in names]
    filled = {"here": 1}
    assert model.state_dict(filled, "a.") is filled
    assert list(filled) == ["here", *(f"a.{name}" for name in names)]
    variables = model.state_dict_for_save_checkpoint(keep_vars=True)
    assert variables["layers.3.bias"] is model.layers[3].bias
    assert state_dict(Linear(16, 16, rngs=nnx.Rngs(0)), keep_vars=True).keys() == {"kernel", "bias"}


@pytest.mark.costly
def test_round_trip():
    recipe = DelayedScaling(amax_history_len=4)
    one, two = Model(seed=1, recipe=recipe), Model(seed=50, recipe=recipe)
    nnx.update(one.layers[0], jax.tree.map(lambda x: x + 3.0, nnx.state(one.layers[0], QuantizerState)))
    numpy = {name: array if "key" in name else np.asarray(array) for name, array in one.state_dict().items()}
    for arrays in (one.state_dict(), numpy):
        assert two.load_state_dict(arrays) == IncompatibleKeys([], [])
        loaded = two.state_dict()
        for name, array in one.state_dict().items():
            if name.endswith(".key"):
                assert (array == loaded[name]).all()
            else:
                assert_bitwise(loaded[name], array, what=name)
            assert isinstance(loaded[name], jax.Array)


def test_loaded_arrays_are_copies_with_the_modules_sharding():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    one, two = (Linear(16, 16, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    two.kernel.set_value(jax.device_put(two.kernel[...], sharding))
    arrays = state_dict(one)
    load_state_dict(two, arrays)
    assert two.kernel[...].sharding == sharding
    assert_bitwise(two.kernel[...], arrays["kernel"])
    two.bias[...].delete()  # as donation would
    assert not arrays["bias"].is_deleted()


def test_every_difference_is_listed_and_nothing_loaded():
    one, two = Linear(16, 16, rngs=nnx.Rngs(1)), Linear(16, 16, rngs=nnx.Rngs(2))
    before = state_dict(two)
    good = state_dict(one)
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"kernel": good["kernel"]}, [r"1 missing: bias is absent there, float32\[16\] here"]),
        (
            {**good, "scale": jnp.ones(1), "b": 1},
            [r"2 unexpected: b is not an array \(int\) there, absent here; scale is float32\[1\] there, absent"],
        ),
        ({**good, "bias": jnp.zeros(8)}, [r"1 of another shape: bias is float32\[8\] there, float32\[16\] here"]),
        ({**good, "bias": np.zeros(16, np.float16)}, [r"1 of another dtype: bias is float16\[16\] there, float32\["]),
        ({**good, "bias": [0.0] * 16}, [r"bias is not an array \(list\)"]),
        (
            {"kernel": good["kernel"][:8], "x": good["bias"]},
            [r"1 missing: bias is", r"1 unexpected: x is", r"1 of another shape: kernel is float32\[8, 16\] there"],
        ),
        ({f"a{i}": good["bias"] for i in range(9)} | good, [r"9 unexpected: a0 .*; a7 [^;]*; and 1 more\. Cast and "]),
    ]
    for arrays, lines in cases:
        with pytest.raises(CheckpointMismatchError, match="Linear") as caught:
            load_state_dict(two, arrays)
        for line in lines:
            assert caught.match(line)
        assert all(state_dict(two)[name] is array for name, array in before.items())


def test_not_strict():
    one, two = Linear(16, 16, rngs=nnx.Rngs(1)), Linear(16, 16, rngs=nnx.Rngs(2))
    own = two.kernel[...]
    result = load_state_dict(two, {"a.bias": jnp.ones(16), "a.other": jnp.ones(1)}, strict=False, prefix="a.")
    assert result == IncompatibleKeys(["a.kernel"], ["a.other"])
    assert two.kernel[...] is own
    assert_bitwise(two.bias[...], jnp.ones(16))
    with pytest.raises(ValueError, match=r"kernel.* float32\[2\]"):
        load_state_dict(one, {"kernel": jnp.ones(2)}, strict=False)


def test_abstract_modules_can_be_filled():
    abstract = nnx.eval_shape(lambda: Linear(16, 16, rngs=nnx.Rngs(1)))
    real = Linear(16, 16, rngs=nnx.Rngs(1))
    load_state_dict(abstract, state_dict(real))
    assert_bitwise(abstract.kernel[...], real.kernel[...])


@pytest.mark.parametrize(
    ("config", "quantized"),
    [
        (Config(), False),
        (Config(fp8="hybrid"), True),
        (Config(fp4="e2m1"), True),
        (Config(quant_recipe=RecipeConfig([], {})), True),
        (None, False),
    ],
)
def test_set_is_first_microbatch(config: Any, quantized: bool):
    model = Model(config)
    model.leaves[1].is_first_microbatch = False
    model.set_is_first_microbatch()
    assert [leaf.is_first_microbatch for leaf in model.leaves] == ([True, True] if quantized else [None, False])
    assert model.layers[4].is_first_microbatch is (True if quantized else None)
    assert not hasattr(model, "is_first_microbatch")
    if quantized:  # also on modules that came later
        merged = nnx.merge(*nnx.split(model))
        merged.leaves.append(Leaf(False))
        merged.set_is_first_microbatch()
        assert merged.leaves[2].is_first_microbatch is True


@pytest.mark.parametrize("kind", [None, "two_shot", "one_shot", "multimem_all_reduce"])
def test_set_symmetric_ar(kind: str | None):
    model = Model()
    model.leaves[0].symmetric_ar_type = "other"
    model.set_symmetric_ar(kind)
    assert model.leaves[0].symmetric_ar_type == kind
    assert not hasattr(model.leaves[1], "symmetric_ar_type")


def test_unknown_all_reduce():
    with pytest.raises(AssertionError, match=r"set_to.*'two_shot'.* 'three_shot'"):
        Model().set_symmetric_ar("three_shot")


def test_modules_tell_whether_they_train():
    """`eval` reaches every module, in the model and of the package."""
    model = Model()
    layer = model.layers.append(TransformerLayer(32, 64, 4, **NO_DROPOUT, rngs=nnx.Rngs(0))) or model.layers[-1]
    modules = (model, layer, layer.self_attention.core_attention, layer.self_attention.qkv, layer.layernorm_mlp)
    modules += (LayerNorm(8, rngs=nnx.Rngs(0)),)
    assert [module.training for module in modules] == [True] * 6
    model.eval()
    assert [module.training for module in modules] == [False] * 5 + [True]
    model.train()
    assert all(module.training for module in modules)


def test_config_must_be_hashable():
    @dataclass
    class Mutable:
        fp8: str | None = None

    with pytest.raises(TypeError, match=r"config.* Mutable.*frozen=True"):
        Model(Mutable())


def test_models_are_jitted_with_their_config():
    model = Model(Config(fp8="hybrid"))
    assert jax.jit(lambda model: model)(model).config == Config(fp8="hybrid")


def kept() -> Any:
    """A model whose layer keeps its quantized kernel."""
    model = Model()
    with autocast(Float8CurrentScaling()):
        model.layers[0](jnp.ones((16, 16)), is_first_microbatch=True)
    assert model.layers[0].kernel_cache is not None
    return model


def test_kept_kernels_are_no_part_of_a_state_dict_and_do_not_outlive_their_kernel():
    one, two = kept(), kept()
    assert one.state_dict().keys() == Model().state_dict().keys()
    two.load_state_dict(one.state_dict())
    assert two.layers[0].kernel_cache is None
    one.refresh_cache()
    assert one.layers[0].kernel_cache is None
    half = kept()
    convert_module_to_dtype_except_fp32_marked(half, jnp.bfloat16)
    assert half.layers[0].kernel_cache is None
    with autocast(Float8CurrentScaling()), pytest.raises(ValueError, match="is_first_microbatch=False"):
        one.layers[0](jnp.ones((16, 16)), is_first_microbatch=False)


def test_param_is_not_shared():
    assert param_is_not_shared(nnx.Param(jnp.ones(1)))
    assert param_is_not_shared(nnx.Param(jnp.ones(1), shared=False))
    assert not param_is_not_shared(nnx.Param(jnp.ones(1), shared=True))
    with without_type_checker(), pytest.raises(TypeError, match="param must be a Variable, got Array"):
        param_is_not_shared(jnp.ones(1))  # type: ignore[arg-type]


def test_any_module_has_a_state_dict():
    layer = TransformerLayer(32, 64, 4, **NO_DROPOUT, rngs=nnx.Rngs(0))
    assert "self_attention.qkv.ln_bias" in state_dict(layer)


def test_the_groups_of_attention_are_its_projections_alone():
    """An own module may have a core of attention, and a layer of several components beside it."""

    class Mixer(MegatronModule):
        def __init__(self) -> None:
            super().__init__(Config())
            self.core_attention = DotProductAttention(4, 8, num_gqa_groups=2)
            self.mix = Linear(16, (2, 8), rngs=nnx.Rngs(0))

    kernel = jnp.arange(256.0).reshape(16, 2, 8)
    model = Mixer()
    model.mix.kernel.set_value(kernel)
    assert_bitwise(model.state_dict()["mix.weight"], kernel.reshape(16, 16).T)
    other = Mixer()
    other.load_state_dict(model.state_dict())
    assert_bitwise(other.mix.kernel[...], kernel)


@pytest.mark.parametrize(
    "build", [megatron.TransformerLayer, megatron.SelfAttention, megatron.MLP], ids=lambda build: build.__name__
)
def test_megatrons_blocks_begin_with_their_norm(build: Any) -> None:
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, block_input_layernorm=False)
    with pytest.raises(ValueError, match=r"block_input_layernorm=False is for jax_te\.layers"):
        build(config, rngs=nnx.Rngs(0))


def test_only_self_attention_of_a_megatron_decoder_has_norms_of_queries_and_keys() -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, qk_layernorm=True, normalization="RMSNorm"
    )
    layer = megatron.TransformerLayer(config, layer_type="decoder", rngs=nnx.Rngs(0))
    names = megatron.state_dict(layer)
    assert [name for name in names if "q_layernorm" in name] == ["self_attention.q_layernorm.weight"]
    x, context = jnp.ones((2, 8, 32)), jnp.ones((2, 4, 32))
    assert layer(x, context=context)[0].shape == x.shape


def test_a_megatron_decoder_has_its_blocks_one_after_the_other() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, parallel_attention_mlp=True)
    with pytest.raises(ValueError, match="parallel_attention_mlp=True does not go with layer_type='decoder'"):
        megatron.TransformerLayer(config, layer_type="decoder", rngs=nnx.Rngs(0))
