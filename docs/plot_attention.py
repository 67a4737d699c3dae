"""Draw how fast FP8 attention is beside bf16's, by length: ``python docs/plot_attention.py``.

The figures are those of the table of gains in docs/attention_fp8_measured.md. It writes ``images/attention_fp8.svg``.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent
GAINS = {"both passes": (1, 2), "backward alone": (3, 4)}
"""Columns of the gains under delayed and current scaling."""


def rows(text: str) -> list[list[float]]:
    """Return the numbers of the table of gains, a list for each of its rows."""
    lines = [line for line in text[text.index("| length | both") :].split("\n\n")[0].splitlines()[2:] if line]
    return [[float(cell.replace(",", "")) for cell in line.strip("| ").split("|")] for line in lines]


def main() -> None:
    table = rows((DOCS / "attention_fp8_measured.md").read_text())
    # Text stays text, and the same table gives the same plot.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jax_te"}):
        figure = Figure(figsize=(7, 3.5), layout="constrained")
        axes = figure.subplots()
        for (label, columns), color in zip(GAINS.items(), ("tab:blue", "tab:orange"), strict=True):
            for column, recipe, style in zip(columns, ("delayed", "current"), ("-", "--"), strict=True):
                lengths, gains = [row[0] for row in table], [row[column] for row in table]
                axes.plot(lengths, gains, style, color=color, marker="o", label=f"{label}, {recipe}")
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks([row[0] for row in table], [f"{row[0]:,.0f}" for row in table])
        axes.set(xlabel="positions, causal, 32 heads of 128", ylabel="time in bf16 / time in FP8")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize="small")
        figure.savefig(DOCS / "images" / "attention_fp8.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
