"""Which stacks of layers run in a loop, and which recomputation policies a stack refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.config import RecomputeConfig, TransformerConfig
from jax_te.layers import LayerNormMLP, TransformerLayer
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
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, autocast
from jax_te.training import create_train_state, make_train_step
from tests.support.numerics import quick_jit
from tests.support.states import merging

SIZES: dict[str, Any] = {"vocab_size": 32, "max_sequence_length": 8}
TOKENS = jnp.zeros((2, 8), jnp.int32)
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


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


@pytest.mark.slow
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


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The hidden sizes of MLPs, one for each call of an MLP that JAX traces."""
    sizes, call = [], LayerNormMLP.__call__

    def noted(self: LayerNormMLP, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
        sizes.append(self.wo_kernel.get_value().shape[0])
        return call(self, x, *args, **kwargs)

    monkeypatch.setattr(LayerNormMLP, "__call__", noted)
    return sizes


ALONE = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
IN_PAIRS = dataclasses.replace(ALONE, recompute_num_layers=2)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [RecomputeConfig(), ALONE, IN_PAIRS], ids=["plain", "alone", "in pairs"])
def test_layers_traced_once_give_what_each_by_itself_gives(recompute: RecomputeConfig, traced: list[int]) -> None:
    """With dropout and states of delayed scaling; a layer that differs is traced by itself."""
    recipe, keys = DelayedScaling(amax_history_len=2), list(jax.random.split(jax.random.key(0), 4))
    with autocast(recipe):
        layers = nnx.List([TransformerLayer(16, 64 if i == 2 else 32, 2, rngs=nnx.Rngs(i)) for i in range(4)])
    graphdef, params, rest = nnx.split(layers, (nnx.Param, QuantizerState), ...)

    def loss(params: Any, context: Any) -> jax.Array:
        layers = nnx.merge(graphdef, merging(params), rest, copy=True)
        with context:
            return jnp.sum(run_layers(layers, jnp.ones((2, 8, 16)), keys, recompute=recompute, scan=False) ** 2)

    results, sizes = [], []
    for context in (contextlib.nullcontext(), layers_traced_once()):
        traced.clear()
        with autocast(recipe):
            results.append(quick_jit(jax.value_and_grad(functools.partial(loss, context=context)))(params))
        sizes.append(sorted(traced))
    assert sizes == [[32, 32, 32, 64], [32, 32, 32, 64] if recompute == IN_PAIRS else [32, 64]]
    jax.tree.map(np.testing.assert_array_equal, *results)


class Model(nnx.Module):
    def __init__(self, layers: Sequence[nnx.Module]):
        self.layers = nnx.List(layers)

    def loss(self, **given: Any) -> jax.Array:
        y = run_layers(self.layers, jnp.ones((2, 8, 16)), [None] * len(self.layers), scan=False, **given)
        return jnp.sum(y**2)


def first_loss(build: Any, **given: Any) -> float:
    """Return the loss of the first train step."""
    tx = optax.sgd(0.1)
    state = create_train_state(build, tx, key=jax.random.key(0))
    return float(make_train_step(lambda model, batch, key: model.loss(**given), tx)(state, jnp.zeros((1,)))[1]["loss"])


class NoHash:
    """A note that refuses its hash by an error of its own."""

    def __hash__(self) -> int:
        raise ValueError("no hash")


@pytest.mark.slow
@pytest.mark.parametrize("attribute", [None, [1, 2], NoHash()], ids=["as made", "with a list", "without a hash"])
def test_a_train_step_traces_layers_of_this_package_once(attribute: Any, traced: list[int]) -> None:
    """What has no hash cannot tell layers apart, and does not keep the step from running."""

    def build(count: int, rngs: nnx.Rngs) -> Model:
        layers = [TransformerLayer(16, 32, 2, rngs=rngs, **NO_DROPOUT) for _ in range(count)]
        for layer in layers:
            layer.note = attribute
        return Model(layers)

    calls = {}
    for count in (2, 5):
        traced.clear()
        first_loss(functools.partial(build, count))
        calls[count] = len(traced)
    assert (calls[2] == calls[5]) == (attribute is None)


class PassingOn(Block):
    """A layer that adds to its input what the first layer has left in a dict."""

    def __call__(self, x: jax.Array, dropout_key: Any = None, *, shared: dict[str, jax.Array]) -> jax.Array:
        y = super().__call__(x)
        return y + shared.setdefault("first", y)


def test_layers_of_ones_own_are_traced_one_by_one() -> None:
    def build(rngs: nnx.Rngs) -> Model:
        return Model([PassingOn(rngs) for _ in range(3)])

    model = create_train_state(build, optax.sgd(0.1), key=jax.random.key(0)).model
    np.testing.assert_allclose(first_loss(build, shared={}), float(model.loss(shared={})), rtol=1e-5)
