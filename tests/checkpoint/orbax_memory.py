"""How much memory a process keeps of each checkpoint that it saves: this package's, Orbax's alone, and why.

    python tests/checkpoint/orbax_memory.py [ours | orbax | metrics] SAVES

``ours`` saves with `TrainCheckpointer`, ``orbax`` with Orbax's own writer. ``metrics`` saves nothing and asks
TensorStore as often for its counters as Orbax does: at the beginning and the end of the save of each tree.
"""

import gc
import os
import sys
import tempfile
from collections.abc import Callable

import jax.numpy as jnp
import tensorstore
from orbax.checkpoint import v1 as ocp

TREES = {name: {str(i): jnp.ones(16) for i in range(10)} for name in ("params", "train")}
CALLS = 4


def ours(folder: str) -> Callable[[int], object]:
    from jax_te.checkpoint import TrainCheckpointer

    checkpointer = TrainCheckpointer(folder)

    def save(step: int) -> None:
        checkpointer.save(TREES, None, step)
        checkpointer.wait()

    return save


def orbax(folder: str) -> Callable[[int], object]:
    newest = ocp.training.preservation_policies.LatestN(3)
    checkpointer = ocp.training.Checkpointer(folder, preservation_policy=newest)
    return lambda step: checkpointer.save_checkpointables_async(step, TREES, force=True).result()


def metrics(folder: str) -> Callable[[int], object]:
    ocp.save(f"{folder}/1", TREES)  # so that the file system has counters
    return lambda step: [
        tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/") for _ in range(CALLS)
    ]


def kept(kind: str, saves: int) -> float:
    """Return KiB of a save, over the second half of this many."""
    with tempfile.TemporaryDirectory() as folder:
        save = globals()[kind](folder)
        for step in range(saves):
            if step == saves // 2:  # pools and caches are full by now
                before = resident()
            save(step)
        return (resident() - before) / (saves - saves // 2) / 1024


def resident() -> int:
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(f"{kept(sys.argv[1], int(sys.argv[2])):.1f} KiB a save")
