"""Fields of a configuration that say more about another one, and have no effect where that one is off."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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
        needed: condition that the field must meet, for messages.
        is_on: function of the field's value that tells whether the others have an effect.
    """

    name: str
    logged: str = ""
    refused: str = ""
    needed: str = "set it"
    is_on: Callable[[Any], bool] = lambda value: value is not None and value is not False


def _names(word: str) -> Callable[[Any], bool]:
    """Return the function that tells whether a field is ``word``, or a list that has it."""
    return lambda value: word in (value if isinstance(value, tuple) else (value,))


REFINED = (
    _Refined("window_size", refused="window_attn_skip_freq"),
    _Refined(
        "num_moe_experts",
        refused="moe_shared_expert_intermediate_size moe_latent_size expert_model_parallel_size",
        logged="moe_layer_freq expert_tensor_parallel_size "
        "moe_router_topk moe_router_load_balancing_type moe_router_score_function moe_router_pre_softmax "
        "moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_router_group_score_topk "
        "moe_router_topk_limited_devices moe_router_dtype moe_router_enable_expert_bias "
        "moe_router_force_load_balancing moe_router_force_biased "
        "moe_enable_routing_replay moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps "
        "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_shared_expert_gate "
        "moe_apply_probs_on_input moe_per_layer_logging moe_layer_recompute moe_token_dispatcher_type "
        "moe_expert_rank_capacity_factor",
    ),
    _Refined("moe_router_enable_expert_bias", logged="moe_router_bias_update_rate"),
    _Refined(
        "moe_router_load_balancing_type",
        logged="moe_router_quantile_balancing_ema",
        needed="it needs 'quantile_balancing'",
        is_on=_names("quantile_balancing"),
    ),
    _Refined("moe_expert_capacity_factor", logged="moe_token_drop_policy"),
    _Refined(
        "fp8",
        logged="fp8_recipe fp8_quantizer_factory fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad "
        "fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red",
    ),
    _Refined("fp4", logged="fp4_recipe fp4_quantizer_factory"),
    _Refined("first_last_layers_bf16", logged="num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"),
    _Refined("qk_clip", logged="qk_clip_alpha qk_clip_threshold"),
    _Refined("mtp_num_layers", logged="mtp_loss_scaling_factor"),
    _Refined(
        "cp_comm_type",
        logged="hierarchical_context_parallel_sizes",
        needed="it needs 'a2a+p2p'",
        is_on=_names("a2a+p2p"),
    ),
)
"""Every field of a `TransformerConfig` that only says more about another one. Their values are checked in any case,
where they are declared."""

ROTATIONS = (
    _Refined(
        "rope_type",
        logged="original_max_position_embeddings beta_fast beta_slow mscale",
        needed="it needs 'yarn'",
        is_on=_names("yarn"),
    ),
    _Refined("rope_type", logged="rotary_percent", needed="it needs 'rope'", is_on=_names("rope")),
)
"""The same for the fields that a `MLATransformerConfig` has beside those."""


def check_refined_fields(config: Any, table: Sequence[_Refined] = REFINED) -> None:
    """Refuse or log fields other than their defaults that have no effect, because the field that they refine is off.

    Args:
        config: a `TransformerConfig`, as its user gave it.
        table: fields to check.

    Raises:
        ValueError: for a field that stands for a part of the model.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for refined in table:
        value = getattr(config, refined.name)
        if refined.is_on(value):
            continue
        for name in refined.refused.split():
            if _is_given(config, name, defaults[name]):
                raise ValueError(
                    f"{name}={getattr(config, name)!r} has no effect without {refined.name}, which is {value!r}: "
                    f"{refined.needed}, or leave {name} out"
                )
        for name in refined.logged.split():
            if _is_given(config, name, defaults[name]):
                log_once(
                    f"{name}={getattr(config, name)!r} has no effect: it is for {refined.name}, which is {value!r}"
                    + ("" if refined.needed == "set it" else f"; {refined.needed}")
                )


def _is_given(config: Any, name: str, default: Any) -> bool:
    """Return whether a field says something else than its default."""
    value = getattr(config, name)
    if name == "expert_tensor_parallel_size":
        # None is the size of the tensor axis, which Megatron-LM's arguments spell out.
        return value not in (None, config.tensor_model_parallel_size)
    return value != default
