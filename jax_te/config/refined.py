"""Fields of a configuration that say more about another one, and have no effect where that one is off."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax_te._validation import log_once


@dataclass(frozen=True)
class _Refined:
    """A field, and the fields that say more about it.

    Args:
        name: the field.
        logged: names of fields, apart by spaces, that Megatron-LM's scripts leave in place when they turn the field
            off: they are logged once.
        refused: names of fields that stand for a part of the model, which their user would miss.
        needed: what the field must be, for messages.
        is_on: function of the field's value that tells whether the others have an effect.
    """

    name: str
    logged: str = ""
    refused: str = ""
    needed: str = "set it"
    is_on: Callable[[Any], bool] = lambda value: value is not None and value is not False


def _has_two_steps(kinds: Any) -> bool:
    return "a2a+p2p" in (kinds if isinstance(kinds, tuple) else (kinds,))


REFINED = (
    _Refined("window_size", refused="window_attn_skip_freq"),
    _Refined(
        "num_moe_experts",
        refused="moe_shared_expert_intermediate_size moe_latent_size",
        logged="moe_router_topk moe_router_load_balancing_type moe_router_score_function moe_router_pre_softmax "
        "moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_group_score_topk "
        "moe_router_topk_limited_devices moe_router_dtype moe_router_enable_expert_bias moe_router_bias_update_rate "
        "moe_router_quantile_balancing_ema moe_router_force_load_balancing moe_router_force_biased "
        "moe_enable_routing_replay moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps "
        "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_shared_expert_gate "
        "moe_apply_probs_on_input moe_per_layer_logging moe_layer_recompute moe_token_dispatcher_type "
        "moe_expert_rank_capacity_factor",
    ),
    _Refined(
        "fp8",
        logged="fp8_recipe fp8_quantizer_factory fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad "
        "fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red",
    ),
    _Refined("fp4", logged="fp4_recipe fp4_quantizer_factory"),
    _Refined("first_last_layers_bf16", logged="num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"),
    _Refined("mtp_num_layers", logged="mtp_loss_scaling_factor"),
    _Refined(
        "cp_comm_type",
        logged="hierarchical_context_parallel_sizes",
        needed="it needs 'a2a+p2p'",
        is_on=_has_two_steps,
    ),
)
"""Every field that only says more about another one. Their values are checked in any case, where they are declared."""


def check_refined_fields(config: Any) -> None:
    """Refuse or log fields other than their defaults that have no effect, because the field that they refine is off.

    Args:
        config: a `TransformerConfig`, as its user gave it.

    Raises:
        ValueError: for a field that stands for a part of the model.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for refined in REFINED:
        value = getattr(config, refined.name)
        if refined.is_on(value):
            continue
        for name in refined.refused.split():
            if getattr(config, name) != defaults[name]:
                raise ValueError(
                    f"{name}={getattr(config, name)!r} has no effect without {refined.name}, which is {value!r}: "
                    f"{refined.needed}, or leave {name} out"
                )
        for name in refined.logged.split():
            if getattr(config, name) != defaults[name]:
                log_once(
                    f"{name}={getattr(config, name)!r} has no effect: it is for {refined.name}, which is {value!r}"
                    + ("" if refined.needed == "set it" else f"; {refined.needed}")
                )
