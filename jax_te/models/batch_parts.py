"""Splitting of a batch into parts, which are interleaved in every layer of a stack."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_te.sharding import auto_region, batch_ranks
from jax_te.typing import Array

_RANKS = {
    "attention_mask": 4,
    "enc_dec_attn_mask": 4,
    "core_attention_bias": 4,
    "encoder_output": 3,
    "rotary_pos_emb": 3,
    "alibi_slopes": 2,
    "packed_seq_params": 2,
    "padding_mask": 2,
    "sequence_lengths": 1,
    "encoder_lengths": 1,
}
"""Arguments of `TransformerLayer`, and the minimum rank with which their arrays begin with the batch, or 1 for all."""


def split_batch(x: Array, parts: int) -> tuple[Array, ...]:
    """Return an array ``[b, ...]`` in parts ``[b / parts, ...]``, each with a share of the rows of every device.

    Raises:
        ValueError: if the rows of a device do not divide into the parts.

    >>> [part.tolist() for part in split_batch(jnp.arange(4), 2)]
    [[0, 1], [2, 3]]
    """
    if parts == 1:
        return (x,)
    ranks, (b, *rest) = batch_ranks(), x.shape
    if b % (ranks * parts):
        raise ValueError(
            f"batch_parts={parts} does not divide a batch of {b} in {ranks} shards; make the batch a multiple of "
            f"{ranks * parts}, or take batch_parts=1"
        )

    def split(x: Array) -> tuple[Array, ...]:
        rows = x.reshape(ranks, parts, b // (ranks * parts), *rest)
        return tuple(rows[:, part].reshape(b // parts, *rest) for part in range(parts))

    # An Explicit mesh cannot split a sharded axis by reshape, so its axes are Auto inside.
    return auto_region(split, (jax.typeof(x).sharding.spec,) * parts)(x)


def join_batch(parts: tuple[Array, ...]) -> Array:
    """Return the inverse of `split_batch`.

    >>> join_batch(split_batch(jnp.arange(4), 2)).tolist()
    [0, 1, 2, 3]
    """
    if len(parts) == 1:
        return parts[0]
    ranks, (b, *rest) = batch_ranks(), parts[0].shape

    def join(*parts: Array) -> Array:
        rows = [part.reshape(ranks, b // ranks, *rest) for part in parts]
        return jnp.stack(rows, axis=1).reshape(b * len(parts), *rest)

    return auto_region(join, jax.typeof(parts[0]).sharding.spec)(*parts)


def split_arguments(arrays: dict[str, Any], batch: int, parts: int) -> tuple[dict[str, Any], ...]:
    """Return the arguments of a layer for each part of a batch of ``batch`` rows; flags are those of all parts.

    Raises:
        ValueError: for arrays other than those of `TransformerLayer`, which may or may not begin with the batch.
    """
    if parts == 1:
        return (arrays,)
    unknown = sorted(name for name, value in arrays.items() if name not in _RANKS and not _is_flag(value))
    if unknown:
        known = ", ".join(sorted(_RANKS))
        raise ValueError(f"batch_parts={parts} cannot split {', '.join(unknown)}, only {known}; take batch_parts=1")

    def split(name: str, leaf: Array) -> tuple[Array, ...]:
        begins = leaf.ndim >= _RANKS[name] and leaf.shape[0] == batch
        return split_batch(leaf, parts) if begins else (leaf,) * parts

    found: list[dict[str, Any]] = [{} for _ in range(parts)]
    for name, value in arrays.items():
        if _is_flag(value):
            for own in found:
                own[name] = value
            continue
        leaves, treedef = jax.tree.flatten(value)
        columns = [split(name, leaf) for leaf in leaves]
        for part, own in enumerate(found):
            own[name] = jax.tree.unflatten(treedef, [column[part] for column in columns])
    return tuple(found)


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool | str)
