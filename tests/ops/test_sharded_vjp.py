"""The skeleton of ops: one derivative rule on one device and on each device of a mesh."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_te.config import ParallelConfig
from jax_te.ops.sharded_vjp import Shards, sharded_vjp
from jax_te.quantize import with_max_gradients
from jax_te.sharding import device_mesh, make_mesh
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


@pytest.mark.costly("sizes0-auto-True")
@pytest.mark.wide
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


MESHES: dict[str, Any] = {
    "no mesh": contextlib.nullcontext,
    "auto": lambda: jax.set_mesh(make_mesh(ParallelConfig(data=4), axis_type="auto")),
    "explicit": lambda: jax.set_mesh(make_mesh(ParallelConfig(data=4), axis_type="explicit")),
}


@pytest.mark.wide
@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_check_is_told_what_is_differentiated(argnums: Any, way: str, mesh: str) -> None:
    args, sink = inputs()
    axes = () if mesh == "no mesh" else ("data",)

    def loss(x: Any, kernel: Any) -> jax.Array:
        return jnp.sum(call(Args(x, kernel, args.state), sink, axes))

    seen.clear()
    with MESHES[mesh]():
        jax.grad(WAYS[way](loss), argnums=argnums)(args.x, args.kernel)
    wanted = (argnums,) if isinstance(argnums, int) else argnums
    assert {(bool(p.x), bool(p.kernel), bool(p.state)) for p in seen} == {(0 in wanted, 1 in wanted, False)}


@pytest.mark.costly("vmap-explicit")
@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("way", list(WAYS))
def test_transformations_give_the_same_gradients(way: str, mesh: str) -> None:
    args, sink = inputs()
    axes = () if mesh == "no mesh" else ("data",)

    def loss(x: Any, sink: Any) -> jax.Array:
        return jnp.sum(jnp.square(call(Args(x, args.kernel, args.state), sink, axes)))

    y = args.x @ args.kernel
    expected = (2.0 * y @ args.kernel.T, 2.0 * args.x.T @ y)
    with MESHES[mesh]():
        found = jax.grad(WAYS[way](loss), argnums=(0, 1))(args.x, sink)
    for ours, theirs in zip(found, expected, strict=True):
        times = 2.0 if way == "scan" else 1.0
        np.testing.assert_allclose(ours, times * theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mesh", list(MESHES))
def test_check_refuses_derivatives_only(mesh: str) -> None:
    def refuse(spec: None, args: Any, perturbed: Any, sinks: Any) -> None:
        if perturbed[1]:
            raise TypeError("not with respect to the second")

    def fwd(spec: None, args: Any) -> Any:
        return args[0] * args[1], args

    def bwd(spec: None, residuals: Any, g: jax.Array) -> Any:
        return (g * residuals[1], g * residuals[0]), None

    product, args = sharded_vjp(fwd, bwd, check=refuse), (draw("x", (8,)), draw("y", (8,)))

    def run(x: Any, y: Any) -> jax.Array:
        found, rows = device_mesh(), P("data")
        split = None if found is None else Shards(mesh=found, args=rows, out=rows, cotangents=rows)
        return product(None, split, (x, y))

    with MESHES[mesh]():
        assert_bitwise(run(*args), args[0] * args[1])
        assert_bitwise(jax.grad(lambda x: jnp.sum(run(x, args[1])))(args[0]), args[1])
        with pytest.raises(TypeError, match="not with respect to the second"):
            jax.grad(lambda y: jnp.sum(run(args[0], y)))(args[1])


@pytest.mark.parametrize("mesh", list(MESHES))
def test_a_policy_saves_the_output_by_its_name(mesh: str) -> None:
    args, sink = inputs()
    axes = () if mesh == "no mesh" else ("data",)

    def loss(x: Any) -> jax.Array:
        return jnp.sum(jnp.square(call(Args(x, args.kernel, args.state), sink, axes)))

    def products(policy: Any) -> int:
        """Return how often gradients compute the product: in forward, and again in backward if it was not saved."""
        kept = jax.checkpoint(loss, policy=policy)
        return str(jax.make_jaxpr(jax.grad(kept))(args.x)).count("name=product")

    policies = jax.checkpoint_policies
    with MESHES[mesh]():
        anew, saved = (products(policies.save_only_these_names(name)) for name in ("another", "product"))
    assert anew - saved == 1


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


def _keeping_fwd(axes: tuple[str, ...], x: jax.Array) -> Any:
    return jnp.square(x), {"index": jax.lax.axis_index(axes), "slope": 2.0 * x, "x": x, "nothing": None}


def _keeping_bwd(axes: tuple[str, ...], residuals: Any, g: jax.Array) -> Any:
    same = residuals["index"] == jax.lax.axis_index(axes)
    return jnp.where(same & (residuals["slope"] == 2.0 * residuals["x"]), residuals["slope"] * g, jnp.nan), None


@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
def test_each_device_keeps_its_own_residuals(axis_type: Any) -> None:
    x, both = draw("x", (4, 8)), ("data", "tensor")
    keeping = sharded_vjp(_keeping_fwd, _keeping_bwd)
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, tensor=4), axis_type=axis_type)):
        mesh, spec = device_mesh(), P("data", "tensor")
        assert mesh is not None
        split = Shards(mesh=mesh, args=spec, out=spec, cotangents=spec)
        y, vjp = jax.vjp(lambda x: keeping(both, split, x), x)
        residuals = {leaf.shape: leaf for leaf in jax.tree.leaves(vjp)}
        (dx,) = vjp(jnp.full_like(y, 3.0))
        devices = jax.sharding.get_mesh().devices.flat
    np.testing.assert_array_equal(residuals[(8,)], np.arange(8))
    slopes = residuals[(8, 2, 2)]
    assert_bitwise(np.asarray(slopes)[3], np.asarray(2.0 * x)[:2, 6:])
    for shard in slopes.addressable_shards:
        assert devices[shard.index[0].start] == shard.device
        assert shard.data.shape == (1, 2, 2)
    assert_bitwise(residuals[(4, 8)], x)  # an argument is kept as it is, not device by device
    assert set(residuals) == {(8,), (8, 2, 2), (4, 8)}
    assert_bitwise(dx, 6.0 * x)


@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "wrapped"])
def test_an_argument_that_a_rule_has_wrapped_is_kept_as_a_copy(wrapped: bool) -> None:
    """A residual is told from the arguments by being the same object; another array costs memory, and no value."""

    def fwd(axes: tuple[str, ...], x: jax.Array) -> Any:
        return jnp.square(x), jax.lax.optimization_barrier(x) if wrapped else x

    square, x = sharded_vjp(fwd, lambda axes, x, g: (2.0 * x * g, None)), draw("x", (4, 8))
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, tensor=4))):
        mesh, spec = device_mesh(), P("data", "tensor")
        assert mesh is not None
        split = Shards(mesh=mesh, args=spec, out=spec, cotangents=spec)
        _, vjp = jax.vjp(lambda x: square((), split, x), x)
        (dx,) = vjp(jnp.ones_like(x))
    assert [leaf.shape for leaf in jax.tree.leaves(vjp)] == [(8, 2, 2) if wrapped else x.shape]
    assert_bitwise(dx, 2.0 * x)


@pytest.mark.parametrize("mesh", list(MESHES))
def test_a_scan_does_not_stack_arguments_that_do_not_change(mesh: str) -> None:
    args, sink = inputs()
    axes = () if mesh == "no mesh" else ("data",)

    def loss(x: Any, sink: Any) -> jax.Array:
        def body(factor: Any, _: None) -> Any:
            return factor + jnp.sum(call(Args(x * factor, args.kernel, args.state), sink, axes)), None

        return jax.lax.scan(body, 1.0, None, length=3)[0]

    with MESHES[mesh]():
        jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(args.x, sink)
    forward = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    stacked = [var.aval.shape for var in forward.outvars]
    assert (3, *args.x.shape) in stacked
    assert (3, *args.kernel.shape) not in stacked


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
def test_an_output_whose_cotangent_the_rule_does_not_read(axis_type: Any, jit: bool) -> None:
    def fwd(spec: None, x: jax.Array) -> Any:
        return (2.0 * x, jnp.max(x, keepdims=True)), None

    def bwd(spec: None, residuals: None, g: Any) -> Any:
        assert g[1] is None
        return 2.0 * g[0], None

    both, x = sharded_vjp(fwd, bwd), draw("x", (8,))
    with jax.set_mesh(make_mesh(ParallelConfig(data=4), axis_type=axis_type)):
        mesh, rows = device_mesh(), P("data")
        assert mesh is not None
        split = Shards(mesh=mesh, args=rows, out=(rows, rows), cotangents=rows, out_cotangents=(rows, None))

        def run(x: jax.Array) -> Any:
            return jax.value_and_grad(lambda x: (jnp.sum(jnp.square((y := both(None, split, x))[0])), y[1])[0])(x)

        _, dx = (jax.jit(run) if jit else run)(x)
    np.testing.assert_allclose(dx, 8.0 * x, rtol=1e-6)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("mesh", list(MESHES))
def test_random_keys_stay_keys(mesh: str, jit: bool) -> None:
    """They have an extended dtype, too; as a residual a key comes back as one."""

    def fwd(spec: None, args: Any) -> Any:
        x, key = args
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        return x * jax.random.uniform(key), (key, jax.random.fold_in(key, 1))

    def bwd(spec: None, residuals: Any, g: jax.Array) -> Any:
        key, other = residuals
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        return (g * jax.random.uniform(key) + 0.0 * jax.random.uniform(other), None), None

    scaled, x, key = sharded_vjp(fwd, bwd), draw("x", (8,)), jax.random.key(3)
    with MESHES[mesh]():
        found, rows = device_mesh(), P("data")
        specs = (rows, P())
        split = None if found is None else Shards(mesh=found, args=specs, out=rows, cotangents=specs)

        def run(x: jax.Array, key: jax.Array) -> jax.Array:
            return jax.grad(lambda x: jnp.sum(scaled(None, split, (x, key))))(x)

        dx = (jax.jit(run) if jit else run)(x, key)
    assert_bitwise(dx, jnp.full(8, jax.random.uniform(key)))


def test_a_state_used_twice_merges_by_maximum() -> None:
    args, sink = inputs()
    state = with_max_gradients(jnp.float32(2.0))

    def loss(state: Any) -> jax.Array:
        once = [jnp.sum(call(Args(args.x * factor, args.kernel, state), sink)) for factor in (1.0, 2.0)]
        return once[0] + once[1]

    merged = jax.jit(jax.grad(loss, allow_int=True))(state)  # JAX adds arrays of such dtypes under jit only
    assert merged.dtype == state.dtype
    assert float(jax.lax.convert_element_type(merged, jnp.float32)) == 3.0
    assert float(jax.grad(loss)(jnp.float32(2.0))) == 6.0  # of plain numbers JAX takes the sum


def test_cotangents_come_back_in_the_sharding_of_their_arguments() -> None:
    args, sink = inputs()
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, tensor=2), axis_type="explicit")):
        x, given = jax.sharding.reshard((args.x, sink), (P("tensor"), P(None, "data")))
        dx, _, dsink = gradients(args._replace(x=x), given, ("data", "tensor"))
        assert (jax.typeof(dx), jax.typeof(dsink)) == (jax.typeof(x), jax.typeof(given))
    expected = gradients(args, sink)
    np.testing.assert_allclose(dx, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dsink, expected[2], rtol=1e-5, atol=1e-6)


def test_without_shards_on_explicit_axes_the_output_must_be_named() -> None:
    args, sink = inputs()
    with jax.set_mesh(make_mesh(ParallelConfig(data=4), axis_type="explicit")):
        with pytest.raises(ValueError, match="pass out_axes"):
            op((), None, args, sink)
        y = op((), None, args, sink, ("batch", None))
        assert jax.typeof(y).sharding.spec == P("data", None)
    np.testing.assert_allclose(y, args.x @ args.kernel, rtol=1e-6)
