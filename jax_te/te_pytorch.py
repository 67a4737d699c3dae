"""Layers and functions of `transformer_engine.pytorch`: those of `jax_te`, with its names and its order of arguments.

Activations are ``[b, s, h]``. Transformer Engine's default is ``[s, b, h]``, over which attention here would run along
the batch. So ``attn_input_format`` and ``qkv_format`` have its default, ``"sbhd"``, and are refused unless a program
transposes its activations and says ``"bshd"``.

``import jax_te.te_pytorch as te`` takes the place of ``import transformer_engine.pytorch as te``. Arguments that may be
given by position are Transformer Engine's first ones, in its order; the others are keywords, those of the classes of
`jax_te.layers`. Constructors take ``rngs``. What PyTorch needs alone is not taken: devices, names, user buffers, random
state trackers.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, ClassVar, Unpack

from flax import nnx

from jax_te import layers
from jax_te._validation import checked, log_hints, log_once
from jax_te.layers import (
    AttentionCallKeywords,
    DotProductAttentionCallKeywords,
    DotProductAttentionKeywords,
    Fp8Padding,
    Fp8Unpadding,
    KVCache,
    LayerNormLinearKeywords,
    LayerNormMLPKeywords,
    LinearKeywords,
    MultiheadAttentionKeywords,
    Rotary,
    TransformerLayerCallKeywords,
    TransformerLayerKeywords,
    WindowKVCache,
)
from jax_te.layers.attention import MaskArguments, log_unread_mask, read_mask
from jax_te.megatron import te_checkpoint
from jax_te.ops import BiasType, MaskType, RowGroups, Window
from jax_te.random import RNGStatesTracker
from jax_te.recipe import DelayedScaling, Recipe
from jax_te.recipe import autocast as _autocast
from jax_te.typing import Array, DTypeLike, Initializer, ParallelMode, TensorGroup, Words

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
        calibrating: option that must be False. Transformer Engine gathers amaxes in high precision if it is True.
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
    ``checkpoint(function, False, get_cuda_rng_tracker, None, x)``. They are read so, which is logged once, if the first
    argument is a bool, the second None or a function and the third None or a name, and the function does not take them.
    A function that takes the arguments with and without these three, such as one of ``*args``, is refused: give the
    options as keywords, or the function's own first arguments by ``functools.partial``.

    Args:
        function: function of arrays and pytrees of arrays, or a module.
        *args, **kwargs: arguments of ``function``.
        distribute_saved_activations, get_rng_state_tracker, tp_group: see `jax_te.megatron.te_checkpoint`.
        get_cuda_rng_tracker: the older name of ``get_rng_state_tracker``.
        use_reentrant: option without effect: it chooses among PyTorch's implementations.

    Raises:
        TypeError: for three arguments that may be options or the function's own; for options both in front and as
            keywords; for two trackers; see also `jax_te.megatron.te_checkpoint`.
        ValueError, RuntimeError: see `jax_te.megatron.te_checkpoint`.

    Source: ``transformer_engine.pytorch.checkpoint``.

    >>> loss = lambda x: checkpoint(jnp.sin, False, None, None, x).sum()
    >>> jax.grad(loss)(jnp.zeros(2)).tolist()
    [1.0, 1.0]
    """
    if None not in (get_rng_state_tracker, get_cuda_rng_tracker) and get_rng_state_tracker != get_cuda_rng_tracker:
        raise TypeError(
            "get_cuda_rng_tracker is the older name of get_rng_state_tracker, and both are given: "
            f"{get_cuda_rng_tracker!r} and {get_rng_state_tracker!r}; give one"
        )
    log_hints(use_reentrant=not use_reentrant)
    options: tuple[Any, ...] = (distribute_saved_activations, get_rng_state_tracker or get_cuda_rng_tracker, tp_group)
    if _options_in_front(function, args, kwargs):
        if options != (False, None, None):
            raise TypeError(
                f"checkpoint has options in front of the function's arguments, {args[:3]!r}, and as keywords, too; "
                "give them once"
            )
        log_once(
            "checkpoint(function, flag, tracker, group, ...) has the options of Transformer Engine in front of the "
            "function's arguments; as keywords they are distribute_saved_activations, get_rng_state_tracker and "
            "tp_group"
        )
        options, args = args[:3], args[3:]
    return te_checkpoint(function, *options, *args, **kwargs)


def _options_in_front(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the first three arguments are options of `checkpoint`, and not the function's own.

    Raises:
        TypeError: if they may be either.
    """
    # Transformer Engine takes them in front, too, as deprecated, and tells them by their types: its tracker is a
    # function, its group an object of PyTorch's. Here either may be None, as a function's own arguments may, so the
    # function's signature decides.
    if len(args) < 3:
        return False
    flag, tracker, group = args[:3]
    are_alike = isinstance(flag, bool) and (tracker is None or callable(tracker))
    if not are_alike or not (group is None or isinstance(group, str)):
        return False
    takes_all, takes_rest = _takes(function, args, kwargs), _takes(function, args[3:], kwargs)
    if takes_all and takes_rest:
        raise TypeError(
            f"checkpoint cannot tell whether {args[:3]!r} are its options or arguments of the function, which takes "
            "the others with and without them: give the options as keywords (distribute_saved_activations, "
            "get_rng_state_tracker, tp_group), or the function's first arguments by functools.partial(function, ...)"
        )
    return not takes_all


def _takes(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function's signature has a place for each of these arguments."""
    # A module's own arguments are those of its forward, where __call__ hands on whatever it is given.
    called = getattr(function, "forward", function)
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # such as functions of other languages have none
        return True
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


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


def _require_batch_first(**formats: str | None) -> None:
    """Refuse a format of activations in which the batch is not the first axis."""
    for name, given in formats.items():
        if given != "bshd":
            raise ValueError(
                f"{name} must be 'bshd', got {given!r}{', the default of Transformer Engine' * (given == 'sbhd')}: "
                f"activations here are [b, s, h]. Transpose them, x.swapaxes(0, 1), and give {name}='bshd'; packed "
                "sequences of format 'thd' are packed_seq_params"
            )


def _refuse_in_a_call(**given: Any) -> None:
    """Refuse options of a call that a constructor or a mask type determines here."""
    for name, value in given.items():
        if value is not None:
            instead = "a mask type, causal or causal_bottom_right" if "diagonal" in name else "it to the constructor"
            raise ValueError(f"{name}={value!r} is not supported in a call; leave it None, and give {instead}")


@checked
class DotProductAttention(layers.DotProductAttention):
    """`jax_te.layers.DotProductAttention`, called with the names and the order of Transformer Engine's arguments.

    Args:
        num_attention_heads, kv_channels, num_gqa_groups, attention_dropout: see `jax_te.layers.DotProductAttention`.
        qkv_format: option that must be ``"bshd"``: arrays are ``[b, s, n, d]``. Transformer Engine's default is
            refused.
        **options: keywords of `jax_te.layers.DotProductAttention`.

    Raises:
        ValueError: for another ``qkv_format``; see also `jax_te.layers.DotProductAttention`.

    Source: ``transformer_engine.pytorch.DotProductAttention``.

    >>> core, q = DotProductAttention(4, 8, qkv_format="bshd"), jnp.ones((2, 6, 4, 8))
    >>> core(query_layer=q, key_layer=q, value_layer=q).shape
    (2, 6, 4, 8)
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        **options: Unpack[DotProductAttentionKeywords],
    ):
        _require_batch_first(qkv_format=qkv_format)
        super().__init__(
            num_attention_heads,
            kv_channels,
            num_gqa_groups=num_gqa_groups,
            attention_dropout=attention_dropout,
            **options,
        )

    def __call__(  # type: ignore[override]  # Transformer Engine's arguments
        self,
        query_layer: Array,
        key_layer: Array | None = None,
        value_layer: Array | None = None,
        attention_mask: Array | None = None,
        qkv_format: str | None = None,
        **options: Unpack[DotProductAttentionCallKeywords],
    ) -> Any:
        """Apply attention.

        Args:
            query_layer, key_layer, value_layer: ``query``, ``key`` and ``value`` of
                `jax_te.layers.DotProductAttention`.
            attention_mask: bool, True is masked out: broadcastable to ``[b, n, sq, skv]`` under the mask type
                ``"arbitrary"``; padding ``[b, 1, 1, s]``, or a pair of it for queries and keys, under the padding
                types. Other types, and packed sequences, ignore it, as in Transformer Engine, which is logged once.
            qkv_format: None or ``"bshd"``.
            **options: keywords of `jax_te.layers.DotProductAttention`.

        Returns:
            The results of `jax_te.layers.DotProductAttention`: ``y [b, s, n, dv]``, whose last two axes Transformer
            Engine merges.
        """
        _require_batch_first(qkv_format="bshd" if qkv_format is None else qkv_format)
        packed = options.get("packed_seq_params") is not None
        masks = _read_mask(
            attention_mask,
            self,
            query_layer,
            options.pop("attn_mask_type", None),
            options.pop("window_size", None),
            of_self=True,
            packed=packed,
        )
        return super().__call__(query_layer, key_layer, value_layer, **masks._asdict(), **options)


def _read_mask(
    mask: Any,
    core: Any,
    queries: Array,
    mask_type: MaskType | None,
    window: Window | None,
    *,
    of_self: bool,
    packed: bool,
) -> MaskArguments:
    """Return the arguments of a layer of `jax_te.layers` that say what Transformer Engine reads from a mask.

    Args:
        mask: mask of the call, or None.
        core: core of attention, which has the layer's mask type and window.
        queries: input ``[b, s, ...]`` of the call.
        mask_type, window: mask type and window of the call, in place of the layer's.
        of_self: whether it is self-attention.
        packed: whether the call has boundaries of packed sequences.
    """
    kind: MaskType = core.attn_mask_type if mask_type is None else mask_type
    if mask is not None and packed and kind != "arbitrary":
        log_unread_mask(kind, packed=True)
        mask = None
    if mask is None:
        return MaskArguments(None, mask_type, window)
    in_force = core.window_size if window is None else window
    return read_mask(mask, kind, in_force, queries.shape[1], of_self=of_self, ignored=True)


@checked
class MultiheadAttention(layers.MultiheadAttention):
    """`jax_te.layers.MultiheadAttention`, called with the names and the order of Transformer Engine's arguments.

    Args:
        hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon: see
            `jax_te.layers.MultiheadAttention`.
        qkv_format: option that must be ``"bshd"``: activations are ``[b, s, h]``. Transformer Engine's default is
            refused.
        input_layernorm: whether there is a norm in front; False by default, as in Transformer Engine.
        rngs: random streams, of which ``params`` draws the kernels.
        **options: keywords of `jax_te.layers.MultiheadAttention`, with Transformer Engine's names.

    Raises:
        ValueError: for another ``qkv_format``; see also `jax_te.layers.MultiheadAttention`.

    Source: ``transformer_engine.pytorch.MultiheadAttention``.

    >>> layer = MultiheadAttention(32, 4, qkv_format="bshd", attention_dropout=0.0, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 8, 32)), None, None, "causal").shape
    (2, 8, 32)
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        *,
        qkv_format: str = "sbhd",
        input_layernorm: bool = False,
        rngs: nnx.Rngs,
        **options: Unpack[MultiheadAttentionKeywords],
    ):
        _require_batch_first(qkv_format=qkv_format)
        super().__init__(
            hidden_size,
            num_attention_heads,
            kv_channels=kv_channels,
            attention_dropout=attention_dropout,
            layernorm_epsilon=layernorm_epsilon,
            input_layernorm=input_layernorm,
            **options,
            rngs=rngs,
        )

    def __call__(  # type: ignore[override]  # Transformer Engine's arguments
        self,
        hidden_states: Array,
        attention_mask: Any = None,
        encoder_output: Array | None = None,
        attn_mask_type: MaskType | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: KVCache | WindowKVCache | None = None,
        rotary_pos_emb: Rotary | None = None,
        core_attention_bias_type: BiasType = "no_bias",
        core_attention_bias: Array | None = None,
        alibi_slopes: Array | None = None,
        **options: Unpack[AttentionCallKeywords],
    ) -> Any:
        """Apply the layer.

        Args:
            hidden_states: ``[b, s, h]``, the ``x`` of `jax_te.layers.MultiheadAttention`.
            bottom_right_diagonal: option that must be None: the mask type says it.
            inference_params: keys and values of the tokens before, a `jax_te.layers.KVCache` or `WindowKVCache`; a call
                with it returns it, too, with the new tokens appended.
            attention_mask: see `DotProductAttention`.
            encoder_output, attn_mask_type, window_size, is_first_microbatch, checkpoint_core_attention,
                rotary_pos_emb, core_attention_bias_type, core_attention_bias, alibi_slopes: see
                `jax_te.layers.MultiheadAttention`.
            **options: other keywords of `jax_te.layers.MultiheadAttention`, such as ``dropout_key``.

        Returns:
            The results of `jax_te.layers.MultiheadAttention`.
        """
        _refuse_in_a_call(bottom_right_diagonal=bottom_right_diagonal)
        masks = _read_mask(
            attention_mask,
            self.core_attention,
            hidden_states,
            attn_mask_type,
            window_size,
            of_self=self.attention_type == "self",
            packed=options.get("packed_seq_params") is not None,
        )
        return super().__call__(
            hidden_states,
            masks.attention_mask,
            encoder_output,
            attn_mask_type=masks.attn_mask_type,
            window_size=masks.window_size,
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
            cache=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            **options,
        )


@checked
class TransformerLayer(layers.TransformerLayer):
    """`jax_te.layers.TransformerLayer`, called with the names and the order of Transformer Engine's arguments.

    Args:
        hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups, layernorm_epsilon, hidden_dropout,
            attention_dropout: see `jax_te.layers.TransformerLayer`.
        attn_input_format: option that must be ``"bshd"``: activations are ``[b, s, h]``. Transformer Engine's default
            is refused.
        rngs: random streams, of which ``params`` draws the kernels.
        **options: keywords of `jax_te.layers.TransformerLayer`, with Transformer Engine's names.

    Raises:
        ValueError: for another ``attn_input_format``; see also `jax_te.layers.TransformerLayer`.

    Source: ``transformer_engine.pytorch.TransformerLayer``.

    >>> options = {"attn_input_format": "bshd", "self_attn_mask_type": "padding"}
    >>> layer = TransformerLayer(32, 64, 4, **options, rngs=nnx.Rngs(0))
    >>> padding = jnp.arange(8)[None, None, None] >= 6
    >>> key = jax.random.key(1)
    >>> layer(hidden_states=jnp.ones((1, 8, 32)), attention_mask=padding, dropout_key=key).shape
    (1, 8, 32)
    """

    # Transformer Engine ignores a mask that the mask type has no use for; `jax_te.layers` refuses it.
    _ignores_masks = True

    reads_layer_number: ClassVar[bool] = False

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        *,
        attn_input_format: str = "sbhd",
        rngs: nnx.Rngs,
        **options: Unpack[TransformerLayerKeywords],
    ):
        _require_batch_first(attn_input_format=attn_input_format)
        super().__init__(
            hidden_size,
            ffn_hidden_size,
            num_attention_heads,
            num_gqa_groups=num_gqa_groups,
            layernorm_epsilon=layernorm_epsilon,
            hidden_dropout=hidden_dropout,
            attention_dropout=attention_dropout,
            **options,
            rngs=rngs,
        )

    def __call__(  # type: ignore[override]  # Transformer Engine's arguments
        self,
        hidden_states: Array,
        attention_mask: Any = None,
        self_attn_mask_type: MaskType | None = None,
        window_size: Window | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Array | None = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: MaskType | None = None,
        enc_dec_window_size: Window | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: KVCache | WindowKVCache | None = None,
        rotary_pos_emb: Rotary | None = None,
        core_attention_bias_type: BiasType = "no_bias",
        core_attention_bias: Array | None = None,
        alibi_slopes: Array | None = None,
        **options: Unpack[TransformerLayerCallKeywords],
    ) -> Any:
        """Apply the layer.

        Args:
            hidden_states: ``[b, s, h]``, the ``x`` of `jax_te.layers.TransformerLayer`.
            window_size, enc_dec_window_size: options that must be None: the constructor takes them.
            bottom_right_diagonal, enc_dec_bottom_right_diagonal: options that must be None: the mask type says it.
            inference_params: keys and values of the tokens before, a `jax_te.layers.KVCache` or `WindowKVCache`; a call
                with it returns it, too, with the new tokens appended.
            attention_mask, enc_dec_attn_mask: see `jax_te.layers.TransformerLayer`; ignored under mask types that have
                no use for it, as in Transformer Engine.
            self_attn_mask_type, encoder_output, enc_dec_attn_mask_type,
                is_first_microbatch, checkpoint_core_attention, rotary_pos_emb, core_attention_bias_type,
                core_attention_bias, alibi_slopes: see `jax_te.layers.TransformerLayer`.
            **options: other keywords of `jax_te.layers.TransformerLayer`, such as ``dropout_key``.

        Returns:
            The results of `jax_te.layers.TransformerLayer`.
        """
        _refuse_in_a_call(
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            enc_dec_window_size=enc_dec_window_size,
            enc_dec_bottom_right_diagonal=enc_dec_bottom_right_diagonal,
        )
        return super().__call__(
            hidden_states,
            attention_mask,
            encoder_output,
            enc_dec_attn_mask,
            self_attn_mask_type=self_attn_mask_type,
            enc_dec_attn_mask_type=enc_dec_attn_mask_type,
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention,
            cache=inference_params,
            rotary_pos_emb=rotary_pos_emb,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            **options,
        )
