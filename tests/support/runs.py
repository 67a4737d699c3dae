"""A training run small enough for tests, in this process and in one of its own."""

import os
import subprocess
import sys
from pathlib import Path

from jax_te.cli.parser import build_parser, options_from
from jax_te.cli.resolve import resolve
from jax_te.cli.run_files import write_config
from jax_te.metrics.log import read_metrics

TEXT = os.__file__
"""About 40 kB of Python."""

MICRO = [
    *("--num-layers", "1", "--hidden-size", "32", "--num-heads", "2", "--ffn-hidden-size", "64"),
    *("--seq-len", "32", "--batch-size", "4", "--steps", "12", "--warmup-steps", "2", "--learning-rate", "0.01"),
    *("--save-every", "4", "--eval-every", "6", "--eval-batches", "2", "--log-every", "4", "--data", TEXT),
]
"""Options of a run of 12 steps that takes no time beside compilation."""


EXPERTS = ("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--moe-aux-loss-coeff", "0.01", "--no-bias")
EXPERTS += ("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias")
"""Options that give the layers of such a run experts, with a state that the router updates."""


def command(*argv, **options):
    """The command line and the keyword arguments that start ``jax-te`` in a process of its own."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    options = {
        "text": True,
        "env": os.environ | environment,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    } | options
    return [sys.executable, "-m", "jax_te", *map(str, argv)], options


def jax_te(*argv, **options):
    """Run ``jax-te`` in a process of its own to its end."""
    argv, options = command(*argv, **options)
    return subprocess.run(argv, check=False, timeout=300, **options)


def configured(output, *argv):
    """Write the configuration that ``jax-te train`` would, with the options after ``train``, and return it.

    To the commands that compute nothing it is a run, and with `saved_step` also one to resume.
    """
    output.mkdir(exist_ok=True)
    run, _ = resolve(options_from(build_parser().parse_args(["train", *map(str, argv)])), output)
    write_config(run, output)
    return run


def saved_step(output, step):
    """Make a checkpoint of a run, as far as the commands look that compute nothing: a damaged one, without arrays."""
    database = output / "checkpoints" / str(step) / "state" / "manifest.ocdbt"
    database.parent.mkdir(parents=True)
    database.touch()


def records(output):
    """The run's records without what depends on the clock."""
    measured = ("tokens_per_second", "tokens_per_second_per_device", "mfu")
    return [{k: v for k, v in record.items() if k not in measured} for record in read_metrics(output)]


def assert_refused(status, error, *texts):
    """The command failed with status 2 and one line that holds ``texts``."""
    assert status == 2, error
    assert error.startswith("jax-te: error: ")
    assert error.count("\n") == 1, error
    for text in texts:
        assert text in error
