"""Linear layers with Megatron's interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
from flax import nnx

from jax_te._validation import checked
from jax_te.config import ModelParallelConfig
from jax_te.layers import Linear, check_context_size, sequence_axes, split_axis
from jax_te.megatron.te_kwargs import in_dtype_of
from jax_te.megatron.te_layer import TELayer, TELayerOptions, check_stride, refuse
from jax_te.ops import LinearOptions
from jax_te.typing import Array, Initializer, LogicalAxes, NoProcessGroups, TensorGroup


@checked
class TELinear(TELayer, Linear):
    """`jax_te.layers.Linear` with Megatron's arguments; a call returns ``(y, bias or None)``.

    Arguments are Megatron's in name and order, followed by ``rngs``, as every NNX layer takes. Megatron draws weights
    from a global tracker of CUDA states, with a stream for each kind of layer and rank. JAX has no global random state,
    and a global array has one value: initial weights depend on ``rngs`` alone, not on the mesh or the mode.

    Args:
        input_size: ``k``, of the global input, not of a shard.
        output_size: ``n``, of the global output.
        parallel_mode: ``"column"`` shards ``n`` over the mesh's tensor axis, ``"row"`` shards ``k``, ``"duplicated"``
            (or None) neither; a duplicated layer takes and gives whole sequences.
        config: `ModelParallelConfig` lists the fields that are read.
        init_method: initializer of the kernel ``[k, n]``: ``init(key, shape, dtype)``, e.g. ``config.init_method``.
        bias: whether there is a bias ``[n]``, initially 0.
        skip_bias_add: whether to return the bias instead of adding it, for a fused operation to add.
        skip_weight_param_allocation: option that must be False.
        tp_comm_buffer_name: name of user buffers, such as ``"qkv"``, or None; JAX has none, so it has no effect.
        is_expert: whether the layer belongs to one expert of a mixture. It computes the tokens that each device has, in
            forward without any communication over the tensor axis, over which its kernel is not sharded (Megatron's
            ``expert_tensor_parallel_size=1``). Its input is ``[tokens, k]`` or ``[b, s, k]``; under sequence
            parallelism the tensor axis shards the tokens, of input and output. The caller brings tokens to their
            expert; `MoELayer` does so for all experts at once, with `TEGroupedLinear`. The kernel is drawn from the
            stream ``expert-parallel-rng`` of ``rngs`` (``nnx.Rngs(0, **{"expert-parallel-rng": 1})``), else from one
            that follows from ``params``.
        symmetric_ar_type: None, ``"two_shot"``, ``"one_shot"`` or ``"multimem_all_reduce"``, without effect.
        tp_group: None or ``"tensor"``, the mesh axis that takes the role of Megatron's process group.
        name: name of the layer in the rules of ``config.quant_recipe``. None: the rules are not applied, until
            `apply_quantization_config` or `finish_init` gives the layer a precision.
        rngs: random streams, of which ``params`` draws the kernel.

    Attributes:
        is_first_microbatch: None, which caches no kernels, until `MegatronModule.set_is_first_microbatch` sets it, see
            `QuantizableModule`. Megatron's starts as True.
        module_recipe, deterministic, save_original_input, module_name: see `Linear`.

    Raises:
        ValueError: for ``skip_weight_param_allocation``; an unknown mode or name; a mesh in use whose tensor axis is
            not of the size ``config.tensor_model_parallel_size``, unless that is 1; see also `Linear`.
        AssertionError: for a duplicated layer with a ``tp_group``; an unknown ``symmetric_ar_type``; a size that the
            tensor axis does not divide.
        TypeError: for another ``tp_group``; an ``init_method`` that cannot be called.

    Source: ``megatron.core.extensions.transformer_engine.TELinear``.

    >>> config = ModelParallelConfig()
    >>> layer = TELinear(
    ...     16, 32, parallel_mode="column", config=config, init_method=jax.nn.initializers.normal(0.02), bias=True,
    ...     skip_bias_add=True, skip_weight_param_allocation=False, rngs=nnx.Rngs(0),
    ... )
    >>> y, bias = layer(jnp.ones((2, 4, 16)))
    >>> y.shape, bias.shape, layer
    ((2, 4, 32), (32,), TELinear(in_features=16, out_features=32, bias=True, TP=1))
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: Literal["duplicated", "column", "row", "Column", "Row"] | None,
        config: ModelParallelConfig,
        init_method: Initializer,
        bias: bool,
        skip_bias_add: bool,
        skip_weight_param_allocation: bool,
        tp_comm_buffer_name: str | None = None,
        is_expert: bool = False,
        symmetric_ar_type: str | None = None,
        tp_group: TensorGroup = None,
        name: str | None = None,
        rngs: nnx.Rngs,
    ):
        refuse(skip_weight_param_allocation=skip_weight_param_allocation)
        if parallel_mode == "duplicated" and tp_group is not None:
            raise AssertionError(
                f"a duplicated layer has no tensor parallelism, so tp_group must be None, got {tp_group!r}"
            )
        # Transformer Engine's layers have no mode for a layer that is replicated over tensor ranks.
        mode = None if parallel_mode == "duplicated" else split_axis(parallel_mode)
        options = TELayerOptions(
            config=config,
            init_method=init_method,
            parallel_mode=mode,
            bias=bias,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_comm_buffer_name=tp_comm_buffer_name,
            symmetric_ar_type=symmetric_ar_type,
            tp_group=tp_group,
            name=name,
        )
        self._build(input_size, output_size, options, None, rngs)

    def _build(
        self,
        input_size: int,
        output_size: int | tuple[int, ...],
        options: TELayerOptions,
        kernel_axes: LogicalAxes | None,
        rngs: nnx.Rngs,
    ) -> None:
        """Construct the layer, also for the column- and row-parallel ones."""
        self._take_options(input_size, output_size, options)
        Linear.__init__(
            self,
            input_size,
            output_size,
            options.bias,
            init_method=options.kernel_init,
            sequence_parallel=options.sequence_parallel,
            tp_group=options.tp_group,
            tp_size=options.tp_size,
            parallel_mode=options.sharded_mode,
            fuse_wgrad_accumulation=options.config.gradient_accumulation_fusion,
            return_bias=options.return_bias,
            params_dtype=options.config.params_dtype,
            kernel_axes=kernel_axes,
            rngs=options.rngs_of_kernel(rngs),
        )
        self._follow_rules(options.name)

    def __call__(self, x: Array, *, is_first_microbatch: bool | None = None) -> tuple[Array, Array | None]:
        """Apply the layer.

        Args:
            x: ``[..., k]``; its dtype is the dtype of computation and of the output. In fp32 it is cast to the dtype of
                a kernel in half precision, as `TELayerNormColumnParallelLinear` and `TENorm` do.
            is_first_microbatch: see `Linear`.

        Returns:
            ``(y [..., n], None)`` with the bias, if any, added to ``y``; with ``skip_bias_add`` and ``bias``
            ``(y, bias [n])``, both in the dtype of ``x``. A row-parallel layer's bias is added once, after the sum over
            the tensor axis.
        """
        # A layer may be built without a mesh and called on one, so the size is checked again.
        check_context_size(self.config.context_parallel_size)
        result: Any = super().__call__(x, is_first_microbatch=is_first_microbatch)
        # Always a pair, so that callers need not know how the layer was built.
        return result if self.te_return_bias else (result, None)

    def _input(self, x: Array) -> Array:
        return super()._input(x if self.kernel is None else in_dtype_of(x, self.kernel))

    def _options(self, x: Array) -> LinearOptions:
        options = super()._options(x)
        if not (self.is_expert and self.config.sequence_parallel):
            return options
        lead = sequence_axes(x) if x.ndim > 2 else ("tokens",)
        # Neither names a feature axis: an expert's kernel is whole along both.
        return options._replace(x_axes=(*lead, "hidden"), out_axes=(*lead, None))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shape, dtype and sharding of a duplicated layer's arrays, see `jax_te.megatron.sharded_state_dict`.

        Raises:
            AssertionError: for a column- or row-parallel layer; `TEColumnParallelLinear` and `TERowParallelLinear`
                have their own.
            ValueError: for ``sharded_offsets``.
        """
        if self.parallel_mode is not None:
            raise AssertionError(
                f"TELinear.sharded_state_dict is for parallel_mode 'duplicated', this is {self.parallel_mode!r}; use "
                "TEColumnParallelLinear or TERowParallelLinear"
            )
        return super().sharded_state_dict(prefix, sharded_offsets, metadata)


@checked
class TEColumnParallelLinear(TELinear):
    """`TELinear` whose output features are sharded over the tensor axis.

    Args:
        output_size: ``n``; or several sizes, of which the tensor axis shards the last. The output has an axis for
            each: with ``(2, f)`` gate and factor of a gated MLP are on one device.
        gather_output: option that must be False: the output stays sharded.
        is_expert: see `TELinear`.
        kernel_axes: logical axes of the kernel, see `Linear`. None: those of a column-parallel layer.
        input_size, config, init_method, bias, skip_bias_add, skip_weight_param_allocation, tp_comm_buffer_name,
            tp_group, name, rngs: see `TELinear`; the kind of all-reduce is ``config.symmetric_ar_type``.
        stride, pg_collection: options that must be 1 and None.

    Raises:
        ValueError: for ``gather_output`` and another ``stride``; see also `TELinear`.
        AssertionError, TypeError: see `TELinear`.

    Source: ``megatron.core.extensions.transformer_engine.TEColumnParallelLinear``.

    >>> options = {"init_method": jax.nn.initializers.normal(0.02), "gather_output": False, "bias": False}
    >>> options |= {"skip_bias_add": True, "is_expert": False, "rngs": nnx.Rngs(0)}
    >>> TEColumnParallelLinear(16, 32, config=ModelParallelConfig(tensor_model_parallel_size=2), **options)
    TEColumnParallelLinear(in_features=16, out_features=16, bias=False, TP=2)
    """

    def __init__(
        self,
        input_size: int,
        output_size: int | tuple[int, ...],
        *,
        config: ModelParallelConfig,
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
        refuse(gather_output=gather_output, skip_weight_param_allocation=skip_weight_param_allocation)
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
        self._build(input_size, output_size, options, kernel_axes, rngs)

    # TELinear's method is for duplicated layers, as in Megatron.
    sharded_state_dict = TELayer.sharded_state_dict  # type: ignore[assignment]


@checked
class TERowParallelLinear(TELinear):
    """`TELinear` whose input features are sharded over the tensor axis, such as the output of a column-parallel layer.

    Args:
        input_is_parallel: option that must be True: the input is sharded already.
        is_expert: see `TELinear`.
        kernel_axes: logical axes of the kernel, see `Linear`. None: those of a row-parallel layer.
        input_size, output_size, config, init_method, bias, skip_bias_add, tp_comm_buffer_name, tp_group, name, rngs:
            see `TELinear`; the kind of all-reduce is ``config.symmetric_ar_type``. The bias is replicated.
        pg_collection: None.

    Raises:
        ValueError: for ``input_is_parallel=False``; see also `TELinear`.
        AssertionError, TypeError: see `TELinear`.

    Source: ``megatron.core.extensions.transformer_engine.TERowParallelLinear``.

    >>> options = {"init_method": jax.nn.initializers.normal(0.02), "input_is_parallel": True, "bias": True}
    >>> options |= {"skip_bias_add": False, "is_expert": False, "rngs": nnx.Rngs(0)}
    >>> TERowParallelLinear(16, 32, config=ModelParallelConfig(tensor_model_parallel_size=2), **options)
    TERowParallelLinear(in_features=8, out_features=32, bias=True, TP=2)
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Initializer,
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None = None,
        tp_group: TensorGroup = None,
        name: str | None = None,
        pg_collection: NoProcessGroups = None,
        kernel_axes: LogicalAxes | None = None,
        rngs: nnx.Rngs,
    ):
        if not input_is_parallel:
            raise ValueError(
                "input_is_parallel=False is not supported: the input of a row-parallel layer is split over the tensor "
                "ranks; jax_te.sharding.constrain(x, axes) with 'ffn' as the last axis splits it"
            )
        options = TELayerOptions(
            config=config,
            init_method=init_method,
            parallel_mode="row",
            bias=bias,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_comm_buffer_name=tp_comm_buffer_name,
            symmetric_ar_type=config.symmetric_ar_type,
            tp_group=tp_group,
            name=name,
        )
        self._build(input_size, output_size, options, kernel_axes, rngs)

    sharded_state_dict = TELayer.sharded_state_dict  # type: ignore[assignment]
