"""Persistent cache of compiled programs."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jax_te._validation import checked


@checked
def keep_compiled_programs(folder: str | Path | None = None) -> Path | None:
    """Return the folder in which JAX now caches compiled programs, so that the same program is not compiled again.

    They are found again for the same program, shapes and shardings, devices, XLA flags and versions of jax and jaxlib,
    and compiled anew otherwise. Captured graphs are among them. Programs are kept however little time they take to
    compile, unless JAX's option ``jax_persistent_cache_min_compile_time_secs`` has another value than its default, 1.

    Loading a program runs it, so the folder belongs to the user alone, and neither runs nor checkpoints refer to it.

    Args:
        folder: folder of the cache; made if missing, as its parents are, with mode 0700, and of that mode if it exists.
            None: ``$XDG_CACHE_HOME/jax_te`` or ``~/.cache/jax_te``, which gets this mode, unless JAX's own options name
            a folder, or turn its cache off: they stay, and None is returned.

    Raises:
        ValueError: for a folder that another user owns, can write to or can read, and one inside of a run or a
            checkpoint, since these may be shared; for a folder while JAX's option ``jax_enable_compilation_cache`` is
            False.
        OSError, RuntimeError: for a folder that cannot be made, and if the user has no home.

    >>> keep_compiled_programs("programs").name
    'programs'
    """
    ours = folder is None
    if folder is None:
        if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
            return None
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jax_te"
    if not jax.config.jax_enable_compilation_cache:
        raise ValueError(
            f"nothing would be kept in {folder}: JAX's option jax_enable_compilation_cache is False; set it to True, "
            "or leave out the call"
        )
    from jax_te.checkpoint import METADATA_FILE  # here, since Orbax takes longer to import than all of this package

    path = Path(folder).resolve()
    for parent in (path, *path.parents):
        is_run = (parent / "config.json").is_file() and (parent / "checkpoints").is_dir()
        if is_run or (parent / METADATA_FILE).exists():
            raise ValueError(
                f"compiled programs do not belong in {path}: {parent} holds a run or a checkpoint, and who loads a "
                "program runs it; name a folder elsewhere"
            )
    # Its parents, too: who can write to one could put another folder in its place.
    for parent in (each for each in reversed(path.parents) if not each.exists()):
        parent.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid():
        raise ValueError(f"{path} belongs to another user, whose programs would run; name a folder of your own")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"other users can write to {path} (mode {status.st_mode & 0o777:o}), and what is there would run; empty it "
            "and chmod 700 it, or name another folder"
        )
    if ours:
        path.chmod(0o700)  # it may have been there before, for others to read
    elif status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(
            f"other users can read {path} (mode {status.st_mode & 0o777:o}), and compiled programs are yours alone; "
            "name a folder that is not there yet, or chmod 700 it if nobody else needs it"
        )
    if jax.config.jax_compilation_cache_dir != str(path):
        reset_cache()  # JAX reads the option only until it has opened a folder
        jax.config.update("jax_compilation_cache_dir", str(path))
    if jax.config.jax_persistent_cache_min_compile_time_secs == 1.0:
        # The draws of a model's parameters are small programs, which take a second or two together.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return path
