"""Attention, and what it reads from a mask."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeGuard, Unpack, cast

import jax.numpy as jnp
from flax import nnx

from jax_te import layers
from jax_te._validation import check_number, checked, is_integer, log_once
from jax_te.layers import (
    AttentionCallKeywords,
    DotProductAttentionCallKeywords,
    DotProductAttentionKeywords,
    KVCache,
    MultiheadAttentionKeywords,
    Rotary,
    WindowKVCache,
)
from jax_te.layers.attention import MaskArguments, log_unread_mask, read_mask
from jax_te.ops import BiasType, MaskType, Window
from jax_te.te_pytorch.refused import refuses_by_name
from jax_te.typing import Array


def require_batch_first(**formats: str | None) -> None:
    """Refuse a format of activations in which the batch is not the first axis."""
    for name, given in formats.items():
        if given != "bshd":
            raise ValueError(
                f"{name} must be 'bshd', got {given!r}{', the default of Transformer Engine' * (given == 'sbhd')}: "
                f"activations here are [b, s, h]. Transpose them, x.swapaxes(0, 1), and give {name}='bshd'; packed "
                "sequences of format 'thd' are packed_seq_params"
            )


def refuse_in_a_call(**given: Any) -> None:
    """Refuse options of a call that a mask type determines here."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} is not supported in a call; leave it None, and give a mask type, causal or "
                "causal_bottom_right"
            )


def make_head_norms_own(attention: layers.MultiheadAttention, epsilon: float) -> None:
    """Give the norms of queries and keys Transformer Engine's options: an epsilon of their own, and factors from 1 on.

    In `jax_te.layers` they have those of the norm in front.
    """
    for norm in (attention.q_norm, attention.k_norm):
        if norm is not None:
            norm.norm = dataclasses.replace(norm.norm, epsilon=epsilon, zero_centered_gamma=False)
            norm.scale.set_value(jnp.ones_like(norm.scale.get_value()))


def window_of_source(window: Window | None, kind: MaskType) -> Window | None:
    """Return a window as Transformer Engine reads it; anything but a window and a mask type is left to be refused.

    Under types that are not causal (-1, 0) is no window; under causal ones (left, right) ends at the query.
    """
    if not isinstance(kind, str) or not _is_window(window):
        return window
    left, right = window
    if (left, right) == (-1, 0) and not is_causal(kind):
        log_once(f"window_size (-1, 0) is no window under mask type {kind!r}, as in Transformer Engine")
        return (-1, -1)
    if is_causal(kind) and left >= 0 and right != 0:
        log_once(f"window_size {window} is {(left, 0)} under mask type {kind!r}, as in Transformer Engine")
        return (left, 0)
    return window


def _is_window(window: Any) -> TypeGuard[Window]:
    return isinstance(window, tuple) and len(window) == 2 and all(is_integer(side) and side >= -1 for side in window)


def read_windows(options: dict[str, Any], **kinds: MaskType) -> None:
    """Change the windows among a constructor's options to those that Transformer Engine makes of them.

    Args:
        options: options of a layer, as given.
        kinds: mask type of each window, by the option's name.
    """
    for name, kind in kinds.items():
        if options.get(name) is not None:
            options[name] = window_of_source(options[name], kind)


def check_diagonal(kind: MaskType, window: Window | None, bias_type: BiasType, lengths: tuple[int, int]) -> None:
    """Raise ValueError for what Transformer Engine aligns to the last query and key, and jax_te to the first ones.

    Args:
        kind: mask type.
        window: window, or None.
        bias_type: type of the bias.
        lengths: lengths of queries and keys.
    """
    placed = bias_type == "alibi" or (_is_window(window) and max(window) >= 0)
    if placed and not is_causal(kind) and lengths[0] != lengths[1]:
        what = "alibi" if bias_type == "alibi" else f"window_size={window}"
        raise ValueError(
            f"{what} of {lengths[0]} queries and {lengths[1]} keys under mask type {kind!r}: Transformer Engine aligns "
            "it to the last query and key, which is not supported; take 'causal_bottom_right', whose diagonal is "
            "there, or jax_te.layers, where it is aligned to the first ones"
        )


def is_causal(kind: MaskType) -> bool:
    """Return whether a mask type says where the diagonal is."""
    return "causal" in kind


@refuses_by_name
@checked
class DotProductAttention(layers.DotProductAttention):
    """`jax_te.layers.DotProductAttention`, called with the names and the order of Transformer Engine's arguments.

    Args:
        num_attention_heads, kv_channels, num_gqa_groups, attention_dropout: see `jax_te.layers.DotProductAttention`.
        qkv_format: option that must be ``"bshd"``: arrays are ``[b, s, n, d]``. Transformer Engine's default is
            refused.
        **options: keywords of `jax_te.layers.DotProductAttention`.

    Raises:
        ValueError: for another ``qkv_format``; see also `jax_te.layers.DotProductAttention`.

    Source: ``transformer_engine.pytorch.DotProductAttention``.

    >>> core, q = DotProductAttention(4, 8, qkv_format="bshd"), jnp.ones((2, 6, 4, 8))
    >>> core(query_layer=q, key_layer=q, value_layer=q).shape
    (2, 6, 4, 8)
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        **options: Unpack[DotProductAttentionKeywords],
    ):
        require_batch_first(qkv_format=qkv_format)
        read_windows(cast(dict[str, Any], options), window_size=options.get("attn_mask_type", "causal"))
        super().__init__(
            num_attention_heads,
            kv_channels,
            num_gqa_groups=num_gqa_groups,
            attention_dropout=attention_dropout,
            **options,
        )

    def __call__(  # type: ignore[override]  # Transformer Engine's arguments
        self,
        query_layer: Array,
        key_layer: Array | None = None,
        value_layer: Array | None = None,
        attention_mask: Array | tuple[Array, Array] | None = None,
        qkv_format: str | None = None,
        **options: Unpack[DotProductAttentionCallKeywords],
    ) -> Any:
        """Apply attention.

        Args:
            query_layer, key_layer, value_layer: ``query``, ``key`` and ``value`` of
                `jax_te.layers.DotProductAttention`.
            attention_mask: bool, True is masked out: broadcastable to ``[b, n, sq, skv]`` under the mask type
                ``"arbitrary"``; padding ``[b, 1, 1, s]``, or a pair of it for queries and keys, under the padding
                types. Other types, and packed sequences, ignore it, as in Transformer Engine, which is logged once.
            qkv_format: None or ``"bshd"``.
            **options: keywords of `jax_te.layers.DotProductAttention`.

        Returns:
            The results of `jax_te.layers.DotProductAttention`: ``y [b, s, n, dv]``, whose last two axes Transformer
            Engine merges.
        """
        require_batch_first(qkv_format="bshd" if qkv_format is None else qkv_format)
        packed = options.get("packed_seq_params") is not None
        mask_type, window = options.pop("attn_mask_type", None), options.pop("window_size", None)
        window = _checked_window(
            self, mask_type, window, options.get("core_attention_bias_type", "no_bias"), query_layer, key_layer
        )
        masks = _read_mask(
            attention_mask,
            self,
            query_layer,
            mask_type,
            window,
            of_self=True,
            packed=packed,
        )
        return super().__call__(query_layer, key_layer, value_layer, **masks._asdict(), **options)


def _checked_window(
    core: Any,
    mask_type: MaskType | None,
    window: Window | None,
    bias_type: BiasType,
    queries: Array,
    keys: Array | None,
) -> Window | None:
    """Return the window of a call as Transformer Engine reads it, after `check_diagonal`; ``core`` has the layer's."""
    kind: MaskType = core.attn_mask_type if mask_type is None else mask_type
    window = window_of_source(core.window_size if window is None else window, kind)
    if keys is not None and keys.ndim == queries.ndim:
        check_diagonal(kind, window, bias_type, (queries.shape[1], keys.shape[1]))
    return window


def _read_mask(
    mask: Any,
    core: Any,
    queries: Array,
    mask_type: MaskType | None,
    window: Window | None,
    *,
    of_self: bool,
    packed: bool,
) -> MaskArguments:
    """Return the arguments of a layer of `jax_te.layers` that say what Transformer Engine reads from a mask.

    Args:
        mask: mask of the call, or None.
        core: core of attention, which has the layer's mask type and window.
        queries: input ``[b, s, ...]`` of the call.
        mask_type, window: mask type and window of the call, in place of the layer's.
        of_self: whether it is self-attention.
        packed: whether the call has boundaries of packed sequences.
    """
    kind: MaskType = core.attn_mask_type if mask_type is None else mask_type
    if mask is not None and packed and kind != "arbitrary":
        log_unread_mask(kind, packed=True)
        mask = None
    if mask is None:
        return MaskArguments(None, mask_type, window)
    if isinstance(mask, tuple) and kind == "arbitrary":
        raise ValueError(
            "a pair of masks says which queries and keys are padding, and mask type 'arbitrary' reads one mask of "
            "scores; give one array [b, n, sq, skv], or a padding type"
        )
    in_force = core.window_size if window is None else window
    return read_mask(mask, kind, in_force, queries.shape[1], of_self=of_self, ignored=True)


@refuses_by_name
@checked
class MultiheadAttention(layers.MultiheadAttention):
    """`jax_te.layers.MultiheadAttention`, called with the names and the order of Transformer Engine's arguments.

    Args:
        hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon: see
            `jax_te.layers.MultiheadAttention`.
        qkv_format: option that must be ``"bshd"``: activations are ``[b, s, h]``. Transformer Engine's default is
            refused.
        input_layernorm: whether there is a norm in front; False by default, as in Transformer Engine.
        qk_norm_eps: epsilon of the norms of queries and keys, whose factors are never stored as offsets from 1.
        rngs: random streams, of which ``params`` draws the kernels.
        **options: keywords of `jax_te.layers.MultiheadAttention`, with Transformer Engine's names.

    Raises:
        ValueError: for another ``qkv_format``; see also `jax_te.layers.MultiheadAttention`.

    Source: ``transformer_engine.pytorch.MultiheadAttention``.

    >>> layer = MultiheadAttention(32, 4, qkv_format="bshd", attention_dropout=0.0, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 8, 32)), None, None, "causal").shape
    (2, 8, 32)
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        *,
        qkv_format: str = "sbhd",
        input_layernorm: bool = False,
        qk_norm_eps: float = 1e-6,
        rngs: nnx.Rngs,
        **options: Unpack[MultiheadAttentionKeywords],
    ):
        require_batch_first(qkv_format=qkv_format)
        check_number(qk_norm_eps=qk_norm_eps)
        read_windows(cast(dict[str, Any], options), window_size=options.get("attn_mask_type", "causal"))
        super().__init__(
            hidden_size,
            num_attention_heads,
            kv_channels=kv_channels,
            attention_dropout=attention_dropout,
            layernorm_epsilon=layernorm_epsilon,
            input_layernorm=input_layernorm,
            **options,
            rngs=rngs,
        )
        make_head_norms_own(self, qk_norm_eps)

    def __call__(  # type: ignore[override]  # Transformer Engine's arguments
        self,
        hidden_states: Array,
        attention_mask: Any = None,
        encoder_output: Array | None = None,
        attn_mask_type: MaskType | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: KVCache | WindowKVCache | None = None,
        rotary_pos_emb: Rotary | None = None,
        core_attention_bias_type: BiasType = "no_bias",
        core_attention_bias: Array | None = None,
        alibi_slopes: Array | None = None,
        **options: Unpack[AttentionCallKeywords],
    ) -> Any:
        """Apply the layer.

        Args:
            hidden_states: ``[b, s, h]``, the ``x`` of `jax_te.layers.MultiheadAttention`.
            bottom_right_diagonal: option that must be None: the mask type says it.
            inference_params: keys and values of the tokens before, a `jax_te.layers.KVCache` or `WindowKVCache`; a call
                with it returns it, too, with the new tokens appended.
            attention_mask: see `DotProductAttention`.
            encoder_output, attn_mask_type, window_size, is_first_microbatch, checkpoint_core_attention,
                rotary_pos_emb, core_attention_bias_type, core_attention_bias, alibi_slopes: see
                `jax_te.layers.MultiheadAttention`.
            **options: other keywords of `jax_te.layers.MultiheadAttention`, such as ``dropout_key``.

        Returns:
            The results of `jax_te.layers.MultiheadAttention`.
        """
        refuse_in_a_call(bottom_right_diagonal=bottom_right_diagonal)
        core = self.core_attention
        window_size = _checked_window(
            core, attn_mask_type, window_size, core_attention_bias_type, hidden_states, encoder_output
        )
        masks = _read_mask(
            attention_mask,
            core,
            hidden_states,
            attn_mask_type,
            window_size,
            of_self=self.attention_type == "self",
            packed=options.get("packed_seq_params") is not None,
        )
        return super().__call__(
            hidden_states,
            masks.attention_mask,
            encoder_output,
            attn_mask_type=masks.attn_mask_type,
            window_size=masks.window_size,
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
            cache=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            **options,
        )
