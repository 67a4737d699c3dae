"""Layer and root-mean-square normalization."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import check_positive, checked
from jax_te.layers.mode import TrainingMode
from jax_te.layers.parallel_arguments import sequence_axes
from jax_te.layers.parameters import constant, value_or_none
from jax_te.ops import NormSpec, layernorm
from jax_te.typing import Array, DTypeLike, LogicalAxes

Normalization = Literal["LayerNorm", "RMSNorm"]
"""Transformer Engine's names of normalizations."""

NORMALIZATIONS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
"""Name of each normalization, and the corresponding kind of `NormSpec`."""


def norm_spec(normalization: Normalization, eps: float, zero_centered_gamma: bool) -> NormSpec:
    """Return the `NormSpec` of a normalization by its Transformer Engine name.

    Raises:
        ValueError: for another name than ``"LayerNorm"`` and ``"RMSNorm"``, or an ``eps`` that is not positive.

    >>> norm_spec("RMSNorm", 1e-6, False).kind
    'rmsnorm'
    """
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"normalization must be one of {', '.join(map(repr, NORMALIZATIONS))}, got {normalization!r}")
    kind: Any = NORMALIZATIONS[normalization]
    return NormSpec(kind=kind, epsilon=eps, zero_centered_gamma=zero_centered_gamma)


def check_returned_norm(input_layernorm: bool, return_layernorm_output: bool) -> None:
    """Raise ValueError for a layer without a norm in front that is to return its output.

    >>> check_returned_norm(input_layernorm=True, return_layernorm_output=True)
    """
    if return_layernorm_output and not input_layernorm:
        raise ValueError(
            "return_layernorm_output needs input_layernorm=True: there is no norm whose output could be returned"
        )


def norm_parameters(norm: NormSpec, hidden_size: int, dtype: DTypeLike) -> tuple[nnx.Param, nnx.Param | None]:
    """Return scale and bias ``[h]`` of a norm, initially the plain normalization; None: RMSNorm has no bias."""
    scale = constant(0.0 if norm.zero_centered_gamma else 1.0, (hidden_size,), dtype, ("norm",))
    return scale, constant(0.0, (hidden_size,), dtype, ("norm",)) if norm.kind == "layernorm" else None


@checked
class _Norm(TrainingMode):
    """Common base of `LayerNorm` and `RMSNorm`."""

    normalization: Normalization

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        sequence_parallel: bool = False,
        params_dtype: DTypeLike = jnp.float32,
        zero_centered_gamma: bool = False,
        rngs: nnx.Rngs,
    ):
        del rngs  # the initial values are constants
        check_positive(hidden_size=hidden_size)
        self.norm = norm_spec(self.normalization, eps, zero_centered_gamma)
        self.scale, self.bias = norm_parameters(self.norm, hidden_size, params_dtype)
        self.sequence_parallel = sequence_parallel

    def __call__(self, x: Array, *, out_axes: LogicalAxes | None = None) -> Array:
        """Normalize the last axis. ``x [..., h]`` -> the same shape and dtype; statistics in fp32.

        Args:
            x: array to normalize.
            out_axes: logical axes of input and output. None: those of hidden states ``[b, s, h]``.
        """
        with jax.named_scope(self.normalization):
            axes = (*sequence_axes(x, self.sequence_parallel), "hidden") if out_axes is None else out_axes
            return layernorm(x, self.scale[...], value_or_none(self.bias), norm=self.norm, out_axes=axes)


class LayerNorm(_Norm):
    """``(x - mean) / sqrt(variance + eps) * scale + bias`` over the last axis.

    Args:
        hidden_size: ``h``.
        eps: constant added to the variance.
        sequence_parallel: whether to normalize an activation ``[b, s, h]`` that is sharded over the tensor axis along
            ``s`` (logical axis ``sequence_parallel``). Values are the same.
        params_dtype: dtype of ``scale`` and ``bias``, ``[h]`` each; replicated on a mesh.
        zero_centered_gamma: whether to store the scale as an offset from 1, so that weight decay pulls the factor to 1.
        rngs: random streams, accepted as in every layer; the initial values are constants.

    Raises:
        ValueError: for a size or ``eps`` that is not positive, or an unknown dtype; when called with
            ``sequence_parallel``, for an input without a sequence or one that does not divide over the tensor axis.

    Source: ``transformer_engine.pytorch.LayerNorm``; Ba et al. 2016.

    >>> LayerNorm(2, rngs=nnx.Rngs(0))(jnp.array([[-3.0, 3.0]])).round(3).tolist()
    [[-1.0, 1.0]]
    """

    normalization = "LayerNorm"


class RMSNorm(_Norm):
    """``x / sqrt(mean(x²) + eps) * scale`` over the last axis. Arguments and errors are those of `LayerNorm`; there is
    no bias.

    Source: ``transformer_engine.pytorch.RMSNorm``; Zhang and Sennrich 2019.

    >>> RMSNorm(2, rngs=nnx.Rngs(0))(jnp.array([[2.0, 2.0]])).round(3).tolist()
    [[1.0, 1.0]]
    """

    normalization = "RMSNorm"


@checked
def make_norm(
    normalization: Normalization,
    hidden_size: int,
    eps: float = 1e-5,
    *,
    sequence_parallel: bool = False,
    params_dtype: DTypeLike = jnp.float32,
    zero_centered_gamma: bool = False,
    rngs: nnx.Rngs,
) -> LayerNorm | RMSNorm:
    """Return a `LayerNorm` or `RMSNorm` by name.

    Source: ``megatron.core.extensions.transformer_engine.TENorm``.

    >>> type(make_norm("RMSNorm", 4, rngs=nnx.Rngs(0))).__name__
    'RMSNorm'
    """
    return {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[normalization](
        hidden_size,
        eps,
        sequence_parallel=sequence_parallel,
        params_dtype=params_dtype,
        zero_centered_gamma=zero_centered_gamma,
        rngs=rngs,
    )


class NormOptions(NamedTuple):
    """Options that the norms of one layer have in common."""

    normalization: Normalization
    epsilon: float
    zero_centered_gamma: bool
    sequence_parallel: bool
    params_dtype: DTypeLike

    def make(self, size: int, rngs: nnx.Rngs) -> LayerNorm | RMSNorm:
        """Return a norm of ``size`` channels."""
        return make_norm(
            self.normalization,
            size,
            self.epsilon,
            sequence_parallel=self.sequence_parallel,
            params_dtype=self.params_dtype,
            zero_centered_gamma=self.zero_centered_gamma,
            rngs=rngs,
        )
