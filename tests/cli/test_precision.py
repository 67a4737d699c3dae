"""jax-te train's precision options: what they do, that a resume agrees with them, and what is refused."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest

from jax_te.cli.build import contexts
from jax_te.cli.main import main
from jax_te.cli.parser import build_parser, options_from
from jax_te.cli.resolve import resolve
from jax_te.cli.run_checks import check_precision, explain_backends
from jax_te.metrics.precision_log import PRECISION_FILE, PRECISION_PLOT, read_precision
from jax_te.ops import te
from tests.support.runs import MICRO, assert_refused, configured, records, saved_step

SHORT = [*MICRO, "--steps", "6", "--save-every", "3", "--eval-every", "3"]

RULES = """\
configs:
  bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
  mxfp8:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: mxfp8, override_nonquantized_autocast: true}
    evaluation_recipe: {}
matchers:
  projections in bf16: {enabled: true, type: glob, pattern: "*.proj", config: bf16}
  the feed-forward: {enabled: true, type: glob, pattern: "layers.0.*mlp", config: mxfp8}
"""


def train(output, *argv):
    return main(["train", "--output", str(output), *SHORT, *map(str, argv)])


def write_rules(folder, text=RULES):
    (folder / "rules.yaml").write_text(text)
    return str(folder / "rules.yaml")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        [
            *("--recipe", "delayed", "--fp8-accumulation", "precise", "--override-linear-precision", "wgrad"),
            *("--fp8-param", "--inspect-every", "2", "--microbatches", "2", "--amax-history-len", "4"),
        ],
        pytest.param(
            ["--recipe", "nvfp4", "--no-rht", "--no-stochastic-rounding", "--precision-config", "RULES"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda options: options[1],
)
def test_a_resumed_run_agrees_with_an_unbroken_one(tmp_path, options):
    options = [write_rules(tmp_path) if option == "RULES" else option for option in options]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(whole, *options) == 0
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints" / "6")  # as if killed before it was whole
    (tmp_path / "rules.yaml").unlink(missing_ok=True)  # the run has its own copy
    assert main(["train", "--output", str(parts)]) == 0
    losses = [[record for record in records(path) if "loss" in record] for path in (whole, parts)]
    assert losses[0] == losses[1]
    assert read_precision(whole) == read_precision(parts)
    assert (whole / PRECISION_PLOT).exists() == ("--inspect-every" in options)
    saved = [json.loads((path / "config.json").read_text()) for path in (whole, parts)]
    assert saved[0] == saved[1]


def test_a_resumed_run_refuses_another_precision(tmp_path, capsys):
    configured(tmp_path / "run", *SHORT, "--recipe", "current", "--fp8-param")
    saved_step(tmp_path / "run", 3)
    given = {
        "--no-fp8-param": "--fp8-param is True there, False here",
        "--fp8-accumulation=precise": "--fp8-accumulation is fast there, precise here",
        "--override-linear-precision=wgrad": "--override-linear-precision is None there, wgrad here",
        "--bf16-layers-end=1": "--bf16-layers-end is 0 there, 1 here",
        "--recipe=mxfp8": "--recipe is current there, mxfp8 here",
        f"--precision-config={write_rules(tmp_path)}": "--precision-config is None there, a file of",
    }
    for argument, text in given.items():
        status = main(["train", "--output", str(tmp_path / "run"), argument])
        assert_refused(status, capsys.readouterr().err, "another configuration", text)


@pytest.mark.slow
def test_inspection_leaves_the_run_as_it_is(tmp_path, capsys):
    options = ["--recipe", "delayed", "--dropout", "0.1"]
    assert train(tmp_path / "plain", *options) == 0
    assert train(tmp_path / "watched", *options, "--inspect-every", "2") == 0
    assert f"{PRECISION_FILE}, {PRECISION_PLOT}" in capsys.readouterr().out
    assert records(tmp_path / "plain") == records(tmp_path / "watched")
    states = [(tmp_path / name / "checkpoints" / "6") for name in ("plain", "watched")]
    sums = [json.loads(next(path.rglob("*_CHECKPOINT_METADATA*")).read_text()) for path in states]
    assert sums[0]["custom_metadata"]["checksums"] == sums[1]["custom_metadata"]["checksums"]
    found = read_precision(tmp_path / "watched")
    assert sorted({record["step"] for record in found}) == [2, 4, 6]
    assert len(found) == 3 * 12  # steps, tensors
    assert found[-1].keys() >= {"module", "role", "format", "amax", "scale", "underflow", "saturation", "relative_mse"}
    assert (tmp_path / "watched" / PRECISION_PLOT).read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "plain" / PRECISION_FILE).exists()


@pytest.mark.slow
def test_inspection_may_begin_with_a_resume(tmp_path):
    run = tmp_path / "run"
    assert train(run, "--recipe", "current", "--steps", "3", "--decay-steps", "6") == 0
    assert main(["train", "--output", str(run), "--steps", "6", "--inspect-every", "2"]) == 0
    assert sorted({record["step"] for record in read_precision(run)}) == [4, 6]


@pytest.mark.slow
def test_the_rules_are_reported(tmp_path, capsys):
    text = RULES + '  none: {enabled: true, type: glob, pattern: "*.fc1", config: bf16}\n'
    assert train(tmp_path / "run", "--precision-config", write_rules(tmp_path, text), "--inspect-every", "6") == 0
    shown = capsys.readouterr()
    assert "recipe   none: no quantization, except by the rules below" in shown.out
    rows = [line.split() for line in shown.out.splitlines()]
    assert ["layers.0.layernorm_mlp", "LayerNormMLP", "the", "feed-forward", "mxfp8", "mxfp8"] in [
        row[:6] for row in rows
    ]
    assert shown.err == "jax-te: warning: --precision-config: rules that fit no layer: none\n"
    assert {record["module"].rpartition(".")[0] for record in read_precision(tmp_path / "run")} == {
        "layers.0.layernorm_mlp"
    }
    assert main(["sample", "--output", str(tmp_path / "run"), "--length", "3"]) == 0


PAYLOAD = "transformer_engine_config_type: TEQuantizationParams, training_recipe: "
ALL = "matchers: {all: {enabled: true, type: glob, pattern: '*', config: a}}"


@pytest.mark.parametrize(
    ("rules", "argv", "texts"),
    [
        (ALL, [], ["config 'a'", "not in 'configs'"]),
        (f"configs: {{a: {{{PAYLOAD}{{fp8: mxfp8}}}}}}\n{ALL}", [], ["unknown key 'fp8'"]),
        (
            f"configs: {{a: {{{PAYLOAD}{{fp8_quantization_recipe: mxfp8, fp8_param: true}}}}}}\n{ALL}",
            [],
            ["sets fp8_param", "--fp8-param"],
        ),
        (f"configs: {{a: {{{PAYLOAD}{{}}}}}}\n{ALL}", ["--inspect-every", "2"], ["--inspect-every", "no layer"]),
        (f"configs: {{a: {{{PAYLOAD}{{}}}}}}\n{ALL}", ["--fp8-param"], ["--fp8-param", "--recipe none"]),
        (
            f"configs: {{a: {{{PAYLOAD}{{fp8_quantization_recipe: mxfp8}}}}}}\n{ALL}",
            ["--recipe", "current", "--ffn-hidden-size", "48"],
            ["layers.0.layernorm_mlp runs under mxfp8", "multiples of 32", "wo_kernel is 48"],
        ),
        (
            f"configs: {{a: {{{PAYLOAD}{{fp8_quantization_recipe: mxfp8}}, evaluation_recipe: "
            f"{{fp8_quantization_recipe: tensorwise}}}}}}\n{ALL}",
            ["--recipe", "current", "--fp8-param"],
            ["--fp8-param holds the kernels of", "evaluates under current"],
        ),
    ],
)
def test_rules_that_cannot_be_used(tmp_path, capsys, rules, argv, texts):
    status = train(tmp_path / "run", "--precision-config", write_rules(tmp_path, rules), *argv)
    error = capsys.readouterr().err.split("\n")
    lines = [line for line in error if line and not line.startswith("jax-te: warning: ")]
    assert_refused(status, "\n".join([*lines, ""]), "--precision-config", *texts)
    assert not (tmp_path / "run").exists()


def test_a_size_that_does_not_matter_where_a_rule_keeps_the_layer_out(tmp_path):
    rules = f"configs: {{a: {{{PAYLOAD}{{}}}}}}\n{ALL.replace('*', '*layernorm_mlp')}"
    options = ["train", *SHORT, "--recipe", "current", "--ffn-hidden-size", "40"]
    with pytest.raises(ValueError, match="--ffn-hidden-size 40"):
        resolve(options_from(build_parser().parse_args(options)), tmp_path / "run")
    options += ["--precision-config", write_rules(tmp_path, rules)]
    config, _ = resolve(options_from(build_parser().parse_args(options)), tmp_path / "run")
    with contexts(config):
        report = check_precision(config)
        lines = explain_backends(config)
    assert report.ambient == ("layers.0.self_attention.proj", "layers.0.self_attention.qkv")
    assert len(lines) == 1


@pytest.mark.parametrize(("vocabulary", "head"), [(256, "te"), (260, "xla")])  # bytes of a row: 512, 520
def test_a_run_says_what_te_leaves_to_others(vocabulary, head, tmp_path, monkeypatch):
    monkeypatch.setattr(te, "supports", lambda op, **_: (op != "grouped_dense", "made up"))
    monkeypatch.setattr(te, "primitives", lambda: SimpleNamespace(has_kernel=lambda activation: True))
    options = ["train", *SHORT, "--recipe", "block", "--backend", "te", "--params-dtype", "bfloat16"]
    config, _ = resolve(options_from(build_parser().parse_args(options)), tmp_path / "run")
    config = dataclasses.replace(config, vocab_size=vocabulary)
    with contexts(config):
        lines = explain_backends(config)
    ours = "quantization, fprop, dgrad, wgrad: xla"
    assert f"te for dense, layernorm_dense, layernorm_mlp: asked for; {ours}" in lines
    assert [line.split()[0] for line in lines if "the output head" in line] == [head]


def test_precision_options_that_do_not_go_together(tmp_path, capsys):
    for argv, text in {
        ("--fp8-param",): "--fp8-param is for runs that quantize",
        ("--recipe", "mxfp8", "--fp8-accumulation", "fast"): "--fp8-accumulation is for --recipe delayed or current",
        ("--recipe", "current", "--no-rht"): "--rht is for --recipe nvfp4",
        ("--recipe", "current", "--bf16-layers-start", "2"): "leave none of --num-layers 1",
        (
            "--recipe",
            "nvfp4",
            "--ffn-hidden-size",
            "48",
        ): "by 32, as it must be for --recipe nvfp4; the next multiple is 64",
        ("--precision-config", "nowhere.yaml"): "nowhere.yaml: No such file or directory",
    }.items():
        assert_refused(train(tmp_path / "run", *argv), capsys.readouterr().err, text)
    assert not (tmp_path / "run").exists()
