"""Linear layers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Unpack

from flax import nnx

from jax_te import layers
from jax_te._validation import checked, log_hints, log_once
from jax_te.layers import LayerNormLinearKeywords, LayerNormMLPKeywords, LinearKeywords
from jax_te.ops import RowGroups
from jax_te.te_pytorch.refused import refuses_by_name
from jax_te.typing import Array, DTypeLike, Initializer, ParallelMode, TensorGroup


@refuses_by_name
@checked
class GroupedLinear(layers.GroupedLinear):
    """`jax_te.layers.GroupedLinear`, with the names of Transformer Engine's arguments.

    Args:
        num_gemms, in_features, out_features, bias, init_method, tp_group, tp_size, parallel_mode,
            fuse_wgrad_accumulation, return_bias, params_dtype, rngs: see `jax_te.layers.GroupedLinear`.
        sequence_parallel: option without effect unless ``parallel_mode`` is given, then it must be False: rows sorted
            by expert have no sequence that could be split.
        ub_overlap_rs, ub_overlap_ag: options that must be False, as in Transformer Engine.
        ub_name: option without effect: XLA has no user buffers.
        delay_wgrad_compute: option that must be False; `jax_te.training.deferred_vjp` gives the kernels' gradients
            later.
        save_original_input: option that must be False: backward reads the quantized input.
        single_grouped_weight, single_grouped_bias, use_grouped_tensor: options without effect: kernels are one
            array ``[e, k, *n]``, biases one array ``[e, *n]``.

    Raises:
        ValueError: for options that are not supported; see also `jax_te.layers.GroupedLinear`.
        TypeError: see `jax_te.layers.GroupedLinear`.

    Source: ``transformer_engine.pytorch.GroupedLinear``.

    >>> layer = GroupedLinear(2, 16, 32, bias=False, rngs=nnx.Rngs(0))
    >>> layer(inp=jnp.ones((5, 16)), m_splits=[4, 1]).shape
    (5, 32)
    """

    takes_padding = False

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int | tuple[int, ...],
        *,
        bias: bool = True,
        init_method: Initializer | None = None,
        sequence_parallel: bool = False,
        tp_group: TensorGroup = None,
        tp_size: int = 1,
        parallel_mode: ParallelMode = None,
        fuse_wgrad_accumulation: bool = False,
        return_bias: bool = False,
        params_dtype: DTypeLike = "float32",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        use_grouped_tensor: bool | None = None,
        rngs: nnx.Rngs,
    ):
        refused = {
            "sequence_parallel": (sequence_parallel and parallel_mode is not None, "rows sorted by expert have none"),
            "ub_overlap_rs": (ub_overlap_rs, "XLA overlaps collectives"),
            "ub_overlap_ag": (ub_overlap_ag, "XLA overlaps collectives"),
            "delay_wgrad_compute": (delay_wgrad_compute, "jax_te.training.deferred_vjp gives these gradients later"),
            "save_original_input": (save_original_input, "backward reads the quantized input"),
        }
        for name, (given, why) in refused.items():
            if given:
                raise ValueError(f"{name}=True is not supported by a GroupedLinear: {why}; leave it False")
        if sequence_parallel:
            log_once("sequence_parallel=True has no effect on a GroupedLinear without parallel_mode", logging.INFO)
        log_hints(
            ub_name=ub_name,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            use_grouped_tensor=use_grouped_tensor,
        )
        super().__init__(
            num_gemms,
            in_features,
            out_features,
            bias,
            init_method=init_method,
            tp_group=tp_group,
            tp_size=tp_size,
            parallel_mode=parallel_mode,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            return_bias=return_bias,
            params_dtype=params_dtype,
            rngs=rngs,
        )

    def __call__(  # type: ignore[override]  # Transformer Engine's names
        self, inp: Array, m_splits: Array | Sequence[int] | RowGroups, is_first_microbatch: bool | None = None
    ) -> Any:
        """Apply the layer.

        Args:
            inp: ``[rows, k]``, the ``x`` of `jax_te.layers.GroupedLinear`.
            m_splits: number of rows of each kernel, the ``group_sizes`` of `jax_te.layers.GroupedLinear`. Known ones
                must add up to the rows.
            is_first_microbatch: mode of the kernel cache, see `jax_te.layers.GroupedLinear`.

        Returns:
            The results of `jax_te.layers.GroupedLinear`.
        """
        return super().__call__(inp, m_splits, is_first_microbatch)


@refuses_by_name
@checked
class Linear(layers.Linear):
    """`jax_te.layers.Linear`, called with the names and the order of Transformer Engine's arguments.

    Args:
        in_features, out_features: see `jax_te.layers.Linear`.
        rngs: random streams, of which ``params`` draws the kernel.
        **options: keywords of `jax_te.layers.Linear`, with Transformer Engine's names.

    Source: ``transformer_engine.pytorch.Linear``.

    >>> Linear(16, 32, bias=False, rngs=nnx.Rngs(0))(inp=jnp.ones((2, 8, 16))).shape
    (2, 8, 32)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        *,
        rngs: nnx.Rngs,
        **options: Unpack[LinearKeywords],
    ):
        super().__init__(in_features, out_features, **options, rngs=rngs)

    def __call__(self, inp: Array, is_first_microbatch: bool | None = None) -> Any:  # type: ignore[override]
        """Apply the layer.

        Args:
            inp: ``[..., k]``, the ``x`` of `jax_te.layers.Linear`.
            is_first_microbatch: mode of the kernel cache, see `jax_te.layers.Linear`.

        Returns:
            The results of `jax_te.layers.Linear`.
        """
        return super().__call__(inp, is_first_microbatch=is_first_microbatch)


@refuses_by_name
@checked
class LayerNormLinear(layers.LayerNormLinear):
    """`jax_te.layers.LayerNormLinear`, called with the names and the order of Transformer Engine's arguments.

    Args:
        in_features, out_features, eps: see `jax_te.layers.LayerNormLinear`.
        rngs: random streams, of which ``params`` draws the kernel.
        **options: keywords of `jax_te.layers.LayerNormLinear`, with Transformer Engine's names.

    Source: ``transformer_engine.pytorch.LayerNormLinear``.

    >>> LayerNormLinear(16, 32, 1e-6, rngs=nnx.Rngs(0))(inp=jnp.ones((2, 8, 16))).shape
    (2, 8, 32)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        eps: float = 1e-5,
        *,
        rngs: nnx.Rngs,
        **options: Unpack[LayerNormLinearKeywords],
    ):
        super().__init__(in_features, out_features, eps, **options, rngs=rngs)

    def __call__(self, inp: Array, is_first_microbatch: bool | None = None) -> Any:  # type: ignore[override]
        """Apply the layer.

        Args:
            inp: ``[..., k]``, the ``x`` of `jax_te.layers.LayerNormLinear`.
            is_first_microbatch: mode of the kernel cache, see `jax_te.layers.Linear`.

        Returns:
            The results of `jax_te.layers.LayerNormLinear`.
        """
        return super().__call__(inp, is_first_microbatch=is_first_microbatch)


@refuses_by_name
@checked
class LayerNormMLP(layers.LayerNormMLP):
    """`jax_te.layers.LayerNormMLP`, called with the names and the order of Transformer Engine's arguments.

    Args:
        hidden_size, ffn_hidden_size, eps: see `jax_te.layers.LayerNormMLP`.
        rngs: random streams, of which ``params`` draws the kernels.
        **options: keywords of `jax_te.layers.LayerNormMLP`, with Transformer Engine's names.

    Source: ``transformer_engine.pytorch.LayerNormMLP``.

    >>> LayerNormMLP(16, 32, activation="swiglu", rngs=nnx.Rngs(0))(inp=jnp.ones((2, 8, 16))).shape
    (2, 8, 16)
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        rngs: nnx.Rngs,
        **options: Unpack[LayerNormMLPKeywords],
    ):
        super().__init__(hidden_size, ffn_hidden_size, eps, **options, rngs=rngs)

    def __call__(  # type: ignore[override]
        self, inp: Array, is_first_microbatch: bool | None = None, *, adapters: Any = None
    ) -> Any:
        """Apply the layer.

        Args:
            inp: ``[..., h]``, the ``x`` of `jax_te.layers.LayerNormMLP`.
            is_first_microbatch: mode of the kernel cache for both projections, see `jax_te.layers.Linear`.
            adapters: those of `jax_te.layers.LoRA`, see `jax_te.layers.LayerNormMLP`.

        Returns:
            The results of `jax_te.layers.LayerNormMLP`.
        """
        return super().__call__(inp, is_first_microbatch, adapters=adapters)
