"""A model of one's own trains through the stages of a pipeline.

The model says its three parts: `embed_inputs`, the `layers`, and `compute_loss` behind them. The same loss trains
it on one device and on a mesh with two stages, which here are two CPU devices.

    python examples/pipeline.py

prints the losses of both, which are the same but for the order of sums.
"""

import contextlib
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jax_te import LayerNormMLP, create_train_state, make_train_step
from jax_te.config import ParallelConfig, PipelineConfig
from jax_te.models import StackInput
from jax_te.sharding import make_mesh
from jax_te.training import PipelinedLoss

FEATURES, HIDDEN, CLASSES, BATCH, LENGTH, STEPS = 16, 64, 10, 8, 4, 5


class Block(nnx.Module):
    """x + mlp(norm(x)). The layers of a stack are called with a dropout key, which this one does not need."""

    def __init__(self, rngs: nnx.Rngs):
        self.mlp = LayerNormMLP(HIDDEN, 4 * HIDDEN, rngs=rngs)

    def __call__(self, x, dropout_key=None):
        return x + self.mlp(x)


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(4)])
        self.last = nnx.Linear(HIDDEN, CLASSES, rngs=rngs)

    def embed_inputs(self, x):
        return StackInput(self.first(x))

    def compute_loss(self, y, labels):
        return optax.softmax_cross_entropy_with_integer_labels(self.last(y), labels).mean()


LOSS = PipelinedLoss(
    embed_inputs=lambda model, batch, key: model.embed_inputs(batch["x"]),
    compute_loss=lambda model, y, batch, key: model.compute_loss(y, batch["labels"]),
)


def losses(mesh=None):
    tx, key = optax.adam(1e-3), jax.random.key(1)
    x = jax.random.normal(key, (BATCH, LENGTH, FEATURES))
    batch = {"x": x, "labels": jnp.argmax(x[..., :CLASSES], axis=-1)}
    found = []
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        state = create_train_state(Classifier, tx, key=jax.random.key(0))
        step = make_train_step(LOSS, tx, microbatches=4, pipeline=PipelineConfig(schedule="1f1b"))
        for _ in range(STEPS):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
    return found


def main():
    one, two = losses(), losses(make_mesh(ParallelConfig(pipeline=2)))
    for label, found in (("one device", one), ("two stages", two)):
        print(f"{label:12}", *(f"{loss:.4f}" for loss in found))
    if not max(abs(a - b) for a, b in zip(one, two, strict=True)) < 1e-4:
        raise SystemExit("stages should give the losses of one device, up to the rounding of fp32")
    print("ok: stages give the losses of one device")


if __name__ == "__main__":
    main()
