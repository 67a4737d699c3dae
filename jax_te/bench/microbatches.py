"""Train steps over microbatches: kernels quantized once a step, beside in every microbatch."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_te.bench.settings import GIB, Row, Settings, Shape
from jax_te.config import TransformerConfig
from jax_te.models import GPTModel
from jax_te.ops import use_backend
from jax_te.recipe import autocast, recipe_from_name
from jax_te.training import create_train_state, make_train_step

LAYERS, VOCABULARY = 4, 256
# TE's and this package's custom calls, and the casts of plain JAX.
QUANTIZATION = re.compile(r'custom_call_target="(?:te_\w*quantize\w*|mosaic_gpu\w*)"|f8e\w+\[[\d,]*\][^=]* convert\(')


def bench_microbatches(recipes: Sequence[str], shape: Shape, microbatches: int, settings: Settings) -> Iterator[Row]:
    """Yield rows of whole train steps of a GPT of 4 layers, for each recipe both ways, timed in turn.

    Args:
        recipes: names of recipes.
        shape: of the layers; the batch is a microbatch's.
        microbatches: of a step.
        settings: of the measurement.
    """
    for name in recipes:
        with autocast(recipe_from_name(name)), use_backend(settings.backend):
            contestants = [_Step(shape, microbatches, keep) for keep in (False, True)]
        for _ in range(settings.rounds):
            for contestant in contestants:
                contestant.time(settings.calls)
        peer = statistics.median(contestants[0].seconds)
        for contestant in contestants:
            yield {"name": f"{name}, quantized {contestant.label}"} | contestant.summary(peer)
        del contestants  # their states and programs, before the next recipe's are made


class _Step:
    """A compiled train step, its state, and the times it took."""

    def __init__(self, shape: Shape, microbatches: int, keep: bool):
        batch, sequence, hidden, heads, ffn = shape
        self.label = "once a step" if keep else "in every microbatch"
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=hidden,
            num_attention_heads=heads,
            ffn_hidden_size=ffn,
            params_dtype=jnp.bfloat16,
        )
        tx = optax.adam(1e-4)
        self.state = create_train_state(
            lambda rngs: GPTModel(config, vocab_size=VOCABULARY, max_sequence_length=sequence, rngs=rngs),
            tx,
            key=jax.random.key(0),
        )
        rows = batch * microbatches
        self.tokens = jax.random.randint(jax.random.key(1), (rows, sequence + 1), 0, VOCABULARY)
        step = make_train_step(_loss, tx, microbatches=microbatches, keep_kernels=keep)
        self.compiled = step.lower(self.state, self.tokens).compile()
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))
        self.seconds: list[float] = []
        self.time(1)  # a first call loads the program, which is not measured
        self.seconds.clear()

    def time(self, calls: int) -> None:
        """Take some steps, and note their mean time."""
        start = time.perf_counter()
        for _ in range(calls):
            self.state, metrics = self.compiled(self.state, self.tokens)
        jax.block_until_ready(metrics)
        self.seconds.append((time.perf_counter() - start) / calls)

    def summary(self, peer: float) -> dict[str, Any]:
        """Return the figures of a row; ``peer`` is the time of the row to compare with."""
        inside, outside = quantizations(self.compiled.as_text() or "")
        median = statistics.median(self.seconds)
        memory = self.compiled.memory_analysis()
        return {
            "ms": round(1e3 * median, 2),
            "speed_ratio": round(peer / median, 3),
            "quantizations_in_loop": inside,
            "quantizations_outside": outside,
            "temp_gib": round(memory.temp_size_in_bytes / GIB, 3) if memory is not None else None,
            "fp32_gradients_gib": round(4 * self.parameters / GIB, 3),
        }


def _loss(model: Any, tokens: jax.Array, key: Any) -> jax.Array:
    return model.loss(tokens[:, :-1], tokens[:, 1:])


def quantizations(hlo: str) -> tuple[int, int]:
    """Return the numbers of quantizing operations in a program's loops, with what they call, and outside of them.

    >>> quantizations("ENTRY %main (a: f32[2]) -> f32[2] {\\n  b = f8e4m3fn[2]{0} convert(a)\\n}")
    (0, 1)
    """
    computations = {}
    for text in re.split(r"\n(?=(?:ENTRY )?%[\w.\-]+ \()", "\n" + hlo):
        if name := re.match(r"\s*(?:ENTRY )?%([\w.\-]+) \(", text):
            computations[name[1]] = text
    # Loops call computations that call others: all that can be reached from a body runs once a microbatch.
    inside, waiting = set(), re.findall(r"body=%?([\w.\-]+)", hlo)
    while waiting:
        name = waiting.pop()
        if name in computations and name not in inside:
            inside.add(name)
            waiting += re.findall(r"%([\w.\-]+)", computations[name].split("{", 1)[-1])
    counts = {name: len(QUANTIZATION.findall(text)) for name, text in computations.items()}
    within = sum(counts[name] for name in inside)
    return within, sum(counts.values()) - within
