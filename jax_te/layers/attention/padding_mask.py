"""Padding masks in Transformer Engine's format, which mark padding tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jax_te._validation import log_once
from jax_te.ops import MaskType, Window, is_known
from jax_te.ops.attention import normal_window
from jax_te.typing import Array


def padding_pair(mask: Any, sq: int, *, of_self: bool) -> tuple[Array, Array]:
    """Return the padding masks ``[b, 1, 1, s]`` of queries and keys.

    Args:
        mask: the pair itself, or one mask: of both in self-attention, of the keys alone in cross-attention and where
            the keys are those of a KV cache.
        sq: number of queries.
        of_self: whether it is self-attention.

    Raises:
        TypeError: for another dtype.
        ValueError: for another shape.

    >>> padding = jnp.zeros((1, 1, 1, 4), bool)
    >>> [one.shape for one in padding_pair(padding, 2, of_self=False)]
    [(1, 1, 1, 2), (1, 1, 1, 4)]
    """
    if not isinstance(mask, tuple):
        # In self-attention a single mask applies to queries and keys, unless the keys come from a KV cache.
        shared = of_self and mask.shape[-1] == sq
        mask = (mask if shared else jnp.zeros((*mask.shape[:-1], sq), bool), mask)
    for one in mask:
        if one.dtype != bool or one.ndim != 4 or one.shape[1:3] != (1, 1):
            found = f"{one.dtype} {one.shape}"
            error = ValueError if one.dtype == bool else TypeError
            raise error(f"a padding mask must be bool [b, 1, 1, s], True where there is padding; got {found}")
    return mask


def arbitrary_mask(pair: tuple[Array, Array], mask_type: MaskType, window: Window | None) -> tuple[Array, Window]:
    """Return a mask and window for type ``"arbitrary"`` that are equivalent to the padding type ``mask_type``.

    Raises:
        ValueError: for the bottom-right type.

    >>> padding = jnp.array([[[[False, True]]]])
    >>> mask, window = arbitrary_mask((padding, padding), "padding_causal", None)
    >>> mask[0, 0].tolist(), window
    ([[False, True], [True, True]], (-1, 0))
    """
    if mask_type == "padding_causal_bottom_right":
        raise ValueError(
            "the diagonal of 'padding_causal_bottom_right' ends where sequences end, and a mask may have its "
            "padding anywhere; give lengths (TEDotProductAttention: padding_at_end=True), or a mask of type 'arbitrary'"
        )
    q_hidden, kv_hidden = pair
    # The core's padding types accept only lengths. Causality is expressed as a window that ends at the query.
    return q_hidden.swapaxes(2, 3) | kv_hidden, normal_window(window, mask_type)


def log_unread_mask(mask_type: MaskType, *, packed: bool = False) -> None:
    """Log once that a call's mask has no effect, as in Transformer Engine and so in Megatron-Core.

    Args:
        mask_type: mask type of the call.
        packed: whether boundaries of packed sequences are in the place of a mask.

    >>> log_unread_mask("causal")
    """
    where = "beside boundaries of packed sequences" if packed else f"under mask type {mask_type!r}"
    log_once(f"attention masks have no effect {where}, as in Transformer Engine")


def check_padding_at_end(mask: Array) -> None:
    """Raise ValueError for a padding mask ``[b, 1, 1, s]`` that hides a token in front of others, if it is known.

    >>> check_padding_at_end(jnp.array([[[[False, True]]]]))
    """
    if is_known(mask) and not (np.asarray(mask)[..., :-1] <= np.asarray(mask)[..., 1:]).all():
        raise ValueError(
            "padding_at_end=True promises padding masks that hide nothing but the end of each sequence, and this one "
            "hides a token in front of others; build the layer with padding_at_end=False"
        )


class MaskArguments(NamedTuple):
    """Arguments of a call of `MultiheadAttention` that say what is masked out."""

    attention_mask: Array | None
    attn_mask_type: MaskType | None
    window_size: Window | None = None


def read_mask(
    mask: Any, mask_type: MaskType, window: Window | None, sq: int, *, of_self: bool, ignored: bool
) -> MaskArguments:
    """Return the arguments of `MultiheadAttention` for a mask under any mask type.

    ``"arbitrary"`` uses it as it is, the padding types read the padding tokens from it, and the others have no use for
    it.

    Args:
        mask, sq, of_self: see `padding_pair`.
        mask_type, window: mask type and window of the layer or the call.
        ignored: whether a mask without a use is ignored, as in Transformer Engine, which is logged once. False: it is
            an error.

    Raises:
        TypeError, ValueError: see `padding_pair` and `arbitrary_mask`; ValueError for a mask without a use.

    >>> mask = jnp.zeros((1, 1, 4, 4), bool)
    >>> read_mask(mask, "causal", None, 4, of_self=True, ignored=True).attention_mask is None
    True
    """
    if mask_type.startswith("padding"):
        mask, window = arbitrary_mask(padding_pair(mask, sq, of_self=of_self), mask_type, window)
        mask_type = "arbitrary"
    elif mask_type != "arbitrary" and not ignored:
        raise ValueError(
            f"mask type {mask_type!r} takes no mask, which would have no effect; leave it out, or give the layer or "
            "the call the mask type 'arbitrary', or 'padding' or 'padding_causal' for a mask of padding"
        )
    elif mask_type != "arbitrary":
        log_unread_mask(mask_type)
        mask = None
    return MaskArguments(mask, mask_type, window)
