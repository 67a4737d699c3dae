"""Experts on every kind of mesh have the losses, gradients and states of one device."""

from __future__ import annotations

import contextlib
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

from jax_te.config import DispatchOptions, ParallelConfig, RouterOptions, TransformerConfig
from jax_te.layers import GroupedLoRA, MoE, expert_metrics, expert_rows
from jax_te.megatron import MoELayer
from jax_te.ops import dispatch, expert_placement, routing
from jax_te.quantize import QuantizerState, observe_quantization
from jax_te.recipe import Float8CurrentScaling, autocast
from jax_te.remat import selective_recompute
from jax_te.sharding import ShardingRules, communication_report, constrain, make_mesh, use_rules
from jax_te.training import create_train_state, make_train_step
from tests.support.numerics import draw

B, S, H, F, E, K = 8, 8, 32, 32, 8, 2
X, G = draw("x", (B, S, H)), draw("g", (B, S, H))
WRT = nnx.DiffState(0, (nnx.Param, QuantizerState))

# fp32: sums over devices in another order, 2^-24 each; 1e-5 of an array's largest element is what is promised.
TOLERANCE = 1e-5


@contextlib.contextmanager
def on_mesh(sizes: dict[str, int] | None, axis_type: Any = "auto", **rules: Any) -> Any:
    with use_rules(ShardingRules(**rules)):
        if sizes is None:
            yield
        else:
            with jax.set_mesh(make_mesh(ParallelConfig(**sizes), axis_type=axis_type)):
                yield


def build(router: dict[str, Any] | None = None, **options: Any) -> MoE:
    router = {"aux_loss_coeff": 0.1, "z_loss_coeff": 0.01} | (router or {})
    return MoE(H, F, RouterOptions(**{"num_experts": E, "topk": K} | router), rngs=nnx.Rngs(0), **options)


def both(layer: Any, **call: Any) -> Any:
    """Function of parameters, states and input that returns output and gradients."""
    graphdef, params, states, rest = nnx.split(layer, nnx.Param, QuantizerState, ...)

    def run(params: Any, states: Any, x: Any) -> Any:
        x = constrain(x, ("batch", "sequence", None)) if has_explicit_axes() else x  # as in a model
        y, vjp = jax.vjp(lambda *args: nnx.merge(graphdef, *args[:2], rest)(args[2], **call), params, states, x)
        # On an Explicit mesh a cotangent has the sharding of its output, which is part of its type.
        return y, vjp(jax.sharding.reshard(G, jax.typeof(y).sharding.spec) if has_explicit_axes() else G)

    return jax.jit(run), (params, states)


def has_explicit_axes() -> bool:
    return jax.sharding.AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def results(layer: Any, **call: Any) -> Any:
    run, parts = both(layer, **call)
    return jax.tree.map(np.asarray, run(*parts, X))


@functools.cache
def one_device() -> Any:
    return results(build())


def assert_same(found: Any, wanted: Any, tolerance: float = TOLERANCE) -> None:
    for (path, mine), theirs in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        scale = np.max(np.abs(theirs)) if theirs.size else 0.0
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance * scale, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
@pytest.mark.wide("fsdp-expert-tensor-alltoall-auto")
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("sizes", [{"fsdp": 2, "expert": 2, "tensor": 2}], ids=lambda sizes: "-".join(sizes))
def test_every_dispatcher_gives_one_devices_gradients(sizes: Any, dispatcher: Any, axis_type: Any) -> None:
    with on_mesh(sizes, axis_type):
        found = results(build(dispatch=DispatchOptions(dispatcher=dispatcher), sequence_parallel=True))
    assert_same(found, one_device())


MASK = jnp.arange(S)[None] >= jnp.array([3, 5, 8, 8, 8, 8, 7, 8])[:, None]  # True for padding


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "tensor": 2},
        {"data": 2, "context": 2},
        {"fsdp": 2, "context": 2},
        {"context": 2, "expert": 2},
    ],
    ids=lambda sizes: "-".join(sizes),
)
def test_tokens_with_a_sharding_in_their_type(sizes: Any, dispatcher: Any) -> None:
    router: dict[str, Any] = {"expert_capacity_factor": 1.0}
    wanted = results(build(router), padding_mask=MASK)
    with on_mesh(sizes, "explicit"):
        found = results(build(router, dispatch=DispatchOptions(dispatcher=dispatcher)), padding_mask=MASK)
    assert_same(found, wanted)


@pytest.mark.slow
def test_rows_of_all_experts_on_each_device_of_an_explicit_mesh() -> None:
    """As where quantized tensors are observed, and under recipes with scales of whole tensors."""
    with on_mesh({"expert": 2, "tensor": 2}, "explicit"), observe_quantization():
        found = results(build())
    assert_same(found, one_device())


@pytest.mark.costly
def test_ops_of_routing_take_tokens_with_a_sharding_in_their_type() -> None:
    grouped = RouterOptions(num_experts=E, topk=4, num_groups=4, group_topk=2, score_function="sigmoid")

    @jax.jit
    def run(logits: Any) -> Any:
        chosen, by_sinkhorn = routing.route(logits, grouped), routing.route_by_sinkhorn(logits, 1, balanced=True)
        room = routing.within_capacity(chosen, E, 8, "probs")
        return chosen, by_sinkhorn, room, routing.expert_quantiles(logits, jnp.zeros(E), K)

    logits = draw("logits", (B * S, E))
    wanted = run(logits)
    with on_mesh({"data": 2, "context": 2}, "explicit"):
        found = run(constrain(logits, ("batch", None)))
    assert found[0].probs.sharding.spec == PartitionSpec("data", None)
    assert_same(jax.tree.map(np.float64, found), jax.tree.map(np.float64, wanted))


CASES: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "no expert axis": ({"data": 2, "context": 2, "tensor": 2}, {}, {}),
    "one expert a device": ({"expert": 8}, {}, {}),
    "whole sequences": ({"data": 2, "expert": 2, "tensor": 2}, {}, {}),
    "experts whole along tensor": ({"expert": 2, "tensor": 2}, {}, {"expert_tensor_parallel": False}),
    "whole, sequences split": (
        {"expert": 2, "tensor": 2}, {}, {"expert_tensor_parallel": False, "sequence_parallel": True},
    ),
    "within data": ({"data": 2, "fsdp": 2}, {"expert": ("data",)}, {}),
    "within fsdp": ({"data": 2, "fsdp": 2}, {"expert": ("fsdp",)}, {}),
    "over expert and tensor": ({"expert": 2, "tensor": 2}, {"expert": ("expert", "tensor")}, {}),
    "with context": ({"context": 2, "expert": 2, "pipeline": 2}, {}, {}),
}  # fmt: skip


@pytest.mark.costly(
    *(name for name in CASES if name != "within fsdp"),
    slow=["one expert a device", "within data", "experts whole along tensor"],
)
@pytest.mark.parametrize("name", CASES)
def test_axes_may_be_named_in_every_way(name: str) -> None:
    sizes, rules, options = CASES[name]
    with on_mesh(sizes, **rules):
        found = results(build(dispatch=DispatchOptions(dispatcher="alltoall"), **options))
    assert_same(found, one_device())


LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "probs on input": ({"topk": 1, "score_function": "sigmoid"}, {"apply_probs_on_input": True}),
    "capacity by probs": ({"expert_capacity_factor": 1.0, "pad_expert_input_to_capacity": True}, {}),
    "capacity by position": ({"expert_capacity_factor": 0.5, "token_drop_policy": "position"}, {}),
    "groups": ({"topk": 4, "num_groups": 4, "group_topk": 2, "score_function": "sigmoid"}, {}),
    "losses of sequences": (
        {"load_balancing_type": ("seq_aux_loss", "global_aux_loss"), "aux_loss_coeff": (0.1, 0.1)}, {},
    ),
    "sinkhorn": ({"load_balancing_type": "sinkhorn", "aux_loss_coeff": 0.0}, {}),
    "quantiles": ({"load_balancing_type": "quantile_balancing", "aux_loss_coeff": 0.0}, {}),
    "shared and latent": (
        {}, {"bias": False, "shared_expert_intermediate_size": 16, "shared_expert_gate": True, "latent_size": 16},
    ),
}  # fmt: skip


@pytest.mark.costly(
    *(f"{name}-auto" for name in LAYERS if name != "probs on input"),
    *(f"{name}-explicit" for name in LAYERS),
    slow=[
        "probs on input-explicit",
        "capacity by probs-explicit",
        "shared and latent-explicit",
        "capacity by position-explicit",
        "groups-auto",
        "losses of sequences-explicit",
        "sinkhorn-explicit",
        "quantiles-auto",
        "shared and latent-auto",
    ],
)
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_option_of_the_layer_is_that_of_one_device(name: str, axis_type: Any) -> None:
    router, options = LAYERS[name]
    wanted = results(build(router, **options))
    with on_mesh({"data": 2, "expert": 2, "tensor": 2}, axis_type):
        layer = build(router, dispatch=DispatchOptions(dispatcher="alltoall"), sequence_parallel=True, **options)
        found = results(layer)
    assert_same(found, wanted)


@pytest.mark.costly(slow=["moe_act"])
@pytest.mark.parametrize("module", ["moe", "moe_act"])
def test_recomputation_changes_nothing_on_a_mesh(module: Any) -> None:
    with on_mesh({"expert": 2, "tensor": 2}), selective_recompute(module):
        found = results(build())
    assert_same(found, one_device())


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
def test_adapters_run_on_their_experts_devices(axis_type: Any) -> None:
    def adapted() -> Any:
        layer = build()
        for name in ("linear_fc1", "linear_fc2"):
            adapter = GroupedLoRA(getattr(layer.experts, name), 4, freeze_base=False, rngs=nnx.Rngs(1))
            adapter.lora_b.set_value(draw(name, adapter.lora_b.shape))
            setattr(layer.experts, name, adapter)
        return layer

    wanted = results(adapted())
    with on_mesh({"fsdp": 2, "expert": 2, "tensor": 2}, axis_type):
        found = results(adapted())
    assert_same(found, wanted)


@pytest.mark.slow
def test_experts_must_lie_where_tokens_are_split() -> None:
    with on_mesh({"data": 2, "tensor": 2}, batch=("data",), expert=("fsdp",)):
        nnx.jit(lambda layer: layer(X))(build())  # the mesh has no devices along fsdp
    with (
        on_mesh({"data": 2, "fsdp": 2}, batch=("data",), expert=("fsdp",)),
        pytest.raises(ValueError, match="experts are split over mesh axis 'fsdp', which does not split tokens"),
    ):
        build()(X)


@pytest.mark.costly
def test_kernels_and_states_are_sharded_over_experts() -> None:
    with on_mesh({"fsdp": 2, "expert": 2, "tensor": 2}):
        experts = build().experts
        fc1, fc2 = (layer.kernel.get_value().sharding.spec for layer in (experts.linear_fc1, experts.linear_fc2))
    assert tuple(fc1) == ("expert", "fsdp", None, "tensor")
    assert tuple(fc2)[:2] == ("expert", ("tensor", "fsdp"))


@pytest.mark.slow
def test_megatrons_layer_is_that_of_one_device() -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=H,
        num_attention_heads=2,
        num_moe_experts=E,
        moe_ffn_hidden_size=F,
        moe_aux_loss_coeff=0.1,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_model_parallel_size=2,
        moe_token_dispatcher_type="flex",
    )

    def of_layer() -> Any:
        layer = MoELayer(config, rngs=nnx.Rngs(0))
        run = nnx.jit(nnx.value_and_grad(lambda layer: jnp.sum(layer(X)[0] * G), argnums=WRT))
        return jax.tree.map(np.asarray, run(layer))

    wanted = of_layer()
    with on_mesh({"data": 2, "expert": 2, "tensor": 2}):
        assert_same(of_layer(), wanted)
    with on_mesh({"expert": 4, "tensor": 2}), pytest.raises(ValueError, match="splits experts over 4 devices"):
        of_layer()


def collectives(sizes: dict[str, int], **options: Any) -> dict[str, int]:
    """Numbers of collectives of forward and backward, by kind and mesh axes."""
    with on_mesh(sizes):
        run, parts = both(build({"aux_loss_coeff": 0.0, "z_loss_coeff": None}, bias=False, **options))
        rows = communication_report(run.lower(*parts, X)).rows
    return {f"{row.kind} {'*'.join(row.axes)}": row.count for row in rows if row.kind != "all-reduce"}


# Forward and backward each move tokens to experts and back once. Numbers of experts and probabilities go with the
# tokens, the gradients of probabilities back.
WANTED: dict[str, Any] = {
    "allgather": ({"all-gather expert": 4, "reduce-scatter expert": 3}),
    "alltoall": ({"all-to-all expert": 7}),
}


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", WANTED)
def test_tokens_travel_once_in_each_direction(dispatcher: Any) -> None:
    dispatch = DispatchOptions(dispatcher=dispatcher)
    assert collectives({"expert": 4}, dispatch=dispatch) == WANTED[dispatcher]


@pytest.mark.slow
def test_kernels_are_gathered_along_fsdp_alone() -> None:
    """Each of two kernels once in each direction, and its gradient is scattered; nothing of them crosses experts."""
    found = collectives({"fsdp": 2, "expert": 2})
    assert found == WANTED["allgather"] | {"all-gather fsdp": 4, "reduce-scatter fsdp": 2}


@pytest.mark.costly
def test_tensor_parallel_experts_add_up_tokens_not_rows() -> None:
    """Whole sequences: no rows are gathered, and each token's sum is all-reduced once in each direction."""
    with on_mesh({"expert": 2, "tensor": 2}):
        run, parts = both(build({"aux_loss_coeff": 0.0, "z_loss_coeff": None}, bias=False))
        rows = communication_report(run.lower(*parts, X)).rows
    tokens = 4 * B * S * H  # of the two devices along expert, fp32
    summed = [row for row in rows if row.axes == ("tensor",) and row.kind == "all-reduce"]
    assert [row.kind for row in rows if "tensor" in row.axes and row.kind != "all-reduce"] == []
    assert sum(row.bytes for row in summed) < 2.2 * tokens


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_a_bound_drops_the_last_tokens_and_counts_them(dispatcher: Any) -> None:
    """All tokens choose the experts of one device, which has room for as many rows as each has under equal load."""
    chosen = jnp.broadcast_to(jnp.array([0, 1], jnp.int32), (B, S, K))
    router: dict[str, Any] = {"aux_loss_coeff": 0.0, "z_loss_coeff": None}
    bound = DispatchOptions(dispatcher=dispatcher, rank_capacity_factor=1.0)
    unbound = results(build(router, bias=False), experts=chosen)[0].reshape(-1, H)
    with on_mesh({"expert": 4}):
        layer = build(router, bias=False, dispatch=bound)
        run, parts = both(layer, experts=chosen)
        y, (_, states, _) = run(*parts, X)
        nnx.update(layer, states)  # what the calls counted
        share = float(expert_metrics(layer)["overflow_share"])
        again, _ = run(*parts, X)
    y = np.asarray(y).reshape(-1, H)
    np.testing.assert_array_equal(y, np.asarray(again).reshape(-1, H))
    kept = np.any(y != 0.0, axis=-1)
    # One device takes 16 tokens' assignments: of 16 tokens of each device the first 4, and by all-to-all sends of 8.
    np.testing.assert_array_equal(kept, np.tile(np.arange(16) < 4, 4))
    np.testing.assert_allclose(y[kept], unbound[kept], rtol=0, atol=TOLERANCE * np.max(np.abs(unbound)))
    assert share == 0.75


@pytest.mark.slow
def test_a_bound_that_suffices_changes_nothing() -> None:
    with on_mesh({"expert": 4}):
        layer = build(dispatch=DispatchOptions(dispatcher="alltoall", rank_capacity_factor=8.0))
        found = results(layer)
    found[1][1]["router"].pop("last_step")
    wanted = one_device()
    np.testing.assert_allclose(found[0], wanted[0], rtol=0, atol=TOLERANCE * np.max(np.abs(wanted[0])))


@pytest.mark.slow
@pytest.mark.parametrize("dispatcher", [pytest.param("allgather", marks=pytest.mark.costly), "alltoall"])
def test_tokens_and_gradients_may_travel_in_fp8(dispatcher: Any) -> None:
    """E4M3 forward, E5M2 backward, each token with a scale of its own; sums in the compute dtype."""
    sizes, options = {"expert": 2, "tensor": 2}, {"sequence_parallel": True, "bias": False}
    with on_mesh(sizes):
        layer = build(dispatch=DispatchOptions(dispatcher=dispatcher, fp8=True), **options)
        run, parts = both(layer)
        text = run.lower(*parts, X).compile().as_text() or ""
        found = jax.tree.map(np.asarray, run(*parts, X))
    assert_same(found[0], results(build(bias=False))[0], 2.0**-4)  # half of E4M3's last place
    sent = re.findall(rf"(\w+)\[[\d,]+,{H}\]\S* (all-gather|all-to-all|reduce-scatter)\(", text)
    exchange, back = ("all-gather", "reduce-scatter") if dispatcher == "allgather" else ("all-to-all", "all-to-all")
    there = [("u8", "all-gather"), ("u8", exchange)]  # along tensor, and along expert
    assert sorted(sent) == sorted(2 * [*there, ("f32", "reduce-scatter"), ("f32", back)])


@pytest.mark.costly
def test_what_travels_in_fp8_is_rounded_once_a_token() -> None:
    """One expert that copies its input: the sums are the tokens in E4M3, their gradients the outputs' in E5M2."""
    x, g = draw("x", (4, 2, 16)) * 8.0, draw("g", (4, 2, 16))
    chosen = jnp.broadcast_to(jnp.array([[0], [3]], jnp.int32), (4, 2, 1))

    def both_ways(x: Any, probs: Any) -> Any:
        kernels = (((4, 16, 16), ("expert", None, None)),)
        placement: Any = expert_placement(x.shape, kernels, sequence_parallel=False).placement
        options = {"alignment": 1, "dispatcher": "alltoall", "capacity": None, "factor": None, "fp8": True}
        call = dispatch.plan_dispatch(dispatch.transport_of(placement, x.shape, 1, 4, **options), chosen, None)
        return dispatch.combine(dispatch.dispatch(x, probs, call)[0], call)

    with on_mesh({"expert": 4}):
        y, vjp = jax.vjp(both_ways, x, jnp.ones((4, 2, 1)))
        dx = vjp(g)[0]

    def rounded(x: Any, dtype: Any) -> Any:
        scale = float(jnp.finfo(dtype).max) / np.max(np.abs(x), axis=-1, keepdims=True)
        return np.asarray((x * scale).astype(dtype), np.float32) / scale

    np.testing.assert_allclose(y, rounded(x, jnp.float8_e4m3fn), rtol=2.0**-21)
    np.testing.assert_allclose(dx, rounded(g, jnp.float8_e5m2), rtol=2.0**-21)


def trained(sizes: dict[str, int] | None, *, recipe: Any = None, dtype: Any = jnp.float32, **options: Any) -> Any:
    """Train state after two steps of two microbatches."""
    tx = optax.sgd(1.0)
    step_options = {name: options.pop(name) for name in ("reduce_gradients",) if name in options}
    with on_mesh(sizes), autocast(recipe):
        state = create_train_state(
            lambda rngs: MoE(H, F, RouterOptions(num_experts=E), params_dtype=dtype, rngs=rngs),
            tx,
            key=jax.random.key(0),
            **options,
        )
        step = make_train_step(
            lambda model, x, key: jnp.mean((model(x) - G[: len(x)]) ** 2), tx, microbatches=2, **step_options
        )
        for _ in range(2):
            state, _ = step(state, jnp.concatenate([X, X]))
    return state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        pytest.param({"dtype": jnp.bfloat16, "distributed_optimizer": True}, None, id="masters"),
        pytest.param({"reduce_gradients": "step"}, None, id="summands"),
        pytest.param({"fp8_param": True}, Float8CurrentScaling(amax_scope="whole"), id="fp8_param"),
    ],
)
def test_masters_are_split_and_train_as_on_one_device(options: dict[str, Any], recipe: Any) -> None:
    sizes = {"data": 2, "expert": 2, "tensor": 2}
    found, wanted = (trained(mesh, recipe=recipe, **options) for mesh in (sizes, None))
    mine, theirs = (state.params if state.masters is None else state.masters for state in (found, wanted))
    for (path, a), (_, b) in zip(nnx.to_flat_state(mine), nnx.to_flat_state(theirs), strict=True):
        a, b = np.asarray(a[...]), np.asarray(b[...])
        # Gradients of bf16 biases and of the router are rounded to bf16 on each device, before their sum.
        rounded = options.get("dtype") == jnp.bfloat16 and ("router" in path or path[-1] == "bias")
        tolerance = 2.0**-6 if rounded else 2 * TOLERANCE
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.max(np.abs(b)), err_msg=str(path))
    if found.masters is not None and "distributed_optimizer" in options:
        for layer in ("linear_fc1", "linear_fc2"):
            assert spec_of(found.masters["experts"][layer]["kernel"]) == {"expert", "data", "tensor"}


@pytest.mark.parametrize(
    ("dispatch", "tokens", "rows"),
    [
        # 16 tokens a device, of 2 experts each; a device has 2 experts, whose rows begin at multiples of 16.
        (DispatchOptions(), 64, 64 * 2 + 32),
        (DispatchOptions(dispatcher="alltoall"), 64, 64 * 2 + 32),
        (DispatchOptions(dispatcher="alltoall", rank_capacity_factor=1.0), 32, 32 + 32),
        (DispatchOptions(rank_capacity_factor=1.5), 64, 48 + 32),
    ],
)
def test_room_for_rows_is_reported(dispatch: DispatchOptions, tokens: int, rows: int) -> None:
    with jax.sharding.use_abstract_mesh(AbstractMesh((4,), ("expert",))):
        layer = nnx.eval_shape(lambda: build(bias=False, dispatch=dispatch))
        (found,) = expert_rows(layer, B, S, dtype=jnp.bfloat16)
    assert (found.tokens, found.rows, found.equal_load) == (tokens, rows, 32)
    assert found.bytes == 2 * (tokens * H + rows * (2 * H + 2 * F))
    assert expert_rows(layer, B, S) == []


def spec_of(variable: Any) -> set[str]:
    return {*jax.tree.leaves(tuple(variable.get_value().sharding.spec))}


@pytest.mark.slow
@pytest.mark.parametrize(("axis_type", "dispatcher"), [("auto", "alltoall"), ("explicit", "allgather")])
def test_a_number_that_no_expert_has(axis_type: Any, dispatcher: Any) -> None:
    """Its token is nan, as on one device, and no other device's tokens change."""
    numbers = jnp.broadcast_to(jnp.array([1, 6], jnp.int32), (B, S, K))
    router: dict[str, Any] = {"aux_loss_coeff": 0.0, "z_loss_coeff": None}
    call = jax.jit(lambda layer, x, experts: layer(x, experts=experts))
    wanted = np.array(call(build(router, bias=False), X, numbers))
    for at, outside in (((1, 3, 0), -1), ((6, 2, 1), E)):
        numbers = numbers.at[at].set(outside)
        wanted[at[:2]] = np.nan
    with on_mesh({"fsdp": 2, "expert": 2, "tensor": 2}, axis_type):
        layer = build(router, bias=False, dispatch=DispatchOptions(dispatcher=dispatcher), sequence_parallel=True)
        found = np.asarray(call(layer, X, numbers))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * np.nanmax(np.abs(wanted)))
