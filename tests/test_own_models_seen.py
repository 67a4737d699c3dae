"""What `quantize_model` sees in a model: heads, GEMMs of other modules, and models that it refuses."""

from __future__ import annotations

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_te.linen as te
from jax_te.layers import quantize_model
from jax_te.recipe import Float8CurrentScaling

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


@pytest.mark.parametrize("linen", [False, True], ids=["NNX", "Linen"])
def test_a_model_in_which_nothing_is_reached_is_refused_with_what_was_seen(linen):
    seen = r"(?s)head .*output size 10 is not a multiple.*out .*GEMMs take w.*qkv .*GEMMs take w"
    with pytest.raises(ValueError, match=seen):
        te.quantize_model(LinenOwnNet(), X) if linen else quantize_model(OwnNet(nnx.Rngs(0)), X)
    with pytest.raises(TypeError, match=r"give it the call's arguments, quantize_model\(model, x\)"):
        te.quantize_model(LinenOwnNet()) if linen else quantize_model(OwnNet(nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"Dict has no __call__: .* method="):
        quantize_model(nnx.Dict(up=nnx.Linear(32, 32, rngs=nnx.Rngs(0))), X)


@pytest.mark.parametrize(
    ("quantize", "own"), [(quantize_model, "Flax NNX"), (te.quantize_model, "Flax Linen")], ids=["NNX", "Linen"]
)
def test_models_of_other_libraries_are_refused_by_name(quantize, own):
    # Equinox's modules are told by the module of their base class.
    quantize = inspect.unwrap(quantize)  # without the tests' own check of types
    linear = type("Linear", (type("Module", (), {"__module__": "equinox._module"}),), {"__module__": "mine"})
    with pytest.raises(TypeError, match=r"got mine\.Linear: a module of Equinox has no place for quantizer state"):
        quantize(linear(), X)
    with pytest.raises(TypeError, match=r"got builtins\.function: it has no place"):
        quantize(lambda x: x, X)
    for other, way in ((OwnNet(nnx.Rngs(0)), "Flax NNX"), (LinenOwnNet(), "Flax Linen")):
        if way != own:
            with pytest.raises(TypeError, match=f"for a model of {way}"):
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
