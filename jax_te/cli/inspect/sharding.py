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
from jax_te.cli.run_config import RunConfig
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
    # A run's batch is that of all devices of its mesh, a preset's that of one.
    examples = config.batch_size // own.batch_devices * sizes.batch_devices
    if sizes != own:
        config = _on_another_mesh(config, options.mesh, sizes)
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


def _on_another_mesh(config: RunConfig, mesh: str | None, sizes: ParallelConfig) -> RunConfig:
    """Return a configuration on another mesh than its own.

    Raises:
        ValueError: for a mesh that could not train it, were there only enough examples.
    """
    # A run's other options are for its own mesh. These say what its state is and how its experts exchange tokens; where
    # the mesh has no such axis, they have no effect.
    kept: dict[str, Any] = {"distributed_optimizer": config.distributed_optimizer and sizes.data > 1}
    if sizes.expert > 1:
        kept["moe_token_dispatcher_type"] = config.moe_token_dispatcher_type
    enough = config.batch_size * sizes.batch_devices
    return dataclasses.replace(config.on_one_device(), mesh=mesh, batch_size=enough, **kept)


def _values(report: ShardingReport, rows: list[ExpertRows]) -> dict[str, Any]:
    arrays = [dataclasses.asdict(array) for array in report.arrays]
    for array in arrays:
        del array["spec"]  # mesh_axes is the same, as text
    totals = {"bytes": report.bytes, "bytes_per_device": report.bytes_per_device}
    experts = {"expert_rows": list(map(dataclasses.asdict, rows))} if rows else {}
    return {"mesh": report.mesh_shape} | totals | {"arrays": arrays} | experts
