#!/usr/bin/env python3
"""Run the ```python blocks of Markdown files, and the code cells of notebooks.

    python .ci/snippets.py README.md docs/*.md examples/*.ipynb

The blocks of one file run in order, in one namespace, in a process and an empty folder of their
own; two files at a time. A block that cannot run here carries an HTML comment on the line above it,
`<!-- not run: REASON -->`; it is skipped and listed. Tracebacks name the Markdown file and its
line.
"""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap
import types
from concurrent.futures import ThreadPoolExecutor

FENCE = re.compile(r"[ \t]*(?P<ticks>`{3,}|~{3,})[ \t]*(?P<language>\w*)[^`]*$")
NOT_RUN = re.compile(r"<!--\s*not run:\s*(?P<reason>.+?)\s*-->")
TIMEOUT_S = 600


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: its language, its first line in the file, its code, and the reason not to run it."""

    language: str
    line: int
    code: str
    skip: str | None


def find_blocks(text: str, *languages: str) -> list[Block]:
    """Return the fenced blocks in these languages."""
    blocks: list[Block] = []
    lines = text.splitlines()
    above = ""  # the last line that was neither blank nor inside a fence
    i = 0
    while i < len(lines):
        opening = FENCE.match(lines[i])
        if opening is None:
            above = lines[i] if lines[i].strip() else above
            i += 1
            continue
        ticks = opening["ticks"]
        closing = re.compile(rf"[ \t]*{re.escape(ticks[0])}{{{len(ticks)},}}[ \t]*$")
        end = next((j for j in range(i + 1, len(lines)) if closing.match(lines[j])), None)
        if end is None:
            raise SystemExit(f"line {i + 1}: this fence is never closed")
        if opening["language"] in languages:
            reason = NOT_RUN.search(above)
            code = textwrap.dedent("\n".join(lines[i + 1 : end]))
            blocks.append(Block(opening["language"], i + 2, code, reason["reason"] if reason else None))
        above = ""
        i = end + 1
    return blocks


def python_blocks(path: pathlib.Path) -> list[Block]:
    """Return the Python blocks of a Markdown file, or the code cells of a notebook."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return find_blocks(text, "python")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return [Block("python", 1, "".join(cell["source"]), None) for cell in cells]


def execute(path: pathlib.Path) -> None:
    """Run one file's blocks in this process, as the module `__main__`."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    for block in python_blocks(path):
        if block.skip is None:
            source = "\n" * (block.line - 1) + block.code  # line numbers are the file's
            exec(compile(source, str(path), "exec", dont_inherit=True), main.__dict__)


def check(path: pathlib.Path) -> bool:
    blocks = python_blocks(path)
    for block in blocks:
        if block.skip is not None:
            print(f"  not run  {path}:{block.line}  {block.skip}", flush=True)
    count = sum(block.skip is None for block in blocks)
    if count == 0:
        return True
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(__file__).resolve()
        try:
            done = subprocess.run(
                [sys.executable, str(script), "--execute", str(path.resolve())],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as late:
            print(f"  FAILED   {path}: not done after {late.timeout:.0f} s", flush=True)
            return False
    if done.returncode != 0:
        print(f"  FAILED   {path}\n{textwrap.indent(done.stdout, '    ')}", flush=True)
        return False
    print(f"  ran      {path}: {count} block{'s' * (count != 1)}", flush=True)
    return True


def main(arguments: list[str]) -> int:
    if len(arguments) == 2 and arguments[0] == "--execute":
        execute(pathlib.Path(arguments[1]))
        return 0
    if not arguments:
        print(__doc__)
        return 2
    with ThreadPoolExecutor(2) as pool:  # each file is a process of its own, and waits for one core
        passed = list(pool.map(check, map(pathlib.Path, arguments)))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
