"""Draw what a recipe does: ``python docs/plot_concepts.py``.

It writes ``images/fp8_gemm.svg`` (what the three GEMMs of a linear layer quantize) and ``images/delayed_scaling.svg``
(amaxes and the scales that follow from them, by the library's own delayed scaling).
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
from flax import nnx
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jax_te import autocast, value_and_grad
from jax_te.layers import Linear
from jax_te.recipe import DelayedScaling

IMAGES = Path(__file__).resolve().parent / "images"
HIGH, LOW = "whitesmoke", "lightskyblue"  # high precision, FP8
HISTORY = 4
E4M3_MAX = 448.0

# GEMM, its operands with their formats, its result
GEMMS = (
    ("fprop", (("input x", "E4M3"), ("kernel", "E4M3")), "output"),
    ("dgrad", (("output's gradient", "E5M2"), ("kernel", "E4M3")), "input's gradient"),
    ("wgrad", (("input x", "E4M3"), ("output's gradient", "E5M2")), "kernel's gradient"),
)


def box(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    style = {"boxstyle": "round,pad=0.4", "facecolor": color, "edgecolor": "gray"}
    axes.text(x, y, text, ha="center", va="center", bbox=style, fontsize="small")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "gray"})


def draw_gemms(axes: Axes) -> None:
    """Draw a row for each GEMM: operands in bf16, the same in FP8, the GEMM, and its result in bf16."""
    for row, (name, operands, result) in enumerate(GEMMS):
        middle = -2.2 * row
        for place, (operand, form) in zip((middle + 0.45, middle - 0.45), operands, strict=True):
            box(axes, 0, place, f"{operand}, bf16", HIGH)
            box(axes, 2.6, place, f"× scale, {form}", LOW)
            arrow(axes, (1.1, place), (1.95, place))
            arrow(axes, (3.2, place), (4.25, middle))
        box(axes, 4.8, middle, f"{name}\nFP8 GEMM", LOW)
        arrow(axes, (5.4, middle), (6.2, middle))
        box(axes, 7.4, middle, f"÷ scales: {result}, bf16", HIGH)
    axes.set_xlim(-1.2, 8.8)
    axes.set_ylim(-5.4, 1)
    axes.axis("off")


def delayed_scaling(sizes: list[float]) -> tuple[list[float], list[float]]:
    """Return the amaxes of a layer's inputs, and the largest values that its scales of the same steps can hold."""
    amaxes, limits = [], []
    with autocast(DelayedScaling(amax_history_len=HISTORY)):
        layer = Linear(16, 16, rngs=nnx.Rngs(0))
        for step, size in enumerate(sizes):
            x = size * jax.random.normal(jax.random.key(step), (16, 16))
            amaxes.append(float(jnp.abs(x).max()))
            limits.append(E4M3_MAX / float(scale_of(layer)))
            value_and_grad(lambda layer, x: jnp.mean(layer(x) ** 2))(layer, x)
    return amaxes, limits


def scale_of(layer: nnx.Module) -> jax.Array:
    """Return the scale of a layer's input."""
    [found] = [leaf for path, leaf in nnx.to_flat_state(nnx.state(layer)) if path[-2:] == ("x", "scale")]
    return found[...]


def draw_delayed(axes: Axes) -> None:
    """Draw the amax of a layer's input beside the largest value that the scale of that step can hold."""
    sizes = [1, 1, 1.1, 1, 1, 3, 3, 3.1, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1]
    amaxes, limits = delayed_scaling(sizes)
    steps = range(1, len(sizes))  # before the first step nothing has been seen, and the scale is 1
    axes.bar(steps, amaxes[1:], color="lightgray", label="amax of the input in this step")
    axes.step(steps, limits[1:], where="mid", color="tab:blue", label="largest value that the step's scale can hold")
    lost = [step for step in steps if amaxes[step] > limits[step] * 1.001]
    axes.plot(lost, [amaxes[step] for step in lost], "v", color="tab:red", label="values beyond it saturate")
    axes.set_xticks(steps[::2])
    axes.set_xlim(0.3, len(sizes) - 0.3)
    axes.set_xlabel(f"step; amax history of {HISTORY} steps")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", frameon=False, fontsize="small")
    axes.set_ylim(0, 1.5 * max(amaxes))


def main() -> None:
    # Text stays text, and the same figures give the same plot.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jax_te"}):
        for name, size, draw in (("fp8_gemm", (8.5, 4), draw_gemms), ("delayed_scaling", (7.5, 3), draw_delayed)):
            figure = Figure(figsize=size, layout="constrained")
            draw(figure.subplots())
            figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
