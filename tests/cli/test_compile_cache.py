"""Where `jax-te train` and `jax-te bench` keep compiled programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jax_te.cli import train
from jax_te.cli.bench import rows
from jax_te.cli.compile_cache import keep_compiled_programs
from jax_te.cli.parser import build_parser, options_from


@pytest.fixture
def no_folder_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has not set JAX's own option."""
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def folder_set() -> str | None:
    return jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]


@pytest.mark.parametrize("there", [False, True])
def test_the_folder_is_the_users_alone(
    there: bool, no_folder_set: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache" / "jax_te"
    if there:
        folder.mkdir(parents=True, mode=0o777)
    keep_compiled_programs()
    assert folder_set() == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_jaxs_own_settings_are_left_alone(no_folder_set: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        keep_compiled_programs()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert folder_set() is None
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    keep_compiled_programs()
    assert folder_set() == str(tmp_path / "own")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("why", ["cannot be made", "belongs to another user"])
def test_a_folder_that_is_not_the_users_is_not_used(
    why: str,
    no_folder_set: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if why == "cannot be made":
        (tmp_path / "jax_te").write_text("a file")
        why = "File exists"
    else:
        monkeypatch.setattr(os, "getuid", lambda: -1)
    keep_compiled_programs()
    assert folder_set() is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jax-te: compiled programs are not kept on disk: ")
    assert why in line


class CalledError(Exception):
    """The folder of compiled programs was asked for."""


def called() -> None:
    raise CalledError


def test_training_keeps_what_it_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "keep_compiled_programs", called)
    with pytest.raises(CalledError):
        train.run(options_from(build_parser().parse_args(["train"])))


def test_measurements_keep_what_they_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "keep_compiled_programs", called)
    with pytest.raises(CalledError):
        rows.show_rows([], None)
