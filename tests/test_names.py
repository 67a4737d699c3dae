"""Names of the package: those that `jax_te` has itself, and those that moved."""

import ast
import importlib
import subprocess
import sys
import warnings

import pytest

import jax_te
from jax_te._names import MOVED


def test_names_for_type_checkers_are_those_at_run_time():
    with open(jax_te.__file__) as file:
        (block,) = [node for node in ast.parse(file.read()).body if isinstance(node, ast.If) and node.orelse]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    # "A as A" is what type checkers take for a public name; ``__all__`` is computed, which they do not follow.
    assert all(alias.name == alias.asname for node in imports for alias in node.names)
    stated = {(alias.name, node.module) for node in imports for alias in node.names}
    assert stated == {(name, f"jax_te.{package}") for package, names in jax_te._EXPORTS.items() for name in names}
    assert len(stated) == len(jax_te.__all__)


def test_names_are_those_of_the_packages():
    for package, names in jax_te._EXPORTS.items():
        module = importlib.import_module(f"jax_te.{package}")
        assert set(names) <= set(module.__all__)
        assert all(getattr(jax_te, name) is getattr(module, name) for name in names)
    assert set(jax_te.__all__) <= set(dir(jax_te))


def test_importing_the_package_imports_none_of_its_parts():
    code = "import sys, jax_te; print(*[name for name in sys.modules if name.startswith('jax') and name != 'jax_te'])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() in (["jax_te._names"], [])


@pytest.mark.parametrize(("old", "new"), MOVED.items(), ids=lambda pair: ".".join(pair))
def test_a_name_that_moved_warns_and_is_the_new_one(old: tuple[str, str], new: tuple[str, str]):
    package, name = old
    module = importlib.import_module(package)
    assert name not in vars(module)
    assert name not in getattr(module, "__all__", [])
    if not new[0]:
        with pytest.raises(AttributeError, match=rf"{package}\.{name} is gone"):
            getattr(module, name)
        return
    with pytest.warns(DeprecationWarning, match=rf"{package}\.{name} is {new[0]}\.{new[1]} now"):
        found = getattr(module, name)
    with warnings.catch_warnings(action="error"):
        assert found is getattr(importlib.import_module(new[0]), new[1])


def test_the_warning_points_at_the_users_line():
    # In a process of its own: here the run-time type checker stands between the caller and the function.
    code = "from jax_te.training import TextData\nimport jax_te\njax_te.MMParams"
    run = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True)
    assert {line for line in run.stderr.splitlines() if line.startswith("<")} == {
        "<string>:1: DeprecationWarning: jax_te.training.TextData is jax_te.data.TextData now",
        "<string>:3: DeprecationWarning: jax_te.MMParams is jax_te.recipe.MMParams now",
    }


def test_an_unknown_name_is_an_attribute_error():
    for package in ["jax_te", *sorted({package for package, _ in MOVED})]:
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            importlib.import_module(package).nothing  # noqa: B018
