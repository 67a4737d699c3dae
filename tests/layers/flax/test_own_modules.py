"""GEMMs of modules of people's own, which a rule of `quantize_model` reaches: forms of Gemma, Bonsai and LLaDA."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType

from jax_te.layers import EinsumOp, Linear, dequantize_model, prepare_quantization, quantizable_modules, quantize_model
from jax_te.megatron import GlobMatcher, RecipeConfig, apply_quantization_config
from jax_te.quantize import frozen_scales
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, ModuleRecipe, autocast
from jax_te.training import Optimizer, create_train_state, make_eval_step, make_train_step, value_and_grad

CURRENT, DELAYED = Float8CurrentScaling(), DelayedScaling(amax_history_len=2)
X = jax.random.normal(jax.random.key(0), (2, 16, 32))
HEADS = jax.random.normal(jax.random.key(1), (2, 16, 2, 16))


class Own(nnx.Module):
    """A module with one parameter."""

    def __init__(self, shape: tuple[int, ...], rngs: nnx.Rngs, dtype: Any = jnp.float32):
        self.w = nnx.Param(jax.random.normal(rngs.params(), shape, dtype))


class Einsum(Own):
    """Of Gemma: the equation is an argument of the call."""

    def __call__(self, equation: str, x: jax.Array) -> jax.Array:
        return jnp.einsum(equation, x, self.w[...])


class Matmul(Own):
    """Of LLaDA, where its sharding is an argument of the call."""

    def __call__(self, x: jax.Array, *, out_sharding: Any = None) -> jax.Array:
        return jnp.matmul(x, self.w, out_sharding=out_sharding)


class Operator(Own):
    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.silu(x @ self.w.astype(x.dtype))


class Dot(Own):
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.dot(x, jnp.transpose(self.w[...]))


class DotGeneral(Own):
    def __call__(self, x: jax.Array) -> jax.Array:
        return lax.dot_general(x, self.w[...], (((2,), (0,)), ((), ())), preferred_element_type=jnp.float32)


class KernelFirst(Own):
    def __call__(self, x: jax.Array) -> jax.Array:
        return lax.dot_general(self.w[...], x, (((0,), (2,)), ((), ())))


class Reshaped(Own):
    """Projections to heads by one matrix."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("bsd,ndh->bsnh", x, self.w.reshape(2, 16, 32).swapaxes(1, 2))


class Compiled(Own):
    """Under jit and checkpoint, with an activation in the same function."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.checkpoint(jax.jit(lambda w, x: jnp.tanh(x @ w)))(self.w[...], x)


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
# Class, shape of the parameter, equation, what follows.
CALLS = {
    "jnp.matmul": (Matmul, (32, 48), "btd,df->btf", lambda y: y),
    "x @ w": (Operator, (32, 48), "btd,df->btf", jax.nn.silu),
    "jnp.dot": (Dot, (48, 32), "btd,fd->btf", lambda y: y),
    "lax.dot_general": (DotGeneral, (32, 48), "btd,df->btf", lambda y: y),
    "the parameter first": (KernelFirst, (32, 48), "btd,df->fbt", lambda y: y),
    "a reshaped parameter": (Reshaped, (32, 32), "btd,fd->btf", lambda y: y.reshape(2, 16, 2, 16)),
    "jit and checkpoint": (Compiled, (32, 48), "btd,df->btf", jnp.tanh),
}


def results(fn: Any, *args: Any) -> Any:
    """Return value and gradients of ``fn``, whose result is weighted by its places."""

    def loss(*args: Any) -> jax.Array:
        y = fn(*args)
        return jnp.sum(jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape) * y)

    with frozen_scales():
        return jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(args)))))(*args)


def with_kernel(module: Own, call: Any) -> Any:
    """Return ``call`` as a function of the parameter and the input."""
    graphdef, kernel, rest = nnx.split(module, nnx.Param, ...)
    return lambda w, x: call(nnx.merge(graphdef, jax.tree.map(lambda _: w, kernel), rest), x)


def assert_quantized_as_einsum_op(module: Own, call: Any, equation: str, after: Any, x: jax.Array, recipe: Any) -> None:
    """Assert that ``call`` gives the bits of `EinsumOp`, and without a recipe those of before."""
    w = module.w[...]
    plain = results(with_kernel(module, call), w, x)
    with autocast(recipe):
        assert quantize_model(module, x, method=call, rules={"w": "ambient"}).quantized == ("w",)
        op = EinsumOp()
    jax.tree.map(np.testing.assert_array_equal, results(with_kernel(module, call), w, x), plain)
    with autocast(recipe):
        actual = results(with_kernel(module, call), w, x)
        expected = results(lambda w, x: after(op(equation, x, w)), w, x)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert actual[0] != plain[0]


# With state, and with scales along the sums, for one that sums over two axes.
OTHERS = [("BTNH,NHD->BTD", recipe) for recipe in (DELAYED, Float8BlockScaling())]


@pytest.mark.costly(
    "...H,HF->...F-current",
    "...F,NFH->...NH-current",
    "BTNH,NHD->BTD-current",
    slow=(
        "BTNH,NHD->BTD-delayed",
        "...F,NHF->...NH-current",
        "BSD,CKDH->CBSKH-current",
        "BTD,SNDH->SBTNH-current",
        "BTD,NDH->BTNH-current",
    ),
)
@pytest.mark.parametrize(
    ("equation", "recipe"),
    [*((equation, CURRENT) for equation in EQUATIONS), *OTHERS],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_an_einsum_of_a_module_is_the_gemm_of_flax_s(equation, recipe):
    shape, x = EQUATIONS[equation]
    module = Einsum(shape, nnx.Rngs(0))
    assert_quantized_as_einsum_op(module, lambda m, x: m(equation, x), equation, lambda y: y, x, recipe)


@pytest.mark.costly(
    "a reshaped parameter", "jnp.dot", slow=("jit and checkpoint", "the parameter first", "jnp.matmul", "x @ w")
)
@pytest.mark.parametrize("kind", CALLS)
def test_a_contraction_is_reached_however_it_is_written(kind):
    cls, shape, equation, after = CALLS[kind]
    assert_quantized_as_einsum_op(cls(shape, nnx.Rngs(0)), lambda m, x: m(x), equation, after, X, CURRENT)


class Block(nnx.Module):
    """Two parameters in one module, another module inside, dropout, a cache, and results that are not arrays."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.up, self.down = (nnx.Param(init(rngs.params(), shape)) for shape in ((32, 64), (64, 32)))
        self.out = Einsum((32, 32), rngs)
        self.dropout, self.calls, self.hidden = nnx.Dropout(0.5, rngs=rngs), 0, nnx.data(None)

    def __call__(self, x, *, keep=False, deterministic=False):
        hidden = self.dropout(jax.nn.gelu(x @ self.up), deterministic=deterministic)
        self.calls += 1
        if keep:
            self.hidden = nnx.Cache(hidden)
        return {"y": self.out("btd,de->bte", hidden @ self.down), "name": "block", "cache": None}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.block, self.head = Block(rngs), Matmul((32, 16), rngs)

    def __call__(self, x):
        return self.head(x + self.block(x, deterministic=True)["y"])


BLOCK = {"block": "ambient", "block.out": "ambient"}
QUANTIZED = ("block.down", "block.out.w", "block.up")


def square(model: Any, x: jax.Array = X, key: Any = None) -> jax.Array:
    return jnp.mean(jnp.square(model(x)))


@pytest.mark.costly
def test_only_what_a_rule_fits_is_reached_and_the_report_lists_it():
    model = Net(nnx.Rngs(0))
    before, value = nnx.state(model), model(X)
    report = quantize_model(model, X, rules={"block.down": None, **BLOCK})
    assert report.quantized == ("block.out.w", "block.up")
    assert report.left["block.down"] == "the rule 'block.down'"
    assert (
        report.left["head"]
        == "it is none of Flax's linear layers; its GEMMs take w; a rule reaches those in its __call__"
    )
    assert "block.up     Block   by the rule 'block'" in str(report)
    # The same Variables, and the same numbers where no recipe is in force.
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(before)
    assert isinstance(model.block, Block)
    np.testing.assert_array_equal(model(X), value)
    # What is reached stays so; a rule adds the head, which has a recipe of its own.
    report = quantize_model(model, X, rules={"head": CURRENT})
    assert report.quantized == ("block.out.w", "block.up", "head.w")
    assert [path for path, _ in quantizable_modules(model)] == list(report.quantized)
    assert np.any(np.asarray(model(X)) != np.asarray(value))
    # A quantization file finds the parameters by the same paths.
    payload = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}}
    apply_quantization_config(model, RecipeConfig([GlobMatcher("head.w", "high")], {"high": payload}))
    np.testing.assert_array_equal(model(X), value)
    with autocast(CURRENT):
        assert np.any(np.asarray(model(X)) != np.asarray(value))
        dequantize_model(model)
        np.testing.assert_array_equal(model(X), value)
    assert (type(model.block), quantizable_modules(model)) == (Block, [])
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(before)


@pytest.mark.costly
def test_what_else_a_call_does_is_done_once():
    plain, model = Block(nnx.Rngs(0)), Block(nnx.Rngs(0))
    quantize_model(model, X, rules={"": "ambient", "out": "ambient"})
    with autocast(CURRENT):
        for block in (plain, model):
            block(X)
            result = block(X, keep=True)
        assert (result["name"], result["cache"]) == ("block", None)
        assert model.calls == plain.calls == 2
        assert model.dropout.rngs.count[...] == plain.dropout.rngs.count[...] == 2
        # The same elements were dropped.
        np.testing.assert_array_equal(*(block.hidden[...] == 0.0 for block in (plain, model)))
        for block in (plain, model):
            compiled = nnx.jit(lambda block, x: block(x)["y"])(block, X)
        assert (model.calls, model.dropout.rngs.count[...]) == (3, 3)
        assert np.any(np.asarray(compiled) != np.asarray(plain(X)["y"]))
    gradients = nnx.grad(lambda block: jnp.sum(block(X, deterministic=True)["y"]))(model)
    assert set(gradients) == {"up", "down", "out"}


class Counter(nnx.Module):
    def __init__(self):
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self) -> None:
        self.calls[...] += 1


class Stateful(Own):
    """A parameter in one module with statistics, a cache, random numbers, and a module that counts."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__((32, 32), rngs)
        self.norm, self.dropout, self.counter = nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(0.5, rngs=rngs), Counter()
        self.seen, self.index = nnx.Cache(jnp.zeros((4, 32))), nnx.Cache(jnp.zeros((), jnp.int32))
        self.sums, self.steps = nnx.data({"calls": jnp.zeros((), jnp.int32)}), nnx.data([jnp.zeros((), jnp.int32)])

    def __call__(self, x: jax.Array) -> jax.Array:
        self.counter()
        y = self.dropout(self.norm(x @ self.w))
        self.seen[...] = self.seen.at[self.index[...]].set(x.mean((0, 1)))
        self.index[...] += 1
        self.sums["calls"] += 1  # in place: the dict and the list are those of before
        self.steps[0] += 1
        return y


CALLERS: dict[str, Any] = {
    "eager": lambda model: model(X),
    "jit": nnx.jit(lambda model: model(X)),
    "value_and_grad": nnx.value_and_grad(square),
    "the library's value_and_grad": value_and_grad(square),
}


@pytest.mark.costly(
    "current-jit",
    slow=(
        "delayed-the library's value_and_grad",
        "current-eager",
        "current-value_and_grad",
        "current-the library's value_and_grad",
    ),
)
@pytest.mark.parametrize(
    ("recipe", "caller"),
    # Delayed scaling needs the library's value_and_grad.
    [*((CURRENT, caller) for caller in CALLERS), (DELAYED, "jit"), (DELAYED, "the library's value_and_grad")],
    ids=lambda value: getattr(value, "name", value),
)
def test_what_a_call_changes_in_place_is_changed(recipe, caller):
    plain, model = Stateful(nnx.Rngs(0)), Stateful(nnx.Rngs(0))
    with autocast(recipe):
        quantize_model(model, X, rules={"": "ambient"})
        for each in (plain, model):
            for _ in range(2):
                CALLERS[caller](each)
    counts = (model.counter.calls, model.index, model.dropout.rngs.count)
    assert [int(count[...]) for count in counts] == [2, 2, 2]
    assert int(model.sums["calls"]) == 2
    assert [int(step) for step in model.steps] == [2]
    np.testing.assert_array_equal(model.seen[...], plain.seen[...])
    assert np.any(model.norm.mean[...] != plain.norm.mean[...])  # of a quantized product
    # Means of 32 products of operands that are rounded by 2^-4 at most.
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], atol=2.0**-5)


@pytest.mark.slow
def test_a_model_of_own_modules_trains_under_delayed_scaling():
    losses = []
    with autocast(DELAYED):
        model = Net(nnx.Rngs(0))
        quantize_model(model, X, rules=BLOCK)
        optimizer = Optimizer(model, optax.adam(1e-2))
        for _ in range(3):
            loss, gradients = nnx.jit(value_and_grad(square))(model)
            optimizer.update(model, gradients)
            losses.append(float(loss))
        newest = model.block.up_gemm.quantizers["x"]["amax_history"][0]
        assert newest == jnp.max(jnp.abs(X))
        state = create_train_state(model, optax.adam(1e-2), key=jax.random.key(0))
        step = make_train_step(square, optax.adam(1e-2), microbatches=2)
        state, _ = step(state, jnp.concatenate([X, 2.0 * X]))
        history = state.model.block.up_gemm.quantizers["x"]["amax_history"]
        np.testing.assert_array_equal(history, [2.0 * newest, newest])
        np.testing.assert_array_equal(make_eval_step(square)(state, X), square(state.model))
    assert losses[2] < losses[1] < losses[0]
    # Recipes that differ between training and evaluation.
    model, value = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))(X)
    quantize_model(model, X, rules=dict.fromkeys(BLOCK, ModuleRecipe(training=CURRENT, evaluation=None)))
    with autocast(CURRENT):
        assert np.any(np.asarray(model(X)) != np.asarray(value))
        model.eval()
        np.testing.assert_array_equal(model(X), value)


def test_layers_that_are_quantized_go_on_with_their_state():
    """A later call adds layers of Flax's: amax histories of the others are not lost."""
    with autocast(DELAYED):
        model = nnx.List(
            [Linear(32, 32, rngs=nnx.Rngs(0)), Operator((32, 32), nnx.Rngs(1)), nnx.Linear(32, 32, rngs=nnx.Rngs(2))]
        )
        call = lambda model, x: model[2](model[1](model[0](x)))  # noqa: E731
        rules = {"1.w": "ambient", "2": None}
        quantize_model(model, X, method=call, rules=rules)
        histories = [model[0].quantizers["x"]["amax_history"], model[1].w_gemm.quantizers["x"]["amax_history"]]
        for history in histories:
            history[...] = jnp.array([3.0, 2.0])
        quantize_model(model, X, method=call, rules=rules | {"2": "ambient"})
        assert not model[2].dot_general.quantizers["x"]["amax_history"][...].any()
        again = [model[0].quantizers["x"]["amax_history"], model[1].w_gemm.quantizers["x"]["amax_history"]]
        for history in again:
            np.testing.assert_array_equal(history[...], [3.0, 2.0])
    with autocast(DelayedScaling(amax_history_len=4)):  # whose state is another
        quantize_model(model, X, method=call, rules=rules)
        np.testing.assert_array_equal(model[0].quantizers["x"]["amax_history"][...], jnp.zeros(4))


def test_a_quantized_module_is_pickled_and_copied():
    model = Operator((32, 32), nnx.Rngs(0))
    with autocast(CURRENT):
        quantize_model(model, X, rules={"*": "ambient"})
        for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            assert type(again) is type(model)
            np.testing.assert_array_equal(again(X), model(X))


@pytest.mark.costly
def test_stacked_modules_have_a_state_each():
    make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: Matmul((32, 32), rngs)))
    model = nnx.Dict(layers=make(nnx.Rngs(0)))

    def run(model, x):
        body = nnx.remat(lambda x, layer: jnp.tanh(layer(x)))
        return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, model["layers"])

    def unrolled(model, x):
        for layer in range(3):
            graphdef, state = nnx.split(model["layers"])
            x = jnp.tanh(nnx.merge(graphdef, jax.tree.map(lambda leaf, layer=layer: leaf[layer], state))(x))
        return x

    plain = run(model, X)
    assert quantize_model(model, X, method=run, rules={"layers": "ambient"}).quantized == ("layers.w",)
    np.testing.assert_array_equal(run(model, X), plain)
    assert prepare_quantization(model, DELAYED) is model
    state = model["layers"].w_gemm.quantizers
    assert state["x"]["amax_history"].shape == (3, 2)
    with autocast(DELAYED):
        value_and_grad(lambda model, x: jnp.sum(run(model, x)))(model, X)
        # tanh of XLA differs in the last bits with what it is fused with.
        np.testing.assert_allclose(run(model, X), unrolled(model, X), rtol=1e-5)
    kernels = jnp.max(jnp.abs(model["layers"].w[...]), axis=(1, 2))
    np.testing.assert_array_equal(state["kernel"]["amax_history"][:, 0], kernels)


class Sharded(nnx.Module):
    """Gemma's feed-forward block, with names for the axes of parameters and places for results."""

    def __init__(self, rngs: nnx.Rngs, names: Any = ("embed", "mlp"), out: tuple[Any, Any] = (None, None)):
        init, self.out = nnx.initializers.lecun_normal(), out
        self.gating = nnx.Param(init(rngs.params(), (2, 32, 64)), out_sharding=(None, *names))
        self.linear = nnx.Param(init(rngs.params(), (32, 64)), out_sharding=names)

    def __call__(self, x):
        gate = jnp.einsum("...F,NFH->...NH", x, self.gating[...], out_sharding=self.out[0])
        hidden = jax.nn.gelu(gate[..., 0, :]) * gate[..., 1, :]
        return jnp.matmul(hidden, self.linear[...].T, out_sharding=self.out[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_on_a_mesh_the_numbers_are_those_of_one_device(kind):
    """Fully sharded along one axis of the mesh, columns and then rows split along the other one."""
    x = jax.random.normal(jax.random.key(0), (8, 16, 32))
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2)
    explicit = kind == AxisType.Explicit
    places = jax.P("fsdp", None, None, "tensor"), jax.P("fsdp")
    run = value_and_grad(lambda model, x: jnp.sum(jnp.sin(model(x))))

    def make(**options: Any) -> Sharded:
        with nnx.use_eager_sharding(False):
            return Sharded(nnx.Rngs(0), **options)

    with autocast(DELAYED):
        model = make()
        quantize_model(model, x, rules={"": "ambient"})
        expected = nnx.jit(run)(model, x)
        rules = [("batch", "fsdp"), ("embed", "fsdp"), ("mlp", "tensor")]
        with jax.set_mesh(mesh), nnx.logical_axis_rules(() if explicit else rules):
            model = make(names=("fsdp", "tensor"), out=places) if explicit else make()
            for parameter in (model.gating, model.linear):
                lead = (None,) * (parameter.ndim - 2)
                parameter.set_value(jax.device_put(parameter[...], jax.P(*lead, "fsdp", "tensor")))
            quantize_model(model, jax.device_put(x, jax.P("fsdp")), rules={"": "ambient"})
            actual = nnx.jit(run)(model, jax.device_put(x, jax.P("fsdp")))
            assert str(jax.make_jaxpr(model)(jax.device_put(x, jax.P("fsdp")))).count("shard_map") == 2
    for a, e in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(a, e, rtol=2.0**-16, atol=2.0**-16 * np.abs(e).max())


class Placed(Own):
    """A function under jit with the sharding of its result."""

    def __call__(self, x: jax.Array) -> jax.Array:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        return jax.jit(jnp.matmul, out_shardings=jax.NamedSharding(mesh, jax.P("data")))(x, self.w[...])


def test_the_sharding_that_a_jit_inside_was_given_is_kept():
    model, x = Placed((32, 16), nnx.Rngs(0)), jnp.ones((8, 32))
    plain = model(x)
    with autocast(CURRENT):
        quantize_model(model, x, rules={"": "ambient"})
        assert model(x).sharding.is_equivalent_to(plain.sharding, 2)


class Decorated(Own):
    @nnx.jit
    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ self.w)


class Recomputed(Own):
    @nnx.remat
    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ self.w)


@pytest.mark.costly("Recomputed")
@pytest.mark.parametrize("cls", [Decorated, Recomputed])
def test_decorated_calls_are_reached_in_each_model(cls):
    """Also in the second one, whose calls JAX has traced before."""

    def inside(model: nnx.Module, x: jax.Array) -> jax.Array:
        return nnx.remat(compiled)(model, x)

    compiled = nnx.jit(lambda model, x: model(x))
    plain = cls((32, 32), nnx.Rngs(0))(X)
    for _ in range(2):
        model = nnx.Sequential(cls((32, 32), nnx.Rngs(0)))
        assert quantize_model(model, X, method=inside, rules={"*": "ambient"}).quantized == ("layers.0.w",)
        np.testing.assert_array_equal(model(X), plain)
        with autocast(CURRENT):
            assert np.any(np.asarray(model(X)) != np.asarray(plain))
            gradients = nnx.grad(lambda model: jnp.sum(inside(model, X)))(model)
            assert jnp.all(jnp.isfinite(gradients["layers"][0]["w"][...]))


class Precise(Own):
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.matmul(x, self.w[...], precision="highest")


class TwoParameters(Own):
    def __init__(self, shape: tuple[int, ...], rngs: nnx.Rngs):
        super().__init__(shape, rngs)
        self.other = nnx.Param(self.w[...])

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ (self.other @ self.w)


class TwoForms(Own):
    """A parameter that is a kernel for each of the places of its first axis, and one kernel with a sum over it."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("ebd,edf->ebf", x, self.w[...]) + jnp.einsum("ebd,edf->bf", x, self.w[...])[None]


class Sliced(Own):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.w[0]


class InALoop(Own):
    def __call__(self, x: jax.Array) -> jax.Array:
        return lax.map(lambda row: row @ self.w[...], x)


REFUSED = {
    "one kernel and several": (TwoForms, (2, 32, 32), "its contractions .* ambiguous"),
    "a precision": (Precise, (32, 32), r"its precision is .*HIGHEST\)"),
    "two parameters": (TwoParameters, (32, 32), "both of its operands are parameters"),
}


@pytest.mark.costly("one kernel and several")
@pytest.mark.parametrize(("cls", "shape", "why"), REFUSED.values(), ids=REFUSED)
def test_a_contraction_that_no_recipe_can_quantize_is_refused_by_path(cls, shape, why):
    model = nnx.Sequential(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), cls(shape, nnx.Rngs(0)))
    told = (
        rf"the rule 'layers\.1' fits layers\.1\.\w+ \({cls.__name__}\), .*{why}\. Put {{'layers.1.\w+': None}} before"
    )
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match=told):
        quantize_model(model, X, rules={"*0": "ambient", "layers.1": "ambient"})
    assert nnx.graphdef(model) == before
    rules = {"layers.1.*": None, "layers.*": "ambient"}
    assert quantize_model(model, X, rules=rules).quantized == ("layers.0",)


@pytest.mark.parametrize(("cls", "shape", "operation"), [(Sliced, (2, 32, 32), "slice"), (InALoop, (32, 32), "scan")])
def test_a_parameter_that_goes_elsewhere_is_left_with_the_name_of_the_operation(cls, shape, operation):
    model = nnx.Sequential(nnx.Linear(32, 32, rngs=nnx.Rngs(0)), cls(shape, nnx.Rngs(0)))
    with pytest.warns(UserWarning, match=r"rules that fit no layer: layers\.1") as warned:
        report = quantize_model(model, X, rules={"layers.1": "ambient"})
    assert [warning.filename for warning in warned] == [__file__]  # the caller's line
    assert report.quantized == ("layers.0",)
    told = f"its GEMMs take w, but no contraction in its __call__ does so directly: it goes to {operation} there"
    assert report.left["layers.1"].endswith(told)


def test_a_head_that_is_tied_to_the_embedding_is_not_in_its_call():
    model = nnx.Dict(embed=nnx.Embed(64, 32, rngs=nnx.Rngs(0)), up=nnx.Linear(32, 32, rngs=nnx.Rngs(0)))

    def logits(model, tokens):
        return model["embed"].attend(model["up"](model["embed"](tokens)))

    with pytest.warns(UserWarning, match="rules that fit no layer: embed"):
        report = quantize_model(model, jnp.ones((2, 16), int), method=logits, rules={"embed": "ambient"})
    assert report.quantized == ("up",)
    assert "its GEMMs take embedding, but no contraction in its __call__" in report.left["embed"]


class Counting(nnx.Module):
    """A module that changes attributes without arrays in its call."""

    def __init__(self, rngs: nnx.Rngs):
        self.layer = nnx.Linear(4, 4, rngs=rngs)
        self.calls, self.seen, self.left = 0, {"last": None}, "here"

    def __call__(self, x):
        self.calls += 1
        self.seen["last"] = x.shape
        if hasattr(self, "left"):
            del self.left
        return self.layer(x)


@pytest.mark.costly("eager")
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "nnx.jit"])
def test_a_derivative_leaves_attributes_as_flaxs_does(jitted):
    def changed(derivative):
        model = Counting(nnx.Rngs(0))
        derivative = derivative(lambda model, x: jnp.sum(model(x) + model(x)))
        for _ in range(2):
            (nnx.jit(derivative) if jitted else derivative)(model, jnp.ones((2, 4)))
        return model.calls, dict(model.seen), hasattr(model, "left")

    assert changed(value_and_grad) == changed(nnx.value_and_grad) == (4, {"last": (2, 4)}, False)


class Half(nnx.Module):
    """A layer of half precision, whose gradient has a sink, beside a count; its first call makes a Variable."""

    def __init__(self, rngs: nnx.Rngs):
        self.layer = Linear(16, 16, params_dtype=jnp.bfloat16, rngs=rngs)
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        y = self.layer(x, is_first_microbatch=True)
        self.last = nnx.Intermediate(jnp.sum(y))
        return y


class Halves(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.one, self.two = Half(rngs), Half(rngs)
        self.again, self.calls = self.one, 0

    def __call__(self, x):
        self.calls += 1
        return self.two(self.one(x)) + self.again(x)


@pytest.mark.slow
def test_attributes_stay_with_their_modules_where_a_derivative_adds_variables():
    def changed(derivative):
        model = Halves(nnx.Rngs(0))
        for _ in range(2):
            derivative(lambda model, x: jnp.sum(model(x).astype(jnp.float32)))(model, jnp.ones((16, 16), jnp.bfloat16))
        assert model.again is model.one
        kept = [half.layer.kernel_cache is not None for half in (model.one, model.two)]
        return model.calls, model.one.calls, model.two.calls, kept, sorted(vars(model.two.layer))

    with autocast(Float8CurrentScaling()):
        counts = changed(value_and_grad)
        assert counts == changed(nnx.value_and_grad)
    assert counts[:4] == (2, 4, 2, [True, True])


def test_a_list_or_dict_that_a_call_changes_is_refused():
    """The call is traced apart with copies of both, so that the caller would find nothing in them."""

    class Experts(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((32, 32)))

        def __call__(self, x, losses):
            y = x @ self.w[...]
            if isinstance(losses, list):
                losses.append(jnp.mean(y))
            else:
                losses["balance"] = jnp.mean(y)
            return y

    class Model(nnx.Module):
        def __init__(self, kind):
            self.experts, self.kind = Experts(), kind

        def __call__(self, x):
            losses = self.kind()
            return self.experts(x, losses), losses

    for kind in (list, dict):
        with pytest.raises(ValueError, match="Experts changes a list or dict"):
            quantize_model(Model(kind), jnp.ones((16, 32)), rules={"experts": "ambient"})
