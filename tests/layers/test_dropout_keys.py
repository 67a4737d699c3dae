"""What a layer drops is drawn from one key, and no two of its draws from the same one."""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import MoEOptions, ParallelConfig, RouterOptions
from jax_te.layers import TransformerLayer, drop_path, dropout
from jax_te.ops import undo_zigzag
from jax_te.random import Purpose
from jax_te.sharding import make_mesh
from tests.support.numerics import assert_bitwise, draw, quick_jit

B, S, H = 2, 6, 16
X, ENCODED = draw("x", (B, S, H)), draw("encoded", (B, S, H))
KEY = jax.random.key(7)
DRAWS = ("bernoulli", "bits", "normal", "uniform")


def make_layer() -> TransformerLayer:
    """A decoder's layer that draws for all that a layer can draw for."""
    return TransformerLayer(
        H,
        H,
        2,
        layer_type="decoder",
        hidden_dropout=0.5,
        attention_dropout=0.5,
        drop_path_rate=0.5,
        experts=MoEOptions(router=RouterOptions(num_experts=4, input_jitter_eps=0.1, force_biased=0.5)),
        rngs=nnx.Rngs(0),
    )


def call(layer: TransformerLayer, x: Any, key: Any = KEY) -> Any:
    return layer(x, encoder_output=ENCODED, dropout_key=key)


@pytest.mark.slow
def test_no_key_is_drawn_from_twice(monkeypatch):
    """Masks that share a key have the same bits. A key that is drawn from is no parent of others, either."""
    found: list[bytes] = []
    for name in DRAWS:
        original = getattr(jax.random, name)

        def recorded(key: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
            # By a callback, because masks are drawn with a batch of keys, one for each position.
            jax.debug.callback(lambda data: found.append(np.asarray(data).tobytes()), jax.random.key_data(key))
            return original(key, *args, **kwargs)

        monkeypatch.setattr(jax.random, name, recorded)
    layer = make_layer()
    found.clear()
    quick_jit(call)(layer, X)
    jax.effects_barrier()
    # Attention twice; dropout of three blocks at each position, and of each block whole; the router's input and choice.
    assert len(found) == 2 + 3 * (S + 1) + 3
    assert max(Counter(found).values()) == 1


def test_dropout_and_stochastic_depth_from_one_key():
    ones, axes = jnp.ones((64, 1)), (None, None)
    masks = [fn(ones, 0.5, KEY, axes=axes) != 0.0 for fn in (dropout, drop_path)]
    assert not bool((masks[0] == masks[1]).all())
    assert_bitwise(dropout(ones, 0.5, KEY, axes=axes), dropout(ones, 0.5, KEY, axes=axes))


def test_purposes_and_numbers_do_not_meet():
    """Layers, microbatches and positions are numbered; 2^20 is more than there are of either."""
    numbers = [zlib.crc32(purpose.encode()) for purpose in get_args(Purpose)]
    assert len({*numbers}) == len(numbers)
    assert min(numbers) >= 2**20


@pytest.mark.slow
def test_recomputation_draws_the_same():
    layer = make_layer()
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

    def run(params: Any, x: Any) -> Any:
        return call(nnx.merge(graphdef, params, rest), x)

    plain, again = (jax.jit(lambda *args, fn=fn: jax.vjp(fn, *args)[1](X)) for fn in (run, jax.checkpoint(run)))
    jax.tree.map(assert_bitwise, plain(params, X), again(params, X))


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_a_position_has_its_mask_in_zigzag_order_whatever_the_implementation(implementation):
    key, x = jax.random.key(3, impl=implementation), jnp.ones((2, 16, 8))
    axes = ("batch", "sequence", "hidden")
    expected = dropout(x, 0.5, key, axes=axes)
    with jax.set_mesh(make_mesh(ParallelConfig(context=2))):
        found = jax.jit(lambda x: undo_zigzag(dropout(x, 0.5, key, axes=axes, zigzag=True)))(x)
    assert 0.3 < float(jnp.mean(expected == 0.0)) < 0.7
    np.testing.assert_array_equal(jax.device_get(found), expected)
