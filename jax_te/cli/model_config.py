"""Runs of a model that a ``config.json`` describes, new or fine-tuned: its form, its weights, and adapters."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flax import nnx

from jax_te.cli.option_table import flag, options_of
from jax_te.cli.options import ExpertOptions, ModelOptions
from jax_te.data import ByteTokenizer
from jax_te.interop.huggingface import CONFIG, config_values, json_file, load_huggingface, read_form
from jax_te.interop.tables import Architecture, Form
from jax_te.layers import GroupedLinear, GroupedLoRA, LoRA
from jax_te.models import BertModel, Execution, GPTModel, LanguageModel, RelativePositions, RotaryPositions, T5Model

_OWN = ("dropout", "init_from", "model_config", "ignore_fields", "lora_rank", "lora_alpha")
_OWN += ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_token_dispatcher_type", "moe_expert_rank_capacity_factor")
EXPERTS = {name: row for name, row in options_of(ExpertOptions).items() if name not in _OWN}
"""Options of layers with experts that a ``config.json`` decides."""

FORM = {name: row for name, row in options_of(ModelOptions).items() if name not in _OWN} | EXPERTS
"""Options that a ``config.json`` decides."""

_SAID = {name for field, row in FORM.items() for name in row.library or (field,)} | {"params_dtype"}
_MAX_LAYERS = range(10_000)
_LONGEST_DEFAULT = 512
"""The longest sequence length that is taken unasked; a model may support far more positions than fit into memory."""

_POSITIONS: dict[type, str] = {RotaryPositions: "rope", RelativePositions: "relative"}

_SOURCES = ("init_from", "model_config")
"""Options that name a ``config.json``."""


def default_length(positions: int) -> int:
    """Return the sequence length, without ``--seq-len``, of training and evaluation of a described model.

    Args:
        positions: number of positions of the model.

    >>> default_length(128), default_length(131072)
    (128, 512)
    """
    return min(_LONGEST_DEFAULT, positions)


def read_model_config(path: str) -> str:
    """Return the text of the ``config.json`` of ``--model-config``, which may name its folder.

    Raises:
        ValueError: for a file that cannot be read, or is not a JSON object.
    """
    place = Path(path)
    return json.dumps(json_file(place / CONFIG if place.is_dir() else place))


def described_values(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a run's configuration that follow from the ``config.json`` of a model.

    Args:
        given: options that are given. If neither ``init_from`` nor ``model_config`` is among them, there are no fields.

    Raises:
        ValueError: for both of them, for a folder that cannot be read, and for options that the file decides.
    """
    sources = [name for name in _SOURCES if name in given]
    if not sources:
        return {}
    if len(sources) > 1:
        raise ValueError(f"{' and '.join(map(flag, sources))} each say what the model is; leave one of them out")
    source = flag(*sources)
    wrong = [flag(name) for name in ("preset", *FORM) if name in given]
    if wrong:
        raise ValueError(f"{source} says what the model is; leave {', '.join(wrong)} out")
    fine_tuned = "init_from" in given
    text = json.dumps(config_values(Path(given["init_from"]))) if fine_tuned else given["model_config"]
    form = described_form(text, given.get("ignore_fields"))[1]
    config, others = form.config, form.others
    positions = others.get("position_embedding_type", "learned_absolute")
    if not isinstance(config.activation, str):
        raise ValueError(f"{source}: jax-te train has no name for its activation {config.activation!r}")
    heads, hidden = config.num_attention_heads, config.hidden_size
    experts = {name: getattr(config, *(row.library or (name,))) for name, row in EXPERTS.items()}
    if not isinstance(experts["moe_layer_freq"], int):
        experts["moe_layer_freq"] = json.dumps(experts["moe_layer_freq"])
    # Pretrained weights need at most a tenth of the learning rate of new ones. Adapters are new.
    if fine_tuned:
        learned = {"tokenizer": given["init_from"], "learning_rate": 2e-4 if "lora_rank" in given else 2e-5}
    else:
        learned = {"learning_rate": 3e-4}
    return {
        "model_config": text,
        "vocab_size": others["vocab_size"],
        "num_layers": config.num_layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_query_groups": config.num_query_groups or heads,
        "ffn_hidden_size": config.ffn_hidden_size or 4 * hidden,
        "kv_channels": config.kv_channels,
        **experts,
        "qk_layernorm": config.qk_layernorm,
        "normalization": config.normalization,
        "activation": config.activation,
        "position_embedding": _POSITIONS.get(type(positions), positions),
        "bias": config.add_bias_linear,
        "tie_embeddings": others.get("share_embeddings_and_output_weights", True),
        "seq_len": default_length(others["max_sequence_length"]),
        **learned,
    }


def field_names(ignored: str | None) -> list[str]:
    """Return the names that a value of ``--ignore-fields`` lists.

    >>> field_names("my_note,other"), field_names(None)
    (['my_note', 'other'], [])
    """
    return ignored.split(",") if ignored else []


# A run's configuration asks for it whenever it makes a TransformerConfig.
@functools.lru_cache(maxsize=4)
def described_form(text: str, ignored: str | None = None) -> tuple[Architecture, Form]:
    """Return the architecture and form that a ``config.json`` describes.

    Args:
        text: text of the file.
        ignored: fields to ignore, as ``--ignore-fields`` names them.

    Raises:
        ValueError: for an unsupported one, or one of a model without a loss.
    """
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"the model's {CONFIG} is not a JSON object")
    if values.get("quantization_config"):
        raise ValueError(
            f"the model's {CONFIG} says that its kernels are quantized (quantization_config), and training takes them "
            "in full. For --init-from multiply them out first: jax-te convert FOLDER NEW --to huggingface "
            "--dequantize; then --init-from NEW. From --model-config remove the field"
        )
    kind, form = read_form(values, f"the model's {CONFIG}", _MAX_LAYERS, field_names(ignored))
    if kind.model not in (GPTModel, T5Model, BertModel):
        raise ValueError(f"jax-te train has no objective for the {kind.model_type} of the model's {CONFIG}")
    if not form.others.get("add_lm_head", True):
        raise ValueError(
            f"the model's {CONFIG} is of a {kind.model_type} without a head for tokens, and nothing says what to train "
            "it for; give the folder of the class for masked tokens, such as BertForMaskedLM"
        )
    return kind, form


def check_described(config: Any) -> None:
    """Raise ValueError for conflicting options of a model that a ``config.json`` describes, and of fine-tuning.

    Args:
        config: a `jax_te.cli.run_config.RunConfig`.
    """
    if config.init_from is not None and config.model_config is None:
        raise ValueError(f"--init-from {config.init_from} is there without the {CONFIG} of its folder")
    if config.ignore_fields is not None and config.model_config is None:
        raise ValueError(
            f"--ignore-fields is for the {CONFIG} of --init-from or --model-config; give one of them, or leave it out"
        )
    if config.lora_rank is not None and config.init_from is None:
        raise ValueError("--lora-rank adapts weights that are trained already; give --init-from, or leave it out")
    if config.lora_alpha is not None and config.lora_rank is None:
        raise ValueError("--lora-alpha is for adapters; give --lora-rank, or leave it out")
    if config.model_config is not None:
        if config.tokenizer is None and config.vocab_size < ByteTokenizer.vocab_size:
            raise ValueError(
                f"the model's {CONFIG} has {config.vocab_size} tokens (vocab_size), and bytes are "
                f"{ByteTokenizer.vocab_size}; give the --tokenizer that it was made for"
            )
        kind, form = described_form(config.model_config, config.ignore_fields)
        longest = form.others["max_sequence_length"]
        if config.seq_len > longest:
            raise ValueError(f"--seq-len {config.seq_len} is above the {longest} positions of the model's {CONFIG}")
        if config.cp_load_balanced and kind.model is not GPTModel:
            raise ValueError(
                "--cp-load-balanced shares out the work of causal attention, and the model has an encoder, whose "
                "tokens see all others; leave it out"
            )
        mesh = config.parallel_config()
        if config.position_embedding == "relative" and config.cp_comm_type == "p2p" and mesh and mesh.context > 1:
            raise ValueError(
                "--cp-comm-type p2p moves keys around a ring, and a device has no part of the relative positions for "
                "them; give --cp-comm-type all_gather or a2a"
            )
    elif config.position_embedding == "relative":
        raise ValueError(
            "--position-embedding relative is that of a T5, which --init-from or --model-config describes; take another"
        )


def model_type(text: str) -> str:
    """Return the ``model_type`` of a ``config.json``.

    >>> model_type('{"model_type": "gpt_oss"}')
    'gpt_oss'
    """
    return str(json.loads(text).get("model_type"))


def as_run(text: str, ignored: str | None, fields: dict[str, Any]) -> Form:
    """Return the form of a described model that runs as a run's options say.

    Args:
        text, ignored: see `described_form`.
        fields: fields of a `TransformerConfig`, from the options.
    """
    changes = {name: value for name, value in fields.items() if name not in _SAID}
    return described_form(text, ignored)[1].run_as(changes, fields["params_dtype"], CONFIG)


def build_described(
    text: str, ignored: str | None, fields: dict[str, Any], execution: Execution, rngs: nnx.Rngs
) -> LanguageModel:
    """Return the model with new weights; the first arguments are those of `as_run`."""
    return described_form(text, ignored)[0].build(as_run(text, ignored, fields), execution, rngs)


def load_pretrained(
    folder: str, text: str, ignored: str | None, fields: dict[str, Any], execution: Execution
) -> LanguageModel:
    """Return the model with the folder's weights; other arguments are those of `as_run`.

    Raises:
        ValueError: also if the folder's configuration has changed.
    """
    # A run that has saved nothing yet starts again, by when the folder may hold another model.
    if config_values(Path(folder)) != json.loads(text):
        raise ValueError(f"--init-from {folder}: its {CONFIG} is not that of the run; give another --output")
    changes = {name: value for name, value in fields.items() if name not in _SAID}
    dtype, names = fields["params_dtype"], field_names(ignored)
    return load_huggingface(folder, dtype=dtype, config=changes, execution=execution, ignore_fields=names)


_ADAPTED = ("qkv", "query", "key_value", "q_down", "q_up", "kv_down", "proj")
"""Projections of attention with adapters: not ``kv_up`` of latent attention, whose kernel a cache of latents needs."""


def add_adapters(model: LanguageModel, rank: int, alpha: float | None, rngs: nnx.Rngs) -> None:
    """Put a `LoRA` around the linear layers of a model's transformer layers, and a `GroupedLoRA` around experts'.

    Routers stay as they are, and so do the biases by which they balance their load.
    """
    for parent, name in _adapted_places(model):
        base = getattr(parent, name)
        adapter: Any = GroupedLoRA if isinstance(base, GroupedLinear) else LoRA
        setattr(parent, name, adapter(base, rank, alpha=alpha, rngs=rngs))


def merge_adapters(model: LanguageModel) -> None:
    """Replace every `LoRA` by its layer, with the product of its adapters added to the kernels."""
    for parent, name in _adapted_places(model):
        setattr(parent, name, getattr(parent, name).merge())


def _adapted_places(model: Any) -> Iterator[tuple[Any, str]]:
    """Yield the modules, and names in them, of the layers that have adapters."""
    encoder = model.encoder_layers if isinstance(model, T5Model) else ()
    for layer in [*encoder, *model.layers]:
        for attention in filter(None, (layer.self_attention, layer.inter_attention)):
            yield from ((attention, name) for name in _ADAPTED if hasattr(attention, name))
        if layer.mlp is None:
            yield layer, "layernorm_mlp"
            continue
        for block in (layer.mlp.experts, layer.mlp.shared_experts):
            yield from ((block, name) for name in ("linear_fc1", "linear_fc2") if block is not None)
