"""Plain text that people read and write: tables, and lists of ``name=value``."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: int = 0) -> str:
    """Return aligned columns under a ruled header; the last ``right`` ones are right-aligned.

    >>> print(table(["tensor", "amax"], [["x", "1.5"], ["kernel", "12"]], right=1))
    tensor  amax
    ------  ----
    x        1.5
    kernel    12
    """
    first, *others = aligned([header, *rows], right=right)
    rule = "  ".join("-" * width for width in _widths([header, *rows]))
    return "\n".join([first, rule, *others])


def aligned(rows: Sequence[Sequence[str]], *, right: int = 0) -> list[str]:
    """Return a line for each row, with aligned columns; the last ``right`` ones are right-aligned.

    >>> aligned([["tensor=0", "0 2"], ["tensor=1", "1 3"]])
    ['tensor=0  0 2', 'tensor=1  1 3']
    """
    widths = _widths(rows)
    left = len(widths) - right

    def line(cells: Sequence[str]) -> str:
        pairs = list(zip(cells, widths, strict=True))
        columns = [cell.ljust(width) for cell, width in pairs[:left]] + [
            cell.rjust(width) for cell, width in pairs[left:]
        ]
        return "  ".join(columns).rstrip()

    return [line(cells) for cells in rows]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def parse_pairs(text: str, names: Collection[str], what: str) -> dict[str, str]:
    """Return the values in ``"a=1,b=2"``, as text.

    Args:
        text: pairs of a name and a value.
        names: names that there are.
        what: kind of thing that each of them names, for messages.

    Raises:
        ValueError: for an unknown or repeated name.

    >>> parse_pairs("data=2, tensor=4", ("data", "tensor"), "mesh axis")
    {'data': '2', 'tensor': '4'}
    """
    values: dict[str, str] = {}
    for pair in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = pair.partition("=")
        if name not in names:
            raise ValueError(f"unknown {what} {name!r} in {text!r}; allowed: {', '.join(names)}")
        if name in values:
            raise ValueError(f"{what} {name!r} is given twice in {text!r}")
        values[name] = value
    return values
