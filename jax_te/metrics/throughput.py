"""Training speed: tokens per second, and model FLOPs utilization (MFU)."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax_te._validation import brief, check_annotations, check_positive, checked
from jax_te.config import TransformerConfig, depth_projection, kernel_sizes, layer_kernels, layer_numbers

# Dense bf16 FLOP/s that NVIDIA's data sheets give (half of those "with sparsity"), by words of JAX's device_kind; the
# first that fits counts. Boards of one name with less power have less.
_PEAKS = (
    ("GB200", 2500e12),
    ("B200", 2250e12),
    ("H200 NVL", 835e12),
    ("GH200|H200", 989e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100|A800", 312e12),
    ("L40S", 362e12),
)


def peak_flops(device: Any) -> float | None:
    """Return the dense bf16 FLOP/s that a device's maker publishes; None for devices that are not in the table.

    Args:
        device: one of ``jax.devices()``.

    Raises:
        TypeError: for anything else.

    >>> peak_flops(jax.devices()[0]) is None  # a CPU
    True
    """
    kind = getattr(device, "device_kind", None)
    if not isinstance(kind, str):
        raise TypeError(f"device must be one of jax.devices(), got {brief(device)}")
    return next((peak for words, peak in _PEAKS if re.search(rf"\b({words})\b", kind)), None)


@checked
def train_flops(
    config: TransformerConfig,
    *,
    vocab_size: int,
    batch_size: int,
    sequence_length: int,
    lora_rank: int | None = None,
) -> float:
    """Return the FLOPs of a train step of a GPT by the standard formula: ``6 N + 6 L s n d`` for each token.

    ``N`` are the parameters that GEMMs multiply for a token: kernels of the layers and the output head, of a layer with
    experts those of the chosen ones, of shared ones with their gate, and of the router; no embeddings, norms and
    biases. A GEMM has two FLOPs for each in forward and four in backward. Causal attention has ``2 s n d`` in forward
    (two products over half of the ``s`` positions on average) and twice that in backward, in each of ``L`` layers of
    ``n`` heads of size ``d``. What backward computes again is not counted, nor is less for attention in windows. Depths
    of multi-token prediction are counted as layers, each with a projection and the head.

    Args:
        config: configuration of the layers.
        vocab_size: number of columns of the output head.
        batch_size: number of sequences in a step, over all devices and microbatches.
        sequence_length: ``s``.
        lora_rank: rank of the adapters around kernels of attention and of feed-forward blocks, where ``--lora-rank``
            puts `jax_te.layers.LoRA`. No other kernel is then trained, and backward has no GEMMs of their
            gradients: ``4 N + 6 A`` in place of ``6 N``, with ``A`` parameters of the adapters that a token passes,
            ``r (k + n)`` for a kernel ``[k, n]``; layers of depths have none. None: all kernels are trained.

    Raises:
        ValueError: for a rank that is not positive.

    Source: appendix B of PaLM (arXiv 2204.02311), with causal attention counted once.

    >>> config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    >>> train_flops(config, vocab_size=32, batch_size=1, sequence_length=4) / 4  # 6 (12 * 16² + 16 * 32) + 6 * 4 * 16
    21888.0
    """
    numbers = layer_numbers(config)
    depths = len(numbers) - config.num_layers  # each with a projection and the head
    layers = sum(_multiplied(config, layer) for layer in numbers) + depths * depth_projection(config)
    heads = (1 + depths) * config.hidden_size * vocab_size
    passes, adapters = 3, 0  # forward, the input's gradient and the kernel's
    if lora_rank is not None:
        check_positive(lora_rank=lora_rank)
        passes = 2
        adapters = lora_rank * sum(_adapted_features(config, layer) for layer in range(config.num_layers))
    token = 2 * passes * (layers + heads) + 6 * adapters + 3 * len(numbers) * sequence_length * _scored_channels(config)
    return float(token * batch_size * sequence_length)


def _multiplied(config: TransformerConfig, layer: int) -> int:
    """Return the parameters by which a layer multiplies a token, with those of the experts that it passes."""
    kernels = layer_kernels(config, layer)
    return kernels.attention + kernels.shared + kernels.expert * config.moe_router_topk


def _adapted_features(config: TransformerConfig, layer: int) -> int:
    """Return the input and output features of a layer's kernels with adapters, those of the chosen experts each."""
    kernels = [kernel for kernel in kernel_sizes(config, layer) if kernel.adaptable]
    return sum((kernel.k + kernel.n) * (config.moe_router_topk if kernel.part == "expert" else 1) for kernel in kernels)


def _scored_channels(config: TransformerConfig) -> int:
    """Return the channels of attention's two products, those of queries and of values, of all heads."""
    heads, latent = config.num_attention_heads, config.latent_attention
    if latent is not None:
        return heads * (latent.head_channels + latent.v_head_dim)
    return 2 * heads * (config.kv_channels or 0)


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of a train step, for its speed.

    Args:
        tokens: number of tokens of a step, over all devices.
        devices: number of devices that share it.
        flops: see `train_flops`. None: unknown.
        peak: peak FLOP/s of one device, see `peak_flops`. None: unknown.

    Raises:
        ValueError: unless all are > 0, ``tokens`` and ``devices`` integers.

    >>> work = StepWork(tokens=4096, devices=2, flops=1e15, peak=1e15)
    >>> work.rates(2.0)
    {'tokens_per_second': 2048.0, 'tokens_per_second_per_device': 1024.0, 'mfu': 0.25}
    """

    tokens: int
    devices: int = 1
    flops: float | None = None
    peak: float | None = None

    def __post_init__(self) -> None:
        check_annotations(self, StepWork)
        check_positive(tokens=self.tokens, devices=self.devices)
        for name, value in (("flops", self.flops), ("peak", self.peak)):
            if value is not None and not value > 0.0:
                raise ValueError(f"{name} must be a number > 0, or None if it is not known, got {value!r}")

    @checked
    def rates(self, seconds: float) -> dict[str, float]:
        """Return metrics of a step that took so long; ``mfu``, a fraction, only if FLOPs and peak are known."""
        speed = self.tokens / seconds
        rates = {"tokens_per_second": round(speed, 1), "tokens_per_second_per_device": round(speed / self.devices, 1)}
        if self.flops is not None and self.peak is not None:
            rates["mfu"] = round(self.flops / (seconds * self.devices * self.peak), 4)
        return rates


@checked
class Speed:
    """Speed of a training loop, from the moments at which the device was known to have done a step.

    A step is dispatched long before the device has done it, so only such moments say how long steps took. Work between
    steps (`pause`) counts for the time left alone, and only if it recurs.

    Args:
        work: work of a step.

    >>> speed = Speed(StepWork(tokens=4096))
    >>> for step in (1, 2):
    ...     loss = jax.jit(jnp.sum)(jnp.ones(step))  # a train step
    ...     _ = jax.block_until_ready(loss)
    ...     speed.done(step)
    ...     with speed.pause(recurs=True):
    ...         pass  # an evaluation
    >>> speed.seconds_per_step > 0.0, sorted(speed.rates())
    (True, ['tokens_per_second', 'tokens_per_second_per_device'])
    """

    def __init__(self, work: StepWork):
        self.work = work
        # The newest moment: the last step that was done, and when. None before the first one: the first step compiles.
        self._mark: tuple[int, float] | None = None
        self._newest: float | None = None  # seconds of a step between the last two moments
        self._steps, self._seconds, self._recurring = 0, 0.0, 0.0

    def done(self, step: int) -> None:
        """Record that the device has done this step now, and none after it.

        Args:
            step: the step's number; that of the moment before is without effect.
        """
        now = time.perf_counter()
        if self._mark is None:
            self._mark = (step, now)
        elif step > self._mark[0]:
            steps, seconds = step - self._mark[0], now - self._mark[1]
            self._newest = seconds / steps
            self._steps, self._seconds = self._steps + steps, self._seconds + seconds
            self._mark = (step, now)

    @contextlib.contextmanager
    def pause(self, *, recurs: bool) -> Iterator[None]:
        """Exclude the time of the block from the speed; the device must have done all steps before.

        Args:
            recurs: whether it recurs, as evaluations and checkpoints do, and its time counts for `seconds_left`.
        """
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        if self._mark is not None:
            self._mark = (self._mark[0], self._mark[1] + seconds)
            self._recurring += seconds if recurs else 0.0

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over all steps but those until the first moment; None before the second one."""
        return self._seconds / self._steps if self._steps else None

    def rates(self) -> dict[str, float]:
        """Return the metrics of `StepWork.rates` for the newest steps that were timed; none before the second moment.

        These are the steps between the last two moments, most often one.
        """
        return {} if self._newest is None else self.work.rates(self._newest)

    def seconds_left(self, steps: int) -> float | None:
        """Return the seconds that so many more steps take, with the work between them; None before the second
        moment."""
        return steps * (self._seconds + self._recurring) / self._steps if self._steps else None
