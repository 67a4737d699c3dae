"""Where the rows of groups lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops import ExpertPlacement, RowGroups, row_bound


def expected(sizes, rows, alignment):
    """Group of each row, by a loop."""
    found, start = np.full(rows, len(sizes)), 0
    for group, size in enumerate(sizes):
        found[start : start + size] = group
        start += -(-size // alignment) * alignment
    return found


@pytest.mark.parametrize("alignment", [1, 4, 128])
def test_groups_of_rows(alignment):
    rng = np.random.default_rng(0)
    of_rows = jax.jit(lambda groups: groups.of_rows())
    total = 40
    rows = row_bound(total, 5, alignment=alignment)
    for _ in range(20):
        cuts = np.sort(rng.integers(0, total + 1, 4))
        sizes = np.diff([0, *cuts, total])  # of any size, 0 among them
        groups = RowGroups(sizes=jnp.asarray(sizes, jnp.int32), rows=rows, alignment=alignment)
        assert np.asarray(of_rows(groups)).tolist() == expected(sizes, rows, alignment).tolist()
        assert (np.asarray(groups.starts) % alignment == 0).all()


def test_the_bound_is_enough_for_the_worst_case():
    # One row in each group but the last.
    sizes, alignment = [1, 1, 1, 9], 8
    rows = row_bound(sum(sizes), len(sizes), alignment=alignment)
    groups = RowGroups(sizes=jnp.asarray(sizes, jnp.int32), rows=rows, alignment=alignment)
    assert int((groups.of_rows() < 4).sum()) == sum(sizes)
    assert rows == 40


def test_rows_on_several_devices():
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    placed = ExpertPlacement(mesh=mesh, tokens=(("data",),), experts=(), features=())
    sizes = jnp.arange(8, dtype=jnp.int32).reshape(4, 2)
    groups = RowGroups(sizes=sizes, rows=16, alignment=4, placement=placed)
    assert groups.starts.tolist() == [RowGroups(sizes=each, rows=16, alignment=4).starts.tolist() for each in sizes]
    with pytest.raises(ValueError, match=r"of_rows\(\) is for the rows of one array"):
        groups.of_rows()


def test_what_is_refused():
    with pytest.raises(ValueError, match="alignment must be an integer >= 1, got 0"):
        RowGroups(sizes=jnp.zeros(2, jnp.int32), rows=4, alignment=0)
    placed = ExpertPlacement(mesh=jax.sharding.AbstractMesh((4,), ("data",)), tokens=(), experts=(), features=())
    with pytest.raises(ValueError, match="placed on devices are no permutation of tokens"):
        RowGroups(sizes=jnp.zeros((4, 2), jnp.int32), rows=4, placement=placed, permutation=jnp.zeros(4, jnp.int32))
    with pytest.raises(ValueError, match="rows must be an integer >= 0, got -1"):
        RowGroups(sizes=jnp.zeros(2, jnp.int32), rows=-1)
    with pytest.raises(ValueError, match="groups must be an integer >= 1"):
        row_bound(4, 0, alignment=1)
