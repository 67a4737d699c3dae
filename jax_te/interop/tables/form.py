"""The form of a model: its options, the letters of its sizes, and which options an architecture can represent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

from flax import nnx

from jax_te.config import (
    CudaGraphConfig,
    MLATransformerConfig,
    ModelParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    TransformerConfig,
    is_windowed_layer,
)
from jax_te.interop.tables.fields import Fields
from jax_te.interop.tables.patterns import Sizes, Table
from jax_te.models import Execution, LanguageModel, Multipliers
from jax_te.typing import Words

KnownModel = Annotated[LanguageModel, Words("a model of jax_te.models", error=ValueError)]
"""Model whose parameters the tables of the architectures name."""

Options = Mapping[str, Any]
"""Fields of a `TransformerConfig`, arguments of a model's constructor, and its multipliers; never changed in place."""

_CONFIG_FIELDS = frozenset(field.name for field in fields(TransformerConfig) if field.compare)
# Options of execution, of weight initialization, and of training only.
_ALSO_NO_OUTPUT = """
activation_func gated_linear_unit init_method init_method_std output_layer_init_method compute_dtype attention_dropout
hidden_dropout apply_query_key_layer_scaling attention_softmax_in_fp32 batch_invariant_mode qk_clip qk_clip_alpha
qk_clip_threshold log_max_attention_logit cp_comm_type hierarchical_context_parallel_sizes cp_load_balanced
fused_residual_rmsnorm moe_router_bias_update_rate moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps
moe_router_dtype moe_enable_routing_replay moe_per_layer_logging moe_layer_recompute moe_token_dispatcher_type
moe_expert_rank_capacity_factor moe_router_quantile_balancing_ema mtp_loss_scaling_factor
"""
_RUN = (ModelParallelConfig, PrecisionConfig, RecomputeConfig, CudaGraphConfig)
_NO_OUTPUT = {*_ALSO_NO_OUTPUT.split(), *(field.name for base in _RUN for field in fields(base))}
_SAID_TWICE = {"activation_func", "gated_linear_unit", "params_dtype"}
# Fields that no caller sets beside a checkpoint.
_DECIDED = ({field.name for field in fields(MLATransformerConfig)} - _NO_OUTPUT) | _SAID_TWICE
TIED = "share_embeddings_and_output_weights"
_KINDS: dict[str, type] = {
    "layernorm_epsilon": float,
    "attention_dropout": float,
    "hidden_dropout": float,
    **dict.fromkeys((TIED, "add_bias_linear", "add_qkv_bias", "qk_layernorm", "layernorm_zero_centered_gamma"), bool),
    "parallel_attention_mlp": bool,
    "normalization": str,
}


@dataclass(frozen=True)
class Form:
    """A configuration, and the other options of a model."""

    config: TransformerConfig
    others: Options

    @classmethod
    def make(cls, options: Options) -> Form:
        """Return the form with the given options.

        Raises:
            ValueError: for options that do not fit each other.
        """
        options = {"multipliers": Multipliers(), **options}
        config = {name: value for name, value in options.items() if name in _CONFIG_FIELDS}
        return cls(TransformerConfig(**config), {name: options[name] for name in options.keys() - config.keys()})

    def options(self) -> dict[str, Any]:
        """Return all options that change the outputs of a model."""
        options = {**{name: getattr(self.config, name) for name in sorted(_CONFIG_FIELDS - _NO_OUTPUT)}, **self.others}
        # Methods that balance by a loss choose alike.
        if options["moe_router_load_balancing_type"] not in ("sinkhorn", "quantile_balancing"):
            options["moe_router_load_balancing_type"] = "aux_loss"
        # The following fields have several equivalent spellings.
        if options["window_size"]:
            options |= {"window_size": layer_windows(options), "window_attn_skip_freq": None}
        options["moe_layer_freq"] = [self.config.has_experts(number) for number in range(self.config.num_layers)]
        if all(options["moe_layer_freq"]):
            options["ffn_hidden_size"] = None  # of no layer
        if options["moe_router_group_topk"] is not None:
            options["moe_router_group_score_topk"] = (
                self.config.moe_router_group_score_topk
                or options["moe_router_topk"] // options["moe_router_group_topk"]
            )
        if options["moe_router_topk_scaling_factor"] is None:
            options["moe_router_topk_scaling_factor"] = 1.0
        if self.config.latent_attention is not None:
            options["qk_layernorm"] = None  # an option of the latents, which an MLATransformerConfig also has
        # Rounded, since the factor of YaRN has several formulas that differ in the last digit.
        scale = options["softmax_scale"]
        options["softmax_scale"] = round((options["kv_channels"] or 1) ** -0.5 if scale is None else scale, 12)
        return options

    def run_as(self, changes: Mapping[str, Any], params_dtype: Any, described_by: str) -> Form:
        """Return a form whose configuration has other fields that change no output.

        Args:
            changes: fields by name.
            params_dtype: dtype of parameters.
            described_by: source of the form's options, for messages.

        Raises:
            ValueError: for a field that the outputs depend on, and for one that an argument sets.
            TypeError: for a field that no configuration has.
        """
        decided = _DECIDED | self.others.keys()
        wrong = sorted(name for name in changes if name in decided)
        if wrong:
            raise ValueError(
                f"the checkpoint's {described_by} and dtype= decide what the model computes and what its parameters "
                f"are; leave {', '.join(wrong)} out of config"
            )
        return replace(self, config=replace(self.config, **changes, params_dtype=params_dtype))

    def sizes(self) -> Sizes:
        """Return the size of each axis of the tables' patterns by its letter; those of docs/design.md and some more."""
        c = self.config
        n, g, d = c.num_attention_heads, c.num_query_groups or 1, c.kv_channels or 1
        letters = {
            "a": 2 if c.gated_linear_unit else 1,  # parts of the first kernel of a feed-forward block
            "h": c.hidden_size,  # hidden
            "o": c.hidden_size,  # hidden, of an output
            "w": 2 * c.hidden_size,  # hidden of two inputs, side by side
            "f": c.ffn_hidden_size or 1,  # feed-forward
            "n": n,  # query heads
            "g": g,  # key/value groups
            "r": n // g,  # query heads of a group
            "c": n // g + 2,  # components of a group: its queries, a key, a value
            "d": d,  # a head
            "q": n * d,  # all query heads
            "v": self.others["vocab_size"],  # vocabulary
            "s": self.others.get("first_position", 0) + self.others["max_sequence_length"],  # rows of positions
            "t": self.others.get("num_tokentypes", 0),  # token types
            "b": getattr(self.others.get("position_embedding_type"), "num_buckets", 0),  # buckets of relative positions
            "e": c.num_moe_experts or 0,  # experts
            "k": c.moe_latent_size or c.hidden_size,  # an expert's input
            "m": c.moe_ffn_hidden_size or 0,  # feed-forward of an expert
            "u": c.moe_shared_expert_intermediate_size or 0,  # feed-forward of shared experts
            "y": 1,  # the gate of shared experts
        }
        latent = c.latent_attention
        if latent is not None:
            rank, values = latent.kv_lora_rank, n * latent.v_head_dim
            letters |= {
                "z": latent.q_lora_rank or 0,  # latent of queries
                "l": rank,  # latent of keys and values
                "j": rank + latent.qk_pos_emb_head_dim,  # the same, and the rotated key
                "x": n * latent.qk_head_dim + values,  # keys and values of all heads
                "p": values,  # values of all heads
            }
        return letters


def model_options(model: Any, positions: Any) -> dict[str, Any]:
    """Return the options of every model, apart from its configuration.

    Args:
        model: a model of `jax_te.models`.
        positions: rotary or relative positions of the model, or None.
    """
    learned = "none" if model.position_embedding is None else "learned_absolute"
    return {
        "vocab_size": model.vocab_size,
        "max_sequence_length": model.max_sequence_length,
        "position_embedding_type": positions or learned,
        TIED: model.output_kernel is None,
        "multipliers": model.multipliers,
    }


def _check_count(what: str, count: int, given: Fields) -> None:
    if count > len(given.tensors):
        raise given.refused(f"the number of {what}", count, f"there are {len(given.tensors)} tensors")


def layer_windows(options: Options) -> tuple[tuple[int, int] | None, ...]:
    """Return the window of each layer, None for a layer without one."""
    size, skip = options["window_size"], options["window_attn_skip_freq"]
    numbers = range(1, options["num_layers"] + 1)
    return tuple(size if is_windowed_layer(size, skip, number) else None for number in numbers)


@dataclass(frozen=True)
class Architecture:
    """A model of another library, in tables that are read in both directions.

    Args:
        model_type: name of the architecture in ``config.json``.
        model: class of the model here.
        fields: field of the foreign file → our option, and its value where the field is absent.
        read: function that returns the options of these pairs, completed by the fields that are no such pair.
        write: function that returns those fields.
        table: function that returns the tensors of a form.
        options: function that returns the options of a model.
        base: prefix of the names, which a checkpoint of the model without its head lacks.
        tied_names: tensors that some files contain although they equal another, such as a head that is the embedding:
            name of the tensor → the other one's.
        ignored: a pattern of tensors that are not parameters of the model.
        fields_class: class of the fields that ``read`` takes.
        described_by: source of the fields, for messages: a file's name, or a word for it.
        copies: function that returns tensors of a form that are written although they equal another, and that files may
            lack: name of the tensor → the other one's.
        other_model_types: names in ``config.json`` of models in this form by others.
        older: ends of names in older files, as patterns, and their present forms.
    """

    model_type: str
    model: type
    fields: Mapping[str, tuple[str, Any]]
    read: Callable[[Any, Options], Options]
    write: Callable[[Options], Mapping[str, Any]]
    table: Callable[[Form], Table]
    options: Callable[[Any], Options]
    base: str
    tied_names: Mapping[str, str]
    ignored: str
    fields_class: Callable[..., Any]
    described_by: str
    copies: Callable[[Form], Mapping[str, str]] = lambda form: {}
    other_model_types: tuple[str, ...] = ()
    older: tuple[tuple[str, str], ...] = ()

    def form(self, given: Fields) -> Form:
        """Return the form that the fields of a file describe.

        Raises:
            ValueError: for unsupported fields, and for more layers or experts than tensors, which would take unlimited
                time and memory.
        """
        options = {
            # Null stands for as many groups as heads, whatever the number of an absent field is.
            ours: (given.optional if ours == "num_query_groups" else given.take)(name, _KINDS.get(ours, int), default)
            for name, (ours, default) in self.fields.items()
        }
        layers = max(options["num_layers"] or 0, options.get("encoder_num_layers") or 0)
        _check_count("layers", layers, given)
        complete = self.read(given, options)
        _check_count("experts", complete.get("num_moe_experts") or 0, given)
        given.read_common()
        try:
            return Form.make({name: value for name, value in complete.items() if value is not None})
        except TypeError as error:  # a value of another type in a file is a wrong value of that file
            raise given.unfit(error) from error

    def config_fields(self, form: Form) -> dict[str, Any]:
        """Return the fields of the foreign file of a form."""
        options = {**{name: getattr(form.config, name) for name in _CONFIG_FIELDS}, **form.others}
        return {name: options.get(ours) for name, (ours, _) in self.fields.items()} | dict(self.write(options))

    def build(self, form: Form, execution: Execution, rngs: nnx.Rngs) -> Any:
        """Return a model with this form, and with new weights."""
        arguments = dict(form.others)
        multipliers = arguments.pop("multipliers")
        model = self.model(form.config, **arguments, execution=execution, rngs=rngs)
        model.multipliers = multipliers
        return model
