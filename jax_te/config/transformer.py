"""Configuration of a stack of transformer layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from jax_te._validation import (
    brief,
    check_annotations,
    check_bool,
    check_number,
    check_positive,
    check_rate,
    checked,
    float_dtype,
    is_integer,
    log_once,
)
from jax_te.config.activation import ActivationLike, LimitedFunction, activation_parts, named_activation
from jax_te.config.attention import AttentionConfig, CpCommType, LatentAttentionOptions, is_windowed_layer
from jax_te.config.cuda_graph import CudaGraphConfig
from jax_te.config.experts import ExpertsConfig
from jax_te.config.filled import FillsFields
from jax_te.config.initializers import NormalInit
from jax_te.config.megatron_fields import accepts_megatron_fields
from jax_te.config.model_parallel import ModelParallelConfig
from jax_te.config.precision import PrecisionConfig
from jax_te.config.recompute import RecomputeConfig
from jax_te.config.refined import check_refined_fields
from jax_te.typing import DTypeLike

POSITION_EMBEDDINGS = ("learned_absolute", "rope", "none")
"""Kinds of position embedding in `jax_te.models.GPTModel`, by Megatron-Core's names."""

_FORMS_OF_GELU = ("bias_activation_fusion", "use_te_activation_func", "use_transformer_engine_op_fuser")
"""Fields that choose among Megatron-Core's kernels of activations, of which GELU's differ in more than speed."""


@accepts_megatron_fields
@dataclass(frozen=True, kw_only=True)
class TransformerConfig(
    ModelParallelConfig, PrecisionConfig, AttentionConfig, ExpertsConfig, RecomputeConfig, CudaGraphConfig, FillsFields
):
    """Sizes and options of a stack of transformer layers, with Megatron-Core's names.

    It has the fields of `ModelParallelConfig`, `PrecisionConfig`, `AttentionConfig`, `ExpertsConfig`, `RecomputeConfig`
    and `CudaGraphConfig`, too, all keyword-only. Other fields of Megatron-Core's are taken without effect if they have
    Megatron's default or only tune CUDA; those that would change numbers or communication are refused with what JAX has
    in their place.

    Fields that are not given and follow from others are filled in. ``dataclasses.replace(config, f=v)`` is the
    configuration built with ``f=v``: it computes these fields anew, and keeps those that were given.

    Args:
        num_layers: number of transformer layers.
        hidden_size: ``h``.
        num_attention_heads: query heads ``n``.
        num_query_groups: key/value heads ``g``; must divide ``n``. None: ``n`` (multi-head attention).
        ffn_hidden_size: ``f``. None: ``4 h``.
        kv_channels: size ``d`` of a head. None: ``h / n``. Beside ``latent_attention``, which has sizes of its own, it
            is not read, as in Megatron, and is the size of a query's head.
        latent_attention: sizes of multi-latent attention in all layers, which then has no key/value groups, biases and
            norms of heads. None: multi-head attention.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        layernorm_epsilon: constant added to the variance.
        layernorm_zero_centered_gamma: whether to store the norm's scale as an offset from 1.
        block_output_layernorm: whether to normalize each block's output, too, before it is added (Gemma 2 and 3).
        block_input_layernorm: whether to normalize each block's input. False: with ``block_output_layernorm`` and
            ``qk_layernorm_across_heads`` it is OLMo 2's form.
        parallel_attention_mlp: whether both blocks of a layer read its input (GPT-NeoX), see
            `jax_te.layers.TransformerLayer`.
        fused_residual_rmsnorm: whether a `jax_te.megatron.TENorm` with ``has_residual=True`` returns its input, too.
        activation: a key of `ACTIVATIONS`; the gated ones have two components. Or a function of one array, elementwise,
            or a tuple with a function for each component, such as ``(jnp.tanh, "linear")``. None: that of the next two
            fields, ``"gelu"`` or ``"geglu"`` without them.
        activation_func: Megatron-Core's name of ``activation``: a function, or its name.
        gated_linear_unit: whether to multiply the function of a first component by a second one: ``"silu"`` becomes
            ``"swiglu"``. None: whether the activation has two components.
        bias_activation_fusion, use_te_activation_func, use_transformer_engine_op_fuser: with one of them True
            Megatron-Core computes GELU in its tanh form, ``"gelu"``; with those that are given False, its default, in
            the erf form, ``"gelu_exact"``. None, for all three: the tanh form. Kernels are XLA's in any case.
        add_bias_linear: whether all linear layers have biases.
        add_qkv_bias: whether the projections to queries, keys and values of self-attention have biases in any case
            (Qwen 2).
        attention_dropout, hidden_dropout: dropout probabilities in [0, 1).
        init_method_std: standard deviation of initial weights.
        init_method: initializer of weights, ``init(key, shape, dtype)`` as in ``jax.nn.initializers``. None: normal
            with ``init_method_std``.
        output_layer_init_method: the same for the output projections of attention and MLP. None: normal with
            ``init_method_std / sqrt(2 num_layers)``.
        compute_dtype: dtype of activations. None: ``params_dtype``.
        mtp_num_layers: number of depths of multi-token prediction: layers of a `jax_te.models.GPTModel` that predict
            further tokens in training, each like the stack's last layer. None: no such layers.
        mtp_loss_scaling_factor: factor of the mean of the depths' losses in the gradients.
        mtp_use_repeated_layer: whether one layer runs at all depths.

    Raises:
        ValueError: for a size that is not positive or does not divide, or an unknown name; for an ``activation`` that
            contradicts ``activation_func``, or the form of GELU that the next three fields choose; a limit or offset
            of an activation that is not gated; biases beside shared experts, which have none;
            ``distribute_saved_activations`` under sequence parallelism, which shards them already; see also the other
            six.
        TypeError: for an initializer or activation that cannot be called or hashed; see also the other six.

    Source: ``megatron.core.transformer.TransformerConfig``.

    >>> TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4).ffn_hidden_size
    256
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    latent_attention: LatentAttentionOptions | None = None
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False
    block_output_layernorm: bool = False
    block_input_layernorm: bool = True
    parallel_attention_mlp: bool = False
    fused_residual_rmsnorm: bool = False
    activation: ActivationLike | None = None
    activation_func: ActivationLike | None = None
    gated_linear_unit: bool | None = None
    bias_activation_fusion: bool | None = None
    use_te_activation_func: bool | None = None
    use_transformer_engine_op_fuser: bool | None = None
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    init_method_std: float = 0.02
    init_method: Callable[..., Any] = None  # type: ignore[assignment]  # filled in, so that it never reads as None
    output_layer_init_method: Callable[..., Any] = None  # type: ignore[assignment]
    compute_dtype: DTypeLike | None = None
    mtp_num_layers: int | None = None
    mtp_loss_scaling_factor: float = 0.1
    mtp_use_repeated_layer: bool = False

    # Fields of multi-head attention, which do not go with latent_attention.
    _for_heads: ClassVar[tuple[str, ...]] = (
        "num_query_groups",
        "add_qkv_bias",
        "qk_layernorm",
        "qk_layernorm_across_heads",
    )

    def __post_init__(self) -> None:
        self._check_bases()
        self._fill_sizes()
        self._fill_activation()
        check_number(init_method_std=self.init_method_std)
        self._fill_initializers()
        check_annotations(self, TransformerConfig)
        self._check_norms()
        check_rate(attention_dropout=self.attention_dropout, hidden_dropout=self.hidden_dropout)
        self._check_high_precision()
        self._check_layers(self.num_layers)  # of AttentionConfig, which does not know how many there are
        check_refined_fields(self)
        self._check_activation_limits()
        self._check_and_fill_experts()
        self._check_multi_token()
        self._fill_compute_dtype()

    def _check_bases(self) -> None:
        # Not super(): the bases do not call each other's.
        ModelParallelConfig.__post_init__(self)
        PrecisionConfig.__post_init__(self)
        AttentionConfig.__post_init__(self)
        ExpertsConfig.__post_init__(self)
        self._fill_recompute()
        RecomputeConfig.__post_init__(self)
        CudaGraphConfig.__post_init__(self)
        if self.distribute_saved_activations and self.sequence_parallel:
            raise ValueError(
                "distribute_saved_activations=True does not go with sequence_parallel=True, under which layers' inputs "
                "are sharded over the tensor axis already; leave it out"
            )

    def _fill_sizes(self) -> None:
        check_positive(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
        )
        if self.num_query_groups is None:
            self._fill("num_query_groups", self.num_attention_heads)
        if self.ffn_hidden_size is None:
            self._fill("ffn_hidden_size", 4 * self.hidden_size)
        if self.latent_attention is not None:
            self._check_latent()
            if self.kv_channels is not None:  # Megatron takes it beside latent attention, and does not read it
                check_positive(kv_channels=self.kv_channels)
            self._fill("kv_channels", self.latent_attention.head_channels)
        elif self.kv_channels is None:
            self._fill("kv_channels", self._head_channels())
        groups: Any = self.num_query_groups
        check_positive(
            num_query_groups=groups,
            ffn_hidden_size=self.ffn_hidden_size,  # type: ignore[arg-type]  # filled in
            kv_channels=self.kv_channels,  # type: ignore[arg-type]
        )
        if self.num_attention_heads % groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not divisible by num_query_groups {groups}"
            )

    def _head_channels(self) -> int:
        """Return the size of a head, all of which together are as large as the hidden size."""
        hidden, heads = self.hidden_size, self.num_attention_heads
        if hidden % heads:
            raise ValueError(
                f"hidden_size {hidden} is not divisible by num_attention_heads {heads}; the next multiple is "
                f"{hidden + -hidden % heads}, or give kv_channels"
            )
        return hidden // heads

    def _check_latent(self) -> None:
        # Before all annotations are checked, since its sizes are read here.
        if not isinstance(self.latent_attention, LatentAttentionOptions):
            raise TypeError(
                f"latent_attention must be a LatentAttentionOptions or None, got {brief(self.latent_attention)}"
            )
        check_annotations(self, TransformerConfig, self._for_heads)
        given = {
            "num_query_groups": self.num_query_groups != self.num_attention_heads,
            "add_qkv_bias": self.add_qkv_bias,
            "qk_layernorm": self.qk_layernorm,
            "qk_layernorm_across_heads": self.qk_layernorm_across_heads,
        }
        for name in [name for name in self._for_heads if given[name]]:
            raise ValueError(
                f"{name}={getattr(self, name)!r} is for multi-head attention, and latent_attention is set, whose heads "
                "have keys and values of their own and whose norms are those of latents (latent_layernorm); leave it "
                "out"
            )

    def _fill_activation(self) -> None:
        """Fill in the activation that the three fields name, and whether it is gated."""
        if self.gated_linear_unit is not None:
            check_bool(gated_linear_unit=self.gated_linear_unit)
        func, given, gated = self.activation_func, self.activation, self.gated_linear_unit
        gelu = self._form_of_gelu()
        named = []
        if given is not None:
            parts = activation_parts(given)
            self._check_form_of_gelu("activation", given, parts, gelu)
            named.append(parts)
        if func is not None:
            parts = activation_parts(func if isinstance(func, tuple) else (func,), "activation_func")
            if "gelu_exact" in parts:
                self._check_form_of_gelu("activation_func", func, parts, gelu)
            # Megatron's name, whose form depends on the three fields.
            named.append(tuple(gelu or part if part == "gelu" else part for part in parts))
        default = [(gelu or "gelu",)]
        named = [(*parts, "linear") if gated and len(parts) == 1 else parts for parts in named or default]
        if len(set(named)) > 1:
            raise ValueError(
                f"activation={given!r} and activation_func={func!r}, gated_linear_unit={gated} name different "
                "functions; give one of the two"
            )
        parts = named[0]
        if gated is not None and gated != (len(parts) > 1):
            raise ValueError(
                f"gated_linear_unit={gated} and the activation {named_activation(parts)!r}, which has {len(parts)} "
                "components; leave gated_linear_unit out, or change the activation"
            )
        if self.use_transformer_engine_op_fuser and self.num_moe_experts is not None and "gelu" in parts:
            raise ValueError(
                "use_transformer_engine_op_fuser=True and GELU with num_moe_experts: Megatron computes the tanh form "
                "in dense layers and the other one in experts; leave the field out, or take another activation"
            )
        self._fill("activation", named_activation(parts))
        self._fill("gated_linear_unit", len(parts) > 1)

    def _form_of_gelu(self) -> str | None:
        """Return the name of the GELU that Megatron computes with the fields that are given, None without any."""
        fields = {name: getattr(self, name) for name in _FORMS_OF_GELU}
        given = {name: value for name, value in fields.items() if value is not None}
        check_bool(**given)
        if self.bias_activation_fusion and self.use_te_activation_func:
            raise ValueError(
                "bias_activation_fusion=True and use_te_activation_func=True exclude each other; leave one out"
            )
        if not given:
            return None
        return "gelu" if any(given.values()) else "gelu_exact"

    def _check_form_of_gelu(self, name: str, activation: Any, parts: tuple[Any, ...], gelu: str | None) -> None:
        """Raise ValueError for an activation with the other GELU than ``gelu``, the one that fields choose."""
        if gelu is None:
            return
        other = "gelu" if gelu == "gelu_exact" else "gelu_exact"
        if other in parts:
            chosen = [f"{field}={getattr(self, field)}" for field in _FORMS_OF_GELU if getattr(self, field) is not None]
            forms = {"gelu": "the tanh form of GELU", "gelu_exact": "its erf form, 'gelu_exact'"}
            raise ValueError(
                f"{name}={brief(activation)} has {forms[other]}, and {', '.join(chosen)} chooses {forms[gelu]}; "
                "leave one out"
            )

    def _check_norms(self) -> None:
        if not self.layernorm_epsilon > 0.0:
            raise ValueError(f"layernorm_epsilon must be > 0, got {self.layernorm_epsilon!r}")
        if self.fused_residual_rmsnorm and self.normalization != "RMSNorm":
            raise ValueError(
                f"fused_residual_rmsnorm=True is for normalization='RMSNorm', got {self.normalization!r}; leave one out"
            )

    def _check_high_precision(self) -> None:
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            count = getattr(self, name)
            if not is_integer(count) or not 0 <= count <= self.num_layers:
                raise ValueError(f"{name} must be an integer in [0, num_layers = {self.num_layers}], got {count!r}")

    def _check_multi_token(self) -> None:
        if not self.mtp_loss_scaling_factor >= 0.0:
            raise ValueError(f"mtp_loss_scaling_factor must be >= 0, got {self.mtp_loss_scaling_factor!r}")
        if self.mtp_num_layers is None:
            if self.mtp_use_repeated_layer:
                raise ValueError("mtp_use_repeated_layer=True has no effect without mtp_num_layers; leave it out")
            return
        check_positive(mtp_num_layers=self.mtp_num_layers)
        by_number = {
            "window_attn_skip_freq": self.window_attn_skip_freq is not None,
            "first_last_layers_bf16": self.first_last_layers_bf16,
        }
        for name in [name for name, given in by_number.items() if given]:
            raise ValueError(
                f"{name}={getattr(self, name)!r} depends on a layer's number in the stack, and the layers of "
                "mtp_num_layers have none; leave one out"
            )

    def _fill_recompute(self) -> None:
        if not self.moe_layer_recompute:
            return
        if self.recompute_granularity == "full":
            raise ValueError(
                "moe_layer_recompute=True names a part of a layer, and recompute_granularity='full' computes whole "
                "layers again; leave one out"
            )
        if self.recompute_granularity is None:
            # Modules without a granularity are for RecomputeConfig to refuse.
            if self.recompute_modules is not None and tuple(self.recompute_modules) != ("core_attn",):
                return
            modules: tuple[str, ...] = ("moe",)
        else:
            modules = tuple(self.recompute_modules or ("core_attn",))
            modules = modules if "moe" in modules else (*modules, "moe")
        self._fill("recompute_granularity", "selective")
        self._fill("recompute_modules", modules)

    def _check_activation_limits(self) -> None:
        limits = {
            "activation_func_clamp_value": self.activation_func_clamp_value is not None,
            "glu_linear_offset": self.glu_linear_offset != 0.0,
        }
        parts = activation_parts(self.activation)  # type: ignore[arg-type]  # filled in
        for name in [name for name, given in limits.items() if given]:
            if len(parts) != 2 or parts[1] != "linear":
                raise ValueError(
                    f"{name} is for a gated activation, a function times a linear component, and activation is "
                    f"{self.activation!r}; set gated_linear_unit=True, or leave it out"
                )
            kernels = [field for field in _FORMS_OF_GELU if getattr(self, field) and parts[0] != "quick_gelu"]
            if kernels:
                raise ValueError(
                    f"{kernels[0]}=True and {name}={getattr(self, name)!r}: Megatron's kernel of "
                    f"{self.activation!r} ignores {name}; leave one out"
                )

    def _check_and_fill_experts(self) -> None:
        self._moe_layers(self.num_layers)
        if self.num_moe_experts is None:
            self._check_size_without_experts()
            return
        if self.moe_ffn_hidden_size is None:
            self._fill("moe_ffn_hidden_size", self.ffn_hidden_size)
        if self.add_bias_linear and self.moe_shared_expert_intermediate_size is not None:
            raise ValueError(
                "add_bias_linear=True with moe_shared_expert_intermediate_size: shared experts have no biases, as in "
                "Megatron; set add_bias_linear=False"
            )

    def _check_size_without_experts(self) -> None:
        """Refuse the size of experts that no layer has; log it where some layers were to be dense, as Megatron does."""
        if self.moe_ffn_hidden_size is None:
            return
        if self.moe_layer_freq == 1 or (isinstance(self.moe_layer_freq, tuple) and 0 not in self.moe_layer_freq):
            raise ValueError("moe_ffn_hidden_size is for layers with experts: set num_moe_experts, or leave it out")
        log_once(
            f"moe_ffn_hidden_size={self.moe_ffn_hidden_size} has no effect: it is for num_moe_experts, which is None"
        )

    def _fill_initializers(self) -> None:
        # Each layer adds two outputs to the residual stream; so scaled, its variance does not grow with the depth.
        scaled = self.init_method_std / math.sqrt(2.0 * self.num_layers)
        for name, std in (("init_method", self.init_method_std), ("output_layer_init_method", scaled)):
            given = getattr(self, name)
            if given is None:
                self._fill(name, NormalInit(std))
            elif type(given).__hash__ is None:
                raise TypeError(f"{name} must be a function init(key, shape, dtype) that can be hashed, got {given!r}")

    def _fill_compute_dtype(self) -> None:
        if self.compute_dtype is None:
            self._fill("compute_dtype", self.params_dtype)
        else:
            # One spelling of a dtype, as that of parameters.
            object.__setattr__(self, "compute_dtype", float_dtype("compute_dtype", self.compute_dtype))

    @checked
    def has_experts(self, layer: int) -> bool:
        """Return whether layer number ``layer``, from 0, has experts in place of its feed-forward block.

        Raises:
            ValueError: for a number that none of the layers has.

        >>> config = TransformerConfig(
        ...     num_layers=4, hidden_size=8, num_attention_heads=1, num_moe_experts=4, moe_layer_freq=[0, 0, 1, 1]
        ... )
        >>> [config.has_experts(layer) for layer in range(4)]
        [False, False, True, True]
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer must be in [0, {self.num_layers}), the numbers of the layers, got {layer}")
        return self._moe_layers(self.num_layers)[layer]

    @property
    def limited_activation(self) -> ActivationLike:
        """The activation with ``activation_func_clamp_value`` and ``glu_linear_offset``, as layers take it."""
        limit, offset = self.activation_func_clamp_value, self.glu_linear_offset
        activation: Any = self.activation
        if limit is None and offset == 0.0:
            return activation
        gate, linear = activation_parts(activation)
        low = None if limit is None else -limit
        return LimitedFunction(gate, high=limit), LimitedFunction(linear, low, limit, offset)

    @checked
    def in_high_precision(self, layer: int) -> bool:
        """Return whether layer number ``layer``, from 0, is one of the first and last that stay in high precision.

        >>> config = TransformerConfig(num_layers=3, hidden_size=8, num_attention_heads=1, first_last_layers_bf16=True)
        >>> [config.in_high_precision(layer) for layer in range(3)]
        [True, False, True]
        """
        first, last = self.num_layers_at_start_in_bf16, self.num_layers - self.num_layers_at_end_in_bf16
        return self.first_last_layers_bf16 and (layer < first or layer >= last)

    @checked
    def has_window(self, layer: int) -> bool:
        """Return whether layer number ``layer``, from 0, attends in a window.

        Raises:
            ValueError: for a number below 0, or beyond the layers that ``window_attn_skip_freq`` lists.

        >>> config = TransformerConfig(
        ...     num_layers=3, hidden_size=8, num_attention_heads=1, window_size=(4, 0), window_attn_skip_freq=3
        ... )
        >>> [config.has_window(layer) for layer in range(3)]
        [True, True, False]
        """
        if layer < 0:
            raise ValueError(f"layer must be in [0, {self.num_layers}), the numbers of the layers, got {layer}")
        return is_windowed_layer(self.window_size, self.window_attn_skip_freq, layer + 1)

    @checked
    def cp_comm_type_of(self, layer: int) -> CpCommType:
        """Return how layer number ``layer``, from 0, exchanges keys and values along the mesh's context axis.

        Raises:
            ValueError: for a number below 0, or beyond the layers that ``cp_comm_type`` lists.

        >>> config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=1, cp_comm_type=["a2a", "p2p"])
        >>> [config.cp_comm_type_of(layer) for layer in range(2)]
        ['a2a', 'p2p']
        """
        kinds: Any = self.cp_comm_type
        if layer < 0 or (isinstance(kinds, tuple) and layer >= len(kinds)):
            raise ValueError(f"layer must be in [0, {self.num_layers}), the numbers of the layers, got {layer}")
        if isinstance(kinds, tuple):
            return kinds[layer]
        return "p2p" if kinds is None else kinds
