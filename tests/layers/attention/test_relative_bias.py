"""RelativePositionBias against its formula, distance by distance."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.layers import RelativePositionBias
from jax_te.layers.attention.relative_bias import relative_buckets
from tests.support.meshes import shard
from tests.support.numerics import assert_bitwise, draw

N = 4


def bucket(distance: int, buckets: int, farthest: int, bidirectional: bool) -> int:
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    steps = math.log(distance / exact) / math.log(farthest / exact) * (buckets - exact)
    return first + min(exact + int(steps + 1e-6), buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 20)])
def test_buckets(bidirectional, buckets, farthest):
    distances = np.arange(-300, 301)
    got = relative_buckets(distances, buckets, farthest, bidirectional=bidirectional)
    assert got.tolist() == [bucket(int(d), buckets, farthest, bidirectional) for d in distances]


@pytest.mark.costly("auto", "explicit")
def test_each_head_gets_its_buckets_number(mesh_mode):
    layer = RelativePositionBias(N, num_buckets=8, max_distance=10, bidirectional=False, rngs=nnx.Rngs(0))
    table = draw("table", (8, N))
    layer.embedding.set_value(table)
    layer = shard(layer)
    bias = jax.jit(lambda layer: layer(3, 5, offset=2))(layer)
    assert bias.shape == (1, N, 3, 5)
    expected = np.array([[bucket(j - i - 2, 8, 10, False) for j in range(5)] for i in range(3)])
    assert_bitwise(bias[0], np.moveaxis(np.asarray(table)[expected], -1, 0))
    gradient = jax.jit(jax.grad(lambda layer: layer(3, 5, offset=2).sum()))(layer)
    counts = np.bincount(expected.ravel(), minlength=8)
    assert_bitwise(gradient.embedding[...], np.repeat(counts[:, None], N, 1).astype(np.float32))
    if mesh_mode != "no mesh":
        assert bias.sharding.spec[1] == "tensor"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_buckets": 6}, "num_buckets must be divisible by 4, got 6"),
        ({"num_buckets": 5, "bidirectional": False}, "num_buckets must be divisible by 2, got 5"),
        ({"max_distance": 8}, "max_distance 8 must exceed the 8 distances that have a bucket each"),
    ],
)
def test_bad_sizes_say_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        RelativePositionBias(N, **options, params_dtype=jnp.float32, rngs=nnx.Rngs(0))
