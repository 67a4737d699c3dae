"""A reader of pickles that runs no code: an interpreter of their opcodes that never resolves Python names."""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import Any

MAX_PICKLE = 2**29
"""Maximum bytes of a pickle. Its value takes a few tens of times as much memory."""

_PLAIN = (str, int, float, bool, bytes, type(None))
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": list, "EMPTY_TUPLE": tuple}
# Parts of the names of opcodes whose argument is the value itself.
_VALUES = ("INT", "LONG", "FLOAT", "UNICODE", "BYTES", "STRING")


class Global(str):
    """The dotted name of a class or function, which is never imported."""

    __slots__ = ()


class Record:
    """Placeholder for the result of an unknown class or function in a pickle: its name and arguments, nothing else.

    Args:
        name: name of the class or function.
        args: arguments that it would be called with.

    Attributes:
        state: attributes, or what ``__setstate__`` would get; None if there are none.
        items: items that would be appended or set by key.
    """

    def __init__(self, name: str, args: Any):
        self.name, self.args, self.state, self.items = name, args, None, []

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def __repr__(self) -> str:
        return f"<{self.name}>"


Handlers = Mapping[str, Callable[..., Any]]
"""Dotted name → function that builds a value from the arguments."""

_RECORDED_MODULES = (
    *("megatron.", "torch.", "transformer_engine.", "transformer_engine_torch.", "numpy.", "collections."),
    *("datetime.", "pathlib.", "enum.", "signal."),
)
_BUILTINS = ("set", "frozenset", "slice", "bytearray", "complex")
_RECORDED = frozenset(
    ["argparse.Namespace", "types.SimpleNamespace", "functools.partial", "_codecs.encode", "_io.BytesIO", "io.BytesIO"]
    + [f"{module}.{name}" for module in ("builtins", "__builtin__") for name in _BUILTINS]
)
"""Names that become a `Record`, like those of these modules."""


def read_pickle(data: Any, what: object, handlers: Handlers, persistent: Callable[[Any], Any] | None = None) -> Any:
    """Return the value of a pickle of protocols 2 to 5.

    Nothing is imported or called but ``handlers``. Sets become lists. The known classes of numpy, torch, Megatron and
    the like that have no handler become `Record`.

    Args:
        data: the bytes.
        what: the file, for messages.
        handlers: handlers of the names for which a value is built.
        persistent: function that returns the value of a persistent id.

    Raises:
        ValueError: for other names, damaged data, and more than `MAX_PICKLE` bytes.

    >>> import argparse, pickle
    >>> record = read_pickle(pickle.dumps(argparse.Namespace(size=3)), "a pickle", {})
    >>> record, record.state
    (<argparse.Namespace>, {'size': 3})
    """
    if len(data) > MAX_PICKLE:
        raise ValueError(f"{what} has a pickle of {len(data)} bytes; at most {MAX_PICKLE} are read")
    machine = _Machine(what, handlers, persistent)
    try:
        for opcode, argument, _ in pickletools.genops(bytes(data)):
            if opcode.name == "STOP":
                (found,) = machine.stack
                return found
            machine.step(opcode.name, argument)
    except _Refused as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # raised by Python's functions on values of a damaged file
        raise ValueError(f"{what} is damaged: its pickle cannot be read ({str(error)[:200]})") from None
    raise ValueError(f"{what} is damaged: its pickle has no end")


class _Refused(ValueError):
    """A pickle's request is refused; the message contains all details."""


class _Machine:
    """A stack, a memo, and the effect of each opcode on them."""

    def __init__(self, what: object, handlers: Handlers, persistent: Callable[[Any], Any] | None):
        self.what, self.handlers, self.persistent = what, handlers, persistent
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[Any, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if name == "MEMOIZE" else int(argument)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[int(argument)])
        elif name == "MARK":
            # The following values go to a separate stack, so that damaged data cannot reach below the mark.
            self.marks.append(stack)
            self.stack = []
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[len(stack) - count :])]
        elif hasattr(self, f"do_{name.lower()}"):
            getattr(self, f"do_{name.lower()}")(argument)
        elif any(word in name for word in _VALUES):
            stack.append(argument)
        elif name not in ("PROTO", "FRAME"):
            raise _Refused(f"{self.what}: pickles with the opcode {name} are not read; save with torch.save's default")

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def do_global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self.stack.append(Global(f"{module}.{name}"))

    def do_stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(Global(f"{module}.{name}"))

    def do_reduce(self, _: Any) -> None:
        args = self.stack.pop()
        self.stack.append(self.call(self.stack.pop(), args))

    do_newobj = do_reduce

    def do_newobj_ex(self, _: Any) -> None:
        named, args = self.stack.pop(), self.stack.pop()
        self.stack.append(self.call(self.stack.pop(), (*args, named) if named else args))

    def call(self, function: Any, args: tuple[Any, ...]) -> Any:
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise TypeError("what is called is not a name, or its arguments are not a tuple")
        if function == "torch._tensor._rebuild_from_type_v2":  # of a class derived from Tensor, with its attributes
            return self.call(args[0], args[2])
        # By name only: it is never looked up in this process.
        if function in self.handlers:
            return self.handlers[function](*args)
        if function in _RECORDED or function.startswith(_RECORDED_MODULES):
            return Record(function, args)
        raise _Refused(
            f"{self.what} wants to call {function[:200]!r} when it is read, which is refused: files are read without "
            "running what they name. Save a state dict of tensors and plain values"
        )

    def do_build(self, _: Any) -> None:
        state = self.stack.pop()
        # Python would set attributes of any object here, functions and classes included.
        if isinstance(self.stack[-1], Record):
            self.stack[-1].state = state
        elif not isinstance(self.stack[-1], dict):  # an OrderedDict of a state dict has versions of modules
            raise TypeError("a state of what has none")

    def do_persid(self, argument: Any) -> None:
        if self.persistent is None:
            raise TypeError("a persistent id where there are none")
        self.stack.append(self.persistent(argument))

    def do_binpersid(self, _: Any) -> None:
        self.do_persid(self.stack.pop())

    def do_append(self, _: Any) -> None:
        item = self.stack.pop()
        self.extend([item])

    def do_appends(self, _: Any) -> None:
        self.extend(self.since_mark())

    do_additems = do_appends

    def extend(self, items: list[Any]) -> None:
        owner = self.stack[-1]
        target = owner.items if isinstance(owner, Record) else owner
        if not isinstance(target, list):
            raise TypeError("items of what is not a list")
        target.extend(items)

    def do_setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def do_setitems(self, _: Any) -> None:
        self.set_items(self.since_mark())

    def set_items(self, items: list[Any]) -> None:
        owner, pairs = self.stack[-1], list(zip(items[::2], items[1::2], strict=True))
        if isinstance(owner, Record):
            owner.items.extend(pairs)
        elif isinstance(owner, dict):
            owner.update((checked_key(key), value) for key, value in pairs)
        else:
            raise TypeError("items of what is not a dict")

    def do_list(self, _: Any) -> None:
        items = self.since_mark()
        self.stack.append(items)

    def do_dict(self, _: Any) -> None:
        items = self.since_mark()
        self.stack.append({})
        self.set_items(items)

    def do_tuple(self, _: Any) -> None:
        items = self.since_mark()
        self.stack.append(tuple(items))

    do_frozenset = do_tuple

    def do_pop(self, _: Any) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.since_mark()

    def do_pop_mark(self, _: Any) -> None:
        self.since_mark()

    def do_dup(self, _: Any) -> None:
        self.stack.append(self.stack[-1])


def checked_key(key: Any) -> Any:
    """Return a key of a dict.

    Raises:
        TypeError: for one that is neither a plain value nor a tuple of these.
    """
    # Only flat tuples: Python hashes nested ones recursively, and crashes on deep ones.
    parts = key if type(key) is tuple else (key,)
    if not all(isinstance(part, (*_PLAIN, Record)) for part in parts):
        raise TypeError("a key of a dict that is not a plain value")
    return key
