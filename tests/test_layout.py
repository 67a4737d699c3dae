"""The package's layout as docs/design.md states it: import direction, optional packages, public names."""

import ast
import fnmatch
import functools
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jax_te"
FILES = sorted(PACKAGE.rglob("*.py"))
TOP = ("jax_te", "tests", "docs", "examples", ".ci")


def rows() -> dict[str, int]:
    """Row of each top-level module or folder, from the line in docs/design.md."""
    text = (ROOT / "docs" / "design.md").read_text()
    order = re.search(r"## Layout and import direction\s+```\n(.*?)```", text, re.DOTALL)
    assert order, "docs/design.md has lost its import order"
    return {name.strip(): row for row, names in enumerate(order[1].split("→")) for name in names.split(",")}


@functools.cache
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
    """``jax_te.ops.te`` -> ``ops``, ``jax_te.interop.torch`` -> ``interop.torch``; names of ``jax_te`` -> ``""``."""
    parts = dotted.split(".")[1:3]
    parts = parts if parts[:1] == ["interop"] else parts[:1]
    path = PACKAGE.joinpath(*parts)
    return ".".join(parts) if parts and (path.is_dir() or path.with_suffix(".py").exists()) else ""


def room(path: Path) -> str:
    """Return the room of one of the package's files."""
    return component(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def public_names(package: str) -> set[str]:
    """``__all__`` of ``jax_te.PACKAGE``; no names for a package that lists none."""
    return set(getattr(importlib.import_module(f"jax_te.{package}"), "__all__", ()))


def module_imports(path: Path, *, for_types: bool = False) -> list[tuple[str, str]]:
    """Module and name of each ``from jax_te... import name`` that runs when the file is imported.

    Args:
        for_types: also those that type checkers alone read.
    """
    found, todo = [], list(ast.parse(path.read_text()).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax_te":
            found += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
            todo += node.orelse
        elif not isinstance(node, ast.FunctionDef):
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return found


def file_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_every_part_of_the_package_has_a_row():
    rooms = {room(path) for path in FILES} - {"", "__main__", "interop"}
    assert rooms == set(rows()), "name the new parts in docs/design.md's import order"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_left(path):
    order, here = rows(), room(path)
    if here in ("", "__main__"):
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


def offered(folder: Path) -> set[str]:
    """Return the names that a folder's ``__init__.py`` takes from the folder's own files, and its ``__all__``."""
    package = ".".join(folder.relative_to(ROOT).parts)
    imports = module_imports(folder / "__init__.py", for_types=True)
    own = {name for module, name in imports if module.startswith(f"{package}.")}
    return own | public_names(package.removeprefix("jax_te."))


@functools.cache
def imports_between_rooms(path: Path) -> list[tuple[int, str, list[str]]]:
    """Return line, module and names of each ``from jax_te.ROOM… import …`` of another room than the file's."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return [
        (node.lineno, node.module or "", [alias.name for alias in node.names])
        for node in nodes
        if (node.module or "").startswith("jax_te.") and component(node.module or "") != room(path)
    ]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_room_offers_what_others_import(path):
    """In the ``__init__.py`` of its folder, or of a folder in it: an import between rooms names no file."""
    if path == PACKAGE / "__main__.py":
        return  # the command line's entry
    for line, module, names in imports_between_rooms(path):
        folder = ROOT.joinpath(*module.split("."))
        if folder.with_suffix(".py").exists():  # a room of one file
            assert folder.parent == PACKAGE, f"{name_of(path)}:{line} imports from a file of another room, {module}"
            continue
        missing = set(names) - offered(folder)
        assert not missing, f"{name_of(path)}:{line} imports {sorted(missing)}, which {module} does not offer"


INITS = [path for path in FILES if path.name == "__init__.py" and path.parent != PACKAGE]


@pytest.mark.parametrize("path", INITS, ids=name_of)
def test_what_is_offered_is_for_users_or_used(path):
    """A name that a folder offers is in ``__all__``, for users, or another room imports it."""
    package = ".".join(path.parent.relative_to(ROOT).parts)
    taken = {
        name
        for file in FILES
        if path.parent not in file.parents
        for _, module, names in imports_between_rooms(file)
        if module == package
        for name in names
    }
    assert not offered(path.parent) - public_names(package.removeprefix("jax_te.")) - taken


def test_no_files_import_each_other_in_a_circle():
    edges = {}
    for path in FILES:
        imports = module_imports(path)
        files = {file_of(f"{module}.{name}") for module, name in imports}
        files |= {file_of(module) for module, name in imports if not file_of(f"{module}.{name}").exists()}
        edges[path] = [file for file in files if file.exists() and file != path]
    # Files whose imports are all taken away are in no circle; what is left is the circles, and those that import them.
    while free := [path for path, files in edges.items() if not set(files) & edges.keys()]:
        for path in free:
            del edges[path]
    assert not edges, sorted(map(name_of, edges))


WRITTEN = "\n".join(
    path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*.py")]
)


@pytest.mark.parametrize("package", sorted({*map(room, FILES), "training.pipeline"} - {"", "__main__", "interop"}))
def test_public_names_are_in_a_written_page(package):
    """In the README, in a page of docs/ (those generated from docstrings do not count) or in an example."""
    if package == "typing" or package.startswith("_"):
        return  # typing's are in every signature; those of a name that begins with _ are for the package alone
    missing = public_names(package) - set(re.findall(r"\w+", WRITTEN))
    assert not missing, f"say in a page of docs/ what these are for, or keep them internal: {sorted(missing)}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_optional_packages(path):
    for line, dotted in imported(path):
        top = dotted.split(".")[0]
        # A program that another process runs, and that is not a part of the library.
        program = path == PACKAGE / "bench" / "peers" / "megatron_core.py"
        assert program or top not in ("torch", "megatron"), f"{name_of(path)}:{line} imports {dotted}"
        if top in ("transformer_engine", "transformer_engine_jax"):
            peer = program or (path.parent == PACKAGE / "bench" / "peers" and path.name.startswith("te_jax"))
            assert peer or path.parent == PACKAGE / "ops" / "te", (
                f"{name_of(path)}:{line} imports {dotted}; only jax_te/ops/te and jax_te/bench/peers may"
            )


def test_the_program_of_megatron_runs_without_the_library():
    """Nor does it need what it measures before it has said what is missing: such imports are in its functions."""
    path = PACKAGE / "bench" / "peers" / "megatron_core.py"
    assert not [dotted for _, dotted in imported(path) if dotted.split(".")[0] == "jax_te"]
    nodes = ast.parse(path.read_text()).body
    at_top = [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not [line for line in at_top if any(name in line for name in ("torch", "megatron", "transformer_engine"))]


def test_te_is_imported_by_its_kernels_only():
    """Of ops/te, the files that are read before TE is known to load must not import it at their top level."""
    for name in ("__init__.py", "load.py"):
        tree = ast.parse((PACKAGE / "ops" / "te" / name).read_text())
        names = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [line for line in names if "transformer_engine" in line or "kernels" in line]


def test_ops_know_nothing_of_flax():
    free = ("ops", "random.py", "recipe", "config", "_validation", "typing.py", "errors.py")
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] in free:
            assert not [dotted for _, dotted in imported(path) if dotted.split(".")[0] == "flax"], name_of(path)


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("**/*.md"))], ids=name_of)
def test_pages_have_short_lines(path):
    """But for the rows of docs/parity*.md, some of whose names alone are longer, and the links of docs/errors.md, which
    docs/conf.py writes.
    """
    if path.name == "errors.md" and path.parent.name == "docs":
        return
    exempt = "|" if path.name.startswith("parity") else ()
    lines = enumerate(path.read_text().splitlines(), 1)
    long = [number for number, line in lines if len(line) > 120 and not line.startswith(exempt)]
    assert not long, f"{name_of(path)} has more than 120 columns in lines {long}"


def braces(path: str) -> list[str]:
    """The paths that a shell makes of one with braces."""
    found = re.match(r"(.*?)\{(.*?)\}(.*)", path)
    return (
        [path] if found is None else [one for part in found[2].split(",") for one in braces(found[1] + part + found[3])]
    )


def test_paths_in_pages_exist():
    """A page may leave out the folders in front that its reader knows: `jax_te/`, or those in a table's heading."""
    there = [f"/{path.relative_to(ROOT)}" for top in TOP for path in (ROOT / top).rglob("*")]
    # What begins with one of our folders, and Python files in any folder; those of parity*.md have a test of their own.
    path = re.compile(rf"`((?:{'|'.join(map(re.escape, TOP))})/[^`\s:]+|[^`\s]+/[^`\s]+\.py)(?=[`:])")
    missing = {}
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        named = [one for found in path.findall(page.read_text()) if "NAME" not in found for one in braces(found)]
        missing |= {one: page.name for one in named if not fnmatch.filter(there, f"*/{one.rstrip('/')}")}
    assert not missing


@pytest.mark.parametrize("path", [path for path in FILES if path.name == "__init__.py"], ids=name_of)
def test_folders_list_their_public_names(path):
    module = importlib.import_module(".".join(path.parent.relative_to(ROOT).parts))
    names = getattr(module, "__all__", [])
    assert not [name for name in names if not hasattr(module, name)], "listed but not there"
    assert len(set(names)) == len(names)
