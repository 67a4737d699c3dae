"""Names that `jax_te` has itself, and when they are imported."""

import ast
import importlib
import subprocess
import sys

import pytest

import jax_te


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
    assert run.stdout.split() == []


def test_an_unknown_name_is_an_attribute_error():
    for package in ("jax_te", "jax_te.recipe"):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            importlib.import_module(package).nothing  # noqa: B018
