"""Tensors in MXFP4, the form of gpt-oss's experts: read as the values that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_te.errors import CheckpointMismatchError, mismatch

_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32
"""Number of values with one scale."""

_VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_VALUES = np.concatenate([_VALUES, -_VALUES])


@dataclass(frozen=True)
class PackedMXFP4:
    """A tensor ``[E, C, R]`` as E2M1 values ``[E, R, C / 32, 16]``, two in a byte, with ``scale [E, R, C / 32]``.

    The low half of a byte comes first. A scale is an exponent of 2, plus 127.
    """

    name: str
    data: np.ndarray
    scale: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        experts, rows, groups, _ = self.data.shape
        return experts, groups * _GROUP, rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the values, fp32 unless another dtype is asked for.

        Raises:
            CheckpointMismatchError: for values that are not finite.
        """
        experts, rows, groups, _ = self.data.shape
        pairs = np.stack([self.data & 0x0F, self.data >> 4], axis=-1).reshape(experts, rows, groups, _GROUP)
        exponents = self.scale.astype(np.int32)[..., None] - 127
        with np.errstate(over="ignore"):
            values = np.ldexp(_VALUES[pairs], exponents).reshape(experts, rows, groups * _GROUP).swapaxes(1, 2)
        return np.asarray(finite(values, self.name), dtype)


def finite(values: np.ndarray, name: str) -> np.ndarray:
    """Return the products of values and scales.

    Raises:
        CheckpointMismatchError: for products that are not finite: the tensor, or its scales, are damaged.
    """
    if not np.isfinite(values).all():
        raise CheckpointMismatchError(f"{name} times its scales has values that are not finite, and is damaged")
    return values


def read_mxfp4(stored: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the tensors of a folder, those in MXFP4 together with their scales.

    Raises:
        CheckpointMismatchError: for values without scales, scales without values, and those that do not fit.
    """
    tensors: dict[str, Any] = {}
    packed: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in stored.items():
        kind = next((end for end in (_BLOCKS, _SCALES) if name.endswith(end)), None)
        if kind is None:
            tensors[name] = tensor
        else:
            packed.setdefault(name.removesuffix(kind), {})[kind] = tensor
    lines = []
    for name, parts in packed.items():
        problem = _problem(parts.get(_BLOCKS), parts.get(_SCALES))
        lines += [f"{name} {problem}"] if problem else []
        if not problem:
            tensors[name] = PackedMXFP4(name, parts[_BLOCKS], parts[_SCALES])
    if lines:
        raise mismatch("tensors in MXFP4 and their scales do not fit:", lines)
    return tensors


def _problem(data: np.ndarray | None, scale: np.ndarray | None) -> str:
    if data is None or scale is None:
        return f"has no tensor {_BLOCKS if data is None else _SCALES}"
    if data.dtype != np.uint8 or scale.dtype != np.uint8:
        return f"is of {data.dtype} with scales of {scale.dtype}, and both must be uint8"
    if data.ndim != 4 or data.shape[-1] != _GROUP // 2 or scale.shape != data.shape[:-1]:
        return f"is {list(data.shape)} with scales {list(scale.shape)}: [E, R, C, 16] and [E, R, C] fit"
    return "has scales of 255, which stand for no number" if (scale == 255).any() else ""
