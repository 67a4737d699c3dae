"""Linear layers under the recipes with a scale for each block, and mixed ones: against NumPy's quantization and fp64
products.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_te.ops import NormSpec
from jax_te.quantize import BlockQuantizer, MXQuantizer, TensorQuantizer, quantize, quantizer_for
from jax_te.recipe import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from jax_te.sharding import named_sharding
from tests.support import formulas, oracles
from tests.support.calls import dense, layernorm_dense, layernorm_mlp
from tests.support.cases import make_case
from tests.support.meshes import use_mesh
from tests.support.numerics import (
    TOLERANCE,
    assert_close,
    assert_same_rounding,
    draw,
    quick_jit,
    relative_l2,
    value_and_vjp,
    with_vjp,
)
from tests.support.oracles import E4M3, E5M2

TOKENS, K, N = (2, 80), 160, (3, 64)  # no multiples of 128: partial blocks on every side
block, mx, nvfp4, tensor = formulas.block_formula, formulas.mx_formula, formulas.nvfp4_formula, formulas.tensor_formula


def block_and_mx(role):
    return {"x": BlockQuantizer(dtype=jnp.float8_e4m3fn), "kernel": MXQuantizer(dtype=jnp.float8_e4m3fn)}.get(role)


def tensor_and_block(role):
    return {"x": TensorQuantizer(dtype=jnp.float8_e4m3fn), "grad": BlockQuantizer(dtype=jnp.float8_e5m2)}.get(role)


RECIPES = {
    "current, powers of two": (
        Float8CurrentScaling(use_power_2_scales=True),
        (tensor(E4M3, power_of_two=True), tensor(E4M3, power_of_two=True), tensor(E5M2, power_of_two=True)),
    ),
    "block": (Float8BlockScaling(), (block(E4M3), block(E4M3, two_dimensional=True), block(E4M3))),
    "block, fp32 scales, hybrid": (
        Float8BlockScaling(use_f32_scales=True, fp8_format=Format.HYBRID),
        (
            block(E4M3, power_of_two=False),
            block(E4M3, two_dimensional=True, power_of_two=False),
            block(E5M2, power_of_two=False),
        ),
    ),
    "mxfp8": (MXFP8BlockScaling(), (mx(E4M3), mx(E4M3), mx(E4M3))),
    "mxfp8, hybrid": (MXFP8BlockScaling(fp8_format=Format.HYBRID), (mx(E4M3), mx(E4M3), mx(E5M2))),
    "nvfp4 to nearest": (
        NVFP4BlockScaling(disable_stochastic_rounding=True),
        (nvfp4(hadamard=True), nvfp4(two_dimensional=True), nvfp4(hadamard=True)),
    ),
    "nvfp4 bare": (
        NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True, disable_2d_quantization=True),
        (nvfp4(), nvfp4(), nvfp4()),
    ),
    "custom: block x, MX kernel": (CustomRecipe(qfactory=block_and_mx), (block(E4M3), mx(E4M3), None)),
    "custom: tensor x, block grad": (CustomRecipe(qfactory=tensor_and_block), (tensor(E4M3), None, block(E5M2))),
}


def inputs(dtype):
    x, g = draw("x", (*TOKENS, K), dtype), draw("g", (*TOKENS, *N), dtype, scale=0.1)
    # Rows and columns of several sizes, so that blocks differ in their scales.
    x = (
        x
        * jnp.exp2((jnp.arange(K) // 32 - 2).astype(dtype))
        * jnp.exp2((jnp.arange(80) // 16 - 2).astype(dtype))[:, None]
    )
    return x, draw("kernel", (K, *N), scale=0.2), draw("bias", N), g


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.costly(
    "mxfp8-bfloat16",
    slow=(
        "nvfp4 bare-float32",
        "block-bfloat16",
        "mxfp8, hybrid-float32",
        "block, fp32 scales, hybrid-float32",
        "current, powers of two-float32",
        "nvfp4 to nearest-float32",
    ),
)
@pytest.mark.wide(
    "current, powers of two-float32",
    "block, fp32 scales, hybrid-float32",
    "mxfp8, hybrid-float32",
    "nvfp4 to nearest-float32",
    "nvfp4 bare-float32",
    "custom: block x, MX kernel-float32",
    "block-bfloat16",
    "mxfp8-bfloat16",
)
@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [(name, "float32") for name in RECIPES] + [(name, "bfloat16") for name in ("block", "mxfp8", "nvfp4 to nearest")],
)
def test_dense_multiplies_what_numpy_quantized(recipe, dtype):
    chosen, by_role = RECIPES[recipe]
    x, kernel, bias, g = inputs(dtype)
    y, (dx, dkernel, dbias) = value_and_vjp(
        lambda *a: dense(*a, recipe=chosen, backend="xla"), (x, kernel, bias), g, quick=True
    )
    expected = oracles.dense_layer(formulas.FormulaScales(*by_role), x, kernel, bias.astype(dtype), g)
    assert [a.dtype for a in (y, dx, dkernel, dbias)] == [x.dtype, x.dtype, jnp.float32, jnp.float32]
    assert_close(y, expected["y"], TOLERANCE[dtype], what="y")
    assert_close(dx, expected["x"], TOLERANCE[dtype], what="dx")
    # Rotated operands are sums of fp32, which come out in another order here: a few turn their rounding.
    check = assert_same_rounding if recipe == "nvfp4 to nearest" else assert_close
    check(dkernel, expected["kernel"], TOLERANCE["float32"], what="dkernel")
    assert_close(dbias, expected["bias"], TOLERANCE["float32"], what="dbias")
    plain = oracles.dense_layer(oracles.Unquantized(), x, kernel, bias, g)
    for actual, key in ((y, "y"), (dx, "x"), (dkernel, "kernel")):
        assert relative_l2(actual, plain[key]) > 0.01, f"{key}: quantization matters"


@pytest.mark.slow
def test_dense_under_nvfp4_with_stochastic_rounding():
    """The gradient is what `quantize` makes of it (tested by itself); all else is NumPy's."""
    dtype, recipe = "bfloat16", NVFP4BlockScaling()
    x, kernel, bias, g = inputs(dtype)
    quantizer = quantizer_for(recipe, "grad")
    rounded = [
        jax.jit(lambda g, c=c: quantize(g, quantizer, axis=2, columnwise=c)[0].values())(g) for c in (False, True)
    ]

    class Given(formulas.FormulaScales):
        def forms(self, role, x, axis):
            return tuple(oracles.wide(*rounded)) if role == "grad" else super().forms(role, x, axis)

    oracle = Given(nvfp4(hadamard=True), nvfp4(two_dimensional=True), None)
    y, (dx, dkernel, _) = value_and_vjp(
        lambda *a: dense(*a, recipe=recipe, backend="xla"), (x, kernel, bias), g, quick=True
    )
    expected = oracles.dense_layer(oracle, x, kernel, bias.astype(dtype), g)
    assert_close(y, expected["y"], TOLERANCE[dtype], what="y")
    assert_close(dx, expected["x"], TOLERANCE[dtype], what="dx")
    assert_same_rounding(dkernel, expected["kernel"], TOLERANCE["float32"], what="dkernel")


FUSED = ["block", "mxfp8", "nvfp4 bare"]


@pytest.mark.costly
@pytest.mark.wide("block")
@pytest.mark.parametrize("recipe", FUSED)
def test_layernorm_dense(recipe):
    chosen, by_role = RECIPES[recipe]
    args = (
        draw("x", (2, 80, K), shift=0.3),
        draw("scale", (K,), scale=0.3, shift=1.0),
        draw("ln_bias", (K,), scale=0.3),
    )
    args, g = (*args, draw("kernel", (K, *N), scale=0.2), draw("bias", N)), draw("g", (*TOKENS, *N), scale=0.1)
    y, gradients = value_and_vjp(lambda *a: layernorm_dense(*a, recipe=chosen, backend="xla"), args, g, quick=True)
    expected = oracles.norm_dense_layer(formulas.FormulaScales(*by_role), *args, g)
    for name, actual in zip(("y", "x", "scale", "ln_bias", "kernel", "bias"), (y, *gradients), strict=True):
        assert_same_rounding(actual, expected[name], 1e-3 if actual.ndim == 1 else 4 * TOLERANCE["float32"], what=name)


@pytest.mark.costly
@pytest.mark.wide("nvfp4 bare")
@pytest.mark.parametrize("recipe", FUSED)
def test_layernorm_mlp(recipe):
    chosen, by_role = RECIPES[recipe]
    norm = NormSpec(kind="rmsnorm")
    x, g = draw("x", (2, 48, K), shift=0.3), draw("g", (2, 48, K), scale=0.1)
    wi, wo = draw("wi", (K, 2, 96), scale=0.1), draw("wo", (96, K), scale=0.2)
    args = (x, draw("scale", (K,), scale=0.3, shift=1.0), None, wi, None, wo, draw("wo_bias", (K,)))

    def run(*a):
        return layernorm_mlp(*a, norm=norm, activation="swiglu", recipe=chosen, backend="xla")

    y, gradients = value_and_vjp(run, args, g, quick=True)
    q = tuple(formulas.FormulaScales(*by_role) for _ in range(2))
    expected = oracles.norm_mlp_layer(q, *args, g, name="swiglu", kind="rmsnorm")
    names = ("y", "x", "scale", "ln_bias", "wi", "wi_bias", "wo", "wo_bias")
    for name, actual in zip(names, (y, *gradients), strict=True):
        if actual is not None:
            tolerance = 2e-3 if actual.ndim == 1 else 4 * TOLERANCE["float32"]
            assert_same_rounding(actual, expected[name], tolerance, what=name)


# ---------------------------------------------------------------- meshes


@functools.cache
def on_one_device(name, recipe):
    case = make_case(name)
    return quick_jit(lambda *a: with_vjp(lambda a: case.run(a, recipe=RECIPES[recipe][0]), *a))((case.args,), case.g)


@pytest.mark.costly(
    "layernorm_mlp swiglu-block-auto",
    slow=["layernorm_mlp swiglu-block-explicit", "dense-block-explicit", "dense-block-auto"],
)
@pytest.mark.parametrize(
    ("name", "recipe", "mode"),
    [(name, "block", mode) for name in ("dense", "layernorm_mlp swiglu") for mode in ("auto", "explicit")]
    + [("dense row", "nvfp4 to nearest", "explicit")],
)
def test_meshes(name, recipe, mode):
    case = make_case(name)
    with use_mesh(mode):
        mesh = jax.sharding.get_mesh()

        def place(a, axes):
            return None if a is None else jax.device_put(a, named_sharding(axes, mesh))

        args = {key: place(a, case.axes.get(key)) for key, a in case.args.items()}
        run = quick_jit(lambda *a: with_vjp(lambda a: case.run(a, recipe=RECIPES[recipe][0]), *a))
        y, (gradients,) = run((args,), place(case.g, case.out_axes))
    expected_y, (expected,) = on_one_device(name, recipe)
    check = assert_close if name == "dense" else assert_same_rounding
    check(y, expected_y, 4 * TOLERANCE["float32"], what="y")
    for key, gradient in expected.items():
        if gradient is not None:
            vector = gradient.ndim == 1 and check is assert_same_rounding
            check(gradients[key], gradient, 2e-3 if vector else 4 * TOLERANCE["float32"], what=f"d{key}")
            if key.endswith("kernel"):
                assert gradients[key].sharding.is_equivalent_to(named_sharding(case.axes[key], mesh), gradient.ndim)


@pytest.mark.slow
def test_stochastic_rounding_of_a_layer_is_the_same_on_a_mesh():
    x, kernel, _, g = inputs("bfloat16")
    run = quick_jit(lambda *a: with_vjp(lambda x: dense(x, kernel, recipe=NVFP4BlockScaling(), backend="xla"), *a))
    _, (alone,) = run((x,), g)
    with use_mesh("auto"):
        sharding = NamedSharding(jax.sharding.get_mesh(), P("data", ("fsdp", "tensor")))
        _, (sharded,) = run((jax.device_put(x, sharding),), jax.device_put(g, sharding))
    assert_close(sharded, alone, TOLERANCE["bfloat16"])
    run = quick_jit(lambda *a: with_vjp(lambda x: dense(x, kernel, recipe=RECIPES["nvfp4 to nearest"][0]), *a))
    assert relative_l2(run((x,), g)[1][0], alone) > 0.05


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("recipe", "x_shape", "kernel_shape", "message"),
    [
        (Float8BlockScaling(), (16, 40), (40, 32), "recipe 'block': input size 40 must be a multiple of 16"),
        (
            MXFP8BlockScaling(),
            (32, 48),
            (48, 32),
            r"'mxfp8': input size 48 must be a multiple of 32 \(the next is 64\)",
        ),
        (NVFP4BlockScaling(), (32, 32), (32, 3, 16), r"'nvfp4': output size 48 must be a multiple of 32"),
        (
            CustomRecipe(qfactory=block_and_mx),
            (32, 48),
            (48, 32),
            "recipe 'custom': input size 48 must be a multiple of 32",
        ),
    ],
)
def test_sizes_that_do_not_align(recipe, x_shape, kernel_shape, message):
    with pytest.raises(ValueError, match=message):
        dense(jnp.ones(x_shape), jnp.ones(kernel_shape), recipe=recipe)
