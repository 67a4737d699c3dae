"""Arguments of layers that Megatron derives from a configuration."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import checked
from jax_te.config import ModelParallelConfig
from jax_te.typing import Array, Initializer


@checked
def condition_init_method(config: ModelParallelConfig, init_method: Initializer) -> Initializer:
    """Return ``init_method``, or an initializer of zeros if ``config.perform_initialization`` is False.

    Megatron leaves memory uninitialized in that case; here no array ever holds garbage. ``nnx.eval_shape`` gives shapes
    without arrays.

    Raises:
        TypeError: if ``init_method`` cannot be called.

    Source: ``megatron.core.extensions.transformer_engine.condition_init_method``.

    >>> from jax_te.config import ModelParallelConfig, NormalInit
    >>> init = condition_init_method(ModelParallelConfig(perform_initialization=False), NormalInit(1.0))
    >>> init(jax.random.key(0), (2,), jnp.float32).tolist()
    [0.0, 0.0]
    """
    if not callable(init_method):
        raise TypeError(
            f"init_method must be a function init(key, shape, dtype), e.g. config.init_method; got {init_method!r}"
        )
    # Zeros, not uninitialized memory, which JAX does not have.
    return init_method if config.perform_initialization else jax.nn.initializers.zeros


@checked
def get_extra_te_kwargs(config: ModelParallelConfig) -> dict[str, Any]:
    """Return the keyword arguments that every layer is built with: ``params_dtype``.

    Megatron's function also returns a ``device``. Arrays are created on JAX's default device here, or where ``jax.jit``
    with ``out_shardings`` puts them.

    Source: ``megatron.core.extensions.transformer_engine._get_extra_te_kwargs``.

    >>> get_extra_te_kwargs(ModelParallelConfig(params_dtype="bfloat16"))
    {'params_dtype': dtype(bfloat16)}
    """
    return {"params_dtype": config.params_dtype}


def in_dtype_of(x: Array, parameter: nnx.Variable) -> Array:
    """Return ``x`` in the dtype of a layer's parameter if ``x`` is in fp32 and the parameter in half precision.

    So does Megatron's fused layer with an fp32 residual stream, and Transformer Engine's norms; its linear layers raise
    an error. Parameters in fp32 widen nothing: the dtype of computation is then that of the input.

    >>> in_dtype_of(jnp.ones(2), nnx.Param(jnp.ones(2, jnp.bfloat16))).dtype
    dtype(bfloat16)
    """
    own = jnp.dtype(parameter.get_value().dtype)
    return x.astype(own) if x.dtype == jnp.float32 and own.name in ("bfloat16", "float16") else x
