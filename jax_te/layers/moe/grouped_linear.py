"""Linear layers of experts, in one array."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_te._validation import check_axes, check_positive, checked, is_integer, log_hints
from jax_te.config import normal_init
from jax_te.layers.linear import kernel_logical_axes, split_axis
from jax_te.layers.parallel_arguments import TensorParallel, TensorParallelModule
from jax_te.layers.parameters import constant, expert_rngs, init_of_each, parameter
from jax_te.layers.quantizable import frozen_weights
from jax_te.layers.results import layer_output
from jax_te.ops import LinearOptions, LinearWeights, RowGroups, as_int32, check_sizes, grouped_dense, is_known
from jax_te.quantize import QuantizedKernel, Quantizer, TensorQuantizer, precision_of
from jax_te.sharding import activation_axis, axis_ranks, device_mesh, gathered_axes
from jax_te.typing import Array, DTypeLike, Initializer, LogicalAxes, ParallelMode, TensorGroup


@checked
class GroupedLinear(TensorParallelModule):
    """``y = x @ kernel[g] + bias[g]`` for the rows of each group ``g``: linear layers of experts in one array.

    Rows are sorted by group. Each group's GEMMs are quantized like a separate `Linear`: it has its own scales and
    amaxes, and its own state under delayed scaling, and results do not depend on other groups' rows. Group sizes are
    values on the device, for which the host does not wait in ``jit``; outside of it, it checks them. A group may have
    no rows, or all.

    Args:
        num_gemms: ``e``, the number of groups.
        in_features: ``k``, size of the input's last axis.
        out_features: ``n``, size of the output's last axis, or sizes of several.
        bias: whether to learn an additive bias for each group.
        init_method: initializer of one group's kernel, ``init(key, shape, dtype)`` with its shape ``(k, *n)``. None:
            N(0, 0.023²).
        tp_group: None or ``"tensor"``, see `Linear`.
        tp_size: see `Linear`.
        parallel_mode: ``"column"``, ``"row"`` or None, see `Linear`. On a mesh the compiler partitions the layer.
        fuse_wgrad_accumulation: option without effect, see `Linear`.
        return_bias: whether to return the bias with the output instead of adding it, for a fused operation to add.
        params_dtype: dtype of ``kernel [e, k, *n]`` and ``bias [e, *n]``.
        kernel_axes: logical axes of the kernel, in place of ``"expert"`` and those that ``parallel_mode`` stands for.
        rngs: random streams, of which ``expert-parallel-rng`` draws the kernels, if there is one; else a stream that
            follows from ``params``.

    Attributes:
        of_mixture: whether it is a layer of `Experts`, whose rows are placed on a mesh. Initially False.
        frozen: whether the parameters are frozen: no gradient reaches them, and none is computed for the kernels.
            Initially False; `GroupedLoRA` sets it.
        module_recipe, deterministic, is_first_microbatch, module_name: see `QuantizableModule`.

    Raises:
        TypeError: for another ``tp_group``; when called, for sizes of groups that are not integers.
        ValueError: for a size that is not positive, an unknown mode or dtype; when called, for sizes that do not fit
            (FP8 needs features in multiples of 16), a mesh with another number of tensor devices than ``tp_size``.
        QuantizerStateError: when called under a recipe with state, if the layer was built without it.

    Source: ``transformer_engine.pytorch.GroupedLinear``.

    >>> layer = GroupedLinear(2, 16, 32, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((5, 16)), jnp.array([4, 1])).shape, layer.kernel.shape
    ((5, 32), (2, 16, 32))
    """

    kernels: ClassVar[dict[str, str]] = {"kernel": "quantizers"}
    takes_padding: ClassVar[bool] = True
    """Whether sizes may leave rows to no group. Transformer Engine's layer, which splits the rows, refuses them."""
    takes_tokens: ClassVar[bool] = True
    """Whether this class's call may have tokens and a permutation in place of rows; a call of another class says so
    anew."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int | tuple[int, ...],
        bias: bool = True,
        *,
        init_method: Initializer | None = None,
        tp_group: TensorGroup = None,
        tp_size: int = 1,
        parallel_mode: ParallelMode = None,
        fuse_wgrad_accumulation: bool = False,
        return_bias: bool = False,
        params_dtype: DTypeLike = jnp.float32,
        kernel_axes: LogicalAxes | None = None,
        rngs: nnx.Rngs,
    ):
        features = out_features if isinstance(out_features, tuple) else (out_features,)
        if not features:
            raise ValueError("out_features must be a size, or a tuple of at least one, got ()")
        sizes = {f"out_features[{i}]": size for i, size in enumerate(features)}
        check_positive(num_gemms=num_gemms, in_features=in_features, **sizes)
        self.parallel_mode = split_axis(parallel_mode)
        mode_axes = ("expert", *kernel_logical_axes(self.parallel_mode, 1 + len(features)))
        self.num_gemms = self.groups = num_gemms
        self.tensor_parallel = TensorParallel(group=tp_group, size=tp_size, split=parallel_mode is not None)
        self.kernel_shape = (num_gemms, in_features, *features)
        self.kernel_axes = mode_axes if kernel_axes is None else kernel_axes
        self.feature_axes = tuple(activation_axis(name) for name in self.kernel_axes[2:])
        init = functools.partial(init_of_each, normal_init() if init_method is None else init_method)
        self.kernel = parameter(init, expert_rngs(rngs), self.kernel_shape, params_dtype, self.kernel_axes)
        bias_axes = (self.kernel_axes[0], *self.kernel_axes[2:])
        self.bias = constant(0.0, (num_gemms, *features), params_dtype, bias_axes) if bias else None
        self._init_quantization()
        self.use_bias = bias
        self.return_bias = return_bias
        log_hints(fuse_wgrad_accumulation=fuse_wgrad_accumulation)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.frozen = False
        self.of_mixture = False

    @property
    def rows_on_devices(self) -> bool:
        """Whether calls have rows that are placed on the devices of the mesh in use."""
        return self.of_mixture and device_mesh() is not None and self.why_not_placed() is None

    def kernel_quantizer(self, kernel: str) -> Quantizer | None:
        """Quantizer of a kernel that is cached; None if each call quantizes it."""
        found = super().kernel_quantizer(kernel)
        mesh = device_mesh() if self.rows_on_devices else None
        # Blocks of scales are those of whole kernels, which a cache would hold for all layers at once.
        in_blocks = mesh is not None and not isinstance(found, TensorQuantizer)
        return None if in_blocks and mesh and gathered_axes(self.kernel_axes, mesh) else found

    def axes_of(self, kernel: str) -> LogicalAxes:
        """Return the logical axes of the kernel."""
        return self.kernel_axes

    def __call__(
        self,
        x: Array,
        group_sizes: Array | Sequence[int] | RowGroups,
        is_first_microbatch: bool | None = None,
    ) -> Array | tuple[Array | None, ...]:
        """Apply the layer.

        Args:
            x: ``[rows, k]``; its dtype is the dtype of computation and of the output. With a permutation in
                ``group_sizes`` tokens ``[t, k]``, as `jax_te.ops.grouped_dense` takes them.
            group_sizes: int32 ``[e]`` (or integers), the number of rows of each group, one behind the other. Rows
                beyond them all are padding. Known sizes that are negative or more than the rows are refused. Or a
                `jax_te.ops.RowGroups`, whose groups may have padding between them.
            is_first_microbatch: mode of the kernel cache. True: quantize the kernels and keep them for later calls;
                False: use the kept ones; None: the value of the attribute of that name, by default neither.

        Returns:
            ``y [rows, *n]``, zeros in rows of padding; with ``return_bias`` ``(y, bias)``, the biases ``[e, *n]`` in
            the dtype of ``x`` (None if the layer has none).
        """
        with jax.named_scope("GroupedLinear"):
            x = self.operand(x)
            groups = self.row_groups(x, group_sizes)
            weights = self._weights(is_first_microbatch)
            y = grouped_dense(
                x,
                weights.kernel,
                None if self.return_bias else weights.bias,
                groups=groups,
                recipe=self.recipe,
                state=weights.state,
                grad_sink=weights.grad_sink,
                options=self._options(),
            )
            if not self.return_bias:
                return y
            return layer_output(y, bias=None if weights.bias is None else weights.bias.astype(x.dtype))

    def operand(self, x: Array) -> Array:
        """Return the kernels' GEMM input in a call with ``x``: ``x``, in the dtype of computation."""
        return self.tensor_parallel.enter(x, (None, "hidden"))

    def row_groups(self, x: Array, group_sizes: Array | Sequence[int] | RowGroups) -> RowGroups:
        """Return the location of each group's rows in a call's ``x``; sizes are checked if their values are known.

        Args:
            x, group_sizes: arguments of the call.
        """
        check_axes("x", x)
        if isinstance(group_sizes, RowGroups):
            check_sizes(group_sizes)
            return group_sizes
        sizes = as_int32("group_sizes", _as_array(group_sizes))
        if sizes.shape != (self.num_gemms,):
            raise ValueError(f"group_sizes must have shape ({self.num_gemms},), one size each, got {sizes.shape}")
        groups = RowGroups(sizes=sizes, rows=x.shape[0])
        check_sizes(groups)
        if not self.takes_padding and is_known(sizes) and int(np.asarray(sizes).sum()) != groups.rows:
            raise ValueError(
                f"the sizes of groups must add up to the {groups.rows} rows, got {np.asarray(sizes).tolist()}: rows of "
                "no group would be zeros. jax_te.layers.GroupedLinear takes such rows as padding, and a "
                "jax_te.ops.RowGroups says where they are"
            )
        return groups

    def why_not_placed(self) -> str | None:
        """Return the reason why the devices of a mesh cannot run the layer on their own rows of experts, or None."""
        multiple, kernel = precision_of(self.recipe).shard_multiple, self.kernel.get_value()
        if multiple is None:
            return f"recipe {self.recipe!r} has scales of whole tensors beside those of blocks"
        for size, axis in zip(self.kernel_shape[1:], map(activation_axis, self.kernel_axes[1:]), strict=True):
            parts = 1 if axis is None else axis_ranks(axis)
            if parts > 1 and size // parts % multiple:
                return f"features of one device, {size // parts}, are no multiple of the {multiple} values of a scale"
        return kernel.lacks_shards if isinstance(kernel, QuantizedKernel) else None

    def _options(self) -> LinearOptions:
        # Rows have no logical axis: on a mesh every device has all of them.
        return LinearOptions(
            kernel_axes=self.kernel_axes,
            out_axes=(None, *self.feature_axes),
            name=self.module_name,
            evaluation=self.deterministic,
        )

    def _weights(self, is_first_microbatch: bool | None) -> LinearWeights:
        bias = None if self.bias is None else self.bias.get_value()
        weights = self.linear_weights("kernel", bias, is_first_microbatch)
        return frozen_weights(weights) if self.frozen else weights


def _as_array(group_sizes: Array | np.ndarray | Sequence[int]) -> Array | np.ndarray:
    """Return sizes as an array; raise TypeError for a sequence that does not hold integers."""
    if isinstance(group_sizes, jax.Array | np.ndarray):
        return group_sizes
    if not all(map(is_integer, group_sizes)):
        raise TypeError(f"group_sizes must be integers, got {group_sizes!r}")
    # Integers of Python have any size: those beyond int32, which no array has rows for, become its nearest one.
    limits = np.iinfo(np.int32)
    return np.array([min(max(size, limits.min), limits.max) for size in group_sizes], np.int32)
