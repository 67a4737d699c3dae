"""Megatron's checkpointed call: its arguments, and the random streams of the function that it calls."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.layers import Linear
from jax_te.megatron import get_cuda_rng_tracker, model_parallel_cuda_manual_seed, te_checkpoint
from jax_te.quantize import QuantizerState
from jax_te.random import RNGStatesTracker, model_parallel_seed
from jax_te.recipe import DelayedScaling, autocast
from tests.support.numerics import assert_bitwise, draw, quick_jit, without_type_checker
from tests.support.states import merging

X = draw("x", (2, 8, 16))


def drop(x: jax.Array, *, rate: float) -> jax.Array:
    with get_cuda_rng_tracker().fork() as key:
        return x * jax.random.bernoulli(key, 1 - rate, x.shape).astype(x.dtype)


def run(states: Any, x: jax.Array, *, checkpointed: bool) -> Any:
    """Dropout three times, the second and the third of it in a checkpoint; output, mask by the gradient, states."""
    tracker = get_cuda_rng_tracker()
    tracker.set_states(states)

    def both(x: jax.Array, rate: float) -> jax.Array:
        return jnp.sin(drop(drop(jnp.sin(x), rate=rate), rate=rate))

    def loss(x: jax.Array, states: Any) -> Any:
        tracker.set_states(states)
        x = drop(x, rate=0.1)
        y = te_checkpoint(both, False, get_cuda_rng_tracker, "tensor", x, rate=0.2) if checkpointed else both(x, 0.2)
        return y.sum(), (y, tracker.get_states())

    gradient, (y, after) = jax.grad(loss, has_aux=True)(x, states)
    return gradient, y, after


def test_streams_go_on_and_masks_are_replayed() -> None:
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    states = get_cuda_rng_tracker().get_states()
    results = {}
    for checkpointed in (True, False):
        run_it = quick_jit(lambda states, x, c=checkpointed: run(states, x, checkpointed=c))
        results[checkpointed] = run_it(states, X)
    (gradient, y, after), (expected_gradient, expected_y, expected_after) = results[True], results[False]
    assert_bitwise(y, expected_y)
    assert_bitwise(gradient, expected_gradient)
    assert ((gradient == 0) == (y == 0)).all()  # one mask in both directions
    assert 0 < np.count_nonzero(np.asarray(y) == 0) < y.size
    assert {name: int(state.count) for name, state in after.items()} == {
        "data-parallel-rng": 0,
        "expert-parallel-rng": 0,
        "model-parallel-rng": 3,
    }
    assert jax.tree.structure(after) == jax.tree.structure(expected_after)
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)


def test_outside_of_a_trace_the_tracker_goes_on_too() -> None:
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    first, second = (te_checkpoint(drop, False, get_cuda_rng_tracker, None, X, rate=0.5) for _ in range(2))
    assert (first != second).any()
    states = get_cuda_rng_tracker().get_states()
    with pytest.raises(ZeroDivisionError):
        te_checkpoint(lambda x: drop(x, rate=0.5) + 1 / 0, False, get_cuda_rng_tracker, None, X)
    assert get_cuda_rng_tracker().get_states() == states  # as they were before the call that failed
    drop(X, rate=0.5)


def test_without_a_tracker_arguments_are_passed_on() -> None:
    """Also keywords that have the names of arguments of the checkpoint."""

    def call(x: Any, *rest: Any, policy: str, function: Any = None) -> Any:
        assert (rest, policy, function) == ((None, "mine"), "yours", 3)
        return 2 * x

    tracker = RNGStatesTracker()  # nothing was added
    for get in (None, lambda: tracker):
        loss = lambda x, get=get: te_checkpoint(call, False, get, None, x, None, "mine", policy="yours", function=3)  # noqa: E731
        assert jax.grad(loss)(3.0) == 2.0
    assert not tracker.is_initialized()


@pytest.mark.costly("False")
@pytest.mark.parametrize("distribute", [False, True])
def test_delayed_scaling_gets_its_next_state_once(distribute: bool) -> None:
    """A history of [3, 0] becomes [new, 3]: moved on by one place, although the layer runs twice."""
    tracker = model_parallel_seed(5)
    with autocast(DelayedScaling(amax_history_len=2)):
        layer = Linear(16, 16, rngs=nnx.Rngs(0))
        old = nnx.state(layer, QuantizerState)
        nnx.update(layer, jax.tree.map(lambda a: a.at[0].set(3.0) if a.ndim else a, old))

        def loss(layer: Any, checkpointed: bool) -> Any:
            layer = merging(layer)
            if checkpointed:
                return te_checkpoint(layer, distribute, lambda: tracker, "tensor", X).sum()
            return layer(X).sum()

        found, expected = (quick_jit(jax.grad(functools.partial(loss, checkpointed=c)))(layer) for c in (True, False))
    for (path, a), (_, e) in zip(*map(jax.tree_util.tree_leaves_with_path, (found, expected)), strict=True):
        assert_bitwise(a, e, what=jax.tree_util.keystr(path))
    for path, variable in nnx.to_flat_state(nnx.state(found, QuantizerState)):
        if path[-1] == "amax_history":
            assert variable[1] == 3.0
            assert variable[0] not in (0.0, 3.0)


def test_what_cannot_be_given_says_so() -> None:
    with without_type_checker():
        with pytest.raises(TypeError, match=r"tp_group.* None.* 'tensor'"):
            te_checkpoint(jnp.sin, False, None, object(), X)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"get_rng_state_tracker.* RNGStatesTracker.* dict"):
            te_checkpoint(jnp.sin, False, dict, None, X)  # type: ignore[arg-type]


def test_a_tracker_from_outside_of_a_trace_is_refused_as_by_a_fork_and_left_alone() -> None:
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    states = get_cuda_rng_tracker().get_states()
    for call in (
        lambda x: drop(x, rate=0.5),
        lambda x: te_checkpoint(drop, False, get_cuda_rng_tracker, None, x, rate=0.5),
    ):
        with pytest.raises(RuntimeError, match="made outside of the transformed function"):
            jax.jit(call)(X)
        assert get_cuda_rng_tracker().get_states() == states  # and no tracers
    plain = jax.jit(lambda x: te_checkpoint(jnp.sin, False, get_cuda_rng_tracker, None, x))
    assert_bitwise(plain(X), jax.jit(jnp.sin)(X))  # it draws nothing
