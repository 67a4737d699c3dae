"""A transformer layer built from a configuration."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx

from jax_te import layers
from jax_te._validation import check_choice, check_positive, checked
from jax_te.config import TransformerConfig
from jax_te.layers import AttentionOptions, layer_output, split_output
from jax_te.layers.attention import log_unread_mask
from jax_te.megatron.graphable import GraphableMegatronModule
from jax_te.megatron.mla_self_attention import MLASelfAttention
from jax_te.megatron.mlp import MLP
from jax_te.megatron.module import check_input_norms
from jax_te.megatron.moe import MoELayer
from jax_te.megatron.norm import TENorm
from jax_te.megatron.self_attention import SelfAttention
from jax_te.ops import MaskType
from jax_te.sharding import constrain
from jax_te.typing import Array, Key


def attention_options(config: TransformerConfig, number: int) -> AttentionOptions:
    """Return what a configuration says about the attention of layer ``number``, from 0, in words of `jax_te.layers`.

    With latent attention it leaves out what `LatentAttentionOptions` says.

    >>> attention_options(TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4), 0)["kv_channels"]
    8
    """
    options: AttentionOptions = {
        "attention_dropout": config.attention_dropout,
        "layernorm_epsilon": config.layernorm_epsilon,
        "normalization": config.normalization,
        "zero_centered_gamma": config.layernorm_zero_centered_gamma,
        "softmax_scale": config.softmax_scale,
        "softmax_type": config.softmax_type,
        "logit_softcap": config.logit_softcap,
        "cp_comm_type": config.cp_comm_type_of(number),
        "hierarchical_context_parallel_sizes": config.hierarchical_context_parallel_sizes,
        "cp_load_balanced": config.cp_load_balanced,
        "qk_norm_across_heads": config.qk_layernorm_across_heads,
        "sequence_parallel": config.sequence_parallel,
        "tp_size": config.tensor_model_parallel_size,
        "fuse_wgrad_accumulation": config.gradient_accumulation_fusion,
        "bias": config.add_bias_linear,
        "init_method": config.init_method,
        "output_layer_init_method": config.output_layer_init_method,
        "params_dtype": config.params_dtype,
    }
    if config.latent_attention is None:
        options["num_gqa_groups"] = config.num_query_groups
        options["kv_channels"] = config.kv_channels
        # With latent attention, ``qk_layernorm`` is about the latents' norms.
        options["qk_norm_type"] = config.normalization if config.qk_layernorm else None
        options["qk_norm_before_rope"] = True  # Megatron's order; Transformer Engine's default is the other one
    return options


def _cross_attention(config: TransformerConfig, number: int, rngs: nnx.Rngs) -> layers.MultiheadAttention:
    """Return the cross-attention of layer ``number``, from 0, of a decoder: without a window, and all keys visible.

    As in Megatron, ``qk_layernorm`` is about self-attention.
    """
    options = attention_options(config, number) | {"qk_norm_type": None, "qk_norm_across_heads": False}
    return layers.MultiheadAttention(
        config.hidden_size,
        config.num_attention_heads,
        **options,
        attention_type="cross",
        attn_mask_type="no_mask",
        rngs=rngs,
    )


class TransformerLayer(layers.TransformerLayer, GraphableMegatronModule):
    """`jax_te.layers.TransformerLayer` composed of Megatron's layers, under Megatron's names; calls can be captured.

    The layers are ``self_attention`` (`SelfAttention`; with latent attention `MLASelfAttention`, behind
    ``input_layernorm``), ``mlp`` (`MLP`; with experts `MoELayer`, behind ``pre_mlp_layernorm``), and in a decoder
    ``cross_attention``, a `jax_te.layers.MultiheadAttention`. A `state_dict` has Megatron's names and layouts.

    Args:
        config: configuration of the stack, also of captured calls (``cuda_graph_impl``), see `GraphableMegatronModule`.
        layer_number: number of the layer, from 1. Some fields depend on it: windows, first and last layers in high
            precision.
        layer_type: ``"encoder"``, or ``"decoder"``, which attends to a ``context``, too.
        self_attn_mask_type: ``"causal"``, ``"no_mask"`` or ``"arbitrary"``.
        vp_stage: option without effect, stored as an attribute.
        rngs: random streams, of which ``params`` draws the kernels.

    Raises:
        ValueError: for another mask or layer type, a ``vp_stage`` that is not an integer, a layer number that the stack
            does not have, and a decoder with latent attention or ``parallel_attention_mlp``.

    Source: ``megatron.core.transformer.transformer_layer.TransformerLayer``.

    >>> config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, cuda_graph_impl="local")
    >>> layer = TransformerLayer(config, rngs=nnx.Rngs(0))
    >>> output, context = layer(jnp.ones((2, 8, 32)))
    >>> layer.mlp.linear_fc2
    TERowParallelLinear(in_features=128, out_features=32, bias=True, TP=1)
    """

    reads_layer_number: ClassVar[bool] = False

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        *,
        layer_type: Literal["encoder", "decoder"] = "encoder",
        self_attn_mask_type: Literal["causal", "no_mask", "arbitrary"] = "causal",
        vp_stage: int | None = None,
        rngs: nnx.Rngs,
    ):
        GraphableMegatronModule.__init__(self, config, vp_stage)
        check_input_norms(config)
        check_choice(("encoder", "decoder"), layer_type=layer_type)
        check_positive(layer_number=layer_number)
        if layer_number > config.num_layers:
            raise ValueError(f"layer_number must be in [1, num_layers = {config.num_layers}], got {layer_number!r}")
        if self_attn_mask_type not in ("causal", "no_mask", "arbitrary"):
            raise ValueError(
                f"self_attn_mask_type must be 'causal', 'no_mask' or 'arbitrary', got {self_attn_mask_type!r}; for "
                "padding build it with 'arbitrary' and give a mask, or use jax_te.layers.TransformerLayer with lengths"
            )
        latent = config.latent_attention is not None
        if latent and layer_type == "decoder":
            raise ValueError(
                "latent attention is self-attention alone, and layer_type='decoder' has cross-attention, too; leave "
                "one out"
            )
        if config.parallel_attention_mlp and layer_type == "decoder":
            raise ValueError(
                "parallel_attention_mlp=True does not go with layer_type='decoder', which is for blocks one after the "
                "other; leave one out"
            )
        number = layer_number - 1
        # jax_te.layers.TransformerLayer's names of these options.
        self.hidden_size, self.hidden_dropout, self.drop_path_rate = config.hidden_size, config.hidden_dropout, 0.0
        self.layer_number, self.sequence_parallel, self.layernorm = layer_number, config.sequence_parallel, None
        self.residual_from_norm, self.parallel_attention_mlp = False, config.parallel_attention_mlp
        norm: Any = (config, config.hidden_size, config.layernorm_epsilon)
        has_experts = config.has_experts(number)
        with layers.precision_while_building(config, number):
            # Latent attention has two projections of its input, and so its norm in front, under Megatron's name.
            self.input_layernorm = TENorm(*norm) if latent else None
            attention = MLASelfAttention if latent else SelfAttention
            self.self_attention = attention(
                config, layer_number, self_attn_mask_type, config.cp_comm_type_of(number), rngs=rngs
            )
            self.cross_attention = _cross_attention(config, number, rngs) if layer_type == "decoder" else None
            # The norm of an MLP is in its first layer.
            self.pre_mlp_layernorm = TENorm(*norm) if has_experts else None
            self.mlp: Any = (
                MoELayer(config, layer_number=layer_number, rngs=rngs) if has_experts else MLP(config, rngs=rngs)
            )
        behind = config.block_output_layernorm
        self.self_attention_norm = TENorm(*norm) if behind else None
        self.inter_attention_norm = TENorm(*norm) if behind and layer_type == "decoder" else None
        self.mlp_norm = TENorm(*norm) if behind else None
        if config.in_high_precision(number):
            layers.keep_in_high_precision(self)
        self.self_attn_mask_type: Literal["causal", "no_mask", "arbitrary"] = self_attn_mask_type

    # The names under which jax_te.layers.TransformerLayer knows the blocks.
    inter_attention = property(lambda self: self.cross_attention)
    layernorm_mlp = property(lambda self: self.mlp)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return `forward`'s results, possibly from a captured graph, see `GraphableMegatronModule`."""
        return GraphableMegatronModule.__call__(self, *args, **kwargs)

    @checked
    def forward(
        self,
        hidden_states: Array,
        attention_mask: Array | None = None,
        context: Array | None = None,
        context_mask: Array | None = None,
        rotary_pos_emb: Any = None,
        *,
        attention_bias: Array | None = None,
        packed_seq_params: layers.PackedSeqParams | None = None,
        dropout_key: Key | None = None,
        sequence_lengths: Array | None = None,
        encoder_lengths: Array | None = None,
        alibi_slopes: Array | None = None,
        cache: layers.KVCache | layers.WindowKVCache | None = None,
        checkpoint_core_attention: bool = False,
        is_first_microbatch: bool | None = None,
        return_max_logit: bool | None = None,
        padding_mask: Array | None = None,
    ) -> tuple[Any, ...]:
        """Apply the layer.

        Args:
            hidden_states: ``[b, s, h]``.
            attention_mask: bool, broadcastable to ``[b, n, s, s]``, True is masked out. Ignored unless the layer's mask
                type is ``"arbitrary"``, as in Transformer Engine, which is logged once.
            context: ``[b, skv, h]``, an encoder's output, for a decoder.
            context_mask: bool, broadcastable to ``[b, n, s, skv]``, True is masked out. None: nothing is.
            rotary_pos_emb: rotary embedding, see `jax_te.layers.rotary_embedding`.
            attention_bias: bias added to the scaled scores of self-attention.
            packed_seq_params: boundaries of several sequences in each row; causal and no mask then mean the padding
                types, as in Megatron. Not for a decoder, whose encoder's sequences they do not tell apart.
            dropout_key: ``jax.random.key`` that dropout draws from, another one at each step; needed in training
                unless the rates are 0. Evaluation (``model.eval()``) drops nothing, with or without one.
            sequence_lengths, encoder_lengths, alibi_slopes, cache, checkpoint_core_attention, is_first_microbatch,
                return_max_logit, padding_mask: see `jax_te.layers.TransformerLayer`.

        Returns:
            A NamedTuple of ``y [b, s, h]``, ``context``, and the further results of `jax_te.layers.TransformerLayer`.
        """
        kind: MaskType = self.self_attn_mask_type
        if packed_seq_params is not None:
            packed: dict[MaskType, MaskType] = {"causal": "padding_causal", "no_mask": "padding"}
            kind = packed.get(kind, kind)
        if attention_mask is not None and kind != "arbitrary":
            log_unread_mask(kind, packed=packed_seq_params is not None)
        result = layers.TransformerLayer.__call__(
            self,
            hidden_states,
            attention_mask if kind == "arbitrary" else None,
            context,
            context_mask,
            packed_seq_params=packed_seq_params,
            rotary_pos_emb=rotary_pos_emb,
            core_attention_bias_type="no_bias" if attention_bias is None else "post_scale_bias",
            core_attention_bias=attention_bias,
            self_attn_mask_type=kind,
            enc_dec_attn_mask_type=None if context_mask is None else "arbitrary",
            dropout_key=dropout_key,
            sequence_lengths=sequence_lengths,
            encoder_lengths=encoder_lengths,
            alibi_slopes=alibi_slopes,
            cache=cache,
            checkpoint_core_attention=checkpoint_core_attention,
            is_first_microbatch=is_first_microbatch,
            return_max_logit=return_max_logit,
            padding_mask=padding_mask,
        )
        y, extra = split_output(result)
        return layer_output(y, context=context, **extra)

    @checked
    def get_layer_static_inputs(self, seq_length: int, micro_batch_size: int) -> dict[str, Array]:
        """Return ``hidden_states``, and ``attention_mask`` bool ``[b, 1, s, s]``: True after the diagonal.

        Args:
            seq_length: ``s``.
            micro_batch_size: ``b``.
        """
        inputs = super().get_layer_static_inputs(seq_length, micro_batch_size)
        mask = ~jnp.tri(seq_length, dtype=bool)[None, None]
        mask = jnp.tile(mask, (micro_batch_size, 1, 1, 1))
        return inputs | {"attention_mask": constrain(mask, ("batch", None, None, None))}

    def _get_te_cuda_graph_replay_args(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a graph; a mask that the layer ignores is not one of them."""
        args, kwargs = super()._get_te_cuda_graph_replay_args(*args, **kwargs)
        if len(args) != 1:
            raise AssertionError(f"hidden_states is the one argument by position, got {len(args)}; name the others")
        mask = kwargs.pop("attention_mask", None)
        if self.self_attn_mask_type == "arbitrary":
            b, s, _ = args[0].shape
            # No mask is replaced by one that masks nothing, so that one graph serves both.
            mask = constrain(jnp.zeros((b, 1, s, s), bool), ("batch", None, None, None)) if mask is None else mask
            kwargs["attention_mask"] = mask
        return args, kwargs
