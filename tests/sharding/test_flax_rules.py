"""Flax's logical rules beside the library's, parameters with Flax's own axis names, and what no rule splits."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jax_te.linen as te_linen
from jax_te._validation import log_once
from jax_te.config import ParallelConfig
from jax_te.layers import LayerNormMLP
from jax_te.sharding import ShardingRules, logical_to_spec, make_mesh, sharding_report, use_rules, whole_sequences
from jax_te.training import Optimizer, abstract_train_state, create_train_state, make_train_step
from tests.support.numerics import assert_bitwise

OWN = AbstractMesh((4, 2), ("data", "model"))
TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
RULES = [("embed", None), ("mlp", "model"), ("batch", "data")]


def own_mesh(axis_type: str) -> Any:
    return jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=(TYPES[axis_type],) * 2))


@pytest.fixture(autouse=True)
def nothing_logged_yet() -> None:
    log_once.cache_clear()


class Plain(nnx.Module):
    """A model of Flax's layers alone, with Flax's own axis names."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(16, 32, kernel_init=nnx.with_partitioning(init, ("embed", "mlp")), rngs=rngs)
        self.down = nnx.Linear(32, 16, kernel_init=nnx.with_partitioning(init, ("mlp", "embed")), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(nnx.relu(self.up(x)))


def test_flax_rules_join_the_librarys() -> None:
    with nnx.logical_axis_rules([*RULES, ("ffn", "model"), ("ffn", "data")]):
        assert logical_to_spec(("embed", "mlp"), OWN) == P(None, "model")  # names that the library lacks
        assert logical_to_spec(("fsdp", "ffn"), OWN) == P(None, "model")  # in the place of a default; the first counts
        assert logical_to_spec(("ffn_fsdp", None), OWN) == P("model", None)  # and in what is composed of it
        with own_mesh("auto"), whole_sequences():
            assert logical_to_spec(("batch", "sequence", "ffn"), OWN) == P("data", None, "model")
        assert logical_to_spec(("ffn",), OWN, ShardingRules()) == P(None)  # rules that are given are the rules
    assert logical_to_spec(("fsdp", "ffn"), OWN) == P(None, None)
    with nn.logical_axis_rules([["ffn", ["data", "model"]]]):  # type: ignore[arg-type]  # as a file gives them
        assert logical_to_spec(("ffn",), OWN) == P(("data", "model"))
    with pytest.raises(ValueError, match=r"unknown logical axis 'mlp' .* what Flax's rules name"):
        logical_to_spec(("mlp",), OWN)


def test_rules_that_differ() -> None:
    with use_rules(ShardingRules(ffn=("model",))):
        with nnx.logical_axis_rules([("ffn", "model"), ("heads", "model")]):
            assert logical_to_spec(("ffn",), OWN) == logical_to_spec(("heads",), OWN) == P("model")
        message = r"'ffn' is split over \('model',\) by jax_te's rules .* and over \('data',\) by those .* in Flax"
        with nnx.logical_axis_rules([("ffn", "data")]), pytest.raises(ValueError, match=message):
            logical_to_spec(("heads",), OWN)
    with nnx.logical_axis_rules([("ffn_fsdp", "data")]), pytest.raises(ValueError, match="'ffn_fsdp' is split over"):
        logical_to_spec(("heads",), OWN)
    # The library's own rules in Flax's form say the same in other words: without the axes that the mesh lacks.
    own, mesh = ShardingRules(batch=("data", "tensor"), ffn=()), AbstractMesh((2, 4), ("data", "tensor"))
    with use_rules(own), nn.logical_axis_rules(te_linen.logical_axis_rules(mesh, own)):
        assert logical_to_spec(("batch", "ffn"), mesh) == P(("data", "tensor"), None)


@pytest.mark.wide("explicit")
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
def test_layers_under_rules_that_only_flax_has(axis_type: str) -> None:
    """The library's kernels were whole on every device of such a mesh."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4, 16)), jnp.float32)
    alone = LayerNormMLP(16, 32, rngs=nnx.Rngs(0))
    rules = [("batch", "data"), ("ffn", "model"), ("fsdp", "data")]
    with own_mesh(axis_type), nnx.logical_axis_rules(rules):
        split = jax.jit(lambda: LayerNormMLP(16, 32, rngs=nnx.Rngs(0)))()
        y = jax.jit(lambda layer, x: layer(x))(split, jax.device_put(x, P("data")))
    assert split.wi_kernel.get_value().sharding.spec == P("data", None, "model")
    assert split.wo_kernel.get_value().sharding.shard_shape((32, 16)) == (4, 16)
    # Sums of 32 products, in another order on the mesh.
    np.testing.assert_allclose(y, alone(x), atol=32 * 2.0**-23)


@pytest.mark.costly("model-auto", slow=("model-explicit", "function-explicit"))
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("built", [False, True], ids=["function", "model"])
def test_flax_names_are_placed_as_in_flax(axis_type: str, built: bool) -> None:
    tx, key = optax.adam(1e-2), jax.random.key(0)
    with own_mesh(axis_type), nnx.logical_axis_rules(RULES):
        mesh = jax.sharding.get_mesh()
        wanted = nnx.get_named_sharding(nnx.state(nnx.eval_shape(lambda: Plain(nnx.Rngs(0)))), mesh)
        made = Plain(nnx.Rngs(0)) if built else Plain
        state = create_train_state(made, tx, key=key)
        abstract = abstract_train_state(made, tx)
        for there in (state, abstract):
            assert there.params["up"]["kernel"].get_value().sharding.spec == P(None, "model")
            assert there.opt_state[0].mu["down"]["kernel"].get_value().sharding.spec == P("model", None)
        for leaf, sharding in zip(jax.tree.leaves(state.params), jax.tree.leaves(wanted), strict=True):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        assert sharding_report(state).arrays[2].mesh_axes in ("-, model", "model, -")


@pytest.mark.costly("rules set")
@pytest.mark.parametrize("inside", [True, False], ids=["rules set", "rules left"])
def test_a_step_leaves_flax_names_where_they_are(inside: bool) -> None:
    """Also outside of the rules that gave the names their mesh axes."""

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(model(batch) ** 2)

    tx = optax.adam(1e-2)
    with own_mesh("auto"):
        with nnx.logical_axis_rules(RULES):
            state = create_train_state(Plain, tx, key=jax.random.key(0))
        before = [leaf.sharding for leaf in jax.tree.leaves(state.params)]
        step = make_train_step(loss_fn, tx)
        with nnx.logical_axis_rules(RULES if inside else []):
            for _ in range(2):
                state, _ = step(state, jnp.ones((8, 16)))
        for leaf, sharding in zip(jax.tree.leaves(state.params), before, strict=True):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_a_name_without_a_rule_is_refused() -> None:
    with own_mesh("auto"), pytest.raises(ValueError, match=r"'mlp' of P.* is not an axis of the mesh \(.*data, model"):
        create_train_state(unplaced, optax.sgd(0.1), key=jax.random.key(0))
    with own_mesh("auto"), nnx.logical_axis_rules(RULES):
        create_train_state(unplaced, optax.sgd(0.1), key=jax.random.key(0))


def unplaced(rngs: nnx.Rngs) -> Plain:
    with nnx.use_eager_sharding(False):
        return Plain(rngs)


def whole(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "whole on every device" in record.getMessage()]


def test_what_no_rule_splits_is_listed_once(caplog: pytest.LogCaptureFixture) -> None:
    tx, key = optax.sgd(0.1), jax.random.key(0)
    with jax.set_mesh(make_mesh(ParallelConfig(fsdp=8))):
        for _ in range(2):
            create_train_state(lambda rngs: nnx.Linear(16, 32, rngs=rngs), tx, key=key)
        Optimizer(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), tx)
    (listed,) = whole(caplog)
    assert listed.startswith("1 of 2 parameters are whole on every device, and no rule splits them, though")
    assert "kernel [16, 32] (-, -) over fsdp. " in listed
    assert "logical_axes=('fsdp', 'ffn')" in listed
    assert caplog.records[0].levelno == logging.WARNING


@pytest.mark.parametrize(
    ("mesh", "rules", "listed"),
    [
        (lambda: own_mesh("auto"), (), ["wi_kernel [16, 1, 32] (fsdp, components, ffn) over model"]),
        (lambda: own_mesh("auto"), [("ffn", "model")], []),
        (lambda: jax.set_mesh(make_mesh(ParallelConfig(fsdp=2, tensor=4))), (), []),
        (lambda: jax.set_mesh(make_mesh(ParallelConfig(data=8))), (), []),
    ],
    ids=["no rule for its axis", "Flax's rule", "the library's mesh", "data alone"],
)
def test_what_is_listed(mesh: Any, rules: Any, listed: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Norms and biases are whole on purpose, and axes of tokens do not split kernels."""
    with mesh(), nnx.logical_axis_rules(rules):
        abstract_train_state(lambda rngs: LayerNormMLP(16, 32, rngs=rngs), optax.sgd(0.1))
    assert len(whole(caplog)) == len(listed)
    for part, message in zip(listed, whole(caplog), strict=True):
        assert part in message
        assert "scale" not in message.split("To split one")[0]
        assert "wi_bias" not in message


def test_linen_layers_under_rules_of_other_names(caplog: pytest.LogCaptureFixture) -> None:
    """Flax makes whole what its rules do not name wherever it unboxes; the library's kernels stay split."""
    layer, x = te_linen.LayerNormMLP(16, 32), jnp.ones((8, 4, 16))
    with jax.set_mesh(make_mesh(ParallelConfig(fsdp=2, tensor=4))):
        mesh = jax.sharding.get_mesh()
        with nn.logical_axis_rules([("experts", "data")]):
            rules = te_linen.logical_axis_rules(mesh)
            assert dict(rules)["experts"] == "data"
            specs = nn.get_partition_spec(jax.eval_shape(layer.init, jax.random.key(0), x))
            places = nn.logical_to_mesh_sharding(specs, mesh, rules)
            made = jax.jit(layer.init, out_shardings=places)(jax.random.key(0), x)
            y, text = jax.jit(layer.apply)(made, x), jax.jit(layer.apply).lower(made, x).compile().as_text()
    assert made["params"]["wi_kernel"].value.sharding.spec == P("fsdp", None, "tensor")
    assert "f32[16,1,32]" not in text  # which would be the whole kernel on each device
    assert_bitwise(
        np.asarray(made["params"]["wi_kernel"].value),
        np.asarray(layer.init(jax.random.key(0), x)["params"]["wi_kernel"].value),
    )
    np.testing.assert_allclose(y, layer.apply(layer.init(jax.random.key(0), x), x), atol=32 * 2.0**-23)
    (said,) = whole(caplog)
    assert "do not name ffn, fsdp, ffn_fsdp, so" in said
