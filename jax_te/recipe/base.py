"""The base of all precision recipes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from jax_te._validation import check_annotations, log_once
from jax_te.recipe.format import Format

GEMMS = ("fprop", "dgrad", "wgrad")
"""The three GEMMs of a linear layer, in the order of `Recipe.override_linear_precision`."""


@dataclass(frozen=True)
class MMParams:
    """How one FP8 GEMM accumulates.

    Args:
        use_split_accumulator: whether products are promoted to fp32 registers at short intervals ("precise"). False:
            they stay in the tensor core's accumulator, which keeps fewer bits on Hopper ("fast"). Only GPUs of compute
            capability 9.0 (and 8.9) differ; everything else always accumulates in fp32.

    Raises:
        TypeError: for a flag that is not True or False.

    Source: ``transformer_engine.common.recipe.MMParams``.

    >>> MMParams(use_split_accumulator=False)
    MMParams(use_split_accumulator=False)
    """

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        check_annotations(self, MMParams)


@dataclass(frozen=True)
class Support:
    """Whether a device has GEMM units for a recipe, and why (not). True in a boolean context if it has."""

    native: bool
    reason: str

    # So that "if recipe.supports():" works as expected; other objects are always true.
    def __bool__(self) -> bool:
        return self.native


# te.jax's default in all three GEMMs; te.pytorch's is precise in backward.
FAST = MMParams(use_split_accumulator=False)
PRECISE = MMParams(use_split_accumulator=True)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of all recipes. A recipe is data only; it can be a dictionary key and part of a jit cache key.

    Args:
        fp8_format: number formats, see `Format`.
        override_linear_precision: whether the forward GEMM, the input gradient's and the weight gradient's stay in high
            precision, i.e. multiply the operands as they are, in the compute dtype. Megatron's ``fp8_wgrad=False`` is
            ``(False, False, True)``.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: accumulation of each of the three GEMMs, see `MMParams`.
        fp8_dpa: whether to quantize the operands of dot-product attention, too; `DelayedScaling` and
            `Float8CurrentScaling` can.
        fp8_mha: the same. In Transformer Engine it also leaves out the casts between attention and its projections,
            which changes speed and not what is quantized.
    """

    alignment: ClassVar[int] = 16
    """Sizes of the matrices that the recipe quantizes must be multiples of this."""

    attention_lacks: ClassVar[str] = "no scales of its own for attention"
    """Reason why the recipe cannot quantize attention; empty if it can."""

    fp8_format: Format = Format.HYBRID
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    fp8_gemm_fprop: MMParams = FAST
    fp8_gemm_dgrad: MMParams = FAST
    fp8_gemm_wgrad: MMParams = FAST
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        # Numbers are checked here, once: code that reads a recipe does not check it again.
        self._check_format()
        flags = self.override_linear_precision
        if not isinstance(flags, tuple) or len(flags) != 3 or not all(isinstance(flag, bool) for flag in flags):
            raise ValueError(
                f"override_linear_precision must be three bools, for the forward, input-gradient and weight-gradient "
                f"GEMMs, e.g. (False, False, True); got {flags!r}"
            )
        check_annotations(self, type(self))
        self._check_attention()

    def _check_attention(self) -> None:
        if not self.quantizes_attention:
            return
        if self.attention_lacks:
            name = "fp8_dpa" if self.fp8_dpa else "fp8_mha"
            raise ValueError(
                f"{name}=True: {type(self).__name__} has {self.attention_lacks}; leave it out, and attention stays in "
                "the compute dtype, or take DelayedScaling or Float8CurrentScaling"
            )
        if self.fp8_mha:
            log_once("fp8_mha=True is taken as fp8_dpa=True: the casts around attention stay, see docs/parity.md")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__repr__ = cls.__repr__  # dataclass writes another only where a class has none of its own

    # Without the fields that have their defaults: a dozen of them in a message would hide those that were chosen.
    def __repr__(self) -> str:
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(given)})"

    @property
    def quantizes_attention(self) -> bool:
        """Whether dot-product attention is quantized, too."""
        return self.fp8_dpa or self.fp8_mha

    def _check_format(self) -> None:
        if not isinstance(self.fp8_format, Format):
            raise TypeError(
                f"fp8_format must be a jax_te.recipe.Format, got {self.fp8_format!r}; "
                f"allowed: {', '.join(str(f) for f in (Format.E4M3, Format.HYBRID))}"
            )
        if self.fp8_format is Format.E5M2:
            raise ValueError(
                "fp8_format=Format.E5M2 cannot train: FP8 GEMMs do not multiply E5M2 by E5M2. "
                "Use Format.HYBRID (E4M3 forward, E5M2 gradients) or Format.E4M3."
            )
        if self.fp8_format is Format.E2M1:
            raise ValueError(
                "fp8_format=Format.E2M1 is an FP4 format; use NVFP4BlockScaling for it, or Format.HYBRID or Format.E4M3"
            )

    @property
    def has_state(self) -> bool:
        """Whether layers must carry a `QuantizerState` for this recipe."""
        return False

    @property
    def name(self) -> str:
        """Short name, as in ``jax-te train --recipe NAME``."""
        raise TypeError(f"{type(self).__name__} has no name; use one of the concrete recipes")

    def supports(self, device: Any = None) -> Support:
        """Return whether ``device`` multiplies this recipe's quantized operands natively.

        Otherwise the results are the same: operands are quantized by the recipe and multiplied in high precision, which
        is for tests and debugging, not for speed.

        Args:
            device: a JAX device. None: the default one.

        >>> import jax
        >>> from jax_te.recipe import MXFP8BlockScaling
        >>> bool(MXFP8BlockScaling().supports(jax.devices("cpu")[0]))
        False
        """
        if device is None:
            from jax_te._device import default_device  # a recipe is data: reading its fields needs no jax

            device = default_device()
        if device.platform not in ("gpu", "cuda"):
            return Support(False, f"{device.platform} has no {self.name} GEMM; {EMULATED}")
        capability = str(getattr(device, "compute_capability", ""))
        # A GPU that is not NVIDIA's has a compute capability that is not a number, or none.
        try:
            return self._native(float(capability))
        except ValueError:
            return Support(False, f"{device.device_kind} is not an NVIDIA GPU with a compute capability; {EMULATED}")

    def _native(self, capability: float) -> Support:
        if capability >= 8.9:
            return Support(True, f"FP8 tensor cores of compute capability {capability:g}")
        return Support(False, f"FP8 needs compute capability 8.9 (Ada, Hopper), this is {capability:g}; {EMULATED}")


EMULATED = "the same numbers are computed in high precision"
