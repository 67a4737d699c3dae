"""Lower bounds of memory, from sizes alone: what cannot fit is refused before any allocation."""

from __future__ import annotations

import os

import jax
import numpy as np

from jax_te._device import default_device, default_platform
from jax_te.cli.model_config import described_form
from jax_te.cli.option_table import memory_advice
from jax_te.cli.parser import option_names
from jax_te.cli.run_config import RunConfig
from jax_te.config import ParallelConfig, depth_projection, layer_kernels, layer_numbers
from jax_te.data import Objective

SKIP_CHECK = "or skip this estimate: --no-check-memory"


def check_memory(config: RunConfig, command: str, objective: Objective | None = None) -> None:
    """Raise ValueError if a device has less memory than `least_memory`, unless the configuration disables the check.

    Args:
        config: configuration of the run.
        command: name of the command, whose options the message may name.
        objective: what the model is trained to predict. None: the parameters are loaded alone.

    Raises:
        ValueError: also for a mesh of more devices than there are.
    """
    sizes, devices = config.parallel_config() or ParallelConfig(), jax.device_count()
    if sizes.num_devices > devices:
        raise ValueError(
            f"the mesh {config.mesh} takes {sizes.num_devices} devices, and there are {devices}; give another --mesh, "
            "such as data=1 for one device"
        )
    if config.check_memory:
        # No option makes the parameters fewer.
        advice = memory_advice(() if objective is None else option_names(command))
        check_fits(least_memory(config, objective), sizes.num_devices, f"{advice}, {SKIP_CHECK}")


def check_fits(needed: int, devices: int, advice: str) -> None:
    """Raise ValueError if a device has less memory than is needed.

    Args:
        needed: bytes on each device.
        devices: number of these devices.
        advice: advice for the message: what to do.
    """
    # CPU devices share the memory of the host.
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // devices
    there = (default_device().memory_stats() or {}).get("bytes_limit", host)
    if needed > there:
        raise ValueError(
            f"the sizes take at least {needed / 2**30:,.1f} GiB on each device, which has {there / 2**30:,.1f} GiB; "
            f"{advice}"
        )


def layer_bytes(tokens: int, hidden: int, ffn: int) -> int:
    """Return a lower bound of the bytes of a layer's forward and backward pass in bf16.

    These are its input, the gradients of input and output, a kernel ``[hidden, ffn]`` and its gradient.

    >>> layer_bytes(tokens=2, hidden=4, ffn=8)
    176
    """
    return 2 * (tokens * (2 * hidden + min(hidden, ffn)) + 2 * hidden * ffn)


def score_bytes(rows: int, heads: int, length: int) -> int:
    """Return a lower bound of the bytes of attention scores ``[rows, heads, length, length]`` in bf16."""
    # Fused kernels of GPUs keep no attention scores.
    return 2 * rows * heads * length**2 if default_platform() == "cpu" else 0


def least_memory(config: RunConfig, objective: Objective | None = None) -> int:
    """Return a lower bound of the bytes on each device: other memory only adds to it.

    Args:
        config: configuration of the run.
        objective: what the model is trained to predict. None: nothing is trained, and parameters are all there is.
    """
    sizes = config.parallel_config() or ParallelConfig()
    hidden, item = config.hidden_size, np.dtype(config.params_dtype).itemsize
    everywhere, experts = _parameters(config)
    # Parameters of experts are split over their axis as well.
    parameters = everywhere + experts // sizes.expert
    if config.fp8_param:
        item = 1
    if objective is None:
        return parameters * item
    # Gradients, two fp32 moments, and fp32 masters of what is held in fewer bits.
    moments = 8 if config.lora_rank is None else 0  # those of adapters are small
    split, masters = (sizes.data * sizes.expert, 4) if config.distributed_optimizer else (1, 4 if item < 4 else 0)
    held = item if config.lora_rank is not None else 2 * item
    state = parameters * (held + (moments + masters) // split) // (sizes.fsdp * sizes.tensor * sizes.pipeline)
    rows = config.batch_size // config.microbatches
    # The decoder of a T5 has fewer tokens than its encoder; other models have one sequence, with a label for each.
    labels = objective.lengths(config.seq_len)["labels"]
    layers, encoder_layers = config.num_layers, _encoder_layers(config)
    if config.recompute_granularity == "full":
        layers, encoder_layers = 1, min(1, encoder_layers)
    # Of a token: its input to each layer that backward reads, and of one with a label its logits in fp32.
    inputs = (layers * labels + encoder_layers * config.seq_len) * hidden * np.dtype(config.compute_dtype).itemsize
    tokens = inputs + 4 * config.vocab_size * labels
    scores = score_bytes(rows, config.num_heads, config.seq_len)
    # Tokens and labels, int32; positions of held-out windows, int64.
    data = config.batch_size * (4 * (config.seq_len + labels) + 8 * config.eval_batches)
    return state + (rows * tokens + scores + data) // sizes.num_devices


def _parameters(config: RunConfig) -> tuple[int, int]:
    """Return the parameters of the run's model, without biases and norms, and of them those of experts apart."""
    model = config.transformer_config()
    layers = [layer_kernels(model, number) for number in layer_numbers(model, held=True)]
    depths = len(layers) - model.num_layers
    encoders = _encoder_layers(config)
    positions = config.seq_len if config.position_embedding == "learned_absolute" else 0
    around = config.hidden_size * (config.vocab_size + positions) + depths * depth_projection(model)
    everywhere = around + sum(layer.attention + layer.shared for layer in layers)
    if encoders:  # layers like the first one, and attention of each layer of the decoder to their output
        everywhere += encoders * (layers[0].attention + layers[0].shared) + len(layers) * layers[0].attention
    return everywhere, sum(layer.expert * layer.experts for layer in layers)


def _encoder_layers(config: RunConfig) -> int:
    """Return the number of layers of an encoder beside the model's layers."""
    if config.model_config is None:
        return 0
    return described_form(config.model_config, config.ignore_fields)[1].others.get("encoder_num_layers", 0)
