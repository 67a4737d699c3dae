"""Plain-text tables."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: int = 0) -> str:
    """Return aligned columns under a ruled header; the last ``right`` ones are right-aligned.

    >>> print(table(["tensor", "amax"], [["x", "1.5"], ["kernel", "12"]], right=1))
    tensor  amax
    ------  ----
    x        1.5
    kernel    12
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    first = len(header) - right

    def line(cells: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if index >= first else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])
