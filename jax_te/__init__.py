"""Megatron-Core's Transformer Engine layers and precision system for JAX and Flax.

The names below are the ones most programs need; layers are in `jax_te.layers`, models in `jax_te.models`, training in
`jax_te.training`. They are imported when first used, except on machines with Transformer Engine, which must be loaded
before XLA loads its own cuDNN.

>>> import jax_te
>>> jax_te.DelayedScaling(margin=1).margin
1
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_te.config import ParallelConfig, TransformerConfig
    from jax_te.layers import prepare_quantization
    from jax_te.ops import explain_backend, use_backend
    from jax_te.quantize import observe_quantization
    from jax_te.recipe import (
        CustomRecipe,
        DelayedScaling,
        Float8BlockScaling,
        Float8CurrentScaling,
        Format,
        MMParams,
        ModuleRecipe,
        MXFP8BlockScaling,
        NVFP4BlockScaling,
        autocast,
        current_recipe,
    )
    from jax_te.remat import split_vjp
    from jax_te.sharding import ShardingRules, make_mesh

__version__ = "0.1.0"

_HOMES = {
    "CustomRecipe": "recipe",
    "DelayedScaling": "recipe",
    "Float8BlockScaling": "recipe",
    "Float8CurrentScaling": "recipe",
    "Format": "recipe",
    "MMParams": "recipe",
    "MXFP8BlockScaling": "recipe",
    "ModuleRecipe": "recipe",
    "NVFP4BlockScaling": "recipe",
    "ParallelConfig": "config",
    "ShardingRules": "sharding",
    "TransformerConfig": "config",
    "autocast": "recipe",
    "current_recipe": "recipe",
    "explain_backend": "ops",
    "make_mesh": "sharding",
    "observe_quantization": "quantize",
    "prepare_quantization": "layers",
    "split_vjp": "remat",
    "use_backend": "ops",
}

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "ModuleRecipe",
    "NVFP4BlockScaling",
    "ParallelConfig",
    "ShardingRules",
    "TransformerConfig",
    "autocast",
    "current_recipe",
    "explain_backend",
    "make_mesh",
    "observe_quantization",
    "prepare_quantization",
    "split_vjp",
    "use_backend",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"jax_te.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'jax_te' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


if importlib.util.find_spec("transformer_engine") is not None:
    importlib.import_module("jax_te.ops")
