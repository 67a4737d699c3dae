"""A loop over layers: values and gradients as in a Python loop, and what it stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_te.layers import LayerNormMLP, Linear
from jax_te.ops import scan_layers
from jax_te.quantize import as_float32, with_max_gradients
from jax_te.recipe import DelayedScaling, autocast
from jax_te.training import split_model

X = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)


def layers_of(count: int, dtype: Any = jnp.float32) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), count)
    return [{"w": jax.random.normal(key, (8, 8), dtype) / 3, "b": jnp.full((1, 8), 0.1, dtype)} for key in keys]


def body(x: jax.Array, layer: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    hidden = jnp.tanh(x @ layer["w"])
    return x + hidden * layer["b"], jnp.sum(hidden**2)


def one_by_one(body: Callable[..., Any], x: Any, layers: list[Any]) -> tuple[Any, list[Any]]:
    ys = []
    for layer in layers:
        x, y = body(x, layer)
        ys.append(y)
    return x, ys


def assert_close(given: Any, expected: Any) -> None:
    assert jax.tree.structure(given) == jax.tree.structure(expected)
    # The order of sums differs between a loop and single layers: some units in the last place of fp32.
    for one, other in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 11])
def test_values_and_gradients_are_those_of_layers_one_by_one(count: int) -> None:
    def loss(run: Any) -> Any:
        def of(x: jax.Array, layers: Any, factor: jax.Array) -> jax.Array:
            # `factor` is closed over; each layer's ``y`` has a cotangent of its own.
            x, ys = run(lambda x, layer: body(x * factor, layer), x, layers)
            return jnp.sum(jnp.sin(x)) + sum(jnp.float32(number) * y for number, y in enumerate(ys))

        return jax.jit(jax.value_and_grad(of, (0, 1, 2)))

    arguments = X, layers_of(count), jnp.float32(0.9)
    assert_close(loss(scan_layers)(*arguments), loss(one_by_one)(*arguments))
    assert_close(scan_layers(body, X, layers_of(count)), one_by_one(body, X, layers_of(count)))


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.vmap, jax.jit], ids=["checkpoint", "vmap", "jit"])
def test_it_composes_with_other_transformations(wrap: Any) -> None:
    def gradient(run: Any) -> Any:
        def loss(x: jax.Array, layers: Any) -> jax.Array:
            return jnp.sum(wrap(lambda x: run(body, x, layers)[0])(x) ** 2)

        return jax.grad(loss, (0, 1))

    x = X[None] if wrap is jax.vmap else X
    assert_close(gradient(scan_layers)(x, layers_of(4)), gradient(one_by_one)(x, layers_of(4)))


def test_integers_keys_and_layers_without_gradients() -> None:
    """A layer's key and number are no floats, one of the carries is none, and one kernel is frozen."""

    def turn(carry: Any, layer: Any) -> Any:
        (x, count), (arrays, key, number) = carry, layer
        dropped = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x, jnp.zeros_like(x))
        x, y = body(
            dropped, {"w": jax.lax.stop_gradient(arrays["w"]), "b": arrays["b"] * (count + number).astype(jnp.float32)}
        )
        return (x, count + 1), {"sum": y, "count": count}

    keys = jax.random.split(jax.random.key(1), 4)
    rest = [(key, jnp.int32(number)) for number, key in enumerate(keys)]

    def gradient(run: Any) -> Any:
        def loss(layers: Any, x: jax.Array) -> Any:
            own = [(arrays, *more) for arrays, more in zip(layers, rest, strict=True)]
            (x, count), ys = run(turn, (x, jnp.int32(1)), own)
            return jnp.sum(x) + ys[1]["sum"], (count, ys)

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    assert_close(gradient(scan_layers)(layers_of(4), X), gradient(one_by_one)(layers_of(4), X))


def test_only_what_is_differentiated_is_computed() -> None:
    layers = layers_of(4)

    def loss(biases: list[jax.Array]) -> jax.Array:
        own = [layer | {"b": bias} for layer, bias in zip(layers, biases, strict=True)]
        return jnp.sum(scan_layers(body, X, own)[0])

    program = str(jax.make_jaxpr(jax.grad(loss))([layer["b"] for layer in layers]))
    # Forward's product in each turn, and backward's of the carry; none of a kernel's gradient.
    assert program.count("dot_general[") == 2 * program.count("scan[") / 2
    with_kernels = str(jax.make_jaxpr(jax.grad(lambda layers: jnp.sum(scan_layers(body, X, layers)[0])))(layers))
    assert with_kernels.count("dot_general[") > program.count("dot_general[")


def test_modules_are_layers() -> None:
    layers = [LayerNormMLP(8, 16, rngs=nnx.Rngs(number)) for number in range(3)]

    def gradient(run: Any) -> Any:
        def loss(layers: Any, x: jax.Array) -> jax.Array:
            x, _ = run(lambda x, layer: (x + layer(x), None), x, layers)
            return jnp.sum(jnp.sin(x))

        return jax.jit(jax.grad(loss, (0, 1)))

    x = X[None]
    assert_close(gradient(scan_layers)(layers, x), gradient(one_by_one)(layers, x))


def test_forward_stores_each_residual_once_and_no_kernel() -> None:
    """A loop that stores kernels, which backward reads as they are, would hold each of them twice more."""
    layers = [Linear(8, 64, bias=False, rngs=nnx.Rngs(number)) for number in range(3)]
    back = jnp.ones((64, 8))

    def loss(layers: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(scan_layers(lambda x, layer: (jnp.tanh(layer(x)) @ back, None), x, layers)[0])

    program = jax.make_jaxpr(jax.grad(loss))(layers, X).jaxpr
    forward = next(eqn for eqn in program.eqns if eqn.primitive.name == "scan")
    written = sorted(var.aval.shape for var in forward.outvars if var.aval.shape[:1] == (3,))
    # The layer's input, and tanh's result, which both tanh's derivative and the product's read, or also the derivative.
    assert written in ([(3, 4, 8), (3, 4, 64)], [(3, 4, 8), (3, 4, 64), (3, 4, 64)])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(axis_type: AxisType) -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))

    def gradient(run: Any) -> Any:
        return jax.jit(jax.grad(lambda x, layers: jnp.sum(run(body, x, layers)[0] ** 2), (0, 1)))

    expected = gradient(one_by_one)(X, layers_of(4))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
        given = gradient(scan_layers)(x, layers_of(4))
    assert_close(given, expected)
    assert given[0].sharding.spec[0] == "data"


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_of_a_shard_map(check_vma: bool) -> None:
    """Activations differ between devices, parameters and the cotangent of the mean do not."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    layers = layers_of(4)

    def gradient(run: Any) -> Any:
        def loss(x: jax.Array, layers: Any) -> jax.Array:
            x, ys = run(body, x, layers)
            return jnp.sum(x**2) + sum(ys)

        def on_device(x: jax.Array, layers: Any) -> Any:
            d_x, d_layers = jax.grad(loss, (0, 1))(x, layers)
            # With the check JAX sums gradients of parameters that are equal on all devices by itself.
            return d_x, d_layers if check_vma else jax.lax.psum(d_layers, "data")

        specs = {
            "in_specs": (PartitionSpec("data"), PartitionSpec()),
            "out_specs": (PartitionSpec("data"), PartitionSpec()),
        }
        return jax.jit(jax.shard_map(on_device, mesh=mesh, check_vma=check_vma, **specs))(X, layers)

    assert_close(gradient(scan_layers), gradient(one_by_one))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
@pytest.mark.parametrize("kind", ["integer", "mask", "key"])
def test_it_closes_over_what_has_no_gradient(wrap: Any, kind: str) -> None:
    """Arguments of an outer function, such as a mask of all layers, in a derivative of that function."""
    given = {"integer": jnp.int32(2), "mask": X > 0, "key": jax.random.key(5)}[kind]

    def change(x: jax.Array, given: jax.Array) -> jax.Array:
        if kind == "key":
            return x * jax.random.uniform(given, x.shape)
        return jnp.roll(x, given, 0) if kind == "integer" else jnp.where(given, x, 0.5 * x)

    def gradient(run: Any) -> Any:
        def loss(x: jax.Array, given: jax.Array) -> jax.Array:
            return jnp.sum(run(lambda x, layer: body(change(x, given), layer), x, layers_of(4))[0] ** 2)

        return jax.grad(wrap(loss))(X, given)

    assert_close(gradient(scan_layers), gradient(one_by_one))


def test_a_sum_that_begins_with_a_python_number() -> None:
    def turn(carry: Any, layer: Any) -> Any:
        (x, total), (x, y) = carry, body(carry[0], layer)
        return (x, total + y), None

    def gradient(run: Any) -> Any:
        return jax.value_and_grad(lambda layers: run(turn, (X, 0), layers)[0][1])(layers_of(4))

    assert_close(gradient(scan_layers), gradient(one_by_one))


def test_residuals_that_a_policy_keeps_on_the_host() -> None:
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    def gradient(run: Any) -> Any:
        recomputed = jax.checkpoint(body, policy=policy)
        return jax.jit(jax.grad(lambda x, layers: jnp.sum(run(recomputed, x, layers)[0]), (0, 1)))(X, layers_of(4))

    assert_close(gradient(scan_layers), gradient(one_by_one))


def test_layers_of_which_some_differ_between_devices() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    layers = layers_of(4)

    def gradient(run: Any) -> Any:
        def on_device(x: jax.Array, layers: Any) -> Any:
            own = [
                layers[0],
                *(
                    jax.tree.map(lambda a: a * (1.0 + jax.lax.axis_index("data").astype(jnp.float32)), each)
                    for each in layers[1:]
                ),
            ]
            return jax.grad(lambda x: jnp.sum(run(body, x, own)[0] ** 2))(x)

        specs = {"in_specs": (PartitionSpec("data"), PartitionSpec()), "out_specs": PartitionSpec("data")}
        return jax.jit(jax.shard_map(on_device, mesh=mesh, **specs))(X, layers)

    assert_close(gradient(scan_layers), gradient(one_by_one))


def test_states_that_all_layers_share_are_refused() -> None:
    state = with_max_gradients({"x": {"scale": jnp.ones(())}})
    with pytest.raises(ValueError, match="give each layer its own"):
        scan_layers(lambda x, layer: (x * as_float32(state)["x"]["scale"], layer), X, layers_of(2))


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (lambda x, layer: x, "a tuple of two; it returned"),
        (lambda x, layer: ((x, x), None), "init's structure"),
        (lambda x, layer: (x.astype(jnp.bfloat16), None), r"is float32\[4, 8\], and body returned bfloat16\[4, 8\]"),
    ],
)
def test_another_carry_is_refused(turn: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        scan_layers(turn, X, layers_of(2))


def test_no_layers() -> None:
    assert scan_layers(body, X, []) == (X, [])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"w": jnp.zeros((8, 8))}, "layer 1 has another than layer 0"),
        (
            {"w": jnp.zeros((8, 9)), "b": jnp.zeros((1, 8))},
            r"layer 1 has float32\[8, 9\] where layer 0 has float32\[8, 8\]",
        ),
        ({"w": jnp.zeros((8, 8), jnp.bfloat16), "b": jnp.zeros((1, 8))}, r"bfloat16\[8, 8\] where layer 0 has float32"),
    ],
)
def test_layers_of_other_shapes_are_refused(other: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scan_layers(body, X, [*layers_of(1), other])


def test_states_whose_gradients_merge_by_maximum() -> None:
    """A layer's calls in a train step: the gradient of a state is its next value, the larger of two calls'."""
    with autocast(DelayedScaling(amax_history_len=2)):
        parts = [split_model(Linear(16, 16, rngs=nnx.Rngs(number))) for number in range(3)]

    def gradient(run: Any) -> Any:
        def loss(trees: Any, x: jax.Array) -> jax.Array:
            layers = [nnx.merge(parts[0][0], *tree) for tree in trees]
            x, _ = run(lambda x, layer: (layer(jnp.sin(layer(x))), None), x, layers)
            return jnp.sum(jnp.sin(x))

        trees = [(part.params, with_max_gradients(part.quantizers), part.rest) for part in parts]
        with autocast(DelayedScaling(amax_history_len=2)):
            found = jax.jit(jax.grad(loss, allow_int=True))(trees, jnp.linspace(-1.0, 1.0, 64).reshape(4, 16))
        return [(params, as_float32(quantizers)) for params, quantizers, _ in found]

    given, expected = gradient(scan_layers), gradient(one_by_one)
    assert_close(given, expected)
    assert any(np.any(leaf != 0) for _, quantizers in given for leaf in jax.tree.leaves(quantizers))


def test_a_carry_with_a_random_key() -> None:
    def turn(carry: Any, layer: Any) -> Any:
        x, key = carry
        key, own = jax.random.split(key)
        return (body(x * jax.random.uniform(own, (4, 8)), layer)[0], key), None

    def gradient(run: Any) -> Any:
        return jax.grad(lambda layers: jnp.sum(run(turn, (X, jax.random.key(3)), layers)[0][0]))(layers_of(4))

    assert_close(gradient(scan_layers), gradient(one_by_one))
    plain = [run(turn, (X, jax.random.key(3)), layers_of(4))[0][0] for run in (scan_layers, one_by_one)]
    assert_close(*plain)
