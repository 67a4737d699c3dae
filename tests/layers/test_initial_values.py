"""Initial values: their distribution, and that neither mesh nor dtype changes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.layers import Linear, TransformerLayer, normal_init, scaled_normal_init
from tests.support.meshes import MODES, shardings, use_mesh
from tests.support.numerics import assert_bitwise
from tests.support.reference import parameters


def build(dtype: jnp.dtype = jnp.float32) -> TransformerLayer:
    return TransformerLayer(32, 64, 4, num_gqa_groups=2, params_dtype=dtype, rngs=nnx.Rngs(7))


def values(model: nnx.Module) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(parameters(model))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.costly
def test_no_mesh_changes_them() -> None:
    alone = values(build())
    assert len(alone) == 12
    for mode in MODES[1:]:
        with use_mesh(mode):
            for name, value in values(build()).items():
                assert_bitwise(value, alone[name], what=f"{mode} {name}")


@pytest.mark.wide("explicit")
@pytest.mark.parametrize("mode", MODES[1:])
def test_creation_in_pieces_changes_nothing(mode: str) -> None:
    """Under jit, each device computing its part of every parameter."""
    alone = values(build())
    with use_mesh(mode):
        graphdef, _ = nnx.split(jax.eval_shape(build))
        create = jax.jit(lambda: nnx.state(build(), nnx.Param), out_shardings=shardings(jax.eval_shape(build)))
        made = nnx.merge(graphdef, create())
        assert made.layernorm_mlp.wi_kernel[...].sharding.spec == jax.P("fsdp", None, "tensor")
        for name, value in values(made).items():
            assert_bitwise(value, alone[name], what=name)


def test_half_precision_weights_are_the_rounded_fp32_weights() -> None:
    half = values(build(jnp.bfloat16))
    for name, value in values(build()).items():
        assert_bitwise(half[name], np.asarray(jnp.asarray(value).astype(jnp.bfloat16)), what=name)


def test_normal_init_has_its_standard_deviation() -> None:
    kernel = np.asarray(Linear(256, 256, rngs=nnx.Rngs(0)).kernel[...], np.float64)
    count = kernel.size
    assert abs(kernel.mean()) < 4 * 0.023 / count**0.5
    assert abs(kernel.std() / 0.023 - 1) < 4 / (2 * count) ** 0.5  # the standard error of a standard deviation
    key = jax.random.key(0)
    assert_bitwise(scaled_normal_init(0.02, 8)(key, (4,), jnp.float32), normal_init(0.005)(key, (4,), jnp.float32))


def test_a_given_initializer_is_used() -> None:
    layer = TransformerLayer(
        32,
        64,
        4,
        init_method=jax.nn.initializers.ones,
        output_layer_init_method=jax.nn.initializers.zeros,
        rngs=nnx.Rngs(0),
    )
    assert (layer.self_attention.qkv.kernel[...] == 1).all()
    assert (layer.layernorm_mlp.wi_kernel[...] == 1).all()
    assert (layer.self_attention.proj.kernel[...] == 0).all()
    assert (layer.layernorm_mlp.wo_kernel[...] == 0).all()


def test_bad_arguments_say_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="std must be >= 0"):
        normal_init(-1.0)
    with pytest.raises(ValueError, match="num_layers must be >= 1"):
        scaled_normal_init(0.02, 0)
