"""QK clipping: scaling down of query and key weights whose attention logits grow too large."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jax_te._validation import checked
from jax_te.layers.attention.multi_latent_attention import MultiLatentAttention
from jax_te.layers.attention.multihead_attention import MultiheadAttention
from jax_te.layers.kernel_cache import drop_cached_kernels
from jax_te.layers.linear import Linear
from jax_te.quantize import QuantizedKernel
from jax_te.typing import Array


@checked
def clip_qk(
    attention: MultiheadAttention, max_logit: Array, *, threshold: float = 100.0, alpha: float = 0.5
) -> MultiheadAttention:
    """Scale down the query and key projections of groups whose max logit exceeds ``threshold``.

    With ``eta = min(threshold / max_logit, 1)`` over the heads of a group, the group's query kernels are multiplied by
    ``eta**alpha`` and its key kernel by ``eta**(1 - alpha)``, biases likewise, so that the same inputs give logits up
    to the threshold. Value projections do not change. Call the function on the model after the optimizer's update; it
    may run under jit. The fp32 masters of `jax_te.training` follow at the next update.

    Args:
        attention: self-attention layer; it is changed in place. In a `MultiLatentAttention` every head is a group; the
            rotated part of its queries, whose key all heads share, is multiplied by ``eta``.
        max_logit: fp32 ``[n]``, as calls with ``return_max_logit`` return it; the maximum over calls since the last
            clipping.
        threshold: max logit above which kernels are scaled down.
        alpha: exponent of ``eta`` for query kernels; key kernels have ``1 - alpha``.

    Returns:
        ``attention``.

    Raises:
        ValueError: for a layer without fused projections, with an adapter around one, with norms of queries and keys,
            whose logits do not follow the kernels' size, or whose kernels are stored quantized; for ``max_logit`` None
            or of another number of heads, a threshold that is not positive, and an ``alpha`` outside [0, 1].

    Source: ``clip_qk`` of ``megatron.core.transformer.attention``; Kimi Team 2025 (MuonClip).

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jax_te.layers import MultiheadAttention, clip_qk
    >>> layer = MultiheadAttention(32, 4, attention_dropout=0.0, return_max_logit=True, rngs=nnx.Rngs(0))
    >>> y, logits = layer(jnp.ones((1, 8, 32)))
    >>> clip_qk(layer, logits) is layer
    True
    """
    check_clip_qk(attention, max_logit, threshold=threshold, alpha=alpha)
    core = attention.core_attention
    if isinstance(attention, MultiLatentAttention):
        _clip_latent(attention, max_logit, threshold, alpha)
        drop_cached_kernels(attention)  # they were made from the old values
        return attention
    r = core.num_attention_heads // core.num_gqa_groups
    # The heads of a group share one key kernel, so the group is scaled by the factor of its max logit.
    group_max = jnp.max(max_logit.reshape(core.num_gqa_groups, r), axis=1)
    eta = jnp.where(group_max > threshold, threshold / group_max, jnp.ones((), jnp.float32))
    by_component = jnp.stack([eta**alpha] * r + [eta ** (1.0 - alpha), jnp.ones_like(eta)])
    factor = jnp.repeat(by_component, core.kv_channels, axis=1)  # [r + 2, g·d]
    for variable in (attention.qkv.kernel, attention.qkv.bias):
        if variable is not None:
            _scale(variable, factor)
    drop_cached_kernels(attention)  # they were made from the old values
    return attention


def _clip_latent(attention: MultiLatentAttention, max_logit: Array, threshold: float, alpha: float) -> None:
    """Scale the kernels from the latents to queries and keys, by head."""
    latent = attention.latent
    eta = jnp.where(max_logit > threshold, threshold / max_logit, jnp.ones((), jnp.float32))[:, None]

    def of_parts(*parts: tuple[Array, int]) -> Array:
        return jnp.concatenate([jnp.repeat(factor, size, axis=1) for factor, size in parts], axis=1).reshape(-1)

    # The rotated key is shared by all heads, so that the rotated part of queries takes the whole factor.
    of_queries = of_parts((eta**alpha, latent.qk_head_dim), (eta, latent.qk_pos_emb_head_dim))
    of_keys_and_values = of_parts((eta ** (1.0 - alpha), latent.qk_head_dim), (jnp.ones_like(eta), latent.v_head_dim))
    queries, keys = _scaled_layers(attention).values()
    _scale(queries.kernel, of_queries)
    _scale(keys.kernel, of_keys_and_values)


def _scale(variable: Any, factor: Array) -> None:
    """Multiply a kernel or bias by a factor for each of its outputs."""
    value = variable.get_value()
    # In fp32: a factor rounded to bf16 would leave the logits up to 0.4 % above the threshold.
    scaled = value.astype(jnp.float32) * factor.reshape((1,) * (value.ndim - factor.ndim) + factor.shape)
    variable.set_value(scaled.astype(value.dtype))


@checked
def check_clip_qk(
    attention: MultiheadAttention, max_logit: Array, *, threshold: float = 100.0, alpha: float = 0.5
) -> None:
    """Raise the errors of `clip_qk`, and change nothing: for several layers, all of which are checked before one is.

    >>> from jax_te.layers import MultiheadAttention
    >>> check_clip_qk(MultiheadAttention(32, 4, rngs=nnx.Rngs(0)), jnp.ones(4))
    """
    scaled, core = _scaled_layers(attention), attention.core_attention
    for name, layer in scaled.items():
        if not isinstance(layer, Linear):
            raise ValueError(
                f"clip_qk scales the kernel of {name}, which has an adapter, {type(layer).__name__}, whose share of "
                "the logits would stay: merge it first, and put what its merge() returns in its place"
            )
    if attention.q_norm is not None:
        raise ValueError("queries and keys are normalized (qk_norm_type): scaling their kernels changes no logit")
    if max_logit is None:
        raise ValueError("max_logit is None; give the max logits of the layer's calls with return_max_logit=True")
    if not threshold > 0.0 or not 0.0 <= alpha <= 1.0:
        raise ValueError(f"threshold must be > 0 and alpha in [0, 1], got {threshold!r} and {alpha!r}")
    if max_logit.shape != (core.num_attention_heads,):
        raise ValueError(f"max_logit must be [n] = ({core.num_attention_heads},), got {max_logit.shape}")
    for name, layer in scaled.items():
        if isinstance(layer.kernel.get_value(), QuantizedKernel):
            raise ValueError(
                f"the kernel of {name} is stored quantized; clip before quantize_parameters, or without fp8_param"
            )


def _scaled_layers(attention: MultiheadAttention) -> dict[str, Any]:
    """Return the projections whose kernels are scaled, by their names; raise ValueError for other forms of attention.

    An adapter around one is returned as it is.
    """
    if isinstance(attention, MultiLatentAttention):
        queries = "query" if attention.latent.q_lora_rank is None else "q_up"
        return {name: getattr(attention, name) for name in (queries, "kv_up")}
    if attention.attention_type != "self" or not attention.fuse_qkv_params:
        raise ValueError("clip_qk takes self-attention with one fused kernel, fuse_qkv_params=True")
    return {"qkv": attention.qkv}
