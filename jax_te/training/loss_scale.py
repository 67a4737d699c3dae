"""Loss scaling for half-precision gradients."""

from __future__ import annotations

import abc
import math
from dataclasses import InitVar, dataclass, field, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.tree_util import GetAttrKey

from jax_te._validation import check_annotations, check_float, check_leaves, check_positive, checked
from jax_te.training.registration import register_dataclass
from jax_te.typing import Array, PyTree


class LossScale(abc.ABC):
    """Base of the loss scalers: pytrees in a `TrainState`.

    `scale_loss` multiplies the loss before differentiation, `unscale` divides the gradients, and `update` returns the
    next step's scaler, given whether all gradients were finite.
    """

    scale: Any

    @checked
    def scale_loss(self, loss: Array) -> Array:
        """Return ``loss * scale`` in fp32. ``[]`` -> ``[]``."""
        return loss.astype(jnp.float32) * self.scale

    def unscale(self, grads: PyTree) -> PyTree:
        """Return gradients, of any shapes, divided by the scale, in fp32."""
        # Multiplied by the reciprocal, as in Megatron: a division would round differently.
        check_leaves("grads", grads)
        for grad in jax.tree.leaves(grads):
            check_float("unscale", grad)
        inverse = 1.0 / self.scale
        is_one = isinstance(inverse, float) and inverse == 1.0

        def unscaled(grad: Array) -> Array:
            wide = grad.astype(jnp.float32)
            # In a trace this is one operation less for each gradient. Outside of one the product is kept, because the
            # result must not be the caller's own array, as fp32 gradients would be: either may be donated.
            return wide if is_one and isinstance(wide, Tracer) else wide * inverse

        return jax.tree.map(unscaled, grads)

    @abc.abstractmethod
    @checked
    def update(self, finite: Array) -> LossScale:
        """Return the scaler of the next step, given whether all gradients were finite (bool ``[]``)."""


@register_dataclass
@dataclass(frozen=True, kw_only=True)
class ConstantLossScale(LossScale):
    """A scale that never changes. The default, 1, leaves loss and gradients alone: right for fp32 and bf16.

    Args:
        scale: finite scale > 0.

    Raises:
        ValueError: for another scale.

    Source: ``megatron.core.optimizer.grad_scaler.ConstantGradScaler``.

    >>> float(ConstantLossScale(scale=4.0).scale_loss(jnp.float32(0.5)))
    2.0
    """

    scale: float = field(default=1.0, metadata={"static": True})

    def __post_init__(self) -> None:
        check_annotations(self, ConstantLossScale)
        if not (math.isfinite(self.scale) and self.scale > 0.0):
            raise ValueError(f"scale must be finite and > 0, got {self.scale!r}")

    @checked
    def update(self, finite: Array) -> ConstantLossScale:
        """Return the scaler itself."""
        return self


class _State(NamedTuple):
    """What a `DynamicLossScale` changes from step to step, and the scale that it began with."""

    initial_scale: float
    scale: Any
    growth_tracker: Any
    hysteresis_tracker: Any


class _KeptState:
    """Default of an argument that is not given: None; as attribute of a scaler its `_State`.

    ``dataclasses.replace`` gives the new scaler as arguments what it reads as attributes of the old one.
    """

    def __get__(self, scaler: Any, owner: Any) -> _State | None:
        return None if scaler is None else _State(*(getattr(scaler, name) for name in _State._fields))


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, kw_only=True)
class DynamicLossScale(LossScale):
    """A scale that grows while gradients are finite and shrinks when they are not: for fp16.

    After ``growth_interval`` finite steps in a row the scale is multiplied by ``growth_factor``. A non-finite step
    resets that count; from the ``hysteresis``-th non-finite step since the last growth on, each multiplies the scale by
    ``backoff_factor``.

    ``dataclasses.replace`` changes options and keeps the scale in use, within the bounds, and the counts of steps; with
    another ``initial_scale`` it begins again.

    Args:
        initial_scale: scale of the first step.
        growth_interval: number of consecutive finite steps between growths, >= 1.
        growth_factor: factor by which the scale grows, > 1.
        backoff_factor: factor by which the scale is lowered, in (0, 1).
        hysteresis: number of non-finite steps before the scale backs off, >= 1.
        min_scale: the scale never falls below it, > 0.
        max_scale: the scale never rises above it; finite in fp32, so the scale cannot reach inf (Megatron has no such
            bound).

    Attributes:
        scale: fp32 ``[]``, the scale in use.
        growth_tracker: i32 ``[]``, finite steps in a row.
        hysteresis_tracker: i32 ``[]``, non-finite steps left before the scale backs off.

    Raises:
        ValueError: for a field outside the above, or unless ``min_scale <= initial_scale <= max_scale``.

    Source: ``megatron.core.optimizer.grad_scaler.DynamicGradScaler``.

    >>> scaler = DynamicLossScale(initial_scale=1024.0, hysteresis=1)
    >>> float(scaler.update(jnp.array(False)).scale)
    512.0
    """

    initial_scale: float = 2.0**32
    growth_interval: int = 1000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    hysteresis: int = 2
    min_scale: float = 1.0
    max_scale: float = 2.0**32
    # Arrays have no hash; equal scalers have equal options.
    scale: Array = field(init=False, hash=False)
    growth_tracker: Array = field(init=False, hash=False)
    hysteresis_tracker: Array = field(init=False, hash=False)
    _kept: InitVar[Any] = _KeptState()

    def __post_init__(self, _kept: Any) -> None:
        check_annotations(self, DynamicLossScale)
        check_positive(growth_interval=self.growth_interval, hysteresis=self.hysteresis)
        if not (math.isfinite(self.growth_factor) and self.growth_factor > 1.0):
            raise ValueError(f"growth_factor must be finite and > 1, got {self.growth_factor!r}")
        if not 0.0 < self.backoff_factor < 1.0:
            raise ValueError(f"backoff_factor must be in (0, 1), got {self.backoff_factor!r}")
        largest = float(jnp.finfo(jnp.float32).max)
        smallest = float(jnp.finfo(jnp.float32).tiny)
        if not smallest <= self.min_scale <= self.initial_scale <= self.max_scale <= largest:
            raise ValueError(
                f"scales must satisfy {smallest:.3g} <= min_scale <= initial_scale <= max_scale <= {largest:.3g}, got "
                f"min_scale {self.min_scale!r}, initial_scale {self.initial_scale!r}, max_scale {self.max_scale!r}"
            )
        for name, value in self._begun(_kept).items():
            object.__setattr__(self, name, value)  # the dataclass is frozen

    def _begun(self, kept: _State | None) -> dict[str, Array]:
        """Return the arrays of a new scaler: of the first step, or within its bounds those of the one it replaces."""
        if kept is None or kept.initial_scale != self.initial_scale:
            return {
                "scale": jnp.asarray(self.initial_scale, jnp.float32),
                "growth_tracker": jnp.zeros((), jnp.int32),
                "hysteresis_tracker": jnp.asarray(self.hysteresis, jnp.int32),
            }
        return {
            "scale": jnp.clip(kept.scale, self.min_scale, self.max_scale),
            "growth_tracker": kept.growth_tracker,
            "hysteresis_tracker": jnp.minimum(kept.hysteresis_tracker, self.hysteresis),
        }

    @checked
    def update(self, finite: Array) -> DynamicLossScale:
        """Return the scaler after a step, given whether all its gradients were finite (bool ``[]``)."""
        grown = self.growth_tracker + 1 >= self.growth_interval
        left = jnp.maximum(self.hysteresis_tracker - 1, 0)
        larger = jnp.minimum(self.scale * self.growth_factor, self.max_scale)
        smaller = jnp.maximum(self.scale * self.backoff_factor, self.min_scale)
        # Not by the constructor: its checks need concrete values, and these are traced.
        return self.tree_unflatten(
            self._options(),
            (
                jnp.where(finite, jnp.where(grown, larger, self.scale), jnp.where(left == 0, smaller, self.scale)),
                jnp.where(finite & ~grown, self.growth_tracker + 1, 0),
                jnp.where(finite, jnp.where(grown, self.hysteresis, self.hysteresis_tracker), left),
            ),
        )

    def _options(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in _OPTIONS)

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return the arrays with their names, and the static fields (for ``jax.tree``)."""
        return tuple((GetAttrKey(name), getattr(self, name)) for name in _ARRAYS), self._options()

    @classmethod
    def tree_unflatten(cls, options: tuple[Any, ...], arrays: Any) -> DynamicLossScale:
        """Return a scaler from flattened fields, unchecked (for ``jax.tree``)."""
        # jax.tree fills the leaves with placeholders, shapes and shardings as well.
        new = object.__new__(cls)
        for name, value in zip(_OPTIONS + _ARRAYS, (*options, *arrays), strict=True):
            object.__setattr__(new, name, value)
        return new


_OPTIONS = tuple(option.name for option in fields(DynamicLossScale) if option.init)
_ARRAYS = tuple(array.name for array in fields(DynamicLossScale) if not array.init)
