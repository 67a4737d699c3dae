"""What language models have around their layers: embeddings in front, a head and a loss behind."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.config.internal import check_positive
from jax_te.layers import Embedding, LayerNorm, RMSNorm, dropout, make_norm
from jax_te.layers.internal import check_context_size, parameter
from jax_te.models.from_config import check_config
from jax_te.models.options import Execution, Multipliers
from jax_te.ops import LinearOptions, LossOptions, dense, linear_cross_entropy, softmax_cross_entropy
from jax_te.sharding import constrain
from jax_te.typing import Array, LogicalAxes


class LanguageModel(nnx.Module):
    """Base of `BertModel`, `GPTModel` and `T5Model`.

    Attributes:
        embedding: table ``[v, h]``.
        position_embedding: table of learned positions, or None.
        output_kernel: the head's kernel ``[h, v]``; None: the embedding table, transposed.
        execution: see `Execution`.
        multipliers: see `Multipliers`; 1 unless they are set.
    """

    output_bias: Any = None
    """Added to the logits, ``[v]``, where a model has it."""

    def _configure(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        execution: Execution,
        not_followed: Mapping[str, str] | None = None,
        follows: Collection[str] = (),
    ) -> None:
        """Check the arguments that all models have, and keep them."""
        check_positive(vocab_size=vocab_size, max_sequence_length=max_sequence_length)
        execution.check(config)
        check_config(config, also=not_followed, follows=follows)
        self.config = config
        self.vocab_size = vocab_size
        self.max_sequence_length = max_sequence_length
        self.execution = execution
        self.multipliers = Multipliers()
        self.compute_dtype = jnp.dtype(config.compute_dtype)  # type: ignore[arg-type]  # the config has filled it in
        # Logical axes of the activations between the layers.
        self._axes: LogicalAxes = (
            "batch",
            "sequence_parallel" if config.sequence_parallel else "sequence",
            "hidden",
        )

    def _make_embeddings(self, *, learned_positions: bool, rngs: nnx.Rngs) -> None:
        config, rows = self.config, self.max_sequence_length
        h, init, dtype = config.hidden_size, config.init_method, config.params_dtype
        self.embedding = Embedding(self.vocab_size, h, init_method=init, params_dtype=dtype, rngs=rngs)
        self.position_embedding = (
            Embedding(rows, h, init_method=init, params_dtype=dtype, axes=(None, "fsdp"), rngs=rngs)
            if learned_positions
            else None
        )

    def _make_norm(self, rngs: nnx.Rngs) -> LayerNorm | RMSNorm:
        config = self.config
        return make_norm(
            config.normalization,
            config.hidden_size,
            config.layernorm_epsilon,
            sequence_parallel=config.sequence_parallel,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            params_dtype=config.params_dtype,
            rngs=rngs,
        )

    def _make_head(self, *, tied: bool, rngs: nnx.Rngs) -> None:
        config, shape = self.config, (self.config.hidden_size, self.vocab_size)
        self.output_kernel = (
            None if tied else parameter(config.init_method, rngs, shape, config.params_dtype, ("fsdp", "vocab"))
        )

    def _embed(self, tokens: Array, positions: Array, key: Array | None, *others: Array) -> Array:
        """Return ``[b, s, h]`` for tokens ``[b, s]`` and positions ``[s]`` or ``[b, s]``, and others added."""
        # A model may be built without a mesh and called on one, so the size is checked again.
        check_context_size(self.config.context_parallel_size)
        x = _times(self.embedding(tokens), self.multipliers.embedding)
        if self.position_embedding is not None:
            ids_axes = ("sequence",) if positions.ndim == 1 else ("batch", "sequence")
            at = self.position_embedding(positions, ids_axes=ids_axes)
            # Added in params_dtype and cast once behind the sum: one rounding to the compute dtype, not two.
            x = x + (at[None] if positions.ndim == 1 else at)
        x = sum(others, x)
        x = constrain(x.astype(self.compute_dtype), self._axes)
        zigzag = self.config.cp_load_balanced
        return dropout(x, self.config.hidden_dropout, key, axes=self._axes, zigzag=zigzag)

    def _head_kernel(self) -> Array:
        return self.embedding.embedding[...].T if self.output_kernel is None else self.output_kernel[...]

    def _head(self, x: Array) -> Array:
        """Return the logits ``[b, s, v]`` of hidden states ``[b, s, h]``."""
        with jax.named_scope("head"):
            # Not "sequence_parallel": the tensor axis shards the vocabulary here, and cannot shard rows, too.
            logits = dense(
                _times(x, self.multipliers.head),
                self._head_kernel(),
                None if self.output_bias is None else self.output_bias[...],
                options=LinearOptions(
                    x_axes=self._axes, kernel_axes=("fsdp", "vocab"), out_axes=("batch", "sequence", "vocab")
                ),
                # TE's GEMM would read a transposed copy of a tied table and write its gradient transposed, which the
                # embedding's gradient and the optimizer would copy; XLA's reads and writes it as it is.
                backend="xla",
            )
            cap = self.multipliers.softcap
            # In fp32: half precision would round logits once more before the tangent, and so tie some.
            return logits if cap is None else (cap * jnp.tanh(logits.astype(jnp.float32) / cap)).astype(logits.dtype)

    def _loss(self, x: Array, labels: Array, weights: Array | None, options: LossOptions, reduction: str) -> Array:
        """Return the loss of hidden states ``[b, s, h]``; that of each token ``[b, s]`` for the reduction "none"."""
        axes, chunks = ("batch", "sequence"), self.execution.loss_chunks
        common = {"weights": weights, "options": options, "reduction": reduction, "out_axes": axes}
        with jax.named_scope("loss"):
            if chunks == 1:
                return softmax_cross_entropy(self._head(x), labels, **common)
            if self.multipliers.softcap is not None or self.output_bias is not None:
                raise ValueError(
                    f"loss_chunks={chunks} computes logits without softcap and bias, and the model's have one; build "
                    "it with Execution(loss_chunks=1)"
                )
            # All-gathered over tensor shards before the loop over chunks, which would else do it in every step.
            x = _times(constrain(x, (*axes, "hidden")), self.multipliers.head)
            return linear_cross_entropy(x, self._head_kernel(), labels, chunks=chunks, **common)


def _times(x: Array, factor: float) -> Array:
    # In the dtype of x, the factor rounded to it, as where these factors come from.
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)
