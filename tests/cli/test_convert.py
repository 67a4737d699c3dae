"""jax-te convert, and jax-te inspect checkpoint."""

import json
import pickle
import shutil
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.cli.main import main
from jax_te.config import TransformerConfig
from jax_te.data import Tokenizer
from jax_te.interop.huggingface import load_huggingface, save_huggingface, save_peft
from jax_te.interop.megatron import load_megatron, read_megatron
from jax_te.interop.torch import read_torch_file, write_torch_file
from jax_te.layers import LoRA
from jax_te.models import GPTModel
from tests.support.distributed_folder import write_distributed
from tests.support.numerics import quick_jit
from tests.support.runs import MICRO, TEXT, assert_refused, saved_step
from tests.support.tokenizers import write_tokenizer

CONFIG = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "activation": "swiglu"}
CONFIG |= {"normalization": "RMSNorm", "add_bias_linear": False}


def build():
    return GPTModel(
        TransformerConfig(**CONFIG),
        vocab_size=32,
        max_sequence_length=16,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        rngs=nnx.Rngs(0),
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder of Hugging Face with fields and a file that only `like` copies, and its parameters."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    model = build()
    save_huggingface(model, folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder, parameters(model)


@pytest.fixture(scope="module")
def noted(llama, tmp_path_factory):
    """The same folder, with a field in its configuration that nobody knows."""
    folder = tmp_path_factory.mktemp("models") / "noted"
    shutil.copytree(llama[0], folder)
    values = json.loads((folder / "config.json").read_text()) | {"my_note": "x"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def parameters(model):
    return {path: np.asarray(each[...]) for path, each in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=str(path))


@pytest.mark.costly
def test_there_and_back(llama, tmp_path, capsys):
    folder, expected = llama
    assert main(["convert", str(folder), str(tmp_path / "megatron"), "--tensor-parallel", "2"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("read ")
    assert out[-2] == "written 18/18"
    assert out[-1] == f"{tmp_path / 'megatron'}: Megatron-LM"
    assert main(["convert", str(tmp_path / "megatron"), str(tmp_path / "again")]) == 0
    assert_same(parameters(load_huggingface(tmp_path / "again")), expected)
    # A state dict alone says nothing of the model: its flags come from a file.
    found = read_megatron(tmp_path / "megatron")
    write_torch_file(tmp_path / "alone.pt", {name: np.asarray(each) for name, each in found.tensors.items()})
    (tmp_path / "args.json").write_text(json.dumps(found.args))
    more = ["--megatron-args", str(tmp_path / "args.json"), "--vocab-size", "30", "--dtype", "bfloat16"]
    assert main(["convert", str(tmp_path / "alone.pt"), str(tmp_path / "small"), *more]) == 0
    small = load_huggingface(tmp_path / "small")
    assert (small.vocab_size, small.config.params_dtype) == (30, jnp.bfloat16)
    assert main(["convert", str(folder), str(tmp_path / "copy"), "--to", "huggingface"]) == 0
    assert (tmp_path / "copy" / "tokenizer.json").exists()


@pytest.mark.costly
def test_megatrons_default_format(llama, tmp_path):
    folder, expected = llama
    target = tmp_path / "dist"
    assert main(["convert", str(folder), str(target), "--megatron-format", "torch_dist"]) == 0
    assert list(target.glob("**/.metadata"))  # of torch.distributed
    assert_same(parameters(load_megatron(target)), expected)


def test_ranks_of_two_checkpoints_are_not_converted(llama, tmp_path, capsys):
    assert main(["convert", str(llama[0]), str(tmp_path / "ranks"), "--tensor-parallel", "2"]) == 0
    second = tmp_path / "ranks" / "release" / "mp_rank_01" / "model_optim_rng.pt"
    write_torch_file(second, read_torch_file(second) | {"iteration": 500})
    capsys.readouterr()
    status = main(["convert", str(tmp_path / "ranks"), str(tmp_path / "new")])
    assert_refused(status, capsys.readouterr().err, "two checkpoints: iteration is 0 in", "and 500 in", "mp_rank_01")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_dense_model_becomes_one_with_experts(llama, tmp_path):
    folder, _ = llama
    assert main(["convert", str(folder), str(tmp_path / "moe"), "--upcycle", "4", "--upcycle-topk", "3"]) == 0
    dense, experts = load_huggingface(folder), load_megatron(tmp_path / "moe")
    assert (experts.config.num_moe_experts, experts.config.moe_router_topk) == (4, 3)
    tokens = jnp.arange(16)[None] % 32
    expected, found = (quick_jit(lambda model: model.loss(tokens, tokens))(model) for model in (dense, experts))
    # fp32: the sum of the probabilities is 1 up to 2^-23.
    np.testing.assert_allclose(expected, found, rtol=1e-6)


def test_unknown_fields_are_ignored_by_name(llama, noted, tmp_path):
    target = tmp_path / "a"
    argv = ["convert", str(noted), str(target), "--to", "huggingface", "--ignore-fields", "my_note,other"]
    assert main(argv) == 0
    assert "my_note" not in json.loads((target / "config.json").read_text())
    assert_same(parameters(load_huggingface(target)), llama[1])


@pytest.mark.costly
def test_a_run_on_bytes_is_written_without_the_tokenizer_of_a_start_before_it(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    write_tokenizer(tmp_path / "run" / "tokenizer.json")
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    assert Tokenizer(tmp_path / "hf").vocab_size == 256  # bytes


def test_a_run_is_converted(trained, tmp_path):
    assert main(["convert", str(trained), str(tmp_path / "a.pt"), "--step", "8"]) == 0
    assert (
        main(
            ["convert", str(trained / "checkpoints" / "8"), str(tmp_path / "hf"), "--architecture", "LlamaForCausalLM"]
        )
        == 0
    )
    one, two = read_megatron(tmp_path / "a.pt"), load_huggingface(tmp_path / "hf")
    np.testing.assert_array_equal(one.tensors["embedding.word_embeddings.weight"], two.embedding.embedding[...])


@pytest.mark.costly
def test_a_run_on_bytes_takes_them_along_as_a_tokenizer(trained, tmp_path, capsys):
    """The folder is evaluated without an option, with the loss of the run."""
    text = tmp_path / "test.txt"
    text.write_bytes("Grüße, 世界!\x00\r\n\t<s> </s>  two  \n".encode() * 40 + bytes(range(128)))
    folder = tmp_path / "hf"
    assert main(["convert", str(trained), str(folder)]) == 0
    found = Tokenizer(folder)
    assert (found.vocab_size, found.end_of_text, found.special) == (256, None, ())
    np.testing.assert_array_equal(found.encode(text.read_bytes().decode()), np.frombuffer(text.read_bytes(), np.uint8))
    assert found.decode(found.encode("Grüße\r\n")) == "Grüße\r\n"
    losses = []
    for source in (["--output", str(trained)], ["--init-from", str(folder), "--seq-len", "32"]):
        capsys.readouterr()
        assert main(["eval", *source, "--data", str(text), "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out))
    ours, theirs = losses
    assert (theirs["seq_len"], theirs["tokens"]) == (ours["seq_len"], ours["tokens"])
    np.testing.assert_allclose(theirs["loss"], ours["loss"], rtol=1e-5)


def dtypes_in(capsys, path):
    capsys.readouterr()
    return {row["dtype"] for row in shown(capsys, path)["arrays"]}


@pytest.mark.slow
def test_a_run_is_converted_in_one_dtype(tmp_path, capsys):
    run, folder = tmp_path / "run", tmp_path / "hf"
    options = ["--steps", "4", "--recipe", "current", "--fp8-param", "--params-dtype", "bfloat16", "--no-bias"]
    assert main(["train", "--output", str(run), *MICRO, *options, "--metrics-writers", "jsonl"]) == 0
    assert main(["convert", str(run), str(folder)]) == 0
    assert "float32" in dtypes_in(capsys, run)  # the masters
    assert dtypes_in(capsys, folder) == {"bfloat16"}
    assert main(["convert", str(run), str(tmp_path / "a.pt")]) == 0
    assert dtypes_in(capsys, tmp_path / "a.pt") == {"bfloat16"}
    assert main(["convert", str(run), str(tmp_path / "exact"), "--dtype", "float32"]) == 0
    assert dtypes_in(capsys, tmp_path / "exact") == {"float32"}


def test_a_folder_of_several_dtypes_is_read_in_the_one_that_is_given(llama, tmp_path, capsys):
    folder, text = tmp_path / "mixed", tmp_path / "text.txt"
    model = load_huggingface(llama[0], dtype=jnp.bfloat16)
    model.final_norm.scale.set_value(jnp.ones(16, jnp.float32))
    save_huggingface(model, folder)
    write_tokenizer(folder / "tokenizer.json")
    text.write_text("the cat sat " * 20)
    for argv in (["convert", str(folder), str(tmp_path / "no")], ["eval", "--init-from", str(folder), "--data", TEXT]):
        assert_refused(main(argv), capsys.readouterr().err, "of dtypes bfloat16, float32; say with", "(--dtype on")
    assert main(["eval", "--init-from", str(folder), "--data", str(text), "--dtype", "float32"]) == 0
    assert "loss" in capsys.readouterr().out
    assert main(["convert", str(folder), str(tmp_path / "one.pt"), "--dtype", "bfloat16"]) == 0
    assert dtypes_in(capsys, tmp_path / "one.pt") == {"bfloat16"}


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (
            ["latest_checkpointed_iteration.txt"],
            "checkpoints of jax-te (checkpoints) and a checkpoint of Megatron-LM or torch.distributed (latest_check",
        ),
        (["model.safetensors"], "checkpoints of jax-te (checkpoints) and a model of Hugging Face (model.safetensors)"),
    ],
)
def test_a_folder_of_two_kinds_is_refused_with_both(files, named, tmp_path, capsys):
    saved_step(tmp_path, 4)
    for name in files:
        (tmp_path / name).touch()
    for argv in (["convert", str(tmp_path), str(tmp_path / "new")], ["inspect", "checkpoint", str(tmp_path)]):
        assert_refused(main(argv), capsys.readouterr().err, named, "it is not known which one is meant")
    assert not (tmp_path / "new").exists()


def test_a_folder_called_checkpoints_is_no_run_beside_a_model(llama, tmp_path, capsys):
    folder = tmp_path / "llama"
    shutil.copytree(llama[0], folder)
    (folder / "checkpoints").mkdir()
    assert shown(capsys, folder)["kind"] == "huggingface"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{llama}", "{llama}"], "exists"),
        (["{tmp}", "{tmp}/new"], "is not a checkpoint"),
        (["{tmp}/absent", "{tmp}/new"], "is not a checkpoint"),
        (["{noted}", "{tmp}/new"], "my_note='x'; name those that do not in ignore_fields (--ignore-fields"),
        (["{noted}", "{tmp}/new", "--ignore-fields", "my_note,hidden_size"], "hidden_size cannot be ignored"),
        (["{noted}", "{tmp}/new", "--ignore-fields", "a b"], "must be names of fields"),
        (["{llama}", "{tmp}/new", "--step", "3"], "--step has no effect"),
        (["{llama}", "{tmp}/new", "--architecture", "GPT2LMHeadModel"], "--architecture has no effect"),
        (["{llama}", "{tmp}/new", "--to", "huggingface", "--tensor-parallel", "2"], "--tensor-parallel has no effect"),
        (["{llama}", "{tmp}/new", "--tensor-parallel", "4"], "does not divide"),
        (
            ["{llama}", "{tmp}/new", "--to", "huggingface", "--megatron-format", "torch_dist"],
            "--megatron-format has no effect",
        ),
        (["{llama}", "{tmp}/new.pt", "--megatron-format", "torch_dist"], "torch_dist needs a folder"),
        (["{llama}", "{tmp}/new", "--megatron-format", "torch_dist", "--tensor-parallel", "2"], "1 for a single file"),
        (["{trained}/checkpoints/8", "{tmp}/new", "--step", "8"], "is one checkpoint, that of step 8"),
        (["{trained}", "{tmp}/new", "--step", "9"], "has no checkpoint of --step 9; it has 4, 8, 12"),
        (["{llama}"], "TO"),
    ],
)
def test_what_cannot_be_converted_is_one_line(argv, message, llama, noted, trained, tmp_path, capsys):
    argv = [each.format(llama=llama[0], noted=noted, trained=trained, tmp=tmp_path) for each in argv]
    try:
        status = main(["convert", *argv])
    except SystemExit as error:  # argparse's
        status = error.code
    assert_refused(status, capsys.readouterr().err, message)
    assert not list(tmp_path.iterdir())


def adapters(folder):
    """Write a model's adapters in PEFT's form."""
    model = build()
    attention = model.layers[0].self_attention
    attention.proj = LoRA(attention.proj, 4, alpha=8.0, rngs=nnx.Rngs(1))
    save_peft(model, folder, base="my llama")


def test_adapters_are_listed_with_their_configuration(tmp_path, capsys):
    adapters(tmp_path)
    found = shown(capsys, tmp_path)
    facts = {name: value for name, value in found.items() if name not in ("step", "recipe", "arrays", "bytes")}
    assert found["arrays"]
    assert facts == {
        "kind": "peft", "method": "LORA", "rank": 4, "alpha": 8, "targets": ["model.layers.0.self_attn.o_proj"],
        "base_model": "my llama", "parameters": 2 * 4 * 16,
    }  # fmt: skip
    assert {row["name"].rsplit(".", 2)[1]: row["shape"] for row in found["arrays"]} == {
        "lora_A": [4, 16],
        "lora_B": [16, 4],
    }
    values = json.loads((tmp_path / "adapter_config.json").read_text())
    values |= {"target_modules": ["q_proj", "o_proj"], "rank_pattern": {"o_proj": 4}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    assert main(["inspect", "checkpoint", str(tmp_path)]) == 0
    shown_facts = capsys.readouterr().out.splitlines()[0]
    assert (
        "targets ['q_proj', 'o_proj']  base_model my llama  rank_pattern {'o_proj': 4}  parameters 128" in shown_facts
    )


def test_adapters_alone_are_no_model_to_convert(tmp_path, capsys):
    adapters(tmp_path / "adapters")
    status = main(["convert", str(tmp_path / "adapters"), str(tmp_path / "new")])
    assert_refused(status, capsys.readouterr().err, "holds adapters of PEFT", "load_peft", "jax-te inspect checkpoint")
    assert not (tmp_path / "new").exists()


def test_adapters_without_their_configuration_are_one_line(tmp_path, capsys):
    adapters(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    assert_refused(main(["inspect", "checkpoint", str(tmp_path)]), capsys.readouterr().err, "adapter_config.json")


@pytest.mark.parametrize(
    ("text", "problem"), [("", "JSON"), ("{", "JSON"), ("[1]", "JSON object"), ("[" * 100_000, "JSON")], ids="0123"
)
def test_megatron_args_that_are_no_json_object_are_refused_with_the_file(text, problem, tmp_path, capsys):
    write_torch_file(tmp_path / "a.pt", {"model": {}})
    (tmp_path / "args.json").write_text(text)
    argv = ["convert", str(tmp_path / "a.pt"), str(tmp_path / "to"), "--megatron-args", str(tmp_path / "args.json")]
    assert_refused(main(argv), capsys.readouterr().err, f"--megatron-args {tmp_path / 'args.json'} ", problem)
    assert not (tmp_path / "to").exists()


def shown(capsys, *argv):
    assert main(["inspect", "checkpoint", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.costly
def test_checkpoints_of_all_kinds_are_listed(llama, trained, tmp_path, capsys):
    folder, expected = llama
    found = shown(capsys, folder)
    assert (found["kind"], found["step"], found["arrays"][0].keys()) == (
        "huggingface", None, {"name", "dtype", "shape", "sharding", "bytes"},
    )  # fmt: skip
    assert found["bytes"] == sum(array.nbytes for array in expected.values())
    for path, step in ((trained, 12), (trained / "checkpoints", 12), (trained / "checkpoints" / "8", 8)):
        found = shown(capsys, path)
        assert (found["kind"], found["step"], found["recipe"]) == ("jax-te", step, "none")
        rows = {row["name"]: row for row in found["arrays"]}
        assert rows["params/embedding/embedding"]["shape"][1] == 32
        assert rows["params/embedding/embedding"]["bytes"] == 4 * np.prod(rows["params/embedding/embedding"]["shape"])
    assert shown(capsys, trained, "--step", "8")["step"] == 8
    main(["convert", str(folder), str(tmp_path / "megatron"), "--tensor-parallel", "2"])
    capsys.readouterr()
    found = shown(capsys, tmp_path / "megatron")
    assert found["step"] == 0
    assert {row["sharding"] for row in found["arrays"]} == {"whole", "2 pieces", "4 pieces"}
    write_distributed(tmp_path / "dcp", {"a": np.zeros((4, 6), np.float32)})
    assert shown(capsys, tmp_path / "dcp")["arrays"] == [
        {"name": "a", "dtype": "float32", "shape": [4, 6], "sharding": "4 pieces", "bytes": 96}
    ]
    write_torch_file(tmp_path / "a.pt", {"model": {"b": [np.zeros(3, np.int8)]}, "iteration": 5})
    found = shown(capsys, tmp_path / "a.pt")
    assert (found["step"], found["arrays"][0]["name"]) == (5, "model.b.0")
    assert main(["inspect", "checkpoint", str(tmp_path / "a.pt")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "kind torch  step 5  recipe -  arrays 1  bytes 3"


def test_a_container_that_stands_in_many_places_is_shown_once(tmp_path, capsys):
    # A few hundred bytes, in which 10 ** 18 lists would be counted.
    nested = []
    for _ in range(18):
        nested = [nested] * 10
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
        file.writestr("a/data.pkl", pickle.dumps({"model": nested}, protocol=2))
        file.writestr("a/version", "3")
    assert shown(capsys, tmp_path / "a.pt")["arrays"] == []


def test_shardings_are_those_that_were_saved(capsys):
    found = shown(capsys, "tests/checkpoint/stored/format_4_gpt/checkpoint")
    rows = {row["name"]: row["sharding"] for row in found["arrays"]}
    assert rows["params/embedding/embedding"] == "['tensor', 'fsdp']"
    assert rows["params/final_norm/bias"] == "replicated"
    assert (found["step"], found["recipe"]) == (3, "unknown")


def test_a_damaged_checkpoint_is_refused(tmp_path, capsys):
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "_CHECKPOINT_METADATA").write_text("{}")
    assert_refused(
        main(["inspect", "checkpoint", str(folder)]), capsys.readouterr().err, "not a checkpoint that can be read"
    )
    (tmp_path / "checkpoints").mkdir()
    folder.joinpath("_CHECKPOINT_METADATA").unlink()
    folder.rmdir()
    assert_refused(
        main(["inspect", "checkpoint", str(tmp_path)]), capsys.readouterr().err, "has saved no checkpoint yet"
    )


def test_folders_named_by_years_are_no_checkpoints(tmp_path, capsys):
    (tmp_path / "2024").mkdir()
    status = main(["inspect", "checkpoint", str(tmp_path)])
    assert_refused(status, capsys.readouterr().err, "is not a checkpoint: a run of jax-te train")
