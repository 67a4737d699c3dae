"""Mixtures of experts in plain Flax: the axis of experts of their kernels stays one for one with the input's."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType

import jax_te.linen as te
from jax_te.layers import EinsumOp, prepare_quantization, quantize_model
from jax_te.quantize import frozen_scales
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, autocast
from jax_te.training import (
    calibrate_delayed_scaling,
    create_train_state,
    inspect_precision,
    make_train_step,
    sensitivity,
    value_and_grad,
)
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_close, draw

CURRENT, DELAYED = Float8CurrentScaling(), DelayedScaling(amax_history_len=2)
STATE = "_overwrite_with_gradient"
E, C, D, F = 3, 5, 32, 48
# Experts whose amaxes differ, so that a scale of all would be another.
SCALES = jnp.array([1.0, 40.0, 0.01])[:, None, None]
X, W = draw("x", (E, C, D)) * SCALES, draw("w", (E, D, F)) * SCALES[::-1]


class Own(nnx.Module):
    """One contraction with a parameter."""

    def __init__(self, call: Any, w: jax.Array = W):
        self.w, self.call = nnx.Param(w), nnx.static(call)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.call(x, self.w[...])


def kernel_first(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.dot_general(w, x, (((1,), (2,)), ((0,), (0,)))).swapaxes(1, 2)


# How the contraction is written; the input and the parameter of it, and the way back of its result to [e, c, f].
FORMS: dict[str, tuple[Any, Any, Any, Any]] = {
    "einsum": (lambda x, w: jnp.einsum("ecd,edf->ecf", x, w), lambda x: x, lambda w: w, lambda y: y),
    "matmul": (lambda x, w: x @ w, lambda x: x, lambda w: w, lambda y: y),
    "the parameter first": (kernel_first, lambda x: x, lambda w: w, lambda y: y),
    "experts behind rows": (
        lambda x, w: jnp.einsum("ced,fed->ecf", x, w),
        lambda x: x.swapaxes(0, 1),
        lambda w: w.transpose(2, 0, 1),
        lambda y: y,
    ),
    "two axes of rows, two of a sum": (
        lambda x, w: jnp.einsum("gecab,eabf->gecf", x, w),
        lambda x: x.reshape(E, 1, C, 4, D // 4).swapaxes(0, 1),
        lambda w: w.reshape(E, 4, D // 4, F),
        lambda y: y[0],
    ),
    "two axes of experts": (
        lambda x, w: jnp.einsum("eicd,eidhf->eichf", x, w),
        lambda x: x[:, None],
        lambda w: w.reshape(E, 1, D, 3, F // 3),
        lambda y: y.reshape(E, C, F),
    ),
}


def one_by_one(x: jax.Array, w: jax.Array) -> jax.Array:
    """Each expert's GEMM by itself."""
    return jnp.stack([EinsumOp()("cd,df->cf", x[i], w[i]) for i in range(E)])


def results(call: Any, x: jax.Array, w: jax.Array) -> Any:
    g = draw("g", (E, C, F))
    with frozen_scales():
        return jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(call(x, w) * g), argnums=(0, 1)))(x, w)


def assert_experts_close(actual: Any, expected: Any, tolerance: float = TOLERANCE["float32"]) -> None:
    """Each expert by its own magnitude."""
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, tolerance)


@pytest.mark.costly(
    "two axes of rows, two of a sum",
    slow=("matmul", "the parameter first", "two axes of experts", "experts behind rows"),
)
@pytest.mark.parametrize("form", FORMS)
def test_each_expert_is_a_gemm_of_its_own(form):
    call, of_x, of_w, back = FORMS[form]
    module = Own(call, of_w(W))
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        return back(call(of_x(x), of_w(w)))

    assert quantize_model(module, of_x(X), rules={"w": "ambient"}).quantized == ("w",)
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)

    def quantized(x: jax.Array, w: jax.Array) -> jax.Array:
        given = jax.tree.map(lambda _: of_w(w), params)
        return back(nnx.merge(graphdef, given, rest)(of_x(x)))

    assert_bitwise(quantized(X, W), plain(X, W))
    with autocast(CURRENT):
        (value, found), (expected, wanted) = results(quantized, X, W), results(one_by_one, X, W)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for one, other in zip(found, wanted, strict=True):
        assert_experts_close(one, other)
    assert np.any(np.asarray(value) != np.asarray(results(plain, X, W)[0]))


@pytest.mark.costly
@pytest.mark.wide("delayed")
@pytest.mark.parametrize("recipe", [DELAYED, Float8BlockScaling()], ids=lambda recipe: recipe.name)
def test_other_recipes(recipe):
    module = Own(FORMS["einsum"][0])
    with autocast(recipe):
        quantize_model(module, X, rules={"w": "ambient"})
        assert_experts_close(module(X), one_by_one(X, W))
        if recipe is not DELAYED:
            return
        _, gradients = value_and_grad(lambda module: jnp.sum(module(X)))(module)
    assert gradients.w.shape == W.shape
    histories = module.w_gemm.quantizers
    assert_bitwise(histories["x"]["amax_history"][:, 0], jnp.max(jnp.abs(X), axis=(1, 2)))
    assert_bitwise(histories["kernel"]["amax_history"][:, 0], jnp.max(jnp.abs(W), axis=(1, 2)))


class Mixture(nnx.Module):
    """Tokens are sent to experts by their place, with a capacity; the kernels are two parameters."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(batch_axis=(0,))
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.up, self.down = (nnx.Param(init(rngs.params(), shape)) for shape in ((E, D, F), (E, F, D)))

    def __call__(self, x: jax.Array) -> jax.Array:
        rows = self.norm(x).reshape(-1, E, D)
        hidden = jax.nn.gelu(jnp.einsum("ted,edf->tef", rows, self.up[...]))
        return x + jnp.einsum("tef,efd->ted", hidden, self.down[...]).reshape(x.shape)


RULES = {"": "ambient"}
BATCH = draw("batch", (4, 2 * E, D))


def loss_fn(model: Any, x: jax.Array, key: Any) -> jax.Array:
    return jnp.mean(jnp.square(model(x) - 1.0))


@pytest.mark.slow
def test_a_mixture_trains_under_delayed_scaling():
    tx = optax.adam(1e-2)
    with autocast(DELAYED):
        model = Mixture(nnx.Rngs(0))
        assert quantize_model(model, BATCH, rules=RULES).quantized == ("down", "up")
        state = create_train_state(model, tx, key=jax.random.key(0))
        step, losses = make_train_step(loss_fn, tx, microbatches=2), []
        for _ in range(3):
            state, metrics = step(state, BATCH)
            losses.append(float(metrics["loss"]))
        assert losses[2] < losses[1] < losses[0]
        assert state.model.up_gemm.quantizers["x"]["amax_history"].shape == (E, 2)
        calibrated = Mixture(nnx.Rngs(0))
        quantize_model(calibrated, BATCH, rules=RULES)
        calibrate_delayed_scaling(calibrated, loss_fn, BATCH, DELAYED)
        rows = calibrated.norm(BATCH).reshape(-1, E, D)
        newest = calibrated.up_gemm.quantizers["x"]["amax_history"][:, 0]
        np.testing.assert_allclose(newest, jnp.max(jnp.abs(rows), axis=(0, 2)), rtol=1e-6)
    assert prepare_quantization(calibrated, CURRENT).up_gemm.quantizers is None


@pytest.mark.slow
def test_a_mixture_is_inspected_and_ranked():
    model = Mixture(nnx.Rngs(0))
    quantize_model(model, BATCH, rules=RULES)
    with autocast(CURRENT):
        found = inspect_precision(model, loss_fn, BATCH)
    assert {(tensor.module, tensor.role) for tensor in found} == {
        (module, role) for module in ("down", "up") for role in ("x", "kernel", "grad")
    }
    ranked = sensitivity(model, loss_fn, [BATCH], CURRENT)
    assert {layer.module for layer in ranked} == {"down", "up"}
    assert all(layer.gradient_error > 0.0 for layer in ranked)
    # As those of Flax's own layers, whose drop-ins stand inside of them.
    layers = nnx.Sequential(nnx.Linear(D, F, rngs=nnx.Rngs(0)), nnx.Linear(F, D, rngs=nnx.Rngs(1)))
    quantize_model(layers, BATCH, rules={"*": "ambient"})
    assert all(layer.gradient_error > 0.0 for layer in sensitivity(layers, loss_fn, [BATCH], CURRENT))


@pytest.mark.costly("Auto")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_on_a_mesh_the_numbers_are_those_of_one_device(kind):
    recipe = Float8CurrentScaling(amax_scope="whole")
    model = Own(lambda x, w: jnp.einsum("ecd,edf->ecf", x, w))
    x = jnp.pad(X, ((0, 0), (0, 3), (0, 0)))
    with autocast(recipe):
        quantize_model(model, x, rules={"w": "ambient"})
        run = nnx.jit(value_and_grad(lambda model, x: jnp.sum(jnp.sin(model(x)))))
        expected = run(model, x)
        with jax.set_mesh(jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2)):
            model.w.set_value(jax.device_put(W, jax.P(None, "fsdp", "tensor")))
            actual = run(model, jax.device_put(x, jax.P(None, "fsdp")))
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, e, rtol=2.0**-16, atol=2.0**-16 * np.abs(e).max())


@pytest.mark.costly
def test_flaxs_own_layers_with_axes_that_stay():
    rngs = nnx.Rngs(0)
    layers = nnx.Dict(
        einsum=nnx.Einsum("ecd,edf->ecf", (E, D, F), (E, 1, F), rngs=rngs),
        general=nnx.LinearGeneral(D, F, axis=-1, batch_axis={0: E}, rngs=rngs),
    )
    for layer in layers.values():
        layer.kernel.set_value(W)
    with autocast(DELAYED):
        report = quantize_model(layers, X, method=lambda layers, x: (layers["einsum"](x), layers["general"](x)),
                                rules={"*": "ambient"})  # fmt: skip
        assert report.quantized == ("einsum", "general")
        for layer in layers.values():
            bias = jnp.reshape(layer.bias[...], (E, 1, F))
            assert_experts_close(layer(X) - bias, one_by_one(X, W))
    assert layers["einsum"].einsum_op.quantizers["grad"]["scale"].shape == (E,)
    assert layers["general"].dot_general.quantizers["kernel"]["amax_history"].shape == (E, 2)


class LinenOwn(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.einsum("ecd,edf->ecf", x, self.param("kernel", lambda key: W))


class LinenGeneral(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = lambda key, shape, dtype: W.reshape(shape)  # noqa: E731
        return nn.DenseGeneral(F, axis=-1, batch_dims=(0,), use_bias=False, kernel_init=init, name="layer")(x)


class LinenEinsum(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = lambda key, shape, dtype: W  # noqa: E731
        return nn.Einsum((E, D, F), "ecd,edf->ecf", use_bias=False, kernel_init=init, name="layer")(x)


@pytest.mark.costly("LinenGeneral", slow=("LinenOwn",))
@pytest.mark.parametrize("cls", [LinenOwn, LinenGeneral, LinenEinsum])
def test_linen_does_the_same(cls):
    model = te.quantize_model(cls(), X, rules={"*": "ambient"})
    with autocast(DELAYED):
        variables = model.init(jax.random.key(0), X)
        scales = [leaf.shape for path, leaf in jax.tree.leaves_with_path(variables[STATE]) if "scale" in str(path[-1])]
        assert scales == [(E,)] * 3
        gradients = jax.grad(lambda variables: jnp.sum(model.apply(variables, X)))(variables)
        assert_experts_close(model.apply(variables, X), one_by_one(X, W))
    newest = [leaf for path, leaf in jax.tree.leaves_with_path(gradients[STATE]) if "amax_history" in str(path[-1])]
    assert any(np.array_equal(history[:, 0], jnp.max(jnp.abs(W), axis=(1, 2))) for history in newest)
