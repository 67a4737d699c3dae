"""Normalization followed by a linear layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.layers.linear import Linear
from jax_te.layers.norm import norm_parameters, norm_spec
from jax_te.layers.parameters import leading_axes, value_or_none
from jax_te.ops import layernorm, layernorm_dense
from jax_te.typing import Array, DTypeLike, Initializer, LogicalAxes


class LayerNormLinear(Linear):
    """``y = norm(x) @ kernel + bias`` as one operation: the norm writes its output quantized.

    Args:
        in_features: ``h``.
        out_features: ``n``, or several sizes.
        eps: added to the variance or mean square.
        bias: learn an additive bias.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        zero_centered_gamma: store the norm's scale as an offset from 1.
        return_layernorm_output: also return the norm's output, e.g. for a residual connection that starts there. It
            then exists in full precision in memory, so the norm is no longer fused with quantization.
        init_method, params_dtype, parallel_mode, return_bias, kernel_axes, out_axes, rngs: as in `Linear`.

    Parameters are ``scale [h]``, ``ln_bias [h]`` (LayerNorm only), ``kernel [h, *n]`` and ``bias [*n]``. Errors as in
    `Linear`, and ValueError for an unknown normalization.

    Source: ``transformer_engine.pytorch.LayerNormLinear``.

    >>> LayerNormLinear(16, (3, 16), rngs=nnx.Rngs(0))(jnp.ones((2, 4, 16))).shape
    (2, 4, 3, 16)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        eps: float = 1e-5,
        bias: bool = True,
        *,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        init_method: Initializer | None = None,
        params_dtype: DTypeLike = jnp.float32,
        parallel_mode: str | None = None,
        return_bias: bool = False,
        kernel_axes: LogicalAxes | None = None,
        out_axes: LogicalAxes | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            out_features,
            bias,
            init_method=init_method,
            params_dtype=params_dtype,
            parallel_mode=parallel_mode,
            return_bias=return_bias,
            kernel_axes=kernel_axes,
            out_axes=out_axes,
            rngs=rngs,
        )
        self.norm = norm_spec(normalization, eps, zero_centered_gamma)
        self.scale, self.ln_bias = norm_parameters(self.norm, in_features, params_dtype)
        self.return_layernorm_output = return_layernorm_output

    def _init_save_original_input(self) -> None:
        pass  # the input of the GEMM is the norm's output, which nobody else keeps

    def __call__(self, x: Array, *, is_first_microbatch: bool | None = None) -> Array | tuple[Array | None, ...]:
        """Apply the layer.

        Args:
            x: ``[..., h]``; its dtype is the dtype of computation and of the outputs.
            is_first_microbatch: as in `Linear`.

        Returns:
            ``y [..., *n]``, or a tuple of it and what was asked for, in this order: the bias, the norm's output
            ``[..., h]``.
        """
        with jax.named_scope("LayerNormLinear"):
            scale, ln_bias = self.scale[...], value_or_none(self.ln_bias)
            if self.return_layernorm_output:
                normed = layernorm(x, scale, ln_bias, norm=self.norm, out_axes=(*leading_axes(x), "hidden"))
                return self._result(self._dense(normed, is_first_microbatch), x, normed)
            y = layernorm_dense(
                x,
                scale,
                ln_bias,
                bias=None if self.return_bias else value_or_none(self.bias),
                norm=self.norm,
                recipe=self.recipe,
                out_axes=(*leading_axes(x), *self.feature_axes),
                kernel_axes=self.kernel_axes,
                name=self.module_name,
                **self.linear_arguments("kernel", is_first_microbatch),
            )
            return self._result(y, x)
