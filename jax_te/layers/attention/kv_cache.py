"""Caches of keys and values for generation."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jax_te._validation import check_positive, checked, float_dtype
from jax_te.ops import MaskType, as_int32
from jax_te.sharding import auto_region, constrain
from jax_te.typing import Array, DTypeLike

_AXES = ("batch", "sequence", "heads", None)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of one attention layer for the tokens so far; a pytree that is never changed in place.

    What is appended is cast to the cache's dtype, and a layer casts what it reads to the dtype of its input: a cache
    in bf16 halves the memory of one in fp32, and rounds the keys and values of an fp32 model.

    Args:
        k, v: ``[b, max_len, g, d]``, split like activations over batch and heads; positions from ``length`` on are
            unused.
        length: int32 ``[]``, number of tokens in the cache.

    >>> cache = init_kv_cache(1, 8, 2, 4)
    >>> int(cache.append(jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 2, 4))).length)
    3
    """

    k: Array
    v: Array
    length: Array

    def __post_init__(self) -> None:
        _widen_length(self)

    @property
    def max_len(self) -> int:
        """Capacity in tokens."""
        return self.k.shape[1]

    @checked
    def append(self, k: Array, v: Array) -> KVCache:
        """Return the cache with ``k, v [b, s, g, d]`` appended.

        ``length`` is known at run time only, so a call that does not fit (``length + s > max_len``) raises nothing: its
        keys and values become nan, as does all attention over the cache from then on.

        Raises:
            ValueError: if ``s`` alone exceeds ``max_len``, or for other batches, heads or head sizes than the cache's.
        """
        _check_new(self.k, self.v, k, v)
        if k.shape[1] > self.max_len:
            raise ValueError(f"{k.shape[1]} tokens do not fit a KV cache of max_len {self.max_len}; make it longer")

        def write(old: Array, new: Array, start: Array) -> Array:
            # Past the end JAX moves the slice back over tokens that are needed; nan makes this visible.
            fits = start + new.shape[1] <= self.max_len
            new = jnp.where(fits, new.astype(old.dtype), jnp.asarray(jnp.nan, old.dtype))
            # Neighbouring positions are one slice, which XLA writes in place where the step donates its cache.
            return jax.lax.dynamic_update_slice_in_dim(old, new, start, axis=1)

        put = auto_region(write, _AXES)
        return KVCache(k=put(self.k, k, self.length), v=put(self.v, v, self.length), length=self.length + k.shape[1])

    @checked
    def masks(self, b: int, sq: int) -> tuple[MaskType, dict[str, Array]]:
        """Return the mask type and the lengths for the newest ``sq`` tokens of ``b`` sequences, already appended."""
        check_positive(b=b, sq=sq)
        # Bottom-right: the newest query is aligned with the last valid key, wherever the unused positions begin.
        ones = jnp.ones((b,), jnp.int32)
        return "padding_causal_bottom_right", {
            "q_lengths": ones * sq,
            "kv_lengths": ones * jnp.minimum(self.length, self.max_len),
        }


@functools.partial(jax.tree_util.register_dataclass, data_fields=["k", "v", "length"], meta_fields=["left"])
@dataclass(frozen=True, kw_only=True)
class WindowKVCache:
    """A `KVCache` for sliding-window attention: a ring buffer that overwrites tokens that no later token sees.

    Args:
        k, v: ``[b, c, g, d]``; the token at position ``p`` is in slot ``p % c``.
        length: int32 ``[]``, number of tokens so far, of which the cache has the last ``c``.
        left: number of positions before its own that a token sees. ``c`` must be at least ``left`` plus the number of
            tokens in one call.

    >>> cache = init_window_kv_cache(1, 4, 2, 2, 8)
    >>> cache.k.shape, int(cache.append(jnp.ones((1, 2, 2, 8)), jnp.ones((1, 2, 2, 8))).length)
    ((1, 6, 2, 8), 2)
    """

    k: Array
    v: Array
    length: Array
    left: int

    def __post_init__(self) -> None:
        _widen_length(self)

    @property
    def places(self) -> int:
        """Number of slots, ``c``."""
        return self.k.shape[1]

    @checked
    def append(self, k: Array, v: Array) -> WindowKVCache:
        """Return the cache with ``k, v [b, s, g, d]`` appended.

        Raises:
            ValueError: if the last of the ``s`` tokens would overwrite a token in the window of the first, or for other
                batches, heads or head sizes than the cache's.
        """
        _check_new(self.k, self.v, k, v)
        if k.shape[1] + self.left > self.places:
            raise ValueError(
                f"{k.shape[1]} tokens and the {self.left} before them do not fit a cache of {self.places} slots; give "
                f"at most {self.places - self.left} tokens a call, or build it for more"
            )
        slots = (self.length + jnp.arange(k.shape[1], dtype=jnp.int32)) % self.places

        def write(old: Array, new: Array, slots: Array) -> Array:
            # A scatter, because the slots of one call may wrap around the end of the ring.
            return old.at[:, slots].set(new.astype(old.dtype))

        put = auto_region(write, _AXES)
        return WindowKVCache(
            k=put(self.k, k, slots), v=put(self.v, v, slots), length=self.length + k.shape[1], left=self.left
        )

    @checked
    def masks(self, b: int, sq: int) -> tuple[MaskType, dict[str, Array]]:
        """Return the mask type and the mask for the newest ``sq`` tokens, already appended."""
        check_positive(b=b, sq=sq)
        last = self.length - 1
        # Position held by each slot: the newest one that maps to it. Slots that are still empty get negative positions.
        key = last - (last - jnp.arange(self.places, dtype=jnp.int32)) % self.places
        query = (last - sq + 1 + jnp.arange(sq, dtype=jnp.int32))[:, None]
        hidden = (key[None] < 0) | (key[None] > query) | (key[None] < query - self.left)
        return "arbitrary", {"attention_mask": hidden[None, None]}


def _widen_length(cache: KVCache | WindowKVCache) -> None:
    """Make the length of a cache int32: in 8 bits the 128th token would be put before the first."""
    # Only of arrays: jax.tree fills the field with shapes, shardings and placeholders as well.
    if isinstance(cache.length, jax.Array | np.ndarray) and jnp.issubdtype(cache.length.dtype, jnp.integer):
        object.__setattr__(cache, "length", as_int32("length", cache.length))


def _check_new(old_k: Array, old_v: Array, k: Array, v: Array) -> None:
    """Raise ValueError for keys or values that are not ``[b, s, g, d]`` with the sizes of those in a cache."""
    for name, old, new in (("k", old_k, k), ("v", old_v, v)):
        b, _, g, d = old.shape[-4:]
        if new.ndim != old.ndim or new.shape[-4::2] != (b, g) or new.shape[-1] != d or new.shape[1:2] != k.shape[1:2]:
            raise ValueError(f"{name} must be [{b}, s, {g}, {d}] for this cache, got shape {new.shape}")


@checked
def init_kv_cache(
    batch: int, max_len: int, num_gqa_groups: int, kv_channels: int | tuple[int, int], dtype: DTypeLike = jnp.float32
) -> KVCache:
    """Return an empty cache for ``max_len`` tokens of ``batch`` sequences, with ``g`` key/value heads of size ``d``.

    Args:
        batch, max_len: numbers of sequences and of tokens.
        num_gqa_groups: ``g``.
        kv_channels: ``d``, or ``(d, dv)`` if values have another size than keys.
        dtype: dtype in which keys and values are stored, see `KVCache`; it need not be that of the layer's input.

    Raises:
        ValueError: for a size that is not positive or an unknown dtype.

    >>> init_kv_cache(2, 8, 4, 16, jnp.bfloat16).k.shape
    (2, 8, 4, 16)
    """
    sizes = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
    check_positive(batch=batch, max_len=max_len, num_gqa_groups=num_gqa_groups)
    check_positive(kv_channels=sizes[0], v_channels=sizes[1])
    shape = (batch, max_len, num_gqa_groups)
    dtype = float_dtype("dtype", dtype)
    # Two separate arrays: a jitted step may donate its cache, and a buffer can be donated only once.
    k, v = (constrain(jnp.zeros((*shape, size), dtype), _AXES) for size in sizes)
    return KVCache(k=k, v=v, length=jnp.zeros((), jnp.int32))


@checked
def init_window_kv_cache(
    batch: int,
    left: int,
    tokens_per_call: int,
    num_gqa_groups: int,
    kv_channels: int,
    dtype: DTypeLike = jnp.float32,
) -> WindowKVCache:
    """Return an empty `WindowKVCache` for tokens that see ``left`` positions before their own.

    Args:
        batch, num_gqa_groups, kv_channels, dtype: see `init_kv_cache`.
        left: see `WindowKVCache`.
        tokens_per_call: largest number of tokens that are appended in one call.

    Raises:
        ValueError: for a size that is not positive or an unknown dtype.

    >>> init_window_kv_cache(2, 8, 1, 4, 16, jnp.bfloat16).k.shape
    (2, 9, 4, 16)
    """
    check_positive(left=left, tokens_per_call=tokens_per_call)
    cache = init_kv_cache(batch, left + tokens_per_call, num_gqa_groups, kv_channels, dtype)
    return WindowKVCache(k=cache.k, v=cache.v, length=cache.length, left=left)
