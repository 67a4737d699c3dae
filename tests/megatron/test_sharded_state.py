"""sharded_state_dict: descriptions with the names of a state dict, and targets for restoring it on any mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from jax_te.checkpoint import TrainCheckpointer
from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.layers import TransformerLayer, quantize_parameters
from jax_te.megatron import (
    Float16Module,
    MegatronModule,
    TEColumnParallelLinear,
    TEGroupedLinear,
    TELayerNormColumnParallelLinear,
    TELinear,
    TENorm,
    TERowParallelLinear,
    load_state_dict,
    sharded_state_dict,
    state_dict,
)
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, Float8BlockScaling, autocast
from jax_te.sharding import make_mesh
from tests.support.meshes import shard
from tests.support.numerics import NO_DROPOUT, assert_bitwise
from tests.support.reference import randomize

H, F = 32, 64
CONFIG = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=2, bf16=True)
P = PartitionSpec


class Mlp(MegatronModule):
    """Every kind of layer, some in a list."""

    def __init__(self, config: TransformerConfig = CONFIG, seed: int = 0):
        super().__init__(config)
        common: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": True}
        common |= {"skip_bias_add": False, "is_expert": False, "rngs": nnx.Rngs(seed)}
        self.input_norm = TENorm(config, H)
        self.fc1 = TELayerNormColumnParallelLinear(H, F, gather_output=False, **common)
        self.rows = nnx.List([TERowParallelLinear(F, H, input_is_parallel=True, **common) for _ in range(2)])
        self.column = TEColumnParallelLinear(H, F, gather_output=False, **common)
        self.down = TELinear(H, H, parallel_mode="duplicated", skip_weight_param_allocation=False, **common)


def mlp(seed: int = 0) -> Mlp:
    with autocast(DelayedScaling(amax_history_len=4)):
        return Mlp(seed=seed)


def mesh(**sizes: int) -> Any:
    return jax.set_mesh(make_mesh(ParallelConfig(**sizes)))


def test_names_shapes_and_dtypes_are_the_state_dicts():
    model = mlp()
    described = model.sharded_state_dict()
    arrays = model.state_dict()
    assert described.keys() == arrays.keys()
    for name, array in arrays.items():
        assert described[name] == jax.ShapeDtypeStruct(array.shape, array.dtype)
        assert described[name].sharding is None
    assert model.sharded_state_dict("a.").keys() == {f"a.{name}" for name in arrays}
    abstract = nnx.eval_shape(mlp)
    assert abstract.sharded_state_dict(metadata={"dp_cp_group": None}) == described


def test_specs_follow_the_logical_axes():
    model = mlp()
    expected = {
        "fc1.weight": P("tensor", "fsdp"),
        "fc1.bias": P("tensor"),
        "fc1.layer_norm_weight": P(None),
        "fc1.layer_norm_bias": P(None),
        "rows.1.weight": P(None, ("tensor", "fsdp")),
        "rows.1.bias": P(None),
        "column.weight": P("tensor", "fsdp"),
        "column.bias": P("tensor"),
        "down.weight": P(None, "fsdp"),
        "down.bias": P(None),
        "input_norm.weight": P(None),
        "column.quantizers.x.scale": P(),
        "column.quantizers.grad.amax_history": P(None),
    }
    with mesh(data=2, fsdp=2, tensor=2):
        described = model.sharded_state_dict()
        for name, spec in expected.items():
            assert described[name].sharding == NamedSharding(jax.sharding.get_mesh(), spec), name
        assert all(leaf.sharding is not None for leaf in described.values())


@pytest.mark.slow
def test_a_round_trip_between_meshes(tmp_path):
    """Saved on one mesh, restored to the description on another: the same bits where the rules put them."""
    with mesh(data=2, fsdp=2, tensor=2):
        saved = shard(randomize(mlp()))
        nnx.update(saved.column, jax.tree.map(lambda a: a + 3.0, nnx.state(saved.column, QuantizerState)))
        with TrainCheckpointer(tmp_path / "ours") as checkpointer:
            checkpointer.save(saved.state_dict(), None, 1)
        ocp.save(tmp_path / "orbax", saved.state_dict())
    with mesh(data=1, fsdp=2, tensor=4):
        loaded = shard(mlp(seed=5))
        target = loaded.sharded_state_dict()
        with TrainCheckpointer(tmp_path / "ours") as checkpointer:
            arrays, _, _ = checkpointer.restore(target)
        for restored in (arrays, ocp.load(tmp_path / "orbax", target)):
            for name, leaf in target.items():
                assert restored[name].sharding == leaf.sharding, name
                assert_bitwise(restored[name], saved.state_dict()[name], what=name)
        loaded.load_state_dict(arrays)
        for name, array in loaded.state_dict().items():
            assert_bitwise(array, saved.state_dict()[name], what=name)
        assert loaded.column.kernel[...].sharding.spec == P("fsdp", "tensor")


def test_quantized_parameters_are_split_like_the_kernel_and_their_scales_are_whole():
    common: dict[str, Any] = {"config": CONFIG, "init_method": CONFIG.init_method, "bias": False, "is_expert": False}
    with autocast(Float8BlockScaling()):
        layer = TEColumnParallelLinear(256, 256, **common, gather_output=False, skip_bias_add=False, rngs=nnx.Rngs(0))
        quantize_parameters(layer)
    with mesh(fsdp=2, tensor=2):
        described = layer.sharded_state_dict()
    assert described.keys() == state_dict(layer).keys()
    specs = {leaf.dtype.name: leaf.sharding.spec for leaf in described.values()}
    # The scales in blocks, and the two constants of the guard, which have no axes.
    assert specs.pop("float8_e4m3fn") == P("fsdp", "tensor")
    assert all(not any(spec) for spec in specs.values())


@pytest.mark.costly
def test_a_parameter_that_two_layers_share_is_described_once_and_restored(tmp_path):
    def tied(seed: int) -> Mlp:
        model = Mlp(seed=seed)
        model.rows[1].kernel = model.rows[0].kernel
        return model

    with mesh(tensor=2):
        saved, loaded = tied(0), tied(5)
        assert loaded.sharded_state_dict().keys() == saved.state_dict().keys()
        ocp.save(tmp_path / "tied", saved.state_dict())
        loaded.load_state_dict(ocp.load(tmp_path / "tied", loaded.sharded_state_dict()))
    for row in loaded.rows:
        assert_bitwise(row.kernel[...], saved.rows[0].kernel[...])
    assert loaded.rows[0].kernel is loaded.rows[1].kernel


class Own(nnx.Module):
    """Describes itself, as an attention core with nothing to save does."""

    def __init__(self) -> None:
        self.offset = nnx.Param(jnp.zeros(2))
        self.inner = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return {f"{prefix}{metadata}": jax.ShapeDtypeStruct((1,), jnp.float32)}


class Outer(MegatronModule):
    def __init__(self) -> None:
        super().__init__(None)
        self.parts = nnx.List([Own(), TransformerLayer(32, 64, 4, **NO_DROPOUT, rngs=nnx.Rngs(0))])
        self.part = nnx.Param(jnp.zeros(3))


def test_submodules_are_asked():
    described = Outer().sharded_state_dict("model.", metadata={"a": 1})
    assert described["model.parts.0.{'a': 1}"].shape == (1,)
    own = [name for name in described if name.startswith("model.parts.0")]
    assert len(own) == 1
    assert "model.part" in described
    assert "model.parts.1.layernorm_mlp.wi_kernel" in described


def test_float16_module_adds_no_prefix():
    wrapped = Float16Module(CONFIG, mlp())
    described = wrapped.sharded_state_dict("a.")
    assert described.keys() == wrapped.state_dict(prefix="a.").keys()
    assert described["a.fc1.weight"].dtype == jnp.bfloat16
    assert Float16Module(CONFIG, nnx.Linear(2, 2, rngs=nnx.Rngs(0))).sharded_state_dict().keys() == {"kernel", "bias"}


def test_offsets_and_parallel_modes_that_are_refused():
    for module in (mlp(), Float16Module(CONFIG, mlp()), mlp().rows[0], mlp().fc1):
        with pytest.raises(ValueError, match=r"sharded_offsets.* \(\).* \(\(0, 1, 2\),\)"):
            module.sharded_state_dict("", ((0, 1, 2),))
    common: dict[str, Any] = {"config": CONFIG, "init_method": CONFIG.init_method, "bias": False, "skip_bias_add": True}
    for mode in ("column", "row"):
        layer = TELinear(H, F, parallel_mode=mode, skip_weight_param_allocation=False, **common, rngs=nnx.Rngs(0))
        with pytest.raises(AssertionError, match=f"parallel_mode 'duplicated'.* '{mode}'"):
            layer.sharded_state_dict()
        with pytest.raises(AssertionError, match=r"TELinear\.sharded_state_dict.* 'duplicated'"):
            sharded_state_dict(nnx.List([layer]))


def test_what_is_restored_fills_a_layer():
    layer, other = mlp().fc1, mlp(seed=3).fc1
    load_state_dict(other, state_dict(layer))
    assert_bitwise(other.kernel[...], layer.kernel[...])


@pytest.mark.parametrize("mode", ["Column", "Row"])
def test_parallel_modes_in_both_spellings(mode: Any) -> None:
    common: dict[str, Any] = {"config": CONFIG, "init_method": CONFIG.init_method, "bias": False, "skip_bias_add": True}
    layer = TELinear(H, F, parallel_mode=mode, skip_weight_param_allocation=False, **common, rngs=nnx.Rngs(0))
    assert layer.parallel_mode == mode.lower()
    assert TEGroupedLinear(2, H, F, parallel_mode=mode, **common, rngs=nnx.Rngs(0)).parallel_mode == mode.lower()
