"""Remat policies: the arrays of a function saved for backward, and where; and `remat`, which applies a policy."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import jax

from jax_te._device import default_device
from jax_te._validation import checked, log_once
from jax_te.config import RECOMPUTE_POLICIES
from jax_te.remat.at_once import gradients_at_once
from jax_te.remat.carried import is_array, run_on_copies
from jax_te.remat.sharded_input import remat_with_sharded_input
from jax_te.typing import Words

CHECKPOINT_NAMES = ("quantized", "gemm", "ffn1", "ffn2", "norm", "activation", "context")
"""Names that this package gives to arrays: ``"quantized"``, operands of backward's GEMMs; ``"gemm"``, outputs of linear
layers, which in `jax_te.ops.layernorm_mlp` have te.jax's names ``"ffn1"`` and ``"ffn2"``; ``"norm"``, ``"activation"``
and ``"context"``, outputs of norms, of activation functions and of attention cores."""

WITNESS = "witness"
"""Name of arrays without elements, which every policy with names saves: see `jax_te.ops.sharded_vjp`."""

_NAMES = Words("a tuple of names")
_GEMMS = ("gemm", "ffn1", "ffn2", "context")


@checked
@dataclass(frozen=True, kw_only=True)
class RecomputePolicy:
    """The arrays of a function that are saved for backward, in addition to its inputs. Backward recomputes all others.

    Arrays are named: by this package, see `CHECKPOINT_NAMES`, or by ``jax.ad_checkpoint.checkpoint_name``.
    Without any field the policy saves nothing, which is full recomputation. A name that no array has selects nothing;
    one that is nearly a name of this package is logged as a warning.

    Args:
        save: names of arrays that are saved on the device.
        save_all_but: names of arrays not to save, where all other named arrays are saved; ``()`` saves all. Not
            together with the other two.
        offload: names of arrays that forward moves to the host's memory, and backward moves back.

    There is no counterpart of ``jax.checkpoint_policies.save_anything_except_these_names``. It also saves unnamed
    values. The input of ``checkpoint_name`` is unnamed, and the named value is a copy of it, so nothing is freed.

    Raises:
        ValueError: for a name in both ``save`` and ``offload``, and for ``save_all_but`` with another field.
        TypeError: for a field that is not a tuple of strings.

    Source: ``jax.checkpoint_policies``; ``transformer_engine.jax.checkpoint_policies``.

    >>> RecomputePolicy(save=("gemm", "context"))
    RecomputePolicy(save=('gemm', 'context'), save_all_but=None, offload=())
    """

    save: Annotated[tuple[str, ...], _NAMES] = ()
    save_all_but: Annotated[tuple[str, ...] | None, _NAMES] = None
    offload: Annotated[tuple[str, ...], _NAMES] = ()

    def __post_init__(self) -> None:
        if (self.save or self.offload) and self.save_all_but is not None:
            raise ValueError("save_all_but goes without save and offload: it says what becomes of every name")
        twice = set(self.offload) & set(self.save)
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))} cannot be both saved and offloaded; name it once")
        for name in (*self.save, *self.offload, *(self.save_all_but or ())):
            _warn_if_misspelt(name)

    @property
    def saves_nothing(self) -> bool:
        """Whether this policy is full recomputation."""
        return self == RecomputePolicy()

    def jax_policy(self) -> Callable[..., Any] | None:
        """Return this policy as ``jax.checkpoint`` takes it; None is JAX's full recomputation.

        Raises:
            ValueError: if arrays are offloaded and the default device has no ``pinned_host`` memory.
        """
        policies = jax.checkpoint_policies
        if self.save_all_but is not None:
            return policies.save_any_names_but_these(*self.save_all_but)
        if not self.offload:
            # None is full recomputation; a policy without names would save the same, and be asked about every equation.
            return policies.save_only_these_names(*self.save, WITNESS) if self.save else None
        _check_host_memory()
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[*self.save, WITNESS],
            names_which_can_be_offloaded=list(self.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )


def _warn_if_misspelt(name: str) -> None:
    # Not refused: a name of one's own may be like one of these.
    alike = () if name in CHECKPOINT_NAMES else difflib.get_close_matches(name, CHECKPOINT_NAMES, cutoff=0.75)
    if alike:
        log_once(
            f"RecomputePolicy: {name!r} is none of this package's names; most alike: {', '.join(alike)}. A name that "
            "no array has selects nothing"
        )


def _check_host_memory() -> None:
    # Without this check XLA fails while compiling, and its error names neither the policy nor the array.
    device = default_device()
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
# The names stand in config, which imports without jax: the command line offers them before it loads jax.
POLICIES: dict[str, RecomputePolicy | None] = dict(zip(RECOMPUTE_POLICIES, _POLICIES, strict=True))
"""Policies by name. ``"none"`` saves everything; ``"full"`` nothing; ``"save_gemms"`` outputs of linear layers and of
attention cores, so that neither runs again; ``"save_quantized"`` quantized operands as well, so that nothing is
quantized twice; ``"offload_gemms"`` is ``"save_gemms"`` in host memory, which on a CPU is the same memory."""


@checked
def recompute_policy(policy: RecomputePolicy | str | None) -> RecomputePolicy | None:
    """Return the policy itself, or the one of that name in `POLICIES`; None saves everything.

    Args:
        policy: a policy, a name or None.

    Raises:
        ValueError: for an unknown name.
        TypeError: for any other type.

    >>> recompute_policy("full")
    RecomputePolicy(save=(), save_all_but=None, offload=())
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise ValueError(f"unknown recompute policy {policy!r}; allowed: {', '.join(POLICIES)}")
        return POLICIES[policy]
    return policy


@checked
def remat(
    function: Callable[..., Any],
    *args: Any,
    policy: RecomputePolicy | str | None = "full",
    distribute_saved_activations: bool = False,
    **kwargs: Any,
) -> Any:
    """Return ``function(*args, **kwargs)``; backward recomputes the arrays that ``policy`` does not save.

    Results, gradients and next states are those of the plain call. Random keys and scales are inputs, so the second
    pass draws the same masks and quantizes with the same scales. What forward changes in modules that are arguments, or
    the function itself, it changes once: counts of random streams, statistics of norms, cached kernels. The next value
    of a quantizer state leaves backward once, as the state's gradient.

    Args:
        function: a function of arrays and pytrees of arrays (modules are such pytrees), or a module. Arguments without
            arrays, like strings and flags, are passed on unchanged. Modules that a function closes over are constants,
            which it cannot change.
        *args, **kwargs: arguments of ``function``.
        policy: see `RecomputePolicy`. With None or ``"none"`` this is a plain call.
        distribute_saved_activations: whether to save the first array argument, ``[b, s, ...]``, sharded over the mesh's
            tensor axis along the sequence (logical axis ``sequence_parallel``), and all-gather it in backward. Forward
            reads it unsharded. Without a mesh, and on one tensor rank, the array itself is saved.

    Raises:
        ValueError: for an unknown policy; with ``distribute_saved_activations`` also for any policy but full
            recomputation, inside ``shard_map`` over the tensor axis, and for a first array argument that does not
            divide.
        TypeError: for a policy of another type.

    Source: ``transformer_engine.pytorch.checkpoint``.

    >>> import jax.numpy as jnp
    >>> loss = lambda w, x: remat(lambda w, x: jnp.sin(x @ w), w, x).sum()
    >>> jax.grad(loss)(jnp.zeros((2, 2)), jnp.ones((1, 2))).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    chosen = recompute_policy(policy)
    if distribute_saved_activations and (chosen is None or not chosen.saves_nothing):
        raise ValueError(
            "distribute_saved_activations=True shards the input that full recomputation saves; the policy is "
            f"{policy!r}. Take 'full', or leave it off"
        )
    if chosen is None:  # no jax.checkpoint: even one that saves everything changes what the compiler may fuse
        return function(*args, **kwargs)

    if not distribute_saved_activations:
        return _run_on_copies(functools.partial(_checkpoint, chosen), function, args, kwargs)
    if not any(map(is_array, jax.tree.leaves(args))):
        raise ValueError("distribute_saved_activations=True shards the first array argument, and there is none")
    return _run_on_copies(lambda run: functools.partial(remat_with_sharded_input, run), function, args, kwargs)


def run_with_gradients_at_once(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``, of which backward recomputes parts; see `gradients_at_once`."""
    return _run_on_copies(lambda run: lambda *arrays: run(*gradients_at_once(arrays)), function, args, kwargs)


def _run_on_copies(
    transform: Callable[..., Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    def call(operands: tuple[Any, ...]) -> Any:
        own_args, own_function, own_kwargs = operands
        return own_function(*own_args, **own_kwargs)

    # The function is an operand, too, since it may be a module, whose arrays need gradients.
    return run_on_copies(transform, call, (args, function, kwargs))


def _checkpoint(policy: RecomputePolicy, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run``, whose backward recomputes what the policy does not save."""
    recomputed = jax.checkpoint(run, policy=policy.jax_policy())
    return lambda *arrays: recomputed(*gradients_at_once(arrays))
