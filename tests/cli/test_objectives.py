"""Encoders and T5s in the commands: masked tokens and corrupted spans, from training to a folder of transformers."""

import json

import jax
import numpy as np
import pytest

from jax_te.checkpoint import TrainCheckpointer
from jax_te.cli.build import Trainer, abstract_model, contexts
from jax_te.cli.main import main
from jax_te.cli.objective import run_objective
from jax_te.cli.parser import build_parser, options_from
from jax_te.cli.resolve import resolve
from jax_te.cli.run_files import read_config
from jax_te.cli.run_text import run_text, run_tokenizer
from jax_te.data import CorruptedSpans, MaskedTokens, TextData, TrainBatches, heldout_batches
from jax_te.interop.huggingface import load_huggingface, save_huggingface
from tests.support.families import family_folder, family_model
from tests.support.runs import assert_refused, records
from tests.support.tokenizers import WORDS, write_tokenizer

STEPS = ["--metrics-writers", "jsonl", "--batch-size", "4", "--seq-len", "16", "--warmup-steps", "1"]
STEPS += ["--eval-batches", "2", "--save-every", "2", "--learning-rate", "0.01", "--steps", "4", "--decay-steps", "4"]
T5, BERT = "T5ForConditionalGeneration", "BertForMaskedLM"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each of both kinds, made once."""
    return {name: family_folder(name, tmp_path_factory.mktemp("folder") / name) for name in (T5, BERT)}


def train(output, folder, *argv):
    given = ["--init-from", str(folder), "--data", str(folder / "text.txt")]
    return main(["train", "--output", str(output), *given, *STEPS, *argv])


def losses(output):
    return [record["loss"] for record in records(output) if "loss" in record]


def first_loss(output, folder):
    """The loss of a run's first batch by the folder's weights."""
    config = read_config(output)
    assert config is not None
    tokenizer = run_tokenizer(config, output)
    objective = run_objective(config, tokenizer)
    text = run_text(config, tokenizer, objective, remedy="")
    batches = TrainBatches(text.train, batch_size=4, seq_len=16, seed=config.seed, objective=objective)
    batch = jax.device_put(next(batches))
    model = load_huggingface(folder)
    model.eval()
    if isinstance(objective, CorruptedSpans):
        return model.loss(batch["tokens"], batch["decoder_tokens"], batch["labels"])
    assert isinstance(objective, MaskedTokens)
    return model.loss(batch["tokens"], batch["labels"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [T5, BERT])
def test_a_run_starts_stops_resumes_and_is_written(name, folders, tmp_path, capsys):
    folder, whole, parts = folders[name], tmp_path / "whole", tmp_path / "parts"
    assert train(whole, folder) == 0
    shown = capsys.readouterr().out
    assert ("corrupted spans" if name == T5 else "masked tokens") in shown
    assert f"jax-te convert {whole}" in shown
    found = losses(whole)
    assert found[0] == pytest.approx(float(first_loss(whole, folder)), rel=1e-5)
    assert found[-1] < found[0]
    # Killed and resumed: the same numbers, bit by bit.
    assert train(parts, folder, "--steps", "2") == 0
    assert main(["train", "--output", str(parts), "--steps", "4"]) == 0
    assert losses(parts) == found
    # Evaluated as a run and as a folder.
    assert main(["convert", str(whole), str(tmp_path / "back")]) == 0
    fields = [json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "back")]
    assert fields[0] == fields[1]
    evaluated, data = [], ["--data", str(folder / "text.txt"), "--json"]
    for given in (["--output", str(whole)], ["--init-from", str(tmp_path / "back"), "--seq-len", "16"]):
        capsys.readouterr()
        assert main(["eval", *given, *data]) == 0
        evaluated.append(json.loads(capsys.readouterr().out))
    assert evaluated[0]["unit"] == ("target token" if name == T5 else "masked token")
    assert evaluated[0]["bits_per_byte"] is None
    assert evaluated[0]["tokens"] == evaluated[1]["tokens"]
    assert evaluated[0]["loss"] == pytest.approx(evaluated[1]["loss"], rel=1e-5)
    status = main(["sample", "--output", str(whole)])
    assert_refused(status, capsys.readouterr().err, "jax-te sample continues texts", "jax-te convert")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(
            T5, ["--mesh", "data=2,context=2,tensor=2", "--cp-comm-type", "all_gather"], marks=pytest.mark.slow
        ),
        (BERT, ["--mesh", "fsdp=2,context=2,tensor=2", "--sequence-parallel"]),
    ],
)
def test_a_mesh_sees_the_same_batches(name, mesh, folders, tmp_path):
    # 12 tokens leave a T5's decoder 4, which two ranks share.
    given = ["--seq-len", "12", "--steps", "2", "--decay-steps", "2"]
    assert train(tmp_path / "one", folders[name], *given) == 0
    assert train(tmp_path / "mesh", folders[name], *given, *mesh) == 0
    # fp32: sums over devices in another order.
    np.testing.assert_allclose(losses(tmp_path / "mesh"), losses(tmp_path / "one"), rtol=1e-5)


@pytest.mark.costly(
    "T5ForConditionalGeneration-argv0---seq-len 16 leaves the decoder 5 tokens, which is not divisible by context=2",
    slow=("T5ForConditionalGeneration-argv1---seq-len 2: seq_len 2 has no place for a token",),
)
@pytest.mark.parametrize(
    ("name", "argv", "message"),
    [
        (
            T5,
            ["--mesh", "context=2", "--cp-comm-type", "a2a"],
            "--seq-len 16 leaves the decoder 5 tokens, which is not divisible by context=2",
        ),
        (T5, ["--seq-len", "2"], "--seq-len 2: seq_len 2 has no place for a token"),
        (BERT, ["--seq-len", "2"], "--seq-len 2: seq_len 2 leaves no token of text"),
        (T5, ["--mesh", "context=2", "--cp-load-balanced"], "the model has an encoder"),
        (T5, ["--mesh", "context=2", "--seq-len", "12"], "--cp-comm-type p2p moves keys around a ring"),
        (BERT, ["--position-embedding", "rope"], "leave --position-embedding out"),
    ],
)
def test_options_that_an_objective_cannot_follow(name, argv, message, folders, tmp_path, capsys):
    assert_refused(train(tmp_path / "run", folders[name], *argv), capsys.readouterr().err, message)
    assert not (tmp_path / "run").exists()


def test_a_text_without_a_held_out_window_is_refused_before_the_run(folders, tmp_path, capsys):
    """An example of a T5 takes 70 tokens of text for 64, and 67 of these are held out."""
    (tmp_path / "text.txt").write_text(" ".join(np.random.default_rng(0).choice(WORDS, 1340)))
    status = train(tmp_path / "run", folders[T5], "--data", str(tmp_path / "text.txt"), "--seq-len", "64")
    assert_refused(status, capsys.readouterr().err, "has 1341 tokens", "seq_len 64 needs at least 1400")
    assert not (tmp_path / "run").exists()


@pytest.mark.costly(
    "eval-BertForMaskedLM-has no mask token, [MASK] or <mask>",
    "eval-T5ForConditionalGeneration-has no sentinels, <extra_id_0>",
)
@pytest.mark.parametrize(
    ("name", "message"), [(T5, "has no sentinels, <extra_id_0>"), (BERT, "has no mask token, [MASK] or <mask>")]
)
@pytest.mark.parametrize("command", ["train", "eval"])
def test_tokenizers_that_lack_what_is_needed(name, message, command, folders, tmp_path, capsys):
    write_tokenizer(tmp_path / "tokenizer.json")
    given = ["--init-from", str(folders[name]), "--data", str(folders[name] / "text.txt")]
    status = main([command, *given, "--tokenizer", str(tmp_path)])
    assert_refused(status, capsys.readouterr().err, message)


@pytest.mark.parametrize(("name", "message"), [(T5, "bytes have no sentinels"), (BERT, "bytes have no mask token")])
def test_bytes_lack_what_is_needed(name, message, folders, tmp_path, capsys):
    """In a model with new weights and rows enough for them."""
    values = json.loads((folders[name] / "config.json").read_text()) | {"vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(values))
    status = main(["train", "--model-config", str(tmp_path), "--output", str(tmp_path / "run"), "--seq-len", "32"])
    assert_refused(status, capsys.readouterr().err, message, "give its --tokenizer")


@pytest.mark.slow
def test_microbatches_and_heldout_batches_are_weighted_by_their_labels(folders, tmp_path):
    """The first half of the text is unknown words, whose windows have no labels."""
    argv = ["train", "--init-from", str(folders[BERT]), *STEPS, "--microbatches", "2"]
    config, _ = resolve(options_from(build_parser().parse_args(argv)), tmp_path / "run")
    objective = run_objective(config, run_tokenizer(config, tmp_path / "run"))
    unknown, known = np.ones(200, np.uint8), np.arange(200, dtype=np.uint8) % 15 + 5
    text = np.concatenate([unknown, known])
    data = TextData(train=text, heldout=text, source="text", files=1, vocab_size=22)
    sizes = {"seq_len": 16, "objective": objective}
    # As one batch; an example is the same in batches of any size.
    windows = jax.device_put(next(heldout_batches(text, batch_size=8, num_batches=1, **sizes)))
    batch = jax.device_put(next(heldout_batches(text, batch_size=4, num_batches=1, **sizes)))
    assert not (batch["labels"][:2] >= 0).any()
    with contexts(config), TrainCheckpointer(tmp_path / "checkpoints") as checkpointer:
        trainer = Trainer(config, data, checkpointer, objective)
        state, _ = trainer.create()
        assert trainer.evaluate(state) == pytest.approx(float(mean_loss(state.model, windows)), rel=1e-5)
        expected = float(mean_loss(state.model, batch))
        _, metrics = trainer.step(state, batch)
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-5)  # without dropout, see `family_folder`


def mean_loss(model, batch):
    model.eval()
    return model.loss(batch["tokens"], batch["labels"])


def test_a_text_of_unknown_words_alone_is_not_evaluated(folders, tmp_path, capsys):
    """They are special, and none of them is masked."""
    (tmp_path / "text.txt").write_text("zzz " * 40)
    status = main(["eval", "--init-from", str(folders[BERT]), "--data", str(tmp_path / "text.txt"), "--seq-len", "16"])
    assert_refused(status, capsys.readouterr().err, "text.txt has no token to predict", "Give another --data")


def test_a_tokenizer_of_another_form(folders, tmp_path, capsys):
    """T5's own, without a ``tokenizer.json``."""
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folders[T5] / file).read_bytes())
    (tmp_path / "spiece.model").write_bytes(b"")
    status = main(["train", "--init-from", str(tmp_path), "--output", str(tmp_path / "run")])
    assert_refused(status, capsys.readouterr().err, "spiece.model beside it is not read", "AutoTokenizer")


def test_encoders_without_a_head_are_refused(tmp_path, capsys):
    model = family_model(BERT)
    save_huggingface(model, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertModel"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    status = main(["train", "--init-from", str(tmp_path), "--output", str(tmp_path / "run")])
    assert_refused(status, capsys.readouterr().err, "bert without a head for tokens", "BertForMaskedLM")


def test_positions_of_t5_are_no_option(tmp_path, capsys):
    status = main(["train", "--position-embedding", "relative", "--output", str(tmp_path / "run")])
    assert_refused(status, capsys.readouterr().err, "--position-embedding relative is that of a T5")


@pytest.mark.costly("MT5ForConditionalGeneration-False")
@pytest.mark.parametrize(("name", "tied"), [(T5, True), ("MT5ForConditionalGeneration", False)])
def test_the_head_is_the_one_among_the_tensors(name, tied, tmp_path):
    """Whatever ``tie_word_embeddings`` is, as in transformers."""
    folder = family_folder(name, tmp_path)
    path = folder / "config.json"
    other = {"tie_word_embeddings": not tied}
    path.write_text(json.dumps(json.loads(path.read_text()) | other))
    argv = ["train", "--init-from", str(folder), *STEPS]
    config, _ = resolve(options_from(build_parser().parse_args(argv)), tmp_path / "run")
    assert config.tie_embeddings is tied
    with contexts(config):
        assert (abstract_model(config).output_kernel is None) is tied
    assert (load_huggingface(folder).output_kernel is None) is tied
