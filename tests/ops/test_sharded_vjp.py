"""The skeleton of ops: one derivative rule on one device and on each device of a mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_te.config import ParallelConfig
from jax_te.ops.sharded_vjp import Shards, sharded_vjp
from jax_te.quantize import with_max_gradients
from jax_te.sharding import make_mesh
from jax_te.sharding.internal import device_mesh
from tests.support.numerics import assert_bitwise, draw


class Args(NamedTuple):
    """``x [b, k]``, ``kernel [k, n]`` and a state whose gradient is its next value."""

    x: Any
    kernel: Any
    state: Any


def _fwd(axes: tuple[str, ...], args: Args) -> tuple[jax.Array, Any]:
    x, kernel, state = args
    # Of each device by itself: no other device could make it.
    index = jax.lax.axis_index(axes) if axes else jnp.zeros((), jnp.int32)
    return x @ kernel, (x, kernel, state, index)


def _bwd(axes: tuple[str, ...], residuals: Any, g: jax.Array) -> tuple[Args, jax.Array]:
    x, kernel, state, index = residuals
    same = index == (jax.lax.axis_index(axes) if axes else 0)
    dkernel = jnp.where(same, x.T @ g, jnp.nan)
    return Args(g @ kernel.T, None, state + 1.0), jax.lax.psum(dkernel, axes) if axes else dkernel


seen: list[Any] = []
op = sharded_vjp(_fwd, _bwd, name="product", check=lambda spec, args, perturbed, sinks: seen.append(perturbed))


def call(args: Args, sink: Any, axes: tuple[str, ...] = ()) -> jax.Array:
    mesh, shards = device_mesh(), None
    if mesh is not None:
        rows = P(axes)
        specs = Args(rows, P(), P())
        shards = Shards(mesh=mesh, args=specs, out=rows, cotangents=specs, sinks=P(), axis_names=axes)
    return op(axes, shards, args, sink)


def inputs() -> tuple[Args, jax.Array]:
    kernel = draw("kernel", (4, 2))
    return Args(draw("x", (8, 4)), kernel, jnp.zeros(())), jnp.zeros_like(kernel)


def gradients(args: Args, sink: Any, axes: tuple[str, ...] = (), **options: Any) -> Any:
    def loss(x: Any, state: Any, sink: Any) -> jax.Array:
        return jnp.sum(jnp.square(call(Args(x, args.kernel, state), sink, axes)))

    return jax.grad(loss, argnums=(0, 1, 2), **options)(args.x, args.state, sink)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("sizes", [{"data": 4}, {"data": 2, "tensor": 2}])
def test_on_a_mesh_it_is_what_it_is_on_one_device(sizes: Any, axis_type: Any, jit: bool) -> None:
    args, sink = inputs()
    expected = gradients(args, sink)
    y = args.x @ args.kernel
    np.testing.assert_allclose(expected[0], 2.0 * y @ args.kernel.T, rtol=1e-6)
    assert float(expected[1]) == 1.0
    with jax.set_mesh(make_mesh(ParallelConfig(**sizes), axis_type=axis_type)):
        axes = tuple(sizes)

        def run(args: Args, sink: Any) -> Any:
            return gradients(args, sink, axes)

        found = (jax.jit(run) if jit else run)(args, sink)
    for ours, theirs in zip(found, expected, strict=True):
        # Sums over rows in another order: a few units in the last place of fp32.
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_axes_that_it_does_not_take_are_left_to_the_compiler() -> None:
    args, sink = inputs()
    expected = gradients(args, sink)
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, tensor=2))):
        found = jax.jit(lambda args, sink: gradients(args, sink, ("data",)))(args, sink)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [{}, {"data": 4}])
def test_states_that_merge_by_maximum_are_fp32_inside(sizes: Any) -> None:
    args, sink = inputs()
    args = args._replace(state=with_max_gradients(jnp.float32(2.0)))
    with jax.set_mesh(make_mesh(ParallelConfig(**sizes))):
        state = gradients(args, sink, tuple(sizes), allow_int=True)[1]
    assert state.dtype == args.state.dtype
    assert float(jax.lax.convert_element_type(state, jnp.float32)) == 3.0


WAYS: dict[str, Any] = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda x, w: jax.lax.scan(lambda total, _: (total + f(x, w), None), 0.0, None, length=2)[0],
    "vmap": lambda f: lambda x, w: jnp.sum(jax.vmap(f, in_axes=(0, None))(x[None], w)),
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_check_is_told_what_is_differentiated(argnums: Any, way: str) -> None:
    args, sink = inputs()

    def loss(x: Any, kernel: Any) -> jax.Array:
        return jnp.sum(op((), None, Args(x, kernel, args.state), sink))

    seen.clear()
    jax.grad(WAYS[way](loss), argnums=argnums)(args.x, args.kernel)
    wanted = (argnums,) if isinstance(argnums, int) else argnums
    assert {(bool(p.x), bool(p.kernel), bool(p.state)) for p in seen} == {(0 in wanted, 1 in wanted, False)}


def test_a_policy_saves_the_output_by_its_name() -> None:
    args, sink = inputs()

    def loss(x: Any) -> jax.Array:
        return jnp.sum(jnp.square(call(Args(x, args.kernel, args.state), sink)))

    def products(policy: Any) -> int:
        """Return how often gradients compute the product: in forward, and again in backward if it was not saved."""
        kept = jax.checkpoint(loss, policy=policy)
        return str(jax.make_jaxpr(jax.grad(kept))(args.x)).count("name=product")

    policies = jax.checkpoint_policies
    assert (
        products(policies.save_only_these_names("another")) - products(policies.save_only_these_names("product")) == 1
    )


def test_outputs_that_nothing_differentiates() -> None:
    def fwd(spec: None, x: jax.Array) -> Any:
        return (2.0 * x, x + 1.0), None

    def bwd(spec: None, residuals: None, g: Any) -> Any:
        first, second = g
        return 2.0 * first + second, None

    both = sharded_vjp(fwd, bwd)
    x = draw("x", (3,))
    assert_bitwise(jax.grad(lambda x: jnp.sum(both(None, None, x)[0]))(x), jnp.full(3, 2.0))
    assert_bitwise(jax.grad(lambda x: jnp.sum(both(None, None, x)[1]))(x), jnp.ones(3))
