"""T5: an encoder-decoder language model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import check_positive, checked
from jax_te.config import TransformerConfig
from jax_te.layers import RelativePositionBias
from jax_te.models.from_config import ENCODER_NOT_FOLLOWED, norm_of, transformer_layer
from jax_te.models.language_model import LanguageModel
from jax_te.models.options import Execution, RelativePositions
from jax_te.models.stack import MaskTypes, StackInput, layer_keys
from jax_te.models.tokens import check_like_tokens, check_tokens
from jax_te.ops import LossOptions, Reduction
from jax_te.typing import Array, Key

T5_POSITION_EMBEDDINGS = ("relative", "learned_absolute", "none")
"""Kinds of position embedding of `T5Model`, in Megatron-Core's words."""

_EXECUTION, _OPTIONS = Execution(), LossOptions()


@checked
class T5Model(LanguageModel):
    """Encoder over one sequence, decoder with cross-attention over another; both share the embedding.

    T5's own form is ``TransformerConfig(normalization="RMSNorm", activation="relu", add_bias_linear=False,
    softmax_scale=1.0, …)`` with relative positions; T5 v1.1's has ``activation="geglu"`` and a separate head.

    The layers' linear operations follow the ambient recipe, and with ``config.fp8_output_proj`` the head's; embedding
    and attention cores stay in the compute dtype, and without it the head.

    Cross-attention sees all of the encoder's positions, whatever ``config.window_size`` is, and has norms of queries
    and keys under ``config.qk_layernorm``, as in Transformer Engine's decoder layer; Megatron-Core's T5 has such norms
    nowhere.

    Args:
        config: sizes and choices of the layers; ``num_layers`` are the decoder's.
        vocab_size: ``v``.
        max_sequence_length: longest input of encoder and decoder, and number of rows of the learned positions.
        encoder_num_layers: None: as many as the decoder's.
        position_embedding_type: ``"relative"``: a bias of the scores by distance, one table in the encoder and one
            in the decoder, shared by their layers; a `RelativePositions` (``"relative"`` with its options);
            ``"learned_absolute"``; or ``"none"``.
        share_embeddings_and_output_weights: whether the head is the embedding table, transposed. Else it is a kernel
            ``[h, v]`` of its own.
        execution: see `Execution`. The two stacks are separate: ``scan_layers="auto"`` decides on each, and groups of
            layers that are recomputed together do not reach from the encoder into the decoder.
        rngs: random streams, of which ``params`` draws all weights.

    Raises:
        ValueError: for sizes that are not positive, unknown names and unsupported fields of ``config``; when called,
            for tokens that are not ``[b, s]`` or too long.
        TypeError: when called, for tokens that are not integers.
        QuantizerStateError: when called under a recipe with state, if the model was built without it.

    Source: ``megatron.core.models.T5.T5Model``; Raffel et al. 2020.

    >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    >>> model = T5Model(config, vocab_size=100, max_sequence_length=16, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 8), jnp.int32), jnp.zeros((2, 4), jnp.int32)).shape
    (2, 4, 100)
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        max_sequence_length: int,
        encoder_num_layers: int | None = None,
        position_embedding_type: RelativePositions | str = "relative",
        share_embeddings_and_output_weights: bool = True,
        execution: Execution = _EXECUTION,
        rngs: nnx.Rngs,
    ):
        # First: the following lines read the attributes that it sets.
        self._configure(config, vocab_size, max_sequence_length, execution, ENCODER_NOT_FOLLOWED)
        encoders = config.num_layers if encoder_num_layers is None else encoder_num_layers
        check_positive(encoder_num_layers=encoders)
        if position_embedding_type == "relative":
            position_embedding_type = RelativePositions()
        relative = position_embedding_type if isinstance(position_embedding_type, RelativePositions) else None
        if relative is None and position_embedding_type not in T5_POSITION_EMBEDDINGS:
            raise ValueError(
                f"unknown position_embedding_type {position_embedding_type!r}; "
                f"allowed: {', '.join(T5_POSITION_EMBEDDINGS)}"
            )
        # The order of the lines below is the order in which weights are drawn: another one changes initial values.
        self._make_embeddings(learned_positions=position_embedding_type == "learned_absolute", rngs=rngs)
        # Fields that depend on the number of layers, such as the last layers in high precision, count the encoder's.
        encoder_config = dataclasses.replace(config, num_layers=encoders)
        self.encoder_bias = self._make_bias(relative, bidirectional=True, rngs=rngs)
        self.encoder_layers = nnx.List(
            [transformer_layer(encoder_config, i, self_attn_mask_type="no_mask", rngs=rngs) for i in range(encoders)]
        )
        self.encoder_norm = norm_of(self.config, rngs=rngs)
        self.decoder_bias = self._make_bias(relative, bidirectional=False, rngs=rngs)
        self.decoder_layers = nnx.List(
            [transformer_layer(config, i, layer_type="decoder", rngs=rngs) for i in range(config.num_layers)]
        )
        self.decoder_norm = norm_of(self.config, rngs=rngs)
        self._make_head(tied=share_embeddings_and_output_weights, rngs=rngs)

    def _make_bias(
        self, relative: RelativePositions | None, *, bidirectional: bool, rngs: nnx.Rngs
    ) -> RelativePositionBias | None:
        if relative is None:
            return None
        return RelativePositionBias(
            self.config.num_attention_heads,
            num_buckets=relative.num_buckets,
            max_distance=relative.max_distance,
            bidirectional=bidirectional,
            init_method=self.config.init_method,
            params_dtype=self.config.params_dtype,
            rngs=rngs,
        )

    def __call__(
        self,
        encoder_tokens: Array,
        decoder_tokens: Array,
        *,
        encoder_lengths: Array | None = None,
        dropout_key: Key | None = None,
    ) -> Array:
        """Return the logits of the next token of the decoder's sequence at every position.

        Args:
            encoder_tokens: integers ``[b, s]`` in ``[0, v)``.
            decoder_tokens: integers ``[b, t]`` in ``[0, v)``.
            encoder_lengths: int32 ``[b]``, valid tokens at the start of each of ``encoder_tokens``; no token attends to
                the others. None: all.
            dropout_key: ``jax.random.key`` that dropout draws from, another one at each step; needed in training
                unless the rates are 0. Evaluation (``model.eval()``) drops nothing, with or without one.

        Returns:
            ``[b, t, v]`` in the compute dtype, sharded over batch and vocabulary.
        """
        keys = layer_keys(dropout_key, 2)
        encoded = self.encode(encoder_tokens, encoder_lengths=encoder_lengths, dropout_key=keys[0])
        return self.decode(decoder_tokens, encoded, encoder_lengths=encoder_lengths, dropout_key=keys[1])

    def encode(self, tokens: Array, *, encoder_lengths: Array | None = None, dropout_key: Key | None = None) -> Array:
        """Return the encoder's output ``[b, s, h]``."""
        # T5 drops behind its last norm as well, hence one key more than in GPT.
        *keys, embedding_key, last_key = layer_keys(dropout_key, len(self.encoder_layers) + 2)
        mask_types: MaskTypes = {}
        arrays: dict[str, Array] = {}
        if encoder_lengths is not None:
            mask_types["self_attn_mask_type"] = "padding"
            arrays["sequence_lengths"] = encoder_lengths
        with jax.named_scope("T5Encoder"):
            x = self._enter(tokens, embedding_key)
            stack = self._stack_input(self.encoder_bias, x, keys, mask_types, arrays, {})
            return self._dropout(self.encoder_norm(stack.output(self.encoder_layers)), last_key)

    def decode(
        self,
        tokens: Array,
        encoded: Array,
        *,
        encoder_lengths: Array | None = None,
        dropout_key: Key | None = None,
    ) -> Array:
        """Return the logits ``[b, t, v]`` of the decoder's tokens, given the encoder's output ``[b, s, h]``."""
        return self._head(self._hidden(tokens, encoded, encoder_lengths, dropout_key))

    def _hidden(self, tokens: Array, encoded: Array, encoder_lengths: Array | None, dropout_key: Key | None) -> Array:
        """Return the head's input ``[b, t, h]``."""
        with jax.named_scope("T5Decoder"):
            y = self._decoder_input(tokens, encoded, encoder_lengths, dropout_key).output(self.decoder_layers)
            return self._normed(y, dropout_key)

    def _decoder_input(
        self, tokens: Array, encoded: Array, encoder_lengths: Array | None, dropout_key: Key | None
    ) -> StackInput:
        """Return what the decoder's layers are called with."""
        *keys, embedding_key, _ = layer_keys(dropout_key, len(self.decoder_layers) + 2)
        mask_types: MaskTypes = {}
        arrays: dict[str, Array] = {}
        if encoder_lengths is not None:
            mask_types["enc_dec_attn_mask_type"] = "padding"
            arrays["encoder_lengths"] = encoder_lengths
        x = self._enter(tokens, embedding_key)
        return self._stack_input(self.decoder_bias, x, keys, mask_types, arrays, {"encoder_output": encoded})

    def _normed(self, y: Array, dropout_key: Key | None) -> Array:
        """Return the head's input ``[b, t, h]`` from the decoder's layers' output."""
        last_key = layer_keys(dropout_key, len(self.decoder_layers) + 2)[-1]
        return self._dropout(self.decoder_norm(y), last_key)

    def loss(
        self,
        encoder_tokens: Array,
        decoder_tokens: Array,
        labels: Array,
        loss_mask: Array | None = None,
        *,
        encoder_lengths: Array | None = None,
        dropout_key: Key | None = None,
        options: LossOptions = _OPTIONS,
        reduction: Reduction = "mean",
    ) -> Array:
        """Return the mean negative log-likelihood of ``labels [b, t]``, weighted by ``loss_mask [b, t]``, fp32.

        ``options`` and ``reduction`` are those of `jax_te.ops.softmax_cross_entropy`; a label of -100 does not count.
        """
        check_like_tokens(decoder_tokens, labels=labels, loss_mask=loss_mask)
        stack = self.embed_inputs(
            encoder_tokens, decoder_tokens, encoder_lengths=encoder_lengths, dropout_key=dropout_key
        )
        with jax.named_scope("T5Decoder"):
            y = stack.output(self.layers)
        return self.compute_loss(y, labels, loss_mask, dropout_key=dropout_key, options=options, reduction=reduction)

    @property
    def layers(self) -> Sequence[nnx.Module]:
        """The decoder's layers, which the stages of a pipeline split; the encoder stands before them."""
        return self.decoder_layers

    def embed_inputs(
        self,
        encoder_tokens: Array,
        decoder_tokens: Array,
        *,
        encoder_lengths: Array | None = None,
        dropout_key: Key | None = None,
    ) -> StackInput:
        """Return what the decoder's layers are called with; the arguments are those of a call. See `ModelInParts`."""
        keys = layer_keys(dropout_key, 2)
        encoded = self.encode(encoder_tokens, encoder_lengths=encoder_lengths, dropout_key=keys[0])
        with jax.named_scope("T5Decoder"):
            return self._decoder_input(decoder_tokens, encoded, encoder_lengths, keys[1])

    def compute_loss(
        self,
        y: Array,
        labels: Array,
        loss_mask: Array | None = None,
        *,
        dropout_key: Key | None = None,
        options: LossOptions = _OPTIONS,
        reduction: Reduction = "mean",
    ) -> Array:
        """Return the loss, given the decoder's layers' output ``y [b, t, h]``; the other arguments are those of `loss`.

        The ``dropout_key`` is the one that `embed_inputs` was given.
        """
        with jax.named_scope("T5Decoder"):
            x = self._normed(y, layer_keys(dropout_key, 2)[1])
        return self._loss(x, labels, loss_mask, options, reduction)

    def _enter(self, tokens: Array, key: Array | None) -> Array:
        check_tokens(tokens, self.max_sequence_length)
        return self._embed(tokens, jnp.arange(tokens.shape[1], dtype=jnp.int32), key)

    def _stack_input(
        self,
        bias: RelativePositionBias | None,
        x: Array,
        keys: list[Array | None],
        mask_types: MaskTypes,
        arrays: dict[str, Array],
        learned: dict[str, Array],
    ) -> StackInput:
        if bias is not None:
            # Computed once for all layers: T5 shares one table in each stack.
            mask_types = {**mask_types, "core_attention_bias_type": "post_scale_bias"}
            learned = {**learned, "core_attention_bias": bias(x.shape[1], x.shape[1])}
        return StackInput(x, keys, arrays, learned, self.execution.of_stack(self.config, mask_types))
