"""Which stacks of layers run in a loop, and which recomputation policies a stack refuses."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.config import RecomputeConfig, TransformerConfig
from jax_te.layers import LayerNormMLP, prepare_quantization
from jax_te.models import (
    UNROLL_LIMIT,
    Execution,
    GPTModel,
    T5Model,
    layers_traced_once,
    run_layers,
    runs_scanned,
    stack,
)
from jax_te.ops import loop_over_layers
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, autocast
from jax_te.training import create_train_state, make_train_step, split_model
from tests.support.states import merging

SIZES: dict[str, Any] = {"vocab_size": 32, "max_sequence_length": 8}
TOKENS = jnp.zeros((2, 8), jnp.int32)


def config(layers: int) -> TransformerConfig:
    return TransformerConfig(num_layers=layers, hidden_size=16, num_attention_heads=2)


def program(model: Any, *tokens: jax.Array) -> str:
    """The forward pass, traced."""
    return str(jax.make_jaxpr(lambda model: model(*tokens))(model))


def test_the_number_of_layers_decides() -> None:
    assert [runs_scanned("auto", count) for count in (1, UNROLL_LIMIT, UNROLL_LIMIT + 1)] == [False, False, True]
    assert [runs_scanned(choice, count) for choice in (True, False) for count in (1, 1000)] == [True] * 2 + [False] * 2


@pytest.mark.costly("3")
@pytest.mark.parametrize("layers", [2, 3])
def test_auto_is_the_explicit_choice(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "UNROLL_LIMIT", 2)
    programs = {}
    for scan in (None, "auto", True, False):
        options = {} if scan is None else {"execution": Execution(scan_layers=scan)}
        model = nnx.eval_shape(lambda options=options: GPTModel(config(layers), **SIZES, **options, rngs=nnx.Rngs(0)))
        programs[scan] = program(model, TOKENS)
    assert programs[None] == programs["auto"] == programs[layers > 2]
    assert programs["auto"] != programs[layers <= 2]
    assert (" scan[" in programs["auto"]) == (layers > 2)


@pytest.mark.costly
def test_the_stacks_of_t5_decide_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "UNROLL_LIMIT", 2)
    counts = []
    for encoders, decoders in ((2, 2), (3, 2), (2, 3), (3, 3)):
        model = nnx.eval_shape(
            lambda e=encoders, d=decoders: T5Model(config(d), **SIZES, encoder_num_layers=e, rngs=nnx.Rngs(0))
        )
        counts.append(program(model, TOKENS, TOKENS).count(" scan["))
    assert counts == [0, 1, 1, 2]


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.mlp = LayerNormMLP(16, 32, rngs=rngs)

    def __call__(self, x: jax.Array, dropout_key: Any = None) -> jax.Array:
        y: Any = self.mlp(x)
        return x + y


def test_layers_whose_parameters_have_other_dtypes_are_not_stacked() -> None:
    """A stack has one dtype, so that one of the two would be promoted."""
    layers = nnx.List([Block(nnx.Rngs(i)) for i in range(2)])
    kernel = layers[1].mlp.wi_kernel
    kernel.set_value(kernel.get_value().astype(jnp.bfloat16))
    x = jnp.ones((1, 8, 16))
    assert " scan[" not in str(jax.make_jaxpr(lambda made: run_layers(made, x, [None] * 2, scan=True))(layers))


@pytest.mark.costly(slow=["recipe1"])
@pytest.mark.parametrize("recipe", [None, DelayedScaling(amax_history_len=2)])
def test_what_a_loop_stores_is_behind_a_barrier(recipe: Any) -> None:
    """A GPU would run Transformer Engine's kernels twice: for the stacked array, and for what reads their result."""
    with autocast(recipe):
        parts = [split_model(Block(nnx.Rngs(number))) for number in range(3)]

    def loss(trees: Any, scan: bool) -> jax.Array:
        made = [nnx.merge(parts[i][0], *tree) for i, tree in enumerate(trees)]
        return jnp.sum(jnp.sin(run_layers(made, jnp.ones((1, 16, 16)), [None] * 3, scan=scan)))

    with autocast(recipe):
        trees = [tuple(part[1:]) for part in parts]
        gradient = {scan: jax.grad(functools.partial(loss, scan=scan), allow_int=True) for scan in (True, False)}
        programs = {scan: jax.make_jaxpr(fn)(trees) for scan, fn in gradient.items()}
        values = [jax.tree.leaves(fn(trees)) for fn in gradient.values()]
    assert "optimization_barrier" not in str(programs[False])
    forward, _ = (eqn for eqn in programs[True].eqns if eqn.primitive.name == "scan")
    body = forward.params["jaxpr"].jaxpr
    made_by = {var: eqn.primitive.name for eqn in body.eqns for var in eqn.outvars}
    given = [made_by[var] for var in body.outvars if var in made_by and var.aval.ndim > 1]
    assert len(given) >= 4
    assert sorted(set(given)) == ["add", "optimization_barrier"]
    assert given.count("add") == 1  # the block's output, which goes to the next turn
    if recipe is None:  # backward reads the kernels as they are: from the stack that they were in
        assert not {(16, 1, 32), (32, 16)} & {var.aval.shape for var in body.outvars}
    for one, other in zip(*values, strict=True):
        assert jnp.allclose(one, other, rtol=1e-5, atol=1e-6)


def by_nnx_scan(layers: Any, x: jax.Array) -> jax.Array:
    return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, layers)


def by_lax_scan(layers: Any, x: jax.Array) -> jax.Array:
    graphdef, state = nnx.split(layers)
    return jax.lax.scan(lambda x, state: (nnx.merge(graphdef, state)(x), None), x, state)[0]


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, jax.checkpoint], ids=["grad", "jit", "checkpoint"])
@pytest.mark.parametrize("scan", [by_nnx_scan, by_lax_scan])
def test_a_loop_of_ones_own_says_that_it_is_one(scan: Any, wrap: Any) -> None:
    """Also where the derivative's rule runs outside of the context, in which the function was traced."""
    layers = nnx.vmap(lambda key: Block(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
    graphdef, state = nnx.split(layers)

    def gradient(in_loop: bool) -> Any:
        def loss(state: Any) -> jax.Array:
            with loop_over_layers() if in_loop else contextlib.nullcontext():
                return jnp.sum(jnp.sin(scan(nnx.merge(graphdef, state), jnp.ones((1, 16, 16)))))

        return jax.jit(jax.grad(wrap(loss)))

    found = {in_loop: str(jax.make_jaxpr(gradient(in_loop))(state)) for in_loop in (True, False)}
    # The barrier of `jax.checkpoint` stands in both.
    assert found[True].count("optimization_barrier") > found[False].count("optimization_barrier")
    for one, other in zip(*(jax.tree.leaves(gradient(in_loop)(state)) for in_loop in (True, False)), strict=True):
        assert jnp.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scan", ["yes", ""])
def test_another_choice_is_refused(scan: str) -> None:
    message = f"must be True, False or 'auto', got {scan!r}"
    with pytest.raises(ValueError, match=message):
        runs_scanned(scan, 4)
    with pytest.raises(ValueError, match=message):
        Execution(scan_layers=scan)
    with pytest.raises(ValueError, match=message):
        run_layers([], jnp.zeros((1, 2, 16)), [], scan=scan)


def test_a_policy_without_effect_is_refused() -> None:
    full = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    selective, x = RecomputeConfig(recompute_granularity="selective"), jnp.zeros((1, 2, 16))
    refused: list[tuple[RecomputeConfig, str | None, str]] = [
        (RecomputeConfig(), "save_gemms", "recompute_policy='save_gemms'.* recompute_granularity is None"),
        (selective, "save_gemms", "recompute_policy='save_gemms'.* recompute_granularity is 'selective'"),
        (full, "none", "recompute_policy='none'.* recompute_granularity"),
        (full, None, "recompute_policy=None.* recompute_granularity"),
    ]
    for recompute, policy, message in refused:
        with pytest.raises(ValueError, match=message):
            run_layers([], x, [], recompute=recompute, policy=policy)
    for recompute, policy in ((RecomputeConfig(), None), (selective, "full"), (full, "save_gemms")):
        assert run_layers([], x, [], recompute=recompute, policy=policy) is x


class Noted(Block):
    """A layer that changes state, its own or that of others, and says when it is traced."""

    traced: ClassVar[list[float]] = []

    def __init__(self, rngs: nnx.Rngs, calls: nnx.Variable, factor: float = 1.0):
        super().__init__(rngs)
        self.calls, self.factor, self.seen = calls, factor, None
        self.largest = nnx.Variable(jnp.zeros(()))

    def __call__(self, x: jax.Array, dropout_key: Any = None) -> jax.Array:
        self.traced.append(self.factor)
        self.calls[...] += 1
        y = self.factor * super().__call__(x) + jax.random.normal(dropout_key, x.shape)
        self.largest.set_value(jnp.max(y))
        self.seen = x.shape
        return y


def loss_of_layers(model: Any, keys: Any, recompute: RecomputeConfig) -> Any:
    y = run_layers(model.layers, jnp.ones((2, 8, 16)), keys, recompute=recompute, scan=False)
    assert all(layer.seen == (2, 8, 16) for layer in model.layers)
    return jnp.sum(y) + sum(layer.largest.get_value() for layer in model.layers)


RECOMPUTED = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)


@pytest.mark.costly("each its own count-plain", "each its own count-recomputed")
@pytest.mark.parametrize("recompute", [RecomputeConfig(), RECOMPUTED], ids=["plain", "recomputed"])
@pytest.mark.parametrize("shared", [False, True], ids=["each its own count", "one count"])
def test_layers_traced_once_give_what_each_by_itself_gives(shared: bool, recompute: RecomputeConfig) -> None:
    """What calls change reaches each layer, also a Variable of all layers, and a layer that differs is traced, too."""

    class Model(nnx.Module):
        def __init__(self) -> None:
            counts = [nnx.Variable(jnp.zeros((), jnp.int32)) for _ in range(6)]
            factors = (1.0, 1.0, 1.0, 1.0, 2.0, 1.0)
            layers = zip(range(6), counts, factors, strict=True)
            self.layers = nnx.List([Noted(nnx.Rngs(i), counts[0] if shared else c, f) for i, c, f in layers])

    @functools.partial(jax.jit, static_argnames=("graphdef", "once"))
    def run(graphdef: Any, params: Any, rest: Any, once: bool) -> Any:
        def loss(params: Any) -> Any:
            model = nnx.merge(graphdef, merging(params), rest, copy=True)
            with layers_traced_once() if once else contextlib.nullcontext():
                value = loss_of_layers(model, list(jax.random.split(jax.random.key(0), 6)), recompute)
            return value, [layer.calls.get_value() for layer in model.layers]

        return jax.value_and_grad(loss, has_aux=True)(params)

    recipe = DelayedScaling(amax_history_len=2)
    with autocast(recipe):
        parts = nnx.split(prepare_quantization(Model(), recipe), (nnx.Param, QuantizerState), ...)
        traced, results = Noted.traced, {}
        for once in (False, True):
            traced.clear()
            results[once] = run(*parts, once), sorted(traced)
    (expected, by_themselves), (actual, together) = results[False], results[True]
    assert by_themselves.count(1.0) == 5
    assert (together.count(1.0), together.count(2.0)) == ((1, 1) if recompute == RecomputeConfig() else (3, 1))
    assert expected[0][1][0] == (6 if shared else 1)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_train_step_traces_layers_of_one_structure_once() -> None:
    class Model(nnx.Module):
        def __init__(self, count: int, rngs: nnx.Rngs):
            self.layers = nnx.List([Noted(rngs, nnx.Variable(jnp.zeros((), jnp.int32))) for _ in range(count)])

    traces = {}
    for count in (2, 5):
        tx, keys = optax.sgd(0.1), list(jax.random.split(jax.random.key(0), count))
        state = create_train_state(functools.partial(Model, count), tx, key=jax.random.key(0))
        step = make_train_step(lambda model, batch, key, keys=keys: loss_of_layers(model, keys, RecomputeConfig()), tx)
        Noted.traced.clear()
        state, _ = step(state, jnp.zeros((1,)))
        traces[count] = len(Noted.traced)
        assert all(layer.calls[...] == 1 for layer in state.model.layers)
    assert traces[2] == traces[5]
