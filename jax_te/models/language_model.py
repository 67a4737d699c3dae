"""The parts of language models around their layers: embeddings, head and loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import check_positive
from jax_te.config import TransformerConfig
from jax_te.layers import (
    Embedding,
    GivesKernels,
    Linear,
    QuantizableModule,
    TrainingMode,
    dropout,
    parameter,
    without_adapter,
)
from jax_te.megatron import ActivationDtype
from jax_te.models.from_config import check_config, check_mesh_sizes
from jax_te.models.options import Execution, Multipliers
from jax_te.ops import (
    LinearWeights,
    LossOptions,
    Reduction,
    head_logits,
    linear_cross_entropy,
    softmax_cross_entropy,
    use_backend,
)
from jax_te.quantize import precision_of
from jax_te.sharding import constrain
from jax_te.typing import Array, LogicalAxes


class OutputHead(Linear):
    """The projection to logits of a model with ``config.fp8_output_proj``, whose three GEMMs a recipe quantizes.

    It is a `Linear` with the path ``output_layer``, Megatron's: rules, quantizer state, statistics and cached kernels
    have it as they have any other layer. Without a recipe it computes the same as a model without the option.

    Args:
        config: configuration of the model.
        vocab_size: ``v``.
        bias: whether each call is given a bias ``[v]``.
        own_kernel: whether it has a kernel ``[h, v]``. False: each call is given one.
        rngs: random streams, of which ``params`` draws the kernel.

    Raises:
        ValueError: when called, for a vocabulary that is not a multiple of the recipe's ``alignment``.

    Source: ``TELMHeadColumnParallelLinear`` of Megatron-Core.
    """

    def __init__(
        self, config: TransformerConfig, vocab_size: int, *, bias: bool = False, own_kernel: bool, rngs: nnx.Rngs
    ):
        super().__init__(
            config.hidden_size,
            vocab_size,
            bias,
            init_method=config.init_method,
            sequence_parallel=config.sequence_parallel,
            parallel_mode="column",
            skip_weight_param_allocation=not own_kernel,
            params_dtype=config.params_dtype,
            kernel_axes=("fsdp", "vocab"),
            rngs=rngs,
        )

    def _dense(self, x: Array, weights: LinearWeights) -> Array:
        recipe, size = self.recipe, self.kernel_shape[-1]
        if recipe is None:
            # As in a model without the option, see `LanguageModel._head`.
            with use_backend("xla"):
                return super()._dense(x, weights)
        multiple = precision_of(recipe).alignment
        if size % multiple:
            raise ValueError(
                f"vocab_size {size} is not a multiple of {multiple}, as it must be for fp8_output_proj=True under "
                f"recipe {recipe.name!r}; leave fp8_output_proj out of its config, or build a new model with "
                f"vocab_size={size + -size % multiple}, whose last logits stand for no token"
            )
        return super()._dense(x, weights)


class LanguageModel(GivesKernels, TrainingMode, ActivationDtype):
    """Base of `BertModel`, `GPTModel` and `T5Model`.

    Attributes:
        embedding: table ``[v, h]``.
        position_embedding: table of learned positions, or None.
        output_kernel: the head's kernel ``[h, v]``; None: the embedding table, transposed.
        execution: see `Execution`.
        multipliers: see `Multipliers`; 1 unless they are set.
    """

    output_bias: Any = None
    """Bias of the logits, ``[v]``, if a model has one."""

    output_layer: Any = None
    """The `OutputHead` of a model whose head a recipe quantizes (``config.fp8_output_proj``)."""

    def _configure(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        execution: Execution,
        not_followed: Mapping[str, str] | None = None,
        follows: Collection[str] = (),
    ) -> None:
        """Check and store the arguments that all models have."""
        check_positive(vocab_size=vocab_size, max_sequence_length=max_sequence_length)
        execution.check(config)
        if config.fp8_output_proj and execution.loss_chunks > 1:
            raise ValueError(
                f"loss_chunks={execution.loss_chunks} computes logits in the compute dtype, and fp8_output_proj=True "
                "quantizes the head's GEMMs; build the model with Execution(loss_chunks=1), or leave fp8_output_proj "
                "out of its config"
            )
        if execution.batch_parts > 1 and config.num_moe_experts is not None:
            raise ValueError(
                f"batch_parts={execution.batch_parts} gives each part of the batch to its experts by itself, with a "
                f"loss, counts and capacity of its own, and the config has num_moe_experts={config.num_moe_experts}; "
                "build the model with Execution(batch_parts=1)"
            )
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

    def _make_embeddings(self, *, learned_positions: bool, first_position: int = 0, rngs: nnx.Rngs) -> None:
        config, rows = self.config, first_position + self.max_sequence_length
        h, init, dtype = config.hidden_size, config.init_method, config.params_dtype
        self.embedding = Embedding(self.vocab_size, h, init_method=init, params_dtype=dtype, rngs=rngs)
        self.position_embedding = (
            Embedding(rows, h, init_method=init, params_dtype=dtype, axes=(None, "fsdp"), rngs=rngs)
            if learned_positions
            else None
        )

    def _make_head(self, *, tied: bool, rngs: nnx.Rngs) -> None:
        config, shape = self.config, (self.config.hidden_size, self.vocab_size)
        self.output_kernel = (
            None if tied else parameter(config.init_method, rngs, shape, config.params_dtype, ("fsdp", "vocab"))
        )
        self._make_output_layer(rngs)

    def _make_output_layer(self, rngs: nnx.Rngs, *, bias: bool = False) -> None:
        if self.config.fp8_output_proj:
            # Without a kernel of its own: parameters have the same names with and without the option.
            self.output_layer = OutputHead(self.config, self.vocab_size, bias=bias, own_kernel=False, rngs=rngs)

    def _embed(self, tokens: Array, positions: Array, key: Array | None) -> Array:
        """Return ``[b, s, h]`` for tokens ``[b, s]`` and positions ``[s]`` or ``[b, s]``, after dropout."""
        return self._dropout(self._embedded(tokens, positions), key, zigzag=self.config.cp_load_balanced)

    def _embedded(self, tokens: Array, positions: Array, *others: Array) -> Array:
        """Return ``[b, s, h]`` for tokens ``[b, s]`` and positions ``[s]`` or ``[b, s]``, and others added."""
        # A model may be built without a mesh and called on one, so the size is checked again.
        check_mesh_sizes(self.config)
        x = _times(self.embedding(tokens), self.multipliers.embedding)
        if self.position_embedding is not None:
            ids_axes = ("sequence",) if positions.ndim == 1 else ("batch", "sequence")
            at = self.position_embedding(positions, ids_axes=ids_axes)
            # Added in params_dtype and cast once after the sum: one rounding to the compute dtype, not two.
            x = x + (at[None] if positions.ndim == 1 else at)
        x = sum(others, x)
        return constrain(x.astype(self.compute_dtype), self._axes)

    def _dropout(self, x: Array, key: Array | None, *, zigzag: bool = False) -> Array:
        """Apply the config's ``hidden_dropout`` to activations ``[b, s, h]``."""
        rate = self.config.hidden_dropout
        key = self.used_dropout_key(key, hidden_dropout=rate)
        return dropout(x, rate, key, axes=self._axes, zigzag=zigzag)

    def _head_kernel(self) -> Array:
        """Return the kernel ``[h, v]`` of the output head: a tied one is the embedding's."""
        return self.embedding.embedding[...].T if self.output_kernel is None else self.output_kernel[...]

    def given_kernels(self) -> list[tuple[QuantizableModule, str, Array]]:
        """Return the layers that receive a kernel of the model in calls, its name there and its value."""
        base = without_adapter(self.output_layer) if self.config.fp8_output_proj else None
        return [] if base is None or base.kernel is not None else [(base, "kernel", self._head_kernel())]

    def _head(self, x: Array) -> Array:
        """Return the logits ``[b, s, v]`` of hidden states ``[b, s, h]``."""
        with jax.named_scope("head"):
            logits = self._logits(_times(x, self.multipliers.head))
            cap = self.multipliers.softcap
            # In fp32: half precision would round logits once more before the tangent, and so tie some.
            return logits if cap is None else (cap * jnp.tanh(logits.astype(jnp.float32) / cap)).astype(logits.dtype)

    def _logits(self, x: Array) -> Array:
        bias = None if self.output_bias is None else self.output_bias[...]
        if self.config.fp8_output_proj:
            head: Any = self.output_layer
            own = without_adapter(head).kernel is not None
            return head(x, None if own else self._head_kernel(), bias)
        if self.output_kernel is None:
            return head_logits(x, self.embedding.embedding[...], bias, axes=self._axes, tied=True)
        return head_logits(x, self.output_kernel[...], bias, axes=self._axes, tied=False)

    def _loss(
        self, x: Array, labels: Array, weights: Array | None, options: LossOptions, reduction: Reduction
    ) -> Array:
        """Return the loss of hidden states ``[b, s, h]``; that of each token ``[b, s]`` for the reduction "none"."""
        axes, chunks = ("batch", "sequence"), self.execution.loss_chunks
        with jax.named_scope("loss"):
            if chunks == 1:
                return softmax_cross_entropy(
                    self._head(x), labels, weights=weights, options=options, reduction=reduction, out_axes=axes
                )
            if self.multipliers.softcap is not None or self.output_bias is not None:
                raise ValueError(
                    f"loss_chunks={chunks} computes logits without softcap and bias, and the model's have one; build "
                    "it with Execution(loss_chunks=1)"
                )
            # All-gathered over tensor shards before the loop over chunks, which would otherwise do it in every
            # iteration.
            x = _times(constrain(x, (*axes, "hidden")), self.multipliers.head)
            return linear_cross_entropy(
                x,
                self._head_kernel(),
                labels,
                chunks=chunks,
                weights=weights,
                options=options,
                reduction=reduction,
                out_axes=axes,
            )


def _times(x: Array, factor: float) -> Array:
    # In the dtype of x, the factor rounded to it, as where these factors come from.
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)
