"""GPT: a decoder-only language model, in its GPT-2 and Llama forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, overload

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import checked, log_once
from jax_te.config import POSITION_EMBEDDINGS, TransformerConfig
from jax_te.layers import (
    KVCache,
    PackedSeqParams,
    Rotary,
    check_clip_qk,
    check_padding_mask,
    clip_qk,
    init_kv_cache,
    rotary_embedding,
)
from jax_te.models.from_config import norm_of, transformer_layer
from jax_te.models.language_model import LanguageModel
from jax_te.models.multi_token import MultiTokenPrediction, TokenArrays, continuations
from jax_te.models.options import Execution, RotaryPositions, rotary_positions
from jax_te.models.stack import MaskTypes, StackInput, layer_keys, of_experts, run_each
from jax_te.models.tokens import (
    caller_order,
    check_like_tokens,
    check_packed,
    check_tokens,
    model_order,
    natural_positions,
)
from jax_te.ops import LossOptions, Reduction
from jax_te.sharding import auto_region
from jax_te.typing import Array, Key

Cache = tuple[KVCache, ...]
"""One `KVCache` for each layer."""

_EXECUTION, _OPTIONS = Execution(), LossOptions()


@checked
class GPTModel(LanguageModel):
    """Embedding, transformer layers with causal attention, final norm, output head.

    GPT-2's form is ``TransformerConfig``'s defaults with learned positions and a tied head; Llama's is
    ``normalization="RMSNorm"``, ``activation="swiglu"``, ``add_bias_linear=False``, ``num_query_groups``, with the
    model's ``position_embedding_type="rope"``, ``share_embeddings_and_output_weights=False``; Qwen 3's is Llama's with
    ``qk_layernorm=True``; Gemma 2's has ``layernorm_zero_centered_gamma``, ``block_output_layernorm``,
    ``logit_softcap`` and `Multipliers`; Mixtral's and Qwen 3 MoE's is Llama's or Qwen 3's with ``num_moe_experts``.

    With ``config.num_moe_experts`` the layers that ``config.moe_layer_freq`` names have experts, see
    `jax_te.layers.MoE`; a train step adds the routers' losses to its gradients, and `jax_te.layers.expert_metrics`
    reads their counts. A loop over layers runs each sequence of layers with experts, and of those without, by itself.

    With ``config.mtp_num_layers`` further layers, ``mtp``, predict further tokens in training, with the model's
    embedding and head; logits and generation do not need them.

    The layers' linear operations follow the ambient recipe, and with ``config.fp8_output_proj`` the head's; embedding
    and attention core stay in the compute dtype, and without it the head.

    Tokens, labels, weights, positions and logits are in natural order. With ``config.cp_load_balanced`` on a mesh with
    context shards the layers run in zig-zag order. `loss` reorders integers and weights only; a call that returns
    logits all-gathers the head's input ``[b, s, h]`` once.

    With ``packed_seq_params`` a row holds several sequences, each of which attends to itself alone; its positions begin
    with 0, and its last token has no further ones to predict.

    Args:
        config: sizes and choices of the layers; ``compute_dtype`` is the dtype of activations and logits.
        vocab_size: ``v``.
        max_sequence_length: longest input, and number of rows of the learned positions.
        position_embedding_type: ``"learned_absolute"``, ``"rope"``, a `RotaryPositions` (``"rope"`` with its options)
            or ``"none"``. With an `MLATransformerConfig` heads are rotated as its fields say, under each of these
            names; a `RotaryPositions` must be what they say.
        share_embeddings_and_output_weights: whether the head is the embedding table, transposed. Else it is a kernel
            ``[h, v]`` of its own.
        execution: options of recomputation inside of layers, the loop over layers, and the loss in chunks.
        rngs: random streams, of which ``params`` draws all weights.

    Raises:
        ValueError: for sizes that are not positive and unknown names; for a `RotaryPositions` other than that of an
            `MLATransformerConfig`; for unsupported fields of ``config``, see `check_config`; when called, for tokens
            that are not ``[b, s]`` or too long, positions or boundaries that do not fit the tokens, and a sequence that
            cannot be cut into zig-zag order.
        TypeError: when called, for tokens that are not integers.
        QuantizerStateError: when called under a recipe with state, if the model was built without it.

    Source: ``megatron.core.models.gpt.GPTModel``; Radford et al. 2019; Touvron et al. 2023.

    >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    >>> model = GPTModel(config, vocab_size=100, max_sequence_length=16, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 8), jnp.int32)).shape
    (2, 8, 100)
    """

    _PACKED_MASKS: ClassVar[MaskTypes] = {"self_attn_mask_type": "padding_causal"}
    """What the layers are called with, beside the boundaries of packed rows."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: RotaryPositions | str = "learned_absolute",
        share_embeddings_and_output_weights: bool = True,
        execution: Execution = _EXECUTION,
        rngs: nnx.Rngs,
    ):
        self._configure(config, vocab_size, max_sequence_length, execution)
        rotary = position_embedding_type if isinstance(position_embedding_type, RotaryPositions) else None
        if rotary is None and position_embedding_type not in POSITION_EMBEDDINGS:
            raise ValueError(
                f"unknown position_embedding_type {position_embedding_type!r}; "
                f"allowed: {', '.join(POSITION_EMBEDDINGS)}"
            )
        self.rotary = rotary_positions(config, rotary)
        if self.rotary is None and position_embedding_type == "rope":
            self.rotary = RotaryPositions()
        # The order of the lines below is the order in which weights are drawn: another one changes initial values.
        self._make_embeddings(learned_positions=position_embedding_type == "learned_absolute", rngs=rngs)
        self.layers = nnx.List([transformer_layer(config, i, rngs=rngs) for i in range(config.num_layers)])
        self._angles(jnp.zeros((1,), jnp.int32))  # raises for a head size or base that cannot be rotated
        self.final_norm = norm_of(self.config, rngs=rngs)
        self._make_head(tied=share_embeddings_and_output_weights, rngs=rngs)
        self.mtp = MultiTokenPrediction(config, None, rngs=rngs) if config.mtp_num_layers else None

    @overload
    def __call__(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        dropout_key: Key | None = None,
        cache: None = None,
        padding_mask: Array | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Array: ...
    @overload
    def __call__(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        dropout_key: Key | None = None,
        cache: Cache,
        padding_mask: Array | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[Array, Cache]: ...
    def __call__(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        dropout_key: Key | None = None,
        cache: Cache | None = None,
        padding_mask: Array | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Array | tuple[Array, Cache]:
        """Return the logits of the next token at every position.

        Args:
            tokens: integers ``[b, s]`` in ``[0, v)``; a token outside turns its sequence's logits to nan.
            positions: integers ``[s]`` or ``[b, s]``. None: 0, 1, 2, …, counted on from the cached tokens, or in each
                packed sequence for itself.
            dropout_key: ``jax.random.key`` that dropout draws from, another one at each step; needed in training
                unless the rates are 0. Evaluation (``model.eval()``) drops nothing, with or without one.
            cache: keys and values of the preceding tokens, from `init_cache` or an earlier call.
            padding_mask: bool ``[b, s]``, True for padding, which the losses and counts of experts leave out, see
                `jax_te.layers.Router`. It hides nothing from attention. Layers without experts do not read it; a model
                without experts says so in the log, once.
            packed_seq_params: boundaries of several sequences in each row, in natural order; not with a cache.

        Returns:
            ``[b, s, v]`` in the compute dtype, sharded over batch and vocabulary; with a cache ``(logits, cache)``,
            which then holds these tokens, too.
        """
        if cache is None:
            with jax.named_scope("GPTModel"):
                x = self._hidden(tokens, positions, dropout_key, padding_mask, packed_seq_params)
                # Hidden states are reordered, not logits, which are v / h times as large.
                return self._head(caller_order(self.config, x, self._axes))
        return self._continued(tokens, positions, dropout_key, cache, padding_mask, packed_seq_params)

    def _continued(
        self,
        tokens: Array,
        positions: Array | None,
        dropout_key: Key | None,
        cache: Cache,
        padding_mask: Array | None,
        packed: PackedSeqParams | None,
    ) -> tuple[Array, Cache]:
        """Return the logits of tokens behind those of a cache, and the cache with both."""
        if len(cache) != len(self.layers):
            raise ValueError(
                f"cache must have one entry for each of the {len(self.layers)} layers, got {len(cache)}; give "
                "model.init_cache(batch, length), or what a call returned"
            )
        if packed is not None:
            raise ValueError(
                "packed_seq_params do not go with a cache, which holds one sequence in each row; leave one of the two "
                "out"
            )
        self._check(tokens, positions)
        self._check_padding(padding_mask, tokens)
        if positions is None:
            # The length is traced: one compiled step serves every position.
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32) + cache[0].length
        *keys, embedding_key = layer_keys(dropout_key, 1 + len(self.layers))
        # In natural order, which that of a cache is, and not in `model_order`.
        with jax.named_scope("GPTModel"):
            x = self._embed(tokens, positions, embedding_key)
            stack = self._stack_input(x, positions, keys, padding_mask, None)
            x, caches = run_each(self.layers, stack, [{"cache": entry} for entry in cache], "cache")
            return self._head(self.final_norm(x)), tuple(caches)

    def loss(
        self,
        tokens: Array,
        labels: Array,
        loss_mask: Array | None = None,
        *,
        dropout_key: Key | None = None,
        options: LossOptions = _OPTIONS,
        reduction: Reduction = "mean",
        positions: Array | None = None,
        mtp_loss_mask: Array | None = None,
        padding_mask: Array | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Array:
        """Return the mean negative log-likelihood of the labels, fp32 ``[]``.

        With ``config.mtp_num_layers`` its gradient in training is that of the sum with the depths' losses, scaled. Its
        value is without them, as Megatron's; `jax_te.training.make_train_step` reports them.

        Args:
            tokens: integers ``[b, s]``.
            labels: integers ``[b, s]``: the token after each, or ``options.ignore_index`` (-100) for a token that does
                not count.
            loss_mask: ``[b, s]``, the weight of each token, e.g. 0 for padding. None: all 1.
            dropout_key: see the call.
            options, reduction: see `jax_te.ops.softmax_cross_entropy`; a mean over no tokens is 0.
            positions: see the call.
            mtp_loss_mask: ``[b, s]``, the weights in the depths' losses. None: ``loss_mask``.
            padding_mask: see the call. ``loss_mask`` is another one: it says which tokens' losses count.
            packed_seq_params: see the call. The labels of the last token of a sequence and of padding are the caller's;
                the depths' losses are without tokens whose further ones lie behind their sequence's end.

        Raises:
            ValueError: if the shapes differ.
        """
        check_like_tokens(tokens, labels=labels, loss_mask=loss_mask, mtp_loss_mask=mtp_loss_mask)
        with jax.named_scope("GPTModel"):
            stack = self.embed_inputs(
                tokens,
                positions=positions,
                dropout_key=dropout_key,
                padding_mask=padding_mask,
                packed_seq_params=packed_seq_params,
            )
            y = stack.output(self.layers)
        return self.compute_loss(
            y,
            labels,
            loss_mask,
            tokens=tokens,
            positions=positions,
            dropout_key=dropout_key,
            options=options,
            reduction=reduction,
            mtp_loss_mask=mtp_loss_mask,
            padding_mask=padding_mask,
            packed_seq_params=packed_seq_params,
        )

    def embed_inputs(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        dropout_key: Key | None = None,
        padding_mask: Array | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> StackInput:
        """Return what the layers are called with; the arguments are those of a call. See `ModelInParts`."""
        self._check(tokens, positions, packed_seq_params)
        self._check_padding(padding_mask, tokens)
        positions = natural_positions(tokens.shape[1], packed_seq_params) if positions is None else positions
        tokens, positions = model_order(self.config, tokens), model_order(self.config, positions)
        # The embedding's key comes last, so that a layer's key has the layer's index.
        *keys, embedding_key = layer_keys(dropout_key, 1 + len(self.layers))
        padding = None if padding_mask is None else model_order(self.config, padding_mask)
        x = self._embed(tokens, positions, embedding_key)
        return self._stack_input(x, positions, keys, padding, packed_seq_params)

    def compute_loss(
        self,
        y: Array,
        labels: Array,
        loss_mask: Array | None = None,
        *,
        tokens: Array | None = None,
        positions: Array | None = None,
        dropout_key: Key | None = None,
        options: LossOptions = _OPTIONS,
        reduction: Reduction = "mean",
        mtp_loss_mask: Array | None = None,
        padding_mask: Array | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Array:
        """Return the loss, given the layers' output ``y [b, s, h]``; the other arguments are those of `loss`.

        ``tokens``, ``positions``, ``dropout_key``, ``padding_mask`` and ``packed_seq_params`` are for multi-token
        prediction, and not read without it.

        Raises:
            ValueError: in training with ``config.mtp_num_layers``, without ``tokens``.
        """
        with jax.named_scope("GPTModel"):
            x = self.final_norm(y)
        # Labels go to the layers' order, not hidden states to the callers': integers are cheap to move.
        ordered = model_order(self.config, labels)
        weights = None if loss_mask is None else model_order(self.config, loss_mask)
        loss = self._loss(x, ordered, weights, options, reduction)
        loss = caller_order(self.config, loss, ("batch", "sequence")) if reduction == "none" else loss
        if self.mtp is None or not self.training:
            return loss
        if tokens is None:
            raise ValueError(
                "the config has mtp_num_layers, whose losses embed the tokens; give compute_loss tokens=, the input of "
                "embed_inputs, and its positions=, packed_seq_params= and dropout_key="
            )
        check_like_tokens(tokens, labels=labels, loss_mask=loss_mask, mtp_loss_mask=mtp_loss_mask)
        self._check_padding(padding_mask, tokens)
        of_depths = loss_mask if mtp_loss_mask is None else mtp_loss_mask
        with jax.named_scope("GPTModel"):
            given = TokenArrays(
                tokens,
                labels,
                weights=jnp.ones(labels.shape, jnp.float32) if of_depths is None else of_depths,
                positions=natural_positions(tokens.shape[1], packed_seq_params) if positions is None else positions,
                padding_mask=padding_mask,
            )
            further = self._multi_token_loss(x, given, packed_seq_params, dropout_key, options)
        # In the gradient alone. A loss for each token, or their sum, has it times the tokens' weights, so that the
        # caller's mean has it once.
        further = further - jax.lax.stop_gradient(further)
        return loss + further * _counted(labels, loss_mask, options, reduction)

    def _multi_token_loss(
        self,
        x: Array,
        given: TokenArrays,
        packed: PackedSeqParams | None,
        dropout_key: Key | None,
        options: LossOptions,
    ) -> Array:
        """Return the depths' mean loss times its factor, fp32 ``[]``.

        Args:
            x: the head's input ``[b, s, h]``, in `model_order`.
            given: tokens and what belongs to them, of which the depths predict further ones.
            packed, dropout_key, options: arguments of `compute_loss`.

        Source: ``process_mtp_loss`` of ``megatron.core.transformer.multi_token_prediction``.
        """
        assert self.mtp is not None
        config, depths = self.config, self.mtp.depths
        # Rotations are those of the tokens' own places; learned positions go with the tokens that are embedded.
        own = given.positions
        continues = None if packed is None else continuations(packed, given.tokens.shape[1])
        if packed is not None:
            # Positions that all rows have are those of each of them, where its sequences end in other places.
            given = given._replace(positions=jnp.broadcast_to(own, given.tokens.shape))
        # Behind the keys of the layers and of the embedding: two for each depth.
        keys = layer_keys(dropout_key, 1 + len(self.layers) + 2 * depths)[1 + len(self.layers) :]
        losses: list[Array] = []
        for depth in range(depths):
            given = given.of_next_depth(continues)
            embedding_key, layer_key = keys[2 * depth], keys[2 * depth + 1]
            with jax.named_scope(f"mtp_{depth}"):
                ids, at = model_order(config, given.tokens), model_order(config, given.positions)
                embedded = self._embed(ids, at, embedding_key)
                padding = None if given.padding_mask is None else model_order(config, given.padding_mask)
                stack = self._stack_input(x, model_order(config, own), [layer_key], padding, packed)
                x = self.mtp.layer(depth)(stack, embedded, self._axes)
                labels, weights = model_order(config, given.labels), model_order(config, given.weights)
                losses.append(self._loss(x, labels, weights, options, "mean"))
        total = sum(losses[1:], losses[0]) * (config.mtp_loss_scaling_factor / depths)
        return self.mtp.counted(total, losses)

    def max_logits(
        self, tokens: Array, *, positions: Array | None = None, packed_seq_params: PackedSeqParams | None = None
    ) -> Array:
        """Return the max attention logit of every layer's heads, fp32 ``[num_layers, n]``, from a forward pass.

        For the log, and for `clip_qk`: ``config.log_max_attention_logit`` and ``config.qk_clip``. Megatron's layers
        keep these numbers as attributes, which a jitted training step could not set. The pass is one of evaluation,
        whatever the model's mode: without dropout, under the layers' own recipes for evaluation.

        Args:
            tokens: integers ``[b, s]``, such as those of a step.
            positions, packed_seq_params: see the call: those of the step, so that its attention is measured.
        """
        # A copy of the model's structure, not of its arrays: training steps do not compute these numbers.
        measured = nnx.merge(*nnx.split(self))
        measured.eval()
        stack = measured.embed_inputs(tokens, positions=positions, packed_seq_params=packed_seq_params)
        asked = [{"return_max_logit": True}] * len(measured.layers)
        return jnp.stack(run_each(measured.layers, stack, asked, "max_logit")[1])

    def clip_qk(self, max_logits: Array) -> None:
        """Scale down query and key projections, by ``config.qk_clip_threshold`` and ``config.qk_clip_alpha``.

        Call it after the optimizer's update, on the model or on its masters; see `jax_te.layers.clip_qk`.

        Args:
            max_logits: fp32 ``[num_layers, n]``, of `max_logits`; the maximum of several calls.

        Raises:
            ValueError: see `jax_te.layers.clip_qk`, for any of the layers; without ``config.qk_clip``; for another
                shape, or None.
        """
        if not self.config.qk_clip:
            raise ValueError("the model's config has qk_clip=False; build the model with qk_clip=True")
        shape = len(self.layers), self.config.num_attention_heads
        if getattr(max_logits, "shape", None) != shape:
            raise ValueError(
                f"max_logits must be an array {list(shape)}, as model.max_logits(tokens) gives it, got "
                f"{getattr(max_logits, 'shape', max_logits)!r}"
            )
        options = {"threshold": self.config.qk_clip_threshold, "alpha": self.config.qk_clip_alpha}
        # All layers are checked before one is scaled: a refused call changes nothing.
        for layer, logits in zip(self.layers, max_logits, strict=True):
            check_clip_qk(layer.self_attention, logits, **options)
        for layer, logits in zip(self.layers, max_logits, strict=True):
            clip_qk(layer.self_attention, logits, **options)

    def init_cache(self, batch: int, max_len: int) -> Cache:
        """Return empty caches for ``max_len`` tokens of ``batch`` sequences, in the compute dtype.

        Raises:
            ValueError: if ``max_len`` exceeds ``max_sequence_length``.
        """
        if max_len > self.max_sequence_length:
            raise ValueError(f"max_len {max_len} exceeds the model's max_sequence_length {self.max_sequence_length}")
        heads = self.layers[0].self_attention.cached_heads
        return tuple(init_kv_cache(batch, max_len, *heads, self.compute_dtype) for _ in self.layers)

    def _check(self, tokens: Array, positions: Array | None, packed: PackedSeqParams | None = None) -> None:
        """Raise for tokens, positions or boundaries that the model cannot take."""
        check_tokens(tokens, self.max_sequence_length)
        if packed is not None:
            check_packed(tokens, packed)
        if positions is not None and positions.shape not in (tokens.shape, tokens.shape[1:]):
            raise ValueError(f"positions must be [b, s] or [s] for tokens {tokens.shape}, got shape {positions.shape}")

    def _angles(self, positions: Array) -> Rotary | tuple[Rotary, Rotary] | None:
        """Return rotary angles, with a ``window_base`` also those of windowed layers; None: nothing is rotated."""
        rotary = self.rotary
        if rotary is None:
            return None
        d = self.layers[0].self_attention.rotary_channels
        options: dict[str, Any] = {"rotary_percent": rotary.percent, "interleaved": rotary.interleaved}
        angles = rotary_embedding(positions, d, rotary.base, **options, scaling=rotary.scaling)
        if rotary.window_base is None:
            return angles
        return angles, rotary_embedding(positions, d, rotary.window_base, **options)

    def _check_padding(self, padding_mask: Array | None, tokens: Array) -> None:
        """Check the padding mask of a call, and log once if no layer reads it."""
        check_padding_mask(padding_mask, tokens.shape)
        if padding_mask is not None and self.config.num_moe_experts is None:
            log_once(
                "padding_mask has no effect on a model without experts, whose losses and counts it is for; attention "
                "reads other arguments, and loss_mask says which tokens' losses count"
            )

    def _hidden(
        self,
        tokens: Array,
        positions: Array | None,
        dropout_key: Key | None,
        padding_mask: Array | None = None,
        packed: PackedSeqParams | None = None,
    ) -> Array:
        """Return the head's input ``[b, s, h]``, in `model_order`."""
        stack = self.embed_inputs(
            tokens,
            positions=positions,
            dropout_key=dropout_key,
            padding_mask=padding_mask,
            packed_seq_params=packed,
        )
        return self.final_norm(stack.output(self.layers))

    def _stack_input(
        self,
        x: Array,
        positions: Array,
        keys: Sequence[Array | None],
        padding_mask: Array | None,
        packed: PackedSeqParams | None,
    ) -> StackInput:
        """Return what layers are called with that get ``x``, in whose order the other arrays are, boundaries apart."""
        arrays: dict[str, Any] = {"rotary_pos_emb": self._angles(positions)} | of_experts(padding_mask)
        if packed is None:
            return StackInput(x, keys, arrays, options=self.execution.of_stack(self.config))
        options = self.execution.of_stack(self.config, self._PACKED_MASKS)
        return StackInput(x, keys, arrays | {"packed_seq_params": packed}, options=options)


def _counted(labels: Array, loss_mask: Array | None, options: LossOptions, reduction: Reduction) -> Array | float:
    """Return the weights ``[b, s]`` of tokens that count, or their sum, for the reductions "none" and "sum"; else 1."""
    if reduction == "mean":
        return 1.0

    def weights(labels: Array, loss_mask: Array | None) -> Array:
        each = jnp.where(options.ignored(labels), 0.0, 1.0 if loss_mask is None else loss_mask.astype(jnp.float32))
        return jnp.sum(each) if reduction == "sum" else each

    return auto_region(weights, ("batch", "sequence") if reduction == "none" else ())(labels, loss_mask)
