"""Every op on 8 devices, data=2 fsdp=2 tensor=2, with Auto and with Explicit axes: the numbers of one device, sharded
as its axes say.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_te.config import ParallelConfig
from jax_te.layers import LayerNormMLP
from jax_te.ops import (
    Activation,
    LinearOptions,
    LinearWeights,
    MlpOptions,
    activation,
    dense,
    dot_product_attention,
    layernorm,
    layernorm_mlp,
    softmax_cross_entropy,
)
from jax_te.quantize import ROLES
from jax_te.recipe import DelayedScaling, Float8CurrentScaling
from jax_te.sharding import make_mesh, named_sharding
from tests.support.cases import CASES, GEMM_CASES, make_case
from tests.support.numerics import (
    TOLERANCE,
    assert_bitwise,
    assert_close,
    assert_same_rounding,
    quick_jit,
    with_vjp,
)

RECIPES = {
    "none": None,
    "current": Float8CurrentScaling(amax_scope="whole"),
    "delayed": DelayedScaling(amax_history_len=2),
}
FP8 = [(name, recipe) for name in GEMM_CASES for recipe in ("current", "delayed") if name != "layernorm_mlp gelu"]


@pytest.fixture(params=["auto", "explicit"])
def mesh(request):
    return make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2), axis_type=request.param)


@functools.cache
def on_one_device(name, recipe):
    case = make_case(name)

    def run(args, states):
        return case.run(args, states, recipe=RECIPES[recipe])

    return quick_jit(lambda *a: with_vjp(run, *a))((case.args, case.states(RECIPES[recipe])), case.g)


def on_the_mesh(name, recipe, mesh):
    case = make_case(name)

    def run(args, states):
        return case.run(args, states, recipe=RECIPES[recipe])

    def place(a, axes):
        return None if a is None else jax.device_put(a, named_sharding(axes, mesh))

    args = {key: place(a, case.axes[key]) for key, a in case.args.items()}
    states = jax.device_put(case.states(RECIPES[recipe]), NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        return case, quick_jit(lambda *a: with_vjp(run, *a))((args, states), place(case.g, case.out_axes))


def check_shardings(case, y, gradients, mesh):
    assert y.sharding.is_equivalent_to(named_sharding(case.out_axes, mesh), y.ndim), f"output: {y.sharding.spec}"
    for key, gradient in gradients.items():
        if gradient is not None:
            wanted = named_sharding(case.axes[key], mesh)
            # On Auto axes the compiler chooses what no op names: gradients of inputs and vectors. Kernels are named.
            if "explicit" in str(mesh.axis_types).lower() or key.endswith("kernel"):
                assert gradient.sharding.is_equivalent_to(wanted, gradient.ndim), f"d{key}: {gradient.sharding.spec}"


@pytest.mark.costly(
    "auto-layernorm_dense",
    "auto-layernorm_mlp swiglu",
    slow=(
        "explicit-layernorm_mlp gelu",
        "explicit-attention causal",
        "auto-attention padding",
        "auto-attention padding_causal packed",
        "explicit-attention no_mask packed",
    ),
)
@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
def test_same_numbers_and_expected_shardings(name, mesh):
    case, (y, (gradients, _)) = on_the_mesh(name, "none", mesh)
    expected_y, (expected, _) = on_one_device(name, "none")
    assert_close(y, expected_y, 2 * TOLERANCE["float32"], what="y")
    for key, gradient in expected.items():
        if gradient is not None:
            assert_close(gradients[key], gradient, 2 * TOLERANCE["float32"], what=f"d{key}")
    check_shardings(case, y, gradients, mesh)


@pytest.mark.costly(
    "explicit-dense row-delayed", slow=("auto-layernorm_dense-current", "explicit-layernorm_mlp swiglu-delayed")
)
@pytest.mark.wide
@pytest.mark.parametrize(("name", "recipe"), FP8)
def test_fp8(name, recipe, mesh):
    case, (y, (gradients, next_states)) = on_the_mesh(name, recipe, mesh)
    expected_y, (expected, expected_states) = on_one_device(name, recipe)
    # Sums over shards differ in fp32's last bits, which turns the rounding of a few computed operands; see
    # assert_same_rounding.
    check = assert_close if name.startswith("dense") else assert_same_rounding
    check(y, expected_y, 4 * TOLERANCE["float32"], what="y")
    for key, gradient in expected.items():
        if gradient is not None:
            vector = gradient.ndim < 3 and check is assert_same_rounding and not key.endswith("kernel")
            check(gradients[key], gradient, 1e-3 if vector else 4 * TOLERANCE["float32"], what=f"d{key}")
    check_shardings(case, y, gradients, mesh)
    for actual, wanted in zip(jax.tree.leaves(next_states), jax.tree.leaves(expected_states), strict=True):
        assert actual.sharding.is_fully_replicated
        np.testing.assert_allclose(actual, wanted, rtol=1e-5)
        if name.startswith("dense"):
            assert_bitwise(actual, wanted)


@pytest.mark.costly("auto")
def test_amax_spans_every_mesh_axis(mesh):
    """An outlier on one shard of x, kernel and grad sets the scale of all."""
    case = make_case("dense")
    args = {
        "x": case.args["x"].at[-1, -1, -1].set(77.0),
        "kernel": case.args["kernel"].at[-1, -1].set(55.0),
        "bias": None,
    }
    g, recipe = case.g.at[-1, 0, -1].set(33.0), RECIPES["delayed"]

    def run(args, state):
        return case.run(args, state, recipe=recipe)

    with jax.set_mesh(mesh):

        def place(a, axes):
            return jax.device_put(a, named_sharding(axes, mesh))

        placed = {key: None if a is None else place(a, case.axes[key]) for key, a in args.items()}
        state = jax.device_put(case.states(recipe), NamedSharding(mesh, P()))
        _, (_, next_state) = quick_jit(lambda *a: with_vjp(run, *a))((placed, state), place(g, case.out_axes))
        current = quick_jit(lambda a: case.run(a, recipe=RECIPES["current"]))(placed)
    assert [float(next_state[role]["amax_history"][0]) for role in ROLES] == [77.0, 55.0, 33.0]
    assert_close(current, case.run(args, recipe=RECIPES["current"]), TOLERANCE["float32"])


def test_arguments_on_no_mesh_are_placed():
    """Under jit on an Auto mesh, arrays that were never sharded will do."""
    case = make_case("layernorm_mlp gelu")
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2))):
        y = quick_jit(case.run)(case.args)
    assert_close(y, on_one_device("layernorm_mlp gelu", "none")[0], 2 * TOLERANCE["float32"])


@pytest.mark.wide("dense", "layernorm")
@pytest.mark.parametrize("name", ["dense", "layernorm", "attention causal"])
def test_eager_calls_and_gradients_under_an_auto_mesh(name):
    case = make_case(name)
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2))):
        y, (gradients,) = with_vjp(case.run, (case.args,), case.g)
    expected_y, (expected, _) = on_one_device(name, "none")
    assert_close(y, expected_y, 2 * TOLERANCE["float32"])
    for key, gradient in expected.items():
        assert_close(gradients[key], gradient, 2 * TOLERANCE["float32"], what=key)


def test_eager_call_under_an_explicit_mesh():
    case = make_case("dense")
    mesh = make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2), axis_type="explicit")
    with jax.set_mesh(mesh):
        args = {key: jax.device_put(a, named_sharding(case.axes[key], mesh)) for key, a in case.args.items()}
        y = case.run(args)
    assert jax.typeof(y).sharding.spec == P(("data", "fsdp"), None, "tensor")
    assert_close(y, on_one_device("dense", "none")[0], 2 * TOLERANCE["float32"])


@pytest.mark.wide("sizes3")
@pytest.mark.parametrize("sizes", [{"data": 8}, {"fsdp": 8}, {"tensor": 4}, {"data": 2, "tensor": 4}])
def test_other_meshes(sizes):
    case = make_case("layernorm_mlp swiglu", b=8)

    def run(a, s):
        return case.run(a, s, recipe=RECIPES["current"])

    alone = jax.jit(lambda *a: with_vjp(run, *a))((case.args, None), case.g)
    with jax.set_mesh(make_mesh(ParallelConfig(**sizes))):
        y, (gradients, _) = quick_jit(lambda *a: with_vjp(run, *a))((case.args, None), case.g)
    assert_same_rounding(y, alone[0], 4 * TOLERANCE["float32"])
    assert_same_rounding(gradients["wi_kernel"], alone[1][0]["wi_kernel"], 4 * TOLERANCE["float32"])


def test_an_explicit_mesh_needs_the_results_axes():
    x = jnp.ones((4, 16, 2, 8))
    with jax.set_mesh(make_mesh(ParallelConfig(data=2, fsdp=2, tensor=2), axis_type="explicit")):
        for call in (
            lambda: dense(jnp.ones((4, 16)), jnp.ones((16, 16))),
            lambda: layernorm(jnp.ones((4, 16)), jnp.ones(16)),
            lambda: activation(jnp.ones((4, 1, 16)), "gelu"),
            lambda: dot_product_attention((x, x, x)),
            lambda: softmax_cross_entropy(jnp.ones((4, 16)), jnp.zeros(4, jnp.int32)),
        ):
            with pytest.raises(
                ValueError, match="Explicit axes, so the result's sharding must be named: pass out_axes"
            ):
                call()


def test_axes_that_collide(mesh):
    x, kernel = jnp.ones((4, 16, 16)), jnp.ones((16, 16))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"logical axes 'ffn' and 'heads' .* both map to mesh axis 'tensor'"),
    ):
        jax.jit(lambda x, k: dense(x, k, options=LinearOptions(out_axes=("batch", "ffn", "heads"))))(x, kernel)


def test_axes_of_the_wrong_number(mesh):
    x, kernel = jnp.ones((4, 16, 16)), jnp.ones((16, 16))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="2 logical axes"):
        jax.jit(lambda x, k: dense(x, k, options=LinearOptions(out_axes=("batch", "ffn"))))(x, kernel)


SPLIT, WHOLE = P("data", "tensor", None), P("data", None, None)


@pytest.mark.costly("x_axes0-out_axes0-wo_axes0", slow=("x_axes1-out_axes1-wo_axes1",))
@pytest.mark.parametrize(
    ("x_axes", "out_axes", "wo_axes"),
    [
        (SPLIT, SPLIT, P("tensor", None)),
        (SPLIT, WHOLE, P("tensor", None)),
        (WHOLE, SPLIT, P("tensor", None)),
        (WHOLE, WHOLE, P("tensor", None)),
        (SPLIT, P(None, "tensor", "data"), P("tensor", "data")),
    ],
)
def test_rows_of_a_feed_forward_block_that_are_split_in_front_of_it_and_behind_it(x_axes, out_axes, wo_axes):
    shapes = [(4, 8, 16), (16, 2, 32), (32, 16)]
    x, wi, wo = (0.3 * jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))
    options = MlpOptions(
        activation=Activation("swiglu"),
        wi=LinearOptions(x_axes=x_axes, kernel_axes=P(None, None, "tensor"), out_axes=P("data", None, None, "tensor")),
        wo=LinearOptions(x_axes=P("data", None, "tensor"), kernel_axes=wo_axes, out_axes=out_axes),
    )

    def run(x, wi, wo):
        y = layernorm_mlp(x, jnp.ones(16), None, LinearWeights(wi), LinearWeights(wo), options=options)
        return jnp.sum(jnp.sin(y)), y

    def results():
        (_, y), gradients = jax.jit(jax.value_and_grad(run, (0, 1, 2), has_aux=True))(x, wi, wo)
        return [y, *gradients]

    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])):
        found = results()
    # Ten steps, in backward: norm, GEMM, activation, product and GEMM, and those again for their gradients.
    for actual, expected in zip(found, results(), strict=True):
        assert_close(actual, expected, 10 * TOLERANCE["float32"])


def test_a_sequence_parallel_block_without_examples():
    with jax.set_mesh(make_mesh(ParallelConfig(tensor=2))):
        layer = LayerNormMLP(64, 128, sequence_parallel=True, rngs=nnx.Rngs(0))
        assert nnx.jit(lambda layer, x: layer(x))(layer, jnp.ones((0, 8, 64))).shape == (0, 8, 64)
