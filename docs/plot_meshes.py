"""Draw layers and pipelines on meshes: ``python docs/plot_meshes.py``.

It writes ``images/linear_mesh.svg`` (which device holds which part of the arrays of two linear layers, by the shardings
that the library gives them on four CPU devices) and ``images/pipeline.svg`` (schedules of a pipeline, by the library's
own `make_schedule`).
"""

from __future__ import annotations

from pathlib import Path

import jax
import matplotlib
from flax import nnx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from jax_te.config import ParallelConfig
from jax_te.layers import LayerNormMLP
from jax_te.sharding import make_mesh
from jax_te.training.pipeline import Schedule, make_schedule

IMAGES = Path(__file__).resolve().parent / "images"
COLORS = ("lightskyblue", "moccasin", "palegreen", "plum")
PASSES = {"F": "lightskyblue", "B": "moccasin", "W": "palegreen"}
BATCH, HIDDEN, FFN = 8, 16, 32


def arrays_on_a_mesh() -> dict[str, jax.Array]:
    """Return the arrays of a feed-forward block, as the library shards them over two axes of two devices."""
    with jax.set_mesh(make_mesh(ParallelConfig(fsdp=2, tensor=2))):
        block = jax.jit(lambda: LayerNormMLP(HIDDEN, FFN, rngs=nnx.Rngs(0)))()
        x = jax.device_put(jax.numpy.ones((BATCH, 4, HIDDEN)), jax.P("fsdp"))
        output = jax.jit(lambda block, x: block(x))(block, x)
        return {
            "input [b, s, h]": x,
            "wi_kernel [h, f]": block.wi_kernel.get_value(),
            "wo_kernel [f, h]": block.wo_kernel.get_value(),
            "output [b, s, h]": output,
        }


def draw_array(axes: Axes, name: str, array: jax.Array) -> None:
    """Draw the parts of an array's first and last dimension, each with the numbers of the devices that hold it."""
    shape = (array.shape[0], array.shape[-1])
    parts: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        first, last = index[0].indices(shape[0]), index[-1].indices(shape[1])
        parts.setdefault((first[:2], last[:2]), []).append(device.id)
    for ((top, bottom), (left, right)), devices in parts.items():
        corner, size = (left / shape[1], top / shape[0]), ((right - left) / shape[1], (bottom - top) / shape[0])
        axes.add_patch(Rectangle(corner, *size, facecolor=COLORS[min(devices)], edgecolor="gray"))
        middle = (corner[0] + size[0] / 2, corner[1] + size[1] / 2)
        holders = ("device " if len(devices) == 1 else "devices ") + ", ".join(map(str, sorted(devices)))
        axes.text(*middle, holders, ha="center", va="center", fontsize="small")
    axes.set_title(name, fontsize="small")
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(1.02, -0.02)  # rows from above
    axes.axis("off")


def draw_schedule(axes: Axes, schedule: Schedule) -> None:
    """Draw a row for each stage and a column for each tick, with the microbatch of each pass."""
    kinds = {"F": schedule.forward, "B": schedule.backward, "W": schedule.weight}
    for stage in range(schedule.stages):
        for tick in range(schedule.ticks):
            tasks = [(kind, int(task[tick, stage])) for kind, task in kinds.items() if task[tick, stage] >= 0]
            for place, (kind, microbatch) in enumerate(tasks):
                width = 1 / len(tasks)
                corner = (tick + place * width, stage)
                axes.add_patch(Rectangle(corner, width, 0.9, facecolor=PASSES[kind], edgecolor="white"))
                middle = (corner[0] + width / 2, stage + 0.45)
                axes.text(*middle, str(microbatch), ha="center", va="center", fontsize="x-small")
    axes.set_title(f"{schedule.name}: a stage is idle for {100 * schedule.bubble:.0f} % of a step", fontsize="small")
    axes.set_xlim(0, schedule.ticks)
    axes.set_ylim(schedule.stages, 0)
    axes.set_yticks([stage + 0.45 for stage in range(schedule.stages)], [f"stage {s}" for s in range(schedule.stages)])
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    # Text stays text, and the same figures give the same plot.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jax_te"}):
        figure = Figure(figsize=(9, 2.4), layout="constrained")
        for axes, (name, array) in zip(figure.subplots(1, 4), arrays_on_a_mesh().items(), strict=True):
            draw_array(axes, name, array)
        figure.savefig(IMAGES / "linear_mesh.svg", metadata={"Date": None})

        figure = Figure(figsize=(9, 6), layout="constrained")
        for axes, name in zip(figure.subplots(3, 1), ("gpipe", "1f1b", "zero_bubble"), strict=True):
            draw_schedule(axes, make_schedule(name, stages=4, microbatches=8))
        handles = [Rectangle((0, 0), 1, 1, facecolor=color) for color in PASSES.values()]
        words = ["forward pass", "backward pass", "kernel gradients"]
        figure.legend(handles, words, loc="outside lower center", ncols=3, frameon=False, fontsize="small")
        figure.savefig(IMAGES / "pipeline.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
