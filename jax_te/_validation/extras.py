"""Packages of the extras, which are imported when they are needed."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

_OPTIONAL = {"tensorboardX": "torch"}
"""Packages that import another one where it is installed, for what is not used here: torch takes seconds."""


def require_extra(name: str, extra: str = "train") -> ModuleType:
    """Return a module of a package in one of the extras, imported now.

    Args:
        name: dotted name of the module.
        extra: extra that installs the package.

    Raises:
        ModuleNotFoundError: if the package is missing, or a module that it needs; the message names the extra, the
            module, and the command that installs it.
        ImportError: if the package cannot be imported for another reason, which the message gives.

    >>> require_extra("json").__name__
    'json'
    """
    package, install = name.split(".")[0], install_command(extra)
    optional = _OPTIONAL.get(package)
    try:
        with contextlib.nullcontext() if optional is None else without_module(optional):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == package:
            raise ModuleNotFoundError(
                f"the package {name} is needed here; install it with: {install}", name=package
            ) from None
        if (error.name or package).split(".")[0] == package:
            raise _broken(package, extra, error) from error
        module = str(error.name).split(".")[0]
        raise ModuleNotFoundError(
            f"the package {package} of the extra {extra!r} needs the module {module}, which is missing; install it "
            f"with: {install}; or, if that finds all there, with: pip install {module}",
            name=error.name,
        ) from error
    except ImportError as error:
        raise _broken(package, extra, error) from error


def install_command(extra: str) -> str:
    """Return the command that installs the package with an extra, and where to run it: it is on no index.

    >>> install_command("train")
    'pip install -e ".[train]" in a checkout of jax_te'
    """
    return f'pip install -e ".[{extra}]" in a checkout of jax_te'


@contextlib.contextmanager
def without_module(name: str) -> Iterator[None]:
    """Let imports find no module ``name``, unless it is imported already; imports behind the block find it.

    Those of other threads do not find it either, as long as the block runs: it is for one import alone.

    >>> with without_module("this"):
    ...     try:
    ...         import this
    ...     except ImportError:
    ...         print("not there")
    not there
    """
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # Python's own mark of a module that cannot be imported
    try:
        yield
    finally:
        sys.modules.pop(name, None)


def _broken(package: str, extra: str, error: ImportError) -> ImportError:
    return ImportError(
        f"the package {package} of the extra {extra!r} cannot be imported ({str(error)[:200]}); install it anew with: "
        f"pip install --force-reinstall {package}",
        name=error.name,
    )
