"""GPT composed of Megatron's modules, under Megatron-Core's names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx

from jax_te._validation import checked, log_once
from jax_te.config import MLATransformerConfig, TransformerConfig
from jax_te.layers import LinearScaling, Llama3Scaling, PackedSeqParams, StepState, without_adapter
from jax_te.megatron import GraphableMegatronModule, TransformerLayer, apply_quantization_config
from jax_te.models.gpt import Cache, GPTModel
from jax_te.models.language_model import OutputHead
from jax_te.models.megatron_block import LanguageModelEmbedding, OutputLayer, TransformerBlock
from jax_te.models.multi_token import MultiTokenPrediction
from jax_te.models.options import Execution, RotaryPositions, rotary_positions
from jax_te.models.stack import MaskTypes, StackInput, layer_keys
from jax_te.models.tokens import caller_order, model_order, natural_positions
from jax_te.ops import LossOptions
from jax_te.sharding import constrain
from jax_te.typing import Array, Key, NoProcessGroups, Words

_EXECUTION = Execution()
_FOLLOWED = ("quant_recipe", "cuda_graph_impl", "disable_parameter_transpose_cache", "moe_enable_routing_replay")
_ROPE_SCALING_FACTOR = 8.0
_CACHE = "give cache=model.init_cache(batch, length)"
_LOGITS = Words("None", "logits are in config.compute_dtype", ValueError)
_FIXED: dict[str, tuple[Any, str]] = {
    "fp16_lm_cross_entropy": (False, "the loss is in fp32"),
    "scatter_embedding_sequence_parallel": (True, "config.sequence_parallel says how activations are sharded"),
    "inference_context": (None, _CACHE),
    "inference_params": (None, _CACHE),
    "extra_block_kwargs": (None, "the layers take no other arguments"),
    "output_processor": (None, "call the model without labels, and process its logits"),
    "output_processor_context": (None, "it is for an output_processor"),
}
"""Megatron's arguments with only one allowed value here, and the reason."""


class StageInput(StepState):
    """NNX Variable: the hidden states ``[b, s, h]`` that a stage's next call takes; None: they were taken."""


@checked
class MegatronGPTModel(GPTModel, GraphableMegatronModule):
    """`GPTModel` composed of Megatron's modules, with Megatron-Core's arguments, names and checkpoints.

    ``model.decoder.layers[0].self_attention.linear_qkv`` is a `TELayerNormColumnParallelLinear`, and `state_dict`,
    `load_state_dict` and `sharded_state_dict` have Megatron-Core's names and layouts
    (``decoder.layers.0.self_attention.linear_qkv.weight``, ``[out, in]``, group by group). Values, initial ones
    included, are those of a `GPTModel`, and so are the methods ``loss``, ``max_logits``, ``clip_qk``, ``init_cache``.

    The ``config`` determines recomputation and captured graphs: see `GraphableMegatronModule`. Its ``quant_recipe`` is
    applied to the layers by Megatron's names.

    Args:
        config: see `GPTModel`. With ``fp8`` or ``fp4`` build and call the model inside of
            ``autocast(recipe_from_config(config))``.
        transformer_layer_spec: the class of the layers: `jax_te.megatron.TransformerLayer`, or one derived from it.
            None: `TransformerLayer`. Megatron's takes a ``ModuleSpec``.
        vocab_size, max_sequence_length: see `GPTModel`.
        pre_process, post_process: whether it has the embedding, and the head with the norm before it. A stage of a
            pipeline that lacks one of them is for schedules of your own, see below.
        fp16_lm_cross_entropy: must be False: the loss is in fp32.
        logit_dtype: None: logits are in the compute dtype.
        parallel_output: whether logits stay split over the tensor axis; False: whole on every tensor rank.
        share_embeddings_and_output_weights: see `GPTModel`, but False by default, as in Megatron.
        position_embedding_type: ``"learned_absolute"``, ``"rope"`` or ``"none"``; an `MLATransformerConfig` rotates as
            its fields say in any case.
        rotary_percent, rotary_base: options of ``"rope"``, see `RotaryPositions`. Without it they have no effect, which
            is logged once for values other than the default.
        rope_scaling, rope_scaling_factor: scaling of Llama 3.1, see `Llama3Scaling`. Megatron ignores a factor without
            ``rope_scaling``.
        scatter_embedding_sequence_parallel: option that must be True.
        seq_len_interpolation_factor: divisor of the positions, see `LinearScaling`.
        mtp_block_spec: class of the transformer layers of ``config.mtp_num_layers``. None: the class of the others.
        pg_collection: None.
        vp_stage: option without effect, stored as an attribute; ``stage_layers`` says which layers the stage has.
        execution: see `GPTModel`.
        stage_layers: numbers of the layers of a stage, from 0: ``range(6, 12)``. None: all. Megatron reads them off its
            process groups, of which JAX has none; `jax_te.training.pipeline.split_layers` counts them.
        rngs: random streams, of which ``params`` draws all weights.

    Raises:
        ValueError: for an argument with a value other than described above; for ``rope_scaling`` and
            ``seq_len_interpolation_factor`` without ``"rope"``, and a ``rope_scaling_factor`` without ``rope_scaling``;
            for ``stage_layers`` outside of the stack, or that do not begin or end where the embedding and the head are;
            for a tied head without the embedding; see also `GPTModel`.
        TypeError: for a ``transformer_layer_spec`` that is not such a class.

    Source: ``megatron.core.models.gpt.GPTModel``.

    `jax_te.training.make_train_step` takes a whole model and makes the stages by itself. A stage that is built as such
    has the weights, dropout masks and names of its part of the whole model, so that its `state_dict` is a part of that
    model's, too. It takes ``decoder_input``, or what `set_input_tensor` was given, and gives hidden states
    ``[b, s, h]``, or logits if it is the last.

    >>> config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    >>> model = MegatronGPTModel(config, None, 100, 16, rngs=nnx.Rngs(0))
    >>> model.decoder.layers[0].self_attention.linear_qkv
    TELayerNormColumnParallelLinear(in_features=32, out_features=96, bias=True, TP=1)
    >>> tokens = jnp.zeros((2, 8), jnp.int32)
    >>> model(tokens).shape, model(tokens, labels=tokens).shape
    ((2, 8, 100), (2, 8))
    >>> first, last = (
    ...     MegatronGPTModel(config, None, 100, 16, n == 0, n == 1, stage_layers=range(n, n + 1), rngs=nnx.Rngs(0))
    ...     for n in (0, 1)
    ... )
    >>> bool(jnp.all(last(decoder_input=first(tokens)) == model(tokens)))
    True
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: type[TransformerLayer] | None,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        logit_dtype: Annotated[None, _LOGITS] = None,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = _ROPE_SCALING_FACTOR,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        mtp_block_spec: type[TransformerLayer] | None = None,
        pg_collection: NoProcessGroups = None,
        vp_stage: int | None = None,
        *,
        execution: Execution = _EXECUTION,
        stage_layers: range | None = None,
        rngs: nnx.Rngs,
    ):
        GraphableMegatronModule.__init__(self, config, vp_stage)
        layer_class = TransformerLayer if transformer_layer_spec is None else transformer_layer_spec
        _check_fixed(
            fp16_lm_cross_entropy=fp16_lm_cross_entropy,
            scatter_embedding_sequence_parallel=scatter_embedding_sequence_parallel,
        )
        if not rope_scaling and rope_scaling_factor != _ROPE_SCALING_FACTOR:
            raise ValueError(
                f"rope_scaling_factor={rope_scaling_factor} is the factor of rope_scaling, which is False; give "
                "rope_scaling=True, or leave the factor out"
            )
        if rope_scaling and seq_len_interpolation_factor is not None:
            raise ValueError("rope_scaling and seq_len_interpolation_factor both scale rotation; give one of the two")
        if position_embedding_type != "rope":
            _check_without_rotation(
                config,
                position_embedding_type,
                scalings={
                    "rope_scaling": rope_scaling,
                    "seq_len_interpolation_factor": seq_len_interpolation_factor is not None,
                },
                rotary_base=float(rotary_base),
                rotary_percent=float(rotary_percent),
            )
        self._configure(config, vocab_size, max_sequence_length, execution, follows=_FOLLOWED)
        self.pre_process, self.post_process, self.parallel_output = pre_process, post_process, parallel_output
        numbers = range(config.num_layers) if stage_layers is None else stage_layers
        tied = share_embeddings_and_output_weights
        _check_stage(numbers, config.num_layers, (pre_process, post_process), tied)
        _check_multi_token(config, mtp_block_spec, numbers)
        self.position_embedding_type = position_embedding_type
        self.share_embeddings_and_output_weights = tied
        scaling: Any = Llama3Scaling(factor=rope_scaling_factor) if rope_scaling else None
        if seq_len_interpolation_factor is not None:
            scaling = LinearScaling(factor=seq_len_interpolation_factor)
        rope, learned = (position_embedding_type == name for name in ("rope", "learned_absolute"))
        given = RotaryPositions(float(rotary_base), rotary_percent, scaling) if rope else None
        self.rotary = rotary_positions(config, None if given in _usual_flags(config) else given)
        # The order of the lines below is that of `GPTModel`, so that the same ``rngs`` draw the same weights.
        embedding = LanguageModelEmbedding(config, vocab_size, max_sequence_length, learned, rngs=rngs)
        self.embedding = embedding if pre_process else None
        self.decoder = TransformerBlock(config, layer_class, execution, numbers, post_process, rngs=rngs)
        self._angles(jnp.zeros((1,), jnp.int32))  # raises for a head size or base that cannot be rotated
        self.output_layer = _make_output_layer(config, vocab_size, tied, rngs) if post_process else None
        of_depths = layer_class if mtp_block_spec is None else mtp_block_spec
        self.mtp = MultiTokenPrediction(config, of_depths, rngs=rngs) if config.mtp_num_layers else None
        self.input_tensor: StageInput | None = nnx.data(None)
        if config.quant_recipe is not None:
            apply_quantization_config(self, config.quant_recipe)

    _PACKED_MASKS: ClassVar[MaskTypes] = {}  # Megatron's layers choose a mask type by the boundaries

    # The names under which GPTModel knows the modules.
    layers = property(lambda self: self.decoder.layers)
    final_norm = property(lambda self: self.decoder.final_layernorm)
    position_embedding = property(lambda self: self.embedding.position_embeddings)
    output_kernel = property(lambda self: without_adapter(self.output_layer).kernel)

    @property
    def _is_whole(self) -> bool:
        """Whether the stage is a whole model."""
        return self.pre_process and self.post_process

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return `forward`'s results, possibly from a captured graph, see `GraphableMegatronModule`."""
        return GraphableMegatronModule.__call__(self, *args, **kwargs)

    def forward(
        self,
        input_ids: Array | None = None,
        position_ids: Array | None = None,
        attention_mask: Array | None = None,
        decoder_input: Array | None = None,
        labels: Array | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        runtime_gather_output: bool | None = None,
        padding_mask: Array | None = None,
        dropout_key: Key | None = None,
        cache: Cache | None = None,
        **others: Any,
    ) -> Any:
        """Return logits, or the losses of the labels; hidden states ``[b, s, h]`` of a stage that is not the last.

        Args:
            input_ids: integers ``[b, s]``; without effect behind the first stage.
            position_ids: ``[s]`` or ``[b, s]``; None: 0, 1, 2, …. They also rotate, where Megatron's rotation counts
                positions by itself.
            attention_mask: argument without effect, which is logged once: the layers are causal, as in Megatron.
            decoder_input: hidden states ``[b, s, h]`` that the stage before gave; None: what `set_input_tensor` was
                given. The first stage takes none.
            labels: integers ``[b, s]``; without effect before the last stage.
            packed_seq_params: boundaries of several sequences in each row, see `GPTModel`; every stage takes it.
            runtime_gather_output: whether logits are whole on every tensor rank. None: as ``parallel_output`` says.
            padding_mask: bool ``[b, s]``, True for padding, see `GPTModel`; each stage needs it.
            dropout_key: ``jax.random.key`` that dropout draws from, another one at each step; needed in training
                unless the rates are 0. Evaluation (``model.eval()``) drops nothing, with or without one.
            cache: cache of a whole model, see `GPTModel`; ``inference_context`` is Megatron's way.
            others: Megatron's other arguments, which must be None, apart from ``loss_mask``: the weights in the losses
                of multi-token prediction. On the others it has no effect, which is logged once, as in Megatron, where
                the caller weights them. `GPTModel.loss` takes weights.

        Returns:
            Logits ``[b, s, v]``, with a ``cache`` ``(logits, cache)``; with ``labels`` losses, fp32 ``[b, s]``.

        Raises:
            ValueError: for an argument that must be None; for a stage without its input; see also `GPTModel`.
            TypeError: for an argument that Megatron does not have.
        """
        loss_mask = _followed_mask(attention_mask, **others)
        arrays: dict[str, Any] = {"packed_seq_params": packed_seq_params, "padding_mask": padding_mask}
        if self._is_whole:
            out = self._whole(input_ids, position_ids, decoder_input, labels, loss_mask, dropout_key, cache, **arrays)
        elif cache is not None:
            raise ValueError("a stage of a pipeline takes no cache; generate with a whole model")
        else:
            out = self._stage_call(input_ids, position_ids, decoder_input, labels, dropout_key, **arrays)
        gathers = not self.parallel_output if runtime_gather_output is None else runtime_gather_output
        are_logits = self.post_process and labels is None
        return _gather_logits(out) if gathers and are_logits else out

    def embed_inputs(
        self,
        tokens: Array,
        *,
        positions: Array | None = None,
        dropout_key: Key | None = None,
        padding_mask: Array | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> StackInput:
        """Return what the layers of a whole model are called with, see `GPTModel.embed_inputs`."""
        if not self._is_whole:
            raise ValueError(
                "a stage of a pipeline is called, with labels for losses; its other methods need a whole model"
            )
        return super().embed_inputs(
            tokens,
            positions=positions,
            dropout_key=dropout_key,
            padding_mask=padding_mask,
            packed_seq_params=packed_seq_params,
        )

    def _whole(
        self,
        tokens: Array | None,
        positions: Array | None,
        x: Array | None,
        labels: Array | None,
        loss_mask: Array | None,
        dropout_key: Key | None,
        cache: Cache | None,
        *,
        packed_seq_params: PackedSeqParams | None,
        padding_mask: Array | None,
    ) -> Any:
        """Return `forward`'s result of a whole model."""
        if x is not None or tokens is None:
            raise ValueError(
                "a whole model takes input_ids, and no decoder_input; call model.decoder with hidden states"
            )
        options: Any = {"dropout_key": dropout_key, "positions": positions}
        options |= {"packed_seq_params": packed_seq_params, "padding_mask": padding_mask}
        if labels is None:
            return GPTModel.__call__(self, tokens, cache=cache, **options)
        if cache is not None:
            raise ValueError("labels are for losses of whole sequences, and a cache has their first tokens; give one")
        depths_mask = None if self.mtp is None else loss_mask
        return self.loss(
            tokens,
            labels,
            reduction="none",
            mtp_loss_mask=depths_mask,
            **options,
        )

    def _stage_call(
        self,
        tokens: Array | None,
        positions: Array | None,
        x: Array | None,
        labels: Array | None,
        dropout_key: Key | None,
        *,
        packed_seq_params: PackedSeqParams | None,
        padding_mask: Array | None,
    ) -> Array:
        """Return `forward`'s result of one stage."""
        arrays: dict[str, Any] = {"packed_seq_params": packed_seq_params, "padding_mask": padding_mask}
        if self.pre_process:
            if tokens is None or x is not None:
                raise ValueError("a pipeline's first stage takes input_ids, and no decoder_input")
            return self._run_stage(tokens, positions, None, labels, dropout_key, **arrays)
        given = self.input_tensor if x is None else None
        x = self._checked_input(self._given_input() if x is None else x)
        tokens = jnp.zeros(x.shape[:2], jnp.int32)  # of their shape alone
        out = self._run_stage(tokens, positions, x, labels, dropout_key, **arrays)
        if given is not None:
            given.set_value(None)  # at the end: a call that is refused anywhere leaves it for the next
        return out

    def _run_stage(
        self,
        tokens: Array,
        positions: Array | None,
        x: Array | None,
        labels: Array | None,
        dropout_key: Key | None,
        *,
        packed_seq_params: PackedSeqParams | None,
        padding_mask: Array | None,
    ) -> Array:
        """Return the result of a stage for hidden states, or for tokens if ``x`` is None.

        Between stages hidden states are in `model_order`.
        """
        self._check(tokens, positions, packed_seq_params)
        self._check_padding(padding_mask, tokens)
        positions = natural_positions(tokens.shape[1], packed_seq_params) if positions is None else positions
        padding = None if padding_mask is None else model_order(self.config, padding_mask)
        tokens, positions = model_order(self.config, tokens), model_order(self.config, positions)
        *keys, embedding_key = layer_keys(dropout_key, 1 + self.config.num_layers)
        if x is None:
            x = self._embed(tokens, positions, embedding_key)
        first = self.decoder.first_layer
        own = keys[first : first + len(self.layers)]
        x = self.decoder(
            constrain(x, self._axes),
            rotary_pos_emb=self._angles(positions),
            packed_seq_params=packed_seq_params,
            keys=own,
            padding_mask=padding,
        )
        if not self.post_process:
            return x
        if labels is None:
            return self._head(caller_order(self.config, x, self._axes))
        loss = self._loss(x, model_order(self.config, labels), None, LossOptions(), "none")
        return caller_order(self.config, loss, ("batch", "sequence"))

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Set the hidden states for the next call of a pipeline stage.

        The call takes them away. They are state of the module until then: in a jitted function set them on the module
        that the function was given, or pass ``decoder_input``.

        Args:
            input_tensor: ``[b, s, h]``, also in a list of one, as Megatron's schedules give it. None for a first stage.

        Raises:
            ValueError: for an array on a first stage, another shape, and a list that is not of one.
        """
        if isinstance(input_tensor, list | tuple):
            if len(input_tensor) != 1:
                raise ValueError(f"input_tensor must be one array, or a list of one, got {len(input_tensor)} of them")
            (input_tensor,) = input_tensor
        if self.pre_process and input_tensor is not None:
            raise ValueError(
                f"input_tensor must be None, got {type(input_tensor).__name__}: a first stage takes input_ids"
            )
        given = None if input_tensor is None else StageInput(self._checked_input(input_tensor))
        self.input_tensor = nnx.data(given)

    def _checked_input(self, x: Any) -> Array:
        shape, size = getattr(x, "shape", None), self.config.hidden_size
        if shape is None or len(shape) != 3 or shape[-1] != size:
            raise ValueError(f"a stage's input must be hidden states [b, s, {size}], got shape {shape}")
        return x

    def _given_input(self) -> Array:
        x = None if self.input_tensor is None else self.input_tensor.get_value()
        if self.input_tensor is None or x is None:
            raise ValueError(
                "a stage without the embedding (pre_process=False) needs its input: call set_input_tensor before each "
                "call, or give decoder_input"
            )
        return x

    def get_layer_static_inputs(self, seq_length: int, micro_batch_size: int) -> dict[str, Array]:
        """Return ``input_ids`` of zeros, int32 ``[b, s]``."""
        tokens = jnp.zeros((micro_batch_size, seq_length), jnp.int32)
        return {"input_ids": constrain(tokens, ("batch", "sequence"))}

    def _get_te_cuda_graph_replay_args(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a graph, tokens first."""
        first = (kwargs.pop("input_ids"),) if "input_ids" in kwargs else ()
        return super()._get_te_cuda_graph_replay_args(*first, *args, **kwargs)


def _usual_flags(config: TransformerConfig) -> tuple[RotaryPositions, ...]:
    """Return the rotary arguments that say nothing against a configuration that rotates as its own fields say.

    Megatron-LM gives its models the base and percentage of its flags, be they left out, and the configuration has them
    as fields, from which it derives more.
    """
    if not isinstance(config, MLATransformerConfig):
        return ()
    return RotaryPositions(), RotaryPositions(config.rotary_base, config.rotary_percent)


def _check_without_rotation(
    config: TransformerConfig, positions: str, *, scalings: Mapping[str, bool], **options: float
) -> None:
    """Check the rotary arguments of a model whose position embeddings are not rotary.

    Args:
        config: configuration of the model.
        positions: its ``position_embedding_type``.
        scalings: names of arguments that scale a rotation -> whether they are given.
        options: base and percentage of a rotation; Megatron-LM gives its configuration's to every model.

    Raises:
        ValueError: for a scaling that is given.
    """
    for name, is_given in scalings.items():
        if is_given:
            raise ValueError(
                f"{name} scales rotary positions, and position_embedding_type={positions!r} has none; give "
                f"position_embedding_type='rope', or leave {name} out"
            )
    for name, value in options.items():
        usual = {"rotary_base": 10000.0, "rotary_percent": 1.0}[name]
        if value not in (usual, getattr(config, name, usual)):
            log_once(f"{name}={value} has no effect on a model with position_embedding_type={positions!r}")


def _followed_mask(attention_mask: Any, *, loss_mask: Array | None = None, **others: Any) -> Array | None:
    """Return the ``loss_mask``; log masks without effect, and raise for what a call cannot follow."""
    # A warning, because a mask may hide more than a causal one does, such as padding.
    if attention_mask is not None:
        log_once(
            "attention_mask has no effect on a MegatronGPTModel, whose layers are causal; padding is hidden by weights "
            "of the loss"
        )
    # Megatron-LM's training programs give it in every call, and weight the losses afterwards.
    if loss_mask is not None:
        log_once(
            "loss_mask has no effect on the losses of a MegatronGPTModel, as in Megatron, but for those of "
            "multi-token prediction: multiply them by it, or call loss(input_ids, labels, loss_mask)",
            logging.INFO,
        )
    _check_fixed(**others)
    return loss_mask


def _gather_logits(out: Any) -> Any:
    """Return logits whole on every tensor rank; those of ``(logits, cache)`` with the cache."""
    if isinstance(out, tuple):
        logits, *more = out
        return (_gather_logits(logits), *more)
    return constrain(out, ("batch", "sequence", None))


def _make_output_layer(config: TransformerConfig, vocab_size: int, tied: bool, rngs: nnx.Rngs) -> nnx.Module:
    if config.fp8_output_proj:
        return OutputHead(config, vocab_size, own_kernel=not tied, rngs=rngs)
    return OutputLayer(config, vocab_size, tied, rngs=rngs)


def _check_stage(numbers: range, num_layers: int, ends: tuple[bool, bool], tied: bool) -> None:
    """Raise ValueError for layers that are not a stage's, and for a tied head on a stage without its table."""
    if numbers.step != 1 or not 0 <= numbers.start < numbers.stop <= num_layers:
        raise ValueError(
            f"stage_layers must be a range of one or more of {num_layers} layers, such as range(0, 1), got {numbers}"
        )
    # The first and the last layer's stages, and no others.
    if ends != (numbers.start == 0, numbers.stop == num_layers):
        raise ValueError(
            f"pre_process={ends[0]} and post_process={ends[1]} do not go with stage_layers={numbers} of {num_layers}: "
            "the embedding stands before the first layer, and the head behind the last"
        )
    if tied and ends == (False, True):
        raise ValueError(
            "share_embeddings_and_output_weights=True needs pre_process=True where post_process is: the table is on "
            "the first stage; take False, or make_train_step on a mesh with a pipeline axis, which ties them"
        )


def _check_multi_token(config: TransformerConfig, layer_class: type | None, numbers: range) -> None:
    """Raise ValueError for the layers of multi-token prediction without depths, or on a stage of a pipeline."""
    if config.mtp_num_layers is None:
        if layer_class is not None:
            raise ValueError("mtp_block_spec is for a config with mtp_num_layers; leave it out")
    elif len(numbers) != config.num_layers:
        raise ValueError(
            f"mtp_num_layers={config.mtp_num_layers} needs the embedding and the head in one stage, and "
            f"stage_layers={numbers} is a part of {config.num_layers} layers; build the whole model"
        )


def _check_fixed(**given: Any) -> None:
    """Raise for Megatron's arguments with a value other than the one that the model supports."""
    for name, value in given.items():
        if name not in _FIXED:
            raise TypeError(f"unexpected argument {name!r}; Megatron's are also {', '.join(_FIXED)}")
        fixed, why = _FIXED[name]
        if value is not fixed:
            raise ValueError(f"{name} must be {fixed}, got {value!r}: {why}")
