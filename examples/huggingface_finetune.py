"""A checkpoint of Hugging Face in Llama's form, fine-tuned in FP8 and written back so that transformers loads it.

    python examples/huggingface_finetune.py

The checkpoint is made here, with random weights: by transformers if it is installed (pip install -e ".[parity]"), else
by jax_te. In your program it is a folder with config.json and model.safetensors.
"""

import importlib.util
import os
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jax_te.config import TransformerConfig
from jax_te.interop.huggingface import load_huggingface, save_huggingface
from jax_te.models import GPTModel
from jax_te.recipe import Float8CurrentScaling, autocast
from jax_te.training import create_train_state, make_train_step

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is loaded from the network
VOCAB, LENGTH, STEPS = 64, 32, 60
HAS_TRANSFORMERS = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def make_checkpoint(folder):
    if HAS_TRANSFORMERS:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": LENGTH}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=3)).save_pretrained(folder)
        return
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
    )
    model = GPTModel(
        config,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        rngs=nnx.Rngs(0),
    )
    save_huggingface(model, folder)


def batch(key):
    """Sequences that count upwards, and what follows each of their tokens."""
    start = jax.random.randint(key, (16, 1), 0, VOCAB)
    tokens = (start + jnp.arange(LENGTH + 1)) % VOCAB
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(model, data, key):
    return model.loss(*data)


with tempfile.TemporaryDirectory() as work:
    base, tuned = Path(work) / "base", Path(work) / "tuned"
    make_checkpoint(base)

    tx = optax.adamw(3e-3)
    with autocast(Float8CurrentScaling()):
        # Parameters and optimizer state in fp32, activations in bf16; on a mesh each device would read its part alone.
        model = load_huggingface(base, config={"compute_dtype": "bfloat16"})
        state = create_train_state(model, tx, key=jax.random.key(0))
        train_step, losses = make_train_step(loss_fn, tx), []
        for i in range(STEPS):
            state, metrics = train_step(state, batch(jax.random.key(i)))
            losses.append(float(metrics["loss"]))
    print(f"fine-tuned in FP8: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    if not losses[-1] < 0.5 * losses[0]:
        raise SystemExit(f"fine-tuning should halve the loss, it went from {losses[0]:.3f} to {losses[-1]:.3f}")

    # The tokenizer's files and the ids of special tokens come from the folder that was loaded.
    save_huggingface(state.model, tuned, like=base)
    print("written:", ", ".join(sorted(path.name for path in tuned.iterdir())))
    tokens, _ = batch(jax.random.key(1000))
    with jax.default_matmul_precision("highest"):  # a GPU would round fp32 operands to TF32
        ours = np.asarray(load_huggingface(tuned)(tokens))
    if HAS_TRANSFORMERS:
        import torch
        from transformers import LlamaForCausalLM

        with torch.no_grad():
            theirs = LlamaForCausalLM.from_pretrained(tuned)(torch.tensor(np.asarray(tokens))).logits.numpy()
        apart = np.abs(ours - theirs).max()
        print(f"logits of transformers differ by {apart:.1e}")
        if not apart < 1e-4 * np.abs(theirs).max():
            raise SystemExit("transformers should compute the same logits, up to the rounding of fp32")
    predicted = (ours[:, 8:-1].argmax(-1) == np.asarray(tokens)[:, 9:]).mean()
    if not predicted > 0.5:
        raise SystemExit(f"most of the next tokens should be predicted, {predicted:.0%} are")

print(f"ok: {predicted:.0%} of the next tokens are predicted by the checkpoint that was written")
