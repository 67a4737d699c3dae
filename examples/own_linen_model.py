"""A Flax Linen model of one's own in FP8, trained by Flax's TrainState.

`jax_te.linen` has jax_te's layers for Linen. The model, the loss and the train step below are those of any Linen
program, with `te.value_and_grad` in place of JAX's; FP8 is one line around `init` and training, `with
autocast(recipe):`. Delayed scaling keeps scales and amax histories in the collection `_overwrite_with_gradient`, whose
gradient is its next value. Flax's TrainState knows that collection: given as part of its `params` it is overwritten by
its gradient, and the optimizer never sees it.

    python examples/own_linen_model.py

prints the losses with FP8 and without, and one layer's scales.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jax_te.linen as te
from jax_te import DelayedScaling, autocast

FEATURES, HIDDEN, CLASSES, BATCH, STEPS = 64, 128, 10, 256, 60
STATE = "_overwrite_with_gradient"


class Block(nn.Module):
    """x + down(gelu(up(norm(x)))); in features and out features are multiples of 16, as FP8 needs."""

    @nn.compact
    def __call__(self, x):
        y = te.LayerNormLinear(HIDDEN, 4 * HIDDEN, name="up")(x)
        return x + te.Linear(4 * HIDDEN, HIDDEN, name="down")(jax.nn.gelu(y))


class Classifier(nn.Module):
    """Flax's own first and last layer, which no recipe touches, and two blocks between them."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(HIDDEN, name="first")(x)
        for i in range(2):
            x = Block(name=f"block_{i}")(x)
        return nn.Dense(CLASSES, name="last")(x)


@jax.jit
def train_step(state, batch):
    def loss_fn(variables):
        logits = state.apply_fn(variables, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, gradients = te.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=gradients), loss


def batches():
    """Yield the same random examples in every run, labelled by a fixed random network."""
    w1, w2 = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in ((1, (64, 64)), (2, (64, CLASSES))))
    for step in range(STEPS):
        x = jax.random.normal(jax.random.fold_in(jax.random.key(3), step), (BATCH, FEATURES))
        yield {"x": x, "label": jnp.argmax(jnp.tanh(x @ w1 / 8.0) @ w2, axis=-1)}


def train():
    """Return state and losses after all batches. Nothing here is about FP8: it comes from around the call."""
    model = Classifier()
    variables = nn.unbox(model.init(jax.random.key(0), jnp.ones((BATCH, FEATURES))))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
    # All collections, not variables["params"] alone: the quantizer states are among them.
    state = TrainState.create(apply_fn=model.apply, params=variables, tx=tx)
    losses = []
    for batch in batches():
        state, loss = train_step(state, batch)
        losses.append(float(loss))
    return state, losses


def show(label, losses):
    print(f"{label:12}", *(f"{losses[i]:.3f}" for i in range(0, STEPS, STEPS // 6)), f"{losses[-1]:.3f}")


def main():
    plain, plain_losses = train()
    with autocast(DelayedScaling(amax_history_len=16)):  # the one line that makes it FP8
        state, losses = train()
    show("without FP8", plain_losses)
    show("FP8", losses)
    states = state.params[STATE]["block_0"]["down"]["quantizers"]
    for role, values in states.items():
        print(f"block_0/down, {role}: scale {values['scale']:.1f}, newest amax {values['amax_history'][0]:.4g}")

    if STATE in plain.params:
        raise SystemExit("a model that was initialized without a recipe should hold no quantizer state")
    if any(values["scale"] == 1.0 or values["amax_history"][0] == 0.0 for values in states.values()):
        raise SystemExit("every quantizer should have taken a scale from what it saw")
    if not losses[-1] < 0.6 * losses[0]:
        raise SystemExit(f"the loss should fall by 40 % or more, went from {losses[0]:.3f} to {losses[-1]:.3f}")
    if not abs(losses[-1] - plain_losses[-1]) < 0.1:
        raise SystemExit(f"FP8 should train as fp32 does, {losses[-1]:.3f} is not near {plain_losses[-1]:.3f}")
    print("ok: the loss fell in FP8 as it does without")


if __name__ == "__main__":
    main()
