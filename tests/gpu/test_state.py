"""A state made by one program, on a mesh, has the bits of one made without: XLA drops casts on a GPU, not on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.models import GPTModel
from jax_te.ops import use_backend
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from jax_te.training import Optimizer, create_train_state

pytestmark = pytest.mark.gpu

RECIPES = {
    "none": (None, {}),
    "delayed": (DelayedScaling(), {}),
    "fp8_param": (Float8CurrentScaling(), {"fp8_param": True}),
}


def model(rngs):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=256,
        num_attention_heads=4,
        ffn_hidden_size=512,
        params_dtype=jnp.bfloat16,
        compute_dtype=jnp.bfloat16,
    )
    return GPTModel(config, vocab_size=256, max_sequence_length=128, rngs=rngs)


def assert_same_bits(one, other):
    one, other = jax.tree.leaves_with_path(one), jax.tree.leaves(other)
    for (path, left), right in zip(one, other, strict=True):
        if not jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
            assert np.asarray(left).tobytes() == np.asarray(right).tobytes(), jax.tree_util.keystr(path)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_mesh_changes_no_bit_of_a_new_state(recipe):
    recipe, options = RECIPES[recipe]
    with autocast(recipe), use_backend("te"):
        plain = create_train_state(model, optax.adamw(1e-3), key=jax.random.key(0), **options)
        with jax.set_mesh(jax.make_mesh((1,), ("fsdp",))):
            state = create_train_state(model, optax.adamw(1e-3), key=jax.random.key(0), **options)
    assert_same_bits(plain, state)


def test_a_program_that_draws_parameters_for_an_optimizer_rounds_them():
    def create(key):
        new = model(nnx.Rngs(key))
        return nnx.state(new), nnx.state(Optimizer(new, optax.adamw(1e-3)))

    assert_same_bits(create(jax.random.key(0)), jax.jit(create)(jax.random.key(0)))
