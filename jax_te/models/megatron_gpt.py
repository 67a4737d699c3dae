"""GPT made of Megatron's modules, under Megatron-Core's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.config.internal import checked
from jax_te.layers import Embedding, LinearScaling, Llama3Scaling, Rotary
from jax_te.layers.internal import parameter
from jax_te.megatron import (
    GraphableMegatronModule,
    MegatronModule,
    TENorm,
    TransformerLayer,
    apply_quantization_config,
)
from jax_te.megatron.internal import check_groups
from jax_te.models.gpt import Cache, GPTModel
from jax_te.models.options import Execution, RotaryPositions
from jax_te.models.stack import run_layers
from jax_te.sharding import constrain
from jax_te.typing import Array

_EXECUTION = Execution()
_FOLLOWED = ("quant_recipe", "cuda_graph_impl", "disable_parameter_transpose_cache")
_CACHE = "give cache=model.init_cache(batch, length)"
_FIXED: dict[str, tuple[Any, str]] = {
    "pre_process": (True, "no module is one stage of a pipeline, so the model has its embedding"),
    "post_process": (True, "no module is one stage of a pipeline, so the model has its head"),
    "fp16_lm_cross_entropy": (False, "the loss is in fp32"),
    "logit_dtype": (None, "logits are in config.compute_dtype"),
    "scatter_embedding_sequence_parallel": (True, "config.sequence_parallel says how activations are sharded"),
    "mtp_block_spec": (None, "there is no multi-token prediction"),
    "decoder_input": (None, "call model.decoder with hidden states"),
    "input_tensor": (None, "no module is one stage of a pipeline; call model.decoder with hidden states"),
    "inference_context": (None, _CACHE),
    "inference_params": (None, _CACHE),
    "packed_seq_params": (None, "jax_te.megatron.TransformerLayer takes it"),
    "extra_block_kwargs": (None, "the layers take no other arguments"),
    "padding_mask": (None, "it is for experts, which the model has not"),
    "output_processor": (None, "call the model without labels, and process its logits"),
    "output_processor_context": (None, "it is for an output_processor"),
}
"""Arguments of Megatron's that have one value here, and why."""


class LanguageModelEmbedding(MegatronModule):
    """Tables ``word_embeddings [v, h]`` and, for learned positions, ``position_embeddings``.

    Source: ``megatron.core.models.common.embeddings.LanguageModelEmbedding``.
    """

    megatron_names = True

    def __init__(
        self, config: TransformerConfig, vocab_size: int, max_sequence_length: int, learned: bool, *, rngs: nnx.Rngs
    ):
        super().__init__(config)
        common: Any = {"init_method": config.init_method, "params_dtype": config.params_dtype, "rngs": rngs}
        self.word_embeddings = Embedding(vocab_size, config.hidden_size, **common)
        self.position_embeddings = (
            Embedding(max_sequence_length, config.hidden_size, axes=(None, "fsdp"), **common) if learned else None
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
    """The ``layers`` and ``final_layernorm`` of a `MegatronGPTModel`.

    Source: ``megatron.core.transformer.transformer_block.TransformerBlock``.
    """

    megatron_names = True

    def __init__(
        self, config: TransformerConfig, layer_class: type[TransformerLayer], execution: Execution, *, rngs: nnx.Rngs
    ):
        super().__init__(config)
        self.execution = execution
        self.layers = nnx.List([layer_class(config, number + 1, rngs=rngs) for number in range(config.num_layers)])
        self.final_layernorm = TENorm(config, config.hidden_size, config.layernorm_epsilon)

    def __call__(
        self,
        hidden_states: Array,
        attention_mask: None = None,
        rotary_pos_emb: Rotary | tuple[Rotary, Rotary] | None = None,
        *,
        keys: Sequence[Array | None] | None = None,
    ) -> Array:
        """Return the head's input ``[b, s, h]``; ``keys`` turn each layer's dropout on."""
        del attention_mask  # the layers are causal
        keys = [None] * len(self.layers) if keys is None else keys
        how: Any = {"policy": self.execution.recompute_policy, "scan": self.execution.scan_layers}
        x = run_layers(self.layers, hidden_states, keys, recompute=self.config, rotary_pos_emb=rotary_pos_emb, **how)
        return self.final_layernorm(x)


class OutputLayer(MegatronModule):
    """The head's kernel ``[h, v]``; None if the head is tied to the embedding. No recipe quantizes it.

    Source: ``megatron.core.tensor_parallel.ColumnParallelLinear``.
    """

    megatron_names = True

    def __init__(self, config: TransformerConfig, vocab_size: int, tied: bool, *, rngs: nnx.Rngs):
        super().__init__(config)
        shape, dtype = (config.hidden_size, vocab_size), config.params_dtype
        self.kernel = None if tied else parameter(config.init_method, rngs, shape, dtype, ("fsdp", "vocab"))


@checked
class MegatronGPTModel(GPTModel, GraphableMegatronModule):
    """`GPTModel` made of Megatron's modules, with Megatron-Core's arguments, names and checkpoints.

    ``model.decoder.layers[0].self_attention.linear_qkv`` is a `TELayerNormColumnParallelLinear`, and `state_dict`,
    `load_state_dict` and `sharded_state_dict` have Megatron-Core's names and layouts
    (``decoder.layers.0.self_attention.linear_qkv.weight``, ``[out, in]``, group by group). Values, initial ones
    included, are those of a `GPTModel`, and so are the methods ``loss``, ``max_logits``, ``clip_qk``, ``init_cache``.

    The ``config`` says what is recomputed, and what is captured: see `GraphableMegatronModule`. Its ``quant_recipe`` is
    applied to the layers by Megatron's names.

    Args:
        config: as in `GPTModel`. With ``fp8`` or ``fp4`` build and call the model inside of
            ``autocast(recipe_from_config(config))``.
        transformer_layer_spec: the class of the layers: `jax_te.megatron.TransformerLayer`, or one derived from it.
            None: `TransformerLayer`. Megatron's takes a ``ModuleSpec``.
        vocab_size, max_sequence_length: as in `GPTModel`.
        pre_process, post_process: True: the model has its embedding and its head. (Pipeline stages have not.)
        fp16_lm_cross_entropy: False: the loss is in fp32.
        logit_dtype: None: logits are in the compute dtype.
        parallel_output: False: logits are whole on every tensor rank.
        share_embeddings_and_output_weights: as in `GPTModel`, but False unless given, as in Megatron.
        position_embedding_type: ``"learned_absolute"``, ``"rope"`` or ``"none"``.
        rotary_percent, rotary_base: of ``"rope"``, see `RotaryPositions`.
        rope_scaling, rope_scaling_factor: Llama 3.1's scaling, see `Llama3Scaling`.
        scatter_embedding_sequence_parallel: True.
        seq_len_interpolation_factor: divides positions, see `LinearScaling`.
        mtp_block_spec, pg_collection: None.
        vp_stage: stored, without effect.
        execution: as in `GPTModel`.
        rngs: the ``params`` stream draws all weights.

    Raises:
        ValueError: for an argument that differs from what is said above; as `GPTModel`.
        TypeError: for a ``transformer_layer_spec`` that is no such class.

    Source: ``megatron.core.models.gpt.GPTModel``.

    >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    >>> model = MegatronGPTModel(config, None, 100, 16, rngs=nnx.Rngs(0))
    >>> model.decoder.layers[0].self_attention.linear_qkv
    TELayerNormColumnParallelLinear(in_features=32, out_features=96, bias=True, TP=1)
    >>> tokens = jnp.zeros((2, 8), jnp.int32)
    >>> model(tokens).shape, model(tokens, labels=tokens).shape
    ((2, 8, 100), (2, 8))
    """

    megatron_names = True

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: type[TransformerLayer] | None,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        logit_dtype: None = None,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        mtp_block_spec: None = None,
        pg_collection: None = None,
        vp_stage: int | None = None,
        *,
        execution: Execution = _EXECUTION,
        rngs: nnx.Rngs,
    ):
        GraphableMegatronModule.__init__(self, config, vp_stage)
        layer_class = TransformerLayer if transformer_layer_spec is None else transformer_layer_spec
        if not (isinstance(layer_class, type) and issubclass(layer_class, TransformerLayer)):
            raise TypeError(
                "transformer_layer_spec must be None, jax_te.megatron.TransformerLayer or a class derived from it, got "
                f"{layer_class!r}; a derived class builds other submodules, which a ModuleSpec would name"
            )
        _check_fixed({name: value for name, value in locals().items() if name in _FIXED})
        if rope_scaling and seq_len_interpolation_factor is not None:
            raise ValueError("rope_scaling and seq_len_interpolation_factor both scale rotation; give one of the two")
        check_groups(pg_collection)
        self._configure(config, vocab_size, max_sequence_length, execution, follows=_FOLLOWED)
        self.pre_process, self.post_process, self.parallel_output = True, True, parallel_output
        self.position_embedding_type = position_embedding_type
        self.share_embeddings_and_output_weights = tied = share_embeddings_and_output_weights
        scaling: Any = Llama3Scaling(factor=rope_scaling_factor) if rope_scaling else None
        if seq_len_interpolation_factor is not None:
            scaling = LinearScaling(factor=seq_len_interpolation_factor)
        rope, learned = (position_embedding_type == name for name in ("rope", "learned_absolute"))
        self.rotary = RotaryPositions(float(rotary_base), rotary_percent, scaling) if rope else None
        # The order of the lines below is that of `GPTModel`, so that the same ``rngs`` draw the same weights.
        self.embedding = LanguageModelEmbedding(config, vocab_size, max_sequence_length, learned, rngs=rngs)
        self.decoder = TransformerBlock(config, layer_class, execution, rngs=rngs)
        self._angles(jnp.zeros((1,), jnp.int32))  # raises for a head size or base that cannot be rotated
        self.output_layer = OutputLayer(config, vocab_size, tied, rngs=rngs)
        if config.quant_recipe is not None:
            apply_quantization_config(self, config.quant_recipe)

    # The names under which GPTModel knows the modules.
    layers = property(lambda self: self.decoder.layers)
    final_norm = property(lambda self: self.decoder.final_layernorm)
    position_embedding = property(lambda self: self.embedding.position_embeddings)
    output_kernel = property(lambda self: self.output_layer.kernel)

    def _decode(self, x: Array, positions: Array, keys: Sequence[Array | None]) -> Array:
        return self.decoder(x, rotary_pos_emb=self._angles(positions), keys=keys)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return `forward`'s results, perhaps those of a captured graph, see `GraphableMegatronModule`."""
        return GraphableMegatronModule.__call__(self, *args, **kwargs)

    def forward(
        self,
        input_ids: Array,
        position_ids: Array | None = None,
        attention_mask: Array | None = None,
        decoder_input: None = None,
        labels: Array | None = None,
        *,
        runtime_gather_output: bool | None = None,
        dropout_key: Array | None = None,
        cache: Cache | None = None,
        **others: Any,
    ) -> Any:
        """Return logits, or the losses of the labels.

        Args:
            input_ids: integers ``[b, s]``.
            position_ids: ``[s]`` or ``[b, s]``; None: 0, 1, 2, …. They also rotate, where Megatron's rotation counts
                positions by itself.
            attention_mask: without effect: the layers are causal, as in Megatron.
            labels: integers ``[b, s]``.
            runtime_gather_output: True: logits whole on every tensor rank. None: as ``parallel_output`` says.
            dropout_key: turns dropout on; None is evaluation.
            cache: as in `GPTModel`; ``inference_context`` is Megatron's way.
            decoder_input, others: Megatron's other arguments, None; ``loss_mask`` has no effect, as in Megatron, where
                the caller weights the losses. `GPTModel.loss` takes weights.

        Returns:
            Logits ``[b, s, v]``, with a ``cache`` ``(logits, cache)``; with ``labels`` losses, fp32 ``[b, s]``.

        Raises:
            ValueError: for an argument that must be None; as `GPTModel`.
            TypeError: for an argument that Megatron has not.
        """
        others.pop("loss_mask", None)
        _check_fixed({**others, "decoder_input": decoder_input})
        if labels is not None:
            return self.loss(input_ids, labels, None, dropout_key, reduction="none", positions=position_ids)
        out = GPTModel.__call__(self, input_ids, positions=position_ids, dropout_key=dropout_key, cache=cache)
        if not (runtime_gather_output or (runtime_gather_output is None and not self.parallel_output)):
            return out
        logits, *more = out if isinstance(out, tuple) else (out,)
        logits = constrain(logits, ("batch", "sequence", None))
        return (logits, *more) if more else logits

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Check that no stage of a pipeline comes before this model.

        Args:
            input_tensor: None or ``[None]``, as Megatron's schedules give to a first stage.

        Raises:
            ValueError: for an array: the model is no later stage of a pipeline.
        """
        _check_fixed({"input_tensor": input_tensor[0] if isinstance(input_tensor, list) else input_tensor})

    def get_layer_static_inputs(self, seq_length: int, micro_batch_size: int) -> dict[str, Array]:
        """Return ``input_ids`` of zeros, int32 ``[b, s]``."""
        tokens = jnp.zeros((micro_batch_size, seq_length), jnp.int32)
        return {"input_ids": constrain(tokens, ("batch", "sequence"))}

    def _get_te_cuda_graph_replay_args(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a graph, tokens first."""
        first = (kwargs.pop("input_ids"),) if "input_ids" in kwargs else ()
        return super()._get_te_cuda_graph_replay_args(*first, *args, **kwargs)


def _check_fixed(given: dict[str, Any]) -> None:
    """Raise for arguments of Megatron's that have another value than the one that the model takes."""
    for name, value in given.items():
        if name not in _FIXED:
            raise TypeError(f"unexpected argument {name!r}; Megatron's are also {', '.join(_FIXED)}")
        fixed, why = _FIXED[name]
        if value is not fixed:
            raise ValueError(f"{name} must be {fixed}, got {value!r}: {why}")
