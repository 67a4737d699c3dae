"""Seeing what quantization does to the tensors of a running program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_te.quantize.quantizer import Quantizer
from jax_te.quantize.scaling import amax
from jax_te.quantize.tensor import QuantizedTensor
from jax_te.typing import Array

STATISTICS = ("amax", "scale", "underflow", "saturation", "mse", "relative_mse")
"""What is recorded of a quantized tensor, in this order."""

_FORMATS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float4_e2m1fn": "e2m1"}

_observer = jax.make_user_context(None)


@dataclass(eq=False)
class Observer:
    """Collects statistics of every quantized tensor, as `observe_quantization` gives it.

    Attributes:
        records: ``{(module, role): [one dict of STATISTICS for each time it was quantized]}``, module a path such as
            ``"layers.0.self_attention.qkv"`` and role ``"x"``, ``"kernel"`` or ``"grad"``.
        formats: name of the format that each tensor was quantized to, with the same keys.
    """

    records: dict[tuple[str, str], list[dict[str, float]]] = field(default_factory=dict)
    formats: dict[tuple[str, str], str] = field(default_factory=dict)

    def record(
        self, name: str | None, role: str, x: Array, quantizer: Quantizer, scale: Array | None, *, axis: int
    ) -> None:
        """Record a tensor that is about to be quantized. Works while tracing: the numbers arrive when it runs."""
        key = (name or "unnamed", role)
        self.formats[key] = _FORMATS[jnp.dtype(quantizer.dtype).name]
        values = jnp.stack(list(quantization_statistics(x, quantizer, scale, axis=axis).values()))
        jax.debug.callback(self._append, values, key=_Static(key))

    def _append(self, values: Any, *, key: _Static) -> None:
        row: dict[str, float] = dict(zip(STATISTICS, np.asarray(values).tolist(), strict=True))
        self.records.setdefault(key.value, []).append(row)


@dataclass(frozen=True)
class _Static:
    """A key that passes through a callback as it is."""

    value: tuple[str, str]


jax.tree_util.register_static(_Static)


@contextlib.contextmanager
def observe_quantization(observer: Observer | None = None) -> Iterator[Observer]:
    """Record statistics of every tensor that is quantized in functions called inside.

    Functions are traced again for it, and run slower: each tensor is looked at before it is quantized, so nothing is
    fused. Leaving the context waits until all records are in. Module names are those `name_modules` gave.

    Args:
        observer: one that goes on collecting; functions that were traced under it are not traced again. None: a new
            one.

    >>> import jax
    >>> from jax_te.ops import dense
    >>> from jax_te.recipe import Float8CurrentScaling
    >>> with observe_quantization() as observer:
    ...     y = dense(jnp.ones((16, 16)), jnp.ones((16, 16)), recipe=Float8CurrentScaling(), name="mine")
    >>> sorted(observer.records), observer.records["mine", "x"][0]["amax"]
    ([('mine', 'kernel'), ('mine', 'x')], 1.0)
    """
    observer = Observer() if observer is None else observer
    with _observer(observer):
        yield observer
    jax.effects_barrier()


def current_observer() -> Observer | None:
    """The observer of the innermost `observe_quantization`, or None."""
    return _observer.value


def quantization_statistics(
    x: Array, quantizer: Quantizer, scale: Array | None = None, *, axis: int = -1
) -> dict[str, Array]:
    """What quantizing ``x`` does to it, as fp32 scalars.

    - ``amax``: its largest absolute value.
    - ``scale``: the (largest) scale its values are multiplied with; blocks of zeros, and those whose scale rounds to
      zero, do not count.
    - ``underflow``: share of its non-zero values that become 0.
    - ``saturation``: share of its values that lie beyond the largest the format can hold.
    - ``mse``: mean squared error of the quantized values; ``relative_mse``: over the mean square of ``x``.

    Args:
        x, quantizer, scale, axis: as in `quantize`.

    >>> from jax_te.quantize import TensorQuantizer
    >>> stats = quantization_statistics(jnp.array([[448.0, 0.0, 1e-4]]), TensorQuantizer(dtype=jnp.float8_e4m3fn))
    >>> float(stats["underflow"]), float(stats["saturation"])
    (0.5, 0.0)
    """
    q, _ = quantizer.quantize(x, scale, axis=axis % x.ndim, columnwise=False)
    wide, values = x.astype(jnp.float32), q.values()
    nonzero = wide != 0.0
    inverse = _inverse_scales(q)
    # NVFP4's scale of a block that is tiny beside the tensor's amax rounds to 0, and all of the block with it.
    gone = (q.data.astype(jnp.float32) == 0.0) | (inverse == 0.0)
    largest = inverse * jnp.finfo(q.data.dtype).max.astype(jnp.float32)
    lost = jnp.sum(nonzero & gone) / jnp.maximum(jnp.sum(nonzero), 1)
    error = jnp.mean(jnp.square(values - wide))
    power = jnp.mean(jnp.square(wide))
    return {
        "amax": amax(x),
        "scale": _largest_scale(inverse, nonzero),
        "underflow": lost.astype(jnp.float32),
        "saturation": jnp.mean(((jnp.abs(wide) > largest) & (inverse > 0.0)).astype(jnp.float32)),
        "mse": error,
        "relative_mse": error / jnp.where(power > 0.0, power, 1.0),
    }


def _inverse_scales(q: QuantizedTensor) -> Array:
    """The reciprocal scale at every value (or the one of all), fp32."""
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
