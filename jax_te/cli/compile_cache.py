"""Compiled programs, kept on disk between runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax


def keep_compiled_programs() -> None:
    """Let JAX keep compiled programs in ``~/.cache/jax_te``, unless its own settings say where, or that it shall not.

    The folder is the user's alone: JAX runs what it finds there.
    """
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jax_te"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
        folder.chmod(0o700)  # it may have been there before
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        print(f"jax-te: compiled programs are not kept on disk: {error}", file=sys.stderr)
    else:
        jax.config.update("jax_compilation_cache_dir", str(folder))
