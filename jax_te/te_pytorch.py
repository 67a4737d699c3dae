"""The functions of `transformer_engine.pytorch`, and its calling conventions where `jax_te`'s differ.

``import jax_te.te_pytorch as te`` replaces ``import transformer_engine.pytorch as te``: the other layers are
those of `jax_te.layers`, under the same names, with the same arguments and ``rngs``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any

from flax import nnx

from jax_te import layers
from jax_te._validation import checked, log_hints
from jax_te.layers import (
    DotProductAttention,
    Fp8Padding,
    Fp8Unpadding,
    KVCache,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    WindowKVCache,
)
from jax_te.megatron import te_checkpoint
from jax_te.ops import RowGroups
from jax_te.random import RNGStatesTracker
from jax_te.recipe import DelayedScaling, Recipe
from jax_te.recipe import autocast as _autocast
from jax_te.typing import Array, DTypeLike, Initializer, TensorGroup, Words

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "TransformerLayer",
    "autocast",
    "checkpoint",
    "fp8_autocast",
]

NoReductionGroup = Annotated[
    None,
    Words(
        "None",
        "JAX has no process groups: DelayedScaling(tp_only_amax_red=True) reduces amaxes over the mesh's tensor and "
        "context axes alone",
    ),
]


@checked
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: NoReductionGroup = None,
) -> AbstractContextManager[None]:
    """Return the context of `jax_te.recipe.autocast`, with the arguments of ``transformer_engine.pytorch.autocast``.

    Args:
        enabled: whether to quantize.
        calibrating: must be False. Transformer Engine gathers amaxes in high precision if it is True.
        recipe: None: ``DelayedScaling()``.
        amax_reduction_group: None; the recipe says over which part of the mesh amaxes are reduced.

    Raises:
        ValueError: for ``calibrating=True``.
        TypeError: for a group, a recipe that is not one, or a flag that is not a bool.

    Source: ``transformer_engine.pytorch.autocast``.

    >>> from jax_te.recipe import current_recipe
    >>> with autocast():
    ...     current_recipe() == DelayedScaling()
    True
    """
    if calibrating:
        raise ValueError(
            "calibrating=True: scales are computed in each step, and delayed scaling's first step takes them from its "
            "own data. jax_te.quantize.observe_quantization gives the amaxes of a call; leave calibrating False"
        )
    return _autocast(DelayedScaling() if recipe is None else recipe, enabled=enabled)


@checked
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: NoReductionGroup = None,
) -> AbstractContextManager[None]:
    """Return the context of `autocast`, under the older names of its arguments.

    Args:
        enabled: whether to quantize. The first releases' default was False.
        calibrating, fp8_recipe, fp8_group: arguments ``calibrating``, ``recipe`` and ``amax_reduction_group`` of
            `autocast`.

    Raises:
        ValueError, TypeError: see `autocast`.

    Source: ``transformer_engine.pytorch.fp8_autocast``.

    >>> from jax_te.recipe import current_recipe
    >>> with fp8_autocast(enabled=False):
    ...     print(current_recipe())
    None
    """
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


@checked
def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], RNGStatesTracker] | None = None,
    get_cuda_rng_tracker: Callable[[], RNGStatesTracker] | None = None,
    tp_group: TensorGroup = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Return ``function(*args, **kwargs)``, which backward recomputes; see `jax_te.megatron.te_checkpoint`.

    As in Transformer Engine, the options may stand in front of the function's arguments:
    ``checkpoint(function, False, get_cuda_rng_tracker, None, x)``. They are read so if three or more arguments are
    given, of which the first is a bool, the second None or a function and the third None or a name.

    Args:
        function: function of arrays and pytrees of arrays, or a module.
        *args, **kwargs: arguments of ``function``.
        distribute_saved_activations, get_rng_state_tracker, tp_group: see `jax_te.megatron.te_checkpoint`.
        get_cuda_rng_tracker: the older name of ``get_rng_state_tracker``.
        use_reentrant: option without effect: it chooses among PyTorch's implementations.

    Raises:
        TypeError, ValueError, RuntimeError: see `jax_te.megatron.te_checkpoint`.

    Source: ``transformer_engine.pytorch.checkpoint``.

    >>> loss = lambda x: checkpoint(jnp.sin, False, None, None, x).sum()
    >>> jax.grad(loss)(jnp.zeros(2)).tolist()
    [1.0, 1.0]
    """
    log_hints(use_reentrant=not use_reentrant)
    options: tuple[Any, ...] = (distribute_saved_activations, get_rng_state_tracker or get_cuda_rng_tracker, tp_group)
    # A function whose own first arguments match this pattern needs the options, or its own arguments, as keywords.
    flag, tracker, group = (*args, *(options,) * 3)[:3]
    if isinstance(flag, bool) and (tracker is None or callable(tracker)) and (group is None or isinstance(group, str)):
        options, args = args[:3], args[3:]
    return te_checkpoint(function, *options, *args, **kwargs)


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

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int | tuple[int, ...],
        bias: bool = True,
        *,
        init_method: Initializer | None = None,
        sequence_parallel: bool = False,
        tp_group: TensorGroup = None,
        tp_size: int = 1,
        parallel_mode: str | None = None,
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
                raise ValueError(f"{name}=True cannot be followed by a GroupedLinear: {why}; leave it False")
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
            m_splits: number of rows of each kernel, the ``group_sizes`` of `jax_te.layers.GroupedLinear`.
            is_first_microbatch: mode of the kernel cache, see `jax_te.layers.GroupedLinear`.

        Returns:
            The results of `jax_te.layers.GroupedLinear`.
        """
        return super().__call__(inp, m_splits, is_first_microbatch)


class TransformerLayer(layers.TransformerLayer):
    """`jax_te.layers.TransformerLayer`, called with the names and the order of Transformer Engine's arguments.

    Source: ``transformer_engine.pytorch.TransformerLayer``.

    >>> layer = TransformerLayer(32, 64, 4, self_attn_mask_type="padding", rngs=nnx.Rngs(0))
    >>> padding = jnp.arange(8)[None, None, None] >= 6
    >>> key = jax.random.key(1)
    >>> layer(hidden_states=jnp.ones((1, 8, 32)), attention_mask=padding, dropout_key=key).shape
    (1, 8, 32)
    """

    @checked
    def __call__(  # type: ignore[override]  # Transformer Engine's arguments
        self,
        hidden_states: Array,
        attention_mask: Any = None,
        encoder_output: Array | None = None,
        enc_dec_attn_mask: Any = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: KVCache | WindowKVCache | None = None,
        **options: Any,
    ) -> Any:
        """Apply the layer.

        Args:
            hidden_states: ``[b, s, h]``, the ``x`` of `jax_te.layers.TransformerLayer`.
            inference_params: object with a ``cache``; a call with one also returns it, with the new tokens appended.
            attention_mask, encoder_output, enc_dec_attn_mask, is_first_microbatch, checkpoint_core_attention, options:
                see `jax_te.layers.TransformerLayer`.

        Returns:
            The results of `jax_te.layers.TransformerLayer`.
        """
        return super().__call__(
            hidden_states,
            attention_mask,
            encoder_output,
            enc_dec_attn_mask,
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
            cache=inference_params,
            **options,
        )
