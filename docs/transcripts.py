"""Write what the examples of the commands' pages print: docs/commands/NAME.txt, which docs/conf.py shows on its page.

    python docs/transcripts.py            # all, some minutes on two CPU cores
    python docs/transcripts.py doctor     # those of some commands; most need the run that `train` makes

The commands run one after the other in a new folder. Of what one prints, at most `LINES` lines of `COLUMNS` characters
are kept, and … stands for the rest. Those of `jax-te bench` are not among them: docs/performance*.md has their figures.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

LINES, COLUMNS = 36, 118
EXAMPLES = {
    "train": ["jax-te train --num-layers 2 --steps 60 --log-every 20 --recipe current --output run"],
    "sample": ["jax-te sample --output run --prompt 'import ' --length 60"],
    "eval": ["jax-te eval --output run"],
    "convert": ["jax-te convert run folder --to huggingface"],
    "doctor": ["jax-te doctor"],
    "inspect precision": ["jax-te inspect precision --output run"],
    "inspect recipes": ["jax-te inspect recipes --output run"],
    "inspect sensitivity": [
        "jax-te inspect sensitivity --output run --keep-bf16 1 --write rules.yaml",
        "cat rules.yaml",
    ],
    "inspect sharding": ["jax-te inspect sharding --preset tiny --mesh fsdp=2,tensor=2"],
    "inspect communication": ["jax-te inspect communication --preset tiny --mesh data=2,tensor=2"],
    "inspect pipeline": ["jax-te inspect pipeline --stages 4 --microbatches 8 --schedule 1f1b"],
    "inspect checkpoint": ["jax-te inspect checkpoint run"],
}


def transcript(commands: list[str], folder: Path) -> str:
    """Run commands in a folder, and return each with what it prints."""
    shown = []
    for command in commands:
        print(f"$ {command}", flush=True)
        done = subprocess.run(shlex.split(command), cwd=folder, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise SystemExit(f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stdout).replace(str(folder), ".")
        lines = [line.rstrip() for line in text.strip().splitlines()]
        lines = [line if len(line) <= COLUMNS else line[: COLUMNS - 2] + " …" for line in lines]
        if len(lines) > LINES:
            lines = [*lines[:LINES], "…"]
        shown += [f"$ {command}", *lines, ""]
    return "\n".join(shown)


def main(names: list[str]) -> None:
    pages = Path(__file__).parent / "commands"
    with tempfile.TemporaryDirectory() as folder:
        for name in names or EXAMPLES:
            text = transcript(EXAMPLES[name], Path(folder))
            (pages / f"{name.replace(' ', '_')}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
