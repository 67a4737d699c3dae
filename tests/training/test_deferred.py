"""split_vjp: values of jax.vjp, every equation in its half, and the three parts wherever a schedule puts them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import io_callback

from jax_te.config import ParallelConfig
from jax_te.layers import LayerNormMLP, Linear, TransformerLayer
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, autocast
from jax_te.remat import split_vjp
from jax_te.sharding import make_mesh
from jax_te.training import split_model
from tests.support.meshes import shard, use_mesh
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_close, draw, quick_jit, without_type_checker

L, B, H = 3, 4, 16


def weights() -> jax.Array:
    return draw("w", (L, H, H), scale=H**-0.5)


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sin(x @ w) * 2.0


def over_layers(one: Callable[..., Any]) -> Callable[..., Any]:
    def run(w: jax.Array, x: jax.Array) -> jax.Array:
        for i in range(L):
            x = one(w[i], x)
        return x

    return run


def scanned(one: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda w, x: jax.lax.scan(lambda x, w: (one(w, x), None), x, w, **options)[0]


@jax.custom_vjp
def custom(w: jax.Array, x: jax.Array) -> jax.Array:
    return layer(w, x)


def _custom_backward(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    w, x = saved
    rule = jax.custom_jvp(lambda w, x, g: (x.T @ g, g @ w.T))  # both gradients from one equation
    rule.defjvp(lambda primals, tangents: (rule(*primals), tangents[:2]))
    return rule(w, x, dy * jnp.cos(x @ w) * 2.0)


custom.defvjp(lambda w, x: (layer(w, x), (w, x)), _custom_backward)

SOME_SAVED = jax.checkpoint_policies.dots_saveable

# Function of (weights, x), and the numbers of GEMMs in the first and the second half.
FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "plain": (over_layers(layer), L, L),
    "jit": (over_layers(jax.jit(layer)), L, L),
    "jit around": (jax.jit(over_layers(jax.jit(layer))), L, L),
    "custom_vjp": (over_layers(custom), 2 * L, L),
    "jit custom_vjp": (jax.jit(over_layers(jax.jit(custom))), 2 * L, L),
    "remat": (over_layers(jax.checkpoint(jax.jit(layer))), 2 * L, L),
    "remat around": (jax.checkpoint(over_layers(layer)), 2 * L, L),
    "remat with policy": (over_layers(jax.checkpoint(layer, policy=SOME_SAVED)), L, L),
    "scan": (scanned(layer), 1, 1),
    "scan unrolled": (scanned(layer, unroll=2), 1, 1),
    "scan reversed": (scanned(jax.jit(layer), reverse=True), 1, 1),
    "scan of remat": (scanned(jax.checkpoint(layer)), 2, 1),
    "remat of scan": (jax.checkpoint(scanned(layer)), 2, 1),
    "scan of custom_vjp": (scanned(custom), 2, 1),
    "one weight in every step": (lambda w, x: jax.lax.scan(lambda x, _: (layer(w[0], x), None), x, length=L)[0], 1, 1),
    "no step": (lambda w, x: scanned(layer)(w[:0], x), 1, 1),
    "scan in scan": (lambda w, x: jax.lax.scan(lambda x, _: (scanned(layer)(w, x), x), x, length=2), 1, 1),
    "cond": (lambda w, x: jax.lax.cond(x[0, 0] < 0.0, layer, lambda w, x: x, w[0], x), 2, 0),
    "vmap": (lambda w, x: jax.vmap(layer, (0, None))(w, x), 1, 1),
}


def by_vjp(fn: Callable[..., Any], params: Any, *inputs: Any, dy: Any = None) -> tuple[Any, Any, tuple[Any, ...]]:
    y, vjp = jax.vjp(fn, params, *inputs)
    dparams, *dinputs = vjp(jax.tree.map(jnp.cos, y) if dy is None else dy)
    return y, dparams, tuple(dinputs)


def by_halves(fn: Callable[..., Any], params: Any, *inputs: Any, dy: Any = None) -> tuple[Any, Any, tuple[Any, ...]]:
    y, backward = split_vjp(fn, params, *inputs)
    dinputs, backward_dw = backward(jax.tree.map(jnp.cos, y) if dy is None else dy)
    return y, backward_dw(), dinputs


def by_three_programs(fn: Callable[..., Any], params: Any, *inputs: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    y, backward = quick_jit(lambda params, *inputs: split_vjp(fn, params, *inputs))(params, *inputs)
    dinputs, backward_dw = call(backward, jax.tree.map(jnp.cos, y))
    return y, call(backward_dw), dinputs


@quick_jit
def call(half: Any, *args: Any) -> Any:
    return half(*args)


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        if getattr(e, "dtype", None) == jax.dtypes.float0:
            assert (a.shape, a.dtype) == (e.shape, e.dtype)
        else:
            assert_bitwise(a, e, what=jax.tree_util.keystr(path))


def assert_near(actual: Any, expected: Any, tolerance: float = TOLERANCE["float32"]) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        assert_close(a, e, tolerance, what=jax.tree_util.keystr(path))


def count(half: Callable[..., Any], *args: Any, name: str = "dot_general") -> int:
    """Equations of one primitive in a function, those that it holds included."""

    def within(jaxpr: Any) -> int:
        total = 0
        for eqn in jaxpr.eqns:
            total += eqn.primitive.name == name
            held = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda node: hasattr(node, "eqns"))
            total += sum(within(getattr(node, "jaxpr", node)) for node in held if hasattr(node, "eqns"))
        return total

    return within(jax.make_jaxpr(half)(*args).jaxpr)


def halves(fn: Callable[..., Any], params: Any, *inputs: Any) -> tuple[Any, Any, Any]:
    y, backward = split_vjp(fn, params, *inputs)
    return backward, y, backward(y)[1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_vjp(name: str) -> None:
    fn, *_ = FUNCTIONS[name]
    args = weights(), draw("x", (B, H))
    expected = quick_jit(lambda *args: by_vjp(fn, *args))(*args)
    assert np.abs(expected[1]).max() > 0.1 or name == "no step"
    assert_same(quick_jit(lambda *args: by_halves(fn, *args))(*args), expected)
    assert_same(by_three_programs(fn, *args), expected)


@pytest.mark.parametrize("name", ["plain", "scan"])
def test_values_are_those_of_vjp_equation_by_equation(name: str) -> None:
    fn, *_ = FUNCTIONS[name]
    args = weights(), draw("x", (B, H))
    assert_same(by_halves(fn, *args), by_vjp(fn, *args))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_gemm_is_in_one_half(name: str) -> None:
    fn, first, second = FUNCTIONS[name]
    backward, dy, backward_dw = halves(fn, weights(), draw("x", (B, H)))
    assert (count(backward, dy), count(backward_dw)) == (first, second)


def test_the_second_half_keeps_what_it_reads_and_no_copies() -> None:
    w, x, dy = draw("w", (H, H)), draw("x", (B, H)), draw("dy", (B, H))
    _, backward = split_vjp(lambda w, x: x @ w, w, x)
    assert {id(leaf) for leaf in jax.tree.leaves(backward)} == {id(w), id(x)}
    _, backward_dw = backward(dy)
    assert {id(leaf) for leaf in jax.tree.leaves(backward_dw)} == {id(x), id(dy)}


def test_nothing_is_kept_that_no_half_reads() -> None:
    fn = jax.custom_vjp(lambda w, x: w * x)
    fn.defvjp(lambda w, x: (w * x, (w, x, jnp.arange(99.0))), lambda saved, g: (g * saved[1], g * saved[0]))
    backward, _, backward_dw = halves(fn, draw("w", (B, H)), draw("x", (B, H)))
    assert [leaf.shape for leaf in jax.tree.leaves((backward, backward_dw))] == [(B, H)] * 4
    # Nor an operand of a barrier that the half does not read: here the weight.
    *_, backward_dw = halves(jax.checkpoint(lambda w, x: x @ w), draw("w", (H, H)), draw("x", (B, H)))
    assert [leaf.shape for leaf in jax.tree.leaves(backward_dw)] == [(B, H)] * 2


def test_a_half_makes_its_own_constants() -> None:
    """An array of threes that both halves read is not kept for the second."""

    def backward(_: None, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        threes = jnp.full(g.shape, 3.0)
        return jnp.sin(g) * threes, g * threes

    fn = jax.custom_vjp(lambda w, x: x)
    fn.defvjp(lambda w, x: (x, None), backward)
    w, x, dy = (draw(name, (B, H)) for name in ("w", "x", "dy"))
    _, backward_dw = split_vjp(fn, w, x)[1](dy)
    assert [id(leaf) for leaf in jax.tree.leaves(backward_dw)] == [id(dy)]
    assert_bitwise(backward_dw(), jnp.sin(dy) * 3.0)


def test_remat_is_not_undone() -> None:
    """Both halves hold the compiler off from taking what forward computed, and recompute but once."""
    fn = jax.checkpoint(lambda w, x: jnp.exp(jnp.tanh(w)) * jnp.sin(x * 2.0))
    backward, dy, backward_dw = halves(fn, draw("w", (B, H)), draw("x", (B, H)))
    assert [count(backward, dy, name=name) for name in ("tanh", "sin", "cos")] == [1, 0, 1]
    assert [count(backward_dw, name=name) for name in ("tanh", "sin", "cos")] == [0, 1, 0]
    assert [
        count(half, *args, name="optimization_barrier") for half, args in ((backward, [dy]), (backward_dw, []))
    ] == [
        1,
        1,
    ]
    # In one program with forward, too: each is computed twice.
    text = jax.jit(lambda *args: by_halves(fn, *args)).lower(draw("w", (B, H)), draw("x", (B, H))).as_text()
    assert text.count("stablehlo.tanh") == 2
    assert text.count("stablehlo.optimization_barrier") == 2


def test_scan_keeps_the_carried_gradient_for_the_second_half() -> None:
    *_, backward_dw = halves(scanned(lambda w, x: x @ w), weights(), draw("x", (B, H)))
    assert [leaf.shape for leaf in jax.tree.leaves(backward_dw)] == [(L, B, H), (L, B, H)]


# --- arguments and results


def test_pytrees_and_several_inputs() -> None:
    params = {"w": draw("w", (H, H)), "b": (draw("b", (H,)), None)}
    inputs = [draw("x", (B, H))], draw("z", (B, 1))

    def fn(p: Any, x: Any, z: Any) -> Any:
        return {"y": x[0] @ p["w"] + p["b"][0][None], "n": (x[0] * z).sum()}

    dy = {"y": draw("dy", (B, H)), "n": jnp.float32(2.0)}
    assert_same(by_halves(fn, params, *inputs, dy=dy), by_vjp(fn, params, *inputs, dy=dy))


def test_integers_and_keys_get_float0() -> None:
    def fn(p: Any, tokens: jax.Array, key: jax.Array) -> Any:
        rows = p["table"][tokens]
        return rows * jax.random.normal(key, rows.shape), tokens + p["step"]

    args = {"table": draw("t", (8, H)), "step": jnp.int32(3)}, jnp.array([1, 2, 1]), jax.random.key(0)
    for d_tokens in (np.zeros((3,), jax.dtypes.float0), jnp.zeros((3,), jnp.int32)):
        dy = draw("dy", (3, H)), d_tokens
        assert_same(by_halves(fn, *args, dy=dy), by_vjp(fn, *args, dy=dy))
    *_, backward_dw = split_vjp(fn, *args)[1](dy)
    assert backward_dw()["step"].dtype == jax.dtypes.float0


def test_no_inputs() -> None:
    w = draw("w", (H, H))
    y, backward = split_vjp(jnp.sin, w)
    dinputs, backward_dw = backward(y)
    assert dinputs == ()
    assert_bitwise(backward_dw(), y * jnp.cos(w))


def test_has_aux() -> None:
    w, x = draw("w", (H, H)), draw("x", (B, H))

    @jax.jit
    def run(w: jax.Array, x: jax.Array) -> Any:
        return split_vjp(lambda w, x: (x @ w, {"mean": x.mean()}), w, x, has_aux=True)

    y, backward, aux = run(w, x)
    assert_bitwise(aux["mean"], x.mean())
    (dx,), backward_dw = backward(y)
    assert_same((y, backward_dw(), (dx,)), by_halves(lambda w, x: x @ w, w, x, dy=y))


def test_backward_dw_may_be_called_again() -> None:
    *_, backward_dw = halves(layer, weights()[0], draw("x", (B, H)))
    assert_same(backward_dw(), backward_dw())


def test_errors_say_what_is_wanted() -> None:
    w, x = draw("w", (H, H)), draw("x", (B, H))
    _, backward = split_vjp(lambda w, x: {"y": x @ w, "i": jnp.arange(2)}, w, x)
    zero = np.zeros((2,), jax.dtypes.float0)
    with pytest.raises(
        ValueError, match=r"structure of the output, PyTreeDef\(\{'i': \*, 'y': \*\}\), got PyTreeDef\(\*\)"
    ):
        backward(x)
    with pytest.raises(ValueError, match=r"takes float32\[4,16\] for an output of type .*, got float32\[16\]"):
        backward({"y": x[0], "i": zero})
    with pytest.raises(ValueError, match=r"takes float32\[4,16\] .* got bfloat16\[4,16\]; convert or reshard"):
        backward({"y": x.astype(jnp.bfloat16), "i": zero})
    with pytest.raises(ValueError, match=r"takes float0\[2\] or int32\[2\] for .* int32\[2\], got float32\[2\]"):
        backward({"y": x, "i": jnp.zeros(2)})
    with without_type_checker(), pytest.raises(TypeError, match=r"takes a function of \(params, \*inputs\), got 3"):
        split_vjp(3, w, x)  # type: ignore[arg-type]


def test_an_output_gradient_with_another_sharding_is_refused() -> None:
    with use_mesh("explicit"):
        x = jax.sharding.reshard(draw("x", (B, H)), jax.P("data", None))
        _, backward = split_vjp(lambda w, x: x * w, jnp.float32(2.0), x)
        with pytest.raises(
            ValueError, match=r"takes float32\[4@data,16\] for .* got float32\[4,16\]; convert or reshard"
        ):
            backward(draw("dy", (B, H)))


# --- where the parts may live


def test_halves_traced_again_are_the_same_program() -> None:
    traces = []

    @jax.jit
    def run(half: Any, *args: Any) -> Any:
        traces.append(half)
        return half(*args)

    for _ in range(3):
        for fn in (over_layers(layer), scanned(jax.checkpoint(layer))):
            y, backward = split_vjp(fn, weights(), draw("x", (B, H)))
            run(run(backward, y)[1])
    assert len(traces) == 4


def constant(value: Any) -> Callable[..., Any]:
    """Its backward pass has the value in it."""
    fn = jax.custom_vjp(lambda w, x: x)
    fn.defvjp(lambda w, x: (x, None), lambda _, g: (g * value, g + value))
    return fn


@pytest.mark.parametrize(
    "other",
    [
        constant(-0.0),
        constant(1.0),
        constant(np.zeros((H, H), np.float32)),
        lambda w, x: constant(0.0)(w, constant(0.0)(w, x)),
        lambda w, x: x * 0.0 + w,
    ],
    ids=["minus zero", "one", "an array", "twice", "sum"],
)
def test_other_programs_are_not_taken_for_the_same(other: Callable[..., Any]) -> None:
    args = draw("w", (H, H)), draw("x", (H, H))
    one, same, another = (split_vjp(fn, *args)[1].func for fn in (constant(0.0), constant(0.0), other))
    assert (one == same, one == another) == (True, False)
    assert hash(one) == hash(same)
    assert one != "something else"


def test_stacked_by_one_scan_and_called_in_another() -> None:
    w, xs = weights(), draw("xs", (5, B, H))

    @jax.jit
    def run(w: jax.Array, xs: jax.Array) -> Any:
        def first(_: None, x: jax.Array) -> Any:
            y, backward = split_vjp(over_layers(layer), w, x)
            return None, (y, *backward(jnp.cos(y)))

        def second(total: jax.Array, backward_dw: Any) -> Any:
            return total + backward_dw(), None

        _, (y, (dx,), later) = jax.lax.scan(first, None, xs)
        return y, jax.lax.scan(second, jnp.zeros_like(w), later)[0], (dx,)

    assert_near(run(w, xs), by_vjp(lambda w, x: jax.vmap(over_layers(layer), (None, 0))(w, x), w, xs))


def test_carried_through_a_scan_that_replaces_it() -> None:
    """The weight gradient of a microbatch is computed in the step of the next."""
    w, xs = weights(), draw("xs", (5, B, H))

    @jax.jit
    def run(w: jax.Array, xs: jax.Array) -> jax.Array:
        def input_gradient(x: jax.Array) -> Any:
            y, backward = split_vjp(scanned(layer), w, x)
            return backward(jnp.cos(y))[1]

        def step(carry: Any, x: jax.Array) -> Any:
            total, backward_dw = carry
            return (total + backward_dw(), input_gradient(x)), None

        (total, last), _ = jax.lax.scan(step, (jnp.zeros_like(w), input_gradient(xs[0])), xs[1:])
        return total + last()

    expected = sum(by_vjp(scanned(layer), w, x)[1] for x in xs)
    assert_near(run(w, xs), expected)


def test_inside_shard_map() -> None:
    """A collective is no side effect: one that only a weight gradient needs waits with it."""
    mesh = make_mesh(ParallelConfig(data=8), axis_type="auto")
    w, x = draw("w", (H, H)), draw("x", (16, H))

    def body(method: Callable[..., Any]) -> Any:
        return jax.shard_map(
            lambda w, x: method(layer, w, x), mesh=mesh, in_specs=(jax.P(), jax.P("data")),
            out_specs=(jax.P("data"), jax.P(), (jax.P("data"),)),
        )  # fmt: skip

    found = []

    def counted(fn: Callable[..., Any], w: jax.Array, x: jax.Array) -> Any:
        y, backward = split_vjp(fn, w, x)
        dinputs, backward_dw = backward(jnp.cos(y))
        found.append((count(backward, y, name="psum_invariant"), count(backward_dw, name="psum_invariant")))
        return y, backward_dw(), dinputs

    expected = jax.jit(body(by_vjp))(w, x)
    assert_near(jax.jit(body(counted))(w, x), expected)
    assert found == [(0, 1)]


# --- side effects


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
@pytest.mark.parametrize("name", ["layers", "scan", "jit remat"])
def test_side_effects_happen_once_in_the_first_half(name: str, ordered: bool) -> None:
    log: list[float] = []

    @jax.custom_vjp
    def noted(w: jax.Array, x: jax.Array) -> jax.Array:
        return x @ w

    def backward(saved: Any, dy: jax.Array) -> Any:
        dw = saved[1].T @ dy
        io_callback(lambda value: log.append(float(value)), None, jnp.abs(dw).sum(), ordered=ordered)
        return dw, dy @ saved[0].T

    noted.defvjp(lambda w, x: (x @ w, (w, x)), backward)
    loops = {"layers": over_layers, "scan": scanned, "jit remat": lambda one: jax.jit(over_layers(jax.checkpoint(one)))}
    args, dy = (weights(), draw("x", (B, H))), draw("dy", (B, H))
    dw = by_vjp(over_layers(lambda w, x: x @ w), *args, dy=dy)[1]
    expected = [float(jnp.abs(layer).sum()) for layer in dw][::-1]

    _, split = split_vjp(loops[name](noted), *args)
    assert log == []
    _, backward_dw = call(split, dy)
    jax.effects_barrier()
    assert len(log) == L
    assert_close(*(values if ordered else sorted(values) for values in (log, expected)), TOLERANCE["float32"])
    for _ in range(2):
        assert_near(call(backward_dw), dw)
    jax.effects_barrier()
    assert len(log) == L


# --- layers of jax_te

LAYERS: dict[str, tuple[Callable[[], nnx.Module], int, int]] = {
    "Linear": (lambda: Linear(32, 64, rngs=nnx.Rngs(0)), 1, 1),
    "LayerNormMLP": (lambda: LayerNormMLP(32, 64, rngs=nnx.Rngs(0)), 2, 2),
    "TransformerLayer": (lambda: TransformerLayer(32, 64, 4, rngs=nnx.Rngs(0)), 4 + 4, 4),  # 4 of the attention core
}
RECIPES = [None, Float8CurrentScaling(), DelayedScaling(amax_history_len=3)]
RECIPE_NAMES = ["no recipe", "current", "delayed"]


def functional(model: nnx.Module) -> tuple[Callable[..., Any], Any]:
    graphdef, params, quantizers, rest = split_model(model)
    return lambda p, x: nnx.merge(graphdef, *p, rest)(x), (params, quantizers)


@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPE_NAMES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_input_gradient_gemms_first_and_weight_gradient_gemms_second(name: str, recipe: Any) -> None:
    build, first, second = LAYERS[name]
    with autocast(recipe):
        fn, params = functional(build())
        x = draw("x", (2, 16, 32))
        backward, dy, backward_dw = halves(fn, params, x)
        assert (count(backward, dy), count(backward_dw)) == (first, second)
        for half, args, gemms in ((backward, [dy], first), (backward_dw, [], second)):
            text = call.lower(half, *args).compile().as_text()
            assert len(re.findall(r"= \S+ dot\(", text)) == gemms


@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPE_NAMES)
def test_layers_equation_by_equation(recipe: Any) -> None:
    with autocast(recipe):
        fn, params = functional(LAYERS["LayerNormMLP"][0]())
        x = draw("x", (2, 16, 32))
        assert_same(by_halves(fn, params, x), by_vjp(fn, params, x))  # next quantizer states included


def test_layers_on_every_mesh(mesh_mode: str) -> None:
    with autocast(DelayedScaling(amax_history_len=3)):
        fn, params = functional(shard(LAYERS["TransformerLayer"][0]()))
        x = draw("x", (4, 16, 32))
        expected = quick_jit(lambda *args: by_vjp(fn, *args))(params, x)
        actual = by_three_programs(fn, params, x)
    # Reductions are fused into other programs here than there.
    assert_near(actual, expected, 8 * TOLERANCE["float32"])
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.sharding.is_equivalent_to(e.sharding, a.ndim)


def test_jit_with_shardings_keeps_them() -> None:
    with use_mesh("auto"):
        mesh = jax.sharding.get_mesh()
        of_input, of_output = (jax.NamedSharding(mesh, jax.P(axis, None)) for axis in ("data", "fsdp"))
        fn = jax.jit(lambda w, x: x @ w, in_shardings=(None, of_input), out_shardings=of_output)
        args = draw("w", (H, H)), jax.device_put(draw("x", (B, H)), of_input)
        backward, dy, backward_dw = halves(fn, *args)
        assert (count(backward, dy), count(backward_dw)) == (1, 1)
        (dx,), backward_dw = call(backward, draw("dy", (B, H)))
        assert dx.sharding.is_equivalent_to(of_input, 2)
        assert any(leaf.sharding.is_equivalent_to(of_output, 2) for leaf in jax.tree.leaves(backward_dw))
        assert_near(by_three_programs(fn, *args), by_vjp(lambda w, x: x @ w, *args))


# --- a pipeline schedule


def test_pipeline_passes_input_gradients_first_and_computes_weight_gradients_afterwards() -> None:
    """Two stages of a layer with bf16 weights, four microbatches; weight gradients are added up in fp32."""
    with autocast(Float8CurrentScaling()):
        stages = [functional(LayerNormMLP(32, 64, params_dtype=jnp.bfloat16, rngs=nnx.Rngs(i))) for i in range(2)]
        (fn0, p0), (fn1, p1) = stages
        xs, dys = (draw(name, (4, 2, 16, 32), jnp.bfloat16) for name in ("xs", "dys"))

        forward = [jax.jit(lambda p, x, fn=fn: split_vjp(fn, p, x)) for fn, _ in stages]
        accumulate = jax.jit(lambda total, later: jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, later()))

        saved = []
        for x in xs:  # forward through both stages
            h, backward0 = forward[0](p0, x)
            _, backward1 = forward[1](p1, h)
            saved.append((backward0, backward1))
        queues: tuple[deque[Any], deque[Any]] = deque(), deque()
        dxs = []
        for (backward0, backward1), dy in zip(saved, dys, strict=True):  # B, from the last stage to the first
            (dh,), later1 = call(backward1, dy)
            (dx,), later0 = call(backward0, dh)
            dxs.append(dx)
            queues[0].append(later0)
            queues[1].append(later1)
        totals = [jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), p) for p in (p0, p1)]
        for i, queue in enumerate(queues):  # W
            while queue:
                totals[i] = accumulate(totals[i], queue.popleft())

        @jax.jit
        def whole(p: Any, x: jax.Array, dy: jax.Array) -> Any:
            _, vjp = jax.vjp(lambda p0, p1, x: fn1(p1, fn0(p0, x)), *p, x)
            return vjp(dy)

        expected = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), (p0, p1))
        for x, dy, dx in zip(xs, dys, dxs, strict=True):
            *gradients, wanted = whole((p0, p1), x, dy)
            expected = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), expected, tuple(gradients))
            assert_close(dx, wanted, TOLERANCE["bfloat16"])
        assert_near(tuple(totals), expected, TOLERANCE["bfloat16"])
