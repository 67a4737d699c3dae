"""An expert, a shared expert and the whole MoE layer in NumPy and fp64, with gradients written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.support import oracles
from tests.support.moe.options import MoEOptions
from tests.support.moe.router import RouterState, Routing, route

Pair = tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


def _tanh_gelu_slope(x: np.ndarray) -> np.ndarray:
    c = math.sqrt(2.0 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t**2) * c * (1.0 + 3 * 0.044715 * x**2)


FUNCTIONS: dict[str, Pair] = {
    "gelu": (oracles.FUNCTIONS["gelu"], _tanh_gelu_slope),
    "silu": (oracles.FUNCTIONS["silu"], lambda x: _sigmoid(x) * (1.0 + x * (1.0 - _sigmoid(x)))),
    "quick_gelu": (
        oracles.FUNCTIONS["quick_gelu"],
        lambda x: _sigmoid(1.702 * x) * (1.0 + 1.702 * x * (1.0 - _sigmoid(1.702 * x))),
    ),
    "squared_relu": (oracles.FUNCTIONS["squared_relu"], lambda x: np.where(x > 0, 2.0 * x, 0.0)),
    "relu": (oracles.FUNCTIONS["relu"], lambda x: np.where(x > 0, 1.0, 0.0)),
}
"""Functions and their derivatives."""


def activation(pre: np.ndarray, options: MoEOptions) -> tuple[np.ndarray, np.ndarray]:
    """Return ``f(gate) (up + offset)`` or ``f(gate)`` of ``pre [r, parts, f]``, and its slope in each component."""
    f, slope = FUNCTIONS[options.activation_func]
    if not options.gated_linear_unit:
        return f(pre[:, 0]), slope(pre)
    gate, up, limit = pre[:, 0], pre[:, 1], options.activation_func_clamp_value
    gate_moves, up_moves = np.ones_like(gate), np.ones_like(up)
    if limit is not None:
        gate_moves, up_moves = 1.0 * (gate <= limit), 1.0 * (np.abs(up) <= limit)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    up = up + options.glu_linear_offset
    return f(gate) * up, np.stack([slope(gate) * gate_moves * up, f(gate) * up_moves], axis=1)


@dataclass
class ExpertResult:
    """Output, and gradients of the input, the probabilities and the parameters; biases' are None without biases."""

    y: np.ndarray
    dx: np.ndarray
    dp: np.ndarray
    dwi: np.ndarray
    dwi_bias: np.ndarray
    dwo: np.ndarray
    dwo_bias: np.ndarray


Scales = tuple[oracles.Scales, oracles.Scales]


def expert(
    x: np.ndarray,
    p: np.ndarray,
    wi: np.ndarray,
    wi_bias: np.ndarray | None,
    wo: np.ndarray,
    wo_bias: np.ndarray | None,
    g: np.ndarray,
    options: MoEOptions,
    scales: Scales | None = None,
) -> ExpertResult:
    """Run one expert on its rows, and back.

    Args:
        x: Rows ``[r, n]``.
        p: Probability of each row ``[r]``. It multiplies the activation and the last bias, or the input.
        wi, wi_bias, wo, wo_bias: Kernels ``[n, parts, f]``, ``[f, n]`` and their biases; None: none.
        g: Gradient of the output ``[r, n]``.
        options: The activation, and what the probabilities multiply.
        scales: Quantization of both linear layers' operands. None: none.
    """
    first, second = scales or (oracles.Unquantized(), oracles.Unquantized())
    on_input = options.moe_apply_probs_on_input
    rows, weight = (x * p[:, None], np.ones_like(p)) if on_input else (x, p)
    pre = oracles.linear(first.forms("x", rows, 1)[0], first.forms("kernel", wi, 1)[1], wi_bias)
    z, slopes = activation(pre, options)
    out = oracles.dense_layer(second, z * weight[:, None], wo, None, g)
    y, dz = out["y"], out["x"] * weight[:, None]
    dweight = (out["x"] * z).sum(1)
    dwo_bias = (g * weight[:, None]).sum(0)
    if wo_bias is not None:
        y, dweight = y + weight[:, None] * wo_bias, dweight + g @ wo_bias
    back = oracles.dense_layer(first, rows, wi, None, dz[:, None, :] * slopes)
    dp = (back["x"] * x).sum(1) if on_input else dweight
    dx = back["x"] * p[:, None] if on_input else back["x"]
    return ExpertResult(y, dx, dp, back["kernel"], back["bias"], out["kernel"], dwo_bias)


@dataclass(frozen=True)
class MoEResult:
    """Output ``[t, h]``, gradients of the input and of all parameters by their names, and the routing."""

    y: np.ndarray
    dx: np.ndarray
    gradients: dict[str, np.ndarray]
    routing: Routing

    @property
    def loss(self) -> float:
        """The sum of all losses that gradients feel."""
        return sum(self.routing.losses.values())


def moe_layer(
    options: MoEOptions,
    params: dict[str, np.ndarray],
    x: np.ndarray,
    g: np.ndarray,
    *,
    state: RouterState | None = None,
    valid: np.ndarray | None = None,
    sequences: np.ndarray | None = None,
    training: bool = True,
    noise: np.ndarray | None = None,
    forced_logits: np.ndarray | None = None,
    replay: Sequence[Sequence[int]] | None = None,
    loss_scale: float = 1.0,
    scales: Sequence[Scales] | None = None,
) -> MoEResult:
    """Run an MoE layer on tokens ``[t, h]``, and back from the output's gradient ``g [t, h]``.

    Args:
        options: The layer's options.
        params: Parameters of the shapes ``options.shapes()``.
        x, g: Input, and gradient of the output.
        state: The router's state; None: a fresh one.
        valid, sequences, training, replay: Those of `route`.
        noise: Factors of the router's input ``[t, h]`` under ``moe_input_jitter_eps``.
        forced_logits: Logits ``[t, e]`` that take the place of those computed, whose gradient the latter get.
        loss_scale: Factor of the losses' gradients.
        scales: Quantization of each expert.
    """
    params = {name: np.asarray(value).astype(np.float64) for name, value in params.items()}
    assert {name: value.shape for name, value in params.items()} == options.shapes()
    x, g = np.asarray(x).astype(np.float64), np.asarray(g).astype(np.float64)
    state = RouterState.fresh(options.num_moe_experts) if state is None else state
    grads: dict[str, np.ndarray] = {}

    router_x = x if noise is None else x * noise
    logits = router_x @ params["router.weight"].T + params.get("router.bias", 0.0)
    routing = route(
        logits if forced_logits is None else forced_logits,
        options,
        state,
        valid=valid,
        sequences=sequences,
        training=training,
        replay=replay,
    )

    rows, rows_g = x, g
    if options.moe_latent_size is not None:
        rows = x @ params["latent.down"] + params.get("latent.down_bias", 0.0)
        rows_g = g @ params["latent.up"].T
    combined, drows = np.zeros_like(rows), np.zeros_like(rows)
    dprobs = np.zeros_like(routing.probs)
    grads |= {name: np.zeros_like(value) for name, value in params.items() if name.startswith("experts.")}
    for e in range(options.num_moe_experts):
        tokens = [t for t in range(len(x)) if routing.kept[t, e]]
        if not tokens:
            continue
        names = ("experts.wi", "experts.wi_bias", "experts.wo", "experts.wo_bias")
        weights = [params[name][e] if name in params else None for name in names]
        own = None if scales is None else scales[e]
        result = expert(rows[tokens], routing.probs[tokens, e], *weights, rows_g[tokens], options, own)
        for i, t in enumerate(tokens):
            combined[t] += result.y[i]
            drows[t] += result.dx[i]
            dprobs[t, e] = result.dp[i]
        values = (result.dwi, result.dwi_bias, result.dwo, result.dwo_bias)
        for name, value in zip(names, values, strict=True):
            if name in grads:
                grads[name][e] = value

    y, dx = combined, drows
    if options.moe_latent_size is not None:
        y = combined @ params["latent.up"] + params.get("latent.up_bias", 0.0)
        dx = drows @ params["latent.down"].T
        grads |= {"latent.up": combined.T @ g, "latent.down": x.T @ drows}
        grads |= {"latent.up_bias": g.sum(0), "latent.down_bias": drows.sum(0)}

    dlogits = routing.vjp(dprobs, loss_scale)
    drouter_x = dlogits @ params["router.weight"]
    dx = dx + (drouter_x if noise is None else drouter_x * noise)
    grads |= {"router.weight": dlogits.T @ router_x, "router.bias": dlogits.sum(0)}

    if options.moe_shared_expert_intermediate_size is not None:
        shared_y, shared_dx, shared = _shared_expert(options, params, x, g)
        y, dx, grads = y + shared_y, dx + shared_dx, grads | shared
    return MoEResult(y, dx, {name: grads[name] for name in params}, routing)


def _shared_expert(
    options: MoEOptions, params: dict[str, np.ndarray], x: np.ndarray, g: np.ndarray
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """A dense MLP that all tokens take, times ``sigmoid(x gate)``: output, gradient of x, those of parameters."""
    plain = MoEOptions(
        num_moe_experts=1,
        hidden_size=options.hidden_size,
        moe_ffn_hidden_size=1,
        activation_func=options.activation_func,
        gated_linear_unit=options.gated_linear_unit,
        activation_func_clamp_value=options.activation_func_clamp_value,
        glu_linear_offset=options.glu_linear_offset,
    )
    gate, slope = np.ones(len(x)), np.zeros(len(x))
    if "shared.gate" in params:
        gate = _sigmoid(x @ params["shared.gate"])
        slope = gate * (1.0 - gate)
    # The probability of a row multiplies its activation, so here it has none, and the gate multiplies the output.
    kernels = (params["shared.wi"], None, params["shared.wo"], None)
    result = expert(x, np.ones(len(x)), *kernels, g * gate[:, None], plain)
    grads = {"shared.wi": result.dwi, "shared.wo": result.dwo}
    dgate = (result.y * g).sum(1) * slope
    dx = result.dx
    if "shared.gate" in params:
        grads["shared.gate"] = x.T @ dgate
        dx = dx + np.outer(dgate, params["shared.gate"])
    return result.y * gate[:, None], dx, grads
