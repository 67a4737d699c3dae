"""Rows of the tables of options: a dataclass for each command, in which a field is an option.

Everything else about options comes from the rows: the parser, ``--help``, and for ``jax-te train`` its configuration
(`jax_te.cli.run_config.RunConfig` has the fields of all groups), ``config.json``, the options that may change on
resume, and the flags in messages. The tables import no jax, so that ``--help`` is instant.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from jax_te._validation import brief
from jax_te.cli.option_values import Kind, Text


@dataclass(frozen=True, kw_only=True)
class Option:
    """A row of a table.

    Args:
        kind: kind of the value, see `jax_te.cli.option_values`.
        help: noun phrase, or sentence about the option's effect, without the default.
        shown: default as text. None: the field's default, that of ``recipes``, or the preset's if there is neither.
        several: whether it takes one or more values, separated by spaces; the field is a tuple.
        positional: whether it is given by position, without a flag.
        may_change: a resumed run may be given another value: it changes where, how long or how often. Numbers may
            change with it in the steps that follow, as dropout's do with the number of microbatches.
        of_mesh: whether it has no effect without a mesh.
        needs: conditions without which it has no effect, in words that continue "has no effect without"; see
            `check_effects`.
        kept: whether it is saved in ``config.json``. False for options that belong to one command line and are given
            again each time.
        recipes: names of the recipes that have this field.
        library: the library's names for it, where they differ.
    """

    kind: Kind
    help: str
    shown: str | None = None
    several: bool = False
    positional: bool = False
    may_change: bool = False
    of_mesh: bool = False
    needs: tuple[str, ...] = ()
    kept: bool = True
    recipes: tuple[str, ...] = ()
    library: tuple[str, ...] = ()

    def check(self, name: str, value: Any) -> Any:
        """Return a value for the option ``name`` as the command line would give it.

        Raises:
            ValueError: if the command line would refuse the value.
        """
        if isinstance(self.kind, Text):
            try:
                return self.kind.parse(str(value))
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"{flag(name)} {error}") from None
        choices = self.kind if isinstance(self.kind, tuple) else (True, False)
        if (type(value), value) not in [(type(choice), choice) for choice in choices]:  # 1 == True
            raise ValueError(f"{flag(name)} must be {either(tuple(map(str, choices)))}, got {brief(value)}")
        return value


def option(kind: Kind, help: str, default: Any = MISSING, **row: Any) -> Any:
    """Return the dataclass field of an option; without a default it is a preset's."""
    return dataclasses.field(default=default, metadata={"option": Option(kind=kind, help=help, **row)})


def positional(kind: Text, help: str) -> Any:
    """Return the dataclass field of an argument that must be given, by its place."""
    return option(kind, help, positional=True)


_FOR_MEMORY = {
    "batch_size": "lower --batch-size",
    "microbatches": "raise --microbatches",
    "recompute_granularity": "use --recompute-granularity full",
    "seq_len": "lower --seq-len",
    "length": "lower --length",
    "mesh": "give a larger --mesh",
}


def memory_advice(names: Collection[str]) -> str:
    """Return what a user of a command with these options may do if memory is short.

    >>> memory_advice(["seed", "batch_size", "mesh"]), memory_advice([])
    ('lower --batch-size or give a larger --mesh', 'use a device with more memory')
    """
    advice = [words for name, words in _FOR_MEMORY.items() if name in names]
    return either(tuple(advice)) if advice else "use a device with more memory"


def options_of(table: type) -> dict[str, Option]:
    """Return the rows of a table by the names of their fields."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(table)}


def check_effects(options: Any, met: Mapping[str, bool], given: Collection[str] | None = None) -> None:
    """Raise ValueError for options that are given and have no effect.

    Args:
        options: options, an instance of a table.
        met: whether each condition that a row names in ``needs`` is met.
        given: names of the options that are given. None: all. Those with their default's value are not looked at.
    """
    idle: dict[str, list[str]] = {}
    for field in dataclasses.fields(options):
        counts = given is None or field.name in given
        changed = counts and getattr(options, field.name) != field.default
        row: Option | None = field.metadata.get("option")
        for condition in row.needs if row is not None and changed else ():
            if not met[condition]:
                idle.setdefault(condition, []).append(flag(field.name))
    if idle:
        parts = (f"{', '.join(flags)} {_have(flags)} no effect without {needed}" for needed, flags in idle.items())
        raise ValueError(f"{'; '.join(parts)}; leave out what has no effect, or give what it needs")


def _have(names: list[str]) -> str:
    return "has" if len(names) == 1 else "have"


def flag(name: str) -> str:
    """Return the command-line option of a field.

    >>> flag("hidden_size")
    '--hidden-size'
    """
    return "--" + name.replace("_", "-")


def either(names: tuple[str, ...]) -> str:
    """Return names as a choice in a sentence.

    >>> either(("fprop", "dgrad", "wgrad"))
    'fprop, dgrad or wgrad'
    """
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
