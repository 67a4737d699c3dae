"""Text as tokens and batches, for training loops."""

from jax_te.data.batches import TrainBatches, check_vocabulary, heldout_batches, text_crc32, whole_batches
from jax_te.data.objectives import IGNORED, CorruptedSpans, MaskedTokens, NextTokens, Objective
from jax_te.data.sources import Tokens, read_tokens
from jax_te.data.text import TextData, byte_bigram_entropy, load_text
from jax_te.data.tokenizer import TOKENIZER_FILE, ByteTokenizer, Tokenizer

# For users. The other names above are for the other packages of jax_te.
__all__ = [
    "ByteTokenizer",
    "CorruptedSpans",
    "MaskedTokens",
    "NextTokens",
    "Objective",
    "TextData",
    "Tokenizer",
    "TrainBatches",
    "byte_bigram_entropy",
    "heldout_batches",
    "load_text",
]
