"""Arithmetic on the codes and scales of a stored kernel raises, or makes the kernel's values nan; no other use does."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.layers import Linear
from jax_te.ops import dense, quantize_kernel
from jax_te.quantize import QuantizedKernel
from jax_te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    autocast,
)
from jax_te.training import create_train_state, make_train_step
from tests.support.numerics import assert_bitwise

RECIPE = Float8CurrentScaling()
RECIPES = {
    "delayed": DelayedScaling(amax_history_len=1),
    "current": RECIPE,
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
MASK = jnp.ones((32, 32), bool).at[0].set(False)


@pytest.fixture(autouse=True)
def as_users_run() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def stored(seed: int = 0, recipe: Recipe = RECIPE, layers: int = 0) -> QuantizedKernel:
    """A kernel as a parameter holds it; of each layer in a stack, if there are ``layers``."""
    values = jax.random.normal(jax.random.key(seed), (layers or 1, 32, 32)) * 10.0**seed
    with autocast(recipe):
        kernels = jax.vmap(lambda value: Linear(32, 32, rngs=nnx.Rngs(0)).quantized("kernel", value, portable=True))
        kernel = dataclasses.replace(kernels(values), shape=values.shape)
    return kernel if layers else jax.tree.map(operator.itemgetter(0), kernel).of_layer(2)


def of_both(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda ours, theirs: jax.tree.map(fn, ours, theirs)


def in_fp32(ours: Any, theirs: Any) -> Any:
    return (0.9 * ours.astype(jnp.float32) + 0.1 * theirs.astype(jnp.float32)).astype(ours.dtype)


RAISES = {
    "mean of two": of_both(lambda a, b: 0.5 * (a + b)),
    "moving average": of_both(lambda a, b: 0.9 * a + 0.1 * b),
    "optax's": lambda p, q: optax.incremental_update(p, q, 0.1),
    "decay": of_both(lambda a, _: a * 0.99),
    "mean": of_both(lambda a, b: jnp.mean(jnp.stack([a, b]), axis=0)),
    "cast": lambda p, _: optax.tree.cast(p, jnp.bfloat16),
    "of NumPy": of_both(lambda a, b: 0.9 * np.asarray(a) + 0.1 * np.asarray(b)),
    "mask": of_both(lambda a, _: jnp.where(MASK, a, 0)),
    "factor": of_both(lambda a, _: a * MASK),
}
NAN = {
    "sum": of_both(operator.add),
    "optax's": lambda p, q: optax.apply_updates(p, q),
    "difference": of_both(operator.sub),
    "product": of_both(operator.mul),
    "sign": of_both(lambda a, _: -a),
    "mean of two, cast back": of_both(lambda a, b: (0.5 * (a + b)).astype(a.dtype)),
    "moving average, cast back": of_both(lambda a, b: (0.9 * a + 0.1 * b).astype(a.dtype)),
    "moving average in fp32": of_both(in_fp32),
    "decay, cast back": of_both(lambda a, _: (a * 0.99).astype(a.dtype)),
    "threshold": of_both(lambda a, _: jnp.where(jnp.abs(a) < 1e-3, 0, a)),
    "threshold as factor": of_both(lambda a, _: a * (jnp.abs(a) >= 1e-3)),
    "clipped": of_both(lambda a, _: jnp.clip(a, -1, 1)),
}
PASSES = {
    "copy": of_both(lambda a, _: jnp.copy(a)),
    "NumPy": of_both(lambda a, _: np.asarray(a)),
    "device": lambda p, _: jax.device_put(p, jax.devices()[1]),
    "selected": of_both(lambda a, b: jnp.where(True, a, b)),
    "jit": lambda p, _: jax.jit(lambda p: p, donate_argnums=0)(jax.tree.map(jnp.copy, p)),
    "loop": lambda p, _: jax.lax.fori_loop(0, 2, lambda _, p: p, p),
    "remat": lambda p, _: jax.checkpoint(lambda p: p)(p),
    "pickle": lambda p, _: pickle.loads(pickle.dumps(p)),
    "deepcopy": lambda p, _: copy.deepcopy(p),
    "taken from a stack": lambda p, _: jax.tree.map(lambda a: jnp.stack([a, a])[0], p),
    "of a Variable": lambda p, _: nnx.merge(*nnx.split(nnx.Dict(kernel=nnx.Param(p)))).kernel.get_value(),
}


def forward(kernel: QuantizedKernel) -> jax.Array:
    return dense(jnp.ones((16, 32), jnp.bfloat16), kernel, recipe=RECIPE)


@pytest.mark.costly("mean of two", slow=("moving average",))
@pytest.mark.parametrize("name", RAISES)
def test_what_changes_a_dtype_or_shape_raises(name: str) -> None:
    with pytest.raises(TypeError, match=r"codes and their scales.*masters.*dequantize"):
        forward(RAISES[name](stored(0), stored(1)))


def test_it_raises_within_jit_too() -> None:
    with pytest.raises(TypeError, match=r"codes and their scales.*masters.*dequantize"):
        jax.eval_shape(RAISES["moving average"], stored(0), stored(1))


@pytest.mark.costly("sum", slow=("optax's",))
@pytest.mark.parametrize("name", NAN)
def test_what_changes_values_alone_gives_nan(name: str) -> None:
    changed = NAN[name](stored(0), stored(1))
    assert np.isnan(np.asarray(forward(changed), np.float32)).all()
    assert np.isnan(changed.dequantize()).all()
    # Not all: a code that overflowed to nan equals every value's under a scale that is nan.
    assert np.isnan(changed.taken_over(jnp.ones((32, 32)))).any()


@pytest.mark.parametrize("name", PASSES)
def test_what_computes_nothing_passes(name: str) -> None:
    kernel = stored()
    same = PASSES[name](kernel, stored(1))
    assert_bitwise(same.dequantize(), kernel.dequantize())
    assert_bitwise(forward(same), forward(kernel))


@pytest.mark.costly("current-3")
@pytest.mark.wide("delayed-0", "current-3")
@pytest.mark.parametrize(("name", "layers"), [("delayed", 0), ("current", 3), ("block", 3), ("mxfp8", 0), ("nvfp4", 3)])
def test_every_recipe(name: str, layers: int) -> None:
    """In a stack each layer by itself."""
    p, q = stored(0, RECIPES[name], layers), stored(1, RECIPES[name], layers)
    with pytest.raises(TypeError, match="codes"):
        optax.incremental_update(p, q, 0.1)
    summed = jax.tree.map(operator.add, p, q)
    assert np.isnan(np.asarray(summed.dequantize(), np.float32)).all()
    assert not np.isnan(np.asarray(p.dequantize(), np.float32)).any()
    if layers:
        mixed = jax.tree.map(lambda a, b: a.at[1].set(b[1]), p, summed)
        values = np.asarray(mixed.dequantize(), np.float32)
        assert np.isnan(values).all(axis=(1, 2)).tolist() == [False, True, False]
        assert_bitwise(values[[0, 2]], np.asarray(p.dequantize(), np.float32)[[0, 2]])


@pytest.mark.parametrize(
    "fn",
    [
        lambda leaf: None,
        lambda leaf: object(),
        lambda leaf: jax.P(),
        lambda leaf: leaf.sharding,
        lambda leaf: leaf.dtype,
        lambda leaf: leaf.nbytes,
        lambda leaf: np.prod(leaf.shape),
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32),
        lambda leaf: jnp.isfinite(leaf),
        lambda leaf: np.zeros(leaf.shape, jax.dtypes.float0),
    ],
)
def test_trees_of_other_things_can_be_built(fn: Callable[[Any], Any]) -> None:
    assert isinstance(jax.tree.map(fn, stored()), QuantizedKernel)


def test_a_train_step_shows_it() -> None:
    """By a loss that is nan: the sum of two runs' parameters."""

    def loss_fn(model: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(model(x)))

    with autocast(RECIPE):
        first, second = (
            create_train_state(Linear(32, 32, rngs=nnx.Rngs(s)), optax.sgd(0.1), key=jax.random.key(0), fp8_param=True)
            for s in range(2)
        )
        step = make_train_step(loss_fn, optax.sgd(0.1))
        x = jnp.ones((16, 32))
        summed = dataclasses.replace(first, params=jax.tree.map(operator.add, first.params, second.params))
        assert np.isnan(step(summed, x)[1]["loss"])
        with pytest.raises(TypeError, match="codes"):
            jax.tree.map(lambda a, b: 0.5 * (a + b), first.params, second.params)


def test_a_kept_kernel_has_none() -> None:
    """Not a parameter: no user's code computes with it."""
    assert quantize_kernel(jnp.ones((32, 16)), recipe=RECIPE).guard is None
