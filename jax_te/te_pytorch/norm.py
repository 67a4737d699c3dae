"""Norms."""

from __future__ import annotations

from flax import nnx

from jax_te import layers
from jax_te._validation import checked
from jax_te.te_pytorch.refused import refuses_by_name
from jax_te.typing import DTypeLike


@refuses_by_name
@checked
class LayerNorm(layers.LayerNorm):
    """`jax_te.layers.LayerNorm`, made with the names and the order of Transformer Engine's arguments.

    Args:
        normalized_shape: size of the last axis, the ``hidden_size`` of `jax_te.layers.LayerNorm`.
        eps, sequence_parallel, params_dtype, zero_centered_gamma: see `jax_te.layers.LayerNorm`.
        hidden_size: older name of ``normalized_shape``.
        rngs: random streams, accepted as in every layer; the initial values are constants.

    Raises:
        TypeError: unless exactly one of ``normalized_shape`` and ``hidden_size`` is given.

    Source: ``transformer_engine.pytorch.LayerNorm``.

    >>> LayerNorm(16, rngs=nnx.Rngs(0))(jnp.ones((2, 8, 16))).shape
    (2, 8, 16)
    """

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: DTypeLike = "float32",
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            _normalized_size(normalized_shape, hidden_size),
            eps,
            sequence_parallel=sequence_parallel,
            params_dtype=params_dtype,
            zero_centered_gamma=zero_centered_gamma,
            rngs=rngs,
        )


@refuses_by_name
@checked
class RMSNorm(layers.RMSNorm):
    """`jax_te.layers.RMSNorm`, made with the names and the order of Transformer Engine's arguments.

    Args:
        normalized_shape, eps, sequence_parallel, params_dtype, zero_centered_gamma, hidden_size, rngs: see `LayerNorm`.

    Raises:
        TypeError: unless exactly one of ``normalized_shape`` and ``hidden_size`` is given.

    Source: ``transformer_engine.pytorch.RMSNorm``.

    >>> RMSNorm(16, rngs=nnx.Rngs(0))(jnp.ones((2, 8, 16))).shape
    (2, 8, 16)
    """

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: DTypeLike = "float32",
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            _normalized_size(normalized_shape, hidden_size),
            eps,
            sequence_parallel=sequence_parallel,
            params_dtype=params_dtype,
            zero_centered_gamma=zero_centered_gamma,
            rngs=rngs,
        )


def _normalized_size(normalized_shape: int | None, hidden_size: int | None) -> int:
    if normalized_shape is not None and hidden_size is None:
        return normalized_shape
    if hidden_size is not None and normalized_shape is None:
        return hidden_size
    raise TypeError(
        f"normalized_shape, or hidden_size, its older name, must be given, and not both, got {normalized_shape!r} and "
        f"{hidden_size!r}"
    )
