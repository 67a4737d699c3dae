"""A Transformer language model in plain Flax Linen, trained in FP8 after one line.

Nothing in the model is of jax_te: it has nn.Dense, nn.DenseGeneral and nn.Einsum layers, rotary positions, a gated MLP,
dropout, nn.remat and nn.scan, and its parameters have logical axes of its own. `quantize_model` gives its linear layers
quantized GEMMs; parameters keep their names, so that checkpoints and optimizer states still fit.

    python examples/plain_linen_lm.py

trains it on Python source, on 8 CPU devices as a mesh of data=4, model=2: in bf16, then in FP8; and prints which layers
are quantized, and both losses.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jax_te.linen as te
from jax_te import DelayedScaling, autocast

BATCH, LENGTH, STEPS = 8, 64, 60
STATE = "_overwrite_with_gradient"
RULES = (("batch", "data"), ("embed", None), ("heads", "model"), ("mlp", "model"), ("vocab", "model"), ("layers", None))


@dataclass(frozen=True)
class Config:
    vocab: int = 256
    layers: int = 2
    width: int = 64
    heads: int = 4
    hidden: int = 128
    dropout: float = 0.0
    dtype: str = "bfloat16"
    remat: bool = False
    scan: bool = False


def kernel(*axes):
    return nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)


def rotate(x):
    """Return x [b, s, h, d] with its pairs of features turned by angles that grow with the position."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    sin, cos = (fn(angles)[None, :, None, :].astype(x.dtype) for fn in (jnp.sin, jnp.cos))
    one, other = x[..., :half], x[..., half:]
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)


class Attention(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        c, size = self.config, self.config.width // self.config.heads
        q, k, v = (
            nn.Dense(c.width, use_bias=False, dtype=c.dtype, kernel_init=kernel("embed", "heads"), name=name)(x)
            for name in ("q", "k", "v")
        )
        q, k, v = (value.reshape(*x.shape[:2], c.heads, size) for value in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotate(q), rotate(k)).astype(jnp.float32) * size**-0.5
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None, None]
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9)).astype(v.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.DenseGeneral(c.width, axis=(-2, -1), use_bias=False, dtype=c.dtype, name="out")(mixed)


class MLP(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        c = self.config
        gate = nn.Dense(c.hidden, dtype=c.dtype, kernel_init=kernel("embed", "mlp"), name="gate")(x)
        up = nn.Dense(c.hidden, dtype=c.dtype, kernel_init=kernel("embed", "mlp"), name="up")(x)
        down = nn.Einsum((c.hidden, c.width), "bsf,fd->bsd", dtype=c.dtype, kernel_init=kernel("mlp", "embed"))
        return down.copy(name="down")(jax.nn.silu(gate) * up)


class Block(nn.Module):
    config: Config
    train: bool = True

    @nn.compact
    def __call__(self, x, _=None):
        c = self.config
        drop = nn.Dropout(c.dropout, deterministic=not self.train)
        x = x + drop(Attention(c, name="attention")(nn.RMSNorm(dtype=c.dtype)(x)))
        x = x + drop(MLP(c, name="mlp")(nn.RMSNorm(dtype=c.dtype)(x)))
        return nn.with_logical_constraint(x, ("batch", None, None)), None


class LM(nn.Module):
    config: Config
    train: bool = True

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        init = nn.with_logical_partitioning(nn.initializers.normal(1.0), ("vocab", "embed"))
        x = nn.Embed(c.vocab, c.width, dtype=c.dtype, embedding_init=init, name="embed")(tokens)
        block = nn.remat(Block) if c.remat else Block
        if c.scan:
            stack = nn.scan(
                block,
                variable_axes={"params": 0, STATE: 0},
                split_rngs={"params": True, "dropout": True},
                length=c.layers,
                metadata_params={nn.PARTITION_NAME: "layers"},
            )
            x, _ = stack(c, self.train, name="blocks")(x, None)
        else:
            for i in range(c.layers):
                x, _ = block(c, self.train, name=f"block_{i}")(x)
        x = nn.RMSNorm(dtype=c.dtype)(x)
        return nn.Dense(c.vocab, use_bias=False, dtype=c.dtype, kernel_init=kernel("embed", "vocab"), name="head")(x)


def batches(steps=STEPS, batch=BATCH):
    """Yield rows of bytes of a file of Python's standard library, the same in every run."""
    text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)
    random = np.random.default_rng(0)
    for _ in range(steps):
        starts = random.integers(0, len(text) - LENGTH - 1, batch)
        yield np.stack([text[start : start + LENGTH + 1] for start in starts]).astype(np.int32)


@jax.jit
def train_step(state, rows):
    def loss_fn(variables):
        key = jax.random.fold_in(jax.random.key(7), state.step)
        logits = state.apply_fn(variables, rows[:, :-1], rngs={"dropout": key}).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=gradients), loss


def create_state(model, tx):
    """Return the state at step 0; on a mesh each parameter lies where RULES put its logical axes."""

    def init(key):
        variables = model.init(key, jnp.zeros((BATCH, LENGTH), jnp.int32))
        return TrainState.create(apply_fn=model.apply, params=variables, tx=tx)

    mesh, key = jax.sharding.get_mesh(), jax.random.key(0)
    if mesh.empty:
        return jax.jit(init)(key)
    specs = nn.get_partition_spec(jax.eval_shape(init, key))
    return jax.jit(init, out_shardings=nn.logical_to_mesh_sharding(specs, mesh, RULES))(key)


def train(model, steps=STEPS):
    state, losses = create_state(model, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))), []
    for rows in batches(steps):
        state, loss = train_step(state, rows)
        losses.append(float(loss))
    return state, losses


def main():
    jax.config.update("jax_platforms", "cpu")  # also where there are GPUs, of which the mesh would need eight
    jax.config.update("jax_num_cpu_devices", 8)
    model = LM(Config(scan=True, remat=True, dropout=0.05))
    with (
        jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)),
        nn.logical_axis_rules(RULES),
    ):
        _, plain = train(model)
        tokens = jnp.zeros((BATCH, LENGTH), jnp.int32)
        quantized = te.quantize_model(model, tokens)  # the one line
        with autocast(DelayedScaling(amax_history_len=16)):
            print(te.quantization_report(quantized, tokens))
            state, losses = train(quantized)
    for name, values in (("bf16", plain), ("FP8", losses)):
        print(f"{name:5}", *(f"{value:.3f}" for value in values[:: STEPS // 6]), f"{values[-1]:.3f}")
    up = state.params["params"]["blocks"]["mlp"]["up"]["kernel"]
    print("mlp/up:", up.names, up.value.sharding.spec)
    # "uses" stands once beside the states of each layer.
    layers = sum(path[-1].key == "uses" for path, _ in jax.tree.leaves_with_path(state.params[STATE]))
    if up.value.sharding.spec[2] != "model" or layers != 7:
        raise SystemExit(
            "kernels should keep their shards, and every linear layer but the head should hold a quantizer state"
        )
    if not abs(np.mean(losses[-10:]) / np.mean(plain[-10:]) - 1.0) < 2.0**-4:
        raise SystemExit("the losses of FP8 should be those of bf16, up to the relative rounding of e4m3, 2**-4")
    print("ok: a plain Linen model trains in FP8 as in bf16")


if __name__ == "__main__":
    main()
