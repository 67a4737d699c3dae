"""``tp_only_amax_red``: every part of the batch has its own scales, spanning the tensor and context ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jax_te.config import ParallelConfig
from jax_te.layers import Linear, prepare_quantization
from jax_te.ops import LinearOptions, dense
from jax_te.quantize import init_gemm_state
from jax_te.recipe import DelayedScaling, autocast
from jax_te.sharding import make_mesh
from jax_te.training import create_train_state, make_train_step
from tests.support.meshes import use_mesh
from tests.support.numerics import assert_bitwise, draw, relative_l2, with_vjp

RECIPE = DelayedScaling(amax_history_len=3, tp_only_amax_red=True)
WHOLE = DelayedScaling(amax_history_len=3)
PARTS = 4
"""data=2 times fsdp=2."""


def operands():
    x = draw("x", (8, 16, 32)) * jnp.exp2(jnp.arange(8.0))[:, None, None]  # later examples are larger
    return x, draw("w", (32, 48)), draw("g", (8, 16, 48)) * jnp.exp2(-jnp.arange(8.0))[:, None, None]


def run(x, w, g, recipe, state):
    def call(x, w, state):
        return dense(x, w, recipe=recipe, state=state, options=LinearOptions(out_axes=("batch", "sequence", "ffn")))

    y, gradients = jax.jit(with_vjp, static_argnums=0)(call, (x, w, state), g)
    return y, *gradients


@pytest.mark.costly
def test_an_amax_spans_context_and_tensor_ranks():
    """As in Megatron, whose group for it is tensor and context ranks: one scale for each part of the batch."""
    x, w, g = operands()
    x = x * jnp.exp2(jnp.arange(16.0))[None, :, None]  # later positions are larger
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, context=2, tensor=2))):
        state = init_gemm_state(RECIPE)
        after = run(x, w, g, RECIPE, state)[-1]
    for role, array in {"x": x, "grad": g}.items():
        parts = np.abs(np.asarray(array)).reshape(2, -1).max(axis=1)
        assert_bitwise(np.asarray(after[role]["amax_history"][:, 0]), parts, what=role)


@pytest.mark.costly
@pytest.mark.wide("explicit")
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_dense_equals_each_part_alone(mode):
    """Against one call for each part of the batch, under ordinary delayed scaling with that part's state."""
    x, w, g = operands()
    with use_mesh(mode):
        state = init_gemm_state(RECIPE)
        assert state["x"]["amax_history"].shape == (PARTS, 3)
        assert state["kernel"]["amax_history"].shape == (3,)
        for _ in range(2):  # the second time with scales that the first one saw
            out, dx, dw, after = run(*(jnp.asarray(np.asarray(a)) for a in (x, w)), jnp.asarray(g), RECIPE, state)
            before, state = state, after
    alone, total = [], 0.0
    for part in range(PARTS):
        rows = slice(2 * part, 2 * part + 2)
        own = {
            role: jax.tree.map(lambda leaf: leaf if role == "kernel" else leaf[part], before[role])  # noqa: B023
            for role in before
        }
        own = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), own)
        y_part, dx_part, dw_part, own_after = run(x[rows], w, g[rows], WHOLE, own)
        alone.append((y_part, dx_part, own_after))
        total = total + dw_part
    assert_bitwise(np.asarray(out), np.concatenate([np.asarray(y) for y, _, _ in alone]))
    assert relative_l2(np.asarray(dx), np.concatenate([np.asarray(dx) for _, dx, _ in alone])) < 1e-6  # fp32 sums
    assert relative_l2(np.asarray(dw), np.asarray(total)) < 1e-6
    for role in ("x", "grad"):
        for name in ("scale", "amax_history"):
            assert_bitwise(
                np.asarray(after[role][name]), np.stack([np.asarray(state[role][name]) for _, _, state in alone])
            )
    assert len(np.unique(np.asarray(after["x"]["scale"]))) == PARTS


@pytest.mark.costly
def test_training_and_meshes_that_split_the_batch_otherwise():
    tx = optax.adam(1e-2)

    def loss(model, batch, key):
        return jnp.mean(jnp.square(model(batch)))

    batch = np.asarray(draw("batch", (16, 8, 32)))
    with use_mesh("auto"), autocast(RECIPE):
        state = create_train_state(
            lambda rngs: Linear(32, 32, parallel_mode="column", rngs=rngs), tx, key=jax.random.key(0)
        )
        step = make_train_step(loss, tx, microbatches=2)
        losses = []
        for _ in range(4):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        model = state.model
    assert losses == sorted(losses, reverse=True)
    assert model.quantizers["x"]["scale"].shape == (PARTS,)
    with autocast(RECIPE), pytest.raises(ValueError, match="does not divide into the 4 parts of the batch"):
        model(jnp.ones((6, 8, 32)))
    prepare_quantization(model, RECIPE)  # no mesh: one part
    assert model.quantizers["x"]["scale"].shape == ()
