"""Runs over the tokens of a tokenizer: training, resuming, sampling, evaluation."""

import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.checkpoint import TrainCheckpointer
from jax_te.cli.build import abstract_model_state, contexts
from jax_te.cli.main import main
from jax_te.cli.run_files import CONFIG_FILE, read_config
from jax_te.cli.run_text import keep_tokenizer, run_tokenizer
from jax_te.data import Tokenizer
from jax_te.models import GPTModel
from tests.support.runs import MICRO, assert_refused, configured, records
from tests.support.tokenizers import WORDS, write_tokenizer


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A folder with a tokenizer and with JSON lines to train on."""
    folder = tmp_path_factory.mktemp("words")
    write_tokenizer(folder / "tokenizer.json")
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": " ".join(rng.choice(WORDS, 30))}) for _ in range(100)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def run(words, tmp_path_factory):
    """The folder of a run over words, whose tokenizer is gone from where it was."""
    output = tmp_path_factory.mktemp("runs") / "run"
    moved = shutil.copy(words / "tokenizer.json", words / "moved.json")
    argv = [*MICRO, "--data", str(words / "text.jsonl"), "--tokenizer", str(moved), "--keep", "1", "--keep-every", "8"]
    assert main(["train", "--output", str(output), *argv]) == 0
    (words / "moved.json").unlink()
    return output


@pytest.mark.slow
def test_a_run_records_its_tokenizer_and_keeps_a_copy(run, words):
    config = read_config(run)
    assert config is not None
    tokenizer = Tokenizer(words)
    assert (run / "tokenizer.json").read_bytes() == (words / "tokenizer.json").read_bytes()
    assert config.tokenizer_sha256 == tokenizer.sha256
    assert config.tokenizer == str(words / "moved.json")
    assert config.vocab_size == 128  # Megatron's multiple
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"8", "12"}
    assert records(run)[-1]["heldout_loss"] < math.log(128)


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_tokenizer_alone(run, words, tmp_path, capsys):
    output = shutil.copytree(run, tmp_path / "run")
    other = write_tokenizer(tmp_path / "other.json", WORDS[:-1])
    status = main(["train", "--output", str(output), "--steps", "14", "--tokenizer", str(other)])
    assert_refused(status, capsys.readouterr().err, f"--tokenizer is {words / 'moved.json'} (SHA", str(other))
    (output / "tokenizer.json").write_bytes(other.read_bytes())
    status = main(["train", "--output", str(output), "--steps", "14"])
    assert_refused(status, capsys.readouterr().err, "the tokenizer of the run in", "is neither there nor in")
    (output / "tokenizer.json").unlink()
    # The same tokenizer at another place.
    assert main(["train", "--output", str(output), "--steps", "14", "--tokenizer", str(words)]) == 0
    assert [record["step"] for record in records(output)][-1] == 14
    assert (output / "tokenizer.json").exists()


@pytest.mark.costly
def test_a_run_over_bytes_takes_no_tokenizer_later(trained, words, capsys):
    status = main(["train", "--output", str(trained), "--tokenizer", str(words)])
    assert_refused(status, capsys.readouterr().err, "--tokenizer is none, for bytes there, ", str(words))


@pytest.mark.costly
def test_samples_are_words(run, capsys):
    assert main(["sample", "--output", str(run), "--prompt", "def self", "--length", "20"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("def self ")
    assert set(text.split()) <= set(WORDS)
    assert_refused(main(["sample", "--output", str(run), "--prompt", ""]), capsys.readouterr().err, "--prompt is empty")


def mean_loss(model, tokens, length):
    """By logits in float64: of windows of ``length`` tokens, one by one."""
    losses, call = [], jax.jit(lambda model, tokens: model(tokens))
    for start in range(0, len(tokens) - 1, length):
        window = tokens[start : start + length + 1].astype(np.int32)
        logits = np.asarray(call(model, jnp.asarray(window[None, :-1])), np.float64)[0]
        likely = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        losses += (-likely[np.arange(len(window) - 1), window[1:]]).tolist()
    return np.mean(losses)


@pytest.mark.costly
def test_eval_is_the_mean_over_all_tokens(run, words, tmp_path, capsys):
    text = "the cat is a self . " * 20
    (tmp_path / "text").write_text(text)
    argv = ["eval", "--output", str(run), "--step", "8", "--data", str(tmp_path / "text"), "--json"]
    assert main([*argv, "--batch-size", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    tokens = np.append(Tokenizer(words).encode(text), 1)
    assert (found["tokens"], found["step"], found["unit"]) == (120, 8, "token")
    config = read_config(run)
    assert config is not None
    with contexts(config), TrainCheckpointer(run / "checkpoints") as checkpointer:
        state, *_ = checkpointer.restore(abstract_model_state(config), step=8, allow={"unexpected"})
        assert isinstance(state.model, GPTModel)
        assert found["loss"] == pytest.approx(mean_loss(state.model, tokens, 32), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2) * 121 / len(text))


@pytest.mark.slow
def test_eval_of_the_held_out_text_in_words(run, capsys):
    assert main(["eval", "--output", str(run)]) == 0
    said = capsys.readouterr()
    assert "step 12, on the held-out part of" in said.err
    assert [line.split()[0] for line in said.out.splitlines()] == ["loss", "perplexity", "tokens", "bits"]
    assert "nats per token" in said.out


def test_eval_of_bytes(trained, tmp_path, capsys):
    (tmp_path / "text").write_bytes(b"def f(x):\n    return x\n" * 5)
    argv = ["--data", str(tmp_path / "text"), "--json", "--batch-size", "2000000000"]
    assert main(["eval", "--output", str(trained), *argv]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["unit"]) == (114, "byte")
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))


@pytest.mark.costly("--seq-len 2000000000-")
@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--step", "7"], "there is no checkpoint of step 7"),
        (["--tokenizer", "x"], "--tokenizer has no effect without --init-from"),
        (["--init-from", "x"], "--init-from names no run"),
        (["--seq-len", "64"], "--seq-len 64 is above the model's 32 positions"),
        (["--seq-len", "2000000000"], "is above the model's 32 positions"),
        (["--init-from", "x", "--step", "3"], "--step has no effect without a run"),
        (["--output", "nowhere"], "holds no trained model"),
        (["--data", "nowhere"], "no such file or folder of text"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_evals_that_cannot_be(argv, text, trained, capsys):
    output = [] if {"--init-from", "--output"} & {*argv} else ["--output", str(trained)]
    assert_refused(main(["eval", *output, *argv]), capsys.readouterr().err, text)


@pytest.mark.costly("")
@pytest.mark.parametrize("text", ["", "x"])
def test_an_eval_of_a_text_without_two_tokens(text, trained, tmp_path, capsys):
    (tmp_path / "text").write_text(text)
    status = main(["eval", "--output", str(trained), "--data", str(tmp_path / "text")])
    error = capsys.readouterr().err.splitlines()[-1] + "\n"
    assert_refused(status, error, f"a text of {len(text)} tokens", "at least 2")
    assert "batch_size" not in error
    assert "seq_len" not in error


@pytest.mark.parametrize("place", [1000, 1990], ids=["train", "heldout"])
def test_a_token_beyond_the_vocabulary_is_found_before_the_run_begins(place, tmp_path, capsys):
    tokens = np.zeros(2000, np.uint16)
    tokens[place] = 300
    np.save(tmp_path / "t.npy", tokens)
    status = main(["train", *MICRO, "--output", str(tmp_path / "run"), "--data", str(tmp_path / "t.npy")])
    assert_refused(status, capsys.readouterr().err, "the data have the token 300", "give the tokenizer")
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != ".lock"]


def test_a_run_that_saved_nothing_gives_way_to_one_with_another_tokenizer(words, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((words / "tokenizer.json").read_bytes())
    other = write_tokenizer(tmp_path / "other.json", WORDS[:-1])
    config = configured(tmp_path, *MICRO, "--tokenizer", str(other))
    tokenizer = run_tokenizer(config, tmp_path)
    assert tokenizer.vocab_size == len(WORDS) + 1
    keep_tokenizer(tokenizer, tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == other.read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_an_option_that_is_no_tokenizer(tmp_path, capsys):
    (tmp_path / "tokenizer.json").write_text("{")
    status = main(["train", *MICRO, "--output", str(tmp_path / "run"), "--tokenizer", str(tmp_path)])
    assert_refused(status, capsys.readouterr().err, "tokenizer.json is not a tokenizer")
    assert not (tmp_path / "run" / CONFIG_FILE).exists()
