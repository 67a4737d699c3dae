"""Layers inside of Flax's wrappers that normalize weights: these map every variable of a layer, recipes' states too."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_te.linen as te
from jax_te.config import RouterOptions
from jax_te.errors import QuantizerStateError
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast

DELAYED = DelayedScaling(amax_history_len=4)
EXPERTS = "ecd,edf->ecf"
STATE = "_overwrite_with_gradient"


class Normalized(nn.Module):
    """A layer in a wrapper, and one behind it that is not: so the first is no head."""

    wrapper: type[nn.Module]
    kind: str

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(64, name="inner") if self.kind == "dense" else nn.Einsum((4, 32, 64), EXPERTS, name="inner")
        return nn.Dense(32, name="out")(nn.relu(wrapped(self.wrapper, layer, x)))


def wrapped(wrapper, layer, x):
    return wrapper(layer)(x, **({"update_stats": True} if wrapper is nn.SpectralNorm else {}))


def loss_of_steps(model, x, recipe, steps=3):
    """Return the losses of some steps, and the variables after them."""

    @jax.jit
    def step(variables, others):
        def loss_fn(variables):
            y, changed = model.apply({**variables, **others}, x, mutable=["batch_stats"])
            return jnp.mean(y**2), changed

        (loss, changed), gradients = te.value_and_grad(loss_fn, has_aux=True)(variables)
        moved = jax.tree.map(lambda value, gradient: value - 0.1 * gradient, variables["params"], gradients["params"])
        return loss, {"params": moved, STATE: gradients.get(STATE, {})}, changed

    with autocast(recipe):
        variables = dict(model.init(jax.random.key(1), x))
        others = {name: variables.pop(name) for name in ["batch_stats"] if name in variables}
        losses = []
        for _ in range(steps):
            loss, variables, others = step({STATE: {}, **variables}, others)
            losses.append(float(loss))
    return losses, variables


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(0), (4, 16, 32))


# Vectors and scalars, which a Dense has for states, a SpectralNorm leaves alone.
NORMALIZED = [(nn.WeightNorm, "dense"), (nn.WeightNorm, "einsum"), (nn.SpectralNorm, "einsum")]


@pytest.mark.parametrize(("wrapper", "kind"), NORMALIZED)
class TestStatesThatWouldBeNormalized:
    @pytest.mark.costly("WeightNorm-dense", slow=("SpectralNorm-einsum",))
    def test_the_layer_stays_in_high_precision(self, wrapper, kind, x):
        model = te.quantize_model(Normalized(wrapper, kind), x, rules={"out": "ambient"})
        with autocast(DELAYED):
            report = te.quantization_report(model, x)
            variables = model.init(jax.random.key(1), x)
        assert report.quantized == ("out",)
        assert wrapper.__name__ in report.left["inner"]
        assert set(variables[STATE]) == {"out"}

    @pytest.mark.costly("WeightNorm-dense", "SpectralNorm-einsum")
    def test_its_numbers_are_the_plain_model_s(self, wrapper, kind, x):
        plain = Normalized(wrapper, kind)
        model = te.quantize_model(plain, x, rules={"inner": "ambient", "out": None})
        variables = plain.init(jax.random.key(1), x)
        with autocast(DELAYED):
            quantized, _ = jax.jit(lambda v: model.apply(v, x, mutable=["batch_stats"]))(variables)
        expected, _ = jax.jit(lambda v: plain.apply(v, x, mutable=["batch_stats"]))(variables)
        np.testing.assert_array_equal(quantized, expected)

    @pytest.mark.costly("SpectralNorm-einsum")
    def test_parameters_for_a_recipe_can_be_prepared(self, wrapper, kind, x):
        plain = Normalized(wrapper, kind)
        model = te.quantize_model(plain, x, rules={"out": "ambient"})
        variables = te.prepare_quantization(model, plain.init(jax.random.key(1), x), DELAYED, x)
        assert set(variables[STATE]) == {"out"}


@pytest.mark.costly("SpectralNorm-dense", slow=("SpectralNorm-einsum", "WeightNorm-einsum"))
@pytest.mark.parametrize("kind", ["dense", "einsum"])
@pytest.mark.parametrize("wrapper", [nn.WeightNorm, nn.SpectralNorm])
def test_recipes_without_state_quantize_it(wrapper, kind, x):
    plain = Normalized(wrapper, kind)
    model = te.quantize_model(plain, x, rules={"inner": "ambient", "out": None})
    variables = plain.init(jax.random.key(1), x)
    with autocast(Float8CurrentScaling()):
        assert te.quantization_report(model, x).quantized == ("inner",)
        quantized, _ = model.apply(variables, x, mutable=["batch_stats"])
    expected, _ = plain.apply(variables, x, mutable=["batch_stats"])
    # e4m3 rounds each factor of a product by at most 2^-4 of it.
    assert 0 < np.linalg.norm(quantized - expected) < 2**-3 * np.linalg.norm(expected)


@pytest.mark.costly
def test_a_spectral_norm_of_a_layer_with_vectors_for_states_is_quantized(x):
    model = te.quantize_model(Normalized(nn.SpectralNorm, "dense"), x, rules={"out": "ambient"})
    with autocast(DELAYED):
        assert te.quantization_report(model, x).quantized == ("inner", "out")
    losses, variables = loss_of_steps(model, x, DELAYED)
    assert losses[2] < losses[0]
    histories = variables[STATE]["inner"]["DotGeneral_0"]["quantizers"]
    assert float(histories["x"]["amax_history"][0]) == float(jnp.abs(x).max())


def test_a_spectral_norm_of_a_scan_sees_the_vectors_of_all_layers(x):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            return x + nn.Dense(32, name="b")(nn.relu(nn.Dense(32, name="a")(x))), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"params": 0, STATE: 0, "batch_stats": 0}
            stack = nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=2)
            return nn.Dense(32, name="out")(stack(name="s")(x, None)[0])

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return wrapped(nn.SpectralNorm, Stack(name="stack"), x)

    model = te.quantize_model(Model(), x, rules={"stack.out": "ambient"})
    with autocast(DELAYED):
        report = te.quantization_report(model, x)
    assert report.quantized == ("stack.out",)
    assert "SpectralNorm" in report.left["stack.s.a"]


@pytest.mark.costly("inside first")
@pytest.mark.parametrize("order", ["inside first", "outside first"])
def test_a_layer_inside_and_outside_of_a_wrapper_is_decided_about_once(order, x):
    class Model(nn.Module):
        def setup(self):
            self.inner, self.out = nn.Dense(32), nn.Dense(32)
            self.normalized = nn.WeightNorm(self.inner)

        def __call__(self, x):
            calls = [self.normalized, self.inner]
            first, second = (call(x) for call in (calls if order == "inside first" else calls[::-1]))
            return self.out(nn.relu(first + second))

    model = te.quantize_model(Model(), x, rules={"out": "ambient"})
    with autocast(DELAYED):
        report = te.quantization_report(model, x)
    assert report.quantized == ("out",)
    losses, variables = loss_of_steps(model, x, DELAYED)
    assert losses[2] < losses[0]
    assert set(variables[STATE]) == {"out"}


def test_a_map_of_the_parameters_alone_stays_quantized(x):
    class Masked(nn.Module):
        @nn.compact
        def __call__(self, x):
            masked = nn.map_variables(nn.Dense, "params", lambda tree: jax.tree.map(jnp.tanh, tree), init=True)
            return nn.Dense(32, name="out")(masked(64, name="inner")(x))

    model = te.quantize_model(Masked(), x)
    with autocast(DELAYED):
        assert te.quantization_report(model, x).quantized == ("inner",)


def test_a_layer_of_this_package_with_such_a_state_is_refused(x):
    with (
        autocast(DELAYED),
        pytest.raises(QuantizerStateError, match=r"out of nn\.WeightNorm, or a recipe without"),
    ):
        nn.WeightNorm(te.Linear(32, 64)).init(jax.random.key(1), x)
    with autocast(Float8CurrentScaling()):
        assert nn.WeightNorm(te.Linear(32, 64)).init_with_output(jax.random.key(1), x)[0].shape == (4, 16, 64)


@pytest.mark.costly
def test_a_filter_that_leaves_the_states_alone_is_no_obstacle(x):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return te.Linear(32, 64, name="te")(nn.Dense(32)(x))

    model = nn.WeightNorm(Block(), variable_filter={"Dense_0"})
    losses, variables = loss_of_steps(model, x, DELAYED)
    # A loss is a square of products, whose factors e4m3 rounds by at most 2^-4.
    np.testing.assert_allclose(losses, loss_of_steps(model, x, None)[0], rtol=2**-3)
    history = variables[STATE]["layer_instance"]["te"]["quantizers"]["x"]["amax_history"]
    assert float(history[0]) > 0


class Router(nn.Module):
    """An expert layer whose router has states of its own, under no recipe."""

    words: frozenset = frozenset({"kernel"})

    @nn.compact
    def __call__(self, x):
        options = RouterOptions(num_experts=4, score_function="sigmoid", enable_expert_bias=True)
        return nn.WeightNorm(te.MoE(32, 64, options, name="moe"), variable_filter=self.words)(x)


@pytest.mark.slow
def test_a_router_s_states_are_no_obstacle(x):
    variables = Router().init(jax.random.key(1), x)
    assert "expert_bias" in str(jax.tree_util.tree_structure(variables[STATE]))
    assert jnp.isfinite(Router().apply(variables, x)).all()


def test_a_router_s_states_that_would_be_normalized_are_named(x):
    with pytest.raises(QuantizerStateError, match=r"(?m)expert_bias, which nn.WeightNorm .* out of nn.WeightNorm$"):
        Router(words=frozenset({"kernel", "expert_bias"})).init(jax.random.key(1), x)


class Projection(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("kernel", nn.initializers.lecun_normal(), (32, 64))


class Projected(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(32, name="out")(nn.WeightNorm(Projection(name="inner"))(x))


def test_parameters_of_own_modules_are_decided_about_like_layers(x):
    model = te.quantize_model(Projected(), x, rules={"*": "ambient"})
    with autocast(DELAYED):
        report = te.quantization_report(model, x)
    assert report.quantized == ("out",)
    assert "WeightNorm" in report.left["inner.kernel"]
    losses, variables = loss_of_steps(model, x, DELAYED)
    assert losses[2] < losses[0]
    assert set(variables[STATE]) == {"out"}
    with autocast(Float8CurrentScaling()):
        assert te.quantization_report(model, x).quantized == ("inner.kernel", "out")


def test_the_scales_of_a_scanned_wrapper_are_no_kernels_in_the_report(x):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _=None):
            return x + nn.Dense(32, name="b")(nn.relu(nn.WeightNorm(nn.Dense(32, name="a"))(x))), None

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"params": 0, STATE: 0}
            return nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=2)(name="s")(x, None)[0]

    model = te.quantize_model(Stack(), x)
    with autocast(DELAYED):
        assert set(te.quantization_report(model, x).left) == {"s.a"}
