"""What Megatron derives from a configuration before it builds a layer of Transformer Engine."""

from __future__ import annotations

from typing import Any

import jax

from jax_te.config import ModelParallelConfig
from jax_te.typing import Initializer


def condition_init_method(config: ModelParallelConfig, init_method: Initializer) -> Initializer:
    """``init_method``, or zeros where ``config.perform_initialization`` is False.

    Megatron then leaves memory as it is; here no array ever holds garbage. For shapes without arrays, see
    ``nnx.eval_shape``.

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
    return init_method if config.perform_initialization else jax.nn.initializers.zeros


def _get_extra_te_kwargs(config: ModelParallelConfig) -> dict[str, Any]:
    """Keywords that every layer is built with: ``params_dtype``.

    Megatron's has a ``device`` as well. Arrays are made on JAX's default device here, or where ``jax.jit`` with
    ``out_shardings`` puts them.

    Source: ``megatron.core.extensions.transformer_engine._get_extra_te_kwargs``.

    >>> _get_extra_te_kwargs(ModelParallelConfig(params_dtype="bfloat16"))
    {'params_dtype': dtype(bfloat16)}
    """
    return {"params_dtype": config.params_dtype}
