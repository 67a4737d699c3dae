#!/usr/bin/env python3
"""Run the ```python blocks of Markdown files, and the code cells of notebooks.

    python .ci/snippets.py README.md docs/*.md examples/*.ipynb

Each block runs as a reader who copies it runs it: alone, in a process and an empty folder of its own. What it prints is
compared with the ```text block that follows it, if there is one: the words, for numbers depend on the machine. Cells of
a notebook run in order, in one process. Two files run at a time. A block that cannot run here carries an HTML comment
on the line above it, `<!-- not run: REASON -->`; it is skipped and listed. Tracebacks name the Markdown file and its
line.

    python .ci/snippets.py --write docs/attention.md  # and write the ```text blocks anew, of every block that prints
"""

import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap
import traceback
import types
from concurrent.futures import ThreadPoolExecutor

FENCE = re.compile(r"[ \t]*(?P<ticks>`{3,}|~{3,})[ \t]*(?P<language>\w*)[^`]*$")
NOT_RUN = re.compile(r"<!--\s*not run:\s*(?P<reason>.+?)\s*-->")
NUMBER = re.compile(r"[-+]?(\d[\d_,]*\.?\d*(e[-+]?\d+)?|\bnan\b|\binf\b)")
TIMEOUT_S = 600
# Imported once, before the processes of the blocks are forked. None of them starts JAX's devices.
COMMON = ("jax.numpy", "flax.nnx", "flax.linen", "optax", "jax_te.layers", "jax_te.training", "jax_te.models")


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


def execute(path: pathlib.Path) -> bool:
    """Run one file's blocks from this process, and report what does not run or prints something else."""
    if path.suffix == ".ipynb":
        code = "\n".join(block.code for block in python_blocks(path))
        return run_forked(Block("python", 1, code, None), path)[0]
    for module in COMMON:
        importlib.import_module(module)
    text = path.read_text(encoding="utf-8")
    passed = True
    for block in python_blocks(path):
        if block.skip is not None:
            continue
        ran, printed = run_forked(block, path)
        passed = passed and ran
        expected = printed_block(text, block)
        if ran and expected is not None and words(printed) != words(expected):
            print(f"{path}:{block.line} prints\n{printed}and not\n{expected}")
            passed = False
    return passed


def run_forked(block: Block, path: pathlib.Path) -> tuple[bool, str]:
    """Run a block in a process and an empty folder of its own, and return whether it ran and what it printed."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.chdir(folder)
                main = types.ModuleType("__main__")
                sys.modules["__main__"] = main
                source = "\n" * (block.line - 1) + block.code  # line numbers are the file's
                with contextlib.redirect_stdout(output):
                    exec(compile(source, str(path), "exec", dont_inherit=True), main.__dict__)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                output.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        return status == 0, output.read()


def words(printed: str) -> list[str]:
    """Return the words of a text, with every number as the same word."""
    return NUMBER.sub(" 0 ", printed).split()


def printed_block(text: str, block: Block) -> str | None:
    """Return the ```text block that follows a block at once, or None."""
    rest = text.splitlines()[block.line - 1 + block.code.count("\n") + 2 :]
    if len(rest) < 2 or rest[0].strip() or rest[1].strip() != "```text":
        return None
    return find_blocks("\n".join(rest), "text")[0].code + "\n"


def write_printed(path: pathlib.Path) -> None:
    """Write behind each block of a file what it prints, in place of what was there."""
    for module in COMMON:
        importlib.import_module(module)
    for block in reversed([block for block in python_blocks(path) if block.skip is None]):
        ran, printed = run_forked(block, path)
        if not ran or not printed.strip():
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        fence = block.line - 1 + block.code.count("\n") + 1  # the index of the line that closes the block
        indent = re.match(r"\s*", lines[fence])[0]  # pyright: ignore[reportOptionalSubscript]
        end = fence + 1
        if printed_block("\n".join(lines), block) is not None:
            end = next(i for i in range(fence + 3, len(lines)) if lines[i].strip() == "```") + 1
        shown = ["```text", *printed.rstrip().splitlines(), "```"]
        lines[fence + 1 : end] = ["", *(indent + line for line in shown)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


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
        return 0 if execute(pathlib.Path(arguments[1])) else 1
    if arguments and arguments[0] == "--write":
        for name in arguments[1:]:
            write_printed(pathlib.Path(name).resolve())
        return 0
    if not arguments:
        print(__doc__)
        return 2
    with ThreadPoolExecutor(2) as pool:  # each file is a process of its own, and waits for one core
        passed = list(pool.map(check, map(pathlib.Path, arguments)))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
