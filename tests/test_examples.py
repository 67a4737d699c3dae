"""Every example runs, in a process of its own, and finds what it promises."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_their_readme_lists_every_example():
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert len(EXAMPLES) == 13
    assert [path.name for path in EXAMPLES if f"({path.name})" not in text] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_can_be_read_as_a_page(path: Path):
    """It is short, and says at the top how to run it."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 200
    assert f"    python examples/{path.name}\n" in text.split('"""')[1]
    # One that fails says what should be: `python -O` would leave assertions out.
    assert not [node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assert)]


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_finds_what_it_promises(path: Path, tmp_path: Path):
    """Run as a user does, from another folder; the last line is printed after its checks."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",  # plain code, what tests run by default, takes longer to train
    }
    finished = subprocess.run(
        [sys.executable, str(path)],
        env=environment,
        cwd=tmp_path,
        text=True,
        capture_output=True,
        check=False,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert finished.stdout.splitlines()[-1].startswith("ok: ")
    assert list(tmp_path.iterdir()) == []
