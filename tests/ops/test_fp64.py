"""Arithmetic on fp64 inputs: in fp64, or refused; a user takes it to compare with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.errors import BackendUnavailableError
from jax_te.ops import (
    LinearWeights,
    NormSpec,
    RowGroups,
    activation,
    dense,
    dot_product_attention,
    grouped_dense,
    layernorm,
    layernorm_dense,
    linear_cross_entropy,
    softmax_cross_entropy,
)

SHAPES = {
    "x": (8, 16),
    "pair": (8, 2, 16),
    "scale": (16,),
    "bias": (16,),
    "kernel": (16, 16),
    "kernels": (2, 16, 16),
    "biases": (2, 16),
}


def normed(a):
    centred = a["x"] - a["x"].mean(-1, keepdims=True)
    return (
        centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + NormSpec().epsilon) * a["scale"][None]
        + a["bias"][None]
    )


def of_groups(a):
    products = (a["x"][3 * g : 3 + 5 * g] @ a["kernels"][g] + a["biases"][g][None] for g in range(2))
    return jnp.concatenate(list(products))


CASES = {  # the op, and a formula
    "layernorm": (lambda a: layernorm(a["x"], a["scale"], a["bias"]), normed),
    "activation": (
        lambda a: activation(a["pair"], "swiglu"),
        lambda a: jax.nn.silu(a["pair"][:, 0]) * a["pair"][:, 1],
    ),
    "layernorm_dense": (
        lambda a: layernorm_dense(a["x"], a["scale"], a["bias"], LinearWeights(a["kernel"], a["bias"])),
        lambda a: normed(a) @ a["kernel"] + a["bias"][None],
    ),
    "grouped_dense": (
        lambda a: grouped_dense(
            a["x"], a["kernels"], a["biases"], groups=RowGroups(sizes=jnp.array([3, 5], jnp.int32), rows=8)
        ),
        of_groups,
    ),
}


@pytest.mark.costly("layernorm_dense", slow=("layernorm", "grouped_dense"))
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_have_the_digits_of_fp64(name):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        arrays = {key: jnp.asarray(rng.normal(size=shape)) for key, shape in SHAPES.items()}
        (y, gradients), (expected, wanted) = (
            (f(arrays), jax.grad(lambda a, f=f: jnp.sum(f(a) ** 2))(arrays)) for f in CASES[name]
        )
    assert y.dtype == np.float64
    # Sums of some hundred products, each rounded by 2^-53; fp32's digits would be 1e-7 off.
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)
    for key, gradient in gradients.items():
        np.testing.assert_allclose(gradient, wanted[key], rtol=0, atol=1e-12 * (1 + np.abs(wanted[key]).max()))


def test_a_kernel_of_fp32_has_its_gradient_in_fp32():
    with jax.enable_x64(True):
        x, kernel = jnp.ones((4, 16), jnp.float64), jnp.ones((16, 8), jnp.float32)
        gradient = jax.grad(lambda kernel: jnp.sum(dense(x, kernel)))(kernel)
    assert gradient.dtype == np.float32
    np.testing.assert_array_equal(gradient, 4.0)


def test_what_computes_in_fp32_refuses_fp64():
    words = "takes arrays of float32, bfloat16, float16, and not of float64"
    with jax.enable_x64(True):
        x, labels = jnp.ones((1, 4, 2, 8), jnp.float64), jnp.zeros((1, 4), jnp.int32)
        calls = [
            lambda: dot_product_attention((x, x, x)),
            lambda: softmax_cross_entropy(x[:, :, 0], labels),
            lambda: linear_cross_entropy(x[:, :, 0], jnp.ones((8, 16), jnp.float32), labels, chunks=2),
        ]
        for call in calls:
            with pytest.raises(TypeError, match=words):
                call()
        with pytest.raises(BackendUnavailableError, match="Transformer Engine has no fp64"):
            layernorm(x, jnp.ones(8), backend="te")
