"""Which tests and cases marked ``costly`` are left to ``.ci/run``, and which are slow (see ``conftest.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def mark_costly(items: Sequence[Any]) -> None:
    """Sort the cases of tests that are marked ``costly``.

    ``costly("a", "b")`` is of the cases that it names, and the others run by default; without names it is of all cases.
    Those that its keyword ``slow`` names are slow in any event: the ones named beside them stand for them in CI.

    Args:
        items: Test items; all cases of a test are among them, or only those that were asked for by their ids.

    Raises:
        ValueError: A case is named that there is not.
    """
    tests: dict[tuple[Any, str], list[Any]] = {}
    for item in items:
        marker = item.get_closest_marker("costly")
        if marker is not None and (marker.args or marker.kwargs):
            tests.setdefault((item.parent, item.originalname), []).append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("costly")
        costly, slow = {*marker.args}, {*marker.kwargs.get("slow", ())}
        ids = [case.callspec.id for case in cases]
        if len(cases) > 1 and not costly | slow <= {*ids}:  # a single one may have been asked for by its id
            raise ValueError(f"{cases[0].nodeid}: `costly` names {sorted(costly | slow)}; there are {ids}")
        for case, name in zip(cases, ids, strict=True):
            if name in slow:
                case.add_marker(pytest.mark.slow)
            elif costly and name not in costly:
                case.own_markers[:] = [marker for marker in case.own_markers if marker.name != "costly"]
