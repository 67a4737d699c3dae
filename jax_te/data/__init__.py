"""Text as tokens and batches, for training loops."""

from jax_te.data.text import TextData, TrainBatches, byte_bigram_entropy, heldout_batches, load_text

__all__ = [
    "TextData",
    "TrainBatches",
    "byte_bigram_entropy",
    "heldout_batches",
    "load_text",
]
