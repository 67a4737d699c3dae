"""Statistics of the tensors that a running program quantizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_te._validation import check_leaves, checked
from jax_te.quantize.quantizer import Quantizer, column_axis
from jax_te.quantize.scaling import amax
from jax_te.quantize.tensor import QuantizedTensor
from jax_te.typing import Array

STATISTICS = ("amax", "scale", "underflow", "saturation", "mse", "relative_mse")
"""Names of the recorded statistics, in this order; see `quantization_statistics`."""

_FORMATS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float4_e2m1fn": "e2m1"}
"""Dtypes whose format has a shorter name. Another one, of a quantizer of one's own, has the dtype's."""

ambient_observer = jax.make_user_context(None)


@dataclass(eq=False)
class Observer:
    """Collects statistics of every quantized tensor; `observe_quantization` yields one.

    Attributes:
        records: ``{(module, role): [one dict of STATISTICS for each time it was quantized]}``, module a path such as
            ``"layers.0.self_attention.qkv"`` and role ``"x"``, ``"kernel"`` or ``"grad"``.
        formats: name of the format that each tensor was quantized to, with the same keys.
        group_amaxes: amaxes of the groups of a tensor that has several (experts), where a record has the largest, with
            the same keys: one list for each record.
    """

    records: dict[tuple[str, str], list[dict[str, float]]] = field(default_factory=dict)
    formats: dict[tuple[str, str], str] = field(default_factory=dict)
    group_amaxes: dict[tuple[str, str], list[list[float]]] = field(default_factory=dict)

    @checked
    def record(self, name: str | None, role: str, quantizer: Quantizer, statistics: dict[str, Array]) -> None:
        """Record a tensor that is about to be quantized; while tracing, too: numbers arrive when the program runs.

        Args:
            name, role: name of its layer, and its role in it.
            quantizer: quantizer of the tensor.
            statistics: values for the names in `STATISTICS`; and ``"group_amaxes"``, fp32 ``[e]``, of one that
                has several groups.

        Raises:
            ValueError: for a name in `STATISTICS` that has no value.
        """
        if missing := [statistic for statistic in STATISTICS if statistic not in statistics]:
            raise ValueError(f"statistics must have a value for each of {', '.join(STATISTICS)}; missing: {missing}")
        check_leaves("statistics", statistics)
        # One array, so that a tensor costs one call to the host.
        values = jnp.stack([statistics[statistic] for statistic in STATISTICS])
        key = (name or "unnamed", role)
        name_of_dtype = jnp.dtype(quantizer.dtype).name
        self.formats[key] = _FORMATS.get(name_of_dtype, name_of_dtype)
        jax.debug.callback(self._append, values, statistics.get("group_amaxes"), key=_Static(key))

    def _append(self, values: Any, group_amaxes: Any, *, key: _Static) -> None:
        row: dict[str, float] = dict(zip(STATISTICS, np.asarray(values).tolist(), strict=True))
        self.records.setdefault(key.value, []).append(row)
        if group_amaxes is not None:
            self.group_amaxes.setdefault(key.value, []).append(np.asarray(group_amaxes).tolist())


@dataclass(frozen=True)
class _Static:
    """A key that passes through a callback unchanged, because it is static."""

    value: tuple[str, str]


jax.tree_util.register_static(_Static)


@checked
@contextlib.contextmanager
def observe_quantization(observer: Observer | None = None) -> Iterator[Observer]:
    """Yield an `Observer` that records statistics of every tensor that functions called inside quantize.

    Functions are traced again under an observer, and run slower: quantization is not fused into other operations.
    Leaving the context waits for all records. Modules have the names that `name_modules` assigned.

    Args:
        observer: an observer to continue with; functions that were traced under it are not traced again. None: a new
            one.

    >>> import jax
    >>> from jax_te.ops import LinearOptions, dense
    >>> from jax_te.recipe import Float8CurrentScaling
    >>> x, options = jnp.ones((16, 16)), LinearOptions(name="mine")
    >>> with observe_quantization() as observer:
    ...     y = dense(x, x, recipe=Float8CurrentScaling(), options=options)
    >>> sorted(observer.records), observer.records["mine", "x"][0]["amax"]
    ([('mine', 'kernel'), ('mine', 'x')], 1.0)
    """
    observer = Observer() if observer is None else observer
    with ambient_observer(observer):
        yield observer
    # Callbacks run asynchronously: without this, records of the last calls could be missing.
    jax.effects_barrier()


@checked
def quantization_statistics(
    x: Array, quantizer: Quantizer, scale: Array | None = None, *, axis: int = -1
) -> dict[str, Array]:
    """Return statistics of the quantization of ``x`` as fp32 scalars, by the names in `STATISTICS`.

    - ``amax``: the largest absolute value of ``x``.
    - ``scale``: the largest scale; blocks of zeros, and blocks whose scale rounds to zero, do not count.
    - ``underflow``: fraction of the non-zero values that become 0.
    - ``saturation``: fraction of the values that exceed the largest value of the format.
    - ``mse``: mean squared error of the quantized values; ``relative_mse``: divided by the mean square of ``x``.

    Args:
        x, quantizer, scale, axis: see `quantize`.

    >>> from jax_te.quantize import TensorQuantizer
    >>> stats = quantization_statistics(jnp.array([[448.0, 0.0, 1e-4]]), TensorQuantizer(dtype=jnp.float8_e4m3fn))
    >>> float(stats["underflow"]), float(stats["saturation"])
    (0.5, 0.0)
    """
    q, _ = quantizer.quantize(x, scale, axis=column_axis(x, axis), columnwise=False)
    return _statistics(x, q.data, q.values(), _inverse_scales(q), x.size)


def stacked_statistics(x: Array, q: QuantizedTensor, elements: Array | int) -> dict[str, Array]:
    """Return `quantization_statistics` of several tensors, taken together as one with several scales.

    Args:
        x: the tensors, stacked along a first axis.
        q: results of quantizing each matrix by itself, with their arrays stacked likewise.
        elements: number of the elements of ``x`` that count; all others are zeros.
    """
    values, inverse = jax.vmap(lambda q: (q.values(), _inverse_scales(q)))(q)
    return _statistics(x, q.data, values, inverse, elements)


def _statistics(x: Array, data: Array, values: Array, inverse: Array, elements: int | Array) -> dict[str, Array]:
    """Return the statistics of ``x``, of which ``elements`` values count and the others are padding zeros."""
    wide = x.astype(jnp.float32)
    nonzero = wide != 0.0
    # NVFP4's scale rounds to 0 for a block that is tiny compared with the tensor's amax, and the whole block with it.
    gone = (data.astype(jnp.float32) == 0.0) | (inverse == 0.0)
    largest = inverse * jnp.finfo(data.dtype).max.astype(jnp.float32)
    lost = jnp.sum(nonzero & gone) / jnp.maximum(jnp.sum(nonzero), 1)
    saturated = ((jnp.abs(wide) > largest) & (inverse > 0.0)).astype(jnp.float32)
    error = jnp.sum(jnp.square(values - wide)) / elements
    power = jnp.sum(jnp.square(wide)) / elements
    return {
        "amax": amax(x),
        "scale": _largest_scale(inverse, nonzero),
        "underflow": lost.astype(jnp.float32),
        "saturation": jnp.sum(saturated) / elements,
        "mse": error,
        # The error of a tensor of zeros is 0, not 0 / 0.
        "relative_mse": error / jnp.where(power > 0.0, power, 1.0),
    }


def _inverse_scales(q: QuantizedTensor) -> Array:
    """Return the reciprocal scale at every value (or the one of all), fp32."""
    # Values of 1 times the scales: `values` handles the layout of blocks and parts.
    return QuantizedTensor(
        data=jnp.ones(q.shape, jnp.float32),
        scale_inv=q.scale_inv,
        tensor_scale_inv=q.tensor_scale_inv,
        dtype=jnp.float32,
        block=q.block,
        axis=q.axis,
        parts=q.parts,
    ).values()


def _largest_scale(inverse: Array, used: Array) -> Array:
    scales = jnp.where(inverse > 0.0, 1.0 / inverse, 0.0)
    largest = jnp.max(jnp.where(used, scales, 0.0))
    return jnp.where(largest > 0.0, largest, jnp.max(scales))
