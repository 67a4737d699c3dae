"""Multi-head attention: norm, projections, the core and the output projection."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te._validation import check_positive, checked
from jax_te.config import CpCommType
from jax_te.layers.attention.context_parallel import ContextParallelModule
from jax_te.layers.attention.core import AttentionCore, CoreCall, check_core
from jax_te.layers.attention.dot_product_attention import DotProductAttention, check_heads
from jax_te.layers.attention.kv_cache import KVCache, WindowKVCache
from jax_te.layers.attention.packed import PackedSeqParams
from jax_te.layers.attention.qkv import (
    HEAD_AXES,
    merge_heads,
    pack_qkv,
    rotate,
    split_key,
    split_key_value,
    split_qkv,
    split_query,
)
from jax_te.layers.attention.rotary import Rotary
from jax_te.layers.keywords import ParallelKeywords
from jax_te.layers.layernorm_linear import LayerNormLinear
from jax_te.layers.linear import Linear
from jax_te.layers.norm import LayerNorm, Normalization, NormOptions, RMSNorm, check_returned_norm
from jax_te.layers.parallel_arguments import set_tensor_parallel_group
from jax_te.layers.results import add_bias, layer_output, split_output
from jax_te.ops import BiasType, MaskType, SoftmaxType, Window
from jax_te.ops.attention import normal_window
from jax_te.sharding import auto_region, axis_ranks, constrain, row_axis
from jax_te.typing import Array, DTypeLike, Initializer, Key, SplitAxis, TensorGroup


@checked
class MultiheadAttention(ContextParallelModule):
    """Normalization, query/key/value projections, attention and output projection.

    In self-attention, one fused kernel ``[h, r + 2, g·d]`` with ``r = n / g`` computes queries, keys and values. In
    cross-attention, ``query [h, r, g·d]`` reads the input and ``key_value [h, 2, g·d]`` reads the encoder's output. The
    mesh's tensor axis splits their last axis, and the first axis of the output kernel ``[n·d, h]``, by whole groups.

    Args:
        hidden_size: ``h``.
        num_attention_heads: query heads ``n``.
        num_gqa_groups: key/value heads ``g``. None: ``n``.
        kv_channels: head size ``d``. None: ``h / n``.
        attention_dropout: dropout probability of the softmax's result.
        layernorm_epsilon, normalization, zero_centered_gamma: options of the norm in front, see `LayerNormLinear`.
        input_layernorm: whether there is a norm in front.
        return_layernorm_output: whether to return the norm's output, too.
        attention_type: ``"self"`` or ``"cross"``.
        attn_mask_type, window_size, softmax_scale, softmax_type, logit_softcap, return_max_logit, num_splits,
            cp_comm_type, hierarchical_context_parallel_sizes, cp_load_balanced: see `DotProductAttention`.
        qk_norm_type: ``"LayerNorm"`` or ``"RMSNorm"``: normalize every head of queries and of keys over its ``d``
            channels, each with parameters of its own. None: no such norms.
        qk_norm_before_rope: whether to normalize before the rotation by position, not after it.
        qk_norm_across_heads: whether these norms are over the ``n d`` and ``g d`` channels of all heads together, as in
            OLMoE. On a mesh that splits heads, each device gets those of the others.
        qkv_bias: whether to learn biases in the projections to queries, keys and values, also if ``bias`` is False.
        fuse_qkv_params: whether ``query``, ``key`` and ``value`` are one layer. False: they are separate layers after a
            norm that they share.
        set_parallel_mode: whether to split the projections over the mesh's tensor axis; False replicates them.
        sequence_parallel, tp_group, tp_size, fuse_wgrad_accumulation: options of all projections, see `Linear`.
        return_bias: whether to return the output projection's bias instead of adding it.
        bias: whether to learn biases in all projections.
        init_method: initializer of the query, key and value projections. None: N(0, 0.023²).
        output_layer_init_method: initializer of the output projection. None: N(0, 0.023²).
        params_dtype: dtype of the parameters.
        rngs: random streams, of which ``params`` draws the kernels.

    Raises:
        ValueError: for sizes that are not positive or do not divide, unknown names and options that exclude each other;
            when called, for arguments that the layer does not take.
        TypeError: when called, for an ``encoder_output`` of another dtype than the input's.

    Source: ``transformer_engine.pytorch.MultiheadAttention``; grouped queries: Ainslie et al. 2023; norms of queries
    and keys: Henry et al. 2020.

    >>> layer = MultiheadAttention(32, 4, num_gqa_groups=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 8, 32)), dropout_key=jax.random.key(1)).shape
    (2, 8, 32)
    """

    grouped_projections: ClassVar[tuple[str, ...]] = ("qkv", "query", "key", "value", "key_value")
    """Names of the projections whose outputs Megatron and Transformer Engine order by key/value groups."""

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        num_gqa_groups: int | None = None,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        normalization: Normalization = "LayerNorm",
        zero_centered_gamma: bool = False,
        input_layernorm: bool = True,
        return_layernorm_output: bool = False,
        attention_type: Literal["self", "cross"] = "self",
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
        qk_norm_type: Normalization | None = None,
        qk_norm_before_rope: bool = False,
        qk_norm_across_heads: bool = False,
        qkv_bias: bool = False,
        fuse_qkv_params: bool = True,
        set_parallel_mode: bool = True,
        sequence_parallel: bool = False,
        tp_group: TensorGroup = None,
        tp_size: int = 1,
        fuse_wgrad_accumulation: bool = False,
        return_bias: bool = False,
        bias: bool = True,
        init_method: Initializer | None = None,
        output_layer_init_method: Initializer | None = None,
        params_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        _check_sizes(hidden_size, num_attention_heads, num_gqa_groups, kv_channels)
        check_returned_norm(input_layernorm, return_layernorm_output)
        self.attention_type = attention_type
        self.return_layernorm_output = return_layernorm_output
        self.fuse_qkv_params = fuse_qkv_params
        self.qk_norm_before_rope = qk_norm_before_rope
        self.qk_norm_across_heads = qk_norm_across_heads
        self.core_attention: AttentionCore = DotProductAttention(
            num_attention_heads,
            hidden_size // num_attention_heads if kv_channels is None else kv_channels,
            num_gqa_groups=num_gqa_groups,
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
            "bias": bias or qkv_bias,
            "init_method": init_method,
            "parallel_mode": "column" if set_parallel_mode else None,
        }
        outward: ProjectionOptions = {
            **shared,
            "bias": bias,
            "init_method": output_layer_init_method,
            "parallel_mode": "row" if set_parallel_mode else None,
        }
        # In this order: each draws keys from ``rngs``.
        self._make_projections(hidden_size, norm if input_layernorm else None, inward, rngs)
        self._make_head_norms(None if qk_norm_type is None else norm._replace(normalization=qk_norm_type), rngs)
        self._make_output(hidden_size, self.core_attention.kv_channels, outward, return_bias, rngs)

    def _make_projections(self, h: int, norm: NormOptions | None, options: ProjectionOptions, rngs: nnx.Rngs) -> None:
        """Create the projections to queries, keys and values, and the norm that is in front of them, if any.

        Args:
            h: hidden size.
            norm: options of the norm. None: there is none.
            options: options of each projection.
            rngs: source of the kernels' keys.
        """
        core, heads_axis = self.core_attention, heads_axis_of(options)
        r, features = core.num_attention_heads // core.num_gqa_groups, core.num_gqa_groups * core.kv_channels

        def project(*components: int) -> Linear:
            axes = ("fsdp", *("components",) * len(components), heads_axis)
            return Linear(h, (*components, features), **options, kernel_axes=axes, rngs=rngs)

        def normalize_and_project(components: int) -> Linear:
            if norm is None:
                return project(components)
            return LayerNormLinear(
                h,
                (components, features),
                norm.epsilon,
                **options,
                normalization=norm.normalization,
                zero_centered_gamma=norm.zero_centered_gamma,
                return_layernorm_output=self.return_layernorm_output,
                kernel_axes=("fsdp", "components", heads_axis),
                rngs=rngs,
            )

        separate = self.attention_type == "self" and not self.fuse_qkv_params
        # One norm shared by three projections; fused layers would each compute it again.
        self.layernorm = norm.make(h, rngs) if separate and norm is not None else None
        if separate:
            self.query, self.key, self.value = project(r), project(), project()
        elif self.attention_type == "cross":
            self.query = normalize_and_project(r)
            self.key_value = project(2)
        else:
            self.qkv = normalize_and_project(r + 2)

    def _make_head_norms(self, norm: NormOptions | None, rngs: nnx.Rngs) -> None:
        """Create the norms of queries and of keys, or none: one for each head, or one for all heads together."""
        core = self.core_attention
        counts = (core.num_attention_heads, core.num_gqa_groups) if self.qk_norm_across_heads else (1, 1)
        # In front of the core tensor devices split the heads, not the sequence.
        own = None if norm is None else norm._replace(sequence_parallel=False)
        self.q_norm, self.k_norm = (None if own is None else own.make(n * core.kv_channels, rngs) for n in counts)

    def _make_output(
        self, h: int, channels: int, options: ProjectionOptions, return_bias: bool, rngs: nnx.Rngs
    ) -> None:
        """Create the projection of the heads' results, ``channels`` of each head, to the hidden size ``h``."""
        self.proj = Linear(
            self.core_attention.num_attention_heads * channels,
            h,
            **options,
            return_bias=return_bias,
            kernel_axes=(row_axis(heads_axis_of(options)), None),
            rngs=rngs,
        )

    def set_tensor_parallel_group(self, tp_group: TensorGroup) -> None:
        """Set the tensor-parallel group of all projections, see `Linear.set_tensor_parallel_group`."""
        set_tensor_parallel_group(self, tp_group)

    def __call__(
        self,
        x: Array,
        attention_mask: Array | None = None,
        encoder_output: Array | None = None,
        *,
        sequence_lengths: Array | None = None,
        encoder_lengths: Array | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        rotary_pos_emb: Rotary | None = None,
        core_attention_bias_type: BiasType = "no_bias",
        core_attention_bias: Array | None = None,
        alibi_slopes: Array | None = None,
        attn_mask_type: MaskType | None = None,
        window_size: Window | None = None,
        dropout_key: Key | None = None,
        cache: KVCache | WindowKVCache | None = None,
        checkpoint_core_attention: bool = False,
        is_first_microbatch: bool | None = None,
        return_max_logit: bool | None = None,
    ) -> Any:
        """Apply attention within ``x``, or from ``x`` to the encoder's output.

        Args:
            x: ``[b, s, h]``; its dtype is the dtype of computation and of the output.
            attention_mask: bool, broadcastable to ``[b, n, s, skv]``, True is masked out; for mask type
                ``"arbitrary"``.
            encoder_output: ``[b, skv, h]`` in the dtype of ``x``, in cross-attention.
            sequence_lengths: int32 ``[b]``, number of valid tokens at the start of each sequence of ``x``; for the
                padding types.
            encoder_lengths: the same for ``encoder_output``. If it is given, ``sequence_lengths`` None means all of
                ``x``.
            packed_seq_params: boundaries of several sequences in each row.
            rotary_pos_emb: rotary embedding of the positions of ``x``, see `rotary_embedding`; self-attention only.
            core_attention_bias_type, core_attention_bias, alibi_slopes, attn_mask_type, window_size: see
                `DotProductAttention`.
            dropout_key: ``jax.random.key`` that dropout draws from, another one at each step; needed in training
                unless the rates are 0. Evaluation (``model.eval()``) drops nothing, with or without one.
            cache: keys and values of the tokens before ``x``; causal self-attention only.
            checkpoint_core_attention: whether to recompute the attention core in backward.
            is_first_microbatch: mode of the kernel cache for all projections, see `Linear`.
            return_max_logit: choice in place of the layer's own.

        Returns:
            ``y [b, s, h]``, or a NamedTuple of ``y`` and those of the following that apply, in this order: ``bias``, of
            the output projection; ``layernorm_output [b, s, h]``; ``max_logit [n]``; ``cache``, with ``x`` appended.
        """
        core: Any = self.core_attention
        check_core(core)
        q_lengths, kv_lengths = self._lengths(x, sequence_lengths, encoder_lengths)
        call = CoreCall(
            attention_mask=attention_mask,
            q_lengths=q_lengths,
            kv_lengths=kv_lengths,
            packed_seq_params=packed_seq_params,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            dropout_key=dropout_key,
            attn_mask_type=core.attn_mask_type if attn_mask_type is None else attn_mask_type,
            window_size=core.window_size if window_size is None else window_size,
            checkpoint_core_attention=checkpoint_core_attention,
            return_max_logit=core.return_max_logit if return_max_logit is None else return_max_logit,
        )
        self._check_call(x, encoder_output, encoder_lengths, rotary_pos_emb, cache, call)
        with jax.named_scope("MultiheadAttention"):
            operands, normed = self._operands(x, encoder_output, rotary_pos_emb, cache, is_first_microbatch)
            if cache is None:
                attended = core(*operands, **call._asdict())
            else:
                attended, cache = self._attend_to_cache(operands, cache, call)
            context, max_logit = attended if call.return_max_logit else (attended, None)
            context = context if cache is None else self._of_cache(context)
            y, extra = split_output(self.proj(merge_heads(context), is_first_microbatch=is_first_microbatch), "proj")
        further = {"layernorm_output": normed, "max_logit": max_logit, "cache": cache}
        extra |= {name: result for name, result in further.items() if result is not None}
        return layer_output(y, **extra)

    def _lengths(
        self, x: Array, sequence_lengths: Array | None, encoder_lengths: Array | None
    ) -> tuple[Array | None, Array | None]:
        """Return the numbers of valid queries and of valid keys."""
        if self.attention_type == "self":
            return None, sequence_lengths
        if encoder_lengths is not None and sequence_lengths is None:
            # Without query lengths, the keys' lengths would also apply to the queries.
            return jnp.full(x.shape[:1], x.shape[1], jnp.int32), encoder_lengths
        return sequence_lengths, encoder_lengths

    def _attend_to_cache(
        self, operands: tuple[Array, ...], cache: KVCache | WindowKVCache, call: CoreCall
    ) -> tuple[Any, KVCache | WindowKVCache]:
        """Return what the core gives for queries and all keys and values, and the cache with the new ones appended."""
        query, key, value = operands
        cache = cache.append(key, value)
        core, operands = self._cached(query, cache)
        mask_type, masks = cache.masks(*query.shape[:2])
        # The ring buffer's mask selects the keys in the window, because slots are not ordered by position.
        window = (-1, -1) if isinstance(cache, WindowKVCache) else call.window_size
        call = call._replace(attn_mask_type=mask_type, window_size=window, **masks)
        return core(*operands, **call._asdict()), cache

    def _check_call(
        self,
        x: Array,
        encoder_output: Array | None,
        encoder_lengths: Array | None,
        rotary: Rotary | None,
        cache: KVCache | WindowKVCache | None,
        call: CoreCall,
    ) -> None:
        """Raise ValueError or TypeError for arguments of a call that the layer does not take, or that exclude each
        other."""
        if (self.attention_type == "cross") != (encoder_output is not None):
            raise ValueError(
                "cross-attention needs encoder_output"
                if encoder_output is None
                else "self-attention takes no encoder_output; build the layer with attention_type='cross'"
            )
        if encoder_output is not None and encoder_output.dtype != x.dtype:
            # Here rather than in the core, whose keys and values the caller does not know.
            raise TypeError(
                f"encoder_output must have the dtype of x, {x.dtype}, got {encoder_output.dtype}; cast one of them, "
                "for example encoder_output.astype(x.dtype)"
            )
        if self.attention_type == "self":
            if encoder_lengths is not None:
                raise ValueError("self-attention takes no encoder_lengths; give sequence_lengths")
        elif rotary is not None or cache is not None:
            raise ValueError("rotary_pos_emb and cache are for self-attention; cross-attention takes neither")
        if cache is None:
            return
        if self.core_attention.context_parallel.cp_load_balanced and axis_ranks("sequence") > 1:
            raise ValueError(
                "a KV cache holds tokens in natural order, and cp_load_balanced=True has sequences in zig-zag order; "
                "call the layer inside of jax_te.sharding.whole_sequences(), which the context axis does not shard"
            )
        window, arrays = call.window_size, (call.attention_mask, call.kv_lengths, call.packed_seq_params)
        if isinstance(cache, WindowKVCache) and normal_window(window, "causal") != (cache.left, 0):
            raise ValueError(f"the cache keeps a window of ({cache.left}, 0), the layer's is {window}; make them equal")
        masked = call.attn_mask_type != "causal" or any(array is not None for array in arrays)
        if masked or call.core_attention_bias_type != "no_bias":
            raise ValueError(
                "a KV cache is for causal attention without masks, lengths or biases; this call's mask type is "
                f"{call.attn_mask_type!r}, its bias type {call.core_attention_bias_type!r}"
            )

    def _operands(
        self,
        x: Array,
        encoder_output: Array | None,
        rotary: Rotary | None,
        cache: KVCache | WindowKVCache | None,
        is_first_microbatch: bool | None,
    ) -> tuple[tuple[Array, ...], Array | None]:
        """Return the operands of the core, and the norm's output if it is to be returned."""
        core = self.core_attention
        n, g, d = core.num_attention_heads, core.num_gqa_groups, core.kv_channels
        first: Any = {"is_first_microbatch": is_first_microbatch}

        def project(name: str, inner: Array, known: tuple[str, ...] = ()) -> tuple[Array, dict[str, Any]]:
            return add_bias(getattr(self, name)(inner, **first), name, known=known)

        with_norm = ("layernorm_output",)  # of a projection that has the block's norm in front
        if encoder_output is not None:
            projected, extra = project("query", x, with_norm)
            normed = extra.get("layernorm_output")
            q = split_query(projected, g, d)
            k, v = split_key_value(project("key_value", encoder_output)[0], g, d)
        elif self.fuse_qkv_params:
            projected, extra = project("qkv", x, with_norm)
            normed = extra.get("layernorm_output")
            if g == n and rotary is None and cache is None and self.q_norm is None:
                # cuDNN reads the packed projection as it is. The cases below change or cache queries or keys
                # separately.
                return (pack_qkv(projected, g, d),), normed
            q, k, v = split_qkv(projected, g, d)
        else:
            inner = x if self.layernorm is None else self.layernorm(x)
            normed = inner if self.return_layernorm_output else None
            q = split_query(project("query", inner)[0], g, d)
            k = split_key(project("key", inner)[0], g, d)
            v = split_key(project("value", inner)[0], g, d)
        # The two orders differ: the norms' scales do not commute with the rotation, which mixes pairs of channels.
        if self.qk_norm_before_rope:
            q, k = self._normalize(q, k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if not self.qk_norm_before_rope:
            q, k = self._normalize(q, k)
        return (q, k, v), normed

    def _cached(self, query: Array, cache: KVCache | WindowKVCache) -> tuple[Any, tuple[Array, ...]]:
        """Return the core for a call with a cache, and its operands, all in the dtype of the queries."""
        return self.core_attention, (query, cache.k.astype(query.dtype), cache.v.astype(query.dtype))

    def _of_cache(self, context: Array) -> Array:
        """Return the heads' results ``[b, s, n, dv]`` of what the core gives with a cache."""
        return context

    @property
    def rotary_channels(self) -> int:
        """Head size of the layer's ``rotary_pos_emb``."""
        return self.core_attention.kv_channels

    @property
    def cached_heads(self) -> tuple[int, tuple[int, int]]:
        """Number of heads that a cache of the layer has, and their sizes of keys and values, see `init_kv_cache`."""
        core = self.core_attention
        return core.num_gqa_groups, (core.kv_channels, core.kv_channels)

    def _normalize(self, q: Array, k: Array) -> tuple[Array, Array]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        if self.qk_norm_across_heads:
            return _across_heads(self.q_norm, q), _across_heads(self.k_norm, k)
        return self.q_norm(q, out_axes=HEAD_AXES), self.k_norm(k, out_axes=HEAD_AXES)


def _across_heads(norm: LayerNorm | RMSNorm, x: Array) -> Array:
    """Return ``[b, s, n, d]`` normalized over its last two axes together."""
    whole = ("batch", "sequence", None)
    merged = constrain(auto_region(lambda x: x.reshape(*x.shape[:2], -1), whole)(x), whole)
    normed = norm(merged, out_axes=whole)
    return auto_region(lambda y: y.reshape(x.shape), HEAD_AXES)(normed)


class ProjectionOptions(ParallelKeywords, total=False):
    """Keywords of each projection to queries, keys and values, and of the output projection."""

    bias: bool
    init_method: Initializer | None
    parallel_mode: SplitAxis | None


def heads_axis_of(options: ProjectionOptions) -> str | None:
    """Return the logical axis of a kernel's axis of heads, which projections without a parallel mode do not split."""
    # Not "ffn", the default of `Linear`: heads and the feed-forward dimension may have different rules.
    return "heads" if options.get("parallel_mode") else None


def _check_sizes(h: int, n: int, groups: int | None, channels: int | None) -> None:
    """Raise ValueError for sizes that are not positive, and for heads that do not divide the hidden size."""
    check_heads(n, groups)
    check_positive(hidden_size=h)
    if channels is None and h % n:
        raise ValueError(
            f"hidden_size {h} is not divisible by num_attention_heads {n}; change one of them or give kv_channels"
        )
