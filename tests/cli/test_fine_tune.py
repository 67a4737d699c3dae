"""``jax-te train --init-from``: a folder of Hugging Face, fine-tuned fully or by adapters."""

import json
import math
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.checkpoint import TrainCheckpointer
from jax_te.cli import memory
from jax_te.cli.build import abstract_model_state, contexts
from jax_te.cli.main import main
from jax_te.cli.model_config import FORM
from jax_te.cli.parser import build_parser, options_from
from jax_te.cli.resolve import resolve
from jax_te.cli.run_files import read_config
from jax_te.cli.run_text import run_tokenizer
from jax_te.config import TransformerConfig
from jax_te.interop.huggingface import load_huggingface, load_peft, save_huggingface
from jax_te.layers import LoRA
from jax_te.models import GPTModel, RotaryPositions
from tests.interop.huggingface.test_mixtures import model_of
from tests.support.families import FAMILIES, family_folder
from tests.support.runs import assert_refused, records
from tests.support.tokenizers import WORDS, write_special_tokenizer, write_tokenizer

T5 = "T5ForConditionalGeneration"
STEPS = [
    "--steps",
    "6",
    "--metrics-writers",
    "jsonl",
    "--batch-size",
    "4",
    "--seq-len",
    "16",
    "--warmup-steps",
    "1",
    "--eval-batches",
    "2",
]
STEPS += ["--save-every", "3", "--learning-rate", "0.01"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of Qwen 3's form, whose head size is not hidden size / heads, with its tokenizer and a text."""
    folder = tmp_path_factory.mktemp("qwen")
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        qk_layernorm=True,
    )
    model = GPTModel(
        config,
        vocab_size=80,
        max_sequence_length=64,
        position_embedding_type=RotaryPositions(base=5e5),
        share_embeddings_and_output_weights=False,
        rngs=nnx.Rngs(3),
    )
    save_huggingface(model, folder)
    write_tokenizer(folder / "tokenizer.json")
    (folder / "text.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS, 3000)))
    return folder


def fine_tune(output, folder, *argv):
    given = ["--init-from", str(folder), "--data", str(folder / "text.txt")]
    return main(["train", "--output", str(output), *given, *STEPS, *argv])


def restored(output):
    config = read_config(output)
    assert config is not None
    with contexts(config), TrainCheckpointer(output / "checkpoints") as checkpointer:
        state, *_ = checkpointer.restore(abstract_model_state(config), allow={"unexpected"})
    return state.model


def parameters(model, kind=nnx.Param):
    return {
        "/".join(map(str, path)): np.asarray(value[...]) for path, value in nnx.to_flat_state(nnx.state(model, kind))
    }


@pytest.mark.slow
def test_full_fine_tuning_begins_with_the_folders_weights(folder, tmp_path, capsys):
    assert fine_tune(tmp_path / "run", folder, "--learning-rate", "1e-30", "--weight-decay", "0") == 0
    assert "model    " + folder.name in capsys.readouterr().out
    model, theirs = restored(tmp_path / "run"), load_huggingface(folder)
    assert model.config.kv_channels == 16
    assert model.rotary == RotaryPositions(base=5e5)
    expected = parameters(theirs)
    for name, value in parameters(model).items():  # steps this small change nothing
        np.testing.assert_array_equal(value, expected[name])
    # What the run is evaluated to is what the folder is.
    found = []
    for given in (["--output", str(tmp_path / "run")], ["--init-from", str(folder), "--seq-len", "16"]):
        assert main(["eval", *given, "--data", str(folder / "text.txt"), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "positions"), [("Qwen3", "max_position_embeddings"), (T5, "n_positions")])
def test_losses_before_and_after_are_of_the_same_windows(name, positions, folder, tmp_path, capsys):
    """With the options' defaults, for a model with more positions than they take."""
    copy = tmp_path / "folder"
    if name == T5:
        family_folder(T5, copy)
        sentinels = [f"<extra_id_{number}>" for number in reversed(range(30))]
        write_special_tokenizer(copy / "tokenizer.json", ("<pad>", "</s>", "<unk>", *sentinels), after="</s>")
    else:
        shutil.copytree(folder, copy)
    values = json.loads((copy / "config.json").read_text()) | {positions: 4096}
    (copy / "config.json").write_text(json.dumps(values))
    (copy / "text.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS, 12_000)))
    data = ["--data", str(copy / "text.txt")]
    few = ["--steps", "1", "--batch-size", "1", "--eval-batches", "1", "--metrics-writers", "jsonl"]
    unchanged = ["--learning-rate", "1e-30", "--weight-decay", "0"]
    run = str(tmp_path / "run")
    assert main(["train", "--init-from", str(copy), "--output", run, *data, *few, *unchanged]) == 0
    found = []
    for given in (["--init-from", str(copy)], ["--output", run]):
        capsys.readouterr()
        assert main(["eval", *given, *data, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    before, after = found
    assert [before["seq_len"], before["tokens"]] == [after["seq_len"], after["tokens"]]
    assert before["loss"] == pytest.approx(after["loss"], rel=1e-5)
    assert main(["eval", "--init-from", str(copy), *data]) == 0
    assert f"{before['tokens']:,} in windows of {before['seq_len']}" in capsys.readouterr().out


@pytest.mark.slow  # tests/cli/test_tokens.py has a resumed run
def test_a_fine_tuned_run_resumes_without_its_folder(folder, tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert fine_tune(whole, folder) == 0
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert fine_tune(parts, copy, "--data", str(folder / "text.txt"), "--steps", "3", "--decay-steps", "6") == 0
    for path in copy.iterdir():
        path.unlink()
    assert main(["train", "--output", str(parts), "--steps", "6"]) == 0
    losses = [[r["loss"] for r in records(path) if "loss" in r] for path in (whole, parts)]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    expected = parameters(restored(whole))
    for name, value in parameters(restored(parts)).items():
        np.testing.assert_array_equal(value, expected[name])
    capsys.readouterr()
    assert main(["sample", "--output", str(parts), "--prompt", "the cat", "--length", "9"]) == 0
    assert set(capsys.readouterr().out.split()) <= {"cat", *WORDS}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["none", pytest.param("delayed", marks=pytest.mark.slow)])
def test_lora_trains_the_adapters_alone(recipe, folder, tmp_path, capsys):
    argv = ["--lora-rank", "4", "--lora-alpha", "8", "--recipe", recipe, "--weight-decay", "0.5"]
    assert fine_tune(tmp_path / "run", folder, *argv) == 0
    assert "rank 4, alpha 8; all else is frozen" in capsys.readouterr().out
    losses = [r["loss"] for r in records(tmp_path / "run") if "loss" in r]
    assert losses[-1] < losses[0]
    model, expected = restored(tmp_path / "run"), parameters(load_huggingface(folder))
    found = parameters(model)
    adapters = parameters(model, nnx.LoRAParam)
    assert len(adapters) == 2 * 4  # of qkv, proj, and both kernels of the MLP
    for name, value in found.items():
        if name not in adapters:
            np.testing.assert_array_equal(value, expected[name.replace("base/", "")])
        elif name.endswith("lora_b"):
            assert np.abs(value).max() > 0.0
    assert isinstance(model.layers[0].self_attention.qkv, LoRA)
    assert model.layers[0].layernorm_mlp.scale == 2.0
    assert main(["eval", "--output", str(tmp_path / "run"), "--json"]) == 0
    loss = json.loads(capsys.readouterr().out)["loss"]
    assert math.isfinite(loss)
    assert loss < losses[0]
    # Back as a folder of Hugging Face: adapters merged, the tokenizer and the numbers of its tokens beside.
    back, beside = tmp_path / "back", ("generation_config.json", "tokenizer_config.json")
    for name in beside:
        (folder / name).write_text(f'{{"of": "{name}"}}')
    assert main(["convert", str(tmp_path / "run"), str(back)]) == 0
    capsys.readouterr()
    for name in beside:
        assert (back / name).read_bytes() == (folder / name).read_bytes()
        (folder / name).unlink()
    qkv, merged = model.layers[0].self_attention.qkv, load_huggingface(back)
    product = np.tensordot(np.asarray(qkv.lora_a[...]), np.asarray(qkv.lora_b[...]), 1)
    kernel = np.asarray(qkv.base.kernel[...]) + qkv.scale * product
    np.testing.assert_allclose(merged.layers[0].self_attention.qkv.kernel[...], kernel, rtol=1e-6, atol=1e-7)
    assert (back / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    fields = [json.loads((each / "config.json").read_text()) for each in (folder, back)]
    assert fields[1] == fields[0]
    # The adapters alone, in PEFT's form.
    alone, base = tmp_path / "adapters", load_huggingface(folder)
    assert main(["convert", str(tmp_path / "run"), str(alone), "--to", "peft"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{alone}: PEFT"
    values = json.loads((alone / "adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"], values["base_model_name_or_path"]) == (4, 8, str(folder))
    load_peft(base, alone)
    tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
    np.testing.assert_allclose(base(tokens), merged(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("its", [True, False])
def test_token_numbers_go_with_the_tokenizer_by_whichever_path(its, folder, tmp_path):
    other = tmp_path / "other.json"
    named = folder / "tokenizer.json"
    if not its:
        content = json.loads(named.read_text())
        other.write_text(json.dumps(content | {"added_tokens": []}, indent=3) + "\n")
        named = other
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    assert fine_tune(tmp_path / "run", folder, "--tokenizer", str(named), "--steps", "2") == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "back")]) == 0
    (folder / "config.json").write_text(json.dumps(config))
    assert json.loads((tmp_path / "back" / "config.json").read_text()).get("eos_token_id") == (7 if its else None)


@pytest.mark.slow
def test_adapters_beside_kernels_that_are_stored_quantized_are_merged_in_the_dtype_of_the_run(folder, tmp_path):
    """The masters are fp32: a folder of two dtypes is one that nothing here reads without being told which."""
    argv = ["--lora-rank", "2", "--recipe", "current", "--fp8-param", "--params-dtype", "bfloat16", "--steps", "2"]
    assert fine_tune(tmp_path / "run", folder, *argv) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    assert load_huggingface(tmp_path / "merged").config.params_dtype == jnp.bfloat16


@pytest.mark.costly
def test_adapters_alone_are_those_of_a_run(folder, tmp_path, capsys):
    status = main(["convert", str(folder), str(tmp_path / "adapters"), "--to", "peft"])
    assert_refused(
        status, capsys.readouterr().err, "--to peft writes the adapters of a run of jax-te train --lora-rank"
    )
    assert not (tmp_path / "adapters").exists()


def test_the_state_of_adapters_has_no_moments_of_the_base(folder, tmp_path):
    from jax_te.cli.build import abstract_state

    options = ["train", "--init-from", str(folder), *STEPS, "--lora-rank", "2"]
    config, _ = resolve(options_from(build_parser().parse_args(options)), tmp_path)
    with contexts(config):
        state = abstract_state(config)
    adapters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(state.model, nnx.LoRAParam)))
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) < 2 * adapters + 10
    assert config.learning_rate == 0.01


def test_defaults_of_fine_tuning(folder, tmp_path):
    def made(*argv):
        argv = ["train", "--init-from", str(folder), *argv]
        return resolve(options_from(build_parser().parse_args(argv)), tmp_path)[0]

    full, adapted = made(), made("--lora-rank", "8")
    assert (full.learning_rate, adapted.learning_rate) == (2e-5, 2e-4)
    assert (full.vocab_size, full.tokenizer, full.hidden_size, full.num_query_groups) == (80, str(folder), 32, 2)
    assert (full.seq_len, full.transformer_config().kv_channels) == (64, 16)
    assert full.transformer_config().attention_dropout == 0.0
    # Of experts; it would have no effect, and say so.
    assert "moe_router_bias_update_rate" not in adapted.library_fields()
    assert made("--dropout", "0.2", "--compute-dtype", "bfloat16").transformer_config().hidden_dropout == 0.2


def test_dropout_is_that_of_the_folder_unless_it_is_given(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "base")
    values = json.loads((folder / "config.json").read_text()) | {"attention_dropout": 0.3}
    (tmp_path / "base" / "config.json").write_text(json.dumps(values))

    def rates(*argv):
        argv = ["train", "--init-from", str(tmp_path / "base"), *argv]
        config = resolve(options_from(build_parser().parse_args(argv)), tmp_path / "run")[0].transformer_config()
        return config.attention_dropout, config.hidden_dropout

    assert rates() == (0.3, 0.0)
    assert rates("--dropout", "0") == (0.0, 0.0)


def test_a_run_keeps_the_end_of_text_of_the_folder(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "base")
    (tmp_path / "base" / "tokenizer_config.json").write_text('{"eos_token": "the"}')
    argv = ["train", "--init-from", str(tmp_path / "base")]
    config = resolve(options_from(build_parser().parse_args(argv)), tmp_path / "run")[0]
    assert config.end_of_text == "the"
    (tmp_path / "run").mkdir()
    shutil.copy(folder / "tokenizer.json", tmp_path / "run")
    assert run_tokenizer(config, tmp_path / "run").end_of_text_name == "the"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--hidden-size", "64"], "says what the model is; leave --hidden-size out"),
        (["--preset", "tiny", "--num-layers", "2"], "leave --preset, --num-layers out"),
        (["--seq-len", "65"], "--seq-len 65 is above the 64 positions"),
        (["--ignore-fields", "hidden_size"], "hidden_size cannot be ignored"),
        (["--lora-alpha", "2"], "--lora-alpha is for adapters"),
        (["--init-from", "nowhere"], "config.json is not there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_do_not_go_together(argv, text, folder, tmp_path, capsys):
    assert_refused(fine_tune(tmp_path / "run", folder, *argv), capsys.readouterr().err, text)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_does_not_fit_is_not_evaluated(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory.os, "sysconf", lambda _: 100)  # a host of 100 pages of 100 bytes
    status = main(["eval", "--init-from", str(folder), "--data", str(folder / "text.txt")])
    assert_refused(status, capsys.readouterr().err, "the sizes take at least", "--no-check-memory")


@pytest.mark.slow
def test_unknown_fields_are_ignored_by_name(folder, tmp_path, capsys):
    """In training, when the run is read again, and in evaluation."""
    noted = tmp_path / "noted"
    shutil.copytree(folder, noted)
    values = json.loads((noted / "config.json").read_text()) | {"my_note": "x"}
    (noted / "config.json").write_text(json.dumps(values))
    assert_refused(fine_tune(tmp_path / "run", noted), capsys.readouterr().err, "my_note='x'")
    few = ["--steps", "1", "--save-every", "1", "--warmup-steps", "0"]
    assert fine_tune(tmp_path / "run", noted, "--ignore-fields", "my_note", *few) == 0
    losses = []
    given = ["--init-from", str(noted), "--ignore-fields", "my_note", "--seq-len", "16"]
    for options in (["--output", str(tmp_path / "run")], given):
        capsys.readouterr()
        assert main(["eval", *options, "--data", str(folder / "text.txt"), "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert all(map(math.isfinite, losses))
    status = main(["eval", "--output", str(tmp_path / "run"), "--ignore-fields", "my_note"])
    assert_refused(status, capsys.readouterr().err, "--ignore-fields has no effect without --init-from")
    status = main(["train", "--output", str(tmp_path / "other"), "--ignore-fields", "my_note"])
    assert_refused(status, capsys.readouterr().err, "--ignore-fields is for the config.json of --init-from")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A model of DeepSeek-V3's form: latent attention, experts with biases, a layer of multi-token prediction."""
    folder = tmp_path_factory.mktemp("deepseek")
    save_huggingface(model_of("DeepseekV3ForCausalLM"), folder)
    write_tokenizer(folder / "tokenizer.json")
    (folder / "text.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS, 3000)))
    return folder


@pytest.mark.slow
def test_a_mixture_is_trained_and_written_for_transformers(mixture, tmp_path, capsys):
    assert fine_tune(tmp_path / "run", mixture) == 0
    metrics = [r for r in records(tmp_path / "run") if "loss" in r]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert "mtp_1_loss" in metrics[0]
    model, before = restored(tmp_path / "run"), load_huggingface(mixture)
    assert np.abs(model.layers[1].mlp.router.expert_bias[...] - before.layers[1].mlp.router.expert_bias[...]).max() > 0
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "huggingface"]) == 0
    back, expected = parameters(load_huggingface(tmp_path / "hf")), parameters(model)
    assert back.keys() == expected.keys()
    for name, value in back.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.slow
def test_adapters_of_a_mixture_are_those_of_experts_too(mixture, tmp_path, capsys):
    assert fine_tune(tmp_path / "run", mixture, "--lora-rank", "4") == 0
    losses = [r["loss"] for r in records(tmp_path / "run") if "loss" in r]
    assert losses[-1] < losses[0]
    model, before = restored(tmp_path / "run"), load_huggingface(mixture)
    found, expected = parameters(model), parameters(before)
    adapters = parameters(model, nnx.LoRAParam)
    # Four projections of attention in each layer; a feed-forward block; experts and shared experts.
    assert len(adapters) == 2 * (2 * 4 + 2 + 4)
    assert adapters["layers/1/mlp/experts/linear_fc1/lora_a"].shape == (4, 32, 4)
    for name, value in found.items():
        if name not in adapters:
            np.testing.assert_array_equal(value, expected[name.replace("base/", "")], err_msg=name)
    routers = [each.layers[1].mlp.router.expert_bias[...] for each in (model, before)]
    np.testing.assert_array_equal(*routers)
    capsys.readouterr()
    assert main(["sample", "--output", str(tmp_path / "run"), "--prompt", "the cat", "--length", "9"]) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "huggingface"]) == 0
    merged = parameters(load_huggingface(tmp_path / "hf"))
    assert merged.keys() == expected.keys()
    changed = {name for name in merged if not np.array_equal(merged[name], expected[name])}
    assert len(changed) == 2 * 4 + 2 + 4


OF_RUNS = ("none", "delayed", "current", "block", "mxfp8", "nvfp4")
WAYS = [
    (name, way, OF_RUNS[(row + 3 * column) % len(OF_RUNS)])
    for row, name in enumerate(FAMILIES)
    for column, way in enumerate(("full", "lora"))
]
"""Each family fully and by adapters, each way under each recipe."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way", "recipe"), WAYS, ids=["-".join(case) for case in WAYS])
def test_each_family_is_fine_tuned(name, way, recipe, tmp_path, capsys):
    folder = family_folder(name, tmp_path / "folder")
    adapters = ["--lora-rank", "4"] if way == "lora" else []
    few = ["--steps", "4", "--save-every", "4", "--seq-len", "32", "--recipe", recipe]
    assert fine_tune(tmp_path / "run", folder, *few, *adapters) == 0
    losses = [r["loss"] for r in records(tmp_path / "run") if "loss" in r]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "back"), "--to", "huggingface"]) == 0
    fields = [json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "back")]
    assert fields[0] == fields[1]
    before, after = (parameters(load_huggingface(each)) for each in (folder, tmp_path / "back"))
    changed = {path for path, value in after.items() if not np.array_equal(value, before[path])}
    if way == "full":
        # Experts that no token chose, and learned sinks of few heads, may be as they were; no kernel is as a whole.
        assert {path for path in before if path.endswith("kernel") and not path.startswith("mtp/")} <= changed
    else:  # linear layers of the model's layers alone, with the adapters added
        assert changed
        layers = re.compile(r"((en|de)coder_)?layers/.*kernel")
        assert all(layers.fullmatch(path) and "router" not in path for path in changed)


def test_adapters_need_weights_to_adapt(tmp_path, capsys):
    status = main(["train", "--output", str(tmp_path / "run"), "--lora-rank", "4"])
    assert_refused(status, capsys.readouterr().err, "--lora-rank adapts weights that are trained already")


def test_a_tokenizer_with_more_tokens_than_the_model_knows(folder, tmp_path, capsys):
    write_tokenizer(tmp_path / "tokenizer.json", [f"w{i}" for i in range(200)])
    status = fine_tune(tmp_path / "run", folder, "--tokenizer", str(tmp_path))
    assert_refused(status, capsys.readouterr().err, "has 202 tokens, and the model's config.json 80")


def test_only_forms_are_left_to_the_folder():
    assert FORM.keys() == {
        *("num_layers", "hidden_size", "num_heads", "num_query_groups", "ffn_hidden_size", "normalization"),
        *("activation", "position_embedding", "bias", "tie_embeddings", "kv_channels", "qk_layernorm"),
        *("num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_score_function"),
        *("moe_router_pre_softmax", "moe_router_load_balancing_type", "moe_router_enable_expert_bias"),
        *("moe_expert_capacity_factor", "moe_shared_expert_intermediate_size"),
    }
