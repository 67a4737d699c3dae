"""Parameters that are changed beside the update: their masters follow, element by element, and all others stay."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.layers import LayerNormMLP, Linear, LoRA
from jax_te.quantize import QuantizedKernel
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, autocast
from jax_te.training import Optimizer, TrainState, create_train_state, make_train_step, value_and_grad
from tests.support.meshes import use_mesh

X = jnp.linspace(-1.0, 1.0, 32 * 32).reshape(32, 32)
RATE = 2.0**-10
TX = optax.sgd(RATE)


def loss_fn(model: Any, x: jax.Array, key: Any = None) -> jax.Array:
    """Without gradients for an input of zeros."""
    return jnp.mean(jnp.square(model(x).astype(jnp.float32) - 1.0)) * jnp.any(x != 0.0).astype(jnp.float32)


def build(dtype: Any = jnp.bfloat16, seed: int = 0) -> LayerNormMLP:
    return LayerNormMLP(32, 64, params_dtype=dtype, rngs=nnx.Rngs(seed))


def bits(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"uint{8 * array.itemsize}")


class Loop:
    """Both loops in one form: parameters and masters by name, and steps with given gradients."""

    def __init__(self, kind: str, model: Any, **options: Any):
        self.kind, self.model = kind, model
        if kind == "Optimizer":
            self.optimizer = Optimizer(model, TX, **options)
            self.train = nnx.jit(self._train)
        else:
            self.state: TrainState = create_train_state(model, TX, key=jax.random.key(0), **options)
            self.step = make_train_step(loss_fn, TX)

    @staticmethod
    def _train(model: Any, optimizer: Any, x: jax.Array) -> None:
        optimizer.update(model, value_and_grad(loss_fn)(model, x)[1])

    def run(self, x: jax.Array) -> None:
        if self.kind == "Optimizer":
            self.train(self.model, self.optimizer, x)
        else:
            self.state, _ = self.step(self.state, x)

    @property
    def params(self) -> dict[Any, Any]:
        state = nnx.state(self.model, nnx.Param) if self.kind == "Optimizer" else self.state.params
        return {path: variable.get_value() for path, variable in nnx.to_flat_state(state)}

    @property
    def masters(self) -> dict[Any, np.ndarray]:
        masters = self.optimizer.masters if self.kind == "Optimizer" else self.state.masters
        return {path: np.asarray(variable.get_value()) for path, variable in nnx.to_flat_state(masters)}

    def change(self, changes: dict[Any, Any]) -> None:
        if self.kind == "Optimizer":
            nnx.update(self.model, {name: nnx.Param(value) for name, value in changes.items()})
        else:
            flat = dict(nnx.to_flat_state(self.state.params))
            flat |= {(name,): flat[name,].replace(value) for name, value in changes.items()}
            self.state = dataclasses.replace(self.state, params=nnx.from_flat_state(list(flat.items())))


KINDS = pytest.mark.parametrize("kind", ["Optimizer", "make_train_step"])


def nearly(before: np.ndarray, after: np.ndarray) -> None:
    """Two values one step apart: gradients here are far below 2, so a step moves by less than 2 rates."""
    np.testing.assert_allclose(after, before, atol=2.0 * RATE, rtol=0.0)


@pytest.mark.costly("bf16-make_train_step", slow=("fp16-Optimizer", "bf16-Optimizer"))
@KINDS
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "fp16"])
def test_changed_elements_are_taken_over_and_the_others_keep_their_bits(kind, dtype):
    """A twin that is not changed gives the masters that the others must have, bit for bit."""
    loops = [Loop(kind, build(dtype)) for _ in range(2)]
    for loop in loops:
        loop.run(X.astype(dtype))  # masters have more bits than parameters from here on
    changed, twin = loops
    kernel = changed.params["wi_kernel",]
    assert (np.asarray(kernel, np.float32) != changed.masters["wi_kernel",]).any()
    mask = np.zeros(kernel.shape, bool)
    mask[3, 0, 5] = True
    changed.change({"wi_kernel": jnp.where(mask, jnp.asarray(7.0, dtype), kernel)})
    for loop in loops:
        loop.run(jnp.zeros_like(X, dtype))
    assert changed.masters["wi_kernel",][3, 0, 5] == 7.0
    assert float(changed.params["wi_kernel",][3, 0, 5]) == 7.0
    np.testing.assert_array_equal(bits(changed.masters["wi_kernel",])[~mask], bits(twin.masters["wi_kernel",])[~mask])
    for path in twin.masters.keys() - {("wi_kernel",)}:
        np.testing.assert_array_equal(bits(changed.masters[path]), bits(twin.masters[path]))


@pytest.mark.costly("Optimizer")
@KINDS
def test_loaded_weights_stay(kind):
    loop, loaded = Loop(kind, build()), nnx.state(build(seed=1), nnx.Param)
    loop.run(X.astype(jnp.bfloat16))
    # Copies: a step donates its state.
    new = {path[0]: jnp.copy(variable.get_value()) for path, variable in nnx.to_flat_state(loaded)}
    expected = {name: np.asarray(value, np.float32) for name, value in new.items()}
    loop.change(new)
    loop.run(X.astype(jnp.bfloat16))
    for name, value in expected.items():
        if (name,) in loop.masters:
            nearly(value, loop.masters[name,])


@pytest.mark.costly("Optimizer")
@KINDS
def test_a_skipped_step_changes_neither_and_the_next_one_takes_over(kind):
    loop = Loop(kind, build())
    loop.run(X.astype(jnp.bfloat16))
    kernel = loop.params["wo_kernel",]
    loop.change({"wo_kernel": jnp.zeros_like(kernel).at[0, 0].set(-0.0)})
    changed, masters = bits(loop.params["wo_kernel",]).copy(), loop.masters
    loop.run(X.at[0, 0].set(jnp.nan).astype(jnp.bfloat16))
    np.testing.assert_array_equal(bits(loop.params["wo_kernel",]), changed)
    for path, master in loop.masters.items():
        np.testing.assert_array_equal(bits(master), bits(masters[path]))
    loop.run(X.astype(jnp.bfloat16))
    nearly(np.zeros(kernel.shape, np.float32), loop.masters["wo_kernel",])


def test_equal_nans_and_zeros_of_either_sign_are_no_change():
    """fp16, in which a small master rounds to 0."""
    model = nnx.Linear(4, 1, use_bias=False, param_dtype=jnp.float16, rngs=nnx.Rngs(0))
    optimizer = Optimizer(model, TX)
    small = jnp.array([[1e-9], [-1e-9], [jnp.nan], [1.0 + 2.0**-20]], jnp.float32)
    optimizer.masters["kernel"].set_value(small)
    model.kernel.set_value(jnp.array([[-0.0], [0.0], [jnp.nan], [1.0]], jnp.float16))
    optimizer.update(model, nnx.state({"kernel": nnx.Param(jnp.zeros((4, 1)))}))
    np.testing.assert_array_equal(bits(optimizer.masters["kernel"].get_value()), bits(small))


@pytest.mark.costly(
    "current-Optimizer",
    slow=(
        "mxfp8-Optimizer",
        "block-Optimizer",
        "delayed-Optimizer",
        "mxfp8-make_train_step",
        "delayed-make_train_step",
        "block-make_train_step",
    ),
)
@KINDS
@pytest.mark.parametrize(
    "recipe",
    [DelayedScaling(amax_history_len=2), Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling()],
    ids=["delayed", "current", "block", "mxfp8"],
)
def test_kernels_stored_quantized(kind, recipe):
    """A replaced kernel's values become the masters; those of kernels that were not replaced keep their bits."""
    with autocast(recipe):
        loops = [Loop(kind, build(), fp8_param=True) for _ in range(2)]
        for loop in loops:
            for _ in range(2):
                loop.run(X.astype(jnp.bfloat16))
        changed, twin = loops
        other = create_train_state(build(seed=1), TX, key=jax.random.key(0), fp8_param=True)
        new: Any = other.params["wo_kernel"].get_value()
        assert isinstance(new, QuantizedKernel)
        value, scale = np.asarray(new.form.rowwise.values()), np.asarray(new.form.rowwise.scale_inv, np.float32)
        changed.change({"wo_kernel": new})
        for loop in loops:
            loop.run(jnp.zeros_like(X, jnp.bfloat16))
    # An old master that rounds to the new value, too, stays: it is off by at most half of E4M3's spacing.
    master = changed.masters["wo_kernel",]
    np.testing.assert_allclose(master, value, rtol=2.0**-4, atol=scale.max() * 2.0**-10)
    assert (master == value).mean() > 0.5
    np.testing.assert_array_equal(bits(changed.masters["wi_kernel",]), bits(twin.masters["wi_kernel",]))


@pytest.mark.costly
def test_merged_adapters_stay():
    model: Any = LoRA(Linear(32, 16, params_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), 4, rngs=nnx.Rngs(1))
    model.lora_b.set_value(jnp.ones_like(model.lora_b.get_value()))
    optimizer = Optimizer(model, TX)
    merged: Any = model.merge()
    kernel = np.asarray(merged.kernel.get_value(), np.float32)
    _, grads = value_and_grad(loss_fn)(model, X.astype(jnp.bfloat16))
    optimizer.update(model, grads)
    nearly(kernel, optimizer.masters["base"]["kernel"].get_value())


def test_weights_swapped_for_an_evaluation_and_back_leave_no_trace():
    loops = [Loop("Optimizer", build()) for _ in range(2)]
    for loop in loops:
        loop.run(X.astype(jnp.bfloat16))
    swapped, twin = loops
    own = jax.tree.map(jnp.copy, nnx.state(swapped.model, nnx.Param))
    average = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), swapped.optimizer.masters)
    nnx.update(swapped.model, jax.tree.map(lambda leaf: 0.5 * leaf, average))
    loss_fn(swapped.model, X.astype(jnp.bfloat16))
    nnx.update(swapped.model, own)
    for loop in loops:
        loop.run(X.astype(jnp.bfloat16))
    for path, master in twin.masters.items():
        np.testing.assert_array_equal(bits(swapped.masters[path]), bits(master))


@pytest.mark.costly("True-explicit", slow=["True-auto", "False-auto"])
@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("fp8_param", [False, True])
def test_split_masters_follow(mode, fp8_param):
    """Of fp32 kernels, too, whose masters are copies; gradients are added up once a step."""
    recipe = Float8CurrentScaling() if fp8_param else None
    with use_mesh(mode), autocast(recipe):
        options = {"distributed_optimizer": True, "fp8_param": fp8_param}
        state = create_train_state(build(jnp.float32), TX, key=jax.random.key(0), **options)
        other = create_train_state(build(jnp.float32, seed=1), TX, key=jax.random.key(0), **options)
        step = make_train_step(loss_fn, TX, microbatches=2, reduce_gradients="step")
        expected = {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(other.masters)}
        x = jnp.tile(X, (8, 1))[:, None]
        state, _ = step(state, x)
        state = dataclasses.replace(state, params=other.params)
        state, _ = step(state, x)
        assert "data" in str(state.masters["wo_kernel"].get_value().sharding.spec)
    # Of quantized kernels their values: FP8 rounds by up to 2^-4 of the value, below its least normal by less.
    for path, variable in nnx.to_flat_state(state.masters):
        rtol = 2.0**-4 if fp8_param and "kernel" in str(path) else 0.0
        np.testing.assert_allclose(variable.get_value(), expected[path], atol=2.0 * RATE, rtol=rtol)
