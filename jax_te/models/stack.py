"""Running a stack of layers: unrolled or scanned, keeping or recomputing what backward needs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.layers import TransformerLayer
from jax_te.quantize import QuantizerState
from jax_te.quantize.state import plain_inside
from jax_te.typing import Array

REMAT = ("none", "full", "selective")
"""What backward recomputes: nothing, each layer from its input, or each layer's attention core."""


def layer_keys(key: Array | None, count: int) -> list[Array | None]:
    """A key for each of ``count`` layers, or None for each where there is none."""
    return [None if key is None else jax.random.fold_in(key, i) for i in range(count)]


def run_layers(
    layers: Sequence[TransformerLayer],
    x: Array,
    keys: Sequence[Array | None],
    *,
    remat: str = "none",
    scan: bool = False,
    mask_types: dict[str, str] | None = None,
    **arrays: Any,
) -> Array:
    """``x`` through one layer after the other.

    Args:
        layers: of one stack.
        x: ``[b, s, h]``.
        keys: dropout key of each layer, or None for each.
        remat: one of `REMAT`.
        scan: run consecutive layers of the same structure in a loop, ``jax.lax.scan``, whose body is compiled once.
            The parameters stay those of the single layers: they are stacked on the way in, which takes memory for a
            copy of them. A layer that differs from its neighbours, because it has a recipe or a name of its own, runs
            by itself.
        mask_types: arguments that are strings: ``self_attn_mask_type``, ``enc_dec_attn_mask_type``,
            ``core_attention_bias_type``.
        **arrays: the other arguments of `TransformerLayer`, the same for all layers.

    Returns:
        ``[b, s, h]``.
    """
    call = functools.partial(_call, mask_types or {}, remat == "selective")
    if remat == "full":
        call = jax.checkpoint(call)
    if not scan:
        for i, (layer, key) in enumerate(zip(layers, keys, strict=True)):
            with jax.named_scope(f"layer_{i}"):
                x = call(layer, x, key, arrays)
        return x
    numbered = [(nnx.split(layer), key) for layer, key in zip(layers, keys, strict=True)]
    for graphdef, group in itertools.groupby(numbered, key=lambda item: item[0][0]):
        parts = [(_stackable(state), key) for (_, state), key in group]
        with jax.named_scope("layers"):
            x = _scan(call, graphdef, parts, x, arrays)
    return x


def _call(
    mask_types: dict[str, str],
    checkpoint_core: bool,
    layer: TransformerLayer,
    x: Array,
    key: Any,
    arrays: dict[str, Any],
) -> Array:
    return layer(x, dropout_key=key, checkpoint_core_attention=checkpoint_core, **mask_types, **arrays)


def _stackable(state: nnx.State) -> nnx.State:
    """With quantizer states as plain fp32: JAX stacks no arrays whose gradients merge by maximum. Here each is used
    once, so that nothing is to be merged.
    """

    def plain(variable: Any) -> Any:
        is_state = isinstance(variable, QuantizerState)
        return variable.replace(plain_inside(variable.get_value())) if is_state else variable

    return jax.tree.map(plain, state, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _scan(call: Any, graphdef: Any, parts: list[tuple[nnx.State, Any]], x: Array, arrays: dict[str, Any]) -> Array:
    if len(parts) == 1:
        state, key = parts[0]
        return call(nnx.merge(graphdef, state), x, key, arrays)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)

    def body(x: Array, part: tuple[nnx.State, Any]) -> tuple[Array, None]:
        state, key = part
        return call(nnx.merge(graphdef, state), x, key, arrays), None

    return jax.lax.scan(body, x, stacked)[0]
