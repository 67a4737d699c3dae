"""The linear ops with all of their arguments in one row, as tests that go through lists of arrays call them."""

from __future__ import annotations

from typing import Any

from jax_te import ops
from jax_te.config import ActivationParams
from jax_te.ops import Activation, LinearOptions, LinearWeights, MlpOptions, NormSpec


def dense(x: Any, kernel: Any, bias: Any = None, *, save_original_input: bool = False, **options: Any) -> Any:
    return ops.dense(x, kernel, bias, options=LinearOptions(save_original_input=save_original_input), **options)


def layernorm_dense(
    x: Any,
    scale: Any,
    ln_bias: Any,
    kernel: Any,
    bias: Any = None,
    *,
    state: Any = None,
    grad_sink: Any = None,
    **o: Any,
) -> Any:
    return ops.layernorm_dense(x, scale, ln_bias, LinearWeights(kernel, bias, state, grad_sink), **o)


def layernorm_mlp(
    x: Any,
    scale: Any,
    ln_bias: Any,
    wi_kernel: Any,
    wi_bias: Any,
    wo_kernel: Any,
    wo_bias: Any,
    *,
    norm: NormSpec = NormSpec(),  # noqa: B008  # frozen
    activation: str = "gelu",
    activation_params: ActivationParams | None = None,
    states: Any = None,
    grad_sinks: Any = (None, None),
    **options: Any,
) -> Any:
    states = (None, None) if states is None else states
    wi = LinearWeights(wi_kernel, wi_bias, states[0], grad_sinks[0])
    wo = LinearWeights(wo_kernel, wo_bias, states[1], grad_sinks[1])
    mlp = MlpOptions(norm=norm, activation=Activation(activation, activation_params))
    return ops.layernorm_mlp(x, scale, ln_bias, wi, wo, options=mlp, **options)
