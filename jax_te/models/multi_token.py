"""Multi-token prediction: layers behind a model's last one that predict further tokens, and metrics of their losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from jax_te._validation import checked
from jax_te.config import TransformerConfig
from jax_te.layers import LastStep, Linear, PackedSeqParams, Router, add_bias
from jax_te.megatron import TEColumnParallelLinear, TENorm, TransformerLayer
from jax_te.models.from_config import norm_of, transformer_layer
from jax_te.models.stack import StackInput
from jax_te.quantize import QuantizerState, count
from jax_te.sharding import auto_region, constrain
from jax_te.typing import Array, LogicalAxes


class TokenArrays(NamedTuple):
    """The arrays of a batch that the depths read, with an entry for each token, in natural order.

    Args:
        tokens: integers ``[b, s]`` whose embeddings a depth takes.
        labels: integers ``[b, s]``, what it predicts.
        weights: ``[b, s]``, weights of the losses.
        positions: ``[s]`` or ``[b, s]``, positions of ``tokens`` in the table of learned positions.
        padding_mask: bool ``[b, s]``, True for padding. None: there is none.
    """

    tokens: Array
    labels: Array
    weights: Array
    positions: Array
    padding_mask: Array | None

    def of_next_depth(self, continues: Array | None) -> TokenArrays:
        """Return the arrays of the next depth: each token's successor is in its place, see `rolled`."""
        tokens, labels, weights, positions = (
            rolled(each, continues) for each in (self.tokens, self.labels, self.weights, self.positions)
        )
        padding = self.padding_mask
        # Padding itself stays padding: Megatron's roll alone would count the last token of a padded sequence.
        padding = None if padding is None else padding | rolled(padding, continues)
        return TokenArrays(tokens, labels, weights, positions, padding)


class MultiTokenLayer(nnx.Module):
    """Layer of one depth: its output at a token predicts the token that lies as much further ahead.

    It normalizes the hidden states of the depth before, and the embeddings of the next tokens, projects the two
    together to the hidden size, and runs a transformer layer and a norm.

    Args:
        config: configuration of the model, whose last layer is like the depth's.
        layer_class: class of Megatron's transformer layer, which makes the other layers Megatron's, too. None:
            `jax_te.layers.TransformerLayer`.
        rngs: random streams, of which ``params`` draws the kernels.

    Source: ``megatron.core.transformer.multi_token_prediction.MultiTokenPredictionLayer``.
    """

    def __init__(self, config: TransformerConfig, layer_class: type[TransformerLayer] | None, *, rngs: nnx.Rngs):
        h, last = config.hidden_size, config.num_layers - 1
        if layer_class is None:
            self.enorm, self.hnorm = norm_of(config, rngs=rngs), norm_of(config, rngs=rngs)
            self.eh_proj: Any = Linear(
                2 * h,
                h,
                False,
                init_method=config.init_method,
                parallel_mode="column",
                sequence_parallel=config.sequence_parallel,
                tp_size=config.tensor_model_parallel_size,
                fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
                params_dtype=config.params_dtype,
                rngs=rngs,
            )
            self.mtp_model_layer: Any = transformer_layer(config, last, rngs=rngs)
            self.final_layernorm = norm_of(config, rngs=rngs)
            return
        norm: Any = (config, h, config.layernorm_epsilon)
        self.enorm, self.hnorm = TENorm(*norm), TENorm(*norm)
        self.eh_proj = TEColumnParallelLinear(
            2 * h,
            h,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="mtp_eh_proj",
            rngs=rngs,
        )
        self.mtp_model_layer = layer_class(config, last + 1, rngs=rngs)
        self.final_layernorm = TENorm(*norm)

    def __call__(self, stack: StackInput, embedded: Array, axes: LogicalAxes) -> Array:
        """Return the depth's hidden states ``[b, s, h]``, the input of the head and of the next depth.

        Args:
            stack: input of a stack of the one layer; its ``x`` is the depth before's output.
            embedded: ``[b, s, h]``, embeddings of the next tokens.
            axes: logical axes of activations between layers.
        """
        both = auto_region(lambda e, x: jnp.concatenate([e, x], axis=-1), axes)
        projected, _ = add_bias(self.eh_proj(both(self.enorm(embedded), self.hnorm(stack.x))), "eh_proj")
        x = constrain(projected, axes)  # the GEMM splits its output over the tensor axis
        return self.final_layernorm(dataclasses.replace(stack, x=x).output([self.mtp_model_layer]))


class MultiTokenPrediction(nnx.Module):
    """Layers of a model's ``config.mtp_num_layers`` depths, or one that runs at all, and the losses of the last step.

    Args:
        config, layer_class, rngs: see `MultiTokenLayer`.

    Source: ``megatron.core.transformer.multi_token_prediction.MultiTokenPredictionBlock``.
    """

    def __init__(self, config: TransformerConfig, layer_class: type[TransformerLayer] | None, *, rngs: nnx.Rngs):
        self.depths = config.mtp_num_layers or 0
        layers = 1 if config.mtp_use_repeated_layer else self.depths
        self.layers = nnx.List([MultiTokenLayer(config, layer_class, rngs=rngs) for _ in range(layers)])
        if config.mtp_use_repeated_layer:
            for _, router in nnx.iter_modules(self.layers):
                if isinstance(router, Router):
                    router.balance_share = 1.0 / self.depths  # as in Megatron: all of its runs count as one layer
        self.last_step = QuantizerState(jnp.zeros(self.depths + 1, jnp.float32), counting=LastStep())

    def layer(self, depth: int) -> MultiTokenLayer:
        """Return the layer of a depth, from 0."""
        return self.layers[min(depth, len(self.layers) - 1)]

    def counted(self, x: Array, losses: Sequence[Array]) -> Array:
        """Return ``x``, whose backward pass adds the losses of all depths ``[]`` to those of the step."""
        return count(x, (self.last_step,), (jnp.stack([*losses, jnp.ones((), jnp.float32)]),))


@checked
def multi_token_metrics(model: nnx.Module) -> dict[str, Array]:
    """Return the mean loss of each depth of multi-token prediction in the last step, ``mtp_1_loss`` and so on.

    Args:
        model: model whose states a train step has written back, e.g. ``state.model``.

    >>> from jax_te.models import GPTModel
    >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, mtp_num_layers=2)
    >>> sorted(multi_token_metrics(GPTModel(config, vocab_size=64, max_sequence_length=8, rngs=nnx.Rngs(0))))
    ['mtp_1_loss', 'mtp_2_loss']
    """
    found = {}
    for _, module in nnx.iter_modules(model):
        if isinstance(module, MultiTokenPrediction):
            *sums, calls = module.last_step.get_value()
            found |= {f"mtp_{depth}_loss": total / jnp.maximum(calls, 1.0) for depth, total in enumerate(sums, 1)}
    return found


def rolled(x: Array, continues: Array | None = None) -> Array:
    """Return ``[b, s]`` or ``[s]`` with each token's successor in its place, and 0 behind the last one's.

    Args:
        x: ``[b, s]`` or ``[s]``: tokens, labels, weights, positions, in natural order.
        continues: bool ``[b, s]`` of packed rows, see `continuations`: 0 also replaces the successor of a token that
            has none in its own sequence.

    >>> rolled(jnp.array([3, 4, 5])).tolist()
    [4, 5, 0]
    >>> rolled(jnp.array([[3, 4, 5]]), jnp.array([[False, True, False]])).tolist()
    [[0, 5, 0]]
    """
    axes: LogicalAxes = ("batch", "sequence")[-x.ndim :]

    def roll(x: Array, continues: Array | None) -> Array:
        x = jnp.pad(x[..., 1:], ((0, 0),) * (x.ndim - 1) + ((0, 1),))
        return x if continues is None else jnp.where(continues, x, jnp.zeros((), x.dtype))

    # auto_region: on a mesh the compiler sends the tokens at the ends of shards.
    return constrain(auto_region(roll, axes)(x, continues), axes)


def continuations(packed: PackedSeqParams, size: int) -> Array:
    """Return whether the next token of a row is of the same sequence, bool ``[b, size]``; padding has no next token.

    >>> continuations(PackedSeqParams(cu_seqlens_q=jnp.array([0, 2, 3])), 4).tolist()
    [[True, False, False, False]]
    """

    def of_ids(ids: Array) -> Array:
        following = jnp.pad(ids[:, 1:], ((0, 0), (0, 1)))
        return (ids == following) & (ids > 0)

    axes: LogicalAxes = ("batch", "sequence")
    return constrain(auto_region(of_ids, axes)(packed.segment_ids(size)), axes)
