"""Restoring of a state's arrays from a checkpoint, which may hold them in another form."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jax_te.checkpoint.checksums import checksums
from jax_te.checkpoint.convert import ALLOWED, QUANTIZERS, ArraySource, Axes, Conversions
from jax_te.checkpoint.read import DamagedError, in_all_processes, read_arrays, read_metadata
from jax_te.checkpoint.target import described
from jax_te.checkpoint.tree import (
    FORMAT,
    NO_MESH,
    PARAMETERS,
    Name,
    escaped,
    is_wide,
    key_kinds,
    named_leaves,
    records,
)
from jax_te.errors import CheckpointMismatchError, Record, differences
from jax_te.layers import quantizable_kernels
from jax_te.quantize import QuantizedKernel
from jax_te.typing import PyTree


class Target:
    """A state to fill.

    Args:
        tree: tree of arrays or their descriptions.
        allow: names of `ALLOWED`.
        part: prefix of the names; only arrays under it are restored. "": the whole state.

    Raises:
        ValueError: for an unknown name in ``allow``.
    """

    def __init__(self, tree: PyTree, allow: Collection[str], *, part: str = ""):
        unknown = [allow] if isinstance(allow, str) else sorted(set(allow) - ALLOWED.keys())
        if unknown:
            raise ValueError(f"allow must be a set of names among {sorted(ALLOWED)}, got {unknown!r}")
        self.tree, self.allow, self.part = tree, frozenset(allow), part
        self.leaves, self.given = described(tree), named_leaves(tree)
        nodes = named_leaves(tree, is_leaf=_is_kernel)
        self.kernels: dict[Name, QuantizedKernel] = {name: node for name, node in nodes.items() if _is_kernel(node)}
        prefixes = ((name, name[:size]) for name in self.leaves for size in range(len(name)))
        self.kernel_of = {name: prefix for name, prefix in prefixes if prefix in self.kernels}
        self.arrays_of: dict[Name, list[Name]] = {kernel: [] for kernel in self.kernels}
        for name, kernel in self.kernel_of.items():
            self.arrays_of[kernel].append(name)
        self.wanted: dict[str, Record] = {
            name: (dtype, tuple(shape)) for name, (dtype, shape) in records(self.leaves).items()
        }
        self.keys = key_kinds(self.leaves)

    def filled(self, arrays: dict[Name, Any]) -> PyTree:
        """Return the tree with these arrays, and descriptions of the missing ones."""
        leaves = [arrays.get(name, leaf) for name, leaf in self.leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(self.tree), leaves)


@dataclass
class RestorePlan:
    """Sources of a state's arrays.

    Args:
        made: arrays read or made from the checkpoint's arrays.
        kernels: exact values of kernels, which are quantized here.
        kept: names of arrays kept from the given state.
        left_out: names of the checkpoint's arrays that the state lacks.
    """

    made: dict[Name, ArraySource] = field(default_factory=dict)
    kernels: dict[Name, ArraySource] = field(default_factory=dict)
    kept: list[Name] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def load(path: Path, what: str, target: Target) -> tuple[PyTree, Any]:
    """Return a state and the data state.

    Args:
        path: path of the checkpoint.
        what: subject of messages.
        target: the state to fill.

    Raises:
        DamagedError: if something cannot be read or is corrupted.
        CheckpointMismatchError: if an array cannot be made, or only by a conversion that is not allowed.
        ValueError: for another format, and for kernels to be quantized under another recipe than the state's.
    """
    body = in_all_processes(read_metadata, path)
    if body.get("format") != FORMAT:
        raise ValueError(
            f"{what} has format {body.get('format')}, and this version of jax_te reads format {FORMAT}; "
            "use the version that wrote it"
        )
    saved = {name: (dtype, tuple(shape)) for name, (dtype, shape) in body["arrays"].items()}
    plan = make_plan(saved, target, what)
    _check_keys(plan, body["keys"], target, what)
    wanted = {tuple(name.split("/")): leaf for name, leaf in _reads(plan, target).items()}
    found = in_all_processes(read_arrays, path, wanted)
    found = {name: found[name] for name in wanted}
    # Orbax restores a flipped bit without an error, so the values are checked. All processes compute the sums together,
    # but each compares its own: of a replicated array, one process alone may have read other bytes.
    sums = checksums(found)
    in_all_processes(_check_sums, sums, body["checksums"])
    state = target.filled(_arrays(plan, target, {"/".join(name): leaf for name, leaf in found.items()}))
    _log(plan, what)
    return state, body["data"]


def _check_sums(sums: dict[str, int], saved: dict[str, int]) -> None:
    """Raise DamagedError if an array's checksum is not that of the saved one."""
    wrong = [name for name, value in sums.items() if saved[name] != value]
    if wrong:
        raise DamagedError(f"{len(wrong)} of {len(sums)} arrays fail their checksum, first {wrong[0]}")


def _check_keys(plan: RestorePlan, saved: dict[str, str], target: Target, what: str) -> None:
    """Raise CheckpointMismatchError for a typed key whose data would go into a key of another implementation."""
    for name, made in plan.made.items():
        here = target.keys.get("/".join(name))
        there = saved.get(made.source, here)  # plain integers may be made a key, and the reverse
        if here is not None and here != there:
            raise CheckpointMismatchError(
                f"{what} is not one of this state: {'/'.join(name)} is a key of {there} there, of {here} here, which "
                f"would draw other numbers from the same data. Use a key of {there}"
            )


def make_plan(saved: dict[str, Record], target: Target, what: str) -> RestorePlan:
    """Return the plan that makes a state's arrays from the saved ones.

    Args:
        saved: records of the checkpoint.
        target: the state.
        what: subject of messages.

    Raises:
        CheckpointMismatchError: for arrays that cannot be made, or only by a conversion that is not allowed; the
            message lists them.
    """
    conversions = Conversions(saved, target.wanted)
    ways = {name: conversions.find(name, target.wanted["/".join(name)]) for name in target.leaves}
    plan, refused = RestorePlan(kernels=_quantized_here(conversions, ways, target)), _Refused()
    _decide_leaves(plan, refused, conversions, ways, target)
    _decide_left_over(plan, refused, conversions, target)
    if refused.names:
        raise refused.error(saved, target, what)
    return plan


@dataclass
class _Refused:
    """Reasons why a checkpoint cannot fill a state.

    Args:
        names: arrays that cannot be made, or only by a conversion that is not allowed.
        needs: names of `ALLOWED` that would allow it.
    """

    names: list[str] = field(default_factory=list)
    needs: set[str] = field(default_factory=set)

    def error(self, saved: dict[str, Record], target: Target, what: str) -> CheckpointMismatchError:
        """Return the error that lists the names and the conversions to allow."""
        advice = [f'give allow={{"{name}"}}: {ALLOWED[name]}' for name in sorted(self.needs)]
        remedies = "; or ".join(["Use the configuration it was saved with, or another folder", *advice])
        found = differences(saved, target.wanted, self.names)
        return CheckpointMismatchError(f"{what} is not one of this state: {found}. {remedies}")


def _quantized_here(
    conversions: Conversions, ways: dict[Name, ArraySource | None], target: Target
) -> dict[Name, ArraySource]:
    """Return the exact values of the kernels to quantize again, which needs a model."""
    if not hasattr(target.tree, "graphdef"):
        return {}
    kernels: dict[Name, ArraySource] = {}
    for kernel, stored in target.kernels.items():
        own = [ways[name] for name in target.arrays_of[kernel]]
        exact = conversions.exact(kernel, stored.shape)
        # All arrays of a kernel are either read or quantized again: they are decided together.
        if exact and any(made is None or made.all_needs() for made in own):
            kernels[kernel] = replace(exact, note="kernels quantized", needs=frozenset({"requantize"}))
    return kernels


def _decide_leaves(
    plan: RestorePlan, refused: _Refused, conversions: Conversions, ways: dict[Name, ArraySource | None], target: Target
) -> None:
    """Add the source of each array of the state to ``plan``, and arrays without one to ``refused``."""
    for name, way in ways.items():
        kernel = target.kernel_of.get(name)
        # The arrays of a kernel that is quantized here come from its exact values, not from conversions of each.
        made = way if kernel is None else plan.kernels.get(kernel, way)
        # One of another shape is not missing.
        lacking = made is None and not conversions.has(name)
        may_be_kept = "missing" in target.allow and isinstance(target.given[name], jax.Array | np.ndarray)
        if made is not None and made.all_needs() <= target.allow:
            if made is way:
                plan.made[name] = made
        elif lacking and may_be_kept:
            plan.kept.append(name)
        else:
            refused.names.append("/".join(name))
            if made is not None:
                refused.needs |= made.all_needs() - target.allow
            elif lacking:
                refused.needs.add("missing")


def _decide_left_over(plan: RestorePlan, refused: _Refused, conversions: Conversions, target: Target) -> None:
    """Add the checkpoint's surplus arrays to ``plan``, or to ``refused`` if that is not allowed."""
    for name in conversions.left_over(plan.made | plan.kernels):
        first = name.split("/")[0]
        # Wanted, but made from other arrays; or outside of the requested part.
        if name in target.wanted or first != (target.part or first):
            continue
        of_quantizers = first == QUANTIZERS
        if "unexpected" in target.allow or (of_quantizers and QUANTIZERS in target.allow):
            plan.left_out.append(name)
        else:
            refused.names.append(name)
            refused.needs.add(QUANTIZERS if of_quantizers else "unexpected")


def _reads(plan: RestorePlan, target: Target) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays to read by name: unconverted ones with their final sharding, sources of others with a similar
    one."""
    reads = {made.source: target.leaves[name] for name, made in plan.made.items() if made.make is None}
    for name, made in (plan.made | plan.kernels).items():
        # If an array serves several others, the first one decides; for the others it is moved.
        sharding = target.leaves[name].sharding if name in plan.made else _of_kernel(target, name)
        for source, (each, axes) in made.reads(_axes(sharding, len(made.shape))).items():
            placed = jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=_auto(sharding, axes))
            reads.setdefault(source, placed)
    return reads


def _arrays(plan: RestorePlan, target: Target, read: dict[str, Any]) -> dict[Name, Any]:
    arrays, taken = dict[Name, Any](), set[str]()
    # On any meshes, with axes of type Auto: no mesh is set meanwhile, as for checksums.
    with jax.set_mesh(NO_MESH):
        for name, made in plan.made.items():
            # A buffer must not occur twice in a state, since a step donates it.
            again = made.make is None and made.source in taken
            taken.add(made.source)
            if is_wide(target.leaves[name].dtype):
                arrays[name] = np.array(_value(made, read))
            else:
                value = _value(made, read)
                arrays[name] = jax.device_put(value, target.leaves[name].sharding, may_alias=not again)
        for name in plan.kept:
            given, place = target.given[name], target.leaves[name].sharding
            wide = is_wide(given.dtype)
            arrays[name] = given.copy() if wide else jax.device_put(given, place, may_alias=False)
        values = ((name, _value(made, read)) for name, made in plan.kernels.items())
        exact = {name: jax.device_put(value, _of_kernel(target, name)) for name, value in values}
    if exact:
        # Under the mesh and the recipe of the caller, with the quantizer states that were restored.
        model = target.filled(arrays).model
        for path, module, kernel in quantizable_kernels(model):
            name = (PARAMETERS, *(escaped(str(key)) for key in path))
            if name in exact:
                new = module.requantized(kernel, exact[name].astype(np.float32), target.kernels[name])
                for rest, leaf in named_leaves(new).items():
                    arrays[name + rest] = jax.device_put(leaf, target.leaves[name + rest].sharding)
    return arrays


def _value(made: ArraySource, read: dict[str, Any]) -> Any:
    """Return an array made of those that were read, which is computed in 64 bits if one of them has as many."""
    if made.make is None:
        return read[made.source]
    if not any(is_wide(read[source].dtype) for source in made.used()):
        return made.value(read)
    with jax.enable_x64(True):
        return np.asarray(made.value({source: jnp.asarray(read[source]) for source in made.used()}))


def _of_kernel(target: Target, kernel: Name) -> Sharding:
    """Return the sharding of a quantized kernel's values, the same as that of its exact ones."""
    shape = target.kernels[kernel].shape
    own = [target.leaves[name] for name in target.arrays_of[kernel]]
    return next((leaf for leaf in own if leaf.shape == shape), own[0]).sharding


def _axes(sharding: Any, ndim: int) -> Axes:
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    return (*spec, *(None,) * (ndim - len(spec)))


def _auto(sharding: Any, axes: Axes) -> Sharding:
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh: Any = sharding.mesh
    return NamedSharding(Mesh(mesh.devices, mesh.axis_names), PartitionSpec(*axes))


def _log(plan: RestorePlan, what: str) -> None:
    """Log what a restore has converted, and warn of one that has filled no parameter: names then differ."""
    filled = any(name[0] == PARAMETERS for name in [*plan.made, *plan.kernels])
    kept = ["/".join(name) for name in plan.kept if name[0] == PARAMETERS]
    if kept and not filled:
        logging.getLogger("jax_te").warning(
            "%s has none of the state's parameters, which all keep their values: %s. Arrays that it has, and the state "
            "has not: %s",
            what,
            ", ".join(kept[:4]),
            ", ".join(plan.left_out[:4]) or "none",
        )
    done: dict[str, list[str]] = {}
    for name, made in (plan.made | plan.kernels).items():
        for note in dict.fromkeys(made.notes()):
            done.setdefault(note, []).append("/".join(name))
    done |= {"kept as given": ["/".join(name) for name in plan.kept], "left out": plan.left_out}
    lines = [f"{note}: {len(names)} arrays, first {names[0]}" for note, names in done.items() if names]
    if lines:
        logging.getLogger("jax_te").info("%s was converted: %s", what, "; ".join(lines))


def _is_kernel(node: Any) -> bool:
    return isinstance(node, QuantizedKernel)
