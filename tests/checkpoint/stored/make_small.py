"""Writes a checkpoint of today's format, as ``format_<number>``: ``python -m tests.checkpoint.stored.make_small``."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_te.checkpoint import TrainCheckpointer
from jax_te.checkpoint.tree import FORMAT


def state() -> dict[str, jax.Array]:
    """Arrays of several widths, that are the same on every version of JAX."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4) - 5.0
    dtypes = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f8": jnp.float8_e4m3fn, "int": jnp.int32, "bool": jnp.bool_}
    return {name: jnp.asarray(values.astype(dtype)) for name, dtype in dtypes.items()}


if __name__ == "__main__":
    with TrainCheckpointer(Path(__file__).parent / f"format_{FORMAT}") as checkpointer:
        checkpointer.save(state(), {"next": 4}, 4)
