"""Megatron-LM's flags as options of a model, and back; with the table of tensors they are one more architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_te.interop.megatron.experts import read_experts, write_experts
from jax_te.interop.megatron.table import megatron_table
from jax_te.interop.tables import REQUIRED, TIED, Architecture, Fields, Options, model_options
from jax_te.layers import LinearScaling, Llama3Scaling
from jax_te.models import GPTModel, RotaryPositions

# Unsupported flags that change a model's computation, with the value that is equivalent to their absence.
_EXPECTED: dict[str, Any] = {
    **dict.fromkeys(("mtp_num_layers", "experimental_attention_variant", "spec", "no_rope_freq")),
    **dict.fromkeys(("heterogeneous_layers_config_path", "hybrid_layer_pattern", "mrope_section", "softmax_scale")),
    **dict.fromkeys(("multi_latent_attention", "qk_l2_norm", "rotary_interleaved", "attention_output_gate"), False),
    **dict.fromkeys(("apply_residual_connection_post_layernorm", "enable_mhc_connections", "use_mup"), False),
    "softmax_type": "vanilla",
    # The rows of linear_fc1.weight would alternate between gate and factor.
    **dict.fromkeys(("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size")),
    **dict.fromkeys(("use_grouped_gemm_for_dense_mlp", "use_grouped_gemm_for_shared_expert"), False),
}
_DEFAULT_ACTIVATIONS = {True: "gelu", False: "gelu_exact"}


def read_flags(given: Fields, options: Options) -> Options:
    """Return the options of flags, completed by those that are no pairs of one flag and one option."""
    experts = read_experts(given)
    limit, offset = given.take("activation_func_clamp_value", float, None), given.take("glu_linear_offset", float, 0.0)
    for name, value in _EXPECTED.items():
        given.expect(name, value)
    # Megatron-LM also has a number of groups without the flag, and then ignores it.
    grouped, groups = given.take("group_query_attention", bool, False), given.raw("num_query_groups")
    untied = given.take("untie_embeddings_and_output_weights", bool, False)
    activation = _activation(given, options, experts=bool(experts), limited=limit is not None)
    size, skip = given.raw("window_size"), given.raw("window_attn_skip_freq")
    kind = given.take("position_embedding_type", str, "learned_absolute")
    if given.take("use_rotary_position_embeddings", bool, False):  # the older flag
        kind = "rope"
    if kind not in ("rope", "learned_absolute", "none"):
        raise given.refused("position_embedding_type", kind, "rope, learned_absolute and none are supported")
    base, percent = given.take("rotary_base", float, 10000.0), given.take("rotary_percent", float, 1.0)
    factor, scaled = given.take("rope_scaling_factor", float, 8.0), given.take("use_rope_scaling", bool, False)
    stretch = given.take("rotary_seq_len_interpolation_factor", float, 0.0)
    scaling: Llama3Scaling | LinearScaling | None = Llama3Scaling(factor=factor) if scaled else None
    if stretch:
        scaling = LinearScaling(factor=stretch)
    if scaled and stretch:
        raise given.refused("use_rope_scaling", True, "rotary_seq_len_interpolation_factor scales, too; give one")
    rotary = RotaryPositions(base=base, percent=percent, scaling=scaling)
    return {
        **options,
        **experts,
        "activation_func_clamp_value": limit,
        "glu_linear_offset": offset,
        "num_query_groups": groups if grouped else None,
        TIED: not untied,
        "activation": activation,
        "window_size": tuple(size) if isinstance(size, list) else size,
        # Megatron ignores it without a window.
        "window_attn_skip_freq": None if size is None else tuple(skip) if isinstance(skip, list) else skip,
        "position_embedding_type": rotary if kind == "rope" else kind,
    }


def _activation(given: Fields, options: Options, *, experts: bool, limited: bool) -> str:
    """Return our name of the activation that flags choose.

    Args:
        given: flags.
        options: options of the model, of which whether linear layers have biases is read.
        experts: whether the model has experts.
        limited: whether ``activation_func_clamp_value`` is given.
    """
    chosen = [name for name in _ACTIVATIONS if given.take(name, bool, False)]
    if len(chosen) > 1:
        raise given.refused(chosen[0], True, f"{chosen[1]} is, too")
    kernels = {name: given.take(name, bool, False) for name in _KERNELS}
    # Megatron-LM does not fuse biases that a model does not have.
    fused = given.take("bias_gelu_fusion", bool, options["add_bias_linear"])
    fused_swiglu = given.take("bias_swiglu_fusion", bool, True)
    if chosen == ["swiglu"] and limited and fused_swiglu:
        raise given.refused(
            "bias_swiglu_fusion",
            True,
            "Megatron's kernel ignores activation_func_clamp_value; correct one of them in args",
        )
    if chosen:
        return _ACTIVATIONS[chosen[0]]
    if experts and kernels["use_transformer_engine_op_fuser"]:
        why = "Megatron then computes the tanh form of GELU in dense layers and the erf form in experts"
        raise given.refused("use_transformer_engine_op_fuser", True, why)
    # Megatron's kernels compute the tanh form, without them it is the exact one.
    return _DEFAULT_ACTIVATIONS[fused or any(kernels.values())]


_ACTIVATIONS = {"swiglu": "swiglu", "squared_relu": "srelu", "quick_geglu": "qgeglu"}
# Flags of kernels of Transformer Engine's, whose GELU is the tanh form.
_KERNELS = ("use_te_activation_func", "use_transformer_engine_op_fuser")


def write_flags(options: Options) -> Mapping[str, Any]:
    """Return the flags of options, apart from pairs of one flag and one option."""
    positions = options["position_embedding_type"]
    rotary = positions if isinstance(positions, RotaryPositions) else RotaryPositions()
    linear, llama = (isinstance(rotary.scaling, kind) for kind in (LinearScaling, Llama3Scaling))
    return {
        **write_experts(options),
        "activation_func_clamp_value": options["activation_func_clamp_value"],
        "glu_linear_offset": options["glu_linear_offset"],
        "group_query_attention": options["num_query_groups"] != options["num_attention_heads"],
        "num_query_groups": options["num_query_groups"],
        "untie_embeddings_and_output_weights": not options[TIED],
        "bias_gelu_fusion": options["activation"] == "gelu" and options["add_bias_linear"],
        # Without biases only Transformer Engine's kernel is the tanh form.
        "use_te_activation_func": options["activation"] == "gelu" and not options["add_bias_linear"],
        "bias_swiglu_fusion": options["activation"] == "swiglu" and options["activation_func_clamp_value"] is None,
        **{flag: options["activation"] == name for flag, name in _ACTIVATIONS.items()},
        "window_size": options["window_size"],
        "window_attn_skip_freq": options["window_attn_skip_freq"],
        "position_embedding_type": "rope" if positions is rotary else positions,
        "rotary_base": rotary.base,
        "rotary_percent": rotary.percent,
        "use_rope_scaling": llama,
        **({"rope_scaling_factor": rotary.scaling.factor} if isinstance(rotary.scaling, Llama3Scaling) else {}),
        **({"rotary_seq_len_interpolation_factor": rotary.scaling.factor} if linear else {}),  # type: ignore[union-attr]
    }


MEGATRON = Architecture(
    model_type="gpt",
    model=GPTModel,
    fields={
        "num_layers": ("num_layers", REQUIRED),
        "hidden_size": ("hidden_size", REQUIRED),
        "num_attention_heads": ("num_attention_heads", REQUIRED),
        "padded_vocab_size": ("vocab_size", REQUIRED),
        "max_position_embeddings": ("max_sequence_length", REQUIRED),
        "ffn_hidden_size": ("ffn_hidden_size", None),
        "kv_channels": ("kv_channels", None),
        "normalization": ("normalization", "LayerNorm"),
        "norm_epsilon": ("layernorm_epsilon", 1e-5),
        "apply_layernorm_1p": ("layernorm_zero_centered_gamma", False),
        "add_bias_linear": ("add_bias_linear", True),
        "add_qkv_bias": ("add_qkv_bias", False),
        "qk_layernorm": ("qk_layernorm", False),
        "attention_dropout": ("attention_dropout", 0.1),
        "hidden_dropout": ("hidden_dropout", 0.1),
    },
    read=read_flags,
    write=write_flags,
    table=megatron_table,
    options=lambda model: model_options(model, model.rotary),
    base="",
    tied_names={"output_layer.weight": "embedding.word_embeddings.weight"},
    ignored="",
    fields_class=Fields,
    described_by="arguments",
)
