"""Linear layer."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.config import check_positive
from jax_te.layers.initializers import normal_init
from jax_te.layers.parameters import constant, leading_axes, parameter, value_or_none
from jax_te.layers.quantizable import QuantizableModule
from jax_te.ops import dense
from jax_te.typing import Array, DTypeLike, Initializer, LogicalAxes

_KERNEL_AXES: dict[str | None, LogicalAxes] = {
    None: ("fsdp", None),
    "column": ("fsdp", "ffn"),
    "row": ("ffn", "fsdp"),
}


def kernel_logical_axes(parallel_mode: str | None, ndim: int) -> LogicalAxes:
    """Logical axes of a kernel ``[in, *out]`` for a parallel mode; of several output axes the last one is split.

    Raises:
        ValueError: for a mode other than None, ``"column"`` and ``"row"`` (any case, as TE's documents write them).

    >>> kernel_logical_axes("column", 3)
    ('fsdp', 'joined', 'ffn')
    """
    mode = parallel_mode.lower() if isinstance(parallel_mode, str) else parallel_mode
    if mode not in _KERNEL_AXES:
        raise ValueError(f"parallel_mode must be None, 'column' or 'row', got {parallel_mode!r}")
    inner, outer = _KERNEL_AXES[mode]
    return (inner, *("joined",) * (ndim - 2), outer)


class Linear(QuantizableModule):
    """``y = x @ kernel + bias``, its three GEMMs quantized by the ambient recipe.

    Args:
        in_features: ``k``, size of the input's last axis.
        out_features: ``n``, size of the output's last axis, or sizes of several.
        bias: learn an additive bias.
        init_method: initializer of the kernel, ``init(key, shape, dtype)``. None: N(0, 0.023²).
        params_dtype: dtype of ``kernel [k, *n]`` and ``bias [*n]``.
        parallel_mode: ``"column"`` splits the output features over the mesh's tensor axis, ``"row"`` the input
            features, None neither. It is a choice of logical axes; collectives follow from them.
        return_bias: do not add the bias but return it beside the output, for a fused operation to add.
        kernel_axes: logical axes of the kernel, in place of those that ``parallel_mode`` stands for.
        out_axes: logical axes of the output features. None: the kernel's, with ``"fsdp"`` (an axis of weights) read
            as ``"hidden"``.
        rngs: the ``params`` stream draws the kernel.

    Attributes:
        save_original_input: keep the input itself for backward and quantize it there again, see `dense`. False.
        module_recipe, deterministic, is_first_microbatch, module_name: see `QuantizableModule`.

    Raises:
        ValueError: for a size that is not positive, an unknown mode or dtype; when called, for sizes that do not fit
            (FP8 needs multiples of 16).
        QuantizerStateError: when called under a recipe with state, if the layer was built without it.

    Source: ``transformer_engine.pytorch.Linear``.

    >>> Linear(16, 32, rngs=nnx.Rngs(0))(jnp.ones((2, 4, 16))).shape
    (2, 4, 32)
    """

    kernels: ClassVar[dict[str, str]] = {"kernel": "quantizers"}

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        bias: bool = True,
        *,
        init_method: Initializer | None = None,
        params_dtype: DTypeLike = jnp.float32,
        parallel_mode: str | None = None,
        return_bias: bool = False,
        kernel_axes: LogicalAxes | None = None,
        out_axes: LogicalAxes | None = None,
        rngs: nnx.Rngs,
    ):
        features = out_features if isinstance(out_features, tuple) else (out_features,)
        check_positive(in_features=in_features, **{f"out_features[{i}]": size for i, size in enumerate(features)})
        axes = kernel_logical_axes(parallel_mode, 1 + len(features)) if kernel_axes is None else kernel_axes
        init = normal_init() if init_method is None else init_method
        self.kernel = parameter(init, rngs, (in_features, *features), params_dtype, axes)
        bias_axes = tuple("norm" if name == "fsdp" else name for name in axes[1:])
        self.bias = constant(0.0, features, params_dtype, bias_axes) if bias else None
        self._init_quantization()
        self._init_save_original_input()
        self.return_bias = return_bias
        self.kernel_axes = axes
        self.feature_axes = (
            tuple("hidden" if name == "fsdp" else name for name in axes[1:]) if out_axes is None else out_axes
        )

    def _init_save_original_input(self) -> None:
        self.save_original_input = False

    def __call__(self, x: Array, *, is_first_microbatch: bool | None = None) -> Array | tuple[Array | None, ...]:
        """Apply the layer.

        Args:
            x: ``[..., k]``; its dtype is the dtype of computation and of the output.
            is_first_microbatch: True: quantize the kernel and keep it for later calls; False: use what was kept; None:
                what the attribute of that name says, by default neither.

        Returns:
            ``y [..., *n]``; with ``return_bias`` ``(y, bias)``, the bias in the dtype of ``x`` (None if the layer has
            none).
        """
        with jax.named_scope("Linear"):
            return self._result(self._dense(x, is_first_microbatch), x)

    def _dense(self, x: Array, is_first_microbatch: bool | None) -> Array:
        return dense(
            x,
            bias=None if self.return_bias else value_or_none(self.bias),
            recipe=self.recipe,
            out_axes=(*leading_axes(x), *self.feature_axes),
            kernel_axes=self.kernel_axes,
            save_original_input=getattr(self, "save_original_input", False),
            name=self.module_name,
            **self.linear_arguments("kernel", is_first_microbatch),
        )

    def _result(self, y: Array, x: Array, *more: Array) -> Array | tuple[Array | None, ...]:
        """What a call returns: the output, then the bias if asked for, then ``more``."""
        bias = value_or_none(self.bias)
        extra = (None if bias is None else bias.astype(x.dtype),) if self.return_bias else ()
        return (y, *extra, *more) if extra or more else y
