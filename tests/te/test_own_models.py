"""Layers of Flax whose GEMMs run in Transformer Engine, as those of this package do."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import jax_te.linen as te
from jax_te.errors import BackendUnavailableError
from jax_te.layers import Linear, quantize_model
from jax_te.ops import explain_backend, use_backend
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from jax_te.training import value_and_grad

pytestmark = pytest.mark.te


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=2), Float8CurrentScaling()])
def test_a_quantized_layer_of_flax_is_the_layer_of_this_package(recipe):
    x = jax.random.normal(jax.random.key(0), (2, 32, 64))
    flax = nnx.Linear(64, 64, use_bias=False, rngs=nnx.Rngs(0))
    with autocast(recipe), use_backend("te"):
        library = Linear(64, 64, bias=False, rngs=nnx.Rngs(0))
        library.kernel.set_value(flax.kernel.get_value())
        quantize_model(flax, x)
        assert explain_backend("dense", recipe=recipe).backend == "te"
        values = [nnx.jit(value_and_grad(lambda m, x: jnp.sum(jnp.sin(m(x)))))(m, x) for m in (flax, library)]
    for one, other in zip(*map(jax.tree.leaves, values), strict=True):
        np.testing.assert_array_equal(one, other)


ALL = {"*": "ambient"}  # the heads, too
RULES = (("batch", "data"), ("embed", None), ("mlp", "model"))


class MLP(nnx.Module):
    """A column-parallel and a row-parallel layer."""

    def __init__(self, rngs: nnx.Rngs, names: tuple[str, str] | None = ("embed", "mlp")):
        def init(*axes):
            made = nnx.initializers.lecun_normal()
            return made if names is None else nnx.with_partitioning(made, axes)

        self.up = nnx.Linear(64, 128, kernel_init=init("embed", "mlp"), rngs=rngs)
        self.down = nnx.Einsum("bsf,fd->bsd", (128, 64), kernel_init=init("mlp", "embed"), rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.silu(self.up(x)))


class LinenMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        def init(*axes):
            return nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)

        x = jax.nn.silu(nn.Dense(128, kernel_init=init("embed", "mlp"), name="up")(x))
        return nn.Einsum((128, 64), "bsf,fd->bsd", kernel_init=init("mlp", "embed"), name="down")(x)


def sine(model, x):
    return jnp.sum(jnp.sin(model(x)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_layers_of_flax_run_in_te_on_a_mesh_as_on_one_device(kind):
    recipe, x = DelayedScaling(amax_history_len=2), jax.random.normal(jax.random.key(0), (8, 32, 64))
    run = nnx.jit(value_and_grad(sine))
    with autocast(recipe), use_backend("te"):
        with nnx.use_eager_sharding(False):
            plain = MLP(nnx.Rngs(0))
            quantize_model(plain, x, rules=ALL)
            expected = run(plain, x)
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
            split = MLP(nnx.Rngs(0))
            quantize_model(split, x, rules=ALL)
            actual = run(split, jax.device_put(x, jax.P("data")))
            assert split.up.kernel.get_value().sharding.spec == jax.P(None, "model")
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        # Sums over devices in another order: some roundings of fp32.
        np.testing.assert_allclose(one, other, rtol=2.0**-18, atol=2.0**-18 * np.abs(other).max())
    for kernel in ("x", "kernel", "grad"):
        histories = [model.down.einsum_op.quantizers[kernel]["amax_history"] for model in (plain, split)]
        np.testing.assert_allclose(*histories, rtol=2.0**-18)


def test_layers_of_linen_run_in_te_on_a_mesh_as_on_one_device():
    x = jax.random.normal(jax.random.key(0), (8, 32, 64))
    model = te.quantize_model(LinenMLP(), x, rules=ALL)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with autocast(Float8CurrentScaling(amax_scope="whole")), use_backend("te"):
        variables = model.init(jax.random.key(0), x)
        run = jax.value_and_grad(lambda variables, x: sine(lambda x: model.apply(variables, x), x))
        expected = jax.jit(run)(variables, x)
        with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
            jax.eval_shape(model.init, jax.random.key(0), x)  # te runs there, too
            actual = jax.jit(run)(variables, jax.device_put(x, jax.P("data")))
    for one, other in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2.0**-18, atol=2.0**-18 * np.abs(other).max())


def test_what_keeps_a_layer_of_flax_from_te_on_a_mesh():
    x, types = jnp.ones((8, 32, 64)), {"axis_types": (AxisType.Auto,) * 2}
    model = MLP(nnx.Rngs(0), names=None)
    quantize_model(model, x, rules=ALL)
    with autocast(Float8CurrentScaling()), use_backend("te"):
        with jax.set_mesh(jax.make_mesh((8, 1), ("data", "model"), **types)):
            model(x)  # kernels without names are whole where the batch has all devices
        with (
            jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), **types)),
            pytest.raises(BackendUnavailableError, match="its kernel names no axes, and may be split over model"),
        ):
            model(x)
        model.up.dot_general.kernel_axes = ("embed", "mlp")
        with (
            jax.set_mesh(jax.make_mesh((4, 2), ("rows", "model"), **types)),
            nnx.logical_axis_rules(RULES[1:]),
            pytest.raises(BackendUnavailableError, match="no rule says which mesh axis splits the batch, of rows"),
        ):
            model(x)
        with (
            jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), **types)),
            pytest.raises(BackendUnavailableError, match=r"the input \(3, 32, 64\) does not divide over"),
        ):
            model(x[:3])


def example(name: str):
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_whole_models_of_flax_run_in_te_on_a_mesh():
    """The language models of the examples, every layer of them: a call that te cannot run would raise."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    nnx_lm, linen_lm = example("plain_nnx_lm"), example("plain_linen_lm")
    sizes = {"layers": 1, "width": 32, "heads": 2, "hidden": 64, "scan": True, "remat": True}
    rows = jnp.zeros((8, linen_lm.LENGTH + 1), jnp.int32)
    with (
        jax.numpy_dtype_promotion("standard"),  # Flax's norms promote bf16 to fp32 implicitly
        jax.numpy_rank_promotion("allow"),
        jax.set_mesh(mesh),
        autocast(DelayedScaling(amax_history_len=2)),
        use_backend("te"),
    ):
        with nnx.logical_axis_rules(nnx_lm.RULES):
            model = nnx_lm.LM(nnx_lm.Config(**sizes), nnx.Rngs(0))
            assert len(quantize_model(model, rows[:, :-1], rules=ALL).quantized) == 8
            graphdef, state = nnx.split(model)

            def derivative(state):
                return value_and_grad(nnx_lm.loss_fn)(nnx.merge(graphdef, state), rows)

            jaxpr = str(jax.make_jaxpr(derivative)(state))
        with nn.logical_axis_rules(linen_lm.RULES):
            # Flax fails to initialize a DenseGeneral over several axes that have names.
            plain, rules = linen_lm.LM(linen_lm.Config(**sizes)), {"*.attention.out": None, **ALL}
            model = te.quantize_model(plain, rows[:, :-1], rules=rules)
            variables = jax.eval_shape(model.init, jax.random.key(0), rows[:, :-1])
            loss = jax.grad(lambda variables: model.apply(variables, rows[:, :-1]).astype(jnp.float32).sum())
            linen_jaxpr = str(jax.make_jaxpr(loss)(variables))
    assert jaxpr.count("shard_map") >= 8
    assert linen_jaxpr.count("shard_map") >= 7
