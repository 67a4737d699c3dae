"""Counts of the collectives of a run's train step, from a separate process with as many CPU devices as the mesh."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_te.cli.build import abstract_state, contexts, optimizer, train_step
from jax_te.cli.main import explain
from jax_te.cli.objective import model_class, run_objective
from jax_te.cli.run_config import RunConfig
from jax_te.cli.run_text import run_tokenizer
from jax_te.config import ParallelConfig, PipelineConfig
from jax_te.data import NextTokens, Objective
from jax_te.models import GPTModel, runs_scanned
from jax_te.sharding import CollectiveCount, communication_report, named_sharding

MAX_DEVICES = 2048
"""Largest number of devices for which XLA compiles here: it takes CPU devices with higher numbers for those of another
process."""

Rows = tuple[CollectiveCount, ...]
Count = Callable[[list[RunConfig]], list[Rows]]


def counted(config: RunConfig, count: Count | None = None) -> tuple[Rows, list[str]]:
    """Return the collectives of one train step, and a description of how they were derived from compiled programs.

    - A ``data`` axis of more than two devices is compiled with two, and as many examples for each: the arrays stay the
      same, and the groups have more devices.
    - Unrolled layers are alike, or repeat a pattern with experts in every ``N``-th. So a deep stack is compiled with
      two small numbers of layers; of a pipeline each stage has as many, in whole patterns.
    - Where more than `MAX_DEVICES` are left, the largest of the other axes is compiled with a half and a quarter of its
      devices. With ``n`` devices on it, bytes are ``a + b / n``, since an array is split over it or not, and numbers
      ``a + b * n``, since a ring has a step for each device.

    Args:
        config: configuration with a mesh.
        count: function that counts the collectives of several configurations. None: `count_in_process`.

    Raises:
        ValueError: for a mesh that is too large for these rules, and for options that a train step refuses.
    """
    count = count or count_in_process
    sizes, notes = config.parallel_config() or ParallelConfig(), []
    small = _with_axis(config, "data", min(sizes.data, 2))
    if sizes.data > 2:
        notes.append(f"counted with data=2, and groups made as large as data={sizes.data} makes them")
    axis = _axis_to_extend(small)
    meshes = [small]
    if axis is not None:
        size = getattr(sizes, axis)
        meshes = [_with_axis(small, axis, size // part) for part in (2, 4)]
        notes.append(f"counted with {axis}={size // 2} and {axis}={size // 4}: bytes a + b / n, numbers a + b * n")
    layers = _layers_to_compile(config)
    if len(layers) > 1:
        notes.append(
            f"counted with {layers[0]} and {layers[1]} of {config.num_layers} layers, the others in proportion"
        )
    tables = iter(count([dataclasses.replace(mesh, num_layers=number) for mesh in meshes for number in layers]))
    of_meshes = [_of_all_layers([next(tables) for _ in layers], layers, config.num_layers) for _ in meshes]
    rows = of_meshes[0] if axis is None else _extended(of_meshes[0], of_meshes[1], axis)
    return _with_data(rows, sizes.data), notes


def _with_axis(config: RunConfig, axis: str, size: int) -> RunConfig:
    sizes = config.parallel_config() or ParallelConfig()
    shape = {name: getattr(sizes, name) for name in sizes.axis_names}
    before, shape[axis] = shape[axis], size
    # Examples are split over two of the axes, and each device keeps as many.
    batch = config.batch_size * size // before if axis in ("data", "fsdp", "expert") else config.batch_size
    mesh = ",".join(f"{name}={number}" for name, number in shape.items())
    return dataclasses.replace(config, mesh=mesh, batch_size=batch)


def _axis_to_extend(config: RunConfig) -> str | None:
    sizes = config.parallel_config() or ParallelConfig()
    if sizes.num_devices <= MAX_DEVICES:
        return None
    # A quarter of one device would be another program: without the axis.
    axes = ("fsdp", "expert", "context", "tensor")
    able = [axis for axis in axes if (size := getattr(sizes, axis)) % 4 == 0 and size > 4]
    axis = max(able, key=lambda name: getattr(sizes, name), default=None)
    if axis is None or sizes.num_devices // 2 > MAX_DEVICES:
        raise ValueError(
            f"--mesh {config.mesh} leaves too many devices to count for: with data=2 at most {2 * MAX_DEVICES}, and "
            f"above {MAX_DEVICES} one of the other axes a multiple of 4; give more of them to data"
        )
    return axis


def _layers_to_compile(config: RunConfig) -> tuple[int, ...]:
    """Return one number of layers, the model's, or two smaller ones whose difference the other layers repeat."""
    stages, pipeline = (config.parallel_config() or ParallelConfig()).pipeline, PipelineConfig.parse(config.pipeline)
    single = config.precision_config is not None or config.model_config is not None  # which name single layers
    single |= isinstance(config.moe_layer_freq, str)  # a list of them
    single |= pipeline.first_layers is not None or pipeline.last_layers is not None
    if single or runs_scanned(config.scan_layers, config.num_layers):
        return (config.num_layers,)
    apart, group = config.bf16_layers_start + config.bf16_layers_end, 1
    if config.recompute_granularity == "full":
        number = config.recompute_num_layers or 1
        apart, group = (apart + number, 1) if config.recompute_method == "block" else (apart, number)
    if config.num_experts is not None and isinstance(config.moe_layer_freq, int):
        group = math.lcm(group, config.moe_layer_freq)
    # Each stage of a pipeline, and each part of it, gets whole groups more.
    group *= stages * pipeline.virtual_stages if stages > 1 else 1
    # Two groups between those that are special, so that neighbours are alike, too.
    few = apart + 2 * group + (config.num_layers - apart) % group
    return (few, few + group) if few + group < config.num_layers else (config.num_layers,)


def _of_all_layers(tables: list[Rows], layers: tuple[int, ...], wanted: int) -> Rows:
    if len(tables) == 1:
        return tables[0]
    first, second = tables
    times = (wanted - layers[0]) // (layers[1] - layers[0])

    def extended(few: int, more: int) -> int:
        return few + times * (more - few)

    return _combined(first, second, extended, extended)


def _extended(half: Rows, quarter: Rows, axis: str) -> Rows:
    """Return the rows for an axis with twice as many devices as in ``half`` and four times as many as in
    ``quarter``."""
    rows = _combined(half, quarter, lambda h, q: h + 2 * (h - q), lambda h, q: h - (q - h) // 2)
    return tuple(dataclasses.replace(row, devices=row.devices * 2) if axis in row.axes else row for row in rows)


def _combined(first: Rows, second: Rows, number: Callable[[int, int], int], size: Callable[[int, int], int]) -> Rows:
    one, other = _by_key(first), _by_key(second)
    combined = []
    for key in dict.fromkeys([*one, *other]):
        rules = {"count": number, "launches": number, "bytes": size}
        pairs = {name: (getattr(one.get(key), name, 0), getattr(other.get(key), name, 0)) for name in rules}
        values = {name: rule(*pairs[name]) for name, rule in rules.items()}
        combined.append(dataclasses.replace(one[key] if key in one else other[key], **values))
    return tuple(combined)


def _by_key(rows: Rows) -> dict[tuple[tuple[str, ...], str], CollectiveCount]:
    """Return rows by axes and kind, with groups of a part of the axes counted as those of all of it."""
    by_key: dict[tuple[tuple[str, ...], str], CollectiveCount] = {}
    for row in rows:
        same = by_key.get((row.axes, row.kind))
        if same is not None:
            sums = {name: getattr(row, name) + getattr(same, name) for name in ("count", "launches", "bytes")}
            row = dataclasses.replace(row, devices=max(row.devices, same.devices), **sums)
        by_key[row.axes, row.kind] = row
    return by_key


def _with_data(rows: Rows, size: int) -> Rows:
    larger = (dataclasses.replace(row, devices=row.devices // 2 * size) if "data" in row.axes else row for row in rows)
    return tuple(larger) if size > 2 else rows


def count_in_process(configs: list[RunConfig]) -> list[Rows]:
    """Return the collectives of a train step of each configuration; nothing runs.

    Raises:
        ValueError: for options that a train step refuses.
    """
    values = [dataclasses.asdict(config) for config in configs]
    # Whatever devices this process has, the other one has CPU devices only, and as many as it needs.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    command = [sys.executable, "-m", "jax_te.cli.count_communication"]
    done = subprocess.run(
        command, input=json.dumps(values), stdout=subprocess.PIPE, text=True, env=environment, check=False
    )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise RuntimeError(f"the process that counts collectives ended with status {done.returncode}") from None
    if "error" in answer:
        raise ValueError(answer["error"])
    return [tuple(CollectiveCount(**row | {"axes": tuple(row["axes"])}) for row in rows) for rows in answer["tables"]]


def tables(configs: list[RunConfig]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each configuration's train step, compiled for devices of this process."""
    for config in configs:
        print(f"compiling for {config.mesh}, {config.num_layers} layers", file=sys.stderr, flush=True)
        with contexts(config) as mesh:
            state = abstract_state(config)
            step: Any = train_step(config, optimizer(config))
            # Each process reads the rows of its own devices.
            assert mesh is not None
            rows = named_sharding(("batch", None), mesh)
            batch = {
                name: jax.ShapeDtypeStruct((config.batch_size, length), jnp.int32, sharding=rows)
                for name, length in _objective(config).lengths(config.seq_len).items()
            }
            report = communication_report(step.lower(state, batch))
        yield [dataclasses.asdict(row) for row in report.rows]


def _objective(config: RunConfig) -> Objective:
    if model_class(config) is GPTModel:
        return NextTokens()  # of any tokenizer, which may be gone
    return run_objective(config, run_tokenizer(config, Path(config.tokenizer or ".")))


def main() -> None:
    """Read configurations from stdin, and write the rows of their reports to stdout."""
    try:
        configs = [RunConfig(**values) for values in json.load(sys.stdin)]
        devices = max(np.prod((config.parallel_config() or ParallelConfig()).shape) for config in configs)
        jax.config.update("jax_num_cpu_devices", int(devices))
        answer: dict[str, Any] = {"tables": list(tables(configs))}
    except Exception as error:
        message = explain(error)
        if message is None:
            traceback.print_exc()
            raise SystemExit(1) from None
        answer = {"error": message}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
