"""A Flax NNX model of one's own in FP8: its large layers are jax_te's Linear, the rest is Flax.

The model is built and called inside of `with autocast(recipe):`, and nothing in it mentions precision. Under delayed
scaling its Linear layers hold a quantizer state (scales and amax histories), whose gradient is its next value. The file
trains the same model in three ways:

- in Flax's usual loop, with `value_and_grad` and `Optimizer` of this package in place of Flax's: the model gets its
  next quantizer state, and the optimizer keeps fp32 masters of bf16 parameters and skips steps that are not finite;
- with `create_train_state` and `make_train_step`, which do the same for one `TrainState`, and accumulate gradients over
  microbatches;
- by hand, with jax.jit and optax: `split_model` gives the parameters and the quantizer states apart, the optimizer sees
  the parameters only, and `write_back` takes the states' gradients over as they are.

    python examples/own_nnx_model.py

prints the losses of all, and of the model without FP8.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jax_te import DelayedScaling, Linear, Optimizer, autocast, create_train_state, make_train_step, value_and_grad
from jax_te.quantize import with_max_gradients, write_back
from jax_te.training import split_model

FEATURES, HIDDEN, CLASSES, BATCH, STEPS = 64, 128, 10, 256, 60
TX = optax.adam(3e-3)


class Block(nnx.Module):
    """x + down(gelu(up(norm(x)))); in features and out features are multiples of 16, as FP8 needs."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.up = Linear(HIDDEN, 4 * HIDDEN, rngs=rngs)
        self.down = Linear(4 * HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class Classifier(nnx.Module):
    """Flax's own first and last layer, which no recipe touches, and two blocks between them."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.blocks = nnx.List([Block(rngs), Block(rngs)])
        self.last = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def loss_fn(model, batch, key=None):
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def batches():
    """Yield the same random examples in every run, labelled by a fixed random network."""
    w1, w2 = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in ((1, (64, 64)), (2, (64, CLASSES))))
    for step in range(STEPS):
        x = jax.random.normal(jax.random.fold_in(jax.random.key(3), step), (BATCH, FEATURES))
        yield {"x": x, "label": jnp.argmax(jnp.tanh(x @ w1 / 8.0) @ w2, axis=-1)}


def train_as_in_flax(model):
    optimizer = Optimizer(model, TX)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, gradients = value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, gradients)
        return loss

    return model, [float(step(model, optimizer, batch)) for batch in batches()]


def train_by_hand(model):
    graphdef, params, quantizers, rest = split_model(model)
    opt_state = TX.init(params)

    @jax.jit
    def step(params, quantizers, opt_state, batch):
        def loss_of(params, quantizers):
            return loss_fn(nnx.merge(graphdef, params, quantizers, rest), batch)

        # JAX adds the gradients of two uses of an array. Those of a state, its next values, merge by maximum in the
        # dtype of with_max_gradients, which JAX takes for one of integers.
        differentiate = jax.value_and_grad(loss_of, argnums=(0, 1), allow_int=True)
        loss, (gradients, next_quantizers) = differentiate(params, with_max_gradients(quantizers))
        updates, opt_state = TX.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return params, write_back(quantizers, next_quantizers), opt_state, loss

    losses = []
    for batch in batches():
        params, quantizers, opt_state, loss = step(params, quantizers, opt_state, batch)
        losses.append(float(loss))
    return nnx.merge(graphdef, params, quantizers, rest), losses


def train_a_state(model):
    state = create_train_state(model, TX, key=jax.random.key(0))
    step = make_train_step(loss_fn, TX)
    losses = []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state.model, losses


def show(label, losses):
    print(f"{label:26}", *(f"{losses[i]:.3f}" for i in range(0, STEPS, STEPS // 6)), f"{losses[-1]:.3f}")


def main():
    plain, plain_losses = train_by_hand(Classifier(nnx.Rngs(0)))
    with autocast(DelayedScaling(amax_history_len=16)):  # the one line that makes it FP8
        model, losses = train_as_in_flax(Classifier(nnx.Rngs(0)))
        _, state_losses = train_a_state(Classifier(nnx.Rngs(0)))
        _, hand_losses = train_by_hand(Classifier(nnx.Rngs(0)))
    show("without FP8", plain_losses)
    show("FP8, Flax's loop", losses)
    show("FP8, make_train_step", state_losses)
    show("FP8, by hand", hand_losses)
    for role, state in nnx.as_pure(model.blocks[0].up.quantizers).items():
        print(f"blocks/0/up, {role}: scale {state['scale']:.1f}, newest amax {state['amax_history'][0]:.4g}")

    if jax.tree.leaves(split_model(plain)[2]) or not jax.tree.leaves(split_model(model)[2]):
        raise SystemExit("the model in FP8, and only that one, should hold quantizer states")
    if not losses[-1] < 0.6 * losses[0]:
        raise SystemExit(f"the loss should fall by 40 % or more, went from {losses[0]:.3f} to {losses[-1]:.3f}")
    if not abs(losses[-1] - plain_losses[-1]) < 0.1:
        raise SystemExit(f"FP8 should train as fp32 does, {losses[-1]:.3f} is not near {plain_losses[-1]:.3f}")
    for other in (state_losses, hand_losses):
        if not max(abs(a - b) for a, b in zip(losses, other, strict=True)) < 0.02:
            raise SystemExit("all ways should give the same losses, up to rounding")
    print("ok: the loss fell in FP8 as it does without, and all ways agree")


if __name__ == "__main__":
    main()
