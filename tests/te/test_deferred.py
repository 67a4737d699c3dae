"""deferred_vjp on the ``te`` backend: TE's own operands wait for the GEMMs of the kernels' gradients."""

import pytest
from flax import nnx

from jax_te.layers import LayerNormMLP
from jax_te.ops import use_backend
from jax_te.recipe import autocast, recipe_from_name
from tests.support.meshes import shard
from tests.support.numerics import TOLERANCE, draw
from tests.training.test_deferred import assert_near, assert_same, by_halves, by_vjp

pytestmark = pytest.mark.te


@pytest.mark.parametrize("name", ["none", "delayed", "current", "block"])
def test_values_are_those_of_vjp(name: str) -> None:
    with use_backend("te"), autocast(recipe_from_name(name)):
        model, x = LayerNormMLP(128, 128, rngs=nnx.Rngs(0)), draw("x", (2, 64, 128))
        assert_same(by_halves(model, x), by_vjp(model, x))


@pytest.mark.parametrize("name", ["none", "delayed", "current"])
def test_on_every_mesh(mesh_mode: str, name: str) -> None:
    with use_backend("te"), autocast(recipe_from_name(name)):
        model, x = shard(LayerNormMLP(32, 64, rngs=nnx.Rngs(0))), draw("x", (4, 32, 32))
        assert_near(by_halves(model, x), by_vjp(model, x), 8 * TOLERANCE["float32"])
