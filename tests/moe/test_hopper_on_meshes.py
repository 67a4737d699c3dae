"""Experts through Hopper's primitives on meshes; each kernel is in plain JAX, which several devices run at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import ParallelConfig, RouterOptions
from jax_te.layers import MoE
from jax_te.ops.moe import row_groups, weighted_act
from jax_te.ops.pallas import grouped
from jax_te.ops.pallas.grouped_gemm import BlockScales
from jax_te.ops.pallas.support import BLOCK
from jax_te.quantize import BlockQuantizer, QuantizerState
from jax_te.quantize import quantize_operand as quantize_both
from jax_te.recipe import autocast, recipe_from_name
from jax_te.sharding import make_mesh
from tests.support.numerics import draw, relative_l2
from tests.support.states import merging

B, S, H, F, E = 8, 16, 128, 256, 4
X, G = draw("x", (B, S, H), jnp.bfloat16), draw("g", (B, S, H), jnp.bfloat16)


def each_group(sizes: Any, rows: int) -> Any:
    """Which rows belong to each group, fp32 ``[e, rows]``."""
    ends = jnp.cumsum(sizes)[:, None]
    row = jnp.arange(rows)[None]
    return ((row >= ends - sizes[:, None]) & (row < ends)).astype(jnp.float32)


def along(scale: Any, size: int, axis: int) -> Any:
    return jnp.repeat(scale, BLOCK, axis=axis).take(jnp.arange(size), axis=axis)


def grouped_gemm(
    a: Any, b: Any, sizes: Any, scale: Any = None, *, b_transposed: bool = False, out_dtype: Any, **_: Any
):
    left, right = a.astype(jnp.float32), b.astype(jnp.float32)
    right = right.swapaxes(1, 2) if b_transposed else right
    if isinstance(scale, BlockScales):
        left = left * along(scale.a.T, a.shape[1], 1)
        right = right * along(along(scale.b, right.shape[1], 1), right.shape[2], 2)
    elif scale is not None:
        right = right * scale[:, None, None]
    return jnp.einsum("er,rk,ekn->rn", each_group(sizes, a.shape[0]), left, right, precision="highest").astype(
        out_dtype
    )


def grouped_gemm_over_rows(
    a: Any, b: Any, sizes: Any, scale: Any = None, *, rows_last: bool = False, out_dtype: Any, **_: Any
):
    left, right = (x.astype(jnp.float32).T if rows_last else x.astype(jnp.float32) for x in (a, b))
    if isinstance(scale, BlockScales):
        left, right = left * along(scale.a, left.shape[0], 0), right * along(scale.b, right.shape[0], 0)
    out = jnp.einsum("er,rm,rn->emn", each_group(sizes, left.shape[0]), left, right, precision="highest")
    return (out if scale is None or isinstance(scale, BlockScales) else out * scale[:, None, None]).astype(out_dtype)


def scaled_quantize(x: Any, scale: Any, dtype: Any):
    limit, wide = float(jnp.finfo(dtype).max), x.astype(jnp.float32)
    rows = jnp.clip(wide * jnp.repeat(scale, BLOCK, axis=1)[..., None], -limit, limit).astype(dtype)
    return rows, rows.swapaxes(1, 2), jnp.max(jnp.abs(wide).reshape(*scale.shape, -1), axis=-1)


def block_quantize(x: Any, dtype: Any, *, power_of_two: bool):
    operand, _ = quantize_both(x, BlockQuantizer(dtype=dtype, power_of_two=power_of_two), None, axis=1)
    rows, columns = operand.rowwise, operand.columnwise
    return rows.data, rows.scale_inv, columns.data.T, columns.scale_inv.T


def block_quantize_2d(w: Any, dtype: Any, *, power_of_two: bool):
    quantizer = BlockQuantizer(dtype=dtype, power_of_two=power_of_two, two_dimensional=True)
    form = jax.vmap(lambda w: quantize_both(w, quantizer, None, axis=1)[0].rowwise)(w)
    return form.data, form.data.swapaxes(1, 2), form.scale_inv


def weighted_act_backward(dy: Any, x: Any, weights: Any, function: Any):
    def forward(x: Any, weights: Any) -> Any:
        z = function([x[:, i].astype(jnp.float32) for i in range(x.shape[1])])
        return (z.astype(x.dtype).astype(jnp.float32) * weights[:, None]).astype(x.dtype)

    return jax.vjp(forward, x, weights)[1](dy)


KERNELS = (grouped_gemm, grouped_gemm_over_rows, scaled_quantize, block_quantize, block_quantize_2d)


def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Let experts run as on Hopper GPUs; return the set of names of kernels that are called from now on."""
    names: set[str] = set()

    def watched(kernel: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            names.add(kernel.__name__)
            return kernel(*args, **options)

        return run

    for module in (row_groups, grouped, weighted_act):
        monkeypatch.setattr(module, "supported", lambda: (True, "plain JAX"))
    for kernel in KERNELS:
        monkeypatch.setattr(grouped, kernel.__name__, watched(kernel))
    monkeypatch.setattr(weighted_act, "weighted_act_backward", watched(weighted_act_backward))
    jax.clear_caches()  # of programs without these kernels
    return names


def results(recipe: str, sizes: dict[str, int]) -> Any:
    with jax.set_mesh(make_mesh(ParallelConfig(**sizes))), autocast(recipe_from_name(recipe)):
        router = RouterOptions(num_experts=E, topk=2, dtype="fp32")
        layer = MoE(H, F, router, activation="swiglu", params_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        graphdef, params, states, rest = nnx.split(layer, nnx.Param, QuantizerState, ...)

        @jax.jit
        def run(params: Any, states: Any, x: Any) -> Any:
            def call(params: Any, states: Any, x: Any) -> Any:
                return nnx.merge(graphdef, params, merging(states), rest)(x)

            y, vjp = jax.vjp(call, params, states, x)
            return y, vjp(G)

        return jax.tree.map(np.asarray, run(params, states, X))


@pytest.mark.wide("block-expert-tensor")  # each compiles for 8 s
@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"expert": 2, "data": 2}, {"fsdp": 2, "tensor": 2}, {"expert": 2, "tensor": 2}], ids="-".join
)
@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "block"])
def test_devices_run_the_kernels_on_their_own_rows(
    monkeypatch: pytest.MonkeyPatch, recipe: str, sizes: dict[str, int]
) -> None:
    wanted = results(recipe, sizes)  # by XLA
    called = as_on_hopper(monkeypatch)
    found = results(recipe, sizes)
    assert {"grouped_gemm", "grouped_gemm_over_rows", "weighted_act_backward"} <= called
    assert recipe == "none" or called & {"scaled_quantize", "block_quantize_2d"}
    for (path, mine), theirs in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        # One rounding to bf16, 2^-8, of sums in another order, and of those that are quantized and summed afterwards.
        assert relative_l2(mine, theirs) < 2.0**-7, jax.tree_util.keystr(path)
