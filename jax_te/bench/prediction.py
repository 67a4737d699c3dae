"""Time of a train step on one GPU by kind of kernel, predicted from its sizes and a table of rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import exp, log
from typing import Literal, NamedTuple

from jax_te.bench.settings import Sizes
from jax_te.config import KernelSize, TransformerConfig, depth_projection, kernel_sizes, layer_numbers
from jax_te.typing import GpuName, PricedRecipe

_Precision = Literal["bf16", "tensors", "blocks"]
"""Operands of a GEMM: in bf16, or in FP8 with scales of tensors or of blocks."""
_PRECISIONS: dict[str, _Precision] = {"none": "bf16", "delayed": "tensors", "current": "tensors", "block": "blocks"}

_GEMMS = 3
"""GEMMs of a kernel: forward, the input's gradient and the kernel's."""
_ATTENTION = 3.5
"""FLOPs of attention, forward and backward, in those of forward: two products, and five."""
_BLOCK = 128
"""Multiple to which the sizes of experts' FP8 operands are padded."""
_LAUNCHES: dict[str, int] = {"none": 48, "delayed": 101, "current": 101, "block": 101}
"""Kernels of a layer and its share of the step, by recipe: those of a GPT of 16 layers; block's are assumed."""
_LAUNCHES_OF_EXPERTS = 60
"""Further kernels of a layer with experts."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of a GPU in train steps, which are lower than those of a kernel alone on a cool GPU.

    Args:
        gemm: FLOP/s of large GEMMs by the precision of their operands.
        grouped: FLOP/s of the experts' grouped GEMMs.
        attention: sequence length -> FLOP/s of causal attention in bf16 with heads of 128; between lengths the rate
            goes with the logarithm of the length.
        narrow_heads: rate of heads of 64, as a share of that of heads of 128.
        window: rate of attention in windows, as a share of that of all positions.
        quantize: bytes/s of kernels that quantize and transpose.
        stream: bytes/s of other kernels that the memory bounds.
        busy: share of the time in which long kernels run.
        launch: seconds that each kernel takes beside its work: it begins after the one before, and fills the GPU and
            leaves it step by step.
    """

    gemm: Mapping[_Precision, float]
    grouped: Mapping[_Precision, float]
    attention: Mapping[int, float]
    narrow_heads: float
    window: float
    quantize: float
    stream: float
    busy: float
    launch: float

    def attention_rate(self, length: int) -> float:
        """Return the FLOP/s of causal attention of a sequence length."""
        known = sorted(self.attention)
        length = min(max(length, known[0]), known[-1])
        above = next(each for each in known if each >= length)
        below = max(each for each in known if each <= length)
        if above == below:
            return self.attention[above]
        part = (log(length) - log(below)) / (log(above) - log(below))
        return exp((1.0 - part) * log(self.attention[below]) + part * log(self.attention[above]))


# jax 0.11.2, Transformer Engine 2.20.2; docs/performance*.md. From traces: GEMMs in bf16 and with scales of tensors,
# attention at lengths of 2,048 and 32,768, the share of busy time. Chosen so that measured steps and layers come out:
# GEMMs with scales of blocks and of groups, bytes/s, the time of a launch. Assumed, since nothing was measured apart:
# attention at lengths of 512 and 8,192, with narrow heads and in windows.
RATES: Mapping[GpuName, Rates] = {
    "h200": Rates(
        gemm={"bf16": 740e12, "tensors": 1440e12, "blocks": 1010e12},
        grouped={"bf16": 640e12, "tensors": 1200e12, "blocks": 900e12},
        attention={512: 150e12, 2048: 403e12, 8192: 500e12, 32768: 530e12},
        narrow_heads=0.75,
        window=0.4,
        quantize=3.2e12,
        stream=3.6e12,
        busy=0.96,
        launch=2e-6,
    ),
}


class Work(NamedTuple):
    """A part of a step's work.

    Args:
        kind: kind of kernel, as the tables of ``bench model --profile`` name them where they can.
        seconds: seconds of these kernels.
    """

    kind: str
    seconds: float


def predict_step(sizes: Sizes, recipe: PricedRecipe, gpu: GpuName) -> dict[str, float]:
    """Return the milliseconds of a train step by kind of kernel, and of the gaps between them.

    The step is that of ``jax-te bench model``: forward, backward and AdamW on fp32 masters, with bf16 parameters, on
    one device, without recomputation.

    Args:
        sizes: sizes of the model and of its batch.
        recipe: name of the precision recipe. The head and the router stay in high precision.
        gpu: name of the GPU.
    """
    rates, times = RATES[gpu], dict[str, float]()
    for kind, seconds in _step(sizes, recipe, rates):
        times[kind] = times.get(kind, 0.0) + 1e3 * seconds
    busy = sum(times.values())
    times["gaps"] = busy * (1.0 / rates.busy - 1.0) + 1e3 * rates.launch * _launches(sizes, recipe)
    return times


def _launches(sizes: Sizes, recipe: PricedRecipe) -> int:
    """Return about how many kernels a step has."""
    config = sizes.config
    layers = layer_numbers(config)
    with_experts = sum(config.num_moe_experts is not None and config.has_experts(layer) for layer in layers)
    return sizes.microbatches * (len(layers) * _LAUNCHES[recipe] + with_experts * _LAUNCHES_OF_EXPERTS)


def _step(sizes: Sizes, recipe: PricedRecipe, rates: Rates) -> Iterator[Work]:
    config, tokens = sizes.config, sizes.batch * sizes.sequence
    numbers = layer_numbers(config)
    depths = len(numbers) - config.num_layers
    for layer in numbers:
        yield from _layer(sizes, layer, recipe, rates)
    hidden, passes = config.hidden_size, sizes.microbatches
    for _ in range(depths):  # the projection of the embedding beside the hidden states
        yield from _linear(2 * hidden, hidden, tokens, recipe, rates)
    for _ in range(1 + depths):
        yield Work("GEMM", _GEMMS * 2.0 * tokens * hidden * sizes.vocabulary / rates.gemm["bf16"])
        # Logits are written, and read twice, for the maximum and sum and for their gradient; that is written and read.
        yield Work("loss", 10.0 * tokens * sizes.vocabulary / rates.stream)
    yield Work("optimizer", _optimizer_bytes(passes) * _parameters(sizes) / rates.stream)


def _layer(sizes: Sizes, layer: int, recipe: PricedRecipe, rates: Rates) -> Iterator[Work]:
    config, tokens = sizes.config, sizes.batch * sizes.sequence
    yield Work("attention", _attention_seconds(sizes, layer, rates))
    for kernel in kernel_sizes(config, layer):
        if kernel.part == "router":
            yield Work("GEMM", _router_seconds(kernel, tokens, rates))
        elif kernel.part == "expert":
            yield from _grouped(config, kernel, tokens, recipe, rates)
        else:
            yield from _linear(kernel.k, kernel.n, tokens, recipe, rates)
    if sizes.positions == "rope":  # queries and keys are read and written, forward and backward
        rotated = (config.num_attention_heads + (config.num_query_groups or 0)) * (config.kv_channels or 0)
        yield Work("rotation", 8.0 * tokens * rotated / rates.stream)
    hidden = 2.0 * tokens * config.hidden_size  # bytes of the hidden states in bf16
    # Two norms: forward reads and writes, backward reads both and the residual's gradient, and writes.
    yield Work("norm", 2 * 6 * hidden / rates.stream)
    # Two residual additions forward, and their gradients; biases' gradients are sums over the same arrays.
    yield Work("residuals, biases", 2 * 5 * hidden / rates.stream)
    # The activation's argument is read and its result written; backward reads both gradients and the argument.
    yield Work("activation", _activation_bytes(config, layer, tokens) / rates.stream)
    if config.num_moe_experts is not None and config.has_experts(layer):
        # Rows are gathered and summed, forward and backward: ten passes over the rows of all experts.
        yield Work("experts' rows", 10 * hidden * config.moe_router_topk / rates.stream)


def _linear(k: int, n: int, rows: int, recipe: PricedRecipe, rates: Rates) -> Iterator[Work]:
    """Yield the work of a linear layer ``[k, n]`` whose kernel is quantized once a step."""
    yield Work("GEMM", _GEMMS * 2.0 * rows * k * n / rates.gemm[_PRECISIONS[recipe]])
    yield from _quantization(rows * (k + n), k * n, recipe, rates)


def _router_seconds(kernel: KernelSize, tokens: int, rates: Rates) -> float:
    """Return the time of the router's GEMMs, which is that of its input and gradient where experts are few.

    Each GEMM reads the input or writes its gradient. Those of backward multiply the gradient of the logits in three
    parts in bf16, see `jax_te.ops.router_logits`.
    """
    multiplied = (1 + 3 + 3) * 2.0 * tokens * kernel.k * kernel.n / rates.gemm["bf16"]
    return multiplied + _GEMMS * 2.0 * tokens * kernel.k / rates.stream


def _grouped(
    config: TransformerConfig, kernel: KernelSize, tokens: int, recipe: PricedRecipe, rates: Rates
) -> Iterator[Work]:
    """Yield the work of one of the experts' kernels, which each token passes ``moe_router_topk`` times."""
    rows, experts = tokens * config.moe_router_topk, config.num_moe_experts or 0
    yield Work("GEMM", _GEMMS * 2.0 * rows * kernel.k * kernel.n / rates.grouped[_PRECISIONS[recipe]])
    values, parameters = rows * (kernel.k + kernel.n), experts * kernel.k * kernel.n
    yield from _quantization(values, parameters, recipe, rates)
    if recipe != "none" and (kernel.k % _BLOCK or kernel.n % _BLOCK):
        # A padded copy in bf16, and the parts of both FP8 layouts without the padding.
        yield Work("copy", 8.0 * (values + parameters) / rates.stream)
    if config.add_bias_linear:
        # Each row's bias is added, and each group's gradients are summed.
        yield Work("residuals, biases", 6.0 * rows * kernel.n / rates.stream)


def _quantization(values: int, parameters: int, recipe: PricedRecipe, rates: Rates) -> Iterator[Work]:
    """Yield the time to quantize inputs, gradients and kernels: bf16 is read, and FP8 written in both layouts."""
    if recipe == "none":
        return
    yield Work("quantize, transpose", 4.0 * (values + parameters) / rates.quantize)
    if recipe == "current":  # amaxes are found first
        yield Work("amax", 2.0 * (values + parameters) / rates.stream)


def _attention_seconds(sizes: Sizes, layer: int, rates: Rates) -> float:
    config, length = sizes.config, sizes.sequence
    heads, latent = config.num_attention_heads, config.latent_attention
    channels = 2 * (config.kv_channels or 0)  # of queries and of values
    if latent is not None:
        channels = latent.head_channels + latent.v_head_dim
    rate = rates.attention_rate(length) * (rates.narrow_heads if channels <= 128 else 1.0)
    seen = length / 2.0
    if config.has_window(layer) and config.window_size is not None:
        seen, rate = min(seen, float(config.window_size[0] + 1)), rate * rates.window
    return _ATTENTION * 2.0 * sizes.batch * length * seen * heads * channels / rate


def _activation_bytes(config: TransformerConfig, layer: int, tokens: int) -> float:
    """Return the bytes that activations read and write, forward and backward."""
    total = 0.0
    for kernel in kernel_sizes(config, layer):
        if kernel.components:
            rows = tokens * (config.moe_router_topk if kernel.part == "expert" else 1)
            total += 2.0 * rows * (kernel.n // kernel.components) * (3 * kernel.components + 2)
    return total


def _parameters(sizes: Sizes) -> float:
    config = sizes.config
    numbers = layer_numbers(config, held=True)
    depths = len(numbers) - config.num_layers
    total = sizes.vocabulary * config.hidden_size * (1 if sizes.tied else 2) + depths * depth_projection(config)
    for layer in numbers:
        for kernel in kernel_sizes(config, layer):
            copies = (config.num_moe_experts or 1) if kernel.part == "expert" else 1
            total += copies * kernel.k * kernel.n
    return float(total)


def _optimizer_bytes(microbatches: int) -> float:
    """Return the bytes of a parameter in AdamW: masters and both moments are read and written in fp32, gradients read
    in fp32 twice, for their norm, and parameters written in bf16; microbatches add to the gradients."""
    return 3 * 8.0 + 2 * 4.0 + 2.0 + 8.0 * (microbatches - 1)
