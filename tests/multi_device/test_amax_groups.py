"""Current scaling on a mesh: which shards of a tensor share a scale."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.config import ParallelConfig
from jax_te.ops import LinearOptions, dense
from jax_te.ops.linear.quantize_kernel import quantize_kernel
from jax_te.quantize import init_gemm_state
from jax_te.recipe import DelayedScaling, Float8CurrentScaling
from jax_te.sharding import make_mesh, named_sharding
from tests.support.meshes import use_mesh
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_close, draw, quick_jit
from tests.support.states import merging

GROUP, WHOLE = Float8CurrentScaling(), Float8CurrentScaling(amax_scope="whole")
BATCH, TENSOR = 4, 2
"""Shards of the batch, over data=2 and fsdp=2, and of features, over tensor=2."""

OPTIONS = LinearOptions()
COLUMN = {
    "x": ("batch", "sequence_parallel", "hidden"),
    "kernel": ("fsdp", "ffn"),
    "out": ("batch", "sequence", "ffn"),
}
ROW = {
    "x": ("batch", "sequence", "ffn"),
    "kernel": ("ffn_fsdp", "hidden"),
    "out": ("batch", "sequence_parallel", "hidden"),
}


def operands():
    """Return x, kernel and output gradient in which every shard has another amax."""
    b, s, k = (np.arange(n, dtype=np.float32) for n in (8, 16, 64))
    grow, along = 1.3 ** b[:, None, None] * 1.1 ** s[:, None], 1.04**k
    x, w, g = (
        np.asarray(draw(name, shape)) for name, shape in (("x", (8, 16, 64)), ("w", (64, 64)), ("g", (8, 16, 64)))
    )
    return tuple(jnp.asarray(a, jnp.float32) for a in (x * grow * along, w * along * along[:, None], g / grow * along))


def run(x, w, g, recipe, options=OPTIONS):
    y, vjp = jax.vjp(lambda x, w: dense(x, w, recipe=recipe, options=options), x, w)
    return y, *vjp(g)


def on_the_mesh(axes, recipe, call):
    options = LinearOptions(x_axes=axes["x"], kernel_axes=axes["kernel"], out_axes=axes["out"])
    names = (axes["x"], axes["kernel"], axes["out"])
    placed = [
        jax.device_put(a, named_sharding(b, jax.sharding.get_mesh())) for a, b in zip(operands(), names, strict=True)
    ]
    return call(lambda *args: run(*args, recipe, options), placed)


def halves(array, axis):
    return jnp.split(array, TENSOR, axis)


@pytest.mark.wide("explicit-row")
@pytest.mark.parametrize("axes", [COLUMN, ROW], ids=["column", "row"])
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_each_group_of_shards_is_quantized_like_an_array_of_its_own(axes, mode):
    """The oracle calls one device for each part of the batch and each shard of the features."""
    with use_mesh(mode):
        y, dx, dw = on_the_mesh(axes, GROUP, lambda fn, args: quick_jit(fn)(*args))
    x, w, g = operands()
    column = axes is COLUMN
    oracle = quick_jit(lambda *args: run(*args, GROUP))
    ys, dxs, dws = [], [], 0.0
    for part, g_part in zip(jnp.split(x, BATCH), jnp.split(g, BATCH), strict=True):
        xs, gs = ([part] * TENSOR, halves(g_part, -1)) if column else (halves(part, -1), [g_part] * TENSOR)
        found = [oracle(*args) for args in zip(xs, halves(w, 1 if column else 0), gs, strict=True)]
        outs, inputs, kernels = zip(*found, strict=True)
        ys.append(jnp.concatenate(outs, -1) if column else sum(outs))
        dxs.append(sum(inputs) if column else jnp.concatenate(inputs, -1))
        dws += jnp.concatenate(kernels, 1 if column else 0)
    for name, actual, expected in (("y", y, ys), ("dx", dx, dxs)):
        # Sums over devices add in another order.
        assert_close(actual, jnp.concatenate(expected), TOLERANCE["float32"], what=name)
    assert_close(dw, dws, TOLERANCE["float32"], what="dw")
    # And the values do show whose amax it was.
    alone = quick_jit(lambda *args: run(*args, GROUP))(x, w, g)
    assert float(jnp.max(jnp.abs(alone[0] - jnp.asarray(np.asarray(y))))) > 1e-3


@pytest.mark.costly("group-column")
@pytest.mark.parametrize("axes", [COLUMN, ROW], ids=["column", "row"])
@pytest.mark.parametrize("recipe", [GROUP, WHOLE], ids=["group", "whole"])
def test_a_kernel_quantized_beforehand_has_the_scales_of_the_call(axes, recipe):
    with use_mesh("auto"):
        expected = on_the_mesh(axes, recipe, lambda fn, args: quick_jit(lambda x, w, g: fn(x, w, g)[0])(*args))
        options = LinearOptions(x_axes=axes["x"], kernel_axes=axes["kernel"], out_axes=axes["out"])

        def beforehand(x, w, g):
            kernel = quantize_kernel(w, recipe=recipe, kernel_axes=axes["kernel"])
            return dense(x, kernel, recipe=recipe, options=options)

        actual = on_the_mesh(axes, recipe, lambda _, args: quick_jit(beforehand)(*args))
    assert_bitwise(actual, expected)


@pytest.mark.costly("delayed")
@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=4), WHOLE], ids=["delayed", "whole"])
def test_a_nan_on_one_device_is_in_the_amax_of_all(recipe):
    """As on one device: the gradient of the state has the nan, and so has a current scale."""
    x, w, g = operands()
    x = x.at[0, 0, 0].set(jnp.nan)
    options = LinearOptions(x_axes=COLUMN["x"], kernel_axes=COLUMN["kernel"], out_axes=COLUMN["out"])

    def both(x, w, g):
        y, vjp = jax.vjp(
            lambda state: dense(x, w, recipe=recipe, state=merging(state), options=options), init_gemm_state(recipe)
        )
        return y, vjp(g)

    y, state = quick_jit(both)(x, w, g)
    with jax.set_mesh(make_mesh(ParallelConfig(data=2))):
        y_mesh, state_mesh = quick_jit(both)(x, w, g)
    assert_bitwise(y_mesh[1:], y[1:])
    assert jax.tree.structure(state_mesh) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, state_mesh, state)
    if state[0] is not None:
        assert np.isnan(state[0]["x"]["amax_history"][0])


@pytest.mark.costly("sizes0-axes0")
@pytest.mark.parametrize(("sizes", "axes"), [({"data": 8}, COLUMN), ({"data": 4, "tensor": 2}, ROW)])
def test_no_device_waits_for_data_parallel_ones(sizes, axes):
    def groups_of(recipe):
        """Return how many devices each reduction to a maximum of a forward pass joins."""
        with jax.set_mesh(make_mesh(ParallelConfig(**sizes))):
            text = (
                on_the_mesh(axes, recipe, lambda fn, args: jax.jit(lambda *a: fn(*a)[0]).lower(*args))
                .compile()
                .as_text()
            )
        return re.findall(r"[fs]32\[\]\S* all-reduce\(", text)

    assert not groups_of(GROUP)
    assert groups_of(WHOLE)
