"""Selective recomputation: parts of a layer that backward computes again, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_te.config import RECOMPUTE_MODULES

# A user context takes part in the jit cache key: a function traced with other modules is traced again.
_modules = jax.make_user_context(())


@contextlib.contextmanager
def selective_recompute(*modules: str) -> Iterator[None]:
    """Have these parts of the layers that are traced or called inside computed again in backward.

    - ``"core_attn"``: scores, softmax and dropout of attention cores.
    - ``"layernorm"``: outputs of the norms in `LayerNormLinear` and `LayerNormMLP`, and their quantized form.
    - ``"activation"``: the activation function's output in `LayerNormMLP`, and its quantized form.
    - ``"mlp"``: `LayerNormMLP` as a whole, with the norm in front.

    Contexts nest; the innermost says it all. No GEMM runs twice for ``"layernorm"`` and ``"activation"``. A kernel that
    is not quantized beforehand is quantized again with them.

    Args:
        *modules: some of `jax_te.config.RECOMPUTE_MODULES`; none: recompute nothing.

    Raises:
        ValueError: for another name.

    Source: ``recompute_modules`` of ``megatron.core.transformer.TransformerConfig``; Korthikanti et al. 2022.

    >>> with selective_recompute("mlp"):
    ...     recomputed("mlp"), recomputed("core_attn")
    (True, False)
    """
    unknown = [name for name in modules if name not in RECOMPUTE_MODULES]
    if unknown:
        raise ValueError(f"unknown modules {unknown}; allowed: {', '.join(RECOMPUTE_MODULES)}")
    with _modules(tuple(sorted(set(modules)))):
        yield


def recomputed(module: str) -> bool:
    """Whether the innermost `selective_recompute` names this module.

    >>> recomputed("mlp")
    False
    """
    return module in _modules.value


def run_recomputed(function: Callable[..., Any], x: Any, *, kept: dict[str, tuple[str, ...]]) -> Any:
    """``function(x)``, of which backward computes again what `selective_recompute` says.

    Args:
        function: the part of a layer, with its parameters.
        x: array or pytree of arrays.
        kept: the part's own modules, and for each the names of arrays to keep if it is recomputed. Of several that are,
            what all of them keep is kept.

    >>> import jax.numpy as jnp
    >>> with selective_recompute("mlp"):
    ...     run_recomputed(jnp.sin, jnp.zeros(()), kept={"mlp": ()}).item()
    0.0
    """
    chosen = [set(names) for module, names in kept.items() if recomputed(module)]
    if not chosen:
        return function(x)
    names = sorted(set.intersection(*chosen))
    policy = jax.checkpoint_policies.save_only_these_names(*names) if names else None
    return jax.checkpoint(function, policy=policy)(x)
