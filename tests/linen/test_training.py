"""Flax's own training loop in FP8: its TrainState, optax, and the state that must not be treated as a gradient."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict, freeze
from flax.linen.fp8_ops import fp32_max_grad
from flax.training.train_state import TrainState

import jax_te.linen as te
from jax_te import layers
from jax_te.checkpoint import TrainCheckpointer
from jax_te.errors import QuantizerStateError
from jax_te.quantize import frozen_scales, merge_quantizers
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from jax_te.training import create_train_state, make_train_step
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_close, draw

DELAYED, CURRENT = DelayedScaling(amax_history_len=3), Float8CurrentScaling()
STATE = "_overwrite_with_gradient"
X, Y = draw("x", (2, 8, 32)), draw("y", (2, 8, 32))
LAYER = te.LayerNormLinear(32, 32)
CLIP = 0.005  # far below the norm of the gradients, and of the next states


def optimizer():
    return optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(1e-2, weight_decay=0.1))


def mean_square(y):
    return jnp.mean((y - Y) ** 2)


@jax.jit
def train_step(state):
    """As an existing Linen program has it."""
    loss, grads = jax.value_and_grad(lambda params: mean_square(state.apply_fn(params, X)))(state.params)
    with jax.numpy_dtype_promotion("standard"):
        return state.apply_gradients(grads=grads), loss, grads


def create(params, tx=None):
    return TrainState.create(apply_fn=LAYER.apply, params=params, tx=optimizer() if tx is None else tx)


@pytest.mark.costly
@pytest.mark.wide("delayed")
@pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
def test_flax_train_state_gives_what_make_train_step_gives(recipe):
    tx = optimizer()
    with autocast(recipe):
        variables = LAYER.init(jax.random.key(0), X)
        linen_state = create(te.prepare_quantization(LAYER, nn.unbox(variables), recipe, X), tx)
        assert jax.tree.structure(linen_state.opt_state) == jax.tree.structure(tx.init(nn.unbox(variables["params"])))
        state = create_train_state(te.to_nnx(LAYER, variables), tx, key=jax.random.key(1))
        step = make_train_step(lambda model, batch, key: mean_square(model(batch)), tx)
        losses = []
        for _ in range(4):
            linen_state, loss, _ = train_step(linen_state)
            state, metrics = step(state, X)
            losses.append(float(loss))
            assert_close(loss, metrics["loss"], TOLERANCE["float32"])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.99 * losses[0]
    expected = nn.unbox(te.from_nnx(state.model))
    assert (STATE in expected) == (recipe is DELAYED)
    for collection, tree in expected.items():
        assert jax.tree.structure(linen_state.params[collection]) == jax.tree.structure(tree)
        jax.tree.map(lambda a, b: assert_close(a, b, TOLERANCE["float32"]), linen_state.params[collection], tree)


def test_the_next_state_is_written_back_untouched_by_clipping_and_optimizer():
    with autocast(DELAYED):
        state = create(nn.unbox(LAYER.init(jax.random.key(0), X)))
        for _ in range(2):
            before = state
            state, _, grads = train_step(state)
            jax.tree.map(assert_bitwise, state.params[STATE], grads[STATE])
        # An independent account of it: what the input and the kernels were, and what clipping leaves of the rest.
        history = state.params[STATE]["quantizers"]["kernel"]["amax_history"]
        assert_bitwise(history[0], jnp.max(jnp.abs(before.params["params"]["kernel"])))
        assert history[0] > 10 * CLIP
        scale = state.params[STATE]["quantizers"]["kernel"]["scale"]
        assert_close(scale, 448.0 / history[1], TOLERANCE["float32"])  # the amax of the step before
        assert float(optax.tree.norm(grads["params"])) > CLIP
        moments = optax.tree.get(state.opt_state, "mu")
        assert jax.tree.structure(moments) == jax.tree.structure(state.params["params"])


@pytest.mark.costly
def test_a_run_changes_its_recipe_in_the_middle():
    """Between bf16, delayed and current, with one optimizer state; and variables that know nothing of quantization."""
    plain = nn.unbox(LAYER.init(jax.random.key(0), X))
    with autocast(DELAYED), pytest.raises(QuantizerStateError, match=r"prepare_quantization\(model, variables, recipe"):
        LAYER.apply(plain, X)
    state, losses = create(te.prepare_quantization(LAYER, plain, None, X)), []
    for recipe in (None, DELAYED, CURRENT, DelayedScaling(amax_history_len=2), None):
        params = te.prepare_quantization(LAYER, state.params, recipe, X)
        jax.tree.map(assert_bitwise, params["params"], state.params["params"])
        lengths = {leaf.shape[-1] for leaf in jax.tree.leaves(params[STATE]) if leaf.ndim}
        assert lengths == ({recipe.amax_history_len} if isinstance(recipe, DelayedScaling) else set())
        state = state.replace(params=params)
        with autocast(recipe):
            state, loss, _ = train_step(state)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert int(state.step) == 5


@pytest.mark.costly
def test_prepare_quantization_leaves_others_alone():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            with autocast(None):
                x = te.Linear(32, 32, name="exact")(x)
            other = self.variable(STATE, "other", lambda: {"scale": jnp.zeros(())})
            return te.Linear(32, 32, name="quantized")(x) * (1.0 + other.value["scale"])

    model = Model()
    variables = model.init(jax.random.key(0), X)
    variables = {**variables, STATE: {"other": {"scale": jnp.ones(())}}, "cache": {"a": jnp.ones(2)}}
    prepared = te.prepare_quantization(model, variables, DELAYED, X)
    assert sorted(prepared[STATE]) == ["other", "quantized"]
    assert prepared[STATE]["other"]["scale"] == 1.0
    assert prepared["params"]["exact"]["kernel"].names == ("fsdp", None)  # still boxed
    assert prepared["cache"]["a"] is variables["cache"]["a"]
    with autocast(DELAYED):
        assert model.apply(prepared, X).shape == X.shape
        loss, grads = jax.jit(te.value_and_grad(lambda v: jnp.sum(model.apply(v, X))))(
            {name: prepared[name] for name in ("params", STATE)}
        )
    assert jnp.isfinite(loss)
    assert grads[STATE]["other"]["scale"] != 1.0  # an ordinary gradient, for whoever the state belongs to
    removed = te.prepare_quantization(model, prepared, CURRENT, X)
    assert sorted(removed[STATE]) == ["other"]
    with pytest.raises(ValueError, match="Dense has no layer that"):
        te.prepare_quantization(nn.Dense(2), nn.Dense(2).init(jax.random.key(0), X), DELAYED, X)


@pytest.mark.costly
def test_layers_called_twice_and_not_at_all():
    layer, x = te.Linear(32, 32, False), X

    class Model(nn.Module):
        def setup(self):
            self.shared, self.unused = te.Linear(32, 32, False), te.Linear(32, 32, False)

        def __call__(self, x, everything=False):
            y = self.shared(self.shared(x))
            return self.unused(y) if everything else y

    model = Model()
    with autocast(DELAYED):
        variables = nn.unbox(model.init(jax.random.key(0), x, everything=True))
        kernel = {"params": {"kernel": variables["params"]["shared"]["kernel"]}}
        twice = [{**kernel, STATE: variables[STATE]["shared"]} for _ in range(2)]

        def each(twice):
            return mean_square(layer.apply(twice[1], layer.apply(twice[0], x)))

        def loss_fn(params):
            return mean_square(model.apply(params, x))

        loss, grads = jax.jit(te.value_and_grad(loss_fn))(variables)
        expected_loss, expected = jax.jit(jax.value_and_grad(each))(twice)
        eager_loss, eager = te.value_and_grad(lambda params: (loss_fn(params), {"aux": 1}), has_aux=True)(variables)
    assert_bitwise(loss, expected_loss)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(tree[STATE] for tree in expected))
    jax.tree.map(assert_bitwise, grads[STATE]["shared"], merge_quantizers(stacked))
    jax.tree.map(assert_bitwise, grads[STATE]["unused"], variables[STATE]["unused"])
    total = expected[0]["params"]["kernel"] + expected[1]["params"]["kernel"]
    assert_close(grads["params"]["shared"]["kernel"], total, TOLERANCE["float32"])
    assert_close(eager_loss[0], loss, TOLERANCE["float32"])
    jax.tree.map(lambda a, b: assert_close(a, b, TOLERANCE["float32"]), eager[STATE], grads[STATE])
    loss, grads = te.value_and_grad(lambda params: jnp.sum(params["a"] ** 2))({"a": jnp.array([3.0])})
    assert (float(loss), grads["a"].tolist()) == (9.0, [6.0])


@pytest.mark.costly("float", "maximum")
@pytest.mark.parametrize("dtype", [jnp.float32, fp32_max_grad, jnp.int32], ids=["float", "maximum", "integer"])
def test_states_of_another_package_go_on_or_stay(dtype):
    """As Flax's own FP8 layers have them: the gradient of a float is its next value, where the module is called."""

    class Other(nn.Module):
        @nn.compact
        def __call__(self, x):
            state = self.variable(STATE, "seen", lambda: jnp.ones(2))
            return x if dtype == jnp.int32 else _next_is_three(x, state.value)

    class Model(nn.Module):
        def setup(self):
            self.ours, self.called, self.unused = te.Linear(32, 32), Other(), Other()

        def __call__(self, x, everything=False):
            y = self.called(self.ours(x))
            return self.unused(y) if everything else y

    with autocast(DELAYED):
        variables = nn.unbox(Model().init(jax.random.key(0), X, everything=True))
        convert = functools.partial(jax.lax.convert_element_type, new_dtype=dtype)
        others = {name: {"seen": jax.jit(convert)(jnp.full(2, 2.0))} for name in ("called", "unused")}
        variables = {**variables, STATE: {**variables[STATE], **others}}
        grads = te.value_and_grad(lambda variables: jnp.sum(Model().apply(variables, X)))(variables)[1][STATE]
    values = {name: np.asarray(jax.lax.convert_element_type(grads[name]["seen"], jnp.float32)) for name in others}
    assert grads["unused"]["seen"].dtype == dtype
    assert values["unused"].tolist() == [2.0, 2.0]
    assert values["called"].tolist() == [2.0 if dtype == jnp.int32 else 3.0] * 2


@jax.custom_vjp
def _next_is_three(x, state):
    """``x``; the next value of ``state`` is 3."""
    return x


_next_is_three.defvjp(
    lambda x, state: (x, state),
    lambda state, dx: (dx, jax.lax.convert_element_type(jnp.full(state.shape, 3.0), state.dtype)),
)


@pytest.mark.costly("all")
@pytest.mark.parametrize("frozen", ["all", "states"])
def test_frozen_variables_of_a_layer_called_twice(frozen):
    """States merge by maximum in each of Flax's containers, and gradients come back in the caller's."""
    layer = te.Linear(32, 32, False)

    def loss(variables):
        assert type(variables) is type(given)
        return jnp.sum(layer.apply(variables, layer.apply(variables, X)) ** 2)

    with autocast(DelayedScaling(amax_history_len=1)):
        variables = nn.unbox(layer.init(jax.random.key(0), X))
        given = variables
        expected = te.value_and_grad(loss)(given)[1]
        states = {**variables[STATE], "quantizers": FrozenDict(variables[STATE]["quantizers"])}
        given = freeze(variables) if frozen == "all" else {**variables, STATE: states}
        found = te.value_and_grad(loss)(given)[1]
    assert jax.tree.structure(found) == jax.tree.structure(given)
    for actual, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_bitwise(actual, wanted)


def test_only_variables_are_differentiated():
    model = layers.Linear(16, 16, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"a mapping of collections, got Linear; take jax_te.value_and_grad"):
        te.value_and_grad(lambda model: jnp.sum(model(jnp.ones((1, 16)))))(model)
    layer = te.Linear(16, 16)
    variables = layer.init(jax.random.key(0), jnp.ones((1, 16)))
    state = TrainState.create(apply_fn=layer.apply, params=variables, tx=optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"a mapping of collections, got TrainState; .* state.params"):
        te.value_and_grad(lambda state: jnp.sum(state.apply_fn(state.params, jnp.ones((1, 16)))))(state)


def test_integer_parameters_are_refused_as_jax_refuses_them():
    with pytest.raises(TypeError, match="int32"):
        te.value_and_grad(lambda params: jnp.sum(params["a"].astype(jnp.float32)))({"a": jnp.array([3])})


def test_kernels_kept_between_microbatches():
    with autocast(DELAYED):
        variables = nn.unbox(LAYER.init(jax.random.key(0), X))
        y, kept = LAYER.apply(variables, X, is_first_microbatch=True, mutable=["CachedKernel"])
        assert sorted(kept["CachedKernel"]) == ["kernel_cache"]
        spoiled = {**variables, "params": {**variables["params"], "kernel": jnp.zeros((32, 32))}}

        def loss(params):
            return jnp.sum(LAYER.apply({**spoiled, "params": params, **kept}, X, is_first_microbatch=False))

        assert_bitwise(LAYER.apply({**spoiled, **kept}, X, is_first_microbatch=False), y)
        assert "CachedKernel" not in te.prepare_quantization(LAYER, {**variables, **kept}, DELAYED, X)
        with frozen_scales():
            assert jnp.any(jax.grad(loss)(spoiled["params"])["kernel"] != 0.0)
        with pytest.raises(ValueError, match="kept no quantized kernel"):
            LAYER.apply(variables, X, is_first_microbatch=False)
        with pytest.raises(nn.module.errors.ModifyScopeVariableError, match="CachedKernel"):
            LAYER.apply(variables, X, is_first_microbatch=True)


@pytest.mark.costly("nnx")
@pytest.mark.parametrize("first", ["nnx", "linen"])
def test_checkpoints_go_from_one_to_the_other(first, tmp_path):
    """Parameters and state of a run are saved in one form and read in the other."""
    with autocast(DELAYED):
        variables = nn.unbox(LAYER.init(jax.random.key(0), X))
        variables = train_step(create(variables))[0].params  # with histories that are not empty
        module = te.to_nnx(lambda rngs: layers.LayerNormLinear(32, 32, rngs=rngs), variables)
        saved = nn.unbox(te.from_nnx(module)) if first == "nnx" else variables
        abstract = jax.eval_shape(lambda: nn.unbox(LAYER.init(jax.random.key(0), X)))
        with TrainCheckpointer(tmp_path) as checkpointer:
            checkpointer.save(saved, None, step=1)
            restored, _, _ = checkpointer.restore(abstract)
        jax.tree.map(assert_bitwise, restored, variables)
        assert_bitwise(LAYER.apply(restored, X), module(X))
        assert_bitwise(te.to_nnx(LAYER, restored)(X), LAYER.apply(variables, X))
