"""jax-te doctor."""

import jax
import pytest

from jax_te.cli import doctor
from jax_te.cli.main import main
from jax_te.ops import OPS
from jax_te.recipe import RECIPES, DelayedScaling


@pytest.mark.slow
def test_it_reports_versions_devices_backends_and_recipes(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert jax.__version__ in text
    for name in ("devices", "transformer_engine", *OPS):
        assert name in text
    for recipe in RECIPES:
        assert f"{recipe} on xla" in text
        assert f"{recipe} on te" in text
    lines = text.splitlines()
    for recipe in (kind() for kind in RECIPES.values() if kind):
        support = recipe.supports()
        line = next(line for line in lines if line.split()[:2] == [recipe.name, "native:" if support else "emulated:"])
        assert support.reason in line


@pytest.mark.costly("nvfp4")
@pytest.mark.parametrize("recipe", [kind() if kind else None for kind in RECIPES.values()], ids=list(RECIPES))
def test_recipes_are_really_run(recipe):
    works, text = doctor.try_recipe(recipe, "xla")
    assert works
    assert text.startswith("runs")


def test_a_trial_compiles_nothing_else(caplog):
    """Not its arguments, and not the check of its results: small programs are most of the time of a start."""
    with jax.log_compiles():
        assert doctor.try_recipe(DelayedScaling(margin=1), "xla")[0]
    assert caplog.text.count("Finished XLA compilation") == 1


def test_a_backend_that_is_missing_says_what_to_do(monkeypatch):
    reason = "transformer_engine is not installed (see docs/install.md)"
    monkeypatch.setattr("jax_te.ops.te.available", lambda: (False, reason))
    works, text = doctor.try_recipe(None, "te")
    assert not works
    assert text.startswith("no: ")
    assert reason in text


def test_a_broken_backend_is_reported_and_fails(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("libcudnn is\nmissing")

    monkeypatch.setattr(doctor, "dense", broken)
    assert main(["doctor"]) == 1
    assert "fails: RuntimeError: libcudnn is missing" in capsys.readouterr().out


def test_a_wrong_result_is_reported(monkeypatch):
    monkeypatch.setattr(doctor, "dense", lambda x, kernel, **_: x @ kernel * 0.5)
    works, text = doctor.try_recipe(None, "xla")
    assert not works
    assert "256 where 1024" in text
