"""Plot speeds beside those of peers: ``python docs/plot_speed.py OUT FILE...``.

Each FILE is what ``jax-te bench ... --output FILE`` writes; its name is the heading of its rows. A bar goes from 1, a
row as fast as the one that it is compared with, to its ``speed_ratio``. Peers' own rows, and rows without a ratio,
which failed or were measured alone, are left out.
"""

import json
import sys
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PEERS = ("te.jax", "Megatron-Core")
COLORS = {"none": "tab:gray", "delayed": "tab:blue", "current": "tab:orange", "block": "tab:green"}


def ratios(path: Path) -> dict[str, float]:
    """Ratio by label, the row's name without what all rows of a plain command have in theirs."""
    found = {}
    for row in json.loads(path.read_text())["rows"]:
        if "speed_ratio" in row and not any(peer in row["name"] for peer in PEERS):
            name = row["name"].removeprefix("jax_te ").removesuffix(", unrolled, recompute none")
            found[name.partition(" (")[0]] = row["speed_ratio"]
    return found


def draw(axes: Axes, heading: str, bars: dict[str, float]) -> None:
    """Draw the bars of a file, the first on top."""
    for place, (label, ratio) in enumerate(bars.items()):
        words = label.replace(",", " ").split()
        color = next((COLORS[word] for word in words if word in COLORS), "tab:purple")
        axes.barh(place, ratio - 1, left=1, color=color)
        # Right of the bar and of the line at 1, also where the bar goes to the left.
        axes.text(max(ratio, 1), place, f" {ratio:.3f}", va="center", fontsize="small")
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_title(heading, loc="left", fontsize="medium")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def main(out: str, files: list[str]) -> None:
    found = {Path(file).stem.replace("_", " "): ratios(Path(file)) for file in files}
    empty = [heading for heading, bars in found.items() if not bars]
    if empty or not found:
        raise SystemExit(f"no row of jax_te's has a speed_ratio: {', '.join(empty) or 'no file was given'}")
    counts = [len(bars) for bars in found.values()]
    # Text stays text, and the same files give the same plot.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jax_te"}):
        figure = Figure(figsize=(8, 0.6 * len(counts) + 0.25 * sum(counts)), layout="constrained")
        panels = figure.subplots(len(counts), 1, sharex=True, squeeze=False, height_ratios=counts)
        for axes, (heading, bars) in zip(panels[:, 0], found.items(), strict=True):
            draw(axes, heading, bars)
        panels[-1, 0].set_xlabel("speed_ratio: the time of the peer, or of the first row, over the row's")
        low, high = panels[-1, 0].get_xlim()
        panels[-1, 0].set_xlim(low, high + 0.06 * (high - low))  # for the last figure
        figure.savefig(out, metadata={"Date": None} if out.endswith(".svg") else None)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
