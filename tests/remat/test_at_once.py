"""Gradients of recomputed functions, which are there before backward goes on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_te.ops import scan_layers
from jax_te.remat import remat

X = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)
KERNELS = [jnp.eye(8) * (0.5 + number) for number in range(2)]


def layer(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.sin(x @ kernel)


def unrolled(x: jax.Array, kernels: list[jax.Array]) -> jax.Array:
    for kernel in kernels:
        x = remat(layer, x, kernel)
    return x


def gradient(run: Any) -> Any:
    return jax.grad(lambda kernels: jnp.sum(run(X, kernels)))


def barriers(run: Any, *kernels: jax.Array) -> list[list[tuple[int, ...]]]:
    """Shapes of what each barrier of the gradient's program holds."""
    program = jax.make_jaxpr(gradient(run))(list(kernels)).jaxpr
    found = [eqn for eqn in program.eqns if eqn.primitive.name == "optimization_barrier"]
    return [sorted(var.aval.shape for var in eqn.outvars) for eqn in found]


def test_a_kernels_gradient_comes_before_the_layer_before() -> None:
    plain = gradient(lambda x, kernels: layer(layer(x, kernels[0]), kernels[1]))(KERNELS)
    for one, other in zip(gradient(unrolled)(KERNELS), plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    # The last layer's holds the gradient of its kernel and of its input; the first layer's input has none.
    assert barriers(unrolled, *KERNELS) == [[(4, 8), (8, 8)], [(8, 8)]]


def test_a_loop_and_a_mesh_have_none() -> None:
    def looped(layer: Any) -> int:
        def run(x: jax.Array, kernels: list[jax.Array]) -> jax.Array:
            return scan_layers(lambda x, kernel: (layer(x, kernel), None), x, kernels)[0]

        return str(jax.make_jaxpr(gradient(run))(KERNELS)).count("optimization_barrier")

    assert looped(lambda x, kernel: remat(layer, x, kernel)) <= looped(layer)
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        assert barriers(unrolled, *KERNELS) == []


def test_what_is_not_differentiated_gets_no_gradient() -> None:
    def frozen_first(x: jax.Array, kernels: list[jax.Array]) -> jax.Array:
        return unrolled(x, [KERNELS[0], *kernels])

    assert barriers(frozen_first, KERNELS[1]) == [[(8, 8)]]
