"""Write the stored checkpoint that `tests/checkpoint/test_stored.py` restores with later versions of the library.

    python tests/checkpoint/stored/make.py tests/checkpoint/stored/format_<number>_gpt

The folder then holds ``checkpoint/`` (what `TrainCheckpointer` wrote after `STEPS` steps), ``arrays.npz`` (names and
bytes of all arrays of the saved state) and ``next_step.json`` (metrics of the step after it). That of format 3 was
written with Python 3.11, jax 0.10.2, flax 0.12.8 and Orbax 0.12.8.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_te import DelayedScaling, ParallelConfig, TransformerConfig, autocast, make_mesh
from jax_te.checkpoint import TrainCheckpointer
from jax_te.models import GPTModel
from jax_te.training import (
    DynamicLossScale,
    adamw_with_schedule,
    create_train_state,
    learning_rate_schedule,
    make_train_step,
)

STEPS = 3
DATA_STATE = {"next_index": 12}
MESH = ParallelConfig(data=2, fsdp=2, tensor=2)
RECIPE = DelayedScaling(amax_history_len=4)
VOCAB, SEQUENCE, BATCH = 32, 16, 8


def build(rngs: nnx.Rngs) -> GPTModel:
    """Return a GPT of one layer: bf16 parameters, learned positions, tied head."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        ffn_hidden_size=32,
        num_attention_heads=2,
        params_dtype="bfloat16",
        compute_dtype="bfloat16",
    )
    return GPTModel(config, vocab_size=VOCAB, max_sequence_length=SEQUENCE, rngs=rngs)


def optimizer() -> Any:
    """Return AdamW with a schedule and clipping."""
    return adamw_with_schedule(learning_rate_schedule(0.01, total_steps=10, warmup_steps=2))


def scaler() -> DynamicLossScale:
    """Return a loss scale that has grown before the checkpoint is saved."""
    return DynamicLossScale(initial_scale=1024.0, growth_interval=2)


def batch_of(step: int) -> dict[str, jax.Array]:
    """Return a step's batch, ``[b, s]`` tokens and labels, made without a random generator."""
    count = np.arange(BATCH * (SEQUENCE + 1), dtype=np.int64).reshape(BATCH, SEQUENCE + 1)
    text = jnp.asarray((count * count * 7 + count * 3 + step * 11) // 5 % VOCAB, jnp.int32)
    return {"tokens": text[:, :-1], "labels": text[:, 1:]}


def train_step() -> Any:
    """Return a train step over two microbatches."""

    def loss(model: Any, batch: Any, key: Any) -> jax.Array:
        return model.loss(batch["tokens"], batch["labels"], dropout_key=key)

    return make_train_step(loss, optimizer(), microbatches=2)


def contents(state: Any) -> dict[str, bytes]:
    """Return the bytes of every array, keyed by ``"<path> <dtype> <shape>"``."""

    def name(entry: Any) -> str:
        found = (getattr(entry, kind, None) for kind in ("name", "key", "idx"))
        return next(str(value) for value in found if value is not None)

    arrays = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        value = np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
        # "value" is how JAX names what is inside of a Variable.
        names = "/".join(part for part in map(name, path) if part != "value")
        arrays[f"{names} {value.dtype.name} {value.shape}"] = value.tobytes()
    return arrays


def write_contents(path: Path, arrays: dict[str, bytes]) -> None:
    """Write what `contents` returned as one array of all bytes, beside their names and lengths."""
    np.savez_compressed(
        path,
        names=np.array(list(arrays)),
        lengths=np.array([len(data) for data in arrays.values()]),
        data=np.frombuffer(b"".join(arrays.values()), np.uint8),
    )


def read_contents(path: Path) -> dict[str, bytes]:
    """Return what `write_contents` wrote."""
    with np.load(path) as stored:
        ends = np.cumsum(stored["lengths"])
        parts = np.split(stored["data"], ends[:-1])
        return {str(name): part.tobytes() for name, part in zip(stored["names"], parts, strict=True)}


def main(folder: Path) -> None:
    """Train, save, and write what was saved."""
    jax.config.update("jax_num_cpu_devices", 8)
    folder.mkdir(parents=True)
    mesh = make_mesh(MESH)
    with autocast(RECIPE), jax.set_mesh(mesh):
        state = create_train_state(build, optimizer(), key=jax.random.key(0), scaler=scaler())
        step = train_step()
        for i in range(STEPS):
            state, metrics = step(state, batch_of(i))
            print(i, {name: float(value) for name, value in metrics.items()})
        with TrainCheckpointer(folder / "checkpoint") as checkpointer:
            checkpointer.save(state, DATA_STATE, step=STEPS)
        write_contents(folder / "arrays.npz", contents(state))
        _, metrics = step(state, batch_of(STEPS))
    found = {name: float(value) for name, value in metrics.items()}
    print(STEPS, found)
    (folder / "next_step.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
