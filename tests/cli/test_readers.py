"""What files and command lines may hold: a value, or one clear error; never code that runs, a traceback or a hang."""

import json
import sys

import pytest

from jax_te.cli.main import main
from jax_te.cli.run_files import CONFIG_FILE, _crc32
from tests.support.runs import MICRO, assert_refused

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


@pytest.mark.parametrize("command", ["train", "sample", "inspect", "inspect --recipes", "inspect --sharding"])
def test_no_file_of_a_run_makes_code_run(command, planted, trained, tmp_path, capsys):
    """The rules in a run's folder name a factory. Only a command line that names its module has it imported."""
    values = json.loads((trained / CONFIG_FILE).read_text()) | {"precision_config": RULES}
    del values["version"], values["crc32"]
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(trained / "checkpoints")
    for version in ({}, {"version": 1, "crc32": _crc32(values)}):
        (run / CONFIG_FILE).write_text(json.dumps(version | values))
        capsys.readouterr()
        status = main([*command.split(), "--output", str(run)])
        assert_refused(status, capsys.readouterr().err, "custom_recipe_factory 'planted.factory'", "--factory-modules")
        assert not planted.exists()
    main([*command.split(), "--output", str(run), "--factory-modules", "another,planted"])
    assert planted.exists()


def test_a_precision_file_may_name_a_factory_of_an_allowed_module(planted, tmp_path, capsys):
    (tmp_path / "rules.yaml").write_text(RULES)
    argv = ["train", *MICRO, "--output", str(tmp_path / "run"), "--precision-config", str(tmp_path / "rules.yaml")]
    assert_refused(main(argv), capsys.readouterr().err, "planted.factory")
    assert not planted.exists()
