"""BERT: an encoder of tokens, whose layers have their norms after the residual sums."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import checked
from jax_te.config import TransformerConfig
from jax_te.layers import Embedding, Linear, add_bias, keep_in_high_precision, parameter
from jax_te.models.from_config import ENCODER_NOT_FOLLOWED, norm_of, transformer_layer
from jax_te.models.language_model import LanguageModel
from jax_te.models.options import Execution
from jax_te.models.stack import StackInput, layer_keys
from jax_te.models.tokens import check_like_tokens, check_tokens
from jax_te.ops import LossOptions, Reduction, activation
from jax_te.recipe import autocast
from jax_te.sharding import auto_region, constrain
from jax_te.typing import Array, Key

_EXECUTION, _OPTIONS = Execution(), LossOptions()


@checked
class BertModel(LanguageModel):
    """Embeddings of tokens, learned positions and token types followed by a norm, and layers in post-norm form.

    Every token sees all others. BERT's own form is ``TransformerConfig(activation="gelu_exact",
    layernorm_epsilon=1e-12, hidden_dropout=0.1, attention_dropout=0.1, …)``.

    The layers' linear operations follow the ambient recipe, and with ``config.fp8_output_proj`` the head's projection
    to the vocabulary; embeddings, attention core, pooler and the rest of the head stay in the compute dtype.

    Args:
        config: sizes and choices of the layers; the head has its ``activation``, without a gate, and its norm.
        vocab_size: ``v``.
        max_sequence_length: longest input.
        first_position: position of each sequence's first token. The table of learned positions has this number of rows
            in front of those that inputs read: RoBERTa has 2, one more than its padding token's number.
        num_tokentypes: rows of the table of token types. 0: there are none.
        add_lm_head: a head for masked tokens: dense layer, activation, norm, the embedding table transposed, and a
            bias. Without it a call returns the encoder's output.
        add_pooler: a dense layer and ``tanh`` of each sequence's first token, see `pool`.
        execution: see `Execution`; with the head ``loss_chunks`` must be 1.
        rngs: random streams, of which ``params`` draws all weights.

    Raises:
        ValueError: for sizes that are not positive, unsupported fields of ``config``, a gated activation together with
            the head; when called, for tokens that are not ``[b, s]`` or too long, and token types that do not fit them.
        TypeError: when called, for tokens that are not integers.
        QuantizerStateError: when called under a recipe with state, if the model was built without it.

    Source: ``megatron.core.models.bert.BertModel``, whose layers have their norms in front; Devlin et al. 2018.

    >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, activation="gelu_exact")
    >>> model = BertModel(config, vocab_size=100, max_sequence_length=16, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 8), jnp.int32), lengths=jnp.array([8, 5])).shape
    (2, 8, 100)
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        max_sequence_length: int,
        first_position: int = 0,
        num_tokentypes: int = 2,
        add_lm_head: bool = True,
        add_pooler: bool = False,
        execution: Execution = _EXECUTION,
        rngs: nnx.Rngs,
    ):
        self._configure(config, vocab_size, max_sequence_length, execution, ENCODER_NOT_FOLLOWED)
        if num_tokentypes < 0:
            raise ValueError(f"num_tokentypes must be >= 0, got {num_tokentypes}")
        if not 0 <= first_position < 2**31:
            raise ValueError(f"first_position must be in [0, 2^31), as int32 positions are, got {first_position}")
        self.first_position = first_position
        h, dtype = config.hidden_size, config.params_dtype
        if add_lm_head and config.gated_linear_unit:
            raise ValueError(f"the head's activation has no gate, got {config.activation!r}; give add_lm_head=False")
        # The order of the lines below is the order in which weights are drawn: another one changes initial values.
        self._make_embeddings(learned_positions=True, first_position=first_position, rngs=rngs)
        types: Any = {"init_method": config.init_method, "params_dtype": dtype, "axes": (None, "fsdp"), "rngs": rngs}
        self.tokentype_embedding = Embedding(num_tokentypes, h, **types) if num_tokentypes else None
        self.embedding_norm = norm_of(self.config, rngs=rngs)
        self.layers = nnx.List(
            [
                transformer_layer(config, i, self_attn_mask_type="no_mask", post_norm=True, rngs=rngs)
                for i in range(config.num_layers)
            ]
        )
        self.pooler = self._make_dense(rngs) if add_pooler else None
        self.head_dense = self._make_dense(rngs) if add_lm_head else None
        self.head_norm = norm_of(self.config, rngs=rngs) if add_lm_head else None
        self.output_kernel = None
        zeros = jax.nn.initializers.zeros
        self.output_bias = parameter(zeros, rngs, (vocab_size,), dtype, ("vocab",)) if add_lm_head else None
        if add_lm_head:
            self._make_output_layer(rngs, bias=True)

    def _make_dense(self, rngs: nnx.Rngs) -> Linear:
        config, h = self.config, self.config.hidden_size
        with autocast(None):  # no recipe reaches it, so it needs no quantizer state
            layer = Linear(h, h, init_method=config.init_method, params_dtype=config.params_dtype, rngs=rngs)
        keep_in_high_precision(layer)
        return layer

    def __call__(
        self,
        tokens: Array,
        *,
        tokentypes: Array | None = None,
        lengths: Array | None = None,
        dropout_key: Key | None = None,
    ) -> Array:
        """Return the logits of the token at every position, or without the head the encoder's output.

        Args:
            tokens: integers ``[b, s]`` in ``[0, v)``.
            tokentypes: integers ``[b, s]``, such as 0 in a first and 1 in a second sentence. None: all 0.
            lengths: int32 ``[b]``, valid tokens at the start of each sequence; no token attends to the others. None:
                all.
            dropout_key: ``jax.random.key`` that dropout draws from, another one at each step; needed in training
                unless the rates are 0. Evaluation (``model.eval()``) drops nothing, with or without one.

        Returns:
            ``[b, s, v]`` in the compute dtype, sharded over batch and vocabulary; or ``[b, s, h]``.
        """
        x = self.encode(tokens, tokentypes=tokentypes, lengths=lengths, dropout_key=dropout_key)
        return x if self.head_dense is None else self._head(self._transform(x))

    def encode(
        self,
        tokens: Array,
        *,
        tokentypes: Array | None = None,
        lengths: Array | None = None,
        dropout_key: Key | None = None,
    ) -> Array:
        """Return the encoder's output ``[b, s, h]``; the arguments are those of a call."""
        with jax.named_scope("BertEncoder"):
            stack = self.embed_inputs(tokens, tokentypes=tokentypes, lengths=lengths, dropout_key=dropout_key)
            return stack.output(self.layers)

    def embed_inputs(
        self,
        tokens: Array,
        *,
        tokentypes: Array | None = None,
        lengths: Array | None = None,
        dropout_key: Key | None = None,
    ) -> StackInput:
        """Return what the layers are called with; the arguments are those of a call. See `ModelInParts`."""
        check_tokens(tokens, self.max_sequence_length)
        check_like_tokens(tokens, tokentypes=tokentypes)
        others: list[Array] = []
        if self.tokentype_embedding is not None:
            others.append(self.tokentype_embedding(jnp.zeros_like(tokens) if tokentypes is None else tokentypes))
        elif tokentypes is not None:
            raise ValueError("the model has no table of token types; build it with num_tokentypes, or give none")
        *keys, embedding_key = layer_keys(dropout_key, len(self.layers) + 1)
        positions = self.first_position + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        x = self._dropout(self.embedding_norm(self._embedded(tokens, positions, *others)), embedding_key)
        if lengths is None:
            return StackInput(x, keys, options=self.execution.of_stack(self.config))
        options = self.execution.of_stack(self.config, {"self_attn_mask_type": "padding"})
        return StackInput(x, keys, {"sequence_lengths": lengths}, options=options)

    def pool(self, encoded: Array) -> Array:
        """Return ``tanh`` of a dense layer of each sequence's first token, ``[b, h]``.

        Args:
            encoded: ``[b, s, h]``, of `encode`.

        Raises:
            ValueError: for a model without ``add_pooler``, or another shape.
        """
        if self.pooler is None:
            raise ValueError("the model has no pooler; build it with add_pooler=True")
        h = self.config.hidden_size
        if encoded.ndim != 3 or encoded.shape[1] == 0 or encoded.shape[2] != h:
            raise ValueError(f"encoded must be [b, s, {h}], as encode returns it, got shape {encoded.shape}")
        first = auto_region(lambda x: x[:, 0], ("batch", "hidden"))(encoded)
        pooled, _ = add_bias(self.pooler(first), "pooler", leading=1)
        return jnp.tanh(pooled)

    def loss(
        self,
        tokens: Array,
        labels: Array,
        loss_mask: Array | None = None,
        *,
        tokentypes: Array | None = None,
        lengths: Array | None = None,
        dropout_key: Key | None = None,
        options: LossOptions = _OPTIONS,
        reduction: Reduction = "mean",
    ) -> Array:
        """Return the mean negative log-likelihood of ``labels [b, s]``, weighted by ``loss_mask [b, s]``, fp32.

        A label of -100 does not count: give it to all tokens that are not masked. ``options`` and ``reduction`` are
        those of `jax_te.ops.softmax_cross_entropy`.
        """
        check_like_tokens(tokens, labels=labels, loss_mask=loss_mask)
        y = self.encode(tokens, tokentypes=tokentypes, lengths=lengths, dropout_key=dropout_key)
        return self.compute_loss(y, labels, loss_mask, options=options, reduction=reduction)

    def compute_loss(
        self,
        y: Array,
        labels: Array,
        loss_mask: Array | None = None,
        *,
        options: LossOptions = _OPTIONS,
        reduction: Reduction = "mean",
    ) -> Array:
        """Return the loss, given the layers' output ``y [b, s, h]``; the other arguments are those of `loss`."""
        return self._loss(self._transform(y), labels, loss_mask, options, reduction)

    def _transform(self, x: Array) -> Array:
        """Return the input of the head's product with the embedding table."""
        if self.head_dense is None or self.head_norm is None:
            raise ValueError("the model has no head for tokens; build it with add_lm_head=True")
        dense, _ = add_bias(self.head_dense(x), "head_dense")
        y = constrain(dense, self._axes)
        return self.head_norm(activation(y[..., None, :], self.config.limited_activation, out_axes=self._axes))
