"""Options of mixtures of experts: of a router, and Megatron's fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from jax_te._validation import (
    check_annotations,
    check_choice,
    check_number,
    check_positive,
    checked,
    is_integer,
    log_once,
)
from jax_te.config.filled import FillsFields

AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
"""Load-balancing losses, by Megatron's names."""

LOAD_BALANCING_TYPES = (*AUX_LOSSES, "sinkhorn", "quantile_balancing", "none")
"""Methods of a router to balance the experts' load."""


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """Choice of a token's experts, and balancing of their load; field names are Megatron-Core's without ``moe_``.

    Args:
        num_experts: ``e``.
        topk: ``k``, number of experts of each token.
        score_function: function of the logits: ``"softmax"`` over the experts, or of each logit ``"sigmoid"`` or
            ``"sqrtsoftplus"``, the square root of ``log(1 + exp(x))``. The last two are divided by their sum over the
            chosen experts if there are several.
        pre_softmax: whether to take the softmax over all experts, before the choice, and leave it as it is. False:
            choose by the logits, and take the softmax over those of the chosen experts.
        topk_scaling_factor: factor of the probabilities. None: 1.
        num_groups: number of groups of ``e / num_groups`` consecutive experts, of which each token uses ``group_topk``.
            A group's score is the sum of its ``group_score_topk`` largest.
        group_topk: number of groups that a token uses.
        group_score_topk: number of scores in a group's score: 1 in DeepSeek-V2. None: ``topk // group_topk``.
        load_balancing_type: load-balancing method, one of `LOAD_BALANCING_TYPES`, or several of the losses among them.
            ``"aux_loss"``: a loss over all tokens of a microbatch; ``"seq_aux_loss"``: over each sequence;
            ``"global_aux_loss"``: by the mean counts of a step's microbatches so far; ``"sinkhorn"``: the choice is an
            optimal transport, in training; ``"quantile_balancing"``: the choice is by logits less a bias of each
            expert, which follows the quantiles of its logits.
        aux_loss_coeff: coefficient of the loss, or of each. 0: no loss.
        z_loss_coeff: coefficient of ``mean(logsumexp(logits)^2)``. None: no such loss.
        aux_loss_groups: number of parts of a batch, along its first axis, of which each has losses of its own, and the
            mean of these counts: Megatron's numbers for as many data ranks. 1: the losses of all rows.
        enable_expert_bias: whether to add a bias of each expert to the scores for the choice. Once a step it grows for
            experts with less than the mean load and shrinks for those with more.
        bias_update_rate: size of a bias update.
        quantile_balancing_ema: share of the old bias in the new one of ``"quantile_balancing"``.
        input_jitter_eps: half-width of the interval ``[1 - eps, 1 + eps]`` of uniform factors by which the router's
            input is multiplied in training.
        expert_capacity_factor: factor of the capacity ``ceil(t k / e * factor)`` of an expert for ``t`` tokens; tokens
            beyond it are dropped, and their other experts stay the same. None, or below 0: unlimited.
        pad_expert_input_to_capacity: whether each expert gets as many rows as its capacity, the last of them zeros.
        token_drop_policy: rule by which an expert selects the tokens that it keeps: ``"probs"``, those with its largest
            probabilities; ``"position"``, those of the first positions of all sequences.
        dtype: dtype of the router's GEMM and of its probabilities, ``"fp32"`` or ``"fp64"``. None: the GEMM is in the
            dtype of the input, and all that follows in fp32. ``"fp64"`` needs JAX's 64-bit mode.
        force_load_balancing: whether to choose at random, for measurements under equal load.
        force_biased: standard deviation of a normal random bias of each expert, for a choice at random; below 0: the
            same bias in each call.
        cp_load_balanced: whether sequences come in zig-zag order, see `jax_te.ops.zigzag_positions`. Positions, and
            what is drawn for a token, are then those of natural order. A `jax_te.layers.TransformerLayer` sets it.
        per_layer_logging: whether a train step's metrics have the losses, dropped share and largest load of this layer,
            too, and not only their means over all layers.

    Raises:
        ValueError: for more chosen experts than there are; groups that do not divide the experts or offer fewer than
            ``topk``; one of ``num_groups`` and ``group_topk`` without the other; a softmax over one expert, whose
            probability would always be 1; a bias under a softmax; options that a method of load balancing does not
            read: a bias and groups under ``"sinkhorn"`` and ``"quantile_balancing"``, under the first also
            ``score_function``, ``pre_softmax`` and ``topk_scaling_factor``; a capacity of 0, or under a choice that
            balances by itself; coefficients that are not one for each loss, or without a loss; unknown names.

    Source: ``megatron.core.transformer.TransformerConfig``.

    >>> RouterOptions(num_experts=8).topk
    2
    """

    num_experts: int
    topk: int = 2
    score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    pre_softmax: bool = False
    topk_scaling_factor: float | None = None
    num_groups: int | None = None
    group_topk: int | None = None
    group_score_topk: int | None = None
    load_balancing_type: str | tuple[str, ...] = "aux_loss"
    aux_loss_coeff: float | tuple[float, ...] = 0.0
    z_loss_coeff: float | None = None
    aux_loss_groups: int = 1
    enable_expert_bias: bool = False
    bias_update_rate: float = 1e-3
    quantile_balancing_ema: float = 0.0
    input_jitter_eps: float | None = None
    expert_capacity_factor: float | None = None
    pad_expert_input_to_capacity: bool = False
    token_drop_policy: Literal["probs", "position"] = "probs"
    dtype: Literal["fp32", "fp64"] | None = None
    force_load_balancing: bool = False
    force_biased: float | None = None
    cp_load_balanced: bool = False
    per_layer_logging: bool = False

    def __post_init__(self) -> None:
        check_annotations(self, RouterOptions)
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in checked_router_options(given).items():
            object.__setattr__(self, name, value)

    @property
    def losses(self) -> dict[str, float]:
        """Coefficients of the load-balancing losses in use.

        >>> RouterOptions(num_experts=8, aux_loss_coeff=0.01).losses
        {'aux_loss': 0.01}
        """
        kinds, coefficients = self.load_balancing_type, self.aux_loss_coeff
        kinds = (kinds,) if isinstance(kinds, str) else kinds
        coefficients = coefficients if isinstance(coefficients, tuple) else (coefficients,)
        return {kind: c for kind, c in zip(kinds, coefficients, strict=True) if kind in AUX_LOSSES and c > 0.0}


@dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    """Transport of tokens to experts on other devices of a mesh; without effect on one device.

    Args:
        dispatcher: ``"allgather"``: each device gets all tokens of the devices among which the experts are split, and
            outputs are reduce-scattered; ``"alltoall"``: each device sends a token to those that have an expert of it.
        rank_capacity_factor: factor of the number of rows for which a device has room, as a multiple of its rows where
            all experts get the same number of tokens; under ``"alltoall"`` also of the tokens that it takes from each
            other device. Assignments of tokens to experts beyond it are dropped, the last tokens first, and counted in
            the metric ``overflow_share``. None: room for any choice of experts.
        fp8: whether tokens travel to their experts in E4M3, and gradients of outputs in E5M2, with a scale for each
            token. Sums, outputs and gradients of tokens, travel in the compute dtype.

    Raises:
        ValueError: for an unknown dispatcher, or a factor that is not positive.

    Source: ``megatron.core.transformer.moe.token_dispatcher``.

    >>> DispatchOptions(dispatcher="alltoall").rank_capacity_factor is None
    True
    """

    dispatcher: Literal["allgather", "alltoall"] = "allgather"
    rank_capacity_factor: float | None = None
    fp8: bool = False

    def __post_init__(self) -> None:
        check_annotations(self, DispatchOptions)
        if self.rank_capacity_factor is not None and not self.rank_capacity_factor > 0.0:
            raise ValueError(f"rank_capacity_factor must be > 0 or None, got {self.rank_capacity_factor!r}")


_ROUTER_FIELDS = {
    **{
        name: f"moe_router_{name}"
        for name in (
            "topk",
            "score_function",
            "pre_softmax",
            "topk_scaling_factor",
            "num_groups",
            "group_topk",
            "load_balancing_type",
            "enable_expert_bias",
            "bias_update_rate",
            "quantile_balancing_ema",
            "dtype",
            "force_load_balancing",
            "force_biased",
            "group_score_topk",
        )
    },
    **{
        name: f"moe_{name}"
        for name in (
            "aux_loss_coeff",
            "z_loss_coeff",
            "input_jitter_eps",
            "expert_capacity_factor",
            "token_drop_policy",
            "pad_expert_input_to_capacity",
            "per_layer_logging",
        )
    },
    "num_experts": "num_moe_experts",
}
"""Field of `RouterOptions` -> Megatron's."""


def checked_router_options(
    given: Mapping[str, Any], name_of: Callable[[str], str] = lambda name: name
) -> dict[str, Any]:
    """Return the options of a router that are to be replaced, after all were checked.

    Args:
        given: values by the names of `RouterOptions`.
        name_of: function that returns a field's name for messages.

    Raises:
        ValueError: see `RouterOptions`.
    """
    n, balancing, coefficients = name_of, given["load_balancing_type"], given["aux_loss_coeff"]
    check_positive(**{n("num_experts"): given["num_experts"]})
    _check_values(given, n)
    if given["topk"] > given["num_experts"]:
        raise ValueError(f"{n('topk')} {given['topk']} is more than the {n('num_experts')} {given['num_experts']}")
    _check_scores(given, n, balancing)
    _check_groups(given, n)
    _check_losses(given, n, balancing, coefficients)
    replaced = {"load_balancing_type": balancing, "aux_loss_coeff": coefficients}
    return replaced | _check_capacity(given, n, balancing)


def _check_values(given: Mapping[str, Any], n: Callable[[str], str]) -> None:
    """Raise ValueError for values that no router takes, whatever its other options are, and whether there is one."""
    check_positive(**{n("topk"): given["topk"]})
    balancing, coefficients = given["load_balancing_type"], given["aux_loss_coeff"]
    several = isinstance(balancing, tuple)
    for kind in balancing if several else (balancing,):
        check_choice((*AUX_LOSSES, "none") if several else LOAD_BALANCING_TYPES, **{n("load_balancing_type"): kind})
    for coefficient in coefficients if isinstance(coefficients, tuple) else (coefficients,):
        check_number(**{n("aux_loss_coeff"): coefficient})
        if coefficient < 0.0:
            raise ValueError(f"{n('aux_loss_coeff')} must be >= 0, got {coefficients!r}")
    # "not >=" instead of "<", so that nan is refused, too.
    if given["z_loss_coeff"] is not None and not given["z_loss_coeff"] >= 0.0:
        raise ValueError(f"{n('z_loss_coeff')} must be >= 0 or None, got {given['z_loss_coeff']!r}")
    scaling = given["topk_scaling_factor"]
    if scaling is not None and not scaling > 0.0:
        raise ValueError(f"{n('topk_scaling_factor')} must be > 0 or None, got {scaling!r}")
    if not given["bias_update_rate"] >= 0.0:
        raise ValueError(f"{n('bias_update_rate')} must be >= 0, got {given['bias_update_rate']!r}")
    if not 0.0 <= given["quantile_balancing_ema"] < 1.0:
        raise ValueError(f"{n('quantile_balancing_ema')} must be in [0, 1), got {given['quantile_balancing_ema']!r}")
    jitter = given["input_jitter_eps"]
    if jitter is not None and not 0.0 <= jitter < 1.0:
        raise ValueError(f"{n('input_jitter_eps')} must be in [0, 1) or None, got {jitter!r}")
    if given["expert_capacity_factor"] == 0.0:
        raise ValueError(
            f"{n('expert_capacity_factor')}=0 drops every token; give one above 0, or None for no capacity"
        )


def _check_scores(given: Mapping[str, Any], n: Callable[[str], str], balancing: Any) -> None:
    softmax = given["score_function"] == "softmax"
    if given["topk"] == 1 and softmax and not given["pre_softmax"] and balancing != "sinkhorn":
        raise ValueError(
            f"{n('topk')}=1 with {n('score_function')}='softmax': the softmax over one chosen expert is 1 and has no "
            f"gradient; set {n('pre_softmax')}=True, or take another score function"
        )
    _check_used(given, n, balancing)
    if given["enable_expert_bias"] and softmax:
        raise ValueError(
            f"{n('enable_expert_bias')}=True is for {n('score_function')}='sigmoid' or 'sqrtsoftplus', to whose scores "
            "the bias is added; got 'softmax'"
        )


UNREAD_BY_BALANCING = {
    "sinkhorn": {
        "score_function": "softmax",
        "pre_softmax": False,
        "topk_scaling_factor": None,
        "num_groups": None,
        "enable_expert_bias": False,
    },
    "quantile_balancing": {"num_groups": None, "enable_expert_bias": False},
}
"""Options that a method of load balancing does not read, with the values that they then have: Megatron's defaults."""


def _check_used(given: Mapping[str, Any], n: Callable[[str], str], balancing: Any) -> None:
    """Raise for options that the load balancing does not read, where Megatron ignores them."""
    unused = UNREAD_BY_BALANCING.get(balancing, {}) if isinstance(balancing, str) else {}
    for name, default in unused.items():
        if given[name] != default:
            raise ValueError(
                f"{n(name)}={given[name]!r} has no effect under {n('load_balancing_type')}={balancing!r}, whose "
                f"rule for experts and their probabilities does not read it: leave {n(name)} out"
            )


def _check_groups(given: Mapping[str, Any], n: Callable[[str], str]) -> None:
    groups, used, topk = given["num_groups"], given["group_topk"], given["topk"]
    scored = given["group_score_topk"]
    if groups is None and used is None:
        if scored is not None:
            raise ValueError(f"{n('group_score_topk')}={scored} is for groups: give {n('num_groups')}, or leave it out")
        return
    if groups is None or used is None:
        raise ValueError(
            f"{n('num_groups')}={groups} and {n('group_topk')}={used}: say both, how many groups there are and how "
            "many of them a token uses, or neither"
        )
    check_positive(**{n("num_groups"): groups, n("group_topk"): used})
    if given["num_experts"] % groups:
        raise ValueError(f"{n('num_groups')} {groups} does not divide {n('num_experts')} {given['num_experts']}")
    if used > groups:
        raise ValueError(f"{n('group_topk')} {used} is more than the {n('num_groups')} {groups}")
    size = given["num_experts"] // groups
    if scored is not None and not 1 <= scored <= size:
        raise ValueError(
            f"{n('group_score_topk')} must be in [1, {size}], the number of experts in a group, got {scored}"
        )
    if used > topk and scored is None:
        raise ValueError(
            f"{n('group_topk')} {used} is more than {n('topk')} {topk}: a group's score is the sum of its topk // "
            f"group_topk largest scores, here of none; give {n('group_score_topk')}"
        )
    if topk > used * size:
        raise ValueError(
            f"{n('topk')} {topk} experts do not fit into {n('group_topk')} {used} groups of {size} experts each"
        )


def _check_losses(given: Mapping[str, Any], n: Callable[[str], str], balancing: Any, coefficients: Any) -> None:
    several = isinstance(balancing, tuple)
    kinds = balancing if several else (balancing,)
    if several != isinstance(coefficients, tuple) or (several and len(kinds) != len(coefficients)):
        raise ValueError(
            f"{n('aux_loss_coeff')} must have a coefficient for each {n('load_balancing_type')}, got {coefficients!r} "
            f"for {balancing!r}"
        )
    if len(set(kinds)) != len(kinds):
        raise ValueError(f"{n('load_balancing_type')} names a loss twice: {balancing!r}")
    for kind, coefficient in zip(kinds, coefficients if several else (coefficients,), strict=True):
        if coefficient and kind not in AUX_LOSSES:
            raise ValueError(
                f"{n('aux_loss_coeff')}={coefficients!r} has no loss under {n('load_balancing_type')}={balancing!r}: "
                f"leave it 0, or name one of {', '.join(AUX_LOSSES)}"
            )
    check_positive(**{n("aux_loss_groups"): given["aux_loss_groups"]})


def _check_capacity(given: Mapping[str, Any], n: Callable[[str], str], balancing: Any) -> dict[str, Any]:
    factor = given["expert_capacity_factor"]
    if factor is not None and factor < 0.0:  # Megatron's other spelling of None
        factor = None
    if factor is not None and balancing in ("sinkhorn", "quantile_balancing"):
        raise ValueError(
            f"{n('expert_capacity_factor')}={factor!r} does not go with {n('load_balancing_type')}={balancing!r}, "
            "which balances by the choice itself; leave one out"
        )
    if given["pad_expert_input_to_capacity"] and factor is None:
        raise ValueError(
            f"{n('pad_expert_input_to_capacity')}=True needs a capacity to pad to: give {n('expert_capacity_factor')}"
        )
    return {"expert_capacity_factor": factor}


@dataclass(frozen=True, kw_only=True)
class MoEOptions:
    """Mixture of experts of a transformer layer, in place of its feed-forward block.

    Args:
        router: number of experts, how they are chosen, and how their load is kept equal.
        ffn_hidden_size: ``f`` of an expert. None: the layer's.
        apply_probs_on_input, latent_size, shared_expert_intermediate_size, shared_expert_gate, dispatch,
            expert_tensor_parallel: see `jax_te.layers.MoE`.

    Raises:
        TypeError: for a field of another type.
        ValueError: for sizes that are not positive.

    >>> MoEOptions(router=RouterOptions(num_experts=8), ffn_hidden_size=32).latent_size
    """

    router: RouterOptions
    ffn_hidden_size: int | None = None
    apply_probs_on_input: bool = False
    latent_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    dispatch: DispatchOptions = DispatchOptions()
    expert_tensor_parallel: bool = True

    def __post_init__(self) -> None:
        check_annotations(self, MoEOptions)
        names = ("ffn_hidden_size", "latent_size", "shared_expert_intermediate_size")
        given = {name: getattr(self, name) for name in names}
        check_positive(**{name: size for name, size in given.items() if size is not None})


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(FillsFields):
    """Options of mixtures of experts, with Megatron-Core's names; `TransformerConfig` has these fields, too.

    Args:
        num_moe_experts: ``e``. None: no layer has experts.
        moe_layer_freq: layers with experts: every ``N``-th, from the first on, or a list with 1 (experts) or 0 for each
            layer.
        moe_ffn_hidden_size: ``f`` of an expert. None: ``ffn_hidden_size``.
        moe_router_topk, moe_router_load_balancing_type, moe_router_score_function, moe_router_pre_softmax,
            moe_router_topk_scaling_factor, moe_router_num_groups, moe_router_group_topk, moe_router_group_score_topk,
            moe_router_dtype, moe_router_enable_expert_bias, moe_router_bias_update_rate,
            moe_router_quantile_balancing_ema, moe_router_force_load_balancing, moe_router_force_biased,
            moe_aux_loss_coeff, moe_z_loss_coeff, moe_input_jitter_eps, moe_expert_capacity_factor,
            moe_pad_expert_input_to_capacity, moe_token_drop_policy, moe_per_layer_logging: see `RouterOptions`.
        moe_router_topk_limited_devices: Megatron's former name of ``moe_router_group_topk`` for as many groups as there
            are expert-parallel devices.
        moe_enable_routing_replay: whether ``set_target_indices`` of `jax_te.megatron.TopKRouter` may set a choice that
            calls take in place of the router's own. No call's choice is kept: a `jax_te.layers.Routing` has it.
        moe_shared_expert_intermediate_size: ``f`` of a feed-forward block that all tokens pass, beside their experts.
            None: there is none.
        moe_shared_expert_gate: whether to multiply its output by the sigmoid of a product of the input with a learned
            vector.
        moe_apply_probs_on_input: whether to multiply an expert's input by the probability, in place of its activation;
            for one expert a token.
        moe_latent_size: features of the experts' inputs and outputs, to and from which two linear layers project.
            None: ``h``.
        moe_layer_recompute: Megatron's former name of ``"moe"`` in ``recompute_modules``.
        moe_token_dispatcher_type: transport of tokens to experts on other devices, see `DispatchOptions`; ``"flex"`` is
            ``"alltoall"``. On one device all are the same.
        moe_expert_rank_capacity_factor: see ``rank_capacity_factor`` of `DispatchOptions`. On one device it has no
            effect.
        activation_func_clamp_value: limit of a gated activation's two components before the function: the first from
            above, the second on both sides. None: no limit.
        glu_linear_offset: constant added to the second component of a gated activation.

    Raises:
        ValueError: see `RouterOptions`, with these names; for sizes that are not positive; for options of experts that
            contradict each other.
        TypeError: for a flag that is not bool.

    Source: ``megatron.core.transformer.TransformerConfig``.

    >>> ExpertsConfig(num_moe_experts=8, moe_aux_loss_coeff=0.01).router_options().losses
    {'aux_loss': 0.01}
    """

    num_moe_experts: int | None = None
    moe_layer_freq: int | Sequence[int] = 1
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_router_load_balancing_type: str | Sequence[str] = "aux_loss"
    moe_router_score_function: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_group_score_topk: int | None = None
    moe_router_topk_limited_devices: int | None = None
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_router_quantile_balancing_ema: float = 0.0
    moe_router_force_load_balancing: bool = False
    moe_router_force_biased: float | None = None
    moe_enable_routing_replay: bool = False
    moe_aux_loss_coeff: float | Sequence[float] = 0.0
    moe_z_loss_coeff: float | None = None
    moe_input_jitter_eps: float | None = None
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    moe_shared_expert_intermediate_size: int | None = None
    moe_shared_expert_gate: bool = False
    moe_apply_probs_on_input: bool = False
    moe_latent_size: int | None = None
    moe_per_layer_logging: bool = False
    moe_layer_recompute: bool = False
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "allgather"
    moe_expert_rank_capacity_factor: float | None = None
    activation_func_clamp_value: float | None = None
    glu_linear_offset: float = 0.0

    def __post_init__(self) -> None:
        for name in ("moe_layer_freq", "moe_router_load_balancing_type", "moe_aux_loss_coeff"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        check_annotations(self, ExpertsConfig)
        self._check_expert_sizes()
        name_of: Callable[[str], str] = lambda name: _ROUTER_FIELDS.get(name, name)  # noqa: E731
        if self.num_moe_experts is None:
            _check_values({name: getattr(self, field) for name, field in _ROUTER_FIELDS.items()}, name_of)
            return
        self._fill_expert_groups()
        given = {name: getattr(self, field) for name, field in _ROUTER_FIELDS.items()}
        options = checked_router_options({**given, "aux_loss_groups": 1}, name_of)
        for name, value in options.items():
            object.__setattr__(self, _ROUTER_FIELDS[name], value)
        if self.moe_apply_probs_on_input and self.moe_router_topk > 1:
            raise ValueError(
                "moe_apply_probs_on_input=True is for one expert a token, whose input is multiplied by its "
                f"probability; moe_router_topk is {self.moe_router_topk}"
            )
        if self.moe_shared_expert_gate and self.moe_shared_expert_intermediate_size is None:
            log_once("moe_shared_expert_gate=True has no effect without moe_shared_expert_intermediate_size")

    def _check_expert_sizes(self) -> None:
        sizes = ("num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_latent_size")
        given = {name: getattr(self, name) for name in sizes}
        check_positive(**{name: size for name, size in given.items() if size is not None})
        if self.activation_func_clamp_value is not None and not self.activation_func_clamp_value > 0.0:
            raise ValueError(
                f"activation_func_clamp_value must be > 0 or None, got {self.activation_func_clamp_value!r}"
            )
        bound = self.moe_expert_rank_capacity_factor
        if bound is not None and not bound > 0.0:
            raise ValueError(f"moe_expert_rank_capacity_factor must be > 0 or None, got {bound!r}")

    def _fill_expert_groups(self) -> None:
        devices = self.moe_router_topk_limited_devices
        if devices is None:
            return
        if self.moe_router_group_topk is not None:
            raise ValueError(
                "moe_router_topk_limited_devices is Megatron's former name of moe_router_group_topk: give that alone, "
                "and moe_router_num_groups"
            )
        self._fill("moe_router_group_topk", devices)
        self._fill("moe_router_topk_limited_devices", None)
        # Megatron's groups are the experts of one device.
        self._fill("moe_router_num_groups", getattr(self, "expert_model_parallel_size", 1))

    @checked
    def router_options(self, *, aux_loss_groups: int = 1) -> RouterOptions:
        """Return the options of the layers' routers.

        Args:
            aux_loss_groups: see `RouterOptions`; Megatron's number of data ranks.

        Raises:
            ValueError: if the layers have no experts.
        """
        if self.num_moe_experts is None:
            raise ValueError("num_moe_experts is None, so that no layer has experts; give their number")
        given = {name: getattr(self, field) for name, field in _ROUTER_FIELDS.items()}
        # A field of AttentionConfig, beside which a TransformerConfig has these.
        balanced = getattr(self, "cp_load_balanced", False)
        return RouterOptions(**given, aux_loss_groups=aux_loss_groups, cp_load_balanced=balanced)

    def moe_options(self) -> MoEOptions:
        """Return the options of a layer with experts.

        Raises:
            ValueError: if the layers have no experts.
        """
        return MoEOptions(
            router=self.router_options(),
            ffn_hidden_size=self.moe_ffn_hidden_size,
            apply_probs_on_input=self.moe_apply_probs_on_input,
            latent_size=self.moe_latent_size,
            shared_expert_intermediate_size=self.moe_shared_expert_intermediate_size,
            shared_expert_gate=self.moe_shared_expert_gate,
            dispatch=self.dispatch_options(),
            # The field is `ModelParallelConfig`'s, beside which `TransformerConfig` has these.
            expert_tensor_parallel=getattr(self, "expert_tensor_parallel_size", None) != 1,
        )

    def dispatch_options(self) -> DispatchOptions:
        """Return the options of the transport of tokens to experts on other devices."""
        kind: Any = "allgather" if self.moe_token_dispatcher_type == "allgather" else "alltoall"
        return DispatchOptions(dispatcher=kind, rank_capacity_factor=self.moe_expert_rank_capacity_factor)

    def _moe_layers(self, num_layers: int) -> tuple[bool, ...]:
        """Return the layers with experts; raise ValueError for an invalid ``moe_layer_freq``."""
        freq: Any = self.moe_layer_freq
        if is_integer(freq) and freq >= 1:
            return tuple(self.num_moe_experts is not None and layer % freq == 0 for layer in range(num_layers))
        if isinstance(freq, tuple) and len(freq) == num_layers and set(freq) <= {0, 1}:
            return tuple(self.num_moe_experts is not None and entry == 1 for entry in freq)
        raise ValueError(
            f"moe_layer_freq must be an integer >= 1, or 1 (experts) or 0 for each of {num_layers} layers, got {freq!r}"
        )
