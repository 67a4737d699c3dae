"""Adapters that PEFT made for models of transformers, and adapters written here that PEFT loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
_REASON = "compares with PEFT: pip install -e '.[parity]'"
torch = pytest.importorskip("torch", reason=_REASON)
pytest.importorskip("transformers", reason=_REASON)
peft = pytest.importorskip("peft", reason=_REASON)

from jax_te.interop.huggingface import load_peft, save_peft  # noqa: E402
from tests.interop.huggingface.test_parity import CASES as PARITY_CASES  # noqa: E402
from tests.interop.huggingface.test_parity import loaded, logits_of, make, tokens_of  # noqa: E402
from tests.support.numerics import assert_close, quick_jit  # noqa: E402

CASES: dict[str, dict[str, Any]] = {
    "llama 3": {"target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], "use_rslora": True},
    "gpt2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "rank_pattern": {"h.0.attn.c_attn": 2}},
    "phi 3": {"target_modules": ["qkv_proj", "gate_up_proj"], "alpha_pattern": {"layers.1.self_attn.qkv_proj": 3}},
    "gpt-neox": {"target_modules": "all-linear"},
    "t5": {"target_modules": ["q", "k", "v", "o"]},
    "mt5": {"target_modules": ["q", "wi_0", "wi_1", "wo"]},
    "bert": {"target_modules": ["query", "key", "dense"]},
    "roberta": {"target_modules": ["query", "value"]},
    "mistral": {"target_modules": ["q_proj", "gate_proj", "down_proj"]},
    "olmo 2": {"target_modules": ["k_proj", "v_proj", "up_proj"]},
    "qwen 2": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "qwen 3": {"target_modules": ["q_proj", "gate_proj"]},
    "gemma": {"target_modules": "all-linear"},
    "gemma 2": {"target_modules": ["v_proj", "o_proj"]},
    "gemma 3": {"target_modules": ["q_proj", "up_proj"]},
    "mixtral": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "qwen 2 moe": {"target_modules": r".*(self_attn\.[qkvo]_proj|shared_expert\.(gate|up|down)_proj)"},
    "qwen 3 moe": {"target_modules": ["q_proj", "v_proj"]},
    "olmoe": {"target_modules": ["k_proj", "o_proj"]},
    "deepseek v2": {"target_modules": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
    "deepseek v3": {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
    "glm 4.5": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "gpt-oss": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
}


def test_every_class_that_is_read_has_a_case() -> None:
    models = {PARITY_CASES[name][0] for name in CASES}
    assert models == {kind for kind, _ in PARITY_CASES.values()}


PEFTS_OWN = (
    "ignore::UserWarning:peft",
    "ignore::FutureWarning",
    r"ignore:The following \w+_pattern keys:RuntimeWarning",
)


@pytest.mark.filterwarnings(*PEFTS_OWN)
def test_adapters_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    """PEFT makes them of the names of a feed-forward block's layers."""
    theirs = make("deepseek v3", tmp_path / "base")
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(target_modules=["o_proj", "gate_proj", "up_proj"]))
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match=r"target_parameters is \['gate_up_proj'\].*as experts have them"):
        load_peft(loaded(tmp_path / "base"), tmp_path / "theirs")


@pytest.mark.filterwarnings(*PEFTS_OWN)
@pytest.mark.parametrize("name", CASES)
def test_adapters_of_peft_compute_the_same_and_come_back(name: str, tmp_path: Path) -> None:
    theirs = make(name, tmp_path / "base")
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(**{"r": 4, "lora_alpha": 6} | CASES[name])).eval()
    for key, parameter in theirs.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = tokens_of(theirs)
    expected = logits_of(theirs, tokens)

    ours = loaded(tmp_path / "base")
    kind = theirs.config.architectures[0]
    load_peft(ours, tmp_path / "theirs", architecture=kind)
    ids = jnp.asarray(tokens, jnp.int32)
    arrays = (ids, ids[:, :7]) if theirs.config.is_encoder_decoder else (ids,)
    actual = quick_jit(lambda model, *arrays: model(*arrays))(ours, *arrays)
    # T5 does not scale its scores, see test_parity.py.
    assert_close(actual, expected, 2.0**-14 if theirs.config.is_encoder_decoder else 2.0**-16)

    save_peft(ours, tmp_path / "ours", architecture=kind)
    back = peft.PeftModel.from_pretrained(make(name, tmp_path / "base"), tmp_path / "ours").eval()
    given, kept = (
        {key: value for key, value in model.named_parameters() if "lora_" in key} for model in (theirs, back)
    )
    assert given.keys() == kept.keys()
    assert all(torch.equal(value, kept[key]) for key, value in given.items())
    np.testing.assert_array_equal(logits_of(back, tokens), expected)
