"""Names of recipes and of quantization configs, as Megatron's command line and YAML files spell them."""

from __future__ import annotations

import enum


# StrEnum, because Megatron's files and command line compare members with raw text.
class Fp8Recipe(enum.StrEnum):
    """FP8 recipe names. Each member equals its string, so it compares with raw text from a YAML file.

    Source: ``megatron.core.enums.Fp8Recipe``.

    >>> Fp8Recipe.tensorwise == "tensorwise"
    True
    """

    delayed = "delayed"
    tensorwise = "tensorwise"
    mxfp8 = "mxfp8"
    blockwise = "blockwise"
    custom = "custom"


class Fp4Recipe(enum.StrEnum):
    """FP4 recipe names; each member equals its string.

    Source: ``megatron.core.enums.Fp4Recipe``.

    >>> Fp4Recipe("nvfp4").name
    'nvfp4'
    """

    nvfp4 = "nvfp4"
    custom = "custom"


# A plain Enum as in Megatron: a payload's kind is looked up by its value, so that unknown text raises.
class TransformerEngineConfigType(enum.Enum):
    """Kinds of payload in the ``configs`` section of a quantization file. This package reads one kind.

    Source: ``megatron.core.extensions.transformer_engine.TransformerEngineConfigType``.

    >>> TransformerEngineConfigType("TEQuantizationParams").name
    'TEQuantizationParams'
    """

    TEQuantizationParams = "TEQuantizationParams"


TE_CONFIG_TYPE_KEY = "transformer_engine_config_type"
"""Key of a payload's `TransformerEngineConfigType`."""

_TE_CONFIG_TYPE_KEY = TE_CONFIG_TYPE_KEY  # Megatron's spelling, for code that was written for it


class AttnMaskType(enum.Enum):
    """Mask types of attention; a member's name is the mask type of `jax_te.layers.DotProductAttention`.

    Source: ``megatron.core.transformer.enums.AttnMaskType``.

    >>> AttnMaskType.causal.value
    2
    """

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


class AttnType(enum.Enum):
    """Kinds of attention.

    Source: ``megatron.core.transformer.enums.AttnType``.

    >>> AttnType(1).name
    'self_attn'
    """

    self_attn = 1
    cross_attn = 2
