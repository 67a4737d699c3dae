"""Kernels that were quantized ahead of the calls that use them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.errors import QuantizerStateError
from jax_te.ops import quantize_kernel
from jax_te.quantize import BlockQuantizer, OpaqueTree, QuantizedOperand, frozen_scales
from jax_te.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from jax_te.sharding import named_sharding
from tests.support.calls import dense, layernorm_dense, layernorm_mlp
from tests.support.cases import make_case
from tests.support.meshes import use_mesh
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_close, quick_jit, with_vjp

WHOLE = Float8CurrentScaling(amax_scope="whole")
RECIPES = [
    DelayedScaling(amax_history_len=2),
    Float8CurrentScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(),
]
by_name = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


def without_kernels(role):
    return None if role == "kernel" else BlockQuantizer(dtype=jnp.float8_e4m3fn)


def inputs(name="dense"):
    case = make_case(name, s=32).astype(jnp.bfloat16)
    return case, case.args["x"], case.args.get("kernel")


@pytest.mark.costly("False-delayed", slow=("False-block", "True-mxfp8"))
@pytest.mark.wide("False-delayed", "False-block", "True-current", "True-mxfp8")
@by_name
@pytest.mark.parametrize("portable", [False, True])
def test_a_call_with_it_is_the_call_with_the_kernel(recipe, portable):
    case, x, kernel = inputs()
    gradient = jnp.zeros(kernel.shape, jnp.float32)

    def call(x, gradient, state, *, ahead):
        used = kernel
        if ahead:
            used = quantize_kernel(kernel, recipe=recipe, state=state, portable=portable, backend="xla")
            used = jax.lax.stop_gradient(used)
        return dense(x, used, recipe=recipe, state=state, grad_sink=gradient, backend="xla")

    args = (x, gradient, case.states(recipe)), case.g
    expected = quick_jit(lambda *a: with_vjp(lambda *b: call(*b, ahead=False), *a))(*args)
    actual = quick_jit(lambda *a: with_vjp(lambda *b: call(*b, ahead=True), *a))(*args)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for ours, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert_bitwise(ours, wanted)


@pytest.mark.wide("delayed")
@by_name
def test_it_crosses_jit_scan_and_remat(recipe):
    """Quantized once outside, used in each iteration."""
    case, x, kernel = inputs()
    state = case.states(recipe)
    quantized = jax.jit(lambda k: quantize_kernel(k, recipe=recipe, state=state, backend="xla"))(kernel)
    assert (quantized.shape, quantized.ndim, quantized.dtype) == (kernel.shape, 2, kernel.dtype)

    def call(x, kernel):
        return dense(x, kernel, recipe=recipe, state=state, backend="xla")

    def scanned(xs, kernel):
        return jax.lax.scan(lambda carry, x: (carry, jax.checkpoint(call)(x, kernel)), (), xs)[1]

    xs, gs = jnp.stack([x, 2 * x]), jnp.stack([case.g, case.g / 3])
    with frozen_scales():  # the states are not an argument here
        ys, (dxs,) = quick_jit(lambda q, xs, gs: with_vjp(lambda xs: scanned(xs, q), (xs,), gs))(quantized, xs, gs)
        alone = quick_jit(lambda x, g: with_vjp(lambda x: call(x, kernel), (x,), g))
        for i in range(2):
            y, (dx,) = alone(xs[i], gs[i])
            assert_bitwise(ys[i], y)
            assert_bitwise(dxs[i], dx)


@pytest.mark.wide("layernorm_mlp")
@pytest.mark.parametrize("op", ["layernorm_dense", "layernorm_mlp"])
def test_the_other_ops_take_it(op):
    recipe = Float8BlockScaling()
    case, *_ = inputs("layernorm_dense" if op == "layernorm_dense" else "layernorm_mlp gelu")
    names = ["kernel"] if op == "layernorm_dense" else ["wi_kernel", "wo_kernel"]
    args = dict(case.args)

    def call(args):
        if op == "layernorm_dense":
            values = (args[key] for key in ("x", "scale", "ln_bias", "kernel", "bias"))
            return layernorm_dense(*values, recipe=recipe, backend="xla")
        keys = ("x", "scale", "ln_bias", "wi_kernel", "wi_bias", "wo_kernel", "wo_bias")
        return layernorm_mlp(*(args[key] for key in keys), recipe=recipe, backend="xla")

    ahead = args | {key: quantize_kernel(args[key], recipe=recipe) for key in names}
    assert_bitwise(quick_jit(call)(ahead), quick_jit(call)(args))


def test_under_another_recipe_it_is_refused():
    _, x, kernel = inputs()
    quantized = quantize_kernel(kernel, recipe=Float8CurrentScaling())
    for other in (Float8BlockScaling(), MXFP8BlockScaling(), Float8CurrentScaling(use_power_2_scales=True)):
        with pytest.raises(
            ValueError, match=r"the kernel was quantized with TensorQuantizer.*needs .*Quantize it again"
        ):
            dense(x, quantized, recipe=other)


def test_without_a_recipe_its_values_are_used():
    case, x, kernel = inputs()
    quantized = quantize_kernel(kernel, recipe=Float8CurrentScaling(), portable=True)
    custom = CustomRecipe(qfactory=without_kernels)
    for recipe in (None, custom):
        y, (dx,) = with_vjp(lambda x, r=recipe: dense(x, quantized, recipe=r, backend="xla"), (x,), case.g)
        values = quantized.dequantize()
        expected_y, (expected_dx,) = with_vjp(
            lambda x, r=recipe, w=values: dense(x, w, recipe=r, backend="xla"), (x,), case.g
        )
        assert_bitwise(y, expected_y)
        assert_bitwise(dx, expected_dx)


def test_an_overridden_gemm_multiplies_its_values():
    case, x, kernel = inputs()
    quantized = quantize_kernel(kernel, recipe=Float8BlockScaling(), portable=True)
    recipe = Float8BlockScaling(override_linear_precision=(True, True, True))
    y, (dx,) = with_vjp(lambda x: dense(x, quantized, recipe=recipe, backend="xla"), (x,), case.g)
    expected_y, (expected_dx,) = with_vjp(lambda x: dense(x, quantized.dequantize(), backend="xla"), (x,), case.g)
    assert_close(y, expected_y, TOLERANCE["bfloat16"])
    assert_close(dx, expected_dx, TOLERANCE["bfloat16"])


@pytest.mark.costly("nvfp4", slow=("mxfp8",))
@pytest.mark.parametrize("recipe", [RECIPES[0], RECIPES[3], RECIPES[4]], ids=lambda recipe: recipe.name)
def test_it_has_no_gradient(recipe):
    case, x, kernel = inputs()
    state = case.states(recipe)
    quantized = quick_jit(lambda k: quantize_kernel(k, recipe=recipe, state=state))(kernel)

    def loss(quantized, gradient=None):
        return jnp.sum(dense(x, quantized, recipe=recipe, state=state, grad_sink=gradient).astype(jnp.float32))

    for call in (loss, jax.jit(loss), jax.checkpoint(loss)):
        with pytest.raises(TypeError, match="a quantized kernel has no gradient: its values are FP8 or FP4"):
            quick_jit(jax.grad(call))(quantized)
    # With a place for it, it goes there.
    place = jnp.zeros(kernel.shape, jnp.float32)
    with frozen_scales():
        assert float(jnp.abs(quick_jit(jax.grad(loss, argnums=1))(quantized, place)).sum()) > 0


def test_what_cannot_be_quantized():
    _, _, kernel = inputs()
    with pytest.raises(ValueError, match=r"keeps kernels in high precision; there is nothing to quantize"):
        quantize_kernel(kernel, recipe=CustomRecipe(qfactory=without_kernels))
    with pytest.raises(QuantizerStateError, match="prepare_quantization"):
        quantize_kernel(kernel, recipe=DelayedScaling())


def test_portable_or_in_the_backends_own_form():
    _, x, kernel = inputs()
    recipe = Float8CurrentScaling()
    portable, own = (quantize_kernel(kernel, recipe=recipe, portable=portable) for portable in (True, False))
    assert (portable.is_opaque, own.is_opaque) == (False, True)
    assert isinstance(portable.operand, QuantizedOperand)
    assert portable.dequantize().dtype == kernel.dtype
    with pytest.raises(TypeError, match="quantize it with portable=True to dequantize it"):
        dense(x, own)  # without a recipe


@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("recipe", [WHOLE, Float8BlockScaling()], ids=lambda recipe: recipe.name)
def test_on_a_mesh_it_is_split_like_the_kernel(recipe, mode):
    """With one scale every device holds its part; blocks are those of the whole kernel."""
    _, _, kernel = inputs()
    alone, axes = quantize_kernel(kernel, recipe=recipe), ("fsdp", "ffn")
    with use_mesh(mode):
        mesh = jax.sharding.get_mesh()
        wanted = named_sharding(axes, mesh)
        run = jax.jit(lambda k: quantize_kernel(k, recipe=recipe, kernel_axes=axes))
        quantized = run(jax.device_put(kernel, wanted))
    if isinstance(quantized.form, OpaqueTree) and quantized.form.per_device:
        data, expected = quantized.form.leaves[0], jax.tree.leaves(alone)[0]
        assert recipe == WHOLE
        for rank, (device, index) in enumerate(wanted.devices_indices_map(kernel.shape).items()):
            assert mesh.devices.flat[rank] == device
            assert_bitwise(np.asarray(data)[rank], expected[index])
            assert data.sharding.devices_indices_map(data.shape)[device][0] == slice(rank, rank + 1)
        assert_bitwise(quantized.amax, alone.amax)
        return
    for leaf, expected in zip(jax.tree.leaves(quantized), jax.tree.leaves(alone), strict=True):
        assert_bitwise(leaf, expected)
        assert leaf.shape != kernel.shape or leaf.sharding.is_equivalent_to(wanted, 2)


def test_a_kernel_that_each_device_quantized_needs_calls_that_run_so():
    _, x, kernel = inputs()
    recipe = Float8CurrentScaling()
    with use_mesh("auto"):
        quantized = jax.jit(lambda k: quantize_kernel(k, recipe=recipe, kernel_axes=("fsdp", "ffn")))(kernel)
        with pytest.raises(ValueError, match=r"each device of a mesh, .* does not name the logical axes"):
            dense(x, quantized, recipe=recipe, grad_sink=kernel)
