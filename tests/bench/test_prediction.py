"""Predicted times of train steps, beside measured ones of the pages on performance, from which the rates are taken.

So these steps show that the rates are still those of the pages; models drawn after them show how good a prediction is.
"""

import json
import re
from pathlib import Path

import pytest

from jax_te.bench import Sizes, predict_step
from jax_te.cli.bench.preset_config import preset_config, sizes_of
from jax_te.cli.main import main
from jax_te.cli.model_config import read_model_config
from jax_te.config import TransformerConfig
from tests.support.families import family_folder
from tests.support.runs import assert_refused

FORMS = "examples/model_configs"
MEASURED = {
    "gpt-1.3b": ({"vocab_size": 32000}, {"none": 245.3, "delayed": 170.6, "current": 178.2, "block": 215.9}),
    "qwen3-moe-3b": ({"microbatches": 1}, {"none": 185.6, "delayed": 165.4, "current": 165.1}),
    f"{FORMS}/deepseek_3b.json": ({"batch_size": 4, "seq_len": 4096}, {"none": 284.7, "delayed": 229.0}),
    f"{FORMS}/gpt_oss_3b.json": ({"batch_size": 4, "seq_len": 4096}, {"none": 166.3, "delayed": 156.3}),
}
"""Model -> fields, and milliseconds of a step by recipe: docs/performance.md and docs/performance_experts.md."""


@pytest.mark.parametrize("model", MEASURED)
def test_measured_steps_are_within_a_tenth(model):
    fields, measured = MEASURED[model]
    if model.startswith(FORMS):
        config = preset_config("tiny", "none", model_config=read_model_config(model), **fields)
    else:
        config = preset_config(model, "none", **fields)
    for recipe, ms in measured.items():
        predicted = predict_step(sizes_of(config), recipe, "h200")
        assert sum(predicted.values()) == pytest.approx(ms, rel=0.1), (recipe, predicted)


def test_a_measured_step_of_short_kernels_is_within_a_tenth():
    """Its kernels take little beside what starts them."""
    config = TransformerConfig(num_layers=16, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=16)
    sizes = Sizes(config=config, vocabulary=50304, batch=2, sequence=2048)
    for recipe, ms in {"none": 20.2, "delayed": 18.6, "current": 19.4}.items():
        assert sum(predict_step(sizes, recipe, "h200").values()) == pytest.approx(ms, rel=0.1), recipe


def form_of(kind, layers, hidden, feed_forward, heads, groups, vocabulary):
    """``config.json`` of a model of GPT-2's or Llama's form."""
    if kind == "gpt2":
        sizes = {"n_layer": layers, "n_embd": hidden, "n_inner": feed_forward, "n_head": heads, "n_positions": 4096}
        return json.dumps({"model_type": kind, "vocab_size": vocabulary} | sizes)
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": feed_forward}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": groups, "max_position_embeddings": 4096}
    return json.dumps({"model_type": kind, "vocab_size": vocabulary, "rms_norm_eps": 1e-5} | sizes)


@pytest.mark.parametrize(
    ("form", "batch", "sequence", "measured"),
    [
        (("llama", 12, 4096, 11008, 32, 1, 50304), 8, 2048, (407.6, 276.7, 285.2)),
        (("llama", 3, 4096, 11008, 64, 8, 32000), 2, 1024, (19.6, 16.9, 17.5)),
        (("gpt2", 16, 4096, 16384, 64, 64, 128256), 8, 1024, (340.3, 237.1, 242.0)),
        (("llama", 17, 3072, 8192, 48, 2, 50304), 4, 4096, (376.1, 272.3, 282.1)),
        (("gpt2", 10, 768, 3072, 12, 12, 50304), 2, 4096, (18.2, 17.7, 18.6)),
    ],
)
def test_models_drawn_after_the_rates_are_within_a_tenth(form, batch, sequence, measured):
    """Those of docs/performance.md, whose times the rates do not follow."""
    fields = {"model_config": form_of(*form), "batch_size": batch, "seq_len": sequence}
    sizes = sizes_of(preset_config("tiny", "none", **fields))
    for recipe, ms in zip(("none", "delayed", "current"), measured, strict=True):
        assert sum(predict_step(sizes, recipe, "h200").values()) == pytest.approx(ms, rel=0.1), recipe


def test_what_is_predicted_grows_with_the_work():
    def total(recipe="none", **fields):
        return sum(predict_step(sizes_of(preset_config("gpt-1.3b", "none", **fields)), recipe, "h200").values())

    assert total(num_layers=12) < total() < total(seq_len=8192) / 4  # attention alone grows faster than the tokens
    assert total("delayed") < total("current") < total("block") < total()


def test_a_layer_that_runs_at_all_depths_computes_as_several_and_is_updated_once():
    sizes = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 8}

    def predicted(**depths):
        config = TransformerConfig(**sizes, **depths)
        return predict_step(Sizes(config=config, vocabulary=512, batch=8, sequence=1024), "none", "h200")

    none, one, own, repeated = (
        predicted(**depths)
        for depths in (
            {},
            {"mtp_num_layers": 1},
            {"mtp_num_layers": 3},
            {"mtp_num_layers": 3, "mtp_use_repeated_layer": True},
        )
    )
    assert repeated["GEMM"] == own["GEMM"] == pytest.approx(none["GEMM"] + 3 * (one["GEMM"] - none["GEMM"]))
    assert repeated["optimizer"] == one["optimizer"] < own["optimizer"]


def test_doctor_shows_what_pays(capsys):
    assert main(["doctor", "--gpu", "h200", "--preset", "gpt-1.3b", "--recipes", "none", "delayed"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^speed over none +1\.00 +1\.[34]\d$", out, re.MULTILINE), out
    assert "gains nothing" not in out
    # Launches take longer than the kernels.
    assert main(["doctor", "--gpu", "h200", "--preset", "tiny"]) == 0
    assert "delayed gains nothing here: GEMMs save 0.0 ms, and the time to launch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--preset", "tiny"], "--preset has no effect without --gpu"),
        (["--gpu", "h200"], "give --preset or --model-config"),
        (["--gpu", "h200", "--preset", "tiny", "--model-config", f"{FORMS}/gpt_oss_3b.json"], "and not both"),
        (["--gpu", "h200", "--model-config", f"{FORMS}/gpt_oss_3b.json", "--vocab-size", "9"], "leave --vocab-size"),
    ],
)
def test_options_that_do_not_go_together(capsys, argv, words):
    assert_refused(main(["doctor", *argv]), capsys.readouterr().err, words)


@pytest.mark.costly(
    "T5ForConditionalGeneration-command0", slow=("BertForMaskedLM-command0", "T5ForConditionalGeneration-command1")
)
@pytest.mark.parametrize("command", [["doctor", "--gpu", "h200"], ["bench", "model"]])
@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BertForMaskedLM"])
def test_other_models_than_decoders_are_refused(name, command, tmp_path, capsys):
    path = family_folder(name, tmp_path) / "config.json"
    status = main([*command, "--model-config", str(path)])
    assert_refused(status, capsys.readouterr().err, f"jax-te {' '.join(command[:2])} is for decoders")


def test_a_vocabulary_below_that_of_bytes_is_refused_with_what_doctor_has(tmp_path, capsys):
    values = json.loads(Path(f"{FORMS}/gpt_oss_3b.json").read_text()) | {"vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(values))
    status = main(["doctor", "--gpu", "h200", "--model-config", str(tmp_path)])
    error = capsys.readouterr().err
    assert_refused(status, error, "--model-config has 100 tokens", "set vocab_size to 256")
    assert "--tokenizer" not in error
