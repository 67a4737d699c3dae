"""The folder of compiled programs: whose it is, where it may lie, and that a restart does not compile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jax_te.training import keep_compiled_programs


@pytest.fixture(autouse=True)
def own_folder_after() -> Iterator[None]:
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    yield
    reset_cache()
    jax.config.update("jax_compilation_cache_dir", before)


def test_a_folder_of_the_users_own(tmp_path: Path):
    folder = tmp_path / "a" / "b" / "programs"
    before = os.umask(0o002)  # of a user whose group may write
    try:
        assert keep_compiled_programs(folder) == folder
    finally:
        os.umask(before)
    assert jax.config.jax_compilation_cache_dir == str(folder)  # type: ignore[attr-defined]
    # Who could write to a parent could put another folder in the place of this one.
    assert [path.stat().st_mode & 0o777 for path in (folder, *folder.parents[:2])] == [0o700] * 3


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(mode: int, tmp_path: Path):
    folder = tmp_path / "programs"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ValueError, match=rf"other users can write to .*programs \(mode {mode:o}\).*chmod 700"):
        keep_compiled_programs(folder)
    assert folder.stat().st_mode & 0o777 == mode, "what is there may be another user's: its mode stays"
    assert jax.config.jax_compilation_cache_dir != str(folder)  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701])
def test_a_folder_that_others_use_keeps_its_mode(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Such as the working directory: a chmod would lock colleagues out."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.chdir(folder)
    for given in (folder, "."):
        with pytest.raises(ValueError, match=rf"other users can read .*shared \(mode {mode:o}\).*chmod 700"):
            keep_compiled_programs(given)
    assert folder.stat().st_mode & 0o777 == mode


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "getuid", lambda: -1)
    with pytest.raises(ValueError, match="belongs to another user"):
        keep_compiled_programs(tmp_path / "programs")


@pytest.mark.parametrize("inside", ["run", "run/checkpoints/3", "state"])
def test_never_in_a_run_or_a_checkpoint(inside: str, tmp_path: Path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").touch()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "_CHECKPOINT_METADATA").touch()
    with pytest.raises(ValueError, match=r"do not belong in .*programs: .* holds a run or a checkpoint"):
        keep_compiled_programs(tmp_path / inside / "programs")
    assert not (tmp_path / inside / "programs").exists()


GRAPH = """
import sys
import jax, jax.numpy as jnp
from flax import nnx
from jax_te.config import TransformerConfig
from jax_te.megatron import GraphableMegatronModule
from jax_te.training import keep_compiled_programs

class Scale(GraphableMegatronModule):
    def __init__(self, config):
        super().__init__(config)
        self.scale = nnx.Param(jnp.arange(8.0))
    def forward(self, hidden_states):
        return jnp.sin(hidden_states * self.scale)

keep_compiled_programs(sys.argv[1])
config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, cuda_graph_impl="transformer_engine")
layer, x = Scale(config), jax.block_until_ready(jnp.ones((2, 4, 8)))
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event.rpartition("/")[2]))
layer._te_cuda_graph_capture(x)
y = layer(x)
dx = jax.grad(lambda x: layer(x).sum())(x)
print(found.count("cache_hits"), found.count("cache_misses"), len(layer.cuda_graphs), float(y.sum()), float(dx.sum()))
if len(sys.argv) > 2:
    layer._te_cuda_graph_capture(jnp.ones((2, 5, 8)))
    print(found.count("cache_misses"))
"""


@pytest.mark.slow
def test_a_restart_does_not_compile_captured_graphs_and_another_call_is_noticed(tmp_path: Path):
    def run(*another: str) -> list[float]:
        command = [sys.executable, "-c", GRAPH, str(tmp_path / "programs"), *another]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return [float(word) for word in done.stdout.split()]

    (again, compiled, *cold), (hits, compiled_again, *warm, other) = run(), run("another")
    assert compiled_again == 0
    assert compiled >= 3  # the call; and of its derivative, forward and backward
    assert hits == compiled + again  # a program that a process has twice is found there at once
    assert cold == warm
    assert cold[0] == 1.0
    assert other >= 1


def test_a_folder_in_which_nothing_would_be_kept_is_refused(tmp_path: Path):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        with pytest.raises(ValueError, match=r"nothing would be kept in .*programs"):
            keep_compiled_programs(tmp_path / "programs")
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not list(tmp_path.iterdir())
