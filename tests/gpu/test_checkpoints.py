"""Saves from a GPU's memory: through pinned memory of the host, and without it where there is too little."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_te.checkpoint import TrainCheckpointer

pytestmark = pytest.mark.gpu

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int32", "uint8", "bool", "complex64"]


def bits(tree):
    plain = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in tree.values()]
    return [np.asarray(x).tobytes() for x in plain]


@pytest.mark.parametrize("more", [(), ("int4", "float4_e2m1fn")], ids=["by one call", "some by Orbax"])
def test_a_step_overwrites_a_state_while_it_is_saved(tmp_path, more):
    """Large and small arrays of every dtype, on one device and over all of them: the old values are restored."""
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    values = 3.0 * jax.random.normal(jax.random.key(0), (1024, 2048))
    state = {dtype: values.astype(dtype) for dtype in (*DTYPES, *more)}
    state |= {f"{dtype} small": values[:8, :8].astype(dtype) for dtype in (*DTYPES, *more)}
    state |= {f"{spec}": jax.device_put(values, jax.NamedSharding(mesh, spec)) for spec in (jax.P("x"), jax.P())}
    state["key"] = jax.random.key(1)
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)

    def another(leaf):
        return jax.random.clone(leaf) if leaf.dtype == wanted["key"].dtype else leaf[::-1]

    overwrite = jax.jit(lambda state: jax.tree.map(another, state), donate_argnums=0)
    with TrainCheckpointer(tmp_path) as checkpointer:
        for step in range(3):  # the first save waits for its copies
            saved = bits(state)
            state = jax.block_until_ready(jax.tree.map(jnp.copy, state))  # without values on the host
            checkpointer.save(state, None, step)
            state = overwrite(state)
        restored, _, _ = checkpointer.restore(wanted)
    assert bits(restored) == saved


TOO_LARGE = """
import logging, sys, jax, jax.numpy as jnp, numpy as np
from jax_te.checkpoint import TrainCheckpointer
logging.basicConfig(stream=sys.stdout, format="%(message).60s", force=True)
state = {str(i): jnp.full((2**26,), float(i)) for i in range(8)}
wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
with TrainCheckpointer(sys.argv[1]) as checkpointer:
    for step in (1, 2):
        checkpointer.save(state, None, step)
        for leaf in state.values():
            leaf.delete()
        state, _, found = checkpointer.restore(wanted)
        print(found, [np.unique(np.asarray(leaf)).tolist() for leaf in state.values()])
"""


def test_a_state_that_is_larger_than_the_memory_that_is_pinned(tmp_path):
    """2 GiB, of which XLA may pin one."""
    more = {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), **more}
    output = subprocess.check_output([sys.executable, "-c", TOO_LARGE, str(tmp_path)], env=environment, text=True)
    values = [[float(i)] for i in range(8)]
    said = "a save will block the loop while arrays are copied through p"
    assert output.splitlines() == [said, f"1 {values}", f"2 {values}"]
