"""The MoE oracle against Megatron-Core itself: its functions, and its whole layer with experts of plain torch, on CPU.

Megatron's layer is the one of its local specification. It has no latent experts, for which it wants Transformer Engine.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.moe import cover
from tests.support.moe.data import LOSS_SCALE, B, Data, S, make_data
from tests.support.moe.options import MoEOptions
from tests.support.moe.router import (
    RouterState,
    kept_tokens,
    load_balancing_loss,
    quantiles,
    route,
    sinkhorn,
    updated_beta,
    updated_expert_bias,
)
from tests.support.numerics import assert_close
from tests.support.pairs import Case, case_id

_REASON = "compares with Megatron-Core: pip install -e '.[parity]'"
torch = pytest.importorskip("torch", reason=_REASON)
pytest.importorskip("megatron.core", reason=_REASON)

TOLERANCE = 2.0**-18
"""Some sums of tens of terms in fp32, one behind the other: each errs by a few units of 2^-24."""


@functools.cache
def megatron() -> types.SimpleNamespace:
    """Megatron's modules. Imports of it warn of all that is not installed."""
    paths = {
        "activations": "activations",
        "config": "transformer.transformer_config",
        "finalize": "distributed.finalize_model_grads",
        "groups": "process_groups_config",
        "router": "transformer.moe.router",
        "specs": "models.gpt.moe_module_specs",
        "utils": "transformer.moe.moe_utils",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = {name: importlib.import_module(f"megatron.core.{path}") for name, path in paths.items()}
    return types.SimpleNamespace(**modules)


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """A process group of this process alone, which Megatron reduces over."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with torch.compiler.set_stance("force_eager"):  # Megatron compiles some functions, which takes long
        yield
    torch.distributed.destroy_process_group()


def logits_of(seed: int, experts: int = 8, tokens: int = 24) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(tokens, experts)).astype(np.float32)


def options(**fields: Any) -> MoEOptions:
    return MoEOptions(num_moe_experts=8, hidden_size=4, moe_ffn_hidden_size=4, **fields)


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("groups", [None, (4, 2), (2, 1)])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_topk_routing_with_score_function(name: str, groups: tuple[int, int] | None, k: int) -> None:
    if groups is not None and groups[1] > k:
        groups = (groups[0], k)
    bias = np.linspace(-0.3, 0.3, 8)
    for pre_softmax in (True, False):
        for expert_bias in (None, bias) if name != "softmax" else (None,):
            given = options(
                moe_router_topk=k,
                moe_router_score_function=name,
                moe_router_pre_softmax=pre_softmax,
                moe_router_topk_scaling_factor=2.5,
                moe_router_num_groups=groups and groups[0],
                moe_router_group_topk=groups and groups[1],
                moe_router_enable_expert_bias=expert_bias is not None,
            )
            state = dataclasses.replace(RouterState.fresh(8), expert_bias=bias)
            ours = route(logits_of(0), given, state)
            probs, routing_map = megatron().utils.topk_routing_with_score_function(
                torch.tensor(logits_of(0)),
                k,
                use_pre_softmax=pre_softmax,
                num_groups=given.moe_router_num_groups,
                group_topk=given.moe_router_group_topk,
                scaling_factor=2.5,
                score_function=name,
                expert_bias=None if expert_bias is None else torch.tensor(bias),
            )
            np.testing.assert_array_equal(ours.routed, routing_map.numpy())
            assert_close(ours.probs, probs.numpy(), 2.0**-22)


def test_losses_and_their_counts() -> None:
    utils = megatron().utils
    p, counts = np.abs(logits_of(1)).astype(np.float64), np.arange(8.0)
    theirs = utils.switch_load_balancing_loss_func(torch.tensor(p), torch.tensor(counts), 24, 2, 8, 0.3)
    np.testing.assert_allclose(load_balancing_loss(p, counts, 24, 2, 0.3), theirs.item(), rtol=1e-12)
    padding = np.arange(24) % 5 == 0
    for name in ("softmax", "sigmoid", "sqrtsoftplus"):
        aux = options(moe_router_score_function=name, moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.2)
        ours = route(logits_of(2), aux, RouterState.fresh(8), valid=~padding)
        chosen, scores = utils.compute_routing_scores_for_aux_loss(
            torch.tensor(logits_of(2)), 2, name, padding_mask=torch.tensor(padding)
        )
        np.testing.assert_array_equal(ours.global_counts, chosen.sum(0).numpy())
        theirs = utils.switch_load_balancing_loss_func(scores, chosen.sum(0), int((~padding).sum()), 2, 8, 0.3)
        np.testing.assert_allclose(ours.losses["aux_loss"], theirs.item(), rtol=1e-6)
        z = utils.z_loss_func(torch.tensor(logits_of(2)), 0.2, padding_mask=torch.tensor(padding))
        np.testing.assert_allclose(ours.losses["z_loss"], z.item(), rtol=1e-6)


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 3.9, 4.1])
def test_apply_router_token_dropping(policy: str, factor: float) -> None:
    given = options(moe_expert_capacity_factor=factor, moe_token_drop_policy=policy)
    whole = route(logits_of(3), options(), RouterState.fresh(8))
    probs, routing_map = megatron().utils.apply_router_token_dropping(
        torch.tensor(whole.probs), torch.tensor(whole.routed), 2, factor, policy
    )
    kept = kept_tokens(whole.probs, whole.routed, given)
    if policy == "probs":
        np.testing.assert_array_equal(kept, routing_map.numpy())
        np.testing.assert_array_equal(whole.probs * kept, probs.numpy())
        return
    # A top-k of zeros and ones, of which torch takes any, where Megatron means the first.
    np.testing.assert_array_equal(kept.sum(0), routing_map.sum(0).numpy())
    order = np.cumsum(whole.routed, 0)
    np.testing.assert_array_equal(kept, whole.routed & (order <= (given.capacity(24) or 24)))


def test_get_updated_expert_bias() -> None:
    counts, bias = np.array([3.0, 0.0, 4.0, 5.0, 4.0, 8.0, 4.0, 4.0]), np.linspace(-1, 1, 8)
    theirs = megatron().utils.get_updated_expert_bias(
        torch.tensor(counts), torch.tensor(bias), 0.125, tp_dp_cp_group=torch.distributed.group.WORLD
    )
    np.testing.assert_array_equal(updated_expert_bias(bias, counts, 0.125), theirs.numpy())


def test_sinkhorn() -> None:
    theirs = megatron().utils.sinkhorn(torch.tensor(logits_of(4).astype(np.float64)))
    np.testing.assert_allclose(sinkhorn(logits_of(4).astype(np.float64)), theirs.numpy(), rtol=1e-12)


def test_quantile_balancing() -> None:
    logits, beta = logits_of(5).astype(np.float64), np.linspace(-0.5, 0.5, 8)
    chosen, theirs = megatron().utils.qb_dual_update(torch.tensor(logits), 2, torch.tensor(beta))
    np.testing.assert_array_equal(quantiles(logits, 2, beta), theirs.numpy())
    given = options(moe_router_load_balancing_type="quantile_balancing")
    ours = route(logits, given, dataclasses.replace(RouterState.fresh(8), beta=beta))
    np.testing.assert_array_equal(ours.chosen, chosen.numpy())


# ---------------------------------------------------------------- the whole layer


def their_case(case: Case) -> Case:
    """A case as Megatron can run it, and with one answer."""
    others: Case = {
        "moe_latent_size": None,  # wants Transformer Engine
        "ties": False,  # torch's top-k does not say which of equal values it takes
    }
    if case["padding"] and case["moe_router_enable_expert_bias"]:
        others["padding"] = False  # raises: it combines a map [t, e] with a mask [t]
    if case["moe_expert_capacity_factor"] is not None and case["moe_token_drop_policy"] == "position":
        others["moe_token_drop_policy"] = "probs"  # a top-k of zeros and ones
    if case["moe_pad_expert_input_to_capacity"] and case["moe_apply_probs_on_input"]:
        others["add_bias_linear"] = False  # tokens that only fill an expert would get its biases
    return case | others


def their_activation(name: str) -> Any:
    return {
        "gelu": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
        "silu": torch.nn.functional.silu,
        "squared_relu": megatron().activations.squared_relu,
        "quick_gelu": megatron().activations.quick_gelu,
    }[name]


def their_layer(data: Data, case: Case, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's layer with the data's parameters and state."""
    m, ours = megatron(), data.options
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    fields = {
        name: list(value) if isinstance(value, tuple) else value for name, value in cover.config_fields(case).items()
    }
    fields["activation_func"] = their_activation(fields["activation_func"])
    group = torch.distributed.group.WORLD
    names = [field.name for field in dataclasses.fields(m.groups.ProcessGroupCollection)]
    collection = m.groups.ProcessGroupCollection(
        **{name: group for name in names if name not in ("embd", "pos_embd", "hcp")}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = m.config.TransformerConfig(
            num_layers=1,
            hidden_size=cover.HIDDEN,
            num_attention_heads=1,
            ffn_hidden_size=cover.FFN,
            num_moe_experts=cover.EXPERTS,
            moe_ffn_hidden_size=cover.FFN,
            use_cpu_initialization=True,
            bias_activation_fusion=False,
            **fields,
        )
        layer = m.specs.get_moe_module_spec(use_te=False, num_experts=cover.EXPERTS)(
            config=config, pg_collection=collection
        )
    for expert in layer.experts.local_experts:  # which adds a bias in place to a view that autograd protects
        expert.linear_fc2.register_forward_hook(lambda _, __, out: (out[0].clone(), out[1]))
    layer.set_layer_number(1)
    layer.train(data.training)
    with torch.no_grad():
        for name, (parameter, _) in their_parameters(layer, ours).items():
            parameter.copy_(torch.tensor(_to_theirs(name, data.params)))
        for name, value in (
            ("expert_bias", data.state.expert_bias),
            ("qb_beta", data.state.beta),
            ("global_tokens_per_expert", data.state.global_counts),
        ):
            if getattr(layer.router, name, None) is not None:
                getattr(layer.router, name).copy_(torch.tensor(value))
        if layer.router.ga_steps is not None:
            layer.router.ga_steps.fill_(data.state.global_steps)
    if data.noise is not None:
        layer.router.input_jitter = lambda shape: torch.tensor(data.noise).reshape(shape)
    if data.forced_logits is not None:
        forced = torch.tensor(data.forced_logits).reshape(S, B, -1)

        def straight_through(logits: Any, *_: Any) -> Any:
            return logits + (forced - logits).detach()

        monkeypatch.setattr(m.router, "apply_random_logits", straight_through)
        monkeypatch.setattr(m.router, "apply_biased_logits", straight_through)
    monkeypatch.setattr(m.utils.MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.tensor(LOSS_SCALE))
    return layer


def their_parameters(layer: Any, ours: MoEOptions) -> dict[str, tuple[Any, Any]]:
    """Each parameter of Megatron's under the oracle's name, an expert's with its number, and its gradient."""
    names = {
        "router.weight": "router.weight",
        "router.bias": "router.bias",
        "shared_experts.gate_weight": "shared.gate",
        "shared_experts.linear_fc1.weight": "shared.wi",
        "shared_experts.linear_fc2.weight": "shared.wo",
    }
    for e in range(ours.num_moe_experts):
        for fc, kernel in (("linear_fc1", "wi"), ("linear_fc2", "wo")):
            for suffix in ("weight", "bias"):
                end = "" if suffix == "weight" else "_bias"
                names[f"experts.local_experts.{e}.{fc}.{suffix}"] = f"experts.{kernel}{end} {e}"
    return {names[name]: (parameter, parameter.grad) for name, parameter in layer.named_parameters()}


def _to_theirs(name: str, values: dict[str, np.ndarray]) -> np.ndarray:
    """An array of ours in their layout: kernels ``[out, in]``, gate above up."""
    name, _, expert = name.partition(" ")
    value = values[name] if not expert else values[name][int(expert)]
    if name == "shared.gate":
        return value[None]
    if name.endswith(".wi"):
        return value.transpose(1, 2, 0).reshape(-1, value.shape[0])
    if name.endswith(".wo"):
        return value.T
    return value.reshape(-1) if name.endswith("wi_bias") else value


CASES, _ = cover.read()


@pytest.mark.parametrize("case", CASES, ids=[case_id(cover.differences(case)) for case in CASES])
def test_layer(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case = their_case(case)
    data = make_data(case)
    layer = their_layer(data, case, monkeypatch)
    x = torch.tensor(data.x.reshape(S, B, -1), requires_grad=True)
    mask = None if data.valid is None else torch.tensor(~data.valid.reshape(S, B)).T
    routed: dict[str, Any] = {}
    layer.router.register_forward_hook(lambda _, __, out: routed.update(probs=out[0], kept=out[1]))
    y, _ = layer(x, padding_mask=mask)
    y.backward(torch.tensor(data.g.reshape(S, B, -1)))

    expected = data.expected()
    kept = routed["kept"].numpy()
    if case["moe_pad_expert_input_to_capacity"]:
        kept = kept & (routed["probs"].detach().numpy() > 0)  # theirs are filled with tokens of other experts
    np.testing.assert_array_equal(kept, expected.routing.kept)
    assert_close(routed["probs"].detach().numpy(), expected.routing.probs, TOLERANCE, what="probabilities")
    assert_close(y.detach().numpy().reshape(data.x.shape), expected.y, TOLERANCE, what="y")
    assert_close(x.grad.numpy().reshape(data.x.shape), expected.dx, TOLERANCE, what="x")
    for name, (_, gradient) in their_parameters(layer, data.options).items():
        wanted = _to_theirs(name, expected.gradients)
        if gradient is None or not wanted.any():
            assert not wanted.any(), name
            assert gradient is None or not gradient.any(), name
            continue
        assert_close(gradient.numpy(), wanted, TOLERANCE, what=name)
    check_state(layer, data, case)


def check_state(layer: Any, data: Data, case: Case) -> None:
    """What the router counted, and the biases that Megatron makes of it at the end of a step."""
    router, expected, state = layer.router, data.expected().routing, data.state
    m, group = megatron(), torch.distributed.group.WORLD
    if not data.training:
        return
    if router.global_tokens_per_expert is not None:
        counts = router.global_tokens_per_expert.numpy() - state.global_counts
        np.testing.assert_array_equal(counts, expected.global_counts)
    if data.options.moe_router_enable_expert_bias and not case["moe_pad_expert_input_to_capacity"]:
        np.testing.assert_array_equal(router.local_tokens_per_expert.numpy(), expected.tokens_per_expert)
        m.finalize._update_router_expert_bias([layer], layer.config, tp_dp_cp_group=group)
        rate = data.options.moe_router_bias_update_rate
        bias = updated_expert_bias(state.expert_bias, expected.tokens_per_expert, rate)
        np.testing.assert_allclose(router.expert_bias.numpy(), bias, rtol=2.0**-22)
    if router.qb_beta is not None:
        monkey = pytest.MonkeyPatch()
        with monkey.context() as patch:  # gloo has no mean
            patch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
            m.finalize._update_router_qb_beta([layer], layer.config, dp_cp_group=group)
        beta = updated_beta(state.beta, [expected.quantiles], data.options.moe_router_quantile_balancing_ema)
        assert_close(router.qb_beta.numpy(), beta, TOLERANCE, what="beta")
