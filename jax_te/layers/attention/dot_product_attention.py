"""The core of attention: softmax of query-key products, times values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import check_positive, check_rate, checked, log_hints
from jax_te.config import CpCommType
from jax_te.layers.attention.context_parallel import ContextParallelModule
from jax_te.layers.attention.packed import PackedSeqParams
from jax_te.layers.attention.qkv import HEAD_AXES
from jax_te.layers.parameters import constant
from jax_te.layers.quantizable import RecipeModule
from jax_te.layers.results import layer_output
from jax_te.ops import BiasType, ContextParallel, MaskType, SoftmaxType, Window, dot_product_attention
from jax_te.ops.attention import QKV, AttentionArrays, normal_window
from jax_te.quantize import AttentionState, init_attention_state, quantizer_variables
from jax_te.recipe import Recipe
from jax_te.remat import ambient_modules
from jax_te.typing import Array, Key


def check_heads(num_attention_heads: int, num_gqa_groups: int | None) -> int:
    """Return the number of key/value heads ``g``, by default the number of query heads.

    Raises:
        ValueError: for numbers that are not positive, or groups that do not divide the query heads.
    """
    groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
    check_positive(num_attention_heads=num_attention_heads, num_gqa_groups=groups)
    if num_attention_heads % groups:
        raise ValueError(f"num_attention_heads {num_attention_heads} is not divisible by num_gqa_groups {groups}")
    return groups


@checked
def alibi_slopes(num_attention_heads: int) -> Array:
    """Return ALiBi's slopes, fp32 ``[n]``: ``2**(-8 i / n)`` for ``i = 1 … n``.

    If ``n`` is not a power of two, the slopes are those of the next smaller power ``p``, followed by every second one
    of the slopes of ``2 p`` heads.

    Args:
        num_attention_heads: ``n``.

    Raises:
        ValueError: if ``n`` is not positive.

    Source: Press et al. 2021, "Train short, test long".

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    check_positive(num_attention_heads=num_attention_heads)
    num_attention_heads = int(num_attention_heads)
    power = 2 ** (num_attention_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (num_attention_heads - power) + 1, 2)]
    return jnp.array(slopes, jnp.float32)


@checked
class DotProductAttention(ContextParallelModule, RecipeModule):
    """``softmax(scale · q kᵀ + bias + mask) v`` per head.

    Under an ambient recipe with ``fp8_dpa`` its operands are quantized. The layer then has the state of the recipe, if
    it is built inside of ``autocast(recipe)`` or given one by `prepare_quantization`.

    Args:
        num_attention_heads: query heads ``n``.
        kv_channels: head size ``d``, or ``(d, dv)`` if values have another size than queries and keys.
        num_gqa_groups: key/value heads ``g``, a divisor of ``n``; query head ``i`` reads group ``i // (n / g)``.
            None: ``n``.
        attention_dropout: dropout probability of the softmax's result, in [0, 1).
        attn_mask_type: ``"causal"``, ``"no_mask"``, ``"padding"``, ``"padding_causal"``, ``"causal_bottom_right"``,
            ``"padding_causal_bottom_right"`` or ``"arbitrary"``. The bottom-right types align the last query with the
            last key. The padding types take lengths or `PackedSeqParams` at the call, ``"arbitrary"`` takes a mask.
        window_size: number of positions to the ``(left, right)`` that a query sees besides its own; -1: all. None: no
            window.
        softmax_scale: None: ``1 / sqrt(d)``.
        softmax_type: ``"vanilla"``; ``"off-by-one"``: add 1 to the denominator; ``"learnable"``: add
            ``exp(softmax_offset)`` to it, where ``softmax_offset [n]`` is an fp32 parameter with initial value 0.
        logit_softcap: ``cap tanh(scores / cap)`` in place of the scaled scores. None: no cap.
        return_max_logit: whether calls also return the max logit of each head, for `clip_qk`.
        num_splits: option of one CUDA kernel; it is stored as an attribute and has no effect on results.
        cp_comm_type: exchange of keys and values between devices along the mesh's context axis: ``"p2p"``,
            ``"all_gather"``, ``"a2a"`` or ``"a2a+p2p"``, see `jax_te.ops.ContextParallel`. It has no effect if that
            axis has one device.
        hierarchical_context_parallel_sizes: sizes for ``"a2a+p2p"``: number of devices that exchange heads, and number
            of such groups in the ring.
        cp_load_balanced: whether sequences come in zig-zag order, see `jax_te.ops.zigzag_positions`.
        rngs: random streams, accepted as in every layer; they are not used.

    Raises:
        ValueError: for sizes that do not divide and unknown types; when called, for a mask, bias or lengths that the
            mask type requires or does not use, or a wrong number or size of heads.
        TypeError: when called, for queries, keys and values of several dtypes.
        QuantizerStateError: when called, for a recipe with ``fp8_dpa`` whose state the layer does not have.

    Source: ``transformer_engine.pytorch.DotProductAttention``; Vaswani et al. 2017.

    >>> q = jnp.ones((2, 8, 4, 16))
    >>> DotProductAttention(4, 16)(q, q, q).shape
    (2, 8, 4, 16)
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        *,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        attn_mask_type: MaskType = "causal",
        window_size: Window | None = None,
        softmax_scale: float | None = None,
        softmax_type: SoftmaxType = "vanilla",
        logit_softcap: float | None = None,
        return_max_logit: bool = False,
        num_splits: int | None = None,
        cp_comm_type: CpCommType = "p2p",
        hierarchical_context_parallel_sizes: tuple[int, int] | None = None,
        cp_load_balanced: bool = False,
        rngs: nnx.Rngs | None = None,
    ):
        del rngs
        # Checked here rather than at the first call, so that the traceback shows where the layer was built.
        self.num_gqa_groups = check_heads(num_attention_heads, num_gqa_groups)
        d, dv = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        check_positive(kv_channels=d, v_channels=dv)
        check_rate(attention_dropout=attention_dropout)
        if logit_softcap is not None and not logit_softcap > 0.0:
            raise ValueError(f"logit_softcap must be > 0, or None for no cap; got {logit_softcap!r}")
        normal_window(window_size, attn_mask_type)
        self.num_attention_heads = num_attention_heads
        self.kv_channels = d
        self.v_channels = dv
        self.attention_dropout = attention_dropout
        self.attn_mask_type: MaskType = attn_mask_type
        self.window_size = window_size
        self.softmax_scale = softmax_scale
        self.softmax_type: SoftmaxType = softmax_type
        self.logit_softcap = logit_softcap
        self.return_max_logit = return_max_logit
        if num_splits is not None:
            check_positive(num_splits=num_splits)
        log_hints(num_splits=num_splits)
        self.num_splits = num_splits
        self.context_parallel = ContextParallel(
            cp_comm_type=cp_comm_type,
            hierarchical_context_parallel_sizes=hierarchical_context_parallel_sizes,
            cp_load_balanced=cp_load_balanced,
        )
        # In fp32 whatever the compute dtype: TE's kernels require it, and it enters an exponential.
        self.softmax_offset = (
            constant(0.0, (num_attention_heads,), jnp.float32, ("heads",)) if softmax_type == "learnable" else None
        )
        self.quantizers = nnx.data(quantizer_variables(init_attention_state(self.usable_recipe)))

    @property
    def state_names(self) -> tuple[str, ...]:
        return ("quantizers",)

    def __call__(
        self,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        *,
        attention_mask: Array | None = None,
        q_lengths: Array | None = None,
        kv_lengths: Array | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        core_attention_bias_type: BiasType = "no_bias",
        core_attention_bias: Array | None = None,
        alibi_slopes: Array | None = None,
        dropout_key: Key | None = None,
        attn_mask_type: MaskType | None = None,
        window_size: Window | None = None,
        checkpoint_core_attention: bool = False,
        return_max_logit: bool | None = None,
    ) -> Array | tuple[Array, Array]:
        """Apply attention.

        Args:
            query: ``[b, sq, n, d]``; or ``[b, s, 3, n, d]``, which packs queries, keys and values, without ``key`` and
                ``value``. With ``packed_seq_params`` of one row also ``[t, n, d]``; keys, values and the result then
                have three axes, too.
            key: ``[b, skv, g, d]`` in the dtype of ``query``.
            value: ``[b, skv, g, dv]`` in the dtype of ``query``.
            attention_mask: bool, broadcastable to ``[b, n, sq, skv]``, True is masked out; for ``"arbitrary"``.
            q_lengths, kv_lengths: int32 ``[b]``, number of valid tokens at the start of each sequence; for the padding
                types. ``q_lengths`` None: ``kv_lengths``.
            packed_seq_params: boundaries of several sequences in each row, for the padding types.
            core_attention_bias_type: ``"no_bias"``, ``"pre_scale_bias"``, ``"post_scale_bias"`` or ``"alibi"``.
            core_attention_bias: bias broadcastable to ``[b, n, sq, skv]``.
            alibi_slopes: ``[n]`` or ``[b, n]``. None: those of `alibi_slopes`.
            dropout_key: ``jax.random.key`` that dropout draws from, another one at each step; needed in training
                unless the rates are 0. Evaluation (``model.eval()``) drops nothing, with or without one.
            attn_mask_type, window_size, return_max_logit: options in place of the layer's own.
            checkpoint_core_attention: whether to recompute attention in backward instead of saving its residuals.

        Returns:
            ``y [b, sq, n, dv]`` in the dtype of ``query``; with ``return_max_logit`` the NamedTuple ``(y, max_logit)``,
            the latter fp32 ``[n]``.
        """
        # Megatron's thd format has no batch axis; the op has one format, rows of packed sequences.
        one_row = packed_seq_params is not None and query.ndim == 3
        if one_row:
            query, key, value = query[None], _with_batch_axis(key), _with_batch_axis(value)
        bias = self._bias(core_attention_bias_type, core_attention_bias, alibi_slopes)
        qkv = self._operands(query, key, value)
        if packed_seq_params is not None:
            packed_seq_params.check(query.shape[1], None if key is None else key.shape[1])
        dropout_key = self.used_dropout_key(dropout_key, attention_dropout=self.attention_dropout)
        # In evaluation the op drops nothing, and reads the rate to run in FP8 only what training did.
        no_dropout = self.without_dropout or (self.training and dropout_key is None)
        call = _ResolvedCall(
            mask_type=self.attn_mask_type if attn_mask_type is None else attn_mask_type,
            window=self.window_size if window_size is None else window_size,
            bias_type=core_attention_bias_type,
            softmax_type=self.softmax_type,
            logit_softcap=self.logit_softcap,
            scale=self.kv_channels**-0.5 if self.softmax_scale is None else self.softmax_scale,
            dropout_rate=0.0 if no_dropout else self.attention_dropout,
            return_max_logit=self.return_max_logit if return_max_logit is None else return_max_logit,
            context_parallel=self.context_parallel,
            recipe=self.usable_recipe,
            evaluation=not self.training,
        )
        if self.quantizers is not None:
            self._warn_without_ambient_recipe(type(self).__name__)
        offset = None if self.softmax_offset is None else self.softmax_offset.get_value()
        arrays = AttentionArrays(attention_mask, q_lengths, kv_lengths, None, bias, offset, dropout_key)
        # Only the core is recomputed: in plain JAX its probabilities [b, n, sq, skv] are a layer's largest residual.
        recompute = checkpoint_core_attention or "core_attn" in ambient_modules.value
        attend = jax.checkpoint(call.attend) if recompute else call.attend
        with jax.named_scope("DotProductAttention"):
            result = attend(qkv, arrays, packed_seq_params, nnx.as_pure(self.quantizers))
        y, max_logit = result if call.return_max_logit else (result, None)
        y = y[0] if one_row else y
        return y if max_logit is None else layer_output(y, max_logit=max_logit)

    def _bias(self, bias_type: BiasType, bias: Array | None, slopes: Array | None) -> Array | None:
        """Return a call's bias, which for ALiBi are its slopes; raise ValueError for one that its type does not use."""
        if bias_type != "alibi":
            if slopes is not None:
                raise ValueError(f"alibi_slopes are for core_attention_bias_type 'alibi', got {bias_type!r}")
            return bias
        if bias is not None:
            raise ValueError("core_attention_bias_type 'alibi' takes alibi_slopes, and no core_attention_bias")
        return alibi_slopes(self.num_attention_heads) if slopes is None else slopes

    def _operands(self, query: Array, key: Array | None, value: Array | None) -> QKV:
        """Return the operands of the op; raise ValueError if the number or size of heads differs from the layer's."""
        n, g, d, dv = self.num_attention_heads, self.num_gqa_groups, self.kv_channels, self.v_channels
        q_shape = query.shape[2:]
        # The op would accept any shapes that agree with each other.
        if key is None or value is None:
            if key is value and q_shape == (3, n, d) and (g, dv) == (n, d):
                return (query,)
        elif q_shape == (n, d) and key.shape[2:] == (g, d) and value.shape[2:] == (g, dv):
            return (query, key, value)
        shapes = [array.shape for array in (query, key, value) if array is not None]
        packed = f", or one array [b, s, 3, {n}, {d}]" if (g, dv) == (n, d) else ""
        raise ValueError(
            f"attention needs query [b, s, {n}, {d}], key [b, s, {g}, {d}] and value [b, s, {g}, {dv}]{packed}; "
            f"got shapes {shapes}"
        )


def _with_batch_axis(row: Array | None) -> Array | None:
    return None if row is None else row[None]


@dataclass(frozen=True, kw_only=True)
class _ResolvedCall:
    """A call of the op without its arrays: options of the layer, or those of a call in their place."""

    mask_type: MaskType
    window: Window | None
    bias_type: BiasType
    softmax_type: SoftmaxType
    logit_softcap: float | None
    scale: float
    dropout_rate: float
    return_max_logit: bool
    context_parallel: ContextParallel
    recipe: Recipe | None
    evaluation: bool

    def attend(
        self, qkv: QKV, arrays: AttentionArrays, packed: PackedSeqParams | None, state: AttentionState | None
    ) -> Any:
        """Return the op's result. All arrays are arguments, because a recomputed function saves its arguments."""
        return dot_product_attention(
            qkv,
            mask_type=self.mask_type,
            mask=arrays.mask,
            q_lengths=arrays.q_lengths,
            kv_lengths=arrays.kv_lengths,
            # Made here, so that a recomputed call saves only the cumulative lengths, not the arrays derived from them.
            segments=None if packed is None else packed.segments,
            window=self.window,
            bias_type=self.bias_type,
            bias=arrays.bias,
            softmax_type=self.softmax_type,
            softmax_offset=arrays.softmax_offset,
            logit_softcap=self.logit_softcap,
            scale=self.scale,
            dropout_rate=self.dropout_rate,
            dropout_key=arrays.dropout_key,
            return_max_logit=self.return_max_logit,
            context_parallel=self.context_parallel,
            out_axes=HEAD_AXES,
            recipe=self.recipe,
            state=state,
            evaluation=self.evaluation,
        )
