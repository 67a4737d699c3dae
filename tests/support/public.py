"""Every function and method that users call: what stands in the packages' ``__all__``, and the public methods of it."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import jax_te

# Commands and measurements, whose arguments the command line makes.
NOT_FOR_PROGRAMS = ("bench", "cli", "typing", "errors")
NESTED = ("interop.huggingface", "interop.megatron", "interop.torch", "training.pipeline")


def public_names() -> Iterator[tuple[str, Any]]:
    """Dotted name, without ``jax_te.``, and object of each name in the ``__all__`` of the packages."""
    packages = [info.name for info in pkgutil.iter_modules(jax_te.__path__) if not info.name.startswith("_")]
    for package in [*packages, *NESTED]:
        if package not in NOT_FOR_PROGRAMS:
            module = importlib.import_module(f"jax_te.{package}")
            for name in getattr(module, "__all__", ()):
                yield f"{package}.{name}", getattr(module, name)


def plain(member: Any) -> Any:
    """The function inside of a classmethod or staticmethod."""
    return getattr(member, "__func__", member)


def public_callables() -> dict[str, Callable[..., Any]]:
    """Dotted name -> function, each once: public functions, and the public methods and ``__call__`` of public classes.

    Methods that a class inherits stand under the class that defines them. Constructors are not among them.
    """
    found: dict[int, tuple[str, Any]] = {}
    for name, thing in public_names():
        if inspect.isfunction(thing):
            found.setdefault(id(thing), (name, thing))
        elif isinstance(thing, type) and not getattr(thing, "_is_protocol", False):  # a protocol's are its classes'
            package = name.rpartition(".")[0]
            for base in thing.__mro__:
                for method, member in vars(base).items():
                    shown = method == "__call__" or not method.startswith("_")
                    function = plain(member)
                    if shown and inspect.isfunction(function) and function.__module__.startswith("jax_te."):
                        found.setdefault(id(function), (f"{package}.{base.__name__}.{method}", function))
    return dict(found.values())
