"""Packages of the extras, which are imported when they are needed."""

from __future__ import annotations

import importlib
from types import ModuleType


def require_extra(name: str, extra: str = "train") -> ModuleType:
    """Return a module of a package in one of the extras, imported now.

    Args:
        name: dotted name of the module.
        extra: that has the package.

    Raises:
        ModuleNotFoundError: if the package is missing; the message names the command that installs it.

    >>> require_extra("json").__name__
    'json'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that this package itself lacks is another fault, which installing the extra would not mend.
        if error.name != name.split(".")[0]:
            raise
        raise ModuleNotFoundError(
            f'the package {name} is needed here; install it with: pip install "jax-te[{extra}]"'
        ) from None
