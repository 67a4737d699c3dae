"""``jax-te sample``: text from a trained model."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_te._processes import Meetings
from jax_te.checkpoint import CHECKPOINT_FOLDER, TrainCheckpointer
from jax_te.cli.build import abstract_model_state, contexts, warnings_as_lines
from jax_te.cli.command_options import RANDOM, SampleOptions
from jax_te.cli.memory import check_memory
from jax_te.cli.objective import model_class
from jax_te.cli.option_table import check_effects
from jax_te.cli.run_files import convert_command, holds_run, read_config
from jax_te.cli.run_text import run_tokenizer
from jax_te.data import ByteTokenizer, Tokenizer
from jax_te.interop.tables import on_host
from jax_te.layers import quantizable_modules
from jax_te.models import GPTModel, generate
from jax_te.ops import use_backend
from jax_te.recipe import autocast

LONGEST = 2048
"""Maximum number of tokens in the key/value cache: models of other libraries support far more than fit into memory."""


def run(options: SampleOptions) -> int:
    """Return the exit status, 0, once the prompt and its continuation are printed.

    Raises:
        ValueError: for a folder without a checkpoint, and an empty prompt.
    """
    check_effects(options, {RANDOM: options.temperature > 0.0})
    output = Path(options.output)
    config = read_config(output)
    if config is None or not holds_run(output):
        raise ValueError(f"{output} holds no trained model; train one with: jax-te train --output {output}")
    if model_class(config) is not GPTModel:
        raise ValueError(
            f"the model of {output} restores masked or removed tokens, and jax-te sample continues texts; measure it "
            f"with: jax-te eval --output {output}, or give it to transformers: {convert_command(output)}"
        )
    # One device and any available backend, wherever it was trained.
    config = dataclasses.replace(config.on_one_device(options.factory_modules), check_memory=options.check_memory)
    check_memory(config, "sample")
    tokenizer = run_tokenizer(config, output)
    prompt = tokenizer.encode(options.prompt)
    if not prompt.size:
        raise ValueError("--prompt is empty, or the run's tokenizer has no token for it; give at least one character")
    with contexts(config), TrainCheckpointer(output / CHECKPOINT_FOLDER) as checkpointer, warnings_as_lines():
        state, _, step = checkpointer.restore(abstract_model_state(config), allow={"unexpected"})
        print(f"{output}, step {step}", file=sys.stderr, flush=True)
        text = continue_text(
            state.model,
            tokenizer,
            prompt,
            options.length,
            seed=options.seed,
            temperature=options.temperature,
            top_k=options.top_k,
        )
    print(options.prompt + text)
    return 0


def continue_text(
    model: GPTModel,
    tokenizer: Tokenizer | ByteTokenizer,
    prompt: np.ndarray,
    length: int,
    *,
    seed: int = 0,
    temperature: float = 0.8,
    top_k: int = 0,
    copies: int = 1,
) -> str:
    """Return ``length`` tokens that follow ``prompt``, as text.

    Bytes that are not UTF-8, and control characters, become U+FFFD.

    Runs without quantization, on the backends that support decoding whatever the model was trained with. When the
    model's context, or `LONGEST` tokens of it, is full, generation goes on from its second half.

    Args:
        model: model, whose layers lose recipes of their own, which might quantize one token at a time.
        tokenizer: tokenizer of the model.
        prompt: tokens of the prompt, at least one.
        length: number of tokens to sample, >= 1.
        seed: seed of the sampling.
        temperature, top_k: sampling options, see `generate`; ``top_k`` 0 samples from all tokens.
        copies: rows of the batch, all alike, for a mesh that splits the batch.
    """
    text = prompt.tolist()
    for _, module in quantizable_modules(model):
        # Decoding has few rows of tokens, which a recipe does not accelerate.
        module.module_recipe, module.kernel_recipes = None, ()
    window, begin, key = min(model.max_sequence_length, LONGEST), len(text), jax.random.key(seed)
    part = 0
    while len(text) < begin + length:
        if part or len(text) >= window:  # always the same two sizes, so that only one more function is compiled
            context, steps = text[-(window // 2) :], window - window // 2
        else:
            context, steps = text, min(length, window - len(text))
        with autocast(None), use_backend("auto"):
            tokens = generate(
                model,
                jnp.asarray(np.tile(np.asarray(context, np.int32), (copies, 1))),
                steps=steps,
                key=jax.random.fold_in(key, part),
                temperature=temperature,
                top_k=top_k or None,
            )
        if not tokens.is_fully_addressable:  # rows lie in several processes
            with Meetings("sample") as meetings:
                tokens = on_host(tokens, meetings)
        text += np.asarray(tokens)[0, len(context) :].tolist()
        part += 1
    before, whole = tokenizer.decode(text[:begin]), tokenizer.decode(text[: begin + length])
    # Many tokenizers omit the space before a text's first word, so the continuation is not decoded separately.
    characters = whole.removeprefix(before) if whole.startswith(before) else tokenizer.decode(text[begin:][:length])
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in characters)
