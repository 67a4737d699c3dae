"""What files and command lines may hold: a value, or one clear error; never code that runs, a traceback or a hang."""

import argparse
import contextlib
import json
import math
import shutil
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import fields

import jax
import numpy as np
import pyarrow
import pyarrow.parquet as pyarrow_parquet
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_te.checkpoint import TrainCheckpointer
from jax_te.cli import memory
from jax_te.cli.build import abstract_state, contexts
from jax_te.cli.main import main
from jax_te.cli.memory import least_memory
from jax_te.cli.parser import COMMANDS, build_parser
from jax_te.cli.precision_rules import quantization_rules
from jax_te.cli.presets import PRESETS
from jax_te.cli.resolve import new_config
from jax_te.cli.run_config import RunConfig
from jax_te.cli.run_files import CONFIG_FILE, read_config
from jax_te.config import LatentAttentionOptions, TransformerConfig
from jax_te.data import CorruptedSpans, NextTokens, Tokenizer, load_text
from jax_te.errors import CheckpointMismatchError
from jax_te.megatron import MatchContext, QuantizationConfig, TEQuantizationParams, TEQuantizationRecipe
from jax_te.megatron.quantization.yaml_file import read_yaml
from jax_te.metrics.log import METRICS_FILE, read_metrics
from jax_te.metrics.precision_log import PRECISION_FILE, STATISTICS, read_precision
from jax_te.metrics.writers import cut_after
from jax_te.models import GPTModel
from tests.support.families import family_folder
from tests.support.numerics import without_type_checker
from tests.support.runs import MICRO, assert_refused, command
from tests.support.tokenizers import write_megatron, write_tokenizer

RULES = """
configs:
  own:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: custom, custom_recipe_factory: planted.factory}
matchers:
  all: {type: glob, pattern: "*", config: own, enabled: true}
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A folder with a module that leaves a file when it is imported; the file's path."""
    mark = tmp_path / "imported"
    (tmp_path / "planted.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "from jax_te.quantize import quantizer_for\n"
        "from jax_te.recipe import Float8CurrentScaling\n\n"
        "def factory(role):\n"
        "    return quantizer_for(Float8CurrentScaling(), role.split('_')[-1])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield mark
    sys.modules.pop("planted", None)


def refuse(checkpointer, state):
    raise ValueError("nothing is restored here")


@pytest.mark.costly("inspect precision", slow=("sample", "eval", "inspect recipes", "train"))
@pytest.mark.parametrize(
    "command", ["train", "sample", "eval", "inspect precision", "inspect recipes", "inspect sharding"]
)
def test_no_file_of_a_run_makes_code_run(command, planted, trained, tmp_path, monkeypatch, capsys):
    """The rules in a run's folder name a factory. Only a command line that names its module has it imported."""
    values = json.loads((trained / CONFIG_FILE).read_text()) | {"precision_config": RULES}
    del values["version"], values["crc32"]
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(trained / "checkpoints")
    checksum = zlib.crc32(json.dumps(values, sort_keys=True).encode())
    for version in ({}, {"version": 1, "crc32": checksum}):
        (run / CONFIG_FILE).write_text(json.dumps(version | values))
        capsys.readouterr()
        status = main([*command.split(), "--output", str(run)])
        assert_refused(status, capsys.readouterr().err, "custom_recipe_factory 'planted.factory'", "--factory-modules")
        assert not planted.exists()
    # What a command does with the state that it restores takes time, and comes after the import.
    monkeypatch.setattr(TrainCheckpointer, "restore", refuse)
    main([*command.split(), "--output", str(run), "--factory-modules", "another,planted"])
    assert planted.exists()


def test_a_precision_file_may_name_a_factory_of_an_allowed_module(planted, tmp_path, capsys):
    (tmp_path / "rules.yaml").write_text(RULES)
    argv = ["train", *MICRO, "--output", str(tmp_path / "run"), "--precision-config", str(tmp_path / "rules.yaml")]
    assert_refused(main(argv), capsys.readouterr().err, "planted.factory")
    assert not planted.exists()


WORDS = ["", "x", "nan", "-inf", "-1", "-0.5", "1e400", "0x10", "1,5", "1;5", "None", "true", "[1]", "{}", "1 2", "½"]
WORDS += ["١x", "9" * 5000, "a" * 5000, "%s%n", "/no/such", "\u202e7", "\x1b[31m", "--", "+-1", ",", "a,"]


def message_of(call, *errors):
    """What ``call()`` is refused with; nothing if it is not."""
    try:
        call()
    except errors as error:
        return str(error)
    return ""


@pytest.mark.costly("train")
@pytest.mark.parametrize("command", COMMANDS)
def test_bad_values_of_every_option_are_one_line(command, capsys):
    parser = made = build_parser()
    for word in command.split():
        subparsers = next(action for action in made._actions if isinstance(action, argparse._SubParsersAction))
        made = subparsers.choices[word]
    places = ["place" for action in made._actions if not action.option_strings]
    for action in made._actions:
        refused = 0
        for value in WORDS if action.option_strings else ():
            argv = [*command.split(), *places, f"{action.option_strings[0]}={value}"]
            if message_of(lambda argv=argv: parser.parse_args(argv), SystemExit) == "2":
                refused += 1
                error = capsys.readouterr().err
                assert error.startswith("jax-te: error: "), argv
                assert error.count("\n") == 1, argv
        # Names of files, of fields of files and the like are looked at later.
        names = action.choices is None and action.metavar in (
            None,
            "FILE",
            "DIR",
            "PATH",
            "AXES",
            "SIZES",
            "TEXT",
            "FIELDS",
        )
        assert refused >= 20 or (names and action.nargs != 0) or not action.option_strings, action


@pytest.mark.costly(
    "bench layer --mesh",
    slow=(
        "inspect precision --output",
        "bench model --pipeline",
        "train --output",
        "train --mesh",
        "train --precision-config",
        "bench layer --recipes",
        "eval --output",
        "train --tokenizer",
        "inspect sharding --preset=tiny --mesh",
        "train --init-from",
        "train --data",
    ),
)
@pytest.mark.parametrize(
    "argv",
    [
        ["train", "--data"],
        ["train", "--tokenizer"],
        ["train", "--init-from"],
        ["train", "--mesh"],
        ["train", "--precision-config"],
        ["train", "--output"],
        ["sample", "--output"],
        ["eval", "--output"],
        ["inspect", "precision", "--output"],
        ["inspect", "sharding", "--preset=tiny", "--mesh"],
        ["bench", "layer", "--mesh"],
        ["bench", "layer", "--recipes"],
        ["bench", "model", "--pipeline"],
    ],
    ids=" ".join,
)
def test_bad_names_are_one_line(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in filter(None, WORDS):  # none of them may start anything
        name = name.replace("/", "_")
        if argv == ["train", "--output"] and len(name) < 200:
            (tmp_path / name).touch()
        capsys.readouterr()
        with contextlib.suppress(SystemExit):
            assert main([*argv[:-1], f"{argv[-1]}={name}"]) == 2
        assert_refused(2, capsys.readouterr().err)
    assert all(path.is_file() for path in tmp_path.iterdir())


@pytest.mark.costly("--num-layers 9999 --hidden-size 100000")
@pytest.mark.parametrize(
    "argv",
    [
        ["--seed", "4294967296"],
        ["--seed", "18446744073709551616"],
        ["--steps", "99999999999999999999"],
        ["--recipe", "delayed", "--margin", "18"],
        ["--seq-len", "1"],
        ["--output", ""],
        ["--data", ""],
        ["--batch-size", "1000000000"],
        ["--batch-size", "1000000000", "--microbatches", "1000000000"],
        ["--eval-batches", "2000000000"],
        ["--num-layers", "9999", "--hidden-size", "100000"],
        ["--num-layers", "10000"],
        ["--hidden-size", "1000000000"],
        ["--ffn-hidden-size", "2000000000"],
        ["--mesh", "data=100000000", "--batch-size", "100000000"],
    ],
    ids=" ".join,
)
def test_absurd_sizes_are_refused_before_anything_is_made(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(SystemExit):
        assert main(["train", *MICRO, *argv]) == 2
    assert_refused(2, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.costly("changes1", slow=("changes2", "changes3"))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"preset": "gpt-125m"},
        {"preset": "moe-tiny"},
        {"fp8_param": True, "recipe": "current"},
        {"params_dtype": "bfloat16"},
    ],
)
def test_the_estimate_is_below_what_a_state_takes_and_not_far_below(changes):
    config = new_config({"preset": "tiny", "batch_size": 1, "seq_len": 32, "eval_batches": 1} | changes)
    with contexts(config):
        state = abstract_state(config)
    params, all_of_it = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)) for tree in (state.params, state)
    )
    assert 0.9 * all_of_it < least_memory(config, NextTokens()) < 1.2 * (all_of_it + params)
    assert 0.5 * params < least_memory(config) <= params


LATENT = {"kv_lora_rank": 8, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"num_moe_experts": 8, "moe_ffn_hidden_size": 48, "moe_layer_freq": [0, 1], "activation": "swiglu"}


@pytest.mark.costly("depths")
@pytest.mark.parametrize(
    "form",
    [
        {"activation": "swiglu", "num_query_groups": 2, "ffn_hidden_size": 96},
        EXPERTS,
        EXPERTS | {"moe_latent_size": 8},
        EXPERTS | {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
        {"latent_attention": LatentAttentionOptions(q_lora_rank=12, **LATENT)},
        {"latent_attention": LatentAttentionOptions(q_lora_rank=None, **LATENT)},
        {"mtp_num_layers": 2},
        {"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
    ],
    ids=["gated", "experts", "latent experts", "shared", "latent", "latent queries", "depths", "one depth"],
)
def test_the_estimate_counts_every_kernel_of_a_model(form, monkeypatch):
    """The parameters that it counts are the elements of all arrays of two axes or more."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "add_bias_linear": False}
    model_config = TransformerConfig(**sizes, **form)
    options = {"vocab_size": 48, "max_sequence_length": 8, "position_embedding_type": "rope"}
    model = nnx.eval_shape(lambda: GPTModel(model_config, **options, rngs=nnx.Rngs(0)))
    kernels = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)) if leaf.ndim > 1)
    small = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 48, "seq_len": 8, "batch_size": 1}
    config = new_config({"preset": "tiny", **small})
    monkeypatch.setattr(RunConfig, "transformer_config", lambda self: model_config)
    assert least_memory(config) == 4 * kernels


@pytest.mark.costly
def test_the_estimate_has_logits_of_the_tokens_with_labels_alone(tmp_path, monkeypatch):
    """The decoder of a T5 has 114 tokens for 512 of the encoder, and its vocabulary may be most of the memory."""
    monkeypatch.setattr(memory, "score_bytes", lambda *sizes: 0)
    objective, labels, rows = CorruptedSpans(sentinels=tuple(range(100)), after=(1,)), 114, 64
    sizes = {"vocab_size": 250_112, "n_positions": 512, "num_layers": 3, "num_decoder_layers": 2}
    values = json.loads((family_folder("T5ForConditionalGeneration", tmp_path) / "config.json").read_text()) | sizes
    given = {"model_config": json.dumps(values), "batch_size": rows, "microbatches": 1, "eval_batches": 1}
    config = new_config(given)
    parameters = least_memory(config) // 4
    inputs, item = 2 * labels + 3 * 512, np.dtype(config.compute_dtype).itemsize
    data = rows * (4 * (512 + labels) + 8)
    tokens = rows * (4 * values["vocab_size"] * labels + inputs * config.hidden_size * item) + data
    # fp32 parameters, gradients and two moments
    assert least_memory(config, objective) == 16 * parameters + tokens


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
FUZZ = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)


@pytest.mark.slow
@settings(FUZZ, max_examples=25)
@given(data=st.data())
def test_any_rules_are_read_or_refused(data):
    """Text of any kind, the rules of a file with a piece of text put in anywhere, and any value in any place."""
    pieces = ["&a ", "*a", "<<: ", "!!timestamp ", "!!bool ", "? ", "- ", "{", "[", "}", "\n", "|\n", "%", "custom"]
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(RULES))] * 2)))
    text = data.draw(st.text() | st.sampled_from(pieces).map(lambda piece: RULES[:start] + piece + RULES[end:]))
    recipe = data.draw(st.dictionaries(st.sampled_from(sorted(TEQuantizationRecipe.get_config_keys())), JSON))
    payload = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": recipe}
    given = data.draw(st.just(payload) | JSON)
    for content in (text, json.dumps({"configs": {"own": given}, "matchers": data.draw(JSON)})):
        assert len(message_of(lambda content=content: use(content), ValueError, TypeError, AssertionError)) < 2000


def use(content):
    for key, found in quantization_rules(content).configs.items():
        with without_type_checker():
            config = QuantizationConfig(found, MatchContext("a"), key)
            TEQuantizationParams.parse_from_config(config).to_module_recipe()


@pytest.mark.costly("2")
@pytest.mark.parametrize(
    "text",
    [
        "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)),
        "a0: &a0 {b: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 9)),
        "{" * 2000,
        "&a [*a]",
        "!!timestamp foo",
        "!!bool foo",
        "!!int ''",
        "2020-13-45",
        "!!python/object/apply:os.system [ls]",
        "!" + "t" * 100_000 + " x",
        "a" * 300_000,
        b"\xff\xfe\x00",
    ],
    ids=range(12),
)
def test_a_yaml_file_beyond_the_limits_is_named(text, tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"rules\.yaml") as error:
        read_yaml(path)
    assert len(str(error.value)) < 1000


@pytest.mark.costly
@FUZZ
@given(changes=st.dictionaries(st.sampled_from([field.name for field in fields(RunConfig)]), JSON, min_size=1))
def test_any_configuration_is_read_or_refused(changes, tmp_path):
    values = {"data": None, "decay_steps": 9, "min_learning_rate": 0.0, "preset": "tiny"} | PRESETS["tiny"].values
    (tmp_path / CONFIG_FILE).write_text(json.dumps(values | changes))
    with without_type_checker():
        assert len(message_of(lambda: read_config(tmp_path), ValueError)) < 2000


@FUZZ
@given(lines=st.lists(st.binary() | JSON.map(lambda value: json.dumps(value).encode())))
def test_any_metrics_are_read(lines, tmp_path):
    first, last = b'{"step": 1, "loss": 2.0}', b'{"step": 9, "loss": 1.0}'
    (tmp_path / METRICS_FILE).write_bytes(b"\n".join([first, *lines, last, b""]))
    found = read_metrics(tmp_path)
    assert (found[0]["loss"], found[-1]["loss"]) == (2.0, 1.0)
    cut_after(tmp_path / METRICS_FILE, 8)
    found = read_metrics(tmp_path)
    assert found[0] == {"step": 1, "loss": 2.0}
    assert all(record["step"] <= 8 for record in found)


@FUZZ
@given(lines=st.lists(st.binary() | JSON.map(lambda value: json.dumps(value).encode())), changes=JSON)
def test_any_statistics_are_read(lines, changes, tmp_path):
    good = {"step": 1, "module": "a", "role": "x", "format": "e4m3"} | dict.fromkeys(STATISTICS, 1.0)
    odd = [json.dumps(good | {name: changes}).encode() for name in good if name != "step"]
    (tmp_path / PRECISION_FILE).write_bytes(b"\n".join([json.dumps(good).encode(), *lines, *odd, b""]))
    assert read_precision(tmp_path)[0] == good


@FUZZ
@given(content=st.binary(max_size=300), size=st.integers(2, 40))
def test_any_data_is_read_or_refused(content, size, tmp_path):
    (tmp_path / "text").write_bytes(content)
    message = message_of(lambda: load_text(tmp_path / "text", seq_len=size), ValueError)
    assert not message or "bytes of text" in message


@pytest.mark.parametrize("name", ["x.npy", "x.idx", "x.bin", "x.jsonl", "x.parquet", "tokenizer.json"])
@settings(FUZZ, max_examples=20)
@given(data=st.data())
def test_any_file_of_documents_tokens_or_a_tokenizer_is_read_or_refused(name, data, tmp_path):
    """A file of each kind, with a piece of bytes put in anywhere."""
    np.save(tmp_path / "x.npy", np.arange(40, dtype=np.uint16))
    write_megatron(tmp_path / "x", [[*range(30)], [*range(9)]])
    (tmp_path / "x.jsonl").write_text('{"text": "a the of"}\n{"text": "in"}\n')
    pyarrow_parquet.write_table(pyarrow.table({"text": ["a the of", "in"]}), tmp_path / "x.parquet")
    write_tokenizer(tmp_path / "tokenizer.json")
    path = tmp_path / name
    content = path.read_bytes()
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
    path.write_bytes(content[:start] + data.draw(st.binary(max_size=20)) + content[end:])
    use = load_tokenizer if path.suffix == ".json" else load_text
    message = message_of(lambda: use(path, seq_len=2), ValueError)
    assert len(message) < 1000
    assert not message or "x." in message or "tokenizer.json" in message


def load_tokenizer(path, seq_len):
    tokenizer = Tokenizer(path)
    tokenizer.decode(tokenizer.encode("a the of in")[:seq_len])


@pytest.mark.slow
@settings(FUZZ, max_examples=20)
@given(data=st.data())
def test_any_metadata_of_a_checkpoint_is_refused(data, trained, tmp_path_factory):
    run = tmp_path_factory.mktemp("damaged")
    step = shutil.copytree(trained / "checkpoints" / "12", run / "12")
    path = data.draw(st.sampled_from([path for path in sorted(step.rglob("*META*")) if path.is_file()]))
    content = path.read_bytes()
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
    path.write_bytes(content[:start] + data.draw(st.binary(min_size=1, max_size=30)) + content[end:])
    config = read_config(trained)
    assert config is not None
    with contexts(config), TrainCheckpointer(run) as checkpointer:
        target = abstract_state(config)
        assert len(message_of(lambda: checkpointer.restore(target), ValueError, CheckpointMismatchError)) < 2000


@pytest.mark.costly("1.5")
@pytest.mark.parametrize("seconds", [0.5, 1.5])
def test_an_interrupt_at_the_start_is_one_line(seconds, tmp_path):
    argv, given = command("train", "--output", tmp_path / "run")
    with subprocess.Popen(argv, **given) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading JAX\n"  # said before anything that takes time
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "jax-te: interrupted\n")


@pytest.mark.slow  # tests/cli/test_loop.py has the rule; this is a run's last line
def test_a_run_whose_steps_are_all_skipped_ends_with_the_reason(tmp_path, capsys):
    sizes = [*MICRO, "--steps", "60", "--eval-every", "100", "--save-every", "100"]
    argv = ["train", *sizes, "--output", str(tmp_path), "--learning-rate", "1e30", "--give-up-after", "5"]
    assert_refused(main(argv), capsys.readouterr().err, "5 steps in a row", "--give-up-after", "--learning-rate")


@pytest.mark.costly("context", "expert", "fsdp", "pipeline", slow=("data",))
@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor", "expert", "context", "pipeline"])
def test_the_estimate_is_a_lower_bound_on_every_axis(axis):
    given = {"preset": "moe-tiny", "mesh": f"{axis}=4", "batch_size": 4, "seq_len": 32, "eval_batches": 1}
    given |= {"microbatches": 4} if axis == "pipeline" else {}
    config = new_config(given)
    with contexts(config):
        state = abstract_state(config)
        devices = [
            sum(
                math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
            )
            for tree in (state, state.params)
        ]
    # A device's arrays of the state, gradients in the parameters' dtype, and what activations and data take.
    assert least_memory(config, NextTokens()) < sum(devices) * 1.3
