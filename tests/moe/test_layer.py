"""`jax_te.megatron.MoELayer` against the oracle, over the pairwise cover of its options: forward, gradients, losses,
what it counts, and the biases that follow.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.layers import set_aux_loss_scale
from jax_te.megatron import MoELayer
from jax_te.quantize import QuantizerState, write_back
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, Recipe, autocast
from tests.support import oracles
from tests.support.moe import cover
from tests.support.moe.data import LOSS_SCALE, B, Data, S, make_data
from tests.support.moe.experts import MoEResult
from tests.support.moe.router import updated_beta, updated_expert_bias
from tests.support.numerics import assert_close, assert_same_rounding, quick_jit, relative_l2
from tests.support.pairs import Case, case_id
from tests.support.states import merging

TOLERANCE = 1e-5
CASES, REFUSED = cover.read()
NAMES = {
    "router.weight": ("router", "kernel"),
    "router.bias": ("router", "bias"),
    "experts.wi": ("experts", "linear_fc1", "kernel"),
    "experts.wi_bias": ("experts", "linear_fc1", "bias"),
    "experts.wo": ("experts", "linear_fc2", "kernel"),
    "experts.wo_bias": ("experts", "linear_fc2", "bias"),
    "latent.down": ("fc1_latent_proj", "kernel"),
    "latent.down_bias": ("fc1_latent_proj", "bias"),
    "latent.up": ("fc2_latent_proj", "kernel"),
    "latent.up_bias": ("fc2_latent_proj", "bias"),
    "shared.wi": ("shared_experts", "linear_fc1", "kernel"),
    "shared.wo": ("shared_experts", "linear_fc2", "kernel"),
    "shared.gate": ("shared_experts", "gate_kernel"),
}
"""Where the layer has each parameter of the oracle."""

KEY = jax.random.key(3)


def by_sequence(x: np.ndarray) -> jax.Array:
    """``[s b, ...]`` as ``[b, s, ...]``."""
    return jnp.asarray(np.swapaxes(x.reshape(S, B, *x.shape[1:]), 0, 1))


def by_position(x: Any) -> np.ndarray:
    """``[b, s, ...]`` as ``[s b, ...]``."""
    return np.swapaxes(np.asarray(x), 0, 1).reshape(S * B, *x.shape[2:])


def config_of(case: Case, **others: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=cover.HIDDEN,
        num_attention_heads=1,
        num_moe_experts=cover.EXPERTS,
        moe_ffn_hidden_size=cover.FFN,
        **cover.config_fields(case) | others,
    )


def drawn_for(purpose: str) -> Any:
    return jax.random.fold_in(KEY, zlib.crc32(purpose.encode()))


def with_random_numbers(data: Data, case: Case) -> Data:
    """Data with the jitter and the random logits that the layer draws from `KEY`."""
    noise = forced = None
    if (eps := case["moe_input_jitter_eps"]) is not None and data.training:  # where Megatron has it in evaluation, too
        noise = jax.random.uniform(drawn_for("router_input"), (B, S, cover.HIDDEN), jnp.float32, 1.0 - eps, 1.0 + eps)
    if data.forced_logits is not None:
        drawn, shape = drawn_for("router_choice"), (B, S, cover.EXPERTS)
        forced = jax.random.normal(drawn, shape)
        if (std := case["moe_router_force_biased"]) is not None:
            forced = forced + std * jax.random.normal(drawn_for("router_bias"), shape[-1:])[None, None]
    return dataclasses.replace(
        data,
        noise=None if noise is None else by_position(noise),
        forced_logits=None if forced is None else by_position(forced),
    )


def parameter_at(layer: Any, name: str) -> Any:
    for part in NAMES[name]:
        layer = getattr(layer, part)
    return layer


def layer_of(case: Case, data: Data) -> MoELayer:
    """The layer with the data's parameters and state; with that of the ambient recipe, too."""
    layer = MoELayer(config_of(case), rngs=nnx.Rngs(0))
    layer.train() if data.training else layer.eval()
    for name, value in data.params.items():
        own = parameter_at(layer, name)
        own.set_value(jnp.asarray(to_ours(name, value)).reshape(own.shape))
    router, state = layer.router, data.state
    for own, values in (
        (router.expert_bias, state.expert_bias),
        (router.quantile_bias, [*state.beta, 0.0]),
        (router.counts_so_far, [*state.global_counts, state.global_steps]),
    ):
        if own is not None:
            own.set_value(jnp.asarray(values, jnp.float32))
    set_aux_loss_scale(layer, LOSS_SCALE)
    return layer


def to_ours(name: str, value: np.ndarray) -> np.ndarray:
    return value.T if name == "router.weight" else value


def run(layer: MoELayer, data: Data) -> tuple[Any, Any, Any, Any]:
    """Output, routing, gradients of the input, and of parameters and states."""
    mask = None if data.valid is None else by_sequence(~data.valid)
    graph, params, states, rest = nnx.split(layer, nnx.Param, QuantizerState, ...)

    @quick_jit
    def call(params: Any, states: Any, rest: Any, x: jax.Array, g: jax.Array) -> Any:
        def loss(params: Any, states: Any, x: jax.Array) -> Any:
            layer = nnx.merge(graph, params, merging(states), rest)
            y, bias = layer(x, padding_mask=mask, key=KEY)
            assert bias is None
            return jnp.sum(y * g), (y, layer.router(x, padding_mask=mask, key=KEY, return_routing=True))

        (_, (y, routing)), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(params, states, x)
        return y, routing, grads[2], nnx.merge(graph, *grads[:2], rest)

    return call(params, states, rest, by_sequence(data.x), by_sequence(data.g))


DEFAULT = (18, 21)
"""Cases with several losses and with quantiles, in the default run: each compiles for some seconds."""
COSTLY = (0, 9, 10, 26, 27, 30)
"""Cases that CI runs beside these; the others are slow."""
MARKED = [
    pytest.param(
        case,
        id=case_id({"case": number, **cover.differences(case)}),
        marks=[] if number in DEFAULT else pytest.mark.costly if number in COSTLY else pytest.mark.slow,
    )
    for number, case in enumerate(CASES)
]


@pytest.mark.costly(
    "30-4-sqrtsoftplus-quantile_balancing-True-0.5-position-squared_relu-8-True-True-False",
    slow=(
        "27-1-sinkhorn-0.02-0.1-True-True-squared_relu-True-True-True",
        "21-1-True-quantile_balancing-0.5-position-True-swiglu-12",
        "10-sqrtsoftplus-True-2.5-(4,2)-True-seq_aux_loss-1.0-True-clamped-8-12-True-True-True-False",
        "0-1-sigmoid-2.5-(2,1)-True-0.02-0.1-True-0.5-True-swiglu-8-True-False",
        "9-4-sqrtsoftplus-2.5-(4,2)-True-seq_aux_loss-0.02-0.1-0.5-0.5-True-8-True",
        "18-4-sigmoid-(2,1)-allofthem-1.0-True-squared_relu-8-12-True-True",
    ),
)
@pytest.mark.parametrize("case", MARKED)
def test_the_layer_is_the_oracle(case: Case) -> None:
    data = with_random_numbers(make_data(case), case)
    expected = data.expected()
    layer = layer_of(case, data)
    y, routing, dx, grads = run(layer, data)
    check_routing(routing, expected, data)
    assert_close(by_position(y), expected.y, TOLERANCE, what="y")
    assert_close(by_position(dx), expected.dx, TOLERANCE, what="dx")
    for name, value in expected.gradients.items():
        found = np.asarray(parameter_at(grads, name))
        wanted = to_ours(name, value).reshape(found.shape)
        if not wanted.any():
            assert not found.any(), name
            continue
        assert_close(found, wanted, TOLERANCE, what=name)
    check_state(layer, grads, expected, data)


def check_routing(routing: Any, expected: MoEResult, data: Data) -> None:
    """The same experts for each token, the same tokens dropped; probabilities and losses in fp32."""
    theirs = expected.routing
    tokens = np.arange(S * B)[:, None]
    experts, probs = by_position(routing.experts), by_position(routing.probs)
    kept = np.ones(experts.shape, bool) if routing.kept is None else by_position(routing.kept)
    found = {"probs": np.zeros(theirs.probs.shape), "kept": np.zeros(theirs.kept.shape, bool)}
    found["probs"][tokens, experts], found["kept"][tokens, experts] = probs * kept, kept
    assert (experts == np.array(theirs.chosen)).all()
    np.testing.assert_array_equal(found["kept"], theirs.kept)
    assert_close(found["probs"], theirs.probs, TOLERANCE, what="probabilities")
    factors = data.options.coefficients() | {"z_loss": data.options.moe_z_loss_coeff}
    assert routing.losses.keys() == theirs.losses.keys()
    for name, value in routing.losses.items():
        np.testing.assert_allclose(float(value) * factors[name], theirs.losses[name], rtol=TOLERANCE, err_msg=name)


def check_state(layer: MoELayer, grads: Any, expected: MoEResult, data: Data) -> None:
    """What was counted, and the states of the next step."""
    theirs, state, router = expected.routing, data.state, layer.router
    if not data.training:
        for _, counts in nnx.iter_graph(grads):
            assert not isinstance(counts, QuantizerState) or not np.asarray(counts.get_value()).any()
        return
    counted = nnx.state(grads.router, QuantizerState)
    new = nnx.clone(router)
    nnx.update(new, write_back(nnx.state(router, QuantizerState), counted))
    if router.expert_bias is not None:
        np.testing.assert_array_equal(grads.router.expert_bias.get_value(), theirs.tokens_per_expert)
        bias = updated_expert_bias(
            state.expert_bias, theirs.tokens_per_expert, data.options.moe_router_bias_update_rate
        )
        np.testing.assert_array_equal(new.expert_bias.get_value(), bias.astype(np.float32))
    if router.counts_so_far is not None:
        np.testing.assert_array_equal(grads.router.counts_so_far.get_value(), [*theirs.global_counts, 1.0])
        assert not np.asarray(new.counts_so_far.get_value()).any()
    if router.quantile_bias is not None:
        assert theirs.quantiles is not None
        assert_close(grads.router.quantile_bias.get_value(), [*theirs.quantiles, 1.0], TOLERANCE)
        beta = updated_beta(state.beta, [theirs.quantiles], data.options.moe_router_quantile_balancing_ema)
        assert_close(new.quantile_bias.get_value(), [*beta, 0.0], TOLERANCE)


@pytest.mark.wide("current")
@pytest.mark.parametrize("name", ["current", "delayed"])
def test_each_expert_is_quantized_by_itself(name: str) -> None:
    """With a scale of its own for each operand of each of its layers, as the oracle's experts have."""
    case = cover.full({"activation": "swiglu", "balancing": "aux_loss"})
    data, fixed = make_data(case), None
    recipe: Recipe = Float8CurrentScaling()
    if name == "delayed":  # fresh scales are 1
        recipe, fixed = DelayedScaling(), dict.fromkeys(("x", "kernel", "grad"), 1.0)
    scales = [(oracles.Scales(fixed=fixed), oracles.Scales(fixed=fixed)) for _ in range(cover.EXPERTS)]
    expected = data.expected(scales=scales)
    with autocast(recipe):
        y, routing, dx, grads = run(layer_of(case, data), data)
    check_routing(routing, expected, data)
    assert_same_rounding(by_position(y), expected.y, TOLERANCE, what="y")
    assert_same_rounding(by_position(dx), expected.dx, TOLERANCE, what="dx")
    for parameter, value in expected.gradients.items():
        found = np.asarray(parameter_at(grads, parameter))
        wanted = to_ours(parameter, value).reshape(found.shape)
        assert_same_rounding(found, wanted, TOLERANCE, what=parameter)
    assert relative_l2(by_position(y), data.expected().y) > 0.01  # unquantized
    if name == "delayed":
        for linear, which in ((grads.experts.linear_fc1, 0), (grads.experts.linear_fc2, 1)):
            for role, state in nnx.as_pure(linear.quantizers).items():
                amaxes = [scales[e][which].seen.get(role, 0.0) for e in range(cover.EXPERTS)]
                np.testing.assert_allclose(state["amax_history"][:, 0], amaxes, rtol=TOLERANCE, err_msg=role)


@pytest.mark.parametrize(("case", "field"), REFUSED, ids=[f"{field}-{i}" for i, (_, field) in enumerate(REFUSED)])
def test_what_does_not_go_together_is_refused_by_name(case: Case, field: str) -> None:
    def call() -> None:
        layer = MoELayer(config_of(case), rngs=nnx.Rngs(0))
        layer(jnp.ones((B, S, cover.HIDDEN)), padding_mask=jnp.ones((B, S), bool) if case["padding"] else None)

    with pytest.raises((ValueError, AssertionError), match=field):
        call()
