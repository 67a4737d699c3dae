"""Transformer Engine's own layers, unwrapped."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import transformer_engine.jax as te
from flax.linen import spmd
from jax.sharding import Mesh
from transformer_engine.common import recipe as te_recipe
from transformer_engine.jax.flax import LayerNormDenseGeneral, LayerNormMLP, TransformerLayer, extend_logical_axis_rules
from transformer_engine.jax.sharding import MeshResource

from jax_te.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from jax_te.typing import Array


def raw_recipe(recipe: Recipe | None) -> Any:
    """Return TE's recipe with the fields of ours, or None.

    Raises:
        ValueError: for a recipe that TE for JAX does not have.
    """
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


@contextlib.contextmanager
def raw_context(recipe: Recipe | None, mesh: Mesh | None = None) -> Iterator[None]:
    """Yield inside of TE's contexts for a recipe on one device or a mesh, with Flax's rules for its names of axes."""
    # Only axes that split something are named, as a user of te.jax would do.
    resource = MeshResource() if mesh is None else MeshResource(**_resources(mesh))
    with (
        te.autocast(enabled=recipe is not None, recipe=raw_recipe(recipe), mesh_resource=resource),
        contextlib.nullcontext() if mesh is None else mesh,
        nn.logical_axis_rules(() if mesh is None else extend_logical_axis_rules(())),
        warnings.catch_warnings(),
    ):
        # TE's own layers use the names of axes that it deprecates.
        warnings.filterwarnings("ignore", "TransformerEngine logical axes", DeprecationWarning)
        yield


def _resources(mesh: Mesh) -> dict[str, str]:
    names = {"dp_resource": "data", "fsdp_resource": "fsdp", "tpsp_resource": "tensor", "cp_resource": "context"}
    return {resource: axis for resource, axis in names.items() if mesh.shape[axis] > 1}


@dataclass(frozen=True)
class RawSizes:
    """Sizes of a layer, and whether it is sequence-parallel."""

    hidden: int
    heads: int
    ffn: int
    sequence_parallel: bool = False


def raw_module(
    kind: str, sizes: RawSizes, x: Array, key: Array, mesh: Mesh | None = None
) -> tuple[Callable[[Any, Array], Array], Any]:
    """Return ``(apply(variables, x) -> y, variables)`` of one of te.jax's own modules.

    It has biases and no dropout. Call it, and all that traces or compiles ``apply``, inside `raw_context`.

    Args:
        kind: ``"transformer_layer"`` (causal, GELU), ``"layernorm_mlp"`` (GELU) or ``"layernorm_linear"`` (from
            ``hidden`` to ``ffn`` features).
        sizes: sizes of the layer.
        x: an input to initialize with.
        key: random key of the initial weights.
        mesh: mesh over which the variables are sharded, or None.

    Raises:
        ValueError: for a mesh and another kind than the layer, whose axes te.jax names by itself.
    """
    if kind == "transformer_layer":
        module = raw_layer(sizes)
    elif mesh is not None:
        raise ValueError(f"{kind!r} of te.jax is measured on one device; on a mesh measure 'transformer_layer'")
    else:
        module = _mlp(sizes.ffn) if kind == "layernorm_mlp" else _linear(sizes.ffn)
    init = functools.partial(module.init, {"params": key})
    if mesh is None:
        boxed = jax.jit(init)(x)
    else:
        specs = nn.get_partition_spec(jax.eval_shape(init, x))
        # Created where Flax's axes put them: no device holds a whole parameter.
        boxed = jax.jit(init, out_shardings=spmd.logical_to_mesh_sharding(specs, mesh, nn.get_logical_axis_rules()))(x)
    is_box = lambda leaf: isinstance(leaf, nn.Partitioned)  # noqa: E731
    variables = jax.tree.map(lambda leaf: leaf.value if is_box(leaf) else leaf, boxed, is_leaf=is_box)

    def apply(variables: Any, x: Array) -> Array:
        y = module.apply(variables, x)
        return y[0] if isinstance(y, tuple) else y  # LayerNorm modules also return the norm's output

    return apply, variables


def raw_layer(sizes: RawSizes) -> TransformerLayer:
    """Return te.jax's transformer layer on ``[b, s, h]``: causal, GELU, biases, bf16, no dropout."""
    return TransformerLayer(
        hidden_size=sizes.hidden,
        mlp_hidden_size=sizes.ffn,
        num_attention_heads=sizes.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mlp_activations=("gelu",),
        use_bias=True,
        self_attn_mask_type="causal",
        enable_relative_embedding=False,
        dtype=jnp.bfloat16,
        transpose_batch_sequence=False,
        enable_sequence_parallel=sizes.sequence_parallel,
    )


def _mlp(ffn: int) -> LayerNormMLP:
    return LayerNormMLP(intermediate_dim=ffn, activations=("gelu",), use_bias=True, dtype=jnp.bfloat16)


def _linear(ffn: int) -> LayerNormDenseGeneral:
    return LayerNormDenseGeneral(features=ffn, use_bias=True, dtype=jnp.bfloat16)
