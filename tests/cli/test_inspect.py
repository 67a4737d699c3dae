"""jax-te inspect on a micro run."""

import dataclasses
import json
import re

import pytest
import yaml

from jax_te.cli.build import abstract_state, contexts
from jax_te.cli.main import main
from jax_te.cli.run_checks import check_precision
from jax_te.cli.run_files import read_config
from jax_te.layers import expert_rows
from jax_te.megatron import load_quantization_recipe
from jax_te.sharding import sharding_report
from tests.support.runs import MICRO, assert_refused, configured
from tests.support.storage import bytes_read, stored_bytes

OPTIONS = ["--num-layers", "2", "--steps", "4", "--recipe", "current", "--bf16-layers-start", "1", "--fp8-param"]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """The folder of a finished run under current scaling whose first layer is not quantized."""
    output = tmp_path_factory.mktemp("runs") / "quantized"
    assert main(["train", "--output", str(output), *MICRO, *OPTIONS]) == 0
    return output


def inspect(output, report, *argv):
    return main(["inspect", report, "--output", str(output), *map(str, argv)])


def as_json(capsys, output, report, *argv):
    capsys.readouterr()
    assert inspect(output, report, *argv, "--json") == 0
    return json.loads(capsys.readouterr().out)


def rules(folder, pattern, recipe="{}"):
    payload = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": yaml.safe_load(recipe)}
    rule = {"enabled": True, "type": "glob", "pattern": pattern, "config": "mine"}
    (folder / "rules.yaml").write_text(yaml.safe_dump({"configs": {"mine": payload}, "matchers": {"rule": rule}}))
    return folder / "rules.yaml"


@pytest.mark.slow
def test_a_table_of_every_quantized_tensor(quantized, capsys):
    capsys.readouterr()
    with bytes_read() as read:
        assert inspect(quantized, "precision") == 0
    # Quantized parameters and their masters, not the optimizer's two moments.
    assert read[0] < 0.5 * stored_bytes(quantized / "checkpoints" / "4")
    shown = capsys.readouterr()
    header, ruler, *rows = shown.out.splitlines()
    assert header.split() == ["module", "tensor", "format", "amax", "scale", "underflow", "%", "saturation", "%",
                              "error", "dB"]  # fmt: skip
    assert set(ruler) == {"-", " "}
    assert len(rows) == 4 * 3
    assert rows[0].split()[:3] == ["layers.1.layernorm_mlp.wi_kernel", "x", "e4m3"]
    assert rows[2].split()[1:3] == ["grad", "e5m2"]
    assert shown.err == f"{quantized}, step 4, recipe current\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "low", "high", "lost"),
    [pytest.param("delayed", -36, -20, 0.3, marks=pytest.mark.slow), ("nvfp4", -25, -10, 0.5)],
)
def test_another_recipe_on_the_same_model(quantized, capsys, recipe, low, high, lost):
    """E2M1 loses what is below 1/24 of the largest of its block: a good part of a gradient."""
    found = as_json(capsys, quantized, "precision", "--recipe", recipe, "--batch-size", "2")
    assert (found["recipe"], found["step"]) == (recipe, 4)
    assert len(found["tensors"]) == 12
    for tensor in found["tensors"]:
        assert low < tensor["error_db"] < high
        assert tensor["underflow"] < lost


@pytest.mark.costly
def test_recipes_and_why(quantized, tmp_path, capsys):
    modules = {module.pop("module"): module for module in as_json(capsys, quantized, "recipes")["modules"]}
    assert modules["layers.0.layernorm_mlp"] == {
        "kind": "LayerNormMLP",
        "training": "high precision",
        "evaluation": "high precision",
        "why": "kept in high precision, as a first or last layer",
    }
    assert modules["layers.1.self_attention.proj"]["why"] == "the ambient recipe"
    file = rules(tmp_path, "layers.1.*mlp", "{fp8_quantization_recipe: mxfp8}")
    assert inspect(quantized, "recipes", "--precision-config", file) == 0
    report, table = capsys.readouterr().out.split("\n\n")
    assert "layers left to the ambient recipe: layers.0.layernorm_mlp" in report
    assert any(line.split()[:4] == ["layers.1.layernorm_mlp", "LayerNormMLP", "mxfp8", "mxfp8"] for line in
               table.splitlines())  # fmt: skip
    assert as_json(capsys, quantized, "recipes", "--precision-config", file)["rules"][3]["matcher"] == "rule"


@pytest.mark.slow
def test_another_precision_file_on_the_same_model(quantized, tmp_path, capsys):
    found = as_json(capsys, quantized, "precision", "--precision-config", rules(tmp_path, "*qkv"))
    assert {tensor["module"] for tensor in found["tensors"]} == {
        "layers.1.layernorm_mlp.wi_kernel", "layers.1.layernorm_mlp.wo_kernel", "layers.1.self_attention.proj"
    }  # fmt: skip
    assert found["unused_matchers"] == []


@pytest.mark.slow
def test_sensitivity_writes_rules_that_train_takes(quantized, tmp_path, capsys):
    file = tmp_path / "keep.yaml"
    found = as_json(capsys, quantized, "sensitivity", "--batches", "1", "--keep-bf16", "2", "--write", file)
    errors = [module["gradient_error"] for module in found["modules"]]
    assert errors == sorted(errors, reverse=True)
    assert len(errors) == 6
    assert all(1e-5 < error < 1.0 for error in errors)
    assert found["keep_bf16"] == [module["module"] for module in found["modules"][:2]]
    assert [matcher.pattern for matcher in load_quantization_recipe(file).matchers] == found["keep_bf16"]
    assert "at step 4" in file.read_text()
    run = configured(tmp_path / "run", *MICRO, *OPTIONS[:4], "--recipe", "current", "--precision-config", file)
    capsys.readouterr()
    with contexts(run):
        check_precision(run)
    assert capsys.readouterr().err == ""
    modules = as_json(capsys, tmp_path / "run", "recipes")["modules"]
    kept = {module["module"] for module in modules if module["training"] == "high precision"}
    assert kept == set(found["keep_bf16"])
    assert {module["why"] for module in modules} == {"its own rule", "the ambient recipe"}


@pytest.mark.costly
def test_sensitivity_as_a_table(quantized, capsys):
    capsys.readouterr()
    assert inspect(quantized, "sensitivity", "--batches", "1", "--keep-bf16", "1") == 0
    header, _, first, second, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["module", "class", "keep", "gradient", "error", "loss", "increase"]
    assert first.split()[2] == "bf16"
    assert "bf16" not in second


@pytest.mark.costly(
    "precision-argv0-texts0", slow=("precision-argv2-texts2", "sensitivity-argv5-texts5", "precision-argv1-texts1")
)
@pytest.mark.parametrize(
    ("report", "argv", "texts"),
    [
        ("precision", ["--output", "nowhere"], ["nowhere holds no run", "jax-te train --output nowhere"]),
        ("precision", ["--recipe", "mxfp8", "--data", "no/such"], ["no such file or folder", "no/such"]),
        ("precision", ["--precision-config", "no.yaml"], ["no.yaml: No such file"]),
        ("sensitivity", ["--write", "new.yaml"], ["--write", "--keep-bf16"]),
        ("sensitivity", ["--keep-bf16", "1", "--write", __file__], ["--write", "exists"]),
        ("sensitivity", ["--keep-bf16", "7"], ["--keep-bf16 7", "6 layers"]),
        ("sharding", ["--mesh", "experts=2"], ["unknown mesh axis 'experts'"]),
        ("sharding", ["--output", "nowhere"], ["nowhere holds no run", "--preset"]),
        ("sharding", ["--preset", "tiny"], ["--output", "--preset", "one of them"]),
    ],
)
def test_what_is_refused(quantized, report, argv, texts, capsys):
    argv = argv if "--output" in argv else ["--output", str(quantized), *argv]
    status = main(["inspect", report, *argv])
    error = capsys.readouterr().err.removeprefix(f"{quantized}, step 4, recipe current\n")
    error = error.removeprefix(f"{quantized}, step 4, recipe mxfp8\n")
    assert_refused(status, error, *texts)


@pytest.mark.slow
def test_a_run_that_quantizes_nothing_needs_a_recipe(trained, capsys):
    for report in ("precision", "sensitivity"):
        status = inspect(trained, report)
        error = capsys.readouterr().err.removeprefix(f"{trained}, step 12, recipe high precision\n")
        assert_refused(status, error, "--recipe")
    found = as_json(capsys, trained, "precision", "--recipe", "current")
    assert len(found["tensors"]) == 12
    assert inspect(trained, "recipes") == 0
    assert "no ambient recipe" in capsys.readouterr().out


@pytest.mark.slow
def test_tokens_that_a_recipe_pads(trained, tmp_path, capsys):
    configured(tmp_path, *MICRO, "--seq-len", "24")
    (tmp_path / "checkpoints").symlink_to(trained / "checkpoints")  # rotary positions: a state for every length
    capsys.readouterr()
    assert inspect(tmp_path, "precision", "--recipe", "mxfp8", "--batch-size", "1") == 0
    assert "mxfp8" in capsys.readouterr().err


def test_how_a_run_is_split(quantized, capsys):
    capsys.readouterr()
    assert inspect(quantized, "sharding", "--mesh", "fsdp=2,context=2,tensor=2") == 0
    shown = capsys.readouterr()
    assert shown.err == f"{quantized}, training state\n"
    table, totals, *pictures = shown.out.strip().split("\n\n")
    assert any(line.split()[0] == "opt_state.1.0.mu.layers.1.layernorm_mlp.wo_kernel" for line in table.splitlines())
    assert totals.splitlines()[0] == "8 devices: pipeline=1, data=1, fsdp=2, expert=1, context=2, tensor=2"
    drawn = next(picture for picture in pictures if picture.startswith("(fsdp, -, tensor)"))
    assert drawn.splitlines()[1:] == ["        tensor=0  tensor=1", "fsdp=0  0 2       1 3", "fsdp=1  4 6       5 7"]
    whole = as_json(capsys, quantized, "sharding")
    assert whole["mesh"] == {"pipeline": 1, "data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
    assert whole["bytes"] == whole["bytes_per_device"] == sum(array["bytes"] for array in whole["arrays"])
    held = next(array for array in whole["arrays"] if array["path"].startswith("params.layers.1.layernorm_mlp.wo_kern"))
    assert held["path"].endswith("wo_kernel.form.rowwise.data")
    assert (held["dtype"], held["logical_axes"]) == ("float8_e4m3fn", ["ffn_fsdp", None])


@pytest.mark.costly
def test_how_a_run_with_options_of_its_mesh_would_be_split_over_another(tmp_path, capsys):
    options = ("--sequence-parallel", "--cp-load-balanced", "--cp-comm-type", "a2a", "--mesh-axis-type", "explicit")
    configured(tmp_path, "--mesh", "tensor=2,context=2", *options)
    for mesh in ([], ["--mesh", "data=2"]):
        assert main(["inspect", "sharding", "--output", str(tmp_path), "--json", *mesh]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["mesh"]["tensor"] == (1 if mesh else 2)


@pytest.mark.costly
@pytest.mark.parametrize("mesh", ["data=4", pytest.param("data=2,tensor=2", marks=pytest.mark.slow), "tensor=2"])
def test_a_distributed_optimizer_is_split_as_in_training(mesh, tmp_path, capsys):
    """On the run's own mesh and on another one; fp32 parameters have masters for it where there is a data axis."""
    configured(tmp_path, "--mesh", "data=4", "--distributed-optimizer")
    given = [] if mesh == "data=4" else ["--mesh", mesh]
    assert main(["inspect", "sharding", "--output", str(tmp_path), "--json", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    has_data = "data" in mesh
    run = dataclasses.replace(read_config(tmp_path), mesh=mesh, distributed_optimizer=has_data)
    with contexts(run) as on:
        wanted = sharding_report(abstract_state(run), on)
    assert found["bytes_per_device"] == wanted.bytes_per_device
    assert {array["path"]: array["mesh_axes"] for array in found["arrays"]} == {
        array.path: array.mesh_axes for array in wanted.arrays
    }
    assert any(array["path"].startswith("masters") for array in found["arrays"]) is has_data


def test_a_mesh_is_not_refused_for_the_batch_of_a_run_on_another(tmp_path, capsys):
    """The arrays of its state do not depend on it."""
    aligned = ("--recipe", "mxfp8", "--mesh", "data=4", "--batch-size", "4", "--seq-len", "16")
    configured(tmp_path, *aligned)
    assert main(["inspect", "sharding", "--output", str(tmp_path), "--mesh", "tensor=2"]) == 0


@pytest.mark.slow
def test_rows_of_experts_are_those_of_the_run(tmp_path, capsys):
    """A run's batch is that of all devices, and its dispatcher says how many rows a device has, on each mesh."""
    experts = ("--num-experts", "4", "--moe-ffn-hidden-size", "64", "--moe-token-dispatcher-type", "alltoall")
    experts += ("--moe-expert-rank-capacity-factor", "1.5", "--batch-size", "8", "--seq-len", "32")
    configured(tmp_path, "--mesh", "data=2,expert=2", *experts)
    for mesh, batch in (("data=2,expert=2", 8), ("data=4,expert=2", 16)):
        for given in [["--mesh", mesh]] if batch == 16 else [[], ["--mesh", mesh]]:
            assert main(["inspect", "sharding", "--output", str(tmp_path), "--json", *given]) == 0
            found = json.loads(capsys.readouterr().out)["expert_rows"]
            run = dataclasses.replace(read_config(tmp_path), mesh=mesh, batch_size=batch)
            with contexts(run):
                wanted = expert_rows(abstract_state(run).model, batch, 32, dtype=run.compute_dtype)
            assert found == json.loads(json.dumps([dataclasses.asdict(rows) for rows in wanted]))
            assert found


def test_how_a_preset_would_be_split(tmp_path, monkeypatch, capsys):
    """It needs no run, and no devices."""
    monkeypatch.chdir(tmp_path)
    options = ["inspect", "sharding", "--preset", "tiny", "--json"]
    assert main([*options, "--mesh", "data=4,fsdp=16,tensor=4"]) == 0
    found = json.loads(capsys.readouterr().out)
    arrays = {array["path"]: array for array in found["arrays"]}
    kernel = arrays["params.layers.3.layernorm_mlp.wi_kernel"]
    assert kernel == {
        "path": "params.layers.3.layernorm_mlp.wi_kernel",
        "shape": [128, 2, 384],
        "dtype": kernel["dtype"],
        "logical_axes": ["fsdp", "components", "ffn"],
        "mesh_axes": "fsdp, -, tensor",
        "bytes": kernel["bytes"],
        "bytes_per_device": kernel["bytes"] // 64,
    }
    assert_refused(main([*options, "--mesh", "tensor=8"]), capsys.readouterr().err, "--num-query-groups 4", "tensor=8")


def test_a_pipeline_runs_every_microbatch_once_on_each_stage(capsys):
    given = ["inspect", "pipeline", "--stages", "2", "--microbatches", "4", "--schedule", "1f1b,virtual_stages=2"]
    assert main(given) == 0
    stages = [line.split() for line in capsys.readouterr().out.splitlines()[-2:]]
    tasks = sorted(f"{kind}{microbatch}.{chunk}" for kind in "FB" for microbatch in range(4) for chunk in range(2))
    for number, cells in enumerate(stages):
        assert cells[0] == str(number)
        assert sorted(re.findall(r"[FBW]\d+\.\d", "".join(cells[1:]))) == tasks
    assert main([*given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["idle"] == pytest.approx(1 / 9)


def test_a_pipeline_that_cannot_be_is_one_line(capsys):
    assert main(["inspect", "pipeline", "--microbatches", "3", "--schedule", "1f1b,virtual_stages=2"]) == 2
    assert "microbatches=3 must be a multiple of the 4 pipeline stages" in capsys.readouterr().err
