#!/usr/bin/env python3
"""Run the ```python blocks of Markdown files, and the code cells of notebooks.

    python .ci/snippets.py README.md docs/*.md examples/*.ipynb

Blocks run as a reader who follows the page runs them: in order and in one folder, which is empty at first, each as a
program of its own, in a process that sees no name of another block but the files that they wrote. What a block prints
is compared with the ```text block that follows it, if there is one: the words, for numbers depend on the machine. Cells
of a notebook run in one process. Two pages are run at a time. Tracebacks name the Markdown file and its line. An HTML
comment on the line above a block says what else the reader does with it:

    <!-- file: NAME.py -->      the page says to store the block so: later blocks may import it
    <!-- not run: REASON -->    it cannot run here; it is skipped and listed

    python .ci/snippets.py --write docs/attention.md  # and write the ```text blocks anew, of every block that prints
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import textwrap
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

FENCE = re.compile(r"[ \t]*(?P<ticks>`{3,}|~{3,})[ \t]*(?P<language>\w*)[^`]*$")
NOT_RUN = re.compile(r"<!--\s*not run:\s*(?P<text>.+?)\s*-->")
STORED_AS = re.compile(r"<!--\s*file:\s*(?P<text>\w+\.py)\s*-->")
NUMBER = re.compile(r"[-+]?(\d[\d_,]*\.?\d*(e[-+]?\d+)?|\bnan\b|\binf\b)")
TIMEOUT_S = 600
# Imported once, by the process from which those of the blocks are forked. None of them starts JAX's devices.
COMMON = ["jax.numpy", "flax.nnx", "flax.linen", "optax", "jax_te.layers", "jax_te.training", "jax_te.models"]
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(COMMON)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: its language, first line in the file, code, reason not to run it, and file to store it as."""

    language: str
    line: int
    code: str
    skip: str | None = None
    file: str | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """What became of a block: what it wrote to stdout and stderr, and why it did not end well, or nothing."""

    printed: str
    errors: str
    failure: str


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
            code = textwrap.dedent("\n".join(lines[i + 1 : end]))
            skip, file = ((found := comment.search(above)) and found["text"] for comment in (NOT_RUN, STORED_AS))
            blocks.append(Block(opening["language"], i + 2, code, skip, file))
        above = ""
        i = end + 1
    return blocks


def python_blocks(path: pathlib.Path) -> list[Block]:
    """Return the Python blocks of a Markdown file, or the code cells of a notebook as one."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return find_blocks(text, "python")
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return [Block("python", 1, "\n".join("".join(cell["source"]) for cell in cells))]


def run_page(path: pathlib.Path) -> Iterator[tuple[Block, Run]]:
    """Run the blocks of a file in order and in one folder, and yield each with what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        for block in python_blocks(path):
            if block.skip is None:
                if block.file is not None:
                    pathlib.Path(folder, block.file).write_text(block.code + "\n", encoding="utf-8")
                yield block, run_in(folder, block, path)


def run_in(folder: str, block: Block, path: pathlib.Path) -> Run:
    """Run a block in a process of its own, in this folder."""
    with tempfile.TemporaryDirectory() as outputs:
        stdout, stderr = pathlib.Path(outputs, "stdout"), pathlib.Path(outputs, "stderr")
        stdout.touch()
        stderr.touch()
        process = FORK_SERVER.Process(target=run_block, args=(block, path, folder, stdout, stderr))
        process.start()
        process.join(TIMEOUT_S)
        failure = ""
        if process.is_alive():
            process.kill()
            process.join()
            failure = f"{path}:{block.line} is not done after {TIMEOUT_S} s\n"
        elif process.exitcode != 0:
            failure = f"{path}:{block.line} ends with code {process.exitcode}\n"  # minus the number of its signal
        return Run(stdout.read_text(), stderr.read_text(), failure)


def run_block(block: Block, path: pathlib.Path, folder: str, stdout: pathlib.Path, stderr: pathlib.Path) -> None:
    """Run a block as the main module of this process."""
    os.chdir(folder)
    sys.path.insert(0, folder)  # as `python FILE` in it does
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    source = "\n" * (block.line - 1) + block.code  # line numbers are the file's
    with stdout.open("w") as printed, stderr.open("w") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())  # a traceback, and what XLA writes
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(path), "exec", dont_inherit=True), main.__dict__)


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
    for block, run in reversed(list(run_page(path))):
        if run.failure or not run.printed.strip():
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        fence = block.line - 1 + block.code.count("\n") + 1  # the index of the line that closes the block
        indent = re.match(r"\s*", lines[fence])[0]  # pyright: ignore[reportOptionalSubscript]
        end = fence + 1
        if printed_block("\n".join(lines), block) is not None:
            end = next(i for i in range(fence + 3, len(lines)) if lines[i].strip() == "```") + 1
        shown = ["```text", *run.printed.rstrip().splitlines(), "```"]
        lines[fence + 1 : end] = ["", *(indent + line for line in shown)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def failures_of(path: pathlib.Path) -> list[str]:
    """Run a page, and return what is wrong with each block: nothing, a traceback, or what it prints and should not."""
    text = path.read_text(encoding="utf-8")
    return [failure_of(block, run, path, text) for block, run in run_page(path)]


def failure_of(block: Block, run: Run, path: pathlib.Path, text: str) -> str:
    """Return what is wrong with a block of a page with this text: nothing, or what to show for it."""
    if run.failure:
        return run.printed + run.errors + run.failure
    expected = printed_block(text, block) if path.suffix != ".ipynb" else None
    if expected is not None and words(run.printed) != words(expected):
        return f"{path}:{block.line} prints\n{run.printed}and not\n{expected}"
    return ""


def check(paths: list[pathlib.Path]) -> bool:
    """Run all blocks of these files, print for each file what became of it, and return whether all is well."""
    for path in paths:
        for block in python_blocks(path):
            if block.skip is not None:
                print(f"  not run  {path}:{block.line}  {block.skip}", flush=True)
    to_run = [path for path in paths if any(block.skip is None for block in python_blocks(path))]
    passed = True
    with ThreadPoolExecutor(2) as pool:  # each thread waits for a process, which keeps about one core busy
        results = pool.map(lambda path: failures_of(path.resolve()), to_run)
        for path, found in zip(to_run, results, strict=True):
            if failed := "".join(found):
                print(f"  FAILED   {path}\n{textwrap.indent(failed, '    ')}", flush=True)
            else:
                print(f"  ran      {path}: {len(found)} block{'s' * (len(found) != 1)}", flush=True)
            passed = passed and not failed
    return passed


def compile_fast(cache: str) -> None:
    """Let the processes of blocks spend less time in XLA, most of theirs: it optimizes little, and they share a cache.

    What they print keeps its words. The tests do the same.
    """
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def main(arguments: list[str]) -> int:
    write = arguments[:1] == ["--write"]
    paths = [pathlib.Path(name) for name in arguments[write:]]
    if not paths:
        print(__doc__)
        return 2
    if write:
        for path in paths:
            write_printed(path.resolve())
        return 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        compile_fast(cache)
        return 0 if check(paths) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
