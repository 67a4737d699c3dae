"""Text generation with a KV cache."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jax_te._validation import check_positive, checked
from jax_te.models.gpt import Cache, GPTModel
from jax_te.ops import as_int32, is_known
from jax_te.sharding import auto_region, whole_sequences
from jax_te.typing import Array, Key


@checked
def generate(
    model: GPTModel,
    prompt: Array,
    *,
    steps: int,
    key: Key,
    temperature: float = 1.0,
    top_k: int | None = None,
    lengths: Sequence[int] | None = None,
) -> Array:
    """Continue a prompt, one token at a time.

    Generation is evaluation, whatever the model's mode: it runs without dropout, under the ambient recipe and the
    layers' own for evaluation (`ModuleRecipe`). FP8 pads single tokens to a multiple of 16 of them and gains nothing,
    so generate outside `autocast` (or inside ``autocast(None)``) unless you want FP8's numerics. On a mesh the
    batch and the heads are sharded, but no sequence: context and sequence parallelism are for training.

    Args:
        model: model, in either mode, which stays as it is.
        prompt: integers ``[b, s]``, ``s >= 1``. Every token is read: shorter prompts end in padding and have
            ``lengths``.
        steps: number of tokens to generate after the longest prompt.
        key: ``jax.random.key``. The same key gives the same tokens on every mesh, up to rounding of the logits.
        temperature: divisor of the logits; 0 takes the most likely token.
        top_k: number ``k`` of most likely tokens to sample from, and those as likely as the last of them. None: all.
        lengths: number of tokens of each prompt, in ``[1, s]``; what follows them in ``prompt`` is not read. The
            shortest is a constant of the compiled program. None: all are ``s``.

    Returns:
        ``[b, s + steps]`` in the dtype of ``prompt``, or int32 if that cannot hold every id of the vocabulary: in each
        row the prompt, then the generated tokens, which take the place of its padding.

    Raises:
        TypeError: for a prompt that does not hold integers.
        ValueError: for an empty prompt, a known token outside of the vocabulary, ``steps`` or ``top_k`` below 1, a
            negative temperature, lengths that do not fit the prompt, or more tokens than the model's
            ``max_sequence_length``.

    >>> from flax import nnx
    >>> from jax_te.config import TransformerConfig
    >>> config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4)
    >>> model = GPTModel(config, vocab_size=100, max_sequence_length=16, rngs=nnx.Rngs(0))
    >>> generate(model, jnp.zeros((1, 3), jnp.int32), steps=5, key=jax.random.key(0)).shape
    (1, 8)
    """
    check_positive(steps=steps)
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(f"prompt must be [b, s] with at least one token, got shape {prompt.shape}")
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise TypeError(f"prompt must be integers, got {prompt.dtype}")
    largest = float(jnp.finfo(jnp.float32).max)
    if not 0.0 <= temperature <= largest:
        raise ValueError(f"temperature must be >= 0 and at most {largest:.3g}, fp32's largest, got {temperature!r}")
    if top_k is not None:
        check_positive(top_k=top_k)
    total = prompt.shape[1] + steps
    if total > model.max_sequence_length:
        raise ValueError(
            f"prompt ({prompt.shape[1]}) and steps ({steps}) make {total} tokens, more than the model's "
            f"max_sequence_length {model.max_sequence_length}; shorten one of them"
        )
    if model.vocab_size - 1 > jnp.iinfo(prompt.dtype).max:
        prompt = as_int32("prompt", prompt)
    prompt, following = _split(prompt, lengths, steps, model.vocab_size)
    # Static: the temperature is traced, so that another value needs no compilation. One that fp32 cannot divide by
    # counts as 0.
    greedy = bool(temperature < jnp.finfo(jnp.float32).tiny)
    with whole_sequences():
        return _generate(model, prompt, following, key, jnp.float32(temperature), top_k=top_k, greedy=greedy)


def _split(prompt: Array, lengths: Sequence[int] | None, steps: int, vocab_size: int) -> tuple[Array, Array]:
    """Return the part that all rows of the prompt have, and the tokens after it, -1 where they are to be generated."""
    b, s = prompt.shape
    sizes = (s,) * b if lengths is None else tuple(map(operator.index, lengths))
    if len(sizes) != b or not all(1 <= size <= s for size in sizes):
        raise ValueError(f"lengths must be an integer from 1 to s for each row of prompt {prompt.shape}, got {lengths}")
    if is_known(prompt):
        read = np.asarray(prompt).astype(np.int64)[np.arange(s)[None] < np.array(sizes, np.int64)[:, None]]
        # Its logits would be nan, and so would those after it, of which tokens would be drawn nonetheless.
        if (outside := read[(read < 0) | (read >= vocab_size)]).size:
            raise ValueError(
                f"prompt must have tokens from 0 to {vocab_size - 1}, those of the model, got {outside[0]}"
            )
    shortest = min(sizes, default=s)

    def following(prompt: Array) -> Array:
        given = jnp.arange(s, dtype=jnp.int32)[None] < jnp.array(sizes, jnp.int32)[:, None]
        known = jnp.where(given, as_int32("prompt", prompt), jnp.int32(-1))
        return jnp.pad(known, ((0, 0), (0, steps)), constant_values=-1)[:, shortest:]

    return prompt[:, :shortest], auto_region(following, ("batch", None))(prompt)


@partial(jax.jit, static_argnames=("top_k", "greedy"))
def _generate(
    model: GPTModel, prompt: Array, following: Array, key: Array, temperature: Array, *, top_k: int | None, greedy: bool
) -> Array:
    """Return ``prompt [b, s]`` with the tokens that follow, where ``following [b, steps]`` is -1: generated ones.

    All rows continue from the shortest prompt's end, at one position: longer prompts are read token by token, so that a
    cache has one length, and no row has leading padding that a later token would see.
    """
    model.eval()  # a copy: each trace has its own
    pick = partial(_sample, top_k=top_k, greedy=greedy)

    def next_token(logits: Array, index: Array, known: Array) -> Array:
        # Logits are sharded over the vocabulary; sampling needs whole rows, and bits that do not depend on the
        # sharding.
        sample = auto_region(pick, ("batch",))
        return sample(logits, known, temperature, jax.random.fold_in(key, index)).astype(prompt.dtype)

    def step(carry: tuple[Array, Cache], at: tuple[Array, Array]) -> tuple[tuple[Array, Cache], Array]:
        token, cache = carry
        logits, cache = model(token[:, None], cache=cache)
        token = next_token(logits, *at)
        return (token, cache), token

    steps = following.shape[1]
    logits, cache = model(prompt, cache=model.init_cache(prompt.shape[0], prompt.shape[1] + steps))
    first = next_token(logits, jnp.int32(0), following[:, 0])
    _, rest = jax.lax.scan(step, (first, cache), (jnp.arange(1, steps, dtype=jnp.int32), following[:, 1:].T))
    # The scan stacks its tokens in front, [steps - 1, b].
    concatenate = auto_region(lambda *tokens: jnp.concatenate([*tokens[:2], tokens[2].T], axis=1), ("batch", None))
    return concatenate(prompt, first[:, None], rest)


def _sample(logits: Array, known: Array, temperature: Array, key: Array, *, top_k: int | None, greedy: bool) -> Array:
    """Return the next token of each sequence, ``[b]``: the known one, or from ``logits [b, s, v]`` at the end."""
    last = logits[:, -1].astype(jnp.float32)  # bf16 would tie many tokens
    if greedy:
        token = jnp.argmax(last, axis=-1)
    else:
        if top_k is not None:
            smallest = jax.lax.top_k(last, min(top_k, last.shape[-1]))[0][:, -1:]
            last = jnp.where(last < smallest, -jnp.inf, last)
        # Of differences, which a low temperature makes minus infinity, not of logits, which it would make infinite.
        below = last - jnp.max(last, axis=-1, keepdims=True)
        token = jax.random.categorical(key, below / temperature, axis=-1)
    return jnp.where(known < 0, token, known)
