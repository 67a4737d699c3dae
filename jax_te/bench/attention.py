"""Causal attention on long sequences, in bf16 and FP8, sharded over a mesh's context axis."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_te.bench.gradients import Gradient, gradient, measure
from jax_te.bench.settings import Row, Settings
from jax_te.config import CpCommType, ParallelConfig
from jax_te.ops import ContextParallel, dot_product_attention
from jax_te.ops.te import available
from jax_te.quantize import (
    AttentionState,
    attention_precision_of,
    init_attention_state,
    with_max_gradients_inside,
)
from jax_te.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from jax_te.sharding import make_mesh, named_sharding
from jax_te.typing import Array, BackendName, LogicalAxes

AXES: LogicalAxes = ("batch", "sequence", "heads", None)
Attend = Callable[..., Array]
"""``attend(q, k, v, state) -> [b, s, n, d]``; the state is that of a recipe, and None without one."""


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Sizes of attention.

    Args:
        batch, sequence: sizes of its tokens.
        heads, groups: numbers of query heads and of key/value heads.
        head_dim: size of a head.
    """

    batch: int
    sequence: int
    heads: int
    groups: int
    head_dim: int

    @property
    def flops(self) -> float:
        """Floating-point operations of forward's two products and backward's five, over half of the scores."""
        return 3.5 * 4 * self.batch * self.sequence**2 * self.heads * self.head_dim / 2


def with_fp8_attention(recipe: Recipe | None, passes: Literal["both", "forward", "backward"] = "both") -> Recipe | None:
    """Return a recipe under which attention runs in FP8, too; without one None.

    Args:
        recipe: delayed or current scaling, or None.
        passes: passes of attention in FP8.

    Raises:
        ValueError: for a recipe that has no FP8 attention.
    """
    if recipe is None:
        return None
    if not isinstance(recipe, (DelayedScaling, Float8CurrentScaling)):
        raise ValueError(f"attention runs in FP8 under delayed and current, not under {recipe.name}")
    return dataclasses.replace(recipe, fp8_dpa=True, fp8_dpa_fwd=passes != "backward", fp8_dpa_bwd=passes != "forward")


def fp8_attention_label(recipe: Recipe | None) -> str:
    """Return the words by which a row says which passes of attention are in FP8, "" if none is.

    >>> fp8_attention_label(DelayedScaling(fp8_dpa=True, fp8_dpa_fwd=False))
    ' fp8_dpa backward'
    """
    precision = attention_precision_of(recipe)
    if precision is None:
        return ""
    of_pass = {None: "", "fp8_dpa_fwd": " backward", "fp8_dpa_bwd": " forward"}
    return f" fp8_dpa{of_pass[precision.unquantized_pass]}"


def bench_attention(
    recipes: Sequence[Recipe | None],
    kinds: Sequence[CpCommType],
    sizes: AttentionSizes,
    mesh: ParallelConfig | None,
    settings: Settings,
) -> Iterator[Row]:
    """Yield rows of causal attention alone, forward and backward, timed in turn.

    They are jax_te's under each recipe and te.jax's in bf16: each on one device, then each kind of context parallelism
    in zig-zag order.

    Args:
        recipes: recipes with ``fp8_dpa``; None: bf16.
        kinds: names in `jax_te.config.CP_COMM_TYPES`.
        sizes: sizes of queries, keys and values.
        mesh: mesh with a context axis. None: one device only.
        settings: rounds and calls of the measurement.
    """
    made = None if mesh is None else make_mesh(mesh)
    kinds = () if made is None else kinds
    contestants = []
    for recipe in recipes:
        name = "jax_te" if recipe is None else f"jax_te {recipe.name}{fp8_attention_label(recipe)}"
        attend = _ours(settings.backend, recipe, None)
        contestants.append(_contestant(f"{name}, one device", sizes, None, attend, recipe))
        for kind in kinds:
            attend = _ours(settings.backend, recipe, kind)
            contestants.append(_contestant(f"{name}, {kind}", sizes, made, attend, recipe))
    if available()[0]:
        contestants.append(_te_jax("te.jax, one device", sizes, None, None))
        contestants += [
            _te_jax(f"te.jax, {kind}", sizes, made, kind) for kind in kinds if kind in ("p2p", "all_gather")
        ]
    measure(contestants, settings)
    alone: dict[str, float] = {}
    for contestant in contestants:
        library, _, where = contestant.name.partition(", ")
        row = contestant.row(sizes.flops, 1 if made is None or where == "one device" else made.size)
        alone.setdefault(library, row["tflops"])  # the first of a library is on one device
        yield row | {"of_one_device": round(row["tflops"] / alone[library], 3)}


def _ours(backend: BackendName, recipe: Recipe | None, kind: CpCommType | None) -> Attend:
    context_parallel = ContextParallel() if kind is None else ContextParallel(cp_comm_type=kind, cp_load_balanced=True)

    def attend(q: Array, k: Array, v: Array, state: AttentionState | None) -> Array:
        return dot_product_attention(
            (q, k, v),
            mask_type="causal",
            recipe=recipe,
            state=state,
            backend=backend,
            out_axes=AXES,
            context_parallel=context_parallel,
        )

    return attend


def _te_jax(name: str, sizes: AttentionSizes, mesh: Mesh | None, kind: str | None) -> Gradient:
    from jax_te.bench.peers.te_jax import raw_context  # Transformer Engine is optional
    from jax_te.bench.peers.te_jax_attention import raw_attention

    with raw_context(None, mesh):
        attend = raw_attention(sizes.head_dim, sizes.heads, sizes.groups, kind)
        return _contestant(name, sizes, mesh, lambda q, k, v, state: attend(q, k, v), None, own_mesh=True)


def _contestant(
    name: str,
    sizes: AttentionSizes,
    mesh: Mesh | None,
    attend: Attend,
    recipe: Recipe | None,
    *,
    own_mesh: bool = False,
) -> Gradient:
    """Compile the gradients of ``sum(attend(q, k, v, state) * dy)``."""

    def apply(q: Array, k: Array, v: Array, state: Any) -> Array:
        return attend(q, k, v, with_max_gradients_inside(state))

    def draw(seed: int, count: int) -> Array:
        shape = (sizes.batch, sizes.sequence, count, sizes.head_dim)
        x = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        return x if mesh is None else jax.device_put(x, named_sharding(AXES, mesh))

    counts = (sizes.heads, sizes.groups, sizes.groups, sizes.heads)
    q, k, v, dy = (draw(seed, count) for seed, count in enumerate(counts))

    # te.jax is inside of its own context for a mesh, which jax.set_mesh would replace.
    with contextlib.nullcontext() if mesh is None or own_mesh else jax.set_mesh(mesh):
        # Gradients sharded as their inputs are, as in training; the compiler might leave them whole.
        where = None if mesh is None else (named_sharding(AXES, mesh),) * 3
        if recipe is None:
            return gradient(name, lambda q, k, v: apply(q, k, v, None), (q, k, v), dy, where)
        state = _settled(apply, (q, k, v), dy, init_attention_state(recipe))
        everywhere = jax.tree.map(lambda _: named_sharding((), mesh), state) if mesh is not None else None
        return gradient(name, apply, (q, k, v, state), dy, where and (*where, everywhere))


def _settled(attend: Attend, qkv: tuple[Array, ...], dy: Array, state: AttentionState | None) -> Any:
    """Return a recipe's state after some steps: under its first scales most gradients would be 0."""

    @jax.jit
    def next_state(qkv: tuple[Array, ...], state: Any, dy: Array) -> Any:
        return jax.vjp(attend, *qkv, state)[1](dy)[-1]

    for _ in range(3 if state is not None else 0):
        state = next_state(qkv, state, dy)
    return state
