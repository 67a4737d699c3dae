"""Megatron's attention core over `jax_te.layers.DotProductAttention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx

from jax_te._validation import check_axes, check_positive, checked, log_hints
from jax_te.config import CpCommType, TransformerConfig, is_windowed_layer
from jax_te.layers import DotProductAttention, PackedSeqParams, check_tp_group
from jax_te.layers.attention import (
    arbitrary_mask,
    check_padding_at_end,
    log_unread_mask,
    merge_heads,
    padding_pair,
)
from jax_te.megatron.enums import AttnMaskType
from jax_te.megatron.sharded_state import sharded_state_dict
from jax_te.megatron.state_dict import StateDicts
from jax_te.ops import BiasType, Window
from jax_te.typing import Array, Key, NoProcessGroups, TensorGroup, Words

# Megatron-Core's error for another type is a ValueError.
SkipFrequency = Annotated[int | Sequence[int] | None, Words("", error=ValueError)]


@checked
def is_layer_window_attention(
    window_size: tuple[int, int] | None, window_attn_skip_freq: SkipFrequency, layer_number: int
) -> bool:
    """Return whether layer ``layer_number``, from 1, attends in a window.

    Args:
        window_size: None: no layer has a window.
        window_attn_skip_freq: layers with window attention. None: all; an integer ``N``: all but every ``N``-th; a
            sequence with an entry for each layer: those whose entry is true.
        layer_number: number of the layer, from 1.

    Raises:
        ValueError: for a ``window_attn_skip_freq`` of another type, or without an entry for the layer.

    Source: ``megatron.core.transformer.utils.is_layer_window_attention``.

    >>> [is_layer_window_attention((128, 0), 3, number) for number in (1, 2, 3)]
    [True, True, False]
    """
    check_positive(layer_number=layer_number)
    return is_windowed_layer(window_size, window_attn_skip_freq, layer_number)


class _Masks(NamedTuple):
    """Mask type, window and masks of a call of `DotProductAttention`."""

    mask_type: Any
    window: Window | None
    attention_mask: Any = None  # a pair of masks, which this type does not take, is left to the layer's own check
    q_lengths: Array | None = None
    kv_lengths: Array | None = None


@checked
class TEDotProductAttention(StateDicts, DotProductAttention):
    """The core of attention, built from a configuration.

    Arrays are ``[b, s, n, d]`` here (``[s, b, n, d]`` in Megatron), or ``[t, n, d]`` with ``packed_seq_params``.

    Args:
        config: sizes, softmax type, softcap, window, dropout, and whether a call returns max logits.
        layer_number: number of the layer, from 1; whether it attends in a window may depend on it.
        attn_mask_type: an `AttnMaskType`, or its name.
        attention_type: ``"self"`` or ``"cross"``.
        attention_dropout: None: the configuration's.
        softmax_scale: None: the configuration's, or ``1 / sqrt(d)``.
        k_channels, v_channels: head sizes of keys and values, if both are given. Else ``config.kv_channels``.
        num_splits: an attribute without effect; it tunes one CUDA kernel. None: 1 if ``config.batch_invariant_mode``.
        cp_comm_type: exchange of keys and values between devices of the mesh's context axis, see
            `jax_te.ops.ContextParallel`. None: ``"p2p"``. As in Megatron, this argument is read instead of
            ``config.cp_comm_type``, which the caller may pass.
        pg_collection: None. Process groups are axes of the mesh that ``jax.set_mesh`` sets.
        cp_load_balanced: whether sequences come in zig-zag order, as Megatron's batches do under context parallelism;
            see `jax_te.ops.zigzag_positions`. None: the configuration's.
        padding_at_end: whether padding masks hide nothing but the end of each sequence, so that lengths can replace
            them. Fused attention kernels take lengths; without this promise a padding mask is an arbitrary one to them,
            and runs in plain JAX.
        return_max_logit: whether a call returns max logits, too. None: if the configuration needs them.
        rngs: random streams, unused because nothing is random.

    Raises:
        ValueError: for unknown names; when called, for masks that are missing, and with ``padding_at_end`` for a known
            mask that hides a token in front of others.
        TypeError: for a ``pg_collection``.

    Source: ``megatron.core.extensions.transformer_engine.TEDotProductAttention``.

    >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    >>> core = TEDotProductAttention(config, 1, AttnMaskType.causal, "self")
    >>> core(*(jnp.ones((2, 8, 4, 8)),) * 3, None).shape
    (2, 8, 32)
    """

    cp_stream: ClassVar[None] = None  # Megatron's stream for the exchange of keys and values; XLA schedules it here
    reads_layer_number: ClassVar[bool] = False  # beyond its creation, see `jax_te.layers.TransformerLayer`

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType | str,
        attention_type: Literal["self", "cross"],
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: CpCommType | None = "p2p",
        pg_collection: NoProcessGroups = None,
        *,
        cp_load_balanced: bool | None = None,
        padding_at_end: bool = False,
        return_max_logit: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ):
        # Megatron's rule: one size without the other is ignored.
        both = k_channels is not None and v_channels is not None
        channels: Any = (k_channels, v_channels) if both else config.kv_channels
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        needs_max_logit = config.qk_clip or config.log_max_attention_logit
        super().__init__(
            config.num_attention_heads,
            channels,
            num_gqa_groups=config.num_query_groups,
            attention_dropout=config.attention_dropout if attention_dropout is None else attention_dropout,
            attn_mask_type=_name(attn_mask_type),
            softmax_scale=config.softmax_scale if softmax_scale is None else softmax_scale,
            softmax_type=config.softmax_type,
            logit_softcap=config.logit_softcap,
            return_max_logit=needs_max_logit if return_max_logit is None else return_max_logit,
            num_splits=1 if num_splits is None and config.batch_invariant_mode else num_splits,
            cp_comm_type="p2p" if cp_comm_type is None else cp_comm_type,
            hierarchical_context_parallel_sizes=config.hierarchical_context_parallel_sizes,
            cp_load_balanced=config.cp_load_balanced if cp_load_balanced is None else cp_load_balanced,
            rngs=rngs,
        )
        # Passed in each call, because a call may replace the mask type that a window goes with.
        self.layer_window = config.window_size if windowed else None
        self.has_window = config.window_size is not None
        self.layer_number = layer_number
        self.attention_type = attention_type
        self.padding_at_end = padding_at_end

    def __call__(  # type: ignore[override]  # Megatron's arguments
        self,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        attention_mask: Array | tuple[Array, Array] | None = None,
        attn_mask_type: AttnMaskType | str | None = None,
        attention_bias: Array | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
        return_max_logit: bool | None = None,
        *,
        q_lengths: Array | None = None,
        kv_lengths: Array | None = None,
        core_attention_bias_type: BiasType = "no_bias",
        core_attention_bias: Array | None = None,
        alibi_slopes: Array | None = None,
        dropout_key: Key | None = None,
        window_size: Window | None = None,
        checkpoint_core_attention: bool = False,
    ) -> Any:
        """Apply attention.

        Args:
            query: ``[b, sq, n, d]``, or ``[t, n, d]`` with ``packed_seq_params``; or ``[b, s, 3, n, d]``, which packs
                queries, keys and values.
            key: ``[b, skv, g, d]`` or ``[t, g, d]``.
            value: ``[b, skv, g, dv]`` or ``[t, g, dv]``.
            attention_mask: bool, True is masked out. For the padding types ``[b, 1, 1, s]``, wherever the padding is;
                a pair ``(queries' mask, keys' mask)`` in cross-attention. Masked queries give zeros. With
                ``padding_at_end`` only the lengths are read, which ``padding_causal_bottom_right`` needs. For
                ``arbitrary`` broadcastable to ``[b, n, sq, skv]``. For the other types, and with ``packed_seq_params``
                for the padding types, it is ignored, as in Transformer Engine, which is logged once.
            attn_mask_type: mask type in place of the layer's own. With ``packed_seq_params``, ``causal`` counts as
                ``padding_causal`` and ``no_mask`` as ``padding``.
            attention_bias: bias added to the scaled scores, broadcastable to ``[b, n, sq, skv]``.
            packed_seq_params: boundaries of several sequences in each row.
            num_splits: option without effect, see the class.
            return_max_logit: choice in place of the layer's own.
            q_lengths, kv_lengths: lengths in place of the mask's, see `DotProductAttention`.
            core_attention_bias_type, core_attention_bias: bias as `DotProductAttention` takes it. Not with
                ``attention_bias``.
            window_size: window in place of the layer's own.
            alibi_slopes, dropout_key, checkpoint_core_attention: see `DotProductAttention`.

        Returns:
            ``[b, sq, n·dv]``, or ``[t, n·dv]``. With ``config.qk_clip`` or ``config.log_max_attention_logit``
            a tuple of this array and the max logit of each head, fp32 ``[n]``, in place of Megatron's attribute
            ``current_max_attn_logits``: merge the max logits of several calls with ``jnp.maximum``.
        """
        check_axes("query", query, 3)
        if num_splits is not None:
            log_hints(num_splits=num_splits)
        asked = self.attn_mask_type if attn_mask_type is None else _name(attn_mask_type)
        window = self.layer_window if window_size is None else window_size
        masks = self._masks(asked, window, attention_mask, packed_seq_params, query.shape[1])
        # Megatron packs into one row without a batch axis; the layer requires the axis.
        row = packed_seq_params is not None and query.ndim == 3
        if row:
            query = query[None]
            key, value = (None if array is None else array[None] for array in (key, value))
        bias_type, bias = _core_bias(attention_bias, core_attention_bias_type, core_attention_bias)
        with_logit = self.return_max_logit if return_max_logit is None else return_max_logit
        result = super().__call__(
            query,
            key,
            value,
            attention_mask=masks.attention_mask,
            q_lengths=masks.q_lengths if q_lengths is None else q_lengths,
            kv_lengths=masks.kv_lengths if kv_lengths is None else kv_lengths,
            packed_seq_params=packed_seq_params,
            core_attention_bias_type=bias_type,
            core_attention_bias=bias,
            alibi_slopes=alibi_slopes,
            dropout_key=dropout_key,
            attn_mask_type=masks.mask_type,
            window_size=masks.window,
            checkpoint_core_attention=checkpoint_core_attention,
            return_max_logit=with_logit,
        )
        # Returned, not stored: an attribute that jit writes would hold a tracer.
        context, *logits = result if isinstance(result, tuple) else (result,)
        merged = merge_heads(context)
        merged = merged[0] if row else merged
        return (merged, *logits) if logits else merged

    def _masks(
        self,
        mask_type: Any,
        window: Window | None,
        mask: Array | tuple[Array, Array] | None,
        packed: PackedSeqParams | None,
        sq: int,
    ) -> _Masks:
        """Return the masks of the core's call, from Megatron's.

        Args:
            mask_type: name of a type.
            window: window of the call.
            mask: ``attention_mask`` of the call.
            packed: boundaries of several sequences in each row, or None.
            sq: length of the queries.
        """
        if packed is not None:
            # Packed sequences have different lengths, so each is padded to the row, as in Megatron.
            mask_type = {"causal": "padding_causal", "no_mask": "padding"}.get(mask_type, mask_type)
        elif mask_type == "no_mask" and self.has_window and sq == 1:
            # One token of a decoder: its key is the last one, so the window must be aligned to the end.
            mask_type = "causal_bottom_right"
        if mask_type == "arbitrary":
            return _Masks(mask_type, window, attention_mask=mask)
        if mask_type.startswith("padding") and packed is None and mask is not None:
            return self._padding(mask_type, window, mask, sq)
        if mask is not None:
            log_unread_mask(mask_type, packed=packed is not None)
        return _Masks(mask_type, window)

    def _padding(self, mask_type: Any, window: Window | None, mask: Array | tuple[Array, Array], sq: int) -> _Masks:
        """Return the masks of the core's call, for padding masks ``[b, 1, 1, s]``."""
        mask = padding_pair(mask, sq, of_self=self.attention_type == "self")
        q_hidden, kv_hidden = mask
        if self.padding_at_end:
            for one in mask:
                check_padding_at_end(one)
            q_lengths, kv_lengths = (jnp.sum(~one[:, 0, 0], axis=-1, dtype=jnp.int32) for one in mask)
            # None: the op then knows that both have the same lengths.
            q_lengths = None if q_hidden is kv_hidden else q_lengths
            return _Masks(mask_type, window, q_lengths=q_lengths, kv_lengths=kv_lengths)
        # The window that comes out has the causality of the type, too: no other may take its place.
        hidden, window = arbitrary_mask(mask, mask_type, window)
        return _Masks("arbitrary", window, attention_mask=hidden)

    def set_tensor_parallel_group(self, tp_group: TensorGroup) -> None:
        """Check the argument. There is nothing to set: heads are sharded over the tensor axis of the mesh in use.

        Args:
            tp_group: None or ``"tensor"``.

        Raises:
            TypeError: for anything else.
        """
        check_tp_group(tp_group)

    sharded_state_dict = sharded_state_dict  # of the learnable softmax offset, if there is one


def _core_bias(attention_bias: Any, bias_type: Any, bias: Any) -> tuple[Any, Any]:
    """Return type and array of the core's bias, given by Megatron's name or by the core's own."""
    if attention_bias is None:
        return bias_type, bias
    if bias_type != "no_bias" or bias is not None:
        raise ValueError(
            "attention_bias is Megatron's name of a core_attention_bias of type 'post_scale_bias', and both were given "
            f"(core_attention_bias_type={bias_type!r}); leave one out"
        )
    return "post_scale_bias", attention_bias


def _name(mask_type: AttnMaskType | str) -> Any:
    return mask_type.name if isinstance(mask_type, AttnMaskType) else mask_type
