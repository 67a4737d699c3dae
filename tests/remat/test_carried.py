"""What a recomputed call changes in modules: that it reaches them, once, as after a plain call."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te.config import RecomputeConfig, RouterOptions, TransformerConfig
from jax_te.layers import LayerNormLinear, LayerNormMLP, Linear, MoE
from jax_te.megatron import MLP
from jax_te.models import run_layers
from jax_te.recipe import Float8CurrentScaling, autocast
from jax_te.remat import remat, selective_recompute
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_close, draw

X = draw("x", (4, 16))


class Sown(nnx.Module):
    """Counts its calls, keeps its last output, draws from streams of its own, and has a layer in two places."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.norm = nnx.Linear(16, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.calls, self.last = 0, nnx.data(None)
        self.inner = nnx.List([nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])
        self.rngs = rngs
        self.twin = self.linear

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls += 1
        y = self.norm(self.linear(x) + self.twin(x))
        for layer in self.inner:
            y = layer(y)
        self.last = nnx.Cache(y)
        return y + jax.random.normal(self.rngs.noise(), y.shape)


def modules() -> dict[str, Any]:
    """Modules whose calls change their state, and the arguments of these calls."""
    first = {"is_first_microbatch": True}
    return {
        "Dropout": (nnx.Dropout(0.5, rngs=nnx.Rngs(0)), {}),
        "BatchNorm": (nnx.BatchNorm(16, rngs=nnx.Rngs(0)), {}),
        "own": (Sown(nnx.Rngs(0)), {}),
        "Linear": (Linear(16, 16, rngs=nnx.Rngs(0)), first),
        "LayerNormLinear": (LayerNormLinear(16, 16, rngs=nnx.Rngs(0)), first),
        "LayerNormMLP": (LayerNormMLP(16, 32, rngs=nnx.Rngs(0)), first),
    }


def state(module: nnx.Module) -> tuple[Any, list[Any]]:
    """Return the structure and the arrays of a module, with the numbers of random keys."""
    graph, arrays = nnx.split(module)
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(arrays)]
    leaves = zip(jax.tree.leaves(arrays), is_key, strict=True)
    return (graph, jax.tree.structure(arrays)), [jax.random.key_data(leaf) if key else leaf for leaf, key in leaves]


def called(module: nnx.Module, arguments: dict[str, Any], how: str, policy: Any) -> tuple[Any, Any]:
    """Return results of two calls and the state after them."""
    call = functools.partial(remat, policy=policy) if policy is not None else lambda f, *a, **k: f(*a, **k)

    def loss(module: nnx.Module, x: jax.Array) -> Any:
        y = call(module, x, **arguments)
        return jnp.square(y).sum(), y

    def in_grad(module: nnx.Module, x: jax.Array) -> Any:
        return nnx.value_and_grad(loss, has_aux=True)(module, x)

    step: Any = {"eager": loss, "jit": nnx.jit(loss), "grad": in_grad, "jit of grad": nnx.jit(in_grad)}[how]
    with autocast(Float8CurrentScaling()):
        results = [step(module, X), step(module, 2 * X)]
    return results, state(module)


@pytest.mark.costly(
    "LayerNormMLP-jit",
    "own-eager",
    slow=(
        "Linear-jit of grad",
        "own-grad",
        "Dropout-eager",
        "LayerNormLinear-grad",
        "BatchNorm-eager",
        "own-jit of grad",
        "own-jit",
        "Linear-eager",
        "Dropout-jit of grad",
    ),
)
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in ("Dropout", "BatchNorm", "own", "Linear") for how in ("eager", "jit of grad")),
        ("own", "jit"),
        ("own", "grad"),
        ("LayerNormLinear", "grad"),
        ("LayerNormMLP", "jit"),
    ],
)
def test_a_module_is_left_as_by_a_plain_call(name: str, how: str) -> None:
    plain_results, (plain_structure, plain_arrays) = called(*modules()[name], how, None)
    structure, arrays = state(modules()[name][0])
    changed = [not jnp.array_equal(*pair) for pair in zip(arrays, plain_arrays, strict=False)]
    assert structure != plain_structure or any(changed), "a call changes state"
    results, (structure, arrays) = called(*modules()[name], how, "full")
    assert structure == plain_structure
    jax.tree.map(assert_bitwise, (jax.tree.leaves(results), arrays), (jax.tree.leaves(plain_results), plain_arrays))


class Remembers(nnx.Module):
    """Adds what its last call kept, in a Variable that each call sets anew, and the number of its calls."""

    def __init__(self) -> None:
        self.kept, self.calls = nnx.Variable(jnp.ones(16)), 0
        self.scale = nnx.Param(jnp.full(16, 0.5))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.calls += 1
        y = self.scale[...] * x + self.kept[...] + self.calls
        self.kept = nnx.Variable(jnp.sin(y))
        return y


class Pair(nnx.Module):
    """One module in two places, one of them a list."""

    def __init__(self, module: nnx.Module) -> None:
        self.first, self.more = module, nnx.List([module])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.more[0](self.first(x))


# How the module `m` stands in several places of a recomputed call.
TWINS: dict[str, Any] = {
    "two arguments": lambda call, m, x: call(lambda a, b, x: b(a(x)), m, m, x),
    "a keyword": lambda call, m, x: call(lambda a, x, others: others["b"](a(x)), m, x, others={"b": m}),
    "the function": lambda call, m, x: call(lambda a, x: a(a(x)), m, call(m, x)),
    "a module": lambda call, m, x: call(Pair(m), x),
    "a module and an argument": lambda call, m, x: call(lambda pair, b, x: b(pair(x)), Pair(m), m, x),
}


@pytest.mark.parametrize("way", TWINS)
def test_a_module_in_several_places_is_one(way: str) -> None:
    """What a call sets in one place the next call reads in the other, as in a plain call."""

    def results(call: Any) -> Any:
        module = Remembers()

        @nnx.jit
        def step(module: nnx.Module, x: jax.Array) -> Any:
            return nnx.value_and_grad(lambda module: jnp.square(TWINS[way](call, module, x[0])).sum())(module)

        return jax.tree.leaves(step(module, X)), jax.tree.leaves(nnx.state(module)), module.calls

    (plain, plain_state, calls), (found, found_state, found_calls) = (
        results(call) for call in (lambda f, *args, **kwargs: f(*args, **kwargs), remat)
    )
    assert calls == found_calls > 1
    # fp32: recomputation may fuse a sum in another order, an ulp of each term.
    for a, b in zip([*found, *found_state], [*plain, *plain_state], strict=True):
        assert_close(a, b, TOLERANCE["float32"])


class Own(nnx.Module):
    """A layer of a stack with state of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear, self.norm = Linear(16, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linear.is_first_microbatch = True

    def __call__(self, x: jax.Array, *, dropout_key: Any) -> jax.Array:
        return x + self.dropout(self.norm(self.linear(x)))


def run_stack(recipe: Any, **options: Any) -> tuple[Any, Any]:
    """Return results of two jitted gradients of a stack, and its state."""
    layers = nnx.List([Own(nnx.Rngs(number)) for number in range(4)])

    def loss(layers: Any, x: jax.Array) -> Any:
        return jnp.square(run_layers(list(layers), x, [None] * 4, **options)).sum()

    step = nnx.jit(nnx.value_and_grad(loss))
    with autocast(recipe):
        results = [step(layers, x) for x in (X[None], 2 * X[None])]
    return results, state(layers)


@pytest.mark.costly("2", slow=["1"])
@pytest.mark.parametrize("recomputed", [1, 2, None])
def test_layers_of_a_loop_are_left_as_by_calls_of_each(recomputed: int | None) -> None:
    """With groups of one or two recomputed layers, and without recomputation."""
    recompute = RecomputeConfig()
    if recomputed is not None:
        recompute = RecomputeConfig(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=recomputed
        )
    results, (structure, arrays) = run_stack(None, recompute=recompute, scan=True)
    plain_results, (plain_structure, plain_arrays) = run_stack(None, scan=False)
    assert structure == plain_structure
    # The compiler fuses a loop in another way, so that sums differ in their last bits.
    close = functools.partial(assert_close, tolerance=1e-5)
    jax.tree.map(close, (jax.tree.leaves(results), arrays), (jax.tree.leaves(plain_results), plain_arrays))


@pytest.mark.slow
def test_layers_of_a_loop_keep_their_cached_kernels() -> None:
    structure, arrays = run_stack(Float8CurrentScaling(), scan=True)[1]
    plain_structure, plain_arrays = run_stack(Float8CurrentScaling(), scan=False)[1]
    assert structure == plain_structure
    kernels = [pair for pair in zip(arrays, plain_arrays, strict=True) if "float8" in pair[1].dtype.name]
    assert len(kernels) == 4
    for kept, plain in kernels:
        assert_bitwise(kept, plain)


def test_layers_of_a_loop_that_share_state_are_refused() -> None:
    layers = [Own(nnx.Rngs(0)), Own(nnx.Rngs(1))]
    layers[1].dropout = layers[0].dropout
    with pytest.raises(ValueError, match=r"layers share state that their calls change .*RngCount.*scan=False"):
        run_layers(layers, X[None], [None] * 2, scan=True)


@pytest.mark.costly("mlp", slow=["moe", "moe_act", "shared_experts"])
@pytest.mark.parametrize("module", ["activation", "moe", "moe_act", "mlp", "shared_experts"])
def test_a_part_of_a_layer_that_is_recomputed_caches_its_kernels(module: str) -> None:
    def run(*modules: str) -> tuple[Any, Any]:
        rngs = nnx.Rngs(0)
        if "mlp" in module or module == "activation":
            config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
            layer: Any = MLP(config, rngs=rngs)
        else:
            layer = MoE(16, 16, RouterOptions(num_experts=2), bias=False, shared_expert_intermediate_size=16, rngs=rngs)

        def loss(layer: Any, x: jax.Array, first: bool) -> Any:
            y = layer(x, is_first_microbatch=first)
            return jnp.square(y[0] if isinstance(y, tuple) else y).sum()

        with autocast(Float8CurrentScaling()), selective_recompute(*modules):
            results = nnx.jit(nnx.value_and_grad(loss), static_argnums=2)(layer, X[None], True)
        return results, state(layer)

    (results, (structure, arrays)), (plain_results, (plain_structure, plain_arrays)) = run(module), run()
    assert structure == plain_structure
    jax.tree.map(assert_bitwise, (jax.tree.leaves(results), arrays), (jax.tree.leaves(plain_results), plain_arrays))
