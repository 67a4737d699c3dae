"""The output head: logits, and gradients that are those of the plain formula."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import print_saved_residuals

from jax_te.config import ParallelConfig
from jax_te.ops import head_logits
from jax_te.sharding import constrain, make_mesh
from tests.support.numerics import assert_close

TOLERANCE = 1e-6  # both sum 25 products in fp32 at most, in another order
AXES = ("batch", "sequence", "hidden")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [24, 25])
def test_logits_and_gradients_are_those_of_the_formula(size, tied, bias):
    keys = jax.random.split(jax.random.key(0), 4)
    x, kernel = jax.random.normal(keys[0], (2, 4, 16)), jax.random.normal(keys[1], (size, 16) if tied else (16, size))
    b = jax.random.normal(keys[2], (size,)) if bias else None
    g = jax.random.normal(keys[3], (2, 4, size))

    def formula(x, kernel, b):
        logits = x @ (kernel.T if tied else kernel)
        return logits if b is None else logits + b[None, None]

    ours, vjp = jax.vjp(lambda *args: head_logits(*args, axes=AXES, tied=tied), x, kernel, b)
    wanted, wanted_vjp = jax.vjp(formula, x, kernel, b)
    assert_close(ours, wanted, TOLERANCE)
    for mine, theirs in zip(jax.tree.leaves(vjp(g)), jax.tree.leaves(wanted_vjp(g)), strict=True):
        assert_close(mine, theirs, TOLERANCE)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_have_the_dtypes_of_what_they_belong_to(tied):
    x, kernel, bias = jnp.ones((1, 2, 16), jnp.bfloat16), jnp.ones((16, 16)), jnp.ones(16, jnp.bfloat16)
    out, vjp = jax.vjp(lambda *args: head_logits(*args, axes=AXES, tied=tied), x, kernel, bias)
    assert [out.dtype, *(grad.dtype for grad in vjp(out))] == [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.bfloat16]


@pytest.mark.parametrize("tied", [False, True])
def test_no_tokens_give_no_gradient(tied):
    x, kernel = jnp.ones((2, 0, 16)), jnp.ones((24, 16) if tied else (16, 24))
    logits, vjp = jax.vjp(lambda *args: head_logits(*args, axes=AXES, tied=tied), x, kernel)
    dx, dkernel = vjp(logits)
    assert (logits.shape, dx.shape, dkernel.tolist()) == ((2, 0, 24), (2, 0, 16), jnp.zeros_like(kernel).tolist())


@pytest.mark.parametrize("tied", [False, True])
def test_backward_reads_the_kernel_itself(tied, capsys):
    """A copy of it in the compute dtype would be in memory from forward to backward."""
    x, kernel = jnp.ones((1, 2, 16), jnp.bfloat16), jnp.ones((24, 16) if tied else (16, 24))
    print_saved_residuals(lambda kernel: jnp.sum(head_logits(x, kernel, axes=AXES, tied=tied)), kernel)
    saved = capsys.readouterr().out
    assert "f32[24,16]" in saved or "f32[16,24]" in saved
    assert "bf16[24,16]" not in saved
    assert "bf16[16,24]" not in saved


def plain(x, kernel, tied):
    return x @ (kernel.T if tied else kernel)


@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("mesh", ["tensor=2,fsdp=2", "data=2,tensor=2", "context=2,tensor=2"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_mesh_changes_no_value(tied, mesh, axis_type):
    x, kernel = jax.random.normal(jax.random.key(0), (4, 8, 16)), jax.random.normal(jax.random.key(1), (24, 16))
    kernel = kernel if tied else kernel.T
    wanted, wanted_vjp = jax.vjp(lambda *args: plain(*args, tied), x, kernel)
    with jax.set_mesh(make_mesh(ParallelConfig.parse(mesh), axis_type=axis_type)):
        x = constrain(x, AXES)
        kernel = constrain(kernel, ("vocab", "fsdp") if tied else ("fsdp", "vocab"))

        @jax.jit
        def logits_and_gradients(x, kernel):
            logits, vjp = jax.vjp(lambda *args: head_logits(*args, axes=AXES, tied=tied), x, kernel)
            return logits, vjp(logits)

        ours, gradients = logits_and_gradients(x, kernel)
    assert_close(ours, wanted, TOLERANCE)
    for mine, theirs in zip(gradients, wanted_vjp(wanted), strict=True):
        assert_close(mine, theirs, TOLERANCE)


@pytest.mark.parametrize("tied", [False, True])
def test_products_of_hessians_are_those_of_the_formula(tied):
    x, kernel = jax.random.normal(jax.random.key(0), (1, 4, 16)), jax.random.normal(jax.random.key(1), (16, 16))
    direction = (jnp.ones_like(x), jnp.ones_like(kernel))

    def product(logits):
        gradient = jax.grad(lambda x, kernel: jnp.sum(jnp.sin(logits(x, kernel))), argnums=(0, 1))
        return jax.jvp(gradient, (x, kernel), direction)[1]

    ours = product(lambda x, kernel: head_logits(x, kernel, axes=AXES, tied=tied))
    wanted = product(lambda x, kernel: plain(x, kernel, tied))
    # Sums of 64 products of sums of 16, each rounded.
    for mine, theirs in zip(ours, wanted, strict=True):
        assert_close(mine, theirs, 1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_remat_by_the_name_of_gemms_saves_the_logits(tied):
    x, kernel = jnp.ones((1, 4, 16)), jnp.ones((16, 16))

    def loss(x, kernel):
        return jnp.sum(jnp.sin(head_logits(x, kernel, axes=AXES, tied=tied)))

    def products(policy):
        program = jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1)))(x, kernel)
        return str(program).count("dot_general")

    policies = jax.checkpoint_policies
    assert (products(policies.save_only_these_names("gemm")), products(policies.nothing_saveable)) == (3, 4)
