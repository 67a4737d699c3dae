"""DeepSeek-V2 and V3, Kimi K2 and GLM-4.5: decoders with shared experts, the first ones with latent attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax_te.config import LatentAttentionOptions, TransformerConfig
from jax_te.interop.huggingface.architectures.decoders import LLAMA, llama_layer, read_block, write_rotary
from jax_te.interop.huggingface.architectures.mixtures import (
    QWEN_EXPERTS,
    mixture_rows,
    mixture_table,
    shared_expert_rows,
)
from jax_te.interop.huggingface.config_json import ConfigJson
from jax_te.interop.tables import REQUIRED, TIED, Form, Options, Table, rows_of_layer
from jax_te.layers import YarnScaling

_OURS, _THEIRS = "layers/{i}/self_attention", "model.layers.{i}.self_attn"
_LATENT_ATTENTION: Table = {
    f"{_OURS}/layernorm/scale": {"model.layers.{i}.input_layernorm.weight": "h -> h"},
    f"{_OURS}/kv_down/kernel": {f"{_THEIRS}.kv_a_proj_with_mqa.weight": "j h -> h j"},
    f"{_OURS}/kv_up/scale": {f"{_THEIRS}.kv_a_layernorm.weight": "l -> l"},
    f"{_OURS}/kv_up/kernel": {f"{_THEIRS}.kv_b_proj.weight": "x l -> l x"},
    f"{_OURS}/proj/kernel": {f"{_THEIRS}.o_proj.weight": "h p -> p h"},
}
_QUERY: Table = {f"{_OURS}/query/kernel": {f"{_THEIRS}.q_proj.weight": "q h -> h q"}}
_LATENT_QUERY: Table = {
    f"{_OURS}/q_down/kernel": {f"{_THEIRS}.q_a_proj.weight": "z h -> h z"},
    f"{_OURS}/q_up/scale": {f"{_THEIRS}.q_a_layernorm.weight": "z -> z"},
    f"{_OURS}/q_up/kernel": {f"{_THEIRS}.q_b_proj.weight": "q z -> z q"},
}
_EXPERT_BIAS: Table = {
    "layers/{i}/mlp/router/expert_bias": {"model.layers.{i}.mlp.gate.e_score_correction_bias": "e -> e"}
}
# The layer of a depth of multi-token prediction, apart from its transformer layer.
_DEPTH: Table = {
    "mtp/layers/{depth}/enorm/scale": {"model.layers.{i}.enorm.weight": "h -> h"},
    "mtp/layers/{depth}/hnorm/scale": {"model.layers.{i}.hnorm.weight": "h -> h"},
    "mtp/layers/{depth}/eh_proj/kernel": {"model.layers.{i}.eh_proj.weight": "o w -> w o"},
    "mtp/layers/{depth}/final_layernorm/scale": {"model.layers.{i}.shared_head.norm.weight": "h -> h"},
}


def _dense_rows(config: TransformerConfig) -> Table:
    """Return the rows of a layer without experts."""
    if config.latent_attention is None:
        return llama_layer(config)
    block = {path: row for path, row in llama_layer(config).items() if not path.startswith(_OURS)}
    return _LATENT_ATTENTION | (_QUERY if config.latent_attention.q_lora_rank is None else _LATENT_QUERY) | block


def _expert_rows(config: TransformerConfig) -> Table:
    return (
        QWEN_EXPERTS
        | shared_expert_rows("shared_experts")
        | (_EXPERT_BIAS if config.moe_router_enable_expert_bias else {})
    )


def _table(form: Form) -> Table:
    config = form.config
    dense, experts = _dense_rows(config), _expert_rows(config)
    return mixture_table(form, dense, experts) | _depth_rows(config, dense, experts)


def _depth_rows(config: TransformerConfig, dense: Table, experts: Table) -> Table:
    """Return the rows of the depths of multi-token prediction, which follow the layers in number."""
    rows: Table = {}
    last = mixture_rows(dense, experts) if config.has_experts(config.num_layers - 1) else dense
    for depth in range(config.mtp_num_layers or 0):
        number, path = config.num_layers + depth, f"mtp/layers/{depth}/mtp_model_layer/"
        layer = rows_of_layer(last, number)
        rows |= {name.replace(f"layers/{number}/", path, 1): row for name, row in layer.items()}
        rows |= rows_of_layer(_DEPTH, number, depth=str(depth))
    return rows


def _copies(form: Form) -> dict[str, str]:
    """Return the names of the depths' copies of the embedding and the head, with the originals' names."""
    config = form.config
    numbers = range(config.num_layers, config.num_layers + (config.mtp_num_layers or 0))
    head = "model.embed_tokens.weight" if form.others[TIED] else "lm_head.weight"
    copies = {f"model.layers.{i}.embed_tokens.weight": "model.embed_tokens.weight" for i in numbers}
    return copies | {f"model.layers.{i}.shared_head.head.weight": head for i in numbers}


def _read_mixture(given: ConfigJson, options: Options, *, shared: int, first: int = 0, factor: float = 1.0) -> Options:
    """Return the options with those of experts, without the choice among them.

    Args:
        given: fields of ``config.json``.
        options: options of the fields that are read already.
        shared, first, factor: number of shared experts, first layer with experts, and factor of probabilities where no
            field says them.
    """
    given.skip("ep_size")  # the original program's devices
    given.expect("moe_layer_freq", 1)
    shared, first = given.take("n_shared_experts", int, shared), given.take("first_k_dense_replace", int, first)
    if first < 0:
        raise given.refused("first_k_dense_replace", first, "it must not be negative")
    return {
        **options,
        "add_bias_linear": False,
        "moe_layer_freq": tuple(int(number >= first) for number in range(options["num_layers"])),
        "moe_shared_expert_intermediate_size": shared * options["moe_ffn_hidden_size"],
        "moe_router_topk_scaling_factor": given.take("routed_scaling_factor", float, factor),
        "moe_router_dtype": "fp32",  # as transformers' class computes the logits, in which near choices differ
    }


def _write_mixture(options: Options) -> dict[str, Any]:
    """Return the fields of experts, without the choice among them.

    Raises:
        ValueError: for a model without shared experts, which these classes have, or with others than theirs.
    """
    shared, size = options["moe_shared_expert_intermediate_size"], options["moe_ffn_hidden_size"]
    if shared is None:
        raise ValueError("no shared experts, which transformers' class has")
    if shared % size:
        raise ValueError(f"shared experts of size {shared}, which is no multiple of an expert's, {size}")
    freq, count = options["moe_layer_freq"], options["num_layers"]
    has = freq if isinstance(freq, tuple) else [int(i % freq == 0) for i in range(count)]
    return {
        **write_rotary(options),
        "n_shared_experts": shared // size,
        "first_k_dense_replace": next((i for i, experts in enumerate(has) if experts), count),
        "routed_scaling_factor": options["moe_router_topk_scaling_factor"] or 1.0,
    }


def _read_latent(given: ConfigJson, options: Options, *, interleaved: bool) -> Options:
    """Return the options with those of latent attention."""
    given.expect("attention_bias", False)
    if options["layernorm_epsilon"] != 1e-6:
        raise given.refused(
            "rms_norm_eps", options["layernorm_epsilon"], "the norms of latents have 1e-6 in transformers' class"
        )
    latent = LatentAttentionOptions(
        q_lora_rank=given.optional("q_lora_rank", int, 1536),
        kv_lora_rank=given.take("kv_lora_rank", int, 512),
        qk_head_dim=given.take("qk_nope_head_dim", int, 128),
        qk_pos_emb_head_dim=given.take("qk_rope_head_dim", int, 64),
        v_head_dim=given.take("v_head_dim", int, 128),
    )
    given.expect("head_dim", latent.qk_pos_emb_head_dim)
    given.expect("qk_head_dim", latent.head_channels)
    positions = given.rotary(options["max_sequence_length"], latent=True)
    yarn = positions.scaling
    factor = yarn.score_factor if isinstance(yarn, YarnScaling) else 1.0
    return {
        **read_block(given, options, replace(positions, interleaved=interleaved)),
        "latent_attention": latent,
        "softmax_scale": factor * latent.head_channels**-0.5,
    }


def _write_latent(options: Options) -> dict[str, Any]:
    """Return the fields of latent attention.

    Raises:
        ValueError: for a model without it.
    """
    latent = options["latent_attention"]
    if latent is None:
        raise ValueError("no latent attention, which transformers' class has")
    return {
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_nope_head_dim": latent.qk_head_dim,
        "qk_rope_head_dim": latent.qk_pos_emb_head_dim,
        "v_head_dim": latent.v_head_dim,
    }


def _read_v2(given: ConfigJson, options: Options) -> Options:
    given.expect("mlp_bias", False)
    given.expect("scoring_func", "softmax")
    given.expect("norm_topk_prob", False)  # transformers' class leaves probabilities as they are
    method, limited = given.take("topk_method", str, "greedy"), "group_limited_greedy"
    if method not in ("greedy", limited):
        raise given.refused("topk_method", method, f"greedy and {limited} are supported")
    groups, used = given.take("n_group", int, None), given.take("topk_group", int, None)
    grouped = method == limited
    return {
        **_read_latent(given, _read_mixture(given, options, shared=2), interleaved=True),
        "moe_router_pre_softmax": True,
        "moe_router_num_groups": groups if grouped else None,
        "moe_router_group_topk": used if grouped else None,
        "moe_router_group_score_topk": 1 if grouped else None,
    }


def _write_v2(options: Options) -> dict[str, Any]:
    groups = options["moe_router_num_groups"]
    return {
        **_write_mixture(options),
        **_write_latent(options),
        "topk_method": "greedy" if groups is None else "group_limited_greedy",
        "n_group": groups,
        "topk_group": options["moe_router_group_topk"],
        "norm_topk_prob": False,
    }


def _take_choice(given: ConfigJson, name: str) -> bool:
    """Return a field that is true where it is absent, and false where it is null, as transformers reads it."""
    return bool(given.optional(name, bool, True))


def _read_biased_choice(given: ConfigJson, options: Options, groups: int, used: int) -> Options:
    """Return the options with those of DeepSeek-V3's choice of experts, and of its layers of prediction.

    Args:
        given: fields of ``config.json``.
        options: options of the fields that are read already.
        groups, used: numbers of groups, and of those that a token uses, where no field says them.
    """
    given.expect("scoring_func", "sigmoid")
    given.expect("topk_method", "noaux_tc")
    # Probabilities of several experts are divided by their sum in any case here, and that of one never.
    several, normed = options["moe_router_topk"] > 1, _take_choice(given, "norm_topk_prob")
    if normed != several:
        raise given.refused(
            "norm_topk_prob",
            normed,
            f"with num_experts_per_tok={options['moe_router_topk']} only {several} is supported",
        )
    groups, used = given.take("n_group", int, groups), given.take("topk_group", int, used)
    grouped = groups != 1 or used != 1
    depths = given.take("num_nextn_predict_layers", int, given.take("num_mtp_layers", int, 0))
    if not 0 <= depths <= len(given.tensors):
        raise given.refused("num_nextn_predict_layers", depths, f"there are {len(given.tensors)} tensors")
    return {
        **options,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups if grouped else None,
        "moe_router_group_topk": used if grouped else None,
        "moe_router_group_score_topk": 2 if grouped else None,
        "mtp_num_layers": depths or None,
    }


def _write_biased_choice(options: Options) -> dict[str, Any]:
    return {
        "n_group": options["moe_router_num_groups"] or 1,
        "topk_group": options["moe_router_group_topk"] or 1,
        "norm_topk_prob": options["moe_router_topk"] > 1,
        "num_nextn_predict_layers": options["mtp_num_layers"] or 0,
    }


def _read_v3(given: ConfigJson, options: Options) -> Options:
    interleaved = _take_choice(given, "rope_interleave")
    mixture = _read_mixture(given, options, shared=1, first=3, factor=2.5)
    block = _read_latent(given, mixture, interleaved=interleaved)
    return _read_biased_choice(given, block, 8, 4)


def _write_v3(options: Options) -> dict[str, Any]:
    positions = options["position_embedding_type"]
    return {
        **_write_mixture(options),
        **_write_latent(options),
        **_write_biased_choice(options),
        "rope_interleave": getattr(positions, "interleaved", True),
    }


def _read_glm(given: ConfigJson, options: Options) -> Options:
    positions = given.rotary(options["max_sequence_length"], part_default=0.5)
    mixture = _read_mixture(given, options, shared=1, first=1)
    block = _read_biased_choice(given, read_block(given, mixture, positions), 1, 1)
    bias, norms = given.take("attention_bias", bool, False), given.take("use_qk_norm", bool, False)
    # Rounded down, as transformers' class does where the hidden size is no multiple.
    size = options["hidden_size"] // max(options["num_attention_heads"], 1)
    return {**block, "kv_channels": options["kv_channels"] or size, "add_qkv_bias": bias, "qk_layernorm": norms}


def _write_glm(options: Options) -> dict[str, Any]:
    return {
        **_write_mixture(options),
        **_write_biased_choice(options),
        "partial_rotary_factor": getattr(options["position_embedding_type"], "percent", 1.0),
        "attention_bias": options["add_qkv_bias"],
        "use_qk_norm": options["qk_layernorm"],
    }


_FIELDS: dict[str, tuple[str, Any]] = {
    **{name: row for name, row in LLAMA.fields.items() if name != "head_dim"},
    "n_routed_experts": ("num_moe_experts", 64),
    "num_experts_per_tok": ("moe_router_topk", REQUIRED),
    "moe_intermediate_size": ("moe_ffn_hidden_size", 1407),
}
DEEPSEEK_V2 = replace(
    LLAMA,
    model_type="deepseek_v2",
    fields=_FIELDS | {"vocab_size": ("vocab_size", 102400)},
    read=_read_v2,
    write=_write_v2,
    table=_table,
)
DEEPSEEK_V3 = replace(
    LLAMA,
    model_type="deepseek_v3",
    other_model_types=("kimi_k2",),
    fields={
        **_FIELDS,
        "vocab_size": ("vocab_size", 129280),
        "hidden_size": ("hidden_size", 7168),
        "intermediate_size": ("ffn_hidden_size", 18432),
        "num_hidden_layers": ("num_layers", 61),
        "num_attention_heads": ("num_attention_heads", 128),
        "num_key_value_heads": ("num_query_groups", 128),
        "max_position_embeddings": ("max_sequence_length", 4096),
        "n_routed_experts": ("num_moe_experts", 256),
        "num_experts_per_tok": ("moe_router_topk", 8),
        "moe_intermediate_size": ("moe_ffn_hidden_size", 2048),
    },
    read=_read_v3,
    write=_write_v3,
    table=_table,
    copies=_copies,
)
GLM_MOE = replace(
    LLAMA,
    model_type="glm4_moe",
    fields={
        **_FIELDS,
        "head_dim": LLAMA.fields["head_dim"],
        "vocab_size": ("vocab_size", 151552),
        "intermediate_size": ("ffn_hidden_size", 10944),
        "num_hidden_layers": ("num_layers", 46),
        "num_attention_heads": ("num_attention_heads", 96),
        "num_key_value_heads": ("num_query_groups", 8),
        "max_position_embeddings": ("max_sequence_length", 131072),
        "rms_norm_eps": ("layernorm_epsilon", 1e-5),
        "n_routed_experts": ("num_moe_experts", 128),
        "num_experts_per_tok": ("moe_router_topk", 8),
        "moe_intermediate_size": ("moe_ffn_hidden_size", 1408),
    },
    read=_read_glm,
    write=_write_glm,
    table=_table,
    copies=_copies,
)
