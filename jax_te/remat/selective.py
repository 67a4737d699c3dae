"""Selective recomputation: components of a layer that backward recomputes, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_te._validation import checked
from jax_te.config import RECOMPUTE_MODULES
from jax_te.remat.carried import run_on_copies

# A user context takes part in the jit cache key: a function traced with other modules is traced again.
ambient_modules = jax.make_user_context(())


@checked
@contextlib.contextmanager
def selective_recompute(*modules: str) -> Iterator[None]:
    """Return a context in which backward recomputes these components of all layers that are traced or called.

    - ``"core_attn"``: scores, softmax and dropout of attention cores.
    - ``"layernorm"``: outputs of the norms in `LayerNormLinear` and `LayerNormMLP`, and their quantized form.
    - ``"activation"``: the activation function's output in `LayerNormMLP`, and its quantized form.
    - ``"mlp"``: the whole of `LayerNormMLP`, its norm included.
    - ``"moe"``: the whole of a mixture of experts, its router included.
    - ``"moe_act"``: the output of the experts' activation function, and its quantized form.
    - ``"shared_experts"``: the block of a mixture that all tokens pass.

    Of nested contexts the innermost alone counts. ``"layernorm"`` and ``"activation"`` run no GEMM twice, but they
    quantize the kernel again unless it is a cached kernel.

    Args:
        *modules: names among `jax_te.config.RECOMPUTE_MODULES`; without any, nothing is recomputed.

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
    with ambient_modules(tuple(sorted(set(modules)))):
        yield


def recomputed(module: str) -> bool:
    """Return whether the innermost `selective_recompute` names this module.

    Args:
        module: name of a module in `jax_te.config.RECOMPUTE_MODULES`.

    >>> recomputed("mlp")
    False
    """
    return module in ambient_modules.value


def run_recomputed(function: Callable[..., Any], x: Any, *, kept: dict[str, tuple[str, ...]]) -> Any:
    """Return ``function(x)``; backward recomputes it under the ambient `selective_recompute`.

    Args:
        function: a component of a layer, with its parameters.
        x: array, or pytree of arrays and modules.
        kept: checkpoint names that stay saved if a module is recomputed, by the component's module names. If several
            modules are recomputed, the names that all of them list stay saved.

    >>> import jax.numpy as jnp
    >>> with selective_recompute("mlp"):
    ...     run_recomputed(jnp.sin, jnp.zeros(()), kept={"mlp": ()}).item()
    0.0
    """
    modules = ambient_modules.value
    if not modules:
        return function(x)
    chosen = [set(names) for module, names in kept.items() if module in modules]
    if not chosen:
        return function(x)
    # An array that one of these modules recomputes must not stay saved because another would save it.
    names = sorted(set.intersection(*chosen))
    policy = jax.checkpoint_policies.save_only_these_names(*names) if names else None
    return run_on_copies(lambda run: jax.checkpoint(run, policy=policy), function, x)
