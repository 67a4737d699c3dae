"""Embedding: rows, gradients that add up, ids that do not exist."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.layers import Embedding
from jax_te.sharding import constrain
from tests.support.meshes import shard
from tests.support.numerics import assert_bitwise, assert_close, draw

V, H = 16, 8


@pytest.mark.costly("auto", slow=("explicit",))
def test_looks_up_rows_and_adds_up_gradients_on_every_mesh(mesh_mode: str) -> None:
    layer = shard(Embedding(V, H, rngs=nnx.Rngs(0)))
    ids, g = jnp.array([[3, 3, 15], [0, 3, 1], [2, 2, 2], [5, 6, 7]]), draw("g", (4, 3, H))

    @jax.jit
    def run(layer, ids, g):
        y, vjp = jax.vjp(lambda layer: layer(ids), layer)
        return y, vjp(g)[0].embedding[...]

    y, gradient = run(layer, ids, constrain(g, ("batch", "sequence", "hidden")))
    assert_bitwise(y, np.asarray(layer.embedding[...])[np.asarray(ids)])
    expected = np.zeros((V, H))
    np.add.at(expected, np.asarray(ids), np.asarray(g, np.float64))
    assert_close(gradient, expected, 4 * 2.0**-24)  # sums of at most three fp32 numbers


def test_an_id_outside_gives_nan() -> None:
    y = Embedding(V, H, rngs=nnx.Rngs(0))(jnp.array([[0, V], [-1, V - 1]]))
    assert jnp.isnan(y).all(-1).tolist() == [[False, True], [True, False]]


def test_ids_must_be_integers() -> None:
    with pytest.raises(TypeError, match="ids must be integers, got float32"):
        Embedding(V, H, rngs=nnx.Rngs(0))(jnp.ones((2, 2)))
