"""The functions and calling conventions of Transformer Engine for PyTorch."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te import layers, te_pytorch
from jax_te.layers.attention.kv_cache import init_kv_cache
from jax_te.random import RNGStatesTracker
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, current_recipe
from tests.support.numerics import NO_DROPOUT, assert_bitwise, draw, without_type_checker

CURRENT = Float8CurrentScaling()


@pytest.mark.parametrize(
    ("arguments", "named", "recipe"),
    [
        ((), {}, DelayedScaling()),
        ((True,), {}, DelayedScaling()),
        ((False,), {}, None),
        ((True, False, CURRENT), {}, CURRENT),
        ((True, False, CURRENT, None), {}, CURRENT),
        ((), {"recipe": CURRENT}, CURRENT),
        ((), {"enabled": False, "recipe": CURRENT}, None),
    ],
)
def test_contexts_take_transformer_engines_arguments(arguments: Any, named: dict[str, Any], recipe: Any):
    with te_pytorch.autocast(*arguments, **named):
        assert current_recipe() == recipe
    with te_pytorch.fp8_autocast(*arguments, **{name.replace("recipe", "fp8_recipe"): named[name] for name in named}):
        assert current_recipe() == recipe
    assert current_recipe() is None


def test_what_cannot_be_followed_says_so():
    with pytest.raises(ValueError, match=r"calibrating=True.*observe_quantization"):
        te_pytorch.fp8_autocast(calibrating=True)
    with without_type_checker():
        with pytest.raises(TypeError, match=r"must be None, got 'world'.*tp_only_amax_red"):
            te_pytorch.fp8_autocast(fp8_group="world")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"recipe must be a Recipe or None, got .*forget the parentheses"):
            te_pytorch.autocast(recipe=DelayedScaling).__enter__()  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="enabled must be True or False"):
            te_pytorch.autocast("yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tp_group must be None or the mesh axis 'tensor'"):
        te_pytorch.checkpoint(jnp.sin, False, None, "data", jnp.ones(2))


def scaled(x: jax.Array, *, factor: float) -> jax.Array:
    return factor * jnp.sin(x)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), {}),
        ((False, None, None), {}),
        ((False, None, "tensor"), {}),
        ((), {"distribute_saved_activations": False, "tp_group": "tensor", "use_reentrant": False}),
    ],
)
def test_checkpoint_takes_its_options_in_front_or_as_keywords(options: Any, named: dict[str, Any]):
    def run(x: jax.Array) -> jax.Array:
        return te_pytorch.checkpoint(scaled, *options, x, factor=2.0, **named).sum()

    x = draw("x", (4,))
    assert_bitwise(jax.grad(run)(x), jax.grad(lambda x: scaled(x, factor=2.0).sum())(x))
    assert "remat" in str(jax.make_jaxpr(jax.grad(run))(x))


def test_a_function_may_take_a_flag_first():
    """Two arguments behind the function cannot be the three options."""
    assert te_pytorch.checkpoint(lambda flag, x: x if flag else -x, True, jnp.ones(())).item() == 1.0


@pytest.mark.parametrize("name", ["get_cuda_rng_tracker", "get_rng_state_tracker", ""])
def test_checkpoint_replays_a_trackers_streams(name: str):
    tracker = RNGStatesTracker()
    tracker.add("dropout", 1)

    def drop(x: jax.Array) -> jax.Array:
        with tracker.fork("dropout") as key:
            return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0)

    x = jnp.ones(64)
    if name:
        y = te_pytorch.checkpoint(drop, x, **{name: lambda: tracker})
    else:
        y = te_pytorch.checkpoint(drop, False, lambda: tracker, None, x)
    assert 0 < y.sum() < 64
    assert tracker.get_states()["dropout"].count == 1


@pytest.mark.costly
def test_a_layer_is_called_with_transformer_engines_arguments(caplog: pytest.LogCaptureFixture):
    x = draw("x", (2, 4, 32))
    kinds = te_pytorch.TransformerLayer, layers.TransformerLayer
    layer, base = (kind(32, 64, 2, **NO_DROPOUT, rngs=nnx.Rngs(0)) for kind in kinds)
    expected = base(x)
    assert_bitwise(layer(hidden_states=x), expected)
    with caplog.at_level(logging.INFO, logger="jax_te"):
        assert_bitwise(layer(x, jnp.ones((2, 1, 4, 4), bool), None, None, None, True), expected)
    cache = init_kv_cache(2, 8, 2, 16)
    y, after = layer(x, inference_params=cache)
    assert after.length == 4
    assert_bitwise(y, base(x, cache=cache)[0])


@pytest.mark.parametrize(
    "name",
    [
        *("Linear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "RMSNorm", "DotProductAttention"),
        *("MultiheadAttention", "Fp8Padding", "Fp8Unpadding"),
    ],
)
def test_the_other_layers_are_those_of_jax_te(name: str):
    assert getattr(te_pytorch, name) is getattr(layers, name)
    assert name in te_pytorch.__all__
