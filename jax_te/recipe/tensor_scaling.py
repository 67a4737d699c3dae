"""Recipes with one scale for a whole tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from jax_te._validation import check_positive
from jax_te.recipe.base import Recipe

AmaxScope = Literal["group", "whole"]

MAX_MARGIN = 17
"""Largest margin: with 18 the largest value of a tensor would be below E4M3's smallest, 448 / 2**18 < 2**-9."""


@dataclass(frozen=True, kw_only=True)
class _TensorScaling(Recipe):
    """Base of these recipes, which can quantize attention.

    Args:
        fp8_dpa_fwd, fp8_dpa_bwd: whether the forward and the backward pass of attention are in FP8.
    """

    attention_lacks: ClassVar[str] = ""

    fp8_dpa_fwd: bool = True
    fp8_dpa_bwd: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        unquantized = {"fp8_dpa_fwd": not self.fp8_dpa_fwd, "fp8_dpa_bwd": not self.fp8_dpa_bwd}
        for name in (name for name, left_out in unquantized.items() if left_out and not self.quantizes_attention):
            raise ValueError(
                f"{name}=False keeps one pass of FP8 attention in the compute dtype, and without fp8_dpa all of "
                "attention is; set fp8_dpa=True, or leave it out"
            )
        if all(unquantized.values()):
            raise ValueError(
                "fp8_dpa=True with fp8_dpa_fwd=False and fp8_dpa_bwd=False leaves no pass of attention in FP8; set "
                "fp8_dpa=False, or leave one of them out"
            )


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(_TensorScaling):
    """Per-tensor FP8 whose scale comes from the largest values of earlier steps.

    ``scale = max_fp8 / amax / 2**margin`` with ``amax`` the maximum (or the newest) of the last ``amax_history_len``
    steps; an amax of 0, inf or nan keeps the scale that was in use. The quantized value is ``clip(x * scale)``
    rounded to nearest even.

    Args:
        margin: powers of two of head-room below the format's largest value, an integer in [0, 17].
        amax_history_len: steps kept, >= 1. TE's default is 1024, Megatron's is 1.
        amax_compute_algo: ``"max"`` of the history, or ``"most_recent"``.
        tp_only_amax_red: the amax of an input or gradient spans the tensor and context axes only, so that each part of
            the batch (over the mesh's data and fsdp axes) has a scale of its own. False: it spans the whole array.
        fp8_dpa, fp8_mha: whether to quantize attention, too: queries, keys and values under one scale, the softmax,
            the output, its gradient, the gradient of the scores, and those of queries, keys and values under
            one scale. All of them are E4M3, whatever ``fp8_format``.
        fp8_dpa_fwd: whether the forward pass of attention is in FP8. False: it computes in the compute dtype, of
            queries, keys and values that have been quantized for backward; see docs/attention_fp8.md.
        fp8_dpa_bwd: whether the backward pass of attention is in FP8. False: only forward is, as Transformer
            Engine's ``NVTE_FP8_DPA_BWD=0``; backward reads the operands that forward has quantized.
        fp8_format, override_linear_precision, fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: see `Recipe`.

    Raises:
        TypeError, ValueError: for a field outside the above.

    Source: ``transformer_engine.common.recipe.DelayedScaling``; Micikevicius et al. 2022, "FP8 Formats for Deep
        Learning".

    >>> DelayedScaling(amax_history_len=16).has_state
    True
    """

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    tp_only_amax_red: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.margin < 0:
            raise ValueError(f"margin must be an integer >= 0, got {self.margin!r}")
        if self.margin > MAX_MARGIN:
            raise ValueError(f"margin {self.margin} leaves E4M3 no value but 0; it must be <= {MAX_MARGIN}")
        check_positive(amax_history_len=self.amax_history_len)

    @property
    def has_state(self) -> bool:
        return True

    @property
    def name(self) -> str:
        return "delayed"


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(_TensorScaling):
    """Per-tensor FP8 whose scale comes from the tensor itself: ``scale = max_fp8 / amax(x)``.

    No state but that of ``fp8_dpa``, one more pass over the tensor than `DelayedScaling`. An amax that is 0, inf or nan
    gives scale 1.

    Args:
        use_power_2_scales: whether to round every scale down to a power of two.
        amax_scope: shards of a tensor on a mesh that share a scale. ``"group"``: those that an all-gather joins before
            a GEMM, that is of an input or gradient the shards of its sequence over the tensor axis, of a kernel those
            over the fsdp axis; no device waits for data-parallel ones, and values depend on the mesh. ``"whole"``: all
            shards, so that values equal those on one device, at the cost of an all-reduce over all devices for each
            tensor. Kernels that are stored quantized have one scale under both, and so have tensors of a layer whose
            devices cannot run it by themselves (`jax_te.ops.explain_backend` says why).
        fp8_dpa, fp8_mha: whether to quantize attention, too. Queries, keys, values and the output's gradient have
            current scales, the softmax is at most 1, and the output at most the largest value. Gradients that
            exist only inside of the kernel, of the scores, queries, keys and values, have the scale of the step
            before: the state of four scales, which layers then carry. This is jax_te's own design. All are E4M3,
            whatever ``fp8_format``.
        fp8_dpa_fwd: whether the forward pass of attention is in FP8. False: see `DelayedScaling`.
        fp8_dpa_bwd: whether the backward pass of attention is in FP8. False: only forward is, without state.
        fp8_format, override_linear_precision, fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: see `Recipe`.

    Source: ``transformer_engine.common.recipe.Float8CurrentScaling``; the groups are those of
        ``transformer_engine.jax.cpp_extensions.amax.AmaxScope``, ``TPSP`` and ``FSDP``.

    >>> Float8CurrentScaling().has_state
    False
    """

    use_power_2_scales: bool = False
    amax_scope: AmaxScope = "group"

    @property
    def has_state(self) -> bool:
        return self.quantizes_attention and self.fp8_dpa_bwd

    @property
    def name(self) -> str:
        return "current"
