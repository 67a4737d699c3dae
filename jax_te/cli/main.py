"""Entry point of ``jax-te``: selects the command, and turns errors into one line."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

INPUT_ERROR = 2
"""Exit status for bad input and for a full disk, as argparse uses it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status of ``jax-te`` run with these arguments (None: the process's).

    ValueError, TypeError, OSError, lack of memory and a missing extra become one line on stderr and status 2;
    ``--debug`` shows the traceback instead. Ctrl-C outside the training loop gives 130.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a model's text may contain characters that the terminal cannot show
    argv = sys.argv[1:] if argv is None else list(argv)
    options, interrupt = argparse.Namespace(debug=False), None
    if threading.current_thread() is threading.main_thread():  # Python gives signals to no other
        interrupt = signal.signal(signal.SIGINT, _end)
    try:
        # Imported only now, so that Ctrl-C during the import also ends without a traceback.
        from jax_te.cli.parser import build_parser, options_from

        options = build_parser().parse_args(argv)
        if options.command is None:
            options.lists.print_help()
            return 0
        if options.command == "train":
            from jax_te.cli.launch import find_launch

            launch = find_launch(options.processes)
            if launch is None or launch.index == 0:
                print("loading JAX", flush=True)
        # Commands import jax, which takes a second that --help and bad options do without.
        command = importlib.import_module(f"jax_te.cli.{options.command.replace(' ', '.')}")
        return command.run(options_from(options))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has ended; no second error at exit
        return 141
    except Exception as error:
        message = None if options.debug else explain(error, getattr(options, "command", None))
        if message is None:
            raise
        print(f"jax-te: error: {message}", file=sys.stderr)
        return INPUT_ERROR
    finally:
        if interrupt is not None:
            signal.signal(signal.SIGINT, interrupt)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """End the process on Ctrl-C outside of the training loop, where nothing is left half done."""
    # At once: an exception in the middle of an import becomes an ImportError there, or aborts in C++.
    os.write(2, b"jax-te: interrupted\n")
    os._exit(130)


def explain(error: Exception, command: str | None = None) -> str | None:
    """Return one line for an error that the user can do something about, None for one that is a bug.

    Args:
        error: the error.
        command: name of the command, whose options the line may name. None: no options.
    """
    text = " ".join(str(error).split()) or type(error).__name__
    # XLA on a CPU has no status of its own for it.
    if any(sign in text for sign in ("RESOURCE_EXHAUSTED", "Out of memory")) and isinstance(error, RuntimeError):
        from jax_te.cli.option_table import memory_advice
        from jax_te.cli.parser import option_names

        advice = memory_advice(() if command is None else option_names(command))
        return f"out of memory; {advice} ({text[:160]})"
    if isinstance(error, OSError) and not isinstance(error, ImportError):
        place = f"{error.filename}: " if error.filename else ""
        hint = "; free some space, then the same command goes on" if error.errno == errno.ENOSPC and not place else ""
        return f"{place}{error.strerror or text}{hint}"
    if isinstance(error, ImportError):
        # Those of this package name an extra and a command.
        return text if isinstance(error, ModuleNotFoundError) or _raised_here(error) else None
    # ValueErrors of this package are written for users; those of other packages may need the traceback.
    if isinstance(error, ValueError | TypeError | OverflowError):
        return text if _raised_here(error) else f"{text[:300]} (--debug shows where)"
    return None


def _raised_here(error: Exception) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("jax_te")


if __name__ == "__main__":
    raise SystemExit(main())
