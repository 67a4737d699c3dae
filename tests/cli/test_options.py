"""Options: complete help, one-line errors, and what they resolve to."""

import argparse
import dataclasses
import re
import subprocess
import sys

import pytest

from jax_te.cli.main import explain, main
from jax_te.cli.memory import check_memory
from jax_te.cli.option_table import flag, options_of
from jax_te.cli.options import Recorded
from jax_te.cli.parser import COMMANDS, build_parser, option_names, options_from
from jax_te.cli.presets import PRESETS
from jax_te.cli.resolve import output_folder, resolve
from jax_te.cli.run_config import RunConfig
from jax_te.cli.run_files import write_config
from jax_te.data import NextTokens
from tests.support.runs import saved_step


def parse(*argv):
    return options_from(build_parser().parse_args(["train", *argv]))


def actions(command):
    parser = build_parser()
    for word in command.split():
        parser = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices[word]
    return {string: action for action in parser._actions for string in action.option_strings or [action.metavar]}


def test_every_field_of_the_configuration_is_an_option():
    names = {flag(field.name) for field in dataclasses.fields(RunConfig)} - set(map(flag, options_of(Recorded)))
    assert not names - actions("train").keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_each_option_does_and_its_default(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for strings, action in actions(command).items():
        assert strings in text
        assert (action.help or " ")[0].isalnum()
        if strings not in ("-h", "--help", "--debug") and action.option_strings:
            assert "(default: " in (action.help or ""), strings
    options, _, presets = text.partition("presets (")
    assert max(map(len, options.splitlines())) <= 100
    assert max(map(len, ["", *presets.splitlines()])) <= 120


@pytest.mark.parametrize("command", COMMANDS)
def test_no_help_begins_without_its_noun(command):
    """A preposition or a pronoun in front would leave open what the option is."""
    for action in actions(command).values():
        first = (action.help or "").split()[0]
        assert first not in ("of", "as", "in", "to", "with", "what", "how", "when", "where", "those", "that"), action


@pytest.mark.parametrize("family", ["inspect", "bench"])
def test_a_family_of_commands_is_listed(family, capsys):
    assert main([family]) == 0
    text = capsys.readouterr().out
    members = [name.split()[1] for name in COMMANDS if name.startswith(f"{family} ")]
    assert len(members) >= 5
    assert set(members) <= {line.split()[0] for line in text.splitlines() if line.startswith("    ")}


def test_a_command_gets_the_options_of_its_table():
    given = ["inspect", "sharding", "--preset", "tiny", "--json"]
    options = options_from(build_parser().parse_args(given))
    assert options == COMMANDS["inspect sharding"](preset="tiny", json=True)
    several = options_from(build_parser().parse_args(["bench", "model", "--batch-parts", "1", "2"]))
    assert several == COMMANDS["bench model"](batch_parts=(1, 2))


def test_help_lists_the_sizes_of_every_preset(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name, preset in PRESETS.items():
        row = next(words for words in rows if words[:1] == [name])
        for field in ("num_layers", "hidden_size", "num_heads", "num_query_groups", "ffn_hidden_size", "seq_len"):
            assert str(preset.values[field]) in row


def test_help_imports_nothing_heavy():
    code = "import sys; from jax_te.cli.parser import build_parser; build_parser(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_command_the_commands_are_listed(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("train", "sample", "eval", "inspect", "doctor", "bench"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "invalid choice: 'trian'"),
        (["train", "--recipe", "mxfp9"], "argument --recipe: invalid choice: 'mxfp9'"),
        (["train", "--step", "3"], "unknown argument '--step', did you mean --steps?"),
        (["train", "--steps", "0"], "argument --steps: must be an integer >= 1, got 0"),
        (["train", "--steps", "many"], "argument --steps: must be an integer >= 1, got 'many'"),
        (["train", "--learning-rate", "nan"], "argument --learning-rate: must be a number > 0, got nan"),
        (["train", "--dropout", "1"], "argument --dropout: must be < 1, got 1"),
        (["train", "--preset", "gpt-9t"], "argument --preset: invalid choice: 'gpt-9t'"),
        (["train", "--override-linear-precision", "wgrad,wgrad"], "must be some of fprop,dgrad,wgrad, each once"),
        (["train", "--override-linear-precision", "all"], "argument --override-linear-precision: must be some of"),
        (
            ["train", "--recompute-modules", "mlp,head"],
            "must be some of core_attn,layernorm,activation,mlp,moe,moe_act,shared_experts, each",
        ),
        (["train", "--scan-layers", "true"], "argument --scan-layers: must be auto, yes or no, got 'true'"),
        (["train", "--recompute-granularity", "some"], "argument --recompute-granularity: invalid choice: 'some'"),
        (["train", "--bf16-layers-start", "-1"], "argument --bf16-layers-start: must be an integer >= 0, got -1"),
        (["train", "--fp8-accumulation", "slow"], "argument --fp8-accumulation: invalid choice: 'slow'"),
        (["inspect", "precision", "--recipe", "none"], "argument --recipe: invalid choice: 'none'"),
        (["inspect", "sensitivity", "--keep-bf16", "0"], "argument --keep-bf16: must be an integer >= 1, got 0"),
        (["inspect", "precision", "--mesh", "data=2"], "unknown argument '--mesh'"),
        (["inspect", "everything"], "invalid choice: 'everything'"),
        (["inspect", "checkpoint"], "CHECKPOINT"),
        (["bench", "layer", "--stack", "scanned"], "unknown argument '--stack'"),
        (["bench", "checkpoint", "here", "--calls", "3"], "unknown argument '--calls'"),
        (["convert", "a", "b", "--architecture", "Nobody"], "argument --architecture: must be one of "),
    ],
)
def test_a_wrong_option_is_one_line_and_status_2(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("jax-te: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_errors_are_explained_in_a_line_and_bugs_are_not():
    assert explain(FileNotFoundError(2, "No such file or directory", "/x")) == "/x: No such file or directory"
    assert explain(OSError(28, "Disk full")) == "Disk full; free some space, then the same command goes on"
    assert explain(ModuleNotFoundError("training needs grain")) == "training needs grain"
    assert explain(ValueError("two\nlines")) == "two lines (--debug shows where)"
    assert "out of memory" in (explain(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes")) or "")
    assert "out of memory" in (
        explain(RuntimeError("INTERNAL: Error dispatching: Out of memory allocating 8 bytes")) or ""
    )
    assert explain(KeyError("x")) is None
    assert explain(RuntimeError("INTERNAL")) is None


@pytest.mark.parametrize("command", COMMANDS)
def test_advice_for_memory_names_options_of_the_command_alone(command):
    line = explain(RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), command)
    assert line is not None
    named = {name.replace("-", "_") for name in re.findall(r"--([\w-]+)", line)}
    assert named <= option_names(command)
    assert named or "use a device with more memory" in line


@pytest.mark.parametrize("command", ["train", "sample", "eval", "inspect precision", "inspect sensitivity"])
def test_the_estimate_of_memory_can_be_skipped_where_it_refuses(command, tmp_path):
    config = resolve(parse("--hidden-size", "1048576", "--num-heads", "1"), tmp_path)[0]
    with pytest.raises(
        ValueError, match=r"the sizes take at least .*or skip this estimate: --no-check-memory"
    ) as error:
        check_memory(config, command, None if command in ("sample", "eval") else NextTokens())
    named = {name.replace("-", "_") for name in re.findall(r"--([\w-]+)", str(error.value))}
    assert named - {"no_check_memory"} <= option_names(command)
    assert "check_memory" in option_names(command)
    check_memory(dataclasses.replace(config, check_memory=False), command, NextTokens())


def test_a_new_run_has_the_presets_values_and_what_follows_from_the_options(tmp_path):
    config, resumes = resolve(parse("--hidden-size", "256", "--num-heads", "8", "--steps", "50"), tmp_path)
    assert not resumes
    assert (config.hidden_size, config.num_heads, config.num_query_groups, config.ffn_hidden_size) == (256, 8, 8, 1024)
    assert (config.steps, config.decay_steps, config.warmup_steps) == (50, 50, 5)
    assert config.min_learning_rate == pytest.approx(config.learning_rate / 10)
    assert config.params_dtype == config.compute_dtype == "float32"
    assert config.num_layers == PRESETS["tiny"].values["num_layers"]


def test_a_recipes_fields_are_resolved(tmp_path):
    config, _ = resolve(parse("--recipe", "delayed", "--margin", "1"), tmp_path)
    assert (config.fp8_format, config.amax_history_len, config.amax_compute_algo, config.margin) == (
        "hybrid",
        1024,
        "max",
        1,
    )
    assert resolve(parse(), tmp_path)[0].fp8_format is None


def test_gemms_are_put_in_order(tmp_path):
    config, _ = resolve(parse("--recipe", "block", "--override-linear-precision", "wgrad, fprop"), tmp_path)
    assert config.override_linear_precision == "fprop,wgrad"


def test_recomputation_is_the_models_and_may_change_on_resuming(tmp_path):
    first, _ = resolve(parse("--recompute-granularity", "full", "--recompute-policy", "save_gemms"), tmp_path)
    model = first.transformer_config()
    assert (model.recompute_granularity, model.recompute_method, model.recompute_num_layers) == ("full", "uniform", 1)
    write_config(first, tmp_path)
    saved_step(tmp_path, 7)
    with pytest.raises(
        ValueError, match=r"recompute_policy='save_gemms' .*set by --recompute-policy, --recompute-granularity"
    ):
        resolve(parse("--recompute-granularity", "selective"), tmp_path)
    options = ("--recompute-granularity", "selective", "--recompute-modules", "mlp, layernorm")
    again, resumes = resolve(parse(*options, "--recompute-policy", "full"), tmp_path)
    assert resumes
    assert again.transformer_config().recompute_modules == ("layernorm", "mlp")
    with pytest.raises(
        ValueError, match=r"has no effect without .*set by --recompute-modules, --recompute-granularity"
    ):
        resolve(parse("--recompute-modules", "mlp"), tmp_path / "new")


def test_parallelism_is_the_models_and_may_change_on_resuming(tmp_path):
    options = ("--mesh", "tensor=2,context=2", "--sequence-parallel", "--cp-comm-type", "a2a", "--cp-load-balanced")
    first, _ = resolve(parse(*options), tmp_path)
    model = first.transformer_config()
    assert (model.sequence_parallel, model.tensor_model_parallel_size, model.cp_comm_type) == (True, 2, "a2a")
    assert model.cp_load_balanced
    write_config(first, tmp_path)
    saved_step(tmp_path, 7)
    without = ("--no-sequence-parallel", "--no-cp-load-balanced", "--cp-comm-type", "p2p")
    again, resumes = resolve(parse("--mesh", "data=2", *without), tmp_path)
    assert resumes
    assert not again.transformer_config().sequence_parallel
    assert not again.transformer_config().cp_load_balanced
    with pytest.raises(ValueError, match="--sequence-parallel is for tensor ranks, and --mesh data=2 has one"):
        resolve(parse("--mesh", "data=2", "--sequence-parallel"), tmp_path / "new")
    with pytest.raises(ValueError, match=r"and --mesh \(none\) has one"):
        resolve(parse("--sequence-parallel"), tmp_path / "new")


def test_the_form_of_the_stack_may_change_on_resuming(tmp_path):
    first, _ = resolve(parse("--scan-layers", "yes"), tmp_path)
    assert first.scan_layers is True
    write_config(first, tmp_path)
    saved_step(tmp_path, 7)
    for argv, expected in (((), True), (("--scan-layers", "no"), False), (("--scan-layers", "auto"), "auto")):
        assert resolve(parse(*argv), tmp_path) == (dataclasses.replace(first, scan_layers=expected), True)


def test_the_text_of_a_precision_file_is_kept(tmp_path):
    (tmp_path / "rules.yaml").write_text("configs: {}\n")
    config, _ = resolve(parse("--precision-config", str(tmp_path / "rules.yaml")), tmp_path / "run")
    assert config.precision_config == "configs: {}\n"
    (tmp_path / "rules.yaml").write_text("configs: {a: {}, a: {}}")
    with pytest.raises(ValueError, match=r"--precision-config .*rules\.yaml: .*key 'a' occurs twice"):
        resolve(parse("--precision-config", str(tmp_path / "rules.yaml")), tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        resolve(parse("--precision-config", "nowhere"), tmp_path / "run")


def test_a_resumed_run_needs_no_option_repeated(tmp_path):
    first, _ = resolve(parse("--hidden-size", "256", "--seed", "5"), tmp_path)
    write_config(first, tmp_path)
    saved_step(tmp_path, 7)
    again = resolve(parse("--steps", "999", "--mesh", "data=2"), tmp_path)
    assert again == (dataclasses.replace(first, steps=999, mesh="data=2"), True)
    with pytest.raises(ValueError, match="--seed is 5 there, 6 here"):
        resolve(parse("--seed", "6"), tmp_path)
    with pytest.raises(ValueError, match="--preset is tiny there, gpt-125m here"):
        resolve(parse("--preset", "gpt-125m"), tmp_path)


def test_a_run_that_saved_nothing_starts_again_or_gives_way(tmp_path):
    first, _ = resolve(parse("--hidden-size", "256", "--seed", "5"), tmp_path)
    write_config(first, tmp_path)
    assert resolve(parse(), tmp_path) == (first, False)
    assert resolve(parse("--seed", "6"), tmp_path) == resolve(parse("--seed", "6"), tmp_path / "new")


@pytest.mark.parametrize("changed", ["--steps 40", "--learning-rate 0.5", "--data elsewhere", ""])
def test_a_new_run_has_nothing_of_a_start_that_saved_nothing(changed, tmp_path):
    """Neither the schedule, which followed from other steps, nor options that are no longer given."""
    options = ("--hidden-size", "256", "--steps", "10", "--learning-rate", "0.01")
    dead, _ = resolve(parse(*options, "--dropout", "0.1", "--microbatches", "2", "--recipe", "delayed"), tmp_path)
    write_config(dead, tmp_path)
    again = parse(*options, *changed.split())
    assert resolve(again, tmp_path) == resolve(again, tmp_path / "new")


def test_options_of_one_command_line_alone_start_a_run_that_saved_nothing_again(tmp_path):
    dead, _ = resolve(parse("--hidden-size", "256", "--steps", "10"), tmp_path)
    write_config(dead, tmp_path)
    again, resumes = resolve(parse("--profile", "2:3"), tmp_path)
    assert (again, resumes) == (dataclasses.replace(dead, profile="2:3"), False)


def test_more_steps_keep_the_schedule_of_a_resumed_run_and_another_end_may_be_given(tmp_path):
    first, _ = resolve(parse("--steps", "10"), tmp_path)
    write_config(first, tmp_path)
    saved_step(tmp_path, 7)
    assert resolve(parse("--steps", "300"), tmp_path)[0] == dataclasses.replace(first, steps=300)
    longer = resolve(parse("--steps", "300", "--decay-steps", "300"), tmp_path)[0]
    assert longer == dataclasses.replace(first, steps=300, decay_steps=300)
    with pytest.raises(ValueError, match="--warmup-steps is 1 there, 30 here"):
        resolve(parse("--steps", "300", "--warmup-steps", "30"), tmp_path)


def test_the_default_folder_is_named_after_preset_and_recipe():
    assert str(output_folder(parse())) == "runs/tiny"
    assert str(output_folder(parse("--preset", "gpt-125m", "--recipe", "current"))) == "runs/gpt-125m-current"
    assert str(output_folder(parse("--output", "here"))) == "here"
    assert str(output_folder(parse("--init-from", "models/Llama-3.2-1B"))) == "runs/Llama-3.2-1B"
    assert str(output_folder(parse("--init-from", "Llama/", "--recipe", "current"))) == "runs/Llama-current"
