"""Keys and values kept between the steps of generation."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jax_te.config import check_positive, float_dtype
from jax_te.parallel import auto_region, constrain
from jax_te.typing import Array, DTypeLike

_AXES = ("batch", "sequence", "heads", None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of one attention layer for the tokens seen so far; a pytree, never changed in place.

    Args:
        k, v: ``[b, max_len, g, d]``, split like activations over batch and heads; positions from ``length`` on are
            unused.
        length: int32 ``[]``, tokens held.

    >>> cache = init_kv_cache(1, 8, 2, 4)
    >>> int(cache.append(jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 2, 4))).length)
    3
    """

    k: Array
    v: Array
    length: Array

    @property
    def max_len(self) -> int:
        """Tokens it can hold."""
        return self.k.shape[1]

    def append(self, k: Array, v: Array) -> KVCache:
        """The cache with ``k, v [b, s, g, d]`` after what it holds.

        ``length`` is known at run time only: whoever appends makes sure that ``length + s <= max_len``. Past the end,
        the newest tokens overwrite the last places.

        Raises:
            ValueError: if ``s`` alone exceeds ``max_len``.
        """
        if k.shape[1] > self.max_len:
            raise ValueError(f"{k.shape[1]} tokens do not fit a KV cache of max_len {self.max_len}; make it longer")

        def write(old: Array, new: Array, start: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), start, axis=1)

        put = auto_region(write, _AXES)
        return KVCache(k=put(self.k, k, self.length), v=put(self.v, v, self.length), length=self.length + k.shape[1])

    def mask(self, sq: int) -> Array:
        """Which places the newest ``sq`` tokens, already appended, must not see: bool ``[1, 1, sq, max_len]``, True
        is masked out.
        """
        query = self.length - sq + jnp.arange(sq, dtype=jnp.int32)
        key = jnp.arange(self.max_len, dtype=jnp.int32)
        return (key[None, :] > query[:, None])[None, None]


def init_kv_cache(
    batch: int, max_len: int, num_gqa_groups: int, kv_channels: int, dtype: DTypeLike = jnp.float32
) -> KVCache:
    """An empty cache for ``max_len`` tokens of ``batch`` sequences, with ``g`` key/value heads of size ``d``.

    Raises:
        ValueError: for a size that is not positive or an unknown dtype.

    >>> init_kv_cache(2, 8, 4, 16, jnp.bfloat16).k.shape
    (2, 8, 4, 16)
    """
    check_positive(batch=batch, max_len=max_len, num_gqa_groups=num_gqa_groups, kv_channels=kv_channels)
    shape = (batch, max_len, num_gqa_groups, kv_channels)
    dtype = float_dtype("dtype", dtype)
    # Two arrays, not one twice: a jitted step may donate its cache.
    k, v = (constrain(jnp.zeros(shape, dtype), _AXES) for _ in range(2))
    return KVCache(k=k, v=v, length=jnp.zeros((), jnp.int32))
