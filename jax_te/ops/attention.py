"""Dot-product attention."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_te.config import check_rate
from jax_te.ops.attention_spec import QKV, AttentionSpec, MaskType, describe
from jax_te.ops.backend import BackendName, primitives, select
from jax_te.parallel import auto_region, constrain
from jax_te.typing import Array, LogicalAxes


def dot_product_attention(
    qkv: QKV,
    *,
    mask_type: MaskType = "causal",
    mask: Array | None = None,
    q_lengths: Array | None = None,
    kv_lengths: Array | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    out_axes: LogicalAxes | None = None,
    backend: BackendName | None = None,
) -> Array:
    """``softmax(scale q k^T) v`` for every head; scores and softmax are fp32.

    Args:
        qkv: ``(packed [b, s, 3, n, d],)`` or ``(q [b, sq, n, d], k [b, skv, g, d], v [b, skv, g, d])``; query head
            ``i`` uses key/value head ``i // (n / g)``. Packed is faster where it is there already: cuDNN reads it
            without a copy.
        mask_type: ``"no_mask"``; ``"causal"`` (position ``i`` sees ``0..i``); ``"padding"`` and ``"padding_causal"``
            with ``q_lengths`` and ``kv_lengths``; ``"arbitrary"`` with ``mask``. Queries past their length give
            zeros.
        mask: bool, broadcastable to ``[b, n, sq, skv]`` with four axes; True hides.
        q_lengths, kv_lengths: int32 ``[b]`` valid positions; ``q_lengths`` None: ``kv_lengths``.
        scale: None: ``1 / sqrt(d)``.
        dropout_rate: of the probabilities; needs ``dropout_key``. Without a key there is no dropout.
        out_axes: logical axes of the result ``[b, sq, n, d]``; required on a mesh with Explicit axes.
        backend: None for the ambient one.

    Returns:
        ``[b, sq, n, d]`` in the dtype of the input.

    Raises:
        ValueError: for shapes, a mask or lengths that do not go with the mask type.
        TypeError: for a mask that is not bool, or lengths that are no integers.
        BackendUnavailableError: if the backend asked for has no kernel for this call; the message says why.

    Source: ``transformer_engine.jax.attention.fused_attn``; Vaswani et al. 2017; Ainslie et al. 2023 (groups).

    >>> import jax.numpy as jnp
    >>> q = jnp.ones((1, 4, 2, 8))
    >>> dot_product_attention((q, q, q)).shape
    (1, 4, 2, 8)
    """
    check_rate(dropout_rate=dropout_rate)
    spec = describe(qkv, mask_type, scale, dropout_rate if dropout_key is not None else 0.0)
    _check_mask(spec, mask)
    _check_lengths(spec, q_lengths, kv_lengths)
    if spec.is_padding and q_lengths is None:
        q_lengths = kv_lengths
    name = select("dot_product_attention", attention=spec, backend=backend)
    fn = functools.partial(_attention, name, spec, out_axes)
    return auto_region(fn, out_axes)(qkv, mask, q_lengths, kv_lengths, dropout_key)


def _check_mask(spec: AttentionSpec, mask: Array | None) -> None:
    if (mask is not None) != (spec.mask_type == "arbitrary"):
        raise ValueError(f"mask_type {spec.mask_type!r} {'needs a' if mask is None else 'takes no'} mask")
    if mask is None:
        return
    if mask.dtype != bool:
        raise TypeError(f"mask must be bool (True hides), got {mask.dtype}; compare it first, for example mask == 0")
    full = (spec.batch, spec.heads, spec.q_length, spec.kv_length)
    if mask.ndim != 4 or any(size not in (1, whole) for size, whole in zip(mask.shape, full, strict=True)):
        raise ValueError(f"mask must have four axes, each 1 or as in [b, n, sq, skv] = {full}, got {mask.shape}")


def _check_lengths(spec: AttentionSpec, q_lengths: Array | None, kv_lengths: Array | None) -> None:
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


def _attention(
    backend: str,
    spec: AttentionSpec,
    out_axes: LogicalAxes | None,
    qkv: QKV,
    mask: Array | None,
    q_lengths: Array | None,
    kv_lengths: Array | None,
    dropout_key: Array | None,
) -> Array:
    with jax.named_scope("dot_product_attention"):
        out = primitives(backend).attention(
            qkv, spec, mask=mask, q_lengths=q_lengths, kv_lengths=kv_lengths, dropout_key=dropout_key
        )
    return checkpoint_name(constrain(out, out_axes), "context")
