"""Whether a step counts: the one rule by which train steps, pipelines and loops of one's own skip a step.

A step is finite if its loss, the norm of its gradients and the amaxes that it has observed are. Of any other one
parameters, optimizer, quantizer states and the model's other state stay as they were.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_te.quantize import observed_finite_amaxes
from jax_te.sharding import mark_varying, varying_axes
from jax_te.typing import Array, PyTree

_SMALL = 2**15
"""Largest number of elements of a small parameter, such as a bias or a norm's scale, of which there are many."""


class Outcome(NamedTuple):
    """Outcome of a step.

    Args:
        loss: fp32 ``[]``, nan where an amax is not finite.
        norm: fp32 ``[]``, the norm of the gradients.
        finite: bool ``[]``, whether the step counts.
    """

    loss: Array
    norm: Array
    finite: Array


def outcome_of(loss: Array, grads: PyTree, quantizers: PyTree) -> Outcome:
    """Return whether a step counts, and the numbers that say so.

    Args:
        loss: loss of the step, ``[]``.
        grads: gradients of the parameters, unscaled.
        quantizers: gradients of the quantizer states, in fp32: what the step has observed.
    """
    loss, norm = loss_or_nan(loss, quantizers), global_norm(grads)
    return Outcome(loss, norm, _are_finite(loss.astype(jnp.float32), norm))


def loss_or_nan(loss: Array, quantizers: PyTree) -> Array:
    """Return the loss of a step; nan if an amax that it has observed is not finite.

    A scale that is known before its tensor, under delayed scaling, clips an inf to a finite value, and nothing that is
    computed from it shows that it was there. Its amax does.

    Args:
        loss: see `outcome_of`.
        quantizers: see `outcome_of`.
    """
    finite = observed_finite_amaxes(quantizers)
    return loss if finite is None else jnp.where(finite, loss, jnp.nan)


def gradients_or_nan(grads: PyTree, loss: Array) -> PyTree:
    """Return the gradients of a loss; nan if it is not finite, for whoever sees them alone, as an optimizer does.

    Args:
        grads: gradients; those that are not floating-point numbers stay.
        loss: result of `loss_or_nan`.
    """
    finite = once(jnp.isfinite(loss))

    def or_nan(grad: Array) -> Array:
        return jnp.where(finite, grad, jnp.nan) if jnp.issubdtype(grad.dtype, jnp.inexact) else grad

    return jax.tree.map(or_nan, grads)


def global_norm(grads: PyTree) -> Array:
    """Return the Euclidean norm of all gradients, fp32 ``[]``; not finite if an element is not, or if it overflows."""
    parts, small = [], []
    for grad in jax.tree.leaves(grads):
        # Squares of 16 bits would be rounded, and those of fp16 overflow from 256 on.
        grad = grad.astype(jnp.float32) if grad.dtype.itemsize == 2 else grad
        whole = jax.typeof(grad).sharding.mesh.empty
        joined = whole and grad.size <= _SMALL and grad.dtype == jnp.float32
        (small if joined else parts).append(grad)
    if small:
        # One kernel for all biases, because separate kernels take as long to launch as to run; the barrier keeps XLA
        # from splitting it. On a mesh shards would have to be gathered.
        parts.append(jax.lax.optimization_barrier(jnp.concatenate([grad.ravel() for grad in small])))
    squares = [jnp.sum(jnp.square(part)).astype(jnp.float32) for part in parts]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def _are_finite(*numbers: Array) -> Array:
    """Return whether all numbers, a step's loss and the norm of its gradients, are finite, bool ``[]``."""
    # Not each gradient by itself: with reductions for that beside those of the norm XLA compiles a step much longer.
    return once(jnp.all(jnp.isfinite(jnp.stack(numbers))))


def once(flag: Array) -> Array:
    """Return ``flag``, bool ``[]``, which many kernels of a program read, computed in one place."""
    # Without the barrier XLA computes this from its parts again in each kernel that reads it, that is in each
    # parameter's update: a step then takes two to three times as long to compile. On CPUs the XLA of JAX 0.10 drops
    # barriers before it fuses, but computes the value of a conditional once.
    return jax.lax.platform_dependent(flag, cpu=_behind_a_conditional, default=jax.lax.optimization_barrier)


def _behind_a_conditional(flag: Array) -> Array:
    # In a shard_map of the user's the branches must vary along the axes that the flag varies along.
    both = mark_varying((jnp.ones((), bool), jnp.zeros((), bool)), varying_axes(flag))
    return jax.lax.cond(flag, lambda: both[0], lambda: both[1])
