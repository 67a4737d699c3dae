"""The objective of a run, which follows from its model: the next token, masked tokens, or corrupted spans."""

from __future__ import annotations

import json
import math
from typing import Any

import jax.numpy as jnp

from jax_te.cli.model_config import described_form
from jax_te.cli.run_config import RunConfig
from jax_te.config import ParallelConfig
from jax_te.data import IGNORED, ByteTokenizer, CorruptedSpans, MaskedTokens, NextTokens, Objective, Tokenizer
from jax_te.interop.huggingface import CONFIG
from jax_te.models import BertModel, GPTModel, T5Model
from jax_te.training import PipelinedLoss, WeightedMean
from jax_te.typing import Array


def model_class(config: RunConfig) -> type:
    """Return the class of a run's model: `GPTModel`, `BertModel` or `T5Model`."""
    if config.model_config is None:
        return GPTModel
    return described_form(config.model_config, config.ignore_fields)[0].model


def objective_for(model: type, text: str | None, tokenizer: Tokenizer | ByteTokenizer) -> Objective:
    """Return the objective of a class of models with a tokenizer.

    Args:
        model: class of the model.
        text: text of its ``config.json``, which has the first token of a decoder with an encoder. None: there is none.
        tokenizer: tokenizer of the text.

    Raises:
        ValueError: for a tokenizer without the tokens that the objective needs.
    """
    if model is GPTModel:
        return NextTokens()
    if isinstance(tokenizer, ByteTokenizer):
        needed = "mask token" if model is BertModel else "sentinels, <extra_id_0> and so on"
        raise ValueError(f"bytes have no {needed}, without which this model has no objective; give its --tokenizer")
    if model is BertModel:
        return MaskedTokens.of(tokenizer)
    return CorruptedSpans.of(tokenizer, start=_decoder_start(json.loads(text or "{}")))


def _decoder_start(values: dict[str, Any]) -> int:
    """Return the token that the decoder of a T5 begins with: its padding token, unless ``config.json`` names one."""
    given = (values.get(name) for name in ("decoder_start_token_id", "pad_token_id"))
    start = next((token for token in given if token is not None), 0)
    if type(start) is not int or start < 0:
        raise ValueError(
            f"the model's {CONFIG}: decoder_start_token_id is {start!r}, and it must be a token, from 0; set it there"
        )
    return start


def run_objective(config: RunConfig, tokenizer: Tokenizer | ByteTokenizer) -> Objective:
    """Return the objective of a run.

    Raises:
        ValueError: for a tokenizer without the tokens that it needs, and for a sequence length that it cannot have or
            whose targets a mesh or a recipe cannot divide.
    """
    objective = objective_for(model_class(config), config.model_config, tokenizer)
    try:
        lengths = objective.lengths(config.seq_len)
    except ValueError as error:
        raise ValueError(f"--seq-len {config.seq_len}: {error}") from None
    targets = lengths["labels"]
    for divisor, why in _divisors(config, targets):
        if targets % divisor:
            raise ValueError(
                f"--seq-len {config.seq_len} leaves the decoder {targets} tokens, which is not divisible by {why}; "
                f"{_better_lengths(config, objective)}"
            )
    return objective


def _divisors(config: RunConfig, targets: int) -> list[tuple[int, str]]:
    """Return numbers that must divide the decoder's length where it is not ``--seq-len``, and where they come from."""
    if targets == config.seq_len:  # `RunConfig` has checked it
        return []
    mesh, recipe = config.parallel_config() or ParallelConfig(), config.make_recipe()
    divisors = [(mesh.context, f"context={mesh.context} of --mesh {config.mesh}")]
    for name in ("sequence_parallel", "distribute_saved_activations"):
        if getattr(config, name):
            ranks = mesh.context * mesh.tensor
            divisors.append((ranks, f"context*tensor={ranks} of --mesh {config.mesh}"))
    if recipe is not None and config.precision_config is None and config.mesh is not None:
        rows = config.batch_size // config.microbatches
        # The tokens of a microbatch are what must be a multiple.
        divisor = recipe.alignment // math.gcd(recipe.alignment, rows)
        divisors.append((divisor, f"{divisor}, as it must be for --recipe {config.recipe} on a mesh"))
    return divisors


def _better_lengths(config: RunConfig, objective: Objective) -> str:
    """Return what to do: to take the nearest shorter sequence length that divides, if there is one."""
    mesh = config.parallel_config() or ParallelConfig()
    for length in range(config.seq_len - 1, max(2, config.seq_len - 1024), -1):
        if length % (mesh.context * mesh.tensor):
            continue
        try:
            targets = objective.lengths(length)["labels"]
        except ValueError:
            break
        if all(targets % divisor == 0 for divisor, _ in _divisors(config, targets)):
            return f"take --seq-len {length}"
    return "give another --mesh"


def loss_of(config: RunConfig) -> PipelinedLoss:
    """Return the mean loss of a batch of the run's objective, with its weight where that may differ between batches.

    The key None is evaluation.
    """
    return _LOSSES[model_class(config)]


def _masked_loss(model: BertModel, y: Array, labels: Array) -> WeightedMean:
    """Return the mean over the labels, whose number may differ: a window of special tokens has fewer, or none."""
    return WeightedMean(model.compute_loss(y, labels, reduction="sum"), jnp.sum(labels != IGNORED))


_LOSSES: dict[type, PipelinedLoss] = {
    GPTModel: PipelinedLoss(
        embed_inputs=lambda model, batch, key: model.embed_inputs(batch["tokens"], dropout_key=key),
        compute_loss=lambda model, y, batch, key: model.compute_loss(
            y, batch["labels"], tokens=batch["tokens"], dropout_key=key
        ),
    ),
    BertModel: PipelinedLoss(
        embed_inputs=lambda model, batch, key: model.embed_inputs(batch["tokens"], dropout_key=key),
        compute_loss=lambda model, y, batch, key: _masked_loss(model, y, batch["labels"]),
    ),
    T5Model: PipelinedLoss(
        embed_inputs=lambda model, batch, key: model.embed_inputs(
            batch["tokens"], batch["decoder_tokens"], dropout_key=key
        ),
        compute_loss=lambda model, y, batch, key: model.compute_loss(y, batch["labels"], dropout_key=key),
    ),
}


def predicted(objective: Objective, word: str) -> str:
    """Return the term for what a loss is a mean over.

    Args:
        objective: the objective.
        word: term for a token.

    >>> predicted(NextTokens(), "byte")
    'byte'
    """
    if isinstance(objective, MaskedTokens):
        return f"masked {word}"
    return f"target {word}" if isinstance(objective, CorruptedSpans) else word
