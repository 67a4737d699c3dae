"""docs/plot_speed.py, and the plot that it has made of the tables of docs/performance*.md."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
specification = importlib.util.spec_from_file_location("plot_speed", DOCS / "plot_speed.py")
assert specification is not None
assert specification.loader is not None
plot_speed = importlib.util.module_from_spec(specification)
specification.loader.exec_module(plot_speed)

FILES = sorted((DOCS / "images" / "h200").glob("*.json"))


def texts(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>\s*([^<]+?)\s*</text>", svg.read_text())


def write(path: Path, *rows: dict) -> str:
    path.write_text(json.dumps({"rows": rows}))
    return str(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_hold_the_tables_figures(path):
    """Each pair of times with its speed is a line of the page, and no pair is left out of its table."""
    rows = json.loads(path.read_text())["rows"]
    pages = "\n".join(path.read_text() for path in sorted(DOCS.glob("performance*.md")))
    lines = [line.replace("**", "").split(" | ") for line in pages.splitlines()]
    found = []
    for peer, own in zip(rows[::2], rows[1::2], strict=True):
        assert "te.jax" in peer["name"]
        recipe = peer["name"].split(",")[0].split()[-1]
        cells = [f"{own['speed_ratio']:.3f}"]
        for number, line in enumerate(lines):
            times = [float(cell) for cell in line if re.fullmatch(r"[\d.]+", cell)][:2]
            if times == [peer["ms"], own["ms"]] and {*cells} <= {cell.removesuffix(" |") for cell in line}:
                assert any(cell.strip("| ").startswith(recipe) for cell in line)
                found.append(number)
    assert found == list(range(found[0], found[0] + len(rows) // 2))


def test_the_plot_is_of_those_files():
    shown = texts(DOCS / "images" / "speed_h200.svg")
    bars = [plot_speed.ratios(path) for path in FILES]
    expected = sorted(f"{ratio:.3f}" for each in bars for ratio in each.values())
    assert len(FILES) == 5
    assert sorted(text for text in shown if re.fullmatch(r"\d\.\d{3}", text)) == expected
    assert {path.stem.replace("_", " ") for path in FILES} <= {*shown}


def test_rows_of_jax_te_are_drawn_and_the_same_each_time(tmp_path):
    rows = [
        {"name": "block, Megatron-Core", "ms": 3.0, "speed_ratio": 1.0},
        {"name": "block, unrolled, recompute none", "ms": 2.0, "speed_ratio": 1.5},
        {"name": "block, scanned, recompute none", "error": "out of memory"},
        {"name": "block, unrolled, recompute full", "ms": 4.0, "speed_ratio": 0.75},
    ]
    file = write(tmp_path / "a_step.json", *rows)
    for name in ("one.svg", "two.svg"):
        plot_speed.main(str(tmp_path / name), [file])
    shown = texts(tmp_path / "one.svg")
    assert {"a step", "block", "block, unrolled, recompute full", "1.500", "0.750"} <= {*shown}
    assert not any("Megatron" in text or "scanned" in text for text in shown)
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "two.svg").read_text()


def test_nothing_to_draw_is_an_error(tmp_path):
    file = write(tmp_path / "alone.json", {"name": "jax_te transformer_layer none (te)", "ms": 1.0})
    with pytest.raises(SystemExit, match="no row of jax_te's has a speed_ratio: alone"):
        plot_speed.main(str(tmp_path / "out.svg"), [file])
    assert not (tmp_path / "out.svg").exists()


def test_the_plot_of_fp8_attention_has_the_lengths_of_its_table():
    table = (DOCS / "attention_fp8_measured.md").read_text()
    lengths = re.findall(r"^\| ([\d,]+) \|", table[table.index("| length |") :].split("\n\n")[0], re.MULTILINE)
    shown = texts(DOCS / "images" / "attention_fp8.svg")
    assert len(lengths) > 5
    assert [text for text in shown if text in lengths] == lengths
