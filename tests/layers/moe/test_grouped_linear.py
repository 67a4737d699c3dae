"""`GroupedLinear`: its parameters, what a call takes, and what training does with it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te import linen
from jax_te.config import ParallelConfig
from jax_te.errors import QuantizerStateError
from jax_te.layers import GroupedLinear, GroupedLoRA, Linear, lora_labels, prepare_quantization, quantize_parameters
from jax_te.ops import RowGroups, group_alignment, grouped_dense
from jax_te.random import EXPERT_PARALLEL_RNG
from jax_te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    ModuleRecipe,
    NVFP4BlockScaling,
    autocast,
)
from jax_te.sharding import make_mesh
from jax_te.training import (
    calibrate_delayed_scaling,
    create_train_state,
    deferred_vjp,
    make_train_step,
    muon_dimension_numbers,
)
from tests.support.numerics import TOLERANCE, assert_bitwise, assert_close, draw, quick_jit, without_type_checker
from tests.support.states import merging

E, K, N, ROWS = 3, 32, 64, 48
SIZES = (20, 0, 25)
CURRENT, DELAYED = Float8CurrentScaling(), DelayedScaling(amax_history_len=2)


def layer(recipe=None, **options):
    with autocast(recipe):
        made = GroupedLinear(E, K, N, rngs=nnx.Rngs(0), **options)
    if made.bias is not None:
        made.bias.set_value(draw("bias", made.bias.shape))
    return made


def gradients(module, *args, g=None):
    """Output, and the gradients of all Variables and of the first argument."""
    graphdef, state = nnx.split(module)

    @quick_jit
    def run(state, x, *rest):
        y, vjp = jax.vjp(lambda state, x: nnx.merge(graphdef, merging(state))(x, *rest), state, x)
        return y, vjp(jnp.ones_like(y) if g is None else g)

    return run(state, *args)


@pytest.fixture
def x():
    return draw("x", (ROWS, K), jnp.bfloat16)


@pytest.mark.costly
def test_each_expert_is_a_linear_layer_of_its_own(x):
    experts, g = layer(CURRENT), draw("g", (ROWS, N), jnp.bfloat16)
    with autocast(CURRENT):
        y, (grads, dx) = gradients(experts, x, jnp.asarray(SIZES), g=g)
        start = 0
        for expert, size in enumerate(SIZES):
            own, rows = Linear(K, N, rngs=nnx.Rngs(0)), slice(start, start + size)
            own.kernel.set_value(experts.kernel[...][expert])
            own.bias.set_value(experts.bias[...][expert])
            own_y, (own_grads, own_dx) = gradients(own, x[rows], g=g[rows])
            if size:
                assert_close(y[rows], own_y, TOLERANCE["bfloat16"])
                assert_close(dx[rows], own_dx, TOLERANCE["bfloat16"])
                assert_close(grads["kernel"][...][expert], own_grads["kernel"][...], TOLERANCE["float32"])
            assert_bitwise(grads["bias"][...][expert] if size else jnp.zeros(N), own_grads["bias"][...])
            start += size
    assert not np.asarray(y)[start:].any()


@pytest.mark.costly
def test_one_expert_is_a_linear_layer_bitwise(x):
    with autocast(DELAYED):
        experts, own = GroupedLinear(1, K, N, rngs=nnx.Rngs(0)), Linear(K, N, rngs=nnx.Rngs(0))
        own.kernel.set_value(experts.kernel[...][0])
        found, expected = gradients(experts, x, jnp.asarray([ROWS])), gradients(own, x)
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_bitwise(np.asarray(mine).reshape(other.shape), other)


@pytest.mark.parametrize("kind", [list, np.array, jnp.array, lambda sizes: RowGroups(sizes=jnp.array(sizes), rows=5)])
@pytest.mark.parametrize("sizes", [[4, 2], [-1, 6], [2**31 - 1, 2**31 - 1]])
def test_known_sizes_that_do_not_fit_are_refused(sizes, kind):
    experts = GroupedLinear(2, 4, 4, rngs=nnx.Rngs(0))
    with without_type_checker(), pytest.raises(ValueError, match=r"must be >= 0 and add up to at most 5 rows, got \["):
        experts(jnp.ones((5, 4)), kind(sizes))


def test_sizes_of_aligned_groups_that_do_not_fit_are_refused():
    groups = RowGroups(sizes=jnp.array([1, 2]), rows=5, alignment=4)
    with pytest.raises(ValueError, match="at most 5 rows, each group from a multiple of 4 on"):
        grouped_dense(jnp.ones((5, 4)), jnp.ones((2, 4, 4)), groups=groups)
    fits = RowGroups(sizes=jnp.array([4, 1, 0]), rows=5, alignment=4)  # the last one starts behind the rows
    assert grouped_dense(jnp.ones((5, 4)), jnp.ones((3, 4, 4)), groups=fits).shape == (5, 4)


@pytest.mark.costly
def test_sizes_are_a_list_or_an_array_and_rows_may_be_aligned(x):
    experts = layer()
    y = experts(x, SIZES)
    assert_bitwise(experts(x, jnp.asarray(SIZES, jnp.int16)), y)
    # The same rows with a gap, which is filled with zeros.
    spread = jnp.concatenate([x[:20], jnp.ones((12, K), x.dtype), x[20:45]])
    aligned = experts(spread, RowGroups(sizes=jnp.array(SIZES), rows=len(spread), alignment=16))
    assert_bitwise(jnp.concatenate([aligned[:20], aligned[32:]]), y[:45])
    assert not np.asarray(aligned[20:32]).any()
    for sizes, error, match in (
        ([20, 0], ValueError, r"must have shape \(3,\)"),
        ([20, -1, 3], ValueError, "must be >= 0 and add up to at most 48 rows"),
        ([20, 20, 20], ValueError, "at most 48 rows"),
        ([20.0, 0, 3], TypeError, "group_sizes must be .* integer"),
        (jnp.ones(E), TypeError, "must be integers, got float32"),
    ):
        with without_type_checker(), pytest.raises(error, match=match):
            experts(x, sizes)


@pytest.mark.costly
def test_the_bias_may_be_returned(x):
    y, bias = layer(return_bias=True)(x, SIZES)
    assert_bitwise(y, layer(bias=False)(x, SIZES))
    assert (bias.shape, bias.dtype) == ((E, N), x.dtype)


def test_kernels_are_drawn_one_by_one_from_the_stream_of_experts():
    def spread(key, shape, dtype):
        assert shape == (K, N)  # of one kernel: an initializer may go by its fan-in
        return jax.random.normal(key, shape, dtype)

    kernel = layer(init_method=spread).kernel[...]
    assert len({np.asarray(one).tobytes() for one in kernel}) == E
    other = GroupedLinear(E, K, N, init_method=spread, rngs=nnx.Rngs(0, **{EXPERT_PARALLEL_RNG: 1}))
    again = GroupedLinear(E, K, N, init_method=spread, rngs=nnx.Rngs(9, **{EXPERT_PARALLEL_RNG: 1}))
    assert (other.kernel[...] != kernel).any()
    assert_bitwise(other.kernel[...], again.kernel[...])
    assert layer().kernel.get_metadata("logical_axes") == ("expert", "fsdp", None)
    assert layer(parallel_mode="row").kernel.get_metadata("logical_axes") == ("expert", "ffn_fsdp", None)
    assert layer(parallel_mode="column").bias.get_metadata("logical_axes") == ("expert", "ffn")


@pytest.mark.wide("delayed")
@pytest.mark.parametrize("recipe", [DELAYED, Float8BlockScaling(), NVFP4BlockScaling()], ids=lambda recipe: recipe.name)
def test_quantized_kernels_are_kept_and_stored(x, recipe):
    experts = layer(recipe)
    with autocast(recipe):
        y = experts(x, SIZES)
        assert_bitwise(experts(x, SIZES, True), y)
        assert_bitwise(experts(x, SIZES, False), y)
        quantize_parameters(experts)
        assert_bitwise(experts(x, SIZES), y)
    value = experts.kernel.get_value()
    assert value.dequantize().shape == value.shape == (E, K, N)


def test_state_belongs_to_each_expert(x):
    experts = prepare_quantization(layer(), DELAYED)
    assert experts.quantizers["grad"]["amax_history"].shape == (E, 2)
    with autocast(DELAYED):
        _, (grads, _) = gradients(experts, x, jnp.asarray(SIZES))
        newest = np.asarray(grads["quantizers"]["x"]["amax_history"][...])[:, 0]
    assert newest.tolist() == [
        np.abs(np.asarray(x, np.float32))[:20].max(),
        0.0,
        np.abs(np.asarray(x, np.float32))[20:45].max(),
    ]
    with autocast(DELAYED), pytest.raises(QuantizerStateError, match="needs quantizer state"):
        layer()(x, SIZES)


@pytest.mark.costly
def test_a_recipe_of_its_own_and_high_precision(x):
    experts = layer()
    plain = experts(x, SIZES)
    with autocast(CURRENT):
        quantized = experts(x, SIZES)
        experts.high_precision = True
        assert_bitwise(experts(x, SIZES), plain)
    experts.module_recipe = ModuleRecipe(training=CURRENT, override_nonquantized_autocast=True)
    assert_bitwise(experts(x, SIZES), quantized)
    assert (plain != quantized).any()


def test_a_frozen_layer_has_no_gradients_but_its_next_state(x):
    experts = layer(DELAYED)
    experts.frozen = True
    with autocast(DELAYED):
        _, (grads, dx) = gradients(experts, x, jnp.asarray(SIZES))
    assert not np.asarray(grads["kernel"][...]).any()
    assert not np.asarray(grads["bias"][...]).any()
    assert np.asarray(dx)[:20].any()
    assert np.asarray(grads["quantizers"]["x"]["amax_history"][...]).any()


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = GroupedLinear(E, K, (2, N), rngs=rngs)
        self.down = GroupedLinear(E, N, K, bias=False, rngs=rngs)

    def __call__(self, x, sizes):
        up = self.up(x, sizes)
        return self.down(nnx.silu(up[:, 0]) * up[:, 1], sizes)


def loss_fn(model, batch, key):
    x, sizes = batch
    return jnp.mean(jnp.square(model(x[0], sizes[0]).astype(jnp.float32) - 1.0))


def batch_of(x):
    return jnp.stack([x, 2 * x]), jnp.asarray([SIZES, (0, 40, 8)], jnp.int32)


@pytest.mark.slow
def test_a_train_step_merges_the_experts_states_of_microbatches(x):
    tx, batch = optax.sgd(1.0), batch_of(x)
    with autocast(DELAYED):
        state = create_train_state(lambda rngs: Block(rngs), tx, key=jax.random.key(0))
        step = make_train_step(loss_fn, tx, microbatches=2)
        before = state.params["up"]["kernel"][...] + 0
        state, metrics = step(state, batch)
        first = float(metrics["loss"])
        for _ in range(3):
            state, metrics = step(state, batch)
    wide = np.abs(np.asarray(x, np.float32))
    largest = [max(wide[:20].max(), 0), 2 * wide[:40].max(), max(wide[20:45].max(), 2 * wide[40:48].max())]
    assert np.asarray(state.quantizers["up"]["quantizers"]["x"]["amax_history"][...])[:, 0].tolist() == largest
    assert float(metrics["loss"]) < first
    assert (state.params["up"]["kernel"][...] != before).any(axis=(1, 2, 3)).all()


@pytest.mark.slow
def test_kernels_stored_quantized_are_trained_like_others(x):
    tx, batch, losses = optax.sgd(1.0), batch_of(x), []
    for fp8_param in (False, True):
        with autocast(Float8BlockScaling()):
            state = create_train_state(lambda rngs: Block(rngs), tx, key=jax.random.key(0), fp8_param=fp8_param)
            step = make_train_step(loss_fn, tx, microbatches=2)
            for _ in range(2):
                state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_kernel_gradients_may_wait(x):
    with autocast(CURRENT):
        model = Block(nnx.Rngs(0))
        sizes, g = jnp.asarray(SIZES), draw("g", (ROWS, K), jnp.bfloat16)
        y, backward = deferred_vjp(lambda model, x: model(x, sizes), model, x)
        later = backward(g).backward_dw()
        expected_y, (grads, _) = gradients(model, x, sizes, g=g)
    assert_close(y, expected_y, TOLERANCE["bfloat16"])
    for name in ("up", "down"):
        assert_close(later[name]["kernel"][...], grads[name]["kernel"][...], TOLERANCE["float32"])


@pytest.mark.slow
def test_calibration_gives_each_expert_its_own_amax(x):
    model = Block(nnx.Rngs(0))
    calibrate_delayed_scaling(model, loss_fn, batch_of(x), DELAYED)
    wide = np.abs(np.asarray(x, np.float32))
    newest = model.up.quantizers["x"]["amax_history"][...][:, 0].tolist()
    assert newest == [wide[:20].max(), 0.0, wide[20:45].max()]
    kernels = np.abs(np.asarray(model.down.kernel[...])).max(axis=(1, 2))
    assert model.down.quantizers["kernel"]["amax_history"][...][:, 0].tolist() == kernels.tolist()


@pytest.mark.slow
def test_layers_in_a_stack_run_as_a_loop(x):
    with autocast(DELAYED):
        stack = nnx.vmap(lambda key: GroupedLinear(E, K, K, rngs=nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 2))
        graphdef, state = nnx.split(stack)
        sizes = jnp.asarray(SIZES)

        @quick_jit
        def scanned(state):
            return jax.lax.scan(lambda x, one: (nnx.merge(graphdef, one)(x, sizes), None), x, state)[0]

        y = x
        for i in range(2):
            y = nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], state))(y, sizes)
        assert_close(scanned(state), y, TOLERANCE["bfloat16"])
        quantize_parameters(stack)
        assert stack.kernel.get_value().dequantize().shape == (2, E, K, K)


@pytest.mark.slow
def test_adapters_of_experts(x):
    sizes, base = jnp.asarray(SIZES), layer(CURRENT)
    with autocast(CURRENT):
        plain = base(x, sizes)
        adapted = GroupedLoRA(base, 4, alpha=8.0, rngs=nnx.Rngs(1))
        assert_bitwise(adapted(x, sizes), plain)  # lora_b starts as zeros
        assert len({np.asarray(one).tobytes() for one in adapted.lora_a[...]}) == E
        adapted.lora_b.set_value(draw("b", adapted.lora_b.shape))
        y, (grads, _) = gradients(adapted, x, sizes)
        rows = [x[:20], x[20:20], x[20:45]]
        update = [
            2.0 * (part @ adapted.lora_a[...][i].astype(x.dtype)) @ adapted.lora_b[...][i].astype(x.dtype)
            for i, part in enumerate(rows)
        ]
        assert_close(y[:45], plain[:45] + jnp.concatenate(update), 2.0**-6)  # bf16 products of bf16 products
    assert not np.asarray(grads["base"]["kernel"][...]).any()
    assert np.asarray(grads["lora_a"][...])[[0, 2]].any(axis=(1, 2)).all()
    assert not np.asarray(grads["lora_a"][...])[1].any()
    labels = nnx.to_pure_dict(lora_labels(nnx.state(adapted, nnx.Param)))
    assert labels == {"base": {"kernel": "frozen", "bias": "frozen"}, "lora_a": "lora", "lora_b": "lora"}
    before = adapted(x, sizes)
    merged = adapted.merge()
    assert merged is base
    assert not merged.frozen
    assert_close(merged(x, sizes), before, 2.0**-6)
    with pytest.raises(TypeError, match="LoRA is for a Linear"), without_type_checker():
        GroupedLoRA(Linear(K, N, rngs=nnx.Rngs(0)), 4, rngs=nnx.Rngs(1))


def test_muon_takes_each_experts_matrices():
    numbers = muon_dimension_numbers(nnx.state(Block(nnx.Rngs(0)), nnx.Param))
    axes = [numbers[name]["kernel"].get_value().reduction_axis for name in ("up", "down")]
    assert axes == [-3, -2]


def test_linen_gives_the_same_bits(x):
    sizes = jnp.asarray(SIZES)
    with autocast(DELAYED):
        module = linen.GroupedLinear(E, K, N)
        variables = module.init(jax.random.key(0), x, sizes)
        y = module.apply(variables, x, sizes)
        same = linen.to_nnx(module, variables)
        assert_bitwise(same(x, sizes), y)
    assert variables["_overwrite_with_gradient"]["quantizers"]["x"]["scale"].shape == (E,)


def test_group_and_size_are_the_meshs(x):
    """As `Linear`'s: the mesh says which devices split the kernels, a group and a size are checked against it."""
    experts = layer(tp_group="tensor", tp_size=2, parallel_mode="column")
    experts.set_tensor_parallel_group(None)
    experts.set_tensor_parallel_group("tensor")
    with without_type_checker(), pytest.raises(TypeError, match="tp_group must be None or the mesh axis 'tensor'"):
        experts.set_tensor_parallel_group("data")
    with jax.set_mesh(make_mesh(ParallelConfig(tensor=4))), pytest.raises(ValueError, match="has 4 tensor ranks"):
        experts(x, SIZES)
    with jax.set_mesh(make_mesh(ParallelConfig(tensor=2))):
        y = jax.jit(lambda layer, x: layer(x, jnp.asarray(SIZES)))(experts, x)
    assert_close(y, layer()(x, SIZES), TOLERANCE["bfloat16"])


def test_alignments_of_recipes():
    recipes = (None, CURRENT, Float8BlockScaling(), NVFP4BlockScaling())
    assert [group_alignment(recipe) for recipe in recipes] == [16, 16, 128, 32]


def test_sizes_of_the_layer_are_checked():
    with pytest.raises(ValueError, match="num_gemms must be an integer >= 1, got 0"):
        GroupedLinear(0, K, N, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="out_features must be a size"):
        GroupedLinear(2, K, (), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="x must have 1 axes or more"):
        layer()(jnp.float32(1), [1, 0, 0])
    with pytest.raises(ValueError, match="parallel_mode must be None, 'column' or 'row'"):
        layer(parallel_mode="both")
