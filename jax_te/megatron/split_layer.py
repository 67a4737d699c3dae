"""Splitting of a fused layer into its two parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import checked
from jax_te.config import TransformerConfig
from jax_te.layers import CachedKernel, LayerNorm, RMSNorm, norm_spec
from jax_te.megatron.layernorm_linear import TELayerNormColumnParallelLinear
from jax_te.megatron.linear import TEColumnParallelLinear
from jax_te.megatron.norm import TENorm
from jax_te.typing import Initializer, TensorGroup

_COPIED = (
    "cache_mode",
    "disable_parameter_transpose_cache",
    "module_recipe",
    "high_precision",
    "deterministic",
    "module_name",
    "frozen",
)


@checked
def split_te_layernorm_column_parallel_linear(
    fused_layer: TELayerNormColumnParallelLinear,
    config: TransformerConfig,
    init_method: Initializer | None = None,
    tp_group: TensorGroup = None,
) -> tuple[LayerNorm | RMSNorm, TEColumnParallelLinear]:
    """Return the norm and the linear layer of a fused layer, with copies of its arrays.

    One after the other they compute the same as the fused layer, on the XLA backend to the last bit. Arrays keep their
    dtypes and shardings. In Megatron the linear layer loses the fused layer's own precision (that of a quantization
    file); here the linear layer gets it, along with the state of delayed scaling.

    Args:
        fused_layer: layer to split; it is not changed.
        config: configuration of the new layers; its normalization must be the fused layer's.
        init_method: initializer that the linear layer is built with, before the kernel is copied into it. None: zeros.
        tp_group: see `TELinear`. None: the fused layer's.

    Raises:
        ValueError: if ``config`` describes another norm than the fused layer has.
        AssertionError, TypeError: see `TEColumnParallelLinear`.

    Source: ``megatron.core.extensions.transformer_engine.split_te_layernorm_column_parallel_linear``.

    >>> config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    >>> fused = TELayerNormColumnParallelLinear(
    ...     16, 32, config=config, init_method=config.init_method, gather_output=False, bias=True, skip_bias_add=False,
    ...     is_expert=False, rngs=nnx.Rngs(0),
    ... )
    >>> norm, linear = split_te_layernorm_column_parallel_linear(fused, config)
    >>> x = jnp.ones((2, 16))
    >>> bool((linear(norm(x))[0] == fused(x)[0]).all())
    True
    """
    described = norm_spec(config.normalization, fused_layer.norm.epsilon, config.layernorm_zero_centered_gamma)
    if described != fused_layer.norm:
        raise ValueError(f"config describes {described}, the fused layer has {fused_layer.norm}; they must be the same")
    # The fused layer's own epsilon: TENorm does not read the configuration's.
    norm = TENorm(config, fused_layer.in_features, fused_layer.norm.epsilon)
    linear = TEColumnParallelLinear(
        fused_layer.in_features,
        fused_layer.kernel_shape[1:],
        config=config,
        # Any initializer works, because the kernel is replaced; zeros are the cheapest.
        init_method=jax.nn.initializers.zeros if init_method is None else init_method,
        gather_output=False,
        bias=fused_layer.use_bias,
        skip_bias_add=fused_layer.te_return_bias,
        is_expert=False,
        tp_comm_buffer_name=fused_layer.tp_comm_buffer_name,
        tp_group=tp_group or fused_layer.tensor_parallel.group,
        kernel_axes=fused_layer.kernel_axes,
        rngs=nnx.Rngs(0),
    )
    _take_over(fused_layer, norm, linear)
    return norm, linear


def _take_over(fused: Any, norm: Any, linear: Any) -> None:
    """Copy arrays, state and static attributes of a fused layer into its two parts."""
    norm.scale.set_value(_copy(fused.scale))
    if norm.bias is not None:
        norm.bias.set_value(_copy(fused.ln_bias))
    linear.kernel.set_value(_copy(fused.kernel))
    if linear.bias is not None:
        linear.bias.set_value(_copy(fused.bias))
    # State and cached kernel may exist although the linear layer was built without them, or vice versa: the present
    # ambient recipe may differ from the one under which the fused layer was built.
    state, cached = fused.quantizers, fused.kernel_cache
    linear.quantizers = nnx.data(jax.tree.map(jnp.copy, state))
    linear.kernel_cache = nnx.data(None if cached is None else CachedKernel(_copy(cached)))
    linear.tensor_parallel = replace(fused.tensor_parallel, group=linear.tensor_parallel.group)
    for name in _COPIED:
        setattr(linear, name, getattr(fused, name))


def _copy(variable: Any) -> Any:
    # Separate arrays, so that donating the fused layer's does not delete those of its parts.
    return jax.tree.map(jnp.copy, variable.get_value())
