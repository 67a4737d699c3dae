"""The options of the reports of ``jax-te inspect``; see `jax_te.cli.option_table`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax_te.cli.option_table import option, positional
from jax_te.cli.option_values import (
    FILE,
    FLAG,
    FOLDER,
    MESH,
    MODULE_NAMES,
    PATH,
    SCHEDULE,
    SIZE,
    SWITCH,
    TEXT,
    Text,
    number,
)
from jax_te.cli.options import DEFAULT_RUN, FACTORY_MODULES, QUANTIZED
from jax_te.cli.presets import PRESETS

OF_STEPS = "a run or a Megatron-LM folder as CHECKPOINT"


# Functions, since every dataclass needs a field of its own.
def _output() -> Any:
    return option(FOLDER, "folder of the run", DEFAULT_RUN)


def _recipe() -> Any:
    return option(QUANTIZED, "precision recipe to quantize with, with its default fields", None, shown="the run's")


def _precision_config() -> Any:
    help = "YAML file with precision rules for individual layers, in place of the run's; their effect is shown, too"
    return option(FILE, help, None, shown="the run's")


def _factory_modules() -> Any:
    return option(MODULE_NAMES, FACTORY_MODULES, None)


def _data() -> Any:
    return option(PATH, "text to take held-out batches from, a file or a folder", None, shown="the run's")


def _batch_size() -> Any:
    return option(SIZE, "sequences per batch", None, shown="a microbatch of the run")


def _check_memory() -> Any:
    return option(FLAG, "refuse a batch that, by an estimate, does not fit into memory", True)


def _json() -> Any:
    return option(SWITCH, "print JSON", False, shown="tables")


def _run_or_none() -> Any:
    return option(FOLDER, "folder of the run", None, shown=f"{DEFAULT_RUN}, unless a --preset is given")


def _preset() -> Any:
    return option(tuple(PRESETS), "preset to show in place of a run", None)


def _mesh(shown: str) -> Any:
    return option(
        MESH, "sizes of the mesh axes, e.g. fsdp=4,tensor=2; the mesh needs no devices here", None, shown=shown
    )


@dataclass(frozen=True, kw_only=True)
class InspectPrecision:
    """Show how much precision the quantized tensors of a run lose.

    One batch of held-out text runs forward and backward through the newest checkpoint of a run. For every tensor
    that is quantized the table has its largest value, its scale, the share of values that become 0 (underflow)
    or the format's largest value (saturation), and the squared error relative to the tensor's mean square, in decibels.
    It runs on one device, which may be a CPU, whatever the run was trained on.

    With another --recipe or --precision-config delayed scaling has no history: its scales come from one pass over
    the batch under current scaling.
    """

    output: str = _output()
    recipe: str | None = _recipe()
    precision_config: str | None = _precision_config()
    factory_modules: str | None = _factory_modules()
    data: str | None = _data()
    batch_size: int | None = _batch_size()
    check_memory: bool = _check_memory()
    json: bool = _json()


@dataclass(frozen=True, kw_only=True)
class InspectRecipes:
    """List the recipe of every layer of a run, with the reason for it.

    Nothing is computed, and the run needs no checkpoint yet.
    """

    output: str = _output()
    recipe: str | None = _recipe()
    precision_config: str | None = _precision_config()
    factory_modules: str | None = _factory_modules()
    json: bool = _json()


@dataclass(frozen=True, kw_only=True)
class InspectSensitivity:
    """Rank the layers of a run by how much their quantization changes gradients.

    Each layer is quantized alone, whatever the rules of the run say, and compared with no quantization on batches
    of held-out text. Under delayed scaling a layer's scales come from one pass over the first batch under current
    scaling.

      gradient error  |g - g0| / |g0|, g and g0 the gradients of all parameters with and without
                      quantization of this layer: the noise that it adds to an update. Rows are
                      sorted by it.
      loss increase   Loss with quantization of this layer, minus loss without. It may be negative,
                      and means little if it is small compared with the spread of the loss
                      over batches (--batches).
    """

    output: str = _output()
    recipe: str | None = _recipe()
    factory_modules: str | None = _factory_modules()
    data: str | None = _data()
    batch_size: int | None = _batch_size()
    batches: int = option(SIZE, "number of batches", 2)
    check_memory: bool = _check_memory()
    keep_bf16: int | None = option(
        Text("K", SIZE.parse), "number of most sensitive layers to mark as kept in bf16", None
    )
    write: str | None = option(
        FILE,
        "new file for jax-te train --precision-config that keeps the layers of --keep-bf16 in bf16",
        None,
        needs=("--keep-bf16",),
    )
    json: bool = _json()


@dataclass(frozen=True, kw_only=True)
class InspectSharding:
    """Show how the arrays of a run or a preset are sharded over a mesh.

    For every array of the training state the table has its logical axes, the mesh axes that shard it, and its
    bytes, whole and on each device; a picture shows which device holds which part. It needs neither a checkpoint
    nor devices:

      jax-te inspect sharding --preset gpt-1.3b --mesh fsdp=8
    """

    output: str | None = _run_or_none()
    preset: str | None = _preset()
    mesh: str | None = _mesh("the run's, or one device")
    factory_modules: str | None = _factory_modules()
    json: bool = _json()


@dataclass(frozen=True, kw_only=True)
class InspectCommunication:
    """Show the collective communication of a train step on a mesh.

    A train step of a run or a preset is compiled for as many CPU devices as the mesh has, or for fewer, by rules
    that the report states; nothing runs. For the collectives of each combination of mesh axes the table has their
    number, the bytes of their arrays, the bytes that a device sends, and the time that the network takes for them,
    one after the other.

      jax-te inspect communication --preset gpt-1.3b --mesh data=8,tensor=4 \\
          --train-options=--sequence-parallel
    """

    output: str | None = _run_or_none()
    preset: str | None = _preset()
    mesh: str | None = _mesh("the run's")
    train_options: str | None = option(TEXT, "options of jax-te train that change the run or the preset", None)
    network: str | None = option(
        TEXT,
        "speed of the network: measured times all-gathers among the GPUs here; or any of devices_per_host=N, "
        "intra_host=X and inter_host=X (bytes/s that a device sends on its host and to others), latency=X (seconds)",
        None,
        shown="devices_per_host=8,intra_host=450e9,inter_host=50e9,latency=8.4e-6, hosts of eight H200s",
    )
    factory_modules: str | None = _factory_modules()
    json: bool = _json()


@dataclass(frozen=True, kw_only=True)
class InspectCheckpoint:
    """List the arrays of a checkpoint of any kind.

    The table has name, dtype, shape, sharding as saved and bytes of every array; no array is read. CHECKPOINT is a
    run of jax-te train or one of its checkpoints, a folder of Hugging Face, PEFT, Megatron-LM or torch.distributed, or
    a file written by torch.save (*.pt). Of adapters of PEFT the fields of their configuration stand above the table.
    """

    checkpoint: str = positional(Text("CHECKPOINT", str), "checkpoint to list")
    step: int | None = option(
        SIZE,
        "step of the checkpoint to list, if CHECKPOINT is a run or a Megatron-LM folder",
        None,
        shown="the newest",
        needs=(OF_STEPS,),
    )
    json: bool = _json()


@dataclass(frozen=True, kw_only=True)
class InspectPipeline:
    """Show what each stage of a pipeline runs in each tick of a train step.

    The table has a row for each stage and a column for each tick, and says for how much of a step a stage is idle if
    every pass takes the same time. It needs neither a model nor devices:

      jax-te inspect pipeline --stages 4 --microbatches 8 --schedule zero_bubble
    """

    stages: int = option(Text("N", number(int, 2, below=257)), "stages: devices along the axis pipeline", 4)
    microbatches: int = option(Text("N", number(int, 1, below=4097)), "microbatches in a step", 8)
    schedule: str = option(SCHEDULE, "schedule: gpipe, 1f1b, 1f1b,virtual_stages=N or zero_bubble", "1f1b")
    json: bool = _json()
