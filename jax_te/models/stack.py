"""Running a stack of layers: unrolled or scanned, keeping or recomputing what backward needs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jax_te.config import RecomputeConfig
from jax_te.layers import TransformerLayer
from jax_te.quantize import QuantizerState
from jax_te.quantize.internal import as_float32_inside
from jax_te.remat import RecomputePolicy, checkpoint, recompute_policy, selective_recompute
from jax_te.typing import Array

_NO_RECOMPUTE = RecomputeConfig()

UNROLL_LIMIT = 96
"""Layers of a stack that ``"auto"`` unrolls at most, see `runs_scanned`."""


def runs_scanned(scan: bool | str, num_layers: int) -> bool:
    """Whether a stack of ``num_layers`` layers runs in a loop.

    A loop gains compile time, which in an unrolled stack grows with the number of layers. It costs work: parameters are
    stacked on the way in, what backward needs is written to stacked arrays and read from them, and the compiler fuses
    nothing over its borders. At 1.3 billion parameters on an H200 that is a quarter of the speed, so ``"auto"`` is
    unrolled up to `UNROLL_LIMIT` layers, from where compile time grows faster than the stack, and scanned above.
    ``jax-te bench --model`` measures both; docs/recompute.md has the figures.

    Args:
        scan: True, False, or ``"auto"``.
        num_layers: of the stack. The two stacks of a `T5Model` are asked for one by one.

    Raises:
        ValueError: for another ``scan``.

    >>> runs_scanned("auto", UNROLL_LIMIT), runs_scanned("auto", UNROLL_LIMIT + 1), runs_scanned(True, 2)
    (False, True, True)
    """
    if isinstance(scan, bool):
        return scan
    if scan != "auto":
        raise ValueError(f"scan_layers must be True, False or 'auto', got {scan!r}")
    return num_layers > UNROLL_LIMIT


def layer_keys(key: Array | None, count: int) -> list[Array | None]:
    """A key for each of ``count`` layers, or None for each where there is none."""
    return [None if key is None else jax.random.fold_in(key, i) for i in range(count)]


@dataclass(frozen=True)
class Group:
    """Consecutive layers ``first``, …, ``first + count - 1``, which backward recomputes together if ``recomputed``."""

    first: int
    count: int
    recomputed: bool


def recompute_groups(config: RecomputeConfig, num_layers: int) -> list[Group]:
    """The layers of a stack in the groups that full recomputation makes of them; each by itself without it.

    >>> config = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
    >>> [(group.first, group.count) for group in recompute_groups(config, 3)]
    [(0, 2), (2, 1)]
    """
    full, size = config.recompute_granularity == "full", config.recompute_num_layers
    if not full or size is None:
        return [Group(i, 1, False) for i in range(num_layers)]
    if config.recompute_method == "block":
        return [Group(i, 1, i < size) for i in range(num_layers)]
    return [Group(i, min(size, num_layers - i), True) for i in range(0, num_layers, size)]


def check_recompute_policy(config: RecomputeConfig, policy: RecomputePolicy | str | None) -> None:
    """Raise ValueError for a policy that is unknown, has no effect because layers are not checkpointed whole, or keeps
    everything where something is to be recomputed.

    >>> check_recompute_policy(RecomputeConfig(), "full")
    """
    chosen, full = recompute_policy(policy), config.recompute_granularity == "full"
    if chosen is None:
        if config.recompute_granularity is None:
            return
        raise ValueError(f"recompute_policy={policy!r} keeps everything; leave recompute_granularity None for that")
    if not full and not chosen.keeps_nothing:
        raise ValueError(
            f"recompute_policy={policy!r} says what full recomputation keeps, and recompute_granularity is "
            f"{config.recompute_granularity!r}; set recompute_granularity='full' in the config"
        )
    if config.distribute_saved_activations and not chosen.keeps_nothing:
        raise ValueError(
            "distribute_saved_activations=True goes with recompute_policy='full' only, under which inputs are all that "
            f"is kept; got {policy!r}"
        )


def run_layers(
    layers: Sequence[TransformerLayer],
    x: Array,
    keys: Sequence[Array | None],
    *,
    recompute: RecomputeConfig = _NO_RECOMPUTE,
    policy: RecomputePolicy | str | None = "full",
    scan: bool | str = "auto",
    mask_types: dict[str, str] | None = None,
    **arrays: Any,
) -> Array:
    """``x`` through one layer after the other.

    Args:
        layers: of one stack.
        x: ``[b, s, h]``.
        keys: dropout key of each layer, or None for each.
        recompute: what backward computes again.
        policy: what full recomputation keeps inside of the layers, see `jax_te.remat.checkpoint`. Without full
            recomputation leave it.
        scan: run consecutive layers of the same structure in a loop, ``jax.lax.scan``, whose body is compiled once; of
            groups of layers that are recomputed together, the groups. ``"auto"``: as `runs_scanned` says.
            The parameters stay those of the single layers: they are stacked on the way in, which takes memory for a
            copy of them. A layer that differs from its neighbours, because it has a recipe or a name of its own, runs
            by itself.
        mask_types: arguments that are strings: ``self_attn_mask_type``, ``enc_dec_attn_mask_type``,
            ``core_attention_bias_type``.
        **arrays: the other arguments of `TransformerLayer`, the same for all layers.

    Returns:
        ``[b, s, h]``.

    Raises:
        ValueError: for a ``policy`` that is unknown, or that ``recompute`` gives no effect; for another ``scan``.

    >>> layers = [TransformerLayer(16, 32, 2, layer_number=number, rngs=nnx.Rngs(number)) for number in (1, 2)]
    >>> recompute = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    >>> run_layers(layers, jnp.ones((2, 8, 16)), [None, None], recompute=recompute, policy="save_gemms").shape
    (2, 8, 16)
    """
    check_recompute_policy(recompute, policy)
    plain = functools.partial(_run_group, mask_types or {})
    saved = functools.partial(
        checkpoint,
        plain,
        policy=policy,
        distribute_saved_activations=recompute.distribute_saved_activations,
    )
    calls: dict[bool, Callable[..., Array]] = {False: plain, True: saved}
    modules = recompute.recompute_modules if recompute.recompute_granularity == "selective" else ()
    groups = recompute_groups(recompute, len(layers))
    with selective_recompute(*modules):
        if runs_scanned(scan, len(layers)):
            return _run_scanned(calls, groups, layers, x, keys, arrays)
        for group in groups:
            members = range(group.first, group.first + group.count)
            x = calls[group.recomputed](
                x, [layers[i] for i in members], [keys[i] for i in members], arrays, first=group.first
            )
        return x


def _run_group(
    mask_types: dict[str, str],
    x: Array,
    layers: Sequence[TransformerLayer],
    keys: Sequence[Any],
    arrays: dict[str, Any],
    first: int | None = None,
) -> Array:
    """Consecutive layers, the first of which has number ``first``, or any number inside a loop."""
    for i, (layer, key) in enumerate(zip(layers, keys, strict=True)):
        with jax.named_scope("layer" if first is None else f"layer_{first + i}"):
            x = layer(x, dropout_key=key, **mask_types, **arrays)
    return x


def _run_scanned(
    calls: dict[bool, Callable[..., Array]],
    groups: Sequence[Group],
    layers: Sequence[TransformerLayer],
    x: Array,
    keys: Sequence[Any],
    arrays: dict[str, Any],
) -> Array:
    """Consecutive groups of the same structure in one loop."""
    split = [nnx.split(layer) for layer in layers]

    def structure(group: Group) -> tuple[Any, ...]:
        members = split[group.first : group.first + group.count]
        return group.recomputed, *(graphdef for graphdef, _ in members)

    for (recomputed, *graphdefs), alike in itertools.groupby(groups, key=structure):
        parts = []
        for group in alike:
            members = range(group.first, group.first + group.count)
            parts.append(([_stackable(split[i][1]) for i in members], [keys[i] for i in members]))
        with jax.named_scope("layers"):
            x = _scan(calls[recomputed], graphdefs, parts, x, arrays)
    return x


def _stackable(state: nnx.State) -> nnx.State:
    """With quantizer states as plain fp32: JAX stacks no arrays whose gradients merge by maximum. Here each is used
    once, so that nothing is to be merged.
    """

    def plain(variable: Any) -> Any:
        is_state = isinstance(variable, QuantizerState)
        return variable.replace(as_float32_inside(variable.get_value())) if is_state else variable

    return jax.tree.map(plain, state, is_leaf=lambda node: isinstance(node, nnx.Variable))


def _scan(
    call: Callable[..., Array],
    graphdefs: Sequence[Any],
    parts: list[tuple[list[nnx.State], list[Any]]],
    x: Array,
    arrays: dict[str, Any],
) -> Array:
    def run(x: Array, part: tuple[list[nnx.State], list[Any]]) -> Array:
        states, keys = part
        return call(x, [nnx.merge(*pair) for pair in zip(graphdefs, states, strict=True)], keys, arrays)

    if len(parts) == 1:
        return run(x, parts[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack([_apart(leaf) for leaf in leaves]), *parts)
    return jax.lax.scan(lambda x, part: (run(x, part), None), x, stacked)[0]


def _apart(leaf: Array) -> Array:
    """``leaf``, whose gradient is fused with nothing: XLA takes long to decide that for each of many slices."""
    return jax.lax.optimization_barrier(leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf
