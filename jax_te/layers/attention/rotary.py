"""Rotary position embedding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_te._validation import check_float, checked
from jax_te.layers.attention.rotary_scaling import RotaryScaling
from jax_te.ops import as_int32
from jax_te.typing import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Cosines and sines of the angles of a sequence of positions, made by `rotary_embedding`; a pytree.

    Args:
        cos, sin: fp32 ``[..., s, r/2]``, where ``r`` features of a head are rotated.
        head_size: ``d``, size of the heads.
        interleaved: whether neighbouring features form a pair, see `rotary_embedding`.

    >>> angles = rotary_embedding(jnp.arange(3), 8)
    >>> angles.sin.shape, angles.head_size
    ((3, 4), 8)
    """

    # Any: jax.tree fills the fields with shapes, shardings and placeholders as well.
    cos: Any
    sin: Any
    head_size: int = field(metadata={"static": True})
    interleaved: bool = field(default=False, metadata={"static": True})


@checked
def rotary_embedding(
    positions: Array,
    d: int,
    base: float = 10000.0,
    *,
    rotary_percent: float = 1.0,
    interleaved: bool = False,
    scaling: RotaryScaling | None = None,
) -> Rotary:
    """Compute cosines and sines of ``position * base**(-2 i / r)`` for ``i`` in ``0 … r/2 - 1``.

    Args:
        positions: integers ``[..., s]``; any, since no table bounds them: those below 0 turn the other way.
        d: head size.
        base: base of the geometric series of wavelengths, > 0.
        rotary_percent: fraction of a head's features that is rotated: the first ``r = int(d rotary_percent)``, an even
            number. The other features stay as they are.
        interleaved: whether to rotate the pairs ``(x[2 i], x[2 i + 1])``, as GPT-J does; False: ``(x[i], x[i + r/2])``,
            as Llama.
        scaling: change of the frequencies for longer contexts: `LinearScaling`, `Llama3Scaling` or `YarnScaling`.

    Returns:
        Fp32 arrays ``[..., s, r/2]`` for `apply_rotary`.

    Raises:
        ValueError: for an odd ``r``, a percentage outside (0, 1] or a ``base`` that is not positive.
        TypeError: for positions that are not integers.

    Source: ``megatron.core.models.common.embeddings.RotaryEmbedding``; Su et al. 2021.

    >>> rotary = rotary_embedding(jnp.arange(3), 8, rotary_percent=0.5)
    >>> rotary.cos.shape, float(rotary.cos[0, 0])
    ((3, 2), 1.0)
    """
    if not 0.0 < rotary_percent <= 1.0:
        raise ValueError(f"rotary_percent must be in (0, 1], got {rotary_percent!r}")
    r = int(d * rotary_percent)
    if r < 2 or r % 2:
        part = "" if rotary_percent == 1.0 else f" (rotary_percent {rotary_percent} of {d}); change that or"
        raise ValueError(f"rotary embedding needs an even head size, got {r}{part or ';'} change kv_channels")
    if not base > 0.0:
        raise ValueError(f"rotary base must be > 0, got {base!r}")
    # Frequencies in fp64, rounded once: an error of a frequency grows with the position that it is multiplied by.
    frequency = base ** (-np.arange(0, r, 2) / r)
    frequency = frequency if scaling is None else scaling.stretch(frequency, base)
    frequency = frequency.astype(np.float32).reshape((1,) * positions.ndim + (r // 2,))
    angle = as_int32("positions", positions).astype(jnp.float32)[..., None] * frequency
    # The amplitude of a scaling is applied here, so that layers are independent of it.
    amplitude = 1.0 if scaling is None else scaling.amplitude
    cos, sin = (fn(angle) if amplitude == 1.0 else fn(angle) * amplitude for fn in (jnp.cos, jnp.sin))
    return Rotary(cos=cos, sin=sin, head_size=d, interleaved=interleaved)


@checked
def apply_rotary(x: Array, rotary: Rotary) -> Array:
    """Rotate the pairs of features of every head by their angles.

    Args:
        x: ``[b, s, n, d]``.
        rotary: rotary embedding, see `rotary_embedding`, of positions ``[s]`` or ``[b, s]``.

    Returns:
        Array like ``x``; the rotation is computed in fp32.

    Raises:
        ValueError: if the angles are for another head size, or not for as many positions.
        TypeError: for an ``x`` that is not floating point.

    >>> apply_rotary(jnp.ones((1, 2, 1, 2)), rotary_embedding(jnp.arange(2), 2))[0, 0, 0].tolist()
    [1.0, 1.0]
    """
    cos, sin = rotary.cos, rotary.sin
    check_float("apply_rotary", x)
    if x.ndim != 4 or x.shape[-1] != rotary.head_size:
        raise ValueError(f"rotary embedding of head size {rotary.head_size} for x of shape {x.shape}, [b, s, n, d]")
    # Not left to broadcasting: the angles of one position would turn all of them.
    if cos.shape[:-1] not in (x.shape[1:2], (1, x.shape[1]), x.shape[:2]):
        raise ValueError(
            f"rotary embedding of positions {list(cos.shape[:-1])} for x of shape {x.shape}, [b, s, n, d]; its "
            "positions must be [s] or [b, s]"
        )
    if cos.ndim == 2:
        cos, sin = cos[None], sin[None]
    cos, sin = cos[:, :, None], sin[:, :, None]
    half = cos.shape[-1]
    # In fp32: in bf16 the cosines of large angles at neighbouring positions would round to one value.
    turned = x[..., : 2 * half].astype(jnp.float32)
    if rotary.interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    first, second = first * cos - second * sin, second * cos + first * sin
    if rotary.interleaved:
        turned = jnp.stack([first, second], axis=-1).reshape(turned.shape)
    else:
        turned = jnp.concatenate([first, second], axis=-1)
    turned = turned.astype(x.dtype)
    return turned if 2 * half == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)
