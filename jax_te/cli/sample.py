"""``jax-te sample``: text from a trained model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jax_te.models import GPTModel, generate
from jax_te.recipe import autocast


def continue_text(
    model: GPTModel, prompt: str, length: int, *, seed: int = 0, temperature: float = 0.8, top_k: int = 0, copies: int = 1
) -> str:
    """``length`` bytes that follow ``prompt``, as text; bytes that are no UTF-8 show as U+FFFD.

    Runs without quantization. When the model's context is full, generation goes on from its second half.

    Args:
        model: over bytes.
        prompt: at least one character.
        length: >= 1.
        seed: of the drawing.
        temperature, top_k: as for `generate`; ``top_k`` 0 draws from all.
        copies: rows of the batch, all alike, for a mesh that splits the batch.

    Raises:
        ValueError: for an empty prompt.
    """
    text = list(prompt.encode("utf-8", "surrogateescape"))
    if not text:
        raise ValueError("--prompt is empty; give at least one character")
    window, begin, key = model.max_sequence_length, len(text), jax.random.key(seed)
    part = 0
    while len(text) < begin + length:
        if part or len(text) >= window:  # always the same two sizes, so that only one more function is compiled
            context, steps = text[-(window // 2) :], window - window // 2
        else:
            context, steps = text, min(length, window - len(text))
        with autocast(None):
            tokens = generate(
                model,
                jnp.asarray(np.tile(np.asarray(context, np.int32), (copies, 1))),
                steps=steps,
                key=jax.random.fold_in(key, part),
                temperature=temperature,
                top_k=top_k or None,
            )
        text += np.asarray(tokens)[0, len(context) :].tolist()
        part += 1
    return bytes(text[begin : begin + length]).decode("utf-8", "replace")
