"""Recomputation: which arrays of a function are kept for backward, and where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np

from jax_te.config.internal import RECOMPUTE_POLICIES
from jax_te.remat.sharded_input import checkpoint_in_parts
from jax_te.typing import Array

CHECKPOINT_NAMES = ("quantized", "gemm", "ffn1", "ffn2", "norm", "activation", "context")
"""Names that this package gives to arrays: ``"quantized"``, what GEMMs of backward read; ``"gemm"``, outputs of linear
layers, which in `jax_te.ops.layernorm_mlp` have te.jax's names ``"ffn1"`` and ``"ffn2"``; outputs of norms, of
activation functions and of attention cores."""

_GEMMS = ("gemm", "ffn1", "ffn2", "context")


@dataclass(frozen=True, kw_only=True)
class RecomputePolicy:
    """What of a checkpointed function is kept beside its inputs; all else is computed again in backward.

    Arrays have names: this package's `CHECKPOINT_NAMES`, and those that ``jax.ad_checkpoint.checkpoint_name`` gives.
    Without any field it keeps nothing, which is full recomputation.

    Args:
        save: names of arrays that are kept where they are.
        save_all_but: keep all arrays that have a name, but for these; ``()`` keeps all. Not with the other two.
        offload: names of arrays that are moved to the host's memory, and back in backward.

    ``jax.checkpoint_policies.save_anything_except_these_names`` is not among these: it keeps what has no name, the
    array that a name was given to among it, from which the named one is there for nothing; so it saves no memory.

    Raises:
        ValueError: for a name that is to be saved and offloaded, and for ``save_all_but`` with another field.
        TypeError: for a field that is no tuple of strings.

    Source: ``jax.checkpoint_policies``; ``transformer_engine.jax.checkpoint_policies``.

    >>> RecomputePolicy(save=("gemm", "context"))
    RecomputePolicy(save=('gemm', 'context'), save_all_but=None, offload=())
    """

    save: tuple[str, ...] = ()
    save_all_but: tuple[str, ...] | None = None
    offload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            names = getattr(self, field.name)
            if names is not None and not (isinstance(names, tuple) and all(isinstance(name, str) for name in names)):
                raise TypeError(f"{field.name} must be a tuple of names, got {names!r}")
        if (self.save or self.offload) and self.save_all_but is not None:
            raise ValueError("save_all_but goes without save and offload: it says what becomes of every name")
        twice = set(self.offload) & set(self.save)
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))} cannot be both saved and offloaded; name it once")

    @property
    def keeps_nothing(self) -> bool:
        """Whether it is full recomputation."""
        return self == RecomputePolicy()

    def jax_policy(self) -> Callable[..., Any] | None:
        """The same for ``jax.checkpoint(policy=...)``.

        Raises:
            ValueError: if arrays are to be offloaded, and the default device has no ``pinned_host`` memory.
        """
        policies = jax.checkpoint_policies
        if self.save_all_but is not None:
            return policies.save_any_names_but_these(*self.save_all_but)
        if not self.offload:
            return policies.save_only_these_names(*self.save) if self.save else None
        _check_host_memory()
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(self.save),
            names_which_can_be_offloaded=list(self.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )


def _check_host_memory() -> None:
    device = jax.devices()[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if "pinned_host" not in kinds:
        raise ValueError(
            f"offloading needs pinned_host memory, and {device.device_kind} has {', '.join(kinds)}; save these names, "
            "or leave them out to compute them again"
        )


_POLICIES = (
    None,
    RecomputePolicy(),
    RecomputePolicy(save=_GEMMS),
    RecomputePolicy(save=(*_GEMMS, "quantized")),
    RecomputePolicy(offload=_GEMMS),
)
# The names stand in config, which imports without jax, for the command line's choices.
POLICIES: dict[str, RecomputePolicy | None] = dict(zip(RECOMPUTE_POLICIES, _POLICIES, strict=True))
"""Policies by name. ``"none"`` keeps everything; ``"full"`` nothing; ``"save_gemms"`` what linear layers and attention
cores gave, so that neither runs again; ``"save_quantized"`` quantized operands as well, so that nothing is quantized
twice; ``"offload_gemms"`` is ``"save_gemms"`` in the host's memory, which on a CPU is the same memory."""


def recompute_policy(policy: RecomputePolicy | str | None) -> RecomputePolicy | None:
    """A policy, or the one of that name in `POLICIES`; None keeps everything.

    Raises:
        ValueError: for an unknown name.
        TypeError: for anything else.

    >>> recompute_policy("full")
    RecomputePolicy(save=(), save_all_but=None, offload=())
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"unknown recompute policy {policy!r}; allowed: {', '.join(POLICIES)}")
        return POLICIES[policy]
    if policy is not None and not isinstance(policy, RecomputePolicy):
        raise TypeError(f"a recompute policy is a RecomputePolicy or a name in POLICIES, got {policy!r}")
    return policy


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    policy: RecomputePolicy | str | None = "full",
    distribute_saved_activations: bool = False,
    **kwargs: Any,
) -> Any:
    """``function(*args, **kwargs)``, of which backward computes again what ``policy`` does not keep.

    Results, gradients and next states of delayed scaling are those without it: random keys and scales are inputs, so
    the second pass draws the same masks and quantizes with the same scales, and a state's next value leaves backward
    once, as its gradient.

    Args:
        function: of arrays and pytrees of arrays, a module among them; it may also be a module. Arguments without
            arrays, like strings and flags, are passed on as they are.
        *args, **kwargs: its arguments.
        policy: see `RecomputePolicy`. None or ``"none"``: the call is as if it were not checkpointed.
        distribute_saved_activations: keep the first array argument, ``[b, s, ...]``, split over the mesh's tensor ranks
            along the sequence (logical axis ``sequence_parallel``), and gather it in backward. Forward reads it whole.
            Without a mesh, and with one tensor rank, that is the array itself.

    Raises:
        ValueError, TypeError: as `recompute_policy`; for ``distribute_saved_activations`` with another policy than
            full recomputation, inside ``shard_map`` over the tensor axis, and for a first argument that cannot be split
            so.

    Source: ``transformer_engine.pytorch.checkpoint``.

    >>> import jax.numpy as jnp
    >>> loss = lambda w, x: checkpoint(lambda w, x: jnp.sin(x @ w), w, x).sum()
    >>> jax.grad(loss)(jnp.zeros((2, 2)), jnp.ones((1, 2))).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    chosen = recompute_policy(policy)
    if distribute_saved_activations and (chosen is None or not chosen.keeps_nothing):
        raise ValueError(
            "distribute_saved_activations=True splits the input that full recomputation keeps; the policy is "
            f"{policy!r}. Take 'full', or leave it off"
        )
    if chosen is None:
        return function(*args, **kwargs)
    first, rest = jax.tree.flatten(args), jax.tree.flatten((function, kwargs))
    leaves = [*first[0], *rest[0]]
    dynamic = [leaf for leaf in leaves if _is_array(leaf)]

    def run(*arrays: Array) -> Any:
        given = iter(arrays)
        filled = [next(given) if _is_array(leaf) else leaf for leaf in leaves]
        run_args = jax.tree.unflatten(first[1], filled[: len(first[0])])
        run_function, run_kwargs = jax.tree.unflatten(rest[1], filled[len(first[0]) :])
        return run_function(*run_args, **run_kwargs)

    if distribute_saved_activations:
        if not any(map(_is_array, first[0])):
            raise ValueError("distribute_saved_activations=True splits the first array argument, and there is none")
        return checkpoint_in_parts(run, *dynamic)
    return jax.checkpoint(run, policy=chosen.jax_policy())(*dynamic)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)
