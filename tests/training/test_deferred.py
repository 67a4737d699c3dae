"""deferred_vjp: gradients of jax.vjp, no kernel gradient's GEMM in the first half and only these in the second."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.layers import LayerNormMLP, Linear, LoRA, TransformerLayer, quantize_parameters
from jax_te.models import Execution, GPTModel
from jax_te.quantize import as_float32, with_max_gradients
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, autocast
from jax_te.remat import remat
from jax_te.training import FirstHalf, deferred_vjp, split_model
from jax_te.training.differentiation import vjp_of_model
from jax_te.training.kernel_gradients import KernelGradients
from tests.support.meshes import MODES, shard, use_mesh
from tests.support.numerics import NO_DROPOUT, TOLERANCE, assert_bitwise, assert_close, draw, quick_jit
from tests.support.states import merging

LAYERS: dict[str, tuple[Callable[[], nnx.Module], int, int]] = {
    "Linear": (lambda: Linear(32, 64, rngs=nnx.Rngs(0)), 1, 1),
    "LayerNormMLP": (lambda: LayerNormMLP(32, 64, rngs=nnx.Rngs(0)), 2, 2),
    "TransformerLayer": (
        lambda: TransformerLayer(32, 64, 4, **NO_DROPOUT, rngs=nnx.Rngs(0)),
        4 + 4,
        4,
    ),  # 4 of the attention core
}
RECIPES = [None, Float8CurrentScaling(), DelayedScaling(amax_history_len=3)]
RECIPE_NAMES = ["no recipe", "current", "delayed"]
MESHES = MODES[1:]
Call = Callable[..., Any]


def apply(model: Any, x: jax.Array) -> Any:
    return model(x)


@quick_jit
def call(half: Any, *args: Any) -> Any:
    return half(*args)


def halves(
    model: nnx.Module, x: jax.Array, fn: Call = apply, dy: Any = None, **options: Any
) -> tuple[Any, Any, FirstHalf]:
    """``backward``, the output's gradient and the first half, from two programs."""
    graphdef, *state = split_model(model)

    def forward(state: Any, x: jax.Array) -> Any:
        return deferred_vjp(fn, nnx.merge(graphdef, *state), x, **options)

    y, backward = quick_jit(forward)(state, x)
    dy = jnp.cos(y) if dy is None else jnp.full_like(y, dy)
    return backward, dy, call(backward, dy)


def by_halves(model: nnx.Module, x: jax.Array, fn: Call = apply, **options: Any) -> Any:
    """Gradients of parameters, states and input, by three programs."""
    *_, first = halves(model, x, fn, **options)
    later = call(first.backward_dw)
    assert not {path for path, _ in nnx.to_flat_state(first.params)} & {path for path, _ in nnx.to_flat_state(later)}
    return plain(nnx.merge_state(first.params, later)), plain(first.quantizers), first.inputs[0]


def by_vjp(model: nnx.Module, x: jax.Array, fn: Call = apply, dy: Any = None) -> Any:
    graphdef, params, quantizers, rest = split_model(model)

    def run(params: Any, quantizers: Any, x: jax.Array) -> Any:
        return jax.vjp(lambda p, q, x: fn(nnx.merge(graphdef, p, q, rest), x), params, quantizers, x)

    # Two programs, like the halves: one program would fuse sums in another order, and a last bit can change a rounding.
    y, vjp = quick_jit(run)(params, with_max_gradients(quantizers), x)
    params, quantizers, dx = call(vjp, jnp.cos(y) if dy is None else jnp.full_like(y, dy))
    return plain(params), plain(as_float32(quantizers)), dx


def plain(state: Any) -> Any:
    return {".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(state)}


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        assert_bitwise(a, e, what=jax.tree_util.keystr(path))


def assert_near(actual: Any, expected: Any, tolerance: float) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert_close(a, e, tolerance, what=jax.tree_util.keystr(path))


def count(half: Call, *args: Any, name: str = "dot_general") -> int:
    """Equations of one primitive in a function, those that it holds included."""

    def within(jaxpr: Any) -> int:
        total = 0
        for eqn in jaxpr.eqns:
            total += eqn.primitive.name == name
            held = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda node: hasattr(node, "eqns"))
            total += sum(within(getattr(node, "jaxpr", node)) for node in held if hasattr(node, "eqns"))
        return total

    return within(jax.make_jaxpr(half)(*args).jaxpr)


@pytest.mark.costly("LayerNormMLP-current")
@pytest.mark.wide("Linear-no recipe", "LayerNormMLP-current")
@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPE_NAMES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_have_input_gradient_gemms_first_and_weight_gradient_gemms_second(name: str, recipe: Any) -> None:
    build, first, second = LAYERS[name]
    with autocast(recipe):
        backward, dy, half = halves(build(), draw("x", (2, 16, 32)))
        assert (count(backward, dy), count(half.backward_dw)) == (first, second)
        for program, args, gemms in ((backward, [dy], first), (half.backward_dw, [], second)):
            text = call.lower(program, *args).compile().as_text()
            assert len(re.findall(r"= \S+ dot\(", text)) == gemms


@pytest.mark.slow
@pytest.mark.wide("delayed")
@pytest.mark.parametrize(
    ("recipe", "layer"),
    [
        *((recipe, "TransformerLayer") for recipe in RECIPES),
        (MXFP8BlockScaling(), "Linear"),
        (NVFP4BlockScaling(), "Linear"),
    ],
    ids=[*RECIPE_NAMES, "mxfp8", "nvfp4"],
)
def test_values_are_those_of_vjp(recipe: Any, layer: str) -> None:
    with autocast(recipe):
        model, x = LAYERS[layer][0](), draw("x", (2, 32, 32))
        # Next quantizer states included. Only sums of biases may differ: jax 0.10 fuses them in another order.
        assert_near(by_halves(model, x), by_vjp(model, x), 8 * TOLERANCE["float32"])


def mesh_cases() -> list[Any]:
    """Every mesh, recipe and layer; one of the six on each kind of mesh runs by default."""
    quick = {("auto", "delayed", "LayerNormMLP"), ("explicit", "current", "LayerNormMLP")}
    cases = itertools.product(MESHES, zip(RECIPE_NAMES, RECIPES, strict=True), ("LayerNormMLP", "TransformerLayer"))
    return [
        pytest.param(
            mode,
            recipe,
            layer,
            id=f"{mode}-{name}-{layer}",
            marks=[] if (mode, name, layer) in quick else pytest.mark.slow,
        )
        for mode, (name, recipe), layer in cases
    ]


@pytest.mark.costly(slow=["auto-delayed-LayerNormMLP"])
@pytest.mark.parametrize(("mode", "recipe", "layer"), mesh_cases())
def test_on_every_mesh(mode: str, recipe: Any, layer: str) -> None:
    with use_mesh(mode), autocast(recipe):
        model, x = shard(LAYERS[layer][0]()), draw("x", (4, 16, 32))
        actual, expected = by_halves(model, x), by_vjp(model, x)
    # Reductions are fused into other programs here than there.
    assert_near(actual, expected, 8 * TOLERANCE["float32"])
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.sharding.is_equivalent_to(e.sharding, a.ndim)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_where_the_compiler_partitions(mode: str) -> None:
    """NVFP4 has a scale of the whole tensor, so no device runs the GEMMs by itself."""

    def fn(model: Any, x: jax.Array) -> jax.Array:
        # Linear in y, so that the gradient to quantize is the same in all programs: a last bit's difference before the
        # rounding to FP4 is large behind it.
        return jnp.sum(model(x) * jnp.cos(jnp.arange(4.0 * 16 * 64)).reshape(4, 16, 64))

    with use_mesh(mode), autocast(NVFP4BlockScaling()):
        model, x = shard(Linear(32, 64, rngs=nnx.Rngs(0))), draw("x", (4, 16, 32))
        assert_near(by_halves(model, x, fn, dy=1.0), by_vjp(model, x, fn, dy=1.0), 8 * TOLERANCE["float32"])


def test_the_second_half_keeps_operands_and_no_gradient_of_their_size() -> None:
    with autocast(Float8CurrentScaling()):
        *_, half = halves(Linear(32, 64, rngs=nnx.Rngs(0)), draw("x", (2, 16, 32), jnp.bfloat16))
    kept = sorted((leaf.size, leaf.dtype.name) for leaf in jax.tree.leaves(half.backward_dw) if leaf.ndim)
    assert kept == [(2 * 16 * 32, "float8_e4m3fn"), (2 * 16 * 64, "float8_e5m2")]
    assert sorted(plain(half.params)) == ["bias"]


def model_cases() -> list[Any]:
    """Every granularity, stack and recipe; one of the twelve is not slow."""
    quick = {("full", True, "no recipe")}
    cases = itertools.product((None, "full"), (True, False), zip(RECIPE_NAMES, RECIPES, strict=True))
    return [
        pytest.param(
            granularity,
            scan,
            recipe,
            id=f"{granularity}-{'scanned' if scan else 'unrolled'}-{name}",
            marks=[] if (granularity, scan, name) in quick else pytest.mark.slow,
        )
        for granularity, scan, (name, recipe) in cases
    ]


@pytest.mark.costly("full-scanned-no recipe")
@pytest.mark.parametrize(("granularity", "scan", "recipe"), model_cases())
def test_models(granularity: Any, scan: bool, recipe: Any) -> None:
    """A stack of layers, in a loop or not, recomputed or not; embeddings and head do not wait."""
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, **(full if granularity else {}))
    with autocast(recipe):
        model = GPTModel(
            config, vocab_size=48, max_sequence_length=16, execution=Execution(scan_layers=scan), rngs=nnx.Rngs(0)
        )
        tokens = jnp.arange(32).reshape(2, 16) % 48

        def fn(model: Any, scale: jax.Array) -> jax.Array:
            return model.loss(tokens, tokens) * scale

        scale = jnp.float32(2.0)
        *_, half = halves(model, scale, fn)
        assert count(half.backward_dw) == 2 * 4
        assert_near(by_halves(model, scale, fn), by_vjp(model, scale, fn), 8 * TOLERANCE["float32"])


@pytest.mark.costly
def test_stacked_layers_in_a_loop() -> None:
    """Kernels that are stacked for good: the loop takes a slice of each."""

    @nnx.vmap(in_axes=0, out_axes=0)
    def build(key: jax.Array) -> Linear:
        return Linear(32, 32, rngs=nnx.Rngs(key))

    def fn(model: Any, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(model)
        return jax.lax.scan(lambda x, state: (jnp.tanh(nnx.merge(graphdef, state)(x)), None), x, state)[0]

    with autocast(Float8CurrentScaling()):
        model, x = build(jax.random.split(jax.random.key(0), 3)), draw("x", (16, 32))
        *_, half = halves(model, x, fn)
        assert plain(half.backward_dw())["kernel"].shape == (3, 32, 32)
        assert_same(by_halves(model, x, fn), by_vjp(model, x, fn))


@pytest.mark.costly
def test_a_layer_that_is_called_twice_does_not_wait() -> None:
    def fn(model: Any, x: jax.Array) -> jax.Array:
        return model(jnp.tanh(model(x)))

    with autocast(DelayedScaling(amax_history_len=3)):
        model, x = Linear(32, 32, rngs=nnx.Rngs(0)), draw("x", (16, 32))
        assert_same(by_halves(model, x, fn), by_vjp(model, x, fn))
        assert plain(halves(model, x, fn)[2].backward_dw()) == {}


@pytest.mark.costly("map with remat", "scan")
@pytest.mark.parametrize(
    "repeat",
    [
        lambda model, x: jax.lax.scan(lambda x, _: (jnp.tanh(model(x)), None), x, length=3)[0],
        lambda model, x: jax.jit(lambda x: jax.lax.map(jax.checkpoint(model), x))(x),
        lambda model, x: jax.vmap(model)(x),
    ],
    ids=["scan", "map with remat", "vmap"],
)
def test_a_layer_that_reads_its_kernel_again_and_again_does_not_wait(repeat: Any) -> None:
    """JAX would add up the operands of several GEMMs, of which the product is not the sum of theirs."""
    model, x = Linear(32, 32, rngs=nnx.Rngs(0)), draw("x", (2, 16, 32))
    assert plain(halves(model, x, repeat)[2].backward_dw()) == {}
    assert_near(by_halves(model, x, repeat), by_vjp(model, x, repeat), 8 * TOLERANCE["float32"])


@pytest.mark.slow
def test_slices_of_stacked_kernels_wait() -> None:
    """One for each step of a loop, or for each of a map; but not if the same one is also mapped."""
    build = nnx.vmap(lambda key: Linear(32, 32, rngs=nnx.Rngs(key)), in_axes=0, out_axes=0)
    model, x = build(jax.random.split(jax.random.key(0), 3)), draw("x", (3, 2, 16, 32))

    def by_scan(call: Any, model: Any, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(model)
        return jax.lax.scan(lambda _, each: (None, call(nnx.merge(graphdef, each[0]), each[1])), None, (state, x))[1]

    def by_map(model: Any, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(model)
        return jax.vmap(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)

    in_order = partial(by_scan, lambda layer, x: layer(x))
    mapped = partial(by_scan, lambda layer, x: jax.vmap(layer)(x))
    for fn, deferred in ((in_order, {"kernel"}), (by_map, {"kernel"}), (mapped, set())):
        assert plain(halves(model, x, fn)[2].backward_dw()).keys() == deferred
        assert_near(by_halves(model, x, fn), by_vjp(model, x, fn), 8 * TOLERANCE["float32"])


def test_frozen_kernels_and_layers_that_are_not_called() -> None:
    class Two(nnx.Module):
        def __init__(self) -> None:
            self.used = LoRA(Linear(32, 32, rngs=nnx.Rngs(0)), rank=16, rngs=nnx.Rngs(2))
            self.idle = Linear(32, 32, rngs=nnx.Rngs(1))

    model, x = Two(), draw("x", (16, 32))
    assert_same(by_halves(model, x, lambda m, x: m.used(x)), by_vjp(model, x, lambda m, x: m.used(x)))


def test_remat() -> None:
    def fn(model: Any, x: jax.Array) -> jax.Array:
        return remat(model, x)

    model, x = LAYERS["LayerNormMLP"][0](), draw("x", (2, 16, 32))
    assert count(halves(model, x, fn)[2].backward_dw) == 2
    assert_same(by_halves(model, x, fn), by_vjp(model, x, fn))


def test_gradients_in_fp32_and_kernels_stored_quantized() -> None:
    x = draw("x", (16, 32), jnp.bfloat16)

    def later(model: nnx.Module, **options: Any) -> Any:
        return plain(call(halves(model, x, **options)[2].backward_dw))["kernel"]

    with autocast(Float8CurrentScaling()):
        model = Linear(32, 64, params_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        half, wide = later(model), later(model, wgrad_dtype=jnp.float32)
        assert (half.dtype, wide.dtype) == (jnp.bfloat16, jnp.float32)
        assert_bitwise(half, wide.astype(jnp.bfloat16))
        assert_bitwise(later(quantize_parameters(model)), wide)


def test_save_original_input() -> None:
    with autocast(Float8CurrentScaling()):
        model, x = Linear(32, 64, rngs=nnx.Rngs(0)), draw("x", (16, 32))
        model.save_original_input = True
        assert_same(by_halves(model, x), by_vjp(model, x))


def test_has_aux_and_backward_dw_again() -> None:
    model, x = LAYERS["Linear"][0](), draw("x", (16, 32))
    y, backward, aux = deferred_vjp(lambda m, x: (m(x), {"mean": x.mean()}), model, x, has_aux=True)
    assert_bitwise(aux["mean"], x.mean())
    later = backward(y).backward_dw
    assert_same(plain(later()), plain(later()))


@pytest.mark.costly("current", slow=("delayed",))
@pytest.mark.parametrize("recipe", RECIPES, ids=RECIPE_NAMES)
def test_optax_takes_the_gradients_with_the_parameters(recipe: Any) -> None:
    with autocast(recipe):
        model = LAYERS["LayerNormMLP"][0]()
        params, half = nnx.state(model, nnx.Param), halves(model, draw("x", (16, 32)))[2]
        grads, tx = nnx.merge_state(half.params, half.backward_dw()), optax.sgd(0.5)
        updates, _ = tx.update(grads, tx.init(params), params)
        assert_same(jax.tree.map(lambda p, g: -0.5 * g, params, grads), updates)
        assert jax.tree.structure(grads) == jax.tree.structure(params)


def test_gradients_of_gradients_are_refused() -> None:
    later = halves(LAYERS["Linear"][0](), draw("x", (16, 32)))[2].backward_dw
    with pytest.raises(TypeError, match="cannot be differentiated again"):
        jax.grad(lambda later: sum(map(jnp.sum, jax.tree.leaves(later()))))(later)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["no mesh", *MESHES])
def test_stacked_by_one_scan_and_carried_by_another(mode: str) -> None:
    """Microbatches: the kernel gradient of each in a loop of its own, or in the step of the next microbatch."""
    with use_mesh(mode), autocast(Float8CurrentScaling()):
        graphdef, *state = split_model(shard(LAYERS["Linear"][0]()))
        xs = draw("xs", (3, 4, 16, 32))

        def later(state: Any, x: jax.Array) -> Any:
            y, backward = deferred_vjp(apply, nnx.merge(graphdef, *state), x)
            return backward(jnp.cos(y)).backward_dw

        def add(total: Any, grads: Any) -> Any:
            return jax.tree.map(jnp.add, total, plain(grads))

        @quick_jit
        def stacked(state: Any, xs: jax.Array) -> Any:
            _, queue = jax.lax.scan(lambda _, x: (None, later(state, x)), None, xs)
            start = jax.tree.map(jnp.zeros_like, plain(later(state, xs[0])()))
            return jax.lax.scan(lambda total, half: (add(total, half()), None), start, queue)[0]

        @quick_jit
        def carried(state: Any, xs: jax.Array) -> Any:
            def step(carry: Any, x: jax.Array) -> Any:
                total, half = carry
                return (add(total, half()), later(state, x)), None

            first = later(state, xs[0])
            start = jax.tree.map(jnp.zeros_like, plain(first()))
            (total, last), _ = jax.lax.scan(step, (start, first), xs[1:])
            return add(total, last())

        expected = jax.tree.map(lambda *grads: sum(grads), *[plain(call(later(state, x))) for x in xs])
        assert_near(stacked(state, xs), expected, TOLERANCE["float32"])
        assert_near(carried(state, xs), expected, TOLERANCE["float32"])


@pytest.mark.slow
def test_pipeline_passes_input_gradients_first_and_computes_weight_gradients_afterwards() -> None:
    """Two stages of a layer with bf16 weights, four microbatches; weight gradients are added up in fp32."""
    with autocast(Float8CurrentScaling()):
        stages = [LayerNormMLP(32, 64, params_dtype=jnp.bfloat16, rngs=nnx.Rngs(i)) for i in range(2)]
        (def0, *p0), (def1, *p1) = map(split_model, stages)
        xs, dys = (draw(name, (4, 2, 16, 32), jnp.bfloat16) for name in ("xs", "dys"))

        def stage(graphdef: Any) -> Any:
            return jax.jit(lambda p, x: deferred_vjp(apply, nnx.merge(graphdef, *p), x, wgrad_dtype=jnp.float32))

        forward0, forward1 = stage(def0), stage(def1)
        saved = []
        for x in xs:  # forward through both stages
            h, backward0 = forward0(p0, x)
            saved.append((backward0, forward1(p1, h)[1]))
        queues: tuple[deque[Any], deque[Any]] = deque(), deque()
        dxs = []
        for (backward0, backward1), dy in zip(saved, dys, strict=True):  # B, from the last stage to the first
            half1 = call(backward1, dy)
            half0 = call(backward0, half1.inputs[0])
            dxs.append(half0.inputs[0])
            queues[0].append(half0.backward_dw)
            queues[1].append(half1.backward_dw)
        totals = [jax.tree.map(lambda *grads: sum(grads), *[plain(call(later)) for later in q]) for q in queues]  # W

        @jax.jit
        def whole(p: Any, x: jax.Array, dy: jax.Array) -> Any:
            def run(p0: Any, p1: Any, x: jax.Array) -> jax.Array:
                return nnx.merge(def1, *merging(p1))(nnx.merge(def0, *merging(p0))(x))

            return jax.vjp(run, *p, x)[1](dy)

        expected: list[Any] = [[], []]
        for x, dy, dx in zip(xs, dys, dxs, strict=True):
            *gradients, wanted = whole((p0, p1), x, dy)
            for grads, (params, *_) in zip(expected, gradients, strict=True):
                grads.append({name: plain(params)[name].astype(jnp.float32) for name in ("wi_kernel", "wo_kernel")})
            assert_close(dx, wanted, TOLERANCE["bfloat16"])
        sums = [jax.tree.map(lambda *grads: sum(grads), *grads) for grads in expected]
        assert_near(totals, sums, TOLERANCE["bfloat16"])


def test_a_quantized_kernel_that_is_used_twice_has_its_gradient_at_once():
    with autocast(Float8CurrentScaling()):
        layer = quantize_parameters(Linear(16, 16, rngs=nnx.Rngs(0)))
        x = jax.random.normal(jax.random.key(1), (16, 16))
        y, backward = deferred_vjp(lambda model, x: model(model(x)), layer, x)
        half = backward(jnp.ones_like(y))
        assert sorted(half.params) == ["bias", "kernel"]
        _, plain = vjp_of_model(lambda model, x: model(model(x)), layer, x, KernelGradients())
        np.testing.assert_array_equal(half.params["kernel"][...], plain(jnp.ones_like(y))[0]["kernel"][...])
        assert not jax.tree.leaves(half.backward_dw())


@pytest.mark.parametrize(
    "fn",
    [
        lambda model, x: model(x) + jnp.sum(model.kernel[...] ** 2),
        lambda model, x: jnp.tanh(model(x) + x @ model.kernel[...].T),
        lambda model, x: model(x @ model.kernel[...]),
        lambda model, x: remat(lambda model, x: model(x) * jnp.max(model.kernel[...]), model, x),
    ],
    ids=["penalty", "tied", "before", "in remat"],
)
def test_a_kernel_that_is_also_read_otherwise_has_its_gradient_at_once(fn: Call) -> None:
    layer, x = Linear(16, 16, rngs=nnx.Rngs(0)), draw("x", (8, 16))
    _, _, half = halves(layer, x, fn)
    assert not jax.tree.leaves(half.backward_dw())
    assert_close(half.params["kernel"][...], by_vjp(layer, x, fn)[0]["kernel"], TOLERANCE["float32"])


def test_a_kernel_whose_other_use_has_no_gradient_is_deferred() -> None:
    def fn(model: Any, x: jax.Array) -> Any:
        return model(x) * jax.lax.stop_gradient(jnp.max(model.kernel[...])), {"norm": jnp.sum(model.kernel[...])}

    y, backward, _ = deferred_vjp(fn, Linear(16, 16, rngs=nnx.Rngs(0)), draw("x", (8, 16)), has_aux=True)
    half = backward(jnp.ones_like(y))
    assert sorted(half.backward_dw()) == ["kernel"]
    assert sorted(half.params) == ["bias"]
