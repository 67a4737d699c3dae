"""The lines that ``jax-te train`` shows at a run's start and end."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jax_te._device import default_device
from jax_te.checkpoint import CHECKPOINT_FOLDER
from jax_te.cli.loop import LoopResult
from jax_te.cli.model_config import model_type
from jax_te.cli.objective import model_class
from jax_te.cli.run_config import RunConfig
from jax_te.cli.run_files import PROFILE_FOLDER, convert_command
from jax_te.cli.run_recipe import RECIPE_FIELDS
from jax_te.config import ParallelConfig
from jax_te.data import CorruptedSpans, MaskedTokens, NextTokens, Objective, TextData
from jax_te.megatron import QuantizationReport
from jax_te.metrics import (
    EXPERTS_PLOT,
    METRICS_FILE,
    PLOT_FILE,
    PRECISION_FILE,
    PRECISION_PLOT,
    TENSORBOARD_FOLDER,
    StepWork,
    clock,
    peak_flops,
    train_flops,
)
from jax_te.models import UNROLL_LIMIT, GPTModel, runs_scanned


@dataclass(frozen=True, kw_only=True)
class StartedRun:
    """A run that is about to take its first step.

    Args:
        config: configuration of the run.
        data: text to train on, and held out.
        objective: what the model is trained to predict.
        backends: lines that say which backend runs which operation.
        mesh: the run's mesh. None: one device.
        parameters: number of its parameters.
        output: folder of the run.
        first: number of steps that are done.
        skipped: number of those that made no update, which the schedule does not count.
        rules: layers that the rules of a precision file fit.
    """

    config: RunConfig
    data: TextData
    objective: Objective
    backends: list[str]
    mesh: Mesh | None
    parameters: int
    output: Path
    first: int
    skipped: int
    rules: QuantizationReport | None


def start_facts(run: StartedRun) -> dict[str, str]:
    """Return the lines to show at the start, by their names."""
    return {
        "model": _model(run),
        "layers": _layers(run.config),
        "data": _data(run),
        **_tokenizer_facts(run.config, run.data),
        **_objective(run),
        "batch": _batch(run.config),
        "rate": _rate(run),
        "recipe": _recipe(run.config),
        **({} if run.rules is None else {"rules": str(run.rules)}),
        "backend": "\n".join(run.backends),
        "mesh": _mesh(run),
        "MFU": _mfu(step_work(run.config), _device(run.config).device_kind),
        "output": f"{run.output}, " + (f"resumed after step {run.first}" if run.first else "a new run"),
    }


def step_work(config: RunConfig) -> StepWork:
    """Return the work of a train step of the run."""
    flops = None
    if model_class(config) is GPTModel:
        flops = train_flops(
            config.transformer_config(),
            vocab_size=config.vocab_size,
            batch_size=config.batch_size,
            sequence_length=config.seq_len,
            lora_rank=config.lora_rank,
        )
    devices = (config.parallel_config() or ParallelConfig()).num_devices
    return StepWork(tokens=config.tokens_per_step, devices=devices, flops=flops, peak=peak_flops(_device(config)))


def _model(run: StartedRun) -> str:
    config = run.config
    name = config.preset
    if config.init_from is not None:
        name = Path(config.init_from).name
    elif config.model_config is not None:
        name = model_type(config.model_config)
    groups = "" if config.num_query_groups == config.num_heads else f" in {config.num_query_groups} groups"
    dtypes = config.params_dtype
    if config.compute_dtype != config.params_dtype:
        dtypes += f", computing in {config.compute_dtype}"
    parts = [
        _count(config.num_layers, "layer"),
        f"hidden {config.hidden_size}",
        _count(config.num_heads, "head") + groups,
        f"feed-forward {config.ffn_hidden_size}",
        config.position_embedding,
        config.normalization,
        config.activation,
    ]
    return f"{name}: {', '.join(parts)}; {run.parameters:,} parameters in {dtypes}"


def _data(run: StartedRun) -> str:
    data, size = run.data, _bytes if _token(run.config) == "byte" else _tokens
    sizes = f"{size(len(data.train))} to train on, {size(len(data.heldout))} held out"
    return f"{data.source}: {_count(data.files, 'file')}, {sizes}"


def _batch(config: RunConfig) -> str:
    parts = "" if config.microbatches == 1 else f" in {config.microbatches} microbatches"
    size = f"{config.batch_size} x {config.seq_len} {_token(config)}s"
    return f"{size}{parts}, {_count(config.steps, 'step')}"


def schedule_ended(config: RunConfig, first: int, skipped: int) -> bool:
    """Return whether the next step has the minimum rate because the schedule is over.

    Args:
        config: configuration of the run.
        first: number of steps that are done.
        skipped: number of those that made no update, which the schedule does not count.
    """
    return first - skipped >= config.decay_steps


def _rate(run: StartedRun) -> str:
    """Return the lines about the schedule of the learning rate, and where it is over."""
    config = run.config
    warmup = f" after {_count(config.warmup_steps, 'step')} of warm-up" if config.warmup_steps else ""
    line = f"{config.learning_rate:g}{warmup}, then a cosine to {config.min_learning_rate:g} at step "
    line += f"{config.decay_steps:,}"
    if run.first < config.steps and schedule_ended(config, run.first, run.skipped):
        line += f"\nthe schedule ended at step {config.decay_steps:,}; rate {config.min_learning_rate:g} from here, "
        line += "unless --decay-steps gives it a later end"
    return line


def _objective(run: StartedRun) -> dict[str, str]:
    """Return the line about the objective, if it is not the next token."""
    objective, window = run.objective, run.objective.window(run.config.seq_len)
    if isinstance(objective, MaskedTokens):
        return {"objective": f"masked tokens, {objective.rate:.0%} of the {window} of an example"}
    if isinstance(objective, CorruptedSpans):
        targets = objective.lengths(run.config.seq_len)["labels"]
        spans = f"{objective.rate:.0%} of {window} tokens in spans of {objective.mean_span:g} on average"
        return {"objective": f"corrupted spans, {spans}; {_tokens(targets)} for the decoder"}
    return {}


def _mesh(run: StartedRun) -> str:
    device = _device(run.config).device_kind
    if run.mesh is None:
        return f"none: one device, {device}"
    return f"{run.config.mesh} over {run.mesh.size} x {device}, {run.config.mesh_axis_type} axes"


def _device(config: RunConfig) -> Any:
    """Return a device of the run: of its mesh, or the one on which JAX runs what names none."""
    return default_device() if config.mesh is None else jax.devices()[0]


def _token(config: RunConfig) -> str:
    return "byte" if config.tokenizer_sha256 is None else "token"


def _tokenizer_facts(config: RunConfig, data: TextData) -> dict[str, str]:
    """Return the lines about the tokenizer and the adapters of a run, if it has them."""
    rows = {}
    if config.tokenizer is not None:
        size = "" if data.bytes_per_token is None else f", {data.bytes_per_token:.2f} bytes each"
        rows["tokens"] = f"{config.tokenizer}: {data.vocab_size:,} of them{size}"
    if config.lora_rank is not None:
        rows["LoRA"] = f"rank {config.lora_rank}, alpha {config.lora_alpha or config.lora_rank:g}; all else is frozen"
    return rows


def _mfu(work: StepWork, device: str) -> str:
    if work.flops is None:
        return "not given: its formula is that of decoders"
    if work.peak is None:
        return f"not given: jax_te knows no published peak of {device}"
    return f"relative to {work.peak / 1e12:.0f} TFLOP/s of each device, its dense bf16 peak"


def _layers(config: RunConfig) -> str:
    form = "scanned" if runs_scanned(config.scan_layers, config.num_layers) else "unrolled"
    if config.scan_layers != "auto":
        return f"{form}: --scan-layers {'yes' if config.scan_layers else 'no'}"
    few = config.num_layers <= UNROLL_LIMIT
    return f"{form}: {_count(config.num_layers, 'layer')}, {'not ' if few else ''}more than {UNROLL_LIMIT}"


def _recipe(config: RunConfig) -> str:
    if config.recipe == "none":
        return "none: no quantization" + (", except by the rules below" if config.precision_config is not None else "")
    # Its passes are shown where attention is in FP8 at all.
    shown = [name for name in RECIPE_FIELDS if config.fp8_dpa or not name.startswith("fp8_dpa_")]
    fields = [f"{name} {getattr(config, name)}" for name in shown if getattr(config, name) is not None]
    if config.fp8_param:
        fields.append("kernels held quantized")
    for count, which in ((config.bf16_layers_start, "first"), (config.bf16_layers_end, "last")):
        if count:
            fields.append(f"the {which} {_count(count, 'layer')} in high precision")
    return f"{config.recipe}: {', '.join(fields)}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _bytes(number: int) -> str:
    for name, size in (("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return _count(number, "byte")


def _tokens(number: int) -> str:
    return _count(number, "token")


def loss_facts(data: TextData, heldout: float, bigram: float | None, word: str, objective: Objective) -> dict[str, str]:
    """Return the lines about the held-out loss.

    Args:
        data: text of the run.
        heldout: the loss.
        bigram: entropy of byte bigrams in the same text. None: not known.
        word: term for a token that is predicted.
        objective: objective of the run.
    """
    rows = {"held-out loss": f"{heldout:.4f} nats per {word}"}
    if bigram is not None:
        rows["byte bigrams"] = f"{bigram:.4f} nats per byte, their entropy in the same text"
    elif data.bytes_per_token and isinstance(objective, NextTokens):
        rows["held-out loss"] += f", {heldout / math.log(2.0) / data.bytes_per_token:.4f} bits per byte"
    return rows


def end_facts(result: LoopResult, losses: dict[str, str], output: Path, *, continues_text: bool) -> dict[str, str]:
    """Return the lines to show at the end, by their names.

    Args:
        result: result of the loop.
        losses: lines of `loss_facts`.
        output: folder of the run.
        continues_text: whether the model continues a text.
    """
    rows = dict(losses)
    if result.tokens_per_second is not None:
        rows["speed"] = f"{result.tokens_per_second:,.0f} tokens/s; {clock(result.seconds)} in all"
    skipped = int(result.state.skipped_steps)
    if skipped:
        rows["skipped"] = f"{skipped} steps, whose gradients were not finite"
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if peak:
        rows["memory"] = f"{peak / 2**30:.2f} GiB at the peak"
    names = [METRICS_FILE, PLOT_FILE, EXPERTS_PLOT, PRECISION_FILE, PRECISION_PLOT, TENSORBOARD_FOLDER, PROFILE_FOLDER]
    names = [name for name in names if (output / name).exists()]  # some are of some runs alone
    rows["files"] = f"{output}: {', '.join([*names, CHECKPOINT_FOLDER])}"
    sample = f"jax-te sample --output {shlex.quote(str(output))} --prompt TEXT"
    rows["next"] = sample if continues_text else convert_command(output)
    return rows
