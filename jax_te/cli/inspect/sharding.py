"""``jax-te inspect sharding``: sharding of the arrays of a run, or of a preset, over a mesh."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jax_te.cli.build import abstract_state
from jax_te.cli.inspect.options import InspectSharding
from jax_te.cli.inspect.trained import run_or_preset
from jax_te.cli.resolve import new_config
from jax_te.config import MESH_AXES, ParallelConfig
from jax_te.layers import ExpertRows, expert_rows
from jax_te.ops import use_backend
from jax_te.recipe import autocast
from jax_te.sharding import ShardingReport, sharding_report

MAX_DEVICES = 2**16


def run(options: InspectSharding) -> int:
    """Return the exit status, 0, once the sharding of the training state of the run, or of a preset, is printed.

    Raises:
        ValueError: for a folder without a run, and for a mesh that could not train the model.
    """
    saved, name = run_or_preset(options.output, options.preset)
    config = new_config({"preset": options.preset}) if saved is None else saved
    own = ParallelConfig.parse(config.mesh or "")
    sizes = own if options.mesh is None else ParallelConfig.parse(options.mesh)
    if sizes.num_devices > MAX_DEVICES:
        raise ValueError(f"a mesh of {sizes.num_devices} devices is too large to draw; at most {MAX_DEVICES}")
    examples = config.batch_size // own.batch_devices * sizes.batch_devices
    if options.mesh is not None:
        # A run's other options are for its own mesh. This one says what its state is, and holds on every mesh.
        kept = {"distributed_optimizer": config.distributed_optimizer}
        # Raises for a mesh that could not train it with as many examples on each device.
        config = dataclasses.replace(config.on_one_device(), mesh=options.mesh, batch_size=examples, **kept)
    config = config.on_any_backend(options.factory_modules)
    # Built as shapes only, so that the mesh needs no devices.
    on = AbstractMesh(sizes.shape, MESH_AXES)
    with autocast(config.make_recipe()), use_backend(config.backend):
        state = abstract_state(config, on)
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
