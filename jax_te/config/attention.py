"""Fields of a configuration that Megatron's attention core reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args

from jax_te._validation import check_annotations, check_positive, is_integer, log_hints
from jax_te.typing import Words

CpCommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]
"""Exchanges of keys and values between devices that share a sequence, in Transformer Engine's words."""

CP_COMM_TYPES: tuple[CpCommType, ...] = get_args(CpCommType)
"""Ways to exchange keys and values under context parallelism."""


def is_windowed_layer(window_size: tuple[int, int] | None, window_attn_skip_freq: Any, number: int) -> bool:
    """Return whether layer ``number``, from 1, attends in a window: Megatron-Core's rule.

    Raises:
        ValueError: for a ``window_attn_skip_freq`` of another type, or without an entry for the layer.

    >>> [is_windowed_layer((128, 0), 3, number) for number in (1, 2, 3)]
    [True, True, False]
    """
    if window_size is None:
        return False
    if window_attn_skip_freq is None:
        return True
    if is_integer(window_attn_skip_freq):
        check_positive(window_attn_skip_freq=window_attn_skip_freq)
        return number % window_attn_skip_freq != 0
    if isinstance(window_attn_skip_freq, (list, tuple)):
        if len(window_attn_skip_freq) < number:
            raise ValueError(f"window_attn_skip_freq has no entry for layer {number}, got {window_attn_skip_freq}")
        return bool(window_attn_skip_freq[number - 1])
    raise ValueError(
        f"window_attn_skip_freq must be an integer, a sequence with an entry for each layer or None, got "
        f"{window_attn_skip_freq!r}"
    )


_WINDOW = Words("two integers >= -1, e.g. (128, 0), or None", error=ValueError)
_SIZES = Words("two integers >= 1, (a2a ranks, p2p ranks), or None", error=ValueError)
_EXCHANGE = Words(
    f"one of None, {', '.join(map(repr, CP_COMM_TYPES))}, or a list with one for each layer", error=ValueError
)


@dataclass(frozen=True, kw_only=True)
class LatentAttentionOptions:
    """Sizes of multi-latent attention: of the latents, from which queries, keys and values are computed, and of heads.

    Args:
        q_lora_rank: size of the queries' latent. None: queries are projected from the input.
        kv_lora_rank: size of the latent of keys and values.
        qk_head_dim: size of a head's part of queries and keys that is not rotated.
        qk_pos_emb_head_dim: size of the part that is rotated, whose key all heads share.
        v_head_dim: size of a head of values.
        latent_layernorm: whether to normalize both latents.

    Raises:
        TypeError: for a field of another type.
        ValueError: for a size that is not positive.

    Source: ``MLATransformerConfig`` of Megatron-Core; DeepSeek-AI 2024, "DeepSeek-V2".

    >>> LatentAttentionOptions(q_lora_rank=None).head_channels
    192
    """

    q_lora_rank: int | None = 512
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    latent_layernorm: bool = True

    def __post_init__(self) -> None:
        check_annotations(self, LatentAttentionOptions)
        sizes = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "latent_layernorm"}
        check_positive(**{name: size for name, size in sizes.items() if size is not None})

    @property
    def head_channels(self) -> int:
        """Size of a head of queries and keys."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Options of the attention core; `TransformerConfig` has these fields, too.

    Args:
        softmax_scale: factor of the scores. None: ``1 / sqrt(d)``.
        softmax_type: ``"vanilla"``, ``"off-by-one"`` (1 is added to the denominator) or ``"learnable"`` (the
            exponential of a learnable parameter of each head is added).
        logit_softcap: ``cap tanh(scores / cap)`` in place of the scaled scores (Gemma 2). None: no cap.
        window_size: ``(left, right)`` positions that a query attends to besides its own; -1: all. None: no window.
        window_attn_skip_freq: the layers without the window. An integer ``N``: every ``N``-th layer. A list with one
            entry for each layer: those whose entry is 0. None: no layer.
        qk_layernorm: whether to normalize every head of queries and keys, with the model's ``normalization``, before
            the rotary embedding (Qwen 3).
        qk_layernorm_across_heads: whether these norms are over the channels of all heads together, each with a scale of
            its own (OLMoE), and not over each head's.
        apply_query_key_layer_scaling: option without effect. Megatron divides scores by the layer's number, and
            multiplies by it in the softmax, against overflow in fp16; here scores are fp32.
        attention_softmax_in_fp32: option without effect: the softmax is always in fp32, as in Transformer Engine.
        batch_invariant_mode: option without effect: it sets ``num_splits`` of a CUDA kernel that JAX does not call.
        qk_clip: whether the query and key weights are to be clipped. Layers of `jax_te.megatron` then return each
            head's max logit with the output; `GPTModel` computes them in `GPTModel.max_logits`.
        qk_clip_alpha, qk_clip_threshold: the arguments of `jax_te.layers.clip_qk`, which the training loop calls: the
            exponent for the query weights, and the max logit above which weights are clipped.
        log_max_attention_logit: whether each head's max logit is to be logged: it is returned as under ``qk_clip``.
        cp_comm_type: exchange of keys and values along the context axis: one of `CP_COMM_TYPES`, or a list with one for
            each layer. None: ``"p2p"``. No effect where the mesh's context axis is 1.
        hierarchical_context_parallel_sizes: sizes for ``"a2a+p2p"``: number of neighbouring devices that exchange
            heads, and number of such groups in the ring. None for the other types.
        cp_load_balanced: whether to shard the tokens of a sequence over the context axis in zig-zag order, so that
            every device has the same work under a causal mask; see `jax_te.ops.zigzag_positions`. Inputs and outputs of
            `GPTModel` stay in natural order. Without effect where the mesh's context axis is 1.

    Lists become tuples, as a hashable configuration needs.

    Raises:
        ValueError: for unknown names and values out of range; for a list ``cp_comm_type`` without exactly one entry for
            each layer.
        TypeError: for a flag that is not a bool.

    Source: ``megatron.core.transformer.TransformerConfig``.

    >>> AttentionConfig(window_size=(128, 0)).softmax_type
    'vanilla'
    """

    softmax_scale: float | None = None
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    logit_softcap: float | None = None
    window_size: Annotated[tuple[int, int] | None, _WINDOW] = None
    window_attn_skip_freq: int | Sequence[int] | None = None
    qk_layernorm: bool = False
    qk_layernorm_across_heads: bool = False
    apply_query_key_layer_scaling: bool = False
    attention_softmax_in_fp32: bool = True
    batch_invariant_mode: bool = False
    qk_clip: bool = False
    qk_clip_alpha: float = 0.5
    qk_clip_threshold: float = 100.0
    log_max_attention_logit: bool = False
    cp_comm_type: Annotated[CpCommType | tuple[CpCommType, ...] | None, _EXCHANGE] = None
    hierarchical_context_parallel_sizes: Annotated[tuple[int, int] | None, _SIZES] = None
    cp_load_balanced: bool = False

    def __post_init__(self) -> None:
        for name in ("window_size", "window_attn_skip_freq", "cp_comm_type", "hierarchical_context_parallel_sizes"):
            value = getattr(self, name)
            # YAML and JSON only have lists, but a configuration must be hashable: it is part of jit cache keys.
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        check_annotations(self, AttentionConfig)
        log_hints(
            apply_query_key_layer_scaling=self.apply_query_key_layer_scaling,
            attention_softmax_in_fp32=not self.attention_softmax_in_fp32,
            batch_invariant_mode=self.batch_invariant_mode,
        )
        if self.cp_comm_type == ():
            raise ValueError(f"cp_comm_type must be {_EXCHANGE.words}, got an empty list")
        pairs = {"window_size": (-1, _WINDOW), "hierarchical_context_parallel_sizes": (1, _SIZES)}
        for name, (least, allowed) in pairs.items():
            pair = getattr(self, name)
            if pair is not None and min(pair) < least:
                raise ValueError(f"{name} must be {allowed.words}, got {pair!r}")
        # "not >" instead of "<=", so that nan is refused, too.
        for name in ("softmax_scale", "logit_softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0.0:
                raise ValueError(f"{name} must be > 0, got {value!r}")
        if self.qk_layernorm_across_heads and not self.qk_layernorm:
            raise ValueError(
                "qk_layernorm_across_heads=True says how qk_layernorm normalizes, and that is False; leave one out"
            )
        if not self.qk_clip_threshold > 0.0:
            raise ValueError(f"qk_clip_threshold must be > 0, got {self.qk_clip_threshold!r}")
        if not 0.0 <= self.qk_clip_alpha <= 1.0:
            raise ValueError(f"qk_clip_alpha must be in [0, 1], got {self.qk_clip_alpha!r}")

    def _check_layers(self, num_layers: int) -> None:
        """Check the fields with an entry for each layer."""
        skip: Any = self.window_attn_skip_freq
        each = isinstance(skip, tuple) and len(skip) == num_layers and all(isinstance(entry, int) for entry in skip)
        if not (skip is None or (is_integer(skip) and skip >= 1) or each):
            raise ValueError(
                f"window_attn_skip_freq must be an integer >= 1, or an integer for each of {num_layers} layers, 0 for "
                f"those without the window; got {skip!r}"
            )
        kinds = self.cp_comm_type
        if isinstance(kinds, tuple) and len(kinds) != num_layers:
            raise ValueError(f"cp_comm_type has {len(kinds)} entries for {num_layers} layers; give one for each")
