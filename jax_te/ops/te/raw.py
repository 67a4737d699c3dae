"""Transformer Engine's own layers, unwrapped: what ``jax-te bench`` measures jax_te against."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import transformer_engine.jax as te
from transformer_engine.common import recipe as te_recipe
from transformer_engine.jax.flax import LayerNormDenseGeneral, LayerNormMLP, TransformerLayer
from transformer_engine.jax.sharding import MeshResource

from jax_te.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from jax_te.typing import Array


def raw_recipe(recipe: Recipe | None) -> Any:
    """TE's recipe with the fields of ours, or None."""
    if recipe is None:
        return None
    fp8_format = getattr(te_recipe.Format, recipe.fp8_format.name)
    if isinstance(recipe, DelayedScaling):
        return te_recipe.DelayedScaling(
            margin=recipe.margin,
            fp8_format=fp8_format,
            amax_history_len=recipe.amax_history_len,
            amax_compute_algo=recipe.amax_compute_algo,
        )
    if isinstance(recipe, Float8CurrentScaling):
        return te_recipe.Float8CurrentScaling(fp8_format=fp8_format)
    raise ValueError(f"Transformer Engine for JAX has no recipe {recipe.name!r}")


def raw_autocast(recipe: Recipe | None) -> contextlib.AbstractContextManager[None]:
    """TE's own context for a recipe, on one device."""
    return te.autocast(enabled=recipe is not None, recipe=raw_recipe(recipe), mesh_resource=MeshResource())


def raw_module(
    kind: str, hidden: int, heads: int, ffn: int, x: Array, key: Array
) -> tuple[Callable[[Any, Array], Array], Any]:
    """``(apply(variables, x) -> y, variables)`` of one of te.jax's own modules, with biases and without dropout.

    ``kind`` is ``"transformer_layer"`` (causal, GELU), ``"layernorm_mlp"`` (GELU) or ``"layernorm_linear"`` (from
    ``hidden`` to ``ffn`` features). Call it, and everything that traces or compiles ``apply``, inside `raw_autocast`.
    """
    module = {"transformer_layer": _layer, "layernorm_mlp": _mlp, "layernorm_linear": _linear}[kind](hidden, heads, ffn)
    boxed = jax.jit(module.init)({"params": key}, x)
    is_box = lambda leaf: isinstance(leaf, nn.Partitioned)  # noqa: E731
    variables = jax.tree.map(lambda leaf: leaf.value if is_box(leaf) else leaf, boxed, is_leaf=is_box)

    def apply(variables: Any, x: Array) -> Array:
        y = module.apply(variables, x)
        return y[0] if isinstance(y, tuple) else y

    return apply, variables


def _layer(hidden: int, heads: int, ffn: int) -> TransformerLayer:
    return TransformerLayer(
        hidden_size=hidden,
        mlp_hidden_size=ffn,
        num_attention_heads=heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mlp_activations=("gelu",),
        use_bias=True,
        self_attn_mask_type="causal",
        enable_relative_embedding=False,
        dtype=jnp.bfloat16,
        transpose_batch_sequence=False,
    )


def _mlp(hidden: int, heads: int, ffn: int) -> LayerNormMLP:
    return LayerNormMLP(intermediate_dim=ffn, activations=("gelu",), use_bias=True, dtype=jnp.bfloat16)


def _linear(hidden: int, heads: int, ffn: int) -> LayerNormDenseGeneral:
    return LayerNormDenseGeneral(features=ffn, use_bias=True, dtype=jnp.bfloat16)
