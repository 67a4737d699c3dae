"""A small GPT with dropout trains to one device's losses on every mesh that `ParallelConfig` accepts."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.config import MESH_AXES, ParallelConfig, TransformerConfig
from jax_te.models import GPTModel
from jax_te.sharding import make_mesh
from jax_te.training import create_train_state, make_train_step

STEPS, BATCH, SEQUENCE, VOCAB = 2, 8, 16, 64
CONFIG = TransformerConfig(
    num_layers=1,
    hidden_size=32,
    num_attention_heads=8,
    num_query_groups=8,
    ffn_hidden_size=64,
    normalization="RMSNorm",
    activation="swiglu",
    attention_dropout=0.1,
    hidden_dropout=0.1,
)
"""Every size that a mesh axis splits is a multiple of 8, so that no mesh of 8 devices is left out."""

# fp32: sums over devices in another order, 2^-24 each; the mean of 128 losses is off by about one such rounding, and
# 2e-6 leaves room for ten. Dropout that drew another mask for one position would change the loss by about 1e-3.
TOLERANCE = 2e-6


def every_mesh() -> list[tuple[int, ...]]:
    """Sizes of `MESH_AXES` for all meshes of 2, 4 and 8 devices, without stages and experts, that split the model
    evenly."""
    limits = {"pipeline": 1, "expert": 1, "data": BATCH, "fsdp": BATCH, "context": SEQUENCE}
    limits["tensor"] = CONFIG.num_attention_heads
    sizes = itertools.product((1, 2, 4, 8), repeat=len(MESH_AXES))
    fits = [shape for shape in sizes if all(limits[n] % s == 0 for n, s in zip(MESH_AXES, shape, strict=True))]
    return [shape for shape in fits if np.prod(shape) in (2, 4, 8)]


def train() -> np.ndarray:
    """Losses of the first steps on the mesh in use, if any."""
    starts = jax.random.randint(jax.random.key(1), (STEPS, BATCH, 1), 0, VOCAB)
    tokens = np.asarray((starts + 3 * jnp.arange(SEQUENCE + 1)[None, None]) % VOCAB)

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return model.loss(batch[:, :-1], batch[:, 1:], dropout_key=key)

    tx = optax.adamw(5e-3)
    state = create_train_state(
        lambda rngs: GPTModel(
            CONFIG, vocab_size=VOCAB, max_sequence_length=SEQUENCE, position_embedding_type="rope", rngs=rngs
        ),
        tx,
        key=jax.random.key(0),
    )
    step, losses = make_train_step(loss_fn, tx), []
    for batch in tokens:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return np.array(losses)


@functools.cache
def one_device() -> np.ndarray:
    return train()


def assert_one_devices_losses(shape: tuple[int, ...], axis_type: Any) -> None:
    sizes = dict(zip(MESH_AXES, shape, strict=True))
    one = one_device()
    with jax.set_mesh(make_mesh(ParallelConfig(**sizes), axis_type=axis_type)):
        np.testing.assert_allclose(train(), one, rtol=TOLERANCE, err_msg=f"{sizes}, {axis_type}")


def test_there_are_as_many_meshes_as_ways_to_split_8_4_and_2_devices() -> None:
    assert len(every_mesh()) == len(set(every_mesh())) == 20 + 10 + 4


@pytest.mark.costly
def test_dropout_shows_in_the_losses() -> None:
    model = GPTModel(CONFIG, vocab_size=VOCAB, max_sequence_length=SEQUENCE, rngs=nnx.Rngs(0))
    tokens = jnp.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE) % VOCAB
    loss = jax.jit(lambda model, key: model.loss(tokens, tokens, dropout_key=key))
    losses = [float(loss(model, jax.random.key(seed))) for seed in range(4)]  # over seeds they spread by 3e-3
    assert max(losses) - min(losses) > 100 * TOLERANCE * losses[0]


@pytest.mark.costly
@pytest.mark.wide("1x1x2x1x2x2-auto")
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("shape", every_mesh(), ids=lambda shape: "x".join(map(str, shape)))
def test_every_mesh_gives_one_devices_losses(shape: tuple[int, ...], axis_type: str) -> None:
    assert_one_devices_losses(shape, axis_type)
