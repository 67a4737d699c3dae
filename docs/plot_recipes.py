"""Plot held-out losses of several runs, and their distance from the first: ``python docs/plot_recipes.py OUT RUN...``.

Each RUN is a folder of ``jax-te train``; its name is the label. The first is the one the others are compared with.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt


def heldout(run: Path) -> dict[int, float]:
    """Held-out loss by step."""
    rows = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["heldout_loss"] for row in rows if "heldout_loss" in row}


def main(out: str, runs: list[str]) -> None:
    curves = {Path(run).name: heldout(Path(run)) for run in runs}
    reference = next(iter(curves.values()))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for name, curve in curves.items():
        steps = sorted(curve)
        left.plot(steps, [curve[step] for step in steps], label=name)
        right.plot(steps, [curve[step] - reference[step] for step in steps], label=name)
    left.set(xlabel="step", ylabel="held-out loss, nats per byte", yscale="log")
    right.set(xlabel="step", ylabel=f"distance from {next(iter(curves))}")
    right.axhline(0.01, color="gray", linewidth=0.5)
    right.legend()
    figure.savefig(out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
