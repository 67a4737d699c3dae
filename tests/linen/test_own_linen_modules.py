"""GEMMs of Linen modules of people's own, which a rule of `quantize_model` reaches: Gemma's modules."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import AxisType

import jax_te.linen as te
from jax_te.errors import QuantizerStateError
from jax_te.quantize import frozen_scales
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, ModuleRecipe, autocast

CURRENT, DELAYED = Float8CurrentScaling(), DelayedScaling(amax_history_len=2)
STATE = "_overwrite_with_gradient"
X = jax.random.normal(jax.random.key(0), (2, 16, 32))
HEADS = jax.random.normal(jax.random.key(1), (2, 16, 2, 16))


class Einsum(nn.Module):
    """Of Gemma."""

    shape: tuple[int, ...]
    weight_name: str = "w"
    names: tuple[str | None, ...] | None = None
    out: jax.P | None = None

    @nn.compact
    def __call__(self, equation: str, x: jax.Array) -> jax.Array:
        init = nn.initializers.normal()
        init = init if self.names is None else nn.with_logical_partitioning(init, self.names)
        return jnp.einsum(equation, x, self.param(self.weight_name, init, self.shape), out_sharding=self.out)


class FeedForward(nn.Module):
    """Of Gemma: two modules in one scope."""

    named: bool = False
    out: tuple[jax.P | None, jax.P | None] = (None, None)

    @nn.compact
    def __call__(self, x):
        names = (None, "embed", "mlp") if self.named else None
        gating = Einsum((2, 32, 64), "gating_einsum", names, self.out[0])
        nn.share_scope(self, gating)
        gate = gating("...F,NFH->...NH", x)
        hidden = nn.gelu(gate[..., 0, :]) * gate[..., 1, :]
        linear = Einsum((64, 32), "linear", None if names is None else names[:0:-1], self.out[1])
        nn.share_scope(self, linear)
        return linear("...H,HF->...F", hidden)


class Attention(nn.Module):
    def setup(self):
        self.qkv, self.out = Einsum((3, 2, 32, 16)), Einsum((2, 16, 32))
        self.dropout = nn.Dropout(0.5)

    def __call__(self, x, deterministic=True):
        y = jax.nn.dot_product_attention(*self.qkv("BTD,SNDH->SBTNH", x))
        return self.out("BTNH,NHD->BTD", self.dropout(y, deterministic=deterministic))


def test_a_quantized_model_is_pickled():
    model = te.quantize_model(FeedForward(), X, rules={"*": "ambient"})
    again = pickle.loads(pickle.dumps(model))
    assert again == model
    assert type(again) is type(model)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=True):
        x = x + Attention(name="attention")(x, deterministic)
        x = x + FeedForward(name="mlp")(x)
        return nn.Dense(16, name="head")(x)


class Adapted(nn.Module):
    """A linear layer beside parameters of its own, which may share a scope."""

    layer: Any
    shared: bool
    parameters_first: bool = True

    @nn.compact
    def __call__(self, x):
        layer = self.layer(name="inner")
        if self.shared:
            nn.share_scope(self, layer)
        y = None if self.parameters_first else layer(x)
        a = self.param("a", nn.initializers.normal(), (32, 16))
        b = self.param("b", nn.initializers.normal(), (16, 32))
        return (layer(x) if y is None else y) + x @ a @ b


RULES = {"attention.*": "ambient", "mlp": "ambient"}
QUANTIZED = ("attention.out.w", "attention.qkv.w", "mlp.gating_einsum", "mlp.linear")

# Equation, shape of the parameter, input.
EQUATIONS = {
    "BTD,NDH->BTNH": ((2, 32, 16), X),
    "BSD,CKDH->CBSKH": ((2, 2, 32, 16), X),
    "BTD,SNDH->SBTNH": ((3, 2, 32, 16), X),
    "BTNH,NHD->BTD": ((2, 16, 32), HEADS),
    "...F,NHF->...NH": ((2, 64, 32), X),
    "...F,NFH->...NH": ((2, 32, 64), X),
    "...H,HF->...F": ((32, 48), X),
}


class OneEinsum(nn.Module):
    equation: str
    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        return Einsum(self.shape, name="einsum")(self.equation, x)


class OneDropIn(nn.Module):
    """The same by `EinsumOp`."""

    equation: str
    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        kernel = self.param("w", nn.initializers.normal(), self.shape)
        return te.EinsumOp(name="op")(self.equation, x, kernel)


def loss_of(model: nn.Module) -> Any:
    def loss(params: Any, state: Any, x: jax.Array) -> jax.Array:
        y = model.apply({"params": params, **state}, x)
        return jnp.sum(jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape) * y)

    return loss


# With state, and with scales along the sums, for one that sums over two axes.
OTHERS = [("BTNH,NHD->BTD", recipe) for recipe in (DELAYED, Float8BlockScaling())]


@pytest.mark.costly(
    "BTD,SNDH->SBTNH-current",
    slow=(
        "BTD,NDH->BTNH-current",
        "BTNH,NHD->BTD-current",
        "...F,NHF->...NH-current",
        "BTNH,NHD->BTD-block",
        "...F,NFH->...NH-current",
        "...H,HF->...F-current",
        "BSD,CKDH->CBSKH-current",
    ),
)
@pytest.mark.parametrize(
    ("equation", "recipe"),
    [*((equation, CURRENT) for equation in EQUATIONS), *OTHERS],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_an_einsum_of_a_module_is_the_gemm_of_flax_s(equation, recipe):
    shape, x = EQUATIONS[equation]
    model = OneEinsum(equation, shape)
    quantized = te.quantize_model(model, x, rules={"einsum": "ambient"})
    w = jax.random.normal(jax.random.key(2), shape)

    def results(model: nn.Module, params: Any) -> Any:
        state = {STATE: state} if (state := model.init(jax.random.key(0), x).get(STATE)) else {}
        with frozen_scales():
            value, (dw, dx) = jax.jit(jax.value_and_grad(loss_of(model), argnums=(0, 2)))(params, state, x)
        return value, jax.tree.leaves(dw), dx

    plain = results(model, {"einsum": {"w": w}})
    jax.tree.map(np.testing.assert_array_equal, results(quantized, {"einsum": {"w": w}}), plain)
    with autocast(recipe):
        actual, expected = results(quantized, {"einsum": {"w": w}}), results(OneDropIn(equation, shape), {"w": w})
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert actual[0] != plain[0]


@pytest.mark.slow
def test_modules_are_reached_in_their_scopes_and_nothing_else_changes():
    model, keys = Model(), {"dropout": jax.random.key(5)}
    variables = model.init(jax.random.key(1), X)
    value = model.apply(variables, X)
    quantized = te.quantize_model(model, X, rules=RULES)
    assert quantized == te.quantize_model(model, jax.ShapeDtypeStruct(X.shape, X.dtype), rules=RULES)
    report = te.quantization_report(quantized, X)
    assert report.quantized == QUANTIZED
    assert list(report.left) == ["head"]
    assert "mlp.linear         FeedForward  by the rule 'mlp'" in str(report)
    np.testing.assert_array_equal(quantized.apply(variables, X), value)
    only = te.quantization_report(te.quantize_model(model, X, rules={"mlp.linear": "ambient"}), X)
    assert only.quantized == ("mlp.linear",)
    assert only.left["mlp"].endswith("its GEMMs take gating_einsum; a rule reaches those in its __call__")
    with autocast(CURRENT):
        in_fp8 = quantized.apply(variables, X)
        assert np.any(np.asarray(in_fp8) != np.asarray(value))
        np.testing.assert_array_equal(te.dequantize_model(quantized).apply(variables, X), value)
        # The same elements are dropped: a module that is left out of the GEMMs' results gives the same keys.
        _, kept = quantized.apply(variables, X, False, rngs=keys, capture_intermediates=is_dropout)
        _, expected = model.apply(variables, X, False, rngs=keys, capture_intermediates=is_dropout)
        for one, other in zip(*map(jax.tree.leaves, (kept, expected)), strict=True):
            np.testing.assert_array_equal(one == 0.0, other == 0.0)
    with autocast(DELAYED):
        fresh = quantized.init(jax.random.key(1), X)
        jax.tree.map(np.testing.assert_array_equal, fresh["params"], variables["params"])
        prepared = te.prepare_quantization(quantized, variables, DELAYED, X)
        assert jax.tree.structure(prepared) == jax.tree.structure(fresh)
        assert sorted(fresh[STATE]["mlp"]) == ["gating_einsum_gemm", "linear_gemm"]
        _, gradients = te.value_and_grad(lambda v: jnp.sum(quantized.apply(v, X)))(fresh)
        history = gradients[STATE]["attention"]["qkv"]["w_gemm"]["quantizers"]["x"]["amax_history"]
        np.testing.assert_array_equal(history, [jnp.max(jnp.abs(X)), 0.0])
        with pytest.raises(QuantizerStateError, match="attention/qkv/w_gemm"):
            quantized.apply(variables, X)


def is_dropout(module: nn.Module, method: str) -> bool:
    return isinstance(module, nn.Dropout)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + FeedForward(name="mlp")(x), None


class Layers(nn.Module):
    scan: bool

    @nn.compact
    def __call__(self, x):
        if not self.scan:
            for number in range(3):
                x, _ = Layer(name=f"layer_{number}")(x, None)
            return x
        axes = {"params": 0, STATE: 0}
        scan = nn.scan(nn.remat(Layer), variable_axes=axes, split_rngs={"params": True}, length=3)
        return scan(name="layers")(x, None)[0]


@pytest.mark.slow
def test_scanned_layers_are_those_of_a_loop_and_train():
    scanned = te.quantize_model(Layers(scan=True), X, rules={"layers.*": "ambient"})
    looped = te.quantize_model(Layers(scan=False), X, rules={"layer_?.*": "ambient"})

    @jax.jit
    def step(state):
        loss, gradients = jax.value_and_grad(lambda v: jnp.mean(state.apply_fn(v, X) ** 2))(state.params)
        return state.apply_gradients(grads=gradients), loss

    losses = {}
    with autocast(DELAYED):
        variables = scanned.init(jax.random.key(0), X)
        layers = [jax.tree.map(lambda leaf, n=n: leaf[n], variables) for n in range(3)]
        each = {name: {f"layer_{n}": layers[n][name]["layers"] for n in range(3)} for name in variables}
        assert jax.tree.structure(each) == jax.tree.structure(looped.init(jax.random.key(0), X))
        for model, start in ((scanned, variables), (looped, each)):
            state = TrainState.create(apply_fn=model.apply, params=start, tx=optax.sgd(1e-2))
            losses[model] = []
            for _ in range(3):
                state, loss = step(state)
                losses[model].append(float(loss))
    np.testing.assert_allclose(losses[scanned], losses[looped], rtol=1e-5)
    assert losses[scanned][2] < losses[scanned][0]


@pytest.mark.costly("Explicit", slow=["Auto"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_on_a_mesh_the_numbers_are_those_of_one_device(kind):
    """Fully sharded along one axis of the mesh, columns and then rows split along the other one."""
    x = jax.random.normal(jax.random.key(0), (8, 16, 32))
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2)
    rules = [("batch", "fsdp"), ("embed", "fsdp"), ("mlp", "tensor")]
    places = {"gating_einsum": jax.P(None, "fsdp", "tensor"), "linear": jax.P("tensor", "fsdp")}
    out = (jax.P("fsdp", None, None, "tensor"), jax.P("fsdp"))
    model = FeedForward(named=True) if kind == AxisType.Auto else FeedForward(out=out)

    def run(model: nn.Module, variables: Any, x: jax.Array) -> Any:
        loss, gradients = te.value_and_grad(lambda v: jnp.sum(jnp.sin(model.apply(v, x))))(variables)
        return loss, nn.unbox(gradients)

    with autocast(DELAYED):
        alone = te.quantize_model(FeedForward(), x, rules={"": "ambient"})
        variables = alone.init(jax.random.key(0), x)
        expected = jax.jit(run, static_argnums=0)(alone, variables, x)
        with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
            x = jax.device_put(x, jax.P("fsdp"))
            params = {name: jax.device_put(value, places[name]) for name, value in variables["params"].items()}
            quantized = te.quantize_model(model, x, rules={"": "ambient"})
            if kind == AxisType.Auto:
                names = {"gating_einsum": (None, "embed", "mlp"), "linear": ("mlp", "embed")}
                params = {name: nn.LogicallyPartitioned(value, names[name]) for name, value in params.items()}
            variables = {**variables, "params": params}
            actual = jax.jit(run, static_argnums=0)(quantized, variables, x)
            assert str(jax.make_jaxpr(quantized.apply)(variables, x)).count("shard_map") == 2
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, e, rtol=2.0**-16, atol=2.0**-16 * np.abs(e).max())


class Operator(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.silu(x @ self.param("w", nn.initializers.normal(), (32, 32)))


class DotGeneral(nn.Module):
    """In a method under nn.jit."""

    @nn.jit
    @nn.compact
    def __call__(self, x):
        kernel = self.param("w", nn.initializers.normal(), (32, 32))
        return lax.dot_general(x, kernel.astype(x.dtype), (((2,), (1,)), ((), ())))


class Precise(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.matmul(x, self.param("w", nn.initializers.normal(), (32, 32)), precision="highest")


@pytest.mark.costly("Operator")
@pytest.mark.parametrize("cls", [Operator, DotGeneral])
def test_a_contraction_is_reached_however_it_is_written(cls):
    model = te.quantize_model(cls(), X, rules={"w": CURRENT})
    variables = model.init(jax.random.key(0), X)
    plain = cls().apply(variables, X)
    assert np.any(np.asarray(model.apply(variables, X)) != np.asarray(plain))
    np.testing.assert_allclose(model.apply(variables, X), plain, atol=0.1 * np.abs(plain).max())


def test_a_contraction_that_no_recipe_can_quantize_is_refused_by_path():
    model = nn.Sequential([nn.Dense(32), Precise()])
    told = r"rule 'layers_1' fits layers_1\.w \(Precise\), .* its precision is .* Put {'layers_1\.w': None} before"
    with pytest.raises(ValueError, match=told):
        te.quantize_model(model, X, rules={"*0": "ambient", "layers_1": "ambient"})
    model = te.quantize_model(model, X, rules={"layers_1.w": None, "*": "ambient"})
    assert te.quantization_report(model, X).left == {"layers_1.w": "the rule 'layers_1.w'"}


@pytest.mark.slow
def test_a_layer_of_flax_that_shares_a_scope_is_quantized_as_in_its_own():
    layer = functools.partial(nn.Dense, 32)
    alone, shared = (te.quantize_model(Adapted(layer, own), X, rules={"*": "ambient"}) for own in (False, True))

    def as_shared(tree):
        return {name: leaf for name, leaf in tree.items() if name != "inner"} | tree["inner"]

    with autocast(DELAYED):
        variables = alone.init(jax.random.key(0), X)
        given = {name: as_shared(tree) for name, tree in variables.items()}
        made = jax.eval_shape(shared.init, jax.random.key(0), X)
        assert jax.tree.structure(made) == jax.tree.structure(given)  # and no state for a GEMM that there is not
        expected, found = (
            jax.value_and_grad(lambda variables, model=model: jnp.sum(jnp.sin(model.apply(variables, X))))(each)
            for model, each in ((alone, variables), (shared, given))
        )
    assert found[0] == expected[0]
    wanted = {name: as_shared(tree) for name, tree in expected[1].items()}
    jax.tree.map(np.testing.assert_array_equal, found[1], wanted)


@pytest.mark.parametrize("parameters_first", [True, False])
def test_a_layer_of_this_package_refuses_a_scope_that_is_shared(parameters_first):
    model = Adapted(functools.partial(te.Linear, 32, 32), True, parameters_first)
    with pytest.raises(ValueError, match=r"nn\.share_scope"):
        model.apply(model.init(jax.random.key(0), X), X)


def test_rules_that_cannot_hold_are_said():
    """A pattern that fits nothing, and a recipe of evaluation: a Linen model does not tell its layers the mode."""
    current = Float8CurrentScaling()
    with pytest.warns(UserWarning, match="rules that fit no layer: donw"):
        te.quantize_model(nn.Sequential([nn.Dense(32), nn.Dense(32)]), X, rules={"layers_1": "ambient", "donw": None})
    for own in (
        ModuleRecipe(training=current, evaluation=None),
        ModuleRecipe(training=None, evaluation=current),
    ):
        with pytest.raises(ValueError, match="another recipe in evaluation"):
            te.quantize_model(nn.Dense(32), X, rules={"": own})
    te.quantize_model(nn.Dense(32), X, rules={"": ModuleRecipe(training=current)})
    no_other = ModuleRecipe(training=current, evaluation=current)
    te.quantize_model(nn.Dense(32), X, rules={"": no_other})


def test_a_list_that_a_call_changes_is_refused():
    """The call is traced apart with a copy of it, so that the caller would find nothing in it."""

    class Experts(nn.Module):
        @nn.compact
        def __call__(self, x, losses):
            y = x @ self.param("w", nn.initializers.ones, (32, 32))
            losses.append(jnp.mean(y))
            return y

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Experts(name="experts")(x, [])

    with pytest.raises(ValueError, match="Experts changes a list or dict"):
        te.quantize_model(Model(), X, rules={"experts": "ambient"})
