"""A small GPT trained on 8 devices against one device: same weights, same data, same losses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_te.config import ParallelConfig, RouterOptions, TransformerConfig
from jax_te.layers import Linear, MoE
from jax_te.models import GPTModel
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, autocast
from jax_te.sharding import make_mesh
from jax_te.training import change_recipe, create_train_state, make_train_step
from tests.support.meshes import use_mesh

STEPS = 4


def losses(mode, recipe, dtype):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        params_dtype=dtype,
    )
    starts = jax.random.randint(jax.random.key(1), (STEPS, 8, 1), 0, 64)
    tokens = (
        starts + 3 * jnp.arange(17)[None, None]
    ) % 64  # each token follows from the one before: there is something to learn

    def loss_fn(model, batch, key):
        return model.loss(batch[:, :-1], batch[:, 1:], dropout_key=key)

    with use_mesh(mode), autocast(recipe):
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(5e-3))
        state = create_train_state(
            lambda rngs: GPTModel(
                config, vocab_size=64, max_sequence_length=16, position_embedding_type="rope", rngs=rngs
            ),
            tx,
            key=jax.random.key(0),
        )
        step = make_train_step(loss_fn, tx, microbatches=2)
        found = []
        for batch in tokens:
            state, metrics = step(state, np.asarray(batch))
            found.append(float(metrics["loss"]))
    return np.array(found)


# fp32: sums over devices in another order, 2^-24 each; the mean of 128 losses is off by about one such rounding, and
# 2e-6 leaves room for ten. bf16: a last bit that differs is 2^-8, in a few of the terms that are averaged. FP8: an
# input that differs in its last bit can round to the neighbouring E4M3 value, 2^-4 away, but does so once in 2^19.
CASES = {
    "fp32": (None, jnp.float32, 2e-6, ("auto", "explicit")),
    "bf16": (None, jnp.bfloat16, 1e-3, ("auto",)),
    "delayed": (DelayedScaling(amax_history_len=4), jnp.float32, 1e-3, ("explicit",)),
    "delayed, auto": (DelayedScaling(amax_history_len=4), jnp.float32, 1e-3, ("auto",)),
    "current": (Float8CurrentScaling(), jnp.float32, 1e-3, ("auto",)),
}


@pytest.mark.costly("delayed")
@pytest.mark.wide("delayed")
@pytest.mark.parametrize("case", CASES)
def test_losses_on_a_mesh_are_one_devices(case):
    recipe, dtype, tolerance, modes = CASES[case]
    one = losses("no mesh", recipe, dtype)
    assert one[-1] < one[0] - 0.3, "the model learns, so that the losses are worth comparing"
    for mode in modes:
        np.testing.assert_allclose(losses(mode, recipe, dtype), one, rtol=tolerance, err_msg=mode)


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(Float8CurrentScaling(), marks=pytest.mark.slow), Float8BlockScaling()],
    ids=["current", "block"],
)
def test_a_changed_recipe_leaves_kernels_where_a_new_state_has_them(recipe):
    """Their masters, of which they are quantized, are split over more devices."""
    tx = optax.sgd(0.1)

    def created(recipe):
        def build(rngs):
            return Linear(256, 256, parallel_mode="column", params_dtype=jnp.bfloat16, rngs=rngs)

        with autocast(recipe):
            return create_train_state(build, tx, key=jax.random.key(0), fp8_param=True, distributed_optimizer=True)

    with jax.set_mesh(make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2))):
        changed, wanted = change_recipe(created(DelayedScaling()), recipe), created(recipe)
    assert jax.tree.structure(changed.params) == jax.tree.structure(wanted.params)  # so that one step serves both
    for found, other in zip(jax.tree.leaves(changed.params), jax.tree.leaves(wanted.params), strict=True):
        assert found.sharding.is_equivalent_to(other.sharding, found.ndim)


def test_a_changed_recipe_stores_kernels_of_experts_that_calls_do_not_cache():
    """Under block scaling devices gather the blocks of experts' kernels, and cache none; a new state stores them."""

    def build(rngs):
        return MoE(128, 128, RouterOptions(num_experts=4), params_dtype=jnp.bfloat16, rngs=rngs)

    def created(recipe):
        with autocast(recipe):
            return create_train_state(build, optax.sgd(0.1), key=jax.random.key(0), fp8_param=True)

    block = Float8BlockScaling()
    with jax.set_mesh(make_mesh(ParallelConfig(fsdp=2, expert=2))):
        changed, wanted = change_recipe(created(Float8CurrentScaling()), block), created(block)
    assert jax.tree.structure(changed.params) == jax.tree.structure(wanted.params)
    for found, other in zip(jax.tree.leaves(changed.params), jax.tree.leaves(wanted.params), strict=True):
        assert (found.shape, found.dtype) == (other.shape, other.dtype)
