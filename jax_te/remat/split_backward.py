"""Backward passes in two halves: gradients of the inputs first, gradients of the parameters when asked for.

The backward pass is traced, and its equations are dealt out: those that the input gradients depend on to the first
half, the others that the parameter gradients depend on to the second. Equations that hold a function of their own
(``jit``, ``remat``, custom derivatives, ``scan``) are opened where only some of their results belong to the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import eval_jaxpr
from jax.extend import core
from jax.tree_util import Partial

from jax_te.remat.jaxpr_halves import content, deal_out, open_equations, program
from jax_te.typing import Array, PyTree


def split_vjp(fn: Callable[..., Any], params: PyTree, *inputs: PyTree, has_aux: bool = False) -> tuple[Any, ...]:
    """``fn(params, *inputs)`` and its backward pass in two halves, input gradients before parameter gradients.

    A pipeline stage can pass the first on before it computes the second.

    ``backward(dy)`` computes what the input gradients depend on and nothing else; ``backward_dw()`` computes the rest
    from what the first half left behind, and repeats none of it. Both are ``jax.tree_util.Partial``: pytrees of the
    arrays they need, which may be returned from one jitted function and given to another, stacked by ``lax.scan``, or
    kept in a queue. What is traced twice from the same function and types compares equal, and is not compiled again
    (except where equations with a custom derivative rule are left: rules are told apart by identity).

    Args:
        fn: function of ``params`` and ``inputs``, differentiable as for ``jax.vjp``.
        params: pytree whose gradient may wait. Quantizer state belongs here: its gradient is its next value.
        inputs: pytrees whose gradients are needed at once.
        has_aux: ``fn`` returns ``(y, aux)``; only ``y`` is differentiated.

    Returns:
        ``(y, backward)``, or ``(y, backward, aux)``. ``backward(dy) -> (dinputs, backward_dw)`` takes a pytree like
        ``y`` and gives a tuple with one gradient for each input; ``backward_dw() -> dparams`` gives a pytree like
        ``params`` and may be called any number of times. The gradients have their primal's shape, dtype and sharding
        (float0 for integers). They come from the equations that ``jax.vjp`` runs, so they are bitwise the same where
        these run one by one; compiled, they are as far as XLA rounds two programs alike.

    Raises:
        TypeError: if ``fn`` cannot be called.
        ValueError: when ``backward`` is called, for a ``dy`` that has not the structure and types of ``y``.

    Which half an equation belongs to:

    - ``jit``, custom derivatives and ``remat`` are opened. What ``remat`` computes again for both halves is computed in
      the first and kept for the second; what only the second needs is computed there.
    - A ``scan``, such as one over layers, becomes two. The first keeps, for each step, what the second reads.
    - ``cond``, ``while``, ``shard_map`` and kernels that give several results cannot be opened: one that an input
      gradient depends on is in the first half as a whole. Call `split_vjp` inside of ``shard_map``, not around it.
    - Side effects (``jax.debug.print``, callbacks), with what they depend on, are in the first half, in order: they
      happen once, however often ``backward_dw`` is called.

    The halves are for first derivatives: rules of ``custom_jvp`` and ``custom_vjp`` that were opened do not apply when
    they are differentiated again.

    Source: Megatron-Core's ``delay_wgrad_compute`` and ``backward_dw``, Transformer Engine's ``WeightGradStore``; the
        split into B and W of Qi et al. 2023, "Zero Bubble Pipeline Parallelism".

    Two stages and two microbatches. All input gradients travel first, weight gradients are computed afterwards:

    >>> import jax.numpy as jnp
    >>> stage = lambda w, x: jnp.tanh(x @ w)
    >>> w0, w1, batch = jnp.eye(4), jnp.ones((4, 4)), jnp.ones((2, 3, 4))
    >>> queue = []
    >>> for x in batch:
    ...     h, backward0 = split_vjp(stage, w0, x)
    ...     y, backward1 = split_vjp(stage, w1, h)
    ...     (dh,), later1 = backward1(jnp.ones_like(y))  # B of stage 1: one GEMM
    ...     (dx,), later0 = backward0(dh)  # B of stage 0
    ...     queue.append((later0, later1))
    >>> dw0 = sum(later0() for later0, _ in queue)  # W
    >>> dw1 = sum(later1() for _, later1 in queue)
    >>> whole = lambda w0, w1: stage(w1, stage(w0, batch)).sum()
    >>> all(jnp.allclose(a, b) for a, b in zip((dw0, dw1), jax.grad(whole, argnums=(0, 1))(w0, w1)))
    True
    """
    if not callable(fn):
        raise TypeError(f"split_vjp takes a function of (params, *inputs), got {fn!r}")
    y, vjp, *aux = jax.vjp(fn, params, *inputs, has_aux=has_aux)
    return (y, _split(y, vjp), *aux)


def _split(y: PyTree, vjp: Any) -> Partial:
    residuals, vjp_tree = jax.tree.flatten(vjp)
    outputs = _Outputs.of(y)
    gradients: list[_Gradients] = []

    def run(residuals: list[Any], dy: list[Array]) -> list[Array]:
        dparams, *dinputs = jax.tree.unflatten(vjp_tree, residuals)(outputs.cotangent(dy))
        gradients[:] = [_Gradients.of(tuple(dinputs)), _Gradients.of(dparams)]
        return [*_Gradients.leaves(tuple(dinputs)), *_Gradients.leaves(dparams)]

    dy = [leaf for leaf, kind in zip(jax.tree.leaves(y), outputs.types, strict=True) if kind.differentiable]
    closed = jax.make_jaxpr(run)(residuals, dy)
    dinputs, dparams = gradients
    needed = [True] * dinputs.count + [False] * dparams.count
    closed = open_equations(closed, needed)

    jaxpr, values = closed.jaxpr, [*closed.consts, *residuals]
    variables = [*jaxpr.constvars, *jaxpr.invars]
    halves = deal_out(jaxpr, needed)
    second = program(jaxpr, halves.second, jaxpr.outvars[dinputs.count :])
    given = set(variables)
    between = [v for v in second.invars if v not in given]
    first = program(jaxpr, halves.first.values(), [*jaxpr.outvars[: dinputs.count], *between])

    # Where each half finds its operands: among the kept residuals, the output gradient, the first half's results.
    read = {*first.invars, *second.invars}
    kept = [i for i, v in enumerate(variables[: len(values)]) if v in read]
    table = [*(variables[i] for i in kept), *variables[len(values) :], *between]
    place = {v: i for i, v in enumerate(table)}
    half = _First(
        program=_Program(first),
        operands=tuple(place[v] for v in first.invars),
        outputs=outputs,
        gradients=dinputs,
        second=_Second(program=_Program(second), gradients=dparams),
        second_operands=tuple(place[v] for v in second.invars),
    )
    return Partial(half, [values[i] for i in kept])


# --- the halves as functions of arrays


class _Program:
    """Equations to run. Two programs are equal if they would compute the same."""

    def __init__(self, jaxpr: core.Jaxpr):
        self.jaxpr = jaxpr

    @functools.cached_property
    def _frozen(self) -> Any:
        return content(self.jaxpr)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Program) and self._frozen == other._frozen)

    def __hash__(self) -> int:
        return hash(self._frozen)

    def __call__(self, *args: Any) -> list[Any]:
        return eval_jaxpr(self.jaxpr, (), *args)


@dataclass(frozen=True)
class _Type:
    """Type of one output: what its gradient must look like."""

    name: str
    shape: tuple[int, ...]
    differentiable: bool

    @staticmethod
    def of(x: Any) -> _Type:
        aval = jax.typeof(x)
        return _Type(str(aval).removeprefix("~"), aval.shape, jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact))


@dataclass(frozen=True)
class _Outputs:
    """Structure and types of ``y``."""

    tree: Any
    types: tuple[_Type, ...]

    @staticmethod
    def of(y: PyTree) -> _Outputs:
        leaves, tree = jax.tree.flatten(y)
        return _Outputs(tree, tuple(map(_Type.of, leaves)))

    def leaves(self, dy: PyTree) -> list[Any]:
        """The leaves of ``dy`` that belong to differentiable outputs, checked."""
        leaves, tree = jax.tree.flatten(dy)
        if tree != self.tree:
            raise ValueError(f"backward takes a gradient with the structure of the output, {self.tree}, got {tree}")
        for leaf, wanted in zip(leaves, self.types, strict=True):
            given = _Type.of(leaf).name
            zero = f"float0[{','.join(map(str, wanted.shape))}]"
            allowed = (wanted.name,) if wanted.differentiable else (zero, wanted.name)
            if given not in allowed:
                raise ValueError(
                    f"backward takes {' or '.join(allowed)} for an output of type {wanted.name}, got {given}; convert "
                    "or reshard it to the output's type"
                )
        return [leaf for leaf, kind in zip(leaves, self.types, strict=True) if kind.differentiable]

    def cotangent(self, leaves: Iterable[Any]) -> PyTree:
        """The whole gradient of ``y``, float0 for its integers."""
        rest = iter(leaves)
        full = [next(rest) if kind.differentiable else _float0(kind.shape) for kind in self.types]
        return jax.tree.unflatten(self.tree, full)


@dataclass(frozen=True)
class _Gradients:
    """Structure of gradients, and the shapes of those that are float0 (None for the others)."""

    tree: Any
    float0: tuple[tuple[int, ...] | None, ...]

    @staticmethod
    def of(gradients: PyTree) -> _Gradients:
        leaves, tree = jax.tree.flatten(gradients)
        return _Gradients(tree, tuple(leaf.shape if leaf.dtype == jax.dtypes.float0 else None for leaf in leaves))

    @staticmethod
    def leaves(gradients: PyTree) -> list[Array]:
        return [leaf for leaf in jax.tree.leaves(gradients) if leaf.dtype != jax.dtypes.float0]

    @property
    def count(self) -> int:
        return self.float0.count(None)

    def build(self, leaves: Iterable[Any]) -> PyTree:
        rest = iter(leaves)
        return jax.tree.unflatten(self.tree, [next(rest) if shape is None else _float0(shape) for shape in self.float0])


def _float0(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, jax.dtypes.float0)


@dataclass(frozen=True)
class _Second:
    program: _Program
    gradients: _Gradients

    def __call__(self, operands: list[Any]) -> PyTree:
        return self.gradients.build(self.program(*operands))


@dataclass(frozen=True)
class _First:
    program: _Program
    operands: tuple[int, ...]
    outputs: _Outputs
    gradients: _Gradients
    second: _Second
    second_operands: tuple[int, ...]

    def __call__(self, residuals: list[Any], dy: PyTree) -> tuple[PyTree, Partial]:
        table = [*residuals, *self.outputs.leaves(dy)]
        results = self.program(*(table[i] for i in self.operands))
        dinputs, between = results[: self.gradients.count], results[self.gradients.count :]
        table += between
        return self.gradients.build(dinputs), Partial(self.second, [table[i] for i in self.second_operands])
