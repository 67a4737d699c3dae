"""The command that installs Transformer Engine, with a pip that only writes down what it is told."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jax_te.cli import install_te

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A function that returns the calls of pip and of doctor; the third argument of the command is the exit status."""
    log = tmp_path / "log"
    script = (
        "import json, os, sys\n"
        f"with open({str(log)!r}, 'a') as file:\n"
        "    file.write(json.dumps([os.environ.get('NVTE_BUILD_USE_NVIDIA_WHEELS'), sys.argv[1:]]) + '\\n')\n"
        f"raise SystemExit(int(os.environ.get('FAKE_STATUS', '0')))\n"
    )
    for name in ("pip", "jax_te"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "__main__.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # the working directory has another jax_te
    return lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_runs_the_recipe(cuda, calls, monkeypatch, capsys):
    monkeypatch.setattr(install_te, "problems_of_installing", lambda system: [])
    assert install_te.main(["--cuda", cuda]) == 0
    first, second, third = calls()
    assert first == [None, ["install", *install_te.REQUIREMENTS[cuda]]]
    assert second == ["1", ["install", "--no-build-isolation", f"transformer-engine[core-cu{cuda},jax]==2.20.2"]]
    assert third == [None, ["doctor"]]
    out = capsys.readouterr().out
    assert f"installing into {sys.prefix}" in out
    assert f"done: Transformer Engine 2.20.2 for CUDA {cuda}" in out
    assert ("not run on a GPU" in out) == (cuda == "12")


def test_a_step_that_fails_ends_it(calls, monkeypatch, capsys):
    monkeypatch.setattr(install_te, "problems_of_installing", lambda system: [])
    monkeypatch.setenv("FAKE_STATUS", "7")
    assert install_te.main([]) == 7
    assert len(calls()) == 1
    assert "failed with status 7: JAX with its CUDA libraries" in capsys.readouterr().err


def test_a_dry_run_runs_nothing(calls, capsys):
    assert install_te.main(["--dry-run"]) == 0
    assert calls() == []
    out = capsys.readouterr().out
    assert "NVTE_BUILD_USE_NVIDIA_WHEELS=1 " in out
    assert out.endswith("nothing was run\n")


def test_refuses_before_it_touches_anything(calls, monkeypatch, capsys):
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(sys, "version_info", (3, 11))
    monkeypatch.setattr(install_te.shutil, "which", lambda name: None)
    assert install_te.main([]) == 2
    assert calls() == []
    err = capsys.readouterr().err
    assert "no virtual environment is active: make one, or give --system to install into" in err
    assert "needs Python 3.12" in err
    assert "there is no C++ compiler" in err
    install_te.main(["--system", "--dry-run"])
    assert "no virtual environment" not in capsys.readouterr().err


def test_the_extras_and_the_page_have_the_same_versions():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {cuda: tuple(extras[f"te-cu{cuda}"]) for cuda in ("12", "13")} == install_te.REQUIREMENTS
    page = (ROOT / "docs" / "install.md").read_text()
    for requirement in install_te.REQUIREMENTS["13"]:
        assert requirement in page
    assert "safetensors" not in str(extras)


@pytest.mark.costly("wheels0-None-curand", slow=("wheels1-mine-mine", "wheels2-None-None"))
@pytest.mark.parametrize(
    ("wheels", "given", "seen"),
    [
        (["curand", "cuda_runtime"], None, "curand"),  # of CUDA 12, whose runtime TE would look for elsewhere
        (["curand", "cuda_runtime"], "mine", "mine"),
        (["curand", "cuda_runtime", "cu13"], None, None),
        (["curand"], None, None),
    ],
)
def test_te_finds_the_libraries_of_cuda_12s_wheels(wheels, given, seen, tmp_path):
    """In an environment that ends with the import."""
    for wheel in wheels:
        (tmp_path / "nvidia" / wheel / "lib").mkdir(parents=True)
    for name in ("transformer_engine", "transformer_engine/jax"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("import os; print(os.environ.get('CURAND_HOME'))\n")
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "CURAND_HOME")}
    environment |= {"PYTHONPATH": f"{tmp_path}:{ROOT}"} | ({} if given is None else {"CURAND_HOME": given})
    code = "import jax_te.ops, os; print(os.environ.get('CURAND_HOME'))"
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    expected = str(tmp_path / "nvidia" / "curand") if seen == "curand" else str(seen)
    assert found.stdout.split() == [expected, expected, str(given)]


def test_help_is_plain_text(capsys):
    with pytest.raises(SystemExit):
        install_te.main(["--help"])
    shown = capsys.readouterr().out
    assert "Install Transformer Engine for JAX" in shown
    assert "`" not in shown
