#!/usr/bin/env python3
"""Check the shell scripts, Kubernetes manifests and container files in Markdown files by their own tools.

    python .ci/scripts.py README.md docs/*.md

- ```sh and ```bash: shellcheck. One without a `#!` line is what a reader types, with FRAGMENT left out.
- ```yaml with an `apiVersion`: fields, types and required fields by the models of JobSet v1alpha2, with the Job and pod
  in it, which the package kubeflow-trainer-api has generated from the API's OpenAPI schema. The API server checks more,
  such as the form of quantities, and names that must agree.
- ```dockerfile: hadolint.

An exception is the tool's own comment in the block, with its reason: `# shellcheck disable=`, `# hadolint ignore=`.
"""

import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from snippets import Block, find_blocks

# The activated file is made by the command before it; a variable of several options is written to be split.
FRAGMENT = "SC1091,SC2086"
MODELS = {("jobset.x-k8s.io/v1alpha2", "JobSet"): JobsetV1alpha2JobSet}


def run_linter(path: pathlib.Path, block: Block, *command: str) -> list[str]:
    """Return a linter's findings, with the lines of the document."""
    done = subprocess.run([*command, "-"], input=block.code + "\n", capture_output=True, text=True)
    if done.returncode == 0:
        return []
    found = (done.stdout + done.stderr).splitlines() or [f"{command[0]} ended with status {done.returncode}"]
    place = re.compile(r"^(?:-|/dev/stdin):(\d+)")
    return [place.sub(lambda line: f"{path}:{int(line[1]) + block.line - 1}", text) for text in found]


def find_differences(given: Any, kept: Any, where: str = "") -> Iterator[str]:
    """Yield where a manifest is not what its model made of it: unknown fields are dropped, required ones filled in."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name in given.keys() | kept.keys():
            here = f"{where}.{name}"
            if name not in kept:
                yield f"{here} is not a field of the schema, or empty"
            elif name not in given:
                yield f"{here} is required"
            else:
                yield from find_differences(given[name], kept[name], here)
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, pair in enumerate(zip(given, kept, strict=True)):
            yield from find_differences(*pair, f"{where}[{number}]")
    elif given != kept:
        yield f"{where} is {given!r}, which the schema takes for {kept!r}"


def check_manifests(path: pathlib.Path, block: Block) -> list[str]:
    problems: list[str] = []
    try:
        for manifest in yaml.safe_load_all(block.code):
            if not isinstance(manifest, dict) or "apiVersion" not in manifest:
                continue
            kind = manifest["apiVersion"], manifest.get("kind")
            if kind not in MODELS:
                problems.append(f"no model of {kind[0]} {kind[1]}; MODELS in {__file__} has those that are checked")
                continue
            kept = MODELS[kind].from_dict(manifest)  # a ValidationError is a ValueError
            problems += find_differences(manifest, kept.to_dict())
    except (yaml.YAMLError, ValueError, TypeError) as error:
        problems.append(str(error))
    return [f"{path}:{block.line}: {problem}" for problem in problems]


def check_block(path: pathlib.Path, block: Block) -> list[str]:
    if block.language == "yaml":
        return check_manifests(path, block)
    if block.language == "dockerfile":
        return run_linter(path, block, "hadolint", "--no-color")
    if block.code.startswith("#!"):
        return run_linter(path, block, "shellcheck", "--format=gcc")
    return run_linter(path, block, "shellcheck", "--format=gcc", f"--shell={block.language}", f"--exclude={FRAGMENT}")


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__)
        return 2
    failed = False
    for path in map(pathlib.Path, arguments):
        blocks = find_blocks(path.read_text(encoding="utf-8"), "sh", "bash", "yaml", "dockerfile")
        problems = [problem for block in blocks for problem in check_block(path, block)]
        failed = failed or bool(problems)
        if blocks:
            print(f"  {'FAILED ' if problems else 'checked'}  {path}: {len(blocks)} block{'s' * (len(blocks) != 1)}")
        print("".join(f"    {problem}\n" for problem in problems), end="")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
