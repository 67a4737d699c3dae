"""Draw a train step beside peers, and where its time goes: ``python docs/plot_train_step.py``.

The figures are those of the tables of docs/performance*.md, so that no figure is written down twice. It writes
``images/train_step.svg`` (tokens/s and MFU beside te.jax and Megatron-Core) and ``images/step_time.svg`` (milliseconds
by kind of kernel, beside te.jax).
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jax_te.config import TransformerConfig
from jax_te.metrics import train_flops

DOCS = Path(__file__).resolve().parent
# The measured model, gpt-1.3b, as the page says
CONFIG = TransformerConfig(num_layers=24, hidden_size=2048, num_attention_heads=16, ffn_hidden_size=8192)
BATCH_SIZE, SEQUENCE_LENGTH, VOCAB_SIZE = 8, 2048, 32000
H200_PEAK = 989e12  # dense bf16 FLOP/s, by which MFU is defined here

OURS, THEIRS = "tab:blue", "silver"
KIND_COLORS = ("tab:blue", "tab:cyan", "tab:orange", "tab:green", "tab:olive", "tab:purple", "tab:gray")


def table(text: str, *columns: str) -> list[dict[str, str]]:
    """Return the rows of the first table with these columns, in this order, cells without bold type."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        heads = cells(line)
        if heads[: len(columns)] == list(columns):
            rows = []
            for row in lines[number + 2 :]:
                if not row.startswith("|"):
                    return rows
                rows.append(dict(zip(heads, cells(row), strict=False)))
            return rows
    raise ValueError(f"docs/performance*.md have no table with the columns {columns}")


def cells(line: str) -> list[str]:
    return [cell.strip().replace("**", "") for cell in line.strip("|\n").split("|")]


def draw_peer(axes: Axes, peer: str, rows: list[dict[str, str]], flops: float) -> None:
    """Draw a pair of bars for each recipe: tokens/s of the peer and of jax_te, labelled with both and MFU."""
    tokens = BATCH_SIZE * SEQUENCE_LENGTH
    for place, row in enumerate(rows):
        for offset, name, color in ((-0.19, peer, THEIRS), (0.19, "jax_te", OURS)):
            seconds = float(row[f"{name} ms"]) / 1000
            axes.barh(place + offset, tokens / seconds, 0.36, color=color, label=name if place == 0 else None)
            mfu = flops / seconds / H200_PEAK
            label = f" {tokens / seconds:,.0f} · MFU {100 * mfu:.0f} %"
            axes.text(tokens / seconds, place + offset, label, va="center", fontsize="small")
    axes.set_yticks(range(len(rows)), [row["recipe"] for row in rows])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 0.95), ncols=2, frameon=False)


def draw_kinds(axes: Axes, rows: list[dict[str, str]]) -> None:
    """Draw a stacked bar for each library: milliseconds of a step by kind of kernel."""
    kinds = [kind for kind in rows[0] if kind not in ("", "all")]
    left = [0.0] * len(rows)
    for kind, color in zip(kinds, KIND_COLORS, strict=True):
        widths = [float(row[kind]) for row in rows]
        axes.barh(range(len(rows)), widths, 0.6, left=left, color=color, label=kind)
        for place, width in enumerate(widths):
            if width >= 10:  # narrower parts have no room for their figure
                axes.text(left[place] + width / 2, place, f"{width:.0f}", ha="center", va="center", color="black")
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, end in enumerate(left):
        axes.text(end, place, f" {rows[place]['all']}", va="center")
    axes.set_yticks(range(len(rows)), [row[""] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of kernels in a train step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, frameon=False, fontsize="small")


def main() -> None:
    text = "\n".join(page.read_text() for page in sorted(DOCS.glob("performance*.md")))
    flops = train_flops(CONFIG, vocab_size=VOCAB_SIZE, batch_size=BATCH_SIZE, sequence_length=SEQUENCE_LENGTH)
    beside = {
        "te.jax": table(text, "recipe", "te.jax ms", "jax_te ms", "jax_te tokens/s"),
        "Megatron-Core": table(text, "recipe", "Megatron-Core ms"),
    }
    # Text stays text, and the same figures give the same plot.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jax_te"}):
        counts = [len(rows) for rows in beside.values()]
        # As narrow as the column of the home page, where it must be legible
        figure = Figure(figsize=(4.2, 0.42 * sum(counts) + 1.2), layout="constrained")
        panels = figure.subplots(2, 1, sharex=True, height_ratios=counts)
        for axes, (peer, rows) in zip(panels, beside.items(), strict=True):
            draw_peer(axes, peer, rows, flops)
        panels[-1].set_xlabel("tokens/s on one H200, a train step of\na GPT with 1.3 billion parameters")
        panels[-1].set_xticks([0, 50_000, 100_000], ["0", "50,000", "100,000"])
        panels[-1].set_xlim(0, 1.6 * panels[-1].get_xlim()[1])  # room for the labels
        figure.savefig(DOCS / "images" / "train_step.svg", metadata={"Date": None})
        figure = Figure(figsize=(7.5, 2.4), layout="constrained")
        draw_kinds(figure.subplots(), table(text, "", "GEMM", "attention"))
        figure.savefig(DOCS / "images" / "step_time.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
