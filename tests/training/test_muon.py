"""Muon's updates of kernels: orthogonal as the matrices of their GEMMs, or Adam's where these are not known."""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jax_te import linen
from jax_te.layers import GroupedLinear, LayerNormMLP, MultiheadAttention
from jax_te.training import muon_dimension_numbers


class Convolutions(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.plain = nnx.Conv(2, 12, (3, 2), rngs=rngs)
        self.qkv = nnx.Conv(4, 8, (3,), feature_group_count=2, rngs=rngs)  # no fused projection


class Einsum(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.heads = nnx.Einsum("bnd,dnf->bnf", (8, 3, 4), rngs=rngs)


class LinenLayers(nn.Module):
    """Layers of Flax with names of their own, a stack of them, and a layer of this package."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(8, (3,), name="filter")(x)
        x = nn.MultiHeadDotProductAttention(2, name="attention")(x)
        x = nn.DenseGeneral((2, 4), name="split")(x)
        x = nn.Einsum((2, 4, 8), "bsnd,ndh->bsh", use_bias=False, name="join")(x)
        stack = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=3)  # pyright: ignore[reportArgumentType]
        x = stack(8, name="stack")(x).sum(0)
        return linen.LayerNormMLP(8, 6, activation="swiglu", name="mlp")(x)


def transposed(*axes: int) -> Any:
    return lambda array, shape: array.transpose(axes).reshape(shape)


def reshaped(array: Any, shape: Any) -> Any:
    return array.reshape(shape)


# Path of a kernel in the model: how its matrices are taken from it, and their shape behind the number of them.
MATRICES: dict[str, tuple[Any, dict[str, Any]]] = {
    "nnx attention": (
        lambda: nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0)),
        dict.fromkeys(["query/kernel", "key/kernel", "value/kernel", "out/kernel"], (reshaped, (1, 8, 8))),
    ),
    "nnx convolutions": (
        lambda: Convolutions(nnx.Rngs(0)),
        {"plain/kernel": (reshaped, (1, 12, 12)), "qkv/kernel": None},
    ),
    "nnx general": (
        lambda: nnx.LinearGeneral((2, 4), (3, 2), axis=(-2, -1), batch_axis={0: 2}, rngs=nnx.Rngs(0)),
        {"kernel": (reshaped, (2, 8, 6))},
    ),
    "nnx einsum": (lambda: Einsum(nnx.Rngs(0)), {"heads/kernel": (transposed(1, 0, 2), (3, 8, 4))}),
    "nnx stack": (
        lambda: nnx.vmap(lambda key: nnx.Linear(3, 5, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3)),
        {"kernel": (reshaped, (3, 3, 5))},
    ),
    "fused feed-forward": (
        lambda: LayerNormMLP(8, 6, activation="swiglu", rngs=nnx.Rngs(0)),
        {"wi_kernel": (transposed(1, 0, 2), (2, 8, 6)), "wo_kernel": (reshaped, (1, 6, 8))},
    ),
    "fused projections": (
        lambda: MultiheadAttention(8, 2, rngs=nnx.Rngs(0)),
        {"qkv/kernel": (transposed(1, 0, 2), (3, 8, 8)), "proj/kernel": (reshaped, (1, 8, 8))},
    ),
    "experts": (lambda: GroupedLinear(2, 8, 6, rngs=nnx.Rngs(0)), {"kernel": (reshaped, (2, 8, 6))}),
    "linen": (
        lambda: LinenLayers(),
        {
            "filter/kernel": (reshaped, (1, 24, 8)),
            **dict.fromkeys([f"attention/{each}/kernel" for each in ("query", "key", "value")], (reshaped, (1, 8, 8))),
            "attention/out/kernel": (reshaped, (1, 8, 8)),
            "split/kernel": (reshaped, (1, 8, 8)),
            "join/kernel": (reshaped, (1, 8, 8)),
            "stack/kernel": (reshaped, (3, 8, 8)),
            "mlp/wi_kernel": (transposed(1, 0, 2), (2, 8, 6)),
            "mlp/wo_kernel": (reshaped, (1, 6, 8)),
        },
    ),
}
# Models whose kernels of three axes are known without the classes of their layers.
BY_NAME = ("nnx attention", "fused feed-forward", "fused projections", "experts")
# Muon's polynomial brings singular values into about [0.7, 1.2], and scales them by the root of out / in, at least 1.
LEAST, MOST = 0.6, 1.3


def paths(tree: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in found}


def parts(model: Any) -> tuple[Any, Any]:
    """The parameters, in nested dictionaries or a state, and what tells the classes of the layers."""
    if isinstance(model, nnx.Module):
        return nnx.state(model, nnx.Param), model

    def init():
        return model.init(jax.random.key(0), jnp.ones((1, 4, 8)))

    return nn.meta.unbox(init()["params"]), init


@pytest.mark.costly(
    "nnx stack",
    slow=("nnx general", "fused projections", "fused feed-forward", "nnx convolutions", "nnx attention", "nnx einsum"),
)
@pytest.mark.wide(
    "nnx attention",
    "nnx convolutions",
    "nnx general",
    "nnx einsum",
    "nnx stack",
    "fused feed-forward",
    "fused projections",
    "experts",
)
@pytest.mark.parametrize("name", MATRICES)
def test_updates_are_orthogonal_as_the_matrices_of_gemms(name):
    build, expected = MATRICES[name]
    params, model = parts(build())
    numbers = functools.partial(muon_dimension_numbers, model=model)
    if name in BY_NAME:
        assert muon_dimension_numbers(params) == numbers(params)
    updates = updates_of(params, numbers)
    adams = updates_of(params, lambda params: jax.tree.map(lambda _: None, params))
    for path, taken in expected.items():
        if taken is None:
            # A few units in the last place of fp32: XLA fuses the two programs differently.
            np.testing.assert_allclose(updates[path], adams[path], rtol=2**-21)
            continue
        take, shape = taken
        matrices = take(np.asarray(updates[path]), shape)
        values = np.linalg.svd(matrices, compute_uv=False) / max(1.0, shape[2] / shape[1]) ** 0.5
        assert LEAST < values.min() <= values.max() < MOST, (path, values)


@jax.numpy_dtype_promotion("standard")
@jax.numpy_rank_promotion("allow")
def updates_of(params: Any, numbers: Any) -> dict[str, Any]:
    """The updates of a step with random gradients."""
    keys = iter(jax.random.split(jax.random.key(1), 99))
    grads = jax.tree.map(lambda p: jax.random.normal(next(keys), p.shape), params)
    tx = optax.contrib.muon(1.0, muon_weight_dimension_numbers=numbers)
    updates = jax.jit(lambda grads, params: tx.update(grads, tx.init(params), params)[0])(grads, params)
    updates = updates if isinstance(updates, dict) else nnx.to_pure_dict(updates)
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def test_kernels_that_are_not_known_are_adams_and_named_once(caplog):
    shapes = {"filters": (3, 4, 8), "stacked": (2, 4, 8), "plain": (4, 8)}
    params = {name: {"kernel": jnp.ones(shape)} for name, shape in shapes.items()}
    with caplog.at_level(logging.WARNING, "jax_te"):
        numbers = [muon_dimension_numbers(params) for _ in range(2)]
    assert numbers[0] == numbers[1]
    assert {name: each["kernel"] for name, each in numbers[0].items()} == {
        "filters": None,
        "stacked": None,
        "plain": (-2, -1),
    }
    assert muon_dimension_numbers(jnp.ones((4, 8))) is None, "it has no name"
    (record,) = caplog.records
    assert "filters/kernel [3, 4, 8], stacked/kernel [2, 4, 8]" in record.getMessage()


def test_a_model_of_other_parameters_is_refused():
    params = nnx.state(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Param)
    with pytest.raises(ValueError, match="have a kernel kernel, and the model has none of that name"):
        muon_dimension_numbers(params, model=Convolutions(nnx.Rngs(0)))


def test_layers_that_were_traced_before_are_known():
    """JAX does not call their functions again."""
    jitted = nn.jit(nn.DenseGeneral)
    call = jax.jit(lambda: jitted((2, 3), name="split").init(jax.random.key(0), jnp.ones((1, 4))))
    params = call()["params"]
    for _ in range(2):
        assert muon_dimension_numbers(params, model=call)["kernel"] == (-3, (-2, -1))
