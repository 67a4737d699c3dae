"""TE's quantizers, GEMMs, norms and activations on each of 8 devices: what one device gives, sequence parallel or not.

In fp32 the devices add up in another order: up to 128 terms, √128 · 2^-23 = 1.3e-6 in each of four products that follow
one another, 5e-6. Under FP8 that may turn the rounding of a computed operand, which does not happen at these sizes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_te.config import ParallelConfig
from jax_te.errors import BackendUnavailableError
from jax_te.layers import LayerNorm, LayerNormLinear, LayerNormMLP, Linear
from jax_te.ops import dense, explain_backend, use_backend
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, Recipe, autocast
from jax_te.sharding import make_mesh
from jax_te.training import split_model
from tests.support.numerics import draw, relative_l2
from tests.support.states import merging

pytestmark = pytest.mark.te

B, S, H, F = 4, 32, 64, 128
RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "delayed": DelayedScaling(),
    "current": Float8CurrentScaling(amax_scope="whole"),
}


class Block(nnx.Module):
    """Every linear layer and a norm, with a residual connection."""

    def __init__(self, sequence_parallel: bool, rngs: nnx.Rngs):
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "rngs": rngs}
        self.norm = LayerNorm(H, rngs=rngs)
        self.qkv = LayerNormLinear(H, (3, F), parallel_mode="column", **options)
        self.proj = Linear(F, H, parallel_mode="row", **options)
        self.mlp = LayerNormMLP(H, F, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.qkv(self.norm(x))
        return self.mlp(x + self.proj(y[:, :, 0] * 0.5 + y[:, :, 1] + y[:, :, 2]))


def gradients(sequence_parallel: bool, mesh: Any, length: int = S) -> list[jax.Array]:
    graphdef, *parts = split_model(Block(sequence_parallel, nnx.Rngs(0)))
    params, quantizers, rest, x, g = (*parts, draw("x", (B, length, H)), draw("g", (B, length, H)))
    if mesh is not None:
        params, quantizers, x, g = jax.device_put((params, quantizers, x, g), NamedSharding(mesh, P()))

    def run(params: Any, quantizers: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params, merging(quantizers), rest)(x)

    def both(args: Any, g: jax.Array) -> Any:
        y, vjp = jax.vjp(run, *args)
        if mesh is not None and "Explicit" in str(mesh.axis_types):
            g = jax.sharding.reshard(g, jax.typeof(y).sharding.spec)
        return y, vjp(g)

    return jax.tree.leaves(jax.jit(both)((params, quantizers, x), g))


@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_devices_of_a_mesh_give_what_one_gives(recipe: str, sequence_parallel: bool, mode: Any) -> None:
    with autocast(RECIPES[recipe]), use_backend("te"):
        expected = gradients(sequence_parallel, None)
        mesh = make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2), axis_type=mode)
        with jax.set_mesh(mesh):
            found = gradients(sequence_parallel, mesh)
    for got, want in zip(found, expected, strict=True):
        assert got.dtype == want.dtype
        assert relative_l2(jax.device_get(got), jax.device_get(want)) < 5e-6


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_each_device_pads_tokens_that_fp8_does_not_take(recipe: str, sequence_parallel: bool) -> None:
    """10 of 40, which is not a multiple of 16 either."""
    with autocast(RECIPES[recipe]), use_backend("te"):
        expected = gradients(sequence_parallel, None, 10)
        mesh = make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2), axis_type="auto")
        with jax.set_mesh(mesh):
            found = gradients(sequence_parallel, mesh, 10)
    for got, want in zip(found, expected, strict=True):
        assert relative_l2(got, want) < 5e-6


def test_shards_share_the_scales_that_they_share_in_plain_jax() -> None:
    mesh = make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        found = {}
        for scope, backend in (("group", "te"), ("group", "xla"), ("whole", "te")):
            with autocast(Float8CurrentScaling(amax_scope=scope)), use_backend(backend):
                found[scope, backend] = jax.device_get(gradients(True, mesh))
    far, near = (
        [relative_l2(got, want) for got, want in zip(found["group", "te"], found[other], strict=True)]
        for other in (("whole", "te"), ("group", "xla"))
    )
    assert max(near) < 5e-6
    assert max(far) > 0.05  # the rounding of FP8


def test_a_call_that_names_no_axes_is_refused_with_the_reason() -> None:
    x, kernel = jnp.ones((16, 32)), jnp.ones((32, 16))
    with (
        jax.set_mesh(make_mesh(ParallelConfig(tensor=8))),
        pytest.raises(BackendUnavailableError, match="does not name the logical axes of its output and kernel"),
    ):
        dense(x, kernel, backend="te")
    with jax.set_mesh(make_mesh(ParallelConfig(tensor=8))):
        assert explain_backend("dense", backend="te").backend == "te"
