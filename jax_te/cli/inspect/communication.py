"""``jax-te inspect communication``: collective communication of a train step on a mesh."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from jax_te.cli.count_communication import counted
from jax_te.cli.inspect.options import InspectCommunication
from jax_te.cli.inspect.trained import run_or_preset
from jax_te.cli.model_config import read_model_config
from jax_te.cli.option_table import flag, options_of
from jax_te.cli.options import OPTIONS, TrainOptions
from jax_te.cli.parser import build_parser
from jax_te.cli.precision_rules import read_rules
from jax_te.cli.presets import PRESETS
from jax_te.cli.resolve import check_given, new_config
from jax_te.cli.run_config import RunConfig
from jax_te.config import ParallelConfig
from jax_te.data import TOKENIZER_FILE
from jax_te.sharding import CommunicationReport, Network


def run(options: InspectCommunication) -> int:
    """Return the exit status, 0, once the communication of a train step of the run, or of a preset, is printed.

    Raises:
        ValueError: for a folder without a run, for conflicting options, and without a mesh.
    """
    network = Network.measured() if options.network == "measured" else Network.parse(options.network or "")
    given = _train_options(options.train_options or "")
    config, name = _config(options, given)
    sizes = config.parallel_config() or ParallelConfig()
    parts = f"{config.microbatches} microbatch{'es' * (config.microbatches != 1)}"
    text = f"{config.batch_size} examples of {config.seq_len} tokens in {parts}"
    precision = f"recipe {config.recipe}, {config.compute_dtype}, parameters {config.params_dtype}"
    print(f"{name}, train step of {text}, {precision}", file=sys.stderr, flush=True)
    rows, notes = counted(config)
    shape = dict(zip(sizes.axis_names, sizes.shape, strict=True))
    report = CommunicationReport(rows=rows, mesh_shape=shape, network=network)
    if options.json:
        print(json.dumps(_values(report, config, notes), indent=2))
        return 0
    devices = f"{sizes.num_devices} device{'s' * (sizes.num_devices != 1)}"
    print(f"{report}\n\n{devices}: {', '.join(f'{axis}={size}' for axis, size in shape.items())}")
    print(
        f"network: {network.devices_per_host} devices on a host, each sends {network.intra_host / 1e9:g} GB/s there, "
        f"{network.inter_host / 1e9:g} GB/s to other hosts; {1e6 * network.latency:g} us a launch"
    )
    print("\n".join(["times: one collective after the other, none overlapping computation", *notes]))
    return 0


def _train_options(text: str) -> dict[str, Any]:
    """Return the options of jax-te train in a text, by the names of their fields."""
    parsed, bare = (vars(build_parser().parse_args(["train", *given])) for given in (shlex.split(text), []))
    # "mesh" and "preset" are options of this command, too, and what starts a run has no effect here.
    for name in ("mesh", "factory_modules", *options_of(TrainOptions)):
        if parsed.get(name) != bare.get(name):  # some are there with their defaults
            raise ValueError(f"--train-options says what is trained; leave {flag(name)} out, or give it to inspect")
    return {name: value for name, value in parsed.items() if name in OPTIONS}


def _config(options: InspectCommunication, given: dict[str, Any]) -> tuple[RunConfig, str]:
    """Return the configuration with its mesh, and the name of its source."""
    given = given | {"factory_modules": options.factory_modules}
    if "precision_config" in given:
        given["precision_config"] = read_rules(given["precision_config"])
    if "model_config" in given:
        given["model_config"] = read_model_config(given["model_config"])
    saved, name = run_or_preset(options.output, options.preset)
    mesh = options.mesh or (saved.mesh if saved else None)
    if mesh is None:
        raise ValueError("one device sends nothing; give a --mesh, e.g. --mesh data=2,tensor=4")
    sizes = ParallelConfig.parse(mesh)
    ranks = sizes.batch_devices
    if saved is None:
        # A GPU's default, whatever the present device: the mesh consists of GPUs.
        preset = str(options.preset)
        values = {"params_dtype": "bfloat16", "batch_size": ranks * PRESETS[preset].values["batch_size"]}
        return new_config(values | given | {"preset": preset, "mesh": mesh}), name
    old = saved.parallel_config() or ParallelConfig()
    # As many examples for each rank; all backends communicate the same.
    values = {"batch_size": saved.batch_size * ranks // old.batch_devices, "backend": "auto"}
    if (Path(name) / TOKENIZER_FILE).is_file() and "tokenizer" not in given:
        values["tokenizer"] = name  # the run's copy: the file that it was given may be gone
    config = dataclasses.replace(saved, **(values | given | {"mesh": mesh}))
    check_given(config, given)
    return config, name


def _values(report: CommunicationReport, config: RunConfig, notes: list[str]) -> dict[str, Any]:
    rows = [
        dataclasses.asdict(row) | {"sent": row.sent, "seconds": seconds}
        for row, seconds in zip(report.rows, report.row_seconds(), strict=True)
    ]
    step = {name: getattr(config, name) for name in ("batch_size", "microbatches", "seq_len", "recipe", "params_dtype")}
    totals = {"sent": report.sent, "seconds": report.seconds}
    return (
        {"mesh": report.mesh_shape, "network": dataclasses.asdict(report.network), "step": step}
        | totals
        | {"collectives": rows, "notes": notes}
    )
