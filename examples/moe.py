"""A small mixture of experts in FP8, and how evenly its experts are used.

Tokens are drawn around a few centres, of which two are frequent, so that a router left alone sends most tokens to the
same experts. The model is trained three times: without any balance, with the load-balancing loss, and with a bias of
each expert, which has no gradient: it is state outside of gradients, as the scales of FP8 are, and the train step gives
it its next value once a step.

    python examples/moe.py

prints for each the loss, the largest load of an expert over the mean one, and the share of tokens that each expert got
in the last step.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jax_te import Float8CurrentScaling, autocast, create_train_state, make_train_step
from jax_te.config import RouterOptions
from jax_te.layers import MoE, RMSNorm, expert_metrics

FEATURES, HIDDEN, FFN, EXPERTS, CENTRES = 16, 32, 64, 8, 12
BATCH, SEQUENCE, STEPS = 8, 64, 60


class Model(nnx.Module):
    """y = last(x + experts(norm(x))), where x = first(input); first and last are Flax's, which no recipe touches."""

    def __init__(self, options: RouterOptions, rngs: nnx.Rngs):
        self.first = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.norm = RMSNorm(HIDDEN, rngs=rngs)
        self.experts = MoE(HIDDEN, FFN, options, activation="swiglu", bias=False, rngs=rngs)
        self.last = nnx.Linear(HIDDEN, FEATURES, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        return self.last(x + self.experts(self.norm(x)))


def make_batch(key):
    """Tokens around centres, and a target that depends on the centre."""
    which, noise = jax.random.split(key)
    of_centres, of_targets = jax.random.split(jax.random.key(1))
    centre = 2.0 * jax.random.normal(of_centres, (CENTRES, FEATURES))
    target = jax.random.normal(of_targets, (CENTRES, FEATURES, FEATURES)) / FEATURES**0.5
    weights = jnp.where(jnp.arange(CENTRES) < 2, 8.0, 1.0)
    number = jax.random.categorical(which, jnp.log(weights), shape=(BATCH, SEQUENCE))
    x = centre[number] + jax.random.normal(noise, (BATCH, SEQUENCE, FEATURES))
    return {"x": x, "y": jnp.einsum("bsf,bsfg->bsg", x, target[number])}


def loss_fn(model, batch, key):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def train(options: RouterOptions):
    """Return the last loss, and what the last step counted."""
    tx = optax.adam(1e-2)
    with autocast(Float8CurrentScaling()):
        state = create_train_state(lambda rngs: Model(options, rngs), tx, key=jax.random.key(0))
        step = make_train_step(loss_fn, tx, microbatches=2)
        for number in range(STEPS):
            state, metrics = step(state, make_batch(jax.random.fold_in(jax.random.key(2), number)))
    return float(metrics["loss"]), expert_metrics(state.model)


def main():
    ways = {
        "no balance": RouterOptions(num_experts=EXPERTS, load_balancing_type="none"),
        "loss": RouterOptions(num_experts=EXPERTS, aux_loss_coeff=0.2),
        "bias": RouterOptions(
            num_experts=EXPERTS, score_function="sigmoid", enable_expert_bias=True, bias_update_rate=0.02
        ),
    }
    uneven = {}
    for name, options in ways.items():
        loss, found = train(options)
        load = found["experts.router/tokens_per_expert"]
        shares = " ".join(f"{share:4.0%}" for share in (load / jnp.sum(load)).tolist())
        print(f"{name:<10}  loss {loss:.3f}  max/mean load {found['max_over_mean_load']:.2f}  {shares}")
        uneven[name] = float(found["max_over_mean_load"])
    if not uneven["bias"] < 1.5 < uneven["no balance"]:
        raise SystemExit(f"the bias, and not the router by itself, should bring max/mean load below 1.5: {uneven}")
    if not uneven["loss"] < uneven["no balance"]:
        raise SystemExit(f"the loss should make the load more even: {uneven}")
    print("ok: both ways balance the load of the experts, in FP8")


if __name__ == "__main__":
    main()
