"""`linear_cross_entropy` against NumPy, on meshes, and what it keeps in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.config import ParallelConfig
from jax_te.ops import linear_cross_entropy
from jax_te.sharding import constrain, make_mesh
from tests.support import oracles
from tests.support.numerics import TOLERANCE, assert_close, compiled_text, draw, quick_jit, wide, without_type_checker

B, S, H, V = 4, 8, 16, 32
AXES = ("batch", "sequence")


def operands(dtype=jnp.float32):
    labels = jax.random.randint(jax.random.key(1), (B, S), 0, V)
    return draw("x", (B, S, H), dtype), draw("kernel", (H, V), dtype, scale=0.3), labels


def run(x, kernel, labels, g, chunks):
    @quick_jit
    def value_and_vjp(x, kernel, g):
        y, vjp = jax.vjp(
            lambda x, kernel: linear_cross_entropy(x, kernel, labels, chunks=chunks, out_axes=AXES), x, kernel
        )
        return y, vjp(constrain(g, AXES))

    return value_and_vjp(x, kernel, g)


def expected(x, kernel, labels, g):
    x, kernel, labels, g = wide(x), wide(kernel), np.asarray(labels), wide(g)
    logits = x @ kernel
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    dlogits = (probs / probs.sum(-1, keepdims=True) - np.eye(V)[labels]) * g[..., None]
    return oracles.cross_entropy(logits, labels), (dlogits @ kernel.T, np.einsum("bsh,bsv->hv", x, dlogits))


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_value_and_gradients(chunks, dtype):
    x, kernel, labels = operands(dtype)
    g = draw("g", (B, S))
    loss, (dx, dkernel) = run(x, kernel, labels, g, chunks)
    value, gradients = expected(x, kernel, labels, g)
    assert (loss.dtype, dx.dtype, dkernel.dtype) == (jnp.float32, x.dtype, kernel.dtype)
    assert_close(loss, value, TOLERANCE["float32"])  # also in bf16: the logits stay in fp32
    assert_close(dx, gradients[0], 2 * TOLERANCE[dtype])
    assert_close(dkernel, gradients[1], 2 * TOLERANCE[dtype])


@pytest.mark.wide("explicit")
def test_on_meshes(mesh_mode):
    x, kernel, labels = operands()
    g = draw("g", (B, S))
    loss, gradients = run(x, kernel, labels, g, 2)
    value, wanted = expected(x, kernel, labels, g)
    assert_close(loss, value, TOLERANCE["float32"])
    for got, e in zip(gradients, wanted, strict=True):
        assert_close(got, e, 2 * TOLERANCE["float32"])


@pytest.mark.costly("auto")
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
def test_where_context_ranks_split_the_sequence(axis_type):
    x, kernel, labels = operands()
    g = draw("g", (B, S))
    with jax.set_mesh(make_mesh(ParallelConfig(fsdp=2, context=2, tensor=2), axis_type=axis_type)):
        loss, gradients = run(x, kernel, labels, g, 2)
        with pytest.raises(
            ValueError, match="length 8 is not divisible by chunks 8 on each of 2 context ranks; change"
        ):
            run(x, kernel, labels, g, 8)
    value, wanted = expected(x, kernel, labels, g)
    assert_close(loss, value, TOLERANCE["float32"])
    for got, e in zip(gradients, wanted, strict=True):
        assert_close(got, e, 2 * TOLERANCE["float32"])


def test_the_logits_are_never_there_as_a_whole():
    x, kernel, labels = operands(jnp.bfloat16)

    def text(chunks):
        def loss(x, kernel):
            return linear_cross_entropy(x, kernel, labels, chunks=chunks).sum()

        return compiled_text(jax.grad(loss, argnums=(0, 1)), x, kernel)

    whole, part = f"f32[{B},{S},{V}]", f"f32[{B},{S // 4},{V}]"
    assert whole in text(1)
    assert whole not in text(4)
    assert part in text(4)


@pytest.mark.costly("0-8")
@pytest.mark.parametrize(("b", "s"), [(0, 8), (2, 0)])
def test_an_empty_microbatch_has_no_loss_and_no_gradient(b, s):
    x, kernel, labels = jnp.ones((b, s, 4)), jnp.ones((4, 8)), jnp.zeros((b, s), jnp.int32)

    def loss(x, kernel):
        return linear_cross_entropy(x, kernel, labels, chunks=2, reduction="mean")

    value, (dx, dkernel) = jax.value_and_grad(loss, (0, 1))(x, kernel)
    assert (value, dx.shape) == (0.0, x.shape)
    assert not dkernel.any()


def test_a_label_outside_gives_nan():
    x, kernel, labels = operands()
    loss, (dx, _) = run(x, kernel, labels.at[1, 2].set(V), jnp.ones((B, S)), 2)
    assert np.isnan(loss).sum() == 1
    assert np.isnan(loss[1, 2])
    assert np.isnan(dx[1, 2]).all()


def test_arguments_that_do_not_go_together():
    x, kernel, labels = operands()
    with pytest.raises(ValueError, match="sequence length 8 is not divisible by chunks 3"):
        linear_cross_entropy(x, kernel, labels, chunks=3)
    with pytest.raises(ValueError, match=r"x must be \[b, s, h\] and kernel \[h, v\]; got \(4, 8, 16\) and \(32, 16\)"):
        linear_cross_entropy(x, kernel.T, labels)
    with pytest.raises(ValueError, match=r"labels \(4, 7\) must have the shape of the logits \(4, 8, 32\)"):
        linear_cross_entropy(x, kernel, labels[:, :7])
    with without_type_checker(), pytest.raises(TypeError, match="labels must be integers, got float32"):
        linear_cross_entropy(x, kernel, labels.astype(jnp.float32))
