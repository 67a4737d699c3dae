"""Layout of several groups' rows in one array: the contract between the permutation and the grouped GEMMs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_te._validation import check_bool, check_positive, checked, is_integer
from jax_te.ops.integers import as_int32, is_known
from jax_te.ops.moe.placement import ExpertPlacement
from jax_te.ops.pallas.grouped_gemm import GROUP_ALIGNMENT
from jax_te.ops.pallas.support import supported
from jax_te.quantize import Precision, padded_size, precision_of
from jax_te.recipe import Recipe
from jax_te.typing import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowGroups:
    """Location of each group's rows in an array ``[rows, ...]``: one group after another, each from its own start.

    Group ``g`` has the rows ``[starts[g], starts[g] + sizes[g])``; ``starts`` are the sums of the sizes before ``g``,
    each rounded up to a multiple of ``alignment``. So no block of ``alignment`` rows spans two groups. All other rows,
    between the groups and behind the last, are padding: writers of the array set them to zero, and readers return zeros
    for them, in forward and in gradients. Sizes are values on the device; every shape is static.

    Args:
        sizes: int32 ``[e]``, the number of rows of each group, >= 0. A call that reads the rows refuses sizes that do
            not fit into ``rows`` if it knows them; in ``jit``, they are cut off.
        rows: number of rows of the array. `row_bound` is enough for any sizes of a known sum.
        alignment: alignment of the groups' starts, >= 1. An op whose recipe needs another one
            (`jax_te.ops.group_alignment`) copies the rows.
        zero_padding: whether the caller promises that all rows of padding hold zeros, in the arrays of forward and in
            their gradients. Ops then leave out the passes that make them zeros, and promise the same of their results
            as long as kernels are finite.
        placement: placement of the rows on a mesh, where each device has its own rows of its own groups: ``sizes`` are
            int32 ``[d, e / p]`` for ``d`` devices and experts split over ``p``, and ``rows`` is the number of rows of
            one device, in an array ``[d rows, ...]``. None: one array with the rows of all groups.
        permutation: the `jax_te.ops.moe.permute.Permutation` of tokens into these rows, for `grouped_dense` to read
            tokens ``[t, k]`` in place of rows, which it gathers itself. None: ops read the rows. The rows of several
            devices have none.

    Raises:
        ValueError: for an alignment that is not positive, a negative number of rows, or a permutation beside a
            placement.
        TypeError: for a ``zero_padding`` that is not a bool, or a ``placement`` of another type.

    >>> groups = RowGroups(sizes=jnp.array([3, 0, 4]), rows=row_bound(7, 3, alignment=4), alignment=4)
    >>> groups.rows, groups.starts.tolist(), groups.of_rows()[:9].tolist()
    (16, [0, 4, 4], [0, 0, 0, 3, 2, 2, 2, 2, 3])
    """

    # Any: jax.tree fills the field with shapes, shardings and placeholders as well.
    sizes: Any
    rows: int = field(metadata={"static": True})
    alignment: int = field(default=1, metadata={"static": True})
    zero_padding: bool = field(default=False, metadata={"static": True})
    placement: ExpertPlacement | None = field(default=None, metadata={"static": True})
    permutation: Any = None

    def __post_init__(self) -> None:
        check_positive(alignment=self.alignment)
        check_bool(zero_padding=self.zero_padding)
        if self.placement is not None and not isinstance(self.placement, ExpertPlacement):
            raise TypeError(f"placement must be an ExpertPlacement or None, got {self.placement!r}")
        if self.placement is not None and self.permutation is not None:
            raise ValueError("rows that are placed on devices are no permutation of tokens; leave out one of the two")
        if not is_integer(self.rows) or self.rows < 0:
            raise ValueError(f"rows must be an integer >= 0, got {self.rows!r}")
        sizes: Any = self.sizes
        if isinstance(sizes, jax.Array | np.ndarray) and jnp.issubdtype(sizes.dtype, jnp.integer):
            object.__setattr__(self, "sizes", as_int32("sizes", sizes))

    @property
    def count(self) -> int:
        """Number of groups, ``e``."""
        return self.own_count * (1 if self.placement is None else self.placement.size(self.placement.experts))

    @property
    def own_count(self) -> int:
        """Number of groups of one device."""
        return self.sizes.shape[-1]

    @property
    def all_rows(self) -> int:
        """Number of rows of the array, on all devices."""
        return self.rows * (1 if self.placement is None else self.placement.devices)

    @property
    def starts(self) -> Array:
        """First row of each group, int32 ``[e]``; with a placement ``[d, e / p]``, each among its device's rows."""
        taken = -(-self.sizes // self.alignment) * self.alignment
        return jnp.cumsum(taken, axis=-1, dtype=jnp.int32) - taken

    def filled(self) -> Array:
        """Return which rows belong to a group, bool ``[rows]``, or ``[d rows]`` of all devices."""
        if self.placement is None:
            return self.of_rows() < self.count
        of_device = dataclasses.replace(self, placement=None)

        def on_device(sizes: Array) -> Array:
            return dataclasses.replace(of_device, sizes=sizes.reshape(-1)).filled()

        spec = self.placement.row_spec
        return self.placement.shards(spec, spec).map(on_device, (spec,), spec)(self.sizes)

    def of_rows(self) -> Array:
        """Return the group of each row, int32 ``[rows]``; ``e`` for padding.

        Raises:
            ValueError: for rows that are placed on several devices.
        """
        if self.placement is not None:
            raise ValueError(
                "of_rows() is for the rows of one array, and these are placed on the devices of a mesh; inside of a "
                "shard_map take each device's own, dataclasses.replace(groups, sizes=sizes[0], placement=None)"
            )
        row, starts = jnp.arange(self.rows, dtype=jnp.int32), self.starts
        # The last group that starts at the row or before it: a group without rows starts where the next one does.
        group = jnp.sum(row[:, None] >= starts[None], axis=1, dtype=jnp.int32) - 1
        return jnp.where(row < (starts + self.sizes)[group], group, self.count)


def check_sizes(groups: RowGroups) -> None:
    """Raise ValueError for sizes that are negative or do not fit into the rows; sizes in ``jit`` are not known.

    >>> check_sizes(RowGroups(sizes=jnp.array([4, 2]), rows=5))
    Traceback (most recent call last):
    ValueError: sizes of groups must be >= 0 and add up to at most 5 rows, got [4, 2]
    """
    if not is_known(groups.sizes):
        return
    # In 64 bits, and with as_int32's limits: a sum of int32 could wrap around.
    sizes = np.asarray(groups.sizes).astype(np.int64)
    taken = -(-sizes // groups.alignment) * groups.alignment
    ends = np.cumsum(taken, axis=-1) - taken + sizes
    if (sizes < 0).any() or ((ends > groups.rows) & (sizes > 0)).any():
        starts = "" if groups.alignment == 1 else f", each group from a multiple of {groups.alignment} on"
        raise ValueError(
            f"sizes of groups must be >= 0 and add up to at most {groups.rows} rows{starts}, got {sizes.tolist()}"
        )


@checked
def row_bound(rows: int, groups: int, *, alignment: int) -> int:
    """Return the number of rows of an array for ``rows`` rows in ``groups`` groups of any sizes: `RowGroups`'s
    ``rows``.

    Each group leaves at most ``alignment - 1`` rows empty.

    Raises:
        ValueError: for a number of groups or an alignment that is not positive.

    >>> row_bound(7, 3, alignment=4)
    16
    """
    check_positive(groups=groups, alignment=alignment)
    return padded_size(rows + groups * (alignment - 1), alignment)


@checked
def group_alignment(recipe: Recipe | None) -> int:
    """Return the alignment that the rows of groups need for `grouped_dense` to read them as they are under a recipe.

    It is 32 under MXFP8 and NVFP4, 128 under block scaling, so that no block of scales spans two groups, and 16
    otherwise; on a Hopper GPU always a multiple of 128, so that no step of its kernels spans two groups.

    >>> from jax_te.recipe import Float8BlockScaling
    >>> group_alignment(None), group_alignment(Float8BlockScaling())
    (16, 128)
    """
    return tile_of(precision_of(recipe))


def tile_of(precision: Precision) -> int:
    """Return the number of rows that are quantized and multiplied together as one group, on the default device."""
    return math.lcm(precision.group_alignment, GROUP_ALIGNMENT if supported()[0] else 1)
