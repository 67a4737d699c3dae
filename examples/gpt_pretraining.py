"""GPT pre-training written out by hand: data, model, optimizer, train step, evaluation, checkpoints.

`jax-te train` does all of this; here every part is in sight, to be taken and changed. A byte-level GPT in its Llama
form trains on this package's own source files, in FP8 with bf16 parameters (and fp32 masters), two microbatches a step.

    python examples/gpt_pretraining.py

prints training and held-out losses of a run whose last steps are lost: it ends at step 60, and its last checkpoint is
of step 40. Started again it resumes there, and ends with the very bits that were lost: the checkpoint holds parameters,
masters, optimizer and quantizer state, and random keys and batches are functions of the step's number.
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jax_te
from jax_te import (
    DelayedScaling,
    TrainCheckpointer,
    TransformerConfig,
    autocast,
    create_train_state,
    make_train_step,
)
from jax_te.data import heldout_batches, load_text
from jax_te.models import GPTModel
from jax_te.training import abstract_train_state, adamw_with_schedule, learning_rate_schedule, make_eval_step

STEPS, SAVE_EVERY, EVAL_EVERY, MICROBATCHES = 60, 40, 20, 2
BATCH, LENGTH, SEED = 16, 64, 0
RECIPE = DelayedScaling(amax_history_len=16)
CONFIG = TransformerConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=192,
    normalization="RMSNorm",
    activation="swiglu",
    add_bias_linear=False,
    params_dtype="bfloat16",
)
TX = adamw_with_schedule(
    learning_rate_schedule(1e-2, total_steps=STEPS, warmup_steps=6), weight_decay=0.1, clip_norm=1.0
)


def build(rngs):
    return GPTModel(
        CONFIG,
        vocab_size=256,  # bytes
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        rngs=rngs,
    )


def loss_fn(model, batch, key):
    """Return the mean loss; key None is evaluation, without dropout."""
    return model.loss(batch["tokens"], batch["labels"], dropout_key=key)


def train_batch(text, step):
    """Return batch number `step`: windows at random positions. `jax_te.data.TrainBatches` has epochs (with grain)."""
    places = np.random.default_rng((SEED, step)).integers(0, len(text) - LENGTH, BATCH)
    windows = np.stack([text[place : place + LENGTH + 1] for place in places]).astype(np.int32)
    return {"tokens": windows[:, :-1], "labels": windows[:, 1:]}


class Run:
    """A run's functions, compiled once, and its text."""

    def __init__(self, data):
        self.data = data
        self.step = make_train_step(loss_fn, TX, microbatches=MICROBATCHES)
        self.eval_step = make_eval_step(loss_fn)

    def evaluate(self, state):
        batches = heldout_batches(self.data.heldout, batch_size=BATCH, seq_len=LENGTH, num_batches=4)
        return float(np.mean([float(self.eval_step(state, batch)) for batch in batches]))

    def train(self, folder, until):
        """State and losses after step `until`; begins with the newest checkpoint in `folder`, if there is one."""
        with TrainCheckpointer(folder, keep=2) as checkpointer:
            if checkpointer.latest_step() is None:
                state, first = create_train_state(build, TX, key=jax.random.key(SEED)), 0
            else:
                state, data_state, first = checkpointer.restore(abstract_train_state(build, TX))
                if data_state != {"seed": SEED}:
                    raise SystemExit(f"the checkpoint is of other batches: {data_state}")
            print(f"steps {first + 1} to {until}")
            losses = {}
            for number in range(first + 1, until + 1):
                state, metrics = self.step(state, train_batch(self.data.train, number))
                losses[number] = float(metrics["loss"])  # reading it waits for the step; a long run reads one step late
                if number == 1 or number % 10 == 0:
                    print(f"  step {number:3}  loss {losses[number]:.4f}  gradient norm {metrics['grad_norm']:.3f}")
                if number % EVAL_EVERY == 0:
                    print(f"  step {number:3}  held-out loss {self.evaluate(state):.4f}")
                if number % SAVE_EVERY == 0:
                    checkpointer.save(state, {"seed": SEED}, number)
        return state, losses


def same_bits(a, b):
    """Return whether two states hold the same arrays, keys and FP8 values included."""

    def data(leaf):
        return np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)

    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(data(x).tobytes() == data(y).tobytes() for x, y in pairs)


def main():
    data = load_text(Path(jax_te.__file__).parent, seq_len=LENGTH)
    print(f"{data.files} files, {len(data.train):,} bytes to train on, {len(data.heldout):,} held out")
    with tempfile.TemporaryDirectory() as folder, autocast(RECIPE):
        run = Run(data)
        lost, losses = run.train(Path(folder), STEPS)
        resumed, _ = run.train(Path(folder), STEPS)
        heldout = run.evaluate(resumed)
    size = sum(leaf.size for leaf in jax.tree.leaves(resumed.params))
    print(f"{size:,} parameters, held-out loss {heldout:.4f}, {int(resumed.skipped_steps)} steps skipped")
    if not heldout < 0.6 * losses[1]:
        raise SystemExit(f"the held-out loss should be far below the first loss {losses[1]:.3f}, it is {heldout:.3f}")
    if not same_bits(lost, resumed):
        raise SystemExit("a resumed run should end with the very bits of the first one")
    if not jax.tree.leaves(resumed.quantizers) or not jax.tree.leaves(resumed.masters):
        raise SystemExit("the state should hold FP8 scales and fp32 masters")
    print("ok: the model learned, and the resumed run ends with the same bits")


if __name__ == "__main__":
    main()
