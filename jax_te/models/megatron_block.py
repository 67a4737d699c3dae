"""Parts of a `MegatronGPTModel`: embeddings, a block of layers and a head, under Megatron-Core's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.layers import Embedding, PackedSeqParams, Rotary, parameter
from jax_te.megatron import MegatronModule, TENorm, TransformerLayer
from jax_te.models.options import Execution
from jax_te.models.stack import StackInput, of_experts
from jax_te.typing import Array


class LanguageModelEmbedding(MegatronModule):
    """Tables ``word_embeddings [v, h]`` and, for learned positions, ``position_embeddings``.

    Source: ``megatron.core.models.common.embeddings.LanguageModelEmbedding``.
    """

    def __init__(
        self, config: TransformerConfig, vocab_size: int, max_sequence_length: int, learned: bool, *, rngs: nnx.Rngs
    ):
        super().__init__(config)
        h, init, dtype = config.hidden_size, config.init_method, config.params_dtype
        self.word_embeddings = Embedding(vocab_size, h, init_method=init, params_dtype=dtype, rngs=rngs)
        self.position_embeddings = (
            Embedding(max_sequence_length, h, init_method=init, params_dtype=dtype, axes=(None, "fsdp"), rngs=rngs)
            if learned
            else None
        )

    def __call__(self, input_ids: Array, position_ids: Array | None = None) -> Array:
        """Return ``[b, s, h]`` of tokens ``[b, s]``; of learned positions ``[b, s]`` the sum, if they are given."""
        x = self.word_embeddings(input_ids)
        if position_ids is None or self.position_embeddings is None:
            return x
        return x + self.position_embeddings(position_ids)

    # The name under which LanguageModel knows the table.
    embedding = property(lambda self: self.word_embeddings.embedding)


class TransformerBlock(MegatronModule):
    """The ``layers`` of a `MegatronGPTModel`, those with ``numbers``, and its last stage's ``final_layernorm``.

    Source: ``megatron.core.transformer.transformer_block.TransformerBlock``.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_class: type[TransformerLayer],
        execution: Execution,
        numbers: range,
        post_layer_norm: bool,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(config)
        self.execution, self.first_layer = execution, numbers.start
        # Layers of other stages are drawn, too, so that each stage has the weights that the whole model would have.
        layers = (layer_class(config, number + 1, rngs=rngs) for number in range(config.num_layers))
        self.layers = nnx.List([layer for number, layer in enumerate(layers) if number in numbers])
        epsilon = config.layernorm_epsilon
        self.final_layernorm = TENorm(config, config.hidden_size, epsilon) if post_layer_norm else None

    def __call__(
        self,
        hidden_states: Array,
        attention_mask: None = None,
        rotary_pos_emb: Rotary | tuple[Rotary, Rotary] | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        keys: Sequence[Array | None] | None = None,
        padding_mask: Array | None = None,
    ) -> Array:
        """Return the head's or the next stage's input ``[b, s, h]``.

        Args:
            hidden_states: ``[b, s, h]``.
            attention_mask: None: the layers are causal.
            rotary_pos_emb: rotary embedding, see `rotary_of`.
            packed_seq_params: boundaries of several sequences in each row, see `jax_te.models.GPTModel`.
            keys: dropout key of each layer. None: no layer drops anything.
            padding_mask: bool ``[b, s]``, see `jax_te.layers.TransformerLayer`.
        """
        del attention_mask  # the layers are causal
        arrays: dict[str, Any] = {"rotary_pos_emb": rotary_pos_emb} | of_experts(padding_mask)
        if packed_seq_params is not None:
            arrays["packed_seq_params"] = packed_seq_params
        stack = StackInput(hidden_states, keys, arrays, options=self.execution.of_stack(self.config))
        x = stack.output(self.layers)
        return x if self.final_layernorm is None else self.final_layernorm(x)


class OutputLayer(MegatronModule):
    """The head's kernel ``[h, v]``; None if the head is tied to the embedding. No recipe quantizes it.

    With ``config.fp8_output_proj`` an `OutputHead` replaces it.

    Source: ``megatron.core.tensor_parallel.ColumnParallelLinear``.
    """

    megatron_layout = True  # it has a kernel of its own, and no layer

    def __init__(self, config: TransformerConfig, vocab_size: int, tied: bool, *, rngs: nnx.Rngs):
        super().__init__(config)
        shape, dtype = (config.hidden_size, vocab_size), config.params_dtype
        self.kernel = None if tied else parameter(config.init_method, rngs, shape, dtype, ("fsdp", "vocab"))
