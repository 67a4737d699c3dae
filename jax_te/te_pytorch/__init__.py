"""Layers and functions of `transformer_engine.pytorch`: those of `jax_te`, with its names and its order of arguments.

Activations are ``[b, s, h]``. Transformer Engine's default is ``[s, b, h]``, over which attention here would run along
the batch. So ``attn_input_format`` and ``qkv_format`` have its default, ``"sbhd"``, and are refused unless a program
transposes its activations and says ``"bshd"``.

``import jax_te.te_pytorch as te`` takes the place of ``import transformer_engine.pytorch as te``. Arguments that may be
given by position are Transformer Engine's first ones, in its order; the others are keywords, those of the classes of
`jax_te.layers`. Constructors take ``rngs``. What PyTorch needs alone, such as devices, names, user buffers and random
state trackers, is refused by name, with what to do instead.
"""

from __future__ import annotations

from jax_te.layers import Fp8Padding, Fp8Unpadding
from jax_te.te_pytorch.attention import DotProductAttention, MultiheadAttention
from jax_te.te_pytorch.linear import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from jax_te.te_pytorch.norm import LayerNorm, RMSNorm
from jax_te.te_pytorch.precision import autocast, fp8_autocast
from jax_te.te_pytorch.recompute import checkpoint
from jax_te.te_pytorch.transformer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "TransformerLayer",
    "autocast",
    "checkpoint",
    "fp8_autocast",
]
