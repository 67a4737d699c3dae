"""Whether the arrays of an attention call go with what the call says it is."""

from __future__ import annotations

import jax.numpy as jnp

from jax_te.ops.attention.spec import AttentionArrays, AttentionSpec
from jax_te.typing import Array


def check_arrays(spec: AttentionSpec, arrays: AttentionArrays) -> None:
    """Raise ValueError or TypeError for an array that the call lacks or does not use, or of another shape or dtype."""
    _check_mask(spec, arrays.mask)
    _check_lengths(spec, arrays)
    _check_bias(spec, arrays.bias)
    _check_softmax_offset(spec, arrays.softmax_offset)


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    return len(shape) == len(full) and all(size in (1, whole) for size, whole in zip(shape, full, strict=True))


def _full(spec: AttentionSpec) -> tuple[int, ...]:
    return (spec.batch, spec.heads, spec.q_length, spec.kv_length)


def _check_mask(spec: AttentionSpec, mask: Array | None) -> None:
    if (mask is not None) != (spec.mask_type == "arbitrary"):
        raise ValueError(f"mask_type {spec.mask_type!r} {'needs a' if mask is None else 'takes no'} mask")
    if mask is None:
        return
    if mask.dtype != bool:
        raise TypeError(f"mask must be bool (True hides), got {mask.dtype}; compare it first, for example mask == 0")
    if not _broadcasts(mask.shape, _full(spec)):
        raise ValueError(f"mask must have four axes, each 1 or as in [b, n, sq, skv] = {_full(spec)}, got {mask.shape}")


def _check_lengths(spec: AttentionSpec, arrays: AttentionArrays) -> None:
    q_lengths, kv_lengths, segments = arrays.q_lengths, arrays.kv_lengths, arrays.segments
    if segments is not None:
        if q_lengths is not None or kv_lengths is not None:
            raise ValueError("packed sequences bring their own lengths; leave q_lengths and kv_lengths out")
        for name, array in zip(segments._fields, segments, strict=True):
            if array.shape != (spec.batch, spec.max_segments):
                raise ValueError(
                    f"segments.{name} must be [b, m] with b = {spec.batch} as in q and one m for all, got {array.shape}"
                )
            if not jnp.issubdtype(array.dtype, jnp.integer):
                raise TypeError(f"segments.{name} must be integers, got {array.dtype}")
        return
    if (kv_lengths is not None) != spec.is_padding or (q_lengths is not None and not spec.is_padding):
        raise ValueError(
            f"mask_type {spec.mask_type!r} {'needs kv_lengths' if spec.is_padding else 'takes no lengths'}"
        )
    for name, lengths in (("q_lengths", q_lengths), ("kv_lengths", kv_lengths)):
        if lengths is None:
            continue
        if lengths.shape != (spec.batch,):
            raise ValueError(f"{name} must have one entry for each example, ({spec.batch},), got {lengths.shape}")
        if not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise TypeError(f"{name} must be integers, got {lengths.dtype}")


def _check_bias(spec: AttentionSpec, bias: Array | None) -> None:
    if (bias is not None) != (spec.bias_type != "no_bias"):
        missing = "ALiBi needs slopes" if spec.bias_type == "alibi" else f"bias_type {spec.bias_type!r} needs a bias"
        raise ValueError(missing if bias is None else "bias_type 'no_bias' takes no bias")
    if bias is None:
        return
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(f"a bias must be floating point, got {bias.dtype}")
    if spec.bias_type == "alibi":
        if bias.shape not in ((spec.heads,), (spec.batch, spec.heads)):
            raise ValueError(f"ALiBi slopes must be [n] = ({spec.heads},) or [b, n], got {bias.shape}")
    elif not _broadcasts(bias.shape, _full(spec)):
        raise ValueError(f"bias must have four axes, each 1 or as in [b, n, sq, skv] = {_full(spec)}, got {bias.shape}")


def _check_softmax_offset(spec: AttentionSpec, offset: Array | None) -> None:
    if (offset is not None) != (spec.softmax_type == "learnable"):
        raise ValueError(
            f"softmax_type {spec.softmax_type!r} {'needs' if offset is None else 'takes no'} softmax_offset"
        )
    if offset is not None and offset.shape != (spec.heads,):
        raise ValueError(f"softmax_offset must have one entry for each head, ({spec.heads},), got {offset.shape}")
