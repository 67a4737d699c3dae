"""The loss scale that gradients were computed with: a record in their metadata, for the optimizer to look at."""

from __future__ import annotations

import weakref
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from jax_te.training.loss_scale import LossScale
from jax_te.typing import PyTree


class UsedScale:
    """A record of the loss scale that gradients were computed with, which their metadata hold.

    All records are equal: metadata are part of what a compiled function is called with, and gradients of another step
    must not compile it again. For that reason, too, a record counts in that function alone. In
    another, its scale is unknown, as that of a copy and of an unpickled record is.

    Args:
        scale: the scale. None: unknown.
    """

    def __init__(self, scale: Any):
        # A weak reference, because metadata outlive a trace, whose arrays they would keep.
        self._scale = weakref.ref(scale) if isinstance(scale, jax.Array) else lambda: scale
        self._trace = get_opaque_trace_state(convention="nnx")

    def is_known_to_differ_from(self, scale: Any) -> bool:
        """Return whether the gradients are known to have been computed with another scale than ``scale``.

        It is not known of gradients that have left the function that computed them, or entered another, nor of those
        whose scale has been freed.
        """
        if self._trace != get_opaque_trace_state(convention="nnx"):
            return False
        used = self._scale()
        if used is None or used is scale:
            return False
        if isinstance(used, Tracer) or isinstance(scale, Tracer):
            return True  # an optimizer has a new one after each update
        if _is_deleted(used) or _is_deleted(scale):
            return False
        # By value: whatever writes an optimizer back, such as nnx.jit, gives it new arrays of the same values. The wait
        # for the device is rare, since one array serves a whole step otherwise.
        return bool(np.asarray(used) != np.asarray(scale))

    def __reduce__(self) -> tuple[Any, ...]:
        # Gradients are stored and copied, and a weak reference is not.
        return UsedScale, (None,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UsedScale)

    def __hash__(self) -> int:
        return hash(UsedScale)


def mark_as_scaled(grads: nnx.State, scaler: LossScale) -> nnx.State:
    """Return gradients whose Variables record the loss scale that was used; `used_scales` reads it."""
    # In metadata, which survive jit and jax.tree.map, unlike an attribute of the State.
    used = UsedScale(scaler.scale)
    return nnx.from_flat_state(
        [(path, grad.replace(grad.get_value(), loss_scale=used)) for path, grad in nnx.to_flat_state(grads)]
    )


def used_scales(grads: PyTree) -> list[UsedScale | None]:
    """Return the recorded loss scale of each gradient in a Variable, None without; bare arrays cannot record one."""
    leaves = jax.tree.leaves(grads, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return [leaf.get_metadata().get("loss_scale") for leaf in leaves if isinstance(leaf, nnx.Variable)]


def _is_deleted(scale: Any) -> bool:
    return isinstance(scale, jax.Array) and scale.is_deleted()
