"""Options of one MoE layer under the names of Megatron's configuration fields, with Megatron's defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass

AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")


@dataclass(frozen=True, kw_only=True)
class MoEOptions:
    """Fields of Megatron's ``TransformerConfig`` that change the numbers of an MoE layer.

    A list of Megatron's is a tuple here. ``activation_func`` is a key of ``experts.FUNCTIONS``.
    """

    num_moe_experts: int
    hidden_size: int
    moe_ffn_hidden_size: int
    moe_router_topk: int = 2
    moe_router_load_balancing_type: str | tuple[str, ...] = "aux_loss"
    moe_aux_loss_coeff: float | tuple[float, ...] = 0.0
    moe_z_loss_coeff: float | None = None
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_router_quantile_balancing_ema: float = 0.0
    moe_router_force_load_balancing: bool = False
    moe_router_force_biased: float | None = None
    moe_enable_routing_replay: bool = False
    moe_input_jitter_eps: float | None = None
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_token_drop_policy: str = "probs"
    moe_apply_probs_on_input: bool = False
    moe_latent_size: int | None = None
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    activation_func: str = "gelu"
    gated_linear_unit: bool = False
    activation_func_clamp_value: float | None = None
    glu_linear_offset: float = 0.0
    add_bias_linear: bool = True
    calculate_per_token_loss: bool = False

    def coefficients(self) -> dict[str, float]:
        """Return the coefficient of each load balancing loss that takes part."""
        types, factors = self.moe_router_load_balancing_type, self.moe_aux_loss_coeff
        types = (types,) if isinstance(types, str) else types
        factors = factors if isinstance(factors, tuple) else (factors,) * len(types)
        return {name: c for name, c in zip(types, factors, strict=True) if name in AUX_LOSSES and c > 0}

    def capacity(self, tokens: int) -> int | None:
        """Return how many rows an expert takes; None without a capacity or where it holds all tokens."""
        factor = self.moe_expert_capacity_factor
        if factor is None or factor < 0:
            return None
        capacity = math.ceil(tokens * self.moe_router_topk / self.num_moe_experts * factor)
        return None if capacity > tokens else capacity

    @property
    def expert_size(self) -> int:
        """Features of an expert's input and output."""
        return self.hidden_size if self.moe_latent_size is None else self.moe_latent_size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter of the layer."""
        e, h, f, n = self.num_moe_experts, self.hidden_size, self.moe_ffn_hidden_size, self.expert_size
        parts = 2 if self.gated_linear_unit else 1
        shapes: dict[str, tuple[int, ...]] = {
            "router.weight": (e, h),
            "experts.wi": (e, n, parts, f),
            "experts.wo": (e, f, n),
        }
        if self.add_bias_linear:
            shapes |= {"router.bias": (e,), "experts.wi_bias": (e, parts, f), "experts.wo_bias": (e, n)}
        if self.moe_latent_size is not None:
            shapes |= {"latent.down": (h, n), "latent.up": (n, h)}
            if self.add_bias_linear:
                shapes |= {"latent.down_bias": (n,), "latent.up_bias": (h,)}
        if self.moe_shared_expert_intermediate_size is not None:
            size = self.moe_shared_expert_intermediate_size
            shapes |= {"shared.wi": (h, parts, size), "shared.wo": (size, h)}
            if self.moe_shared_expert_gate:
                shapes["shared.gate"] = (h,)
        return shapes
