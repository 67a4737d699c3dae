"""Fields of a foreign file: of a ``config.json``, an ``adapter_config.json``, or Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

REQUIRED: Any = object()
"""Default of a required field."""


class Fields:
    """The named fields of a foreign file: each is read, known to have no effect, or refused by name.

    Args:
        values: fields by name.
        what: name of the file, for messages.
        tensors: tensors of the checkpoint.
        without_effect: names of fields that change no number, and may stay unread.

    >>> fields = Fields({"hidden_size": 8, "use_cache": True}, "config.json", without_effect=["use_cache"])
    >>> fields.take("hidden_size", int, 4), fields.take("num_layers", int, 2)
    (8, 2)
    >>> fields.finish()
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        what: str,
        tensors: Collection[Any] = (),
        *,
        without_effect: Collection[str] = (),
    ):
        self._values, self._what, self.tensors = dict(values), what, tensors
        self._given, self._without_effect = frozenset(values), without_effect

    def take(self, name: str, kind: type, default: Any) -> Any:
        """Return a field, or ``default`` where it is absent or null.

        Raises:
            ValueError: for a value that is not of this kind, and for a `REQUIRED` field that is absent.
        """
        value = self._values.pop(name, None)
        if value is None and default is REQUIRED:
            raise ValueError(f"{self._what} has no field {name}")
        if value is None:
            return default
        if kind is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"{self._what}: {name} must be of type {kind.__name__}, got {_short(value)}")
        return value

    def has(self, *names: str) -> bool:
        """Return whether there is one of these fields that is not null; none of them counts as read."""
        return any(self._values.get(name) is not None for name in names)

    def raw(self, name: str) -> Any:
        """Return a field of any kind, None where it is absent."""
        return self._values.pop(name, None)

    def optional(self, name: str, kind: type, default: Any) -> Any:
        """Return a field that may be null; ``default`` where it is absent. Raises like `take`."""
        return self.take(name, kind, None if name in self._values else default)

    def expect(self, name: str, *allowed: Any) -> None:
        """Raise ValueError for a field with another value; absent and null stand for the first."""
        value = self._values.pop(name, None)
        if value is not None and not any(type(value) is type(other) and value == other for other in allowed):
            raise self.refused(name, value, f"only {' or '.join(map(repr, allowed))} is supported")

    def skip(self, *names: str) -> None:
        """Skip fields without effect."""
        for name in names:
            self._values.pop(name, None)

    def read_common(self) -> None:
        """Read the fields that a format has for every architecture: none here. Raises like `expect`."""

    def refused(self, name: str, value: Any, why: str) -> ValueError:
        """Return the error about an unsupported field."""
        return ValueError(f"{self._what}: {name} is {_short(value)}; {why}")

    def unfit(self, error: TypeError) -> ValueError:
        """Return the error about a field whose value no configuration takes, with the words of ``error``."""
        return ValueError(f"{self._what}: {error}")

    def unread(self, names: Collection[str]) -> list[str]:
        """Return those of the names, sorted, of fields that nothing has read."""
        return sorted(name for name in names if name in self._values)

    def finish(self, ignore: Collection[str] = ()) -> None:
        """Raise ValueError for fields that nothing has read; null stands for a field that is absent.

        Args:
            ignore: names of fields that a caller knows to change no number. One that was read is refused.
        """
        followed = sorted(name for name in self._given - self._values.keys() if name in ignore)
        if followed:
            raise ValueError(
                f"{self._what}: {', '.join(followed)} cannot be ignored, because the model is built by it; leave it "
                "out of ignore_fields"
            )
        left = [name for name, value in self._values.items() if value is not None]
        left = sorted(name for name in left if name not in self._without_effect and name not in ignore)
        if left:
            raise ValueError(
                f"{self._what} has fields that are unknown here and may change numbers: "
                f"{', '.join(f'{name[:60]}={_short(self._values[name])}' for name in left[:8])}"
                f"{f', and {len(left) - 8} more' if len(left) > 8 else ''}; name those that do not in ignore_fields "
                "(--ignore-fields on the command line)"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:56]} ..."
