"""Metrics of experts on their way from a train step to the progress line, the files of a run, and its plot."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jax_te.cli.loop import LoopActions, LoopPlan, run_loop
from jax_te.config import RouterOptions
from jax_te.layers import MoE
from jax_te.metrics import MetricsLog, StepWork, plot_experts
from jax_te.metrics.log import read_metrics
from jax_te.metrics.progress import PlainProgress
from jax_te.training import create_train_state, make_train_step

E = 4
OPTIONS = {"num_experts": E, "aux_loss_coeff": 0.1, "z_loss_coeff": 0.1, "expert_capacity_factor": 0.5}
PNG = b"\x89PNG"


class Model(nnx.Module):
    """Two layers, of which the second one's metrics are asked for by themselves."""

    def __init__(self, rngs):
        self.layers = nnx.List(
            [MoE(16, 16, RouterOptions(**OPTIONS, per_layer_logging=bool(i)), rngs=rngs) for i in range(2)]
        )

    def __call__(self, x):
        return self.layers[1](self.layers[0](x))


class Charts:
    """A writer that keeps what it gets."""

    def __init__(self):
        self.points = {}

    def write(self, step, values):
        self.points.setdefault(step, {}).update(values)

    def flush(self): ...

    def close(self): ...


@pytest.mark.slow
def test_a_run_shows_its_experts(tmp_path, capsys):
    tx, x, charts = optax.sgd(0.1), jax.random.normal(jax.random.key(0), (2, 8, 16)), Charts()
    state = create_train_state(Model, tx, key=jax.random.key(0))
    step = make_train_step(lambda model, batch, key: jnp.mean(model(batch) ** 2), tx)
    plan = LoopPlan(steps=4, save_every=4, eval_every=4, log_every=2, work=StepWork(tokens=16))
    actions = LoopActions(step=step, evaluate=lambda state: 0.5, save=lambda *saved: None)
    with MetricsLog(tmp_path, writers=["jsonl", "tensorboard", charts]) as log:
        run_loop(state, iter([x] * 4), actions, plan, log=log, progress=PlainProgress())

    records = [record for record in read_metrics(tmp_path) if "loss" in record]
    overall = {f"experts/{name}" for name in ("aux_loss", "z_loss", "dropped_share", "max_over_mean_load")}
    own = {name.replace("/", "/layers.1.router/") for name in overall}
    tokens = {f"experts/layers.{i}.router/tokens_per_expert" for i in range(2)}
    for record in records:
        assert {name for name in record if name.startswith("experts/")} == (
            overall | own | (tokens if record["step"] % 2 == 0 else set())
        )
    last = records[-1]
    load = last["experts/layers.1.router/tokens_per_expert"]
    assert last["experts/layers.1.router/max_over_mean_load"] == pytest.approx(max(load) / (sum(load) / E))
    assert last["experts/layers.1.router/dropped_share"] == pytest.approx(1.0 - sum(load) / (2 * 16))
    assert sorted(charts.points) == [2, 4]
    assert charts.points[4][f"experts/layers.1.router/tokens_per_expert/{E - 1}"] == load[-1]

    line = capsys.readouterr().out.splitlines()[-1]
    shown = [f"{name} {last[f'experts/{name}']:.4f}" for name in ("aux_loss", "z_loss")]
    shown += [f"max/mean load {last['experts/max_over_mean_load']:.2f}", f"dropped {last['experts/dropped_share']:.2%}"]
    assert f"step 4/4  loss {last['loss']:.4f}  {'  '.join(shown)}  " in line

    path = plot_experts(tmp_path)
    assert path == tmp_path / "experts.png"
    assert path.read_bytes().startswith(PNG)


def write(directory, *records):
    directory.mkdir(exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return directory


@pytest.mark.slow
def test_the_plot_follows_the_records(tmp_path):
    """The picture differs with each kind of value, and is not drawn without any."""
    loss, load = {"step": 1, "experts/aux_loss": 1.0}, {"step": 1, "experts/r/tokens_per_expert": [3, 1]}
    runs = [[loss], [load], [{**load, "experts/r/tokens_per_expert": [2, 2]}], [loss, load]]
    runs += [[{"step": 1, "experts/max_over_mean_load": 1.5}], [{"step": 1, "experts/dropped_share": 0.5}]]
    pictures = set()
    for i, records in enumerate(runs):
        path = plot_experts(write(tmp_path / str(i), *records))
        assert path is not None
        pictures.add(path.read_bytes())
    assert len(pictures) == len(runs)
    assert plot_experts(write(tmp_path / "dense", {"step": 1, "loss": 1.0})) is None
    assert plot_experts(tmp_path / "nowhere") is None


def test_the_plot_leaves_out_what_is_no_number(tmp_path):
    name = "experts/a$\\frac$/tokens_per_expert"  # a path that is no formula
    values = ([1, 2, 3], [1, None], [], "x", 3, [0, 0], [[1], [2]], [10**400], None, [5])
    records = [{"step": step, name: value, "experts/z_loss": value} for step, value in enumerate(values)]
    path = plot_experts(write(tmp_path, *records))
    assert path is not None
    assert path.read_bytes().startswith(PNG)
