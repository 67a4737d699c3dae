"""The loss scale that gradients were computed with: a record in their metadata, for the optimizer to look at."""

from __future__ import annotations

import weakref
from typing import Any

import jax
from jax.extend.core import get_opaque_trace_state


class UsedScale:
    """A record of the loss scale that gradients were computed with, which their metadata hold.

    All records are equal: metadata are part of what a compiled function is called with, and gradients of another step
    must not compile it again. For that reason, too, a record tells nothing on the other side of such a function.

    Args:
        scale: the scale.
    """

    def __init__(self, scale: Any):
        # A weak reference, because metadata outlive a trace, whose arrays they would keep.
        self._scale = weakref.ref(scale) if isinstance(scale, jax.Array) else lambda: scale
        self._trace = get_opaque_trace_state(convention="nnx")

    def is_known_to_differ_from(self, scale: Any) -> bool:
        """Return whether it is another one than ``scale``; False where gradients have left the function that computed
        them, or entered another, so that nobody can know without a wait for the device."""
        if self._trace != get_opaque_trace_state(convention="nnx"):
            return False
        used = self._scale()
        # Arrays by identity: an optimizer has a new one after each update, and values are on the device.
        return used is not scale and (isinstance(scale, jax.Array) or used != scale)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UsedScale)

    def __hash__(self) -> int:
        return hash(UsedScale)
