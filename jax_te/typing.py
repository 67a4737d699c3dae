"""Type aliases used in signatures across the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np


@runtime_checkable
class _HasDType(Protocol):
    @property
    def dtype(self) -> np.dtype: ...


DTypeLike: TypeAlias = str | type[Any] | np.dtype | _HasDType
"""What ``jax.numpy.dtype`` takes, as in ``jax.typing``."""

LogicalAxes: TypeAlias = tuple[str | None, ...]
"""One logical axis name (or None) for each dimension of an array."""

PyTree: TypeAlias = Any

BackendName: TypeAlias = Literal["auto", "te", "xla"]
"""Names that choose what runs an op; ``"auto"`` leaves the choice to the library."""

WriterName: TypeAlias = Literal["jsonl", "tensorboard", "wandb"]
"""Names of the writers of `jax_te.metrics.MetricsLog`."""

if TYPE_CHECKING:
    import jax
    from jax.typing import ArrayLike

    Array: TypeAlias = jax.Array
    Initializer: TypeAlias = Callable[..., Array]
    """``init(key, shape, dtype) -> array``, as in ``jax.nn.initializers``."""


def __getattr__(name: str) -> Any:
    # Configurations and the command line's --help read DTypeLike alone; importing jax for it would cost them a second.
    if name not in ("Array", "ArrayLike", "Initializer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import jax

    return {"Array": jax.Array, "ArrayLike": jax.typing.ArrayLike, "Initializer": Callable[..., jax.Array]}[name]


__all__ = ["Array", "ArrayLike", "BackendName", "DTypeLike", "Initializer", "LogicalAxes", "PyTree", "WriterName"]
