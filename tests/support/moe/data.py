"""Parameters, inputs and state for a case of the cover, the same for every implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.moe.cover import EXPERTS, HIDDEN, options_of
from tests.support.moe.experts import MoEResult, moe_layer
from tests.support.moe.options import MoEOptions
from tests.support.moe.router import RouterState
from tests.support.pairs import Case

S, B = 12, 2
T = S * B
LOSS_SCALE = 3.0


@dataclass(frozen=True)
class Data:
    """Arrays in fp32, tokens in Megatron's order: ``[s, b, h]`` as ``[s b, h]``."""

    options: MoEOptions
    params: dict[str, np.ndarray]
    x: np.ndarray
    g: np.ndarray
    noise: np.ndarray | None
    forced_logits: np.ndarray | None
    state: RouterState
    valid: np.ndarray | None
    sequences: np.ndarray
    training: bool

    def expected(self, **others: Any) -> MoEResult:
        """Return the oracle's result."""
        arguments = {
            "state": self.state,
            "valid": self.valid,
            "sequences": self.sequences,
            "training": self.training,
            "noise": self.noise,
            "forced_logits": self.forced_logits,
            "loss_scale": LOSS_SCALE,
        }
        return moe_layer(self.options, self.params, self.x, self.g, **arguments | others)


def _eighths(x: np.ndarray) -> np.ndarray:
    """Rounded, so that a sum of products is exact in fp32, and equal logits are equal in any order of the sum."""
    return np.round(x * 8) / 8


def make_data(case: Case) -> Data:
    """Return arrays for a case. With ties some tokens are equal, and some experts to the router."""
    options = options_of(case)
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape) * shape[-2] ** -0.5 if len(shape) > 1 else rng.normal(size=shape) * 0.3
              for name, shape in options.shapes().items()}  # fmt: skip
    params["router.weight"] = rng.normal(size=(EXPERTS, HIDDEN)) * 0.4
    x, g = rng.normal(size=(2, T, HIDDEN))
    forced = rng.normal(size=(T, EXPERTS)) + rng.normal(size=EXPERTS) * (case["moe_router_force_biased"] or 0.0)
    bias, beta = _eighths(rng.normal(size=(2, EXPERTS)) * 0.3)
    if case["ties"]:
        x, params["router.weight"] = _eighths(x), _eighths(params["router.weight"])
        x[1::4], forced[1::4] = x[::4], forced[::4]
        by_expert = [params["router.weight"], forced.T, bias, beta]
        if "router.bias" in params:
            params["router.bias"] = _eighths(params["router.bias"])
            by_expert.append(params["router.bias"])
        for array in by_expert:
            array[3], array[6] = array[1], array[4]
    state = RouterState(
        expert_bias=bias,
        beta=beta - beta.mean(),
        global_counts=np.round(np.abs(rng.normal(size=EXPERTS)) * 10),
        global_steps=2,
    )
    forced_at_all = case["moe_router_force_load_balancing"] or case["moe_router_force_biased"] is not None
    narrow = {name: value.astype(np.float32) for name, value in params.items()}
    return Data(
        options=options,
        params=narrow,
        x=x.astype(np.float32),
        g=g.astype(np.float32),
        noise=rng.uniform(0.9, 1.1, x.shape).astype(np.float32) if case["moe_input_jitter_eps"] else None,
        forced_logits=forced.astype(np.float32) if forced_at_all else None,
        state=state,
        valid=rng.uniform(size=T) > 0.2 if case["padding"] else None,
        sequences=np.arange(T) % B,
        training=case["training"],
    )
