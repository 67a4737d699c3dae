"""Tilings of the grouped kernels: the rule, tables, and what is measured for them."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.bench import Settings, bench_tilings, grouped_shapes
from jax_te.ops.pallas import (
    TABLE,
    GemmTiling,
    GroupedShape,
    grouped_gemm,
    read_table,
    tile_candidates,
    tiling_for,
    variants,
    write_table,
)
from jax_te.ops.pallas.tilings import BLOCK_OVER_ROWS, LARGE, MEASURED, SMALL, SPLIT, lacking
from jax_te.recipe import DelayedScaling, Float8BlockScaling, MMParams
from tests.support.numerics import draw

OLD = jax.__version_info__[:2] < (0, 11)
interpreted = pytest.mark.skipif(OLD, reason="JAX before 0.11 has no interpreter for these kernels")

MIXTRAL = GroupedShape(False, False, 16, "none", groups=8, rows=33792, k=4096, n=28672)
FORMS = {
    "bf16": MIXTRAL,
    "bf16 over rows": MIXTRAL._replace(over_rows=True),
    "split": MIXTRAL._replace(bits=8, scaling="split", b_last=True),
    "block": MIXTRAL._replace(bits=8, scaling="block", b_last=True),
    "block over rows": MIXTRAL._replace(bits=8, scaling="block", b_last=True, over_rows=True),
}


def test_where_no_table_has_a_near_shape_the_rule_decides(monkeypatch):
    monkeypatch.delenv(TABLE, raising=False)
    assert tiling_for(MIXTRAL._replace(k=65536)) == LARGE
    assert tiling_for(MIXTRAL._replace(groups=128)) == SMALL
    assert tiling_for(FORMS["split"]) == SPLIT
    assert tiling_for(FORMS["block over rows"]._replace(rows=262144)) == BLOCK_OVER_ROWS


def test_the_librarys_table_decides_for_shapes_that_were_measured(monkeypatch):
    monkeypatch.delenv(TABLE, raising=False)
    measured = read_table(MEASURED)
    assert MIXTRAL in measured
    for shape, tiling in measured.items():
        assert tiling_for(shape) == tiling
        assert lacking(tiling, shape) is None


@pytest.mark.parametrize("shape", FORMS.values(), ids=FORMS)
def test_all_that_would_be_measured_can_run(shape):
    made = tile_candidates(shape)
    assert len(made) > 3
    assert len({(each.rows, each.columns, each.pair, each.warpgroups) for each in made}) == len(made)
    for tiling in (*made, *variants(made[0], shape), tiling_for(shape)):
        assert lacking(tiling, shape) is None, tiling
    assert all(other != made[0] and other.rows == made[0].rows for other in variants(made[0], shape))


def test_a_table_decides_for_shapes_within_a_factor_of_two(tmp_path, monkeypatch):
    near, far = replace(LARGE, swath=4), replace(LARGE, swath=32)
    path = tmp_path / "made" / "table.json"
    write_table(path, {MIXTRAL: near, MIXTRAL._replace(k=8192): far})
    assert read_table(path) == {MIXTRAL: near, MIXTRAL._replace(k=8192): far}
    monkeypatch.setenv(TABLE, str(path))
    assert tiling_for(MIXTRAL._replace(rows=40000, k=5000)) == near
    assert tiling_for(MIXTRAL._replace(k=14336)) == far
    assert tiling_for(MIXTRAL._replace(n=2048)) == LARGE  # by the rule
    assert tiling_for(FORMS["split"]) == SPLIT


def test_a_table_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv(TABLE, str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match=f"{TABLE}=.*none.json cannot be read"):
        tiling_for(MIXTRAL)


def test_a_table_of_other_sizes_is_refused(tmp_path):
    path = tmp_path / "table.json"
    write_table(path, {MIXTRAL._replace(rows=0): LARGE})
    with pytest.raises(ValueError, match="no positive integers"):
        read_table(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": 9}, "shared memory"),
        ({"columns": 96}, "columns 64, 128"),
        ({"registers": [255, 24]}, "registers"),
        ({"pieces": 4, "stages": 2}, "registers of sums"),
        ({"swath": 0}, "positive"),
        ({"swaths": 3}, "not a table"),
    ],
)
def test_a_table_that_cannot_serve_is_refused(tmp_path, change, words):
    path = tmp_path / "table.json"
    write_table(path, {MIXTRAL: LARGE})
    content = json.loads(path.read_text())
    content["tilings"][0]["tiling"] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words):
        read_table(path)


def test_products_of_a_layer_under_its_recipe():
    sizes = {"tokens": 1024, "hidden_size": 256, "ffn_hidden_size": 512, "experts": 4, "topk": 2}
    assert len(grouped_shapes(None, **sizes)) == 6
    recipe = DelayedScaling(fp8_gemm_wgrad=MMParams(use_split_accumulator=True))
    assert [shape.scaling for shape in grouped_shapes(recipe, **sizes)[:3]] == ["none", "none", "split"]
    assert {shape.scaling for shape in grouped_shapes(Float8BlockScaling(), **sizes)} == {"block"}


@pytest.mark.slow
@interpreted
def test_tilings_change_no_bit():
    a, b = draw("a", (512, 192), jnp.bfloat16), draw("b", (2, 192, 264), jnp.bfloat16)

    def product(tiling):
        sizes = jnp.array([256, 128])
        return np.asarray(grouped_gemm(a, b, sizes, out_dtype="float32", tiling=tiling, interpret=True))

    np.testing.assert_array_equal(*(product(replace(tiling, stages=2)) for tiling in (LARGE, SMALL)))


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("form", ["bf16", "block over rows"])
def test_the_fastest_of_what_was_measured_is_kept(form):
    shape, kept = FORMS[form]._replace(groups=2, rows=512, k=128, n=256), {}
    first = replace(tiling_for(shape), stages=3, outputs=1)
    rows = list(bench_tilings(shape, Settings(rounds=1, calls=1), kept.__setitem__, sizes=[first], interpret=True))
    assert [row["error"] for row in rows if "error" in row] == []
    assert len(rows) > 4
    assert rows[1]["tiling"]["stages"] == 3
    ((of, tiling),) = kept.items()
    assert of == shape
    # What is kept is as fast as the fastest row; the present tiling's ratio to itself is 1.
    ratios = [row["speed_ratio"] for row in rows if GemmTiling(**row["tiling"]) == tiling]
    assert max(ratios) == max(row["speed_ratio"] for row in rows)
