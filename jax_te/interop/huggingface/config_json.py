"""The fields of a ``config.json``: those without effect, activations and rotary positions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jax_te.interop.tables import REQUIRED, Fields
from jax_te.layers import LinearScaling, Llama3Scaling, RotaryScaling, YarnScaling
from jax_te.models import RotaryPositions

# Fields that change no output of any architecture here, by the reason.
_NO_NUMBERS = {
    "what the file says of itself and of the program that wrote it": """
        _commit_hash _name_or_path architectures finetuning_task model_type tokenizer_class
        transformers.js_config transformers_version unsloth_fixed unsloth_version""",
    "dtype of tensors, which the tensors themselves have; TensorFlow's and TorchScript's programs": """
        dtype tf_legacy_loss torch_dtype torchscript use_bfloat16""",
    "how a program runs a layer, or what it returns beside its output": """
        _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled attn_implementation
        cache_implementation chunk_size_feed_forward gradient_checkpointing output_attentions output_hidden_states
        output_past output_scores pretraining_tp reorder_and_upcast_attn return_dict return_dict_in_generate use_cache
        use_return_dict""",
    "first weights of a T5, which those of the folder replace": "initializer_factor",
    "heads of other tasks": """
        _num_labels classifier_dropout id2label is_encoder_decoder label2id num_labels problem_type
        summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
        task_specific_params""",
    "transformers' loss of routers in training, which is another sum than those here": """
        aux_loss_alpha output_router_logits router_aux_loss_coef seq_aux""",
    "numbers of special tokens": """
        bos_token_id cls_token_id decoder_start_token_id eos_token_id eos_token_ids forced_bos_token_id
        forced_eos_token_id pad_token_id sep_token_id""",
    "how text is generated": """
        bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
        exponential_decay_length_penalty length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
        num_beams num_return_sequences prefix remove_invalid_values repetition_penalty suppress_tokens temperature
        top_k top_p typical_p""",
}
NO_NUMBERS = frozenset(name for names in _NO_NUMBERS.values() for name in names.split())
"""Fields that change no output of a model."""

INITIAL_DEVIATION = "initializer_range"
"""Field with the standard deviation of first weights."""

FULL, WINDOW = "full_attention", "sliding_attention"
"""transformers' names of the kinds of layers."""

# transformers' name: ours without and with a gate.
ACTIVATIONS: dict[str, tuple[Any, Any]] = {
    "silu": ("silu", "swiglu"),
    "gelu_new": ("gelu", "geglu"),
    "gelu_pytorch_tanh": ("gelu", "geglu"),
    "gelu_fast": ("gelu", "geglu"),
    "gelu": ("gelu_exact", ("gelu_exact", "linear")),
    "relu": ("relu", "reglu"),
    "swish": ("silu", "swiglu"),
}


class ConfigJson(Fields):
    """The fields of a ``config.json``.

    >>> fields = ConfigJson({"hidden_act": "silu", "use_cache": True}, "config.json")
    >>> fields.activation("hidden_act", "gelu", gated=True)
    'swiglu'
    >>> fields.finish()
    """

    def __init__(self, values: Mapping[str, Any], what: str, tensors: Collection[Any] = ()):
        super().__init__(values, what, tensors, without_effect=NO_NUMBERS)

    def read_common(self) -> None:
        """Read the fields of every class of transformers, which older files have with their defaults."""
        for name in ("is_decoder", "add_cross_attention", "tie_encoder_decoder"):
            self.expect(name, False)
        self.expect("pruned_heads", {})
        # Names of a folder's own code, which transformers does not run for its own classes either.
        self.skip("auto_map")

    def activation(self, name: str, default: str, *, gated: bool, allowed: Collection[str] = ACTIVATIONS) -> Any:
        """Return our name of an activation."""
        value = self.take(name, str, default)
        if value not in allowed:
            raise self.refused(name, value, f"known activations: {', '.join(allowed)}")
        return ACTIVATIONS[value][gated]

    def rotary(
        self,
        max_positions: int,
        default: float = 10000.0,
        *,
        window_default: float | None = None,
        part_default: float | None = None,
        latent: bool = False,
    ) -> RotaryPositions:
        """Return the rotary positions, in the fields of transformers 5 (``rope_parameters``) or of those before.

        Args:
            max_positions: the longest input, where no field says for which length frequencies were trained.
            default: the base where no field says it.
            window_default: the same in layers with a window, if these have positions of their own.
            part_default: part of each head that is rotated where no field says it, of a class that follows the field.
                None: the class rotates whole heads.
            latent: whether they are those of latent attention, which reads ``mscale_all_dim`` by itself, too.
        """
        older, newer = self.take("rope_scaling", dict, {}), self.take("rope_parameters", dict, {})
        window_base = None
        if window_default is not None:
            kinds = ConfigJson(newer, f"{self._what}: rope_parameters")
            newer, own = kinds.take(FULL, dict, {}), ConfigJson(kinds.take(WINDOW, dict, {}), f"{self._what}: {WINDOW}")
            kinds.finish()
            own.expect("rope_type", "default")
            window_base = own.take("rope_theta", float, self.take("rope_local_base_freq", float, window_default))
            own.finish()
        values = {**newer, **older}
        for name in ("rope_theta", "partial_rotary_factor"):
            values = {name: self._values.pop(name, None), **values}
        rope = ConfigJson(values, f"{self._what}: rope_scaling")
        base = rope.take("rope_theta", float, default)
        if part_default is None:
            # transformers' classes of most architectures rotate the whole head regardless of this field, or fail.
            rope.expect("partial_rotary_factor", 1.0, 1)
        part = rope.take("partial_rotary_factor", float, part_default or 1.0)
        if not 0.0 < part <= 1.0:
            raise rope.refused("partial_rotary_factor", part, "it must be in (0, 1]")
        kind = rope.take("type", str, "default")
        kind = rope.take("rope_type", str, kind)
        if latent and values.get("mscale_all_dim") and not (kind == "yarn" and values.get("mscale")):
            raise rope.refused(
                "mscale_all_dim",
                values["mscale_all_dim"],
                "latent attention follows it with rope_type='yarn' and mscale",
            )
        scaling = _scaling(rope, kind, max_positions)
        rope.finish()
        return RotaryPositions(base=base, percent=part, scaling=scaling, window_base=window_base)


def activation_name(activation: Any, *, gated: bool) -> str | None:
    """Return transformers' name of one of our activations, None if it has none.

    >>> activation_name("swiglu", gated=True)
    'silu'
    """
    return next((name for name, ours in ACTIVATIONS.items() if ours[gated] == activation), None)


def rotary_fields(rotary: RotaryPositions | str) -> dict[str, Any]:
    """Return `RotaryPositions`, of a model that has them, as fields that every version of transformers reads.

    The part of a head that is rotated is not written: few architectures follow it, each in a field of its own.

    >>> rotary_fields(RotaryPositions(base=5e5, scaling=LinearScaling(factor=2.0)))
    {'rope_theta': 500000.0, 'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}}
    """
    if not isinstance(rotary, RotaryPositions):
        return {}
    fields: dict[str, Any] = {"rope_theta": rotary.base, "rope_scaling": None}
    scaling = rotary.scaling
    if scaling is not None:
        kind, renamed = _SCALINGS[type(scaling)]
        values = {renamed.get(name, name): value for name, value in vars(scaling).items() if value is not None}
        fields["rope_scaling"] = {"rope_type": kind, **values}
    if rotary.window_base is not None:
        fields["rope_local_base_freq"] = rotary.window_base
    return fields


_SCALINGS: dict[type, tuple[str, dict[str, str]]] = {
    LinearScaling: ("linear", {}),
    Llama3Scaling: ("llama3", {}),
    YarnScaling: ("yarn", {"round_range": "truncate"}),
}


def _scaling(rope: ConfigJson, kind: str, max_positions: int) -> RotaryScaling | None:
    if kind == "default":
        return None
    original = rope.take("original_max_position_embeddings", int, max_positions)
    if kind == "linear":
        return LinearScaling(factor=rope.take("factor", float, REQUIRED))
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        given = {name: rope.take(name, float, REQUIRED) for name in names}
        return Llama3Scaling(**given, original_max_position_embeddings=original)
    if kind == "yarn":
        given = {name: rope.take(name, float, default) for name, default in _YARN.items()}
        if not (given["mscale"] and given["mscale_all_dim"]):  # transformers uses the two only together
            given |= {"mscale": 1.0, "mscale_all_dim": 0.0}
        truncate = rope.take("truncate", bool, True)
        return YarnScaling(**given, original_max_position_embeddings=original, round_range=truncate)
    raise rope.refused("rope_type", kind, f"known: default, {', '.join(name for name, _ in _SCALINGS.values())}")


_YARN: dict[str, Any] = {"factor": REQUIRED, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None}
_YARN |= {"mscale": 0.0, "mscale_all_dim": 0.0}
