"""GPT: a decoder-only language model, in its GPT-2 and Llama forms."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.config import TransformerConfig, check_positive
from jax_te.layers import (
    Embedding,
    KVCache,
    Rotary,
    TransformerLayer,
    dropout,
    init_kv_cache,
    keep_in_high_precision,
    make_norm,
    normal_init,
    rotary_embedding,
    scaled_normal_init,
)
from jax_te.layers.parameters import parameter
from jax_te.ops import dense, softmax_cross_entropy
from jax_te.parallel import constrain
from jax_te.recipe import autocast
from jax_te.typing import Array, LogicalAxes

POSITION_EMBEDDINGS = ("learned_absolute", "rope", "none")
"""Kinds of position embedding, in Megatron-Core's words."""

REMAT = ("none", "full", "selective")
"""What backward recomputes: nothing, each layer from its input, or each layer's attention core."""

Cache = tuple[KVCache, ...]
"""One `KVCache` for each layer."""

_AXES: LogicalAxes = ("batch", "sequence", "hidden")


class GPTModel(nnx.Module):
    """Embedding, transformer layers with causal attention, final norm, output head.

    GPT-2's form is ``TransformerConfig``'s defaults with learned positions and a tied head; Llama's is
    ``normalization="RMSNorm"``, ``activation="swiglu"``, ``add_bias_linear=False``, ``num_query_groups``, and here
    ``position_embedding_type="rope"``, ``share_embeddings_and_output_weights=False``.

    The layers' linear operations follow the ambient recipe; embedding, attention core and head stay in the compute
    dtype.

    Args:
        config: sizes and choices of the layers; ``compute_dtype`` is the dtype of activations and logits.
        vocab_size: ``v``.
        max_sequence_length: longest input, and rows of the learned positions.
        position_embedding_type: ``"learned_absolute"``, ``"rope"`` or ``"none"``.
        rotary_base: base of the rotary wavelengths.
        share_embeddings_and_output_weights: the head is the embedding table, transposed. Else a kernel ``[h, v]`` of
            its own.
        remat: ``"none"``; ``"full"``: keep only each layer's input for backward; ``"selective"``: recompute the
            attention core only.
        rngs: the ``params`` stream draws all weights.

    Raises:
        ValueError: for sizes that are not positive and unknown names; when called, for tokens that are not ``[b, s]``
            or too long, and positions that do not fit them.
        TypeError: when called, for tokens that are not integers.
        QuantizerStateError: when called under a recipe with state, if the model was built without it.

    Source: ``megatron.core.models.gpt.GPTModel``; Radford et al. 2019; Touvron et al. 2023; Chen et al. 2016 (remat).

    >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    >>> model = GPTModel(config, vocab_size=100, max_sequence_length=16, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 8), jnp.int32)).shape
    (2, 8, 100)
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: str = "learned_absolute",
        rotary_base: float = 10000.0,
        share_embeddings_and_output_weights: bool = True,
        remat: str = "none",
        rngs: nnx.Rngs,
    ):
        check_positive(vocab_size=vocab_size, max_sequence_length=max_sequence_length)
        if position_embedding_type not in POSITION_EMBEDDINGS:
            raise ValueError(
                f"unknown position_embedding_type {position_embedding_type!r}; "
                f"allowed: {', '.join(POSITION_EMBEDDINGS)}"
            )
        if remat not in REMAT:
            raise ValueError(f"unknown remat {remat!r}; allowed: {', '.join(REMAT)}")
        self.config = config
        self.vocab_size = vocab_size
        self.max_sequence_length = max_sequence_length
        self.position_embedding_type = position_embedding_type
        self.rotary_base = rotary_base
        self.remat = remat
        self.compute_dtype = jnp.dtype(config.compute_dtype)
        h, dtype, init = config.hidden_size, config.params_dtype, normal_init(config.init_method_std)
        self.embedding = Embedding(vocab_size, h, init_method=init, params_dtype=dtype, rngs=rngs)
        self.position_embedding = (
            Embedding(max_sequence_length, h, init_method=init, params_dtype=dtype, axes=(None, "fsdp"), rngs=rngs)
            if position_embedding_type == "learned_absolute"
            else None
        )
        self.layers = nnx.List([transformer_layer(config, i, rngs=rngs) for i in range(config.num_layers)])
        self._rotary(jnp.zeros((1,), jnp.int32))  # raises for a head size or base that cannot be rotated
        self.final_norm = make_norm(
            config.normalization,
            h,
            config.layernorm_epsilon,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            params_dtype=dtype,
            rngs=rngs,
        )
        self.output_kernel = (
            None
            if share_embeddings_and_output_weights
            else parameter(init, rngs, (h, vocab_size), dtype, ("fsdp", "vocab"))
        )

    def __call__(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        dropout_key: Array | None = None,
        cache: Cache | None = None,
    ) -> Array | tuple[Array, Cache]:
        """Logits of the next token at every position.

        Args:
            tokens: integers ``[b, s]`` in ``[0, v)``; one outside turns its sequence's logits to nan.
            positions: integers ``[s]`` or ``[b, s]``. None: 0, 1, 2, …, after what the cache holds.
            dropout_key: turns dropout on; None is evaluation.
            cache: from `init_cache` or an earlier call: the tokens before these.

        Returns:
            ``[b, s, v]`` in the compute dtype, split over batch and vocabulary; with a cache ``(logits, cache with
            these tokens)``.
        """
        self._check(tokens, positions)
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32) + (0 if cache is None else cache[0].length)
        keys = _layer_keys(dropout_key, 1 + len(self.layers))
        with jax.named_scope("GPTModel"):
            x = self._embed(tokens, positions, keys[-1])
            rotary = self._rotary(positions)
            caches = []
            for i, layer in enumerate(self.layers):
                with jax.named_scope(f"layer_{i}"):
                    if cache is not None:
                        x, grown = layer(x, rotary_pos_emb=rotary, dropout_key=keys[i], cache=cache[i])
                        caches.append(grown)
                    else:
                        x = self._run_layer(layer, x, rotary, keys[i])
            logits = self._head(self.final_norm(x))
            return logits if cache is None else (logits, tuple(caches))

    def loss(
        self,
        tokens: Array,
        labels: Array,
        loss_mask: Array | None = None,
        dropout_key: Array | None = None,
    ) -> Array:
        """Mean negative log-likelihood of the labels: fp32 ``[]``.

        Args:
            tokens: integers ``[b, s]``.
            labels: integers ``[b, s]``: the token after each.
            loss_mask: ``[b, s]``, the weight of each token, e.g. 0 for padding. None: all 1. With no weight at all
                the loss is 0.
            dropout_key: turns dropout on.

        Raises:
            ValueError: if the shapes differ.
        """
        for name, array in (("labels", labels), ("loss_mask", loss_mask)):
            if array is not None and array.shape != tokens.shape:
                raise ValueError(f"{name} must have the shape of tokens {tokens.shape}, got {array.shape}")
        logits: Any = self(tokens, dropout_key=dropout_key)
        with jax.named_scope("loss"):
            losses = softmax_cross_entropy(logits, labels, out_axes=("batch", "sequence"))
            if loss_mask is None:
                return jnp.mean(losses)
            weights = constrain(loss_mask.astype(jnp.float32), ("batch", "sequence"))
            total = jnp.sum(weights)
            return jnp.sum(losses * weights) / jnp.where(total > 0.0, total, 1.0)

    def init_cache(self, batch: int, max_len: int) -> Cache:
        """Empty caches for ``max_len`` tokens of ``batch`` sequences, in the compute dtype.

        Raises:
            ValueError: if ``max_len`` exceeds ``max_sequence_length``.
        """
        if max_len > self.max_sequence_length:
            raise ValueError(f"max_len {max_len} exceeds the model's max_sequence_length {self.max_sequence_length}")
        core = self.layers[0].self_attention.core_attention
        return tuple(
            init_kv_cache(batch, max_len, core.num_gqa_groups, core.kv_channels, self.compute_dtype)
            for _ in self.layers
        )

    def _check(self, tokens: Array, positions: Array | None) -> None:
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"tokens must be integers, got {tokens.dtype}")
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [b, s], got shape {tokens.shape}")
        if tokens.shape[1] > self.max_sequence_length:
            raise ValueError(
                f"a sequence of {tokens.shape[1]} tokens exceeds the model's max_sequence_length "
                f"{self.max_sequence_length}; shorten it, or build the model for longer ones"
            )
        if positions is not None and positions.shape not in (tokens.shape, tokens.shape[1:]):
            raise ValueError(f"positions must be [b, s] or [s] for tokens {tokens.shape}, got shape {positions.shape}")

    def _embed(self, tokens: Array, positions: Array, key: Array | None) -> Array:
        x = self.embedding(tokens)
        if self.position_embedding is not None:
            ids_axes = ("sequence",) if positions.ndim == 1 else ("batch", "sequence")
            at = self.position_embedding(positions, ids_axes=ids_axes)
            x = x + (at[None] if positions.ndim == 1 else at)
        x = constrain(x.astype(self.compute_dtype), _AXES)
        return dropout(x, self.config.hidden_dropout, key, axes=_AXES)

    def _rotary(self, positions: Array) -> Rotary | None:
        if self.position_embedding_type != "rope":
            return None
        return rotary_embedding(positions, self.layers[0].self_attention.core_attention.kv_channels, self.rotary_base)

    def _run_layer(self, layer: TransformerLayer, x: Array, rotary: Rotary | None, key: Array | None) -> Any:
        if self.remat == "full":
            # The layer is a pytree argument, so gradients of its parameters and of its quantizer state flow out.
            return jax.checkpoint(_call_layer)(layer, x, rotary, key)
        selective = self.remat == "selective"
        return layer(x, rotary_pos_emb=rotary, dropout_key=key, checkpoint_core_attention=selective)

    def _head(self, x: Array) -> Array:
        kernel = self.embedding.embedding[...].T if self.output_kernel is None else self.output_kernel[...]
        with jax.named_scope("head"):
            return dense(x, kernel, out_axes=("batch", "sequence", "vocab"), kernel_axes=("fsdp", "vocab"))


def transformer_layer(config: TransformerConfig, number: int = 0, *, rngs: nnx.Rngs) -> TransformerLayer:
    """Layer ``number``, from 0, of ``config`` with causal attention.

    Output projections start smaller, see `scaled_normal_init`. One of the first and last layers may be kept in high
    precision, see ``first_last_layers_bf16``.

    >>> config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    >>> transformer_layer(config, rngs=nnx.Rngs(0)).hidden_size
    32
    """
    build = functools.partial(
        TransformerLayer,
        config.hidden_size,
        config.ffn_hidden_size,  # type: ignore[arg-type]  # the config has filled it in
        config.num_attention_heads,
        layernorm_epsilon=config.layernorm_epsilon,
        hidden_dropout=config.hidden_dropout,
        attention_dropout=config.attention_dropout,
        init_method=normal_init(config.init_method_std),
        output_layer_init_method=scaled_normal_init(config.init_method_std, config.num_layers),
        kv_channels=config.kv_channels,
        num_gqa_groups=config.num_query_groups,
        normalization=config.normalization,
        zero_centered_gamma=config.layernorm_zero_centered_gamma,
        activation=config.activation,
        bias=config.add_bias_linear,
        params_dtype=config.params_dtype,
        rngs=rngs,
    )
    if not config.in_high_precision(number):
        return build()
    with autocast(None):
        layer = build()
        keep_in_high_precision(layer)
        return layer


def _call_layer(layer: TransformerLayer, x: Array, rotary: Rotary | None, key: Array | None) -> Any:
    return layer(x, rotary_pos_emb=rotary, dropout_key=key)


def _layer_keys(key: Array | None, count: int) -> list[Array | None]:
    return [None if key is None else jax.random.fold_in(key, i) for i in range(count)]
