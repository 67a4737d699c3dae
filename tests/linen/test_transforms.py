"""Linen's transformations over the layers, dropout, and meshes."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import errors

import jax_te.linen as te
from jax_te.errors import QuantizerStateError
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from jax_te.sharding import ShardingRules, use_rules
from tests.support.meshes import use_mesh
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_close, draw

RECIPE = DelayedScaling(amax_history_len=2)
STATE = "_overwrite_with_gradient"
X = draw("x", (4, 8, 32))


class Unrolled(nn.Module):
    block: Any = te.LayerNormLinear

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = x + self.block(32, 32, parallel_mode="column", name=f"layer_{i}")(x)
        return x


class Body(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + te.LayerNormLinear(32, 32, parallel_mode="column", name="block")(x), None


def scanned(body=Body, collections=("params", STATE), metadata=True):
    metadata_params = {nn.PARTITION_NAME: "layers"} if metadata else {}
    return nn.scan(
        body,
        variable_axes=dict.fromkeys(collections, 0),
        split_rngs={"params": True, "dropout": True},
        length=2,
        metadata_params=metadata_params,
    )()


def stacked(variables):
    """Variables of `Unrolled` as those of a scan."""
    return {
        collection: {"block": jax.tree.map(lambda *leaves: jnp.stack(leaves), *(tree[f"layer_{i}"] for i in range(2)))}
        for collection, tree in nn.unbox(variables).items()
    }


def value_and_grad(apply):
    def loss(variables):
        y = apply(variables)
        return jnp.sum((y[0] if isinstance(y, tuple) else y) * draw("g", X.shape))

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.costly("remat")
@pytest.mark.wide("remat")
@pytest.mark.parametrize("transform", [nn.remat, nn.jit], ids=["remat", "jit"])
def test_remat_and_jit(transform):
    plain, model = Unrolled(), Unrolled(transform(te.LayerNormLinear))
    with autocast(RECIPE):
        variables = plain.init(jax.random.key(0), X)
        like = jax.eval_shape(model.init, jax.random.key(0), X)
        assert jax.tree.structure(like) == jax.tree.structure(variables)  # boxes, too
        value, grads = value_and_grad(lambda v: plain.apply(v, X))(variables)
        actual, actual_grads = value_and_grad(lambda v: model.apply(v, X))(variables)
    assert_close(actual, value, TOLERANCE["float32"])
    jax.tree.map(lambda a, b: assert_close(a, b, TOLERANCE["float32"]), actual_grads, grads)


def test_a_function_under_nn_jit_is_traced_again_under_another_recipe():
    model = nn.jit(te.LayerNormLinear)(32, 32)
    variables = te.prepare_quantization(model, model.init(jax.random.key(0), X), RECIPE, X)
    results = []
    for recipe in (None, RECIPE, Float8CurrentScaling(), None):
        with autocast(recipe):
            results.append(model.apply(variables, X))
    assert_bitwise(results[3], results[0])
    assert all((results[i] != results[j]).any() for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.costly
@pytest.mark.wide("scan of remat")
@pytest.mark.parametrize("body", [Body, nn.remat(Body, prevent_cse=False)], ids=["scan", "scan of remat"])
def test_scan_over_layers(body):
    plain, model = Unrolled(), scanned(body)
    with autocast(RECIPE):
        variables = plain.init(jax.random.key(0), X)
        made = jax.jit(model.init)(jax.random.key(0), X, None)
        value, grads = value_and_grad(lambda v: plain.apply(v, X))(variables)
        actual, actual_grads = value_and_grad(lambda v: model.apply(v, X, None))(stacked(variables))
        boxed = jax.eval_shape(jax.grad(lambda v: jnp.sum(model.apply(v, X, None)[0])), made)
    assert_close(actual, value, TOLERANCE["float32"])
    jax.tree.map(lambda a, b: assert_close(a, b, TOLERANCE["float32"]), actual_grads, stacked(grads))
    assert jax.tree.structure(boxed) == jax.tree.structure(made)
    specs = nn.get_partition_spec(made)
    assert tuple(specs["params"]["block"]["kernel"]) == ("layers", "fsdp", "ffn")
    assert jax.tree.map(jnp.shape, nn.unbox(made)) == jax.tree.map(jnp.shape, stacked(variables))
    kernels = made["params"]["block"]["kernel"].value
    assert (kernels[0] != kernels[1]).any()


@pytest.mark.costly
def test_scan_without_what_it_needs():
    with autocast(RECIPE):
        with pytest.raises(QuantizerStateError, match=rf'list "{STATE}" in mutable=, and in variable_axes of nn.scan'):
            scanned(collections=("params",)).init(jax.random.key(0), X, None)
        variables = jax.jit(scanned().init)(jax.random.key(0), X, None)
        with pytest.raises(QuantizerStateError, match=rf'list "{STATE}" in .*={{"params": 0, "{STATE}": 0}}'):
            scanned(collections=("params",)).apply(variables, X, None)
        with pytest.raises(errors.PartitioningUnspecifiedError, match="metadata_params"):
            scanned(metadata=False).init(jax.random.key(0), X, None)


@pytest.mark.slow
def test_dropout_takes_the_stream_of_that_name():
    layer = te.TransformerLayer(32, 32, 4, hidden_dropout=0.5, attention_dropout=0.0)
    variables = jax.jit(layer.init)(jax.random.key(0), X)
    run = jax.jit(lambda variables, key, rngs: layer.apply(variables, X, dropout_key=key, rngs=rngs))
    run_nnx = jax.jit(lambda module, key: module(X, dropout_key=key))
    evaluate = jax.jit(lambda variables, rngs: layer.apply(variables, X, deterministic=True, rngs=rngs))

    def apply(key, **rngs):
        return run(variables, key, rngs)

    with pytest.raises(ValueError, match=r'no key.*in Linen rngs=\{"dropout": key\}.*in Linen deterministic=True'):
        apply(None)
    off, module, key = evaluate(variables, {}), te.to_nnx(layer, variables), jax.random.key(3)
    assert_bitwise(evaluate(variables, {"dropout": key}), off)
    module.eval()
    assert_bitwise(off, run_nnx(module, None))
    on = apply(None, dropout=key)
    assert (on != off).any()
    assert_bitwise(apply(None, dropout=key), on)
    assert_bitwise(apply(None, dropout=jax.random.PRNGKey(3)), on)  # a key of the old kind
    assert (apply(None, dropout=jax.random.key(4)) != on).any()
    given = apply(key)
    assert_bitwise(given, run_nnx(te.to_nnx(layer, variables), key))
    assert_bitwise(apply(key, dropout=jax.random.key(4)), given)  # a key that is given counts

    class TwoLayers(nn.Module):
        @nn.compact
        def __call__(self, x):
            return [te.DotProductAttention(4, 8, attention_dropout=0.5)(x, x, x) for _ in range(2)]

    one, two = TwoLayers().apply({}, X.reshape(4, 8, 4, 8), rngs={"dropout": key})
    assert (one != two).any()  # each layer has a key of its own


@pytest.mark.costly("explicit")
@pytest.mark.wide("explicit")
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_shardings_from_logical_axes_and_the_same_numbers_on_every_mesh(mode):
    layer = te.LayerNormMLP(32, 64)

    def run(variables, x):
        return jax.value_and_grad(lambda v: jnp.mean(layer.apply(v, x) ** 2))(variables)

    with autocast(RECIPE):
        without = jax.jit(layer.init)(jax.random.key(0), X)
        expected = jax.jit(run)(without, X)
        with use_mesh(mode):
            mesh = jax.sharding.get_mesh()
            specs = nn.get_partition_spec(jax.eval_shape(layer.init, jax.random.key(0), X))
            shardings = nn.logical_to_mesh_sharding(specs, mesh, te.logical_axis_rules(mesh))
            made = jax.jit(layer.init, out_shardings=shardings)(jax.random.key(0), X)
            x = jax.device_put(X, jax.NamedSharding(mesh, jax.P(("data", "fsdp"))))
            with nn.logical_axis_rules(te.logical_axis_rules(mesh)):  # with these, Flax constrains what it unboxes
                actual = jax.jit(run)(made, x)
            fresh = te.prepare_quantization(layer, made, RECIPE, x)
            assert jax.tree.structure(fresh) == jax.tree.structure(made)
    params = made["params"]
    assert params["wi_kernel"].value.sharding.spec == jax.P("fsdp", None, "tensor")
    assert params["wo_kernel"].value.sharding.spec == jax.P(("tensor", "fsdp"), None)
    jax.tree.map(assert_bitwise, jax.device_get(made), jax.device_get(without))
    tolerance = 4 * TOLERANCE["float32"]  # a gradient has gone through four products and the norm
    jax.tree.map(lambda a, b: assert_close(a, b, tolerance), jax.device_get(actual), expected)


def test_rules_in_flax_form():
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "tensor"))
    rules = dict(te.logical_axis_rules(mesh))
    assert rules["batch"] == "data"  # there is no fsdp axis
    assert rules["heads"] == rules["ffn"] == "tensor"
    assert rules["fsdp"] is None
    assert rules["ffn_fsdp"] == "tensor"
    own = ShardingRules(batch=("data", "tensor"), ffn=())
    assert dict(te.logical_axis_rules(mesh, own))["batch"] == ("data", "tensor")
    with use_rules(own):
        assert dict(te.logical_axis_rules(mesh))["ffn"] is None
    # Flax takes no name twice: of a kernel's component axes, which nothing splits, only the first keeps its.
    boxed = jax.eval_shape(te.Linear(16, (2, 3, 8), parallel_mode="column").init, jax.random.key(0), X[..., :16])
    assert boxed["params"]["kernel"].names == ("fsdp", "components", None, "ffn")
    assert nn.logical_to_mesh_axes(boxed["params"]["kernel"].names, te.logical_axis_rules(mesh))[-1] == "tensor"
