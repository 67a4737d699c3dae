"""How a training state is created: dtypes, masters, shardings, and the same values on every mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.checkpoint import TrainCheckpointer
from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.layers import Linear
from jax_te.megatron import recipe_from_config
from jax_te.models import GPTModel
from jax_te.recipe import DelayedScaling, autocast
from jax_te.sharding import make_mesh
from jax_te.training import (
    ConstantLossScale,
    Optimizer,
    PipelinedLoss,
    abstract_train_state,
    create_train_state,
    make_train_step,
)
from jax_te.training.masters import full_precision
from tests.support.meshes import use_mesh
from tests.support.numerics import assert_close
from tests.support.toy import Toy, assert_same, loss_fn, make_batch, values

TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def half_toy(rngs):
    return Toy(rngs, jnp.bfloat16, dropout=0.1)


def test_fields_at_step_0():
    key = jax.random.key(5)
    state = create_train_state(half_toy, TX, key=key)
    assert (int(state.step), int(state.skipped_steps)) == (0, 0)
    assert state.step.dtype == state.skipped_steps.dtype == jnp.int32
    assert isinstance(state.scaler, ConstantLossScale)
    assert jnp.issubdtype(state.rng.dtype, jax.dtypes.prng_key)
    assert sorted(state.params) == ["bias", "w_in", "w_out"]
    assert sorted(state.masters) == ["w_in", "w_out"]
    assert list(state.quantizers) == ["quantizers"]
    assert list(state.rest) == ["dropout"]
    for name in state.masters:
        np.testing.assert_array_equal(
            np.asarray(state.masters[name][...]), np.asarray(state.params[name][...]).astype(np.float32)
        )


def test_fp32_parameters_need_no_masters():
    state = create_train_state(Toy, TX, key=jax.random.key(0))
    assert not jax.tree.leaves(state.masters)
    assert jax.tree.structure(jax.tree.map(lambda x: x, state)) == jax.tree.structure(state)


@pytest.mark.wide("explicit")
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_a_mesh_shards_everything_and_changes_no_value(mode):
    plain = create_train_state(half_toy, TX, key=jax.random.key(0))
    with use_mesh(mode):
        state = create_train_state(half_toy, TX, key=jax.random.key(0))
    for one, other in zip(values(plain), values(state), strict=True):
        np.testing.assert_array_equal(one, other)
    expected = {"w_in": ("fsdp", "tensor"), "bias": (None, "tensor"), "w_out": ("tensor", "fsdp")}
    adam = state.opt_state[1][0]
    for tree in (state.params, state.masters, adam.mu, adam.nu):
        for name in tree:
            array = tree[name].get_value()
            assert tuple(array.sharding.spec) == expected[name]
            parts = np.prod([2 for axis in expected[name] if axis])
            assert array.addressable_shards[0].data.size == array.size // parts
    for leaf in jax.tree.leaves((state.quantizers, state.step, state.rng, adam.count)):
        assert leaf.sharding.is_fully_replicated


def test_a_mesh_may_be_given_instead_of_set():
    mesh = make_mesh(ParallelConfig(tensor=2))
    state = create_train_state(Toy, TX, key=jax.random.key(0), mesh=mesh)
    assert state.params["w_in"].get_value().sharding.mesh == mesh
    assert jax.sharding.get_mesh().empty


@pytest.mark.costly("auto")
def test_abstract_state_describes_the_real_one(mesh_mode):
    state = create_train_state(half_toy, TX, key=jax.random.key(0))
    abstract = abstract_train_state(half_toy, TX)
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    for leaf, described in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert (leaf.shape, leaf.dtype) == (described.shape, described.dtype)
        assert leaf.sharding.is_equivalent_to(described.sharding, leaf.ndim)


@pytest.mark.costly
@pytest.mark.wide("explicit")
def test_a_model_is_copied(mesh_mode):
    model = Toy(nnx.Rngs(0), jnp.bfloat16)
    before = np.asarray(model.w_in[...])
    state = create_train_state(model, optax.sgd(0.1), key=jax.random.key(0))
    np.testing.assert_array_equal(np.asarray(state.params["w_in"][...]), before)
    make_train_step(loss_fn, optax.sgd(0.1))(state, make_batch(0))
    np.testing.assert_array_equal(np.asarray(model.w_in[...]), before)


def test_model_gives_the_current_values():
    state = create_train_state(Toy, TX, key=jax.random.key(0))
    state, _ = make_train_step(loss_fn, TX)(state, make_batch(0))
    assert_same(nnx.state(state.model, nnx.Param), state.params)
    model = state.model
    model.w_in[...] = jnp.zeros_like(model.w_in[...])
    assert float(jnp.sum(jnp.abs(state.params["w_in"][...]))) > 0.0


@pytest.mark.costly
def test_another_kind_of_optimizer():
    """Adafactor's factored moments have other shapes than their parameters: they are replicated, and it trains."""
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=8)
    with use_mesh("auto"):
        state = create_train_state(half_toy, tx, key=jax.random.key(0))
        step, losses = make_train_step(loss_fn, tx), []
        for _ in range(4):
            state, metrics = step(state, make_batch(0))
            losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0]


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"one typed key such as jax.random.key\(0\)"):
        create_train_state(Toy, TX, key=jax.random.PRNGKey(0))
    with pytest.raises(ValueError, match=r"params/w_in of shape \(16, 32\): dimension 0 .* fsdp = 3"):
        create_train_state(Toy, TX, key=jax.random.key(0), mesh=make_mesh(ParallelConfig(fsdp=3)))


@pytest.mark.parametrize("hold", [False, True])
def test_a_models_configuration_says_whether_kernels_are_held_quantized(hold):
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, fp8="hybrid", fp8_recipe="tensorwise", fp8_param=hold
    )

    def build(rngs):
        return GPTModel(config, vocab_size=32, max_sequence_length=16, rngs=rngs)

    with autocast(recipe_from_config(config)):
        state = abstract_train_state(build, optax.sgd(0.1))
    assert (jnp.dtype(jnp.float8_e4m3fn) in {leaf.dtype for leaf in jax.tree.leaves(state.params)}) == hold
    assert bool(jax.tree.leaves(state.masters)) == hold


def test_kernels_held_quantized_need_a_recipe():
    """Outside of autocast they would be fp32, without a word."""
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, fp8="hybrid", fp8_recipe="tensorwise", fp8_param=True
    )
    with autocast(recipe_from_config(config)):
        model = GPTModel(config, vocab_size=32, max_sequence_length=16, rngs=nnx.Rngs(0))
    with autocast(None):
        for make in (
            lambda: create_train_state(model, TX, key=jax.random.key(0)),
            lambda: abstract_train_state(model, TX),
            lambda: create_train_state(Toy, TX, key=jax.random.key(0), fp8_param=True),
            lambda: Optimizer(Linear(16, 16, rngs=nnx.Rngs(0)), TX, fp8_param=True),
        ):
            with pytest.raises(ValueError, match=r"fp8_param.* no layer has a recipe"):
                make()


def test_a_step_may_donate_a_state_that_shares_nothing_with_what_was_there_before():
    """Arrays that a model takes from outside, one of them twice, and an optimizer that begins with the parameters."""
    table, counts = jnp.ones((4, 4)), np.ones(3, np.float32)

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.one, self.other, self.counts = nnx.Param(table), nnx.Param(table), nnx.BatchStat(counts)
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.linear(x @ self.one @ self.other)

    tx = optax.contrib.schedule_free_adamw(1e-3)
    state = create_train_state(Model, tx, key=jax.random.key(0))
    step = make_train_step(lambda model, x, key: jnp.mean(model(x) ** 2), tx)
    for _ in range(2):
        state, metrics = step(state, jnp.ones((2, 4)))
    assert np.isfinite(metrics["loss"])
    assert table.sum() == 16.0
    assert isinstance(state.rest["counts"].get_value(), jax.Array)


def test_arrays_on_several_devices_that_a_model_takes_from_outside_are_not_donated():
    """Without ``jax.set_mesh``; one of them is used twice."""
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    table = jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(mesh, jax.P("x")))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.one, self.other = nnx.Param(table), nnx.Param(table)

        def __call__(self, x):
            return x @ self.one @ self.other

    state = create_train_state(Model, optax.sgd(0.1), key=jax.random.key(0))
    step = make_train_step(lambda model, x, key: jnp.mean(model(x) ** 2), optax.sgd(0.1))
    state, _ = step(state, jnp.ones((2, 8)))
    assert table.sum() == 64.0
    assert state.params["one"].get_value().sharding.is_equivalent_to(table.sharding, 2)


def run_distributed(distributed, mode="auto", dtype=jnp.bfloat16, mesh="data=2,fsdp=2,tensor=2", steps=3):
    """Parameters, masters, optimizer state and losses of some steps."""
    config = TransformerConfig(
        num_layers=2 if "pipeline" in mesh else 1,
        hidden_size=32,
        num_attention_heads=2,
        ffn_hidden_size=64,
        params_dtype=dtype,
        hidden_dropout=0.0,
    )
    losses: list[float] = []
    with jax.set_mesh(make_mesh(ParallelConfig.parse(mesh), axis_type=mode)), autocast(DelayedScaling()):
        state = create_train_state(
            lambda rngs: GPTModel(config, vocab_size=48, max_sequence_length=16, rngs=rngs),
            TX,
            key=jax.random.key(0),
            distributed_optimizer=distributed,
        )
        loss = PipelinedLoss(
            lambda model, rows, key: model.embed_inputs(rows[:, :-1]),
            lambda model, y, rows, key: model.compute_loss(y, rows[:, 1:]),
        )
        step = make_train_step(loss, TX, microbatches=2)
        for i in range(steps):
            state, metrics = step(state, jax.random.randint(jax.random.key(i), (8, 17), 0, 48))
            losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mesh", ["data=4", "data=2,fsdp=2,tensor=2", "pipeline=2,data=2"])
def test_replicas_split_masters_and_optimizer_state(mode, dtype, mesh):
    """The run is the same, but for fp32 rounding: XLA fuses sums and products otherwise on shards."""
    whole, losses = run_distributed(False, mode, dtype, mesh)
    state, found = run_distributed(True, mode, dtype, mesh)

    def of_data(tree):
        flat = nnx.to_flat_state(nnx.state(tree) if isinstance(tree, nnx.Module) else tree)
        return {"/".join(map(str, path)) for path, leaf in flat if "data" in str(leaf.get_value().sharding.spec)}

    assert not of_data(state.params)
    split = of_data(state.masters)
    assert {path.split("/")[-1] for path in split} == {"embedding", "kernel", "wi_kernel", "wo_kernel"}
    adam = state.opt_state[1][0]
    assert of_data(adam.mu) == of_data(adam.nu) == split
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    if "pipeline" not in mesh:
        trees = [full_precision(of.params, of.masters) for of in (whole, state)]
        for one, other in zip(*map(jax.tree.leaves, trees), strict=True):
            # fp32 rounding by itself is 1e-7; it may tip one of some thousand FP8 values, which moves that by 1/16.
            assert_close(one, other, 1e-4)


def test_nothing_to_split_without_a_data_axis():
    state = create_train_state(half_toy, TX, key=jax.random.key(0), distributed_optimizer=True)
    assert_same(state.params, create_train_state(half_toy, TX, key=jax.random.key(0)).params)
    step = make_train_step(loss_fn, TX)
    assert np.isfinite(float(step(state, make_batch(0))[1]["loss"]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["fp32", "bf16"])
def test_a_checkpoint_of_replicas_restores_whole_and_split(tmp_path, dtype):
    """Of fp32 parameters masters are copies, which a state without a distributed optimizer lacks."""
    state, _ = run_distributed(True, dtype=dtype, steps=1)
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(state, None, 3)
        for distributed in (False, True):
            wanted, _ = run_distributed(distributed, dtype=dtype, steps=0)
            restored, _, _ = checkpointer.restore(wanted)
            for one, other in zip(jax.tree.leaves(restored.params), jax.tree.leaves(state.params), strict=True):
                np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
            for leaf, like in zip(jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True):
                assert leaf.sharding == like.sharding


def test_what_replicas_cannot_split_is_refused():
    with jax.set_mesh(make_mesh(ParallelConfig(data=2))), pytest.raises(ValueError, match="logical_axes name 'fsdp'"):
        create_train_state(
            lambda rngs: nnx.Linear(4, 4, rngs=rngs), TX, key=jax.random.key(0), distributed_optimizer=True
        )


def test_a_size_that_replicas_cannot_split_names_the_option():
    def create(distributed):
        return create_train_state(
            lambda rngs: Linear(10, 16, rngs=rngs), TX, key=jax.random.key(0), distributed_optimizer=distributed
        )

    with jax.set_mesh(make_mesh(ParallelConfig(data=4, fsdp=2))):
        with pytest.raises(ValueError, match=r"not divide over .*fsdp\*data = 8; .*or leave out distributed_optimizer"):
            create(True)
        assert create(False).params["kernel"].get_value().shape == (10, 16)
