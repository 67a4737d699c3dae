"""``jax-te eval``: loss and perplexity of a checkpoint on a text."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_te.checkpoint import CHECKPOINT_FOLDER, TrainCheckpointer
from jax_te.cli.build import abstract_model_state, contexts, warnings_as_lines
from jax_te.cli.command_options import A_FOLDER, A_RUN, EvalOptions
from jax_te.cli.memory import SKIP_CHECK, check_fits, check_memory
from jax_te.cli.model_config import default_length, field_names
from jax_te.cli.objective import objective_for, predicted, run_objective
from jax_te.cli.option_table import check_effects, memory_advice
from jax_te.cli.options import DEFAULT_RUN
from jax_te.cli.run_files import holds_run, read_config
from jax_te.cli.run_text import check_text, run_text, run_tokenizer, unit
from jax_te.data import NextTokens, Objective, TextData, Tokenizer, Tokens, read_tokens, whole_batches
from jax_te.interop.huggingface import CONFIG, load_huggingface, open_tensors
from jax_te.models import BertModel, LanguageModel, T5Model
from jax_te.typing import Array

_REMEDY = "Put the run's text back, or give another one by --data, of which all is evaluated"
"""What to do about a text whose held-out part is not the run's: it may have been trained on."""


def run(options: EvalOptions) -> int:
    """Return the exit status, 0, once the losses are on stdout, and their description on stderr.

    Raises:
        ValueError: for conflicting options, and a folder without a checkpoint.
    """
    check_effects(options, {A_RUN: options.init_from is None, A_FOLDER: options.init_from is not None})
    metrics = _of_run(options) if options.init_from is None else _of_folder(options, options.init_from)
    if options.json:
        print(json.dumps({name: value if _is_finite(value) else None for name, value in metrics.items()}, indent=2))
        return 0
    word = metrics.pop("unit")
    print(f"loss           {metrics['loss']:.4f} nats per {word}")
    print(f"perplexity     {metrics['perplexity']:.4f}")
    print(f"tokens         {metrics['tokens']:,} in windows of {metrics['seq_len']}")
    if metrics["bits_per_byte"] is not None:
        print(f"bits per byte  {metrics['bits_per_byte']:.4f}")
    return 0


def _of_run(options: EvalOptions) -> dict[str, Any]:
    output = Path(DEFAULT_RUN if options.output is None else options.output)
    config = read_config(output)
    if config is None or not holds_run(output):
        raise ValueError(f"{output} holds no trained model; train one with: jax-te train --output {output}")
    # One device and any available backend, wherever it was trained.
    config = config.on_one_device(options.factory_modules)
    size, length = options.batch_size or config.batch_size // config.microbatches, options.seq_len or config.seq_len
    sizes = {"batch_size": size, "microbatches": 1, "check_memory": options.check_memory}
    check_memory(dataclasses.replace(config, **sizes), "eval")
    tokenizer = run_tokenizer(config, output)
    objective = run_objective(config, tokenizer)
    own = run_text(config, tokenizer, objective, remedy=_REMEDY) if options.data is None else None
    data = read_tokens(options.data, tokenizer=tokenizer) if own is None else _heldout(own)
    with contexts(config), TrainCheckpointer(output / CHECKPOINT_FOLDER) as checkpointer, warnings_as_lines():
        wanted = abstract_model_state(config)
        state, data_state, step = checkpointer.restore(wanted, step=options.step, allow={"unexpected"})
        if own is not None:
            check_text(own, data_state, config.data, before=config.data, remedy=_REMEDY)
        metrics = evaluate(state.model, data, objective, batch_size=size, seq_len=length)
    print(f"{output}, step {step}, on {data.source}", file=sys.stderr, flush=True)
    return metrics | {"step": step, "unit": predicted(objective, unit(tokenizer))}


def _of_folder(options: EvalOptions, folder: str) -> dict[str, Any]:
    if options.data is None:
        raise ValueError("--init-from names no run, whose text it could be; give --data")
    ignored = field_names(options.ignore_fields)
    if options.check_memory:
        check_fits(_parameter_bytes(Path(folder), options.dtype), 1, f"{memory_advice(())}, {SKIP_CHECK}")
    tokenizer = Tokenizer(options.tokenizer or folder)
    data = read_tokens(options.data, tokenizer=tokenizer)
    block_scaled = "dequantize" if options.dequantize else None
    model = load_huggingface(folder, dtype=options.dtype, ignore_fields=ignored, block_scaled=block_scaled)
    if isinstance(model, BertModel) and model.head_dense is None:
        raise ValueError(
            f"--init-from {folder} is an encoder without a head for tokens, and has no loss; give the folder of the "
            "class for masked tokens, such as BertForMaskedLM"
        )
    objective = objective_for(type(model), (Path(folder) / CONFIG).read_text(encoding="utf-8"), tokenizer)
    length = options.seq_len or default_length(model.max_sequence_length)
    metrics = evaluate(model, data, objective, batch_size=options.batch_size or 1, seq_len=length)
    print(f"{folder} on {data.source}", file=sys.stderr, flush=True)
    return metrics | {"unit": predicted(objective, "token")}


def _parameter_bytes(folder: Path, dtype: str | None) -> int:
    """Return the bytes that a folder's parameters take at least in a dtype, or in that of the tensors.

    Tensors in FP8 are multiplied out, and take more.
    """
    tensors = open_tensors(folder)[0].values()
    return sum(tensor.nbytes if dtype is None else tensor.size * jnp.dtype(dtype).itemsize for tensor in tensors)


def _heldout(data: TextData) -> Tokens:
    # By the average over the whole text: the pieces that are held out may begin and end within a character.
    text_bytes = None if data.bytes_per_token is None else round(data.bytes_per_token * len(data.heldout))
    names = {"source": f"the held-out part of {data.source}", "files": data.files, "vocab_size": data.vocab_size}
    return Tokens(tokens=data.heldout, text_bytes=text_bytes, **names)


def evaluate(
    model: LanguageModel, data: Tokens, objective: Objective, *, batch_size: int, seq_len: int
) -> dict[str, Any]:
    """Return the mean loss in nats, perplexity, number of predicted tokens, window length, and bits per byte.

    Args:
        model: model to evaluate under the ambient recipe.
        data: tokens, at least two.
        objective: what the model predicts. Bits per byte are those of the next token alone.
        batch_size, seq_len: size of what is computed at once; a token is predicted from those before it in its window.

    Raises:
        ValueError: for a text that is too short or has no token to predict, for tokens that the model does not know,
            and for windows that are longer than its positions.
    """
    if seq_len > model.max_sequence_length:
        raise ValueError(f"--seq-len {seq_len} is above the model's {model.max_sequence_length} positions; lower it")
    model.eval()
    known = min(data.vocab_size, model.vocab_size)
    batch_size = max(min(batch_size, -(-len(data.tokens) // seq_len)), 1)  # the rest would be padding
    sizes: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len, "vocab_size": known, "objective": objective}
    total, count = 0.0, 0
    for batch in whole_batches(data.tokens, **sizes):
        # In Python's floats: fp32 would lose the later batches of a long text.
        total += float(_sum_of_losses(model, batch))
        count += int((batch["labels"] >= 0).sum())
    if not count:
        raise ValueError(
            f"{data.source} has no token to predict: all of its windows are of special tokens alone, such as the "
            "unknown one, which are never masked. Give another --data, of words that the tokenizer knows"
        )
    loss = total / count
    # The first token is not predicted; it is taken to be as likely as the others.
    text_bytes = data.text_bytes if isinstance(objective, NextTokens) else None
    bits = None if not text_bytes else loss / math.log(2.0) * len(data.tokens) / text_bytes
    # math.exp raises where fp64 has no number left.
    perplexity = math.exp(loss) if loss < 700.0 else math.inf
    return {"loss": loss, "perplexity": perplexity, "tokens": count, "seq_len": seq_len, "bits_per_byte": bits}


@jax.jit
def _sum_of_losses(model: Any, batch: dict[str, Array]) -> Array:
    if isinstance(model, T5Model):
        return model.loss(batch["tokens"], batch["decoder_tokens"], batch["labels"], reduction="sum")
    return model.loss(batch["tokens"], batch["labels"], reduction="sum")


def _is_finite(value: Any) -> bool:
    # JSON has no nan and no infinity.
    return not isinstance(value, float) or math.isfinite(value)
