"""What `quantize_model` sees in a model and reports: heads, GEMMs that no recipe reaches, and refused models."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_te.linen as te
from jax_te.layers import Linear, quantize_model
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast

CURRENT = Float8CurrentScaling()
X = jax.random.normal(jax.random.key(0), (2, 16, 32))


class OwnEinsum(nnx.Module):
    """The einsum module of gemma, jax-bonsai and llada: a parameter, and the equation of its call."""

    def __init__(self, shape: tuple[int, ...], rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), shape))

    def __call__(self, equation: str, x: jax.Array) -> jax.Array:
        return jnp.einsum(equation, x, self.w[...].astype(x.dtype))


class OwnNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.qkv, self.out = OwnEinsum((3, 2, 32, 16), rngs), OwnEinsum((2, 16, 32), rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        query = self.qkv("bsd,tndh->tbsnh", x)[0]
        return self.head(self.out("bsnh,nhd->bsd", query))


class LinenEinsum(nn.Module):
    shape: tuple[int, ...]

    @nn.compact
    def __call__(self, equation, x):
        return jnp.einsum(equation, x, self.param("w", nn.initializers.normal(), self.shape))


class LinenOwnNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        query = LinenEinsum((3, 2, 32, 16), name="qkv")("bsd,tndh->tbsnh", x)[0]
        return nn.Dense(10, name="head")(LinenEinsum((2, 16, 32), name="out")("bsnh,nhd->bsd", query))


@pytest.mark.costly("NNX")
@pytest.mark.parametrize("linen", [False, True], ids=["NNX", "Linen"])
def test_a_model_in_which_nothing_is_reached_is_refused_with_what_was_seen(linen):
    seen = r"(?s)head .*output size 10 is not a multiple.*out .*GEMMs take w.*qkv .*GEMMs take w"
    with pytest.raises(ValueError, match=seen):
        te.quantize_model(LinenOwnNet(), X) if linen else quantize_model(OwnNet(nnx.Rngs(0)), X)
    with pytest.raises(TypeError, match=r"give it the call's arguments, quantize_model\(model, x\)"):
        te.quantize_model(LinenOwnNet()) if linen else quantize_model(OwnNet(nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"Dict has no __call__: .* method="):
        quantize_model(nnx.Dict(up=nnx.Linear(32, 32, rngs=nnx.Rngs(0))), X)


class Decoder(nnx.Module):
    """Decodes as many rows of its own as it is told."""

    def __init__(self, rngs):
        self.up, self.head = nnx.Linear(32, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, shape):
        return self.head(self.up(jnp.ones(shape)))


@pytest.mark.costly("NNX")
@pytest.mark.parametrize("linen", [False, True], ids=["NNX", "Linen"])
def test_a_shape_in_the_place_of_an_array_is_pointed_out(linen):
    with pytest.raises((TypeError, AttributeError, ValueError)) as raised:
        te.quantize_model(LinenOwnNet(), (4, 32)) if linen else quantize_model(OwnNet(nnx.Rngs(0)), (4, 32))
    assert "(4, 32) as it is" in raised.value.__notes__[-1]
    assert "up" in quantize_model(Decoder(nnx.Rngs(0)), (4, 32)).quantized  # a shape that the model wants


@pytest.mark.parametrize(
    ("quantize", "own"), [(quantize_model, "Flax NNX"), (te.quantize_model, "Flax Linen")], ids=["NNX", "Linen"]
)
def test_models_of_other_libraries_are_refused_by_name(quantize, own):
    for model in (lambda x: x, {"kernel": X}, None):
        with pytest.raises(TypeError, match=rf"model must be a model of {own}, got .*jax_te\.ops\.dense"):
            quantize(model, X)
    for other, way in ((OwnNet(nnx.Rngs(0)), "Flax NNX"), (LinenOwnNet(), "Flax Linen")):
        if way != own:
            with pytest.raises(TypeError, match=f"model must be a model of {own}, got .*for a model of {way} call"):
                quantize(other, X)


class TwoHeads(nnx.Module):
    """A stem in a branch of `jax.lax.cond`, and two heads, one of them behind a `jax.checkpoint`."""

    def __init__(self, rngs: nnx.Rngs):
        self.stem, self.logits, self.value = (nnx.Linear(32, 32, rngs=rngs) for _ in range(3))

    def __call__(self, x):
        stem = nnx.cond(x[0, 0, 0] > 0.0, lambda m, x: m(x), lambda m, x: jax.nn.relu(m(x)), self.stem, x)
        return self.logits(stem), nnx.remat(lambda m, x: m(x))(self.value, jax.nn.gelu(stem))


def test_heads_are_quantized_where_a_rule_says_so():
    model = TwoHeads(nnx.Rngs(0))
    assert list(quantize_model(model, X).left) == ["logits", "value"]
    report = quantize_model(model, X, rules={"logits": "ambient", "value": CURRENT})
    assert report.quantized == ("logits", "stem", "value")
    assert (model.logits.dot_general.recipe, model.value.dot_general.recipe) == (None, CURRENT)
    linen = nn.Sequential([nn.Dense(64), nn.Dense(32)])
    quantized = te.quantize_model(linen, X)
    assert list(te.quantization_report(quantized, X).left) == ["layers_1"]
    quantized = te.quantize_model(linen, X, rules={"layers_1": "ambient"})
    assert te.quantization_report(quantized, X).left == {}


class Own(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (32, 32)))

    def __call__(self, x):
        return x @ self.w


class Layers(nnx.Module):
    """Three layers, and a kernel of each kind that can be read outside of its module."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.one, self.two, self.head = (nnx.Linear(32, 32, rngs=rngs) for _ in range(3))
        self.ours, self.sub = Linear(32, 32, rngs=rngs), Own(rngs)
        self.queries = nnx.Param(jax.random.normal(rngs.params(), (16, 32)))
        self.list, self.embed = nnx.List([Own(rngs).w]), nnx.Embed(64, 32, rngs=rngs)


def seen_in(call, rules=None, model=None):
    """Return the report of a call between a layer and a head."""
    return quantize_model(model or Layers(), X, rules=rules, method=lambda m, x: m.head(call(m, m.two(x))))


NOT_RUN = {
    "not called": lambda m, x: x,
    "its kernel is read outside": lambda m, x: x @ m.one.kernel,
}


@pytest.mark.costly("no rule-not called", slow=("no rule-its kernel is read outside",))
@pytest.mark.parametrize("call", NOT_RUN.values(), ids=NOT_RUN)
@pytest.mark.parametrize("rules", [None, {"one": CURRENT}], ids=["no rule", "rule"])
def test_a_layer_that_the_call_does_not_call_is_not_reported_as_quantized(call, rules):
    """It is quantized where it is called, and the report says that, too."""
    model = Layers()
    report = seen_in(call, rules, model)
    assert report.quantized == ("two",)
    assert ("by the rule 'one'" if rules else "the ambient recipe") in report.left["one"]
    assert ("a GEMM outside" in report.left["one"]) == (call is not NOT_RUN["not called"])
    assert "not called" in report.left["ours"]
    plain = Layers().one(X)
    with autocast(CURRENT):
        assert np.any(np.asarray(model.one(X)) != np.asarray(plain))


def test_a_kernel_that_is_read_outside_is_no_head_that_a_rule_would_quantize():
    report = quantize_model(Layers(), X, method=lambda m, x: m.two(x) @ m.one.kernel[...])
    assert report.quantized == ("two",)
    assert "head" not in report.left["one"]


def stacked_in_the_call(m, x):
    layers = [m.one, m.two]
    graphdef, stack = nnx.graphdef(m.one), jax.tree.map(lambda *a: jnp.stack(a), *map(nnx.state, layers))
    return jax.lax.scan(lambda x, state: (nnx.merge(graphdef, state)(x), None), x, stack)[0]


CALLED = {
    "of a parameter": lambda m, x: x + m.one(m.queries[...])[None],
    "stacked in the call": stacked_in_the_call,
    "inside of functions that JAX compiles": lambda m, x: nnx.jit(nnx.remat(lambda m, x: m.one(x)))(m, x),
}


@pytest.mark.parametrize("call", CALLED.values(), ids=CALLED)
def test_layers_that_are_called_are_reported_as_quantized_however_that_is(call):
    assert seen_in(call).quantized == ("one", "two")


def test_layers_that_share_a_kernel_are_each_seen():
    model = Layers()
    model.two.kernel = model.one.kernel
    assert seen_in(lambda m, x: m.one(x), model=model).quantized == ("one", "two")
    model.one.kernel = model.two.kernel = nnx.Variable(model.one.kernel[...])  # frozen
    assert seen_in(lambda m, x: m.one(x), model=model).quantized == ("one", "two")


class Twice(Own):
    """A product, another one that no recipe reaches if ``sliced``, and a use that is no GEMM."""

    def __init__(self, rngs: nnx.Rngs, sliced: bool):
        super().__init__(rngs)
        self.sliced = sliced

    def __call__(self, x):
        y = x @ self.w + jnp.sum(self.w[...] ** 2)
        return y + jnp.pad(x @ self.w[...][:, :16], ((0, 0), (0, 0), (0, 16))) if self.sliced else y


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("sliced", [False, True])
def test_a_parameter_that_is_quantized_in_a_part_of_its_gemms_says_so(sliced, outside):
    model = nnx.Dict(own=Twice(nnx.Rngs(0), sliced), up=nnx.Linear(32, 32, rngs=nnx.Rngs(1)))

    def call(m, x):
        y = m["own"](m["up"](x))
        return (y, x @ m["own"].w, x @ m["up"].kernel) if outside else y

    report = quantize_model(model, X, rules={"own": "ambient"}, method=call)
    assert report.quantized == ("own.w", "up")
    own, up = report.layers
    assert own.precision.startswith("by the rule 'own'")
    assert ("stays high" in own.precision) == (sliced or outside)
    assert ("slice" in own.precision) == sliced
    assert ("stays high" in up.precision) == outside


OUT_OF_REACH = {
    "in a list": (lambda m, x: x @ m.list[0], "list"),
    "of a module inside": (lambda m, x: x @ m.sub.w, "sub"),
    "of an embedding that gives logits": (
        lambda m, x: x + jnp.sum(jnp.einsum("bsd,vd->bsv", m.embed(jnp.arange(16))[None] + x, m.embed.embedding[...])),
        "embed",
    ),
}


@pytest.mark.costly("of an embedding that gives logits")
@pytest.mark.parametrize(("call", "path"), OUT_OF_REACH.values(), ids=OUT_OF_REACH)
def test_no_rule_is_advised_where_none_reaches(call, path):
    told = seen_in(call).left[path]
    assert "its GEMMs take" in told
    assert "a rule reaches" not in told
    with pytest.warns(UserWarning, match="rules that fit no layer"):
        assert seen_in(call, {path: "ambient"}).left[path] == told
    # In the `__call__` of the module that holds it, one does.
    assert "a rule reaches" in seen_in(lambda m, x: m.sub(x)).left["sub"]


def test_a_parameter_goes_on_with_its_state_after_a_call_of_another_method():
    model = Layers()
    with autocast(DelayedScaling(amax_history_len=2)):
        seen_in(lambda m, x: m.sub(x), {"sub": "ambient"}, model)
        model.sub.w_gemm.quantizers["x"]["amax_history"][...] = jnp.array([3.0, 2.0])
        report = seen_in(lambda m, x: m.one(x), model=model)
        assert report.quantized == ("one", "two")
        assert "sub.w" in report.left
        np.testing.assert_array_equal(model.sub.w_gemm.quantizers["x"]["amax_history"][...], [3.0, 2.0])


class LinenTied(nn.Module):
    """A parameter that is quantized in one of two GEMMs, and an embedding that gives logits."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.normal(), (32, 32))
        embed = nn.Embed(64, 32, name="embed")
        y = x @ w + nn.Dense(32, name="up")(x) + embed(jnp.arange(16))[None]
        return embed.attend(y), x @ w[:, :16]


def test_linen_models_have_the_same_lines():
    model = te.quantize_model(LinenTied(), X, rules={"w": "ambient", "up": "ambient"})
    report = te.quantization_report(model, X)
    assert report.quantized == ("up", "w")
    assert "goes to slice" in {layer.path: layer.precision for layer in report.layers}["w"]
    assert "a rule reaches" not in report.left["embed"]
