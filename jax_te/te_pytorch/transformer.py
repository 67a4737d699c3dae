"""Transformer layer."""

from __future__ import annotations

from typing import Any, ClassVar, Unpack, cast

from flax import nnx

from jax_te import layers
from jax_te._validation import check_number, checked
from jax_te.layers import KVCache, Rotary, TransformerLayerCallKeywords, TransformerLayerKeywords, WindowKVCache
from jax_te.ops import BiasType, MaskType, Window
from jax_te.te_pytorch.attention import (
    check_diagonal,
    make_head_norms_own,
    read_windows,
    refuse_in_a_call,
    require_batch_first,
    window_of_source,
)
from jax_te.te_pytorch.refused import refuses_by_name
from jax_te.typing import Array


def _refuse_in_a_decoder(rotary_pos_emb: Rotary | None, bias_type: BiasType) -> None:
    """Raise ValueError for what Transformer Engine gives both attentions, and `jax_te.layers` self-attention alone."""
    given = {
        "rotary_pos_emb": rotary_pos_emb is not None,
        f"core_attention_bias_type={bias_type!r}": bias_type != "no_bias",
    }
    for name, is_given in given.items():
        if is_given:
            raise ValueError(
                f"{name} in a decoder: Transformer Engine applies it in cross-attention, too, which is not supported; "
                "take jax_te.layers.TransformerLayer, which applies it in self-attention alone"
            )


@refuses_by_name
@checked
class TransformerLayer(layers.TransformerLayer):
    """`jax_te.layers.TransformerLayer`, called with the names and the order of Transformer Engine's arguments.

    Args:
        hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups, layernorm_epsilon, hidden_dropout,
            attention_dropout: see `jax_te.layers.TransformerLayer`.
        attn_input_format: option that must be ``"bshd"``: activations are ``[b, s, h]``. Transformer Engine's default
            is refused.
        qk_norm_eps: see `MultiheadAttention`.
        rngs: random streams, of which ``params`` draws the kernels.
        **options: keywords of `jax_te.layers.TransformerLayer`, with Transformer Engine's names.

    Raises:
        ValueError: for another ``attn_input_format``; see also `jax_te.layers.TransformerLayer`.

    Source: ``transformer_engine.pytorch.TransformerLayer``.

    >>> options = {"attn_input_format": "bshd", "self_attn_mask_type": "padding"}
    >>> layer = TransformerLayer(32, 64, 4, **options, rngs=nnx.Rngs(0))
    >>> padding = jnp.arange(8)[None, None, None] >= 6
    >>> key = jax.random.key(1)
    >>> layer(hidden_states=jnp.ones((1, 8, 32)), attention_mask=padding, dropout_key=key).shape
    (1, 8, 32)
    """

    # Transformer Engine ignores a mask that the mask type has no use for; `jax_te.layers` refuses it.
    _ignores_masks = True

    reads_layer_number: ClassVar[bool] = False

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        *,
        attn_input_format: str = "sbhd",
        qk_norm_eps: float = 1e-6,
        rngs: nnx.Rngs,
        **options: Unpack[TransformerLayerKeywords],
    ):
        require_batch_first(attn_input_format=attn_input_format)
        check_number(qk_norm_eps=qk_norm_eps)
        read_windows(
            cast(dict[str, Any], options),
            window_size=options.get("self_attn_mask_type", "causal"),
            enc_dec_window_size=options.get("enc_dec_attn_mask_type", "no_mask"),
        )
        super().__init__(
            hidden_size,
            ffn_hidden_size,
            num_attention_heads,
            num_gqa_groups=num_gqa_groups,
            layernorm_epsilon=layernorm_epsilon,
            hidden_dropout=hidden_dropout,
            attention_dropout=attention_dropout,
            **options,
            rngs=rngs,
        )
        for attention in (self.self_attention, self.inter_attention):
            if attention is not None:
                make_head_norms_own(attention, qk_norm_eps)

    def __call__(  # type: ignore[override]  # Transformer Engine's arguments
        self,
        hidden_states: Array,
        attention_mask: Any = None,
        self_attn_mask_type: MaskType | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Array | None = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: MaskType | None = None,
        enc_dec_window_size: Window | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: KVCache | WindowKVCache | None = None,
        rotary_pos_emb: Rotary | None = None,
        core_attention_bias_type: BiasType = "no_bias",
        core_attention_bias: Array | None = None,
        alibi_slopes: Array | None = None,
        **options: Unpack[TransformerLayerCallKeywords],
    ) -> Any:
        """Apply the layer.

        Args:
            hidden_states: ``[b, s, h]``, the ``x`` of `jax_te.layers.TransformerLayer`.
            bottom_right_diagonal, enc_dec_bottom_right_diagonal: options that must be None: the mask type says it.
            inference_params: keys and values of the tokens before, a `jax_te.layers.KVCache` or `WindowKVCache`; a call
                with it returns it, too, with the new tokens appended.
            attention_mask, enc_dec_attn_mask: see `jax_te.layers.TransformerLayer`; ignored under mask types that have
                no use for it, as in Transformer Engine.
            self_attn_mask_type, window_size, encoder_output, enc_dec_attn_mask_type, enc_dec_window_size,
                is_first_microbatch, checkpoint_core_attention, rotary_pos_emb, core_attention_bias_type,
                core_attention_bias, alibi_slopes: see `jax_te.layers.TransformerLayer`.
            **options: other keywords of `jax_te.layers.TransformerLayer`, such as ``dropout_key``.

        Returns:
            The results of `jax_te.layers.TransformerLayer`.
        """
        refuse_in_a_call(
            bottom_right_diagonal=bottom_right_diagonal, enc_dec_bottom_right_diagonal=enc_dec_bottom_right_diagonal
        )
        core = self.self_attention.core_attention
        kind = core.attn_mask_type if self_attn_mask_type is None else self_attn_mask_type
        window_size = window_of_source(core.window_size if window_size is None else window_size, kind)
        if self.inter_attention is not None:
            core = self.inter_attention.core_attention
            kind = core.attn_mask_type if enc_dec_attn_mask_type is None else enc_dec_attn_mask_type
            enc_dec_window_size = window_of_source(
                core.window_size if enc_dec_window_size is None else enc_dec_window_size, kind
            )
            if encoder_output is not None:
                lengths = (hidden_states.shape[1], encoder_output.shape[1])
                check_diagonal(kind, enc_dec_window_size, "no_bias", lengths)
            _refuse_in_a_decoder(rotary_pos_emb, core_attention_bias_type)
        return super().__call__(
            hidden_states,
            attention_mask,
            encoder_output,
            enc_dec_attn_mask,
            self_attn_mask_type=self_attn_mask_type,
            enc_dec_attn_mask_type=enc_dec_attn_mask_type,
            window_size=window_size,
            enc_dec_window_size=enc_dec_window_size,
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
            cache=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            **options,
        )
