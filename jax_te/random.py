"""Named streams of random keys."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state
from jax.tree_util import GetAttrKey, register_pytree_with_keys_class

from jax_te._validation import check_seed, checked
from jax_te.sharding import current_mesh
from jax_te.typing import Array

__all__ = [
    "DATA_PARALLEL_RNG",
    "EXPERT_PARALLEL_RNG",
    "MODEL_PARALLEL_RNG",
    "RNGStatesTracker",
    "StreamState",
    "model_parallel_seed",
    "model_parallel_seeds",
]

DATA_PARALLEL_RNG = "data-parallel-rng"
"""Stream that draws the same on all devices of the tensor axis; Megatron's default generator has the same seed."""

MODEL_PARALLEL_RNG = "model-parallel-rng"
"""Stream that draws separately on every device of the tensor axis."""

EXPERT_PARALLEL_RNG = "expert-parallel-rng"
"""Stream that draws separately on every device of the expert and tensor axes."""

RANK_AXES: dict[str, tuple[str, ...]] = {
    MODEL_PARALLEL_RNG: ("tensor",),
    EXPERT_PARALLEL_RNG: ("expert", "tensor"),
}
"""Mesh axes along which a stream draws separately; streams that are not listed draw the same everywhere."""


Purpose = Literal[
    "attention_probabilities",
    "cross_attention",
    "cross_attention_output",
    "drop_path",
    "dropout",
    "feed_forward",
    "feed_forward_output",
    "router_bias",
    "router_choice",
    "router_input",
    "self_attention",
    "self_attention_output",
]
"""Name of what a key is drawn for: a part of a layer, or a random choice inside of one."""


def key_for(purpose: Purpose, key: Array) -> Array:
    """Return the key of one purpose, of those that share a key.

    Numbers of layers, microbatches and positions are folded into keys as they are, and a purpose by a checksum of its
    name, which is no such number. Keys of ``jax.random.split`` would not do: the ``i``-th is ``fold_in(key, i)``.

    >>> key = jax.random.key(0)
    >>> bool(key_for("dropout", key) == key_for("drop_path", key))
    False
    """
    # crc32, not hash(): Python's hash of a string differs from process to process.
    return jax.random.fold_in(key, zlib.crc32(purpose.encode()))


class StreamState(NamedTuple):
    """A stream: its key ``[]``, and the number of keys drawn from it, uint32 ``[]``.

    >>> tracker = RNGStatesTracker()
    >>> tracker.set_states({"dropout": StreamState(jax.random.key(0), jnp.uint32(3))})
    >>> with tracker.fork("dropout") as key:
    ...     tracker.get_states()["dropout"].count.item()
    4
    """

    key: Array
    count: Array


@register_pytree_with_keys_class
class RNGStatesTracker:
    """Streams of random keys by name, each with a counter; every `fork` of a stream returns its next key.

    A tracker is a pytree whose leaves are the streams' keys and counters: pass it to a jitted function, to
    ``jax.checkpoint``, carry it through ``jax.lax.scan``, and return it if its streams must advance. Recomputation
    draws the same keys as the first pass, since keys are inputs like any other. A tracker is saved and restored like
    any pytree.

    The arrays of a program are global, so a key gives the same numbers on every mesh, and heads or positions on
    different devices have different dropout masks. Only inside ``jax.shard_map``, where code runs once for each device
    on its shard, the streams in `RANK_AXES` differ: there a fork folds the device's index along the manual axes into
    the key.

    Source: ``transformer_engine.pytorch.distributed.CudaRNGStatesTracker``;
    ``megatron.core.tensor_parallel.random.CudaRNGStatesTracker``.

    >>> tracker = RNGStatesTracker()
    >>> tracker.add("dropout", 1234)
    >>> with tracker.fork("dropout") as key:
    ...     x = jax.random.bernoulli(key, 0.5, (3,))
    >>> with tracker.fork("dropout") as key:
    ...     y = jax.random.bernoulli(key, 0.5, (3,))
    >>> tracker.get_states()["dropout"].count.item()
    2
    """

    def __init__(self) -> None:
        self.reset()

    def is_initialized(self) -> bool:
        """Return whether `add` or `set_states` was called since construction or the last `reset`."""
        return self._initialized

    def reset(self) -> None:
        """Forget all streams and seeds."""
        self._states: dict[str, StreamState] = {}
        self._seeds: frozenset[int] = frozenset()
        self._initialized = False
        self._trace = get_opaque_trace_state()

    def get_states(self) -> dict[str, StreamState]:
        """Return the streams by name: a new dict of the same arrays."""
        return dict(self._states)

    @checked
    def set_states(self, states: Mapping[str, Any]) -> None:
        """Replace the streams by those that `get_states` returned. Seeds that were added stay taken.

        Args:
            states: name -> ``(key, count)``.

        Raises:
            TypeError: for another type, or a key that is not typed.
        """
        self._states = {name: _stream(name, state) for name, state in _as_mapping(states).items()}
        self._initialized = True
        self._trace = get_opaque_trace_state()

    @checked
    def add(self, name: str, seed: int) -> None:
        """Add a stream.

        Args:
            name: name, of which a checksum is folded into the stream's key.
            seed: seed of the stream, in [0, 2^32).

        Raises:
            RuntimeError: if the name or the seed is taken.
            ValueError, TypeError: for a seed out of range, or one that is not a Python integer.
        """
        check_seed(seed)
        self._check_trace()
        if seed in self._seeds:
            raise RuntimeError(f"seed {seed} is taken by another stream, and the two would be alike; give another seed")
        if name in self._states:
            raise RuntimeError(f"stream {name!r} is there already; streams are {', '.join(sorted(self._states))}")
        # crc32, not hash(): Python's hash of a string differs from process to process.
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
        self._states[name] = StreamState(key, jnp.zeros((), jnp.uint32))
        self._seeds |= {seed}
        self._initialized = True

    @checked
    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[Array]:
        """Yield the stream's next key, typed ``[]``, and advance the stream: ``with tracker.fork(name) as key``.

        Forks may be nested. To draw several times from one key, split it. Reference code draws from a global generator
        inside of the block; here the key is passed on, for example as a layer's ``dropout_key``.

        Args:
            name: name of the stream.

        Raises:
            KeyError: for an unknown stream.
            RuntimeError: for a tracker from outside of the function that is being traced: all later calls of that
                function would draw the same keys.
        """
        if name not in self._states:
            raise KeyError(f"there is no stream {name!r}; add it first. Streams are {sorted(self._states)}")
        self._check_trace()
        state = self._states[name]
        self._states[name] = StreamState(state.key, state.count + jnp.uint32(1))
        # The count advances before the block runs: a nested fork, or an exception in it, must not draw the key again.
        yield _fold_rank(name, jax.random.fold_in(state.key, state.count))

    def copy(self) -> RNGStatesTracker:
        """Return a tracker with the same streams that belongs to the function that is being traced.

        ``jax.grad`` and ``jax.vmap`` pass a tracker on as it is, where ``jax.jit`` makes one of its own trace: the
        function that they transform copies its argument and returns the copy.

        Raises:
            RuntimeError: for a tracker whose streams are constants of the function that is being traced, which has
                closed over it: all its later calls would draw the same keys.

        >>> def loss(scale, tracker, x):
        ...     tracker = tracker.copy()
        ...     with tracker.fork("dropout") as key:
        ...         return jnp.sum(scale * x * jax.random.bernoulli(key, 0.5, x.shape)), tracker
        >>> tracker = RNGStatesTracker()
        >>> tracker.add("dropout", 1234)
        >>> gradient, tracker = jax.jit(jax.grad(loss, has_aux=True))(2.0, tracker, jnp.ones(8))
        >>> tracker.get_states()["dropout"].count.item()
        1
        """
        for state in self._states.values():
            # Under jit an argument is a tracer; a constant becomes one with the first operation.
            if not isinstance(state.count, Tracer) and isinstance(state.count + jnp.uint32(0), Tracer):
                raise RuntimeError(
                    "this tracker was not passed to the jitted function that uses it, all of whose calls would draw "
                    "the same keys: pass it as an argument, and return it"
                )
        return jax.tree.map(lambda leaf: leaf, self)

    def belongs_here(self) -> bool:
        """Return whether the streams are those of the function that is being traced, so that `fork` may draw."""
        return self._trace == get_opaque_trace_state()

    def _check_trace(self) -> None:
        if not self.belongs_here():
            raise RuntimeError(
                "this tracker was made outside of the transformed function (jit, grad, scan, checkpoint, …) that uses "
                "it, or left inside of one that has ended: pass it as an argument and return it; a function under "
                "jax.grad or jax.vmap, too, which begins with tracker = tracker.copy()"
            )

    # A trace lives no longer than its function, and cannot be pickled: a copy belongs to the trace it is made in.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_trace"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _trace=get_opaque_trace_state())

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Return the streams as the only child, and all other attributes as static data."""
        static = {name: value for name, value in self.__getstate__().items() if name != "_states"}
        return ((GetAttrKey("states"), self._states),), tuple(sorted(static.items()))

    @classmethod
    def tree_unflatten(cls, static: Any, children: Any) -> RNGStatesTracker:
        """Return a tracker of this trace from the parts of `tree_flatten_with_keys`."""
        # Not through set_states, which checks keys: JAX unflattens with placeholders in place of arrays, too.
        tracker = cls.__new__(cls)
        tracker.__setstate__({"_states": children[0], **dict(static)})
        return tracker


def _as_mapping(states: Any) -> Mapping[str, Any]:
    if not isinstance(states, Mapping):
        raise TypeError(f"states must be a dict from stream names to (key, count), got {type(states).__name__}")
    return states


def _stream(name: str, state: Any) -> StreamState:
    if not isinstance(state, tuple | list) or len(state) != 2:
        raise TypeError(f"the state of stream {name!r} must be (key, count), got {type(state).__name__}")
    key, count = state
    if not (hasattr(key, "dtype") and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
        raise TypeError(f"the key of stream {name!r} must be typed, from jax.random.key, got {key!r}")
    return StreamState(key, jnp.asarray(count, jnp.uint32))


def _fold_rank(name: str, key: Array) -> Array:
    # Along an Auto or Explicit axis arrays are global: one key already gives each device other elements.
    mesh = current_mesh()
    manual = () if mesh is None else mesh.manual_axes
    for axis in RANK_AXES.get(name, ()):
        # An axis of one device has nothing to draw apart; the key then does not vary along it.
        if axis in manual and mesh is not None and mesh.shape[axis] > 1:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    return key


@checked
def model_parallel_seeds(
    seed: int,
    *,
    tp_rank: int = 0,
    ep_rank: int = 0,
    etp_rank: int = 0,
    pp_rank: int = 0,
    dp_rank: int = 0,
) -> dict[str, int]:
    """Return the integers with which Megatron seeds a rank's streams, by stream.

    With ``base = seed + 100 pp_rank + 10 dp_rank`` they are ``base`` (data-parallel and default), ``base + 2718 +
    tp_rank`` (model-parallel) and ``base + 1024 + 100 ep_rank + etp_rank`` (expert-parallel).

    Args:
        seed: seed >= 0.
        tp_rank, ep_rank, etp_rank, pp_rank: tensor, expert, expert-tensor and pipeline rank.
        dp_rank: data-parallel rank under Megatron's ``data_parallel_random_init``; else 0.

    Raises:
        ValueError: for a seed that is not in [0, 2^32).
        TypeError: for a seed that is not a Python integer.

    Source: ``megatron.core.tensor_parallel.random.model_parallel_cuda_manual_seed``.

    >>> model_parallel_seeds(1234, tp_rank=1)
    {'data-parallel-rng': 1234, 'model-parallel-rng': 3953, 'expert-parallel-rng': 2258}
    """
    check_seed(seed)
    ranks = {"tp_rank": tp_rank, "ep_rank": ep_rank, "etp_rank": etp_rank, "pp_rank": pp_rank, "dp_rank": dp_rank}
    for name, rank in ranks.items():
        if not 0 <= rank < 2**31:
            raise ValueError(f"{name} must be the number of a device, from 0, got {rank}")
    base = seed + 100 * pp_rank + 10 * dp_rank
    return {
        DATA_PARALLEL_RNG: base,
        MODEL_PARALLEL_RNG: base + 2718 + tp_rank,
        EXPERT_PARALLEL_RNG: base + 1024 + 100 * ep_rank + etp_rank,
    }


@checked
def model_parallel_seed(seed: int, tracker: RNGStatesTracker | None = None) -> RNGStatesTracker:
    """Return a tracker with Megatron's three streams, seeded with rank 0's integers of `model_parallel_seeds`.

    All devices have the same seed; keys differ between devices only where they are drawn, see `RNGStatesTracker`.

    Args:
        seed: seed >= 0, and such that no stream's integer exceeds 2^32 - 1.
        tracker: a tracker to `reset` and fill; None for a new one.

    Raises:
        ValueError, TypeError: see `model_parallel_seeds`.

    >>> sorted(model_parallel_seed(1234).get_states())
    ['data-parallel-rng', 'expert-parallel-rng', 'model-parallel-rng']
    """
    seeds, filled = model_parallel_seeds(seed), RNGStatesTracker()
    for name, value in seeds.items():
        filled.add(name, value)  # raises for an integer out of range, before the given tracker loses its streams
    if tracker is None:
        return filled
    tracker.reset()
    for name, value in seeds.items():
        tracker.add(name, value)
    return tracker
