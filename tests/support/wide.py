"""Which cases of a test with many of them run by default; the others are marked slow (see ``conftest.py``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest


def quick_cases(cases: Sequence[Any]) -> list[Any]:
    """Return the cases of one test, marked ``wide``, that run by default.

    They are those that the marker names by their ids. Where it names none, they are as few as have each value of each
    argument once; of two cases with as many new values, the one whose other values had fewer cases before.

    Args:
        cases: Test items of one function.

    Raises:
        ValueError: A case is named that there is not.
    """
    named = cases[0].get_closest_marker("wide").args
    ids = [case.callspec.id for case in cases]
    if named:
        if len(cases) > 1 and not {*named} <= {*ids}:  # a single one may have been asked for by its id
            raise ValueError(f"{cases[0].nodeid}: `wide` names {named}; there are {ids}")
        return [case for case, name in zip(cases, ids, strict=True) if name in named]
    values = [{(name, _key(value)) for name, value in case.callspec.params.items()} for case in cases]
    used: Counter[Any] = Counter()
    kept: list[int] = []
    while unseen := set().union(*values) - used.keys():
        best = max(range(len(cases)), key=lambda i: (len(values[i] & unseen), -sum(used[value] for value in values[i])))
        kept.append(best)
        used.update(values[best])
    return [cases[i] for i in kept]


def _key(value: Any) -> Any:
    """Values of arguments are arrays and dicts, too; what is listed once and repeated by a product is one object."""
    return value if isinstance(value, str | int | float | None) else id(value)


def mark_wide(items: Sequence[Any]) -> None:
    """Mark as slow all but the `quick_cases` of each test that is marked ``wide``."""
    tests: dict[tuple[Any, str], list[Any]] = {}
    for item in items:
        if item.get_closest_marker("wide") and not item.get_closest_marker("slow"):
            tests.setdefault((item.parent, item.originalname), []).append(item)
    for cases in tests.values():
        quick = {id(case) for case in quick_cases(cases)}
        for case in cases:
            if id(case) not in quick:
                case.add_marker(pytest.mark.slow)
