"""Normalization followed by a linear layer."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import checked
from jax_te.layers.linear import Linear
from jax_te.layers.norm import Normalization, norm_parameters, norm_spec
from jax_te.layers.results import layer_output
from jax_te.ops import layernorm, layernorm_dense
from jax_te.remat import run_recomputed
from jax_te.typing import Array, DTypeLike, Initializer, LogicalAxes, ParallelMode, TensorGroup


@checked
class LayerNormLinear(Linear):
    """``y = norm(x) @ kernel + bias`` as one operation: the norm writes its output quantized.

    Args:
        in_features: ``h``.
        out_features: ``n``, or several sizes.
        eps: constant added to the variance or mean square.
        bias: whether to learn an additive bias.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        zero_centered_gamma: whether to store the norm's scale as an offset from 1.
        return_layernorm_output: whether to return the norm's output, too, e.g. for a residual connection that starts
            there. It then exists in high precision in memory, so the norm is no longer fused with quantization.
        skip_weight_param_allocation: whether there is no kernel and no bias, see `Linear`; the norm has its parameters.
        init_method, sequence_parallel, tp_group, tp_size, parallel_mode, fuse_wgrad_accumulation, return_bias,
            params_dtype, kernel_axes, out_axes, rngs: see `Linear`. Under sequence parallelism each device of the
            tensor axis normalizes its shard of the sequence, and returns the norm's output so.

    Parameters are ``scale [h]``, ``ln_bias [h]`` (LayerNorm only), ``kernel [h, *n]`` and ``bias [*n]``. Errors as in
    `Linear`, and ValueError for an unknown normalization.

    Source: ``transformer_engine.pytorch.LayerNormLinear``.

    >>> LayerNormLinear(16, (3, 16), rngs=nnx.Rngs(0))(jnp.ones((2, 4, 16))).shape
    (2, 4, 3, 16)
    """

    can_save_original_input: ClassVar[bool] = False  # the GEMM's input is the norm's output, which nothing else keeps

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: Normalization = "LayerNorm",
        zero_centered_gamma: bool = False,
        init_method: Initializer | None = None,
        return_layernorm_output: bool = False,
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
        super().__init__(
            in_features,
            out_features,
            bias,
            init_method=init_method,
            sequence_parallel=sequence_parallel,
            tp_group=tp_group,
            tp_size=tp_size,
            parallel_mode=parallel_mode,
            skip_weight_param_allocation=skip_weight_param_allocation,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            return_bias=return_bias,
            params_dtype=params_dtype,
            kernel_axes=kernel_axes,
            out_axes=out_axes,
            rngs=rngs,
        )
        self.norm = norm_spec(normalization, eps, zero_centered_gamma)
        self.scale, self.ln_bias = norm_parameters(self.norm, in_features, params_dtype)
        self.return_layernorm_output = return_layernorm_output

    def __call__(
        self,
        x: Array,
        weight: Array | None = None,
        bias: Array | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Array | tuple[Array | None, ...]:
        """Apply the layer.

        Args:
            x: ``[..., h]``; its dtype is the dtype of computation and of the outputs.
            weight, bias, is_first_microbatch: see `Linear`.

        Returns:
            ``y [..., *n]``, or a tuple of it and the requested results, in this order: the bias, the norm's output
            ``[..., h]``.
        """
        with jax.named_scope("LayerNormLinear"):
            x = self._input(x)
            weights = self._weights(weight, bias, is_first_microbatch)
            extra: dict[str, Any] = {"bias": self._returned_bias(weights, x)} if self.return_bias else {}
            # Two ops: the fused one may write only the quantized norm's output, and the caller needs its values.
            if self.return_layernorm_output:
                normed = self._normalize(x)
                return layer_output(self._dense(normed, weights), **extra, layernorm_output=normed)
            scale, ln_bias = self._norm_parameters()
            linear = weights._replace(bias=None) if self.return_bias else weights
            options, recipe, norm = self._options(x), self.recipe, self.norm

            def run(x: Array) -> Array:
                return layernorm_dense(x, scale, ln_bias, linear, norm=norm, recipe=recipe, options=options)

            return layer_output(run_recomputed(run, x, kept={"layernorm": ()}), **extra)

    def operand(self, x: Array) -> Array:
        """Return the kernel's GEMM input in a call with ``x``: the norm's output ``[..., h]``."""
        return self._normalize(self._input(x))

    def _norm_parameters(self) -> tuple[Array, Array | None]:
        parameters = self.scale.get_value(), None if self.ln_bias is None else self.ln_bias.get_value()
        return jax.lax.stop_gradient(parameters) if self.frozen else parameters

    def _normalize(self, x: Array) -> Array:
        return layernorm(x, *self._norm_parameters(), norm=self.norm, out_axes=self._input_axes(x))
