"""A Transformer language model in plain Flax NNX, trained in FP8 after one line.

Nothing in the model is of jax_te: it has nnx.MultiHeadAttention, nnx.Linear and nnx.Einsum layers, a gated MLP, layers
stacked by nnx.vmap and run by nnx.scan under nnx.remat, and its parameters have logical axes of its own.
`quantize_model` gives its linear layers quantized GEMMs; its parameters stay the same Variables.

    python examples/plain_nnx_lm.py

trains it on Python source, on 8 CPU devices as a mesh of data=4, model=2: in bf16, then in FP8; and prints which layers
are quantized, and both losses. In the loop, `value_and_grad` and `Optimizer` are jax_te's: they carry the state of
delayed scaling. Under recipes without state, `nnx.value_and_grad` and `nnx.Optimizer` do as well.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_te import DelayedScaling, Optimizer, autocast, value_and_grad
from jax_te.layers import quantize_model

BATCH, LENGTH, STEPS = 8, 64, 60
RULES = (("embed", None), ("heads", "model"), ("mlp", "model"), ("vocab", "model"), ("layers", None))


@dataclass(frozen=True)
class Config:
    vocab: int = 256
    layers: int = 2
    width: int = 64
    heads: int = 4
    hidden: int = 128
    dtype: str = "bfloat16"
    remat: bool = False
    scan: bool = False


def kernel(*axes):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), axes)


class MLP(nnx.Module):
    def __init__(self, c, rngs):
        shared = {"dtype": c.dtype, "rngs": rngs}
        self.gate = nnx.Linear(c.width, c.hidden, kernel_init=kernel("embed", "mlp"), **shared)
        self.up = nnx.Linear(c.width, c.hidden, kernel_init=kernel("embed", "mlp"), **shared)
        self.down = nnx.Einsum("bsf,fd->bsd", (c.hidden, c.width), kernel_init=kernel("mlp", "embed"), **shared)

    def __call__(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, c, rngs):
        self.attention_norm = nnx.RMSNorm(c.width, dtype=c.dtype, rngs=rngs)
        # On a mesh each device runs its part of the GEMMs whose kernels name their axes.
        axes = {"kernel_init": kernel("embed", "heads", None), "out_kernel_init": kernel("heads", None, "embed")}
        self.attention = nnx.MultiHeadAttention(
            c.heads, c.width, dtype=c.dtype, decode=False, use_bias=False, **axes, rngs=rngs
        )
        self.mlp_norm = nnx.RMSNorm(c.width, dtype=c.dtype, rngs=rngs)
        self.mlp = MLP(c, rngs)

    def __call__(self, x):
        causal = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.attention_norm(x), mask=causal)
        return x + self.mlp(self.mlp_norm(x))


class LM(nnx.Module):
    def __init__(self, config, rngs):
        self.config = c = config
        init = nnx.with_partitioning(nnx.initializers.normal(1.0), ("vocab", "embed"))
        self.embed = nnx.Embed(c.vocab, c.width, dtype=c.dtype, embedding_init=init, rngs=rngs)
        init = nnx.with_partitioning(nnx.initializers.normal(0.3), (None, "embed"))
        self.positions = nnx.Param(init(rngs.params(), (LENGTH, c.width)))
        if c.scan:
            stacked = nnx.split_rngs(splits=c.layers)(
                nnx.vmap(lambda rngs: Block(c, rngs), transform_metadata={nnx.PARTITION_NAME: "layers"})
            )
            self.blocks = stacked(rngs)
        else:
            self.blocks = nnx.List([Block(c, rngs) for _ in range(c.layers)])
        self.norm = nnx.RMSNorm(c.width, dtype=c.dtype, rngs=rngs)
        head = kernel("embed", "vocab")
        self.head = nnx.Linear(c.width, c.vocab, use_bias=False, dtype=c.dtype, kernel_init=head, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.positions[...][None, : tokens.shape[1]].astype(x.dtype)

        def run(x, block):
            return block(x)

        run = nnx.remat(run) if self.config.remat else run
        if self.config.scan:
            x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        else:
            for block in self.blocks:
                x = run(x, block)
        return self.head(self.norm(x))


def loss_fn(model, rows):
    logits = model(rows[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()


@nnx.jit
def train_step(model, optimizer, rows):
    loss, gradients = value_and_grad(loss_fn)(model, rows)
    optimizer.update(model, gradients)
    return loss


def batches(steps=STEPS, batch=BATCH):
    """Yield rows of bytes of a file of Python's standard library, the same in every run."""
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)
    random = np.random.default_rng(0)
    for _ in range(steps):
        starts = random.integers(0, len(text) - LENGTH - 1, batch)
        yield np.stack([text[start : start + LENGTH + 1] for start in starts]).astype(np.int32)


def train(model, steps=STEPS):
    optimizer = Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3)))
    mesh, losses = jax.sharding.get_mesh(), []
    for rows in batches(steps):
        rows = rows if mesh.empty else jax.device_put(rows, NamedSharding(mesh, P("data")))
        losses.append(float(train_step(model, optimizer, rows)))
    return losses


def main():
    jax.config.update("jax_platforms", "cpu")  # also where there are GPUs, of which the mesh would need eight
    jax.config.update("jax_num_cpu_devices", 8)
    config = Config(scan=True, remat=True)
    with (
        jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)),
        nnx.logical_axis_rules(RULES),
    ):
        plain = train(LM(config, nnx.Rngs(0)))
        model = LM(config, nnx.Rngs(0))
        with autocast(DelayedScaling(amax_history_len=16)):
            print(quantize_model(model, next(batches(1))[:, :-1]))  # the one line
            losses = train(model)
    for name, values in (("bf16", plain), ("FP8", losses)):
        print(f"{name:5}", *(f"{value:.3f}" for value in values[:: STEPS // 6]), f"{values[-1]:.3f}")
    up = model.blocks.mlp.up
    print("mlp/up:", up.kernel.get_metadata("out_sharding"), up.kernel.get_value().sharding.spec)

    if up.kernel.get_value().sharding.spec[2] != "model":
        raise SystemExit("kernels should keep their shards")
    if up.dot_general.quantizers["x"]["amax_history"].shape != (config.layers, 16):
        raise SystemExit("every linear layer should hold a quantizer state")
    if not abs(np.mean(losses[-10:]) / np.mean(plain[-10:]) - 1.0) < 2.0**-4:
        raise SystemExit("the losses of FP8 should be those of bf16, up to the relative rounding of e4m3, 2**-4")
    print("ok: a plain NNX model trains in FP8 as in bf16")


if __name__ == "__main__":
    main()
