"""Delayed scaling from Megatron's configuration fields."""

from __future__ import annotations

from typing import Any

from jax_te.recipe import DelayedScaling, Format


def TEDelayedScaling(
    config: Any, fp8_format: Format, override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
) -> DelayedScaling:
    """The model-wide delayed-scaling recipe of a Megatron configuration.

    Args:
        config: any object; read are its attributes ``fp8_margin`` (default 0), ``fp8_amax_history_len`` (1),
            ``fp8_amax_compute_algo`` (``"most_recent"``) and ``tp_only_amax_red`` (False). These defaults are
            Megatron's; those of `DelayedScaling` itself are Transformer Engine's.
        fp8_format: `Format.HYBRID` or `Format.E4M3`.
        override_linear_precision: whether the forward GEMM, the input gradient's and the weight gradient's stay in high
            precision. Megatron passes ``(False, False, not config.fp8_wgrad)``, which Transformer Engine drops, so that
            its weight gradients are in FP8 all the same; here it holds.

    Raises:
        ValueError: for ``fp8_interval`` other than 1 (Megatron warns: scales follow every step); where
            ``fp8_dot_product_attention`` or ``fp8_multi_head_attention`` is set, because attention does not run in FP8
            here; for values that `DelayedScaling` refuses.
        TypeError: for a format that is no `Format`.

    Source: ``megatron.core.extensions.transformer_engine.TEDelayedScaling``, there a class.

    >>> TEDelayedScaling(object(), Format.HYBRID).amax_compute_algo
    'most_recent'
    """
    interval = getattr(config, "fp8_interval", 1)
    if interval != 1:
        raise ValueError(f"fp8_interval must be 1, got {interval!r}: scales follow the amaxes of every step")
    for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
        if getattr(config, name, False):
            raise ValueError(f"{name}=True: attention does not run in FP8 here; set it to False")
    return DelayedScaling(
        margin=getattr(config, "fp8_margin", 0),
        fp8_format=fp8_format,
        amax_history_len=getattr(config, "fp8_amax_history_len", 1),
        amax_compute_algo=getattr(config, "fp8_amax_compute_algo", "most_recent"),
        override_linear_precision=override_linear_precision,
        tp_only_amax_red=getattr(config, "tp_only_amax_red", False),
    )
