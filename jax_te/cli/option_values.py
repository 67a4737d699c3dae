"""Kinds of option values, each parsed from text by an argparse type. Imports no jax."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jax_te._validation import brief
from jax_te.config import PipelineConfig
from jax_te.recipe import MAX_MARGIN

FLAG, SWITCH = argparse.BooleanOptionalAction, "store_true"
"""Kinds of options without a value: ``--name`` and ``--no-name``; ``--name`` alone."""


@dataclass(frozen=True)
class Text:
    """A kind of option whose value is read from a text.

    Args:
        metavar: name of the value in ``--help``.
        parse: argparse type, which maps the text of its own result to the same result.
    """

    metavar: str
    parse: Callable[[str], Any]


Kind = tuple[str, ...] | Text | str | type[argparse.Action]
"""Kind of an option: names to choose from, a `Text`, `SWITCH` or `FLAG`."""


def number(kind: type, low: Any, *, above: bool = False, below: Any = 2**31) -> Callable[[str], int | float]:
    """Return an argparse type: a number ``>= low`` (``> low`` if ``above``) and ``< below``."""
    wanted = f"must be {'an integer' if kind is int else 'a number'} {'>' if above else '>='} {low:g}"

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{wanted}, got {brief(text)}") from None
        # Every comparison with nan is False, so this refuses nan, too.
        if not (low < value < below if above else low <= value < below):
            problem = f"must be < {below:.10g}" if value >= below else wanted
            raise argparse.ArgumentTypeError(f"{problem}, got {text[:50]}")
        return value

    return parse


def matching(pattern: str, wanted: str) -> Callable[[str], str]:
    """Return an argparse type: a text that the pattern matches; ``wanted`` describes such a text."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text, re.DOTALL):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {brief(text)}")
        return text

    return parse


def some_of(allowed: tuple[str, ...]) -> Callable[[str], str]:
    """Return an argparse type: names separated by commas, which it puts into the order of ``allowed``."""

    def parse(text: str) -> str:
        names = [name.strip() for name in text.split(",")]
        if any(name not in allowed or names.count(name) > 1 for name in names):
            raise argparse.ArgumentTypeError(f"must be some of {','.join(allowed)}, each once, got {text!r}")
        return ",".join(name for name in allowed if name in names)

    return parse


def auto_or_flag(text: str) -> bool | Literal["auto"]:
    """Return ``"auto"``, or True for ``yes`` and False for ``no``: an argparse type."""
    choices: dict[str, bool | Literal["auto"]] = {
        "auto": "auto",
        "yes": True,
        "no": False,
        "True": True,
        "False": False,
    }
    if text not in choices:
        raise argparse.ArgumentTypeError(f"must be auto, yes or no, got {text!r}")
    return choices[text]


def schedule(text: str) -> str:
    """Return a pipeline's schedule: an argparse type.

    >>> schedule("1f1b,virtual_stages=2")
    '1f1b,virtual_stages=2'
    """
    try:
        PipelineConfig.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def layer_pattern(text: str) -> int | str:
    """Return which layers have experts, as an integer N (every N-th) or a list: an argparse type.

    A list has 1 (experts) or 0 for each layer: ``0,1,1``, or Megatron's expression of lists, sums and repetitions. It
    becomes ``[0,1,1]``.

    >>> layer_pattern("2"), layer_pattern("0,1,1"), layer_pattern("([0]+[1]*2)*2")
    (2, '[0,1,1]', '[0,1,1,0,1,1]')
    """
    if re.fullmatch(r"\s*[+-]?\d+\s*", text):
        return number(int, 1)(text)  # type: ignore[return-value]
    try:
        if len(text) > _LONGEST_PATTERN or not re.fullmatch(r"[\d\s,+*()\[\]]+", text):
            raise ValueError(text)
        entries = _entries(ast.parse(text.strip(), mode="eval").body)
    # Of texts that are no expression, and of hundreds of parentheses.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise argparse.ArgumentTypeError(
            "must be an integer >= 1, or a list with 1 (experts) or 0 for each layer, such as 0,1,1 or [0]+[1]*2, got "
            f"{brief(text)}"
        ) from None
    return f"[{','.join(map(str, entries))}]"


def _entries(node: ast.expr) -> list[int]:
    """Return the entries of an expression of lists of 0 and 1; raise ValueError for any other expression."""
    entries: list[int] | None = None
    match node:
        case ast.List(elts=nodes) | ast.Tuple(elts=nodes):
            entries = [_integer(node) for node in nodes]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            entries = _entries(left) + _entries(right)
        case ast.BinOp(left=ast.Constant() as times, op=ast.Mult(), right=repeated):
            entries = _repeated(_entries(repeated), _integer(times))
        case ast.BinOp(left=repeated, op=ast.Mult(), right=times):
            entries = _repeated(_entries(repeated), _integer(times))
    if not entries or not set(entries) <= {0, 1}:
        raise ValueError(node)
    return entries


def _repeated(entries: list[int], times: int) -> list[int]:
    if len(entries) * times > _MOST_LAYERS:
        raise ValueError(times)
    return entries * times


def _integer(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    raise ValueError(node)


def architecture(text: str) -> str:
    """Return the name of an architecture of Hugging Face: an argparse type."""
    # Imported only when a name is given: it imports jax, a second that --help does without.
    from jax_te.interop.huggingface import ARCHITECTURES

    if text not in ARCHITECTURES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(ARCHITECTURES)}, got {brief(text)}")
    return text


_MOST_LAYERS = 9_999
_LONGEST_PATTERN = 2 * _MOST_LAYERS + 2
"""Characters of a list with an entry for each layer."""

# Counts are int32 on devices, and other numbers fp32.
SIZE, COUNT = Text("N", number(int, 1)), Text("N", number(int, 0))
POSITIVE, NON_NEGATIVE = (Text("X", number(float, 0, above=above, below=3e38)) for above in (True, False))
RATE = Text("P", number(float, 0, below=1))
SPREAD = Text("STD", number(float, 0))
MARGIN = Text("N", number(int, 0, below=MAX_MARGIN + 1))
SEED = Text("N", number(int, 0, below=2**32))  # JAX and grain take seeds of 32 bits, and would drop higher ones
FOLDER, PATH = (Text(metavar, matching(".+", "a name")) for metavar in ("DIR", "PATH"))
FILE, TEXT = (Text(metavar, str) for metavar in ("FILE", "TEXT"))
MESH = Text("AXES", matching(r"\w+=.*", "axes like data=2,tensor=4"))
SCHEDULE = Text("SCHEDULE", schedule)
LAYER_PATTERN = Text("LAYERS", layer_pattern)
STEPS = Text("START:STOP", matching(r"[1-9]\d{0,8}:[1-9]\d{0,8}", "two steps like 5:8"))
PROCESSES = Text("HOW", matching(r"auto|none|[^,\s]+:\d+,\d+,\d+", "auto, none or HOST:PORT,COUNT,NUMBER"))
MODULE_NAMES = Text("MODULES", matching(r"[^\W\d][\w.]*(,[^\W\d][\w.]*)*", "names of modules like my.module,other"))
FIELD_NAMES = Text("FIELDS", matching(r"[\w.-]+(,[\w.-]+)*", "names of fields like my_note,other"))
ARCHITECTURE = Text("NAME", architecture)
# Clocks and JAX accept more, but a timeout above a week bounds nothing.
SECONDS = Text("SECONDS", number(float, 0, above=True, below=7 * 24 * 3600 + 1))
