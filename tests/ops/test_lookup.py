"""Lookup of rows: values, and gradients that sum frequent ids in fp32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.ops import look_up_rows
from tests.support.numerics import draw, equations


def text(count, rows):
    """Ids of which a few are a large part, as in real text: the first is every fifth."""
    ids = np.asarray(jax.random.geometric(jax.random.key(0), 0.2, (count,))) - 1
    return jnp.asarray(np.minimum(ids, rows - 1).reshape(4, -1), jnp.int32)


@pytest.mark.costly("256-bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [256, 2000])
def test_the_gradient_of_a_frequent_id_is_summed_in_fp32(rows, dtype):
    ids, table = text(4096, rows), draw("table", (rows, 8), jnp.dtype(dtype))
    g = draw("g", (*ids.shape, 8), table.dtype) + jnp.ones((), table.dtype)  # sums that grow
    y, backward = jax.vjp(lambda table: look_up_rows(table, ids), table)
    np.testing.assert_array_equal(y, np.asarray(table)[np.asarray(ids)])
    expected = np.zeros(table.shape)
    np.add.at(expected, np.asarray(ids), np.asarray(g).astype(np.float64))
    (actual,) = backward(g)
    assert actual.dtype == table.dtype
    # Rounded once; about 800 fp32 additions before, each of which rounds by at most 2^-24 of sums of absolute values.
    within = {"bfloat16": 2.0**-8, "float32": 0.0}[dtype] * np.abs(expected) + 800 * 2.0**-24 * (np.abs(expected) + 2e3)
    assert (np.abs(np.asarray(actual).astype(np.float64) - expected) <= within).all()


def test_a_small_table_has_no_scatter_whose_order_depends_on_the_gpu():
    def scatters(rows):
        ids = text(64, rows)
        grad = jax.grad(lambda table: look_up_rows(table, ids).sum())
        found = equations(jax.make_jaxpr(grad)(jnp.ones((rows, 4))).jaxpr)
        return [str(each.primitive) for each in found if "scatter" in str(each.primitive)]

    assert not scatters(256)
    assert scatters(2000) == ["scatter-add"]


@pytest.mark.parametrize("rows", [512, 2000])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "uint32"])
def test_ids_of_any_integer_dtype_are_the_same_rows(rows, dtype):
    ids = np.array([0, 5, 100, 127])

    def gradient(ids):
        return jax.grad(lambda table: look_up_rows(table, ids).sum())(jnp.ones((rows, 2)))

    np.testing.assert_array_equal(gradient(jnp.asarray(ids, dtype)), gradient(jnp.asarray(ids, jnp.int32)))


@pytest.mark.parametrize("rows", [10, 2000])
def test_ids_outside_of_the_table(rows):
    ids = jnp.array([1, rows, -1, 3])
    y, backward = jax.vjp(lambda table: look_up_rows(table, ids), jnp.ones((rows, 2)))
    assert np.isnan(y).all(axis=1).tolist() == [False, True, True, False]
    (gradient,) = backward(jnp.ones((4, 2)))
    assert np.flatnonzero(np.asarray(gradient).any(axis=1)).tolist() == [1, 3]


@pytest.mark.costly("10")
@pytest.mark.parametrize("rows", [10, 2000])
def test_it_is_linear_for_derivatives_of_derivatives_and_for_vmap(rows):
    ids, table = jnp.array([1, 3, 3]), draw("table", (rows, 2))

    def squares(table):
        return (look_up_rows(table, ids) ** 2).sum()

    plain = jax.grad(lambda table: (jax.grad(lambda t: (t[ids] ** 2).sum())(table) ** 2).sum())(table)
    np.testing.assert_allclose(jax.grad(lambda t: (jax.grad(squares)(t) ** 2).sum())(table), plain, rtol=2.0**-20)
    tables = jnp.stack([table, 2 * table])
    np.testing.assert_allclose(jax.vmap(jax.grad(squares))(tables)[1], 2 * jax.grad(squares)(table), rtol=2.0**-20)
