"""docs/parity*.md: they are what docs/parity.yaml says, and what that says is there, is there, as it says."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

TESTS = Path(__file__).resolve().parent
DOCS = TESTS.parent / "docs"
TEXT = "\n".join(path.read_text() for path in sorted(DOCS.glob("parity*.md")))

specification = importlib.util.spec_from_file_location("parity_table", DOCS / "parity_table.py")
assert specification
assert specification.loader
parity_table = importlib.util.module_from_spec(specification)
sys.modules["parity_table"] = parity_table  # where its dataclasses look for their module
specification.loader.exec_module(parity_table)

DATA = parity_table.read()
ROWS = parity_table.rows_of(DATA)
ROW = {(row.name.document, row.name.section, row.name.name): row for row in ROWS}
CALLABLES = [row for row in ROWS if row.name.signature]

# What may be open: why -> the sections, or the first names of rows.
OPEN = {
    "single experts": {"is_expert"},
}

# Arguments of jax_te without a default that no document has: JAX has no global random state.
OF_JAX = {"rngs"}

NAME = re.compile(r"(jax_te(?:\.\w+)+)(?:\((\w+)=\))?")
TEST = re.compile(r"([\w/]*\w\.py)?::(test_\w+)")


def identify(row: Any) -> str:
    return f"{row.name.section}, {row.name.name}"


def find(dotted: str) -> Any:
    """What a dotted name stands for: the longest part of it that is a module, and attributes of that."""
    parts = dotted.split(".")
    for size in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError as error:
            if error.name is None or not dotted.startswith(error.name):
                raise
            continue
        return functools.reduce(getattr, parts[size:], found)
    raise AssertionError(f"{dotted} cannot be imported")


def signature(found: Any) -> inspect.Signature:
    """A function's signature; a class's is that of its constructor; without ``self``."""
    if inspect.isclass(found):
        found = functools.partial(found.__init__ if found.__init__ is not object.__init__ else found.__new__, None)
    return inspect.signature(found)


def said(value: Any) -> str:
    """A default as docs/parity.yaml writes it."""
    if value is inspect.Parameter.empty:
        return "none"
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    return repr(jnp.dtype(value).name if isinstance(value, type) else value)


def deviations(row: Any) -> dict[str, tuple[str | None, str | None]]:
    """Default and position of a function's arguments where they are not the document's, or None."""
    owner = find(row.place.rpartition(".")[0])
    bound = inspect.isclass(owner) and inspect.isfunction(inspect.getattr_static(owner, row.place.rpartition(".")[2]))
    ours = list(signature(find(row.place)).parameters.values())[bound:]  # without `self`
    names = [parameter.name for parameter in ours]
    differ, taken = {}, set()
    for index, there in enumerate(row.name.signature.parameters.values()):
        argument = there.name if row.name.name == row.name.section else f"{row.name.name}({there.name})"
        match = NAME.fullmatch(ROW[row.name.document, row.name.section, argument].place)
        assert match
        here = ours[names.index(match[2])]
        taken.add(here.name)
        default = None if said(here.default) == said(there.default) else said(here.default)
        position = None
        if here.kind is not there.kind:
            position = "keyword" if here.kind is inspect.Parameter.KEYWORD_ONLY else here.kind.description
        elif here.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and here is not ours[index]:
            position = str(names.index(here.name))
        if default or position:
            differ[argument] = (default, position)
    needed = {p.name for p in ours if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    assert needed <= taken | OF_JAX, f"{row.place} needs {needed - taken - OF_JAX}, which no document has"
    return differ


@functools.cache
def functions_in(file: str) -> set[str]:
    return {node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_the_pages_are_what_the_script_writes():
    found = {path.name: path.read_text() for path in DOCS.glob("parity*.md")}
    assert parity_table.pages(DATA) == found, "run python docs/parity_table.py, which writes docs/parity*.md"


def test_every_name_of_the_documents_has_one_row():
    """`rows_of` refuses names without a row, and rows without a name; the number says that no name is lost."""
    assert len(ROWS) == len(ROW) == 473
    for broken in ({"TENorm": {"eps": {}}}, {"TENorm": {"epsilon": {}}}, {"TENorm": {"config": {"why": ""}}}):
        data = {"documents": {"a": {"api": {"TENorm": {"at": "b", "names": "TENorm(config)"}}, "rows": broken}}}
        with pytest.raises(ValueError, match=r"no row|without a name|not keys"):
            parity_table.rows_of(data)


@pytest.mark.parametrize("row", CALLABLES, ids=identify)
def test_signatures_are_the_documents_or_a_row_says_how_they_differ(row: Any):
    """Names, order, defaults, keywords only."""
    of = [r for r in ROWS if (r.name.document, r.name.section) == (row.name.document, row.name.section)]
    mine = [r for r in of if r.name.owner == row.name.name]
    stated = {r.name.name: (r.default, r.position) for r in mine if r.default or r.position}
    assert stated == deviations(row)
    assert all(r.how != "the same" for r in mine if r.name.name in stated), "a row says why"
    assert row.default is row.position is None


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("config, hidden_size, eps=1e-5", {}),
        ("config, hidden_size, eps=1e-6", {"eps": ("1e-05", None)}),
        ("config, hidden_size, eps", {"eps": ("1e-05", None)}),
        ("config, hidden_size, *, eps=1e-5", {"eps": (None, "positional or keyword")}),
        ("hidden_size, config, eps=1e-5", {"hidden_size": (None, "1"), "config": (None, "0")}),
    ],
)
def test_the_checker_sees_defaults_order_and_keywords(arguments: str, expected: dict[str, Any]):
    row = ROW["core.extensions.transformer_engine", "TENorm", "TENorm"]
    name = dataclasses.replace(row.name, signature=inspect.signature(eval(f"lambda {arguments}: None")))
    assert deviations(dataclasses.replace(row, name=name)) == expected
    less = dataclasses.replace(row.name, signature=inspect.signature(lambda config, eps=1e-5: None))
    with pytest.raises(AssertionError, match=r"needs \{'hidden_size'"):
        deviations(dataclasses.replace(row, name=less))


@pytest.mark.parametrize("row", [row for row in ROWS if row.base], ids=identify)
def test_classes_have_the_documents_bases(row: Any):
    assert issubclass(find(row.place), find(row.base[1]))


def test_differences_between_documents_and_code_are_about_their_names():
    known = {(row.name.section, row.name.name) for row in ROWS}
    for sections, differences in DATA["drift"].items():
        for names, stated in differences.items():
            assert {(section, name) for section in sections.split(", ") for name in names.split(", ")} <= known
            assert stated.keys() == {"document", "code", "followed"}
            assert re.match(r"document$|code$|both$|neither, ", stated["followed"])


def test_every_name_of_jax_te_can_be_imported():
    """Also those beside the tables; arguments are in the signature, methods on the class."""
    spans = set(re.findall("`(jax_te[^`]*)`", TEXT)) | {row.place for row in ROWS if row.place.startswith("jax_te")}
    assert len(spans) > 200
    for span in sorted(spans):
        match = NAME.fullmatch(span)
        assert match, f"{span} is neither a dotted name nor one with an argument"
        found = find(match[1])
        if match[2]:
            assert match[2] in signature(found).parameters, f"{match[1]} has no argument {match[2]}"


def test_every_test_exists_and_every_row_has_one():
    for row in ROWS:
        file = ""
        for test in row.tests:
            match = TEST.fullmatch(test)
            assert match, f"{identify(row)}: {test} is not a test"
            file = match[1] or file
            assert (TESTS / file).is_file(), f"{identify(row)}: there is no tests/{file}"
            assert match[2] in functions_in(file), f"{identify(row)}: tests/{file} has no {match[2]}"
        assert row.tests, f"{identify(row)}: which test holds it?"


def test_open_is_only_what_may_be():
    assert list(DATA["open"]) == list(OPEN)
    for row in filter(lambda row: row.open, ROWS):
        assert row.open in OPEN, f"{identify(row)} is open for another reason: {row.open}"
        root = row.name.owner or row.name.name
        assert {root, row.name.name} & OPEN[row.open], f"{identify(row)} may not be open"
