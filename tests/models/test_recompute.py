"""Recomputation in a stack of layers: loss, gradients and next quantizer states bitwise those without it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Var

from jax_te.config import RecomputeConfig, TransformerConfig
from jax_te.models import Execution, GPTModel
from jax_te.models.stack import recompute_groups
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from jax_te.remat import RecomputePolicy
from tests.support.meshes import shard, use_mesh
from tests.support.numerics import assert_bitwise, assert_close, quick_jit, quick_options
from tests.support.reference import randomize
from tests.support.states import merging

B, S, V = 2, 8, 16
CONFIG = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    ffn_hidden_size=32,
    normalization="RMSNorm",
    add_bias_linear=False,
    hidden_dropout=0.3,
    attention_dropout=0.3,
)
RECIPES = {"none": None, "delayed": DelayedScaling(amax_history_len=2), "current": Float8CurrentScaling()}


def full(method: str = "uniform", count: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": count,
        **fields,
    }


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "uniform": (full(), {}),
    "uniform 2": (full(count=2), {}),
    "block": (full("block"), {}),
    "distributed": (full(distribute_saved_activations=True), {}),
    "core_attn": (selective("core_attn"), {}),
    "mlp": (selective("mlp"), {}),
    "layernorm": (selective("layernorm"), {}),
    "activation": (selective("activation"), {}),
    "all modules": (selective("core_attn", "layernorm", "activation"), {}),
    "save_gemms": (full(), {"execution": Execution("save_gemms")}),
    "save_quantized": (full(), {"execution": Execution("save_quantized")}),
    "offload_gemms": (full(), {"execution": Execution("offload_gemms")}),
    "save all but": (full(count=2), {"execution": Execution(RecomputePolicy(save_all_but=("context",)))}),
}
"""Fields of the configuration and arguments of the model."""


def build(way: str, **options: Any) -> GPTModel:
    fields, policy = WAYS[way]
    config = dataclasses.replace(CONFIG, **fields)
    model = GPTModel(config, vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0), **policy, **options)
    return randomize(model)


def loss_and_gradient(model: Any, seed: int = 5) -> Any:
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, V, (B, S + 1)), jnp.int32)
    key = jax.random.key(seed)
    return jax.value_and_grad(lambda model: merging(model).loss(tokens[:, :-1], tokens[:, 1:], dropout_key=key))(model)


def run(recipe: str, model: GPTModel, *args: Any) -> Any:
    """Loss and gradient, compiled so that what else is in an operation's loop does not decide its last bits: without
    fusion where no recipe is. (Older versions of XLA for CPUs cannot compile each quantized program so.)
    """
    options = {} if RECIPES[recipe] else {"xla_disable_hlo_passes": "fusion,cpu-instruction-fusion"}
    with autocast(RECIPES[recipe]):
        return jax.jit(loss_and_gradient, compiler_options={**quick_options(), **options})(model, *args)


@functools.cache
def without(recipe: str) -> Any:
    with autocast(RECIPES[recipe]):
        model = build("none")
    return run(recipe, model)


def same(found: Any, expected: Any) -> None:
    for (path, a), (_, e) in zip(*map(jax.tree_util.tree_leaves_with_path, (found, expected)), strict=True):
        assert_bitwise(a, e, what=jax.tree_util.keystr(path))


def leaves(result: Any) -> Any:
    """Loss and gradients without the static fields of the model, which say how it recomputes."""
    loss, gradient = result
    return loss, nnx.to_pure_dict(nnx.state(gradient))


CASES = [
    *(("none", way) for way in ("distributed", "all modules", "save all but")),
    *(("delayed", way) for way in ("uniform 2", "block", "distributed", "core_attn", "layernorm", "activation")),
    *(("delayed", way) for way in ("mlp", "all modules", "save_quantized", "offload_gemms")),
    *(("current", way) for way in ("uniform 2", "save_gemms")),
]


@pytest.mark.slow
@pytest.mark.wide("delayed-uniform 2", "delayed-all modules", "delayed-save_quantized")
@pytest.mark.parametrize(("recipe", "way"), CASES)
def test_nothing_changes_with_dropout_on(recipe: str, way: str) -> None:
    """The gradients of quantizer states are their next values, so a state that moved on twice would show."""
    with autocast(RECIPES[recipe]):
        model = build(way)
    same(leaves(run(recipe, model)), leaves(without(recipe)))


@pytest.mark.slow
def test_the_dropout_of_the_comparison_is_there() -> None:
    loss, _ = run("none", build("none"), 6)
    assert abs(loss - without("none")[0]) > 1e-3
    states = nnx.to_flat_state(nnx.state(without("delayed")[1], QuantizerState))
    histories = [variable for path, variable in states if path[-1] == "amax_history"]
    assert len(histories) == 2 * 4 * 3
    for history in histories:
        assert history[0] > 0.0
        assert history[1] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["uniform 2", "block"])
def test_a_scanned_stack_recomputes_too(way: str) -> None:
    """Four layers: two turns of a loop over two, or one layer that is recomputed and three that are not."""

    def run(fields: dict[str, Any]) -> Any:
        config = dataclasses.replace(CONFIG, num_layers=4, **fields)
        model = GPTModel(
            config, vocab_size=V, max_sequence_length=S, execution=Execution(scan_layers=True), rngs=nnx.Rngs(0)
        )
        return leaves(quick_jit(loss_and_gradient)(randomize(model)))

    for a, e in zip(*map(jax.tree.leaves, (run(WAYS[way][0]), run({}))), strict=True):
        assert_close(a, e, 2.0**-18)


@functools.cache
def on_a_mesh(mode: str, recipe: str, way: str) -> Any:
    with use_mesh(mode), autocast(RECIPES[recipe]):
        model = shard(build(way))
        tokens = jnp.tile(jnp.arange(S + 1, dtype=jnp.int32)[None], (4, 1))

        def loss(model: Any) -> Any:
            return merging(model).loss(tokens[:, :-1], tokens[:, 1:], dropout_key=jax.random.key(1))

        return leaves(quick_jit(jax.value_and_grad(loss))(model))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_on_a_mesh(mode: str) -> None:
    found, expected = (on_a_mesh(mode, "none", way) for way in ("distributed", "none"))
    for a, e in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert_close(a, e, 2.0**-18)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["save_gemms", "save_quantized", "mlp"])
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_on_a_mesh_in_fp8(mode: str, way: str) -> None:
    """Amaxes and sums over the ranks are those of one pass."""
    same(on_a_mesh(mode, "delayed", way), on_a_mesh(mode, "delayed", "none"))


def kept_bytes(recipe: str, way: str) -> int:
    """What forward keeps for backward beside the model's own arrays."""
    with autocast(RECIPES[recipe]):
        model = nnx.eval_shape(lambda: build(way))

        def residuals(model: Any) -> Any:
            tokens = jnp.zeros((B, S), jnp.int32)
            key = jax.random.key(0)
            return jax.vjp(lambda model: merging(model).loss(tokens, tokens, dropout_key=key), model)[1]

        jaxpr = jax.make_jaxpr(residuals)(model).jaxpr
    kept = {variable for variable in jaxpr.outvars if isinstance(variable, Var)} - {*jaxpr.invars, *jaxpr.constvars}
    # A state's dtype in a derivative, by which JAX merges its gradients, is fp32 underneath and has no size of its own.
    return sum(variable.aval.size * getattr(variable.aval.dtype, "itemsize", 4) for variable in kept)


@pytest.mark.slow
@pytest.mark.wide("current")
@pytest.mark.parametrize("recipe", RECIPES)
def test_how_much_each_way_keeps(recipe: str) -> None:
    """Without a recipe ``"quantized"`` names the operands themselves: a norm's and an activation's output."""
    size = {way: kept_bytes(recipe, way) for way in WAYS}
    assert size["uniform 2"] < size["uniform"] < size["block"] < size["none"]
    assert size["uniform"] < size["save_gemms"] < size["save_quantized"] < size["none"]
    assert size["distributed"] == size["uniform"]  # without a mesh
    assert size["offload_gemms"] == size["save_gemms"]
    for module in ("core_attn", "layernorm", "activation", "mlp"):
        assert size["uniform"] < size[module] < size["none"], module
    assert size["all modules"] < min(size["core_attn"], size["layernorm"], size["activation"])


@pytest.mark.slow  # test_how_much_each_way_keeps sees it in the traced program
def test_memory_of_the_compiled_gradient() -> None:
    def peak(way: str) -> int:
        config = dataclasses.replace(CONFIG, num_layers=3, **WAYS[way][0])
        options = {"vocab_size": V, "max_sequence_length": 128, "execution": Execution(scan_layers=True)}
        model = nnx.eval_shape(lambda: GPTModel(config, **options, rngs=nnx.Rngs(0)))

        def loss(model: Any, tokens: Any, key: Any) -> Any:
            return merging(model).loss(tokens, tokens, dropout_key=key)

        arrays = jax.ShapeDtypeStruct((4, 128), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
        return jax.jit(jax.grad(loss)).lower(model, *arrays).compile().memory_analysis().temp_size_in_bytes

    # Scores and probabilities of three layers, against those of the one that is recomputed at a time.
    assert peak("uniform") < 0.75 * peak("none")


def test_groups_of_layers() -> None:
    def groups(count: int, fields: dict[str, Any]) -> list[tuple[int, int, bool]]:
        return [dataclasses.astuple(group) for group in recompute_groups(RecomputeConfig(**fields), count)]

    assert groups(2, {}) == groups(2, selective("mlp")) == [(0, 1, False), (1, 1, False)]
    assert groups(5, full(count=2)) == [(0, 2, True), (2, 2, True), (4, 1, True)]
    assert groups(3, full(count=9)) == [(0, 3, True)]
    assert groups(3, full("block", 2)) == [(0, 1, True), (1, 1, True), (2, 1, False)]


@pytest.mark.parametrize(
    ("fields", "policy", "message"),
    [
        ({}, "save_gemms", "recompute_policy='save_gemms'.* recompute_granularity is None"),
        (selective("mlp"), "save_gemms", "recompute_granularity is 'selective'"),
        (full(), "none", "recompute_policy='none'.* recompute_granularity"),
        (
            full(distribute_saved_activations=True),
            "save_gemms",
            "distribute_saved_activations=True.* recompute_policy='full'.* 'save_gemms'",
        ),
        (full(), "some", "recompute policy 'some'.* none, full, save_gemms"),
    ],
)
def test_a_policy_without_effect_says_so(fields: dict[str, Any], policy: str, message: str) -> None:
    config = dataclasses.replace(CONFIG, **fields)
    with pytest.raises(ValueError, match=message):
        GPTModel(config, vocab_size=V, max_sequence_length=S, execution=Execution(policy), rngs=nnx.Rngs(0))
