"""Text generation with a KV cache."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_te._validation import check_positive, checked
from jax_te.models.gpt import Cache, GPTModel
from jax_te.ops import as_int32, is_known
from jax_te.recipe import current_recipe
from jax_te.sharding import auto_region, whole_sequences
from jax_te.typing import Array, Key

_FINEST, _COARSEST = 32, 1024
"""Numbers of tokens that programs have room for: powers of two between these, and multiples of the second."""


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

    A compiled program serves prompts of many lengths: the shortest prompt, and the longest with its ``steps``, count as
    the next power of two, from 32 on, or multiple of 1024. A model whose numbers would change, because it computes one
    token's from others behind it, has a program for each two lengths: one under a recipe, or with a capacity of
    experts.

    Args:
        model: model, in either mode, which stays as it is.
        prompt: integers ``[b, s]``, ``s >= 1``. Every token is read: shorter prompts end in padding and have
            ``lengths``.
        steps: number of tokens to generate after the longest prompt.
        key: ``jax.random.key``. The same key gives the same tokens on every mesh, up to rounding of the logits.
        temperature: divisor of the logits; 0 takes the most likely token.
        top_k: number ``k`` of most likely tokens to sample from, and those as likely as the last of them. None: all.
        lengths: number of tokens of each prompt, in ``[1, s]``; what follows them in ``prompt`` is not read. None: all
            are ``s``.

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
    sizes = _sizes(prompt, lengths, model.vocab_size)
    shortest = min(sizes, default=prompt.shape[1])
    room = _Room(prefix=shortest, whole=total)
    if not _reads_later_tokens(model):
        whole = min(_rounded_up(total), model.max_sequence_length)
        room = _Room(prefix=min(_rounded_up(shortest), whole), whole=whole)
    # Static: the temperature is traced, so that another value needs no compilation. One that fp32 cannot divide by
    # counts as 0.
    greedy = bool(temperature < jnp.finfo(jnp.float32).tiny)
    with whole_sequences():
        tokens = _generate(
            model,
            _known_tokens(prompt, sizes, room.whole),
            (jnp.int32(shortest), jnp.int32(total)),
            key,
            jnp.float32(temperature),
            room=room,
            top_k=top_k,
            greedy=greedy,
        )
    return tokens[:, :total].astype(prompt.dtype)


class _Room(NamedTuple):
    """Numbers of tokens that a compiled program has room for: of the prompts in its first call, and of all."""

    prefix: int
    whole: int


def _rounded_up(count: int) -> int:
    """Return the number of tokens that ``count`` of them count as, see `generate`.

    >>> _rounded_up(3), _rounded_up(33), _rounded_up(1025)
    (32, 64, 2048)
    """
    if count > _COARSEST:
        return -(-count // _COARSEST) * _COARSEST
    return max(_FINEST, 1 << (count - 1).bit_length())


def _reads_later_tokens(model: GPTModel) -> bool:
    """Return whether a token's numbers depend on tokens behind it in the same call: padding would change them."""
    if current_recipe() is not None:  # whose scales may be those of all tokens
        return True
    return any(getattr(module, "reads_later_tokens", False) for _, module in nnx.iter_modules(model))


def _sizes(prompt: Array, lengths: Sequence[int] | None, vocab_size: int) -> tuple[int, ...]:
    """Return the number of tokens of each prompt.

    Raises:
        ValueError: for lengths that do not fit the prompt, and for known tokens outside of the vocabulary.
    """
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
    return sizes


def _known_tokens(prompt: Array, sizes: Sequence[int], whole: int) -> Array:
    """Return int32 ``[b, whole]``: the prompts, and -1 for tokens that are to be generated."""

    def known(prompt: Array) -> Array:
        given = jnp.arange(prompt.shape[1], dtype=jnp.int32)[None] < jnp.array(sizes, jnp.int32)[:, None]
        tokens = jnp.where(given, as_int32("prompt", prompt), jnp.int32(-1))
        return jnp.pad(tokens, ((0, 0), (0, whole - prompt.shape[1])), constant_values=-1)

    return auto_region(known, ("batch", None))(prompt)


@partial(jax.jit, static_argnames=("room", "top_k", "greedy"))
def _generate(
    model: GPTModel,
    tokens: Array,
    span: tuple[Array, Array],
    key: Array,
    temperature: Array,
    *,
    room: _Room,
    top_k: int | None,
    greedy: bool,
) -> Array:
    """Return ``tokens [b, whole]`` with generated ones in place of -1, up to the last that is asked for.

    All rows continue from the shortest prompt's end, at one position: longer prompts are read token by token, so that a
    cache has one length, and no row has leading padding that a later token would see.

    Args:
        model: the model.
        tokens: see `_known_tokens`.
        span: number of tokens of the shortest prompt, and number of tokens at the end.
        key, temperature, top_k, greedy: see `generate`.
        room: sizes of the program.
    """
    model.eval()  # a copy: each trace has its own
    pick = partial(_sample, top_k=top_k, greedy=greedy)
    shortest, total = span

    def with_next(tokens: Array, logits: Array, at: Array, index: Array) -> Array:
        """Return the tokens with the one at ``index``, of the logits at ``at``."""
        # Logits are sharded over the vocabulary; sampling needs whole rows, and bits that do not depend on the
        # sharding.
        sample = auto_region(pick, ("batch", None))
        return sample(tokens, logits, at, index, temperature, jax.random.fold_in(key, index - shortest))

    def step(index: Array, carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
        tokens, cache = carry
        logits, cache = model(last(tokens, index), cache=cache)
        return with_next(tokens, logits, jnp.int32(0), index), cache

    def prefix(tokens: Array, shortest: Array) -> Array:
        behind = jnp.arange(room.prefix, dtype=jnp.int32)[None] >= shortest
        tokens = tokens[:, : room.prefix]
        return jnp.where(behind & (tokens < 0), 0, tokens)

    first = auto_region(prefix, ("batch", None))
    last = auto_region(lambda tokens, index: jax.lax.dynamic_slice_in_dim(tokens, index - 1, 1, 1), ("batch", None))
    cache = model.init_cache(len(tokens), room.whole)
    # Tokens behind the shortest prompt's end are seen by none before it. What the cache has of them is not read, since
    # it is as long as that prompt, and each of them is written there again when its turn comes.
    logits, cache = model(first(tokens, shortest), cache=cache)
    cache = tuple(dataclasses.replace(layer, length=shortest) for layer in cache)
    tokens = with_next(tokens, logits, shortest - 1, shortest)
    return jax.lax.fori_loop(shortest + 1, total, step, (tokens, cache))[0]


def _sample(
    tokens: Array,
    logits: Array,
    at: Array,
    index: Array,
    temperature: Array,
    key: Array,
    *,
    top_k: int | None,
    greedy: bool,
) -> Array:
    """Return ``tokens [b, whole]`` with the one at ``index``: the known one, or from ``logits [b, s, v]`` at ``at``."""
    # In fp32: bf16 would tie many tokens.
    last = jax.lax.dynamic_index_in_dim(logits, at, 1, keepdims=False).astype(jnp.float32)
    if greedy:
        token = jnp.argmax(last, axis=-1)
    else:
        if top_k is not None:
            smallest = jax.lax.top_k(last, min(top_k, last.shape[-1]))[0][:, -1:]
            last = jnp.where(last < smallest, -jnp.inf, last)
        # Of differences, which a low temperature makes minus infinity, not of logits, which it would make infinite.
        below = last - jnp.max(last, axis=-1, keepdims=True)
        token = jax.random.categorical(key, below / temperature, axis=-1)
    known = jax.lax.dynamic_index_in_dim(tokens, index, 1, keepdims=False)
    token = jnp.where(known < 0, token.astype(jnp.int32), known)
    return jax.lax.dynamic_update_index_in_dim(tokens, token, index, 1)
