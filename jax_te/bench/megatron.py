"""Megatron-Core's GPT as a contestant: it runs in a process of its own, and waits there while others are measured."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jax_te.bench.contestants import Contestant
from jax_te.bench.settings import GIB
from jax_te.config import TransformerConfig
from jax_te.recipe import DelayedScaling, Format, Recipe
from jax_te.typing import Array

MEGATRON_RECIPES = {"delayed": "delayed", "current": "tensorwise", "block": "blockwise"}
"""Megatron-Core's names of recipes; others are measured beside what it does in bf16."""

_PATIENCE_S = 20.0
_PROGRAM = Path(__file__).parent / "peers" / "megatron_gpt.py"


class MegatronProcess:
    """A running `jax_te.bench.peers.megatron_gpt`, with which torch's libraries stay out of this process.

    Attributes:
        missing: packages that it cannot use, with the reasons. If there are any, it has ended.
        device: torch's name of the GPU, if nothing is missing.

    Raises:
        RuntimeError: if it ended before it could say what is missing.
    """

    def __init__(self) -> None:
        # -P: without it the program's folder would come first on the path of all that Megatron-Core imports.
        command = [sys.executable, "-P", str(_PROGRAM)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            first = self._answer()
        except BaseException:  # also while it imports: nothing else knows of it yet
            self._process.kill()
            self.close()
            raise
        self.missing: dict[str, str] = first["missing"]
        self.device: str = first.get("device", "")

    def ask(self, request: Any) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            RuntimeError: with its message, if the process failed.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; what it said before is still to be read
            print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise RuntimeError(f"Megatron-Core's process ended with status {status}; what it said is on stderr")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"Megatron-Core: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process, which gives its memory back."""
        try:
            self._process.communicate(timeout=_PATIENCE_S)  # closes stdin, with which it ends, and waits
        except subprocess.TimeoutExpired:  # a step that hangs does not see the end of stdin
            self._process.kill()
            self._process.communicate()


def check_megatron() -> None:
    """Raise ValueError if Megatron-Core's GPT cannot be measured beside jax_te here, with what to change."""
    try:
        process = MegatronProcess()
    except RuntimeError as error:  # a library may end the process when it is loaded
        raise ValueError(f"--peer megatron: {error}") from None
    process.close()
    if process.missing:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in process.missing.items())
        raise ValueError(f"--peer megatron needs packages that cannot be used here: {reasons}")
    device = jax.devices()[0].device_kind
    if device != process.device:
        raise ValueError(f"--peer megatron: torch runs on {process.device}, JAX on {device}; let both use one device")
    # As jaxlib reads it.
    shared = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") in ("0", "false", "False")
    if jax.default_backend() == "gpu" and not shared:
        raise ValueError(
            "--peer megatron: torch needs part of the GPU's memory, most of which JAX takes when it starts; set "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false in the environment"
        )


@dataclass
class MegatronGPT(Contestant):
    """Megatron-Core's GPT.

    Args:
        name: of its row.
        model: as `megatron_model` describes it.
    """

    model: dict[str, Any] = field(kw_only=True)
    _process: MegatronProcess | None = None
    _peak_bytes: int = 0

    def _begin(self) -> None:
        self._process = MegatronProcess()
        self._ask(self.model)

    def _steps(self, tokens: Array, calls: int) -> float:
        return self._ask(calls)["seconds"]

    def _ask(self, request: Any) -> dict[str, Any]:
        assert self._process is not None
        answer = self._process.ask(request)
        self._peak_bytes = answer["peak_bytes"]
        return answer

    @property
    def memory(self) -> dict[str, float]:
        """GiB that torch had allocated at most; unknown if it failed, since it may have needed more."""
        return {} if self.error is not None else {"peak_gib": round(self._peak_bytes / GIB, 4)}

    def close(self) -> None:
        """End its process."""
        if self._process is not None:
            self._process.close()
        self._process = None


def megatron_model(config: TransformerConfig, recipe: Recipe | None, **sizes: int) -> dict[str, Any]:
    """Return a GPT in GPT-2's form as `jax_te.bench.peers.megatron_gpt` takes it.

    Args:
        config: of its layers.
        recipe: one of `MEGATRON_RECIPES`, or None for bf16.
        sizes: ``vocabulary``, ``batch`` and ``sequence``.

    Source: ``megatron.core.transformer.TransformerConfig``.

    >>> config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=2)
    >>> megatron_model(config, DelayedScaling(), vocabulary=64)["config"]["fp8_recipe"]
    'delayed'
    """
    fields: dict[str, Any] = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "ffn_hidden_size": config.ffn_hidden_size,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # All that it fuses, but for the sums of gradients, which are in buffers that data parallelism brings.
        "bias_activation_fusion": True,
        "bias_dropout_fusion": True,
        "cross_entropy_loss_fusion": True,
        "gradient_accumulation_fusion": False,
        "attention_softmax_in_fp32": False,
    }
    if recipe is not None:
        fields["fp8"] = "hybrid" if recipe.fp8_format is Format.HYBRID else "e4m3"
        fields["fp8_recipe"] = MEGATRON_RECIPES[recipe.name]
    if isinstance(recipe, DelayedScaling):
        fields["fp8_margin"] = recipe.margin
        fields["fp8_amax_history_len"] = recipe.amax_history_len
        fields["fp8_amax_compute_algo"] = recipe.amax_compute_algo
    return {"config": fields, **sizes}
