"""Linear layers of several groups: each group has what `dense` gives its rows alone."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.errors import BackendUnavailableError, QuantizerStateError
from jax_te.ops import (
    LinearOptions,
    RowGroups,
    dense,
    explain_backend,
    group_alignment,
    grouped_dense,
    quantize_kernel,
    row_bound,
)
from jax_te.ops.moe import permute, row_groups
from jax_te.ops.pallas import grouped as pallas_grouped
from jax_te.quantize import (
    BlockQuantizer,
    TensorQuantizer,
    frozen_scales,
    init_gemm_state,
    observe_quantization,
    quantization_statistics,
    with_max_gradients,
)
from jax_te.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from tests.support.meshes import MODES, use_mesh
from tests.support.numerics import (
    TOLERANCE,
    assert_bitwise,
    assert_close,
    assert_same_rounding,
    compiled_text,
    draw,
    equations,
    quick_jit,
    with_vjp,
)
from tests.support.states import merging


def _mixed(role):
    return TensorQuantizer(dtype=jnp.float8_e4m3fn) if role != "kernel" else BlockQuantizer(dtype=jnp.float8_e4m3fn)


RECIPES = {
    "high precision": None,
    "delayed": DelayedScaling(amax_history_len=2),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "custom": CustomRecipe(qfactory=_mixed),
}
E, K, N = 3, 32, 64
SIZES = (20, 0, 37)


def layout(sizes=SIZES, alignment=1, more=3):
    rows = row_bound(sum(sizes) + more, len(sizes), alignment=alignment)
    return RowGroups(sizes=jnp.asarray(np.array(sizes, np.int32)), rows=rows, alignment=alignment)


def arrays(groups, dtype=jnp.bfloat16, out=(N,)):
    x, g = draw("x", (groups.rows, K), dtype), draw("g", (groups.rows, *out), dtype)
    # Experts of different magnitudes: another's scale or amax would show.
    size = jnp.asarray(4.0 ** np.arange(groups.count), jnp.float32)
    kernel = draw("kernel", (groups.count, K, *out)) * size.reshape(-1, *(1,) * (1 + len(out)))
    of_rows = jnp.minimum(groups.of_rows(), groups.count - 1)
    x = x * size[of_rows][:, None].astype(dtype)
    return x, kernel, draw("bias", (groups.count, *out)), g


@functools.cache
def program(recipe, rows, alignment, options):
    """Output and gradients as one program, of which sizes are arguments: tests with the same shapes share it."""

    def call(x, kernel, bias, state, sizes):
        groups = RowGroups(sizes=sizes, rows=rows, alignment=alignment)
        more = {"recipe": recipe, "state": state, "options": options, "backend": "xla"}
        return grouped_dense(x, kernel, bias, groups=groups, **more)

    return quick_jit(lambda args, sizes, g: with_vjp(lambda *args: call(*args, sizes), args, g))


def run(groups, recipe, args, state, options=LinearOptions()):  # noqa: B008  # immutable
    x, kernel, bias, g = args
    return program(recipe, groups.rows, groups.alignment, options)((x, kernel, bias, state), groups.sizes, g)


@functools.cache
def program_of_dense(recipe):
    return quick_jit(
        functools.partial(
            with_vjp, lambda x, kernel, bias, state: dense(x, kernel, bias, recipe=recipe, state=state, backend="xla")
        )
    )


def alone(recipe, args, state, rows, group):
    x, kernel, bias, g = args
    return program_of_dense(recipe)((x[rows], kernel[group], bias[group], state), g[rows])


def rows_of(groups, group):
    start = int(groups.starts[group])
    return slice(start, start + int(groups.sizes[group]))


@pytest.mark.costly(slow=("delayed",))
@pytest.mark.parametrize("name", ["high precision", "delayed"])
def test_padding_that_is_promised_to_be_zeros_is_left_alone(name):
    """Where it holds zeros all values are the same; where it does not, it is not made zeros."""
    recipe, state = RECIPES[name], init_gemm_state(RECIPES[name], groups=E)
    groups = layout(alignment=group_alignment(recipe))
    promised, padding = dataclasses.replace(groups, zero_padding=True), groups.of_rows() == E
    x, kernel, _, g = arrays(groups)
    clean = [jnp.where(padding[:, None], 0, rows).astype(rows.dtype) for rows in (x, g)]

    def call(groups, x, g):
        fn = lambda *args: grouped_dense(args[0], args[1], groups=groups, recipe=recipe, state=args[2], backend="xla")  # noqa: E731
        return jax.jit(lambda *args: with_vjp(fn, args, g))(x, kernel, state)

    for mine, expected in zip(*map(jax.tree.leaves, (call(promised, *clean), call(groups, *clean))), strict=True):
        assert_bitwise(mine, expected)
    assert np.asarray(call(promised, x, g)[0])[np.asarray(padding)].any()


T, TOPK, WIDTH, OUT = 40, 2, 48, 32


def permuted(recipe):
    """Tokens, kernels, states and gradients of a call, and the permutation of its tokens."""
    experts = jax.random.randint(jax.random.key(0), (T, TOPK), 0, E + 1)  # some of no expert: dropped
    plan = permute.plan_permutation(experts, E, alignment=group_alignment(recipe))
    args = draw("tokens", (T, WIDTH), jnp.bfloat16), draw("kernel", (E, WIDTH, OUT)), init_gemm_state(recipe, groups=E)
    return args, plan, draw("g", (plan.groups.rows, OUT), jnp.bfloat16)


def of_tokens(recipe, plan, tokens, kernel, state):
    return on_a_mesh(tokens, kernel, dataclasses.replace(plan.groups, permutation=plan), recipe, state)


def of_rows(recipe, plan, tokens, kernel, state):
    return on_a_mesh(permute.permute(tokens, plan), kernel, plan.groups, recipe, state)


def on_a_mesh(x, kernel, groups, recipe, state):
    options = LinearOptions(kernel_axes=("expert", "fsdp", "ffn"), out_axes=(None, "ffn"))
    return grouped_dense(x, kernel, groups=groups, recipe=recipe, state=state, options=options, backend="xla")


RECIPES_OF_ROWS = {
    **{name: RECIPES[name] for name in ("high precision", "delayed", "block")},
    "wgrad in high precision": DelayedScaling(amax_history_len=2, override_linear_precision=(False, False, True)),
}


@pytest.mark.costly("delayed-auto", slow=("high precision-no mesh", "block-explicit"))
@pytest.mark.wide
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RECIPES_OF_ROWS)
def test_rows_of_tokens_give_the_same_bits(name, mode):
    """Of tokens and the permutation, by which forward and backward make the rows."""
    args, plan, g = permuted(recipe := RECIPES_OF_ROWS[name])
    with use_mesh(mode):
        mine, expected = (
            jax.jit(lambda args, g, fn=fn: with_vjp(functools.partial(fn, recipe, plan), args, g))(args, g)
            for fn in (of_tokens, of_rows)
        )
    for one, two in zip(*map(jax.tree.leaves, (mine, expected)), strict=True):
        assert_bitwise(one, two)


@pytest.mark.costly("delayed", slow=("block", "wgrad in high precision"))
@pytest.mark.parametrize("name", RECIPES_OF_ROWS)
def test_rows_of_tokens_are_kept_in_their_quantized_form_alone(name):
    """Unquantized they are made again, of the tokens that the caller has."""
    args, plan, _ = permuted(recipe := RECIPES_OF_ROWS[name])

    def kept(fn):
        """Bytes of the arrays of rows that backward keeps."""
        _, backward = jax.vjp(lambda *args: fn(recipe, plan, *merging(args)), *args)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(backward) if leaf.size == elements)

    elements = plan.groups.rows * WIDTH
    quantized = elements if name in ("delayed", "block") else 0
    assert (kept(of_tokens), kept(of_rows)) == (quantized, quantized or 2 * elements)


def test_backward_makes_rows_of_tokens_behind_their_gradient():
    """So that no compiler keeps those of forward, and memory has room for one array of rows at a time."""
    args, plan, g = permuted(None)
    program = jax.make_jaxpr(lambda *args: jax.vjp(functools.partial(of_tokens, None, plan), *args)[1](g))(*args)
    (barrier,) = (each for each in equations(program.jaxpr) if each.primitive.name == "optimization_barrier")
    assert {each.aval.shape for each in barrier.invars} == {(T, WIDTH)}
    assert len(barrier.invars) == 2

    def products(argnums):
        """Number of loops over tiles in the program of these gradients."""
        gradients = jax.grad(lambda *args: jnp.sum(of_tokens(None, plan, *args, None).astype(jnp.float32)), argnums)
        return compiled_text(gradients, *args[:2]).count(" while(")

    # The gradient that the rows wait for is not computed where nothing takes it.
    assert (products((0, 1)), products((0,)), products((1,))) == (2, 1, 1)


def _only(*roles):
    return CustomRecipe(qfactory=lambda role: TensorQuantizer(dtype=jnp.float8_e4m3fn) if role in roles else None)


@pytest.mark.costly("x")
@pytest.mark.parametrize("recipe", [_only("x"), _only("kernel", "grad")], ids=["x", "kernel and grad"])
def test_on_hopper_a_gemm_of_one_quantized_operand_runs_in_xla(recipe, monkeypatch):
    """Its kernels multiply operands of one kind; the GEMM is dense's, of the quantized values in the compute dtype."""
    for module in (pallas_grouped, row_groups):
        monkeypatch.setattr(module, "supported", lambda: (True, "as on a Hopper GPU"))
    groups = layout(alignment=group_alignment(recipe))
    assert groups.alignment == 128
    args = arrays(groups)
    y, (dx, dkernel, _, _) = run(groups, recipe, args, None)
    for group in (0, 2):
        rows = rows_of(groups, group)
        expected, (dx_own, dkernel_own, _, _) = alone(recipe, args, None, rows, group)
        assert_close(y[rows], expected, TOLERANCE["bfloat16"], what="y")
        assert_close(dx[rows], dx_own, TOLERANCE["bfloat16"], what="dx")
        assert_close(dkernel[group], dkernel_own, TOLERANCE["float32"], what="dkernel")


@pytest.mark.costly("block-True", slow=["nvfp4-True", "custom-False", "delayed-True", "mxfp8-False", "current-False"])
@pytest.mark.wide
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_a_group_is_dense_on_its_rows(name, aligned):
    recipe = RECIPES[name]
    groups = layout(alignment=group_alignment(recipe) if aligned else 1)
    args = arrays(groups)
    y, (dx, dkernel, dbias, next_state) = run(groups, recipe, args, init_gemm_state(recipe, groups=E))
    # NVFP4's products are sums of values that a rotation has mixed: nothing of them is exact.
    close = assert_same_rounding if name == "nvfp4" else assert_close
    for group in range(E):
        rows = rows_of(groups, group)
        own_y, own = alone(recipe, args, init_gemm_state(recipe), rows, group)
        if own_y.size:
            close(y[rows], own_y, TOLERANCE["bfloat16"], what="y")
            close(dx[rows], own[0], TOLERANCE["bfloat16"], what="dx")
            close(dkernel[group], own[1], TOLERANCE["float32"], what="dkernel")
        else:
            assert not np.asarray(dkernel[group]).any()
        assert_close(dbias[group], own[2], TOLERANCE["float32"], what="dbias")
        for mine, expected in zip(jax.tree.leaves(next_state), jax.tree.leaves(own[3]), strict=True):
            assert_bitwise(mine[group], expected, what="state")
    padding = np.asarray(groups.of_rows()) == E
    assert padding.any()
    assert not np.asarray(y)[padding].any()
    assert not np.asarray(dx)[padding].any()


@pytest.mark.costly(slow=("nvfp4", "mxfp8", "delayed", "current", "high precision", "block"))
@pytest.mark.parametrize("name", RECIPES)
def test_one_group_is_dense_bitwise(name):
    recipe = RECIPES[name]
    for rows in (40, 1):
        groups = layout((rows,), more=0)
        args = arrays(groups)
        y, (dx, dkernel, dbias, state) = run(groups, recipe, args, init_gemm_state(recipe, groups=1))
        own_y, own = alone(recipe, args, init_gemm_state(recipe), slice(rows), 0)
        for mine, expected in zip((y, dx), (own_y, own[0]), strict=True):
            assert_bitwise(mine, expected)
        for mine, expected in zip(jax.tree.leaves((dkernel, dbias, state)), jax.tree.leaves(own[1:]), strict=True):
            assert_bitwise(mine[0], expected)


@pytest.mark.costly("(0, 0, 0)", slow=("(0, 1, 0)", "(0, 57, 0)"))
@pytest.mark.parametrize("sizes", [(0, 0, 0), (0, 1, 0), (0, 57, 0), (1, 1, 1)], ids=str)
def test_sizes_at_the_edge(sizes):
    recipe = RECIPES["delayed"]
    groups = layout(sizes, more=57 - sum(sizes))
    args = arrays(groups)
    old = jax.tree.map(lambda leaf: leaf * 2.0, init_gemm_state(recipe, groups=E))
    y, (dx, dkernel, dbias, state) = run(groups, recipe, args, old)
    for group, size in enumerate(sizes):
        if not size:
            assert not np.asarray(dkernel[group]).any()
            assert not np.asarray(dbias[group]).any()
            for role in ("x", "grad"):
                assert_bitwise(state[role]["scale"][group], old[role]["scale"][group], what="zero rows keep the scale")
            continue
        rows = rows_of(groups, group)
        one = jax.tree.map(lambda leaf, group=group: leaf[group], old)
        own_y, own = alone(recipe, args, one, rows, group)
        assert_close(y[rows], own_y, TOLERANCE["bfloat16"])
        assert_close(dx[rows], own[0], TOLERANCE["bfloat16"])
        assert_close(dkernel[group], own[1], TOLERANCE["float32"])
    empty = np.asarray(groups.of_rows()) == E
    assert not np.asarray(y)[empty].any()
    assert not np.asarray(dx)[empty].any()


def test_an_input_without_rows():
    groups = RowGroups(sizes=jnp.zeros(E, jnp.int32), rows=0)
    y, (dx, dkernel, _, _) = run(groups, RECIPES["current"], arrays(groups), None)
    assert (y.shape, dx.shape) == ((0, N), (0, K))
    assert not np.asarray(dkernel).any()


@pytest.mark.costly
def test_padding_may_hold_anything_and_sizes_that_do_not_fit_are_cut_off():
    groups = layout((20, 3, 37), alignment=16)
    x, kernel, bias, g = arrays(groups)
    padding = (groups.of_rows() == E)[:, None]
    clean = run(groups, RECIPES["current"], (x, kernel, bias, g), None)
    dirty = run(
        groups, RECIPES["current"], (jnp.where(padding, jnp.nan, x), kernel, bias, jnp.where(padding, jnp.inf, g)), None
    )
    for mine, expected in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
        assert_bitwise(mine, expected)
    too_many = RowGroups(sizes=jnp.asarray([20, 3, 1000], jnp.int32), rows=groups.rows, alignment=16)
    fits = RowGroups(sizes=jnp.asarray([20, 3, groups.rows - 48], jnp.int32), rows=groups.rows, alignment=16)
    for mine, expected in zip(
        *(run(sizes, None, arrays(groups), None)[1][:3] for sizes in (too_many, fits)), strict=True
    ):
        assert_bitwise(mine, expected)


def test_nothing_depends_on_another_group():
    groups = layout((20, 5, 32))
    x, kernel, bias, g = arrays(groups)
    first = rows_of(groups, 0)
    other = (x.at[first].set(jnp.nan), kernel.at[0].set(jnp.inf), bias.at[0].set(jnp.nan), g.at[first].set(jnp.nan))
    y, (dx, dkernel, dbias, _) = run(groups, RECIPES["current"], (x, kernel, bias, g), None)
    changed_y, (changed_dx, changed_dkernel, changed_dbias, _) = run(groups, RECIPES["current"], other, None)
    assert np.isnan(np.asarray(changed_dkernel[0])).any()
    for mine, expected in ((changed_y, y), (changed_dx, dx)):
        assert_bitwise(mine[20:], expected[20:])
    for mine, expected in ((changed_dkernel, dkernel), (changed_dbias, dbias)):
        assert_bitwise(mine[1:], expected[1:])


@pytest.mark.costly
def test_a_program_serves_all_sizes_and_has_no_callback():
    traces = []

    @jax.jit
    def call(x, kernel, sizes):
        traces.append(sizes)
        return grouped_dense(x, kernel, groups=RowGroups(sizes=sizes, rows=x.shape[0]), recipe=RECIPES["current"])

    groups = layout()
    x, kernel, _, _ = arrays(groups)
    for sizes in (SIZES, (57, 0, 0), (0, 0, 1)):
        y = call(x, kernel, jnp.asarray(sizes, jnp.int32))
        assert np.asarray(y)[: sum(sizes)].any(axis=1).all()
        assert not np.asarray(y)[sum(sizes) :].any()
    assert len(traces) == 1
    found = {str(equation.primitive) for equation in equations(jax.make_jaxpr(call)(x, kernel, groups.sizes).jaxpr)}
    assert "scan" in found
    assert not {name for name in found if "callback" in name}
    assert "f8e4m3fn[" in compiled_text(call, x, kernel, groups.sizes)


@pytest.mark.costly("bf16, gated")
@pytest.mark.parametrize(("dtype", "out"), [("float32", (N,)), ("bfloat16", (2, 16))], ids=["fp32", "bf16, gated"])
def test_rows_of_one_feature_are_multiplied_without_a_loop(dtype, out):
    """Such are the probabilities of rows, which biases of experts are multiplied by."""
    groups = layout()
    x, kernel, bias, g = arrays(groups, jnp.dtype(dtype), out)
    args = (x[:, :1], kernel[:, :1], bias, g)
    y, (dx, dkernel, dbias, _) = run(groups, None, args, None)
    for group in np.flatnonzero(SIZES):
        rows = rows_of(groups, group)
        one_y, (one_dx, one_dkernel, one_dbias, _) = alone(None, args, None, rows, group)
        assert_close(y[rows], one_y, TOLERANCE[dtype])
        assert_close(dx[rows], one_dx, TOLERANCE[dtype])
        assert_close(dkernel[group], one_dkernel, TOLERANCE[dtype])
        assert_close(dbias[group], one_dbias, TOLERANCE[dtype])
    assert not np.asarray(dkernel)[1].any()  # the group without rows
    traced = jax.make_jaxpr(lambda *args: with_vjp(functools.partial(grouped_dense, groups=groups), args, g))(*args[:3])
    assert "scan" not in {str(equation.primitive) for equation in equations(traced.jaxpr)}


@pytest.mark.costly
def test_a_gated_kernel_has_an_axis_of_components():
    groups = layout()
    x, kernel, bias, g = arrays(groups, out=(2, 16))
    y, (dx, dkernel, dbias, _) = run(groups, RECIPES["block"], (x, kernel, bias, g), None)
    flat = (x, kernel.reshape(E, K, 32), bias.reshape(E, 32), g.reshape(-1, 32))
    flat_y, (flat_dx, flat_dkernel, flat_dbias, _) = run(groups, RECIPES["block"], flat, None)
    assert (y.shape, dkernel.shape, dbias.shape) == ((groups.rows, 2, 16), kernel.shape, bias.shape)
    for mine, expected in ((y, flat_y), (dx, flat_dx), (dkernel, flat_dkernel), (dbias, flat_dbias)):
        assert_close(mine.reshape(expected.shape), expected, TOLERANCE["bfloat16"])


@pytest.mark.costly("delayed", slow=["nvfp4", "block"])
@pytest.mark.parametrize("name", ["delayed", "block", "nvfp4"])
def test_kernels_quantized_before_the_call_give_the_same_bits(name):
    recipe = RECIPES[name]
    groups, state = layout(), init_gemm_state(recipe, groups=E)
    x, kernel, bias, g = arrays(groups)
    y, (dx, dkernel, *_) = run(groups, recipe, (x, kernel, bias, g), state)
    for portable in (False, True):
        stored = quantize_kernel(kernel, recipe=recipe, state=state, grouped=True, portable=portable)

        @quick_jit
        def call(x, sink, stored=stored):
            return with_vjp(
                lambda x, sink: grouped_dense(
                    x, stored, bias, groups=groups, recipe=recipe, state=state, grad_sink=sink
                ),
                (x, sink),
                g,
            )

        with frozen_scales():  # the state is not an argument of the call
            again, (again_dx, sink) = call(x, kernel)
        for mine, expected in ((again, y), (again_dx, dx), (sink, dkernel)):
            assert_bitwise(mine, expected)


def test_states_under_max_gradients_merge_uses():
    recipe, groups = RECIPES["delayed"], layout()
    x, kernel, _, _ = arrays(groups)

    def loss(state):
        y = grouped_dense(x, kernel, groups=groups, recipe=recipe, state=state)
        again = grouped_dense(2 * x, kernel, groups=groups, recipe=recipe, state=state)
        return jnp.sum(y.astype(jnp.float32)) + jnp.sum(again.astype(jnp.float32))

    state = jax.jit(jax.grad(loss, allow_int=True))(with_max_gradients(init_gemm_state(recipe, groups=E)))
    newest = jax.lax.convert_element_type(state["x"]["amax_history"], jnp.float32)[:, 0]
    for group in range(E):
        rows = np.asarray(x, np.float32)[rows_of(groups, group)]
        assert newest[group] == (2 * np.abs(rows).max() if rows.size else 0.0)


def test_gemms_that_a_recipe_keeps_in_high_precision():
    recipe = Float8CurrentScaling(override_linear_precision=(False, True, True))
    groups = layout()
    args = arrays(groups)
    y, (dx, dkernel, *_) = run(groups, recipe, args, None)
    quantized = run(groups, RECIPES["current"], args, None)
    plain = run(groups, None, args, None)
    for mine, expected in ((y, quantized[0]), (dx, plain[1][0]), (dkernel, plain[1][1])):
        assert_bitwise(mine, expected)


@pytest.mark.slow
def test_second_derivatives():
    groups = layout((3, 0, 4), more=1)
    x, kernel, _, _ = arrays(groups, jnp.float32)
    group = np.asarray(groups.of_rows())
    own = jnp.asarray(group[:, None] == np.arange(E), jnp.float32)

    def loss(fn, x, kernel):
        return jnp.sum(jnp.tanh(fn(x, kernel)))

    def formula(x, kernel):
        return jnp.einsum("re,rk,ekn->rn", own, x, kernel, precision="highest")

    def twice(fn):
        inner = jax.grad(functools.partial(loss, fn), argnums=(0, 1))
        return jax.grad(lambda *args: sum(jnp.sum(jnp.sin(part)) for part in inner(*args)), argnums=(0, 1))(x, kernel)

    call = functools.partial(grouped_dense, groups=groups)
    for mine, expected in zip(twice(call), twice(formula), strict=True):
        assert_close(mine, expected, 2.0**-18)
    with pytest.raises(TypeError, match="second derivatives do not exist under recipe 'current'"):
        twice(functools.partial(call, recipe=RECIPES["current"]))


@pytest.mark.slow
def test_statistics_are_of_all_groups_rows():
    groups, quantizer = layout((20, 0, 12), alignment=16), TensorQuantizer(dtype=jnp.float8_e4m3fn)
    x, kernel, _, _ = arrays(groups)
    options = LinearOptions(name="experts")
    with observe_quantization() as observer:
        grouped_dense(x, kernel, groups=groups, recipe=RECIPES["current"], options=options)
    (found,) = observer.records["experts", "x"]
    parts = [x[rows_of(groups, group)] for group in (0, 2)]
    each = [quantization_statistics(part, quantizer) for part in parts]
    sizes = [part.size for part in parts]
    mse = sum(float(one["mse"]) * size for one, size in zip(each, sizes, strict=True)) / sum(sizes)
    assert found["mse"] == pytest.approx(mse, rel=1e-5)
    assert found["amax"] == max(float(one["amax"]) for one in each)
    assert found["scale"] == max(float(one["scale"]) for one in each)
    (found,) = observer.records["experts", "kernel"]
    assert found["amax"] == np.abs(np.asarray(kernel)).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["high precision", "delayed", "block"])
def test_a_mesh_changes_nothing(name):
    recipe, groups = RECIPES[name], layout()
    args, state = arrays(groups), init_gemm_state(recipe, groups=E)
    y, (dx, dkernel, dbias, next_state) = run(groups, recipe, args, state)
    options = LinearOptions(kernel_axes=("expert", "fsdp", "ffn"), out_axes=(None, "ffn"))
    for mode in MODES[1:]:
        with use_mesh(mode):
            on_mesh, (*gradients, state_on_mesh) = run(groups, recipe, args, state, options=options)
        for mine, other in zip((on_mesh, *gradients), (y, dx, dkernel, dbias), strict=True):
            assert_close(mine, other, TOLERANCE["bfloat16"], what=mode)
        for mine, other in zip(jax.tree.leaves(state_on_mesh), jax.tree.leaves(next_state), strict=True):
            assert_bitwise(mine, other, what=mode)


def test_the_backend_is_explained():
    assert explain_backend("grouped_dense").backend == "xla"
    with pytest.raises(BackendUnavailableError, match=r"wait for the host|transformer_engine is not installed"):
        explain_backend("grouped_dense", backend="te")
    groups = layout()
    x, kernel, _, _ = arrays(groups)
    with pytest.raises(BackendUnavailableError, match="grouped_dense"):
        grouped_dense(x, kernel, groups=groups, backend="te")


@pytest.mark.costly
def test_what_is_refused():
    groups = layout()
    x, kernel, bias, _ = arrays(groups)
    delayed, current = RECIPES["delayed"], RECIPES["current"]

    def refused(match, error=ValueError, x=x, kernel=kernel, bias=bias, groups=groups, **more):
        with pytest.raises(error, match=match):
            grouped_dense(x, kernel, bias, groups=groups, **more)

    refused(r"must be \[rows, k\] and \[e, k, \*n\]", x=x[:, :16])
    refused("groups are 3 in 60 rows, and input and kernel have 3 and 59", x=x[:59])
    refused("groups are 3 in 60 rows, and input and kernel have 2 and 60", kernel=kernel[:2], bias=bias[:2])
    refused(r"bias \(64,\) must have shape \(3, 64\)", bias=bias[0])
    tokens = permute.plan_permutation(jnp.zeros((30, 2), jnp.int32), E)
    refused(
        "groups are 3 in 30 tokens, and input and kernel have 3 and 60",
        groups=dataclasses.replace(tokens.groups, permutation=tokens),
    )
    refused("output size 60 must be a multiple of 16", kernel=kernel[..., :60], bias=None, recipe=current)
    refused("save_original_input must be False", options=LinearOptions(save_original_input=True))
    refused("needs quantizer state", QuantizerStateError, recipe=delayed)
    refused("scales of shape", QuantizerStateError, recipe=delayed, state=init_gemm_state(delayed))
    stored = quantize_kernel(kernel, recipe=current, grouped=True)
    with pytest.raises(TypeError, match="a quantized kernel has no gradient"):
        jax.grad(
            lambda stored: jnp.sum(grouped_dense(x, stored, groups=groups, recipe=current).astype(jnp.float32)),
            allow_int=True,
        )(stored)
