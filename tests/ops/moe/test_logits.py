import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops import router_logits


def operands(experts, dtype, lead=(3, 40), hidden=48):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (*lead, hidden), dtype)
    kernel = jax.random.normal(keys[1], (hidden, experts), dtype)
    return x, kernel, jax.random.normal(keys[2], (*lead, experts), jnp.float32)


def check_bf16(experts, **sizes):
    """Check that logits and gradients of operands in bf16 have fp32's error, not bf16's."""
    x, kernel, g = operands(experts, jnp.bfloat16, **sizes)
    logits, vjp = jax.vjp(lambda x, kernel: router_logits(x, kernel, jnp.float32), x, kernel)
    dx, dkernel = vjp(g)
    assert (logits.dtype, dx.dtype, dkernel.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    exact = [np.asarray(array, np.float64) for array in (x, kernel, g)]
    # 48 products of which one is at most about 10: sums in fp32 differ by some units of 1e-6. The error of a sum one by
    # one grows as the number of its terms: by its root for the size of the partial sums, and again for their errors.
    np.testing.assert_allclose(logits, exact[0] @ exact[1], rtol=0, atol=2e-5 * max(1.0, x.shape[-1] / 48))
    # Gradients are rounded once, by half a unit of 8 bits; the sum's own error may push a tie to the other side.
    np.testing.assert_allclose(np.float64(dx), exact[2] @ exact[1].T, rtol=2.0**-8, atol=2e-5)
    tokens = x.size // x.shape[-1]
    d_exact = np.einsum("bsh,bse->he", exact[0], exact[2], optimize=True)
    np.testing.assert_allclose(np.float64(dkernel), d_exact, rtol=2.0**-8, atol=1e-4 * max(1.0, tokens / 120))


@pytest.mark.parametrize("experts", [4, 24])
def test_of_bf16(experts):
    check_bf16(experts)


@pytest.mark.parametrize("experts", [4, 24])
def test_the_gradient_that_comes_in(experts):
    """It is not rounded to bf16, in which 1 + 2**-20 is 1: what is left of its difference to 1 shows."""
    x = jnp.zeros((2, 8), jnp.bfloat16).at[:, 0].set(jnp.array([1.0, -1.0], jnp.bfloat16))
    kernel = jnp.zeros((8, experts), jnp.bfloat16).at[0, :2].set(jnp.array([1.0, -1.0], jnp.bfloat16))
    g = jnp.zeros((2, experts)).at[:, :2].set(jnp.array([[1.0 + 2.0**-20, 1.0], [1.0, 1.0]]))
    dx, dkernel = jax.vjp(lambda x, kernel: router_logits(x, kernel, jnp.float32), x, kernel)[1](g)
    np.testing.assert_array_equal(dx[:, 0], [2.0**-20, 0.0])
    np.testing.assert_array_equal(dkernel[0, :2], [2.0**-20, 0.0])


def test_of_other_dtypes():
    """Operands in fp32 are multiplied in fp32, and None's GEMM is in the input's dtype."""
    x, kernel, _ = operands(4, jnp.float32)
    np.testing.assert_array_equal(router_logits(x, kernel, jnp.float32), jnp.matmul(x, kernel, precision="highest"))
    x16 = x.astype(jnp.bfloat16)
    assert router_logits(x16, kernel, jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_allclose(
        router_logits(x16, kernel, jnp.float32), np.float64(x16) @ np.float64(kernel), rtol=0, atol=2e-5
    )
