"""Low-rank adapters on every GEMM of a GPT: only they are trained, in FP8, and then merged into the kernels.

    python examples/lora.py

The model first learns to count upwards. The adapters then teach it to count downwards, while all else stays as it is.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.layers import LoRA, lora_labels
from jax_te.models import GPTModel
from jax_te.recipe import Float8CurrentScaling, autocast
from jax_te.training import create_train_state, make_train_step

VOCAB, LENGTH = 64, 32


def build(rngs):
    config = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4)
    return GPTModel(config, vocab_size=VOCAB, max_sequence_length=LENGTH, rngs=rngs)


def add_adapters(model, rank, rngs):
    for layer in model.layers:
        attention = layer.self_attention
        attention.qkv = LoRA(attention.qkv, rank, rngs=rngs)
        attention.proj = LoRA(attention.proj, rank, rngs=rngs)
        layer.layernorm_mlp = LoRA(layer.layernorm_mlp, rank, rngs=rngs)
    return model


def merge_adapters(model):
    for layer in model.layers:
        attention = layer.self_attention
        attention.qkv, attention.proj = attention.qkv.merge(), attention.proj.merge()
        layer.layernorm_mlp = layer.layernorm_mlp.merge()
    return model


def batch(key, step):
    """Sequences that count up (step 1) or down (step -1), and what follows each of their tokens."""
    start = jax.random.randint(key, (16, 1), 0, VOCAB)
    tokens = (start + step * jnp.arange(LENGTH + 1)) % VOCAB
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(model, data, key):
    tokens, labels = data
    return model.loss(tokens, labels)


def train(build, tx, step, steps):
    state = create_train_state(build, tx, key=jax.random.key(0))
    train_step, losses = make_train_step(loss_fn, tx), []
    for i in range(steps):
        state, metrics = train_step(state, batch(jax.random.key(i), step))
        losses.append(float(metrics["loss"]))
    return state.model, losses


with autocast(Float8CurrentScaling()):
    model, losses = train(build, optax.adamw(3e-3), 1, 100)
    print(f"counting up, all parameters: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    pretrained: Any = nnx.to_pure_dict(nnx.state(model, nnx.Param))

    def build_adapted(rngs):
        copy = build(rngs)
        nnx.update(copy, nnx.state(model, nnx.Param))
        return add_adapters(copy, 8, rngs)

    # `lora_labels` keeps the optimizer away from everything but the adapters: no update, no moments.
    tx = optax.multi_transform({"lora": optax.adamw(1e-2), "frozen": optax.set_to_zero()}, lora_labels)
    adapted, losses = train(build_adapted, tx, -1, 150)
    print(f"counting down, adapters alone: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    if not losses[-1] < 0.5 * losses[0]:
        raise SystemExit(f"the adapters should halve the loss, it went from {losses[0]:.3f} to {losses[-1]:.3f}")
    mlp = adapted.layers[0].layernorm_mlp
    if not (mlp.base.wi_kernel[...] == pretrained["layers"][0]["layernorm_mlp"]["wi_kernel"]).all():
        raise SystemExit("the pretrained kernels should stay as they were")

    tokens, labels = batch(jax.random.key(1000), -1)
    before = float(adapted.loss(tokens, labels))
    merged = merge_adapters(adapted)
    after = float(merged.loss(tokens, labels))
    if nnx.to_flat_state(nnx.state(merged, nnx.LoRAParam)):
        raise SystemExit("a merged model should have no adapters")
    if not abs(after - before) < 0.1 * losses[0]:
        raise SystemExit(f"the merged model should have the adapted one's loss, {before:.3f}, it has {after:.3f}")

print(f"ok: merged, the model has its own layers again; loss {before:.2f} before, {after:.2f} after")
