"""Normalization followed by a column-parallel linear layer, with Megatron's interface."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jax_te._validation import checked
from jax_te.config import TransformerConfig
from jax_te.layers import LayerNormLinear, check_context_size
from jax_te.megatron.te_kwargs import in_dtype_of
from jax_te.megatron.te_layer import TELayer, TELayerOptions, check_stride, refuse
from jax_te.typing import Array, Initializer, LogicalAxes, NoProcessGroups, TensorGroup


@checked
class TELayerNormColumnParallelLinear(TELayer, LayerNormLinear):
    """`jax_te.layers.LayerNormLinear` with Megatron's arguments; a call returns ``(y, bias or None)``.

    The norm is ``config.normalization`` with ``config.layernorm_epsilon`` and ``config.layernorm_zero_centered_gamma``.
    Parameters are ``scale [k]``, ``ln_bias [k]`` (LayerNorm only), ``kernel [k, n]`` and ``bias [n]``.

    Args:
        is_expert: option that must be False; experts take `TENorm` and `TEColumnParallelLinear`.
        input_size, output_size, config, init_method, gather_output, bias, skip_bias_add, skip_weight_param_allocation,
            tp_comm_buffer_name, tp_group, stride, name, pg_collection, kernel_axes, rngs: see `TEColumnParallelLinear`.

    Attributes are those of `TELinear` except ``save_original_input``: the GEMM's input is the norm's output.

    Raises:
        ValueError: in this order for ``gather_output``, ``is_expert``, ``skip_weight_param_allocation``; see also
            `TELinear`.
        AssertionError, TypeError: see `TELinear`.

    Source: ``megatron.core.extensions.transformer_engine.TELayerNormColumnParallelLinear``.

    >>> config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    >>> options = {"config": config, "init_method": config.init_method, "gather_output": False, "bias": True}
    >>> layer = TELayerNormColumnParallelLinear(
    ...     16, 48, **options, skip_bias_add=False, is_expert=False, tp_comm_buffer_name="qkv", rngs=nnx.Rngs(0)
    ... )
    >>> y, bias = layer(jnp.ones((2, 4, 16)))
    >>> y.shape, bias
    ((2, 4, 48), None)
    """

    def __init__(
        self,
        input_size: int,
        output_size: int | tuple[int, ...],
        *,
        config: TransformerConfig,
        init_method: Initializer,
        gather_output: bool,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        skip_weight_param_allocation: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: TensorGroup = None,
        stride: int = 1,
        name: str | None = None,
        pg_collection: NoProcessGroups = None,
        kernel_axes: LogicalAxes | None = None,
        rngs: nnx.Rngs,
    ):
        check_stride(stride)
        refuse(
            gather_output=gather_output,
            is_expert=is_expert,
            skip_weight_param_allocation=skip_weight_param_allocation,
        )
        options = TELayerOptions(
            config=config,
            init_method=init_method,
            parallel_mode="column",
            bias=bias,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_comm_buffer_name=tp_comm_buffer_name,
            symmetric_ar_type=config.symmetric_ar_type,
            tp_group=tp_group,
            name=name,
        )
        self._take_options(input_size, output_size, options)
        LayerNormLinear.__init__(
            self,
            input_size,
            output_size,
            # Unlike TENorm, which takes eps as an argument, Megatron's fused layer reads the configuration.
            config.layernorm_epsilon,
            options.bias,
            normalization=config.normalization,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            init_method=options.kernel_init,
            sequence_parallel=options.sequence_parallel,
            tp_group=options.tp_group,
            tp_size=options.tp_size,
            parallel_mode=options.sharded_mode,
            fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
            return_bias=options.return_bias,
            params_dtype=config.params_dtype,
            kernel_axes=kernel_axes,
            rngs=rngs,
        )
        self._follow_rules(options.name)

    def __call__(self, x: Array, *, is_first_microbatch: bool | None = None) -> tuple[Array, Array | None]:
        """Apply the layer.

        Args:
            x: ``[..., k]``; its dtype is the dtype of computation and of the output. If the norm's parameters are in
                half precision and ``x`` is in fp32, such as an fp32 residual stream, ``x`` is cast to their dtype; its
                gradient is in fp32.
            is_first_microbatch: see `Linear`.

        Returns:
            ``(y [..., n], bias [n] or None)``, as in `TELinear`; the norm's output is not returned.
        """
        check_context_size(self.config.context_parallel_size)
        result: Any = super().__call__(x, is_first_microbatch=is_first_microbatch)
        # Always a pair, so that callers need not know how the layer was built.
        return result if self.te_return_bias else (result, None)

    def _input(self, x: Array) -> Array:
        # As in Megatron, where an fp32 residual stream meets half-precision layers; the GEMM would otherwise run in
        # fp32.
        return super()._input(in_dtype_of(x, self.scale))
