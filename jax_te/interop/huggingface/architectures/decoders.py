"""Decoders: GPT-2, and Llama with related architectures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax_te._validation import warn_caller
from jax_te.config import TransformerConfig
from jax_te.interop.huggingface.config_json import FULL, WINDOW, ConfigJson, activation_name, rotary_fields
from jax_te.interop.huggingface.folder import CONFIG
from jax_te.interop.tables import TIED, Architecture, Form, Options, Table, layer_rows, layer_windows, model_options
from jax_te.models import GPTModel, Multipliers, RotaryPositions

_MLP = "layers/{i}/layernorm_mlp"
_ATTENTION = "layers/{i}/self_attention"


def _options(model: Any) -> Options:
    return model_options(model, model.rotary)


_GPT2_LAYER: Table = {
    f"{_ATTENTION}/qkv/scale": {"transformer.h.{i}.ln_1.weight": "h -> h"},
    f"{_ATTENTION}/qkv/ln_bias": {"transformer.h.{i}.ln_1.bias": "h -> h"},
    f"{_ATTENTION}/qkv/kernel": {"transformer.h.{i}.attn.c_attn.weight": "h (c g d) -> h c (g d)"},
    f"{_ATTENTION}/qkv/bias": {"transformer.h.{i}.attn.c_attn.bias": "(c g d) -> c (g d)"},
    f"{_ATTENTION}/proj/kernel": {"transformer.h.{i}.attn.c_proj.weight": "q h -> q h"},
    f"{_ATTENTION}/proj/bias": {"transformer.h.{i}.attn.c_proj.bias": "h -> h"},
    f"{_MLP}/scale": {"transformer.h.{i}.ln_2.weight": "h -> h"},
    f"{_MLP}/ln_bias": {"transformer.h.{i}.ln_2.bias": "h -> h"},
    f"{_MLP}/wi_kernel": {"transformer.h.{i}.mlp.c_fc.weight": "h f -> h 1 f"},
    f"{_MLP}/wi_bias": {"transformer.h.{i}.mlp.c_fc.bias": "f -> 1 f"},
    f"{_MLP}/wo_kernel": {"transformer.h.{i}.mlp.c_proj.weight": "f h -> f h"},
    f"{_MLP}/wo_bias": {"transformer.h.{i}.mlp.c_proj.bias": "h -> h"},
}


def _gpt2_table(form: Form) -> Table:
    return {
        "embedding/embedding": {"transformer.wte.weight": "v h -> v h"},
        "position_embedding/embedding": {"transformer.wpe.weight": "s h -> s h"},
        **layer_rows(_GPT2_LAYER, form.config.num_layers),
        "final_norm/scale": {"transformer.ln_f.weight": "h -> h"},
        "final_norm/bias": {"transformer.ln_f.bias": "h -> h"},
        **head_rows(form),
    }


def head_rows(form: Form) -> Table:
    """Return the row of the output head; none for one that is the embedding."""
    return {} if form.others[TIED] else {"output_kernel": {"lm_head.weight": "v h -> h v"}}


def _read_gpt2(given: ConfigJson, options: Options) -> Options:
    activation = given.activation("activation_function", "gelu_new", gated=False)
    scaled = given.take("scale_attn_weights", bool, True)
    given.expect("scale_attn_by_inverse_layer_idx", False)
    given.expect("add_cross_attention", False)
    _compare_rates(options["hidden_dropout"], given.take("embd_pdrop", float, 0.1))
    given.skip("n_ctx")  # an older name of n_positions, which transformers no longer reads
    given.expect("n_special", 0)  # rows after the vocabulary, in files of the first release (gpt2-medium)
    given.skip("predict_special_tokens")  # of which there are none
    return {
        **options,
        "activation": activation,
        "softmax_scale": None if scaled else 1.0,
        "position_embedding_type": "learned_absolute",
    }


def _compare_rates(rate: float, of_embeddings: float) -> None:
    """Warn of a dropout rate of embeddings that is not that of the blocks."""
    if of_embeddings != rate:
        # Not refused: without dropout, as in evaluation and generation, nothing depends on it.
        warn_caller(
            f"embd_pdrop is {of_embeddings}, resid_pdrop {rate}: here one rate, hidden_dropout={rate}, is for both. "
            "Outputs without dropout are the same; another rate is said with config={'hidden_dropout': RATE}"
        )


def _write_gpt2(options: Options) -> dict[str, Any]:
    return {
        "activation_function": activation_name(options["activation"], gated=False),
        "scale_attn_weights": options["softmax_scale"] is None,
        "embd_pdrop": options["hidden_dropout"],
    }


GPT2 = Architecture(
    model_type="gpt2",
    model=GPTModel,
    fields={
        "vocab_size": ("vocab_size", 50257),
        "n_positions": ("max_sequence_length", 1024),
        "n_embd": ("hidden_size", 768),
        "n_layer": ("num_layers", 12),
        "n_head": ("num_attention_heads", 12),
        "n_inner": ("ffn_hidden_size", None),
        "resid_pdrop": ("hidden_dropout", 0.1),
        "attn_pdrop": ("attention_dropout", 0.1),
        "layer_norm_epsilon": ("layernorm_epsilon", 1e-5),
        "tie_word_embeddings": (TIED, True),
    },
    read=_read_gpt2,
    write=_write_gpt2,
    table=_gpt2_table,
    options=_options,
    base="transformer.",
    fields_class=ConfigJson,
    described_by=CONFIG,
    tied_names={"lm_head.weight": "transformer.wte.weight"},
    ignored=r"transformer\.h\.\d+\.attn\.(masked_)?bias",
)

_NEOX_LAYER: Table = {
    f"{_ATTENTION}/qkv/scale": {"gpt_neox.layers.{i}.input_layernorm.weight": "h -> h"},
    f"{_ATTENTION}/qkv/ln_bias": {"gpt_neox.layers.{i}.input_layernorm.bias": "h -> h"},
    f"{_ATTENTION}/qkv/kernel": {"gpt_neox.layers.{i}.attention.query_key_value.weight": "(g c d) h -> h c (g d)"},
    f"{_ATTENTION}/qkv/bias": {"gpt_neox.layers.{i}.attention.query_key_value.bias": "(g c d) -> c (g d)"},
    f"{_ATTENTION}/proj/kernel": {"gpt_neox.layers.{i}.attention.dense.weight": "h q -> q h"},
    f"{_ATTENTION}/proj/bias": {"gpt_neox.layers.{i}.attention.dense.bias": "h -> h"},
    f"{_MLP}/scale": {"gpt_neox.layers.{i}.post_attention_layernorm.weight": "h -> h"},
    f"{_MLP}/ln_bias": {"gpt_neox.layers.{i}.post_attention_layernorm.bias": "h -> h"},
    f"{_MLP}/wi_kernel": {"gpt_neox.layers.{i}.mlp.dense_h_to_4h.weight": "f h -> h 1 f"},
    f"{_MLP}/wi_bias": {"gpt_neox.layers.{i}.mlp.dense_h_to_4h.bias": "f -> 1 f"},
    f"{_MLP}/wo_kernel": {"gpt_neox.layers.{i}.mlp.dense_4h_to_h.weight": "h f -> f h"},
    f"{_MLP}/wo_bias": {"gpt_neox.layers.{i}.mlp.dense_4h_to_h.bias": "h -> h"},
}


def _neox_table(form: Form) -> Table:
    return {
        "embedding/embedding": {"gpt_neox.embed_in.weight": "v h -> v h"},
        **layer_rows(_NEOX_LAYER, form.config.num_layers),
        "final_norm/scale": {"gpt_neox.final_layer_norm.weight": "h -> h"},
        "final_norm/bias": {"gpt_neox.final_layer_norm.bias": "h -> h"},
        **({} if form.others[TIED] else {"output_kernel": {"embed_out.weight": "v h -> h v"}}),
    }


def _read_neox(given: ConfigJson, options: Options) -> Options:
    # The names of files before transformers 5.
    base, part = given.take("rotary_emb_base", float, 10000.0), given.take("rotary_pct", float, 0.25)
    # transformers' class reads the older names alone, and others may read these.
    given.expect("rope_theta", base)
    given.expect("partial_rotary_factor", part)
    given.expect("attention_bias", True)  # the feed-forward block has biases, and linear layers have them all or none
    given.skip("attention_probs_dropout_prob", "hidden_dropout_prob")  # names that transformers' class never read
    return {
        **options,
        "activation": given.activation("hidden_act", "gelu", gated=False),
        "position_embedding_type": given.rotary(options["max_sequence_length"], base, part_default=part),
    }


def _write_neox(options: Options) -> dict[str, Any]:
    positions = options["position_embedding_type"]
    written = {"hidden_act": activation_name(options["activation"], gated=False), **rotary_fields(positions)}
    if isinstance(positions, RotaryPositions):
        written |= {"rotary_emb_base": written.pop("rope_theta"), "rotary_pct": positions.percent}
    return written


GPT_NEOX = Architecture(
    model_type="gpt_neox",
    model=GPTModel,
    fields={
        "vocab_size": ("vocab_size", 50432),
        "hidden_size": ("hidden_size", 6144),
        "intermediate_size": ("ffn_hidden_size", 24576),
        "num_hidden_layers": ("num_layers", 44),
        "num_attention_heads": ("num_attention_heads", 64),
        "max_position_embeddings": ("max_sequence_length", 2048),
        "use_parallel_residual": ("parallel_attention_mlp", True),
        "layer_norm_eps": ("layernorm_epsilon", 1e-5),
        "hidden_dropout": ("hidden_dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
        "tie_word_embeddings": (TIED, False),
    },
    read=_read_neox,
    write=_write_neox,
    table=_neox_table,
    options=_options,
    base="gpt_neox.",
    fields_class=ConfigJson,
    described_by=CONFIG,
    tied_names={"embed_out.weight": "gpt_neox.embed_in.weight"},
    ignored=r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",
    older=((r"lm_head\.weight", "embed_out.weight"),),
)

_LLAMA_LAYER: Table = {
    f"{_ATTENTION}/qkv/scale": {"model.layers.{i}.input_layernorm.weight": "h -> h"},
    f"{_ATTENTION}/qkv/kernel": {
        "model.layers.{i}.self_attn.q_proj.weight": "(g r d) h -> h r (g d)",
        "model.layers.{i}.self_attn.k_proj.weight": "(g d) h -> h 1 (g d)",
        "model.layers.{i}.self_attn.v_proj.weight": "(g d) h -> h 1 (g d)",
    },
    f"{_ATTENTION}/proj/kernel": {"model.layers.{i}.self_attn.o_proj.weight": "h q -> q h"},
    f"{_MLP}/scale": {"model.layers.{i}.post_attention_layernorm.weight": "h -> h"},
    f"{_MLP}/wi_kernel": {
        "model.layers.{i}.mlp.gate_proj.weight": "f h -> h 1 f",
        "model.layers.{i}.mlp.up_proj.weight": "f h -> h 1 f",
    },
    f"{_MLP}/wo_kernel": {"model.layers.{i}.mlp.down_proj.weight": "h f -> f h"},
}
_QKV_BIASES: Table = {
    f"{_ATTENTION}/qkv/bias": {
        "model.layers.{i}.self_attn.q_proj.bias": "(g r d) -> r (g d)",
        "model.layers.{i}.self_attn.k_proj.bias": "(g d) -> 1 (g d)",
        "model.layers.{i}.self_attn.v_proj.bias": "(g d) -> 1 (g d)",
    },
}
_OTHER_BIASES: Table = {
    f"{_ATTENTION}/proj/bias": {"model.layers.{i}.self_attn.o_proj.bias": "h -> h"},
    f"{_MLP}/wi_bias": {
        "model.layers.{i}.mlp.gate_proj.bias": "f -> 1 f",
        "model.layers.{i}.mlp.up_proj.bias": "f -> 1 f",
    },
    f"{_MLP}/wo_bias": {"model.layers.{i}.mlp.down_proj.bias": "h -> h"},
}

_QK_NORMS: Table = {
    f"{_ATTENTION}/q_norm/scale": {"model.layers.{i}.self_attn.q_norm.weight": "d -> d"},
    f"{_ATTENTION}/k_norm/scale": {"model.layers.{i}.self_attn.k_norm.weight": "d -> d"},
}
_QK_NORMS_ACROSS_HEADS: Table = {
    f"{_ATTENTION}/q_norm/scale": {"model.layers.{i}.self_attn.q_norm.weight": "q -> q"},
    f"{_ATTENTION}/k_norm/scale": {"model.layers.{i}.self_attn.k_norm.weight": "(g d) -> (g d)"},
}
# With norms after blocks, a name of Llama's denotes another norm.
_OUTPUT_NORMS: Table = {
    "layers/{i}/self_attention_norm/scale": {"model.layers.{i}.post_attention_layernorm.weight": "h -> h"},
    f"{_MLP}/scale": {"model.layers.{i}.pre_feedforward_layernorm.weight": "h -> h"},
    "layers/{i}/mlp_norm/scale": {"model.layers.{i}.post_feedforward_layernorm.weight": "h -> h"},
}


def llama_layer(config: TransformerConfig) -> Table:
    """Return the rows of a layer of Llama or a related architecture."""
    layer = _LLAMA_LAYER | (_QKV_BIASES if config.add_bias_linear or config.add_qkv_bias else {})
    layer |= _OTHER_BIASES if config.add_bias_linear else {}
    layer |= _QK_NORMS if config.qk_layernorm else {}
    layer |= _QK_NORMS_ACROSS_HEADS if config.qk_layernorm_across_heads else {}
    layer |= _OUTPUT_NORMS if config.block_output_layernorm else {}
    inner = () if config.block_input_layernorm else (f"{_ATTENTION}/qkv/scale", f"{_MLP}/scale")
    return {path: row for path, row in layer.items() if path not in inner}


def _llama_table(form: Form) -> Table:
    return {
        "embedding/embedding": {"model.embed_tokens.weight": "v h -> v h"},
        **layer_rows(llama_layer(form.config), form.config.num_layers),
        "final_norm/scale": {"model.norm.weight": "h -> h"},
        **head_rows(form),
    }


def _read_llama(given: ConfigJson, options: Options) -> Options:
    given.skip("is_llama_config")  # a mark of the program that trained SmolLM
    given.expect("rope_interleaved", False)  # likewise; transformers' Llama always rotates halves
    given.expect("max_sequence_length", options["max_sequence_length"])  # redundant, in the first files of Llama
    bias = given.take("attention_bias", bool, False)
    if given.take("mlp_bias", bool, False) != bias:
        raise given.refused(
            "mlp_bias", not bias, f"attention_bias is {bias}, and linear layers have biases all or none"
        )
    return {**read_block(given, options), "add_bias_linear": bias}


def read_block(
    given: ConfigJson, options: Options, positions: RotaryPositions | None = None, activation: str = "silu"
) -> Options:
    """Return the options with those that Llama and related architectures share.

    Args:
        given: fields of ``config.json``.
        options: options of the fields that are read already.
        positions: rotary positions. None: those of the fields.
        activation: default of the activation.
    """
    positions = given.rotary(options["max_sequence_length"]) if positions is None else positions
    return {
        **options,
        "activation": given.activation("hidden_act", activation, gated=True),
        "position_embedding_type": positions,
        "normalization": "RMSNorm",
    }


def _write_llama(options: Options) -> dict[str, Any]:
    bias = options["add_bias_linear"]
    return {**write_rotary(options), "attention_bias": bias, "mlp_bias": bias}


def write_rotary(options: Options) -> dict[str, Any]:
    """Return the fields of rotary positions and of the activation."""
    activation = activation_name(options["activation"], gated=True)
    return {"hidden_act": activation, **rotary_fields(options["position_embedding_type"])}


LLAMA = Architecture(
    model_type="llama",
    model=GPTModel,
    fields={
        "vocab_size": ("vocab_size", 32000),
        "hidden_size": ("hidden_size", 4096),
        "intermediate_size": ("ffn_hidden_size", 11008),
        "num_hidden_layers": ("num_layers", 32),
        "num_attention_heads": ("num_attention_heads", 32),
        "num_key_value_heads": ("num_query_groups", None),
        "head_dim": ("kv_channels", None),
        "max_position_embeddings": ("max_sequence_length", 2048),
        "rms_norm_eps": ("layernorm_epsilon", 1e-6),
        "attention_dropout": ("attention_dropout", 0.0),
        "tie_word_embeddings": (TIED, False),
    },
    read=_read_llama,
    write=_write_llama,
    table=_llama_table,
    options=_options,
    base="model.",
    fields_class=ConfigJson,
    described_by=CONFIG,
    tied_names={"lm_head.weight": "model.embed_tokens.weight"},
    ignored=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
)


def read_windows(given: ConfigJson, options: Options, size: int | None, default: Sequence[bool]) -> Options:
    """Return the options with the windows of layers: of those in ``layer_types``, or in ``default``."""
    count = options["num_layers"]
    kinds = given.take("layer_types", list, [WINDOW if windowed else FULL for windowed in default])
    if len(kinds) != count or not {*map(str, kinds)} <= {FULL, WINDOW} or (WINDOW in kinds and not size):
        raise given.refused("layer_types", kinds, f"{count} of {FULL!r} and, with a sliding_window, {WINDOW!r} fit")
    if WINDOW not in kinds or not size:
        return options
    return {
        **options,
        "window_size": (size - 1, 0),  # transformers' window includes the query's own position
        "window_attn_skip_freq": tuple(int(kind == WINDOW) for kind in kinds),
    }


def write_windows(options: Options) -> dict[str, Any]:
    """Return the fields of the windows of layers, all of the same size.

    Raises:
        ValueError: for a window that reaches to later positions.
    """
    windows = layer_windows(options)
    left, right = next(filter(None, windows), (None, 0))
    if left is not None and (left < 0 or right != 0):
        raise ValueError(f"window_size={(left, right)}, which is no window of past positions")
    size = None if left is None else left + 1
    return {"sliding_window": size, "layer_types": [WINDOW if window else FULL for window in windows]}


def read_window(given: ConfigJson, options: Options, size: int | None) -> Options:
    """Return the options with a window in all layers, or in none for a size of None."""
    layers = options["num_layers"]
    if size is not None and size < 1:
        raise given.refused("sliding_window", size, "it must be positive")
    # These classes of transformers have a window in all layers or in none, whatever layer_types says.
    given.expect("layer_types", [FULL if size is None else WINDOW] * layers)
    return read_windows(given, options, size, [size is not None] * layers)


def write_window(options: Options) -> dict[str, Any]:
    """Return the field of a window in all layers, or in none.

    Raises:
        ValueError: for windows in some layers.
    """
    windows = write_windows(options)
    if len({*windows["layer_types"]}) > 1:
        raise ValueError("windows in some layers only, where transformers' class has one in all or in none")
    return {"sliding_window": windows["sliding_window"]}


def _read_qwen2(given: ConfigJson, options: Options) -> Options:
    given.expect("use_mrope", False)
    size, first = given.optional("sliding_window", int, 4096), given.take("max_window_layers", int, 28)
    size = size if given.take("use_sliding_window", bool, False) else None
    block = read_block(given, options)
    windowed = [bool(size) and i >= first for i in range(options["num_layers"])]
    return {**read_windows(given, block, size, windowed), "add_bias_linear": False, "add_qkv_bias": True}


def _read_qwen3(given: ConfigJson, options: Options) -> Options:
    given.expect("attention_bias", False)
    return {**_read_qwen2(given, options), "add_qkv_bias": False, "qk_layernorm": True}


def _write_qwen(options: Options) -> dict[str, Any]:
    windows = write_windows(options)
    return {**write_rotary(options), **windows, "use_sliding_window": WINDOW in windows["layer_types"]}


QWEN2 = replace(
    LLAMA,
    model_type="qwen2",
    fields={
        **LLAMA.fields,
        "vocab_size": ("vocab_size", 151936),
        "intermediate_size": ("ffn_hidden_size", 22016),
        "num_key_value_heads": ("num_query_groups", 32),
        "max_position_embeddings": ("max_sequence_length", 32768),
    },
    read=_read_qwen2,
    write=_write_qwen,
)
QWEN3 = replace(QWEN2, model_type="qwen3", fields={**QWEN2.fields, "head_dim": ("kv_channels", 128)}, read=_read_qwen3)


def _read_mistral(given: ConfigJson, options: Options) -> Options:
    block = read_window(given, read_block(given, options), given.optional("sliding_window", int, 4096))
    return {**block, "add_bias_linear": False}


def _write_mistral(options: Options) -> dict[str, Any]:
    return {**write_rotary(options), **write_window(options)}


MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    fields={
        **LLAMA.fields,
        "intermediate_size": ("ffn_hidden_size", 14336),
        "num_key_value_heads": ("num_query_groups", 8),
        "max_position_embeddings": ("max_sequence_length", 131072),
    },
    read=_read_mistral,
    write=_write_mistral,
)


def _read_olmo2(given: ConfigJson, options: Options) -> Options:
    given.expect("attention_bias", False)  # linear layers have biases all or none, and those of others have none
    return {
        **read_block(given, options),
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "block_input_layernorm": False,
        "block_output_layernorm": True,
        "add_bias_linear": False,
    }


OLMO2 = replace(
    LLAMA,
    model_type="olmo2",
    fields={
        # Heads have the size that divides the hidden size.
        **{name: field for name, field in LLAMA.fields.items() if name != "head_dim"},
        "vocab_size": ("vocab_size", 50304),
        "rms_norm_eps": ("layernorm_epsilon", 1e-5),
    },
    read=_read_olmo2,
    write=write_rotary,
)


_PHI3_LAYER: Table = {
    **_LLAMA_LAYER,
    f"{_ATTENTION}/qkv/kernel": {
        "model.layers.{i}.self_attn.qkv_proj.weight": (
            "(g r d) h -> h r (g d) | (g d) h -> h 1 (g d) | (g d) h -> h 1 (g d)"
        )
    },
    f"{_MLP}/wi_kernel": {"model.layers.{i}.mlp.gate_up_proj.weight": "f h -> h 1 f | f h -> h 1 f"},
}


def _phi3_table(form: Form) -> Table:
    return {
        "embedding/embedding": {"model.embed_tokens.weight": "v h -> v h"},
        **layer_rows(_PHI3_LAYER, form.config.num_layers),
        "final_norm/scale": {"model.norm.weight": "h -> h"},
        **head_rows(form),
    }


def _read_phi3(given: ConfigJson, options: Options) -> Options:
    positions = given.rotary(options["max_sequence_length"], part_default=1.0)
    if positions.scaling is not None:
        kind = type(positions.scaling).__name__
        raise given.refused("rope_scaling", kind, "transformers' class has longrope or none, and longrope is not here")
    given.skip("original_max_position_embeddings")  # longrope's
    # In files that come with code of their own.
    given.expect("attention_bias", False)
    given.expect("mlp_bias", False)
    given.expect("lm_head_bias", False)
    _compare_rates(options["hidden_dropout"], given.take("embd_pdrop", float, 0.0))
    block = read_window(given, read_block(given, options, positions), given.optional("sliding_window", int, None))
    return {**block, "add_bias_linear": False}


def _write_phi3(options: Options) -> dict[str, Any]:
    positions = options["position_embedding_type"]
    part = positions.percent if isinstance(positions, RotaryPositions) else 1.0
    others = {"partial_rotary_factor": part, "embd_pdrop": options["hidden_dropout"]}
    return {**write_rotary(options), **write_window(options), **others}


PHI3 = replace(
    LLAMA,
    model_type="phi3",
    fields={
        **{name: field for name, field in LLAMA.fields.items() if name != "head_dim"},
        "vocab_size": ("vocab_size", 32064),
        "hidden_size": ("hidden_size", 3072),
        "intermediate_size": ("ffn_hidden_size", 8192),
        "max_position_embeddings": ("max_sequence_length", 4096),
        "rms_norm_eps": ("layernorm_epsilon", 1e-5),
        "resid_pdrop": ("hidden_dropout", 0.0),
    },
    read=_read_phi3,
    write=_write_phi3,
    table=_phi3_table,
)


_GEMMA_GELU = "gelu_pytorch_tanh"


def _read_gemma(given: ConfigJson, options: Options) -> Options:
    block = _with_gemma_options(given, read_block(given, options, None, _GEMMA_GELU))
    given.expect("hidden_activation", _GEMMA_GELU)
    # Files of the first release say "gelu" and mean the tanh form.
    exact = block["activation"] == ("gelu_exact", "linear")
    return {**block, "activation": "geglu" if exact else block["activation"]}


def _read_later_gemma(given: ConfigJson, options: Options, positions: RotaryPositions | None) -> Options:
    """Return the options of Gemma 2 and 3, whose classes read ``hidden_activation`` and ignore ``hidden_act``."""
    activation = given.take("hidden_activation", str, _GEMMA_GELU)
    given.expect("hidden_act", activation)  # which other readers may follow
    return _with_gemma_options(given, read_block(given, options, positions, activation))


def _with_gemma_options(given: ConfigJson, block: Options) -> Options:
    given.expect("attention_bias", False)
    given.expect("use_bidirectional_attention", False)
    return {
        **block,
        "add_bias_linear": False,
        "layernorm_zero_centered_gamma": True,
        "multipliers": Multipliers(embedding=max(block["hidden_size"], 1) ** 0.5),
    }


def _write_gemma(options: Options) -> dict[str, Any]:
    written = write_rotary(options)
    return written | ({"hidden_act": _GEMMA_GELU} if options["activation"] == "geglu" else {})


GEMMA = replace(
    LLAMA,
    model_type="gemma",
    fields={
        **LLAMA.fields,
        "vocab_size": ("vocab_size", 256000),
        "hidden_size": ("hidden_size", 3072),
        "intermediate_size": ("ffn_hidden_size", 24576),
        "num_hidden_layers": ("num_layers", 28),
        "num_attention_heads": ("num_attention_heads", 16),
        "num_key_value_heads": ("num_query_groups", 16),
        "head_dim": ("kv_channels", 256),
        "max_position_embeddings": ("max_sequence_length", 8192),
        "tie_word_embeddings": (TIED, True),
    },
    read=_read_gemma,
    write=_write_gemma,
)


def _read_gemma2(given: ConfigJson, options: Options) -> Options:
    block = _read_later_gemma(given, options, None)
    return _read_output_norms(given, block, [i % 2 == 0 for i in range(options["num_layers"])], (50.0, 30.0))


def _read_gemma3(given: ConfigJson, options: Options) -> Options:
    positions = given.rotary(options["max_sequence_length"], 1e6, window_default=1e4)
    period = given.take("sliding_window_pattern", int, 6)
    if given.has("layer_types"):
        given.skip("_sliding_window_pattern")  # which transformers writes beside them, and does not read
    else:
        given.expect("_sliding_window_pattern", period)
    if period < 1:
        raise given.refused("sliding_window_pattern", period, "it must be positive")
    given.expect("attn_logit_softcapping", None)  # transformers ignores another value, and others may not
    windowed = [(i + 1) % period != 0 for i in range(options["num_layers"])]
    block = _read_later_gemma(given, options, positions)
    return {**_read_output_norms(given, block, windowed, (None, None)), "qk_layernorm": True}


def _read_output_norms(
    given: ConfigJson, options: Options, windowed: Sequence[bool], caps: tuple[float | None, float | None]
) -> Options:
    """Return Gemma's options with those of Gemma 2 and 3; ``caps`` are the default softcaps of scores and logits."""
    size, scalar = given.take("sliding_window", int, 4096), given.take("query_pre_attn_scalar", float, 256.0)
    if not scalar > 0.0:
        raise given.refused("query_pre_attn_scalar", scalar, "it must be positive")
    given.expect("sliding_window_size", size)
    softcap = given.optional("final_logit_softcapping", float, caps[1])
    return {
        **read_windows(given, options, size, windowed),
        "logit_softcap": given.optional("attn_logit_softcapping", float, caps[0]),
        "softmax_scale": None if scalar == options["kv_channels"] else scalar**-0.5,
        "block_output_layernorm": True,
        "multipliers": replace(options["multipliers"], softcap=softcap),
    }


def _write_gemma2(options: Options) -> dict[str, Any]:
    scale = options["softmax_scale"]
    windows = write_windows(options)
    if windows["sliding_window"] is None:
        # transformers creates the window mask for every Gemma 2 and 3, even if no layer has a window.
        windows["sliding_window"] = 4096
    common = _write_gemma(options)
    return {
        **common,
        "hidden_activation": common["hidden_act"],
        **windows,
        "query_pre_attn_scalar": options["kv_channels"] if scale is None else max(round(scale**-2), 1),
        "attn_logit_softcapping": options["logit_softcap"],
        "final_logit_softcapping": options["multipliers"].softcap,
    }


GEMMA2 = replace(
    GEMMA,
    model_type="gemma2",
    fields={
        **GEMMA.fields,
        "hidden_size": ("hidden_size", 2304),
        "intermediate_size": ("ffn_hidden_size", 9216),
        "num_hidden_layers": ("num_layers", 26),
        "num_attention_heads": ("num_attention_heads", 8),
        "num_key_value_heads": ("num_query_groups", 4),
    },
    read=_read_gemma2,
    write=_write_gemma2,
)
GEMMA3 = replace(
    GEMMA2,
    model_type="gemma3_text",
    fields={
        **GEMMA2.fields,
        "vocab_size": ("vocab_size", 262208),
        "max_position_embeddings": ("max_sequence_length", 131072),
    },
    read=_read_gemma3,
)
