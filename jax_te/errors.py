"""Exceptions of the package. Each is also the built-in type that callers expect."""

from collections.abc import Iterable, Mapping, Sequence

Record = tuple[str, tuple[int, ...]]
"""Dtype and shape of an array."""


class BackendUnavailableError(ValueError):
    """A backend requested by name cannot run this operation here; the message gives the reason."""


class QuantizerStateError(ValueError):
    """Delayed scaling was requested where no quantizer state is attached, or it has another shape; or a derivative
    leaves out that state, or a router's; or one in Linen would add up the next states of two calls.
    """


class CheckpointMismatchError(ValueError):
    """A checkpoint and the state it should fill differ in structure, shape or dtype."""


def mismatch(what: str, lines: Sequence[str]) -> CheckpointMismatchError:
    """Return the error about tensors that do not fit: a line for each of the first 20, cut to 300 characters.

    >>> mismatch("the tensors are others:", ["a is missing"])
    CheckpointMismatchError('the tensors are others:\\na is missing')
    """
    more = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
    return CheckpointMismatchError("\n".join([what, *(line[:300] for line in lines[:_LINES]), *more]))


_LINES = 20
"""Maximum number of lines of a `mismatch`."""
SHOWN = 8
"""Maximum number of differences of a kind in a message."""


def differences(there: Mapping[str, Record | str], here: Mapping[str, Record | str], names: Iterable[str]) -> str:
    """Return missing and unexpected names and wrong shapes and dtypes, as text for a `CheckpointMismatchError`.

    Args:
        there, here: dtype and shape of each array of what is read and of what it should fill; of a value that is no
            array, a description. None: no such value.
        names: names that differ.

    >>> differences({"a": ("int32", (2,)), "b": ("int32", ())}, {"a": ("int32", (3,))}, ["a", "b"])
    '1 unexpected: b is int32[] there, absent here. 1 of another shape: a is int32[2] there, int32[3] here'
    """
    kinds: dict[str, list[str]] = {
        "missing": [],
        "unexpected": [],
        "no array": [],
        "of another shape": [],
        "of another dtype": [],
    }
    for name in sorted(names):
        one, other = there.get(name), here.get(name)
        if one is None or other is None:
            kind = "missing" if one is None else "unexpected"
        elif isinstance(one, str) or isinstance(other, str):
            kind = "no array"
        else:
            kind = "of another shape" if one[1] != other[1] else "of another dtype"
        kinds[kind].append(f"{name} is {_shown(one)} there, {_shown(other)} here")
    more = {kind: [f"and {len(lines) - SHOWN} more"] * (len(lines) > SHOWN) for kind, lines in kinds.items()}
    return ". ".join(
        f"{len(lines)} {kind}: {'; '.join(lines[:SHOWN] + more[kind])}" for kind, lines in kinds.items() if lines
    )


def _shown(record: Record | str | None) -> str:
    if record is None or isinstance(record, str):
        return record or "absent"
    return f"{record[0]}{list(record[1])}"


__all__ = ["BackendUnavailableError", "CheckpointMismatchError", "QuantizerStateError"]
