"""precision.jsonl, its TensorBoard tags and its heat maps."""

import json
import math

import numpy as np
import pytest
from matplotlib.axes import Axes

from jax_te.metrics.log import MetricsLog
from jax_te.metrics.precision_log import (
    PRECISION_FILE,
    PRECISION_PLOT,
    PrecisionLog,
    chart_values,
    plot_precision,
    read_precision,
)
from jax_te.quantize import STATISTICS
from jax_te.training import TensorStatistics


def statistics(relative_mse=1e-3, **changes):
    values = {"amax": 2.0, "scale": 224.0, "underflow": 0.25, "saturation": 0.0, "mse": 1e-4}
    values |= {"relative_mse": relative_mse, **changes}
    return [
        TensorStatistics(module=module, role=role, format="e4m3", **values)
        for module in ("layers.0.proj", "layers.1.proj")
        for role in ("x", "kernel", "grad")
    ]


def write(directory, steps, resume_step=0):
    log = PrecisionLog(directory, resume_step=resume_step)
    for step in steps:
        log.write(step, statistics(1.0 / step))


def test_a_line_for_each_tensor(tmp_path):
    write(tmp_path, (5,))
    lines = (tmp_path / PRECISION_FILE).read_text().splitlines()
    assert json.loads(lines[4]) == {
        "step": 5, "module": "layers.1.proj", "role": "kernel", "format": "e4m3", "amax": 2.0, "scale": 224.0,
        "underflow": 0.25, "saturation": 0.0, "mse": 1e-4, "relative_mse": 0.2,
    }  # fmt: skip
    assert len(lines) == 6


def test_a_resumed_file_equals_an_unbroken_one(tmp_path):
    for name in ("unbroken", "resumed"):
        (tmp_path / name).mkdir()
    write(tmp_path / "unbroken", (2, 4, 6))
    write(tmp_path / "resumed", (2, 4, 6, 8))
    with (tmp_path / "resumed" / PRECISION_FILE).open("a") as file:
        file.write('{"step": 9, "mod')
    write(tmp_path / "resumed", (6,), resume_step=5)
    assert len({(path / PRECISION_FILE).read_bytes() for path in tmp_path.iterdir()}) == 1


def test_the_folder_is_made_and_a_step_that_no_checkpoint_has_is_refused(tmp_path):
    write(tmp_path / "new" / "run", (2,))
    for resume_step in (-1, 2**63):
        with pytest.raises(ValueError, match="resume_step must be an integer >= 0"):
            PrecisionLog(tmp_path / "new" / "run", resume_step=resume_step)
    assert len(read_precision(tmp_path / "new" / "run")) == 6


def test_numbers_that_are_not_finite(tmp_path):
    PrecisionLog(tmp_path).write(1, statistics(math.nan, amax=math.inf))
    assert {(r["relative_mse"], r["amax"]) for r in read_precision(tmp_path)} == {(None, None)}
    assert plot_precision(tmp_path) == tmp_path / PRECISION_PLOT


def test_damaged_records_are_left_out(tmp_path):
    """They cost themselves alone, and not the end of a run, which draws the picture."""
    write(tmp_path, (1,))
    good = read_precision(tmp_path)
    damaged = [{"module": ["x"]}, {"module": "\ud800"}, {"role": None}, {"underflow": "x"}, {"saturation": 10**400}]
    damaged += [{"step": step} for step in (10**400, "2", None)]
    with (tmp_path / PRECISION_FILE).open("a") as file:
        file.writelines(json.dumps(good[0] | change) + "\n" for change in damaged)
        file.write('{"step": 2}\n[]\nnan\n')
    assert read_precision(tmp_path) == good
    with (tmp_path / PRECISION_FILE).open("a") as file:  # what can be shown: any name, and any number
        file.write(json.dumps(good[0] | {"module": "$\\frac$", "underflow": math.inf, "relative_mse": -1.0}) + "\n")
        file.write(json.dumps(good[0] | {"step": -(2**62), "saturation": math.nan}) + "\n")
    assert len(read_precision(tmp_path)) == len(good) + 2
    assert plot_precision(tmp_path) == tmp_path / PRECISION_PLOT


def test_every_statistic_is_a_chart(tmp_path, monkeypatch):
    charted = {}

    def add_scalar(self, name, value, step):
        charted[name, step] = value

    monkeypatch.setattr("tensorboardX.SummaryWriter.add_scalar", add_scalar)
    with MetricsLog(tmp_path) as log:
        log.chart(7, chart_values(statistics(amax=math.nan)))
    finite = [name for name in STATISTICS if name != "amax"]
    names = [f"precision/layers.{i}.proj/{role}/{name}" for i in range(2) for role in ("x", "kernel", "grad")
             for name in finite]  # fmt: skip
    assert sorted(charted) == sorted((name, 7) for name in names)
    assert charted["precision/layers.0.proj/x/scale", 7] == 224.0
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_the_heat_maps_have_a_row_for_each_tensor_and_a_column_for_each_step(tmp_path, monkeypatch):
    assert plot_precision(tmp_path) is None
    write(tmp_path, (10, 20, 100))
    log = PrecisionLog(tmp_path, resume_step=100)
    log.write(200, [t for t in statistics(0.0, underflow=0.5) if t.role != "x"])  # no longer quantized
    drawn, draw = [], Axes.imshow
    monkeypatch.setattr(Axes, "imshow", lambda axes, grid, **how: drawn.append(grid) or draw(axes, grid, **how))
    path = plot_precision(tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    error, underflow, saturation = drawn
    assert error.shape == underflow.shape == saturation.shape == (6, 4)
    np.testing.assert_allclose(error[1], [-10.0, 10 * np.log10(1 / 20), -20.0, -300.0])
    np.testing.assert_allclose(error[0], [-10.0, 10 * np.log10(1 / 20), -20.0, np.nan])
    np.testing.assert_allclose(underflow[4], [25.0, 25.0, 25.0, 50.0])
    np.testing.assert_allclose(saturation[4], 0.0)
