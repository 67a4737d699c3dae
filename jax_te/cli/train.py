"""``jax-te train``: train a byte-level GPT, or resume."""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_te import __version__
from jax_te.checkpoint import TrainCheckpointer
from jax_te.cli.build import contexts, explain_backends, loss_fn, loss_scaler, model_builder, optimizer
from jax_te.cli.resolve import output_folder, resolve
from jax_te.cli.sample import continue_text
from jax_te.training.data import byte_bigram_entropy
from jax_te.training.loop import LoopPlan, LoopResult, run_loop
from jax_te.training.metrics import PLOT_FILE, MetricsLog, plot_losses, require_extra
from jax_te.training.progress import Progress, make_progress
from jax_te.training.run_config import RunConfig, write_config
from jax_te.training.state import TrainState, create_train_state
from jax_te.training.step import make_eval_step, make_train_step

CHECKPOINT_FOLDER = "checkpoints"
PROMPT = "def "


def run(options: argparse.Namespace) -> int:
    """Run the command; the status is 0, or 128 + the signal that ended the run."""
    for package in ("grain", "tensorboardX", "matplotlib", "rich"):
        require_extra(package)
