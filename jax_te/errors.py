"""Exceptions of the package. Each is also the built-in type that callers expect."""


class BackendUnavailableError(ValueError):
    """A backend asked for by name cannot run this operation here; the message says why."""


class QuantizerStateError(ValueError):
    """Delayed scaling was asked for where no quantizer state is attached, it has another shape, or a derivative leaves
    it out.
    """


class CheckpointMismatchError(ValueError):
    """A checkpoint and the state it should fill differ in structure, shape or dtype."""


__all__ = ["BackendUnavailableError", "CheckpointMismatchError", "QuantizerStateError"]
