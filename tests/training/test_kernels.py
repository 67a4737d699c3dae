"""Kernels in a train step: quantized once a step, fp32 gradients, held in FP8 or FP4, layers that are used twice."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.config import ParallelConfig
from jax_te.layers import LayerNormMLP, Linear
from jax_te.models import StackInput
from jax_te.quantize import BlockQuantizer, QuantizedKernel
from jax_te.recipe import (
    RECIPES,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    ModuleRecipe,
    autocast,
    recipe_from_name,
)
from jax_te.sharding import make_mesh
from jax_te.training import PipelinedLoss, change_recipe, create_train_state, make_train_step
from jax_te.training.masters import full_precision
from tests.support.toy import assert_same

QUANTIZED = [name for name in RECIPES if name != "none"]
TX = optax.adam(1e-2)


class Net(nnx.Module):
    """Two quantizable layers, the first of them called ``calls`` times."""

    def __init__(self, rngs: nnx.Rngs, *, dtype=jnp.float32, calls: int = 1):
        self.mlp = LayerNormMLP(32, 64, params_dtype=dtype, rngs=rngs)
        self.head = Linear(32, 32, params_dtype=dtype, rngs=rngs)
        self.calls = calls

    def __call__(self, x):
        for _ in range(self.calls):
            x = x + self.mlp(x)
        return self.head(x)


def loss_fn(model, batch, key):
    return jnp.mean(jnp.square(model(batch).astype(jnp.float32)))


def batch(dtype=jnp.float32, size: int = 8):
    return jax.random.normal(jax.random.key(3), (size, 32, 32)).astype(dtype)


def run(recipe, *, steps: int = 3, microbatches: int = 1, dtype=jnp.float32, calls: int = 1, **state_options):
    with autocast(recipe):
        state = create_train_state(
            lambda rngs: Net(rngs, dtype=dtype, calls=calls), TX, key=jax.random.key(0), **state_options
        )
        step = make_train_step(loss_fn, TX, microbatches=microbatches)
        losses = []
        for _ in range(steps):
            state, metrics = step(state, batch(dtype))
            assert float(metrics["skipped"]) == 0.0
            losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.slow
@pytest.mark.wide("delayed-2")
@pytest.mark.parametrize(
    ("name", "microbatches"),
    [
        ("delayed", 1),
        *((name, 2) for name in QUANTIZED if name not in ("mxfp8", "nvfp4")),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("mxfp8", "nvfp4")),
    ],
)
def test_held_quantized_is_quantized_anew(name, microbatches):
    """Quantized values, and so losses and states, are the same bits. The update is compiled in two programs, of which
    one may contract a product and a sum that the other rounds apart: each of the three steps may add one rounding."""
    plain, losses = run(recipe_from_name(name), microbatches=microbatches)
    held, held_losses = run(recipe_from_name(name), microbatches=microbatches, fp8_param=True)
    assert losses == held_losses
    assert losses[-1] < losses[0]
    kernel = held.params["head"]["kernel"].get_value()
    assert isinstance(kernel, QuantizedKernel)
    assert kernel.operand.rowwise.data.dtype.itemsize == 1
    exact, master = (state["head"]["kernel"].get_value() for state in (plain.params, held.masters))
    np.testing.assert_allclose(master, exact, rtol=0, atol=3 * np.finfo(np.float32).eps * np.max(np.abs(exact)))
    assert_same(plain.quantizers, held.quantizers)


@pytest.mark.slow
def test_a_layers_own_recipe_may_hold_its_kernels_quantized():
    def build(rngs):
        net = Net(rngs)
        net.head.module_recipe = ModuleRecipe(training=Float8BlockScaling(), fp8_param=True)
        return net

    with autocast(Float8CurrentScaling()):
        state = create_train_state(build, TX, key=jax.random.key(0))
        held = state.params["head"]["kernel"].get_value()
        assert isinstance(held, QuantizedKernel)
        assert held.quantizer == BlockQuantizer(dtype=jnp.float8_e4m3fn, two_dimensional=True)
        assert not isinstance(state.params["mlp"]["wi_kernel"].get_value(), QuantizedKernel)
        assert [path[0] for path, _ in nnx.to_flat_state(state.masters)] == ["head"]
        first, metrics = make_train_step(loss_fn, TX)(state, batch())
    assert float(metrics["skipped"]) == 0.0
    changed = change_recipe(first, DelayedScaling(amax_history_len=2))
    assert isinstance(changed.params["head"]["kernel"].get_value(), QuantizedKernel)
    assert not isinstance(changed.params["mlp"]["wi_kernel"].get_value(), QuantizedKernel)


@pytest.mark.slow
def test_bf16_parameters_held_quantized_train():
    _, plain = run(Float8CurrentScaling(), dtype=jnp.bfloat16, steps=4)
    state, held = run(Float8CurrentScaling(), dtype=jnp.bfloat16, steps=4, fp8_param=True)
    np.testing.assert_allclose(plain, held, rtol=0.02)  # kernels quantized from fp32, not from bf16
    assert state.params["head"]["kernel"].get_value().dtype == jnp.bfloat16
    assert state.masters["head"]["kernel"].dtype == jnp.float32


@pytest.mark.costly
def test_held_quantized_says_what_it_is_quantized_with():
    state, _ = run(Float8CurrentScaling(), fp8_param=True, steps=1)
    step = make_train_step(loss_fn, TX)
    with autocast(recipe_from_name("block")), pytest.raises(ValueError, match="quantized with TensorQuantizer"):
        step(state, batch())

    def loss(params):
        return loss_fn(nnx.merge(state.graphdef, params, state.quantizers, state.rest), batch(), None)

    with autocast(Float8CurrentScaling()):
        with pytest.raises(TypeError, match="a quantized kernel has no gradient"):
            jax.vjp(loss, state.params)
        with pytest.raises(TypeError, match=r"real- or complex-valued inputs .* got int32"):  # of its Guard
            jax.grad(loss)(state.params)


def quantizations(text: str, shape: tuple[int, ...]) -> int:
    """How many arrays of ``shape`` a program converts to FP8."""
    dims = "x".join(map(str, shape))
    return len(re.findall(rf"stablehlo\.convert .*tensor<{dims}xf32>\) -> tensor<{dims}xf8E4M3FN>", text))


@pytest.mark.costly("delayed")
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_kernels_are_quantized_once_a_step_outside_the_loop_over_microbatches(name):
    """The program has one conversion of each kernel, and it is not in the body of the while loop."""
    with autocast(recipe_from_name(name)):
        state = create_train_state(Net, TX, key=jax.random.key(0))
        text = make_train_step(loss_fn, TX, microbatches=4).lower(state, batch()).as_text()
    body = text[text.index("stablehlo.while") :]
    depth_body = body[: body.index("stablehlo.return", body.index(" do {"))]
    for shape in ((32, 1, 64), (64, 32), (32, 32)):
        assert quantizations(text, shape) == 1
        assert quantizations(depth_body, shape) == 0


@pytest.mark.slow
@pytest.mark.wide("delayed")
@pytest.mark.parametrize(
    "name",
    ["none", *(pytest.param(name, marks=pytest.mark.slow) if name == "nvfp4" else name for name in QUANTIZED)],
)
def test_microbatches_give_the_mean_gradient_of_their_own_forward_passes(name):
    """Against gradients of each share of the loss alone, added up by hand; states start alike and merge by maximum."""

    def share(model, part, key):
        return loss_fn(model, part, key) / 4.0

    recipe = recipe_from_name(name)
    with autocast(recipe):
        state = create_train_state(Net, optax.sgd(1.0), key=jax.random.key(0))
        before = jax.tree.map(jnp.copy, state.params)
        alone = []
        for part in jnp.split(batch(), 4):
            copy = jax.tree.map(jnp.copy, state)
            after, _ = make_train_step(share, optax.sgd(1.0))(copy, part)
            alone.append(after)
        together, _ = make_train_step(loss_fn, optax.sgd(1.0), microbatches=4)(state, batch())
    for path, value in nnx.to_flat_state(together.params):
        start = np.asarray(dict(nnx.to_flat_state(before))[path][...])
        mean = np.sum([np.asarray(dict(nnx.to_flat_state(one.params))[path][...]) - start for one in alone], axis=0)
        # One fp32 rounding of start + update, and of the sum of four gradients.
        np.testing.assert_allclose(np.asarray(value[...]) - start, mean, atol=2e-6 * max(1.0, np.abs(start).max()))
    merged = jax.tree.map(lambda *leaves: np.max(leaves, axis=0), *[one.quantizers for one in alone])
    assert_same(jax.tree.leaves(merged), jax.tree.leaves(together.quantizers))


@pytest.mark.slow
def test_kernels_quantized_in_every_microbatch_give_the_same_bits():
    with autocast(Float8CurrentScaling()):
        states = []
        for keep in (True, False):
            state = create_train_state(Net, TX, key=jax.random.key(0))
            step = make_train_step(loss_fn, TX, microbatches=4, keep_kernels=keep)
            states.append(step(state, batch())[0])
    assert_same(*(jax.tree.leaves(state.params) for state in states))


@pytest.mark.costly
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_gradients_of_bf16_kernels_are_not_rounded_to_bf16(microbatches):
    """The masters move by an fp32 gradient: with sgd(1) the update of a master has bits that bf16 has not."""
    state = create_train_state(lambda rngs: Net(rngs, dtype=jnp.bfloat16), optax.sgd(1.0), key=jax.random.key(0))
    before = np.asarray(state.masters["head"]["kernel"][...])
    state, _ = make_train_step(loss_fn, optax.sgd(1.0), microbatches=microbatches)(state, batch(jnp.bfloat16))
    update = np.asarray(state.masters["head"]["kernel"][...]) - before
    rounded = update.astype(jnp.bfloat16).astype(np.float32)
    assert np.mean(update != rounded) > 0.9


def test_no_second_copy_of_all_gradients_is_alive():
    """Eight wide layers: each gradient is added to its fp32 sum and freed before the next is made.

    Compiled for least memory, as GPU programs are by default; the CPU's default spreads operations over threads. Beside
    the sums there are one layer's gradient (1/8), activations (1/8 of the size at these shapes) and no second set.
    """

    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Linear(256, 256, bias=False, rngs=rngs) for _ in range(8)])

        def __call__(self, x):
            for layer in self.layers:
                x = jax.nn.relu(layer(x))
            return x

    state = create_train_state(Deep, optax.sgd(0.1), key=jax.random.key(0))
    size = 8 * 256 * 256 * 4
    small = jnp.ones((32, 4, 256))
    step = make_train_step(lambda model, x, key: jnp.mean(model(x)), optax.sgd(0.1), microbatches=8)
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    memory = step.lower(state, small).compile(compiler_options=options).memory_analysis()
    assert size <= memory.temp_size_in_bytes < 1.3 * size


@pytest.mark.slow
def test_a_layer_used_twice_merges_its_states_by_maximum():
    recipe = DelayedScaling(amax_history_len=4)
    with autocast(recipe):
        state = create_train_state(lambda rngs: Net(rngs, calls=2), optax.sgd(0.0), key=jax.random.key(0))
        model, x = state.model, batch()
        seen = []
        for _ in range(2):
            seen.append(float(jnp.max(jnp.abs(_normed(model.mlp, x)))))
            x = x + model.mlp(x)
        after, _ = make_train_step(loss_fn, optax.sgd(0.0))(state, batch())
    history = nnx.as_pure(after.quantizers["mlp"]["quantizers_1"]["x"])
    assert float(history["scale"]) == 1.0
    np.testing.assert_allclose(float(history["amax_history"][0]), max(seen), rtol=1e-6)
    assert np.all(np.asarray(history["amax_history"][1:]) == 0.0)


def _normed(mlp, x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(jnp.mean(jnp.square(x - mean), axis=-1, keepdims=True) + 1e-5)


@pytest.mark.costly
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16])
def test_kernels_read_directly_by_the_loss_keep_their_values_and_gradients(dtype):
    """A penalty on the kernels themselves: its gradient is added to that of the layers' GEMMs."""

    def penalized(model, x, key):
        return loss_fn(model, x, key) + 0.5 * jnp.sum(jnp.square(model.head.kernel[...].astype(jnp.float32)))

    states = []
    for fn in (loss_fn, penalized):
        net = functools.partial(Net, dtype=dtype)
        state = create_train_state(net, optax.sgd(1.0), key=jax.random.key(0))
        start = np.asarray(state.params["head"]["kernel"][...].astype(jnp.float32))
        after, _ = make_train_step(fn, optax.sgd(1.0), microbatches=2)(state, batch(dtype))
        full = after.masters if dtype == jnp.bfloat16 else after.params
        states.append(np.asarray(full["head"]["kernel"][...]))
    # d/dk of 0.5 k^2 is k; bf16 gradients of the direct use are rounded once.
    np.testing.assert_allclose(states[0] - states[1], start, atol=1e-6 if dtype == jnp.float32 else 2e-4)


def flat(state):
    return {path: variable.get_value() for path, variable in nnx.to_flat_state(state)}


@pytest.mark.costly("bf16-none", slow=["fp32-delayed", "bf16-delayed"])
@pytest.mark.parametrize("recipe", [None, DelayedScaling()], ids=["none", "delayed"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["fp32", "bf16"])
def test_gradients_of_kernels_in_bf16(recipe, dtype):
    """Each is the fp32 one rounded once: plain gradient descent shows it in the masters."""

    def kernels(**options):
        tx = optax.sgd(1.0)
        with autocast(recipe):
            state = create_train_state(lambda rngs: Net(rngs, dtype=dtype), tx, key=jax.random.key(0))
            before = jax.tree.map(np.asarray, flat(full_precision(state.params, state.masters)))
            state, _ = make_train_step(loss_fn, tx, **options)(state, batch(dtype))
        after = flat(full_precision(state.params, state.masters))
        return {path: old - np.asarray(after[path]) for path, old in before.items()}

    exact, low = kernels(), kernels(wgrad_dtype=jnp.bfloat16)
    for path in exact:
        if "kernel" in path[-1]:
            assert not np.any(exact[path]) or not np.array_equal(exact[path], low[path])
            # Eight bits of the largest: CPUs round partial sums of bf16, too.
            np.testing.assert_allclose(low[path], exact[path], rtol=0, atol=2.0**-8 * np.abs(exact[path]).max())
        else:
            np.testing.assert_array_equal(exact[path], low[path])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2", "data=2", "pipeline=2,data=2"])
def test_devices_add_up_gradients_of_kernels_in_bf16(mesh):
    """The program as it is lowered: CPUs add up in fp32. Microbatches are added in fp32."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.mlp = LayerNormMLP(32, 64, rngs=rngs)

        def __call__(self, x, dropout_key):
            return self.mlp(x)

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Layer(rngs) for _ in range(2)])

    with jax.set_mesh(make_mesh(ParallelConfig.parse(mesh))):
        state = create_train_state(Stack, TX, key=jax.random.key(0))

        def sums(**options):
            loss = PipelinedLoss(lambda model, x, key: StackInput(x), lambda model, y, x, key: jnp.mean(jnp.square(y)))
            step = make_train_step(loss, TX, microbatches=2, **options)
            text = step.lower(state, batch()).as_text()
            found = re.findall(r'(?:all_reduce|reduce_scatter)".*?\}\) : \(tensor<([\dx]+)x(\w+)>', text, re.DOTALL)
            # Without biases and norms.
            return {dtype for shape, dtype in found if math.prod(map(int, shape.split("x"))) >= 16 * 64}

        assert sums() == {"f32"}
        assert sums(wgrad_dtype=jnp.bfloat16) == {"bf16"}


def test_gradients_in_fp16_are_refused():
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        make_train_step(loss_fn, TX, wgrad_dtype=jnp.float16)
