"""Text generation: a tiny GPT learns one text by heart, then continues prompts with a KV cache.

`generate` runs the prompt once, then one token at a time: every layer keeps the keys and values of earlier tokens in a
cache, so a new token costs one position, not the whole text again. The whole loop is one compiled function.

    python examples/generation.py

prints the loss, the most likely continuation of a prompt (`temperature=0`), and continuations drawn at random, with
`temperature` and `top_k`. It checks the cache: the model run once over the finished text, without a cache, must choose
the same tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_te import TransformerConfig, create_train_state, make_train_step
from jax_te.models import GPTModel, generate

TEXT = (
    "The scale of a tensor is the largest value that its format holds, divided by the largest value in the tensor. "
    "Delayed scaling takes the latter from earlier steps; current scaling takes it from the tensor itself. "
)
PROMPT, LENGTH, BATCH, STEPS = "Delayed scaling", 64, 16, 240
CONFIG = TransformerConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,  # grouped-query attention: half the cache
    normalization="RMSNorm",
    activation="swiglu",
    ffn_hidden_size=128,
    add_bias_linear=False,
)


def build(rngs):
    return GPTModel(CONFIG, vocab_size=128, max_sequence_length=128, position_embedding_type="rope", rngs=rngs)


def encode(text):
    return np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int32)


def decode(tokens):
    return "".join(chr(token) if chr(token).isprintable() else "?" for token in np.asarray(tokens))


def loss_fn(model, batch, key):
    return model.loss(batch["tokens"], batch["labels"], dropout_key=key)


def train():
    """Return a model that knows TEXT, and its last loss."""
    text, rng = encode(TEXT + TEXT), np.random.default_rng(0)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(3e-3, STEPS)))
    state = create_train_state(build, tx, key=jax.random.key(0))
    step = make_train_step(loss_fn, tx)
    for number in range(1, STEPS + 1):
        windows = np.stack([text[at : at + LENGTH + 1] for at in rng.integers(0, len(TEXT), BATCH)])
        state, metrics = step(state, {"tokens": windows[:, :-1], "labels": windows[:, 1:]})
        if number == 1 or number % 30 == 0:
            print(f"step {number:4}  loss {metrics['loss']:.3f}")
    return state.model, float(metrics["loss"])


def main():
    model, loss = train()
    prompt = jnp.asarray(encode(PROMPT))[None]  # [b, s]
    key = jax.random.key(1)

    likely = generate(model, prompt, steps=60, key=key, temperature=0.0)
    print(f"most likely:                {decode(likely[0])!r}")
    three = generate(model, jnp.tile(prompt, (3, 1)), steps=40, key=key, temperature=1.5, top_k=5)
    for row in three:
        print(f"temperature 1.5, 5 likeliest: {decode(row)!r}")
    wild = generate(model, prompt, steps=40, key=key, temperature=3.0)
    print(f"temperature 3, all tokens:  {decode(wild[0])!r}")

    if not loss < 0.3:
        raise SystemExit(f"the model should know the text by heart, its loss is {loss:.3f}")
    expected = TEXT[TEXT.index(PROMPT) :][: likely.shape[1]]
    if decode(likely[0]) != expected:
        raise SystemExit(f"the most likely continuation should be the text itself, {expected!r}")
    begin = prompt.shape[1]
    without_cache = jnp.argmax(jax.jit(lambda model, tokens: model(tokens))(model, likely), axis=-1)
    if not bool((without_cache[:, begin - 1 : -1] == likely[:, begin:]).all()):
        raise SystemExit("with the cache and without it, the model should choose the same tokens")
    if bool((generate(model, prompt, steps=40, key=key, temperature=3.0) != wild).any()):
        raise SystemExit("the same key should draw the same tokens")
    print("ok: it continues the text, and the cache changes nothing")


if __name__ == "__main__":
    main()
