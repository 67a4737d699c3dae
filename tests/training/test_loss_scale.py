"""Loss scalers: bounds that hold for every history, and Megatron's rule."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_te.training import ConstantLossScale, DynamicLossScale

update = jax.jit(lambda scaler, finite: scaler.update(finite))


class Megatron:
    """``DynamicGradScaler`` of Megatron-Core, with a largest scale."""

    def __init__(self, scaler: DynamicLossScale):
        self.options = scaler
        self.scale, self.growth, self.hysteresis = np.float32(scaler.initial_scale), 0, scaler.hysteresis

    def update(self, found_inf: bool):
        options = self.options
        if found_inf:
            self.growth = 0
            self.hysteresis -= 1
            if self.hysteresis <= 0:
                self.scale = max(self.scale * np.float32(options.backoff_factor), np.float32(options.min_scale))
        else:
            self.growth += 1
            if self.growth == options.growth_interval:
                self.growth = 0
                self.hysteresis = options.hysteresis
                self.scale = min(self.scale * np.float32(options.growth_factor), np.float32(options.max_scale))


histories = st.lists(st.booleans(), max_size=60)


@given(histories, st.integers(1, 3), st.integers(1, 3), st.integers(0, 8))
@settings(max_examples=60, deadline=None)
def test_it_follows_megatron(history, interval, hysteresis, exponent):
    # Options are static, so a new combination compiles: they are updated outside jit.
    scaler = DynamicLossScale(
        initial_scale=2.0**exponent, growth_interval=interval, hysteresis=hysteresis, min_scale=0.25, max_scale=2.0**9
    )
    reference = Megatron(scaler)
    for finite in history:
        scaler = scaler.update(jnp.asarray(finite))
        reference.update(not finite)
        assert float(scaler.scale) == float(reference.scale)
        assert int(scaler.growth_tracker) == reference.growth


@given(histories, st.sampled_from([(1e-30, 1.0, 3e38), (1.0, 2.0**100, 2.0**127), (2.0, 2.0, 2.0)]))
@settings(max_examples=40, deadline=None)
def test_the_scale_stays_within_its_bounds(history, bounds):
    low, start, high = bounds
    scaler = DynamicLossScale(
        initial_scale=start,
        growth_interval=1,
        growth_factor=2.0**40,
        backoff_factor=2.0**-40,
        hysteresis=1,
        min_scale=low,
        max_scale=high,
    )
    for finite in history:
        scaler = update(scaler, jnp.asarray(finite))
        assert math.isfinite(float(scaler.scale))
        assert np.float32(low) <= np.float32(scaler.scale) <= np.float32(high)


def test_long_runs_of_either_kind_end_at_the_bounds():
    for finite, bound in ((True, 2.0**32), (False, 1.0)):
        scaler = DynamicLossScale(initial_scale=2.0**16, growth_interval=1)
        for _ in range(80):
            scaler = update(scaler, jnp.asarray(finite))
        assert float(scaler.scale) == bound


def test_unscale_undoes_scale():
    scaler = DynamicLossScale(initial_scale=2.0**20)
    assert float(scaler.scale_loss(jnp.bfloat16(1.5))) == 1.5 * 2.0**20
    grads = scaler.unscale({"half": jnp.full(2, 2.0**10, jnp.float16)})
    assert grads["half"].dtype == jnp.float32
    np.testing.assert_array_equal(grads["half"], np.full(2, 2.0**-10, np.float32))
    for scale in (1.0, 4.0):
        for unscale in (ConstantLossScale(scale=scale).unscale, jax.jit(ConstantLossScale(scale=scale).unscale)):
            kept = unscale({"half": jnp.full(2, 8.0, jnp.float16)})
            assert kept["half"].dtype == jnp.float32
            assert kept["half"].tolist() == [8.0 / scale] * 2


def test_unscaled_gradients_may_be_donated():
    grads = {"single": jnp.ones(2)}
    ConstantLossScale().unscale(grads)["single"].delete()
    assert grads["single"].tolist() == [1.0, 1.0]


def test_scalers_are_pytrees():
    scaler = DynamicLossScale(initial_scale=8.0)
    leaves, treedef = jax.tree.flatten(scaler)
    assert len(leaves) == 3
    again = jax.tree.unflatten(treedef, leaves)
    assert (again.growth_interval, float(again.scale)) == (1000, 8.0)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(scaler)]
    assert names == [".scale", ".growth_tracker", ".hysteresis_tracker"]
    assert jax.tree.structure(jax.tree.map(lambda _: None, scaler)).num_leaves == 0
    assert not jax.tree.leaves(ConstantLossScale(scale=2.0))


def test_replaced_options_keep_the_scale_in_use():
    begun = update(update(DynamicLossScale(initial_scale=64.0, growth_interval=1, hysteresis=3), True), False)
    again = dataclasses.replace(begun, growth_interval=5)
    assert [float(x) for x in jax.tree.leaves(again)] == [float(x) for x in jax.tree.leaves(begun)] == [128.0, 0.0, 2.0]
    assert (again.growth_interval, again.initial_scale) == (5, 64.0)
    bounded = jax.jit(lambda scaler: dataclasses.replace(scaler, max_scale=100.0, hysteresis=1))(begun)
    assert (float(bounded.scale), int(bounded.hysteresis_tracker)) == (100.0, 1)
    assert float(dataclasses.replace(begun, initial_scale=16.0).scale) == 16.0
    assert float(dataclasses.replace(DynamicLossScale(), initial_scale=16.0).scale) == 16.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnScale(ConstantLossScale):
    pass


def test_the_structure_of_a_scaler_is_not_that_of_a_users_own():
    """With one structure a step that both have called could take one's program for the other."""
    assert jax.tree.structure(OwnScale(scale=2.0)) != jax.tree.structure(ConstantLossScale(scale=2.0))
    assert jax.tree.structure(ConstantLossScale(scale=2.0)) != jax.tree.structure(ConstantLossScale())
    assert jax.tree.structure(ConstantLossScale(scale=2.0)) == jax.tree.structure(ConstantLossScale(scale=2.0))


def test_scalers_have_a_hash():
    scaler, same = DynamicLossScale(initial_scale=8.0), DynamicLossScale(initial_scale=8.0)
    assert scaler == same
    assert len({scaler, same, DynamicLossScale(growth_interval=5), ConstantLossScale()}) == 3
    assert scaler != update(scaler, True)


def test_constant_scale_is_constant():
    scaler = ConstantLossScale(scale=4.0)
    assert scaler.update(jnp.asarray(False)) == scaler


@pytest.mark.parametrize(
    "options",
    [
        {"growth_interval": 0},
        {"hysteresis": 0},
        {"growth_factor": 1.0},
        {"growth_factor": math.inf},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"min_scale": 0.0},
        {"initial_scale": 0.5},
        {"initial_scale": 2.0**33},
        {"max_scale": math.inf},
        {"initial_scale": math.nan},
    ],
)
def test_options_outside_their_range(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        DynamicLossScale(**options)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_constant_scale_outside_its_range(scale):
    with pytest.raises(ValueError, match=r"scale must be (finite and > 0|a finite number), got"):
        ConstantLossScale(scale=scale)
