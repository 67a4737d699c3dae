"""Megatron's feed-forward block."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jax_te._validation import checked
from jax_te.config import TransformerConfig
from jax_te.layers import add_bias, check_elementwise
from jax_te.megatron.layernorm_linear import TELayerNormColumnParallelLinear
from jax_te.megatron.linear import TERowParallelLinear
from jax_te.megatron.module import MegatronModule, check_input_norms
from jax_te.ops import Activation, activation
from jax_te.remat import recomputed, run_on_copies, run_recomputed, selective_recompute
from jax_te.sharding import leading_axes
from jax_te.typing import Array


@checked
class MLP(MegatronModule):
    """Norm, ``linear_fc1``, activation and ``linear_fc2``, as `jax_te.layers.LayerNormMLP` in two layers.

    The kernel of ``linear_fc1`` is ``[h, n_act, f]``: a gated activation has its two components on a separate axis, so
    that no device needs another one's results. In a `state_dict` it is Megatron's ``[n_act · f, h]``.

    Args:
        config: sizes, norm, activation and initializers.
        rngs: random streams, of which ``params`` draws the kernels.

    Raises:
        ValueError: for an activation function that is not elementwise, or ``block_input_layernorm=False``; see also
            `TELinear`.

    Source: ``megatron.core.transformer.mlp.MLP``.

    >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, activation="swiglu")
    >>> mlp = MLP(config, rngs=nnx.Rngs(0))
    >>> output, bias = mlp(jax.numpy.ones((2, 8, 32)))
    >>> mlp.linear_fc1.kernel.shape, list(mlp.state_dict())[0], mlp.state_dict()["linear_fc1.weight"].shape
    ((32, 2, 128), 'linear_fc1.bias', (256, 32))
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        super().__init__(config)
        check_input_norms(config)
        sizes: Any = (config.hidden_size, config.ffn_hidden_size)  # the config has filled the second in
        (h, f), function = sizes, Activation(config.limited_activation, None)
        check_elementwise(function)
        # Biases are added by the layers, at the end of their GEMMs, at no cost; so ``skip_bias_add`` is not used.
        self.linear_fc1 = TELayerNormColumnParallelLinear(
            h,
            (len(function.parts()), f),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="fc1",
            rngs=rngs,
        )
        self.linear_fc2 = TERowParallelLinear(
            f,
            h,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="fc2",
            rngs=rngs,
        )

    def __call__(self, hidden_states: Array, *, is_first_microbatch: bool | None = None) -> tuple[Array, None]:
        """Apply the block.

        Args:
            hidden_states: ``[b, s, h]``.
            is_first_microbatch: see `Linear`.

        Returns:
            ``(output [b, s, h], None)``: the bias is in the output.
        """
        parts: Any = (self.linear_fc1, self.linear_fc2, hidden_states)
        if not recomputed("mlp"):
            return self._run(parts, is_first_microbatch), None
        # Recomputed as a whole, without recomputation inside. The layers are operands, whose state the call may change.
        with selective_recompute():
            return run_on_copies(jax.checkpoint, lambda parts: self._run(parts, is_first_microbatch), parts), None

    def _run(self, parts: Any, first: bool | None) -> Array:
        linear_fc1, linear_fc2, x = parts
        leading = x.ndim - 1
        hidden, _ = add_bias(linear_fc1(x, is_first_microbatch=first), "linear_fc1", leading=leading)
        axes = (*leading_axes(x), "ffn")

        def rest(parts: Any) -> Array:
            linear_fc2, hidden = parts
            z = activation(hidden, self.config.limited_activation, out_axes=axes)
            return add_bias(linear_fc2(z, is_first_microbatch=first), "linear_fc2", leading=leading)[0]

        return run_recomputed(rest, (linear_fc2, hidden), kept={"activation": ()})
