"""Train steps over microbatches: kernels quantized once per step, and once per microbatch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jax_te.bench.contestants import CompiledStep, SharedState, rows_of
from jax_te.bench.settings import Row, Settings, Shape
from jax_te.config import TransformerConfig
from jax_te.models import GPTModel
from jax_te.ops import use_backend
from jax_te.recipe import autocast, recipe_from_name
from jax_te.training import StateArrays, abstract_train_state, create_train_state, make_train_step
from jax_te.typing import Array

LAYERS, VOCABULARY = 4, 256
# TE's and this package's custom calls, and the casts of plain JAX.
QUANTIZATION = re.compile(r'custom_call_target="(?:te_\w*quantize\w*|mosaic_gpu\w*)"|f8e\w+\[[\d,]*\][^=]* convert\(')


def bench_microbatches(recipes: Sequence[str], shape: Shape, microbatches: int, settings: Settings) -> Iterator[Row]:
    """Yield rows of whole train steps of a GPT of 4 layers, for each recipe both ways, timed in turn.

    Args:
        recipes: names of recipes.
        shape: sizes of the layers; the batch is a microbatch's.
        microbatches: number of microbatches in a step.
        settings: settings of the measurement.
    """
    batch, sequence = shape[0] * microbatches, shape[1]
    tokens = jax.random.randint(jax.random.key(1), (batch, sequence + 1), 0, VOCABULARY)
    for name in recipes:
        with autocast(recipe_from_name(name)), use_backend(settings.backend):
            contestants = [_contestant(name, shape, microbatches, keep, tokens) for keep in (False, True)]
            for contestant in contestants:
                contestant.begin()
                contestant.start(tokens, settings.calls)
        for _ in range(settings.rounds):
            for contestant in contestants:
                contestant.round(tokens, settings.calls)
        for contestant, row in zip(contestants, rows_of(contestants, batch * sequence), strict=True):
            if contestant.error is None:
                row["quantizations_in_loop"], row["quantizations_outside"] = quantizations(
                    contestant.compiled.as_text()
                )
            yield row
        del contestants  # their states and programs, before the next recipe's are made


def _contestant(recipe: str, shape: Shape, microbatches: int, keep: bool, tokens: Array) -> CompiledStep:
    _, sequence, hidden, heads, ffn = shape
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=ffn,
        params_dtype=jnp.bfloat16,
    )
    tx = optax.adam(1e-4)

    def build(rngs: nnx.Rngs) -> GPTModel:
        return GPTModel(config, vocab_size=VOCABULARY, max_sequence_length=sequence, rngs=rngs)

    state = SharedState(lambda: create_train_state(build, tx, key=jax.random.key(0)))
    step = make_train_step(_loss, tx, microbatches=microbatches, keep_kernels=keep)
    name = f"{recipe}, quantized {'once a step' if keep else 'in every microbatch'}"

    def lower() -> Any:
        # In the form in which the step itself passes a state.
        return step.lower(StateArrays.of(abstract_train_state(build, tx)), tokens)

    return CompiledStep(name, state=state, lower=lower, prepare=StateArrays.of, finish=StateArrays.state)


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
