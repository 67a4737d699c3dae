"""On a mesh of all GPUs, through TE: layers of Flax, and numbers of tokens that are padded on each device.

``pytest -n 0 -m gpu tests/gpu/test_mesh_sizes.py``. Tolerances are those of tests/gpu/test_mesh.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jax_te.config import ParallelConfig
from jax_te.layers import LayerNormMLP, quantize_model
from jax_te.ops import use_backend
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from jax_te.sharding import make_mesh, named_sharding
from jax_te.training import value_and_grad
from tests.support.numerics import draw, relative_l2

pytestmark = pytest.mark.gpu

RECIPES = {"delayed": DelayedScaling(amax_history_len=3), "current": Float8CurrentScaling(amax_scope="whole")}
RULES = (("batch", "data"), ("embed", None), ("mlp", "model"))
H, F = 512, 1024


class MLP(nnx.Module):
    """A column-parallel and a row-parallel layer of Flax."""

    def __init__(self, rngs: nnx.Rngs):
        def linear(ins, outs, *names):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
            return nnx.Linear(ins, outs, use_bias=False, kernel_init=init, dtype=jnp.bfloat16, rngs=rngs)

        self.up, self.down = linear(H, F, "embed", "mlp"), linear(F, H, "mlp", "embed")

    def __call__(self, x):
        return self.down(jax.nn.silu(self.up(x)))


def devices():
    if jax.device_count() < 2:
        pytest.fail(f"these tests need several GPUs, and there is {jax.device_count()}")
    return jax.device_count()


def gradients(model, x, g):
    def loss(model, x):
        return jnp.sum(model(x).astype(jnp.float32) * g.astype(jnp.float32))

    return jax.tree.leaves(nnx.jit(value_and_grad(loss))(model, x)[1])


def assert_close(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        one, other = (np.asarray(array, np.float32) for array in (one, other))
        assert relative_l2(one, other) < 0.12


@pytest.mark.parametrize("form", ["data", "model"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_of_flax(recipe, form):
    x, g = draw("x", (8, 64, H), jnp.bfloat16), draw("g", (8, 64, H), jnp.bfloat16, scale=0.1)
    sizes = (devices(), 1) if form == "data" else (1, devices())
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with autocast(RECIPES[recipe]), use_backend("te"):
        with nnx.use_eager_sharding(False):
            plain = MLP(nnx.Rngs(0))
            quantize_model(plain, x, rules={"*": "ambient"})
            expected = gradients(plain, x, g)
        with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
            split = MLP(nnx.Rngs(0))
            quantize_model(split, x, rules={"*": "ambient"})
            assert_close(gradients(split, *(jax.device_put(a, jax.P("data")) for a in (x, g))), expected)


@pytest.mark.parametrize("form", ["data", "fsdp", "tensor", "sequence parallel"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_that_are_padded_on_each_device(recipe, form):
    """12 for each device, or 12 of a sequence that the devices share."""
    count, parallel = devices(), form == "sequence parallel"
    shape = (count, 12 * (count if parallel else 1), H)
    x, g = draw("x", shape, jnp.bfloat16), draw("g", shape, jnp.bfloat16, scale=0.1)
    axis = "tensor" if parallel else form
    with autocast(RECIPES[recipe]), use_backend("te"):
        expected = gradients(LayerNormMLP(H, F, params_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), x, g)
        mesh = make_mesh(ParallelConfig(**{axis: count}))
        with jax.set_mesh(mesh):
            axes = ("batch", "sequence_parallel" if parallel else "sequence", "hidden")
            placed = (jax.device_put(a, named_sharding(axes, mesh)) for a in (x, g))
            layer = LayerNormMLP(H, F, params_dtype=jnp.bfloat16, sequence_parallel=parallel, rngs=nnx.Rngs(0))
            assert_close(gradients(layer, *placed), expected)
