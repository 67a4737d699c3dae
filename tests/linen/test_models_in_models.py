"""Quantized Linen models as parts of other models: the same layers are quantized, by the same numbers, as alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, assert_type

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_te.linen as te
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast

CURRENT, DELAYED = Float8CurrentScaling(), DelayedScaling(amax_history_len=2)
STATE = "_overwrite_with_gradient"
X = jax.random.normal(jax.random.key(0), (16, 32))


class Projection(nn.Module):
    """A module of a user's own."""

    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", nn.initializers.lecun_normal(), (32, 32))


class Backbone(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(32, name="first")(x))
        return nn.Dense(32, name="out")(Projection(name="p")(x))

    def twice(self, x):
        return 2.0 * self(x)


RULES: dict[str, Any] = {"first": None, "p": "ambient", "out": "ambient"}


class Parent(nn.Module):
    """A model that returns what its part does, and what a layer of its own makes of it."""

    backbone: nn.Module

    def setup(self):
        self.cls = nn.Dense(16)

    def __call__(self, x):
        y = self.result(x)
        return y, self.cls(y)

    def result(self, x):
        return self.backbone(x)


class Compact(nn.Module):
    backbone: nn.Module

    @nn.compact
    def __call__(self, x):
        y = self.backbone.copy(name="copied")(x)
        return y, nn.Dense(16, name="cls")(y)


class Setup(Parent):
    """A model that makes, and quantizes, its part in its setup."""

    def setup(self):
        self.cls, part = nn.Dense(16), Backbone()
        choice = getattr(type(self.backbone), "quantization_choice", None)
        self.made = part if choice is None else te.quantize_model(part, X, rules=dict(choice.rules))

    def result(self, x):
        return self.made(x)


class Lifted(Parent):
    """A model that runs its part in a transformation of Flax."""

    lift: Callable[..., Any] = nn.remat

    def result(self, x):
        return self.lift(lambda model, x: model(x))(self.backbone, x)


class LiftedClass(nn.Module):
    """A model in which a module is transformed that has the part."""

    backbone: nn.Module
    lift: Callable[..., Any]

    @nn.compact
    def __call__(self, x):
        return self.lift(Parent)(self.backbone, name="lifted")(x)


class Scan(Parent):
    def result(self, x):
        axes = {"params": 0, STATE: 0}
        turn = nn.scan(lambda model, x, _: (model(x), None), variable_axes=axes, split_rngs={"params": True}, length=1)
        return turn(self.backbone, x, None)[0]


class Vmap(Parent):
    def result(self, x):
        axes = {"params": 0, STATE: 0}
        mapped = nn.vmap(lambda model, x: model(x), variable_axes=axes, split_rngs={"params": True}, axis_size=1)
        return mapped(self.backbone, x[None])[0]


class ScanOfClass(nn.Module):
    """A model that transforms the class of its part."""

    backbone: nn.Module

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, STATE: 0}
        cls = nn.vmap(type(self.backbone), variable_axes=axes, split_rngs={"params": True}, axis_size=1)
        y = cls(name="mapped")(x[None])[0]
        return y, nn.Dense(16, name="cls")(y)


class Shared(nn.Module):
    """A model whose parameters lie beside those of its part."""

    backbone: nn.Module

    @nn.compact
    def __call__(self, x):
        nn.share_scope(self, self.backbone)
        y = self.backbone(x)
        return y, nn.Dense(16, name="cls")(y)


class TwoShared(nn.Module):
    """Two models that take over the scope of one part."""

    backbone: nn.Module

    @nn.compact
    def __call__(self, x):
        y, _ = Shared(self.backbone, name="a")(x)
        return Shared(self.backbone, name="b")(y)


class Twice(Parent):
    def result(self, x):
        return self.backbone(self.backbone(x))


class Method(Parent):
    def result(self, x):
        return self.backbone.twice(x)


@dataclasses.dataclass
class Applied:
    """A function of a bound model."""

    backbone: nn.Module

    def init(self, *args):
        return self.backbone.init(*args)

    def apply(self, variables, x):
        return nn.apply(lambda model, x: (model(x), None), self.backbone)(variables, x)


class Bound(Applied):
    def apply(self, variables, x):
        return self.backbone.bind(variables)(x), None


class BoundInParent(Applied):
    def init(self, *args):
        return Parent(self.backbone).init(*args)

    def apply(self, variables, x):
        return Parent(self.backbone).bind(variables).backbone(x), None


class Sequence(Parent):
    def setup(self):
        self.cls, self.sequence = nn.Dense(16), nn.Sequential([nn.LayerNorm(), self.backbone.clone(), jnp.negative])

    def result(self, x):
        return -self.sequence(x)


def in_remat(part: Any) -> nn.Module:
    return Lifted(part)


def in_jit(part: Any) -> nn.Module:
    return Lifted(part, nn.jit)


def in_remat_class(part: Any) -> nn.Module:
    return LiftedClass(part, nn.remat)


def in_jit_class(part: Any) -> nn.Module:
    return LiftedClass(part, nn.jit)


# How a model runs its part, and what it computes by it.
def once(part: Any, x: jax.Array) -> jax.Array:
    return part(x)


def normalized(part: Any, x: jax.Array) -> jax.Array:
    return part(nn.LayerNorm().apply({"params": {"scale": jnp.ones(32), "bias": jnp.zeros(32)}}, x))


def two_times(part: Any, x: jax.Array) -> jax.Array:
    return part(part(x))


PARENTS: dict[Any, Any] = {
    **dict.fromkeys((Parent, Compact, Setup, in_remat, in_remat_class, in_jit, in_jit_class), once),
    **dict.fromkeys((Scan, Vmap, ScanOfClass, Shared, Applied, Bound, BoundInParent), once),
    Sequence: normalized,
    Twice: two_times,
    TwoShared: two_times,
    Method: lambda part, x: 2.0 * part(x),
}


def layers_with_state(model: nn.Module) -> set[str]:
    """Return the names of the layers that have states."""
    with autocast(DELAYED):
        states = jax.eval_shape(model.init, jax.random.key(0), X).get(STATE, {})
    parts = {part.key for path, _ in jax.tree.leaves_with_path(states) for part in path}
    return parts & {"first", "p", "out", "cls"}


def parameters_of_backbone(tree: Any) -> Any:
    """Return the parameters of a backbone, wherever they lie, without axes that scan or vmap added."""
    if "first" in tree:
        ndims = {"kernel": 2, "w": 2, "bias": 1}
        layers = {name: tree[name] for name in ("first", "p", "out")}
        return jax.tree.map_with_path(lambda path, leaf: leaf.reshape(leaf.shape[-ndims[path[-1].key] :]), layers)
    inner = (parameters_of_backbone(node) for node in tree.values() if isinstance(node, dict))
    return next((found for found in inner if found is not None), None)


NAMES = [parent.__name__ for parent in PARENTS]


@pytest.mark.costly(*(name for name in NAMES if name not in {"Parent", "Sequence", "Scan", "Bound"}))
@pytest.mark.parametrize(("parent", "expected"), PARENTS.items(), ids=NAMES)
def test_a_quantized_model_in_another_is_that_alone(parent, expected):
    check_as_alone(parent, expected, RULES)


def test_heads_stay_in_high_precision_in_another_model():
    check_as_alone(Parent, once, None)


def check_as_alone(parent: Any, expected: Any, rules: Any) -> None:
    """Check that the same layers are quantized, and that the model's part computes what it does alone."""
    alone = te.quantize_model(Backbone(), X, rules=rules)
    model = parent(alone)
    assert layers_with_state(model) == layers_with_state(alone)
    variables = parent(Backbone()).init(jax.random.key(1), X)
    params = {"params": parameters_of_backbone(variables["params"])}
    with autocast(CURRENT):
        y, _ = model.apply(variables, X)
        wanted = expected(lambda x: alone.apply(params, x), X)
    np.testing.assert_allclose(y, wanted, rtol=1e-6, atol=1e-6)
    assert np.max(np.abs(wanted - expected(lambda x: Backbone().apply(params, x), X))) > 1e-3


class Outer(nn.Module):
    backbone: nn.Module

    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(32, name="stem")(x))
        return nn.Dense(16, name="cls")(self.backbone(Projection(name="p")(x)))


@pytest.mark.costly
def test_of_two_quantized_models_the_inner_one_decides_about_its_own_layers():
    inner = te.quantize_model(Backbone(), X, rules={"first": CURRENT, "p": "ambient"})
    with pytest.warns(UserWarning, match=r"rules that fit no layer: backbone\.\*$"):
        outer = te.quantize_model(Outer(inner), X, rules={"stem": None, "backbone.*": None, "cls": "ambient"})
    with pytest.warns(UserWarning, match=r"rules that fit no layer: backbone\.\*$"):
        report = te.quantization_report(outer, X)
    assert report.quantized == ("backbone.first", "backbone.p.w", "cls")
    assert list(report.left) == ["backbone.out", "p", "stem"]
    assert "it is a head" in report.left["backbone.out"]
    with autocast(DELAYED):
        states = outer.init(jax.random.key(0), X)[STATE]
    assert {name: set(states[name]) for name in states} == {"backbone": {"p"}, "cls": {"DotGeneral_0"}}
    # The inner one's GEMMs count in the outer one: the layer before it is no head.
    assert "stem" in te.quantization_report(te.quantize_model(Outer(inner), X), X).quantized


class Borrowing(nn.Module):
    """A model that runs a layer, which is another model's if it is given one."""

    layer: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.layer(nn.gelu(nn.Dense(32, name="own")(x)))


class Lender(nn.Module):
    model: nn.Module
    layer: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.model.clone(layer=self.layer, parent=self, name="part")(x)


@pytest.mark.costly("Dense")
@pytest.mark.parametrize("layer", [nn.Dense(32), Projection()], ids=["Dense", "own module"])
def test_a_layer_of_another_model_is_refused_unless_it_is_decided_about(layer):
    rules: dict[str, Any] = {"layer": "ambient"}
    model = te.quantize_model(Borrowing(layer.copy()), X, rules=rules)
    with pytest.raises(ValueError, match=r"at 'layer' runs in the quantized model at 'part'"):
        Lender(model, layer).init(jax.random.key(0), X)
    quantized = te.quantize_model(layer, X, rules={"": "ambient"})
    whole = te.quantize_model(Lender(model, layer), X, rules=rules)
    for one in (Lender(model, quantized), whole):
        with autocast(DELAYED):
            assert set(one.init(jax.random.key(0), X)[STATE]) == {"part", "layer"}


def test_a_module_that_no_rule_fits_may_be_of_another_model():
    model = te.quantize_model(Borrowing(Projection()), X, rules={"own": "ambient"})
    with autocast(DELAYED):
        assert set(Lender(model, Projection()).init(jax.random.key(0), X)[STATE]) == {"part"}


def test_a_model_keeps_its_class():
    model = te.quantize_model(Backbone(), X)
    assert_type(model, Backbone)
    assert_type(te.dequantize_model(model), Backbone)
