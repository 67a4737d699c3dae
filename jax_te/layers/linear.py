"""Linear layer."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import check_positive, checked, log_hints
from jax_te.config import normal_init
from jax_te.layers.parallel_arguments import TensorParallel, TensorParallelModule, sequence_axes
from jax_te.layers.parameters import constant, parameter
from jax_te.layers.quantizable import frozen_weights
from jax_te.layers.results import layer_output
from jax_te.ops import LinearOptions, LinearWeights, dense
from jax_te.sharding import activation_axis
from jax_te.typing import Array, DTypeLike, Initializer, LogicalAxes, ParallelMode, SplitAxis, TensorGroup

_KERNEL_AXES: dict[SplitAxis | None, LogicalAxes] = {
    None: ("fsdp", None),
    "column": ("fsdp", "ffn"),
    "row": ("ffn_fsdp", None),
}


def split_axis(parallel_mode: ParallelMode) -> SplitAxis | None:
    """Return a parallel mode in lower case.

    >>> split_axis("Row")
    'row'
    """
    if parallel_mode is None:
        return None
    return "column" if parallel_mode in ("column", "Column") else "row"


def kernel_logical_axes(mode: SplitAxis | None, ndim: int) -> LogicalAxes:
    """Return the logical axes of a kernel ``[in, *out]`` for a parallel mode; of several output axes the last is split.

    >>> kernel_logical_axes("column", 3)
    ('fsdp', 'components', 'ffn')
    """
    inner, outer = _KERNEL_AXES[mode]
    return (inner, *("components",) * (ndim - 2), outer)


@checked
class Linear(TensorParallelModule):
    """``y = x @ kernel + bias``, its three GEMMs quantized by the ambient recipe.

    Args:
        in_features: ``k``, size of the input's last axis.
        out_features: ``n``, size of the output's last axis, or sizes of several.
        bias: whether to learn an additive bias.
        init_method: initializer of the kernel, ``init(key, shape, dtype)``. None: N(0, 0.023²).
        sequence_parallel: outside of the layer activations ``[b, s, h]`` are sharded over the tensor axis along ``s``:
            a column-parallel layer takes its input so, a row-parallel layer gives its output so (logical axis
            ``sequence_parallel``). Values are the same; with a tensor axis of 1, or no mesh, nothing is different.
        tp_group: None or ``"tensor"``, the mesh axis that stands for TE's process group; the mesh says how many devices
            it has.
        tp_size: size of the tensor axis; 1 leaves it to the mesh, any other size must be that of the mesh's tensor
            axis, where one is set.
        parallel_mode: ``"column"`` splits the output features over the mesh's tensor axis, ``"row"`` the input
            features, None neither. It is a choice of logical axes; collectives follow from them.
        skip_weight_param_allocation: whether there are no parameters; each call is given ``weight`` and ``bias``.
        fuse_wgrad_accumulation: option without effect, stored as an attribute: `jax_te.training.make_train_step` always
            adds kernel gradients to fp32 sums, in a buffer that it reuses, where they are made.
        return_bias: whether to return the bias with the output instead of adding it, for a fused operation to add.
        params_dtype: dtype of ``kernel [k, *n]`` and ``bias [*n]``.
        kernel_axes: logical axes of the kernel, in place of those that ``parallel_mode`` stands for.
        out_axes: logical axes of the output features. None: those that the kernel's stand for, see
            `jax_te.sharding.activation_axis`.
        rngs: random streams, of which ``params`` draws the kernel.

    Attributes:
        frozen: whether the kernel and the bias are frozen, the layer's own and those that calls give: no gradient
            reaches them, and none is computed for the kernel. Initially False; `LoRA` sets it.
        save_original_input: whether to keep the input itself for backward and quantize it there again, see `dense`.
            Initially False.
        module_recipe, deterministic, is_first_microbatch, module_name: see `QuantizableModule`.

    Raises:
        TypeError: for another ``tp_group``.
        ValueError: for a size that is not positive, an unknown mode or dtype, ``sequence_parallel`` without a
            ``parallel_mode``; when called, for sizes that do not fit (FP8 needs multiples of 16), a mesh with another
            number of tensor devices than ``tp_size``, a sequence that does not divide over them, weights or biases that
            are missing, unexpected or of another shape.
        QuantizerStateError: when called under a recipe with state, if the layer was built without it.

    Source: ``transformer_engine.pytorch.Linear``.

    >>> Linear(16, 32, rngs=nnx.Rngs(0))(jnp.ones((2, 4, 16))).shape
    (2, 4, 32)
    """

    kernels: ClassVar[dict[str, str]] = {"kernel": "quantizers"}
    can_save_original_input: ClassVar[bool] = True

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        bias: bool = True,
        *,
        init_method: Initializer | None = None,
        sequence_parallel: bool = False,
        tp_group: TensorGroup = None,
        tp_size: int = 1,
        parallel_mode: ParallelMode = None,
        skip_weight_param_allocation: bool = False,
        fuse_wgrad_accumulation: bool = False,
        return_bias: bool = False,
        params_dtype: DTypeLike = jnp.float32,
        kernel_axes: LogicalAxes | None = None,
        out_axes: LogicalAxes | None = None,
        rngs: nnx.Rngs,
    ):
        features = out_features if isinstance(out_features, tuple) else (out_features,)
        if not features:
            raise ValueError("out_features must be a size, or a tuple of at least one, got ()")
        check_positive(in_features=in_features, **{f"out_features[{i}]": size for i, size in enumerate(features)})
        self.parallel_mode = split_axis(parallel_mode)
        mode_axes = kernel_logical_axes(self.parallel_mode, 1 + len(features))
        axes = mode_axes if kernel_axes is None else kernel_axes
        if len(axes) != 1 + len(features):
            raise ValueError(f"{len(axes)} logical axes {axes} for a kernel of shape {(in_features, *features)}")
        self.tensor_parallel = TensorParallel(
            group=tp_group, size=tp_size, sequence_parallel=sequence_parallel, split=parallel_mode is not None
        )
        init = normal_init() if init_method is None else init_method
        self.kernel_shape = (in_features, *features)
        self.kernel_axes = axes
        self._contracted_axis = activation_axis(axes[0])
        # A bias is replicated over the hidden axis, like a norm's parameters: too small to be worth an all-gather.
        bias_axes = tuple("norm" if activation_axis(name) == "hidden" else name for name in axes[1:])
        self.feature_axes = tuple(activation_axis(name) for name in axes[1:]) if out_axes is None else out_axes
        skip = skip_weight_param_allocation
        self.kernel = None if skip else parameter(init, rngs, self.kernel_shape, params_dtype, axes)
        self.bias = constant(0.0, features, params_dtype, bias_axes) if bias and not skip else None
        self.skip_weight_param_allocation = skip
        self._init_quantization()
        if self.can_save_original_input:
            self.save_original_input = False
        self.use_bias = bias
        self.return_bias = return_bias
        log_hints(fuse_wgrad_accumulation=fuse_wgrad_accumulation)
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.frozen = False

    def axes_of(self, kernel: str) -> LogicalAxes:
        """Return the logical axes of the kernel."""
        return self.kernel_axes

    def __call__(
        self,
        x: Array,
        weight: Array | None = None,
        bias: Array | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Array | tuple[Array | None, ...]:
        """Apply the layer.

        Args:
            x: ``[..., k]``; its dtype is the dtype of computation and of the output.
            weight: kernel ``[k, *n]`` to use in place of the layer's own; required if it has none. No gradient reaches
                it if the layer is ``frozen``.
            bias: ``[*n]``, likewise; required of a layer without parameters if ``bias`` or ``return_bias`` was set.
            is_first_microbatch: mode of the kernel cache. True: quantize the kernel and keep it for later calls; False:
                use the kept one; None: the value of the attribute of that name, by default neither.

        Returns:
            ``y [..., *n]``; with ``return_bias`` ``(y, bias)``, the bias in the dtype of ``x`` (None if the layer has
            none).
        """
        with jax.named_scope("Linear"):
            x = self._input(x)
            weights = self._weights(weight, bias, is_first_microbatch)
            y = self._dense(x, weights)
            return layer_output(y, bias=self._returned_bias(weights, x)) if self.return_bias else y

    def operand(self, x: Array) -> Array:
        """Return the kernel's GEMM input in a call with ``x``: ``x``, in the dtype of computation."""
        return self._input(x)

    def _input(self, x: Array) -> Array:
        """Return a call's ``x`` as the layer reads it: sharded as it computes, in the dtype of computation."""
        return self.tensor_parallel.enter(x, self._input_axes(x))

    def output_axes(self, x: Array) -> LogicalAxes:
        """Return the logical axes of the output of a call with ``x``."""
        split = self.tensor_parallel.sequence_parallel and self.parallel_mode == "row"
        return (*sequence_axes(x, split), *self.feature_axes)

    def _input_axes(self, x: Array) -> LogicalAxes:
        split = self.tensor_parallel.sequence_parallel and self.parallel_mode == "column"
        return (*sequence_axes(x, split), "hidden")

    def _dense(self, x: Array, weights: LinearWeights) -> Array:
        return dense(
            x,
            weights.kernel,
            None if self.return_bias else weights.bias,
            recipe=self.recipe,
            state=weights.state,
            grad_sink=weights.grad_sink,
            options=self._options(x),
        )

    def _options(self, x: Array) -> LinearOptions:
        """Return the op's static options for a call with ``x``."""
        return LinearOptions(
            x_axes=(*self._input_axes(x)[:-1], self._contracted_axis),
            kernel_axes=self.kernel_axes,
            out_axes=self.output_axes(x),
            save_original_input=self.can_save_original_input and self.save_original_input,
            name=self.module_name,
            evaluation=self.deterministic,
        )

    def _weights(self, weight: Array | None, bias: Array | None, is_first_microbatch: bool | None) -> LinearWeights:
        """Return the arrays of a call: the given ones, or the layer's own."""
        if weight is not None or bias is not None or self.skip_weight_param_allocation:
            self._check_given(weight, bias)
        if bias is None and self.bias is not None:
            bias = self.bias.get_value()
        weights = self.linear_weights("kernel", bias, is_first_microbatch, weight)
        return frozen_weights(weights) if self.frozen else weights

    def _check_given(self, weight: Array | None, bias: Array | None) -> None:
        """Raise ValueError for weights or biases that are missing, unexpected or of another shape."""
        wants_bias = self.use_bias or self.return_bias
        if self.skip_weight_param_allocation:
            for name, value, wanted, shape in (
                ("weight", weight, True, self.kernel_shape),
                ("bias", bias, wants_bias, self.kernel_shape[1:]),
            ):
                if value is None and wanted:
                    raise ValueError(
                        f"the layer has no parameters (skip_weight_param_allocation=True): call it with {name}=, "
                        f"{shape}"
                    )
        if bias is not None and not wants_bias:
            raise ValueError("the layer was built with bias=False and adds none; build it with bias=True")
        if bias is not None and bias.shape != self.kernel_shape[1:]:
            raise ValueError(f"bias must have shape {self.kernel_shape[1:]}, got {bias.shape}")
        if weight is not None and weight.shape != self.kernel_shape:
            raise ValueError(
                f"weight must have shape {self.kernel_shape}, [in, *out], got {weight.shape}; Transformer Engine for "
                "PyTorch has [out, in]"
            )

    def _returned_bias(self, weights: LinearWeights, x: Array) -> Array | None:
        """Return the bias with the output, in its dtype, for ``return_bias``."""
        return None if weights.bias is None else weights.bias.astype(x.dtype)
