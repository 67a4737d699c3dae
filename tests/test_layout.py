"""The package's layout as docs/design.md states it: import direction, optional packages, file sizes."""

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jax_te"
FILES = sorted(PACKAGE.rglob("*.py"))
OLD = {"parallel"}  # packages that only say where their names are now


def rows() -> dict[str, int]:
    """Row of each top-level module or folder, from the line in docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text()
    order = re.search(r"## Layout and import direction\s+```\n(.*?)```", text, re.DOTALL)
    assert order, "docs/design.md has lost its import order"
    return {name.strip(): row for row, names in enumerate(order[1].split("→")) for name in names.split(",")}


def imported(path: Path) -> list[tuple[int, str]]:
    """Line and dotted name of every import in a file, also inside functions; relative imports made absolute."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = (*path.relative_to(ROOT).with_suffix("").parts,)[: -node.level]
                base = ".".join((*parts, base)).rstrip(".")
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found += [(node.lineno, str(arg.value)) for arg in node.args if isinstance(arg, ast.Constant)]
    return found


def component(dotted: str) -> str:
    """``jax_te.ops.te`` -> ``ops``; names that ``jax_te`` itself defines -> ``""``."""
    parts = dotted.split(".")
    return (
        parts[1] if len(parts) > 1 and ((PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").exists()) else ""
    )


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_part_of_the_package_has_a_row():
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES} - {"__init__", "__main__"}
    assert parts - OLD <= set(rows()), "name the new parts in docs/design.md's import order"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_left(path):
    order, here = rows(), path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if here in ("__init__", "__main__", *OLD):
        return  # the package's public names, and the command line's entry
    for line, dotted in imported(path):
        if dotted.split(".")[0] != "jax_te" or dotted == "jax_te.__version__":
            continue
        there = component(dotted)
        assert there, (
            f"{name_of(path)}:{line} imports {dotted} from the package's own __init__, not from where it is defined"
        )
        assert there == here or order[there] < order[here], (
            f"{name_of(path)}:{line} imports {dotted}: {there} is not left of {here}"
        )


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_optional_packages(path):
    for line, dotted in imported(path):
        top = dotted.split(".")[0]
        assert top not in ("torch", "megatron"), f"{name_of(path)}:{line} imports {dotted}"
        if top in ("transformer_engine", "transformer_engine_jax"):
            peer = path.parent == PACKAGE / "bench" / "peers" and path.name.startswith("te_jax")
            assert peer or path.parent == PACKAGE / "ops" / "te", (
                f"{name_of(path)}:{line} imports {dotted}; only jax_te/ops/te and jax_te/bench/peers may"
            )


def test_te_is_imported_by_its_kernels_only():
    """Of ops/te, the files that are read before TE is known to load must not import it at their top level."""
    for name in ("__init__.py", "load.py"):
        tree = ast.parse((PACKAGE / "ops" / "te" / name).read_text())
        names = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [line for line in names if "transformer_engine" in line or "kernels" in line]


def test_ops_know_nothing_of_flax():
    free = ("ops", "sharding", "remat", "random.py", "recipe", "config", "typing.py", "errors.py")
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] in free:
            assert not [dotted for _, dotted in imported(path) if dotted.split(".")[0] == "flax"], name_of(path)


@pytest.mark.parametrize("path", [*FILES, *sorted((ROOT / "tests").rglob("*.py"))], ids=name_of)
def test_file_size(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 600, f"{name_of(path)} has {len(lines)} lines; split it"


@pytest.mark.parametrize("path", [path for path in FILES if path.name == "__init__.py"], ids=name_of)
def test_folders_list_their_public_names(path):
    module = importlib.import_module(".".join(path.parent.relative_to(ROOT).parts))
    names = getattr(module, "__all__", [])
    assert not [name for name in names if not hasattr(module, name)], "listed but not there"
    assert len(set(names)) == len(names)
