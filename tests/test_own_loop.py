"""Loops of one's own under delayed scaling: a derivative that leaves the quantizer state out raises."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jax_te import ParallelConfig, autocast, linen, make_mesh
from jax_te.errors import QuantizerStateError
from jax_te.layers import LayerNormMLP, Linear, LoRA, TransformerLayer
from jax_te.models import run_layers
from jax_te.ops import dense
from jax_te.quantize import QuantizerState, frozen_scales, init_gemm_state
from jax_te.recipe import DelayedScaling, Float8CurrentScaling
from jax_te.remat import remat
from jax_te.training import DynamicLossScale, create_train_state, make_train_step
from tests.support.meshes import use_mesh
from tests.support.numerics import NO_DROPOUT
from tests.support.states import merging

RECIPE = DelayedScaling(amax_history_len=2)
LEFT_OUT = "leaves the quantizer state out"
EVERYTHING = nnx.Any(nnx.Param, QuantizerState)


def mlp() -> LayerNormMLP:
    return LayerNormMLP(32, 32, rngs=nnx.Rngs(0))


def loss_fn(model: Any, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(model(x)))


X = jnp.linspace(-1.0, 1.0, 16 * 32).reshape(16, 32)


@pytest.fixture(autouse=True)
def recipe():
    with autocast(RECIPE):
        yield


def test_the_usual_loop_of_flax_raises_and_its_message_mends_it():
    model = mlp()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def wrong(model, optimizer, x):
        optimizer.update(model, nnx.value_and_grad(loss_fn)(model, x)[1])

    with pytest.raises(QuantizerStateError, match=LEFT_OUT) as error:
        wrong(model, optimizer, X)
    # The two lines of the message, in place of the loop's own.
    lines = [line.strip() for line in str(error.value).splitlines() if line.startswith("    ")]
    assert len(lines) == 2

    @nnx.jit
    def right(model, optimizer, x):
        names = {"loss_fn": loss_fn, "model": model, "x": x}
        exec("\n".join(lines).replace("(model)", "(model, x)"), names)
        optimizer.update(model, names["grads"])

    right(model, optimizer, X)
    history = nnx.state(model)["quantizers_1"]
    assert max(jax.tree.leaves(jax.tree.map(jnp.max, history))) > 0.0


def ways(run: Any) -> dict[str, Any]:
    """``run(params, x)`` under each transformation."""

    def in_shard_map(params, x):
        mesh = make_mesh(ParallelConfig(data=2))
        return jax.shard_map(run, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)(params, x)

    def in_scan(params, x):
        return jax.lax.scan(lambda total, _: (total + run(params, x), None), 0.0, None, length=2)[0]

    return {
        "plain": run,
        "jit": jax.jit(run),
        "remat": jax.checkpoint(run),
        "remat of a jit": jax.checkpoint(jax.jit(run)),
        "scan": in_scan,
        "vmap": lambda params, x: jnp.sum(jax.vmap(run, in_axes=(None, 0))(params, x[None])),
        "shard_map": in_shard_map,
        "sharded remat": lambda params, x: remat(
            lambda x: run(params, x[0]), x[None], policy="full", distribute_saved_activations=True
        ),
    }


WAYS = list(ways(len))
FEW = ["plain", "scan", "shard_map"]


def nnx_run() -> tuple[Any, Any]:
    graphdef, params, rest = nnx.split(mlp(), nnx.Param, ...)
    return lambda params, x: loss_fn(nnx.merge(graphdef, params, rest), x), params


def linen_run() -> tuple[Any, Any]:
    layer = linen.LayerNormMLP(32, 32)
    variables = layer.init(jax.random.key(0), X)
    return lambda params, x: loss_fn(functools.partial(layer.apply, {**variables, "params": params}), x), variables[
        "params"
    ]


def function_run() -> tuple[Any, Any]:
    state = init_gemm_state(RECIPE)
    return lambda kernel, x: jnp.sum(jnp.square(dense(x, kernel, recipe=RECIPE, state=state))), jnp.ones((32, 16))


CASES = [(function_run, way, argnums) for way in WAYS for argnums in (0, 1)]
CASES += [(make, way, 0) for make in (nnx_run, linen_run) for way in FEW]


@pytest.mark.costly("linen_run-plain-0", slow=("linen_run-scan-0",))
@pytest.mark.parametrize(("make", "way", "argnums"), CASES)
def test_leaving_the_state_out_raises(make, way, argnums):
    """Parameters alone, and inputs alone."""
    run, params = make()
    differentiate = jax.grad(ways(run)[way], argnums=argnums)
    with pytest.raises(QuantizerStateError, match=LEFT_OUT):
        jax.eval_shape(differentiate, params, X)
    with frozen_scales():
        jax.eval_shape(differentiate, params, X)


@pytest.mark.costly("auto-plain", "explicit-plain", slow=("auto-remat", "explicit-remat"))
@pytest.mark.parametrize("way", ["plain", "remat", "scan"])
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
def test_leaving_the_state_out_raises_on_a_mesh(way, axis_type):
    with use_mesh(axis_type):
        run, params = nnx_run()
        x = X.reshape(2, 8, 32).repeat(2, 0)
        with pytest.raises(QuantizerStateError, match=LEFT_OUT):
            jax.eval_shape(jax.grad(ways(run)[way]), params, x)


def test_lora_raises_without_the_state_of_its_base():
    layers = nnx.List([LoRA(Linear(32, 32, rngs=nnx.Rngs(i)), 4, rngs=nnx.Rngs(i)) for i in range(2)])

    def loss(layers):
        layers = merging(layers)
        return loss_fn(lambda x: layers[1](layers[0](x)), X)

    def differentiate(wrt):
        return nnx.grad(loss, argnums=nnx.DiffState(0, wrt))(layers)

    with pytest.raises(QuantizerStateError, match=LEFT_OUT):
        differentiate(nnx.LoRAParam)
    differentiate(nnx.Any(nnx.LoRAParam, QuantizerState))


@pytest.mark.costly
def test_a_stack_of_layers_in_a_loop_raises():
    options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    layers = nnx.List([TransformerLayer(32, 32, 2, **(NO_DROPOUT | options), rngs=nnx.Rngs(i)) for i in range(2)])

    def loss(layers):
        return jnp.sum(run_layers(merging(layers), X[None], [None, None], scan=True))

    with pytest.raises(QuantizerStateError, match=LEFT_OUT):
        nnx.eval_shape(nnx.grad(loss), layers)
    nnx.eval_shape(nnx.grad(loss, argnums=nnx.DiffState(0, EVERYTHING)), layers)


def test_what_does_not_need_the_state_does_not_raise():
    model = mlp()

    def differentiate():
        jax.eval_shape(jax.grad(lambda x: loss_fn(model, x)), X)

    jax.eval_shape(model, X)
    model.eval()
    differentiate()
    model.train()
    with pytest.raises(QuantizerStateError, match=LEFT_OUT):
        differentiate()
    for other in (Float8CurrentScaling(), None):
        with autocast(other):
            differentiate()


@pytest.mark.costly("auto")
@pytest.mark.parametrize("mesh", ["no mesh", "auto"])
def test_frozen_scales_stay_where_the_state_is_differentiated_too(mesh):
    state = {
        role: {"scale": jnp.float32(2.0), "amax_history": jnp.float32([3.0, 4.0])} for role in ("x", "kernel", "grad")
    }
    with use_mesh(mesh):

        def loss(x, state):
            return jnp.sum(jnp.square(dense(x, jnp.ones((32, 16)), recipe=RECIPE, state=merging(state))))

        frozen = jax.jit(jax.grad(loss, argnums=(0, 1)))
        with frozen_scales():
            dx, after = frozen(X, state)
        moved_dx, moved = frozen(X, state)
    np.testing.assert_array_equal(dx, moved_dx)
    jax.tree.map(np.testing.assert_array_equal, after, state)
    assert float(moved["x"]["amax_history"][0]) == 1.0


@pytest.mark.parametrize("run", [lambda model: jax.eval_shape(model, X), lambda model: model(X, True)])
def test_a_state_of_another_history_raises(run):
    with autocast(DelayedScaling(amax_history_len=8)):
        model = mlp()
    with pytest.raises(QuantizerStateError, match=r"histories of 8, and .* needs 2\..* prepare_quantization"):
        run(model)


@pytest.mark.slow
def test_64_bits_change_nothing():
    """Dtypes and values of a train step's state: fp32 and int32, whatever the default is."""

    def steps():
        model_of = lambda rngs: Linear(32, 32, params_dtype=jnp.bfloat16, rngs=rngs)  # noqa: E731
        # Not Adam, whose powers of its decays are more exact in 64 bits.
        tx = optax.sgd(1e-2, momentum=0.9)
        state = create_train_state(model_of, tx, key=jax.random.key(0), scaler=DynamicLossScale())
        step = make_train_step(lambda model, x, key: jnp.mean(jnp.square(model(x)) - 1.0), tx, microbatches=2)
        for _ in range(2):
            state, metrics = step(state, np.tile(X, (2, 1)).astype(jnp.bfloat16))
        return [
            np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.masters, state.quantizers, metrics))
        ], [leaf.dtype for leaf in jax.tree.leaves(state)]

    values, dtypes = steps()
    with jax.enable_x64(True):
        wide_values, wide_dtypes = steps()
    assert wide_dtypes == dtypes
    for wide, value in zip(wide_values, values, strict=True):
        assert wide.dtype == value.dtype
        # A few last bits of sums in fp32, and with them one of bf16.
        bound = 2.0**-8 if value.dtype == jnp.bfloat16 else 2.0**-20
        wide, value = (array.astype(np.float32) for array in (wide, value))
        np.testing.assert_allclose(wide, value, rtol=0.0, atol=bound * np.abs(value).max())
