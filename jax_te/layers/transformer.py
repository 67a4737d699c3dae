"""Transformer layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.config import check_rate
from jax_te.layers.dropout import dropout
from jax_te.layers.kv_cache import KVCache
from jax_te.layers.layernorm_mlp import LayerNormMLP
from jax_te.layers.multihead_attention import MultiheadAttention
from jax_te.layers.norm import make_norm
from jax_te.layers.rotary import Rotary
from jax_te.parallel import constrain
from jax_te.typing import Array, DTypeLike, Initializer, LogicalAxes

_AXES: LogicalAxes = ("batch", "sequence", "hidden")


class TransformerLayer(nnx.Module):
    """Self-attention block and feed-forward block, each with a residual connection.

    ``x = x + dropout(attention(norm(x)))``, then ``x + dropout(mlp(norm(x)))``.

    Args:
        hidden_size: ``h``.
        ffn_hidden_size: ``f``.
        num_attention_heads: query heads ``n``.
        layernorm_epsilon: added to variances.
        hidden_dropout: dropout probability of both blocks' outputs.
        attention_dropout: dropout probability of the softmax's result.
        init_method: initializer of the query/key/value and first MLP kernels. None: N(0, 0.023²).
        output_layer_init_method: initializer of the two output projections. None: N(0, 0.023²).
        apply_residual_connection_post_layernorm: take the residual connections from the norms' outputs.
        output_layernorm: normalize the layer's output, and not the attention block's input.
        layer_type: ``"encoder"``: self-attention only, causal or not by its mask type.
        kv_channels: head size ``d``. None: ``h / n``.
        self_attn_mask_type: see `DotProductAttention`.
        num_gqa_groups: key/value heads ``g``. None: ``n``.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        zero_centered_gamma: store the norms' scales as offsets from 1.
        activation: a key of `jax_te.config.ACTIVATIONS`.
        bias: biases in all linear layers.
        params_dtype: dtype of the parameters.
        rngs: the ``params`` stream draws the kernels.

    Raises:
        ValueError: for sizes that are not positive or do not divide, rates outside [0, 1) and unknown names; when
            called, for an input that is not ``[b, s, h]``.
        QuantizerStateError: when called under a recipe with state, if the layer was built without it.

    Source: ``transformer_engine.pytorch.TransformerLayer``; Vaswani et al. 2017.

    >>> layer = TransformerLayer(32, 64, 4, normalization="RMSNorm", activation="swiglu", bias=False, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 8, 32))).shape
    (2, 8, 32)
    """

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
        output_layernorm: bool = False,
        layer_type: str = "encoder",
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        num_gqa_groups: int | None = None,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        activation: str = "gelu",
        bias: bool = True,
        params_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if layer_type != "encoder":
            later = "; 'decoder' comes with cross-attention in a later version" if layer_type == "decoder" else ""
            raise ValueError(f"layer_type must be 'encoder', got {layer_type!r}{later}")
        check_rate(hidden_dropout=hidden_dropout)
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            num_gqa_groups=num_gqa_groups,
            kv_channels=kv_channels,
            attention_dropout=attention_dropout,
            layernorm_epsilon=layernorm_epsilon,
            normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            input_layernorm=not output_layernorm,
            return_layernorm_output=apply_residual_connection_post_layernorm and not output_layernorm,
            attn_mask_type=self_attn_mask_type,
            bias=bias,
            init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            params_dtype=params_dtype,
            rngs=rngs,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            bias,
            activation=activation,
            normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            return_layernorm_output=apply_residual_connection_post_layernorm,
            params_dtype=params_dtype,
            rngs=rngs,
        )
        self.layernorm = (
            make_norm(
                normalization,
                hidden_size,
                layernorm_epsilon,
                zero_centered_gamma=zero_centered_gamma,
                params_dtype=params_dtype,
                rngs=rngs,
            )
            if output_layernorm
            else None
        )
        self.hidden_size = hidden_size
        self.hidden_dropout = hidden_dropout

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
    ) -> Array | tuple[Array, KVCache]:
        """Apply the layer.

        Args:
            x: ``[b, s, h]``; its dtype is the dtype of computation and of the output.
            attention_mask: bool, broadcastable to ``[b, n, s, s]``, True is masked out; for mask type ``"arbitrary"``.
            sequence_lengths: int32 ``[b]``, valid tokens at the start of each sequence; for the padding types.
            rotary_pos_emb: from `rotary_embedding`, for the positions of ``x``.
            dropout_key: turns dropout on; None is evaluation.
            cache: keys and values of the tokens before ``x``.
            checkpoint_core_attention: recompute the attention core in backward, in place of keeping its results.
            is_first_microbatch: as in `Linear`, for all projections.

        Returns:
            ``y [b, s, h]``, split like activations over batch; with a cache ``(y, cache with x appended)``.
        """
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"TransformerLayer takes [b, s, {self.hidden_size}], got shape {x.shape}")
        attention_key, *hidden_keys = (None,) * 3 if dropout_key is None else jax.random.split(dropout_key, 3)
        with jax.named_scope("TransformerLayer"):
            x = constrain(x, _AXES)
            attended: Any = self.self_attention(
                x,
                attention_mask=attention_mask,
                sequence_lengths=sequence_lengths,
                rotary_pos_emb=rotary_pos_emb,
                dropout_key=attention_key,
                cache=cache,
                checkpoint_core_attention=checkpoint_core_attention,
                is_first_microbatch=is_first_microbatch,
            )
            y, *extra = attended if isinstance(attended, tuple) else (attended,)
            cache = None if cache is None else extra.pop()
            x = self._add(extra[0] if extra else x, y, hidden_keys[0])
            transformed: Any = self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch)
            y, *extra = transformed if isinstance(transformed, tuple) else (transformed,)
            x = self._add(extra[0] if extra else x, y, hidden_keys[1])
            if self.layernorm is not None:
                x = self.layernorm(x)
            return x if cache is None else (x, cache)

    def _add(self, residual: Array, y: Array, key: Array | None) -> Array:
        return constrain(residual + dropout(y, self.hidden_dropout, key, axes=_AXES), _AXES)
