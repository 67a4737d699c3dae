"""Random arrays, comparisons and small JAX helpers shared by the tests."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jaxtyping import config as jaxtyping_config

from tests.support.states import merging

NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
"""For a `TransformerLayer`, whose calls in training need a key otherwise."""

TOLERANCE = {"float32": 2.0**-20, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""For `assert_close` of one GEMM or row reduction in a dtype: fp32 sums of some tens of terms err by a few units of
2^-24; bf16 and fp16 results are such sums rounded once or twice, each time by at most 2^-9 or 2^-12."""


def draw(
    name: str, shape: tuple[int, ...], dtype: Any = jnp.float32, *, scale: float = 1.0, shift: float = 0.0
) -> jax.Array:
    """Normal values that depend on the name and shape alone."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), *shape])
    return jnp.asarray((rng.normal(size=shape) * scale + shift).astype(np.float32)).astype(dtype)


def wide(x: Any) -> np.ndarray:
    """As fp64 NumPy, from any float dtype."""
    return np.asarray(x).astype(np.float64)


def relative_l2(actual: Any, expected: Any) -> float:
    """``|actual - expected| / |expected|``; infinite, not nan, which `max` may not see."""
    actual, expected = wide(actual), wide(expected)
    distance = float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-300))
    return distance if np.isfinite(distance) else np.inf


def assert_close(actual: Any, expected: Any, tolerance: float, *, what: str = "") -> None:
    """Equal shapes, relative L2 distance within ``tolerance``, every element within 8 times that.

    An element's error is measured against its size plus the array's root mean square: the absolute error of a sum
    does not shrink where the sum happens to cancel.
    """
    actual, expected = wide(actual), wide(expected)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} instead of {expected.shape}"
    assert np.isfinite(actual).all(), f"{what}: not finite"
    distance = relative_l2(actual, expected)
    assert distance <= tolerance, f"{what}: relative L2 distance {distance:.3g} > {tolerance:.3g}"
    size = np.abs(expected) + np.sqrt(np.mean(expected**2))
    worst = float(np.max(np.abs(actual - expected) / np.maximum(size, 1e-300)))
    assert worst <= 8 * tolerance, f"{what}: worst element {worst:.3g} > {8 * tolerance:.3g}"


def assert_same_rounding(actual: Any, expected: Any, tolerance: float, *, what: str = "") -> None:
    """For results that went through FP8 twice: 9 of 10 elements within ``tolerance``, the whole within 2 %.

    Where a value before quantization differs in fp32's last bit from the fp64 oracle's, it may fall on the other side
    of an FP8 rounding boundary (about one in a million does), which changes one row or column of the next product by
    a few percent. Wrong numerics change them all: leaving quantization out moves every element, by about 3 % (E4M3)
    or more.
    """
    actual, expected = wide(actual), wide(expected)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} instead of {expected.shape}"
    size = np.abs(expected) + np.sqrt(np.mean(expected**2))
    near = np.abs(actual - expected) <= tolerance * size
    assert near.mean() >= 0.9, f"{what}: only {near.mean():.1%} of the elements within {tolerance:.3g}"
    assert relative_l2(actual, expected) <= 0.02, f"{what}: relative L2 distance {relative_l2(actual, expected):.3g}"


def assert_bitwise(actual: Any, expected: Any, *, what: str = "") -> None:
    """The same dtype and the same bits; any nan equals any nan."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} instead of {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} instead of {expected.shape}"
    nan = np.isnan(actual.astype(np.float64))
    assert (nan == np.isnan(expected.astype(np.float64))).all(), f"{what}: nan in other places"
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[actual.dtype.itemsize]
    a, e = (np.atleast_1d(array).view(unsigned) for array in (actual, expected))
    bad = (a != e) & ~np.atleast_1d(nan)
    assert not bad.any(), (
        f"{what}: {bad.sum()} of {bad.size} differ, first {np.atleast_1d(actual)[bad][0]} "
        f"instead of {np.atleast_1d(expected)[bad][0]}"
    )


_QUICK = {
    "cpu": {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False},
    "gpu": {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
}


@functools.cache
def quick_options() -> dict[str, Any]:
    options = dict(_QUICK.get(jax.default_backend(), {}))
    while options:  # another XLA may lack one of them
        try:
            jax.jit(lambda x: x, compiler_options=options)(jnp.zeros(()))
        except jax.errors.JaxRuntimeError:
            options.popitem()
        else:
            break
    return options


def quick_jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.jit`` that compiles several times faster, to slower code: for tests about structure more than numbers."""
    return jax.jit(fn, compiler_options=quick_options() or None)


def optimized_jit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``jax.jit`` that compiles as for users, whatever tests/conftest.py has set."""
    return jax.jit(
        fn, compiler_options={"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    )


def with_vjp(fn: Callable[..., Any], args: tuple[Any, ...], g: Any) -> tuple[Any, tuple[Any, ...]]:
    """``fn(*args)`` and the gradients of all its arguments for the output gradient ``g``."""
    y, vjp = jax.vjp(lambda *args: fn(*merging(args)), *args)
    return y, vjp(g)


def value_and_vjp(
    fn: Callable[..., Any], args: tuple[Any, ...], g: Any, *, jit: bool = True, quick: bool = False
) -> tuple[Any, tuple[Any, ...]]:
    """`with_vjp`, jitted."""
    run = functools.partial(with_vjp, fn)
    return (quick_jit(run) if quick else jax.jit(run) if jit else run)(args, g)


def compiled_text(fn: Callable[..., Any], *args: Any) -> str:
    """Optimized HLO of ``fn``."""
    return jax.jit(fn).lower(*args).compile().as_text()


def equations(jaxpr: Any) -> Iterator[Any]:
    """Of a jaxpr and of all that it calls, once for each call."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(dict(equation.params), is_leaf=lambda v: isinstance(v, Jaxpr | ClosedJaxpr)):
            if isinstance(value, Jaxpr | ClosedJaxpr):
                yield from equations(getattr(value, "jaxpr", value))


@contextlib.contextmanager
def without_type_checker() -> Iterator[None]:
    """As a user runs the package: the tests' runtime type checker would catch a wrong type before the package's own
    message does.
    """
    before = jaxtyping_config.jaxtyping_disable
    jaxtyping_config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping_config.update("jaxtyping_disable", before)
