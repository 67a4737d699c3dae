"""Transformer layer: attention and feed-forward blocks with residual connections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import check_positive, check_rate, checked, log_hints
from jax_te.config import ActivationLike, CpCommType, LatentAttentionOptions, MoEOptions
from jax_te.layers.attention.context_parallel import ContextParallelModule
from jax_te.layers.attention.kv_cache import KVCache, WindowKVCache
from jax_te.layers.attention.packed import PackedSeqParams
from jax_te.layers.attention.padding_mask import MaskArguments, read_mask
from jax_te.layers.attention.rotary import Rotary
from jax_te.layers.dropout import drop_path, dropout
from jax_te.layers.keywords import AttentionOptions, CrossAttentionOptions, LayerNormMLPKeywords, SelfAttentionOptions
from jax_te.layers.layernorm_mlp import LayerNormMLP
from jax_te.layers.moe.router import check_padding_mask
from jax_te.layers.norm import LayerNorm, Normalization, NormOptions, RMSNorm
from jax_te.layers.parallel_arguments import sequence_axes, set_tensor_parallel_group
from jax_te.layers.results import add_bias, layer_output
from jax_te.layers.transformer_blocks import (
    check_arrangement,
    make_cross_attention,
    make_experts,
    make_self_attention,
)
from jax_te.ops import BiasType, MaskType, SoftmaxType, Window
from jax_te.random import Purpose, key_for
from jax_te.sharding import constrain
from jax_te.typing import Array, DTypeLike, Initializer, Key, LogicalAxes, TensorGroup

_AXES: LogicalAxes = ("batch", "sequence", "hidden")


@checked
class TransformerLayer(ContextParallelModule):
    """Self-attention, cross-attention in a decoder, and feed-forward block, each with a residual connection.

    Each block computes ``x = x + drop_path(dropout(block(norm(x))))``, with ``block_output_layernorm`` a norm of the
    block's output in front of the dropout. With ``parallel_attention_mlp`` both blocks read the layer's input.

    A block of your own in place of ``self_attention``, ``inter_attention`` or ``layernorm_mlp`` returns its output
    ``[b, s, h]``, or a NamedTuple of it and, by name, ``bias [h]``, which is added in front of norm and dropout, and
    ``layernorm_output [b, s, h]``, where the residual connection then begins; self-attention also ``max_logit`` and
    ``cache``. A pair without names is ``(output, bias)``.

    Args:
        hidden_size: ``h``.
        ffn_hidden_size: ``f``.
        num_attention_heads: query heads ``n``.
        layernorm_epsilon: constant added to the variance or mean square in every norm.
        hidden_dropout: dropout probability of the blocks' outputs.
        attention_dropout: dropout probability of the softmax's result.
        init_method: initializer of the projections into attention and of the first MLP kernel. None: N(0, 0.023²).
        output_layer_init_method: initializer of the output projections. None: N(0, 0.023²).
        apply_residual_connection_post_layernorm: whether residual connections begin at the norms' outputs.
        layer_number: the layer's number in the stack, from 1; stored as an attribute.
        apply_query_key_layer_scaling: option without effect. TE divides scores by ``layer_number`` in half precision
            and multiplies them again in fp32; here scores are always fp32.
        output_layernorm: whether to normalize the layer's output instead of the self-attention block's input.
        block_output_layernorm: whether to normalize the blocks' outputs, too, each by a norm of its own (Gemma 2 and
            3).
        block_input_layernorm: whether to normalize the blocks' inputs. False: with ``block_output_layernorm`` this is
            OLMo 2's form; a feed-forward block's operations then run one by one. Not with experts.
        parallel_attention_mlp: whether the feed-forward block reads the layer's input, as self-attention does, in place
            of the sum behind self-attention (GPT-NeoX). Each block drops values by itself, where TE drops those of
            their sum. Not for a decoder.
        attention_softmax_in_fp32: option without effect; the softmax is always fp32.
        layer_type: ``"encoder"``: self-attention, causal or not by its mask type; ``"decoder"``: self-attention, then
            cross-attention to an encoder's output.
        kv_channels: head size ``d``. None: ``h / n``.
        self_attn_mask_type, window_size, softmax_scale, softmax_type, logit_softcap, num_splits, cp_comm_type,
            hierarchical_context_parallel_sizes, cp_load_balanced: see `DotProductAttention`.
        enc_dec_attn_mask_type, enc_dec_window_size: mask type and window of cross-attention.
        qk_norm_type, qk_norm_before_rope, qk_norm_across_heads, fuse_qkv_params: see `MultiheadAttention`.
        qkv_bias: see `MultiheadAttention`; applies to self-attention.
        set_parallel_mode: whether to split the projections over the mesh's tensor axis; False replicates them.
        sequence_parallel: whether to split activations between the blocks over the mesh's tensor axis along the
            sequence.
        tp_group, tp_size, fuse_wgrad_accumulation: options of all projections, see `Linear`.
        drop_path_rate: probability with which an example skips a block.
        num_gqa_groups: key/value heads ``g``. None: ``n``.
        latent: sizes of a `MultiLatentAttention` in place of the `MultiheadAttention` for self-attention; not for a
            decoder. None: there is none.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        zero_centered_gamma: whether to store the norms' scales as offsets from 1.
        activation: a key of `jax_te.config.ACTIVATIONS`, or a function, see `LayerNormMLP`.
        bias: biases in all linear layers.
        experts: mixture of experts in place of the feed-forward block, behind a norm of its own. None: the block.
        return_max_logit: whether calls also return the max logit of each head of self-attention, for `clip_qk`.
        seq_length, micro_batch_size: options without effect; TE warms its kernels up with these sizes.
        params_dtype: dtype of the parameters.
        rngs: random streams, of which ``params`` draws the kernels.

    Raises:
        ValueError: for sizes that are not positive or do not divide, rates outside [0, 1), unknown names and options
            that do not go with ``parallel_attention_mlp`` or without ``block_input_layernorm``; when called, for an
            input that is not ``[b, s, h]``, an encoder's output given to an encoder layer, packed sequences given to a
            decoder, or a block of your own that returns what the layer cannot use.
        TypeError: when called, for an encoder's output of another dtype than the input's.
        QuantizerStateError: when called under a recipe with state, if the layer was built without it.

    Source: ``transformer_engine.pytorch.TransformerLayer``; Vaswani et al. 2017.

    >>> layer = TransformerLayer(32, 64, 4, normalization="RMSNorm", activation="swiglu", bias=False, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 8, 32)), dropout_key=jax.random.key(1)).shape
    (2, 8, 32)
    """

    input_layernorm: Any = None
    """The norm in front of a self-attention that has none inside: that of Megatron's layers with latent attention."""

    reads_layer_number: ClassVar[bool] = False
    """Whether results depend on ``layer_number``, in which stages of a pipeline, that run one program, must agree then.
    It is said of this class alone: other classes whose modules have a ``layer_number``, derived ones too, count as
    reading it unless they say the same."""

    # Whether masks that a mask type has no use for are ignored, as in Transformer Engine, or refused.
    _ignores_masks: ClassVar[bool] = False

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        *,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Initializer | None = None,
        output_layer_init_method: Initializer | None = None,
        apply_residual_connection_post_layernorm: bool = False,
        layer_number: int | None = None,
        apply_query_key_layer_scaling: bool = True,
        output_layernorm: bool = False,
        block_output_layernorm: bool = False,
        block_input_layernorm: bool = True,
        parallel_attention_mlp: bool = False,
        attention_softmax_in_fp32: bool = False,
        layer_type: Literal["encoder", "decoder"] = "encoder",
        kv_channels: int | None = None,
        self_attn_mask_type: MaskType = "causal",
        window_size: Window | None = None,
        enc_dec_attn_mask_type: MaskType = "no_mask",
        enc_dec_window_size: Window | None = None,
        softmax_scale: float | None = None,
        softmax_type: SoftmaxType = "vanilla",
        logit_softcap: float | None = None,
        num_splits: int | None = None,
        cp_comm_type: CpCommType = "p2p",
        hierarchical_context_parallel_sizes: tuple[int, int] | None = None,
        cp_load_balanced: bool = False,
        qk_norm_type: Normalization | None = None,
        qk_norm_before_rope: bool = False,
        qk_norm_across_heads: bool = False,
        qkv_bias: bool = False,
        fuse_qkv_params: bool = True,
        set_parallel_mode: bool = True,
        sequence_parallel: bool = False,
        tp_group: TensorGroup = None,
        tp_size: int = 1,
        fuse_wgrad_accumulation: bool = False,
        drop_path_rate: float = 0.0,
        num_gqa_groups: int | None = None,
        latent: LatentAttentionOptions | None = None,
        normalization: Normalization = "LayerNorm",
        zero_centered_gamma: bool = False,
        activation: ActivationLike = "gelu",
        bias: bool = True,
        experts: MoEOptions | None = None,
        return_max_logit: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        params_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        log_hints(
            # True, TE's default, is the one that changes nothing; scores and softmax are fp32 in any case.
            apply_query_key_layer_scaling=not apply_query_key_layer_scaling,
            attention_softmax_in_fp32=attention_softmax_in_fp32,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
        )
        optional = {"layer_number": layer_number, "seq_length": seq_length, "micro_batch_size": micro_batch_size}
        check_positive(**{name: size for name, size in optional.items() if size is not None})
        check_rate(hidden_dropout=hidden_dropout, drop_path_rate=drop_path_rate)
        check_arrangement(
            layer_type=layer_type,
            apply_residual_connection_post_layernorm=apply_residual_connection_post_layernorm,
            output_layernorm=output_layernorm,
            parallel_attention_mlp=parallel_attention_mlp,
            block_input_layernorm=block_input_layernorm,
            experts=experts,
            latent=latent,
            set_parallel_mode=set_parallel_mode,
        )
        self.hidden_size = hidden_size
        self.layer_number = layer_number
        self.hidden_dropout = hidden_dropout
        self.drop_path_rate = drop_path_rate
        self.sequence_parallel = sequence_parallel
        self.parallel_attention_mlp = parallel_attention_mlp
        self.residual_from_norm = apply_residual_connection_post_layernorm
        norm = NormOptions(normalization, layernorm_epsilon, zero_centered_gamma, sequence_parallel, params_dtype)
        attention: AttentionOptions = {
            "num_gqa_groups": num_gqa_groups,
            "kv_channels": kv_channels,
            "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "softmax_scale": softmax_scale,
            "softmax_type": softmax_type,
            "logit_softcap": logit_softcap,
            "num_splits": num_splits,
            "cp_comm_type": cp_comm_type,
            "hierarchical_context_parallel_sizes": hierarchical_context_parallel_sizes,
            "cp_load_balanced": cp_load_balanced,
            "qk_norm_type": qk_norm_type,
            "qk_norm_before_rope": qk_norm_before_rope,
            "qk_norm_across_heads": qk_norm_across_heads,
            "fuse_qkv_params": fuse_qkv_params,
            "set_parallel_mode": set_parallel_mode,
            "sequence_parallel": sequence_parallel,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "bias": bias,
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "params_dtype": params_dtype,
        }
        self_attention: SelfAttentionOptions = {
            **attention,
            # Without a norm in front the residual connection starts at the input, as in Transformer Engine.
            "input_layernorm": block_input_layernorm and not output_layernorm,
            "return_layernorm_output": self.residual_from_norm and not output_layernorm,
            "attn_mask_type": self_attn_mask_type,
            "window_size": window_size,
            "return_max_logit": return_max_logit,
            "qkv_bias": qkv_bias,
        }
        cross_attention: CrossAttentionOptions = {
            **attention,
            # `output_layernorm` moves the norm of self-attention only.
            "input_layernorm": block_input_layernorm,
            "return_layernorm_output": self.residual_from_norm,
            "attn_mask_type": enc_dec_attn_mask_type,
            "window_size": enc_dec_window_size,
        }
        feed_forward: LayerNormMLPKeywords = {
            "activation": activation,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "input_layernorm": block_input_layernorm,
            "return_layernorm_output": self.residual_from_norm,
            "set_parallel_mode": set_parallel_mode,
            "sequence_parallel": sequence_parallel,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "bias": bias,
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "params_dtype": params_dtype,
        }
        # In this order: each draws keys from ``rngs``.
        self.self_attention = make_self_attention(hidden_size, num_attention_heads, latent, **self_attention, rngs=rngs)
        self.inter_attention = (
            make_cross_attention(hidden_size, num_attention_heads, **cross_attention, rngs=rngs)
            if layer_type == "decoder"
            else None
        )
        self._make_feed_forward(ffn_hidden_size, experts, norm, feed_forward, rngs)
        self._make_output_norms(norm, of_blocks=block_output_layernorm, of_layer=output_layernorm, rngs=rngs)

    def _make_feed_forward(
        self, f: int, experts: MoEOptions | None, norm: NormOptions, options: LayerNormMLPKeywords, rngs: nnx.Rngs
    ) -> None:
        """Create either the block, which has its norm inside, or a norm and experts, under Megatron's names."""
        h = self.hidden_size
        # Routers draw, and drop tokens, by position.
        balanced = self.self_attention.core_attention.context_parallel.cp_load_balanced
        if experts is not None and balanced:
            experts = replace(experts, router=replace(experts.router, cp_load_balanced=True))
        if experts is None:
            self.layernorm_mlp = LayerNormMLP(h, f, norm.epsilon, **options, rngs=rngs)
            self.pre_mlp_layernorm = None
            self.mlp: Any = None
        else:
            self.layernorm_mlp = None
            self.pre_mlp_layernorm = norm.make(h, rngs)
            self.mlp = make_experts(h, f, experts, self.layer_number, options, rngs)

    def _make_output_norms(self, norm: NormOptions, *, of_blocks: bool, of_layer: bool, rngs: nnx.Rngs) -> None:
        """Create the norms of the blocks' outputs and of the layer's, or None for those that there are not."""
        h, decodes = self.hidden_size, self.inter_attention is not None
        self.self_attention_norm = norm.make(h, rngs) if of_blocks else None
        self.inter_attention_norm = norm.make(h, rngs) if of_blocks and decodes else None
        self.mlp_norm = norm.make(h, rngs) if of_blocks else None
        self.layernorm = norm.make(h, rngs) if of_layer else None

    def __call__(
        self,
        x: Array,
        attention_mask: Array | tuple[Array, Array] | None = None,
        encoder_output: Array | None = None,
        enc_dec_attn_mask: Array | tuple[Array, Array] | None = None,
        *,
        sequence_lengths: Array | None = None,
        encoder_lengths: Array | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        rotary_pos_emb: Rotary | None = None,
        core_attention_bias_type: BiasType = "no_bias",
        core_attention_bias: Array | None = None,
        alibi_slopes: Array | None = None,
        self_attn_mask_type: MaskType | None = None,
        enc_dec_attn_mask_type: MaskType | None = None,
        window_size: Window | None = None,
        enc_dec_window_size: Window | None = None,
        dropout_key: Key | None = None,
        cache: KVCache | WindowKVCache | None = None,
        checkpoint_core_attention: bool = False,
        is_first_microbatch: bool | None = None,
        return_max_logit: bool | None = None,
        padding_mask: Array | None = None,
    ) -> Any:
        """Apply the layer.

        Args:
            x: ``[b, s, h]``; its dtype is the dtype of computation and of the output.
            attention_mask: bool, True is masked out: under mask type ``"arbitrary"`` broadcastable to ``[b, n, s, s]``,
                under ``"padding"`` and ``"padding_causal"`` ``[b, 1, 1, s]``, in place of lengths and with the padding
                anywhere. The other types take none.
            encoder_output: ``[b, skv, h]`` in the dtype of ``x``, for a decoder.
            enc_dec_attn_mask: the same of cross-attention: ``[b, n, s, skv]``; under ``"padding"`` that of the
                encoder's output, or a pair ``(queries' mask, encoder's mask)``.
            sequence_lengths: int32 ``[b]``, number of valid tokens at the start of each sequence of ``x``; for the
                padding types.
            encoder_lengths: the same for ``encoder_output``.
            packed_seq_params: boundaries of several sequences in each row of ``x``; for the padding types, and not for
                a decoder: they do not say where the encoder's sequences are.
            rotary_pos_emb: rotary embedding of the positions of ``x``, see `rotary_embedding`.
            core_attention_bias_type, core_attention_bias, alibi_slopes: options of self-attention, see
                `DotProductAttention`.
            self_attn_mask_type, enc_dec_attn_mask_type: mask types in place of the layer's own.
            window_size, enc_dec_window_size: windows of self-attention and cross-attention in place of the layer's own.
            dropout_key: ``jax.random.key`` that dropout and stochastic depth draw from, another one at each step;
                needed in training unless the rates are 0. Evaluation (``layer.eval()``) drops nothing.
            cache: keys and values of the tokens before ``x``, for self-attention (TE's ``inference_params``).
            checkpoint_core_attention: whether to recompute the attention cores in backward instead of saving their
                residuals.
            is_first_microbatch: mode of the kernel cache for all projections, see `Linear`.
            return_max_logit: choice in place of the layer's own.
            padding_mask: bool ``[b, s]``, True for padding, which the losses and counts of the layer's experts leave
                out, see `Router`. It hides nothing from attention, and has no effect in a layer without experts.

        Returns:
            ``y [b, s, h]``, split like activations over batch; or a NamedTuple of ``y`` and those of the following that
            apply: ``max_logit`` fp32 ``[n]``; ``cache``, with ``x`` appended.
        """
        of_encoder = {
            "encoder_output": encoder_output,
            "encoder_lengths": encoder_lengths,
            "enc_dec_attn_mask": enc_dec_attn_mask,
            "enc_dec_attn_mask_type": enc_dec_attn_mask_type,
            "enc_dec_window_size": enc_dec_window_size,
        }
        self._check_call(x, padding_mask, packed_seq_params, of_encoder)
        masks = self._masks(self.self_attention, x, attention_mask, self_attn_mask_type, window_size)
        cross_masks = self._masks(
            self.inter_attention, x, enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size
        )
        key = self.used_dropout_key(dropout_key, **self._rates())
        axes = (*sequence_axes(x), "hidden") if self.sequence_parallel else _AXES
        with jax.named_scope("TransformerLayer"):
            # Without the constraint the compiler may choose another sharding for the residual stream of each layer.
            entered = constrain(x, axes)
            result = self.self_attention(
                entered if self.input_layernorm is None else self.input_layernorm(entered),
                attention_mask=masks.attention_mask,
                sequence_lengths=sequence_lengths,
                packed_seq_params=packed_seq_params,
                rotary_pos_emb=rotary_pos_emb,
                core_attention_bias_type=core_attention_bias_type,
                core_attention_bias=core_attention_bias,
                alibi_slopes=alibi_slopes,
                attn_mask_type=masks.attn_mask_type,
                window_size=masks.window_size,
                dropout_key=_key_of("self_attention", key),
                cache=cache,
                checkpoint_core_attention=checkpoint_core_attention,
                is_first_microbatch=is_first_microbatch,
                return_max_logit=return_max_logit,
            )
            attended, extra = add_bias(result, "self_attention", known=("layernorm_output", "max_logit", "cache"))
            start = extra.pop("layernorm_output", entered)
            x = self._add(start, attended, _key_of("self_attention_output", key), axes, self.self_attention_norm)
            if self.inter_attention is not None:
                result = self.inter_attention(
                    x,
                    attention_mask=cross_masks.attention_mask,
                    encoder_output=encoder_output,
                    # Query lengths apply only together with key lengths.
                    sequence_lengths=sequence_lengths if encoder_lengths is not None else None,
                    encoder_lengths=encoder_lengths,
                    attn_mask_type=cross_masks.attn_mask_type,
                    window_size=cross_masks.window_size,
                    dropout_key=_key_of("cross_attention", key),
                    checkpoint_core_attention=checkpoint_core_attention,
                    is_first_microbatch=is_first_microbatch,
                )
                attended, of_cross = add_bias(result, "inter_attention", known=("layernorm_output",))
                start = of_cross.get("layernorm_output", x)
                x = self._add(start, attended, _key_of("cross_attention_output", key), axes, self.inter_attention_norm)
            read = entered if self.parallel_attention_mlp else x
            computed, normed = self._feed_forward(read, dropout_key, is_first_microbatch, padding_mask)
            start = x if normed is None else normed
            x = self._add(start, computed, _key_of("feed_forward_output", key), axes, self.mlp_norm)
            if self.layernorm is not None:
                x = self.layernorm(x)
        return layer_output(x, **{name: extra[name] for name in ("max_logit", "cache") if name in extra})

    def _check_call(
        self, x: Array, padding_mask: Array | None, packed: PackedSeqParams | None, of_encoder: dict[str, Any]
    ) -> None:
        """Raise ValueError for an input of another shape and for arguments that the layer does not take."""
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"TransformerLayer takes [b, s, {self.hidden_size}], got shape {x.shape}")
        check_padding_mask(padding_mask, x.shape[:2])
        given = [name for name, value in of_encoder.items() if value is not None]
        if self.inter_attention is None and given:
            raise ValueError(f"an encoder layer takes no {' and no '.join(given)}; build it with layer_type='decoder'")
        if self.inter_attention is not None and packed is not None:
            raise ValueError(
                "a decoder layer takes no packed_seq_params, which have the boundaries of x and not those of the "
                "encoder's output: each sequence would attend to all of the row's encoder sequences; give rows of one "
                "sequence each, or call MultiheadAttention(attention_type='cross') with boundaries of both"
            )

    def _masks(
        self, attention: Any, x: Array, mask: Any, mask_type: MaskType | None, window: Window | None
    ) -> MaskArguments:
        """Return the arguments of an attention block that correspond to a call's mask, mask type and window."""
        if mask is None:
            # Lengths, packed sequences and causal masks need no array.
            return MaskArguments(None, mask_type, window)
        core, of_self = attention.core_attention, attention.attention_type == "self"
        kind: MaskType = core.attn_mask_type if mask_type is None else mask_type
        in_force = core.window_size if window is None else window
        return read_mask(mask, kind, in_force, x.shape[1], of_self=of_self, ignored=self._ignores_masks)

    def _feed_forward(
        self, x: Array, dropout_key: Key | None, first: bool | None, padding_mask: Array | None
    ) -> tuple[Array, Array | None]:
        """Return the output of the feed-forward block or experts; and the norm's, if the residual begins there."""
        if self.pre_mlp_layernorm is None:
            assert self.layernorm_mlp is not None
            result = self.layernorm_mlp(x, is_first_microbatch=first)
            y, extra = add_bias(result, "layernorm_mlp", known=("layernorm_output",))
            return y, extra.get("layernorm_output")
        normed = self.pre_mlp_layernorm(x)
        # Not of the key that dropout uses, which only layers that drop something have.
        key = None if dropout_key is None else key_for("feed_forward", dropout_key)
        result = self.mlp(normed, padding_mask=padding_mask, key=key, is_first_microbatch=first)
        y, _ = add_bias(result, "mlp", known=("routing",))  # a routing is for callers of the experts themselves
        return y, normed if self.residual_from_norm else None

    def _add(
        self, start: Array, y: Array, key: Array | None, axes: LogicalAxes, norm: LayerNorm | RMSNorm | None
    ) -> Array:
        """Return the sum of ``start``, where a residual connection begins, and a block's output after its norm and
        dropout."""
        if norm is not None:
            y = norm(y)
        if key is not None:
            # Dropout draws by position, so it must know the order in which context devices hold the sequence.
            zigzag = self.self_attention.core_attention.context_parallel.cp_load_balanced
            y = dropout(y, self.hidden_dropout, key, axes=axes, zigzag=zigzag)
            y = drop_path(y, self.drop_path_rate, key, axes=axes)
        # The constraint also holds for the gradient, which would otherwise take its layout from the next block.
        return constrain(start + y, axes)

    def _rates(self) -> dict[str, float]:
        attention = self.self_attention.core_attention.attention_dropout
        hidden = {"hidden_dropout": self.hidden_dropout, "drop_path_rate": self.drop_path_rate}
        return {**hidden, "attention_dropout": attention}

    def set_tensor_parallel_group(self, tp_group: TensorGroup) -> None:
        """Set the tensor-parallel group of all projections, see `Linear.set_tensor_parallel_group`."""
        set_tensor_parallel_group(self, tp_group)


def _key_of(purpose: Purpose, key: Array | None) -> Array | None:
    return None if key is None else key_for(purpose, key)
