"""T5 in FP8: an encoder-decoder that learns to reverse a sequence.

The encoder reads a padded random sequence, the decoder writes it backwards, token by token. `T5Model` is trained on
teacher-forced examples under delayed scaling, then decodes sequences it has not seen: `encode` once, `decode` for every
token. Encoder and decoder lengths differ between examples, so `encoder_lengths` keeps attention off the padding.

    python examples/t5.py

prints the loss, a few decoded sequences, and the share of tokens that are right.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_te import DelayedScaling, TransformerConfig, autocast, create_train_state, make_train_step
from jax_te.models import T5Model

BEGIN, END, PAD, FIRST = 0, 1, 2, 3  # special tokens, and the first letter
LETTERS, SHORTEST, LENGTH, BATCH, STEPS = 13, 4, 8, 64, 200
CONFIG = TransformerConfig(
    num_layers=1,
    hidden_size=64,
    num_attention_heads=4,
    ffn_hidden_size=128,
    normalization="RMSNorm",
    activation="geglu",
    add_bias_linear=False,
    init_method_std=0.05,
)


def build(rngs):
    return T5Model(
        CONFIG,
        vocab_size=FIRST + LETTERS,
        max_sequence_length=LENGTH + 1,
        position_embedding_type="learned_absolute",  # to reverse, tokens must know where they are
        rngs=rngs,
    )


def examples(rng, count):
    """Return sequences of random lengths, the decoder's input (BEGIN, then the answer), and the right output."""
    lengths = rng.integers(SHORTEST, LENGTH + 1, count)
    letters = rng.integers(FIRST, FIRST + LETTERS, (count, LENGTH))
    batch = {
        "source": np.full((count, LENGTH), PAD),
        "decoder": np.full((count, LENGTH + 1), PAD),
        "labels": np.full((count, LENGTH + 1), PAD),
    }
    for i, length in enumerate(lengths):
        answer = letters[i, :length][::-1]
        batch["source"][i, :length] = letters[i, :length]
        batch["decoder"][i, : length + 1] = [BEGIN, *answer]
        batch["labels"][i, : length + 1] = [*answer, END]
    return {name: jnp.asarray(value, jnp.int32) for name, value in (batch | {"lengths": lengths}).items()}


def loss_fn(model, batch, key):
    return model.loss(
        batch["source"],
        batch["decoder"],
        batch["labels"],
        (batch["labels"] != PAD).astype(jnp.float32),
        encoder_lengths=batch["lengths"],
        dropout_key=key,
    )


@jax.jit
def reverse(model, source, lengths):
    """Return LENGTH + 1 greedily decoded tokens; those after END have no meaning."""
    encoded = model.encode(source, encoder_lengths=lengths)
    tokens = jnp.full((source.shape[0], LENGTH + 2), PAD, jnp.int32).at[:, 0].set(BEGIN)

    def say_one_more(position, tokens):
        logits = model.decode(tokens[:, :-1], encoded, encoder_lengths=lengths)
        return tokens.at[:, position + 1].set(jnp.argmax(logits[:, position], axis=-1))

    return jax.lax.fori_loop(0, LENGTH + 1, say_one_more, tokens)[:, 1:]


def text(tokens):
    return "".join(chr(ord("a") + token - FIRST) for token in tokens if token >= FIRST)


def main():
    rng = np.random.default_rng(0)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(3e-3, STEPS)))
    with autocast(DelayedScaling(amax_history_len=16)):
        state = create_train_state(build, tx, key=jax.random.key(0))
        step = make_train_step(loss_fn, tx)
        for number in range(1, STEPS + 1):
            state, metrics = step(state, examples(rng, BATCH))
            if number == 1 or number % 50 == 0:
                print(f"step {number:4}  loss {metrics['loss']:.4f}")

    unseen = examples(np.random.default_rng(1), 128)
    with autocast(None):  # single tokens gain nothing from FP8
        answers = np.asarray(reverse(state.model, unseen["source"], unseen["lengths"]))
    labels = np.asarray(unseen["labels"])
    for i in range(3):
        length = int(unseen["lengths"][i])
        print(f"{text(np.asarray(unseen['source'][i])):>8} -> {text(answers[i, :length])}")
    right = float(np.mean((answers == labels)[labels != PAD]))
    print(f"{right:.1%} of the tokens of {len(labels)} unseen sequences are right")
    if not right > 0.9:
        raise SystemExit(f"more than 90 % of the tokens should be right, {right:.1%} are")
    if not jax.tree.leaves(state.quantizers):
        raise SystemExit("the model should have been trained in FP8, but it holds no quantizer state")
    print("ok: an encoder-decoder trained in FP8 reverses sequences")


if __name__ == "__main__":
    main()
