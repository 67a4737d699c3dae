"""Recipes with a scale for each block of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jax_te.recipe.base import EMULATED, PRECISE, MMParams, Recipe, Support
from jax_te.recipe.format import Format


@dataclass(frozen=True, kw_only=True)
class _BlockScaling(Recipe):
    """Base of these recipes: E4M3 everywhere, with the products of blocks scaled and summed in fp32."""

    attention_lacks: ClassVar[str] = "scales of blocks, and FP8 attention has one scale for each tensor"

    fp8_format: Format = Format.E4M3
    fp8_gemm_fprop: MMParams = PRECISE
    fp8_gemm_dgrad: MMParams = PRECISE
    fp8_gemm_wgrad: MMParams = PRECISE

    def __post_init__(self) -> None:
        super().__post_init__()
        # Products of blocks with different scales cannot be summed in the tensor core's accumulator.
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            if not getattr(self, name).use_split_accumulator:
                raise ValueError(
                    f"{type(self).__name__} scales every block's sum in fp32, so {name} cannot be "
                    "MMParams(use_split_accumulator=False); leave it out"
                )


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(_BlockScaling):
    """FP8 with one fp32 scale for every 1 x 128 values of inputs and gradients and every 128 x 128 of a kernel.

    ``scale = max_fp8 / amax(block)``, rounded down to a power of two; a block whose amax is 0 or inf has scale 1. A
    1 x 128 block lies along the axis that the GEMM contracts, so inputs and gradients are quantized once for each
    direction, both times from the original values. GEMMs multiply 128 values in FP8, scale the sum and add it in fp32.

    Args:
        use_f32_scales: whether to keep the scales as they come, not rounded to powers of two.
        fp8_format: `Format.E4M3` (default) or `Format.HYBRID`.
        override_linear_precision: see `Recipe`.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: options of accumulation, which is always split; anything else is
            refused.
        fp8_dpa, fp8_mha: False; True is refused, as in Transformer Engine.

    Raises:
        TypeError, ValueError: for a field outside the above.

    Source: ``transformer_engine.common.recipe.Float8BlockScaling``; DeepSeek-AI 2024, "DeepSeek-V3 Technical Report",
        section 3.3.

    >>> Float8BlockScaling().fp8_format
    <Format.E4M3: 'e4m3'>
    """

    use_f32_scales: bool = False

    @property
    def name(self) -> str:
        return "block"

    def _native(self, capability: float) -> Support:
        # The kernel is written in Hopper's warp-group instructions, which Blackwell does not have.
        if 9.0 <= capability < 10.0:
            return Support(
                True, f"FP8 tensor cores of compute capability {capability:g}, with jax_te's own GEMM kernel"
            )
        return Support(False, f"its GEMM kernel is for compute capability 9.x, this is {capability:g}; {EMULATED}")


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(_BlockScaling):
    """FP8 with a power-of-two scale for every 32 values along the axis that a GEMM contracts (OCP MXFP8).

    The stored reciprocal scale is E8M0: ``2**ceil(log2(amax(block) / max_fp8))``. Every tensor is quantized once for
    each direction, both times from the original values.

    Args:
        fp8_format: `Format.E4M3` (default) or `Format.HYBRID`.
        override_linear_precision: see `Recipe`.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: options of accumulation, which is always fp32; anything else is
            refused.
        fp8_dpa, fp8_mha: False; True is refused, as in Transformer Engine.

    Raises:
        TypeError, ValueError: for a field outside the above.

    Source: ``transformer_engine.common.recipe.MXFP8BlockScaling``; Open Compute Project, "OCP Microscaling Formats (MX)
        Specification 1.0".

    >>> MXFP8BlockScaling().name
    'mxfp8'
    """

    alignment: ClassVar[int] = 32  # a block

    @property
    def name(self) -> str:
        return "mxfp8"

    def _native(self, capability: float) -> Support:
        return _blackwell("MXFP8", capability)


@dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling(_BlockScaling):
    """FP4 (E2M1) with an E4M3 scale for every 16 values and one fp32 scale for the tensor.

    Three measures keep training accurate: kernels share a scale over 16 x 16 blocks, so that both directions see the
    same values; inputs and gradients are rotated by a random 16 x 16 Hadamard transform for the weight gradient; and
    gradients are rounded stochastically. The random bits of that are a function of the gradient itself, so there is no
    random state: a recomputed step rounds in the same way, on every mesh.

    Args:
        disable_rht: whether the Hadamard transform is off.
        disable_stochastic_rounding: whether to round gradients to nearest.
        disable_2d_quantization: whether kernels have 1 x 16 blocks, too.
        fp4_format: `Format.E2M1`.
        fp8_format: `Format.E4M3`, of the block scales.
        override_linear_precision: see `Recipe`.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: options of accumulation, which is always fp32; anything else is
            refused.
        fp8_dpa, fp8_mha: False; True is refused, as in Transformer Engine.

    Raises:
        TypeError, ValueError: for a field outside the above.

    Source: ``transformer_engine.common.recipe.NVFP4BlockScaling``; NVIDIA 2025, "Pretraining Large Language Models with
        NVFP4".

    >>> NVFP4BlockScaling(disable_rht=True).name
    'nvfp4'
    """

    alignment: ClassVar[int] = 32

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    fp4_format: Format = Format.E2M1  # the only one; a field because it is one in TE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fp4_format is not Format.E2M1:
            raise ValueError(f"fp4_format must be Format.E2M1, got {self.fp4_format!r}")
        if self.fp8_format is not Format.E4M3:
            raise ValueError(
                f"fp8_format, the format of NVFP4's block scales, must be Format.E4M3, got {self.fp8_format}"
            )

    @property
    def name(self) -> str:
        return "nvfp4"

    def _native(self, capability: float) -> Support:
        return _blackwell("NVFP4", capability)


def _blackwell(kind: str, capability: float) -> Support:
    # Hopper's tensor cores do not support block scales.
    if capability >= 10.0:
        return Support(True, f"{kind} tensor cores of compute capability {capability:g}")
    return Support(False, f"{kind} needs compute capability 10.0 (Blackwell), this is {capability:g}; {EMULATED}")
