"""Options of the MoE layer in pairs: cases in which each two values meet, and the pairs that are refused.

``cover.json`` beside this file holds both, and ``python -m tests.support.moe.cover`` writes it. A case lists what
differs from the first value of each option.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.moe.options import MoEOptions
from tests.support.pairs import Case, pairwise

PATH = Path(__file__).with_name("cover.json")
LOSS = 0.05
OPTIONS: dict[str, tuple[Any, ...]] = {
    "moe_router_topk": (2, 1, 4),
    "moe_router_score_function": ("softmax", "sigmoid", "sqrtsoftplus"),
    "moe_router_pre_softmax": (False, True),
    "moe_router_topk_scaling_factor": (None, 2.5),
    "groups": (None, (4, 2), (2, 1)),
    "moe_router_enable_expert_bias": (False, True),
    "balancing": (
        "none", "aux_loss", "seq_aux_loss", "global_aux_loss", "all of them", "sinkhorn", "quantile_balancing",
    ),
    "moe_z_loss_coeff": (None, 0.02),
    "moe_input_jitter_eps": (None, 0.1),
    "moe_router_force_load_balancing": (False, True),
    "moe_router_force_biased": (None, 0.5),
    "moe_expert_capacity_factor": (None, 0.5, 1.0, 100.0),
    "moe_pad_expert_input_to_capacity": (False, True),
    "moe_token_drop_policy": ("probs", "position"),
    "moe_apply_probs_on_input": (False, True),
    "activation": ("gelu", "swiglu", "squared_relu", "clamped"),
    "add_bias_linear": (False, True),
    "moe_latent_size": (None, 8),
    "moe_shared_expert_intermediate_size": (None, 12),
    "moe_shared_expert_gate": (False, True),
    "padding": (False, True),
    "ties": (False, True),
    "training": (True, False),
}  # fmt: skip
"""Values of each option; the first is the one that a case does not list. Megatron's fields by their names, and what
several fields say together, the input, and the mode."""

EXPERTS, HIDDEN, FFN = 8, 16, 32
CALL = ("padding", "ties", "training")
"""Options of a call, not of the configuration."""

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "gelu": {"activation_func": "gelu"},
    "swiglu": {"activation_func": "silu", "gated_linear_unit": True},
    "squared_relu": {"activation_func": "squared_relu"},
    "clamped": {
        "activation_func": "quick_gelu",
        "gated_linear_unit": True,
        "activation_func_clamp_value": 0.75,
        "glu_linear_offset": 1.0,
    },
}

OWN_RULE = ("sinkhorn", "quantile_balancing")
"""Methods of load balancing that choose by rules of their own."""

Rule = tuple[str, Callable[[Case], bool]]
RULES: tuple[Rule, ...] = (
    (
        "moe_router_pre_softmax",  # the softmax of one logit is 1, and has no gradient
        lambda c: (
            (
                (c["moe_router_topk"], c["moe_router_score_function"], c["moe_router_pre_softmax"])
                == (1, "softmax", False)
                and c["balancing"] != "sinkhorn"
            )
            or (c["moe_router_pre_softmax"] and c["balancing"] == "sinkhorn")
        ),
    ),
    (
        "moe_router_enable_expert_bias",
        lambda c: (
            c["moe_router_enable_expert_bias"]
            and (c["moe_router_score_function"] == "softmax" or c["balancing"] in OWN_RULE)
        ),
    ),
    (
        "moe_router_score_function",
        lambda c: c["moe_router_score_function"] != "softmax" and c["balancing"] == "sinkhorn",
    ),
    (
        "moe_router_topk_scaling_factor",
        lambda c: c["moe_router_topk_scaling_factor"] is not None and c["balancing"] == "sinkhorn",
    ),
    ("moe_router_group_topk", lambda c: c["groups"] is not None and c["groups"][1] > c["moe_router_topk"]),
    ("moe_router_num_groups", lambda c: c["groups"] is not None and c["balancing"] in OWN_RULE),
    (
        "moe_expert_capacity_factor",
        lambda c: c["moe_expert_capacity_factor"] is not None and c["balancing"] in OWN_RULE,
    ),
    (
        "moe_pad_expert_input_to_capacity",
        lambda c: c["moe_pad_expert_input_to_capacity"] and c["moe_expert_capacity_factor"] is None,
    ),
    ("moe_apply_probs_on_input", lambda c: c["moe_apply_probs_on_input"] and c["moe_router_topk"] > 1),
    ("add_bias_linear", lambda c: c["add_bias_linear"] and c["moe_shared_expert_intermediate_size"] is not None),
    ("padding_mask", lambda c: c["padding"] and c["balancing"] == "quantile_balancing"),
)
"""Field that the error names, and whether a case is refused for it."""


def refusals(case: Case) -> list[str]:
    """Return the fields for which a case is refused."""
    return [field for field, refused in RULES if refused(case)]


def full(listed: Case) -> Case:
    """Return a case with the first value of each option that it does not list."""
    return {name: values[0] for name, values in OPTIONS.items()} | listed


def differences(case: Case) -> Case:
    """Return what of a case differs from the first values."""
    return {name: value for name, value in case.items() if value != OPTIONS[name][0]}


def config_fields(case: Case) -> dict[str, Any]:
    """Return a case's fields of Megatron's configuration; lists as tuples."""
    fields = {name: value for name, value in case.items() if name.startswith("moe_") or name == "add_bias_linear"}
    if case["groups"] is not None:
        fields["moe_router_num_groups"], fields["moe_router_group_topk"] = case["groups"]
    fields |= ACTIVATIONS[case["activation"]]
    balancing = case["balancing"]
    if balancing == "all of them":
        fields["moe_router_load_balancing_type"] = ("aux_loss", "seq_aux_loss", "global_aux_loss")
        fields["moe_aux_loss_coeff"] = (LOSS, 2 * LOSS, 3 * LOSS)
    else:
        fields["moe_router_load_balancing_type"] = balancing
        fields["moe_aux_loss_coeff"] = LOSS if balancing.endswith("aux_loss") else 0.0
    return fields


def options_of(case: Case) -> MoEOptions:
    """Return a case's options for the oracle."""
    return MoEOptions(num_moe_experts=EXPERTS, hidden_size=HIDDEN, moe_ffn_hidden_size=FFN, **config_fields(case))


def all_pairs() -> Iterator[Case]:
    """Yield each two values of different options."""
    for a, b in itertools.combinations(OPTIONS, 2):
        for x, y in itertools.product(OPTIONS[a], OPTIONS[b]):
            yield {a: x, b: y}


def read() -> tuple[list[Case], list[tuple[Case, str]]]:
    """Return the cases, in full, and the refused ones with the fields for which they are."""
    stored = json.loads(PATH.read_text(), object_hook=_tuples)
    return [full(case) for case in stored["cases"]], [(full(row["case"]), row["field"]) for row in stored["refused"]]


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) and key == "groups" else v for key, v in values.items()}


def _refused_pairs(cases: list[Case]) -> list[tuple[Case, str]]:
    """Pairs that meet in no case: with as few other values as make one field alone the reason."""
    rows: dict[str, tuple[Case, str]] = {}
    for pair in all_pairs():
        if any(pair.items() <= case.items() for case in cases):
            continue
        candidates = [full(pair), *(full({name: v, **pair}) for name, values in OPTIONS.items() for v in values)]
        case = min(candidates, key=lambda case: (len(refusals(case)), len(differences(case))))
        assert len(refusals(case)) == 1, pair
        rows[str(differences(case))] = (case, refusals(case)[0])
    return list(rows.values())


def main() -> None:
    """Write the file."""
    # Many draws: sinkhorn goes with the first value alone of many options.
    cases = pairwise(OPTIONS, lambda case: not refusals(case), draws=30_000)
    lines = [json.dumps(differences(case)) for case in cases]
    refused = [json.dumps({"field": field, "case": differences(case)}) for case, field in _refused_pairs(cases)]
    listed = ",\n  "
    PATH.write_text(f'{{"cases": [\n  {listed.join(lines)}\n],\n"refused": [\n  {listed.join(refused)}\n]}}\n')
    print(f"{PATH}: {len(cases)} cases, {len(refused)} refused")


if __name__ == "__main__":
    main()
