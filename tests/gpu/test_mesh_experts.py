"""Experts on a mesh of all GPUs, through Hopper's kernels, each GPU on its own rows, give what one GPU gives.

``pytest -n 0 -m gpu tests/gpu/test_mesh_experts.py``.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import DispatchOptions, ParallelConfig, RouterOptions
from jax_te.layers import MoE
from jax_te.ops.pallas.support import supported
from jax_te.quantize import QuantizerState
from jax_te.recipe import Float8CurrentScaling, autocast, recipe_from_name
from jax_te.sharding import make_mesh
from tests.support.numerics import draw, relative_l2
from tests.support.states import merging

pytestmark = pytest.mark.gpu

B, S, H, F, E = 8, 256, 256, 512, 8
X, G = draw("x", (B, S, H), jnp.bfloat16), draw("g", (B, S, H), jnp.bfloat16, scale=0.1)
# Sums over devices are rounded to bf16, 2^-8 each, one after the other. Under a recipe one value in 2^5 of those that
# are quantized afterwards then falls on the other side of a step of E5M2, 2^-2 wide: 2^-2 * 2^-2.5.
WITHIN = {"none": 2.0**-7, "delayed": 2.0**-4, "current": 2.0**-4, "block": 2.0**-4}
RECIPES = {name: recipe_from_name(name) for name in WITHIN} | {"current": Float8CurrentScaling(amax_scope="whole")}
WAYS: dict[str, Any] = {
    "data": {},
    "fsdp": {},
    "tensor": {},
    "expert": {},
    "expert, all-to-all": {"dispatch": DispatchOptions(dispatcher="alltoall", rank_capacity_factor=2.0)},
}


def results(recipe: str, sizes: dict[str, int], **options: Any) -> dict[str, np.ndarray]:
    """Output of a layer and gradients of its parameters and its input on a mesh of these sizes."""
    mesh = make_mesh(ParallelConfig(**sizes), devices=jax.devices()[: int(np.prod(list(sizes.values())))])
    with jax.set_mesh(mesh), autocast(RECIPES[recipe]):
        router = RouterOptions(num_experts=E, topk=2, dtype="fp32")
        layer = MoE(H, F, router, activation="swiglu", params_dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **options)
        graphdef, params, states, rest = nnx.split(layer, nnx.Param, QuantizerState, ...)

        @jax.jit
        def run(params: Any, states: Any, x: Any) -> Any:
            def call(params: Any, states: Any, x: Any) -> Any:
                return nnx.merge(graphdef, params, merging(states), rest)(x)

            y, vjp = jax.vjp(call, params, states, x)
            dparams, _, dx = vjp(G)
            return y, dparams, dx

        found = jax.tree_util.tree_leaves_with_path(run(params, states, X))
        return {jax.tree_util.keystr(path): np.asarray(value) for path, value in found}


@functools.cache
def one_gpu(recipe: str) -> dict[str, np.ndarray]:
    return results(recipe, {"data": 1})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", WITHIN)
def test_experts_on_several_gpus(recipe: str, way: str) -> None:
    count = jax.device_count()
    if count < 2:
        pytest.fail(f"these tests need several GPUs, and there is {count}")
    assert supported()[0], supported()[1]
    found = results(recipe, {way.split(",")[0]: count}, **WAYS[way])
    for path, wanted in one_gpu(recipe).items():
        assert relative_l2(found[path], wanted) < WITHIN[recipe], path
