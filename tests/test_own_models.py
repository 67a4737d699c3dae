"""Models written in plain Flax: one line quantizes their linear layers, and changes nothing else."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import jax_te.linen as te
from jax_te.errors import QuantizerStateError
from jax_te.layers import (
    DotGeneral,
    EinsumOp,
    dequantize_model,
    keep_in_high_precision,
    prepare_quantization,
    quantizable_modules,
    quantize_model,
    quantize_parameters,
)
from jax_te.layers import Linear as LibraryLinear
from jax_te.megatron import GlobMatcher, RecipeConfig, apply_quantization_config
from jax_te.ops import dense
from jax_te.quantize import QuantizerState, frozen_scales
from jax_te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    ModuleRecipe,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    autocast,
)
from jax_te.training import Optimizer, create_train_state, make_train_step, value_and_grad


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plain_linen_lm, plain_nnx_lm = example("plain_linen_lm"), example("plain_nnx_lm")
CURRENT, DELAYED = Float8CurrentScaling(), DelayedScaling(amax_history_len=2)
STATE = plain_linen_lm.STATE
X = jax.random.normal(jax.random.key(0), (2, 16, 32))


class Net(nnx.Module):
    """Every kind of linear layer of Flax NNX, once."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
        self.up = nnx.Linear(32, 64, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Einsum("...f,df->...d", (32, 64), (32,), rngs=rngs)
        self.head = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(x)
        return self.head(x + self.down(self.up(x).astype(jnp.float32)))


class LinenNet(nn.Module):
    """The same in Linen."""

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(2, name="attention")(x)
        up = nn.Dense(64, dtype=jnp.bfloat16, name="up")(x).astype(jnp.float32)
        return nn.Dense(16, name="head")(x + nn.Einsum((32, 64), "...f,df->...d", name="down")(up))

    def twice(self, x):
        return 2.0 * self(x)


def square(model: Any, x: jax.Array = X) -> jax.Array:
    return jnp.mean(jnp.square(model(x).astype(jnp.float32)))


QUANTIZED = ["attention.key", "attention.out", "attention.query", "attention.value", "down", "up"]
HEAD = {"head": "it is a head: no other GEMM takes its result; a rule quantizes it"}


@pytest.mark.costly
def test_nnx_layers_are_reached_and_keep_their_parameters():
    model = Net(nnx.Rngs(0))
    before, value = nnx.state(model), model(X)
    kernel = model.up.kernel
    report = quantize_model(model, X)
    assert list(report.quantized) == QUANTIZED
    assert report.left == HEAD
    assert f"head             Linear         high: {HEAD['head']}" in str(report)
    # The same Variables under the same names, and the same numbers where no recipe is in force.
    assert model.up.kernel is kernel
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(before)
    np.testing.assert_array_equal(model(X), value)
    with autocast(CURRENT):
        assert np.any(np.asarray(model(X)) != np.asarray(value))
        dequantize_model(model)
        np.testing.assert_array_equal(model(X), value)
    assert quantizable_modules(model) == []


def number_of_layers(states: Any) -> int:
    """Return how many layers have states: each has the number of its uses beside them."""
    return sum(path[-1].key == "uses" for path, _ in jax.tree.leaves_with_path(states))


@pytest.mark.slow
def test_a_linen_model_is_reached_and_keeps_its_parameters():
    model = LinenNet()
    variables = model.init(jax.random.key(1), X)
    value = model.apply(variables, X)
    quantized = te.quantize_model(model, X)
    assert isinstance(quantized, LinenNet)
    assert quantized == te.quantize_model(model, jax.ShapeDtypeStruct(X.shape, X.dtype))
    report = te.quantization_report(quantized, X)
    assert list(report.quantized) == QUANTIZED
    assert report.left == HEAD
    np.testing.assert_array_equal(quantized.apply(variables, X), value)
    assert te.quantization_report(te.quantize_model(nn.Dense(16), X), X).quantized == ("",)
    with pytest.warns(UserWarning, match="rules that fit no layer: mpl.up"):
        te.quantization_report(te.quantize_model(nn.Dense(16), X, rules={"mpl.up": None}), X)
    with autocast(CURRENT):
        in_fp8 = quantized.apply(variables, X)
        assert np.any(np.asarray(in_fp8) != np.asarray(value))
        # Whichever way a method is called.
        for method in ("twice", LinenNet.twice, type(quantized).twice):
            np.testing.assert_array_equal(quantized.apply(variables, X, method=method), 2.0 * in_fp8)
        np.testing.assert_array_equal(quantized.bind(variables).twice(X), 2.0 * in_fp8)
        np.testing.assert_array_equal(te.dequantize_model(quantized).apply(variables, X), value)
    with autocast(DELAYED):
        fresh = quantized.init(jax.random.key(1), X)
        jax.tree.map(np.testing.assert_array_equal, fresh["params"], variables["params"])
        prepared = te.prepare_quantization(quantized, variables, DELAYED, X)
        assert jax.tree.structure(prepared) == jax.tree.structure(fresh)
        assert number_of_layers(fresh[STATE]) == len(QUANTIZED)


RECIPES = [DELAYED, CURRENT, Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()]


@pytest.mark.costly("current", slow=("mxfp8", "block", "nvfp4"))
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_the_gemm_is_that_of_the_library(recipe):
    """Forward and backward, bit for bit: with a plain kernel, several summed axes, and a kernel in another order."""
    x = jax.random.normal(jax.random.key(1), (4, 32, 128))
    kernel = jax.random.normal(jax.random.key(2), (128, 128))
    with autocast(recipe):
        op, einsum, library = DotGeneral(), EinsumOp(), LibraryLinear(128, 128, bias=False, rngs=nnx.Rngs(0))
    state = library.gemm_state("kernel")

    def reference(x, kernel):
        return dense(x, kernel, recipe=recipe, state=state)

    def plain(x, kernel):
        return op(x, kernel, (((2,), (0,)), ((), ())))

    def several(x, kernel):
        return op(x.reshape(4, 32, 8, 16), kernel.reshape(8, 16, 128), (((2, 3), (0, 1)), ((), ())))

    def other_order(x, kernel):
        y = einsum("btd,hkd->bhtk", x, kernel.T.reshape(8, 16, 128))
        return y.transpose(0, 2, 1, 3).reshape(4, 32, 128)

    weight = jax.random.normal(jax.random.key(3), x.shape)

    def all_of(fn):
        with autocast(recipe), frozen_scales():
            return jax.jit(jax.value_and_grad(lambda x, k: jnp.sum(weight * fn(x, k)), argnums=(0, 1)))(x, kernel)

    expected = all_of(reference)
    for fn in (plain, several, other_order):
        jax.tree.map(np.testing.assert_array_equal, all_of(fn), expected)


@pytest.mark.costly
def test_rules_decide_in_order_and_recipes_of_their_own_need_no_context():
    rules = {"attention.*": None, "up": CURRENT, "down": ModuleRecipe(training=CURRENT), "*p": DELAYED}
    model = Net(nnx.Rngs(0))
    with pytest.warns(UserWarning, match=r"rules that fit no layer: \*p"):
        report = quantize_model(model, X, rules=rules)
    assert report.quantized == ("down", "up")
    assert report.left["attention.out"] == "the rule 'attention.*'"
    recipes = {path: module.recipe for path, module in quantizable_modules(model)}
    assert recipes == {"down": None, "up": CURRENT}
    with pytest.warns(UserWarning, match=r"rules that fit no layer: \*p"):
        linen = te.quantize_model(LinenNet(), X, rules=rules)
    with pytest.warns(UserWarning, match=r"rules that fit no layer: \*p"):
        assert te.quantization_report(linen, X).left == report.left
    variables = linen.init(jax.random.key(0), X)
    jaxpr = str(jax.make_jaxpr(linen.apply)(variables, X))
    assert jaxpr.count("f8_e4m3fn[64") == 0 < jaxpr.count("f8_e4m3fn[")
    # A quantization file's rules find the layers by their own paths.
    payload = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    apply_quantization_config(model, RecipeConfig([GlobMatcher("up", "high")], {"high": payload}))
    with autocast(CURRENT):
        assert {path: module.recipe for path, module in quantizable_modules(model)} == {"down": CURRENT, "up": None}
        keep_in_high_precision(model)
        assert model.down.einsum_op.recipe is None
    for quantize, plain in ((quantize_model, model), (te.quantize_model, LinenNet())):
        with pytest.raises(TypeError):
            quantize(plain, X, rules={"up": "fp8"})


class OwnCall(nnx.Linear):
    def __call__(self, x):
        return super().__call__(x)


LEFT = {
    "its output size 24 is not a multiple of 16": lambda r: nnx.Einsum("bsd,bdf->bsf", (2, 32, 24), rngs=r),
    "'bsd,df->bf' is more than a sum": lambda r: nnx.Einsum("bsd,df->bf", (32, 32), rngs=r),
    "its precision is 'highest'": lambda r: nnx.Linear(32, 32, precision="highest", rngs=r),
    "it has a dot_general of its own": lambda r: nnx.Linear(32, 32, dot_general=lambda *a, **k: None, rngs=r),
    "overrides the __call__ of nnx.Linear": lambda r: OwnCall(32, 32, rngs=r),
    "its input size 24 is not a multiple of 16": lambda r: nnx.Linear(24, 32, rngs=r),
    "it is none of Flax's linear layers": lambda r: nnx.Conv(32, 32, 3, rngs=r),
}


def test_what_is_left_in_high_precision_says_why():
    rngs = nnx.Rngs(0)
    names = dict(zip("abcdefg", LEFT, strict=True))
    model = nnx.Dict(good=nnx.Linear(32, 32, rngs=rngs), **{name: LEFT[why](rngs) for name, why in names.items()})
    report = quantize_model(model, X, rules={"good": "ambient"}, method=lambda model, x: model["good"](x))
    assert report.quantized == ("good",)
    for name, why in names.items():
        assert why in report.left[name]
    with autocast(MXFP8BlockScaling()), pytest.raises(ValueError, match="48 is not a multiple of 32"):
        quantize_model(nnx.Linear(48, 48, rngs=rngs), jnp.ones((16, 48)))


@pytest.mark.slow
def test_adapters_of_flax_are_trained_on_quantized_layers():
    rngs = nnx.Rngs(0)
    wrapped = nnx.LoRA(32, 4, 64, base_module=nnx.Linear(32, 64, rngs=rngs), rngs=rngs)
    model = nnx.Sequential(wrapped, jax.nn.relu, nnx.LoRALinear(64, 32, lora_rank=4, rngs=rngs))
    with autocast(DELAYED):
        report = quantize_model(model, X, rules={"layers.2": "ambient"})
        assert report.quantized == ("layers.0.base_module", "layers.2")
        optimizer = Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)
        before, losses = [wrapped.base_module.kernel[...], model.layers[2].kernel[...]], []
        for _ in range(3):
            loss, grads = nnx.jit(value_and_grad(square))(model)
            optimizer.update(model, grads)
            losses.append(float(loss))
    assert losses[-1] < losses[0]
    jax.tree.map(np.testing.assert_array_equal, [wrapped.base_module.kernel[...], model.layers[2].kernel[...]], before)
    assert model.layers[2].dot_general.quantizers["x"]["amax_history"][0] > 0.0


def test_a_call_that_is_no_gemm_is_refused():
    with autocast(CURRENT):
        with pytest.raises(ValueError, match="it has batch axes"):
            DotGeneral()(X, X, (((2,), (2,)), ((0,), (0,))))
        with pytest.raises(ValueError, match="precision is 'highest'"):
            DotGeneral()(X, X[0], (((2,), (1,)), ((), ())), "highest")
        with pytest.raises(ValueError, match="it has batch axes"):
            EinsumOp()("bsd,btd->bst", X, X)
        with pytest.raises(ValueError, match=r"its batch axes have sizes \(2,\), and it is of groups=3 kernels"):
            EinsumOp(groups=3)("bsd,bdf->bsf", X, jnp.ones((2, 32, 16)))
        with pytest.raises(ValueError, match=r"its batch axes have sizes \(\), and it is of groups=3"):
            EinsumOp(groups=3)("bsd,df->bsf", X, jnp.ones((32, 16)))
    model = te.quantize_model(LinenNet(), X)
    with pytest.raises(ValueError, match="not bound"):
        te.quantize_model(model.bind({}), X)
    with pytest.raises(TypeError, match="leave out rngs"):
        te.quantize_model(LinenNet(), X, rngs={"dropout": jax.random.key(0)})
    with pytest.raises(ValueError, match="quantize_model first"):
        te.quantization_report(LinenNet(), X)


def test_kernels_of_flax_are_not_stored_quantized():
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    quantize_model(model, jnp.ones((16, 16)))
    with autocast(Float8CurrentScaling()), pytest.raises(ValueError, match="leave fp8_param"):
        quantize_parameters(model)


def test_dtypes_are_those_of_flax():
    layer = nnx.Linear(32, 32, use_bias=False, dtype=jnp.bfloat16, preferred_element_type=jnp.float32, rngs=nnx.Rngs(0))
    quantize_model(layer, X)
    with autocast(CURRENT):
        y = layer(X)
        assert y.dtype == jnp.float32
        # Sums are not rounded to bf16 on their way.
        assert np.any(np.asarray(y) != np.asarray(y.astype(jnp.bfloat16).astype(jnp.float32)))
        grads = nnx.grad(lambda layer: jnp.sum(layer(X)))(layer)
        assert grads["kernel"].dtype == jnp.float32


def test_drop_ins_stand_where_flax_takes_a_dot_general():
    with autocast(DELAYED):
        layer = nnx.Linear(32, 16, dot_general=DotGeneral(), rngs=nnx.Rngs(0))
        assert isinstance(layer.dot_general.quantizers["x"]["scale"], QuantizerState)
        attention = nn.MultiHeadDotProductAttention(
            2, qkv_dot_general_cls=te.DotGeneral, out_dot_general_cls=functools.partial(te.DotGeneral, CURRENT)
        )
        states = attention.init(jax.random.key(0), X)[STATE]
        assert sorted(states) == ["key", "query", "value"]  # current scaling has no state
    # An op with a recipe of its own has it with and without a context.
    own = DotGeneral(DELAYED)
    assert own.recipe == DELAYED
    assert own.quantizers is not None


@pytest.mark.slow
def test_a_loop_without_the_state_raises_and_one_with_it_trains():
    with autocast(DELAYED):
        model = Net(nnx.Rngs(0))
        quantize_model(model, X)
        with pytest.raises(QuantizerStateError, match="leaves the quantizer state out"):
            nnx.value_and_grad(square)(model)
        optimizer = Optimizer(model, optax.sgd(0.1))
        loss, grads = nnx.jit(value_and_grad(square))(model)
        optimizer.update(model, grads)
        newest = model.up.dot_general.quantizers["kernel"]["amax_history"][0]
        assert newest > 0.0
        state = create_train_state(model, optax.sgd(0.1), key=jax.random.key(0))
        step = make_train_step(lambda model, x, key: square(model, x), optax.sgd(0.1), microbatches=2)
        state, metrics = step(state, jnp.concatenate([X, X]))
        assert metrics["loss"] < loss
        assert state.model.up.dot_general.quantizers["kernel"]["amax_history"][1] == newest
    layer = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    quantize_model(layer, X)
    with pytest.raises(QuantizerStateError, match="needs quantizer state"), autocast(DELAYED):
        layer(X)


def stacked(rngs: nnx.Rngs) -> nnx.Module:
    make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: nnx.Linear(32, 32, rngs=rngs)))
    return nnx.Dict(layers=make(rngs))


@pytest.mark.costly
def test_stacked_layers_have_a_state_each():
    model = stacked(nnx.Rngs(0))

    def run(model, x):
        return nnx.scan(nnx.remat(lambda x, layer: layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, model["layers"]
        )

    # Each layer's result goes to the next one.
    assert quantize_model(model, X, method=run).quantized == ("layers",)
    assert prepare_quantization(model, DELAYED) is model
    op = model["layers"].dot_general
    assert op.quantizers["x"]["amax_history"].shape == (3, 2)
    with autocast(DELAYED):
        value_and_grad(lambda model, x: jnp.sum(run(model, x)))(model, X)
    kernels = jnp.max(jnp.abs(model["layers"].kernel[...]), axis=(1, 2))
    np.testing.assert_array_equal(op.quantizers["kernel"]["amax_history"][:, 0], kernels)


@pytest.mark.costly
def test_drop_ins_on_an_explicit_mesh_compute_what_they_do_without_one():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    model, x = nnx.Linear(32, 64, use_bias=False, rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(0), (4, 8, 32))
    linen = te.quantize_model(nn.Dense(64, use_bias=False), x)
    quantize_model(model, x)
    prepare_quantization(model, DELAYED)
    variables = {"params": {"kernel": model.kernel[...]}}

    def run(model: Any, variables: Any, x: Any) -> Any:
        with autocast(DELAYED):
            nnx_results = value_and_grad(lambda m, x: jnp.sum(jnp.sin(m(x))))(model, x)
        # Otherwise each device has scales of its own.
        with autocast(Float8CurrentScaling(amax_scope="whole")):
            return nnx_results, jax.value_and_grad(lambda v: jnp.sum(jnp.sin(linen.apply(v, x))))(variables)

    expected = jax.jit(run)(model, variables, x)
    with jax.set_mesh(mesh):
        kernel = jax.device_put(model.kernel[...], jax.P(None, "model"))
        model.kernel.set_value(kernel)
        actual = jax.jit(run)(model, {"params": {"kernel": kernel}}, jax.device_put(x, jax.P("data")))
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, e, rtol=2.0**-16, atol=2.0**-16 * np.abs(e).max())


SPLIT = {
    "tensor": ({"embed": None, "heads": "model"}, True),
    "fully sharded": ({"embed": "data", "heads": "model"}, True),
    "mesh axes": ({}, True),
    "second axis of a sum": ({"embed": None, "size": "model"}, False),
    "no rule for the batch": ({"batch": None, "embed": None, "heads": "model"}, False),
    "8 outputs on each device": ({"embed": "data", "batch": "model", "heads": None}, False),
}


@pytest.mark.costly("mesh axes", slow=("fully sharded", "8 outputs on each device", "second axis of a sum", "tensor"))
@pytest.mark.parametrize(("rules", "on_devices"), SPLIT.values(), ids=SPLIT)
def test_where_names_say_how_a_gemm_lies_each_device_runs_its_part(rules, on_devices):
    """A row-parallel layer over two axes of its input; else the compiler partitions it: the same values."""
    names = (("heads", "size"), "embed") if rules else (("model", None), None)
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (*names[0], names[1]))
    x = jax.random.normal(jax.random.key(0), (8, 16, 4, 16))
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    run = value_and_grad(lambda m, x: jnp.sum(jnp.sin(m(x))))

    def make() -> nnx.LinearGeneral:
        with nnx.use_eager_sharding(False):
            layer = nnx.LinearGeneral((4, 16), 32, axis=(-2, -1), kernel_init=init, rngs=nnx.Rngs(0))
        quantize_model(layer, x)
        return layer

    with autocast(DELAYED):
        expected = nnx.jit(run)(make(), x)
        with jax.set_mesh(mesh), nnx.logical_axis_rules(rules.items()):
            actual = nnx.jit(run)(make(), jax.device_put(x, jax.P("data")))
            layer = make()
            assert layer.dot_general.kernel_axes == (*names[0], names[1])
            assert ("shard_map" in str(jax.make_jaxpr(layer)(x))) == on_devices
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, e, rtol=2.0**-16, atol=2.0**-16 * np.abs(e).max())


@pytest.mark.costly
def test_drop_ins_under_transformations_are_those_without():
    """Per example, and so each example with a scale of its own."""
    dense = nn.Dense(32)
    variables = dense.init(jax.random.key(0), X)
    of_flax = nn.vmap(nn.Dense, variable_axes={"params": None}, split_rngs={"params": False})(32)
    layer = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
    quantize_model(layer, X)
    with autocast(CURRENT):
        whole = te.quantize_model(dense, X).apply(variables, X)
        each = jnp.stack([te.quantize_model(dense, X).apply(variables, x) for x in X])
        assert np.any(np.asarray(whole) != np.asarray(dense.apply(variables, X)))
        np.testing.assert_array_equal(te.quantize_model(nn.jit(nn.Dense)(32), X).apply(variables, X), whole)
        np.testing.assert_array_equal(te.quantize_model(of_flax, X).apply(variables, X), each)
        each = jnp.stack([layer(x) for x in X])
        np.testing.assert_array_equal(nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(layer, X), each)
        np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(layer, X), layer(X))


class Scanned(nn.Module):
    """Layers of Flax in nn.scan, which hands on the collections that it lists alone."""

    collections: tuple[str, ...]

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes=dict.fromkeys(self.collections, 0),
            split_rngs={"params": True},
            length=2,
        )
        return scan(nn.Dense(32, name="up"), x, None)[0]


@pytest.mark.costly
def test_a_scan_that_leaves_the_state_out_is_told_what_to_list():
    listed, not_listed = (te.quantize_model(Scanned(names), X) for names in (("params", STATE), ("params",)))
    told = rf'nn.scan and nn.vmap, such as variable_axes={{"params": 0, "{STATE}": 0}}'
    with autocast(CURRENT):
        variables = not_listed.init(jax.random.key(0), X)  # without state, nothing has to be listed
    with autocast(DELAYED):
        made = listed.init(jax.random.key(0), X)
        assert jax.tree.map(jnp.shape, made["params"]) == jax.tree.map(jnp.shape, variables["params"])
        assert {leaf.shape[0] for leaf in jax.tree.leaves(made[STATE])} == {2}
        for call in (
            lambda: not_listed.init(jax.random.key(0), X),
            lambda: not_listed.apply(variables, X),
            lambda: not_listed.apply(made, X),
            lambda: te.prepare_quantization(not_listed, variables, DELAYED, X),
            lambda: te.quantization_report(not_listed, X),
        ):
            with pytest.raises(QuantizerStateError, match=told):
                call()


STEPS = 3


@pytest.fixture
def as_users_run_flax():
    """Flax's norms promote bf16 to fp32 implicitly."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def linen_losses(model: Any, tx: Any) -> tuple[Any, list[float]]:
    state, losses = plain_linen_lm.create_state(model, tx), []
    for rows in plain_linen_lm.batches(STEPS):
        state, loss = plain_linen_lm.train_step(state, rows)
        losses.append(float(loss))
    return state, losses


@pytest.mark.costly(slow=["one device", "mesh"])
@pytest.mark.parametrize("on_mesh", [False, True], ids=["one device", "mesh"])
def test_a_plain_linen_model_trains_in_fp8_as_in_bf16(on_mesh, as_users_run_flax):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2) if on_mesh else None
    config = plain_linen_lm.Config(layers=1, width=32, heads=2, hidden=64, scan=on_mesh, remat=on_mesh)
    model, tx = plain_linen_lm.LM(config), optax.adam(3e-3)
    with jax.set_mesh(mesh) if on_mesh else autocast(None), nn.logical_axis_rules(plain_linen_lm.RULES):
        _, plain = linen_losses(model, tx)
        with autocast(DELAYED):
            state, losses = linen_losses(te.quantize_model(model, next(plain_linen_lm.batches(1))[:, :-1]), tx)
    near(losses, plain)
    assert number_of_layers(state.params[STATE]) == 7
    if on_mesh:
        kernel = state.params["params"]["blocks"]["mlp"]["up"]["kernel"]
        assert kernel.names == ("layers", "embed", "mlp")
        assert kernel.value.sharding.spec[2] == "model"
    assert isinstance(state, TrainState)


@pytest.mark.slow
@pytest.mark.parametrize("on_mesh", [False, True], ids=["one device", "mesh"])
def test_a_plain_nnx_model_trains_in_fp8_as_in_bf16(on_mesh, as_users_run_flax):
    # Flax asks for a mesh where parameters name axes.
    mesh = jax.make_mesh((4, 2) if on_mesh else (1, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    config = plain_nnx_lm.Config(layers=1, width=32, heads=2, hidden=64, scan=on_mesh, remat=on_mesh)
    with jax.set_mesh(mesh), nnx.logical_axis_rules(plain_nnx_lm.RULES):
        plain = plain_nnx_lm.train(plain_nnx_lm.LM(config, nnx.Rngs(0)), STEPS)
        model = plain_nnx_lm.LM(config, nnx.Rngs(0))
        with autocast(DELAYED):
            rows = next(plain_nnx_lm.batches(1))
            quantize_model(model, rows[:, :-1])
            losses = plain_nnx_lm.train(model, STEPS)
            graphdef, params = nnx.split(model)

            def derivative(params):
                return value_and_grad(plain_nnx_lm.loss_fn)(nnx.merge(graphdef, params), rows)

            jaxpr = str(jax.make_jaxpr(derivative)(params))
    near(losses, plain)
    assert jaxpr.count("f8_e5m2[") > 0 < jaxpr.count("f8_e4m3fn[")
    if on_mesh:
        kernel = model.blocks.mlp.up.kernel
        assert kernel.get_metadata("out_sharding") == ("layers", "embed", "mlp")
        assert kernel.get_value().sharding.spec[2] == "model"


def near(losses: list[float], plain: list[float]) -> None:
    """An e4m3 value is within 2**-4 of what it stands for, and a loss is of the size of the logits it comes from."""
    np.testing.assert_allclose(losses, plain, rtol=2.0**-4)
    assert losses != plain
    assert losses[-1] < losses[0]


@pytest.mark.costly
def test_a_warning_names_the_line_of_the_caller(tmp_path):
    """In a process of its own: the type checker of the tests has frames between, too."""
    program = tmp_path / "program.py"
    program.write_text(
        "import jax\nfrom flax import linen as nn\nfrom flax import nnx\nfrom jax_te import layers, linen\n"
        "x = jax.numpy.ones((16, 32))\n"
        "layers.quantize_model(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), x, rules={'no': None})\n"
        "linen.quantization_report(linen.quantize_model(nn.Dense(32), x, rules={'no': None}), x)\n"
    )
    told = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, check=True).stderr
    lines = [line for line in told.splitlines() if "rules that fit no layer: no" in line and "UserWarning" in line]
    assert [line.split(": ")[0] for line in lines] == [f"{program}:6", f"{program}:7"]
