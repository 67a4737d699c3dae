"""Multi-head attention: the block around the core."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.config import check_positive
from jax_te.layers.attention import HEAD_AXES, DotProductAttention, check_heads
from jax_te.layers.kv_cache import KVCache
from jax_te.layers.layernorm_linear import LayerNormLinear
from jax_te.layers.linear import Linear
from jax_te.layers.rotary import Rotary, apply_rotary
from jax_te.parallel import auto_region
from jax_te.typing import Array, DTypeLike, Initializer, LogicalAxes


def split_qkv(qkv: Array, groups: int, kv_channels: int, rotary: Rotary | None, *, packed: bool) -> tuple[Array, ...]:
    """What the fused projection gives as operands of attention.

    Args:
        qkv: ``[b, s, r + 2, g·d]``: ``r`` query components, keys, values.
        groups, kv_channels: ``g`` and ``d``.
        rotary: rotates queries and keys.
        packed: keep ``[b, s, 3, n, d]`` (``r = 1``, no rotation): no copy.

    Returns:
        ``(packed,)`` or ``(q [b, s, n, d], k [b, s, g, d], v [b, s, g, d])``; query head ``i`` is component ``i % r``
        of group ``i // r``.
    """
    b, s, components, _ = qkv.shape
    r = components - 2
    qkv = qkv.reshape(b, s, components, groups, kv_channels)
    if packed:
        return (qkv,)
    q = jnp.swapaxes(qkv[:, :, :r], 2, 3).reshape(b, s, groups * r, kv_channels)
    k, v = qkv[:, :, r], qkv[:, :, r + 1]
    if rotary is not None:
        q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
    return q, k, v


class MultiheadAttention(nnx.Module):
    """Normalization, fused query/key/value projection, attention, output projection.

    The fused kernel is ``[h, r + 2, g·d]`` with ``r = n / g``; its last axis and the first of the output kernel
    ``[n·d, h]`` are split over the mesh's tensor axis by whole groups.

    Args:
        hidden_size: ``h``.
        num_attention_heads: query heads ``n``.
        num_gqa_groups: key/value heads ``g``. None: ``n``.
        kv_channels: head size ``d``. None: ``h / n``.
        attention_dropout: dropout probability of the softmax's result.
        layernorm_epsilon, normalization, zero_centered_gamma: of the norm in front.
        input_layernorm: have that norm.
        return_layernorm_output: also return its output.
        attn_mask_type, softmax_scale: see `DotProductAttention`.
        bias: biases in both projections.
        init_method, output_layer_init_method: initializers of the two kernels. None: N(0, 0.023²).
        params_dtype: dtype of the parameters.
        rngs: the ``params`` stream draws the kernels.

    Raises:
        ValueError: for sizes that are not positive or do not divide, and unknown names.

    Source: ``transformer_engine.pytorch.MultiheadAttention``; grouped queries: Ainslie et al. 2023.

    >>> MultiheadAttention(32, 4, num_gqa_groups=2, rngs=nnx.Rngs(0))(jnp.ones((2, 8, 32))).shape
    (2, 8, 32)
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        num_gqa_groups: int | None = None,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        input_layernorm: bool = True,
        return_layernorm_output: bool = False,
        attn_mask_type: str = "causal",
        softmax_scale: float | None = None,
        bias: bool = True,
        init_method: Initializer | None = None,
        output_layer_init_method: Initializer | None = None,
        params_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        groups = check_heads(num_attention_heads, num_gqa_groups)
        check_positive(hidden_size=hidden_size)
        if kv_channels is None and hidden_size % num_attention_heads:
            raise ValueError(
                f"hidden_size {hidden_size} is not divisible by num_attention_heads {num_attention_heads}; "
                "change one of them or give kv_channels"
            )
        d = hidden_size // num_attention_heads if kv_channels is None else kv_channels
        if return_layernorm_output and not input_layernorm:
            raise ValueError(
                "return_layernorm_output needs input_layernorm=True: there is no norm whose output could be returned"
            )
        self.core_attention = DotProductAttention(
            num_attention_heads,
            d,
            num_gqa_groups=groups,
            attention_dropout=attention_dropout,
            attn_mask_type=attn_mask_type,
            softmax_scale=softmax_scale,
        )
        fused = (num_attention_heads // groups + 2, groups * d)
        fused_axes: LogicalAxes = ("fsdp", "joined", "heads")
        if input_layernorm:
            self.qkv = LayerNormLinear(
                hidden_size,
                fused,
                layernorm_epsilon,
                bias,
                normalization=normalization,
                zero_centered_gamma=zero_centered_gamma,
                return_layernorm_output=return_layernorm_output,
                init_method=init_method,
                params_dtype=params_dtype,
                kernel_axes=fused_axes,
                rngs=rngs,
            )
        else:
            self.qkv = Linear(
                hidden_size,
                fused,
                bias,
                init_method=init_method,
                params_dtype=params_dtype,
                kernel_axes=fused_axes,
                rngs=rngs,
            )
        self.proj = Linear(
            num_attention_heads * d,
            hidden_size,
            bias,
            init_method=output_layer_init_method,
            params_dtype=params_dtype,
            kernel_axes=("heads", "fsdp"),
            rngs=rngs,
        )

    def __call__(
        self,
        x: Array,
        *,
        attention_mask: Array | None = None,
        sequence_lengths: Array | None = None,
        rotary_pos_emb: Rotary | None = None,
        dropout_key: Array | None = None,
        cache: KVCache | None = None,
        checkpoint_core_attention: bool = False,
        is_first_microbatch: bool | None = None,
    ) -> Array | tuple[Array | KVCache, ...]:
        """Self-attention over ``x``.

        Args:
            x: ``[b, s, h]``; its dtype is the dtype of computation and of the output.
            attention_mask: bool, broadcastable to ``[b, n, s, s]``, True is masked out; for mask type ``"arbitrary"``.
            sequence_lengths: int32 ``[b]``, valid tokens at the start of each sequence; for the padding types.
            rotary_pos_emb: from `rotary_embedding`, for the positions of ``x``.
            dropout_key: turns dropout on.
            cache: keys and values of the tokens before ``x``; causal attention only.
            checkpoint_core_attention: recompute the attention core in backward.
            is_first_microbatch: as in `Linear`, for both projections.

        Returns:
            ``y [b, s, h]``, or a tuple of it and what there is of, in this order: the norm's output ``[b, s, h]``,
            the cache with ``x`` appended.
        """
        core, g, d = self.core_attention, self.core_attention.num_gqa_groups, self.core_attention.kv_channels
        with jax.named_scope("MultiheadAttention"):
            projected: Any = self.qkv(x, is_first_microbatch=is_first_microbatch)
            qkv, *normed = projected if isinstance(projected, tuple) else (projected,)
            packed = g == core.num_attention_heads and rotary_pos_emb is None and cache is None
            axes = (("batch", "sequence", "joined", "heads", None),) if packed else (HEAD_AXES,) * 3
            split = auto_region(lambda qkv, rotary: split_qkv(qkv, g, d, rotary, packed=packed), axes)
            operands = split(qkv, rotary_pos_emb)
            mask_type, masks = core.attn_mask_type, {"attention_mask": attention_mask, "kv_lengths": sequence_lengths}
            if cache is not None:
                if mask_type != "causal" or attention_mask is not None or sequence_lengths is not None:
                    raise ValueError(
                        "a KV cache is for causal attention without a mask or lengths; "
                        f"this layer's mask type is {mask_type!r}"
                    )
                query, key, value = operands
                cache = cache.append(key, value)
                operands = (query, cache.k, cache.v)
                mask_type, masks = _cached_mask(cache, *x.shape[:2])
            context = core(
                *operands,
                **masks,
                attn_mask_type=mask_type,
                dropout_key=dropout_key,
                checkpoint_core_attention=checkpoint_core_attention,
            )
            merge = auto_region(lambda c: c.reshape(*c.shape[:2], -1), ("batch", "sequence", "heads"))
            y: Any = self.proj(merge(context), is_first_microbatch=is_first_microbatch)
            extra = (*normed, *(() if cache is None else (cache,)))
            return (y, *extra) if extra else y


def _cached_mask(cache: KVCache, b: int, s: int) -> tuple[str, dict[str, Array]]:
    """Mask type and masks with which the newest ``s`` tokens attend to a cache; one token sees all that is valid."""
    if s == 1:
        ones = jnp.ones((b,), jnp.int32)
        return "padding", {"q_lengths": ones, "kv_lengths": ones * cache.length}
    return "arbitrary", {"attention_mask": cache.mask(s)}
