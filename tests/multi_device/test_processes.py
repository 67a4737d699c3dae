"""The harness that starts several processes: what they return, and that none is left after a failure."""

from __future__ import annotations

import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.processes import ProcessError, run_processes


def add_up(factor):
    """The sum over all devices of all processes, as every process sees it."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    local = np.arange(2 * jax.process_index(), 2 * jax.process_index() + 2, dtype=np.float32)
    array = jax.make_array_from_process_local_data(jax.NamedSharding(mesh, jax.P("x")), local)
    total = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(jnp.sum(x), "x"), mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P())
    )
    print(f"process {jax.process_index()} has {jax.local_device_count()} devices")
    return jax.process_index(), factor * float(total(array))


def fail_in_one(folder):
    (folder / str(jax.process_index())).write_text(str(os.getpid()))
    if jax.process_index() == 1:
        while not (folder / "0").exists():
            time.sleep(0.01)
        raise ValueError("the second has a fault")
    time.sleep(600)


def hang_in_one():
    if jax.process_index() == 0:
        time.sleep(600)


@pytest.mark.slow
def test_processes_reach_each_other():
    finished = run_processes(2, add_up, (10.0,), devices=2)
    assert [process.result for process in finished] == [(0, 60.0), (1, 60.0)]
    for number, process in enumerate(finished):
        assert f"process {number} has 2 devices" in process.output


@pytest.mark.costly
def test_a_failure_names_the_process_and_ends_the_others(tmp_path):
    with pytest.raises(
        ProcessError, match=r"process 1 of 2 ended with status 1\n[\s\S]*the second has a fault"
    ) as caught:
        run_processes(2, fail_in_one, (tmp_path,))
    assert "process 0" not in str(caught.value)
    for number in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(number)).read_text()), 0)


@pytest.mark.slow
def test_a_process_that_hangs_is_named_with_the_place():
    with pytest.raises(ProcessError, match=r"process 0 of 2 has not ended in 1 s\n[\s\S]*in hang_in_one"):
        run_processes(2, hang_in_one, timeout=1.0)


@pytest.mark.costly
def test_a_script_is_run_with_its_arguments(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys, jax\nresult = (sys.argv[1:], jax.process_count())\n")
    assert [process.result for process in run_processes(1, script, ("a", 1))] == [(["a", "1"], 1)]
