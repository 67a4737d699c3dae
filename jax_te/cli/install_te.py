"""Transformer Engine for JAX with pip alone: ``python -m jax_te.cli.install_te``, the recipe of docs/install.md.

TE's JAX extension is on PyPI as source only, and is compiled against the headers in the CUDA wheels of the environment.
So these come first, with the versions that the extension is built for, and the build sees them.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

_TOOLS = ("nvidia-cudnn-frontend", "pybind11", "setuptools", "wheel", "ninja", "cmake")
REQUIREMENTS = {
    "12": ("jax[cuda12]==0.11.2", "nvidia-cudnn-cu12==9.19.0.56", "nvidia-nvtx-cu12", "nvidia-curand-cu12", *_TOOLS),
    "13": ("jax[cuda13]==0.11.2", "nvidia-cudnn-cu13==9.19.0.56", "nvidia-nvtx", "nvidia-curand", *_TOOLS),
}
"""What TE is built against and with, for each CUDA version: the extras ``te-cu12`` and ``te-cu13``."""

_DESCRIPTION = "Install Transformer Engine for JAX with pip alone, as docs/install.md describes."
_VERSION = "2.20.2"
_PYTHON = (3, 12)  # what jax 0.11 needs
_BUILD = {"NVTE_BUILD_USE_NVIDIA_WHEELS": "1"}


def _steps(cuda: str) -> list[tuple[str, dict[str, str], list[str]]]:
    """Return the steps: a description, the variables to set, and the command."""
    pip = [sys.executable, "-m", "pip", "install"]
    engine = f"transformer-engine[core-cu{cuda},jax]=={_VERSION}"
    return [
        ("JAX with its CUDA libraries, and the build tools", {}, [*pip, *REQUIREMENTS[cuda]]),
        # Isolated, the build would not see the wheels' headers, which are those of the versions above.
        ("Transformer Engine, built against these: some minutes", _BUILD, [*pip, "--no-build-isolation", engine]),
        ("what runs here", {}, [sys.executable, "-m", "jax_te", "doctor"]),
    ]


def problems_of_installing(system: bool) -> list[str]:
    """Return the reason why the installation would fail, or change more than a virtual environment."""
    problems = []
    if not sys.platform.startswith("linux"):
        problems.append(f"Transformer Engine needs Linux, and this is {sys.platform}")
    if sys.version_info < _PYTHON:
        problems.append(
            f"the JAX that TE {_VERSION} is built against needs Python 3.12; this is {sys.version.split()[0]}"
        )
    if sys.prefix == sys.base_prefix and not system:
        problems.append(f"no virtual environment is active: make one, or give --system to install into {sys.prefix}")
    if not shutil.which(os.environ.get("CXX", "g++")):
        problems.append("there is no C++ compiler: install g++, or name one in CXX")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        problems.append("Python's headers are missing: install them (python3-dev, in Debian's words)")
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status of the command: 0; 2 where it refuses to begin; or the failed step's status.

    >>> main(["--cuda", "13", "--dry-run"])  # doctest: +SKIP
    """
    parser = argparse.ArgumentParser(prog="python -m jax_te.cli.install_te", description=_DESCRIPTION)
    parser.add_argument(
        "--cuda", choices=sorted(REQUIREMENTS), default="13", help="CUDA version (default: %(default)s)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and run none")
    parser.add_argument("--system", action="store_true", help="install without a virtual environment, too")
    options = parser.parse_args(arguments)
    user = " as root" if os.geteuid() == 0 else ""
    print(f"installing into {sys.prefix}{user}; other versions of these packages there are replaced")
    if options.cuda == "12":
        print("note: TE for CUDA 12 was built and imported, but not run on a GPU")
    for problem in (problems := problems_of_installing(options.system)):
        print(f"problem: {problem}", file=sys.stderr)
    if problems and not options.dry_run:
        return 2
    for words, variables, command in _steps(options.cuda):
        shown = [*(f"{name}={value}" for name, value in variables.items()), shlex.join(command)]
        print(f"\n# {words}\n{' '.join(shown)}", flush=True)
        if not options.dry_run and (
            status := subprocess.run(command, env=os.environ | variables, check=False).returncode
        ):
            print(f"failed with status {status}: {words}; nothing after it was run", file=sys.stderr)
            return status
    print("\nnothing was run" if options.dry_run else f"\ndone: Transformer Engine {_VERSION} for CUDA {options.cuda}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
