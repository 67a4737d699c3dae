"""Megatron's random-state tracker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from jax.tree_util import register_pytree_with_keys_class

from jax_te._validation import checked, log_hints
from jax_te.random import (
    DATA_PARALLEL_RNG,
    EXPERT_PARALLEL_RNG,
    MODEL_PARALLEL_RNG,
    RNGStatesTracker,
    StreamState,
    model_parallel_seed,
)


@register_pytree_with_keys_class
@checked
class TECudaRNGStatesTracker(RNGStatesTracker):
    """`jax_te.random.RNGStatesTracker` under Megatron's name.

    Args:
        is_inference_rng_tracker: option without effect, stored as in Megatron, whose CUDA graphs read it;
            `InferenceCudaRNGStatesTracker` draws nothing.

    Raises:
        RuntimeError: from `add`, for a name or seed that is taken.
        KeyError: from `fork`, for an unknown stream.
        TypeError: for a flag that is not True or False.

    Source: ``megatron.core.extensions.transformer_engine.TECudaRNGStatesTracker``.

    >>> tracker = TECudaRNGStatesTracker()
    >>> tracker.add("model-parallel-rng", 1234)
    >>> with tracker.fork() as key:
    ...     mask = jax.random.bernoulli(key, 0.9, (8,))
    """

    def __init__(self, is_inference_rng_tracker: bool = False):
        self.is_inference_rng_tracker = is_inference_rng_tracker
        super().__init__()


@register_pytree_with_keys_class
class InferenceCudaRNGStatesTracker(TECudaRNGStatesTracker):
    """A tracker without streams: `add` and `set_states` do nothing, and a `fork` of any name yields None.

    None is a ``dropout_key`` for evaluation: ``model.eval()``.

    Source: ``InferenceCudaRNGStatesTracker`` of ``megatron.core.tensor_parallel.random``.

    >>> with InferenceCudaRNGStatesTracker().fork() as key:
    ...     print(key)
    None
    """

    def __init__(self) -> None:
        super().__init__(is_inference_rng_tracker=True)

    @checked
    def add(self, name: str, seed: int) -> None:
        """Do nothing."""

    @checked
    def set_states(self, states: Mapping[str, Any]) -> None:
        """Do nothing."""

    # The base's fork yields a key, and this one never does.
    @checked
    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[Any]:
        """Yield None, whatever the name."""
        yield None


# The one mutable global of the public API: Megatron's functions, whose signatures stay, have no other place for it.
# Jitted functions take the tracker as an argument.
_tracker: TECudaRNGStatesTracker | None = None


@checked
def initialize_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    force_reset: bool = False,
) -> None:
    """Create the process's tracker, which `get_cuda_rng_tracker` returns, unless there is one.

    Args:
        use_te_rng_tracker, use_cudagraphable_rng: options that choose between CUDA implementations in Megatron; no
            effect.
        inference_rng_tracker: whether the tracker is an `InferenceCudaRNGStatesTracker`, which draws nothing.
        force_reset: whether to replace an existing tracker.

    Raises:
        TypeError: for a flag that is not True or False.

    Source: ``megatron.core.tensor_parallel.random.initialize_rng_tracker``.

    >>> initialize_rng_tracker(force_reset=True)
    >>> get_cuda_rng_tracker().is_initialized()
    False
    """
    log_hints(use_te_rng_tracker=use_te_rng_tracker, use_cudagraphable_rng=use_cudagraphable_rng)
    global _tracker
    if _tracker is None or force_reset:
        _tracker = InferenceCudaRNGStatesTracker() if inference_rng_tracker else TECudaRNGStatesTracker()


@checked
def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> TECudaRNGStatesTracker:
    """Return the process's tracker, created if there is none; arguments are those of `initialize_rng_tracker`.

    Jitted functions take the tracker as an argument and return it, or its states (``get_states``, ``set_states``): see
    `RNGStatesTracker`. A function in `te_checkpoint` may use the tracker directly.

    Source: ``megatron.core.tensor_parallel.random.get_cuda_rng_tracker``.

    >>> get_cuda_rng_tracker() is get_cuda_rng_tracker()
    True
    """
    initialize_rng_tracker(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    assert _tracker is not None
    return _tracker


def get_all_rng_states() -> dict[str, StreamState]:
    """Return the streams of the process's tracker by name.

    Raises:
        AssertionError: if there is no tracker, or nothing was added to it.

    Source: ``megatron.core.tensor_parallel.random.get_all_rng_states``.

    >>> model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    >>> len(get_all_rng_states())
    3
    """
    if _tracker is None or not _tracker.is_initialized():
        raise AssertionError("there are no random states yet; call model_parallel_cuda_manual_seed first")
    return _tracker.get_states()


@checked
def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    force_reset_rng: bool = False,
) -> None:
    """Seed the process's tracker with Megatron's streams, see `jax_te.random.model_parallel_seed`.

    Args:
        seed: seed >= 0, and such that no stream's integer exceeds 2^32 - 1.
        te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng: see `initialize_rng_tracker`.
        tp_rank, ep_rank, etp_rank: None or 0. One program runs on all devices, and each folds its position into the key
            when it draws; `jax_te.random.model_parallel_seeds` returns the integers of Megatron's ranks.
        force_reset_rng: whether to replace an existing tracker.

    Raises:
        ValueError: for a rank, and for a seed out of range.

    Source: ``megatron.core.tensor_parallel.random.model_parallel_cuda_manual_seed``.

    >>> model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    >>> get_data_parallel_rng_tracker_name() in get_cuda_rng_tracker().get_states()
    True
    """
    for name, rank in (("tp_rank", tp_rank), ("ep_rank", ep_rank), ("etp_rank", etp_rank)):
        # An integer would give all devices the same stream; positions are folded in inside shard_map.
        if rank not in (None, 0):
            raise ValueError(
                f"{name}={rank!r}: one program runs on all ranks, and inside shard_map each folds its own into its "
                "keys; leave it None, or 0"
            )
    model_parallel_seed(seed)  # raises for one out of range, before the tracker is replaced
    initialize_rng_tracker(te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng, force_reset_rng)
    model_parallel_seed(seed, get_cuda_rng_tracker())


def get_data_parallel_rng_tracker_name() -> str:
    """Return the name of the stream from which all tensor ranks draw the same keys.

    >>> get_data_parallel_rng_tracker_name()
    'data-parallel-rng'
    """
    return DATA_PARALLEL_RNG


def get_expert_parallel_rng_tracker_name() -> str:
    """Return the name of the stream from which every expert-parallel and tensor rank draws different keys.

    >>> get_expert_parallel_rng_tracker_name()
    'expert-parallel-rng'
    """
    return EXPERT_PARALLEL_RNG
