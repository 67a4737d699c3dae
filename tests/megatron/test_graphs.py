"""GraphableMegatronModule and the graphable TransformerLayer: captured calls give what calls without capture give."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jax_te import layers
from jax_te.config import CudaGraphConfig, ParallelConfig, TransformerConfig
from jax_te.errors import QuantizerStateError
from jax_te.layers import CachedKernel
from jax_te.megatron import GraphableMegatronModule, TransformerLayer, recipe_from_config
from jax_te.models import GPTModel
from jax_te.recipe import Float8CurrentScaling, autocast
from jax_te.sharding import make_mesh
from tests.support.numerics import assert_bitwise, assert_close, draw, without_type_checker
from tests.support.states import merging

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 32}
EPS = float(jnp.finfo(jnp.float32).eps)


def config(impl: Any = "transformer_engine", **fields: Any) -> TransformerConfig:
    return TransformerConfig(**SIZES, cuda_graph_impl=impl, **fields)


SERIAL_NUMBERS = itertools.count()


class Block(GraphableMegatronModule):
    """A small graphable module with quantized kernels; counts how often it is traced or called."""

    def __init__(self, config: Any, vp_stage: int | None = None):
        super().__init__(config, vp_stage)
        rngs = nnx.Rngs(0)
        self.fc1 = layers.Linear(16, 32, rngs=rngs)
        self.fc2 = layers.Linear(32, 16, rngs=rngs)
        self.calls = nnx.static(Calls())
        self.serial_number = next(SERIAL_NUMBERS)  # tests share no executables, as equal modules do

    def forward(self, hidden_states: Any, scale: Any = None, power: int = 2) -> Any:
        self.calls.append(power)
        hidden: Any = self.fc1(hidden_states)
        y: Any = self.fc2(jnp.tanh(hidden) ** power)
        return y if scale is None else y * scale


class Calls(list):  # type: ignore[type-arg]
    def __hash__(self) -> int:  # type: ignore[override]
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Calls)


@pytest.fixture
def x() -> jax.Array:
    return draw("x1", (2, 8, 16))


def captured(block: Any, x: jax.Array, microbatches: int = 1) -> Any:
    for microbatch in range(microbatches):
        block.current_microbatch = microbatch
        block._te_cuda_graph_capture(x)
    block.current_microbatch = 0
    return block


def test_what_it_is_made_with():
    block = Block(config(), vp_stage=1)
    assert (block.vp_stage, block.current_microbatch, block.cuda_graph_manual_hooks, len(block.cuda_graphs)) == (
        1,
        0,
        [],
        0,
    )
    message = r"config must be a jax_te\.config\.TransformerConfig, got None"
    with without_type_checker(), pytest.raises(AssertionError, match=message):
        Block(None)
    with pytest.raises(NotImplementedError, match="GraphableMegatronModule must define forward"):
        GraphableMegatronModule(config())(jnp.ones(2))


@pytest.mark.parametrize("impl", ["none", "local", "transformer_engine", "full_iteration"])
def test_which_calls_are_graphs(impl: str, x: jax.Array):
    block = Block(config(impl))
    expected = block.forward(x)
    for _ in range(2):
        assert_close(block(x), expected, 8 * EPS)
    calls = {"none": 2, "full_iteration": 2, "local": 1, "transformer_engine": 2}[impl]
    assert len(block.calls) == 1 + calls, "a graph is traced once and then replayed"
    assert len(block.cuda_graphs) == (impl == "local")
    if impl == "transformer_engine":
        captured(block, x)
        before = len(block.calls)
        assert_close(block(x), expected, 8 * EPS)
        assert len(block.calls) == before
        block.eval()
        assert not block.training
        block(x)
        assert len(block.calls) == before + 1, "evaluation is eager, as in Megatron"


def test_inside_of_jit_and_vmap_the_outer_program_is_the_graph(x: jax.Array):
    block = captured(Block(config()), x)
    expected, graphs = block.forward(x), len(block.cuda_graphs)
    graphdef, state = nnx.split(block)
    assert_close(jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, x), expected, 8 * EPS)
    assert_close(jax.vmap(block)(x), expected, 8 * EPS)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(nnx.merge(graphdef, state)(x) ** 2)))(x)
    assert_close(gradient, jax.grad(lambda x: jnp.sum(block.forward(x) ** 2))(x), 32 * EPS)
    # An array by name that is traced: the module and its input are not.
    local, traced = Block(config("local")), []
    for one, chosen in ((block, block._should_call_te_cudagraph), (local, local._should_call_local_cudagraph)):
        assert chosen(hidden_states=x)
        assert_close(jax.jit(lambda scale, one=one: one(hidden_states=x, scale=scale))(2.0), 2.0 * expected, 16 * EPS)
        jax.jit(lambda scale, chosen=chosen: traced.append(chosen(hidden_states=x, scale=scale)))(2.0)
    assert traced == [False, False]
    assert (len(block.cuda_graphs), len(local.cuda_graphs)) == (graphs, 0)


def test_a_call_that_was_not_captured_is_refused(x: jax.Array):
    block = captured(Block(config()), x)
    with pytest.raises(ValueError, match=r"Block: .*float32\[2, 4, 16\].* was not captured; captured are .*2, 8, 16"):
        block(x[:, :4])
    with pytest.raises(ValueError, match=r"scale: float32\[\].*Capture it, once, by the module's _te_cuda_graph_c"):
        block(x, scale=jnp.float32(2.0))
    message = "was captured under a different recipe, mesh, mode, module state or sharding"
    with autocast(Float8CurrentScaling()), pytest.raises(ValueError, match=message):
        block(x)
    with jax.default_matmul_precision("highest"), pytest.raises(ValueError, match="under a different recipe"):
        block(x)
    block.current_microbatch = 3
    with pytest.raises(ValueError, match="is_first_microbatch=False was not captured"):
        block(x)


@pytest.mark.parametrize("given", [True, False])
def test_a_graph_takes_the_microbatch_from_the_module_alone(given: bool, x: jax.Array):
    local = Block(config("local"))
    message = rf"is_first_microbatch={given} is not supported .* set the module's current_microbatch"
    for called in (local, captured(Block(config()), x), Block(config())._te_cuda_graph_capture):
        with pytest.raises(ValueError, match=message):
            called(x, is_first_microbatch=given)
    assert len(local.cuda_graphs) == 0
    assert_bitwise(local(x, is_first_microbatch=None), local(x))


def test_arguments_of_a_replay(x: jax.Array):
    block = captured(Block(config()), x)
    args, kwargs = block._get_te_cuda_graph_replay_args(hidden_states=x, scale=None)
    assert args[0] is x
    assert kwargs == {"scale": None, "is_first_microbatch": True}
    block.current_microbatch = 1
    assert block._get_te_cuda_graph_replay_args(x)[1] == {"is_first_microbatch": False}
    block.current_microbatch = 0
    for arguments, message in (
        (((x, 2), {}), "accepts only Tensor inputs: argument 1 must be an array, got int"),
        (((x,), {"power": 3}), "argument 'power' must be an array, got int"),
        (((None,), {}), "argument 0 must be an array, got NoneType"),
        (((), {"scale": x}), "hidden_states is required"),
        (((x,), {"hidden_states": x}), "hidden_states is given twice"),
    ):
        with pytest.raises(AssertionError, match=message):
            block._te_cuda_graph_replay(*arguments[0], **arguments[1])
    assert_bitwise(block(hidden_states=x), block(x))


@pytest.mark.costly
def test_rotary_positions_are_an_argument_of_a_graph():
    layer = TransformerLayer(config(), rngs=nnx.Rngs(0))
    x = draw("x", (2, 8, 16))
    near, far = (layers.rotary_embedding(start + jnp.arange(8) * step, 8) for start, step in ((0, 1), (3, 2)))
    layer._te_cuda_graph_capture(x, rotary_pos_emb=near)
    for angles in (near, far):
        assert_close(layer(x, rotary_pos_emb=angles)[0], layer.forward(x, rotary_pos_emb=angles)[0], 8 * EPS)
    with pytest.raises(ValueError, match="was not captured"):
        layer(x)


def test_local_graphs_take_static_values_and_share_between_copies(x: jax.Array):
    block = Block(config("local"))
    twice = nnx.clone(block)
    assert_close(block(x, power=3), block.forward(x, power=3), 8 * EPS)
    twice(x, power=3)
    assert len(block.cuda_graphs) == 1
    block(x, power=2)
    assert len(block.cuda_graphs) == 2
    assert len(copy.deepcopy(block.cuda_graphs)) == 0


def test_equal_modules_do_not_get_each_others_graphs(x: jax.Array):
    """Flax writes to a module the static attributes of an equal one, with which it has traced the same function."""
    one, other = Block(config()), Block(config())
    other.serial_number = one.serial_number
    captured(one, x)
    assert nnx.split(one)[0] == nnx.split(other)[0]
    changes = nnx.jit(lambda block, x: block.forward(x))
    for block in (one, other, one):
        changes(block, x)
    assert (len(one.cuda_graphs), len(other.cuda_graphs)) == (1, 0)
    half = x[:, :4]
    assert_close(other(half), other.forward(half), 8 * EPS)  # it has no graphs, and runs as it is
    for copied in (nnx.clone(other), nnx.merge(*nnx.split(other)), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        changes(copied, x)
        assert len(copied.cuda_graphs) == 0
    again = nnx.clone(one)
    changes(again, x)
    assert len(again.cuda_graphs) == 1  # a copy replays what its original has captured
    captured(other, half)
    assert_close(
        nnx.grad(lambda block: jnp.sum(block(half)))(other).fc1.kernel[...], gradient_of(other, half), 32 * EPS
    )
    assert (len(one.cuda_graphs), len(other.cuda_graphs)) == (1, 1)


def gradient_of(block: Any, x: jax.Array) -> jax.Array:
    return nnx.grad(lambda block: jnp.sum(block.forward(x)))(block).fc1.kernel[...]


def test_a_replay_reads_the_variables_of_now(x: jax.Array):
    block = captured(Block(config()), x)
    block.fc2.kernel.set_value(block.fc2.kernel.get_value() * 2.0)
    assert_close(block(x), block.forward(x), 8 * EPS)


def test_hooks_run_before_the_replay(x: jax.Array):
    block = captured(Block(config()), x)
    seen: list[Any] = []

    def make_hook() -> Any:
        def double(module: Any) -> None:
            seen.append(module)
            module.kernel.set_value(module.kernel.get_value() * 2.0)

        return double

    block.setup_manual_hooks(make_hook)
    assert [args for _, args in block.cuda_graph_manual_hooks] == [(block.fc1,), (block.fc2,)]
    assert block._get_submodules_under_cudagraphs() == [block]
    y = block(x)
    assert seen == [block.fc1, block.fc2]
    with pytest.raises(ValueError, match="was not captured"):
        block(x[:, :4])
    with autocast(Float8CurrentScaling()), pytest.raises(ValueError, match="under a different recipe"):
        block(x)
    assert seen == [block.fc1, block.fc2], "a refused call runs no hook"
    block.setup_manual_hooks(lambda: lambda module: None)
    assert_close(y, block.forward(x), 8 * EPS)


def test_hooks_may_make_variables_those_of_the_graph(x: jax.Array):
    block = captured(Block(config()), x)

    def widen(module: Any) -> None:
        module.kernel.set_value(module.kernel.get_value().astype(jnp.float32))

    block.setup_manual_hooks(lambda: widen)
    y = block(x)
    block.fc1.kernel.set_value(block.fc1.kernel.get_value().astype(jnp.bfloat16))
    assert_close(block(x), y, float(jnp.finfo(jnp.bfloat16).eps))


@pytest.fixture(params=[None, "delayed", "tensorwise"])
def quantized(request: pytest.FixtureRequest) -> Iterator[TransformerConfig]:
    fields = {} if request.param is None else {"fp8": "hybrid", "fp8_recipe": request.param}
    made = config(**fields)
    with autocast(recipe_from_config(made)):
        yield made


@pytest.mark.wide("None")
def test_a_replay_differentiates_as_the_call_does(quantized: TransformerConfig, x: jax.Array):
    """Gradients of all arrays, and with them delayed scaling's next state, on a first and on a later microbatch."""
    block = captured(Block(quantized), x, microbatches=2)
    graphdef, cached, state = nnx.split(block, CachedKernel, ...)

    def loss(state: Any, x: jax.Array, microbatch: int) -> Any:
        copy = nnx.merge(graphdef, cached, merging(state))
        copy.current_microbatch = microbatch
        return jnp.sum(copy(x) * jnp.cos(x))

    for microbatch in (0, 1):
        derivative = functools.partial(jax.value_and_grad(loss, argnums=(0, 1)), microbatch=microbatch)
        expected = jax.jit(derivative)(state, x)  # in which the call is traced
        before = len(block.calls)
        found = derivative(state, x)
        assert len(block.calls) == before + 1, "traced for the derivative's executables"
        for path, (ours, theirs) in enumerate(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)):
            assert_close(ours, theirs, 64 * EPS, what=str(path))
        derivative(state, x)
        assert len(block.calls) == before + 1, "which are compiled once"


def test_a_captured_call_is_differentiated_in_several_ways(x: jax.Array):
    """With respect to one array, another, and both, in turn: each has executables of its own."""
    block = captured(Block(config()), x)
    graphdef, state = nnx.split(block)

    def loss(state: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(nnx.merge(graphdef, state)(x) * jnp.cos(x))

    for argnums in (0, 1, (0, 1), 1, 0):
        found = jax.grad(loss, argnums=argnums)(state, x)
        expected = jax.jit(jax.grad(loss, argnums=argnums))(state, x)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_close(ours, theirs, 64 * EPS)


def test_a_derivative_without_the_quantizer_state_is_refused_as_ever(x: jax.Array):
    made = config(fp8="hybrid")
    with autocast(recipe_from_config(made)):
        graphdef, state = nnx.split(captured(Block(made), x))
        with pytest.raises(QuantizerStateError, match="leaves the quantizer state out"):
            jax.grad(lambda x: jnp.sum(nnx.merge(graphdef, state)(x)))(x)


def test_the_first_microbatch_quantizes_kernels_and_the_others_use_them(x: jax.Array):
    made = config(fp8="hybrid", fp8_recipe="tensorwise")
    with autocast(recipe_from_config(made)):
        block = captured(Block(made), x, microbatches=2)
        first = block(x)
        kept = block.fc1.kernel_cache
        block.fc1.kernel.set_value(block.fc1.kernel.get_value() * 2.0)
        block.current_microbatch = 1
        assert_bitwise(block(x), first)
        assert block.fc1.kernel_cache is kept, "which a later microbatch only reads"
        block.set_is_first_microbatch()  # the next step
        block.current_microbatch = 0
        assert jnp.any(block(x) != first)
        assert block.fc1.is_first_microbatch is False, "calls that are no replays use what a replay has kept"
        assert_bitwise(block.forward(x), block(x))


JITTED: Any = nnx.jit(lambda block, x: block(x))
COPIES = {"clone": nnx.clone, "copy": copy.copy, "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("how", [*COPIES, "equal modules under nnx.jit", "jitted constructor"])
def test_each_module_has_its_own_microbatch_and_hooks(how: str, x: jax.Array):
    build = nnx.jit(lambda: Block(made)) if how == "jitted constructor" else lambda: Block(made)
    made = config("local")
    first = build()
    second = COPIES[how](first) if how in COPIES else build()
    second.serial_number = first.serial_number
    if how == "equal modules under nnx.jit":
        JITTED(first, x), JITTED(second, x)
    seen: list[Any] = []
    first.current_microbatch = 3
    first.setup_manual_hooks(lambda: seen.append)
    assert (second.current_microbatch, second.cuda_graph_manual_hooks) == (0, [])
    second(x)
    assert seen == []
    first(x)
    assert seen == [first.fc1, first.fc2]
    if how == "equal modules under nnx.jit":
        JITTED(second, x), JITTED(first, x)
        assert (first.current_microbatch, second.current_microbatch) == (3, 0)
        assert (len(first.cuda_graph_manual_hooks), len(second.cuda_graph_manual_hooks)) == (2, 0)


def test_a_copys_first_microbatch_quantizes_its_own_kernels(x: jax.Array):
    """A reference model that was cloned from a policy, whose first microbatch comes after the policy's second."""
    made = config("local", fp8="hybrid", fp8_recipe="tensorwise")
    with autocast(recipe_from_config(made)):
        policy = Block(made)
        policy(x)
        reference = nnx.clone(policy)
        reference.fc2.kernel.set_value(jnp.zeros((32, 16)))
        policy.current_microbatch = 1
        policy(x)
        assert not jnp.any(reference(x))


def test_a_transformations_copy_has_the_microbatch_and_the_hooks(x: jax.Array):
    made = config(fp8="hybrid", fp8_recipe="tensorwise")
    seen: list[Any] = []
    with autocast(recipe_from_config(made)):
        block = captured(Block(made), x, microbatches=2)
        block(x)
        block.fc2.kernel.set_value(jnp.zeros((32, 16)))
        block.setup_manual_hooks(lambda: seen.append)
        found = []
        for microbatch in (1, 0):
            block.current_microbatch = microbatch
            found.append(nnx.value_and_grad(lambda block: jnp.sum(jnp.square(block(x))))(block)[0])
    assert found[0] > 0.0, "of the kernel that was kept"
    assert found[1] == 0.0, "of the one that is there now"
    assert [type(module) for module in seen] == 2 * [layers.Linear, layers.Linear]
    assert block.fc1 not in seen, "but the copy's, whose variables the replay reads"


def test_cleared_caches_have_no_graphs(x: jax.Array):
    block = captured(Block(config()), x)
    y, traced = block(x), len(block.calls)
    jax.clear_caches()
    with pytest.raises(ValueError, match=r"or before jax\.clear_caches\(\)"):
        block(x)
    assert_bitwise(captured(block, x)(x), y)
    assert (len(block.calls), len(block.cuda_graphs)) == (traced + 1, 1)


@pytest.mark.costly
def test_a_sharded_call_is_captured_as_it_is_sharded():
    with jax.set_mesh(make_mesh(ParallelConfig(data=2), devices=jax.devices()[:2])):
        block = Block(config())
        x: Any = block.get_layer_static_inputs(8, 2)["hidden_states"]
        assert (x.shape, x.dtype, x.sharding.spec[0]) == ((2, 8, 16), jnp.float32, "data")
        captured(block, x)
        derivative = jax.value_and_grad(lambda x: jnp.sum(block(x) ** 2))
        found, expected = derivative(x), jax.jit(derivative)(x)
        assert_close(found[0], expected[0], 32 * EPS)
        assert_close(found[1], expected[1], 32 * EPS)
        with pytest.raises(ValueError, match="captured under a different recipe, mesh, mode"):
            block(jax.device_put(x, jax.sharding.NamedSharding(x.sharding.mesh, jax.P())))


@pytest.mark.parametrize(
    ("fields", "dtype"), [({"bf16": True}, "bfloat16"), ({"fp16": True}, "float16"), ({}, "float32")]
)
def test_static_inputs_have_the_dtype_of_activations(fields: dict[str, Any], dtype: str):
    assert Block(config(**fields)).get_layer_static_inputs(8, 2)["hidden_states"].dtype == dtype


def test_a_transformer_layer_is_graphable():
    layer = TransformerLayer(config(bf16=True), 2, vp_stage=0, self_attn_mask_type="arbitrary", rngs=nnx.Rngs(0))
    inputs = layer.get_layer_static_inputs(8, 2)
    mask = inputs["attention_mask"]
    assert (mask.shape, mask.dtype) == ((2, 1, 8, 8), bool)
    assert mask[0, 0, 2].tolist() == [False] * 3 + [True] * 5
    x = draw("x2", (2, 8, 16), jnp.bfloat16)
    layer._te_cuda_graph_capture(**inputs)
    output, context = layer(x, attention_mask=mask)
    assert context is None
    tolerance = 16 * float(jnp.finfo(jnp.bfloat16).eps)
    plain = jax.jit(lambda x, mask: layers.TransformerLayer.__call__(layer, x, mask))
    assert_close(output, plain(x, mask), tolerance)
    # No mask is a mask that masks nothing.
    assert_close(layer(x)[0], plain(x, jnp.zeros_like(mask)), tolerance)
    assert len(layer.cuda_graphs) == 1
    with pytest.raises(AssertionError, match="hidden_states is the one argument by position, got 2"):
        layer(x, mask)


def test_a_causal_layers_mask_is_no_argument_of_its_graph(x: jax.Array):
    layer = TransformerLayer(config(), rngs=nnx.Rngs(0))
    layer._te_cuda_graph_capture(**layer.get_layer_static_inputs(8, 2))
    assert_close(layer(x)[0], jax.jit(lambda x: layer(x)[0])(x), 32 * EPS)
    assert layer.layer_number == 1
    assert "self_attention.linear_qkv.weight" in layer.state_dict()


@pytest.mark.costly
def test_a_decoder_layer_has_a_context(x: jax.Array):
    layer = TransformerLayer(config("local"), layer_type="decoder", rngs=nnx.Rngs(0))
    context = draw("x3", (2, 4, 16))
    hidden = jnp.zeros((1, 1, 8, 4), bool).at[..., 2:].set(True)
    output, given = layer(x, context=context, context_mask=hidden)
    assert_bitwise(given, context)
    seen, masked_out = context.at[:, :2].multiply(2.0), context.at[:, 2:].multiply(2.0)
    assert_bitwise(layer(x, context=masked_out, context_mask=hidden)[0], output)
    assert jnp.any(layer(x, context=seen, context_mask=hidden)[0] != output)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer_number": 3}, r"layer_number must be in \[1, num_layers = 2\], got 3"),
        ({"self_attn_mask_type": "padding"}, "'causal', 'no_mask' or 'arbitrary', got 'padding'; for padding build"),
    ],
)
def test_layers_that_are_refused(arguments: dict[str, Any], message: str):
    with without_type_checker(), pytest.raises(ValueError, match=message):
        TransformerLayer(config(), **arguments, rngs=nnx.Rngs(0))


def test_first_and_last_layers_stay_in_high_precision():
    made = config(fp8="hybrid", fp8_recipe="tensorwise", first_last_layers_bf16=True, num_layers_at_end_in_bf16=0)
    high = [TransformerLayer(made, n, rngs=nnx.Rngs(0)).mlp.linear_fc2.high_precision for n in (1, 2)]
    assert high == [True, False]


@pytest.mark.parametrize("given", ["full", [], None, "", ["attn", "mlp"], "mlp,attn"])
def test_names_of_the_whole_layer(given: Any):
    made = CudaGraphConfig(cuda_graph_impl="local", cuda_graph_modules=given)
    assert made.cuda_graph_modules == ()
    assert dataclasses.replace(made) == made


@pytest.mark.parametrize(
    ("fields", "impl", "message"),
    [
        ({"enable_cuda_graph": True}, "local", "enable_cuda_graph=True is deprecated.*write cuda_graph_impl='local'"),
        ({"external_cuda_graph": True}, "transformer_engine", "write cuda_graph_impl='transformer_engine'"),
        ({"cuda_graph_scope": "full", "cuda_graph_impl": "local"}, "local", "cuda_graph_scope is deprecated"),
        ({"cuda_graph_modules": ["full_iteration"]}, "full_iteration", "write cuda_graph_impl='full_iteration'"),
    ],
)
def test_deprecated_names(fields: dict[str, Any], impl: str, message: str):
    with pytest.warns(DeprecationWarning, match=message):
        made = TransformerConfig(**SIZES, **fields)
    assert (made.cuda_graph_impl, made.cuda_graph_modules) == (impl, ())
    assert dataclasses.replace(made, hidden_size=32).cuda_graph_impl == impl, "and is not said again"


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"cuda_graph_impl": "te"}, ValueError, "cuda_graph_impl must be one of 'none', 'local', .* got 'te'"),
        ({"cuda_graph_modules": ["attn"]}, ValueError, r"must be 'full', \[\] or .* got \['attn'\]. A captured"),
        ({"cuda_graph_modules": "moe_router"}, ValueError, r"got \['moe_router'\]"),
        ({"enable_cuda_graph": 1}, TypeError, "enable_cuda_graph must be True or False, got 1"),
        ({"enable_cuda_graph": True, "cuda_graph_impl": "local"}, ValueError, "are both given; leave enable_cuda"),
        ({"cuda_graph_scope": "full", "cuda_graph_modules": ["attn"]}, ValueError, "are both given; leave cuda_gr"),
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any], error: type[Exception], message: str):
    with without_type_checker(), pytest.raises(error, match=message):
        CudaGraphConfig(**fields)


def test_models_are_jitted_as_a_whole():
    with pytest.raises(ValueError, match=r"the models do not follow cuda_graph_impl='local'; .*full_iteration"):
        GPTModel(config("local"), vocab_size=32, max_sequence_length=8, rngs=nnx.Rngs(0))
    GPTModel(config("full_iteration"), vocab_size=32, max_sequence_length=8, rngs=nnx.Rngs(0))
