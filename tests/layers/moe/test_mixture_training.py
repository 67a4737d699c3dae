"""What training and its tools do with a whole layer of experts: router, experts, and the states of both."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.config import RouterOptions
from jax_te.layers import GroupedLoRA, MoE, lora_labels, prepare_quantization
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from jax_te.training import (
    Optimizer,
    calibrate_delayed_scaling,
    create_train_state,
    deferred_vjp,
    inspect_precision,
    make_inspection,
    make_train_step,
    sensitivity,
    value_and_grad,
)
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_close, draw
from tests.support.states import merging

E, H, F = 4, 32, 48
CURRENT, DELAYED = Float8CurrentScaling(), DelayedScaling(amax_history_len=2)
X = draw("x", (4, 8, H))
BIASED = {"score_function": "sigmoid", "enable_expert_bias": True, "bias_update_rate": 0.25, "aux_loss_coeff": 0.1}
LAYERS = {"experts.linear_fc1", "experts.linear_fc2"}


def build(rngs: nnx.Rngs) -> MoE:
    router = RouterOptions(num_experts=E, input_jitter_eps=0.1, **BIASED)
    shared = {"shared_expert_intermediate_size": F, "shared_expert_gate": True}
    return MoE(H, F, router, activation="swiglu", bias=False, **shared, rngs=rngs)


def loss_fn(model: MoE, batch: jax.Array, key: jax.Array | None) -> jax.Array:
    return jnp.mean(jnp.square(model(batch, key=key) - 1.0))


def states(tree: nnx.State) -> dict[str, np.ndarray]:
    return {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(tree)}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=lambda recipe: recipe.name)
def test_kernels_quantized_once_a_step_or_stored_change_nothing(recipe):
    """Beside kernels that are quantized in each microbatch; the same values, and the same states."""
    found = []
    for options, stored in (({"keep_kernels": False}, False), ({}, False), ({}, True)):
        tx = optax.sgd(0.1)
        with autocast(recipe):
            state = create_train_state(build, tx, key=jax.random.key(0), fp8_param=stored)
            step = make_train_step(loss_fn, tx, microbatches=2, **options)
            for _ in range(3):  # after two, the experts' loads may have pushed the bias there and back
                state, metrics = step(state, X)
        found.append((float(metrics["loss"]), states(state.quantizers)))
    (loss, plain), *others = found
    for other_loss, other in others:
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert plain.keys() == other.keys()
        for name, value in plain.items():
            np.testing.assert_allclose(other[name], value, rtol=1e-6, err_msg=name)
    assert np.any(plain["router.expert_bias"])


@pytest.mark.slow
def test_inspection_names_each_layer_and_changes_nothing():
    with autocast(CURRENT):
        model = build(nnx.Rngs(0))
        before = jax.tree.map(jnp.copy, nnx.state(model))
        found = inspect_precision(model, loss_fn, X)
        jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)
        tx = optax.sgd(0.1)
        state = create_train_state(build, tx, key=jax.random.key(0))
        of_step = make_inspection(loss_fn, microbatches=2)(state, X)
    names = {(tensor.module, tensor.role) for tensor in found}
    shared = {"shared_experts.linear_fc1", "shared_experts.linear_fc2"}
    assert names == {(layer, role) for layer in LAYERS | shared for role in ("x", "kernel", "grad")}
    assert names == {(tensor.module, tensor.role) for tensor in of_step}
    kernel = next(t for t in found if (t.module, t.role) == ("experts.linear_fc1", "kernel"))
    assert kernel.amax == float(jnp.max(jnp.abs(model.experts.linear_fc1.kernel[...])))


@pytest.mark.slow
def test_layers_are_ranked_without_a_count():
    model = build(nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.state(model))
    for recipe in (CURRENT, DELAYED):
        ranked = sensitivity(model, loss_fn, [X], recipe)
        assert {layer.module for layer in ranked} > LAYERS
        assert all(0.0 < layer.gradient_error < 1.0 for layer in ranked)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)


@pytest.mark.slow
def test_prepared_and_calibrated():
    model = prepare_quantization(build(nnx.Rngs(0)), DELAYED)
    expert_bias = model.router.expert_bias
    calibrate_delayed_scaling(model, loss_fn, X, DELAYED)
    assert model.router.expert_bias is expert_bias
    for layer in (model.experts.linear_fc1, model.experts.linear_fc2):
        assert layer.quantizers["x"]["amax_history"].shape == (E, 2)
        newest = layer.quantizers["kernel"]["amax_history"][:, 0]
        assert_bitwise(newest, jnp.max(jnp.abs(layer.kernel[...]).reshape(E, -1), axis=1))
    assert model.shared_experts.linear_fc1.quantizers["x"]["amax_history"].shape == (2,)
    assert prepare_quantization(model, None).experts.linear_fc1.quantizers is None
    assert model.router.expert_bias is expert_bias


@pytest.mark.slow
def test_kernel_gradients_may_wait():
    """Kernels' come later, and what the router counted at once, as those of its own parameters."""
    with autocast(DELAYED):
        model, key, g = build(nnx.Rngs(0)), jax.random.key(1), draw("g", X.shape)
        _, backward = deferred_vjp(lambda model, x: model(x, key=key), model, X)
        half = backward(g)
        later = half.backward_dw()
        wrt = nnx.DiffState(0, (nnx.Param, QuantizerState))
        grads = nnx.jit(nnx.grad(lambda model: jnp.sum(merging(model)(X, key=key) * g), argnums=wrt))(model)
    for name in ("linear_fc1", "linear_fc2"):
        assert_close(later.experts[name].kernel[...], grads.experts[name].kernel[...], TOLERANCE["float32"])
    assert_close(half.params.router.kernel[...], grads.router.kernel[...], TOLERANCE["float32"])
    assert np.sum(half.quantizers.router.expert_bias[...]) == 2 * X[..., 0].size
    assert_bitwise(half.quantizers.router.expert_bias[...], grads.router.expert_bias[...])


@pytest.mark.slow
def test_adapters_of_the_experts_are_trained_alone():
    tx = optax.multi_transform({"lora": optax.adam(1e-2), "frozen": optax.set_to_zero()}, lora_labels)

    def adapted(rngs: nnx.Rngs) -> MoE:
        model = build(rngs)
        model.experts.linear_fc1 = GroupedLoRA(model.experts.linear_fc1, 4, rngs=rngs)
        model.experts.linear_fc2 = GroupedLoRA(model.experts.linear_fc2, 4, rngs=rngs)
        return model

    with autocast(CURRENT):
        plain, model = build(nnx.Rngs(0)), adapted(nnx.Rngs(0))
        model.eval()
        plain.eval()
        output = nnx.jit(lambda model, x: model(x))
        assert_bitwise(output(model, X), output(plain, X))  # lora_b starts as zeros
        state = create_train_state(adapted, tx, key=jax.random.key(0))
        before = states(state.params)
        step, losses = make_train_step(loss_fn, tx, microbatches=2), []
        for _ in range(3):
            state, metrics = step(state, X)
            losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0]
    moved = {name for name, value in states(state.params).items() if np.any(value != before[name])}
    assert moved == {name for name in before if "lora" in name}
    assert np.any(state.model.router.expert_bias[...])


@pytest.mark.slow
def test_a_loop_of_flax_takes_all_states_along():
    """Under delayed scaling those of experts and of the router in one derivative."""
    with autocast(DELAYED):
        model = build(nnx.Rngs(0))
        optimizer = Optimizer(model, optax.adam(1e-2))
        before = states(nnx.state(model, QuantizerState))

        @nnx.jit
        def step(model, optimizer, x, key):
            _, grads = value_and_grad(lambda model: loss_fn(model, x, key))(model)
            optimizer.update(model, grads)

        step(model, optimizer, X, jax.random.key(1))
    after = states(nnx.state(model, QuantizerState))
    for name in ("router.expert_bias", "experts.linear_fc2.quantizers.grad.amax_history"):
        assert np.any(after[name] != before[name])
