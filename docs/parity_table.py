"""Write docs/parity*.md from docs/parity.yaml: ``python docs/parity_table.py``.

docs/parity.yaml is what is edited. It has the names and signatures of three reference documents, and a row for each
name, written once for all classes that share it; tests/test_parity.py checks both against the package. It needs PyYAML.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).resolve().parent

_WRITTEN = "<!-- written by docs/parity_table.py from docs/parity.yaml -->"

# A row's keys, all optional but `tests`: its place, if the rule of `_place` does not give it; the argument's name, if
# it is another; why it is open; default and position, where the document has others; why, and what else differs.
KEYS = {"at", "as", "open", "default", "position", "how", "tests"}


@dataclass(frozen=True)
class Name:
    """A name of a reference document: a class, method, function, argument or attribute."""

    document: str
    section: str
    name: str
    owner: str | None  # of an argument: its function's name
    signature: inspect.Signature | None  # of a function, if the document has it
    parameter: inspect.Parameter | None  # of an argument


@dataclass(frozen=True)
class Row:
    """What docs/parity.yaml says about a name, and where it is in jax_te."""

    name: Name
    place: str
    how: str
    tests: tuple[str, ...]
    open: str | None
    default: str | None
    position: str | None
    base: tuple[str, str] | None  # of a class: the document's, and jax_te's


def read() -> dict[str, Any]:
    """Return docs/parity.yaml."""
    return yaml.safe_load((DOCS / "parity.yaml").read_text())


def names_of(data: dict[str, Any]) -> Iterator[Name]:
    """Yield the names of the documents, in their order: a function, then its arguments."""
    for document, contents in data["documents"].items():
        for section, api in contents["api"].items():
            for line in re.sub(r"\n +", " ", api["names"]).splitlines():
                name, parenthesis, arguments = line.partition("(")
                signature = inspect.signature(eval(f"lambda {arguments[:-1]}: None")) if parenthesis else None
                yield Name(document, section, name, None, signature, None)
                for argument, parameter in (signature.parameters if signature else {}).items():
                    row = argument if name == section else f"{name}({argument})"
                    yield Name(document, section, row, name, None, parameter)


def rows_of(data: dict[str, Any]) -> list[Row]:
    """Return a row for each name of the documents, in their order.

    Raises:
        ValueError: for a name without a row, a row without a name, two rows of a name, or an unknown key.
    """
    stated: dict[tuple[str, str, str], dict[str, Any]] = {}
    for document, contents in data["documents"].items():
        for sections, entries in contents["rows"].items():
            for names, entry in entries.items():
                if unknown := entry.keys() - KEYS:
                    raise ValueError(f"{sections}, {names}: {sorted(unknown)} are not keys of a row")
                for section in sections.split(", "):
                    for name in names.split(", "):
                        if (document, section, name) in stated:
                            raise ValueError(f"{section}, {name} has two rows")
                        stated[document, section, name] = entry
    rows: list[Row] = []
    places: dict[tuple[str, str, str], str] = {}
    for name in names_of(data):
        key = (name.document, name.section, name.name)
        if key not in stated:
            raise ValueError(f"{name.section}, {name.name} has no row")
        entry = stated.pop(key)
        api = data["documents"][name.document]["api"][name.section]
        places[key] = place = _place(name, entry, api["at"], places)
        deviations = (str(entry[field]) if field in entry else None for field in ("default", "position"))
        how, tests = entry.get("how", "the same"), tuple(entry.get("tests", "").split())
        base = next(iter(api.get("base", {}).items()), None) if name.name == name.section else None
        rows.append(Row(name, place, how, tests, entry.get("open"), *deviations, base))
    if stated:
        raise ValueError(f"rows without a name in a document: {sorted(stated)}")
    return rows


def _place(name: Name, entry: dict[str, Any], at: str, places: dict[tuple[str, str, str], str]) -> str:
    if name.parameter:
        argument = entry.get("as", name.parameter.name)
        return f"{places[name.document, name.section, str(name.owner)]}({argument}=)"
    if name.name == name.section:
        return entry.get("at", at)
    return entry.get("at", f"{at}.{'__call__' if name.name == 'forward' else name.name}")


def deviations_of(row: Row) -> list[str]:
    """Return what differs in the signature, and of a class its base, in words."""
    said = []
    if row.base and row.base[0] != row.base[1]:
        said.append(f"base {_code(row.base[1])}, there {_code(row.base[0])}")
    if row.default is not None:
        parameter = row.name.parameter
        there = parameter.default if parameter else inspect.Parameter.empty
        said.append(f"default `{row.default}`, there {'none' if there is inspect.Parameter.empty else f'`{there!r}`'}")
    if row.position is not None:
        said.append({"keyword": "keyword only"}.get(row.position, f"at position {row.position}"))
    return said


def pages(data: dict[str, Any]) -> dict[str, str]:
    """Return the pages by file name: one that introduces the others, one of each document, and one of differences."""
    titles = {_page_of(document): contents["title"] for document, contents in data["documents"].items()}
    titles["parity_differences"] = "Documents against code, and errors"
    lines = ["# Parity", "", _WRITTEN, "", data["introduction"], "| page |", "|---|"]
    lines += [f"| [{title}]({name}.md) |" for name, title in titles.items()]
    lines += ["", "| group | why it is open |", "|---|---|", *(f"| {k} | {v} |" for k, v in data["open"].items()), ""]
    lines += ["| argument, field | without effect, because |", "|---|---|"]
    for hint in data["hints"]:
        lines.append(f"| {_code(*hint['names'].split(', '))} | {hint['because']} |")
    lines += ["", "```{toctree}", ":hidden:", *titles, "```"]
    found = {"parity": lines}
    rows = rows_of(data)
    for document, contents in data["documents"].items():
        own = [row for row in rows if row.name.document == document]
        found[_page_of(document)] = [f"# {contents['title']}", "", _WRITTEN, *_sections(own)]
    found["parity_differences"] = ["# Documents against code, and errors", "", _WRITTEN, *_differences(data)]
    return {f"{name}.md": "\n".join([*lines, ""]) for name, lines in found.items()}


def _page_of(document: str) -> str:
    return f"parity_{document.replace('.', '_')}"


def _sections(rows: list[Row]) -> list[str]:
    """Return the lines of a table for each class of a document, and of a list of the tests that its rows number."""
    lines = []
    for section, own in itertools.groupby(rows, lambda row: row.name.section):
        lines += ["", f"## {section}", ""]
        lines += ["| name | in jax_te | how it differs, and why | tests |", "|---|---|---|---|"]
        numbers: dict[str, int] = {}
        of_class = ""
        for row in own:
            if row.name.name == section:
                of_class = row.place
            place = _code(_inside(row.place, of_class)) + (f"; open ({row.open})" if row.open else "")
            how = "; ".join([*deviations_of(row), row.how])
            tests = ", ".join(str(numbers.setdefault(test, len(numbers) + 1)) for test in _full_names(row.tests))
            lines.append(f"| {_code(row.name.name)} | {place} | {how} | {tests} |")
        lines += ["", *(f"{number}. {_code(test)}" for test, number in numbers.items())]
    return lines


def _inside(place: str, of_class: str) -> str:
    """Return a place with `…` for the class that it is in."""
    if of_class and place.startswith((f"{of_class}.", f"{of_class}(")):
        return f"…{place.removeprefix(of_class)}"
    return place


def _full_names(tests: tuple[str, ...]) -> Iterator[str]:
    """Yield tests with their files: one that is written without is in the file of the test before it."""
    file = ""
    for test in tests:
        stated, _, name = test.partition("::")
        file = stated or file
        yield f"{file}::{name}"


def _differences(data: dict[str, Any]) -> list[str]:
    """Return the lines of two tables: where a document is older than the code, and errors."""
    lines = ["", "## Where a document and the code differ", ""]
    lines += ["The code is that of Megatron-Core 0.19 and Transformer Engine 2.20, the documents are older.", ""]
    lines += ["| of | name | document | code | followed |", "|---|---|---|---|---|"]
    for sections, differences in data["drift"].items():
        for names, said in differences.items():
            cells = (_code(*sections.split(", ")), _code(*names.split(", ")))
            lines.append(f"| {' | '.join((*cells, said['document'], said['code'], said['followed']))} |")
    lines += ["", "## Errors", "", "What raises which error in Megatron-Core and Transformer Engine, and in jax_te."]
    lines += ["", "| of | when | there | in jax_te, and why |", "|---|---|---|---|"]
    for of, errors in data["errors"].items():
        for when, error in errors.items():
            if isinstance(error, str):
                error = {"raises": error, "here": "the same", "because": ""}
            here = ": ".join(filter(None, (error["here"], error["because"])))
            lines.append(f"| {_code(of)} | {when} | {error['raises']} | {here} |")
    return lines


def _code(*texts: str) -> str:
    return ", ".join(f"`{text}`" for text in texts)


if __name__ == "__main__":
    for name, text in pages(read()).items():
        (DOCS / name).write_text(text)
