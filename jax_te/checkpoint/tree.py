"""A training state as a tree of names and arrays, as stored in a checkpoint."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_te._validation import brief
from jax_te.typing import PyTree

Name = tuple[str, ...]

FORMAT = 4
"""Version of the checkpoints that are written and read."""

STATE = "state"
"""The tree of all arrays: one, because Orbax writes the first of several while it copies the next from the devices."""

PARAMETERS = "params"
"""Prefix of parameters' names in a training state."""

NO_MESH = jax.sharding.Mesh(np.empty((), object), ())
"""No mesh: arrays may be on any devices; under a mesh JAX accepts only arrays on its devices, in its order."""


def named_leaves(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> dict[Name, Any]:
    """Return the leaves of a pytree by their paths' names, in leaf order; NNX Variables add no name.

    Names are also joined with "/" and taken apart again, so a "/" in a key is escaped, as in a URL.

    Args:
        tree: the pytree.
        is_leaf: predicate for leaves, see ``jax.tree.leaves``.

    Raises:
        ValueError: if two leaves have the same name.

    >>> list(named_leaves({"layers": [nnx.Param(jnp.ones(2))]}))
    [('layers', '0')]
    >>> list(named_leaves({"a/b.c": jnp.ones(2)}))
    [('a%2Fb.c',)]
    """
    # Variables are unwrapped, so that a checkpoint does not depend on how NNX names what is inside one.
    plain = jax.tree.map(_unwrap, tree, is_leaf=_is_variable)
    found = [(_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(plain, is_leaf)]
    leaves = dict(found)
    if len(leaves) != len(found):
        raise ValueError("two leaves of the state have the same name, so it cannot be stored by name")
    return leaves


def check_named(tree: PyTree) -> None:
    """Raise TypeError for a tree that is a leaf, which has no name."""
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(tree)):
        raise TypeError(f"a state must be a pytree of named arrays, such as a TrainState or a dict, got {brief(tree)}")


def array_leaves(tree: PyTree) -> list[Any]:
    """Return the leaves of a pytree of arrays, in the order of `named_leaves`.

    Raises:
        TypeError: for a leaf that is not an array, and for a tree that is a leaf, which has no name.

    >>> array_leaves({"b": np.ones(2), "a": np.zeros(1)})
    [array([0.]), array([1., 1.])]
    """
    check_named(tree)
    leaves = jax.tree.leaves(tree)
    if not all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
        for name, leaf in named_leaves(tree).items():
            if not isinstance(leaf, jax.Array | np.ndarray):
                raise TypeError(
                    f"{'/'.join(name)} is not an array but {type(leaf).__name__}: give the state its jnp.asarray, its "
                    "np.asarray if it needs 64 bits, or store it in data_state"
                )
    return leaves


def nest(leaves: dict[Name, Any]) -> dict[str, Any]:
    """Return nested dicts of leaves given by name, with the keys of `stored_parts`.

    >>> nest({("a", "b"): 1, ("c.d",): 2})
    {'a': {'b': 1}, 'c%2Ed': 2}
    """
    root: dict[str, Any] = {}
    for name, leaf in leaves.items():
        node = root
        *parts, last = stored_parts(name)
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = leaf
    return root


def stored_parts(name: Name) -> Name:
    """Return the keys of an array in the tree that Orbax stores, which joins them with "."; so this is escaped, too.

    >>> stored_parts(("a", "b.c"))
    ('a', 'b%2Ec')
    """
    return tuple(part.replace(".", "%2E") for part in name)


@lru_cache(maxsize=1024)
def is_key(dtype: Any) -> bool:
    """Return whether arrays of a dtype are typed keys, which are stored as their data.

    >>> is_key(jax.random.key(0).dtype), is_key(np.dtype("uint32"))
    (True, False)
    """
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def key_data_or_self(leaf: Any) -> Any:
    """Return the data of an array of typed keys; another array itself."""
    return jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf


def records(leaves: dict[Name, Any]) -> dict[str, list[Any]]:
    """Return dtype and shape of each leaf as stored (a typed key is stored as its data).

    >>> records({("a",): jnp.arange(4, dtype=jnp.int32)})
    {'a': ['int32', [4]]}
    """
    result = {}
    for name, leaf in leaves.items():
        if is_key(leaf.dtype):
            leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        result["/".join(name)] = [np.dtype(leaf.dtype).name, list(leaf.shape)]
    return result


def key_kinds(leaves: dict[Name, Any]) -> dict[str, str]:
    """Return the implementation of each typed key: those of "rbg" and of "unsafe_rbg" have data of the same shape.

    >>> key_kinds({("a",): jax.random.key(0, impl="rbg"), ("b",): jnp.ones(2)})
    {'a': 'rbg'}
    """
    dtypes = {"/".join(name): leaf.dtype for name, leaf in leaves.items()}
    return {name: _key_kind(dtype) for name, dtype in dtypes.items() if is_key(dtype)}


@lru_cache(maxsize=64)
def _key_kind(dtype: Any) -> str:
    return str(jax.random.key_impl(jnp.zeros((), dtype)))


def is_wide(dtype: Any) -> bool:
    """Return whether JAX holds no array of a dtype, but NumPy does: 64 bits, unless ``jax_enable_x64`` is on.

    >>> is_wide(np.int64), is_wide(np.float32)
    (True, False)
    """
    if is_key(dtype):
        return False
    return np.dtype(dtype) != jax.dtypes.canonicalize_dtype(dtype)


def crc32(body: dict[str, Any]) -> int:
    """Return the CRC-32 of a dict's JSON text.

    >>> crc32({"a": 1, "b": 2}) == crc32({"b": 2, "a": 1})
    True
    """
    # Keys are sorted: a metadata file that is read back need not have them in the order of writing.
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _unwrap(node: Any) -> Any:
    return node.get_raw_value() if _is_variable(node) else node


def _name(path: tuple[Any, ...]) -> Name:
    # Each entry by itself: a key may contain any separator.
    return tuple(escaped(jax.tree_util.keystr((entry,), simple=True)) for entry in path)


def escaped(key: str) -> str:
    """Return a key of a pytree as one part of a name: not empty, without "/", different for different keys.

    >>> escaped("enc/dec"), escaped("50%"), escaped("")
    ('enc%2Fdec', '50%25', '%')
    """
    if not key:
        return "%"
    # Text in files cannot hold a half of a character, nor some of it a zero.
    unsafe = (each for each in key if each in "%/\0" or "\ud800" <= each <= "\udfff")
    return key.translate({ord(each): f"%{ord(each):02X}" for each in unsafe})
