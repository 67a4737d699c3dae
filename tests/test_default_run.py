"""No public name is left to tests that are marked slow or costly: they stand beside a test of the default run."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def public_names() -> set[str]:
    """Names in the ``__all__`` of every subpackage; that of ``jax_te`` itself is made of theirs."""
    names: set[str] = set()
    for path in (ROOT / "jax_te").glob("*/**/__init__.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names |= {*ast.literal_eval(node.value)}
    return names


def left_out(node: ast.AST) -> bool:
    """Whether a decorator marks a test as slow or costly; one that names cases leaves the others in the default run."""
    for decorator in getattr(node, "decorator_list", ()):
        mark, cases = (decorator.func, decorator.args) if isinstance(decorator, ast.Call) else (decorator, [])
        if ast.unparse(mark) in ("pytest.mark.slow", "pytest.mark.costly") and not cases:
            return True
    return False


def names_in(code: str) -> tuple[set[str], set[str]]:
    """Names that a file's tests use and what stands beside them: in the default run, and in what is left out of it.

    Imports alone are no use.
    """
    uses: tuple[set[str], set[str]] = (set(), set())
    for node in ast.parse(code).body:
        parts = [*ast.walk(node)]
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        uses[left_out(node)].update(names, (part.attr for part in parts if isinstance(part, ast.Attribute)))
    return uses


def test_no_public_name_is_used_by_what_is_left_out_alone() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.py") if path.relative_to(ROOT).parts[1] not in ("te", "gpu")]
    uses = [names_in(path.read_text()) for path in files]
    default, others = (set().union(*names) for names in zip(*uses, strict=True))
    assert len(public_names() & default) > 200
    assert not (public_names() & others) - default, "add a test of these names to the default run, or unmark one"


def test_a_test_that_is_left_out_is_no_use() -> None:
    code = (
        "from a import B, C, D\n\n@pytest.mark.costly\ndef test(): B()\n\n@pytest.mark.costly('x')\ndef test_c(): C()\n"
    )
    default, others = names_in(code)
    assert (default & {"B", "C", "D"}, others & {"B", "C", "D"}) == ({"C"}, {"B"})
