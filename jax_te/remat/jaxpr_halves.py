"""The equations of a program dealt out to two halves, what some results need and the rest; opened where need be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import eval_jaxpr
from jax.extend import core
from jax.extend.core import primitives

Closed: TypeAlias = Any
"""A jaxpr with its constants: a class of its own, ClosedJaxpr, before JAX 0.12, and Jaxpr since."""

_CALLS = {
    primitives.jit_p: "jaxpr",
    primitives.remat_p: "jaxpr",
    primitives.closed_call_p: "call_jaxpr",
    primitives.custom_jvp_call_p: "call_jaxpr",
    primitives.custom_vjp_call_p: "call_jaxpr",
}
"""Primitives that stand for one run of a function, and the parameter that holds it."""


# --- dealing out equations


@dataclass(frozen=True)
class Halves:
    first: dict[int, core.JaxprEqn]
    """By their position."""
    live: dict[core.Var, None]
    """What the first half reads or gives."""
    second: list[core.JaxprEqn]


def deal_out(jaxpr: core.Jaxpr, needed: Sequence[bool]) -> Halves:
    """First: what the needed outputs and the side effects depend on. Second: what the other outputs do, besides."""
    roots = [v for v, need in zip(jaxpr.outvars, needed, strict=True) if need]
    others = [v for v, need in zip(jaxpr.outvars, needed, strict=True) if not need]
    equations = dict(enumerate(jaxpr.eqns))
    first, live = _slice(equations, roots)
    rest = {i: eqn for i, eqn in equations.items() if i not in first or _free(eqn)}
    return Halves(first, live, list(_slice(rest, others)[0].values()))


def _slice(
    equations: dict[int, core.JaxprEqn], roots: Iterable[Any]
) -> tuple[dict[int, core.JaxprEqn], dict[core.Var, None]]:
    """The equations that the roots and the side effects depend on, and the variables they read, with the roots."""
    live = dict.fromkeys(v for v in roots if isinstance(v, core.Var))
    kept = {}
    for i in reversed(equations):
        eqn = equations[i]
        if _effectful(eqn) or any(v in live for v in eqn.outvars):
            if eqn.primitive.name == "optimization_barrier":  # acts on each operand alone
                pairs = [pair for pair in zip(eqn.invars, eqn.outvars, strict=True) if pair[1] in live]
                eqn = eqn.replace(invars=[pair[0] for pair in pairs], outvars=[pair[1] for pair in pairs])
            kept[i] = eqn
            live.update(dict.fromkeys(v for v in eqn.invars if isinstance(v, core.Var)))
    return {i: kept[i] for i in reversed(kept)}, live


def _effectful(eqn: core.JaxprEqn) -> bool:
    # A collective's effect only says which mesh axis it is over.
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def _free(eqn: core.JaxprEqn) -> bool:
    """Barriers and constants compute nothing: each half has its own, in place of an array kept for it."""
    constant = eqn.primitive.name in ("broadcast_in_dim", "iota") and not any(
        isinstance(v, core.Var) for v in eqn.invars
    )
    return constant or eqn.primitive.name == "optimization_barrier"


# --- opening equations


def open_equations(closed: Closed, needed: Sequence[bool]) -> Closed:
    """The same function, with every equation opened that can be and that has results for both halves."""
    while openers := _openers(closed.jaxpr, needed):
        closed = jax.make_jaxpr(functools.partial(_run_opened, closed, openers))(*closed.in_avals)
    return closed


Opener = Callable[[list[Any]], Sequence[Any]]


def _openers(jaxpr: core.Jaxpr, needed: Sequence[bool]) -> dict[int, Opener]:
    """By position, what to run in place of the equations to open."""
    halves = deal_out(jaxpr, needed)
    openers: dict[int, Opener] = {}
    for i, eqn in halves.first.items():
        wanted = [v in halves.live for v in eqn.outvars]
        if all(wanted):
            continue
        if eqn.primitive in _CALLS:
            openers[i] = functools.partial(_run_call, eqn)
        elif eqn.primitive is primitives.scan_p and (scans := _split_scan(eqn, wanted)):
            openers[i] = scans
    return openers


def _run_opened(closed: Closed, openers: Mapping[int, Opener], *args: Any) -> list[Any]:
    jaxpr = closed.jaxpr
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
    for i, eqn in enumerate(jaxpr.eqns):
        if i in openers:
            with eqn.ctx.manager, jax.named_scope(str(eqn.source_info.name_stack)):
                results = openers[i]([_read(env, v) for v in eqn.invars])
        else:
            results = _run(jaxpr, [eqn], eqn.outvars, env)
        env.update(zip(eqn.outvars, results, strict=True))
    return [_read(env, v) for v in jaxpr.outvars]


def _run_call(eqn: core.JaxprEqn, args: list[Any]) -> Sequence[Any]:
    """The function that an equation holds, run in place."""
    params, held = eqn.params, eqn.params[_CALLS[eqn.primitive]]
    if eqn.primitive is primitives.remat_p and params["differentiated"]:
        # What makes the compiler compute again, and not keep, what remat left out.
        prevent = params["prevent_cse"]
        prevent = [prevent] * len(args) if isinstance(prevent, bool) else prevent
        pinned = iter(jax.lax.optimization_barrier([x for x, pin in zip(args, prevent, strict=True) if pin]))
        args = [next(pinned) if pin else x for x, pin in zip(args, prevent, strict=True)]
    if eqn.primitive is primitives.jit_p:
        args = list(map(_placed, args, params["in_shardings"]))
    results = eval_jaxpr(getattr(held, "jaxpr", held), getattr(held, "consts", ()), *args)
    return list(map(_placed, results, params["out_shardings"])) if eqn.primitive is primitives.jit_p else results


def _placed(x: Any, sharding: Any) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)(x) if isinstance(sharding, jax.sharding.Sharding) else x


def _split_scan(eqn: core.JaxprEqn, needed: list[bool]) -> Opener | None:
    """Two scans in place of one, or None if nothing would be left for the second."""
    consts, carries = _scan_sizes(eqn)
    body = eqn.params["jaxpr"]
    while True:
        body = open_equations(body, needed)
        halves = deal_out(body.jaxpr, needed)
        read = [v in halves.live for v in body.jaxpr.invars[consts : consts + carries]]
        if not any(r and not need for r, need in zip(read, needed, strict=False)):
            break
        needed = [r or need for r, need in zip(read, needed, strict=False)] + needed[carries:]
    return functools.partial(_run_scans, eqn, body, halves, needed) if halves.second else None


def _scan_sizes(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Number of constants and of carried values."""
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # from jax 0.11
    return len(consts), len(carry)


def _run_scans(eqn: core.JaxprEqn, body: Closed, halves: Halves, needed: list[bool], args: list[Any]) -> list[Any]:
    """The two halves of a scan, the second fed with what the first kept of every step."""
    jaxpr, (consts, carries) = body.jaxpr, _scan_sizes(eqn)
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars[:consts]], [*body.consts, *args[:consts]], strict=True))
    carry_vars, x_vars = jaxpr.invars[consts : consts + carries], jaxpr.invars[consts + carries :]
    init, xs = args[consts : consts + carries], dict(zip(x_vars, args[consts + carries :], strict=True))

    def scan(equations: Iterable[core.JaxprEqn], mine: list[int], extra: list[Any]) -> tuple[list[Any], list[Any]]:
        """Results ``mine`` of the scan, and ``extra`` of every step."""
        carried = [i for i in mine if i < carries]
        outvars = [jaxpr.outvars[i] for i in mine] + extra
        half = program(jaxpr, equations, outvars)
        read = [v for v in half.invars if v in xs]

        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            env = known | dict(zip([carry_vars[i] for i in carried], carry, strict=True))
            env |= dict(zip(read, x, strict=True))
            results = eval_jaxpr(half, (), *(env[v] for v in half.invars))
            return results[: len(carried)], results[len(carried) :]

        last, ys = jax.lax.scan(
            step,
            [init[i] for i in carried],
            [xs[v] for v in read],
            **{name: eqn.params[name] for name in ("length", "reverse", "unroll")},
        )
        results = [*last, *ys]
        return results[: len(mine)], results[len(mine) :]

    here, later = ([i for i, need in enumerate(needed) if need is half] for half in (True, False))
    own = {*known, *xs, *(carry_vars[i] for i in later if i < carries)}
    kept = [v for v in program(jaxpr, halves.second, [jaxpr.outvars[i] for i in later]).invars if v not in own]
    first, stacks = scan(halves.first.values(), here, kept)
    xs |= dict(zip(kept, stacks, strict=True))
    second, _ = scan(halves.second, later, [])
    results = dict(zip([*here, *later], [*first, *second], strict=True))
    return [results[i] for i in range(len(needed))]


# --- jaxprs


def _read(env: Mapping[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, core.Literal) else env[atom]


def program(base: core.Jaxpr, equations: Iterable[core.JaxprEqn], outvars: Sequence[Any]) -> core.Jaxpr:
    """A jaxpr of these equations, whose inputs are the variables they read and do not make."""
    equations = list(equations)
    made = {v for eqn in equations for v in eqn.outvars}
    atoms = [*(v for eqn in equations for v in eqn.invars), *outvars]
    reads = dict.fromkeys(v for v in atoms if isinstance(v, core.Var) and v not in made)
    effects = set().union(*(eqn.effects for eqn in equations))
    return base.replace(constvars=[], invars=list(reads), outvars=list(outvars), eqns=equations, effects=effects)


def _run(
    base: core.Jaxpr, equations: Iterable[core.JaxprEqn], outvars: Sequence[Any], env: Mapping[Any, Any]
) -> list[Any]:
    part = program(base, equations, outvars)
    return eval_jaxpr(part, (), *(env[v] for v in part.invars))


def content(jaxpr: core.Jaxpr) -> Any:
    """What a jaxpr computes, whatever its variables are: hashable, and equal for equal programs."""
    number: dict[Any, int] = {}

    def atom(v: Any) -> Any:
        if isinstance(v, core.Literal):
            return v.aval, np.asarray(v.val).tobytes()
        return number.setdefault(v, len(number)), v.aval

    inputs = tuple(map(atom, [*jaxpr.constvars, *jaxpr.invars]))
    equations = tuple(
        (eqn.primitive, tuple(map(atom, eqn.invars)), _frozen(eqn.params), tuple(map(atom, eqn.outvars)), eqn.ctx)
        for eqn in jaxpr.eqns
    )
    return inputs, equations, tuple(map(atom, jaxpr.outvars))


def _frozen(value: Any) -> Any:
    """A parameter of an equation, hashable. What is known by nothing but its identity counts as itself."""
    if hasattr(value, "eqns"):  # a jaxpr, with constants or without
        return content(getattr(value, "jaxpr", value)), tuple(map(id, getattr(value, "consts", ())))
    if isinstance(value, dict):
        return tuple((key, _frozen(value[key])) for key in sorted(value))
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_frozen, value))
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, float):
        return repr(value)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
