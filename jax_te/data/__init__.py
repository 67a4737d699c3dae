"""Text as tokens and batches, for training loops."""

from jax_te.data.batches import TrainBatches, heldout_batches
from jax_te.data.text import TextData, byte_bigram_entropy, load_text
from jax_te.data.tokenizer import ByteTokenizer, Tokenizer

__all__ = [
    "ByteTokenizer",
    "TextData",
    "Tokenizer",
    "TrainBatches",
    "byte_bigram_entropy",
    "heldout_batches",
    "load_text",
]
