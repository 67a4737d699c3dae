"""Recipes on the GPU: block scaling through the Pallas kernels, per-GEMM precision, kernels kept and held in FP8.

Tolerances, as relative L2 distances: block-scaled `dense` multiplies the same FP8 operands on both sides; the tensor
cores keep about 14 bits of each sum of 128 (2^-14 of a partial sum for each), and the result is rounded to bf16 once
(2^-9/√3 in the mean). Behind a norm or an activation the operands differ where bf16 roundings did, by one FP8 step here
and there: 0.09, as in test_ops.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_te.ops.pallas.operand as hopper
from jax_te.config import TransformerConfig
from jax_te.models import GPTModel
from jax_te.ops import dense, quantize_kernel, use_backend
from jax_te.quantize import BlockQuantizer, TensorQuantizer, init_gemm_state
from jax_te.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MMParams,
    autocast,
    recipe_from_name,
)
from jax_te.training import create_train_state, make_train_step
from tests.support.cases import make_case
from tests.support.numerics import draw, quick_jit, relative_l2, with_vjp
from tests.support.states import merging

pytestmark = pytest.mark.gpu

SIZES = {"b": 2, "s": 80, "h": 208, "f": 272, "n": 2, "groups": 1, "d": 64}
"""Multiples of 16, not of 128."""


def results(case, recipe, backend):
    def run(args, states):
        return case.run(args, states, recipe=recipe, backend=backend)

    return quick_jit(lambda *a: with_vjp(run, *a))((case.args, case.states(recipe)), case.g)


BLOCK_CALLS = [("dense", "xla", "float32"), ("layernorm_mlp gelu", "xla", "bfloat16")]
BLOCK_CALLS += [
    (name, "te", "bfloat16") for name in ("dense", "layernorm_dense", "layernorm_mlp gelu", "layernorm_mlp swiglu")
]


@pytest.mark.parametrize(("name", "backend", "dtype"), BLOCK_CALLS)
def test_block_scaling_by_kernels_against_plain_jax(monkeypatch, name, backend, dtype):
    case = make_case(name, **SIZES).astype(dtype)
    assert hopper.runs_here(BlockQuantizer(dtype=jnp.float8_e4m3fn))
    y, (gradients, _) = results(case, Float8BlockScaling(), backend)
    monkeypatch.setattr(hopper, "runs_here", lambda quantizer: False)
    expected_y, (expected, _) = results(case, Float8BlockScaling(), "xla")
    distances = {"y": relative_l2(y, expected_y)}
    for key, gradient in expected.items():
        if gradient is not None:
            assert gradients[key].dtype == gradient.dtype
            distances[key] = relative_l2(gradients[key], gradient)
    assert max(distances.values()) < (0.01 if name == "dense" else 0.09), distances


def gemm_call(recipe, *, backend, kernel=None, state=None):
    x, g = draw("x", (64, 96), jnp.bfloat16), draw("g", (64, 128), jnp.bfloat16)
    w = draw("w", (96, 128), jnp.bfloat16)

    def call(x, w, state):
        used, gradient = (w, None) if kernel is None else (kernel(w, state), w)
        return dense(x, used, recipe=recipe, state=state, backend=backend, grad_sink=gradient)

    y, vjp = jax.vjp(jax.jit(lambda *args: call(*merging(args))), x, w, state)
    return y, vjp(g)


def same_gemm(one, other, *, backend):
    """Whether both are sums of the same products: bitwise through TE, whose kernel follows from the shapes.

    XLA measures in each program which kernel is faster, so two programs may add up in different orders. The sums are of
    fp32 and are rounded to bf16 once: 2^-9. Another quantization of an operand moves them by 2^-6 and more.
    """
    return np.array_equal(one, other) if backend == "te" else relative_l2(one, other) < 2**-9


@pytest.mark.parametrize("backend", ["te", "xla"])
@pytest.mark.parametrize("recipe_type", [Float8CurrentScaling, DelayedScaling, Float8BlockScaling])
def test_overridden_gemms_are_those_of_high_precision(backend, recipe_type):
    high, (high_dx, high_dw, _) = gemm_call(None, backend=backend)
    for flags in ((True, False, False), (False, True, False), (False, False, True)):
        recipe = recipe_type(override_linear_precision=flags)
        y, (dx, dw, _) = gemm_call(recipe, backend=backend, state=init_gemm_state(recipe))
        for mine, plain, overridden in zip((y, dx, dw), (high, high_dx, high_dw), flags, strict=True):
            assert same_gemm(mine, plain, backend=backend) is overridden


@pytest.mark.parametrize("backend", ["te", "xla"])
def test_precise_accumulation_reaches_the_gemm(backend):
    """Sums over 16384 products: the fast accumulator loses bits that the precise one keeps."""
    x, w = draw("long", (128, 16384), jnp.bfloat16), draw("long w", (16384, 128), jnp.bfloat16)

    def error(params):
        recipe = Float8CurrentScaling(fp8_gemm_fprop=params)
        y = jax.jit(lambda x, w: dense(x.astype(jnp.float32), w, recipe=recipe, backend=backend))(x, w)
        with jax.default_device(jax.devices("cpu")[0]):
            cpu = [jax.device_put(a, jax.devices("cpu")[0]) for a in (x, w)]
            wanted = dense(cpu[0].astype(jnp.float32), cpu[1], recipe=recipe, backend="xla")
        return relative_l2(np.asarray(y), np.asarray(wanted))

    fast, precise = error(MMParams(use_split_accumulator=False)), error(MMParams(use_split_accumulator=True))
    assert precise < 5e-4  # sums of 128 still have about 14 bits
    assert fast > 1.3 * precise  # 1.6 (XLA) and more (TE) were seen


@pytest.mark.parametrize("backend", ["te", "xla"])
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
@pytest.mark.parametrize("portable", [False, True])
def test_kernel_quantized_ahead_gives_the_same(name, backend, portable):
    recipe = recipe_from_name(name)
    state = init_gemm_state(recipe)

    def ahead(w, state):
        return quantize_kernel(w, recipe=recipe, state=state, portable=portable, backend=backend)

    plain = gemm_call(recipe, backend=backend, state=state)
    kept = gemm_call(recipe, backend=backend, state=state, kernel=ahead)
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(kept), strict=True):
        assert same_gemm(one, other, backend=backend)


def mixed(role):
    return {"x": BlockQuantizer(dtype=jnp.float8_e4m3fn), "kernel": TensorQuantizer(dtype=jnp.float8_e4m3fn)}.get(role)


def test_custom_recipe_that_mixes_block_and_tensor_scaling():
    y, (dx, dw, _) = gemm_call(CustomRecipe(qfactory=mixed), backend="xla")
    high, (high_dx, high_dw, _) = gemm_call(None, backend="xla")
    for mine, plain in ((y, high), (dx, high_dx), (dw, high_dw)):
        assert 0.0 < relative_l2(mine, plain) < 0.06  # two E4M3 operands: 2^-4/√3 each


@pytest.mark.parametrize("name", ["none", "delayed", "current", "block"])
def test_training_with_microbatches_and_fp8_parameters(name):
    config = TransformerConfig(num_layers=2, hidden_size=128, num_attention_heads=2, params_dtype=jnp.bfloat16)
    tokens = jax.random.randint(jax.random.key(1), (8, 129), 0, 256)
    tx = optax.adam(1e-3)

    def loss(model, batch, key):
        return model.loss(batch[:, :-1], batch[:, 1:])

    def losses(microbatches, fp8_param):
        state = create_train_state(
            lambda rngs: GPTModel(config, vocab_size=256, max_sequence_length=128, rngs=rngs),
            tx,
            key=jax.random.key(0),
            fp8_param=fp8_param,
        )
        step = make_train_step(loss, tx, microbatches=microbatches)
        seen = []
        for _ in range(6):
            state, metrics = step(state, tokens)
            seen.append(float(metrics["loss"]))
        return np.asarray(seen)

    with autocast(recipe_from_name(name)), use_backend("te"):
        one, four = losses(1, False), losses(4, False)
        assert one[-1] < one[0] - 0.3
        np.testing.assert_allclose(one, four, atol=0.02)  # bf16 sums in another order, 6 Adam steps
        if name != "none":
            np.testing.assert_allclose(losses(4, True), four, atol=0.02)
