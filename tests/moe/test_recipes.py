"""Each recipe's numbers are its formula's for each expert by itself: bit for bit, products and next states.

Values lie within a binade, so that sums of products of quantized values are exact in fp32 in any order; and the largest
one of each expert gives a scale that is a power of two.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops import RowGroups, grouped_dense, row_bound
from jax_te.quantize import init_gemm_state
from jax_te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from tests.support import formulas, oracles
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_close, quick_jit, with_vjp
from tests.support.oracles import E4M3, E5M2, F32

SIZES, K, N = (37, 0, 1, 70), 64, 96
EXPERTS, ALIGNMENT = len(SIZES), 16
ROWS = row_bound(sum(SIZES), EXPERTS, alignment=ALIGNMENT)
BLOCK, MX, NVFP4, TENSOR = (
    formulas.block_formula,
    formulas.mx_formula,
    formulas.nvfp4_formula,
    formulas.tensor_formula,
)
ROLES = ("x", "kernel", "grad")
LARGEST = {"nvfp4": 5.25}
"""Of each expert; 7 elsewhere. ``448 / 7``, ``57344 / 7`` and NVFP4's ``2688 / 5.25`` are powers of two."""


def groups() -> RowGroups:
    return RowGroups(sizes=jnp.array(SIZES, jnp.int32), rows=ROWS, alignment=ALIGNMENT)


def values(name: str, lead: tuple[int, ...], largest: float) -> np.ndarray:
    """Of both signs, between 4 and ``largest``, which is among them."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), *lead])
    x = rng.uniform(4.0, largest, lead) * rng.choice([-1.0, 1.0], lead)
    if x.size:
        x.flat[rng.integers(x.size)] = largest
    return x.astype(F32)


def operands(largest: float = 7.0) -> tuple[list[np.ndarray], np.ndarray, list[np.ndarray]]:
    """Rows, kernel and output gradient of each expert, of a size of its own."""
    x = [values("x", (rows, K), largest) * F32(2.0**e) for e, rows in enumerate(SIZES)]
    kernels = np.stack([values(f"kernel {e}", (K, N), largest) * F32(2.0 ** (-2 * e)) for e in range(EXPERTS)])
    g = [values("grad", (rows, N), largest) * F32(2.0 ** (3 - e)) for e, rows in enumerate(SIZES)]
    return x, kernels, g


def laid_out(rows: list[np.ndarray]) -> jax.Array:
    """Rows of all experts where `groups` wants them, and nonsense in the padding."""
    out = np.full((ROWS, rows[0].shape[1]), 1e4, F32)
    for start, own in zip(groups().starts.tolist(), rows, strict=True):
        out[start : start + len(own)] = own
    return jnp.asarray(out)


def taken(y: jax.Array) -> list[np.ndarray]:
    starts = groups().starts.tolist()
    return [np.asarray(y)[start : start + rows] for start, rows in zip(starts, SIZES, strict=True)]


def run(recipe: Recipe, x: Any, kernels: Any, g: Any, state: Any = None) -> tuple[Any, tuple[Any, ...]]:
    """Output, and gradients of x, kernels and state."""

    def call(x: Any, kernels: Any, state: Any) -> jax.Array:
        return grouped_dense(x, kernels, groups=groups(), recipe=recipe, state=state, backend="xla")

    arrays = (laid_out(x), jnp.asarray(kernels), state)
    return quick_jit(lambda arrays, g: with_vjp(call, arrays, g))(arrays, laid_out(g))


def check(recipe: Recipe, scales: list[oracles.Scales], largest: float, *, state: Any = None, bits: bool = True) -> Any:
    """Compare with each expert's linear layer by NumPy, and return the next state."""
    x, kernels, g = operands(largest)
    y, (dx, dkernels, next_state) = run(recipe, x, kernels, g, state)
    for e, rows in enumerate(SIZES):
        if rows == 0:
            assert not np.asarray(dkernels[e]).any()
            continue
        more = 0 if bits else -rows % 16  # NVFP4's transform is of 16 rows, the last of them zeros
        whole = [np.pad(own, ((0, more), (0, 0))) for own in (x[e], g[e])]
        expected = oracles.dense_layer(scales[e], whole[0], kernels[e], None, whole[1])
        expected |= {name: expected[name][:rows] for name in ("y", "x")}
        found = {"y": taken(y)[e], "x": taken(dx)[e], "kernel": np.asarray(dkernels[e])}
        for name, value in found.items():
            if bits:
                assert_bitwise(value, expected[name].astype(F32), what=f"{name} of expert {e}")
            else:
                assert_close(value, expected[name], TOLERANCE["float32"], what=f"{name} of expert {e}")
    unused = np.ones(ROWS, bool)
    for start, rows in zip(groups().starts.tolist(), SIZES, strict=True):
        unused[start : start + rows] = False
    assert unused.any()
    assert not np.asarray(y)[unused].any()
    assert not np.asarray(dx)[unused].any()
    return next_state


RECIPES: dict[str, tuple[Recipe, tuple[Any, Any, Any], bool]] = {
    # recipe; formulas of x, kernel and grad; whether sums are exact
    "current": (Float8CurrentScaling(), (TENSOR(E4M3), TENSOR(E4M3), TENSOR(E5M2)), True),
    "current, e4m3": (Float8CurrentScaling(fp8_format=Format.E4M3), (TENSOR(E4M3),) * 3, True),
    "block": (Float8BlockScaling(), (BLOCK(E4M3), BLOCK(E4M3, two_dimensional=True), BLOCK(E4M3)), True),
    "mxfp8": (MXFP8BlockScaling(), (MX(E4M3),) * 3, True),
    "nvfp4": (
        NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True, disable_2d_quantization=True),
        (NVFP4(),) * 3,
        True,
    ),
    "nvfp4, transformed": (  # sums of 16 values of both signs: of all sizes
        NVFP4BlockScaling(disable_stochastic_rounding=True),
        (NVFP4(hadamard=True), NVFP4(two_dimensional=True), NVFP4(hadamard=True)),
        False,
    ),
}


@pytest.mark.costly("current, e4m3", slow=("mxfp8", "block", "nvfp4, transformed", "nvfp4"))
@pytest.mark.parametrize("name", RECIPES)
def test_products_are_those_of_each_experts_formula(name: str) -> None:
    recipe, by_role, bits = RECIPES[name]
    with jax.numpy_rank_promotion("allow"):
        scales = [formulas.FormulaScales(*by_role) for _ in SIZES]
        check(recipe, scales, LARGEST.get(name, 7.0), bits=bits)


def used_state(recipe: DelayedScaling) -> tuple[Any, list[dict[str, np.float32]]]:
    """A state with a past of its own for each expert, and the scales that follow from it."""
    state = init_gemm_state(recipe, groups=EXPERTS)
    scales: list[dict[str, np.float32]] = [{} for _ in SIZES]
    for r, role in enumerate(ROLES):
        dtype = E5M2 if role == "grad" and recipe.fp8_format is Format.HYBRID else E4M3
        past = np.zeros((EXPERTS, recipe.amax_history_len), F32)
        past[:, 0] = [7.0 * 2.0 ** (r - e) for e in range(EXPERTS)]  # smaller than some values, which saturate
        state[role] = {**state[role], "amax_history": jnp.asarray(past)}
        for e in range(EXPERTS):
            scales[e][role] = oracles.scale_from_amax(past[e, 0], dtype)
    return state, scales


@pytest.mark.costly("Format.E4M3")
@pytest.mark.parametrize("fmt", [Format.HYBRID, Format.E4M3])
def test_delayed_scaling_has_a_scale_for_each_expert(fmt: Format) -> None:
    recipe = DelayedScaling(fp8_format=fmt, amax_history_len=3)
    state, fixed = used_state(recipe)
    bwd = E5M2 if fmt is Format.HYBRID else E4M3
    new = check(recipe, [oracles.Scales(E4M3, bwd, fixed=own) for own in fixed], 7.0, state=state)
    x, kernels, g = operands()
    for role, tensors in zip(ROLES, (x, kernels, g), strict=True):
        for e, tensor in enumerate(tensors):
            newest = oracles.amax(tensor) if tensor.size else F32(0)
            assert_bitwise(new[role]["amax_history"][e, 0], newest, what=f"{role} of expert {e}")
            assert_bitwise(new[role]["scale"][e], fixed[e][role], what=f"{role} of expert {e}")


@pytest.mark.costly("most_recent")
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_histories_of_experts_are_transformer_engines(algorithm: str) -> None:
    """Over several steps, of which some leave an expert without rows."""
    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=algorithm)
    state = init_gemm_state(recipe, groups=EXPERTS)
    histories = [
        {role: oracles.TransformerEngineHistory(E5M2 if role == "grad" else E4M3, 3, algorithm) for role in ROLES}
        for _ in SIZES
    ]
    x, kernels, g = operands(6.1)

    @quick_jit
    def step(x: Any, kernels: Any, g: Any, sizes: Any, state: Any) -> Any:
        rows = RowGroups(sizes=sizes, rows=ROWS, alignment=ALIGNMENT)

        def call(state: Any) -> jax.Array:
            return grouped_dense(x, kernels, groups=rows, recipe=recipe, state=state, backend="xla")

        return with_vjp(call, (state,), g)[1][0]

    for number in range(5):
        present = [(e + number) % 3 > 0 for e in range(EXPERTS)]
        factor = F32(2.5 ** (number % 3))
        tensors = {"x": [own * factor for own in x], "kernel": kernels / factor, "grad": g}
        sizes = jnp.array([rows * here for rows, here in zip(SIZES, present, strict=True)], jnp.int32)
        starts = RowGroups(sizes=sizes, rows=ROWS, alignment=ALIGNMENT).starts.tolist()
        laid = []
        for rows in (tensors["x"], tensors["grad"]):
            array = np.zeros((ROWS, rows[0].shape[1]), F32)
            for start, own, here in zip(starts, rows, present, strict=True):
                array[start : start + len(own) * here] = own[: len(own) * here]
            laid.append(jnp.asarray(array))
        state = step(laid[0], jnp.asarray(tensors["kernel"]), laid[1], sizes, state)
        for e in range(EXPERTS):
            for role in ROLES:
                own = tensors[role][e]
                seen = own.size > 0 and (present[e] or role == "kernel")
                scale = histories[e][role].use(oracles.amax(own) if seen else F32(0))
                assert_bitwise(state[role]["scale"][e], scale, what=f"{role} of expert {e}, step {number}")
