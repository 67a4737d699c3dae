"""A training state as the tree of names and arrays that is stored, and checksums of its leaves."""

from __future__ import annotations

import json
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jax_te.errors import CheckpointMismatchError
from jax_te.typing import Array, PyTree

Name = tuple[str, ...]

SHOWN = 8
"""Differences that a mismatch lists."""


def named_leaves(tree: PyTree) -> dict[Name, Any]:
    """Leaves of a pytree by the names on the way to them, in leaf order; NNX Variables add no name.

    >>> list(named_leaves({"layers": [nnx.Param(jnp.ones(2))]}))
    [('layers', '0')]
    """
    plain = jax.tree.map(_unwrap, tree, is_leaf=_is_variable)
    found = [(tuple(map(_part, path)), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(plain)]
    leaves = dict(found)
    if len(leaves) != len(found):
        raise ValueError("two leaves of the state have the same name, so it cannot be stored by name")
    return leaves


def nest(leaves: dict[Name, Any]) -> dict[str, Any]:
    """Nested dicts of leaves given by name.

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
    """The trees that are stored: parameters by themselves, so that a model can be loaded without its optimizer.

    >>> stored_parts({("params", "a"): 1, ("step",): 2})
    {'params': {'params': {'a': 1}}, 'train': {'step': 2}}
    """
    parts: dict[str, dict[Name, Any]] = {"params": {}, "train": {}}
    for name, leaf in leaves.items():
        parts["params" if name[0] == "params" else "train"][name] = leaf
    return {part: nest(content) for part, content in parts.items() if content}


def records(leaves: dict[Name, Any]) -> dict[str, list[Any]]:
    """dtype and shape of each leaf as stored (a typed key is stored as its data).

    >>> records({("a",): jnp.arange(4, dtype=jnp.int32)})
    {'a': ['int32', [4]]}
    """
    result = {}
    for name, leaf in leaves.items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        result["/".join(name)] = [np.dtype(leaf.dtype).name, list(leaf.shape)]
    return result


def checksums(leaves: dict[Name, Array]) -> dict[str, int]:
    """A checksum of each leaf: its bits as unsigned integers, summed modulo 2**32 where it lies.

    It does not depend on the sharding, so it holds on every mesh; any change of one element changes it.

    >>> checksums({("a",): jnp.arange(4)})
    {'a': 6}
    """
    sums = {name: _sum(leaf) for name, leaf in leaves.items()}  # one program a leaf: they may be on different meshes
    return {"/".join(name): int(value) for name, value in sums.items()}


def check_records(saved: dict[str, list[Any]], wanted: dict[str, list[Any]], what: str) -> None:
    """Raise CheckpointMismatchError unless two `records` agree: left to itself, Orbax casts silently.

    Args:
        saved, wanted: of the checkpoint and of the state to fill.
        what: subject of the message.
    """
    lines = []
    for name in sorted(saved.keys() | wanted.keys()):
        there, here = saved.get(name), wanted.get(name)
        if there != here:
            texts = ["absent" if record is None else f"{record[0]}{record[1]}" for record in (there, here)]
            lines.append(f"{name} is {texts[0]} there, {texts[1]} here")
    if lines:
        more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        raise CheckpointMismatchError(
            f"{what} is not one of this state: {'; '.join(lines[:SHOWN])}{more}. Use the configuration it was saved "
            "with, or another folder"
        )


def crc32(body: dict[str, Any]) -> int:
    """CRC-32 of a dict's JSON text.

    >>> crc32({"a": 1, "b": 2}) == crc32({"b": 2, "a": 1})
    True
    """
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


@jax.jit
def _sum(leaf: Array) -> Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        leaf = leaf.astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(leaf.dtype.itemsize, jnp.uint32)
    return jnp.sum(lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32), dtype=jnp.uint32)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _unwrap(node: Any) -> Any:
    return node.get_raw_value() if _is_variable(node) else node


def _part(entry: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
