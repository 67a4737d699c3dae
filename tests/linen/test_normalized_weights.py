"""Layers inside of Flax's wrappers that normalize weights: these map every variable of a layer, recipes' states too."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_te.linen as te
from jax_te.errors import QuantizerStateError
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast

DELAYED = DelayedScaling(amax_history_len=4)
EXPERTS = "ecd,edf->ecf"


class Normalized(nn.Module):
    """A layer in a wrapper, and one behind it that is not: so the first is no head."""

    wrapper: type[nn.Module]
    kind: str

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(64, name="inner") if self.kind == "dense" else nn.Einsum((4, 32, 64), EXPERTS, name="inner")
        options = {"update_stats": self.is_mutable_collection("batch_stats")} if self.wrapper is nn.SpectralNorm else {}
        return nn.Dense(32, name="out")(nn.relu(self.wrapper(layer)(x, **options)))


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(0), (4, 16, 32))


@pytest.mark.parametrize("kind", ["dense", "einsum"])
@pytest.mark.parametrize("wrapper", [nn.WeightNorm, nn.SpectralNorm])
class TestWrapped:
    def test_recipes_with_state_leave_the_layer_in_high_precision(self, wrapper, kind, x):
        plain = Normalized(wrapper, kind)
        model = te.quantize_model(plain, x, rules={"out": "ambient"})
        with autocast(DELAYED):
            report = te.quantization_report(model, x)
            variables = model.init(jax.random.key(1), x)
        assert report.quantized == ("out",)
        assert wrapper.__name__ in report.left["inner"]
        assert set(variables["_overwrite_with_gradient"]) == {"out"}

    def test_its_numbers_are_the_plain_model_s(self, wrapper, kind, x):
        plain = Normalized(wrapper, kind)
        model = te.quantize_model(plain, x, rules={"inner": "ambient", "out": None, "none": None})
        variables = plain.init(jax.random.key(1), x)
        with autocast(DELAYED):
            quantized = jax.jit(model.apply)(variables, x)
        np.testing.assert_array_equal(quantized, jax.jit(plain.apply)(variables, x))

    def test_recipes_without_state_quantize_it(self, wrapper, kind, x):
        plain = Normalized(wrapper, kind)
        model = te.quantize_model(plain, x, rules={"inner": "ambient", "out": None})
        variables = plain.init(jax.random.key(1), x)
        with autocast(Float8CurrentScaling()):
            assert te.quantization_report(model, x).quantized == ("inner",)
            quantized = model.apply(variables, x)
        expected = plain.apply(variables, x)
        # e4m3 rounds each factor of a product by at most 2^-4 of it.
        assert 0 < np.linalg.norm(quantized - expected) < 2**-3 * np.linalg.norm(expected)

    def test_parameters_for_a_recipe_can_be_prepared(self, wrapper, kind, x):
        plain = Normalized(wrapper, kind)
        model = te.quantize_model(plain, x, rules={"out": "ambient"})
        variables = te.prepare_quantization(model, plain.init(jax.random.key(1), x), DELAYED, x)
        assert set(variables["_overwrite_with_gradient"]) == {"out"}


def test_a_map_of_the_parameters_alone_stays_quantized(x):
    class Masked(nn.Module):
        @nn.compact
        def __call__(self, x):
            masked = nn.map_variables(nn.Dense, "params", lambda tree: jax.tree.map(jnp.tanh, tree), init=True)
            return nn.Dense(32, name="out")(masked(64, name="inner")(x))

    model = te.quantize_model(Masked(), x)
    with autocast(DELAYED):
        assert te.quantization_report(model, x).quantized == ("inner",)


@pytest.mark.parametrize("wrapper", [nn.WeightNorm, nn.SpectralNorm])
def test_a_layer_of_this_package_with_state_is_refused(wrapper, x):
    options = {"update_stats": True} if wrapper is nn.SpectralNorm else {}
    model = wrapper(te.Linear(32, 64))
    with autocast(DELAYED), pytest.raises(QuantizerStateError, match=f"take the layer out of nn.{wrapper.__name__}"):
        model.init(jax.random.key(1), x, **options)


def test_a_layer_of_this_package_without_state_is_not(x):
    model = nn.WeightNorm(te.Linear(32, 64))
    with autocast(Float8CurrentScaling()):
        assert model.init_with_output(jax.random.key(1), x)[0].shape == (4, 16, 64)


def test_a_rule_for_a_parameter_of_a_wrapped_module_is_refused(x):
    class Projection(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("kernel", nn.initializers.lecun_normal(), (32, 64))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(32, name="out")(nn.WeightNorm(Projection(name="inner"))(x))

    model = te.quantize_model(Model(), x, rules={"inner": "ambient"})
    with autocast(DELAYED), pytest.raises(QuantizerStateError, match="WeightNorm"):
        te.quantization_report(model, x)
