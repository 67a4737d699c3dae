"""docs/plot_train_step.py: the committed pictures show the figures of the tables of docs/performance*.md."""

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
specification = importlib.util.spec_from_file_location("plot_train_step", DOCS / "plot_train_step.py")
assert specification is not None
assert specification.loader is not None
plot = importlib.util.module_from_spec(specification)
specification.loader.exec_module(plot)

PAGE = "\n".join(path.read_text() for path in sorted(DOCS.glob("performance*.md")))


def texts(name: str) -> str:
    return "\n".join(re.findall(r"<text[^>]*>\s*([^<]+?)\s*</text>", (DOCS / "images" / name).read_text()))


@pytest.mark.parametrize("peer", ["te.jax", "Megatron-Core"])
def test_tokens_per_second_follow_from_the_tables_times(peer):
    shown = texts("train_step.svg")
    rows = plot.table(PAGE, "recipe", f"{peer} ms")
    assert len(rows) in (3, 4)
    for row in rows:
        for name in (peer, "jax_te"):
            assert f"{8 * 2048 / float(row[f'{name} ms']) * 1000:,.0f} " in shown


def test_the_times_by_kind_are_the_tables():
    rows = plot.table(PAGE, "", "GEMM", "attention")
    assert [row[""] for row in rows] == ["te.jax", "jax_te"]
    assert {row["all"] for row in rows} <= {*texts("step_time.svg").splitlines()}


def test_a_table_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="no table with the columns"):
        plot.table(PAGE, "recipe", "another ms")
