"""Linear layers of experts with Megatron's interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flax import nnx

from jax_te._validation import checked
from jax_te.config import ModelParallelConfig
from jax_te.layers import GroupedLinear, check_context_size, check_expert_size, split_axis
from jax_te.megatron.te_kwargs import in_dtype_of
from jax_te.megatron.te_layer import TELayer, TELayerOptions
from jax_te.ops import RowGroups
from jax_te.typing import Array, Initializer, NoProcessGroups, ParallelMode


@checked
class TEGroupedLinear(TELayer, GroupedLinear):
    """`jax_te.layers.GroupedLinear` with Megatron's arguments; a call returns ``(y, biases or None)``.

    Arguments are Megatron's in name and order, followed by ``rngs``. In a state dict the experts' arrays are
    ``weight0 [n, k]``, ``weight1``, …, ``bias0 [n]``, …; in the layer they are one, ``kernel [e, k, n]`` and
    ``bias [e, n]``.

    Args:
        num_gemms: ``e``, the number of experts.
        input_size: ``k``, of the global input, not of a shard.
        output_size: ``n``, of the global output; or several sizes: with ``(2, f)`` gate and factor of a gated MLP have
            an axis of their own.
        parallel_mode: ``"column"``, ``"row"`` or None, see `TELinear`.
        config: `ModelParallelConfig` lists the fields that are read.
        init_method: initializer of one expert's kernel ``[k, n]``: ``init(key, shape, dtype)``.
        bias: whether there are biases ``[e, n]``, initially 0.
        skip_bias_add: whether to return the biases instead of adding them, for a fused operation to add.
        is_expert: whether the layer is that of a mixture's experts. The tensor axis shards its kernels as
            ``parallel_mode`` says, unless ``config.expert_tensor_parallel_size`` is 1; rows are not those of a
            sequence.
        tp_comm_buffer_name: option without effect.
        pg_collection: None.
        name: name of the layer in the rules of ``config.quant_recipe``, see `TELinear`.
        rngs: random streams; ``expert-parallel-rng`` draws the kernels, or if it is missing a stream derived from
            ``params``.

    Attributes:
        is_first_microbatch, module_recipe, deterministic, module_name: see `TELinear`.

    Raises:
        ValueError: for sequence parallelism of a layer that the tensor axis shards, since rows of experts have no
            sequence; an unknown mode; a mesh in use whose tensor axis is not of the configured size.
        AssertionError: for a size that the tensor axis does not divide.
        TypeError: for an ``init_method`` that cannot be called.

    Source: ``megatron.core.extensions.transformer_engine.TEGroupedLinear``.

    >>> layer = TEGroupedLinear(
    ...     2, 16, 32, parallel_mode="column", config=ModelParallelConfig(),
    ...     init_method=jax.nn.initializers.normal(0.02), bias=False, skip_bias_add=True, is_expert=True,
    ...     rngs=nnx.Rngs(0),
    ... )
    >>> y, bias = layer(jnp.ones((5, 16)), [4, 1])
    >>> y.shape, bias, list(layer.state_dict())
    ((5, 32), None, ['weight0', 'weight1'])
    """

    takes_padding = False
    takes_tokens = True

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int | tuple[int, ...],
        *,
        parallel_mode: ParallelMode,
        config: ModelParallelConfig,
        init_method: Initializer,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        pg_collection: NoProcessGroups = None,
        name: str | None = None,
        rngs: nnx.Rngs,
    ):
        options = TELayerOptions(
            config=config,
            init_method=init_method,
            parallel_mode=split_axis(parallel_mode),
            bias=bias,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_comm_buffer_name=tp_comm_buffer_name,
            symmetric_ar_type=None,
            tp_group=None,
            name=name,
        )
        if config.sequence_parallel and options.sharded:
            raise ValueError(
                f"sequence_parallel=True with parallel_mode={parallel_mode!r} splits a sequence, and rows sorted by "
                "expert have none; set is_expert=True, with which the tensor axis does not shard the layer"
            )
        self._take_options(input_size, output_size, options)
        mode = options.parallel_mode if is_expert and config.expert_tensor_parallel_size != 1 else options.sharded_mode
        GroupedLinear.__init__(
            self,
            num_gemms,
            input_size,
            output_size,
            options.bias,
            init_method=options.kernel_init,
            tp_group=options.tp_group,
            tp_size=options.tp_size,
            parallel_mode=mode,
            fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
            return_bias=options.return_bias,
            params_dtype=config.params_dtype,
            rngs=rngs,
        )
        self._follow_rules(options.name)

    def __call__(
        self,
        x: Array,
        m_splits: Array | Sequence[int] | RowGroups,
        *,
        is_first_microbatch: bool | None = None,
    ) -> tuple[Array, Array | None]:
        """Apply the layer.

        Args:
            x: ``[rows, k]``, sorted by expert; in fp32 it is cast to the dtype of kernels in half precision.
            m_splits: int32 ``[e]`` (or integers), the number of rows of each expert; known ones must add up to the
                rows. In ``jit`` the host does not wait for them. Or a `jax_te.ops.RowGroups`, as in `GroupedLinear`.
            is_first_microbatch: see `GroupedLinear`.

        Returns:
            ``(y [rows, n], None)`` with the biases, if any, added to ``y``; with ``skip_bias_add`` and ``bias``
            ``(y, biases [e, n])``, both in the dtype of ``x``.
        """
        # A layer may be built without a mesh and called on one, so the size is checked again.
        check_context_size(self.config.context_parallel_size)
        if self.is_expert:
            check_expert_size(self.config.expert_model_parallel_size)
        result: Any = super().__call__(x, m_splits, is_first_microbatch)
        # Always a pair, so that callers need not know how the layer was built.
        return result if self.te_return_bias else (result, None)

    def operand(self, x: Array) -> Array:
        """Return the kernels' GEMM input in a call with ``x``: in fp32 it is cast to the dtype of half precision."""
        return super().operand(in_dtype_of(x, self.kernel))

    def __repr__(self) -> str:
        return super().__repr__().replace("(", f"(num_gemms={self.num_gemms}, ", 1)


@checked
class TEColumnParallelGroupedLinear(TEGroupedLinear):
    """`TEGroupedLinear` of the mode ``"column"``.

    Args:
        num_gemms, input_size, output_size, config, init_method, bias, skip_bias_add, is_expert, tp_comm_buffer_name,
            pg_collection, name, rngs: see `TEGroupedLinear`.

    Raises:
        ValueError, AssertionError, TypeError: see `TEGroupedLinear`.

    Source: ``megatron.core.extensions.transformer_engine.TEColumnParallelGroupedLinear``.

    >>> options = {"init_method": jax.nn.initializers.normal(0.02), "bias": False, "skip_bias_add": True}
    >>> options |= {"is_expert": True, "rngs": nnx.Rngs(0)}
    >>> TEColumnParallelGroupedLinear(2, 16, 32, config=ModelParallelConfig(), **options)
    TEColumnParallelGroupedLinear(num_gemms=2, in_features=16, out_features=32, bias=False, TP=1)
    """

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int | tuple[int, ...],
        *,
        config: ModelParallelConfig,
        init_method: Initializer,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None = None,
        pg_collection: NoProcessGroups = None,
        name: str | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            num_gemms,
            input_size,
            output_size,
            parallel_mode="column",
            config=config,
            init_method=init_method,
            bias=bias,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_comm_buffer_name=tp_comm_buffer_name,
            name=name,
            rngs=rngs,
        )


@checked
class TERowParallelGroupedLinear(TEGroupedLinear):
    """`TEGroupedLinear` of the mode ``"row"``.

    Args:
        num_gemms, input_size, output_size, config, init_method, bias, skip_bias_add, is_expert, tp_comm_buffer_name,
            pg_collection, name, rngs: see `TEGroupedLinear`.

    Raises:
        ValueError, AssertionError, TypeError: see `TEGroupedLinear`.

    Source: ``megatron.core.extensions.transformer_engine.TERowParallelGroupedLinear``.

    >>> options = {"init_method": jax.nn.initializers.normal(0.02), "bias": True, "skip_bias_add": False}
    >>> options |= {"is_expert": True, "rngs": nnx.Rngs(0)}
    >>> TERowParallelGroupedLinear(2, 16, 32, config=ModelParallelConfig(), **options)
    TERowParallelGroupedLinear(num_gemms=2, in_features=16, out_features=32, bias=True, TP=1)
    """

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Initializer,
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool,
        tp_comm_buffer_name: str | None = None,
        pg_collection: NoProcessGroups = None,
        name: str | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            num_gemms,
            input_size,
            output_size,
            parallel_mode="row",
            config=config,
            init_method=init_method,
            bias=bias,
            skip_bias_add=skip_bias_add,
            is_expert=is_expert,
            tp_comm_buffer_name=tp_comm_buffer_name,
            name=name,
            rngs=rngs,
        )
