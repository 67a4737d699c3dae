"""The command line's parser, made from the tables of options. Imports no jax, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
from dataclasses import MISSING, fields
from typing import Any, NoReturn

from jax_te import __version__
from jax_te.cli.eval_options import EvalOptions
from jax_te.cli.options import GROUPS, DoctorOptions, InspectOptions, SampleOptions, Text, TrainOptions, flag
from jax_te.cli.presets import preset_table
from jax_te.cli.run_recipe import recipe_defaults

_COMMANDS: dict[str, type] = {
    "train": TrainOptions,
    "sample": SampleOptions,
    "eval": EvalOptions,
    "inspect": InspectOptions,
    "doctor": DoctorOptions,
}

_OWN_OPTIONS = {
    "bench": "measure layers or train steps beside te.jax's",
    "convert": "convert a model into the form of Hugging Face or Megatron-LM",
}


class Parser(argparse.ArgumentParser):
    """ArgumentParser whose errors are one line, with the nearest option where one was misspelt."""

    def __init__(self, **kwargs: Any):
        # Abbreviations would make every new option a change of what the old command lines mean.
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
        super().__init__(prog, max_help_position=30, width=110)


def build_parser(command: str | None = None) -> Parser:
    """Return the parser of ``jax-te`` and its commands.

    Args:
        command: the one that was asked for. Only ``bench`` and ``convert`` need it.
    """
    parser = Parser(
        prog="jax-te",
        description="Train, sample, check and measure Transformer Engine models in JAX.",
        epilog="'jax-te COMMAND --help' lists a command's options.",
    )
    parser.add_argument("--version", action="version", version=f"jax-te {__version__}")
    parser.set_defaults(command=None, debug=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, table in _COMMANDS.items():
        summary, _, description = inspect.cleandoc(table.__doc__ or "").partition(".\n\n")
        made = _add_command(commands, name, summary[0].lower() + summary[1:], description)
        add_options(made, table, given_only=name == "train")
        if name == "train":
            made.epilog = preset_table()  # behind the options, which it refers to
            for title, group in GROUPS.items():
                add_options(made.add_argument_group(title), group, given_only=True)
        if name == "inspect":
            made.usage = "jax-te inspect [CHECKPOINT] [options]"
            made.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="only list what this one holds")
    for name, summary in _OWN_OPTIONS.items():
        made = _add_command(commands, name, summary)
        if command == name:
            # Its options stand beside what it does, which imports jax: a second that other commands do without.
            getattr(importlib.import_module(f"jax_te.cli.{name}"), f"add_{name}_options")(made)
    return parser


def _add_command(commands: argparse._SubParsersAction, name: str, summary: str, description: str = "") -> Parser:
    made = commands.add_parser(name, help=summary, usage=f"jax-te {name} [options]", description=description)
    made.set_defaults(command=name)
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return made


def add_options(group: argparse._ActionsContainer, table: type, *, given_only: bool = False) -> None:
    """Add the options of a table.

    Args:
        group: a parser, or a group of its arguments.
        table: a dataclass with the fields that `jax_te.cli.options.option` makes.
        given_only: leave an option out of the namespace that is not given: a resumed run takes it from its folder, a
            new one from its preset.
    """
    for field in fields(table):
        row, default = field.metadata["option"], field.default
        settings: dict[str, Any] = {"default": argparse.SUPPRESS if given_only else default}
        if isinstance(row.kind, tuple):
            settings["choices"] = row.kind
        elif isinstance(row.kind, Text):
            settings |= {"type": row.kind.parse, "metavar": row.kind.metavar}
        else:
            settings["action"] = row.kind
        # The field's own default, None, stands for the recipe's.
        if row.recipes and row.shown is None:
            default = recipe_defaults(row.recipes[0])[field.name]
        shown = _in_words(default) if row.shown is None else row.shown
        group.add_argument(flag(field.name), help=f"{row.help} (default: {shown})", **settings)


def _in_words(default: Any) -> str:
    if default is MISSING:
        return "the preset's"
    if default is None or isinstance(default, bool):
        return {None: "none", True: "yes", False: "no"}[default]
    return f"{default:g}" if isinstance(default, float) else str(default)
