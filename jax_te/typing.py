"""Type aliases used in signatures across the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np


class Words(NamedTuple):
    """Words of a message about an argument, beside its type in ``Annotated``.

    Args:
        words: description of an allowed value. Empty: the type's own.
        remedy: remedy to name at the end of the message.
        error: type of the exception, where a reference's differs from the usual one.
        holds: test of a value, where the type says too little.

    >>> Words("a path", remedy="give the run's folder").words
    'a path'
    """

    words: str
    remedy: str = ""
    error: type[Exception] | None = None
    holds: Callable[[Any], bool] | None = None


@runtime_checkable
class _HasDType(Protocol):
    @property
    def dtype(self) -> np.dtype: ...


def _is_dtype(value: Any) -> bool:
    """Return whether ``np.dtype`` makes of a value the dtype of numbers or flags; not of None and arrays."""
    if value is None or isinstance(value, list | tuple | dict | np.generic | np.ndarray) or hasattr(value, "devices"):
        return False
    try:
        return np.dtype(value).kind not in "OSUMm"
    except Exception:  # NumPy's are of several types
        return False


DTypeLike: TypeAlias = Annotated[
    str | type[Any] | np.dtype | _HasDType, Words("a dtype, such as 'bfloat16'", error=ValueError, holds=_is_dtype)
]
"""A dtype for ``jax.numpy.dtype``, as in ``jax.typing``."""

LogicalAxes: TypeAlias = tuple[str | None, ...]
"""One logical axis name (or None) for each dimension of an array."""

PyTree: TypeAlias = Any

BackendName: TypeAlias = Literal["auto", "te", "xla"]
"""Names of backends; ``"auto"`` leaves the choice to the library."""

ParallelMode: TypeAlias = Annotated[
    Literal["column", "row", "Column", "Row"] | None, Words("None, 'column' or 'row' (also 'Column' or 'Row')")
]
"""How a linear layer is split over the mesh's tensor axis; Transformer Engine's documents write both forms."""

SplitAxis: TypeAlias = Literal["column", "row"]
"""A `ParallelMode` of a layer that is split, in the one form that its attributes have."""

GpuName: TypeAlias = Literal["h200"]
"""GPUs for which ``jax-te doctor`` predicts times."""

PricedRecipe: TypeAlias = Literal["none", "delayed", "current", "block"]
"""Recipes for which it does."""

WriterName: TypeAlias = Literal["jsonl", "tensorboard", "wandb"]
"""Names of the writers of `jax_te.metrics.MetricsLog`."""

TensorGroup: TypeAlias = Annotated[
    str | None,
    Words(
        "None or the mesh axis 'tensor'",
        "JAX has no process groups: the mesh that jax.set_mesh sets says which devices split a layer",
    ),
]
"""Replacement of Transformer Engine's tensor-parallel process group."""

NoProcessGroups: TypeAlias = Annotated[
    None,
    Words("None", "JAX has no process groups: the mesh that jax.set_mesh sets has axes in their place"),
]
"""Megatron-Core's collection of process groups, which JAX does not have."""

_INITIALIZER = Words("a function init(key, shape, dtype)")


def _is_key(value: Any) -> bool:
    """Return whether a value is a key of ``jax.random.key``, or one of ``jax.random.PRNGKey``: uint32 numbers."""
    name = str(getattr(value, "dtype", ""))
    return name.startswith("key<") or (name == "uint32" and getattr(value, "ndim", 0) > 0)


_KEY = Words("a key, as jax.random.key(0) gives", holds=_is_key)

if TYPE_CHECKING:
    import jax
    from jax.typing import ArrayLike

    Array: TypeAlias = jax.Array
    Initializer: TypeAlias = Annotated[Callable[..., Array], _INITIALIZER]
    """``init(key, shape, dtype) -> array``, as in ``jax.nn.initializers``."""
    Key: TypeAlias = Annotated[Array, _KEY]
    """A key of ``jax.random``."""


def __getattr__(name: str) -> Any:
    # Configurations and the command line's --help read DTypeLike alone; importing jax for it would cost them a second.
    if name not in ("Array", "ArrayLike", "Initializer", "Key"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import jax

    return {
        "Array": jax.Array,
        "ArrayLike": jax.typing.ArrayLike,
        "Initializer": Annotated[Callable[..., jax.Array], _INITIALIZER],
        "Key": Annotated[jax.Array, _KEY],
    }[name]


__all__ = [
    "Array",
    "ArrayLike",
    "BackendName",
    "DTypeLike",
    "Initializer",
    "Key",
    "LogicalAxes",
    "NoProcessGroups",
    "PyTree",
    "TensorGroup",
    "Words",
    "WriterName",
]
