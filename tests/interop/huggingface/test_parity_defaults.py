"""Fields that a ``config.json`` lacks: each stands for the value that transformers' own class has without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

_REASON = "compares with transformers: pip install -e '.[parity]'"
pytest.importorskip("torch", reason=_REASON)
transformers = pytest.importorskip("transformers", reason=_REASON)

from jax_te.interop.huggingface.architectures.registry import read_form  # noqa: E402
from tests.interop.huggingface.test_parity import CASES  # noqa: E402

# Fields that name the class; and the number of layers of multi-token prediction, which the tensors say: transformers'
# classes count one, and do not have it.
_SAID_ELSEWHERE = ("architectures", "model_type", "num_nextn_predict_layers")


def values_of(name: str) -> dict[str, Any]:
    """The fields of a tiny model."""
    kind, options = CASES[name]
    config = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")
    heads = ("ForMaskedLM", "ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    architecture = next(kind + head for head in heads if hasattr(transformers, kind + head))
    tokens: dict[str, Any] = {"vocab_size": 67, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return config(**tokens | options).to_dict() | {"architectures": [architecture]}


def in_older_form(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with the fields of rotary positions that transformers had before version 5."""
    found, rotary = dict(values), dict(values["rope_parameters"])
    del found["rope_parameters"]
    neox = found["model_type"] == "gpt_neox"
    for newer, older in (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")):
        if newer in rotary:
            found[older if neox else newer] = rotary.pop(newer)
    kind = rotary.pop("rope_type")
    return found | {"rope_scaling": None if kind == "default" else rotary | {"type": kind}}


def without_each(values: Mapping[str, Any], *path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The fields without each one in turn, also of those that hold fields, with its name."""
    for name, value in values.items():
        if name in _SAID_ELSEWHERE:
            continue
        rest = {other: each for other, each in values.items() if other != name}
        yield ".".join((*path, name)), rest
        if name.startswith("rope_") and isinstance(value, Mapping):
            yield from ((where, {**rest, name: inner}) for where, inner in without_each(value, *path, name))


def read(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """All options that fields give, those of training with them; None for fields that are refused."""
    try:
        _, form = read_form(values, "config.json", range(1000))
    except ValueError:
        return None
    return form.options() | {name: getattr(form.config, name) for name in ("attention_dropout", "hidden_dropout")}


def read_filled(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same of the fields that transformers' class makes of these; None where it fails, too."""
    try:
        config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(dict(values))
    except Exception:  # it raises errors of many kinds
        return None
    return read(config.to_dict() | {"architectures": values["architectures"]})


def check(cases: Iterator[tuple[str, dict[str, Any]]]) -> None:
    wrong = {}
    for name, values in cases:
        found, expected = read(values), read_filled(values)
        if found != expected:
            one, two = found or {}, expected or {}
            wrong[name] = {key: (one.get(key), two.get(key)) for key in one | two if one.get(key) != two.get(key)}
    assert not wrong


@pytest.mark.parametrize("name", CASES)
def test_an_absent_field_stands_for_transformers_own_default(name: str) -> None:
    values = values_of(name)
    assert read(values) is not None
    check(without_each(values))


@pytest.mark.parametrize("name", [name for name in CASES if "rope_type" in values_of(name).get("rope_parameters", {})])
def test_so_it_does_in_older_files(name: str) -> None:
    values = in_older_form(values_of(name))
    assert read(values) is not None
    # The other fields are those of the test above.
    check((field, rest) for field, rest in without_each(values) if field.startswith(("rope_", "rotary_", "partial_")))


@pytest.mark.parametrize("name", ["qwen 2", "qwen 3", "deepseek v3", "llama 3", "olmoe"])
def test_no_number_of_groups_is_that_of_the_heads(name: str) -> None:
    """Where the file says null, which some classes tell from an absent field."""
    values = values_of(name) | {"num_key_value_heads": None}
    found = read(values)
    assert found is not None
    assert found["num_query_groups"] == found["num_attention_heads"]
    check(iter([("num_key_value_heads", values)]))


def test_a_name_that_neoxs_class_does_not_read_is_refused() -> None:
    values = in_older_form(values_of("gpt-neox"))
    for name in ("rope_theta", "partial_rotary_factor"):
        with pytest.raises(ValueError, match=f"{name} is 0.5"):
            read_form(values | {name: 0.5}, "config.json", range(1000))
