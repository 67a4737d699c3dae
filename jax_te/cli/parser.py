"""The command line's parser, built from the tables of options. Imports no jax, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import difflib
import inspect
import textwrap
from dataclasses import MISSING, fields
from typing import Any, NoReturn

from jax_te import __version__
from jax_te.cli.bench.options import (
    BenchAttention,
    BenchCheckpoint,
    BenchFlax,
    BenchLayer,
    BenchMicrobatches,
    BenchModel,
    BenchTune,
)
from jax_te.cli.command_options import ConvertOptions, DoctorOptions, EvalOptions, SampleOptions
from jax_te.cli.inspect.options import (
    InspectCheckpoint,
    InspectCommunication,
    InspectPipeline,
    InspectPrecision,
    InspectRecipes,
    InspectSensitivity,
    InspectSharding,
)
from jax_te.cli.option_table import flag
from jax_te.cli.option_values import Text
from jax_te.cli.options import GROUPS, OPTIONS, GivenOptions, TrainOptions
from jax_te.cli.presets import preset_table
from jax_te.cli.run_recipe import recipe_defaults

COMMANDS: dict[str, type] = {
    "train": TrainOptions,
    "sample": SampleOptions,
    "eval": EvalOptions,
    "convert": ConvertOptions,
    "doctor": DoctorOptions,
    "inspect precision": InspectPrecision,
    "inspect recipes": InspectRecipes,
    "inspect sensitivity": InspectSensitivity,
    "inspect sharding": InspectSharding,
    "inspect communication": InspectCommunication,
    "inspect pipeline": InspectPipeline,
    "inspect checkpoint": InspectCheckpoint,
    "bench layer": BenchLayer,
    "bench model": BenchModel,
    "bench flax": BenchFlax,
    "bench attention": BenchAttention,
    "bench checkpoint": BenchCheckpoint,
    "bench microbatches": BenchMicrobatches,
    "bench tune": BenchTune,
}
"""Every command, and the table of its options. The command is run by ``jax_te.cli.NAME.run``, with dots for spaces."""

_FAMILIES = {
    "inspect": "look at the precision, sharding and communication of a run, or list a checkpoint",
    "bench": "measure layers, train steps, attention, checkpoints and tilings, next to other libraries'",
}


_WIDTH = 100
"""Columns of ``--help``."""

_LONG_CHOICE = 70
"""Width of a list of choices above which it moves into the option's help, where lines are wrapped."""


class Parser(argparse.ArgumentParser):
    """ArgumentParser whose errors are one line, with the nearest option where one was misspelt."""

    def __init__(self, **kwargs: Any):
        # With abbreviations, every new option could change the meaning of old command lines.
        super().__init__(**({"allow_abbrev": False, "formatter_class": _Formatter} | kwargs))

    def parse_known_args(self, args=None, namespace=None):
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = difflib.get_close_matches(unknown[0].split("=")[0], self._option_string_actions, n=1)
            self.error(f"unknown argument {unknown[0]!r}" + (f", did you mean {near[0]}?" if near else ""))
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"jax-te: error: {message}; see '{self.prog} --help'\n")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30, width=_WIDTH)


def build_parser() -> Parser:
    """Return the parser of ``jax-te`` and its commands.

    Its namespace has the name of the ``command`` (None if only a family of commands is named), and the parser whose
    ``--help`` lists that family (``lists``).
    """
    parser = Parser(
        prog="jax-te",
        description="Train, sample, check and measure Transformer Engine models in JAX.",
        epilog="'jax-te COMMAND --help' lists a command's options.",
    )
    parser.add_argument("--version", action="version", version=f"jax-te {__version__}")
    parser.set_defaults(command=None, debug=False, lists=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", prog="jax-te")
    families = {"": commands}
    for name, table in COMMANDS.items():
        family, _, last = name.rpartition(" ")
        if family not in families:
            families[family] = _add_family(commands, family, _FAMILIES[family])
        _add_command(families[family], name, last, table)
    return parser


def options_from(namespace: argparse.Namespace) -> Any:
    """Return the options of a command: an instance of its table, for ``train`` a `GivenOptions`."""
    table = COMMANDS[namespace.command]
    values = {field.name: getattr(namespace, field.name) for field in fields(table)}
    options = table(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    if table is not TrainOptions:
        return options
    # Options that are not given are not in the namespace: a run takes them from its folder or preset.
    given = {name: value for name, value in vars(namespace).items() if name in OPTIONS}
    if options.preset is not None:
        given["preset"] = options.preset
    return GivenOptions(start=options, given=given, debug=namespace.debug)


def option_names(command: str) -> set[str]:
    """Return the names of a command's options, those of the fields of its table."""
    table = COMMANDS[command]
    tables = [table, *GROUPS.values()] if table is TrainOptions else [table]
    return {field.name for options in tables for field in fields(options)}


def _add_family(commands: argparse._SubParsersAction, name: str, summary: str) -> argparse._SubParsersAction:
    made = commands.add_parser(
        name, help=summary, usage=f"jax-te {name} WHAT [options]", description=_sentence(summary)
    )
    made.epilog = f"'jax-te {name} WHAT --help' lists the options."
    made.set_defaults(command=None, lists=made)
    return made.add_subparsers(title=name, metavar="WHAT", prog=f"jax-te {name}")


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _add_command(commands: argparse._SubParsersAction, name: str, last: str, table: type) -> None:
    summary, _, description = inspect.cleandoc(table.__doc__ or "").partition(".\n\n")
    places = "".join(f"{row.metavar} " for row in _positionals(table))
    made = commands.add_parser(
        last,
        help=summary[0].lower() + summary[1:],
        usage=f"jax-te {name} {places}[options]",
        description="\n\n".join([f"{summary}.", *map(_filled, description.split("\n\n"))]).rstrip(),
    )
    made.set_defaults(command=name)
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")
    add_options(made, table)
    if table is TrainOptions:
        made.epilog = preset_table()  # after the options, to which it refers
        for title, group in GROUPS.items():
            add_options(made.add_argument_group(title), group, given_only=True)


def _filled(paragraph: str) -> str:
    """Return a paragraph in lines of the width of ``--help``; one that is indented is kept as it is."""
    return paragraph if paragraph.startswith(" ") else textwrap.fill(paragraph, _WIDTH)


def _positionals(table: type) -> list[Text]:
    rows = [field.metadata["option"] for field in fields(table)]
    return [row.kind for row in rows if row.positional]


def add_options(group: argparse._ActionsContainer, table: type, *, given_only: bool = False) -> None:
    """Add the options of a table.

    Args:
        group: a parser, or a group of its arguments.
        table: a dataclass with the fields that `jax_te.cli.option_table.option` makes.
        given_only: whether options that are not given are left out of the namespace: a resumed run takes them from its
            folder, a new one from its preset.
    """
    for field in fields(table):
        row, default = field.metadata["option"], field.default
        if row.positional:
            group.add_argument(field.name, type=row.kind.parse, metavar=row.kind.metavar, help=row.help)
            continue
        settings: dict[str, Any] = {"default": argparse.SUPPRESS if given_only else default}
        text = row.help
        if isinstance(row.kind, tuple):
            settings["choices"] = row.kind
            # argparse would show the choices of several values twice, and breaks no long list of them.
            if row.several or len(",".join(row.kind)) > _LONG_CHOICE:
                many = "any" if row.several else "one"
                settings["metavar"], text = "NAME", f"{text}: {many} of {', '.join(row.kind)}"
        elif isinstance(row.kind, Text):
            settings |= {"type": row.kind.parse, "metavar": row.kind.metavar}
        else:
            settings["action"] = row.kind
        if row.several:
            settings["nargs"] = "+"
        # The field's own default, None, stands for the recipe's.
        if row.recipes and row.shown is None:
            default = recipe_defaults(row.recipes[0])[field.name]
        shown = _in_words(default) if row.shown is None else row.shown
        group.add_argument(flag(field.name), help=f"{text} (default: {shown})", **settings)


def _in_words(default: Any) -> str:
    if default is MISSING:
        return "the preset's"
    if default is None or isinstance(default, bool):
        return {None: "none", True: "yes", False: "no"}[default]
    return f"{default:g}" if isinstance(default, float) else str(default)
