"""Which tests and cases marked ``costly`` are left to ``.ci/run`` (see ``conftest.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def mark_costly(items: Sequence[Any]) -> None:
    """Take the marker ``costly`` from the cases that it does not name; without arguments it is of all cases.

    Args:
        items: Test items; all cases of a test are among them, or only those that were asked for by their ids.

    Raises:
        ValueError: A case is named that there is not.
    """
    tests: dict[tuple[Any, str], list[Any]] = {}
    for item in items:
        marker = item.get_closest_marker("costly")
        if marker is not None and marker.args:
            tests.setdefault((item.parent, item.originalname), []).append(item)
    for cases in tests.values():
        named = {*cases[0].get_closest_marker("costly").args}
        ids = [case.callspec.id for case in cases]
        if len(cases) > 1 and not named <= {*ids}:  # a single one may have been asked for by its id
            raise ValueError(f"{cases[0].nodeid}: `costly` names {sorted(named)}; there are {ids}")
        for case, name in zip(cases, ids, strict=True):
            if name not in named:
                case.own_markers[:] = [marker for marker in case.own_markers if marker.name != "costly"]
