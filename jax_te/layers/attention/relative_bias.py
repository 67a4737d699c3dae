"""Relative position bias of attention scores, as in T5."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_te._validation import check_positive, checked
from jax_te.config import normal_init
from jax_te.layers.parameters import parameter
from jax_te.ops import look_up_rows
from jax_te.sharding import auto_region
from jax_te.typing import Array, DTypeLike, Initializer


def relative_buckets(distance: np.ndarray, num_buckets: int, max_distance: int, *, bidirectional: bool) -> np.ndarray:
    """Return the bucket of each distance, the key's position minus the query's.

    Half of the buckets hold one distance each. The other half divides the distances up to ``max_distance`` evenly by
    their logarithm; larger distances share the last bucket. If ``bidirectional``, half of all buckets are for keys
    ahead of the query; else keys ahead share bucket 0 with distance 0.

    Args:
        distance: integers of any shape.
        num_buckets, max_distance, bidirectional: see `RelativePositionBias`.

    Source: Raffel et al. 2020 (T5), section 2.1.

    >>> relative_buckets(np.array([0, -1, -7, -500, 3]), 8, 16, bidirectional=True).tolist()
    [0, 1, 3, 3, 6]
    """
    ahead = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        ahead = np.where(distance > 0, num_buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = num_buckets // 2
    # In fp32, as published models compute it.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / exact) / np.float32(math.log(max_distance / exact))
    far = np.minimum(exact + (ratio * (num_buckets - exact)).astype(np.int32), num_buckets - 1)
    return ahead + np.where(distance < exact, distance, far)


@checked
class RelativePositionBias(nnx.Module):
    """Learned bias for each head and bucket of distances, which attention adds to the scaled scores.

    Args:
        num_attention_heads: ``n``.
        num_buckets: number of buckets; even, and with ``bidirectional`` divisible by four.
        max_distance: distance from which on all distances share a bucket.
        bidirectional: whether to distinguish keys ahead of the query from keys behind it, for encoders.
        init_method: initializer of the table. None: N(0, 0.023²).
        params_dtype: dtype of ``embedding [num_buckets, n]``; its heads are split over the mesh's tensor axis.
        rngs: random streams, of which ``params`` draws the table.

    Raises:
        ValueError: for sizes that are not positive or do not divide, and a ``max_distance`` within the exact buckets.

    Source: ``transformer_engine.jax.flax.RelativePositionBiases``; Raffel et al. 2020.

    >>> RelativePositionBias(4, rngs=nnx.Rngs(0))(6, 8).shape
    (1, 4, 6, 8)
    """

    def __init__(
        self,
        num_attention_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        init_method: Initializer | None = None,
        params_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_positive(num_attention_heads=num_attention_heads, num_buckets=num_buckets, max_distance=max_distance)
        # Two directions, each with exact and logarithmic buckets.
        parts = 4 if bidirectional else 2
        if num_buckets % parts:
            raise ValueError(f"num_buckets must be divisible by {parts}, got {num_buckets}")
        if max_distance <= num_buckets // parts:
            raise ValueError(
                f"max_distance {max_distance} must exceed the {num_buckets // parts} distances that have a bucket each"
            )
        init = normal_init() if init_method is None else init_method
        self.embedding = parameter(init, rngs, (num_buckets, num_attention_heads), params_dtype, (None, "heads"))
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    def __call__(self, q_length: int, kv_length: int, *, offset: int = 0) -> Array:
        """Compute the bias for ``q_length`` queries from position ``offset`` on and ``kv_length`` keys from 0 on.

        Returns:
            ``[1, n, q_length, kv_length]`` in the table's dtype, split over heads, for ``core_attention_bias`` of type
            ``"post_scale_bias"``.
        """
        check_positive(q_length=q_length, kv_length=kv_length)
        # In NumPy: lengths are static, so the buckets are a constant of the program.
        distance = np.arange(kv_length)[None] - (np.arange(q_length)[:, None] + offset)
        buckets = relative_buckets(distance, self.num_buckets, self.max_distance, bidirectional=self.bidirectional)
        axes = (None, "heads", None, None)
        look_up = auto_region(lambda table: jnp.moveaxis(look_up_rows(table, jnp.asarray(buckets)), -1, 0)[None], axes)
        with jax.named_scope("RelativePositionBias"):
            return look_up(self.embedding[...])
