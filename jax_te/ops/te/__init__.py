"""The ``te`` backend: Transformer Engine's quantize, GEMM, norm, activation and attention primitives.

Of the library only this folder imports ``transformer_engine`` (`bench/peers` and tests compare with it), and only
`load` decides when. ``primitives()`` gives the module with the functions; nothing is imported from it before TE is
known to load.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from jax_te.ops.attention.spec import AttentionSpec
from jax_te.ops.te.capabilities import is_te_quantizer
from jax_te.ops.te.load import available
from jax_te.quantize import MXQuantizer, NVFP4Quantizer, Quantizer
from jax_te.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

__all__ = ["available", "is_te_quantizer", "primitives", "supports"]


def primitives() -> ModuleType:
    """Return the module of primitives; call it only if `available` returns True."""
    return importlib.import_module("jax_te.ops.te.kernels")


def supports(
    op: str,
    *,
    recipe: Recipe | None = None,
    attention: AttentionSpec | None = None,
    unsharded: str | None = None,
    stored: Quantizer | None = None,
) -> tuple[bool, str]:
    """Return whether TE can run ``op`` here, and if not why.

    Args:
        op, recipe, attention: see `jax_te.ops.explain_backend`.
        unsharded: reason why the devices of a mesh cannot run it by themselves, as its kernels do.
        stored: quantizer of kernels that are stored quantized, as plain arrays.
    """
    ok, reason = available()
    if not ok:
        return False, reason
    if op == "grouped_dense":
        return False, _NO_GROUPED_DENSE
    if unsharded is not None:
        return False, f"its kernels run on each device of the mesh by itself, and here they cannot: {unsharded}"
    if recipe is not None:
        ok, reason = _recipe_supports(recipe)
        if not ok:
            return False, reason
    if isinstance(stored, MXQuantizer | NVFP4Quantizer):
        return False, (
            f"its kernel is stored quantized in the blocks of {type(stored).__name__}, and TE's GEMM takes those that "
            "it has quantized itself; leave out fp8_param, or quantize_parameters"
        )
    if op == "dot_product_attention" and attention is not None:
        return primitives().attention_supports(attention)
    return True, "TE loads and has this op"


# Read from Transformer Engine 2.20: gemm.cpp of its JAX half.
_NO_GROUPED_DENSE = (
    "its grouped GEMMs wait for the host in each GEMM and each quantization, or (the second version) need cuBLAS 13.3 "
    "and take bf16 and MXFP8 alone"
)


def _recipe_supports(recipe: Recipe) -> tuple[bool, str]:
    if isinstance(recipe, DelayedScaling | Float8CurrentScaling | MXFP8BlockScaling | NVFP4BlockScaling):
        return primitives().recipe_supports(recipe)
    if isinstance(recipe, Float8BlockScaling):
        return True, "TE's norms and activations need no hardware for it; GEMMs are those of the xla backend"
    return False, f"recipe {recipe.name!r} runs in XLA only"
