"""Multi-latent attention: queries, keys and values are computed from latents, and a cache holds latents alone."""

from __future__ import annotations

from typing import Any, cast

import jax.numpy as jnp
from flax import nnx

from jax_te._validation import check_positive, checked
from jax_te.config import CpCommType, LatentAttentionOptions
from jax_te.layers.attention.dot_product_attention import DotProductAttention
from jax_te.layers.attention.kv_cache import KVCache, WindowKVCache
from jax_te.layers.attention.multihead_attention import MultiheadAttention, ProjectionOptions, heads_axis_of
from jax_te.layers.attention.qkv import HEAD_AXES
from jax_te.layers.attention.rotary import Rotary, apply_rotary
from jax_te.layers.keywords import ParallelKeywords
from jax_te.layers.layernorm_linear import LayerNormLinear
from jax_te.layers.linear import Linear
from jax_te.layers.norm import Normalization, NormOptions, check_returned_norm
from jax_te.layers.results import add_bias
from jax_te.ops import MaskType, SoftmaxType, Window
from jax_te.quantize import QuantizedKernel
from jax_te.sharding import auto_region, axis_ranks
from jax_te.typing import Array, DTypeLike, Initializer, TensorGroup


@checked
class MultiLatentAttention(MultiheadAttention):
    """Self-attention whose queries, keys and values are computed from two latents, small projections of the input.

    With ``c = norm(x @ kv_down)``, a head's keys and values are parts of ``c @ kv_up``, and queries parts of
    ``norm(x @ q_down) @ q_up``. Both have a part that is rotated by position; its key is projected from ``x`` and
    shared by all heads. A `KVCache` of the layer holds ``c`` as its values and the rotated key as its keys, of one head
    (``layer.cached_heads``): with a cache, queries are multiplied by the keys' kernel (absorption), so that attention
    reads latents alone, and the values' kernel is applied to its result.

    The mesh's tensor axis splits ``q_up`` (or ``query``), ``kv_up`` and ``proj`` by heads; the projections to latents
    are replicated over it. All projections follow the ambient recipe, apart from the two products of absorption.

    Args:
        hidden_size: ``h``.
        num_attention_heads: heads ``n``.
        latent: sizes of latents and heads.
        normalization, layernorm_epsilon, zero_centered_gamma: options of the norm in front and of those of latents.
        softmax_scale: None: ``1 / sqrt(qk_head_dim + qk_pos_emb_head_dim)``. YaRN's models multiply this by
            ``YarnScaling.score_factor``.
        bias: whether the output projection has a bias; the others have none.
        attention_dropout, input_layernorm, return_layernorm_output, attn_mask_type, window_size, softmax_type,
            logit_softcap, return_max_logit, num_splits, cp_comm_type, hierarchical_context_parallel_sizes,
            cp_load_balanced, set_parallel_mode, sequence_parallel, tp_group, tp_size, fuse_wgrad_accumulation,
            return_bias, init_method, output_layer_init_method, params_dtype, rngs: see `MultiheadAttention`.

    A call takes the arguments of `MultiheadAttention`; its ``rotary_pos_emb`` is for heads of ``qk_pos_emb_head_dim``,
    with ``interleaved=True`` for the weights of DeepSeek's and Megatron's models.

    Raises:
        ValueError: for sizes that are not positive and unknown names; when called, see `MultiheadAttention`, and for a
            cache on a mesh that splits heads.

    Source: ``megatron.core.transformer.multi_latent_attention.MLASelfAttention``; DeepSeek-AI 2024, "DeepSeek-V2".

    >>> sizes = LatentAttentionOptions(
    ...     q_lora_rank=16, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=16, v_head_dim=16
    ... )
    >>> layer = MultiLatentAttention(32, 4, sizes, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 8, 32)), dropout_key=jax.random.key(1)).shape
    (2, 8, 32)
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        latent: LatentAttentionOptions,
        *,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        normalization: Normalization = "RMSNorm",
        zero_centered_gamma: bool = False,
        input_layernorm: bool = True,
        return_layernorm_output: bool = False,
        attn_mask_type: MaskType = "causal",
        window_size: Window | None = None,
        softmax_scale: float | None = None,
        softmax_type: SoftmaxType = "vanilla",
        logit_softcap: float | None = None,
        return_max_logit: bool = False,
        num_splits: int | None = None,
        cp_comm_type: CpCommType = "p2p",
        hierarchical_context_parallel_sizes: tuple[int, int] | None = None,
        cp_load_balanced: bool = False,
        set_parallel_mode: bool = True,
        sequence_parallel: bool = False,
        tp_group: TensorGroup = None,
        tp_size: int = 1,
        fuse_wgrad_accumulation: bool = False,
        return_bias: bool = False,
        bias: bool = False,
        init_method: Initializer | None = None,
        output_layer_init_method: Initializer | None = None,
        params_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_positive(hidden_size=hidden_size)
        check_returned_norm(input_layernorm, return_layernorm_output)
        # The names under which MultiheadAttention knows these options.
        self.attention_type, self.fuse_qkv_params = "self", False
        self.return_layernorm_output = return_layernorm_output
        self.q_norm = self.k_norm = None
        self.latent = latent
        self.core_attention = DotProductAttention(
            num_attention_heads,
            (latent.head_channels, latent.v_head_dim),
            attention_dropout=attention_dropout,
            attn_mask_type=attn_mask_type,
            window_size=window_size,
            softmax_scale=softmax_scale,
            softmax_type=softmax_type,
            logit_softcap=logit_softcap,
            return_max_logit=return_max_logit,
            num_splits=num_splits,
            cp_comm_type=cp_comm_type,
            hierarchical_context_parallel_sizes=hierarchical_context_parallel_sizes,
            cp_load_balanced=cp_load_balanced,
        )
        norm = NormOptions(normalization, layernorm_epsilon, zero_centered_gamma, sequence_parallel, params_dtype)
        shared: ParallelKeywords = {
            "sequence_parallel": sequence_parallel,
            "tp_group": tp_group,
            "tp_size": tp_size,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "params_dtype": params_dtype,
        }
        inward: ProjectionOptions = {
            **shared,
            "bias": False,
            "init_method": init_method,
            "parallel_mode": "column" if set_parallel_mode else None,
        }
        outward: ProjectionOptions = {
            **shared,
            "bias": bias,
            "init_method": output_layer_init_method,
            "parallel_mode": "row" if set_parallel_mode else None,
        }
        # One norm for the projections to both latents; fused layers would each compute it again.
        self.layernorm = norm.make(hidden_size, rngs) if input_layernorm else None
        # In this order: each draws keys from ``rngs``.
        self._make_latent_projections(hidden_size, norm, inward, rngs)
        self._make_output(hidden_size, latent.v_head_dim, outward, return_bias, rngs)

    def _make_latent_projections(self, h: int, norm: NormOptions, options: ProjectionOptions, rngs: nnx.Rngs) -> None:
        """Create the projections from the hidden size ``h`` to latents, and from these to queries, keys and values.

        Args:
            h: hidden size.
            norm: options of the latents' norms.
            options: options of each projection to heads.
            rngs: source of the kernels' keys.
        """
        n, latent = self.core_attention.num_attention_heads, self.latent
        # Latents have no heads that could be split, so the projections to them are whole.
        of_split = ("parallel_mode", "sequence_parallel", "tp_group", "tp_size")
        to_latent: dict[str, Any] = {name: option for name, option in options.items() if name not in of_split}

        def down(size: int) -> Linear:
            return Linear(h, size, **to_latent, rngs=rngs)

        def up(rank: int, channels: int, *, normalized: bool) -> Linear:
            axes = ("fsdp", heads_axis_of(options))
            if not normalized:
                return Linear(rank, n * channels, **options, kernel_axes=axes, rngs=rngs)
            return LayerNormLinear(
                rank,
                n * channels,
                norm.epsilon,
                **options,
                normalization=norm.normalization,
                zero_centered_gamma=norm.zero_centered_gamma,
                kernel_axes=axes,
                rngs=rngs,
            )

        if latent.q_lora_rank is None:
            self.query = up(h, latent.head_channels, normalized=False)
        else:
            self.q_down = down(latent.q_lora_rank)
            self.q_up = up(latent.q_lora_rank, latent.head_channels, normalized=latent.latent_layernorm)
        self.kv_down = down(latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
        self.kv_up = up(latent.kv_lora_rank, latent.qk_head_dim + latent.v_head_dim, normalized=latent.latent_layernorm)

    @property
    def rotary_channels(self) -> int:
        """Head size of the layer's ``rotary_pos_emb``."""
        return self.latent.qk_pos_emb_head_dim

    @property
    def cached_heads(self) -> tuple[int, tuple[int, int]]:
        """Number of heads that a cache of the layer has, 1, and sizes of the rotated key and of the latent."""
        return 1, (self.latent.qk_pos_emb_head_dim, self.latent.kv_lora_rank)

    def _operands(
        self,
        x: Array,
        encoder_output: Array | None,
        rotary: Rotary | None,
        cache: KVCache | WindowKVCache | None,
        is_first_microbatch: bool | None,
    ) -> tuple[tuple[Array, ...], Array | None]:
        """Return the core's operands; with a cache absorbed queries, the rotated key and the latent."""
        del encoder_output  # refused by the call
        if cache is not None and axis_ranks("heads") > 1:
            raise ValueError(
                "a cache of latents has one head, which a mesh with tensor ranks cannot split; generate on a mesh "
                "whose tensor axis is 1"
            )

        def project(name: str, inner: Array) -> Array:
            return add_bias(getattr(self, name)(inner, is_first_microbatch=is_first_microbatch), name)[0]

        inner = x if self.layernorm is None else self.layernorm(x)
        normed = inner if self.return_layernorm_output else None
        q = project("query", inner) if self.latent.q_lora_rank is None else project("q_up", project("q_down", inner))
        c, k_rotated = self._split_latent(project("kv_down", inner), rotary)
        q = self._queries(q, rotary)
        if cache is not None:
            return (self._absorbed(q), k_rotated, self._normalized_latent(c)), normed
        return (q, *self._keys_and_values(project("kv_up", c), k_rotated)), normed

    def _split_latent(self, down: Array, rotary: Rotary | None) -> tuple[Array, Array]:
        """Return the latent ``[b, s, kv_lora_rank]`` and the rotated key ``[b, s, 1, qk_pos_emb_head_dim]``."""

        def split(down: Array, rotary: Rotary | None) -> tuple[Array, Array]:
            c, k = jnp.split(down, [self.latent.kv_lora_rank], axis=-1)
            k = k[:, :, None]
            return c, k if rotary is None else apply_rotary(k, rotary)

        axes = ("batch", "sequence", "hidden"), ("batch", "sequence", None, None)
        return auto_region(split, axes)(down, rotary)

    def _queries(self, q: Array, rotary: Rotary | None) -> Array:
        """Return queries ``[b, s, n, d]`` of a projection ``[b, s, n·d]``, the last channels of each rotated."""
        n, latent = self.core_attention.num_attention_heads, self.latent

        def split(q: Array, rotary: Rotary | None) -> Array:
            q = q.reshape(*q.shape[:2], n, latent.head_channels)
            if rotary is None:
                return q
            plain, rotated = jnp.split(q, [latent.qk_head_dim], axis=-1)
            return jnp.concatenate([plain, apply_rotary(rotated, rotary)], axis=-1)

        return auto_region(split, HEAD_AXES)(q, rotary)

    def _keys_and_values(self, kv: Array, k_rotated: Array) -> tuple[Array, Array]:
        n, latent = self.core_attention.num_attention_heads, self.latent

        def split(kv: Array, k_rotated: Array) -> tuple[Array, Array]:
            kv = kv.reshape(*kv.shape[:2], n, latent.qk_head_dim + latent.v_head_dim)
            k, v = jnp.split(kv, [latent.qk_head_dim], axis=-1)
            k_rotated = jnp.broadcast_to(k_rotated, (*k.shape[:3], latent.qk_pos_emb_head_dim))
            return jnp.concatenate([k, k_rotated], axis=-1), v

        k, v = auto_region(split, (HEAD_AXES,) * 2)(kv, k_rotated)
        return k, v

    def _normalized_latent(self, c: Array) -> Array:
        return self._kv_up().operand(c)[:, :, None]

    def _kv_up(self) -> Linear:
        if not isinstance(self.kv_up, Linear):
            raise ValueError(
                f"absorption reads the kernel of kv_up, which is a {type(self.kv_up).__name__}; merge the adapter into "
                "its base to generate with a cache"
            )
        return self.kv_up

    def _up_kernels(self, dtype: Any) -> tuple[Array, Array]:
        """Return the kernels from the latent to keys and to values, ``[kv_lora_rank, n, d]``."""
        latent, value = self.latent, cast(Any, self._kv_up().kernel).get_value()
        kernel = value.dequantize() if isinstance(value, QuantizedKernel) else value
        n = self.core_attention.num_attention_heads
        kernel = kernel.astype(dtype).reshape(latent.kv_lora_rank, n, latent.qk_head_dim + latent.v_head_dim)
        return kernel[..., : latent.qk_head_dim], kernel[..., latent.qk_head_dim :]

    def _absorbed(self, q: Array) -> Array:
        """Return queries for latents, ``[b, s, n, kv_lora_rank + qk_pos_emb_head_dim]``."""
        to_keys, _ = self._up_kernels(q.dtype)

        def absorb(q: Array, to_keys: Array) -> Array:
            plain, rotated = jnp.split(q, [self.latent.qk_head_dim], axis=-1)
            return jnp.concatenate([jnp.einsum("bsnd,cnd->bsnc", plain, to_keys), rotated], axis=-1)

        return auto_region(absorb, HEAD_AXES)(q, to_keys)

    def _cached(self, query: Array, cache: KVCache | WindowKVCache) -> tuple[Any, tuple[Array, ...]]:
        # A copy of the core's structure, not of its arrays: options, dropout mode and the learned offset are the same.
        own = self.core_attention
        if not isinstance(own, DotProductAttention):
            raise ValueError(
                "attention over cached latents needs a DotProductAttention, whose scale and value size it changes, and "
                f"the core is a {type(own).__name__}: call the layer without a cache"
            )
        core = nnx.merge(*nnx.split(own))
        if own.softmax_scale is None:
            core.softmax_scale = self.latent.head_channels**-0.5  # the core's own would be that of cached latents
        core.num_gqa_groups = 1
        core.kv_channels, core.v_channels = query.shape[-1], self.latent.kv_lora_rank
        join = auto_region(lambda c, k: jnp.concatenate([c, k], axis=-1), HEAD_AXES)
        c, k = cache.v.astype(query.dtype), cache.k.astype(query.dtype)
        return core, (query, join(c, k), c)

    def _of_cache(self, context: Array) -> Array:
        n, rank = self.core_attention.num_attention_heads, self.latent.kv_lora_rank
        _, to_values = self._up_kernels(context.dtype)

        def expand(context: Array, to_values: Array) -> Array:
            # Megatron's core gives the heads' results side by side.
            context = context.reshape(*context.shape[:2], n, rank)
            return jnp.einsum("bsnc,cnd->bsnd", context, to_values)

        return auto_region(expand, HEAD_AXES)(context, to_values)
