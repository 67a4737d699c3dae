"""``jax-te inspect sharding``: sharding of the arrays of a run, or of a preset, over a mesh."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jax_te.cli.build import abstract_state, contexts
from jax_te.cli.inspect.options import InspectSharding
from jax_te.cli.inspect.trained import run_or_preset
from jax_te.cli.resolve import new_config
from jax_te.config import MESH_AXES, ParallelConfig
from jax_te.layers import ExpertRows, expert_rows
from jax_te.sharding import ShardingReport, sharding_report

MAX_DEVICES = 2**16


def run(options: InspectSharding) -> int:
    """Return the exit status, 0, once the sharding of the training state of the run, or of a preset, is printed.

    Raises:
        ValueError: for a folder without a run, and for a mesh that could not train the model.
    """
    saved, name = run_or_preset(options.output, options.preset)
    config = new_config({"preset": options.preset}) if saved is None else saved
    sizes = ParallelConfig.parse((config.mesh if options.mesh is None else options.mesh) or "")
    if sizes.num_devices > MAX_DEVICES:
        raise ValueError(f"a mesh of {sizes.num_devices} devices is too large to draw; at most {MAX_DEVICES}")
    # Raises for a mesh that could not train it, were there only enough examples.
    examples = config.batch_size * sizes.batch_devices
    # A run's other options are for its own mesh; none of them splits an array of its state.
    base, mesh = (config, config.mesh) if options.mesh is None else (config.on_one_device(), options.mesh)
    config = dataclasses.replace(base, batch_size=examples, mesh=mesh)
    # Built on one device, as shapes only, so that the mesh needs no devices.
    config = config.on_one_device(options.factory_modules)
    on = AbstractMesh(sizes.shape, MESH_AXES)
    with contexts(config):
        state = abstract_state(config)
        report = sharding_report(state, on)
        with jax.sharding.use_abstract_mesh(on):
            dtype = config.compute_dtype
            rows = expert_rows(state.model, examples // config.microbatches, config.seq_len, dtype=dtype)
    print(f"{name}, training state", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps(_values(report, rows), indent=2))
        return 0
    print(f"{report}\n\n{report.draw()}")
    if rows:
        print("\n".join(["", "rows of experts in a microbatch", *map(str, rows)]))
    return 0


def _values(report: ShardingReport, rows: list[ExpertRows]) -> dict[str, Any]:
    arrays = [dataclasses.asdict(array) for array in report.arrays]
    for array in arrays:
        del array["spec"]  # mesh_axes is the same, as text
    totals = {"bytes": report.bytes, "bytes_per_device": report.bytes_per_device}
    experts = {"expert_rows": list(map(dataclasses.asdict, rows))} if rows else {}
    return {"mesh": report.mesh_shape} | totals | {"arrays": arrays} | experts
