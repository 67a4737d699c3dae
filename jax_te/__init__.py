"""Megatron-Core's Transformer Engine layers and precision system for JAX and Flax.

The names that most programs need are in this module. Other layers are in `jax_te.layers`, models in `jax_te.models`,
training in `jax_te.training`. Names are imported when first used, so that ``import jax_te`` is fast. On machines with
Transformer Engine `jax_te.ops` is imported at once: Transformer Engine must be loaded before XLA loads its own cuDNN.

>>> import jax_te
>>> jax_te.DelayedScaling(margin=1).margin
1
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "checkpoint": ("TrainCheckpointer",),
    "config": ("ParallelConfig", "TransformerConfig"),
    "layers": (
        *("DotProductAttention", "LayerNormLinear", "LayerNormMLP", "Linear", "MultiheadAttention", "TransformerLayer"),
        *("dequantize_model", "prepare_quantization", "quantize_model"),
    ),
    "ops": ("explain_backend", "use_backend"),
    "quantize": ("observe_quantization",),
    "recipe": (
        *("CustomRecipe", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "Format"),
        *("MXFP8BlockScaling", "ModuleRecipe", "NVFP4BlockScaling", "autocast"),
    ),
    "sharding": ("ShardingRules", "make_mesh"),
    "training": ("Optimizer", "create_train_state", "make_train_step", "value_and_grad"),
}
_HOMES = {name: f"jax_te.{package}" for package, names in _EXPORTS.items() for name in names}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:  # the same names for type checkers and editors, which do not run code; a test compares the two
    from jax_te.checkpoint import TrainCheckpointer as TrainCheckpointer
    from jax_te.config import ParallelConfig as ParallelConfig
    from jax_te.config import TransformerConfig as TransformerConfig
    from jax_te.layers import DotProductAttention as DotProductAttention
    from jax_te.layers import LayerNormLinear as LayerNormLinear
    from jax_te.layers import LayerNormMLP as LayerNormMLP
    from jax_te.layers import Linear as Linear
    from jax_te.layers import MultiheadAttention as MultiheadAttention
    from jax_te.layers import TransformerLayer as TransformerLayer
    from jax_te.layers import dequantize_model as dequantize_model
    from jax_te.layers import prepare_quantization as prepare_quantization
    from jax_te.layers import quantize_model as quantize_model
    from jax_te.ops import explain_backend as explain_backend
    from jax_te.ops import use_backend as use_backend
    from jax_te.quantize import observe_quantization as observe_quantization
    from jax_te.recipe import CustomRecipe as CustomRecipe
    from jax_te.recipe import DelayedScaling as DelayedScaling
    from jax_te.recipe import Float8BlockScaling as Float8BlockScaling
    from jax_te.recipe import Float8CurrentScaling as Float8CurrentScaling
    from jax_te.recipe import Format as Format
    from jax_te.recipe import ModuleRecipe as ModuleRecipe
    from jax_te.recipe import MXFP8BlockScaling as MXFP8BlockScaling
    from jax_te.recipe import NVFP4BlockScaling as NVFP4BlockScaling
    from jax_te.recipe import autocast as autocast
    from jax_te.sharding import ShardingRules as ShardingRules
    from jax_te.sharding import make_mesh as make_mesh
    from jax_te.training import Optimizer as Optimizer
    from jax_te.training import create_train_state as create_train_state
    from jax_te.training import make_train_step as make_train_step
    from jax_te.training import value_and_grad as value_and_grad
else:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


# Transformer Engine's shared library needs the cuDNN that it was built with; if XLA's is loaded first, loading fails.
if importlib.util.find_spec("transformer_engine") is not None:
    importlib.import_module("jax_te.ops")
