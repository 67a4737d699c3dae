"""The fields of a ``config.json``: each is read, known to have no effect, or refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

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
        output_past output_scores pretraining_tp return_dict return_dict_in_generate use_cache use_return_dict""",
    "first weights, which those of the folder replace": "initializer_factor initializer_range",
    "heads of other tasks": """
        _num_labels classifier_dropout id2label is_encoder_decoder label2id num_labels problem_type
        task_specific_params""",
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

FULL, WINDOW = "full_attention", "sliding_attention"
"""transformers' names of the kinds of layers."""

REQUIRED: Any = object()
"""Default of a required field."""

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


class Fields:
    """The fields of a ``config.json``, with a record of those that were read, and the names of the folder's tensors.

    >>> fields = Fields({"hidden_size": 8, "use_cache": True}, "config.json")
    >>> fields.take("hidden_size", int, 4), fields.take("num_layers", int, 2)
    (8, 2)
    >>> fields.finish()
    """

    def __init__(self, values: Mapping[str, Any], what: str, tensors: Collection[Any] = ()):
        self._values, self._what, self.tensors = dict(values), what, tensors
        self._given = frozenset(values)

    def take(self, name: str, kind: type, default: Any) -> Any:
        """Return a field, or ``default`` where it is absent or null.

        Raises:
            ValueError: for a value that is not of this kind, and for a `REQUIRED` field that is absent.
        """
        value = self._values.pop(name, None)
        if value is None and default is REQUIRED:
            raise ValueError(f"{self._what} has no field {name}")
        if value is None:
            return default
        if kind is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"{self._what}: {name} must be of type {kind.__name__}, got {_short(value)}")
        return value

    def has(self, *names: str) -> bool:
        """Return whether there is one of these fields that is not null; none of them counts as read."""
        return any(self._values.get(name) is not None for name in names)

    def raw(self, name: str) -> Any:
        """Return a field of any kind, None where it is absent."""
        return self._values.pop(name, None)

    def optional(self, name: str, kind: type, default: Any) -> Any:
        """Return a field that may be null; ``default`` where it is absent. Raises like `take`."""
        return self.take(name, kind, None if name in self._values else default)

    def expect(self, name: str, *allowed: Any) -> None:
        """Raise ValueError for a field with another value; absent and null stand for the first."""
        value = self._values.pop(name, None)
        if value is not None and not any(type(value) is type(each) and value == each for each in allowed):
            raise self.refused(name, value, f"only {' or '.join(map(repr, allowed))} is supported")

    def skip(self, *names: str) -> None:
        """Skip fields without effect."""
        for name in names:
            self._values.pop(name, None)

    def refused(self, name: str, value: Any, why: str) -> ValueError:
        """Return the error about an unsupported field."""
        return ValueError(f"{self._what}: {name} is {_short(value)}; {why}")

    def unfit(self, error: TypeError) -> ValueError:
        """Return the error about a field whose value no configuration takes, with the words of ``error``."""
        return ValueError(f"{self._what}: {error}")

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
            kinds = Fields(newer, f"{self._what}: rope_parameters")
            newer, own = kinds.take(FULL, dict, {}), Fields(kinds.take(WINDOW, dict, {}), f"{self._what}: {WINDOW}")
            kinds.finish()
            own.expect("rope_type", "default")
            window_base = own.take("rope_theta", float, self.take("rope_local_base_freq", float, window_default))
            own.finish()
        values = {**newer, **older}
        for name in ("rope_theta", "partial_rotary_factor"):
            values = {name: self._values.pop(name, None), **values}
        rope = Fields(values, f"{self._what}: rope_scaling")
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

    def finish(self, ignore: Collection[str] = ()) -> None:
        """Raise ValueError for fields that nothing has read; null stands for a field that is absent.

        Args:
            ignore: names of fields that a caller knows to change no number. One that was read is refused.
        """
        followed = sorted(name for name in self._given - self._values.keys() if name in ignore)
        if followed:
            raise ValueError(
                f"{self._what}: {', '.join(followed)} cannot be ignored, because the model is built by it; leave it "
                "out of ignore_fields"
            )
        left = [name for name, value in self._values.items() if value is not None]
        left = sorted(name for name in left if name not in NO_NUMBERS and name not in ignore)
        if left:
            raise ValueError(
                f"{self._what} has fields that are unknown here and may change numbers: "
                f"{', '.join(f'{name[:60]}={_short(self._values[name])}' for name in left[:8])}"
                f"{f', and {len(left) - 8} more' if len(left) > 8 else ''}; name those that do not in ignore_fields "
                "(--ignore-fields on the command line)"
            )


def activation_name(activation: Any, *, gated: bool) -> str | None:
    """Return transformers' name of one of our activations, None if it has none.

    >>> activation_name("swiglu", gated=True)
    'silu'
    """
    return next((name for name, ours in ACTIVATIONS.items() if ours[gated] == activation), None)


def rotary_fields(rotary: Any) -> dict[str, Any]:
    """Return `RotaryPositions` as fields that every version of transformers reads.

    The part of a head that is rotated is not written: few architectures follow it, each in a field of its own.

    >>> rotary_fields(RotaryPositions(base=5e5, scaling=LinearScaling(factor=2.0)))
    {'rope_theta': 500000.0, 'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}}
    """
    if not isinstance(rotary, RotaryPositions):
        return {}
    found: dict[str, Any] = {"rope_theta": rotary.base, "rope_scaling": None}
    scaling = rotary.scaling
    if scaling is not None:
        kind, renamed = _SCALINGS[type(scaling)]
        values = {renamed.get(name, name): value for name, value in vars(scaling).items() if value is not None}
        found["rope_scaling"] = {"rope_type": kind, **values}
    if rotary.window_base is not None:
        found["rope_local_base_freq"] = rotary.window_base
    return found


_SCALINGS: dict[type, tuple[str, dict[str, str]]] = {
    LinearScaling: ("linear", {}),
    Llama3Scaling: ("llama3", {}),
    YarnScaling: ("yarn", {"round_range": "truncate"}),
}


def _scaling(rope: Fields, kind: str, max_positions: int) -> RotaryScaling | None:
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


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:56]} ..."
