"""``--model-config``: a model in a published form, trained from new weights and measured."""

import json
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from jax_te.bench.megatron import check_same_form, megatron_model
from jax_te.cli.bench.preset_config import preset_config, sizes_of
from jax_te.cli.build import build_model
from jax_te.cli.main import main
from jax_te.cli.model_config import described_form, read_model_config
from jax_te.cli.parser import build_parser, options_from
from jax_te.cli.resolve import output_folder, resolve
from jax_te.cli.run_files import read_config
from jax_te.config import TransformerConfig
from tests.support.families import FAMILIES
from tests.support.runs import TEXT, assert_refused, records

STEPS = [*("--steps", "4", "--batch-size", "4", "--seq-len", "16", "--warmup-steps", "1", "--eval-batches", "1")]
STEPS += [*("--log-every", "1", "--metrics-writers", "jsonl", "--data", TEXT)]


def write_config(folder, name, **fields):
    """Write the ``config.json`` of a small model of a class, and return its path."""
    model_type, values = FAMILIES[name]
    path = folder / "config.json"
    first = {"architectures": [name], "model_type": model_type}
    path.write_text(json.dumps(first | values | fields))
    return path


def resolved(folder, *argv):
    return resolve(options_from(build_parser().parse_args(["train", *map(str, argv)])), folder / "run")[0]


@pytest.mark.slow
def test_a_form_is_trained_from_new_weights_and_resumed_without_its_file(tmp_path, capsys):
    path = write_config(tmp_path, "DeepseekV3ForCausalLM", vocab_size=256)
    run = tmp_path / "run"
    assert main(["train", "--model-config", str(path), "--output", str(run), *STEPS, "--save-every", "2"]) == 0
    assert "model    deepseek_v3: " in capsys.readouterr().out
    first = [record for record in records(run) if "loss" in record]
    assert first[-1]["loss"] < first[0]["loss"]
    assert "mtp_1_loss" in first[0]
    path.unlink()
    assert main(["train", "--output", str(run), "--steps", "5"]) == 0
    assert len([record for record in records(run) if "loss" in record]) == 5
    saved = read_config(run)
    assert saved is not None
    assert saved.init_from is None


@pytest.mark.slow
def test_weights_follow_from_the_seed_of_the_run(tmp_path):
    path = write_config(tmp_path, "GptOssForCausalLM", vocab_size=256)
    config = resolved(tmp_path, "--model-config", path)

    def weights(seed):
        model = build_model(config)(nnx.Rngs(seed))
        return np.asarray(model.embedding.embedding[...])

    np.testing.assert_array_equal(weights(1), weights(1))
    assert not np.array_equal(weights(1), weights(2))


def test_defaults_of_new_weights(tmp_path):
    path = write_config(tmp_path, "LlamaForCausalLM", vocab_size=300)
    config = resolved(tmp_path, "--model-config", path.parent)  # a folder is as good as the file
    assert (config.learning_rate, config.tokenizer, config.vocab_size, config.seq_len) == (3e-4, None, 300, 64)
    assert config == resolved(tmp_path, "--model-config", path)


@pytest.mark.parametrize(
    ("path", "name"),
    [("forms/small.json", "small"), ("forms/small/config.json", "small"), ("forms/small-1.5", "small-1.5")],
)
def test_a_run_is_named_after_its_model(path, name):
    given = ["train", "--model-config", path, "--recipe", "current"]
    assert output_folder(options_from(build_parser().parse_args(given))) == Path("runs") / f"{name}-current"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--hidden-size", "64"], "--model-config says what the model is; leave --hidden-size out"),
        (["--preset", "tiny"], "leave --preset out"),
        (["--init-from", "there"], "--init-from and --model-config each say what the model is"),
        (["--lora-rank", "4"], "--lora-rank adapts weights that are trained already"),
        (["--seq-len", "65"], "--seq-len 65 is above the 64 positions"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_do_not_go_together(argv, text, tmp_path, capsys):
    path = write_config(tmp_path, "LlamaForCausalLM", vocab_size=256)
    run = tmp_path / "run"
    status = main(["train", "--model-config", str(path), "--output", str(run), *STEPS, *argv])
    assert_refused(status, capsys.readouterr().err, text)
    assert not run.exists()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"vocab_size": 96}, "has 96 tokens (vocab_size), and bytes are 256"),
        ({"quantization_config": {"quant_method": "fp8"}}, "kernels are quantized"),
    ],
)
def test_files_that_cannot_be_trained(values, text, tmp_path, capsys):
    path = write_config(tmp_path, "LlamaForCausalLM", **values)
    status = main(["train", "--model-config", str(path), "--output", str(tmp_path / "run"), *STEPS])
    assert_refused(status, capsys.readouterr().err, text)


def described(tmp_path, name, **fields):
    text = read_model_config(str(write_config(tmp_path, name, **fields)))
    return preset_config("tiny", "none", model_config=text, batch_size=2, seq_len=16)


def test_latent_attention_in_megatrons_words(tmp_path):
    config = described(tmp_path, "DeepseekV3ForCausalLM", vocab_size=256)
    made = megatron_model(sizes_of(config), None)
    expected = {"multi_latent_attention": True, "q_lora_rank": 32, "v_head_dim": 32, "mtp_num_layers": 1}
    expected |= {"moe_router_score_function": "sigmoid", "moe_router_num_groups": 4, "moe_router_group_topk": 2}
    assert expected.items() <= made["config"].items()
    assert made["form"]["position_embedding_type"] == "rope"


def test_gpt_oss_in_megatrons_words(tmp_path):
    made = megatron_model(sizes_of(described(tmp_path, "GptOssForCausalLM", vocab_size=256, swiglu_limit=7.0)), None)
    expected = {"softmax_type": "learnable", "gated_linear_unit": True, "activation_func_clamp_value": 7.0}
    # TEGroupedMLP with biases refuses the fusion.
    expected |= {"glu_linear_offset": 1.0, "bias_dropout_fusion": False, "add_bias_linear": True}
    assert expected.items() <= made["config"].items()
    assert made["activation"] == "quick_gelu"


@pytest.mark.parametrize("fields", [{"logit_softcap": 30.0}, {"activation": "relu"}], ids=str)
def test_layers_that_megatron_is_not_told_of_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields)) if "activation" not in fields else "relu"):
        check_same_form(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **fields))


@pytest.mark.parametrize("path", sorted(Path("examples/model_configs").iterdir()), ids=lambda path: path.stem)
def test_the_files_beside_the_examples_are_read(path):
    described_form(path.read_text())


@pytest.mark.slow
def test_a_form_is_measured(tmp_path, capsys):
    path = write_config(tmp_path, "GptOssForCausalLM", vocab_size=256)
    sizes = ["--model-config", str(path), "--seq-len", "16", "--batch-size", "2", "--recipes", "none"]
    assert main(["bench", "model", *sizes, "--rounds", "1", "--calls", "1"]) == 0
    row = next(json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    assert row["ms"] > 0.0
    status = main(["bench", "model", *sizes, "--vocab-size", "512"])
    assert_refused(status, capsys.readouterr().err, "--model-config says what the model is; leave --vocab-size out")


def test_a_bench_has_no_dropout_whatever_the_file_says():
    text = json.dumps(
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 1, "n_head": 2}
        | {"n_positions": 64, "vocab_size": 256}
    )
    config = preset_config("tiny", "none", model_config=text, batch_size=2, seq_len=16).transformer_config()
    assert (config.attention_dropout, config.hidden_dropout) == (0.0, 0.0)
