"""A batch in parts: the same results as whole, for every model, mesh and form of the stack."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.config import ParallelConfig, PipelineConfig, TransformerConfig
from jax_te.layers import TransformerLayer
from jax_te.models import BertModel, Execution, GPTModel, MegatronGPTModel, T5Model, run_layers
from jax_te.models.batch_parts import join_batch, split_batch
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from jax_te.sharding import make_mesh
from jax_te.training import PipelinedLoss, create_train_state, make_train_step
from tests.support.meshes import MODES, use_mesh

B, S, V = 8, 16, 48
TOKENS = jax.random.randint(jax.random.key(0), (B, S + 1), 0, V)
RECIPES = {"none": None, "delayed": DelayedScaling(amax_history_len=2), "current": Float8CurrentScaling()}


def config(**fields):
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 64}
    return TransformerConfig(**{**sizes, "hidden_dropout": 0.0, "attention_dropout": 0.0, **fields})


def gpt(execution, rngs, **fields):
    arguments = {"vocab_size": V, "max_sequence_length": S, "position_embedding_type": "rope"}
    return GPTModel(config(**fields), **arguments, execution=execution, rngs=rngs)


def after_a_step(execution, recipe=None, mode="no mesh", key=None, **fields):
    tx = optax.sgd(1.0)
    with use_mesh(mode), autocast(recipe):
        state = create_train_state(lambda rngs: gpt(execution, rngs, **fields), tx, key=jax.random.key(0))
        step = make_train_step(lambda model, batch, _: model.loss(batch[:, :-1], batch[:, 1:], dropout_key=key), tx)
        state, metrics = step(state, TOKENS)
    return jax.tree.map(np.asarray, (metrics["loss"], state.params, state.quantizers))


def assert_close(one, other):
    """fp32; 1e-5 of each array's largest value: sums over the batch have another order, 2^-24 for each of its steps."""
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-5 * max(np.abs(left).max(), 1e-3))


@pytest.mark.costly(slow=["none-explicit", "delayed-auto", "none-no mesh"])
@pytest.mark.wide
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_a_step_is_that_of_the_whole_batch(mode, recipe):
    """Of delayed scaling the next states as well: the scales are those of before, the amaxes of all parts."""
    with jax.default_matmul_precision("highest"):
        whole = after_a_step(Execution(), RECIPES[recipe], mode)
        parts = after_a_step(Execution(batch_parts=2), RECIPES[recipe], mode)
    assert_close(whole, parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("execution", "fields"),
    [
        (Execution(scan_layers=True), {}),
        (Execution(), {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}),
        (Execution(), {"recompute_granularity": "selective"}),
    ],
    ids=["scanned", "full", "selective"],
)
def test_forms_of_the_stack(execution, fields):
    whole = after_a_step(execution, RECIPES["delayed"], **fields)
    parts = Execution(scan_layers=execution.scan_layers, batch_parts=4)
    assert_close(whole, after_a_step(parts, RECIPES["delayed"], **fields))


@pytest.mark.costly
def test_under_current_scaling_each_part_has_its_own_amaxes():
    """Rows that are 2^20 times as large as the others would leave nothing of these under one scale."""
    layers = [TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, rngs=nnx.Rngs(0))]
    layers[0].train()
    x = jax.random.normal(jax.random.key(1), (4, S, 32)).at[2:].multiply(2.0**20)
    with autocast(RECIPES["current"]):
        small = run_layers(layers, x[:2], [None])
        assert_close(small, run_layers(layers, x, [None], batch_parts=2)[:2])


@pytest.mark.costly
def test_each_part_has_its_own_dropout_masks():
    layers = [TransformerLayer(32, 64, 2, hidden_dropout=0.5, attention_dropout=0.0, rngs=nnx.Rngs(0))]
    x = jnp.broadcast_to(jax.random.normal(jax.random.key(1), (1, S, 32)), (4, S, 32))
    y = run_layers(layers, x, [jax.random.key(2)], batch_parts=2)
    assert not jnp.array_equal(y[:2], y[2:])
    assert jnp.array_equal(y, run_layers(layers, x, [jax.random.key(2)], batch_parts=2))


def bert(execution):
    return BertModel(config(), vocab_size=V, max_sequence_length=S, execution=execution, rngs=nnx.Rngs(0))


def t5(execution):
    return T5Model(config(), vocab_size=V, max_sequence_length=S, execution=execution, rngs=nnx.Rngs(0))


def megatron(execution):
    return MegatronGPTModel(config(), None, V, S, execution=execution, rngs=nnx.Rngs(0))


def masked(model):
    return model.encode(TOKENS[:, :-1], lengths=jnp.arange(1, B + 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "call"),
    [
        (bert, masked),
        (t5, lambda model: model(TOKENS[:, :-1], TOKENS[:, 1:], encoder_lengths=jnp.arange(1, B + 1))),
        (megatron, lambda model: model(TOKENS[:, :-1], jnp.broadcast_to(jnp.arange(S), (B, S)))),
    ],
    ids=["bert", "t5", "megatron"],
)
def test_every_model(build, call):
    assert_close(call(build(Execution())), call(build(Execution(batch_parts=2))))


@pytest.mark.costly(slow=("core_attention_bias",))
@pytest.mark.parametrize("name", ["attention_mask", "core_attention_bias"])
def test_arguments_of_the_whole_batch_and_of_each_row(name):
    layers = [TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, rngs=nnx.Rngs(0))]
    x = jax.random.normal(jax.random.key(1), (4, S, 32))
    values = jax.random.normal(jax.random.key(2), (4, 1, S, S))
    strings = (
        {"core_attention_bias_type": "post_scale_bias"} if "bias" in name else {"self_attn_mask_type": "arbitrary"}
    )
    for given in (values, values[:1]):
        array = given if "bias" in name else given > 1.0
        whole, parts = (
            run_layers(layers, x, [None], batch_parts=n, mask_types=strings, **{name: array}) for n in (1, 2)
        )
        assert_close(whole, parts)


@pytest.mark.parametrize("mode", MODES)
def test_parts_put_together_are_the_whole(mode):
    x = jnp.arange(B * 2.0).reshape(B, 2)
    with use_mesh(mode):
        x = (
            jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), jax.P(("data", "fsdp"))))
            if mode != MODES[0]
            else x
        )
        assert jnp.array_equal(jax.jit(lambda x: join_batch(split_batch(x, 2)))(x), x)


def test_what_does_not_divide_is_refused():
    layers, x = [nnx.Linear(32, 32, rngs=nnx.Rngs(0))], jnp.ones((6, S, 32))
    with pytest.raises(ValueError, match="multiple of 4"):
        run_layers(layers, x, [None], batch_parts=4)
    with pytest.raises(ValueError, match="cannot split positions"):
        run_layers(layers, x, [None], batch_parts=2, positions=jnp.ones(6))
    with pytest.raises(ValueError, match="batch_parts"):
        Execution(batch_parts=0)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    distributed = config(**full, distribute_saved_activations=True, tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match="distribute_saved_activations"):
        run_layers(layers, x, [None], batch_parts=2, recompute=distributed)


@pytest.mark.costly
def test_flags_are_those_of_all_parts():
    layers = [TransformerLayer(32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, rngs=nnx.Rngs(0))]
    x = jax.random.normal(jax.random.key(1), (4, S, 32))
    flags = {"checkpoint_core_attention": True, "attention_mask": None}
    assert_close(run_layers(layers, x, [None]), run_layers(layers, x, [None], batch_parts=2, **flags))


@pytest.mark.slow
def test_zero_bubble_is_refused():
    """It would defer nothing: each layer is called once for each part."""
    with jax.set_mesh(make_mesh(ParallelConfig(pipeline=2))):
        state = create_train_state(
            lambda rngs: gpt(Execution(batch_parts=2), rngs), optax.sgd(1.0), key=jax.random.key(0)
        )
        pipeline = PipelineConfig.parse("zero_bubble")
        step = make_train_step(
            PipelinedLoss(
                lambda model, batch, _: model.embed_inputs(batch[:, :-1]),
                lambda model, y, batch, _: model.compute_loss(y, batch[:, 1:]),
            ),
            optax.sgd(1.0),
            microbatches=2,
            pipeline=pipeline,
        )
        with pytest.raises(ValueError, match=r"1f1b.*batch_parts=1"):
            step(state, TOKENS)
