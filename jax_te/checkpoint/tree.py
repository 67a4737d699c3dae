"""A training state as a tree of names and arrays, which is what a checkpoint stores, and checksums of its leaves."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jax_te.typing import Array, PyTree

Name = tuple[str, ...]

FORMAT = 2
"""Version of the checkpoints that are written. 1, the version of those that name none, had checksums without order."""

SMALL = 2**20
"""The largest number of elements whose checksum the host computes."""

PARAMETERS = "params"
"""What the names of parameters in a training state begin with."""

NO_MESH = jax.sharding.Mesh(np.empty((), object), ())
"""Under it, arrays may be on any devices; under another one JAX takes arrays on its devices only, in its order."""


def named_leaves(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[Name, Any]:
    """Return the leaves of a pytree by their paths' names, in leaf order; NNX Variables add no name.

    Args:
        tree: the pytree.
        is_leaf: as in ``jax.tree.leaves``.

    Raises:
        ValueError: if two leaves have the same name.

    >>> list(named_leaves({"layers": [nnx.Param(jnp.ones(2))]}))
    [('layers', '0')]
    """
    # Variables are unwrapped, so that a checkpoint does not depend on how NNX names what is inside one.
    plain = jax.tree.map(_unwrap, tree, is_leaf=_is_variable)
    found = [(tuple(map(_part, path)), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(plain, is_leaf)]
    leaves = dict(found)
    if len(leaves) != len(found):
        raise ValueError("two leaves of the state have the same name, so it cannot be stored by name")
    return leaves


def nest(leaves: dict[Name, Any]) -> dict[str, Any]:
    """Return nested dicts of leaves given by name.

    >>> nest({("a", "b"): 1, ("c",): 2})
    {'a': {'b': 1}, 'c': 2}
    """
    root: dict[str, Any] = {}
    for name, leaf in leaves.items():
        node = root
        for part in name[:-1]:
            node = node.setdefault(part, {})
        node[name[-1]] = leaf
    return root


def stored_parts(leaves: dict[Name, Any]) -> dict[str, Any]:
    """Return the trees that are stored: parameters apart, so that a model can be loaded without its optimizer.

    >>> stored_parts({("params", "a"): 1, ("step",): 2})
    {'params': {'params': {'a': 1}}, 'train': {'step': 2}}
    """
    parts: dict[str, dict[Name, Any]] = {PARAMETERS: {}, "train": {}}
    for name, leaf in leaves.items():
        parts[PARAMETERS if name[0] == PARAMETERS else "train"][name] = leaf
    return {part: nest(content) for part, content in parts.items() if content}


def records(leaves: dict[Name, Any]) -> dict[str, list[Any]]:
    """Return dtype and shape of each leaf as stored (a typed key is stored as its data).

    >>> records({("a",): jnp.arange(4, dtype=jnp.int32)})
    {'a': ['int32', [4]]}
    """
    result = {}
    for name, leaf in leaves.items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        result["/".join(name)] = [np.dtype(leaf.dtype).name, list(leaf.shape)]
    return result


def checksums(leaves: dict[Name, Array], *, version: int = FORMAT) -> dict[str, int]:
    """Return a checksum of each leaf: 32 bits, that do not depend on the leaf's sharding.

    Any change of one element changes it, and so do (but for one case in 2**32) elements in another order.

    Args:
        leaves: arrays by name.
        version: format of the checkpoint. In format 1 the checksum is the sum of the bits, in any order.

    >>> checksums({("a",): jnp.arange(4)}, version=1)
    {'a': 6}
    >>> checksums({("a",): jnp.arange(4)}) == checksums({("a",): jnp.arange(4)[::-1]})
    False
    """
    sums: dict[str, Any] = {}
    with jax.set_mesh(NO_MESH):
        # Copies of what the host computes with start together, and are there when it comes to them.
        arrays = {name: _data(leaf) for name, leaf in leaves.items()}
        for leaf in filter(_on_host, arrays.values()):
            leaf.copy_to_host_async()
        # One program for each leaf, because leaves may be on different meshes. A GPU has them all in its queue before
        # the first result is asked for; XLA's CPU runtime aborts when programs with collectives wait too long for one
        # of its threads, so there each is waited for before the next starts.
        for name, leaf in arrays.items():
            value = _checksum(leaf, ordered=version > 1)
            queued = isinstance(value, jax.Array) and all(device.platform != "cpu" for device in value.devices())
            sums["/".join(name)] = value if queued else int(value)
    return {name: int(value) for name, value in jax.device_get(sums).items()}


def crc32(body: dict[str, Any]) -> int:
    """Return the CRC-32 of a dict's JSON text.

    >>> crc32({"a": 1, "b": 2}) == crc32({"b": 2, "a": 1})
    True
    """
    # Keys are sorted: a metadata file that is read back need not have them in the order of writing.
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _data(leaf: Any) -> Array:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jnp.asarray(leaf)


def _on_host(leaf: Array) -> bool:
    """Return whether the host computes the checksum: it reads a small array sooner than a program is compiled."""
    return leaf.size <= SMALL and (leaf.is_fully_addressable or leaf.is_fully_replicated)


def _checksum(leaf: Array, *, ordered: bool) -> Array | np.uint32:
    if not _on_host(leaf):
        return _sum_on_devices(leaf, ordered)
    values = np.asarray(leaf).reshape(-1)
    words = values.view({1: np.uint8, 2: np.uint16}.get(values.itemsize, np.uint32)).astype(np.uint32)
    return np.sum(_mix(words, np.arange(words.size, dtype=np.uint32)) if ordered else words, dtype=np.uint32)


@partial(jax.jit, static_argnums=1)
def _sum_on_devices(leaf: Array, ordered: bool) -> Array:
    """The same of an array where it is. A sum of integers, unlike one of floats, does not depend on the sharding."""
    words = _words(leaf)
    if ordered:
        # Of each element in the flat array; iotas are made in shards, where flattening would gather the whole.
        strides = np.cumprod([1, *words.shape[:0:-1]], dtype=np.uint64)[::-1].astype(np.uint32)
        steps = [lax.broadcasted_iota(jnp.uint32, words.shape, axis) * strides[axis] for axis in range(words.ndim)]
        words = _mix(words, sum(steps, jnp.uint32(0)))
    return jnp.sum(words, dtype=jnp.uint32)


def _words(leaf: Array) -> Array:
    """The array's bits, an element in one word or, if it has eight bytes, in two along a last axis."""
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    if leaf.dtype == jnp.bool_:  # bitcast_convert_type takes no bool
        leaf = leaf.astype(jnp.uint8)
    info = jnp.iinfo if jnp.issubdtype(leaf.dtype, jnp.integer) else jnp.finfo
    # A bitcast to a smaller type adds an axis.
    unsigned = jnp.dtype(f"uint{min(info(leaf.dtype).bits, 32)}")
    return lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


def _mix(words: Any, position: Any) -> Any:
    """Return words that depend on their position, for NumPy and JAX arrays: the last steps of MurmurHash3.

    At any one position it is a bijection, so that another word there is another result. A mere product of word and
    position would miss that 1.0 and -1.0 have changed places: their words differ by 2**31.
    """
    words = words + position * np.uint32(0x9E3779B9)
    words = (words ^ (words >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return words ^ (words >> np.uint32(16))


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _unwrap(node: Any) -> Any:
    return node.get_raw_value() if _is_variable(node) else node


def _part(entry: Any) -> str:
    # Entries of a path have one of these, by the kind of their node: dict, dataclass, list.
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
